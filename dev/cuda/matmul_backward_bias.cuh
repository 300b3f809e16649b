/*
matmul_backward_bias: dbias (OC) float += the column sums of dout (N,OC) | scratch in floats
Constraint: OC % x128::size == 0.
Kernel 7 of matmul_backward_bias.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/column_sums.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: matmul_backward_bias ====
constexpr int MATMUL_BACKWARD_BIAS_COLUMNS = 32 * x128::size; // per block: a warp reads 512 contiguous bytes of a row

// Rows per block, so that there are at most 2048 blocks. They fill any GPU, and their partial sums take 2 MB.
static int matmul_backward_bias_rows(int N, int OC) {
    int max_num = max(1, 2048 / ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS));
    return ceil_div(ceil_div(N, max_num), 64) * 64; // a multiple of 64: 16 warps with four rows in flight each
}

// The number of floats of scratch: OC partial sums per group of rows (per blockIdx.y).
size_t matmul_backward_bias_scratch(int N, int OC) {
    return (size_t)ceil_div(N, matmul_backward_bias_rows(N, OC)) * OC;
}

// ---- kernel 7: one wave of blocks, so there are fewer partial sums to add up --------------------------------------

// partial[blockIdx.y, c] = the sum of `rows` rows of dout, for each column c of the block
__device__ inline void matmul_backward_bias_sums(float* partial, const floatX* dout, int N, int OC, int rows) {
    constexpr int columns = MATMUL_BACKWARD_BIAS_COLUMNS, unroll = 4; // rows in flight per warp
    extern __shared__ __align__(128) float matmul_backward_bias_shared[];
    float* shared = matmul_backward_bias_shared; // (warps, columns)
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int c = blockIdx.x * columns + lane * x128::size;
    float sum[x128::size] = {};
    if (c < OC) {
        int row = blockIdx.y * rows + warp, end = min(N, (int)(blockIdx.y + 1) * rows);
        size_t stride = (size_t)num_warps * OC;
        const floatX* p = dout + (size_t)row * OC + c;
        for (; row + (unroll - 1) * num_warps < end; row += unroll * num_warps, p += unroll * stride) {
            x128 x[unroll];
#pragma unroll
            for (int u = 0; u < unroll; u++) { x[u] = load128(p + u * stride); }
#pragma unroll
            for (int u = 0; u < unroll; u++) {
                for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[u][k]; }
            }
        }
        for (; row < end; row += num_warps, p += stride) {
            x128 x = load128(p);
            for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[k]; }
        }
    }
    // element k of the 32 lanes is contiguous, so there are no bank conflicts
    for (int k = 0; k < x128::size; k++) { shared[warp * columns + k * 32 + lane] = sum[k]; }
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < num_warps; w++) { total += shared[w * columns + i]; }
        int column = blockIdx.x * columns + i % 32 * x128::size + i / 32;
        if (column < OC) { partial[(size_t)blockIdx.y * OC + column] = total; }
    }
}

__global__ void matmul_backward_bias_kernel7(float* partial, const floatX* dout, int N, int OC, int rows) {
    matmul_backward_bias_sums(partial, dout, N, OC, rows);
}

// dbias (OC) += dout summed over its rows | scratch (matmul_backward_bias_scratch(N, OC)) | dout (N,OC)
// It launches one wave: as many blocks as can run at once, which share the rows equally. So there are few partial sums.
void matmul_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC, const Execution& exec) {
    int block_size = tuned_block_size(exec, "matmul_backward_bias", N, OC, 512);
    Op op(exec, (double)N * OC * sizeof(floatX), 0, "matmul_backward_bias");
    require(N >= 1 && OC % x128::size == 0);
    size_t shared = (size_t)block_size / 32 * MATMUL_BACKWARD_BIAS_COLUMNS * sizeof(float);
    int per_sm, tiles = ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS);
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, matmul_backward_bias_kernel7, block_size, shared));
    int room = ceil_div(N, matmul_backward_bias_rows(N, OC)); // rows of partial sums that fit in scratch
    int rows = ceil_div(N, min(room, max(1, exec.free_sms() * per_sm / tiles)));
    int num = ceil_div(N, rows);
    launch_kernel(matmul_backward_bias_kernel7, LaunchShape(dim3(tiles, num), block_size, shared), exec, scratch, dout,
                  N, OC, rows);
    column_sums<32>(dbias, NULL, NULL, scratch, num, OC, exec);
}
// ==== end promoted: matmul_backward_bias ====
