/*
Reads and writes model files.

Formats read: a Hugging Face directory (config.json with model.safetensors, or with the shards that
model.safetensors.index.json lists); a single .safetensors file (the configuration comes from a config.json beside it,
or else from the tensor shapes); llm.c's .bin of version 3 and 5. The format is detected from the content of the file,
not from its name. Opening a model checks every tensor name and shape and every setting of config.json that would change
the result. A setting that we do not support is an error that names it; it is never ignored. What a file has beyond the model,
and names that are spelt otherwise, are told in model.notes.
Formats written: a Hugging Face directory; llm.c's .bin; and safetensors files with several arrays of parameters, such
as the optimizer's moments.

    ModelFile model;
    if (!model_open(&model, "gpt2/", &err)) { die("%s", err.text); }
    float* params = (float*)malloc_check(num_parameters(&model.config) * sizeof(float));
    if (!model_read(&model, params, &err)) { die("%s", err.text); }
    model_close(&model);
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "gpt2.h"
#include "json.h"
#include "safetensors.h"
#include "utils.h"
#include <float.h>

enum {
    MODEL_MAX_SHARDS = 1024,
    HF_MAX_CONFIG = 1 << 20, // bytes of config.json; GPT-2's has 700
    MODEL_CHUNK = 1 << 20,   // elements that are converted at a time before they are written
    LLMC_MODEL_MAGIC = 20240326,
    LLMC_HEADER_BYTES = 1024
};

// What is to be said of an opened model, "2 tensors, ...".
typedef struct {
    char text[5][256];
    int count;
} ModelNotes;

typedef struct {
    GPT2Config config;
    ModelNotes notes;
    int bos_id, eot_id; // the tokens that begin and end a text, -1 if the file does not name them
    float dropout;      // the largest rate with which transformers would train the model; 0 without a config.json
    bool conv1d;        // Hugging Face's files store the matrices of the transformer blocks as (in, out)
    const SafeTensor** tensors; // (param_slot(config, NUM_PARAMS, 0)); all present, with checked shapes
    SafeTensors* shards;        // (num_files), the safetensors files; NULL for an llm.c file
    MappedFile bin;             // the llm.c file
    SafeTensor* bin_tensors;    // only for an llm.c file: the SafeTensors that `tensors` points to, one per slot
    char** paths;               // (num_files)
    int num_files;
} ModelFile;

// Name, size and checksum of a file of a checkpoint, as it was written.
typedef struct {
    char name[64]; // file name without directory
    uint64_t bytes;
    uint32_t crc; // crc32c
} SavedFile;

static inline size_t model_min(size_t a, size_t b) { return a < b ? a : b; }

// ---- names and shapes --------------------------------------------------------------

// Index of tensor p of a layer in an array of all tensors (one slot per parameter and layer). p = NUM_PARAMS with layer
// 0 gives the number of slots.
static inline size_t param_slot(const GPT2Config* config, int p, int layer) {
    size_t slot = (size_t)layer;
    for (int i = 0; i < p; i++) { slot += (size_t)param_copies(config, i); }
    return slot;
}

// Writes the shape that tensor p has in Hugging Face's files to shape (2): wte and lmhead have V rows without padding, and the
// matrices of the blocks are (in, out). Returns the number of dimensions.
static inline int hf_shape(const GPT2Config* config, int p, uint64_t* shape) {
    const ParamInfo* info = &gpt2_params[p];
    uint64_t rows = param_used_rows(config, p), cols = param_cols(config, p);
    if (info->rows == DIM_1) {
        shape[0] = cols;
        return 1;
    }
    shape[0] = info->conv1d ? cols : rows;
    shape[1] = info->conv1d ? rows : cols;
    return 2;
}

// HF_BUFFER: a mask, which follows from the configuration. HF_OTHER: of a head for another task, such as classification, or a list of
// positions; the model computes its logits without it.
typedef enum { HF_PARAM, HF_BUFFER, HF_OTHER, HF_LM_HEAD, HF_UNKNOWN } HfKind;

static inline bool has_prefix(const char* text, const char* prefix) {
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

// Copies a tensor's name without the parts that torch.compile and wrappers for several GPUs put in it, anywhere. Returns whether it
// has one.
static inline bool hf_unwrap(char* out, size_t size, const char* name) {
    static const char* const wrappers[] = {
        "module.", "_orig_mod.",       "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.",
        "model.",  "_forward_module.", "base_model.",           "pretrained_model."};
    size_t n = 0;
    bool wrapped = false;
    while (*name && n + 1 < size) {
        size_t part = strcspn(name, "."), i = 0;
        part += name[part] == '.';
        while (i < sizeof(wrappers) / sizeof(wrappers[0]) && !has_prefix(name, wrappers[i])) { i++; }
        if (i < sizeof(wrappers) / sizeof(wrappers[0])) {
            wrapped = true;
        } else {
            n += (size_t)snprintf(out + n, size - n, "%.*s", (int)part, name);
        }
        name += part;
    }
    out[n < size ? n : size - 1] = '\0';
    return wrapped;
}

// Classifies a tensor name of a Hugging Face GPT-2, with or without wrappers and "transformer."; for an HF_PARAM sets *p and *layer.
// The caller must compare *layer with the number of layers; here every number of up to 9 digits is accepted.
static inline HfKind hf_name(const char* wrapped_name, int* p, int* layer) {
    static const char* const heads[] = {"v_head.", "score.", "classifier.", "multiple_choice_head.", "qa_outputs."};
    static const char* const masks[] = {".attn.bias", ".attn.masked_bias", ".crossattention.bias",
                                        ".crossattention.masked_bias"};
    char plain[256];
    const char* name = plain;
    hf_unwrap(plain, sizeof(plain), wrapped_name);
    if (strcmp(name, "lm_head.weight") == 0) { return HF_LM_HEAD; }
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        if (has_prefix(name, heads[i])) { return HF_OTHER; }
    }
    if (has_prefix(name, "transformer.")) { name += 12; }
    if (strcmp(name, "position_ids") == 0) { return HF_OTHER; }
    const char* rest = NULL; // the part of the name after "h.N"
    *layer = 0;
    if (has_prefix(name, "h.")) {
        size_t digits = strspn(name + 2, "0123456789");
        if (digits == 0 || digits > 9 || (digits > 1 && name[2] == '0')) { return HF_UNKNOWN; }
        *layer = atoi(name + 2);
        rest = name + 2 + digits;
        for (size_t i = 0; i < sizeof(masks) / sizeof(masks[0]); i++) {
            if (strcmp(rest, masks[i]) == 0) { return HF_BUFFER; }
        }
    }
    for (*p = 0; *p < NUM_PARAMS; ++*p) {
        const ParamInfo* info = &gpt2_params[*p];
        if (info->place == PLACE_HEAD) { continue; }
        if (param_per_layer(*p) ? rest && strcmp(rest, info->hf_name + 4) == 0 : strcmp(name, info->hf_name) == 0) {
            return HF_PARAM; // hf_name + 4 skips "h.%d"
        }
    }
    return HF_UNKNOWN;
}

// Some tensors, of which notes name the first.
typedef struct {
    const char* first;
    size_t count;
} HfCount;

static inline void hf_count_add(HfCount* c, const char* name) {
    if (c->count++ == 0) { c->first = name; }
}

// Adds a note on these tensors, unless there are none.
static inline void hf_count_note(ModelNotes* notes, const HfCount* c, const char* what) {
    char name[128], others[48] = "";
    if (c->count == 0) { return; }
    if (c->count > 1) { snprintf(others, sizeof(others), " and %zu more", c->count - 1); }
    snprintf(notes->text[notes->count++], sizeof(notes->text[0]), "%s%s: %s",
             json_printable(name, sizeof(name), c->first, strlen(c->first)), others, what);
}

// Maps parameter arrays to the tensors of one or more files. The tensor names of array a begin with prefixes[a].
typedef struct {
    const GPT2Config* config;
    const char* const* prefixes;
    int num_arrays;
    size_t num_slots;           // tensors per array, see param_slot()
    const SafeTensor** tensors; // (num_arrays, num_slots), NULL if not found yet
    const char** files;         // (num_arrays, num_slots): path of the file that contains the tensor
    const SafeTensor* lm_head;  // lm_head.weight of a model that ties it to wte.weight, or NULL
    const char* lm_head_file;
    HfCount ignored, wrapped,
        twice; // tensors that are not read; with a wrapper's name; with values that another one has, too
} HfMap;

static inline void hf_map_init(HfMap* map, const GPT2Config* config, const char* const* prefixes, int num_arrays) {
    memset(map, 0, sizeof(*map));
    map->config = config;
    map->prefixes = prefixes;
    map->num_arrays = num_arrays;
    map->num_slots = param_slot(config, NUM_PARAMS, 0);
    map->tensors = (const SafeTensor**)calloc_check((size_t)num_arrays * map->num_slots, sizeof(SafeTensor*));
    map->files = (const char**)calloc_check((size_t)num_arrays * map->num_slots, sizeof(char*));
}

static inline void hf_map_free(HfMap* map) {
    free(map->tensors);
    free(map->files);
}

// Classifies a tensor by its name. For an HF_PARAM it sets *p, *layer, and *array: the first array whose prefix matches.
static inline HfKind hf_map_name(const HfMap* map, const char* name, int* array, int* p, int* layer) {
    for (*array = 0; *array < map->num_arrays; ++*array) {
        size_t n = strlen(map->prefixes[*array]);
        if (strncmp(name, map->prefixes[*array], n) != 0) { continue; }
        HfKind kind = hf_name(name + n, p, layer);
        if (kind == HF_LM_HEAD && map->config->untied_head) {
            *p = NUM_PARAMS - 1, *layer = 0;
            kind = HF_PARAM;
        }
        // buffers and other heads occur only in model files, which have an empty prefix
        if (kind == HF_PARAM || (kind != HF_UNKNOWN && n == 0)) { return kind; }
    }
    return HF_UNKNOWN;
}

// Fails if the tensor does not have the shape of parameter p, or is not of type F32, F16 or BF16.
static inline bool hf_check_tensor(const HfMap* map, const SafeTensor* t, int p, const char* file, Error* err) {
    char got[256], want[64], name[128];
    uint64_t shape[2];
    int num_dims = hf_shape(map->config, p, shape);
    json_printable(name, sizeof(name), t->name, strlen(t->name));
    if (t->num_dims != num_dims || memcmp(t->shape, shape, (size_t)num_dims * sizeof(shape[0])) != 0) {
        return error_set(err, "%s: tensor '%s' has the shape %s, want %s", file, name,
                         safe_shape_text(got, sizeof(got), t->shape, t->num_dims),
                         safe_shape_text(want, sizeof(want), shape, num_dims));
    }
    if (!safe_is_float(t->dtype)) {
        return error_set(err, "%s: tensor '%s' has the dtype %s, want F32, F16 or BF16", file, name,
                         safe_dtypes[t->dtype].name);
    }
    return true;
}

// Whether two tensors of the same shape have the same values. Their types may differ.
static inline bool hf_same_values(const SafeTensor* a, const SafeTensor* b) {
    float x[256], y[256];
    if (a->dtype == b->dtype) { return a->bytes == b->bytes && memcmp(a->data, b->data, a->bytes) == 0; }
    for (size_t i = 0, n; i < a->elements; i += n) {
        n = model_min(a->elements - i, 256);
        safetensors_to_float(x, a, i, n);
        safetensors_to_float(y, b, i, n);
        if (memcmp(x, y, n * sizeof(float)) != 0) { return false; }
    }
    return true;
}

// Enters a tensor that is parameter p of a layer, or with p < 0 the tied lm_head.weight.
static inline bool hf_map_enter(HfMap* map, const SafeTensor* t, int array, int p, int layer, const char* file,
                                Error* err) {
    char name[128];
    json_printable(name, sizeof(name), t->name, strlen(t->name));
    if (p >= 0 && layer >= param_copies(map->config, p)) {
        return error_set(err, "%s: tensor '%s' is of layer %d, but the model has %d layers", file, name, layer,
                         map->config->num_layers);
    }
    size_t slot = p >= 0 ? (size_t)array * map->num_slots + param_slot(map->config, p, layer) : 0;
    const SafeTensor** place = p >= 0 ? &map->tensors[slot] : &map->lm_head;
    const char** owner = p >= 0 ? &map->files[slot] : &map->lm_head_file;
    if (!hf_check_tensor(map, t, p >= 0 ? p : 0, file, err)) { return false; }
    if (*place) {
        char other[128];
        json_printable(other, sizeof(other), (*place)->name, strlen((*place)->name));
        if (!hf_same_values(*place, t)) {
            return error_set(err, "%s: tensor '%s' is stored twice with different values, also in %s as '%s'", file,
                             name, *owner, other);
        }
        hf_count_add(&map->twice, t->name);
        return true;
    }
    *place = t;
    *owner = file;
    return true;
}

// Enters every tensor of a file into the map. `file` is the path for messages and must outlive the map.
static inline bool hf_map_add(HfMap* map, const SafeTensors* st, const char* file, Error* err) {
    for (size_t i = 0; i < st->num_tensors; i++) {
        const SafeTensor* t = &st->tensors[i];
        int array, p = -1, layer = 0;
        char name[256];
        HfKind kind = hf_map_name(map, t->name, &array, &p, &layer);
        if (kind == HF_UNKNOWN) {
            bool moments = strncmp(t->name, "m.", 2) == 0 || strncmp(t->name, "v.", 2) == 0;
            return error_set(err, "%s: tensor '%s' is not a tensor of GPT-2; is this %s?", file,
                             json_printable(name, 128, t->name, strlen(t->name)),
                             moments ? "the optimizer's state of a checkpoint, whose directory is the model"
                                     : "another model");
        }
        if (kind == HF_OTHER) { hf_count_add(&map->ignored, t->name); }
        if (kind == HF_BUFFER || kind == HF_OTHER) { continue; }
        if (hf_unwrap(name, sizeof(name), t->name)) { hf_count_add(&map->wrapped, t->name); }
        if (!hf_map_enter(map, t, array, kind == HF_PARAM ? p : -1, layer, file, err)) { return false; }
    }
    return true;
}

// Call it after the last hf_map_add(). Fails if a tensor is missing, or if a tied lm_head.weight differs from wte.weight. If the
// files contain only one of these two, it serves as both.
static inline bool hf_map_complete(HfMap* map, const char* where, Error* err) {
    const SafeTensor *head = map->lm_head, *wte = map->tensors[0];
    if (head && wte && !hf_same_values(head, wte)) {
        return error_set(
            err,
            "%s: lm_head.weight differs from wte.weight, but config.json ties them: if the head has weights of its "
            "own, it must say \"tie_word_embeddings\": false",
            map->lm_head_file);
    }
    if (head && !wte) { map->tensors[0] = head; }
    for (int a = 0; a < map->num_arrays; a++) {
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (int layer = 0; layer < param_copies(map->config, p); layer++) {
                char name[128];
                if (map->tensors[(size_t)a * map->num_slots + param_slot(map->config, p, layer)]) { continue; }
                param_hf_name(name, sizeof(name), p, layer);
                return error_set(err, "%s: tensor '%s%s' is missing%s", where, map->prefixes[a], name,
                                 gpt2_params[p].place == PLACE_HEAD ? ": \"tie_word_embeddings\" is false" : "");
            }
        }
    }
    return true;
}

static inline void hf_map_notes(const HfMap* map, ModelNotes* notes) {
    HfCount alone = {NULL, 0};
    if (map->lm_head && map->lm_head == map->tensors[0]) { hf_count_add(&alone, map->lm_head->name); }
    hf_count_note(notes, &map->ignored, "not of the model itself, ignored");
    hf_count_note(notes, &map->wrapped, "read without the names of wrappers");
    hf_count_note(notes, &map->twice, "stored twice, with equal values");
    hf_count_note(notes, &alone, "read as wte.weight, to which it is tied");
}

// ---- config.json and model.safetensors.index.json -------------------------------------

// Reads a boolean setting into *value, which keeps its default if the setting is absent.
static inline bool hf_flag(const JsonValue* root, const char* key, bool* value, const char* where, Error* err) {
    return !json_get(root, key) || json_bool(root, key, value, where, err);
}

// Reads a number of config.json into *value, which keeps its default if it is absent. transformers has a name of it for GPT-2 and,
// unless `general` is NULL, a name for all models; the two must agree.
static inline bool hf_count(const JsonValue* root, const char* key, const char* general, int* value, const char* where,
                            Error* err) {
    const char* const keys[2] = {key, general};
    int64_t n[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        if (!keys[i] || !json_get(root, keys[i])) { continue; }
        if (!json_int(root, keys[i], 1, INT32_MAX, &n[i], where, err)) { return false; }
        *value = (int)n[i];
    }
    return n[0] == 0 || n[1] == 0 || n[0] == n[1] ||
           error_set(err, "%s: \"%s\" is %lld, but \"%s\" is %lld", where, key, (long long)n[0], general,
                     (long long)n[1]);
}

// Fails if config.json has a setting that changes the model's computation in a way that we do not support.
static inline bool hf_config_supported(const JsonValue* root, const char* where, Error* err) {
    static const char* const unsupported[] = {"add_cross_attention", "is_encoder_decoder"};
    const char* text = "gpt2"; // configs of 2019 do not say it
    if (json_get(root, "model_type") && !json_string(root, "model_type", &text, where, err)) { return false; }
    if (strcmp(text, "gpt2") != 0) {
        char name[64];
        return error_set(err, "%s: \"model_type\" is \"%s\"; only \"gpt2\" is supported", where,
                         json_printable(name, sizeof(name), text, strlen(text)));
    }
    for (size_t i = 0; i < sizeof(unsupported) / sizeof(unsupported[0]); i++) {
        bool on = false;
        if (!hf_flag(root, unsupported[i], &on, where, err)) { return false; }
        if (on) { return error_set(err, "%s: \"%s\" is true; only false is supported", where, unsupported[i]); }
    }
    const JsonValue* quantization = json_get(root, "quantization_config");
    if (quantization && quantization->type != JSON_NULL) {
        return error_set(err, "%s: \"quantization_config\": quantized models are not supported", where);
    }
    const JsonValue* pruned = json_get(root, "pruned_heads");
    if (pruned && pruned->type != JSON_NULL && pruned->count > 0) {
        return error_set(err, "%s: \"pruned_heads\": pruned models are not supported", where);
    }
    return true;
}

// Reads the settings that change how a model of given sizes computes. reorder_and_upcast_attn changes only the order of
// transformers' computation in 16 bits.
static inline bool hf_config_variant(GPT2Config* config, const JsonValue* root, const char* where, Error* err) {
    bool scales = true, by_layer = false, upcasts = false, tied = true;
    const char* text = activation_name(ACT_GELU_TANH);
    if (!hf_flag(root, "scale_attn_weights", &scales, where, err) ||
        !hf_flag(root, "scale_attn_by_inverse_layer_idx", &by_layer, where, err) ||
        !hf_flag(root, "reorder_and_upcast_attn", &upcasts, where, err) ||
        !hf_flag(root, "tie_word_embeddings", &tied, where, err) ||
        (json_get(root, "activation_function") && !json_string(root, "activation_function", &text, where, err))) {
        return false;
    }
    config->unscaled_attention = !scales, config->scale_by_layer = by_layer, config->untied_head = !tied;
    config->activation = activation_of_name(text);
    if (config->activation < 0) {
        char name[64], names[256];
        return error_set(err, "%s: \"activation_function\" is \"%s\"; supported are %s", where,
                         json_printable(name, sizeof(name), text, strlen(text)),
                         activation_names(names, sizeof(names)));
    }
    return true;
}

// The id that config.json gives as `key`. It may be a list, null, or outside of the vocabulary, since some configs of small
// models keep 50256: then it counts as unknown, -1.
static inline int hf_token_id(const JsonValue* root, const char* key, int64_t vocab_size) {
    const JsonValue* v = json_get(root, key);
    bool known = v && v->type == JSON_NUMBER && v->is_int && v->integer >= 0 && v->integer < vocab_size;
    return known ? (int)v->integer : -1;
}

// The largest of the rates of dropout with which transformers would train the model.
static inline float hf_dropout(const JsonValue* root) {
    static const char* const keys[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop"};
    float largest = 0.0f;
    for (int i = 0; i < 3; i++) {
        const JsonValue* v = json_get(root, keys[i]);
        float rate = !v || v->type != JSON_NUMBER ? 0.1f : (float)v->number; // 0.1 is transformers' default
        if (rate > largest) { largest = rate; }
    }
    return largest;
}

static inline bool hf_config_read(GPT2Config* config, int* bos_id, int* eot_id, const JsonValue* root,
                                  const char* where, Error* err) {
    double epsilon;
    if (root->type != JSON_OBJECT) { return error_set(err, "%s: not a JSON object", where); }
    config->vocab_size = 50257, config->max_seq_len = 1024; // transformers' defaults
    config->channels = 768, config->num_layers = config->num_heads = 12;
    if (!hf_config_supported(root, where, err) ||
        !hf_count(root, "vocab_size", NULL, &config->vocab_size, where, err) ||
        !hf_count(root, "n_positions", "max_position_embeddings", &config->max_seq_len, where, err) ||
        !hf_count(root, "n_embd", "hidden_size", &config->channels, where, err) ||
        !hf_count(root, "n_layer", "num_hidden_layers", &config->num_layers, where, err) ||
        !hf_count(root, "n_head", "num_attention_heads", &config->num_heads, where, err)) {
        return false;
    }
    gpt2_defaults(config);
    const JsonValue* inner = json_get(root, "n_inner");
    bool wide = !inner || inner->type == JSON_NULL; // 4 times the channels
    if ((!wide && !hf_count(root, "n_inner", NULL, &config->mlp_channels, where, err)) ||
        !hf_config_variant(config, root, where, err)) {
        return false;
    }
    if (json_get(root, "layer_norm_epsilon")) {
        if (!json_number(root, "layer_norm_epsilon", 0, 1, &epsilon, where, err)) { return false; }
        config->norm_epsilon = (float)epsilon;
    }
    int V = config->vocab_size;
    config->padded_vocab_size = V < INT32_MAX - 128 ? padded_vocab(V) : V;
    *bos_id = hf_token_id(root, "bos_token_id", V);
    *eot_id = hf_token_id(root, "eos_token_id", V);
    return config_check(config, where, err);
}

// Parses the text (n bytes) of a config.json. *bos_id, *eot_id: its bos_token_id and eos_token_id, or -1 if that is not a
// token of the vocabulary. *dropout: hf_dropout().
static inline bool hf_config_parse(GPT2Config* config, int* bos_id, int* eot_id, float* dropout, const char* text,
                                   size_t n, const char* where, Error* err) {
    JsonDoc doc;
    memset(config, 0, sizeof(*config));
    if (n > HF_MAX_CONFIG) { return error_set(err, "%s: has %zu bytes, at most 1 MB is read", where, n); }
    if (!json_parse(&doc, text, n, where, err)) { return false; }
    bool ok = hf_config_read(config, bos_id, eot_id, doc.root, where, err);
    if (ok) { *dropout = hf_dropout(doc.root); }
    json_free(&doc);
    return ok;
}

// model.safetensors.index.json: the name of the file that contains each tensor.
typedef struct {
    JsonDoc doc;
    const JsonValue* weight_map; // members: tensor name -> file name
    int* file_of;                // (weight_map->count), per tensor the index into files
    const char** files;          // (num_files), each name once
    int num_files;
} HfIndex;

static inline void hf_index_free(HfIndex* index) {
    json_free(&index->doc);
    free(index->file_of);
    free(index->files);
    memset(index, 0, sizeof(*index));
}

static inline bool hf_index_read(HfIndex* index, const char* where, Error* err) {
    if (!json_want(index->doc.root, "weight_map", JSON_OBJECT, &index->weight_map, where, err)) { return false; }
    size_t count = index->weight_map->count;
    if (count == 0) { return error_set(err, "%s: \"weight_map\" is empty", where); }
    index->file_of = (int*)malloc_check(count * sizeof(int));
    index->files = (const char**)malloc_check(MODEL_MAX_SHARDS * sizeof(char*));
    for (size_t i = 0; i < count; i++) {
        const JsonValue* v = &index->weight_map->items[i];
        char name[1100], tensor[128]; // name: up to 255 bytes, each printed as \xNN in the worst case
        json_printable(tensor, sizeof(tensor), v->key, v->key_length);
        if (v->type != JSON_STRING) {
            return error_set(err, "%s: tensor '%s': its file is %s, want a string", where, tensor,
                             json_type_name(v->type));
        }
        json_printable(name, sizeof(name), v->string, v->length);
        bool plain = v->length > 0 && v->length < 256 && strlen(v->string) == v->length && v->string[0] != '.' &&
                     !strchr(v->string, '/') && !strchr(v->string, '\\') && !strstr(v->string, "..") &&
                     strcmp(v->string, name) == 0;
        if (!plain) {
            return error_set(err, "%s: tensor '%s': '%.200s' is not a plain file name in the same directory", where,
                             tensor, name);
        }
        int f = i > 0 ? index->file_of[i - 1] : 0; // consecutive tensors are mostly in the same file
        if (i == 0 || strcmp(index->files[f], v->string) != 0) {
            for (f = 0; f < index->num_files && strcmp(index->files[f], v->string) != 0;) { f++; }
        }
        if (f == MODEL_MAX_SHARDS) { return error_set(err, "%s: more than %d files", where, (int)MODEL_MAX_SHARDS); }
        if (f == index->num_files) { index->files[index->num_files++] = v->string; }
        index->file_of[i] = f;
    }
    return true;
}

// Parses the text (n bytes) of an index. Accepts only plain file names without a directory. On false there is nothing
// to free.
static inline bool hf_index_parse(HfIndex* index, const char* text, size_t n, const char* where, Error* err) {
    memset(index, 0, sizeof(*index));
    if (!json_parse(&index->doc, text, n, where, err)) { return false; }
    if (!hf_index_read(index, where, err)) {
        hf_index_free(index);
        return false;
    }
    return true;
}

// ---- opening ------------------------------------------------------------------------

static inline void model_close(ModelFile* model) {
    for (int i = 0; i < model->num_files; i++) {
        if (model->shards) { safetensors_close(&model->shards[i]); }
        free(model->paths[i]);
    }
    unmap_file(&model->bin);
    free(model->shards);
    free(model->paths);
    free(model->bin_tensors);
    free(model->tensors);
    memset(model, 0, sizeof(*model));
}

// Writes "dir/name" to out.
static inline bool model_path(Path* out, const char* dir, const char* name, Error* err) {
    size_t n = strlen(dir);
    return path_set(out, "%s%s%s", dir, n > 0 && dir[n - 1] == '/' ? "" : "/", name) ||
           error_set(err, "%.200s...: a path of more than %d bytes", dir, PATH_LIMIT - 1);
}

// Reads and checks the header of an llm.c model file of `size` bytes. element: bytes of a value.
static inline bool llmc_parse_header(GPT2Config* c, size_t* element, const uint8_t* data, size_t size, const char* name,
                                     Error* err) {
    static const struct {
        int magic;
        const char* what;
    } others[] = {{20240327, "a debug state"}, {20240328, "a tokenizer"},     {20240520, "a token shard"},
                  {20240522, "an eval file"},  {20240801, "a Llama 3 shard"}, {20240803, "a Llama 3 model"}};
    int32_t h[8];
    if (size < LLMC_HEADER_BYTES) {
        return error_set(err, "%s: truncated: %zu bytes, the header alone has %d; download it again", name, size,
                         (int)LLMC_HEADER_BYTES);
    }
    memcpy(h, data, sizeof(h));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        if (h[0] == others[i].magic) {
            return error_set(err, "%s: is %s of llm.c, not a GPT-2 model", name, others[i].what);
        }
    }
    if (h[0] != LLMC_MODEL_MAGIC) { return error_set(err, "%s: not a model file of llm.c", name); }
    if (h[1] == 1 || h[1] == 2) {
        return error_set(err,
                         "%s: version %d of llm.c's model file is too old (unpadded vocabulary); write it again "
                         "with a newer train_gpt2.py of llm.c (version 3 or 5)",
                         name, h[1]);
    }
    if (h[1] != 3 && h[1] != 5) {
        return error_set(err, "%s: version %d of llm.c's model file is not known, want 3 (fp32) or 5 (bf16)", name,
                         h[1]);
    }
    c->max_seq_len = h[2];
    c->vocab_size = h[3];
    c->num_layers = h[4];
    c->num_heads = h[5];
    c->channels = h[6];
    c->padded_vocab_size = h[7];
    gpt2_defaults(c);
    if (!config_check(c, name, err)) { return false; }
    if (h[7] % 128 != 0) { return error_set(err, "%s: padded vocabulary %d is not a multiple of 128", name, h[7]); }
    *element = h[1] == 3 ? 4 : 2;
    // config_check's limits keep all of these products below 2^60
    size_t want = LLMC_HEADER_BYTES + num_parameters(c) * *element;
    if (size < want) {
        return error_set(err, "%s: truncated: %zu of %zu bytes are missing; download it again", name, want - size,
                         want);
    }
    if (size > want) { return error_set(err, "%s: %zu bytes too many after the last tensor", name, size - want); }
    return true;
}

// Parses an llm.c model file in memory; data (size) must outlive the model. On false there is nothing to close.
static inline bool llmc_parse(ModelFile* model, const uint8_t* data, size_t size, const char* name, Error* err) {
    GPT2Config c;
    size_t element;
    memset(model, 0, sizeof(*model));
    if (!llmc_parse_header(&c, &element, data, size, name, err)) { return false; }
    size_t slots = param_slot(&c, NUM_PARAMS, 0), slot = 0;
    model->config = c;
    model->bos_id = model->eot_id = c.vocab_size == 50257 ? 50256 : -1;
    model->bin_tensors = (SafeTensor*)calloc_check(slots, sizeof(SafeTensor));
    model->tensors = (const SafeTensor**)malloc_check(slots * sizeof(SafeTensor*));
    const uint8_t* at = data + LLMC_HEADER_BYTES;
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int layer = 0; layer < param_copies(&c, p); layer++, slot++) {
            SafeTensor* t = &model->bin_tensors[slot];
            t->name = gpt2_params[p].name;
            t->dtype = element == 4 ? SAFE_F32 : SAFE_BF16;
            t->elements = param_layer_size(&c, p);
            t->bytes = t->elements * element;
            t->data = at;
            at += t->bytes;
            model->tensors[slot] = t;
        }
    }
    return true;
}

// Infers the configuration of a safetensors file without a config.json: sizes from the tensor shapes, heads of 64
// channels, an untied head if there is one with other values than wte, and all else as in GPT-2.
static inline bool hf_infer_config(GPT2Config* config, const SafeTensors* st, const char* file, Error* err) {
    static const int wanted[3] = {0, 1, 10}; // wte, wpe, fcw
    const SafeTensor *found[3] = {NULL, NULL, NULL}, *head = NULL;
    memset(config, 0, sizeof(*config));
    for (size_t i = 0; i < st->num_tensors; i++) {
        int p, layer;
        HfKind kind = hf_name(st->tensors[i].name, &p, &layer);
        if (kind == HF_LM_HEAD) { head = &st->tensors[i]; }
        if (kind != HF_PARAM || layer >= 4096) { continue; }
        if (layer >= config->num_layers) { config->num_layers = layer + 1; }
        for (int k = 0; layer == 0 && k < 3; k++) {
            if (p == wanted[k]) { found[k] = &st->tensors[i]; }
        }
    }
    if (!found[0]) { found[0] = head; } // one that is tied, under its other name
    for (int k = 0; k < 3; k++) {
        char name[128];
        param_hf_name(name, sizeof(name), wanted[k], 0);
        if (!found[k]) { return error_set(err, "%s: tensor '%s' is missing: not a GPT-2", file, name + 12); }
        if (found[k]->num_dims != 2 || found[k]->shape[0] > 1 << 24 || found[k]->shape[1] > 1 << 22) {
            return error_set(err, "%s: tensor '%s' does not have the shape of GPT-2's", file, found[k]->name);
        }
    }
    config->vocab_size = (int)found[0]->shape[0];
    config->padded_vocab_size = padded_vocab(config->vocab_size);
    config->max_seq_len = (int)found[1]->shape[0];
    config->channels = (int)found[0]->shape[1];
    gpt2_defaults(config);
    config->mlp_channels = (int)found[2]->shape[1]; // stored as (C, F)
    config->untied_head =
        head && head != found[0] && head->elements == found[0]->elements && !hf_same_values(head, found[0]);
    if (config->channels % 64 != 0) {
        return error_set(err,
                         "%s: %d channels do not divide into heads of 64; the number of heads has to come from a "
                         "config.json beside the file",
                         file, config->channels);
    }
    config->num_heads = config->channels / 64;
    return config_check(config, file, err);
}

// The last step of opening Hugging Face's files. Expects model->config and model->shards to be set, and fills
// model->tensors.
static inline bool model_map_hf(ModelFile* model, const char* where, Error* err) {
    static const char* const no_prefix[1] = {""};
    HfMap map;
    hf_map_init(&map, &model->config, no_prefix, 1);
    bool ok = true;
    for (int i = 0; ok && i < model->num_files; i++) { ok = hf_map_add(&map, &model->shards[i], model->paths[i], err); }
    ok = ok && hf_map_complete(&map, where, err);
    model->conv1d = true;
    if (ok) {
        hf_map_notes(&map, &model->notes);
        model->tensors = map.tensors;
        map.tensors = NULL;
    }
    hf_map_free(&map);
    return ok;
}

// Opens one more safetensors file of the model. model_reserve() must have made room for it.
static inline bool model_add_file(ModelFile* model, const char* path, Error* err) {
    if (!safetensors_open(&model->shards[model->num_files], path, err)) { return false; }
    model->paths[model->num_files++] = strdup_check(path);
    return true;
}

static inline void model_reserve(ModelFile* model, int num_files) {
    model->shards = (SafeTensors*)calloc_check((size_t)num_files, sizeof(SafeTensors));
    model->paths = (char**)calloc_check((size_t)num_files, sizeof(char*));
}

static inline bool model_read_config(ModelFile* model, const char* path, Error* err) {
    MappedFile file;
    if (!map_file(&file, path, err)) { return false; }
    const char* mistake = file.size > 0 && file.data[0] == '{' ? NULL : mistaken_file(file.data, file.size);
    bool ok = mistake ? error_set(err, "%s: %s", path, mistake)
                      : hf_config_parse(&model->config, &model->bos_id, &model->eot_id, &model->dropout,
                                        (const char*)file.data, file.size, path, err);
    unmap_file(&file);
    return ok;
}

// Whether a file may lack a tensor that the index names: one that is not read, or one of the two names of a tied embedding while the
// other one exists. transformers leaves a tied lm_head.weight out of the files, but not always out of the index.
static inline bool index_may_lack(const ModelFile* model, const char* name) {
    int p, layer;
    HfKind kind = hf_name(name, &p, &layer);
    if (kind == HF_BUFFER || kind == HF_OTHER) { return true; }
    bool head = kind == HF_LM_HEAD, wte = kind == HF_PARAM && p == 0;
    for (int f = 0; (head || wte) && !model->config.untied_head && f < model->num_files; f++) {
        for (size_t i = 0; i < model->shards[f].num_tensors; i++) {
            kind = hf_name(model->shards[f].tensors[i].name, &p, &layer);
            if (head ? kind == HF_PARAM && p == 0 : kind == HF_LM_HEAD) { return true; }
        }
    }
    return false;
}

// Opens all files that the index lists, and checks that each of its tensors is in the file that the index names.
static inline bool model_open_shards(ModelFile* model, const char* dir, const char* index_path, Error* err) {
    MappedFile file;
    HfIndex index;
    HfCount absent = {NULL, 0};
    if (!map_file(&file, index_path, err)) { return false; }
    bool ok = hf_index_parse(&index, (const char*)file.data, file.size, index_path, err);
    unmap_file(&file);
    if (!ok) { return false; }
    model_reserve(model, index.num_files);
    for (int i = 0; ok && i < index.num_files; i++) {
        Path path;
        ok = model_path(&path, dir, index.files[i], err) && model_add_file(model, path.text, err);
    }
    for (size_t i = 0; ok && i < index.weight_map->count; i++) {
        const JsonValue* v = &index.weight_map->items[i];
        const SafeTensor* t = safetensors_find(&model->shards[index.file_of[i]], v->key);
        if (t && strlen(t->name) == v->key_length) { continue; }
        if (index_may_lack(model, v->key)) {
            hf_count_add(&absent, v->key);
            continue;
        }
        char name[128];
        ok = error_set(err, "%s: tensor '%s' is not in %s, where the index places it", index_path,
                       json_printable(name, sizeof(name), v->key, v->key_length), v->string);
    }
    hf_count_note(&model->notes, &absent, "in the index, but in no file, and not needed");
    hf_index_free(&index);
    return ok;
}

static inline bool model_open_directory(ModelFile* model, const char* dir, Error* err) {
    Path config, single, index, pickle;
    if (!model_path(&config, dir, "config.json", err) || !model_path(&single, dir, "model.safetensors", err) ||
        !model_path(&index, dir, "model.safetensors.index.json", err) ||
        !model_path(&pickle, dir, "pytorch_model.bin", err)) {
        return false;
    }
    if (!file_exists(config.text)) {
        return error_set(err, "%s: no config.json in it: not a Hugging Face model directory", dir);
    }
    if (!model_read_config(model, config.text, err)) { return false; }
    if (file_exists(single.text)) {
        model_reserve(model, 1);
        return model_add_file(model, single.text, err) && model_map_hf(model, dir, err);
    }
    if (file_exists(index.text)) {
        return model_open_shards(model, dir, index.text, err) && model_map_hf(model, dir, err);
    }
    if (file_exists(pickle.text)) {
        return error_set(err,
                         "%s: contains only PyTorch's pytorch_model.bin; download model.safetensors of the same "
                         "model, or convert it with save_pretrained(..., safe_serialization=True)",
                         dir);
    }
    return error_set(err, "%s: contains neither model.safetensors nor model.safetensors.index.json", dir);
}

static inline bool model_open_file(ModelFile* model, const char* path, Error* err) {
    MappedFile file;
    if (!map_file(&file, path, err)) { return false; }
    bool safetensors = safe_looks_right(file.data, file.size);
    const char* mistake = mistaken_file(file.data, file.size);
    int32_t magic = 0;
    if (file.size >= sizeof(magic)) { memcpy(&magic, file.data, sizeof(magic)); }
    if (mistake || (!safetensors && magic / 10000 != 2024)) { // llm.c's magic numbers are dates of 2024
        if (!mistake) { mistake = "neither a safetensors file nor a model file of llm.c"; }
        if (file.size > 0 && file.size <= 8) { mistake = "truncated: only a few bytes; download it again"; }
        unmap_file(&file);
        return error_set(err, "%s: %s", path, mistake);
    }
    if (!safetensors) {
        if (!llmc_parse(model, file.data, file.size, path, err)) {
            unmap_file(&file);
            return false;
        }
        model->bin = file;
        model->paths = (char**)malloc_check(sizeof(char*));
        model->paths[model->num_files++] = strdup_check(path);
        return true;
    }
    unmap_file(&file);
    model_reserve(model, 1);
    if (!model_add_file(model, path, err)) { return false; }
    Path dir, config;
    const char* slash = strrchr(path, '/');
    if (!path_set(&dir, "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".")) {
        return error_set(err, "%.200s...: a path of more than %d bytes", path, PATH_LIMIT - 1);
    }
    if (!model_path(&config, dir.text, "config.json", err)) { return false; }
    if (file_exists(config.text)) {
        if (!model_read_config(model, config.text, err)) { return false; }
    } else {
        if (!hf_infer_config(&model->config, &model->shards[0], path, err)) { return false; }
        model->bos_id = model->eot_id = model->config.vocab_size == 50257 ? 50256 : -1;
    }
    return model_map_hf(model, path, err);
}

// Opens and checks a model. path is a directory or a file; the comment at the top lists the formats. On false there is
// nothing to close.
static inline bool model_open(ModelFile* model, const char* path, Error* err) {
    memset(model, 0, sizeof(*model));
    model->bin.data = (const uint8_t*)"";
    bool ok = is_directory(path) ? model_open_directory(model, path, err) : model_open_file(model, path, err);
    if (!ok) { model_close(model); }
    return ok;
}

// ---- values that are not finite -----------------------------------------------------

// In the message about such a value; params_not_finite() recognizes the message by it.
static const char not_finite_text[] = "is not finite";

// Fails if one of n values is not finite, or its magnitude is above the limit. They begin at element `first` of tensor p of a
// layer in our layout. The message has the tensor's name, the value, and its index in Hugging Face's layout.
static inline bool values_check(const GPT2Config* config, int p, int layer, size_t first, const float* values, size_t n,
                                float limit, Error* err) {
    size_t at = first_above(values, n, limit), cols = param_cols(config, p);
    if (at == n) { return true; }
    char name[128], index[64];
    size_t row = (first + at) / cols, col = (first + at) % cols;
    param_hf_name(name, sizeof(name), p, layer);
    if (gpt2_params[p].rows == DIM_1) {
        snprintf(index, sizeof(index), "%zu", col);
    } else {
        bool conv1d = gpt2_params[p].conv1d;
        snprintf(index, sizeof(index), "%zu, %zu", conv1d ? col : row, conv1d ? row : col);
    }
    return error_set(err, "tensor '%s' %s: %g at [%s]", name + 12,
                     isfinite(values[at]) ? "is too large" : not_finite_text, (double)values[at],
                     index); // + 12 skips "transformer."
}

// Number of values of tensor p of a layer without the padding rows of wte, which are last in it and in no file.
static inline size_t stored_values(const GPT2Config* config, int p) {
    return p == 0 ? (size_t)config->vocab_size * (size_t)config->channels : param_layer_size(config, p);
}

// The same for all parameters (num_parameters(config)).
static inline bool params_check(const GPT2Config* config, const float* params, float limit, Error* err) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int layer = 0; layer < param_copies(config, p); layer++) {
            if (!values_check(config, p, layer, 0, params, stored_values(config, p), limit, err)) { return false; }
            params += param_layer_size(config, p);
        }
    }
    return true;
}

// True if the message is from values_check() about a value that is not finite, also as another rank has passed it on.
static inline bool params_not_finite(const Error* err) { return strstr(err->text, not_finite_text) != NULL; }

// ---- reading ------------------------------------------------------------------------

// A job: convert some rows of one tensor. The jobs of all tensors run in a single parallel loop. A loop per tensor
// would mean 148 barriers for GPT-2 124M, and at each of them all threads would wait for the slowest one.
typedef struct {
    const SafeTensor* tensor;
    float* dst; // (rows, cols) of parameter p: the whole tensor, not only the job's rows
    int p, layer;
    size_t first, count; // the job's rows
} ReadJob;

typedef struct {
    ReadJob* jobs; // (num_jobs)
    size_t num_jobs, capacity;
} ReadList;

// Adds the jobs that convert tensor p of one layer to dst (rows, cols).
static inline void read_list_add(ReadList* list, const SafeTensor* t, const GPT2Config* config, int p, int layer,
                                 float* dst) {
    size_t rows = param_rows(config, p), cols = param_cols(config, p);
    // rows per job: about 256 KB, so that read_job_check() finds them in the L2 cache; whole tiles
    size_t step = (MODEL_CHUNK / 16 / cols + 1 + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE * TRANSPOSE_TILE;
    for (size_t first = 0; first < rows; first += step) {
        if (list->num_jobs == list->capacity) {
            list->capacity = list->capacity ? 2 * list->capacity : 1024;
            list->jobs = (ReadJob*)realloc_check(list->jobs, list->capacity * sizeof(ReadJob));
        }
        ReadJob job = {t, dst, p, layer, first, model_min(rows - first, step)};
        list->jobs[list->num_jobs++] = job;
    }
}

// Writes the job's rows of dst (rows, cols), which is the transpose of the stored tensor (cols, rows).
static inline void read_transposed(const ReadJob* job, size_t rows, size_t cols) {
    float tile[TRANSPOSE_TILE * (TRANSPOSE_TILE + 1)];
    for (size_t o = job->first; o < job->first + job->count; o += TRANSPOSE_TILE) {
        size_t no = model_min(job->first + job->count - o, TRANSPOSE_TILE);
        for (size_t i = 0; i < cols; i += TRANSPOSE_TILE) {
            size_t ni = model_min(cols - i, TRANSPOSE_TILE);
            for (size_t k = 0; k < ni; k++) {
                safetensors_to_float(tile + k * (TRANSPOSE_TILE + 1), job->tensor, (i + k) * rows + o, no);
            }
            transpose_tile(job->dst + o * cols + i, cols, tile, ni, no);
        }
    }
}

// Converts the job's rows. The padding rows V..Vp of wte and lmhead become zero.
static inline void read_job(const ReadJob* job, const GPT2Config* config, bool conv1d) {
    size_t rows = param_rows(config, job->p), cols = param_cols(config, job->p);
    size_t stored = param_used_rows(config, job->p), end = job->first + job->count;
    if (conv1d && gpt2_params[job->p].conv1d) {
        read_transposed(job, rows, cols);
        return;
    }
    // the file contains the job's rows below `used`; the rest is padding
    size_t used = end < stored ? end : stored < job->first ? job->first : stored;
    safetensors_to_float(job->dst + job->first * cols, job->tensor, job->first < used ? job->first * cols : 0,
                         (used - job->first) * cols);
    memset(job->dst + used * cols, 0, (end - used) * cols * sizeof(float));
}

// Fails if a value that the job has read is not finite. Right after read_job() the values are still in the cache.
static inline bool read_job_check(const ReadJob* job, const GPT2Config* config, Error* err) {
    size_t cols = param_cols(config, job->p), first = job->first * cols;
    return values_check(config, job->p, job->layer, first, job->dst + first, job->count * cols, FLT_MAX, err);
}

// Runs all jobs of the list and frees the list. If conv1d is true, the file stores the matrices of the transformer
// blocks as (in, out), and they are transposed. Returns NULL; or, if a value is not finite, its tensor, and err says which
// value it is.
static inline const SafeTensor* read_list_run(ReadList* list, const GPT2Config* config, bool conv1d, Error* err) {
    size_t first = list->num_jobs; // the first job that has read such a value
    const SafeTensor* bad = NULL;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < list->num_jobs; i++) {
        read_job(&list->jobs[i], config, conv1d);
        if (read_job_check(&list->jobs[i], config, NULL)) { continue; }
#pragma omp critical
        first = model_min(first, i);
    }
    if (first < list->num_jobs) {
        read_job_check(&list->jobs[first], config, err);
        bad = list->jobs[first].tensor;
    }
    free(list->jobs);
    memset(list, 0, sizeof(*list));
    return bad;
}

// Completes the message of read_list_run(). file: the path of the tensor's file.
static inline bool read_refuse(Error* err, const char* file) {
    Error reason;
    if (!err) { return false; }
    reason = *err;
    return error_set(err, "%s: %.300s: take other weights or an earlier checkpoint", file, reason.text);
}

// Fails if the size of a file has changed since it was opened. Reading the mapping of a truncated file would kill the
// program with SIGBUS; this check catches most such cases before the read.
static inline bool model_unchanged(const ModelFile* model, Error* err) {
    for (int i = 0; i < model->num_files; i++) {
        struct stat st;
        size_t size = model->shards ? model->shards[i].file.size : model->bin.size;
        if (stat(model->paths[i], &st) != 0) { continue; } // the file was removed: the mapping stays valid
        if ((size_t)st.st_size != size) {
            return error_set(err, "%s: changed from %zu to %lld bytes while it was being read", model->paths[i], size,
                             (long long)st.st_size);
        }
    }
    return true;
}

// Reads what the list has. Fails if a value is not finite.
static inline bool model_run_list(const ModelFile* model, ReadList* list, Error* err) {
    int i = 0; // the file of the tensor
    const SafeTensor* bad = read_list_run(list, &model->config, model->conv1d, err);
    if (!bad) { return true; }
    while (i < model->num_files - 1 && (bad->data < model->shards[i].file.data ||
                                        bad->data >= model->shards[i].file.data + model->shards[i].file.size)) {
        i++;
    }
    return read_refuse(err, model->num_files > 0 ? model->paths[i] : "the model");
}

// Reads tensor p of one layer (0 if p is not per layer) into dst (rows, cols): fp32, matrices as (out, in), padding
// rows zero.
static inline bool model_read_tensor(ModelFile* model, int p, int layer, float* dst, Error* err) {
    require(p >= 0 && p < NUM_PARAMS && layer >= 0 && layer < param_copies(&model->config, p));
    if (!model_unchanged(model, err)) { return false; }
    ReadList list = {NULL, 0, 0};
    read_list_add(&list, model->tensors[param_slot(&model->config, p, layer)], &model->config, p, layer, dst);
    return model_run_list(model, &list, err);
}

// Requests 2 MiB pages, so that first touching a large new array does not cost a page fault per 4 KiB.
static inline void advise_huge(void* memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t huge = (uintptr_t)2 << 20, begin = ((uintptr_t)memory + huge - 1) & ~(huge - 1);
    uintptr_t end = ((uintptr_t)memory + bytes) & ~(huge - 1);
    if (begin < end) { (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE); } // only advice: failure is harmless
#else
    (void)memory;
    (void)bytes;
#endif
}

// Adds the jobs that convert all tensors (param_slot(config, NUM_PARAMS, 0)) to params (num_parameters(config)).
static inline void read_list_add_all(ReadList* list, const SafeTensor* const* tensors, const GPT2Config* config,
                                     float* params) {
    advise_huge(params, num_parameters(config) * sizeof(float));
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int layer = 0; layer < param_copies(config, p); layer++) {
            read_list_add(list, tensors[param_slot(config, p, layer)], config, p, layer, params);
            params += param_layer_size(config, p);
        }
    }
}

// Reads all parameters into params (num_parameters(config)), in the order of gpt2_params: fp32, matrices as (out, in),
// padding rows zero. Fails if a value is not finite.
static inline bool model_read(ModelFile* model, float* params, Error* err) {
    if (!model_unchanged(model, err)) { return false; }
    ReadList list = {NULL, 0, 0};
    read_list_add_all(&list, model->tensors, &model->config, params);
    return model_run_list(model, &list, err);
}

// ---- writing ------------------------------------------------------------------------

// Tensor p in Hugging Face's layout, which is converted in chunks of whole rows.
typedef struct {
    size_t rows, cols, step; // as stored in the file; step: rows per chunk
} HfRows;

static inline HfRows hf_rows(const GPT2Config* config, int p) {
    uint64_t shape[2] = {1, 1};
    HfRows h;
    int num_dims = hf_shape(config, p, shape);
    h.rows = num_dims == 2 ? (size_t)shape[0] : 1;
    h.cols = (size_t)shape[num_dims - 1];
    h.step = h.cols < MODEL_CHUNK ? MODEL_CHUNK / h.cols : 1;
    return h;
}

// Number of elements of the largest chunk, which has at least one row.
static inline size_t hf_chunk_size(const GPT2Config* config) {
    size_t size = MODEL_CHUNK;
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t row = hf_rows(config, p).cols;
        if (row > size) { size = row; }
    }
    return size;
}

// Returns stored rows r..r+n of tensor p, n <= h->step; src is the tensor in our layout. floats (hf_chunk_size): scratch.
static inline const float* hf_chunk(const float* src, int p, const HfRows* h, size_t r, size_t n, float* floats) {
    if (!gpt2_params[p].conv1d) { return src + r * h->cols; }
    transpose_rows(floats, src, h->cols, h->rows, r, n); // src is (cols, rows)
    return floats;
}

// Writes one tensor in Hugging Face's layout; src is in our layout. floats and halves are scratch, one chunk each.
static inline void save_tensor(SafeWriter* w, const float* src, const GPT2Config* config, int p, bool bf16,
                               float* floats, uint16_t* halves) {
    HfRows h = hf_rows(config, p);
    for (size_t r = 0; r < h.rows; r += h.step) {
        size_t n = model_min(h.rows - r, h.step);
        const float* chunk = hf_chunk(src, p, &h, r, n, floats);
        if (bf16) { floats_to_bf16(halves, chunk, n * h.cols); }
        safewriter_data(w, bf16 ? (const void*)halves : (const void*)chunk, n * h.cols * (bf16 ? 2 : 4));
    }
}

// Declares the tensors of num_arrays arrays of parameters, in the order in which params_save_safetensors() writes them.
static inline void params_declare(SafeWriter* w, const GPT2Config* config, const char* const* prefixes, int num_arrays,
                                  bool bf16) {
    for (int a = 0; a < num_arrays; a++) {
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (int layer = 0; layer < param_copies(config, p); layer++) {
                char name[256];
                uint64_t shape[2];
                int prefix = snprintf(name, sizeof(name), "%s", prefixes[a]);
                require(prefix < 64);
                param_hf_name(name + prefix, sizeof(name) - (size_t)prefix, p, layer);
                safewriter_add(w, name, bf16 ? SAFE_BF16 : SAFE_F32, hf_shape(config, p, shape), shape);
            }
        }
    }
}

// Writes arrays[a] (num_parameters(config)), a < num_arrays, to one safetensors file. The name of a tensor is
// prefixes[a] followed by Hugging Face's name with "transformer."; shapes are Hugging Face's. saved may be NULL. Writes
// directly to path: a caller that needs an atomic replacement passes a temporary name and renames it.
static inline bool params_save_safetensors(const char* path, const GPT2Config* config, const float* const* arrays,
                                           const char* const* prefixes, int num_arrays, bool bf16, SavedFile* saved,
                                           Error* err) {
    SafeWriter w;
    safewriter_init(&w);
    params_declare(&w, config, prefixes, num_arrays, bf16);
    if (!safewriter_begin(&w, path, err)) { return false; }
    size_t scratch = hf_chunk_size(config);
    float* floats = (float*)malloc_check(scratch * sizeof(float));
    uint16_t* halves = (uint16_t*)malloc_check(scratch * sizeof(uint16_t));
    for (int a = 0; a < num_arrays; a++) {
        const float* src = arrays[a];
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (int layer = 0; layer < param_copies(config, p); layer++) {
                save_tensor(&w, src, config, p, bf16, floats, halves);
                src += param_layer_size(config, p);
            }
        }
    }
    free(floats);
    free(halves);
    SavedFile file;
    const char* slash = strrchr(path, '/');
    snprintf(file.name, sizeof(file.name), "%s", slash ? slash + 1 : path);
    bool ok = safewriter_end(&w, err, &file.bytes, &file.crc);
    if (ok && saved) { *saved = file; }
    return ok;
}

// Reads a file that params_save_safetensors() wrote. It must contain exactly these arrays, of finite values. Padding rows become zero.
static inline bool params_load_safetensors(const char* path, const GPT2Config* config, float* const* arrays,
                                           const char* const* prefixes, int num_arrays, Error* err) {
    SafeTensors st;
    HfMap map;
    if (!safetensors_open(&st, path, err)) { return false; }
    hf_map_init(&map, config, prefixes, num_arrays);
    bool ok = hf_map_add(&map, &st, path, err) && hf_map_complete(&map, path, err);
    ReadList list = {NULL, 0, 0};
    for (int a = 0; ok && a < num_arrays; a++) {
        read_list_add_all(&list, map.tensors + (size_t)a * map.num_slots, config, arrays[a]);
    }
    if (ok && read_list_run(&list, config, true, err)) { ok = read_refuse(err, path); }
    hf_map_free(&map);
    safetensors_close(&st);
    return ok;
}

// The ids of tokens that Hugging Face's files of a model name; -1: none.
typedef struct {
    int bos, eos, pad;
} ModelTokens;

// Writes `"pad_token_id": 3,` and so on, if the model has this token; otherwise null if `null` is true.
static inline void hf_write_token(FileWriter* w, const char* role, int id, bool null) {
    if (id >= 0) { writer_printf(w, "  \"%s_token_id\": %d,\n", role, id); }
    if (id < 0 && null) { writer_printf(w, "  \"%s_token_id\": null,\n", role); }
}

static inline void hf_write_config(FileWriter* w, const GPT2Config* c, bool bf16, ModelTokens tokens) {
    char inner[16] = "null", epsilon[32];
    GPT2Config standard = *c;
    gpt2_defaults(&standard);
    if (c->mlp_channels != standard.mlp_channels) { snprintf(inner, sizeof(inner), "%d", c->mlp_channels); }
    format_float(epsilon, sizeof(epsilon), c->norm_epsilon);
    writer_printf(w,
                  "{\n  \"activation_function\": \"%s\",\n  \"architectures\": [\n    \"GPT2LMHeadModel\"\n  ],\n"
                  "  \"attn_pdrop\": 0.0,\n",
                  activation_name(c->activation));
    hf_write_token(w, "bos", tokens.bos, true);
    writer_printf(w, "  \"embd_pdrop\": 0.0,\n");
    hf_write_token(w, "eos", tokens.eos, true);
    writer_printf(w, "  \"initializer_range\": 0.02,\n  \"layer_norm_epsilon\": %s,\n  \"model_type\": \"gpt2\",\n",
                  epsilon);
    writer_printf(w,
                  "  \"n_embd\": %d,\n  \"n_head\": %d,\n  \"n_inner\": %s,\n  \"n_layer\": %d,\n"
                  "  \"n_positions\": %d,\n",
                  c->channels, c->num_heads, inner, c->num_layers, c->max_seq_len);
    hf_write_token(w, "pad", tokens.pad, false);
    writer_printf(w,
                  "  \"reorder_and_upcast_attn\": false,\n  \"resid_pdrop\": 0.0,\n"
                  "  \"scale_attn_by_inverse_layer_idx\": %s,\n  \"scale_attn_weights\": %s,\n"
                  "  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\",\n  \"use_cache\": true,\n"
                  "  \"vocab_size\": %d\n}\n",
                  c->scale_by_layer ? "true" : "false", c->unscaled_attention ? "false" : "true",
                  c->untied_head ? "false" : "true", bf16 ? "bfloat16" : "float32", c->vocab_size);
}

// Writes config.json and generation_config.json to the existing directory dir. saved (2) receives the two files.
static inline bool model_save_hf_texts(const char* dir, const GPT2Config* config, bool bf16, ModelTokens tokens,
                                       SavedFile* saved, Error* err) {
    static const char* const texts[2] = {"config.json", "generation_config.json"};
    Path path;
    memset(saved, 0, 2 * sizeof(*saved));
    for (int i = 0; i < 2; i++) {
        FileWriter w;
        if (!model_path(&path, dir, texts[i], err) || !writer_open(&w, path.text, err)) { return false; }
        if (i == 0) {
            hf_write_config(&w, config, bf16, tokens);
        } else {
            writer_printf(&w, "{\n");
            hf_write_token(&w, "bos", tokens.bos, true);
            hf_write_token(&w, "eos", tokens.eos, true);
            hf_write_token(&w, "pad", tokens.pad, false);
            writer_printf(&w, "  \"use_cache\": true\n}\n");
        }
        if (!writer_close(&w, err)) { return false; }
        snprintf(saved[i].name, sizeof(saved[i].name), "%s", texts[i]);
        saved[i].bytes = w.bytes;
        saved[i].crc = w.crc;
    }
    return true;
}

// Writes model.safetensors, config.json and generation_config.json to the existing directory dir, so that Hugging
// Face's from_pretrained() can open it. params (num_parameters(config)): fp32, matrices as (out, in). Appends the three
// files to saved, which must have room; saved and num_saved may be NULL.
static inline bool model_save_hf_files(const char* dir, const GPT2Config* config, const float* params, bool bf16,
                                       ModelTokens tokens, SavedFile* saved, int* num_saved, Error* err) {
    static const char* const no_prefix[1] = {""};
    SavedFile files[3];
    Path path;
    memset(files, 0, sizeof(files));
    if (!model_path(&path, dir, "model.safetensors", err) ||
        !params_save_safetensors(path.text, config, &params, no_prefix, 1, bf16, &files[0], err) ||
        !model_save_hf_texts(dir, config, bf16, tokens, &files[1], err)) {
        return false;
    }
    for (int i = 0; saved && i < 3; i++) { saved[(*num_saved)++] = files[i]; }
    return true;
}

// The same for a model without a vocabulary. eot_id: the end-of-text token, -1 for none.
static inline bool model_save_hf(const char* dir, const GPT2Config* config, const float* params, bool bf16, int eot_id,
                                 Error* err) {
    ModelTokens tokens = {eot_id, eot_id, -1};
    return model_save_hf_files(dir, config, params, bf16, tokens, NULL, NULL, err);
}

// Describes how a model differs from what is inferred from its sizes, "an epsilon of 1e-06, activation relu". Returns NULL if it
// does not. If mlp is false, another number of MLP channels and an untied head do not count.
static inline const char* variant_text(char* text, size_t size, const GPT2Config* c, bool mlp) {
    GPT2Config standard = *c;
    size_t n = 0;
    gpt2_defaults(&standard);
    text[0] = '\0';
    const char* const parts[] = {c->unscaled_attention ? "unscaled attention" : NULL,
                                 c->scale_by_layer ? "attention scaled by the layer" : NULL,
                                 c->untied_head && mlp ? "an untied head" : NULL};
    if (mlp && c->mlp_channels != standard.mlp_channels) {
        n += (size_t)snprintf(text + n, size - n, ", %d MLP channels", c->mlp_channels);
    }
    if (c->norm_epsilon != standard.norm_epsilon) {
        n += (size_t)snprintf(text + n, size - n, ", an epsilon of %g", (double)c->norm_epsilon);
    }
    if (c->activation != standard.activation) {
        n += (size_t)snprintf(text + n, size - n, ", activation %s", activation_name(c->activation));
    }
    for (int i = 0; i < 3; i++) {
        if (parts[i]) { n += (size_t)snprintf(text + n, size - n, ", %s", parts[i]); }
    }
    return n > 0 ? text + 2 : NULL;
}

// Fails, with the remedy, if llm.c's .bin format cannot hold the model: its header has only sizes.
static inline bool llmc_check(const char* path, const GPT2Config* config, Error* err) {
    char text[256];
    const char* variant = variant_text(text, sizeof(text), config, true);
    return !variant ||
           error_set(err, "%s: llm.c's .bin cannot hold %s: write a Hugging Face directory instead", path, variant);
}

// Writes llm.c's .bin format, version 3 (fp32) or 5 (bf16, rounded to nearest even).
static inline bool model_save_llmc(const char* path, const GPT2Config* config, const float* params, int version,
                                   Error* err) {
    require(version == 3 || version == 5);
    require(config->padded_vocab_size % 128 == 0);
    if (!llmc_check(path, config, err)) { return false; }
    int32_t h[LLMC_HEADER_BYTES / 4];
    memset(h, 0, sizeof(h));
    h[0] = LLMC_MODEL_MAGIC;
    h[1] = version;
    h[2] = config->max_seq_len;
    h[3] = config->vocab_size;
    h[4] = config->num_layers;
    h[5] = config->num_heads;
    h[6] = config->channels;
    h[7] = config->padded_vocab_size;
    FileWriter w;
    if (!writer_open(&w, path, err)) { return false; }
    writer_put(&w, h, sizeof(h));
    size_t n = num_parameters(config);
    uint16_t* halves = (uint16_t*)malloc_check(MODEL_CHUNK * sizeof(uint16_t));
    for (size_t i = 0; i < n; i += MODEL_CHUNK) {
        size_t count = model_min(n - i, MODEL_CHUNK);
        if (version == 5) {
            floats_to_bf16(halves, params + i, count);
            writer_put(&w, halves, count * 2);
        } else {
            writer_put(&w, params + i, count * 4);
        }
    }
    free(halves);
    return writer_close(&w, err);
}

#endif
