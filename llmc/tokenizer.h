/*
GPT-2's byte-level BPE: text to token ids and back, lossless for every byte string.

    Tokenizer t;
    TokenBuffer tokens = {0};
    if (!tokenizer_load(&t, "gpt2/", &err)) { die("%s", err.text); }
    tokenizer_encode(&t, text, n, &tokens); // appends to tokens.ids (tokens.count)
    bytes = tokenizer_decode(&t, tokens.ids[0], &length);

Encoding has three steps. First, a hand-written scanner for GPT-2's regular expression splits the text into pieces.
Second, each piece is looked up in a cache of pieces that were encoded before. Third, on a miss, the piece starts as one
token per byte, and adjacent tokens are merged, the pair of lowest rank first and the leftmost of equal rank, until no
pair is in the list of merges. In a short piece, each merge searches all pairs; in a long piece, a heap makes all merges
together O(n log n).
Special tokens are not recognised in the input: the text "<|endoftext|>" is encoded as ordinary characters.

Reads vocab.json + merges.txt, encoder.json + vocab.bpe, merges.txt alone, tokenizer.json, and llm.c's tokenizer.bin
(decode only). End-of-text is the eos_token of a tokenizer_config.json in the same directory, or else <|endoftext|>.
Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2;
Sennrich et al. 2016, arXiv:1508.07909.
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "json.h"
#include "text_input.h"
#include "unicode_tables.h"
#include "utils.h"

enum {
    TOKENIZER_MAX_VOCAB = 1 << 20,
    TOKENIZER_MAX_FILE = 1 << 28, // bytes; GPT-2's largest file has 2 MB
    TOKENIZER_BIN_MAGIC = 20240328,
};
#define TOKENIZER_EOT "<|endoftext|>"

// ---- types --------------------------------------------------------------------------------------

// A slot of the hash table of merges: the adjacent tokens left, right are merged into the token id.
typedef struct {
    uint32_t left, right; // left is UINT32_MAX in an empty slot
    uint32_t rank;        // index in merges.txt; lower ranks are merged first
    uint32_t id;
} MergeSlot;

typedef struct {
    int vocab_size;          // V
    int eot_id;              // id of end-of-text, the token that precedes every document; -1 if there is none
    bool can_encode;         // false if read from a tokenizer.bin, which has no merges
    uint32_t fingerprint[2]; // checksums of tokens and merges: equal for equal vocabularies

    uint8_t* bytes;    // bytes of all tokens, concatenated
    uint32_t* offsets; // (V+1) token i is bytes[offsets[i] .. offsets[i+1]-1]
    uint8_t* added;    // (V) 1: an added token; files spell it literally instead of through the byte map
    uint32_t* merges;  // (num_merges, 2) ids of left and right, sorted by rank
    int num_merges;
    MergeSlot* slots; // (1 << slot_bits) hash table with open addressing, at most half full
    int slot_bits;

    uint32_t byte_ids[256];  // id of each single-byte token
    uint8_t byte_class[256]; // class of an ASCII character; CLASS_WIDE for bytes >= 128
    uint8_t* char_class;     // (0x110000) class of each code point
} Tokenizer;

// An entry of the cache of encoded pieces, which is direct-mapped and of fixed size.
enum { CACHE_BITS = 15, CACHE_KEY = 24, CACHE_IDS = 8 };
typedef struct {
    uint64_t key[CACHE_KEY / 8]; // the piece's bytes, padded with zeros
    uint32_t ids[CACHE_IDS];
    uint8_t length; // length of the piece in bytes; 0: empty entry
    uint8_t count;  // number of ids
    uint8_t pad[6];
} CacheEntry; // one cache line

// The output of tokenizer_encode(), and its cache. Zero it before first use; use one per thread; set count = 0 to reuse
// it.
typedef struct {
    uint32_t* ids; // (capacity), the first count are valid
    size_t count, capacity;
    CacheEntry* cache;       // (1 << CACHE_BITS)
    uint32_t cache_owner[2]; // fingerprint of the vocabulary that the cached ids belong to
} TokenBuffer;

static inline void token_buffer_free(TokenBuffer* b) {
    free(b->ids);
    free(b->cache);
    memset(b, 0, sizeof(*b));
}

static inline void token_buffer_reserve(TokenBuffer* b, size_t more) {
    if (b->capacity - b->count >= more) { return; }
    size_t capacity = b->capacity + b->capacity / 2 + more + 1024, bytes;
    if (__builtin_mul_overflow(capacity, sizeof(b->ids[0]), &bytes)) { die("out of memory: %zu tokens", capacity); }
    b->ids = (uint32_t*)realloc_check(b->ids, bytes);
    b->capacity = capacity;
}

// ---- UTF-8 --------------------------------------------------------------------------------------

// True if p[0..n), n = 1 to 3, is an incomplete prefix of a well-formed UTF-8 sequence. Unicode 16.0, table 3-7.
static inline bool utf8_is_prefix(const uint8_t* p, size_t n) {
    if (p[0] < 0xC2 || p[0] > 0xF4) { return false; }
    size_t length = p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (n >= length) { return false; }
    if (n >= 2) {
        uint8_t low = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;  // no overlong forms
        uint8_t high = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF; // no surrogates, nothing above U+10FFFF
        if (p[1] < low || p[1] > high) { return false; }
    }
    return n < 3 || (p[2] & 0xC0) == 0x80;
}

// Decodes the code point at p < end into *code. Returns its length in bytes, or 0 if the sequence is not well-formed.
static inline size_t utf8_decode(const uint8_t* p, const uint8_t* end, uint32_t* code) {
    int n = json_utf8_length(p, (size_t)(end - p));
    *code = n > 1 ? p[0] & (0x7Fu >> n) : p[0];
    for (int i = 1; i < n; i++) { *code = *code << 6 | (p[i] & 0x3F); }
    return (size_t)n;
}

// Turns a stream of bytes into complete UTF-8 characters, because tokens often end in the middle of a character. An
// incomplete sequence is held back until it is complete. Ill-formed bytes become U+FFFD, one per maximal prefix of a
// well-formed sequence, or per byte. Zero it before use.
typedef struct {
    uint8_t held[4]; // (count) the incomplete sequence
    size_t count;
} Utf8Stream;

// Takes n bytes, writes complete characters to out (3 * (n + 3) bytes), and returns the number of bytes written.
static inline size_t utf8_stream_push(Utf8Stream* s, const void* bytes, size_t n, char* out) {
    const uint8_t* p = (const uint8_t*)bytes;
    size_t written = 0;
    for (size_t i = 0; i < n;) {
        uint32_t code;
        s->held[s->count++] = p[i];
        if (utf8_decode(s->held, s->held + s->count, &code)) {
            memcpy(out + written, s->held, s->count);
            written += s->count;
        } else if (utf8_is_prefix(s->held, s->count)) {
            i++;
            continue;
        } else {
            memcpy(out + written, "\xEF\xBF\xBD", 3);
            written += 3;
            if (s->count > 1) { // this byte may begin the next character
                s->count = 0;
                continue;
            }
        }
        s->count = 0;
        i++;
    }
    return written;
}

// Call at the end of the text: if an incomplete sequence is held back, writes U+FFFD to out (3 bytes). Returns the
// number of bytes written.
static inline size_t utf8_stream_flush(Utf8Stream* s, char* out) {
    size_t n = s->count ? 3 : 0;
    memcpy(out, "\xEF\xBF\xBD", n);
    s->count = 0;
    return n;
}

// ---- the scanner --------------------------------------------------------------------------------

enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE, CLASS_WIDE };

static inline void tokenizer_fill_classes(Tokenizer* t) {
    t->char_class = (uint8_t*)calloc_check(0x110000, 1);
    const UnicodeRange* tables[3] = {unicode_letters, unicode_numbers, unicode_spaces};
    const size_t counts[3] = {sizeof(unicode_letters) / sizeof(UnicodeRange),
                              sizeof(unicode_numbers) / sizeof(UnicodeRange),
                              sizeof(unicode_spaces) / sizeof(UnicodeRange)};
    for (int k = 0; k < 3; k++) {
        for (size_t i = 0; i < counts[k]; i++) {
            UnicodeRange r = tables[k][i];
            memset(t->char_class + r.first, CLASS_LETTER + k, r.last - r.first + 1);
        }
    }
    memcpy(t->byte_class, t->char_class, 128);
    memset(t->byte_class + 128, CLASS_WIDE, 128);
}

// Returns the class of the character at p < end and stores its length in bytes in *length. A byte that does not start a
// well-formed sequence counts as a character of class CLASS_OTHER.
static inline int tokenizer_class_at(const Tokenizer* t, const uint8_t* p, const uint8_t* end, size_t* length) {
    uint32_t code;
    *length = 1;
    if (*p < 0x80) { return t->byte_class[*p]; }
    size_t n = utf8_decode(p, end, &code);
    if (n == 0) { return CLASS_OTHER; }
    *length = n;
    return t->char_class[code];
}

// Returns the end of the run of characters of class `wanted` that begins at p.
static inline const uint8_t* tokenizer_run(const Tokenizer* t, const uint8_t* p, const uint8_t* end, int wanted) {
    while (p < end) {
        int c = t->byte_class[*p];
        size_t length = 1;
        if (c == CLASS_WIDE) { c = tokenizer_class_at(t, p, end, &length); }
        if (c != wanted) { break; }
        p += length;
    }
    return p;
}

// Returns the end of the piece of white space that begins at p. It is the whole run if the run ends the text; otherwise
// the run without its last character (but at least one character), because the next piece may begin with that space.
static inline const uint8_t* tokenizer_space_piece(const Tokenizer* t, const uint8_t* p, const uint8_t* end) {
    const uint8_t *q = p, *last = p;
    while (q < end) {
        size_t length;
        if (tokenizer_class_at(t, q, end, &length) != CLASS_SPACE) { return last > p ? last : q; }
        last = q;
        q += length;
    }
    return end;
}

// Returns the end of the piece that begins at p < end, as GPT-2's regular expression matches it:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static inline const uint8_t* tokenizer_next_piece(const Tokenizer* t, const uint8_t* p, const uint8_t* end) {
    const uint8_t* q = p;
    if (*p == ' ') {
        if (++q == end) { return end; }
    } else if (*p == '\'' && end - p >= 2) {
        uint8_t a = p[1], b = end - p >= 3 ? p[2] : 0;
        if (a == 's' || a == 't' || a == 'm' || a == 'd') { return p + 2; }
        if ((b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l')) { return p + 3; }
    }
    size_t length = 1;
    int c = t->byte_class[*q];
    if (c == CLASS_WIDE) { c = tokenizer_class_at(t, q, end, &length); }
    return c == CLASS_SPACE ? tokenizer_space_piece(t, p, end) : tokenizer_run(t, q + length, end, c);
}

// Returns the last position c, 0 < c < n, at which a text can be cut for encoding in chunks: encoding text[0..c) and
// the rest separately gives the ids of the whole, whatever precedes and follows these n bytes. Returns 0 if there is
// none. A piece always ends before white space that follows a non-space character, and between an ASCII letter or digit
// and an ASCII character of another class.
static inline size_t tokenizer_find_cut(const Tokenizer* t, const void* text, size_t n) {
    const uint8_t* p = (const uint8_t*)text;
    for (size_t i = n; i-- > 1;) {
        int before = t->byte_class[p[i - 1]], after = t->byte_class[p[i]];
        if (after == CLASS_WIDE || before == after) { continue; }
        if (before == CLASS_LETTER || before == CLASS_NUMBER) { return i; }
        if (after != CLASS_SPACE) { continue; }
        if (before == CLASS_OTHER) { return i; }
        // p[i - 1] is not ASCII, so it may end a multi-byte white space character: then do not cut here
        bool space = false;
        for (size_t k = 2; k <= 3 && k <= i; k++) {
            size_t length;
            space |= tokenizer_class_at(t, p + i - k, p + i, &length) == CLASS_SPACE && length == k;
        }
        if (!space) { return i; }
    }
    return 0;
}

// ---- merging ------------------------------------------------------------------------------------

static inline size_t tokenizer_slot(const Tokenizer* t, uint32_t left, uint32_t right) {
    return (size_t)(((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u >> (64 - t->slot_bits));
}

// Returns the slot of the merge of two adjacent tokens. If there is no such merge, the slot's rank is UINT32_MAX.
static inline const MergeSlot* tokenizer_find_merge(const Tokenizer* t, uint32_t left, uint32_t right) {
    size_t mask = ((size_t)1 << t->slot_bits) - 1, i = tokenizer_slot(t, left, right);
    while (t->slots[i].left != UINT32_MAX && (t->slots[i].left != left || t->slots[i].right != right)) {
        i = (i + 1) & mask;
    }
    return &t->slots[i];
}

enum { MERGE_SHORT = 64 }; // bytes; a heap pays off only for longer pieces

// Merges the tokens of one piece in place: ids (n), n <= MERGE_SHORT, starts as the ids of its bytes. Returns the
// number of ids that remain.
static inline size_t tokenizer_merge_short(const Tokenizer* t, uint32_t* ids, size_t n) {
    uint32_t ranks[MERGE_SHORT], merged[MERGE_SHORT]; // rank and result of merging ids[i] with ids[i + 1]
    for (size_t i = 0; i + 1 < n; i++) {
        const MergeSlot* m = tokenizer_find_merge(t, ids[i], ids[i + 1]);
        ranks[i] = m->rank;
        merged[i] = m->id;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (ranks[i] < ranks[best]) { best = i; }
        }
        if (ranks[best] == UINT32_MAX) { break; }
        ids[best] = merged[best];
        n--;
        for (size_t i = best + 1; i < n; i++) { ids[i] = ids[i + 1]; }
        for (size_t i = best + 1; i + 1 < n; i++) {
            ranks[i] = ranks[i + 1];
            merged[i] = merged[i + 1];
        }
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const MergeSlot* m = tokenizer_find_merge(t, ids[i], ids[i + 1]);
            ranks[i] = m->rank;
            merged[i] = m->id;
        }
    }
    return n;
}

// A binary min-heap of rank << 32 | position: the lowest rank comes first, among equal ranks the leftmost position.
typedef struct {
    uint64_t* items;
    size_t count;
} MergeHeap;

static inline void merge_heap_sink(MergeHeap* h, size_t i) {
    uint64_t item = h->items[i];
    for (size_t child; (child = 2 * i + 1) < h->count; i = child) {
        if (child + 1 < h->count && h->items[child + 1] < h->items[child]) { child++; }
        if (h->items[child] >= item) { break; }
        h->items[i] = h->items[child];
    }
    h->items[i] = item;
}

static inline void merge_heap_push(MergeHeap* h, uint64_t item) {
    size_t i = h->count++;
    for (; i > 0 && h->items[(i - 1) / 2] > item; i = (i - 1) / 2) { h->items[i] = h->items[(i - 1) / 2]; }
    h->items[i] = item;
}

// Same as tokenizer_merge_short() for a piece of any length below 4 GiB. The tokens form a doubly linked list, indexed
// by the position of their first byte. A heap item is stale, and is ignored, if the rank at its position has changed.
static inline size_t tokenizer_merge_long(const Tokenizer* t, uint32_t* ids, size_t n) {
    require(n < UINT32_MAX);
    uint32_t* prev = (uint32_t*)malloc_check(3 * n * sizeof(uint32_t));
    uint32_t *next = prev + n, *ranks = prev + 2 * n; // ranks[i]: rank of the pair at positions i, next[i]
    // 3n items are enough: n - 1 initial pairs, and each of at most n - 1 merges pushes at most two new ones
    MergeHeap heap = {(uint64_t*)malloc_check(3 * n * sizeof(uint64_t)), 0};
    for (size_t i = 0; i < n; i++) {
        prev[i] = (uint32_t)i - 1; // UINT32_MAX for the first token: no predecessor
        next[i] = (uint32_t)i + 1; // n for the last token: no successor
        ranks[i] = i + 1 < n ? tokenizer_find_merge(t, ids[i], ids[i + 1])->rank : UINT32_MAX;
        if (ranks[i] != UINT32_MAX) { heap.items[heap.count++] = (uint64_t)ranks[i] << 32 | i; }
    }
    for (size_t i = heap.count / 2; i-- > 0;) { merge_heap_sink(&heap, i); }
    while (heap.count > 0) {
        uint32_t rank = (uint32_t)(heap.items[0] >> 32), at = (uint32_t)heap.items[0];
        heap.items[0] = heap.items[--heap.count];
        if (heap.count > 0) { merge_heap_sink(&heap, 0); }
        if (ranks[at] != rank) { continue; }
        uint32_t gone = next[at], after = next[gone], before = prev[at];
        ids[at] = tokenizer_find_merge(t, ids[at], ids[gone])->id;
        next[at] = after;
        if (after < n) { prev[after] = at; }
        ranks[gone] = UINT32_MAX;
        ranks[at] = after < n ? tokenizer_find_merge(t, ids[at], ids[after])->rank : UINT32_MAX;
        if (ranks[at] != UINT32_MAX) { merge_heap_push(&heap, (uint64_t)ranks[at] << 32 | at); }
        if (before == UINT32_MAX) { continue; }
        ranks[before] = tokenizer_find_merge(t, ids[before], ids[at])->rank;
        if (ranks[before] != UINT32_MAX) { merge_heap_push(&heap, (uint64_t)ranks[before] << 32 | before); }
    }
    size_t count = 0;
    for (size_t i = 0; i < n; i = next[i]) { ids[count++] = ids[i]; }
    free(prev);
    free(heap.items);
    return count;
}

// Encodes one piece of n > 0 bytes into ids (room for n). Returns the number of tokens.
static inline size_t tokenizer_merge(const Tokenizer* t, const uint8_t* piece, size_t n, uint32_t* ids) {
    for (size_t i = 0; i < n; i++) { ids[i] = t->byte_ids[piece[i]]; }
    return n <= MERGE_SHORT ? tokenizer_merge_short(t, ids, n) : tokenizer_merge_long(t, ids, n);
}

// ---- encode and decode --------------------------------------------------------------------------

// Allocates b's cache, or clears it if its entries belong to another vocabulary.
static inline void tokenizer_open_cache(const Tokenizer* t, TokenBuffer* b) {
    size_t bytes = sizeof(CacheEntry) << CACHE_BITS;
    bool fresh = !b->cache;
    if (fresh) {
        void* cache;
        if (posix_memalign(&cache, sizeof(CacheEntry), bytes) != 0) {
            die("out of memory: cannot allocate %zu bytes", bytes);
        }
        b->cache = (CacheEntry*)cache;
    }
    if (!fresh && memcmp(b->cache_owner, t->fingerprint, sizeof(b->cache_owner)) == 0) { return; }
    memset(b->cache, 0, bytes);
    memcpy(b->cache_owner, t->fingerprint, sizeof(b->cache_owner));
}

static inline uint64_t tokenizer_load_word(const uint8_t* p, size_t n) {
    uint64_t w;
    memcpy(&w, p, 8);
    return n < 8 ? w & ((1ull << 8 * n) - 1) : w;
}

// Appends the ids of text (n arbitrary bytes) to out. Threads may share t if each has its own out.
static inline void tokenizer_encode(const Tokenizer* t, const void* text, size_t n, TokenBuffer* out) {
    require(t->can_encode);
    tokenizer_open_cache(t, out);
    const uint8_t *p = (const uint8_t*)text, *end = p + n;
    while (n > 0 && p < end) {
        const uint8_t* next = tokenizer_next_piece(t, p, end);
        size_t length = (size_t)(next - p);
        token_buffer_reserve(out, length + CACHE_IDS); // a cache hit always copies CACHE_IDS ids
        uint32_t* ids = out->ids + out->count;
        if (length > CACHE_KEY) {
            out->count += tokenizer_merge(t, p, length, ids);
            p = next;
            continue;
        }
        uint8_t copy[CACHE_KEY] = {0};
        const uint8_t* from = p; // near the end of the text, copy: the loads below read whole words
        if (end - p < CACHE_KEY) { from = (const uint8_t*)memcpy(copy, p, length); }
        uint64_t a = tokenizer_load_word(from, length), b = 0, c = 0;
        if (length > 8) { b = tokenizer_load_word(from + 8, length - 8); }
        if (length > 16) { c = tokenizer_load_word(from + 16, length - 16); }
        uint64_t hash = (a ^ b * 0xC2B2AE3D27D4EB4Fu ^ c * 0x165667B19E3779F9u) * 0x9E3779B97F4A7C15u;
        CacheEntry* e = &out->cache[hash >> (64 - CACHE_BITS)];
        if (e->length == length && e->key[0] == a && e->key[1] == b && e->key[2] == c) {
            memcpy(ids, e->ids, sizeof(e->ids));
            out->count += e->count;
        } else {
            size_t count = tokenizer_merge(t, p, length, ids);
            out->count += count;
            if (count <= CACHE_IDS) {
                CacheEntry fresh = {{a, b, c}, {0}, (uint8_t)length, (uint8_t)count, {0}};
                memcpy(fresh.ids, ids, count * sizeof(ids[0]));
                *e = fresh;
            }
        }
        p = next;
    }
}

// Returns the bytes of a token, *length of them without a terminating NUL; NULL for an id outside 0..V-1.
static inline const char* tokenizer_decode(const Tokenizer* t, int id, size_t* length) {
    *length = 0;
    if (id < 0 || id >= t->vocab_size) { return NULL; }
    *length = t->offsets[id + 1] - t->offsets[id];
    return (const char*)t->bytes + t->offsets[id];
}

// ---- a vocabulary while its files are read -------------------------------------------------------

typedef struct {
    size_t offset; // into bytes
    uint32_t length;
    uint32_t id;
    bool added; // an added token: not in the index, so merges cannot refer to it
} VocabEntry;

typedef struct {
    uint8_t* bytes; // (bytes_capacity), num_bytes are valid; the rest is scratch space, see vocab_scratch()
    size_t num_bytes, bytes_capacity;
    VocabEntry* entries; // (capacity), count are valid
    size_t count, capacity;
    uint32_t* index; // (index_size, a power of 2) hash table from bytes to 1 + index into entries; 0: empty slot
    size_t index_size;
    uint32_t* merges; // (merges_capacity, 3) ids of left, right and the merged token
    size_t num_merges, merges_capacity;
    uint16_t code_of[256];     // the byte map: the printable code point that files use for a byte
    int16_t byte_of[256 + 68]; // the inverse map; -1: the code point represents no byte
    const char* merges_where;  // the file of the merges, or NULL if it is the one of the tokens
} Vocab;

// Initializes an empty vocabulary and GPT-2's byte map: printable bytes map to themselves, the other 68 to code points
// from 256 on, so that no token in a file contains white space or control characters.
static inline void vocab_init(Vocab* v) {
    memset(v, 0, sizeof(*v));
    for (int i = 0; i < 256 + 68; i++) { v->byte_of[i] = -1; }
    for (int b = 0, next = 256; b < 256; b++) {
        bool printable_byte = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        v->code_of[b] = (uint16_t)(printable_byte ? b : next++);
        v->byte_of[v->code_of[b]] = (int16_t)b;
    }
}

static inline void vocab_free(Vocab* v) {
    free(v->bytes);
    free(v->entries);
    free(v->index);
    free(v->merges);
    memset(v, 0, sizeof(*v));
}

// Returns scratch space for n bytes at the end of bytes. It is valid until the next call; vocab_add() makes it a token.
static inline uint8_t* vocab_scratch(Vocab* v, size_t n) {
    if (!v->bytes || v->bytes_capacity - v->num_bytes < n) {
        v->bytes_capacity = 2 * v->bytes_capacity + n + 4096;
        v->bytes = (uint8_t*)realloc_check(v->bytes, v->bytes_capacity);
    }
    return v->bytes + v->num_bytes;
}

// Returns the slot of a token's bytes (n) in the index. The slot contains 0 if the index has no such token.
static inline uint32_t* vocab_slot(const Vocab* v, const uint8_t* bytes, size_t n) {
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) { h = (h ^ bytes[i]) * 0x100000001B3u; } // FNV-1a
    for (size_t i = (size_t)(h ^ h >> 29);; i++) {
        uint32_t* slot = &v->index[i & (v->index_size - 1)];
        if (*slot == 0) { return slot; }
        const VocabEntry* e = &v->entries[*slot - 1];
        if (e->length == n && memcmp(v->bytes + e->offset, bytes, n) == 0) { return slot; }
    }
}

static inline VocabEntry* vocab_find(const Vocab* v, const uint8_t* bytes, size_t n) {
    uint32_t slot = v->index_size ? *vocab_slot(v, bytes, n) : 0;
    return slot ? &v->entries[slot - 1] : NULL;
}

// Adds a token to v; its n bytes are in the scratch space. Fails if v already has this token, unless `added` is true.
static inline bool vocab_add(Vocab* v, size_t n, int64_t id, bool added, const char* where, Error* err) {
    const uint8_t* bytes = vocab_scratch(v, n);
    const char* reason = n == 0                                ? "is empty"
                         : id < 0 || id >= TOKENIZER_MAX_VOCAB ? "has an id outside 0 to 1048575"
                         : v->count == TOKENIZER_MAX_VOCAB     ? "is one too many: 1048576 is the limit"
                         : !added && vocab_find(v, bytes, n)   ? "occurs twice"
                                                               : NULL;
    if (reason) {
        char name[128];
        json_printable(name, sizeof(name), (const char*)bytes, n);
        return error_set(err, "%s: token '%s' (id %lld) %s", where, name, (long long)id, reason);
    }
    if (v->count == v->capacity) {
        v->capacity = 2 * v->capacity + 1024;
        v->entries = (VocabEntry*)realloc_check(v->entries, v->capacity * sizeof(VocabEntry));
        v->index_size = v->index_size ? v->index_size : 1024;
        while (v->index_size < 2 * v->capacity) { v->index_size *= 2; }
        free(v->index);
        v->index = (uint32_t*)calloc_check(v->index_size, sizeof(uint32_t));
        for (size_t i = 0; i < v->count; i++) {
            const VocabEntry* e = &v->entries[i];
            if (!e->added) { *vocab_slot(v, v->bytes + e->offset, e->length) = (uint32_t)i + 1; }
        }
    }
    VocabEntry entry = {v->num_bytes, (uint32_t)n, (uint32_t)id, added};
    if (!added) { *vocab_slot(v, bytes, n) = (uint32_t)v->count + 1; }
    v->entries[v->count++] = entry;
    v->num_bytes += n;
    return true;
}

// Converts a token from its spelling in files to its bytes, in the scratch space. Returns false if a character
// represents no byte.
static inline bool vocab_unmap(Vocab* v, const char* text, size_t n, size_t* num_bytes) {
    const uint8_t *p = (const uint8_t*)text, *end = p + n;
    uint8_t* out = vocab_scratch(v, n);
    *num_bytes = 0;
    while (p < end) {
        uint32_t code;
        size_t length = utf8_decode(p, end, &code);
        if (length == 0 || code >= 256 + 68 || v->byte_of[code] < 0) { return false; }
        out[(*num_bytes)++] = (uint8_t)v->byte_of[code];
        p += length;
    }
    return true;
}

// Finds the token with this spelling in files; NULL if there is none.
static inline VocabEntry* vocab_find_spelled(Vocab* v, const char* text, size_t n) {
    size_t num_bytes;
    if (!vocab_unmap(v, text, n, &num_bytes)) { return NULL; }
    return vocab_find(v, v->bytes + v->num_bytes, num_bytes);
}

// Finds the left or right token of a merge; NULL with an error if it does not exist.
static inline const VocabEntry* vocab_merge_side(Vocab* v, const char* text, size_t n, const char* where, Error* err) {
    char name[128];
    const VocabEntry* e = vocab_find_spelled(v, text, n);
    if (!e) { error_set(err, "%s: '%s' is not a known token", where, json_printable(name, sizeof(name), text, n)); }
    return e;
}

// Adds the next merge, in the order of rank. If grow is true, because there is no vocab.json, the merge creates the
// token with the next id; otherwise the merged token must already exist.
static inline bool vocab_add_merge(Vocab* v, const char* left, size_t num_left, const char* right, size_t num_right,
                                   bool grow, const char* where, Error* err) {
    if (v->num_merges == TOKENIZER_MAX_VOCAB) {
        return error_set(err, "%s: more than %d merges", where, TOKENIZER_MAX_VOCAB);
    }
    const VocabEntry* a = vocab_merge_side(v, left, num_left, where, err);
    const VocabEntry* b = a ? vocab_merge_side(v, right, num_right, where, err) : NULL;
    if (!b) { return false; }
    uint32_t ids[3] = {a->id, b->id, (uint32_t)v->count};
    size_t n = (size_t)a->length + b->length, a_offset = a->offset, b_offset = b->offset, a_length = a->length;
    uint8_t* both = vocab_scratch(v, n);
    memcpy(both, v->bytes + a_offset, a_length);
    memcpy(both + a_length, v->bytes + b_offset, n - a_length);
    if (grow) {
        if (!vocab_add(v, n, (int64_t)v->count, false, where, err)) { return false; }
    } else {
        const VocabEntry* e = vocab_find(v, both, n);
        char name[128];
        if (!e) {
            json_printable(name, sizeof(name), (const char*)both, n);
            return error_set(err, "%s: the vocabulary has no token '%s', which this merge makes", where, name);
        }
        ids[2] = e->id;
    }
    if (v->num_merges == v->merges_capacity) {
        v->merges_capacity = 2 * v->merges_capacity + 1024;
        v->merges = (uint32_t*)realloc_check(v->merges, 3 * v->merges_capacity * sizeof(uint32_t));
    }
    memcpy(v->merges + 3 * v->num_merges++, ids, sizeof(ids));
    return true;
}

// Adds the 256 bytes in the order of the byte map. They have ids 0 to 255 in a vocabulary that consists of merges.txt
// alone.
static inline void vocab_add_bytes(Vocab* v) {
    for (int code = 0; code < 256 + 68; code++) {
        if (v->byte_of[code] < 0) { continue; }
        *vocab_scratch(v, 1) = (uint8_t)v->byte_of[code];
        vocab_add(v, 1, (int64_t)v->count, false, "bytes", NULL);
    }
}

static inline bool vocab_add_eot(Vocab* v, const char* where, Error* err) {
    size_t n = strlen(TOKENIZER_EOT);
    memcpy(vocab_scratch(v, n), TOKENIZER_EOT, n);
    return vocab_add(v, n, (int64_t)v->count, true, where, err);
}

// ---- building the tokenizer from a vocabulary ---------------------------------------------------

static inline void tokenizer_free(Tokenizer* t) {
    free(t->bytes);
    free(t->offsets);
    free(t->added);
    free(t->merges);
    free(t->slots);
    free(t->char_class);
    memset(t, 0, sizeof(*t));
}

// Returns the id of the token with these n bytes; -1 if there is none.
static inline int tokenizer_find(const Tokenizer* t, const char* s, size_t n) {
    for (int id = 0; id < t->vocab_size; id++) {
        if (t->offsets[id + 1] - t->offsets[id] == n && memcmp(t->bytes + t->offsets[id], s, n) == 0) { return id; }
    }
    return -1;
}

// Copies the tokens in the order of their ids. Every id from 0 to V-1 must occur exactly once.
static inline bool tokenizer_set_tokens(Tokenizer* t, const Vocab* v, const char* where, Error* err) {
    size_t V = v->count;
    if (V == 0) { return error_set(err, "%s: no tokens", where); }
    uint32_t* by_id = (uint32_t*)calloc_check(V, sizeof(uint32_t)); // 1 + index into entries
    for (size_t i = 0; i < V; i++) {
        uint32_t id = v->entries[i].id;
        if (id < V && by_id[id] == 0) {
            by_id[id] = (uint32_t)i + 1;
            continue;
        }
        free(by_id);
        return id < V ? error_set(err, "%s: two tokens have id %u", where, id)
                      : error_set(err, "%s: ids are not 0 to %zu: one is %u among %zu tokens", where, V - 1, id, V);
    }
    t->vocab_size = (int)V;
    t->bytes = (uint8_t*)malloc_check(v->num_bytes);
    t->offsets = (uint32_t*)calloc_check(V + 1, sizeof(uint32_t));
    t->added = (uint8_t*)calloc_check(V, 1);
    for (size_t id = 0; id < V; id++) {
        const VocabEntry* e = &v->entries[by_id[id] - 1];
        memcpy(t->bytes + t->offsets[id], v->bytes + e->offset, e->length);
        t->offsets[id + 1] = t->offsets[id] + e->length;
        t->added[id] = e->added;
    }
    t->eot_id = tokenizer_find(t, TOKENIZER_EOT, strlen(TOKENIZER_EOT));
    free(by_id);
    return true;
}

static inline bool tokenizer_set_merges(Tokenizer* t, const Vocab* v, const char* where, Error* err) {
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        const VocabEntry* e = vocab_find(v, &byte, 1);
        if (!e) { return error_set(err, "%s: no token for byte 0x%02x; it cannot encode every text", where, b); }
        t->byte_ids[b] = e->id;
    }
    t->num_merges = (int)v->num_merges;
    t->merges = (uint32_t*)malloc_check(2 * v->num_merges * sizeof(uint32_t));
    for (t->slot_bits = 4; (size_t)1 << t->slot_bits < 2 * v->num_merges; t->slot_bits++) {}
    t->slots = (MergeSlot*)malloc_check(sizeof(MergeSlot) << t->slot_bits);
    memset(t->slots, 0xFF, sizeof(MergeSlot) << t->slot_bits); // all slots empty: left and rank are UINT32_MAX
    for (size_t r = 0; r < v->num_merges; r++) {
        const uint32_t* ids = v->merges + 3 * r;
        MergeSlot* slot = (MergeSlot*)tokenizer_find_merge(t, ids[0], ids[1]);
        if (slot->left != UINT32_MAX) {
            return error_set(err, "%s: merge %zu is the same as merge %u", v->merges_where ? v->merges_where : where,
                             r + 1, slot->rank + 1);
        }
        MergeSlot filled = {ids[0], ids[1], (uint32_t)r, ids[2]};
        *slot = filled;
        memcpy(t->merges + 2 * r, ids, 2 * sizeof(uint32_t));
    }
    t->can_encode = true;
    return true;
}

// Builds t from v. Frees v in any case. On failure t is zeroed.
static inline bool tokenizer_build(Tokenizer* t, Vocab* v, bool can_encode, const char* where, Error* err) {
    memset(t, 0, sizeof(*t));
    bool ok = tokenizer_set_tokens(t, v, where, err) && (!can_encode || tokenizer_set_merges(t, v, where, err));
    vocab_free(v);
    if (!ok) {
        tokenizer_free(t);
        return false;
    }
    tokenizer_fill_classes(t);
    t->fingerprint[0] = crc32c(0, t->bytes, t->offsets[t->vocab_size]);
    t->fingerprint[1] = crc32c(0, t->offsets, (size_t)(t->vocab_size + 1) * sizeof(uint32_t));
    if (can_encode) {
        t->fingerprint[1] = crc32c(t->fingerprint[1], t->merges, 2 * (size_t)t->num_merges * sizeof(uint32_t));
    }
    return true;
}

// Builds the default tokenizer for text without a vocabulary: the 256 bytes in the order of GPT-2's byte map,
// <|endoftext|> = 256, no merges.
static inline void tokenizer_init_bytes(Tokenizer* t) {
    Vocab v;
    vocab_init(&v);
    vocab_add_bytes(&v);
    vocab_add_eot(&v, "bytes", NULL);
    bool ok = tokenizer_build(t, &v, true, "bytes", NULL);
    require(ok);
}

// ---- reading ------------------------------------------------------------------------------------

// The text of a file in memory.
typedef struct {
    const char* text; // (n); NULL if the file does not exist
    size_t n;
    const char* where; // its path, for messages
} TokenizerText;

// Reads merges.txt: a line "#version: ...", then one "left right" per line; blank lines may follow.
static inline bool tokenizer_read_merges(Vocab* v, TokenizerText f, bool grow, Error* err) {
    char where[1100];
    TextLines lines = {f.text, f.n, 0, 0};
    const char* s;
    v->merges_where = f.where;
    for (size_t n; text_next_line(&lines, &s, &n);) {
        if (lines.line == 1 && n >= 9 && memcmp(s, "#version:", 9) == 0) { continue; }
        if (text_is_blank(s, n) && json_skip_spaces(f.text, f.n, lines.at) == f.n) { break; } // only blank lines follow
        snprintf(where, sizeof(where), "%.1000s:%zu", f.where, lines.line);
        const char* space = (const char*)memchr(s, ' ', n);
        size_t left = space ? (size_t)(space - s) : 0;
        if (left == 0 || left + 1 == n || memchr(space + 1, ' ', n - left - 1)) {
            return error_set(err, "%s: want two tokens with one space between them", where);
        }
        if (!vocab_add_merge(v, s, left, space + 1, n - left - 1, grow, where, err)) { return false; }
    }
    return true;
}

// Builds t from merges.txt (or vocab.bpe) alone: the 256 bytes, one token per merge, then <|endoftext|>.
static inline bool tokenizer_parse_merges(Tokenizer* t, TokenizerText merges, Error* err) {
    Vocab v;
    vocab_init(&v);
    vocab_add_bytes(&v);
    memset(t, 0, sizeof(*t));
    if (tokenizer_read_merges(&v, merges, true, err) && vocab_add_eot(&v, merges.where, err)) {
        return tokenizer_build(t, &v, true, merges.where, err);
    }
    vocab_free(&v);
    return false;
}

// Reads the tokens of {"token": id, ...} into v. If raw is true, they are added tokens, which are spelled literally
// instead of through the byte map. So are tokens that are listed in `except` (may be NULL).
static inline bool tokenizer_read_tokens(Vocab* v, const JsonValue* object, bool raw, Vocab* except, const char* where,
                                         Error* err) {
    char name[128];
    for (size_t i = 0; i < object->count; i++) {
        const JsonValue* e = &object->items[i];
        if (e->type != JSON_NUMBER || !e->is_int) {
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: the id of token '%s' is not an integer", where, name);
        }
        // an added token may also be in vocab.json; both must then give the same id
        VocabEntry* same = except ? vocab_find(except, (const uint8_t*)e->key, e->key_length) : NULL;
        VocabEntry* known = raw ? vocab_find_spelled(v, e->key, e->key_length) : same;
        if (known && known->id != (uint64_t)e->integer) {
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: token '%s' has two ids, %u and %lld", where, name, known->id,
                             (long long)e->integer);
        }
        if (raw && known) { continue; }
        size_t n = e->key_length;
        if (raw || same) {
            memcpy(vocab_scratch(v, n), e->key, n);
        } else if (!vocab_unmap(v, e->key, n, &n)) {
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: token '%s' contains a character that represents no byte", where, name);
        }
        if (same) { same->added = true; } // marks it as already added to v
        if (!vocab_add(v, n, e->integer, raw || same, where, err)) { return false; }
    }
    return true;
}

static inline bool tokenizer_read_token_file(Vocab* v, TokenizerText f, bool raw, Error* err) {
    JsonDoc doc;
    if (!json_parse(&doc, f.text, f.n, f.where, err)) { return false; }
    bool ok = doc.root->type == JSON_OBJECT || error_set(err, "%s: want an object {\"token\": id, ...}", f.where);
    ok = ok && tokenizer_read_tokens(v, doc.root, raw, NULL, f.where, err);
    json_free(&doc);
    return ok;
}

// Builds t from vocab.json + merges.txt and, if added.text is not NULL, Hugging Face's added_tokens.json.
static inline bool tokenizer_parse_vocab(Tokenizer* t, TokenizerText vocab, TokenizerText merges, TokenizerText added,
                                         Error* err) {
    Vocab v;
    vocab_init(&v);
    memset(t, 0, sizeof(*t));
    bool ok = tokenizer_read_token_file(&v, vocab, false, err);
    ok = ok && (!added.text || tokenizer_read_token_file(&v, added, true, err));
    if (ok && tokenizer_read_merges(&v, merges, false, err)) { return tokenizer_build(t, &v, true, vocab.where, err); }
    vocab_free(&v);
    return false;
}

static inline const char* tokenizer_json_type(const JsonValue* object) {
    const JsonValue* type = json_get(object, "type");
    return type && type->type == JSON_STRING ? type->string : "";
}

// True if an option of tokenizer.json is not in use: absent, null, false, 0 or "".
static inline bool tokenizer_json_unset(const JsonValue* v) {
    return !v || v->type == JSON_NULL || (v->type == JSON_BOOL && !v->boolean) ||
           (v->type == JSON_NUMBER && v->number == 0) || (v->type == JSON_STRING && v->length == 0);
}

// Fails, naming the setting, if tokenizer.json has a setting that would encode differently from GPT-2.
static inline bool tokenizer_check_json(const JsonValue* root, const char* where, Error* err) {
    const JsonValue *model = json_get(root, "model"), *pre = json_get(root, "pre_tokenizer");
    if (!model || model->type != JSON_OBJECT) { return error_set(err, "%s: no \"model\" object", where); }
    const char* type = tokenizer_json_type(model);
    char name[64];
    if (type[0] && strcmp(type, "BPE") != 0) {
        json_printable(name, sizeof(name), type, strlen(type));
        return error_set(err, "%s: model type '%s'; only BPE is supported", where, name);
    }
    static const char* const refused[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                          "ignore_merges"};
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        if (!tokenizer_json_unset(json_get(model, refused[i]))) {
            return error_set(err, "%s: model.%s is set; GPT-2 has none", where, refused[i]);
        }
    }
    if (!tokenizer_json_unset(json_get(root, "normalizer"))) {
        type = tokenizer_json_type(json_get(root, "normalizer"));
        json_printable(name, sizeof(name), type, strlen(type));
        return error_set(err, "%s: normalizer '%s' is set; GPT-2 has none", where, name);
    }
    type = tokenizer_json_type(pre);
    if (strcmp(type, "ByteLevel") != 0) {
        json_printable(name, sizeof(name), type, strlen(type));
        return error_set(err, "%s: pre_tokenizer '%s'; only GPT-2's ByteLevel is supported", where, name);
    }
    if (!tokenizer_json_unset(json_get(pre, "add_prefix_space"))) {
        return error_set(err, "%s: pre_tokenizer.add_prefix_space is set; GPT-2 has it off", where);
    }
    const JsonValue* regex = json_get(pre, "use_regex");
    if (regex && !(regex->type == JSON_BOOL && regex->boolean)) {
        return error_set(err, "%s: pre_tokenizer.use_regex is off; GPT-2 has it on", where);
    }
    return true;
}

// "added_tokens": [{"id": 50256, "content": "<|endoftext|>", ...}, ...]
static inline bool tokenizer_read_added(Vocab* added, const JsonValue* list, const char* where, Error* err) {
    if (!list || list->type == JSON_NULL) { return true; }
    if (list->type != JSON_ARRAY) { return error_set(err, "%s: \"added_tokens\" is not a list", where); }
    for (size_t i = 0; i < list->count; i++) {
        const JsonValue* content = json_get(&list->items[i], "content");
        const JsonValue* id = json_get(&list->items[i], "id");
        if (!content || content->type != JSON_STRING || !id || id->type != JSON_NUMBER || !id->is_int) {
            return error_set(err, "%s: added_tokens[%zu] wants an integer \"id\" and a \"content\"", where, i);
        }
        memcpy(vocab_scratch(added, content->length), content->string, content->length);
        if (!vocab_add(added, content->length, id->integer, false, where, err)) { return false; }
    }
    return true;
}

// "merges": ["a b", ...] (older) or [["a", "b"], ...]
static inline bool tokenizer_read_json_merges(Vocab* v, const JsonValue* list, const char* file, Error* err) {
    char where[1100];
    for (size_t i = 0; i < list->count; i++) {
        const JsonValue *e = &list->items[i], *pair = e->items;
        bool ok;
        snprintf(where, sizeof(where), "%.1000s: merge %zu", file, i + 1);
        if (e->type == JSON_STRING) {
            const char* space = (const char*)memchr(e->string, ' ', e->length);
            size_t left = space ? (size_t)(space - e->string) : 0;
            if (!space) { return error_set(err, "%s: want two tokens with one space between them", where); }
            ok = vocab_add_merge(v, e->string, left, space + 1, e->length - left - 1, false, where, err);
        } else if (e->type == JSON_ARRAY && e->count == 2 && pair[0].type == JSON_STRING &&
                   pair[1].type == JSON_STRING) {
            ok = vocab_add_merge(v, pair[0].string, pair[0].length, pair[1].string, pair[1].length, false, where, err);
        } else {
            return error_set(err, "%s: want \"left right\" or [\"left\", \"right\"]", where);
        }
        if (!ok) { return false; }
    }
    return true;
}

static inline bool tokenizer_read_json(Vocab* v, Vocab* added, const JsonValue* root, const char* where, Error* err) {
    const JsonValue *model = json_get(root, "model"), *tokens, *merges;
    if (!tokenizer_check_json(root, where, err) || !json_want(model, "vocab", JSON_OBJECT, &tokens, where, err) ||
        !json_want(model, "merges", JSON_ARRAY, &merges, where, err) ||
        !tokenizer_read_added(added, json_get(root, "added_tokens"), where, err) ||
        !tokenizer_read_tokens(v, tokens, false, added, where, err)) {
        return false;
    }
    for (size_t i = 0; i < added->count; i++) {
        const VocabEntry* e = &added->entries[i];
        if (e->added) { continue; } // also in model.vocab, so it has already been read
        memcpy(vocab_scratch(v, e->length), added->bytes + e->offset, e->length);
        if (!vocab_add(v, e->length, e->id, true, where, err)) { return false; }
    }
    return tokenizer_read_json_merges(v, merges, where, err);
}

// Builds t from tokenizer.json, the format of Hugging Face's tokenizers library.
static inline bool tokenizer_parse_json(Tokenizer* t, TokenizerText f, Error* err) {
    JsonDoc doc;
    Vocab v, added;
    memset(t, 0, sizeof(*t));
    if (!json_parse(&doc, f.text, f.n, f.where, err)) { return false; }
    vocab_init(&v);
    vocab_init(&added);
    bool ok = tokenizer_read_json(&v, &added, doc.root, f.where, err);
    vocab_free(&added);
    json_free(&doc);
    if (ok) { return tokenizer_build(t, &v, true, f.where, err); }
    vocab_free(&v);
    return false;
}

// Builds t from llm.c's tokenizer.bin: a header of 256 int32, then per token one byte of length and the token's bytes.
// It has no merges, so the tokenizer can only decode.
static inline bool tokenizer_parse_bin(Tokenizer* t, TokenizerText f, Error* err) {
    int32_t h[256];
    memset(t, 0, sizeof(*t));
    if (f.n < sizeof(h)) { return error_set(err, "%s: %zu bytes, too short for a header of 1024", f.where, f.n); }
    memcpy(h, f.text, sizeof(h));
    if (h[0] != TOKENIZER_BIN_MAGIC) { return error_set(err, "%s: not a tokenizer.bin of llm.c", f.where); }
    if (h[1] != 1 && h[1] != 2) { return error_set(err, "%s: version %d; only 1 and 2 are supported", f.where, h[1]); }
    if (h[2] <= 0 || h[2] > TOKENIZER_MAX_VOCAB) { return error_set(err, "%s: %d tokens", f.where, h[2]); }
    if (h[1] == 2 && (h[3] < 0 || h[3] >= h[2])) {
        return error_set(err, "%s: end-of-text is %d of %d tokens", f.where, h[3], h[2]);
    }
    Vocab v;
    vocab_init(&v);
    size_t at = sizeof(h);
    for (int i = 0; i < h[2]; i++) {
        size_t length = at < f.n ? (uint8_t)f.text[at] : 0;
        bool fits = at < f.n && f.n - at - 1 >= length;
        if (fits) { memcpy(vocab_scratch(&v, length), f.text + at + 1, length); }
        if (!fits || !vocab_add(&v, length, i, true, f.where, err)) {
            vocab_free(&v);
            return fits ? false : error_set(err, "%s: ends within token %d of %d", f.where, i, h[2]);
        }
        at += 1 + length;
    }
    if (at != f.n) {
        vocab_free(&v);
        return error_set(err, "%s: %zu bytes after the last token", f.where, f.n - at);
    }
    if (!tokenizer_build(t, &v, false, f.where, err)) { return false; }
    if (h[1] == 2) { t->eot_id = h[3]; }
    return true;
}

// ---- files --------------------------------------------------------------------------------------

static inline bool tokenizer_map(MappedFile* file, TokenizerText* text, const char* path, Error* err) {
    if (!map_file(file, path, err)) { return false; }
    const char* p = (const char*)file->data;
    const char* reason = file->size == 0                   ? "is empty"
                         : file->size > TOKENIZER_MAX_FILE ? "is larger than 256 MiB"
                                                           : NULL;
    if (file->size >= 8 && memcmp(p, "version ", 8) == 0) { reason = "is a git-LFS pointer; fetch the file itself"; }
    if (file->size >= 2 && p[0] == '<' && p[1] != ' ') { reason = "is a web page, not a vocabulary"; }
    if (reason) {
        unmap_file(file);
        return error_set(err, "%s: %s", path, reason);
    }
    TokenizerText whole = {p, file->size, path};
    *text = whole;
    return true;
}

// Loads the files vocab and merges, and added_tokens.json if the directory of vocab contains one.
static inline bool tokenizer_load_pair(Tokenizer* t, const char* vocab, const char* merges, Error* err) {
    Path added;
    const char* slash = strrchr(vocab, '/');
    if (!path_set(&added, "%.*sadded_tokens.json", slash ? (int)(slash - vocab) + 1 : 0, vocab)) {
        return error_set(err, "%.64s...: the path is too long", vocab);
    }
    bool with_added = file_exists(added.text), ok = false;
    MappedFile files[3];
    TokenizerText texts[3] = {{NULL, 0, vocab}, {NULL, 0, merges}, {NULL, 0, added.text}};
    if (!tokenizer_map(&files[0], &texts[0], vocab, err)) { return false; }
    if (tokenizer_map(&files[1], &texts[1], merges, err)) {
        if (!with_added || tokenizer_map(&files[2], &texts[2], added.text, err)) {
            ok = tokenizer_parse_vocab(t, texts[0], texts[1], texts[2], err);
            if (with_added) { unmap_file(&files[2]); }
        }
        unmap_file(&files[1]);
    }
    unmap_file(&files[0]);
    return ok;
}

// If path ends in `from`, replaces that ending by `to`. Returns true if the resulting file exists; its path is in out.
static inline bool tokenizer_partner(Path* out, const char* path, const char* from, const char* to) {
    size_t n = strlen(path), k = strlen(from);
    if (n < k || strcmp(path + n - k, from) != 0) { return false; }
    return path_set(out, "%.*s%s", (int)(n - k), path, to) && file_exists(out->text);
}

static inline bool tokenizer_load_file(Tokenizer* t, const char* path, Error* err) {
    Path partner;
    MappedFile file;
    TokenizerText text;
    if (tokenizer_partner(&partner, path, "vocab.json", "merges.txt") ||
        tokenizer_partner(&partner, path, "encoder.json", "vocab.bpe")) {
        return tokenizer_load_pair(t, path, partner.text, err);
    }
    if (tokenizer_partner(&partner, path, "merges.txt", "vocab.json") ||
        tokenizer_partner(&partner, path, "vocab.bpe", "encoder.json")) {
        return tokenizer_load_pair(t, partner.text, path, err);
    }
    if (!tokenizer_map(&file, &text, path, err)) { return false; }
    int32_t magic = 0;
    memcpy(&magic, text.text, text.n < sizeof(magic) ? text.n : sizeof(magic));
    size_t n = strlen(path);
    bool ok;
    if (magic == TOKENIZER_BIN_MAGIC || (n >= 4 && strcmp(path + n - 4, ".bin") == 0)) {
        ok = tokenizer_parse_bin(t, text, err);
    } else if (n >= 10 && (strcmp(path + n - 10, "vocab.json") == 0 || strcmp(path + n - 10, "coder.json") == 0)) {
        ok = error_set(err, "%s: its merges (merges.txt or vocab.bpe) are not beside it", path);
    } else if (text.text[0] == '{') {
        ok = tokenizer_parse_json(t, text, err);
    } else {
        ok = tokenizer_parse_merges(t, text, err);
    }
    unmap_file(&file);
    return ok;
}

// The first half of tokenizer_load(): tokens and merges.
static inline bool tokenizer_load_vocabulary(Tokenizer* t, const char* path, Error* err) {
    static const char* const names[][2] = {
        {"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}, {"tokenizer.json", NULL}, {"merges.txt", NULL},
        {"vocab.bpe", NULL},          {"gpt2_tokenizer.bin", NULL},  {"tokenizer.bin", NULL}};
    memset(t, 0, sizeof(*t));
    if (!is_directory(path)) { return tokenizer_load_file(t, path, err); }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        Path files[2];
        bool found = true;
        for (int k = 0; k < 2 && names[i][k]; k++) {
            if (!path_set(&files[k], "%s/%s", path, names[i][k])) {
                return error_set(err, "%.64s...: the path is too long", path);
            }
            found = found && file_exists(files[k].text);
        }
        if (!found) { continue; }
        return names[i][1] ? tokenizer_load_pair(t, files[0].text, files[1].text, err)
                           : tokenizer_load_file(t, files[0].text, err);
    }
    return error_set(err, "%s: no vocabulary here: want vocab.json + merges.txt, tokenizer.json or tokenizer.bin",
                     path);
}

// Sets eot_id to the token that dir/tokenizer_config.json, a file of Hugging Face, names as its eos_token. Leaves it
// alone if there is no such file, or if it names no token of the vocabulary.
static inline bool tokenizer_read_config(Tokenizer* t, const char* dir, Error* err) {
    Path path;
    MappedFile file;
    TokenizerText text;
    JsonDoc doc;
    if (!path_set(&path, "%s/tokenizer_config.json", dir)) {
        return error_set(err, "%.64s...: the path is too long", dir);
    }
    if (!file_exists(path.text)) { return true; }
    if (!tokenizer_map(&file, &text, path.text, err)) { return false; }
    bool ok = json_parse(&doc, text.text, text.n, path.text, err);
    if (ok) {
        const JsonValue* eos = json_get(doc.root, "eos_token"); // "</s>" or {"content": "</s>", ...}
        if (eos && eos->type == JSON_OBJECT) { eos = json_get(eos, "content"); }
        int id = eos && eos->type == JSON_STRING ? tokenizer_find(t, eos->string, eos->length) : -1;
        if (id >= 0) { t->eot_id = id; }
        json_free(&doc);
    }
    unmap_file(&file);
    return ok;
}

// Loads a vocabulary. path is a directory or a file in one of the formats listed at the top. On false, err holds the
// reason, t is zeroed and there is nothing to free.
static inline bool tokenizer_load(Tokenizer* t, const char* path, Error* err) {
    Path dir;
    if (!tokenizer_load_vocabulary(t, path, err)) { return false; }
    if (!t->can_encode) { return true; } // a tokenizer.bin contains the id of end-of-text
    const char* slash = strrchr(path, '/');
    path_set(&dir, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    if (tokenizer_read_config(t, is_directory(path) ? path : dir.text, err)) { return true; }
    tokenizer_free(t);
    return false;
}

// Writes the names of up to 8 special tokens to out (size > 0): "<s>, </s>". Special are tokens of several bytes that
// no merge makes.
static inline void tokenizer_list_special(const Tokenizer* t, char* out, size_t size) {
    uint8_t* made = (uint8_t*)calloc_check((size_t)t->vocab_size, 1);
    size_t used = 0;
    for (size_t i = 0; t->slots && i < (size_t)1 << t->slot_bits; i++) {
        if (t->slots[i].left != UINT32_MAX) { made[t->slots[i].id] = 1; }
    }
    out[0] = '\0';
    for (int id = 0, listed = 0; id < t->vocab_size && listed < 8; id++) {
        char name[64];
        size_t n = t->offsets[id + 1] - t->offsets[id];
        if (n == 1 || made[id]) { continue; }
        json_printable(name, sizeof(name), (const char*)t->bytes + t->offsets[id], n);
        int written = snprintf(out + used, size - used, "%s%s", listed ? ", " : "", name);
        if (written < 0 || (size_t)written >= size - used) {
            out[used] = '\0'; // no room for this one
            break;
        }
        used += (size_t)written;
        listed++;
    }
    free(made);
}

// Loads a vocabulary for a program that writes 16-bit ids: it must be able to encode and have at most max_tokens
// tokens. If path is NULL, the vocabulary is the 256 bytes and <|endoftext|>. what: the kind of files that will be
// written, for the message. As after tokenizer_load(), eot_id may be -1.
static inline bool tokenizer_load_encoder(Tokenizer* t, const char* path, int max_tokens, const char* what,
                                          Error* err) {
    if (!path) {
        tokenizer_init_bytes(t);
        return true;
    }
    if (!tokenizer_load(t, path, err)) { return false; }
    if (t->can_encode && t->vocab_size <= max_tokens) { return true; }
    if (!t->can_encode) {
        error_set(err, "%s: can only decode; want vocab.json + merges.txt or tokenizer.json", path);
    } else {
        error_set(err, "%s: %d tokens; %s hold 16-bit ids, %d at most", path, t->vocab_size, what, max_tokens);
    }
    tokenizer_free(t);
    return false;
}

// ---- writing ------------------------------------------------------------------------------------

// Writes a token as merges.txt spells it, or, if json is true, as vocab.json does: with JSON escapes.
static inline void tokenizer_write_token(const Tokenizer* t, const Vocab* map, uint32_t id, bool json, FileWriter* w) {
    for (uint32_t i = t->offsets[id]; i < t->offsets[id + 1]; i++) {
        uint16_t code = map->code_of[t->bytes[i]];
        char buf[8];
        size_t n = 0;
        if (json && code > 126) {
            n = (size_t)snprintf(buf, sizeof(buf), "\\u%04x", code);
        } else {
            if (json && (code == '"' || code == '\\')) { buf[n++] = '\\'; }
            n += (size_t)json_utf8_encode(buf + n, code);
        }
        writer_put(w, buf, n);
    }
}

// True if the token is an added token that the byte map would change. It must be written to added_tokens.json, which
// spells tokens literally.
static inline bool tokenizer_is_raw(const Tokenizer* t, const Vocab* map, int id) {
    for (uint32_t i = t->offsets[id]; t->added[id] && i < t->offsets[id + 1]; i++) {
        if (t->bytes[i] > 126 || map->code_of[t->bytes[i]] != t->bytes[i]) { return true; }
    }
    return false;
}

static inline void tokenizer_write_json(const Tokenizer* t, const Vocab* map, bool raw, FileWriter* w) {
    const char* comma = "{";
    for (int id = 0; id < t->vocab_size; id++) {
        if (tokenizer_is_raw(t, map, id) != raw) { continue; }
        writer_printf(w, "%s", comma);
        if (raw) {
            json_write_string(w, (const char*)t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id]);
        } else {
            writer_put(w, "\"", 1);
            tokenizer_write_token(t, map, (uint32_t)id, true, w);
            writer_put(w, "\"", 1);
        }
        writer_printf(w, ": %d", id);
        comma = ", ";
    }
    writer_printf(w, "}");
}

static inline void tokenizer_write_merges(const Tokenizer* t, const Vocab* map, FileWriter* w) {
    writer_printf(w, "#version: 0.2\n");
    for (int r = 0; r < t->num_merges; r++) {
        tokenizer_write_token(t, map, t->merges[2 * r], false, w);
        writer_put(w, " ", 1);
        tokenizer_write_token(t, map, t->merges[2 * r + 1], false, w);
        writer_put(w, "\n", 1);
    }
}

static inline void tokenizer_write_bin(const Tokenizer* t, FileWriter* w) {
    int32_t h[256] = {TOKENIZER_BIN_MAGIC, t->eot_id < 0 ? 1 : 2, t->vocab_size, t->eot_id < 0 ? 0 : t->eot_id};
    writer_put(w, h, sizeof(h));
    for (int id = 0; id < t->vocab_size; id++) {
        uint8_t length = (uint8_t)(t->offsets[id + 1] - t->offsets[id]);
        writer_put(w, &length, 1);
        writer_put(w, t->bytes + t->offsets[id], length);
    }
}

// tokenizer_read_config() reads eos_token. Hugging Face's GPT2Tokenizer reads all three, and adds <|endoftext|> as a new
// token for one that is not there.
static inline void tokenizer_write_config(const Tokenizer* t, FileWriter* w) {
    static const char* const keys[] = {"bos_token", "eos_token", "unk_token"};
    for (int i = 0; i < 3 && t->eot_id >= 0; i++) {
        uint32_t start = t->offsets[t->eot_id];
        writer_printf(w, "%s\"%s\": ", i ? ", " : "{", keys[i]);
        json_write_string(w, (const char*)t->bytes + start, t->offsets[t->eot_id + 1] - start);
    }
    writer_printf(w, t->eot_id >= 0 ? "}\n" : "{}\n");
}

typedef enum { TOKENIZER_VOCAB, TOKENIZER_ADDED, TOKENIZER_MERGES, TOKENIZER_BIN, TOKENIZER_CONFIG } TokenizerFile;

// Writes the file under a temporary name and renames it, so that an existing file stays intact until the new one is
// complete.
static inline bool tokenizer_write_file(const Tokenizer* t, const Vocab* map, const char* dir, const char* name,
                                        TokenizerFile kind, Error* err) {
    Path path, tmp;
    FileWriter w;
    if (!path_set(&path, "%s/%s", dir, name) || !path_set(&tmp, "%s.tmp", path.text)) {
        return error_set(err, "%.64s...: the path is too long", dir);
    }
    if (!writer_open(&w, tmp.text, err)) { return false; }
    if (kind == TOKENIZER_VOCAB || kind == TOKENIZER_ADDED) {
        tokenizer_write_json(t, map, kind == TOKENIZER_ADDED, &w);
    } else if (kind == TOKENIZER_MERGES) {
        tokenizer_write_merges(t, map, &w);
    } else if (kind == TOKENIZER_CONFIG) {
        tokenizer_write_config(t, &w);
    } else {
        tokenizer_write_bin(t, &w);
    }
    bool ok = writer_close(&w, err);
    if (ok && rename(tmp.text, path.text) != 0) {
        ok = error_set(err, "%s: cannot rename %s: %s", path.text, tmp.text, strerror(errno));
    }
    if (!ok) { unlink(tmp.text); }
    return ok;
}

// Writes dir/vocab.json and dir/merges.txt in GPT-2's format, and dir/added_tokens.json if these two cannot represent
// all tokens, and dir/tokenizer_config.json if loading would give another end-of-text without it. A vocabulary that can
// only decode is written as dir/gpt2_tokenizer.bin. dir must exist. Loading dir gives the same tokenizer again.
static inline bool tokenizer_save(const Tokenizer* t, const char* dir, Error* err) {
    Vocab map; // only its byte map is used
    vocab_init(&map);
    if (!t->can_encode) { return tokenizer_write_file(t, &map, dir, "gpt2_tokenizer.bin", TOKENIZER_BIN, err); }
    bool raw = false;
    for (int id = 0; id < t->vocab_size; id++) { raw = raw || tokenizer_is_raw(t, &map, id); }
    Tokenizer loaded = *t; // only eot_id differs: what loading dir would set it to
    loaded.eot_id = tokenizer_find(t, TOKENIZER_EOT, strlen(TOKENIZER_EOT));
    if (!tokenizer_read_config(&loaded, dir, err)) { return false; }
    return tokenizer_write_file(t, &map, dir, "vocab.json", TOKENIZER_VOCAB, err) &&
           tokenizer_write_file(t, &map, dir, "merges.txt", TOKENIZER_MERGES, err) &&
           (!raw || tokenizer_write_file(t, &map, dir, "added_tokens.json", TOKENIZER_ADDED, err)) &&
           (loaded.eot_id == t->eot_id ||
            tokenizer_write_file(t, &map, dir, "tokenizer_config.json", TOKENIZER_CONFIG, err));
}

#endif
