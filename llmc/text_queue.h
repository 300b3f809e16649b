/*
Many texts in few slots. A Generator of train_gpt2.cu continues B texts side by side, each in a slot of its key/value cache.
The queue says which prompts begin in which slots, and takes the tokens of every step; when a text ends, its slot is free,
and the next text of the queue begins in it.

    text_queue_open(&q, B);
    for (;;) {
        while (text_queue_pass(&q, &sampler, V, &pass)) { ... run the pass: it gives a first token in each of its slots ... }
        if (q.active == 0) { break; }
        if (text_queue_goes_on(&q)) { ... the next step, for each slot b but those with text_queue_is_last(&q, b) ... }
        for each slot b: if (text_queue_take(&q, b, token[b])) { ... its text has ended ... }
    }
    text_queue_close(&q);
*/
#ifndef LLMC_TEXT_QUEUE_H
#define LLMC_TEXT_QUEUE_H

#include "prompts.h"
#include "sampler.h"
#include "text_output.h"
#include "utils.h"

enum {
    PROMPT_PASS_TOKENS = 1 << 16, // in one pass over several prompts; a longer prompt has a pass of its own
    PROMPT_PASS_STEP = 64,        // later prompts are padded to a multiple, so that few shapes of matmuls occur
};

typedef struct {
    // what to do, see text_queue_of()
    const int* prompts; // (N, T)
    const int* lengths; // (N): number of tokens, at least 1
    int N, T;
    int num_tokens;     // a text ends after this many new tokens,
    int stop;           // before this token (-1: none),
    int max_positions;  // with the token that the last position of the model predicts,
    Continuations* out; // or before a stop string, if this is not NULL
    int* new_tokens;    // (N, num_tokens), or NULL
    int* counts;        // (N): number of new tokens
    // where it is
    int B;
    int* slot;   // (B): the text in each slot; -1: none
    int next;    // the first text that has not begun
    int active;  // number of texts that have begun and not ended
    bool failed; // some logits were not numbers
} TextQueue;

// A pass over the prompts of n texts, which begin in slots slot to slot + n - 1. Each is padded to T tokens; the padding at
// the end can be any token, because causal attention never looks at later positions.
typedef struct {
    int slot, n, T;
    int* inputs;    // (n, T)
    int* last;      // (n): the position of the prompt's last token
    int* newest;    // (n): that token
    uint64_t* rng;  // (n): the random state of the text
    uint32_t* seen; // (n, seen_words(V)): the tokens of the prompt
} PromptPass;

// The number of positions that a slot needs.
static inline int text_queue_capacity(const TextQueue* q) {
    return q->num_tokens < q->max_positions - q->T ? q->T + q->num_tokens : q->max_positions;
}

// The length of a pass over prompts of up to T tokens. The first pass is as long as they are.
static inline int text_queue_pass_length(const TextQueue* q, int T, bool first) {
    int padded = (T + PROMPT_PASS_STEP - 1) / PROMPT_PASS_STEP * PROMPT_PASS_STEP, capacity = text_queue_capacity(q);
    return first ? T : padded < capacity ? padded : capacity;
}

// The most tokens in a pass with B slots, padding included.
static inline int text_queue_pass_tokens(const TextQueue* q, int B) {
    int longest = text_queue_pass_length(q, q->T, false);
    int several = (size_t)B * q->T < PROMPT_PASS_TOKENS ? B * q->T : PROMPT_PASS_TOKENS;
    return longest > several ? longest : several;
}

// counts (N) receives the number of new tokens of each text. new_tokens and out may be NULL.
static inline TextQueue text_queue_of(const int* prompts, const int* lengths, int N, int T, int num_tokens, int stop,
                                      int max_positions, Continuations* out, int* new_tokens, int* counts) {
    TextQueue q = {prompts,    lengths, N, T,    num_tokens, stop, max_positions, out,
                   new_tokens, counts,  0, NULL, 0,          0,    false};
    memset(counts, 0, (size_t)N * sizeof(int));
    return q;
}

