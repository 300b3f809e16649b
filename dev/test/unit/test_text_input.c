// llmc/text_input.h: what is text and what is not, lines, and JSON values, also of a text that is read in chunks.
#include "../test.h"
#include "../../../llmc/text_input.h"

// ---- what a file is -------------------------------------------------------------------------------

// Fills the head of a file of `size` bytes with `fill`, copies the bytes (n) to `at`, and compares its refusal with `want`; NULL:
// it is text.
static void check_head(int line, size_t size, char fill, size_t at, const char* bytes, size_t n, const char* want) {
    static char text[TEXT_HEAD + 64];
    Error err;
    size_t mark = 9;
    require(size <= sizeof(text) && at + n <= size);
    memset(text, fill, size);
    memcpy(text + at, bytes, n);
    err.text[0] = '\0';
    bool ok = text_check(text, size, "f", " | cat", &mark, &err);
    if (ok != !want || (want && !strstr(err.text, want))) {
        test_fail(__FILE__, line, "'%s', want '%s'", err.text, want ? want : "");
    }
    if (ok) { check(mark == text_mark(text, size)); }
}
#define CHECK_HEAD(size, fill, at, bytes, want) check_head(__LINE__, size, fill, at, bytes, sizeof(bytes) - 1, want)

static void test_kinds(void) {
    CHECK_HEAD(300, 'x', 0, "\x88\xD8\x34\x01", "f: is a token shard, not text: want text in UTF-8 or JSON lines");
    CHECK_HEAD(300, 'x', 0, "\xA1\xD9\x34\x01", "is a Llama-3 shard");
    CHECK_HEAD(300, 'x', 0, "\xC6\xD7\x34\x01", "is a model file of llm.c");
    CHECK_HEAD(300, 'x', 0, "\x1F\x8B\x08", "f: is compressed with gzip, not text: use zcat FILE | cat");
    CHECK_HEAD(300, 'x', 0, "\x28\xB5\x2F\xFD", "use zstdcat FILE | cat");
    CHECK_HEAD(300, 'x', 0,
               "\xFD"
               "7zXZ\0",
               "use xzcat FILE | cat");
    CHECK_HEAD(300, 'x', 0, "\x04\x22\x4D\x18", "use lz4cat FILE | cat");
    CHECK_HEAD(300, 'x', 0, "BZh91AY&SY\xB1\xF7\xD0\xB1\0", "use bzcat FILE | cat");
    CHECK_HEAD(14, 'x', 0, "BZh9\x17\x72\x45\x38\x50\x90\0\0\0\0", "use bzcat FILE | cat");
    CHECK_HEAD(300, 'x', 0, "7z\xBC\xAF\x27\x1C", "is a 7z archive");
    CHECK_HEAD(300, 'x', 0, "Rar!\x1A\x07", "is a RAR archive");
    CHECK_HEAD(300, 'x', 257, "ustar\0", "use tar -xOf FILE | cat");
    CHECK_HEAD(300, 'x', 257, "ustar  \0", "use tar -xOf FILE | cat");
    CHECK_HEAD(300, 'x', 0, "%PDF-1.5\n%\xD0\xD4\xC5\xD8\n", "use pdftotext FILE - | cat");
    CHECK_HEAD(300, 'x', 0, "%PDF-2.0\r\n%\xD0\xD4\xC5\xD8\n", "is a PDF file");
    CHECK_HEAD(300, 'x', 0, "PAR1\x15\x04\x15", "FORMAT json)\" makes JSON lines of it");
    CHECK_HEAD(300, 'x', 0, "ARROW1\0\0", "is an Arrow file");
    CHECK_HEAD(300, 'x', 0, "\xFF\xFF\xFF\xFF\xA8\x01\0\0", "is an Arrow stream");
    CHECK_HEAD(300, 'x', 0, "FEA1\0\0\0\0", "is a Feather file");
    CHECK_HEAD(300, 'x', 0, "\x93NUMPY\x01", "is an .npy file");
    CHECK_HEAD(300, 'x', 0, "\x89HDF\r\n\x1A\n", "is an HDF5 file");
    CHECK_HEAD(300, 'x', 0, "SQLite format 3\0", "is an SQLite database");
    CHECK_HEAD(300, 'x', 0, "\x80\x04\x95", "is a Python pickle");
    CHECK_HEAD(300, 'x', 0,
               "\x7F"
               "ELF",
               "is a program");
    CHECK_HEAD(300, 'x', 0, "GGUF\x03\0\0\0", "is a GGUF file");
    CHECK_HEAD(300, 'x', 0, "\x40\0\0\0\0\0\0\0{", "is a safetensors file");
    CHECK_HEAD(100, 'x', 0, "version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull downloads");
}

