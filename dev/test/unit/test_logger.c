// llmc/schedulers.h, outlier_detector.h, logger.h. The expected values come from formulas written out here, from
// FORMATS.md (which describes the formats of llm.c and TensorBoard), or from a file made by hand.
#include "../test.h"
#include "../../../llmc/logger.h"
#include "../../../llmc/outlier_detector.h"
#include "../../../llmc/schedulers.h"
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

// ---- schedulers -----------------------------------------------------------------------

static LrSchedule schedule(const char* type, float lr, float fraction, int64_t warmup, int64_t num_steps) {
    LrSchedule s = {type, lr, fraction, warmup, num_steps};
    return s;
}

static void test_lr_values(void) {
    LrSchedule s = schedule("cosine", 1.0f, 0.1f, 10, 110);
    check_near(lr_at(&s, 0), 0.1, 1e-7);
    check_near(lr_at(&s, 9), 1.0, 1e-7);
    check_near(lr_at(&s, 10), 1.0, 1e-7);
    check_near(lr_at(&s, 35), 0.1 + 0.9 * 0.853553391, 1e-6); // (1 + cos(pi/4)) / 2
    check_near(lr_at(&s, 60), 0.55, 1e-6);
    check_near(lr_at(&s, 110), 0.1, 1e-6);
    check_near(lr_at(&s, 1000), 0.1, 1e-6);
    s.type = "linear";
    check_near(lr_at(&s, 4), 0.5, 1e-7);
    check_near(lr_at(&s, 35), 0.775, 1e-6);
    check_near(lr_at(&s, 110), 0.1, 1e-6);
    s.type = "constant";
    check_near(lr_at(&s, 0), 1.0, 0); // as in llm.c, constant has no warmup
    check_near(lr_at(&s, 109), 1.0, 0);
    s = schedule("wsd", 2.0f, 0.0f, 10, 100);
    check_near(lr_at(&s, 4), 1.0, 1e-7);
    check_near(lr_at(&s, 79), 2.0, 0);
    check_near(lr_at(&s, 80), 2.0, 0);
    check_near(lr_at(&s, 85), 1.0, 1e-6); // 1 - sqrt(1/4)
    check_near(lr_at(&s, 99), 2.0 * (1 - 0.974679434), 1e-6);
    check_near(lr_at(&s, 100), 0.0, 0);
    s.warmup_steps = 95; // the warmup ends within the decay, which then starts there from the peak
    check_near(lr_at(&s, 94), 2.0, 0);
    check_near(lr_at(&s, 95), 2.0, 0);
    check_near(lr_at(&s, 98), 2.0 * (1 - 0.774596669), 1e-6);
    s.warmup_steps = 10;
    s.num_steps = 14; // floor(11.2) = 11
    check_near(lr_at(&s, 11), 2.0, 0);
    check_near(lr_at(&s, 12), 2.0 * (1 - 0.577350269), 1e-6);
}

static void test_lr_edges(void) {
    const char* types[] = {"cosine", "linear", "constant", "wsd"};
    const int64_t sizes[] = {0, 1, 2, 3, 5, 7, 100, INT64_MAX};
    Error err;
    for (int t = 0; t < 4; t++) {
        for (int w = 0; w < 8; w++) {
            for (int n = 0; n < 8; n++) {
                LrSchedule s = schedule(types[t], 3e-4f, 0.25f, sizes[w], sizes[n]);
                check(lr_schedule_check(&s, &err));
                float last = 0;
                for (int64_t i = -1; i <= 220; i++) {
                    int64_t step = i <= 200 ? i : INT64_MAX - (220 - i);
                    float lr = lr_at(&s, step);
                    check_msg(lr >= 0 && lr <= 3e-4f, "%s warmup %lld of %lld, step %lld: %g", types[t],
                              (long long)sizes[w], (long long)sizes[n], (long long)step, (double)lr);
                    bool warming = step < sizes[w] && t != 2;
                    if (i > 0 && warming) { check(lr >= last); }
                    if (i > 0 && step > sizes[w]) { check(lr <= last); }
                    last = lr;
                }
                if (sizes[n] < 200 && sizes[w] < 200 && t != 2 && sizes[n] > sizes[w]) {
                    check_near(lr_at(&s, sizes[n]), 0.25 * 3e-4, 1e-10);
                }
            }
        }
    }
}

