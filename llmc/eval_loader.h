/*
Evaluation files: contexts with one or several endings each. Makes batches for a forward pass and computes the scores. A
row of a batch is a context with one of its endings. C11, also compiles as C++17.

File format: a header of 256 int32 (20240522, version, number of examples, size in bytes of the longest example), then
per example these uint16: 65535, size in bytes, index, label (the right ending, from 0), number of endings, tokens of
the context, the context, then per ending its number of tokens and its tokens.

Version 1 is llm.c's format (dev/data/hellaswag.py, mmlu.py; here dev/data/hellaswag). It has 4 endings. Version 2 is
ours. In it, the fifth word of the header says what the examples are, and per ending the number of characters of its
text stands between the number of its tokens and its tokens.

    version  fifth word  endings  made by             score
    1        -           4        dev/data/hellaswag  the right ending has the lowest loss per token
    2        1           2 to 5   dev/data/arc        acc: it has the lowest loss; acc_norm: the lowest per character
    2        2           1        dev/data/lambada    acc: each of its tokens is the most likely one;
                                                      perplexity: exp(mean over the examples of its loss)

The loss of an ending is the sum over its tokens. The scores of version 2 are those of the LM Evaluation Harness for
arc_easy and lambada_openai, which also counts characters. Its acc_norm for HellaSwag is per character, too; llm.c's is
per token.

Sources: Zellers et al. 2019, arXiv:1905.07830 (HellaSwag); Clark et al. 2018, arXiv:1803.05457 (ARC); Paperno et al.
2016, arXiv:1606.06031 (LAMBADA); github.com/EleutherAI/lm-evaluation-harness.
*/
#ifndef LLMC_EVAL_LOADER_H
#define LLMC_EVAL_LOADER_H

#include "status.h"
#include "utils.h"
#include <math.h>

enum {
    EVAL_MAGIC = 20240522,
    EVAL_START = 65535,
    EVAL_ENDINGS = 4,     // in version 1
    EVAL_MAX_ENDINGS = 5, // in version 2
    EVAL_HEADER_BYTES = 1024
};

// What the examples are: 0 for version 1, else the fifth word of the header.
typedef enum { EVAL_LLMC_CHOICES, EVAL_CHOICES, EVAL_LAST_WORDS } EvalKind;

// Selects the losses in a row of the batch that count: those of the ending's tokens.
typedef struct {
    int first, count; // position of the ending's first target, number of the ending's targets
    int characters;   // of the ending's text; 0 in version 1
    bool most_likely; // EVAL_LAST_WORDS: all of the ending's tokens are the most likely ones; set before eval_score()
} EvalRow;

// An example of the batch.
typedef struct {
    int row, num_endings; // its first row, number of its rows
    int label;
} EvalQuestion;

typedef struct {
    Path path;
    MappedFile file;
    EvalKind kind;
    int B, T, vocab_size;
    size_t at;            // byte offset of the next example
    int longest_row;      // inputs per row that the longest example needs
    int64_t num_examples; // in the file
    int64_t num_cut;      // examples whose context is cut off at its beginning, because T is too small for it
    int64_t next;         // index of the next example
    int64_t num_scored;
    int64_t num_correct;      // version 1: by the loss per token; EVAL_CHOICES: by the loss; EVAL_LAST_WORDS: predicted
    int64_t num_correct_norm; // EVAL_CHOICES: by the loss per character
    double loss;              // EVAL_LAST_WORDS: the sum of the losses
    int batch_examples;       // number of examples in the current batch, set by eval_next()
    EvalRow* rows;            // (B)
    EvalQuestion* questions;  // (B), the first batch_examples are in the batch
} EvalLoader;

static inline unsigned eval_u16(const EvalLoader* e, size_t at) {
    return e->file.data[at] | (unsigned)e->file.data[at + 1] << 8;
}

// Shows on a terminal how many examples are scored; erases the line when all of them are.
static inline void eval_progress(const EvalLoader* e) {
    if (status_on()) {
        status_show("%lld of %lld examples of %s", (long long)e->num_scored, (long long)e->num_examples, e->path.text);
        return;
    }
    if (!isatty(STDERR_FILENO)) { return; }
    fprintf(stderr, "\r%lld of %lld examples%s", (long long)e->num_scored, (long long)e->num_examples,
            e->num_scored == e->num_examples ? "\r\033[K" : "");
}

