// llmc/cli.h: every way to write a flag, each usage error with exact message and exit code, --help, the run header.
#include "../test.h"
#include "../../../llmc/cli.h"
#include <sys/wait.h>

static int batch, overfit, flash, verbose, parts;
static int64_t tokens, big;
static float rate, any_rate;
static const char *data, *prompt, *schedule;
static CliList stops;
static int gpu_every, gpu_trace;

static const Option options[] = {
    {OPT_SECTION, 0, NULL, "Data", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 'i', NULL, "train-data", &data, "FILES", "training shards, a glob pattern in quotes", 0, 0},
    {OPT_INT, 'b', NULL, "batch", &batch, "sequences", "sequences in a micro-batch", 1, 4096},
    {OPT_LONG, 'd', NULL, "total-batch", &tokens, "tokens", "tokens in a step; -1: one micro-batch. Many; 0: none", 0,
     0},
    {OPT_LONG, 0, NULL, "seed", &big, NULL,
     "seed of everything random in a run, which is the order of the shards, the initial weights, and the dice of the "
     "sampler; equal seeds give equal runs",
     0, 0},
    {OPT_SECTION, 0, NULL, "Optimization", NULL, NULL, NULL, 0, 0},
    {OPT_FLOAT, 'l', NULL, "learning-rate", &rate, NULL, "highest learning rate", 0, 1},
    {OPT_FLOAT, 0, NULL, "any-rate", &any_rate, "units", "no range", 0, 0},
    {OPT_STR, 'k', NULL, "schedule", &schedule, "cosine|linear|constant|wsd", "learning rate schedule", 0, 0},
    {OPT_BOOL, 'a', NULL, "overfit", &overfit, NULL, "train on one batch", 0, 0},
    {OPT_BOOL, 0, NULL, "flash", &flash, NULL, "on by default", 0, 0},
    {OPT_BOOL, 'v', NULL, "verbose", &verbose, "always", "say more", 0, 0},
    {OPT_SECTION, 0, NULL, "Logging", NULL, NULL, NULL, 0, 0},
    {OPT_INT, 0, "lg", "log-gpu-every", &gpu_every, "steps", "steps between looks at the GPU", 0, INT_MAX},
    {OPT_INT, 't', "lt", "log-gpu-trace", &gpu_trace, "steps", "a second two-letter flag", 0, 0},
    {OPT_STR, 'p', NULL, "prompt", &prompt, "TEXT", "text to go on from", 0, 0},
    {OPT_LIST, 'y', NULL, "stop", &stops, "TEXT", "ends a text", 0, 0},
    {OPT_CHOICE, 'q', "pt", "parts", &parts, "off|low|low+mid|low+mid+high", "what is done", 0, 0},
};
enum { NUM_OPTIONS = sizeof(options) / sizeof(options[0]) };

typedef struct {
    int code;          // exit code, -1 for a signal
    char out[16384];   // stdout
    char err[4096];    // stderr
    char values[1024]; // all variables, written after cli_parse has returned
} Result;

static void reset_values(void) {
    batch = 4, overfit = 0, flash = 1, verbose = 0, parts = 0;
    tokens = -1, big = 1337;
    rate = 3e-4f, any_rate = 0;
    data = "a.bin", prompt = NULL, schedule = "cosine";
    gpu_every = -1, gpu_trace = 0;
}

static void read_back(FILE* f, char* buf, size_t size) {
    rewind(f);
    buf[fread(buf, 1, size - 1, f)] = '\0';
    fclose(f);
}

static const Option sibling_options[] = {
    {OPT_SECTION, 0, NULL, "Card", NULL, NULL, NULL, 0, 0},
    {OPT_BOOL, 0, "lz", "zero-copy", &verbose, NULL, "of the other program", 0, 0},
    {OPT_INT, 'r', NULL, "recompute", &verbose, NULL, "of the other program", 0, 0},
};
static const char* const most_used[][2] = {{"batch", "so many at once"}, {"stop", "ends it"}, {NULL, NULL}};
static const char* const examples[][2] = {{"-b 2", "small"}, {"-b 2000 -l 1", "large"}, {NULL, NULL}};
static const char* const habits[][2] = {{"lr", "learning-rate"}, {"n-iter", "batch"}, {"cpu", "buy one"}, {NULL, NULL}};
static const CliExtras extras = {most_used, examples, habits, "other_prog", sibling_options, 3};

