/*
What train_gpt2.c and train_gpt2.cu share beside the model: the flags, the way from them to a vocabulary, a model, data
and a checkpoint, what is due between two steps, and the book-keeping and the words of a run. The layers and the training
loop itself are not here.
*/
#ifndef LLMC_TRAINING_H
#define LLMC_TRAINING_H

#include "checkpoint.h"
#include "cli.h"
#include "dataloader.h"
#include "gpt2.h"
#include "logger.h"
#include "outlier_detector.h"
#include "rand.h"
#include "run_state.h"
#include "sampler.h"
#include "schedulers.h"
#include "text_output.h"
#include "tokenizer.h"
#include "utils.h"
#include <math.h>

// ---- flags ------------------------------------------------------------------------

// Every flag as it was typed, or its default. What a run makes of them is in Batch and Training.
typedef struct {
    const char *model, *tokenizer, *train_data, *val_data, *output;
    int layers, heads, channels, positions;
    int B, T, shuffle, overfit, resume;
    int64_t total_batch, num_steps, warmup_steps, seed;
    float learning_rate, final_fraction, weight_decay, beta1, beta2, eps, clip, skip_loss_z, skip_norm_z;
    const char* schedule;
    int max_nonfinite, val_every, val_steps, sample_every, sample_tokens, save_every, keep, major_every;
    const char* prompt;
    int num_tokens, top_k, stop_at_eot;
    float temperature, top_p;
    int naive; // train_gpt2 alone
    // train_gpt2cu alone
    int recompute, gelu_fusion, tf32, master_weights, stochastic_rounding, use_graph, tune, profile, log_memory_every;
    const char *hellaswag, *prompts;
    int num_samples;
} Settings;

// Only the table below writes this, when the flags are parsed; everything else reads args.
#if defined(__cplusplus) // what is not named is 0, as in C
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif
static Settings settings = {
    .model = "d12",
    .B = 4,
    .shuffle = 1,
    .num_steps = -1,
    .seed = 42,
    .learning_rate = 3e-4f,
    .final_fraction = 1.0f,
    .beta1 = 0.9f,
    .beta2 = 0.95f,
    .eps = 1e-8f,
    .clip = 1.0f,
    .schedule = "cosine",
    .max_nonfinite = 10,
    .val_every = 20,
    .val_steps = 20,
    .sample_every = 20,
    .sample_tokens = 64,
    .keep = 5,
    .num_tokens = 256,
    .stop_at_eot = 1,
    .temperature = 1.0f,
    .top_p = 1.0f,
    .gelu_fusion = 2,
    .master_weights = 1,
    .use_graph = 1,
    .tune = 1,
    .num_samples = 1,
};
#if defined(__cplusplus)
#pragma GCC diagnostic pop
#endif
static const Settings* const args = &settings;

