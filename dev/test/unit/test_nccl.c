// llmc/nccl.h with a tiny library that this test compiles: it does nothing, counts what is called with which arguments, and
// returns what the test wants. Several ranks with real sums: test_nccl.sh.
#include "../../../llmc/nccl.h"
#include "../test.h"

// What the library and the test share. Results are ncclResult_t; polls: how often it says ncclInProgress (7) before `state`.
#define TINY                                                                                                           \
    typedef struct {                                                                                                   \
        int inits, finalizes, destroys, aborts, starts, ends, collectives, queries;                                    \
        int init_result, finalize_result, destroy_result, start_result, end_result, result, state, polls;              \
        int blocks; /* a collective returns only after an abort */                                                     \
        const char* last_error;                                                                                        \
        const void* inp;                                                                                               \
        void *out, *stream;                                                                                            \
        unsigned long count;                                                                                           \
        int type, op, root;                                                                                            \
        char config[48], first_byte_of_id;                                                                             \
        int rank, num_ranks;                                                                                           \
    } Tiny;
#define SOURCE_OF(...) #__VA_ARGS__
#define SOURCE(x) SOURCE_OF(x)
TINY

    // clang-format off
static const char tiny_source[] = SOURCE(TINY)
    "Tiny tiny;\n"
    "typedef struct { char c[128]; } Id;\n"
    "int ncclGetVersion(int* v) { *v = VERSION; return 0; }\n"
    "int ncclGetUniqueId(Id* id) { id->c[0] = 77; return tiny.result; }\n"
    "int ncclCommInitRankConfig(void** comm, int n, Id id, int rank, void* config) {\n"
    "    tiny.inits++; tiny.num_ranks = n; tiny.rank = rank; tiny.first_byte_of_id = id.c[0];\n"
    "    __builtin_memcpy(tiny.config, config, 48);\n"
    "    *comm = tiny.init_result == 0 || tiny.init_result == 7 ? &tiny : 0;\n"
    "    return tiny.init_result; }\n"
    "int ncclCommGetAsyncError(void* comm, int* state) {\n"
    "    tiny.queries++; *state = tiny.polls > 0 ? tiny.polls--, 7 : tiny.state; return comm == &tiny ? 0 : 4; }\n"
    "int ncclCommFinalize(void* comm) { (void)comm; tiny.finalizes++; return tiny.finalize_result; }\n"
    "int ncclCommDestroy(void* comm) { (void)comm; tiny.destroys++; return tiny.destroy_result; }\n"
    "int ncclCommAbort(void* comm) { (void)comm; __atomic_add_fetch(&tiny.aborts, 1, 5); return 0; }\n"
    "const char* ncclGetErrorString(int result) { return result == 1 ? \"cuda error\" : result == 6 ? \"remote error\" : \"error\"; }\n"
    "const char* ncclGetLastError(void* comm) { return comm ? \"no\" : tiny.last_error; }\n"
    "int ncclGroupStart(void) { tiny.starts++; return tiny.start_result; }\n"
    "int ncclGroupEnd(void) { tiny.ends++; return tiny.end_result; }\n"
    "static int call(const void* inp, void* out, unsigned long count, int type, int op, int root, void* stream) {\n"
    "    tiny.collectives++; tiny.inp = inp; tiny.out = out; tiny.count = count; tiny.type = type; tiny.op = op;\n"
    "    tiny.root = root; tiny.stream = stream;\n"
    "    while (tiny.blocks && !__atomic_load_n(&tiny.aborts, 5)) {}\n"
    "    return tiny.result; }\n"
    "int ncclAllReduce(const void* i, void* o, unsigned long n, int t, int op, void* c, void* s) {\n"
    "    (void)c; return call(i, o, n, t, op, -1, s); }\n"
    "int ncclReduceScatter(const void* i, void* o, unsigned long n, int t, int op, void* c, void* s) {\n"
    "    (void)c; return call(i, o, n, t, op, -2, s); }\n"
    "int ncclReduce(const void* i, void* o, unsigned long n, int t, int op, int root, void* c, void* s) {\n"
    "    (void)c; return call(i, o, n, t, op, root, s); }\n"
    "int ncclAllGather(const void* i, void* o, unsigned long n, int t, void* c, void* s) {\n"
    "    (void)c; return call(i, o, n, t, -1, -3, s); }\n"
    "int ncclBroadcast(const void* i, void* o, unsigned long n, int t, int root, void* c, void* s) {\n"
    "    (void)c; return call(i, o, n, t, -1, root, s); }\n";
