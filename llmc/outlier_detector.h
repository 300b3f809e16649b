/*
Detects unusual losses and gradient norms: computes the z-score of a value against the last OUTLIER_WINDOW values.
The idea is llm.c's, with three differences. Mean and standard deviation are recomputed from the window every time, so
that rounding errors do not accumulate. A value is compared with the window before it is added, so that it does not
inflate its own deviation. NaN and infinity never enter the window.
*/
#ifndef LLMC_OUTLIER_DETECTOR_H
#define LLMC_OUTLIER_DETECTOR_H

#include "utils.h"
#include <math.h>

enum { OUTLIER_WINDOW = 128 };
#define OUTLIER_Z_MAX 1e3       // z-scores are clamped to +-this; a window without deviation would give infinity
#define OUTLIER_VALUE_MAX 1e100 // above any float; larger magnitudes count as infinite, so that squares stay finite

// Plain data, saved in checkpoints.
typedef struct {
    double window[OUTLIER_WINDOW]; // the first `count` are valid
    int32_t count, index;          // index: 0 until the window is full, then that of the oldest value, replaced next
} OutlierDetector;

static inline void outlier_init(OutlierDetector* d) { memset(d, 0, sizeof(*d)); }

// True if d is a state that outlier_update() can produce. Must be checked for a state that was read from a file.
static inline bool outlier_valid(const OutlierDetector* d) {
    bool ok = d->count >= 0 && d->count <= OUTLIER_WINDOW && d->index >= 0 && d->index < OUTLIER_WINDOW &&
              (d->count == OUTLIER_WINDOW || d->index == 0);
    for (int i = 0; ok && i < d->count; i++) { ok = fabs(d->window[i]) <= OUTLIER_VALUE_MAX; }
    return ok;
}

// Returns the z-score of x against the window, clamped to +-OUTLIER_Z_MAX, then replaces the oldest value by x. While
// the window is not full, returns NaN and adds x. If x is NaN or infinite, returns +INFINITY and leaves the window
// unchanged. If all values of the window are equal, returns 0 if x equals them, otherwise +-OUTLIER_Z_MAX.
static inline double outlier_update(OutlierDetector* d, double x) {
    if (!(fabs(x) <= OUTLIER_VALUE_MAX)) { return (double)INFINITY; }
    if (d->count < OUTLIER_WINDOW) {
        d->window[d->count++] = x;
        return (double)NAN;
    }
    // compute with distances from window[0]: exact if all values are equal, and accurate if they are far from zero
    double first = d->window[0], mean = 0.0, variance = 0.0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) { mean += (d->window[i] - first) / OUTLIER_WINDOW; }
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        double diff = d->window[i] - first - mean;
        variance += diff * diff / OUTLIER_WINDOW;
    }
    double std = sqrt(variance), off = x - first - mean;
    d->window[d->index] = x;
    d->index = (d->index + 1) % OUTLIER_WINDOW;
    if (off == 0.0) { return 0.0; }
    return fabs(off) < OUTLIER_Z_MAX * std ? off / std : copysign(OUTLIER_Z_MAX, off);
}

#endif
