/*
Fuzzes whole programs: train_gpt2 and the four of dev/data. A run copies a tree of valid files
(seed_tree.h), changes one to four of them (mutate.h) and starts one command that reads them. The command must accept the
files or refuse them with one line. Built like the programs, with AddressSanitizer and UndefinedBehaviorSanitizer.

    make fuzz-program FUZZ_RUNS=10000                                builds and runs it
    build/sanitize/dev/test/fuzz/whole_program --seed 1 --first 123 --runs 1    run 123 of seed 1 again

A finding is:
    an end by a signal, a report of a sanitizer, no end within --timeout seconds, an exit status other than 0, 1 and 2;
    status 1 without exactly one line "error: ..." at the end of stderr, status 2 without a line "PROGRAM: ..." there;
    status 0 with an error line, or with output that our own readers refuse;
    a control character or invalid UTF-8 on stderr;
    a file outside -o that was changed, added or removed; a file that a refused program of dev/data leaves.

A finding's tree, as it was before the command, and a report are kept in OUT/findings/whole_program-SEED/NUMBER.
*/
#include "../../../llmc/cli.h"
#include "../../../llmc/eval_loader.h"
#include "seed_tree.h"
#include <glob.h>
#include <sys/statvfs.h>

// A worker process and what it starts share its memory, which the leak checker would not see.
const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "detect_leaks=0"; }

static struct {
    const char *programs, *seed_programs, *out, *work, *command;
    int64_t runs, first, seed;
    int jobs, timeout_s, keep, verbose, list;
} flags = {"build/sanitize", NULL, "build/fuzz", NULL, NULL, 2000, 0, 1, 0, 120, 20, 0, 0};

// ---- what a run does ------------------------------------------------------------------------

enum { MAX_ARGS = 64, MAX_STEPS = 2, MAX_USED = 8 };

// The commands of one run, and the files that they read.
typedef struct {
    char* argv[MAX_STEPS][MAX_ARGS + 1]; // argv[step][0] is the program below --programs; NULL ends the list
    int num_args[MAX_STEPS], num_steps;
    char used[MAX_USED][64]; // paths; the files at or below them are changed
    int num_used;
    const char* output; // what the commands may write to; "" if nothing
} Plan;

// Appends arguments, which are separated by spaces.
PRINTF_LIKE(2, 3) static void add(Plan* p, const char* fmt, ...) {
    char text[512];
    int step = p->num_steps - 1;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    for (char* word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        require(p->num_args[step] < MAX_ARGS);
        p->argv[step][p->num_args[step]++] = strdup_check(word);
    }
}

static void add_step(Plan* p, const char* program) {
    require(p->num_steps < MAX_STEPS);
    p->num_steps++;
    add(p, "%s", program);
}

// Appends one argument that may contain spaces.
static void add_one(Plan* p, const char* text) {
    int step = p->num_steps - 1;
    require(p->num_args[step] < MAX_ARGS);
    p->argv[step][p->num_args[step]++] = strdup_check(text);
}

static void use(Plan* p, const char* path) {
    require(p->num_used < MAX_USED);
    snprintf(p->used[p->num_used++], sizeof(p->used[0]), "%s", path);
}

static void plan_free(Plan* p) {
    for (int s = 0; s < p->num_steps; s++) {
        for (int i = 0; i < p->num_args[s]; i++) { free(p->argv[s][i]); }
    }
}

static const char* const vocabularies[] = {"vocab/pair",    "vocab/pair/vocab.json",      "vocab/json/tokenizer.json",
                                           "vocab/merges",  "vocab/merges/merges.txt",    "vocab/added",
                                           "vocab/encoder", "vocab/encoder/encoder.json", "llmc/gpt2_tokenizer.bin",
                                           "data",          "run/step_00000002"};

// Appends -e with one of the models.
static void add_model(Mutator* m, Plan* p) {
    static const char* const models[] = {"run",
                                         "run",
                                         "run/step_00000002",
                                         "hf",
                                         "hf",
                                         "hf_bf16",
                                         "hf/model.safetensors",
                                         "hf_shards",
                                         "hf_shards",
                                         "hf_bf16_shards",
                                         "llmc/model3.bin",
                                         "llmc/model5.bin"};
    const char* model = PICK(m, models);
    add(p, "-e %s", model);
    use(p, strcmp(model, "run") == 0 && chance(m, 70) ? "run/step_00000003" : model);
    if (strncmp(model, "llmc", 4) == 0) { use(p, "llmc/gpt2_tokenizer.bin"); }
}

// Shape and settings of training, the same for a run and its resumption.
typedef struct {
    int B, T;
    const char* settings;
} Shape;

// like_run: as the run in run/ was trained, mostly, so that it can be resumed.
static Shape draw_shape(Mutator* m, bool like_run) {
    static const char* const settings[] = {"",
                                           "",
                                           "",
                                           "--naive",
                                           "-a",
                                           "-k wsd -u 1",
                                           "-c 0.1 -l 1e-2",
                                           "--no-shuffle",
                                           "-sl 2 -sg 2",
                                           "--max-nonfinite 2",
                                           "-q 0 -k linear",
                                           "--seed 7"};
    static const int rows[] = {1, 2, 2, 3}, lengths[] = {1, 7, 8, 8, 8, 16, 32};
    Shape shape = {PICK(m, rows), PICK(m, lengths), PICK(m, settings)};
    if (like_run && chance(m, 85)) {
        shape.T = 8;
        shape.settings = "";
    }
    return shape;
}

