/*
The prompts that the flags name (--prompt, --prompt-file, --prompts, --prompt-ids), as tokens, how the flags want them
continued, and the output of the continuations in the order of the prompts. Shared by train_gpt2.c and train_gpt2.cu.
*/
#ifndef LLMC_PROMPTS_H
#define LLMC_PROMPTS_H

#include "flags.h"
#include "gpt2.h"
#include "model_source.h"
#include "rand.h"
#include "sampler.h"
#include "text_input.h"
#include "text_output.h"
#include "tokenizer.h"
#include "utils.h"

enum { PROMPTS_MAX = 1 << 16, PROMPT_MAX_BYTES = 1 << 28 };

// The texts to continue.
typedef struct {
    int B;         // number of texts
    int T;         // number of tokens of the longest prompt
    char** texts;  // (B): what is printed before the continuation
    size_t* bytes; // (B): length of the text
    int* lengths;  // (B): number of tokens of the prompt, at least 1
    int* tokens;   // (B, T), padded with 0
    int stop;      // the token that ends a text; -1: none
} Prompts;

// The times of a generation. Both programs' generate() adds to them.
typedef struct {
    double prefill_ms; // from the prompt to the first new token
    double decode_ms;  // from there to the last one
    int steps;         // passes of the model in decode_ms
    int at_once; // texts side by side, if others began when these had ended: decode_ms has their prompts, too; otherwise 0
} GenerationTimes;

// How the flags want tokens to be drawn.
static inline Sampler flags_sampler(void) {
    Error err;
    Sampler s = sampler_make(args->temperature, args->top_k, args->top_p, splitmix64((uint64_t)run_seed()));
    s.min_p = args->min_p, s.repetition_penalty = args->repetition_penalty;
    if (!sampler_check(&s, &err)) { die("%s", err.text); }
    return s;
}

// The random state of text b: a stream of its own for each text. The first text is the same whatever the number of texts.
static inline uint64_t prompts_rng(const Sampler* sampler, int b) {
    return b == 0 ? sampler->rng : splitmix64(sampler->rng + (uint64_t)b);
}

// ---- reading --------------------------------------------------------------------------

// Ends the program if a prompt or a list of prompts (n bytes) is not text, and drops its byte order mark.
static inline void prompt_begin(const char* flag, const char* path, char* text, size_t* n) {
    Error err;
    size_t mark;
    TextNotes notes;
    memset(&notes, 0, sizeof(notes));
    if (!text_check(text, *n, path, " > TEXT", &mark, &err)) { die("%s %s", flag, err.text); }
    *n -= mark;
    memmove(text, text + mark, *n);
    text_count_odd(&notes, text, *n);
    text_notes_print(&notes, path);
}

// Reads a whole file, or standard input if path is "-", without a byte order mark. The caller frees *text.
static inline void read_text(const char* flag, const char* path, char** text, size_t* n) {
    bool standard = strcmp(path, "-") == 0;
    int fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    size_t capacity = 1 << 16;
    if (fd < 0) { die("%s %s: %s", flag, path, strerror(errno)); }
    if (!standard && (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))) { die("%s %s: not a file", flag, path); }
    *n = 0;
    *text = (char*)malloc_check(capacity);
    for (;;) {
        ssize_t got = read(fd, *text + *n, capacity - *n);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { die("%s %s: %s", flag, path, strerror(errno)); }
        if (got == 0) { break; }
        *n += (size_t)got;
        if (*n > PROMPT_MAX_BYTES) { die("%s %s: more than 256 MiB", flag, path); }
        if (*n == capacity) { *text = (char*)realloc_check(*text, capacity *= 2); }
    }
    if (!standard) { close(fd); }
    prompt_begin(flag, path, *text, n);
}

// Appends a text, of which the Prompts takes possession.
static inline void prompts_add(Prompts* p, char* text, size_t n) {
    p->texts = (char**)realloc_check(p->texts, (size_t)(p->B + 1) * sizeof(char*));
    p->bytes = (size_t*)realloc_check(p->bytes, (size_t)(p->B + 1) * sizeof(size_t));
    p->texts[p->B] = text;
    p->bytes[p->B++] = n;
}

static inline char* copy_text(const char* text, size_t n) { return (char*)memcpy(malloc_check(n), text, n); }