// Runs cli_parse in a child process with "prog" and a NULL-terminated list of arguments.
static void run_child(Result* r, const char* const* list, bool header) {
    FILE* files[3]; // stdout, stderr, values
    for (int i = 0; i < 3; i++) {
        files[i] = tmpfile();
        if (!files[i]) { die("tmpfile: %s", strerror(errno)); }
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char* argv[2 * CLI_LIST_MAX + 4] = {(char*)"prog"};
        int argc = 1;
        for (; list[argc - 1]; argc++) { argv[argc] = (char*)list[argc - 1]; }
        dup2(fileno(files[0]), STDOUT_FILENO);
        dup2(fileno(files[1]), STDERR_FILENO);
        reset_values();
        errno = ERANGE; // as an earlier call may have left it
        cli_parse(argc, argv, "Trains a small model.", options, NUM_OPTIONS);
        if (header) { cli_print(stdout, options, NUM_OPTIONS); }
        fprintf(files[2],
                "i=%s b=%d d=%lld seed=%lld l=%.9g any=%.9g k=%s a=%d flash=%d v=%d lg=%d lt=%d p=%s q=%d z=%d:%s:%s",
                data, batch, (long long)tokens, (long long)big, (double)rate, (double)any_rate, schedule, overfit,
                flash, verbose, gpu_every, gpu_trace, prompt ? prompt : "NULL", parts, stops.n,
                stops.n ? stops.items[0] : "", stops.n ? stops.items[stops.n - 1] : "");
        exit(77); // parsing succeeded
    }
    int status = 0;
    waitpid(pid, &status, 0);
    r->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    read_back(files[0], r->out, sizeof(r->out));
    read_back(files[1], r->err, sizeof(r->err));
    read_back(files[2], r->values, sizeof(r->values));
}

// Parses args. Each of the words in want, such as "b=7", must be among the printed variables.
static void expect(int line, const char* want, const char* const* args) {
    Result r;
    run_child(&r, args, false);
    char padded[1100], needle[256];
    snprintf(padded, sizeof(padded), " %s ", r.values);
    snprintf(needle, sizeof(needle), " %s ", want);
    if (r.code != 77 || r.err[0] || !strstr(padded, needle)) {
        test_fail(__FILE__, line, "want '%s', got exit %d, '%s', stderr '%s'", want, r.code, r.values, r.err);
    }
}

// Parses args. Must exit with 2, print nothing on stdout, and on stderr exactly "prog: TEXT\n".
static void expect_error(int line, const char* want, const char* const* args) {
    Result r;
    char text[2200];
    run_child(&r, args, false);
    snprintf(text, sizeof(text), "prog: %s\n", want);
    if (r.code != 2 || r.out[0] || strcmp(r.err, text) != 0) {
        test_fail(__FILE__, line, "want exit 2 and '%s', got exit %d and '%s', stdout '%s'", text, r.code, r.err,
                  r.out);
    }
}

// Calls f with a NULL-terminated list of arguments.
#define WITH(f, want, ...)                                                                                             \
    do {                                                                                                               \
        const char* args_[] = {__VA_ARGS__, NULL};                                                                     \
        f(__LINE__, want, args_);                                                                                      \
    } while (0)
#define ok(want, ...) WITH(expect, want, __VA_ARGS__)
#define bad(want, ...) WITH(expect_error, want, __VA_ARGS__)

