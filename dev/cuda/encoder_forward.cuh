/*
encoder_forward: out (B,T,C) = wte[inp] + wpe | inp (B,T) int, each in [0,V) | wte (Vp,C), wpe (maxT,C)
Constraint: C % x128::size == 0, T*C < 2^31, B <= 262140.
Kernel 4 of encoder_forward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: encoder_forward ====
// ---- kernel 4: each thread reuses its vector of wpe for four sequences, with four loads of wte in flight ----

constexpr int ENCODER_FORWARD_SEQUENCES = 4; // sequences per thread, which share one load of wpe

__global__ void encoder_forward_kernel4(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T,
                                        int C) {
    constexpr int sequences = ENCODER_FORWARD_SEQUENCES;
    unsigned vectors = C / x128::size; // x128 vectors per row
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= T * vectors) { return; }
    unsigned t = i / vectors, c = i % vectors * x128::size;
    int first = blockIdx.y * sequences; // the thread's first sequence
    int ids[sequences];
    x128 token[sequences];
#pragma unroll
    for (int j = 0; j < sequences; j++) { // for a sequence past B, row 0 of wte is loaded and not used
        ids[j] = first + j < B ? inp[(size_t)(first + j) * T + t] : 0;
    }
    x128 position = load128(wpe + (size_t)t * C + c);
#pragma unroll
    for (int j = 0; j < sequences; j++) { token[j] = load128(wte + (size_t)ids[j] * C + c); }
#pragma unroll
    for (int j = 0; j < sequences; j++) {
        x128 sum;
        for (int k = 0; k < x128::size; k++) { sum[k] = (floatX)((float)token[j][k] + (float)position[k]); }
        if (first + j < B) { store128(out + ((size_t)(first + j) * T + t) * C + c, sum); }
    }
}

// out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]
// out (B,T,C) | inp (B,T), each in [0,Vp) | wte (Vp,C) | wpe (maxT,C), maxT >= T
void encoder_forward(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T, int C,
                     const Execution& exec) {
    int block_size = tuned_block_size(exec, "encoder_forward", (size_t)B * T, C, 256);
    // the bytes do not include the rows of wte that are read, because their number depends on the tokens
    Op op(exec, ((double)B * T + T) * C * sizeof(floatX) + (double)B * T * sizeof(int), 0, "encoder_forward");
    require(C % x128::size == 0);
    require((size_t)T * C < (size_t)1 << 31);
    int groups = ceil_div(B, ENCODER_FORWARD_SEQUENCES);
    require(groups <= 65535);
    dim3 grid(ceil_div(T * (C / x128::size), block_size), groups);
    launch_kernel(encoder_forward_kernel4, LaunchShape(grid, block_size), exec, out, inp, wte, wpe, B, T, C);
}
// ==== end promoted: encoder_forward ====