// clang-format on

#define INSTALL                                                                                                        \
    "install it with apt-get install libnccl2 (NVIDIA's repository), or with pip install nvidia-nccl-cu13 and "        \
    "LLMC_NCCL=.../nvidia/nccl/lib/libnccl.so.2"

static Nccl nccl;
static NcclComm comm;
static Tiny* tiny;
static Error err;
static int number; // stands for a buffer and a stream

// Compiles the library as test_dir()/NAME.so with `flags` and has LLMC_NCCL point to it. False: no compiler, and skipped.
static bool compile(const char* name, const char* flags) {
    char path[256], command[1024];
    const char* compiler = getenv("CC");
    snprintf(path, sizeof(path), "%s/tiny.c", test_dir());
    FILE* f = fopen(path, "w");
    if (!f || fputs(tiny_source, f) < 0 || fclose(f) != 0) { die("%s: cannot write", path); }
    snprintf(path, sizeof(path), "%s/%s.so", test_dir(), name);
    snprintf(command, sizeof(command), "%s -shared -fPIC -O1 %s -o %s %s/tiny.c",
             compiler && compiler[0] ? compiler : "cc", flags, path, test_dir());
    setenv("LLMC_NCCL", path, 1);
    if (system(command) == 0) { return true; }
    test_skip("needs a compiler: %s", command);
    return false;
}

// Opens the library with all results 0.
static bool open_library(void) {
    if (!tiny) {
        if (!compile("tiny", "-DVERSION=21805")) { return false; }
        if (!nccl_open(&nccl, &err)) {
            test_fail(__FILE__, __LINE__, "%s", err.text);
            return false;
        }
        tiny = (Tiny*)dlsym(nccl.library, "tiny");
    }
    memset(tiny, 0, sizeof(*tiny));
    tiny->last_error = "";
    err.text[0] = '\0';
    return true;
}

static bool open_comm(double limit_ms, const volatile sig_atomic_t* stop) {
    NcclUniqueId id = {{55}};
    NcclOptions options = {limit_ms, stop, 0, 0};
    return nccl_comm_open(&comm, &nccl, &id, 1, 4, &options, &err);
}

// Opens the library and a communicator.
static bool open_both(void) {
    if (!open_library()) { return false; }
    check(open_comm(200, NULL));
    return true;
}

static bool all_reduce(void) {
    return nccl_all_reduce(&comm, &number, &number, 1024, NCCL_FLOAT32, NCCL_SUM, &number, &err);
}

// ---- the library ------------------------------------------------------------------

static void test_missing(void) {
    setenv("LLMC_NCCL", "/nowhere/libnccl.so.2", 1);
    check(!nccl_open(&nccl, &err));
    check_str(err.text,
              "NCCL, which several GPUs need: LLMC_NCCL=/nowhere/libnccl.so.2: cannot open shared object file: "
              "No such file or directory; " INSTALL);
    setenv("LLMC_NCCL", "", 1);
    void* installed = dlopen("libnccl.so.2", RTLD_LAZY);
    if (installed) { // on this machine it is not missing
        dlclose(installed);
        return;
    }
    check(!nccl_open(&nccl, &err));
    check_str(err.text, "NCCL, which several GPUs need: libnccl.so.2: cannot open shared object file: No such file or "
                        "directory; " INSTALL);
}

static void test_not_nccl(void) {
    char want[512];
    if (!compile("other", "-DVERSION=21805 -DncclCommFinalize=other")) { return; }
    check(!nccl_open(&nccl, &err));
    snprintf(want, sizeof(want), "%s: has no ncclCommFinalize: not NCCL, or damaged", getenv("LLMC_NCCL"));
    check_str(err.text, want);
    check(!nccl.library);
}

static void test_too_old(void) {
    static const struct {
        const char *flags, *version;
    } old[] = {{"-DVERSION=21799", "2.17.99"}, {"-DVERSION=2804 -DncclCommInitRankConfig=other", "2.8.4"}};
    for (size_t i = 0; i < 2; i++) {
        char want[1024];
        if (!compile(i ? "older" : "old", old[i].flags)) { return; }
        check(!nccl_open(&nccl, &err));
        snprintf(want, sizeof(want),
                 "%s: NCCL %s is too old: non-blocking communicators as they are used here need 2.18; %s",
                 getenv("LLMC_NCCL"), old[i].version, INSTALL);
        check_str(err.text, want);
    }
}

