/* Fuzz target: every vocabulary file that the tokenizer reads, and encode and decode of any text.

   The first byte chooses the reader or the text functions. The rest is the file, or the part of it after the 256 bytes
   that every vocabulary needs, or a list of edits (two bytes of offset, one new byte) of a valid file. A vocabulary
   that is accepted must be consistent and encode without loss.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_tokenizer.c -lm -o fuzz_tokenizer &&
   ./fuzz_tokenizer */
#include "../vocabulary_texts.h"

static const TokenizerText none = {NULL, 0, NULL};

static void check_error(const Error* err) { require(err->text[0] && !strchr(err->text, '\n')); }

static void check_roundtrip(const Tokenizer* t, const char* text, size_t n) {
    static TokenBuffer b;
    size_t at = 0, length;
    b.count = 0;
    tokenizer_encode(t, text, n, &b);
    for (size_t i = 0; i < b.count; i++) {
        require(b.ids[i] < (uint32_t)t->vocab_size);
        const char* s = tokenizer_decode(t, (int)b.ids[i], &length);
        require(s && length > 0 && length <= n - at && memcmp(text + at, s, length) == 0);
        at += length;
    }
    require(at == n);
}

// Encodes the text with its added tokens, whole and in two parts.
static void check_added(const Tokenizer* t, const char* text, size_t n) {
    static TokenBuffer whole, parts;
    size_t seen = n > 2 ? n - (uint8_t)text[0] % (n / 2) : n, cut = tokenizer_find_cut(t, text, seen);
    for (int special = 0; special < 2; special++) {
        whole.count = parts.count = whole.spelled = parts.spelled = 0;
        size_t documents = tokenizer_encode_document(t, text, n, t->eot_id >= 0, special, &whole);
        size_t parted = tokenizer_encode_document(t, text, cut, t->eot_id >= 0, special, &parts);
        if (cut == 0) { continue; }
        parted += tokenizer_encode_document(t, text + cut, n - cut, false, special, &parts);
        require(documents == parted && whole.count == parts.count && whole.spelled == parts.spelled);
        require(whole.count == 0 || memcmp(whole.ids, parts.ids, 4 * whole.count) == 0);
    }
    for (size_t i = 0; i < whole.count; i++) { require(whole.ids[i] < (uint32_t)t->vocab_size); }
}

// Checks the result of a reader; if it succeeded, encodes text with it.
static void check_tokenizer(bool ok, Tokenizer* t, const Error* err, const char* text, size_t n) {
    if (!ok) {
        check_error(err);
        require(t->vocab_size == 0 && !t->bytes && !t->slots);
        return;
    }
    require(t->vocab_size > 0 && t->eot_id >= -1 && t->eot_id < t->vocab_size);
    for (int id = 0; id < t->vocab_size; id++) { require(t->offsets[id] < t->offsets[id + 1]); }
    if (t->can_encode) {
        check_roundtrip(t, text, n);
        check_added(t, text, n);
    }
    tokenizer_free(t);
}

// Writes "\u0021": 0, ... : the members of the 256 bytes, with a comma after each.
static size_t put_bytes(char* out) {
    Vocab map;
    vocab_init(&map);
    size_t n = 0;
    for (int code = 0, id = 0; code < 324; code++) {
        if (map.byte_of[code] >= 0) { n += (size_t)sprintf(out + n, "\"\\u%04x\":%d,", code, id++); }
    }
    return n;
}

// vocab.json is { 256 bytes, then data up to a NUL. After it come merges.txt and, after another NUL, added_tokens.json.
static void fuzz_vocab(const char* data, size_t n) {
    static char text[70000];
    text[0] = '{';
    size_t used = 1 + put_bytes(text + 1), parts[3] = {0, n, n};
    for (int k = 1; k < 3; k++) {
        const char* nul = (const char*)memchr(data + parts[k - 1], 0, n - parts[k - 1]);
        parts[k] = nul ? (size_t)(nul - data) + 1 : n;
    }
    size_t vocab = parts[1] < n || (n > 0 && data[n - 1] == 0) ? parts[1] - 1 : n;
    if (used + vocab > sizeof(text)) { return; }
    memcpy(text + used, data, vocab);
    TokenizerText v = {text, used + vocab, "v"}, m = {data + parts[1], parts[2] - parts[1], "m"};
    TokenizerText a = {data + parts[2], n - parts[2], "a"};
    if (m.n > 0 && parts[2] < n) { m.n--; }
    Tokenizer t;
    Error err;
    bool ok = parse_vocab(&t, v, m, parts[2] < n ? a : none, &err);
    check_tokenizer(ok, &t, &err, data, n);
}