// Appends data, batch and settings of a training run that ends after step `steps`.
static void add_training(Mutator* m, Plan* p, const Shape* shape, int steps) {
    int B = shape->B, T = shape->T;
    add(p, "-i data/x_train_*.bin -b %d -t %d -x %d -s %d -g 4 %s", B, T, steps, (int)below(m, 2), shape->settings);
    use(p, "data");
    if (chance(m, 50)) { add(p, "-j data/x_val_*.bin -v 1 -m 2"); }
    if (chance(m, 20)) { add(p, "-d %d", 2 * B * T); }
    if (chance(m, 10)) { add(p, "--tokenizer %s", PICK(m, vocabularies)); }
}

static void add_start(Mutator* m, Plan* p) {
    if (chance(m, 80)) {
        add_model(m, p);
    } else {
        add(p, "-e d6 --layers 1 --heads 1 --channels 8 --positions 32");
    }
}

static void plan_train(Mutator* m, Plan* p) {
    Shape shape = draw_shape(m, false);
    add_step(p, "train_gpt2");
    add_start(m, p);
    add_training(m, p, &shape, 2 + (int)below(m, 2));
}

static void plan_train_resume(Mutator* m, Plan* p) {
    Shape shape = draw_shape(m, false);
    add_step(p, "train_gpt2");
    add_start(m, p);
    add_training(m, p, &shape, 2);
    add(p, "-o out -n 1 -nk %d", (int)below(m, 3));
    add_step(p, "train_gpt2");
    add_training(m, p, &shape, 4);
    add(p, "-o out -y 1");
    p->output = "out";
}

static void plan_resume(Mutator* m, Plan* p) {
    Shape shape = draw_shape(m, true);
    add_step(p, "train_gpt2");
    add_training(m, p, &shape, chance(m, 90) ? 5 : 200); // 200: past the end of an epoch
    add(p, "-o run -y 1 -nk %d", (int)below(m, 3));
    use(p, "run/step_00000003");
    use(p, "run/step_00000003");
    use(p, "run/step_00000003/state.json");
    use(p, "run");
    p->output = "run";
}

static void plan_sample(Mutator* m, Plan* p) {
    static const char* const prompts[] = {
        "", "", "The text", "\xff\xfe\x1b[2J caf\xc3\xa9", "a b c d e f g h i j k l m n o p q r", "<|endoftext|>"};
    static const char* const samplers[] = {"",
                                           "--temperature 0",
                                           "--top-k 1",
                                           "--top-k 5 --temperature 0.7",
                                           "--top-p 0.5",
                                           "--no-stop-at-eot",
                                           "--min-p 0.3 --stop e --stop \xa9",
                                           "--repetition-penalty 1.7 --num-samples 3",
                                           "--min-p 1 --repetition-penalty 0.01"};
    add_step(p, "train_gpt2");
    add_model(m, p);
    add(p, "--num-tokens %d %s --prompt", 1 + (int)below(m, 40), PICK(m, samplers));
    add_one(p, PICK(m, prompts));
    if (chance(m, 25)) {
        const char* vocabulary = PICK(m, vocabularies);
        add(p, "--tokenizer %s", vocabulary);
        use(p, vocabulary);
    }
}

static void add_vocabulary(Mutator* m, Plan* p) {
    const char* vocabulary = PICK(m, vocabularies);
    if (chance(m, 10)) { return; } // the 256 bytes
    add(p, "-t %s", vocabulary);
    use(p, vocabulary);
    if (ends_with(vocabulary, "vocab.json")) { use(p, "vocab/pair"); }
    if (ends_with(vocabulary, "encoder.json")) { use(p, "vocab/encoder"); }
}

static void plan_tokenize(Mutator* m, Plan* p) {
    static const char* const inputs[] = {"text/a.txt",   "text/a.txt", "text/b.jsonl",
                                         "text/b.jsonl", "text/*.txt", "text/a.txt,text/b.jsonl"};
    static const char* const documents[] = {"auto", "auto", "file", "line", "blank-line", "jsonl"};
    static const int chunks[] = {16, 300, 1 << 20};
    const char* input = PICK(m, inputs);
    add_step(p, "dev/data/tokenize");
    add(p, "-i %s -d %s -s %d -v %d -n %d --chunk-bytes %d -o out/x", input, PICK(m, documents),
        50 << 2 * (int)below(m, 5), 10 * (int)below(m, 2), 1 + (int)below(m, 2), PICK(m, chunks));
    if (chance(m, 30)) { add(p, "--skip-bad-lines"); }
    use(p, strchr(input, '*') || strchr(input, ',') ? "text" : input);
    add_vocabulary(m, p);
    p->output = "out";
}

static void plan_questions(Mutator* m, Plan* p) {
    static const char* const programs[] = {"hellaswag", "hellaswag", "lambada", "arc", "arc"};
    static const char* const inputs[] = {"text/questions.jsonl", "text/questions.txt", "text/words.jsonl",
                                         "text/arc_ai2.jsonl", "text/arc_hf.jsonl"};
    size_t i = below(m, sizeof(inputs) / sizeof(inputs[0]));
    char program[64];
    snprintf(program, sizeof(program), "dev/data/%s", programs[i]);
    add_step(p, program);
    add(p, "-i %s -o out/h.bin", inputs[i]);
    use(p, inputs[i]);
    add_vocabulary(m, p);
    p->output = "out";
}

