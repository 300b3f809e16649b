/*
layernorm_backward: dinp (N,C) = gradient of inp + dresidual (N,C), which may be NULL or dinp | dweight, dbias (C) += |
dinp_sums (C), or NULL, += the column sums of dinp | dout, inp (N,C), weight (C), mean, rstd (N) | scratch in floats
Constraint: C % 8 == 0; C <= 6144 in fp32, 8192 in 16 bits.
Kernel 11 of layernorm_backward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/column_sums.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: layernorm_backward ====
// ---- kernel 11: 5 with the next rows copied ahead by cp.async ----

constexpr int LAYERNORM_BACKWARD_BLOCK_SIZE = 256;  // the largest; two blocks leave 128 registers per thread
constexpr int LAYERNORM_BACKWARD_BLOCKS_PER_SM = 4; // at most; bounds the number of partial sums
constexpr int LAYERNORM_BACKWARD_STAGES = 2;
// A thread of at most so many vectors has a ring. For 4 vectors, the block needs 96 KB: from 8.0 on, it may have 99 KB or
// more. Before 8.0, there is no cp.async.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int LAYERNORM_BACKWARD_RING_VECS = 0;
#else
constexpr int LAYERNORM_BACKWARD_RING_VECS = 4;
#endif

// A block processes `rows` rows at a time; thread t holds the vectors t, t + blockDim.x ... of each row. It has the same
// columns in every row, so it sums dweight and dbias in registers. column_sums() adds the partial sums of all blocks.
// While the sums of these rows are computed, cp.async copies the rows of the next turns into a ring in shared memory. A
// thread reads only what it copied itself, so the only barrier is that of the row sums. dy, x and dx are read from the
// ring a second time for dinp: that costs less than the registers that would hold them.
//                before the loop    1st turn          2nd turn          3rd turn
//     stage 0    copy turn 0        read 0, copy 2    (2 in flight)     read 2, copy 4
//     stage 1    copy turn 1        (1 in flight)     read 1, copy 3    (3 in flight)
// Without a ring, the vectors are read from global memory both times, the second time from the caches. num_sums: 2, or 3
// to also sum the columns of dinp.
template <int num_vecs, int num_sums>
__global__ void __launch_bounds__(LAYERNORM_BACKWARD_BLOCK_SIZE, num_vecs == 1 && LAYERNORM_BACKWARD_RING_VECS ? 2 : 1)
    layernorm_backward_kernel11(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                                const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                                int C) {
    constexpr int rows = num_vecs < 4 ? 4 / num_vecs : 1;
    constexpr bool has_ring = num_vecs <= LAYERNORM_BACKWARD_RING_VECS;
    extern __shared__ __align__(128) int4 layernorm_backward_ring11[]; // (stages, rows, num_vecs, 3, blockDim.x)
    // [stage][warp]: sum and dot of each row. The stages alternate, so one barrier per turn is enough
    __shared__ float shared[LAYERNORM_BACKWARD_STAGES][LAYERNORM_BACKWARD_BLOCK_SIZE / 32][8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int first = threadIdx.x * x128::size, stride = blockDim.x * x128::size, row_step = gridDim.x * rows, stage = 0;
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {}, dx_sum[num_vecs][x128::size] = {};
    float inv_C = 1.0f / C, next_mean[rows], next_rstd[rows];
    grid_launch_dependents();
    grid_wait_dependency();
    x128 w[num_vecs] = {};
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (first + j * stride < C) { w[j] = load128(weight + first + j * stride); }
    }
    // rows of 4 or more vectors per thread leave no registers for the weights, which are then reread from L1
    auto vector_of_weight = [&](int j) {
        if (num_vecs < 4) { return to_floats(w[j]); }
        return to_floats(first + j * stride < C ? load128(weight + first + j * stride) : x128());
    };
    auto slots = [&](int of_stage) {
        return layernorm_backward_ring11 + of_stage * rows * num_vecs * 3 * blockDim.x + threadIdx.x;
    };
    // what is past the end of a row, or of all rows, becomes 0 and adds nothing
    auto fetch = [&](int start, int to_stage) {
        if constexpr (!has_ring) { return; }
        size_t at = (size_t)start * C + first;
        const floatX *from_dout = dout + at, *from_inp = inp + at,
                     *from_dresidual = (dresidual ? dresidual : dout) + at;
        int4* to = slots(to_stage);
#pragma unroll
        for (int i = 0; i < rows; i++) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                bool valid = start + i < N && first + j * stride < C;
                int offset = i * C + j * stride;
                int4* slot = to + (i * num_vecs + j) * 3 * blockDim.x;
                cp_async_16(slot, from_dout + offset, valid);
                cp_async_16(slot + blockDim.x, from_inp + offset, valid);
                cp_async_16(slot + 2 * blockDim.x, from_dresidual + offset, valid && dresidual);
            }
        }
        cp_async_commit();
    };
    auto fetch_statistics = [&](int start) {
#pragma unroll
        for (int i = 0; i < rows; i++) {
            next_mean[i] = start + i < N ? mean[start + i] : 0.0f;
            next_rstd[i] = start + i < N ? rstd[start + i] : 0.0f;
        }
    };
    int start = blockIdx.x * rows;
    for (int i = 0; i < LAYERNORM_BACKWARD_STAGES; i++) { fetch(start + i * row_step, i); }
    fetch_statistics(start);
    for (; start < N; start += row_step) {
        float m[rows], r[rows], sums[8] = {};
#pragma unroll
        for (int i = 0; i < rows; i++) { m[i] = next_mean[i], r[i] = next_rstd[i]; }
        fetch_statistics(start + row_step);
        if constexpr (has_ring) { cp_async_wait<LAYERNORM_BACKWARD_STAGES - 1>(); }
        const int4* own = slots(stage);
        auto vector = [=](int i, int j, int which) { // 0: dout, 1: inp, 2: dresidual
            if constexpr (has_ring) {
                return to_floats(vec128_from_bits<floatX>(own[((i * num_vecs + j) * 3 + which) * blockDim.x]));
            }
            const floatX* tensor = which == 0 ? dout : which == 1 ? inp : dresidual;
            bool valid = tensor && start + i < N && first + j * stride < C;
            return to_floats(valid ? load128(tensor + (size_t)(start + i) * C + first + j * stride) : x128());
        };
#pragma unroll
        for (int i = 0; i < rows; i++) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                auto dy = vector(i, j, 0), x = vector(i, j, 1), scale = vector_of_weight(j);
                for (int k = 0; k < x128::size; k++) {
                    float centered = x[k] - m[i], dnorm = dy[k] * scale[k];
                    sums[2 * i] += dnorm;
                    sums[2 * i + 1] += dnorm * centered;
                    dw[j][k] += dy[k] * r[i] * centered;
                    db[j][k] += dy[k];
                }
            }
            sums[2 * i + 1] *= r[i];
        }
        float warp_total = warp_sums<8>(sums);
        if (lane % 4 == 0) { shared[stage][warp][lane / 4] = warp_total; }
        __syncthreads();
        static_assert(LAYERNORM_BACKWARD_BLOCK_SIZE <= 8 * 32); // this lane: sum lane % 8 of two of the warps
        float total = lane / 8 < num_warps ? shared[stage][lane / 8][lane % 8] : 0.0f;
        if (lane / 8 + 4 < num_warps) { total += shared[stage][lane / 8 + 4][lane % 8]; }
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 8);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 16);
        total *= inv_C;
        // dinp = dresidual + rstd * (dnorm - sum - norm * dot) is a sum of dresidual, dnorm and inp with factors of the row
#pragma unroll
        for (int i = 0; i < rows; i++) {
            float sum = __shfl_sync(0xFFFFFFFFu, total, 2 * i), dot = __shfl_sync(0xFFFFFFFFu, total, 2 * i + 1);
            float of_inp = -r[i] * r[i] * dot, constant = -r[i] * sum - of_inp * m[i];
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                auto dy = vector(i, j, 0), x = vector(i, j, 1), dx = vector(i, j, 2), scale = vector_of_weight(j);
                x128 result;
                for (int k = 0; k < x128::size; k++) {
                    float y = dx[k] + constant + r[i] * (dy[k] * scale[k]) + of_inp * x[k];
                    if (num_sums == 3) { dx_sum[j][k] += y; }
                    result[k] = (floatX)y;
                }
                int c = first + j * stride;
                if (start + i < N && c < C) { store128(dinp + (size_t)(start + i) * C + c, result); }
            }
        }
        fetch(start + LAYERNORM_BACKWARD_STAGES * row_step, stage); // this thread has read what is in this stage
        stage = (stage + 1) % LAYERNORM_BACKWARD_STAGES;
    }
    if constexpr (has_ring) { cp_async_wait<0>(); }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        int c = first + j * stride;
#pragma unroll
        for (int k = 0; k < x128::size && c < C; k += f128::size) {
#pragma unroll
            for (int which = 0; which < num_sums; which++) {
                f128 sum;
                for (int i = 0; i < f128::size; i++) {
                    sum[i] = which == 0 ? dw[j][k + i] : which == 1 ? db[j][k + i] : dx_sum[j][k + i];
                }
                store128(partials + ((size_t)blockIdx.x * num_sums + which) * C + c + k, sum);
            }
        }
    }
}

// Number of floats in scratch: the partial sums of dweight, dbias and the columns of dinp of every block.
size_t layernorm_backward_scratch(int C) {
    return (size_t)num_multiprocessors() * LAYERNORM_BACKWARD_BLOCKS_PER_SM * 3 * C;
}

// dinp (N,C) = dresidual + gradient of inp; dweight, dbias (C) += their gradients | dinp_sums (C) += the sums of dinp's
// columns, the gradient of a bias that was added to inp; may be NULL
// | scratch (layernorm_backward_scratch(C)) | dout (N,C); dresidual (N,C), may be NULL (then 0) or dinp; inp (N,C);
// weight (C); mean, rstd (N)
void layernorm_backward(floatX* dinp, float* dinp_sums, float* dweight, float* dbias, float* scratch,
                        const floatX* dout, const floatX* dresidual, const floatX* inp, const floatX* weight,
                        const float* mean, const float* rstd, int N, int C, const Execution& exec) {
    Op op(exec, (dresidual ? 4.0 : 3.0) * N * C * sizeof(floatX), 0, "layernorm_backward");
    require(N >= 1 && C >= 8 && C % 8 == 0 && C <= (sizeof(floatX) == 4 ? 6144 : 8192));
    int num_vectors = C / x128::size, i = 0, resident;
    constexpr int vecs[] = {1, 2, 4, 6}; // per thread; 6 only in fp32
    while (num_vectors > vecs[i] * LAYERNORM_BACKWARD_BLOCK_SIZE) { i++; }
    int block_size = 32 * ceil_div(num_vectors, 32 * vecs[i]), rows = max(4 / vecs[i], 1);
    auto kernel = layernorm_backward_kernel11<1, 2>;
    with_constant<sizeof(floatX) == 4 ? 4 : 3>(i + 1, [&](auto n) {
        constexpr int num_vecs = vecs[n.value - 1];
        kernel = dinp_sums ? layernorm_backward_kernel11<num_vecs, 3> : layernorm_backward_kernel11<num_vecs, 2>;
    });
    bool has_ring = vecs[i] <= LAYERNORM_BACKWARD_RING_VECS && compiled_arch(kernel) >= 80;
    size_t ring_bytes =
        has_ring ? (size_t)LAYERNORM_BACKWARD_STAGES * rows * vecs[i] * 3 * block_size * sizeof(x128) : 0;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)ring_bytes));
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, ring_bytes));
    // what is measured is the number of threads of the blocks that run side by side on an SM
    int threads_per_sm = tuned_block_size(exec, "layernorm_backward", N, C, 0);
    int blocks_per_sm = threads_per_sm ? max(threads_per_sm / block_size, 1)
                        : !has_ring    ? LAYERNORM_BACKWARD_BLOCKS_PER_SM
                                       : (block_size < LAYERNORM_BACKWARD_BLOCK_SIZE ? 2 : 1);
    blocks_per_sm = min(min(resident, blocks_per_sm), LAYERNORM_BACKWARD_BLOCKS_PER_SM);
    int grid_size = min(exec.free_sms() * blocks_per_sm, ceil_div(N, rows));
    launch_early(kernel, dim3(grid_size), dim3(block_size), ring_bytes, exec, dinp, scratch, dout, dresidual, inp,
                 weight, mean, rstd, N, C);
    column_sums<16>(dweight, dbias, dinp_sums, scratch, grid_size, C, exec);
}
// ==== end promoted: layernorm_backward ====
