/*
Converts text to token shards: reads text files, JSON lines, arrays of JSON objects or standard input, which it tells apart
by their first bytes, and writes NAME_train_000000.bin ... in llm.c's format. Every document is preceded by an end-of-text
token. The vocabulary is saved beside the shards. With --special, an end-of-text that is spelled in the text begins another
document.

    dev/data/tokenize -i book.txt --tokenizer gpt2/ --out data/book --val-tokens 32768
    dev/data/tokenize -i web/a.jsonl,web/b.jsonl --tokenizer gpt2/ --out data/web
    zcat big.gz | dev/data/tokenize -i - --tokenizer gpt2/ --out data/big

--documents blank-line --val-tokens 32768 gives llm.c's tinyshakespeare (32,768 + 305,260 tokens): every blank line ends
a document and belongs to it. That makes 338,028 tokens; the file as a single text has 338,025 and one end-of-text.

The threads take turns to read a chunk of the input, encode their chunks in parallel, and write them in the order of the
input. A chunk ends after a document or at a position that no token can cross (tokenizer_find_cut), so the shards depend
neither on the chunk size nor on the number of threads. The shards have temporary names until all of them are written;
an error or a signal leaves no new files behind.
*/
#include "../../llmc/cli.h"
#include "../../llmc/dataloader.h"
#include "../../llmc/text_input.h"
#include "../../llmc/tokenizer.h"
#include <dirent.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>

enum { MAX_CHUNK = 1 << 30 }; // bytes; limit for a single line of input, and for text without a position to cut at

typedef enum { DOC_FILE, DOC_LINE, DOC_BLANK_LINE, DOC_JSON } DocumentKind;

static struct {
    const char *input, *tokenizer, *eot, *out, *documents, *field;
    int64_t val_tokens, shard_tokens;
    int threads, chunk_bytes, skip_bad_lines, special;
} flags = {NULL, NULL, NULL, NULL, "auto", "text", 0, 100000000, 0, 1 << 20, 0, 0};

static Tokenizer tokenizer;

// ---- input: files in order, cut into chunks -----------------------------------------------------

// A chunk and its tokens. Each thread has one Job: it reads a chunk, encodes it, and writes the tokens in the order of
// seq.
typedef struct {
    char* text; // (capacity), the first n bytes are valid
    size_t n, capacity;
    DocumentKind kind;
    bool starts; // the first byte begins a document
    const char* path;
    JsonItems items; // DOC_JSON: the values of the chunk
    size_t seq;
    TokenBuffer tokens;
    int64_t documents, bad_lines;
    TextNotes notes;
    Error error; // "" if none
} Job;

static struct {
    char** paths; // (count)
    size_t count, next;
    int fd; // of paths[next - 1]; -1: no file is open
    DocumentKind kind;
    bool file_start;
    bool file_end;   // there is nothing more to read
    JsonItems items; // DOC_JSON: the values behind the last cut
    char* carry;     // (carry_capacity): bytes carry_begin .. carry_end - 1 were read but lie behind the last cut
    size_t carry_begin, carry_end, carry_capacity;
    size_t next_seq;
    int64_t total_bytes;    // size of all files; -1 if unknown
    int64_t plain_objects;  // files of JSON objects without the member --field
    char plain_object[400]; // the first of them, and its members
    int64_t num_raw;        // files that have more than the text in them
    const FileKind* raw;    // what the first of them is, raw_path
    const char* raw_path;
} in;

static void add_path(const char* path) {
    struct stat st;
    in.paths = (char**)realloc_check(in.paths, (in.count + 1) * sizeof(char*));
    in.paths[in.count++] = strdup_check(path);
    bool regular = strcmp(path, "-") != 0 && stat(path, &st) == 0 && S_ISREG(st.st_mode);
    in.total_bytes = regular && in.total_bytes >= 0 ? in.total_bytes + st.st_size : -1;
}

// Cuts the next name or pattern off the list *rest; NULL at its end. Commas and spaces separate, unless a backslash
// precedes them. The backslash stays, because glob() removes it.
static char* next_pattern(char** rest) {
    char *start = *rest + strspn(*rest, ", "), *end = start;
    while (*end && *end != ',' && *end != ' ') { end += end[0] == '\\' && end[1] ? 2 : 1; }
    *rest = *end ? end + 1 : end;
    *end = '\0';
    return end > start ? start : NULL;
}

static int compare_paths(const void* a, const void* b) { return strcmp(*(char* const*)a, *(char* const*)b); }

