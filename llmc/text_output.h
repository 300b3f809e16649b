/*
Prints generated text as it comes, in whole UTF-8 characters, without letting a model's bytes command the terminal.
*/
#ifndef LLMC_TEXT_OUTPUT_H
#define LLMC_TEXT_OUTPUT_H

#include "tokenizer.h"
#include "utils.h"

// Prints text as it comes, in whole characters; token ids when there is no vocabulary.
typedef struct {
    const Tokenizer* tokenizer; // or NULL
    FILE* file;
    Utf8Stream utf8;
    char* text; // all bytes so far, for the log
    size_t length;
    bool terminal; // control characters are shown as '?'
} TextOutput;

// A text that begins; tokenizer may be NULL. out.text is the caller's to free.
static inline TextOutput text_begin(const Tokenizer* tokenizer, FILE* file) {
    TextOutput out = {tokenizer, file, {{0}, 0}, NULL, 0, isatty(fileno(file)) != 0};
    return out;
}

static inline void text_bytes(TextOutput* out, const char* bytes, size_t n) {
    out->text = (char*)realloc_check(out->text, out->length + n + 1);
    memcpy(out->text + out->length, bytes, n);
    out->length += n;
    for (size_t i = 0; i < n; i++) { // what a model says must not command the terminal
        bool control = ((uint8_t)bytes[i] < 0x20 && bytes[i] != '\n' && bytes[i] != '\t') || bytes[i] == 0x7F;
        fputc(out->terminal && control ? '?' : bytes[i], out->file);
    }
    fflush(out->file);
}

static inline void text_token(TextOutput* out, int token) {
    size_t n = 0;
    const char* bytes = out->tokenizer ? tokenizer_decode(out->tokenizer, token, &n) : NULL;
    if (!bytes) { // no vocabulary, or an id that it does not know
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
