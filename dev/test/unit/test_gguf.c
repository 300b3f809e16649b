/* GGUF files: the rounding of q8_0; keys, vocabulary and tensors, read back by a reader of its own; what is refused; and the
   model's text with the weights that the file has.

   The reference is llama.cpp. The files of test_known_files, and one with GPT-2's vocabulary, were opened by the Python package
   gguf 0.19.0, whose quantize() gives the same bytes for every tensor, and by llama-cpp-python 0.3.36, which gives the ids of
   tokenizer_golden.jsonl for its texts and continues the reference prompt by the tokens generate.greedy, with each of the four
   types. */
#define TESTING
#include "../../../train_gpt2.c"
#include "../golden.h"
#include "../test.h"

// ---- a reader of GGUF -------------------------------------------------------------------

typedef struct {
    char name[64];
    uint32_t type, element_type; // element_type: of an array
    uint64_t count;              // elements of an array, else 1
    size_t at;                   // where its value, or its first element, begins in the file
} Key;

typedef struct {
    char name[64];
    uint32_t num_dims, type;
    uint64_t dims[2], offset;
    const uint8_t* data;
} FileTensor;

typedef struct {
    MappedFile file;
    Key* keys;           // (num_keys)
    FileTensor* tensors; // (num_tensors)
    uint64_t num_keys, num_tensors;
    size_t at, data_at;
} GgufFile;

static uint64_t read_number(GgufFile* f, int num_bytes) {
    uint64_t x = 0;
    if (f->file.size - f->at < (size_t)num_bytes) { die("the file ends at byte %zu", f->at); }
    for (int i = 0; i < num_bytes; i++) { x |= (uint64_t)f->file.data[f->at++] << 8 * i; }
    return x;
}

// Returns the string's bytes, *n of them.
static const char* read_string(GgufFile* f, size_t* n) {
    *n = (size_t)read_number(f, 8);
    if (f->file.size - f->at < *n) { die("a string of %zu bytes at byte %zu", *n, f->at); }
    f->at += *n;
    return (const char*)f->file.data + f->at - *n;
}

static void read_name(GgufFile* f, char name[64]) {
    size_t n;
    const char* s = read_string(f, &n);
    if (n >= 64 || memchr(s, '\0', n)) { die("a name of %zu bytes at byte %zu", n, f->at); }
    snprintf(name, 64, "%.*s", (int)n, s);
}

static void skip_value(GgufFile* f, uint32_t type) {
    static const int sizes[] = {1, 1, 2, 2, 4, 4, 4, 1};
    size_t n;
    if (type == GGUF_STRING) {
        read_string(f, &n);
    } else if (type < 8) {
        read_number(f, sizes[type]);
    } else {
        die("a value of type %u", type);
    }
}

static void gguf_read(GgufFile* f, const char* path) {
    Error err;
    memset(f, 0, sizeof(*f));
    if (!map_file(&f->file, path, &err)) { die("%s", err.text); }
    if (read_number(f, 4) != 0x46554747 || read_number(f, 4) != 3) { die("%s: not a GGUF of version 3", path); }
    f->num_tensors = read_number(f, 8);
    f->num_keys = read_number(f, 8);
    if (f->num_tensors > 10000 || f->num_keys > 100) { die("too many tensors or keys"); }
    f->keys = (Key*)calloc_check(f->num_keys, sizeof(Key));
    f->tensors = (FileTensor*)calloc_check(f->num_tensors, sizeof(FileTensor));
    for (size_t i = 0; i < f->num_keys; i++) {
        Key* k = &f->keys[i];
        read_name(f, k->name);
        k->type = k->element_type = (uint32_t)read_number(f, 4);
        k->count = 1;
        if (k->type == GGUF_ARRAY) {
            k->element_type = (uint32_t)read_number(f, 4);
            k->count = read_number(f, 8);
        }
        k->at = f->at;
        for (uint64_t e = 0; e < k->count; e++) { skip_value(f, k->element_type); }
    }
    for (size_t i = 0; i < f->num_tensors; i++) {
        FileTensor* t = &f->tensors[i];
        read_name(f, t->name);
        t->num_dims = (uint32_t)read_number(f, 4);
        if (t->num_dims < 1 || t->num_dims > 2) { die("%s has %u dimensions", t->name, t->num_dims); }
        t->dims[1] = 1;
        for (uint32_t d = 0; d < t->num_dims; d++) { t->dims[d] = read_number(f, 8); }
        t->type = (uint32_t)read_number(f, 4);
        t->offset = read_number(f, 8);
    }
    f->data_at = f->at;
    while (f->data_at % 32 != 0) { f->data_at++; }
    for (size_t i = 0; i < f->num_tensors; i++) {
        f->tensors[i].data = f->file.data + f->data_at + f->tensors[i].offset;
    }
}