static void test_zips(void) {
    static const struct {
        const char *name, *want;
    } cases[] = {{"a.txt", "is a zip file, not text: use unzip -p FILE | cat"},
                 {"[Content_Types].xml", "is an Office document (zip), not text: use pandoc -t plain FILE | cat"},
                 {"mimetypeapplication/epub+zip", "is an EPUB book (zip)"},
                 {"mimetypeapplication/vnd.oasis.opendocument.text", "is an OpenDocument file (zip)"},
                 {"arr_0.npy", "is an .npz file of NumPy"},
                 {"archive/data.pkl", "is a file of torch.save"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char head[128] = "PK\3\4";
        size_t n = strlen(cases[i].name);
        head[26] = (char)(strncmp(cases[i].name, "mimetype", 8) == 0 ? 8 : n); // the length of the name
        memcpy(head + 30, cases[i].name, n);
        check_head(__LINE__, 200, 'x', 0, head, 30 + n, cases[i].want);
        check_head(__LINE__, 8, 'x', 0, head, 8, "is a zip file");
    }
    CHECK_HEAD(22, '\0', 0, "PK\5\6", "is a zip file"); // an empty one
}

// Texts that begin like a file of another kind, or that contain what is looked for elsewhere.
static void test_texts(void) {
    static const char* const texts[] = {"",
                                        "P",
                                        "PK",
                                        "PK is public key",
                                        "PK\t\n12345678",
                                        "BZh",
                                        "BZh9 begins a file",
                                        "BZh91AY&SY is the magic of bzip2",
                                        "BZh91AY&SYxxxxx",
                                        "%PDF",
                                        "%PDF-1.5",
                                        "%PDF-1.5 begins a file",
                                        "%PDF-1.5\n1 0 obj\n<< >>\nendobj\n",
                                        "%PDF-1.5\n%EOF in a listing",
                                        "PAR1",
                                        "PAR1 and PAR2",
                                        "ARROW1 is",
                                        "FEA1",
                                        "7z",
                                        "7zXZ is",
                                        "Rar!",
                                        "GGUF",
                                        "GGUF\n\n\n\n1",
                                        "{\"GGUF\": 3}",
                                        "SQLite format 3 is",
                                        "NUMPY",
                                        "\x93quoted\x94 in CP1252",
                                        "\x80 4 in CP1252",
                                        "HDF5",
                                        "\x88\xD8\x34",
                                        "\xEF\xBB\xBFtext",
                                        "\xFF",
                                        "\xFF\xFF\xFF\xFF in Latin-1",
                                        "\x1B[1mbold\x1B[0m\f\b\x7F",
                                        "version https://git-lfs is a pointer's first line",
                                        "ustar",
                                        "caf\xE9 in Latin-1",
                                        "\x1F"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        size_t n = strlen(texts[i]);
        check_head(__LINE__, n, 'x', 0, texts[i], n, NULL);
        check_head(__LINE__, n + 300, 'x', 0, texts[i], n, NULL);
        check_head(__LINE__, n + 300, '\n', 0, texts[i], n, NULL);
    }
    CHECK_HEAD(300, 'x', 257, "ustar is a tar", NULL);
    CHECK_HEAD(1100, 'x', 0, "version https://git-lfs.github.com/spec/v1\noid sha256:0", NULL);
}

static void test_nuls(void) {
    CHECK_HEAD(TEXT_HEAD + 64, 'x', 0, "\0",
               "f: is not text: has a NUL byte at offset 0; want text in UTF-8 or JSON lines");
    CHECK_HEAD(TEXT_HEAD + 64, 'x', TEXT_HEAD - 1, "\0", "a NUL byte at offset 65535;");
    CHECK_HEAD(TEXT_HEAD + 64, 'x', TEXT_HEAD, "\0\0", NULL);
    CHECK_HEAD(8, 'x', 0, "\x0D\0\x0B\0\x1E\x01\xC6\0", "has a NUL byte at offset 1;"); // tokens of 16 bits
    TextNotes notes;
    memset(&notes, 0, sizeof(notes));
    text_count_odd(&notes, "\0a\0\0b", 5);
    text_count_odd(&notes, "ab", 2);
    check(notes.nuls == 3 && notes.not_utf8 == 0);
    static const char odd[] = "twelve bytes \xE9 in Latin-1, a whole \xF0\x9F\x91\xA9 and a cut one \xF0\x9F\x91";
    for (size_t i = 0; i < 8; i++) { // wherever the eight bytes that are read at once begin
        memset(&notes, 0, sizeof(notes));
        text_count_odd(&notes, odd + i, sizeof(odd) - 1 - i);
        check_msg(notes.not_utf8 == 4, "%lld bytes", (long long)notes.not_utf8);
    }
}

static void test_utf16(void) {
    CHECK_HEAD(4, 'x', 0, "\xFF\xFEh\0", "f: is UTF-16, not text: use iconv -f UTF-16 -t UTF-8 FILE | cat");
    CHECK_HEAD(4, 'x', 0, "\xFE\xFF\0h", "is UTF-16, not text: use iconv -f UTF-16 ");
    CHECK_HEAD(8, 'x', 0, "\xFF\xFE\0\0h\0\0\0", "iconv -f UTF-32 ");
    CHECK_HEAD(8, 'x', 0, "\0\0\xFE\xFF\0\0\0h", "iconv -f UTF-32 ");
    CHECK_HEAD(10, 'x', 0, "h\0e\0\xAC\x20l\0o\0",
               "is UTF-16 without a mark (a NUL byte at offset 1), not text: use iconv -f UTF-16LE ");
    CHECK_HEAD(11, 'x', 0, "\0h\0e\x20\xAC\0l\0o\0", "iconv -f UTF-16BE ");
    CHECK_HEAD(12, 'x', 0, "h\0\0\0e\0\0\0\n\0\0\0", "iconv -f UTF-32LE ");
    CHECK_HEAD(12, 'x', 0, "\0\0\0h\0\0\0e\0\0\0\n", "iconv -f UTF-32BE ");
}

// ---- lines ----------------------------------------------------------------------------------------

static void test_lines(void) {
    static const char text[] = "a\r\n\n \t\r\nb\r";
    static const char* const want[] = {"a", "", " \t", "b"};
    TextLines lines = {text, sizeof(text) - 1, 0, 0};
    const char* s;
    for (size_t n; text_next_line(&lines, &s, &n);) {
        require(lines.line <= 4);
        check(n == strlen(want[lines.line - 1]) && memcmp(s, want[lines.line - 1], n) == 0);
        check(text_is_blank(s, n) == (lines.line == 2 || lines.line == 3));
    }
    check(lines.line == 4);
    check(text_is_blank("\n \t\n\r\n ", 7) && !text_is_blank("\n \n.", 4));
}

static void test_sections(void) {
    static const struct {
        const char* text;
        size_t want;
    } cases[] = {{"ab\n\nab", 4},       {"ab\n\n\nab", 4}, {"ab\n", 3},        {"\n\na", 2},      {"\nab\n\n", 5},
                 {"a\r\n\r\nb\r\n", 5}, {"a\n \t\nb", 5},  {"a\n \r\n\nb", 5}, {"a\n  b\n\n", 7}, {"a\n  ", 4}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t got = text_section(cases[i].text, strlen(cases[i].text));
        check_msg(got == cases[i].want, "'%s': %zu, want %zu", cases[i].text, got, cases[i].want);
    }
}

// ---- JSON -----------------------------------------------------------------------------------------

static void test_formats(void) {
    static const struct {
        const char* text;
        TextFormat want;
        const char* names; // the members of objects that are taken for text
    } cases[] = {
        {"{\"text\": \"a\"}", TEXT_JSON_LINES, ""},
        {"{\"id\": 1, \"text\": \"a\\ud800\", \"x\": NaN}\n", TEXT_JSON_LINES, ""},
        {" \r\n\n{\"text\": \"a\"}\r\n{", TEXT_JSON_LINES, ""},
        {"{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\"", TEXT_JSON_LINES, ""},
        {"{\"name\": \"a\", \"version\": \"1\"}\n", TEXT_PLAIN, "name, version"},
        {"{\"name\": \"a\"}\n\nas in JSON", TEXT_PLAIN, "name"},
        {"{\"text\": 1}\n", TEXT_PLAIN, "text"},
        {"{\n  \"text\": \"a\"\n}\n", TEXT_PLAIN, ""},
        {"{\"text\":\n\"a\"}\n", TEXT_PLAIN, ""},
        {"{}\n{\"text\": \"a\"}", TEXT_PLAIN, ""},
        {"{\"text\": \"a\"} and more", TEXT_PLAIN, ""},
        {"{\"text\": \"a\"}{\"text\": \"b\"}\n", TEXT_PLAIN, ""},
        {"{\"text\" is the first word}", TEXT_PLAIN, ""},
        {"{ int x; }\n", TEXT_PLAIN, ""},
        {"{\"a\", \"b\"},\n", TEXT_PLAIN, ""},
        {"[\n  {\n    \"text\": \"a\"\n  },\n", TEXT_JSON_ARRAY, ""},
        {"[{\"text\": \"a\"}]", TEXT_JSON_ARRAY, ""},
        {"[{\"text\": \"a\"}", TEXT_PLAIN, ""},
        {"[{\"text\": \"a\"} is JSON", TEXT_PLAIN, ""},
        {"[{\"instruction\": \"a\", \"output\": \"b\"}]", TEXT_PLAIN, "instruction, output"},
        {"[{'a': 1} for x in y]", TEXT_PLAIN, ""},
        {"[{}]", TEXT_PLAIN, ""},
        {"[1, 2]", TEXT_PLAIN, ""},
        {"[x](y) is a link", TEXT_PLAIN, ""},
        {"[", TEXT_PLAIN, ""},
        {" \n", TEXT_PLAIN, ""},
        {"text", TEXT_PLAIN, ""},
    };
    char names[240];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = strlen(cases[i].text);
        TextFormat got = text_format(cases[i].text, n, true, "text", names, sizeof(names));
        check_msg(got == cases[i].want, "'%s': %d, want %d", cases[i].text, (int)got, (int)cases[i].want);
        check_str(names, cases[i].names);
        for (size_t k = 0; k < n; k++) { // what the beginning decides does not depend on the rest
            got = text_format(cases[i].text, k, false, "text", names, sizeof(names));
            check_msg(got == TEXT_UNDECIDED || got == cases[i].want, "%zu bytes of '%s': %d", k, cases[i].text,
                      (int)got);
        }
    }
    check(has_json_lines_name("a.jsonl") && has_json_lines_name("a.b/c.JSONL") && has_json_lines_name("a.ndjson"));
    check(!has_json_lines_name("jsonl") && !has_json_lines_name("a.json") && !has_json_lines_name("a.jsonl/b"));
}

