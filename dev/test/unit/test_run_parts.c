/*
Checkpoints that several ranks write together: the files are byte for byte those of run_save(), for any number of ranks. No
failing operation, no killed rank and no leftover gives a half-written checkpoint or takes an older one away, and the ranks
that are left end in time and name the one that failed.

    test_run_parts --rank DIR STEP SEED CONFIG RANK RANKS TOKEN LIMIT_MS SAID    the tests below run this with failing_write.so
*/
#include "../../../llmc/run_parts.h"
#include "../../../llmc/saver.h"
#include "fast_dir.h"
#include "../test.h"
#include <sys/wait.h>

enum { MOST_RANKS = 64 };

// maxT, V, Vp, L, NH, C, F, epsilon, then what GPT-2 has not, such as a head of its own. The first is for the tests with many saves; the last has tensors of more than one
// chunk.
static const GPT2Config configs[] = {
    {8, 257, 384, 1, 2, 4, 16, 1e-5f, 0, 0, 0, 0},       {3, 31, 128, 3, 1, 8, 20, 1e-6f, ACT_RELU, 1, 1, 1},
    {16, 1000, 1024, 2, 4, 20, 80, 1e-5f, 0, 0, 0, 0},   {1, 1, 128, 1, 1, 1, 4, 1e-5f, 0, 0, 0, 0},
    {4, 2500, 2560, 1, 4, 516, 2064, 1e-5f, 0, 0, 0, 0},
};
enum { NUM_CONFIGS = sizeof(configs) / sizeof(configs[0]) };

// ---- files ----------------------------------------------------------------------------

static const char* step_path(const char* dir, int64_t step) {
    char name[RUN_NAME];
    run_step_name(name, step);
    return in(dir, name);
}

// Reads a file into text (size bytes); "" if there is none.
static char* read_text(char* text, size_t size, const char* path) {
    FILE* f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, size - 1, f) : 0;
    if (f) { fclose(f); }
    text[n] = '\0';
    return text;
}

static void write_text(const char* path, const char* text) {
    FILE* f = fopen(path, "wb");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) { die("%s: cannot write", path); }
}

// Number of names in dir that begin with prefix, without "." and "..".
static int count_names(const char* dir, const char* prefix) {
    DIR* d = opendir(dir);
    int n = 0;
    for (struct dirent* e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) { continue; }
        n += strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    }
    if (d) { closedir(d); }
    return n;
}

static bool same_file(const char* a, const char* b) {
    MappedFile x, y;
    Error err;
    if (!map_file(&x, a, &err)) { return false; }
    bool same = map_file(&y, b, &err);
    if (same) {
        same = x.size == y.size && memcmp(x.data, y.data, x.size) == 0;
        unmap_file(&y);
    }
    unmap_file(&x);
    return same;
}

// True if two directories hold the same names with the same bytes.
static bool same_directory(const char* a, const char* b) {
    DIR* d = opendir(a);
    bool same = d != NULL && count_names(a, "") > 0 && count_names(a, "") == count_names(b, "");
    for (struct dirent* e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) { continue; }
        if (!same_file(in(a, e->d_name), in(b, e->d_name))) {
            printf("%s differs in %s and %s\n", e->d_name, a, b);
            same = false;
        }
    }
    if (d) { closedir(d); }
    return same;
}

// ---- a small run --------------------------------------------------------------------------

typedef struct {
    RunState state;
    float* arrays[3]; // (num_parameters(state.config)) each: weights, m, v
} Run;

static uint64_t next_random(uint64_t* s) { // splitmix64
    uint64_t z = (*s += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Makes a run whose arrays have random finite values of every magnitude; the padding rows of wte are NaNs, which no file may have.
static void run_make(Run* run, const GPT2Config* config, int64_t step, uint64_t seed) {
    size_t n = num_parameters(config), used = (size_t)config->vocab_size * (size_t)config->channels;
    size_t padded = (size_t)config->padded_vocab_size * (size_t)config->channels;
    memset(run, 0, sizeof(*run));
    run->state.config = *config;
    run->state.step = step;
    run->state.seed = next_random(&seed);
    run->state.num_tokens_seen = (int64_t)(seed >> 8);
    run->state.best_val_loss = INFINITY;
    run->state.eot_id = -1;
    for (int i = 0; i < 20; i++) { outlier_update(&run->state.loss_outliers, (double)next_random(&seed)); }
    for (int a = 0; a < 3; a++) {
        run->arrays[a] = (float*)malloc_check(n * sizeof(float));
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)next_random(&seed);
            if ((bits & 0x7F800000u) == 0x7F800000u) { bits ^= 0x40000000u; }
            if (i >= used && i < padded) { bits = 0x7FC00000u; }
            memcpy(&run->arrays[a][i], &bits, sizeof(bits));
        }
    }
}

static void run_free(Run* run) {
    for (int a = 0; a < 3; a++) { free(run->arrays[a]); }
}

// Saves the run in dir with run_save(), which must succeed.
static void put(const char* dir, int config, int64_t step, uint64_t seed, const Tokenizer* tokenizer) {
    Run run;
    Error err;
    run_make(&run, &configs[config], step, seed);
    if (!run_save(dir, &run.state, run.arrays[0], run.arrays[1], run.arrays[2], tokenizer, &err)) {
        die("%s", err.text);
    }
    run_free(&run);
}

