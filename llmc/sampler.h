/*
Chooses the next token from the logits of a position: greedily, or drawn at random. Repetition penalty, temperature, top-k,
top-p and min-p are applied in this order, as in Hugging Face's generate(). Top-p adds up the probabilities of the tokens
that top-k has left. Min-p compares a token with the most likely one, which neither top-k nor top-p removes, so it could
stand before them as well, but for the sum that top-p takes.

Sources: Keskar et al. 2019, arXiv:1909.05858 (repetition penalty); Fan, Lewis and Dauphin 2018, arXiv:1805.04833 (top-k);
Holtzman et al. 2019, arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p); Hoare 1961 (selection by
partition).
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>

#include "rand.h"
#include "utils.h"

typedef struct {
    float temperature;        // 0: greedy, take the largest logit
    int top_k;                // draw from the k largest logits; 0: from all
    float top_p;              // draw from the fewest tokens whose probabilities add up to this; 1: from all
    float min_p;              // draw only from tokens at least this times as likely as the most likely one; 0: from all
    float repetition_penalty; // for logits of tokens that the text has already, see sampler_penalize(); 1: none
    uint64_t rng;             // state of the generator, advances with every draw; checkpoints save it
} Sampler;

static inline Sampler sampler_make(float temperature, int top_k, float top_p, uint64_t rng) {
    Sampler s = {temperature, top_k, top_p, 0.0f, 1.0f, rng};
    return s;
}

static inline bool sampler_check(const Sampler* s, Error* err) {
    if (!(s->temperature >= 0.0f) || isinf(s->temperature)) {
        return error_set(err, "temperature %g: want 0 (greedy) or more, usually 0.7 to 1", s->temperature);
    }
    if (s->top_k < 0) { return error_set(err, "top-k %d: want 0 (off) or more", s->top_k); }
    if (!(s->top_p > 0.0f && s->top_p <= 1.0f)) {
        return error_set(err, "top-p %g: want more than 0 and at most 1 (off)", s->top_p);
    }
    if (!(s->min_p >= 0.0f && s->min_p <= 1.0f)) { return error_set(err, "min-p %g: want 0 (off) to 1", s->min_p); }
    if (!(s->repetition_penalty > 0.0f) || isinf(s->repetition_penalty)) {
        return error_set(err, "repetition penalty %g: want more than 0, usually 1 (off) to 1.5", s->repetition_penalty);
    }
    return true;
}

// ---- repetition penalty -----------------------------------------------------------------

// The tokens that a text has so far are a set of bits: token i is bit i % 32 of word i / 32.
static inline size_t seen_words(int vocab_size) { return ((size_t)vocab_size + 31) / 32; }
static inline void seen_add(uint32_t* seen, int token) { seen[token / 32] |= 1u << (token % 32); }

// Makes the tokens in `seen`, those of the prompt and of its continuation, less likely: a positive logit is divided by
// the penalty, a negative one is multiplied with it. logits (vocab_size).
static inline void sampler_penalize(float* logits, const uint32_t* seen, int vocab_size, float penalty) {
    for (int i = 0; i < vocab_size; i++) {
        if (!(seen[i / 32] >> (i % 32) & 1)) { continue; }
        logits[i] = logits[i] > 0.0f ? logits[i] / penalty : logits[i] * penalty;
    }
}

// ---- the draw ---------------------------------------------------------------------------

typedef struct {
    float score; // first the logit, then the unnormalized probability exp((logit - max) / temperature)
    int id;
} Candidate;

// Size of the scratch memory of sample_token().
static inline size_t sampler_scratch_bytes(int vocab_size) { return (size_t)vocab_size * sizeof(Candidate); }

// The order of candidates, largest score first. On a tie the lower id comes first, so that the order is total and the
// same on every machine.
static inline bool candidate_before(Candidate a, Candidate b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// Partitions c (n >= 1) around a pivot, the median of three elements: candidates that come before the pivot are moved
// to its left. Returns the index of the pivot.
static inline int candidates_partition(Candidate* c, int n) {
    Candidate a = c[0], b = c[n / 2], d = c[n - 1];
    int middle = n / 2; // index of the median of a, b, d
    if (candidate_before(b, a) == candidate_before(a, d)) {
        middle = 0;
    } else if (candidate_before(b, d) == candidate_before(d, a)) {
        middle = n - 1;
    }
    Candidate pivot = c[middle];
    c[middle] = c[n - 1];
    int place = 0;
    for (int i = 0; i < n - 1; i++) { // no branch on the comparison: it would be unpredictable
        Candidate x = c[i];
        c[i] = c[place];
        c[place] = x;
        place += candidate_before(x, pivot);
    }
    c[n - 1] = c[place];
    c[place] = pivot;
    return place;
}

// Moves the first k candidates of c (n) to its front, unordered; 0 < k <= n. Quickselect: linear time on average.
static inline void candidates_select(Candidate* c, int n, int k) {
    while (k < n) {
        int place = candidates_partition(c, n);
        if (place >= k) {
            n = place;
        } else {
            c += place + 1;
            n -= place + 1;
            k -= place + 1;
            if (k == 0) { return; }
        }
    }
}

// Moves the fewest candidates of c (n) whose scores add up to at least `mass` to its front, unordered. Returns their
// number, at least 1.
static inline int candidates_select_mass(Candidate* c, int n, double mass) {
    int kept = 0, end = n; // c[0 .. kept) is selected, c[end .. n) is excluded
    while (end - kept > 1) {
        int place = candidates_partition(c + kept, end - kept);
        double above = 0.0;
        for (int i = kept; i < kept + place; i++) { above += c[i].score; }
        if (place > 0 && above >= mass) {
            end = kept + place;
        } else { // everything up to and including the pivot is selected
            mass -= above + c[kept + place].score;
            kept += place + 1;
            if (mass <= 0.0) { return kept; }
        }
    }
    return end; // at most one candidate is undecided; it is kept, because mass is left, if only by rounding
}

// Collects the k largest logits in c (vocab_size), unordered. Returns their number, which is less than k if there are
// not enough logits above -inf.
static inline int sampler_top_k(Candidate* c, const float* logits, int vocab_size, int k) {
    int n = 0, room = k < vocab_size / 4 ? 2 * k + 256 : vocab_size;
    if (room > vocab_size) { room = vocab_size; }
    float floor = -INFINITY; // at least k of the logits seen so far are >= floor
    for (int i = 0; i < vocab_size; i++) {
        if (!(logits[i] > floor)) { continue; } // also skips a tie with the k-th largest: the lower id wins
        c[n].score = logits[i];
        c[n++].id = i;
        if (n == room && n > k) { // each selection frees at least half of the room, so the total time is linear
            candidates_select(c, n, k);
            n = k;
            floor = c[0].score;
            for (int j = 1; j < k; j++) { floor = c[j].score < floor ? c[j].score : floor; }
        }
    }
    if (n > k) {
        candidates_select(c, n, k);
        n = k;
    }
    return n;
}

static inline int sampler_argmax(const float* logits, int vocab_size) {
    int best = -1;
    float max = -INFINITY;
    for (int i = 0; i < vocab_size; i++) {
        if (logits[i] > max) {
            max = logits[i];
            best = i;
        }
    }
    return best;
}

// Returns the next token for logits (vocab_size). With a repetition penalty, the caller applies sampler_penalize() to them
// first. scratch has sampler_scratch_bytes(vocab_size) bytes. A token whose logit is NaN or -inf is never chosen; if there is
// no other, returns -1, so that the caller can report that the model has diverged. If some logits are +inf, one of these
// tokens is chosen.
static inline int sample_token(Sampler* s, const float* logits, int vocab_size, void* scratch) {
    if (s->temperature == 0.0f) { return sampler_argmax(logits, vocab_size); }
    Candidate* c = (Candidate*)scratch; // (vocab_size)
    int n = sampler_top_k(c, logits, vocab_size, s->top_k > 0 && s->top_k < vocab_size ? s->top_k : vocab_size);
    if (n == 0) { return -1; }
    Candidate best = c[0];
    for (int i = 1; i < n; i++) { best = candidate_before(c[i], best) ? c[i] : best; }

    double scale = 1.0 / s->temperature, sum = 0.0;
    for (int i = 0; i < n; i++) {
        double distance =
            c[i].score == best.score ? 0.0 : ((double)c[i].score - best.score) * scale; // avoids inf - inf, a NaN
        c[i].score = distance > -200.0 ? expf((float)distance) : 0.0f;                  // expf would underflow to 0
        sum += c[i].score;
    }
    if (s->top_p < 1.0f) {
        double mass = sum * s->top_p, least = (sum - mass) / n;
        // all candidates below `least` together have less than the mass that may be dropped: drop them without
        // selection
        int m = 0;
        for (int i = 0; i < n; i++) {
            if (c[i].score >= least) { c[m++] = c[i]; }
        }
        n = candidates_select_mass(c, m, mass);
        sum = 0.0;
        for (int i = 0; i < n; i++) { sum += c[i].score; }
    }
    if (s->min_p > 0.0f) { // the score of the most likely token is 1
        int m = 0;
        sum = 0.0;
        for (int i = 0; i < n; i++) {
            if (c[i].score >= s->min_p) { sum += c[i].score, c[m++] = c[i]; }
        }
        n = m;
    }
    double rest = random_f64(&s->rng) * sum;
    int last = best.id; // if rounding leaves rest >= 0 at the end, the last candidate is drawn
    for (int i = 0; i < n; i++) {
        if (!(c[i].score > 0.0f)) { continue; }
        last = c[i].id;
        rest -= c[i].score;
        if (rest < 0.0) { break; }
    }
    return last;
}

#endif
