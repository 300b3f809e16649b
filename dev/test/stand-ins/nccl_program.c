/*
Several ranks that use llmc/nccl.h, for test_nccl.sh; each rank is a child process.

    nccl_program NUM_RANKS SCENARIO

It prints what each rank has to say, in order of ranks, and how it ended: "rank 1: exit 0". Exits with 0 if all ranks do.
With a real NCCL, and a GPU for each rank, `NCCL_TOLERANCE=1e-2 nccl_program 2 collectives` is a test of it.
*/
#include "../../../llmc/nccl.h"
#include <cuda_runtime_api.h>
#include <math.h>
#include <sys/wait.h>

enum { MAX_RANKS = 16 };

static struct {
    NcclUniqueId id;
    int ready;
} * common; // shared by all ranks
static Nccl nccl;
static NcclComm comm;
static int rank, num_ranks;
static cudaStream_t stream;
static double tolerance;

#define cuda(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_ != cudaSuccess) { die("%s: %s", #call, cudaGetErrorString(e_)); }                                       \
    } while (0)

static void pause_ms(long ms) {
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&rest, NULL);
}

// Loads NCCL, takes a device and gets the id from rank 0.
static void start(void) {
    Error err;
    int devices = 0;
    if (!nccl_open(&nccl, &err)) { die("%s", err.text); }
    cuda(cudaGetDeviceCount(&devices));
    cuda(cudaSetDevice(rank % devices));
    cuda(cudaStreamCreate(&stream));
    if (rank == 0) {
        if (!nccl_unique_id(&nccl, &common->id, &err)) { die("%s", err.text); }
        __atomic_store_n(&common->ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&common->ready, __ATOMIC_ACQUIRE)) { pause_ms(1); }
}

static bool open_ranks(double limit_ms, Error* err) {
    NcclOptions options = {limit_ms, NULL, 2, 8};
    return nccl_comm_open(&comm, &nccl, &common->id, rank, num_ranks, &options, err);
}

static void finish(void) {
    Error err;
    if (!nccl_comm_close(&comm, &err)) { die("%s", err.text); }
    cuda(cudaStreamDestroy(stream));
}

// ---- the collectives ------------------------------------------------------------------------------

#ifdef __FLT16_MAX__
typedef _Float16 Half;
#else
typedef float Half; // a compiler without it: not tested
#endif

static float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}
static uint16_t float_to_bf16(float f) { // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    uint32_t low = bits & 0xFFFF, high = bits >> 16;
    return (uint16_t)(high + (low > 0x8000 || (low == 0x8000 && (high & 1))));
}

static void put_number(void* p, size_t i, NcclType type, double x) {
    switch (type) {
    case NCCL_INT8:
        ((int8_t*)p)[i] = (int8_t)x;
        break;
    case NCCL_UINT8:
        ((uint8_t*)p)[i] = (uint8_t)x;
        break;
    case NCCL_INT64:
        ((int64_t*)p)[i] = (int64_t)x;
        break;
    case NCCL_UINT64:
        ((uint64_t*)p)[i] = (uint64_t)x;
        break;
    case NCCL_FLOAT16:
        ((Half*)p)[i] = (Half)(float)x;
        break;
    case NCCL_BFLOAT16:
        ((uint16_t*)p)[i] = float_to_bf16((float)x);
        break;
    case NCCL_FLOAT32:
        ((float*)p)[i] = (float)x;
        break;
    default:
        ((double*)p)[i] = x;
    }
}
static double get_number(const void* p, size_t i, NcclType type) {
    switch (type) {
    case NCCL_INT8:
        return ((const int8_t*)p)[i];
    case NCCL_UINT8:
        return ((const uint8_t*)p)[i];
    case NCCL_INT64:
        return (double)((const int64_t*)p)[i];
    case NCCL_UINT64:
        return (double)((const uint64_t*)p)[i];
    case NCCL_FLOAT16:
        return (float)((const Half*)p)[i];
    case NCCL_BFLOAT16:
        return bf16_to_float(((const uint16_t*)p)[i]);
    case NCCL_FLOAT32:
        return ((const float*)p)[i];
    default:
        return ((const double*)p)[i];
    }
}