static void test_open(void) {
    char text[32];
    NcclUniqueId id;
    setenv("NCCL_COMM_BLOCKING", "1", 1);
    if (!compile("good", "-DVERSION=21800")) { return; }
    check(nccl_open(&nccl, &err));
    check(nccl.version == 21800);
    check_str(nccl_version_text(text, 23203), "2.32.3");
    check_str(getenv("NCCL_COMM_BLOCKING"), "0");
    if (!open_library()) { return; }
    check(nccl_unique_id(&nccl, &id, &err) && id.internal[0] == 77);
    tiny->result = 1;
    tiny->last_error = "first line\nsecond";
    check(!nccl_unique_id(&nccl, &id, &err));
    check_str(err.text, "NCCL: ncclGetUniqueId: cuda error: first line?second");
}

// ---- communicators ----------------------------------------------------------------

static void test_connect(void) {
    NcclUniqueId id = {{55}};
    NcclOptions options = {1000, NULL, 2, 6};
    NcclConfig config;
    if (!open_library()) { return; }
    check(sizeof(config) == 48 && sizeof(id) == 128);
    tiny->init_result = NCCL_IN_PROGRESS;
    tiny->polls = 20;
    check(nccl_comm_open(&comm, &nccl, &id, 3, 5, &options, &err));
    check(tiny->inits == 1 && tiny->queries == 21 && tiny->aborts == 0);
    check(tiny->rank == 3 && tiny->num_ranks == 5 && tiny->first_byte_of_id == 55);
    memcpy(&config, tiny->config, sizeof(config));
    check(config.size == 48 && config.magic == 0xcafebeef && config.version == 21800 && config.blocking == 0);
    check(config.min_ctas == 2 && config.max_ctas == 6 && config.cga_cluster_size == INT_MIN);
    check(!config.net_name && config.split_share == INT_MIN);
    check(open_comm(0, NULL) && comm.limit_ms == 60e3);
    memcpy(&config, tiny->config, sizeof(config));
    check(config.min_ctas == INT_MIN && config.max_ctas == INT_MIN);
}

static void test_connect_fails(void) {
    if (!open_library()) { return; }
    tiny->init_result = 1; // at once: there is nothing to abort
    tiny->last_error = "why";
    check(!open_comm(200, NULL));
    check_str(err.text, "NCCL: connecting rank 1 with 3 others: cuda error: why");
    check(tiny->aborts == 0);
    tiny->init_result = NCCL_IN_PROGRESS; // later
    tiny->polls = 3;
    tiny->state = 6;
    tiny->last_error = "";
    check(!open_comm(200, NULL));
    check_str(err.text, "NCCL: connecting rank 1 with 3 others: remote error");
    check(tiny->aborts == 1 && tiny->queries == 4);
    check(!all_reduce());
    check_str(err.text, "NCCL: all_reduce of 4096 bytes, rank 1 of 4: the communicator was aborted");
    check(nccl_comm_close(&comm, &err) && tiny->finalizes == 0);
}

static void test_never_ready(void) {
    if (!open_library()) { return; }
    tiny->init_result = NCCL_IN_PROGRESS;
    tiny->polls = INT_MAX;
    double begin = time_ms();
    check(!open_comm(100, NULL));
    check(time_ms() - begin >= 100);
    check(tiny->aborts == 1);
    check_str(err.text, "NCCL: connecting rank 1 with 3 others: not done after 0.1 s: is another rank gone?");
}

static volatile sig_atomic_t stop;
static void* stop_soon(void* unused) {
    struct timespec rest = {0, 30000000};
    nanosleep(&rest, NULL);
    stop = SIGTERM;
    return unused;
}

static void test_stop(void) {
    pthread_t thread;
    if (!open_library()) { return; }
    tiny->init_result = NCCL_IN_PROGRESS;
    tiny->polls = INT_MAX;
    stop = 0;
    require(pthread_create(&thread, NULL, stop_soon, NULL) == 0);
    check(!open_comm(60e3, &stop));
    pthread_join(thread, NULL);
    check_str(err.text, "NCCL: connecting rank 1 with 3 others: ended by signal 15");
    check(tiny->aborts == 1);
    tiny->polls = 50; // of no effect later: a step is not cut in two
    tiny->init_result = NCCL_SUCCESS;
    check(open_comm(60e3, &stop));
    tiny->result = NCCL_IN_PROGRESS;
    check(all_reduce());
}

