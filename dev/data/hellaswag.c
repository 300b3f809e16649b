/*
Converts HellaSwag's questions to an evaluation file in llm.c's format (llmc/eval_loader.h).

    dev/data/hellaswag -i hellaswag_val.jsonl --tokenizer gpt2/ -o hellaswag_val.bin

The input is either the original file, which has one JSON object per line with ctx, label and 4 endings, or text with
six lines per question: context, label, 4 endings. The original is recognized by its first byte '{'. The context is
encoded unchanged, each ending with a space before it. The output is written under a temporary name and renamed when it
is complete.

Source: Zellers et al. 2019, arXiv:1905.07830.
*/
#include "../../llmc/cli.h"
#include "../../llmc/eval_loader.h"
#include "../../llmc/tokenizer.h"

enum { MAX_EXAMPLES = 65535, MAX_EXAMPLE_BYTES = 65535, TEXT_LINES = 2 + EVAL_ENDINGS };

static struct { const char *input, *tokenizer, *out; } flags;

static Tokenizer tokenizer;

// ---- input: lines -------------------------------------------------------------------------------

typedef struct {
    const char* s;
    size_t n;
} Text;

static struct {
    MappedFile file;
    size_t at;   // byte offset of the next line
    size_t line; // number of the line that was read last
} in;

// Reads the next line into *t, without its line break. Returns false at the end of the file.
static bool next_line(Text* t) {
    in.line++;
    if (in.at == in.file.size) { return false; }
    const char* s = (const char*)in.file.data + in.at;
    const char* newline = (const char*)memchr(s, '\n', in.file.size - in.at);
    t->s = s;
    t->n = newline ? (size_t)(newline - s) : in.file.size - in.at;
    in.at += t->n + (newline != NULL);
    if (t->n > 0 && s[t->n - 1] == '\r') { t->n--; }
    return true;
}

static bool is_blank(const Text* t) {
    for (size_t i = 0; i < t->n; i++) {
        if (t->s[i] != ' ' && t->s[i] != '\t') { return false; }
    }
    return true;
}

// ---- output: 16-bit words in memory, then one file ----------------------------------------------

static struct {
    uint16_t* words; // (capacity), the first count are valid
    size_t count, capacity;
    int examples;
    size_t longest_bytes; // size of the largest example
    size_t longest_row;   // largest number of tokens of a context with one of its endings
    TokenBuffer tokens;
    char* text; // (text_capacity) an ending with a space before it
    size_t text_capacity;
} out;

static void put_word(size_t word) {
    if (out.count == out.capacity) {
        out.capacity = 2 * out.capacity + 65536;
        out.words = (uint16_t*)realloc_check(out.words, out.capacity * sizeof(uint16_t));
    }
    out.words[out.count++] = (uint16_t)word;
}

// Encodes a text and appends the number of its tokens, then the tokens. Returns their number.
static size_t put_text(const char* s, size_t n) {
    out.tokens.count = 0;
    tokenizer_encode(&tokenizer, s, n, &out.tokens);
    put_word(out.tokens.count);
    for (size_t i = 0; i < out.tokens.count; i++) { put_word(out.tokens.ids[i]); }
    return out.tokens.count;
}

