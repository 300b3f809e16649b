/*
Writes a GPT-2 as a GGUF file, version 3, which llama.cpp and the programs built on it run. Nothing here reads GGUF.

All numbers are little-endian. A string is its length (uint64) and UTF-8 bytes without a terminator; an array is the type of
its elements (uint32), their number (uint64) and the elements.

    part of the file                 content
    header                           "GGUF", version 3 (uint32), number of tensors, number of keys (uint64 each)
    keys                             for each: name (string), type of the value (uint32), value
      general.architecture           string "gpt2"
      general.type                   string "model"
      general.name                   string, the file's name without its directory and .gguf
      general.file_type              uint32, the type of the matrices: 0 f32, 1 f16, 7 q8_0, 32 bf16
      general.quantization_version   uint32 2
      gpt2.context_length            uint32 maxT
      gpt2.embedding_length          uint32 C
      gpt2.feed_forward_length       uint32 F
      gpt2.block_count               uint32 L
      gpt2.attention.head_count      uint32 NH
      gpt2.attention.layer_norm_epsilon  float32 norm_epsilon
      tokenizer.ggml.model           string "gpt2": a byte-level BPE
      tokenizer.ggml.pre             string "gpt-2": its regular expression cuts the text into pieces
      tokenizer.ggml.tokens          string[V], as vocab.json spells them; special and added tokens literally
      tokenizer.ggml.token_type      int32[V]: 1 normal; 3 special, not recognised in plain text; 4 added; 5 unused
      tokenizer.ggml.merges          string[], "left right", as merges.txt has them
      tokenizer.ggml.bos_token_id    uint32, the vocabulary's, or else end-of-text, which also precedes a text
      tokenizer.ggml.eos_token_id    uint32, end-of-text
      tokenizer.ggml.unknown_token_id, padding_token_id  uint32, if the vocabulary has these roles
      tokenizer.ggml.add_bos_token   bool false
    tensor descriptions              for each: name (string), number of dimensions (uint32), dimensions (uint64 each, the
                                     contiguous one first), type (uint32: 0 f32, 1 f16, 8 q8_0, 30 bf16), offset of its data
                                     (uint64) from the first tensor's; `gguf_names` has the names
    padding                          zeros up to a multiple of 32 bytes
    data of the tensors              each padded with zeros to a multiple of 32 bytes, also the last one

Matrices are (out, in), as in memory, and of the chosen type; biases, layernorms and the position embedding are f32. A model
with a tied head has no output.weight: llama.cpp then takes token_embd.weight. Tokens of the model that the vocabulary does
not have are [PADn], of type 5.
llama.cpp computes GPT-2 with GELU's tanh form alone, and divides attention's scores by the root of the head size in every layer.
What a model multiplies its scores by besides is multiplied into the rows of the queries in attn_qkv.
q8_0 stores 32 consecutive weights as a scale d = max|w| / 127 in fp16 and 32 int8: w / d, rounded to nearest, halves away
from zero. The int8 are computed with d before it is rounded to fp16, as in llama.cpp, so that equal weights give equal bytes.
Sources: ggml's docs/gguf.md; the constants of the Python package gguf 0.19; llama.cpp's loader of gpt2.
*/
#ifndef LLMC_GGUF_H
#define LLMC_GGUF_H

#include "checkpoint.h"
#include "gpt2.h"
#include "safetensors.h"
#include "tokenizer.h"
#include "utils.h"
#include <math.h>

enum { GGUF_ALIGNMENT = 32, GGUF_BLOCK = 32 };

typedef enum { GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0, GGUF_NUM_TYPES } GgufType;

static const struct {
    const char* name;   // as --type has it
    uint32_t tensor_id; // in the description of a tensor
    uint32_t file_id;   // in general.file_type
    int block, bytes;   // `bytes` bytes hold `block` weights
    float limit;        // the largest weight that is not rounded to infinity; q8_0: whose block has a finite scale
} gguf_types[GGUF_NUM_TYPES] = {
    {"f32", 0, 0, 1, 4, FLT_MAX},
    {"f16", 1, 1, 1, 2, 0x1.ffdffep15f},
    {"bf16", 30, 32, 1, 2, 0x1.fefffep127f},
    {"q8_0", 8, 7, GGUF_BLOCK, 2 + GGUF_BLOCK, 8321039.5f},
};

