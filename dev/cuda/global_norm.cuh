/*
global_norm: norm (1) float = sqrt(sum(grads^2)) | scratch in floats | grads (n) float, aligned to 16 bytes
Constraint: n >= 1.
Kernel 5 of global_norm.cu, which has the other kernels and errors.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: global_norm ====
// ---- kernel 5: four loads in flight per thread; one warp adds the block sums, in double ----

// block_sums (gridDim.x) = sum of squares per block, from a grid-stride loop with four loads in flight per thread.
__global__ void __launch_bounds__(1024) global_norm_kernel5(float* block_sums, const float* grads, size_t n) {
    __shared__ float shared[32];
    size_t num_vectors = n / f128::size, stride = (size_t)gridDim.x * blockDim.x;
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, i = thread;
    float sums[4][f128::size] = {}; // 16 short sums have less rounding error than one
    for (; i + 3 * stride < num_vectors; i += 4 * stride) {
        f128 x[4];
        for (int j = 0; j < 4; j++) { x[j] = load128(grads + (i + j * stride) * f128::size); }
        for (int j = 0; j < 4; j++) {
            for (int k = 0; k < f128::size; k++) { sums[j][k] += x[j][k] * x[j][k]; }
        }
    }
    for (; i < num_vectors; i += stride) {
        f128 x = load128(grads + i * f128::size);
        for (int k = 0; k < f128::size; k++) { sums[0][k] += x[k] * x[k]; }
    }
    if (thread < n % f128::size) {
        float x = grads[num_vectors * f128::size + thread];
        sums[1][0] += x * x;
    }
    float sum = 0.0f;
    for (int j = 0; j < 4; j++) { sum += (sums[j][0] + sums[j][1]) + (sums[j][2] + sums[j][3]); }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { block_sums[blockIdx.x] = sum; }
}

// norm (1) = sqrt(sum of block_sums). One warp adds the block sums, so that the order of the additions is fixed.
__global__ void global_norm_finish_kernel5(float* norm, const float* block_sums, int num_blocks) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < num_blocks; i += 32) { sum += block_sums[i]; }
    sum = lanes_sum<32>(sum);
    if (threadIdx.x == 0) { *norm = (float)sqrt(sum); }
}

// Number of floats in scratch: one per block, so at most this many blocks are launched.
size_t global_norm_scratch() { return 4096; }

// norm (1) = sqrt(sum(grads^2)) | scratch (global_norm_scratch()) | grads (n), aligned to 16 bytes
void global_norm(float* norm, float* scratch, const float* grads, size_t n, const Execution& exec) {
    int block_size = tuned_block_size(exec, "global_norm", n, 1, 512);
    Op op(exec, 4.0 * n, 2.0 * n, "global_norm");
    require((size_t)grads % 16 == 0);
    int num_blocks; // first the resident blocks per SM, then the blocks that fit on the whole GPU at once
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&num_blocks, global_norm_kernel5, block_size, 0));
    num_blocks = min(num_blocks * num_multiprocessors(), (int)global_norm_scratch());
    launch_kernel(global_norm_kernel5, LaunchShape(num_blocks, block_size), exec, scratch, grads, n);
    launch_kernel(global_norm_finish_kernel5, LaunchShape(1, 32), exec, norm, scratch, num_blocks);
}
// ==== end promoted: global_norm ====
