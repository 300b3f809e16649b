/*
NCCL, found at run time: the program compiles without nccl.h and starts without libnccl.so.2, which only a run of several
GPUs needs.

    Nccl nccl;                                            // after ranks_launch(): a process that forks has no CUDA yet
    if (!nccl_open(&nccl, &err)) { die("%s", err.text); }
    NcclUniqueId id;                                      // rank 0 makes it, all others get it
    if (ranks.rank == 0 && !nccl_unique_id(&nccl, &id, &err)) { die("%s", err.text); }
    if (!rendezvous(&r, &id, sizeof(id), &err)) { die("%s", err.text); }

    static NcclComm comm;                                 // after cudaSetDevice()
    NcclOptions options = {60e3, &run_stop_signal, 0, 8}; // a minute to connect; at most 8 SMs
    if (!nccl_comm_open(&comm, &nccl, &id, ranks.rank, ranks.num_ranks, &options, &err)) { die("%s", err.text); }
    bool ok = nccl_group_start(&comm, &err);              // calls that NCCL may merge into one kernel
    ok = ok && nccl_reduce_scatter(&comm, shard, grads, count, NCCL_FLOAT32, NCCL_SUM, stream, &err);
    ok = nccl_group_end(&comm, ok ? &err : NULL) && ok;
    ...                                                   // destroy the CUDA graphs that hold collectives
    if (!nccl_comm_close(&comm, &err)) { die("%s", err.text); }

    in a watchdog thread:  if (!nccl_comm_poll(&comm, &err) || hangs) { print it; nccl_comm_abort(&comm); exit }

The communicator is non-blocking (NCCL's user guide, "Fault Tolerance"): a call of NCCL returns at once, and what it began
goes on in a thread of NCCL's while ncclCommGetAsyncError() says ncclInProgress. Until that is over the collective may not be
on the stream yet, so neither cudaStreamSynchronize() nor an event nor the end of a capture covers it ("Group Calls",
"Nonblocking Group Operation"), and the next call with this communicator is refused ("Attempt to use communicator before
the previous operation returned ncclSuccess"). So each function here waits until its work is on the stream, with a time
limit: the first collective of a kind connects the ranks, and hangs where one of them is gone. Inside a group nothing is put
on a stream; nccl_group_end() waits for all of it.

A call that fails leaves the communicator unusable; nccl_comm_abort() and the end of the process are all that may follow.
What NCCL 2.18 to 2.30 do was read in their sources; files and functions are named where that matters.
C11, also compiles as C++17. No CUDA header is needed: a stream is a void*.
*/
#ifndef LLMC_NCCL_H
#define LLMC_NCCL_H

#include "utils.h"
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>

// ---- what nccl.h declares ---------------------------------------------------------
// The values and layouts are those of nccl.h, and the same from 2.18.3 to 2.32.3.

typedef struct {
    char internal[128];
} NcclUniqueId;

typedef struct ncclComm* NcclHandle;

typedef enum {
    NCCL_SUCCESS,
    NCCL_UNHANDLED_CUDA_ERROR,
    NCCL_SYSTEM_ERROR,
    NCCL_INTERNAL_ERROR,
    NCCL_INVALID_ARGUMENT,
    NCCL_INVALID_USAGE,
    NCCL_REMOTE_ERROR,
    NCCL_IN_PROGRESS
} NcclResult;

typedef enum {
    NCCL_INT8,
    NCCL_UINT8,
    NCCL_INT32,
    NCCL_UINT32,
    NCCL_INT64,
    NCCL_UINT64,
    NCCL_FLOAT16,
    NCCL_FLOAT32,
    NCCL_FLOAT64,
    NCCL_BFLOAT16
} NcclType;

typedef enum { NCCL_SUM = 0, NCCL_MAX = 2 } NcclReduction; // the maximum of NaN and a number is the number (fmaxf)

