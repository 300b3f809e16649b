/*
--eval: the mean loss and the perplexity of a model on token shards or text, and its scores on evaluation files
(eval_loader.h): multiple choices, last words. --hellaswag: its accuracy on multiple-choice questions, in training, too.
Both programs use this header; they supply the functions that compute losses and find the most likely token.

The loss on shards or text is computed by a sliding window: row k of the batches has the T inputs from token k * stride
on, and of its losses those count that no earlier row has computed. So every token but the first is predicted exactly
once, from at least T - stride + 1 tokens before it, as far as there are so many. Without --stride, stride is T: the
rows do not overlap, and a token is predicted from 1 to T tokens. A row that is shorter, the last one, counts with its
own tokens only.

A row of T inputs has T + 1 tokens, as the last one is only predicted. The perplexity of fixed-length models in the
documentation of transformers counts this token as part of the window: its max_length is T + 1.
*/
#ifndef LLMC_EVALUATION_H
#define LLMC_EVALUATION_H

#include "dataloader.h"
#include "eval_loader.h"
#include "flags.h"
#include "gpt2.h"
#include "logger.h"
#include "prompts.h"
#include "rand.h"
#include "ranks.h"
#include "status.h"
#include "stop.h"
#include "text_input.h"
#include "tokenizer.h"
#include "utils.h"
#include <glob.h>
#include <math.h>

// Computes losses (B,T) of targets (B,T) after inputs (B,T). model: the program's own.
typedef void (*ComputeLosses)(void* model, float* losses, const int* inputs, const int* targets, int B, int T);

// Returns the token with the largest logit at position i, 0 <= i < B*T, of the batch whose losses were computed last;
// the first of equals. model: the program's own.
typedef int (*MostLikelyToken)(void* model, size_t i);

// The program's part of an evaluation.
typedef struct {
    ComputeLosses compute;
    MostLikelyToken most_likely;
    void* model;
    int B, T;              // rows per batch, tokens per row
    int *inputs, *targets; // (B,T)
    float* losses;         // (B,T)
} Evaluator;

// most_likely: not needed, and may be NULL, for version 1 of the evaluation files.
static inline void evaluator_open(Evaluator* e, ComputeLosses compute, MostLikelyToken most_likely, void* model, int B,
                                  int T) {
    size_t BT = (size_t)B * (size_t)T;
    e->compute = compute;
    e->most_likely = most_likely;
    e->model = model;
    e->B = B;
    e->T = T;
    e->inputs = (int*)malloc_check(BT * sizeof(int));
    e->targets = (int*)malloc_check(BT * sizeof(int));
    e->losses = (float*)malloc_check(BT * sizeof(float));
}

static inline void evaluator_close(Evaluator* e) {
    free(e->inputs);
    free(e->targets);
    free(e->losses);
}

// ---- results as JSON (--json) -----------------------------------------------------------
//
// "type" of a result, and its members besides "model", "file" and "time_ms" (milliseconds); *_stderr are standard errors:
//     loss        tokens, loss, loss_stderr, perplexity, bits_per_byte (null: the text is not known), seq_len, stride;
//                 of several files together: files, their number, instead of file
//     choices     examples, cut (contexts that lose their beginning), acc, acc_stderr, acc_norm, acc_norm_stderr; version 1: acc_per_token, acc_per_token_stderr
//     last_words  examples, cut, acc, acc_stderr, perplexity

// Begins a line on stdout. type: of the result. path: of the file, or NULL for several.
static inline void result_begin(const char* type, const char* path) {
    char* text = (char*)malloc_check(6 * (strlen(args->model) + (path ? strlen(path) : 0)) + 1);
    size_t n = log_json_escape(text, args->model, strlen(args->model));
    printf("{\"type\":\"%s\",\"model\":\"%.*s\"", type, (int)n, text);
    if (path) {
        n = log_json_escape(text, path, strlen(path));
        printf(",\"file\":\"%.*s\"", (int)n, text);
    }
    free(text);
}

