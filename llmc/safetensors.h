/*
Reads and writes safetensors files, all little-endian:

    | N (8 bytes) | header: N bytes of JSON | data of all tensors, without gaps |

The reader maps the file and checks it completely before it returns a pointer: header, names, shapes, offsets and the
exact file size. It is as strict as the reference reader (huggingface/safetensors 0.8) and stricter in three ways: the
header must begin with '{', names must be unique and must not contain a NUL, and a tensor may have at most SAFE_MAX_DIMS
dimensions. Like the reference reader, it ignores unknown keys in the entry of a tensor. The writer streams: first all
tensors are declared, then their data is written.

    SafeTensors st;
    if (!safetensors_open(&st, path, &err)) { return false; }
    const SafeTensor* t = safetensors_find(&st, "wte.weight");
    if (t && safe_is_float(t->dtype)) { safetensors_to_float(out, t, 0, t->elements); }
    safetensors_close(&st);

    SafeWriter w;
    safewriter_init(&w);
    safewriter_add(&w, "wte.weight", SAFE_F32, 2, shape);
    if (!safewriter_begin(&w, path, &err)) { return false; }
    safewriter_data(&w, wte, bytes); // may be called several times
    return safewriter_end(&w, &err, NULL, NULL);
*/
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "json.h"
#include "utils.h"

enum { SAFE_MAX_DIMS = 8, SAFE_MAX_HEADER = 100000000 };

// all types of the reference reader, in the order of safe_dtypes
typedef enum {
    SAFE_BOOL,
    SAFE_F4,
    SAFE_F6_E2M3,
    SAFE_F6_E3M2,
    SAFE_U8,
    SAFE_I8,
    SAFE_F8_E5M2,
    SAFE_F8_E4M3,
    SAFE_F8_E8M0,
    SAFE_F8_E4M3FNUZ,
    SAFE_F8_E5M2FNUZ,
    SAFE_I16,
    SAFE_U16,
    SAFE_F16,
    SAFE_BF16,
    SAFE_I32,
    SAFE_U32,
    SAFE_F32,
    SAFE_C64,
    SAFE_F64,
    SAFE_I64,
    SAFE_U64,
    SAFE_NUM_DTYPES
} SafeDtype;

typedef struct {
    const char* name;
    int bits; // bits per element
} SafeDtypeInfo;

static const SafeDtypeInfo safe_dtypes[SAFE_NUM_DTYPES] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
};

typedef struct {
    const char* name; // NUL-terminated
    SafeDtype dtype;
    int num_dims;
    uint64_t shape[SAFE_MAX_DIMS];
    size_t elements;     // product of shape; 1 if there are no dimensions
    size_t begin;        // offset of the first byte from the end of the header
    const uint8_t* data; // (bytes), possibly misaligned: copy elements, do not cast the pointer
    size_t bytes;
} SafeTensor;

typedef struct {
    MappedFile file;           // not used if the header came from memory (safetensors_parse)
    JsonDoc json;              // the header
    const JsonValue* metadata; // "__metadata__", an object of strings, or NULL
    SafeTensor* tensors;       // (num_tensors), in the order of their data
    size_t num_tensors;
    const SafeTensor** by_name; // (num_tensors), sorted
} SafeTensors;

// ---- numbers -----------------------------------------------------------------------

static inline bool safe_is_float(SafeDtype dtype) {
    return dtype == SAFE_F32 || dtype == SAFE_F16 || dtype == SAFE_BF16;
}

static inline float safe_float_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint32_t safe_bits_from_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static inline float safe_float_from_bf16(uint16_t h) { return safe_float_from_bits((uint32_t)h << 16); }

// Rounds to nearest, ties to even; a NaN stays a NaN.
static inline uint16_t safe_bf16_from_float(float f) {
    uint32_t u = safe_bits_from_float(f);
    uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
    return (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

// Converts IEEE half precision exactly, including subnormals and NaN payloads. Has no branches, so that it vectorizes.
static inline float safe_float_from_f16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7FFF) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t exponent = magnitude & 0x0F800000;
    uint32_t normal = magnitude + ((127u - 15) << 23);
    uint32_t special = magnitude + ((255u - 31) << 23); // infinities and NaNs
    // a subnormal m * 2^-24 is 2^-14 * (1 + m / 1024) - 2^-14
    uint32_t tiny =
        safe_bits_from_float(safe_float_from_bits(magnitude + (113u << 23)) - safe_float_from_bits(113u << 23));
    uint32_t bits = exponent == 0 ? tiny : exponent == 0x0F800000 ? special : normal;
    return safe_float_from_bits(bits | sign);
}

