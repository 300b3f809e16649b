/*
From the logits of one position to the next token: greedy, or drawn after temperature, top-k and top-p, in the order of
Hugging Face's generate().

Sources: Fan, Lewis and Dauphin 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2019, arXiv:1904.09751 (top-p);
Hoare 1961 (selection by partition).
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>

#include "rand.h"
#include "utils.h"

typedef struct {
    float temperature; // 0: greedy, the largest logit
    int top_k;         // draw among the k largest; 0: all
    float top_p;       // draw among the fewest that hold this share of the probability; 1: all
    uint64_t rng;      // state, moves on with every token drawn; saved, it makes a run repeatable
} Sampler;

static inline bool sampler_check(const Sampler* s, Error* err) {
    if (!(s->temperature >= 0.0f) || isinf(s->temperature)) {
        return error_set(err, "temperature %g: want a number from 0 (greedy) up, usually 0.7 to 1", s->temperature);
    }
    if (s->top_k < 0) { return error_set(err, "top-k %d: want 0 (off) or more", s->top_k); }
    if (!(s->top_p > 0.0f && s->top_p <= 1.0f)) {
        return error_set(err, "top-p %g: want more than 0 and at most 1 (off)", s->top_p);
    }
    return true;
}

typedef struct {
    float score; // a logit, later its share before division by the sum: exp((logit - max) / temperature)
    int id;
} Candidate;

// of the scratch memory that sample_token() wants
static inline size_t sampler_scratch_bytes(int vocab_size) { return (size_t)vocab_size * sizeof(Candidate); }

// A total order, so that ties fall the same way on every machine: the lower id comes first.
static inline bool candidate_before(Candidate a, Candidate b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// Splits c (n >= 1) around one of its elements: those before it come to lie before it. Returns its place.
static inline int candidates_partition(Candidate* c, int n) {
    Candidate a = c[0], b = c[n / 2], d = c[n - 1];
    int middle = n / 2; // the median of the three
    if (candidate_before(b, a) == candidate_before(a, d)) {
        middle = 0;
    } else if (candidate_before(b, d) == candidate_before(d, a)) {
        middle = n - 1;
    }
    Candidate pivot = c[middle];
    c[middle] = c[n - 1];
    int place = 0;
    for (int i = 0; i < n - 1; i++) { // without a branch on the comparison, which nobody can predict
        Candidate x = c[i];
        c[i] = c[place];
        c[place] = x;
        place += candidate_before(x, pivot);
    }
    c[n - 1] = c[place];
    c[place] = pivot;
    return place;
}

// Brings the k first of c (n) to its front, in no order; 0 < k <= n. Linear time on average.
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

// Brings the fewest of c (n) whose scores add up to at least `mass` to its front, unordered; returns how many, never 0.
static inline int candidates_select_mass(Candidate* c, int n, double mass) {
    int kept = 0, end = n; // c[0 .. kept) is in, c[end .. n) is out
    while (end - kept > 1) {
        int place = candidates_partition(c + kept, end - kept);
        double above = 0.0;
        for (int i = kept; i < kept + place; i++) { above += c[i].score; }
        if (place > 0 && above >= mass) {
            end = kept + place;
        } else { // the pivot is in too
            mass -= above + c[kept + place].score;
            kept += place + 1;
            if (mass <= 0.0) { return kept; }
        }
    }
    return end; // what is left, one or none, is needed, if only for the rounding of the sums
}

// The k largest logits into c (vocab_size), in no order; returns how many there are, fewer when not all are candidates.
static inline int sampler_top_k(Candidate* c, const float* logits, int vocab_size, int k) {
    int n = 0, room = k < vocab_size / 4 ? 2 * k + 256 : vocab_size;
    if (room > vocab_size) { room = vocab_size; }
    float floor = -INFINITY; // at least k of those seen reach it
    for (int i = 0; i < vocab_size; i++) {
        if (!(logits[i] > floor)) { continue; } // a later one that ties with the k-th is out
        c[n].score = logits[i];
        c[n++].id = i;
        if (n == room && n > k) { // as each round frees at least half of the room, the whole stays linear
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

// The next token for logits (vocab_size); scratch has sampler_scratch_bytes(vocab_size). A NaN or -inf logit is never
// drawn; -1 when there is no other, so that the caller can say that the model has diverged. Of +inf, one is drawn.
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
            c[i].score == best.score ? 0.0 : ((double)c[i].score - best.score) * scale; // inf - inf is NaN
        c[i].score = distance > -200.0 ? expf((float)distance) : 0.0f;                  // 0 in a float, too
        sum += c[i].score;
    }
    if (s->top_p < 1.0f) {
        double mass = sum * s->top_p, least = (sum - mass) / n;
        int m = 0; // together, those below the least cannot reach the share that may go: most need no selection
        for (int i = 0; i < n; i++) {
            if (c[i].score >= least) { c[m++] = c[i]; }
        }
        n = candidates_select_mass(c, m, mass);
        sum = 0.0;
        for (int i = 0; i < n; i++) { sum += c[i].score; }
    }
    double rest = random_f64(&s->rng) * sum;
    int last = best.id; // rounding may leave a rest after the last one
    for (int i = 0; i < n; i++) {
        if (!(c[i].score > 0.0f)) { continue; }
        last = c[i].id;
        rest -= c[i].score;
        if (rest < 0.0) { break; }
    }
    return last;
}

#endif
