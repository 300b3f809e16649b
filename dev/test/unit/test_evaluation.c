// llmc/evaluation.h: the sliding window, the files that --eval names, and the printed results. In place of a model there are
// functions whose losses and predictions depend on the tokens alone, so that the expected values can be computed by hand.
#include "capture.h"
#include "../../../llmc/evaluation.h"
#include "../../../llmc/json.h"

static Settings defaults; // the settings before any test

// ---- in place of a model --------------------------------------------------------------------------

static struct {
    int wanted;         // compute_one: the target whose losses are not 0
    bool context;       // compute_one: its loss is the number of tokens that it is predicted from, else 1
    const int* targets; // (B,T) of the last batch
} model_state;

// The tokens are 0, 1, 2 ... in order.
static void compute_one(void* model, float* losses, const int* inputs, const int* targets, int B, int T) {
    (void)model;
    for (int row = 0; row < B; row++) {
        int length = 0; // of the row
        while (length < T && targets[row * T + length] > 0) { length++; }
        for (int t = 0; t < T; t++) {
            int input = inputs[row * T + t], target = targets[row * T + t];
            if (t < length) { check(input == inputs[row * T] + t && target == input + 1); }
            if (t >= length) { check(input == 0 && target == 0); }
            losses[row * T + t] = t < length && target != model_state.wanted ? 0.0f
                                  : model_state.context                      ? (float)(t + 1)
                                                                             : 1.0f;
        }
    }
}

// The loss of a token is an eighth of its id, and even ids are the most likely tokens.
static void compute_eighths(void* model, float* losses, const int* inputs, const int* targets, int B, int T) {
    (void)model, (void)inputs;
    model_state.targets = targets;
    for (int i = 0; i < B * T; i++) { losses[i] = (float)targets[i] / 8; }
}

static int most_likely_even(void* model, size_t i) {
    (void)model;
    return model_state.targets[i] & ~1;
}

// ---- the sliding window ---------------------------------------------------------------------------

static double run_window(int n, int B, int T, LossSums* sums) {
    EvalTokens tokens;
    Evaluator e;
    LossSums zero = {0, 0, 0, 0};
    memset(&tokens, 0, sizeof(tokens));
    token_buffer_reserve(&tokens.text, (size_t)n);
    for (int i = 0; i < n; i++) { tokens.text.ids[i] = (uint32_t)i; }
    tokens.num_tokens = (size_t)n;
    *sums = zero;
    evaluator_open(&e, compute_one, NULL, NULL, B, T);
    eval_tokens_run(&e, &tokens, sums);
    evaluator_close(&e);
    token_buffer_free(&tokens.text);
    return sums->sum;
}

// Every token but the first is predicted once, from at most T tokens, and from at least T - stride + 1 if there are so
// many.
static void test_window(void) {
    static const int lengths[] = {2, 3, 8, 9, 10, 17, 23}, Ts[] = {1, 2, 5, 8};
    LossSums sums;
    for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++) {
        for (size_t k = 0; k < sizeof(Ts) / sizeof(Ts[0]); k++) {
            for (int stride = 0; stride <= Ts[k]; stride++) {
                int n = lengths[l], T = Ts[k], B = 1 + (n + stride) % 3;
                int least = stride == 0 ? 1 : T - stride + 1;
                settings.stride = stride;
                for (model_state.wanted = 1; model_state.wanted < n; model_state.wanted++) {
                    model_state.context = false;
                    check_msg(run_window(n, B, T, &sums) == 1 && sums.count == n - 1 && sums.squares == 1,
                              "n %d, B %d, T %d, stride %d: token %d counts %g times", n, B, T, stride,
                              model_state.wanted, sums.sum);
                    model_state.context = true;
                    double c = run_window(n, B, T, &sums);
                    check_msg(c <= T && c >= (model_state.wanted < least ? model_state.wanted : least) &&
                                  c <= model_state.wanted,
                              "n %d, B %d, T %d, stride %d: token %d from %g tokens", n, B, T, stride,
                              model_state.wanted, c);
                }
            }
        }
    }
    // T 8, stride 3: rows from tokens 0, 3, 6; the last row has 8 of its tokens, of which 6 and up to 8 are context
    settings.stride = 3;
    static const int context[] = {1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 6, 7};
    model_state.context = true;
    for (model_state.wanted = 1; model_state.wanted <= 13; model_state.wanted++) {
        check_near(run_window(14, 2, 8, &sums), context[model_state.wanted - 1], 0);
    }
    settings = defaults;
}

