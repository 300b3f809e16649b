/*
matmul_backward_input: dinp (N,C) = dout (N,OC) weight (OC,C), times GELU's slope if saved.tensor (N,C) is not NULL;
dinp_sums (C), or NULL, += the column sums of dinp | scratch in floats
matmul_backward_weight: dweight (OC,C) float = dout^T inp (N,C), or += if accumulate | scratch in floats
Constraint: C % 8 == 0, OC % 8 == 0.
Kernels 6 (cuBLASLt), 8 (dinp by gemm, with GELU's slope) and 10 (dweight by stream-K) of matmul_backward.cu, which has the other
kernels, errors and sources.
*/
#pragma once

#include "../../llmc/column_sums.cuh"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/tma_ring.cuh"
#include "gelu_backward.cuh"
#include "gemm.cuh"
#include "matmul_backward_bias.cuh"
#include "matmul_forward.cuh"
#include <algorithm>
#include <limits.h>

// ==== promoted: matmul_backward ====
// ---- kernel 6: cuBLASLt, algorithms timed once per shape ----

// Arguments as for matmul_backward_input.
void matmul_backward_input6(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pre_gelu, int N,
                            int C, int OC, const Execution& exec) {
    MatmulCall call;
    call.out = dinp;
    call.a = dout, call.b = weight;
    call.M = N, call.N = C, call.K = OC;
    if (pre_gelu && sizeof(floatX) == 2) { // in fp32 the library's gelu' would dominate the error
        call.epilogue = MATMUL_DGELU;
        call.aux = (void*)pre_gelu; // the library only reads it
        if (cublaslt_matmul(call, exec)) { return; }
    }
    call.epilogue = MATMUL_PLAIN;
    call.aux = NULL;
    require(cublaslt_matmul(call, exec));
    if (pre_gelu) { gelu_backward(dinp, dinp, pre_gelu, (size_t)N * C, exec); }
}

// Arguments as for matmul_backward_weight.
void matmul_backward_weight6(float* dweight, const floatX* dout, const floatX* inp, int N, int C, int OC,
                             bool accumulate, const Execution& exec) {
    require(C % 8 == 0 && OC % 8 == 0);
    MatmulCall call;
    call.out = dweight, call.out_is_float = true;
    call.a = dout, call.a_transposed = true;
    call.b = inp;
    call.M = OC, call.N = C, call.K = N;
    call.add = accumulate ? dweight : NULL;
    require(cublaslt_matmul(call, exec));
}

// ---- kernel 8: gemm.cuh for dinp with gelu' on the accumulators in registers, hidden behind the next tile's products ----
// matmul_backward_input() uses it where it is faster than kernel 6.

#if !defined(ENABLE_FP32)
// Like matmul_backward_input, with gelu'. If dinp_sums is not NULL, the epilogue also sums the columns of dinp: partials receives
// a row of C sums for each 128 rows.
template <int extras>
static void matmul_backward_launch8(const GemmArgs& g, float* dinp_sums, float* partials, const Execution& exec) {
    typedef GemmPingPong192<GemmPair, true> G;
    if (!dinp_sums) { return gemm<G>(g, GemmBias<extras>{NULL}, exec); }
    gemm<G>(g, GemmBiasSums<extras>{{NULL}, partials, g.N}, exec);
}
void matmul_backward_input8(floatX* dinp, float* dinp_sums, float* partials, const floatX* dout, const floatX* weight,
                            GeluSaved saved, int N, int C, int OC, const Execution& exec) {
    GemmArgs g = {dinp, NULL, dout, weight, saved.tensor, N, C, OC};
    auto launch = saved.is_slope ? matmul_backward_launch8<GEMM_MULTIPLY | GEMM_NO_BIAS>
                                 : matmul_backward_launch8<GEMM_GELU_BACKWARD | GEMM_NO_BIAS>;
    launch(g, dinp_sums, partials, exec);
    if (dinp_sums) { column_sums<16>(dinp_sums, NULL, NULL, partials, ceil_div(N, 128), C, exec); }
}
#endif