static void gguf_file_close(GgufFile* f) {
    free(f->keys);
    free(f->tensors);
    unmap_file(&f->file);
}

// Returns the key of this name, with the reader at its value.
static const Key* find_key(GgufFile* f, const char* name, uint32_t type) {
    for (size_t i = 0; i < f->num_keys; i++) {
        if (strcmp(f->keys[i].name, name) != 0) { continue; }
        check_msg(f->keys[i].type == type, "%s has type %u, want %u", name, f->keys[i].type, type);
        f->at = f->keys[i].at;
        return &f->keys[i];
    }
    die("no key %s", name);
}

static const FileTensor* find_tensor(const GgufFile* f, const char* name) {
    for (size_t i = 0; i < f->num_tensors; i++) {
        if (strcmp(f->tensors[i].name, name) == 0) { return &f->tensors[i]; }
    }
    die("no tensor %s", name);
}

// The bytes of n weights of a type.
static size_t stored_bytes(uint32_t type, size_t n) {
    return type == 0 ? 4 * n : type == 1 || type == 30 ? 2 * n : type == 8 ? n / 32 * 34 : (die("type %u", type), 0);
}

// Weight i of a tensor, by the definition of its type.
static float stored_weight(const FileTensor* t, size_t i) {
    float f;
    uint16_t h;
    if (t->type == 8) {
        const uint8_t* block = t->data + i / 32 * 34;
        memcpy(&h, block, 2);
        return safe_float_from_f16(h) * (float)(int8_t)block[2 + i % 32];
    }
    memcpy(&f, t->data + 4 * (t->type == 0 ? i : 0), 4);
    memcpy(&h, t->data + 2 * (t->type == 0 ? 0 : i), 2);
    return t->type == 0 ? f : t->type == 1 ? safe_float_from_f16(h) : safe_float_from_bf16(h);
}

// ---- files --------------------------------------------------------------------------------

static const char* test_path(const char* name) {
    static char path[256];
    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    return path;
}

// Writes a model to tiny.gguf and opens it.
static void write_and_read(GgufFile* f, const GPT2* model, GgufType type, const Tokenizer* t) {
    Gguf g;
    Error err;
    if (!gguf_open(&g, "some/where/tiny.gguf", &model->config, type, t, t->eot_id, &err) ||
        !gguf_write(&g, test_path("tiny.gguf"), model->params_memory, &err)) {
        die("%s", err.text);
    }
    gguf_close(&g);
    gguf_read(f, test_path("tiny.gguf"));
}

static void load_tiny(GPT2* model) {
    Error err;
    ModelFile file;
    if (!model_open(&file, FIXTURES "tiny_gpt2", &err)) { die("%s", err.text); }
    gpt2_allocate(model, &file.config);
    if (!model_read(&file, model->params_memory, &err)) { die("%s", err.text); }
    model_close(&file);
}

// A vocabulary of 266 tokens: a special token with a space in it, one that is not in vocab.json, one that no string can spell,
// and one of several bytes that is not UTF-8.
static Tokenizer odd_tokenizer(void) {
    static const char* const merges = "a b\nab c\n\xC3\x85 \xC2\xBD\n"; // the last: bytes C5 BD
    static char json[8192];
    Tokenizer t;
    Vocab map;
    Error err;
    size_t n = (size_t)snprintf(json, sizeof(json), "{\"<|endoftext|>\": 0");
    vocab_init(&map);
    for (int b = 0; b < 256; b++) {
        n += (size_t)snprintf(json + n, sizeof(json) - n, ", \"\\u%04x\": %d", map.code_of[b], b + 1);
    }
    snprintf(json + n, sizeof(json) - n,
             ", \"ab\": 257, \"abc\": 258, \"\\u00c5\\u00bd\": 259, \"<s>\": 260, \"\\u00ff\\u00fe\\u00ff\": 261}");
    static const char* const added = "{\"<my token>\": 262, \"\\u4f60\": 263, \" \": 264, \"x\\u0000y\": 265}";
    const TokenizerText files[TOKENIZER_NUM_TEXTS] = {[TOKENIZER_VOCAB] = {json, strlen(json), "vocab.json"},
                                                      [TOKENIZER_MERGES] = {merges, strlen(merges), "merges.txt"},
                                                      [TOKENIZER_ADDED] = {added, strlen(added), "added"}};
    if (!tokenizer_parse(&t, files, &err)) { die("%s", err.text); }
    return t;
}

