/*
A training run, as far as train_gpt2.c and train_gpt2.cu share it: its data and the shape of its batches; how it starts,
or resumes from a checkpoint; how it saves; what is due between two steps (validation, a sample, a checkpoint); the
figures of a step, as printed and logged; and the end. The model and the training loop itself are in the two programs.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "checkpoint.h"
#include "cli.h"
#include "dataloader.h"
#include "flags.h"
#include "gpt2.h"
#include "logger.h"
#include "model_source.h"
#include "outlier_detector.h"
#include "rand.h"
#include "ranks.h"
#include "recipes.h"
#include "run_state.h"
#include "sampler.h"
#include "saver.h"
#include "schedulers.h"
#include "status.h"
#include "stop.h"
#include "text_output.h"
#include "tokenizer.h"
#include "utils.h"
#include <math.h>
#include <sys/statvfs.h>

// ---- the recipe -----------------------------------------------------------------------

// Chooses the recipe of the run, and sets what it says so far: all but what depends on the memory and on the data. A run that
// resumes keeps what it has saved. Called before the ranks of a run compare their flags.
static inline void choose_recipe(void) {
    Path saved;
    GPT2Config config;
    Error err;
    bool fresh = is_descriptor(args->model),
         resumes = args->output && args->resume && run_has_checkpoints(args->output);
    const char* name = args->recipe ? args->recipe : args->overfit ? "overfit" : fresh ? "pretrain" : "finetune";
    double num_params = 1000e6; // not known: a careful rate
    if (fresh && new_model_config(&config, args->model, &err)) { num_params = (double)num_parameters(&config); }
    if (resumes) {
        path_set(&saved, "%s/recipe.txt", args->output);
        bool has_saved = file_exists(saved.text); // not if it began before there were recipes
        name = has_saved ? recipe_load(saved.text, args->recipe) : args->recipe ? args->recipe : "llmc";
        path_set(&saved, "%s/config", args->output);
        if (has_saved) { recipe_load_saving(saved.text); }
    }
    recipe_apply(name, num_params);
}

// Saves the flags of a run into its directory: all of them, with which it can be repeated, and those that the recipe has set.
static inline void save_recipe(void) {
    Path path;
    Error err;
    char drawn[64] = "";
    if (args->seed < 0) { snprintf(drawn, sizeof(drawn), "--seed %lld\n", (long long)run_seed()); }
    path_set(&path, "%s/config", args->output);
    bool ok =
        recipe_write_flags(path.text, true, "The flags of this run: --config FILE -o NEW repeats it.", drawn, &err);
    path_set(&path, "%s/recipe.txt", args->output);
    if (ok && recipe.name[0] && !recipe.loaded) {
        ok = recipe_write_flags(path.text, false, "What the recipe has set, and a resumed run keeps.", "", &err);
    }
    if (!ok) { die("-o %s", err.text); }
}

// ---- the batch and the data ---------------------------------------------------------

// -t, or its default.
static inline int sequence_length(const GPT2Config* config) {
    return args->T > 0 ? args->T : config->max_seq_len < 1024 ? config->max_seq_len : 1024;
}

// What bounds the micro-batch that the recipe chooses, besides the memory. most: sequences.
static inline RecipeBounds batch_bounds(const GPT2Config* config, int most) {
    RecipeBounds bounds = {
        sequence_length(config), run_num_ranks, args->total_batch, most, args->train_data, args->fp8 != FP8_OFF, 0};
    return bounds;
}

// Sets -b if the recipe chooses it: the largest micro-batch, of at most `most` sequences, that needs at most `have` bytes.
// bytes_of: what a run with this micro-batch needs.
static inline void choose_batch(const GPT2Config* config, int most, double have,
                                double (*bytes_of)(const GPT2Config*, int, int)) {
    RecipeBounds bounds = batch_bounds(config, most);
    int B = recipe_batch(&bounds);
    while (B > 1 && bytes_of(config, B, bounds.T) > have) { B = recipe_smaller_batch(&bounds, B); }
    if (from_rank0) { from_rank0(&B, sizeof(B)); }
    if (B > 0) { recipe_set_batch(B); }
}

// Fills in the defaults of -t and -d, which depend on the model, and checks that -b, -t and -d fit the model and each
// other.
static inline Batch settle_batch(const GPT2Config* config) {
    int maxT = config->max_seq_len;
    Batch batch = {args->B, sequence_length(config), args->total_batch, 0};
    if (batch.T > maxT) {
        die("-t %d is more than the %d positions of the model: %s", batch.T, maxT,
            is_descriptor(args->model) ? "--positions sets those of a new model" : "take a smaller -t");
    }
    int64_t tokens = (int64_t)batch.B * batch.T * run_num_ranks;
    if (batch.total == 0) { batch.total = tokens; }
    if (batch.total % tokens != 0) {
        char ranks[32] = "";
        long long below = (long long)(batch.total / tokens * tokens), above = below + (long long)tokens;
        if (run_num_ranks > 1) { snprintf(ranks, sizeof(ranks), " times %d ranks", run_num_ranks); }
        die("-d %lld is not a multiple of -b %d times -t %d%s = %lld tokens: take %lld", (long long)batch.total,
            batch.B, batch.T, ranks, (long long)tokens, below > 0 ? below : above);
    }
    batch.micro_steps = batch.total / tokens;
    return batch;
}

// ---- --plan -------------------------------------------------------------------------

// The largest micro-batch that needs at most `have` bytes, up to 262,144 tokens; 0: none.
static inline int largest_batch(const GPT2Config* config, int T, double have,
                                double (*bytes_of)(const GPT2Config*, int, int)) {
    int most = 262144 / T > 0 ? 262144 / T : 1, fits = 0, beyond = most + 1;
    while (beyond - fits > 1) {
        int B = fits + (beyond - fits) / 2;
        if (bytes_of(config, B, T) <= have) {
            fits = B;
        } else {
            beyond = B;
        }
    }
    return fits;
}

// --plan: prints for GPT-2's sizes, or for the model that -e names, which micro-batches need at most `have` bytes, and what
// the recipe sets. Its micro-batch has at most `most` tokens, and takes the share `usable` of the memory.
static inline void print_plans(double have, double usable, int most, double (*bytes_of)(const GPT2Config*, int, int)) {
    static const char* const sizes[] = {"d6", "d12", "d24", "d36", "d48"};
    const Settings typed = *args;
    GPT2Config config;
    Error err;
    bool one = recipe_flag_is_typed("model");
    if (one) {
        ModelSource source;
        Tokenizer tokenizer;
        bool has_tokenizer;
        model_source_open(&source, resolve_model_path(args->model), &has_tokenizer, &tokenizer);
        config = source.config;
        model_source_close(&source);
        if (has_tokenizer) { tokenizer_free(&tokenizer); }
    }
    printf("plan for %.1f GB%s; nothing is started\n", have * 1e-9, args->memory ? "" : " that are free here");
    for (size_t i = 0; i < (one ? 1 : sizeof(sizes) / sizeof(sizes[0])); i++) {
        forget_recipe(&typed);
        if (!one) {
            cli_set(&cli_defaults()->opts[cli_find("model")], sizes[i]);
            bool valid = new_model_config(&config, sizes[i], &err) && config_check(&config, "-e", &err);
            if (!valid) { die("%s", err.text); }
        }
        choose_recipe();
        int T = sequence_length(&config), B = largest_batch(&config, T, have, bytes_of);
        printf("%s, %.2f M parameters, -t %d: ", args->model, (double)num_parameters(&config) * 1e-6, T);
        if (B == 0) {
            printf("does not fit, -b 1 needs %.2f GB\n", bytes_of(&config, 1, T) * 1e-9);
            continue;
        }
        choose_batch(&config, most / T > 0 ? most / T : 1, usable * have, bytes_of);
        printf("-b %d at most needs %.2f GB, -b %d needs %.2f GB\n", B, bytes_of(&config, B, T) * 1e-9, args->B,
               bytes_of(&config, args->B, T) * 1e-9);
        if (args->num_steps >= 0) { recipe_settle(args->num_steps, settle_batch(&config).micro_steps); }
        recipe_print(stdout);
    }
}

// ---- a run --------------------------------------------------------------------------

// All state of a training run except its model.
typedef struct {
    RunState run;            // step, position in the data, outlier windows: all checkpointed state but the tensors
    Batch batch;             // from settle_batch(); set by the training program once it has opened the model
    int64_t num_steps;       // the run ends after this many steps: -x, or one epoch
    int val_B;               // sequences per batch in validation: batch.B, or fewer if there is less data
    int val_ranks;           // ranks that share the validation data: all, or 1: each has all of it
    int64_t num_val_batches; // batches per validation and rank: -m, at most all of the data; 0 without validation data
    DataLoader train, val;
    bool has_val;
    Tokenizer tokenizer;
    bool has_tokenizer;
    int start_token; // begins a sample
    Logger logger;
    LrSchedule schedule, muon_schedule;
    DataLoaderState position; // in the training data, after the last complete step
    int64_t tasks_step;       // the step whose validation and sample are done; -1: none
    int64_t saved_step;       // the step of the newest checkpoint that this run saved or resumed from; -1: none
    double kept_val_loss;     // of the checkpoint that --keep-best has marked; infinite before the first one
    int64_t best_step;        // the step with the lowest validation loss, if --keep-best is to save it; -1: none
    Saver saver;              // writes the checkpoints, and holds the lock on -o
    double save_start_ms;     // when the run began to wait for the newest save (time_ms)
    double save_pause_ms;     // how long it waited
    int failed_saves;
    double clock_rate; // --save-minutes: the clock's seconds in a second, 1 but in tests
    double taken_s;  // on that clock: when the weights of the newest save were taken; before, the start of this process
    Path checkpoint; // path of the checkpoint that the run resumes from; "" for a new run
    int nonfinite_in_a_row;
    int64_t first_step, first_skipped; // of this process: run.step and run.skipped_steps when it began
    int64_t num_nonfinite;             // steps of this process that were skipped because they were not finite
    double line_ms, val_line_ms;       // when a line of a step, or of a validation, stayed on the terminal (time_ms)
    double val_loss;                   // the newest; NaN: none
    // for the estimate of the time left
    double step_ms;                            // exponential moving average
    double validation_ms, sample_ms, write_ms; // the newest times; write_ms: of a save that the run waits for
} Training;

// A run of which nothing is known yet.
static inline void training_clear(Training* t) {
    memset(t, 0, sizeof(*t));
    t->saver.lock = -1;
    t->tasks_step = t->saved_step = t->best_step = -1;
    t->val_loss = NAN;
}

// Decides from -o and -y whether this is a new run or resumes from t->checkpoint. Called before the model and the data
// are opened and before anything is saved.
static inline void training_find_checkpoint(Training* t) {
    Error err;
    training_clear(t);
    if (!args->train_data) {
        die("no training data: give shards with -i, which dev/data/tokenize makes from text; or a --prompt to "
            "continue, "
            "or data to --eval");
    }
    if (cli_typed(&args->muon_learning_rate) && args->muon_learning_rate > 0 && !uses_muon()) {
        die("--muon-learning-rate needs --optimizer muon");
    }
    if (args->output && file_exists(args->output) && !is_directory(args->output)) {
        die("-o %s: exists and is not a directory: give another -o", args->output);
    }
    if (args->output && directory_has_model(args->output) && !run_has_checkpoints(args->output)) {
        die("-o %s holds a model (config.json or a file of weights), which the run would hide: give another -o",
            args->output);
    }
    if (args->output && is_directory(args->output)) {
        t->saver.lock = run_lock(args->output, &err);
        if (t->saver.lock == -1) { die("-o %s", err.text); }
        // must come before the search, because it may restore a checkpoint that an interrupted save had renamed
        if (!run_remove_leftovers(args->output, &err)) { die("%s", err.text); }
    }
    bool has_checkpoints = args->output && run_has_checkpoints(args->output);
    if (has_checkpoints && !args->resume) {
        die("%s holds checkpoints of an earlier run; resume it with -y 1, or give another -o", args->output);
    }
    if (has_checkpoints && !run_find_newest(args->output, &t->checkpoint, false, &err)) { die("%s", err.text); }
    if (t->checkpoint.text[0]) {
        RunState saved;
        if (!run_load_state(t->checkpoint.text, &saved, &err)) { die("%s", err.text); }
        if (strcmp(saved.optimizer, args->optimizer) != 0) {
            die("%s was saved with --optimizer %s: resume with it, or start a new run with -e %s and another -o",
                t->checkpoint.text, saved.optimizer, t->checkpoint.text);
        }
        if (args->seed < 0) { drawn_seed = (int64_t)saved.seed; } // goes on with the seed that the run has drawn
    }
    if (args->seed < 0) { printf("seed %lld\n", (long long)run_seed()); }
    if (args->keep_best && (!args->output || !args->val_data || !args->val_every)) {
        die("--keep-best needs an output directory (-o) and a validation loss (-j, -v)");
    }
    if (args->save_minutes > 0 && !args->output) {
        die("--save-minutes saves checkpoints to the -o directory, but -o is not given");
    }
    if (args->save_every > 0 && !args->output) { die("-n saves checkpoints to the -o directory, but -o is not given"); }
    if (args->resume && !args->output) { die("-y 1 resumes the run in the -o directory, but -o is not given"); }
    if (args->resume && !has_checkpoints) {
        print_line(stdout, "%s holds no checkpoint yet: starting a new run", args->output);
    }
}

// Opens the model to start from: the one in t->checkpoint, or for a new run the one that -e names.
static inline void training_open_model(Training* t, ModelSource* source) {
    Path path = t->checkpoint.text[0] ? t->checkpoint : resolve_model_path(args->model);
    if (t->checkpoint.text[0] && strcmp(args->model, "d12") != 0) { // not the default
        print_line(stdout, "-e %s is not used: the run resumes from %s", args->model, t->checkpoint.text);
    }
    model_source_open(source, path, &t->has_tokenizer, &t->tokenizer);
    if (!source->fresh && source->file.dropout > 0.0f) {
        printf("note: %s: transformers would train it with a dropout of up to %g, this program trains without\n",
               path.text, (double)source->file.dropout);
    }
    int T = sequence_length(&source->config), positions = source->config.max_seq_len;
    if (source->fresh && T < positions) {
        printf("note: -t %d trains the first %d of %d positions: --positions %d makes a model without the others\n", T,
               T, positions, T);
    }
    t->run.eot_id = model_eot(source, t->has_tokenizer ? &t->tokenizer : NULL);
    t->start_token = model_start(source, t->has_tokenizer ? &t->tokenizer : NULL);
}

// True if the same tokens are added or special in vocabularies of the same tokens, apart from end-of-text.
static inline bool same_special_tokens(const Tokenizer* a, const Tokenizer* b) {
    bool same = true;
    for (int id = 0; id < a->vocab_size; id++) {
        bool equal = tokenizer_effect(a->flags[id]) == tokenizer_effect(b->flags[id]);
        same = same && (equal || id == a->eot_id || id == b->eot_id);
    }
    return same || !a->can_encode || !b->can_encode; // a tokenizer.bin has no flags
}

// Ends the program if the shards of `pattern` (flag: -i or -j) were made with another vocabulary than the model's: their ids
// would stand for other tokens. Shards without a vocabulary beside them are trusted. Returns the token that separates
// their documents, or -1 if it is not known.
static inline int check_data_vocabulary(const Training* t, const char* flag, const char* pattern) {
    Error err;
    Tokenizer other;
    if (!t->has_tokenizer || !pattern) { return -1; }
    if (!find_data_tokenizer(&other, pattern, &err)) {
        if (err.text[0]) { die("%s %s: the vocabulary beside these shards: %s", flag, pattern, err.text); }
        return -1;
    }
    char what[200];
    if (!tokenizer_same(&t->tokenizer, &other, what, sizeof(what))) {
        die("%s %s: these shards were made with another vocabulary than the model's (%s): make them with "
            "dev/data/tokenize -t and the model's vocabulary",
            flag, pattern, what);
    }
    bool same_flags = same_special_tokens(&t->tokenizer, &other);
    int eot = other.eot_id;
    tokenizer_free(&other);
    if (!same_flags) { // the shards' ids stand for the same tokens in either case
        print_line(stderr,
                   "note: %s %s: the vocabulary of these shards has other added or special tokens than the model's, "
                   "which the run keeps: --tokenizer chooses one",
                   flag, pattern);
    }
    return eot;
}

// Checks the vocabularies beside the shards. The end-of-text of the training data becomes that of the model, whose own
// vocabulary may name another one or, like RoBERTa's, none.
static inline void settle_vocabulary(Training* t) {
    int eot = check_data_vocabulary(t, "-i", args->train_data);
    int val_eot = check_data_vocabulary(t, "-j", args->val_data);
    if (eot >= 0) {
        tokenizer_set_eot(&t->tokenizer, eot);
        t->run.eot_id = t->start_token = eot;
    }
    if (eot >= 0 && val_eot >= 0 && val_eot != eot) {
        die("-j %s: end-of-text is token %d, but %d in the training data: make both with the same --eot",
            args->val_data, val_eot, eot);
    }
}

// Notes validation shards that are among the training data, as they are if -i is 'x_*.bin'.
static inline void note_shared_shards(const Training* t) {
    int64_t shared = 0, first = -1;
    if (t->val.fingerprint == t->train.fingerprint) {
        printf("note: -j names the training data: the validation loss says nothing about other text\n");
        return;
    }
    for (int64_t i = 0; i < t->val.num_shards; i++) {
        struct stat a, b;
        bool found = false;
        if (stat(t->val.shards[i].path, &a) != 0) { continue; }
        for (int64_t k = 0; k < t->train.num_shards && !found; k++) {
            found = stat(t->train.shards[k].path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
        }
        if (found && shared++ == 0) { first = i; }
    }
    if (shared == 0) { return; }
    print_line(
        stdout,
        "note: %lld of the %lld shards of -j are training data, too (%s): the validation loss says little about other "
        "text; '*_train_*.bin' for -i leaves them out",
        (long long)shared, (long long)t->val.num_shards, t->val.shards[first].path);
}

// Prints what follows from the flags of the schedule: how the learning rate rises and falls.
static inline void training_print_schedule(const Training* t) {
    const LrSchedule* s = &t->schedule;
    char warmup[64] = "", end[96] = ", constant";
    if (s->warmup_steps > 0) {
        snprintf(warmup, sizeof(warmup), " after %lld steps of warm-up", (long long)s->warmup_steps);
    }
    if (s->final_fraction != 1.0f && strcmp(s->type, "constant") != 0) {
        snprintf(end, sizeof(end), ", %s to %.3g at step %lld", s->type,
                 as_typed(s->learning_rate) * as_typed(s->final_fraction), (long long)t->num_steps);
    }
    printf("learning rate %g%s%s; %s\n", as_typed(s->learning_rate), warmup, end, args->optimizer);
}

// Opens the data loaders for batches of shape t->batch, and sets t->num_steps, t->num_val_batches and t->schedule.
static inline void training_open_data(Training* t, const GPT2Config* config) {
    Error err;
    int B = t->batch.B, T = t->batch.T, V = config->vocab_size;
    bool shuffle = args->shuffle && !args->overfit;
    require(t->batch.micro_steps > 0); // t->batch must have been set by settle_batch()
    settle_vocabulary(t);
    if (!dataloader_open(&t->train, args->train_data, B, T, run_rank, run_num_ranks, V, shuffle, (uint64_t)run_seed(),
                         &err)) {
        die("--train-data: %s", err.text);
    }
    t->num_steps = args->num_steps;
    if (t->num_steps < 0) {
        t->num_steps = t->train.batches_per_epoch * B * T * run_num_ranks / t->batch.total;
        if (t->num_steps == 0) { t->num_steps = 1; }
    }
    recipe_settle(t->num_steps, t->batch.micro_steps);
    t->has_val = args->val_data != NULL;
    t->val_B = B;
    t->val_ranks = run_num_ranks;
    if (t->has_val) {
        // fewer sequences at a time, if the data is too short for a whole batch; then each rank validates on all of it
        Error first = {""};
        bool ok = dataloader_open(&t->val, args->val_data, B, T, run_rank, run_num_ranks, V, false, 0, &first);
        while (!ok && (t->val_B > 1 || t->val_ranks > 1)) {
            if (t->val_B > 1) {
                t->val_B /= 2;
            } else {
                t->val_ranks = 1;
            }
            ok = dataloader_open(&t->val, args->val_data, t->val_B, T, t->val_ranks > 1 ? run_rank : 0, t->val_ranks, V,
                                 false, 0, &err);
        }
        if (!ok) { die("--val-data: %s", first.text); }
        note_shared_shards(t);
        if (t->val_B < B) { printf("note: little validation data: -b %d instead of %d there\n", t->val_B, B); }
    }
    int64_t val_epoch = t->has_val ? t->val.batches_per_epoch : 0;
    t->num_val_batches = args->val_steps < val_epoch ? args->val_steps : val_epoch;
    printf("data: %lld tokens in %lld shards for training%s", (long long)t->train.num_tokens,
           (long long)t->train.num_shards, t->has_val ? "" : ", none for validation (-j)");
    if (t->has_val) { printf(", %lld for validation", (long long)t->val.num_tokens); }
    printf("; %lld steps of %lld tokens\n", (long long)t->num_steps, (long long)t->batch.total);
    if (t->batch.total > t->train.num_tokens) {
        printf("note: a step of %lld tokens (-d) is more than all training data, %lld tokens\n",
               (long long)t->batch.total, (long long)t->train.num_tokens);
    }
    LrSchedule schedule = {args->schedule, args->learning_rate, args->final_fraction, args->warmup_steps, t->num_steps};
    t->schedule = t->muon_schedule = schedule;
    if (args->muon_learning_rate > 0) { t->muon_schedule.learning_rate = args->muon_learning_rate; }
    if (!lr_schedule_check(&t->schedule, &err)) { die("%s", err.text); }
    training_print_schedule(t);
    if (args->warmup_steps > t->num_steps && t->num_steps > 0 && strcmp(args->schedule, "constant") != 0) {
        printf(
            "note: the warm-up has %lld steps (-u) and the run %lld: the learning rate ends at %.2e instead of %.2e\n",
            (long long)args->warmup_steps, (long long)t->num_steps, (double)lr_at(&t->schedule, t->num_steps - 1),
            (double)args->learning_rate);
    }
}

// Fills the settings of `run` from the flags. They are saved in state.json, so that a change between a run and its
// resumption can be reported.
static inline void fill_run_settings(RunState* run, const Training* t) {
    run->B = t->batch.B;
    run->T = t->batch.T;
    run->total_batch_tokens = t->batch.total;
    run->seed = (uint64_t)run_seed();
    run->learning_rate = as_typed(args->learning_rate);
    snprintf(run->schedule, sizeof(run->schedule), "%s", args->schedule);
    run->warmup_steps = args->warmup_steps;
    run->num_steps = t->num_steps;
    run->final_fraction = as_typed(args->final_fraction);
    run->weight_decay = as_typed(args->weight_decay);
    snprintf(run->optimizer, sizeof(run->optimizer), "%s", args->optimizer);
    run->muon_learning_rate = uses_muon() ? as_typed(t->muon_schedule.learning_rate) : 0.0;
    run->muon_momentum = uses_muon() ? as_typed(args->muon_momentum) : 0.0;
    run->beta1 = as_typed(args->beta1);
    run->beta2 = as_typed(args->beta2);
    run->eps = as_typed(args->eps);
    run->grad_clip = as_typed(args->clip);
    run->skip_loss_z = as_typed(args->skip_loss_z);
    run->skip_norm_z = as_typed(args->skip_norm_z);
    run->fp8_stage = args->fp8;
}

// The clock of --save-minutes, in seconds.
static inline double training_clock(const Training* t) { return time_ms() * 1e-3 * t->clock_rate; }

// Says what the run will save when, and the room that this takes; or that it will save nothing.
static inline void training_announce_saves(const GPT2Config* config) {
    char when[64] = "at the end", kept[64] = "all are kept", each[32], all[32], room[32];
    struct statvfs disk;
    double bytes = 12.0 * (double)num_parameters(config); // weights and two moments in fp32
    bool often = args->save_minutes > 0 || args->save_every > 0 || args->keep_best;
    if (args->profile) { return; }
    if (!args->output) {
        printf("note: nothing will be saved: -o DIR saves checkpoints and logs\n");
        return;
    }
    int most = often ? args->keep + 1 : 1; // one more while it is being written
    if (args->save_every > 0) { snprintf(when, sizeof(when), "every %d steps", args->save_every); }
    if (args->save_minutes > 0) {
        snprintf(when, sizeof(when), "so that at most %g minutes of work are lost", (double)args->save_minutes);
    }
    if (args->keep > 0) { snprintf(kept, sizeof(kept), "the newest %d are kept", args->keep); }
    if (!often) { snprintf(kept, sizeof(kept), "one"); }
    format_bytes(each, sizeof(each), bytes);
    format_bytes(all, sizeof(all), bytes * most);
    printf("checkpoints: %s, %s", when, kept);
    if (often) { printf(", %s each", each); }
    if (args->keep > 0 || !often) { printf(": up to %s", all); }
    bool known = statvfs(args->output, &disk) == 0;
    double have = known ? (double)disk.f_bavail * (double)disk.f_frsize : INFINITY;
    if (known) { printf(" of %s that are free", format_bytes(room, sizeof(room), have)); }
    printf("\n");
    if (have < bytes * most) {
        print_line(stdout, "note: -o %s: the disk may be too small for the checkpoints", args->output);
    }
}

// Creates the -o directory of a new run if necessary, and becomes its owner.
static inline void training_own_output(Training* t) {
    Error err;
    bool ours = run_owns(args->output, t->saver.lock, &err) && make_directories(args->output, &err);
    if (!ours) { die("-o %s", err.text); }
    if (t->saver.lock == -1) { // the directory did not exist when the run started, so another run may have created it
        t->saver.lock = run_lock(args->output, &err);
        if (t->saver.lock == -1) { die("-o %s", err.text); }
        if (run_has_checkpoints(args->output)) {
            die("%s now holds checkpoints of a run that started at the same time: give another -o", args->output);
        }
    }
    run_sign_lock(t->saver.lock);
    save_recipe();
}

// Starts a new run, or resumes from t->checkpoint. A resumed run loads params, m, v (num_parameters each) from the
// checkpoint; a new run leaves them unchanged. This is the first function that creates files in the -o directory.
static inline void training_begin(Training* t, const GPT2Config* config, float* params, float* m, float* v) {
    Error err;
    t->run.config = *config;
    t->run.sampler_rng = splitmix64((uint64_t)run_seed());
    t->run.best_val_loss = t->kept_val_loss = INFINITY;
    fill_run_settings(&t->run, t);
    if (t->checkpoint.text[0]) {
        if (!run_load(t->checkpoint.text, &t->run, params, m, v, &err)) { die("%s", err.text); }
        if (!dataloader_restore(&t->train, &t->run.loader, &err)) {
            die("%s: resume with the flags of before, or start a new run from its weights with -e %s -o NEW", err.text,
                t->checkpoint.text);
        }
        RunState now = t->run;
        fill_run_settings(&now, t);
        run_print_changes(stdout, &t->run, &now);
        bool later_stage = t->run.fp8_stage > FP8_OFF && args->fp8 > t->run.fp8_stage; // it quantizes more tensors
        t->run = now;
        // without --fp8 this run does not keep the scales up to date; with a later stage it does not know all of them
        if (args->fp8 == FP8_OFF || later_stage) {
            t->run.num_fp8 = 0;
            memset(t->run.fp8_largest, 0, sizeof(t->run.fp8_largest));
        }
        // validation and sampling of this step were done before the checkpoint was written
        t->kept_val_loss = now.best_val_loss;
        t->tasks_step = t->saved_step = now.step;
        print_line(stdout, "resumed at step %lld from %s", (long long)t->run.step, t->checkpoint.text);
        if (t->run.step >= t->num_steps) {
            print_line(stdout, "nothing to train: step %lld of %lld is done; -x with more steps goes on",
                       (long long)t->run.step, (long long)t->num_steps);
        }
    }
    recipe_print(stdout);
    t->first_step = t->run.step;
    t->first_skipped = t->run.skipped_steps;
    dataloader_state(&t->train, &t->position);
    if (args->output && run_rank == 0) { training_own_output(t); }
    const char* rate = getenv("LLMC_CLOCK_RATE");
    t->clock_rate = rate ? atof(rate) : 1.0;
    t->taken_s = training_clock(t);
    training_announce_saves(config);
    if (!logger_open(&t->logger, run_rank == 0 ? args->output : NULL, t->checkpoint.text[0] ? t->run.step : -1, &err)) {
        die("-o %s", err.text);
    }
}

// Writes what the logs still lack, and closes them.
static inline void training_close_logs(Training* t) {
    Error err;
    if (!logger_close(&t->logger, &err)) { fprintf(stderr, "warning: %s\n", err.text); }
}

// Counts a complete step: one that updated the weights or decided not to.
static inline void training_step_done(Training* t) {
    t->run.step++;
    t->run.num_tokens_seen += t->batch.total;
    dataloader_state(&t->train, &t->position);
}

// ---- checkpoints ----------------------------------------------------------------------

// Between two steps: what was done has ended, a step follows.
static inline void training_next_step(const Training* t) {
    run_finishes = RUN_FINISHES_STEP;
    status_clear();
    if (t->run.step < t->num_steps) {
        status_set("step %lld of %lld", (long long)t->run.step + 1, (long long)t->num_steps);
    }
}

// Reports the save that has just ended. On failure counts it and logs it.
static inline bool training_report_save(Training* t) {
    const Saver* s = &t->saver;
    char pause[64] = "";
    if (!s->saved) {
        t->failed_saves++;
        if (s->best && t->run.best_val_loss == s->state.best_val_loss) { // the best weights are those of before again
            t->run.best_val_loss = t->kept_val_loss;
            t->best_step = -1;
        }
        logger_save_failed(&t->logger, s->state.step, s->error.text);
        return false;
    }
    if (s->best) { t->kept_val_loss = s->state.best_val_loss; }
    t->saved_step = s->state.step;
    t->write_ms = s->ms;
    if (t->save_pause_ms < s->ms) { snprintf(pause, sizeof(pause), "; the run waited for %.0f ms", t->save_pause_ms); }
    print_line(stdout, "saved %s/step_%08lld (%.0f ms%s)", s->dir, (long long)s->state.step, s->ms, pause);
    if (!s->pruned) { fprintf(stderr, "warning: %s\n", s->prune_error.text); }
    return true;
}

// The same for a save that is not the last one of the run.
static inline void training_report_periodic_save(Training* t) {
    if (training_report_save(t) || run_rank > 0) { return; }
    fprintf(stderr,
            "warning: the checkpoint of step %lld was not saved, earlier ones are untouched: %s; the run goes on\n",
            (long long)t->saver.state.step, t->saver.error.text);
}

// Reports an asynchronous save, if one has ended.
static inline void training_poll_save(Training* t) {
    if (saver_poll(&t->saver)) { training_report_periodic_save(t); }
}

// Waits until an asynchronous save, if there is one, has ended, and reports it. Must be called before the tensors of the next
// one are copied.
static inline void training_finish_save(Training* t) {
    t->save_start_ms = time_ms();
    if (t->saver.running) {
        run_finishes = "the checkpoint that is being written";
        status_show("waiting for the checkpoint of step %lld", (long long)t->saver.state.step);
    }
    if (saver_wait(&t->saver)) { training_report_periodic_save(t); }
    training_next_step(t);
}

// True if a save may begin; otherwise sets the results of a save that failed. The directory must still be the one that the run
// has locked. Several processes save together; all of them have to begin, and to take the same result from it. So process 0
// also looks whether it can write there: if not, it could not tell the others, and they would wait.
static inline bool training_can_save(Training* t) {
    Saver* s = &t->saver;
    bool ok = run_rank > 0 || run_owns(s->dir, s->lock, &s->error);
    if (from_rank0) {
        ok = ok && (run_rank > 0 || run_can_begin(s->dir, &s->error));
        from_rank0(&ok, sizeof(ok));
    }
    if (ok) { return true; }
    if (run_rank > 0) { error_set(&s->error, "%s: rank 0 cannot write there", s->dir); }
    s->saved = false;
    s->pruned = true;
    return false;
}

// Saves while the run waits.
static inline void training_save_now(Training* t) {
    if (!training_can_save(t)) { return; }
    t->saver.ranks.token++;
    run_finishes = "the checkpoint that is being written";
    status_show("saving step %lld to %s", (long long)t->run.step, t->saver.dir);
    saver_run(&t->saver);
    training_next_step(t);
    if (from_rank0) { from_rank0(&t->saver.saved, sizeof(t->saver.saved)); }
}

static Training* training_at_exit;

// Runs at exit: a checkpoint that is being written when the program ends with an error is completed.
static inline void training_exit(void) { training_finish_save(training_at_exit); }

// Saves the last checkpoint of a run although it just failed: removes the checkpoints that -nk and -nm would remove after
// a success, and tries again for a minute (LLMC_SAVE_SECONDS). If that does not help, saves to a new directory below
// TMPDIR, /tmp, /var/tmp, HOME or the current directory, and ends the program with a message.
static inline void training_save_anyway(Training* t) {
    Saver* s = &t->saver;
    Error reason = s->error, ignored;
    const char* seconds = getenv("LLMC_SAVE_SECONDS");
    double start = time_ms(), wait_ms = 1e3 * (seconds ? atof(seconds) : 60.0);
    if (run_rank == 0) {
        fprintf(stderr, "warning: the last checkpoint, of step %lld, was not saved: %s; trying again for %.0f s\n",
                (long long)t->run.step, reason.text, wait_ms * 1e-3);
    }
    if (args->keep > 1 && run_rank == 0 && run_owns(args->output, s->lock, &ignored)) {
        run_prune(args->output, args->keep - 1, args->major_every, &ignored);
    }
    for (bool again = true; again;) {
        training_save_now(t);
        if (s->saved) {
            training_report_save(t);
            return;
        }
        again = time_ms() - start < wait_ms;
        if (from_rank0) { from_rank0(&again, sizeof(again)); }
        if (again) { usleep(500000); }
    }
    reason = s->error;
    s->ranks.limit_ms = 30e3; // a directory that other hosts do not see is not waited for any longer
    s->lock = -1;
    const char* const places[] = {getenv("TMPDIR"), "/tmp", "/var/tmp", getenv("HOME"), "."};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        char dir[4000] = "";
        unsigned long long name = run_num_ranks > 1 ? s->ranks.token : (unsigned long long)getpid();
        if (places[i] && places[i][0]) { snprintf(dir, sizeof(dir), "%s/train_gpt2_rescue_%llu", places[i], name); }
        if (from_rank0) { from_rank0(dir, sizeof(dir)); } // other hosts may have other variables
        if (!dir[0]) { continue; }
        s->dir = dir;
        training_save_now(t);
        if (!s->saved) {
            rmdir(dir);
            continue;
        }
        training_close_logs(t);
        die("the checkpoint of step %lld was not saved to -o: %s; it was saved as %s/step_%08lld: move that directory "
            "into %s and resume with -y 1",
            (long long)t->run.step, reason.text, dir, (long long)t->run.step, args->output);
    }
    training_close_logs(t);
    die("the checkpoint of step %lld was not saved, earlier ones are untouched: %s", (long long)t->run.step,
        reason.text);
}

// Ends the program because the weights are not finite and so were not saved. reason: how that was noticed.
__attribute__((noreturn)) static inline void training_refuse_weights(const Training* t, const char* reason) {
    die("%s: the weights after step %lld were not saved: %s", reason, (long long)t->run.step,
        t->saved_step >= 0 ? "resume from the newest checkpoint with -y 1 and a lower -l"
                           : "take a lower -l or a longer -u");
}

// True if checkpoints are written while the run goes on.
static inline bool training_saves_asynchronously(void) {
    return args->output && args->async_save && (args->save_every || args->keep_best || args->save_minutes > 0);
}

// Allocates memory for a copy of the tensors, so that the run can go on while a checkpoint is written. Without it,
// training_save() writes the tensors themselves while the run waits. have: bytes of memory that are left.
static inline void training_allocate_copy(Training* t, const GPT2Config* config, double have) {
    size_t bytes = num_parameters(config) * sizeof(float);
    if (!training_saves_asynchronously()) { return; }
    bool ok = 3.0 * (double)bytes <= have;
    for (int i = 0; i < 3 && ok; i++) {
        ok = (t->saver.copy[i] = (float*)malloc(bytes)) != NULL;
        if (!ok) { break; }
        advise_huge(t->saver.copy[i], bytes);
#pragma omp parallel for
        for (long j = 0; j < (long)bytes; j += 1 << 20) { // so that the first copy does not wait for the system's pages
            memset((char*)t->saver.copy[i] + j, 0, bytes - (size_t)j < 1 << 20 ? bytes - (size_t)j : 1 << 20);
        }
    }
    if (ok) { return; }
    printf("note: no memory for a copy of the weights: the run waits while a checkpoint is written\n");
    for (int i = 0; i < 3; i++) {
        free(t->saver.copy[i]);
        t->saver.copy[i] = NULL;
    }
}

// Saves a checkpoint after t->run.step steps, then deletes older checkpoints as -nk and -nm allow. tensors (3): weights,
// moments m and v (num_parameters each); or NULL, if the parts that this process saves are in t->saver.buffer, which is not
// changed until the next training_finish_save(). That must have been called before. With memory for a copy
// (t->saver.copy, which may be the tensors themselves) returns when they are copied. If saving fails, the run goes on and
// saves when the next checkpoint is due; but if this is the last one, waits for it and does everything to save it, and ends
// the program if that fails.
static inline void training_save(Training* t, float* const* tensors, bool last) {
    Saver* s = &t->saver;
    bool parts = s->ranks.num_ranks > 0, async = !last && (parts ? args->async_save : s->copy[0] != NULL);
    long n = (long)num_parameters(&t->run.config);
    t->taken_s = training_clock(t);
    t->run.loader = t->position;
    s->dir = args->output;
    s->keep = args->keep;
    s->major_every = args->major_every;
    s->tokenizer = t->has_tokenizer ? &t->tokenizer : NULL;
    s->state = t->run;
    s->best = t->best_step == t->run.step;
    for (int i = 0; i < 3 && !parts; i++) {
        s->tensors[i] = async ? s->copy[i] : tensors[i];
        if (s->tensors[i] == tensors[i]) { continue; }
#pragma omp parallel for
        for (long j = 0; j < n; j += 65536) {
            memcpy(s->copy[i] + j, tensors[i] + j, (size_t)(n - j < 65536 ? n - j : 65536) * sizeof(float));
        }
    }
    if (async) {
        if (!training_can_save(t)) {
            training_report_periodic_save(t);
            return;
        }
        s->ranks.token++;
        if (!training_at_exit) { atexit(training_exit); }
        training_at_exit = t;
        saver_start(s);
        t->save_pause_ms = time_ms() - t->save_start_ms;
        return;
    }
    training_save_now(t);
    t->save_pause_ms = INFINITY; // for the whole save
    if (!last) {
        training_report_periodic_save(t);
    } else if (!training_report_save(t)) {
        if (params_not_finite(&s->error)) { training_refuse_weights(t, s->error.text); }
        training_save_anyway(t);
    }
}

// True if the run has weights that no checkpoint holds yet.
static inline bool training_is_unsaved(const Training* t) {
    return args->output && t->run.step > 0 && t->run.step != t->saved_step;
}

// Ends the program because of `reason`, such as a shard that cannot be read. The caller has saved the weights of the last
// complete step, if training_is_unsaved().
__attribute__((noreturn)) static inline void training_fail(const Training* t, const Error* reason) {
    if (args->output && t->saved_step >= 0) {
        die("%s; the weights after step %lld are saved: resume with -y 1", reason->text, (long long)t->saved_step);
    }
    die("%s", reason->text);
}

// ---- a step -------------------------------------------------------------------------

// The tasks between two steps, in the order in which they are done.
typedef struct {
    bool validate, sample, save, stop;
} Due;

// True if a save is due `since` seconds after the weights of the newest one were taken, so that the next one will be complete
// before `limit`. write: seconds of a save, of which the run waits for `pause`; negative before the first one. between: the most
// that may pass until this is asked again. At most one second in 50 is spent waiting, and half of the time in writing.
static inline bool save_is_due(double since, double limit, double write, double pause, double between) {
    if (write < 0) { return since >= 0.5 * limit; }
    double latest = limit - 1.5 * write - between; // the next one may take half as long again
    return since >= fmax(latest, fmax(50 * pause, 2 * write));
}

// True if a save is due by --save-minutes.
static inline bool training_clock_is_due(const Training* t) {
    bool timed = t->write_ms > 0;
    double second = 1e-3 * t->clock_rate, pause_ms = fmin(t->save_pause_ms, t->write_ms);
    double between_ms = t->step_ms + t->validation_ms + t->sample_ms;
    if (!(args->save_minutes > 0) || t->saver.running) { return false; }
    return save_is_due(training_clock(t) - t->taken_s, 60.0 * (double)args->save_minutes,
                       timed ? second * t->write_ms : -1, second * pause_ms, second * between_ms);
}

// Returns the tasks that are due after t->run.step steps. The caller sets t->tasks_step after validation and sampling.
// stop: a signal has requested it.
static inline Due training_due(const Training* t, int stop) {
    int64_t step = t->run.step;
    bool last = step >= t->num_steps, done = step == t->tasks_step;
    bool can_validate = t->has_val || args->hellaswag;
    Due due;
    due.stop = last || stop;
    due.validate = !done && can_validate && args->val_every && (last || step % args->val_every == 0);
    due.sample = !done && step > 0 && args->sample_every && (last || step % args->sample_every == 0);
    due.save =
        training_is_unsaved(t) && (due.stop || step == t->best_step ||
                                   (args->save_every && step % args->save_every == 0) || training_clock_is_due(t));
    return due;
}

// True if a line stays on the terminal; others are only shown in the last line. *line_ms: when one stayed before. every: of
// steps; 0: the time alone decides.
enum { LINE_STAYS_MS = 10000 }; // at least so long between two of them
static inline bool training_line_stays(const Training* t, double* line_ms, int64_t step, int64_t every) {
    double now = time_ms();
    bool due = step >= t->num_steps || *line_ms == 0;
    if (args->log_every && every) {
        due |= step % args->log_every == 0;
    } else {
        due |= now - *line_ms > LINE_STAYS_MS && (!every || step % every == 0);
    }
    if (due) { *line_ms = now; }
    return due;
}

// Shows on a terminal how far a task between two steps is: i of n parts are done.
static inline void training_show_task(const char* task, int64_t i, int64_t n) {
    run_finishes = task;
    status_show("%s: %lld of %lld batches", task, (long long)i, (long long)n);
}

// Prints and logs the validation loss after t->run.step steps. start: when the validation began (time_ms).
static inline void training_validated(Training* t, double loss, double start) {
    training_next_step(t);
    t->val_loss = loss;
    if (!status_on()) {
        printf("val loss %.6f\n", loss);
    } else if (training_line_stays(t, &t->val_line_ms, t->run.step, 0)) {
        print_line(stdout, "step %4lld/%lld | val loss %.6f", (long long)t->run.step, (long long)t->num_steps, loss);
    }
    logger_val(&t->logger, t->run.step, loss);
    t->validation_ms = time_ms() - start;
    if (loss < t->run.best_val_loss) {
        t->run.best_val_loss = loss;
        if (args->keep_best) { t->best_step = t->run.step; }
    }
}

// The figures of a step that are printed and logged. The training program fills in all of them except the z-scores.
typedef struct {
    int64_t step;        // counted from 1
    float learning_rate; // in this step
    double loss;
    double norm;           // gradient norm before clipping
    double loss_z, norm_z; // z-scores; NaN until their windows are full
    double ms;             // time of the step
    double num_saturated;  // with --fp8: the tensors in which values were beyond the largest number of their format
} StepReport;

// Computes the z-scores of r->loss and r->norm; must be called exactly once per step. Returns whether the step may
// update the weights: both values are finite, and their z-scores are not above -sl and -sg.
static inline bool training_judge(Training* t, StepReport* r) {
    r->loss_z = outlier_update(&t->run.loss_outliers, r->loss);
    r->norm_z = outlier_update(&t->run.norm_outliers, r->norm);
    bool loss_is_out = args->skip_loss_z > 0 && r->loss_z > args->skip_loss_z;
    bool norm_is_out = args->skip_norm_z > 0 && r->norm_z > args->skip_norm_z;
    return isfinite(r->loss) && isfinite(r->norm) && !loss_is_out && !norm_is_out;
}

// Counts a step. If it did not update the weights (applied is false), prints why.
static inline void training_count(Training* t, const StepReport* r, bool applied) {
    bool finite = isfinite(r->loss) && isfinite(r->norm);
    t->nonfinite_in_a_row = finite ? 0 : t->nonfinite_in_a_row + 1;
    t->num_nonfinite += !finite;
    if (applied) { return; }
    status_clear();
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

// FLOPs of training on one token: 6 per matmul weight (2 forward, 4 backward), plus the FLOPs of attention, which the
// causal mask halves.
static inline double training_flops_per_token(const GPT2Config* c, int T) {
    // without wpe, and without wte unless it is also the head
    double matmul_params = (double)num_parameters(c) - (double)param_size(c, 1);
    if (c->untied_head) { matmul_params -= (double)param_size(c, 0); }
    return 6.0 * matmul_params + 6.0 * c->num_layers * (double)c->channels * T;
}

// FLOP/s of a run whose steps take `ms` milliseconds.
static inline double training_flops(const Training* t, double ms) {
    return training_flops_per_token(&t->run.config, t->batch.T) * (double)t->batch.total / ms * 1e3;
}

// How often a task that is done every `every` steps (0: never), and at the end, is due from `step` on.
static inline double training_times_due(const Training* t, int64_t step, int64_t every) {
    if (every == 0) { return 0; }
    return (double)(t->num_steps / every - (step - 1) / every + (t->num_steps % every != 0));
}

// Estimates the time until the end of the run, in seconds, when `step` has just ended and its tasks are not yet done.
static inline double training_seconds_left(const Training* t, int64_t step) {
    double ms = (double)(t->num_steps - step) * t->step_ms;
    ms += training_times_due(t, step, args->val_every) * t->validation_ms;
    ms += training_times_due(t, step, args->sample_every) * t->sample_ms;
    if (args->output) { // the last save, which the run waits for, and what it waits for the others
        double pause_ms = t->save_pause_ms < t->write_ms ? t->save_pause_ms : t->write_ms;
        double saves = training_times_due(t, step, args->save_every);
        ms += t->write_ms + (saves > 1 ? saves - 1 : 0) * pause_ms;
    }
    return ms * 1e-3;
}

// The steps between two lines that stay on the terminal: 1, 2, 5, 10, 20 ..., for at most 200 lines.
static inline int64_t training_line_every(const Training* t) {
    int64_t every = 1, decade = 1;
    for (int k = 0; every * 200 < t->num_steps; k++) {
        static const int64_t steps[3] = {2, 5, 10};
        every = decade * steps[k % 3];
        if (k % 3 == 2) { decade *= 10; }
    }
    return every;
}

// Rewrites the last line of the terminal after a step. left: the time until the end.
static inline void training_show_step(const Training* t, const StepReport* r, double tokens_per_second,
                                      const char* left) {
    char bar[20], val[40] = "";
    int filled = (int)(16 * r->step / t->num_steps);
    for (int i = 0; i < 16; i++) { bar[i] = i < filled ? '#' : '.'; }
    bar[16] = '\0';
    if (!isnan(t->val_loss)) { snprintf(val, sizeof(val), ", val %.4f", t->val_loss); }
    status_show("[%s] %lld/%lld | loss %.4f%s | %.0f tok/s | ETA %s", bar, (long long)r->step, (long long)t->num_steps,
                r->loss, val, tokens_per_second, left);
}

// Prints and logs a step. machine_flops: peak FLOP/s, that is 100% MFU; 0 on a CPU: other programs and the clock change what
// its cores reach from one moment to the next, so the line has GFLOP/s. precision: for example "bf16". extra: additional columns of the calling program, each like " | 1.0 GB", or "".
static inline void training_report(Training* t, const StepReport* r, double machine_flops, const char* precision,
                                   const char* extra) {
    char line[512], left[32], rate[48];
    double flops = training_flops(t, r->ms);
    snprintf(rate, sizeof(rate), "%.1f GFLOP/s", 1e-9 * flops);
    if (machine_flops > 0) { snprintf(rate, sizeof(rate), "%.1f%% %s MFU", 100.0 * flops / machine_flops, precision); }
    double tokens_per_second = (double)t->batch.total / r->ms * 1e3;
    t->step_ms = t->step_ms > 0 ? 0.9 * t->step_ms + 0.1 * r->ms : r->ms;
    format_step_line(line, sizeof(line), r->step, t->num_steps, r->loss, r->loss_z, r->norm, r->norm_z,
                     r->learning_rate, r->ms, rate, tokens_per_second);
    format_duration(left, sizeof(left), training_seconds_left(t, r->step));
    char saturated[48] = "";
    if (args->fp8 && r->num_saturated > 0) {
        snprintf(saturated, sizeof(saturated), " | %.0f fp8 tensors saturated", r->num_saturated);
    }
    bool terminal = status_on() && !args->profile; // with --profile, its table is what was asked for
    bool all = !terminal && !args->log_every;
    if (!args->profile && (all || training_line_stays(t, &t->line_ms, r->step, training_line_every(t)))) {
        print_line(stdout, "%s%s%s | ETA %s", line, extra, saturated, left);
    }
    if (terminal && r->step < t->num_steps) {
        training_show_step(t, r, tokens_per_second, left);
    } else {
        status_clear();
    }
    logger_train(&t->logger, r->step, r->loss, r->learning_rate, r->norm, r->ms, tokens_per_second,
                 args->fp8 ? r->num_saturated : -1);
    training_poll_save(t);
}

// A sample that is printed during training. Between training_sample_begin() and training_sample_end() the program
// generates args->sample_tokens tokens after `prompt` with `sampler` and writes the text to `out`.
typedef struct {
    int prompt; // a single token, which begins every new document
    Sampler sampler;
    TextOutput out;
    double start_ms;
} TrainingSample;

static inline void training_sample_begin(const Training* t, TrainingSample* s) {
    s->start_ms = time_ms();
    s->prompt = t->start_token;
    s->sampler = sampler_make(1.0f, 0, 1.0f, t->run.sampler_rng);
    s->out = text_begin(t->has_tokenizer ? &t->tokenizer : NULL, stdout);
    status_clear();
    run_finishes = "the sample";
    printf("generating:\n---\n");
}

// Ends and logs the sample. If it could not be generated, `problem` says why, and it is not logged.
static inline void training_sample_end(Training* t, TrainingSample* s, const char* problem) {
    text_end(&s->out);
    printf("---\n");
    training_next_step(t);
    if (problem) { printf("no sample: %s\n", problem); }
    t->run.sampler_rng = s->sampler.rng;
    if (!problem) { logger_text(&t->logger, t->run.step, s->out.text, s->out.length); }
    t->sample_ms = time_ms() - s->start_ms;
    free(s->out.text);
}

// ---- the end of a run ---------------------------------------------------------------

// Ends the program after args->max_nonfinite steps in a row were not finite. weights_are_good is true if the weights
// are finite; they were then saved, if -o was given.
__attribute__((noreturn)) static inline void training_give_up(const Training* t, bool weights_are_good) {
    char reason[128];
    snprintf(reason, sizeof(reason), "loss or gradients were not finite %d steps in a row", args->max_nonfinite);
    if (!weights_are_good) {
        strcat(reason, ", and the weights themselves are not finite");
        training_refuse_weights(t, reason);
    }
    die("%s: stopped, %s", reason,
        args->output ? "the weights of the last good step are saved; a lower -l or a longer -u may help"
                     : "nothing saved (no -o); a lower -l or a longer -u may help");
}

// Says how many steps of this process were skipped, and why. Returns false if all of them were, or if this process, which
// has taken no step, resumed from such a run: then nothing has been learned.
static inline bool training_report_skipped(const Training* t) {
    int64_t steps = t->run.step - t->first_step, skipped = t->run.skipped_steps - t->first_skipped;
    bool before = steps == 0 && t->run.skipped_steps == t->run.step;
    if (before) { steps = skipped = t->run.step; }
    if (skipped == 0) { return true; }
    bool all = skipped == steps;
    char what[160], reason[80] = "";
    if (t->num_nonfinite > 0) {
        snprintf(reason, sizeof(reason), ", %lld of them with a loss or gradient that was not finite",
                 (long long)t->num_nonfinite);
    }
    snprintf(what, sizeof(what), "%lld of %lld steps were skipped%s", (long long)skipped, (long long)steps, reason);
    if (2 * skipped < steps) {
        printf("%s\n", what);
    } else if (run_rank == 0) {
        fprintf(stderr, "%s: %s%s: %s\n", all ? "error" : "warning", what, all ? ": nothing was learned" : "",
                before || 2 * t->num_nonfinite >= skipped ? "take a lower -l, a longer -u or other weights"
                                                          : "raise -sl and -sg, or leave them out");
    }
    return !all;
}

// Prints the summary, closes the log and the data, and returns the exit code.
static inline int training_end(Training* t) {
    int code = EXIT_SUCCESS;
    training_finish_save(t);
    status_clear();
    if (run_stop_signal) {
        printf("%s: stopped after step %lld; %s\n", strsignal(run_stop_signal), (long long)t->run.step,
               args->output ? "to resume, use the same flags and -y 1" : "nothing saved, because -o was not given");
        code = args->output && run_stop_signal != SIGPIPE ? EXIT_SUCCESS : 128 + run_stop_signal;
    }
    if (!args->output && !run_stop_signal && !args->profile) {
        printf("nothing was saved, because -o was not given\n");
    }
    if (t->failed_saves) { printf("%d %s failed\n", t->failed_saves, t->failed_saves == 1 ? "save" : "saves"); }
    if (!training_report_skipped(t)) { code = EXIT_FAILURE; }
    training_close_logs(t);
    dataloader_close(&t->train);
    if (t->has_val) { dataloader_close(&t->val); }
    if (t->has_tokenizer) { tokenizer_free(&t->tokenizer); }
    return code;
}

#endif
