/*
What counts as text, and in which form it comes. Every program that reads text uses this header: dev/data/tokenize, --eval,
--prompt-file and --prompts, and the converters of questions.

    file_kind()         what a file is, if its first bytes show that it is not text
    text_check()        refuses what is not text, with the way to make text of it, and finds the end of a byte order mark
    text_kind()         what a text is if it has more than the text in it, such as tags
    text_format()       recognizes JSON lines, or an array of JSON objects, by their beginning
    text_next_line()    the lines of a text, with LF or CR LF
    json_items_next()   the objects of JSON lines or of an array, also of one that is read in chunks

A text may be in any encoding without NUL bytes. It is never refused for what it says: a known beginning counts only if no
text can have it, because of its control characters or its invalid UTF-8.
*/
#ifndef LLMC_TEXT_INPUT_H
#define LLMC_TEXT_INPUT_H

#include "json.h"
#include "utils.h"

enum { TEXT_HEAD = 64 << 10 }; // bytes at the beginning of a file that decide whether it is text

// ---- what a file is -----------------------------------------------------------------------------

typedef struct {
    const char* name;
    const char* command; // prints the text of FILE; NULL: none
    const char* advice;  // if there is no command; NULL: none
} FileKind;

static inline bool bytes_at(const uint8_t* data, size_t size, size_t offset, const char* bytes, size_t n) {
    return size >= offset + n && memcmp(data + offset, bytes, n) == 0;
}

// Whether the n bytes occur in the first `limit` bytes of the data.
static inline bool bytes_within(const uint8_t* data, size_t size, size_t limit, const char* bytes, size_t n) {
    return memmem(data, size < limit ? size : limit, bytes, n) != NULL;
}

// Returns what a zip file contains, by its first entry. Source: APPNOTE.TXT of PKWARE, 4.3.7.
static inline const FileKind* zip_kind(const uint8_t* data, size_t size) {
    static const FileKind office = {"an Office document (zip)", "pandoc -t plain FILE", NULL},
                          book = {"an EPUB book (zip)", "pandoc -t plain FILE", NULL},
                          open_document = {"an OpenDocument file (zip)", "pandoc -t plain FILE", NULL},
                          numpy = {"an .npz file of NumPy (zip)", NULL, NULL},
                          torch = {"a file of torch.save (zip)", NULL, NULL},
                          zip = {"a zip file", "unzip -p FILE", NULL};
    size_t length = size >= 30 ? (size_t)(data[26] | data[27] << 8) : 0;
    const char* name = (const char*)data + 30;
    if (length == 0 || size < 30 + length) { return &zip; }
    if (memmem(name, length, "[Content_Types].xml", 19) || memmem(name, length, "_rels/", 6)) { return &office; }
    if (bytes_within(data, size, 128, "application/epub+zip", 20)) { return &book; }
    if (bytes_within(data, size, 128, "application/vnd.oasis.opendocument", 34)) { return &open_document; }
    if (length > 4 && memcmp(name + length - 4, ".npy", 4) == 0) { return &numpy; }
    return memmem(name, length, "/data.pkl", 9) || memmem(name, length, "/.format_version", 16) ? &torch : &zip;
}

// Whether this is a PDF file: a version, a line break, and bytes that are not ASCII in a comment in the next line, as the
// standard advises. A text about PDF does not have them. Source: ISO 32000-1, 7.5.2.
static inline bool is_pdf(const uint8_t* data, size_t size) {
    if (size < 16 || memcmp(data, "%PDF-", 5) != 0 || data[6] != '.' || (data[8] != '\r' && data[8] != '\n')) {
        return false;
    }
    size_t i = data[9] == '\n' ? 10 : 9;
    return data[i] == '%' && data[i + 1] >= 0x80 && data[i + 2] >= 0x80;
}

// Whether this is a bzip2 file. Its letters and digits may be a text's; the byte behind them and the checksum is the highest
// of a position below 900,000, which is less than 8.
static inline bool is_bzip2(const uint8_t* data, size_t size) {
    return size >= 14 && memcmp(data, "BZh", 3) == 0 &&
           (memcmp(data + 4, "\x17\x72\x45\x38\x50\x90", 6) == 0 || // of an empty file
            (size >= 15 && memcmp(data + 4, "\x31\x41\x59\x26\x53\x59", 6) == 0 && data[14] < 8));
}

