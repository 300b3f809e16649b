// llmc/eval_loader.h: the rows of a batch, the scores, and truncated or damaged files. The expected values are written
// by hand.
#include "../test.h"
#include "../../../llmc/eval_loader.h"

enum { VOCAB = 50257, MAX_B = 12, MAX_T = 64, NUM = 5, MAX_WORDS = 4096 };

// Questions of different lengths; token j of part p (0: the context) of question x is 10000 * x + 1000 * p + j + 1.
static const int part_tokens[NUM][5] = {
    {3, 1, 2, 3, 4}, {20, 5, 1, 7, 2}, {1, 6, 6, 6, 6}, {9, 1, 1, 1, 12}, {4, 8, 3, 3, 5}};
static const int question_labels[NUM] = {3, 0, 2, 1, 3};

static int token_of(int x, int part, int j) { return 10000 * x + 1000 * part + j + 1; }

typedef struct {
    uint16_t words[MAX_WORDS]; // the first 512 are the header
    size_t count;
    size_t start[NUM]; // first word of each question
} Bytes;

static void put(Bytes* b, int word) { b->words[b->count++] = (uint16_t)word; }

static void build(Bytes* b) {
    int32_t header[256] = {20240522, 1, NUM, 0};
    memset(b, 0, sizeof(*b));
    b->count = 512;
    for (int x = 0; x < NUM; x++) {
        size_t start = b->start[x] = b->count;
        put(b, 65535);
        put(b, 0);
        put(b, x);
        put(b, question_labels[x]);
        put(b, 4);
        for (int part = 0; part < 5; part++) {
            put(b, part_tokens[x][part]);
            for (int j = 0; j < part_tokens[x][part]; j++) { put(b, token_of(x, part, j)); }
        }
        int bytes = 2 * (int)(b->count - start);
        b->words[start + 1] = (uint16_t)bytes;
        if (bytes > header[3]) { header[3] = bytes; }
    }
    memcpy(b->words, header, sizeof(header));
}

static const char* path_of(const char* name) {
    static char path[256];
    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    return path;
}

static const char* write_bytes(const char* name, const Bytes* b) {
    FileWriter w;
    Error err;
    const char* path = path_of(name);
    if (!writer_open(&w, path, &err)) { die("%s", err.text); }
    writer_put(&w, b->words, 2 * b->count);
    if (!writer_close(&w, &err)) { die("%s", err.text); }
    return path;
}

// Parses a file of n bytes in memory of exactly that size, so that a sanitizer detects a read past its end.
static bool check_bytes(const uint8_t* bytes, size_t n, int T, int vocab_size, Error* err) {
    EvalLoader e;
    uint8_t* exact = (uint8_t*)malloc_check(n);
    if (n > 0) { memcpy(exact, bytes, n); }
    memset(&e, 0, sizeof(e));
    strcpy(e.path.text, "dir/e.bin");
    e.file.data = exact;
    e.file.size = n;
    e.B = 5, e.T = T, e.vocab_size = vocab_size;
    err->text[0] = '\0';
    bool ok = eval_check(&e, err);
    free(exact);
    if (!ok) { check_msg(strncmp(err->text, "dir/e.bin: ", 11) == 0 && !strchr(err->text, '\n'), "%s", err->text); }
    return ok;
}

// ---- batches --------------------------------------------------------------------------------------

// Checks one row of a batch against the whole text of its question and ending.
static void check_row(const EvalLoader* e, int row, int x, int ending, const int* inputs, const int* targets) {
    int text[MAX_T + 64], n = 0, T = e->T, length = part_tokens[x][1 + ending];
    for (int j = 0; j < part_tokens[x][0]; j++) { text[n++] = token_of(x, 0, j); }
    for (int j = 0; j < length; j++) { text[n++] = token_of(x, 1 + ending, j); }
    int from = n > T + 1 ? n - (T + 1) : 0;
    for (int t = 0; t < T; t++) {
        int input = from + t + 1 < n ? text[from + t] : 0, target = from + t + 1 < n ? text[from + t + 1] : 0;
        check_msg(inputs[row * T + t] == input, "question %d, ending %d, T %d: input %d is %d, want %d", x, ending, T,
                  t, inputs[row * T + t], input);
        check_msg(targets[row * T + t] == target, "question %d, ending %d, T %d: target %d is %d, want %d", x, ending,
                  T, t, targets[row * T + t], target);
    }
    EvalRow r = e->rows[row];
    check(r.count == length && r.first >= 0 && r.first + r.count <= T);
    check(targets[row * T + r.first] == token_of(x, 1 + ending, 0));
    check(targets[row * T + r.first + r.count - 1] == token_of(x, 1 + ending, length - 1));
}