static void test_lr_refusals(void) {
    Error err;
    LrSchedule good = schedule("cosine", 1.0f, 0.0f, 10, 100), s;
    check(lr_schedule_check(&good, NULL));
#define REFUSED(field, value)                                                                                          \
    s = good;                                                                                                          \
    s.field = value;                                                                                                   \
    err.text[0] = '\0';                                                                                                \
    check(!lr_schedule_check(&s, &err) && err.text[0] && !strchr(err.text, '\n'))
    REFUSED(type, "cosin");
    check_str(err.text, "learning rate schedule 'cosin' is not known; one of cosine linear constant wsd");
    REFUSED(type, "");
    REFUSED(type, NULL);
    REFUSED(learning_rate, -1.0f);
    REFUSED(learning_rate, (float)NAN);
    REFUSED(learning_rate, (float)INFINITY);
    REFUSED(final_fraction, -0.1f);
    REFUSED(final_fraction, 1.1f);
    REFUSED(final_fraction, (float)NAN);
    REFUSED(warmup_steps, -1);
    REFUSED(num_steps, -1);
#undef REFUSED
}

// ---- outlier detector -------------------------------------------------------------------

static double noise(uint64_t* state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(*state >> 33) / (double)(1u << 31);
}

static void test_outlier_values(void) {
    // compared with the definition, also far from zero, where running sums of squares lose all digits
    const double offsets[] = {0, 4.0, 1e9, -1e12};
    for (int k = 0; k < 4; k++) {
        OutlierDetector d;
        double near[1000]; // the detector's inputs minus the offset, which is exact
        uint64_t state = 1;
        outlier_init(&d);
        for (int i = 0; i < 1000; i++) {
            volatile double seen = offsets[k] + noise(&state);
            near[i] = seen - offsets[k];
            double z = outlier_update(&d, seen), mean = 0, variance = 0;
            if (i < OUTLIER_WINDOW) {
                check(isnan(z));
                continue;
            }
            for (int j = i - OUTLIER_WINDOW; j < i; j++) { mean += near[j] / OUTLIER_WINDOW; }
            for (int j = i - OUTLIER_WINDOW; j < i; j++) {
                variance += (near[j] - mean) * (near[j] - mean) / OUTLIER_WINDOW;
            }
            check_near(z, (near[i] - mean) / sqrt(variance), 1e-10);
        }
        check(outlier_valid(&d));
    }
}

static void test_outlier_poison(void) {
    OutlierDetector d, before;
    uint64_t state = 7;
    outlier_init(&d);
    check(outlier_update(&d, (double)NAN) == (double)INFINITY && d.count == 0); // even while the window fills
    for (int i = 0; i < 300; i++) { outlier_update(&d, noise(&state)); }
    before = d;
    const double poison[] = {(double)NAN, (double)INFINITY, -(double)INFINITY, 1e300};
    for (int i = 0; i < 4; i++) {
        check(outlier_update(&d, poison[i]) == (double)INFINITY);
        check(memcmp(&d, &before, sizeof(d)) == 0);
    }
    check(fabs(outlier_update(&d, 0.5)) < 3);
    check(outlier_update(&d, 50.0) > 30);
    // 3e38, near the largest float, enters the window without making a NaN
    check(outlier_update(&d, 3e38) == OUTLIER_Z_MAX);
    check(isfinite(outlier_update(&d, 0.5)) && outlier_valid(&d));
}

static void test_outlier_flat(void) {
    OutlierDetector d;
    for (int k = 0; k < 3; k++) {
        double v = k == 0 ? 0.0 : k == 1 ? 0.1 : -1.0 / 3; // the sum of 128 times 0.1, divided by 128, is not 0.1
        outlier_init(&d);
        for (int i = 0; i < OUTLIER_WINDOW; i++) { outlier_update(&d, v); }
        check(outlier_update(&d, v) == 0.0);
        check(outlier_update(&d, nextafter(v, -10)) == -OUTLIER_Z_MAX);
        outlier_init(&d);
        for (int i = 0; i < OUTLIER_WINDOW; i++) { outlier_update(&d, v); }
        check(outlier_update(&d, v + 1) == OUTLIER_Z_MAX);
    }
    // a detector copied as bytes continues identically; damaged bytes are detected
    OutlierDetector copy;
    memcpy(&copy, &d, sizeof(d));
    check(outlier_update(&copy, 2.5) == outlier_update(&d, 2.5));
    copy.index = OUTLIER_WINDOW;
    check(!outlier_valid(&copy));
    copy = d, copy.index = -1;
    check(!outlier_valid(&copy));
    copy = d, copy.count = OUTLIER_WINDOW + 1;
    check(!outlier_valid(&copy));
    copy = d, copy.window[77] = (double)NAN;
    check(!outlier_valid(&copy));
}

