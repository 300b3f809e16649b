// The tokenizer: scanner, merges and files, against results made by hand and those of tokenizers and tiktoken.
#include "../../../llmc/tokenizer.h"
#include "../test.h"
#include "../vocabulary_texts.h"

// ---- helpers ----------------------------------------------------------------------

static const char* data_path(const char* name) {
    static char path[4096];
    const char* dir = getenv("LLMC_DATA");
    snprintf(path, sizeof(path), "%s/%s", dir && dir[0] ? dir : "../shared/data", name);
    return path;
}

// GPT-2's vocabulary, read once. If it is not on this machine, skips the test and returns NULL.
static const Tokenizer* gpt2(void) {
    static Tokenizer t;
    Error err;
    if (t.vocab_size) { return &t; }
    const char* path = data_path("gpt2_tokenizer");
    if (!file_exists(path)) {
        test_skip("needs %s (or LLMC_DATA)", path);
        return NULL;
    }
    if (!tokenizer_load(&t, path, &err)) {
        test_fail(__FILE__, __LINE__, "%s", err.text);
        return NULL;
    }
    return &t;
}

static void release_gpt2(void) {
    const Tokenizer* t = gpt2();
    if (t) { tokenizer_free((Tokenizer*)t); }
}

static const char* temp_path(const char* name) {
    static char path[256];
    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    return path;
}

static const char* write_file(const char* name, const void* data, size_t n) {
    const char* path = temp_path(name);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0) { die("%s: cannot write", path); }
    return path;
}

static TokenizerText text_of(const char* s, const char* where) {
    TokenizerText text = {s, strlen(s), where};
    return text;
}

// a small vocabulary: ids 256 ab, 257 abc, 258 bc, 259 _ab, 260 aa, 261 <|endoftext|>
static const char small_merges[] = "#version: 0.2\na b\nab c\nb c\n\xC4\xA0 ab\na a\n";

static Tokenizer small_tokenizer(void) {
    Tokenizer t;
    Error err;
    if (!parse_merges(&t, text_of(small_merges, "small"), &err)) { die("%s", err.text); }
    return t;
}

static void check_ids(const Tokenizer* t, const char* text, size_t n, const int* want, size_t count) {
    TokenBuffer b = {0};
    for (int pass = 0; pass < 2; pass++) { // the second pass takes the ids from the cache
        b.count = 0;
        tokenizer_encode(t, text, n, &b);
        bool same = b.count == count;
        for (size_t i = 0; same && i < count; i++) { same = b.ids[i] == (uint32_t)want[i]; }
        check_msg(same, "'%.40s' (pass %d): %zu tokens, first %d; want %zu, first %d", text, pass, b.count,
                  b.count ? (int)b.ids[0] : -1, count, count ? want[0] : -1);
    }
    token_buffer_free(&b);
}

static void check_roundtrip(const Tokenizer* t, const uint8_t* text, size_t n, TokenBuffer* b) {
    size_t at = 0, length = 0;
    b->count = 0;
    tokenizer_encode(t, text, n, b);
    for (size_t i = 0; i < b->count; i++) {
        const char* s = tokenizer_decode(t, (int)b->ids[i], &length);
        if (!s || length == 0 || length > n - at || memcmp(text + at, s, length) != 0) {
            test_fail(__FILE__, __LINE__, "%zu bytes, first %02x: token %zu differs at byte %zu", n, n ? text[0] : 0, i,
                      at);
            return;
        }
        at += length;
    }
    check_msg(at == n, "%zu bytes came back as %zu", n, at);
}

static uint32_t random_u32(void) {
    static uint64_t state = 42;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static bool same_tokenizer(const Tokenizer* a, const Tokenizer* b) {
    return a->vocab_size == b->vocab_size && a->eot_id == b->eot_id && a->num_merges == b->num_merges &&
           memcmp(a->fingerprint, b->fingerprint, sizeof(a->fingerprint)) == 0 && a->flags_sum == b->flags_sum &&
           memcmp(a->bytes, b->bytes, a->offsets[a->vocab_size]) == 0;
}

// Loads path and checks that it equals t.
static void check_loads_same(const Tokenizer* t, const char* path) {
    Tokenizer other;
    Error err;
    if (!tokenizer_load(&other, path, &err)) {
        test_fail(__FILE__, __LINE__, "%s", err.text);
        return;
    }
    check_msg(same_tokenizer(t, &other), "%s: another tokenizer", path);
    tokenizer_free(&other);
}

// ---- scanner ------------------------------------------------------------------------

static void test_pieces(void) {
    // texts with | between their pieces, made by hand from the regular expression
    static const char* const cases[] = {
        "a",
        "Hello| world",
        "a| b",
        "a| | b",
        "a|  | b",
        "a|\n|b",
        "a|\n|\n|b",
        "a|\n\n| b",
        "a|  ",
        " ",
        "  ",
        " | a",
        "  | a",
        "\t|a",
        " |\t|a",
        "\t| a",
        " \t| a",
        "don|'t",
        "I|'m",
        "we|'ve",
        "you|'re",
        "he|'ll",
        "she|'d",
        "it|'s",
        "DON|'|T",
        "'s|s",
        "'t|is",
        "'re",
        "'|r",
        "'|r|1",
        "'ll|l",
        "'|l|'|l",
        "'|v",
        "'ve",
        " '|s",
        "x| '|s",
        "''|s",
        "''|s| '|s",
        "'|",
        "1|'s",
        "abc|123",
        "123|abc",
        "abc|123|def| 456",
        "3|.|14",
        "x|=|1|;",
        "a|.|\n| b",
        "a|.|\n|b",
        "(|a|)",
        " (|a",
        "!!!|a",
        " !!!",
        "a|_|b",
        "foo|()",
        "caf\xC3\xA9| x",
        "\xC3\xA9t\xC3\xA9",
        "a|\xC2\xA0|b",
        "a|\xC2\xA0| b",
        "a| |\xC2\xA0|b",
        "a|\xE3\x80\x80\xE3\x80\x80|\xE3\x80\x80|b",
        "\xE2\x80\xA8|a",
        "a|\x1C|b",
        "\x1C\x1D|1",
        "\xE4\xBD\xA0\xE5\xA5\xBD|\xEF\xBC\x8C| \xE4\xB8\x96",
        "\xD9\xA3\xC2\xBD|a",
        "\xE2\x85\xA7| \xE2\x82\x82",
        "a|\xF0\x9F\x98\x80|b",
        "\xF0\x9F\x98\x80\xF0\x9F\x98\x80",
        "a|\xCC\x81|b",
        "a|\xFF|b",
        "a| \xFF\xFE|b",
        "a|\xC3|b",
        "a|\xE2\x80|b",
        "\xC0\x80",
        "a|\xED\xA0\x80|b",
        "a|\xF4\x90\x80\x80|b",
        "\xE2\x80| |\xE2\x80\x83|x",
        "\xC2| | 1",
    };
    Tokenizer t;
    tokenizer_init_bytes(&t);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[128], got[128];
        size_t n = 0, k = 0;
        for (const char* p = cases[i]; *p; p++) {
            if (*p != '|') { text[n++] = *p; }
        }
        const uint8_t *p = (const uint8_t*)text, *end = p + n;
        while (p < end) {
            const uint8_t* next = tokenizer_next_piece(&t, p, end);
            if (k > 0) { got[k++] = '|'; }
            memcpy(got + k, p, (size_t)(next - p));
            k += (size_t)(next - p);
            p = next;
        }
        got[k] = '\0';
        size_t want = strlen(cases[i]);
        if (want > 1 && cases[i][want - 1] == '|') { want--; } // "'|" is the single piece "'"
        check_msg(k == want && memcmp(got, cases[i], k) == 0, "case %zu: '%s', want '%s'", i, got, cases[i]);
    }
    tokenizer_free(&t);
}

static void test_classes(void) {
    Tokenizer t;
    tokenizer_init_bytes(&t);
    // the numbers at the end are the Unicode version that added the character; the table is of 16.0
    static const struct {
        uint32_t code;
        int want;
    } cases[] = {
        {'a', CLASS_LETTER},     {'Z', CLASS_LETTER},     {'0', CLASS_NUMBER},    {'_', CLASS_OTHER},
        {0x1C, CLASS_OTHER},     {0x85, CLASS_SPACE},     {0xA0, CLASS_SPACE},    {0xAA, CLASS_LETTER},
        {0xB2, CLASS_NUMBER},    {0xD7, CLASS_OTHER},     {0x0300, CLASS_OTHER},  {0x0661, CLASS_NUMBER},
        {0x180E, CLASS_OTHER},   {0x200B, CLASS_OTHER},   {0x2028, CLASS_SPACE},  {0x2167, CLASS_NUMBER},
        {0x3000, CLASS_SPACE},   {0x3007, CLASS_NUMBER},  {0x4E00, CLASS_LETTER}, {0xAC00, CLASS_LETTER},
        {0xFEFF, CLASS_OTHER},   {0x1D7D8, CLASS_NUMBER}, {0x1F600, CLASS_OTHER}, {0x31350, CLASS_LETTER}, // 15.0
        {0x2EBF0, CLASS_LETTER},                                                                           // 15.1
        {0x105C0, CLASS_LETTER},                                                                           // 16.0
        {0x323B0, CLASS_OTHER},                                                                            // 17.0
        {0x10FFFF, CLASS_OTHER},
    };
    size_t counts[4] = {0};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        check_msg(t.char_class[cases[i].code] == cases[i].want, "U+%04X is of class %d, want %d", cases[i].code,
                  t.char_class[cases[i].code], cases[i].want);
    }
    for (uint32_t c = 0; c < 0x110000; c++) { counts[t.char_class[c]]++; }
    check(counts[CLASS_LETTER] == 141028); // the number of letters in Unicode 16.0.0
    check(counts[CLASS_NUMBER] == 1911);
    check(counts[CLASS_SPACE] == 25);
    for (size_t i = 1; i < sizeof(unicode_letters) / sizeof(unicode_letters[0]); i++) {
        check(unicode_letters[i].first > unicode_letters[i - 1].last + 1);
    }
    tokenizer_free(&t);
}