// Adds each line of --prompts.
static inline void prompts_add_lines(Prompts* p, const char* path) {
    char* text;
    size_t n;
    read_text("--prompts", path, &text, &n);
    TextLines lines = {text, n, 0, 0};
    const char* s;
    char names[240];
    if (text_format(text, n, true, "prompt", names, sizeof(names)) != TEXT_PLAIN || names[0]) {
        print_line(
            stderr,
            "note: --prompts %s: is JSON, whose lines are continued as they are: jq -r .prompt %s makes prompts of "
            "the members \"prompt\"",
            path, path);
    }
    for (size_t length; text_next_line(&lines, &s, &length);) {
        if (text_is_blank(s, length)) { length = 0; }
        if (lines.line <= PROMPTS_MAX) { prompts_add(p, copy_text(s, length), length); }
    }
    if (lines.line == 0 || lines.line > PROMPTS_MAX) {
        die("--prompts %s: has %zu lines, want 1 to %d", path, lines.line, (int)PROMPTS_MAX);
    }
    free(text);
}

// Parses the token ids of --prompt-ids, separated by spaces or commas, and appends them to `tokens`.
static inline void parse_prompt_ids(const char* text, int vocab_size, TokenBuffer* tokens) {
    const char* separators = " ,\t\r\n";
    for (const char* s = text + strspn(text, separators); *s; s += strspn(s, separators)) {
        size_t digits = strspn(s, "0123456789"), length = strcspn(s, separators);
        long id = digits == length && digits < 10 ? strtol(s, NULL, 10) : -1;
        if (id < 0 || id >= vocab_size) {
            die("--prompt-ids: '%.*s' is not a token id, want 0 to %d", length < 40 ? (int)length : 40, s,
                vocab_size - 1);
        }
        token_buffer_reserve(tokens, 1);
        tokens->ids[tokens->count++] = (uint32_t)id;
        s += length;
    }
    if (tokens->count == 0) { die("--prompt-ids: no token ids in it"); }
}

// Decodes tokens to the text that is printed for --prompt-ids: without a vocabulary, the ids themselves.
static inline void prompts_add_ids(Prompts* p, const TokenBuffer* tokens, const Tokenizer* tokenizer) {
    char *text = NULL, number[16];
    size_t used = 0;
    for (size_t i = 0; i < tokens->count; i++) {
        size_t n = 0;
        const char* bytes = tokenizer ? tokenizer_decode(tokenizer, (int)tokens->ids[i], &n) : NULL;
        if (!bytes) { bytes = number, n = (size_t)snprintf(number, sizeof(number), "%u ", tokens->ids[i]); }
        text = (char*)realloc_check(text, used + n);
        memcpy(text + used, bytes, n);
        used += n;
    }
    prompts_add(p, text, used);
}

// Ends the program if a prompt cannot be encoded with this vocabulary, or with none.
static inline void prompt_check_vocabulary(const Tokenizer* tokenizer) {
    if (!tokenizer) {
        die("no vocabulary found beside %s: give one with --tokenizer, or token ids with --prompt-ids", args->model);
    }
    if (!tokenizer->can_encode) {
        die("this vocabulary has no merges, so it cannot read a prompt: give vocab.json and merges.txt with "
            "--tokenizer");
    }
}

// Encodes text b. An empty one becomes the token `start`, which begins a new document.
static inline void encode_prompt(const Prompts* p, int b, const Tokenizer* tokenizer, int start, TokenBuffer* out) {
    out->count = 0;
    if (p->bytes[b] > 0) {
        prompt_check_vocabulary(tokenizer);
        tokenizer_encode_text(tokenizer, p->texts[b], p->bytes[b], args->special, out);
    }
    if (out->count == 0) {
        token_buffer_reserve(out, 1);
        out->ids[out->count++] = (uint32_t)start;
    }
}

// Adds the prompts' texts, or the ids of --prompt-ids, which also go to `tokens`.
static inline void prompts_add_given(Prompts* p, TokenBuffer* tokens, const Tokenizer* tokenizer,
                                     const GPT2Config* config) {
    char* text = NULL;
    size_t n = 0;
    if (args->prompt_ids) {
        parse_prompt_ids(args->prompt_ids, config->vocab_size, tokens);
        prompts_add_ids(p, tokens, tokenizer);
    } else if (args->prompts) {
        if (args->num_samples > 1) {
            die("--num-samples is for one prompt, --prompts has its own lines: give one of them");
        }
        prompts_add_lines(p, args->prompts);
    } else if (args->prompt_file || strcmp(args->prompt, "-") == 0) {
        read_text(args->prompt_file ? "--prompt-file" : "--prompt", args->prompt_file ? args->prompt_file : "-", &text,
                  &n);
        if (n > 0 && text[n - 1] == '\n') { n--; } // the last line break is not part of the prompt
        if (n > 0 && text[n - 1] == '\r') { n--; }
        prompts_add(p, text, n);
    } else {
        n = strlen(args->prompt);
        size_t mark = text_mark(args->prompt, n);
        TextNotes notes;
        memset(&notes, 0, sizeof(notes));
        text_count_odd(&notes, args->prompt, n);
        text_notes_print(&notes, "--prompt");
        prompts_add(p, strdup_check(args->prompt + mark), n - mark);
    }
    for (int i = 1; !args->prompts && i < args->num_samples; i++) {
        prompts_add(p, copy_text(p->texts[0], p->bytes[0]), p->bytes[0]);
    }
}

