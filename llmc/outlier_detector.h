/*
How unusual is this loss, or this gradient norm? A z-score against a window of the last OUTLIER_WINDOW values.
The idea is llm.c's. Different here: mean and deviation are taken from the window anew each time (nothing drifts), the
new value is measured against the window before it (it cannot hide in its own deviation), and NaN or inf never enters.
*/
#ifndef LLMC_OUTLIER_DETECTOR_H
#define LLMC_OUTLIER_DETECTOR_H

#include "utils.h"
#include <math.h>

enum { OUTLIER_WINDOW = 128 };
#define OUTLIER_Z_MAX 1e3       // z-scores are cut to +-this; a window without any deviation would give infinity
#define OUTLIER_VALUE_MAX 1e100 // beyond any float; a larger magnitude counts as infinite, so that squares stay finite

// Plain data: checkpoints save and restore it as it is.
typedef struct {
    double window[OUTLIER_WINDOW]; // the first `count` are filled
    int32_t count, index;          // index: the oldest value, the next to be replaced, once the window is full
} OutlierDetector;

static inline void outlier_init(OutlierDetector* d) { memset(d, 0, sizeof(*d)); }

// Whether d can have come from outlier_update(); ask before using one that was read from a file.
static inline bool outlier_valid(const OutlierDetector* d) {
    bool ok = d->count >= 0 && d->count <= OUTLIER_WINDOW && d->index >= 0 && d->index < OUTLIER_WINDOW &&
              (d->count == OUTLIER_WINDOW || d->index == 0);
    for (int i = 0; ok && i < d->count; i++) { ok = fabs(d->window[i]) <= OUTLIER_VALUE_MAX; }
    return ok;
}

// The z-score of x against the window before it, cut to +-OUTLIER_Z_MAX; x then takes the place of the oldest value.
// NaN while the window is filling. If x is NaN or infinite: +INFINITY, and the window stays as it is.
// A window of equal values: 0 if x equals them too, else +-OUTLIER_Z_MAX.
static inline double outlier_update(OutlierDetector* d, double x) {
    if (!(fabs(x) <= OUTLIER_VALUE_MAX)) { return (double)INFINITY; }
    if (d->count < OUTLIER_WINDOW) {
        d->window[d->count++] = x;
        return (double)NAN;
    }
    // all of it as distances from one of the values: exact when they are all equal, and near enough far from zero
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
