/*
fused_residual_layernorm_forward: residual (N,C) = inp1 + inp2; normed (N,C), mean, rstd (N) are its layernorm
Constraint: C % 8 == 0; C <= 6144 in fp32, 12288 in 16 bits.
Kernel 3 of fused_residual_layernorm.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: fused_residual_layernorm ====
// ---- kernel 3: 128-bit loads, one block per row, the row stays in shared memory ---------------------------

__global__ void fused_residual_layernorm_kernel3(floatX* residual, floatX* normed, float* mean, float* rstd,
                                                 const floatX* inp1, const floatX* inp2, const floatX* weight,
                                                 const floatX* bias, int C, float epsilon) {
    __shared__ float shared[32];
    // (C) floatX; a thread reads only what it wrote: no barrier
    extern __shared__ __align__(128) int4 fused_residual_layernorm_row[];
    floatX* x = (floatX*)fused_residual_layernorm_row;
    size_t row_start = (size_t)blockIdx.x * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 a = load128(inp1 + row_start + c), b = load128(inp2 + row_start + c), xv;
        for (int k = 0; k < x128::size; k++) {
            xv[k] = (floatX)((float)a[k] + (float)b[k]);
            sum += (float)xv[k];
        }
        store128(x + c, xv);
        store128(residual + row_start + c, xv);
    }
    float m = block_sum(sum, shared) / C;
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(x + c);
        for (int k = 0; k < x128::size; k++) {
            float centered = (float)xv[k] - m;
            squares += centered * centered;
        }
    }
    float r = rsqrtf(block_sum(squares, shared) / C + epsilon);
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(x + c), w = load128(weight + c), b = load128(bias + c), y;
        for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(((float)xv[k] - m) * r * (float)w[k] + (float)b[k]); }
        store128(normed + row_start + c, y);
    }
    if (threadIdx.x == 0) { mean[blockIdx.x] = m, rstd[blockIdx.x] = r; }
}

// residual (N,C) = inp1 + inp2; normed (N,C) = (residual - mean) * rstd * weight + bias; mean, rstd (N) per row
// | inp1, inp2 (N,C), weight, bias (C)
void fused_residual_layernorm_forward(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                      const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                      float epsilon, const Execution& exec) {
    int block_size = tuned_block_size(exec, "fused_residual_layernorm", N, C, 128);
    Op op(exec, 4.0 * N * C * sizeof(floatX), 0, "fused_residual_layernorm");
    require(N >= 1 && C >= 8 && C % 8 == 0);
    // a launch may use 48 KB of shared memory without cudaFuncSetAttribute
    require(C * sizeof(floatX) <= 48 * 1024 - 32 * sizeof(float));
    require(block_size % 32 == 0 && block_size <= 1024);
    launch_kernel(fused_residual_layernorm_kernel3, LaunchShape(N, block_size, C * sizeof(floatX)), exec, residual,
                  normed, mean, rstd, inp1, inp2, weight, bias, C, epsilon);
}
// ==== end promoted: fused_residual_layernorm ====