// The kinds that a fixed sequence of bytes identifies. In each of them is a byte that text does not have there.
static inline const FileKind* fixed_kind(const uint8_t* data, size_t size) {
#define MAGIC(offset, bytes) offset, sizeof(bytes) - 1, bytes
    static const struct {
        size_t offset, n;
        const char* bytes;
        FileKind kind;
    } kinds[] = {
        {MAGIC(0, "\x88\xD8\x34\x01"), {"a token shard", NULL, NULL}},                              // 20240520
        {MAGIC(0, "\xA1\xD9\x34\x01"), {"a Llama-3 shard", NULL, NULL}},                            // 20240801
        {MAGIC(0, "\xC6\xD7\x34\x01"), {"a model file of llm.c", NULL, NULL}},                      // 20240326
        {MAGIC(0, "\xC8\xD7\x34\x01"), {"a tokenizer of llm.c", NULL, NULL}},                       // 20240328
        {MAGIC(0, "\x8A\xD8\x34\x01"), {"a multiple-choice evaluation file of llm.c", NULL, NULL}}, // 20240522
        {MAGIC(0, "\x1F\x8B"), {"compressed with gzip", "zcat FILE", NULL}},
        {MAGIC(0, "\x28\xB5\x2F\xFD"), {"compressed with zstd", "zstdcat FILE", NULL}},
        {MAGIC(0, "\xFD\x37zXZ\0"), {"compressed with xz", "xzcat FILE", NULL}},
        {MAGIC(0, "\x04\x22\x4D\x18"), {"compressed with lz4", "lz4cat FILE", NULL}},
        {MAGIC(0, "7z\xBC\xAF\x27\x1C"), {"a 7z archive", "7z x -so FILE", NULL}},
        {MAGIC(0, "Rar!\x1A\x07"), {"a RAR archive", "unrar p -inul FILE", NULL}},
        {MAGIC(257, "ustar\0"), {"a tar archive", "tar -xOf FILE", NULL}},
        {MAGIC(257, "ustar  \0"), {"a tar archive", "tar -xOf FILE", NULL}},
        {MAGIC(0, "PAR1\x15"),
         {"a Parquet file", NULL,
          "duckdb -c \"COPY (SELECT text FROM 'FILE') TO 'FILE.jsonl' (FORMAT json)\" makes JSON lines of it"}},
        {MAGIC(0, "ARROW1\0"),
         {"an Arrow file", NULL, "write it as JSON lines, with to_json() of Hugging Face's datasets"}},
        {MAGIC(0, "FEA1\0"), {"a Feather file", NULL, "write it as JSON lines"}},
        {MAGIC(0, "\x93NUMPY"), {"an .npy file of NumPy", NULL, NULL}},
        {MAGIC(0, "\x89HDF\r\n\x1A\n"), {"an HDF5 file", NULL, NULL}},
        {MAGIC(0, "SQLite format 3\0"), {"an SQLite database", "sqlite3 FILE 'SELECT column FROM table'", NULL}},
        {MAGIC(0, "\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1"), {"an old Office document", "antiword FILE", NULL}},
        {MAGIC(0, "\x89PNG\r\n\x1A\n"), {"a PNG image", NULL, NULL}},
        {MAGIC(0, "\xFF\xD8\xFF"), {"a JPEG image", NULL, NULL}},
        {MAGIC(0, "\x7F\x45LF"), {"a program (ELF)", NULL, NULL}},
        {MAGIC(0, "\xFF\xFE\0\0"), {"UTF-32", "iconv -f UTF-32 -t UTF-8 FILE", NULL}},
        {MAGIC(0, "\0\0\xFE\xFF"), {"UTF-32", "iconv -f UTF-32 -t UTF-8 FILE", NULL}},
        {MAGIC(0, "\xFF\xFE"), {"UTF-16", "iconv -f UTF-16 -t UTF-8 FILE", NULL}},
        {MAGIC(0, "\xFE\xFF"), {"UTF-16", "iconv -f UTF-16 -t UTF-8 FILE", NULL}},
    };
#undef MAGIC
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (bytes_at(data, size, kinds[i].offset, kinds[i].bytes, kinds[i].n)) { return &kinds[i].kind; }
    }
    return NULL;
}

