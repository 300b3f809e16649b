/*
A linear layer on Hopper, with all that follows it: out (M,N) = finish(inp (M,K) weight (N,K)^T), 16-bit operands,
fp32 sums, wgmma and TMA.

A persistent block an SM: one warpgroup brings tiles of both operands into a ring of stages, two multiply. In turns,
each of the two has a tile of its own, and one finishes and stores its tile under the other's products: for a short K,
whose products take not much longer than that. Together, each has half of a larger tile: for a long K. Blocks may work
in clusters of two: they share a tile of the weight, each brings half of it to both.

What follows the product is an epilogue: a struct that the kernel calls for each sum, in registers. Results go by way of
shared memory to TMA stores, which leave out what lies outside of the matrix: any M and N, multiples of a tile or not.

Both operands may be e4m3 instead, with scales in the epilogue: a stage is then 128 columns of K, which take as many
bytes, and its products as many cycles. So may a result, for a product that comes after it.

gemm_sm90() launches it. A kernel of another shape can be made of gemm_sm90_init, _load, _multiply and _store. On
anything but sm_90a the kernel is empty: ask has_sm90a() before. FP32 builds have none of this.

Source: warp-specialised persistent kernels in turns and together are those of CUTLASS 3; layouts: the PTX ISA, "wgmma".
*/
#pragma once

#include "gelu.cuh"
#include "ptx.cuh"

#if !defined(ENABLE_FP32)

// ---- what follows a product ---------------------------------------------------------------------------------

// Extras, which an epilogue asks for as its constant `extras`:
enum {
    GEMM_GELU = 1,     // out = gelu(y), tanh form, where y is the epilogue's value
    GEMM_SECOND = 2,   // y itself goes to a second matrix
    GEMM_RESIDUAL = 4, // a matrix of out's shape is added
    GEMM_E4M3 = 8,     // out is e4m3, its columns as gemm_sm90_store_e4m3 has them; beside it none but GEMM_GELU
};

// y = sum + bias
template <int extras_> struct GemmBias {
    static constexpr int extras = extras_;
    const floatX* bias; // (N), or NULL: 0

    struct Row {};         // what a thread keeps of a row,
    typedef uint32_t Pair; // of two neighbouring columns as they are in memory, the first one even,
    typedef float Column;  // and of one of them
    __device__ void begin() {}
    __device__ Row row(int) const { return {}; }
    __device__ Pair pair(int column) const {
        return bias ? __ldg(reinterpret_cast<const uint32_t*>(bias + column)) : 0;
    }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        float2 x = unpack_16x2(pair, floatX());
        c[0] = x.x, c[1] = x.y;
    }
    __device__ float value(float sum, const Row&, const Column& c) const { return sum + c; }
};

// y = sum * scale + bias, where scale undoes those of two e4m3 operands
template <int extras_> struct GemmScaledBias {
    static constexpr int extras = extras_;
    const float *inp_scale, *weight_scale; // what each was multiplied by, inverted: one float each
    const floatX* bias;                    // (N), or NULL: 0
    __nv_fp8_e4m3* out;                    // (M,N), with GEMM_E4M3 alone, as the next
    const float* out_scale;                // what results are multiplied by: one float

    // From these, by begin(), which a kernel calls once for its own copy. With GEMM_GELU and GEMM_E4M3 values are half of
    // out_scale times larger, so that x tanh(x (a + b x^2)) + x is the result: it saves two multiplications for each.
    float scale, out_multiplier, a, b;

    struct Row {};
    typedef uint32_t Pair;
    typedef float Column;
    static constexpr bool is_e4m3 = extras & GEMM_E4M3, is_gelu = extras & GEMM_GELU;
    __device__ void begin() {
        scale = __ldg(inp_scale) * __ldg(weight_scale);
        if (is_e4m3) {
            out_multiplier = is_gelu ? 0.5f * __ldg(out_scale) : __ldg(out_scale);
            scale *= out_multiplier;
            a = 0.7978845608f / out_multiplier;                                     // sqrt(2/pi)
            b = 0.0356774081f / (out_multiplier * out_multiplier * out_multiplier); // 0.044715 sqrt(2/pi)
        }
    }
    __device__ Row row(int) const { return {}; }
    __device__ Pair pair(int column) const { return GemmBias<0>{bias}.pair(column); }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        GemmBias<0>().columns(c, pair);
        if (is_e4m3) { c[0] *= out_multiplier, c[1] *= out_multiplier; }
    }
    __device__ float value(float sum, const Row&, const Column& c) const { return fmaf(sum, scale, c); }
    __device__ float finish(float x) const { return is_gelu ? fmaf(x, tanh_approx(x * fmaf(x * x, b, a)), x) : x; }
};