static inline void result_number(const char* name, double v) { // NaN becomes null
    char number[32];
    log_json_number(number, sizeof(number), v);
    printf(",\"%s\":%s", name, number);
}

static inline void result_end(double ms) {
    result_number("time_ms", ms);
    printf("}\n");
}

// ---- loss and perplexity ----------------------------------------------------------------

// The tokens of a file: of a shard, or of an encoded text.
typedef struct {
    const char* path;
    MappedFile shard;  // if it is a shard
    TokenBuffer text;  // if it is text
    size_t num_tokens; // in either case
    size_t text_bytes; // bytes of text that tokens 1 and up stand for; 0: unknown
} EvalTokens;

// Adds a document of n bytes, behind the end-of-text token if the vocabulary has one.
static inline void eval_add_text(EvalTokens* t, const Tokenizer* tokenizer, const char* text, size_t n) {
    tokenizer_encode_document(tokenizer, text, n, tokenizer->eot_id >= 0, args->special, &t->text);
    t->num_tokens = t->text.count;
}

// Adds the member "text" of each object of JSON lines or of an array.
static inline bool eval_add_json(EvalTokens* t, const Tokenizer* tokenizer, JsonItems* items, TextNotes* notes,
                                 Error* err) {
    const char* s;
    err->text[0] = '\0';
    for (size_t n; json_items_next(items, &s, &n, t->path, err);) {
        char where[1000];
        JsonDoc doc;
        const JsonValue* v;
        json_items_where(items, t->path, where, sizeof(where));
        if (!json_parse_lenient(&doc, s, n, where, &notes->json, err)) { return false; }
        const char* advice = ": dev/data/tokenize --field NAME makes shards of another";
        bool ok = json_want_text(doc.root, "text", &v, where, advice, err);
        if (ok && v->length > 0) { eval_add_text(t, tokenizer, v->string, v->length); }
        json_free(&doc);
        if (!ok) { return false; }
    }
    return !err->text[0];
}

// Fails if a text cannot be encoded with this vocabulary, or with none.
static inline bool eval_can_encode(const char* path, const Tokenizer* tokenizer, Error* err) {
    return (tokenizer && tokenizer->can_encode) ||
           error_set(err, "%s: is text, and there is no vocabulary to encode it: give one with --tokenizer", path);
}

// Encodes a text of n bytes as dev/data/tokenize does it: as one document or, if it is JSON lines or an array, as those of
// its objects.
static inline bool eval_encode(EvalTokens* t, const Tokenizer* tokenizer, const char* text, size_t n, Error* err) {
    size_t mark;
    char names[240] = "";
    TextNotes notes;
    memset(&notes, 0, sizeof(notes));
    if (!text_check(text, n, t->path, " > TEXT", &mark, err)) { return false; }
    if (!eval_can_encode(t->path, tokenizer, err)) { return false; }
    text += mark;
    n -= mark;
    TextFormat format =
        has_json_lines_name(t->path) ? json_form(text, n) : text_format(text, n, true, "text", names, sizeof(names));
    text_count_odd(&notes, text, n);
    if (names[0]) {
        print_line(stderr, "note: %s: JSON objects without \"text\" are scored as they are, the members are: %s",
                   t->path, names);
    }
    if (format == TEXT_PLAIN) {
        const FileKind* raw = text_kind(t->path, text, n);
        if (raw && !names[0]) { text_kind_print(raw, t->path, 1); }
        eval_add_text(t, tokenizer, text, n);
    } else {
        JsonItems items = json_items(text, n, format);
        if (!eval_add_json(t, tokenizer, &items, &notes, err)) { return false; }
    }
    text_notes_print(&notes, t->path);
    tokenizer_note_spelled(tokenizer, t->path, t->text.spelled, t->text.spelled_id);
    return true;
}