// Notes files that several names or patterns match: their text is trained on as many times. Refuses standard input that is
// given twice: it can be read only once.
static void note_repeated_inputs(void) {
    if (in.count < 2) { return; }
    size_t repeated = 0, first = 0;
    char** sorted = (char**)malloc_check(in.count * sizeof(char*));
    memcpy(sorted, in.paths, in.count * sizeof(char*));
    qsort(sorted, in.count, sizeof(char*), compare_paths);
    for (size_t i = 1; i < in.count; i++) {
        if (strcmp(sorted[i], sorted[i - 1]) != 0) { continue; }
        if (strcmp(sorted[i], "-") == 0) { die("--input %s: names standard input, -, more than once", flags.input); }
        if (repeated++ == 0) { first = i; }
    }
    if (repeated > 0) {
        print_line(stderr, "note: %s is given more than once, and its text will be there as many times%s",
                   sorted[first], repeated > 1 ? "; other files, too" : "");
    }
    free(sorted);
}

// Finds the files of --input: a file with exactly this name, or else names and patterns separated by commas or spaces.
// The matches of a pattern are sorted by name.
static void find_inputs(void) {
    if (strcmp(flags.input, "-") == 0 || file_exists(flags.input)) {
        add_path(flags.input);
        return;
    }
    char* list = strdup_check(flags.input);
    for (char *rest = list, *pattern; (pattern = next_pattern(&rest));) {
        glob_t g;
        if (strcmp(pattern, "-") == 0 || file_exists(pattern)) {
            add_path(pattern);
            continue;
        }
        if (glob(pattern, 0, NULL, &g) != 0) {
            die("--input %s: no such file, and no file matches this pattern%s", pattern,
                strchr(flags.input, ' ') ? "; write \\ before a space in a name" : "");
        }
        for (size_t i = 0; i < g.gl_pathc; i++) { add_path(g.gl_pathv[i]); }
        globfree(&g);
    }
    free(list);
    note_repeated_inputs();
    if (in.count == 0) { die("--input '%s' names no file", flags.input); }
}

static void job_reserve(Job* job, size_t capacity) {
    if (job->capacity >= capacity) { return; }
    job->text = (char*)realloc_check(job->text, capacity);
    job->capacity = capacity;
}

// Reads more bytes to `to`, which holds *n of them, until it holds `wanted` or the file ends. Sets *n.
static bool read_bytes(char* to, size_t* n, size_t wanted, const char* path, Error* err) {
    while (*n < wanted && !in.file_end) {
        ssize_t got = read(in.fd, to + *n, wanted - *n);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { return error_set(err, "%s: %s", path, strerror(errno)); }
        in.file_end = got == 0;
        *n += (size_t)got;
    }
    return true;
}

// Reads at least `wanted` bytes of the file that was opened into in.carry, if there are so many.
static bool read_head(size_t wanted, const char* path, Error* err) {
    if (in.carry_capacity < wanted) { in.carry = (char*)realloc_check(in.carry, in.carry_capacity = wanted); }
    return read_bytes(in.carry, &in.carry_end, wanted, path, err);
}

// Sets in.kind by --documents, or else by the name and the beginning of the file, which is in in.carry.
static bool find_kind(const char* path, Error* err) {
    char names[240] = "";
    TextFormat format = TEXT_JSON_LINES;
    const char* text = in.carry + in.carry_begin;
    bool automatic = strcmp(flags.documents, "auto") == 0;
    in.kind = strcmp(flags.documents, "line") == 0         ? DOC_LINE
              : strcmp(flags.documents, "blank-line") == 0 ? DOC_BLANK_LINE
              : strcmp(flags.documents, "file") == 0       ? DOC_FILE
                                                           : DOC_JSON;
    if (automatic && !has_json_lines_name(path)) {
        for (size_t wanted = TEXT_HEAD;; wanted *= 2) {
            if (!read_head(wanted, path, err)) { return false; }
            text = in.carry + in.carry_begin;
            bool whole = in.file_end || wanted >= MAX_CHUNK;
            format = text_format(text, in.carry_end - in.carry_begin, whole, flags.field, names, sizeof(names));
            if (format != TEXT_UNDECIDED) { break; }
        }
        if (format == TEXT_PLAIN) { in.kind = DOC_FILE; }
        if (names[0] && in.plain_objects++ == 0) {
            snprintf(in.plain_object, sizeof(in.plain_object), "%.140s has %s", path, names);
        }
    }
    if (in.kind != DOC_JSON) {
        const FileKind* raw = text_kind(path, text, in.carry_end - in.carry_begin);
        if (raw && !names[0] && in.num_raw++ == 0) { in.raw = raw, in.raw_path = path; }
        return true;
    }
    if (format != TEXT_JSON_ARRAY) { format = json_form(text, in.carry_end - in.carry_begin); }
    in.items = json_items(NULL, 0, format);
    return true;
}