static void test_forms(void) {
    const char* none[] = {NULL};
    expect(__LINE__, "i=a.bin b=4 d=-1 seed=1337 l=0.000300000014 any=0 k=cosine a=0 flash=1 v=0 lg=-1 lt=0 p=NULL q=0",
           none);
    ok("b=7", "-b", "7");
    ok("b=7", "-b7");
    ok("b=7", "--batch", "7");
    ok("b=7", "--batch=7");
    ok("b=7", "--bat", "7"); // abbreviations, as in getopt
    ok("b=9", "-b", "7", "--batch", "9");
    ok("b=7", "-b", "7", "--");
    ok("i=", "-i", "");
    ok("i=x=y", "--train-data=x=y");
    ok("i=-", "-i", "-");
    ok("k=wsd", "-k", "wsd");
    ok("k=linear", "--schedule=linear");
    ok("lt=-3", "-t", "-3");
    ok("lt=-3", "--log-gpu-trace", "-3");
}

static void test_two_letter_flags(void) {
    ok("lg=5", "-lg", "5");
    ok("lt=5", "-lt", "5"); // not read as -l with the value t
    ok("lt=5", "-t5");
    ok("l=0.5", "-l", "0.5");
    ok("lg=5 lt=6", "-lg", "5", "-lt", "6");
    ok("l=0.00999999978", "-l.01"); // a value attached to the letter l, with which -lg begins too
    ok("p=-lg", "--prompt", "-lg");
    ok("p=-lg", "-p", "-lg");
    ok("p=-lg", "--prompt=-lg");
    ok("p=-lg", "-p-lg");
    ok("p=-lg", "--prom", "-lg");
    ok("lg=8 lt=0 p=-lg", "-p", "-lg", "-lg", "8");
    ok("p=--", "-p", "--");
    bad("stray argument '-lg', see prog --help", "--", "-lg", "5");
    bad("flag '-lg' wants a value, see prog --help", "-lg");
    bad("unknown flag '-lx', see prog --help", "-lx", "5");
    bad("unknown flag '-bs', see prog --help", "-bs");
    bad("unknown flag '-batch', did you mean '--batch'? see prog --help", "-batch", "5");
    bad("unknown flag '-prompt', did you mean '--prompt'? see prog --help", "-prompt", "x");
    ok("p=romp", "-promp"); // a text may be attached to its letter
}

static void test_bools(void) {
    ok("a=1", "-a");
    ok("a=1", "-a", "1");
    ok("a=0", "-a", "0");
    ok("a=1", "-a1");
    ok("a=1", "--overfit");
    ok("a=1", "--overfit", "1");
    ok("a=0", "--overfit", "0");
    ok("a=0", "-a", "--overfit=0");
    ok("a=1", "--overfit=1");
    ok("a=0", "-a", "--no-overfit");
    ok("a=1", "--no-overfit", "-a");
    ok("flash=0", "--no-flash");
    ok("a=1 flash=1 v=1", "-a", "-v");
    ok("a=1 flash=0 v=1", "-a", "1", "-v", "--no-flash");
    ok("a=1 flash=1 v=0 lg=5", "-a", "-lg", "5");
    ok("b=1", "-a", "-b", "1");
    ok("v=1", "-v");
    ok("v=1", "-v", "1");
    ok("v=0", "-v", "--no-verbose");
    ok("v=2", "-v", "always"); // a third value
    ok("v=2", "--verbose=always");
    bad("--verbose wants 0, 1 or always, got '2'", "--verbose=2");
    bad("stray argument 'never', see prog --help", "-v", "never");
    bad("stray argument '2', see prog --help", "-a", "2");
    bad("stray argument '1', see prog --help", "-a", "1", "1");
    bad("stray argument '0', see prog --help", "--no-overfit", "0");
    bad("--overfit wants 0 or 1, got 'yes'", "--overfit=yes");
    bad("--overfit wants 0 or 1, got ''", "--overfit=");
    bad("--no-overfit takes no value, got '--no-overfit=1'", "--no-overfit=1");
    bad("--no-overfit takes no value, got '--no-ov=1'", "--no-ov=1");
    bad("unknown flag '-av', see prog --help", "-av");
}

