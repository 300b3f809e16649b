/*
Kernels 8 and 9 of fused_residual_layernorm.cu, for other fused ops too: launched early, with or without a residual; the result
is floatX or e4m3. Constraint: 16 bits, C % 8 == 0, C <= 2048; kernel 9: sm_90a.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/ptx.cuh"
#include <cuda_fp8.h>

#if !defined(ENABLE_FP32)

// ---- kernel 8: one warp per row, programmatic dependent launch; options for fused ops: no residual, e4m3 output ----

// Stores 8 values as floatX or as e4m3. Both round to nearest; e4m3 saturates at 448.
__device__ inline void fused_residual_layernorm_store8(floatX* p, const float x[8]) {
    x128 y;
    for (int k = 0; k < 8; k++) { y[k] = (floatX)x[k]; }
    store128(p, y);
}
__device__ inline void fused_residual_layernorm_store8(__nv_fp8_e4m3* p, const float x[8]) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_e4m3x4(x[0], x[1], x[2], x[3]), pack_e4m3x4(x[4], x[5], x[6], x[7]));
}

// residual (N,C) = inp1 + inp2. norm (N,C) = layernorm(residual) times *multiplier, or times 1 if multiplier is NULL.
// mean and rstd (N) may be NULL. If inp2 is NULL, norm is the layernorm of inp1, and residual is not written.
// One warp per row, `warps` per block. A warp keeps its row in registers: num_vectors vectors of 8 elements per lane.
template <class Norm, int num_vectors, int warps = 8> __global__ void __launch_bounds__(32 * warps)
    fused_residual_layernorm_kernel8(Norm* norm, floatX* residual, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias,
                                     const float* multiplier, int N, int C, float epsilon) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    size_t start = (size_t)row * C;
    x128 x[num_vectors] = {}, y[num_vectors];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < num_vectors; i++) {
        int c = (lane + 32 * i) * x128::size;
        if (c < C) { x[i] = load128(inp1 + start + c); }
        if (c < C && inp2) { y[i] = load128(inp2 + start + c); }
    }
#pragma unroll
    for (int i = 0; i < num_vectors; i++) {
        int c = (lane + 32 * i) * x128::size;
        if (c < C && inp2) {
            for (int k = 0; k < 8; k++) { x[i][k] = (floatX)((float)x[i][k] + (float)y[i][k]); }
            store128(residual + start + c, x[i]);
        }
        for (int k = 0; k < 8; k++) { sum += (float)x[i][k]; } // x is 0 beyond the row
    }
    float m = warp_sum(sum) / C;
#pragma unroll
    for (int i = 0; i < num_vectors; i++) {
        for (int k = 0; k < 8 && (lane + 32 * i) * x128::size < C; k++) {
            float centered = (float)x[i][k] - m;
            squares += centered * centered;
        }
    }
    float r = rsqrtf(warp_sum(squares) / C + epsilon), scale = multiplier ? *multiplier : 1.0f;
    if (lane == 0 && mean) { mean[row] = m, rstd[row] = r; }
#pragma unroll
    for (int i = 0; i < num_vectors; i++) {
        int c = (lane + 32 * i) * x128::size;
        if (c >= C) { continue; }
        x128 w = load128(weight + c), b = load128(bias + c); // the same for all rows, so these loads hit L1
        float normed[8];
        for (int k = 0; k < 8; k++) { normed[k] = scale * (((float)x[i][k] - m) * r * (float)w[k] + (float)b[k]); }
        fused_residual_layernorm_store8(norm + start + c, normed);
    }
}
template <class Norm, int num_vectors = 1>
void fused_residual_layernorm_early(Norm* norm, floatX* residual, float* mean, float* rstd, const floatX* inp1,
                                    const floatX* inp2, const floatX* weight, const floatX* bias,
                                    const float* multiplier, int N, int C, float epsilon, const Execution& exec) {
    require(C % 8 == 0 && C <= 8 * 256);
    if constexpr (num_vectors < 8) {
        if (C > 256 * num_vectors) {
            return fused_residual_layernorm_early<Norm, num_vectors + 1>(norm, residual, mean, rstd, inp1, inp2, weight,
                                                                         bias, multiplier, N, C, epsilon, exec);
        }
    }
    launch_early(fused_residual_layernorm_kernel8<Norm, num_vectors>, dim3(ceil_div(N, 8)), dim3(256), 0, exec, norm,
                 residual, mean, rstd, inp1, inp2, weight, bias, multiplier, N, C, epsilon);
}

// ---- kernel 9: persistent, one block per SM; each warp has up to eight rows in flight by bulk copies ----

constexpr int FUSED_RESIDUAL_LAYERNORM_WARPS = 16, FUSED_RESIDUAL_LAYERNORM_STAGES = 8;

// Loads 8 elements as floats; p is aligned to 16 bytes.
__device__ inline void fused_residual_layernorm_load8(float (&x)[8], const floatX* p) {
    uint4 pairs = *reinterpret_cast<const uint4*>(p);
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    for (int k = 0; k < 4; k++) {
        float2 pair = unpack_16x2(words[k], floatX()); // half the instructions of two single conversions
        x[2 * k] = pair.x, x[2 * k + 1] = pair.y;
    }
}

// Like kernel 8, but with a ring of `stages` rows (pairs of rows, if inp2 is not NULL) per warp in shared memory. A lane
// holds num_vectors vectors of 8 neighbouring elements of a row. If `whole` is true, C == 256 * num_vectors, and no
// vector is outside the row.
template <int num_vectors, bool whole> __global__ void __launch_bounds__(32 * FUSED_RESIDUAL_LAYERNORM_WARPS, 1)
    fused_residual_layernorm_kernel9(floatX* normed, floatX* residual, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                     float epsilon, int stages) {
    // (warps, stages, 2 if inp2 else 1, C) floatX
    extern __shared__ __align__(128) int4 fused_residual_layernorm_rows[];
    __shared__ uint64_t barriers[FUSED_RESIDUAL_LAYERNORM_WARPS][FUSED_RESIDUAL_LAYERNORM_STAGES];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = (inp2 ? 2 : 1) * C;
    floatX* ring = (floatX*)fused_residual_layernorm_rows + (size_t)warp * stages * slot;
    uint64_t* full = barriers[warp];
    if (lane == 0) {
        for (int i = 0; i < stages; i++) { mbarrier_init(&full[i], 1); }
        mbarrier_init_fence();
    }
    __syncwarp();
    grid_launch_dependents();
    grid_wait_dependency();
    int row = blockIdx.x + gridDim.x * warp, step = gridDim.x * FUSED_RESIDUAL_LAYERNORM_WARPS;
    auto load = [&](int row, int stage) {
        int bytes = C * sizeof(floatX);
        mbarrier_arrive_expect(&full[stage], inp2 ? 2 * bytes : bytes);
        bulk_load(ring + stage * slot, inp1 + (size_t)row * C, bytes, &full[stage]);
        if (inp2) { bulk_load(ring + stage * slot + C, inp2 + (size_t)row * C, bytes, &full[stage]); }
    };
    if (lane == 0) {
        for (int i = 0; i < stages && row + i * step < N; i++) { load(row + i * step, i); }
    }
    auto column = [&](int i) { return (lane + 32 * i) * 8; };
    auto has = [&](int i) { return whole || column(i) < C; };
    const bool held = num_vectors <= 3; // weight and bias stay in registers; else every row loads them from L1
    float w[held ? num_vectors : 1][8], b[held ? num_vectors : 1][8];
    for (int i = 0; i < num_vectors && held; i++) {
        if (!has(i)) { continue; }
        fused_residual_layernorm_load8(w[i], weight + column(i));
        fused_residual_layernorm_load8(b[i], bias + column(i));
    }
    int stage = 0, parity = 0;
#pragma unroll 1
    for (; row < N; row += step) {
        size_t start = (size_t)row * C;
        float x[num_vectors][8], sums[num_vectors] = {}, squares[num_vectors] = {}, sum = 0.0f, square = 0.0f;
        mbarrier_wait(&full[stage], parity);
#pragma unroll
        for (int i = 0; i < num_vectors; i++) {
            if (!has(i)) { continue; }
            const floatX* place = ring + stage * slot + column(i);
            fused_residual_layernorm_load8(x[i], place);
            if (inp2) {
                float add[8];
                fused_residual_layernorm_load8(add, place + C);
                for (int k = 0; k < 8; k++) { x[i][k] = (float)(floatX)(x[i][k] + add[k]); }
                fused_residual_layernorm_store8(residual + start + column(i), x[i]);
            }
        }
        __syncwarp(); // all lanes have read the stage, so lane 0 may refill it
        if (lane == 0 && row + stages * step < N) { load(row + stages * step, stage); }
        if (++stage == stages) { stage = 0, parity ^= 1; }
#pragma unroll
        for (int i = 0; i < num_vectors; i++) {
            for (int k = 0; k < 8 && has(i); k++) { sums[i] += x[i][k]; }
            sum += sums[i];
        }
        float m = warp_sum(sum) / C;
#pragma unroll
        for (int i = 0; i < num_vectors; i++) {
            for (int k = 0; k < 8 && has(i); k++) {
                x[i][k] -= m;
                squares[i] += x[i][k] * x[i][k];
            }
            square += squares[i];
        }
        float r = rsqrtf(warp_sum(square) / C + epsilon);
        if (lane == 0) { mean[row] = m, rstd[row] = r; }
#pragma unroll
        for (int i = 0; i < num_vectors; i++) {
            if (!has(i)) { continue; }
            const int j = held ? i : 0;
            if (!held) {
                fused_residual_layernorm_load8(w[j], weight + column(i));
                fused_residual_layernorm_load8(b[j], bias + column(i));
            }
            for (int k = 0; k < 8; k++) { x[i][k] = x[i][k] * r * w[j][k] + b[j][k]; }
            fused_residual_layernorm_store8(normed + start + column(i), x[i]);
        }
    }
}

// residual, normed (N,C), mean, rstd (N) | inp1, inp2 (N,C), weight, bias (C); C <= 2048. If inp2 is NULL, normed is
// the layernorm of inp1, and residual is not written. Needs sm_90a.
template <int num_vectors = 1>
void fused_residual_layernorm_forward9(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       float epsilon, const Execution& exec,
                                       int max_stages = FUSED_RESIDUAL_LAYERNORM_STAGES) {
    require(N >= 1 && C % 8 == 0 && C <= 8 * 256 && max_stages <= FUSED_RESIDUAL_LAYERNORM_STAGES);
    if constexpr (num_vectors < 8) {
        if (C > 256 * num_vectors) {
            return fused_residual_layernorm_forward9<num_vectors + 1>(residual, normed, mean, rstd, inp1, inp2, weight,
                                                                      bias, N, C, epsilon, exec, max_stages);
        }
    }
    auto kernel = C == 256 * num_vectors ? fused_residual_layernorm_kernel9<num_vectors, true>
                                         : fused_residual_layernorm_kernel9<num_vectors, false>;
    int stage_bytes = FUSED_RESIDUAL_LAYERNORM_WARPS * C * sizeof(floatX) * (inp2 ? 2 : 1);
    int stages = min(max_stages, (220 << 10) / stage_bytes), bytes = stages * stage_bytes;
    int blocks = min(num_multiprocessors(), ceil_div(N, FUSED_RESIDUAL_LAYERNORM_WARPS));
    launch_early(kernel, dim3(blocks), dim3(32 * FUSED_RESIDUAL_LAYERNORM_WARPS), bytes, exec, normed, residual, mean,
                 rstd, inp1, inp2, weight, bias, N, C, epsilon, stages);
}

#endif
