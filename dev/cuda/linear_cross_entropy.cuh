/*
linear_cross_entropy_forward: losses (N) of the logits inp (N,C) weight (Vp,C)^T, over the first V columns; logits (N,Vp) is memory
for what the backward pass needs | targets (N) int | dloss (1) float, or NULL | scratch in floats
linear_cross_entropy_backward: dinp (N,C), dweight (Vp,C) float, written, or += if accumulate; inp is overwritten
Constraint: C % 8 == 0, Vp % 8 == 0, 1 <= V <= Vp, pointers aligned to 16 bytes.
Kernels 1 (logits, then fused_classifier) and 2 (softmax begins in gemm; bf16, sm_90a) of linear_cross_entropy.cu, which has errors
and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "fused_classifier.cuh"
#include "gemm.cuh"
#include "matmul_backward.cuh"
#include "matmul_forward.cuh"

// ==== promoted: linear_cross_entropy ====
// ---- kernel 1: the product, fused_classifier on the logits in memory, the products of the backward pass ----

// What both passes are given.
struct LinearCrossEntropy {
    floatX* logits;       // (N,Vp): memory for what the forward pass leaves for the backward pass
    float* losses;        // (N)
    float* scratch;       // forward: (linear_cross_entropy_scratch); backward: (matmul_backward_weight_scratch)
    floatX* inp;          // (N,C); the backward pass overwrites it
    const floatX* weight; // (Vp,C)
    const int* targets;   // (N), for the forward pass
    const float* dloss;   // (1), or NULL if no backward pass follows
    int N, C, V, Vp;
};

void linear_cross_entropy_forward1(const LinearCrossEntropy& g, const Execution& exec) {
    matmul_forward(g.logits, NULL, g.inp, g.weight, NULL, NULL, g.N, g.C, g.Vp, exec);
    fused_classifier(g.logits, g.losses, g.targets, g.dloss, g.N, g.V, g.Vp, exec);
}

// dinp = dout weight, dweight = dout^T inp, or += if accumulate, with dout (N,Vp) in the memory of the logits
void linear_cross_entropy_backward1(const LinearCrossEntropy& g, floatX* dinp, float* dweight, bool accumulate,
                                    const Execution& exec) {
    matmul_backward_weight(dweight, g.scratch, g.logits, g.inp, g.N, g.C, g.Vp, accumulate, exec);
    matmul_backward_input(dinp, NULL, g.scratch, g.logits, g.weight, NULL, g.N, g.C, g.Vp, exec);
}
// ---- kernel 2: softmax begins in the product's epilogue, so no pass reads and writes the logits ----

// dlogits[i][v] = (softmax(logits)[i][v] - onehot(target)[v]) * dloss needs the sum of a row of exponentials before its first
// element is known, so a classifier reads all logits and writes them again. But the sum is one number for the row, and a factor
// of a row can wait. The product's epilogue stores
//
//     ratio[i][v] = RATIO_UNIT * exp(logits[i][v] - logits[i][target])
//
// and sums each row. Rounding a ratio to bf16 costs the same relative error as rounding dlogits. The target's column needs
// ratio - sum, which the third kernel writes once the sum is known. Then dlogits[i][v] = ratio[i][v] * dloss / sum[i]. This
// factor of row i multiplies two small tensors instead: inp, before the product for dweight, and dinp, after its product.
//
// The target's logit, computed before, stands in for the maximum that softmax usually subtracts. Its ratio is RATIO_UNIT = 2^-40,
// the largest is limited to 2^100, and below 2^-126 a ratio is 0, so that ratios, their sums and the products fit bf16's range,
// which is that of fp32. 2^140 is exp(97), 2^86 is exp(60).
#if defined(ENABLE_BF16)
constexpr float RATIO_UNIT = 0x1p-40f, RATIO_LOG2_UNIT = -40.0f, RATIO_LOG2_MAX = 100.0f;

// shifts (N) = log2(RATIO_UNIT) - log2(e) * logit of the target. A warp per row.
__global__ void linear_cross_entropy_shift_kernel2(float* shifts, const floatX* inp, const floatX* weight,
                                                   const int* targets, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    const floatX *x = inp + (size_t)row * C, *w = weight + (size_t)targets[row] * C;
    float logit = 0.0f;
    for (int i = lane * x128::size; i < C; i += 32 * x128::size) {
        auto a = to_floats(load128(x + i)), b = to_floats(load128(w + i));
        for (int e = 0; e < x128::size; e++) { logit += a[e] * b[e]; }
    }
    logit = warp_sum(logit);
    if (lane == 0) { shifts[row] = RATIO_LOG2_UNIT - LOG2E * logit; }
}

// The epilogue for gemm(): ratios, and the sum of each row in each tile of columns. A column's bias is 0, or -infinity from V on.
struct GemmRatios : GemmBias<GEMM_ROW_SUMS> {
    const float* shifts; // (N)
    float* sums;         // (tiles of columns, N)
    int N, V;

    typedef float Row;
    __device__ Row row(int i) const { return shifts[i]; } // the kernel before writes them, so not __ldg()
    __device__ Pair pair(int column) const {
        return pack_16x2(column < V ? 0.0f : -INFINITY, column + 1 < V ? 0.0f : -INFINITY, floatX());
    }
    __device__ float value(float sum, const Row& shift, const Column& c) const {
        return exp2_approx(min_or_nan(fmaf(sum, LOG2E, shift) + c, RATIO_LOG2_MAX));
    }
    __device__ void store_row_sum(int i, int tile, float sum) const { sums[(size_t)tile * N + i] = sum; }
};

// losses from the sums (num_tiles,N), which a block of 8 warps adds up for 32 rows: warp w takes every 8th tile. For a backward
// pass also the ratio at the target's column.
__global__ void __launch_bounds__(256)
    linear_cross_entropy_finish_kernel2(floatX* ratios, float* losses, const float* sums, const int* targets,
                                        int num_tiles, int N, int Vp, bool backward_follows) {
    __shared__ float shared[8][32];
    grid_launch_dependents();
    grid_wait_dependency();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (row < N) {
#pragma unroll 8
        for (int t = warp; t < num_tiles; t += 8) { sum += sums[(size_t)t * N + row]; }
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || row >= N) { return; }
    for (int w = 1; w < 8; w++) { sum += shared[w][lane]; }
    // log1pf because logf() under --use_fast_math is less exact near 1; a large sum divided by the unit would overflow
    float loss = sum < 0x1p80f ? log1pf(sum / RATIO_UNIT - 1.0f) : log1pf(sum - 1.0f) - RATIO_LOG2_UNIT / LOG2E;
    losses[row] = loss < 0.0f ? 0.0f : loss; // by rounding of the shift; NaN stays
    if (backward_follows) { ratios[(size_t)row * Vp + targets[row]] = (floatX)(RATIO_UNIT - sum); }
}

// x (N,C) *= dloss / sum of the row's ratios, which is dloss / RATIO_UNIT * exp(-loss). A warp per row.
__global__ void linear_cross_entropy_scale_kernel2(floatX* x, const float* losses, const float* dloss, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    float scale = *dloss * exp2_approx(-RATIO_LOG2_UNIT - LOG2E * losses[row]);
    for (int i = lane * x128::size; i < C; i += 32 * x128::size) {
        auto v = to_floats(load128(x + (size_t)row * C + i));
        x128 y;
        for (int e = 0; e < x128::size; e++) { y[e] = (floatX)(v[e] * scale); }
        store128(x + (size_t)row * C + i, y);
    }
}
void linear_cross_entropy_scale2(floatX* x, const LinearCrossEntropy& g, const Execution& exec) {
    Op op(exec, 2.0 * g.N * g.C * sizeof(floatX), 0, "scale_rows %d", g.C);
    launch_early(linear_cross_entropy_scale_kernel2, ceil_div(g.N, 8), 256, 0, exec, x, (const float*)g.losses, g.dloss,
                 g.N, g.C);
}

inline int linear_cross_entropy_tiles(int Vp) { return ceil_div(Vp, GemmPingPong192Pairs::COLUMNS); }

void linear_cross_entropy_forward2(const LinearCrossEntropy& g, const Execution& exec) {
    float *shifts = g.scratch, *sums = g.scratch + g.N;
    int num_tiles = linear_cross_entropy_tiles(g.Vp);
    Op op(exec, ((double)g.N * (g.C + g.Vp) + (double)g.Vp * g.C) * sizeof(floatX), 2.0 * g.N * g.C * g.Vp,
          "matmul_forward %d -> %d, loss", g.C, g.Vp);
    launch_early(linear_cross_entropy_shift_kernel2, ceil_div(g.N, 8), 256, 0, exec, shifts, (const floatX*)g.inp,
                 g.weight, g.targets, g.N, g.C);
    gemm(GemmArgs{g.logits, NULL, g.inp, g.weight, NULL, g.N, g.Vp, g.C}, GemmRatios{{NULL}, shifts, sums, g.N, g.V},
         exec);
    launch_early(linear_cross_entropy_finish_kernel2, ceil_div(g.N, 32), 256, 0, exec, g.logits, g.losses,
                 (const float*)sums, g.targets, num_tiles, g.N, g.Vp, g.dloss != NULL);
}

void linear_cross_entropy_backward2(const LinearCrossEntropy& g, floatX* dinp, float* dweight, bool accumulate,
                                    const Execution& exec) {
    linear_cross_entropy_scale2(g.inp, g, exec);
    linear_cross_entropy_backward1(g, dinp, dweight, accumulate, exec);
    linear_cross_entropy_scale2(dinp, g, exec);
}

// The number of the kernel for this device, binary and shape: 2 where matmul_forward() would take gemm(), which alone has this
// epilogue; in other types 1.
inline int linear_cross_entropy_choice(int N, int C, int Vp) { return matmul_forward_choice(N, C, Vp) == 27 ? 2 : 1; }
// Floats of scratch for the forward pass.
size_t linear_cross_entropy_scratch(int N, int C, int Vp) {
    return linear_cross_entropy_choice(N, C, Vp) == 2 ? (size_t)N * (1 + linear_cross_entropy_tiles(Vp)) : 0;
}
#else
inline int linear_cross_entropy_choice(int, int, int) { return 1; }
size_t linear_cross_entropy_scratch(int, int, int) { return 0; }
#endif

// losses (N) = log(sum(exp(logits))) - logits[target] over the first V of the Vp columns of inp (N,C) weight (Vp,C)^T | targets (N),
// each in [0,V) | dloss (1), or NULL if no backward pass follows | logits (N,Vp) is filled for linear_cross_entropy_backward; if
// dloss is NULL, the first V numbers of a row are its logits (kernel 1), or ratios that increase with its logits (kernel 2)
// | scratch (linear_cross_entropy_scratch(N, C, Vp))
void linear_cross_entropy_forward(floatX* logits, float* losses, float* scratch, const floatX* inp,
                                  const floatX* weight, const int* targets, const float* dloss, int N, int C, int V,
                                  int Vp, const Execution& exec) {
    require(C % 8 == 0 && Vp % 8 == 0 && 1 <= V && V <= Vp);
    LinearCrossEntropy g = {logits, losses, scratch, (floatX*)inp, weight, targets, dloss, N, C, V, Vp};
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) { return linear_cross_entropy_forward2(g, exec); }
#endif
    linear_cross_entropy_forward1(g, exec);
}

// dinp (N,C) = dlogits weight, dweight (Vp,C) = dlogits^T inp, or += if accumulate, where dlogits = (softmax(logits) -
// onehot(target)) * dloss. Call after the forward pass with dloss, whose logits, losses, inp and weight these are; inp is
// overwritten | scratch (matmul_backward_weight_scratch(N, C, Vp))
void linear_cross_entropy_backward(floatX* dinp, float* dweight, float* scratch, floatX* logits, float* losses,
                                   floatX* inp, const floatX* weight, const float* dloss, int N, int C, int Vp,
                                   bool accumulate, const Execution& exec) {
    require(dloss);
    LinearCrossEntropy g = {logits, losses, scratch, inp, weight, NULL, dloss, N, C, Vp, Vp};
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) {
        return linear_cross_entropy_backward2(g, dinp, dweight, accumulate, exec);
    }
#endif
    linear_cross_entropy_backward1(g, dinp, dweight, accumulate, exec);
}
// ==== end promoted: linear_cross_entropy ====