// choices of OPT_STR stand in its unit, separated by |
static const Option options[] = {
    {OPT_SECTION, 0, NULL, "Model", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 'e', NULL, "model", &settings.model, "MODEL",
     "a new model by descriptor (d6 d12 d24 d36 d48, gpt3:c768 ...), or weights: a Hugging Face directory, a file "
     "(.safetensors, llm.c's .bin), the output directory of a run",
     0, 0},
    {OPT_STR, 0, NULL, "tokenizer", &settings.tokenizer, "PATH",
     "vocabulary: a directory or file; default: the one beside the model, else beside the training data", 0, 0},
    {OPT_INT, 0, NULL, "layers", &settings.layers, "L", "layers of a new model, 0: as the descriptor says", 0, 4096},
    {OPT_INT, 0, NULL, "heads", &settings.heads, "NH", "attention heads of a new model, 0: as the descriptor says", 0,
     4096},
    {OPT_INT, 0, NULL, "channels", &settings.channels, "C", "channels of a new model, 0: as the descriptor says", 0,
     65536},
    {OPT_INT, 0, NULL, "positions", &settings.positions, "T", "positions of a new model, 0: as the descriptor says", 0,
     1 << 20},

    {OPT_SECTION, 0, NULL, "Data", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 'i', NULL, "train-data", &settings.train_data, "GLOB",
     "token shards to train on, made by dev/data/tokenize", 0, 0},
    {OPT_STR, 'j', NULL, "val-data", &settings.val_data, "GLOB", "token shards to validate on", 0, 0},
    {OPT_STR, 'o', NULL, "output", &settings.output, "DIR",
     "checkpoints and logs go here; without it nothing is written", 0, 0},
    {OPT_INT, 'b', NULL, "batch-size", &settings.B, "sequences", "sequences in a micro-batch, B", 1, 65536},
    {OPT_INT, 't', NULL, "seq-len", &settings.T, "tokens",
     "length of a sequence, T; 0: the model's positions, at most 1024", 0, 1 << 20},
    {OPT_LONG, 'd', NULL, "total-batch", &settings.total_batch, "tokens",
     "tokens in a step, a multiple of B * T: the rest is gradient accumulation; 0: B * T", 0, 1e12},
    {OPT_BOOL, 0, NULL, "shuffle", &settings.shuffle, NULL, "permute shards and batches in each epoch, by the seed", 0,
     0},
    {OPT_BOOL, 'a', NULL, "overfit", &settings.overfit, NULL,
     "train on the first batch again and again, a test of the set-up", 0, 0},

    {OPT_SECTION, 0, NULL, "Optimization", NULL, NULL, NULL, 0, 0},
    {OPT_LONG, 'x', NULL, "steps", &settings.num_steps, "steps", "steps to train for, -1: one epoch", -1, 1e12},
    {OPT_FLOAT, 'l', NULL, "learning-rate", &settings.learning_rate, NULL, "highest learning rate", 0, 100},
    {OPT_STR, 'k', NULL, "schedule", &settings.schedule, "cosine|linear|constant|wsd", "how the learning rate falls", 0,
     0},
    {OPT_LONG, 'u', NULL, "warmup", &settings.warmup_steps, "steps", "steps of linear warm-up", 0, 1e12},
    {OPT_FLOAT, 'q', NULL, "final-fraction", &settings.final_fraction, NULL,
     "learning rate at the end, as a fraction of the highest", 0, 1},
    {OPT_FLOAT, 'c', NULL, "weight-decay", &settings.weight_decay, NULL,
     "decoupled decay of tensors of two or more dimensions", 0, 100},
    {OPT_FLOAT, 0, NULL, "beta1", &settings.beta1, NULL, "AdamW: decay of the first moment", 0, 0.999999},
    {OPT_FLOAT, 0, NULL, "beta2", &settings.beta2, NULL, "AdamW: decay of the second moment", 0, 0.999999},
    {OPT_FLOAT, 0, NULL, "eps", &settings.eps, NULL, "AdamW: added to the root of the second moment", 1e-20, 1},
    {OPT_FLOAT, 0, NULL, "clip", &settings.clip, NULL, "longest gradient, by norm; 0: no clipping", 0, 1e9},
    {OPT_FLOAT, 0, "sl", "skip-loss-z", &settings.skip_loss_z, "sigmas",
     "skip an update whose loss is this far out; 0: never", 0, 1000},
    {OPT_FLOAT, 0, "sg", "skip-norm-z", &settings.skip_norm_z, "sigmas",
     "skip an update whose gradient norm is this far out; 0: never", 0, 1000},
    {OPT_INT, 0, NULL, "max-nonfinite", &settings.max_nonfinite, "steps",
     "stop after so many steps in a row whose loss or gradient is not finite", 1, 1000000},
    {OPT_LONG, 0, NULL, "seed", &settings.seed, NULL, "of the initial weights, of shuffling and of sampling", 0,
     4294967295.0},

    {OPT_SECTION, 0, NULL, "Evaluation and checkpoints", NULL, NULL, NULL, 0, 0},
    {OPT_INT, 'v', NULL, "val-every", &settings.val_every, "steps", "validation loss every so many steps, 0: never", 0,
     1e9},
    {OPT_INT, 'm', NULL, "val-steps", &settings.val_steps, "batches", "batches of a validation, at most the whole data",
     1, 1e9},
    {OPT_INT, 's', NULL, "sample-every", &settings.sample_every, "steps",
     "print a sample every so many steps, 0: never", 0, 1e9},
    {OPT_INT, 'g', NULL, "sample-tokens", &settings.sample_tokens, "tokens", "length of that sample", 1, 1e9},
    {OPT_INT, 'n', NULL, "save-every", &settings.save_every, "steps",
     "checkpoint every so many steps and at the end, 0: only at the end", 0, 1e9},
    {OPT_INT, 0, "nk", "keep", &settings.keep, "checkpoints", "newest checkpoints to keep, 0: all", 0, 1e9},
    {OPT_INT, 0, "nm", "major-every", &settings.major_every, "steps",
     "checkpoints of these steps are never deleted, 0: none", 0, 1e9},
    {OPT_BOOL, 'y', NULL, "resume", &settings.resume, NULL,
     "go on from the newest good checkpoint in the output directory", 0, 0},

#ifdef __CUDACC__
    {OPT_STR, 0, NULL, "hellaswag", &settings.hellaswag, "FILE",
     "evaluate on this file of multiple choices, made by dev/data/hellaswag, along with the validation", 0, 0},
#endif

    {OPT_SECTION, 0, NULL, "Sampling", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 0, NULL, "prompt", &settings.prompt, "TEXT", "continue this text and exit; \"\" begins a document", 0, 0},
#ifdef __CUDACC__
    {OPT_STR, 0, NULL, "prompts", &settings.prompts, "FILE", "continue each line of this file and exit", 0, 0},
    {OPT_INT, 0, NULL, "num-samples", &settings.num_samples, "texts", "continue the prompt so many times, side by side",
     1, 64},
#endif
    {OPT_INT, 0, NULL, "num-tokens", &settings.num_tokens, "tokens", "tokens to add at most", 1, 1e9},
    {OPT_FLOAT, 0, NULL, "temperature", &settings.temperature, NULL,
     "divides the logits; 0: always the likeliest token", 0, 1000},
    {OPT_INT, 0, NULL, "top-k", &settings.top_k, "tokens", "only the k likeliest tokens, 0: all", 0, 1e9},
    {OPT_FLOAT, 0, NULL, "top-p", &settings.top_p, NULL, "only the likeliest tokens of this total probability, 1: all",
     1e-6, 1},
    {OPT_BOOL, 0, NULL, "stop-at-eot", &settings.stop_at_eot, NULL, "end at the end-of-text token", 0, 0},

    {OPT_SECTION, 0, NULL, "Machine", NULL, NULL, NULL, 0, 0},
#ifdef __CUDACC__
    {OPT_INT, 'r', NULL, "recompute", &settings.recompute, NULL,
     "spend time to save memory: 1 computes GELU again in the backward pass, 2 the layernorms too", 0, 2},
    {OPT_INT, 0, "ge", "gelu-fusion", &settings.gelu_fusion, NULL,
     "accepted for llm.c's command lines, without effect: GELU is always part of the matmuls", 0, 2},
    {OPT_BOOL, 'f', NULL, "tf32", &settings.tf32, NULL,
     "fp32 builds: matmuls on the tensor cores, with 10 bits of mantissa", 0, 0},
    {OPT_BOOL, 'w', NULL, "master-weights", &settings.master_weights, NULL,
     "keep an fp32 copy of 16-bit weights, which AdamW changes", 0, 0},
    {OPT_BOOL, 0, NULL, "stochastic-rounding", &settings.stochastic_rounding, NULL,
     "bf16 weights are rounded up or down by chance, so that small changes are not lost on average", 0, 0},
    {OPT_BOOL, 0, NULL, "graph", &settings.use_graph, NULL, "launch a step as one CUDA graph", 0, 0},
    {OPT_BOOL, 0, NULL, "tune", &settings.tune, NULL,
     "time the matmul algorithms of the library and keep the fastest; off: its first proposal, the same in every run",
     0, 0},
    {OPT_BOOL, 0, NULL, "profile", &settings.profile, NULL,
     "time every operation of a step, print the table and exit; needs training data", 0, 0},
    {OPT_INT, 0, "lg", "log-memory", &settings.log_memory_every, "steps",
     "print GPU memory every so many steps, 0: never", 0, 1e9},
#else
    {OPT_BOOL, 0, NULL, "naive", &settings.naive, NULL,
     "run matmul and attention as the plain loops of this file: slow, to compare with", 0, 0},
#endif
};

