// Vocabularies from texts in memory, for the unit test and the fuzz target of llmc/tokenizer.h.
#ifndef DEV_TEST_VOCABULARY_TEXTS_H
#define DEV_TEST_VOCABULARY_TEXTS_H

#include "../../llmc/tokenizer.h"

// Parses the texts of files, as tokenizer_load() does.
static inline bool parse_vocab(Tokenizer* t, TokenizerText vocab, TokenizerText merges, TokenizerText added,
                               Error* err) {
    const TokenizerText files[TOKENIZER_NUM_TEXTS] = {
        [TOKENIZER_VOCAB] = vocab, [TOKENIZER_MERGES] = merges, [TOKENIZER_ADDED] = added};
    return tokenizer_parse(t, files, err);
}

static inline bool parse_merges(Tokenizer* t, TokenizerText merges, Error* err) {
    const TokenizerText files[TOKENIZER_NUM_TEXTS] = {[TOKENIZER_MERGES] = merges};
    return tokenizer_parse(t, files, err);
}

static inline bool parse_json(Tokenizer* t, TokenizerText json, Error* err) {
    const TokenizerText files[TOKENIZER_NUM_TEXTS] = {[TOKENIZER_JSON] = json};
    return tokenizer_parse(t, files, err);
}

#endif