// Checks that the vocabulary beside a shard, if there is one, is the model's.
static inline bool eval_check_vocabulary(const char* path, const Tokenizer* tokenizer, Error* err) {
    Tokenizer own;
    char what[200];
    if (!tokenizer) { return true; }
    if (!find_tokenizer(&own, directory_of(path).text, err)) { return !err->text[0]; }
    bool same = tokenizer_same(tokenizer, &own, what, sizeof(what));
    tokenizer_free(&own);
    return same || error_set(err,
                             "%s: was made with another vocabulary than the model's (%s): make it with "
                             "dev/data/tokenize -t and the model's vocabulary",
                             path, what);
}

// Opens a shard or a text file. tokenizer: NULL if there is none.
static inline bool eval_tokens_open(EvalTokens* t, const char* path, const Tokenizer* tokenizer, int vocab_size,
                                    Error* err) {
    MappedFile file;
    int32_t magic = 0;
    memset(t, 0, sizeof(*t));
    t->path = path;
    if (!map_file(&file, path, err)) { return false; }
    if (file.size >= sizeof(magic)) { memcpy(&magic, file.data, sizeof(magic)); }
    bool text = file.size > 0 && magic != SHARD_MAGIC, ok = true;
    if (!text) {
        ok = eval_check_vocabulary(path, tokenizer, err) &&
             shard_parse(file.data, file.size, path, vocab_size, &t->num_tokens, err);
        t->shard = file;
    } else {
        ok = eval_encode(t, tokenizer, (const char*)file.data, file.size, err);
    }
    for (size_t i = 1; ok && tokenizer && i < t->num_tokens; i++) {
        size_t n = 0;
        int id = text ? (int)t->text.ids[i] : shard_token(file.data, i);
        tokenizer_decode(tokenizer, id, &n);
        t->text_bytes += id == tokenizer->eot_id ? 0 : n;
    }
    ok = ok && (t->num_tokens >= 2 || error_set(err, "%s: has %zu tokens, want at least 2", path, t->num_tokens));
    if (!ok || text) { unmap_file(&file); }
    if (!ok) { token_buffer_free(&t->text); }
    return ok;
}

static inline void eval_tokens_close(EvalTokens* t) {
    if (t->shard.data) { unmap_file(&t->shard); }
    token_buffer_free(&t->text);
}

static inline int eval_token(const EvalTokens* t, size_t i) {
    return t->shard.data ? shard_token(t->shard.data, i) : (int)t->text.ids[i];
}

// Sums over the tokens that were predicted.
typedef struct {
    double sum, squares; // of the losses
    double count;
    double bytes; // of text; 0: unknown
} LossSums;

// The number of tokens by which the window of T tokens advances.
static inline size_t eval_stride(int T) { return (size_t)(args->stride ? args->stride : T); }

// Adds the losses of a file.
static inline void eval_tokens_run(Evaluator* e, const EvalTokens* t, LossSums* sums) {
    size_t B = (size_t)e->B, T = (size_t)e->T, stride = eval_stride(e->T), n = t->num_tokens - 1;
    size_t num_rows = n <= T ? 1 : 1 + (n - T + stride - 1) / stride;
    double start = time_ms(), shown = start;
    bool terminal = isatty(STDERR_FILENO);
    for (size_t first = 0; first < num_rows; first += B) {
        size_t rows = num_rows - first < B ? num_rows - first : B, done = 0;
        for (size_t i = 0; i < B * T; i++) {
            size_t at = (first + i / T) * stride + i % T;
            bool used = i / T < rows && at < n;
            e->inputs[i] = used ? eval_token(t, at) : 0;
            e->targets[i] = used ? eval_token(t, at + 1) : 0;
        }
        e->compute(e->model, e->losses, e->inputs, e->targets, e->B, e->T);
        for (size_t row = 0; row < rows; row++) {
            size_t begin = (first + row) * stride, end = begin + T < n ? begin + T : n;
            // the row before has computed the losses before this position
            for (size_t i = first + row == 0 ? 0 : T - stride; i < end - begin; i++) {
                double loss = e->losses[row * T + i];
                sums->sum += loss;
                sums->squares += loss * loss;
                sums->count++;
            }
            done = end;
        }
        double now = time_ms(), part = (double)done / (double)n;
        if (terminal && now - shown > 500) {
            char left[32];
            format_duration(left, sizeof(left), (now - start) * (1 - part) / part * 1e-3);
            fprintf(stderr, "\r%.0f%% of %zu tokens, %s left \033[K", 100 * part, n, left);
            shown = now;
        }
    }
    if (terminal && shown > start) { fprintf(stderr, "\r\033[K"); }
    sums->bytes += (double)t->text_bytes;
}