// ---- logger -----------------------------------------------------------------------------

static char text[1 << 16]; // the contents read by slurp()
static size_t text_bytes;

static const char* slurp(const char* path) {
    FILE* f = fopen(path, "rb");
    text_bytes = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
    text[text_bytes] = '\0';
    if (f) { fclose(f); }
    return f ? text : "(no file)";
}

static void spew(const char* path, const char* data) {
    FILE* f = fopen(path, "wb");
    fwrite(data, 1, strlen(data), f);
    fclose(f);
}

// Returns a path below the test's directory, in one of four buffers used in rotation.
static const char* below(const char* name) {
    static char paths[4][512];
    static int next;
    char* p = paths[next++ % 4];
    snprintf(p, sizeof(paths[0]), "%s/%s", test_dir(), name);
    return p;
}

static void test_step_line(void) {
    char buf[256];
    int n =
        format_step_line(buf, sizeof(buf), 3, 100, 4.25, 2.5, 0.875, -2.25, 3e-4, 12.345, "45.7% bf16 MFU", 123456.7);
    check_str(buf,
              "step    3/100 | loss 4.250000 (+2.50z)| norm 0.8750 (-2.25z)| lr 3.00e-04 | 12.35 ms | 45.7% bf16 MFU "
              "| 123457 tok/s");
    check(n == (int)strlen(buf));
    format_step_line(buf, sizeof(buf), 12345, 19560, 10.9876543, -(double)NAN, 15.3, (double)NAN, 0, 1000,
                     "38.0 GFLOP/s", 64);
    check_str(buf, "step 12345/19560 | loss 10.987654 | norm 15.3000 | lr 0.00e+00 | 1000.00 ms | 38.0 GFLOP/s | "
                   "64 tok/s"); // no z-scores until the windows are full
    format_step_line(buf, sizeof(buf), 3, 100, 4.25, 2, 0.875, -1.99, 3e-4, 12.345, "45.7% bf16 MFU", 123456.7);
    check(!strstr(buf, "z)")); // nothing to be noticed
    format_step_line(buf, sizeof(buf), 7, 9, (double)NAN, (double)INFINITY, 2, (double)NAN, 0, 1000, "", 64);
    // the loss has a z-score because it is not finite, the norm has none
    check(strstr(buf, "| loss     nan (+infz)| norm 2.0000 | lr "));
    volatile size_t small = 10; // volatile, because otherwise the compiler foresees the truncation and warns
    check(format_step_line(buf, small, 1, 1, 0, 0, 0, 0, 0, 0, "", 0) > 10 && strlen(buf) == 9);
}

static void test_event_vector(void) {
    // the record of wall time 1700000001.5, step 10, train/loss = 4.25
    static const char* want = "2000000000000000"
                              "29eda950"
                              "09"
                              "00006040fc54d941"
                              "100a"
                              "2a13"
                              "0a11"
                              "0a0a"
                              "747261696e2f6c6f7373"
                              "1500008840"
                              "f62edaba";
    uint8_t record[EVENT_MAX_BYTES + 64];
    char hex[2 * sizeof(record) + 1] = "";
    const char* tag = "train/loss";
    double loss = 4.25;
    size_t n = event_scalars(record, 1700000001.5, 10, &tag, &loss, 1);
    for (size_t i = 0; i < n; i++) { snprintf(hex + 2 * i, 3, "%02x", record[i]); }
    check_str(hex, want);
    // lengths and steps that need several varint bytes; the maximal number of tags, of maximal length
    char long_tag[EVENT_MAX_TAG + 1];
    memset(long_tag, 'x', EVENT_MAX_TAG);
    long_tag[EVENT_MAX_TAG] = '\0';
    const char* tags[EVENT_MAX_VALUES];
    double values[EVENT_MAX_VALUES];
    for (int i = 0; i < EVENT_MAX_VALUES; i++) { tags[i] = long_tag, values[i] = i; }
    n = event_scalars(record, 0, INT64_MAX, tags, values, EVENT_MAX_VALUES);
    size_t value = 2 + EVENT_MAX_TAG + 5, summary = EVENT_MAX_VALUES * (2 + value), data = 9 + 10 + 3 + summary;
    check_msg(n == 12 + data + 4, "%zu bytes, want %zu", n, 12 + data + 4);
    check(n <= sizeof(record) && record[0] == (data & 255) && record[1] == data >> 8);
    check(record[12 + 9 + 10] == 0x2a && record[12 + 9 + 11] == (0x80 | (summary & 127)));
}