// The number of the kernel to use: 8 with gelu' in 16 bits, 6 otherwise and where 8 cannot run or has too few tiles.
inline int matmul_backward_input_choice(int N, int C, bool has_gelu) {
    bool many = ceil_div((size_t)N, (size_t)128) * ceil_div(C, 192) >= 2 * (size_t)num_multiprocessors();
    return sizeof(floatX) == 2 && has_gelu && many && has_sm90a() ? 8 : 6;
}

// True if the forward product (N,C) to (N,OC) can save GELU's slope, and matmul_backward_input() of the next product use it.
bool matmul_can_save_slope(int N, int C, int OC) {
    return matmul_forward_choice(N, C, OC) == 27 && matmul_backward_input_choice(N, OC, true) == 8;
}

// Number of floats in scratch, with gelu'. Without it nothing is needed.
size_t matmul_backward_input_scratch(int N, int C) {
    size_t partials = (size_t)ceil_div(N, 128) * C;
    return matmul_backward_input_choice(N, C, true) == 8 ? partials : matmul_backward_bias_scratch(N, C);
}

// dinp (N,C) = dout (N,OC) weight (OC,C), times gelu' of GELU's argument (N,C), which the forward pass has saved, or whose
// slope it has saved, if kernel 8 runs; without GELU saved.tensor is NULL. dinp must not overlap an input. dinp_sums (C) +=
// the sums of dinp's columns, the gradient of a bias that was added to GELU's argument; NULL without gelu', and where it is
// not wanted. scratch (matmul_backward_input_scratch(N, C))
void matmul_backward_input(floatX* dinp, float* dinp_sums, float* scratch, const floatX* dout, const floatX* weight,
                           GeluSaved saved, int N, int C, int OC, const Execution& exec) {
    require(C % 8 == 0 && OC % 8 == 0 && (saved.tensor || !dinp_sums));
    int kernel = matmul_backward_input_choice(N, C, saved.tensor != NULL);
    {
        double tensors = (double)N * OC + (double)OC * C + (saved.tensor ? 2.0 : 1.0) * N * C;
        Op op(exec, tensors * sizeof(floatX), 2.0 * N * C * OC, "matmul_backward_input %d <- %d%s", C, OC,
              saved.tensor ? ", gelu" : "");
        require(kernel == 8 || !saved.is_slope);
        if (kernel == 6) { matmul_backward_input6(dinp, dout, weight, saved.tensor, N, C, OC, exec); }
#if !defined(ENABLE_FP32)
        if (kernel == 8) { matmul_backward_input8(dinp, dinp_sums, scratch, dout, weight, saved, N, C, OC, exec); }
#endif
    }
    if (dinp_sums && kernel == 6) { matmul_backward_bias(dinp_sums, scratch, dinp, N, C, exec); }
}

// ---- kernel 10: the steps of all tiles are cut into equal shares for all SMs (stream-K) ----
// matmul_backward_weight() uses it where it is faster than kernel 6.

constexpr int MATMUL_BACKWARD_MAX_CLUSTERS = 128;
// one for each block of a cluster and consumer warp, see MatmulBackwardSums
constexpr int MATMUL_BACKWARD_FLAGS = MATMUL_BACKWARD_MAX_CLUSTERS * 2 * 8;
inline int matmul_backward_max_clusters() { return std::min(num_multiprocessors() / 2, MATMUL_BACKWARD_MAX_CLUSTERS); }
// The number of columns of a tile, chosen so that tiles extend past C by less.
inline int matmul_backward_columns(int C) { return ceil_div(C, 192) * 192 < ceil_div(C, 256) * 256 ? 192 : 256; }
// Number of floats in scratch: the flags, and each cluster stores one part at most.
inline size_t matmul_backward_weight_scratch10(int C) {
    return MATMUL_BACKWARD_FLAGS + (size_t)matmul_backward_max_clusters() * 256 * matmul_backward_columns(C);
}