// Number i of rank r, as the type holds it. Their sums are inexact in floating point, so that the order shows.
static double number(int r, size_t i, NcclType type) {
    char one[8];
    long n = (long)((i * 7 + (size_t)r * 13 + i / 101) % 103);
    bool whole = type == NCCL_INT8 || type == NCCL_UINT8 || type == NCCL_INT64 || type == NCCL_UINT64;
    put_number(one, 0, type, whole ? (double)(n % 11) : (double)(n - 51) * 0.37);
    return get_number(one, 0, type);
}

// The sum or maximum of number i of all ranks: in order of ranks, in double, or else in float, and rounded once.
static double reduced(size_t i, NcclType type, NcclReduction op) {
    char one[8];
    double x = number(0, i, type);
    for (int r = 1; r < num_ranks; r++) {
        double y = number(r, i, type);
        bool narrow = type == NCCL_FLOAT16 || type == NCCL_BFLOAT16 || type == NCCL_FLOAT32;
        x = op == NCCL_MAX ? fmax(x, y) : narrow ? (double)((float)x + (float)y) : x + y;
    }
    put_number(one, 0, type, x);
    return get_number(one, 0, type);
}

typedef enum { ALL_REDUCE, REDUCE_SCATTER, REDUCE, ALL_GATHER, BROADCAST } Kind;
static const char* const names[] = {"all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast"};

static bool call(Kind kind, void* out, const void* inp, size_t count, NcclType type, NcclReduction op, int root,
                 Error* err) {
    switch (kind) {
    case ALL_REDUCE:
        return nccl_all_reduce(&comm, out, inp, count, type, op, stream, err);
    case REDUCE_SCATTER:
        return nccl_reduce_scatter(&comm, out, inp, count, type, op, stream, err);
    case REDUCE:
        return nccl_reduce(&comm, rank == root ? out : NULL, inp, count, type, op, root, stream, err);
    case ALL_GATHER:
        return nccl_all_gather(&comm, out, inp, count, type, stream, err);
    default:
        return nccl_broadcast(&comm, out, inp, count, type, root, stream, err);
    }
}

// One collective, `launches` times: by itself (0), or captured into a graph. Compares all numbers.
static void check_collective(Kind kind, size_t count, NcclType type, NcclReduction op, bool in_place, int launches) {
    Error err;
    int root = num_ranks - 1;
    size_t size = nccl_type_size(type), n = (size_t)num_ranks, mine = (size_t)rank * count;
    size_t num_inp = kind == REDUCE_SCATTER ? n * count : count, num_out = kind == ALL_GATHER ? n * count : count;
    if (kind == REDUCE && rank != root) { num_out = 0; }
    char *device, *host = (char*)calloc_check(2 * n * count, size);
    // inp at the beginning, out behind it; in place, the smaller of them is a part of the other
    cuda(cudaMalloc((void**)&device, 2 * n * count * size));
    size_t inp_at = in_place && kind == ALL_GATHER ? mine : 0;
    size_t out_at = !in_place ? n * count : kind == REDUCE_SCATTER ? mine : 0;
    for (size_t i = 0; i < num_inp; i++) { put_number(host, inp_at + i, type, number(rank, i, type)); }
    char *inp = device + inp_at * size, *out = device + out_at * size;
    cuda(cudaMemcpy(device, host, 2 * n * count * size, cudaMemcpyHostToDevice));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (launches > 0) { cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); }
    if (!call(kind, out, inp, count, type, op, root, &err)) { die("%s", err.text); }
    if (launches > 0) {
        cuda(cudaStreamEndCapture(stream, &graph));
        cuda(cudaGraphInstantiate(&exec, graph, 0));
        for (int i = 0; i < launches; i++) { cuda(cudaGraphLaunch(exec, stream)); }
    }
    cuda(cudaStreamSynchronize(stream));
    cuda(cudaMemcpy(host, device, 2 * n * count * size, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < num_out; i++) {
        double got = get_number(host, out_at + i, type), want;
        switch (kind) {
        case ALL_REDUCE:
        case REDUCE:
            want = reduced(i, type, op);
            break;
        case REDUCE_SCATTER:
            want = reduced(mine + i, type, op);
            break;
        case ALL_GATHER:
            want = number((int)(i / count), i % count, type);
            break;
        default:
            want = number(root, i, type);
        }
        if (!(fabs(got - want) <= tolerance * fabs(want))) {
            die("%s, type %d, reduction %d, %zu numbers%s, number %zu: got %.9g, want %.9g", names[kind], (int)type,
                (int)op, count, in_place ? " in place" : "", i, got, want);
        }
    }
    if (launches > 0) {
        cuda(cudaGraphExecDestroy(exec));
        cuda(cudaGraphDestroy(graph));
    }
    cuda(cudaFree(device));
    free(host);
}

