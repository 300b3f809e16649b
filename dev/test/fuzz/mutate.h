/*
Changes to the files that the programs read, for whole_program.c. A change keeps as much of a file's structure as it can, so
that the file is not refused at its first byte: JSON is edited value by value, a safetensors file is written anew with a
consistent header, the header and the size of a .bin agree, and the checksums of a checkpoint are computed again.

All choices come from one generator, so a seed gives the same change again. C11.
*/
#ifndef LLMC_FUZZ_MUTATE_H
#define LLMC_FUZZ_MUTATE_H

#include "../../../llmc/rand.h"
#include "../../../llmc/run_state.h"

// ---- random choices ---------------------------------------------------------------

typedef struct {
    uint64_t state;
    char* notes; // (MUTATE_NOTES) what was changed, one line per change
    size_t notes_used;
} Mutator;

enum { MUTATE_NOTES = 8192, MUTATE_MAX_BYTES = 1 << 20 };

static inline uint64_t draw(Mutator* m) {
    m->state += 0x9E3779B97F4A7C15u;
    return splitmix64(m->state);
}

// A number from 0 to n - 1.
static inline size_t below(Mutator* m, size_t n) { return n ? (size_t)(draw(m) % n) : 0; }

static inline bool chance(Mutator* m, int percent) { return (int)below(m, 100) < percent; }

#define PICK(m, array) ((array)[below((m), sizeof(array) / sizeof((array)[0]))])

PRINTF_LIKE(2, 3) static inline void note(Mutator* m, const char* fmt, ...) {
    va_list args;
    if (MUTATE_NOTES - m->notes_used < 2) { return; }
    va_start(args, fmt);
    format_line(m->notes + m->notes_used, MUTATE_NOTES - m->notes_used - 1, fmt, args);
    va_end(args);
    m->notes_used += strlen(m->notes + m->notes_used);
    memcpy(m->notes + m->notes_used, "\n", 2);
    m->notes_used++;
}

// ---- bytes ------------------------------------------------------------------------

typedef struct {
    uint8_t* data; // (capacity), of which size bytes are in use
    size_t size, capacity;
} Bytes;

static inline void bytes_free(Bytes* b) {
    free(b->data);
    memset(b, 0, sizeof(*b));
}

// Replaces `removed` bytes at `at` by `n` bytes of data, which must not be part of b; data may be NULL for zeros.
static inline void bytes_splice(Bytes* b, size_t at, size_t removed, const void* data, size_t n) {
    require(at <= b->size && removed <= b->size - at);
    size_t size = b->size - removed + n;
    if (size > b->capacity) {
        b->capacity = 2 * size + 64;
        b->data = (uint8_t*)realloc_check(b->data, b->capacity);
    }
    if (size == 0) { return (void)(b->size = 0); }
    memmove(b->data + at + n, b->data + at + removed, b->size - at - removed);
    if (n > 0 && data) { memcpy(b->data + at, data, n); }
    if (n > 0 && !data) { memset(b->data + at, 0, n); }
    b->size = size;
}

static inline void bytes_add(Bytes* b, const void* data, size_t n) { bytes_splice(b, b->size, 0, data, n); }
static inline void bytes_text(Bytes* b, const char* text) { bytes_add(b, text, strlen(text)); }

PRINTF_LIKE(2, 3) static inline void bytes_printf(Bytes* b, const char* fmt, ...) {
    char text[1024];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    require(n >= 0 && n < (int)sizeof(text));
    bytes_add(b, text, (size_t)n);
}

// Sets the size; new bytes are 0.
static inline void bytes_resize(Bytes* b, size_t size) {
    bytes_splice(b, size < b->size ? size : b->size, size < b->size ? b->size - size : 0, NULL,
                 size > b->size ? size - b->size : 0);
}

static inline bool bytes_read(Bytes* b, const char* path, Error* err) {
    MappedFile file;
    memset(b, 0, sizeof(*b));
    if (!map_file(&file, path, err)) { return false; }
    bytes_add(b, file.data, file.size);
    unmap_file(&file);
    return true;
}

// Does not sync: the files are gone after the run.
static inline void bytes_write(const Bytes* b, const char* path) {
    FILE* f = fopen(path, "wb");
    if (!f || (b->size > 0 && fwrite(b->data, 1, b->size, f) != b->size) || fclose(f) != 0) {
        die("%s: cannot write: %s", path, strerror(errno));
    }
}

// Finds the text in b from `at` on; returns b->size if it is not there.
static inline size_t bytes_find(const Bytes* b, size_t at, const char* text) {
    size_t n = strlen(text);
    const uint8_t* p = at < b->size ? (const uint8_t*)memmem(b->data + at, b->size - at, text, n) : NULL;
    return p ? (size_t)(p - b->data) : b->size;
}

// ---- any file -----------------------------------------------------------------------

