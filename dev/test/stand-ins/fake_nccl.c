/*
Stands in for libnccl.so.2 in tests: several processes of one machine, which may share one GPU (the real library refuses
that), or have none and use fake_cuda.c. LLMC_NCCL=$PWD/fake_nccl.so makes llmc/nccl.h load it.

    gcc -shared -fPIC -O1 -I/usr/local/cuda/include -o fake_nccl.so dev/test/stand-ins/fake_nccl.c        with fake_cuda.so, or where
                                                                        the program exports the CUDA runtime
    nvcc -shared -O1 -Xcompiler -fPIC -o fake_nccl.so dev/test/stand-ins/fake_nccl.c                      with a GPU

A collective goes through a shared memory with a slot for each rank, a piece of at most a slot at a time. Each piece is three
things on the stream, which a CUDA graph can hold as well: a copy from the device, a host function, a copy to the device.

    rank 0   inp -> buffer | buffer -> slot 0, barrier, slots 0..n-1 in this order -> buffer, barrier | buffer -> out
    rank 1   inp -> buffer | buffer -> slot 1, barrier, slots 0..n-1 in this order -> buffer, barrier | buffer -> out

So all ranks get the same bits, which do not depend on time: 16-bit numbers are added in fp32 and rounded once. The maximum
of NaN and a number is the number, as in NCCL (fmaxf in its reduce_kernel.h).

The shared memory is a memfd of the process that made the unique id. The others open it as /proc/PID/fd/N: it has no name, so
nothing is left behind, however the processes end.

A non-blocking communicator puts a collective on its stream at the second ncclCommGetAsyncError() after the call: a program
that does not wait for it loses it. The next call before that is refused, as by NCCL. A rank whose peer has died waits for it
for ever, until ncclCommAbort(). If two ranks do not make the same call, all ranks say so and end by abort(); so does a rank
whose collectives run at the same time on two streams.

FAKE_NCCL_FAIL      NAME:N:RESULT, more of them with commas between: the N-th call of the function NAME returns the
                    ncclResult_t of the number RESULT
FAKE_NCCL_HANG      NAME:N, likewise: a collective hangs on its stream; ncclCommInitRankConfig and ncclCommFinalize are never
                    done; after ncclGroupEnd or ncclCommGetAsyncError the communicator is busy for ever; others do not return
FAKE_NCCL_ASYNC     after so many collectives ncclCommGetAsyncError() reports ncclRemoteError
FAKE_NCCL_SLOW_MS   milliseconds that each collective takes
FAKE_NCCL_RANK      the four above are for this rank alone. Before it connects, a process is every rank
FAKE_NCCL_VERSION   default 21805
FAKE_NCCL_COUNT     file; at exit FILE.RANK gets the number of calls of each function, "calls NAME N", what ran on streams,
                    graphs included, "ran NAME N BYTES", and the configuration, "config BLOCKING MIN_CTAS MAX_CTAS"
*/
#include "../../../llmc/nccl.h"
#include <cuda_runtime_api.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_RANKS = 64, HEADER = 16384, SLOT = 1 << 20, UNDEFINED = INT_MIN };

typedef enum { ALL_REDUCE, REDUCE_SCATTER, REDUCE, ALL_GATHER, BROADCAST, NUM_KINDS } Kind;

// What all ranks must agree on.
typedef struct {
    int kind, type, reduction, root;
    uint64_t count;
} Call;

typedef struct {
    uint64_t token;
    int num_ranks, attached;
    struct {
        uint64_t steps; // barriers that the rank has come to
        Call call;
        int present;
        char padding[64];
    } rank[MAX_RANKS];
} Shared; // (HEADER bytes), then the slots
_Static_assert(sizeof(Shared) <= HEADER, "the slots begin behind it");

// A unique id, within its 128 bytes.
typedef struct {
    uint64_t token;
    int pid, fd;
} Id;

typedef struct Operation {
    struct ncclComm* comm;
    Call call;
    const char* inp;
    char* out;
    cudaStream_t stream;
    bool captured, hangs;
    struct Piece* pieces;
    struct Operation* next;
} Operation;

typedef struct Piece {
    Operation* operation;
    size_t bytes;
    int from, to; // ranks; -1: all of them
} Piece;