// y = rstd_i * (sum - mean_i * u_j) + v_j: layernorm(inp) through a linear layer, for a weight that has the layernorm's
// weight multiplied in, u (N) the sums of its rows, v (N) what the layernorm's bias and the layer's own come to.
template <int extras_> struct GemmLayernorm {
    static constexpr int extras = extras_;
    const float *mean, *rstd; // (M)
    const float2* sums;       // (N): u, v; aligned to 16 bytes

    struct Row {
        float mean, rstd;
    };
    typedef float4 Pair;
    struct Column {
        float u, v;
    };
    __device__ void begin() {}
    __device__ Row row(int row) const { return {mean[row], rstd[row]}; }
    __device__ Pair pair(int column) const { return __ldg(reinterpret_cast<const float4*>(sums + column)); }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        c[0].u = pair.x, c[0].v = pair.y, c[1].u = pair.z, c[1].v = pair.w;
    }
    __device__ float value(float sum, const Row& r, const Column& c) const {
        return r.rstd * (sum - r.mean * c.u) + c.v;
    }
};

// ---- tiles and shared memory --------------------------------------------------------------------------------

// rows_ x columns_ is a tile of out. in_turns_: each of two warpgroups has a tile, else half of its rows. cluster_: 1
// or 2 blocks. ring_: stages of 64 along K. boxes_: how many boxes of 16x64 results a warp may have under way.
template <int rows_, int columns_, bool in_turns_, int cluster_, int ring_, int boxes_> struct GemmTiles {
    static constexpr int rows = rows_, columns = columns_, cluster = cluster_, ring = ring_, boxes = boxes_;
    static constexpr bool in_turns = in_turns_, e4m3 = false;
    static constexpr int parts = rows / (in_turns ? 64 : 128); // of 64 rows, for a warpgroup
    static_assert(parts >= 1 && parts * columns <= 2 * 192, "so many sums fit a thread's registers");
};

template <class G> using GemmTilesSame = G;
// The same for operands of e4m3. Two of them take the place of one floatX: what follows counts such places along K.
template <class G> struct GemmTilesE4M3 : G { static constexpr bool e4m3 = true; };

template <class G> struct GemmSM90Shared {
    static constexpr int ring = G::ring;
    struct Stage { // 64 columns of both operands, as TMA writes them
        floatX inp[G::rows * 64], weight[G::columns * 64];
    } stages[G::ring];
    floatX boxes[8][G::boxes][16 * 64]; // of each warp
    uint64_t full[G::ring], empty[G::ring], box_full[8][G::boxes];
    uint64_t turn[2]; // in turns: the other warpgroup has issued its products

    static constexpr int bytes() {
        static_assert(sizeof(Stage) % 1024 == 0, "every tile is aligned to 1024 bytes, as the swizzle wants");
        static_assert(sizeof(GemmSM90Shared) + 1024 <= 227 << 10, "all that compute capability 9.0 has");
        return sizeof(GemmSM90Shared) + 1024;
    }
};

// Which tile of out, by its first row and column.
struct GemmTile {
    int row, column;
};