// ---- evaluation files and results ---------------------------------------------------------------------

// Writes a file of version 2 in the test's directory: `words` (n) after the header.
static void write_eval(const char* name, EvalKind kind, int num_examples, int longest, const uint16_t* words,
                       size_t n) {
    char path[256];
    FileWriter w;
    Error err;
    int32_t header[EVAL_HEADER_BYTES / 4] = {EVAL_MAGIC, 2, num_examples, longest, (int32_t)kind};
    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    if (!writer_open(&w, path, &err)) { die("%s", err.text); }
    writer_put(&w, header, sizeof(header));
    writer_put(&w, words, n * sizeof(words[0]));
    if (!writer_close(&w, &err)) { die("%s", err.text); }
}

static void write_files(void) {
    // endings 10; 20 30; 7. Losses 1.25, 6.25, 0.875; the first two are predicted
    static const uint16_t last_words[] = {65535, 22, 0, 0, 1, 2, 1, 2, 1, 3, 10,     //
                                          65535, 24, 1, 0, 1, 2, 1, 2, 2, 9, 20, 30, //
                                          65535, 22, 2, 0, 1, 2, 1, 2, 1, 1, 7};
    // endings 8 with 2 characters, and 9 9 with 6: losses 1 and 2.25, per character 0.5 and 0.375, per token 1 and
    // 1.125. The second is right, twice, and then the first
    static const uint16_t choices[] = {65535, 28, 0, 1, 2, 1, 1, 1, 2, 8, 2, 6, 9, 9, //
                                       65535, 28, 1, 1, 2, 1, 1, 1, 2, 8, 2, 6, 9, 9, //
                                       65535, 28, 2, 0, 2, 1, 1, 1, 2, 8, 2, 6, 9, 9};
    char path[256];
    write_eval("words.bin", EVAL_LAST_WORDS, 3, 24, last_words, sizeof(last_words) / 2);
    write_eval("choices.bin", EVAL_CHOICES, 3, 28, choices, sizeof(choices) / 2);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/%d.txt", test_dir(), i);
        FILE* f = fopen(path, "w");
        check(f && fputs("abc", f) >= 0);
        if (f) { fclose(f); }
    }
}

// Evaluates the files of `patterns`, in which % stands for the test's directory; what it prints is then in `printed`.
static void run_files(const char* patterns) {
    char list[1024];
    size_t n = 0;
    Tokenizer tokenizer;
    for (const char* p = patterns; *p; p++) {
        n += (size_t)snprintf(list + n, sizeof(list) - n, *p == '%' ? "%s" : "%.1s", *p == '%' ? test_dir() : p);
    }
    settings.eval_data = list;
    tokenizer_init_bytes(&tokenizer);
    capture_begin();
    EvalFiles files = eval_files_find();
    check(evaluation_rows(&files) == (files.has_questions ? 5 : 4));
    evaluate_files(&files, compute_eighths, most_likely_even, NULL, 5, 8, &tokenizer, 257);
    capture_end();
    tokenizer_free(&tokenizer);
    settings.eval_data = NULL;
}

// Checks that member `name` of the JSON value has this value.
static void check_number(const JsonDoc* doc, const char* name, double want) {
    double got = NAN;
    Error err = {""};
    check_msg(json_number(doc->root, name, -1e30, 1e30, &got, "result", &err), "%s", err.text);
    check_near(got, want, 1e-6 * fabs(want));
}