// Opens the next file, checks its beginning and finds what its documents are.
static bool open_next(Error* err) {
    const char* path = in.paths[in.next++];
    size_t mark;
    if (is_directory(path)) {
        return error_set(err, "%s: is a directory: name the files in it by a pattern in quotes, such as '%s/*.txt'",
                         path, path);
    }
    in.fd = strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (in.fd < 0) { return error_set(err, "%s: %s", path, strerror(errno)); }
    in.file_start = true;
    in.file_end = false;
    in.carry_begin = in.carry_end = 0;
    if (!read_head(TEXT_HEAD, path, err) || !text_check(in.carry, in.carry_end, path, " | tokenize -i -", &mark, err)) {
        return false;
    }
    in.carry_begin = mark;
    return find_kind(path, err);
}

// Fills the job up to `wanted` bytes, from in.carry and then from the file.
static bool fill(Job* job, size_t wanted, Error* err) {
    job_reserve(job, wanted);
    size_t carried = in.carry_end - in.carry_begin;
    if (carried > wanted - job->n) { carried = wanted - job->n; }
    if (carried > 0) { memcpy(job->text + job->n, in.carry + in.carry_begin, carried); }
    job->n += carried;
    in.carry_begin += carried;
    return read_bytes(job->text, &job->n, wanted, job->path, err);
}

// Takes what lies behind the cut off the job, back to in.carry.
static void carry_over(Job* job, size_t cut) {
    size_t rest = job->n - cut;
    job->n = cut;
    if (in.carry_begin < in.carry_end) { // these bytes come from there
        in.carry_begin -= rest;
        return;
    }
    if (in.carry_capacity < rest) { in.carry = (char*)realloc_check(in.carry, in.carry_capacity = rest); }
    if (rest > 0) { memcpy(in.carry, job->text + cut, rest); }
    in.carry_begin = 0;
    in.carry_end = rest;
}

// Sets the job's values to those in the chunk, and in.items to what follows. Returns the end of the last value; if there is an
// error behind it, the end of the chunk: encode_job() will find it, too.
static size_t find_items(Job* job, bool end) {
    Error err;
    const char* s;
    size_t n;
    JsonItems items = in.items;
    err.text[0] = '\0';
    items.lines.text = job->text;
    items.lines.n = job->n;
    items.lines.at = 0;
    items.more = !end;
    job->items = items;
    while (json_items_next(&items, &s, &n, job->path, &err)) {}
    in.items = items;
    return end || err.text[0] ? job->n : items.lines.at;
}

// Returns the last position at which the chunk can end if its file continues: after a line or a JSON value, or where no
// token can cross. Returns 0 if there is none.
static size_t find_cut(Job* job) {
    if (job->kind == DOC_JSON) { return find_items(job, false); }
    if (job->kind != DOC_LINE) { return tokenizer_find_cut(&tokenizer, job->text, job->n); }
    size_t n = job->n; // memrchr is not everywhere
    while (n > 0 && job->text[n - 1] != '\n') { n--; }
    return n;
}

// Reads the next chunk into job. Returns false at the end of the input, or on an error, which is then in job->error.
static bool read_chunk(Job* job) {
    job->n = 0;
    job->seq = in.next_seq;
    while (job->n == 0) {
        if (in.fd < 0) {
            if (in.next == in.count) { return false; }
            if (!open_next(&job->error)) { return false; }
        }
        job->path = in.paths[in.next - 1];
        job->kind = in.kind;
        bool end = false;
        size_t cut = 0;
        for (size_t wanted = (size_t)flags.chunk_bytes; cut == 0 && !end; wanted *= 2) {
            if (wanted > MAX_CHUNK) {
                error_set(&job->error, "%s: 1 GiB without a position to cut at", job->path);
                return false;
            }
            if (!fill(job, wanted, &job->error)) { return false; }
            end = in.file_end && in.carry_begin == in.carry_end;
            cut = end ? job->n : find_cut(job);
        }
        if (end && job->kind == DOC_JSON) { find_items(job, true); }
        carry_over(job, cut);
        job->starts = in.file_start;
        in.file_start = false;
        if (end) {
            if (in.fd != STDIN_FILENO) { close(in.fd); }
            in.fd = -1;
        }
    }
    in.next_seq++;
    return true;
}