static void test_close(void) {
    NcclComm never;
    memset(&never, 0, sizeof(never));
    check(nccl_comm_close(&never, &err));
    if (!open_both()) { return; }
    tiny->finalize_result = NCCL_IN_PROGRESS;
    tiny->polls = 2;
    check(nccl_comm_close(&comm, &err) && nccl_comm_close(&comm, &err));
    check(tiny->finalizes == 1 && tiny->destroys == 1 && tiny->queries == 3);
    check(open_comm(50, NULL));
    tiny->polls = INT_MAX;
    check(!nccl_comm_close(&comm, &err));
    check_str(err.text, "NCCL: ncclCommFinalize: not done after 0.05 s: is another rank gone?");
    check(tiny->finalizes == 2 && tiny->destroys == 1 && tiny->aborts == 0);
    check(open_comm(50, NULL));
    tiny->finalize_result = NCCL_SUCCESS;
    tiny->destroy_result = 1;
    check(!nccl_comm_close(&comm, &err));
    check_str(err.text, "NCCL: ncclCommDestroy: cuda error");
}

static void test_poll(void) {
    NcclComm never;
    memset(&never, 0, sizeof(never));
    check(nccl_comm_poll(&never, &err));
    nccl_comm_abort(&never);
    if (!open_both()) { return; }
    check(nccl_comm_poll(&comm, &err) && tiny->queries == 1);
    tiny->polls = 1;
    check(nccl_comm_poll(&comm, &err) && tiny->queries == 2);
    tiny->state = 6;
    tiny->last_error = "gone";
    check(!nccl_comm_poll(&comm, &err));
    check_str(err.text, "NCCL: rank 1 of 4: remote error: gone");
    pthread_mutex_lock(&comm.lock);
    check(nccl_comm_poll(&comm, &err) && tiny->queries == 3);
    pthread_mutex_unlock(&comm.lock);
    nccl_comm_abort(&comm);
    nccl_comm_abort(&comm);
    check(tiny->aborts == 1);
    check(nccl_comm_poll(&comm, &err) && tiny->queries == 3);
}

static void* abort_soon(void* unused) {
    struct timespec rest = {0, 50000000};
    nanosleep(&rest, NULL);
    nccl_comm_abort(&comm);
    return unused;
}

static void test_abort(void) {
    pthread_t thread;
    if (!open_both()) { return; }
    comm.limit_ms = 60e3;
    tiny->result = NCCL_IN_PROGRESS; // waits for the collective to be on its stream
    tiny->polls = INT_MAX;
    require(pthread_create(&thread, NULL, abort_soon, NULL) == 0);
    check(!all_reduce());
    pthread_join(thread, NULL);
    check_str(err.text, "NCCL: all_reduce of 4096 bytes, rank 1 of 4: aborted");
    check(tiny->aborts == 1);
    if (!open_both()) { return; }
    tiny->blocks = 1; // is in NCCL, with the lock, and only the abort frees it
    double begin = time_ms();
    require(pthread_create(&thread, NULL, abort_soon, NULL) == 0);
    check(!all_reduce());
    check(time_ms() - begin >= 2000);
    pthread_join(thread, NULL);
    check_str(err.text, "NCCL: all_reduce of 4096 bytes, rank 1 of 4: aborted");
    check(nccl_comm_close(&comm, &err) && tiny->finalizes == 0);
}

// ---- collectives ------------------------------------------------------------------

static bool got(const void* inp, void* out, unsigned long count, int type, int op, int root) {
    return tiny->inp == inp && tiny->out == out && tiny->count == count && tiny->type == type && tiny->op == op &&
           tiny->root == root && tiny->stream == &number;
}