// In the order of gpt2_params; %d is the layer.
static const char* const gguf_names[NUM_PARAMS] = {
    "token_embd.weight",      "position_embd.weight", "blk.%d.attn_norm.weight",   "blk.%d.attn_norm.bias",
    "blk.%d.attn_qkv.weight", "blk.%d.attn_qkv.bias", "blk.%d.attn_output.weight", "blk.%d.attn_output.bias",
    "blk.%d.ffn_norm.weight", "blk.%d.ffn_norm.bias", "blk.%d.ffn_up.weight",      "blk.%d.ffn_up.bias",
    "blk.%d.ffn_down.weight", "blk.%d.ffn_down.bias", "output_norm.weight",        "output_norm.bias",
    "output.weight",
};

// The types of the values of keys, and of the elements of arrays.
enum { GGUF_UINT32 = 4, GGUF_INT32 = 5, GGUF_FLOAT32 = 6, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 };

// tokenizer.ggml.token_type
enum { GGUF_TOKEN_NORMAL = 1, GGUF_TOKEN_CONTROL = 3, GGUF_TOKEN_USER_DEFINED = 4, GGUF_TOKEN_UNUSED = 5 };

typedef struct {
    const GPT2Config* config;
    GgufType type;   // of the matrices
    uint8_t* header; // (header_bytes) all that precedes the data of the tensors
    size_t header_bytes, header_capacity;
    uint64_t num_keys, file_bytes;
} Gguf;

// ---- numbers ------------------------------------------------------------------------

// Converts GGUF_BLOCK weights to a block of q8_0, out (2 + GGUF_BLOCK). None of them is above the type's limit.
static inline void gguf_q8_0_block(uint8_t* out, const float* w) {
    float max = 0.0f;
    for (int i = 0; i < GGUF_BLOCK; i++) { max = fabsf(w[i]) > max ? fabsf(w[i]) : max; }
    float d = max / 127, inverse = d > 0 ? 1 / d : 0;
    uint16_t scale = safe_f16_from_float(d);
    if (!isfinite(inverse)) { inverse = 0; } // d is below 2^-127, and the scale 0
    out[0] = (uint8_t)scale;
    out[1] = (uint8_t)(scale >> 8);
    for (int i = 0; i < GGUF_BLOCK; i++) { out[2 + i] = (uint8_t)(int8_t)roundf(w[i] * inverse); }
}

// Converts n weights to out. n is a multiple of the type's block, and no weight is above the type's limit.
static inline void gguf_convert(uint8_t* out, const float* w, size_t n, GgufType type) {
    long blocks = (long)n / gguf_types[type].block;
#pragma omp parallel for schedule(static) if (n > 65536)
    for (long i = 0; i < blocks; i++) {
        if (type == GGUF_Q8_0) {
            gguf_q8_0_block(out + i * (2 + GGUF_BLOCK), w + i * GGUF_BLOCK);
        } else if (type == GGUF_F32) {
            memcpy(out + 4 * i, &w[i], 4);
        } else {
            uint16_t h = type == GGUF_F16 ? safe_f16_from_float(w[i]) : safe_bf16_from_float(w[i]);
            memcpy(out + 2 * i, &h, 2);
        }
    }
}

// ---- tensors ------------------------------------------------------------------------

// Tensors are written block by block: the embeddings, then all tensors of layer 0, of layer 1 ..., then the last layernorm and an
// untied head.
static inline size_t gguf_num_tensors(const GPT2Config* c) { return param_slot(c, NUM_PARAMS, 0); }

// Sets *p and *layer of tensor i in the file.
static inline void gguf_tensor(const GPT2Config* c, size_t i, int* p, int* layer) {
    size_t per_block = NUM_PARAMS - 5, in_blocks = (size_t)c->num_layers * per_block;
    bool in_block = i >= 2 && i < 2 + in_blocks;
    *layer = in_block ? (int)((i - 2) / per_block) : 0;
    *p = i < 2 ? (int)i : in_block ? 2 + (int)((i - 2) % per_block) : (int)(i - in_blocks - 2) + NUM_PARAMS - 3;
}

static inline void gguf_tensor_name(char* name, size_t size, int p, int layer) {
    const char* hole = strstr(gguf_names[p], "%d");
    if (hole) {
        snprintf(name, size, "%.*s%d%s", (int)(hole - gguf_names[p]), gguf_names[p], layer, hole + 2);
    } else {
        snprintf(name, size, "%s", gguf_names[p]);
    }
}

// The type of tensor p: matrices have the chosen one, all others f32. p = 1 is the position embedding.
static inline GgufType gguf_tensor_type(GgufType type, int p) {
    return gpt2_params[p].rows == DIM_1 || p == 1 ? GGUF_F32 : type;
}