// Changes some bytes without regard to what they mean.
static inline void mutate_bytes(Mutator* m, Bytes* b) {
    uint8_t random[64];
    size_t at = below(m, b->size + 1), left = b->size - at, n = 1 + below(m, chance(m, 50) ? 8 : 600);
    if (n > left) { n = left; }
    size_t kind = below(m, 8), few = 1 + below(m, sizeof(random));
    for (size_t i = 0; i < sizeof(random); i++) { random[i] = (uint8_t)draw(m); }
    switch (kind) {
    case 0:
        for (size_t i = 0; i < 1 + few / 8 && b->size > 0; i++) {
            b->data[below(m, b->size)] ^= (uint8_t)(1u << below(m, 8));
        }
        note(m, "%zu bits flipped", 1 + few / 8);
        return;
    case 1:
        note(m, "cut off at byte %zu of %zu", at, b->size);
        return bytes_resize(b, at);
    case 2:
        note(m, "%zu random bytes appended", few);
        return bytes_add(b, random, few);
    case 3:
        note(m, "%zu random bytes inserted at %zu", few, at);
        return bytes_splice(b, at, 0, random, few);
    case 4: {
        Bytes copy = {0};
        bytes_add(&copy, b->data + at, n);
        bytes_splice(b, below(m, b->size + 1), 0, copy.data, n);
        note(m, "%zu bytes at %zu duplicated elsewhere", n, at);
        return bytes_free(&copy);
    }
    case 5:
        note(m, "%zu bytes removed at %zu", n, at);
        return bytes_splice(b, at, n, NULL, 0);
    case 6:
        note(m, "%zu bytes at %zu set to 0", n, at);
        return bytes_splice(b, at, n, NULL, n);
    default:
        n = few < left ? few : left;
        note(m, "%zu bytes at %zu overwritten", n, at);
        return bytes_splice(b, at, n, random, n);
    }
}

// Text with characters that are rare, odd or not allowed.
static inline void put_odd_text(Mutator* m, Bytes* b) {
    static const char* const texts[] = {"",
                                        " ",
                                        "\xff\xfe",
                                        "\xc3",
                                        "\xed\xa0\x80",
                                        "\x1b[2J",
                                        "\xc2\x9b",
                                        "\xe2\x80\xae",
                                        "\xf0\x9f\x98\x80",
                                        "../../x",
                                        "/dev/zero",
                                        "%s%n",
                                        "F64",
                                        "BF16",
                                        "nan",
                                        "inf",
                                        "\xc4\xa0",
                                        "<|endoftext|>",
                                        "-1",
                                        "a/b",
                                        "\r\n",
                                        "\xef\xbb\xbf",
                                        "'s",
                                        "\xe3\x80\x80",
                                        "\xcc\x81"};
    static const size_t lengths[] = {31, 64, 255, 256, 300, 4096, 5000, 70000};
    if (chance(m, 75)) { return bytes_text(b, PICK(m, texts)); }
    size_t n = PICK(m, lengths), at = b->size;
    const char* unit = chance(m, 50) ? "a" : PICK(m, texts);
    while (unit[0] && b->size - at < n) { bytes_text(b, unit); }
}

// ---- JSON -----------------------------------------------------------------------------

// A value in a JSON text.
typedef struct {
    size_t key;        // offset of the quote before the member's name; begin, if it is not a member of an object
    size_t begin, end; // offsets of the value
    int depth;         // 0 for the root
    char first;        // its first character, which tells its type
} JsonSpan;

typedef struct {
    JsonSpan* items;
    size_t count, capacity;
} JsonSpans;

static inline size_t span_skip(const Bytes* b, size_t at) {
    while (at < b->size && strchr(" \t\r\n", b->data[at]) && b->data[at]) { at++; }
    return at;
}

// Returns the offset after the string that begins at `at`, or b->size if it does not end.
static inline size_t span_string(const Bytes* b, size_t at) {
    for (at++; at < b->size && b->data[at] != '"'; at++) { at += b->data[at] == '\\'; }
    return at < b->size ? at + 1 : b->size;
}

// Adds the value at `at` and all values in it. Tolerates what json.h would refuse, as long as brackets and quotes are
// balanced. Returns the offset after the value; 0 if there is none.
static inline size_t span_value(JsonSpans* spans, const Bytes* b, size_t at, size_t key, int depth) {
    at = span_skip(b, at);
    if (at >= b->size || depth > 200 || strchr(",:]}", b->data[at])) { return 0; }
    if (spans->count == spans->capacity) {
        spans->capacity = 2 * spans->capacity + 256;
        spans->items = (JsonSpan*)realloc_check(spans->items, spans->capacity * sizeof(JsonSpan));
    }
    size_t index = spans->count++;
    JsonSpan span = {key == SIZE_MAX ? at : key, at, at, depth, (char)b->data[at]};
    if (span.first == '"') {
        at = span_string(b, at);
    } else if (span.first == '{' || span.first == '[') {
        char close = span.first == '{' ? '}' : ']';
        at = span_skip(b, at + 1);
        while (at < b->size && b->data[at] != close) {
            size_t name = span.first == '{' ? at : SIZE_MAX;
            if (name != SIZE_MAX) {
                if (b->data[at] != '"') { return 0; }
                at = span_skip(b, span_string(b, at));
                if (at >= b->size || b->data[at] != ':') { return 0; }
                at++;
            }
            at = span_value(spans, b, at, name, depth + 1);
            if (at == 0) { return 0; }
            at = span_skip(b, at);
            if (at < b->size && b->data[at] == ',') { at = span_skip(b, at + 1); }
        }
        if (at >= b->size) { return 0; }
        at++;
    } else {
        while (at < b->size && !strchr(" \t\r\n,]}", b->data[at])) { at++; }
    }
    span.end = at;
    spans->items[index] = span;
    return at;
}