static void check_pass(EvalLoader* e) {
    int inputs[MAX_B * MAX_T], targets[MAX_B * MAX_T], x = 0, in_batch = e->B / 4;
    Error err;
    for (int batch = 0; batch < (NUM + in_batch - 1) / in_batch; batch++) {
        memset(inputs, 0x55, sizeof(inputs));
        memset(targets, 0x55, sizeof(targets));
        check(eval_next(e, inputs, targets, &err));
        int want = NUM - x < in_batch ? NUM - x : in_batch;
        check_msg(e->batch_examples == want, "B %d: %d questions in batch %d, want %d", e->B, e->batch_examples, batch,
                  want);
        for (int i = 0; i < want; i++, x++) {
            check(e->questions[i].label == question_labels[x] && e->questions[i].num_endings == 4);
            check(e->questions[i].row == 4 * i);
            for (int ending = 0; ending < 4; ending++) { check_row(e, 4 * i + ending, x, ending, inputs, targets); }
        }
        for (int i = 4 * want * e->T; i < e->B * e->T; i++) { check(inputs[i] == 0 && targets[i] == 0); }
        check(inputs[e->B * e->T] == 0x55555555 && targets[e->B * e->T] == 0x55555555);
    }
    check(x == NUM);
    for (int again = 0; again < 2; again++) {
        strcpy(err.text, "old");
        check(!eval_next(e, inputs, targets, &err));
        check_str(err.text, "");
        check(e->batch_examples == 0);
    }
    check(!eval_next(e, inputs, targets, NULL));
}

static void test_batches(void) {
    static const int Bs[] = {4, 5, 8, 9, 11}, Ts[] = {12, 13, 15, 20, 25, 63}; // T = 12: the longest ending fills a row
    Bytes b;
    build(&b);
    const char* path = write_bytes("batches.bin", &b);
    for (size_t i = 0; i < sizeof(Bs) / sizeof(Bs[0]); i++) {
        for (size_t k = 0; k < sizeof(Ts) / sizeof(Ts[0]); k++) {
            EvalLoader e;
            Error err;
            check(eval_open(&e, path, Bs[i], Ts[k], VOCAB, &err));
            check(e.num_examples == NUM && e.num_scored == 0 && e.num_correct == 0);
            for (int pass = 0; pass < 3; pass++) {
                check_pass(&e);
                eval_reset(&e);
            }
            eval_close(&e);
            eval_close(&e); // closing twice is allowed
        }
    }
}

static void test_limits(void) {
    Bytes b;
    Error err;
    build(&b);
    const uint8_t* bytes = (const uint8_t*)b.words;
    check(check_bytes(bytes, 2 * b.count, 12, VOCAB, &err));
    check(!check_bytes(bytes, 2 * b.count, 11, VOCAB, &err));
    check_str(err.text, "dir/e.bin: example 3 has an ending of 12 tokens: too long for -t 11");
    int largest = token_of(NUM - 1, 4, 4);
    check(check_bytes(bytes, 2 * b.count, 12, largest + 1, &err));
    check(!check_bytes(bytes, 2 * b.count, 12, largest, &err));
    check_str(err.text, "dir/e.bin: example 4 has token 44005, but the model's vocabulary has only 44005");
}

