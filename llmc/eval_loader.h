/*
Multiple-choice questions such as HellaSwag's, from files that llm.c's dev/data/hellaswag.py or our dev/data/hellaswag
writes: makes batches for a forward pass and computes the score. A row of the batch is the context with one of its
endings. The model chooses the ending whose tokens have the lowest mean loss. C11, also compiles as C++17.

File format: a header of 256 int32 (20240522, 1, number of examples, size in bytes of the longest example), then per
example these uint16: 65535, size in bytes, index, label, number of endings, tokens of the context, the context, then
per ending its number of tokens and its tokens.

Source: Zellers et al. 2019, arXiv:1905.07830. Scored like acc_norm of the LM Evaluation Harness, but normalized by the
number of tokens.
*/
#ifndef LLMC_EVAL_LOADER_H
#define LLMC_EVAL_LOADER_H

#include "utils.h"
#include <math.h>

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_START = 65535, EVAL_ENDINGS = 4, EVAL_HEADER_BYTES = 1024 };

// Selects the losses in a row of the batch that count: those of the ending's tokens.
typedef struct {
    int first, count; // position of the ending's first target, number of the ending's targets
} EvalRow;

typedef struct {
    char path[4096];
    MappedFile file;
    int B, T, vocab_size;
    size_t at;            // byte offset of the next example
    int longest_row;      // inputs per row that the longest example needs
    int64_t num_examples; // in the file
    int64_t next;         // index of the next example
    int64_t num_scored, num_correct;
    int batch_examples; // number of examples in the current batch, set by eval_next()
    EvalRow* rows;      // (B)
    int* labels;        // (B), one per example of the batch
} EvalLoader;

static inline unsigned eval_u16(const EvalLoader* e, size_t at) {
    return e->file.data[at] | (unsigned)e->file.data[at + 1] << 8;
}

// Shows on a terminal how many questions are scored; erases the line when all of them are.
static inline void eval_progress(const EvalLoader* e) {
    if (!isatty(STDERR_FILENO)) { return; }
    fprintf(stderr, "\rHellaSwag: %lld of %lld%s", (long long)e->num_scored, (long long)e->num_examples,
            e->num_scored == e->num_examples ? "\r\033[K" : "");
}

static inline void eval_close(EvalLoader* e) {
    unmap_file(&e->file);
    free(e->rows);
    free(e->labels);
    memset(e, 0, sizeof(*e));
}

static inline void eval_reset(EvalLoader* e) {
    e->at = EVAL_HEADER_BYTES;
    e->next = e->num_scored = e->num_correct = 0;
    e->batch_examples = 0;
}

// An example of the file.
typedef struct {
    size_t end, context, endings[EVAL_ENDINGS]; // byte offsets in the file
    int label, context_tokens, ending_tokens[EVAL_ENDINGS];
} EvalExample;

// Parses the example at byte e->at. Checks everything, so that a damaged file is refused and never read past its end.
static inline bool eval_parse(const EvalLoader* e, EvalExample* x, Error* err) {
    size_t size = e->file.size, at = e->at;
    const char* name = e->path;
    long long index = (long long)e->next;
    memset(x, 0, sizeof(*x));
    if (size - at < 12) { return error_set(err, "%s: is cut off in example %lld", name, index); }
    size_t bytes = eval_u16(e, at + 2);
    if (eval_u16(e, at) != EVAL_START || bytes % 2 != 0 || bytes < 12 || bytes > size - at) {
        return error_set(err, "%s: example %lld is damaged or cut off", name, index);
    }
    x->end = at + bytes;
    x->label = (int)eval_u16(e, at + 6);
    if (eval_u16(e, at + 4) != (unsigned)(e->next & 0xFFFF)) {
        return error_set(err, "%s: example %lld says it is number %u", name, index, eval_u16(e, at + 4));
    }
    if (eval_u16(e, at + 8) != EVAL_ENDINGS || x->label >= EVAL_ENDINGS) {
        return error_set(err, "%s: example %lld has %u endings and label %d, want %d endings", name, index,
                         eval_u16(e, at + 8), x->label, (int)EVAL_ENDINGS);
    }
    at += 10;
    for (int i = -1; i < EVAL_ENDINGS; i++) { // the context, then the endings
        size_t tokens = x->end - at >= 2 ? eval_u16(e, at) : 0;
        at += 2;
        if (tokens == 0 || at > x->end || tokens > (x->end - at) / 2) {
            return error_set(err, "%s: example %lld is damaged", name, index);
        }
        for (size_t j = 0; j < tokens; j++) {
            if (eval_u16(e, at + 2 * j) >= (unsigned)e->vocab_size) {
                return error_set(err, "%s: example %lld has token %u, but the model's vocabulary has only %d", name,
                                 index, eval_u16(e, at + 2 * j), e->vocab_size);
            }
        }
        if (i < 0) {
            x->context = at;
            x->context_tokens = (int)tokens;
        } else {
            x->endings[i] = at;
            x->ending_tokens[i] = (int)tokens;
            // an ending needs as many inputs as it has tokens: the last context token and all its tokens but the last
            if ((int)tokens > e->T) {
                return error_set(err, "%s: example %lld has an ending of %d tokens: too long for -t %d", name, index,
                                 (int)tokens, e->T);
            }
        }
        at += 2 * tokens;
    }
    return at == x->end || error_set(err, "%s: example %lld is damaged", name, index);
}

