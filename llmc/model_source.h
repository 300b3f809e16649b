/*
The model and the vocabulary that the flags name. Finds their files, checks that the two belong together, and reads the
weights; a new model gets initial ones.

    ModelSource source;
    model_source_open(&source, resolve_model_path(args->model), &has_tokenizer, &tokenizer);
    ... allocate num_parameters(&source.config) floats ...
    model_source_read(&source, params); // or model_source_close(&source)
*/
#ifndef LLMC_MODEL_SOURCE_H
#define LLMC_MODEL_SOURCE_H

#include "checkpoint.h"
#include "flags.h"
#include "gpt2.h"
#include "run_state.h"
#include "status.h"
#include "tokenizer.h"
#include "utils.h"
#include <glob.h>
#include <math.h>

// ---- the vocabulary ---------------------------------------------------------------

// Loads a vocabulary from the directory `path`. If the directory has no vocabulary file, returns false with an empty
// err->text; if loading fails, returns false with the reason in err.
static inline bool find_tokenizer(Tokenizer* tokenizer, const char* path, Error* err) {
    err->text[0] = '\0';
    return tokenizer_file_in(path, true) && tokenizer_load(tokenizer, path, err);
}

// Loads the vocabulary beside the shards that match `pattern`, which may name several directories: fails if they have
// different ones. Otherwise like find_tokenizer(); directories without a vocabulary are passed over.
static inline bool find_data_tokenizer(Tokenizer* tokenizer, const char* pattern, Error* err) {
    glob_t found;
    Path dir = directory_of(pattern), first = {""}, last = {""};
    if (file_exists(pattern) || is_directory(dir.text) || glob(pattern, 0, NULL, &found) != 0) {
        return find_tokenizer(tokenizer, dir.text, err);
    }
    bool ok = true;
    err->text[0] = '\0';
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        Tokenizer other;
        dir = directory_of(found.gl_pathv[i]);
        if (strcmp(dir.text, last.text) == 0) { continue; }
        last = dir;
        if (!find_tokenizer(&other, dir.text, err)) {
            ok = !err->text[0];
        } else if (!first.text[0]) {
            *tokenizer = other;
            first = dir;
        } else {
            ok = memcmp(other.fingerprint, tokenizer->fingerprint, sizeof(other.fingerprint)) == 0 &&
                 other.eot_id == tokenizer->eot_id;
            tokenizer_free(&other);
            if (!ok) {
                error_set(err,
                          "%s and %s: want shards of one vocabulary and end-of-text: choose one of them, or make the "
                          "shards again with the same -t",
                          first.text, dir.text);
            }
        }
    }
    globfree(&found);
    if (!ok && first.text[0]) { tokenizer_free(tokenizer); }
    return ok && first.text[0];
}

// Loads the vocabulary of --tokenizer. Ends the program if it cannot be loaded, or if the model is a directory (NULL: it is not)
// that has another vocabulary: the model was trained with the ids of its own.
static inline void load_given_tokenizer(Tokenizer* tokenizer, const char* model_dir) {
    Error err;
    Tokenizer own;
    char what[200];
    if (!tokenizer_load(tokenizer, args->tokenizer, &err)) { die("--tokenizer %s", err.text); }
    if (!model_dir || !find_tokenizer(&own, model_dir, &err)) { return; }
    if (!tokenizer_same(&own, tokenizer, what, sizeof(what))) {
        die("--tokenizer %s: is another vocabulary than the model's in %s (%s): leave --tokenizer out", args->tokenizer,
            model_dir, what);
    }
    tokenizer_free(&own);
}

// Loads the vocabulary from --tokenizer, or else from the model's directory, or else from the training data's. Returns
// false if there is none; ends the program if one exists but cannot be loaded.
static inline bool load_tokenizer(Tokenizer* tokenizer, const char* model_path) {
    Error err;
    bool is_dir = model_path && is_directory(model_path);
    if (args->tokenizer) {
        load_given_tokenizer(tokenizer, is_dir ? model_path : NULL);
        return true;
    }
    if (model_path) {
        Path directory = directory_of(model_path);
        if (find_tokenizer(tokenizer, is_dir ? model_path : directory.text, &err)) { return true; }
        if (err.text[0]) { die("%s", err.text); }
    }
    if (args->train_data) {
        if (find_data_tokenizer(tokenizer, args->train_data, &err)) { return true; }
        if (err.text[0]) { die("%s", err.text); }
    }
    return false;
}

