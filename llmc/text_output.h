/*
Prints generated text token by token, in complete UTF-8 characters, and ends it before a stop string. Control characters
are masked on a terminal, so that generated text cannot control it.
*/
#ifndef LLMC_TEXT_OUTPUT_H
#define LLMC_TEXT_OUTPUT_H

#include "tokenizer.h"
#include "utils.h"

// The text that is being printed. Without a vocabulary, token ids are printed instead.
typedef struct {
    const Tokenizer* tokenizer; // NULL if there is no vocabulary
    FILE* file;                 // NULL: the text is only kept, until text_show()
    Utf8Stream utf8;
    char* text; // (length) all bytes so far, for the log
    size_t length;
    const char* const* stops; // (num_stops): the text ends before the first of these strings
    int num_stops;
    char* held; // (num_held) the newest bytes: a stop string may begin with them, so they are not printed yet
    size_t num_held;
    bool terminal; // file is a terminal: print control characters as '?'
} TextOutput;

// Prints a prompt (n bytes) in front of its continuation.
static inline void text_prompt(const char* prompt, size_t n, FILE* file) {
    char* shown = (char*)memcpy(malloc_check(n), prompt, n);
    fwrite(shown, 1, isatty(fileno(file)) ? mask_controls(shown, n, true) : n, file);
    fflush(file);
    free(shown);
}

// Begins a text; tokenizer and file may be NULL. The caller frees the text member of the result.
static inline TextOutput text_begin(const Tokenizer* tokenizer, FILE* file) {
    TextOutput out;
    memset(&out, 0, sizeof(out));
    out.tokenizer = tokenizer;
    out.file = file;
    out.terminal = file && isatty(fileno(file));
    return out;
}

static inline void text_print(const TextOutput* out, const char* bytes, size_t n) {
    char* shown = (char*)memcpy(malloc_check(n), bytes, n);
    fwrite(shown, 1, out->terminal ? mask_controls(shown, n, true) : n, out->file);
    fflush(out->file);
    free(shown);
}

// Prints what a text without a file has so far; from now on, it is printed as it is generated.
static inline void text_show(TextOutput* out, FILE* file) {
    out->file = file;
    out->terminal = isatty(fileno(file)) != 0;
    if (out->length > 0) { text_print(out, out->text, out->length); }
}

static inline void text_bytes(TextOutput* out, const char* bytes, size_t n) {
    out->text = (char*)realloc_check(out->text, out->length + n + 1);
    memcpy(out->text + out->length, bytes, n);
    out->length += n;
    if (out->file) { text_print(out, bytes, n); }
}

// Adds any bytes, as complete UTF-8 characters.
static inline void text_utf8(TextOutput* out, const char* bytes, size_t n) {
    char* whole = (char*)malloc_check(3 * (n + 3));
    text_bytes(out, whole, utf8_stream_push(&out->utf8, bytes, n, whole));
    free(whole);
}

// Looks for the stop strings in the held bytes. Returns true if one is complete. *end: where the first one begins; if none
// is complete, where one may begin, which the next bytes decide.
static inline bool text_find_stop(const TextOutput* out, size_t* end) {
    *end = out->num_held;
    for (size_t at = 0; at < out->num_held; at++) {
        for (int i = 0; i < out->num_stops; i++) {
            size_t n = strlen(out->stops[i]), rest = out->num_held - at;
            if (memcmp(out->held + at, out->stops[i], n < rest ? n : rest) != 0) { continue; }
            if (n <= rest) {
                *end = at;
                return true;
            }
            if (at < *end) { *end = at; }
        }
    }
    return false;
}

// Adds a token. Returns true if the text now has a stop string: it ends before it, and no token may follow.
static inline bool text_token(TextOutput* out, int token) {
    size_t n = 0, end;
    const char* bytes = out->tokenizer ? tokenizer_decode(out->tokenizer, token, &n) : NULL;
    if (!bytes) { // no vocabulary, or an id outside of it
        char number[16];
        text_bytes(out, number, (size_t)snprintf(number, sizeof(number), "%d ", token));
        return false;
    }
    out->held = (char*)realloc_check(out->held, out->num_held + n + 1);
    memcpy(out->held + out->num_held, bytes, n);
    out->num_held += n;
    bool stop = text_find_stop(out, &end);
    text_utf8(out, out->held, end);
    memmove(out->held, out->held + end, out->num_held - end);
    out->num_held = stop ? 0 : out->num_held - end;
    return stop;
}

static inline void text_end(TextOutput* out) {
    char rest[3];
    text_utf8(out, out->held, out->num_held);
    text_bytes(out, rest, utf8_stream_flush(&out->utf8, rest));
    text_bytes(out, "\n", 1);
    free(out->held);
    out->held = NULL, out->num_held = 0;
}

#endif