// The pieces of text[0..cut) and of text[cut..n) together must be the pieces of the whole text.
static void test_cuts(void) {
    static const char* const parts[] = {"a",        "s",        "ll",           "1",        " ",
                                        "  ",       "\n",       "\t",           "'",        "'s",
                                        ".",        "\xC2\xA0", "\xE3\x80\x80", "\xC3\xA9", "\xE4\xBD\xA0",
                                        "\xE2\x80", "\xC2",     "\xFF",         "\x85",     "\xA0",
                                        "\x80",     "\xE3"};
    Tokenizer t;
    tokenizer_init_bytes(&t);
    int found = 0;
    for (int round = 0; round < 200000; round++) {
        char text[64], ends[64] = {0}, cut_ends[64] = {0};
        size_t n = 0, num_parts = 1 + random_u32() % 12;
        for (size_t i = 0; i < num_parts; i++) {
            const char* part = parts[random_u32() % (sizeof(parts) / sizeof(parts[0]))];
            memcpy(text + n, part, strlen(part));
            n += strlen(part);
        }
        size_t seen = 1 + random_u32() % n,
               cut = tokenizer_find_cut(&t, text, seen); // the text after `seen` bytes must not matter
        if (cut == 0) { continue; }
        found++;
        const uint8_t* begin = (const uint8_t*)text;
        for (const uint8_t* p = begin; p < begin + n;) {
            ends[(p = tokenizer_next_piece(&t, p, begin + n)) - begin - 1] = 1;
        }
        for (const uint8_t* p = begin; p < begin + cut;) {
            cut_ends[(p = tokenizer_next_piece(&t, p, begin + cut)) - begin - 1] = 1;
        }
        for (const uint8_t* p = begin + cut; p < begin + n;) {
            cut_ends[(p = tokenizer_next_piece(&t, p, begin + n)) - begin - 1] = 1;
        }
        check_msg(cut < seen && memcmp(ends, cut_ends, sizeof(ends)) == 0, "'%.*s' cut at %zu of %zu", (int)n, text,
                  cut, n);
    }
    check_msg(found > 50000, "only %d cuts found", found);
    // a text of one class has no cut
    check(tokenizer_find_cut(&t, "aaaa", 4) == 0 && tokenizer_find_cut(&t, "....", 4) == 0);
    check(tokenizer_find_cut(&t, "    ", 4) == 0 && tokenizer_find_cut(&t, "", 0) == 0);
    check(tokenizer_find_cut(&t, "ab cd", 5) == 2 && tokenizer_find_cut(&t, "ab\n\n\ncd", 7) == 2);
    tokenizer_free(&t);
}

// ---- merges ---------------------------------------------------------------------------

static void test_byte_vocabulary(void) {
    Tokenizer t;
    size_t n;
    tokenizer_init_bytes(&t);
    check(t.vocab_size == 257 && t.eot_id == 256 && t.can_encode && t.num_merges == 0);
    const int want[] = {0, 64, 220, 198, 188, 187, 255};
    check_ids(&t, "!a \n\0\xFF\xAD", 7, want, 7); // 0xAD is the last of the 68 bytes that are not printable
    check_ids(&t, "", 0, NULL, 0);
    const char* eot = tokenizer_decode(&t, 256, &n);
    check(eot && n == 13 && memcmp(eot, TOKENIZER_EOT, 13) == 0);
    check(!tokenizer_decode(&t, 257, &n) && !tokenizer_decode(&t, -1, &n));
    tokenizer_free(&t);
}

static void test_small_merges(void) {
    Tokenizer t = small_tokenizer();
    check(t.vocab_size == 262 && t.eot_id == 261 && t.num_merges == 5);
    static const struct {
        const char* text;
        int count, ids[6];
    } cases[] = {
        {"ab", 1, {256}},
        {"abc", 1, {257}}, // merges a b, then ab c
        {"bc", 1, {258}},
        {"aabc", 2, {64, 257}}, // a b has the lowest rank and is merged first, so a a never occurs
        {"aaa", 2, {260, 64}},  // of equal ranks, the leftmost is merged first
        {"aaaaa", 3, {260, 260, 64}},
        {" ab", 1, {259}},
        {" abc", 2, {220, 257}},   // ab c has rank 1, _ ab rank 3, so ab c is merged
        {"a b", 2, {64, 220 + 0}}, // expected ids are completed below; no merge crosses pieces
        {"ab ab", 2, {256, 259}},
        {"abab", 2, {256, 256}},
        {"cab", 2, {66, 256}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int ids[6];
        size_t count = (size_t)cases[i].count;
        memcpy(ids, cases[i].ids, sizeof(ids));
        if (strcmp(cases[i].text, "a b") == 0) {
            ids[2] = 65;
            count = 3;
        }
        check_ids(&t, cases[i].text, strlen(cases[i].text), ids, count);
    }
    // the text of the special token is encoded as text, without id 261
    const int eot[] = {27, 91, 68, 77, 67, 78, 69, 83, 68, 87, 83, 91, 29};
    check_ids(&t, "<|endoftext|>", 13, eot, 13);
    tokenizer_free(&t);
}

// The definition: find the pair of lowest rank (the leftmost if there are several), merge it, and start again.
static size_t slow_merge(const Tokenizer* t, uint32_t* ids, size_t n) {
    for (;;) {
        int best = t->num_merges;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            for (int r = 0; r < best; r++) {
                if (t->merges[2 * r] == ids[i] && t->merges[2 * r + 1] == ids[i + 1]) {
                    best = r;
                    at = i;
                }
            }
        }
        if (best == t->num_merges) { return n; }
        ids[at] = 256 + (uint32_t)best;
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof(ids[0]));
        n--;
    }
}

// A vocabulary of 60 random merges of a, b, c, so that texts of these merge in many ways.
static Tokenizer random_tokenizer(void) {
    static char names[64][64];
    char text[8192] = "";
    size_t count = 3, tries = 0;
    strcpy(names[0], "a");
    strcpy(names[1], "b");
    strcpy(names[2], "c");
    while (count < 63 && tries++ < 100000) {
        const char *a = names[random_u32() % count], *b = names[random_u32() % count];
        if (strlen(a) + strlen(b) > 12) { continue; }
        char both[64];
        snprintf(both, sizeof(both), "%s%s", a, b);
        bool known = false;
        for (size_t i = 0; i < count; i++) { known = known || strcmp(names[i], both) == 0; }
        if (known) { continue; }
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s %s\n", a, b);
        strcpy(names[count], both);
        count++;
    }
    Tokenizer t;
    Error err;
    if (!parse_merges(&t, text_of(text, "random"), &err)) { die("%s", err.text); }
    check(t.num_merges == 60);
    return t;
}

static void test_merge_order(void) {
    for (int round = 0; round < 20; round++) {
        Tokenizer t = random_tokenizer();
        for (int k = 0; k < 300; k++) {
            uint32_t ids[3][MERGE_SHORT];
            uint8_t piece[MERGE_SHORT];
            size_t n = 1 + random_u32() % MERGE_SHORT, counts[3];
            for (size_t i = 0; i < n; i++) { piece[i] = "abc"[random_u32() % 3]; }
            for (int m = 0; m < 3; m++) {
                for (size_t i = 0; i < n; i++) { ids[m][i] = t.byte_ids[piece[i]]; }
            }
            counts[0] = slow_merge(&t, ids[0], n);
            counts[1] = tokenizer_merge_short(&t, ids[1], n);
            counts[2] = tokenizer_merge_long(&t, ids[2], n);
            for (int m = 1; m < 3; m++) {
                check_msg(counts[m] == counts[0] && memcmp(ids[0], ids[m], counts[0] * sizeof(ids[0][0])) == 0,
                          "'%.*s': %s merge gives %zu tokens, want %zu or other ids", (int)n, (char*)piece,
                          m == 1 ? "short" : "long", counts[m], counts[0]);
            }
        }
        tokenizer_free(&t);
    }
}

static void test_cache_owner(void) {
    // one buffer for two vocabularies: ids of the first must not be returned for the second
    Tokenizer a = small_tokenizer(), b;
    TokenBuffer buffer = {0};
    tokenizer_init_bytes(&b);
    tokenizer_encode(&a, "abc", 3, &buffer);
    check(buffer.count == 1 && buffer.ids[0] == 257);
    tokenizer_encode(&b, "abc", 3, &buffer);
    check(buffer.count == 4 && buffer.ids[0] == 257 && buffer.ids[1] == 64 && buffer.ids[3] == 66);
    tokenizer_encode(&a, "abc", 3, &buffer);
    check(buffer.count == 5 && buffer.ids[4] == 257);
    token_buffer_free(&buffer);
    tokenizer_free(&a);
    tokenizer_free(&b);
}

// ---- against GPT-2 --------------------------------------------------------------------

static void test_golden(void) {
    const Tokenizer* t = gpt2();
    MappedFile file;
    Error err;
    if (!t) { return; }
    if (!map_file(&file, "dev/test/fixtures/tokenizer_golden.jsonl", &err)) {
        test_fail(__FILE__, __LINE__, "%s", err.text);
        return;
    }
    int lines = 0;
    for (size_t i = 0; i < file.size; lines++) {
        const char* line = (const char*)file.data + i;
        const char* newline = (const char*)memchr(line, '\n', file.size - i);
        size_t n = newline ? (size_t)(newline - line) : file.size - i;
        JsonDoc doc;
        if (!json_parse(&doc, line, n, "golden", &err)) {
            test_fail(__FILE__, __LINE__, "line %d: %s", lines + 1, err.text);
            break;
        }
        const JsonValue *text = json_get(doc.root, "text"), *ids = json_get(doc.root, "ids");
        int* want = (int*)malloc_check(ids->count * sizeof(int));
        for (size_t k = 0; k < ids->count; k++) { want[k] = (int)ids->items[k].integer; }
        check_ids(t, text->string, text->length, want, ids->count);
        free(want);
        json_free(&doc);
        i += n + 1;
    }
    check_msg(lines == 357, "%d lines, want 357", lines);
    unmap_file(&file);
}