// ---- the model --------------------------------------------------------------------

// True if the directory holds a model that -e could name.
static inline bool directory_has_model(const char* dir) {
    static const char* const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json"};
    Path path;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        path_set(&path, "%s/%s", dir, names[i]);
        if (file_exists(path.text)) { return true; }
    }
    return false;
}

// Returns the path of the model that -e names. If -e names the output directory of a run, returns the path of its newest
// intact checkpoint. A checkpoint that -e names directly is checked, too.
static inline Path resolve_model_path(const char* path) {
    Error err;
    Path state, resolved;
    path_set(&resolved, "%s", path);
    path_set(&state, "%s/state.json", path);
    if (is_directory(path) && file_exists(state.text)) { // a single checkpoint of a run
        RunState ignored;
        if (!run_verify(path, &ignored, &err)) { die("-e %s", err.text); }
    }
    if (!is_directory(path) || !run_has_checkpoints(path)) { return resolved; }
    if (!run_find_newest(path, &resolved, true, &err)) { die("-e %s", err.text); }
    print_line(stderr, "%s: newest checkpoint: %s", path, resolved.text);
    return resolved;
}

// The model that -e names. It is opened but its weights are not read: config is known, nothing is allocated or written.
typedef struct {
    Path path;
    bool fresh;         // path is a descriptor: the weights are initialized at random from the seed
    ModelFile file;     // the opened file; used only if !fresh
    GPT2Config config;  // valid in either case
    int bos_id, eot_id; // the tokens that begin and end a text, according to the model's file; -1: unknown
} ModelSource;

// Ends the program if a flag for new models asks for another shape than the model at `path` has.
static inline void refuse_other_shape(const char* path, const GPT2Config* config) {
    const struct {
        const char* flag;
        double asked, has; // asked 0: the flag is not given
    } shape[] = {
        {"--layers", (double)args->layers, (double)config->num_layers},
        {"--heads", (double)args->heads, (double)config->num_heads},
        {"--channels", (double)args->channels, (double)config->channels},
        {"--mlp-channels", (double)args->mlp_channels, (double)config->mlp_channels},
        {"--norm-epsilon", as_typed(args->norm_epsilon), as_typed(config->norm_epsilon)},
        {"--positions", (double)args->positions, (double)config->max_seq_len},
        {"--unscaled-attention", (double)args->unscaled_attention, (double)config->unscaled_attention},
        {"--scale-by-layer", (double)args->scale_by_layer, (double)config->scale_by_layer},
        {"--untied-head", (double)args->untied_head, (double)config->untied_head},
    };
    for (size_t i = 0; i < sizeof(shape) / sizeof(shape[0]); i++) {
        if (shape[i].asked != 0 && shape[i].asked != shape[i].has) {
            die("%s %.9g is for a new model, but %s has %.9g: leave the flag out", shape[i].flag, shape[i].asked, path,
                shape[i].has);
        }
    }
    if (args->activation && activation_of_name(args->activation) != config->activation) {
        die("--activation %s is for a new model, but %s has %s: leave the flag out", args->activation, path,
            activation_name(config->activation));
    }
}

// The shape of the new model that a descriptor and the flags name, with GPT-2's vocabulary. An unknown activation is -1.
static inline bool new_model_config(GPT2Config* config, const char* descriptor, Error* err) {
    if (!config_from_descriptor(config, descriptor, err)) { return false; }
    if (args->layers) { config->num_layers = args->layers; }
    if (args->heads) { config->num_heads = args->heads; }
    if (args->channels) { config->channels = args->channels; }
    gpt2_defaults(config);
    if (args->mlp_channels) { config->mlp_channels = args->mlp_channels; }
    if (args->norm_epsilon > 0.0f) { config->norm_epsilon = args->norm_epsilon; }
    if (args->positions) { config->max_seq_len = args->positions; }
    if (args->activation) { config->activation = activation_of_name(args->activation); }
    config->unscaled_attention = args->unscaled_attention, config->scale_by_layer = args->scale_by_layer;
    config->untied_head = args->untied_head;
    return true;
}