// ---- the vocabulary and the model ---------------------------------------------------

// A vocabulary at `path`, a file or a directory; false without an error text when there is none there.
static inline bool find_tokenizer(Tokenizer* tokenizer, const char* path, Error* err) {
    static const char* const names[] = {"vocab.json",     "encoder.json",       "merges.txt",
                                        "tokenizer.json", "gpt2_tokenizer.bin", "tokenizer.bin"};
    char candidate[4200];
    err->text[0] = '\0';
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(candidate, sizeof(candidate), "%s/%s", path, names[i]);
        if (file_exists(candidate)) { return tokenizer_load(tokenizer, path, err); }
    }
    return false;
}

// The directory that a file or a glob pattern stands in, into dir (4096).
static const char* directory_of(const char* path, char* dir) {
    snprintf(dir, 4096, "%s", path);
    char* slash = strrchr(dir, '/');
    if (!slash) { return "."; }
    slash[slash == dir] = '\0';
    return dir;
}

// The vocabulary: --tokenizer, else what stands with the model, else what stands with the training data. False: none.
static inline bool load_tokenizer(Tokenizer* tokenizer, const char* model_path) {
    Error err;
    char dir[4096];
    if (args->tokenizer) {
        if (!tokenizer_load(tokenizer, args->tokenizer, &err)) { die("--tokenizer %s", err.text); }
        return true;
    }
    if (model_path) {
        if (find_tokenizer(tokenizer, is_directory(model_path) ? model_path : directory_of(model_path, dir), &err)) {
            return true;
        }
        if (err.text[0]) { die("%s", err.text); }
    }
    if (args->train_data) {
        if (find_tokenizer(tokenizer, directory_of(args->train_data, dir), &err)) { return true; }
        if (err.text[0]) { die("%s", err.text); }
    }
    return false;
}