struct ncclComm {
    Id id;
    int rank, num_ranks, fd;
    bool blocking, connected, stuck;
    NcclResult state;
    int polls; // since the call that is in progress
    Shared* shared;
    char* buffer; // (SLOT), pinned
    Operation *waiting, *captured;
    long collectives;
    int aborted, busy; // atomic
    uint64_t steps;
};

// ---- faults and counts --------------------------------------------------------------------------

static const char* const function_names[] = {
    "ncclGetVersion",    "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclCommFinalize",
    "ncclCommDestroy",   "ncclCommAbort",   "ncclGroupStart",         "ncclGroupEnd",          "ncclAllReduce",
    "ncclReduceScatter", "ncclReduce",      "ncclAllGather",          "ncclBroadcast"};
enum { NUM_FUNCTIONS = sizeof(function_names) / sizeof(function_names[0]) };
static const char* const kind_names[NUM_KINDS] = {"all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast"};
static long calls[NUM_FUNCTIONS], runs[NUM_KINDS], run_bytes[NUM_KINDS];
static NcclConfig used_config;
static int my_rank = -1;
static char last_error[512];
static __thread int depth;              // of groups
static __thread NcclResult group_error; // of a call in the group
static __thread struct ncclComm* group; // the communicator of the calls in the group

// Ends the program because it misuses the library.
__attribute__((noreturn, format(printf, 1, 2))) static void misuse(const char* format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    fprintf(stderr, "fake_nccl: %s\n", line);
    abort();
}

__attribute__((format(printf, 2, 3))) static NcclResult fails(NcclResult result, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    if (depth > 0) { group_error = result; }
    return result;
}

// The same, and the communicator is of no use any more.
#define FAILS(comm, ...) ((comm)->state = fails(__VA_ARGS__))

static long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && text[0] ? atol(text) : otherwise;
}
static bool faulty(void) { return my_rank < 0 || setting("FAKE_NCCL_RANK", my_rank) == my_rank; }

static long count_call(const char* name) {
    int i = 0;
    while (strcmp(function_names[i], name) != 0) { i++; }
    return __atomic_add_fetch(&calls[i], 1, __ATOMIC_RELAXED);
}

// The number that a list NAME:N:NUMBER,... has for this call; 0 if the call is not in it, 1 if it has none.
static int fault(const char* variable, const char* name, long call) {
    const char* list = faulty() ? getenv(variable) : NULL;
    for (; list && list[0]; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL) {
        char wanted[64];
        long number;
        int result = 1;
        if (sscanf(list, "%63[^:]:%ld:%d", wanted, &number, &result) < 2) { misuse("%s: '%s'?", variable, list); }
        if (strcmp(wanted, name) == 0 && number == call) { return result; }
    }
    return 0;
}

// Counts a call. Returns from it with the error that it must return; `hangs`: whether it must hang.
#define CALLED(hangs)                                                                                                  \
    long call_ = count_call(__func__);                                                                                 \
    int result_ = fault("FAKE_NCCL_FAIL", __func__, call_);                                                            \
    if (result_) { return fails((NcclResult)result_, "%s was told to fail", __func__); }                               \
    bool hangs = fault("FAKE_NCCL_HANG", __func__, call_) != 0

static void hang(bool hangs) {
    while (hangs) { pause(); }
}

__attribute__((destructor)) static void write_counts(void) {
    char path[4096];
    const char* name = getenv("FAKE_NCCL_COUNT");
    if (!name || my_rank < 0) { return; }
    snprintf(path, sizeof(path), "%s.%d", name, my_rank);
    FILE* f = fopen(path, "w");
    if (!f) { return; }
    for (int i = 0; i < NUM_FUNCTIONS; i++) { fprintf(f, "calls %s %ld\n", function_names[i], calls[i]); }
    for (int i = 0; i < NUM_KINDS; i++) { fprintf(f, "ran %s %ld %ld\n", kind_names[i], runs[i], run_bytes[i]); }
    fprintf(f, "config %d %d %d\n", used_config.blocking, used_config.min_ctas, used_config.max_ctas);
    fclose(f);
}

// ---- on the stream ------------------------------------------------------------------------------

static bool aborted(const struct ncclComm* comm) { return __atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE); }

static void rest_us(long us) {
    struct timespec rest = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&rest, NULL);
}

