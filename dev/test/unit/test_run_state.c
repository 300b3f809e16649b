/*
Checkpoints of a run. A saved run is loaded bit for bit; damaged, missing or half-written files are detected and their
checkpoint is passed over; no failing operation and no kill destroys an older checkpoint.

    test_run_state --save DIR STEP SEED       the tests below run this program with failing_write.so
    test_run_state --prune DIR KEEP
*/
#include "../../../llmc/run_state.h"
#include "../../../llmc/stop.h"
#include "fast_dir.h"
#include "../test.h"
#include <float.h>
#include <sys/wait.h>

// ---- a small run -------------------------------------------------------------------

typedef struct {
    RunState state;
    float *params, *m, *v; // (num_parameters(state.config))
} Run;

static const GPT2Config small = {8, 257, 384, 2, 2, 4, 16, 1e-5f, 0, 0, 0, 0}; // T, V (all bytes), Vp, L, NH, C, F

static uint64_t next_random(uint64_t* s) { // splitmix64
    uint64_t z = (*s += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void run_alloc(Run* run) {
    size_t bytes = num_parameters(&small) * sizeof(float);
    memset(run, 0, sizeof(*run));
    run->state.config = small;
    run->params = (float*)malloc_check(bytes);
    run->m = (float*)malloc_check(bytes);
    run->v = (float*)malloc_check(bytes);
    memset(run->params, 0xFF, bytes); // whatever a load does not write stays NaN
    memset(run->m, 0xFF, bytes);
    memset(run->v, 0xFF, bytes);
}

static void run_free(Run* run) {
    free(run->params);
    free(run->m);
    free(run->v);
}

// Fills with random finite values of every magnitude. The padding rows of wte are zero, as always.
static void fill_floats(float* p, uint64_t* seed) {
    size_t used = (size_t)small.vocab_size * small.channels, padded = (size_t)small.padded_vocab_size * small.channels;
    for (size_t i = 0; i < num_parameters(&small); i++) {
        uint32_t bits = i >= used && i < padded ? 0 : (uint32_t)next_random(seed);
        if ((bits & 0x7F800000u) == 0x7F800000u) { bits ^= 0x40000000u; }
        memcpy(&p[i], &bits, sizeof(bits));
    }
}

// Makes a run in which every field depends on the seed.
static void run_make(Run* run, int64_t step, uint64_t seed) {
    run_alloc(run);
    fill_floats(run->params, &seed);
    fill_floats(run->m, &seed);
    fill_floats(run->v, &seed);
    RunState* s = &run->state;
    s->step = step;
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        char* p = (char*)s + run_fields[i].offset;
        uint64_t r = next_random(&seed);
        bool known = strcmp(run_fields[i].key, "step") == 0 || strcmp(run_fields[i].key, "has_tokenizer") == 0;
        for (size_t c = 0; c < sizeof(GPT2Config); c += sizeof(int)) { known |= run_fields[i].offset == c; }
        if (known) { continue; }
        if (run_fields[i].kind == RUN_INT32) { *(int32_t*)p = (int32_t)(r & INT32_MAX); }
        if (run_fields[i].kind == RUN_INT64) { *(int64_t*)p = (int64_t)(r % run_max_count); } // may exceed 2^53
        if (run_fields[i].kind == RUN_UINT64) { *(uint64_t*)p = r | (uint64_t)1 << 63; }
        if (run_fields[i].kind == RUN_DOUBLE) { *(double*)p = (double)r / 3.0; }
        if (run_fields[i].kind == RUN_STRING) { snprintf(p, RUN_TEXT, "%llu", (unsigned long long)(r % 100000000)); }
    }
    s->skipped_steps %= step + 1;
    for (int i = 0; i < 300; i++) { outlier_update(&s->loss_outliers, (double)next_random(&seed) / 7e18); }
    for (int i = 0; i < 50; i++) { outlier_update(&s->norm_outliers, (double)next_random(&seed) / 7e18); }
    s->num_fp8 = (int32_t)(next_random(&seed) % 8); // sometimes none
    for (int i = 0; i < s->num_fp8; i++) { s->fp8_largest[i] = (float)next_random(&seed) / 3.0f; }
}

static bool runs_equal(const Run* a, const Run* b) {
    size_t bytes = num_parameters(&small) * sizeof(float);
    return memcmp(&a->state, &b->state, sizeof(a->state)) == 0 && memcmp(a->params, b->params, bytes) == 0 &&
           memcmp(a->m, b->m, bytes) == 0 && memcmp(a->v, b->v, bytes) == 0;
}

static bool save(const char* dir, const Run* run, Error* err) {
    return run_save(dir, &run->state, run->params, run->m, run->v, NULL, err);
}

// Saves the run of (step, seed) in dir, which must succeed.
static void put(const char* dir, int64_t step, uint64_t seed) {
    Run run;
    Error err;
    run_make(&run, step, seed);
    if (!save(dir, &run, &err)) { test_fail(__FILE__, __LINE__, "save: %s", err.text); }
    run_free(&run);
}

// True if the checkpoint at path equals the run of (step, seed) bit for bit.
static bool holds(const char* path, int64_t step, uint64_t seed) {
    Run want, got;
    Error err;
    RunState state;
    run_make(&want, step, seed);
    run_alloc(&got);
    bool ok = run_verify(path, &state, &err) && run_load(path, &got.state, got.params, got.m, got.v, &err) &&
              runs_equal(&want, &got);
    run_free(&want);
    run_free(&got);
    return ok;
}

// ---- files -------------------------------------------------------------------------

typedef struct {
    char* data;
    size_t size;
} Text;

static Text read_all(const char* path) {
    Text t = {NULL, 0};
    MappedFile file;
    Error err;
    if (!map_file(&file, path, &err)) { die("%s", err.text); }
    t.data = (char*)malloc_check(file.size + 1);
    memcpy(t.data, file.data, file.size);
    t.data[file.size] = '\0';
    t.size = file.size;
    unmap_file(&file);
    return t;
}

static void write_all(const char* path, const char* data, size_t size) {
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) { die("%s: cannot write", path); }
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

// between catch_stderr() and caught_stderr(), stderr goes to a file
static int stderr_kept;
static const char* stderr_path(void) { return in(test_dir(), "stderr"); }
static void catch_stderr(void) {
    fflush(stderr);
    stderr_kept = dup(STDERR_FILENO);
    int fd = open(stderr_path(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(fd, STDERR_FILENO);
    close(fd);
}
static Text caught_stderr(void) {
    fflush(stderr);
    dup2(stderr_kept, STDERR_FILENO);
    close(stderr_kept);
    return read_all(stderr_path());
}

// run_find_newest() must find the step (-1: none). On stderr it must print a line for each of the `lines` checkpoints
// that it passed over, and this text must be in them.
static void check_newest(const char* dir, int64_t step, int lines, const char* text) {
    Path path;
    char name[RUN_NAME];
    Error err;
    catch_stderr();
    bool found = run_find_newest(dir, &path, false, &err);
    Text said = caught_stderr();
    int newlines = 0;
    for (size_t i = 0; i < said.size; i++) { newlines += said.data[i] == '\n'; }
    run_step_name(name, step);
    check_msg(found == (step >= 0), "%s: found is %d, want step %lld", text, found, (long long)step);
    if (found) { check_str(path.text, in(dir, name)); }
    check_msg(newlines == lines, "%d lines, want %d: %s", newlines, lines, said.data);
    check_msg(strstr(said.data, text) != NULL, "no '%s' in: %s", text, said.data);
    free(said.data);
}

// ---- tests: exactness ------------------------------------------------------------------

static void test_round_trip(void) {
    const char* dir = in(test_dir(), "deep/er"); // on a disk; save must create it

    for (int64_t step = 0; step < 3; step++) {
        char name[RUN_NAME];
        put(dir, step * 1000000007, (uint64_t)step);
        run_step_name(name, step * 1000000007);
        check(holds(in(dir, name), step * 1000000007, (uint64_t)step));
        check(!holds(in(dir, name), step * 1000000007, 99)); // holds() can fail
        check_newest(dir, step * 1000000007, 0, "");
    }
    check(count_names(dir, "") == 3);
}

static void test_tokenizer_inside(void) {
    const char* dir = fresh();
    Run run, got;
    Tokenizer bytes, loaded;
    Error err;
    run_make(&run, 7, 7);
    run_alloc(&got);
    tokenizer_init_bytes(&bytes);
    check(run_save(dir, &run.state, run.params, run.m, run.v, &bytes, &err));
    const char* path = in(dir, "step_00000007");
    check(file_exists(in(path, "vocab.json")) && file_exists(in(path, "merges.txt")));
    check(!file_exists(in(path, "tokenizer_config.json")));
    check(run_load(path, &got.state, got.params, got.m, got.v, &err));
    check(got.state.has_tokenizer && got.state.eot_id == bytes.eot_id);
    bool opens = tokenizer_load(&loaded, path, &err);
    check_msg(opens, "%s", err.text);
    if (opens) {
        check(loaded.vocab_size == bytes.vocab_size && loaded.eot_id == bytes.eot_id);
        tokenizer_free(&loaded);
    }
    ModelFile model; // the checkpoint can also be opened as a model
    bool model_opens = model_open(&model, path, &err);
    check_msg(model_opens, "%s", err.text);
    if (model_opens) {
        check(memcmp(&model.config, &small, sizeof(small)) == 0 && model.eot_id == bytes.eot_id);
        model_close(&model);
    }
    RunState state;
    check(run_verify(path, &state, &err));
    check(truncate(in(path, "merges.txt"), 0) == 0);
    check(!run_verify(path, &state, &err) && strstr(err.text, "merges.txt") != NULL);
    // a token of another name as end-of-text
    bytes.eot_id = 65;
    run.state.step = 8;
    check(run_save(dir, &run.state, run.params, run.m, run.v, &bytes, &err));
    path = in(dir, "step_00000008");
    opens = tokenizer_load(&loaded, path, &err);
    check_msg(opens && loaded.eot_id == 65, "%s: end-of-text is %d", opens ? path : err.text, loaded.eot_id);
    if (opens) { tokenizer_free(&loaded); }
    check(run_verify(path, &state, &err) && state.eot_id == 65);
    check(truncate(in(path, "tokenizer_config.json"), 0) == 0);
    check(!run_verify(path, &state, &err) && strstr(err.text, "tokenizer_config.json") != NULL);
    tokenizer_free(&bytes);
    run_free(&run);
    run_free(&got);
}

// A member of RunState that is missing in run_fields would silently not be saved.
static void test_nothing_left_out(void) {
    char covered[sizeof(RunState)];
    memset(covered, 0, sizeof(covered));
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        RunFieldKind kind = run_fields[i].kind;
        size_t size = kind == RUN_STRING ? RUN_TEXT : kind == RUN_BOOL ? 1 : kind == RUN_INT32 ? 4 : 8;
        memset(covered + run_fields[i].offset, 1, size);
    }
    memset(covered + offsetof(RunState, loss_outliers), 1, sizeof(OutlierDetector));
    memset(covered + offsetof(RunState, norm_outliers), 1, sizeof(OutlierDetector));
    memset(covered + offsetof(RunState, num_fp8), 1, sizeof(int32_t));
    memset(covered + offsetof(RunState, fp8_largest), 1, RUN_MAX_FP8 * sizeof(float));
    int left = 0;
    for (size_t i = 0; i < sizeof(covered); i++) { left += covered[i] == 0; }
    check_msg(left <= 3, "%d bytes of RunState are not in run_fields; 3 are padding", left);
}

static void test_extreme_numbers(void) {
    static const double values[] = {
        0.1,       1.0 / 3.0,           -0.0,   DBL_MAX, DBL_MIN,   DBL_TRUE_MIN,      -1e-310, 1e22, INFINITY,
        -INFINITY, 0.30000000000000004, 5e-324, NAN,     3.0000001, 9007199254740993.0};
    const char* dir = fresh();
    Error err;
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        Run run;
        RunState got;
        run_make(&run, 1, 5);
        run.state.learning_rate = values[i];
        run.state.seed = run.state.sampler_rng = UINT64_MAX - i;
        run.state.num_tokens_seen = run_max_count - (int64_t)i;
        if (fabs(values[i]) <= OUTLIER_VALUE_MAX) { run.state.norm_outliers.window[3] = values[i]; }
        check(save(dir, &run, &err));
        check(run_load_state(in(dir, "step_00000001"), &got, &err));
        check_msg(memcmp(&got, &run.state, sizeof(got)) == 0 || isnan(values[i]), "%.17g is not exact", values[i]);
        check(isnan(values[i]) == (isnan(got.learning_rate) != 0));
        run_free(&run);
    }
}

// The list of the largest values of --fp8: each float comes back bit for bit, up to as many as there may be.
static void test_fp8_largest(void) {
    static const float values[] = {FLT_MIN,     FLT_MAX, 0.1f,  FLT_TRUE_MIN, 0.0f,
                                   1.0f / 3.0f, 448.0f,  1e10f, 16777217.0f,  0.3f};
    enum { NUM_VALUES = sizeof(values) / sizeof(values[0]) };
    static const int counts[] = {0, 1, NUM_VALUES, RUN_MAX_FP8};
    const char *dir = fresh(), *path = in(dir, "step_00000001");
    Error err;
    for (int k = 0; k < 4; k++) {
        Run run;
        RunState got;
        run_make(&run, 1, 5);
        memset(run.state.fp8_largest, 0, sizeof(run.state.fp8_largest));
        run.state.num_fp8 = counts[k];
        uint64_t seed = 3;
        for (int i = 0; i < counts[k]; i++) {
            uint32_t bits = (uint32_t)next_random(&seed) % 0x7F800000u; // of any finite float that is not negative
            memcpy(&run.state.fp8_largest[i], i < NUM_VALUES ? (const void*)&values[i] : &bits, sizeof(float));
        }
        check(save(dir, &run, &err));
        bool loads = run_load_state(path, &got, &err);
        check_msg(loads, "%s", loads ? "" : err.text);
        check_msg(loads && memcmp(&got, &run.state, sizeof(got)) == 0, "%d values are not exact", counts[k]);
        Text text = read_all(in(path, "state.json"));
        check((strstr(text.data, "fp8_largest") != NULL) == (counts[k] > 0)); // without --fp8 nothing is written
        free(text.data);
        run_free(&run);
    }
}

// a NaN never enters a window, so none is ever saved; a file with a NaN is rejected
static void test_nan_in_a_window(void) {
    const char* dir = fresh();
    Run run;
    RunState got;
    Error err;
    run_make(&run, 3, 11);
    outlier_update(&run.state.loss_outliers, NAN);
    outlier_update(&run.state.loss_outliers, INFINITY);
    check(save(dir, &run, &err) && run_load_state(in(dir, "step_00000003"), &got, &err));
    check(memcmp(&got, &run.state, sizeof(got)) == 0);
    run_free(&run);
}

// ---- tests: damage ---------------------------------------------------------------------

static const char* const files[] = {"config.json", "generation_config.json", "model.safetensors",
                                    "optimizer.safetensors", "state.json"};
enum { NUM_FILES = 5 };

static void test_flipped_bit(void) {
    const char *dir = fresh(), *newer = in(dir, "step_00000002");
    put(dir, 1, 1);
    put(dir, 2, 2);
    for (int f = 0; f < NUM_FILES; f++) {
        const char* path = in(newer, files[f]);
        Text text = read_all(path);
        int fd = open(path, O_WRONLY), missed = 0;
        // state.json is checked by itself alone, so every bit is tried. In the other files: one bit per byte near both
        // ends, and of every 17th byte between
        size_t bits = f == 4 ? 1 : 8;
        for (size_t bit = 0; bit < text.size * 8; bit += bits) {
            size_t byte = bit / 8;
            if (bits == 8 && byte > 64 && byte + 64 < text.size && byte % 17 != 0) { continue; }
            char flipped = (char)(text.data[byte] ^ (1 << (bits == 8 ? byte % 7 : bit % 8)));
            RunState state;
            Error err;
            check(pwrite(fd, &flipped, 1, (off_t)byte) == 1);
            bool taken = f == 4 ? run_load_state(newer, &state, &err) : run_verify(newer, &state, &err);
            missed += taken || !strstr(err.text, files[f]);
            if (bit == 0 || bit + bits == text.size * 8) { check_newest(dir, 1, 1, files[f]); }
            check(pwrite(fd, &text.data[byte], 1, (off_t)byte) == 1);
        }
        check_msg(missed == 0, "%s: %d flipped bits were not seen", files[f], missed);
        close(fd);
        free(text.data);
    }
    check_newest(dir, 2, 0, "");
    check(holds(in(dir, "step_00000001"), 1, 1));
}

static void test_missing_or_cut(void) {
    const char* dir = fresh();
    put(dir, 1, 1);
    for (int f = 0; f < NUM_FILES; f++) {
        put(dir, 2, 2);
        const char* path = in(in(dir, "step_00000002"), files[f]);
        Text text = read_all(path);
        check(truncate(path, (off_t)text.size - 1) == 0);
        check_newest(dir, 1, 1, files[f]);
        check(truncate(path, 0) == 0);
        check_newest(dir, 1, 1, files[f]);
        check(truncate(path, (off_t)text.size) == 0); // the right size, but all zero
        check_newest(dir, 1, 1, files[f]);
        write_all(path, text.data, text.size + 1); // one byte too many
        check_newest(dir, 1, 1, files[f]);
        check(unlink(path) == 0);
        check_newest(dir, 1, 1, files[f]);
        check(mkdir(path, 0777) == 0);
        check_newest(dir, 1, 1, files[f]);
        check(rmdir(path) == 0);
        write_all(path, text.data, text.size);
        check_newest(dir, 2, 0, "");
        free(text.data);
    }
}

static void test_none_found(void) {
    const char* dir = fresh();
    Path path;
    Error err;
    // the directory does not exist
    check(!run_find_newest(dir, &path, false, &err) && strstr(err.text, dir) != NULL);
    check(mkdir(dir, 0777) == 0 && mkdir(in(dir, "step_12"), 0777) == 0);
    check(!run_find_newest(dir, &path, false, &err) && strstr(err.text, "no checkpoint") != NULL);
    check(mkdir(in(dir, "step_00000012"), 0777) == 0);
    write_all(in(dir, "step_00000013"), "x", 1); // a file, not a directory
    check_newest(dir, -1, 2, "step_00000012");
    put(dir, 5, 5);
    check_newest(dir, 5, 2, "step_00000013");
    check(rename(in(dir, "step_00000005"), in(dir, "step_00000006")) == 0);
    check_newest(dir, -1, 3, "renamed");
}

// Replaces `from` by `to` in state.json and updates its checksum.
static void edit_state(const char* checkpoint, const char* from, const char* to) {
    const char* path = in(checkpoint, "state.json");
    Text text = read_all(path);
    char* at = strstr(text.data, from);
    if (!at) { die("no '%s' in %s", from, text.data); }
    char* edited = (char*)malloc_check(text.size + strlen(to) + 64);
    int n = sprintf(edited, "%.*s%s", (int)(at - text.data), text.data, to);
    n += sprintf(edited + n, "%.*s", (int)(text.data + text.size - RUN_SUM_BYTES - at - strlen(from)),
                 at + strlen(from));
    n += sprintf(edited + n, RUN_SUM_LINE, crc32c(0, edited, (size_t)n));
    write_all(path, edited, (size_t)n);
    free(edited);
    free(text.data);
}

static void test_state_refused_by_name(void) {
    static const char* const edits[][3] = {
        {"\"version\": 1", "\"version\": 2", "version 2"},
        {"\"program\": \"train_gpt2\"", "\"program\": \"other\"", "by other"},
        {"\"seed\"", "\"sead\"", "\"seed\" is missing"},
        {"\"beta1\": ", "\"beta1\": \"x\", \"b\": ", "\"beta1\""},
        {"\"num_layers\": 2", "\"num_layers\": -2", "layers"},
        {"\"mlp_channels\": 16", "\"mlp_channels\": 0", "the number of MLP channels is 0"},
        {"\"norm_epsilon\": 1e-05", "\"norm_epsilon\": 0", "the epsilon of the layernorms is 0"},
        {"\"norm_epsilon\": 1e-05", "\"norm_epsilon\": 1e39", "\"norm_epsilon\" is 1e+39"},
        {"\"norm_epsilon\"", "\"norm_epsilum\"", "the epsilon of the layernorms is 0"},
        {"\"activation\": 0", "\"activation\": 6",
         "an activation, a scale of attention or a head that this program does not know"},
        {"\"untied_head\": 0", "\"untied_head\": 2", "that this program does not know"},
        {"\"scale_by_layer\": 0", "\"scale_by_layer\": -1", "that this program does not know"},
        {"\"num_layers\": 2", "\"num_layers\": 2.5", "num_layers"},
        {"\"step\": 4", "\"step\": -4", "\"step\""},
        {"\"skipped_steps\": ", "\"skipped_steps\": 5, \"x\": ", "\"skipped_steps\" is 5, more than all 4"},
        // such counts would overflow in the first step or the next epoch
        {"\"num_tokens_seen\": ", "\"num_tokens_seen\": 9223372036854775807, \"x\": ", "\"num_tokens_seen\""},
        {"\"loader_epoch\": ", "\"loader_epoch\": 1152921504606846977, \"x\": ", "\"loader_epoch\""},
        {"\"schedule\": \"", "\"schedule\": \"0123456789abcdef", "too long"},
        {"\"name\": \"config.json\"", "\"name\": \"../config.json\"", "no checkpoint file has"},
        {"\"name\": \"config.json\"", "\"name\": \"x/config.json\"", "no checkpoint file has"},
        {"\"name\": \"config.json\"", "\"name\": \"config.jsom\"", "does not name config.json"},
        {"\"crc32c\": \"", "\"crc32c\": \"x", "crc32c"},
        {"\"window\": [", "\"window\": [\"nan\", ", "not a valid window"},
        {"{\"index\": ", "{\"index\": 12", "index"},
        {"\"files\": [", "\"files\": [], \"other\": [", "does not name"},
        {"{\n", "{{\n", "JSON"},
    };
    const char* dir = fresh();
    const char* path = in(dir, "step_00000004");
    for (size_t i = 0; i < sizeof(edits) / sizeof(edits[0]); i++) {
        Error err;
        RunState state;
        put(dir, 4, 4);
        check(run_verify(path, &state, &err));
        edit_state(path, edits[i][0], edits[i][1]);
        check(!run_verify(path, &state, &err));
        check_msg(strstr(err.text, edits[i][2]) && strstr(err.text, "state.json"), "edit %zu: no '%s' in '%s'", i,
                  edits[i][2], err.text);
    }
}

// What a list of --fp8 can have wrong.
static void test_fp8_largest_refused(void) {
    static const char* const lists[] = {"[]",      "3",        "null",      "{\"x\": 1}",     "[1, -1e-9]", "[\"nan\"]",
                                        "[\"1\"]", "[1, [2]]", "[1, true]", "[3.4028236e38]", "[1e300]",    "[null]"};
    const char *dir = fresh(), *path = in(dir, "step_00000001");
    Run run;
    RunState got;
    Error err;
    run_make(&run, 1, 5);
    memset(run.state.fp8_largest, 0, sizeof(run.state.fp8_largest));
    run.state.num_fp8 = 2, run.state.fp8_largest[0] = 1.5f;
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        char edited[64];
        snprintf(edited, sizeof(edited), "\"fp8_largest\": %s", lists[i]);
        check(save(dir, &run, &err) && run_load_state(path, &got, &err));
        edit_state(path, "\"fp8_largest\": [1.5, 0]", edited);
        check(!run_load_state(path, &got, &err));
        check_msg(strstr(err.text, "\"fp8_largest\"") && strstr(err.text, "state.json"), "%s: %s", lists[i], err.text);
    }
    check(save(dir, &run, &err));
    edit_state(path, "[1.5, 0]", "[3.4028235e38, 1e-60]"); // rounded to floats
    check(run_load_state(path, &got, &err) && got.fp8_largest[0] == FLT_MAX && got.fp8_largest[1] == 0.0f);
    check(save(dir, &run, &err));
    edit_state(path, "[1.5, 0]", "[NaN]"); // not JSON
    check(!run_load_state(path, &got, &err));
    run.state.num_fp8 = RUN_MAX_FP8;
    check(save(dir, &run, &err) && run_load_state(path, &got, &err));
    edit_state(path, "\"fp8_largest\": [", "\"fp8_largest\": [0, "); // one too many
    check(!run_load_state(path, &got, &err));
    check_msg(strstr(err.text, "\"fp8_largest\" is not a list of 1 to 4094 floats") != NULL, "%s", err.text);
    run_free(&run);
}

