/*
Writes a GPT-2 as a GGUF file, version 3, which llama.cpp and the programs built on it run. Nothing reads GGUF here.

All numbers are little-endian. A string is its length (uint64) and UTF-8 bytes without a terminator; an array is the type of
its elements (uint32), their number (uint64) and the elements.

    part of the file                 content
    header                           "GGUF", version 3 (uint32), number of tensors, number of keys (uint64 each)
    keys                             for each: name (string), type of the value (uint32), value
      general.architecture           string "gpt2"
      general.type                   string "model"
      general.name                   string, the file's name without its directory and .gguf
      general.file_type              uint32: 0 fp32, 1 fp16, 7 q8_0, 32 bf16; the type of most weights
      general.quantization_version   uint32 2
      general.alignment              uint32 32
      gpt2.context_length            uint32 maxT
      gpt2.embedding_length          uint32 C
      gpt2.feed_forward_length       uint32 4 C
      gpt2.block_count               uint32 L
      gpt2.attention.head_count      uint32 NH
      gpt2.attention.layer_norm_epsilon  float32 1e-5
      tokenizer.ggml.model           string "gpt2"; tokenizer.ggml.pre: string "gpt-2", its regular expression
      tokenizer.ggml.tokens          string[V], as vocab.json spells them; a special token literally
      tokenizer.ggml.token_type      int32[V]: 1 normal; 3 special, not recognised in plain text; 5 unused
      tokenizer.ggml.merges          string[], "left right", as merges.txt has them
      tokenizer.ggml.bos_token_id    uint32, end-of-text; tokenizer.ggml.eos_token_id: the same
      tokenizer.ggml.add_bos_token   bool false
    tensor descriptions              for each: name (string), number of dimensions (uint32), dimensions (uint64 each, the
                                     contiguous one first), type (uint32: 0 fp32, 1 fp16, 8 q8_0, 30 bf16), offset of its data
                                     (uint64) from the first tensor's; `gguf_names` has the names
    padding                          zeros up to a multiple of 32 bytes
    data of the tensors              each padded with zeros to a multiple of 32 bytes, also the last one

Matrices are (out, in), as in memory, and of the chosen type; biases, layernorms and the position embedding are fp32. There is
no output.weight: llama.cpp then takes token_embd.weight. Tokens of the model that the vocabulary does not have are [PADn],
of type 5.
q8_0 stores 32 consecutive weights as a scale d = max|w| / 127 in fp16 and 32 int8: w / d, rounded to nearest, halves away
from zero. The int8 are computed with d before it is rounded to fp16, as in llama.cpp, so that equal weights give equal files.
Sources: ggml's docs/gguf.md; the constants of the Python package gguf 0.19; llama.cpp's loader of gpt2.
*/
#ifndef LLMC_GGUF_H
#define LLMC_GGUF_H

#include "checkpoint.h"
#include "tokenizer.h"
#include <math.h>

enum { GGUF_ALIGNMENT = 32, GGUF_BLOCK = 32 };

typedef enum { GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0, GGUF_NUM_TYPES } GgufType;

static const struct {
    const char* name;   // as --export-type has it
    uint32_t tensor_id; // in the description of a tensor
    uint32_t file_id;   // in general.file_type
    int block, bytes;   // `bytes` bytes hold `block` weights
} gguf_types[GGUF_NUM_TYPES] = {
    {"fp32", 0, 0, 1, 4},
    {"fp16", 1, 1, 1, 2},
    {"bf16", 30, 32, 1, 2},
    {"q8_0", 8, 7, GGUF_BLOCK, 2 + GGUF_BLOCK},
};

// In the order of gpt2_params; %d is the layer.
static const char* const gguf_names[NUM_PARAMS] = {
    "token_embd.weight",      "position_embd.weight", "blk.%d.attn_norm.weight",   "blk.%d.attn_norm.bias",
    "blk.%d.attn_qkv.weight", "blk.%d.attn_qkv.bias", "blk.%d.attn_output.weight", "blk.%d.attn_output.bias",
    "blk.%d.ffn_norm.weight", "blk.%d.ffn_norm.bias", "blk.%d.ffn_up.weight",      "blk.%d.ffn_up.bias",
    "blk.%d.ffn_down.weight", "blk.%d.ffn_down.bias", "output_norm.weight",        "output_norm.bias",
};