static inline void put_json_number(Mutator* m, Bytes* out, const char* old) {
    static const char* const edges[] = {"0",
                                        "1",
                                        "-1",
                                        "2",
                                        "3",
                                        "7",
                                        "127",
                                        "255",
                                        "256",
                                        "257",
                                        "32767",
                                        "65535",
                                        "65536",
                                        "16777217",
                                        "2147483647",
                                        "2147483648",
                                        "-2147483648",
                                        "4294967295",
                                        "4294967296",
                                        "9007199254740993",
                                        "9223372036854775807",
                                        "9223372036854775808",
                                        "-9223372036854775808",
                                        "18446744073709551615",
                                        "1e308",
                                        "1e999",
                                        "-1e308",
                                        "0.5",
                                        "-0",
                                        "-0.0",
                                        "1e-400",
                                        "1.0",
                                        "1e0",
                                        "NaN",
                                        "Infinity",
                                        "01",
                                        "1.",
                                        "+1",
                                        "0x10"};
    long long n = strtoll(old, NULL, 10);
    switch (below(m, 6)) {
    case 0:
        return bytes_printf(out, "%lld", (long long)((uint64_t)n + 1));
    case 1:
        return bytes_printf(out, "%lld", (long long)((uint64_t)n - 1));
    case 2:
        return bytes_printf(out, "%lld", (long long)((uint64_t)n * 2));
    case 3:
        return bytes_printf(out, "%lld", (long long)(n / 2));
    default:
        return bytes_text(out, PICK(m, edges));
    }
}

static inline void put_json_string(Mutator* m, Bytes* out) {
    static const char* const escapes[] = {"\\u0000",        "\\u001b[2J", "\\u009b31m", "\\u202e", "\\ud800",
                                          "\\ud83d\\ude00", "\\\\",       "\\n",        "\\q",     "\\u12"};
    bytes_text(out, "\"");
    if (chance(m, 40)) {
        bytes_text(out, PICK(m, escapes));
    } else {
        put_odd_text(m, out);
    }
    bytes_text(out, "\"");
}

static inline void put_json_nested(Mutator* m, Bytes* out) {
    static const int depths[] = {2, 100, 126, 127, 128, 129, 5000, 100000};
    int depth = PICK(m, depths);
    bool objects = chance(m, 50), closed = chance(m, 80);
    for (int i = 0; i < depth; i++) { bytes_text(out, objects ? "{\"a\":" : "["); }
    bytes_text(out, "1");
    for (int i = 0; closed && i < depth; i++) { bytes_text(out, objects ? "}" : "]"); }
}

// A new value in place of `old`, the old one.
static inline void put_json_value(Mutator* m, Bytes* out, char first, const char* old) {
    static const char* const others[] = {"null", "true", "false",     "0",       "\"\"", "[]",
                                         "{}",   "[1]",  "{\"a\":1}", "[[1],2]", ""};
    size_t kind = below(m, 100);
    if (kind < 8) { return put_json_nested(m, out); }
    if (kind < 30) { return bytes_text(out, PICK(m, others)); }
    if (first == '"' ? kind < 85 : kind < 40) { return put_json_string(m, out); }
    put_json_number(m, out, old);
}

// Adds a member that means something in one of our formats at the beginning of the object at `at`.
static inline void put_json_member(Mutator* m, Bytes* b, size_t at) {
    static const char* const members[] = {"\"pruned_heads\":{\"0\":[1]}",
                                          "\"quantization_config\":{\"bits\":4}",
                                          "\"n_inner\":64",
                                          "\"n_inner\":32",
                                          "\"scale_attn_by_inverse_layer_idx\":true",
                                          "\"reorder_and_upcast_attn\":true",
                                          "\"n_ctx\":16",
                                          "\"tie_word_embeddings\":false",
                                          "\"activation_function\":\"relu\"",
                                          "\"layer_norm_epsilon\":1e-6",
                                          "\"architectures\":[\"GPT2Model\"]",
                                          "\"torch_dtype\":\"float16\"",
                                          "\"version\":2",
                                          "\"step\":1",
                                          "\"loader_position\":16",
                                          "\"dropout\":0.1",
                                          "\"byte_fallback\":true",
                                          "\"normalizer\":{\"type\":\"NFC\"}",
                                          "\"type\":\"WordPiece\"",
                                          "\"add_prefix_space\":true",
                                          "\"use_regex\":false",
                                          "\"<|endoftext|>\":0",
                                          "\"zz\":272",
                                          "\"text\":\"again\"",
                                          "\"label\":4",
                                          "\"__metadata__\":{}",
                                          "\"dtype\":\"F16\"",
                                          "\"shape\":[1,2,3,4,5,6,7,8,9]",
                                          "\"\":null"};
    Bytes member = {0};
    bytes_text(&member, PICK(m, members));
    size_t next = span_skip(b, at + 1);
    if (next < b->size && b->data[next] != '}') { bytes_text(&member, ","); }
    note(m, "JSON: added %.*s", (int)member.size, member.data);
    bytes_splice(b, at + 1, 0, member.data, member.size);
    bytes_free(&member);
}

