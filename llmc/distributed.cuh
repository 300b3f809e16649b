/*
Several GPUs: one process for each, which is called a rank. NCCL (nccl.h) moves data between the GPUs; the hosts agree on
small things over TCP (rank_link.h).

    ranks_start(argv)           after the flags are known, before CUDA: starts the ranks (--gpus), or meets those that another
                                program has started
    ranks_connect(buckets)      after the GPU was opened: NCCL's communicators
    ranks_close()

Data flows in buckets, ranges of the model's parameters (train_gpt2.cu). The collectives are queued on a stream of
their own, ordered with the model's stream by events; the host does not wait for their end:

    backward of a layer  -> gradients_ready(b)  -> reduce_gradients(b): every rank gets the sum for its share of bucket b
    update of the share  -> gather_weights(b)   -> await_weights(b) in the next forward pass, before the layer

This is `beside`: exchanges run beside computations. NCCL then takes few multiprocessors, and the products leave these to it.
The other way is between computations: the reductions wait for the whole backward pass, the next forward pass for all weights,
and NCCL takes as many as make it fast. All reductions are then one group, which NCCL runs as one kernel, and the weights are
gathered in groups of several buckets, while AdamW is at the next ones. A group may put a bucket on other channels of NCCL's,
which are rings: two ranks get the same bits, more may get other last bits where the channels' rings have different orders.

Which way costs less depends on the model, the batch and the links. With --overlap auto both costs are estimated from a
measurement at the start (choose_overlap); the choice may change last bits, and is saved beside the checkpoints.

AdamW updates each weight by itself, so a share can be any part of a bucket. Muon updates whole matrices, so with it each layer
belongs to one rank (bucket_owner). Its gradients are reduced to that rank, which broadcasts the updated weights. A layer then
moves about as many bytes as with equal shares: N ranks receive n instead of n (N-1)/N values.

All ranks must queue the same collectives in the same order, over both communicators, whose collectives share one stream. So
whatever decides about one, such as whether to save, is decided from values that are equal on all ranks: results of collectives,
or of ranks_agree().

With one rank nothing is opened, and all of these functions do nothing.

Source: ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054.
*/
#pragma once

#include "cli.h"
#include "cublas_common.cuh"
#include "cuda_common.cuh"
#include "flags.h"
#include "nccl.h"
#include "rand.h"
#include "rank_link.h"
#include "ranks.h"
#include "rendezvous.h"
#include "stop.h"
#include "utils.h"
#include <algorithm>
#include <math.h>
#include <pthread.h>
#include <string>
#include <vector>

constexpr NcclType NCCL_FLOATX = sizeof(floatX) == 4 ? NCCL_FLOAT32 : IS_FP16 ? NCCL_FLOAT16 : NCCL_BFLOAT16;

// A bucket of weights of which each rank has updated its share.
struct Gathering {
    int b;
    floatX* weights; // (n), the whole bucket
    size_t n;
};

struct Ranks {
    RankEnv env;       // env.rank of env.num_ranks
    bool progressed;   // atomic: the first step is done
    bool failed;       // die() was called
    int died;          // atomic: -1 when another rank has ended; stops a save
    int unheard;       // atomic: a save has failed here, and the others wait for this rank
    int num_shares;    // ZeRO-1: env.num_ranks; else 1, every rank keeps and updates everything
    bool deals_layers; // ZeRO-1 with Muon: every bucket but that of the embeddings belongs to one rank
    RankLink link;
    NcclUniqueId ids[2];
    Nccl nccl;
    NcclComm few, many;                       // communicators whose collectives take few multiprocessors, or many
    bool beside;                              // exchanges run beside computations
    cudaStream_t stream;                      // of the collectives
    std::vector<cudaEvent_t> ready, gathered; // of each bucket: its gradients are computed; its weights are here
    std::vector<Gathering> waiting;           // what the next group will gather
    cudaEvent_t computed, exchanged; // all that was queued so far: on the model's stream; on that of the collectives
    float* figures;                  // (num_ranks, 2) loss and norm of each rank, in device memory
    cudaEvent_t clocks[2];           // all gradients of a step are computed; for odd and even steps
    int num_computed, num_timed;     // steps, by ranks_computed() and ranks_timed()
    float step_ms;                   // what this rank has taken for the gradients of a step, without exchanges
    int slowest;                     // the rank that has taken longest, and the times of it and of the fastest one
    float slowest_ms, fastest_ms;
};

inline Ranks& ranks() {
    static Ranks r = [] {
        Ranks alone = {};
        alone.env.num_ranks = alone.num_shares = 1;
        alone.env.listen_fd = alone.env.progress_fd = -1;
        return alone;
    }();
    return r;
}
inline bool is_alone() { return ranks().env.num_ranks == 1; }
inline bool is_rank0() { return ranks().env.rank == 0; }
// The rank to which all of bucket b belongs; -1 if all ranks have an equal share of it, or the whole of it.
inline int bucket_owner(int b) { return ranks().deals_layers && b > 0 ? (b - 1) % ranks().num_shares : -1; }

// ---- messages -------------------------------------------------------------------------