static void plan_evaluate(Mutator* m, Plan* p) {
    static const char* const inputs[] = {"data/x_val_*.bin", "data/x_train_*.bin", "text/a.txt",
                                         "eval/h.bin",       "eval/words.bin",     "eval/arc.bin"};
    add_step(p, "train_gpt2");
    add_model(m, p);
    add(p, "-b %d -t %d", 1 + (int)below(m, 5), (int)below(m, 3) * 16);
    if (chance(m, 30)) {
        add(p, "--hellaswag eval/h.bin");
        use(p, "eval/h.bin");
    } else {
        const char* input = PICK(m, inputs);
        add(p, "--eval %s%s", input, chance(m, 20) ? ",eval/arc.bin" : "");
        use(p, input[0] == 'd' ? "data" : input);
    }
    if (chance(m, 30)) { add(p, "--stride %d", 1 + (int)below(m, 16)); }
    if (chance(m, 30)) { add(p, "--json"); }
}

static void plan_export(Mutator* m, Plan* p) {
    static const char* const outputs[] = {"out", "out.bin", "out.safetensors", "out.gguf"};
    static const char* const types[] = {"f32", "bf16", "f16", "q8_0"}; // the last two are for .gguf
    const char* output = PICK(m, outputs);
    size_t num_types = strcmp(output, "out.gguf") == 0 ? 4 : 2;
    add_step(p, "train_gpt2");
    add_model(m, p);
    add(p, "--export %s --type %s", output, types[below(m, num_types)]);
    p->output = output;
}