// ---- q8_0 -----------------------------------------------------------------------------------

// The blocks that quantize() of the Python package gguf 0.19.0 makes.
static void test_q8_0_reference(void) {
    static const uint8_t want[5][34] = {
        {0x00, 0x3c, 0x81, 0x7f, 0x01, 0x02, 0x03, 0xff, 0xfe, 0xfd, 0x7f, 0x81, 0x00, 0x00, 0x00, 0x01, 0x02,
         0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13},
        {0x0a, 0x2d, 0x81, 0x9f, 0xf8, 0x89, 0x59, 0x61, 0xa3, 0x22, 0xda, 0xcd, 0xfc, 0x66, 0x08, 0xe7, 0x00,
         0x55, 0xe2, 0xab, 0xb0, 0xef, 0x6a, 0x1e, 0x0d, 0x37, 0x9a, 0x3b, 0x15, 0x2a, 0x7b, 0x04, 0xc9, 0xc9},
        {0x71, 0x27, 0x81, 0x9e, 0xf5, 0x86, 0x52, 0x57, 0x96, 0x10, 0xc3, 0xb1, 0xd8, 0x3a, 0xd6, 0xab, 0xbb,
         0x05, 0x89, 0x47, 0x3f, 0x72, 0xde, 0x84, 0x65, 0x7f, 0xd3, 0x62, 0x2a, 0x2d, 0x6a, 0xe0, 0x91, 0x7c},
        {0x00, 0x00, 0x81, 0x89, 0x91, 0x99, 0xa1, 0xa9, 0xb1, 0xb9, 0xc0, 0xc8, 0xd0, 0xd8, 0xe0, 0xe8, 0xf0,
         0xf8, 0x00, 0x08, 0x10, 0x18, 0x20, 0x28, 0x30, 0x38, 0x40, 0x47, 0x4f, 0x57, 0x5f, 0x67, 0x6f, 0x77},
        {0}};
    static const float ties[12] = {-127,  127,   0.5f,   1.5f,    2.5f,        -0.5f,
                                   -1.5f, -2.5f, 126.5f, -126.5f, 0.49999997f, -0.49999997f};
    float w[5][32];
    for (int i = 0; i < 32; i++) {
        w[0][i] = i < 12 ? ties[i] : (float)(i - 12);
        w[1][i] = (float)(i * i * 7 % 61 - 30) / 3.0f;
        w[2][i] = (float)(i * i * 11 % 97 - 48) / 13.0f; // the scale, rounded to fp16, would give another int8
        w[3][i] = (float)(i - 16) * 1e-9f;               // the scale rounds to 0
        w[4][i] = 0.0f;
    }
    for (int k = 0; k < 5; k++) {
        uint8_t got[34];
        gguf_q8_0_block(got, w[k]);
        for (int i = 0; i < 34; i++) {
            check_msg(got[i] == want[k][i], "block %d, byte %d: %02x, want %02x", k, i, got[i], want[k][i]);
        }
    }
}

// Random blocks of every magnitude: the scale is fp16's nearest to max|w| / 127, and each int8 is nearest to its weight.
static void test_q8_0_definition(void) {
    uint64_t rng = 5;
    for (int k = 0; k < 20000; k++) {
        float w[32], max = 0;
        uint8_t block[34];
        int exponent = k % 140 - 120; // 2^-120 to 2^19
        for (int i = 0; i < 32; i++) {
            w[i] = ldexpf((float)(random_below(&rng, 1 << 20)) / (1 << 19) - 1.0f, exponent);
            if (fabsf(w[i]) > max) { max = fabsf(w[i]); }
        }
        gguf_q8_0_block(block, w);
        uint16_t scale = (uint16_t)(block[0] | block[1] << 8);
        double d = (double)max / 127, off = fabs((double)safe_float_from_f16(scale) - d);
        check(off <= fabs((double)safe_float_from_f16((uint16_t)(scale + 1)) - d) * (1 + 1e-6));
        check(scale == 0 || off <= fabs((double)safe_float_from_f16((uint16_t)(scale - 1)) - d) * (1 + 1e-6));
        for (int i = 0; i < 32; i++) {
            double q = (int8_t)block[2 + i];
            check_msg(fabs((double)w[i] / d - q) <= 0.5 + 1e-4, "%g / %g became %g", (double)w[i], d, q);
        }
    }
    float w[32] = {0};
    uint8_t block[34];
    w[7] = ldexpf(1, -148); // 1 / d is infinite
    gguf_q8_0_block(block, w);
    check(block[0] == 0 && block[1] == 0 && block[2 + 6] == 0);
    w[7] = gguf_types[GGUF_Q8_0].limit;
    gguf_q8_0_block(block, w);
    check((block[0] | block[1] << 8) == 0x7BFF && block[2 + 7] == 127);
}