// The path that -e names: itself, or the newest good checkpoint when it is the output directory of a run.
static const char* resolve_model_path(const char* path, char* resolved, size_t size) {
    Error err;
    if (!is_directory(path) || !run_has_checkpoints(path)) { return path; }
    if (!run_find_newest(path, resolved, size, &err)) { die("-e %s", err.text); }
    fprintf(stderr, "%s: newest checkpoint: %s\n", path, resolved);
    return resolved;
}

// What -e names, opened but not read: the shape is known, and nothing is allocated or written yet.
typedef struct {
    const char* path;
    bool fresh;        // a descriptor: new weights by the seed
    ModelFile file;    // otherwise
    GPT2Config config; // of either
} ModelSource;

// Opens what `path` names, and its vocabulary, which may be absent.
static inline void model_source_open(ModelSource* source, const char* path, bool* has_tokenizer, Tokenizer* tokenizer) {
    Error err;
    GPT2Config* config = &source->config;
    source->path = path;
    source->fresh = is_descriptor(path);
    *has_tokenizer = load_tokenizer(tokenizer, source->fresh ? NULL : path);
    if (source->fresh) {
        if (!config_from_descriptor(config, path, &err)) { die("%s", err.text); }
        if (args->layers) { config->num_layers = args->layers; }
        if (args->heads) { config->num_heads = args->heads; }
        if (args->channels) { config->channels = args->channels; }
        if (args->positions) { config->max_seq_len = args->positions; }
        if (*has_tokenizer) {
            config->vocab_size = tokenizer->vocab_size;
            config->padded_vocab_size = padded_vocab(config->vocab_size);
        }
        if (!config_check(config, "-e with --layers, --heads, --channels", &err)) { die("%s", err.text); }
    } else {
        if (!file_exists(path)) {
            die("-e %s: %s; it wants a descriptor like d12, a Hugging Face directory, a .safetensors file, an llm.c "
                ".bin or the -o of a run",
                path, strerror(errno));
        }
        if (!model_open(&source->file, path, &err)) { die("-e %s", err.text); }
        *config = source->file.config;
        if ((args->layers && args->layers != config->num_layers) || (args->heads && args->heads != config->num_heads) ||
            (args->channels && args->channels != config->channels) ||
            (args->positions && args->positions != config->max_seq_len)) {
            die("--layers, --heads, --channels and --positions are for new models; %s has L %d, NH %d, C %d, %d "
                "positions",
                path, config->num_layers, config->num_heads, config->channels, config->max_seq_len);
        }
    }
    if (*has_tokenizer && tokenizer->vocab_size > config->vocab_size) {
        die("the vocabulary has %d tokens, the model %s only %d: they do not belong together", tokenizer->vocab_size,
            path, config->vocab_size);
    }
}

static inline void model_source_close(ModelSource* source) {
    if (!source->fresh) { model_close(&source->file); }
}