#if !defined(ENABLE_FP32)
// dweight (OC,C) = dout (N,OC)^T inp (N,C) on Hopper. One persistent block per SM, in clusters of two that share a tile
// of inp (GemmPair). Warpgroup 0 is the producer, warpgroups 1 and 2 are the consumers. They are cooperative: a block has
// 128 rows of a tile of dweight, and each consumer 64 of them. So a cluster computes tiles of 256 rows, in steps of 64
// tokens.
//
// 100 tiles on 66 clusters would be two waves, the second one half empty. So the steps of all tiles form a line, which is
// cut into equal ranges, one per cluster. With 5 tiles and 3 clusters:
//
//     tile       |     0     |     1     |     2     |     3     |     4     |
//     cluster    |         0         |         1         |         2         |
//
// A cluster goes through its range from the end to the beginning, one part of a tile after the other. Here cluster 0
// begins with its part of tile 1: it stores its accumulators to `parts` and sets flags. Then it computes tile 0. Cluster
// 1 does the same with its part of tile 3, computes tile 2, and then its part of tile 1, to which it adds what cluster 0
// has long since stored. With fewer tiles than clusters a tile has more than two parts, and its last cluster adds all the
// others, one by one. A tree would take as long: one of its levels takes as long as to add two or three parts. The order
// of the terms is fixed, so a second run gives the same bits.
//
// A cluster waits only for clusters of lower index, whose blocks start before its own, and only for what they do first,
// before they wait themselves. So there is no deadlock, even if not all blocks fit on the GPU together.
//
// If there are two tiles or more per cluster, only the first tiles are cut. The others are computed whole afterwards, in
// full waves.
//
// Source: Osama et al. 2023, Stream-K, arXiv:2301.03598.
struct MatmulBackwardSchedule {
    int num_steps;            // per tile
    int num_tiles, num_split; // tiles 0 to num_split - 1 are cut into ranges, the others are whole
    int num_clusters;
};

// The first step of a cluster's range, counted over all split tiles. The range ends where the next cluster's begins.
__host__ __device__ inline int matmul_backward_range(const MatmulBackwardSchedule& s, int cluster) {
    int total = s.num_split * s.num_steps;
    int begin = total / s.num_clusters * cluster + min(cluster, total % s.num_clusters);
    // a part of fewer than 4 steps takes longer to store and to add than to compute, so it goes to the neighbour
    int within = begin % s.num_steps;
    if (within < 4) { return begin - within; }
    return s.num_steps - within < 4 ? begin - within + s.num_steps : begin;
}

// Steps begin to end - 1 of a tile, computed in the order first, ..., end - 1, begin, ..., first - 1.
struct MatmulBackwardPart {
    int tile, begin, end, first;
};

// The work that is left for one cluster.
struct MatmulBackwardWork {
    int done;       // steps of the range that are done
    int begin, end; // the rest of the range
    int tile;       // the next whole tile

    // Takes the next part off the work. Returns false if there is none.
    __host__ __device__ bool next(const MatmulBackwardSchedule& s, MatmulBackwardPart* part) {
        if (begin == end) {
            *part = {tile, 0, s.num_steps, 0};
            tile += s.num_clusters;
            return part->tile < s.num_tiles;
        }
        part->tile = (end - 1) / s.num_steps;
        int tile_begin = part->tile * s.num_steps, from = max(begin, tile_begin);
        part->begin = from - tile_begin, part->end = end - tile_begin;
        // Clusters that need the same tokens load them at about the same time, so that all but one find them in L2: after
        // t steps, each is at a step that equals t modulo the length of a range, or of a tile if that is shorter.
        int period = min(s.num_steps, max(1, s.num_split * s.num_steps / s.num_clusters));
        part->first = part->begin + ((done - part->begin) % period + period) % period;
        if (part->first >= part->end) { part->first = part->begin; }
        done += end - from;
        end = from;
        return true;
    }
};