// Waits until all ranks have come here. False after an abort.
static bool barrier(struct ncclComm* comm) {
    uint64_t step = ++comm->steps;
    __atomic_store_n(&comm->shared->rank[comm->rank].steps, step, __ATOMIC_RELEASE);
    for (int r = 0; r < comm->num_ranks; r++) {
        for (int tries = 0; __atomic_load_n(&comm->shared->rank[r].steps, __ATOMIC_ACQUIRE) < step; tries++) {
            if (aborted(comm)) { return false; }
            if (tries < 100) {
                sched_yield();
            } else {
                rest_us(50);
            }
        }
    }
    return !aborted(comm);
}

static char* slot(const struct ncclComm* comm, int rank) { return (char*)comm->shared + HEADER + (size_t)rank * SLOT; }

static float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}
static uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return f != f ? 0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
#define SAME(x) (x)

// Adds as SUM, which is unsigned for integers: they wrap around.
#define REDUCE(TYPE, WIDE, SUM, LOAD, STORE)                                                                           \
    for (size_t i = 0; i < bytes / sizeof(TYPE); i++) {                                                                \
        WIDE x = (WIDE)LOAD(((const TYPE*)(const void*)slot(comm, 0))[i]);                                             \
        for (int r = 1; r < comm->num_ranks; r++) {                                                                    \
            WIDE y = (WIDE)LOAD(((const TYPE*)(const void*)slot(comm, r))[i]);                                         \
            x = call->reduction == NCCL_SUM ? (WIDE)((SUM)x + (SUM)y) : x >= y || y != y ? x : y;                      \
        }                                                                                                              \
        ((TYPE*)(void*)comm->buffer)[i] = (TYPE)STORE(x);                                                              \
    }                                                                                                                  \
    break

static void reduce(struct ncclComm* comm, const Call* call, size_t bytes) {
    switch (call->type) {
    case NCCL_INT8:
        REDUCE(int8_t, int8_t, uint8_t, SAME, SAME);
    case NCCL_UINT8:
        REDUCE(uint8_t, uint8_t, uint8_t, SAME, SAME);
    case NCCL_INT32:
        REDUCE(int32_t, int32_t, uint32_t, SAME, SAME);
    case NCCL_UINT32:
        REDUCE(uint32_t, uint32_t, uint32_t, SAME, SAME);
    case NCCL_INT64:
        REDUCE(int64_t, int64_t, uint64_t, SAME, SAME);
    case NCCL_UINT64:
        REDUCE(uint64_t, uint64_t, uint64_t, SAME, SAME);
    case NCCL_FLOAT32:
        REDUCE(float, float, float, SAME, SAME);
    case NCCL_FLOAT64:
        REDUCE(double, double, double, SAME, SAME);
    case NCCL_BFLOAT16:
        REDUCE(uint16_t, float, float, from_bf16, to_bf16);
#ifdef __FLT16_MAX__
    case NCCL_FLOAT16:
        REDUCE(_Float16, float, float, SAME, SAME);
#endif
    default:
        misuse("type %d is not known here", call->type);
    }
}

static void describe(char text[128], const Call* c) {
    static const char* const types[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                        "uint64", "float16", "float32", "float64", "bfloat16"};
    const char* how = c->kind > REDUCE ? "" : c->reduction == NCCL_SUM ? " (sum)" : " (max)";
    int n =
        snprintf(text, 128, "%s%s of %llu %s", kind_names[c->kind], how, (unsigned long long)c->count, types[c->type]);
    if (c->kind == BROADCAST) { snprintf(text + n, 128 - (size_t)n, " from rank %d", c->root); }
    if (c->kind == REDUCE) { snprintf(text + n, 128 - (size_t)n, " to rank %d", c->root); }
}

static void compare_calls(const struct ncclComm* comm) {
    char mine[128], theirs[128];
    for (int r = 1; r < comm->num_ranks; r++) {
        const Call *first = &comm->shared->rank[0].call, *other = &comm->shared->rank[r].call;
        if (memcmp(first, other, sizeof(*first)) == 0) { continue; }
        describe(mine, first);
        describe(theirs, other);
        misuse("rank 0 calls %s, rank %d calls %s: all ranks must make the same calls in the same order", mine, r,
               theirs);
    }
}