// Checks the framing of every record of the event file in dir and returns the number of records; counts the files.
static int count_events(const char* dir, int* num_files, char* last_name, size_t size) {
    DIR* d = opendir(dir);
    struct dirent* e;
    int records = 0;
    *num_files = 0;
    while (d && (e = readdir(d))) {
        if (strncmp(e->d_name, "events.out.tfevents.", 20) != 0) { continue; }
        char path[1024];
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        snprintf(last_name, size, "%s", e->d_name);
        slurp(path);
        (*num_files)++;
        for (size_t at = 0; at < text_bytes; records++) {
            uint64_t n = 0;
            uint32_t crc;
            check(text_bytes - at >= 16);
            memcpy(&n, text + at, 8);
            check(n <= text_bytes - at - 16);
            if (test_failures) { break; }
            memcpy(&crc, text + at + 8, 4);
            check(crc == event_masked_crc32c(text + at, 8));
            memcpy(&crc, text + at + 12 + n, 4);
            check(crc == event_masked_crc32c(text + at + 12, n));
            if (at == 0) {
                check(memcmp(text + 12 + 9,
                             "\x1a\x0d"
                             "brain.Event:2",
                             15) == 0 &&
                      n == 24);
            }
            at += 16 + n;
        }
    }
    if (d) { closedir(d); }
    return records;
}

static void test_files(void) {
    Logger l;
    Error err;
    check(logger_open(&l, below("run/one"), -1, &err)); // creates the directory and its parents
    logger_val(&l, 0, 10.98765);
    logger_train(&l, 1, 4.25, 3e-4f, 1.2345, 1500.5, 4096, -1);
    // the lines are in the file before it is closed: a killed process loses nothing
    check_str(slurp(below("run/one/main.log")), "s:0 tel:10.9877\ns:1 trl:4.2500 lr:0.000300 norm:1.23\n");
    logger_train(&l, 2, (double)NAN, 1e-5f, (double)INFINITY, 1, 0.1, 3);
    logger_eval(&l, 2, 0.2954);
    logger_text(&l, 2, "a \"b\"\n", 6);
    check_str(slurp(below("run/one/main.log")),
              "s:0 tel:10.9877\ns:1 trl:4.2500 lr:0.000300 norm:1.23\ns:2 trl:nan lr:0.000010 norm:inf\n"
              "s:2 eval:0.2954\n");
    check_str(slurp(below("run/one/log.jsonl")),
              "{\"step\":0,\"type\":\"val\",\"loss\":10.98765}\n"
              "{\"step\":1,\"type\":\"train\",\"loss\":4.25,\"lr\":0.0003,\"grad_norm\":1.2345,"
              "\"time_ms\":1500.5,\"tokens_per_second\":4096}\n"
              "{\"step\":2,\"type\":\"train\",\"loss\":null,\"lr\":1e-05,\"grad_norm\":null,\"time_ms\":1,"
              "\"tokens_per_second\":0.1,\"fp8_saturated\":3}\n"
              "{\"step\":2,\"type\":\"eval\",\"accuracy\":0.2954}\n"
              "{\"step\":2,\"type\":\"text\",\"text\":\"a \\\"b\\\"\\n\"}\n");
    int files;
    char name[300];
    // records: version, val, 2 train, eval
    check(count_events(below("run/one"), &files, name, sizeof(name)) == 5 && files == 1);
    check(logger_close(&l, &err) && logger_close(&l, &err)); // a second close does nothing
    // after the close this does nothing
    logger_train(&l, 3, 1, 1, 1, 1, 1, -1);
    // makes a new event file in the same second of the same process; the other logs start empty, and the old ones are kept
    static char first[2][4096];
    snprintf(first[0], sizeof(first[0]), "%s", slurp(below("run/one/main.log")));
    snprintf(first[1], sizeof(first[1]), "%s", slurp(below("run/one/log.jsonl")));
    check(logger_open(&l, below("run/one"), -1, &err) && logger_close(&l, &err));
    check(count_events(below("run/one"), &files, name, sizeof(name)) == 6 && files == 2);
    check_str(slurp(below("run/one/main.log")), "");
    check_str(slurp(below("run/one/log.jsonl")), "");
    check_str(slurp(below("run/one/main.log.1")), first[0]);
    check_str(slurp(below("run/one/log.jsonl.1")), first[1]);
    check(first[0][0] && first[1][0]);
    // a second time under the next name; an empty log needs none
    check(logger_open(&l, below("run/one"), -1, &err) && logger_close(&l, &err) &&
          !file_exists(below("run/one/main.log.2")));
    check(logger_open(&l, below("run/one"), -1, &err));
    logger_val(&l, 7, 1.5);
    check(logger_close(&l, &err) && logger_open(&l, below("run/one"), -1, &err) && logger_close(&l, &err));
    check_str(slurp(below("run/one/main.log.1")), first[0]);
    check_str(slurp(below("run/one/main.log.2")), "s:7 tel:1.5000\n");
    check_str(slurp(below("run/one/main.log")), "");
}

