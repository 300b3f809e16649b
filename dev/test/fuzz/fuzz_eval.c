// Evaluation files from hostile bytes: clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_eval.c -o fuzz_eval -lm
//
// Every input is tried as a file, and once more as the questions after a header. The first four bytes choose B, T and
// the vocabulary, and may change a word of the header or cut off the end of the file. Where the flags before a question
// say so, it gets its true length and the other fixed words, because random bytes hardly ever contain them.
#include "../../../llmc/eval_loader.h"

// Parses a file, then reads and scores all of it.
static bool try_file(const uint8_t* data, size_t size, int B, int T, int vocab_size) {
    EvalLoader e;
    Error err;
    uint8_t* exact = (uint8_t*)malloc_check(size); // exact size, so that a read past the end is detected
    if (size > 0) { memcpy(exact, data, size); }
    memset(&e, 0, sizeof(e));
    strcpy(e.path, "input");
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
        e.labels = (int*)calloc_check((size_t)B, sizeof(int));
        while (eval_next(&e, inputs, targets, &err)) {
            for (size_t i = 0; i < n; i++) {
                require(inputs[i] >= 0 && inputs[i] < vocab_size && targets[i] >= 0 && targets[i] < vocab_size);
                losses[i] = (float)targets[i];
            }
            for (int r = 0; r < EVAL_ENDINGS * e.batch_examples; r++) {
                require(e.rows[r].first >= 0 && e.rows[r].count > 0 && e.rows[r].first + e.rows[r].count <= T);
            }
            eval_score(&e, losses);
        }
        require(err.text[0] == '\0' && e.num_scored == e.num_examples && e.num_correct <= e.num_scored);
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
        if (mend & 16) { put(file + at + 8, EVAL_ENDINGS); }
        for (size_t part = 0, k = 5; (mend & 32) && part < 5 && k < words; part++) { // lengths that add up
            size_t left = words - k - 1, tokens = part == 4 ? left : file[at + 2 * k] % (left / 2 + 1);
            put(file + at + 2 * k, tokens);
            k += 1 + tokens;
        }
        if (n > longest) { longest = n; }
        at += n;
        count++;
    }
    int32_t header[4] = {EVAL_MAGIC, EVAL_VERSION, count, (int32_t)longest};
    if (data[2] >= 240) { header[data[2] % 4] += (int8_t)data[3]; }
    memcpy(file, header, sizeof(header));
    size_t cut = data[2] >= 200 && data[2] < 240 ? data[3] : 0;
    try_file(file, at > cut ? at - cut : 0, B, T, vocab_size);
    free(file);
    return 0;
}