// The weights into params (num_parameters); closes the source.
static inline void model_source_read(ModelSource* source, float* params) {
    Error err;
    if (source->fresh) {
        gpt2_init_params(params, &source->config, (uint32_t)args->seed);
    } else if (!model_read(&source->file, params, &err)) {
        die("%s", err.text);
    }
    model_source_close(source);
}

// ---- the batch and the data ---------------------------------------------------------

// The shape of a step.
typedef struct {
    int B;               // sequences in a micro-batch
    int T;               // tokens in a sequence
    int64_t total;       // tokens in a step
    int64_t micro_steps; // micro-batches in a step
} Batch;

// Checks the shape that was typed against the model and fills in the defaults, which depend on it.
static inline Batch settle_batch(const GPT2Config* config) {
    int maxT = config->max_seq_len;
    Batch batch = {args->B, args->T, args->total_batch, 0};
    if (batch.T == 0) { batch.T = maxT < 1024 ? maxT : 1024; }
    if (batch.T > maxT) {
        die("-t %d is past the %d positions of the model%s", batch.T, maxT,
            is_descriptor(args->model) ? "; --positions gives a new model more" : "");
    }
    int64_t tokens = (int64_t)batch.B * batch.T;
    if (batch.total == 0) { batch.total = tokens; }
    if (batch.total % tokens != 0) {
        die("-d %lld is not a multiple of -b %d times -t %d = %lld tokens", (long long)batch.total, batch.B, batch.T,
            (long long)tokens);
    }
    batch.micro_steps = batch.total / tokens;
    return batch;
}

// ---- a run --------------------------------------------------------------------------

// A training run without its model.
typedef struct {
    RunState run;            // step, position in the data, outlier windows: what a checkpoint holds beside the weights
    Batch batch;             // of settle_batch(), set by the program once it knows the model
    int64_t num_steps;       // the run ends after this step: -x, or one epoch
    int64_t num_val_batches; // of a validation: -m, at most the whole data; 0 without validation data
    DataLoader train, val;
    bool has_val;
    Tokenizer tokenizer;
    bool has_tokenizer;
    Logger logger;
    LrSchedule schedule;
    char checkpoint[4200]; // the run goes on from there; "" for a new one
    int nonfinite_in_a_row;
    double step_ms; // smoothed, for the estimate of the time left
} Training;

// What -o and -y say, before anything is read or written: a new run, or t->checkpoint to go on from.
static inline void training_find_checkpoint(Training* t) {
    Error err;
    memset(t, 0, sizeof(*t));
    if (!args->train_data) { die("no training data: give shards with -i; dev/data/tokenize makes them from text"); }
    if (args->output && file_exists(args->output) && !is_directory(args->output)) {
        die("-o %s: exists and is not a directory", args->output);
    }
    // first of all: it may bring back a checkpoint that an interrupted save had set aside
    if (args->output && is_directory(args->output) && !run_remove_leftovers(args->output, &err)) {
        die("%s", err.text);
    }
    bool has_checkpoints = args->output && run_has_checkpoints(args->output);
    if (has_checkpoints && !args->resume) {
        die("%s holds checkpoints of an earlier run; go on from there with -y 1, or give another -o", args->output);
    }
    if (has_checkpoints && !run_find_newest(args->output, t->checkpoint, sizeof(t->checkpoint), &err)) {
        die("%s", err.text);
    }
    if (args->resume && !args->output) { die("-y 1 resumes the run in -o, which is not given"); }
    if (args->resume && !has_checkpoints) { printf("%s holds no checkpoint yet: a new run\n", args->output); }
}

// The model to begin with: the checkpoint's, or what -e names. resolved (4200) is room for a path.
static inline void training_open_model(Training* t, ModelSource* source, char* resolved) {
    const char* path = t->checkpoint[0] ? t->checkpoint : resolve_model_path(args->model, resolved, 4200);
    model_source_open(source, path, &t->has_tokenizer, &t->tokenizer);
}