static void run_collectives(void) {
    static const NcclType types[] = {NCCL_FLOAT32, NCCL_BFLOAT16, NCCL_FLOAT16, NCCL_FLOAT64,
                                     NCCL_INT8,    NCCL_UINT8,    NCCL_INT64,   NCCL_UINT64};
    Error err;
    start();
    if (!open_ranks(20e3, &err)) { die("%s", err.text); }
    for (int k = ALL_REDUCE; k <= BROADCAST; k++) {
        for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
            if (types[t] == NCCL_FLOAT16 && sizeof(Half) != 2) { continue; }
            for (int in_place = 0; in_place < 2; in_place++) {
                check_collective((Kind)k, 1, types[t], NCCL_SUM, in_place, 0);
                check_collective((Kind)k, 1000, types[t], NCCL_SUM, in_place, 0);
                if (k <= REDUCE) { check_collective((Kind)k, 333, types[t], NCCL_MAX, in_place, 0); }
            }
        }
        check_collective((Kind)k, 300001, NCCL_FLOAT32, NCCL_SUM, true, 0); // more than a slot of the stand-in
        check_collective((Kind)k, 300001, NCCL_FLOAT32, NCCL_SUM, false, 1);
        check_collective((Kind)k, 77, NCCL_FLOAT32, NCCL_SUM, false, 3);
    }
    finish();
}

// A group of three, where the first fills the input of nothing else, and a call that fails inside a group.
static void run_group(void) {
    Error err;
    float *device, host[64], got[64];
    start();
    if (!open_ranks(20e3, &err)) { die("%s", err.text); }
    cuda(cudaMalloc((void**)&device, sizeof(host)));
    for (int i = 0; i < 64; i++) { host[i] = (float)(rank + 1); }
    cuda(cudaMemcpy(device, host, sizeof(host), cudaMemcpyHostToDevice));
    if (!nccl_group_start(&comm, &err) ||
        !nccl_all_reduce(&comm, device, device, 8, NCCL_FLOAT32, NCCL_SUM, stream, &err) ||
        !nccl_all_reduce(&comm, device + 8, device + 8, 8, NCCL_FLOAT32, NCCL_MAX, stream, &err) ||
        !nccl_broadcast(&comm, device + 16, device + 16, 8, NCCL_FLOAT32, 0, stream, &err) ||
        !nccl_all_reduce(&comm, NULL, NULL, 0, NCCL_FLOAT32, NCCL_SUM, stream, &err) || !nccl_group_end(&comm, &err)) {
        die("%s", err.text);
    }
    cuda(cudaStreamSynchronize(stream));
    cuda(cudaMemcpy(got, device, sizeof(got), cudaMemcpyDeviceToHost));
    printf("sum %g, maximum %g, broadcast %g, rest %g\n", got[0], got[15], got[16], got[24]);
    bool started = nccl_group_start(&comm, &err);
    bool ok = started && nccl_broadcast(&comm, device, device, 8, NCCL_FLOAT32, 99, stream, &err);
    printf("%s\n", ok ? "no error" : err.text);
    printf("%s\n", nccl_group_end(&comm, &err) ? "no error at the end" : err.text);
    cuda(cudaFree(device));
    nccl_comm_abort(&comm);
}