// Rounds to IEEE half precision, to nearest, ties to even; a NaN stays a NaN, and what is too large becomes infinite.
static inline uint16_t safe_f16_from_float(float f) {
    uint32_t u = safe_bits_from_float(f), sign = u >> 16 & 0x8000;
    u &= 0x7FFFFFFF;
    if (u > 0x7F800000) { return (uint16_t)(sign | 0x7E00); }
    if (u >= 0x47800000) { return (uint16_t)(sign | 0x7C00); } // 65536; below, the rounding itself may give infinity
    if (u < 0x38800000) { // subnormal: 0.5 has the spacing of fp16's subnormals, 2^-24, so the addition rounds
        return (uint16_t)(sign | (safe_bits_from_float(safe_float_from_bits(u) + 0.5f) - 0x3F000000));
    }
    return (uint16_t)(sign | (u - (112u << 23) + 0xFFF + (u >> 13 & 1)) >> 13);
}

// Converts elements offset..offset+n of an F32, F16 or BF16 tensor to dst[0..n).
static inline void safetensors_to_float(float* dst, const SafeTensor* t, size_t offset, size_t n) {
    require(safe_is_float(t->dtype) && offset <= t->elements && n <= t->elements - offset);
    const uint8_t* src = t->data + offset * (size_t)(safe_dtypes[t->dtype].bits / 8);
    if (t->dtype == SAFE_F32) {
        memcpy(dst, src, n * 4);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, 2);
        dst[i] = t->dtype == SAFE_BF16 ? safe_float_from_bf16(h) : safe_float_from_f16(h);
    }
}

// Converts n floats to bf16, rounded to nearest, in parallel.
static inline void floats_to_bf16(uint16_t* dst, const float* src, size_t n) {
#pragma omp parallel for schedule(static) if (n > 65536)
    for (size_t i = 0; i < n; i++) { dst[i] = safe_bf16_from_float(src[i]); }
}

// Index of the first of n values whose magnitude is above the limit, infinities and NaN included; n if there is none.
static inline size_t first_above(const float* values, size_t n, float limit) {
    // of two floats >= 0 the larger one has the larger bits; NaN has the largest
    uint32_t most = safe_bits_from_float(limit);
    for (size_t begin = 0; begin < n; begin += 4096) {
        size_t end = n - begin < 4096 ? n : begin + 4096;
        int32_t found = 0;
        for (size_t i = begin; i < end; i++) {
            found |= (int32_t)(safe_bits_from_float(values[i]) & 0x7FFFFFFF) > (int32_t)most;
        }
        for (size_t i = begin; found && i < end; i++) {
            if (!(fabsf(values[i]) <= limit)) { return i; }
        }
    }
    return n;
}

// Transposes work on tiles of 64 x 64 floats: the source and destination tiles, 16 KB each, fit in L1 together.
enum { TRANSPOSE_TILE = 64 };

// dst (cols, rows) = transpose of tile (rows, cols). The tile's rows have a stride of TRANSPOSE_TILE + 1 floats, dst's
// rows a stride of dst_stride.
static inline void transpose_tile(float* dst, size_t dst_stride, const float* tile, size_t rows, size_t cols) {
    for (size_t c = 0; c < cols; c++) {
        for (size_t r = 0; r < rows; r++) { dst[c * dst_stride + r] = tile[r * (TRANSPOSE_TILE + 1) + c]; }
    }
}

