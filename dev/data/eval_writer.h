/*
What the converters of questions have in common: reading lines, and writing an evaluation file (llmc/eval_loader.h). A
converter supplies a function that reads the input and calls put_example() for each question.

The tokens of a context and its ending are those of the two together, as in the LM Evaluation Harness: white space at
the end of the context is encoded with the ending. So the ending begins with white space after another character, where
no token of GPT-2 spans both, and the two can be encoded apart. An added token of a vocabulary that would span both is
not one there.
*/
#ifndef DEV_DATA_EVAL_WRITER_H
#define DEV_DATA_EVAL_WRITER_H

#include "../../llmc/cli.h"
#include "../../llmc/eval_loader.h"
#include "../../llmc/text_input.h"
#include "../../llmc/tokenizer.h"

enum { MAX_EXAMPLES = 65535, MAX_EXAMPLE_BYTES = 65535 };

static struct { const char *input, *tokenizer, *out; } flags;

static Tokenizer tokenizer;

// ---- input: lines -------------------------------------------------------------------------------

typedef struct {
    const char* s;
    size_t n;
} Text;

static struct {
    MappedFile file;
    JsonItems items; // or, if the input is not JSON, only its lines
    TextNotes notes;
    const char* help; // what the input is
} in;

// Reads the next line into *t, without its line break. Returns false at the end of the file.
static inline bool next_line(Text* t) { return text_next_line(&in.items.lines, &t->s, &t->n); }

static inline bool is_blank(const Text* t) { return text_is_blank(t->s, t->n); }

// ---- output: 16-bit words in memory, then one file ----------------------------------------------

static struct {
    EvalKind kind;
    uint16_t* words; // (capacity), the first count are valid
    size_t count, capacity;
    int examples;
    size_t longest_bytes; // size of the largest example
    size_t longest_row;   // largest number of tokens of a context with one of its endings
    TokenBuffer tokens;
    char* text; // (text_capacity) an ending with white space before it
    size_t text_capacity;
    int blanks; // endings that have a blank before them already
} out;

static inline void put_word(size_t word) {
    if (out.count == out.capacity) {
        out.capacity = 2 * out.capacity + 65536;
        out.words = (uint16_t*)realloc_check(out.words, out.capacity * sizeof(uint16_t));
    }
    out.words[out.count++] = (uint16_t)word;
}

// Encodes a text and appends the number of its tokens, then the tokens, and between them, unless characters is 0,
// characters. Returns the number of tokens.
static inline size_t put_text(const char* s, size_t n, size_t characters) {
    out.tokens.count = 0;
    tokenizer_encode_text(&tokenizer, s, n, false, &out.tokens);
    put_word(out.tokens.count);
    if (characters > 0) { put_word(characters); }
    for (size_t i = 0; i < out.tokens.count; i++) { put_word(out.tokens.ids[i]); }
    return out.tokens.count;
}

// Returns the length of the context (n bytes) without the white space at its end.
static inline size_t trimmed_length(const char* s, size_t n) {
    const uint8_t *begin = (const uint8_t*)s, *at = begin, *end = begin + n;
    size_t kept = 0, length;
    for (; at < end; at += length) {
        if (tokenizer_class_at(&tokenizer, at, end, &length) != CLASS_SPACE) { kept = (size_t)(at - begin) + length; }
    }
    return kept;
}

// Appends the ending, with the white space that belongs to it: `space` (n bytes), from the end of the context, and one
// blank. Returns the number of its tokens.
static inline size_t put_ending(const char* space, size_t n, const Text* ending) {
    size_t bytes = n + 1 + ending->n, characters = 0;
    if (out.text_capacity < bytes) {
        out.text_capacity = 2 * bytes;
        out.text = (char*)realloc_check(out.text, out.text_capacity);
    }
    memcpy(out.text, space, n);
    out.text[n] = ' ';
    memcpy(out.text + n + 1, ending->s, ending->n);
    out.blanks += ending->n > 0 && ending->s[0] == ' ';
    for (size_t i = 0; i < ending->n; i++) { characters += ((uint8_t)ending->s[i] & 0xC0) != 0x80; } // of UTF-8
    return put_text(out.text, bytes, out.kind == EVAL_LLMC_CHOICES ? 0 : characters);
}