static void test_tinyshakespeare(void) {
    const Tokenizer* t = gpt2();
    MappedFile file;
    Error err;
    TokenBuffer b = {0};
    if (!t) { return; }
    if (!map_file(&file, data_path("tinyshakespeare.txt"), &err)) {
        test_skip("%s", err.text);
        return;
    }
    check_roundtrip(t, file.data, file.size, &b);
    check_msg(b.count == 338025, "%zu tokens, want 338025", b.count);
    token_buffer_free(&b);
    unmap_file(&file);
}

static void check_all_roundtrips(const Tokenizer* t) {
    TokenBuffer b = {0};
    uint8_t text[256];
    for (int i = 0; i < 256; i++) {
        text[0] = (uint8_t)i;
        check_roundtrip(t, text, 1, &b);
        for (int j = 0; j < 256; j++) {
            text[1] = (uint8_t)j;
            check_roundtrip(t, text, 2, &b);
        }
    }
    for (int k = 0; k < 100000; k++) {
        size_t n = random_u32() % sizeof(text);
        bool ascii = k % 2; // because random bytes rarely have long pieces
        for (size_t i = 0; i < n; i++) {
            uint32_t r = random_u32();
            text[i] = ascii ? (uint8_t) " etaonrishd'"[r % 12] : (uint8_t)r;
        }
        check_roundtrip(t, text, n, &b);
    }
    token_buffer_free(&b);
}

static void test_roundtrip_bytes(void) {
    Tokenizer t;
    tokenizer_init_bytes(&t);
    check_all_roundtrips(&t);
    tokenizer_free(&t);
}

static void test_roundtrip_gpt2(void) {
    if (gpt2()) { check_all_roundtrips(gpt2()); }
}

static double cpu_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

// 1 MiB of the worst texts. A quadratic merge would take minutes. If 1 MiB takes more than a second (under valgrind),
// it may take at most eight times as long as a quarter of it.
static void check_hostile(const Tokenizer* t) {
    static const char* const units[] = {"a",  " ",        "\n",           "0",   ".",         "\xFF",
                                        "ab", "\xC3\xA9", "\xE4\xBD\xA0", " \t", "abcabcaab", NULL};
    size_t n = 1 << 20;
    uint8_t* text = (uint8_t*)malloc_check(n);
    TokenBuffer b = {0};
    for (size_t u = 0; u < sizeof(units) / sizeof(units[0]); u++) {
        size_t length = units[u] ? strlen(units[u]) : 0;
        for (size_t i = 0; i < n; i++) { text[i] = length ? (uint8_t)units[u][i % length] : (uint8_t)random_u32(); }
        double start = cpu_ms();
        tokenizer_encode(t, text, n / 4, &b);
        double quarter = cpu_ms() - start;
        check_roundtrip(t, text, n, &b);
        double whole = cpu_ms() - start - quarter;
        check_msg(whole < 1000 || whole < 8 * quarter, "1 MiB of '%s' took %.0f ms, a quarter of it %.0f ms",
                  length ? units[u] : "random bytes", whole, quarter);
    }
    token_buffer_free(&b);
    free(text);
}

static void test_hostile(void) {
    Tokenizer t = small_tokenizer();
    check_hostile(&t);
    tokenizer_free(&t);
}

static void test_hostile_gpt2(void) {
    if (gpt2()) { check_hostile(gpt2()); }
}

static void test_threads(void) {
    // one vocabulary for all threads, a buffer per thread
    Tokenizer t = small_tokenizer();
    size_t n = 100000;
    char* text = (char*)malloc_check(n);
    for (size_t i = 0; i < n; i++) { text[i] = "abc ab\n"[random_u32() % 7]; }
    TokenBuffer want = {0};
    int wrong = 0;
    tokenizer_encode(&t, text, n, &want);
#pragma omp parallel for num_threads(4) reduction(+ : wrong)
    for (int i = 0; i < 8; i++) {
        TokenBuffer b = {0};
        tokenizer_encode(&t, text, n, &b);
        wrong += b.count != want.count || memcmp(b.ids, want.ids, b.count * sizeof(b.ids[0])) != 0;
        token_buffer_free(&b);
    }
    check(wrong == 0);
    token_buffer_free(&want);
    free(text);
    tokenizer_free(&t);
}

// ---- files ------------------------------------------------------------------------------

// Writes tokenizer.json of t without the code under test.
static const char* write_tokenizer_json(const Tokenizer* t, bool pairs, const char* name) {
    Vocab map;
    FileWriter w;
    Error err;
    vocab_init(&map);
    const char* path = temp_path(name);
    if (!writer_open(&w, path, &err)) { die("%s", err.text); }
    writer_printf(
        &w,
        "{\"version\": \"1.0\", \"added_tokens\": [{\"id\": %d, \"content\": \"<|endoftext|>\", \"special\": true}], ",
        t->eot_id);
    writer_printf(&w, "\"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                      "\"use_regex\": true}, \"model\": {\"type\": \"BPE\", \"dropout\": null, \"vocab\": ");
    tokenizer_write_vocab(t, &map, &w);
    writer_printf(&w, ", \"merges\": [");
    for (int r = 0; r < t->num_merges; r++) {
        writer_printf(&w, pairs ? "%s[\"" : "%s\"", r ? ", " : "");
        tokenizer_write_token(t, &map, t->merges[2 * r], true, &w);
        writer_printf(&w, pairs ? "\", \"" : " ");
        tokenizer_write_token(t, &map, t->merges[2 * r + 1], true, &w);
        writer_printf(&w, pairs ? "\"]" : "\"");
    }
    writer_printf(&w, "]}}");
    if (!writer_close(&w, &err)) { die("%s", err.text); }
    return path;
}

static void check_forms(const Tokenizer* t, const char* dir) {
    char path[256], from[4096], to[512];
    Error err;
    snprintf(path, sizeof(path), "%s/%s", test_dir(), dir);
    if (!make_directories(path, &err) || !tokenizer_save(t, path, &err)) {
        test_fail(__FILE__, __LINE__, "%s", err.text);
        return;
    }
    check_loads_same(t, path);
    snprintf(from, sizeof(from), "%s/vocab.json", path);
    check_loads_same(t, from);
    check_loads_same(t, write_tokenizer_json(t, false, "old.json"));
    check_loads_same(t, write_tokenizer_json(t, true, "new.json"));
    snprintf(to, sizeof(to), "%s/encoder.json", path);
    check(rename(from, to) == 0);
    snprintf(from, sizeof(from), "%s/merges.txt", path);
    check_loads_same(t, from); // tokenizer.json alone
    check_loads_same(t, path);
    snprintf(to, sizeof(to), "%s/vocab.bpe", path);
    check(rename(from, to) == 0);
    check_loads_same(t, path); // encoder.json and vocab.bpe
    check_loads_same(t, to);
}

static void test_forms(void) {
    Tokenizer t = small_tokenizer(), bytes;
    tokenizer_init_bytes(&bytes);
    check_forms(&t, "small");
    check_forms(&bytes, "bytes");
    tokenizer_free(&t);
    tokenizer_free(&bytes);
}

static void test_forms_gpt2(void) {
    const Tokenizer* t = gpt2();
    if (!t) { return; }
    check(t->vocab_size == 50257 && t->eot_id == 50256 && t->num_merges == 50000);
    check_forms(t, "gpt2");
    check_loads_same(t, data_path("gpt2_tokenizer/tokenizer.json"));
    check_loads_same(t, data_path("gpt2_tokenizer/merges.txt"));
    // the saved files equal those that were read, and there is none more
    check(!file_exists(temp_path("gpt2/tokenizer_config.json")));
    const char* names[] = {"vocab.json", "merges.txt"};
    const char* saved[] = {"gpt2/encoder.json", "gpt2/vocab.bpe"};
    for (int i = 0; i < 2; i++) {
        MappedFile a, b;
        Error err;
        char name[64];
        snprintf(name, sizeof(name), "gpt2_tokenizer/%s", names[i]);
        if (!map_file(&a, data_path(name), &err) || !map_file(&b, temp_path(saved[i]), &err)) { die("%s", err.text); }
        check_msg(a.size == b.size && memcmp(a.data, b.data, a.size) == 0, "%s is not what was read", names[i]);
        unmap_file(&a);
        unmap_file(&b);
    }
}

static void test_bin(void) {
    // llm.c's file, which can only decode: read, saved and read again
    Tokenizer t = small_tokenizer(), read, again;
    Error err;
    t.can_encode = false;
    check(tokenizer_save(&t, test_dir(), &err));
    check(tokenizer_load(&read, temp_path("gpt2_tokenizer.bin"), &err));
    check(!read.can_encode && read.vocab_size == 262 && read.eot_id == 261);
    check(memcmp(read.bytes, t.bytes, t.offsets[262]) == 0 && memcmp(read.offsets, t.offsets, 263 * 4) == 0);
    check(tokenizer_save(&read, test_dir(), &err) && tokenizer_load(&again, test_dir(), &err));
    check(same_tokenizer(&read, &again));
    tokenizer_free(&t);
    tokenizer_free(&read);
    tokenizer_free(&again);
    // every possible error in the file
    struct {
        int32_t h[256];
        char body[8];
    } file;
    const struct {
        int index, value;
        size_t size;
        const char* want;
    } cases[] = {
        {1, 3, 1029, "version 3"},           {2, 0, 1029, "0 tokens"},
        {2, -1, 1029, "-1 tokens"},          {2, 1 << 21, 1029, "tokens"},
        {3, 2, 1029, "end-of-text"},         {3, -1, 1029, "end-of-text"},
        {0, 7, 1029, "not a tokenizer"},     {4, 0, 1023, "too short"},
        {4, 0, 1024, "ends within token 0"}, {4, 0, 1028, "ends within token 1"},
        {4, 0, 1027, "ends within token 1"}, {4, 0, 1030, "1 bytes after"},
    };
    for (size_t i = 0; i <= sizeof(cases) / sizeof(cases[0]); i++) {
        memset(&file, 0, sizeof(file));
        file.h[0] = TOKENIZER_BIN_MAGIC;
        file.h[1] = 2;
        file.h[2] = 2;
        memcpy(file.body, "\2ab\1c", 5);
        // the last file has no error, so the others fail for the intended reason
        bool good = i == sizeof(cases) / sizeof(cases[0]);
        if (!good) { file.h[cases[i].index] = cases[i].value; }
        bool ok = tokenizer_load(&read, write_file("wrong.bin", &file, good ? 1029 : cases[i].size), &err);
        check_msg(ok == good && (good || strstr(err.text, cases[i].want)), "case %zu: %s", i, ok ? "read" : err.text);
        if (ok) { tokenizer_free(&read); }
    }
}

