/*
Learning rate schedules: cosine, linear, constant, wsd. The formulas are llm.c's, computed in double.

Steps count from 0. The constant schedule is lr at every step, without warmup, as in llm.c. In the other schedules the
rate is lr * (step + 1) / warmup during the warmup; after it, the rate falls from lr to low = lr * final_fraction. It is
low + keep * (lr - low), where keep depends on p, the progress from the end of the warmup to num_steps, 0 to 1:
    cosine  (1 + cos(pi p)) / 2                                            Loshchilov & Hutter 2017, arXiv:1608.03983
    linear  1 - p
    wsd     1, then 1 - sqrt(p) with p = progress in the last 20% of steps  Hagele et al. 2024, arXiv:2405.18392
*/
#ifndef LLMC_SCHEDULERS_H
#define LLMC_SCHEDULERS_H

#include "utils.h"
#include <math.h>

typedef struct {
    const char* type;     // cosine, linear, constant or wsd
    float learning_rate;  // peak
    float final_fraction; // final learning rate as a fraction of the peak
    int64_t warmup_steps; // may exceed num_steps: then the whole run is warmup
    int64_t num_steps;    // may be 0
} LrSchedule;

// Fails if the type is unknown or a number is out of range.
static inline bool lr_schedule_check(const LrSchedule* s, Error* err) {
    const char* type = s->type ? s->type : "";
    if (strcmp(type, "cosine") != 0 && strcmp(type, "linear") != 0 && strcmp(type, "constant") != 0 &&
        strcmp(type, "wsd") != 0) {
        return error_set(err, "learning rate schedule '%s' is not known; one of cosine linear constant wsd", type);
    }
    if (!(s->learning_rate >= 0.0f) || !isfinite(s->learning_rate)) {
        return error_set(err, "learning rate is %g, want a number of at least 0", (double)s->learning_rate);
    }
    if (!(s->final_fraction >= 0.0f && s->final_fraction <= 1.0f)) {
        return error_set(err, "final fraction of the learning rate is %g, want 0 to 1", (double)s->final_fraction);
    }
    if (s->warmup_steps < 0 || s->num_steps < 0) {
        return error_set(err, "learning rate schedule over %lld steps with %lld of warmup, want at least 0 for both",
                         (long long)s->num_steps, (long long)s->warmup_steps);
    }
    return true;
}

// Returns the learning rate of a step. For a schedule that lr_schedule_check() accepts, it is finite and between 0 and
// learning_rate. From num_steps on it is the final rate, unless the warmup lasts longer.
static inline float lr_at(const LrSchedule* s, int64_t step) {
    double lr = s->learning_rate, low = lr * s->final_fraction;
    if (step < 0) { step = 0; }
    if (strcmp(s->type, "constant") == 0) { return s->learning_rate; }
    if (step < s->warmup_steps) { return (float)(lr * ((double)step + 1.0) / (double)s->warmup_steps); }
    bool wsd = strcmp(s->type, "wsd") == 0;
    int64_t begin = s->warmup_steps;
    if (wsd) {
        int64_t decay_begin = s->num_steps / 5 * 4 + s->num_steps % 5 * 4 / 5; // floor(0.8 num_steps), without overflow
        if (decay_begin > begin) { begin = decay_begin; }
    }
    double p = step >= s->num_steps ? 1.0
               : step > begin       ? (double)(step - begin) / (double)(s->num_steps - begin)
                                    : 0.0;
    double keep = wsd                              ? 1.0 - sqrt(p)
                  : strcmp(s->type, "linear") == 0 ? 1.0 - p
                                                   : 0.5 * (1.0 + cos(3.14159265358979323846 * p));
    return (float)(low + keep * (lr - low));
}

#endif