static const struct {
    const char* name;
    void (*plan)(Mutator* m, Plan* p);
    int weight; // how often it is chosen
    const char* what;
} commands[] = {
    {"train", plan_train, 14, "train_gpt2 -e MODEL -i SHARDS, two or three steps"},
    {"train, resume", plan_train_resume, 10, "the same with -o, then -y 1, often with changes of the files between"},
    {"resume", plan_resume, 24, "train_gpt2 -y 1 -o RUN"},
    {"sample", plan_sample, 24, "train_gpt2 -e MODEL --prompt TEXT"},
    {"tokenize", plan_tokenize, 16, "dev/data/tokenize -i TEXT -t VOCABULARY"},
    {"questions", plan_questions, 9, "dev/data/hellaswag, lambada or arc -i QUESTIONS -t VOCABULARY"},
    {"evaluate", plan_evaluate, 14, "train_gpt2 -e MODEL --eval FILES or --hellaswag QUESTIONS"},
    {"export", plan_export, 6, "train_gpt2 -e MODEL --export PATH"},
};
enum { NUM_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static int choose_command(Mutator* m) {
    int total = 0, c = 0;
    for (int i = 0; i < NUM_COMMANDS; i++) { total += commands[i].weight; }
    int ticket = (int)below(m, (size_t)total);
    for (; ticket >= commands[c].weight; c++) { ticket -= commands[c].weight; }
    for (int i = 0; flags.command && i < NUM_COMMANDS; i++) {
        if (strcmp(flags.command, commands[i].name) == 0) { c = i; }
    }
    return c;
}

// ---- changing a tree ----------------------------------------------------------------------------

// Renames a file to a name with characters that command a terminal. A pattern that matched it still does.
static void rename_oddly(Mutator* m, const char* path) {
    char to[TREE_PATH];
    const char* dot = strrchr(path, '.');
    if (!dot || dot < strrchr(path, '/')) { return; }
    join_path(to, "%.*s\x1b[31m\xc2\x9b\n%s", (int)(dot - path), path, dot);
    if (rename(path, to) != 0) { die("%s: cannot rename: %s", path, strerror(errno)); }
    note(m, "renamed to %s", strrchr(to, '/') + 1);
}

// Changes a digit in the path, the last one or, for a checkpoint, that of its step, and copies the file or renames the directory
// to that, unless it exists.
static void number_anew(Mutator* m, const char* path) {
    char to[TREE_PATH], from[TREE_PATH];
    const char *step = strstr(path, "/step_"), *slash = step ? strchr(step + 1, '/') : NULL;
    bool directory = slash && chance(m, 50);
    size_t at = directory ? (size_t)(slash - path) : strlen(path);
    join_path(from, "%.*s", (int)at, path);
    join_path(to, "%s", from);
    while (at > 0 && !strchr("0123456789", to[at - 1]) && to[at - 1] != '/') { at--; }
    if (at == 0 || to[at - 1] == '/') { return; }
    to[at - 1] = (char)('0' + below(m, 10));
    if (file_exists(to)) { return; }
    if (directory && rename(from, to) != 0) { die("%s: cannot rename: %s", from, strerror(errno)); }
    if (!directory) { copy_file(from, to); }
    note(m, "%s to %s", directory ? "renamed" : "copied", strrchr(to, '/') + 1);
}

// Changes `count` plain files of the tree at `top`, mostly ones that the plan uses. Usually fixes the checksums of
// checkpoints.
static void change_tree(Mutator* m, const Plan* p, const char* top, int count) {
    char path[TREE_PATH];
    for (int i = 0; i < count; i++) {
        TreeList list = tree_list(top, false);
        size_t num = 0;
        const char* used = chance(m, 95) ? p->used[below(m, (size_t)p->num_used)] : "";
        for (size_t k = 0; k < list.count; k++) { // only files that are wanted stay in the list
            const TreeFile* f = &list.items[k];
            if (f->type == S_IFREG && (!used[0] || is_below(f->path, used)) && !strstr(f->path, "/events.")) {
                list.items[num++] = *f;
            }
        }
        if (num > 0) {
            const TreeFile* f = &list.items[below(m, num)];
            join_path(path, "%s/%s", top, f->path);
            note(m, "%s:", f->path);
            size_t kind = below(m, 100);
            Bytes b;
            if (kind < 3) {
                mutate_file(m, path);
            } else if (kind < 5) {
                rename_oddly(m, path);
            } else if (kind < 8) {
                number_anew(m, path);
            } else if (bytes_read(&b, path, NULL)) {
                for (int again = 0; again == 0 || (again < 4 && chance(m, 15)); again++) {
                    mutate_contents(m, path, &b);
                }
                bytes_write(&b, path);
                bytes_free(&b);
            }
        }
        tree_free(&list);
    }
    bool mend = chance(m, 85), files_too = chance(m, 85);
    TreeList list = tree_list(top, false);
    for (size_t k = 0; mend && k < list.count; k++) {
        join_path(path, "%s/%s", top, list.items[k].path);
        if (list.items[k].type == S_IFDIR && strstr(path, "/step_")) { mend_checksums(path, files_too); }
    }
    tree_free(&list);
    if (!mend) { note(m, "checksums of checkpoints are not mended"); }
}

// ---- judging what a command did ---------------------------------------------------------------------

typedef enum { ACCEPTED, REFUSED, FINDING, NUM_OUTCOMES } Outcome;
static const char* const outcome_names[NUM_OUTCOMES] = {"accepted", "refused", "FINDING"};

// Returns the line of text with `part` in it, shortened, in a static buffer; NULL if there is none.
static const char* line_with(const char* text, const char* part) {
    static char line[400];
    const char *found = strstr(text, part), *begin = found;
    if (!found) { return NULL; }
    while (begin > text && begin[-1] != '\n') { begin--; }
    snprintf(line, sizeof(line), "%.*s", (int)strcspn(begin, "\n"), begin);
    return line;
}

// Returns the last line of text, which its newline may end.
static const char* last_line(const char* text, size_t n) {
    size_t at = n > 0 && text[n - 1] == '\n' ? n - 1 : n;
    while (at > 0 && text[at - 1] != '\n') { at--; }
    return text + at;
}

static bool finding(char* why, const char* reason, const char* detail) { // why: (1024)
    snprintf(why, 1024, "%s%s%s", reason, detail ? ": " : "", detail ? detail : "");
    return false;
}

// True if everything on stderr is UTF-8 without control characters.
static bool check_characters(const Child* child, char* why) {
    for (size_t i = 0, n = child->err.size, bad; i < n;) {
        const uint8_t* s = child->err.data + i;
        size_t length = utf8_length(s, n - i, &bad);
        char text[32];
        snprintf(text, sizeof(text), "byte 0x%02x at %zu", s[0], i);
        if (length == 0) { return finding(why, "invalid UTF-8 on stderr", text); }
        if (utf8_is_control(s, length)) { return finding(why, "a control character on stderr", text); }
        i += length;
    }
    return true;
}

// Compares what a program with name argv0 printed on stderr with its exit status. Returns false and the reason if they are
// not as they should be.
static bool check_messages(const Child* child, const char* argv0, char* why) {
    const char *err = (const char*)child->err.data, *last = last_line(err, child->err.size);
    int status = WEXITSTATUS(child->status), errors = 0;
    for (const char* line = err; line[0]; line += strcspn(line, "\n"), line += line[0] == '\n') {
        errors += strncmp(line, "error: ", 7) == 0;
    }
    if (child->err.size > 0 && err[child->err.size - 1] != '\n') {
        return finding(why, "stderr ends within a line", last);
    }
    if (status == 0 && errors > 0) { return finding(why, "status 0 with an error", line_with(err, "error: ")); }
    if (status == 1 && (errors != 1 || strncmp(last, "error: ", 7) != 0)) {
        return finding(why, "status 1 without exactly one line 'error: ...' at the end of stderr", last);
    }
    size_t n = strlen(argv0);
    if (status == 2 && (errors > 0 || strncmp(last, argv0, n) != 0 || strncmp(last + n, ": ", 2) != 0)) {
        return finding(why, "status 2 without a line 'PROGRAM: ...' at the end of stderr", last);
    }
    return true;
}

// Judges the end of a child process. why: (1024), the reason of a finding.
static Outcome judge(const Child* child, const char* argv0, char* why) {
    // the summary names the place, but a report may have none
    static const char* const reports[] = {"SUMMARY: ",       "ERROR: AddressSanitizer",    "ERROR: LeakSanitizer",
                                          "runtime error: ", "UndefinedBehaviorSanitizer", "AddressSanitizer:",
                                          "hard rss limit"};
    char text[64];
    for (size_t i = 0; i < sizeof(reports) / sizeof(reports[0]); i++) {
        const char* line = line_with((const char*)child->err.data, reports[i]);
        if (line) { return finding(why, "a sanitizer's report", line), FINDING; }
    }
    if (WIFSIGNALED(child->status)) {
        int number = WTERMSIG(child->status);
        snprintf(text, sizeof(text), "%d s", flags.timeout_s);
        if (number == SIGALRM) { return finding(why, "no end within", text), FINDING; }
        return finding(why, "ended by a signal", strsignal(number)), FINDING;
    }
    snprintf(text, sizeof(text), "%d", WEXITSTATUS(child->status));
    if (WEXITSTATUS(child->status) > 2) { return finding(why, "exit status", text), FINDING; }
    if (!check_characters(child, why) || !check_messages(child, argv0, why)) { return FINDING; }
    return WEXITSTATUS(child->status) == 0 ? ACCEPTED : REFUSED;
}

// ---- reading again what a command wrote, in a child process --------------------------------------------

// T: tokens per row.
static void read_eval(const char* path, int T, int vocab_size) {
    enum { B = 8 };
    EvalLoader e;
    Error err;
    if (!eval_open(&e, path, B, T, vocab_size, &err)) { die("%s", err.text); }
    eval_fit(&e);
    size_t n = (size_t)e.B * (size_t)e.T;
    int *inputs = (int*)malloc_check(n * sizeof(int)), *targets = (int*)malloc_check(n * sizeof(int));
    float* losses = (float*)calloc_check(n, sizeof(float));
    while (eval_next(&e, inputs, targets, &err)) {
        for (size_t i = 0; i < n; i++) { losses[i] = (float)targets[i]; }
        eval_score(&e, losses);
    }
    if (err.text[0]) { die("%s", err.text); }
    require(e.num_scored == e.num_examples);
    free(inputs);
    free(targets);
    free(losses);
    eval_close(&e);
}

static void reread_shards(void) {
    Tokenizer tokenizer;
    MappedFile file;
    Error err;
    glob_t found;
    size_t tokens;
    if (!tokenizer_load(&tokenizer, "out", &err)) { die("%s", err.text); }
    if (glob("out/x_*.bin", 0, NULL, &found) != 0) { die("out: no shards"); }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char* path = found.gl_pathv[i];
        if (!map_file(&file, path, &err) ||
            !shard_parse(file.data, file.size, path, tokenizer.vocab_size, &tokens, &err)) {
            die("%s", err.text);
        }
        unmap_file(&file);
    }
    globfree(&found);
    tokenizer_free(&tokenizer);
}