// The forms, for 256 and 192 columns per tile. Both operands are stored as (K,rows).
template <int columns> struct MatmulBackwardTile : GemmPair {
    static constexpr bool IS_KM = true, IS_KN = true;
    static constexpr int ROWS = 128, COLUMNS = columns, PARTS = 1, READERS = 8, RING = columns == 256 ? 4 : 5;
    static __device__ void wgmma(float (&sum)[columns / 2], uint64_t dout, uint64_t inp, bool accumulate) {
        if constexpr (columns == 256) { wgmma_64x256x16_transposed(sum, dout, inp, accumulate, floatX()); }
        if constexpr (columns == 192) { wgmma_64x192x16_transposed(sum, dout, inp, accumulate, floatX()); }
    }
};

template <class G> struct MatmulBackwardRing {
    GemmStage<G> stages[G::RING]; // 64 tokens of dout and of inp
    TmaRing<G::RING> ring;
};

// Where a consumer warp, 0 to 7, leaves the n accumulators of a part whose tile another cluster finishes.
template <int n> struct MatmulBackwardSums {
    float4* parts; // of all warps; before them lie all flags
    int cluster, rank, warp;

    __device__ int index() const { return (cluster * 2 + rank) * 8 + warp; }
    // 1 while the accumulators wait to be added; 0 at the launch
    __device__ int* flag() const { return (int*)parts - MATMUL_BACKWARD_FLAGS + index(); }
    // sum[4j .. 4j + 3] of lane l is element 32 * j + l
    __device__ float4* sums() const { return parts + (size_t)index() * (n / 4 * 32) + threadIdx.x % 32; }
    __device__ void store(const float (&sum)[n]) const {
#pragma unroll
        for (int j = 0; j < n / 4; j++) {
            __stcg(sums() + 32 * j, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) { store_release(flag(), 1); }
    }
    // Waits until the sums have arrived, and adds them to `sum`.
    __device__ void add_to(float (&sum)[n]) const {
        while (load_acquire(flag()) == 0) {}
#pragma unroll
        for (int first = 0; first < n; first += n / 2) { // n / 8 loads in flight
            float4 x[n / 8];
#pragma unroll
            for (int j = 0; j < n / 8; j++) { x[j] = __ldcg(sums() + 8 * first + 32 * j); }
#pragma unroll
            for (int j = 0; j < n / 8; j++) {
                float* to = sum + first + 4 * j;
                to[0] += x[j].x, to[1] += x[j].y, to[2] += x[j].z, to[3] += x[j].w;
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) { *flag() = 0; } // without this, ptxas 13.0 spills some of the sums
    }
};

// dweight = sum, or +=, for the 16 rows of one warp. row, column: the first element of the warp.
template <int n> __device__ inline void matmul_backward_store10(float (&sum)[n], float* dweight, int row, int column,
                                                                int OC, int C, bool accumulate) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
        int at = row + 8 * half + lane / 4;
        if (at >= OC) { continue; }
        float2* to = reinterpret_cast<float2*>(dweight + (size_t)at * C + column + lane % 4 * 2);
        if (accumulate) { // all loads before the first store, so that they overlap
#pragma unroll
            for (int j = 0; j < n / 4; j++) {
                if (column + 8 * j >= C) { continue; }
                float2 x = to[4 * j];
                sum[4 * j + 2 * half] += x.x, sum[4 * j + 2 * half + 1] += x.y;
            }
        }
#pragma unroll
        for (int j = 0; j < n / 4; j++) {
            if (column + 8 * j >= C) { continue; }
            to[4 * j] = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
        }
    }
}