// ---- encoding one chunk -------------------------------------------------------------------------

// Encodes a document, or the continuation of one if starts is false. Empty documents are ignored.
static void add_text(Job* job, const char* text, size_t n, bool starts) {
    if (n == 0) { return; }
    job->documents += (int64_t)tokenizer_encode_document(&tokenizer, text, n, starts, flags.special, &job->tokens);
}

static bool add_json(Job* job, const char* text, size_t n) {
    char where[1100];
    JsonDoc doc;
    JsonOdd odd = {0, 0, 0};
    json_items_where(&job->items, job->path, where, sizeof(where));
    bool ok = json_parse_lenient(&doc, text, n, where, &odd, &job->error);
    if (ok) {
        const JsonValue* v;
        ok = json_want_text(doc.root, flags.field, &v, where, ": --field NAME takes another", &job->error);
        if (ok) {
            add_text(job, v->string, v->length, true);
            json_odd_add(&job->notes.json, &odd);
        }
        json_free(&doc);
    }
    if (!ok && flags.skip_bad_lines) {
        job->bad_lines++;
        job->error.text[0] = '\0';
        return true;
    }
    if (!ok) {
        Error err = job->error;
        error_set(&job->error, "%.900s; --skip-bad-lines skips such lines", err.text);
    }
    return ok;
}

// Encodes the values of JSON lines or of an array.
static void encode_json(Job* job) {
    const char* s;
    size_t n;
    while (json_items_next(&job->items, &s, &n, job->path, &job->error) && add_json(job, s, n)) {}
}

static void encode_lines(Job* job) {
    TextLines lines = {job->text, job->n, 0, 0};
    const char* s;
    for (size_t n; text_next_line(&lines, &s, &n);) {
        if (!text_is_blank(s, n)) { add_text(job, s, n, true); }
    }
}

// Encodes documents that end with a blank line. A chunk never begins inside a run of white space, so blank lines are found at
// the same positions however the input is cut into chunks. Blank lines alone are no document.
static void encode_sections(Job* job) {
    bool starts = job->starts;
    for (size_t i = 0, n; i < job->n; i += n, starts = true) {
        const char* section = job->text + i;
        n = text_section(section, job->n - i);
        if (!starts || !text_is_blank(section, n)) { add_text(job, section, n, starts); }
    }
}

static void encode_job(Job* job) {
    job->tokens.count = job->tokens.spelled = 0;
    job->documents = job->bad_lines = 0;
    memset(&job->notes, 0, sizeof(job->notes));
    text_count_odd(&job->notes, job->text, job->n);
    if (job->kind == DOC_FILE) {
        add_text(job, job->text, job->n, job->starts);
    } else if (job->kind == DOC_BLANK_LINE) {
        encode_sections(job);
    } else if (job->kind == DOC_LINE) {
        encode_lines(job);
    } else {
        encode_json(job);
    }
}

// ---- output: shards under temporary names until all are written -----------------------------------

enum { SPLIT_VAL, SPLIT_TRAIN };
static const char* const split_names[2] = {"val", "train"};

static struct {
    char prefix[3800]; // DIR/NAME
    char dir[3800];
    ShardWriter writer;
    bool open;
    int split;
    int num_shards[2];
    int64_t tokens[2];
    int64_t documents, bytes, bad_lines;
    TextNotes notes;
    size_t spelled;      // special tokens that became ordinary text
    int spelled_id;      // the first of them
    bool made_directory; // dir was not there
} out;

static void shard_path(char* path, size_t size, int split, int index, const char* suffix) {
    snprintf(path, size, "%s_%s_%06d.bin%s", out.prefix, split_names[split], index, suffix);
}

// Removes the shards that have been written so far.
static void remove_parts(void) {
    char path[4000];
    for (int split = 0; split < 2; split++) {
        for (int i = 0; i < out.num_shards[split]; i++) {
            shard_path(path, sizeof(path), split, i, ".part");
            unlink(path);
            shard_path(path, sizeof(path), split, i, ".part.tmp");
            unlink(path);
        }
    }
}