// ---- keys and vocabulary ------------------------------------------------------------------------

static void check_number(GgufFile* f, const char* name, uint64_t want) {
    find_key(f, name, GGUF_UINT32);
    uint64_t got = read_number(f, 4);
    check_msg(got == want, "%s is %llu, want %llu", name, (unsigned long long)got, (unsigned long long)want);
}

static void check_text(GgufFile* f, const char* name, const char* want) {
    size_t n;
    find_key(f, name, GGUF_STRING);
    const char* s = read_string(f, &n);
    check_msg(n == strlen(want) && memcmp(s, want, n) == 0, "%s is '%.*s', want '%s'", name, (int)n, s, want);
}

static void test_keys(void) {
    static const int file_types[] = {0, 1, 32, 7};
    GPT2 model;
    GgufFile f;
    Tokenizer t;
    load_tiny(&model);
    tokenizer_init_bytes(&t);
    for (int type = 0; type < GGUF_NUM_TYPES; type++) {
        write_and_read(&f, &model, (GgufType)type, &t);
        check_text(&f, "general.architecture", "gpt2");
        check_text(&f, "general.type", "model");
        check_text(&f, "general.name", "tiny");
        check_number(&f, "general.file_type", (uint64_t)file_types[type]);
        check_number(&f, "general.quantization_version", 2);
        check_number(&f, "gpt2.context_length", 64);
        check_number(&f, "gpt2.embedding_length", 128);
        check_number(&f, "gpt2.feed_forward_length", 512);
        check_number(&f, "gpt2.block_count", 2);
        check_number(&f, "gpt2.attention.head_count", 2);
        find_key(&f, "gpt2.attention.layer_norm_epsilon", GGUF_FLOAT32);
        check(safe_float_from_bits((uint32_t)read_number(&f, 4)) == 1e-5f);
        check_text(&f, "tokenizer.ggml.model", "gpt2");
        check_text(&f, "tokenizer.ggml.pre", "gpt-2");
        check_number(&f, "tokenizer.ggml.bos_token_id", 256);
        check_number(&f, "tokenizer.ggml.eos_token_id", 256);
        find_key(&f, "tokenizer.ggml.add_bos_token", GGUF_BOOL);
        check(read_number(&f, 1) == 0);
        check(find_key(&f, "tokenizer.ggml.tokens", GGUF_ARRAY)->count == 512);
        check(find_key(&f, "tokenizer.ggml.token_type", GGUF_ARRAY)->count == 512);
        check(find_key(&f, "tokenizer.ggml.merges", GGUF_ARRAY)->count == 0);
        check_msg(f.num_keys == 19, "%d keys", (int)f.num_keys);
        gguf_file_close(&f);
    }
    tokenizer_free(&t);
    gpt2_free(&model);
}

static void check_token(GgufFile* f, int id, const char* want, uint64_t want_kind) {
    size_t n = 0;
    const char* s = "";
    find_key(f, "tokenizer.ggml.tokens", GGUF_ARRAY);
    for (int i = 0; i <= id; i++) { s = read_string(f, &n); }
    check_msg(n == strlen(want) && memcmp(s, want, n) == 0, "token %d is '%.*s', want '%s'", id, (int)n, s, want);
    f->at = find_key(f, "tokenizer.ggml.token_type", GGUF_ARRAY)->at + 4 * (size_t)id;
    uint64_t kind = read_number(f, 4);
    check_msg(kind == want_kind, "token %d has type %d, want %d", id, (int)kind, (int)want_kind);
}