// Returns what a file with these first bytes (size) is, or NULL if it may be text. TEXT_HEAD bytes are enough.
static inline const FileKind* file_kind(const uint8_t* data, size_t size) {
    static const FileKind gguf = {"a GGUF file", NULL, NULL}, safetensors = {"a safetensors file", NULL, NULL},
                          bzip2 = {"compressed with bzip2", "bzcat FILE", NULL},
                          pdf = {"a PDF file", "pdftotext FILE -", NULL},
                          pickle = {"a Python pickle", NULL, "write its texts as JSON lines with Python's json"},
                          arrow = {"an Arrow stream", NULL, "write its texts as JSON lines: to_json() of datasets"},
                          pointer = {"a git-LFS pointer", NULL, "git lfs pull downloads the file itself"};
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:";
    const FileKind* kind = fixed_kind(data, size);
    if (kind || size < 2) { return kind; }
    // behind the letters: versions, types and sizes, small numbers in little-endian
    if (data[0] == 0x80 && data[1] >= 2 && data[1] <= 5) { return &pickle; }
    if (size >= 8 && memcmp(data, "GGUF", 4) == 0 && data[4] >= 1 && data[4] <= 3 && data[5] == 0) { return &gguf; }
    if (size >= 9 && data[8] == '{' && memcmp(data + 4, "\0\0\0\0", 4) == 0) { return &safetensors; }
    if (size >= 8 && memcmp(data, "\xFF\xFF\xFF\xFF", 4) == 0 && data[6] == 0 && data[7] == 0) { return &arrow; }
    if (size >= 4 && data[0] == 'P' && data[1] == 'K' && data[2] % 2 == 1 && data[2] <= 7 && data[3] == data[2] + 1) {
        return zip_kind(data, size);
    }
    if (is_bzip2(data, size)) { return &bzip2; }
    if (is_pdf(data, size)) { return &pdf; }
    // longer ones are not pointers by their specification
    return size < 1024 && bytes_at(data, size, 0, lfs, sizeof(lfs) - 1) ? &pointer : NULL;
}

// Returns UTF-16 or UTF-32 if the text (n), which has NUL bytes, is one of them without a mark: most of it is ASCII.
static inline const FileKind* unmarked_kind(const uint8_t* data, size_t n) {
    static const struct {
        int width, at; // bytes of a character; where the byte that is not NUL is
        FileKind kind;
    } kinds[] = {{4, 0, {"UTF-32 without a mark", "iconv -f UTF-32LE -t UTF-8 FILE", NULL}},
                 {4, 3, {"UTF-32 without a mark", "iconv -f UTF-32BE -t UTF-8 FILE", NULL}},
                 {2, 0, {"UTF-16 without a mark", "iconv -f UTF-16LE -t UTF-8 FILE", NULL}},
                 {2, 1, {"UTF-16 without a mark", "iconv -f UTF-16BE -t UTF-8 FILE", NULL}}};
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        size_t width = (size_t)kinds[k].width, characters = n / width, ascii = 0;
        for (size_t i = 0; i < characters * width; i += width) {
            uint8_t c = data[i + (size_t)kinds[k].at];
            bool plain = (c >= ' ' && c < 0x7F) || (c >= '\t' && c <= '\r');
            for (size_t j = 0; j < width; j++) { plain = plain && (j == (size_t)kinds[k].at || data[i + j] == 0); }
            ascii += plain;
        }
        if (ascii > 1 && ascii > characters / 2) { return &kinds[k].kind; }
    }
    return NULL;
}