static void test_open_errors(void) {
    EvalLoader e;
    Error err;
    Bytes b;
    build(&b);
    char path[256];
    snprintf(path, sizeof(path), "%s", write_bytes("good.bin", &b));
    check(!eval_open(&e, path, 3, 64, VOCAB, &err));
    check_msg(strstr(err.text, "good.bin: a question takes 4 rows of a batch, but -b is only 3"), "%s", err.text);
    check(!eval_open(&e, path, 4, 0, VOCAB, &err));
    check_msg(strstr(err.text, "good.bin: -t is 0"), "%s", err.text);
    check(!eval_open(&e, path_of("absent.bin"), 4, 64, VOCAB, &err));
    check_msg(strstr(err.text, "absent.bin: No such file"), "%s", err.text);
    check(!eval_open(&e, test_dir(), 4, 64, VOCAB, &err));
    check_msg(strstr(err.text, "is a directory"), "%s", err.text);
    b.count = 0;
    check(!eval_open(&e, write_bytes("empty.bin", &b), 4, 64, VOCAB, &err));
    check_msg(strstr(err.text, "empty.bin: not an evaluation file"), "%s", err.text);
    eval_close(&e);
}

// ---- score ----------------------------------------------------------------------------------------

static void test_score(void) {
    enum { T = 12 };
    static const float inf = INFINITY, nan = NAN;
    static const struct {
        float losses[4];
        int best; // -1: none
    } cases[] = {
        {{1, 2, 3, 4}, 0},      {{4, 3, 2, 1}, 3},          {{2, 1, 1, 2}, 1}, // the first of equal losses
        {{1, 1, 1, 1}, 0},      {{nan, 5, 4, 5}, 2},        {{nan, nan, nan, 9}, 3},
        {{1, nan, 0.5f, 2}, 2}, {{nan, nan, nan, nan}, -1}, {{inf, inf, 1e30f, inf}, 2},
        {{0, -1, nan, 3}, 1},   {{-0.0f, 0.0f, 1, 1}, 0},   {{inf, nan, inf, nan}, -1},
    };
    static int inputs[8 * T], targets[8 * T];
    Bytes b;
    Error err;
    EvalLoader e;
    build(&b);
    check(eval_open(&e, write_bytes("score.bin", &b), 8, T, VOCAB, &err));
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        int x = 0, correct = 0;
        eval_reset(&e);
        while (eval_next(&e, inputs, targets, &err)) {
            float losses[8 * T];
            for (int i = 0; i < 8 * T; i++) { losses[i] = i % 2 ? nan : -100.0f; } // losses that must not count
            for (int i = 0; i < e.batch_examples; i++, x++) {
                correct += cases[c].best == question_labels[x];
                for (int k = 0; k < 4; k++) {
                    // the score is a mean: tokens differ, and long endings are not worse than short ones
                    EvalRow r = e.rows[4 * i + k];
                    float* row = losses + (4 * i + k) * T + r.first;
                    for (int j = 0; j < r.count; j++) { row[j] = cases[c].losses[k]; }
                    if (r.count >= 2 && isfinite(row[0]) && fabsf(row[0]) < 100) {
                        row[0] += 0.25f; // exact in binary
                        row[r.count - 1] -= 0.25f;
                    }
                }
            }
            eval_score(&e, losses);
            eval_score(&e, losses); // scoring the same batch again has no effect
        }
        check_msg(e.num_scored == NUM && e.num_correct == correct, "case %zu: %lld of %lld right, want %d of %d", c,
                  (long long)e.num_correct, (long long)e.num_scored, correct, NUM);
    }
    // a NaN at any token rules out its ending
    eval_reset(&e);
    check(eval_next(&e, inputs, targets, &err));
    float losses[8 * T];
    for (int i = 0; i < 8 * T; i++) { losses[i] = 1.0f; }
    EvalRow r = e.rows[3]; // question 0, whose label is 3
    for (int j = 0; j < r.count; j++) { losses[3 * T + r.first + j] = 0.1f; }
    losses[3 * T + r.first + r.count - 1] = nan;
    e.batch_examples = 1;
    eval_score(&e, losses);
    check(e.num_scored == 1 && e.num_correct == 0);
    eval_close(&e);
}

// ---- version 2 ------------------------------------------------------------------------------------

// Choices: question x has its own number of endings, 2 to 5. Ending i of question x has i + 1 tokens and
// characters[x][i].
static const int choices_endings[NUM] = {3, 5, 2, 4, 5};
static const int choices_characters[NUM][5] = {
    {4, 8, 2}, {1, 1, 1, 1, 1}, {65535, 1}, {10, 20, 30, 40}, {5, 4, 3, 2, 1}};
