/*
--weights int8 and fp8: a model's matrices in 8 bits, for generation. They are made on the GPU when the model has been
loaded, from its weights in floatX, a row (output channel) at a time. Afterwards the weights in floatX are what the 8
bits stand for, rounded to floatX: a prompt, an evaluation, the embedding of a token and more texts than decode_matmul
takes are computed with these, and so the whole program computes with the same weights.

In 8 bits are the products' matrices: wte, as the head, and qkvw, attprojw, fcw, fcprojw of each layer. The lookup of a
token in wte stays in floatX, of which it reads a row per text and token; so do wpe and the vectors, which are small.
*/
#pragma once

#include "cuda_common.cuh"
#include "gpt2.h"
#include "layout.cuh"
#include "memory_plan.cuh"
#include "ptx.cuh"
#include "utils.h"
#include "weight_matrix.cuh"
#include <algorithm>

// values (num_rows,K), scales (num_rows) | weight (num_rows,K) inout: rounded to values * scales, in floatX. Infinity
// and NaN make their row NaN.
void quantize_weights(void* values, float* scales, floatX* weight, WeightFormat format, size_t num_rows, int K,
                      const Execution& exec);

struct Weights8 {
    WeightFormat format = WEIGHTS_FULL; // then there is nothing else
    uint8_t* values = NULL;             // (model_size): the place of a weight is its place in the model's array
    float* scales = NULL;               // (model_size / C): row r of the matrix at `place` has place / C + r
};

// The format that --weights names. Ends the program if the GPU, or the code for it, has no such numbers.
inline WeightFormat weights8_format(const char* name) {
    int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    if (strcmp(name, "fp8") != 0) { return strcmp(name, "int8") == 0 ? WEIGHTS_INT8 : WEIGHTS_FULL; }
    if (10 * major + minor < 89) {
        die("--weights fp8 needs a GPU of compute capability 8.9, this one has %d.%d; --weights int8 runs here", major,
            minor);
    }
    if (compiled_arch(ptx_sm90a_kernel<0>) < 89) { // any kernel
        die("--weights fp8: this program was built for older GPUs than this one: make clean, then make train_gpt2cu "
            "GPU_COMPUTE_CAPABILITY=%d%d",
            major, minor);
    }
    return WEIGHTS_FP8;
}

// Index of the scale of the row that begins at `place` of params, where a matrix begins. Its next rows have the next indices: a row
// is at least min(C, F) long, so the rows of two matrices never share one.
inline size_t weights8_row(const GPT2Config* config, size_t place) {
    return place / std::min(config->channels, config->mlp_channels);
}

inline void weights8_plan(Plan* plan, Weights8* w, const GPT2Config* config) {
    if (w->format == WEIGHTS_FULL) { return; }
    plan_add(plan, PLAN_WEIGHTS, &w->values, model_size(config));
    plan_add(plan, PLAN_WEIGHTS, &w->scales, weights8_row(config, model_size(config)));
}

// Quantises the matrices of params (model_size), and rounds them to what their 8 bits stand for.
inline void weights8_quantize(const Weights8* w, const GPT2Config* config, floatX* params, const Execution& exec) {
    for (int p = 0; p < NUM_PARAMS && w->format != WEIGHTS_FULL; p++) {
        const ParamInfo* info = &gpt2_params[p];
        for (int l = 0; l < param_copies(config, p) && info->rows != DIM_1 && info->rows != DIM_MAXT; l++) {
            size_t place = param_place(config, p, l);
            quantize_weights(w->values + place, w->scales + weights8_row(config, place), params + place, w->format,
                             param_rows(config, p), (int)param_cols(config, p), exec);
        }
    }
}

// Prints how much memory the 8-bit weights take in addition to the weights in floatX.
inline void weights8_print(const Weights8* w, const GPT2Config* config) {
    if (w->format == WEIGHTS_FULL) { return; }
    double n = (double)model_size(config);
    fprintf(stderr, "[weights in %s: %.1f MB and %.1f MB of scales, beside %.1f MB in %s]\n",
            w->format == WEIGHTS_INT8 ? "int8" : "fp8", n * 1e-6,
            (double)weights8_row(config, model_size(config)) * sizeof(float) * 1e-6, n * sizeof(floatX) * 1e-6,
            PRECISION_NAME);
}

// A matrix of params (model_size) as generation reads it.
inline WeightMatrix weights8_matrix(const Weights8* w, const GPT2Config* config, const floatX* params,
                                    const floatX* weight) {
    size_t place = weight - params;
    if (w->format == WEIGHTS_FULL) { return weight; }
    return WeightMatrix(w->values + place, w->scales + weights8_row(config, place), w->format);
}