// Prints the loss with its standard error, perplexity and, where the text is known, bits per byte. path: NULL for the
// sums over num_files files.
static inline void print_loss(const char* path, size_t num_files, const LossSums* s, int T, double ms) {
    double mean = s->sum / s->count, variance = s->squares / s->count - mean * mean;
    double error = sqrt(variance > 0 ? variance / s->count : 0);
    double bits_per_byte = s->bytes > 0 ? s->sum / log(2.0) / s->bytes : NAN;
    if (args->json) {
        result_begin("loss", path);
        if (!path) { result_number("files", (double)num_files); }
        result_number("tokens", s->count);
        result_number("loss", mean);
        result_number("loss_stderr", error);
        result_number("perplexity", exp(mean));
        result_number("bits_per_byte", bits_per_byte);
        result_number("seq_len", T);
        result_number("stride", (double)eval_stride(T));
        result_end(ms);
        return;
    }
    char bits[48] = "", window[48] = "";
    if (s->bytes > 0) { snprintf(bits, sizeof(bits), ", %.4f bits per byte", bits_per_byte); }
    if (args->stride) { snprintf(window, sizeof(window), ", window %d, stride %d", T, args->stride); }
    print_line(stdout, "%s: %.0f tokens, loss %.6f +- %.4f, perplexity %.3f%s%s (%.0f ms, %.0f tok/s)",
               path ? path : "all", s->count, mean, error, exp(mean), bits, window, ms, s->count / ms * 1e3);
}

// ---- evaluation files ---------------------------------------------------------------------

// The standard error of an accuracy p of n examples, from their sample variance.
static inline double accuracy_error(double p, double n) { return n > 1 ? sqrt(p * (1 - p) / (n - 1)) : 0; }

// Prints the scores. name: for the printed line.
static inline void print_score(const EvalLoader* q, const char* name, double ms) {
    double n = (double)q->num_examples, acc = (double)q->num_correct / n, norm = (double)q->num_correct_norm / n;
    double perplexity = exp(q->loss / n);
    bool last_words = q->kind == EVAL_LAST_WORDS;
    if (args->json) {
        const char* key = q->kind == EVAL_LLMC_CHOICES ? "acc_per_token" : "acc";
        char key_error[32];
        snprintf(key_error, sizeof(key_error), "%s_stderr", key);
        result_begin(last_words ? "last_words" : "choices", q->path.text);
        result_number("examples", n);
        result_number("cut", (double)q->num_cut);
        result_number(key, acc);
        result_number(key_error, accuracy_error(acc, n));
        if (q->kind == EVAL_CHOICES) {
            result_number("acc_norm", norm);
            result_number("acc_norm_stderr", accuracy_error(norm, n));
        }
        if (last_words) { result_number("perplexity", perplexity); }
        result_end(ms);
    } else if (q->kind == EVAL_LLMC_CHOICES) {
        print_line(stdout, "%s: %lld of %lld correct = %.4f (%.0f ms)", name, (long long)q->num_correct,
                   (long long)q->num_examples, acc, ms);
    } else if (q->kind == EVAL_CHOICES) {
        print_line(stdout, "%s: %.0f questions, acc %.4f +- %.4f, acc_norm %.4f +- %.4f (%.0f ms)", name, n, acc,
                   accuracy_error(acc, n), norm, accuracy_error(norm, n), ms);
    } else {
        print_line(stdout, "%s: %.0f last words, acc %.4f +- %.4f, perplexity %.3f (%.0f ms)", name, n, acc,
                   accuracy_error(acc, n), perplexity, ms);
    }
}