// die() of a rank tells the others why, so that they can say so. Returns false if another rank of this machine has already
// said it: it was the first to fail; or this is a mistake of the user that all ranks find, and rank 0 speaks for them.
inline bool ranks_tell(const char* reason) {
    RankLink* link = &ranks().link;
    Error first = {""};
    if (is_alone()) { return true; }
    const char* name = strstr(link->peers[ranks().env.rank].name, "(host "); // rank 2 (host b, pid 123)
    std::string here(name ? name : "", name ? strcspn(name, ",") + 1 : 0);
    const char* host = here.c_str();
    bool quoted = strncmp(reason, "rank ", 5) == 0 && strstr(reason, "): ") && strstr(reason, host);
    for (int i = 0; i < 20 && !quoted && !is_rank0(); i++) { // rank 0 may be about to say the same
        if (rank_link_lost(link, &first)) { break; }
        usleep(20000);
    }
    // "rank 0 (host b, pid 9): REASON"; if its reason begins with the name of this rank, it leaves the message to this one
    const char* of_first = strstr(first.text, "): ");
    bool same = of_first && strncmp(of_first + 3, reason, strlen(reason)) == 0;
    bool said = quoted || (same && strstr(first.text, host));
    rank_link_fail(link, reason);
    ranks().failed = true;
    return !said;
}

// Runs at exit, before CUDA's own end, which would wait for a collective that other ranks do not join any more.
inline void ranks_at_exit() {
    if (ranks().failed) { _exit(EXIT_FAILURE); }
}

double ranks_sum_scores(double x);
void ranks_take_from_rank0(void* data, size_t bytes);

// ---- starting the ranks -----------------------------------------------------------------

// The number of GPUs that this process sees. Asked in a child process, because CUDA does not survive the fork() that starts
// the ranks.
inline int count_gpus() {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        int n = 0;
        _exit(cudaGetDeviceCount(&n) == cudaSuccess ? std::min(n, 255) : 0);
    }
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

// llm.c's -pn -pr -pg -ps: ranks that were started by hand.
inline void ranks_from_flags(RankEnv* env) {
    if (args->process_rank >= args->num_processes) {
        cli_fail("-pr %d: ranks count from 0, and -pn says that there are %d", args->process_rank, args->num_processes);
    }
    env->rank = args->process_rank, env->num_ranks = args->num_processes;
    env->local_rank = args->process_rank % args->gpus_per_node;
    snprintf(env->address, sizeof(env->address), "%s", args->server_ip ? args->server_ip : "127.0.0.1");
    env->port = RANKS_FIRST_PORT;
    env->source = RANKS_LAUNCHER;
}

// All flags that are set, a line for each: they must be the same on all ranks.
inline std::string ranks_flags() {
    std::string text;
    const Option* options = program_options();
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char value[1024];
        const Option* o = &options[i];
        if (o->type == OPT_SECTION || o->value == &settings.process_rank) { continue; }
        cli_format_value(value, sizeof(value), o, i, false);
        text += std::string(o->name) + "=" + value + "\n";
    }
    return text;
}

// Finds out whether this process is one of several ranks. If --gpus asks for several and no other program has started them,
// starts them, waits for all of them, and returns the exit code; otherwise returns -1: the program goes on, as one rank.
// To be called before CUDA is touched.
inline int ranks_start(char** argv) {
    Ranks& r = ranks();
    Error err;
    if (!rank_env_read(&r.env, &err)) { die("%s", err.text); }
    if (r.env.source == RANKS_ALONE && args->num_processes > 1) { ranks_from_flags(&r.env); }
    if (r.env.source == RANKS_ALONE && args->init_method && strcmp(args->init_method, "mpi") == 0) {
        die("-pi mpi: mpirun has not started this process; --gpus N needs no MPI");
    }
    if (args->restarts > 0 && !args->output) {
        cli_fail("--restarts needs -o: a restart resumes what was saved there");
    }
    if (args->gpus > 1 && r.env.source != RANKS_LAUNCHER && !is_alone() && args->gpus != r.env.num_ranks &&
        is_rank0()) {
        printf("note: --gpus %d is not used, %s has started %d ranks\n", args->gpus, rank_source_name(r.env.source),
               r.env.num_ranks);
    }
    if (is_alone()) { // also where a launcher has started one process
        static const char* const resume[] = {"-y", "1", NULL};
        if (args->gpus == 1) { return -1; }
        int here = count_gpus(), gpus = args->gpus > 0 ? args->gpus : here;
        if (gpus > here) { die("--gpus %d: there are only %d GPUs here that this program can use", gpus, here); }
        if (gpus < 2) { return -1; }
        if (!nccl_open(&r.nccl, &err)) { die("%s", err.text); } // said once, not by every rank
        RankLaunch launch = {gpus, args->restarts, resume, 0, 0, 0};
        return ranks_launch(&launch, argv);
    }
    if (!nccl_open(&r.nccl, &err)) { die("%s", err.text); }
    for (NcclUniqueId& id : r.ids) {
        if (is_rank0() && !nccl_unique_id(&r.nccl, &id, &err)) { die("%s", err.text); }
    }
    std::string flags = ranks_flags();
    Rendezvous meeting = {};
    meeting.ranks = &r.env;
    meeting.version = LLMC_VERSION;
    meeting.build = hash_of_program();
    meeting.flags_hash = ranks_hash(flags.data(), flags.size());
    meeting.flags = flags.c_str();
    meeting.stop = &run_stop_signal;
    meeting.link = &r.link;
    if (!rendezvous(&meeting, r.ids, sizeof(r.ids), &err)) { die("rank %d: %s", r.env.rank, err.text); }
    r.num_shares = args->zero ? r.env.num_ranks : 1;
    r.deals_layers = r.num_shares > 1 && uses_muon();
    run_rank = r.env.rank, run_num_ranks = r.env.num_ranks;
    snprintf(message_prefix, sizeof(message_prefix), "rank %d: ", r.env.rank);
    on_die = ranks_tell;
    sum_over_ranks = ranks_sum_scores;
    from_rank0 = ranks_take_from_rank0;
    run_stop_is_silent = !is_rank0();
    if (!is_rank0() && !freopen("/dev/null", "w", stdout)) { die("/dev/null: %s", strerror(errno)); } // rank 0 prints
    return -1;
}