// What a step does with a second stream for NCCL: the first fills a buffer, the second reduces it when that is done, and the
// first copies the result. Then the same captured into a graph, in which the second stream joins the capture.
static void run_streams(void) {
    Error err;
    cudaStream_t work;
    cudaEvent_t filled, reduced_event;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float *device, copy[2];
    int polls, gpu;
    start();
    if (!open_ranks(20e3, &err)) { die("%s", err.text); }
    cuda(cudaGetDevice(&gpu));
    cuda(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking));
    cuda(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming));
    cuda(cudaEventCreateWithFlags(&reduced_event, cudaEventDisableTiming));
    cuda(cudaMalloc((void**)&device, 2 * sizeof(float)));
    for (int captured = 0; captured < 2; captured++) {
        if (captured) { cuda(cudaStreamBeginCapture(work, cudaStreamCaptureModeThreadLocal)); }
        // bytes of value 1, 2, ...: as a float, all but nothing, and different in all ranks
        cuda(cudaMemsetAsync(device, rank + 1, sizeof(float), work));
        cuda(cudaEventRecord(filled, work));
        cuda(cudaStreamWaitEvent(stream, filled, 0));
        if (!nccl_all_reduce(&comm, device, device, 1, NCCL_FLOAT32, NCCL_MAX, stream, &err)) { die("%s", err.text); }
        cuda(cudaEventRecord(reduced_event, stream));
        cuda(cudaStreamWaitEvent(work, reduced_event, 0));
        cuda(cudaMemcpyAsync(device + 1, device, sizeof(float), cudaMemcpyDeviceToDevice, work));
        if (captured) {
            cuda(cudaStreamEndCapture(work, &graph));
            cuda(cudaGraphInstantiate(&exec, graph, 0));
            cuda(cudaMemset(device, 0, 2 * sizeof(float)));
            cuda(cudaGraphLaunch(exec, work));
        }
        for (polls = 0; cudaStreamQuery(work) == cudaErrorNotReady; polls++) { pause_ms(1); }
        cuda(cudaMemcpy(copy, device, sizeof(copy), cudaMemcpyDeviceToHost));
        uint32_t bits;
        memcpy(&bits, &copy[1], sizeof(bits));
        printf("device %d, %s: %08x%s\n", gpu, captured ? "graph" : "streams", bits, polls ? "" : ", without waiting");
    }
    cuda(cudaGraphExecDestroy(exec));
    cuda(cudaGraphDestroy(graph));
    // without the last event the capture is not whole
    cuda(cudaStreamBeginCapture(work, cudaStreamCaptureModeThreadLocal));
    cuda(cudaEventRecord(filled, work));
    cuda(cudaStreamWaitEvent(stream, filled, 0));
    cuda(cudaMemsetAsync(device, 0, sizeof(float), stream));
    printf("%s\n", cudaGetErrorString(cudaStreamEndCapture(work, &graph)));
}

// The library itself: a program that does not wait until a collective is on its stream does not get its result.
static void run_impatient(void) {
    Error err;
    float *device, host[8] = {1}, got[8];
    start();
    if (!open_ranks(20e3, &err)) { die("%s", err.text); }
    cuda(cudaMalloc((void**)&device, sizeof(host)));
    cuda(cudaMemcpy(device, host, sizeof(host), cudaMemcpyHostToDevice));
    int result = nccl.all_reduce(device, device, 8, NCCL_FLOAT32, NCCL_SUM, comm.handle, stream);
    cuda(cudaStreamSynchronize(stream));
    cuda(cudaMemcpy(got, device, sizeof(got), cudaMemcpyDeviceToHost));
    printf("result %d, number %g\n", result, got[0]);
    bool ok = nccl_all_reduce(&comm, device, device, 8, NCCL_FLOAT32, NCCL_SUM, stream, &err);
    printf("%s\n", ok ? "no error" : err.text);
}

// ---- what goes wrong ------------------------------------------------------------------------------

static float* one_buffer(void) {
    float* device;
    cuda(cudaMalloc((void**)&device, 4096));
    cuda(cudaMemset(device, 0, 4096));
    return device;
}

// The last rank calls something else.
static void run_mismatch(void) {
    Error err;
    float* device = one_buffer();
    bool last = rank == num_ranks - 1;
    if (!(last ? nccl_all_gather(&comm, device + 16, device, 8, NCCL_BFLOAT16, stream, &err)
               : nccl_all_reduce(&comm, device, device, 16, NCCL_FLOAT32, NCCL_SUM, stream, &err))) {
        die("%s", err.text);
    }
    cuda(cudaStreamSynchronize(stream));
}