static void test_kinds_of_text(void) {
    static const struct {
        const char *path, *text, *want; // want: the name of the kind; NULL: none
    } cases[] = {{"a", "\n<!DOCTYPE HTML PUBLIC", "HTML"},
                 {"a", "<HTML lang='en'>", "HTML"},
                 {"a", "<?xml version='1.0'?>", "XML"},
                 {"a", "<mediawiki xmlns", "a dump of a wiki"},
                 {"a", "WARC/1.0\r\nWARC-Type: warcinfo", "a file of Common Crawl"},
                 {"a", "{\\rtf1\\ansi", "RTF"},
                 {"a", "%!PS-Adobe-3.0", "PostScript"},
                 {"a", "WEBVTT\n\n00:01", "subtitles"},
                 {"b/a.srt", "1\n00:01", "subtitles"},
                 {"a", "{'text': 'a'}", "Python's form of a dict"},
                 {"a", "[{'text': 'a'}]", "Python's form of dicts"},
                 {"a.CSV", "id,text\n1,a\n", "a table"},
                 {"a.tsv", "id\ttext\n1\ta\n", "a table"},
                 {"a", "{\n  \"text\": \"a\"\n}\n", "JSON over several lines"},
                 {"a", "[\"a, b\",\n \"c\"]", "an array of strings"},
                 {"a", "[\"a\"]\n", "an array of strings"},
                 {"a", "[\"a\"] she said", NULL},
                 {"a", "[\"a\", he said", NULL},
                 {"a", "[\"a\"", NULL},
                 {"a", "{\n\"text\" is the first word}", NULL},
                 {"a", "{\"a\": 1, \"b\": 2}\n", NULL}, // text_format() names its members
                 {"a", "{ int x; }\n", NULL},
                 {"a", "[1] a note", NULL},
                 {"a.md", "---\ntitle: x\n---\n# a\n", NULL},
                 {"a.csv/b", "id,text\n", NULL},
                 {"a", "<html", "HTML"},
                 {"a", "<htm", NULL},
                 {"a", "<b>a</b>", NULL},
                 {"csv", "csv", NULL},
                 {"a", "", NULL}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const FileKind* kind = text_kind(cases[i].path, cases[i].text, strlen(cases[i].text));
        const char* got = kind ? kind->name : NULL;
        check_msg(got && cases[i].want ? strcmp(got, cases[i].want) == 0 : got == cases[i].want, "'%s': %s, want %s",
                  cases[i].text, got ? got : "none", cases[i].want ? cases[i].want : "none");
        check(!kind || !kind->command != !kind->advice);
    }
}

