// Sums over the rows of small matrices. Kernels whose blocks each have sums of some rows write them as `partials`, a row per
// block, and column_sums() adds these rows to the result, in a fixed order.
#pragma once

#include "cuda_common.cuh"
#include "profile.cuh"
#include "utils.h"

// out (C) += the sums of the columns of `partials`, num_partials rows of C floats, which begin `stride` floats apart.
struct ColumnSum {
    float* out;
    const float* partials;
    int num_partials, stride, C;
};

// What one launch adds up: at most three results of each of the four operations of a layer's backward pass that have some.
// With exec.sums, the operations only add to the list, and column_sums_flush() launches it. Until then, `partials` must not
// be overwritten.
constexpr int COLUMN_SUMS_MOST = 12;
struct ColumnSums {
    int n = 0;
    ColumnSum sums[COLUMN_SUMS_MOST];
    void add(const ColumnSum& sum) {
        require(n < COLUMN_SUMS_MOST);
        sums[n++] = sum;
    }
};

// A block sums 32 columns of one matrix: each warp sums every num_warps-th row, then the first warp adds up the sums of all
// warps, always in the same order.
template <int num_warps> __global__ void __launch_bounds__(32 * num_warps)
    column_sums_kernel(const __grid_constant__ ColumnSums list) {
    constexpr int unroll = 128 / num_warps; // 128 rows in flight per block
    __shared__ float sums[num_warps][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x, i = 0;
    for (; block >= ceil_div(list.sums[i].C, 32); i++) { block -= ceil_div(list.sums[i].C, 32); }
    const ColumnSum& s = list.sums[i];
    int c = block * 32 + lane;
    grid_wait_dependency();
    float sum = 0.0f;
    if (c < s.C) {
#pragma unroll unroll
        for (int row = warp; row < s.num_partials; row += num_warps) { sum += s.partials[(size_t)row * s.stride + c]; }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= s.C) { return; }
    for (int w = 1; w < num_warps; w++) { sum += sums[w][lane]; }
    s.out[c] += sum;
}

// The kernel launches early, while the kernel that writes partials is still ending.
template <int num_warps> void column_sums_launch(const ColumnSums& list, const Execution& exec) {
    int num_blocks = 0;
    for (int i = 0; i < list.n; i++) { num_blocks += ceil_div(list.sums[i].C, 32); }
    launch_early(column_sums_kernel<num_warps>, dim3(num_blocks), 32 * num_warps, 0, exec, list);
}

// out0 (C) += the column sums of partials (num_partials, C). If out1 (C) is not NULL, partials (num_partials, 2, C) hold
// the terms of both outputs; with out2, too, those of three. num_warps: of a block.
template <int num_warps> void column_sums(float* out0, float* out1, float* out2, const float* partials,
                                          int num_partials, int C, const Execution& exec) {
    require(out1 || !out2);
    float* outs[] = {out0, out1, out2};
    int num_outs = out2 ? 3 : out1 ? 2 : 1;
    ColumnSums now;
    ColumnSums& list = exec.sums ? *exec.sums : now;
    for (int i = 0; i < num_outs; i++) { list.add({outs[i], partials + (size_t)i * C, num_partials, num_outs * C, C}); }
    if (now.n > 0) { column_sums_launch<num_warps>(now, exec); }
}

// Launches the sums of exec.sums, and empties the list.
inline void column_sums_flush(const Execution& exec) {
    ColumnSums& list = *exec.sums;
    if (list.n == 0) { return; }
    double bytes = 0;
    for (int i = 0; i < list.n; i++) { bytes += (double)list.sums[i].num_partials * list.sums[i].C * sizeof(float); }
    Op op(exec, bytes, 0, "column_sums");
    column_sums_launch<16>(list, exec);
    list.n = 0;
}
