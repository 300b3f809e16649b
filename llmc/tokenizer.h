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
tokenizer_encode() knows no added tokens: the text "<|endoftext|>" is encoded as ordinary characters. Programs call
tokenizer_encode_text(), which turns text that spells an added token into it, special ones only on demand.

Reads tokenizer.json, vocab.json + merges.txt, encoder.json + vocab.bpe, merges.txt alone, and llm.c's tokenizer.bin
(decode only). In a directory with tokenizer.json, the others must say the same. Added tokens and their flags come from
tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json. End-of-text is the eos_token of
these files, or else <|endoftext|>.
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

// The flags of a token, with the meaning that AddedToken of Hugging Face's tokenizers gives them.
enum {
    TOKEN_ADDED = 1,   // files spell it literally instead of through the byte map, and text that spells it becomes it
    TOKEN_SPECIAL = 2, // text becomes it only on demand
    TOKEN_LSTRIP = 4,  // includes the white space on its left
    TOKEN_RSTRIP = 8,  // includes the white space on its right
    TOKEN_SINGLE_WORD = 16, // only where no character of a word stands beside it
    TOKEN_NORMALIZED = 32,  // is searched after the tokens without this flag, in the text between them
};

// A slot of the hash table of merges: the adjacent tokens left, right are merged into the token id.
typedef struct {
    uint32_t left, right; // left is UINT32_MAX in an empty slot
    uint32_t rank;        // index in merges.txt; lower ranks are merged first
    uint32_t id;
} MergeSlot;

// An added token, in the order of the bytes that spell it.
typedef struct {
    const uint8_t* bytes; // (n)
    uint32_t n;
    int id;
} AddedToken;

// Added tokens that text is searched for together.
typedef struct {
    AddedToken* tokens; // (count), sorted
    size_t count, longest;
    uint32_t first[257];       // tokens[first[b]] to tokens[first[b + 1] - 1] begin with byte b
    int only_first;            // the byte that all of them begin with; -1: several
    bool short_ones[256];      // whether a token of one or two bytes begins with this byte
    uint8_t prefixes[1 << 16]; // whether the first three bytes of a token have this hash
} AddedTokens;