// Writes the 256 bytes as members of a JSON object, with ids from first_id on; leaves out byte `skip` if it is >= 0.
static void put_bytes_json(char* out, int first_id, int skip) {
    Vocab map;
    vocab_init(&map);
    for (int code = 0, id = first_id; code < 324; code++) {
        if (map.byte_of[code] < 0 || map.byte_of[code] == skip) { continue; }
        out += sprintf(out, "\"\\u%04x\": %d, ", code, id++);
    }
}

static void check_refused(bool ok, Tokenizer* t, const Error* err, const char* want, const char* what) {
    check_msg(!ok && strstr(err->text, want), "%.60s: %s; want '%s'", what, ok ? "was read" : err->text, want);
    check_msg(ok || !strchr(err->text, '\n'), "%.60s: more than one line", what);
    if (ok) { tokenizer_free(t); }
}

static void test_other_ids(void) {
    // a vocabulary in another order: <|endoftext|> is 0, bytes start at 1, tokens with no merge or two
    static char vocab[16384];
    Tokenizer t;
    Error err;
    size_t n;
    int at = sprintf(vocab, "{\"<|endoftext|>\": 0, ");
    put_bytes_json(vocab + at, 1, -1);
    strcat(vocab, "\"bc\": 257, \"ab\": 258, \"abc\": 259, \"<|pad|>\": 261, \"zzz\": 260}");
    TokenizerText none = {NULL, 0, NULL};
    TokenizerText added =
        text_of("{\"<my token>\": 262, \"\\u4f60\": 263, \"<|endoftext|>\": 0, \" \": 264}", "added_tokens.json");
    bool ok = parse_vocab(&t, text_of(vocab, "vocab"), text_of("a b\nb c\nab c\na bc\n", "merges"), added, &err);
    check_msg(ok, "%s", err.text);
    if (!ok) { return; }
    check(t.vocab_size == 265 && t.eot_id == 0);
    const int want[] = {259, 90, 90, 221, 258};
    check_ids(&t, "abczz ab", 8, want, 5);
    const char* s = tokenizer_decode(&t, 262, &n);
    check(n == 10 && memcmp(s, "<my token>", 10) == 0);
    s = tokenizer_decode(&t, 263, &n);
    check(n == 3 && memcmp(s, "\xE4\xBD\xA0", 3) == 0);
    s = tokenizer_decode(&t, 261, &n);
    check(n == 7 && memcmp(s, "<|pad|>", 7) == 0);
    const char* dir = temp_path("other");
    check(make_directories(dir, &err) && tokenizer_save(&t, dir, &err));
    // an added token " " has the same byte as a token of vocab.json, which spells it differently
    check_loads_same(&t, temp_path("other"));
    tokenizer_free(&t);
    added = text_of("{\"ab\": 262}", "added_tokens.json");
    ok = parse_vocab(&t, text_of(vocab, "vocab"), text_of("", "merges"), added, &err);
    check_refused(ok, &t, &err, "token 'ab' has two ids, 258 and 262", "ab");
    // a vocabulary without <|endoftext|>
    vocab[0] = '{';
    put_bytes_json(vocab + 1, 0, -1);
    strcat(vocab, "\"ab\": 256}");
    ok = parse_vocab(&t, text_of(vocab, "vocab"), text_of("a b", "merges"), none, &err);
    check(ok && t.eot_id == -1);
    if (ok) { tokenizer_free(&t); }
}

// Loads the directory "eot", whose tokenizer_config.json is replaced by text, and returns eot_id; -2 if it is refused.
static int eot_with_config(const char* text, Error* err) {
    Tokenizer t;
    write_file("eot/tokenizer_config.json", text, strlen(text));
    if (!tokenizer_load(&t, temp_path("eot"), err)) { return -2; }
    int eot = t.eot_id;
    tokenizer_free(&t);
    return eot;
}

static void test_eot(void) {
    Tokenizer t = small_tokenizer();
    char list[64], config[256];
    Error err;
    check(tokenizer_find(&t, "abc", 3) == 257 && tokenizer_find(&t, "abcd", 4) == -1);
    check(make_directories(temp_path("eot"), &err) && tokenizer_save(&t, temp_path("eot"), &err));
    snprintf(config, sizeof(config), "%s", temp_path("eot/tokenizer_config.json"));
    check(!file_exists(config)); // <|endoftext|> needs no file
    tokenizer_set_eot(&t, 258);
    check(tokenizer_save(&t, temp_path("eot"), &err));
    check_loads_same(&t, temp_path("eot"));
    check_loads_same(&t, temp_path("eot/vocab.json"));
    check_loads_same(&t, temp_path("eot/merges.txt"));
    Tokenizer plain = t;
    plain.eot_id = 261;
    check_loads_same(&t, write_tokenizer_json(&plain, true, "eot/tokenizer.json"));
    // as others write it; a file that says nothing about this vocabulary leaves <|endoftext|>
    check(eot_with_config("{\"model_max_length\": 8, \"eos_token\": {\"content\": \"abc\", \"lstrip\": false}}",
                          &err) == 257);
    check(eot_with_config("{\"eos_token\": \"</s>\"}", &err) == 261);
    check(eot_with_config("{\"eos_token\": null}", &err) == 261);
    check(eot_with_config("{\"model_max_length\": 8}", &err) == 261);
    check(eot_with_config("[1]", &err) == 261);
    check(eot_with_config("{\"eos_token\": ", &err) == -2 && strstr(err.text, "tokenizer_config.json") != NULL);
    tokenizer_list_special(&t, list, sizeof(list));
    check_str(list, "bc, <|endoftext|>");
    tokenizer_list_special(&t, list, 1); // a name that does not fit is left out
    check_str(list, "");
    tokenizer_free(&t);
}

// ---- added tokens --------------------------------------------------------------------------

// Writes a vocabulary of 258 tokens to dir/vocab.json and dir/merges.txt: 256 <|endoftext|>, 257 ab.
static void write_pair(const char* dir) {
    static char vocab[8192], name[64];
    Error err;
    require(make_directories(temp_path(dir), &err));
    vocab[0] = '{';
    put_bytes_json(vocab + 1, 0, -1);
    strcat(vocab, "\"<|endoftext|>\": 256, \"ab\": 257}");
    snprintf(name, sizeof(name), "%s/vocab.json", dir);
    write_file(name, vocab, strlen(vocab));
    snprintf(name, sizeof(name), "%s/merges.txt", dir);
    write_file(name, "#version: 0.2\na b\n", 18);
}

// Writes dir/tokenizer.json of the same vocabulary, with these added tokens. Returns its length.
static size_t write_json(const char* dir, const char* added) {
    static char bytes[8192], text[10000], name[64];
    put_bytes_json(bytes, 0, -1);
    snprintf(text, sizeof(text),
             "{\"added_tokens\": [%s], \"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"model\": {\"vocab\": "
             "{%s\"<|endoftext|>\": 256, \"ab\": 257}, \"merges\": [[\"a\", \"b\"]]}}",
             added, bytes);
    snprintf(name, sizeof(name), "%s/tokenizer.json", dir);
    write_file(name, text, strlen(text));
    return strlen(text);
}

enum { PLAIN = TOKEN_ADDED | TOKEN_NORMALIZED, SPECIAL = TOKEN_ADDED | TOKEN_SPECIAL };

// The flags of the tokens from 256 on, for what each file says. As transformers reads them; 4 knows
// additional_special_tokens, 5 extra_special_tokens.
static void test_added_flags(void) {
    static const struct {
        const char *file, *text, *file2, *text2;
        int count;
        uint8_t flags[8];
        int eos, bos, pad, unk;
    } cases[] = {
        {"none", "{}", "none", "{}", 2, {TOKEN_SPECIAL, 0}, 256, -1, -1, -1},
        // added_tokens.json alone: plain words, unless they are special by their name
        {"added_tokens.json",
         "{\"<u>\": 258, \"zz\": 259}",
         "none",
         "{}",
         4,
         {TOKEN_SPECIAL, 0, PLAIN, PLAIN},
         256,
         -1,
         -1,
         -1},
        {"added_tokens.json",
         "{\"<u>\": 258, \"<|endoftext|>\": 256}",
         "none",
         "{}",
         3,
         {SPECIAL, 0, PLAIN},
         256,
         -1,
         -1,
         -1},
        {"added_tokens.json",
         "{\"<u>\": 258, \"zz\": 259, \"<p>\": 260}",
         "special_tokens_map.json",
         "{\"additional_special_tokens\": [\"<u>\"], \"pad_token\": {\"content\": \"<p>\", \"lstrip\": true}}",
         5,
         {TOKEN_SPECIAL, 0, SPECIAL, PLAIN, SPECIAL},
         256,
         -1,
         260,
         -1},
        {"added_tokens.json",
         "{\"<u>\": 258, \"zz\": 259}",
         "tokenizer_config.json",
         "{\"eos_token\": \"<u>\", \"bos_token\": {\"content\": \"<|endoftext|>\"}, \"unk_token\": \"ab\", "
         "\"pad_token\": \"absent\"}",
         4,
         {TOKEN_SPECIAL | TOKEN_NORMALIZED, TOKEN_SPECIAL, SPECIAL, PLAIN},
         258,
         256,
         -1,
         257},
        // added_tokens_decoder, which may add ids, and whose flags replace others
        {"added_tokens.json",
         "{\"<u>\": 258}",
         "tokenizer_config.json",
         "{\"added_tokens_decoder\": {\"259\": {\"content\": \"\\u00e9 x\", \"special\": false, \"lstrip\": true, "
         "\"normalized\": false}, \"258\": {\"content\": \"<u>\", \"special\": true, \"single_word\": true, "
         "\"rstrip\": true}}}",
         4,
         {TOKEN_SPECIAL, 0, SPECIAL | TOKEN_SINGLE_WORD | TOKEN_RSTRIP, TOKEN_ADDED | TOKEN_LSTRIP},
         256,
         -1,
         -1,
         -1},
        {"tokenizer_config.json",
         "{\"extra_special_tokens\": {\"image_token\": \"ab\"}}",
         "none",
         "{}",
         2,
         {TOKEN_SPECIAL, TOKEN_SPECIAL},
         256,
         -1,
         -1,
         -1},
    };
    write_pair("flags");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *names[] = {cases[i].file, cases[i].file2}, *texts[] = {cases[i].text, cases[i].text2};
        Tokenizer t;
        Error err;
        char path[64];
        for (int k = 0; k < 2; k++) {
            snprintf(path, sizeof(path), "flags/%s", names[k]);
            write_file(path, texts[k], strlen(texts[k]));
        }
        bool ok = tokenizer_load(&t, temp_path("flags"), &err);
        check_msg(ok && t.vocab_size == 256 + cases[i].count, "case %zu: %s", i, ok ? "another number" : err.text);
        for (int k = 0; ok && k < cases[i].count && 256 + k < t.vocab_size; k++) {
            check_msg(t.flags[256 + k] == cases[i].flags[k], "case %zu: %d has %d", i, 256 + k, t.flags[256 + k]);
        }
        check_msg(!ok || (t.eot_id == cases[i].eos && t.bos_id == cases[i].bos && t.pad_id == cases[i].pad &&
                          t.unk_id == cases[i].unk),
                  "case %zu: %d %d %d %d", i, t.eot_id, t.bos_id, t.pad_id, t.unk_id);
        if (ok) { tokenizer_free(&t); }
        for (int k = 0; k < 2; k++) {
            snprintf(path, sizeof(path), "flags/%s", names[k]);
            unlink(temp_path(path));
        }
    }
}