// Bytes of tensor p of a layer, without what pads it to GGUF_ALIGNMENT.
static inline uint64_t gguf_bytes(const Gguf* g, int p) {
    GgufType type = gguf_tensor_type(g->type, p);
    uint64_t n = (uint64_t)param_used_rows(g->config, p) * param_cols(g->config, p);
    return n / (uint64_t)gguf_types[type].block * (uint64_t)gguf_types[type].bytes;
}

static inline uint64_t gguf_align(uint64_t bytes) {
    return (bytes + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
}

// ---- the header, in memory ------------------------------------------------------------

static inline void gguf_put(Gguf* g, const void* data, size_t n) {
    if (g->header_capacity - g->header_bytes < n) {
        g->header_capacity = 2 * g->header_capacity + n + 4096;
        g->header = (uint8_t*)realloc_check(g->header, g->header_capacity);
    }
    memcpy(g->header + g->header_bytes, data, n);
    g->header_bytes += n;
}

static inline void gguf_little_endian(uint8_t* out, uint64_t x, int num_bytes) {
    for (int i = 0; i < num_bytes; i++) { out[i] = (uint8_t)(x >> 8 * i); }
}

static inline void gguf_put_number(Gguf* g, uint64_t x, int num_bytes) {
    uint8_t bytes[8];
    gguf_little_endian(bytes, x, num_bytes);
    gguf_put(g, bytes, (size_t)num_bytes);
}

static inline void gguf_put_string(Gguf* g, const char* s) {
    gguf_put_number(g, strlen(s), 8);
    gguf_put(g, s, strlen(s));
}

// Begins a key; its value follows.
static inline void gguf_key(Gguf* g, const char* key, uint32_t type) {
    gguf_put_string(g, key);
    gguf_put_number(g, type, 4);
    g->num_keys++;
}

static inline void gguf_key_string(Gguf* g, const char* key, const char* value) {
    gguf_key(g, key, GGUF_STRING);
    gguf_put_string(g, value);
}

static inline void gguf_key_uint32(Gguf* g, const char* key, int value) {
    gguf_key(g, key, GGUF_UINT32);
    gguf_put_number(g, (uint32_t)value, 4);
}

// Begins a key whose value is an array; the elements follow.
static inline void gguf_key_array(Gguf* g, const char* key, uint32_t type, int count) {
    gguf_key(g, key, GGUF_ARRAY);
    gguf_put_number(g, type, 4);
    gguf_put_number(g, (uint32_t)count, 8);
}

// general.name: the file's name, with its ending and what is not UTF-8 taken out.
static inline void gguf_key_name(Gguf* g, const char* path) {
    char name[256];
    const char* slash = strrchr(path, '/');
    snprintf(name, sizeof(name), "%s", slash ? slash + 1 : path);
    size_t n = strlen(name);
    if (n > 5 && strcmp(name + n - 5, ".gguf") == 0) { n -= 5; }
    name[mask_controls(name, n, false)] = '\0';
    gguf_key_string(g, "general.name", name);
}

// ---- the vocabulary -----------------------------------------------------------------

// True if a string of the file can have these bytes: UTF-8 without a NUL, where llama.cpp would cut it off.
static inline bool gguf_is_text(const uint8_t* s, size_t n) {
    size_t bad, length = 1;
    for (size_t i = 0; i < n && length > 0; i += length) { length = s[i] ? utf8_length(s + i, n - i, &bad) : 0; }
    return length > 0;
}

// The type of a token. Added tokens are spelled literally, and special ones if this is how vocab.json spells them.
static inline int gguf_token_type(const Tokenizer* t, int id) {
    if (id >= t->vocab_size) { return GGUF_TOKEN_UNUSED; }
    const uint8_t* bytes = t->bytes + t->offsets[id];
    bool text = gguf_is_text(bytes, t->offsets[id + 1] - t->offsets[id]);
    if (!text || !tokenizer_is_listed(t, id)) { return GGUF_TOKEN_NORMAL; }
    return t->flags[id] & TOKEN_SPECIAL ? GGUF_TOKEN_CONTROL : GGUF_TOKEN_USER_DEFINED;
}

// Returns the number of added tokens whose flags say where text becomes them, which a file of this format cannot.
static inline int gguf_count_inexact(const Tokenizer* t) {
    int count = 0;
    for (int id = 0; id < t->vocab_size; id++) {
        count += (t->flags[id] & (TOKEN_LSTRIP | TOKEN_RSTRIP | TOKEN_SINGLE_WORD)) != 0;
    }
    return count;
}

// Puts the bytes of a token as vocab.json spells them, without their number.
static inline void gguf_put_spelled(Gguf* g, const Tokenizer* t, const Vocab* map, uint32_t id) {
    for (uint32_t i = t->offsets[id]; i < t->offsets[id + 1]; i++) {
        char code[8];
        gguf_put(g, code, (size_t)json_utf8_encode(code, map->code_of[t->bytes[i]]));
    }
}

// A string whose length is known only at its end: gguf_end_string(g, gguf_begin_string(g)) puts an empty one.
static inline size_t gguf_begin_string(Gguf* g) {
    gguf_put_number(g, 0, 8);
    return g->header_bytes;
}

static inline void gguf_end_string(Gguf* g, size_t begin) {
    gguf_little_endian(g->header + begin - 8, g->header_bytes - begin, 8);
}

// Puts the V tokens. Fails if two have the same spelling: llama.cpp ends with an assertion then.
static inline bool gguf_put_tokens(Gguf* g, const Tokenizer* t, Vocab* seen, const char* path, Error* err) {
    int V = g->config->vocab_size;
    gguf_key_array(g, "tokenizer.ggml.tokens", GGUF_STRING, V);
    for (int id = 0; id < V; id++) {
        size_t begin = gguf_begin_string(g);
        if (id >= t->vocab_size) {
            char pad[32];
            gguf_put(g, pad, (size_t)snprintf(pad, sizeof(pad), "[PAD%d]", id));
        } else if (gguf_token_type(t, id) != GGUF_TOKEN_NORMAL) {
            gguf_put(g, t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id]);
        } else {
            gguf_put_spelled(g, t, seen, (uint32_t)id);
        }
        gguf_end_string(g, begin);
        size_t n = g->header_bytes - begin;
        memcpy(vocab_scratch(seen, n), g->header + begin, n);
        if (!vocab_add(seen, n, id, false, path, err)) { return false; }
    }
    gguf_key_array(g, "tokenizer.ggml.token_type", GGUF_INT32, V);
    for (int id = 0; id < V; id++) { gguf_put_number(g, (uint64_t)gguf_token_type(t, id), 4); }
    return true;
}

