/*
A strict JSON reader (RFC 8259) for config.json, vocab.json, tokenizer.json, state.json and the header of safetensors
files, and string escaping for the JSON that we write.

The reader refuses, naming the byte offset: trailing text, duplicate keys, invalid UTF-8, control characters in strings,
lone surrogates, malformed numbers, numbers too large for a double, more than JSON_MAX_DEPTH levels or JSON_MAX_VALUES
values. It passes over a byte order mark at the start. For data of others, json_parse_lenient() accepts and counts some of
what json_parse() refuses.

    JsonDoc doc;
    if (!json_parse(&doc, text, n, "config.json", &err)) { return false; }
    const JsonValue* v = json_get(doc.root, "n_embd");
    for (size_t i = 0; i < doc.root->count; i++) { puts(doc.root->items[i].key); }
    json_free(&doc);
*/
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "utils.h"
#include <math.h>

enum {
    JSON_MAX_VALUES = 8 << 20, // a value takes 64 bytes: 512 MB in all
    JSON_MAX_DEPTH = 128,      // limits the recursion of the parser, and so its stack
    JSON_MAX_NUMBER = 511,     // characters per number
    JSON_BLOCK = 64 << 10,     // bytes per block of the arena
    JSON_SMALL_OBJECT = 8      // up to this many members, a linear scan of the keys is faster than a hash table
};

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

// Kept to 64 bytes: a vocabulary has 50,257 values, and most of the parsing time is spent on first touching their
// pages.
typedef struct JsonValue {
    JsonType type;
    bool boolean;                  // JSON_BOOL
    bool is_int;                   // JSON_NUMBER: written without fraction and exponent, and fits an int64
    double number;                 // JSON_NUMBER
    int64_t integer;               // JSON_NUMBER with is_int: exact
    const char* string;            // JSON_STRING: UTF-8, NUL-terminated; may also contain NULs
    const char* key;               // the member's name, if this value is a member of an object; else NULL
    const struct JsonValue* items; // JSON_ARRAY, JSON_OBJECT: (count) elements or members, in the order of the text
    uint32_t count;
    uint32_t length;     // JSON_STRING: length of string in bytes
    uint32_t key_length; // length of key in bytes
    uint32_t offset;     // byte offset in the text of the key if there is one, else of the value
} JsonValue;

typedef struct JsonBlock {
    struct JsonBlock* next; // the block's memory follows this header
} JsonBlock;

typedef struct {
    const JsonValue* root;
    char* strings;     // all strings and keys, decoded
    JsonBlock* blocks; // arena that holds all arrays of items
} JsonDoc;

// Counts what json_parse_lenient() accepts.
typedef struct {
    int64_t surrogates; // lone ones: U+FFFD stands for each
    int64_t numbers;    // NaN, Infinity, numbers that are too large or too long: NaN stands for each
    int64_t duplicates; // repeated keys: the last of them counts
} JsonOdd;

static inline void json_odd_add(JsonOdd* sum, const JsonOdd* odd) {
    sum->surrogates += odd->surrogates;
    sum->numbers += odd->numbers;
    sum->duplicates += odd->duplicates;
}

typedef struct {
    JsonDoc* doc;
    const uint8_t* text;
    size_t n, pos;
    const char* where;
    JsonOdd* odd; // NULL: strict
    Error* err;
    size_t strings_used;           // bytes used of doc->strings
    size_t block_used, block_size; // bytes of the first block of doc->blocks
    JsonValue* stack;              // items of the containers that are still being parsed
    size_t stack_used, stack_size;
    int depth;
    size_t num_values; // parsed so far
} JsonParser;

// ---- text ------------------------------------------------------------------------