// The flags of tokenizer.json, and an added token that merges make too.
static void test_added_json(void) {
    Tokenizer t;
    Error err;
    check(make_directories(temp_path("added"), &err));
    write_json("added", "{\"id\": 256, \"content\": \"<|endoftext|>\", \"special\": true, \"normalized\": false}, "
                        "{\"id\": 257, \"content\": \"ab\", \"special\": false, \"rstrip\": true}, "
                        "{\"id\": 258, \"content\": \"a \\u00e9\", \"special\": true, \"normalized\": true}");
    bool ok = tokenizer_load(&t, temp_path("added"), &err);
    check_msg(ok, "%s", err.text);
    if (!ok) { return; }
    check(t.vocab_size == 259 && t.flags[256] == SPECIAL && t.flags[257] == (PLAIN | TOKEN_RSTRIP));
    check(t.flags[258] == (SPECIAL | TOKEN_NORMALIZED) && t.flags[97] == 0 && t.eot_id == 256);
    check_ids(&t, "ab", 2, (const int[]){257}, 1);
    tokenizer_free(&t);
    static const struct {
        const char *config, *want;
    } wrong[] = {
        {"{\"added_tokens_decoder\": {\"9\": {\"content\": \"ab\"}}}", "token 'ab' has two ids, 257 and 9"},
        {"{\"added_tokens_decoder\": {\"260\": {\"content\": \"xx\"}}}", "ids are not 0 to 259: one is 260"},
        {"{\"added_tokens_decoder\": {\"1x\": {\"content\": \"x\"}}}", "'1x' wants to be an id"},
        {"{\"added_tokens_decoder\": {\"259\": {}}}", "'259' wants to be an id with a \"content\""},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        write_file("added/tokenizer_config.json", wrong[i].config, strlen(wrong[i].config));
        check_refused(tokenizer_load(&t, temp_path("added"), &err), &t, &err, wrong[i].want, wrong[i].config);
    }
}

// Saving keeps all flags and roles, in files that transformers 5.24 and 4.46 read so, too: vocab.json spells each token as it
// is, tokenizer_config.json has the rest.
static void test_added_saved(void) {
    static const char added[] =
        "{\"id\": 256, \"content\": \"<|endoftext|>\", \"special\": true, \"normalized\": true}, "
        "{\"id\": 258, \"content\": \"<|user|>\", \"special\": true, \"normalized\": false}, "
        "{\"id\": 259, \"content\": \"caf\\u00e9 \\u8bed\", \"special\": false, \"single_word\": true}, "
        "{\"id\": 260, \"content\": \"<\\\"\\\\>\", \"special\": true, \"rstrip\": true, \"lstrip\": true}";
    static const char config[] = "{\"eos_token\": \"<|user|>\", \"bos_token\": \"<|endoftext|>\", \"pad_token\": "
                                 "{\"content\": \"<\\\"\\\\>\", \"rstrip\": true}, \"unk_token\": null}";
    static const char want[] =
        "{\"added_tokens_decoder\": {"
        "\"256\": {\"content\": \"<|endoftext|>\", \"special\": true, \"lstrip\": false, \"rstrip\": false, "
        "\"single_word\": false, \"normalized\": true}, "
        "\"258\": {\"content\": \"<|user|>\", \"special\": true, \"lstrip\": false, \"rstrip\": false, "
        "\"single_word\": false, \"normalized\": false}, "
        "\"259\": {\"content\": \"caf\xC3\xA9 \xE8\xAF\xAD\", \"special\": false, \"lstrip\": false, \"rstrip\": "
        "false, "
        "\"single_word\": true, \"normalized\": true}, "
        "\"260\": {\"content\": \"<\\\"\\\\>\", \"special\": true, \"lstrip\": true, \"rstrip\": true, "
        "\"single_word\": false, \"normalized\": false}}, \"additional_special_tokens\": [], "
        "\"eos_token\": \"<|user|>\", \"bos_token\": \"<|endoftext|>\", \"pad_token\": \"<\\\"\\\\>\", "
        "\"unk_token\": null, \"tokenizer_class\": \"GPT2Tokenizer\"}\n";
    static const char tail[] =
        "\"<|endoftext|>\": 256, \"ab\": 257, \"<|user|>\": 258, \"caf\xC3\xA9 \xE8\xAF\xAD\": 259, "
        "\"<\\\"\\\\>\": 260}";
    Tokenizer t, read;
    MappedFile file;
    Error err;
    check(make_directories(temp_path("before"), &err) && make_directories(temp_path("after"), &err));
    write_json("before", added);
    write_file("before/tokenizer_config.json", config, strlen(config));
    bool ok = tokenizer_load(&t, temp_path("before"), &err) && tokenizer_save(&t, temp_path("after"), &err) &&
              tokenizer_load(&read, temp_path("after"), &err);
    check_msg(ok, "%s", err.text);
    if (!ok) { return; }
    check(same_tokenizer(&t, &read) && memcmp(t.flags, read.flags, 261) == 0);
    check(read.eot_id == 258 && read.bos_id == 256 && read.pad_id == 260 && read.unk_id == -1);
    check(map_file(&file, temp_path("after/tokenizer_config.json"), &err) && file.size == strlen(want));
    check_msg(memcmp(file.data, want, file.size) == 0, "%.*s", (int)file.size, (const char*)file.data);
    unmap_file(&file);
    check(map_file(&file, temp_path("after/vocab.json"), &err) && file.size > sizeof(tail));
    check(memcmp(file.data + file.size - strlen(tail), tail, strlen(tail)) == 0);
    unmap_file(&file);
    check(!file_exists(temp_path("after/added_tokens.json")));
    read.flags[257] = TOKEN_ADDED;
    check(tokenizer_sum_flags(&read) != t.flags_sum);
    read.flags[257] = 0, read.flags[258] = TOKEN_SPECIAL;
    check(tokenizer_sum_flags(&read) == t.flags_sum);
    tokenizer_free(&t);
    tokenizer_free(&read);
}

// tokenizer.json is used; the files beside it must say the same.
static void test_two_vocabularies(void) {
    static const char eot[] = "{\"id\": 256, \"content\": \"<|endoftext|>\", \"special\": true}";
    static const struct {
        const char *name, *old, *other, *want;
    } cases[] = {
        {"vocab.json", "\"ab\": 257", "\"ab\": 258", "token 'ab' has id 258, but 257 in"},
        {"vocab.json", "\"ab\"", "\"ac\"", "token 'ac' has id 257, but -1 (none) in"},
        {"vocab.json", ", \"ab\": 257", "", "token 'ab' is missing, but has id 257 in"},
        {"merges.txt", "a b", "b a", "merge 1 is 'b a', but 'a b' in"},
        {"merges.txt", "a b", "a b\nb a", "merge 2 is 'b a', but 'none' in"},
        {"merges.txt", "a b", "", "merge 1 is 'none', but 'a b' in"},
        {"added_tokens.json", "", "{\"<u>\": 259}", "token '<u>' has id 259, but 258 in"},
        {"added_tokens.json", "", "{\"xx\": 258}", "token 'xx' has id 258, but -1 (none) in"},
    };
    char text[9000], changed[9000], added[200], name[64];
    Tokenizer t;
    Error err;
    snprintf(added, sizeof(added), "%s, {\"id\": 258, \"content\": \"<u>\", \"special\": true}", eot);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_pair("two");
        write_json("two", added);
        snprintf(name, sizeof(name), "two/%s", cases[i].name);
        FILE* f = fopen(temp_path(name), "rb");
        size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
        if (f) { fclose(f); }
        text[n] = '\0';
        const char* at = strstr(text, cases[i].old);
        require(at);
        snprintf(changed, sizeof(changed), "%.*s%s%s", (int)(at - text), text, cases[i].other,
                 at + strlen(cases[i].old));
        write_file("two/added_tokens.json", "{\"<u>\": 258}", 12); // says the same
        bool ok = tokenizer_load(&t, temp_path("two"), &err);
        check_msg(ok && t.vocab_size == 259 && t.flags[258] == SPECIAL, "%s", ok ? "another one" : err.text);
        if (ok) { tokenizer_free(&t); }
        write_file(name, changed, strlen(changed));
        snprintf(text, sizeof(text), "remove %s", cases[i].name);
        ok = tokenizer_load(&t, temp_path("two"), &err);
        check_refused(ok, &t, &err, cases[i].want, cases[i].other);
        check_msg(strstr(err.text, text), "%s", err.text);
        // the file itself can still be named
        ok = tokenizer_load(&t, temp_path("two/tokenizer.json"), &err);
        check_msg(ok, "%s", err.text);
        if (ok) { tokenizer_free(&t); }
        unlink(temp_path("two/added_tokens.json"));
    }
}