// Removes the value with its name and one of the commas beside it.
static inline void span_remove(Bytes* b, const JsonSpan* span) {
    size_t begin = span->key, end = span->end, after = span_skip(b, end);
    if (after < b->size && b->data[after] == ',') {
        end = after + 1;
    } else {
        while (begin > 0 && b->data[begin - 1] != ',' && !strchr("[{", b->data[begin - 1])) { begin--; }
        if (begin > 0 && b->data[begin - 1] == ',') { begin--; }
    }
    bytes_splice(b, begin, end - begin, NULL, 0);
}

// Copies the value `span` with its name behind itself, with a comma. If it is a member, one in two copies gets a new name; an
// element of a list may become several hundred, more than a list of fixed size has room for.
static inline void span_duplicate(Mutator* m, Bytes* b, const JsonSpan* span) {
    Bytes copy = {0};
    bool member = span->key < span->begin;
    size_t length = span->end - span->key, times = !member && chance(m, 40) ? 1 + below(m, 400) : 1;
    for (size_t i = 0; i < times && copy.size < MUTATE_MAX_BYTES / 4; i++) {
        bytes_text(&copy, ",");
        bytes_add(&copy, b->data + span->key, length);
    }
    if (member && chance(m, 50)) { bytes_splice(&copy, 2, 0, "x", 1); }
    bytes_splice(b, span->end, 0, copy.data, copy.size);
    bytes_free(&copy);
}

// Copies bytes begin .. end - 1 of b to out (size bytes) as a string, shortened if necessary.
static inline void span_copy(char* out, size_t size, const Bytes* b, size_t begin, size_t end) {
    size_t n = end - begin < size ? end - begin : size - 1;
    memcpy(out, b->data + begin, n);
    out[n] = '\0';
}

// Sets a number that is a member of the root to an edge of its type: in a state.json the root has all counts and settings.
static inline bool mutate_root_number(Mutator* m, Bytes* b, const JsonSpans* spans) {
    static const char* const edges[] = {
        "9223372036854775807", "1152921504606846976", "2147483647", "-1", "0", "1", "1e308"};
    size_t start = below(m, spans->count);
    for (size_t i = 0; i < spans->count; i++) {
        const JsonSpan* span = &spans->items[(start + i) % spans->count];
        if (span->depth != 1 || span->key == span->begin || !strchr("-0123456789", span->first)) { continue; }
        const char* edge = PICK(m, edges);
        char name[64];
        span_copy(name, sizeof(name), b, span->key, span->end);
        note(m, "JSON: %s is now %s", name, edge);
        bytes_splice(b, span->begin, span->end - span->begin, edge, strlen(edge));
        return true;
    }
    return false;
}

// Edits one value of the JSON text b. Returns false, with b unchanged, if it has none.
static inline bool mutate_json(Mutator* m, Bytes* b) {
    JsonSpans spans = {0};
    if (span_value(&spans, b, 0, SIZE_MAX, 0) == 0) { return free(spans.items), false; }
    // half the time near the root: in a vocabulary almost all values are tokens
    size_t pick = below(m, spans.count);
    if (spans.items[0].first == '{' && chance(m, 10)) {
        size_t object = chance(m, 70) ? 0 : pick;
        if (spans.items[object].first != '{') { object = 0; }
        put_json_member(m, b, spans.items[object].begin);
        return free(spans.items), true;
    }
    if (chance(m, 10) && mutate_root_number(m, b, &spans)) { return free(spans.items), true; }
    bool shallow = chance(m, 50);
    for (int i = 0; shallow && i < 50 && spans.items[pick].depth > 1; i++) { pick = below(m, spans.count); }
    JsonSpan span = spans.items[pick], other = spans.items[below(m, spans.count)];
    bool member = span.key < span.begin;
    Bytes new_value = {0};
    char old[64], name[64] = "";
    size_t kind = pick == 0 ? 99 : below(m, 100);
    span_copy(old, sizeof(old), b, span.begin, span.end);
    if (member) { span_copy(name, sizeof(name), b, span.key, span.begin); }
    note(m, "JSON: %s %s%.40s",
         kind < 55   ? "replaced"
         : kind < 65 ? "removed"
         : kind < 75 ? "duplicated"
                     : "changed",
         name, old);
    if (kind < 55) {
        put_json_value(m, &new_value, span.first, old);
    } else if (kind < 65) {
        span_remove(b, &span);
    } else if (kind < 75) {
        span_duplicate(m, b, &span);
    } else if (kind < 85) {
        bytes_add(&new_value, b->data + other.begin, other.end - other.begin);
    } else if (kind < 93 && member) {
        Bytes name = {0};
        put_json_string(m, &name);
        bytes_splice(b, span.key, span_string(b, span.key) - span.key, name.data, name.size);
        bytes_free(&name);
    } else {
        static const char* const odd[] = {" ", "\n\n", ",", "]", "{}", "null", "\xef\xbb\xbf", "/* */"};
        const char* text = PICK(m, odd);
        bytes_splice(b, chance(m, 50) ? span.begin : span.end, 0, text, strlen(text));
    }
    if (kind < 55 || (kind >= 75 && kind < 85)) {
        bytes_splice(b, span.begin, span.end - span.begin, new_value.data, new_value.size);
    }
    bytes_free(&new_value);
    free(spans.items);
    return true;
}

// ---- text ------------------------------------------------------------------------------

