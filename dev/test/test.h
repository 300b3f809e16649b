/*
A test program consists of a table of named tests and a main of one line:

    static void test_adds(void) { check(1 + 1 == 2); }
    static const Test tests[] = {{"adds", "one and one is two", test_adds}};
    int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }

It prints `ok NAME`, `FAIL NAME: reason` or `skip NAME: reason` per test, then `N passed, N failed, N skipped`, and
exits with 1 after a failure. `--list` prints the names; other arguments are the names of tests to run. dev/test/run.sh
adds up the results.
Tests run from the top folder of the repository.
*/
#ifndef DEV_TEST_H
#define DEV_TEST_H

#include "../../llmc/utils.h"
#include <math.h>

typedef struct {
    const char* name;
    const char* what;
    void (*fn)(void);
} Test;

static int test_failures;          // of the running test
static char test_skip_reason[512]; // "": not skipped
static const char* test_name;

// Records a failure and continues; only the first reasons are printed.
PRINTF_LIKE(3, 4) static inline void test_fail(const char* file, int line, const char* fmt, ...) {
    if (test_failures++ >= 10) { return; }
    va_list args;
    va_start(args, fmt);
    printf("FAIL %s: %s:%d: ", test_name, file, line);
    vprintf(fmt, args);
    printf("\n");
    va_end(args);
    fflush(stdout);
}

#define check(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) { test_fail(__FILE__, __LINE__, "%s", #cond); }                                                   \
    } while (0)
#define check_msg(cond, ...)                                                                                           \
    do {                                                                                                               \
        if (!(cond)) { test_fail(__FILE__, __LINE__, __VA_ARGS__); }                                                   \
    } while (0)
// checks |got - want| <= tol, written so that NaN fails
#define check_near(got, want, tol)                                                                                     \
    do {                                                                                                               \
        double got_ = (got), want_ = (want), tol_ = (tol);                                                             \
        if (!(fabs(got_ - want_) <= tol_)) {                                                                           \
            test_fail(__FILE__, __LINE__, "%s is %.9g, want %.9g within %g", #got, got_, want_, tol_);                 \
        }                                                                                                              \
    } while (0)
#define check_str(got, want)                                                                                           \
    do {                                                                                                               \
        const char *got_ = (got), *want_ = (want);                                                                     \
        if (strcmp(got_, want_) != 0) { test_fail(__FILE__, __LINE__, "%s is '%s', want '%s'", #got, got_, want_); }   \
    } while (0)

// Ends the test as skipped: use as `if (!file_exists(p)) { test_skip("needs %s", p); return; }`
PRINTF_LIKE(1, 2) static inline void test_skip(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(test_skip_reason, sizeof(test_skip_reason), fmt, args);
    va_end(args);
}

// A fresh temporary directory; it is removed with all of its contents when the program ends.
static char test_dir_path[64];
static pid_t test_dir_owner; // a child process that exits leaves the directory
static inline void test_dir_remove(void) {
    char cmd[128];
    if (getpid() != test_dir_owner) { return; }
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", test_dir_path);
    if (system(cmd) != 0) { fprintf(stderr, "cannot remove %s\n", test_dir_path); }
}
static inline const char* test_dir(void) {
    if (!test_dir_path[0]) {
        strcpy(test_dir_path, "/tmp/llmc_test_XXXXXX");
        if (!mkdtemp(test_dir_path)) { die("mkdtemp: %s", strerror(errno)); }
        test_dir_owner = getpid();
        atexit(test_dir_remove);
    }
    return test_dir_path;
}

static inline int run_tests(int argc, char** argv, const Test* tests, size_t num_tests) {
    int passed = 0, failed = 0, skipped = 0;
    for (int a = 1; a < argc; a++) { // a misspelt name must not look like a success
        bool known = strcmp(argv[a], "--list") == 0;
        for (size_t i = 0; i < num_tests; i++) { known |= strcmp(argv[a], tests[i].name) == 0; }
        if (!known) {
            fprintf(stderr, "%s: no test '%s'; see --list\n", argv[0], argv[a]);
            return 2;
        }
    }
    for (size_t i = 0; i < num_tests; i++) {
        if (argc > 1 && strcmp(argv[1], "--list") == 0) {
            printf("%-32s %s\n", tests[i].name, tests[i].what);
            continue;
        }
        bool wanted = argc == 1;
        for (int a = 1; a < argc; a++) { wanted |= strcmp(argv[a], tests[i].name) == 0; }
        if (!wanted) { continue; }
        test_name = tests[i].name;
        test_failures = 0;
        test_skip_reason[0] = '\0';
        double start = time_ms();
        tests[i].fn();
        if (test_failures) {
            failed++;
            printf("FAIL %s: %d check%s failed\n", test_name, test_failures, test_failures == 1 ? "" : "s");
        } else if (test_skip_reason[0]) {
            skipped++;
            printf("skip %s: %s\n", test_name, test_skip_reason);
        } else {
            passed++;
            printf("ok %s (%.0f ms)\n", test_name, time_ms() - start);
        }
        fflush(stdout);
    }
    if (argc > 1 && strcmp(argv[1], "--list") == 0) { return 0; }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