static const int choices_labels[NUM] = {2, 4, 0, 1, 3};

static int choices_token(int x, int ending, int j) { return 1000 * x + 100 * (ending + 2) + j; }

// The context of question x has x + 2 tokens. num_endings: of all questions, or 0: choices_endings.
static void build_version2(Bytes* b, EvalKind kind, int num_endings) {
    int32_t header[256] = {20240522, 2, NUM, 0, kind};
    memset(b, 0, sizeof(*b));
    b->count = 512;
    for (int x = 0; x < NUM; x++) {
        size_t start = b->start[x] = b->count;
        int n = num_endings ? num_endings : choices_endings[x];
        put(b, 65535);
        put(b, 0);
        put(b, x);
        put(b, n == 1 ? 0 : choices_labels[x]);
        put(b, n);
        put(b, x + 2);
        for (int j = 0; j < x + 2; j++) { put(b, choices_token(x, -1, j)); }
        for (int i = 0; i < n; i++) {
            put(b, i + 1);
            put(b, choices_characters[x][i]);
            for (int j = 0; j <= i; j++) { put(b, choices_token(x, i, j)); }
        }
        int bytes = 2 * (int)(b->count - start);
        b->words[start + 1] = (uint16_t)bytes;
        if (bytes > header[3]) { header[3] = bytes; }
    }
    memcpy(b->words, header, sizeof(header));
}

static void test_choices_batches(void) {
    // examples in each batch of B rows
    static const struct {
        int B, examples[NUM + 1];
    } cases[] = {{5, {1, 1, 1, 1, 1, 0}}, {8, {2, 2, 1, 0}}, {9, {2, 2, 1, 0}}, {14, {4, 1, 0}}, {19, {5, 0}}};
    enum { T = 10, B_MAX = 20 };
    static int inputs[B_MAX * T], targets[B_MAX * T];
    Bytes b;
    Error err;
    EvalLoader e;
    build_version2(&b, EVAL_CHOICES, 0);
    const char* path = write_bytes("choices.bin", &b);
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        check(eval_open(&e, path, cases[c].B, T, VOCAB, &err));
        check(e.kind == EVAL_CHOICES && e.num_examples == NUM && e.longest_row == 10); // question 4: 6 + 5 - 1
        check(e.num_cut == 0);
        int x = 0, batch = 0;
        while (eval_next(&e, inputs, targets, &err)) {
            check_msg(e.batch_examples == cases[c].examples[batch], "B %d: %d examples in batch %d", cases[c].B,
                      e.batch_examples, batch);
            for (int i = 0; i < e.batch_examples; i++, x++) {
                EvalQuestion q = e.questions[i];
                check(q.num_endings == choices_endings[x] && q.label == choices_labels[x]);
                check(q.row + q.num_endings <= e.B);
                for (int k = 0; k < q.num_endings; k++) {
                    EvalRow r = e.rows[q.row + k];
                    const int *in = inputs + (q.row + k) * T, *target = targets + (q.row + k) * T;
                    check(r.first == x + 1 && r.count == k + 1 && r.characters == choices_characters[x][k]);
                    check(in[0] == choices_token(x, -1, 0) && in[r.first] == choices_token(x, -1, x + 1));
                    for (int j = 0; j <= k; j++) { check(target[r.first + j] == choices_token(x, k, j)); }
                }
            }
            batch++;
        }
        check(x == NUM && cases[c].examples[batch] == 0);
        check_str(err.text, "");
        eval_close(&e);
    }
    check(!eval_open(&e, path, 4, T, VOCAB, &err));
    check_msg(strstr(err.text, "choices.bin: example 1 has 5 endings, more than the 4 rows"), "%s", err.text);
}

// Sets the losses of the batch: those of row r's ending are losses[r] in all, and others must not count.
static void set_losses(const EvalLoader* e, float* all, const float* losses) {
    for (int i = 0; i < e->B * e->T; i++) { all[i] = i % 2 ? NAN : -100.0f; }
    for (int i = 0; i < e->batch_examples; i++) {
        for (int k = 0; k < e->questions[i].num_endings; k++) {
            int row = e->questions[i].row + k;
            EvalRow r = e->rows[row];
            for (int j = 0; j < r.count; j++) { all[row * e->T + r.first + j] = 0.0f; }
            all[row * e->T + r.first] = losses[row] + 1.0f; // exact in binary
            all[row * e->T + r.first + r.count - 1] -= 1.0f;
        }
    }
}

