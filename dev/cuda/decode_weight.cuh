/*
The weights of decode_matvec and decode_matmul: the kinds of operation, and their inputs in floatX, int8 or e4m3.
*/
#pragma once

#include "../../llmc/weight_matrix.cuh"
#include "bench.h"

// The kinds of operation: kind % 3 is the operation, kind / 3 the WeightFormat.
inline std::vector<const char*> decode_kinds() {
    return {"layernorm, product, gelu",       "product, residual",       "layernorm, product, float out",
            "layernorm, product, gelu; int8", "product, residual; int8", "layernorm, product, float out; int8",
            "layernorm, product, gelu; e4m3", "product, residual; e4m3", "layernorm, product, float out; e4m3"};
}

// The weight of a kind, as the kernels and as the reference read it.
struct DecodeWeight {
    WeightMatrix matrix;
    std::function<std::vector<float>()> host; // (OC,K): what the values stand for
};
inline DecodeWeight declare_weight(Bench& b, WeightFormat format, bool exact, int OC, int K) {
    size_t n = (size_t)OC * K;
    float size = 1.0f / sqrtf((float)K);
    if (format == WEIGHTS_FULL) {
        Buffer<floatX> weight =
            exact ? b.input_filled<floatX>("weight", n, bench_fill_exact_small) : b.input<floatX>("weight", n, size);
        return {weight.dev, [=] { return std::vector<float>(weight.host, weight.host + n); }};
    }
    // Values up to the largest, and a scale that differs by row, so that the terms' magnitude is 1, for which the tolerances are,
    // or a little less; exact: both have few bits.
    float largest = format == WEIGHTS_INT8 ? 127.0f : 448.0f;
    uint32_t seed = b.next_seed();
    auto fill = [=](float* host) {
        bench_fill_normal(host, n, seed, largest / 4, 0.0f);
        if (exact) { bench_fill_exact_small(host, n, seed); }
        for (size_t i = 0; i < n; i++) {
            float x = exact ? 64 * host[i] : std::max(-largest, std::min(largest, host[i]));
            host[i] = format == WEIGHTS_INT8 ? nearbyintf(x) : x;
        }
        if (!exact) {
            host[0] = largest, host[n - 1] = -largest, host[n / 2] = format == WEIGHTS_INT8 ? 1.0f : 0x1p-9f;
        }
    };
    Buffer<int8_t> ints = {nullptr, nullptr};
    Buffer<__nv_fp8_e4m3> floats = {nullptr, nullptr};
    if (format == WEIGHTS_INT8) { ints = b.input_from<int8_t>("weight", n, fill); }
    if (format == WEIGHTS_FP8) { floats = b.input_from<__nv_fp8_e4m3>("weight", n, fill); }
    Buffer<float> scales = b.input_from<float>("scales", OC, [=](float* host) {
        for (int row = 0; row < OC; row++) { host[row] = exact ? 0x1p-6f : size * (1 - row % 7 / 16.0f) * 4 / largest; }
    });
    const float* values = format == WEIGHTS_INT8 ? ints.host : floats.host;
    auto dequantized = [=] {
        std::vector<float> weight(n);
        for (size_t i = 0; i < n; i++) { weight[i] = values[i] * scales.host[i / K]; }
        return weight;
    };
    const void* device = format == WEIGHTS_INT8 ? (const void*)ints.dev : floats.dev;
    return {WeightMatrix(device, scales.dev, format), dequantized};
}