static void begin(void* data) {
    Operation* o = (Operation*)data;
    struct ncclComm* comm = o->comm;
    if (__atomic_exchange_n(&comm->busy, 1, __ATOMIC_ACQ_REL) && !aborted(comm)) {
        misuse("rank %d: two collectives run at the same time on two streams: order them by an event", comm->rank);
    }
    comm->shared->rank[comm->rank].call = o->call;
    if (faulty()) { rest_us(1000 * setting("FAKE_NCCL_SLOW_MS", 0)); }
    while (o->hangs && !aborted(comm)) { rest_us(1000); }
}

static void meet(void* data) {
    const Piece* piece = (const Piece*)data;
    struct ncclComm* comm = piece->operation->comm;
    bool sends = piece->from < 0 || piece->from == comm->rank, receives = piece->to < 0 || piece->to == comm->rank;
    if (aborted(comm)) { return; }
    if (sends) { memcpy(slot(comm, comm->rank), comm->buffer, piece->bytes); }
    if (!barrier(comm)) { return; }
    compare_calls(comm);
    if (piece->from >= 0) {
        memcpy(comm->buffer, slot(comm, piece->from), piece->bytes);
    } else if (receives) {
        reduce(comm, &piece->operation->call, piece->bytes);
    }
    barrier(comm);
}

static void free_operation(Operation* o) {
    free(o->pieces);
    free(o);
}
static void end(void* data) {
    Operation* o = (Operation*)data;
    bool parts = o->call.kind == REDUCE_SCATTER || o->call.kind == ALL_GATHER;
    size_t bytes = o->call.count * nccl_type_size((NcclType)o->call.type) * (size_t)(parts ? o->comm->num_ranks : 1);
    __atomic_add_fetch(&runs[o->call.kind], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&run_bytes[o->call.kind], (long)bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&o->comm->busy, 0, __ATOMIC_RELEASE);
    if (!o->captured) { free_operation(o); }
}

// Puts an operation on its stream.
static cudaError_t put(Operation* o) {
    struct ncclComm* comm = o->comm;
    int kind = o->call.kind, num_parts = kind == REDUCE_SCATTER || kind == ALL_GATHER ? comm->num_ranks : 1;
    size_t part = o->call.count * nccl_type_size((NcclType)o->call.type), in_part = (part + SLOT - 1) / SLOT, used = 0;
    enum cudaStreamCaptureStatus status;
    cudaError_t e = cudaStreamIsCapturing(o->stream, &status);
    if (e != cudaSuccess) { return e; }
    o->captured = status != cudaStreamCaptureStatusNone;
    if (o->captured) { // a graph may run it again and again
        o->next = comm->captured;
        comm->captured = o;
    }
    o->pieces = (Piece*)calloc_check((size_t)num_parts * in_part, sizeof(Piece));
    e = cudaLaunchHostFunc(o->stream, begin, o);
    for (int p = 0; p < num_parts; p++) {
        for (size_t at = 0; at < part && e == cudaSuccess; at += SLOT) {
            const char* inp = o->inp + (kind == REDUCE_SCATTER ? (size_t)p * part : 0) + at;
            char* out = o->out + (kind == ALL_GATHER ? (size_t)p * part : 0) + at;
            Piece piece = {o, part - at < SLOT ? part - at : SLOT, -1, kind == REDUCE_SCATTER ? p : -1};
            if (kind == REDUCE) { piece.to = o->call.root; }
            if (kind >= ALL_GATHER) { piece.from = kind == ALL_GATHER ? p : o->call.root; }
            bool sends = piece.from < 0 || piece.from == comm->rank, receives = piece.to < 0 || piece.to == comm->rank;
            o->pieces[used] = piece;
            if (sends) { e = cudaMemcpyAsync(comm->buffer, inp, piece.bytes, cudaMemcpyDeviceToHost, o->stream); }
            if (e == cudaSuccess) { e = cudaLaunchHostFunc(o->stream, meet, &o->pieces[used++]); }
            if (receives && e == cudaSuccess) {
                e = cudaMemcpyAsync(out, comm->buffer, piece.bytes, cudaMemcpyHostToDevice, o->stream);
            }
        }
    }
    return e == cudaSuccess ? cudaLaunchHostFunc(o->stream, end, o) : e;
}

// ---- communicators ------------------------------------------------------------------------------