static void test_vocabulary(void) {
    static const char* const merges[3] = {"a b", "ab c", "\xC3\x85 \xC2\xBD"};
    GPT2 model;
    GgufFile f;
    Tokenizer t = odd_tokenizer();
    t.bos_id = 260, t.pad_id = 262, t.unk_id = 258;
    load_tiny(&model);
    write_and_read(&f, &model, GGUF_F16, &t);
    check_token(&f, 0, "<|endoftext|>", 3);
    check_token(&f, 1, "\xC4\x80", 1); // byte 0 is U+0100
    check_token(&f, 1 + ' ', "\xC4\xA0", 1);
    check_token(&f, 1 + 'a', "a", 1);
    check_token(&f, 1 + 255, "\xC3\xBF", 1);
    check_token(&f, 257, "ab", 1);
    check_token(&f, 258, "abc", 1);
    check_token(&f, 259, "\xC3\x85\xC2\xBD", 1);
    check_token(&f, 260, "<s>", 3);
    check_token(&f, 261, "\xC3\xBF\xC3\xBE\xC3\xBF", 1); // bytes FF FE FF are not UTF-8
    check_token(&f, 262, "<my token>", 4);
    check_token(&f, 263, "\xE4\xBD\xA0", 4);
    check_token(&f, 264, " ", 4);
    check_token(&f, 265, "x\xC4\x80y", 1);
    check_token(&f, 266, "[PAD266]", 5);
    check_token(&f, 511, "[PAD511]", 5);
    const Key* k = find_key(&f, "tokenizer.ggml.merges", GGUF_ARRAY);
    check(k->count == 3 && k->element_type == GGUF_STRING);
    for (int i = 0; i < 3; i++) {
        size_t n;
        const char* s = read_string(&f, &n);
        check_msg(n == strlen(merges[i]) && memcmp(s, merges[i], n) == 0, "merge %d is '%.*s'", i, (int)n, s);
    }
    check_number(&f, "tokenizer.ggml.eos_token_id", 0);
    check_number(&f, "tokenizer.ggml.bos_token_id", 260);
    check_number(&f, "tokenizer.ggml.padding_token_id", 262);
    check_number(&f, "tokenizer.ggml.unknown_token_id", 258);
    gguf_file_close(&f);
    tokenizer_free(&t);
    gpt2_free(&model);
}

// ---- tensors ----------------------------------------------------------------------------------------

// llama.cpp's names, in the order of gpt2_params.
static const char* const names[NUM_PARAMS] = {
    "token_embd.weight", "position_embd.weight", "attn_norm.weight",   "attn_norm.bias",
    "attn_qkv.weight",   "attn_qkv.bias",        "attn_output.weight", "attn_output.bias",
    "ffn_norm.weight",   "ffn_norm.bias",        "ffn_up.weight",      "ffn_up.bias",
    "ffn_down.weight",   "ffn_down.bias",        "output_norm.weight", "output_norm.bias"};

static const FileTensor* find_param(const GgufFile* f, int p, int layer) {
    char name[64];
    bool in_block = p >= 2 && p < 14;
    snprintf(name, sizeof(name), "%s", names[p]);
    if (in_block) { snprintf(name, sizeof(name), "blk.%d.%s", layer, names[p]); }
    return find_tensor(f, name);
}

// Weight i of w must be as near as its type allows: half an ulp; for q8_0 half a step, and half an ulp of the scale.
static void check_weight(const FileTensor* t, size_t i, const float* w) {
    float got = stored_weight(t, i), bound = 0;
    if (t->type == 8) {
        for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32; j++) { bound = fabsf(w[j]) > bound ? fabsf(w[j]) : bound; }
        bound = bound / 127 * 0.5f * 1.001f + bound * 0x1p-11f;
    } else if (t->type != 0) {
        bound = fabsf(w[i]) * (t->type == 1 ? 0x1p-11f : 0x1p-8f) + 0x1p-25f;
    }
    check_msg(fabsf(got - w[i]) <= bound, "%s, weight %zu: %.9g became %.9g", t->name, i, (double)w[i], (double)got);
}

static void test_tensors(void) {
    static const uint32_t tensor_types[] = {0, 1, 30, 8};
    GPT2 model;
    GgufFile f;
    Tokenizer t;
    load_tiny(&model);
    tokenizer_init_bytes(&t);
    const GPT2Config* c = &model.config;
    for (int type = 0; type < GGUF_NUM_TYPES; type++) {
        write_and_read(&f, &model, (GgufType)type, &t);
        check(f.num_tensors == 28);
        size_t end = 0;
        for (size_t i = 0; i < f.num_tensors; i++) { // aligned, without holes or overlap, up to the end of the file
            const FileTensor* x = &f.tensors[i];
            check_msg(x->offset == (end + 31) / 32 * 32, "%s begins at %llu", x->name, (unsigned long long)x->offset);
            for (size_t pad = end; pad < x->offset; pad++) { check(f.file.data[f.data_at + pad] == 0); }
            end = x->offset + stored_bytes(x->type, x->dims[0] * x->dims[1]);
        }
        check(f.file.size == f.data_at + (end + 31) / 32 * 32);
        const float* w = model.params_memory;
        for (int p = 0; p < NUM_PARAMS; p++) {
            bool matrix = p == 0 || p == 1 || p == 4 || p == 6 || p == 10 || p == 12;
            for (int layer = 0; layer < param_copies(c, p); layer++, w += param_layer_size(c, p)) {
                const FileTensor* x = find_param(&f, p, layer);
                size_t rows = p == 0 ? 512 : param_rows(c, p), cols = param_cols(c, p);
                check_msg(x->num_dims == (matrix ? 2 : 1) && x->dims[0] == cols && x->dims[1] == rows, "shape of %s",
                          x->name);
                check_msg(x->type == (matrix && p != 1 ? tensor_types[type] : 0), "%s has type %u", x->name, x->type);
                for (size_t i = 0; i < rows * cols; i++) { check_weight(x, i, w); }
            }
        }
        gguf_file_close(&f);
    }
    tokenizer_free(&t);
    gpt2_free(&model);
}