static void test_byte_order_mark(void) {
    static const char* const names[] = {"mark/vocab.json", "mark/merges.txt", "mark/tokenizer_config.json",
                                        "mark/tokenizer.json"};
    static char text[9000];
    Tokenizer want, got;
    Error err;
    write_pair("mark");
    write_file("mark/tokenizer_config.json", "{\"eos_token\": \"ab\"}", 19);
    require(tokenizer_load(&want, temp_path("mark"), &err));
    write_json("mark", "");
    for (int i = 0; i < 4; i++) {
        FILE* f = fopen(temp_path(names[i]), "rb");
        memcpy(text, "\xEF\xBB\xBF", 3);
        size_t n = f ? fread(text + 3, 1, sizeof(text) - 3, f) : 0;
        if (f) { fclose(f); }
        write_file(names[i], text, n + 3);
        bool ok = tokenizer_load(&got, temp_path(i < 3 ? "mark/vocab.json" : names[i]), &err);
        check_msg(ok && same_tokenizer(&want, &got), "%s: %s", names[i], ok ? "differs" : err.text);
        if (ok) { tokenizer_free(&got); }
    }
    tokenizer_free(&want);
}

// Loads the vocabulary of the fixture into t. Returns its lines: the added tokens, then texts with their ids.
static MappedFile added_fixture(Tokenizer* t) {
    MappedFile file;
    Error err;
    char added[4096];
    if (!map_file(&file, "dev/test/fixtures/added_tokens.jsonl", &err)) { die("%s", err.text); }
    const char *begin = strchr((const char*)file.data, '[') + 1, *end = strchr(begin, '\n');
    snprintf(added, sizeof(added), "%.*s", (int)(end - begin) - 2, begin); // without ]}
    require(make_directories(temp_path("fixture"), &err));
    write_json("fixture", added);
    if (!tokenizer_load(t, temp_path("fixture"), &err)) { die("%s", err.text); }
    return file;
}

// Checks the ids of the fixture's lines.
static void check_added_golden(const Tokenizer* t, const MappedFile* file) {
    TokenBuffer b = {0};
    Error err;
    int lines = 0;
    const char *end = (const char*)file->data + file->size, *at = (const char*)memchr(file->data, '\n', file->size) + 1;
    for (const char* newline; at < end; at = newline + 1, lines++) {
        JsonDoc doc;
        newline = (const char*)memchr(at, '\n', (size_t)(end - at));
        if (!json_parse(&doc, at, (size_t)(newline - at), "added", &err)) { die("%s", err.text); }
        const JsonValue* text = json_get(doc.root, "text");
        for (int special = 0; special < 2; special++) {
            const JsonValue* want = json_get(doc.root, special ? "special" : "plain");
            b.count = b.spelled = 0;
            tokenizer_encode_text(t, text->string, text->length, special, &b);
            bool same = b.count == want->count;
            for (size_t i = 0; same && i < b.count; i++) { same = b.ids[i] == want->items[i].integer; }
            check_msg(same, "'%s', special %d: %zu ids, want %u", text->string, special, b.count, want->count);
            check(!special || b.spelled == 0);
        }
        json_free(&doc);
    }
    check_msg(lines == 20, "%d lines, want 20", lines);
    token_buffer_free(&b);
}

// Added tokens in text, with the ids of tokenizers 0.23.3; also once the vocabulary was saved and loaded again.
static void test_added_golden(void) {
    Tokenizer t, saved;
    Error err;
    MappedFile file = added_fixture(&t);
    check_added_golden(&t, &file);
    bool ok = make_directories(temp_path("golden"), &err) && tokenizer_save(&t, temp_path("golden"), &err) &&
              tokenizer_load(&saved, temp_path("golden"), &err);
    check_msg(ok, "%s", err.text);
    if (ok) {
        check_added_golden(&saved, &file);
        tokenizer_free(&saved);
    }
    unmap_file(&file);
    tokenizer_free(&t);
}

// A text is encoded whole and cut at a position that tokenizer_find_cut() finds in its first bytes.
static void test_added_cuts(void) {
    static const char* const parts[] = {"<|endoftext|>",
                                        "ab",
                                        "<s>",
                                        "</s>",
                                        "zebra",
                                        "zebra fish",
                                        "ze",
                                        "\xC3\xA9\xE8\xAF\xAD",
                                        "  ",
                                        "<m>",
                                        "m>b",
                                        "fish",
                                        " zebra",
                                        " ",
                                        "\n",
                                        "\xE3\x80\x80",
                                        "x",
                                        "_",
                                        "5",
                                        ".",
                                        "<|end",
                                        "\xE3\x80",
                                        "\xFF"};
    Tokenizer t;
    TokenBuffer whole = {0}, cut = {0};
    MappedFile file = added_fixture(&t);
    int found = 0;
    unmap_file(&file);
    for (int round = 0; round < 60000; round++) {
        char text[256];
        size_t n = 0, num_parts = 2 + random_u32() % 9;
        for (size_t i = 0; i < num_parts; i++) {
            const char* part = parts[random_u32() % (sizeof(parts) / sizeof(parts[0]))];
            memcpy(text + n, part, strlen(part));
            n += strlen(part);
        }
        size_t c = tokenizer_find_cut(&t, text, 1 + random_u32() % n);
        if (c == 0) { continue; }
        found++;
        for (int k = 0; k < 4; k++) { // special or not; the beginning of a document or not
            whole.count = whole.spelled = cut.count = cut.spelled = 0;
            size_t documents = tokenizer_encode_document(&t, text, n, k & 1, k & 2, &whole);
            size_t parted = tokenizer_encode_document(&t, text, c, k & 1, k & 2, &cut);
            parted += tokenizer_encode_document(&t, text + c, n - c, false, k & 2, &cut);
            bool same = whole.count == cut.count && whole.spelled == cut.spelled && documents == parted;
            same = same && memcmp(whole.ids, cut.ids, whole.count * sizeof(whole.ids[0])) == 0;
            check_msg(same, "'%.*s' cut at %zu of %zu, case %d", (int)n, text, c, n, k);
        }
    }
    check_msg(found > 10000, "only %d cuts found", found);
    token_buffer_free(&whole);
    token_buffer_free(&cut);
    tokenizer_free(&t);
}

// <|endoftext|> in a text: the tokens and the number of documents, with --special and without.
static void test_added_documents(void) {
    static const struct {
        const char* text;
        int documents; // with --special
        int count, ids[12];
    } cases[] = {
        {"a<|endoftext|>b", 2, 4, {256, 64, 256, 65}},
        {"<|endoftext|>a<|endoftext|>\n<|endoftext|>b<|endoftext|>\n", 2, 4, {256, 64, 256, 65}},
        {"a\n<|endoftext|>\n b<|endoftext|><|endoftext|>", 2, 7, {256, 64, 198, 256, 198, 220, 65}},
        {"<|endoftext|> \n", 0, 0, {0}},
        {" \n", 1, 3, {256, 220, 198}},
    };
    Tokenizer t;
    TokenBuffer b = {0};
    tokenizer_init_bytes(&t);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = strlen(cases[i].text);
        b.count = b.spelled = 0;
        int documents = (int)tokenizer_encode_document(&t, cases[i].text, n, true, true, &b);
        bool same = documents == cases[i].documents && (int)b.count == cases[i].count;
        for (size_t k = 0; same && k < b.count; k++) { same = b.ids[k] == (uint32_t)cases[i].ids[k]; }
        check_msg(same && b.spelled == 0, "case %zu: %d documents, %zu tokens", i, documents, b.count);
        size_t spelled = 0;
        for (const char* s = cases[i].text; (s = strstr(s, TOKENIZER_EOT)); s++) { spelled++; }
        b.count = 0;
        documents = (int)tokenizer_encode_document(&t, cases[i].text, n, true, false, &b);
        check_msg(documents == 1 && b.count == n + 1 && b.spelled == spelled, "case %zu: %zu spelled", i, b.spelled);
    }
    token_buffer_free(&b);
    tokenizer_free(&t);
}

static void test_bad_merges(void) {
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"a b\nc\n", "m.txt:2: want two tokens"},
        {"a b\n\nb c\n", "m.txt:2: want two tokens"},
        {"a b\r\n \r\nb c\r\n", "m.txt:2: want two tokens"},
        {"a  b\n", "m.txt:1: want two tokens"},
        {" a b\n", "m.txt:1: want two tokens"},
        {"a b \n", "m.txt:1: want two tokens"},
        {"a b c\n", "m.txt:1: want two tokens"},
        {"ab c\n", "m.txt:1: 'ab' is not a known token"},
        {"a b\nc de\n", "m.txt:2: 'de' is not a known token"},
        {"a b\na b\n", "m.txt:2: token 'ab' (id 257) occurs twice"},
        {"a \xFF\n", "is not a known token"},
        {"a \xE4\xBD\xA0\n", "is not a known token"},
        {"a \t\n", "is not a known token"},
        {"a b\n#version: 0.2\n", "m.txt:2: '#version:' is not a known token"},
    };
    Tokenizer t;
    Error err;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool ok = parse_merges(&t, text_of(cases[i].text, "m.txt"), &err);
        check_refused(ok, &t, &err, cases[i].want, cases[i].text);
    }
    // without the version line; with Windows line ends; blank lines behind them; without the last newline
    check(parse_merges(&t, text_of("a b\r\nab c\r\n", "m.txt"), &err) && t.num_merges == 2);
    tokenizer_free(&t);
    check(parse_merges(&t, text_of("#version: 0.2\na b\nab c", "m.txt"), &err) && t.num_merges == 2);
    tokenizer_free(&t);
    check(parse_merges(&t, text_of("a b\nab c\n\n \t\r\n  ", "m.txt"), &err) && t.num_merges == 2);
    tokenizer_free(&t);
}