static void test_nothing_to_log(void) {
    Logger l;
    Error err;
    for (int i = 0; i < 2; i++) {
        check(logger_open(&l, i ? "" : NULL, i ? 5 : -1, &err) && !l.active);
        logger_train(&l, 1, 1, 1, 1, 1, 1, -1);
        logger_val(&l, 1, 1);
        logger_eval(&l, 1, 1);
        logger_text(&l, 1, "x", 1);
        check(logger_close(&l, &err));
    }
}

static void test_resume(void) {
    Logger l;
    Error err;
    check(make_directories(below("resume"), &err));
    // steps out of order, a user's note, an empty line, a step that overflows, a truncated last line
    spew(below("resume/main.log"), "s:5 tel:1.0\nmy note\ns:7 trl:1.0\ns:10 trl:2.0\ns:11 trl:3.0\n\ns:6 eval:0.3\n"
                                   "s:99999999999999999999 tel:1\ns:10 te");
    spew(below("resume/log.jsonl"), "{\"step\":10,\"type\":\"val\",\"loss\":1}\n{\"step\":11,\"type\":\"val\"}\n"
                                    "{\"step\":1");
    check(logger_open(&l, below("resume"), 10, &err));
    check_str(slurp(below("resume/main.log")), "s:5 tel:1.0\nmy note\ns:7 trl:1.0\ns:10 trl:2.0\n\ns:6 eval:0.3\n");
    check_str(slurp(below("resume/log.jsonl")), "{\"step\":10,\"type\":\"val\",\"loss\":1}\n");
    logger_val(&l, 11, 4);
    check(logger_close(&l, &err));
    check_str(slurp(below("resume/log.jsonl")),
              "{\"step\":10,\"type\":\"val\",\"loss\":1}\n{\"step\":11,\"type\":\"val\",\"loss\":4}\n");
    check(!file_exists(below("resume/main.log.tmp")) && !file_exists(below("resume/log.jsonl.tmp")));
    int files;
    char name[300];
    check(count_events(below("resume"), &files, name, sizeof(name)) == 3 && files == 1);
    // the second record makes TensorBoard discard the steps from 11 on
    check(memcmp(text + 40 + 12 + 9, "\x10\x0b\x3a\x02\x08\x01", 6) == 0);

    // if there is nothing to cut, the file is kept, not copied
    struct stat before, after;
    stat(below("resume/main.log"), &before);
    check(logger_open(&l, below("resume"), 11, &err) && logger_close(&l, &err));
    stat(below("resume/main.log"), &after);
    check(before.st_ino == after.st_ino && before.st_size == after.st_size);
    check(logger_open(&l, below("resume"), 0, &err) && logger_close(&l, &err)); // keeps only the lines without a step
    check_str(slurp(below("resume/main.log")), "my note\n\n");
    // logs that do not exist are created
    check(logger_open(&l, below("resume_new"), 10, &err) && logger_close(&l, &err));
    check_str(slurp(below("resume_new/main.log")), "");
}