// Tile number `index` of a list: groups of 16 rows of tiles, in a group column after column. So the blocks at work
// share rows of inp and columns of the weight, both of which stay in L2, however long the weight is.
template <class G> __device__ inline GemmTile gemm_sm90_tile(int index, int M, int N, int rank) {
    const int group = 16 / G::cluster;
    int num_rows = ceil_div(M, G::rows * G::cluster), num_columns = ceil_div(N, G::columns);
    int first = index / (group * num_columns) * group, within = index % (group * num_columns);
    int height = min(group, num_rows - first);
    return {((first + within % height) * G::cluster + rank) * G::rows, within / height * G::columns};
}

// ---- device code, for kernels of 384 threads: warpgroup 0 loads, 1 and 2 multiply -----------------------------

// Dynamic shared memory is aligned to less than the 1024 bytes that the swizzle counts from: a KB is asked for more.
template <class G> __device__ inline GemmSM90Shared<G>& gemm_sm90_shared(unsigned char* dynamic_shared) {
    uint32_t address = shared_address(dynamic_shared);
    return *reinterpret_cast<GemmSM90Shared<G>*>(dynamic_shared + (1024 - address % 1024) % 1024);
}

// First thing for all threads. After it what earlier kernels wrote can be read.
template <class G> __device__ inline void gemm_sm90_init(GemmSM90Shared<G>& smem) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < G::ring; s++) {
            mbarrier_init(&smem.full[s], 1);
            mbarrier_init(&smem.empty[s], (G::in_turns ? 4 : 8) * G::cluster); // the warps that read a stage
        }
        for (int i = 0; i < 8 * G::boxes; i++) { mbarrier_init(&smem.box_full[0][0] + i, 1); }
        for (int i = 0; i < 2; i++) { mbarrier_init(&smem.turn[i], 4); }
        mbarrier_init_fence();
    }
    if (G::cluster > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    grid_launch_dependents(); // they find room when this grid's blocks end
    grid_wait_dependency();
}

// Brings the operands of a tile into the ring, from position i of it on. One thread of a block.
template <class G> __device__ inline void gemm_sm90_load(GemmSM90Shared<G>& smem, const CUtensorMap& inp_map,
                                                         const CUtensorMap& weight_map, const GemmTile& tile,
                                                         int num_steps, int rank, int& i) {
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        auto& stage = smem.stages[i % G::ring];
        uint64_t* full = &smem.full[i % G::ring];
        mbarrier_wait(&smem.empty[i % G::ring], (i / G::ring + 1) % 2);
        mbarrier_arrive_expect(full, sizeof(stage));
        tma_load_2d(stage.inp, &inp_map, step * 64, tile.row, full);
        if (G::cluster == 1) {
            tma_load_2d(stage.weight, &weight_map, step * 64, tile.column, full);
        } else { // empty in all blocks, for each writes to all
            const int part = G::columns / G::cluster;
            tma_load_2d_multicast(stage.weight + rank * part * 64, &weight_map, step * 64, tile.column + rank * part,
                                  full, (1 << G::cluster) - 1);
        }
    }
}

template <bool e4m3, int n>
__device__ inline void gemm_sm90_wgmma(float (&sum)[n], uint64_t inp, uint64_t weight, bool accumulate) {
    static_assert(n == 64 || n == 96 || n == 128, "128, 192 or 256 columns");
    if constexpr (e4m3) {
        if constexpr (n == 64) { wgmma_64x128x32_e4m3(sum, inp, weight, accumulate); }
        if constexpr (n == 96) { wgmma_64x192x32_e4m3(sum, inp, weight, accumulate); }
        if constexpr (n == 128) { wgmma_64x256x32_e4m3(sum, inp, weight, accumulate); }
        return;
    }
    if constexpr (n == 64) { wgmma_64x128x16(sum, inp, weight, accumulate, floatX()); }
    if constexpr (n == 96) { wgmma_64x192x16(sum, inp, weight, accumulate, floatX()); }
    if constexpr (n == 128) { wgmma_64x256x16(sum, inp, weight, accumulate, floatX()); }
}