// another width of the MLP and another epsilon are in the keys and in the shapes
static void test_mlp_and_epsilon(void) {
    GPT2Config config = {8, 257, padded_vocab(257), 1, 1, 32, 96, 1e-6f, 0, 0, 0, 0};
    GPT2 model;
    GgufFile f;
    Tokenizer t;
    gpt2_allocate(&model, &config);
    gpt2_init_params(model.params_memory, &config, 1);
    tokenizer_init_bytes(&t);
    write_and_read(&f, &model, GGUF_Q8_0, &t);
    check_number(&f, "gpt2.feed_forward_length", 96);
    find_key(&f, "gpt2.attention.layer_norm_epsilon", GGUF_FLOAT32);
    check(safe_float_from_bits((uint32_t)read_number(&f, 4)) == 1e-6f);
    const FileTensor *up = find_param(&f, 10, 0), *down = find_param(&f, 12, 0);
    check(up->dims[0] == 32 && up->dims[1] == 96 && down->dims[0] == 96 && down->dims[1] == 32);
    gguf_file_close(&f);
    tokenizer_free(&t);
    gpt2_free(&model);
}

// an untied head is output.weight; scales of attention are in the queries, whose scores llama.cpp divides by 8
static void test_head_and_scales(void) {
    for (int i = 0; i < 4; i++) {
        GPT2Config config = {8, 257, padded_vocab(257), 2, 1, 64, 64, 1e-5f, 0, i & 1, i >> 1, 1};
        GPT2 model;
        GgufFile f;
        Tokenizer t;
        gpt2_allocate(&model, &config);
        gpt2_init_params(model.params_memory, &config, 1);
        for (int n = 0; n < 2 * 192; n++) { model.params.qkvb[n] = (float)n / 256; }
        tokenizer_init_bytes(&t);
        write_and_read(&f, &model, GGUF_F32, &t);
        const FileTensor* head = find_tensor(&f, "output.weight");
        check(f.num_tensors == 29 && head->num_dims == 2 && head->dims[0] == 64 && head->dims[1] == 257);
        for (size_t k = 0; k < 257 * 64; k++) { check_weight(head, k, model.params.lmhead); }
        for (int layer = 0; layer < 2; layer++) {
            float scale = (i & 1 ? 8.0f : 1.0f) / (i >> 1 && layer == 1 ? 2.0f : 1.0f); // exact
            for (int p = 4; p <= 5; p++) {
                size_t n = param_layer_size(&config, p);
                const float* w = model.params_memory + param_offset(&config, p) + (size_t)layer * n;
                for (size_t k = 0; k < n; k++) {
                    float want = w[k] * (k < n / 3 ? scale : 1.0f), got = stored_weight(find_param(&f, p, layer), k);
                    check_msg(got == want, "case %d, layer %d, %zu: %g, want %g", i, layer, k, (double)got,
                              (double)want);
                }
            }
        }
        gguf_file_close(&f);
        tokenizer_free(&t);
        gpt2_free(&model);
    }
}

// The padding rows of wte stay out; a matrix that ends within 32 bytes, and one that is converted in several parts.
static void test_odd_shapes(void) {
    GPT2Config config = {3, 257, padded_vocab(257), 1, 3, 24, 96, 1e-5f, 0, 0, 0, 0};
    GPT2Config large = {3, 40009, padded_vocab(40009), 1, 1, 32, 128, 1e-5f, 0, 0, 0, 0};
    GPT2 model;
    GgufFile f;
    Tokenizer t;
    tokenizer_init_bytes(&t);
    for (int k = 0; k < 2; k++) {
        gpt2_allocate(&model, k == 0 ? &config : &large);
        gpt2_init_params(model.params_memory, &model.config, 1);
        write_and_read(&f, &model, k == 0 ? GGUF_F16 : GGUF_Q8_0, &t);
        const FileTensor* x = find_param(&f, 0, 0);
        size_t n = (size_t)model.config.vocab_size * (size_t)model.config.channels;
        check(x->dims[0] * x->dims[1] == n);
        for (size_t i = 0; i < n; i++) { check_weight(x, i, model.params_memory); }
        x = find_param(&f, 15, 0);
        check(x->data + 4 * x->dims[0] <= f.file.data + f.file.size && f.file.size % 32 == 0);
        gguf_file_close(&f);
        gpt2_free(&model);
    }
    tokenizer_free(&t);
}