static void test_integers(void) {
    ok("b=1", "-b", "1");
    ok("b=4096", "-b", "4096");
    ok("d=524288", "-d", "524288");
    ok("d=-9223372036854775808", "-d", "-9223372036854775808");
    ok("d=9223372036854775807", "-d", "9223372036854775807");
    ok("lg=2147483647", "-lg", "2147483647");
    ok("b=10", "-b", "010"); // decimal, not octal
    bad("--batch wants 1 to 4096, got '-3'", "--batch", "-3");
    bad("--batch wants 1 to 4096, got '0'", "--batch=0");
    bad("--batch wants 1 to 4096, got '4097'", "-b", "4097");
    bad("--batch wants 1 to 4096, got '4294967297'", "-b", "4294967297"); // would be 1 if cut to 32 bits
    bad("--batch wants 1 to 4096, got '99999999999999999999'", "-b", "99999999999999999999");
    bad("--total-batch wants -9223372036854775808 to 9223372036854775807, got '9223372036854775808'", "-d",
        "9223372036854775808");
    bad("--log-gpu-every wants at least 0, got '2147483648'", "-lg", "2147483648");
    bad("--log-gpu-every wants at least 0, got '-1'", "-lg", "-1");
    ok("lt=-2147483648", "-t", "-2147483648");
    bad("--log-gpu-trace wants -2147483648 to 2147483647, got '2147483648'", "-t",
        "2147483648"); // a flag without a range has that of its type
    const char* junk[] = {"",    " 4",  "4 ",  "4x",  "x", "0x10", "1e3", "4.0", "1_000", "--",
                          "+-4", "nan", "inf", "4,0", "-", "\t4",  "+",   "4\n", "4;",    "1k"};
    for (size_t i = 0; i < sizeof(junk) / sizeof(junk[0]); i++) {
        char text[128], shown[16];
        snprintf(shown, sizeof(shown), "%s", junk[i]);
        for (char* p = shown; *p; p++) { *p = iscntrl((unsigned char)*p) ? '?' : *p; }
        snprintf(text, sizeof(text), "--batch wants a whole number, 1 to 4096, got '%s'", shown);
        bad(text, "--batch", junk[i]);
        snprintf(text, sizeof(text), "--total-batch wants a whole number, got '%s'", shown);
        bad(text, "--total-batch", junk[i]);
    }
}

static void test_floats(void) {
    ok("l=9.99999975e-05", "-l", "1e-4");
    ok("l=1", "-l", "1");
    ok("l=0", "-l", "0");
    ok("l=0.5", "-l", ".5");
    ok("any=-1.5", "--any-rate", "-1.5");
    ok("any=3.40282347e+38", "--any-rate", "3.4028234e38");
    bad("--learning-rate wants 0 to 1, got '1.5'", "-l", "1.5");
    bad("--learning-rate wants 0 to 1, got '-1e-9'", "-l", "-1e-9");
    bad("--any-rate wants a number that a float can hold, got '1e39'", "--any-rate", "1e39");
    bad("--any-rate wants a number that a float can hold, got '1e400'", "--any-rate", "1e400");
    bad("--any-rate 1e-60 is too small for a 32-bit float", "--any-rate", "1e-60");
    bad("--learning-rate 1e-60 is too small for a 32-bit float", "-l", "1e-60");
    bad("--any-rate wants a number that a float can hold, got '1e-400'", "--any-rate", "1e-400");
    const char* junk[] = {"",    " 1",       "1 ", "1x",    "nan", "NaN", "inf", "-inf",  "infinity", "0x1p3",
                          "1,5", "nan(123)", "1e", "1e-4f", ".",   "--1", "e5",  "1.2.3", "-"};
    for (size_t i = 0; i < sizeof(junk) / sizeof(junk[0]); i++) {
        char text[128];
        snprintf(text, sizeof(text), "--any-rate wants a number, got '%s'", junk[i]);
        bad(text, "--any-rate", junk[i]);
        snprintf(text, sizeof(text), "--learning-rate wants a number, 0 to 1, got '%s'", junk[i]);
        bad(text, "--learning-rate", junk[i]);
    }
}