typedef struct {
    int vocab_size;             // V
    int eot_id;                 // id of end-of-text, the token that precedes every document; -1 if there is none
    int bos_id, pad_id, unk_id; // ids of the other tokens that files name by their use; -1 if they name none
    bool can_encode;            // false if read from a tokenizer.bin, which has no merges
    uint32_t fingerprint[2];    // checksums of tokens and merges: equal for equal vocabularies
    uint32_t flags_sum;         // checksum of flags: equal if both vocabularies find the same added tokens in a text

    uint8_t* bytes;    // bytes of all tokens, concatenated
    uint32_t* offsets; // (V+1) token i is bytes[offsets[i] .. offsets[i+1]-1]
    uint8_t* flags;    // (V) TOKEN_ADDED and so on; 0: a token that only merges or bytes make
    uint32_t* merges;  // (num_merges, 2) ids of left and right, sorted by rank
    int num_merges;
    AddedTokens* added; // (2) the tokens with flags: without TOKEN_NORMALIZED, and with it
    MergeSlot* slots;   // (1 << slot_bits) hash table with open addressing, at most half full
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
    size_t spelled;          // number of special tokens that were passed over, because they were not asked for
    int spelled_id;          // the first of them
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

static inline void token_buffer_put(TokenBuffer* b, uint32_t id) {
    token_buffer_reserve(b, 1);
    b->ids[b->count++] = id;
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

// Returns the last position c, 0 < c < n, where a piece ends whatever precedes and follows these n bytes; 0 if there is
// none. A piece always ends before white space that follows a non-space character, and between an ASCII letter or digit
// and an ASCII character of another class.
static inline size_t tokenizer_find_piece_end(const Tokenizer* t, const void* text, size_t n) {
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

// ---- added tokens in text -----------------------------------------------------------------------

static inline bool utf8_is_space(const Tokenizer* t, uint32_t code) {
    return code != UINT32_MAX && t->char_class[code] == CLASS_SPACE;
}

// True for a character of a word, as \w matches it: what a token with TOKEN_SINGLE_WORD may not stand beside.
static inline bool utf8_is_word(const Tokenizer* t, uint32_t code) {
    if (code == UINT32_MAX) { return false; }
    size_t low = 0, high = sizeof(unicode_word_parts) / sizeof(UnicodeRange);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (unicode_word_parts[middle].last < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool part = low < sizeof(unicode_word_parts) / sizeof(UnicodeRange) && unicode_word_parts[low].first <= code;
    return part || t->char_class[code] == CLASS_LETTER;
}

// Returns the character at p, or UINT32_MAX if there is none. *length: its number of bytes, 0 at the end.
static inline uint32_t utf8_after(const uint8_t* p, const uint8_t* end, size_t* length) {
    uint32_t code = UINT32_MAX;
    *length = p < end;
    if (p == end) { return UINT32_MAX; }
    size_t n = utf8_decode(p, end, &code);
    if (n > 0) { *length = n; }
    return n > 0 ? code : UINT32_MAX;
}

// The same for the character that ends at p.
static inline uint32_t utf8_before(const uint8_t* begin, const uint8_t* p, size_t* length) {
    uint32_t code;
    *length = p > begin;
    for (size_t n = 1; n <= 4 && n <= (size_t)(p - begin); n++) {
        if (utf8_decode(p - n, p, &code) == n) {
            *length = n;
            return code;
        }
    }
    return UINT32_MAX;
}

static inline int added_compare(const void* a, const void* b) {
    const AddedToken *x = (const AddedToken*)a, *y = (const AddedToken*)b;
    int order = memcmp(x->bytes, y->bytes, x->n < y->n ? x->n : y->n);
    return order ? order : (x->n > y->n) - (x->n < y->n);
}

static inline uint32_t added_hash(const uint8_t* p) {
    return ((uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2]) * 0x9E3779B1u >> 16;
}

// Collects the tokens that have flags: with TOKEN_NORMALIZED if `normalized` is true, otherwise without it.
static inline void added_init(AddedTokens* a, const Tokenizer* t, bool normalized) {
    for (int pass = 0; pass < 2; pass++) { // counts them, then takes them
        a->count = 0;
        for (int id = 0; id < t->vocab_size; id++) {
            if (!t->flags[id] || !(t->flags[id] & TOKEN_NORMALIZED) == normalized) { continue; }
            AddedToken token = {t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id], id};
            if (pass == 1) { a->tokens[a->count] = token; }
            a->count++;
        }
        if (a->count == 0) { return; }
        if (pass == 0) { a->tokens = (AddedToken*)malloc_check(a->count * sizeof(AddedToken)); }
    }
    qsort(a->tokens, a->count, sizeof(AddedToken), added_compare);
    a->only_first = a->tokens[0].bytes[0];
    for (size_t i = 0; i < a->count; i++) {
        int b = a->tokens[i].bytes[0];
        if (b != a->only_first) { a->only_first = -1; }
        if (a->tokens[i].n > a->longest) { a->longest = a->tokens[i].n; }
        if (a->tokens[i].n < 3) {
            a->short_ones[b] = true;
        } else {
            a->prefixes[added_hash(a->tokens[i].bytes)] = 1;
        }
        a->first[b + 1] = (uint32_t)i + 1;
    }
    for (int b = 0; b < 256; b++) {
        if (a->first[b + 1] < a->first[b]) { a->first[b + 1] = a->first[b]; }
    }
}

// Returns the next position from `at` on where a token may begin; n if there is none.
static inline size_t added_skip(const AddedTokens* a, const uint8_t* p, size_t at, size_t n) {
    if (a->only_first >= 0) { // most vocabularies: all begin with '<'
        const void* found = at < n ? memchr(p + at, a->only_first, n - at) : NULL;
        return found ? (size_t)((const uint8_t*)found - p) : n;
    }
    while (at < n && !a->short_ones[p[at]] && (n - at < 3 || !a->prefixes[added_hash(p + at)])) { at++; }
    return at;
}

// Returns the number of tokens in tokens (n), which agree in their first `at` bytes and are longer, whose next byte is
// below `limit`.
static inline size_t added_below(const AddedToken* tokens, size_t n, size_t at, int limit) {
    size_t low = 0;
    while (low < n) {
        size_t middle = (low + n) / 2;
        if (tokens[middle].bytes[at] < limit) {
            low = middle + 1;
        } else {
            n = middle;
        }
    }
    return low;
}

// Returns the longest token that begins at p (n > 0 bytes), or NULL. Sets *partial (may be NULL) if more text could
// make it a longer one.
static inline const AddedToken* added_find(const AddedTokens* a, const uint8_t* p, size_t n, bool* partial) {
    const AddedToken *low = a->tokens + a->first[p[0]], *high = a->tokens + a->first[p[0] + 1], *best = NULL;
    for (size_t at = 1; low < high; at++) { // the tokens from low to high - 1 begin with the first `at` bytes of p
        if (low->n == at) { best = low++; } // sorted, so the shortest comes first
        if (low == high) { break; }
        if (at == n) {
            if (partial) { *partial = true; }
            break;
        }
        if (low->bytes[at] == p[at] && high[-1].bytes[at] == p[at]) { continue; }
        size_t count = (size_t)(high - low);
        high = low + added_below(low, count, at, p[at] + 1);
        low += added_below(low, count, at, p[at]);
    }
    return best;
}

// Encodes text in the order of tokenizers: first it is searched for the added tokens without TOKEN_NORMALIZED (pass 0),
// then what is between them for the others (pass 1), and the rest is encoded by merges.
static inline void tokenizer_encode_pass(const Tokenizer* t, const uint8_t* text, size_t n, int pass, bool special,
                                         TokenBuffer* out) {
    const AddedTokens* a = &t->added[pass < 2 ? pass : 1];
    if (pass == 2) { tokenizer_encode(t, text, n, out); }
    if (pass < 2 && a->count == 0) { tokenizer_encode_pass(t, text, n, pass + 1, special, out); }
    if (pass == 2 || a->count == 0) { return; }
    size_t done = 0, length; // done: end of the last token
    for (size_t at = 0; (at = added_skip(a, text, at, n)) < n;) {
        const AddedToken* found = added_find(a, text + at, n - at, NULL);
        if (!found) {
            at++;
            continue;
        }
        size_t begin = at, end = at + found->n;
        int flags = t->flags[found->id];
        at = end; // a token that does not count hides those that begin within it
        if ((flags & TOKEN_SINGLE_WORD) && (utf8_is_word(t, utf8_before(text, text + begin, &length)) ||
                                            utf8_is_word(t, utf8_after(text + end, text + n, &length)))) {
            continue;
        }
        if ((flags & TOKEN_SPECIAL) && !special) {
            if (out->spelled++ == 0) { out->spelled_id = found->id; }
            continue;
        }
        while ((flags & TOKEN_LSTRIP) && begin > done && utf8_is_space(t, utf8_before(text, text + begin, &length))) {
            begin -= length;
        }
        while ((flags & TOKEN_RSTRIP) && utf8_is_space(t, utf8_after(text + end, text + n, &length))) { end += length; }
        if ((flags & TOKEN_LSTRIP) && begin < done) { begin = done; } // white space that the token before includes
        if (begin >= end) { continue; }
        if (done < begin) { tokenizer_encode_pass(t, text + done, begin - done, pass + 1, special, out); }
        token_buffer_put(out, (uint32_t)found->id);
        done = end;
    }
    if (done < n) { tokenizer_encode_pass(t, text + done, n - done, pass + 1, special, out); }
}

// Appends the ids of text (n arbitrary bytes) to out: like tokenizer_encode(), but text that spells an added token
// becomes this token; one that spells a special token only if `special` is true, otherwise it adds to out->spelled.
static inline void tokenizer_encode_text(const Tokenizer* t, const void* text, size_t n, bool special,
                                         TokenBuffer* out) {
    tokenizer_encode_pass(t, (const uint8_t*)text, n, 0, special, out);
}

// True if the tokens (n) are white space. Only that of ASCII counts.
static inline bool tokenizer_is_blank(const Tokenizer* t, const uint32_t* ids, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (uint32_t k = t->offsets[ids[i]]; k < t->offsets[ids[i] + 1]; k++) {
            if (t->byte_class[t->bytes[k]] != CLASS_SPACE) { return false; }
        }
    }
    return true;
}

// Appends a document's tokens to out: end-of-text, then those of its text. If starts is false, the text continues a
// document. With `special`, an end-of-text that is spelled in the text begins another document, and documents of nothing
// but white space, such as the last line break after an end-of-text, are left out. Returns the number of documents that
// begin.
static inline size_t tokenizer_encode_document(const Tokenizer* t, const void* text, size_t n, bool starts,
                                               bool special, TokenBuffer* out) {
    size_t first = out->count, eot = (size_t)t->eot_id, documents = 0, kept = first;
    if (starts) { token_buffer_put(out, (uint32_t)eot); }
    size_t at = out->count;
    tokenizer_encode_text(t, text, n, special, out);
    bool separates = special && t->eot_id >= 0 && (t->flags[eot] & TOKEN_SPECIAL);
    while (separates && at < out->count && out->ids[at] != eot) { at++; }
    if (!separates || at == out->count) { return starts; }
    for (size_t i = first, end; i < out->count; i = end) {
        bool begins = out->ids[i] == eot;
        for (end = i + 1; end < out->count && out->ids[end] != eot;) { end++; }
        if (begins && tokenizer_is_blank(t, out->ids + i + 1, end - i - 1)) { continue; }
        memmove(out->ids + kept, out->ids + i, (end - i) * sizeof(out->ids[0]));
        kept += end - i;
        documents += begins;
    }
    out->count = kept;
    return documents;
}

// True if the text (n bytes, followed by more) can be cut at position c, where a piece ends, without a change of its
// added tokens, with or without the special ones, and of the white space beside them.
static inline bool tokenizer_added_allow_cut(const Tokenizer* t, const uint8_t* p, size_t n, size_t c) {
    size_t length;
    bool word_before = utf8_is_word(t, utf8_before(p, p + c, &length));
    bool word_after = utf8_is_word(t, utf8_after(p + c, p + n, &length));
    for (int k = 0; k < 2; k++) {
        const AddedTokens* a = &t->added[k];
        for (size_t i = c > a->longest ? c - a->longest : 0; a->count > 0 && i <= c; i++) {
            bool partial = false;
            const AddedToken* found = added_find(a, p + i, n - i, &partial);
            if (i == c && (found || partial) && word_before) { return false; } // it may have to be a single word
            if (i == c || (!found && !partial)) { continue; }
            if (partial || i + found->n > c) { return false; }
            int flags = t->flags[found->id];
            bool ends = i + found->n == c;
            if (ends && ((flags & TOKEN_RSTRIP) || found->id == t->eot_id)) { return false; }
            if (ends && (flags & TOKEN_SINGLE_WORD) && word_after) { return false; }
        }
    }
    return true;
}

// Returns the last position c, 0 < c < n, at which a text can be cut for encoding in chunks, by
// tokenizer_encode_document() too: the ids of text[0..c) and of the rest are those of the whole, whatever precedes and
// follows these n bytes. Neither part of it is blank after an end-of-text. Returns 0 if there is none.
static inline size_t tokenizer_find_cut(const Tokenizer* t, const void* text, size_t n) {
    size_t c = n;
    do {
        c = tokenizer_find_piece_end(t, text, c);
    } while (c > 0 && !tokenizer_added_allow_cut(t, (const uint8_t*)text, n, c));
    return c;
}

// Prints a note if special tokens (spelled: how many, id: the first) became ordinary text. where: the text's name. For
// programs that have --special.
static inline void tokenizer_note_spelled(const Tokenizer* t, const char* where, size_t spelled, int id) {
    char name[64];
    if (spelled == 0) { return; }
    json_printable(name, sizeof(name), (const char*)t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id]);
    print_line(stderr,
               "note: %s: spells special tokens, %zu in all, the first %s, as ordinary text: --special makes "
               "them tokens",
               where, spelled, name);
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
    uint8_t flags; // TOKEN_ADDED and so on
    bool indexed;  // whether it is in the index, so that merges can refer to it
    bool seen;     // a listed token that the model's vocabulary contains too
} VocabEntry;

// The tokens that tokenizer_config.json names by their use: "eos_token": "<|endoftext|>", ...
enum { ROLE_EOS, ROLE_BOS, ROLE_PAD, ROLE_UNK, NUM_ROLES };
static const char* const tokenizer_role_keys[] = {"eos_token", "bos_token", "pad_token", "unk_token", // NUM_ROLES, then
                                                  "sep_token", "cls_token", "mask_token"}; // others that are special

// How files spell the flags of an added token.
static const struct {
    const char* key;
    int flag;
} tokenizer_flag_keys[] = {{"special", TOKEN_SPECIAL},
                           {"lstrip", TOKEN_LSTRIP},
                           {"rstrip", TOKEN_RSTRIP},
                           {"single_word", TOKEN_SINGLE_WORD},
                           {"normalized", TOKEN_NORMALIZED}};
enum { NUM_FLAG_KEYS = sizeof(tokenizer_flag_keys) / sizeof(tokenizer_flag_keys[0]) };

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
    int role_ids[NUM_ROLES];   // -1: no token has this role
    bool lists_special;        // the files list all special tokens; otherwise those that no merge makes are special
} Vocab;