// Sets the prefix of the shards' names from --out. If --out is an existing directory or ends in a slash, the prefix is
// "data" in that directory; otherwise it is --out itself.
static void set_output(void) {
    size_t n = strlen(flags.out);
    bool directory = n > 0 && (flags.out[n - 1] == '/' || is_directory(flags.out));
    if (n == 0 || n > 3700) { die("--out must be a directory or a prefix of file names, with at most 3700 bytes"); }
    snprintf(out.prefix, sizeof(out.prefix), "%s%s", flags.out,
             !directory                ? ""
             : flags.out[n - 1] == '/' ? "data"
                                       : "/data");
    snprintf(out.dir, sizeof(out.dir), "%s", out.prefix);
    char* slash = strrchr(out.dir, '/');
    if (!slash) {
        strcpy(out.dir, ".");
    } else {
        slash[slash == out.dir ? 1 : 0] = '\0';
    }
    out.split = flags.val_tokens > 0 ? SPLIT_VAL : SPLIT_TRAIN;
}

// Finds the token that precedes every document: the one of --eot, or else the vocabulary's own end-of-text.
static void find_eot(void) {
    char list[400];
    int id = flags.eot ? tokenizer_find(&tokenizer, flags.eot, strlen(flags.eot)) : tokenizer.eot_id;
    if (id >= 0) {
        if (flags.eot) { tokenizer_set_eot(&tokenizer, id); }
        return;
    }
    tokenizer_list_special(&tokenizer, list, sizeof(list));
    die("%s: has no token %s, which must precede documents; --eot NAME chooses another%s%s",
        flags.tokenizer ? flags.tokenizer : "the vocabulary of bytes", flags.eot ? flags.eot : TOKENIZER_EOT,
        list[0] ? ": " : "", list);
}

// True if the output directory already contains a vocabulary. Ends the program if it is not the one of --tokenizer, or
// if its end-of-text or its special tokens are others: a directory must not contain shards of two vocabularies.
static bool has_vocabulary(void) {
    char name[64], what[200];
    Error err;
    Tokenizer t;
    size_t n;
    const char* file = tokenizer_file_in(out.dir, false);
    if (!file || strstr(file, ".bin")) { return false; } // llm.c's has no merges
    if (!tokenizer_file_in(out.dir, true)) {
        die("%s/%s: describes a vocabulary that is not there; choose another --out or remove it", out.dir, file);
    }
    if (!tokenizer_load(&t, out.dir, &err)) { die("%s", err.text); }
    if (!tokenizer_same(&tokenizer, &t, what, sizeof(what))) {
        die("%s/%s: is another vocabulary than %s (%s): -t %s takes this vocabulary, another folder in -o keeps both",
            out.dir, file, flags.tokenizer ? flags.tokenizer : "the 256 bytes, the default", what, out.dir);
    }
    if (t.eot_id != tokenizer.eot_id) {
        const char* bytes = tokenizer_decode(&tokenizer, tokenizer.eot_id, &n);
        die("%s: the vocabulary there has another end-of-text than %s; choose another --out", out.dir,
            json_printable(name, sizeof(name), bytes, n));
    }
    if (t.flags_sum != tokenizer.flags_sum) {
        die("%s: the vocabulary there has the same tokens, but others are added or special: choose another --out, or "
            "-t %s",
            out.dir, out.dir);
    }
    tokenizer_free(&t);
    return true;
}

// Completes the open shard, if there is one.
static bool close_shard(Error* err) {
    if (!out.open) { return true; }
    out.open = false;
    return shard_writer_close(&out.writer, err);
}

static bool write_tokens(const uint32_t* ids, size_t n, Error* err) {
    uint16_t block[4096];
    while (n > 0) {
        if (!out.open) {
            char path[4000];
            out.made_directory |= !is_directory(out.dir);
            if (!make_directories(out.dir, err)) { return false; }
            shard_path(path, sizeof(path), out.split, out.num_shards[out.split]++, ".part");
            if (!shard_writer_open(&out.writer, path, err)) { return false; }
            out.open = true;
        }
        int64_t room = flags.shard_tokens - (int64_t)out.writer.num_tokens;
        int64_t val_room = flags.val_tokens - out.tokens[SPLIT_VAL];
        if (out.split == SPLIT_VAL && val_room < room) { room = val_room; }
        size_t count = sizeof(block) / sizeof(block[0]);
        if (count > n) { count = n; }
        if ((int64_t)count > room) { count = (size_t)room; }
        for (size_t i = 0; i < count; i++) { block[i] = (uint16_t)ids[i]; }
        shard_writer_put(&out.writer, block, count);
        out.tokens[out.split] += (int64_t)count;
        ids += count;
        n -= count;
        if ((int64_t)count == room && !close_shard(err)) { return false; }
        if (out.split == SPLIT_VAL && out.tokens[SPLIT_VAL] == flags.val_tokens) { out.split = SPLIT_TRAIN; }
    }
    return out.writer.file.failed ? error_set(err, "%s", out.writer.file.error.text) : true; // report a failure at once
}