// checkpoints from before there was Muon do not name the optimizer: it was AdamW
static void test_optimizer_of_old_checkpoints(void) {
    static const char* const keys[] = {"\"optimizer\"", "\"muon_learning_rate\"", "\"muon_momentum\""};
    const char* dir = fresh();
    const char* path = in(dir, "step_00000004");
    Error err;
    RunState state;
    put(dir, 4, 4);
    for (int i = 0; i < 3; i++) {
        char unknown[16];
        snprintf(unknown, sizeof(unknown), "\"unknown_%d\"", i);
        edit_state(path, keys[i], unknown);
    }
    check(run_load_state(path, &state, &err));
    check(strcmp(state.optimizer, "adamw") == 0 && state.muon_learning_rate == 0 && state.muon_momentum == 0);
}

// checkpoints of version 1.0 name neither the width of the MLP nor the epsilon, and later ones not the rest: they were GPT-2's
static void test_old_checkpoints_are_gpt2(void) {
    static const char* const keys[] = {"mlp_channels",       "norm_epsilon",   "activation",
                                       "unscaled_attention", "scale_by_layer", "untied_head"};
    const char* dir = fresh();
    const char* path = in(dir, "step_00000004");
    Error err;
    RunState state;
    put(dir, 4, 4);
    for (int i = 5; i >= 0; i--) {
        char key[32], other[32];
        snprintf(key, sizeof(key), "\"%s\"", keys[i]);
        snprintf(other, sizeof(other), "\"unknown_%d\"", i);
        edit_state(path, key, other);
        if (i == 2) { check(run_load_state(path, &state, &err) && memcmp(&state.config, &small, sizeof(small)) == 0); }
    }
    check(run_load_state(path, &state, &err) && memcmp(&state.config, &small, sizeof(small)) == 0);
}