// Transposes columns first..first+n of src (rows, cols) into dst (n, rows).
static inline void transpose_rows(float* dst, const float* src, size_t rows, size_t cols, size_t first, size_t n) {
    size_t down = (rows + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE, across = (n + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
#pragma omp parallel for schedule(static) if (n * rows > 65536)
    for (size_t i = 0; i < down * across; i++) {
        float tile[TRANSPOSE_TILE * (TRANSPOSE_TILE + 1)];
        size_t r0 = i % down * TRANSPOSE_TILE, c0 = i / down * TRANSPOSE_TILE;
        size_t nr = rows - r0, nc = n - c0; // rows and columns of this tile
        if (nr > TRANSPOSE_TILE) { nr = TRANSPOSE_TILE; }
        if (nc > TRANSPOSE_TILE) { nc = TRANSPOSE_TILE; }
        for (size_t r = 0; r < nr; r++) {
            memcpy(tile + r * (TRANSPOSE_TILE + 1), src + (r0 + r) * cols + first + c0, nc * sizeof(float));
        }
        transpose_tile(dst + c0 * rows + r0, rows, tile, nr, nc);
    }
}

// ---- reading -----------------------------------------------------------------------

static inline uint64_t safe_header_bytes(const uint8_t* data, size_t size) {
    uint64_t n = 0;
    for (int i = 0; i < 8 && (size_t)i < size; i++) { n |= (uint64_t)data[i] << 8 * i; }
    return n;
}

// True if the bytes begin like a safetensors file. Test this before testing for a pickle: the pickle's magic 80 02 also
// is a header length of 640 bytes.
static inline bool safe_looks_right(const uint8_t* data, size_t size) {
    return size > 8 && safe_header_bytes(data, size) <= SAFE_MAX_HEADER && data[8] == '{';
}

static inline bool safe_begins(const uint8_t* data, size_t size, const char* text) {
    for (size_t i = 0; text[i]; i++) {
        if (i >= size || (data[i] | (data[i] >= 'A' && data[i] <= 'Z' ? 0x20 : 0)) != (uint8_t)text[i]) {
            return false;
        }
    }
    return true;
}

// Recognizes files that are commonly passed by mistake instead of a model file. Returns a description with the remedy,
// or NULL.
static inline const char* mistaken_file(const uint8_t* data, size_t size) {
    if (size == 0) { return "is empty; download it again"; }
    if (size <= 8 || safe_looks_right(data, size)) { return NULL; } // up to 8 bytes: truncated, kind unknown
    if (safe_begins(data, size, "version https://git-lfs")) {
        return "is a git-LFS pointer, not the file itself; run `git lfs pull` in that repository, or download the file";
    }
    size_t start = 0; // a web page may begin with a byte order mark and white space
    if (size >= 3 && memcmp(data, "\xEF\xBB\xBF", 3) == 0) { start = 3; }
    while (start < size && start < 64 && strchr(" \t\r\n", data[start]) && data[start]) { start++; }
    const uint8_t* text = data + start;
    size_t left = size - start;
    if (safe_begins(text, left, "<!doctype") || safe_begins(text, left, "<html") || safe_begins(text, left, "<head") ||
        safe_begins(text, left, "<?xml")) {
        return "is a web page (HTML or XML), probably an error message of the server; download the file again";
    }
    if (size >= 4 && memcmp(data, "PK\3\4", 4) == 0) {
        return "is a zip file, probably PyTorch's pytorch_model.bin; use the model.safetensors of the same model, or "
               "convert it with save_pretrained(..., safe_serialization=True)";
    }
    if (size >= 2 && data[0] == 0x80 && data[1] >= 2 && data[1] <= 5) {
        return "is a Python pickle, probably an old pytorch_model.bin; use the model.safetensors of the same model, or "
               "convert it with save_pretrained(..., safe_serialization=True)";
    }
    if (size >= 4 && memcmp(data, "GGUF", 4) == 0) {
        return "is a GGUF file of llama.cpp; use the model.safetensors of the same model";
    }
    if (size >= 2 && data[0] == 0x1F && data[1] == 0x8B) { return "is compressed with gzip; unpack it with gunzip"; }
    if (data[0] == '{') { return "is a JSON file, not a model; give the directory that contains it"; }
    return NULL;
}

static inline void safetensors_close(SafeTensors* st) {
    free(st->tensors);
    free(st->by_name);
    json_free(&st->json);
    unmap_file(&st->file);
    st->metadata = NULL;
    st->tensors = NULL;
    st->by_name = NULL;
    st->num_tensors = 0;
}

static inline int safe_compare_begin(const void* a, const void* b) {
    const SafeTensor *x = (const SafeTensor*)a, *y = (const SafeTensor*)b;
    if (x->begin != y->begin) { return x->begin < y->begin ? -1 : 1; }
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; // at the same offset, an empty tensor comes first
}

static inline int safe_compare_name(const void* a, const void* b) {
    return strcmp((*(const SafeTensor* const*)a)->name, (*(const SafeTensor* const*)b)->name);
}

// Reads an array of up to max non-negative integers into out. Returns their number, or -1 if `array` is anything else.
static inline int safe_read_sizes(const JsonValue* array, uint64_t* out, size_t max) {
    if (!array || array->type != JSON_ARRAY || array->count > max) { return -1; }
    for (size_t i = 0; i < array->count; i++) {
        const JsonValue* v = &array->items[i];
        if (v->type != JSON_NUMBER || !v->is_int || v->integer < 0) { return -1; }
        out[i] = (uint64_t)v->integer;
    }
    return (int)array->count;
}

// Computes t->elements and *bytes from shape and dtype. Returns false if they overflow or are not a whole number of
// bytes.
static inline bool safe_tensor_size(SafeTensor* t, size_t* bytes) {
    size_t bits;
    t->elements = 1;
    for (int i = 0; i < t->num_dims; i++) {
        if (__builtin_mul_overflow(t->elements, t->shape[i], &t->elements)) { return false; }
    }
    if (__builtin_mul_overflow(t->elements, (size_t)safe_dtypes[t->dtype].bits, &bits)) { return false; }
    *bytes = bits / 8;
    return bits % 8 == 0;
}

// Reads one member of the header into t, except t->data: the offsets can only be checked when all tensors are known.
static inline bool safe_read_tensor(SafeTensor* t, const JsonValue* v, const char* file, Error* err) {
    char name[128];
    json_printable(name, sizeof(name), v->key, v->key_length);
    if (strlen(v->key) != v->key_length) {
        return error_set(err, "%s: tensor '%s': its name contains a NUL", file, name);
    }
    t->name = v->key;
    const JsonValue* dtype = json_get(v, "dtype");
    if (!dtype || dtype->type != JSON_STRING) {
        return error_set(err, "%s: tensor '%s': no \"dtype\" in its entry", file, name);
    }
    int d = 0;
    while (d < SAFE_NUM_DTYPES && strcmp(dtype->string, safe_dtypes[d].name) != 0) { d++; }
    if (d == SAFE_NUM_DTYPES || strlen(dtype->string) != dtype->length) {
        char unknown[64];
        return error_set(err, "%s: tensor '%s': dtype '%s' is not known", file, name,
                         json_printable(unknown, sizeof(unknown), dtype->string, dtype->length));
    }
    t->dtype = (SafeDtype)d;
    const JsonValue* shape = json_get(v, "shape");
    if (shape && shape->type == JSON_ARRAY && shape->count > SAFE_MAX_DIMS) {
        return error_set(err, "%s: tensor '%s': %u dimensions, at most %d are supported", file, name, shape->count,
                         (int)SAFE_MAX_DIMS);
    }
    t->num_dims = safe_read_sizes(shape, t->shape, SAFE_MAX_DIMS);
    if (t->num_dims < 0) { return error_set(err, "%s: tensor '%s': \"shape\" is not a list of sizes", file, name); }
    uint64_t offsets[2];
    if (safe_read_sizes(json_get(v, "data_offsets"), offsets, 2) != 2 || offsets[1] < offsets[0]) {
        return error_set(err, "%s: tensor '%s': \"data_offsets\" is not [begin, end]", file, name);
    }
    size_t bytes;
    if (!safe_tensor_size(t, &bytes)) {
        return error_set(err, "%s: tensor '%s': its shape overflows, or does not fill whole bytes", file, name);
    }
    t->bytes = (size_t)(offsets[1] - offsets[0]);
    if (t->bytes != bytes) {
        return error_set(err, "%s: tensor '%s': %zu bytes by its offsets, %zu by its shape and dtype", file, name,
                         t->bytes, bytes);
    }
    t->begin = (size_t)offsets[0];
    return true;
}

static inline bool safe_read_metadata(SafeTensors* st, const JsonValue* v, const char* file, Error* err) {
    bool ok = v->type == JSON_OBJECT;
    for (size_t i = 0; ok && i < v->count; i++) { ok = v->items[i].type == JSON_STRING; }
    if (!ok) { return error_set(err, "%s: \"__metadata__\" is not an object of strings", file); }
    st->metadata = v;
    return true;
}

// Reads all tensors of the parsed header; body (body_size) is the data area of the file.
static inline bool safe_read_tensors(SafeTensors* st, const uint8_t* body, size_t body_size, const char* file,
                                     Error* err) {
    const JsonValue* root = st->json.root;
    if (root->type != JSON_OBJECT) { return error_set(err, "%s: the header is not a JSON object", file); }
    st->tensors = (SafeTensor*)calloc_check(root->count, sizeof(SafeTensor));
    for (size_t i = 0; i < root->count; i++) {
        const JsonValue* v = &root->items[i];
        if (json_same_key(v, "__metadata__", 12)) {
            if (!safe_read_metadata(st, v, file, err)) { return false; }
        } else if (!safe_read_tensor(&st->tensors[st->num_tensors++], v, file, err)) {
            return false;
        }
    }
    qsort(st->tensors, st->num_tensors, sizeof(SafeTensor), safe_compare_begin);
    size_t end = 0;
    for (size_t i = 0; i < st->num_tensors; i++) {
        const SafeTensor* t = &st->tensors[i];
        if (t->begin != end || __builtin_add_overflow(end, t->bytes, &end)) {
            char name[128];
            return error_set(err, "%s: tensor '%s' begins at byte %zu of the data, want %zu: a %s", file,
                             json_printable(name, sizeof(name), t->name, strlen(t->name)), t->begin, end,
                             t->begin > end ? "hole" : "tensor that overlaps");
        }
    }
    if (end > body_size) {
        return error_set(err, "%s: truncated: %zu bytes are missing at the end; download it again", file,
                         end - body_size);
    }
    if (end < body_size) {
        return error_set(err, "%s: %zu bytes too many after the last tensor", file, body_size - end);
    }
    st->by_name = (const SafeTensor**)malloc_check(st->num_tensors * sizeof(SafeTensor*));
    for (size_t i = 0; i < st->num_tensors; i++) {
        st->tensors[i].data = body + st->tensors[i].begin;
        st->by_name[i] = &st->tensors[i];
    }
    qsort(st->by_name, st->num_tensors, sizeof(SafeTensor*), safe_compare_name);
    return true;
}

// Parses a safetensors file in memory; data (size) must outlive st. `name` is its name in messages. On false there is
// nothing to close.
static inline bool safetensors_parse(SafeTensors* st, const uint8_t* data, size_t size, const char* name, Error* err) {
    memset(st, 0, sizeof(*st));
    st->file.data = (const uint8_t*)"";
    const char* mistake = mistaken_file(data, size);
    if (mistake) { return error_set(err, "%s: %s", name, mistake); }
    if (size < 8) {
        return error_set(err, "%s: truncated: %zu bytes, a safetensors file has more than 8; download it again", name,
                         size);
    }
    uint64_t n = safe_header_bytes(data, size);
    if (n > SAFE_MAX_HEADER) {
        return error_set(err, "%s: not a safetensors file: its header would have %llu bytes, at most %d are allowed",
                         name, (unsigned long long)n, (int)SAFE_MAX_HEADER);
    }
    if (n > 0 && size > 8 && data[8] != '{') {
        return error_set(err, "%s: not a safetensors file: its header does not begin with '{'", name);
    }
    if (n > size - 8) {
        return error_set(err, "%s: truncated: %llu bytes of the header are missing, and all data; download it again",
                         name, (unsigned long long)(n - (size - 8)));
    }
    if (n < 2) { return error_set(err, "%s: not a safetensors file: a header of %d bytes", name, (int)n); }
    char where[4200];
    snprintf(where, sizeof(where), "%s: header", name);
    if (!json_parse(&st->json, (const char*)data + 8, (size_t)n, where, err)) { return false; }
    if (!safe_read_tensors(st, data + 8 + n, size - 8 - (size_t)n, name, err)) {
        safetensors_close(st);
        return false;
    }
    return true;
}

// Maps and parses a file. The tensors are valid until safetensors_close(). On false there is nothing to close.
static inline bool safetensors_open(SafeTensors* st, const char* path, Error* err) {
    MappedFile file;
    if (!map_file(&file, path, err)) { return false; }
    if (!safetensors_parse(st, file.data, file.size, path, err)) {
        unmap_file(&file);
        return false;
    }
    st->file = file;
    return true;
}

// Returns the tensor with this name, or NULL.
static inline const SafeTensor* safetensors_find(const SafeTensors* st, const char* name) {
    size_t low = 0, high = st->num_tensors;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = strcmp(name, st->by_name[mid]->name);
        if (order == 0) { return st->by_name[mid]; }
        if (order < 0) {
            high = mid;
        } else {
            low = mid + 1;
        }
    }
    return NULL;
}

// Formats a shape as "[2, 3]" in out (size bytes), for messages. Returns out.
static inline const char* safe_shape_text(char* out, size_t size, const uint64_t* shape, int num_dims) {
    size_t used = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < num_dims && used < size; i++) {
        used += (size_t)snprintf(out + used, size - used, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    }
    if (used < size) { snprintf(out + used, size - used, "]"); }
    return out;
}

// ---- writing -----------------------------------------------------------------------

typedef struct {
    char* name;
    SafeDtype dtype;
    int num_dims;
    uint64_t shape[SAFE_MAX_DIMS];
    size_t bytes;
} SafeDeclared;

typedef struct {
    char *key, *value;
} SafePair;

typedef struct {
    FileWriter file;
    SafeDeclared* tensors; // (num_tensors), in the order of their data
    size_t num_tensors, capacity;
    SafePair* pairs; // (num_pairs) entries of "__metadata__" after "format": "pt"
    size_t num_pairs;
    uint64_t declared, given; // bytes of data declared, and written so far
} SafeWriter;

static inline void safewriter_init(SafeWriter* w) { memset(w, 0, sizeof(*w)); }

static inline void safewriter_free(SafeWriter* w) {
    for (size_t i = 0; i < w->num_tensors; i++) { free(w->tensors[i].name); }
    for (size_t i = 0; i < w->num_pairs; i++) {
        free(w->pairs[i].key);
        free(w->pairs[i].value);
    }
    free(w->tensors);
    free(w->pairs);
    w->tensors = NULL;
    w->pairs = NULL;
    w->num_tensors = w->num_pairs = 0;
}

// Declares the next tensor. Names are UTF-8 and must be unique; they are copied.
static inline void safewriter_add(SafeWriter* w, const char* name, SafeDtype dtype, int num_dims,
                                  const uint64_t* shape) {
    require(num_dims >= 0 && num_dims <= SAFE_MAX_DIMS && dtype < SAFE_NUM_DTYPES);
    if (w->num_tensors == w->capacity) {
        w->capacity = w->capacity ? 2 * w->capacity : 64;
        w->tensors = (SafeDeclared*)realloc_check(w->tensors, w->capacity * sizeof(SafeDeclared));
    }
    SafeTensor size; // only to compute the size with safe_tensor_size()
    memset(&size, 0, sizeof(size));
    size.dtype = dtype;
    size.num_dims = num_dims;
    for (int i = 0; i < num_dims; i++) { size.shape[i] = shape[i]; }
    SafeDeclared* t = &w->tensors[w->num_tensors++];
    memset(t, 0, sizeof(*t));
    require(safe_tensor_size(&size, &t->bytes) && !__builtin_add_overflow(w->declared, t->bytes, &w->declared));
    t->name = strdup_check(name);
    t->dtype = dtype;
    t->num_dims = num_dims;
    memcpy(t->shape, size.shape, sizeof(t->shape));
}

// Adds a pair to "__metadata__".
static inline void safewriter_metadata(SafeWriter* w, const char* key, const char* value) {
    w->pairs = (SafePair*)realloc_check(w->pairs, (w->num_pairs + 1) * sizeof(SafePair));
    w->pairs[w->num_pairs].key = strdup_check(key);
    w->pairs[w->num_pairs++].value = strdup_check(value);
}

static inline void safewriter_header(const SafeWriter* w, FileWriter* out) {
    writer_printf(out, "{\"__metadata__\":{\"format\":\"pt\"");
    for (size_t i = 0; i < w->num_pairs; i++) {
        writer_put(out, ",", 1);
        json_write_string(out, w->pairs[i].key, strlen(w->pairs[i].key));
        writer_put(out, ":", 1);
        json_write_string(out, w->pairs[i].value, strlen(w->pairs[i].value));
    }
    writer_put(out, "}", 1);
    uint64_t begin = 0;
    for (size_t i = 0; i < w->num_tensors; i++) {
        const SafeDeclared* t = &w->tensors[i];
        writer_put(out, ",", 1);
        json_write_string(out, t->name, strlen(t->name));
        writer_printf(out, ":{\"dtype\":\"%s\",\"shape\":[", safe_dtypes[t->dtype].name);
        for (int d = 0; d < t->num_dims; d++) {
            writer_printf(out, "%s%llu", d ? "," : "", (unsigned long long)t->shape[d]);
        }
        writer_printf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                      (unsigned long long)(begin + t->bytes));
        begin += t->bytes;
    }
    writer_put(out, "}", 1);
}