// ncclConfig_t of 2.18. Later versions append members. A library takes `size` bytes of it, and its own initial values for
// what is missing or younger than `version` (init.cc, parseCommConfig).
typedef struct {
    size_t size;
    unsigned magic, version;                            // 0xcafebeef; of the layout
    int blocking, cga_cluster_size, min_ctas, max_ctas; // INT_MIN: as NCCL likes
    const char* net_name;                               // NULL: as NCCL likes
    int split_share;
} NcclConfig;

enum { NCCL_OLDEST = 21800 };

// ---- the library ------------------------------------------------------------------

typedef struct {
    void* library;
    int version; // 21805 is 2.18.5
    NcclResult (*get_version)(int*);
    NcclResult (*get_unique_id)(NcclUniqueId*);
    NcclResult (*comm_init_rank_config)(NcclHandle*, int num_ranks, NcclUniqueId, int rank, NcclConfig*);
    NcclResult (*comm_get_async_error)(NcclHandle, NcclResult*);
    NcclResult (*comm_finalize)(NcclHandle);
    NcclResult (*comm_destroy)(NcclHandle);
    NcclResult (*comm_abort)(NcclHandle);
    const char* (*get_error_string)(NcclResult);
    const char* (*get_last_error)(NcclHandle);
    NcclResult (*group_start)(void);
    NcclResult (*group_end)(void);
    NcclResult (*all_reduce)(const void*, void*, size_t, NcclType, NcclReduction, NcclHandle, void* stream);
    NcclResult (*reduce_scatter)(const void*, void*, size_t, NcclType, NcclReduction, NcclHandle, void* stream);
    NcclResult (*reduce)(const void*, void*, size_t, NcclType, NcclReduction, int root, NcclHandle, void* stream);
    NcclResult (*all_gather)(const void*, void*, size_t, NcclType, NcclHandle, void* stream);
    NcclResult (*broadcast)(const void*, void*, size_t, NcclType, int root, NcclHandle, void* stream);
} Nccl;

#define NCCL_REMEDY                                                                                                    \
    "install it with apt-get install libnccl2 (NVIDIA's repository), or with pip install nvidia-nccl-cu13 and "        \
    "LLMC_NCCL=.../nvidia/nccl/lib/libnccl.so.2"

// NCCL's version as text, in a buffer of the caller. Before 2.9 the number had four digits.
static inline const char* nccl_version_text(char text[32], int version) {
    int unit = version < 10000 ? 1000 : 10000;
    snprintf(text, 32, "%d.%d.%d", version / unit, version % unit / 100, version % 100);
    return text;
}

static inline bool nccl_fill(Nccl* nccl, const char* file, Error* err) {
    static const struct {
        const char* name;
        size_t offset;
    } functions[] = {{"ncclGetVersion", offsetof(Nccl, get_version)}, // the first: an old library may lack others
                     {"ncclGetUniqueId", offsetof(Nccl, get_unique_id)},
                     {"ncclCommInitRankConfig", offsetof(Nccl, comm_init_rank_config)},
                     {"ncclCommGetAsyncError", offsetof(Nccl, comm_get_async_error)},
                     {"ncclCommFinalize", offsetof(Nccl, comm_finalize)},
                     {"ncclCommDestroy", offsetof(Nccl, comm_destroy)},
                     {"ncclCommAbort", offsetof(Nccl, comm_abort)},
                     {"ncclGetErrorString", offsetof(Nccl, get_error_string)},
                     {"ncclGetLastError", offsetof(Nccl, get_last_error)},
                     {"ncclGroupStart", offsetof(Nccl, group_start)},
                     {"ncclGroupEnd", offsetof(Nccl, group_end)},
                     {"ncclAllReduce", offsetof(Nccl, all_reduce)},
                     {"ncclReduceScatter", offsetof(Nccl, reduce_scatter)},
                     {"ncclReduce", offsetof(Nccl, reduce)},
                     {"ncclAllGather", offsetof(Nccl, all_gather)},
                     {"ncclBroadcast", offsetof(Nccl, broadcast)}};
    char text[32];
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void* symbol = dlsym(nccl->library, functions[i].name);
        if (!symbol) { return error_set(err, "%s: has no %s: not NCCL, or damaged", file, functions[i].name); }
        memcpy((char*)nccl + functions[i].offset, &symbol, sizeof(symbol)); // POSIX: a function pointer fits
        if (i > 0) { continue; }
        NcclResult result = nccl->get_version(&nccl->version);
        if (result != NCCL_SUCCESS) { return error_set(err, "%s: ncclGetVersion: error %d", file, (int)result); }
        if (nccl->version < NCCL_OLDEST) {
            return error_set(err,
                             "%s: NCCL %s is too old: non-blocking communicators as they are used here need 2.18; "
                             "%s",
                             file, nccl_version_text(text, nccl->version), NCCL_REMEDY);
        }
    }
    return true;
}