template <class G> __global__ void __launch_bounds__(384, 1)
    matmul_backward_sm90_kernel10(const __grid_constant__ CUtensorMap dout_map,
                                  const __grid_constant__ CUtensorMap inp_map, float* dweight, float4* parts,
                                  MatmulBackwardSchedule s, int OC, int C, bool accumulate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef MatmulBackwardSums<G::COLUMNS / 2> Sums;
    extern __shared__ __align__(256) unsigned char dynamic_shared_weight[];
    auto& smem = shared_aligned_1024<MatmulBackwardRing<G>>(dynamic_shared_weight);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&dout_map), tma_prefetch_map(&inp_map);
        smem.ring.init(G::READERS * G::CLUSTER);
        mbarrier_init_fence();
    }
    G::sync();
    grid_launch_dependents();
    grid_wait_dependency();

    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    int rank = G::rank(), cluster = blockIdx.x / G::CLUSTER, i = 0;
    int begin = matmul_backward_range(s, cluster), end = matmul_backward_range(s, cluster + 1);
    MatmulBackwardWork work = {0, begin, end, s.num_split + cluster};
    MatmulBackwardPart part;
    if (warp < 4) { // the producer
        warpgroup_fewer_registers<40>();
        if (threadIdx.x != 0) { return; }
#pragma unroll 1
        while (work.next(s, &part)) {
            GemmTile tile = gemm_tile<G>(part.tile, OC, C, rank);
            int step = part.first;
#pragma unroll 1
            for (int n = part.end - part.begin; n > 0; n--, i++) {
                gemm_load<G>(smem, dout_map, inp_map, tile, step, rank, i);
                step = step + 1 < part.end ? step + 1 : part.begin;
            }
        }
        return;
    }
    warpgroup_more_registers<232>();
    warp -= 4;
#pragma unroll 1
    while (work.next(s, &part)) {
        float sum[1][G::COLUMNS / 2];
        gemm_multiply<G, false>(sum, smem, part.end - part.begin, 0, i);
        if (part.end < s.num_steps) {
            Sums{parts, cluster, rank, warp}.store(sum[0]);
            continue;
        }
        int tile_begin = part.tile * s.num_steps;
        if (part.begin > 0) { // lower clusters have the tile's earlier steps
#pragma unroll 1
            for (int c = cluster - 1; matmul_backward_range(s, c + 1) > tile_begin; c--) {
                Sums{parts, c, rank, warp}.add_to(sum[0]);
            }
        }
        GemmTile tile = gemm_tile<G>(part.tile, OC, C, rank);
        matmul_backward_store10(sum[0], dweight, tile.row + warp * 16, tile.column, OC, C, accumulate);
    }
    G::sync(); // a block must not exit while the other block may still write to its shared memory
#endif
}

// Decides how many clusters run, and which tiles are cut. A tile has 256 rows.
inline MatmulBackwardSchedule matmul_backward_schedule(int N, int C, int OC, int max_clusters) {
    size_t num_tiles = ceil_div((size_t)OC, (size_t)256) * ceil_div(C, matmul_backward_columns(C)),
           num_steps = ceil_div((size_t)N, (size_t)64);
    size_t total = num_tiles * num_steps;
    require(total <= INT_MAX);
    // at least 8 steps per cluster
    size_t num_clusters = std::min((size_t)max_clusters, std::max(num_tiles, total / 8)),
           rest = num_tiles % num_clusters;
    // storing and adding the partial sums of cut tiles takes as long as about 6 steps
    size_t whole = ceil_div(num_tiles, num_clusters) * num_steps, split = ceil_div(total, num_clusters) + 6;
    if (rest == 0 || whole <= split) {
        return {(int)num_steps, (int)num_tiles, 0, (int)std::min(num_clusters, num_tiles)};
    }
    // Between one and two tiles per cluster are cut, if there are so many. A tile then has two parts at most, and the
    // first one is done long before it is needed.
    return {(int)num_steps, (int)num_tiles, (int)std::min(num_tiles, rest + num_clusters), (int)num_clusters};
}