// The offset of the data in the file: 8 bytes and the header, which is padded to a multiple of 8. *text_bytes (may be NULL):
// the header without its padding.
static inline uint64_t safewriter_data_begin(const SafeWriter* w, uint64_t* text_bytes) {
    FileWriter count; // only counts bytes: it is marked as failed, so it writes nothing
    memset(&count, 0, sizeof(count));
    count.failed = true;
    safewriter_header(w, &count);
    if (text_bytes) { *text_bytes = count.bytes; }
    return 8 + (count.bytes + 7) / 8 * 8;
}

// Creates path and writes the header. On false the writer has been freed.
static inline bool safewriter_begin(SafeWriter* w, const char* path, Error* err) {
    uint64_t text_bytes, length = safewriter_data_begin(w, &text_bytes) - 8;
    require(length <= SAFE_MAX_HEADER);
    if (!writer_open(&w->file, path, err)) {
        safewriter_free(w);
        return false;
    }
    uint8_t prefix[8];
    for (int i = 0; i < 8; i++) { prefix[i] = (uint8_t)(length >> 8 * i); }
    writer_put(&w->file, prefix, 8);
    safewriter_header(w, &w->file);
    writer_put(&w->file, "        ", length - text_bytes);
    return true;
}

// Writes the next bytes of the data, in the order of declaration. A tensor may be split into several calls.
static inline void safewriter_data(SafeWriter* w, const void* data, size_t bytes) {
    w->given += bytes;
    require(w->given <= w->declared);
    writer_put(&w->file, data, bytes);
}

// Syncs and closes the file; frees the writer in any case. *bytes and *crc (each may be NULL) receive the file's size
// and crc32c.
static inline bool safewriter_end(SafeWriter* w, Error* err, uint64_t* bytes, uint32_t* crc) {
    require(w->given == w->declared);
    safewriter_free(w);
    if (bytes) { *bytes = w->file.bytes; }
    if (crc) { *crc = w->file.crc; }
    return writer_close(&w->file, err);
}

// Instead of safewriter_data() and safewriter_end(), if others write the data: gives the file its full size and reserves
// room for it where the file system can, so that a full disk is found now. *bytes and *crc receive the size of the file and
// the crc32c of what precedes the data. Frees the writer in any case.
static inline bool safewriter_end_header(SafeWriter* w, Error* err, uint64_t* bytes, uint32_t* crc) {
    require(w->given == 0);
    safewriter_free(w);
    writer_flush(&w->file);
    *bytes = w->file.bytes + w->declared;
    *crc = w->file.crc;
    if (!w->file.failed && !reserve_file(w->file.fd, *bytes)) { writer_fail(&w->file, "cannot reserve its size"); }
    return writer_close(&w->file, err);
}

#endif