static void check_string(const JsonDoc* doc, const char* name, const char* want) {
    const char* got = "";
    Error err = {""};
    check_msg(json_string(doc->root, name, &got, "result", &err), "%s", err.text);
    check_str(got, want);
}

static void test_json(void) {
    char path[256];
    char* rest = printed;
    write_files();
    settings.json = 1;
    settings.model = "a \"model\"\n";
    run_files("%/words.bin,%/choices.bin,%/?.txt");
    for (int i = 0; i < 5; i++) {
        JsonDoc doc;
        Error err;
        char* line = strsep(&rest, "\n");
        bool parsed = line && json_parse(&doc, line, strlen(line), "result", &err);
        check_msg(parsed, "line %d: %s", i, line ? err.text : "none");
        if (!parsed) { break; }
        check_string(&doc, "model", "a \"model\"\n");
        snprintf(path, sizeof(path),
                 i == 0   ? "%s/words.bin"
                 : i == 1 ? "%s/choices.bin"
                          : "%s/%d.txt",
                 test_dir(), i - 2);
        if (i < 4) { check_string(&doc, "file", path); }
        check_string(&doc, "type", i == 0 ? "last_words" : i == 1 ? "choices" : "loss");
        if (i < 2) { check_number(&doc, "examples", 3); }
        if (i == 0) {
            check_number(&doc, "acc", 2.0 / 3);
            check_number(&doc, "acc_stderr", 1.0 / 3); // of 1, 1, 0: variance 1/3, over 3 examples
            check_number(&doc, "perplexity", 16.308177);
        } else if (i == 1) {
            check_number(&doc, "acc", 1.0 / 3);
            check_number(&doc, "acc_norm", 2.0 / 3);
            check_number(&doc, "acc_norm_stderr", 1.0 / 3);
        } else { // the bytes a, b and c are the tokens 64, 65 and 66
            check_number(&doc, "tokens", i == 4 ? 6 : 3);
            check_number(&doc, "loss", 8.125);
            check_number(&doc, "loss_stderr", i == 4 ? 0.041666667 : 0.058925565);
            check_number(&doc, "perplexity", 3377.8679);
            check_number(&doc, "bits_per_byte", 11.721897);
            check_number(&doc, "seq_len", 8);
            check_number(&doc, "stride", 8);
        }
        if (i == 4) { check(!json_get(doc.root, "file")); }
        if (i == 4) { check_number(&doc, "files", 2); }
        json_free(&doc);
    }
    check(rest && rest[0] == '\0');
    settings = defaults;
}

static void test_text(void) {
    static const char* const want[] = {
        "/words.bin: 3 last words, acc 0.6667 +- 0.3333, perplexity 16.308 (",
        "/choices.bin: 3 questions, acc 0.3333 +- 0.3333, acc_norm 0.6667 +- 0.3333 (",
        "/0.txt: 3 tokens, loss 8.125000 +- 0.0589, perplexity 3377.868, 11.7219 bits per byte, window 8, stride 2 ("};
    char* rest = printed;
    write_files();
    settings.stride = 2;
    run_files("%/words.bin,%/choices.bin,%/0.txt");
    for (int i = 0; i < 3; i++) {
        char* line = strsep(&rest, "\n");
        check_msg(line && strstr(line, want[i]), "'%s', want '%s'", line ? line : "none", want[i]);
    }
    check(rest && rest[0] == '\0');
    settings = defaults;
}

static void test_files(void) {
    char path[256];
    write_files();
    run_files("%/0.txt");
    check(strstr(printed, "/0.txt: ") && !strstr(printed, "all: "));
    run_files("%/?.txt,%/words.bin");
    check(strstr(printed, "/0.txt: ") && strstr(printed, "/1.txt: ") && strstr(printed, "all: 6 tokens, loss 8.125"));
    // a comma in the name of a file that exists
    snprintf(path, sizeof(path), "%s/0.txt,x", test_dir());
    FILE* f = fopen(path, "w");
    check(f && fputs("abcd", f) >= 0);
    if (f) { fclose(f); }
    run_files("%/0.txt,x");
    check_msg(strstr(printed, "/0.txt,x: 4 tokens"), "%s", printed);
    settings = defaults;
}