static void test_collectives(void) {
    char out[64], inp[64];
    if (!open_both()) { return; }
    check(nccl_all_reduce(&comm, out, inp, 3, NCCL_BFLOAT16, NCCL_MAX, &number, &err) && got(inp, out, 3, 9, 2, -1));
    check(nccl_reduce_scatter(&comm, out, inp, 4, NCCL_FLOAT32, NCCL_SUM, &number, &err) && got(inp, out, 4, 7, 0, -2));
    check(nccl_reduce(&comm, out, inp, 7, NCCL_FLOAT64, NCCL_MAX, 3, &number, &err) && got(inp, out, 7, 8, 2, 3));
    check(nccl_all_gather(&comm, out, inp, 5, NCCL_FLOAT16, &number, &err) && got(inp, out, 5, 6, -1, -3));
    check(nccl_broadcast(&comm, out, inp, 6, NCCL_UINT64, 2, &number, &err) && got(inp, out, 6, 5, -1, 2));
    tiny->result = 6;
    check(!nccl_reduce_scatter(&comm, out, inp, 4, NCCL_FLOAT32, NCCL_SUM, &number, &err));
    check_str(err.text, "NCCL: reduce_scatter of 64 bytes, rank 1 of 4: remote error");
    check(!nccl_reduce(&comm, out, inp, 7, NCCL_FLOAT64, NCCL_SUM, 3, &number, &err));
    check_str(err.text, "NCCL: reduce of 56 bytes, rank 1 of 4: remote error");
    check(!nccl_all_gather(&comm, out, inp, 5, NCCL_FLOAT64, &number, &err));
    check_str(err.text, "NCCL: all_gather of 160 bytes, rank 1 of 4: remote error");
    check(!nccl_broadcast(&comm, out, inp, 6, NCCL_INT8, 2, &number, &err));
    check_str(err.text, "NCCL: broadcast of 6 bytes, rank 1 of 4: remote error");
}

static void test_waiting(void) {
    if (!open_both()) { return; }
    tiny->result = NCCL_IN_PROGRESS;
    tiny->polls = 5;
    check(all_reduce() && tiny->queries == 6);
    tiny->polls = 2;
    tiny->state = 1;
    check(!all_reduce());
    check_str(err.text, "NCCL: all_reduce of 4096 bytes, rank 1 of 4: cuda error");
    tiny->polls = INT_MAX;
    check(!all_reduce());
    check_str(err.text, "NCCL: all_reduce of 4096 bytes, rank 1 of 4: not done after 0.2 s: is another rank gone?");
    check(tiny->aborts == 0); // it may have to wait for CUDA graphs: the caller has to say what happened first
}

static void test_groups(void) {
    if (!open_both()) { return; }
    check(nccl_group_end(&comm, &err) && tiny->ends == 0);
    tiny->result = tiny->end_result = NCCL_IN_PROGRESS;
    tiny->polls = 3;
    check(nccl_group_start(&comm, &err) && all_reduce() && all_reduce() && tiny->queries == 0);
    check(nccl_comm_poll(&comm, &err) && tiny->queries == 0); // the group has the lock
    check(nccl_group_end(&comm, &err) && tiny->queries == 4 && tiny->starts == 1 && tiny->ends == 1);
    tiny->polls = INT_MAX;
    check(nccl_group_start(&comm, &err) && all_reduce() && all_reduce() && all_reduce() &&
          !nccl_group_end(&comm, &err));
    check_str(err.text, "NCCL: ncclGroupEnd of 3 calls, rank 1 of 4: not done after 0.2 s: is another rank gone?");
    tiny->polls = 0;
    tiny->result = 1;
    check(nccl_group_start(&comm, &err) && !all_reduce());
    tiny->end_result = 1;
    check(!nccl_group_end(&comm, NULL));
    tiny->start_result = 6;
    check(!nccl_group_start(&comm, &err));
    check_str(err.text, "NCCL: ncclGroupStart: remote error");
    check(nccl_group_end(&comm, &err) && tiny->ends == 3);
    nccl_comm_abort(&comm); // the lock was given back
    check(!nccl_group_start(&comm, &err));
    check_str(err.text, "NCCL: ncclGroupStart: the communicator was aborted");
}

static const Test tests[] = {
    {"missing", "no library, where LLMC_NCCL points to and where the linker looks", test_missing},
    {"not_nccl", "a library that lacks a function", test_not_nccl},
    {"too_old", "versions before 2.18", test_too_old},
    {"open", "the version, the environment, the unique id and its error", test_open},
    {"connect", "waits until NCCL is done; the configuration that NCCL gets", test_connect},
    {"connect_fails", "errors at once and in the background", test_connect_fails},
    {"never_ready", "the time limit", test_never_ready},
    {"stop", "a signal ends the connecting, and no collective", test_stop},
    {"close", "finalize, wait, destroy, and their errors", test_close},
    {"poll", "the watchdog's function", test_poll},
    {"abort", "by another thread, while a call waits or blocks", test_abort},
    {"collectives", "arguments and messages", test_collectives},
    {"waiting", "until a call is on its stream", test_waiting},
    {"groups", "nothing is waited for inside; the lock", test_groups},
};
int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