// Sets most_likely of the batch's rows.
static inline void eval_predict(Evaluator* e, EvalLoader* questions) {
    for (int row = 0; row < questions->batch_examples; row++) { // one ending each
        EvalRow* r = &questions->rows[row];
        r->most_likely = true;
        for (int j = 0; j < r->count && r->most_likely; j++) {
            size_t i = (size_t)row * (size_t)questions->T + (size_t)(r->first + j);
            r->most_likely = e->most_likely(e->model, i) == e->targets[i];
        }
    }
}

// Evaluates the examples of an opened file, prints the scores and returns the accuracy: the fraction of the examples in
// num_correct. A batch of `questions` has at most as many tokens as one of e. flag, name: for messages, and the printed
// line.
static inline double evaluate_questions(Evaluator* e, EvalLoader* questions, const char* flag, const char* name) {
    Error err;
    double start = time_ms();
    require((size_t)questions->B * (size_t)questions->T <= (size_t)e->B * (size_t)e->T);
    eval_reset(questions);
    run_finishes = "the evaluation";
    status_show("%s", name);
    for (int64_t batch = 0; eval_next(questions, e->inputs, e->targets, &err); batch++) {
        if (batch % run_num_ranks != run_rank) { continue; } // another rank's
        e->compute(e->model, e->losses, e->inputs, e->targets, questions->B, questions->T);
        if (questions->kind == EVAL_LAST_WORDS) { eval_predict(e, questions); }
        eval_score(questions, e->losses);
        if (run_num_ranks == 1) { eval_progress(questions); }
    }
    status_clear();
    run_finishes = RUN_FINISHES_STEP;
    // version 1, the only one that training evaluates, has this one score
    if (sum_over_ranks) { questions->num_correct = (int64_t)sum_over_ranks((double)questions->num_correct); }
    if (err.text[0]) { die("%s %s", flag, err.text); } // the file was changed since it was opened
    print_score(questions, name, time_ms() - start);
    return (double)questions->num_correct / (double)questions->num_examples;
}

// Evaluates --hellaswag's questions and returns the accuracy.
static inline double evaluate_hellaswag(Evaluator* e, EvalLoader* questions) {
    return evaluate_questions(e, questions, "--hellaswag", "HellaSwag");
}

// Opens an evaluation file for batches of at most B x T tokens. flag: for messages.
static inline void questions_open(EvalLoader* questions, const char* flag, const char* path, int B, int T,
                                  int vocab_size) {
    Error err;
    if (!eval_open(questions, path, B, T, vocab_size, &err)) { die("%s %s", flag, err.text); }
    if (questions->num_cut > 0 && run_rank == 0) {
        print_line(
            stderr,
            "note: %s: %lld of %lld examples are longer than the %d tokens of -t: their contexts lose the beginning",
            path, (long long)questions->num_cut, (long long)questions->num_examples, T);
    }
    eval_fit(questions);
}

// Opens --hellaswag, if it was given, for batches of at most B x T tokens, where T is at most the model's positions.
static inline void open_questions(EvalLoader* questions, int B, int T, int vocab_size) {
    if (!args->hellaswag) { return; }
    questions_open(questions, "--hellaswag", args->hellaswag, B, T, vocab_size);
    if (questions->kind != EVAL_LLMC_CHOICES) {
        die("--hellaswag %s: is not a file of dev/data/hellaswag: give it to --eval", args->hellaswag);
    }
}

// ---- --eval ---------------------------------------------------------------------------------

// The files that --eval names.
typedef struct {
    char** paths; // (count)
    size_t count;
    bool has_questions; // there are evaluation files among them
} EvalFiles;

static inline void eval_files_add(EvalFiles* files, const char* path) {
    files->paths = (char**)realloc_check(files->paths, (files->count + 1) * sizeof(char*));
    files->paths[files->count++] = strdup_check(path);
    files->has_questions |= is_eval_file(path);
}