// Returns the bounds of a random line, without its newline.
static inline void pick_line(Mutator* m, const Bytes* b, size_t* begin, size_t* end) {
    size_t at = below(m, b->size + 1);
    for (*begin = at; *begin > 0 && b->data[*begin - 1] != '\n';) { (*begin)--; }
    for (*end = at; *end < b->size && b->data[*end] != '\n';) { (*end)++; }
}

// A merge of two tokens of the file or of two that do not exist; or a chain of merges whose tokens double in length.
static inline void put_merges(Mutator* m, Bytes* out, const Bytes* b) {
    if (chance(m, 20)) {
        int links = 2 + (int)below(m, 13);
        for (int i = 0; i < links; i++) {
            for (int side = 0; side < 2; side++) {
                for (int k = 0; k < 1 << i; k++) { bytes_text(out, "x"); }
                bytes_text(out, side ? i + 1 < links ? "\n" : "" : " ");
            }
        }
        return;
    }
    for (int side = 0; side < 2; side++) {
        size_t begin, end;
        pick_line(m, b, &begin, &end);
        if (chance(m, 20)) {
            put_odd_text(m, out);
        } else if (end > begin) {
            size_t space = begin;
            while (space < end && b->data[space] != ' ') { space++; }
            bytes_add(out, b->data + begin, space - begin);
        }
        bytes_text(out, side ? "" : " ");
    }
}

// Edits lines. jsonl: a line is a JSON text. merges: a line is a merge.
static inline void mutate_text(Mutator* m, Bytes* b, bool jsonl, bool merges) {
    size_t begin, end;
    Bytes line = {0}, extra = {0};
    pick_line(m, b, &begin, &end);
    bytes_add(&line, b->data ? b->data + begin : NULL, end - begin);
    if (jsonl && chance(m, 80) && mutate_json(m, &line)) {
        bytes_splice(b, begin, end - begin, line.data, line.size);
        bytes_free(&line);
        return;
    }
    size_t kind = below(m, 6);
    note(m, "text: line at %zu %s", begin, kind == 0 ? "duplicated" : kind == 1 ? "removed" : "changed");
    switch (kind) {
    case 0:
        bytes_text(&line, "\n");
        bytes_splice(b, begin, 0, line.data, line.size);
        break;
    case 1:
        bytes_splice(b, begin, end - begin + (end < b->size), NULL, 0);
        break;
    case 2:
        bytes_splice(b, end, 0, "\n", 1);
        break;
    default:
        if (merges) {
            put_merges(m, &extra, b);
            bytes_text(&extra, "\n");
            bytes_splice(b, begin, kind == 3 ? end - begin + (end < b->size) : 0, extra.data, extra.size);
        } else {
            put_odd_text(m, &extra);
            bytes_splice(b, begin + below(m, end - begin + 1), 0, extra.data, extra.size);
        }
    }
    bytes_free(&line);
    bytes_free(&extra);
}

// ---- safetensors -------------------------------------------------------------------------

enum { MUTATE_TENSORS = 512 };

typedef struct {
    char name[320];
    SafeDtype dtype;
    int num_dims;
    uint64_t shape[SAFE_MAX_DIMS];
    Bytes data;
} Tensor;

// The tensors of a file, to be changed and written again.
typedef struct {
    Tensor items[MUTATE_TENSORS];
    size_t count;
} Tensors;

static inline size_t tensor_elements(const Tensor* t) {
    size_t n = 1;
    for (int i = 0; i < t->num_dims; i++) { n *= (size_t)t->shape[i]; }
    return n;
}

// Gives the data the size that the shape and the type ask for, if that is a whole number of bytes.
static inline void tensor_fit(Tensor* t) {
    size_t bits = tensor_elements(t) * (size_t)safe_dtypes[t->dtype].bits;
    bytes_resize(&t->data, bits / 8 < MUTATE_MAX_BYTES ? bits / 8 : MUTATE_MAX_BYTES);
}

static inline void tensors_free(Tensors* list) {
    for (size_t i = 0; i < list->count; i++) { bytes_free(&list->items[i].data); }
    free(list);
}

// Returns NULL if b is not a valid safetensors file.
static inline Tensors* tensors_parse(const Bytes* b) {
    SafeTensors st;
    if (!safetensors_parse(&st, b->data, b->size, "mutate", NULL)) { return NULL; }
    Tensors* list = (Tensors*)calloc_check(1, sizeof(Tensors));
    for (size_t i = 0; i < st.num_tensors && i < MUTATE_TENSORS / 2; i++) {
        const SafeTensor* from = &st.tensors[i];
        Tensor* t = &list->items[list->count++];
        snprintf(t->name, sizeof(t->name), "%s", from->name);
        t->dtype = from->dtype;
        t->num_dims = from->num_dims;
        memcpy(t->shape, from->shape, sizeof(t->shape));
        bytes_add(&t->data, from->data, from->bytes);
    }
    safetensors_close(&st);
    return list;
}