// A crash may cut the log at any length. After resuming, it must have the complete lines up to the step and no others.
static void test_resume_torn(void) {
    static const char* full = "s:1 trl:1.0000 lr:0.1 norm:1\ns:2 tel:1.0\ns:2 trl:9.0\ns:3 trl:9.0\n";
    Logger l;
    Error err;
    check(make_directories(below("torn"), &err));
    for (size_t n = 0; n <= strlen(full); n++) {
        char cut[128], want[128] = "";
        snprintf(cut, sizeof(cut), "%.*s", (int)n, full);
        for (const char* line = cut; strchr(line, '\n'); line = strchr(line, '\n') + 1) {
            if (line[2] <= '2') { strncat(want, line, (size_t)(strchr(line, '\n') + 1 - line)); }
        }
        spew(below("torn/main.log"), cut);
        check(logger_open(&l, below("torn"), 2, &err) && logger_close(&l, &err));
        check_str(slurp(below("torn/main.log")), want);
    }
}

static void test_refusals(void) {
    Logger l;
    Error err;
    char path[5000];
    spew(below("file"), "");
    err.text[0] = '\0';
    check(!logger_open(&l, below("file"), -1, &err) && strstr(err.text, "/file") && !l.active);
    check(make_directories(below("odd/main.log"), &err)); // a directory where the file should be
    for (int resume = -1; resume <= 1; resume += 2) {
        err.text[0] = '\0';
        check(!logger_open(&l, below("odd"), resume, &err) && strstr(err.text, "odd/main.log") && !l.active);
        logger_train(&l, 1, 1, 1, 1, 1, 1, -1);
        check(logger_close(&l, &err));
    }
    memset(path, 'x', sizeof(path));
    path[sizeof(path) - 1] = '\0';
    check(!logger_open(&l, path, -1, &err) && !strchr(err.text, '\n'));
}

static void text_line(char* want_failed, const char* s, size_t n, const char* want) {
    char out[256];
    size_t used = log_json_escape(out, s, n);
    out[used] = '\0';
    if (strcmp(out, want) != 0) { test_fail(__FILE__, __LINE__, "'%s': got '%s', want '%s'", want_failed, out, want); }
}

static void test_json_number(void) {
    // the fewest digits that lose nothing, for a float stored in a double and for a double
    const struct {
        double v;
        const char* want;
    } cases[] = {{0, "0"},
                 {-1, "-1"},
                 {0.1, "0.1"},
                 {(double)0.1f, "0.1"},
                 {1.0 / 3, "0.3333333333333333"},
                 {(double)(1.0f / 3), "0.33333334"},
                 {1e300, "1e+300"},
                 {5e-324, "4.94066e-324"},
                 {1.7976931348623157e308, "1.7976931348623157e+308"},
                 {(double)NAN, "null"},
                 {(double)INFINITY, "null"}};
    char buf[32];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        log_json_number(buf, sizeof(buf), cases[i].v);
        check_str(buf, cases[i].want);
    }
    uint64_t state = 5;
    for (int i = 0; i < 10000; i++) {
        double v = noise(&state) * 1e-3 + noise(&state) * 1e-9;
        log_json_number(buf, sizeof(buf), v);
        check(strtod(buf, NULL) == v);
        log_json_number(buf, sizeof(buf), (double)(float)v);
        check(strtof(buf, NULL) == (float)v);
    }
}