// Reads the values of a text in chunks of at most `chunk` new bytes, separated by | in `out`, with an error at the end.
static void read_values(char* out, size_t size, const char* text, TextFormat format, size_t chunk) {
    size_t n = strlen(text), begin = 0, used = 0, length;
    JsonItems items = json_items(NULL, 0, format);
    Error err;
    const char* s;
    err.text[0] = '\0';
    for (size_t end = 0; end < n;) {
        end = end + chunk < n ? end + chunk : n;
        items.lines.text = text + begin;
        items.lines.n = end - begin;
        items.lines.at = 0;
        items.more = end < n;
        while (json_items_next(&items, &s, &length, "f", &err)) {
            used += (size_t)snprintf(out + used, size - used, "%.*s|", (int)length, s);
        }
        begin += items.lines.at;
        if (err.text[0]) { break; }
    }
    snprintf(out + used, size - used, "%zu%s%s", items.lines.line, err.text[0] ? " " : "", err.text);
}

static void test_values(void) {
    static const struct {
        TextFormat format;
        const char *text, *want;
    } cases[] = {
        {TEXT_JSON_LINES, "{\"a\": 1}\r\n\n \t\r\n[2]\n3", "{\"a\": 1}|[2]|3|5"},
        {TEXT_JSON_LINES, "", "0"},
        {TEXT_JSON_LINES, "\n\n", "2"},
        {TEXT_JSON_ARRAY, "[{\"a\": \"]}\\\"\"} , {\"b\": [{}, []]}\n]\n", "{\"a\": \"]}\\\"\"}|{\"b\": [{}, []]}|2"},
        {TEXT_JSON_ARRAY, "\n[{},12,\"a,b\" ,null\r\n]", "{}|12|\"a,b\"|null|4"},
        {TEXT_JSON_ARRAY, "[{}", "{}|1 f: not valid JSON: the text ends after element 1 of the array"},
        {TEXT_JSON_ARRAY, "[{},", "{}|1 f: not valid JSON: the text ends after element 1 of the array"},
        {TEXT_JSON_ARRAY, "[{}, {\"a\"", "{}|1 f: not valid JSON: the text ends after element 1 of the array"},
        {TEXT_JSON_ARRAY, "[{} {}]", "{}|1 f: not valid JSON: no ',' or ']' after element 1 of the array"},
        {TEXT_JSON_ARRAY, "[{}]\n[{}]",
         "{}|1 f: not valid JSON: more text behind the end, after element 1 of the array"},
        {TEXT_JSON_ARRAY, "[{},]", "{}|]|2 f: not valid JSON: the text ends after element 2 of the array"},
    };
    char got[256];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (size_t chunk = 1; chunk <= 64; chunk++) {
            read_values(got, sizeof(got), cases[i].text, cases[i].format, chunk);
            check_str(got, cases[i].want);
        }
    }
    check(json_form(" [\n{\"a\"", 7) == TEXT_JSON_ARRAY && json_form("[1]", 3) == TEXT_JSON_LINES);
    check(json_form("{\"a\"", 4) == TEXT_JSON_LINES && json_form("", 0) == TEXT_JSON_LINES);
}