// Writes the tensors first .. last - 1 as a safetensors file. Names are written as they are, so they may be invalid.
static inline void tensors_format(const Tensors* list, size_t first, size_t last, const char* metadata, Bytes* out) {
    Bytes header = {0};
    size_t at = 0;
    bytes_printf(&header, "{%s", metadata);
    for (size_t i = first; i < last; i++) {
        const Tensor* t = &list->items[i];
        bytes_text(&header, i > first || metadata[0] ? ",\"" : "\"");
        bytes_text(&header, t->name);
        bytes_printf(&header, "\":{\"dtype\":\"%s\",\"shape\":[", safe_dtypes[t->dtype].name);
        for (int d = 0; d < t->num_dims; d++) {
            bytes_printf(&header, "%s%llu", d ? "," : "", (unsigned long long)t->shape[d]);
        }
        bytes_printf(&header, "],\"data_offsets\":[%zu,%zu]}", at, at + t->data.size);
        at += t->data.size;
    }
    bytes_text(&header, "}");
    while (header.size % 8) { bytes_text(&header, " "); }
    uint64_t size = header.size;
    bytes_resize(out, 0);
    bytes_add(out, &size, 8);
    bytes_add(out, header.data, header.size);
    for (size_t i = first; i < last; i++) { bytes_add(out, list->items[i].data.data, list->items[i].data.size); }
    bytes_free(&header);
}

static inline void mutate_values(Mutator* m, Tensor* t) {
    static const uint32_t edges[] = {0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001,
                                     0x00000000, 0x80000000, 0x501502F9, 0x7F810000, 0xFFFFFFFF};
    uint32_t edge = PICK(m, edges);
    bool all = chance(m, 15), half = t->dtype == SAFE_BF16;
    size_t step = half ? 2 : 4, n = t->data.size / step, count = all ? n : 1 + below(m, 4);
    for (size_t i = 0; i < count && n > 0; i++) {
        uint16_t high = (uint16_t)(edge >> 16);
        memcpy(t->data.data + step * (all ? i : below(m, n)), half ? (const void*)&high : (const void*)&edge, step);
    }
    note(m, "%s: %zu values set to %08x", t->name, count, edge);
}

static inline void mutate_shape(Mutator* m, Tensor* t) {
    int d = (int)below(m, (size_t)(t->num_dims ? t->num_dims : 1));
    uint64_t old = t->num_dims ? t->shape[d] : 1;
    const uint64_t dims[] = {0, 1, old + 1, old - 1, old * 2, old / 2};
    switch (below(m, 4)) {
    case 0: // the same elements in another shape
        if (t->num_dims == 2) {
            uint64_t swap = t->shape[0];
            t->shape[0] = t->shape[1];
            t->shape[1] = swap;
        }
        break;
    case 1:
        if (t->num_dims < SAFE_MAX_DIMS) { t->shape[t->num_dims++] = 1; }
        break;
    case 2:
        t->shape[0] = tensor_elements(t);
        t->num_dims = 1;
        break;
    default:
        if (t->num_dims) { t->shape[d] = PICK(m, dims); }
        tensor_fit(t);
    }
    char text[128];
    note(m, "%s: shape is now %s", t->name, safe_shape_text(text, sizeof(text), t->shape, t->num_dims));
}

static inline void mutate_dtype(Mutator* m, Tensor* t) {
    static const SafeDtype common[] = {SAFE_F32, SAFE_F16, SAFE_BF16, SAFE_F64, SAFE_I64, SAFE_U8};
    SafeDtype old = t->dtype;
    t->dtype = chance(m, 60) ? PICK(m, common) : (SafeDtype)below(m, SAFE_NUM_DTYPES);
    if (old == SAFE_F32 && t->dtype == SAFE_BF16) { // the same values, rounded toward zero
        for (size_t i = 0; i + 4 <= t->data.size; i += 4) { memcpy(t->data.data + i / 2, t->data.data + i + 2, 2); }
    }
    tensor_fit(t);
    note(m, "%s: type is now %s", t->name, safe_dtypes[t->dtype].name);
}

// Adds a tensor that other programs write beside the model's, or one that does not belong there.
static inline void mutate_add_tensor(Mutator* m, Tensors* list, const Tensor* from) {
    static const char* const names[] = {"lm_head.weight",
                                        "h.0.attn.bias",
                                        "h.0.attn.masked_bias",
                                        "h.99.ln_1.weight",
                                        "extra",
                                        "transformer.wte.weight",
                                        "wte.weight",
                                        "m.wte.weight",
                                        "h.00.ln_1.weight",
                                        "h.-1.ln_1.weight",
                                        "h.18446744073709551616.ln_1.weight",
                                        "transformer.h.0.attn.bias"};
    if (list->count >= MUTATE_TENSORS) { return; }
    const char* name = PICK(m, names);
    for (size_t i = 0; i < list->count && strcmp(name, "lm_head.weight") == 0; i++) {
        size_t n = strlen(list->items[i].name);
        if (n >= 10 && strcmp(list->items[i].name + n - 10, "wte.weight") == 0) { from = &list->items[i]; }
    }
    Tensor* t = &list->items[list->count++];
    *t = *from;
    snprintf(t->name, sizeof(t->name), "%s", name);
    memset(&t->data, 0, sizeof(t->data));
    bytes_add(&t->data, from->data.data, from->data.size);
    note(m, "tensor %s added, a copy of %s", t->name, from->name);
    if (chance(m, 40)) { mutate_values(m, t); }
}