// they are saved and loaded to the bit
static void test_other_settings(void) {
    const char* dir = fresh();
    Error err;
    Run run;
    RunState state;
    run_make(&run, 4, 4);
    run.state.config.mlp_channels = 12; // fewer parameters than were allocated
    run.state.config.norm_epsilon = 1.0f / 3;
    run.state.config.activation = ACT_TANH;
    run.state.config.unscaled_attention = run.state.config.scale_by_layer = 1;
    check_msg(save(dir, &run, &err), "%s", err.text);
    check(run_load_state(in(dir, "step_00000004"), &state, &err));
    check(memcmp(&state.config, &run.state.config, sizeof(state.config)) == 0);
    check(run_load(in(dir, "step_00000004"), &state, run.params, run.m, run.v, &err));
    run_free(&run);
}

// They are not saved; and not loaded, if another program has written them. The padding rows are not looked at.
static void test_not_finite(void) {
    const char* dir = fresh();
    Error err;
    Run run;
    run_make(&run, 1, 1);
    size_t used = (size_t)small.vocab_size * (size_t)small.channels;
    run.params[used] = NAN;
    check_msg(save(dir, &run, &err), "%s", err.text);
    float* changed = &run.params[param_offset(&small, 15) + 2];
    *changed = NAN;
    run.state.step = 2;
    check(!save(dir, &run, &err) && !file_exists(in(dir, "step_00000002")) && holds(in(dir, "step_00000001"), 1, 1));
    check_str(err.text, "tensor 'ln_f.bias' is not finite: nan at [2]");
    check(params_not_finite(&err));
    static const char* const no_prefix[1] = {""};
    const float* const arrays[1] = {run.params};
    const char* path = in(in(dir, "step_00000001"), "model.safetensors");
    check(params_save_safetensors(path, &small, arrays, no_prefix, 1, false, NULL, &err));
    RunState before = run.state;
    check(!run_load(in(dir, "step_00000001"), &run.state, run.params, run.m, run.v, &err));
    check_msg(strstr(err.text, "model.safetensors: tensor 'ln_f.bias' is not finite: nan at [2]: take"), "%s",
              err.text);
    check(memcmp(&before, &run.state, sizeof(before)) == 0);
    run_free(&run);
}