// Returns the length of the UTF-8 sequence at p, or 0 if the n bytes do not begin with a valid one. Source: Unicode 15,
// table 3-7.
static inline int json_utf8_length(const uint8_t* p, size_t n) {
    if (n == 0) { return 0; }
    if (p[0] < 0x80) { return 1; }
    int len = p[0] >= 0xC2 && p[0] <= 0xDF ? 2 : (p[0] & 0xF0) == 0xE0 ? 3 : p[0] >= 0xF0 && p[0] <= 0xF4 ? 4 : 0;
    if (len == 0 || n < (size_t)len) { return 0; }
    for (int i = 1; i < len; i++) {
        if ((p[i] & 0xC0) != 0x80) { return 0; }
    }
    bool overlong = (p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xF0 && p[1] < 0x90);
    bool surrogate = p[0] == 0xED && p[1] >= 0xA0;
    bool too_large = p[0] == 0xF4 && p[1] >= 0x90;
    return overlong || surrogate || too_large ? 0 : len;
}

// Copies a string of n bytes to out (size bytes, at least 8) for a one-line message: control characters and invalid
// bytes become \xNN, and a string that is too long ends in "...". Returns out.
static inline const char* json_printable(char* out, size_t size, const char* s, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        int len = json_utf8_length((const uint8_t*)s + i, n - i);
        bool plain = len > 1 || (len == 1 && (uint8_t)s[i] >= 0x20 && s[i] != 0x7F);
        size_t need = plain ? (size_t)len : 4;
        if (used + need + 4 > size) { // room for "..." and the NUL
            memcpy(out + used, "...", 3);
            used += 3;
            break;
        }
        if (plain) {
            memcpy(out + used, s + i, need);
        } else {
            snprintf(out + used, 5, "\\x%02x", (uint8_t)s[i]);
        }
        used += need;
        i += plain ? need : 1;
    }
    out[used] = '\0';
    return out;
}

PRINTF_LIKE(3, 4) static inline bool json_fail(JsonParser* p, size_t offset, const char* fmt, ...) {
    char reason[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(reason, sizeof(reason), fmt, args);
    va_end(args);
    return error_set(p->err, "%s: not valid JSON at byte %zu: %s", p->where, offset, reason);
}

// describes the character at the parser's position for messages; buf has 16 bytes
static inline const char* json_here(const JsonParser* p, char* buf) {
    if (p->pos >= p->n) { return "the end of the text"; }
    uint8_t c = p->text[p->pos];
    snprintf(buf, 16, c > 0x20 && c < 0x7F ? "'%c'" : "byte 0x%02x", c);
    return buf;
}

static inline bool json_unexpected(JsonParser* p, const char* wanted) {
    char here[16];
    return json_fail(p, p->pos, "%s expected, found %s", wanted, json_here(p, here));
}

static inline void json_skip_space(JsonParser* p) {
    while (p->pos < p->n) {
        uint8_t c = p->text[p->pos];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') { break; }
        p->pos++;
    }
}

// ---- scalars -----------------------------------------------------------------------

// Returns the value of the four hexadecimal digits at offset, or -1 if they are not there.
static inline int json_hex4(const JsonParser* p, size_t offset) {
    if (p->n - offset < 4) { return -1; }
    int value = 0;
    for (size_t i = offset; i < offset + 4; i++) {
        uint8_t c = p->text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) { return -1; }
        value = value * 16 + digit;
    }
    return value;
}

static inline int json_utf8_encode(char* out, uint32_t code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    int len = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = len - 1; i > 0; i--, code >>= 6) { out[i] = (char)(0x80 | (code & 0x3F)); }
    out[0] = (char)((0xF00 >> len & 0xFF) | code); // 110xxxxx, 1110xxxx, 11110xxx
    return len;
}