static inline bool gguf_put_vocabulary(Gguf* g, const Tokenizer* t, int eot_id, const char* path, Error* err) {
    Vocab seen; // the tokens that were put; its byte map spells them
    vocab_init(&seen);
    gguf_key_string(g, "tokenizer.ggml.model", "gpt2");
    gguf_key_string(g, "tokenizer.ggml.pre", "gpt-2");
    bool ok = gguf_put_tokens(g, t, &seen, path, err);
    gguf_key_array(g, "tokenizer.ggml.merges", GGUF_STRING, t->num_merges);
    for (int r = 0; r < t->num_merges; r++) {
        size_t begin = gguf_begin_string(g);
        gguf_put_spelled(g, t, &seen, t->merges[2 * r]);
        gguf_put(g, " ", 1);
        gguf_put_spelled(g, t, &seen, t->merges[2 * r + 1]);
        gguf_end_string(g, begin);
    }
    gguf_key_uint32(g, "tokenizer.ggml.bos_token_id", t->bos_id < 0 ? eot_id : t->bos_id);
    gguf_key_uint32(g, "tokenizer.ggml.eos_token_id", eot_id);
    if (t->unk_id >= 0 && t->unk_id != eot_id) { gguf_key_uint32(g, "tokenizer.ggml.unknown_token_id", t->unk_id); }
    if (t->pad_id >= 0) { gguf_key_uint32(g, "tokenizer.ggml.padding_token_id", t->pad_id); }
    gguf_key(g, "tokenizer.ggml.add_bos_token", GGUF_BOOL);
    gguf_put_number(g, 0, 1);
    vocab_free(&seen);
    return ok;
}

// ---- opening --------------------------------------------------------------------------