// Opens the loaders for t->batch and settles the number of steps and of validation batches.
static inline void training_open_data(Training* t, const GPT2Config* config) {
    Error err;
    int B = t->batch.B, T = t->batch.T, V = config->vocab_size;
    bool shuffle = args->shuffle && !args->overfit;
    require(t->batch.micro_steps > 0); // the batch is settled first
    if (!dataloader_open(&t->train, args->train_data, B, T, 0, 1, V, shuffle, (uint64_t)args->seed, &err)) {
        die("%s", err.text);
    }
    t->has_val = args->val_data != NULL;
    if (t->has_val && !dataloader_open(&t->val, args->val_data, B, T, 0, 1, V, false, 0, &err)) { die("%s", err.text); }
    int64_t val_epoch = t->has_val ? t->val.batches_per_epoch : 0;
    t->num_val_batches = args->val_steps < val_epoch ? args->val_steps : val_epoch;
    t->num_steps = args->num_steps;
    if (t->num_steps < 0) {
        t->num_steps = t->train.batches_per_epoch * B * T / t->batch.total;
        if (t->num_steps == 0) { t->num_steps = 1; }
    }
    printf("data: %lld tokens in %lld shards for training%s", (long long)t->train.num_tokens,
           (long long)t->train.num_shards, t->has_val ? "" : ", none for validation (-j)");
    if (t->has_val) { printf(", %lld for validation", (long long)t->val.num_tokens); }
    printf("; %lld steps of %lld tokens\n", (long long)t->num_steps, (long long)t->batch.total);
    LrSchedule schedule = {args->schedule, args->learning_rate, args->final_fraction, args->warmup_steps, t->num_steps};
    t->schedule = schedule;
    if (!lr_schedule_check(&t->schedule, &err)) { die("%s", err.text); }
}

// The value that a user would have typed: 0.02, and not the float next to it, 0.0199999996.
static inline double as_typed(float x) {
    char text[64];
    cli_format_float(text, sizeof(text), x);
    return strtod(text, NULL);
}

// Into run: what must not change unnoticed between the parts of a run, as it stands in state.json.
static inline void fill_run_settings(RunState* run, const Training* t) {
    run->B = t->batch.B;
    run->T = t->batch.T;
    run->total_batch_tokens = t->batch.total;
    run->seed = (uint64_t)args->seed;
    run->learning_rate = as_typed(args->learning_rate);
    snprintf(run->schedule, sizeof(run->schedule), "%s", args->schedule);
    run->warmup_steps = args->warmup_steps;
    run->num_steps = t->num_steps;
    run->final_fraction = as_typed(args->final_fraction);
    run->weight_decay = as_typed(args->weight_decay);
    run->beta1 = as_typed(args->beta1);
    run->beta2 = as_typed(args->beta2);
    run->eps = as_typed(args->eps);
    run->grad_clip = as_typed(args->clip);
    run->skip_loss_z = as_typed(args->skip_loss_z);
    run->skip_norm_z = as_typed(args->skip_norm_z);
}

// Begins the run, or continues that of t->checkpoint: fills params, m, v (num_parameters each) from it; in a new run they
// are left as they are. From here on there is something written, in -o.
static inline void training_begin(Training* t, const GPT2Config* config, float* params, float* m, float* v) {
    Error err;
    t->run.config = *config;
    t->run.sampler_rng = splitmix64((uint64_t)args->seed);
    fill_run_settings(&t->run, t);
    if (t->checkpoint[0]) {
        if (!run_load(t->checkpoint, &t->run, params, m, v, &err) ||
            !dataloader_restore(&t->train, &t->run.loader, &err)) {
            die("%s", err.text);
        }
        RunState now = t->run;
        fill_run_settings(&now, t);
        run_print_changes(stdout, &t->run, &now);
        t->run = now;
        printf("resumed at step %lld from %s\n", (long long)t->run.step, t->checkpoint);
    }
    if (args->output && !make_directories(args->output, &err)) { die("-o %s", err.text); }
    if (!logger_open(&t->logger, args->output, t->checkpoint[0] ? t->run.step : -1, &err)) { die("-o %s", err.text); }
}

// Saves the state after t->run.step steps with params, m, v (num_parameters each), and deletes what -nk lets go.
static inline void training_save(Training* t, const float* params, const float* m, const float* v) {
    Error err;
    double start = time_ms();
    dataloader_state(&t->train, &t->run.loader);
    if (!run_save(args->output, &t->run, params, m, v, t->has_tokenizer ? &t->tokenizer : NULL, &err)) {
        die("checkpoint of step %lld not saved, earlier ones are untouched: %s", (long long)t->run.step, err.text);
    }
    if (!run_prune(args->output, args->keep, args->major_every, &err)) { fprintf(stderr, "warning: %s\n", err.text); }
    printf("saved %s/step_%08lld (%.0f ms)\n", args->output, (long long)t->run.step, time_ms() - start);
}