// The GPU of this process. num_devices: how many it sees. A launcher may show each of its processes a single one.
inline int ranks_device(int num_devices) {
    int local = ranks().env.local_rank;
    if (num_devices > 1 && local >= num_devices) {
        die("there are only %d GPUs on this machine for %d ranks: --gpus %d", num_devices, local + 1, num_devices);
    }
    return num_devices > 1 ? local : 0;
}

// ---- agreeing -----------------------------------------------------------------------------

// What the ranks tell each other before each micro-batch, and between steps. All get the same answer.
struct RankNews {
    int signal;    // of the operating system, that asks a rank to stop; 0: none
    int failed;    // 1 + the first rank that cannot go on; 0: none
    int due;       // whether any rank said so
    float step_ms; // see Ranks
};

// How long to wait for other ranks; longer until the first step is done, because they open their GPUs at different speeds.
inline double ranks_limit_ms() {
    return 1e3 * args->timeout * (__atomic_load_n(&ranks().progressed, __ATOMIC_RELAXED) ? 1 : 10);
}

// Gives all records (num_ranks, bytes) to every rank. Ends the program if another one has ended or does not answer.
inline void ranks_exchange(const void* mine, void* all, size_t bytes, double limit_ms) {
    static uint32_t count;
    Error err;
    if (!rank_link_exchange(&ranks().link, ++count, mine, all, bytes, limit_ms, &err)) { die("%s", err.text); }
}

inline RankNews ranks_agree(int signal, bool failed, int due, double limit_ms) {
    Ranks& r = ranks();
    RankNews mine = {signal, failed, due, r.step_ms}, result = mine;
    if (is_alone()) { return result; }
    std::vector<RankNews> all(r.env.num_ranks);
    ranks_exchange(&mine, all.data(), sizeof(mine), limit_ms);
    result.failed = 0;
    r.slowest = 0, r.slowest_ms = r.fastest_ms = all[0].step_ms;
    for (int i = (int)all.size() - 1; i >= 0; i--) {
        result.signal = std::max(result.signal, all[i].signal);
        result.failed = all[i].failed ? 1 + i : result.failed;
        result.due |= all[i].due;
        r.slowest = all[i].step_ms > r.slowest_ms ? i : r.slowest;
        r.slowest_ms = std::max(r.slowest_ms, all[i].step_ms);
        r.fastest_ms = std::min(r.fastest_ms, all[i].step_ms);
    }
    return result;
}

// The sum of x over all ranks, in their order.
inline double ranks_sum(double x, double limit_ms) {
    std::vector<double> all(ranks().env.num_ranks, x);
    double sum = 0;
    if (is_alone()) { return x; }
    ranks_exchange(&x, all.data(), sizeof(x), limit_ms);
    for (double y : all) { sum += y; }
    return sum;
}

// Sums the scores of an evaluation. The ranks exchange nothing while they score, so a slower GPU may come much later.
inline double ranks_sum_scores(double x) { return ranks_sum(x, 1e4 * args->timeout); }

// Replaces the bytes of data by those of a rank.
inline void ranks_take_from(int rank, void* data, size_t bytes) {
    std::vector<char> all(bytes * ranks().env.num_ranks);
    if (is_alone()) { return; }
    ranks_exchange(data, all.data(), bytes, 0);
    memcpy(data, &all[rank * bytes], bytes);
}
inline void ranks_take_from_rank0(void* data, size_t bytes) { ranks_take_from(0, data, bytes); }

// A rank has failed: all that have not failed themselves take its reason, with its name.
inline void ranks_take_reason(int rank, bool failed, Error* err) {
    Error theirs = *err;
    ranks_take_from(rank, &theirs, sizeof(theirs));
    if (!failed) { error_set(err, "%s: %s", ranks().link.peers[rank].name, theirs.text); }
}

inline int ranks_take_int(int x) {
    ranks_take_from_rank0(&x, sizeof(x));
    return x;
}

// Ends the program if the ranks have different values: they would train different models.
inline void ranks_check_equal(const char* what, uint32_t value) {
    std::vector<uint32_t> all(ranks().env.num_ranks);
    if (is_alone()) { return; }
    ranks_exchange(&value, all.data(), sizeof(value), 0);
    for (size_t i = 0; i < all.size(); i++) {
        if (all[i] != all[0]) {
            die("%s of rank %zu differ from those of rank 0: do all read the same files?", what, i);
        }
    }
}

