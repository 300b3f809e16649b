/*
decode_layers: all layers of the transformer for the newest token of each of B texts, in one launch: x (B,C) inout, keys and values
(L,B,capacity,C) inout, position (B) int, weights as in llmc/decode_layer.cuh, packed as in DecodeLayerPacked below
Constraint: sm_90a, 16-bit floatX, heads of 64, and what decode_layers_runs() checks.
Kernels 5 (one text) and 6 (2 to 16 texts) of decode_layer.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/decode_layer.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "decode_attention.cuh"

// ==== promoted: decode_layer ====
// The width of the MLP, divided by C. A head has as many times DECODE_LAYER_HS hidden units. Kernels 5 and 6 are written for 4: the 8 * 4
// hidden units of a set are a warp's lanes, and 32 stands for their number, too. For another width more changes than this constant.
constexpr int DECODE_LAYER_MLP = 4;

#if !defined(ENABLE_FP32) // 8 lanes share a head's 64 numbers, 16 bytes each

constexpr int DECODE_LAYER_HS = 64, DECODE_LAYER_THREADS = 256, DECODE_LAYER_WARPS = 8;

// The sum of the products of x128::size elements.
__device__ inline float decode_layer_dot(const x128& a, const float (&b)[x128::size]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < x128::size; e++) { sum += (float)a[e] * b[e]; }
    return sum;
}
// The part of n things that block `rank` of a cluster has.
struct DecodeLayerShare {
    int first, n;
};
__host__ __device__ inline int decode_layer_most(int n, int cluster) { return (n + cluster - 1) / cluster; }
__host__ __device__ inline DecodeLayerShare decode_layer_share(int n, int rank, int cluster) {
    int most = decode_layer_most(n, cluster), first = rank * most < n ? rank * most : n;
    return {first, n - first < most ? n - first : most};
}

// What a block knows of the attention of its share of the tokens: the weighted sum of values, the largest score and the sum of
// the weights, 2^(score - largest).
constexpr int DECODE_LAYER_PART = DECODE_LAYER_HS + 2;

// Writes a warp's part. Each group of 8 lanes has had other tokens and has its own `sum` and `total`, relative to `largest`.
__device__ inline void decode_layer_store_part(float (&part)[DECODE_LAYER_PART], float (&sum)[x128::size], float total,
                                               float largest) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 16; offset >= 8; offset /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFFu, total, offset);
#pragma unroll
        for (int e = 0; e < x128::size; e++) { sum[e] += __shfl_xor_sync(0xFFFFFFFFu, sum[e], offset); }
    }
    if (lane < 8) {
#pragma unroll
        for (int e = 0; e < x128::size; e++) { part[lane * x128::size + e] = sum[e]; }
    }
    if (lane == 0) { part[DECODE_LAYER_HS] = largest, part[DECODE_LAYER_HS + 1] = total; }
}
// Returns the sums of n <= 8 parts: elements i and j, the largest score, and the sum of weights.
__device__ inline float2 decode_layer_join(const float (*parts)[DECODE_LAYER_PART], int n, int i, int j, float& largest,
                                           float& total) {
    float2 sum = {};
    largest = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
    for (int p = 0; p < n; p++) { largest = fmaxf(largest, parts[p][DECODE_LAYER_HS]); }
#pragma unroll
    for (int p = 0; p < n; p++) {
        float scale = exp2f(parts[p][DECODE_LAYER_HS] - largest);
        sum.x += scale * parts[p][i], sum.y += scale * parts[p][j];
        total += scale * parts[p][DECODE_LAYER_HS + 1];
    }
    return sum;
}

// ---- kernel 5: one launch, weights in the order in which they are read, mma, results that carry their readiness ----
// Of the 33,000 cycles per layer of the ladder's kernel 3 (C = 768), 7,500 go to the copies of weights that its threads make,
// 7,000 to layernorms of whole vectors in every block, 6,000 to additions in global memory and barriers of all blocks, and
// 8,000 to products. Here
//
//     - a block's weights of a layer are one piece of memory, in the order of their use, made once by decode_layers_pack. One thread
//       copies them by cp.async.bulk to a ring of chunks in shared memory, as far ahead as they fit
//     - products are mma of 16 rows by 16 columns, with the vector in each of the 8 columns of the other operand. A warp takes every
//       eighth chunk of 32 columns, and normalises only these
//     - a block has C / cluster columns of the residual stream in registers. For these it adds up the parts of all heads. A part comes
//       with the number of its phase (attention or MLP of one layer), so a reader waits for the value itself, and no block for a
//       barrier of the grid
//     - the size of the model is known when the kernel is compiled, and the two halves of a layer share their code: there are fewer
//       instructions, which a block runs once per layer, and which have to be loaded as well
//
// A cluster, of `cluster` blocks, has a head. In a layer:
//
//     x of the own columns                                           -> the cluster
//     layernorm; q, k, v of the own rows                             -> the cluster
//     attention over the own tokens, which registers hold by then    -> the cluster
//     projection to the own columns                                  -> all heads: a part of x
//     x + parts of all heads, of the own columns                     -> the cluster
//     layernorm, fc and gelu of the own hidden units                 -> the cluster
//     fcproj of the head's 256 hidden units to the own columns       -> all heads: a part of x
//     x + parts of all heads

// elements: 8 rows by 32 columns; lane l of a warp reads row l / 4, 8 columns from l % 4 * 8 on
constexpr int DECODE_LAYER_FRAGMENT = 8 * 32;
constexpr int DECODE_LAYER_THREADS5 = DECODE_LAYER_THREADS + 32; // the last warp loads weights

// How a block's weights of a layer follow each other, in fragments.
struct DecodeLayerPacked {
    int C, cluster, sets, chunks; // sets: 8 / cluster, each of 24 rows of qkv and 32 of fc; chunks: of 32 columns of C
    int proj, fc, fcproj, end;    // where these matrices begin; qkv begins at 0
    __host__ __device__ constexpr DecodeLayerPacked(int C, int cluster)
        : C(C), cluster(cluster), sets(8 / cluster), chunks(C / 32), proj(chunks * 3 * sets),
          fc(proj + C / 16 / cluster * 4), fcproj(fc + chunks * DECODE_LAYER_MLP * sets),
          end(fcproj + C / 16 / cluster * 4 * DECODE_LAYER_MLP) {}
    // Where the 8 elements of `lane` of fragment f come from: a matrix (0 qkv, 1 attproj, 2 fc, 3 fcproj), and an offset in it.
    //     qkv, fc    (8 chunks of columns) (set) (chunk) (3 or 4 groups of 8 rows)
    //     attproj    (tile of 16 rows) (2 chunks) (2 groups of 8 rows)
    //     fcproj     (8 tiles) (4 pairs of chunks) (tile) (2 chunks) (2 groups of 8 rows)
    struct Source {
        int matrix;
        size_t offset;
    };
    __host__ __device__ Source source(int f, int lane, int head, int rank) const {
        const int HS = DECODE_LAYER_HS, MLP = DECODE_LAYER_MLP, r = lane / 4, column = lane % 4 * 8;
        int chunk = 0;
        auto rows_of = [&](int f, int groups) { // the first row of fragment f of qkv or fc, and its chunk
            int round = f / (8 * groups * sets), rest = f % (8 * groups * sets);
            int n = chunks - 8 * round < 8 ? chunks - 8 * round : 8, set = rest / (n * groups);
            chunk = 8 * round + rest % (n * groups) / groups;
            return (set * groups + rest % groups) * 8;
        };
        if (f < proj) {
            int row = rank * 24 * sets + rows_of(f, 3) + r;
            return {0, (size_t)(row / HS * C + head * HS + row % HS) * C + chunk * 32 + column};
        }
        if (f < fc) {
            f -= proj;
            int out = rank * (C / cluster) + f / 4 * 16 + f % 2 * 8 + r;
            return {1, (size_t)out * C + head * HS + f / 2 % 2 * 32 + column};
        }
        int unit = head * MLP * HS + rank * 8 * MLP * sets;
        if (f < fcproj) {
            unit += rows_of(f - fc, MLP) + r;
            return {2, (size_t)unit * C + chunk * 32 + column};
        }
        f -= fcproj;
        int begin = f / (32 * MLP) * 8, rest = f % (32 * MLP),
            n = C / 16 / cluster - begin < 8 ? C / 16 / cluster - begin : 8; // tiles
        int tile = begin + rest % (4 * n) / 4, pair = rest / (4 * n);
        int out = rank * (C / cluster) + tile * 16 + f % 2 * 8 + r;
        return {3, (size_t)out * MLP * C + head * MLP * HS + pair * 64 + f / 2 % 2 * 32 + column};
    }
};

// packed: for each block, layer and fragment, 32 vectors of 8 elements, n in all
__global__ void decode_layers_pack_kernel5(floatX* packed, const __grid_constant__ DecodeLayers layers, int cluster,
                                           size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const DecodeLayer& l = layers.first;
    DecodeLayerPacked p(l.C, cluster);
    int lane = i % 32, f = i / 32 % p.end, block = i / 32 / p.end / layers.num;
    size_t at = i / 32 / p.end % layers.num * layers.weights;
    DecodeLayerPacked::Source from = p.source(f, lane, block / cluster, block % cluster);
    const floatX* matrices[] = {l.qkvw, l.attprojw, l.fcw, l.fcprojw};
    store128(packed + i * x128::size, load128(matrices[from.matrix] + at + from.offset));
}

// In global memory. attention, mlp (NH,C): the parts of the residual stream, a float, and in the upper half the number of its phase.
// attention6, mlp6 (NH,texts,8,triples): the same for kernel 6: three floats and the phase.
// phase: the number of phases before this launch; arrived: blocks that have finished it. B: the number of texts
struct DecodeLayerParts {
    uint64_t *attention, *mlp;
    uint4 *attention6, *mlp6;
    uint32_t *phase, *arrived;
    int B;
};

template <int C, int cluster> struct DecodeLayerSizes {
    static constexpr int NH = C / DECODE_LAYER_HS, SETS = 8 / cluster, CHUNKS = C / 32;
    static constexpr int OWN = C / cluster;                                // columns of a block
    static constexpr int ROUNDS = (CHUNKS + 7) / 8;                        // chunks of columns per warp
    static constexpr int TOGETHER = SETS == 1 && ROUNDS <= 3 ? ROUNDS : 1; // rounds that pass through the ring at once
    static constexpr int PIECE = 32 * TOGETHER;                            // fragments, at most
    // each matrix of a layer is one piece, the ring has four
    static constexpr bool RESIDENT = SETS == 1 && TOGETHER == ROUNDS && OWN / 16 <= 8 * TOGETHER;
    static constexpr int RING = RESIDENT ? 4 : C > 1280 ? 11 : 12; // pieces
    // Pieces in flight: about 5 MB on the whole GPU, what its memory delivers in a microsecond. More would not come sooner, but
    // all else, the parts of x above all, would queue behind them: with the whole ring in flight C = 1600 took 7% longer.
    static constexpr int IN_FLIGHT = 3;
    static constexpr int CAPACITY = 1024, TOKENS = CAPACITY / cluster / (4 * DECODE_LAYER_WARPS); // tokens per 8 lanes
    static_assert(C % (16 * cluster) == 0 && OWN / 2 <= DECODE_LAYER_THREADS && 8 % cluster == 0 &&
                      C % DECODE_LAYER_HS == 0,
                  "");
};

// The vectors of one half of a layer.
template <int C, int cluster> struct DecodeLayerVectors {
    floatX norm_weight[C], norm_bias[C];
    floatX bias[3 * DECODE_LAYER_HS]; // of the head's q, k and v, or of the block's hidden units
    floatX out_bias[C / cluster];     // of the block's columns of attproj or fcproj

    // Loads them for layer l, whose weights are `at` elements further. One thread calls this.
    __device__ void load(const DecodeLayer& l, size_t at, int half, int head, int rank, uint64_t* full) {
        constexpr int HS = DECODE_LAYER_HS, OWN = C / cluster, MLP = DECODE_LAYER_MLP, UNITS = 8 * MLP * 8 / cluster;
        auto vector = [&](floatX* to, const floatX* from, int n) {
            bulk_load(to, from, n * (int)sizeof(floatX), full);
        };
        mbarrier_arrive_expect(full, (2 * C + OWN + (half == 0 ? 3 * HS : UNITS)) * (int)sizeof(floatX));
        vector(norm_weight, (half == 0 ? l.ln1w : l.ln2w) + at, C);
        vector(norm_bias, (half == 0 ? l.ln1b : l.ln2b) + at, C);
        vector(out_bias, (half == 0 ? l.attprojb : l.fcprojb) + at + rank * OWN, OWN);
        for (int k = 0; half == 0 && k < 3; k++) { vector(bias + k * HS, l.qkvb + at + k * C + head * HS, HS); }
        if (half == 1) { vector(bias, l.fcb + at + head * MLP * HS + rank * UNITS, UNITS); }
    }
};

template <int C, int cluster> struct DecodeLayerShared5 {
    typedef DecodeLayerSizes<C, cluster> Sizes;
    int4 ring[Sizes::RING][Sizes::PIECE * 32];
    alignas(16) DecodeLayerVectors<C, cluster> vectors[2];
    alignas(16) float x[C];
    uint64_t full[Sizes::RING], empty[Sizes::RING], vectors_full[2], vectors_empty[2];
    uint64_t x_there, qkv_there, attention_there, hidden_there;
    float qkv[3 * DECODE_LAYER_HS], attended[cluster][DECODE_LAYER_PART]; // attended: attention over a block's tokens
    float warps[DECODE_LAYER_WARPS][DECODE_LAYER_PART];                   // attention of each warp
    float products[2][DECODE_LAYER_WARPS][32 * Sizes::SETS + 4];          // of each warp's columns: of qkv, and of fc
    alignas(16) floatX normed[C];                                         // each warp reads only what it wrote
    alignas(16) floatX operand[DECODE_LAYER_WARPS][DECODE_LAYER_HS];      // attention, for attproj: of each warp
    alignas(16) floatX hidden[DECODE_LAYER_MLP * DECODE_LAYER_HS];        // of the head, for fcproj
};

template <int C, int cluster> struct DecodeLayerBlock : DecodeLayerSizes<C, cluster> {
    typedef DecodeLayerSizes<C, cluster> Sizes;
    typedef DecodeLayerShared5<C, cluster> Shared;
    using Sizes::CHUNKS, Sizes::IN_FLIGHT, Sizes::NH, Sizes::OWN, Sizes::PIECE, Sizes::RING, Sizes::ROUNDS, Sizes::SETS;
    using Sizes::RESIDENT, Sizes::TOGETHER, Sizes::TOKENS;
    static constexpr int VEC = x128::size, HS = DECODE_LAYER_HS, WARPS = DECODE_LAYER_WARPS;

    Shared& shared;
    int head, rank, now, lane, warp, first; // first: of the block's columns
    DecodeLayerShare tokens;                // before the newest one, which the last block takes
    int slot = 0, parity = 0;               // of the ring

    __device__ DecodeLayerBlock(Shared& s, const DecodeLayer& l)
        : shared(s), head(blockIdx.x / cluster), rank(cluster_rank()), now(*l.position), lane(threadIdx.x % 32),
          warp(warp_uniform(threadIdx.x / 32)), first(rank * OWN) {
        tokens = decode_layer_share(now, rank, cluster);
    }
    __device__ void sync() const { named_barrier_sync(1, DECODE_LAYER_THREADS); } // of all warps but the last

    // ---- what the last warp loads ----

    __device__ void next() {
        if (++slot == RING) { slot = 0, parity ^= 1; }
    }
    // All weights and vectors, one after the other, in the order in which they are waited for. One thread calls this.
    __device__ void load(const DecodeLayers& layers, const floatX* packed) {
        constexpr DecodeLayerPacked p(C, cluster);
        const DecodeLayer& l = layers.first;
        const floatX* from = packed + (size_t)blockIdx.x * layers.num * p.end * DECODE_LAYER_FRAGMENT;
        int num_pieces = 0;
        auto piece = [&](int n) {
            int bytes = n * DECODE_LAYER_FRAGMENT * (int)sizeof(floatX);
            mbarrier_wait(&shared.empty[slot], parity ^ 1);
            if (!RESIDENT && num_pieces++ >= IN_FLIGHT) {
                int before = slot - IN_FLIGHT;
                mbarrier_wait(&shared.full[before < 0 ? before + RING : before], before < 0 ? parity ^ 1 : parity);
            }
            mbarrier_arrive_expect(&shared.full[slot], bytes);
            bulk_load(shared.ring[slot], from, bytes, &shared.full[slot]);
            from += n * DECODE_LAYER_FRAGMENT;
            next();
        };
        auto projection = [&](int pairs) { // of attention, or of the hidden units, to the own columns
            constexpr int tiles = OWN / 16;
            if (RESIDENT) { piece(tiles * pairs * 4); }
            for (int tile = 0; !RESIDENT && tile < tiles; tile += 8) {
                for (int k = 0; k < pairs; k++) { piece(min(tiles - tile, 8) * 4); }
            }
        };
        auto rounds = [&](int groups) {
            for (int chunk = 0; chunk < CHUNKS; chunk += 8 * TOGETHER) {
                for (int set = 0; set < SETS; set++) { piece(min(CHUNKS - chunk, 8 * TOGETHER) * groups); }
            }
        };
        for (int i = 0; i < layers.num; i++) {
            auto vectors = [&](int half) {
                mbarrier_wait(&shared.vectors_empty[half], (i & 1) ^ 1);
                shared.vectors[half].load(l, i * layers.weights, half, head, rank, &shared.vectors_full[half]);
            };
            vectors(0), rounds(3), projection(1);
            vectors(1), rounds(DECODE_LAYER_MLP), projection(DECODE_LAYER_MLP);
        }
    }
    // This lane's vectors of the next piece of the ring.
    __device__ const int4* take() {
        mbarrier_wait(&shared.full[slot], parity);
        return shared.ring[slot] + lane;
    }
    __device__ void give_back() {
        __syncwarp();
        if (!RESIDENT) { mbarrier_arrive(&shared.empty[slot]); }
        next();
    }
    // After half a layer: what it has used of the vectors and of the ring may be loaded again. Where a layer fits the ring, this is
    // early enough for its weights, too, and they do not delay the exchange between the heads.
    __device__ void give_back_half(int half) const {
        __syncwarp();
        if (RESIDENT) { mbarrier_arrive(&shared.empty[2 * half]), mbarrier_arrive(&shared.empty[2 * half + 1]); }
        mbarrier_arrive(&shared.vectors_empty[half]);
    }

    // ---- products ----

    // sums += 16 rows by 32 columns times x, of which this lane has 8 columns from lane % 4 * 8 on. The two halves of sums are
    // added up later. Each of the 8 columns of the result is the product.
    __device__ static void multiply(float (&sums)[2][4], int4 upper, int4 lower, int4 x) {
        uint32_t a[4] = {(uint32_t)upper.x, (uint32_t)lower.x, (uint32_t)upper.y, (uint32_t)lower.y};
        uint32_t b[4] = {(uint32_t)upper.z, (uint32_t)lower.z, (uint32_t)upper.w, (uint32_t)lower.w};
        mma_16x8x16(sums[0], a, (uint32_t)x.x, (uint32_t)x.y, floatX());
        mma_16x8x16(sums[1], b, (uint32_t)x.z, (uint32_t)x.w, floatX());
    }
    // Of two tiles of 16 rows, lane 4i + j returns the result of row i of group j: of tile j / 2, row i or i + 8.
    __device__ float result(const float (&a)[2][4], const float (&b)[2][4]) const {
        float a0 = a[0][0] + a[1][0], a1 = a[0][2] + a[1][2], b0 = b[0][0] + b[1][0], b1 = b[0][2] + b[1][2];
        float even = lane & 2 ? b0 : a0, odd = lane & 2 ? b1 : a1;
        return lane & 1 ? odd : even;
    }
    // The next matrix of the ring, (8 * groups * SETS, C), groups 3 or 4, times the normalised vector. The parts of the warps go
    // to shared.products. With 3 groups the third one is also the fourth.
    __device__ void product(int groups) {
        float sums[SETS][2][2][4] = {};
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round += TOGETHER) {
            int4 x[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                int c = (8 * (round + j) + warp) * 32 + lane % 4 * VEC;
                x[j] = c < C ? *reinterpret_cast<const int4*>(shared.normed + c) : make_int4(0, 0, 0, 0);
            }
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const int4* from = take() + warp * groups * 32;
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) {
                    if (8 * (round + j) + warp < CHUNKS) {
                        multiply(sums[set][0], from[0], from[32], x[j]);
                        multiply(sums[set][1], from[64], from[groups * 32 - 32], x[j]);
                    }
                    from += 8 * groups * 32;
                }
                give_back();
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float y = result(sums[set][0], sums[set][1]);
            if (lane % 4 < groups) { shared.products[groups - 3][warp][(set * groups + lane % 4) * 8 + lane / 4] = y; }
        }
    }
    // The sum over the warps of row i of the product: half 0 is qkv, 1 is fc.
    __device__ float product_row(int half, int i) const {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) { sum += shared.products[half][w][i]; }
        return sum;
    }

    // ---- the residual stream ----

    // A block's columns belong to its first OWN / 2 threads, two to each.
    __device__ static bool has_columns() { return threadIdx.x < OWN / 2; }
    __device__ int column() const { return first + 2 * (int)threadIdx.x; }
    // Waits for every head's partial projection of this thread's columns. Returns their sums.
    __device__ float2 add_up(const uint64_t* parts, uint32_t phase) const {
        constexpr int together = NH <= 16 ? NH : (NH + 1) / 2; // loads in flight, as many as there are registers for
        const uint64_t* from = hold_pointer(parts + column());
        float2 sum = {};
#pragma unroll 1
        for (int begin = 0; begin < NH; begin += together) {
            ulonglong2 part[together];
            bool there;
            do {
                there = true;
#pragma unroll
                for (int h = 0; h < together; h++) {
                    bool is = NH % together == 0 || begin + h < NH;
                    part[h].x = part[h].y = (uint64_t)phase << 32;
                    if (is) { part[h] = load_relaxed_pair(from + (begin + h) * C); }
                }
#pragma unroll
                for (int h = 0; h < together; h++) {
                    there = there && (uint32_t)(part[h].x >> 32) == phase && (uint32_t)(part[h].y >> 32) == phase;
                }
            } while (!there);
#pragma unroll
            for (int h = 0; h < together; h++) {
                sum.x += __uint_as_float((uint32_t)part[h].x), sum.y += __uint_as_float((uint32_t)part[h].y);
            }
        }
        return sum;
    }
    __device__ static uint64_t part_of(float x, uint32_t phase) { return (uint64_t)phase << 32 | __float_as_uint(x); }
    // Sends this thread's columns of x to all blocks of the cluster.
    __device__ void send_x(float2 x) const {
        if (!has_columns()) { return; }
#pragma unroll
        for (int r = 0; r < cluster; r++) {
            store_cluster_async(reinterpret_cast<const float2*>(&shared.x[column()]), x, &shared.x_there, r);
        }
    }
    // Waits at a barrier of the cluster. Thread 0 makes it ready for the next time.
    __device__ void wait(uint64_t* barrier, int parity, int bytes) const {
        mbarrier_wait_cluster(barrier, parity);
        if (threadIdx.x == 0) { mbarrier_arrive_expect(barrier, bytes); }
    }
    // The layernorm of x, which has arrived, of the warp's chunks of columns.
    __device__ void normalise(const DecodeLayerVectors<C, cluster>& vectors, float epsilon) {
        constexpr int most = (C + 127) / 128;
        float sum = 0.0f, squares = 0.0f;
        float4 x[most]; // zeros past the end
#pragma unroll
        for (int i = 0; i < most; i++) {
            int c = (i * 32 + lane) * 4;
            x[i] = c < C ? *reinterpret_cast<const float4*>(shared.x + c) : make_float4(0, 0, 0, 0);
            sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
        }
        float mean = warp_sum(sum) * (1.0f / C);
#pragma unroll
        for (int i = 0; i < most; i++) {
            float a = x[i].x - mean, b = x[i].y - mean, c = x[i].z - mean, d = x[i].w - mean;
            float four = (a * a + b * b) + (c * c + d * d);
            squares += C % 128 == 0 || (i * 32 + lane) * 4 < C ? four : 0.0f;
        }
        float rstd = rsqrtf(warp_sum(squares) * (1.0f / C) + epsilon);
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            int c = (8 * j + warp) * 32 + lane;
            if (CHUNKS % 8 == 0 || c < C) {
                float weight = (float)vectors.norm_weight[c], bias = (float)vectors.norm_bias[c];
                shared.normed[c] = (floatX)((shared.x[c] - mean) * rstd * weight + bias);
            }
        }
        __syncwarp();
    }

    // ---- attention ----

    // This lane's parts of the keys and values of its tokens: 8 lanes have a token.
    struct Cache {
        int4 keys[TOKENS], values[TOKENS];
    };
    __device__ int token(int i) const { return i * 4 * WARPS + warp * 4 + lane / 8; } // of the block
    __device__ void load_cache(Cache& cache, const floatX* keys, const floatX* values) const {
        size_t first = (size_t)(tokens.first + token(0)) * C + head * HS + lane % 8 * VEC;
        keys = hold_pointer(keys + first), values = hold_pointer(values + first);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            bool there = token(i) < tokens.n;
            int at = i * 4 * WARPS * C;
            cache.keys[i] = there ? *reinterpret_cast<const int4*>(keys + at) : make_int4(0, 0, 0, 0);
            cache.values[i] = there ? *reinterpret_cast<const int4*>(values + at) : make_int4(0, 0, 0, 0);
        }
    }
    // Sends q, k and v of the block's rows to the cluster: warp r sends to block r.
    __device__ void send_qkv() const {
        if (warp >= cluster) { return; }
#pragma unroll
        for (int u = 0; u < SETS; u++) {
            int i = lane + 32 * u, row = rank * 24 * SETS + i;
            if (i >= 24 * SETS) { continue; }
            float value = (float)(floatX)(product_row(0, i) + (float)shared.vectors[0].bias[row]);
            store_cluster_async(&shared.qkv[row], value, &shared.qkv_there, warp);
        }
    }
    // Computes attention over the block's tokens and sends it to the cluster. q, k and v have arrived.
    __device__ void attend(const Cache& cache) {
        int part = lane % 8 * VEC;
        float q[VEC], score[TOKENS + 1], sum[VEC] = {}, largest = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { q[e] = shared.qkv[part + e] * (LOG2E * rsqrtf((float)HS)); }
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            score[i] = -INFINITY;
            if (i * 4 * WARPS >= tokens.n) { continue; }
            float dot = lanes_sum<8>(decode_layer_dot(vec128_from_bits<floatX>(cache.keys[i]), q));
            if (token(i) < tokens.n) { score[i] = dot, largest = fmaxf(largest, dot); }
        }
        bool newest = rank == cluster - 1 && warp == 0; // the token itself, which the first 8 lanes have
        score[TOKENS] = -INFINITY;
        if (newest) {
            float dot = 0.0f;
#pragma unroll
            for (int e = 0; e < VEC; e++) { dot += shared.qkv[HS + part + e] * q[e]; }
            dot = lanes_sum<8>(dot);
            if (lane < 8) { score[TOKENS] = dot, largest = fmaxf(largest, dot); }
        }
        largest = groups_max<8>(largest);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            if (i * 4 * WARPS >= tokens.n) { continue; }
            float share = exp2f(score[i] - largest);
            x128 v = vec128_from_bits<floatX>(cache.values[i]);
            total += share;
#pragma unroll
            for (int e = 0; e < VEC; e++) { sum[e] += share * (float)v[e]; }
        }
        if (newest) {
            float share = exp2f(score[TOKENS] - largest);
            total += share;
#pragma unroll
            for (int e = 0; e < VEC; e++) { sum[e] += share * shared.qkv[2 * HS + part + e]; }
        }
        decode_layer_store_part(shared.warps[warp], sum, total, largest);
        sync();
        if (warp >= cluster) { return; }
        float* to = shared.attended[rank]; // warp r adds up what all warps know, and sends it to block r
        float2 both = decode_layer_join(shared.warps, WARPS, lane, lane + 32, largest, total);
        store_cluster_async(to + lane, both.x, &shared.attention_there, warp);
        store_cluster_async(to + lane + 32, both.y, &shared.attention_there, warp);
        if (lane < 2) {
            store_cluster_async(to + HS + lane, lane == 0 ? largest : total, &shared.attention_there, warp);
        }
    }
    // The key and value of the token become a row of the cache.
    __device__ void store_cache(floatX* keys, floatX* values) const {
        if (rank != 0 || threadIdx.x >= 2 * HS) { return; }
        floatX* cache = threadIdx.x < HS ? keys : values;
        cache[(size_t)now * C + head * HS + threadIdx.x % HS] = (floatX)shared.qkv[HS + threadIdx.x];
    }
    // Stores this head's partial sum of x: a vector of 64 elements for each pair of chunks, projected to the block's columns.
    template <int pairs> __device__ void project(const floatX* vector, uint64_t* parts, uint32_t phase) {
        const int4* operand = reinterpret_cast<const int4*>(vector) + lane % 4;
        constexpr int tiles = OWN / 16;
#pragma unroll 1
        for (int begin = 0; begin < tiles; begin += WARPS) {
            int n = min(tiles - begin, WARPS);
            const int4* from = nullptr;
            float sums[2][4] = {};
#pragma unroll
            for (int k = 0; k < pairs; k++) {
                if (!RESIDENT || k == 0) { from = take() + warp * 4 * 32; }
                if (warp < n) {
                    multiply(sums, from[0], from[32], operand[8 * k]);
                    multiply(sums, from[64], from[96], operand[8 * k + 4]);
                }
                from += n * 4 * 32;
                if (!RESIDENT && k < pairs - 1) { give_back(); }
            }
            float y = result(sums, sums);
            if (warp < n && lane % 4 < 2) {
                store_relaxed(parts + head * C + first + (begin + warp) * 16 + lane % 4 * 8 + lane / 4,
                              part_of(y, phase));
            }
            give_back(); // after the parts, for which lanes of the same warp may wait
        }
    }
    // The head's attention, whose parts have arrived, for the projection.
    __device__ const floatX* attended() {
        float largest, total;
        float2 both = decode_layer_join(shared.attended, cluster, lane, lane + 32, largest, total);
        floatX* vector = shared.operand[warp];
        vector[lane] = (floatX)(both.x / total), vector[lane + 32] = (floatX)(both.y / total);
        __syncwarp();
        return vector;
    }

    // ---- the MLP ----

    // Computes gelu of the block's hidden units, 32 = 8 * DECODE_LAYER_MLP in a set, and sends it to the cluster: warp r sends to
    // block r. Their products have been added.
    __device__ void send_hidden() {
        if (warp >= cluster) { return; }
#pragma unroll
        for (int u = 0; u < SETS; u++) {
            int i = 32 * u + lane;
            float value = gelu(product_row(1, i) + (float)shared.vectors[1].bias[i]),
                  next = __shfl_down_sync(0xFFFFFFFFu, value, 1);
            auto* to = reinterpret_cast<const uint32_t*>(&shared.hidden[rank * 32 * SETS + i]);
            if (lane % 2 == 0) {
                store_cluster_async(to, pack_16x2(value, next, floatX()), &shared.hidden_there, warp);
            }
        }
    }
};

template <int C, int cluster> __global__ void __launch_bounds__(DECODE_LAYER_THREADS5, 1)
    decode_layer_sm90_kernel5(const __grid_constant__ DecodeLayers layers, const floatX* packed,
                              const __grid_constant__ DecodeLayerParts parts) {
    typedef DecodeLayerBlock<C, cluster> Block;
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    auto& shared = *reinterpret_cast<DecodeLayerShared5<C, cluster>*>(decode_layer_dynamic);
    static_assert(sizeof(shared) <= 227 << 10, "more than a block can have");
    const DecodeLayer& l = layers.first;
    Block block(shared, l);
    constexpr int bytes_x = C * (int)sizeof(float);
    if (block.now < 0) { return; } // the text has ended
    if (threadIdx.x == 0) {
        for (int i = 0; i < Block::RING; i++) {
            mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], 32 * Block::WARPS);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&shared.vectors_full[i], 1), mbarrier_init(&shared.vectors_empty[i], 32 * Block::WARPS);
        }
        mbarrier_init(&shared.x_there, 1), mbarrier_init(&shared.qkv_there, 1);
        mbarrier_init(&shared.attention_there, 1), mbarrier_init(&shared.hidden_there, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect(&shared.x_there, bytes_x),
            mbarrier_arrive_expect(&shared.hidden_there, (int)sizeof(shared.hidden));
        mbarrier_arrive_expect(&shared.qkv_there, (int)sizeof(shared.qkv));
        mbarrier_arrive_expect(&shared.attention_there, (int)sizeof(shared.attended));
    }
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    if (block.warp == Block::WARPS) {
        if (block.lane == 0) { block.load(layers, packed); }
        return;
    }
    typename Block::Cache cache;
    block.load_cache(cache, l.keys, l.values);
    grid_wait_dependency();

    uint32_t phase = *parts.phase;
    float2 x = {};
    if (block.has_columns()) { x = make_float2((float)l.x[block.column()], (float)l.x[block.column() + 1]); }
    size_t cache_at = 0; // of the layer
    const int num_halves = 2 * layers.num;
#pragma unroll 1
    for (int i = 0; i < num_halves; i++) {
        int half = i & 1, layer_parity = i >> 1 & 1;
        uint64_t* to = half ? parts.mlp : parts.attention;
        auto& vectors = shared.vectors[half];
        phase++;
        block.send_x(x);
        mbarrier_wait(&shared.vectors_full[half], layer_parity);
        block.wait(&shared.x_there, half, bytes_x);
        block.normalise(vectors, l.epsilon);
        block.product(3 + half); // 3 for q, k and v; 4, DECODE_LAYER_MLP, for fc
        block.sync();
        if (half == 0) {
            block.send_qkv();
            block.wait(&shared.qkv_there, layer_parity, (int)sizeof(shared.qkv));
            block.store_cache(l.keys + cache_at, l.values + cache_at);
            block.attend(cache);
            block.wait(&shared.attention_there, layer_parity, (int)sizeof(shared.attended));
            block.template project<1>(block.attended(), to, phase);
        } else {
            cache_at += layers.cache;
            if (i + 1 < num_halves) { block.load_cache(cache, l.keys + cache_at, l.values + cache_at); }
            block.send_hidden();
            block.wait(&shared.hidden_there, layer_parity, (int)sizeof(shared.hidden));
            block.template project<DECODE_LAYER_MLP>(shared.hidden, to, phase);
            if (i + 1 == num_halves && block.head != 0) { break; }
        }
        if (block.has_columns()) {
            const floatX* bias = &vectors.out_bias[2 * threadIdx.x];
            float2 sum = block.add_up(to, phase);
            x.x = (float)(floatX)(x.x + (float)bias[0] + sum.x), x.y = (float)(floatX)(x.y + (float)bias[1] + sum.y);
        }
        block.give_back_half(half);
    }
    if (block.head == 0 && block.has_columns()) {
        l.x[block.column()] = (floatX)x.x, l.x[block.column() + 1] = (floatX)x.y;
    }
    if (threadIdx.x == 0) { // all blocks have read the phase before they arrive
        if (atomicAdd(parts.arrived, 1u) == gridDim.x - 1) { *parts.arrived = 0, *parts.phase = phase; }
    }
}

// ---- kernel 6: 5 for up to 16 texts, each in one of the 8 columns of mma's other operand ----
// The blocks and the packed weights of kernel 5. Eight warps of a block, a team, compute 8 texts; a second team has 8 more. They share
// the weights in shared memory and nothing else, so that one computes while the other waits. Block r of a head's cluster attends for
// text r of each team, to all of its tokens, so there are no parts of a head to join. What the blocks of a cluster send each other is in
// 16 bits, as a product takes it.

constexpr int DECODE_LAYER_TEXTS = 16;

template <int C> struct DecodeLayerTeam { // what it shares
    static constexpr int OWN = C / 8, HS = DECODE_LAYER_HS, TEXTS = 8;
    static constexpr int GAP = 32; // after a text's elements: 64 bytes more than a multiple of 128, for the banks
    static constexpr int STRIDE = OWN + 4; // float2 of two texts in 8 rows have banks of their own
    // x, hidden and products are used up before attention begins: with two teams their place is its ring of keys and values
    alignas(16) floatX x[TEXTS][C + GAP];                          // the residual stream, and then its layernorm
    alignas(16) floatX hidden[TEXTS][DECODE_LAYER_MLP * HS + GAP]; // of the head
    alignas(16) float products[DECODE_LAYER_WARPS][32][TEXTS];     // of each warp's columns
    alignas(16) floatX attention[TEXTS][HS + GAP];                 // of the head
    float warps[DECODE_LAYER_WARPS][DECODE_LAYER_PART];            // attention of each warp
    float projected[TEXTS][STRIDE];
    float qkv[3 * HS]; // of the text that the block attends for
    uint64_t x_there, qkv_there, attention_there, hidden_there;
};
template <int C, int TEAMS> struct DecodeLayerShared6 {
    static constexpr int CHUNKS = C / 32, OWN = C / 8, FRAGMENT = DECODE_LAYER_FRAGMENT / x128::size;
    int4 qkvw[CHUNKS * 3 * FRAGMENT], projw[OWN / 16 * 4 * FRAGMENT], fcw[CHUNKS * DECODE_LAYER_MLP * FRAGMENT],
        fcprojw[OWN / 16 * 4 * DECODE_LAYER_MLP * FRAGMENT];
    DecodeLayerVectors<C, 8> vectors[2][2]; // of each half of a layer, those of even layers and of odd ones
    DecodeLayerTeam<C> teams[TEAMS];
    uint64_t full[4], empty[4], vectors_full[2][2]; // full, empty: qkvw, projw, fcw, fcprojw
};

// A part of three columns of the residual stream, and the number of its phase. Of a block's columns, lane l of a warp has the three
// from 3 * l on; the last one may have fewer.
template <int C> constexpr int DECODE_LAYER_TRIPLES = (C / 8 + 2) / 3; // of a block and text

template <int C, int TEAMS> struct DecodeLayerTexts {
    typedef DecodeLayerTeam<C> Team;
    static constexpr int NH = C / DECODE_LAYER_HS, CHUNKS = C / 32, OWN = C / 8, HS = DECODE_LAYER_HS, VEC = x128::size;
    // of a team. A group of 8 lanes attends to TOGETHER tokens at once
    static constexpr int TEXTS = Team::TEXTS, WARPS = DECODE_LAYER_WARPS, TRIPLES = DECODE_LAYER_TRIPLES<C>;
    static constexpr int ROUNDS = (CHUNKS + 7) / 8, GROUPS = DECODE_LAYER_THREADS / 8;
    static constexpr int TOGETHER = TEAMS == 1 ? 4 : 1;
    static constexpr int SLOT = 2 * DECODE_LAYER_THREADS; // vectors of the ring: a key's and a value's of each thread
    static constexpr int RING_BYTES = offsetof(Team, attention) - offsetof(Team, x);
    static constexpr int RING = TEAMS == 1 ? 0 : RING_BYTES / (SLOT * (int)sizeof(int4)); // slots
    DecodeLayerShared6<C, TEAMS>& shared;
    int team, thread, warp, lane; // thread and warp: of the team
    Team& own;                    // the team's
    int rank;
    unsigned texts, all_texts; // a bit for each text that has not ended: of the team, and of both
    int now;                   // position of the text that the block attends for, -1: there is none

    __device__ DecodeLayerTexts(DecodeLayerShared6<C, TEAMS>& s, const DecodeLayer& l, int B)
        : shared(s), team(TEAMS == 1 ? 0 : warp_uniform(threadIdx.x / DECODE_LAYER_THREADS)),
          thread(threadIdx.x - team * DECODE_LAYER_THREADS), warp(warp_uniform(thread / 32)), lane(threadIdx.x % 32),
          own(s.teams[TEAMS == 1 ? 0 : team % TEAMS]), rank(cluster_rank()) {
        all_texts = __ballot_sync(0xFFFFFFFFu, lane < B && l.position[lane] >= 0);
        texts = all_texts >> (TEXTS * team) & 0xFF;
        now = TEXTS * team + rank < B ? l.position[TEXTS * team + rank] : -1;
    }
    __device__ int head() const { return blockIdx.x / 8; }
    __device__ int first() const { return rank * OWN; } // of the block's columns
    // Between the products, warp w of a team handles text w of the team, if there is one.
    __device__ bool is_text() const { return texts >> warp & 1; }
    __device__ int text() const { return TEXTS * team + warp; }
    __device__ bool has_columns() const { return TRIPLES == 32 || lane < TRIPLES; }
    __device__ bool has_column(int k) const { return OWN == 96 || 3 * lane + k < OWN; }
    __device__ void sync() const { named_barrier_sync(1 + team, DECODE_LAYER_THREADS); } // of the team
    // as in kernel 5
    __device__ void wait(uint64_t* barrier, int parity, int bytes) const {
        mbarrier_wait_cluster(barrier, parity);
        if (thread == 0) { mbarrier_arrive_expect(barrier, bytes); }
    }
    // What arrives at the team's barriers, per layer or half of one.
    __device__ int bytes_x() const { return __popc(texts) * (C - OWN) * (int)sizeof(floatX); }
    __device__ int bytes_qkv() const { return 3 * HS * (int)sizeof(float); }
    __device__ int bytes_attention() const { return __popc(texts) * HS * (int)sizeof(floatX); }
    __device__ int bytes_hidden() const { return TEXTS * 7 * 8 * DECODE_LAYER_MLP * (int)sizeof(floatX); }

    // All weights and vectors, as in kernel 5, where each matrix has a place of its own. One thread calls this.
    __device__ void load(const DecodeLayers& layers, const floatX* packed) {
        constexpr DecodeLayerPacked p(C, 8);
        const DecodeLayer& l = layers.first;
        const floatX* from = packed + (size_t)blockIdx.x * layers.num * p.end * DECODE_LAYER_FRAGMENT;
        for (int i = 0; i < layers.num; i++) {
            auto matrix = [&](int which, int4* to, int n) {
                int bytes = n * DECODE_LAYER_FRAGMENT * (int)sizeof(floatX);
                mbarrier_wait(&shared.empty[which], (i & 1) ^ 1);
                mbarrier_arrive_expect(&shared.full[which], bytes);
                bulk_load(to, from, bytes, &shared.full[which]);
                from += n * DECODE_LAYER_FRAGMENT;
            };
            // Their place is free: matrix 1 or 3 of layer i - 1 has waited for the end of this half of layer i - 2 in all teams.
            auto vectors = [&](int half) {
                shared.vectors[half][i & 1].load(l, i * layers.weights, half, head(), rank,
                                                 &shared.vectors_full[half][i & 1]);
            };
            vectors(0), matrix(0, shared.qkvw, p.proj), matrix(1, shared.projw, p.fc - p.proj);
            vectors(1);
            matrix(2, shared.fcw, p.fcproj - p.fc), matrix(3, shared.fcprojw, p.end - p.fcproj);
        }
    }

    // ---- products ----

    // sums += a tile of 16 rows by 32 columns, times the texts' elements of these columns, of which lane 4i + j has those of text i.
    __device__ void multiply(float (&sums)[2][4], const int4* upper, const int4* lower, const floatX* x,
                             int stride) const {
        int4 elements = *reinterpret_cast<const int4*>(x + lane / 4 * stride + lane % 4 * VEC);
        DecodeLayerBlock<C, 8>::multiply(sums, *upper, *lower, elements);
    }
    // Of a tile, lane 4i + j has rows i and i + 8 of texts 2j and 2j + 1: put(row, values).
    template <class Put> __device__ void results(const float (&sums)[2][4], Put put) const {
        put(lane / 4, make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]));
        put(lane / 4 + 8, make_float2(sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]));
    }
    // The warps' parts of w (8 * groups,C) times the normalised texts.
    __device__ void product(const int4* w, int groups) {
        float sums[2][2][4] = {};
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            int chunk = 8 * j + warp;
            if (chunk >= CHUNKS) { break; }
            const int4* from = w + chunk * groups * 32 + lane;
            const floatX* x = &own.x[0][chunk * 32];
            multiply(sums[0], from, from + 32, x, C + Team::GAP);
            multiply(sums[1], from + 64, from + (groups * 32 - 32), x, C + Team::GAP);
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            results(sums[tile], [&](int row, float2 y) {
                row += 16 * tile;
                if (row < 8 * groups) { *reinterpret_cast<float2*>(&own.products[warp][row][lane % 4 * 2]) = y; }
            });
        }
    }
    __device__ float product_row(int row, int text) const {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) { sum += own.products[w][row][text]; }
        return sum;
    }
    // Stores this head's partial sums of x: the vectors of the team's sequences, 32 * chunks elements each with GAP after them,
    // projected to the block's columns.
    template <int chunks> __device__ void project(const int4* w, const floatX* texts, uint4* parts, uint32_t phase) {
        constexpr int tiles = OWN / 16; // a warp has one
        static_assert(tiles <= WARPS, "");
        if (warp < tiles) {
            float sums[2][4] = {};
#pragma unroll(TEAMS == 1 ? chunks : 2)
            for (int c = 0; c < chunks; c++) {
                const int4* from = w + ((c / 2 * tiles + warp) * 4 + c % 2 * 2) * 32 + lane;
                multiply(sums, from, from + 32, texts + c * 32, 32 * chunks + Team::GAP);
            }
            results(sums, [&](int row, float2 y) {
                int text = lane % 4 * 2;
                own.projected[text][16 * warp + row] = y.x, own.projected[text + 1][16 * warp + row] = y.y;
            });
        }
        sync();
        if (!is_text() || !has_columns()) { return; }
        const float* projected = &own.projected[warp][3 * lane];
        auto y = [&](int k) { return has_column(k) ? __float_as_uint(projected[k]) : 0u; };
        store_relaxed_16(part(parts, head()), make_uint4(y(0), y(1), y(2), phase));
    }

    // ---- the residual stream ----

    // Of head h, of this lane's columns.
    __device__ uint4* part(uint4* parts, int h) const {
        return parts + ((h * TEAMS * TEXTS + text()) * 8 + rank) * TRIPLES + lane;
    }
    // Adds every head's partial projection to x. Waits until each has arrived.
    __device__ void add_up(float (&x)[3], uint4* parts, uint32_t phase, const floatX* bias) const {
        if (!is_text() || !has_columns()) { return; }
        constexpr int together = TEAMS == 1 ? NH : NH / 2; // as the registers allow
        static_assert(NH % together == 0, "");
        float sum[3] = {};
#pragma unroll
        for (int first = 0; first < NH; first += together) {
            uint4 p[together];
            bool there;
            do {
                there = true;
#pragma unroll
                for (int h = 0; h < together; h++) { p[h] = load_relaxed_16(part(parts, first + h)); }
#pragma unroll
                for (int h = 0; h < together; h++) { there = there && p[h].w == phase; }
            } while (!there);
#pragma unroll
            for (int h = 0; h < together; h++) {
                sum[0] += __uint_as_float(p[h].x), sum[1] += __uint_as_float(p[h].y), sum[2] += __uint_as_float(p[h].z);
            }
        }
#pragma unroll
        for (int k = 0; k < 3; k++) {
            if (has_column(k)) { x[k] = (float)(floatX)(x[k] + (float)bias[3 * lane + k] + sum[k]); }
        }
    }
    // Sends x to all blocks of the cluster, 16 bytes at a time.
    __device__ void send_x(const float (&x)[3]) {
        constexpr int pieces = OWN / VEC;
        if (!is_text()) { return; }
        floatX* to = &own.x[warp][first()];
#pragma unroll
        for (int k = 0; k < 3; k++) {
            if (has_column(k)) { to[3 * lane + k] = (floatX)x[k]; }
        }
        __syncwarp();
        const int4* from = reinterpret_cast<const int4*>(to);
#pragma unroll
        for (int begin = 0; begin < 8 * pieces; begin += 32) {
            int i = begin + lane, block = i / pieces;
            bool sends = (8 * pieces % 32 == 0 || i < 8 * pieces) && block != rank;
            if (sends) { store_cluster_async(from + i % pieces, from[i % pieces], &own.x_there, block); }
        }
    }
    // The layernorm of the team's texts, in place; x has arrived.
    __device__ void normalise(const DecodeLayerVectors<C, 8>& vectors, float epsilon) {
        if (is_text()) { normalise(vectors, own.x[warp], epsilon); }
        sync();
    }
    __device__ void normalise(const DecodeLayerVectors<C, 8>& vectors, floatX* row, float epsilon) const {
        constexpr int most = (C / VEC + 31) / 32;
        auto load = [&](const floatX* from, int i) { return load128(from + (i * 32 + lane) * VEC); };
        auto is = [&](int i) { return C / VEC % 32 == 0 || i * 32 + lane < C / VEC; };
        float x[most][VEC] = {};
#pragma unroll
        for (int i = 0; i < most; i++) {
            if (!is(i)) { continue; }
            x128 part = load(row, i);
#pragma unroll
            for (int e = 0; e < VEC; e++) { x[i][e] = (float)part[e]; }
        }
        float2 statistics = layernorm_statistics(
            x, [](float sum) { return sum * (1.0f / C); }, epsilon, is);
        float mean = statistics.x, rstd = statistics.y;
#pragma unroll
        for (int i = 0; i < most; i++) {
            if (!is(i)) { continue; }
            x128 weight = load(vectors.norm_weight, i), bias = load(vectors.norm_bias, i), normed;
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                normed[e] = (floatX)((x[i][e] - mean) * rstd * (float)weight[e] + (float)bias[e]);
            }
            store128(row + (i * 32 + lane) * VEC, normed);
        }
    }

    // ---- attention ----

    // Sends q, k and v of the block's rows, each sequence's to the block that attends for it. The products have been added.
    __device__ void send_qkv(const floatX* bias) {
        int row = thread / 8, to = thread % 8;
        if (row >= 24 || !(texts >> to & 1)) { return; }
        float value = (float)(floatX)(product_row(row, to) + (float)bias[rank * 24 + row]);
        store_cluster_async(&own.qkv[rank * 24 + row], value, &own.qkv_there, to);
    }
    struct Cache { // TOGETHER tokens of 8 lanes
        int4 keys[TOGETHER], values[TOGETHER];
    };
    // keys, values: of the block's text and head
    __device__ void load_cache(Cache& cache, const floatX* keys, const floatX* values, int begin) const {
        size_t first = (size_t)(begin + thread / 8) * C + lane % 8 * VEC;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            bool there = begin + i * GROUPS + thread / 8 < now;
            size_t at = first + i * GROUPS * C;
            cache.keys[i] = there ? *reinterpret_cast<const int4*>(keys + at) : make_int4(0, 0, 0, 0);
            cache.values[i] = there ? *reinterpret_cast<const int4*>(values + at) : make_int4(0, 0, 0, 0);
        }
    }
    // Tokens in a round, and in all that is on its way: two rounds in registers, and a token of each 8 lanes in each slot of the ring. All
    // loads to registers share one of the warp's scoreboards, so a wait is for the newest of them; copies to shared memory end in order.
    static constexpr int ROUND = TOGETHER * GROUPS, ALL = 2 * ROUND + RING * GROUPS;
    // Each lane reads what it has copied itself.
    __device__ int4* ring(int slot) const { return reinterpret_cast<int4*>(&own.x) + slot * SLOT + thread; }
    __device__ void load_ring(int slot, const floatX* keys, const floatX* values, int begin) const {
        bool there = begin + thread / 8 < now;
        size_t at = there ? (size_t)(begin + thread / 8) * C + lane % 8 * VEC : 0;
        cp_async_16(ring(slot), keys + at, there);
        cp_async_16(ring(slot) + DECODE_LAYER_THREADS, values + at, there);
        cp_async_commit();
    }
    // The first tokens.
    __device__ void load_first(Cache (&cache)[2], const floatX* keys, const floatX* values) const {
        load_cache(cache[0], keys, values, 0), load_cache(cache[1], keys, values, ROUND);
#pragma unroll
        for (int i = 0; i < RING; i++) { load_ring(i, keys, values, 2 * ROUND + i * GROUPS); }
    }
    struct Sums {
        float q[VEC], sum[VEC], largest, total;
        __device__ void rescale(float before) { // sum and total, from the largest score before
            float factor = exp2f(before - largest);
            total *= factor;
#pragma unroll
            for (int e = 0; e < VEC; e++) { sum[e] *= factor; }
        }
    };
    // Attends to n tokens of each 8 lanes.
    template <int n> __device__ void attend(Sums& s, const int4 (&keys)[n], const int4 (&values)[n], int begin) const {
        float score[n], before = s.largest;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float dot = lanes_sum<8>(decode_layer_dot(vec128_from_bits<floatX>(keys[i]), s.q));
            score[i] = begin + i * GROUPS + thread / 8 < now ? dot : -INFINITY;
            s.largest = fmaxf(s.largest, score[i]);
        }
        s.rescale(before);
#pragma unroll
        for (int i = 0; i < n; i++) {
            float share = exp2f(score[i] - s.largest);
            x128 v = vec128_from_bits<floatX>(values[i]);
            s.total += share;
#pragma unroll
            for (int e = 0; e < VEC; e++) { s.sum[e] += share * (float)v[e]; }
        }
    }
    // Computes attention for this block's sequence and sends it to the cluster. Its q, k and v have arrived; the first tokens
    // are in `cache`.
    __device__ void attention(Cache (&cache)[2], floatX* keys, floatX* values) {
        int part = lane % 8 * VEC;
        const float* qkv = own.qkv;
        if (thread < 2 * HS) { // the key and value of the token become a row of the cache
            floatX* to = thread < HS ? keys : values;
            to[(size_t)now * C + thread % HS] = (floatX)qkv[HS + thread];
        }
        Sums s = {{}, {}, DECODE_ATTENTION_LOWEST, 0.0f};
        float dot = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            s.q[e] = qkv[part + e] * (LOG2E * rsqrtf((float)HS));
            dot += qkv[HS + part + e] * s.q[e];
        }
        dot = lanes_sum<8>(dot);
        if (thread < 8) { // which have the token itself
            s.largest = dot, s.total = 1.0f;
#pragma unroll
            for (int e = 0; e < VEC; e++) { s.sum[e] = qkv[2 * HS + part + e]; }
        }
#pragma unroll 1
        for (int begin = 0; begin < now; begin += ALL) { // the next tokens are on their way meanwhile
            attend(s, cache[0].keys, cache[0].values, begin);
            load_cache(cache[0], keys, values, begin + ALL);
            if (begin + ROUND < now) { attend(s, cache[1].keys, cache[1].values, begin + ROUND); }
            load_cache(cache[1], keys, values, begin + ALL + ROUND);
#pragma unroll
            for (int i = 0; i < RING; i++) {
                int at = begin + 2 * ROUND + i * GROUPS;
                cp_async_wait<(RING > 0 ? RING - 1 : 0)>();
                if (at < now) {
                    int4 key[1] = {*ring(i)}, value[1] = {ring(i)[DECODE_LAYER_THREADS]};
                    attend(s, key, value, at);
                }
                load_ring(i, keys, values, at + ALL);
            }
        }
        if (RING > 0) { cp_async_wait<0>(); }
        float before = s.largest;
        s.largest = groups_max<8>(s.largest);
        s.rescale(before);
        decode_layer_store_part(own.warps[warp], s.sum, s.total, s.largest);
        sync();
        // warp r adds up what all warps know, and sends it to block r
        float largest, total;
        float2 sum = decode_layer_join(own.warps, WARPS, 2 * lane, 2 * lane + 1, largest, total);
        auto* out = reinterpret_cast<const uint32_t*>(&own.attention[rank][2 * lane]);
        store_cluster_async(out, pack_16x2(sum.x / total, sum.y / total, floatX()), &own.attention_there, warp);
    }

    // ---- the MLP ----

    // Computes gelu of the block's hidden units, 32 = 8 * DECODE_LAYER_MLP, and sends it to the cluster, 16 bytes at a time.
    __device__ void send_hidden(const floatX* bias) {
        int unit = thread / 8, text = thread % 8;
        own.hidden[text][rank * 32 + unit] = (floatX)gelu(product_row(unit, text) + (float)bias[unit]);
        sync();
        if (warp == rank) { return; } // warp r sends to block r
        const int4* from = reinterpret_cast<const int4*>(&own.hidden[lane / 4][rank * 32]) + lane % 4;
        store_cluster_async(from, *from, &own.hidden_there, warp);
    }
};

template <int C, int TEAMS> __global__ void __launch_bounds__(TEAMS* DECODE_LAYER_THREADS + 128, 1)
    decode_layer_sm90_kernel6(const __grid_constant__ DecodeLayers layers, const floatX* packed,
                              const __grid_constant__ DecodeLayerParts parts) {
    typedef DecodeLayerTexts<C, TEAMS> Block;
    typedef DecodeLayerShared6<C, TEAMS> Shared;
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(decode_layer_dynamic);
    static_assert(sizeof(Shared) <= 227 << 10, "more than a block can have");
    const DecodeLayer& l = layers.first;
    Block block(shared, l, parts.B);
    const int warp = block.warp, lane = block.lane, rank = block.rank;
    if (block.all_texts == 0) { return; }
    const int teams = 1 + (TEAMS == 2 && block.all_texts & 0xFF && block.all_texts >> 8); // that have texts
    auto& own = block.own;
    if (threadIdx.x == 0) {
        for (uint64_t& full : shared.full) { mbarrier_init(&full, 1); }
        for (uint64_t& empty : shared.empty) { mbarrier_init(&empty, 32 * teams * Block::WARPS); }
        for (int i = 0; i < 4; i++) { mbarrier_init(&shared.vectors_full[i / 2][i % 2], 1); }
    }
    const bool loads = threadIdx.x >= TEAMS * DECODE_LAYER_THREADS;
    if (!loads) {
        if (block.thread == 0) {
            for (uint64_t* there : {&own.x_there, &own.qkv_there, &own.attention_there, &own.hidden_there}) {
                mbarrier_init(there, 1);
            }
            mbarrier_init_fence();
            mbarrier_arrive_expect(&own.x_there, block.bytes_x()),
                mbarrier_arrive_expect(&own.hidden_there, block.bytes_hidden());
            mbarrier_arrive_expect(&own.qkv_there, block.bytes_qkv());
            mbarrier_arrive_expect(&own.attention_there, block.bytes_attention());
        }
        // The columns of texts that have ended are 0 until attention needs their place, and attention's stay 0. A text is a column of its
        // own in all products, so what is there reaches no other text.
        for (int i = block.thread; i < Block::TEXTS * C; i += DECODE_LAYER_THREADS) {
            int text = i / C, c = i % C;
            if (block.texts >> text & 1) { continue; }
            own.x[text][c] = (floatX)0.0f;
            if (c < Block::HS) { own.attention[text][c] = (floatX)0.0f; }
        }
    }
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    if (loads) {
        warpgroup_fewer_registers<24>();
        if (threadIdx.x == TEAMS * DECODE_LAYER_THREADS) { block.load(layers, packed); }
        return;
    }
    warpgroup_more_registers<TEAMS == 1 ? 240 : 112>();
    if (block.texts == 0) { return; } // the other team goes on
    typename Block::Cache cache[2];
    // of the block's text and head
    size_t cache_at = (size_t)(Block::TEXTS * block.team + rank) * l.capacity * C + block.head() * Block::HS;
    // One team loads the first tokens of a layer ahead.
    if (TEAMS == 1) { block.load_first(cache, l.keys + cache_at, l.values + cache_at); }
    grid_wait_dependency();

    uint32_t phase = *parts.phase;
    float x[3] = {};
    floatX* rows = l.x + block.text() * C + block.first() + 3 * lane;
#pragma unroll
    for (int k = 0; k < 3; k++) {
        if (block.is_text() && block.has_column(k)) { x[k] = (float)rows[k]; }
    }
#pragma unroll 1
    for (int i = 0; i < 2 * layers.num; i++) {
        int half = i & 1, parity = i >> 1 & 1;
        uint4* to = half ? parts.mlp6 : parts.attention6;
        auto& vectors = shared.vectors[half][parity];
        phase++;
        block.send_x(x);
        mbarrier_wait(&shared.vectors_full[half][parity], i >> 2 & 1);
        block.wait(&own.x_there, half, block.bytes_x());
        block.normalise(vectors, l.epsilon);
        mbarrier_wait(&shared.full[2 * half], parity);
        block.product(half ? shared.fcw : shared.qkvw, 3 + half);
        block.sync();
        // with two teams, the other one needs the next weights before this one has ended the half
        if (TEAMS == 2) { mbarrier_arrive(&shared.empty[2 * half]); }
        if (half == 0) {
            block.send_qkv(vectors.bias);
            if (TEAMS == 2) { block.sync(); } // before the ring takes the place of `products`
            if (block.now >= 0) {
                block.wait(&own.qkv_there, parity, block.bytes_qkv());
                // the teams attend in turn: while one reads the cache, the other one multiplies
                if (TEAMS == 2 && teams == 2 && (block.team == 1 || i > 0)) {
                    mbarrier_wait_cluster(&shared.teams[block.team ^ 1].attention_there, parity ^ block.team ^ 1);
                }
                // not earlier: what two teams have in flight would delay what they exchange by more than that saves
                if (TEAMS == 2) { block.load_first(cache, l.keys + cache_at, l.values + cache_at); }
                block.attention(cache, l.keys + cache_at, l.values + cache_at);
            }
            block.wait(&own.attention_there, parity, block.bytes_attention());
            mbarrier_wait(&shared.full[1], parity);
            block.template project<2>(shared.projw, own.attention[0], to, phase);
        } else {
            cache_at += layers.cache;
            if (TEAMS == 1 && i + 1 < 2 * layers.num) {
                block.load_first(cache, l.keys + cache_at, l.values + cache_at);
            }
            block.send_hidden(vectors.bias);
            block.wait(&own.hidden_there, parity, block.bytes_hidden());
            mbarrier_wait(&shared.full[3], parity);
            block.template project<2 * DECODE_LAYER_MLP>(shared.fcprojw, own.hidden[0], to, phase);
            if (i + 1 == 2 * layers.num && block.head() != 0) { break; }
        }
        __syncwarp();
        block.add_up(x, to, phase, vectors.out_bias);
        __syncwarp();
        if (TEAMS == 1) { mbarrier_arrive(&shared.empty[2 * half]); }
        mbarrier_arrive(&shared.empty[2 * half + 1]);
    }
#pragma unroll
    for (int k = 0; k < 3; k++) {
        if (block.head() == 0 && block.is_text() && block.has_column(k)) { rows[k] = (floatX)x[k]; }
    }
    if (block.thread == 0) { // all teams have read the phase before they arrive
        if (atomicAdd(parts.arrived, 1u) == teams * gridDim.x - 1) { *parts.arrived = 0, *parts.phase = phase; }
    }
}

template <int n> using DecodeLayerInt = std::integral_constant<int, n>;
// Calls launch(C, cluster), with DecodeLayerInt, for the sizes that there are; false: there are none for C.
template <class Launch> bool decode_layer_sizes(int C, const Launch& launch) {
    auto with = [&](auto c, auto cluster) {
        if (C == c.value) { launch(c, cluster); }
        return C == c.value;
    };
    DecodeLayerInt<4> four;
    DecodeLayerInt<8> eight;
    return with(DecodeLayerInt<128>(), eight) || with(DecodeLayerInt<320>(), four) ||
           with(DecodeLayerInt<768>(), eight) || with(DecodeLayerInt<1024>(), four) ||
           with(DecodeLayerInt<1280>(), four) || with(DecodeLayerInt<1600>(), four);
}
// The same for kernel 6 and B texts: launch(C, teams).
template <class Launch> bool decode_layer_sizes6(int B, int C, const Launch& launch) {
    auto with = [&](auto c) {
        if (C == c.value) { B <= 8 ? launch(c, DecodeLayerInt<1>()) : launch(c, DecodeLayerInt<2>()); }
        return C == c.value;
    };
    return B >= 1 && B <= DECODE_LAYER_TEXTS && (with(DecodeLayerInt<128>()) || with(DecodeLayerInt<768>()));
}
// Calls run(kernel, shape) with kernel 5 or 6 for B texts and the shape of its launch. Returns false if there is none for C.
template <class Run> bool decode_layers_kernel(int kernel, int B, int C, int NH, const Run& run) {
    auto one = [&](auto c, auto cluster) {
        size_t bytes = sizeof(DecodeLayerShared5<c.value, cluster.value>);
        run(decode_layer_sm90_kernel5<c.value, cluster.value>,
            LaunchShape(NH * cluster.value, DECODE_LAYER_THREADS5, bytes, cluster.value, true));
    };
    auto several = [&](auto c, auto teams) {
        size_t bytes = sizeof(DecodeLayerShared6<c.value, teams.value>);
        run(decode_layer_sm90_kernel6<c.value, teams.value>,
            LaunchShape(NH * 8, teams.value * DECODE_LAYER_THREADS + 128, bytes, 8, true));
    };
    return kernel == 5 ? decode_layer_sizes(C, one) : decode_layer_sizes6(B, C, several);
}

#endif

// Whether decode_layers() runs B texts through such a model here. F: width of the MLP
bool decode_layers_runs(int B, int C, int F, int NH, int capacity) {
    bool fits = false;
#if !defined(ENABLE_FP32)
    if (C != NH * DECODE_LAYER_HS || F != DECODE_LAYER_MLP * C || B > DECODE_LAYER_TEXTS || !has_sm90a()) {
        return false;
    }
    if (B == 1 && capacity > DecodeLayerSizes<768, 8>::CAPACITY) { return false; }
    decode_layers_kernel(B == 1 ? 5 : 6, B, C, NH, [&](auto kernel, const LaunchShape& shape) {
        int num_clusters = 0; // all blocks must run at once
        LaunchConfig config(kernel, shape, NULL);
        cudaCheck(cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config));
        fits = num_clusters >= (int)shape.grid.x / shape.cluster;
    });
#else
    (void)B, (void)C, (void)F, (void)NH, (void)capacity;
#endif
    return fits;
}

// The number of elements of packed.
size_t decode_layers_packed(int num_layers, int C) { return (size_t)num_layers * (4 + 2 * DECODE_LAYER_MLP) * C * C; }

// packed: the matrices of all layers in the order in which the blocks of decode_layers() read them
void decode_layers_pack(floatX* packed, const DecodeLayers& layers, const Execution& exec) {
    int C = layers.first.C;
    size_t n = decode_layers_packed(layers.num, C);
    Op op(exec, 2.0 * n * sizeof(floatX), 0, "decode_layers_pack");
#if !defined(ENABLE_FP32)
    bool done = decode_layer_sizes(C, [&](auto, auto cluster) {
        unsigned blocks = (unsigned)ceil_div(n / x128::size, (size_t)256);
        launch_kernel(decode_layers_pack_kernel5, LaunchShape(blocks, 256), exec, packed, layers, cluster.value,
                      n / x128::size);
    });
    require(done);
#else
    (void)packed;
#endif
}

// Parts of x for 16 texts, of 16 bytes each.
static size_t decode_layers_triples(int C, int NH) { return (size_t)NH * 16 * 8 * ((C / 8 + 2) / 3); }

// All layers for the newest tokens of B texts: x (B,C) of layers goes through them, and the keys and values of text b become row
// position[b] of its cache (B,capacity,C). A text with position -1 is left out. packed: of decode_layers_pack(). scratch:
// decode_layers_scratch(), zero before the first call. Only where decode_layers_runs(). Weights and the cache are read while the
// previous kernel may still run.
void decode_layers(const DecodeLayers& layers, int B, const floatX* packed, uint64_t* scratch, const Execution& exec,
                   int kernel) {
    int C = layers.first.C;
    double weights = 12.0 * layers.num * C * C;
    // without the caches, which depend on the positions
    Op op(exec, weights * sizeof(floatX), 2 * weights * B, "decode_layers");
#if !defined(ENABLE_FP32)
    int NH = layers.first.NH;
    size_t n = (size_t)NH * C, n6 = decode_layers_triples(C, NH);
    uint4* triples = reinterpret_cast<uint4*>(scratch + 2 * n);
    uint32_t* counters = reinterpret_cast<uint32_t*>(triples + 2 * n6);
    DecodeLayerParts parts = {scratch, scratch + n, triples, triples + n6, counters, counters + 1, B};
    bool done = decode_layers_kernel(kernel, B, C, NH, [&](auto kernel, const LaunchShape& shape) {
        launch_kernel(kernel, shape, exec, layers, packed, parts);
    });
    require(done);
#else
    (void)packed, (void)scratch, (void)kernel;
#endif
}
void decode_layers(const DecodeLayers& layers, int B, const floatX* packed, uint64_t* scratch, const Execution& exec) {
    decode_layers(layers, B, packed, scratch, exec, B == 1 ? 5 : 6);
}
// Size of scratch, in values of 8 bytes: two sets of parts of x for one text and for several, and the counters.
size_t decode_layers_scratch(int C, int NH) { return 2 * (size_t)NH * C + 4 * decode_layers_triples(C, NH) + 1; }
// ==== end promoted: decode_layer ====