static void* watch(void* after_ms) {
    Error err;
    double begin = time_ms();
    while (nccl_comm_poll(&comm, &err)) {
        pause_ms(10);
        if (time_ms() - begin < *(const double*)after_ms) { continue; }
        error_fill(&err, "a collective hangs");
        break;
    }
    printf("%s\n", err.text);
    nccl_comm_abort(&comm);
    return NULL;
}

// Ten collectives. The last rank dies before the third; with DIES unset it is up to the stand-in what goes wrong. A second
// thread aborts after 0.4 s, or when NCCL reports an error.
static void run_watched(bool dies, bool in_group) {
    Error err;
    pthread_t thread;
    double after_ms = 400;
    float* device = one_buffer();
    bool ok = true;
    for (int i = 0; i < 10 && ok; i++) {
        if (i == 2) {
            if (dies && rank == num_ranks - 1) { kill(getpid(), SIGKILL); }
            if (pthread_create(&thread, NULL, watch, &after_ms) != 0) { die("pthread_create"); }
        }
        ok = !in_group || nccl_group_start(&comm, &err);
        ok = ok && nccl_all_reduce(&comm, device, device, 16, NCCL_FLOAT32, NCCL_SUM, stream, &err);
        ok = nccl_group_end(&comm, ok ? &err : NULL) && ok;
        cuda(cudaStreamSynchronize(stream));
        pause_ms(i == 2 ? 100 : 1);
    }
    pthread_join(thread, NULL);
    printf("%s\n", ok ? "ten collectives" : err.text);
}

static void run(const char* scenario) {
    Error err;
    if (strcmp(scenario, "collectives") == 0) {
        run_collectives();
    } else if (strcmp(scenario, "group") == 0) {
        run_group();
    } else if (strcmp(scenario, "impatient") == 0) {
        run_impatient();
    } else if (strcmp(scenario, "streams") == 0) {
        run_streams();
    } else if (strcmp(scenario, "absent") == 0) { // the last rank does not come
        start();
        if (rank < num_ranks - 1 && !open_ranks(300, &err)) { die("%s", err.text); }
        pause_ms(500);
    } else {
        start();
        if (!open_ranks(2e3, &err)) { die("%s", err.text); }
        if (strcmp(scenario, "mismatch") == 0) {
            run_mismatch();
        } else if (strcmp(scenario, "dies") == 0) {
            run_watched(true, false);
        } else if (strcmp(scenario, "watched") == 0) {
            run_watched(false, false);
        } else if (strcmp(scenario, "watched_group") == 0) {
            run_watched(false, true);
        } else if (strcmp(scenario, "close") == 0) {
            finish();
        } else {
            die("no scenario '%s'", scenario);
        }
    }
}

int main(int argc, char** argv) {
    int pipes[MAX_RANKS][2], failed = 0;
    pid_t pids[MAX_RANKS];
    if (argc != 3 || (num_ranks = atoi(argv[1])) < 1 || num_ranks > MAX_RANKS) {
        die("nccl_program NUM_RANKS SCENARIO");
    }
    tolerance = getenv("NCCL_TOLERANCE") ? atof(getenv("NCCL_TOLERANCE")) : 0;
    void* memory = mmap(NULL, sizeof(*common), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) { die("mmap: %s", strerror(errno)); }
    memcpy(&common, &memory, sizeof(memory));
    for (rank = 0; rank < num_ranks; rank++) {
        if (pipe(pipes[rank]) != 0 || (pids[rank] = fork()) < 0) { die("fork: %s", strerror(errno)); }
        if (pids[rank] == 0) {
            dup2(pipes[rank][1], 1);
            dup2(pipes[rank][1], 2);
            close(pipes[rank][0]);
            close(pipes[rank][1]);
            setvbuf(stdout, NULL, _IOLBF, 0);
            run(argv[2]);
            exit(EXIT_SUCCESS);
        }
        close(pipes[rank][1]);
    }
    for (int r = 0; r < num_ranks; r++) {
        int status, c;
        FILE* f = fdopen(pipes[r][0], "r");
        while (f && (c = getc(f)) != EOF) { putchar(c); }
        waitpid(pids[r], &status, 0);
        bool exits = WIFEXITED(status);
        printf("rank %d: %s %d\n", r, exits ? "exit" : "signal", exits ? WEXITSTATUS(status) : WTERMSIG(status));
        failed |= status != 0;
    }
    return failed;
}