static void test_wrong_flags(void) {
    bad("unknown flag '--bach', did you mean '--batch'? see prog --help", "--bach", "5");
    bad("unknown flag '--total_batch', did you mean '--total-batch'? see prog --help", "--total_batch=5");
    bad("unknown flag '--no-overfitt', did you mean '--no-overfit'? see prog --help", "--no-overfitt");
    bad("unknown flag '--zzz', see prog --help", "--zzz");
    bad("unknown flag '--xxxtch', see prog --help", "--xxxtch"); // distance 3 from --batch: too far for a suggestion
    bad("unknown flag '--a-name-that-is-far-longer-than-any-name-in-the-table', see prog --help",
        "--a-name-that-is-far-longer-than-any-name-in-the-table");
    bad("unknown flag '-z', see prog --help", "-z");
    bad("unknown flag '-z', see prog --help", "-b", "2", "-z", "3");
    bad("unknown flag '--', see prog --help", "--=5");
    bad("unknown flag '-?', see prog --help", "-?");
    bad("unknown flag '-:', see prog --help", "-:");
    bad("unknown flag '--a?b', see prog --help", "--a\nb"); // the message stays one line whatever the user types
    bad("flag '--log-gpu' is ambiguous: --log-gpu-every, --log-gpu-trace", "--log-gpu", "5");
    bad("flag '--log-gpu' is ambiguous: --log-gpu-every, --log-gpu-trace", "--log-gpu=5");
    bad("flag '--no' is ambiguous: --no-overfit, --no-flash, --no-verbose", "--no");
    bad("flag '--batch' wants a value, see prog --help", "--batch");
    bad("flag '--bat' wants a value, see prog --help", "--bat");
    bad("flag '-b' wants a value, see prog --help", "-a", "-b");
    bad("stray argument 'foo', see prog --help", "foo");
    bad("stray argument 'foo', see prog --help", "-b", "2", "foo", "--zzz");
    bad("stray argument '', see prog --help", "");
    bad("stray argument '-', see prog --help", "-");
    bad("stray argument 'x', see prog --help", "--", "x");
    bad("--schedule wants one of cosine|linear|constant|wsd, got 'cos'", "-k", "cos");
    bad("--schedule wants one of cosine|linear|constant|wsd, got ''", "--schedule=");
    bad("--schedule wants one of cosine|linear|constant|wsd, got 'cosine|linear'", "-k", "cosine|linear");
    bad("--help: no topic and no flag '1', see prog --help", "--help=1");
}

// the last value counts, and a list of files that does not is not dropped silently
static void test_twice(void) {
    ok("b=3", "-b", "2", "-b", "3");
    Result r;
    const char* args[] = {"-i", "a", "--train-data=b", NULL};
    run_child(&r, args, false);
    check(r.code == 77 && strstr(r.values, "i=b "));
    check_str(r.err, "note: --train-data is given twice: 'b' is used, 'a' is not\n");
}

static void test_long_arguments(void) {
    char value[8192];
    memset(value, 'x', sizeof(value) - 1);
    value[sizeof(value) - 1] = '\0';
    Result r;
    const char* args[] = {"--batch", value, NULL};
    run_child(&r, args, false);
    check(r.code == 2 && strchr(r.err, '\n') == r.err + strlen(r.err) - 1);
    value[0] = value[1] = '-';
    const char* flag[] = {value, NULL};
    run_child(&r, flag, false);
    check(r.code == 2 && strchr(r.err, '\n') == r.err + strlen(r.err) - 1);
}

// each argument of a list is kept, in order
static void test_lists(void) {
    ok("z=0::", "-b", "7");
    ok("z=1:x:x", "--stop", "x");
    ok("z=3:-b:c", "--stop", "-b", "-y", "x", "--stop=c");
    ok("z=1:x:x", "-yx");
    bad("--stop wants a text, got ''", "--stop", "");
    bad("flag '--stop' wants a value, see prog --help", "--stop");
    const char* many[2 * CLI_LIST_MAX + 3];
    for (int i = 0; i <= CLI_LIST_MAX; i++) { many[2 * i] = "--stop", many[2 * i + 1] = "x"; }
    many[2 * CLI_LIST_MAX + 2] = NULL;
    expect_error(__LINE__, "--stop: more than 64 of them", many);
    many[2 * CLI_LIST_MAX] = NULL;
    expect(__LINE__, "z=64:x:x", many);
}