static inline void eval_close(EvalLoader* e) {
    unmap_file(&e->file);
    free(e->rows);
    free(e->questions);
    memset(e, 0, sizeof(*e));
}

static inline void eval_reset(EvalLoader* e) {
    e->at = EVAL_HEADER_BYTES;
    e->next = e->num_scored = e->num_correct = e->num_correct_norm = 0;
    e->loss = 0.0;
    e->batch_examples = 0;
}

// An example of the file.
typedef struct {
    size_t end, context, endings[EVAL_MAX_ENDINGS]; // byte offsets in the file
    int label, num_endings, context_tokens, ending_tokens[EVAL_MAX_ENDINGS], characters[EVAL_MAX_ENDINGS];
} EvalExample;

// Parses the context (part -1) or an ending of example x at byte *at, and moves *at behind it.
static inline bool eval_parse_part(const EvalLoader* e, EvalExample* x, int part, size_t* at, Error* err) {
    const char* name = e->path.text;
    long long index = (long long)e->next;
    size_t words = part >= 0 && e->kind != EVAL_LLMC_CHOICES ? 2 : 1; // in front of the tokens
    if (*at + 2 * words > x->end) { return error_set(err, "%s: example %lld is damaged", name, index); }
    size_t tokens = eval_u16(e, *at);
    int characters = words == 2 ? (int)eval_u16(e, *at + 2) : 0;
    *at += 2 * words;
    if (tokens == 0 || tokens > (x->end - *at) / 2 || (words == 2 && characters == 0)) {
        return error_set(err, "%s: example %lld is damaged", name, index);
    }
    for (size_t j = 0; j < tokens; j++) {
        if (eval_u16(e, *at + 2 * j) >= (unsigned)e->vocab_size) {
            return error_set(err, "%s: example %lld has token %u, but the model's vocabulary has only %d", name, index,
                             eval_u16(e, *at + 2 * j), e->vocab_size);
        }
    }
    if (part < 0) {
        x->context = *at;
        x->context_tokens = (int)tokens;
    } else {
        x->endings[part] = *at;
        x->ending_tokens[part] = (int)tokens;
        x->characters[part] = characters;
        // an ending needs as many inputs as it has tokens: the last context token and all its tokens but the last
        if ((int)tokens > e->T) {
            return error_set(err, "%s: example %lld has an ending of %d tokens: too long for -t %d", name, index,
                             (int)tokens, e->T);
        }
    }
    *at += 2 * tokens;
    return true;
}

// Parses the example at byte e->at. Checks everything, so that a damaged file is refused and never read past its end.
static inline bool eval_parse(const EvalLoader* e, EvalExample* x, Error* err) {
    static const int fewest[] = {EVAL_ENDINGS, 2, 1},
                     most[] = {EVAL_ENDINGS, EVAL_MAX_ENDINGS, 1}; // endings, by EvalKind
    size_t size = e->file.size, at = e->at;
    const char* name = e->path.text;
    long long index = (long long)e->next;
    memset(x, 0, sizeof(*x));
    if (size - at < 12) { return error_set(err, "%s: is cut off in example %lld", name, index); }
    size_t bytes = eval_u16(e, at + 2);
    if (eval_u16(e, at) != EVAL_START || bytes % 2 != 0 || bytes < 12 || bytes > size - at) {
        return error_set(err, "%s: example %lld is damaged or cut off", name, index);
    }
    x->end = at + bytes;
    x->label = (int)eval_u16(e, at + 6);
    x->num_endings = (int)eval_u16(e, at + 8);
    if (eval_u16(e, at + 4) != (unsigned)(e->next & 0xFFFF)) {
        return error_set(err, "%s: example %lld says it is number %u", name, index, eval_u16(e, at + 4));
    }
    int low = fewest[e->kind], high = most[e->kind];
    if (x->num_endings < low || x->num_endings > high || x->label >= x->num_endings) {
        char want[32];
        snprintf(want, sizeof(want), low < high ? "%d to %d" : "%d", low, high);
        return error_set(err, "%s: example %lld has %d endings and label %d, want %s endings", name, index,
                         x->num_endings, x->label, want);
    }
    if (x->num_endings > e->B) {
        return error_set(err, "%s: example %lld has %d endings, more than the %d rows of a batch (-b)", name, index,
                         x->num_endings, e->B);
    }
    at += 10;
    for (int part = -1; part < x->num_endings; part++) {
        if (!eval_parse_part(e, x, part, &at, err)) { return false; }
    }
    return at == x->end || error_set(err, "%s: example %lld is damaged", name, index);
}