// ---- a step -------------------------------------------------------------------------

// What is done between two steps, in this order.
typedef struct {
    bool validate, sample, save, stop;
} Due;

// What is due after t->run.step steps, in a run that began, or went on, after first_step steps.
static inline Due training_due(const Training* t, int64_t first_step) {
    int64_t step = t->run.step;
    bool last = step >= t->num_steps;
    // validation, sampling and saving of this step were done before the checkpoint was written
    bool done = first_step > 0 && step == first_step;
    bool can_validate = t->has_val || args->hellaswag;
    Due due;
    due.stop = last || run_stop_signal;
    due.validate = !done && can_validate && args->val_every && (last || step % args->val_every == 0);
    due.sample = !done && step > 0 && args->sample_every && (last || step % args->sample_every == 0);
    due.save = !done && step > 0 && args->output && (due.stop || (args->save_every && step % args->save_every == 0));
    return due;
}

// A step as it is reported; the program fills in all but the z-scores.
typedef struct {
    int64_t step;        // from 1
    float learning_rate; // of this step
    double loss;
    double norm;           // of the gradient, before clipping
    double loss_z, norm_z; // z-scores, NaN while their windows fill
    double ms;             // time of the step
} StepReport;

// Takes the z-scores of r->loss and r->norm, once for each step, and says whether the step may change the weights: loss and
// norm are finite, and not further out than -sl and -sg allow.
static inline bool training_judge(Training* t, StepReport* r) {
    r->loss_z = outlier_update(&t->run.loss_outliers, r->loss);
    r->norm_z = outlier_update(&t->run.norm_outliers, r->norm);
    bool loss_is_out = args->skip_loss_z > 0 && r->loss_z > args->skip_loss_z;
    bool norm_is_out = args->skip_norm_z > 0 && r->norm_z > args->skip_norm_z;
    return isfinite(r->loss) && isfinite(r->norm) && !loss_is_out && !norm_is_out;
}

// Counts a step that was taken; of one that did not change the weights (applied: false) it says why.
static inline void training_count(Training* t, const StepReport* r, bool applied) {
    bool finite = isfinite(r->loss) && isfinite(r->norm);
    t->nonfinite_in_a_row = finite ? 0 : t->nonfinite_in_a_row + 1;
    if (applied) { return; }
    t->run.skipped_steps++;
    if (!finite) {
        printf("step %lld: loss %f, gradient norm %f: not finite, weights left as they are\n", (long long)r->step,
               r->loss, r->norm);
    } else if (args->skip_loss_z > 0 && r->loss_z > args->skip_loss_z) {
        printf("step %lld: loss z-score %.2f is over -sl %g: update skipped\n", (long long)r->step, r->loss_z,
               (double)args->skip_loss_z);
    } else {
        printf("step %lld: gradient norm z-score %.2f is over -sg %g: update skipped\n", (long long)r->step, r->norm_z,
               (double)args->skip_norm_z);
    }
}

// FLOPs of training on one token: 6 for each weight of a matmul, and attention's, which are causal.
static inline double training_flops_per_token(const GPT2Config* c, int T) {
    double matmul_params = (double)num_parameters(c) - (double)param_size(c, 1); // without wpe
    return 6.0 * matmul_params + 6.0 * c->num_layers * (double)c->channels * T;
}

// FLOP/s of a run whose steps take this long.
static inline double training_flops(const Training* t, double ms) {
    return training_flops_per_token(&t->run.config, t->batch.T) * (double)t->batch.total / ms * 1e3;
}

// Prints the line of a step and logs it. machine_flops: the FLOP/s of 100% MFU. precision: "bf16", say. extra: columns
// that only this program has, each as " | 1.0 GB"; or "".
static inline void training_report(Training* t, const StepReport* r, double machine_flops, const char* precision,
                                   const char* extra) {
    char line[512], left[32];
    double tokens_per_second = (double)t->batch.total / r->ms * 1e3;
    t->step_ms = t->step_ms > 0 ? 0.9 * t->step_ms + 0.1 * r->ms : r->ms;
    format_step_line(line, sizeof(line), r->step, t->num_steps, r->loss, r->loss_z, r->norm, r->norm_z,
                     r->learning_rate, r->ms, 100.0 * training_flops(t, r->ms) / machine_flops, precision,
                     tokens_per_second);
    format_duration(left, sizeof(left), (double)(t->num_steps - r->step) * t->step_ms * 1e-3);
    printf("%s%s | ETA %s\n", line, extra, left);
    logger_train(&t->logger, r->step, r->loss, r->learning_rate, r->norm, r->ms, tokens_per_second);
}