// The files that gguf and llama.cpp have read, see the top. After a change of what is written, read them again with both.
static void test_known_files(void) {
    static const uint32_t sums[] = {0xd59d4cb6, 0xa52bd5d6, 0xbd534716, 0xc6815869};
    GPT2 model;
    GgufFile f;
    Tokenizer t;
    load_tiny(&model);
    tokenizer_init_bytes(&t);
    for (int type = 0; type < GGUF_NUM_TYPES; type++) {
        write_and_read(&f, &model, (GgufType)type, &t);
        uint32_t sum = crc32c(0, f.file.data, f.file.size);
        check_msg(sum == sums[type], "%s: crc32c %08x, want %08x", gguf_types[type].name, sum, sums[type]);
        gguf_file_close(&f);
    }
    tokenizer_free(&t);
    gpt2_free(&model);
}

// The model with the weights of an fp16 and a q8_0 file continues the reference prompt as llama.cpp does with these files, and
// as PyTorch does.
static void test_greedy(void) {
    static const GgufType types[] = {GGUF_F32, GGUF_F16, GGUF_Q8_0};
    int *prompt = golden_ints("generate.prompt"), *want = golden_ints("generate.greedy"), got[64];
    int n = (int)elements(golden_tensor("generate.prompt")), total = (int)elements(golden_tensor("generate.greedy"));
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    GPT2 model;
    GgufFile f;
    Tokenizer t;
    tokenizer_init_bytes(&t);
    for (int k = 0; k < 3; k++) {
        load_tiny(&model);
        write_and_read(&f, &model, types[k], &t);
        float* w = model.params_memory;
        memset(w, 0xFF, num_parameters(&model.config) * sizeof(float)); // NaN
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (int layer = 0; layer < param_copies(&model.config, p); layer++) {
                const FileTensor* x = find_param(&f, p, layer);
                for (size_t i = 0; i < param_layer_size(&model.config, p); i++) { *w++ = stored_weight(x, i); }
            }
        }
        check(generate(&model, &greedy, prompt, n, total, -1, got, NULL, NULL) == total);
        for (int i = 0; i < total; i++) {
            check_msg(got[i] == want[i], "%s, token %d: %d, want %d", gguf_types[types[k]].name, i, got[i], want[i]);
        }
        gguf_file_close(&f);
        gpt2_free(&model);
    }
    tokenizer_free(&t);
    free(prompt), free(want);
}

// ---- what is refused --------------------------------------------------------------------------------------

static void check_refused(const GPT2Config* c, GgufType type, const Tokenizer* t, int eot, const char* reason) {
    Gguf g;
    Error err = {""};
    bool ok = gguf_open(&g, "x.gguf", c, type, t, eot, &err);
    check_msg(!ok && strncmp(err.text, "x.gguf: ", 8) == 0 && strstr(err.text, reason), "'%s' instead of '%s'",
              ok ? "taken" : err.text, reason);
    if (ok) { gguf_close(&g); }
}

static void test_refused_models(void) {
    GPT2Config c = {8, 512, 512, 1, 1, 24, 96, 1e-5f, 0, 0, 0, 0};
    Tokenizer t, odd = odd_tokenizer();
    tokenizer_init_bytes(&t);
    check_refused(&c, GGUF_F32, NULL, 0, "there is none beside the model: give one with --tokenizer");
    check_refused(&c, GGUF_F32, &t, -1, "no end-of-text token");
    check_refused(&c, GGUF_F32, &t, 512, "no end-of-text token");
    check_refused(&c, GGUF_Q8_0, &t, 256,
                  "q8_0 has blocks of 32 weights, which do not divide 24 channels: give --type f16");
    GPT2Config narrow = {8, 512, 512, 1, 1, 32, 80, 1e-5f, 0, 0, 0, 0};
    check_refused(&narrow, GGUF_Q8_0, &t, 256,
                  "q8_0 has blocks of 32 weights, which do not divide 80 MLP channels: give --type f16");
    for (int activation = ACT_GELU; activation <= ACT_TANH; activation++) {
        char reason[128];
        GPT2Config other = {8, 512, 512, 1, 1, 32, 128, 1e-5f, activation, 0, 0, 0};
        snprintf(reason, sizeof(reason),
                 "llama.cpp's GPT-2 has the activation gelu_new, not %s: write a Hugging Face directory instead",
                 activation_name(activation));
        check_refused(&other, GGUF_F32, &t, 256, reason);
    }
    Tokenizer decodes = t;
    decodes.can_encode = false;
    check_refused(&c, GGUF_F32, &decodes, 256, "can only decode: give one with --tokenizer");
    // a special token spelled like a token of one byte: U+0100 is byte 0
    memcpy(odd.bytes + odd.offsets[260], "\xC4\x80", 2), odd.bytes[odd.offsets[260] + 2] = ' ';
    odd.flags[260] = TOKEN_ADDED | TOKEN_SPECIAL;
    odd.offsets[261] = odd.offsets[260] + 2;
    check_refused(&c, GGUF_F32, &odd, 0, "(id 260) occurs twice");
    tokenizer_free(&t);
    tokenizer_free(&odd);
}