static void test_members(void) {
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"{\"messages\": [], \"id\": 1}", "f:1: \"text\" is missing, the members are: messages, id; see"},
        {"{}", "f:1: \"text\" is missing, the members are: none; see"},
        {"{\"text\": 1}", "f:1: \"text\" is a number, want a string"},
        {"[]", "f:1: is an array, want an object with \"text\""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        JsonDoc doc;
        const JsonValue* v;
        Error err;
        require(json_parse(&doc, cases[i].text, strlen(cases[i].text), "f", &err));
        check(!json_want_text(doc.root, "text", &v, "f:1", "; see", &err));
        check_str(err.text, cases[i].want);
        json_free(&doc);
    }
}

static const Test tests[] = {
    {"kinds", "files that are not text, and the way to make text of them", test_kinds},
    {"zips", "what is in a zip file", test_zips},
    {"texts", "texts that begin with the letters of other files are text", test_texts},
    {"nuls", "NUL bytes in the first 64 KB, and behind them", test_nuls},
    {"utf16", "UTF-16 and UTF-32, with a mark and without", test_utf16},
    {"lines", "LF, CR LF, blank lines", test_lines},
    {"sections", "the text up to a blank line", test_sections},
    {"formats", "JSON lines and arrays by their beginning, whatever of it is known", test_formats},
    {"kinds_of_text", "HTML, tables, JSON that is not lines: more than the text is in them", test_kinds_of_text},
    {"values", "the values of lines and arrays, in chunks of every size", test_values},
    {"members", "a missing member, with the names of the others", test_members},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