// Parses the escape whose backslash is at p->pos. Writes its UTF-8 bytes to *out and advances *out.
static inline bool json_parse_escape(JsonParser* p, char** out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    size_t start = p->pos++;
    uint8_t c = p->pos < p->n ? p->text[p->pos] : 0;
    const char* name = c ? strchr(names, c) : NULL;
    if (name) {
        *(*out)++ = values[name - names];
        p->pos++;
        return true;
    }
    if (c != 'u') { return json_fail(p, start, "not a JSON escape"); }
    int code = json_hex4(p, p->pos + 1);
    if (code < 0) { return json_fail(p, start, "\\u wants four hexadecimal digits"); }
    p->pos += 5;
    if (code >= 0xD800 && code <= 0xDFFF) {
        bool high = code <= 0xDBFF,
             escape = p->n - p->pos >= 6 && p->text[p->pos] == '\\' && p->text[p->pos + 1] == 'u';
        int low = high && escape ? json_hex4(p, p->pos + 2) : -1;
        if (low >= 0xDC00 && low <= 0xDFFF) {
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            p->pos += 6;
        } else if (p->odd) {
            code = 0xFFFD;
            p->odd->surrogates++;
        } else {
            return json_fail(p, start, "a lone %s surrogate", high ? "high" : "low");
        }
    }
    *out += json_utf8_encode(*out, (uint32_t)code);
    return true;
}

// Parses the string whose opening quote is at p->pos. doc->strings is large enough: a decoded string is never longer
// than its text, and the two quotes make room for the NUL.
static inline bool json_parse_string(JsonParser* p, const char** string, uint32_t* length) {
    char *begin = p->doc->strings + p->strings_used, *out = begin;
    size_t start = p->pos++;
    for (;;) {
        if (p->pos >= p->n) { return json_fail(p, start, "an unterminated string"); }
        uint8_t c = p->text[p->pos];
        if (c == '"') { break; }
        if (c == '\\') {
            if (!json_parse_escape(p, &out)) { return false; }
        } else if (c < 0x20) {
            return json_fail(p, p->pos, "control character 0x%02x in a string; write it as an escape", c);
        } else if (c < 0x80) {
            *out++ = (char)c;
            p->pos++;
        } else {
            int len = json_utf8_length(p->text + p->pos, p->n - p->pos);
            if (len == 0) { return json_fail(p, p->pos, "invalid UTF-8 (byte 0x%02x)", c); }
            memcpy(out, p->text + p->pos, (size_t)len);
            out += len;
            p->pos += (size_t)len;
        }
    }
    p->pos++;
    *out++ = '\0';
    *string = begin;
    *length = (uint32_t)(out - begin) - 1;
    p->strings_used += (size_t)(out - begin);
    return true;
}

static inline size_t json_digits(const JsonParser* p, size_t pos) {
    size_t start = pos;
    while (pos < p->n && p->text[pos] >= '0' && p->text[pos] <= '9') { pos++; }
    return pos - start;
}

// Lets NaN stand for the number that ends at pos.
static inline bool json_odd_number(JsonParser* p, JsonValue* v, size_t pos) {
    v->type = JSON_NUMBER;
    v->is_int = false;
    v->integer = 0;
    v->number = NAN;
    p->pos = pos;
    p->odd->numbers++;
    return true;
}