// Notes prompts that end in a blank: most words of a vocabulary with merges begin with theirs, so that few can follow it.
static inline void prompts_note_blanks(const Prompts* p) {
    int blanks = 0;
    for (int b = 0; b < p->B; b++) { blanks += p->bytes[b] > 0 && p->texts[b][p->bytes[b] - 1] == ' '; }
    if (blanks == 0) { return; }
    print_line(stderr, "note: %d of %d prompts end in a blank, but the tokens of words begin with theirs: leave it out",
               blanks, p->B);
}

// Reads the prompts that the flags name. tokenizer may be NULL. Ends the program with a message if a prompt cannot be
// encoded or has more tokens than the model has positions. The caller frees the result with prompts_free().
static inline void prompts_read(Prompts* p, const Tokenizer* tokenizer, const ModelSource* source) {
    const GPT2Config* config = &source->config;
    int given =
        (args->prompt != NULL) + (args->prompt_file != NULL) + (args->prompts != NULL) + (args->prompt_ids != NULL);
    TokenBuffer tokens;
    memset(p, 0, sizeof(*p));
    memset(&tokens, 0, sizeof(tokens));
    if (given > 1) { die("give only one of --prompt, --prompt-file, --prompts and --prompt-ids"); }
    if (args->stops.n > 0 && !tokenizer) {
        die("--stop: no vocabulary found beside %s, so there is no text to look in: give one with --tokenizer",
            args->model);
    }
    p->stop = args->stop_at_eot ? model_eot(source, tokenizer) : -1;
    prompts_add_given(p, &tokens, tokenizer, config);
    p->lengths = (int*)malloc_check((size_t)p->B * sizeof(int));
    int** ids = (int**)calloc_check((size_t)p->B, sizeof(int*));
    for (int b = 0; b < p->B; b++) {
        if (!args->prompt_ids && (args->prompts || b == 0)) { // the others have the tokens of the first
            encode_prompt(p, b, tokenizer, model_start(source, tokenizer), &tokens);
        }
        if (tokens.count > (size_t)config->max_seq_len) {
            char which[32] = "";
            if (args->prompts) { snprintf(which, sizeof(which), " in line %d", b + 1); }
            die("the prompt%s has %zu tokens, but the model has only %d positions: shorten it", which, tokens.count,
                config->max_seq_len);
        }
        p->lengths[b] = (int)tokens.count;
        p->T = p->lengths[b] > p->T ? p->lengths[b] : p->T;
        ids[b] = (int*)malloc_check(tokens.count * sizeof(int));
        for (size_t i = 0; i < tokens.count; i++) { ids[b][i] = (int)tokens.ids[i]; }
    }
    p->tokens = (int*)calloc_check((size_t)p->B * (size_t)p->T, sizeof(int));
    for (int b = 0; b < p->B; b++) {
        memcpy(p->tokens + (size_t)b * (size_t)p->T, ids[b], (size_t)p->lengths[b] * sizeof(int));
        free(ids[b]);
    }
    free(ids);
    if (tokenizer) { tokenizer_note_spelled(tokenizer, "the prompt", tokens.spelled, tokens.spelled_id); }
    if (tokenizer && tokenizer->num_merges > 0 && !args->prompt_ids) { prompts_note_blanks(p); }
    token_buffer_free(&tokens);
}

static inline void prompts_free(Prompts* p) {
    for (int b = 0; b < p->B; b++) { free(p->texts[b]); }
    free(p->texts);
    free(p->bytes);
    free(p->lengths);
    free(p->tokens);
    memset(p, 0, sizeof(*p));
}

// ---- printing -------------------------------------------------------------------------

// Prints what precedes the continuation of text b: a line with its number, if there are several, and the prompt.
static inline void prompts_print(const Prompts* p, int b, FILE* f) {
    if (p->B > 1) { fprintf(f, "---- %d of %d ----\n", b + 1, p->B); }
    text_prompt(p->texts[b], p->bytes[b], f);
}

// The continuations of the prompts. They are printed in the order of the prompts: the first that is not complete while it
// is generated, and each other one as soon as all before it are complete.
typedef struct {
    const Prompts* prompts;
    TextOutput* texts; // (B)
    int* counts;       // (B): number of new tokens
    bool* complete;    // (B)
    FILE* file;
    int shown;                    // the text that is being printed; all before it are complete
    int num_complete;             // texts
    long num_tokens;              // new tokens of the complete texts
    double begin_ms, progress_ms; // when it began, and when the progress was printed last
} Continuations;

