/*
Reads the reference values of the small model in dev/test/fixtures (made with PyTorch in float64, see the README.md
there), and measures the distance of two arrays. For tests that run from the top folder.
*/
#ifndef DEV_TEST_GOLDEN_H
#define DEV_TEST_GOLDEN_H

#include "../../llmc/safetensors.h"
#include "../../llmc/utils.h"
#include <math.h>

#define FIXTURES "dev/test/fixtures/"

// ---- reference values ---------------------------------------------------------------------------

static inline const SafeTensor* golden_find(SafeTensors* file, const char* path, const char* name) {
    Error err;
    if (!file->num_tensors && !safetensors_open(file, path, &err)) { die("%s", err.text); }
    const SafeTensor* t = safetensors_find(file, name);
    if (!t) { die("no '%s' in the reference values", name); }
    return t;
}

static inline const SafeTensor* golden_tensor(const char* name) {
    static SafeTensors golden;
    return golden_find(&golden, FIXTURES "tiny_gpt2_golden.safetensors", name);
}

// the values of ten steps with Muon
static inline const SafeTensor* golden_muon_tensor(const char* name) {
    static SafeTensors muon;
    return golden_find(&muon, FIXTURES "tiny_gpt2_muon.safetensors", name);
}

static inline size_t elements(const SafeTensor* t) { return t->bytes / 4; }

static inline float* tensor_floats(const SafeTensor* t) {
    float* values = (float*)malloc_check(t->bytes);
    safetensors_to_float(values, t, 0, elements(t));
    return values;
}

static inline float* golden_floats(const char* name) { return tensor_floats(golden_tensor(name)); }

static inline int* golden_ints(const char* name) {
    const SafeTensor* t = golden_tensor(name);
    int* values = (int*)malloc_check(t->bytes);
    memcpy(values, t->data, t->bytes);
    return values;
}

static inline double largest_difference(const float* a, const float* b, size_t n) {
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (!(d <= worst)) { worst = d; } // NaN becomes the maximum and stays it
    }
    return worst;
}

// |a - b| / |b| in the Euclidean norm
static inline double relative_error(const float* a, const float* b, size_t n) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

#endif