static inline void text_queue_open(TextQueue* q, int B) {
    q->B = B;
    q->slot = (int*)malloc_check((size_t)B * sizeof(int));
    for (int b = 0; b < B; b++) { q->slot[b] = -1; }
}

static inline void text_queue_close(TextQueue* q) { free(q->slot); }

// Lets the next texts begin in the first free slots, as many as lie side by side and fit in one pass. Returns false if no
// slot is free or no text is waiting; then there is nothing to free.
static inline bool text_queue_pass(TextQueue* q, const Sampler* sampler, int vocab_size, PromptPass* p) {
    size_t words = seen_words(vocab_size), most = (size_t)text_queue_pass_tokens(q, q->B);
    memset(p, 0, sizeof(*p));
    while (p->slot < q->B && q->slot[p->slot] >= 0) { p->slot++; }
    for (int b = p->slot; b < q->B && q->slot[b] < 0 && q->next + p->n < q->N; b++) {
        int length = q->lengths[q->next + p->n];
        int T = text_queue_pass_length(q, length > p->T ? length : p->T, q->next == 0);
        if (p->n > 0 && (size_t)(p->n + 1) * T > most) { break; }
        p->T = T, p->n++;
    }
    if (p->n == 0) { return false; }
    size_t n = (size_t)p->n;
    p->inputs = (int*)calloc_check(n * p->T, sizeof(int));
    p->last = (int*)malloc_check(n * sizeof(int));
    p->newest = (int*)malloc_check(n * sizeof(int));
    p->rng = (uint64_t*)malloc_check(n * sizeof(uint64_t));
    p->seen = (uint32_t*)calloc_check(n * words, sizeof(uint32_t));
    for (size_t i = 0; i < n; i++) {
        int text = q->next++, length = q->lengths[text];
        const int* prompt = q->prompts + (size_t)text * q->T;
        memcpy(p->inputs + i * p->T, prompt, (size_t)length * sizeof(int));
        for (int t = 0; t < length; t++) { seen_add(p->seen + i * words, prompt[t]); }
        p->last[i] = length - 1, p->newest[i] = prompt[length - 1], p->rng[i] = prompts_rng(sampler, text);
        q->slot[p->slot + (int)i] = text;
        q->active++;
    }
    return true;
}

static inline void prompt_pass_free(PromptPass* p) {
    free(p->inputs), free(p->last), free(p->newest), free(p->rng), free(p->seen);
}

// Whether slot b has a text, and the next token that it takes is the last one that there is room for.
static inline bool text_queue_is_last(const TextQueue* q, int b) {
    int text = q->slot[b];
    if (text < 0) { return false; }
    int room = q->max_positions - q->lengths[text] + 1;
    return q->counts[text] + 1 == (q->num_tokens < room ? q->num_tokens : room);
}

// Whether a text has room for more than its next token.
static inline bool text_queue_goes_on(const TextQueue* q) {
    for (int b = 0; b < q->B; b++) {
        if (q->slot[b] >= 0 && !text_queue_is_last(q, b)) { return true; }
    }
    return false;
}

// Takes the next token of slot b, if it has a text; -1: the logits were not numbers. Returns true if the text has ended: the
// slot is then free.
static inline bool text_queue_take(TextQueue* q, int b, int token) {
    int text = q->slot[b];
    if (text < 0) { return false; }
    bool done = text_queue_is_last(q, b) || token < 0 || token == q->stop;
    q->failed |= token < 0;
    if (token >= 0 && token != q->stop) {
        if (q->new_tokens) { q->new_tokens[(size_t)text * q->num_tokens + q->counts[text]] = token; }
        q->counts[text]++;
        if (q->out && text_token(&q->out->texts[text], token)) { done = true; }
    }
    if (!done) { return false; }
    q->slot[b] = -1, q->active--;
    if (q->out) { continuations_end(q->out, text); }
    return true;
}

#endif