// a flag with a list of choices, whose last one is meant if there is no argument
static void test_choices(void) {
    static const char* const wrong[] = {"",    "x",  "lo",   "low+", "lower", "mid",        "+",
                                        "+mi", "id", "+low", "LOW",  "1",     "low|low+mid"};
    ok("q=0", "-b", "7");
    ok("q=0", "--parts", "off");
    ok("q=1", "--parts", "low");
    ok("q=2", "--parts", "low+mid");
    ok("q=3", "--parts=low+mid+high");
    ok("q=2", "--parts", "+mid"); // the end of a choice
    ok("q=3", "--parts=+high");
    ok("q=3", "--parts", "+mid+high");
    ok("q=3", "--parts");
    ok("lg=5 lt=0 p=NULL q=3", "--parts", "-lg", "5"); // the next argument is a flag
    ok("q=3", "--parts", "--");
    ok("q=1", "--par", "low");
    ok("q=1", "-q", "low");
    ok("q=1", "-qlow");
    ok("q=2", "-q+mid");
    ok("q=3", "-q", "-b", "7");
    ok("q=2", "-pt", "+mid");
    ok("q=3", "-pt");
    ok("q=1", "--parts", "--parts", "low");
    ok("q=0", "--parts", "--parts=off");
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char text[128];
        snprintf(text, sizeof(text), "--parts wants one of off|low|low+mid|low+mid+high, got '%s'", wrong[i]);
        bad(text, "--parts", wrong[i]);
    }
    bad("--parts wants one of off|low|low+mid|low+mid+high, got ''", "--parts=");
    bad("--parts wants one of off|low|low+mid|low+mid+high, got 'x'", "-qx");
    bad("stray argument '-', see prog --help", "--parts", "-");
    bad("stray argument 'x', see prog --help", "--parts", "low", "x");
    bad("unknown flag '--no-parts', see prog --help", "--no-parts");
    bad("--schedule wants one of cosine|linear|constant|wsd, got '+wsd'", "-k", "+wsd");
}

static void test_help(void) {
    const char* forms[][2] = {{"-h", NULL}, {"--help", NULL}, {"--he", NULL}};
    Result r;
    for (int i = 0; i < 3; i++) {
        run_child(&r, forms[i], false);
        check(r.code == 0 && r.err[0] == '\0');
        check(strstr(r.out, "Trains a small model.\n\nusage: prog [flags]\n\nData:\n") == r.out);
        check(strstr(r.out,
                     "\n  -b, --batch N               sequences in a micro-batch (default 4 sequences; 1 to 4096)\n"));
        check(strstr(r.out, "\n  -lg, --log-gpu-every N      steps between looks at the GPU (default -1 steps)\n"));
        check(strstr(r.out, "tokens in a step. Many; 0: none (default: one micro-batch)\n"));
        check(strstr(r.out, "train on one batch (default off)\n") && strstr(r.out, "on by default (default on)\n"));
        check(strstr(r.out, "\n  -t, -lt, --log-gpu-trace N  "));
        check(strstr(r.out, "highest learning rate (default 0.0003; 0 to 1)\n"));
        check(strstr(r.out, "--schedule cosine|linear|constant|wsd\n"));
        check(strstr(r.out, "text to go on from\n"));
        check(strstr(r.out, "\n  -y, --stop TEXT             ends a text\n"));
        check(strstr(r.out, "\n  -v, --verbose [always] "));
        check(strstr(r.out, "\n  -q, -pt, --parts [off|low|low+mid|low+mid+high]\n"));
        check(strstr(r.out, "what is done (default off)\n"));
        check(strstr(r.out, "\n  -h, --help "));
        for (char* line = r.out; *line;) {
            size_t n = strcspn(line, "\n");
            check_msg(n <= CLI_COLUMNS, "a line of %zu columns: %.*s", n, (int)n, line);
            line += n + (line[n] == '\n');
        }
    }
    const char* topics[][3] = {{"--help", "optim", NULL}, {"--help=OPTIM", NULL, NULL}};
    for (int i = 0; i < 2; i++) {
        run_child(&r, topics[i], false);
        check(r.code == 0 && strncmp(r.out, "Optimization:\n  -l, ", 20) == 0 && !strstr(r.out, "--batch"));
    }
    const char* flags[][3] = {{"--help", "batch", NULL}, {"--help=-b", NULL, NULL}, {"-h", "b", NULL}};
    for (int i = 0; i < 3; i++) {
        run_child(&r, flags[i], false);
        check_str(r.out, "  -b, --batch N               sequences in a micro-batch (default 4 sequences; 1 to 4096)\n");
    }
    bad("--help: no topic and no flag 'batc', see prog --help", "--help", "batc");
    const char* after[] = {"-b", "7", "--help", NULL}; // valid flags before --help are ignored, errors are not
    run_child(&r, after, false);
    check(r.code == 0);
    bad("--batch wants a whole number, 1 to 4096, got 'x'", "-b", "x", "--help");
    ok("p=--help", "--prompt", "--help");
    ok("p=-h", "-p", "-h");
}