static bool put_example(const Text* context, const Text* endings, int label, const char* where, Error* err) {
    size_t start = out.count, longest = 0;
    if (context->n == 0) { return error_set(err, "%s: the context is empty", where); }
    if (out.examples == MAX_EXAMPLES) { return error_set(err, "%s: more than %d questions", where, MAX_EXAMPLES); }
    put_word(EVAL_START);
    put_word(0); // size in bytes, filled in below
    put_word((size_t)out.examples);
    put_word((size_t)label);
    put_word(EVAL_ENDINGS);
    size_t context_tokens = put_text(context->s, context->n);
    for (int i = 0; i < EVAL_ENDINGS; i++) {
        size_t n = endings[i].n + 1;
        if (out.text_capacity < n) {
            out.text_capacity = 2 * n;
            out.text = (char*)realloc_check(out.text, out.text_capacity);
        }
        out.text[0] = ' ';
        memcpy(out.text + 1, endings[i].s, endings[i].n);
        size_t tokens = put_text(out.text, n);
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
static bool write_file(const char* path, Error* err) {
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
    int32_t header[EVAL_HEADER_BYTES / 4] = {EVAL_MAGIC, EVAL_VERSION, out.examples, (int32_t)out.longest_bytes};
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

// ---- the two input formats ----------------------------------------------------------------------

static void print_progress(void) {
    static double last_ms;
    bool tty = isatty(STDERR_FILENO);
    double now = time_ms();
    if (last_ms == 0) { last_ms = now; }
    if (now - last_ms < (tty ? 100 : 5000)) { return; }
    last_ms = now;
    char line[80];
    snprintf(line, sizeof(line), "%5.1f%%  %d questions", 100.0 * (double)in.at / (double)in.file.size, out.examples);
    fprintf(stderr, tty ? "\r%-40s" : "%s\n", line);
}

static void set_where(char* where, size_t size) { snprintf(where, size, "%.900s:%zu", flags.input, in.line); }

static bool convert_text(Error* err) {
    char where[1000], got[64];
    for (Text lines[TEXT_LINES]; next_line(&lines[0]);) {
        if (is_blank(&lines[0])) { continue; } // between questions, and at the end
        size_t first = in.line;
        for (int i = 1; i < TEXT_LINES; i++) {
            bool there = next_line(&lines[i]);
            set_where(where, sizeof(where));
            if (!there || is_blank(&lines[i])) {
                return error_set(err, "%s: %s, want line %d of the question that begins in line %zu: %s", where,
                                 there ? "an empty line" : "the file ends", i + 1, first, "context, label, 4 endings");
            }
            if (i == 1 && (lines[1].n != 1 || lines[1].s[0] < '0' || lines[1].s[0] >= '0' + EVAL_ENDINGS)) {
                return error_set(err, "%s: the label is '%s', want 0 to %d", where,
                                 json_printable(got, sizeof(got), lines[1].s, lines[1].n), EVAL_ENDINGS - 1);
            }
        }
        if (!put_example(&lines[0], lines + 2, lines[1].s[0] - '0', where, err)) { return false; }
        if (out.examples % 64 == 0) { print_progress(); }
    }
    return true;
}

static bool put_json(const JsonValue* root, const char* where, Error* err) {
    const JsonValue *context, *endings;
    int64_t label;
    // the datasets library writes labels as strings, "0" to "3"
    const JsonValue* v = json_get(root, "label");
    bool digit =
        v && v->type == JSON_STRING && v->length == 1 && v->string[0] >= '0' && v->string[0] < '0' + EVAL_ENDINGS;
    if (digit) { label = v->string[0] - '0'; }
    if (!json_want(root, "ctx", JSON_STRING, &context, where, err) ||
        (!digit && !json_int(root, "label", 0, EVAL_ENDINGS - 1, &label, where, err)) ||
        !json_want(root, "endings", JSON_ARRAY, &endings, where, err)) {
        return false;
    }
    if (endings->count != EVAL_ENDINGS) {
        return error_set(err, "%s: \"endings\" has %u elements, want %d", where, endings->count, EVAL_ENDINGS);
    }
    Text texts[1 + EVAL_ENDINGS] = {{context->string, context->length}};
    for (int i = 0; i < EVAL_ENDINGS; i++) {
        const JsonValue* v = &endings->items[i];
        if (v->type != JSON_STRING) {
            return error_set(err, "%s: ending %d is %s, want a string", where, i, json_type_name(v->type));
        }
        Text t = {v->string, v->length};
        texts[1 + i] = t;
    }
    return put_example(&texts[0], texts + 1, (int)label, where, err);
}

static bool convert_jsonl(Error* err) {
    char where[1000];
    for (Text line; next_line(&line);) {
        JsonDoc doc;
        if (is_blank(&line)) { continue; }
        set_where(where, sizeof(where));
        if (!json_parse(&doc, line.s, line.n, where, err)) { return false; }
        bool ok = put_json(doc.root, where, err);
        json_free(&doc);
        if (!ok) { return false; }
        if (out.examples % 64 == 0) { print_progress(); }
    }
    return true;
}

// ---- command line -------------------------------------------------------------------------------

static void parse_flags(int argc, char** argv) {
    const Option options[] = {
        {OPT_STR, 'i', NULL, "input", &flags.input, "FILE",
         "HellaSwag's .jsonl, or text with six lines per question: context, label, 4 endings", 0, 0},
        {OPT_STR, 't', NULL, "tokenizer", &flags.tokenizer, "PATH",
         "GPT-2 vocabulary, a directory or a file; default: the 256 bytes and <|endoftext|>", 0, 0},
        {OPT_STR, 'o', NULL, "out", &flags.out, "FILE", "the file to write, for example hellaswag_val.bin", 0, 0},
    };
    cli_parse(argc, argv, "Converts HellaSwag's questions to an evaluation file in llm.c's format.", options,
              (int)(sizeof(options) / sizeof(options[0])));
    if (!flags.input || !flags.out) {
        cli_fail("--%s is missing, see %s --help", flags.input ? "out" : "input", argv[0]);
    }
}

int main(int argc, char** argv) {
    open_standard_streams();
    Error err;
    parse_flags(argc, argv);
    if (!tokenizer_load_encoder(&tokenizer, flags.tokenizer, EVAL_START, "evaluation files", &err)) {
        die("%s", err.text);
    }
    double start_ms = time_ms();
    if (!map_file(&in.file, flags.input, &err)) { die("%s", err.text); }
    bool jsonl = in.file.size > 0 && in.file.data[0] == '{';
    bool ok = jsonl ? convert_jsonl(&err) : convert_text(&err);
    if (ok && out.examples == 0) { ok = error_set(&err, "%s: contains no questions", flags.input); }
    ok = ok && write_file(flags.out, &err);
    if (isatty(STDERR_FILENO)) { fprintf(stderr, "\r%-40s\r", ""); }
    if (!ok) { die("%s", err.text); }
    print_line(stderr, "%s: %d questions, the longest with its ending %zu tokens, %zu bytes, in %.2f s", flags.out,
               out.examples, out.longest_row, EVAL_HEADER_BYTES + out.count * sizeof(uint16_t),
               (time_ms() - start_ms) / 1e3);
    unmap_file(&in.file);
    free(out.words);
    free(out.text);
    token_buffer_free(&out.tokens);
    tokenizer_free(&tokenizer);
    return 0;
}
