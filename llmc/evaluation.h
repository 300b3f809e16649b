/*
--eval: the mean loss and the perplexity of a model on token shards or on text. --hellaswag: its accuracy on multiple-choice
questions. Both programs use this header; they supply the function that computes losses.

The tokens of a file are cut into rows of T inputs, one after the other, so that every token but the first is predicted
exactly once, from at most T tokens before it. A row that is shorter, the last one, counts with its own tokens only.
*/
#ifndef LLMC_EVALUATION_H
#define LLMC_EVALUATION_H

#include "eval_loader.h"
#include "prompts.h"
#include "training.h"

// The sum of what all processes of a run give, if there are several; else NULL.
static double (*sum_over_ranks)(double x);

// Computes losses (B,T) of targets (B,T) after inputs (B,T). model: the program's own.
typedef void (*ComputeLosses)(void* model, float* losses, const int* inputs, const int* targets, int B, int T);

// The program's part of an evaluation.
typedef struct {
    ComputeLosses compute;
    void* model;
    int B, T;              // rows per batch, tokens per row
    int *inputs, *targets; // (B,T)
    float* losses;         // (B,T)
} Evaluator;

static inline void evaluator_open(Evaluator* e, ComputeLosses compute, void* model, int B, int T) {
    size_t BT = (size_t)B * (size_t)T;
    e->compute = compute;
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

// ---- loss and perplexity ----------------------------------------------------------------

// The tokens of a file: of a shard, or of an encoded text.
typedef struct {
    const char* path;
    MappedFile shard;  // if it is a shard
    TokenBuffer text;  // if it is text
    size_t num_tokens; // in either case
    size_t text_bytes; // bytes of text that tokens 1 and up stand for; 0: unknown
} EvalTokens;

// Opens a shard or a text file. Text is encoded as dev/data/tokenize does it: as one document, behind the end-of-text token
// if the vocabulary has one. tokenizer: NULL if there is none.
static inline bool eval_tokens_open(EvalTokens* t, const char* path, const Tokenizer* tokenizer, int vocab_size,
                                    Error* err) {
    MappedFile file;
    int32_t magic = 0;
    memset(t, 0, sizeof(*t));
    t->path = path;
    if (!map_file(&file, path, err)) { return false; }
    if (file.size >= sizeof(magic)) { memcpy(&magic, file.data, sizeof(magic)); }
    const char* mistake = file.size ? shard_mistake(file.data, file.size) : "is empty";
    bool text = magic != SHARD_MAGIC && mistake && strncmp(mistake, "looks like text", 15) == 0, ok = true;
    if (!text) {
        ok = shard_parse(file.data, file.size, path, vocab_size, &t->num_tokens, err);
        t->shard = file;
        for (size_t i = 1; ok && tokenizer && i < t->num_tokens; i++) {
            size_t n = 0;
            int id = shard_token(file.data, i);
            tokenizer_decode(tokenizer, id, &n);
            t->text_bytes += id == tokenizer->eot_id ? 0 : n;
        }
    } else if (!tokenizer || !tokenizer->can_encode) {
        ok = error_set(err, "%s: is text, and there is no vocabulary to encode it: give one with --tokenizer", path);
    } else {
        if (tokenizer->eot_id >= 0) {
            token_buffer_reserve(&t->text, 1);
            t->text.ids[t->text.count++] = (uint32_t)tokenizer->eot_id;
        }
        tokenizer_encode(tokenizer, file.data, file.size, &t->text);
        t->num_tokens = t->text.count;
        t->text_bytes = file.size;
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

// Adds the losses of a file.
static inline void eval_tokens_run(Evaluator* e, const EvalTokens* t, LossSums* sums) {
    size_t T = (size_t)e->T, n = t->num_tokens - 1, num_rows = (n + T - 1) / T;
    double start = time_ms(), shown = start;
    bool terminal = isatty(STDERR_FILENO);
    for (size_t row = 0; row < num_rows; row += (size_t)e->B) {
        size_t count = (n - row * T) < (size_t)e->B * T ? n - row * T : (size_t)e->B * T;
        for (size_t i = 0; i < (size_t)e->B * T; i++) {
            e->inputs[i] = i < count ? eval_token(t, row * T + i) : 0;
            e->targets[i] = i < count ? eval_token(t, row * T + i + 1) : 0;
        }
        e->compute(e->model, e->losses, e->inputs, e->targets, e->B, e->T);
        for (size_t i = 0; i < count; i++) {
            sums->sum += e->losses[i];
            sums->squares += (double)e->losses[i] * e->losses[i];
        }
        sums->count += (double)count;
        double now = time_ms(), done = (double)(row * T + count) / (double)n;
        if (terminal && now - shown > 500) {
            char left[32];
            format_duration(left, sizeof(left), (now - start) * (1 - done) / done * 1e-3);
            fprintf(stderr, "\r%.0f%% of %zu tokens, %s left \033[K", 100 * done, n, left);
            shown = now;
        }
    }
    if (terminal && shown > start) { fprintf(stderr, "\r\033[K"); }
    sums->bytes += (double)t->text_bytes;
}

// Prints a line: tokens, loss with its standard error, perplexity and, where the text is known, bits per byte.
static inline void print_loss(const char* name, const LossSums* s, double ms) {
    double mean = s->sum / s->count, variance = s->squares / s->count - mean * mean;
    char bits[48] = "";
    if (s->bytes > 0) { snprintf(bits, sizeof(bits), ", %.4f bits per byte", s->sum / log(2.0) / s->bytes); }
    print_line(stdout, "%s: %.0f tokens, loss %.6f +- %.4f, perplexity %.3f%s (%.0f ms, %.0f tok/s)", name, s->count,
               mean, sqrt(variance > 0 ? variance / s->count : 0), exp(mean), bits, ms, s->count / ms * 1e3);
}

// Evaluates all files that match `pattern` and prints a line for each, and one for all of them. tokenizer may be NULL.
static inline void evaluate_files(Evaluator* e, const char* pattern, const Tokenizer* tokenizer, int vocab_size) {
    Error err;
    LossSums all = {0, 0, 0, 0};
    double all_ms = 0;
    glob_t found;
    memset(&found, 0, sizeof(found));
    bool literal = file_exists(pattern);
    if (!literal && glob(pattern, 0, NULL, &found) != 0) { die("--eval: no file matches '%s'", pattern); }
    size_t num_files = literal ? 1 : found.gl_pathc;
    for (size_t i = 0; i < num_files; i++) {
        EvalTokens tokens;
        LossSums sums = {0, 0, 0, 0};
        double start = time_ms();
        const char* path = literal ? pattern : found.gl_pathv[i];
        if (!eval_tokens_open(&tokens, path, tokenizer, vocab_size, &err)) { die("--eval %s", err.text); }
        eval_tokens_run(e, &tokens, &sums);
        eval_tokens_close(&tokens);
        print_loss(path, &sums, time_ms() - start);
        all.sum += sums.sum, all.squares += sums.squares, all.count += sums.count, all.bytes += sums.bytes;
        all_ms += time_ms() - start;
    }
    if (num_files > 1) { print_loss("all", &all, all_ms); }
    if (!literal) { globfree(&found); }
}

// ---- multiple choice ----------------------------------------------------------------------

// Evaluates the questions of an opened file, prints the accuracy and returns it: the fraction of questions whose correct
// ending has the lowest mean loss per token. A batch of `questions` has at most as many tokens as one of e.
static inline double evaluate_questions(Evaluator* e, EvalLoader* questions) {
    Error err;
    double start = time_ms();
    require((size_t)questions->B * (size_t)questions->T <= (size_t)e->B * (size_t)e->T);
    eval_reset(questions);
    for (int64_t batch = 0; eval_next(questions, e->inputs, e->targets, &err); batch++) {
        if (batch % run_num_ranks != run_rank) { continue; } // another rank's
        e->compute(e->model, e->losses, e->inputs, e->targets, questions->B, questions->T);
        eval_score(questions, e->losses);
        if (run_num_ranks == 1) { eval_progress(questions); }
    }
    if (sum_over_ranks) { questions->num_correct = (int64_t)sum_over_ranks((double)questions->num_correct); }
    if (err.text[0]) { die("--hellaswag %s", err.text); } // the file was changed since it was opened
    double accuracy = (double)questions->num_correct / (double)questions->num_examples;
    printf("HellaSwag: %lld of %lld correct = %.4f (%.0f ms)\n", (long long)questions->num_correct,
           (long long)questions->num_examples, accuracy, time_ms() - start);
    return accuracy;
}

// Opens --hellaswag, if it was given, for batches of at most B x T tokens, where T is at most the model's positions.
static inline void open_questions(EvalLoader* questions, int B, int T, int vocab_size) {
    Error err;
    if (!args->hellaswag) { return; }
    if (!eval_open(questions, args->hellaswag, B, T, vocab_size, &err)) { die("--hellaswag %s", err.text); }
    eval_fit(questions);
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
    b.prompt = args->bench_prompt < maxT ? args->bench_prompt : maxT - 1;
    b.decode = args->num_tokens < maxT - b.prompt ? args->num_tokens : maxT - b.prompt;
    if (b.prompt < 1) { die("--bench: the model has only %d positions", maxT); }
    b.tokens = (int*)malloc_check((size_t)b.prompt * sizeof(int));
    for (int i = 0; i < b.prompt; i++) { b.tokens[i] = (int)(random_f64(&rng) * config->vocab_size); }
    print_line(stdout, "%s: %.2f M parameters, %s; texts: %d", args->model, (double)num_parameters(config) * 1e-6,
               precision, b.B);
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
