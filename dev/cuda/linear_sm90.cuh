/*
out (N,OC) = finish(change(inp (N,K)) weight (OC,K)^T): a cooperative matmul by wgmma and TMA with a producer warpgroup. A class Op has
`finish` for the result, and may look at inp or `change` it on the way to the tensor cores.
Constraint: sm_90a, 16-bit floatX, K % 8 == 0, OC % 8 == 0. Shared by layernorm_linear.cu and gelu_linear.cu.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/tma_ring.cuh"
#include "gemm.cuh"
#include <algorithm>
#include <limits.h>

#if !defined(ENABLE_FP32)

// ---- shared by kernels 4 and 5 and gelu_linear.cu: a warp-specialised, cooperative product by wgmma and TMA ----
// One persistent block per SM, with tiles of 128 rows and 256 columns of out. A producer warpgroup loads; two consumer
// warpgroups multiply 64 rows of the tile each. The second consumer lags behind the first by LINEAR_LAG steps, so that
// the first is already in its next tile while the second stores:
//
//     consumer 0     | products, tile 0 | epilogue | products, tile 1 | epilogue | ...
//     consumer 1       | products, tile 0 | epilogue | products, tile 1 | epilogue | ...

constexpr int LINEAR_RING = 4, LINEAR_LAG = 1; // lag of the second consumer, in steps of 64 columns
struct LinearStage {                           // 64 columns of both operands, in TMA's swizzle
    floatX inp[128 * 64], weight[256 * 64];
};
struct LinearSMem {
    static constexpr int RING = LINEAR_RING;
    LinearStage stages[LINEAR_RING];
    floatX out[8][2][16 * 64]; // results of each consumer warp: two boxes of 16 rows and 64 columns
    TmaRing<LINEAR_RING> ring;
};
static_assert(sizeof(LinearStage) == 48 * 1024, "TMA announces this many bytes");
static_assert(sizeof(LinearSMem) + 1024 <= 227 * 1024, "a block an SM");

// Tiles are numbered row by row, `columns` tiles per row. With `neighbours`, a block takes consecutive tiles, which
// share rows of inp. Otherwise it takes every num_blocks-th tile, so that blocks that run together share rows of inp.
struct LinearTiles {
    int N, K, OC, columns, num;
};
struct LinearRange {
    int begin, end, step;
};
__device__ inline LinearRange linear_range(const LinearTiles& tiles, bool neighbours) {
    int i = blockIdx.x, n = gridDim.x;
    if (!neighbours) { return {i, tiles.num, n}; }
    return {(int)((int64_t)tiles.num * i / n), (int)((int64_t)tiles.num * (i + 1) / n), 1};
}

// Offset in bytes of a 16-byte chunk of a row. A row of a tile has 64 columns, 128 bytes, in TMA's 128-byte swizzle:
//
//     row 0    chunks 0 1 2 3 4 5 6 7
//     row 1           1 0 3 2 5 4 7 6     position p of row r holds chunk p ^ r % 8, so the same chunk of 8
//     row 2           2 3 0 1 6 7 4 5     consecutive rows falls on all 32 banks
__device__ inline uint32_t linear_swizzle(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// The producer thread: fills the ring.
__device__ void linear_load(LinearSMem& shared, const CUtensorMap& inp_map, const CUtensorMap& weight_map,
                            LinearTiles tiles, LinearRange range) {
    int num_steps = ceil_div(tiles.K, 64), i = 0;
    for (int tile = range.begin; tile < range.end; tile += range.step) {
        for (int step = 0; step < num_steps; step++, i++) {
            LinearStage& stage = shared.stages[i % LINEAR_RING];
            uint64_t* full = shared.ring.acquire(i, sizeof(LinearStage));
            tma_load_2d(stage.inp, &inp_map, step * 64, tile / tiles.columns * 128, full);
            tma_load_2d(stage.weight, &weight_map, step * 64, tile % tiles.columns * 256, full);
        }
    }
}

// Releases stage i after this warp has read it. A stage is empty when all eight consumer warps have arrived.
__device__ inline void linear_release(LinearSMem& shared, int i) {
    __syncwarp(); // all lanes have read the stage
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&shared.ring.empty[i % LINEAR_RING]); }
}

// Loads the column data that op.finish needs for this thread. Of 64 columns a thread has eight pairs, 8 columns apart.
template <class Op>
__device__ inline void linear_columns(const Op& op, typename Op::Columns (&columns)[8], int column) {
#pragma unroll
    for (int j = 0; j < 8; j++) { columns[j] = op.columns(column + 8 * j + threadIdx.x % 4 * 2); }
}

// The epilogue: stores a warp's 16 rows and 256 columns, 64 columns at a time. op.finish(y, columns) turns accumulators
// into results in place: two neighbours of row lane / 4 in y[0] and y[1], two of row lane / 4 + 8 in y[2] and y[3].
// `columns` is loaded for the first 64 columns; for the following ones it is loaded one iteration ahead.
template <class Op> __device__ inline void linear_store(const Op& op, typename Op::Columns (&columns)[8],
                                                        floatX (*boxes)[16 * 64], const CUtensorMap& out_map,
                                                        float (&sum)[128], int row0, int column0,
                                                        const LinearTiles& tiles) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        int column = column0 + 64 * q;
        typename Op::Columns next[8];
        if (q < 3) { linear_columns(op, next, column + 64); }
        if (lane == 0) { tma_store_wait<1>(); } // the previous store from this box has read it
        __syncwarp();
        uint32_t box = shared_address(boxes[q % 2]);
#pragma unroll
        for (int j = 0; j < 8; j += 2) { // 16 columns per iteration
            uint32_t packed[4];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float* y = &sum[32 * q + 4 * (j + e)];
                op.finish(y, columns[j + e]);
                packed[2 * e] = pack_16x2(y[0], y[1], floatX());
                packed[2 * e + 1] = pack_16x2(y[2], y[3], floatX());
            }
            stmatrix_x4(box + linear_swizzle(lane % 16, j + lane / 16), packed);
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            if (row0 < tiles.N && column < tiles.OC) { tma_store_2d(&out_map, boxes[q % 2], column, row0); }
            tma_store_commit();
        }
        if (q < 3) {
#pragma unroll
            for (int j = 0; j < 8; j++) { columns[j] = next[j]; }
        }
    }
}

// The second consumer starts its first tile LINEAR_LAG steps after the first consumer, and stays behind: during the
// epilogue of one, the other has the tensor cores to itself.
constexpr int LINEAR_LAG_BARRIER = 1;
__device__ inline void linear_lag_wait(bool first_tile, int group) {
    if (first_tile && group == 1) { named_barrier_sync(LINEAR_LAG_BARRIER, 256); }
}
__device__ inline void linear_lag_arrive(bool first_tile, int group, int step, int num_steps) {
    if (first_tile && group == 0 && step == min(LINEAR_LAG, num_steps) - 1) {
        named_barrier_arrive(LINEAR_LAG_BARRIER, 256);
    }
}

// The main loop with both operands in shared memory: sum = 64 rows of inp times the 256 rows of the weight's tile.
// op.look() sees the rows of inp in shared memory while the products run.
template <class Op> __device__ inline void linear_multiply_plain(Op& op, LinearSMem& shared, float (&sum)[128],
                                                                 int group, bool first_tile, int num_steps, int& i) {
    linear_lag_wait(first_tile, group);
    for (int step = 0; step < num_steps; step++, i++) {
        LinearStage& stage = shared.stages[i % LINEAR_RING];
        const floatX* inp = stage.inp + group * 64 * 64;
        shared.ring.wait(i);
        uint64_t a = wgmma_descriptor(inp), b = wgmma_descriptor(stage.weight);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 columns are 32 bytes, 2 in the descriptor's units of 16 bytes
            wgmma_64x256x16(sum, a + 2 * k, b + 2 * k, step > 0 || k > 0, floatX());
        }
        wgmma_commit();
        linear_lag_arrive(first_tile, group, step, num_steps);
        op.look(inp, step * 64);
        wgmma_wait<1>(); // the previous step's products have completed: its stage can be released
        if (step > 0) { linear_release(shared, i - 1); }
    }
    wgmma_wait<0>();
    linear_release(shared, i - 1);
}

// The main loop with inp as operand from registers: ldmatrix loads fragments in wgmma's layout, and op.change()
// changes each fragment of 16 columns before the product. The next step's fragments are loaded and changed while the
// products of this step run.
template <class Op, class Shared> __device__ inline void
linear_multiply_changed(Op& op, Shared& shared, float (&sum)[128], int group, bool first_tile, int num_steps, int& i) {
    int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane % 16;
    auto change = [&](uint32_t(&a)[16], int i, int step) {
        uint32_t inp = shared_address(shared.stages[i % Shared::RING].inp);
        shared.ring.wait(i);
#pragma unroll
        for (int k = 0; k < 4; k++) { ldmatrix_x4(a + 4 * k, inp + linear_swizzle(row, 2 * k + lane / 16)); }
#pragma unroll
        for (int k = 0; k < 4; k++) { op.change(a + 4 * k, step * 64 + 16 * k + lane % 4 * 2); }
    };
    auto multiply = [&](uint32_t(&a)[16], uint32_t(&next)[16], int step) {
        uint64_t b = wgmma_descriptor(shared.stages[i % Shared::RING].weight);
        wgmma_hold(a);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { wgmma_64x256x16(sum, a + 4 * k, b + 2 * k, step > 0 || k > 0, floatX()); }
        wgmma_commit();
        linear_lag_arrive(first_tile, group, step, num_steps);
        if (step + 1 < num_steps) {
            change(next, i + 1, step + 1);
            wgmma_hold(next); // makes the compiler place change() before the wait
        }
        wgmma_wait<0>();
        linear_release(shared, i);
        i++;
    };
    uint32_t a[16], b[16];
    change(a, i, 0);
    linear_lag_wait(first_tile, group);
    for (int step = 0; step < num_steps; step += 2) {
        multiply(a, b, step);
        if (step + 1 < num_steps) { multiply(b, a, step + 1); }
    }
}

// Op defines what is fused with the product. If Op::changed is true, change() is applied to inp before the product;
// otherwise look() reads inp during the product. For Op::neighbours see LinearTiles. begin() and end() run before and
// after a tile's main loop, columns() loads what finish() needs per column, finish() computes the results.
template <class Op> __global__ void __launch_bounds__(384, 1)
    linear_sm90_kernel(Op op, const __grid_constant__ CUtensorMap inp_map,
                       const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap out_map,
                       LinearTiles tiles) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    auto& shared = shared_aligned_1024<LinearSMem>(dynamic_shared);
    int num_steps = ceil_div(tiles.K, 64), warp = threadIdx.x / 32;
    LinearRange range = linear_range(tiles, Op::neighbours);
    if (threadIdx.x == 0) {
        shared.ring.init(8); // consumer warps
        mbarrier_init_fence();
    }
    __syncthreads();
    grid_wait_dependency();
    if (warp < 4) {
        warpgroup_fewer_registers<40>();
        if (threadIdx.x == 0) { linear_load(shared, inp_map, weight_map, tiles, range); }
        return;
    }
    warpgroup_more_registers<232>();
    int group = warp / 4 - 1, i = 0;
    for (int tile = range.begin; tile < range.end; tile += range.step) {
        float sum[128];
        // this warp's first row, the tile's first column
        int row0 = tile / tiles.columns * 128 + (warp - 4) * 16, column0 = tile % tiles.columns * 256;
        bool first_tile = tile == range.begin;
        typename Op::Columns columns[8];
        op.begin(row0, tiles);
        linear_columns(op, columns, column0);
        if constexpr (Op::changed) {
            linear_multiply_changed(op, shared, sum, group, first_tile, num_steps, i);
        } else {
            linear_multiply_plain(op, shared, sum, group, first_tile, num_steps, i);
        }
        op.end(tiles);
        linear_store(op, columns, shared.out[warp - 4], out_map, sum, row0, column0, tiles);
    }
    if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); }
}

// out (N,OC) = op(inp (N,K)) weight (OC,K)^T. If `early` is true, the kernel starts while the previous kernel in
// the stream ends (programmatic dependent launch), and waits for that kernel before it reads anything.
template <class Op> void linear_launch(const Op& op, floatX* out, const floatX* inp, const floatX* weight, int N, int K,
                                       int OC, bool early, const Execution& exec) {
    require(N >= 1 && K >= 8 && K % 8 == 0 && OC >= 8 && OC % 8 == 0);
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap inp_map = tensor_map(inp, {K, N}, {64, 128}), weight_map = tensor_map(weight, {K, OC}, {64, 256});
    CUtensorMap out_map = gemm_box_map(out, N, OC);
    int columns = ceil_div(OC, 256);
    size_t num_tiles = ceil_div((size_t)N, (size_t)128) * columns;
    require(num_tiles <= INT_MAX);
    int num_blocks = (int)std::min((size_t)num_multiprocessors(), num_tiles);
    launch_kernel(linear_sm90_kernel<Op>, LaunchShape(num_blocks, 384, sizeof(LinearSMem) + 1024, 1, early), exec, op,
                  inp_map, weight_map, out_map, LinearTiles{N, K, OC, columns, (int)num_tiles});
}

#endif