// Checks the header and every example of e->file. Sets kind, num_examples, num_cut and longest_row.
static inline bool eval_check(EvalLoader* e, Error* err) {
    int32_t header[5] = {0, 0, 0, 0, 0};
    size_t longest = 0;
    if (e->file.size >= EVAL_HEADER_BYTES) { memcpy(header, e->file.data, sizeof(header)); }
    if (header[0] != EVAL_MAGIC || (header[1] != 1 && header[1] != 2) || header[2] < 1) {
        return error_set(err,
                         "%s: not an evaluation file (magic %d, version %d, %d examples); dev/data/hellaswag, "
                         "lambada and arc make them",
                         e->path.text, header[0], header[1], header[2]);
    }
    if (header[1] == 2 && header[4] != EVAL_CHOICES && header[4] != EVAL_LAST_WORDS) {
        return error_set(err, "%s: holds examples of kind %d, want %d (choices) or %d (last words)", e->path.text,
                         header[4], (int)EVAL_CHOICES, (int)EVAL_LAST_WORDS);
    }
    e->kind = header[1] == 1 ? EVAL_LLMC_CHOICES : (EvalKind)header[4];
    e->num_examples = header[2];
    for (eval_reset(e); e->next < e->num_examples; e->next++) {
        EvalExample x;
        if (!eval_parse(e, &x, err)) { return false; }
        if (x.end - e->at > longest) { longest = x.end - e->at; }
        int longest_ending = 0;
        for (int i = 0; i < x.num_endings; i++) {
            if (x.ending_tokens[i] > longest_ending) { longest_ending = x.ending_tokens[i]; }
        }
        int row = x.context_tokens + longest_ending - 1; // the last token is only a target
        if (row > e->longest_row) { e->longest_row = row; }
        e->num_cut += row > e->T;
        e->at = x.end;
    }
    if (e->at != e->file.size) {
        return error_set(err, "%s: %zu bytes after the last example", e->path.text, e->file.size - e->at);
    }
    if (header[3] != (int32_t)longest) { // llm.c's reader allocates this many bytes
        return error_set(err, "%s: the longest example has %zu bytes, but the header says %d", e->path.text, longest,
                         header[3]);
    }
    eval_reset(e);
    return true;
}

// Whether the file is an evaluation file. Another file, or one that cannot be read, is not.
static inline bool is_eval_file(const char* path) {
    MappedFile file;
    int32_t magic = 0;
    if (!map_file(&file, path, NULL)) { return false; }
    if (file.size >= sizeof(magic)) { memcpy(&magic, file.data, sizeof(magic)); }
    unmap_file(&file);
    return magic == EVAL_MAGIC;
}

// Opens a file for batches of B x T tokens, B >= 4, and checks every example.
static inline bool eval_open(EvalLoader* e, const char* path, int B, int T, int vocab_size, Error* err) {
    memset(e, 0, sizeof(*e));
    if (B < EVAL_ENDINGS) {
        return error_set(err, "%s: a question takes %d rows of a batch, but -b is only %d", path, (int)EVAL_ENDINGS, B);
    }
    if (T < 1) { return error_set(err, "%s: -t is %d, want at least 1", path, T); }
    if (!map_file(&e->file, path, err)) { return false; }
    path_set(&e->path, "%s", path);
    e->B = B, e->T = T, e->vocab_size = vocab_size;
    if (!eval_check(e, err)) {
        eval_close(e);
        return false;
    }
    e->rows = (EvalRow*)calloc_check((size_t)B, sizeof(EvalRow));
    e->questions = (EvalQuestion*)calloc_check((size_t)B, sizeof(EvalQuestion));
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
    e->questions = (EvalQuestion*)realloc_check(e->questions, (size_t)e->B * sizeof(EvalQuestion));
}