// Checks the header and every example of e->file. Sets num_examples and longest_row.
static inline bool eval_check(EvalLoader* e, Error* err) {
    int32_t header[4] = {0, 0, 0, 0};
    size_t longest = 0;
    if (e->file.size >= EVAL_HEADER_BYTES) { memcpy(header, e->file.data, sizeof(header)); }
    if (header[0] != EVAL_MAGIC || header[1] != EVAL_VERSION || header[2] < 1) {
        return error_set(err,
                         "%s: not a file of multiple choices (magic %d, version %d, %d examples); "
                         "dev/data/hellaswag makes one",
                         e->path, header[0], header[1], header[2]);
    }
    e->num_examples = header[2];
    for (eval_reset(e); e->next < e->num_examples; e->next++) {
        EvalExample x;
        if (!eval_parse(e, &x, err)) { return false; }
        if (x.end - e->at > longest) { longest = x.end - e->at; }
        for (int i = 0; i < EVAL_ENDINGS; i++) {
            int row = x.context_tokens + x.ending_tokens[i] - 1; // the last token is only a target
            if (row > e->longest_row) { e->longest_row = row; }
        }
        e->at = x.end;
    }
    if (e->at != e->file.size) {
        return error_set(err, "%s: %zu bytes after the last example", e->path, e->file.size - e->at);
    }
    if (header[3] != (int32_t)longest) { // llm.c's reader allocates this many bytes
        return error_set(err, "%s: the longest example has %zu bytes, but the header says %d", e->path, longest,
                         header[3]);
    }
    eval_reset(e);
    return true;
}

// Opens a file for batches of B x T tokens, B >= 4, and checks every example.
static inline bool eval_open(EvalLoader* e, const char* path, int B, int T, int vocab_size, Error* err) {
    memset(e, 0, sizeof(*e));
    if (B < EVAL_ENDINGS) {
        return error_set(err, "%s: a question takes %d rows of a batch, but -b is only %d", path, (int)EVAL_ENDINGS, B);
    }
    if (T < 1) { return error_set(err, "%s: -t is %d, want at least 1", path, T); }
    if (!map_file(&e->file, path, err)) { return false; }
    snprintf(e->path, sizeof(e->path), "%s", path);
    e->B = B, e->T = T, e->vocab_size = vocab_size;
    if (!eval_check(e, err)) {
        eval_close(e);
        return false;
    }
    e->rows = (EvalRow*)calloc_check((size_t)B, sizeof(EvalRow));
    e->labels = (int*)calloc_check((size_t)B, sizeof(int));
    return true;
}

// Reduces e->T to the length that the longest example needs, rounded up to a multiple of 64, and increases e->B to keep
// B * T. For HellaSwag such a batch holds five times as many questions as one with rows of 1024 tokens. Must be called
// right after eval_open().
static inline void eval_fit(EvalLoader* e) {
    int T = (e->longest_row + 63) / 64 * 64;
    if (T >= e->T) { return; }
    e->B = (int)((int64_t)e->B * e->T / T);
    e->T = T;
    e->rows = (EvalRow*)realloc_check(e->rows, (size_t)e->B * sizeof(EvalRow));
    e->labels = (int*)realloc_check(e->labels, (size_t)e->B * sizeof(int));
}

// Fills inputs and targets (B,T) with the next batch; unused positions are 0. A context that is too long for T is cut
// off at its beginning. Returns false at the end of the file, and then err is empty. Also returns false if the file has
// changed since it was opened, and then err holds the reason.
static inline bool eval_next(EvalLoader* e, int* inputs, int* targets, Error* err) {
    size_t T = (size_t)e->T;
    if (err) { err->text[0] = '\0'; }
    memset(inputs, 0, (size_t)e->B * T * sizeof(int));
    memset(targets, 0, (size_t)e->B * T * sizeof(int));
    for (e->batch_examples = 0; e->batch_examples < e->B / EVAL_ENDINGS && e->next < e->num_examples;
         e->batch_examples++, e->next++) {
        EvalExample x;
        if (!eval_parse(e, &x, err)) {
            e->batch_examples = 0; // eval_score() must not score an incomplete batch
            return false;
        }
        for (int i = 0; i < EVAL_ENDINGS; i++) {
            size_t row = (size_t)e->batch_examples * EVAL_ENDINGS + (size_t)i;
            // context tokens to cut off; a row holds T + 1 tokens, because the last one is only a target
            int skip = x.context_tokens + x.ending_tokens[i] - (e->T + 1);
            skip = skip > 0 ? skip : 0;
            int context = x.context_tokens - skip, n = context + x.ending_tokens[i];
            for (int j = 0; j < n; j++) {
                size_t byte =
                    j < context ? x.context + 2 * (size_t)(skip + j) : x.endings[i] + 2 * (size_t)(j - context);
                int token = (int)eval_u16(e, byte);
                if (j < n - 1) { inputs[row * T + (size_t)j] = token; }
                if (j > 0) { targets[row * T + (size_t)j - 1] = token; }
            }
            EvalRow r = {context - 1, x.ending_tokens[i]};
            e->rows[row] = r;
        }
        e->labels[e->batch_examples] = x.label;
        e->at = x.end;
    }
    return e->batch_examples > 0;
}

// Scores the batch of the last eval_next(), given the losses (B,T) of its targets. The first of equally good endings
// wins; an ending whose loss is NaN never wins.
static inline void eval_score(EvalLoader* e, const float* losses) {
    for (int x = 0; x < e->batch_examples; x++) {
        double least = INFINITY;
        int best = -1;
        for (int i = 0; i < EVAL_ENDINGS; i++) {
            size_t row = (size_t)x * EVAL_ENDINGS + (size_t)i;
            double sum = 0.0;
            for (int j = 0; j < e->rows[row].count; j++) {
                sum += losses[row * (size_t)e->T + (size_t)(e->rows[row].first + j)];
            }
            double mean = sum / e->rows[row].count;
            if (mean < least) {
                least = mean;
                best = i;
            }
        }
        e->num_correct += best == e->labels[x];
        e->num_scored++;
    }
    e->batch_examples = 0;
}

#endif