// Returns the size of the byte order mark at the beginning of a text (n), 0 if there is none.
static inline size_t text_mark(const char* text, size_t n) {
    return n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

// Checks the beginning of a text: its first n bytes, which are all of it or at least TEXT_HEAD. name, then: for the message;
// then follows the command that prints the text, for example " | tokenize -i -". Sets *skip to the size of its byte order
// mark, which is not part of the text.
static inline bool text_check(const void* text, size_t n, const char* name, const char* then, size_t* skip,
                              Error* err) {
    const uint8_t* data = (const uint8_t*)text;
    size_t head = n < (size_t)TEXT_HEAD ? n : (size_t)TEXT_HEAD;
    const FileKind* kind = file_kind(data, n);
    const uint8_t* nul = (const uint8_t*)memchr(data, '\0', head);
    char offset[64] = "";
    *skip = text_mark((const char*)text, n);
    if (!kind && !nul) { return true; }
    if (!kind) {
        kind = unmarked_kind(data, head);
        snprintf(offset, sizeof(offset), "a NUL byte at offset %zu", (size_t)(nul - data));
        if (!kind) { return error_set(err, "%s: is not text: has %s; want text in UTF-8 or JSON lines", name, offset); }
    }
    const char *open = offset[0] ? " (" : "", *close = offset[0] ? ")" : "";
    if (kind->command) {
        return error_set(err, "%s: is %s%s%s%s, not text: use %s%s", name, kind->name, open, offset, close,
                         kind->command, then);
    }
    return error_set(err, "%s: is %s, not text: %s", name, kind->name,
                     kind->advice ? kind->advice : "want text in UTF-8 or JSON lines");
}

// ---- notes --------------------------------------------------------------------------------------

// What is odd in a text, but does not end the program.
typedef struct {
    int64_t nuls;     // NUL bytes behind the first TEXT_HEAD bytes
    int64_t not_utf8; // bytes
    JsonOdd json;
} TextNotes;

// Counts what is odd in a text, or in a part of it that ends with a character. It may be JSON: the odd in that is counted where
// it is read.
static inline void text_count_odd(TextNotes* notes, const char* text, size_t n) {
    for (const char *end = text + n, *p = text; (p = (const char*)memchr(p, '\0', (size_t)(end - p))) != NULL; p++) {
        notes->nuls++;
    }
    for (size_t i = 0; i < n;) {
        uint64_t eight = 0, high = 0x8080808080808080;
        if (n - i >= sizeof(eight)) { memcpy(&eight, text + i, sizeof(eight)); }
        if (n - i >= sizeof(eight) && (eight & high) == 0) {
            i += sizeof(eight);
            continue;
        }
        size_t bad, length = utf8_length((const uint8_t*)text + i, n - i, &bad);
        if (length == 0) { notes->not_utf8 += (int64_t)bad; }
        i += length > 0 ? length : bad;
    }
}

static inline void text_notes_add(TextNotes* sum, const TextNotes* notes) {
    sum->nuls += notes->nuls;
    sum->not_utf8 += notes->not_utf8;
    json_odd_add(&sum->json, &notes->json);
}

// Prints one line to stderr, if there is anything to say. name: of the text.
static inline void text_notes_print(const TextNotes* notes, const char* name) {
    const struct {
        int64_t count;
        const char* what;
    } all[] = {{notes->nuls, "NUL bytes in the text"},
               {notes->not_utf8, "bytes that are not UTF-8 (iconv -f LATIN1 -t UTF-8 FILE converts Latin-1)"},
               {notes->json.surrogates, "lone surrogates in JSON, replaced by U+FFFD"},
               {notes->json.numbers, "numbers in JSON that are NaN, infinite or too long, not read"},
               {notes->json.duplicates, "repeated keys in JSON, the last counts"}};
    char line[400];
    size_t used = 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (all[i].count == 0) { continue; }
        used += (size_t)snprintf(line + used, sizeof(line) - used, "%s%lld %s", used ? "; " : "",
                                 (long long)all[i].count, all[i].what);
    }
    if (used > 0) { print_line(stderr, "note: %s: %s", name, line); }
}

// ---- lines --------------------------------------------------------------------------------------

typedef struct {
    const char* text;
    size_t n, at; // bytes; offset of the next line
    size_t line;  // number of the line that was read last
} TextLines;

// Sets *s to the next line, of *length bytes without its LF or CR LF. Returns false at the end of the text.
static inline bool text_next_line(TextLines* t, const char** s, size_t* length) {
    if (t->at >= t->n) { return false; }
    const char* begin = t->text + t->at;
    const char* newline = (const char*)memchr(begin, '\n', t->n - t->at);
    *s = begin;
    *length = newline ? (size_t)(newline - begin) : t->n - t->at;
    t->at += *length + (newline != NULL);
    t->line++;
    if (*length > 0 && begin[*length - 1] == '\r') { --*length; }
    return true;
}

// Returns the number of bytes that leave a line blank, at the beginning of text (n).
static inline size_t text_blanks(const char* text, size_t n) {
    size_t i = 0;
    while (i < n && (text[i] == ' ' || text[i] == '\t' || text[i] == '\r')) { i++; }
    return i;
}