// A sample in the middle of a run. Between begin and end the program continues `prompt` by args->sample_tokens with
// `sampler`, and the text goes to `out`.
typedef struct {
    int prompt; // one token: the end of a text, which is where another begins
    Sampler sampler;
    TextOutput out;
} TrainingSample;

static inline void training_sample_begin(const Training* t, TrainingSample* s) {
    int eot = t->has_tokenizer ? t->tokenizer.eot_id : t->run.config.vocab_size - 1;
    Sampler sampler = {1.0f, 0, 1.0f, t->run.sampler_rng};
    s->prompt = eot >= 0 ? eot : 0;
    s->sampler = sampler;
    s->out = text_begin(t->has_tokenizer ? &t->tokenizer : NULL, stdout);
    printf("generating:\n---\n");
}

// good: the logits were numbers.
static inline void training_sample_end(Training* t, TrainingSample* s, bool good) {
    text_end(&s->out);
    printf("---\n");
    if (!good) { printf("the logits are not numbers: no sample\n"); }
    t->run.sampler_rng = s->sampler.rng;
    logger_text(&t->logger, t->run.step, s->out.text, s->out.length);
    free(s->out.text);
}

// ---- the end of a run ---------------------------------------------------------------

// Stops a run that makes no progress; weights_are_good: they are finite, and saved if there is an -o.
__attribute__((noreturn)) static inline void training_give_up(bool weights_are_good) {
    die("loss or gradients were not finite %d steps in a row: stopped, %s", args->max_nonfinite,
        !weights_are_good ? "and the weights themselves are not finite: begin from others"
        : args->output    ? "the weights of the last good step are saved; a lower -l or a longer -u may help"
                          : "nothing saved (no -o); a lower -l or a longer -u may help");
}

// What is said at the end. Returns the exit code.
static inline int training_end(Training* t) {
    Error err;
    int code = EXIT_SUCCESS;
    if (run_stop_signal) {
        printf("%s: stopped after step %lld; %s\n", strsignal(run_stop_signal), (long long)t->run.step,
               args->output ? "go on with the same flags and -y 1" : "nothing saved, for there is no -o");
        code = args->output ? EXIT_SUCCESS : 128 + run_stop_signal;
    }
    if (t->run.skipped_steps) { printf("%lld steps were skipped\n", (long long)t->run.skipped_steps); }
    if (!logger_close(&t->logger, &err)) { fprintf(stderr, "warning: %s\n", err.text); }
    dataloader_close(&t->train);
    if (t->has_val) { dataloader_close(&t->val); }
    if (t->has_tokenizer) { tokenizer_free(&t->tokenizer); }
    return code;
}

// ---- prompts --------------------------------------------------------------------------

// The tokens of a prompt; "" is the beginning of a document. The caller frees *prompt. Returns their number.
static inline int encode_prompt(int** prompt, const char* text, const Tokenizer* tokenizer, bool has_tokenizer,
                                int max_seq_len) {
    TokenBuffer tokens;
    memset(&tokens, 0, sizeof(tokens));
    if (text[0]) {
        if (!has_tokenizer) { die("no vocabulary beside %s: give one with --tokenizer", args->model); }
        if (!tokenizer->can_encode) {
            die("this vocabulary has no merges, so it cannot read a prompt: give vocab.json and merges.txt with "
                "--tokenizer");
        }
        tokenizer_encode(tokenizer, text, strlen(text), &tokens);
    }
    int eot = has_tokenizer ? tokenizer->eot_id : -1, n = (int)tokens.count;
    *prompt = (int*)malloc_check(((size_t)n + 1) * sizeof(int));
    for (int i = 0; i < n; i++) { (*prompt)[i] = (int)tokens.ids[i]; }
    if (n == 0) { (*prompt)[n++] = eot >= 0 ? eot : 0; }
    if (n > max_seq_len) { die("--prompt has %d tokens, but the model only %d positions: shorten it", n, max_seq_len); }
    token_buffer_free(&tokens);
    return n;
}

#endif