// The buffer of one rank, filled as the training program fills it. The caller frees it.
static float* make_buffer(const Run* run, const RunParts* parts, int rank) {
    float* buffer = (float*)malloc_check(parts->rank_floats[rank] * sizeof(float));
    for (int i = 0; i < parts->num_parts; i++) {
        const RunPart* part = &parts->parts[i];
        size_t at = param_offset(&run->state.config, part->p) + (size_t)part->layer * part->floats;
        if (part->rank != rank) { continue; }
        memcpy(buffer + part->offset, run->arrays[part->array] + at, part->floats * sizeof(float));
    }
    return buffer;
}

// ---- saves by several processes -----------------------------------------------------------------

typedef struct {
    const char* dir;
    int64_t step;
    uint64_t seed, token;
    int config, num_ranks;
    double limit_ms;
    const Tokenizer* tokenizer;
    int late_rank, late_ms; // late_rank begins so much later; if late_ms is negative, never
    int odd_rank;           // saves another configuration: other heads, or another epsilon if odd_epsilon is true
    bool odd_epsilon;
    bool nan; // a weight that the last rank saves is NaN
    // operation fail_at of fail_rank fails; see failing_write.c. mode NULL: none fails
    const char* mode;
    int fail_rank, fail_at, error;
    bool stop; // sets the flag for all ranks when fail_rank has ended, or at once if late_rank never comes
} Job;

typedef struct {
    int code;        // exit code, 128 + signal; -1: it never came
    char said[1200]; // its error, "" on success
} Outcome;

static const char* self;
static char shim[256];
static int* stop_flag; // shared by all processes

static Job make_job(const char* dir, int config, int num_ranks, int64_t step, uint64_t seed) {
    static uint64_t tokens = 0x5EED;
    Job job;
    memset(&job, 0, sizeof(job));
    job.dir = dir;
    job.step = step;
    job.seed = seed;
    job.token = next_random(&tokens);
    job.config = config;
    job.num_ranks = num_ranks;
    job.limit_ms = 60000.0;
    job.late_rank = job.odd_rank = job.fail_rank = -1;
    return job;
}