static void test_other_config_refused(void) {
    const char* dir = fresh();
    put(dir, 1, 1);
    for (size_t i = 0; i < sizeof(GPT2Config) / sizeof(int); i++) {
        Run run;
        Error err;
        run_alloc(&run);
        ((int*)&run.state.config)[i]++;
        RunState before = run.state;
        check(!run_load(in(dir, "step_00000001"), &run.state, run.params, run.m, run.v, &err));
        check(strstr(err.text, "step_00000001") && memcmp(&before, &run.state, sizeof(before)) == 0);
        run_free(&run);
    }
}

static void test_settings_compared(void) {
    Run a, b;
    run_make(&a, 1, 1);
    run_make(&b, 1, 1);
    b.state.step = 8;
    b.state.loader.position++;
    const char* path = in(test_dir(), "changes");
    FILE* f = fopen(path, "wb");
    check(run_print_changes(f, &a.state, &b.state) == 0);
    int settings = 0;
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        RunState changed = a.state;
        ((char*)&changed)[run_fields[i].offset] ^= 1; // flips the lowest bit
        check(run_print_changes(f, &a.state, &changed) == (int)run_fields[i].setting);
        settings += run_fields[i].setting;
    }
    fclose(f);
    check(settings == 20);
    Text text = read_all(path);
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        char words[64];
        snprintf(words, sizeof(words), "checkpoint: %s ", run_fields[i].key);
        check((strstr(text.data, words) != NULL) == run_fields[i].setting);
    }
    free(text.data);
    run_free(&a);
    run_free(&b);
}