// The stage has been read by this warp: the blocks that write to it may.
template <class G> __device__ inline void gemm_sm90_release(GemmSM90Shared<G>& smem, int i) {
    int lane = threadIdx.x % 32;
    if (G::cluster == 1 && lane == 0) { mbarrier_arrive(&smem.empty[i % G::ring]); }
    if (G::cluster > 1 && lane < G::cluster) { mbarrier_arrive_cluster(&smem.empty[i % G::ring], lane); }
}

// sum[part] = 64 rows of the product, of a tile whose steps lie in the ring from position i on; first_row: the
// warpgroup's first one in the tile; number: how many tiles it has had before. In turns, it waits for the other's: a
// barrier of the ring tells a phase only from the one before it, so that who waits for a stage must not be far ahead.
// sum[part][4j..4j+3] is the 16x8 tile of mma_16x8x16 at columns 8j.
template <class G> __device__ inline void gemm_sm90_multiply(float (&sum)[G::parts][G::columns / 2],
                                                             GemmSM90Shared<G>& smem, int first_row, int num_steps,
                                                             int number, int& i) {
    int second = threadIdx.x / 128 - 1; // of the two warpgroups
    if (G::in_turns) { mbarrier_wait(&smem.turn[second], (number + 1 + second) % 2); }
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        auto& stage = smem.stages[i % G::ring];
        uint64_t inp = wgmma_descriptor(stage.inp + first_row * 64), weight = wgmma_descriptor(stage.weight);
        mbarrier_wait(&smem.full[i % G::ring], i / G::ring % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 columns are 32 bytes, 2 in units of the descriptor; 64 rows are 8192, 512
#pragma unroll
            for (int m = 0; m < G::parts; m++) {
                gemm_sm90_wgmma<G::e4m3>(sum[m], inp + 512 * m + 2 * k, weight + 2 * k, step > 0 || k > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<1>(); // the previous step's products are done
        if (step > 0) { gemm_sm90_release(smem, i - 1); }
    }
    if (G::in_turns && threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.turn[1 - second]); }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < G::parts; m++) { wgmma_hold(sum[m]); }
    gemm_sm90_release(smem, i - 1);
}

// What a warp's epilogue wants to know of a tile's columns, on its way from memory under the products: 64 are 32 pairs,
// one for each lane. Who wants one gets it from there; a load for each use would take longer than all the rest.
template <class G, class Epilogue> struct GemmColumns { typename Epilogue::Pair pairs[G::columns / 64]; };
template <class G, class Epilogue> __device__ inline void
gemm_sm90_load_columns(GemmColumns<G, Epilogue>& columns, const Epilogue& epilogue, int column, int N) {
#pragma unroll
    for (int q = 0; q < G::columns / 64; q++) {
        columns.pairs[q] = epilogue.pair(min(column + 64 * q + (int)threadIdx.x % 32 * 2, N - 2));
    }
}
// Both columns of pair i of those. All lanes take part.
template <class Epilogue> __device__ inline void gemm_sm90_columns(typename Epilogue::Column (&columns)[2],
                                                                   const Epilogue& epilogue,
                                                                   const typename Epilogue::Pair& pair, int i) {
    const int n = sizeof(pair) / sizeof(uint32_t);
    typename Epilogue::Pair got;
    uint32_t words[n];
    memcpy(words, &pair, sizeof(pair));
#pragma unroll
    for (int j = 0; j < n; j++) { words[j] = __shfl_sync(0xFFFFFFFFu, words[j], i); }
    memcpy(&got, words, sizeof(pair));
    epilogue.columns(columns, got);
}

// The 16x64 boxes of a warp's part of a tile are numbered 0, 1, 2 ... along rows first, through all tiles, and go round
// in the warp's room in shared memory. `box` is how many there were before this tile. Shared has boxes and box_full as
// GemmSM90Shared has them.