// Parses number = [ "-" ] int [ frac ] [ exp ]. strtod depends on the locale, but our programs never call setlocale.
static inline bool json_parse_number(JsonParser* p, JsonValue* v) {
    size_t start = p->pos, pos = start + (p->text[start] == '-');
    bool negative = pos > start, integral = true;
    size_t first = pos, digits = json_digits(p, pos);
    if (p->odd && p->n - pos >= 8 && memcmp(p->text + pos, "Infinity", 8) == 0) {
        return json_odd_number(p, v, pos + 8);
    }
    pos += digits;
    if (digits == 0) { return json_fail(p, start, "a digit expected after '-'"); }
    if (digits > 1 && p->text[first] == '0') { return json_fail(p, start, "a number with a leading zero"); }
    if (pos < p->n && p->text[pos] == '.') {
        size_t fraction = json_digits(p, ++pos);
        if (fraction == 0) { return json_fail(p, pos, "a digit expected after '.'"); }
        pos += fraction;
        integral = false;
    }
    if (pos < p->n && (p->text[pos] == 'e' || p->text[pos] == 'E')) {
        pos++;
        if (pos < p->n && (p->text[pos] == '+' || p->text[pos] == '-')) { pos++; }
        size_t exponent = json_digits(p, pos);
        if (exponent == 0) { return json_fail(p, pos, "a digit expected in the exponent"); }
        pos += exponent;
        integral = false;
    }
    v->type = JSON_NUMBER;
    v->is_int = integral;
    // accumulate the negated integer, because -2^63 has no positive counterpart
    for (size_t i = first; v->is_int && i < first + digits; i++) {
        v->is_int = !__builtin_mul_overflow(v->integer, (int64_t)10, &v->integer) &&
                    !__builtin_sub_overflow(v->integer, (int64_t)(p->text[i] - '0'), &v->integer);
    }
    if (v->is_int && !negative) { v->is_int = !__builtin_sub_overflow((int64_t)0, v->integer, &v->integer); }
    if (!v->is_int) { v->integer = 0; }
    p->pos = pos;
    // the conversion to double rounds to nearest, like strtod; -0 must go through strtod to keep its sign
    if (v->is_int && !(negative && v->integer == 0)) {
        v->number = (double)v->integer;
        return true;
    }
    char buf[JSON_MAX_NUMBER + 1];
    if (pos - start > JSON_MAX_NUMBER) {
        if (p->odd) { return json_odd_number(p, v, pos); }
        return json_fail(p, start, "a number of more than %d characters", (int)JSON_MAX_NUMBER);
    }
    memcpy(buf, p->text + start, pos - start);
    buf[pos - start] = '\0';
    v->number = strtod(buf, NULL);
    if (v->number > 1.7976931348623157e308 || v->number < -1.7976931348623157e308) {
        if (p->odd) { return json_odd_number(p, v, pos); }
        return json_fail(p, start, "a number too large for a double");
    }
    return true;
}

static inline bool json_parse_word(JsonParser* p, const char* word) {
    size_t len = strlen(word);
    if (p->n - p->pos < len || memcmp(p->text + p->pos, word, len) != 0) { return json_unexpected(p, "a value"); }
    p->pos += len;
    return true;
}

// ---- containers --------------------------------------------------------------------

static inline void* json_alloc(JsonParser* p, size_t bytes) {
    bytes = (bytes + 15) & ~(size_t)15;
    if (p->block_size - p->block_used < bytes) {
        p->block_size = 16 + (bytes > JSON_BLOCK ? bytes : (size_t)JSON_BLOCK);
        JsonBlock* block = (JsonBlock*)malloc_check(p->block_size);
        block->next = p->doc->blocks;
        p->doc->blocks = block;
        p->block_used = 16; // the JsonBlock header, padded to 16 bytes
    }
    void* memory = (char*)p->doc->blocks + p->block_used;
    p->block_used += bytes;
    return memory;
}

// Returns the number of slots of the hash table of an object with `count` members: a power of two, so that the table is
// at most half full; 0 for a small object, which has no table.
static inline size_t json_num_slots(size_t count) {
    size_t slots = count > JSON_SMALL_OBJECT ? 32 : 0;
    while (slots < 2 * count && slots > 0) { slots *= 2; }
    return slots;
}

// The hash table is stored behind the members. A slot contains 1 + the index into items, or 0 if it is empty.
static inline uint32_t* json_slots(const JsonValue* object) { return (uint32_t*)(object->items + object->count); }

// Hashes a key, 8 bytes at a time. The seed is the address of the members, so that a file cannot contain keys that were
// chosen to collide.
static inline size_t json_hash(const JsonValue* object, const char* key, size_t n) {
    uint64_t h = ((uint64_t)(uintptr_t)object->items * 0x9E3779B97F4A7C15u) ^ n;
    while (n > 0) {
        uint64_t word = 0;
        size_t step = n < 8 ? n : 8;
        memcpy(&word, key, step);
        h = (h ^ word) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
        key += step;
        n -= step;
    }
    return (size_t)((h * 0xD6E8FEB86659FD93u) >> 20);
}

static inline bool json_same_key(const JsonValue* member, const char* key, size_t n) {
    return member->key_length == n && memcmp(member->key, key, n) == 0;
}

static inline bool json_duplicate(JsonParser* p, const JsonValue* member) {
    char name[128];
    return json_fail(p, member->offset, "key \"%s\" occurs twice in one object",
                     json_printable(name, sizeof(name), member->key, member->key_length));
}

