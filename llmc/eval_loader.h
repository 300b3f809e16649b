/*
Multiple-choice questions, as llm.c's dev/data/hellaswag.py writes them and our dev/data/hellaswag: batches of rows for
a forward pass, and the score. An ending is as good as the mean loss of its own tokens after the context; the lowest wins.
C11, also compiles as C++17.

File: 256 int32 (20240522, 1, examples, bytes of the longest), then for each example uint16: 65535, its bytes, its index,
label, number of endings, length of the context, the context, then for each ending its length and its tokens.

Source: Zellers et al. 2019, arXiv:1905.07830; scored as the LM Evaluation Harness's acc_norm is, by tokens.
*/
#ifndef LLMC_EVAL_LOADER_H
#define LLMC_EVAL_LOADER_H

#include "utils.h"
#include <math.h>

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_START = 65535, EVAL_ENDINGS = 4, EVAL_HEADER_BYTES = 1024 };

// One row of a batch: which losses count.
typedef struct {
    int first, count; // targets of the ending
} EvalRow;

typedef struct {
    char path[4096];
    MappedFile file;
    int B, T, vocab_size;
    size_t at;            // byte of the next example
    int longest_row;      // tokens that the longest example needs in a row
    int64_t num_examples; // in the file
    int64_t next;         // index of the next example
    int64_t num_scored, num_correct;
    int batch_examples; // in the batch that eval_next gave
    EvalRow* rows;      // (B)
    int* labels;        // (B / EVAL_ENDINGS)
} EvalLoader;

static inline unsigned eval_u16(const EvalLoader* e, size_t at) {
    return e->file.data[at] | (unsigned)e->file.data[at + 1] << 8;
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

// One example at byte e->at: its end, its label, its context and its endings as (byte, tokens). All is checked, so that a
// damaged file is refused and never read past its end.
typedef struct {
    size_t end, context, endings[EVAL_ENDINGS];
    int label, context_tokens, ending_tokens[EVAL_ENDINGS];
} EvalExample;

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
                return error_set(err, "%s: example %lld has token %u, the model's vocabulary is %d", name, index,
                                 eval_u16(e, at + 2 * j), e->vocab_size);
            }
        }
        if (i < 0) {
            x->context = at;
            x->context_tokens = (int)tokens;
        } else {
            x->endings[i] = at;
            x->ending_tokens[i] = (int)tokens;
            if ((int)tokens > e->T) { // the last token of the context predicts the first of the ending
                return error_set(err, "%s: example %lld has an ending of %d tokens: too long for -t %d", name, index,
                                 (int)tokens, e->T);
            }
        }
        at += 2 * tokens;
    }
    return at == x->end || error_set(err, "%s: example %lld is damaged", name, index);
}

// The header and every example of e->file.
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
        return error_set(err, "%s: %zu bytes behind the last example", e->path, e->file.size - e->at);
    }
    if (header[3] != (int32_t)longest) { // llm.c's reader makes its buffer of that size
        return error_set(err, "%s: the longest example has %zu bytes, the header says %d", e->path, longest, header[3]);
    }
    eval_reset(e);
    return true;
}

// Opens a file for batches of B x T tokens, B >= 4, and looks at every example of it.
static inline bool eval_open(EvalLoader* e, const char* path, int B, int T, int vocab_size, Error* err) {
    memset(e, 0, sizeof(*e));
    if (B < EVAL_ENDINGS) {
        return error_set(err, "%s: a question takes %d rows of a batch, -b is only %d", path, (int)EVAL_ENDINGS, B);
    }
    if (T < 1) { return error_set(err, "%s: -t is %d, want 1 at least", path, T); }
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

// Shortens the rows, e->T, to what the longest example needs, in steps of 64 tokens, and takes more of them, e->B, at once:
// B * T tokens hold five times as many questions of HellaSwag as rows of 1024 do. Right after eval_open().
static inline void eval_fit(EvalLoader* e) {
    int T = (e->longest_row + 63) / 64 * 64;
    if (T >= e->T) { return; }
    e->B = (int)((int64_t)e->B * e->T / T);
    e->T = T;
    e->rows = (EvalRow*)realloc_check(e->rows, (size_t)e->B * sizeof(EvalRow));
    e->labels = (int*)realloc_check(e->labels, (size_t)e->B * sizeof(int));
}

// The next batch: inputs, targets (B,T), 0 where nothing counts. A context too long for T loses its beginning. False at
// the end of the file, with err empty, and if the file has been changed since it was opened, with err filled.
static inline bool eval_next(EvalLoader* e, int* inputs, int* targets, Error* err) {
    size_t T = (size_t)e->T;
    if (err) { err->text[0] = '\0'; }
    memset(inputs, 0, (size_t)e->B * T * sizeof(int));
    memset(targets, 0, (size_t)e->B * T * sizeof(int));
    for (e->batch_examples = 0; e->batch_examples < e->B / EVAL_ENDINGS && e->next < e->num_examples;
         e->batch_examples++, e->next++) {
        EvalExample x;
        if (!eval_parse(e, &x, err)) {
            e->batch_examples = 0; // nothing to score
            return false;
        }
        for (int i = 0; i < EVAL_ENDINGS; i++) {
            size_t row = (size_t)e->batch_examples * EVAL_ENDINGS + (size_t)i;
            int skip = x.context_tokens + x.ending_tokens[i] - (e->T + 1); // the last token is only a target
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

// Scores the batch that eval_next gave, by the losses (B,T) of its targets. Of equal endings the first wins; a loss that
// is not a number never does.
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