// Appends an example: a context and its endings (num_endings), each without the blank before it. label: the right
// ending.
static inline bool put_example(const Text* context, const Text* endings, int num_endings, int label, const char* where,
                               Error* err) {
    size_t start = out.count, longest = 0, kept = context->n;
    if (out.kind != EVAL_LLMC_CHOICES) { kept = trimmed_length(context->s, context->n); }
    if (kept == 0) { return error_set(err, "%s: the context is empty", where); }
    if (out.examples == MAX_EXAMPLES) { return error_set(err, "%s: more than %d questions", where, MAX_EXAMPLES); }
    put_word(EVAL_START);
    put_word(0); // size in bytes, filled in below
    put_word((size_t)out.examples);
    put_word((size_t)label);
    put_word((size_t)num_endings);
    size_t context_tokens = put_text(context->s, kept, 0);
    for (int i = 0; i < num_endings; i++) {
        if (out.kind != EVAL_LLMC_CHOICES && endings[i].n == 0) {
            return error_set(err, "%s: ending %d is empty", where, i);
        }
        size_t tokens = put_ending(context->s + kept, context->n - kept, &endings[i]);
        if (tokens > longest) { longest = tokens; }
    }
    size_t bytes = (out.count - start) * sizeof(uint16_t);
    if (bytes > MAX_EXAMPLE_BYTES) {
        return error_set(err, "%s: the question takes %zu bytes of tokens, but the format allows at most %d", where,
                         bytes, MAX_EXAMPLE_BYTES);
    }
    out.words[start + 1] = (uint16_t)bytes;
    if (bytes > out.longest_bytes) { out.longest_bytes = bytes; }
    if (context_tokens + longest > out.longest_row) { out.longest_row = context_tokens + longest; }
    out.examples++;
    return true;
}

// Writes the file under a temporary name and renames it.
static inline bool write_file(const char* path, Error* err) {
    char tmp[4096], dir[4096];
    FileWriter w;
    int n = snprintf(tmp, sizeof(tmp), "%s.tmp", path);
    if (n < 0 || n >= (int)sizeof(tmp)) { return error_set(err, "%.64s...: the file name is too long", path); }
    if (is_directory(path)) { return error_set(err, "%s: is a directory, expected a file name", path); }
    snprintf(dir, sizeof(dir), "%s", path);
    char* slash = strrchr(dir, '/');
    if (!slash) { snprintf(dir, sizeof(dir), "."); }
    if (slash) { slash[slash == dir ? 1 : 0] = '\0'; }
    if (!make_directories(dir, err) || !writer_open(&w, tmp, err)) { return false; }
    int32_t version = out.kind == EVAL_LLMC_CHOICES ? 1 : 2, longest = (int32_t)out.longest_bytes;
    int32_t header[EVAL_HEADER_BYTES / 4] = {EVAL_MAGIC, version, out.examples, longest, (int32_t)out.kind};
    writer_put(&w, header, sizeof(header));
    writer_put(&w, out.words, out.count * sizeof(uint16_t));
    bool ok = writer_close(&w, err);
    if (ok && rename(tmp, path) != 0) { ok = error_set(err, "%s: cannot rename %s: %s", path, tmp, strerror(errno)); }
    if (!ok) {
        unlink(tmp);
        return false;
    }
    return sync_directory(dir, err);
}

// ---- conversion -----------------------------------------------------------------------------------

static inline void print_progress(void) {
    static double last_ms;
    bool tty = isatty(STDERR_FILENO);
    double now = time_ms();
    if (last_ms == 0) { last_ms = now; }
    if (now - last_ms < (tty ? 100 : 5000)) { return; }
    last_ms = now;
    char line[80];
    snprintf(line, sizeof(line), "%5.1f%%  %d questions", 100.0 * (double)in.items.lines.at / (double)in.file.size,
             out.examples);
    fprintf(stderr, tty ? "\r%-40s" : "%s\n", line);
}

static inline void set_where(char* where, size_t size) { json_items_where(&in.items, flags.input, where, size); }

// Reads a file with one JSON value per line, or an array of them; put_json(root, where, err) puts the example of each.
static inline bool convert_json(bool (*put_json)(const JsonValue* root, const char* where, Error* err), Error* err) {
    char where[1000];
    const TextLines* text = &in.items.lines;
    size_t at = json_skip_spaces(text->text, text->n, 0);
    err->text[0] = '\0';
    if (at < text->n && text->text[at] != '{' && text->text[at] != '[') {
        return error_set(err, "%s: is not JSON: want %s", flags.input, in.help);
    }
    for (Text value; json_items_next(&in.items, &value.s, &value.n, flags.input, err);) {
        JsonDoc doc;
        set_where(where, sizeof(where));
        if (!json_parse_lenient(&doc, value.s, value.n, where, &in.notes.json, err)) { return false; }
        bool ok = put_json(doc.root, where, err);
        json_free(&doc);
        if (!ok) { return false; }
        if (out.examples % 64 == 0) { print_progress(); }
    }
    return !err->text[0];
}