// Returns the index of the member that has the key of member i and stands before it, or else i itself, which is then
// put into the hash table of json_get().
static inline uint32_t json_index_member(JsonValue* object, uint32_t i) {
    const JsonValue *items = object->items, *member = &items[i];
    size_t slots = json_num_slots(object->count);
    if (slots == 0) {
        uint32_t j = 0;
        while (j < i && !json_same_key(&items[j], member->key, member->key_length)) { j++; }
        return j;
    }
    uint32_t* table = json_slots(object);
    size_t slot = json_hash(object, member->key, member->key_length) & (slots - 1);
    for (; table[slot]; slot = (slot + 1) & (slots - 1)) {
        if (json_same_key(&items[table[slot] - 1], member->key, member->key_length)) { return table[slot] - 1; }
    }
    table[slot] = i + 1;
    return i;
}

// Fills the hash table of json_get(). Fails on duplicate keys; a lenient parser keeps the last value of a key, at the place
// of the first.
static inline bool json_index(JsonParser* p, JsonValue* object) {
    JsonValue* items = (JsonValue*)object->items; // const only for the reader of the document
    for (;;) {
        size_t slots = json_num_slots(object->count);
        uint32_t kept = 0;
        if (slots) { memset(json_slots(object), 0, slots * sizeof(uint32_t)); }
        for (uint32_t i = 0; i < object->count; i++) {
            if (kept < i) { items[kept] = items[i]; }
            uint32_t j = json_index_member(object, kept);
            if (j == kept) {
                kept++;
                continue;
            }
            if (!p->odd) { return json_duplicate(p, &items[kept]); }
            items[j] = items[kept];
            p->odd->duplicates++;
        }
        if (kept == object->count) { return true; }
        object->count = kept; // and again: the place and the size of the table depend on it
    }
}

static inline bool json_parse_value(JsonParser* p, JsonValue* v);

// Parses the array or object whose opening bracket is at p->pos.
static inline bool json_parse_container(JsonParser* p, JsonValue* v) {
    bool object = p->text[p->pos] == '{';
    uint8_t close = object ? '}' : ']';
    size_t base = p->stack_used;
    v->type = object ? JSON_OBJECT : JSON_ARRAY;
    if (++p->depth > JSON_MAX_DEPTH) { return json_fail(p, p->pos, "more than %d levels", (int)JSON_MAX_DEPTH); }
    p->pos++;
    json_skip_space(p);
    bool more = !(p->pos < p->n && p->text[p->pos] == close);
    while (more) {
        JsonValue item;
        memset(&item, 0, sizeof(item));
        if (object) {
            item.offset = (uint32_t)p->pos;
            if (p->pos >= p->n || p->text[p->pos] != '"') { return json_unexpected(p, "a key in quotes"); }
            if (!json_parse_string(p, &item.key, &item.key_length)) { return false; }
            json_skip_space(p);
            if (p->pos >= p->n || p->text[p->pos] != ':') { return json_unexpected(p, "':'"); }
            p->pos++;
            json_skip_space(p);
        }
        if (!json_parse_value(p, &item)) { return false; }
        if (p->stack_used == p->stack_size) {
            p->stack_size = p->stack_size ? 2 * p->stack_size : 64;
            p->stack = (JsonValue*)realloc_check(p->stack, p->stack_size * sizeof(JsonValue));
        }
        p->stack[p->stack_used++] = item;
        json_skip_space(p);
        more = p->pos < p->n && p->text[p->pos] == ',';
        if (more) {
            p->pos++;
            json_skip_space(p);
        } else if (p->pos >= p->n || p->text[p->pos] != close) {
            return json_unexpected(p, object ? "',' or '}'" : "',' or ']'");
        }
    }
    p->pos++;
    p->depth--;
    v->count = (uint32_t)(p->stack_used - base);
    if (v->count > 0) {
        size_t bytes = v->count * sizeof(JsonValue), slots = object ? json_num_slots(v->count) : 0;
        v->items = (const JsonValue*)memcpy(json_alloc(p, bytes + slots * sizeof(uint32_t)), p->stack + base, bytes);
    }
    p->stack_used = base;
    return !object || json_index(p, v);
}