// data: the Plan. Ends the process with a message if the output of its commands cannot be read.
static void reread(void* data) {
    const Plan* p = (const Plan*)data;
    Path path;
    Error err;
    ModelFile model;
    if (strcmp(p->argv[0][0], "dev/data/tokenize") == 0) {
        reread_shards();
    } else if (strncmp(p->argv[0][0], "dev/data/", 9) == 0) {
        read_eval("out/h.bin", 32768, 65535);        // no example is longer
    } else if (strcmp(p->output, "out.gguf") == 0) { // nothing here reads it
        if (!file_exists(p->output)) { die("%s is not there", p->output); }
    } else if (strncmp(p->output, "out", 3) == 0 && !run_has_checkpoints(p->output)) { // --export
        if (!model_open(&model, p->output, &err)) { die("%s", err.text); }
        model_close(&model);
    } else if (!run_find_newest(p->output, &path, false, &err)) {
        die("%s", err.text);
    }
}

// ---- a run --------------------------------------------------------------------------------------------

// Shared by all worker processes.
typedef struct {
    int64_t done, kept; // runs; findings whose trees were kept
    int64_t outcomes[NUM_COMMANDS][NUM_OUTCOMES];
    uint64_t messages[NUM_COMMANDS][4096];  // hashes of distinct messages, an open hash table; 0 is free
    int64_t num_messages[NUM_COMMANDS + 1]; // the last: of all commands
    uint64_t all_messages[4096];
} Shared;

static Shared* shared;
static char seed_top[TREE_PATH], programs_top[TREE_PATH], findings_top[TREE_PATH], messages_path[TREE_PATH];

// Adds a hash to a set. Returns false if it is there already, or if the set is full.
static bool insert(uint64_t* set, int64_t* count, uint64_t hash) {
    enum { SLOTS = 4096 };
    for (size_t i = 0; i < SLOTS; i++) {
        uint64_t expected = 0, *slot = &set[(hash + i) % SLOTS];
        if (__atomic_compare_exchange_n(slot, &expected, hash, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
            return true;
        }
        if (expected == hash) { return false; }
    }
    return false;
}

// Copies a message without what depends on the file: quoted text becomes "", and a word with a digit, a slash, a point inside
// or a byte above 127 becomes #. out has at least n + 1 bytes.
static void strip_message(char* out, const char* line, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        char quote = line[i];
        bool quoted = (quote == '"' || quote == '\'') && (i == 0 || line[i - 1] == ' ' || line[i - 1] == '(');
        const char* close = quoted ? (const char*)memchr(line + i + 1, quote, n - i - 1) : NULL;
        size_t length = close ? (size_t)(close - (line + i)) + 1 : 0;
        while (!close && i + length < n && line[i + length] != ' ') { length++; }
        bool name = false;
        for (size_t k = i; k < i + length; k++) {
            name = name || strchr("0123456789/\\_", line[k]) || (uint8_t)line[k] > 127 ||
                   (line[k] == '.' && k + 1 < i + length);
        }
        if (close || name) {
            out[used++] = '#';
        } else {
            memcpy(out + used, line + i, length);
            used += length;
        }
        i += length;
        while (i < n && line[i] == ' ') { i++; }
        if (i < n) { out[used++] = ' '; }
    }
    out[used] = '\0';
}

// Counts the messages of a command that names what is wrong with the files.
static void count_messages(int command, const Child* child) {
    const char* err = (const char*)child->err.data;
    char out[4096];
    for (size_t n; *err; err += n, err += *err == '\n') {
        n = strcspn(err, "\n");
        if (strncmp(err, "error: ", 7) != 0 && strncmp(err, "passed over", 11) != 0 && strncmp(err, "note: ", 6) != 0) {
            continue;
        }
        strip_message(out, err, n < 2000 ? n : 2000);
        uint64_t hash = 14695981039346656037u; // FNV-1a
        for (const char* c = out; *c; c++) { hash = (hash ^ (uint8_t)*c) * 1099511628211u; }
        hash += hash == 0;
        insert(shared->messages[command], &shared->num_messages[command], hash);
        if (!insert(shared->all_messages, &shared->num_messages[NUM_COMMANDS], hash)) { continue; }
        FILE* f = fopen(messages_path, "a");
        if (f) {
            fprintf(f, "%.*s\n", (int)(n < 2000 ? n : 2000), err);
            fclose(f);
        }
    }
}

// The state of a worker process during one run.
typedef struct {
    char top[TREE_PATH], tree[TREE_PATH]; // the worker's directory, and the tree in it
    int64_t number;
    int command;
    Plan plan;
    Mutator mutator;
    char notes[MUTATE_NOTES], why[1024], program[TREE_PATH];
} Run;