// Orders box number n of this tile of the residual. One lane.
template <class G, class Shared> __device__ inline void
gemm_sm90_load_box(Shared& smem, const CUtensorMap& residual_map, int row, int column, int n, int box) {
    const int columns = G::columns / 64;
    int warp = threadIdx.x / 32 - 4, place = (box + n) % G::boxes;
    mbarrier_arrive_expect(&smem.box_full[warp][place], sizeof(smem.boxes[0][0]));
    tma_load_2d_once(smem.boxes[warp][place], &residual_map, column + n % columns * 64, row + n / columns * 64,
                     &smem.box_full[warp][place]);
}

// Before gemm_sm90_multiply of a tile, with the arguments of gemm_sm90_store: what that adds comes under the products.
template <class G, class Epilogue, class Shared>
__device__ inline void gemm_sm90_prepare(GemmColumns<G, Epilogue>& columns, const Epilogue& epilogue, Shared& smem,
                                         const CUtensorMap& residual_map, int row, int column, int N, int box) {
    const int num_boxes = G::parts * (G::columns / 64);
    gemm_sm90_load_columns(columns, epilogue, column, N);
    if (!(Epilogue::extras & GEMM_RESIDUAL) || threadIdx.x % 32 != 0) { return; }
    tma_store_wait<0>();
    for (int n = 0; n < min(num_boxes, G::boxes); n++) {
        gemm_sm90_load_box<G>(smem, residual_map, row, column, n, box);
    }
}

// Finishes the sums of a warp and gives them to TMA; row: its first one in out. The last stores may still be under way
// after it; they are the first lane's.
template <class G, class Epilogue, class Shared>
__device__ inline void gemm_sm90_store(float (&sum)[G::parts][G::columns / 2], const Epilogue& epilogue,
                                       const GemmColumns<G, Epilogue>& columns, Shared& smem,
                                       const CUtensorMap& out_map, const CUtensorMap& second_map,
                                       const CUtensorMap& residual_map, int row, int column, int M, int& box) {
    constexpr bool has_second = Epilogue::extras & GEMM_SECOND, has_residual = Epilogue::extras & GEMM_RESIDUAL;
    static_assert(!has_second || !has_residual, "they share the boxes");
    constexpr int num_columns = G::columns / 64, num_boxes = G::parts * num_columns, ahead = G::boxes / 2;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, first_box = box;
    // where this lane's 16 bytes of 16 columns lie in a box, for stmatrix: the swizzle takes the row into the chunk
    uint32_t lane_at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    typename Epilogue::Row rows[2];
#pragma unroll
    for (int n = 0; n < num_boxes; n++) {
        const int m = n / num_columns, q = n % num_columns;
        int box_row = row + 64 * m, box_column = column + 64 * q;
        for (int half = 0; q == 0 && half < 2; half++) {
            rows[half] = epilogue.row(min(box_row + 8 * half + lane / 4, M - 1));
        }
        int place = box % G::boxes, second_place = (box + 1) % G::boxes;
        if (has_residual) {
            if (n + ahead >= G::boxes && n + ahead < num_boxes && lane == 0) { // into the box of n + ahead - boxes
                tma_store_wait<G::boxes - ahead - 1>();
                gemm_sm90_load_box<G>(smem, residual_map, row, column, n + ahead, first_box);
            }
            mbarrier_wait(&smem.box_full[warp][place], box / G::boxes % 2);
        } else {
            if (lane == 0) { tma_store_wait<has_second ? G::boxes / 2 - 1 : G::boxes - 1>(); }
            __syncwarp();
        }
        uint32_t at = shared_address(smem.boxes[warp][place]) + lane_at;
        uint32_t second_at = shared_address(smem.boxes[warp][second_place]) + lane_at;
#pragma unroll
        for (int p = 0; p < 4; p++) { // 16 columns
            uint32_t out[4], second[4], residual[4];
            if (has_residual) { ldmatrix_x4(residual, at ^ p << 5); }
#pragma unroll
            for (int j = 0; j < 2; j++) { // 8 of them
                typename Epilogue::Column two[2];
                gemm_sm90_columns(two, epilogue, columns.pairs[q], 8 * p + 4 * j + lane % 4);
#pragma unroll
                for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
                    const int k = 32 * q + 8 * p + 4 * j + 2 * half;
                    float x = epilogue.value(sum[m][k], rows[half], two[0]);
                    float y = epilogue.value(sum[m][k + 1], rows[half], two[1]);
                    if (has_second) { second[2 * j + half] = pack_16x2(x, y, floatX()); }
                    if (Epilogue::extras & GEMM_GELU) { x = gelu(x), y = gelu(y); }
                    if (has_residual) {
                        float2 add = unpack_16x2(residual[2 * j + half], floatX());
                        x += add.x, y += add.y;
                    }
                    out[2 * j + half] = pack_16x2(x, y, floatX());
                }
            }
            stmatrix_x4(at ^ p << 5, out);
            if (has_second) { stmatrix_x4(second_at ^ p << 5, second); }
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(&out_map, smem.boxes[warp][place], box_column, box_row);
            if (has_second) { tma_store_2d(&second_map, smem.boxes[warp][second_place], box_column, box_row); }
            tma_store_commit();
        }
        box += has_second ? 2 : 1;
    }
}