// Parses the value at p->pos into v, whose members other than the key must be zero.
static inline bool json_parse_value(JsonParser* p, JsonValue* v) {
    if (++p->num_values > JSON_MAX_VALUES) { return json_fail(p, p->pos, "more than %d values", (int)JSON_MAX_VALUES); }
    if (!v->key) { v->offset = (uint32_t)p->pos; }
    uint8_t c = p->pos < p->n ? p->text[p->pos] : 0;
    if (c == '{' || c == '[') { return json_parse_container(p, v); }
    if (c == '-' || (c >= '0' && c <= '9') || (c == 'I' && p->odd)) { return json_parse_number(p, v); }
    if (p->odd && p->n - p->pos >= 3 && memcmp(p->text + p->pos, "NaN", 3) == 0) {
        return json_odd_number(p, v, p->pos + 3);
    }
    if (c == '"') {
        v->type = JSON_STRING;
        return json_parse_string(p, &v->string, &v->length);
    }
    if (c == 't' || c == 'f') {
        v->type = JSON_BOOL;
        v->boolean = c == 't';
        return json_parse_word(p, c == 't' ? "true" : "false");
    }
    return json_parse_word(p, "null"); // v->type already is JSON_NULL, which is 0
}

// ---- reading -----------------------------------------------------------------------

static inline void json_free(JsonDoc* doc) {
    while (doc->blocks) {
        JsonBlock* next = doc->blocks->next;
        free(doc->blocks);
        doc->blocks = next;
    }
    free(doc->strings);
    memset(doc, 0, sizeof(*doc));
}