// Removes the shards of earlier runs that have a larger number than those of this one.
static void remove_later(int split) {
    char path[4000];
    const char* name = strrchr(out.prefix, '/');
    DIR* dir = opendir(out.dir);
    name = name ? name + 1 : out.prefix;
    for (struct dirent* entry; dir && (entry = readdir(dir)) != NULL;) {
        size_t n = strlen(name), m = strlen(split_names[split]);
        const char* d = entry->d_name; // NAME_SPLIT_NUMBER.bin
        if (strncmp(d, name, n) != 0 || d[n] != '_' || strncmp(d + n + 1, split_names[split], m) != 0) { continue; }
        long number = d[n + m + 1] == '_' ? strtol(d + n + m + 2, NULL, 10) : -1;
        if (number < out.num_shards[split] || number > 999999) { continue; }
        shard_path(path, sizeof(path), split, (int)number, "");
        if (strcmp(strrchr(path, '/') ? strrchr(path, '/') + 1 : path, d) == 0) { unlink(path); }
    }
    if (dir) { closedir(dir); }
}

// Publishes the output once all shards are complete: saves the vocabulary, then renames the shards. Removes older
// shards with this prefix that were not replaced, because a pattern like NAME_train_*.bin would match them too.
static bool publish(Error* err) {
    char part[4000], path[4000];
    if (!has_vocabulary() && !tokenizer_save(&tokenizer, out.dir, err)) { return false; }
    for (int split = 0; split < 2; split++) {
        for (int i = 0; i < out.num_shards[split]; i++) {
            shard_path(part, sizeof(part), split, i, ".part");
            shard_path(path, sizeof(path), split, i, "");
            if (rename(part, path) != 0) { return error_set(err, "%s: %s", path, strerror(errno)); }
        }
        remove_later(split);
    }
    return sync_directory(out.dir, err);
}

// ---- progress -----------------------------------------------------------------------------------

static double start_ms;

static void print_progress(void) {
    static double last_ms;
    static bool tty, asked;
    double now = time_ms();
    if (!asked) {
        tty = isatty(STDERR_FILENO);
        last_ms = now;
        asked = true;
    }
    if (now - last_ms < (tty ? 100 : 5000)) { return; }
    last_ms = now;
    double seconds = (now - start_ms) / 1e3, mb = (double)out.bytes / 1e6, rate = mb / seconds;
    char line[160], bar[21];
    if (in.total_bytes > 0) {
        double done = (double)out.bytes / (double)in.total_bytes;
        int filled = done < 1 ? (int)(20 * done) : 20, eta = (int)(seconds / done - seconds + 0.5);
        for (int i = 0; i < 20; i++) { bar[i] = i < filled ? '#' : '.'; }
        bar[20] = '\0';
        snprintf(line, sizeof(line), "[%s] %5.1f%%  %.1f MB  %.1f MB/s  ETA %d:%02d", bar, 100 * done, mb, rate,
                 eta / 60, eta % 60);
    } else {
        snprintf(line, sizeof(line), "%.1f MB  %.1f MB/s  %d:%02d so far", mb, rate, (int)seconds / 60,
                 (int)seconds % 60);
    }
    fprintf(stderr, tty ? "\r%-78s" : "%s\n", line);
}

static void print_summary(void) {
    double seconds = (time_ms() - start_ms) / 1e3;
    int64_t tokens = out.tokens[SPLIT_VAL] + out.tokens[SPLIT_TRAIN];
    if (isatty(STDERR_FILENO)) { fprintf(stderr, "\r%-78s\r", ""); }
    fprintf(stderr, "%lld documents, %lld bytes, %lld tokens (%.2f bytes per token) in %.1f s, %.1f MB/s\n",
            (long long)out.documents, (long long)out.bytes, (long long)tokens, (double)out.bytes / (double)tokens,
            seconds, (double)out.bytes / 1e6 / seconds);
    if (out.bad_lines > 0) { fprintf(stderr, "%lld bad lines skipped\n", (long long)out.bad_lines); }
    text_notes_print(&out.notes, flags.input);
    if (in.plain_objects > 0) {
        print_line(stderr,
                   "note: JSON objects without \"%s\" are encoded as they are, in %lld files (%s): --field NAME "
                   "takes a member",
                   flags.field, (long long)in.plain_objects, in.plain_object);
    }
    if (in.num_raw > 0) { text_kind_print(in.raw, in.raw_path, in.num_raw); }
    tokenizer_note_spelled(&tokenizer, flags.input, out.spelled, out.spelled_id);
    for (int split = 0; split < 2; split++) {
        if (out.num_shards[split] == 0) { continue; }
        char last[32] = "";
        if (out.num_shards[split] > 1) { snprintf(last, sizeof(last), " .. %06d.bin", out.num_shards[split] - 1); }
        print_line(stderr, "%s_%s_000000.bin%s: %lld tokens", out.prefix, split_names[split], last,
                   (long long)out.tokens[split]);
    }
    print_line(stderr, "vocabulary of %d tokens: %s/vocab.json, merges.txt%s", tokenizer.vocab_size, out.dir,
               out.made_directory ? "; the directory is new" : "");
}