template <class G> void matmul_backward_launch10(float* dweight, float* scratch, const floatX* dout, const floatX* inp,
                                                 int N, int C, int OC, bool accumulate, const Execution& exec,
                                                 const MatmulBackwardSchedule& s) {
    float4* parts = NULL;
    if (s.num_split > 0) { // flags, then parts
        parts = (float4*)(scratch + MATMUL_BACKWARD_FLAGS);
        cudaCheck(cudaMemsetAsync(scratch, 0, MATMUL_BACKWARD_FLAGS * sizeof(int), exec.stream));
    }
    const int bytes = sizeof(MatmulBackwardRing<G>) + 1024;
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    // not launched early: it comes after gradients_ready(), see Execution::may_launch_early()
    launch_kernel(matmul_backward_sm90_kernel10<G>, LaunchShape(s.num_clusters * G::CLUSTER, 384, bytes, G::CLUSTER),
                  exec, GemmInp<G>::map(dout, OC, N), GemmWeight<G>::map(inp, C, N), dweight, parts, s, OC, C,
                  accumulate);
}

// scratch (matmul_backward_weight_scratch10(C)) is aligned to 16 bytes, and is not used if the schedule cuts no tile.
void matmul_backward_weight10(float* dweight, float* scratch, const floatX* dout, const floatX* inp, int N, int C,
                              int OC, bool accumulate, const Execution& exec, const MatmulBackwardSchedule& s) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(C % 8 == 0 && OC % 8 == 0);
    auto launch = matmul_backward_columns(C) == 192 ? matmul_backward_launch10<MatmulBackwardTile<192>>
                                                    : matmul_backward_launch10<MatmulBackwardTile<256>>;
    launch(dweight, scratch, dout, inp, N, C, OC, accumulate, exec, s);
}
#endif

// The number of the kernel to use. Kernel 10 pays where the library's usual tiles of 128x256 would leave many SMs idle in their
// last wave, if there are enough tiles that few of them share the tokens, and if its own tiles cover dweight exactly.
// Measured in training steps on an H200: 14% faster than the library where OC and C are 5120 and 1280, 4 to 7% where they
// are 3072 or 2304 and 768; 4 to 7% slower with fewer than 40 tiles, 8 to 30% slower where C is 1600.
inline int matmul_backward_weight_choice(int N, int C, int OC) {
    size_t num_tiles = ceil_div((size_t)OC, (size_t)128) * ceil_div(C, 256), num_sms = num_multiprocessors();
    bool exact = OC % 256 == 0 && C % matmul_backward_columns(C) == 0;
    bool idle = num_tiles < 0.8 * (double)(ceil_div(num_tiles, num_sms) * num_sms);
    return sizeof(floatX) == 2 && exact && idle && num_tiles >= 40 && N >= 16384 && has_sm90a() ? 10 : 6;
}

// Number of floats in scratch.
size_t matmul_backward_weight_scratch(int N, int C, int OC) {
    return matmul_backward_weight_choice(N, C, OC) == 10 ? matmul_backward_weight_scratch10(C) : 0;
}

// dweight (OC,C) = dout (N,OC)^T inp (N,C), or += if accumulate | scratch (matmul_backward_weight_scratch(N, C, OC))
void matmul_backward_weight(float* dweight, float* scratch, const floatX* dout, const floatX* inp, int N, int C, int OC,
                            bool accumulate, const Execution& exec) {
    double bytes = ((double)N * OC + (double)N * C) * sizeof(floatX) + (accumulate ? 8.0 : 4.0) * OC * C;
    Op op(exec, bytes, 2.0 * N * C * OC, "matmul_backward_weight %d <- %d", C, OC);
#if !defined(ENABLE_FP32)
    if (matmul_backward_weight_choice(N, C, OC) == 10) {
        int max_clusters = std::min(matmul_backward_max_clusters(), exec.free_sms() / 2);
        return matmul_backward_weight10(dweight, scratch, dout, inp, N, C, OC, accumulate, exec,
                                        matmul_backward_schedule(N, C, OC, max_clusters));
    }
#endif
    (void)scratch;
    matmul_backward_weight6(dweight, dout, inp, N, C, OC, accumulate, exec);
}
// ==== end promoted: matmul_backward ====