// ---- tests: the directory ----------------------------------------------------------------

static void test_names(void) {
    static const struct {
        const char* name;
        int64_t step;
    } names[] = {{"step_00000000", 0},
                 {"step_00000100", 100},
                 {"step_123456789", 123456789},
                 {"step_0000010", -1},
                 {"step_000000100", -1},
                 {"step_00000100x", -1},
                 {"step_-0000001", -1},
                 {"step_", -1},
                 {"", -1},
                 {"step_00000100.bak", -1},
                 {"step_99999999999999999999999999", -1},
                 {".tmp-step_00000100-1", -1},
                 {"step_100000000000000000", 100000000000000000}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        check_msg(run_step_of_name(names[i].name) == names[i].step, "%s", names[i].name);
    }
    int64_t step = -1;
    check(run_pid_of_hidden_name(".tmp-step_00000100-4711", ".tmp-", &step) == 4711 && step == 100);
    static const char* const others[] = {".tmp-step_00000100",
                                         ".tmp-step_00000100-",
                                         ".tmp-step_00000100-x",
                                         ".tmp-",
                                         ".tmp-step_00000100-47 11",
                                         ".old-step_00000100-4711",
                                         ".tmp",
                                         "-",
                                         "",
                                         ".tmp-4711",
                                         ".tmp-step_00000100-99999999999"};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        check_msg(run_pid_of_hidden_name(others[i], ".tmp-", &step) == 0, "%s", others[i]);
    }
}

static void test_same_step_replaced(void) {
    const char* dir = fresh();
    put(dir, 5, 1);
    for (uint64_t seed = 2; seed < 5; seed++) {
        put(dir, 5, seed);
        check(holds(in(dir, "step_00000005"), 5, seed));
        check(count_names(dir, "") == 1);
    }
}