// True if every line of text (n) is blank.
static inline bool text_is_blank(const char* text, size_t n) {
    size_t i = 0;
    while ((i += text_blanks(text + i, n - i)) < n && text[i] == '\n') { i++; }
    return i == n;
}

// Returns the size of the part of text (n) that ends with its first blank line, or n if there is none. A blank line ends with
// LF and follows one.
static inline size_t text_section(const char* text, size_t n) {
    for (size_t i = 0; i < n;) {
        const char* newline = (const char*)memchr(text + i, '\n', n - i);
        if (!newline) { break; }
        i = (size_t)(newline - text) + 1;
        size_t blanks = text_blanks(text + i, n - i);
        if (i + blanks < n && text[i + blanks] == '\n') { return i + blanks + 1; }
    }
    return n;
}

// ---- JSON lines and arrays ------------------------------------------------------------------------

// The values of JSON lines, one each, or the elements of an array. A text that is read in chunks is the `lines` one after
// another: at their ends json_items_next() returns false before the first value that is not complete.
typedef struct {
    TextLines lines; // array: its line is the number of the element
    bool array;
    bool more;   // the text goes on behind these bytes
    bool inside; // array: an element was read
    bool closed; // array: its end was read
} JsonItems;

static inline bool json_is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static inline size_t json_skip_spaces(const char* text, size_t n, size_t at) {
    while (at < n && json_is_space(text[at])) { at++; }
    return at;
}