// The types of the values of keys, and of the elements of arrays.
enum { GGUF_UINT32 = 4, GGUF_INT32 = 5, GGUF_FLOAT32 = 6, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 };

// tokenizer.ggml.token_type
enum { GGUF_TOKEN_NORMAL = 1, GGUF_TOKEN_CONTROL = 3, GGUF_TOKEN_UNUSED = 5 };

typedef struct {
    const GPT2Config* config;
    GgufType type; // of the matrices
    const Tokenizer* tokenizer;
    int eot_id;
    char name[256];    // general.name
    Vocab tokens;      // the V tokens in the order of their ids, as the file spells them
    int32_t* kinds;    // (V) GGUF_TOKEN_*
    uint64_t num_keys; // set by gguf_count()
    uint64_t file_bytes;
} Gguf;

// ---- numbers ------------------------------------------------------------------------

// Rounds to IEEE half precision, to nearest, ties to even; a NaN stays a NaN, and what is too large becomes infinite.
static inline uint16_t gguf_f16_from_float(float f) {
    uint32_t u = safe_bits_from_float(f), sign = u >> 16 & 0x8000;
    u &= 0x7FFFFFFF;
    if (u > 0x7F800000) { return (uint16_t)(sign | 0x7E00); }
    if (u >= 0x477FF000) { return (uint16_t)(sign | 0x7C00); } // 65520 is halfway from 65504 to the next power of two
    if (u < 0x38800000) { // subnormal: 0.5 has the spacing of fp16's subnormals, 2^-24, so the addition rounds
        return (uint16_t)(sign | (safe_bits_from_float(safe_float_from_bits(u) + 0.5f) - 0x3F000000));
    }
    return (uint16_t)(sign | (u - (112u << 23) + 0xFFF + (u >> 13 & 1)) >> 13);
}

// Converts GGUF_BLOCK weights to a block of q8_0, out (2 + GGUF_BLOCK). Returns false if one is NaN or infinite, or the scale
// does not fit fp16.
static inline bool gguf_q8_0_block(uint8_t* out, const float* w) {
    float max = 0.0f;
    bool finite = true;
    for (int i = 0; i < GGUF_BLOCK; i++) {
        float magnitude = fabsf(w[i]);
        finite = finite && isfinite(magnitude);
        max = magnitude > max ? magnitude : max;
    }
    float d = max / 127, inverse = d > 0 ? 1 / d : 0;
    uint16_t scale = gguf_f16_from_float(d);
    if (!isfinite(inverse)) { inverse = 0; } // d is below 2^-127, and the scale 0
    out[0] = (uint8_t)scale;
    out[1] = (uint8_t)(scale >> 8);
    for (int i = 0; i < GGUF_BLOCK; i++) { out[2 + i] = finite ? (uint8_t)(int8_t)roundf(w[i] * inverse) : 0; }
    return finite && scale < 0x7C00;
}

// Converts n weights to out. n is a multiple of the type's block. Returns false if a weight is NaN or infinite, or becomes so.
static inline bool gguf_convert(uint8_t* out, const float* w, size_t n, GgufType type) {
    long bad = 0, blocks = (long)n / gguf_types[type].block;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (n > 65536)
    for (long i = 0; i < blocks; i++) {
        if (type == GGUF_Q8_0) {
            bad += !gguf_q8_0_block(out + i * (2 + GGUF_BLOCK), w + i * GGUF_BLOCK);
        } else if (type == GGUF_F32) {
            memcpy(out + 4 * i, &w[i], 4);
            bad += !isfinite(w[i]);
        } else {
            uint16_t h = type == GGUF_F16 ? gguf_f16_from_float(w[i]) : safe_bf16_from_float(w[i]);
            uint16_t exponent = type == GGUF_F16 ? 0x7C00 : 0x7F80;
            memcpy(out + 2 * i, &h, 2);
            bad += (h & exponent) == exponent;
        }
    }
    return bad == 0;
}

// ---- tensors ------------------------------------------------------------------------

// Tensors are written block by block: the embeddings, then all tensors of layer 0, of layer 1 ..., then the last layernorm.
static inline size_t gguf_num_tensors(const GPT2Config* c) { return param_slot(c, NUM_PARAMS, 0); }