static void test_prune_rules(void) {
    static const struct {
        int keep, major;
        const char* left; // the steps of 1..8 that are left
    } rules[] = {{0, 0, "12345678"}, {8, 0, "12345678"}, {9, 0, "12345678"}, {3, 0, "678"},     {1, 0, "8"},
                 {1, 3, "368"},      {2, 4, "478"},      {0, 3, "12345678"}, {1, 1, "12345678"}};
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        const char* dir = fresh();
        char left[16] = "", name[RUN_NAME];
        Error err;
        for (int64_t step = 1; step <= 8; step++) { put(dir, step, (uint64_t)step); }
        check(run_prune(dir, rules[i].keep, rules[i].major, &err));
        for (int64_t step = 1; step <= 8; step++) {
            run_step_name(name, step);
            if (holds(in(dir, name), step, (uint64_t)step)) { sprintf(left + strlen(left), "%d", (int)step); }
        }
        check_str(left, rules[i].left);
        check(count_names(dir, "") == (int)strlen(rules[i].left));
    }
}

// the best checkpoint is spared until another one is the best
static void test_prune_keeps_best(void) {
    const char* dir = fresh();
    char link[64] = "";
    Error err;
    for (int64_t step = 1; step <= 6; step++) { put(dir, step, (uint64_t)step); }
    check(run_best_step(dir) == -1);
    check(run_mark_best(dir, 2, &err) && run_best_step(dir) == 2);
    check(readlink(in(dir, "best"), link, sizeof(link) - 1) > 0);
    check_str(link, "step_00000002");
    check(run_prune(dir, 2, 0, &err));
    check(count_names(dir, "step_") == 3 && file_exists(in(dir, "step_00000002")) &&
          file_exists(in(dir, "best/state.json")));
    check(run_mark_best(dir, 5, &err) && run_prune(dir, 1, 0, &err));
    check(count_names(dir, "step_") == 2 && !file_exists(in(dir, "step_00000002")) && run_best_step(dir) == 5);
    check(!file_exists(in(dir, ".best.tmp")));
    check(!run_mark_best(in(dir, "nowhere"), 5, &err) && strstr(err.text, "nowhere"));
}

static void test_prune_keeps_newest_good(void) {
    const char* dir = fresh();
    Error err;
    for (int64_t step = 1; step <= 6; step++) { put(dir, step, (uint64_t)step); }
    check(truncate(in(in(dir, "step_00000006"), "optimizer.safetensors"), 10) == 0);
    check(unlink(in(in(dir, "step_00000005"), "state.json")) == 0);
    check(run_prune(dir, 1, 0, &err));
    check_newest(dir, 4, 1, "step_00000006");
    check(count_names(dir, "") == 2); // 6, the newest, and 4, the newest intact one
    check(truncate(in(in(dir, "step_00000004"), "model.safetensors"), 10) == 0);
    check(run_prune(dir, 1, 0, &err) && count_names(dir, "") == 1); // there is no intact one left to keep
    check(!run_prune(in(dir, "nowhere"), 1, 0, &err) && strstr(err.text, "nowhere"));
}

static void test_leftovers(void) {
    const char* dir = fresh();
    char name[RUN_NAME];
    Error err;
    pid_t dead = fork();
    if (dead == 0) { _exit(0); }
    waitpid(dead, NULL, 0);
    check(run_remove_leftovers(dir, &err)); // the directory does not exist yet
    put(dir, 1, 1);
    put(dir, 2, 2);
    // from the dead process: a half-written checkpoint, a half-removed one next to its successor, and one that was
    // moved away before the process died between the two renames
    snprintf(name, sizeof(name), ".tmp-step_00000007-%ld", (long)dead);
    check(mkdir(in(dir, name), 0777) == 0);
    write_all(in(in(dir, name), "model.safetensors"), "half", 4);
    snprintf(name, sizeof(name), ".old-step_00000001-%ld", (long)dead);
    check(mkdir(in(dir, name), 0777) == 0);
    snprintf(name, sizeof(name), ".old-step_00000002-%ld", (long)dead);
    check(rename(in(dir, "step_00000002"), in(dir, name)) == 0);
    // with our own PID: from an earlier run in another container
    snprintf(name, sizeof(name), ".tmp-step_00000009-%ld", (long)getpid());
    check(mkdir(in(dir, name), 0777) == 0);
    // from a living process, and a name that is not ours
    check(mkdir(in(dir, ".tmp-step_00000008-1"), 0777) == 0 && mkdir(in(dir, ".tmp-mine"), 0777) == 0);
    check(run_remove_leftovers(dir, &err));
    check(is_directory(in(dir, ".tmp-step_00000008-1")) && is_directory(in(dir, ".tmp-mine")));
    check(count_names(dir, "") == 4);
    check(holds(in(dir, "step_00000001"), 1, 1) && holds(in(dir, "step_00000002"), 2, 2));
    // a save removes a leftover with the name that it needs
    snprintf(name, sizeof(name), ".tmp-step_00000003-%ld", (long)getpid());
    check(mkdir(in(dir, name), 0777) == 0);
    write_all(in(in(dir, name), "junk"), "half", 4);
    put(dir, 3, 3);
    check(holds(in(dir, "step_00000003"), 3, 3) && !file_exists(in(in(dir, "step_00000003"), "junk")));
}

// ---- tests: failing operations --------------------------------------------------------------

static const char* self;
static char shim[256];

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

static const char* trace_path(void) { return in(test_dir(), "trace"); }

// Line number of the first "OPERATION PATH" in the trace after line `after`; 0 if there is none.
static int traced(const char* operation, const char* path, int after) {
    Text trace = read_all(trace_path());
    int line = 0, found = 0;
    for (char* at = strtok(trace.data, "\n"); at && !found; at = strtok(NULL, "\n")) {
        char got[1024], want[1024];
        line++;
        snprintf(got, sizeof(got), "%.1000s", strchr(at, ' ') + 1);
        snprintf(want, sizeof(want), "%s %.1000s", operation, path);
        if (line > after && strcmp(got, want) == 0) { found = line; }
    }
    free(trace.data);
    return found;
}

