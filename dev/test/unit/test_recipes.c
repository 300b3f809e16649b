// llmc/recipes.h and the files of flags in cli.h: what a recipe sets for which model, that a typed flag wins, how large a
// micro-batch it takes, what a run saves and takes back. The expected values are written by hand.
#include "capture.h"
#include "../../../llmc/flags.h"
#include <sys/wait.h>

static Settings defaults; // the settings before any test

// Parses a command line of words that are separated by spaces. Returns the settings.
static const Settings* parse(const char* line) {
    char* argv[32] = {(char*)"program"};
    int argc = 1;
    for (char* word = strtok(keep_text(line), " "); word; word = strtok(NULL, " ")) { argv[argc++] = word; }
    settings = defaults;
    recipe.name = "", recipe.loaded = false;
    memset(recipe.pending, 0, sizeof(recipe.pending));
    parse_flags(argc, argv, "");
    return &settings;
}
// The same, then applies a recipe.
static const Settings* apply(const char* line, const char* name, double num_params) {
    const Settings* s = parse(line);
    recipe_apply(name, num_params);
    return s;
}

static void check_rates(int line, double num_params, const char* typed, const char* optimizer, double rate,
                        double muon_rate, const char* schedule, double final) {
    const Settings* s = apply(typed, "pretrain", num_params);
    check_msg(strcmp(s->optimizer, optimizer) == 0 && strcmp(s->schedule, schedule) == 0 &&
                  as_typed(s->learning_rate) == rate && as_typed(s->muon_learning_rate) == muon_rate &&
                  as_typed(s->final_fraction) == final,
              "line %d: %s, %s, %g, %g, %g", line, s->optimizer, s->schedule, (double)s->learning_rate,
              (double)s->muon_learning_rate, (double)s->final_fraction);
}

static void test_pretrain(void) {
    check_rates(__LINE__, 124e6, "-x 9", "muon", 1.8e-3, 3.6e-3, "wsd", 0);
    check_rates(__LINE__, 355e6, "-x 9", "adamw", 3e-4, 0, "cosine", 0);
    check_rates(__LINE__, 774e6, "-x 9", "adamw", 2.5e-4, 0, "cosine", 0);
    check_rates(__LINE__, 1558e6, "-x 9", "adamw", 6e-4, 0, "cosine", 0.1);
    check_rates(__LINE__, 1558e6, "--optimizer muon", "muon", 1.8e-3, 3.6e-3, "wsd", 0.1);
    check_rates(__LINE__, 124e6, "--optimizer adamw", "adamw", 6e-4, 0, "cosine", 0);
    // what is typed wins, and Muon's rate follows the one that is typed; also if it is typed as its default
    check_rates(__LINE__, 124e6, "-l 3e-4 -q 1", "muon", 3e-4, 6e-4, "wsd", 1);
    check_rates(__LINE__, 124e6, "-k cosine --muon-learning-rate 0", "muon", 1.8e-3, 0, "cosine", 0);
    check_rates(__LINE__, 774e6, "--learning-rate=0.5", "adamw", 0.5, 0, "cosine", 0);
}

// All that the other recipes set; nothing else differs from the defaults.
static void test_others(void) {
    Settings want = defaults;
    want.recipe = "llmc";
    check(memcmp(apply("", "llmc", 124e6), &want, sizeof(want)) == 0);
    apply("", "finetune", 1558e6);
    check(strcmp(settings.optimizer, "adamw") == 0 && strcmp(settings.schedule, "cosine") == 0 &&
          as_typed(settings.learning_rate) == 1e-4 && settings.final_fraction == 0 && settings.val_every == 20);
    apply("", "overfit", 124e6);
    check(settings.overfit == 1 && settings.num_steps == 100 && settings.val_every == 0 && settings.sample_every == 0 &&
          strcmp(settings.schedule, "constant") == 0);
}