static void test_bad_vocab(void) {
    static char bytes[8192], vocab[9000], no_byte[8192];
    put_bytes_json(bytes, 0, -1);
    put_bytes_json(no_byte, 0, 0x20);
    static const struct {
        const char *tail, *merges, *want;
    } cases[] = {
        {"\"ab\": 256}", "a c", "m.txt:1: the vocabulary has no token 'ac'"},
        {"\"ab\": 257}", "", "ids are not 0 to 256: one is 257 among 257"},
        {"\"ab\": 255}", "", "two tokens have id 255"},
        {"\"ab\": -1}", "", "(id -1) has an id outside"},
        {"\"ab\": 1048576}", "", "(id 1048576) has an id outside"},
        {"\"ab\": 1e30}", "", "not an integer"},
        {"\"ab\": 256.5}", "", "not an integer"},
        {"\"ab\": \"256\"}", "", "not an integer"},
        {"\"ab\": null}", "", "not an integer"},
        {"\"\": 256}", "", "(id 256) is empty"},
        {"\"a b\": 256}", "", "token 'a b' contains a character"},
        {"\"\\u4f60\": 256}", "", "contains a character"},
        {"\"\\u0144\": 256}", "", "contains a character"},
        {"\"ab\": 256, \"ab\": 257}", "", "twice"},
        {"\"ab\": 256", "", "not valid JSON"},
        {"\"ab\": 256} x", "", "not valid JSON"},
        {"\"ab\": 256}", "a b\na b", "merge 2 is the same as merge 1"},
        {"\"ab\": 256}", "a b\nab c", "m.txt:2: the vocabulary has no token 'abc'"},
        {"\"ab\": 256}", "a de", "m.txt:1: 'de' is not a known token"},
        {"\"<s>\": 256, \"ab\": 257}", "", "m.txt: tokens without a merge: 2, the first 'ab' (id 257)"},
    };
    Tokenizer t;
    Error err;
    TokenizerText none = {NULL, 0, NULL};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(vocab, sizeof(vocab), "{%s%s", bytes, cases[i].tail);
        bool ok = parse_vocab(&t, text_of(vocab, "v.json"), text_of(cases[i].merges, "m.txt"), none, &err);
        check_refused(ok, &t, &err, cases[i].want, cases[i].tail);
    }
    snprintf(vocab, sizeof(vocab), "{%s\"ab\": 255}", no_byte);
    bool ok = parse_vocab(&t, text_of(vocab, "v.json"), text_of("", "m.txt"), none, &err);
    check_refused(ok, &t, &err, "no token for byte 0x20", "a byte is missing");
    ok = parse_vocab(&t, text_of("{}", "v.json"), text_of("", "m.txt"), none, &err);
    check_refused(ok, &t, &err, "no tokens", "{}");
    ok = parse_vocab(&t, text_of("[1]", "v.json"), text_of("", "m.txt"), none, &err);
    check_refused(ok, &t, &err, "want an object", "[1]");
    snprintf(vocab, sizeof(vocab), "{%s\"ab\": 256}", bytes);
    ok = parse_vocab(&t, text_of(vocab, "v.json"), text_of("a b", "m.txt"), none, &err);
    // without an error the vocabulary is read, so the others fail for the intended reason
    check_msg(ok, "%s", err.text);
    if (ok) { tokenizer_free(&t); }
}

// The first difference of two vocabularies.
static void test_same(void) {
    static const struct {
        const char *merges, *want; // want NULL: none
    } cases[] = {
        {"a b\nb c\nab c\n", NULL},
        {"a b\nb c\na bc\n", "merge 3 joins different tokens"},
        {"a b\nc b\nab c\n", "token 257 is 'cb' instead of 'bc'"},
        {"a b\nb c\n", "259 tokens instead of 260"},
    };
    Tokenizer a, b;
    Error err;
    char what[200];
    if (!parse_merges(&a, text_of(cases[0].merges, "m.txt"), &err)) { die("%s", err.text); }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (!parse_merges(&b, text_of(cases[i].merges, "m.txt"), &err)) { die("%s", err.text); }
        bool same = tokenizer_same(&a, &b, what, sizeof(what));
        check_msg(cases[i].want ? !same && strcmp(what, cases[i].want) == 0 : same, "case %zu: %s", i, what);
        b.can_encode = false; // like a tokenizer.bin: without merges to compare
        check(tokenizer_same(&a, &b, what, sizeof(what)) == (i < 2));
        tokenizer_free(&b);
    }
    tokenizer_free(&a);
}

// A merges.txt that was cut at the end of a line is refused, but not for tokens that need no merge.
static void test_missing_merges(void) {
    static const struct {
        const char *merges, *special, *want; // want NULL: the vocabulary is read
    } cases[] = {
        {"a b\nab c\n", "{\"mask_token\": \"PL\"}", NULL},
        {"a b\nab c\n", "{}", "tokens without a merge: 2, the first 'PL' (id 260)"},
        {"a b\n", "{\"mask_token\": \"PL\"}", "tokens without a merge: 2, the first 'abc' (id 258)"},
    };
    static char vocab[16384];
    Tokenizer t;
    Error err;
    int at = sprintf(vocab, "{\"SG\": 0, "); // a special token in training: its id precedes the bytes'
    put_bytes_json(vocab + at, 1, -1);
    strcat(vocab, "\"ab\": 257, \"abc\": 258, \"<s>\": 259, \"PL\": 260}");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const TokenizerText files[TOKENIZER_NUM_TEXTS] = {[TOKENIZER_VOCAB] = text_of(vocab, "vocab.json"),
                                                          [TOKENIZER_MERGES] = text_of(cases[i].merges, "merges.txt"),
                                                          [TOKENIZER_MAP] = text_of(cases[i].special, "map")};
        bool ok = tokenizer_parse(&t, files, &err);
        if (cases[i].want) {
            check_refused(ok, &t, &err, cases[i].want, cases[i].merges);
            continue;
        }
        check_msg(ok, "%s", err.text);
        if (!ok) { continue; }
        check(t.flags[0] == TOKEN_SPECIAL && t.flags[259] == TOKEN_SPECIAL && t.flags[260] == TOKEN_SPECIAL);
        check(make_directories(temp_path("missing"), &err) && tokenizer_save(&t, temp_path("missing"), &err));
        check_loads_same(&t, temp_path("missing")); // what is saved lists PL
        tokenizer_free(&t);
    }
}

// Parses a tokenizer.json in which `old` is replaced by `other`.
static bool parse_json_with(Tokenizer* t, const char* old, const char* other, Error* err) {
    static char bytes[8192], good[10000], text[12000];
    put_bytes_json(bytes, 0, -1);
    snprintf(good, sizeof(good),
             "{\"added_tokens\": [{\"id\": 257, \"content\": \"<|endoftext|>\"}, {\"id\": 258, \"content\": \"a "
             "b\\u00e9\"}], "
             "\"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, "
             "\"model\": {\"type\": "
             "\"BPE\", \"dropout\": null, \"end_of_word_suffix\": \"\", \"byte_fallback\": false, \"vocab\": "
             "{%s\"ab\": 256, "
             "\"<|endoftext|>\": 257}, \"merges\": [\"a b\"]}}",
             bytes);
    const char* at = strstr(good, old);
    require(at);
    snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - good), good, other, at + strlen(old));
    return parse_json(t, text_of(text, "t.json"), err);
}

static void test_bad_tokenizer_json(void) {
    static const struct {
        const char *old, *other, *want;
    } cases[] = {
        {"\"BPE\"", "\"WordPiece\"", "model type 'WordPiece'"},
        {"\"type\": \"ByteLevel\"", "\"type\": \"Metaspace\"", "pre_tokenizer 'Metaspace'"},
        {"\"pre_tokenizer\"", "\"x\"", "pre_tokenizer ''"},
        {"\"add_prefix_space\": false", "\"add_prefix_space\": true", "add_prefix_space"},
        {"\"add_prefix_space\": false", "\"use_regex\": false", "use_regex"},
        {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", "normalizer 'NFC'"},
        {"\"dropout\": null", "\"dropout\": 0.1", "model.dropout"},
        {"\"end_of_word_suffix\": \"\"", "\"end_of_word_suffix\": \"</w>\"", "model.end_of_word_suffix"},
        {"\"byte_fallback\": false", "\"byte_fallback\": true", "model.byte_fallback"},
        {"\"byte_fallback\": false", "\"ignore_merges\": true", "model.ignore_merges"},
        {"\"byte_fallback\": false", "\"continuing_subword_prefix\": \"##\"", "model.continuing_subword_prefix"},
        {"\"model\"", "\"x\"", "no \"model\""},
        {"\"vocab\"", "\"x\"", "\"vocab\" is missing"},
        {"\"merges\"", "\"x\"", "\"merges\" is missing"},
        {"[\"a b\"]", "\"a b\"", "\"merges\" is a string"},
        {"[\"a b\"]", "[\"ab\"]", "merge 1: want two tokens"},
        {"[\"a b\"]", "[[\"a\"]]", "merge 1: want"},
        {"[\"a b\"]", "[[\"a\", 1]]", "merge 1: want"},
        {"[\"a b\"]", "[7]", "merge 1: want"},
        {"[\"a b\"]", "[\"a b \"]", "merge 1: 'b ' is not a known token"},
        {"[\"a b\"]", "[[\"\", \"a\"]]", "merge 1: '' is not a known token"},
        {"[\"a b\"]", "[\"a c\"]", "merge 1: the vocabulary has no token 'ac'"},
        {"[\"a b\"]", "[\"a b\", [\"a\", \"b\"]]", "merge 2 is the same as merge 1"},
        {"[\"a b\"]", "[]", "t.json: tokens without a merge: 1, the first 'ab' (id 256)"},
        {"{\"id\": 257", "{\"id\": 255", "has two ids"},
        {"\"id\": 258", "\"id\": \"258\"", "added_tokens[1]"},
        {"\"id\": 258", "\"id\": 256", "two tokens have id 256"},
        {"\"content\": \"a b", "\"text\": \"a b", "added_tokens[1]"},
        {"\"id\": 258, \"content\": \"a b\\u00e9\"", "\"id\": 165, \"content\": \"\\u00e9\"", "the id of a byte"},
        {"\"a b\\u00e9\"", "\"<|endoftext|>\"", "occurs twice"},
        {"\"added_tokens\": [", "\"added_tokens\": 1, \"x\": [", "not a list"},
    };
    Tokenizer t;
    Error err;
    size_t n;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool ok = parse_json_with(&t, cases[i].old, cases[i].other, &err);
        check_refused(ok, &t, &err, cases[i].want, cases[i].other);
    }
    static const char* const fine[][2] = {
        {"\"type\": \"BPE\", ", ""}, {"[\"a b\"]", "[[\"a\", \"b\"]]"}, {"null", "null"}};
    for (int i = 0; i < 3; i++) {
        bool ok = parse_json_with(&t, fine[i][0], fine[i][1], &err);
        check_msg(ok, "%s", err.text);
        if (!ok) { continue; }
        const char* s = tokenizer_decode(&t, 258, &n);
        check(t.vocab_size == 259 && t.eot_id == 257 && n == 5 && memcmp(s, "a b\xC3\xA9", 5) == 0);
        check_ids(&t, "ab", 2, (const int[]){256}, 1);
        tokenizer_free(&t);
    }
}