// Finds the files of --eval: a file with exactly this name, or else names and patterns separated by commas.
static inline EvalFiles eval_files_find(void) {
    EvalFiles files = {NULL, 0, false};
    if (!args->eval_data) { return files; }
    bool literal = file_exists(args->eval_data);
    char *list = strdup_check(args->eval_data), *rest = list;
    for (char* pattern = rest; pattern; pattern = rest) {
        char* comma = literal ? NULL : strchr(pattern, ',');
        rest = comma ? comma + 1 : NULL;
        if (comma) { *comma = '\0'; }
        if (file_exists(pattern)) {
            eval_files_add(&files, pattern);
            continue;
        }
        glob_t found;
        if (glob(pattern, 0, NULL, &found) != 0) { die("--eval: no file matches '%s'", pattern); }
        for (size_t i = 0; i < found.gl_pathc; i++) { eval_files_add(&files, found.gl_pathv[i]); }
        globfree(&found);
    }
    free(list);
    return files;
}

// Ends the program if the files have a text and there is no vocabulary to encode it: before the weights are read.
static inline void eval_files_check(const EvalFiles* files, const Tokenizer* tokenizer) {
    Error err;
    size_t mark;
    for (size_t i = 0; i < files->count; i++) {
        const char* path = files->paths[i];
        MappedFile file;
        int32_t magic = SHARD_MAGIC;
        if (is_eval_file(path) || !map_file(&file, path, NULL)) { continue; }
        if (file.size >= sizeof(magic)) { memcpy(&magic, file.data, sizeof(magic)); }
        bool ok =
            magic == SHARD_MAGIC || (text_check((const char*)file.data, file.size, path, " > TEXT", &mark, &err) &&
                                     eval_can_encode(path, tokenizer, &err));
        unmap_file(&file);
        if (!ok) { die("--eval %s", err.text); }
    }
}

// The rows of a batch: -b, but at least as many as an example takes.
static inline int evaluation_rows(const EvalFiles* files) {
    int least = files->has_questions ? EVAL_MAX_ENDINGS : args->hellaswag ? EVAL_ENDINGS : 1;
    return args->B > least ? args->B : least;
}

// Evaluates shards and texts and prints a line for each; adds their losses to *all.
static inline void evaluate_tokens(Evaluator* e, const char* path, const Tokenizer* tokenizer, int vocab_size,
                                   LossSums* all) {
    Error err;
    EvalTokens tokens;
    LossSums sums = {0, 0, 0, 0};
    double start = time_ms();
    if (!eval_tokens_open(&tokens, path, tokenizer, vocab_size, &err)) { die("--eval %s", err.text); }
    eval_tokens_run(e, &tokens, &sums);
    eval_tokens_close(&tokens);
    print_loss(path, 1, &sums, e->T, time_ms() - start);
    all->sum += sums.sum, all->squares += sums.squares, all->count += sums.count, all->bytes += sums.bytes;
}

// --eval, or --hellaswag without -i: evaluates all files and prints a line for each, and one for all shards and texts
// together if there are several. compute, most_likely, model: as in Evaluator, for batches of B x T tokens. tokenizer
// may be NULL.
static inline void evaluate_files(EvalFiles* files, ComputeLosses compute, MostLikelyToken most_likely, void* model,
                                  int B, int T, const Tokenizer* tokenizer, int vocab_size) {
    Evaluator e;
    EvalLoader hellaswag, questions;
    LossSums all = {0, 0, 0, 0};
    size_t num_tokens_files = 0;
    double all_ms = 0;
    if (args->stride > T) { die("--stride %d is more than -t %d, the window", args->stride, T); }
    evaluator_open(&e, compute, most_likely, model, B, T);
    open_questions(&hellaswag, B, T, vocab_size);
    for (size_t i = 0; i < files->count; i++) {
        double start = time_ms();
        const char* path = files->paths[i];
        if (is_eval_file(path)) {
            questions_open(&questions, "--eval", path, B, T, vocab_size);
            evaluate_questions(&e, &questions, "--eval", path);
            eval_close(&questions);
        } else {
            evaluate_tokens(&e, path, tokenizer, vocab_size, &all);
            num_tokens_files++;
            all_ms += time_ms() - start;
        }
    }
    if (num_tokens_files > 1) { print_loss(NULL, num_tokens_files, &all, T, all_ms); }
    if (args->hellaswag) {
        evaluate_hellaswag(&e, &hellaswag);
        eval_close(&hellaswag);
    }
    for (size_t i = 0; i < files->count; i++) { free(files->paths[i]); }
    free(files->paths);
    evaluator_close(&e);
}

