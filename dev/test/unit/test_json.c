/* The strict JSON reader and the escaping of strings: one test per rule of RFC 8259 that matters here.

   gcc -O3 -std=gnu11 -fopenmp dev/test/unit/test_json.c -lm -lpthread -o dev/test/unit/test_json && dev/test/unit/test_json */
#include "../../../llmc/json.h"
#include "../test.h"

typedef struct {
    const char* text;
    const char* reason; // must be in the error message; NULL: the text is valid
} Case;

// Parses a heap copy of exactly n bytes, so that a sanitizer detects a read past the end.
static bool parse_n(JsonDoc* doc, const char* text, size_t n, Error* err) {
    char* copy = (char*)malloc_check(n);
    memcpy(copy, text, n);
    err->text[0] = '\0';
    bool ok = json_parse(doc, copy, n, "file.json", err);
    free(copy);
    return ok;
}

static bool parse(JsonDoc* doc, const char* text) {
    Error err;
    bool ok = parse_n(doc, text, strlen(text), &err);
    check_msg(ok, "%s refused: %s", text, err.text);
    return ok;
}

static void check_cases(const Case* cases, size_t num_cases) {
    for (size_t i = 0; i < num_cases; i++) {
        JsonDoc doc;
        Error err;
        bool ok = parse_n(&doc, cases[i].text, strlen(cases[i].text), &err);
        check_msg(ok == !cases[i].reason, "%s: %s", cases[i].text, ok ? "taken" : err.text);
        if (!ok && cases[i].reason) {
            check_msg(strstr(err.text, cases[i].reason) != NULL, "%s: message '%s' lacks '%s'", cases[i].text, err.text,
                      cases[i].reason);
            check_msg(strncmp(err.text, "file.json: ", 11) == 0 && !strchr(err.text, '\n'), "message '%s'", err.text);
        }
        if (ok) { json_free(&doc); }
    }
}
#define CHECK_CASES(cases) check_cases(cases, sizeof(cases) / sizeof(cases[0]))

static void test_values(void) {
    JsonDoc doc;
    if (!parse(&doc, " {\"a\": null, \"b\": [true, false, 1, -2.5, \"x\"], \"c\": {}, \"d\": []}\r\n\t")) { return; }
    const JsonValue* b = json_get(doc.root, "b");
    check(doc.root->type == JSON_OBJECT && doc.root->count == 4);
    check(json_get(doc.root, "a")->type == JSON_NULL);
    check(b->type == JSON_ARRAY && b->count == 5 && b->items[0].boolean && !b->items[1].boolean);
    check(b->items[2].is_int && b->items[2].integer == 1 && b->items[2].number == 1.0);
    check(!b->items[3].is_int && b->items[3].number == -2.5);
    check_str(b->items[4].string, "x");
    check_str(doc.root->items[2].key, "c");
    check(json_get(doc.root, "c")->count == 0 && json_get(doc.root, "d")->count == 0);
    check(json_get(doc.root, "e") == NULL && json_get(b, "a") == NULL && json_get(NULL, "a") == NULL);
    json_free(&doc);
    check(doc.root == NULL);
    json_free(&doc); // freeing twice is allowed
}

static void test_scalars_at_the_root(void) {
    static const Case cases[] = {{"1", NULL}, {"\"\"", NULL}, {"null", NULL}, {"true", NULL}, {" false ", NULL}};
    CHECK_CASES(cases);
}