static void test_choices_score(void) {
    enum { T = 10, B = 19 };
    static const float nan = NAN;
    // characters                      4  8    2   1 1 1 1 1     65535 1     10 20 30 40         5 4  3  2  1
    static const struct {
        float losses[B]; // of the endings of all questions
        int correct, norm;
    } cases[] = {
        // the right endings:                   2           4        0      1                  3
        {{1, 9, 5, /**/ 5, 4, 3, 2, 1, /**/ 2, 3, /**/ 2, 1, 2, 2, /**/ 9, 9, 9, 8, 9}, 4, 3},
        {{1, 9, 8, /**/ 1, 1, 1, 1, 1, /**/ 3, 2, /**/ 1, 1, 9, 9, /**/ 1, 1, 1, 1, 1}, 0, 2}, // ties: the first
        {{nan, nan, 9, /**/ nan, nan, nan, nan, 2, /**/ nan, 2, /**/ 6, 5, 6, 6, /**/ 4, 4, 4, 3, 1}, 3, 2},
        {{nan, nan, nan, /**/ nan, nan, nan, nan, nan, /**/ nan, nan, /**/ nan, nan, nan, nan, /**/ nan, nan, nan, nan,
          nan},
         0,
         0},
    };
    static int inputs[B * T], targets[B * T];
    static float losses[B * T];
    Bytes b;
    Error err;
    EvalLoader e;
    build_version2(&b, EVAL_CHOICES, 0);
    check(eval_open(&e, write_bytes("choices_score.bin", &b), B, T, VOCAB, &err));
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        eval_reset(&e);
        check(eval_next(&e, inputs, targets, &err));
        set_losses(&e, losses, cases[c].losses);
        eval_score(&e, losses);
        check_msg(e.num_scored == NUM && e.num_correct == cases[c].correct && e.num_correct_norm == cases[c].norm,
                  "case %zu: %lld and %lld of %lld, want %d and %d", c, (long long)e.num_correct,
                  (long long)e.num_correct_norm, (long long)e.num_scored, cases[c].correct, cases[c].norm);
    }
    eval_close(&e);
}

static void test_last_words(void) {
    enum { T = 10, B = 5 };
    static const float sums[B] = {0.5f, 1.25f, 2, 4, 8};
    static int inputs[B * T], targets[B * T];
    static float losses[B * T];
    Bytes b;
    Error err;
    EvalLoader e;
    build_version2(&b, EVAL_LAST_WORDS, 1);
    check(eval_open(&e, write_bytes("last_words.bin", &b), B, T, VOCAB, &err));
    check(eval_next(&e, inputs, targets, &err) && e.kind == EVAL_LAST_WORDS && e.batch_examples == 5);
    set_losses(&e, losses, sums);
    for (int i = 0; i < B; i++) {
        check(!e.rows[i].most_likely);
        e.rows[i].most_likely = i == 1 || i == 3;
    }
    eval_score(&e, losses);
    check(e.num_scored == 5 && e.num_correct == 2 && e.num_correct_norm == 0);
    check_near(e.loss, 15.75, 0);
    // a loss that is no number is never predicted
    eval_reset(&e);
    check(e.loss == 0 && eval_next(&e, inputs, targets, &err));
    set_losses(&e, losses, sums);
    e.rows[0].most_likely = e.rows[1].most_likely = true;
    losses[e.rows[0].first] = NAN;
    eval_score(&e, losses);
    check(e.num_correct == 1 && isnan(e.loss));
    eval_close(&e);
}