// the one screen of a program with many flags, and flags that other programs have
static void test_help_screen(void) {
    const char *screen[] = {"--help", NULL}, *all[] = {"--help", "all", NULL};
    Result r;
    cli_extras = &extras;
    run_child(&r, screen, false);
    check_str(r.out,
              "Trains a small model.\n\n"
              "  -b, --batch N    so many at once\n"
              "  -y, --stop TEXT  ends it\n\n"
              "prog -b 2          # small\n"
              "prog -b 2000 -l 1  # large\n\n"
              "--help TOPIC shows more of: data, optimization, logging, or of a flag. --help all shows all flags.\n");
    run_child(&r, all, false);
    check(strstr(r.out, "--log-gpu-trace") && strstr(r.out, "usage: prog"));
    bad("unknown flag '--lr', did you mean '--learning-rate'? see prog --help learning-rate", "--lr", "3");
    bad("unknown flag '--n_iter', did you mean '--batch'? see prog --help batch", "--n_iter=5");
    bad("unknown flag '--cpu': buy one", "--cpu");
    bad("unknown flag '--zero-copy': other_prog has it, this program does not", "--zero-copy");
    bad("unknown flag '--no-zero-copy': other_prog has it, this program does not", "--no-zero-copy");
    bad("unknown flag '-lz': other_prog has it, this program does not", "-lz", "1");
    bad("unknown flag '-r': other_prog has it, this program does not", "-r", "1");
    bad("unknown flag '-r2': other_prog has it, this program does not", "-r2");
    bad("unknown flag '-rx', see prog --help", "-rx");
    bad("unknown flag '--bach', did you mean '--batch'? see prog --help", "--bach", "5");
    cli_extras = NULL;
}

static void test_version(void) {
    const char* forms[] = {"--version", NULL};
    Result r;
    run_child(&r, forms, false);
    check(r.code == 0 && r.err[0] == '\0');
    check_msg(strncmp(r.out, "prog " LLMC_VERSION " (compiler ", 16 + strlen(LLMC_VERSION)) == 0 &&
                  strchr(r.out, '\n') == r.out + strlen(r.out) - 1,
              "'%s'", r.out);
}

