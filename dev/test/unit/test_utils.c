// llmc/utils.h: durations and paths. The tests of other headers use its files and errors.
#include "../test.h"
#include "../../../llmc/utils.h"
#include <math.h>

static void test_duration(void) {
    const struct {
        double seconds;
        const char* want;
    } cases[] = {{0, "0s"},         {42, "42s"},        {59.4, "59s"},      {59.6, "1m00s"},
                 {187, "3m07s"},    {3599.4, "59m59s"}, {3599.6, "1h00m"},  {7500, "2h05m"},
                 {86399, "23h59m"}, {86400, "1d00h"},   {273600, "3d04h"},  {864000000, "10000d00h"},
                 {-1, "?"},         {1e300, "?"},       {(double)NAN, "?"}, {(double)INFINITY, "?"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char buf[32];
        check(format_duration(buf, sizeof(buf), cases[i].seconds) == (int)strlen(cases[i].want));
        check_str(buf, cases[i].want);
    }
}

// The longest path has 4095 bytes. A longer one is not cut before the system can refuse it.
static void test_path_set(void) {
    static char long_name[5000];
    Path path;
    memset(long_name, 'x', sizeof(long_name) - 1);
    check(path_set(&path, "%s/%s", "dir", "name"));
    check_str(path.text, "dir/name");
    check(path_set(&path, "%.4090s.json", long_name) && strlen(path.text) == 4095);
    check(!path_set(&path, "%.4091s.json", long_name) && strlen(path.text) == 4096);
    check(!file_exists(path.text) && errno == ENAMETOOLONG);
    check(!path_set(&path, "%s", long_name) && strlen(path.text) == sizeof(path.text) - 1);
}

static void test_directory_of(void) {
    static const char* const cases[][2] = {{"a", "."},          {"a/b", "a"}, {"a/b/c.bin", "a/b"}, {"/a", "/"},
                                           {"/a/b*.bin", "/a"}, {"./a", "."}, {"a/", "a"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        check_str(directory_of(cases[i][0]).text, cases[i][1]);
    }
}

static const Test tests[] = {
    {"duration", "42s, 3m07s, 2h05m, 3d04h", test_duration},
    {"path_set", "the longest path, one byte more, and what no path has room for", test_path_set},
    {"directory_of", "of a name alone, of paths, below the root", test_directory_of},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