// Initializes an empty vocabulary and GPT-2's byte map: printable bytes map to themselves, the other 68 to code points
// from 256 on, so that no token in a file contains white space or control characters.
static inline void vocab_init(Vocab* v) {
    memset(v, 0, sizeof(*v));
    for (int i = 0; i < NUM_ROLES; i++) { v->role_ids[i] = -1; }
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

// Adds a token to v; its n bytes are in the scratch space. Fails if the index already has this token. A token with
// TOKEN_ADDED is not in the index.
static inline bool vocab_add(Vocab* v, size_t n, int64_t id, int flags, const char* where, Error* err) {
    const uint8_t* bytes = vocab_scratch(v, n);
    bool indexed = !(flags & TOKEN_ADDED);
    const char* reason = n == 0                                ? "is empty"
                         : id < 0 || id >= TOKENIZER_MAX_VOCAB ? "has an id outside 0 to 1048575"
                         : v->count == TOKENIZER_MAX_VOCAB     ? "is one too many: 1048576 is the limit"
                         : indexed && vocab_find(v, bytes, n)  ? "occurs twice"
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
            if (e->indexed) { *vocab_slot(v, v->bytes + e->offset, e->length) = (uint32_t)i + 1; }
        }
    }
    VocabEntry entry = {v->num_bytes, (uint32_t)n, (uint32_t)id, (uint8_t)flags, indexed, false};
    if (indexed) { *vocab_slot(v, bytes, n) = (uint32_t)v->count + 1; }
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
        if (!vocab_add(v, n, (int64_t)v->count, 0, where, err)) { return false; }
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
        vocab_add(v, 1, (int64_t)v->count, 0, "bytes", NULL);
    }
}

static inline bool vocab_add_eot(Vocab* v, const char* where, Error* err) {
    size_t n = strlen(TOKENIZER_EOT);
    memcpy(vocab_scratch(v, n), TOKENIZER_EOT, n);
    return vocab_add(v, n, (int64_t)v->count, TOKEN_ADDED | TOKEN_SPECIAL, where, err);
}

// ---- building the tokenizer from a vocabulary ---------------------------------------------------

static inline void tokenizer_free(Tokenizer* t) {
    free(t->bytes);
    free(t->offsets);
    free(t->flags);
    free(t->merges);
    for (int k = 0; k < 2 && t->added; k++) { free(t->added[k].tokens); }
    free(t->added);
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
    t->flags = (uint8_t*)calloc_check(V, 1);
    for (size_t id = 0; id < V; id++) {
        const VocabEntry* e = &v->entries[by_id[id] - 1];
        memcpy(t->bytes + t->offsets[id], v->bytes + e->offset, e->length);
        t->offsets[id + 1] = t->offsets[id] + e->length;
        t->flags[id] = e->flags;
    }
    t->eot_id = v->role_ids[ROLE_EOS];
    if (t->eot_id < 0) { t->eot_id = tokenizer_find(t, TOKENIZER_EOT, strlen(TOKENIZER_EOT)); }
    t->bos_id = v->role_ids[ROLE_BOS], t->pad_id = v->role_ids[ROLE_PAD], t->unk_id = v->role_ids[ROLE_UNK];
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

// Returns whether each token (V) is a byte or made by a merge. The caller frees the result.
static inline bool* tokenizer_find_made(const Tokenizer* t) {
    bool* made = (bool*)calloc_check((size_t)t->vocab_size, sizeof(bool));
    for (int b = 0; b < 256; b++) { made[t->byte_ids[b]] = true; }
    for (size_t i = 0; i < (size_t)1 << t->slot_bits; i++) {
        if (t->slots[i].left != UINT32_MAX) { made[t->slots[i].id] = true; }
    }
    return made;
}

// Returns the first token whose merge is missing, as after a merges.txt that was cut at the end of a line, or -1 if there is
// none. Sets *count to the number of tokens without a merge that no file lists as added or special.
// The first token whose merge was cut off still encodes to exactly two tokens. An unlisted <s>, [PAD] or <|endoftext|> encodes
// to at least three, because GPT-2's expression separates letters and punctuation, so no merge joins them. A word that was a
// special token in training, such as SG, may encode to two, but its id is below those of all merged tokens, so it is skipped.
static inline int tokenizer_missing_merge(const Tokenizer* t, size_t* count) {
    bool* made = tokenizer_find_made(t);
    bool begun = t->num_merges == 0; // true once a merged token has been seen
    int first = -1;
    *count = 0;
    for (int id = 0; id < t->vocab_size; id++) {
        size_t n = t->offsets[id + 1] - t->offsets[id];
        begun |= made[id] && n > 1;
        if (!begun || made[id] || t->flags[id]) { continue; }
        ++*count;
        if (first >= 0) { continue; }
        uint32_t* ids = (uint32_t*)malloc_check(n * sizeof(uint32_t));
        if (tokenizer_merge(t, t->bytes + t->offsets[id], n, ids) == 2) { first = id; }
        free(ids);
    }
    free(made);
    return first;
}

static inline bool tokenizer_check_merges(const Tokenizer* t, const char* where, Error* err) {
    char name[64];
    size_t count;
    int id = tokenizer_missing_merge(t, &count);
    if (id < 0) { return true; }
    json_printable(name, sizeof(name), (const char*)t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id]);
    return error_set(
        err,
        "%s: tokens without a merge: %zu, the first '%s' (id %d): is the file complete? Added tokens must be "
        "listed, in added_tokens.json for example",
        where, count, name, id);
}

// Marks as special the tokens that no merge makes, such as <|endoftext|>: all of them, or, if the files list the special
// tokens, only end-of-text.
static inline void tokenizer_mark_special(Tokenizer* t, bool only_eot) {
    bool* made = tokenizer_find_made(t);
    for (int id = 0; id < t->vocab_size; id++) {
        if (!t->flags[id] && !made[id] && (!only_eot || id == t->eot_id)) { t->flags[id] = TOKEN_SPECIAL; }
    }
    free(made);
}

// What a token's flags do to a text: for a special token, TOKEN_ADDED only says how files spell it.
static inline uint8_t tokenizer_effect(uint8_t flags) {
    return (uint8_t)(flags & TOKEN_SPECIAL ? flags & ~TOKEN_ADDED : flags);
}

// A checksum of these effects. The order of the search matters only if there are several tokens to search for.
static inline uint32_t tokenizer_sum_flags(const Tokenizer* t) {
    int count = 0;
    uint32_t sum = 0;
    for (int id = 0; id < t->vocab_size; id++) { count += t->flags[id] != 0; }
    for (int id = 0; id < t->vocab_size; id++) {
        uint8_t effect = tokenizer_effect(t->flags[id]);
        if (count == 1) { effect &= (uint8_t)~TOKEN_NORMALIZED; }
        sum = crc32c(sum, &effect, 1);
    }
    return sum;
}

// Sets what follows from the flags.
static inline void tokenizer_use_flags(Tokenizer* t) {
    t->flags_sum = tokenizer_sum_flags(t);
    for (int k = 0; k < 2 && t->can_encode; k++) {
        free(t->added[k].tokens);
        memset(&t->added[k], 0, sizeof(t->added[k]));
        added_init(&t->added[k], t, k == 1);
    }
}

// Makes another token, 0 <= id < V, end-of-text. It is a special token then, as it is to those who read the saved files.
static inline void tokenizer_set_eot(Tokenizer* t, int id) {
    t->eot_id = id;
    t->flags[id] |= TOKEN_SPECIAL;
    tokenizer_use_flags(t);
}