// ---- --bench --------------------------------------------------------------------------------

enum { BENCH_REPEATS = 5 };

// Times of the prompts and of the generation.
typedef struct {
    int B;              // number of texts
    int prompt, decode; // tokens of each prompt, tokens generated after it
    int* tokens;        // (prompt) random tokens
    double prefill_ms[BENCH_REPEATS], decode_ms[BENCH_REPEATS];
} Bench;

// Settles what is timed, and prints it. precision: for example "fp32".
static inline Bench bench_begin(const GPT2Config* config, const char* precision) {
    Bench b;
    int maxT = config->max_seq_len;
    uint64_t rng = splitmix64((uint64_t)run_seed());
    memset(&b, 0, sizeof(b));
    b.B = args->num_samples;
    if (maxT < 2) { die("--bench: the model has only %d positions", maxT); }
    if (args->bench_prompt >= maxT && args->bench_prompt != BENCH_PROMPT) {
        die("--bench-prompt %d is too long: the model has %d positions, one of them for a generated token",
            args->bench_prompt, maxT);
    }
    b.prompt = args->bench_prompt < maxT ? args->bench_prompt : maxT - 1;
    if (b.prompt < args->bench_prompt) {
        print_line(stderr, "note: the prompt has %d tokens instead of %d, because the model has %d positions", b.prompt,
                   args->bench_prompt, maxT);
    }
    b.decode = args->num_tokens < maxT - b.prompt ? args->num_tokens : maxT - b.prompt;
    b.tokens = (int*)malloc_check((size_t)b.prompt * sizeof(int));
    for (int i = 0; i < b.prompt; i++) { b.tokens[i] = (int)(random_f64(&rng) * config->vocab_size); }
    bool full = strcmp(args->weights, "full") == 0;
    print_line(stdout, "%s: %.2f M parameters, %s%s%s; texts: %d", args->model, (double)num_parameters(config) * 1e-6,
               precision, full ? "" : ", weights in ", full ? "" : args->weights, b.B);
    return b;
}

// Adds the times of a repetition; those of repeat -1, the warm-up, are dropped.
static inline void bench_add(Bench* b, int repeat, const GenerationTimes* times) {
    if (times->at_once > 0) {
        die("--bench: only %d of %d texts are side by side: take a smaller --num-samples or a larger --parallel",
            times->at_once, b->B);
    }
    if (repeat >= 0) { b->prefill_ms[repeat] = times->prefill_ms, b->decode_ms[repeat] = times->decode_ms; }
}

static inline int bench_compare(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return x < y ? -1 : x > y;
}

// Prints the median of the times (BENCH_REPEATS), and half the distance from the fastest to the slowest.
static inline void bench_print(const char* what, int tokens, double* ms) {
    qsort(ms, BENCH_REPEATS, sizeof(ms[0]), bench_compare);
    double median = ms[BENCH_REPEATS / 2], spread = (ms[BENCH_REPEATS - 1] - ms[0]) / 2 / median;
    printf("%-32s %8d tokens %10.2f ms %10.1f tok/s +- %.1f%%\n", what, tokens, median, tokens / median * 1e3,
           100 * spread);
}

static inline void bench_end(Bench* b) {
    char what[64];
    snprintf(what, sizeof(what), "prompt of %d", b->prompt);
    bench_print(what, b->B * b->prompt, b->prefill_ms);
    snprintf(what, sizeof(what), "%d generated after it", b->decode);
    bench_print(what, b->B * b->decode, b->decode_ms);
    free(b->tokens);
}

#endif