static void test_numbers(void) {
    static const Case cases[] = {
        {"01", "leading zero"},
        {"-01", "leading zero"},
        {"-", "digit"},
        {"+1", "value"},
        {".5", "value"},
        {"1.", "after '.'"},
        {"1.e3", "after '.'"},
        {"1e", "exponent"},
        {"1e+", "exponent"},
        {"0x10", "end of the text"},
        {"NaN", "value"},
        {"Infinity", "value"},
        {"-Infinity", "digit"},
        {"1e999", "too large"},
        {"-1e999", "too large"},
        {"1_0", "end of the text"},
        {"0", NULL},
        {"-0", NULL},
        {"0.0", NULL},
        {"1E5", NULL},
        {"1e-999", NULL},
        {"1e+05", NULL},
    };
    CHECK_CASES(cases);
    char* digits = (char*)malloc_check(JSON_MAX_NUMBER + 2);
    memset(digits, '1', JSON_MAX_NUMBER + 1);
    digits[1] = '.';
    digits[JSON_MAX_NUMBER + 1] = '\0';
    Case longest[] = {{digits, "more than 511 characters"}};
    CHECK_CASES(longest);
    digits[JSON_MAX_NUMBER] = '\0';
    longest[0].reason = NULL;
    CHECK_CASES(longest);
    free(digits);
}

static void test_integers_are_exact(void) {
    static const struct {
        const char* text;
        bool is_int;
        int64_t integer;
        double number;
    } cases[] = {{"9223372036854775807", true, INT64_MAX, 9223372036854775807.0},
                 {"-9223372036854775808", true, INT64_MIN, -9223372036854775808.0},
                 {"9223372036854775808", false, 0, 9223372036854775808.0},
                 {"-9223372036854775809", false, 0, -9223372036854775809.0},
                 {"9007199254740993", true, 9007199254740993, 9007199254740992.0},
                 {"123456789012345", true, 123456789012345, 123456789012345.0},
                 {"-7", true, -7, -7.0},
                 {"768.0", false, 0, 768.0},
                 {"1e3", false, 0, 1000.0},
                 {"1e-05", false, 0, 1e-5},
                 {"0.1", false, 0, 0.1},
                 {"5e-324", false, 0, 5e-324},
                 {"1.7976931348623157e308", false, 0, 1.7976931348623157e308}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        JsonDoc doc;
        if (!parse(&doc, cases[i].text)) { continue; }
        check_msg(doc.root->is_int == cases[i].is_int && doc.root->integer == cases[i].integer &&
                      doc.root->number == cases[i].number,
                  "%s read as %d %lld %.17g", cases[i].text, doc.root->is_int, (long long)doc.root->integer,
                  doc.root->number);
        json_free(&doc);
    }
}

static void check_string(const char* text, const char* want, size_t n) {
    JsonDoc doc;
    if (!parse(&doc, text)) { return; }
    check_msg(doc.root->type == JSON_STRING && doc.root->length == n && memcmp(doc.root->string, want, n + 1) == 0,
              "%s read as '%s'", text, doc.root->string);
    json_free(&doc);
}