static void test_version2_damaged(void) {
    static const struct {
        int question, word, value; // word: index from the beginning of the question
        const char* want;
    } cases[] = {
        {0, 3, 3, "example 0 has 3 endings and label 3, want 2 to 5 endings"},
        {2, 4, 1, "example 2 has 1 endings and label 0, want 2 to 5 endings"},
        {4, 4, 6, "example 4 has 6 endings and label 3, want 2 to 5 endings"},
        {4, 4, 4, "example 4 is damaged"}, // one ending too many
        {0, 8, 0, "example 0 is damaged"}, // no token
        {0, 9, 0, "example 0 is damaged"}, // no character
        {0, 8, 500, "example 0 is damaged"},
    };
    Bytes good, b;
    Error err;
    build_version2(&good, EVAL_CHOICES, 0);
    check(check_bytes((const uint8_t*)good.words, 2 * good.count, 64, VOCAB, &err));
    for (size_t n = 0; n < 2 * good.count; n++) {
        check_msg(!check_bytes((const uint8_t*)good.words, n, 64, VOCAB, &err), "%zu bytes are enough", n);
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        b = good;
        b.words[b.start[cases[i].question] + (size_t)cases[i].word] = (uint16_t)cases[i].value;
        check_msg(!check_bytes((const uint8_t*)b.words, 2 * b.count, 64, VOCAB, &err), "case %zu is taken", i);
        check_msg(strstr(err.text, cases[i].want), "case %zu: %s", i, err.text);
    }
    for (int32_t kind = -1; kind <= 3; kind++) {
        b = good;
        memcpy(b.words + 2 * 4, &kind, sizeof(kind));
        bool ok = check_bytes((const uint8_t*)b.words, 2 * b.count, 64, VOCAB, &err);
        check_msg(ok == (kind == EVAL_CHOICES), "kind %d", kind);
        if (kind == EVAL_LAST_WORDS) { check_msg(strstr(err.text, "want 1 endings"), "%s", err.text); }
        if (kind <= 0 || kind == 3) { check_msg(strstr(err.text, "holds examples of kind"), "%s", err.text); }
    }
    build_version2(&b, EVAL_LAST_WORDS, 1);
    check(check_bytes((const uint8_t*)b.words, 2 * b.count, 64, VOCAB, &err));
    check(is_eval_file(write_bytes("is.bin", &b)) && !is_eval_file(test_dir()) && !is_eval_file(path_of("absent.bin")));
    b.words[0]++;
    check(!is_eval_file(write_bytes("is_not.bin", &b)));
}

// ---- damaged files --------------------------------------------------------------------------------

static void test_truncated(void) {
    Bytes b;
    Error err;
    build(&b);
    const uint8_t* bytes = (const uint8_t*)b.words;
    check(check_bytes(bytes, 2 * b.count, 64, VOCAB, &err));
    for (size_t n = 0; n < 2 * b.count; n++) {
        check_msg(!check_bytes(bytes, n, 64, VOCAB, &err), "%zu of %zu bytes are enough", n, 2 * b.count);
    }
    b.count++;
    check(!check_bytes(bytes, 2 * b.count - 1, 64, VOCAB, &err));
    check_str(err.text, "dir/e.bin: 1 bytes after the last example");
    check(!check_bytes(bytes, 2 * b.count, 64, VOCAB, &err));
}