// Loads NCCL: the file LLMC_NCCL, or else libnccl.so.2 where the dynamic linker looks. It stays loaded. To be called before
// the process has threads, because it sets a variable of the environment: NCCL_COMM_BLOCKING=1 would override the
// communicator's configuration (init.cc, envConfigOverride), and then no time limit would hold.
static inline bool nccl_open(Nccl* nccl, Error* err) {
    const char* path = getenv("LLMC_NCCL");
    bool chosen = path && path[0];
    const char* file = chosen ? path : "libnccl.so.2";
    memset(nccl, 0, sizeof(*nccl));
    nccl->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!nccl->library) {
        return error_set(err, "NCCL, which several GPUs need: %s%s; %s", chosen ? "LLMC_NCCL=" : "", dlerror(),
                         NCCL_REMEDY);
    }
    if (!nccl_fill(nccl, file, err)) {
        dlclose(nccl->library);
        memset(nccl, 0, sizeof(*nccl));
        return false;
    }
    setenv("NCCL_COMM_BLOCKING", "0", 1);
    return true;
}

// ---- communicators ----------------------------------------------------------------

typedef struct {
    double limit_ms;                   // for all ranks to connect, and for a call to be put on its stream; 0: 60,000
    const volatile sig_atomic_t* stop; // a signal's number in it ends nccl_comm_open(), and only that; may be NULL
    int min_ctas, max_ctas; // SMs that a collective takes; 0, 0: as NCCL likes. A minimum needs a maximum: with the
                            // latter undefined, parseCommConfig refuses the former. Equal ones help to repeat bits
} NcclOptions;

typedef struct {
    const Nccl* nccl;
    NcclHandle handle; // NULL: not open, or aborted
    int rank, num_ranks;
    double limit_ms;
    bool in_group;
    int group_calls;      // of the group
    int abort_wanted;     // atomic
    pthread_mutex_t lock; // held while NCCL is called with the handle, see nccl_comm_poll()
} NcclComm;