// What waits for the length of the run: 700 steps of warm-up, at most 7%; 20 times the micro-batches of a step.
static void test_settle(void) {
    static const struct {
        const char* typed;
        int64_t steps, parts, warmup;
        int val_steps;
    } cases[] = {
        {"", 19560, 8, 700, 160}, {"", 1526, 1, 106, 20},      {"", 10, 3, 0, 60},
        {"", 0, 1, 0, 20},        {"-u 5 -m 7", 100, 8, 5, 7},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        apply(cases[i].typed, "pretrain", 124e6);
        recipe_settle(cases[i].steps, cases[i].parts);
        recipe_settle(7, 7); // no second time
        check_msg(settings.warmup_steps == cases[i].warmup && settings.val_steps == cases[i].val_steps,
                  "case %zu: %lld, %d", i, (long long)settings.warmup_steps, settings.val_steps);
    }
    settings = defaults, recipe.name = "";
    recipe_settle(1000, 3); // without a recipe
    check(memcmp(&settings, &defaults, sizeof(settings)) == 0);
}

static void write_file(const char* path, const char* text, size_t bytes) {
    FILE* f = fopen(path, "wb");
    require(f && fwrite(text, 1, bytes, f) == bytes && fclose(f) == 0);
}

static void test_batch(void) {
    char shards[300], path[300];
    static char zeros[1 << 20];
    static const struct {
        const char *typed, *recipe;
        int T, num_ranks;
        int64_t total;
        int most, want, smaller;
    } cases[] = {
        // shards of 200,000 and 30,000 tokens: an epoch of 64 steps allows 3593 tokens a step
        {"", "pretrain", 64, 1, 0, 1024, 32, 16},
        {"", "pretrain", 16, 1, 0, 4096, 128, 64},
        {"", "pretrain", 1024, 1, 0, 64, 4, 2}, // llm.c's 4, although that is more
        {"", "pretrain", 1024, 8, 0, 64, 4, 2},
        {"", "pretrain", 64, 1, 0, 4, 4, 2}, // the CPU's
        {"", "finetune", 256, 1, 0, 64, 8, 4},
        // -d: it only has to be divided, if a shard has so many tokens
        {"", "pretrain", 1024, 1, 65536, 64, 64, 32},
        {"", "finetune", 1024, 1, 65536, 64, 64, 32},
        {"", "pretrain", 1024, 2, 65536, 64, 32, 16},
        {"", "pretrain", 1024, 1, 49152, 64, 48, 24},
        {"", "pretrain", 1024, 1, 49152, 4, 4, 3},
        {"", "pretrain", 4096, 1, 4096 * 64, 64, 32, 16}, // 49 fit the longest shard
        {"", "pretrain", 1024, 1, 1000, 64, 1, 1},        // is refused later
        {"-b 7", "pretrain", 64, 1, 0, 1024, 0, 0},
        {"", "llmc", 64, 1, 0, 1024, 0, 0},
        {"", "overfit", 64, 1, 0, 1024, 0, 0},
    };
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/x_train_%d.bin", test_dir(), i);
        write_file(path, zeros, 1024 + 2 * (i == 0 ? 200000 : 30000));
    }
    snprintf(shards, sizeof(shards), "%s/x_train_*.bin", test_dir());
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        RecipeBounds b = {cases[i].T, cases[i].num_ranks, cases[i].total, cases[i].most, shards, false, 0};
        apply(cases[i].typed, cases[i].recipe, 124e6);
        int B = recipe_batch(&b), smaller = B ? recipe_smaller_batch(&b, B) : 0;
        check_msg(B == cases[i].want && smaller == cases[i].smaller, "case %zu: %d, then %d", i, B, smaller);
    }
    RecipeBounds b = {8, 1, 0, 64, "nowhere*", true, 0}; // no data: refused later
    apply("", "pretrain", 124e6);
    check(recipe_batch(&b) == 64 && recipe_smaller_batch(&b, 4) == 2 && recipe_smaller_batch(&b, 2) == 1);
}