// Builds t from v. Frees v in any case. On failure t is zeroed.
static inline bool tokenizer_build(Tokenizer* t, Vocab* v, bool can_encode, const char* where, Error* err) {
    memset(t, 0, sizeof(*t));
    const char* merges_where = v->merges_where ? v->merges_where : where;
    bool ok = tokenizer_set_tokens(t, v, where, err) &&
              (!can_encode || (tokenizer_set_merges(t, v, where, err) && tokenizer_check_merges(t, merges_where, err)));
    if (ok && can_encode) { tokenizer_mark_special(t, v->lists_special); }
    vocab_free(v);
    if (!ok) {
        tokenizer_free(t);
        return false;
    }
    tokenizer_fill_classes(t);
    t->added = (AddedTokens*)calloc_check(2, sizeof(AddedTokens));
    t->fingerprint[0] = crc32c(0, t->bytes, t->offsets[t->vocab_size]);
    t->fingerprint[1] = crc32c(0, t->offsets, (size_t)(t->vocab_size + 1) * sizeof(uint32_t));
    if (can_encode) {
        t->fingerprint[1] = crc32c(t->fingerprint[1], t->merges, 2 * (size_t)t->num_merges * sizeof(uint32_t));
    }
    tokenizer_use_flags(t);
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

// Returns whether each id stands for the same token in b as in a and, if both can encode, whether their merges are the same.
// If not, writes the first difference to what (size).
static inline bool tokenizer_same(const Tokenizer* a, const Tokenizer* b, char* what, size_t size) {
    char here[64], there[64];
    bool merges = a->can_encode && b->can_encode;
    if (a->vocab_size != b->vocab_size) {
        snprintf(what, size, "%d tokens instead of %d", b->vocab_size, a->vocab_size);
        return false;
    }
    for (int id = 0; id < a->vocab_size; id++) {
        const char *s = (const char*)a->bytes + a->offsets[id], *other = (const char*)b->bytes + b->offsets[id];
        size_t n = a->offsets[id + 1] - a->offsets[id], m = b->offsets[id + 1] - b->offsets[id];
        if (n == m && memcmp(s, other, n) == 0) { continue; }
        json_printable(there, sizeof(there), s, n);
        json_printable(here, sizeof(here), other, m);
        snprintf(what, size, "token %d is '%s' instead of '%s'", id, here, there);
        return false;
    }
    if (merges && a->num_merges != b->num_merges) {
        snprintf(what, size, "%d merges instead of %d", b->num_merges, a->num_merges);
        return false;
    }
    for (int r = 0; merges && r < a->num_merges; r++) {
        if (memcmp(a->merges + 2 * (size_t)r, b->merges + 2 * (size_t)r, 2 * sizeof(uint32_t)) == 0) { continue; }
        snprintf(what, size, "merge %d joins different tokens", r + 1);
        return false;
    }
    return true;
}

// ---- reading ------------------------------------------------------------------------------------

// The files of a vocabulary. Those before TOKENIZER_NUM_TEXTS are read together, by tokenizer_parse().
typedef enum {
    TOKENIZER_JSON,   // tokenizer.json, of Hugging Face's tokenizers: tokens, merges and added tokens
    TOKENIZER_VOCAB,  // vocab.json or encoder.json: {"token": id, ...}
    TOKENIZER_MERGES, // merges.txt or vocab.bpe
    TOKENIZER_ADDED,  // added_tokens.json: {"token": id, ...}, spelled literally
    TOKENIZER_CONFIG, // tokenizer_config.json: the flags of the added tokens, and which one is end-of-text
    TOKENIZER_MAP,    // special_tokens_map.json: which tokens are special
    TOKENIZER_NUM_TEXTS,
    TOKENIZER_BIN = TOKENIZER_NUM_TEXTS, // llm.c's tokenizer.bin
    TOKENIZER_NUM_FILES,
} TokenizerFile;

// The text of a file in memory.
typedef struct {
    const char* text; // (n); NULL if the file does not exist
    size_t n;
    const char* where; // its path, for messages
} TokenizerText;

// Returns the next line of merges.txt that holds a merge, *n bytes without its end, or NULL at the end of the file. *at
// and *line, zero before the first call, are the position and the number of the line.
static inline const char* tokenizer_next_merge(TokenizerText f, size_t* at, size_t* line, size_t* n) {
    size_t end = f.n; // of the last character that is not blank
    while (end > 0 && memchr(" \t\r\n", f.text[end - 1], 4)) { end--; }
    const char* blank_lines = (const char*)memchr(f.text + end, '\n', f.n - end);
    if (blank_lines) { f.n = (size_t)(blank_lines - f.text); }
    while (*at < f.n) {
        const char* s = f.text + *at;
        const char* newline = (const char*)memchr(s, '\n', f.n - *at);
        *n = newline ? (size_t)(newline - s) : f.n - *at;
        *at += *n + 1;
        if (*n > 0 && s[*n - 1] == '\r') { --*n; }
        if (++*line > 1 || *n < 9 || memcmp(s, "#version:", 9) != 0) { return s; }
    }
    return NULL;
}

// Reads merges.txt: a line "#version: ...", then one "left right" per line.
static inline bool tokenizer_read_merges(Vocab* v, TokenizerText f, bool grow, Error* err) {
    char where[1100];
    size_t at = 0, line = 0, n = 0;
    v->merges_where = f.where;
    for (const char* s; (s = tokenizer_next_merge(f, &at, &line, &n)) != NULL;) {
        snprintf(where, sizeof(where), "%.1000s:%zu", f.where, line);
        const char* space = (const char*)memchr(s, ' ', n);
        size_t left = space ? (size_t)(space - s) : 0;
        if (left == 0 || left + 1 == n || memchr(space + 1, ' ', n - left - 1)) {
            return error_set(err, "%s: want two tokens with one space between them", where);
        }
        if (!vocab_add_merge(v, s, left, space + 1, n - left - 1, grow, where, err)) { return false; }
    }
    return true;
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

// ---- added tokens -------------------------------------------------------------------------------

// The flags of an added token: members of the object, such as "special": true.
static inline int tokenizer_read_flags(const JsonValue* object) {
    int flags = TOKEN_ADDED;
    for (int i = 0; i < NUM_FLAG_KEYS; i++) {
        const JsonValue* v = json_get(object, tokenizer_flag_keys[i].key);
        bool unsaid = !v || v->type != JSON_BOOL;
        int flag = tokenizer_flag_keys[i].flag;
        bool on = unsaid ? flag == TOKEN_NORMALIZED && !(flags & TOKEN_SPECIAL) : v->boolean;
        flags |= on ? flag : 0;
    }
    return flags;
}

static inline bool tokenizer_two_ids(const char* where, const char* token, size_t n, int64_t a, int64_t b, Error* err) {
    char name[128];
    json_printable(name, sizeof(name), token, n);
    return error_set(err, "%s: token '%s' has two ids, %lld and %lld", where, name, (long long)a, (long long)b);
}

// Lists an added token. If `replace` is true, a token that is listed already takes these flags.
static inline bool tokenizer_list_token(Vocab* listed, const char* s, size_t n, int64_t id, int flags, bool replace,
                                        const char* where, Error* err) {
    VocabEntry* known = replace ? vocab_find(listed, (const uint8_t*)s, n) : NULL;
    if (known && known->id != (uint64_t)id) { return tokenizer_two_ids(where, s, n, known->id, id, err); }
    if (!known) {
        memcpy(vocab_scratch(listed, n), s, n);
        if (!vocab_add(listed, n, id, 0, where, err)) { return false; }
        known = &listed->entries[listed->count - 1];
    }
    known->flags = (uint8_t)flags;
    return true;
}

// "added_tokens" of tokenizer.json: [{"id": 50256, "content": "<|endoftext|>", "special": true, ...}, ...]
static inline bool tokenizer_list_json(Vocab* listed, const JsonValue* list, const char* where, Error* err) {
    if (!list || list->type == JSON_NULL) { return true; }
    if (list->type != JSON_ARRAY) { return error_set(err, "%s: \"added_tokens\" is not a list", where); }
    for (size_t i = 0; i < list->count; i++) {
        const JsonValue* content = json_get(&list->items[i], "content");
        const JsonValue* id = json_get(&list->items[i], "id");
        if (!content || content->type != JSON_STRING || !id || id->type != JSON_NUMBER || !id->is_int) {
            return error_set(err, "%s: added_tokens[%zu] wants an integer \"id\" and a \"content\"", where, i);
        }
        if (!tokenizer_list_token(listed, content->string, content->length, id->integer,
                                  tokenizer_read_flags(&list->items[i]), false, where, err)) {
            return false;
        }
    }
    return true;
}

// added_tokens.json: {"token": id, ...}. Without other files its tokens are plain ones, except those in `named`.
static inline bool tokenizer_list_object(Vocab* listed, const Vocab* named, const JsonValue* object, const char* where,
                                         Error* err) {
    if (object->type != JSON_OBJECT) { return error_set(err, "%s: want an object {\"token\": id, ...}", where); }
    for (size_t i = 0; i < object->count; i++) {
        const JsonValue* e = &object->items[i];
        char name[128];
        if (e->type != JSON_NUMBER || !e->is_int) {
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: the id of token '%s' is not an integer", where, name);
        }
        bool special = vocab_find(named, (const uint8_t*)e->key, e->key_length);
        int flags = TOKEN_ADDED | (special ? TOKEN_SPECIAL : TOKEN_NORMALIZED);
        if (!tokenizer_list_token(listed, e->key, e->key_length, e->integer, flags, false, where, err)) {
            return false;
        }
    }
    return true;
}

// "added_tokens_decoder" of tokenizer_config.json: {"50256": {"content": "<|endoftext|>", "special": true, ...}, ...}
static inline bool tokenizer_list_decoder(Vocab* listed, const JsonValue* object, const char* where, Error* err) {
    for (size_t i = 0; object && object->type == JSON_OBJECT && i < object->count; i++) {
        const JsonValue *e = &object->items[i], *content = json_get(e, "content");
        int64_t id = 0;
        bool digits = e->key_length > 0 && e->key_length < 8;
        for (size_t k = 0; digits && k < e->key_length; k++) {
            digits = e->key[k] >= '0' && e->key[k] <= '9';
            id = 10 * id + (e->key[k] - '0');
        }
        if (!digits || !content || content->type != JSON_STRING) {
            char name[64];
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: added_tokens_decoder: '%s' wants to be an id with a \"content\"", where, name);
        }
        if (!tokenizer_list_token(listed, content->string, content->length, id, tokenizer_read_flags(e), true, where,
                                  err)) {
            return false;
        }
    }
    return true;
}

// Adds a token, "</s>" or {"content": "</s>", ...}, to those that files name as special. roles: bits 1 << ROLE_EOS and so
// on, kept as the id.
static inline bool tokenizer_add_name(Vocab* named, const JsonValue* v, uint32_t roles, const char* where, Error* err) {
    const JsonValue* content = v && v->type == JSON_OBJECT ? json_get(v, "content") : v;
    if (!content || content->type != JSON_STRING || content->length == 0) { return true; }
    VocabEntry* e = vocab_find(named, (const uint8_t*)content->string, content->length);
    if (!e) {
        memcpy(vocab_scratch(named, content->length), content->string, content->length);
        if (!vocab_add(named, content->length, 0, 0, where, err)) { return false; }
        e = &named->entries[named->count - 1];
        if (v->type == JSON_OBJECT) { e->flags = (uint8_t)(tokenizer_read_flags(v) & ~TOKEN_ADDED); }
    }
    e->id |= roles;
    return true;
}

// Reads the names of special tokens in tokenizer_config.json or special_tokens_map.json.
static inline bool tokenizer_read_names(Vocab* named, const JsonValue* root, const char* where, Error* err) {
    static const char* const lists[] = {"additional_special_tokens", "extra_special_tokens"};
    for (size_t i = 0; i < sizeof(tokenizer_role_keys) / sizeof(tokenizer_role_keys[0]); i++) {
        uint32_t roles = i < NUM_ROLES ? 1u << i : 0;
        if (!tokenizer_add_name(named, json_get(root, tokenizer_role_keys[i]), roles, where, err)) { return false; }
    }
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        const JsonValue* list = json_get(root, lists[i]); // an array, or an object whose keys do not matter
        bool several = list && (list->type == JSON_ARRAY || list->type == JSON_OBJECT);
        for (size_t k = 0; several && k < list->count; k++) {
            if (!tokenizer_add_name(named, &list->items[k], 0, where, err)) { return false; }
        }
    }
    return true;
}