// As gemm_sm90_store, to e4m3 (M,N), N % 64 == 0. So that a thread's results for a row and 64 columns are one store of 16
// bytes, column 8j + 2t + e of these 64, t < 4 and e < 2, goes to place 16t + 2j + e: gemm_sm90_e4m3_column. A product
// that takes the result wants its weight's columns in this order.
template <class G, class Epilogue> __device__ inline void gemm_sm90_store_e4m3(float (&sum)[G::parts][G::columns / 2],
                                                                               const Epilogue& epilogue,
                                                                               const GemmColumns<G, Epilogue>& columns,
                                                                               int row, int column, int M, int N) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < G::parts * (G::columns / 64); n++) {
        const int m = n % G::parts, q = n / G::parts;
        typename Epilogue::Row rows[2];
        uint32_t words[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows[half] = epilogue.row(min(row + 64 * m + 8 * half + lane / 4, M - 1));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { // 16 columns
            typename Epilogue::Column two[2][2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                gemm_sm90_columns(two[j], epilogue, columns.pairs[q], 8 * i + 4 * j + lane % 4);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
                float y[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float x = sum[m][32 * q + 8 * i + k / 2 * 4 + 2 * half + k % 2];
                    y[k] = epilogue.finish(epilogue.value(x, rows[half], two[k / 2][k % 2]));
                }
                words[half][i] = pack_e4m3x4(y[0], y[1], y[2], y[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = row + 64 * m + 8 * half + lane / 4, first = column + 64 * q;
            if (at < M && first < N) {
                *reinterpret_cast<uint4*>(epilogue.out + (size_t)at * N + first + lane % 4 * 16) =
                    make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
            }
        }
    }
}
// The column of 64 that stands in this place.
__host__ __device__ inline int gemm_sm90_e4m3_column(int place) {
    return place % 16 / 2 * 8 + place / 16 * 2 + place % 2;
}

// Last thing for the warps that multiply: shared memory stays until all is read, and until the cluster is done with it.
template <class G> __device__ inline void gemm_sm90_end() {
    if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); }
    if (G::cluster > 1) { cluster_sync(); }
}

// ---- the kernel ---------------------------------------------------------------------------------------------

struct GemmSM90Maps { // how TMA sees out and what has its shape, in boxes of 16x64; inp and weight, in tiles
    CUtensorMap inp, weight, out, second, residual;
};

template <class G, class Epilogue> __global__ void __launch_bounds__(384, 1)
    gemm_sm90_kernel(const __grid_constant__ GemmSM90Maps maps, Epilogue epilogue, int M, int N, int K, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_sm90_dynamic[];
    GemmSM90Shared<G>& smem = gemm_sm90_shared<G>(gemm_sm90_dynamic);
    if (threadIdx.x == 0) { tma_prefetch_map(&maps.inp), tma_prefetch_map(&maps.weight), tma_prefetch_map(&maps.out); }
    gemm_sm90_init(smem);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // now the compiler knows it to be the same for a warp
    int warpgroup = warp / 4, rank = G::cluster > 1 ? cluster_rank() : 0, num_steps = ceil_div(K, 64), i = 0;
    int first = blockIdx.x / G::cluster, stride = gridDim.x / G::cluster;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<24>();
        if (threadIdx.x != 0) { return; }
#pragma unroll 1
        for (int index = first; index < num_tiles; index += stride) {
            gemm_sm90_load(smem, maps.inp, maps.weight, gemm_sm90_tile<G>(index, M, N, rank), num_steps, rank, i);
        }
        return;
    }
    warpgroup_more_registers<240>();
    int box = 0, number = 0, first_row = G::in_turns ? 0 : (warpgroup - 1) * 64;
    if (G::in_turns) { // tiles go to warpgroups 1, 2, 1 ...; their steps go through the ring in that order
        first += (warpgroup - 1) * stride;
        stride *= 2;
        i = (warpgroup - 1) * num_steps;
    }
    epilogue.begin();
#pragma unroll 1
    for (int index = first; index < num_tiles; index += stride, number++) {
        float sum[G::parts][G::columns / 2];
        GemmTile tile = gemm_sm90_tile<G>(index, M, N, rank);
        int row = tile.row + first_row + warp % 4 * 16;
        GemmColumns<G, Epilogue> columns;
        gemm_sm90_prepare(columns, epilogue, smem, maps.residual, row, tile.column, N, box);
        gemm_sm90_multiply<G>(sum, smem, first_row, num_steps, number, i);
        if (G::in_turns) { i += num_steps; }
        if constexpr (Epilogue::extras & GEMM_E4M3) {
            gemm_sm90_store_e4m3<G>(sum, epilogue, columns, row, tile.column, M, N);
        } else {
            gemm_sm90_store<G>(sum, epilogue, columns, smem, maps.out, maps.second, maps.residual, row, tile.column, M,
                               box);
        }
    }
    gemm_sm90_end<G>();
#endif
}