// Saves as one rank; writes the error to the file `said`. Returns the exit code.
static int save_as(const Job* job, int rank, const int* stop, const char* said) {
    Run run;
    RunParts parts;
    Error err;
    RunRank me = {rank, job->num_ranks, job->token, job->limit_ms, stop, NULL};
    run_make(&run, &configs[job->config], job->step, job->seed);
    if (rank == job->odd_rank && job->odd_epsilon) { run.state.config.norm_epsilon = 1e-6f; }
    if (rank == job->odd_rank && !job->odd_epsilon) { run.state.config.num_heads = 1; }
    run_parts(&parts, &run.state.config, job->num_ranks);
    float* buffer = make_buffer(&run, &parts, rank);
    if (job->nan && rank == job->num_ranks - 1) { buffer[0] = NAN; } // its first part is one of the weights
    bool ok = run_save_parts(job->dir, &run.state, &parts, &me, buffer, job->tokenizer, &err);
    write_text(said, ok ? "" : err.text);
    free(buffer);
    run_parts_free(&parts);
    run_free(&run);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

static const char* trace_path(void) { return in(test_dir(), "trace"); }
static const char* count_path(void) { return in(test_dir(), "count"); }

// Replaces this process by one in which an operation fails.
static void exec_failing(const Job* job, int rank, const char* said) {
    char options[256], numbers[8][32];
    const char* asan = getenv("ASAN_OPTIONS");
    int fd = open(in(test_dir(), "stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(fd, STDERR_FILENO); // its warnings
    // asan's runtime insists on being loaded first, which makes no difference here
    snprintf(options, sizeof(options), "%s:verify_asan_link_order=0", asan ? asan : "");
    setenv("ASAN_OPTIONS", options, 1);
    setenv("LD_PRELOAD", shim, 1);
    setenv("FAIL_DIR", job->dir, 1);
    setenv("FAIL_MODE", job->mode, 1);
    setenv("FAIL_COUNT_FILE", count_path(), 1);
    if (job->fail_at == 0) { setenv("FAIL_TRACE", trace_path(), 1); }
    snprintf(numbers[0], sizeof(numbers[0]), "%d", job->fail_at);
    setenv("FAIL_AT", numbers[0], 1);
    snprintf(numbers[1], sizeof(numbers[1]), "%d", job->error);
    setenv("FAIL_ERRNO", numbers[1], 1);
    const long long values[8] = {job->step,
                                 (long long)job->seed,
                                 job->config,
                                 rank,
                                 job->num_ranks,
                                 (long long)job->token,
                                 (long long)job->limit_ms,
                                 0};
    for (int i = 0; i < 7; i++) { snprintf(numbers[i], sizeof(numbers[i]), "%lld", values[i]); }
    execl(self, self, "--rank", job->dir, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5],
          numbers[6], said, (char*)NULL);
    _exit(99);
}

// Runs the job with a process for each rank. Returns how many ranks succeeded.
static int run_job(const Job* job, Outcome* outcomes) {
    pid_t pids[MOST_RANKS];
    int num_left = 0, num_good = 0;
    __atomic_store_n(stop_flag, job->stop && job->late_ms < 0 ? -1 : 0, __ATOMIC_RELEASE);
    fflush(stdout);
    for (int r = 0; r < job->num_ranks; r++) {
        char name[32];
        snprintf(name, sizeof(name), "said.%d", r);
        const char* said = in(test_dir(), name);
        unlink(said);
        outcomes[r].code = -1;
        pids[r] = -1;
        if (r == job->late_rank && job->late_ms < 0) { continue; }
        pids[r] = fork();
        if (pids[r] == 0) {
            if (r == job->late_rank) { usleep((useconds_t)(1000 * job->late_ms)); }
            if (r == job->fail_rank && job->mode) { exec_failing(job, r, said); }
            _exit(save_as(job, r, stop_flag, said));
        }
        num_left++;
    }
    for (; num_left > 0; num_left--) {
        int status = -1;
        pid_t pid = wait(&status);
        char name[64]; // clang's OpenMP leaves this file if a process does not end with exit()
        snprintf(name, sizeof(name), "/dev/shm/__KMP_REGISTERED_LIB_%ld_%ld", (long)pid, (long)getuid());
        unlink(name);
        for (int r = 0; r < job->num_ranks; r++) {
            if (pids[r] != pid) { continue; }
            outcomes[r].code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            num_good += outcomes[r].code == 0;
            if (r == job->fail_rank && job->stop) { __atomic_store_n(stop_flag, 1 + r, __ATOMIC_RELEASE); }
        }
    }
    for (int r = 0; r < job->num_ranks; r++) {
        char name[32];
        snprintf(name, sizeof(name), "said.%d", r);
        read_text(outcomes[r].said, sizeof(outcomes[r].said), in(test_dir(), name));
    }
    return num_good;
}

// Runs a job, which must succeed on all ranks.
static void run_good_job(const Job* job) {
    Outcome outcomes[MOST_RANKS];
    int num_good = run_job(job, outcomes);
    for (int r = 0; r < job->num_ranks && num_good < job->num_ranks; r++) {
        check_msg(outcomes[r].code == 0, "rank %d of %d ends with %d: %s", r, job->num_ranks, outcomes[r].code,
                  outcomes[r].said);
    }
}

// The checkpoint that run_save() writes of this configuration, step and seed; written once.
static const char* reference(int config, int64_t step, uint64_t seed) {
    char name[64];
    snprintf(name, sizeof(name), "reference_%d_%llu", config, (unsigned long long)seed);
    const char* dir = in(fast_dir(), name);
    if (!file_exists(step_path(dir, step))) { put(dir, config, step, seed, NULL); }
    return step_path(dir, step);
}

static bool holds(const char* dir, int config, int64_t step, uint64_t seed) {
    const char* path = step_path(dir, step);
    return file_exists(path) && same_directory(path, reference(config, step, seed));
}

// ---- tests: who saves what ------------------------------------------------------------------------

static void test_combine(void) {
    uint8_t data[3000];
    uint64_t seed = 1;
    for (size_t i = 0; i < sizeof(data); i++) { data[i] = (uint8_t)next_random(&seed); }
    for (size_t n = 0; n <= sizeof(data); n += n < 70 ? 1 : 97) {
        for (size_t i = 0; i <= n; i += n < 70 ? 1 : 61) {
            uint32_t all = crc32c_combine(crc32c(0, data, i), crc32c(0, data + i, n - i), n - i);
            check(all == crc32c(0, data, n));
        }
    }
    // 5 GiB of zeros, in pieces of 1 GiB, which are made of pieces of 1 MiB
    uint8_t* zeros = (uint8_t*)calloc_check(1 << 20, 1);
    uint32_t mib = crc32c(0, zeros, 1 << 20), gib = 0, direct = 0;
    for (int i = 0; i < 1024; i++) { gib = crc32c_combine(gib, mib, 1 << 20); }
    for (int i = 0; i < 1024; i++) { direct = crc32c(direct, zeros, 1 << 20); }
    check(gib == direct);
    uint32_t left = 0, right = 0;
    for (int i = 0; i < 5; i++) { left = crc32c_combine(left, gib, (uint64_t)1 << 30); }
    for (int i = 0; i < 5; i++) { right = crc32c_combine(gib, right, (uint64_t)i << 30); }
    check(left == right && left != gib);
    free(zeros);
}

static void check_dealing(const GPT2Config* config, int num_ranks, bool balanced) {
    RunParts a, b;
    size_t at[3] = {0, 0, 0}, total = 3 * num_parameters(config), largest = 0, most = 0, sum = 0;
    run_parts(&a, config, num_ranks);
    run_parts(&b, config, num_ranks);
    check(a.num_parts == b.num_parts && memcmp(a.parts, b.parts, (size_t)a.num_parts * sizeof(RunPart)) == 0);
    size_t* used = (size_t*)calloc_check((size_t)num_ranks, sizeof(size_t));
    for (int i = 0; i < a.num_parts; i++) { // in the order of the arrays, and without gaps in each buffer
        const RunPart* part = &a.parts[i];
        check(param_offset(config, part->p) + (size_t)part->layer * part->floats == at[part->array]);
        check(part->rank >= 0 && part->rank < num_ranks && part->offset == used[part->rank]);
        at[part->array] += part->floats;
        used[part->rank] += part->floats;
        largest = part->floats > largest ? part->floats : largest;
    }
    for (int r = 0; r < num_ranks; r++) {
        check(used[r] == a.rank_floats[r]);
        most = used[r] > most ? used[r] : most;
        sum += used[r];
    }
    for (int array = 0; array < 3; array++) { check(at[array] == num_parameters(config)); }
    check(sum == total);
    double mean = (double)total / num_ranks, limit = 1.2 * mean > (double)largest ? 1.2 * mean : (double)largest;
    check_msg(!balanced || (double)most <= limit, "%d ranks: %zu floats, mean %.0f, largest part %zu", num_ranks, most,
              mean, largest);
    check((double)most <= mean + (double)largest); // of every dealing that gives to the one with the least
    free(used);
    run_parts_free(&a);
    run_parts_free(&b);
}

static void test_dealing(void) {
    static const char* const models[] = {"d6", "d12", "d24", "d36", "d48", "gpt3:c384", "gpt3:c2048", "gpt3:c12288"};
    static const int ranks[] = {1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 1000};
    for (size_t i = 0; i < sizeof(ranks) / sizeof(ranks[0]); i++) {
        for (int c = 0; c < NUM_CONFIGS; c++) { check_dealing(&configs[c], ranks[i], false); }
        for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
            GPT2Config config;
            Error err;
            check(config_from_descriptor(&config, models[m], &err));
            check_dealing(&config, ranks[i], true);
        }
    }
    RunParts one;
    run_parts(&one, &configs[0], 1);
    for (int i = 0; i < one.num_parts; i++) { // the buffer of a single rank is the three arrays
        const RunPart* part = &one.parts[i];
        check(part->offset == (size_t)part->array * num_parameters(&configs[0]) + param_offset(&configs[0], part->p) +
                                  (size_t)part->layer * part->floats);
    }
    run_parts_free(&one);
}

// ---- tests: the same bytes ------------------------------------------------------------------------

static void test_same_bytes(void) {
    static const int ranks[] = {1, 2, 3, 5, 8, 16};
    for (int c = 0; c < NUM_CONFIGS; c++) {
        const char* dir = fresh();
        for (size_t i = 0; i < sizeof(ranks) / sizeof(ranks[0]); i++) {
            if (c == NUM_CONFIGS - 1 && ranks[i] != 3) { continue; } // its arrays have 30 MB
            Job job = make_job(dir, c, ranks[i], 12, 100 + (uint64_t)c);
            RunState state;
            Error err;
            run_remove_directory(step_path(dir, 12), NULL);
            run_good_job(&job);
            check_msg(holds(dir, c, 12, job.seed), "config %d, %d ranks: other bytes than run_save()", c, ranks[i]);
            check(run_verify(step_path(dir, 12), &state, &err) && state.step == 12);
            check(count_names(dir, "") == 1); // nothing else is left
        }
    }
    check(!holds(fast_dir(), 0, 12, 7)); // holds() can fail
}

// the smallest model has 48 parts
static void test_ranks_without_parts(void) {
    const char* dir = fresh();
    Job job = make_job(dir, 3, MOST_RANKS, 1, 4);
    RunParts parts;
    run_parts(&parts, &configs[3], MOST_RANKS);
    check(parts.rank_floats[MOST_RANKS - 1] == 0);
    run_parts_free(&parts);
    run_good_job(&job);
    check(holds(dir, 3, 1, 4) && count_names(dir, "") == 1);
}

// a weight that is no number, on one rank: none of them has saved, and each says why
static void test_not_finite(void) {
    const char* dir = fresh();
    Job job = make_job(dir, 1, 3, 5, 9);
    Outcome outcomes[MOST_RANKS];
    job.nan = true;
    check(run_job(&job, outcomes) == 0 && count_names(dir, "") == 0);
    for (int r = 0; r < 3; r++) {
        check_msg(strstr(outcomes[r].said, "' is not finite: nan at [0"), "rank %d: '%s'", r, outcomes[r].said);
        check_msg((r == 2) == (strncmp(outcomes[r].said, "tensor ", 7) == 0), "rank %d: '%s'", r, outcomes[r].said);
    }
}

static void test_loads_again(void) {
    const char* dir = fresh();
    Job job = make_job(dir, 1, 3, 5, 9);
    Run want, got;
    Error err;
    run_good_job(&job);
    run_make(&want, &configs[1], 5, 9);
    run_make(&got, &configs[1], 5, 10);
    check(run_load(step_path(dir, 5), &got.state, got.arrays[0], got.arrays[1], got.arrays[2], &err));
    size_t C = (size_t)configs[1].channels, begin = (size_t)configs[1].vocab_size * C;
    size_t end = (size_t)configs[1].padded_vocab_size * C, n = num_parameters(&configs[1]);
    size_t head = param_offset(&configs[1], NUM_PARAMS - 1); // the padding of both embeddings is not saved
    require(head + end == n);
    for (int a = 0; a < 3; a++) {
        check(memcmp(got.arrays[a], want.arrays[a], begin * sizeof(float)) == 0);
        check(memcmp(got.arrays[a] + end, want.arrays[a] + end, (head + begin - end) * sizeof(float)) == 0);
    }
    check(memcmp(&got.state, &want.state, sizeof(want.state)) == 0);
    run_free(&want);
    run_free(&got);
}

static void test_tokenizer_inside(void) {
    const char *dir = fresh(), *other = fresh();
    Tokenizer bytes;
    tokenizer_init_bytes(&bytes);
    put(other, 0, 3, 3, &bytes);
    Job job = make_job(dir, 0, 3, 3, 3);
    job.tokenizer = &bytes;
    run_good_job(&job);
    check(file_exists(in(step_path(dir, 3), "vocab.json")));
    check(same_directory(step_path(dir, 3), step_path(other, 3)));
    tokenizer_free(&bytes);
}

static void test_same_step_replaced(void) {
    const char* dir = fresh();
    put(dir, 0, 4, 1, NULL);
    put(dir, 0, 5, 1, NULL);
    Job job = make_job(dir, 0, 3, 5, 2);
    run_good_job(&job);
    check(holds(dir, 0, 5, 2) && holds(dir, 0, 4, 1) && count_names(dir, "") == 2);
}

// ---- tests: leftovers and times ---------------------------------------------------------------------

// What dead saves of the same step left is not taken for this save, and removed at the next start.
static void test_leftovers(void) {
    const char* dir = fresh();
    Job job = make_job(dir, 0, 3, 6, 6);
    Error err;
    job.late_rank = 0; // so that the others look at the leftovers first
    job.late_ms = 300;
    check(mkdir(dir, 0777) == 0);
    pid_t dead = fork(); // a process that has ended
    if (dead == 0) { _exit(0); }
    waitpid(dead, NULL, 0);
    static const char* const prefixes[] = {".tmp-", ".end-"};
    for (int i = 0; i < 2; i++) {
        char name[RUN_NAME];
        snprintf(name, sizeof(name), "%sstep_00000006-%ld", prefixes[i], (long)dead);
        const char* left = in(dir, name);
        check(mkdir(left, 0777) == 0);
        for (int r = 0; r < 3; r++) { // of an earlier save
            snprintf(name, sizeof(name), ".%016llx.%d", (unsigned long long)job.token + 1, r);
            write_text(in(left, name), "rank 1: an old failure\n");
        }
        snprintf(name, sizeof(name), ".%016llx.1.new", (unsigned long long)job.token);
        write_text(in(left, name), "");
        write_text(in(left, "model.safetensors"), "half");
        write_text(in(left, ".x"), "");
    }
    run_good_job(&job);
    check(holds(dir, 0, 6, 6));
    check(run_remove_leftovers(dir, &err));
    check(count_names(dir, "") == 1);
}

static void test_late_rank(void) {
    for (int r = 0; r < 2; r++) {
        const char* dir = fresh();
        Job job = make_job(dir, 0, 3, 2, 2);
        job.late_rank = r;
        job.late_ms = r == 0 ? 500 : 2000;
        double start = time_ms();
        run_good_job(&job);
        check(holds(dir, 0, 2, 2) && count_names(dir, "") == 1 && time_ms() - start > 0.9 * job.late_ms);
    }
}

// True if every rank but this one failed and names it.
static bool all_name(const Outcome* outcomes, int num_ranks, int rank) {
    bool ok = true;
    for (int r = 0; r < num_ranks; r++) {
        const char *said = outcomes[r].said, *list = strncmp(said, "rank", 4) == 0 ? said + 4 : "";
        bool named = false;
        if (r == rank) { continue; }
        list += *list == 's';
        for (char* end; *list == ' '; list = end + (*end == ',')) { // others may be late too: "ranks 1, 2 had not ..."
            long number = strtol(list, &end, 10);
            if (end == list) { break; }
            named |= number == rank;
        }
        if (outcomes[r].code != 1 || !named) {
            test_fail(__FILE__, __LINE__, "rank %d ends with %d and says '%s'", r, outcomes[r].code, said);
            ok = false;
        }
    }
    return ok;
}

// A rank that never comes: the others end when the time is over, and name it.
static void test_rank_never_comes(void) {
    for (int i = 0; i < 3; i++) {
        const char* dir = fresh();
        Job job = make_job(dir, 0, 3, 2, 2);
        Outcome outcomes[MOST_RANKS];
        put(dir, 0, 1, 1, NULL);
        job.late_rank = i;
        job.late_ms = -1;
        job.limit_ms = 300.0;
        double start = time_ms();
        check(run_job(&job, outcomes) == 0);
        check_msg(time_ms() - start < 30000.0, "%.0f ms", time_ms() - start);
        check(all_name(outcomes, 3, i));
        for (int r = 0; r < 3; r++) { check(r == i || strstr(outcomes[r].said, " within 0.3 s") != NULL); }
        check(holds(dir, 0, 1, 1) && count_names(dir, "step_") == 1 && count_names(dir, ".tmp-") == 0);
    }
}

// A rank that comes when the others have given up learns it from the result that they left.
static void test_too_late(void) {
    const char* dir = fresh();
    Job job = make_job(dir, 0, 3, 2, 2);
    Outcome outcomes[MOST_RANKS];
    job.late_rank = 1;
    job.late_ms = 900;
    job.limit_ms = 300.0;
    check(run_job(&job, outcomes) == 0 && all_name(outcomes, 3, 1));
    check_msg(strstr(outcomes[1].said, " within 0.3 s") != NULL, "it says '%s'", outcomes[1].said);
    check(count_names(dir, "") == 0);
}

// The caller ends the wait.
static void test_stop(void) {
    for (int i = 0; i < 3; i++) {
        const char* dir = fresh();
        Job job = make_job(dir, 0, 3, 2, 2);
        Outcome outcomes[MOST_RANKS];
        job.late_rank = i;
        job.late_ms = -1;
        job.stop = true;
        double start = time_ms();
        check(run_job(&job, outcomes) == 0);
        check(time_ms() - start < 30000.0);
        for (int r = 0; r < 3; r++) {
            check_msg(r == i || strstr(outcomes[r].said, "stopped") != NULL, "rank %d says '%s'", r, outcomes[r].said);
        }
        check(count_names(dir, "step_") == 0 && count_names(dir, ".tmp-") == 0);
    }
    // between the end of the files and the result, too, the error says why the wait ended
    int stopped = -1;
    uint8_t progress[2];
    PartsSave s;
    RunRank me = {1, 2, 7, 300.0, &stopped, NULL};
    Error err;
    memset(&s, 0, sizeof(s));
    s.out_dir = test_dir();
    s.me = &me;
    s.limit_ms = me.limit_ms;
    s.progress = progress;
    path_set(&s.hidden, "%s/removed", test_dir());
    check(!parts_blame(&s, &err));
    check_msg(strstr(err.text, "left no result when the save was stopped") != NULL, "it says '%s'", err.text);
    stopped = 0;
    check(!parts_blame(&s, &err) && strstr(err.text, "left no result within 0.3 s") != NULL);
}

static void test_other_model(void) {
    for (int i = 0; i < 2; i++) {
        const char* dir = fresh();
        Job job = make_job(dir, 0, 4, 2, 2);
        Outcome outcomes[MOST_RANKS];
        job.odd_rank = 2;
        job.odd_epsilon = i == 1;
        check(run_job(&job, outcomes) == 0);
        for (int r = 0; r < 4; r++) {
            check_msg(strstr(outcomes[r].said, "rank 2: it saves another") == outcomes[r].said, "rank %d says '%s'", r,
                      outcomes[r].said);
        }
        check(count_names(dir, "") == 0);
    }
}

// ---- tests: failing operations ----------------------------------------------------------------------

static bool build_shim(void) {
    char command[512];
    if (shim[0]) { return true; }
    const char* cc = getenv("CC") ? getenv("CC") : "cc";
    snprintf(command, sizeof(command),
             "%s -shared -fPIC -o %s/failing_write.so dev/test/stand-ins/failing_write.c -ldl", cc, test_dir());
    if (system(command) != 0) {
        test_fail(__FILE__, __LINE__, "cannot build: %s", command);
        return false;
    }
    snprintf(shim, sizeof(shim), "%s/failing_write.so", test_dir());
    return true;
}

enum { FAIL_RANKS = 3, OLDER = 5 };

// Removes everything but the older checkpoint.
static void clean(const char* dir) {
    Error err;
    DIR* d = opendir(dir);
    for (struct dirent* e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        if (e->d_name[0] == '.' && strlen(e->d_name) < 3) { continue; }
        if (run_step_of_name(e->d_name) != OLDER) { run_remove_directory(in(dir, e->d_name), &err); }
    }
    if (d) { closedir(d); }
}

// Runs the job; operation 0: none fails, returns how many there are.
static int count_operations(Job job) {
    char text[32];
    unlink(trace_path());
    job.mode = "once";
    job.fail_at = 0;
    run_good_job(&job);
    return atoi(read_text(text, sizeof(text), count_path()));
}

// LLMC_WRITE_STRIDE=5: each fifth operation, under the sanitizers
static int write_stride(void) {
    const char* stride = getenv("LLMC_WRITE_STRIDE");
    return stride && atoi(stride) > 1 ? atoi(stride) : 1;
}

// Three ranks save, once for each operation of each rank, which fails. The older checkpoint must survive, the new one be
// whole or absent, and each rank that is left must name the one that failed.
static void save_with_failures(const char* mode, int error) {
    const char* dir = fresh();
    bool killed = strcmp(mode, "kill") == 0, full = strcmp(mode, "from") == 0;
    if (!build_shim()) { return; }
    put(dir, 0, OLDER, 1, NULL);
    for (int rank = 0; rank < FAIL_RANKS; rank++) {
        Job job = make_job(dir, 0, FAIL_RANKS, 6, 2);
        job.fail_rank = rank;
        job.error = error;
        int num_calls = count_operations(job), unreported = 0;
        check_msg(num_calls > 20, "rank %d: only %d operations are seen", rank, num_calls);
        for (int at = 1; at <= num_calls; at += write_stride()) {
            Outcome outcomes[MOST_RANKS];
            char name[32];
            clean(dir);
            job.token++;
            job.mode = mode;
            job.fail_at = at;
            job.stop = killed || (full && rank == 0); // then it cannot always tell the others
            snprintf(name, sizeof(name), "rank %d", rank);
            int num_good = run_job(&job, outcomes);
            bool saved = holds(dir, 0, 6, 2);
            for (int r = 0; r < FAIL_RANKS; r++) {
                const Outcome* o = &outcomes[r];
                bool named = strstr(o->said, name) != NULL;
                int want = killed && r == rank ? 128 + SIGKILL : o->code == 0 ? 0 : 1;
                check_msg(o->code == want, "%s %d of rank %d: rank %d ends with %d", mode, at, rank, r, o->code);
                check_msg(o->code != 1 || r == rank || named, "%s %d of rank %d: rank %d says '%s'", mode, at, rank, r,
                          o->said);
                if (r == rank && o->code == 1) {
                    check_msg(strstr(o->said, strerror(error)) != NULL, "%s %d of rank %d: it says '%s'", mode, at,
                              rank, o->said);
                }
                // a rank that succeeds has seen the checkpoint
                check_msg(o->code != 0 || saved, "%s %d of rank %d: success without a checkpoint", mode, at, rank);
            }
            check_msg(killed || full || num_good == 0 || num_good == FAIL_RANKS, "%s %d of rank %d: %d ranks succeed",
                      mode, at, rank, num_good);
            check_msg(holds(dir, 0, OLDER, 1), "%s %d of rank %d takes the older checkpoint away", mode, at, rank);
            check_msg(saved || !file_exists(step_path(dir, 6)), "%s %d of rank %d: half a checkpoint", mode, at, rank);
            check_msg((killed && rank == 0) || count_names(dir, ".tmp-") == 0, "%s %d of rank %d leaves something",
                      mode, at, rank);
            check_msg(killed || full || rank == 0 || count_names(dir, ".end-") == 0, "%s %d of rank %d leaves a result",
                      mode, at, rank);
            unreported += num_good == FAIL_RANKS;
        }
        // a failure to close a directory that has been synced, or to leave a result, may go unreported
        check_msg(killed || unreported <= (rank == 0 ? 14 : 2), "rank %d: %d of %d failures unreported", rank,
                  unreported, num_calls);
    }
}

static void test_failing_operation(void) { save_with_failures("once", ENOSPC); }
static void test_full_disk(void) { save_with_failures("from", ENOSPC); }
static void test_killed_rank(void) { save_with_failures("kill", ENOSPC); }

// write() and pwrite() may write only a part of their bytes
static void test_short_writes(void) {
    const char* dir = fresh();
    if (!build_shim()) { return; }
    for (int rank = 0; rank < 2; rank++) {
        Job job = make_job(dir, 0, FAIL_RANKS, 6, 2);
        job.fail_rank = rank;
        int num_calls = count_operations(job);
        job.mode = "short";
        for (job.fail_at = 1; job.fail_at <= num_calls; job.fail_at += write_stride()) {
            run_remove_directory(step_path(dir, 6), NULL);
            job.token++;
            run_good_job(&job);
            check_msg(holds(dir, 0, 6, 2) && count_names(dir, "") == 1, "rank %d, operation %d", rank, job.fail_at);
        }
    }
}

// Line number of the first operation in the trace after line `after` whose path contains this text; 0 if there is none.
static int traced(const char* operation, const char* text, int after) {
    char line[4096], want[64];
    int number = 0, found = 0;
    FILE* f = fopen(trace_path(), "r");
    snprintf(want, sizeof(want), " %s ", operation);
    while (f && !found && fgets(line, sizeof(line), f)) {
        number++;
        line[strcspn(line, "\n")] = '\0';
        const char *at = strstr(line, want), *path = at ? strstr(at, text) : NULL;
        if (path && path[strlen(text)] == '\0' && number > after) { found = number; }
    }
    if (f) { fclose(f); }
    return found;
}

// True if the file is written, then synced, and not written again, before line `before`.
static bool synced(const char* file, int before) {
    int wrote = traced("pwrite", file, 0), sync = traced("fsync", file, wrote);
    return wrote > 0 && sync > wrote && traced("pwrite", file, sync) == 0 && sync < before;
}

// Each rank syncs its parts before it reports them; rank 0 reserves the files before others write to them, and syncs
// everything before it gets its name.
static void test_order_of_syncs(void) {
    static const char* const large[] = {"/model.safetensors", "/optimizer.safetensors"};
    if (!build_shim()) { return; }
    for (int rank = 0; rank < 2; rank++) {
        const char* dir = fresh();
        char sign[RUN_NAME], hidden[sizeof(Path)] = ""; // hidden: a line of the trace
        check(mkdir(dir, 0777) == 0);
        Job job = make_job(dir, 0, FAIL_RANKS, 6, 2);
        job.fail_rank = rank;
        count_operations(job);
        snprintf(sign, sizeof(sign), "/.%016llx.%d", (unsigned long long)job.token, rank);
        int signs = rank == 0 ? traced("open", sign, 0) : traced("rename", sign, 0), before = signs;
        check(signs > 0);
        if (rank == 0) {
            before = traced("rename", "/step_00000006", 0);
            check(before > signs && traced("fsync", in(dir, ""), 0) == 0);
            check(traced("fsync", dir + strlen(fast_dir()), before) > before);
            char room[64]; // for a report: reserved before the disk can be full
            snprintf(room, sizeof(room), "/.%016llx.1.open", (unsigned long long)job.token);
            check(traced("pwrite", room, 0) > 0 && traced("pwrite", room, 0) < signs);
            int state = traced("open", "/state.json", 0), state_sync = traced("fsync", "/state.json", state);
            check(state > signs && state_sync > state && before > state_sync);
            // the hidden directory, whose name ends in the PID, is synced last
            FILE* f = fopen(trace_path(), "r");
            for (int line = 1; f && fgets(hidden, sizeof(hidden), f) && line < before - 2; line++) {}
            if (f) { fclose(f); }
            check_msg(strstr(hidden, " fsync ") && strstr(hidden, "/.tmp-step_00000006-") && !strstr(hidden, ".json"),
                      "before the rename: %s", hidden);
        } else {
            snprintf(sign, sizeof(sign), "/.%016llx.%d.new", (unsigned long long)job.token, rank);
            check(synced(sign, 1 << 30) && traced("fsync", sign, 0) < signs);
        }
        for (int i = 0; i < 2; i++) {
            check_msg(synced(large[i], before), "rank %d: %s", rank, large[i]);
            check(rank > 0 || (traced("fallocate", large[i], 0) > 0 && traced("fallocate", large[i], 0) < signs));
        }
    }
}

// A file system may not be able to reserve room: then the files only get their size.
static void test_cannot_reserve(void) {
    const char* dir = fresh();
    if (!build_shim()) { return; }
    Job job = make_job(dir, 0, FAIL_RANKS, 6, 2);
    job.fail_rank = 0;
    count_operations(job);
    run_remove_directory(step_path(dir, 6), NULL);
    job.token++;
    job.mode = "once";
    job.error = EOPNOTSUPP;
    job.fail_at = traced("fallocate", "/model.safetensors", 0); // every operation has a line
    check(job.fail_at > 0);
    run_good_job(&job);
    check(holds(dir, 0, 6, 2));
}

// A killed rank, of which nobody tells the others: they end when the time is over.
static void test_killed_unnoticed(void) {
    if (!build_shim()) { return; }
    for (int rank = 0; rank < 2; rank++) {
        const char* dir = fresh();
        Job job = make_job(dir, 0, FAIL_RANKS, 6, 2);
        put(dir, 0, OLDER, 1, NULL);
        job.fail_rank = rank;
        int num_calls = count_operations(job);
        for (int i = 0; i < 2; i++) {
            Outcome outcomes[MOST_RANKS];
            Error err;
            run_remove_directory(step_path(dir, 6), NULL);
            job.token++;
            job.mode = "kill";
            job.fail_at = i == 0 ? 1 : num_calls / 2;
            job.limit_ms = 300.0;
            check(run_job(&job, outcomes) == 0 && outcomes[rank].code == 128 + SIGKILL);
            check(all_name(outcomes, FAIL_RANKS, rank));
            check(holds(dir, 0, OLDER, 1) && !file_exists(step_path(dir, 6)));
            check(run_remove_leftovers(dir, &err) && count_names(dir, "") == 1);
        }
    }
}

// ---- tests: savers --------------------------------------------------------------------------------

// The ranks are threads here. Rank 0 alone marks the best one and prunes, and only after a success.
static void test_savers(void) {
    enum { RANKS = 3 };
    const char* dir = fresh();
    int stop = 0;
    Run run;
    RunParts parts;
    Saver savers[RANKS];
    for (int64_t step = 1; step <= 4; step++) { put(dir, 0, step, 1, NULL); }
    run_make(&run, &configs[0], 5, 8);
    run_parts(&parts, &run.state.config, RANKS);
    for (int attempt = 0; attempt < 2; attempt++) {
        __atomic_store_n(&stop, attempt == 0 ? -1 : 0, __ATOMIC_RELEASE);
        for (int r = 0; r < RANKS; r++) {
            RunRank ranks = {r, RANKS, 77 + (uint64_t)attempt, 60000.0, &stop, NULL};
            memset(&savers[r], 0, sizeof(savers[r]));
            savers[r].dir = dir;
            savers[r].lock = -1;
            savers[r].keep = r == 0 ? 2 : 1; // only that of rank 0 counts
            savers[r].best = true;
            savers[r].state = run.state;
            savers[r].ranks = ranks;
            savers[r].parts = &parts;
            savers[r].buffer = make_buffer(&run, &parts, r);
            saver_start(&savers[r]);
        }
        for (int r = 0; r < RANKS; r++) {
            check(saver_wait(&savers[r]) && savers[r].pruned);
            check_msg(savers[r].saved == (attempt == 1), "rank %d: %s", r, savers[r].error.text);
            check(attempt == 1 || strstr(savers[r].error.text, "stopped") != NULL);
            free((void*)savers[r].buffer);
        }
        check(count_names(dir, "step_") == (attempt == 0 ? 4 : 2) && count_names(dir, ".tmp-") == 0);
        check(run_best_step(dir) == (attempt == 0 ? -1 : 5));
    }
    check(holds(dir, 0, 5, 8) && holds(dir, 0, 4, 1));
    run_parts_free(&parts);
    run_free(&run);
}

static const Test tests[] = {
    {"combine", "crc32c_combine() gives what crc32c() gives", test_combine},
    {"dealing", "every part once, no gaps in the buffers, balanced", test_dealing},
    {"same_bytes", "1 to 16 ranks write what run_save() writes", test_same_bytes},
    {"ranks_without_parts", "more ranks than parts", test_ranks_without_parts},
    {"not_finite", "a weight of one rank is NaN", test_not_finite},
    {"loads_again", "every bit of a run comes back", test_loads_again},
    {"tokenizer_inside", "rank 0 writes the vocabulary", test_tokenizer_inside},
    {"same_step_replaced", "a save over a checkpoint of the same step", test_same_step_replaced},
    {"leftovers", "of dead saves of the same step are not used", test_leftovers},
    {"late_rank", "a rank that comes 2 s late", test_late_rank},
    {"rank_never_comes", "the others end in time and name it", test_rank_never_comes},
    {"too_late", "a rank that comes after that", test_too_late},
    {"stop", "the caller ends the wait", test_stop},
    {"other_model", "a rank that saves something else is refused", test_other_model},
    {"failing_operation", "each operation of each rank fails in its turn", test_failing_operation},
    {"full_disk", "each operation and all after it fail", test_full_disk},
    {"killed_rank", "each rank killed at each operation", test_killed_rank},
    {"killed_unnoticed", "the others end when the time is over", test_killed_unnoticed},
    {"short_writes", "a write of a part of the bytes", test_short_writes},
    {"cannot_reserve", "a file system without fallocate()", test_cannot_reserve},
    {"order_of_syncs", "nothing is reported or published before it is on the disk", test_order_of_syncs},
    {"savers", "the threads of saver.h: only rank 0 marks and prunes", test_savers},
};

int main(int argc, char** argv) {
#ifdef _OPENMP
    omp_set_num_threads(1); // processes that fork must not have threads of OpenMP
#endif
    if (argc == 11 && strcmp(argv[1], "--rank") == 0) {
        Job job = make_job(argv[2], atoi(argv[5]), atoi(argv[7]), atoll(argv[3]), (uint64_t)atoll(argv[4]));
        job.token = (uint64_t)atoll(argv[8]);
        job.limit_ms = atof(argv[9]);
        return save_as(&job, atoi(argv[6]), NULL, argv[10]);
    }
    self = argv[0];
    stop_flag = (int*)mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(stop_flag != MAP_FAILED);
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