static void test_damaged(void) {
    static const struct {
        int question, word, value; // word: index from the beginning of the question
        const char* want;
    } cases[] = {
        {0, 0, 65534, "example 0 is damaged or cut off"},
        {0, 1, 40, "example 0 is damaged"},
        {1, 1, 0, "example 1 is damaged or cut off"},
        {1, 1, 10, "example 1 is damaged or cut off"},
        {1, 1, 91, "example 1 is damaged or cut off"},
        {1, 1, 65534, "example 1 is damaged or cut off"},
        {2, 2, 3, "example 2 says it is number 3"},
        {3, 3, 4, "example 3 has 4 endings and label 4, want 4 endings"},
        {3, 3, 65535, "example 3 has 4 endings and label 65535"},
        {3, 4, 3, "example 3 has 3 endings and label 1"},
        {4, 5, 0, "example 4 is damaged"},
        {4, 5, 5, "example 4 is damaged"},
        {4, 5, 65535, "example 4 is damaged"},
        {4, 6, 50257, "example 4 has token 50257, but the model's vocabulary has only 50257"},
        {4, 10, 0, "example 4 is damaged"},
        {4, 10, 65535, "example 4 is damaged"},
    };
    static const struct {
        int word;
        int32_t value;
        const char* want;
    } headers[] = {
        {0, 20240520, "not an evaluation file (magic 20240520"},
        {1, 2, "holds examples of kind 0, want 1 (choices) or 2 (last words)"},
        {1, 3, "version 3"},
        {2, 0, "0 examples"},
        {2, -1, "-1 examples"},
        {2, NUM - 1, "bytes after the last example"},
        {2, NUM + 1, "is cut off in example 5"},
        {2, INT32_MAX, "is cut off in example 5"},
        {3, 0, "the header says 0"},
        {3, 1000, "the header says 1000"},
    };
    Bytes good, b;
    Error err;
    build(&good);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        b = good;
        b.words[b.start[cases[i].question] + (size_t)cases[i].word] = (uint16_t)cases[i].value;
        check_msg(!check_bytes((const uint8_t*)b.words, 2 * b.count, 64, VOCAB, &err), "case %zu is taken", i);
        check_msg(strstr(err.text, cases[i].want), "case %zu: %s", i, err.text);
    }
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        b = good;
        memcpy(b.words + 2 * headers[i].word, &headers[i].value, sizeof(int32_t));
        check_msg(!check_bytes((const uint8_t*)b.words, 2 * b.count, 64, VOCAB, &err), "header %zu is taken", i);
        check_msg(strstr(err.text, headers[i].want), "header %zu: %s", i, err.text);
    }
}

// Any value of any word: the file is rejected with one line or accepted, and nothing is read past its end.
static void test_every_word(void) {
    static const int values[] = {0, 1, 3, 4, 12, 100, 32768, 50256, 50257, 65534, 65535};
    Bytes good, b;
    Error err;
    int taken = 0, refused = 0;
    build(&good);
    for (size_t w = 512; w < good.count; w++) {
        for (size_t k = 0; k < sizeof(values) / sizeof(values[0]); k++) {
            b = good;
            b.words[w] = (uint16_t)values[k];
            bool ok = check_bytes((const uint8_t*)b.words, 2 * b.count, 64, VOCAB, &err);
            taken += ok;
            refused += !ok;
        }
    }
    check_msg(taken > 0 && refused > 0, "%d taken, %d refused", taken, refused);
}

// A file that is overwritten while it is open gives an error, not a wrong score.
static void test_changed_file(void) {
    enum { T = 12 };
    static int inputs[4 * T], targets[4 * T];
    Bytes b;
    Error err;
    EvalLoader e;
    build(&b);
    const char* path = write_bytes("changed.bin", &b);
    check(eval_open(&e, path, 4, T, VOCAB, &err));
    check(eval_next(&e, inputs, targets, &err));
    uint16_t label = 77;
    int fd = open(path, O_WRONLY);
    check(fd >= 0 && pwrite(fd, &label, 2, (off_t)(2 * (b.start[1] + 3))) == 2);
    if (fd >= 0) { close(fd); }
    check(!eval_next(&e, inputs, targets, &err));
    check_msg(strstr(err.text, "changed.bin: example 1 has 4 endings and label 77"), "%s", err.text);
    check(e.batch_examples == 0);
    eval_close(&e);
}

static const Test tests[] = {
    {"batches", "rows, targets and labels of every batch, three passes", test_batches},
    {"limits", "the longest ending and the largest token that fit, and one more", test_limits},
    {"open_errors", "one clear line for what cannot be opened", test_open_errors},
    {"score", "means, ties, losses that are no numbers", test_score},
    {"choices_batches", "2 to 5 choices: how many examples fit a batch, and their rows", test_choices_batches},
    {"choices_score", "by the loss and by the loss per character; ties, losses that are no numbers",
     test_choices_score},
    {"last_words", "those that are predicted, and the sum of the losses", test_last_words},
    {"version2_damaged", "each field that version 1 does not have", test_version2_damaged},
    {"truncated", "every length but the whole is refused", test_truncated},
    {"damaged", "each field of the header and of a question", test_damaged},
    {"every_word", "any word changed: no read past the end", test_every_word},
    {"changed_file", "a file that is written over while it is open", test_changed_file},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