// What a run saves is what it takes back, and what is typed then wins.
static void test_saved(void) {
    Error err;
    char config[300], saved[300], line[400];
    snprintf(config, sizeof(config), "%s/config", test_dir());
    snprintf(saved, sizeof(saved), "%s/recipe.txt", test_dir());
    apply("-o log -x 1000 -y 1 --no-shuffle --seed -1 --stop a --stop b", "pretrain", 124e6);
    settings.train_data = " 'a b'*.bin ", settings.val_data = "";
    cli_defaults()->typed[cli_find("train-data")] = cli_defaults()->typed[cli_find("val-data")] = true;
    recipe_settle(1000, 2);
    recipe_set_batch(16);
    Settings first = settings;
    check(recipe_write_flags(config, true, "all", "--seed 7\n", &err) &&
          recipe_write_flags(saved, false, "the recipe's", "", &err));
    // --config: everything but -y; the command line counts before it
    snprintf(line, sizeof(line), "--config %s", config);
    parse(line);
    check_str(settings.train_data, first.train_data);
    check_str(settings.val_data, "");
    check(settings.resume == 0 && settings.num_steps == 1000 && settings.shuffle == 0 && settings.seed == 7);
    check(settings.stops.n == 2 && strcmp(settings.stops.items[1], "b") == 0 && strcmp(settings.output, "log") == 0);
    check(settings.B == 16 && settings.learning_rate == first.learning_rate && settings.warmup_steps == 70);
    snprintf(line, sizeof(line), "-x 5 --stop c --config %s -o other", config);
    parse(line);
    check(settings.num_steps == 5 && strcmp(settings.output, "other") == 0 && settings.stops.n == 1);
    // a resumed run: its own values, and those of the table for what it had typed
    parse("-x 5000 -k linear");
    recipe_apply(recipe_load(saved, NULL), 1558e6);
    recipe_settle(5000, 1);
    check(strcmp(settings.recipe, "pretrain") == 0 && strcmp(settings.optimizer, "muon") == 0 && settings.B == 16);
    check(settings.warmup_steps == 70 && settings.val_steps == 40 && strcmp(settings.schedule, "linear") == 0);
    RecipeBounds b = {64, 1, 0, 64, "nowhere*", false, 0};
    check(recipe_batch(&b) == 16); // not more than it had
    parse("--recipe llmc");        // another one: nothing is taken from the file
    check_str(recipe_load(saved, "llmc"), "llmc");
    check(memcmp(&settings.B, &defaults.B, sizeof(settings.B)) == 0 &&
          settings.learning_rate == defaults.learning_rate);
    parse("--recipe pretrain -x 5000 -k linear"); // the same one
    recipe_apply(recipe_load(saved, "pretrain"), 1558e6);
    recipe_settle(5000, 1);
    check(strcmp(settings.optimizer, "muon") == 0 && settings.B == 16 && settings.warmup_steps == 70);
    capture_begin();
    recipe_print(stdout);
    capture_end();
    check_str(printed,
              "recipe pretrain, resumed: --batch-size 16 --learning-rate 0.0018 --warmup 70 --final-fraction 0\n"
              "  --weight-decay 0.1 --optimizer muon --muon-learning-rate 0.0036 --val-every 250 --val-steps 40\n"
              "  --sample-every 1000 --save-minutes 10 --keep 2\n");
}

// A resumed run saves and keeps as the run was told when it last began, unless it is told otherwise.
static void test_saving(void) {
    Error err;
    char config[300];
    snprintf(config, sizeof(config), "%s/saving", test_dir());
    apply("-o log -n 10 -nk 0 -nm 50 -l 0.1", "pretrain", 124e6);
    check(recipe_write_flags(config, true, "all", "", &err));
    const char* lines[] = {"-o log -y 1", "-o log -y 1 -nk 3"};
    for (int i = 0; i < 2; i++) {
        parse(lines[i]);
        recipe_load_saving(config);
        recipe_apply("pretrain", 124e6);
        check(settings.save_every == 10 && settings.keep == (i == 0 ? 0 : 3) && settings.major_every == 50);
        check(settings.save_minutes == 0 && as_typed(settings.learning_rate) == 1.8e-3);
    }
    parse("-o log -y 1"); // a run that has left no such file
    recipe_load_saving("nowhere");
    recipe_apply("pretrain", 124e6);
    check(settings.save_minutes == 10 && settings.keep == 2);
}