static inline void continuations_show(Continuations* c) {
    prompts_print(c->prompts, c->shown, c->file);
    text_show(&c->texts[c->shown], c->file);
}

// tokenizer may be NULL.
static inline Continuations continuations_begin(const Prompts* p, const Tokenizer* tokenizer, FILE* file) {
    Continuations c;
    memset(&c, 0, sizeof(c));
    c.prompts = p, c.file = file;
    c.texts = (TextOutput*)malloc_check((size_t)p->B * sizeof(TextOutput));
    c.counts = (int*)calloc_check((size_t)p->B, sizeof(int));
    c.complete = (bool*)calloc_check((size_t)p->B, sizeof(bool));
    c.begin_ms = c.progress_ms = time_ms();
    for (int b = 0; b < p->B; b++) {
        c.texts[b] = text_begin(tokenizer, NULL);
        c.texts[b].stops = args->stops.items, c.texts[b].num_stops = args->stops.n;
    }
    continuations_show(&c);
    return c;
}

// Prints the progress to stderr, at most every LLMC_PROGRESS_SECONDS, and not between the texts on a terminal.
static inline void continuations_progress(Continuations* c) {
    const char* setting = getenv("LLMC_PROGRESS_SECONDS"); // for tests
    double now = time_ms(), seconds = (now - c->begin_ms) * 1e-3;
    int B = c->prompts->B;
    char left[32];
    if (now - c->progress_ms < 1e3 * (setting ? atof(setting) : 5.0) || c->num_complete == B ||
        isatty(fileno(c->file))) {
        return;
    }
    c->progress_ms = now;
    format_duration(left, sizeof(left), seconds * (B - c->num_complete) / c->num_complete);
    fprintf(stderr, "[%d of %d texts, %ld tokens, %.0f tok/s, ETA %s]\n", c->num_complete, B, c->num_tokens,
            (double)c->num_tokens / seconds, left);
}

// Text b is complete: its counts are final.
static inline void continuations_end(Continuations* c, int b) {
    text_end(&c->texts[b]);
    c->complete[b] = true;
    c->num_complete++;
    c->num_tokens += c->counts[b];
    while (c->shown < c->prompts->B && c->complete[c->shown]) {
        if (ferror(c->file)) { die("cannot write the text to stdout: %s", strerror(errno)); }
        free(c->texts[c->shown].text);
        c->texts[c->shown].text = NULL;
        if (++c->shown < c->prompts->B) { continuations_show(c); }
    }
    continuations_progress(c);
}

static inline void continuations_free(Continuations* c) {
    for (int b = c->shown; b < c->prompts->B; b++) { free(c->texts[b].text); }
    free(c->texts);
    free(c->counts);
    free(c->complete);
    memset(c, 0, sizeof(*c));
}

// Prints the times of generation to stderr. counts (B): number of new tokens of each text.
static inline void prompts_print_times(const Prompts* p, const int* counts, int max_seq_len, double load_ms,
                                       const GenerationTimes* times) {
    int longest = 0;
    long made = 0, later = 0, prompt_tokens = 0;
    for (int b = 0; b < p->B; b++) {
        made += counts[b];
        later += counts[b] > 1 ? counts[b] - 1 : 0;
        prompt_tokens += p->lengths[b];
        longest = p->lengths[b] + counts[b] > longest ? p->lengths[b] + counts[b] : longest;
    }
    double all_ms = times->prefill_ms + times->decode_ms;
    if (times->at_once > 0) {
        fprintf(stderr,
                "[loaded in %.0f ms; %d texts side by side; prompts: %ld tokens, generated: %ld tokens, in %.0f ms, "
                "%.1f tok/s",
                load_ms, times->at_once, prompt_tokens, made, all_ms, (double)made / all_ms * 1e3);
    } else {
        fprintf(stderr, "[loaded in %.0f ms; prompt: %ld tokens in %.0f ms; generated: %ld tokens", load_ms,
                prompt_tokens, times->prefill_ms, made);
    }
    if (times->steps > 0 && times->at_once == 0) {
        fprintf(stderr, ", %.1f us a step, %.1f tok/s", times->decode_ms / times->steps * 1e3,
                (double)later / times->decode_ms * 1e3);
    }
    fprintf(stderr, "]\n");
    if (args->seed < 0) { fprintf(stderr, "[--seed %lld gives this text again]\n", (long long)run_seed()); }
    if (longest > max_seq_len) { fprintf(stderr, "[stopped: all %d positions of the model are used]\n", max_seq_len); }
}

#endif