// Gives the named tokens their roles in v and makes them special: those that are listed, or else those of v's index.
static inline void tokenizer_apply_names(Vocab* v, Vocab* named, Vocab* in) {
    for (size_t i = 0; i < named->count; i++) {
        VocabEntry* name = &named->entries[i];
        const uint8_t* s = named->bytes + name->offset;
        VocabEntry* e = vocab_find(in, s, name->length);
        if (name->seen || !e) { continue; }
        name->seen = true;
        e->flags |= TOKEN_SPECIAL | (in == v ? name->flags : 0);
        for (int r = 0; r < NUM_ROLES; r++) {
            if (v->role_ids[r] < 0 && (name->id >> r & 1)) { v->role_ids[r] = (int)e->id; }
        }
    }
}

// ---- several files of one vocabulary ------------------------------------------------------------

// Reads the tokens of {"token": id, ...} into v. A token that is listed too is spelled literally.
static inline bool tokenizer_read_tokens(Vocab* v, const JsonValue* object, Vocab* listed, const char* where,
                                         Error* err) {
    char name[128];
    if (object->type != JSON_OBJECT) { return error_set(err, "%s: want an object {\"token\": id, ...}", where); }
    for (size_t i = 0; i < object->count; i++) {
        const JsonValue* e = &object->items[i];
        if (e->type != JSON_NUMBER || !e->is_int) {
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: the id of token '%s' is not an integer", where, name);
        }
        VocabEntry* same = vocab_find(listed, (const uint8_t*)e->key, e->key_length);
        if (same && same->id != (uint64_t)e->integer) {
            return tokenizer_two_ids(where, e->key, e->key_length, e->integer, same->id, err);
        }
        size_t n = 0;
        bool mapped = vocab_unmap(v, e->key, e->key_length, &n);
        bool literal = mapped && n == e->key_length && memcmp(vocab_scratch(v, n), e->key, n) == 0;
        if (!mapped && !same) {
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err, "%s: token '%s' contains a character that represents no byte", where, name);
        }
        if (same && mapped && n == 1 && !literal) { // like "\u00e9", which spells byte 0xE9
            json_printable(name, sizeof(name), e->key, e->key_length);
            return error_set(err,
                             "%s: added token '%s' has the id of a byte that is spelled so: remove it from the added "
                             "tokens",
                             where, name);
        }
        if (same && !literal) { memcpy(vocab_scratch(v, e->key_length), e->key, n = e->key_length); }
        if (!vocab_add(v, n, e->integer, same && !literal ? TOKEN_ADDED : 0, where, err)) { return false; }
        if (same) {
            same->seen = true;
            v->entries[v->count - 1].flags = same->flags;
        }
    }
    return true;
}

// Adds the listed tokens that the model's vocabulary does not contain.
static inline bool tokenizer_add_listed(Vocab* v, const Vocab* listed, const char* where, Error* err) {
    for (size_t i = 0; i < listed->count; i++) {
        const VocabEntry* e = &listed->entries[i];
        const uint8_t* s = listed->bytes + e->offset;
        if (e->seen) { continue; }
        VocabEntry* known = vocab_find_spelled(v, (const char*)s, e->length); // one that merges.txt alone has made
        if (known && known->id != e->id) {
            return tokenizer_two_ids(where, (const char*)s, e->length, known->id, e->id, err);
        }
        if (known) {
            known->flags = e->flags;
            continue;
        }
        memcpy(vocab_scratch(v, e->length), s, e->length);
        if (!vocab_add(v, e->length, e->id, e->flags, where, err)) { return false; }
    }
    return true;
}

static inline bool tokenizer_differ(const char* where, const char* json, const char* what, Error* err) {
    const char* slash = strrchr(where, '/');
    return error_set(err, "%s: %s in %s, which is used if both are there: remove %s, or tokenizer.json if it is wrong",
                     where, what, json, slash ? slash + 1 : where);
}