static void test_refused_weights(void) {
    GPT2Config c = {8, 257, padded_vocab(257), 2, 1, 32, 128, 1e-5f, 0, 0, 0, 0};
    static const struct {
        GgufType type;
        float weight;
        const char* reason; // NULL: taken
    } cases[] = {{GGUF_F32, NAN, "tensor 'h.1.mlp.c_fc.weight' is not finite: nan at [13, 2]: no value of f32"},
                 {GGUF_F32, -INFINITY, "tensor 'h.1.mlp.c_fc.weight' is not finite: -inf at [13, 2]: no value of f32"},
                 {GGUF_Q8_0, NAN, "tensor 'h.1.mlp.c_fc.weight' is not finite: nan at [13, 2]: no value of q8_0"},
                 {GGUF_F16, -70000.0f,
                  "tensor 'h.1.mlp.c_fc.weight' is too large: -70000 at [13, 2]: no value of f16: give --type f32"},
                 {GGUF_F16, 65520.0f, "no value of f16"},
                 {GGUF_BF16, 3.3961776e38f, "no value of bf16"},
                 {GGUF_Q8_0, 8321040.0f, "no value of q8_0"},
                 {GGUF_F16, 65519.996f, NULL},
                 {GGUF_BF16, 3.396177e38f, NULL},
                 {GGUF_Q8_0, -8321039.5f, NULL},
                 {GGUF_F16, 65504.0f, NULL},
                 {GGUF_BF16, -70000.0f, NULL},
                 {GGUF_F32, 3.4e38f, NULL}};
    GPT2 model;
    Gguf g;
    Error err;
    Tokenizer t;
    tokenizer_init_bytes(&t);
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
        gpt2_allocate(&model, &c);
        gpt2_init_params(model.params_memory, &c, 1);
        model.params_memory[param_offset(&c, 10) + param_layer_size(&c, 10) + 77] = cases[k].weight;
        err.text[0] = '\0';
        if (!gguf_open(&g, "x.gguf", &c, cases[k].type, &t, 256, &err)) { die("%s", err.text); }
        bool ok = gguf_write(&g, test_path("bad.gguf"), model.params_memory, &err);
        check_msg(cases[k].reason ? !ok && strstr(err.text, cases[k].reason) : ok, "case %zu: '%s'", k, err.text);
        gguf_close(&g);
        gpt2_free(&model);
    }
    tokenizer_free(&t);
}

static const Test tests[] = {
    {"q8_0_reference", "blocks with the bytes of llama.cpp's", test_q8_0_reference},
    {"q8_0_definition", "random blocks of every magnitude; what does not fit", test_q8_0_definition},
    {"keys", "every key has its type and value", test_keys},
    {"vocabulary", "spelling and type of tokens, merges", test_vocabulary},
    {"tensors", "names, shapes, types, places and weights", test_tensors},
    {"mlp_and_epsilon", "other values than GPT-2's", test_mlp_and_epsilon},
    {"head_and_scales", "an untied head; scales of attention", test_head_and_scales},
    {"odd_shapes", "padding rows, padding bytes, several chunks", test_odd_shapes},
    {"known_files", "the bytes that gguf and llama.cpp have read", test_known_files},
    {"greedy", "text from the weights of a file", test_greedy},
    {"refused_models", "vocabularies, activations, blocks that do not fit", test_refused_models},
    {"refused_weights", "weights that a type cannot hold", test_refused_weights},
};

int main(int argc, char** argv) {
    (void)train; // the tasks of the program are tested by test_program.sh
    (void)sample;
    (void)evaluate;
    (void)bench;
    (void)plan;
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