// Sets *p and *layer of tensor i in the file.
static inline void gguf_tensor(const GPT2Config* c, size_t i, int* p, int* layer) {
    size_t in_blocks = gguf_num_tensors(c) - 4, per_block = NUM_PARAMS - 4;
    bool in_block = i >= 2 && i < 2 + in_blocks;
    *layer = in_block ? (int)((i - 2) / per_block) : 0;
    *p = i < 2 ? (int)i : in_block ? 2 + (int)((i - 2) % per_block) : (int)(i - in_blocks - 2) + NUM_PARAMS - 2;
}

static inline void gguf_tensor_name(char* name, size_t size, int p, int layer) {
    const char* hole = strstr(gguf_names[p], "%d");
    if (hole) {
        snprintf(name, size, "%.*s%d%s", (int)(hole - gguf_names[p]), gguf_names[p], layer, hole + 2);
    } else {
        snprintf(name, size, "%s", gguf_names[p]);
    }
}

// The type of tensor p: matrices have the chosen one, all others fp32. p = 1 is the position embedding.
static inline GgufType gguf_tensor_type(GgufType type, int p) {
    return gpt2_params[p].rows == DIM_1 || p == 1 ? GGUF_F32 : type;
}

// Without the padding rows of wte.
static inline size_t gguf_rows(const GPT2Config* c, int p) { return p == 0 ? (size_t)c->vocab_size : param_rows(c, p); }

// Bytes of tensor p of a layer, without what pads it to GGUF_ALIGNMENT.
static inline uint64_t gguf_bytes(const Gguf* g, int p) {
    GgufType type = gguf_tensor_type(g->type, p);
    uint64_t n = (uint64_t)gguf_rows(g->config, p) * param_cols(g->config, p);
    return n / (uint64_t)gguf_types[type].block * (uint64_t)gguf_types[type].bytes;
}