// Runs this program with these arguments; operation `at` on dir fails according to `mode`. Returns the wait status. Its
// messages are in stderr_path(); the number of operations is in *num_calls unless it was killed.
static int run_failing(const char* dir, const char* mode, int at, int error, const char* const* args, int* num_calls,
                       pid_t* pid) {
    char number[32], options[256];
    const char* count_path = in(test_dir(), "count");
    write_all(count_path, "0", 1);
    *pid = fork();
    if (*pid == 0) {
        int fd = open(stderr_path(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(fd, STDERR_FILENO);
        setenv("LD_PRELOAD", shim, 1);
        // asan's runtime insists on being loaded first, which makes no difference here
        const char* asan = getenv("ASAN_OPTIONS");
        snprintf(options, sizeof(options), "%s:verify_asan_link_order=0", asan ? asan : "");
        setenv("ASAN_OPTIONS", options, 1);
        setenv("OMP_NUM_THREADS", "1", 1);
        setenv("FAIL_DIR", dir, 1);
        setenv("FAIL_MODE", mode, 1);
        setenv("FAIL_COUNT_FILE", count_path, 1);
        if (at == 0) { setenv("FAIL_TRACE", trace_path(), 1); }
        snprintf(number, sizeof(number), "%d", at);
        setenv("FAIL_AT", number, 1);
        snprintf(number, sizeof(number), "%d", error);
        setenv("FAIL_ERRNO", number, 1);
        execl(self, self, args[0], dir, args[1], args[2], (char*)NULL);
        _exit(99);
    }
    int status = -1;
    waitpid(*pid, &status, 0);
    Text count = read_all(count_path);
    *num_calls = atoi(count.data);
    free(count.data);
    return status;
}

static int exit_code(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// Saves step `step` of seed 2 next to (or, if it is 5, in place of) an intact checkpoint of step 5 and seed 1, once per
// operation, which fails. Each time the old checkpoint must survive or be replaced, the new one be whole or absent.
static void save_with_failures(int64_t step, const char* mode, int error) {
    char name[RUN_NAME];
    run_step_name(name, step);
    const char *dir = fresh(), *older = in(dir, "step_00000005"), *newer = in(dir, name);
    snprintf(name, sizeof(name), "%lld", (long long)step);
    const char* const args[] = {"--save", name, "2"};
    bool killed = strcmp(mode, "kill") == 0;
    int num_calls, ignored, failed = 0, unreported = 0;
    pid_t pid;
    put(dir, 5, 1);
    check(run_failing(dir, mode, 0, error, args, &num_calls, &pid) == 0);
    check_msg(num_calls > 20, "only %d operations are seen", num_calls);
    for (int at = 1; at <= num_calls; at++) {
        Error err;
        run_remove_directory(newer, NULL);
        put(dir, 5, 1);
        int code = exit_code(run_failing(dir, mode, at, error, args, &ignored, &pid));
        if (killed) {
            check_msg(code == 128 + SIGKILL, "operation %d: ends with %d", at, code);
            check(run_remove_leftovers(dir, &err));
        } else {
            check_msg(code == 0 || code == 1, "operation %d: ends with %d", at, code);
            Text said = read_all(stderr_path());
            check_msg(code == 0 || strstr(said.data, strerror(error)) != NULL, "operation %d: says '%s'", at,
                      said.data);
            free(said.data);
        }
        check_msg(count_names(dir, ".") == 0, "operation %d leaves something behind", at);
        bool saved = holds(newer, step, 2);
        check_msg(holds(older, 5, 1) || (step == 5 && saved), "operation %d takes the older checkpoint away", at);
        check_msg(code != 0 || saved, "operation %d: success without a checkpoint", at);
        failed += code == 1;
        unreported += code == 0;
        check_newest(dir, saved ? step : 5, 0, "");
    }
    // a failure to close a directory that has been synced may go unreported
    check_msg(killed || (failed >= num_calls - 4 && unreported <= 4), "%d of %d failures reported", failed, num_calls);
}

// To survive a power cut, a save must sync every file after its last write, then their directory, then rename it, then
// sync the directory of the run.
static void test_order_of_syncs(void) {
    const char *dir = fresh(), *const args[] = {"--save", "6", "2"};
    char hidden[RUN_NAME];
    int num_calls;
    pid_t pid;
    if (!build_shim()) { return; }
    check(mkdir(dir, 0777) == 0);
    unlink(trace_path());
    check(run_failing(dir, "once", 0, 0, args, &num_calls, &pid) == 0);
    snprintf(hidden, sizeof(hidden), ".tmp-step_00000006-%ld", (long)pid);
    int synced = traced("fsync", in(dir, hidden), 0), renamed = traced("rename", in(dir, "step_00000006"), 0);
    check(synced > 0 && renamed > synced && traced("fsync", dir, renamed) > renamed);
    for (int f = 0; f < NUM_FILES; f++) {
        const char* path = in(in(dir, hidden), files[f]);
        int opened = traced("open", path, 0), sync = traced("fsync", path, 0);
        check_msg(opened > 0 && sync > opened && synced > sync, "%s is not synced", files[f]);
        check_msg(traced("write", path, 0) > opened && traced("write", path, sync) == 0, "%s", files[f]);
    }
}

static void test_failing_save(void) {
    if (build_shim()) { save_with_failures(6, "once", ENOSPC); }
}

static void test_failing_replace(void) {
    if (build_shim()) { save_with_failures(5, "once", EIO); }
}

static void test_full_disk(void) {
    if (build_shim()) { save_with_failures(6, "from", ENOSPC); }
}

static void test_full_disk_replace(void) {
    if (build_shim()) { save_with_failures(5, "from", ENOSPC); }
}

static void test_killed_save(void) {
    if (build_shim()) { save_with_failures(6, "kill", ENOSPC); }
}

static void test_killed_replace(void) {
    if (build_shim()) { save_with_failures(5, "kill", ENOSPC); }
}

// write() may write only a part of its bytes, and a file system may not be able to exchange two directories
static void test_short_and_odd(void) {
    static const struct {
        const char* mode;
        int error;
    } odd[] = {{"short", 0}, {"once", EINVAL}};
    const char *dir = fresh(), *path = in(dir, "step_00000005");
    const char* const args[] = {"--save", "5", "2"};
    int num_calls, ignored, replaced = 0;
    pid_t pid;
    if (!build_shim()) { return; }
    put(dir, 5, 1);
    check(run_failing(dir, "once", 0, 0, args, &num_calls, &pid) == 0);
    for (int i = 0; i < 2; i++) {
        for (int at = 1; at <= num_calls; at++) {
            put(dir, 5, 1);
            int code = exit_code(run_failing(dir, odd[i].mode, at, odd[i].error, args, &ignored, &pid));
            bool saved = holds(path, 5, 2);
            check(i == 1 || (code == 0 && saved));
            check(saved || holds(path, 5, 1));
            replaced += i == 1 && code == 0 && saved;
            check(count_names(dir, ".") == 0 && count_names(dir, "") == 1);
        }
    }
    // may fail without ending the save: the exchange, and syncing and closing two directories
    check(replaced >= 1 && replaced <= 5);
}

static void test_failing_prune(void) {
    static const char* const modes[] = {"once", "from", "kill"};
    const char* const args[] = {"--prune", "1", ""};
    int num_calls, ignored;
    pid_t pid;
    if (!build_shim()) { return; }
    for (int i = 0; i < 3; i++) {
        const char* dir = fresh();
        unlink(trace_path());
        for (int at = 0; at == 0 || at <= num_calls; at++) {
            Error err;
            for (int64_t step = 1; step <= 3; step++) { put(dir, step, (uint64_t)step); }
            int code = exit_code(run_failing(dir, modes[i], at, EIO, args, at == 0 ? &num_calls : &ignored, &pid));
            check(at > 0 || (code == 0 && num_calls >= 4 && count_names(dir, "") == 1));
            check(at == 0 || i < 2 || code == 128 + SIGKILL);
            if (at == 0) { // a checkpoint is renamed before its first file is removed
                char hidden[RUN_NAME];
                snprintf(hidden, sizeof(hidden), ".tmp-step_00000001-%ld", (long)pid);
                check(traced("rename", in(dir, hidden), 0) > 0);
            }
            check(run_remove_leftovers(dir, &err) && count_names(dir, ".") == 0);
            check(holds(in(dir, "step_00000003"), 3, 3));
            check_newest(dir, 3, 0, ""); // no half-removed one looks like a checkpoint
            for (int64_t step = 1; step <= 2; step++) {
                char name[RUN_NAME];
                run_step_name(name, step);
                check(!file_exists(in(dir, name)) || holds(in(dir, name), step, (uint64_t)step));
            }
        }
    }
}

// ---- tests: signals -----------------------------------------------------------------------

static void test_signals(void) {
    static const int signals[] = {SIGINT, SIGTERM};
    for (int i = 0; i < 4; i++) {
        int first = signals[i % 2], second = signals[i / 2];
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            int fd = open("/dev/null", O_WRONLY);
            dup2(fd, STDERR_FILENO);
            signal(SIGINT, SIG_IGN); // as in a background job of a shell
            run_install_signal_handlers();
            if (run_stop_signal != 0) { _exit(1); }
            raise(first);
            if (run_stop_signal != first) { _exit(2); }
            raise(second);
            _exit(3);
        }
        int status = -1;
        waitpid(pid, &status, 0);
        check_msg(exit_code(status) == 128 + second, "signals %d, %d: ends with %d", first, second, exit_code(status));
    }
}

// ---- the program -----------------------------------------------------------------------

static int child(int argc, char** argv) {
    Error err;
    bool ok = false;
    if (argc == 5 && strcmp(argv[1], "--save") == 0) {
        Run run;
        run_make(&run, atoll(argv[3]), (uint64_t)atoll(argv[4]));
        ok = save(argv[2], &run, &err);
        run_free(&run);
    } else if (argc == 5 && strcmp(argv[1], "--prune") == 0) {
        ok = run_prune(argv[2], atoi(argv[3]), 0, &err);
    } else {
        error_set(&err, "usage: --save DIR STEP SEED");
    }
    if (!ok) { fprintf(stderr, "%s\n", err.text); }
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

static const Test tests[] = {
    {"round_trip", "every bit of a run comes back", test_round_trip},
    {"not_finite", "weights that are no numbers are neither saved nor loaded", test_not_finite},
    {"tokenizer_inside", "vocabulary and model open from the directory", test_tokenizer_inside},
    {"nothing_left_out", "every member of RunState is saved", test_nothing_left_out},
    {"extreme_numbers", "doubles and 64-bit integers are exact", test_extreme_numbers},
    {"fp8_largest", "the list of --fp8 is exact, and absent without it", test_fp8_largest},
    {"nan_in_a_window", "a NaN loss does not spoil the state", test_nan_in_a_window},
    {"flipped_bit", "one flipped bit in any byte of any file is found, the older checkpoint is taken",
     test_flipped_bit},
    {"missing_or_cut", "any file missing, cut, too long, zeroed", test_missing_or_cut},
    {"none_found", "no directory, no checkpoint, none whole, a renamed one", test_none_found},
    {"state_refused_by_name", "what a state.json with a right sum can still have wrong", test_state_refused_by_name},
    {"fp8_largest_refused", "what the list of --fp8 can have wrong", test_fp8_largest_refused},
    {"other_config_refused", "another shape is refused", test_other_config_refused},
    {"optimizer_of_old_checkpoints", "it was AdamW", test_optimizer_of_old_checkpoints},
    {"old_checkpoints_are_gpt2", "they were GPT-2's", test_old_checkpoints_are_gpt2},
    {"other_settings", "other values than GPT-2's, to the bit", test_other_settings},
    {"settings_compared", "no setting changes silently", test_settings_compared},
    {"names", "names of checkpoints and of hidden directories", test_names},
    {"same_step_replaced", "a save over a checkpoint of the same step", test_same_step_replaced},
    {"prune_rules", "which ones are kept", test_prune_rules},
    {"prune_keeps_best", "the link best, and what it points to", test_prune_keeps_best},
    {"prune_keeps_newest_good", "also when newer ones are damaged", test_prune_keeps_newest_good},
    {"leftovers", "of dead runs are removed, of living ones kept", test_leftovers},
    {"order_of_syncs", "nothing gets its name before it is on the disk", test_order_of_syncs},
    {"failing_save", "each operation of a save fails in its turn", test_failing_save},
    {"failing_replace", "the same over a checkpoint of the same step", test_failing_replace},
    {"full_disk", "each operation and all after it fail", test_full_disk},
    {"full_disk_replace", "the same over a checkpoint of the same step", test_full_disk_replace},
    {"killed_save", "killed at each operation of a save", test_killed_save},
    {"killed_replace", "the same over a checkpoint of the same step", test_killed_replace},
    {"short_and_odd", "short writes; a file system that cannot exchange directories", test_short_and_odd},
    {"failing_prune", "each operation of a prune fails, or is the last one", test_failing_prune},
    {"signals", "the first one asks, the second one ends", test_signals},
};

int main(int argc, char** argv) {
    if (argc > 2 && strncmp(argv[1], "--", 2) == 0) { return child(argc, argv); }
    self = argv[0];
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