static inline void mutate_names(Mutator* m, Tensors* list, Tensor* t) {
    static const char prefix[] = "transformer.";
    enum { PREFIX = sizeof(prefix) - 1 };
    if (chance(m, 40)) { // all of them, with the other of the two prefixes that are in use
        note(m, "prefix transformer. added or removed");
        for (size_t i = 0; i < list->count; i++) {
            char name[sizeof(t->name)];
            bool has = strncmp(list->items[i].name, prefix, PREFIX) == 0;
            snprintf(name, sizeof(name), "%s%.300s", has ? "" : prefix, list->items[i].name + (has ? (int)PREFIX : 0));
            memcpy(list->items[i].name, name, sizeof(name));
        }
        return;
    }
    Bytes name = {0};
    put_odd_text(m, &name);
    note(m, "%s renamed", t->name);
    snprintf(t->name, sizeof(t->name), "%.*s", (int)(name.size < 300 ? name.size : 300),
             name.data ? (char*)name.data : "");
    bytes_free(&name);
}

// Changes tensors and writes the file again with a header that fits. Returns false if b is not a valid file.
static inline bool mutate_tensors(Mutator* m, Bytes* b) {
    static const char* const metadata[] = {"\"__metadata__\":{\"format\":\"pt\"}", "", "\"__metadata__\":{}",
                                           "\"__metadata__\":{\"format\":1}", "\"__metadata__\":null"};
    Tensors* list = tensors_parse(b);
    if (!list || list->count == 0) { return list ? (tensors_free(list), false) : false; }
    for (size_t i = 0, edits = 1 + below(m, 2); i < edits && list->count > 0; i++) {
        Tensor *t = &list->items[below(m, list->count)], *other = &list->items[below(m, list->count)], swap;
        size_t kind = below(m, 100);
        if (kind < 30) {
            mutate_values(m, t);
        } else if (kind < 45) {
            mutate_shape(m, t);
        } else if (kind < 60) {
            mutate_dtype(m, t);
        } else if (kind < 75) {
            mutate_add_tensor(m, list, t);
        } else if (kind < 85) {
            mutate_names(m, list, t);
        } else {
            swap = *t, *t = *other, *other = swap;
            note(m, "tensors %s and %s change places", other->name, t->name);
            if (kind >= 93) {
                bytes_free(&list->items[--list->count].data);
                note(m, "tensor %s removed", list->items[list->count].name);
            }
        }
    }
    tensors_format(list, 0, list->count, chance(m, 85) ? metadata[0] : PICK(m, metadata), b);
    tensors_free(list);
    return true;
}

// Edits the header as JSON; the length before it is corrected, most of the time.
static inline bool mutate_safetensors_header(Mutator* m, Bytes* b) {
    Bytes header = {0};
    uint64_t size = 0;
    if (b->size < 8) { return false; }
    memcpy(&size, b->data, 8);
    if (size > b->size - 8) { return false; }
    bytes_add(&header, b->data + 8, (size_t)size);
    bool ok = mutate_json(m, &header);
    if (ok) {
        bytes_splice(b, 8, (size_t)size, header.data, header.size);
        size = chance(m, 90) ? header.size : size;
        memcpy(b->data, &size, 8);
    }
    bytes_free(&header);
    return ok;
}

// ---- llm.c's .bin files ---------------------------------------------------------------------

enum { BIN_WORDS = 256 };

// Sets words of the header. For a model or a shard, the body gets the size that the header asks for, half of the time.
static inline void mutate_bin_header(Mutator* m, Bytes* b) {
    static const int32_t edges[] = {0,       1,       -1,        2,         3,        5,        7,        127,
                                    128,     255,     256,       257,       384,      4096,     65535,    65536,
                                    1 << 20, 1 << 30, INT32_MAX, INT32_MIN, 20240326, 20240520, 20240801, 20240522};
    int32_t h[BIN_WORDS];
    memcpy(h, b->data, sizeof(h));
    int32_t magic = h[0];
    size_t word = chance(m, 92) ? below(m, 9) : below(m, BIN_WORDS);
    int32_t by_little = (int32_t)((uint32_t)h[word] + (uint32_t)(1 - 2 * (int)below(m, 2)));
    h[word] = chance(m, 50) ? by_little : PICK(m, edges);
    note(m, ".bin: word %zu is now %d", word, h[word]);
    memcpy(b->data, h, sizeof(h));
    if (chance(m, 50)) { return; }
    GPT2Config c = {h[2], h[3], h[7], h[4], h[5], h[6], 0, 0.0f, 0, 0, 0, 0};
    gpt2_defaults(&c);
    size_t body = 0;
    if (magic == SHARD_MAGIC) { body = (size_t)(h[2] > 0 ? h[2] : 0) * 2; }
    if (magic == LLMC_MODEL_MAGIC && config_check(&c, "", NULL)) { body = num_parameters(&c) * (h[1] == 5 ? 2 : 4); }
    if (body > 0 && body < MUTATE_MAX_BYTES) {
        bytes_resize(b, sizeof(h) + body);
        note(m, ".bin: its body now has %zu bytes", body);
    }
}

static inline void mutate_bin(Mutator* m, Bytes* b) {
    static const uint16_t ids[] = {0, 1, 255, 256, 257, 32767, 32768, 50256, 50257, 65534, 65535, 0x7F80, 0x7FC0};
    if (b->size < BIN_WORDS * 4) { return mutate_bytes(m, b); }
    if (chance(m, 60)) { return mutate_bin_header(m, b); }
    size_t halves = (b->size - BIN_WORDS * 4) / 2, count = 1 + below(m, 6);
    for (size_t i = 0; i < count && halves > 0; i++) {
        uint16_t id = PICK(m, ids);
        size_t at = chance(m, 30) ? below(m, halves < 40 ? halves : 40) : below(m, halves);
        memcpy(b->data + BIN_WORDS * 4 + 2 * at, &id, 2);
    }
    note(m, ".bin: %zu ids or halves of the body changed", count);
}