// Joins the shared memory as soon as it exists. Returns ncclInProgress until all ranks have done so.
static NcclResult connect_ranks(struct ncclComm* comm) {
    char path[64];
    size_t bytes = HEADER + (size_t)comm->num_ranks * SLOT;
    int unset = 0;
    if (!comm->shared) {
        snprintf(path, sizeof(path), "/proc/%d/fd/%d", comm->id.pid, comm->id.fd);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0) { return NCCL_IN_PROGRESS; } // its process has ended
        uint64_t token = 0;
        bool ok = pread(fd, &token, sizeof(token), 0) == sizeof(token) && token == comm->id.token;
        void* p = ok && ftruncate(fd, (off_t)bytes) == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                                                         : MAP_FAILED;
        close(fd);
        if (!ok) { return NCCL_IN_PROGRESS; } // and another one has its number
        if (p == MAP_FAILED) {
            return fails(NCCL_SYSTEM_ERROR, "%zu bytes of shared memory: %s", bytes, strerror(errno));
        }
        comm->shared = (Shared*)p;
        if (!__atomic_compare_exchange_n(&comm->shared->num_ranks, &unset, comm->num_ranks, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE) &&
            unset != comm->num_ranks) {
            return fails(NCCL_INVALID_USAGE, "%d ranks here, %d elsewhere", comm->num_ranks, unset);
        }
        if (__atomic_exchange_n(&comm->shared->rank[comm->rank].present, 1, __ATOMIC_ACQ_REL)) {
            return fails(NCCL_INVALID_USAGE, "there are two ranks %d", comm->rank);
        }
        __atomic_add_fetch(&comm->shared->attached, 1, __ATOMIC_ACQ_REL);
    }
    if (__atomic_load_n(&comm->shared->attached, __ATOMIC_ACQUIRE) < comm->num_ranks) { return NCCL_IN_PROGRESS; }
    cudaError_t e = cudaMallocHost((void**)&comm->buffer, SLOT);
    if (e != cudaSuccess) { return fails(NCCL_UNHANDLED_CUDA_ERROR, "Cuda failure '%s'", cudaGetErrorString(e)); }
    comm->connected = true;
    return NCCL_SUCCESS;
}

static void invent_error(struct ncclComm* comm) {
    long limit = faulty() ? setting("FAKE_NCCL_ASYNC", 0) : 0;
    if (comm->state == NCCL_SUCCESS && limit > 0 && comm->collectives >= limit) {
        FAILS(comm, NCCL_REMOTE_ERROR, "connection closed by a peer that FAKE_NCCL_ASYNC invented");
    }
}

// Goes on with what is in progress.
static void progress(struct ncclComm* comm) {
    invent_error(comm);
    if (comm->state != NCCL_IN_PROGRESS || comm->stuck || comm->polls++ == 0) { return; }
    if (!comm->connected) {
        comm->state = connect_ranks(comm);
        return;
    }
    comm->state = NCCL_SUCCESS;
    while (comm->waiting && comm->state == NCCL_SUCCESS) {
        Operation* o = comm->waiting;
        comm->waiting = o->next;
        o->next = NULL;
        cudaError_t e = put(o);
        if (e == cudaSuccess) { continue; }
        FAILS(comm, NCCL_UNHANDLED_CUDA_ERROR, "Cuda failure '%s'", cudaGetErrorString(e));
    }
}

// Begins what progress() goes on with. Returns at once, or when it is done.
static NcclResult launch(struct ncclComm* comm) {
    comm->state = NCCL_IN_PROGRESS;
    comm->polls = 0;
    while (comm->blocking && comm->state == NCCL_IN_PROGRESS && !aborted(comm)) {
        progress(comm);
        if (comm->state == NCCL_IN_PROGRESS) { rest_us(100); }
    }
    return comm->state;
}

static NcclResult ready(struct ncclComm* comm) {
    if (!comm || comm->rank < 0) { misuse("a communicator that was destroyed, aborted or never made"); }
    invent_error(comm);
    if (comm->state == NCCL_IN_PROGRESS) {
        FAILS(comm, NCCL_INVALID_ARGUMENT,
              "Attempt to use communicator before the previous operation returned ncclSuccess");
    }
    return comm->state;
}

EXPORT NcclResult ncclGetVersion(int* version) {
    CALLED(hangs);
    hang(hangs);
    *version = (int)setting("FAKE_NCCL_VERSION", 21805);
    return NCCL_SUCCESS;
}

EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) {
    CALLED(hangs);
    hang(hangs);
    Id made = {0, (int)getpid(), memfd_create("fake_nccl", MFD_CLOEXEC)};
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    made.token = ((uint64_t)t.tv_sec << 32 ^ (uint64_t)t.tv_nsec << 16 ^ (uint64_t)made.fd) | 1;
    if (made.fd < 0 || pwrite(made.fd, &made.token, sizeof(made.token), 0) != sizeof(made.token)) {
        return fails(NCCL_SYSTEM_ERROR, "memfd_create: %s", strerror(errno));
    }
    memset(id, 0, sizeof(*id));
    memcpy(id, &made, sizeof(made));
    return NCCL_SUCCESS;
}

EXPORT NcclResult ncclCommInitRankConfig(struct ncclComm** out, int num_ranks, NcclUniqueId id, int rank,
                                         NcclConfig* config) {
    *out = NULL;
    my_rank = rank;
    CALLED(hangs);
    if (config->size < sizeof(*config) || config->magic != 0xcafebeef || config->version < 21800) {
        return fails(NCCL_INVALID_ARGUMENT, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    }
    if ((config->min_ctas != UNDEFINED && config->min_ctas <= 0) ||
        (config->max_ctas != UNDEFINED && config->max_ctas <= 0) || config->min_ctas > config->max_ctas) {
        return fails(NCCL_INVALID_ARGUMENT, "Invalid config min/max channels attribute value %d/%d", config->min_ctas,
                     config->max_ctas);
    }
    if (rank < 0 || rank >= num_ranks || num_ranks > MAX_RANKS) {
        return fails(NCCL_INVALID_ARGUMENT, "Invalid rank requested : %d/%d", rank, num_ranks);
    }
    used_config = *config;
    struct ncclComm* comm = (struct ncclComm*)calloc_check(1, sizeof(*comm));
    memcpy(&comm->id, &id, sizeof(comm->id));
    comm->rank = rank;
    comm->num_ranks = num_ranks;
    comm->blocking = setting("NCCL_COMM_BLOCKING", config->blocking == UNDEFINED || config->blocking) != 0;
    comm->stuck = hangs;
    *out = comm;
    return launch(comm);
}

EXPORT NcclResult ncclCommGetAsyncError(struct ncclComm* comm, NcclResult* state) {
    CALLED(hangs);
    if (!comm || comm->rank < 0) { misuse("a communicator that was destroyed, aborted or never made"); }
    progress(comm);
    if (hangs) { comm->state = NCCL_IN_PROGRESS; }
    comm->stuck = comm->stuck || hangs;
    *state = comm->state;
    return NCCL_SUCCESS;
}

EXPORT NcclResult ncclCommFinalize(struct ncclComm* comm) {
    CALLED(hangs);
    NcclResult result = ready(comm);
    comm->stuck = hangs;
    return result == NCCL_SUCCESS ? launch(comm) : result;
}

EXPORT NcclResult ncclCommDestroy(struct ncclComm* comm) {
    CALLED(hangs);
    hang(hangs);
    NcclResult result = ready(comm);
    if (result != NCCL_SUCCESS) { return result; }
    if (cudaDeviceSynchronize() != cudaSuccess || cudaFreeHost(comm->buffer) != cudaSuccess) {
        return fails(NCCL_UNHANDLED_CUDA_ERROR, "Cuda failure");
    }
    munmap(comm->shared, HEADER + (size_t)comm->num_ranks * SLOT);
    while (comm->captured) {
        Operation* o = comm->captured;
        comm->captured = o->next;
        free_operation(o);
    }
    comm->rank = -1; // never freed, so that a later use is noticed
    return NCCL_SUCCESS;
}

// Frees nothing: what is on the streams still runs, and does nothing.
EXPORT NcclResult ncclCommAbort(struct ncclComm* comm) {
    CALLED(hangs);
    __atomic_store_n(&comm->aborted, 1, __ATOMIC_RELEASE);
    hang(hangs);
    return NCCL_SUCCESS;
}

EXPORT const char* ncclGetErrorString(NcclResult result) {
    static const char* const texts[] = {"no error",
                                        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                        "internal error - please report this issue to the NCCL developers",
                                        "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                        "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= NCCL_SUCCESS && result <= NCCL_IN_PROGRESS ? texts[result] : "unknown result code";
}
EXPORT const char* ncclGetLastError(struct ncclComm* comm) { return (void)comm, last_error; }

// ---- collectives --------------------------------------------------------------------------------

EXPORT NcclResult ncclGroupStart(void) {
    CALLED(hangs);
    hang(hangs);
    depth++;
    return NCCL_SUCCESS;
}
EXPORT NcclResult ncclGroupEnd(void) {
    struct ncclComm* comm = group;
    if (depth == 0) { misuse("ncclGroupEnd: not in a group call."); }
    if (--depth > 0) { return NCCL_SUCCESS; }
    NcclResult error = group_error;
    group = NULL;
    group_error = NCCL_SUCCESS;
    if (error != NCCL_SUCCESS) { return error; }
    CALLED(hangs);
    if (!comm) { return NCCL_SUCCESS; }
    if (comm->state != NCCL_SUCCESS) { return comm->state; }
    comm->stuck = hangs;
    return launch(comm);
}

static bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

static NcclResult collective(struct ncclComm* comm, const Call* call, const void* inp, void* out, void* stream,
                             bool hangs) {
    NcclResult result = ready(comm);
    if (result != NCCL_SUCCESS) { return result; }
    if (group && group != comm) { misuse("a group with two communicators"); }
    size_t part = call->count * nccl_type_size((NcclType)call->type), all = part * (size_t)comm->num_ranks;
    size_t inp_bytes = call->kind == REDUCE_SCATTER ? all : part, out_bytes = call->kind == ALL_GATHER ? all : part;
    size_t mine = (size_t)comm->rank * part;
    bool in_place = call->kind == REDUCE_SCATTER ? out == (const char*)inp + mine
                    : call->kind == ALL_GATHER   ? inp == (const char*)out + mine
                                                 : out == inp;
    bool both = (call->kind != BROADCAST && call->kind != REDUCE) || call->root == comm->rank;
    if (both && !in_place && overlap((const char*)inp, inp_bytes, (const char*)out, out_bytes)) {
        misuse("rank %d: %s: its input and its output overlap", comm->rank, kind_names[call->kind]);
    }
    if (call->root < 0 || call->root >= comm->num_ranks) {
        return FAILS(comm, NCCL_INVALID_ARGUMENT, "invalid root %d", call->root);
    }
    if (call->count == 0) { return NCCL_SUCCESS; } // as NCCL does, for this rank alone
    Operation* o = (Operation*)calloc_check(1, sizeof(*o));
    Operation** last = &comm->waiting;
    o->comm = comm;
    o->call = *call;
    o->inp = (const char*)inp;
    o->out = (char*)out;
    o->stream = (cudaStream_t)stream;
    o->hangs = hangs;
    while (*last) { last = &(*last)->next; }
    *last = o;
    comm->collectives++;
    if (depth == 0) { return launch(comm); }
    group = comm;
    return NCCL_SUCCESS;
}

EXPORT NcclResult ncclAllReduce(const void* inp, void* out, size_t count, NcclType type, NcclReduction reduction,
                                struct ncclComm* comm, void* stream) {
    CALLED(hangs);
    Call call = {ALL_REDUCE, (int)type, (int)reduction, 0, count};
    return collective(comm, &call, inp, out, stream, hangs);
}
EXPORT NcclResult ncclReduceScatter(const void* inp, void* out, size_t count, NcclType type, NcclReduction reduction,
                                    struct ncclComm* comm, void* stream) {
    CALLED(hangs);
    Call call = {REDUCE_SCATTER, (int)type, (int)reduction, 0, count};
    return collective(comm, &call, inp, out, stream, hangs);
}
EXPORT NcclResult ncclReduce(const void* inp, void* out, size_t count, NcclType type, NcclReduction reduction, int root,
                             struct ncclComm* comm, void* stream) {
    CALLED(hangs);
    Call call = {REDUCE, (int)type, (int)reduction, root, count};
    return collective(comm, &call, inp, out, stream, hangs);
}
EXPORT NcclResult ncclAllGather(const void* inp, void* out, size_t count, NcclType type, struct ncclComm* comm,
                                void* stream) {
    CALLED(hangs);
    Call call = {ALL_GATHER, (int)type, 0, 0, count};
    return collective(comm, &call, inp, out, stream, hangs);
}
EXPORT NcclResult ncclBroadcast(const void* inp, void* out, size_t count, NcclType type, int root,
                                struct ncclComm* comm, void* stream) {
    CALLED(hangs);
    Call call = {BROADCAST, (int)type, 0, root, count};
    return collective(comm, &call, inp, out, stream, hangs);
}