// The tokens of texts are those of dev/data/tokenize: of JSON lines and arrays the member "text". What is not text is refused.
static void test_tokens(void) {
#define BYTES(s) s, sizeof(s) - 1
    static const struct {
        const char *name, *text;
        size_t n;
        const char* want; // the tokens after the first 256 as characters, | for an end-of-text; or an error
        size_t bytes;     // of text; 0: an error
    } cases[] = {
        {"ab.txt", BYTES("ab"), "ab", 2},
        {"ab.txt",
         BYTES("\xEF\xBB\xBF"
               "ab"),
         "ab", 2},
        {"a.jsonl", BYTES("{\"text\": \"ab\"}\r\n\n{\"text\": \"\"}\n{\"text\": \"c\"}"), "ab|c", 3},
        {"a.json", BYTES("\xEF\xBB\xBF{\"text\": \"ab\"}\n{\"text\": \"c\", \"x\": NaN}\n"), "ab|c", 3},
        {"a", BYTES("[{\"text\": \"ab\"},\n {\"text\": \"c\"}]"), "ab|c", 3},
        {"ab.txt", BYTES("[ab]"), "[ab]", 4},
        {"a", BYTES("{\"prompt\": 1}\n{\"prompt\": 2}"),
         "a:1: \"text\" is missing, the members are: prompt: dev/data/tokenize --field NAME makes shards of another",
         0},
        {"a.jsonl", BYTES("ab"), "a.jsonl:1: not valid JSON", 0},
        {"a", BYTES("a\0b"), "a: is not text: has a NUL byte at offset 1", 0},
        {"a", BYTES("\x1F\x8B\x08"), "a: is compressed with gzip, not text: use zcat FILE > TEXT", 0},
        {"a", BYTES("\xA1\xD9\x34\x01"), "a: is a Llama-3 shard, not text", 0},
        {"a", BYTES(""), "a: is empty", 0},
    };
#undef BYTES
    Tokenizer tokenizer;
    tokenizer_init_bytes(&tokenizer);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char path[256], got[64] = "";
        EvalTokens tokens;
        Error err;
        snprintf(path, sizeof(path), "%s/%s", test_dir(), cases[i].name);
        FILE* f = fopen(path, "w");
        require(f && fwrite(cases[i].text, 1, cases[i].n, f) == cases[i].n);
        fclose(f);
        bool ok = eval_tokens_open(&tokens, path, &tokenizer, 257, &err);
        check_msg(ok == (cases[i].bytes > 0), "case %zu: %s", i, ok ? "accepted" : err.text);
        if (!ok) { check_msg(strstr(err.text, cases[i].want), "'%s', want '%s'", err.text, cases[i].want); }
        if (!ok || !cases[i].bytes) { continue; }
        for (size_t j = 0; j < tokens.num_tokens; j++) {
            int id = eval_token(&tokens, j);
            size_t n = 0;
            check(j > 0 || id == tokenizer.eot_id);
            if (j > 0) { strncat(got, id == tokenizer.eot_id ? "|" : tokenizer_decode(&tokenizer, id, &n), 1); }
        }
        check_str(got, cases[i].want);
        check(tokens.text_bytes == cases[i].bytes);
        eval_tokens_close(&tokens);
    }
    tokenizer_free(&tokenizer);
}

static const Test tests[] = {
    {"window", "each token is predicted once, from as many tokens as the stride promises", test_window},
    {"json", "a line for each result", test_json},
    {"text", "the same as text", test_text},
    {"tokens", "texts, JSON lines, arrays, and what is not text", test_tokens},
    {"files", "names and patterns, separated by commas", test_files},
};

int main(int argc, char** argv) {
    defaults = settings;
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