static void test_header(void) {
    const char* args[] = {"-b",         "7",  "-l", "6e-4", "-k",  "wsd", "-a",   "-d", "-1",     "-p",
                          "two\nlines", "-y", "a",  "-y",   "b\n", "-pt", "+mid", "-v", "always", NULL};
    Result r;
    run_child(&r, args, true);
    check(r.code == 77);
    check_str(
        r.out,
        "batch            7 sequences (default 4)\n"
        "learning-rate    0.0006 (default 0.0003)\n"
        "schedule         wsd (default cosine)\n"
        "overfit          1 (default 0)\n"
        "verbose          always (default 0)\n"
        "prompt           two?lines (default none)\n"
        "stop             a, b? (default none)\n"
        "parts            low+mid (default off)\n"
        // total-batch was given, but equals its default
        "defaults: train-data=a.bin total-batch=-1 seed=1337 any-rate=0 flash=1 log-gpu-every=-1\n  log-gpu-trace=0\n");
}

static void test_in_process(void) {
    // parses twice in one process; argv must stay unchanged
    char* argv[] = {(char*)"prog", (char*)"-lg", (char*)"5", (char*)"-i", (char*)"x.bin", NULL};
    for (int i = 0; i < 2; i++) {
        reset_values();
        cli_parse(5, argv, "", options, NUM_OPTIONS);
        check(gpu_every == 5 && data == argv[4]);
        check(cli_typed(&gpu_every) && cli_typed(&data) && !cli_typed(&batch));
        check_str(argv[1], "-lg");
    }
    reset_values();
    cli_parse(0, argv + 5, "", options, NUM_OPTIONS); // argc 0 is legal
    check(batch == 4);
    float values[] = {0.1f, 3e-4f, 1.0f / 3, 16777217.0f, 1e-45f, 3.4028234e38f, -0.0f, 6.25e-5f};
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        char buf[64];
        format_float(buf, sizeof(buf), values[i]);
        check_msg(strtof(buf, NULL) == values[i], "%s", buf);
    }
    check(cli_distance("kitten", "sitting") == 3 && cli_distance("", "abc") == 3 && cli_distance("abc", "abc") == 0);
}

// the arguments beside the flags, in their order
static void test_other_arguments(void) {
    const char* line[] = {"prog", "a", "-b", "2", "", "-a", "1", "b=c", "--", "-b", "--zzz", "--"};
    const char* wanted[] = {"a", "", "b=c", "-b", "--zzz", "--"};
    enum { COUNT = sizeof(line) / sizeof(line[0]), WANTED = sizeof(wanted) / sizeof(wanted[0]) };
    const char* rest[COUNT];
    reset_values();
    int n = cli_parse_arguments(COUNT, (char**)(uintptr_t)line, "", options, NUM_OPTIONS, " FILE ...", rest);
    check(n == WANTED && batch == 2 && overfit == 1);
    for (int i = 0; i < n && i < WANTED; i++) { check_msg(strcmp(rest[i], wanted[i]) == 0, "%s", rest[i]); }
    check(cli_parse_arguments(1, (char**)(uintptr_t)line, "", options, NUM_OPTIONS, " FILE ...", rest) == 0);
}

int main(int argc, char** argv) {
    static const Test tests[] = {
        {"forms", "every way to write a flag and its value", test_forms},
        {"two_letter_flags", "llm.c's -lg, and values that look like flags", test_two_letter_flags},
        {"bools", "-a, -a 0, --x, --x=0, --no-x", test_bools},
        {"integers", "strict whole numbers and their ranges", test_integers},
        {"floats", "strict numbers and their ranges", test_floats},
        {"wrong_flags", "unknown, ambiguous, missing, stray: one line and exit 2", test_wrong_flags},
        {"twice", "a flag that is given twice", test_twice},
        {"long_arguments", "8 KB of argument still give one line", test_long_arguments},
        {"lists", "a flag that may be given several times", test_lists},
        {"choices", "a flag whose argument is one of a list and may be left out", test_choices},
        {"help", "--help: grouped, wrapped, exit 0", test_help},
        {"help_screen", "--help of a program with many flags; what other programs call them", test_help_screen},
        {"version", "--version: one line, exit 0", test_version},
        {"header", "the run header marks what differs from the default", test_header},
        {"other_arguments", "arguments that are no flags, where a program takes them", test_other_arguments},
        {"in_process", "two parses in a row, argc 0, floats as text", test_in_process},
    };
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
