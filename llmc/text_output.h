/*
Prints generated text token by token, in complete UTF-8 characters. Control characters are masked on a terminal, so that
generated text cannot control it.
*/
#ifndef LLMC_TEXT_OUTPUT_H
#define LLMC_TEXT_OUTPUT_H

#include "tokenizer.h"
#include "utils.h"

// The text that is being printed. Without a vocabulary, token ids are printed instead.
typedef struct {
    const Tokenizer* tokenizer; // NULL if there is no vocabulary
    FILE* file;
    Utf8Stream utf8;
    char* text; // (length) all bytes so far, for the log
    size_t length;
    bool terminal; // file is a terminal: print control characters as '?'
} TextOutput;

// Prints a prompt (n bytes) in front of its continuation.
static inline void text_prompt(const char* prompt, size_t n, FILE* file) {
    char* shown = (char*)memcpy(malloc_check(n), prompt, n);
    fwrite(shown, 1, isatty(fileno(file)) ? mask_controls(shown, n, true) : n, file);
    fflush(file);
    free(shown);
}

// Begins a text; tokenizer may be NULL. The caller frees the text member of the result.
static inline TextOutput text_begin(const Tokenizer* tokenizer, FILE* file) {
    TextOutput out = {tokenizer, file, {{0}, 0}, NULL, 0, isatty(fileno(file)) != 0};
    return out;
}

static inline void text_bytes(TextOutput* out, const char* bytes, size_t n) {
    out->text = (char*)realloc_check(out->text, out->length + n + 1);
    memcpy(out->text + out->length, bytes, n);
    out->length += n;
    char* shown = (char*)memcpy(malloc_check(n), bytes, n);
    fwrite(shown, 1, out->terminal ? mask_controls(shown, n, true) : n, out->file);
    fflush(out->file);
    free(shown);
}

static inline void text_token(TextOutput* out, int token) {
    size_t n = 0;
    const char* bytes = out->tokenizer ? tokenizer_decode(out->tokenizer, token, &n) : NULL;
    if (!bytes) { // no vocabulary, or an id outside of it
        char number[16];
        text_bytes(out, number, (size_t)snprintf(number, sizeof(number), "%d ", token));
        return;
    }
    char* whole = (char*)malloc_check(3 * (n + 3));
    text_bytes(out, whole, utf8_stream_push(&out->utf8, bytes, n, whole));
    free(whole);
}

static inline void text_end(TextOutput* out) {
    char rest[3];
    text_bytes(out, rest, utf8_stream_flush(&out->utf8, rest));
    text_bytes(out, "\n", 1);
}

#endif