// Checks that the tokens of another file (object) have the ids that they have in tokenizer.json, whose model has the
// tokens `model`; and, if `whole` is true, that none of these is missing.
static inline bool tokenizer_compare_tokens(const JsonValue* object, const char* where, const JsonValue* model,
                                            const Vocab* listed, bool whole, const char* json, Error* err) {
    char name[128], what[256];
    if (object->type != JSON_OBJECT) { return error_set(err, "%s: want an object {\"token\": id, ...}", where); }
    for (size_t i = 0; i < object->count; i++) {
        const JsonValue *e = &object->items[i], *same = json_get_n(model, e->key, e->key_length);
        const VocabEntry* added = vocab_find(listed, (const uint8_t*)e->key, e->key_length);
        int64_t id = same ? same->integer : added ? (int64_t)added->id : -1;
        if (e->type == JSON_NUMBER && e->is_int && e->integer == id) { continue; }
        json_printable(name, sizeof(name), e->key, e->key_length);
        snprintf(what, sizeof(what), "token '%s' has id %lld, but %lld%s", name, (long long)e->integer, (long long)id,
                 same || added ? "" : " (none)");
        return tokenizer_differ(where, json, what, err);
    }
    for (size_t i = 0; whole && i < model->count; i++) {
        const JsonValue* e = &model->items[i];
        if (json_get_n(object, e->key, e->key_length) || vocab_find(listed, (const uint8_t*)e->key, e->key_length)) {
            continue;
        }
        json_printable(name, sizeof(name), e->key, e->key_length);
        snprintf(what, sizeof(what), "token '%s' is missing, but has id %lld", name, (long long)e->integer);
        return tokenizer_differ(where, json, what, err);
    }
    return true;
}

// Checks that merges.txt has the merges of tokenizer.json, in the same order.
static inline bool tokenizer_compare_merges(TokenizerText f, const JsonValue* merges, const char* json, Error* err) {
    char here[128], there[128], what[300];
    size_t at = 0, line = 0, n = 0;
    for (size_t r = 0;; r++) {
        const char* s = tokenizer_next_merge(f, &at, &line, &n);
        const JsonValue* m = r < merges->count ? &merges->items[r] : NULL;
        const JsonValue* pair = m && m->type == JSON_ARRAY && m->count == 2 ? m->items : NULL;
        size_t left = pair ? pair[0].length : 0;
        if (!s && !m) { return true; }
        bool same = s && m && m->type == JSON_STRING && m->length == n && memcmp(m->string, s, n) == 0;
        if (s && pair && left + 1 + pair[1].length == n) {
            same = memcmp(s, pair[0].string, left) == 0 && s[left] == ' ' &&
                   memcmp(s + left + 1, pair[1].string, pair[1].length) == 0;
        }
        if (same) { continue; }
        snprintf(here, sizeof(here), "none");
        snprintf(there, sizeof(there), "none");
        if (s) { json_printable(here, sizeof(here), s, n); }
        if (m && m->type == JSON_STRING) { json_printable(there, sizeof(there), m->string, m->length); }
        if (pair) { snprintf(there, sizeof(there), "%.60s %.60s", pair[0].string, pair[1].string); }
        snprintf(what, sizeof(what), "merge %zu is '%s', but '%s'", r + 1, here, there);
        return tokenizer_differ(f.where, json, what, err);
    }
}

// Reads tokens and merges of tokenizer.json, and checks that the files beside it say the same.
static inline bool tokenizer_read_json(Vocab* v, Vocab* listed, const TokenizerText* files, const JsonDoc* docs,
                                       Error* err) {
    const char* where = files[TOKENIZER_JSON].where;
    const JsonValue *root = docs[TOKENIZER_JSON].root, *model = json_get(root, "model"), *tokens, *merges;
    if (!tokenizer_check_json(root, where, err) || !json_want(model, "vocab", JSON_OBJECT, &tokens, where, err) ||
        !json_want(model, "merges", JSON_ARRAY, &merges, where, err) ||
        !tokenizer_read_tokens(v, tokens, listed, where, err) || !tokenizer_add_listed(v, listed, where, err) ||
        !tokenizer_read_json_merges(v, merges, where, err)) {
        return false;
    }
    for (int k = TOKENIZER_VOCAB; k <= TOKENIZER_ADDED; k++) {
        if (!docs[k].root) { continue; }
        if (!tokenizer_compare_tokens(docs[k].root, files[k].where, tokens, listed, k == TOKENIZER_VOCAB, where, err)) {
            return false;
        }
    }
    return !files[TOKENIZER_MERGES].text || tokenizer_compare_merges(files[TOKENIZER_MERGES], merges, where, err);
}

// Reads vocab.json and merges.txt, or merges.txt alone: the 256 bytes, one token per merge, then <|endoftext|>.
static inline bool tokenizer_read_pair(Vocab* v, Vocab* listed, const TokenizerText* files, const JsonDoc* docs,
                                       Error* err) {
    TokenizerText merges = files[TOKENIZER_MERGES];
    const JsonValue* tokens = docs[TOKENIZER_VOCAB].root;
    if (tokens) {
        return tokenizer_read_tokens(v, tokens, listed, files[TOKENIZER_VOCAB].where, err) &&
               tokenizer_add_listed(v, listed, files[TOKENIZER_VOCAB].where, err) &&
               tokenizer_read_merges(v, merges, false, err);
    }
    vocab_add_bytes(v);
    if (!tokenizer_read_merges(v, merges, true, err)) { return false; }
    bool eot = vocab_find(listed, (const uint8_t*)TOKENIZER_EOT, strlen(TOKENIZER_EOT));
    return (eot || vocab_add_eot(v, merges.where, err)) && tokenizer_add_listed(v, listed, merges.where, err);
}

// Lists the added tokens of all files, and the names of the special ones.
static inline bool tokenizer_read_listed(Vocab* listed, Vocab* named, const TokenizerText* files, const JsonDoc* docs,
                                         Error* err) {
    JsonValue eot;
    memset(&eot, 0, sizeof(eot));
    eot.type = JSON_STRING, eot.string = TOKENIZER_EOT, eot.length = sizeof(TOKENIZER_EOT) - 1;
    const JsonValue *json = docs[TOKENIZER_JSON].root, *added = docs[TOKENIZER_ADDED].root;
    const char* config = files[TOKENIZER_CONFIG].where;
    return tokenizer_read_names(named, docs[TOKENIZER_CONFIG].root, config, err) &&
           tokenizer_read_names(named, docs[TOKENIZER_MAP].root, files[TOKENIZER_MAP].where, err) &&
           tokenizer_add_name(named, &eot, 0, "", err) &&
           (!json || tokenizer_list_json(listed, json_get(json, "added_tokens"), files[TOKENIZER_JSON].where, err)) &&
           (json || !added || tokenizer_list_object(listed, named, added, files[TOKENIZER_ADDED].where, err)) &&
           tokenizer_list_decoder(listed, json_get(docs[TOKENIZER_CONFIG].root, "added_tokens_decoder"), config, err);
}