// Returns the end of the value that begins at text[at], or 0 if it is not complete. The value is not checked.
static inline size_t json_value_end(const char* text, size_t n, size_t at) {
    int64_t depth = 0;
    bool string = false;
    for (size_t i = at; i < n; i++) {
        char c = text[i];
        if (string) {
            if (c == '\\') {
                i++;
                continue;
            }
            string = c != '"';
        } else if (c == '"') {
            string = true;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (depth == 0 && i > at && (c == ',' || c == ']' || c == '}' || json_is_space(c))) {
            return i; // of a number or a word
        } else if (c == '}' || c == ']') {
            depth--;
        } else {
            continue;
        }
        if (!string && depth <= 0) { return i + 1; }
    }
    return 0;
}

// Writes where the value is that was read last, for messages.
static inline void json_items_where(const JsonItems* items, const char* name, char* where, size_t size) {
    snprintf(where, size, items->array ? "%.900s: element %zu" : "%.900s:%zu", name, items->lines.line);
}

static inline bool json_items_fail(const JsonItems* items, const char* name, const char* what, Error* err) {
    return error_set(err, "%s: not valid JSON: %s element %zu of the array", name, what, items->lines.line);
}

// json_items_next() for an array.
static inline bool json_next_element(JsonItems* items, const char** s, size_t* length, const char* name, Error* err) {
    TextLines* t = &items->lines;
    const char* text = t->text;
    size_t at = json_skip_spaces(text, t->n, t->at);
    if (at < t->n && items->closed) { return json_items_fail(items, name, "more text behind the end, after", err); }
    if (at < t->n && items->inside && text[at] == ']') {
        items->closed = true;
        t->at = at + 1;
        return json_next_element(items, s, length, name, err); // only white space may follow
    }
    if (at < t->n) {
        if (text[at] != (items->inside ? ',' : '[')) {
            return json_items_fail(items, name, "no ',' or ']' after", err);
        }
        at = json_skip_spaces(text, t->n, at + 1);
        size_t end = json_value_end(text, t->n, at);
        if (end > at) {
            *s = text + at;
            *length = end - at;
            t->at = end;
            t->line++;
            items->inside = true;
            return true;
        }
    }
    if (items->more || items->closed) { return false; }
    return json_items_fail(items, name, "the text ends after", err);
}

// Sets *s to the text of the next value, of *length bytes. Returns false at the end, or on an error, which sets err; the
// caller has cleared it. name: of the file, for messages.
static inline bool json_items_next(JsonItems* items, const char** s, size_t* length, const char* name, Error* err) {
    TextLines* t = &items->lines;
    if (items->array) { return json_next_element(items, s, length, name, err); }
    for (TextLines next = *t; text_next_line(&next, s, length); *t = next) {
        bool complete = !items->more || t->text[next.at - 1] == '\n';
        if (!complete) { return false; }
        if (!text_is_blank(*s, *length)) {
            *t = next;
            return true;
        }
    }
    return false;
}

// Lists the names of an object's members, as many as fit, for messages. Returns out (size).
static inline const char* json_member_names(char* out, size_t size, const JsonValue* object) {
    char name[48];
    size_t used = 0;
    uint32_t i = 0;
    out[0] = '\0';
    for (; i < object->count && used + sizeof(name) + 8 < size; i++) {
        json_printable(name, sizeof(name), object->items[i].key, object->items[i].key_length);
        used += (size_t)snprintf(out + used, size - used, i ? ", %s" : "%s", name);
    }
    if (i < object->count) { snprintf(out + used, size - used, "%s...", i ? ", " : ""); }
    return out;
}

// Like json_want(), for a string of an object of a text: names the members that there are. advice: ends the message, or "".
static inline bool json_want_text(const JsonValue* object, const char* key, const JsonValue** out, const char* where,
                                  const char* advice, Error* err) {
    char names[240];
    if (object->type != JSON_OBJECT) {
        return error_set(err, "%s: is %s, want an object with \"%s\"", where, json_type_name(object->type), key);
    }
    if (!json_get(object, key)) {
        json_member_names(names, sizeof(names), object);
        return error_set(err, "%s: \"%s\" is missing, the members are: %s%s", where, key, names[0] ? names : "none",
                         advice);
    }
    return json_want(object, key, JSON_STRING, out, where, err);
}

// ---- the format of a text -------------------------------------------------------------------------

typedef enum { TEXT_PLAIN, TEXT_JSON_LINES, TEXT_JSON_ARRAY, TEXT_UNDECIDED } TextFormat;

// Whether the name of a file says that it has JSON lines.
static inline bool has_json_lines_name(const char* path) {
    const char* dot = strrchr(path, '.');
    return dot && (strcasecmp(dot, ".jsonl") == 0 || strcasecmp(dot, ".ndjson") == 0);
}

// Whether the text is JSON that is not read as documents: an object over several lines, or an array of strings.
static inline bool is_whole_json(const char* text, size_t n, char opening) {
    size_t at = json_skip_spaces(text, n, 0), first = json_skip_spaces(text, n, at + 1);
    if (first >= n || text[at] != opening || text[first] != '"') { return false; }
    size_t end = json_value_end(text, n, first), next = json_skip_spaces(text, n, end);
    if (end == 0 || next >= n) { return false; }
    if (opening == '{') { return text[next] == ':' && memchr(text + at, '\n', first - at); }
    size_t behind = json_skip_spaces(text, n, next + 1);
    return text[next] == ',' ? behind < n && text[behind] == '"' : text[next] == ']' && behind >= n;
}

// Returns what a text (n, or TEXT_HEAD bytes of it) is if it has more than the text in it, such as tags, which may be what is wanted; NULL: nothing
// of this kind. path: of the file. text_kind_print() says it.
static inline const FileKind* text_kind(const char* path, const char* text, size_t n) {
    static const struct {
        const char* text; // the beginning, in any case, or .SUFFIX of the name
        FileKind kind;
    } kinds[] = {
        {"<!doctype html", {"HTML", "pandoc -f html -t plain FILE", NULL}},
        {"<html", {"HTML", "pandoc -f html -t plain FILE", NULL}},
        {"<?xml", {"XML", NULL, "a program that knows its form takes out the text"}},
        {"<mediawiki", {"a dump of a wiki", NULL, "wikiextractor takes out the text"}},
        {"WARC/", {"a file of Common Crawl", NULL, "its headers are no part of the pages: warcio takes out the text"}},
        {"{\\rtf", {"RTF", "pandoc -f rtf -t plain FILE", NULL}},
        {"%!PS-", {"PostScript", "ps2ascii FILE", NULL}},
        {"WEBVTT", {"subtitles", NULL, "the times are no part of the text"}},
        {"{'", {"Python's form of a dict", NULL, "json.dumps() writes JSON lines"}},
        {"[{'", {"Python's form of dicts", NULL, "json.dumps() writes JSON lines"}},
        {".srt", {"subtitles", NULL, "the times are no part of the text"}},
        {".csv",
         {"a table", NULL, "duckdb -c \"COPY (FROM 'FILE') TO 'FILE.jsonl' (FORMAT json)\" makes JSON lines of it"}},
        {".tsv",
         {"a table", NULL, "duckdb -c \"COPY (FROM 'FILE') TO 'FILE.jsonl' (FORMAT json)\" makes JSON lines of it"}},
    };
    static const FileKind object = {"JSON over several lines", "jq -c . FILE", NULL},
                          strings = {"an array of strings", "jq -c '.[] | {text: .}' FILE", NULL};
    const char* dot = strrchr(path, '.');
    size_t at = json_skip_spaces(text, n, 0);
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        const char* s = kinds[i].text;
        bool found = s[0] == '.' ? dot && strcasecmp(dot, s) == 0
                                 : n - at >= strlen(s) && strncasecmp(text + at, s, strlen(s)) == 0;
        if (found) { return &kinds[i].kind; }
    }
    return is_whole_json(text, n, '{') ? &object : is_whole_json(text, n, '[') ? &strings : NULL;
}