// Copies the seed tree, plans the run and makes the first changes. The same number gives the same tree.
static void run_prepare(Run* r, const char* tree) {
    Mutator mutator = {splitmix64(splitmix64((uint64_t)flags.seed) + (uint64_t)r->number), r->notes, 0};
    r->mutator = mutator;
    r->notes[0] = '\0';
    tree_copy(seed_top, tree);
    memset(&r->plan, 0, sizeof(r->plan));
    r->plan.output = "";
    r->command = choose_command(&r->mutator);
    commands[r->command].plan(&r->mutator, &r->plan);
    static const int counts[] = {1, 1, 1, 1, 2, 2, 3, 4};
    change_tree(&r->mutator, &r->plan, tree, PICK(&r->mutator, counts));
}

// Runs a step of the plan, or, if step is -1, reads again what the steps wrote.
static Outcome run_step(Run* r, int step) {
    char out[TREE_PATH], err[TREE_PATH];
    char *argv[MAX_ARGS + 1] = {r->program}, name[] = "whole_program";
    bool own = step < 0;
    join_path(out, "%s/out", r->top);
    join_path(err, "%s/err", r->top);
    TreeList before = tree_list(r->tree, true);
    if (!own) {
        join_path(r->program, "%s/%s", programs_top, r->plan.argv[step][0]);
        for (int i = 1; i < r->plan.num_args[step]; i++) { argv[i] = r->plan.argv[step][i]; }
    }
    setenv("OMP_NUM_THREADS", chance(&r->mutator, 15) ? "2" : "1", 1);
    Child child = run_child(own ? NULL : argv, reread, &r->plan, r->tree, out, err, flags.timeout_s);
    Outcome outcome = judge(&child, own ? name : r->program, r->why);
    TreeList after = tree_list(r->tree, true);
    const char* changed = tree_difference(&before, &after, r->plan.output);
    if (outcome != FINDING && changed) {
        finding(r->why, "a file outside of -o was changed, added or removed", changed);
        outcome = FINDING;
    }
    for (size_t i = 0;
         outcome == REFUSED && !own && strncmp(r->plan.argv[step][0], "dev/data/", 9) == 0 && i < after.count; i++) {
        if (!is_below(after.items[i].path, r->plan.output) || after.items[i].type == S_IFDIR) { continue; }
        finding(r->why, "files were refused, but this was left", after.items[i].path);
        outcome = FINDING;
    }
    if (step < 0 && outcome == REFUSED) {
        finding(r->why, "what the command wrote cannot be read",
                last_line((const char*)child.err.data, child.err.size));
        outcome = FINDING;
    }
    if (outcome == REFUSED || outcome == ACCEPTED) { count_messages(r->command, &child); }
    tree_free(&before);
    tree_free(&after);
    bytes_free(&child.err);
    return outcome;
}

static Outcome run_steps(Run* r) {
    Outcome outcome = ACCEPTED;
    for (int step = 0; step < r->plan.num_steps && outcome == ACCEPTED; step++) {
        if (step > 0 && chance(&r->mutator, 60)) {
            use(&r->plan, "out");
            use(&r->plan, "out");
            note(&r->mutator, "between the commands:");
            change_tree(&r->mutator, &r->plan, r->tree, 1 + (int)below(&r->mutator, 2));
        }
        outcome = run_step(r, step);
    }
    bool wrote = r->plan.output[0] && outcome == ACCEPTED;
    return wrote ? run_step(r, -1) : outcome;
}

static void print_quoted(FILE* f, const char* s) {
    fputs(" '", f);
    for (; *s; s++) { fputs(*s == '\'' ? "'\\''" : (char[2]){*s, '\0'}, f); }
    fputc('\'', f);
}

// Keeps the tree as it was before the first command, what the last command printed, and how to repeat it.
static void keep_finding(Run* r) {
    char dir[TREE_PATH], path[TREE_PATH], from[TREE_PATH];
    join_path(dir, "%s/%lld", findings_top, (long long)r->number);
    tree_remove(dir);
    tree_make(dir);
    for (int i = 0; i < 2; i++) {
        join_path(from, "%s/%s", r->top, i ? "err" : "out");
        join_path(path, "%s/%s", dir, i ? "stderr" : "stdout");
        copy_file(from, path);
    }
    join_path(path, "%s/report", dir);
    FILE* f = fopen(path, "w");
    if (!f) { die("%s: cannot create: %s", path, strerror(errno)); }
    fprintf(f, "seed %lld, run %lld: %s\n%s\n\nchanges:\n%s\ncommands, in tree/:\n", (long long)flags.seed,
            (long long)r->number, commands[r->command].name, r->why, r->notes);
    for (int step = 0; step < r->plan.num_steps; step++) {
        fprintf(f, " %s/%s", programs_top, r->plan.argv[step][0]);
        for (int i = 1; i < r->plan.num_args[step]; i++) { print_quoted(f, r->plan.argv[step][i]); }
        fputc('\n', f);
    }
    fclose(f);
    join_path(path, "%s/tree", dir);
    Run again = *r; // run_prepare() changes it
    again.mutator.notes = again.notes;
    run_prepare(&again, path);
    plan_free(&again.plan);
}

static void print_finding(const Run* r, bool kept) {
    print_line(stdout, "FINDING in run %lld (%s): %s", (long long)r->number, commands[r->command].name, r->why);
    if (!kept) { return; }
    print_line(stdout, "    kept in %s/%lld; again: whole_program --seed %lld --first %lld --runs 1%s%s%s",
               findings_top, (long long)r->number, (long long)flags.seed, (long long)r->number,
               flags.command ? " --command '" : "", flags.command ? flags.command : "", flags.command ? "'" : "");
}