// ---- threads ------------------------------------------------------------------------------------

static pthread_mutex_t read_lock = PTHREAD_MUTEX_INITIALIZER, write_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn_changed = PTHREAD_COND_INITIALIZER;
static size_t turn;      // seq of the job that is written next; protected by write_lock
static bool input_ended; // protected by read_lock

// Removes all output and ends the program, without waiting for a thread that may block forever on its input. The caller
// holds write_lock.
__attribute__((noreturn)) static void fail(const Error* err) {
    if (out.open) { shard_writer_abort(&out.writer); }
    remove_parts();
    die("%s", err->text);
}

// Reads, encodes and writes chunks until there are no more.
static void* work(void* unused) {
    (void)unused;
    Job job;
    memset(&job, 0, sizeof(job));
    for (bool more = true; more;) {
        pthread_mutex_lock(&read_lock);
        more = !input_ended && read_chunk(&job);
        bool failed = !input_ended && job.error.text[0];
        input_ended = !more;
        pthread_mutex_unlock(&read_lock);
        if (!more && !failed) { break; }
        if (!failed) { encode_job(&job); }
        pthread_mutex_lock(&write_lock);
        while (turn != job.seq) { pthread_cond_wait(&turn_changed, &write_lock); }
        // jobs are handled in the order of the input, so the first error in the input is reported
        if (job.error.text[0] || !write_tokens(job.tokens.ids, job.tokens.count, &job.error)) { fail(&job.error); }
        out.documents += job.documents;
        out.bad_lines += job.bad_lines;
        text_notes_add(&out.notes, &job.notes);
        out.bytes += (int64_t)job.n;
        if (out.spelled == 0) { out.spelled_id = job.tokens.spelled_id; }
        out.spelled += job.tokens.spelled;
        turn++;
        print_progress();
        pthread_cond_broadcast(&turn_changed);
        pthread_mutex_unlock(&write_lock);
    }
    token_buffer_free(&job.tokens);
    free(job.text);
    return NULL;
}

// The signal thread. Unlike a signal handler it can take write_lock, so that no shard is written while the shards are
// removed.
static void* wait_for_signal(void* set) {
    int number;
    Error err;
    sigwait((const sigset_t*)set, &number);
    pthread_mutex_lock(&write_lock);
    error_set(&err, "interrupted, nothing was written");
    fail(&err);
}

// Makes SIGINT, SIGTERM and SIGHUP end the program cleanly, except those that were ignored when it started (nohup).
static void catch_signals(void) {
    signal(SIGXFSZ, SIG_IGN); // at the limit on file sizes a write fails, which is reported and cleaned up
    static sigset_t set;
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    sigemptyset(&set);
    for (int i = 0; i < 3; i++) {
        struct sigaction now;
        if (sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN) { sigaddset(&set, numbers[i]); }
    }
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    pthread_t thread;
    int code = pthread_create(&thread, NULL, wait_for_signal, &set);
    if (code != 0) { die("cannot start a thread: %s", strerror(code)); }
    pthread_detach(thread);
}

static void run_threads(void) {
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int n = flags.threads > 0 ? flags.threads : cpus > 0 && cpus < 64 ? (int)cpus : 64;
    pthread_t* threads = (pthread_t*)malloc_check((size_t)n * sizeof(pthread_t));
    for (int i = 0; i < n; i++) {
        int code = pthread_create(&threads[i], NULL, work, NULL);
        if (code != 0) {
            Error err;
            pthread_mutex_lock(&write_lock);
            error_set(&err, "cannot start thread %d: %s", i, strerror(code));
            fail(&err);
        }
    }
    for (int i = 0; i < n; i++) { pthread_join(threads[i], NULL); }
    free(threads);
}