// A file of flags as a user writes it, and its mistakes: each is one line that names the file and the line, and exit code 2.
static void test_config(void) {
    static const struct {
        const char* text;
        const char* error;
    } bad[] = {
        {"\n# x\n--bogus 3\n", ":3: unknown flag '--bogus'"},
        {"-b 4\n-x\n-t 8\n", ":2: flag '-x' wants a value"},
        {"--batch-size 4 5\n", ":1: --batch-size wants a whole number, 1 to 65536, got '4 5'"},
        {"-b 0\n", ":1: --batch-size wants 1 to 65536, got '0'"},
        {"-a x\n", ":1: stray argument 'x'"},
        {"batch-size 4\n", ":1: 'batch-size 4' is no flag"},
        {"-b 4\n--help\n", ":2: --help is for the command line"},
        {"--config x\n", " names another --config"},
    };
    char path[300], line[400], text[1000];
    snprintf(path, sizeof(path), "%s/flags", test_dir());
    static const char good[] =
        "# a comment\r\n\n  -b 64 \t\n--train-data  'a b_*.bin'\n-o=x\n--output=\"two words\"\n--no-shuffle\n"
        "-a\n--schedule=wsd\n--prompt #1\n-nk 3";
    write_file(path, good, sizeof(good) - 1);
    snprintf(line, sizeof(line), "--config %s", path);
    parse(line);
    check(settings.B == 64 && settings.shuffle == 0 && settings.overfit == 1 && settings.keep == 3);
    check_str(settings.train_data, "a b_*.bin");
    check_str(settings.output, "two words");
    check_str(settings.schedule, "wsd");
    check_str(settings.prompt, "#1");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_file(path, bad[i].text, strlen(bad[i].text));
        FILE* err = tmpfile();
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            dup2(fileno(err), STDERR_FILENO);
            parse(line);
            _exit(0);
        }
        int status = 0;
        waitpid(pid, &status, 0);
        rewind(err);
        size_t n = fread(text, 1, sizeof(text) - 1, err);
        text[n] = '\0';
        fclose(err);
        check_msg(WIFEXITED(status) && WEXITSTATUS(status) == 2 && strstr(text, bad[i].error) && strstr(text, path) &&
                      strcspn(text, "\n") + 1 == n,
                  "case %zu, status %d: %s", i, status, text);
    }
}

// The text of --help has each recipe and each flag of the table, which all exist, and is not cut off.
static void test_help(void) {
    parse("");
    for (int i = 0; i < NUM_RECIPE_ROWS; i++) {
        check_msg(cli_find(recipe_rows[i].flag) >= 0 && strstr(recipe_help, recipe_rows[i].flag), "%s",
                  recipe_rows[i].flag);
        check(cli_find_choice(RECIPES, recipe_rows[i].recipe) >= 0);
    }
    check(strstr(recipe_help, "--learning-rate 1.8e-3 with muon, else 6e-4 up to 250M parameters, else 3e-4"));
    check(strstr(recipe_help, "--warmup 700 (at most 7% of the steps)") && strstr(recipe_help, "llmc: the defaults"));
}

int main(int argc, char** argv) {
    static const Test tests[] = {
        {"pretrain", "optimizer, rates and schedule by size; a typed flag wins", test_pretrain},
        {"others", "finetune, overfit; llmc sets nothing", test_others},
        {"settle", "values that depend on the length of the run", test_settle},
        {"batch", "the micro-batch by -d, data and ranks", test_batch},
        {"saved", "what a run saves repeats it, and is kept when it resumes", test_saved},
        {"saving", "a resumed run keeps what it was told to keep", test_saving},
        {"config", "a file of flags, and its mistakes", test_config},
        {"help", "--help says what the table says", test_help},
    };
    defaults = settings;
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