// Puts the keys of the model.
static inline void gguf_put_model(Gguf* g, const char* path) {
    const GPT2Config* c = g->config;
    gguf_key_string(g, "general.architecture", "gpt2");
    gguf_key_string(g, "general.type", "model");
    gguf_key_name(g, path);
    gguf_key_uint32(g, "general.file_type", gguf_types[g->type].file_id);
    gguf_key_uint32(g, "general.quantization_version", 2);
    gguf_key_uint32(g, "gpt2.context_length", c->max_seq_len);
    gguf_key_uint32(g, "gpt2.embedding_length", c->channels);
    gguf_key_uint32(g, "gpt2.feed_forward_length", c->mlp_channels);
    gguf_key_uint32(g, "gpt2.block_count", c->num_layers);
    gguf_key_uint32(g, "gpt2.attention.head_count", c->num_heads);
    gguf_key(g, "gpt2.attention.layer_norm_epsilon", GGUF_FLOAT32);
    gguf_put_number(g, safe_bits_from_float(c->norm_epsilon), 4);
}

// Puts the descriptions of all tensors and the padding. Returns the number of bytes of their data.
static inline uint64_t gguf_put_descriptions(Gguf* g) {
    static const uint8_t zeros[GGUF_ALIGNMENT] = {0};
    const GPT2Config* c = g->config;
    uint64_t offset = 0;
    for (size_t i = 0; i < gguf_num_tensors(c); i++) {
        char name[64]; // llama.cpp's limit, too
        int p, layer;
        gguf_tensor(c, i, &p, &layer);
        gguf_tensor_name(name, sizeof(name), p, layer);
        bool vector = gpt2_params[p].rows == DIM_1;
        gguf_put_string(g, name);
        gguf_put_number(g, vector ? 1 : 2, 4);
        gguf_put_number(g, param_cols(c, p), 8);
        if (!vector) { gguf_put_number(g, param_used_rows(c, p), 8); }
        gguf_put_number(g, (uint64_t)gguf_types[gguf_tensor_type(g->type, p)].tensor_id, 4);
        gguf_put_number(g, offset, 8);
        offset += gguf_align(gguf_bytes(g, p));
    }
    gguf_put(g, zeros, gguf_align(g->header_bytes) - g->header_bytes);
    return offset;
}

static inline void gguf_close(Gguf* g) {
    free(g->header);
    memset(g, 0, sizeof(*g));
}

// Fails, with the remedy, if the model cannot be a GGUF file.
static inline bool gguf_check(const char* path, const GPT2Config* config, GgufType type, const Tokenizer* tokenizer,
                              int eot_id, Error* err) {
    if (!tokenizer || !tokenizer->can_encode) {
        return error_set(err,
                         "%s: a .gguf file contains the vocabulary with its merges, and %s: give one with --tokenizer",
                         path, tokenizer ? "the model's can only decode" : "there is none beside the model");
    }
    if (config->vocab_size > TOKENIZER_MAX_VOCAB) {
        return error_set(err, "%s: %d tokens, %d is the limit", path, config->vocab_size, (int)TOKENIZER_MAX_VOCAB);
    }
    if (eot_id < 0 || eot_id >= config->vocab_size) {
        return error_set(err,
                         "%s: the vocabulary has no end-of-text token, and llama.cpp would stop at token 11 instead: "
                         "name one as eos_token in a tokenizer_config.json beside it",
                         path);
    }
    if (config->activation != ACT_GELU_TANH) {
        return error_set(err,
                         "%s: llama.cpp's GPT-2 has the activation %s, not %s: write a Hugging Face directory instead",
                         path, activation_name(ACT_GELU_TANH), activation_name(config->activation));
    }
    int block = gguf_types[type].block, C = config->channels, F = config->mlp_channels;
    if (C % block != 0 || F % block != 0) { // the columns of the matrices
        return error_set(err, "%s: %s has blocks of %d weights, which do not divide %d %schannels: give --type f16",
                         path, gguf_types[type].name, block, C % block != 0 ? C : F, C % block != 0 ? "" : "MLP ");
    }
    return true;
}

// Checks that the model can be a GGUF file, and makes the header; reads no weights. path: the name that the file will have, for
// its general.name and for messages. tokenizer may be NULL: there is no vocabulary. config must outlive g. On false there is
// nothing to close.
static inline bool gguf_open(Gguf* g, const char* path, const GPT2Config* config, GgufType type,
                             const Tokenizer* tokenizer, int eot_id, Error* err) {
    require(!tokenizer || tokenizer->vocab_size <= config->vocab_size);
    memset(g, 0, sizeof(*g));
    if (!gguf_check(path, config, type, tokenizer, eot_id, err)) { return false; }
    g->config = config;
    g->type = type;
    gguf_put(g, "GGUF", 4);
    gguf_put_number(g, 3, 4);
    gguf_put_number(g, gguf_num_tensors(config), 8);
    size_t num_keys_at = g->header_bytes;
    gguf_put_number(g, 0, 8);
    gguf_put_model(g, path);
    if (!gguf_put_vocabulary(g, tokenizer, eot_id, path, err)) {
        gguf_close(g);
        return false;
    }
    gguf_little_endian(g->header + num_keys_at, g->num_keys, 8);
    uint64_t data_bytes = gguf_put_descriptions(g);
    g->file_bytes = g->header_bytes + data_bytes;
    return true;
}