static inline uint64_t gguf_align(uint64_t bytes) {
    return (bytes + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
}

// ---- the vocabulary -----------------------------------------------------------------

// Appends the spelling of a token in vocab.json to the scratch space of v, after the n bytes that are there. Returns their new
// number.
static inline size_t gguf_spell(const Tokenizer* t, Vocab* v, uint32_t id, size_t n) {
    uint32_t begin = t->offsets[id], end = t->offsets[id + 1];
    char* out = (char*)vocab_scratch(v, n + 2 * (size_t)(end - begin) + 8); // the byte map has no longer characters
    for (uint32_t i = begin; i < end; i++) { n += (size_t)json_utf8_encode(out + n, v->code_of[t->bytes[i]]); }
    return n;
}

// Marks in special (V) the tokens that encoding never makes: added tokens, and those of several bytes that no merge makes.
static inline void gguf_find_special(const Tokenizer* t, uint8_t* special) {
    for (int id = 0; id < t->vocab_size; id++) {
        special[id] = t->added[id] || t->offsets[id + 1] - t->offsets[id] > 1;
    }
    for (size_t i = 0; i < (size_t)1 << t->slot_bits; i++) {
        const MergeSlot* slot = &t->slots[i];
        if (slot->left != UINT32_MAX && !t->added[slot->id]) { special[slot->id] = 0; }
    }
}

// Sets g->tokens and g->kinds. Fails if two tokens would have the same spelling, which llama.cpp does not survive.
static inline bool gguf_spell_tokens(Gguf* g, const char* path, Error* err) {
    const Tokenizer* t = g->tokenizer;
    int V = g->config->vocab_size;
    uint8_t* special = (uint8_t*)calloc_check((size_t)t->vocab_size, 1);
    gguf_find_special(t, special);
    bool ok = true;
    for (int id = 0; ok && id < V; id++) {
        size_t n;
        if (id >= t->vocab_size) {
            n = (size_t)snprintf((char*)vocab_scratch(&g->tokens, 32), 32, "[PAD%d]", id);
            g->kinds[id] = GGUF_TOKEN_UNUSED;
        } else if (special[id]) {
            n = t->offsets[id + 1] - t->offsets[id];
            memcpy(vocab_scratch(&g->tokens, n), t->bytes + t->offsets[id], n);
            g->kinds[id] = GGUF_TOKEN_CONTROL;
        } else {
            n = gguf_spell(t, &g->tokens, (uint32_t)id, 0);
            g->kinds[id] = GGUF_TOKEN_NORMAL;
        }
        ok = vocab_add(&g->tokens, n, id, false, path, err);
    }
    free(special);
    return ok;
}

// ---- the header ---------------------------------------------------------------------

static inline void gguf_put(FileWriter* w, uint64_t x, int num_bytes) {
    uint8_t bytes[8];
    for (int i = 0; i < num_bytes; i++) { bytes[i] = (uint8_t)(x >> 8 * i); }
    writer_put(w, bytes, (size_t)num_bytes);
}

static inline void gguf_put_string(FileWriter* w, const void* s, size_t n) {
    gguf_put(w, n, 8);
    writer_put(w, s, n);
}

// Begins a key, and counts it.
static inline void gguf_key(FileWriter* w, uint64_t* num_keys, const char* key, uint32_t type) {
    gguf_put_string(w, key, strlen(key));
    gguf_put(w, type, 4);
    ++*num_keys;
}

static inline void gguf_key_string(FileWriter* w, uint64_t* num_keys, const char* key, const char* value) {
    gguf_key(w, num_keys, key, GGUF_STRING);
    gguf_put_string(w, value, strlen(value));
}

static inline void gguf_key_number(FileWriter* w, uint64_t* num_keys, const char* key, uint64_t value) {
    gguf_key(w, num_keys, key, GGUF_UINT32);
    gguf_put(w, value, 4);
}

static inline void gguf_key_array(FileWriter* w, uint64_t* num_keys, const char* key, uint32_t type, size_t count) {
    gguf_key(w, num_keys, key, GGUF_ARRAY);
    gguf_put(w, type, 4);
    gguf_put(w, count, 8);
}

static inline void gguf_put_vocabulary(FileWriter* w, uint64_t* num_keys, Gguf* g) {
    const Tokenizer* t = g->tokenizer;
    size_t V = (size_t)g->config->vocab_size;
    gguf_key_string(w, num_keys, "tokenizer.ggml.model", "gpt2");
    gguf_key_string(w, num_keys, "tokenizer.ggml.pre", "gpt-2");
    gguf_key_array(w, num_keys, "tokenizer.ggml.tokens", GGUF_STRING, V);
    for (size_t id = 0; id < V; id++) {
        const VocabEntry* e = &g->tokens.entries[id];
        gguf_put_string(w, g->tokens.bytes + e->offset, e->length);
    }
    gguf_key_array(w, num_keys, "tokenizer.ggml.token_type", GGUF_INT32, V);
    for (size_t id = 0; id < V; id++) { gguf_put(w, (uint32_t)g->kinds[id], 4); }
    gguf_key_array(w, num_keys, "tokenizer.ggml.merges", GGUF_STRING, (size_t)t->num_merges);
    for (int r = 0; r < t->num_merges; r++) {
        size_t n = gguf_spell(t, &g->tokens, t->merges[2 * r], 0);
        vocab_scratch(&g->tokens, n + 1)[n] = ' ';
        n = gguf_spell(t, &g->tokens, t->merges[2 * r + 1], n + 1);
        gguf_put_string(w, vocab_scratch(&g->tokens, n), n);
    }
    gguf_key_number(w, num_keys, "tokenizer.ggml.bos_token_id", (uint64_t)g->eot_id);
    gguf_key_number(w, num_keys, "tokenizer.ggml.eos_token_id", (uint64_t)g->eot_id);
    gguf_key(w, num_keys, "tokenizer.ggml.add_bos_token", GGUF_BOOL);
    gguf_put(w, 0, 1);
}

// Writes all that precedes the data. Returns the number of keys.
static inline uint64_t gguf_put_header(FileWriter* w, Gguf* g) {
    const GPT2Config* c = g->config;
    uint64_t num_keys = 0, offset = 0;
    writer_put(w, "GGUF", 4);
    gguf_put(w, 3, 4);
    gguf_put(w, gguf_num_tensors(c), 8);
    gguf_put(w, g->num_keys, 8);
    gguf_key_string(w, &num_keys, "general.architecture", "gpt2");
    gguf_key_string(w, &num_keys, "general.type", "model");
    gguf_key_string(w, &num_keys, "general.name", g->name);
    gguf_key_number(w, &num_keys, "general.file_type", gguf_types[g->type].file_id);
    gguf_key_number(w, &num_keys, "general.quantization_version", 2);
    gguf_key_number(w, &num_keys, "general.alignment", GGUF_ALIGNMENT);
    gguf_key_number(w, &num_keys, "gpt2.context_length", (uint64_t)c->max_seq_len);
    gguf_key_number(w, &num_keys, "gpt2.embedding_length", (uint64_t)c->channels);
    gguf_key_number(w, &num_keys, "gpt2.feed_forward_length", 4 * (uint64_t)c->channels);
    gguf_key_number(w, &num_keys, "gpt2.block_count", (uint64_t)c->num_layers);
    gguf_key_number(w, &num_keys, "gpt2.attention.head_count", (uint64_t)c->num_heads);
    gguf_key(w, &num_keys, "gpt2.attention.layer_norm_epsilon", GGUF_FLOAT32);
    gguf_put(w, safe_bits_from_float(1e-5f), 4);
    gguf_put_vocabulary(w, &num_keys, g);
    for (size_t i = 0; i < gguf_num_tensors(c); i++) {
        char name[64]; // llama.cpp's limit, too
        int p, layer;
        gguf_tensor(c, i, &p, &layer);
        gguf_tensor_name(name, sizeof(name), p, layer);
        bool vector = gpt2_params[p].rows == DIM_1;
        gguf_put_string(w, name, strlen(name));
        gguf_put(w, vector ? 1 : 2, 4);
        gguf_put(w, param_cols(c, p), 8);
        if (!vector) { gguf_put(w, gguf_rows(c, p), 8); }
        gguf_put(w, gguf_types[gguf_tensor_type(g->type, p)].tensor_id, 4);
        gguf_put(w, offset, 8);
        offset += gguf_align(gguf_bytes(g, p));
    }
    static const uint8_t zeros[GGUF_ALIGNMENT] = {0};
    writer_put(w, zeros, gguf_align(w->bytes) - w->bytes);
    return num_keys;
}

// Sets g->num_keys and g->file_bytes.
static inline void gguf_count(Gguf* g) {
    FileWriter count; // only counts bytes: it is marked as failed, so it writes nothing
    memset(&count, 0, sizeof(count));
    count.failed = true;
    g->num_keys = gguf_put_header(&count, g);
    g->file_bytes = count.bytes;
    for (int p = 0; p < NUM_PARAMS; p++) {
        g->file_bytes += (uint64_t)param_copies(g->config, p) * gguf_align(gguf_bytes(g, p));
    }
}

// ---- writing ------------------------------------------------------------------------

// Finds the type that --export-type names.
static inline GgufType gguf_type(const char* name) {
    for (int i = 0; i < GGUF_NUM_TYPES; i++) {
        if (strcmp(gguf_types[i].name, name) == 0) { return (GgufType)i; }
    }
    die("no type '%s' in GGUF files", name);
}

static inline void gguf_close(Gguf* g) {
    vocab_free(&g->tokens);
    free(g->kinds);
    memset(g, 0, sizeof(*g));
}

// Checks that the model can be a GGUF file, and prepares it; reads no weights. path: the name that the file will have, for its
// general.name and for messages. tokenizer may be NULL: there is no vocabulary. config and tokenizer must outlive g. On false
// there is nothing to close.
static inline bool gguf_open(Gguf* g, const char* path, const GPT2Config* config, GgufType type,
                             const Tokenizer* tokenizer, int eot_id, Error* err) {
    memset(g, 0, sizeof(*g));
    if (!tokenizer || !tokenizer->can_encode) {
        return error_set(err,
                         "%s: a .gguf file contains the vocabulary with its merges, and %s: give one with --tokenizer",
                         path, tokenizer ? "the model's can only decode" : "there is none beside the model");
    }
    if (tokenizer->vocab_size > config->vocab_size) {
        return error_set(err, "%s: the vocabulary has %d tokens, but the model only %d", path, tokenizer->vocab_size,
                         config->vocab_size);
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
    if (config->channels % gguf_types[type].block != 0) {
        return error_set(err,
                         "%s: %s has blocks of %d weights, which do not divide %d channels: give --export-type fp16",
                         path, gguf_types[type].name, gguf_types[type].block, config->channels);
    }
    g->config = config;
    g->type = type;
    g->tokenizer = tokenizer;
    g->eot_id = eot_id;
    const char* slash = strrchr(path, '/');
    snprintf(g->name, sizeof(g->name), "%s", slash ? slash + 1 : path);
    size_t n = strlen(g->name);
    if (n > 5 && strcmp(g->name + n - 5, ".gguf") == 0) { n -= 5; }
    g->name[mask_controls(g->name, n, false)] = '\0';
    vocab_init(&g->tokens);
    g->kinds = (int32_t*)calloc_check((size_t)config->vocab_size, sizeof(int32_t));
    if (!gguf_spell_tokens(g, path, err)) {
        gguf_close(g);
        return false;
    }
    gguf_count(g);
    return true;
}

// Says why gguf_convert() has refused a weight of tensor p.
static inline void gguf_refuse(const Gguf* g, const char* path, int p, int layer, const float* w, size_t n,
                               Error* err) {
    char name[64];
    float max = 0;
    gguf_tensor_name(name, sizeof(name), p, layer);
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(w[i])) { max = INFINITY; }
        if (fabsf(w[i]) > max) { max = fabsf(w[i]); }
    }
    if (isfinite(max)) {
        error_fill(err, "%s: tensor '%s' has a weight of magnitude %g, too large for %s: give --export-type fp32", path,
                   name, (double)max, gguf_types[g->type].name);
    } else {
        error_fill(err, "%s: tensor '%s' has a weight that is NaN or infinite", path, name);
    }
}