static void parse_flags(int argc, char** argv) {
    const Option options[] = {
        {OPT_SECTION, 0, NULL, "Input", NULL, NULL, NULL, 0, 0},
        {OPT_STR, 'i', NULL, "input", &flags.input, "FILES",
         "files of text, JSON lines, or an array of JSON objects: names or quoted patterns, separated by commas or "
         "spaces; a comma or space within a "
         "name has a \\ before it, 'my\\ books/*.txt', unless this name is given alone; - is standard input",
         0, 0},
        {OPT_STR, 'd', NULL, "documents", &flags.documents, "auto|file|line|blank-line|jsonl",
         "how to split files into documents; auto: JSON lines and arrays, recognized by their beginning, by objects, "
         "and any "
         "other file is one document; line: blank lines are none; blank-line: a document ends with a blank line",
         0, 0},
        {OPT_STR, 0, NULL, "field", &flags.field, "NAME", "the member of a JSON object that contains the text", 0, 0},
        {OPT_BOOL, 0, NULL, "skip-bad-lines", &flags.skip_bad_lines, NULL,
         "skip and count JSON lines, or elements of an array, that cannot be read", 0, 0},
        {OPT_SECTION, 0, NULL, "Vocabulary", NULL, NULL, NULL, 0, 0},
        {OPT_STR, 't', NULL, "tokenizer", &flags.tokenizer, "PATH",
         "GPT-2 vocabulary, a directory or a file; default: the 256 bytes and <|endoftext|>", 0, 0},
        {OPT_STR, 0, NULL, "eot", &flags.eot, "NAME",
         "end-of-text, the token that precedes every document; default: the eos_token of the tokenizer_config.json "
         "beside the vocabulary, or else <|endoftext|>",
         0, 0},
        {OPT_BOOL, 0, NULL, "special", &flags.special, NULL,
         "special tokens that the text spells, such as <|endoftext|> between documents, become these tokens; off: they "
         "are ordinary text. Other added tokens of the vocabulary always are tokens",
         0, 0},
        {OPT_SECTION, 0, NULL, "Output", NULL, NULL, NULL, 0, 0},
        {OPT_STR, 'o', NULL, "out", &flags.out, "PREFIX",
         "prefix of the shards' names, PREFIX_train_000000.bin, or a directory; existing shards with this prefix are "
         "replaced",
         0, 0},
        {OPT_LONG, 'v', NULL, "val-tokens", &flags.val_tokens, "tokens", "write the first N tokens to PREFIX_val_*.bin",
         0, 1e15},
        {OPT_LONG, 's', NULL, "shard-tokens", &flags.shard_tokens, "tokens", "maximum number of tokens per shard", 1,
         2147483647},
        {OPT_SECTION, 0, NULL, "Speed", NULL, NULL, NULL, 0, 0},
        {OPT_INT, 'n', NULL, "threads", &flags.threads, "threads",
         "number of threads, which does not change the shards; 0: one per core", 0, 1024},
        {OPT_INT, 0, NULL, "chunk-bytes", &flags.chunk_bytes, "bytes", "size of the chunks that threads process", 16,
         1 << 28},
    };
    cli_parse(argc, argv, "Converts text to token shards for training, in llm.c's format.", options,
              (int)(sizeof(options) / sizeof(options[0])));
    if (!flags.input || !flags.out) {
        cli_fail("--%s is missing, see %s --help", flags.input ? "out" : "input", argv[0]);
    }
}

int main(int argc, char** argv) {
    open_standard_streams();
    parse_flags(argc, argv);
    Error err;
    if (!tokenizer_load_encoder(&tokenizer, flags.tokenizer, 65536, "shards", &err)) { die("%s", err.text); }
    find_eot();
    find_inputs();
    set_output();
    has_vocabulary();
    in.fd = -1;
    start_ms = time_ms();
    catch_signals();
    run_threads();
    pthread_mutex_lock(&write_lock); // never unlocked: a signal must not interrupt the renames
    bool ok = close_shard(&err);
    if (ok && out.tokens[SPLIT_TRAIN] == 0) {
        int64_t val = out.tokens[SPLIT_VAL];
        ok = val == 0 ? error_set(&err, "%s: contains no text", flags.input)
                      : error_set(&err, "--val-tokens %lld leaves nothing to train on: there are %lld tokens",
                                  (long long)flags.val_tokens, (long long)val);
    }
    if (!ok || !publish(&err)) { fail(&err); }
    print_summary();
    for (size_t i = 0; i < in.count; i++) { free(in.paths[i]); }
    free(in.paths);
    free(in.carry);
    tokenizer_free(&tokenizer);
    return 0;
}