// Prints one line to stderr about num_files files, of which the one at path, the first, is of this kind.
static inline void text_kind_print(const FileKind* kind, const char* path, int64_t num_files) {
    char more[64] = "";
    if (num_files > 1) { snprintf(more, sizeof(more), ", the first of %lld such files", (long long)num_files); }
    print_line(stderr, "note: %s is %s and is encoded as it is%s: %s%s", path, kind->name, more,
               kind->command ? kind->command : kind->advice, kind->command ? " takes out the text" : "");
}

// Returns the form of a text that is known to be JSON values: an array of objects, or else lines.
static inline TextFormat json_form(const char* text, size_t n) {
    size_t at = json_skip_spaces(text, n, 0);
    bool array = at < n && text[at] == '[';
    at = json_skip_spaces(text, n, at + 1);
    return array && at < n && text[at] == '{' ? TEXT_JSON_ARRAY : TEXT_JSON_LINES;
}

// Reads the values of such a text, which begins with these n bytes.
static inline JsonItems json_items(const char* text, size_t n, TextFormat format) {
    JsonItems items;
    memset(&items, 0, sizeof(items));
    items.lines.text = text;
    items.lines.n = n;
    items.array = format == TEXT_JSON_ARRAY;
    return items;
}

// Returns the format of a text that begins with these n bytes; TEXT_UNDECIDED if that depends on what follows; whole: nothing
// follows. JSON lines begin with an object in a line of its own that has the member `field`, a string, or is followed by
// another object. In an array, the first element is an object with this member. Other objects are text, for they may be
// a document as it is meant to be; then `names` (size) lists the members of the first.
static inline TextFormat text_format(const char* text, size_t n, bool whole, const char* field, char* names,
                                     size_t size) {
    TextFormat undecided = whole ? TEXT_PLAIN : TEXT_UNDECIDED;
    size_t at = json_skip_spaces(text, n, 0);
    bool array = at < n && text[at] == '[';
    if (array) { at = json_skip_spaces(text, n, at + 1); }
    names[0] = '\0';
    if (at == n) { return undecided; }
    size_t key = json_skip_spaces(text, n, at + 1);
    if (text[at] != '{' || (key < n && text[key] != '"')) { return TEXT_PLAIN; }
    size_t end = json_value_end(text, n, at), next = json_skip_spaces(text, n, end);
    const char* newline = (const char*)memchr(text + at, '\n', (end ? end : n) - at);
    if (!array && newline) { return TEXT_PLAIN; } // several lines of text in braces
    if (end == 0 || (next == n && !whole)) { return undecided; }
    bool line_ends = next == n || memchr(text + end, '\n', next - end) != NULL;
    if (array ? text[next == n ? at : next] != ',' && text[next == n ? at : next] != ']' : !line_ends) {
        return TEXT_PLAIN;
    }
    JsonDoc doc;
    JsonOdd odd = {0, 0, 0};
    if (!json_parse_lenient(&doc, text + at, end - at, "", &odd, NULL)) { return TEXT_PLAIN; }
    const JsonValue* v = json_get(doc.root, field);
    bool lines = (v && v->type == JSON_STRING) || (!array && next < n && text[next] == '{');
    if (!lines) { json_member_names(names, size, doc.root); }
    bool empty = doc.root->count == 0;
    json_free(&doc);
    return empty || !lines ? TEXT_PLAIN : array ? TEXT_JSON_ARRAY : TEXT_JSON_LINES;
}

#endif