static void test_escapes(void) {
    check_string("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8);
    check_string("\"\\u0041\\u00e9\\u20AC\\u0120\"", "A\xC3\xA9\xE2\x82\xAC\xC4\xA0", 8);
    check_string("\"a\\u0000b\"", "a\0b", 3);
    check_string("\"\\ud83d\\ude00\\uDBFF\\uDFFF\"", "\xF0\x9F\x98\x80\xF4\x8F\xBF\xBF", 8);
    check_string("\"\\uffff\\ud7ff\\ue000\"", "\xEF\xBF\xBF\xED\x9F\xBF\xEE\x80\x80", 9);
    static const Case cases[] = {{"\"\\x41\"", "escape"},   {"\"\\u12g4\"", "four"}, {"\"\\u123", "four"},
                                 {"\"\\u12\"", "four"},     {"\"\\", "escape"},      {"\"\\'\"", "escape"},
                                 {"\"\\U0041\"", "escape"}, {"\"\\", "escape"},      {"\"\\u", "four"}};
    CHECK_CASES(cases);
}

static void test_lone_surrogates(void) {
    static const Case cases[] = {{"\"\\ud800\"", "lone high"},        {"\"\\udc00\"", "lone low"},
                                 {"\"\\ud800\\ud800\"", "lone high"}, {"\"\\ud800x\"", "lone high"},
                                 {"\"\\ud800\\n\"", "lone high"},     {"\"\\ude00\\ud83d\"", "lone low"},
                                 {"\"\\ud800\\u0041\"", "lone high"}, {"\"\\ud83d\\ude0", "lone high"}};
    CHECK_CASES(cases);
}

static void test_utf8(void) {
    static const Case cases[] = {
        {"\"\x80\"", "UTF-8"},
        {"\"\xC0\x80\"", "UTF-8"},
        {"\"\xC1\xBF\"", "UTF-8"},
        {"\"\xC3\"", "UTF-8"},
        {"\"\xE0\x9F\xBF\"", "UTF-8"},
        {"\"\xED\xA0\x80\"", "UTF-8"},
        {"\"\xEF\xBF\"", "UTF-8"},
        {"\"\xF0\x8F\xBF\xBF\"", "UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "UTF-8"},
        {"\"\xF5\x80\x80\x80\"", "UTF-8"},
        {"\"\xFF\"", "UTF-8"},
        {"\"\xC3", "UTF-8"},
        {"{\"\xFF\":1}", "UTF-8"},
        {"\xC3\xA9", "value"},
        {"\"\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xF0\x90\x80\x80\xF4\x8F\xBF\xBF\"", NULL},
    };
    CHECK_CASES(cases);
}

static void test_strings_end(void) {
    static const Case cases[] = {{"\"abc", "an unterminated string"},
                                 {"\"", "an unterminated string"},
                                 {"{\"a", "an unterminated string"},
                                 {"\"a\nb\"", "control"},
                                 {"\"a\tb\"", "control"},
                                 {"\"\x01\"", "0x01"},
                                 {"'a'", "value"},
                                 {"\"\x7F\"", NULL}};
    CHECK_CASES(cases);
    JsonDoc doc;
    Error err;
    for (int c = 0; c < 256; c++) { // a string of each single byte
        char text[3] = {'"', (char)c, '"'};
        bool ok = parse_n(&doc, text, 3, &err), want = c >= 0x20 && c < 0x80 && c != '"' && c != '\\';
        check_msg(ok == want, "byte 0x%02x", c);
        if (ok) { json_free(&doc); }
    }
}

static void test_structure(void) {
    static const Case cases[] = {
        {"", "the end of the text"},
        {"  ", "value"},
        {"[1,]", "value"},
        {"[,1]", "value"},
        {"[1 2]", "',' or ']'"},
        {"[1", "',' or ']'"},
        {"[", "value"},
        {"]", "value"},
        {"{\"a\":1,}", "key"},
        {"{a:1}", "key"},
        {"{\"a\" 1}", "':'"},
        {"{\"a\":}", "value"},
        {"{\"a\":1", "',' or '}'"},
        {"{", "key"},
        {"{\"a\":1 \"b\":2}", "',' or '}'"},
        {"{1:2}", "key"},
        {"[1}", "',' or ']'"},
        {"tru", "value"},
        {"nul", "value"},
        {"True", "value"},
        {"// x\n1", "value"},
        {"[1]//", "end of the text"},
        {"\v1", "value"},
        {"\f[]", "value"},
    };
    CHECK_CASES(cases);
}

static void test_trailing_text(void) {
    static const Case cases[] = {{"{} x", "end of the text"},  {"1 2", "end of the text"}, {"{}{}", "end of the text"},
                                 {"nulll", "end of the text"}, {"{}]", "end of the text"}, {"{} \n", NULL}};
    CHECK_CASES(cases);
    JsonDoc doc;
    Error err;
    check(!parse_n(&doc, "{}\0", 3, &err) && strstr(err.text, "byte 2"));
}

static void test_errors_say_where(void) {
    static const Case cases[] = {
        {"[1, 2, x]", "at byte 7: a value expected, found 'x'"},
        {"{\"a\": \"b\\q\"}", "at byte 8: not a JSON escape"},
        {"[\"\xFF\"]", "at byte 2: invalid UTF-8"},
        {"[1", "at byte 2: ',' or ']' expected, found the end of the text"},
        {"\x01", "found byte 0x01"},
        {"{\"a\":1,\"a\":2}", "at byte 7: key \"a\" occurs twice"},
        {"{\"a\\n\":1,\"a\\n\":2}", "key \"a\\x0a\" occurs twice"}, // the message stays one line, whatever the key
    };
    CHECK_CASES(cases);
}

// {"0":0,"1":1,...} with n members; the key of the last one is `last`
static char* numbered_object(int n, int last) {
    char *text = (char*)malloc_check((size_t)n * 24 + 8), *at = text;
    *at++ = '{';
    for (int i = 0; i < n; i++) {
        int key = i == n - 1 ? last : i;
        at += sprintf(at, "%s\"%d\":%d", i ? "," : "", key, i);
    }
    strcpy(at, "}");
    return text;
}

static void test_duplicate_keys(void) {
    static const Case cases[] = {{"{\"a\":1,\"a\":1}", "twice"},
                                 {"{\"a\":1,\"\\u0061\":1}", "twice"},
                                 {"{\"\":1,\"\":1}", "twice"},
                                 {"[{\"a\":{\"b\":1,\"b\":2}}]", "twice"},
                                 {"{\"a\":{\"a\":1},\"b\":{\"a\":1}}", NULL},
                                 {"{\"a\":1,\"A\":1}", NULL},
                                 {"{\"a\":1,\"a\\u0000\":1}", NULL}};
    CHECK_CASES(cases);
    for (int n = 2; n <= 40; n++) { // n on both sides of the threshold for a hash table
        for (int last = 0; last < n; last++) {
            char* text = numbered_object(n, last);
            Case c[] = {{text, last == n - 1 ? NULL : "twice"}};
            CHECK_CASES(c);
            free(text);
        }
    }
}

static void test_lookup(void) {
    for (int n = 0; n <= 300; n += n < 20 ? 1 : 70) {
        char *text = numbered_object(n, n - 1), key[16];
        JsonDoc doc;
        if (n == 0) { strcpy(text, "{}"); }
        if (!parse(&doc, text)) { return; }
        for (int i = 0; i < n + 3; i++) {
            sprintf(key, "%d", i);
            const JsonValue* v = json_get(doc.root, key);
            check_msg(i < n ? v && v->integer == i : !v, "key %d of %d", i, n);
        }
        free(text);
        json_free(&doc);
    }
}

static void test_depth(void) {
    for (int object = 0; object < 2; object++) {
        for (int depth = JSON_MAX_DEPTH - 1; depth <= JSON_MAX_DEPTH + 1; depth++) {
            char text[8 * JSON_MAX_DEPTH] = "";
            for (int i = 0; i < depth; i++) { strcat(text, object ? "{\"a\":" : "["); }
            if (object) { strcat(text, "1"); }
            for (int i = 0; i < depth; i++) { strcat(text, object ? "}" : "]"); }
            Case c[] = {{text, depth <= JSON_MAX_DEPTH ? NULL : "more than 128 levels"}};
            CHECK_CASES(c);
        }
    }
    size_t n = 10 << 20; // must be rejected quickly and without a stack overflow
    char* text = (char*)malloc_check(n);
    memset(text, '[', n);
    JsonDoc doc;
    Error err;
    check(!json_parse(&doc, text, n, "deep", &err) && strstr(err.text, "levels"));
    free(text);
    char siblings[1200] = "["; // siblings do not add to the depth
    for (int i = 0; i < 300; i++) { strcat(siblings, i ? ",[]" : "{}"); }
    strcat(siblings, "]");
    Case wide[] = {{siblings, NULL}};
    CHECK_CASES(wide);
}
static void test_every_prefix(void) {
    static const char text[] =
        "{\"a\\u00e9\\ud83d\\ude00\": [1, -2.5e+3, true, false, null], \"b\": {\"\xC3\xA9\": \"x\"}}";
    JsonDoc doc;
    Error err;
    for (size_t n = 0; n < sizeof(text) - 1; n++) {
        check_msg(!parse_n(&doc, text, n, &err), "a prefix of %zu bytes was taken", n);
    }
    check(parse_n(&doc, text, sizeof(text) - 1, &err));
    json_free(&doc);
}

static void test_helpers(void) {
    JsonDoc doc;
    Error err;
    int64_t i = 99;
    double d = 99;
    bool b = false;
    const char* s = "unset";
    if (!parse(&doc, "{\"i\":7,\"d\":1.5,\"s\":\"x\",\"b\":true,\"nul\":\"a\\u0000b\"}")) { return; }
    const JsonValue* root = doc.root;
    check(json_int(root, "i", 0, 7, &i, "f", &err) && i == 7);
    check(!json_int(root, "i", 8, 9, &i, "f", &err));
    check_str(err.text, "f: \"i\" is 7, want 8 to 9");
    check(!json_int(root, "i", 0, 6, &i, "f", &err));
    check(!json_int(root, "d", 0, 9, &i, "f", &err));
    check_str(err.text, "f: \"d\" is 1.5, want an integer");
    check(!json_int(root, "x", 0, 9, &i, "f", &err));
    check_str(err.text, "f: \"x\" is missing");
    check(!json_int(root, "s", 0, 9, &i, "f", &err));
    check_str(err.text, "f: \"s\" is a string, want a number");
    check(i == 7);
    check(json_number(root, "d", 0, 2, &d, "f", &err) && d == 1.5);
    check(json_number(root, "i", 0, 7, &d, "f", &err) && d == 7);
    check(!json_number(root, "d", 2, 3, &d, "f", &err));
    check(json_string(root, "s", &s, "f", &err) && strcmp(s, "x") == 0);
    check(!json_string(root, "i", &s, "f", &err) && !json_string(root, "nul", &s, "f", &err));
    check_str(err.text, "f: \"nul\" contains a NUL character");
    check(json_bool(root, "b", &b, "f", &err) && b);
    check(!json_bool(root, "i", &b, "f", &err));
    json_free(&doc);
}

static void test_printable(void) {
    char out[16];
    check_str(json_printable(out, sizeof(out), "a\nb\xFF\xC3\xA9", 6), "a\\x0ab\\xff\xC3\xA9");
    check_str(json_printable(out, sizeof(out), "\xC3\xA9\x7F", 3), "\xC3\xA9\\x7f");
    check_str(json_printable(out, sizeof(out), "123456789012345", 15), "123456789012...");
    check_str(json_printable(out, sizeof(out), "", 0), "");
}

static void test_write_string(void) {
    char path[128];
    Error err;
    FileWriter w;
    MappedFile file;
    JsonDoc doc;
    uint8_t bytes[256 + 10];
    for (int i = 0; i < 256; i++) { bytes[i] = (uint8_t)i; }
    memcpy(bytes + 256, "\xC3\xA9\xF0\x9F\x98\x80\xED\xA0\x80\xC3", 10);
    snprintf(path, sizeof(path), "%s/string.json", test_dir());
    check(writer_open(&w, path, &err));
    json_write_string(&w, (const char*)bytes, sizeof(bytes));
    check(writer_close(&w, &err));
    if (!map_file(&file, path, &err) || !json_parse(&doc, (const char*)file.data, file.size, path, &err)) {
        check_msg(false, "%s", err.text);
        return;
    }
    char want[1024];
    size_t n = 0;
    for (int i = 0; i < 128; i++) { want[n++] = (char)i; }
    for (int i = 128; i < 256; i++) {
        memcpy(want + n, "\xEF\xBF\xBD", 3);
        n += 3;
    }
    memcpy(want + n, "\xC3\xA9\xF0\x9F\x98\x80", 6);
    n += 6;
    for (int i = 0; i < 4; i++) { // the three bytes of a surrogate, and the truncated character
        memcpy(want + n, "\xEF\xBF\xBD", 3);
        n += 3;
    }
    check(doc.root->length == n && memcmp(doc.root->string, want, n) == 0);
    check(memcmp(file.data, "\"\\u0000\\u0001", 13) == 0 && memchr(file.data, '\n', file.size) == NULL);
    json_free(&doc);
    unmap_file(&file);
}

// The time must be linear in the size: a quadratic check of keys would take minutes here.
// What json_parse_lenient() accepts, and json_parse() refuses.
static void test_lenient(void) {
    static const struct {
        const char* text;
        int64_t surrogates, numbers, duplicates;
        const char* a; // the member "a", if it is a string
    } cases[] = {
        {"{\"a\": \"x\\ud800y\"}", 1, 0, 0, "x\xEF\xBF\xBDy"},
        {"{\"a\": \"\\udc00\\ud83d\\ude00\\ud83d\"}", 2, 0, 0, "\xEF\xBF\xBD\xF0\x9F\x98\x80\xEF\xBF\xBD"},
        {"{\"a\": \"\\ud800\\ud83d\\ude00\\ud800\\u0041\"}", 2, 0, 0,
         "\xEF\xBF\xBD\xF0\x9F\x98\x80\xEF\xBF\xBD"
         "A"},
        {"{\"\\ud800\": 1, \"a\": \"b\"}", 1, 0, 0, "b"},
        {"{\"x\": [NaN, Infinity, -Infinity, 1e999, -1e999], \"a\": \"b\"}", 0, 5, 0, "b"},
        {"{\"a\": \"1\", \"a\": \"2\", \"b\": 0, \"a\": \"3\", \"b\": 1}", 0, 0, 3, "3"},
        {"{\"1\":1,\"2\":1,\"3\":1,\"4\":1,\"5\":1,\"6\":1,\"7\":1,\"a\":\"1\",\"9\":1,\"a\":\"2\",\"3\":3}", 0, 0, 2,
         "2"},
        {"{\"1\":1,\"2\":1,\"3\":1,\"4\":1,\"5\":1,\"6\":1,\"7\":1,\"a\":\"1\",\"a\":\"2\"}", 0, 0, 1, "2"},
        {"{\"a\": \"b\"}", 0, 0, 0, "b"},
    };
    JsonDoc doc;
    Error err;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        JsonOdd odd = {0, 0, 0};
        const char *text = cases[i].text, *a;
        bool strict = cases[i].surrogates + cases[i].numbers + cases[i].duplicates == 0;
        require(json_parse_lenient(&doc, text, strlen(text), "t", &odd, &err));
        check_msg(odd.surrogates == cases[i].surrogates && odd.numbers == cases[i].numbers &&
                      odd.duplicates == cases[i].duplicates,
                  "%s: %d, %d, %d", text, (int)odd.surrogates, (int)odd.numbers, (int)odd.duplicates);
        require(json_string(doc.root, "a", &a, "t", &err));
        check_str(a, cases[i].a);
        for (uint32_t j = 0; j < doc.root->count; j++) {
            const JsonValue* v = &doc.root->items[j];
            check(json_get_n(doc.root, v->key, v->key_length) == v);
        }
        json_free(&doc);
        check(json_parse(&doc, text, strlen(text), "t", &err) == strict);
        if (strict) { json_free(&doc); }
    }
    static const char* const bad[] = {"{\"a\": nan}", "[Inf]",   "[-Inf]",     "[-]",       "[+1]",     "[NaN1]",
                                      "\"\\ud80\"",   "{\"a\"}", "[\"\xff\"]", "[Infinit]", "{'a': 1}", "[1,]"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        JsonOdd odd = {0, 0, 0};
        check_msg(!json_parse_lenient(&doc, bad[i], strlen(bad[i]), "t", &odd, &err), "%s", bad[i]);
    }
}

static void test_large_object(void) {
    int n = 200000;
    char* text = numbered_object(n, n - 1);
    JsonDoc doc;
    if (!parse(&doc, text)) { return; }
    check(doc.root->count == (size_t)n && json_get(doc.root, "199999")->integer == 199999);
    json_free(&doc);
    free(text);
    text = numbered_object(n, 0);
    Case c[] = {{text, "key \"0\" occurs twice"}};
    CHECK_CASES(c);
    free(text);
}

static void test_vocab_json(void) {
    const char* data = getenv("LLMC_DATA");
    char path[4096];
    Error err;
    MappedFile file;
    JsonDoc doc;
    snprintf(path, sizeof(path), "%s/gpt2_tokenizer/vocab.json", data ? data : "../shared/data");
    if (!file_exists(path)) {
        test_skip("needs %s", path);
        return;
    }
    if (!map_file(&file, path, &err) || !json_parse(&doc, (const char*)file.data, file.size, path, &err)) {
        check_msg(false, "%s", err.text);
        return;
    }
    check(doc.root->count == 50257);
    check(json_get(doc.root, "<|endoftext|>")->integer == 50256);
    check(json_get(doc.root, "\xC4\xA0the")->integer == 262); // " the"
    bool seen[50257] = {false};
    for (size_t i = 0; i < doc.root->count; i++) {
        const JsonValue* v = &doc.root->items[i];
        check(v->is_int && v->integer >= 0 && v->integer < 50257 && !seen[v->integer]);
        seen[v->integer] = true;
        check(json_get_n(doc.root, v->key, v->key_length) == v);
    }
    json_free(&doc);
    unmap_file(&file);
}

// a value takes 64 bytes, so their number is limited: an array of one too many, and one that just fits
static void test_many_values(void) {
    size_t most = JSON_MAX_VALUES - 1; // without the array itself
    char* text = (char*)malloc_check(2 * most + 4);
    JsonDoc doc;
    Error err;
    for (size_t n = most; n <= most + 1; n++) {
        text[0] = '[';
        for (size_t i = 0; i < n; i++) { text[1 + 2 * i] = '0', text[2 + 2 * i] = ','; }
        text[2 * n] = ']';
        bool ok = json_parse(&doc, text, 2 * n + 1, "many.json", &err);
        check(ok == (n == most));
        if (ok) {
            check(doc.root->count == n);
            json_free(&doc);
        } else {
            check_msg(strstr(err.text, "many.json: not valid JSON") && strstr(err.text, "more than 8388608 values"),
                      "%s", err.text);
        }
    }
    free(text);
}

static const Test tests[] = {
    {"many_values", "the limit on values", test_many_values},
    {"values", "every type, nesting, white space, lookups that miss", test_values},
    {"scalars_at_the_root", "RFC 8259 allows any value as a text", test_scalars_at_the_root},
    {"numbers", "the grammar of numbers, and what a double cannot hold", test_numbers},
    {"integers_are_exact", "int64 to its limits, doubles to the last bit", test_integers_are_exact},
    {"escapes", "all escapes, surrogate pairs, an escaped NUL", test_escapes},
    {"lone_surrogates", "half a pair is refused", test_lone_surrogates},
    {"utf8", "overlong, surrogate, cut and too large sequences are refused", test_utf8},
    {"strings_end", "open strings and control characters are refused", test_strings_end},
    {"structure", "commas, colons, brackets, words", test_structure},
    {"trailing_text", "nothing but white space after the value", test_trailing_text},
    {"errors_say_where", "file, byte, reason, on one line", test_errors_say_where},
    {"duplicate_keys", "refused in small and large objects, also when escaped", test_duplicate_keys},
    {"lookup", "every key is found, others are not, for many sizes", test_lookup},
    {"depth", "128 levels and no more", test_depth},
    {"every_prefix", "each truncation of a text is refused", test_every_prefix},
    {"helpers", "typed access names what is wrong", test_helpers},
    {"printable", "strings of files cannot break a message's line", test_printable},
    {"write_string", "every byte value is written so that it reads back", test_write_string},
    {"lenient", "lone surrogates, NaN and repeated keys are counted", test_lenient},
    {"large_object", "200,000 members, unique and not", test_large_object},
    {"vocab_json", "GPT-2's vocabulary: 50,257 entries", test_vocab_json},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