// Writes tensor p of a layer and its padding. src: the tensor in memory; bytes (MODEL_CHUNK * 4): scratch.
static inline bool gguf_put_tensor(FileWriter* w, const Gguf* g, int p, int layer, const float* src, uint8_t* bytes,
                                   Error* err) {
    static const uint8_t zeros[GGUF_ALIGNMENT] = {0};
    GgufType type = gguf_tensor_type(g->type, p);
    size_t n = gguf_rows(g->config, p) * param_cols(g->config, p);
    for (size_t i = 0; i < n && !w->failed; i += MODEL_CHUNK) {
        size_t count = model_min(n - i, MODEL_CHUNK); // whole blocks
        if (!gguf_convert(bytes, src + i, count, type)) {
            gguf_refuse(g, w->path, p, layer, src + i, count, err);
            return false;
        }
        writer_put(w, bytes, count / (size_t)gguf_types[type].block * (size_t)gguf_types[type].bytes);
    }
    writer_put(w, zeros, gguf_align(w->bytes) - w->bytes);
    return true;
}

// Writes the file; params (num_parameters). The disk's space is reserved first. Writes directly to path: a caller that needs an
// atomic replacement passes a temporary name and renames it. On false the file may exist, incomplete.
static inline bool gguf_write(Gguf* g, const char* path, const float* params, Error* err) {
    const GPT2Config* c = g->config;
    FileWriter w;
    if (!writer_open(&w, path, err)) { return false; }
    if (!reserve_file(w.fd, g->file_bytes)) {
        char what[64];
        snprintf(what, sizeof(what), "cannot reserve %llu bytes", (unsigned long long)g->file_bytes);
        writer_fail(&w, what);
    }
    gguf_put_header(&w, g);
    uint8_t* bytes = (uint8_t*)malloc_check(MODEL_CHUNK * sizeof(float));
    bool ok = true;
    for (size_t i = 0; ok && !w.failed && i < gguf_num_tensors(c); i++) {
        int p, layer;
        gguf_tensor(c, i, &p, &layer);
        const float* src = params + param_offset(c, p) + (size_t)layer * param_layer_size(c, p);
        ok = gguf_put_tensor(&w, g, p, layer, src, bytes, err);
    }
    free(bytes);
    require(!ok || w.failed || w.bytes == g->file_bytes);
    Error ignored;
    return writer_close(&w, ok ? err : &ignored) && ok;
}

#endif
