// Evaluation files from hostile bytes: clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_eval.c -o fuzz_eval -lm
//
// Every input is tried as a file, and once more as the questions after a header. The first four bytes choose B, T, the
// vocabulary and the kind of the questions, and may change a word of the header or cut off the end of the file. Where
// the flags before a question say so, it gets its true length and the other fixed words, because random bytes hardly
// ever contain them.
#include "../../../llmc/eval_loader.h"

// Parses a file, then reads and scores all of it.
static bool try_file(const uint8_t* data, size_t size, int B, int T, int vocab_size) {
    EvalLoader e;
    Error err;
    uint8_t* exact = (uint8_t*)malloc_check(size); // exact size, so that a read past the end is detected
    if (size > 0) { memcpy(exact, data, size); }
    memset(&e, 0, sizeof(e));
    strcpy(e.path.text, "input");
    e.file.data = exact;
    e.file.size = size;
    e.B = B, e.T = T, e.vocab_size = vocab_size;
    err.text[0] = '\0';
    bool ok = eval_check(&e, &err);
    if (ok) {
        size_t n = (size_t)B * (size_t)T;
        int *inputs = (int*)malloc_check(n * sizeof(int)), *targets = (int*)malloc_check(n * sizeof(int));
        float* losses = (float*)malloc_check(n * sizeof(float));
        e.rows = (EvalRow*)calloc_check((size_t)B, sizeof(EvalRow));
        e.questions = (EvalQuestion*)calloc_check((size_t)B, sizeof(EvalQuestion));
        while (eval_next(&e, inputs, targets, &err)) {
            for (size_t i = 0; i < n; i++) {
                require(inputs[i] >= 0 && inputs[i] < vocab_size && targets[i] >= 0 && targets[i] < vocab_size);
                losses[i] = (float)targets[i];
            }
            for (int i = 0; i < e.batch_examples; i++) {
                EvalQuestion q = e.questions[i];
                require(q.row >= 0 && q.num_endings >= 1 && q.row + q.num_endings <= B && q.label < q.num_endings);
                for (int r = q.row; r < q.row + q.num_endings; r++) {
                    require(e.rows[r].first >= 0 && e.rows[r].count > 0 && e.rows[r].first + e.rows[r].count <= T);
                    e.rows[r].most_likely = r % 2;
                }
            }
            eval_score(&e, losses);
        }
        require(err.text[0] == '\0' && e.num_scored == e.num_examples && e.num_correct <= e.num_scored);
        require(e.num_correct_norm <= e.num_scored);
        free(inputs);
        free(targets);
        free(losses);
    } else {
        require(strncmp(err.text, "input: ", 7) == 0 && !strchr(err.text, '\n'));
    }
    e.file.size = 0; // the file is not mapped
    eval_close(&e);
    free(exact);
    return ok;
}

static void put(uint8_t* at, size_t word) { at[0] = (uint8_t)word, at[1] = (uint8_t)(word >> 8); }

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try_file(data, size, 4, 64, 50257);
    if (size < 6) { return 0; }
    int B = 4 + data[0] % 9, T = 1 + data[1] % 100, vocab_size = data[2] & 1 ? 50257 : 65536;
    EvalKind kind = (EvalKind)(data[2] >> 1 & 3); // 3: none
    // per question: a byte that chooses what to repair, a byte of length, then the words
    enum { MOST = 1 << 17 };
    uint8_t* file = (uint8_t*)calloc_check(EVAL_HEADER_BYTES + MOST, 1);
    size_t at = EVAL_HEADER_BYTES, longest = 0;
    int32_t count = 0;
    for (size_t i = 4; i + 2 < size && at + 1024 < MOST;) {
        uint8_t mend = data[i];
        size_t words = 6 + data[i + 1], n = 2 * words;
        i += 2;
        for (size_t k = 0; k < n && i < size; k++) { file[at + k] = data[i++]; }
        if (mend & 1) { put(file + at, EVAL_START); }
        if (mend & 2) { put(file + at + 2, n); }
        if (mend & 4) { put(file + at + 4, (size_t)count); }
        if (mend & 8) { file[at + 6] &= 3, file[at + 7] = 0; }
        size_t parts = kind == EVAL_LLMC_CHOICES ? EVAL_ENDINGS : kind == EVAL_CHOICES ? 2 + (size_t)(mend >> 6) : 1;
        if (mend & 16) { put(file + at + 8, parts); }
        for (size_t part = 0, k = 5; (mend & 32) && part <= parts; part++) { // lengths that add up
            size_t before = part > 0 && kind != EVAL_LLMC_CHOICES ? 2 : 1;   // words in front of the tokens
            if (k + before > words) { break; }
            size_t left = words - k - before, tokens = part == parts ? left : file[at + 2 * k] % (left / 2 + 1);
            put(file + at + 2 * k, tokens);
            k += before + tokens;
        }
        if (n > longest) { longest = n; }
        at += n;
        count++;
    }
    int32_t header[5] = {EVAL_MAGIC, kind == EVAL_LLMC_CHOICES ? 1 : 2, count, (int32_t)longest, (int32_t)kind};
    if (data[2] >= 240) { header[data[2] % 5] += (int8_t)data[3]; }
    memcpy(file, header, sizeof(header));
    size_t cut = data[2] >= 200 && data[2] < 240 ? data[3] : 0;
    try_file(file, at > cut ? at - cut : 0, B, T, vocab_size);
    free(file);
    return 0;
}