// Builds t from the texts of a vocabulary's files: tokenizer.json, or vocab.json and merges.txt, or merges.txt alone, and
// those that describe added tokens. On false t is zeroed.
static inline bool tokenizer_parse(Tokenizer* t, const TokenizerText files[TOKENIZER_NUM_TEXTS], Error* err) {
    JsonDoc docs[TOKENIZER_NUM_TEXTS];
    Vocab v, listed, named;
    bool ok = true, json = files[TOKENIZER_JSON].text;
    memset(t, 0, sizeof(*t));
    memset(docs, 0, sizeof(docs));
    vocab_init(&v);
    vocab_init(&listed);
    vocab_init(&named);
    for (int k = 0; k < TOKENIZER_NUM_TEXTS && ok; k++) {
        TokenizerText f = files[k];
        ok = k == TOKENIZER_MERGES || !f.text || json_parse(&docs[k], f.text, f.n, f.where, err);
    }
    ok = ok && tokenizer_read_listed(&listed, &named, files, docs, err);
    if (ok) { tokenizer_apply_names(&v, &named, &listed); }
    ok = ok && (json ? tokenizer_read_json : tokenizer_read_pair)(&v, &listed, files, docs, err);
    if (ok) { tokenizer_apply_names(&v, &named, &v); }
    v.lists_special = json || json_get(docs[TOKENIZER_CONFIG].root, "added_tokens_decoder");
    for (int k = 0; k < TOKENIZER_NUM_TEXTS; k++) { json_free(&docs[k]); }
    vocab_free(&listed);
    vocab_free(&named);
    const char* where = files[json                          ? TOKENIZER_JSON
                              : files[TOKENIZER_VOCAB].text ? TOKENIZER_VOCAB
                                                            : TOKENIZER_MERGES]
                            .where;
    if (ok) { return tokenizer_build(t, &v, true, where, err); }
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
        if (!fits || !vocab_add(&v, length, i, TOKEN_ADDED, f.where, err)) {
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

// Returns what a file (n bytes) is if it is a vocabulary of another kind than GPT-2's; NULL otherwise.
static inline const char* tokenizer_other_kind(const char* p, size_t n) {
    static const char* const sentencepiece[] = {"<unk>\t", "<pad>\t", "<s>\t"};       // its .vocab
    if (n >= 8 && p[0] == '\n' && p[2] == '\n' && memchr(p, 0x15, n < 64 ? n : 64)) { // fields 1, 1.1 and 1.2
        return "is a model of SentencePiece";
    }
    for (size_t i = 0; i < sizeof(sentencepiece) / sizeof(sentencepiece[0]); i++) {
        if (n > strlen(sentencepiece[i]) && memcmp(p, sentencepiece[i], strlen(sentencepiece[i])) == 0) {
            return "is a vocabulary of SentencePiece";
        }
    }
    if (n >= 7 && memcmp(p + 2, "== 0", 4) == 0 && (p[6] == '\n' || p[6] == '\r')) { // a byte in base64
        return "is a vocabulary of tiktoken";
    }
    return n >= 6 && (memcmp(p, "[PAD]\n", 6) == 0 || memcmp(p, "[UNK]\n", 6) == 0) ? "is a vocabulary of BERT" : NULL;
}

static inline bool tokenizer_map(MappedFile* file, TokenizerText* text, const char* path, Error* err) {
    if (!map_file(file, path, err)) { return false; }
    const char* p = (const char*)file->data;
    const char* reason = file->size == 0                   ? "is empty"
                         : file->size > TOKENIZER_MAX_FILE ? "is larger than 256 MiB"
                                                           : NULL;
    if (file->size >= 8 && memcmp(p, "version ", 8) == 0) { reason = "is a git-LFS pointer; fetch the file itself"; }
    if (file->size >= 2 && p[0] == '<' && p[1] != ' ') { reason = "is a web page, not a vocabulary"; }
    const char* other = tokenizer_other_kind(p, file->size);
    if (reason || other) {
        unmap_file(file);
        return error_set(
            err, "%s: %s%s", path, other ? other : reason,
            other ? ": only byte-level BPE like GPT-2's is supported, in tokenizer.json or vocab.json + merges.txt"
                  : "");
    }
    size_t mark = file->size >= 3 && memcmp(p, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0; // a byte order mark is no text
    TokenizerText whole = {p + mark, file->size - mark, path};
    *text = whole;
    return true;
}

// The files of a vocabulary that exist.
typedef struct {
    Path paths[TOKENIZER_NUM_FILES]; // "": does not exist
    MappedFile maps[TOKENIZER_NUM_FILES];
    TokenizerText texts[TOKENIZER_NUM_FILES];
} TokenizerFiles;

// Takes dir/name as the file of this kind if it is there and none was taken before.
static inline bool tokenizer_take(TokenizerFiles* f, TokenizerFile kind, const char* dir, const char* name,
                                  Error* err) {
    Path path;
    if (!path_set(&path, "%s/%s", dir, name)) { return error_set(err, "%.64s...: the path is too long", dir); }
    if (!f->paths[kind].text[0] && file_exists(path.text)) { f->paths[kind] = path; }
    return true;
}

static const struct {
    TokenizerFile kind;
    const char* name;
} tokenizer_names[] = {{TOKENIZER_JSON, "tokenizer.json"},
                       {TOKENIZER_VOCAB, "vocab.json"},
                       {TOKENIZER_VOCAB, "encoder.json"},
                       {TOKENIZER_MERGES, "merges.txt"},
                       {TOKENIZER_MERGES, "vocab.bpe"},
                       {TOKENIZER_ADDED, "added_tokens.json"},
                       {TOKENIZER_CONFIG, "tokenizer_config.json"},
                       {TOKENIZER_MAP, "special_tokens_map.json"},
                       {TOKENIZER_BIN, "gpt2_tokenizer.bin"},
                       {TOKENIZER_BIN, "tokenizer.bin"}};
enum { TOKENIZER_NUM_NAMES = sizeof(tokenizer_names) / sizeof(tokenizer_names[0]) };

// Returns the name of the first file in dir that is of a vocabulary, of its tokens if `tokens` is true; NULL if there is none.
static inline const char* tokenizer_file_in(const char* dir, bool tokens) {
    for (int i = 0; i < TOKENIZER_NUM_NAMES; i++) {
        Path path;
        TokenizerFile kind = tokenizer_names[i].kind;
        bool beside = kind == TOKENIZER_ADDED || kind == TOKENIZER_CONFIG || kind == TOKENIZER_MAP;
        if (!(tokens && beside) && path_set(&path, "%s/%s", dir, tokenizer_names[i].name) && file_exists(path.text)) {
            return tokenizer_names[i].name;
        }
    }
    return NULL;
}

static inline bool tokenizer_find_in_directory(TokenizerFiles* f, const char* dir, Error* err) {
    for (int i = 0; i < TOKENIZER_NUM_NAMES; i++) {
        if (!tokenizer_take(f, tokenizer_names[i].kind, dir, tokenizer_names[i].name, err)) { return false; }
    }
    bool there = f->paths[TOKENIZER_JSON].text[0] || f->paths[TOKENIZER_MERGES].text[0];
    if (there || f->paths[TOKENIZER_BIN].text[0]) { return true; }
    Path model;
    bool other = path_set(&model, "%s/tokenizer.model", dir) && file_exists(model.text);
    return error_set(err, "%s: no vocabulary here: want vocab.json + merges.txt, tokenizer.json or tokenizer.bin%s",
                     dir, other ? "; tokenizer.model is not read" : "");
}

// If path ends in `from`, replaces that ending by `to`. Returns true if the resulting file exists; its path is in out.
static inline bool tokenizer_partner(Path* out, const char* path, const char* from, const char* to) {
    size_t n = strlen(path), k = strlen(from);
    if (n < k || strcmp(path + n - k, from) != 0) { return false; }
    return path_set(out, "%.*s%s", (int)(n - k), path, to) && file_exists(out->text);
}

// Finds out which kind of file path is, by its name or its contents.
static inline bool tokenizer_find_beside(TokenizerFiles* f, const char* path, const char* dir, Error* err) {
    static const char* const pairs[][2] = {{"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};
    Path partner, own;
    MappedFile file;
    TokenizerText text;
    if (!path_set(&own, "%s", path)) { return error_set(err, "%.64s...: the path is too long", path); }
    for (int i = 0; i < 2; i++) {
        bool vocab = tokenizer_partner(&partner, path, pairs[i][0], pairs[i][1]);
        if (!vocab && !tokenizer_partner(&partner, path, pairs[i][1], pairs[i][0])) { continue; }
        f->paths[vocab ? TOKENIZER_VOCAB : TOKENIZER_MERGES] = own;
        f->paths[vocab ? TOKENIZER_MERGES : TOKENIZER_VOCAB] = partner;
        return tokenizer_take(f, TOKENIZER_ADDED, dir, "added_tokens.json", err);
    }
    if (!tokenizer_map(&file, &text, path, err)) { return false; }
    int32_t magic = 0;
    memcpy(&magic, text.text, text.n < sizeof(magic) ? text.n : sizeof(magic));
    size_t n = strlen(path);
    bool bin = magic == TOKENIZER_BIN_MAGIC || (n >= 4 && strcmp(path + n - 4, ".bin") == 0);
    bool json = text.n > 0 && text.text[0] == '{';
    unmap_file(&file);
    if (!bin && n >= 10 && (strcmp(path + n - 10, "vocab.json") == 0 || strcmp(path + n - 10, "coder.json") == 0)) {
        return error_set(err, "%s: its merges (merges.txt or vocab.bpe) are not beside it", path);
    }
    f->paths[bin ? TOKENIZER_BIN : json ? TOKENIZER_JSON : TOKENIZER_MERGES] = own;
    return true;
}

// Loads a vocabulary. path is a directory or a file in one of the formats listed at the top. On false, err holds the
// reason, t is zeroed and there is nothing to free.
static inline bool tokenizer_load(Tokenizer* t, const char* path, Error* err) {
    TokenizerFiles* f = (TokenizerFiles*)calloc_check(1, sizeof(TokenizerFiles));
    Path dir;
    const char* slash = strrchr(path, '/');
    bool directory = is_directory(path);
    memset(t, 0, sizeof(*t));
    path_set(&dir, "%.*s", slash == path ? 1 : slash ? (int)(slash - path) : 1, slash ? path : ".");
    if (directory) { path_set(&dir, "%s", path); }
    bool ok = directory ? tokenizer_find_in_directory(f, path, err) : tokenizer_find_beside(f, path, dir.text, err);
    bool bin = !f->paths[TOKENIZER_JSON].text[0] && !f->paths[TOKENIZER_MERGES].text[0];
    ok = ok && tokenizer_take(f, TOKENIZER_CONFIG, dir.text, "tokenizer_config.json", err) &&
         tokenizer_take(f, TOKENIZER_MAP, dir.text, "special_tokens_map.json", err);
    for (int k = 0; k < TOKENIZER_NUM_FILES && ok; k++) {
        f->texts[k].where = f->paths[k].text;
        if (!f->paths[k].text[0] || (k == TOKENIZER_BIN) != bin) { continue; }
        ok = tokenizer_map(&f->maps[k], &f->texts[k], f->paths[k].text, err);
    }
    ok = ok && (bin ? tokenizer_parse_bin(t, f->texts[TOKENIZER_BIN], err) : tokenizer_parse(t, f->texts, err));
    for (int k = 0; k < TOKENIZER_NUM_FILES; k++) { unmap_file(&f->maps[k]); }
    free(f);
    return ok;
}

// Writes the names of up to 8 special tokens to out (size > 0): "<s>, </s>".
static inline void tokenizer_list_special(const Tokenizer* t, char* out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (int id = 0, listed = 0; id < t->vocab_size && listed < 8; id++) {
        char name[64];
        if (!(t->flags[id] & TOKEN_SPECIAL)) { continue; }
        json_printable(name, sizeof(name), (const char*)t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id]);
        int written = snprintf(out + used, size - used, "%s%s", listed ? ", " : "", name);
        if (written < 0 || (size_t)written >= size - used) {
            out[used] = '\0'; // no room for this one
            break;
        }
        used += (size_t)written;
        listed++;
    }
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

static inline void tokenizer_write_literal(const Tokenizer* t, int id, FileWriter* w) {
    json_write_string(w, (const char*)t->bytes + t->offsets[id], t->offsets[id + 1] - t->offsets[id]);
}

// Added tokens are spelled literally, as in Hugging Face's files, where this is how they keep their ids.
static inline void tokenizer_write_vocab(const Tokenizer* t, const Vocab* map, FileWriter* w) {
    for (int id = 0; id < t->vocab_size; id++) {
        writer_printf(w, "%s", id ? ", " : "{");
        if (t->flags[id] & TOKEN_ADDED) {
            tokenizer_write_literal(t, id, w);
        } else {
            writer_put(w, "\"", 1);
            tokenizer_write_token(t, map, (uint32_t)id, true, w);
            writer_put(w, "\"", 1);
        }
        writer_printf(w, ": %d", id);
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

// True if vocab.json, merges.txt and the roles do not say all about the added tokens. eot: id of <|endoftext|>, which
// readers know.
static inline bool tokenizer_must_list(const Tokenizer* t, int eot) {
    const int known[] = {eot, t->eot_id, t->bos_id, t->pad_id, t->unk_id};
    Tokenizer read = *t; // only its flags are used: those that a reader of these files would find
    read.flags = (uint8_t*)calloc_check((size_t)t->vocab_size, 1);
    for (int i = 0; i < 5; i++) {
        if (known[i] >= 0) { read.flags[known[i]] = TOKEN_SPECIAL; }
    }
    size_t count;
    bool list = tokenizer_missing_merge(&read, &count) >= 0;
    tokenizer_mark_special(&read, false);
    list |= tokenizer_sum_flags(&read) != t->flags_sum;
    for (int id = 0; id < t->vocab_size; id++) { list |= id != eot && (t->flags[id] & TOKEN_ADDED); }
    free(read.flags);
    return list;
}

// True if added_tokens_decoder lists the token: an added one, or a special one that vocab.json spells literally, too.
static inline bool tokenizer_is_listed(const Tokenizer* t, int id) {
    bool ascii = true;
    for (uint32_t i = t->offsets[id]; i < t->offsets[id + 1]; i++) { ascii &= t->bytes[i] > 32 && t->bytes[i] < 127; }
    return (t->flags[id] & TOKEN_ADDED) || (t->flags[id] && ascii);
}

// Writes the flags of the added tokens and, for Hugging Face's readers in Python, the names of the special ones once more.
static inline void tokenizer_write_added(const Tokenizer* t, FileWriter* w) {
    const char* comma = "{";
    writer_printf(w, "\"added_tokens_decoder\": ");
    for (int id = 0; id < t->vocab_size; id++) {
        if (!tokenizer_is_listed(t, id)) { continue; }
        writer_printf(w, "%s\"%d\": {\"content\": ", comma, id);
        tokenizer_write_literal(t, id, w);
        for (int i = 0; i < NUM_FLAG_KEYS; i++) {
            bool on = t->flags[id] & tokenizer_flag_keys[i].flag;
            writer_printf(w, ", \"%s\": %s", tokenizer_flag_keys[i].key, on ? "true" : "false");
        }
        writer_printf(w, "}");
        comma = ", ";
    }
    writer_printf(w, "}, \"additional_special_tokens\": ");
    comma = "[";
    for (int id = 0; id < t->vocab_size; id++) {
        bool named = id == t->eot_id || id == t->bos_id || id == t->pad_id || id == t->unk_id;
        if (!(t->flags[id] & TOKEN_SPECIAL) || !tokenizer_is_listed(t, id) || named) { continue; }
        writer_printf(w, "%s", comma);
        tokenizer_write_literal(t, id, w);
        comma = ", ";
    }
    writer_printf(w, "%s], ", comma[0] == '[' ? "[" : "");
}

// Hugging Face's GPT2Tokenizer takes <|endoftext|> for a role without a token, and adds it if it is not there; hence null.
static inline void tokenizer_write_config(const Tokenizer* t, FileWriter* w) {
    bool list = tokenizer_must_list(t, tokenizer_find(t, TOKENIZER_EOT, strlen(TOKENIZER_EOT)));
    const int ids[NUM_ROLES] = {t->eot_id, t->bos_id < 0 ? t->eot_id : t->bos_id, t->pad_id, t->unk_id};
    writer_printf(w, "{");
    if (list) { tokenizer_write_added(t, w); }
    for (int r = 0; r < NUM_ROLES; r++) {
        writer_printf(w, "\"%s\": ", tokenizer_role_keys[r]);
        if (ids[r] < 0) {
            writer_printf(w, "null");
        } else {
            tokenizer_write_literal(t, ids[r], w);
        }
        writer_printf(w, ", ");
    }
    writer_printf(w, "\"tokenizer_class\": \"GPT2Tokenizer\"}\n");
}

// Writes the file under a temporary name and renames it, so that an existing file stays intact until the new one is
// complete.
static inline bool tokenizer_write_file(const Tokenizer* t, const char* dir, const char* name, TokenizerFile kind,
                                        Error* err) {
    Path path, tmp;
    FileWriter w;
    Vocab map; // only its byte map is used
    vocab_init(&map);
    if (!path_set(&path, "%s/%s", dir, name) || !path_set(&tmp, "%s.tmp", path.text)) {
        return error_set(err, "%.64s...: the path is too long", dir);
    }
    if (!writer_open(&w, tmp.text, err)) { return false; }
    if (kind == TOKENIZER_VOCAB) {
        tokenizer_write_vocab(t, &map, &w);
    } else if (kind == TOKENIZER_MERGES) {
        tokenizer_write_merges(t, &map, &w);
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

// Writes dir/vocab.json and dir/merges.txt in GPT-2's format, and dir/tokenizer_config.json if the vocabulary has added
// tokens or roles that GPT-2's has not. A vocabulary that can only decode is written as dir/gpt2_tokenizer.bin. dir must
// exist and have no other file of a vocabulary. Loading dir gives the same tokenizer again, here and with Hugging Face.
static inline bool tokenizer_save(const Tokenizer* t, const char* dir, Error* err) {
    if (!t->can_encode) { return tokenizer_write_file(t, dir, "gpt2_tokenizer.bin", TOKENIZER_BIN, err); }
    int eot = tokenizer_find(t, TOKENIZER_EOT, strlen(TOKENIZER_EOT));
    bool usual = t->eot_id == eot && (t->bos_id < 0 || t->bos_id == eot) && (t->unk_id < 0 || t->unk_id == eot) &&
                 t->pad_id < 0 && !tokenizer_must_list(t, eot);
    return tokenizer_write_file(t, dir, "vocab.json", TOKENIZER_VOCAB, err) &&
           tokenizer_write_file(t, dir, "merges.txt", TOKENIZER_MERGES, err) &&
           (usual || tokenizer_write_file(t, dir, "tokenizer_config.json", TOKENIZER_CONFIG, err));
}

#endif
