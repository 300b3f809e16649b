/*
gemm: out (M,N) = finish(inp (M,K) weight (N,K)^T), a linear layer on Hopper fused with its epilogue, `finish`

    out (M,N) floatX out | second (M,N) floatX out | inp (M,K), weight (N,K), third (M,N) floatX in
    Constraint: sm_90a, 16-bit floatX, K % 8 == 0, N % 8 == 0, pointers aligned to 16 bytes.

gemm() launches gemm_sm90_kernel9, kernel 27 of matmul_forward.cu, whose idle warps may have other work (gemm_adamw.cuh). The
form: ping-pong, 128x192 tiles, clusters of two blocks, GemmBias as epilogue. gemm_forms.cuh has other forms.

The kernel has three template parameters. G is the form: the tile, the ring, the cluster and the wgmma instruction.
Epilogue computes the result from each accumulator, in registers. IdleWork is what idle warps do. A kernel of another
shape can be built from gemm_begin, gemm_multiply and gemm_store.

Source: warp-specialised persistent kernels, ping-pong and cooperative, come from CUTLASS 3; layouts: the PTX ISA,
"wgmma".
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/tma_ring.cuh"
#include <limits.h>

// ==== promoted: gemm ====
#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// out (M,N) = finish(inp (M,K) weight (N,K)^T). One persistent block per SM, of three warpgroups. Warpgroup 0 is the
// producer: it fills a ring of stages by TMA, each with 64 columns of both operands. Warpgroups 1 and 2 are the
// consumers: they multiply by wgmma and alternate (ping-pong), each on a tile of its own:
//
//     consumer 0   | products, tile 0 | epilogue, tile 0 | products, tile 2 | epilogue, tile 2 |
//     consumer 1                      | products, tile 1 | epilogue, tile 1 | products, tile 3 | epilogue, tile 3 |
//
// The epilogue of a tile is hidden behind the products of the next tile, which pays where K is short. The epilogue
// works on the accumulators in registers. Its results go through shared memory to TMA stores, which skip elements
// outside the matrix, so M and N need not be multiples of the tile.

// ---- epilogues ----

// Extras of an epilogue, flags combined by |. They say what the epilogue does in addition to computing its value y.
enum {
    GEMM_GELU = 1,                        // out = gelu(y), otherwise out = y
    GEMM_SECOND = 2,                      // y is also stored, to the matrix `second`
    GEMM_SLOPE = 128,                     // with GEMM_GELU and GEMM_SECOND: gelu'(y) is stored there instead of y
    GEMM_THIRD = 4,                       // `third` is read; the next three flags include this and say what for
    GEMM_ADD = GEMM_THIRD,                // out = y + third
    GEMM_MULTIPLY = GEMM_THIRD | 256,     // out = y * third
    GEMM_GELU_BACKWARD = GEMM_THIRD | 16, // out = y * gelu'(third)
    GEMM_NO_BIAS = 32,                    // bias is NULL: y is the accumulator
    GEMM_SUMS = 64,                       // the columns of each tile of out are also summed, unrounded: GemmBiasSums
    // The rows of each tile of out are also summed, unrounded. For each row, one lane calls store_row_sum(row, column tile, sum).
    // pair() is also called for columns past the end, where value() must be 0.
    GEMM_ROW_SUMS = 512,
    GEMM_MIRRORED = 2048 // with GEMM_THIRD: store_mirrored() also receives all results of the tile, as fragments
};

// The epilogue y = accumulator + bias. Every epilogue has three types for its other inputs: Row is the data of one row,
// Pair the data of two neighbouring columns as loaded from memory (the first column is even), Column the unpacked data
// of one column.
template <int extras> struct GemmBias {
    static constexpr int EXTRAS = extras;
    const floatX* bias; // (N), or NULL for no bias

    struct Row {};
    typedef uint32_t Pair;
    typedef float Column;
    __device__ Row row(int) const { return {}; }
    __device__ Pair pair(int column) const {
        return bias ? __ldg(reinterpret_cast<const uint32_t*>(bias + column)) : 0;
    }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        float2 x = unpack_16x2(pair, floatX());
        c[0] = x.x, c[1] = x.y;
    }
    __device__ float value(float sum, const Row&, const Column& c) const { return sum + c; }
    // With GEMM_THIRD: returns whether `third` is read. If not, its elements count as zeros.
    __device__ bool reads_third() const { return true; }
    // With GEMM_THIRD: returns the result for y and an element of `third`.
    __device__ float combined(float y, float third) const {
        if ((extras & GEMM_GELU_BACKWARD) == GEMM_GELU_BACKWARD) { return y * gelu_slope(third); }
        return (extras & GEMM_MULTIPLY) == GEMM_MULTIPLY ? y * third : y + third;
    }
};

// GemmBias that also sums the columns of out.
template <int extras> struct GemmBiasSums : GemmBias<extras> {
    static constexpr int EXTRAS = extras | GEMM_SUMS;
    float* sums; // (row tiles, N): row i has the sums over the rows of tile row i
    int N;
};

// Returns the pair that lane `lane` of this warp holds.
__device__ inline uint32_t gemm_shuffle(uint32_t pair, int lane) { return __shfl_sync(0xFFFFFFFFu, pair, lane); }

// ---- the form: cluster, tile, shared memory ----

// The first row and column of a tile of out, and how its boxes are copied: a box has its first element in row y and column x.
struct GemmTile {
    int row, column;

    __device__ void load(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        tma_load_2d(box, &map, x, y, full);
    }
    __device__ void load_once(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        tma_load_2d_once(box, &map, x, y, full);
    }
    __device__ void store(const CUtensorMap& map, const void* box, int x, int y) const {
        tma_store_2d(&map, box, x, y);
    }
};

// The tile scheduler: returns tile number `index` of a fixed list. With clusters, index counts pairs of tiles, and rank
// selects the tile of the pair. The list goes through groups of 16 rows of tiles, and through each group column by
// column. Blocks that run at the same time then share tiles of inp and of the weight in L2, however many columns out
// has.
template <class G> __device__ inline GemmTile gemm_tile(int index, int M, int N, int rank) {
    const int group = 16 / G::CLUSTER;
    int num_rows = ceil_div(M, G::ROWS * G::CLUSTER), num_columns = ceil_div(N, G::COLUMNS);
    int first = index / (group * num_columns) * group, within = index % (group * num_columns);
    int height = min(group, num_rows - first);
    return {((first + within % height) * G::CLUSTER + rank) * G::ROWS, within / height * G::COLUMNS};
}

// The blocks of a cluster, one or two, from which a form inherits. Two blocks compute two tiles of out, one below the other, so
// both need the same tile of the weight: each loads half of it and multicasts it to both. A stage is empty when the consumers
// of both blocks have read it.
template <int cluster> struct GemmCluster {
    static constexpr int CLUSTER = cluster;
    static constexpr bool IS_KM = false, IS_KN = false; // whether inp is stored as (K,M), the weight as (K,N)
    static __device__ int rank() { return cluster == 1 ? 0 : cluster_rank(); }
    static __device__ void sync() { cluster == 1 ? __syncthreads() : cluster_sync(); }
    // Called by a warp that has read a stage: lane r arrives at the empty barrier of block r.
    static __device__ void release(uint64_t* empty) {
        int lane = threadIdx.x % 32;
        if (lane < cluster) { cluster == 1 ? mbarrier_arrive(empty) : mbarrier_arrive_cluster(empty, lane); }
    }
    template <class G> static __device__ GemmTile tile(int index, int M, int N, int rank) {
        return gemm_tile<G>(index, M, N, rank);
    }
};
typedef GemmCluster<1> GemmSingle;
typedef GemmCluster<2> GemmPair;

// An operand, stored as (rows,K), or as (K,rows) if by_k, as a backward pass has it. A stage has a tile of it: 64 columns (k) of
// `size` rows, which wgmma takes as they are. If by_k, these are boxes of 64 columns and 64 rows (k), which wgmma transposes.
// Each of num_blocks blocks of a cluster loads a part of the tile for all of them.
template <int num_blocks, int size, bool by_k> struct GemmOperand {
    static constexpr int BOX_ROWS = (by_k ? 64 : size) / num_blocks;
    static constexpr int STEP = by_k ? 128 : 2; // 16 of k, in the units of wgmma's descriptors, which are 16 bytes
    static CUtensorMap map(const floatX* matrix, int rows, int K) {
        return by_k ? tensor_map(matrix, {rows, K}, {64, BOX_ROWS}) : tensor_map(matrix, {K, rows}, {64, BOX_ROWS});
    }
    // Loads the part of block `rank`. row, k: where the tile begins in the matrix
    template <class Tile> static __device__ void load(floatX* to, const CUtensorMap& map, const Tile& tile, int row,
                                                      int k, int rank, uint64_t* full) {
        for (int i = 0; i < (by_k ? size / 64 : 1); i++) {
            floatX* box = to + (i * 64 + rank * BOX_ROWS) * 64;
            int x = by_k ? row + 64 * i : k, y = (by_k ? k : row) + rank * BOX_ROWS;
            num_blocks == 1 ? tile.load(box, map, x, y, full) : tma_load_2d_multicast(box, &map, x, y, full, 3);
        }
    }
    static __device__ uint64_t descriptor(const floatX* tile) {
        return by_k ? wgmma_descriptor_transposed(tile, 64 * 64 * sizeof(floatX)) : wgmma_descriptor(tile);
    }
};
template <class G> using GemmInp = GemmOperand<1, G::ROWS, G::IS_KM>;
template <class G> using GemmWeight = GemmOperand<G::CLUSTER, G::COLUMNS, G::IS_KN>;

// The trainer's form. 192 divides 768 and 3072, and the accumulators of a 128x192 tile fit in one warpgroup's registers.
template <class Cluster, bool kn = false> struct GemmPingPong192 : Cluster {
    static constexpr bool IS_KN = kn;
    static constexpr int ROWS = 128, COLUMNS = 192; // size of a tile of out
    static constexpr int PARTS = ROWS / 64;         // a wgmma covers 64 rows, so a consumer has this many accumulators
    static constexpr int READERS = 4; // warps per block that read a stage: 4 of one consumer, or 8 of both
    static constexpr int RING = 4;    // stages in the ring
    static constexpr int BOXES = 4;   // boxes of 16x64 results per consumer warp, in shared memory
    static __device__ void wgmma(float (&sum)[96], uint64_t inp, uint64_t weight, bool accumulate) {
        kn ? wgmma_64x192x16_transposed_b(sum, inp, weight, accumulate, floatX())
           : wgmma_64x192x16(sum, inp, weight, accumulate, floatX());
    }
};
typedef GemmPingPong192<GemmPair> GemmPingPong192Pairs;

// Returns whether a form is ping-pong. In other forms, both consumers compute every tile together, half of its rows each.
template <class G> constexpr bool gemm_is_ping_pong = G::READERS == 4;

template <class G> struct GemmStage { // 64 columns of both operands, swizzled as TMA writes them
    floatX inp[G::ROWS * 64], weight[G::COLUMNS * 64];
    static_assert(G::ROWS % 8 == 0 && G::COLUMNS % 8 == 0, "every tile is aligned to 1024 bytes, as the swizzle wants");
};

// The ring over time, here with 4 stages and 3 steps of 64 columns per tile. Step i uses stage i % 4. L4 is the TMA
// load of step 4: it starts when P0 is done and empty[0] completes. P4 are the products of step 4: they start when L4
// has arrived and full[0] completes. Dots are loads in flight or full stages that wait for a consumer.
//
//     time      0       1       2       3       4       5       6       7
//     stage 0 | L0    | P0    | L4 ...................| P4    | L8 ..........
//     stage 1 | L1 ...........| P1    | L5 ...................| P5    | L9 ..
//     stage 2 | L2 ...................| P2    | L6 ...................| P6
//     stage 3 | L3 ...........................| P3    | L7 ..................
//     products        | tile 0, consumer 0    | tile 1, consumer 1    | tile 2
template <class G> struct GemmSMem {
    static constexpr int RING = G::RING;
    GemmStage<G> stages[RING];
    floatX boxes[8][G::BOXES][16 * 64]; // per consumer warp: results to be stored, or `third`
    TmaRing<RING> ring;
    uint64_t box_full[8][G::BOXES]; // TMA loads complete them, consumers wait
    uint64_t turn[2]; // consumer c waits for turn[c]; the other consumer arrives when it has issued its products
    uint64_t loaded;  // for work in idle warps: the producer arrives when it has loaded the last stage
};

// All threads call this first. It initialises the barriers and waits for earlier kernels, whose results may be read
// afterwards.
template <class G> __device__ inline void gemm_init(GemmSMem<G>& smem) {
    if (threadIdx.x == 0) {
        smem.ring.init(G::READERS * G::CLUSTER);
        for (int i = 0; i < 8 * G::BOXES; i++) { mbarrier_init(&smem.box_full[0][0] + i, 1); }
        for (int i = 0; i < 2; i++) { mbarrier_init(&smem.turn[i], 4); }
        mbarrier_init_fence();
    }
    G::sync();
    grid_launch_dependents(); // the next kernel's blocks may start as this grid's blocks end
    grid_wait_dependency();
}

// ---- the producer: one thread per block ----

// Three warps of the producer are idle. They can run work of another operation that is bound by memory, and so costs little
// while tensor cores multiply. A struct for such work has the members of this one. Each of the warps, number 0 to 2 of the
// block, calls `run`, which must return within a few microseconds when phase 0 of `loaded` has completed.
struct GemmNoIdleWork {
    static constexpr bool WORKS = false;
    static constexpr int REGISTERS = 24; // per thread of the producer
    __device__ void run(int, uint64_t*) const {}
};

// Tensor maps. A box of inp or weight is what a block loads per step; boxes of out, second and third are 16x64.
struct GemmMaps {
    CUtensorMap inp, weight, out, second, third;
};

// Loads 64 columns of a tile's operands, from 64 * step on. i is the number of steps loaded so far, over all tiles. In this and
// gemm_multiply, SMem is any struct with the members `stages` and `ring`.
template <class G, class SMem, class Tile>
__device__ inline void gemm_load(SMem& smem, const CUtensorMap& inp_map, const CUtensorMap& weight_map,
                                 const Tile& tile, int step, int rank, int i) {
    auto& stage = smem.stages[i % G::RING];
    uint64_t* full = smem.ring.acquire(i, sizeof(stage));
    GemmInp<G>::load(stage.inp, inp_map, tile, tile.row, step * 64, 0, full);
    GemmWeight<G>::load(stage.weight, weight_map, tile, tile.column, step * 64, rank, full);
}

// ---- the consumers: warpgroups 1 and 2 ----

// sum = 0. The first wgmma of a tile could overwrite it instead; but then the compiler takes the accumulators for in use all
// the time, and leaves the epilogue only the other registers, too few to compute several numbers side by side. An epilogue
// that needs all accumulators to its end fits better without (clears = false).
template <class G> __device__ inline void gemm_clear(float (&sum)[G::PARTS][G::COLUMNS / 2]) {
#pragma unroll
    for (int i = 0; i < G::PARTS * (G::COLUMNS / 2); i++) { sum[i / (G::COLUMNS / 2)][i % (G::COLUMNS / 2)] = 0.0f; }
}

// The main loop of a consumer: the products of one tile, whose first step is step i of the ring. number: how many
// tiles this consumer had before. sum[m] is the accumulator of rows 64m to 64m + 63 of the consumer's rows; its elements
// 4j to 4j + 3 are this lane's part of the 16x8 fragment at columns 8j (see wgmma_64x128x16).
template <class G, bool clears = true, class SMem> __device__ inline void
gemm_multiply(float (&sum)[G::PARTS][G::COLUMNS / 2], SMem& smem, int num_steps, int number, int& i) {
    int consumer = threadIdx.x / 128 - 1, first_row = gemm_is_ping_pong<G> ? 0 : 64 * warp_uniform(consumer);
    if (clears) { gemm_clear<G>(sum); }
    // Ping-pong: wait until the other consumer has issued the products of the previous tile. A barrier's parity is one
    // bit, so a consumer more than a round of the ring ahead would take an earlier tile's stage for its own.
    if constexpr (gemm_is_ping_pong<G>) { mbarrier_wait(&smem.turn[consumer], (number + 1 + consumer) % 2); }
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        auto& stage = smem.stages[i % G::RING];
        uint64_t inp = GemmInp<G>::descriptor(stage.inp + first_row * 64);
        smem.ring.wait(i);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 columns per iteration; 64 rows of inp are 512 units of 16 bytes
#pragma unroll
            for (int m = 0; m < G::PARTS; m++) {
                G::wgmma(sum[m], inp + 512 * m + GemmInp<G>::STEP * k,
                         GemmWeight<G>::descriptor(stage.weight) + GemmWeight<G>::STEP * k,
                         clears || step > 0 || k > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<1>(); // the previous step's products are done
        if (step > 0) { G::release(&smem.ring.empty[(i - 1) % G::RING]); }
    }
    if constexpr (gemm_is_ping_pong<G>) {
        if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.turn[1 - consumer]); }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < G::PARTS; m++) { wgmma_hold(sum[m]); }
    G::release(&smem.ring.empty[(i - 1) % G::RING]);
}

// The epilogue's column data for a tile, loaded while the products run. Each lane holds one pair per 64 columns, and
// threads get the pairs that they need by shuffles: one load per use would take longer than the rest of the epilogue.
template <class G, class Epilogue> struct GemmColumns { typename Epilogue::Pair pairs[G::COLUMNS / 64]; };
template <class G, class Epilogue> __device__ inline void
gemm_load_columns(GemmColumns<G, Epilogue>& columns, const Epilogue& epilogue, int column, int N) {
#pragma unroll
    for (int q = 0; q < G::COLUMNS / 64; q++) {
        int at = column + 64 * q + (int)threadIdx.x % 32 * 2;
        columns.pairs[q] = epilogue.pair(Epilogue::EXTRAS & GEMM_ROW_SUMS ? at : min(at, N - 2));
    }
}

// A consumer warp stores its rows of a tile in boxes of 16x64, from left to right, then downwards. A warp's boxes are
// numbered consecutively over all its tiles, and use its G::BOXES slots in shared memory round robin. In the functions
// below, `box` is the number of the tile's first box, SMem is any struct with the members `boxes` and `box_full`, and `tile`
// begins with the warp's first row.

// Starts to load box n of `third` for this tile. Called by one lane.
template <class G, class SMem, class Tile>
__device__ inline void gemm_load_box(SMem& smem, const CUtensorMap& third_map, const Tile& tile, int n, int box) {
    const int columns = G::COLUMNS / 64;
    int warp = threadIdx.x / 32 - 4, slot = (box + n) % G::BOXES;
    mbarrier_arrive_expect(&smem.box_full[warp][slot], sizeof(smem.boxes[0][0]));
    tile.load_once(smem.boxes[warp][slot], third_map, tile.column + n % columns * 64, tile.row + n / columns * 64,
                   &smem.box_full[warp][slot]);
}

// The prologue of a tile, before its products: starts the loads that its epilogue needs. Arguments as for gemm_store.
template <class G, class Epilogue, class SMem, class Tile>
__device__ inline void gemm_prepare(GemmColumns<G, Epilogue>& columns, const Epilogue& epilogue, SMem& smem,
                                    const CUtensorMap& third_map, const Tile& tile, int N, int box) {
    const int num_boxes = G::PARTS * (G::COLUMNS / 64);
    if constexpr (!(Epilogue::EXTRAS & GEMM_NO_BIAS)) { gemm_load_columns(columns, epilogue, tile.column, N); }
    if constexpr (Epilogue::EXTRAS & GEMM_THIRD) {
        if (threadIdx.x % 32 == 0) {
            tma_store_wait<0>(); // TMA has read the previous results, so `third` may overwrite them
            for (int n = 0; epilogue.reads_third() && n < min(num_boxes, G::BOXES); n++) {
                gemm_load_box<G>(smem, third_map, tile, n, box);
            }
        }
        if (Epilogue::EXTRAS & GEMM_MIRRORED) { __syncwarp(); } // the other lanes may have no load to wait for
    }
}

// Waits for the four warps of this consumer.
__device__ inline void gemm_consumer_sync() {
    threadIdx.x < 256 ? named_barrier_sync(1, 128) : named_barrier_sync(2, 128);
}

// The end of the epilogue with GEMM_SUMS: adds up what the four warps of the consumer have summed of the tile's columns,
// always in the same order, and stores it to row `row` / G::ROWS of `to` (row tiles, N). sums: this lane's, see
// fragment_column_sums. The warps meet in the memory of the boxes.
template <class G, class SMem> __device__ inline void gemm_store_sums(float (&sums)[G::COLUMNS / 64][16], float* to,
                                                                      SMem& smem, int row, int column, int M, int N) {
    static_assert(G::READERS == 4 && G::COLUMNS <= 256,
                  "the rows of a tile are one consumer's, a thread has two columns");
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, thread = threadIdx.x % 128;
    auto sums_of = [&](int w) { return reinterpret_cast<float2*>(smem.boxes[w][0]); };
    if (lane == 0) { tma_store_wait<0>(); } // TMA has read the boxes
    __syncwarp();
#pragma unroll
    for (int q = 0; q < G::COLUMNS / 64; q++) { sums_of(warp)[32 * q + lane] = fragment_column_sums(sums[q]); }
    tma_store_fence(); // these writes come before what TMA loads into the boxes for the next tile
    gemm_consumer_sync();
    // the second tile of the last pair may be past the end
    if (thread < G::COLUMNS / 2 && row / G::ROWS * G::ROWS < M) {
        float2 sum = sums_of(warp / 4 * 4)[thread];
        for (int w = 1; w < 4; w++) {
            float2 x = sums_of(warp / 4 * 4 + w)[thread];
            sum.x += x.x, sum.y += x.y;
        }
        column += 2 * thread;
        if (column < N) { *reinterpret_cast<float2*>(to + (size_t)(row / G::ROWS) * N + column) = sum; }
    }
    gemm_consumer_sync(); // all have read: the boxes may be used again
}

// Packs two rows of two columns into two registers of a fragment.
__device__ inline void gemm_pack(uint32_t* pairs, const float (&v)[4]) {
    pairs[0] = pack_16x2(v[0], v[1], floatX()), pairs[1] = pack_16x2(v[2], v[3], floatX());
}

// The epilogue of one warp for a tile: computes the results and stores them by TMA. The last stores may still be in flight on
// return; lane 0 issued them and has to wait for them.
template <class G, class Epilogue, class SMem, class Tile>
__device__ inline void gemm_store(float (&sum)[G::PARTS][G::COLUMNS / 2], const Epilogue& epilogue,
                                  const GemmColumns<G, Epilogue>& columns, SMem& smem, const CUtensorMap& out_map,
                                  const CUtensorMap& second_map, const CUtensorMap& third_map, const Tile& tile, int M,
                                  int& box) {
    constexpr bool has_second = Epilogue::EXTRAS & GEMM_SECOND, has_third = Epilogue::EXTRAS & GEMM_THIRD;
    bool reads_third = false;
    if constexpr (has_third) { reads_third = epilogue.reads_third(); }
    static_assert(!has_second || !has_third, "they share the boxes");
    constexpr bool has_sums = Epilogue::EXTRAS & GEMM_SUMS, has_bias = !(Epilogue::EXTRAS & GEMM_NO_BIAS);
    constexpr bool has_row_sums = Epilogue::EXTRAS & GEMM_ROW_SUMS, mirrored = Epilogue::EXTRAS & GEMM_MIRRORED;
    static_assert(!mirrored || has_third, "gemm_prepare() waits for the stores of the mirrored tile");
    constexpr int num_columns = G::COLUMNS / 64, num_boxes = G::PARTS * num_columns, ahead = G::BOXES / 2;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, first_box = box;
    float sums[num_columns]
              [16];    // with GEMM_SUMS only: the columns summed over this lane's rows, see fragment_column_sums
    float row_sums[2]; // with GEMM_ROW_SUMS only: two rows, 8 apart, summed over this lane's columns
    // this lane's 16 bytes in a box, for stmatrix on columns 0 to 15: row lane % 16, chunk lane / 16. The swizzle XORs
    // the row into the chunk, so 16 * p columns further is the address ^ p << 5.
    uint32_t lane_at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    typename Epilogue::Row rows[2];
    uint32_t results[mirrored ? num_boxes : 1][16];
#pragma unroll
    for (int n = 0; n < num_boxes; n++) {
        const int m = n / num_columns, q = n % num_columns;
        int box_row = tile.row + 64 * m, box_column = tile.column + 64 * q;
        for (int half = 0; q == 0 && half < 2; half++) {
            rows[half] = epilogue.row(min(box_row + 8 * half + lane / 4, M - 1));
            row_sums[half] = 0.0f;
        }
        int slot = box % G::BOXES, second_slot = (box + 1) % G::BOXES;
        if (reads_third) {
            // load box n + ahead of `third` into the slot that box n + ahead - BOXES used
            if (n + ahead >= G::BOXES && n + ahead < num_boxes && lane == 0) {
                tma_store_wait<G::BOXES - ahead - 1>();
                gemm_load_box<G>(smem, third_map, tile, n + ahead, first_box);
            }
            mbarrier_wait(&smem.box_full[warp][slot], box / G::BOXES % 2);
        } else if (!has_third) {
            if (lane == 0) { tma_store_wait<has_second ? G::BOXES / 2 - 1 : G::BOXES - 1>(); }
            __syncwarp();
        }
        uint32_t at = shared_address(smem.boxes[warp][slot]) + lane_at;
        uint32_t second_at = shared_address(smem.boxes[warp][second_slot]) + lane_at;
#pragma unroll
        for (int p = 0; p < 4; p++) { // 16 columns per iteration
            uint32_t *out = &results[mirrored ? n : 0][4 * p], second[4], third[4] = {};
            if (reads_third) { ldmatrix_x4(third, at ^ p << 5); }
#pragma unroll
            for (int j = 0; j < 2; j++) { // 8 columns per iteration
                typename Epilogue::Column two[2];
                if constexpr (has_bias) {
                    epilogue.columns(two, gemm_shuffle(columns.pairs[q], 8 * p + 4 * j + lane % 4));
                }
                const int k = 32 * q + 8 * p + 4 * j;
                float v[4]; // two rows, 8 apart, of two columns
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v[i] = has_bias ? epilogue.value(sum[m][k + i], rows[i / 2], two[i % 2]) : sum[m][k + i];
                }
                if constexpr (Epilogue::EXTRAS & GEMM_SLOPE) {
                    float slopes[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) { v[i] = gelu_and_slope(v[i], &slopes[i]); }
                    gemm_pack(second + 2 * j, slopes);
                } else {
                    if constexpr (has_second) { gemm_pack(second + 2 * j, v); }
                    for (int i = 0; Epilogue::EXTRAS & GEMM_GELU && i < 4; i++) { v[i] = gelu(v[i]); }
                }
                if constexpr (has_third) {
                    float2 upper = unpack_16x2(third[2 * j], floatX());
                    float2 lower = unpack_16x2(third[2 * j + 1], floatX());
                    float w[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
                    for (int i = 0; i < 4; i++) { v[i] = epilogue.combined(v[i], w[i]); }
                }
                if constexpr (has_sums) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float x = v[e] + v[e + 2], &total = sums[q][4 * p + 2 * j + e];
                        total = m == 0 ? x : total + x;
                    }
                }
                if constexpr (has_row_sums) {
#pragma unroll
                    for (int i = 0; i < 4; i++) { row_sums[i / 2] += v[i]; }
                }
                gemm_pack(out + 2 * j, v);
            }
            stmatrix_x4(at ^ p << 5, out);
            if (has_second) { stmatrix_x4(second_at ^ p << 5, second); }
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tile.store(out_map, smem.boxes[warp][slot], box_column, box_row);
            if (has_second) { tile.store(second_map, smem.boxes[warp][second_slot], box_column, box_row); }
            tma_store_commit();
        }
        box += has_second ? 2 : 1;
        if constexpr (has_row_sums) {
            for (int half = 0; q == num_columns - 1 && half < 2; half++) { // a row is spread over four lanes
                float sum = quad_sum(row_sums[half]);
                int at_row = box_row + 8 * half + lane / 4;
                if (lane % 4 == 0 && at_row < M) { epilogue.store_row_sum(at_row, tile.column / G::COLUMNS, sum); }
            }
        }
    }
    if constexpr (has_sums) { gemm_store_sums<G>(sums, epilogue.sums, smem, tile.row, tile.column, M, epilogue.N); }
    if constexpr (mirrored) { epilogue.store_mirrored(results, smem, second_map, tile); }
}

// The consumers call this last: shared memory must stay allocated until the stores have read it and the other block of
// the cluster no longer writes to it.
template <class G> __device__ inline void gemm_end() {
    if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); }
    if (G::CLUSTER > 1) { G::sync(); }
}

// ---- the kernel ----

// The beginning of a kernel. One thread of warpgroup 0 loads the operands of the block's tiles; the clusters take the tiles of
// the list in turn. Returns the number of the warp: 0 to 3 in warpgroup 0, whose work is then done.
template <class G, class IdleWork = GemmNoIdleWork>
__device__ inline int gemm_begin(GemmSMem<G>& smem, const GemmMaps& maps, int M, int N, int K, int num_tiles,
                                 const IdleWork& idle_work = {}) {
    if (IdleWork::WORKS && threadIdx.x == 0) { mbarrier_init(&smem.loaded, 1); }
    if (threadIdx.x == 0) { tma_prefetch_map(&maps.inp), tma_prefetch_map(&maps.weight), tma_prefetch_map(&maps.out); }
    gemm_init(smem);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    if (warp < 4) {
        warpgroup_fewer_registers<IdleWork::REGISTERS>();
        if (IdleWork::WORKS && threadIdx.x >= 32) {
            idle_work.run(warp_uniform(threadIdx.x / 32) - 1, &smem.loaded);
            return warp;
        }
        if (threadIdx.x != 0) { return warp; }
        int i = 0, rank = G::rank(), num_steps = ceil_div(K, 64);
#pragma unroll 1
        for (int index = blockIdx.x / G::CLUSTER; index < num_tiles; index += gridDim.x / G::CLUSTER) {
            auto tile = G::template tile<G>(index, M, N, rank);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++, i++) {
                gemm_load<G>(smem, maps.inp, maps.weight, tile, step, rank, i);
            }
        }
        if (IdleWork::WORKS) { mbarrier_arrive(&smem.loaded); }
    } else {
        warpgroup_more_registers<(504 - IdleWork::REGISTERS) / 2>(); // the three warpgroups have 3 * 168 per thread
    }
    return warp;
}

// A consumer's tiles, one after the other. store(sum, columns, tile, box) is the epilogue of one warp, see gemm_store.
template <class G, class Epilogue, class Store>
__device__ inline void gemm_consume(GemmSMem<G>& smem, int warp, const GemmMaps& maps, const Epilogue& epilogue, int M,
                                    int N, int K, int num_tiles, const Store& store) {
    constexpr bool ping_pong = gemm_is_ping_pong<G>;
    int consumer = warp / 4 - 1, rank = G::rank(), num_steps = ceil_div(K, 64), box = 0, number = 0;
    // ping-pong: the block's tiles go to consumers 0, 1, 0, ...; their steps go through the ring in that order
    int turns = ping_pong ? 2 : 1, turn = ping_pong ? consumer : 0, i = turn * num_steps;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
#pragma unroll 1
    for (int index = first + turn * stride; index < num_tiles; index += turns * stride, number++) {
        float sum[G::PARTS][G::COLUMNS / 2];
        auto tile = G::template tile<G>(index, M, N, rank);
        tile.row += warp % 4 * 16 + (ping_pong ? 0 : 64 * consumer); // the warp's
        GemmColumns<G, Epilogue> columns = {};                       // stay zeros with GEMM_NO_BIAS
        gemm_prepare(columns, epilogue, smem, maps.third, tile, N, box);
        gemm_multiply<G>(sum, smem, num_steps, number, i);
        i += (turns - 1) * num_steps; // skips the other consumer's tile
        store(sum, columns, tile, box);
    }
}

// Kernel 21 of matmul_forward.cu. Its idle warps run `idle_work`.
template <class G, class Epilogue, class IdleWork = GemmNoIdleWork> __global__ void __launch_bounds__(384, 1)
    gemm_sm90_kernel9(const __grid_constant__ GemmMaps maps, Epilogue epilogue, int M, int N, int K, int num_tiles,
                      const __grid_constant__ IdleWork idle_work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(gemm_dynamic);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles, idle_work);
    if (warp < 4) { return; }
    gemm_consume(smem, warp, maps, epilogue, M, N, K, num_tiles, [&](auto& sum, auto& columns, auto& tile, int& box) {
        gemm_store<G>(sum, epilogue, columns, smem, maps.out, maps.second, maps.third, tile, M, box);
    });
    gemm_end<G>();
#endif
}

// ---- launch ----

struct GemmArgs {
    floatX *out, *second; // (M,N); second is NULL unless GEMM_SECOND is set
    const floatX* inp;    // (M,K)
    const floatX* weight; // (N,K), or (K,N) with a form that is KN
    const floatX* third;  // (M,N), NULL unless GEMM_THIRD is set; may be the same memory as out
    int M, N, K;
};

// The tensor map of a matrix (M,N) in boxes of 16x64, as results are stored.
inline CUtensorMap gemm_box_map(const floatX* matrix, int M, int N) { return tensor_map(matrix, {N, M}, {64, 16}); }

// A matrix that is NULL gets inp's map, which is then not used.
template <class G> GemmMaps gemm_maps(const GemmArgs& g) {
    GemmMaps maps;
    maps.inp = GemmInp<G>::map(g.inp, g.M, g.K), maps.weight = GemmWeight<G>::map(g.weight, g.N, g.K);
    maps.out = g.out ? gemm_box_map(g.out, g.M, g.N) : maps.inp;
    maps.second = g.second ? gemm_box_map(g.second, g.M, g.N) : maps.inp;
    maps.third = g.third ? gemm_box_map(g.third, g.M, g.N) : maps.inp;
    return maps;
}

// The number of tiles of out, or of pairs of tiles if a cluster has two blocks.
template <class G> int gemm_num_tiles(int M, int N, int K) {
    require(M > 0 && N > 0 && K > 0 && N % 8 == 0 && K % 8 == 0);
    size_t num_tiles = ceil_div((size_t)M, (size_t)G::ROWS * G::CLUSTER) * ceil_div((size_t)N, (size_t)G::COLUMNS);
    require(num_tiles * ceil_div(K, 64) <= INT_MAX / 2); // steps are counted in an int
    return (int)num_tiles;
}

// Launches a kernel of the form G for num_tiles tiles, or pairs of tiles: a block per SM, or fewer if there are fewer tiles.
// early: see LaunchShape. The kernel has its dynamic shared memory, an SMem, from shared_aligned_1024().
template <class G, class SMem = GemmSMem<G>, class... Parameters, class... Arguments>
void gemm_start(void (*kernel)(Parameters...), int num_tiles, bool early, const Execution& exec,
                const Arguments&... arguments) {
    const int bytes = sizeof(SMem) + 1024;
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    int num_blocks = min(num_tiles, exec.free_sms() / G::CLUSTER) * G::CLUSTER;
    launch_kernel(kernel, LaunchShape(num_blocks, 384, bytes, G::CLUSTER, early), exec, arguments...);
}

// out = finish(inp weight^T), and idle warps run `idle_work`. Requires has_sm90a(), K % 8 == 0, N % 8 == 0, and all
// pointers aligned to 16 bytes.
template <class G = GemmPingPong192Pairs, class Epilogue, class IdleWork = GemmNoIdleWork>
void gemm(const GemmArgs& g, const Epilogue& epilogue, const Execution& exec, const IdleWork& idle_work = {}) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require((g.second != NULL) == ((Epilogue::EXTRAS & GEMM_SECOND) != 0));
    require((g.third != NULL) == ((Epilogue::EXTRAS & GEMM_THIRD) != 0));
    int num_tiles = gemm_num_tiles<G>(g.M, g.N, g.K);
    gemm_start<G>(gemm_sm90_kernel9<G, Epilogue, IdleWork>, num_tiles, true, exec, gemm_maps<G>(g), epilogue, g.M, g.N,
                  g.K, num_tiles, idle_work);
}
#endif
// ==== end promoted: gemm ====