// ---- launchers ----------------------------------------------------------------------------------------------

struct GemmSM90 {
    floatX *out, *second;   // (M,N), second only with GEMM_SECOND; out NULL with GEMM_E4M3
    const floatX* inp;      // (M,K)
    const floatX* weight;   // (N,K)
    const floatX* residual; // (M,N), only with GEMM_RESIDUAL; may be out
    int M, N, K;
    bool early; // may start before the kernel ahead of it in the stream has ended; it waits for that
};

inline CUtensorMap gemm_sm90_box_map(const floatX* matrix, int M, int N) {
    return tensor_map(matrix, {N, M}, {64, 16});
}

// Launches a kernel of 384 threads and `bytes` of dynamic shared memory, in clusters.
template <class... Parameters, class... Arguments>
void gemm_sm90_start(void (*kernel)(Parameters...), int num_blocks, int cluster, int bytes, bool early,
                     cudaStream_t stream, const Arguments&... arguments) {
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(num_blocks);
    config.blockDim = dim3(384);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    }
    if (early) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaCheck(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class G, class Epilogue>
void gemm_sm90_tiles(const GemmSM90& g, const Epilogue& epilogue, cudaStream_t stream) {
    const bool has_second = Epilogue::extras & GEMM_SECOND, has_residual = Epilogue::extras & GEMM_RESIDUAL;
    GemmSM90Maps maps;
    maps.inp = tensor_map(g.inp, {g.K, g.M}, {64, G::rows});
    maps.weight = tensor_map(g.weight, {g.K, g.N}, {64, G::columns / G::cluster});
    maps.out = g.out ? gemm_sm90_box_map(g.out, g.M, g.N) : maps.inp;
    maps.second = has_second ? gemm_sm90_box_map(g.second, g.M, g.N) : maps.out;
    maps.residual = has_residual ? gemm_sm90_box_map(g.residual, g.M, g.N) : maps.out;
    size_t num_tiles = ceil_div((size_t)g.M, (size_t)G::rows * G::cluster) * ceil_div((size_t)g.N, (size_t)G::columns);
    require(num_tiles * ceil_div(g.K, 64) <= INT_MAX / 2);
    int num_clusters = min((int)num_tiles, num_multiprocessors() / G::cluster);
    gemm_sm90_start(gemm_sm90_kernel<G, Epilogue>, num_clusters * G::cluster, G::cluster, GemmSM90Shared<G>::bytes(),
                    g.early, stream, maps, epilogue, g.M, g.N, g.K, (int)num_tiles);
}

// The forms that are worth a choice. 192 divides 768 and 3072, and the sums of a tile so wide fit a warpgroup.
enum {
    GEMM_TURNS_192 = 1,
    GEMM_TURNS_192_PAIRS,
    GEMM_TOGETHER_256,
    GEMM_TOGETHER_256_PAIRS,
    GEMM_TURNS_128_PAIRS,
    GEMM_TURNS_192_DEEP
};
typedef GemmTiles<128, 192, true, 1, 4, 4> GemmTurns192;
typedef GemmTiles<128, 192, true, 2, 4, 4> GemmTurns192Pairs;
typedef GemmTiles<128, 256, false, 1, 4, 2> GemmTogether256;
typedef GemmTiles<128, 256, false, 2, 4, 2> GemmTogether256Pairs;
typedef GemmTiles<128, 128, true, 2, 5, 4> GemmTurns128Pairs;

// out = finish(inp weight^T). Needs has_sm90a(); K % 8 == 0, N % 8 == 0; all pointers aligned to 16 bytes.
template <class Epilogue, template <class> class Tiles = GemmTilesSame>
void gemm_sm90(const GemmSM90& g, const Epilogue& epilogue, cudaStream_t stream, int form = GEMM_TURNS_192) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(g.M > 0 && g.N > 0 && g.K > 0 && g.N % 8 == 0 && g.K % 8 == 0);
    switch (form) {
    case GEMM_TURNS_192:
        return gemm_sm90_tiles<Tiles<GemmTurns192>>(g, epilogue, stream);
    case GEMM_TURNS_192_PAIRS:
        return gemm_sm90_tiles<Tiles<GemmTurns192Pairs>>(g, epilogue, stream);
    case GEMM_TOGETHER_256:
        return gemm_sm90_tiles<Tiles<GemmTogether256>>(g, epilogue, stream);
    case GEMM_TOGETHER_256_PAIRS:
        return gemm_sm90_tiles<Tiles<GemmTogether256Pairs>>(g, epilogue, stream);
    case GEMM_TURNS_128_PAIRS:
        return gemm_sm90_tiles<Tiles<GemmTurns128Pairs>>(g, epilogue, stream);
    }
    require(!"a form of gemm_sm90");
}

// The same for operands of e4m3, (M,K) and (N,K), K % 16 == 0: two of them, cast, take the place of one of g's floatX,
// so that g.K is half of K.
template <class Epilogue>
void gemm_sm90_e4m3(const GemmSM90& g, const Epilogue& epilogue, cudaStream_t stream, int form = GEMM_TURNS_192) {
    require(!(Epilogue::extras & GEMM_E4M3) || g.N % 64 == 0);
    gemm_sm90<Epilogue, GemmTilesE4M3>(g, epilogue, stream, form);
}

#endif