// Fills row `row` of inputs and targets (B,T) with the context of x and its ending i. A context that is too long for T
// is cut off at its beginning.
static inline void eval_fill_row(EvalLoader* e, const EvalExample* x, int i, size_t row, int* inputs, int* targets) {
    size_t T = (size_t)e->T;
    // context tokens to cut off; a row holds T + 1 tokens, because the last one is only a target
    int skip = x->context_tokens + x->ending_tokens[i] - (e->T + 1);
    skip = skip > 0 ? skip : 0;
    int context = x->context_tokens - skip, n = context + x->ending_tokens[i];
    for (int j = 0; j < n; j++) {
        size_t byte = j < context ? x->context + 2 * (size_t)(skip + j) : x->endings[i] + 2 * (size_t)(j - context);
        int token = (int)eval_u16(e, byte);
        if (j < n - 1) { inputs[row * T + (size_t)j] = token; }
        if (j > 0) { targets[row * T + (size_t)j - 1] = token; }
    }
    EvalRow r = {context - 1, x->ending_tokens[i], x->characters[i], false};
    e->rows[row] = r;
}

// Fills inputs and targets (B,T) with the next batch; unused positions are 0. Returns false at the end of the file, and
// then err is empty. Also returns false if the file has changed since it was opened, and then err holds the reason.
static inline bool eval_next(EvalLoader* e, int* inputs, int* targets, Error* err) {
    size_t T = (size_t)e->T;
    if (err) { err->text[0] = '\0'; }
    memset(inputs, 0, (size_t)e->B * T * sizeof(int));
    memset(targets, 0, (size_t)e->B * T * sizeof(int));
    e->batch_examples = 0;
    for (int row = 0; e->next < e->num_examples; e->next++) {
        EvalExample x;
        if (!eval_parse(e, &x, err)) {
            e->batch_examples = 0; // eval_score() must not score an incomplete batch
            return false;
        }
        if (row + x.num_endings > e->B) { break; }
        EvalQuestion q = {row, x.num_endings, x.label};
        e->questions[e->batch_examples++] = q;
        for (int i = 0; i < x.num_endings; i++) { eval_fill_row(e, &x, i, (size_t)row++, inputs, targets); }
        e->at = x.end;
    }
    return e->batch_examples > 0;
}

// The first of the scores (n) that is the least; NaN never is. -1: there is none.
static inline int eval_least(const double* scores, int n) {
    double least = INFINITY;
    int best = -1;
    for (int i = 0; i < n; i++) {
        if (scores[i] < least) {
            least = scores[i];
            best = i;
        }
    }
    return best;
}

// Scores the batch of the last eval_next(), given the losses (B,T) of its targets and, for EVAL_LAST_WORDS, the rows'
// most_likely. The first of equally good endings wins; an ending whose loss is NaN never wins.
static inline void eval_score(EvalLoader* e, const float* losses) {
    for (int i = 0; i < e->batch_examples; i++) {
        EvalQuestion q = e->questions[i];
        double sums[EVAL_MAX_ENDINGS],
            means[EVAL_MAX_ENDINGS]; // means: per token in version 1, per character in version 2
        for (int k = 0; k < q.num_endings; k++) {
            const EvalRow* row = &e->rows[q.row + k];
            const float* loss = losses + (size_t)(q.row + k) * (size_t)e->T + row->first;
            sums[k] = 0.0;
            for (int j = 0; j < row->count; j++) { sums[k] += loss[j]; }
            means[k] = sums[k] / (e->kind == EVAL_LLMC_CHOICES ? row->count : row->characters);
        }
        switch (e->kind) {
        case EVAL_LLMC_CHOICES:
            e->num_correct += eval_least(means, q.num_endings) == q.label;
            break;
        case EVAL_CHOICES:
            e->num_correct += eval_least(sums, q.num_endings) == q.label;
            e->num_correct_norm += eval_least(means, q.num_endings) == q.label;
            break;
        case EVAL_LAST_WORDS:
            e->num_correct += e->rows[q.row].most_likely && !isnan(sums[0]);
            e->loss += sums[0];
            break;
        }
        e->num_scored++;
    }
    e->batch_examples = 0;
}

#endif