static void test_json_text(void) {
#define ESCAPED(s, want) text_line((char*)#s, s, sizeof(s) - 1, want)
    ESCAPED("plain", "plain");
    ESCAPED("", "");
    ESCAPED("a\"b\\c/", "a\\\"b\\\\c/");
    ESCAPED("\n\r\t", "\\n\\r\\t");
    ESCAPED("\0\x1f\x7f", "\\u0000\\u001f\\u007f");
    ESCAPED("h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
    ESCAPED("\x80 \xff", "\xef\xbf\xbd \xef\xbf\xbd");
    ESCAPED("\xc3", "\xef\xbf\xbd");     // truncated
    ESCAPED("\xe2\x82", "\xef\xbf\xbd"); // two bytes of three: one replacement character
    ESCAPED("\xf0\x9f\x98x", "\xef\xbf\xbdx");
    ESCAPED("\xc0\x80", "\xef\xbf\xbd\xef\xbf\xbd"); // overlong
    ESCAPED("\xe0\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    ESCAPED("\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"); // a surrogate
    ESCAPED("\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    ESCAPED("\xef\xbf\xbd", "\xef\xbf\xbd");
#undef ESCAPED
    // n random bytes give at most 6 n bytes, no raw control character, and only valid UTF-8
    uint64_t state = 3;
    for (int round = 0; round < 20000; round++) {
        char in[24], out[6 * sizeof(in)];
        for (size_t i = 0; i < sizeof(in); i++) { in[i] = (char)(int)(noise(&state) * 256); }
        size_t n = log_json_escape(out, in, sizeof(in)), bad;
        check(n <= sizeof(out));
        for (size_t i = 0; i < n;) {
            size_t length = utf8_length((uint8_t*)out + i, n - i, &bad);
            check(length > 0 && (uint8_t)out[i] >= 0x20);
            i += length ? length : 1;
        }
    }
    Logger l;
    Error err;
    size_t big = 1 << 20;
    char* zeros = (char*)calloc_check(big, 1);
    check(logger_open(&l, below("sample"), -1, &err));
    logger_text(&l, 12, zeros, big); // the largest output for the buffer
    logger_text(&l, 13, NULL, 0);
    check(logger_close(&l, &err));
    struct stat st;
    check(stat(below("sample/log.jsonl"), &st) == 0);
    check(st.st_size == (off_t)(6 * big + strlen("{\"step\":12,\"type\":\"text\",\"text\":\"\"}\n") +
                                strlen("{\"step\":13,\"type\":\"text\",\"text\":\"\"}\n")));
    free(zeros);
}

// what may command a terminal, by the ranges of Unicode
static bool commands_terminal(uint32_t c) {
    return (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7F && c < 0xA0) || c == 0x061C || c == 0x200E ||
           c == 0x200F || (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
}

static void test_masked_text(void) {
    int wrong = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        char text[8] = "a";
        size_t n = 1;
        if (c >= 0xD800 && c < 0xE000) { continue; }
        if (c < 0x80) {
            text[n++] = (char)c;
        } else {
            int rest = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
            static const uint32_t lead[] = {0, 0xC0, 0xE0, 0xF0};
            text[n++] = (char)(lead[rest] | (c >> (6 * rest)));
            while (rest-- > 0) { text[n++] = (char)(0x80 | (c >> (6 * rest) & 63)); }
        }
        char before[8];
        text[n++] = 'b';
        memcpy(before, text, sizeof(before));
        size_t left = mask_controls(text, n, true);
        wrong +=
            commands_terminal(c) ? left != 3 || memcmp(text, "a?b", 3) != 0 : left != n || memcmp(text, before, n) != 0;
        memcpy(text, before, sizeof(before));
        left = mask_controls(text, n, false);
        bool masked = commands_terminal(c) || c == '\n' || c == '\t';
        wrong += masked ? left != 3 || memcmp(text, "a?b", 3) != 0 : left != n || memcmp(text, before, n) != 0;
    }
    check_msg(wrong == 0, "%d characters", wrong);
    char invalid[] = "\xff x\xc2 \xe2\x80";
    check(mask_controls(invalid, sizeof(invalid) - 1, true) == 6 && memcmp(invalid, "? x? ?", 6) == 0);
    Error err;
    error_fill(&err, "%s: no", "a\033[2J\xc2\x9b\nb");
    check_str(err.text, "a?[2J??b: no");
}

// the clock was set back between two parts of a run: the name of the new event file still sorts behind the older one's
static void test_clock_set_back(void) {
    char dir[256], path[400];
    Logger l;
    Error err;
    snprintf(dir, sizeof(dir), "%s/clock", test_dir());
    check(make_directories(dir, &err));
    snprintf(path, sizeof(path), "%s/events.out.tfevents.5000000000.host.1.0", dir);
    FILE* f = fopen(path, "wb");
    check(f && fclose(f) == 0);
    for (int i = 1; i <= 2; i++) {
        check(logger_open(&l, dir, i == 1 ? -1 : 0, &err));
        const char* name = strrchr(l.events.path.text, '/') + 1;
        check_msg(strtoll(name + 20, NULL, 10) == 5000000000 + i, "%s", name);
        check(logger_close(&l, &err));
    }
}

// Logs 100 steps to a new directory while no file may grow above 1,000 bytes, which imitates a full disk. That limit holds for a
// whole process, hence the child. lifted: without it for the last step.
static void log_to_a_full_disk(const char* dir, bool lifted) {
    Error err;
    Path errors;
    path_set(&errors, "%s/stderr", dir);
    check(make_directories(dir, &err));
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        Logger l;
        struct rlimit limit = {1000, RLIM_INFINITY};
        signal(SIGXFSZ, SIG_IGN);
        if (!freopen(errors.text, "w", stderr) || !logger_open(&l, dir, -1, &err)) { _exit(1); }
        setvbuf(stderr, NULL, _IONBF, 0);
        setrlimit(RLIMIT_FSIZE, &limit);
        for (int step = 1; step <= 100; step++) {
            if (lifted && step == 100) { setrlimit(RLIMIT_FSIZE, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY}); }
            logger_train(&l, step, 1, 1, 1, 1, 1, -1);
        }
        bool complete = logger_close(&l, &err);
        _exit(complete != lifted || (!lifted && !strstr(err.text, dir)) ? 2 : 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0); // the run continued to its end
    slurp(errors.text);
    check(strncmp(text, "warning: ", 9) == 0 && strstr(text, "File too large"));
    check(strchr(text, '\n') == text + strlen(text) - 1); // only one warning for all failures
}

static void test_failing_write(void) {
    const char* logs[] = {"full/main.log", "full/log.jsonl"};
    int files;
    char name[300];
    log_to_a_full_disk(below("full"), false);
    for (int i = 0; i < 2; i++) {
        slurp(below(logs[i]));
        check(text_bytes > 800 && text_bytes <= 1000 && text[text_bytes - 1] == '\n'); // only complete lines
    }
    check(count_events(below("full"), &files, name, sizeof(name)) > 3); // only complete records
}

// what could not be written for a while is written later, in its order
static void test_late_write(void) {
    int files, lines = 0;
    char name[300];
    log_to_a_full_disk(below("late"), true);
    slurp(below("late/main.log"));
    for (const char* line = text; line; line = strchr(line, '\n')) {
        line += lines > 0;
        if (!*line) { break; }
        check_msg(strtol(line + 2, NULL, 10) == ++lines, "line %d", lines);
    }
    check_msg(lines == 100, "%d lines", lines);
    check(count_events(below("late"), &files, name, sizeof(name)) == 101); // the version, and a record of each step
}

int main(int argc, char** argv) {
    static const Test tests[] = {
        {"lr_values", "cosine, linear, constant, wsd at chosen steps", test_lr_values},
        {"lr_edges", "no steps, no warmup, warmup past the end, huge steps: finite and monotonous", test_lr_edges},
        {"lr_refusals", "unknown types and senseless numbers", test_lr_refusals},
        {"outlier_values", "z-scores against their definition", test_outlier_values},
        {"outlier_poison", "NaN and inf never enter the window", test_outlier_poison},
        {"outlier_flat", "a window without deviation; bytes from a checkpoint", test_outlier_flat},
        {"step_line", "llm.c's step line", test_step_line},
        {"event_vector", "a TensorBoard record byte for byte", test_event_vector},
        {"files", "main.log, log.jsonl and the event file of a short run", test_files},
        {"nothing_to_log", "no directory: every call does nothing", test_nothing_to_log},
        {"resume", "steps after the checkpoint are cut off", test_resume},
        {"resume_torn", "a log cut at every length", test_resume_torn},
        {"refusals", "directories that cannot be used", test_refusals},
        {"json_number", "numbers read back as they were", test_json_number},
        {"json_text", "any bytes become a valid JSON string", test_json_text},
        {"masked_text", "no character that commands a terminal is printed", test_masked_text},
        {"clock_set_back", "event files sort in the order of the run", test_clock_set_back},
        {"failing_write", "a full disk: one warning, whole lines, the run goes on", test_failing_write},
        {"late_write", "a full disk that has space again: no line is missing", test_late_write},
    };
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