static void do_run(Run* r, int64_t number) {
    r->number = number;
    r->why[0] = '\0';
    tree_remove(r->tree);
    run_prepare(r, r->tree);
    Outcome outcome = run_steps(r);
    __atomic_fetch_add(&shared->outcomes[r->command][outcome], 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&shared->done, 1, __ATOMIC_RELAXED);
    if (flags.verbose) {
        for (char* c = r->notes; *c; c++) { *c = *c == '\n' ? ';' : *c; }
        print_line(stdout, "%lld %s: %s %s| %s", (long long)number, commands[r->command].name, outcome_names[outcome],
                   r->why, r->notes);
    }
    if (outcome == FINDING) {
        bool keep = __atomic_fetch_add(&shared->kept, 1, __ATOMIC_RELAXED) < flags.keep;
        if (keep) { keep_finding(r); }
        print_finding(r, keep);
    }
    plan_free(&r->plan);
}

// ---- all runs --------------------------------------------------------------------------------------------

// Worker j of n does the runs first + j, first + j + n, ...
static void work(const char* top, int j) {
    static Run run;
    char home[TREE_PATH];
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    join_path(run.top, "%s/%d", top, j);
    join_path(run.tree, "%s/tree", run.top);
    join_path(home, "%s/tmp", run.top);
    tree_make(home);
    setenv("TMPDIR", home, 1); // where a run that cannot save to -o leaves its weights
    setenv("HOME", home, 1);
    for (int64_t i = j; i < flags.runs; i += flags.jobs) { do_run(&run, flags.first + i); }
}

static void set_environment(void) {
    const char *asan = getenv("ASAN_OPTIONS"), *ubsan = getenv("UBSAN_OPTIONS");
    char text[1024];
    // a gigabyte is more than any of these files needs; without the limit an endless loop would fill the machine
    snprintf(text, sizeof(text),
             "exitcode=99:allocator_may_return_null=1:max_allocation_size_mb=1024:hard_rss_limit_mb=1536:"
             "quarantine_size_mb=16:detect_stack_use_after_return=1:%.500s",
             asan ? asan : "");
    setenv("ASAN_OPTIONS", text, 1);
    snprintf(text, sizeof(text), "print_stacktrace=1:%.500s", ubsan ? ubsan : "");
    setenv("UBSAN_OPTIONS", text, 1);
    setenv("OMP_WAIT_POLICY", "passive", 1); // also keeps train_gpt2 from starting itself again
    setenv("LLMC_SAVE_SECONDS", "0.1", 1);
    unsetenv("LLMC_KILLS");
}

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

static void print_progress(double start_ms, bool last) {
    static double last_ms;
    bool tty = isatty(STDERR_FILENO);
    double now = time_ms(), seconds = (now - start_ms) / 1e3;
    if (last_ms == 0) { last_ms = start_ms; }
    if (!last && now - last_ms < (tty ? 200 : 30000)) { return; }
    last_ms = now;
    if (last) {
        if (tty) { fprintf(stderr, "\r%-78s\r", ""); }
        return;
    }
    char line[80];
    int64_t done = __atomic_load_n(&shared->done, __ATOMIC_RELAXED);
    double rate = (double)done / seconds;
    int eta = rate > 0 ? (int)((double)(flags.runs - done) / rate + 0.5) : 0;
    snprintf(line, sizeof(line), "%lld of %lld runs, %lld findings  %.1f runs/s  ETA %d:%02d", (long long)done,
             (long long)flags.runs, (long long)shared->kept, rate, eta / 60, eta % 60);
    fprintf(stderr, tty ? "\r%-78s" : "%s\n", line);
}

// Starts the workers and waits for them. Returns the number of workers that did not end as they should.
static int run_workers(const char* top, double start_ms) {
    pid_t* workers = (pid_t*)malloc_check((size_t)flags.jobs * sizeof(pid_t));
    int alive = flags.jobs, broken = 0, status;
    fflush(NULL);
    for (int j = 0; j < flags.jobs; j++) {
        workers[j] = fork();
        if (workers[j] < 0) { die("cannot start a process: %s", strerror(errno)); }
        if (workers[j] == 0) {
            work(top, j);
            exit(0);
        }
    }
    for (bool told = false; alive > 0;) {
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid > 0) {
            alive--;
            broken += status != 0 && !stop_signal;
            if (status != 0 && !stop_signal) { fprintf(stderr, "error: a worker ended with wait status %d\n", status); }
        } else {
            usleep(20000);
        }
        if (stop_signal && !told) {
            for (int j = 0; j < flags.jobs; j++) { kill(workers[j], SIGTERM); }
            told = true;
        }
        print_progress(start_ms, alive == 0);
    }
    free(workers);
    return broken;
}

static void print_table(double seconds) {
    int64_t sums[NUM_OUTCOMES + 1] = {0};
    printf("%-14s %8s %9s %9s %9s %9s\n", "command", "runs", "accepted", "refused", "findings", "messages");
    for (int c = 0; c <= NUM_COMMANDS; c++) {
        int64_t n[NUM_OUTCOMES + 1] = {0};
        for (int o = 0; o < NUM_OUTCOMES; o++) {
            n[o] = c < NUM_COMMANDS ? shared->outcomes[c][o] : sums[o];
            n[NUM_OUTCOMES] += n[o];
            sums[o] += c < NUM_COMMANDS ? n[o] : 0;
        }
        printf("%-14s %8lld %9lld %9lld %9lld %9lld\n", c < NUM_COMMANDS ? commands[c].name : "all",
               (long long)n[NUM_OUTCOMES], (long long)n[ACCEPTED], (long long)n[REFUSED], (long long)n[FINDING],
               (long long)shared->num_messages[c]);
    }
    int64_t all = sums[ACCEPTED] + sums[REFUSED] + sums[FINDING];
    printf("seed %lld: %lld runs in %.0f s, %.1f runs/s, %lld distinct messages, %lld findings\n",
           (long long)flags.seed, (long long)all, seconds, (double)all / seconds,
           (long long)shared->num_messages[NUM_COMMANDS], (long long)sums[FINDING]);
}