// Like json_parse(), but accepts what JsonOdd counts, if odd is not NULL.
static inline bool json_parse_lenient(JsonDoc* doc, const char* text, size_t n, const char* where, JsonOdd* odd,
                                      Error* err) {
    JsonParser p;
    memset(&p, 0, sizeof(p));
    memset(doc, 0, sizeof(*doc));
    p.doc = doc;
    p.text = (const uint8_t*)text;
    p.n = n;
    p.where = where;
    p.odd = odd;
    p.err = err;
    if (n > UINT32_MAX) { return error_set(err, "%s: %zu bytes of JSON, at most 4 GiB are supported", where, n); }
    doc->strings = (char*)malloc_check(n);
    JsonValue root;
    memset(&root, 0, sizeof(root));
    if (n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { p.pos = 3; }
    json_skip_space(&p);
    bool ok = json_parse_value(&p, &root);
    json_skip_space(&p);
    if (ok && p.pos < n) { ok = json_unexpected(&p, "the end of the text"); }
    if (ok) {
        JsonValue* kept = (JsonValue*)json_alloc(&p, sizeof(JsonValue));
        *kept = root;
        doc->root = kept;
    } else {
        json_free(doc);
    }
    free(p.stack);
    return ok;
}

// Parses a JSON text of n bytes. `where` is its name in messages. The text is not needed afterwards. On false there is
// nothing to free.
static inline bool json_parse(JsonDoc* doc, const char* text, size_t n, const char* where, Error* err) {
    return json_parse_lenient(doc, text, n, where, NULL, err);
}

// Returns the member with this key (n bytes), or NULL if there is none, or if `object` is NULL or not an object.
static inline const JsonValue* json_get_n(const JsonValue* object, const char* key, size_t n) {
    if (!object || object->type != JSON_OBJECT) { return NULL; }
    size_t slots = json_num_slots(object->count);
    if (slots == 0) {
        for (uint32_t i = 0; i < object->count; i++) {
            if (json_same_key(&object->items[i], key, n)) { return &object->items[i]; }
        }
        return NULL;
    }
    const uint32_t* table = json_slots(object);
    size_t slot = json_hash(object, key, n) & (slots - 1);
    for (; table[slot]; slot = (slot + 1) & (slots - 1)) {
        const JsonValue* member = &object->items[table[slot] - 1];
        if (json_same_key(member, key, n)) { return member; }
    }
    return NULL;
}

static inline const JsonValue* json_get(const JsonValue* object, const char* key) {
    return json_get_n(object, key, strlen(key));
}

static inline const char* json_type_name(JsonType type) {
    static const char* const names[] = {"null", "a boolean", "a number", "a string", "an array", "an object"};
    return names[type];
}

// Sets *out to the member with this key. Returns false if it is missing or of another type; the error names `where` and
// the key.
static inline bool json_want(const JsonValue* object, const char* key, JsonType type, const JsonValue** out,
                             const char* where, Error* err) {
    const JsonValue* v = json_get(object, key);
    *out = v;
    if (!v) { return error_set(err, "%s: \"%s\" is missing", where, key); }
    if (v->type != type) {
        return error_set(err, "%s: \"%s\" is %s, want %s", where, key, json_type_name(v->type), json_type_name(type));
    }
    return true;
}

// Reads an integer member in min..max. Like the functions below, it sets *out only on success.
static inline bool json_int(const JsonValue* object, const char* key, int64_t min, int64_t max, int64_t* out,
                            const char* where, Error* err) {
    const JsonValue* v;
    if (!json_want(object, key, JSON_NUMBER, &v, where, err)) { return false; }
    if (!v->is_int) { return error_set(err, "%s: \"%s\" is %g, want an integer", where, key, v->number); }
    if (v->integer < min || v->integer > max) {
        return error_set(err, "%s: \"%s\" is %lld, want %lld to %lld", where, key, (long long)v->integer,
                         (long long)min, (long long)max);
    }
    *out = v->integer;
    return true;
}

static inline bool json_number(const JsonValue* object, const char* key, double min, double max, double* out,
                               const char* where, Error* err) {
    const JsonValue* v;
    if (!json_want(object, key, JSON_NUMBER, &v, where, err)) { return false; }
    if (!(v->number >= min && v->number <= max)) {
        return error_set(err, "%s: \"%s\" is %g, want %g to %g", where, key, v->number, min, max);
    }
    *out = v->number;
    return true;
}

static inline bool json_bool(const JsonValue* object, const char* key, bool* out, const char* where, Error* err) {
    const JsonValue* v;
    if (!json_want(object, key, JSON_BOOL, &v, where, err)) { return false; }
    *out = v->boolean;
    return true;
}

// Reads a string member that is safe to use as a C string: fails if it contains a NUL. It is valid as long as the
// JsonDoc.
static inline bool json_string(const JsonValue* object, const char* key, const char** out, const char* where,
                               Error* err) {
    const JsonValue* v;
    if (!json_want(object, key, JSON_STRING, &v, where, err)) { return false; }
    if (strlen(v->string) != v->length) { return error_set(err, "%s: \"%s\" contains a NUL character", where, key); }
    *out = v->string;
    return true;
}

// ---- writing -----------------------------------------------------------------------

// Writes n bytes as a JSON string with quotes. Each byte that is not part of valid UTF-8 becomes U+FFFD.
static inline void json_write_string(FileWriter* w, const char* s, size_t n) {
    static const char names[] = "\"\\bfnrt", values[] = "\"\\\b\f\n\r\t";
    writer_put(w, "\"", 1);
    for (size_t i = 0; i < n;) {
        int len = json_utf8_length((const uint8_t*)s + i, n - i);
        const char* value = s[i] ? strchr(values, s[i]) : NULL;
        if (len == 0) {
            writer_put(w, "\xEF\xBF\xBD", 3);
        } else if (value) {
            char escape[2] = {'\\', names[value - values]};
            writer_put(w, escape, 2);
        } else if ((uint8_t)s[i] < 0x20) {
            writer_printf(w, "\\u%04x", (uint8_t)s[i]);
        } else {
            writer_put(w, s + i, (size_t)len);
        }
        i += len ? (size_t)len : 1;
    }
    writer_put(w, "\"", 1);
}

#endif