// Opens a model and its vocabulary. model: a descriptor, or the path of a model. *has_tokenizer is false if there is no
// vocabulary.
static inline void model_source_open(ModelSource* source, Path model, bool* has_tokenizer, Tokenizer* tokenizer) {
    Error err;
    GPT2Config* config = &source->config;
    source->path = model;
    const char* path = source->path.text;
    source->fresh = is_descriptor(path);
    source->bos_id = source->eot_id = -1;
    *has_tokenizer = load_tokenizer(tokenizer, source->fresh ? NULL : path);
    if (source->fresh) {
        if (!new_model_config(config, path, &err)) { die("%s", err.text); }
        if (config->activation < 0) {
            char names[256];
            die("--activation %s is not known, one of %s", args->activation, activation_names(names, sizeof(names)));
        }
        if (*has_tokenizer) {
            config->vocab_size = tokenizer->vocab_size;
            config->padded_vocab_size = padded_vocab(config->vocab_size);
        }
        if (!config_check(config, "-e with --layers, --heads, --channels", &err)) { die("%s", err.text); }
    } else {
        if (!file_exists(path)) {
            static const char* const sizes[] = {"gpt2-medium", "gpt2-large", "gpt2-xl",
                                                "gpt2"}; // gpt2 begins the others
            for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                if (!strstr(path, sizes[i])) { continue; }
                die("-e %s: %s; OpenAI's is fetched by scripts/download.sh %s, then it is -e data/%s", path,
                    strerror(ENOENT), sizes[i], sizes[i]);
            }
            die("-e %s: %s; -e takes a descriptor like d12, a Hugging Face directory, a .safetensors file, an llm.c "
                ".bin or the -o directory of a run",
                path, strerror(ENOENT));
        }
        if (!model_open(&source->file, path, &err)) { die("-e %s", err.text); }
        for (int i = 0; run_rank == 0 && i < source->file.notes.count; i++) {
            print_line(stderr, "note: %s: %s", path, source->file.notes.text[i]);
        }
        *config = source->file.config;
        source->bos_id = source->file.bos_id;
        source->eot_id = source->file.eot_id;
        refuse_other_shape(path, config);
    }
    // a model may be padded, by 47 tokens in llm.c's files
    int excess = *has_tokenizer ? config->vocab_size - tokenizer->vocab_size : 0;
    if (excess < 0 || excess >= 128) {
        die("the vocabulary has %d tokens, but the model %s has %d: they do not belong together; --tokenizer names "
            "another",
            tokenizer->vocab_size, path, config->vocab_size);
    }
}

// The token that ends a text: the vocabulary's, or else the one that config.json names; -1: none. tokenizer may be NULL.
static inline int model_eot(const ModelSource* source, const Tokenizer* tokenizer) {
    return tokenizer && tokenizer->eot_id >= 0 ? tokenizer->eot_id : source->eot_id;
}

// The token that begins a new document: the vocabulary's end-of-text token, or else the one with which config.json begins
// or ends a text; or else the first token of the vocabulary or, without one, the last token of the model.
static inline int model_start(const ModelSource* source, const Tokenizer* tokenizer) {
    if (tokenizer && tokenizer->eot_id >= 0) { return tokenizer->eot_id; }
    if (source->bos_id >= 0) { return source->bos_id; }
    if (source->eot_id >= 0) { return source->eot_id; }
    return tokenizer ? 0 : source->config.vocab_size - 1;
}

static inline void model_source_close(ModelSource* source) {
    if (!source->fresh) { model_close(&source->file); }
}

// Reads the weights, or initializes new ones, into params (num_parameters), and closes the source.
static inline void model_source_read(ModelSource* source, float* params) {
    Error err;
    status_show(source->fresh ? "making the weights of %s" : "reading %s", source->path.text);
    if (source->fresh) {
        gpt2_init_params(params, &source->config, (uint32_t)run_seed());
    } else if (!model_read(&source->file, params, &err)) {
        die("%s", err.text);
    }
    status_next();
    model_source_close(source);
}

#endif