// A valid tokenizer.json with edits, or with data as its list of merges and everything after it.
static void fuzz_json(const uint8_t* data, size_t n, bool edits) {
    static char text[80000];
    size_t used = (size_t)sprintf(
        text,
        "{\"added_tokens\":[{\"id\":258,\"content\":\"<|endoftext|>\"},{\"id\":259,\"content\":"
        "\"x y\",\"special\":true,\"lstrip\":true,\"rstrip\":true},{\"id\":260,\"content\":\"yy\","
        "\"single_word\":true,\"normalized\":false}],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
        "\"add_prefix_space\":false},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"vocab\":{");
    used += put_bytes(text + used);
    used += (size_t)sprintf(text + used, "\"ab\":256,\"abc\":257,\"<|endoftext|>\":258},\"merges\":[");
    if (edits) {
        used += (size_t)sprintf(text + used, "\"a b\",[\"ab\",\"c\"]]}}");
        for (size_t i = 0; i + 2 < n; i += 3) { text[(data[i] << 8 | data[i + 1]) % used] = (char)data[i + 2]; }
    } else {
        if (n > 65536) { return; }
        memcpy(text + used, data, n);
        used += n;
    }
    Tokenizer t;
    Error err;
    TokenizerText f = {text, used, "t"};
    bool ok = parse_json(&t, f, &err);
    check_tokenizer(ok, &t, &err, (const char*)data, n);
}

static void fuzz_bin(const uint8_t* data, size_t n) {
    static char text[70000];
    int32_t h[256] = {TOKENIZER_BIN_MAGIC, 2, 0, 0};
    size_t head = n < 6 ? n : 6;
    uint8_t b[6] = {0};
    if (n > 65536) { return; }
    memcpy(b, data, head);
    if (b[0] & 1) { h[1] = b[0] >> 1; }
    h[2] = b[1] | (int8_t)b[2] * 256;
    h[3] = b[3] | (int8_t)b[4] * 256;
    memcpy(text, h, sizeof(h));
    memcpy(text + sizeof(h), data + head, n - head);
    TokenizerText f = {text, b[5] == 255 ? n - head : sizeof(h) + n - head, "b"};
    Tokenizer t;
    Error err;
    bool ok = tokenizer_parse_bin(&t, f, &err);
    check_tokenizer(ok, &t, &err, "", 0);
}

// Encodes the text whole and in two parts, and passes its bytes through the stream for a terminal.
static void fuzz_text(const uint8_t* data, size_t n) {
    static Tokenizer t;
    static TokenBuffer whole, parts;
    static char out[3 * 70000];
    Error err;
    TokenizerText merges = {"a b\nab c\nb c\n\xC4\xA0 ab\na a\naa aa\n. .\n.. ..\n\xC4\xA0 \xC4\xA0\n", 0, "m"};
    merges.n = strlen(merges.text);
    if (!t.vocab_size && !parse_merges(&t, merges, &err)) { die("%s", err.text); }
    if (n > 65536) { return; }
    check_roundtrip(&t, (const char*)data, n);
    size_t seen = n > 2 ? n - data[0] % (n / 2) : n, cut = tokenizer_find_cut(&t, data, seen);
    whole.count = parts.count = 0;
    tokenizer_encode(&t, data, n, &whole);
    tokenizer_encode(&t, data, cut, &parts);
    tokenizer_encode(&t, data + cut, n - cut, &parts);
    require(whole.count == parts.count && (n == 0 || memcmp(whole.ids, parts.ids, 4 * whole.count) == 0));
    Utf8Stream s = {{0}, 0};
    size_t written = utf8_stream_push(&s, data, n / 2, out);
    written += utf8_stream_push(&s, data + n / 2, n - n / 2, out + written);
    written += utf8_stream_flush(&s, out + written);
    require(written <= 3 * n);
    uint32_t code;
    for (size_t i = 0; i < written;) {
        size_t length = utf8_decode((const uint8_t*)out + i, (const uint8_t*)out + written, &code);
        require(length > 0);
        i += length;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) { return 0; }
    const uint8_t* rest = data + 1;
    size_t n = size - 1;
    Tokenizer t;
    Error err;
    TokenizerText f = {(const char*)rest, n, "f"};
    bool ok;
    switch (data[0] % 7) {
    case 0:
        ok = parse_merges(&t, f, &err);
        check_tokenizer(ok, &t, &err, f.text, n);
        break;
    case 1:
        fuzz_vocab(f.text, n);
        break;
    case 2:
        ok = parse_json(&t, f, &err);
        check_tokenizer(ok, &t, &err, f.text, n);
        break;
    case 3:
        fuzz_json(rest, n, true);
        break;
    case 4:
        fuzz_json(rest, n, false);
        break;
    case 5:
        fuzz_bin(rest, n);
        break;
    default:
        fuzz_text(rest, n);
        break;
    }
    return 0;
}