// ---- writing ------------------------------------------------------------------------

// Finds the type that --type or --export-type names.
static inline GgufType gguf_type(const char* name) {
    if (strcmp(name, "fp32") == 0) { return GGUF_F32; }
    for (int i = 0; i < GGUF_NUM_TYPES; i++) {
        if (strcmp(gguf_types[i].name, name) == 0) { return (GgufType)i; }
    }
    die("no type '%s' in GGUF files", name);
}

// What the queries of a layer are multiplied by, so that llama.cpp's scores are those of the model.
static inline float gguf_query_scale(const GPT2Config* c, int layer) {
    GPT2Config standard = *c;
    gpt2_defaults(&standard);
    return attention_scale(c, layer) / attention_scale(&standard, layer);
}

// Returns a copy of qkvw or qkvb of a layer, src (n), whose first third is multiplied by `scale`.
static inline float* gguf_scaled_queries(const float* src, size_t n, float scale) {
    float* copy = (float*)malloc_check(n * sizeof(float));
    for (size_t i = 0; i < n; i++) { copy[i] = i < n / 3 ? src[i] * scale : src[i]; }
    return copy;
}

// Writes tensor p of a layer and its padding. src: the tensor in memory; bytes (MODEL_CHUNK * 4): scratch.
static inline bool gguf_put_tensor(FileWriter* w, const Gguf* g, int p, int layer, const float* src, uint8_t* bytes,
                                   Error* err) {
    static const uint8_t zeros[GGUF_ALIGNMENT] = {0};
    GgufType type = gguf_tensor_type(g->type, p);
    size_t n = param_used_rows(g->config, p) * param_cols(g->config, p);
    for (size_t i = 0; i < n && !w->failed; i += MODEL_CHUNK) {
        size_t count = model_min(n - i, MODEL_CHUNK); // whole blocks
        Error reason;
        if (!values_check(g->config, p, layer, i, src + i, count, gguf_types[type].limit, &reason)) {
            return error_set(err, "%.300s: no value of %s: give --type f32", reason.text, gguf_types[type].name);
        }
        gguf_convert(bytes, src + i, count, type);
        writer_put(w, bytes, count / (size_t)gguf_types[type].block * (size_t)gguf_types[type].bytes);
    }
    writer_put(w, zeros, gguf_align(w->bytes) - w->bytes);
    return true;
}

// Writes the file; params (num_parameters). The disk's space is reserved first. Writes directly to path: a caller that needs an
// atomic replacement passes a temporary name and renames it. On false the file may exist, incomplete.
static inline bool gguf_write(const Gguf* g, const char* path, const float* params, Error* err) {
    const GPT2Config* c = g->config;
    FileWriter w;
    if (!writer_open(&w, path, err)) { return false; }
    if (!reserve_file(w.fd, g->file_bytes)) {
        char what[64];
        snprintf(what, sizeof(what), "cannot reserve %llu bytes", (unsigned long long)g->file_bytes);
        writer_fail(&w, what);
    }
    writer_put(&w, g->header, g->header_bytes);
    uint8_t* bytes = (uint8_t*)malloc_check(MODEL_CHUNK * sizeof(float));
    bool ok = true;
    for (size_t i = 0; ok && !w.failed && i < gguf_num_tensors(c); i++) {
        int p, layer;
        gguf_tensor(c, i, &p, &layer);
        const float* src = params + param_offset(c, p) + (size_t)layer * param_layer_size(c, p);
        float* scaled = NULL;
        if (gpt2_params[p].rows == DIM_3C || gpt2_params[p].cols == DIM_3C) {
            scaled = gguf_scaled_queries(src, param_layer_size(c, p), gguf_query_scale(c, layer));
        }
        ok = gguf_put_tensor(&w, g, p, layer, scaled ? scaled : src, bytes, err);
        free(scaled);
    }
    free(bytes);
    require(!ok || w.failed || w.bytes == g->file_bytes);
    Error ignored;
    return writer_close(&w, ok ? err : &ignored) && ok;
}

#endif