static void test_mistaken_files(void) {
    static const struct {
        const char *name, *text, *want;
    } cases[] = {
        {"lfs/merges.txt", "version https://git-lfs.github.com/spec/v1\n", "git-LFS"},
        {"page/merges.txt", "<!DOCTYPE html>\n<html>", "web page"},
        {"empty/merges.txt", "", "is empty"},
        {"half/vocab.json", "{\"a\": 0}", "merges.txt"},
        {"gguf/tokenizer.bin", "GGUF", "too short"},
        {"other.json", "{\"a\": 0}", "no \"model\""},
        {"array.json", "[1]", "want two tokens"},
        {"a.model", "\n\x0E\n\x05<unk>\x15\x01\x01\x01\x01\x18\x02",
         "is a model of SentencePiece: only byte-level BPE"},
        {"a.vocab", "<unk>\t0\n<s>\t0\n", "is a vocabulary of SentencePiece: only"},
        {"gpt2.tiktoken", "IQ== 0\nIg== 1\n", "is a vocabulary of tiktoken: only"},
        {"vocab.txt", "[PAD]\n[unused0]\n", "is a vocabulary of BERT: only"},
    };
    Tokenizer t;
    Error err;
    const char* dirs[] = {"lfs", "page", "empty", "half", "gguf", "none"};
    for (int i = 0; i < 6; i++) { check(make_directories(temp_path(dirs[i]), &err)); }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool ok = tokenizer_load(&t, write_file(cases[i].name, cases[i].text, strlen(cases[i].text)), &err);
        check_refused(ok, &t, &err, cases[i].want, cases[i].name);
    }
    check_refused(tokenizer_load(&t, temp_path("none"), &err), &t, &err, "no vocabulary here", "an empty directory");
    write_file("none/tokenizer.model", "x", 1);
    check_refused(tokenizer_load(&t, temp_path("none"), &err), &t, &err, "tokenizer.model is not read",
                  "SentencePiece's");
    check_refused(tokenizer_load(&t, temp_path("half"), &err), &t, &err, "no vocabulary here", "vocab.json alone");
    check_refused(tokenizer_load(&t, temp_path("absent"), &err), &t, &err, "No such file", "no file");
}

// the vocabularies that a program which writes 16-bit ids accepts and rejects
static void test_encoder(void) {
    Tokenizer small = small_tokenizer(), t; // 262 tokens
    Error err;
    check(tokenizer_load_encoder(&t, NULL, 257, "shards", &err) && t.can_encode && t.vocab_size == 257);
    tokenizer_free(&t);
    check(make_directories(temp_path("whole"), &err) && tokenizer_save(&small, temp_path("whole"), &err));
    check(tokenizer_load_encoder(&t, temp_path("whole"), 262, "shards", &err) && same_tokenizer(&t, &small));
    tokenizer_free(&t);
    check_refused(tokenizer_load_encoder(&t, temp_path("whole"), 261, "shards", &err), &t, &err,
                  "262 tokens; shards hold 16-bit ids, 261 at most", "one token too many");
    small.can_encode = false;
    check(make_directories(temp_path("ids"), &err) && tokenizer_save(&small, temp_path("ids"), &err));
    check_refused(tokenizer_load_encoder(&t, temp_path("ids"), 65536, "shards", &err), &t, &err, "can only decode",
                  "tokenizer.bin alone");
    check_refused(tokenizer_load_encoder(&t, temp_path("absent"), 65536, "shards", &err), &t, &err, "No such file",
                  "no file");
    tokenizer_free(&small);
}

// ---- UTF-8 -------------------------------------------------------------------------------

static void test_utf8_stream(void) {
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"abc", "abc"},
        {"\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80", "\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80"},
        {"\xFF", "\xEF\xBF\xBD"},
        {"\xE4\xBD", "\xEF\xBF\xBD"}, // the text ends within a character
        {"\xE4\xBD"
         "a",
         "\xEF\xBF\xBD"
         "a"}, // one replacement character for the valid beginning
        {"\xE4\xBD\xE4\xBD\xA0", "\xEF\xBF\xBD\xE4\xBD\xA0"},
        {"\xC0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD"},                 // overlong
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, // surrogate
        // Unicode 16.0, tables 3-8 and those around it
        {"\xF0\x80\x80\x41", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\x41"},
        {"\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\x62\xEF\xBF\xBD\x63"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = strlen(cases[i].in);
        for (size_t step = 1; step <= n; step++) { // cut into pieces of any size
            Utf8Stream s = {{0}, 0};
            char out[128];
            size_t k = 0;
            for (size_t at = 0; at < n; at += step) {
                k += utf8_stream_push(&s, cases[i].in + at, n - at < step ? n - at : step, out + k);
                check(s.count <= 3);
            }
            k += utf8_stream_flush(&s, out + k);
            out[k] = '\0';
            check_msg(strcmp(out, cases[i].out) == 0, "case %zu in steps of %zu: %zu bytes", i, step, k);
        }
    }
    Utf8Stream s = {{0}, 0};
    char out[16];
    // incomplete characters are held back
    check(utf8_stream_push(&s, "\xF0\x9F", 2, out) == 0 && utf8_stream_push(&s, "\x98", 1, out) == 0);
    check(utf8_stream_push(&s, "\x80", 1, out) == 4 && utf8_stream_flush(&s, out) == 0);
}

static const Test tests[] = {
    {"pieces", "the scanner against pieces by hand", test_pieces},
    {"classes", "letters, numbers, spaces of Unicode 16.0", test_classes},
    {"cuts", "a chunk's end never changes the pieces", test_cuts},
    {"byte_vocabulary", "256 bytes and end-of-text", test_byte_vocabulary},
    {"small_merges", "five merges, ids by hand", test_small_merges},
    {"merge_order", "short and long pieces against the definition", test_merge_order},
    {"cache_owner", "a cache does not serve another vocabulary", test_cache_owner},
    {"threads", "threads share a tokenizer", test_threads},
    {"roundtrip_bytes", "every string up to 2 bytes, 100,000 random ones", test_roundtrip_bytes},
    {"hostile", "1 MiB of what hurts, byte-level", test_hostile},
    {"forms", "all files of one vocabulary read the same", test_forms},
    {"other_ids", "vocabularies numbered in another way, added tokens", test_other_ids},
    {"eot", "end-of-text of another name, and the file that remembers it", test_eot},
    {"added_flags", "the flags of added tokens, from every file that has them", test_added_flags},
    {"added_saved", "saving keeps the flags and roles of added tokens, for Hugging Face too", test_added_saved},
    {"added_json", "added tokens of tokenizer.json, and what is wrong with them", test_added_json},
    {"added_golden", "20 texts with added tokens as tokenizers encodes them", test_added_golden},
    {"added_cuts", "a chunk's end never changes added tokens", test_added_cuts},
    {"added_documents", "end-of-text in a text separates documents", test_added_documents},
    {"two_vocabularies", "vocab.json, merges.txt and added_tokens.json beside tokenizer.json", test_two_vocabularies},
    {"byte_order_mark", "a byte order mark before a vocabulary's files", test_byte_order_mark},
    {"bin", "llm.c's tokenizer.bin and its faults", test_bin},
    {"bad_merges", "every rule of merges.txt", test_bad_merges},
    {"bad_vocab", "every rule of vocab.json", test_bad_vocab},
    {"missing_merges", "a merges.txt that was cut at the end of a line", test_missing_merges},
    {"same", "the first difference of two vocabularies", test_same},
    {"bad_tokenizer_json", "every rule of tokenizer.json", test_bad_tokenizer_json},
    {"mistaken_files", "what users hand in by mistake", test_mistaken_files},
    {"encoder", "vocabularies for 16-bit ids", test_encoder},
    {"utf8_stream", "whole characters for a terminal", test_utf8_stream},
    {"golden", "357 texts as tokenizers and tiktoken encode them", test_golden},
    {"tinyshakespeare", "338,025 tokens", test_tinyshakespeare},
    {"roundtrip_gpt2", "the same with GPT-2's vocabulary", test_roundtrip_gpt2},
    {"hostile_gpt2", "1 MiB of what hurts, GPT-2", test_hostile_gpt2},
    {"forms_gpt2", "all files of GPT-2's vocabulary read the same", test_forms_gpt2},
};

int main(int argc, char** argv) {
    int code = run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
    release_gpt2();
    return code;
}