static void parse_flags(int argc, char** argv) {
    const Option options[] = {
        {OPT_LONG, 0, NULL, "runs", &flags.runs, "runs", "number of runs", 1, 1e12},
        {OPT_LONG, 0, NULL, "seed", &flags.seed, NULL, "all choices of a run depend on this and on its number", 0,
         1e15},
        {OPT_LONG, 0, NULL, "first", &flags.first, NULL, "number of the first run", 0, 1e12},
        {OPT_STR, 0, NULL, "command", &flags.command, "NAME", "only this command, see --list", 0, 0},
        {OPT_INT, 0, NULL, "jobs", &flags.jobs, "processes", "runs side by side; 0: one per core", 0, 256},
        {OPT_INT, 0, NULL, "timeout", &flags.timeout_s, "seconds", "a command that takes longer is a finding", 1, 3600},
        {OPT_STR, 0, NULL, "programs", &flags.programs, "DIR", "where train_gpt2 and dev/data/* are", 0, 0},
        {OPT_STR, 0, NULL, "seed-programs", &flags.seed_programs, "DIR",
         "programs that make the valid files; default: those of --programs", 0, 0},
        {OPT_STR, 0, NULL, "out", &flags.out, "DIR", "findings and messages go here", 0, 0},
        {OPT_STR, 0, NULL, "work", &flags.work, "DIR",
         "the trees of the runs go here; default: /dev/shm if it has room, which is several times as fast as a disk, "
         "else --out",
         0, 0},
        {OPT_INT, 0, NULL, "keep", &flags.keep, "findings", "number of findings whose trees are kept", 0, 1e6},
        {OPT_BOOL, 0, NULL, "verbose", &flags.verbose, NULL, "print a line for each run", 0, 0},
        {OPT_BOOL, 0, NULL, "list", &flags.list, NULL, "print the commands and exit", 0, 0},
    };
    cli_parse(argc, argv,
              "Runs the programs on changed files. Each run must end with status 0, or with one line of error.",
              options, (int)(sizeof(options) / sizeof(options[0])));
    for (int i = 0; flags.list && i < NUM_COMMANDS; i++) { printf("%-14s %s\n", commands[i].name, commands[i].what); }
    if (flags.list) { exit(0); }
    bool known = !flags.command;
    for (int i = 0; !known && i < NUM_COMMANDS; i++) { known = strcmp(flags.command, commands[i].name) == 0; }
    if (!known) { cli_fail("no command '%s', see --list", flags.command); }
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (flags.jobs == 0) { flags.jobs = cores > 0 && cores < 256 ? (int)cores : 1; }
    if (flags.jobs > flags.runs) { flags.jobs = (int)flags.runs; }
}

// Returns --work or its default.
static const char* work_directory(void) {
    static const char memory[] = "/dev/shm";
    const uint64_t need = (uint64_t)flags.jobs * (32 << 20); // a tree takes 1 MB, a changed file at most 1 MB
    struct statvfs fs;
    if (flags.work) { return flags.work; }
    bool fits = access(memory, W_OK) == 0 && statvfs(memory, &fs) == 0 && (uint64_t)fs.f_bavail * fs.f_frsize > need;
    return fits ? memory : flags.out;
}

static void absolute(char* out, const char* dir) { // out: (TREE_PATH)
    char path[4096 + 1];
    if (!realpath(dir, path)) { die("%s: %s", dir, strerror(errno)); }
    join_path(out, "%s", path);
}

static char run_top[TREE_PATH];
static pid_t main_process;

// Removes the trees of the runs, however this process ends, but not when one of its children does.
static void remove_trees(void) {
    if (getpid() == main_process && run_top[0]) { tree_remove(run_top); }
}

int main(int argc, char** argv) {
    char out[TREE_PATH], work_top[TREE_PATH], seed_programs[TREE_PATH];
    open_standard_streams();
    parse_flags(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    set_environment();
    tree_make(flags.out);
    absolute(out, flags.out);
    tree_make(work_directory());
    absolute(work_top, work_directory());
    absolute(programs_top, flags.programs);
    absolute(seed_programs, flags.seed_programs ? flags.seed_programs : flags.programs);
    join_path(run_top, "%s/llmc_whole_program-%ld", work_top, (long)getpid());
    join_path(seed_top, "%s/seed", run_top);
    join_path(findings_top, "%s/findings/whole_program-%lld", out, (long long)flags.seed);
    join_path(messages_path, "%s/whole_program-%lld.messages", out, (long long)flags.seed);
    unlink(messages_path);
    shared = (Shared*)mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) { die("mmap: %s", strerror(errno)); }
    main_process = getpid();
    atexit(remove_trees);
    tree_make(run_top);
    seed_tree_make(seed_top, seed_programs);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    double start_ms = time_ms();
    int broken = run_workers(run_top, start_ms);
    print_table((time_ms() - start_ms) / 1e3);
    if (stop_signal) { return 128 + stop_signal; }
    int64_t findings = 0;
    for (int c = 0; c < NUM_COMMANDS; c++) { findings += shared->outcomes[c][FINDING]; }
    return findings > 0 || broken > 0;
}
