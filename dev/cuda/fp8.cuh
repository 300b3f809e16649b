/*
fp8: how results in fp8 are checked. What a tensor in fp8 is, and what the kernels that quantise share, is in llmc/fp8.cuh.
*/
#pragma once

#include "../../llmc/fp8.cuh"
#include "bench.h"

// ---- checks ---------------------------------------------------------------------------------------------------------

// How far a result may be from x before it is rounded.
inline float fp8_off(float x, Tolerance tolerance, double factor) {
    return std::isfinite(x) ? (float)factor * (tolerance.atol + tolerance.rtol * fabsf(x)) : 0.0f;
}
// What a kernel stores for x.
inline float fp8_of(float x, float scale, bool is_e5m2) { return fp8_round_cpu((float)(floatX)x * scale, is_e5m2); }

// Declares a quantised output of n values. The reference writes the exact values to its .host, unscaled. A result is right
// if the CPU gets it from a number within `tolerance` of the exact one: with a tolerance of 0 it must have the same bits,
// otherwise it may only differ where two results are that close to the exact value.
template <class F>
Buffer<F> fp8_output(Bench& b, const char* name, size_t n, Buffer<float> scale, Tolerance tolerance) {
    Buffer<F> x = b.output<F>(name, n, tolerance);
    if (b.dry) { return x; }
    b.state.buffers.back().compare = [=](double factor, std::string* wrong) {
        std::vector<F> out(n);
        cudaCheck(cudaMemcpy(out.data(), x.dev, n, cudaMemcpyDeviceToHost));
        std::atomic<size_t> bad{0}, worst{0};
        bench_pieces(n, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) {
                float want = x.host[i], got = (float)out[i], s = scale.host[0];
                if (bench_is_left_out(want)) { // see Bench::sample
                    if (!std::isfinite(got)) { bad++, worst = i; }
                    continue;
                }
                float off = fp8_off(want, tolerance, factor);
                float low = fp8_of(want - off, s, Fp8<F>::IS_E5M2), high = fp8_of(want + off, s, Fp8<F>::IS_E5M2);
                if (!(low <= got && got <= high)) { bad++, worst = i; }
            }
        });
        if (bad > 0) {
            char text[256];
            size_t i = worst;
            snprintf(text, sizeof(text), "%s: %zu of %zu wrong, one at %zu: got %.9g, want %.9g", name, (size_t)bad, n,
                     i, (double)(float)out[i], (double)fp8_of(x.host[i], scale.host[0], Fp8<F>::IS_E5M2));
            *wrong += (wrong->empty() ? "" : "; ") + std::string(text);
#ifdef CUDA_EMULATION
            *wrong += emulation_writer(x.dev, 1, i, n);
#endif
        }
        return bad > 0 ? (double)INFINITY : 0.0;
    };
    return x;
}

// Declares amax, which starts at 2^-20. The reference calls fp8_amax_cpu(). tolerance: of values that are not yet rounded to
// floatX; 0: amax must be equal.
inline Buffer<float> fp8_amax(Bench& b, Tolerance tolerance) {
    if (tolerance.rtol > 0) { tolerance.rtol += ulp_of<floatX>(); }
    Buffer<float> start = b.input_from<float>("amax_start", 1, [](float* host) { host[0] = 0x1p-20f; });
    return b.inout<float>("amax", 1, start, tolerance);
}
inline void fp8_amax_cpu(float* amax, const float* x, size_t n) {
    std::vector<float> largest(ceil_div(n, (size_t)4096), 0x1p-20f);
    parallel_for(largest.size(), [&](size_t piece) {
        for (size_t i = piece * 4096; i < std::min(n, (piece + 1) * 4096); i++) {
            largest[piece] = fmaxf(largest[piece], fabsf((float)(floatX)x[i]));
        }
    });
    *amax = *std::max_element(largest.begin(), largest.end());
}
// columns (C,N) = rows (N,C) transposed, each group of 16 tokens in the order of fp8_token()
inline void fp8_transpose_cpu(float* columns, const float* rows, int N, int C, bool in_order) {
    parallel_for(C, [=](size_t c) {
        for (int place = 0; place < N; place++) {
            int token = place / 16 * 16 + fp8_token(place % 16, in_order);
            columns[c * N + place] = rows[(size_t)token * C + c];
        }
    });
}