static inline size_t nccl_type_size(NcclType type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

static inline bool nccl_abort_wanted(NcclComm* comm) { return __atomic_load_n(&comm->abort_wanted, __ATOMIC_ACQUIRE); }

// Fills err with NCCL's words for an error. The text of the last error may be of another call, and may be empty.
static inline bool nccl_failed(const Nccl* nccl, const char* what, NcclResult result, Error* err) {
    const char* more = nccl->get_last_error(NULL);
    return error_set(err, "NCCL: %s: %s%s%s", what, nccl->get_error_string(result), more && more[0] ? ": " : "",
                     more ? more : "");
}

// Waits until the call that returned `result` has done its work. Tells why, if it has not: NCCL's error, an abort by another
// thread, the time limit or a signal. The lock is held.
static inline bool nccl_settle(NcclComm* comm, NcclResult result, const char* what, const volatile sig_atomic_t* stop,
                               Error* err) {
    double begin = time_ms();
    while (result == NCCL_IN_PROGRESS) {
        double waited = time_ms() - begin;
        if (nccl_abort_wanted(comm)) { return error_set(err, "NCCL: %s: aborted", what); }
        if (stop && *stop) { return error_set(err, "NCCL: %s: ended by signal %d", what, (int)*stop); }
        if (waited > comm->limit_ms) {
            return error_set(err, "NCCL: %s: not done after %.3g s: is another rank gone?", what,
                             1e-3 * comm->limit_ms);
        }
        if (waited < 1) {
            sched_yield(); // enqueuing takes microseconds
        } else {
            struct timespec rest = {0, 200000};
            nanosleep(&rest, NULL);
        }
        NcclResult state = NCCL_SUCCESS;
        result = comm->nccl->comm_get_async_error(comm->handle, &state);
        if (result == NCCL_SUCCESS) { result = state; }
    }
    return result == NCCL_SUCCESS ? true : nccl_failed(comm->nccl, what, result, err);
}

// Makes the id of a new communicator, in one rank. NCCL starts a thread here, which the other ranks will find by the id.
static inline bool nccl_unique_id(const Nccl* nccl, NcclUniqueId* id, Error* err) {
    NcclResult result = nccl->get_unique_id(id);
    return result == NCCL_SUCCESS ? true : nccl_failed(nccl, "ncclGetUniqueId", result, err);
}

// Connects this rank with all others, which must call it too, on the thread's current CUDA device. If that fails, nothing
// is left open.
static inline bool nccl_comm_open(NcclComm* comm, const Nccl* nccl, const NcclUniqueId* id, int rank, int num_ranks,
                                  const NcclOptions* options, Error* err) {
    NcclConfig config = {sizeof(NcclConfig), 0xcafebeef, NCCL_OLDEST, 0, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN};
    char what[96];
    require(rank >= 0 && rank < num_ranks && options->min_ctas >= 0 && options->max_ctas >= options->min_ctas);
    if (options->min_ctas > 0) { config.min_ctas = options->min_ctas; }
    if (options->max_ctas > 0) { config.max_ctas = options->max_ctas; }
    memset(comm, 0, sizeof(*comm));
    pthread_mutex_init(&comm->lock, NULL);
    comm->nccl = nccl;
    comm->rank = rank;
    comm->num_ranks = num_ranks;
    comm->limit_ms = options->limit_ms > 0 ? options->limit_ms : 60e3;
    snprintf(what, sizeof(what), "connecting rank %d with %d others", rank, num_ranks - 1);
    pthread_mutex_lock(&comm->lock);
    NcclResult result = nccl->comm_init_rank_config(&comm->handle, num_ranks, *id, rank, &config);
    bool ok = nccl_settle(comm, result, what, options->stop, err);
    if (!ok && comm->handle) {
        // in the thread that began to connect: 2.18 looks there for what it has to stop (group.cc, ncclGroupJobMainPtr)
        nccl->comm_abort(comm->handle);
        comm->handle = NULL;
    }
    pthread_mutex_unlock(&comm->lock);
    return ok;
}

// Waits for the collectives on the streams, and closes. CUDA graphs that hold collectives must be destroyed before: until
// then ncclCommFinalize() is not done (init.cc, commDestroySync). If it fails, nothing is freed.
static inline bool nccl_comm_close(NcclComm* comm, Error* err) {
    bool ok = true;
    if (!comm->nccl) { return true; } // never opened
    pthread_mutex_lock(&comm->lock);
    if (comm->handle) {
        ok = nccl_settle(comm, comm->nccl->comm_finalize(comm->handle), "ncclCommFinalize", NULL, err);
        NcclResult result = ok ? comm->nccl->comm_destroy(comm->handle) : NCCL_SUCCESS;
        if (result != NCCL_SUCCESS) { ok = nccl_failed(comm->nccl, "ncclCommDestroy", result, err); }
        comm->handle = NULL;
    }
    pthread_mutex_unlock(&comm->lock);
    return ok;
}

// For a watchdog thread: false with the reason after an error in the background, such as a lost connection. A peer on the
// same machine that dies is often not noticed (github.com/NVIDIA/nccl/issues/279): a hang is to be told by a time limit.
// The lock is needed because from 2.27 on ncclCommGetAsyncError() also ends NCCL's thread and frees it, so that two
// threads must not call it at the same time (init.cc, group.cc: ncclGroupJobComplete).
static inline bool nccl_comm_poll(NcclComm* comm, Error* err) {
    NcclResult state = NCCL_SUCCESS;
    char what[96];
    if (!comm->nccl || pthread_mutex_trylock(&comm->lock) != 0) { return true; } // in a call, which notices it
    NcclResult result = comm->handle ? comm->nccl->comm_get_async_error(comm->handle, &state) : NCCL_SUCCESS;
    if (result == NCCL_SUCCESS) { result = state; }
    pthread_mutex_unlock(&comm->lock);
    snprintf(what, sizeof(what), "rank %d of %d", comm->rank, comm->num_ranks);
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS ? true : nccl_failed(comm->nccl, what, result, err);
}

// Ends the communicator without the other ranks; safe in any thread, also while a collective hangs on the GPU or while
// another thread is in one of the functions here, which then fails. The other ranks may or may not notice (issue 279), so
// each rank has to abort. Collectives that were running end with wrong results, and what follows them on the stream runs:
// nothing that the GPU computes from then on may be saved.
// It may not return: it waits for NCCL's streams, and for the destruction of all CUDA graphs that hold collectives
// (init.cc, commDestroySync). So a watchdog prints its message first, and ends the process if the abort takes too long.
static inline void nccl_comm_abort(NcclComm* comm) {
    struct timespec rest = {0, 1000000};
    int locked = 1;
    if (!comm->nccl) { return; }
    __atomic_store_n(&comm->abort_wanted, 1, __ATOMIC_RELEASE);
    // A thread may hold the lock for long where a launch blocks, because a thousand others wait on the GPU for a collective
    // that hangs. Then only the abort can free it.
    for (int ms = 0; ms < 2000 && (locked = pthread_mutex_trylock(&comm->lock)) != 0; ms++) { nanosleep(&rest, NULL); }
    if (comm->handle) { comm->nccl->comm_abort(comm->handle); }
    comm->handle = NULL;
    if (locked == 0) { pthread_mutex_unlock(&comm->lock); }
}

// ---- collectives ------------------------------------------------------------------
// All ranks must make the same calls in the same order; else they hang or mix their data. They may be captured into a CUDA
// graph, in all ranks alike (user guide, "Using NCCL with CUDA Graphs"). A count of 0 does nothing, in this rank alone.
// From 2.23 on a thread of NCCL's puts each call or group on its stream (group.cc, ncclGroupEndInternal), which costs the
// host more than a blocking communicator would: group calls, or capture them.

// Takes the lock. False, without the lock, if the communicator is not open.
static inline bool nccl_enter(NcclComm* comm, const char* what, Error* err) {
    if (!comm->in_group) { pthread_mutex_lock(&comm->lock); }
    if (comm->handle && !nccl_abort_wanted(comm)) { return true; }
    if (!comm->in_group) { pthread_mutex_unlock(&comm->lock); }
    return error_set(err, "NCCL: %s: the communicator was aborted", what);
}

// Waits until the call is on its stream, and gives the lock back. Inside a group nothing is to be waited for.
static inline bool nccl_leave(NcclComm* comm, NcclResult result, const char* what, Error* err) {
    if (comm->in_group) {
        comm->group_calls++;
        if (result == NCCL_IN_PROGRESS) { result = NCCL_SUCCESS; }
    }
    bool ok = !nccl_abort_wanted(comm) ? nccl_settle(comm, result, what, NULL, err)
                                       : error_set(err, "NCCL: %s: aborted", what);
    if (!comm->in_group) { pthread_mutex_unlock(&comm->lock); }
    return ok;
}

// The name of a collective for messages: "all_reduce of 4096 bytes, rank 1 of 2".
static inline void nccl_name(char what[96], const NcclComm* comm, const char* name, size_t count, NcclType type) {
    snprintf(what, 96, "%s of %zu bytes, rank %d of %d", name, count * nccl_type_size(type), comm->rank,
             comm->num_ranks);
}

// Begins a group: the calls up to nccl_group_end() are put on their streams together. Only one thread may do so.
static inline bool nccl_group_start(NcclComm* comm, Error* err) {
    if (!nccl_enter(comm, "ncclGroupStart", err)) { return false; }
    NcclResult result = comm->nccl->group_start();
    comm->in_group = result == NCCL_SUCCESS;
    comm->group_calls = 0;
    if (comm->in_group) { return true; }
    pthread_mutex_unlock(&comm->lock);
    return nccl_failed(comm->nccl, "ncclGroupStart", result, err);
}

// Ends a group, also after one of its calls has failed; then it fails as well. Without a group it does nothing.
static inline bool nccl_group_end(NcclComm* comm, Error* err) {
    char what[96];
    if (!comm->in_group) { return true; }
    comm->in_group = false;
    snprintf(what, sizeof(what), "ncclGroupEnd of %d calls, rank %d of %d", comm->group_calls, comm->rank,
             comm->num_ranks);
    return nccl_leave(comm, comm->nccl->group_end(), what, err);
}

// out (count) = the sum or maximum of inp (count) of all ranks. In place: out == inp.
static inline bool nccl_all_reduce(NcclComm* comm, void* out, const void* inp, size_t count, NcclType type,
                                   NcclReduction op, void* stream, Error* err) {
    char what[96];
    nccl_name(what, comm, "all_reduce", count, type);
    if (!nccl_enter(comm, what, err)) { return false; }
    return nccl_leave(comm, comm->nccl->all_reduce(inp, out, count, type, op, comm->handle, stream), what, err);
}

// out (count) = part `rank` of the reduction of inp (num_ranks, count). In place: out == inp + rank * count.
static inline bool nccl_reduce_scatter(NcclComm* comm, void* out, const void* inp, size_t count, NcclType type,
                                       NcclReduction op, void* stream, Error* err) {
    char what[96];
    nccl_name(what, comm, "reduce_scatter", count * (size_t)comm->num_ranks, type);
    if (!nccl_enter(comm, what, err)) { return false; }
    return nccl_leave(comm, comm->nccl->reduce_scatter(inp, out, count, type, op, comm->handle, stream), what, err);
}

// out (count) of rank `root` = the reduction of inp (count) of all ranks; out of the others is not written, and may be NULL.
// In place: out == inp.
static inline bool nccl_reduce(NcclComm* comm, void* out, const void* inp, size_t count, NcclType type,
                               NcclReduction op, int root, void* stream, Error* err) {
    char what[96];
    nccl_name(what, comm, "reduce", count, type);
    if (!nccl_enter(comm, what, err)) { return false; }
    return nccl_leave(comm, comm->nccl->reduce(inp, out, count, type, op, root, comm->handle, stream), what, err);
}

// out (num_ranks, count) = inp (count) of each rank, in order. In place: inp == out + rank * count.
static inline bool nccl_all_gather(NcclComm* comm, void* out, const void* inp, size_t count, NcclType type,
                                   void* stream, Error* err) {
    char what[96];
    nccl_name(what, comm, "all_gather", count * (size_t)comm->num_ranks, type);
    if (!nccl_enter(comm, what, err)) { return false; }
    return nccl_leave(comm, comm->nccl->all_gather(inp, out, count, type, comm->handle, stream), what, err);
}

// out (count) = inp (count) of rank `root`; inp of the others is not read. In place: out == inp.
static inline bool nccl_broadcast(NcclComm* comm, void* out, const void* inp, size_t count, NcclType type, int root,
                                  void* stream, Error* err) {
    char what[96];
    nccl_name(what, comm, "broadcast", count, type);
    if (!nccl_enter(comm, what, err)) { return false; }
    return nccl_leave(comm, comm->nccl->broadcast(inp, out, count, type, root, comm->handle, stream), what, err);
}

#endif