// ---- a file by its name ------------------------------------------------------------------------

static inline bool ends_with(const char* s, const char* end) {
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

// Changes the contents b of the file `path` once, in the way that suits its format.
static inline void mutate_contents(Mutator* m, const char* path, Bytes* b) {
    bool done = false;
    if (chance(m, 88)) {
        if (ends_with(path, ".json")) {
            done = mutate_json(m, b);
        } else if (ends_with(path, ".safetensors")) {
            done = chance(m, 65) ? mutate_tensors(m, b) : mutate_safetensors_header(m, b);
        } else if (ends_with(path, ".bin")) {
            mutate_bin(m, b);
            done = true;
        } else {
            mutate_text(m, b, ends_with(path, ".jsonl"), ends_with(path, "merges.txt") || ends_with(path, ".bpe"));
            done = true;
        }
    }
    if (!done) { mutate_bytes(m, b); }
    if (b->size > MUTATE_MAX_BYTES) { bytes_resize(b, MUTATE_MAX_BYTES); }
}

// Replaces the whole file by something else that a user may have in its place.
static inline void mutate_file(Mutator* m, const char* path) {
    static const char* const contents[] = {"",
                                           "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
                                           "<!DOCTYPE html><html><body>404</body></html>\n",
                                           "GGUF\3",
                                           "PK\3\4",
                                           "\x80\2}q",
                                           "{}",
                                           "[]",
                                           "null",
                                           "\n"};
    size_t kind = below(m, 8);
    bool text = strstr(path, "text/") != NULL; // a FIFO is a valid source of text: tokenize waits for its writer
    if (unlink(path) != 0) { die("%s: cannot remove: %s", path, strerror(errno)); }
    int failed = 0;
    if (kind == 0) {
        failed = mkdir(path, 0777);
    } else if (kind == 1) {
        failed = symlink(path, path); // a loop
    } else if (kind == 2) {
        failed = symlink("nowhere", path);
    } else if (kind == 3 && !text) {
        failed = mkfifo(path, 0666);
    } else if (kind < 7) {
        Bytes b = {0};
        bytes_text(&b, PICK(m, contents));
        bytes_write(&b, path);
        bytes_free(&b);
    }
    if (failed) { die("%s: cannot replace: %s", path, strerror(errno)); }
    static const char* const names[] = {
        "a directory",          "a link to itself",     "a dangling link",      "a FIFO or nothing",
        "another kind of file", "another kind of file", "another kind of file", "nothing"};
    note(m, "replaced by %s", names[kind]);
}

// ---- checkpoints --------------------------------------------------------------------------------

// Computes the sizes and checksums in dir/state.json again, so that a change of the checkpoint is not noticed by them. What
// state.json does not list in the form that run_write_state() gives it is left as it is.
static inline void mend_checksums(const char* dir, bool files_too) {
    Path path;
    char name[64], sum[64];
    Bytes b;
    if (!run_path(&path, dir, "state.json", NULL) || !bytes_read(&b, path.text, NULL)) { return; }
    static const char before[] = "{\"name\": \"", bytes_mark[] = "\", \"bytes\": ", sum_mark[] = ", \"crc32c\": \"";
    for (size_t at = bytes_find(&b, 0, before); files_too && at < b.size; at = bytes_find(&b, at + 1, before)) {
        size_t begin = at + strlen(before), end = bytes_find(&b, begin, bytes_mark);
        size_t number = end + strlen(bytes_mark), mark = bytes_find(&b, number, sum_mark);
        size_t digits = mark + strlen(sum_mark);
        uint64_t bytes = 0;
        uint32_t crc = 0;
        if (end >= b.size || end - begin >= sizeof(name) || mark >= b.size || mark - number > 20 ||
            digits + 8 > b.size) {
            continue;
        }
        snprintf(name, sizeof(name), "%.*s", (int)(end - begin), b.data + begin);
        Path file;
        struct stat st;
        if (strchr(name, '/') || !run_path(&file, dir, name, NULL) || stat(file.text, &st) != 0 ||
            !S_ISREG(st.st_mode) || !run_sum_file(file.text, &bytes, &crc, NULL)) {
            continue;
        }
        snprintf(sum, sizeof(sum), "%08x", crc);
        memcpy(b.data + digits, sum, 8);
        snprintf(sum, sizeof(sum), "%llu", (unsigned long long)bytes);
        bytes_splice(&b, number, mark - number, sum, strlen(sum));
    }
    size_t last = b.size > RUN_SUM_BYTES ? b.size - RUN_SUM_BYTES : 0;
    if (bytes_find(&b, last, "  \"state_crc32c\": \"") == last && last > 0) {
        snprintf(sum, sizeof(sum), RUN_SUM_LINE, crc32c(0, b.data, last));
        bytes_splice(&b, last, RUN_SUM_BYTES, sum, RUN_SUM_BYTES);
    }
    bytes_write(&b, path.text);
    bytes_free(&b);
}

#endif