// A number that all ranks have in common, a new one in each call.
inline uint64_t ranks_token() {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t token =
        splitmix64((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + ((uint64_t)getpid() << 40));
    ranks_take_from_rank0(&token, sizeof(token));
    return token;
}

// Gives the text of rank 0 to all others.
inline void ranks_share_text(std::string* text) {
    struct Chunk {
        int64_t size; // of the whole text
        char bytes[4000];
    } chunk = {};
    for (size_t at = 0; at == 0 || at < (size_t)chunk.size; at += sizeof(chunk.bytes)) {
        chunk.size = (int64_t)text->size();
        memcpy(chunk.bytes, text->data() + std::min(at, text->size()),
               std::min(sizeof(chunk.bytes), text->size() - std::min(at, text->size())));
        ranks_take_from_rank0(&chunk, sizeof(chunk));
        if (is_rank0()) { continue; }
        if (at == 0) { text->clear(); }
        text->append(chunk.bytes, std::min(sizeof(chunk.bytes), (size_t)chunk.size - at));
    }
}

// All ranks take rank 0's choices of algorithms for products (cublas_common.cuh), and so do the same arithmetic.
inline void ranks_share_choices(CublasLt& library) {
    char path[] = "/tmp/llmc_choices_XXXXXX";
    Error err = {""};
    std::string text;
    char block[4096];
    int fd = mkstemp(path);
    if (fd < 0) { die("%s: %s", path, strerror(errno)); }
    if (is_rank0()) {
        if (!cublaslt_save(library, path, &err)) { die("%s", err.text); }
        FILE* f = fopen(path, "r");
        for (size_t n; f && (n = fread(block, 1, sizeof(block), f)) > 0;) { text.append(block, n); }
        if (f) { fclose(f); }
    }
    ranks_share_text(&text);
    bool ok = is_rank0() || write(fd, text.data(), text.size()) == (ssize_t)text.size();
    close(fd);
    ok = ok && (is_rank0() || cublaslt_load(library, path, &err));
    unlink(path);
    if (!ok) { die("%s: %s", path, err.text[0] ? err.text : "cannot write"); }
}

// ---- the watchdog ---------------------------------------------------------------------------

// A thread that ends the process when it can only wait in vain: when another rank has ended, when NCCL reports an error, or
// when what the main thread waits for takes too long (watch_begin).
struct Watchdog {
    pthread_t thread;
    int running;                                      // atomic
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // of what follows
    const char* what;                                 // NULL: the main thread does not wait for the GPU
    int64_t step;
    double since, limit_ms; // time_ms()
};
inline Watchdog& watchdog() {
    static Watchdog w = {};
    return w;
}

// NCCL is often the first to notice that a rank has ended, but it does not say which one, and why. The hosts know that soon
// afterwards: replaces NCCL's error by their reason.
inline void ranks_find_reason(Error* err) {
    Error theirs;
    for (int i = 0; i < 100; i++, usleep(20000)) {
        if (rank_link_lost(&ranks().link, &theirs)) {
            *err = theirs;
            return;
        }
    }
}

// True, with the reason, if the main thread has been waiting for too long.
inline bool watch_is_late(Error* err) {
    Watchdog& w = watchdog();
    pthread_mutex_lock(&w.lock);
    bool late = w.what && w.limit_ms > 0 && time_ms() - w.since > w.limit_ms;
    if (late) {
        error_set(err, "%s %lld has not ended after %.0f s: a rank hangs, or its GPU", w.what, (long long)w.step,
                  1e-3 * w.limit_ms);
    }
    pthread_mutex_unlock(&w.lock);
    return late;
}

__attribute__((noreturn)) inline void watchdog_bite(const char* reason) {
    if (ranks_tell(reason)) {
        fprintf(stderr, "error: %s%s%s\n", message_prefix, reason,
                args->output ? "; the last saved checkpoint stands" : "");
    }
    usleep(200000);      // for the message to leave this process
    _exit(EXIT_FAILURE); // exit() would wait for a GPU that waits for ever
}

// Prints a note, once, when an exchange that may take longer, as for a checkpoint, has lasted longer than --timeout and a margin, and
// names the missing ranks. Rank 0 reports the others, rank 1 alone reports rank 0. *looks counts the calls in a row that were late:
// one may only mean that this process was stopped.
inline void watch_exchange(int* looks) {
    char names[256];
    double waited_ms, limit_ms = ranks_limit_ms();
    bool late = run_rank < 2 && limit_ms > 0 && rank_link_late(&ranks().link, names, sizeof(names), &waited_ms) > 0 &&
                waited_ms > limit_ms + 2 * RANK_LINK_GRACE_MS;
    *looks = late ? *looks + 1 : 0;
    if (*looks == 20) { print_line(stderr, "note: no answer for %.0f s from %s; waiting", waited_ms / 1000, names); }
}

inline void* watchdog_run(void*) {
    Watchdog& w = watchdog();
    Error err;
    int late_looks = 0;
    double lost_since = 0, before = time_ms();
    while (__atomic_load_n(&w.running, __ATOMIC_ACQUIRE)) {
        usleep(50000);
        double now = time_ms(), stopped = now - before;
        before = now;
        if (stopped > RANK_LINK_STOPPED_MS) { // the whole process, by Ctrl-Z: that time does not count
            pthread_mutex_lock(&w.lock);
            w.since += stopped;
            pthread_mutex_unlock(&w.lock);
            lost_since += lost_since > 0 ? stopped : 0;
        }
        if (!nccl_comm_poll(&ranks().few, &err) || !nccl_comm_poll(&ranks().many, &err)) {
            ranks_find_reason(&err);
            watchdog_bite(err.text);
        }
        if (!rank_link_lost(&ranks().link, &err)) {
            lost_since = 0;
        } else if (lost_since == 0) {
            lost_since = now;
            __atomic_store_n(&ranks().died, -1, __ATOMIC_RELEASE);
        }
        // the main thread is first given time to learn the reason
        if (lost_since > 0 && now - lost_since > 3000) { watchdog_bite(err.text); }
        if (watch_is_late(&err)) { watchdog_bite(err.text); }
        watch_exchange(&late_looks);
        if (__atomic_load_n(&ranks().unheard, __ATOMIC_ACQUIRE)) {
            watchdog_bite("cannot write a checkpoint, and cannot say so to the other ranks, who wait for it");
        }
    }
    return NULL;
}

// The main thread starts or stops waiting for the GPU. what, step: for the message.
inline void watch_begin(const char* what, int64_t step) {
    Watchdog& w = watchdog();
    pthread_mutex_lock(&w.lock);
    w.what = what, w.step = step, w.since = time_ms(), w.limit_ms = ranks_limit_ms();
    pthread_mutex_unlock(&w.lock);
}
inline void watch_end() { watch_begin(NULL, 0); }
inline void wait_for_event(cudaEvent_t event, const char* what, int64_t step) {
    watch_begin(what, step);
    cudaCheck(cudaEventSynchronize(event));
    watch_end();
}
inline void wait_for_stream(cudaStream_t stream, const char* what, int64_t step) {
    watch_begin(what, step);
    cudaCheck(cudaStreamSynchronize(stream));
    watch_end();
}

// The first step is done: from now on --timeout holds, and a failure is followed by a restart.
inline void ranks_progressed() {
    if (ranks().progressed) { return; }
    __atomic_store_n(&ranks().progressed, true, __ATOMIC_RELAXED);
    rank_env_report_progress(&ranks().env);
}

// ---- NCCL -----------------------------------------------------------------------------------

// Multiprocessors for a collective beside computations, and between them. The same numbers on all ranks and in all runs,
// because the order of a sum depends on them. NCCL's blocks come in clusters of 4. On two H100s, a step of 1558M, -b 8, takes
// 164 ms with 4 beside computations, 170 with 8, and 174 with 32 between them; one of 124M, -b 64, takes 105 ms with 4
// beside, and 102 with 16 or 32 between (162 and 101 ms on one card). With --fp8 computations are too short for 4, which carry
// about 66 GB/s: on four H200s a step of 1558M takes 131 ms with 4, 115 with 8 and 117 with 12.
inline int nccl_few() { return args->fp8 ? 8 : 4; }
constexpr int NCCL_MANY = 16;

// A group gathers at least so many bytes of weights: two layers of 124M in bf16, for which two H100s should need about 50 us. A
// larger one would spare more starts and ends of NCCL's kernels, but nothing hides the last group.
constexpr size_t GATHER_BYTES = 24 << 20;

inline cudaEvent_t new_event() {
    cudaEvent_t event;
    cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

// Connects the GPUs for exchanges of num_buckets buckets.
inline void ranks_connect(int num_buckets) {
    Ranks& r = ranks();
    Error err;
    if (is_alone()) { return; }
    // the same bits in every run: a ring adds in one order, NVLink's own sums (NVLS) do not (github.com/NVIDIA/nccl 1497)
    setenv("NCCL_ALGO", "Ring", 0);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    for (int i = 0; i < 2; i++) {
        if (i == 0 && strcmp(args->overlap, "off") == 0) { continue; } // few is not used
        int ctas = i == 0 ? nccl_few() : NCCL_MANY;
        NcclOptions options = {120e3, &run_stop_signal, ctas, ctas};
        NcclComm* comm = i == 0 ? &r.few : &r.many;
        if (!nccl_comm_open(comm, &r.nccl, &r.ids[i], r.env.rank, r.env.num_ranks, &options, &err)) {
            die("%s", err.text);
        }
    }
    r.beside = strcmp(args->overlap, "on") == 0 || (strcmp(args->overlap, "auto") == 0 && !args->tune);
    atexit(ranks_at_exit); // after CUDA's, and so run before it
    cudaCheck(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    for (int b = 0; b < num_buckets; b++) {
        r.ready.push_back(new_event());
        r.gathered.push_back(new_event());
    }
    r.computed = new_event(), r.exchanged = new_event();
    for (cudaEvent_t& clock : r.clocks) { cudaCheck(cudaEventCreate(&clock)); }
    r.figures = (float*)device_malloc_check(2 * r.env.num_ranks * sizeof(float), "figures of all ranks");
    char text[32];
    printf("%d ranks (%s): NCCL %s, %s\n", r.env.num_ranks, rank_source_name(r.env.source),
           nccl_version_text(text, r.nccl.version), r.num_shares > 1 ? "ZeRO-1" : "all-reduce");
    watchdog().running = 1;
    require(pthread_create(&watchdog().thread, NULL, watchdog_run, NULL) == 0);
}

// The end of a run, in which all ranks meet.
inline void ranks_close() {
    Ranks& r = ranks();
    Error err;
    if (is_alone()) { return; }
    ranks_agree(0, false, 0, 0); // the watchdog watches until all are here
    __atomic_store_n(&watchdog().running, 0, __ATOMIC_RELEASE);
    if (watchdog().thread) { pthread_join(watchdog().thread, NULL); }
    for (cudaEvent_t event : r.ready) { cudaCheck(cudaEventDestroy(event)); }
    for (cudaEvent_t event : r.gathered) { cudaCheck(cudaEventDestroy(event)); }
    cudaCheck(cudaEventDestroy(r.computed));
    cudaCheck(cudaEventDestroy(r.exchanged));
    for (cudaEvent_t clock : r.clocks) { cudaCheck(cudaEventDestroy(clock)); }
    for (NcclComm* comm : {&r.few, &r.many}) {
        if (!nccl_comm_close(comm, &err)) { fprintf(stderr, "warning: %s\n", err.text); }
    }
    cudaCheck(cudaStreamDestroy(r.stream));
    cudaCheck(cudaFree(r.figures));
    on_die = NULL; // there is nobody left to tell
    if (!rank_link_close(&r.link, ranks_limit_ms(), &err)) { fprintf(stderr, "warning: %s\n", err.text); }
}

// ---- events ---------------------------------------------------------------------------------

// While a graph is captured, these become nodes of it that record, or wait for, an event outside of it.
inline bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    cudaCheck(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive;
}
inline void gradients_ready(int b, const Execution& exec) {
    if (is_alone() || ranks().ready.empty()) { return; }
    cudaCheck(cudaEventRecordWithFlags(ranks().ready[b], exec.stream,
                                       is_capturing(exec.stream) ? cudaEventRecordExternal : cudaEventRecordDefault));
    exec.follows_event();
}
inline void await_weights(int b, const Execution& exec) {
    if (ranks().num_shares == 1 || ranks().gathered.empty()) { return; }
    cudaCheck(cudaStreamWaitEvent(exec.stream, ranks().gathered[b],
                                  is_capturing(exec.stream) ? cudaEventWaitExternal : cudaEventWaitDefault));
    exec.follows_event();
}

// Makes the next collective wait for the work that is on stream.
inline void await_computation(const Execution& exec) {
    cudaCheck(cudaEventRecord(ranks().computed, exec.stream));
    cudaCheck(cudaStreamWaitEvent(ranks().stream, ranks().computed, 0));
}

// All gradients of a step will have been computed when stream comes to this point.
inline void ranks_computed(const Execution& exec) {
    Ranks& r = ranks();
    if (is_alone()) { return; }
    cudaCheck(cudaEventRecord(r.clocks[r.num_computed++ % 2], exec.stream));
    if (!r.beside) { await_computation(exec); }
}

// To be called once for each step, when it is done, with the event at its beginning. Returns what to print about the slowest
// rank in the step before, the last one of which all ranks have told their times.
inline std::string ranks_timed(cudaEvent_t begin) {
    Ranks& r = ranks();
    char text[64];
    if (is_alone()) { return ""; }
    cudaCheck(cudaEventElapsedTime(&r.step_ms, begin, r.clocks[r.num_timed++ % 2]));
    if (!(r.fastest_ms > 0)) { return ""; }
    snprintf(text, sizeof(text), " | slowest: rank %d, +%.1f%%", r.slowest, 100 * (r.slowest_ms / r.fastest_ms - 1));
    return text;
}

// ---- collectives ----------------------------------------------------------------------------

#define ncclCheck(call)                                                                                                \
    do {                                                                                                               \
        Error why;                                                                                                     \
        Error* err = &why;                                                                                             \
        if (!(call)) {                                                                                                 \
            ranks_find_reason(&why);                                                                                   \
            die("%s", why.text);                                                                                       \
        }                                                                                                              \
    } while (0)

// Buckets 0 and 1, the embeddings and the first layer, have hardly any computation beside them: their gradients are ready last,
// and their weights are needed first.
inline NcclComm* comm_for(int b) { return ranks().beside && b > 1 ? &ranks().few : &ranks().many; }

// Between computations, the collectives up to end_group() become one kernel of NCCL's. It is on the stream after end_group().
inline void begin_group() {
    if (!is_alone() && !ranks().beside) { ncclCheck(nccl_group_start(&ranks().many, err)); }
}
inline void end_group() { ncclCheck(nccl_group_end(&ranks().many, err)); } // does nothing if no group was begun

// Like reduce_gradients, but starts the exchange immediately.
inline void queue_reduction(NcclComm* comm, int b, float* own, float* grads, size_t n) {
    Ranks& r = ranks();
    int owner = bucket_owner(b);
    if (owner >= 0) {
        own = r.env.rank == owner ? own : NULL;
        ncclCheck(nccl_reduce(comm, own, grads, n, NCCL_FLOAT32, NCCL_SUM, owner, r.stream, err));
    } else if (r.num_shares > 1) {
        ncclCheck(nccl_reduce_scatter(comm, own, grads, n / r.num_shares, NCCL_FLOAT32, NCCL_SUM, r.stream, err));
    } else {
        ncclCheck(nccl_all_reduce(comm, grads, grads, n, NCCL_FLOAT32, NCCL_SUM, r.stream, err));
    }
}

// own = this rank's share of the sum of grads (n) over all ranks, once bucket b is ready. With one share grads is summed in
// place, and own == grads. own is not used if the bucket belongs to another rank.
inline void reduce_gradients(int b, float* own, float* grads, size_t n) {
    if (is_alone()) { return; }
    cudaCheck(cudaStreamWaitEvent(ranks().stream, ranks().ready[b], 0));
    queue_reduction(comm_for(b), b, own, grads, n);
}

// Makes stream wait for all collectives that have been queued.
inline void await_collectives(const Execution& exec) {
    if (is_alone()) { return; }
    cudaCheck(cudaEventRecord(ranks().exchanged, ranks().stream));
    cudaCheck(cudaStreamWaitEvent(exec.stream, ranks().exchanged, 0));
}

// figures (num_ranks, 2): losses and norms of all ranks. out[0] = their sum; out[1] = the norm of all shares together, or
// with one share the norm, which is equal on all ranks.
__global__ void combine_figures_kernel(float* out, const float* figures, int num_ranks, bool shares) {
    float loss = 0.0f, squares = 0.0f;
    for (int i = 0; i < num_ranks; i++) {
        loss += figures[2 * i];
        squares += figures[2 * i + 1] * figures[2 * i + 1];
    }
    out[0] = loss;
    if (shares) { out[1] = sqrtf(squares); }
}

// Replaces loss_and_norm (2), which are this rank's, by those of all ranks.
inline void combine_ranks(float* loss_and_norm, const Execution& exec) {
    Ranks& r = ranks();
    if (is_alone()) { return; }
    await_computation(exec);
    ncclCheck(nccl_all_gather(&r.many, r.figures, loss_and_norm, 2, NCCL_FLOAT32, r.stream, err));
    await_collectives(exec);
    combine_figures_kernel<<<1, 1, 0, exec.stream>>>(loss_and_norm, r.figures, r.env.num_ranks, r.num_shares > 1);
    cudaCheck(cudaGetLastError());
}

// values (n), none of which is negative or -0, become the maximum over all ranks. NaN counts as larger than any number.
inline void maximum_of_ranks(float* values, size_t n, const Execution& exec) {
    Ranks& r = ranks();
    if (is_alone()) { return; }
    await_computation(exec);
    ncclCheck(
        nccl_all_reduce(&r.many, values, values, n, NCCL_UINT32, NCCL_MAX, r.stream, err)); // bits have their order
    await_collectives(exec);
}

// whole (n), bucket b of an array, = the shares of all ranks, of which own is this rank's.
inline void gather_bucket(NcclComm* comm, int b, void* whole, const void* own, size_t n, NcclType type) {
    Ranks& r = ranks();
    int owner = bucket_owner(b);
    if (owner >= 0) {
        ncclCheck(nccl_broadcast(comm, whole, own, n, type, owner, r.stream, err));
    } else {
        ncclCheck(nccl_all_gather(comm, whole, own, n / r.num_shares, type, r.stream, err));
    }
}

// Gathers the buckets that wait for it, after the work that is on stream.
inline void gather_waiting(const Execution& exec) {
    Ranks& r = ranks();
    await_computation(exec);
    begin_group();
    for (const Gathering& g : r.waiting) {
        floatX* own = g.weights + (bucket_owner(g.b) < 0 ? r.env.rank * (g.n / r.num_shares) : 0);
        gather_bucket(comm_for(g.b), g.b, g.weights, own, g.n, NCCL_FLOATX);
    }
    end_group();
    for (const Gathering& g : r.waiting) { cudaCheck(cudaEventRecord(r.gathered[g.b], r.stream)); }
    r.waiting.clear();
}

// Completes bucket b of the weights (n), of which each rank has updated its share: beside computations at once, between them
// when a group is full. The last two buckets share a group: without an untied head, the last one is too small for its own.
inline void gather_weights(int b, floatX* weights, size_t n, const Execution& exec) {
    Ranks& r = ranks();
    if (r.num_shares == 1) { return; }
    r.waiting.push_back({b, weights, n});
    size_t bytes = 0;
    for (const Gathering& g : r.waiting) { bytes += g.n * sizeof(floatX); }
    bool full = bytes >= GATHER_BYTES && b + 2 < (int)r.gathered.size();
    if (r.beside || full) { gather_waiting(exec); }
}

// All buckets were given to gather_weights. Between computations: stream waits until they are gathered.
inline void gathering_queued(const Execution& exec) {
    if (ranks().num_shares == 1) { return; }
    if (!ranks().waiting.empty()) { gather_waiting(exec); }
    if (!ranks().beside) { await_collectives(exec); }
}

// Completes bucket b of an array of shares, after the work that is on stream; stream waits for it.
inline void gather_shares(int b, float* whole, const float* own, size_t n, const Execution& exec) {
    await_computation(exec);
    gather_bucket(&ranks().many, b, whole, own, n, NCCL_FLOAT32);
    await_collectives(exec);
}

// ---- beside computations, or between them -----------------------------------------------------

// Returns exec with nccl_few() SMs reserved, if `exchanges` run at the same time as its launches.
inline Execution leaving_room(Execution exec, bool exchanges) {
    exec.reserved_sms = exchanges && ranks().beside && !is_alone() ? nccl_few() : 0;
    return exec;
}

// The time of an exchange with nothing beside it, in ms: the mean of `count`. queue() queues it. One exchange before those that
// are timed keeps the GPU busy until these are queued. step: for the message.
template <class Queue> double time_exchange(int count, int64_t step, Queue queue) {
    cudaEvent_t begin, end;
    float ms;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (int i = 0; i <= count; i++) {
        queue();
        if (i == 0) { cudaCheck(cudaEventRecord(begin, ranks().stream)); }
    }
    cudaCheck(cudaEventRecord(end, ranks().stream));
    wait_for_event(end, "timing an exchange before step", step);
    cudaCheck(cudaEventElapsedTime(&ms, begin, end));
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    return ms / count;
}

// The choice between the two ways is a file beside the checkpoints, so that a resumed run makes the same one: a product on
// fewer multiprocessors may round differently. The file is valid for this number of ranks and -z.
inline std::string overlap_choice(bool beside) {
    return std::to_string(ranks().env.num_ranks) + " ranks, -z " + std::to_string(args->zero) +
           (beside ? ": exchanges beside computations\n" : ": exchanges between computations\n");
}
inline std::string overlap_path(const char* dir) { return std::string(dir) + "/exchange_choice.txt"; }
inline void save_overlap(const char* dir) {
    FileWriter w;
    Error err;
    std::string path = overlap_path(dir), temporary = path + ".new";
    if (is_alone()) { return; }
    bool ok = writer_open(&w, temporary.c_str(), &err);
    if (ok) { writer_printf(&w, "%s", overlap_choice(ranks().beside).c_str()); }
    ok = ok && writer_close(&w, &err);
    if (ok && rename(temporary.c_str(), path.c_str()) != 0) {
        ok = error_set(&err, "%s: cannot rename to it: %s", path.c_str(), strerror(errno));
    }
    if (!ok) { fprintf(stderr, "warning: %s\n", err.text); }
}
// Returns 1 or 0, what the run in dir (may be NULL) has chosen, or -1 if that is not known.
inline int load_overlap(const char* dir) {
    MappedFile file;
    if (!dir || !file_exists(overlap_path(dir).c_str()) || !map_file(&file, overlap_path(dir).c_str(), NULL)) {
        return -1;
    }
    std::string text((const char*)file.data, file.size);
    unmap_file(&file);
    int choice = text == overlap_choice(true) ? 1 : text == overlap_choice(false) ? 0 : -1;
    if (choice < 0) {
        printf("%s: of another number of ranks or another -z: last bits may differ\n", overlap_path(dir).c_str());
    }
    return choice;
}

struct ExchangeTrial {
    float *own, *grads; // this rank's share of bucket 0, and its gradients (n): both are overwritten
    size_t n, all;      // parameters of bucket 0, of the model
    bool accumulates;   // a step has several micro-steps
    int64_t step;       // the first one of this process
};

// What exchanges beside computations add to a step, in ms: the multiprocessors that products do not have, what is not done when
// the computations are, and the exchange of the embeddings, a part `alone` of the model, which has nothing beside it. few_ms,
// many_ms: a step's exchanges on few or many multiprocessors.
inline double cost_beside(double micro_step_ms, double few_ms, double many_ms, double alone, int num_sms) {
    return micro_step_ms * nccl_few() / num_sms + fmax(few_ms * (1 - alone) - micro_step_ms, 0) + many_ms * alone;
}

// --overlap auto: compares the times that exchanges add to a step, beside computations and between them. micro_step_ms: of
// rank 0. dir: as for load_overlap. exchange() queues all exchanges of a step.
template <class Exchange>
void choose_overlap(const ExchangeTrial& t, double micro_step_ms, const char* dir, Exchange exchange) {
    Ranks& r = ranks();
    int before = ranks_take_int(is_rank0() ? load_overlap(dir) : -1);
    bool chooses = strcmp(args->overlap, "auto") == 0;
    if (before >= 0 && chooses) { r.beside = before; }
    if (before >= 0 && r.beside != before) {
        printf("--overlap %s: last bits may differ from here on\n", args->overlap);
    }
    if (!chooses || !args->tune) { return; }
    r.beside = false;
    double many_ms = time_exchange(2, t.step, exchange);
    // a step's exchanges compared with the reduction of n gradients; the weights are gathered in their own type
    double times = (double)t.all / (double)t.n;
    if (r.num_shares > 1) { times *= 1.0 + sizeof(floatX) / (double)sizeof(float); }
    double few_ms = times * time_exchange(4, t.step, [&] { queue_reduction(&r.few, 0, t.own, t.grads, t.n); });
    double alone = (double)t.n / (double)t.all;
    double beside_ms = cost_beside(micro_step_ms, few_ms, many_ms, alone, num_multiprocessors());
    r.beside = before >= 0 ? before : ranks_take_int(beside_ms < many_ms);
    printf("exchanges: %.1f ms a step between computations, an estimated %.1f ms beside them: %s%s\n", many_ms,
           beside_ms, r.beside ? "beside" : "between", before >= 0 ? ", as before" : "");
}

// Chooses cuBLASLt's algorithms, by calling all products, and whether to exchange beside computations. launch(first, last)
// launches a micro-step of a step that it begins or ends. dir, exchange: as for choose_overlap.
template <class Launch, class Exchange> void ranks_choose(const ExchangeTrial& trial, const char* dir,
                                                          const Execution& exec, Launch launch, Exchange exchange) {
    // the second round is timed; in the third, products meet fewer multiprocessors, if exchanges are to run beside them
    for (int call = 0; call < 3; call++) {
        double begin = time_ms();
        for (int i = 0; i < 4 && is_rank0(); i++) { // the kinds of micro-steps that the run has
            if (trial.accumulates != (i == 3)) { launch(i % 2 == 1, i / 2 == 1); }
        }
        wait_for_stream(exec.stream, "choosing algorithms before step", trial.step);
        double ms = (time_ms() - begin) / (trial.accumulates ? 3 : 1);
        if (call == 1) { choose_overlap(trial, ms, dir, exchange); }
    }
    ranks_share_choices(*exec.library);
}