// Fails if the answer, the member `key`, is empty or not there.
static inline bool check_answer(const JsonValue* root, const char* key, const char* where, Error* err) {
    const JsonValue* v = json_get(root, key);
    bool empty = v && v->type == JSON_STRING && v->length == 0;
    if (root->type != JSON_OBJECT || (v && !empty)) { return true; }
    char names[240];
    return error_set(
        err,
        "%s: \"%s\" is %s, the members are: %s; test sets without answers cannot be scored: take the validation "
        "set",
        where, key, empty ? "empty" : "missing", json_member_names(names, sizeof(names), root));
}

// Sets *text to element i of an array, which is called `what` in messages.
static inline bool want_text(Text* text, const JsonValue* array, uint32_t i, const char* what, const char* where,
                             Error* err) {
    const JsonValue* v = &array->items[i];
    if (v->type != JSON_STRING) {
        return error_set(err, "%s: %s %u is %s, want a string", where, what, i, json_type_name(v->type));
    }
    text->s = v->string;
    text->n = v->length;
    return true;
}

static inline void parse_flags(int argc, char** argv, const char* about, const char* input_help, const char* example) {
    char out_help[128];
    snprintf(out_help, sizeof(out_help), "the file to write, for example %s", example);
    const Option options[] = {
        {OPT_STR, 'i', NULL, "input", &flags.input, "FILE", input_help, 0, 0},
        {OPT_STR, 't', NULL, "tokenizer", &flags.tokenizer, "PATH",
         "GPT-2 vocabulary, a directory or a file; default: the 256 bytes and <|endoftext|>", 0, 0},
        {OPT_STR, 'o', NULL, "out", &flags.out, "FILE", out_help, 0, 0},
    };
    cli_parse(argc, argv, about, options, (int)(sizeof(options) / sizeof(options[0])));
    if (!flags.input || !flags.out) {
        cli_fail("--%s is missing, see %s --help", flags.input ? "out" : "input", argv[0]);
    }
}

// Checks the beginning of the input, and finds its form. help: what the input is.
static inline bool begin_input(const char* help, Error* err) {
    const char* text = (const char*)in.file.data;
    size_t n = in.file.size, mark;
    in.help = help;
    if (!text_check(text, n, flags.input, " > TEXT", &mark, err)) { return false; }
    in.items = json_items(text + mark, n - mark, json_form(text + mark, n - mark));
    text_count_odd(&in.notes, text, n);
    return true;
}

// The main() of a converter. about, input_help, example: for --help, what the program does, its input, and a name of an
// output file. convert: reads the input, which is open, and puts all examples. Returns the exit code.
static inline int convert_main(int argc, char** argv, EvalKind kind, const char* about, const char* input_help,
                               const char* example, bool (*convert)(Error* err)) {
    open_standard_streams();
    Error err;
    parse_flags(argc, argv, about, input_help, example);
    if (!tokenizer_load_encoder(&tokenizer, flags.tokenizer, EVAL_START, "evaluation files", &err)) {
        die("%s", err.text);
    }
    double start_ms = time_ms();
    if (!map_file(&in.file, flags.input, &err)) { die("%s", err.text); }
    out.kind = kind;
    bool ok = begin_input(input_help, &err) && convert(&err);
    if (ok && out.examples == 0) { ok = error_set(&err, "%s: contains no questions", flags.input); }
    ok = ok && write_file(flags.out, &err);
    if (isatty(STDERR_FILENO)) { fprintf(stderr, "\r%-40s\r", ""); }
    if (!ok) { die("%s", err.text); }
    print_line(stderr, "%s: %d questions, the longest with its ending %zu tokens, %zu bytes, in %.2f s", flags.out,
               out.examples, out.longest_row, EVAL_HEADER_BYTES + out.count * sizeof(uint16_t),
               (time_ms() - start_ms) / 1e3);
    text_notes_print(&in.notes, flags.input);
    if (out.blanks > 0) {
        print_line(stderr, "note: %s: %d endings begin with a blank of their own, behind the one that each is given",
                   flags.input, out.blanks);
    }
    unmap_file(&in.file);
    free(out.words);
    free(out.text);
    token_buffer_free(&out.tokens);
    tokenizer_free(&tokenizer);
    return 0;
}

#endif
