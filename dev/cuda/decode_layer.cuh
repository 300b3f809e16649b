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
#include "../../llmc/tma_ring.cuh"
#include "decode_attention.cuh"

// ==== promoted: decode_layer ====
// The width of the MLP, divided by C. A head has as many times DECODE_LAYER_HS hidden units. Kernels 5 and 6 are written for 4: the 8 * 4
// hidden units of a set are a warp's lanes, and 32 stands for their number, too. For another width more changes than this constant.
constexpr int DECODE_LAYER_MLP = 4;

#if !defined(ENABLE_FP32) // 8 lanes share a head's 64 numbers, 16 bytes each

constexpr int DECODE_LAYER_HS = 64, DECODE_LAYER_THREADS = 256, DECODE_LAYER_WARPS = 8;
constexpr int DECODE_LAYER_GROUPS = 32; // of 8 lanes, each of which attends to a token

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

// What a block, or a warp, knows of the attention of its tokens: the weighted sum of values, the largest score and the sum of
// the weights, 2^(score - largest).
constexpr int DECODE_LAYER_PART = DECODE_LAYER_HS + 2;

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

// ---- shared by kernels 5 and 6: one launch, weights in the order in which they are read, results that carry their readiness ----
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

// In global memory. of_half: the heads' parts of the residual stream after attention and after the MLP, see part() of each kernel.
// phase: the number of phases before this launch; arrived: blocks that have finished it. B: the number of texts
struct DecodeLayerParts {
    uint4* of_half[2];
    uint32_t *phase, *arrived;
    int B;
};

template <int C, int cluster> struct DecodeLayerSizes {
    static constexpr int HS = DECODE_LAYER_HS, MLP = DECODE_LAYER_MLP, WARPS = DECODE_LAYER_WARPS, VEC = x128::size;
    static constexpr int NH = C / HS, SETS = 8 / cluster, CHUNKS = C / 32;
    static constexpr int OWN = C / cluster, TILES = OWN / 16;              // columns of a block; 16 of them are a tile
    static constexpr int ROUNDS = (CHUNKS + 7) / 8;                        // chunks of columns per warp
    static constexpr int TOGETHER = SETS == 1 && ROUNDS <= 3 ? ROUNDS : 1; // rounds that pass through the ring at once
    static constexpr int PIECE = 32 * TOGETHER;                            // fragments, at most
    // each matrix of a layer is one piece, the ring has four
    static constexpr bool RESIDENT = SETS == 1 && TOGETHER == ROUNDS && TILES <= 8;
    static constexpr int RING = RESIDENT ? 4 : 11; // pieces
    static_assert(RESIDENT || RING <= 2 * ROUNDS * SETS + (1 + MLP) * ((TILES + 7) / 8), "more pieces than a layer");
    // Pieces in flight: about 5 MB on the whole GPU, what its memory delivers in a microsecond. More would not come sooner, but
    // all else, the parts of x above all, would queue behind them: with the whole ring in flight C = 1600 took 7% longer.
    static constexpr int IN_FLIGHT = 3, GROUPS = DECODE_LAYER_GROUPS;
    static_assert(C % (16 * cluster) == 0 && OWN / 2 <= DECODE_LAYER_THREADS && 8 % cluster == 0 && C % HS == 0, "");
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

// What one thread loads to shared memory: the weights, through a ring of pieces, and the vectors.
template <int C, int cluster> struct DecodeLayerLoads : DecodeLayerSizes<C, cluster> {
    typedef DecodeLayerSizes<C, cluster> Sizes;
    using Sizes::CHUNKS, Sizes::IN_FLIGHT, Sizes::MLP, Sizes::PIECE, Sizes::RESIDENT, Sizes::RING, Sizes::SETS;
    using Sizes::TILES, Sizes::TOGETHER;
    int4 weights[(RESIDENT ? DecodeLayerPacked(C, cluster).end : RING * PIECE) * 32];
    alignas(16) DecodeLayerVectors<C, cluster> vectors[2][2]; // of half i of even layers, of odd layers
    TmaRing<RING> ring;
    uint64_t vectors_full[2][2];

    // Where a piece of the ring begins.
    __device__ int4* piece(int stage) {
        constexpr DecodeLayerPacked p(C, cluster);
        int first = !RESIDENT ? stage * PIECE : stage == 0 ? 0 : stage == 1 ? p.proj : stage == 2 ? p.fc : p.fcproj;
        return weights + first * 32;
    }
    // Loads all weights and vectors, one after the other, in the order in which they are waited for.
    __device__ void load(const DecodeLayers& layers, const floatX* packed, int rank) {
        constexpr DecodeLayerPacked p(C, cluster);
        const floatX* from = packed + (size_t)blockIdx.x * layers.num * p.end * DECODE_LAYER_FRAGMENT;
        TmaRingPlace place, arrived;
        int num_pieces = 0;
        auto load_piece = [&](int n) {
            int bytes = n * DECODE_LAYER_FRAGMENT * (int)sizeof(floatX);
            if (!RESIDENT && num_pieces++ >= IN_FLIGHT) { ring.wait(arrived), arrived.next(RING); }
            uint64_t* full = ring.acquire(place, bytes);
            bulk_load(piece(place.stage), from, bytes, full);
            from += n * DECODE_LAYER_FRAGMENT;
            place.next(RING);
        };
        auto projection = [&](int pairs) { // of attention, or of the hidden units, to the own columns
            if (RESIDENT) { load_piece(TILES * pairs * 4); }
            for (int tile = 0; !RESIDENT && tile < TILES; tile += 8) {
                for (int k = 0; k < pairs; k++) { load_piece(min(TILES - tile, 8) * 4); }
            }
        };
        auto rounds = [&](int groups) {
            for (int chunk = 0; chunk < CHUNKS; chunk += 8 * TOGETHER) {
                for (int set = 0; set < SETS; set++) { load_piece(min(CHUNKS - chunk, 8 * TOGETHER) * groups); }
            }
        };
        for (int i = 0; i < layers.num; i++) {
            // Their place is free: the ring has no more pieces than a layer, so the newest piece took the place of one that all warps
            // gave back after this half of layer i - 2.
            auto load_vectors = [&](int half) {
                vectors[half][i & 1].load(layers.first, i * layers.weights, half, blockIdx.x / cluster, rank,
                                          &vectors_full[half][i & 1]);
            };
            load_vectors(0), rounds(3), projection(1);
            load_vectors(1), rounds(MLP), projection(MLP);
        }
    }
};

// What a team shares in both kernels: the eight warps that compute one text, or up to 8 texts.
struct DecodeLayerTeam {
    // where what the blocks of the cluster send each other arrives
    uint64_t x_there, qkv_there, attention_there, hidden_there;
    float qkv[3 * DECODE_LAYER_HS];                     // of the text that the block attends for
    float warps[DECODE_LAYER_WARPS][DECODE_LAYER_PART]; // attention of each warp
};

// Keys and values of n tokens of each 8 lanes: this lane's 16 bytes of each.
template <int n> struct DecodeLayerTokens { int4 keys[n], values[n]; };

// What 8 lanes know of the attention of a text: this lane's elements of q and of the weighted sum of values, the largest score and
// the sum of the weights, 2^(score - largest).
struct DecodeLayerSums {
    static constexpr int HS = DECODE_LAYER_HS, VEC = x128::size;
    float q[VEC], sum[VEC], largest, total;

    // Of no tokens; newest: but the first 8 lanes have the token itself. qkv (3,HS): its q, k and v
    __device__ DecodeLayerSums(const float* qkv, bool newest) {
        int lane = threadIdx.x % 32;
        qkv += lane % 8 * VEC, largest = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { q[e] = qkv[e] * (LOG2E * rsqrtf((float)HS)), sum[e] = 0.0f; }
        if (!newest) { return; }
        float dot = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { dot += qkv[HS + e] * q[e]; }
        dot = lanes_sum<8>(dot);
        if (lane >= 8) { return; }
        largest = dot, total = 1.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { sum[e] = qkv[2 * HS + e]; }
    }
    __device__ void rescale(float before) { // sum and total, from the largest score before
        float factor = exp2f(before - largest);
        total *= factor;
#pragma unroll
        for (int e = 0; e < VEC; e++) { sum[e] *= factor; }
    }
    // Adds the next tokens; only the first `left` exist.
    template <int n> __device__ void add(const DecodeLayerTokens<n>& tokens, int left) {
        float score[n], before = largest;
        int own = threadIdx.x % DECODE_LAYER_THREADS / 8;
#pragma unroll
        for (int i = 0; i < n; i++) { score[i] = decode_layer_dot(vec128_from_bits<floatX>(tokens.keys[i]), q); }
        // This is lanes_sum<8>, with the shuffles of all n side by side: ptxas runs n calls one after the other.
#pragma unroll
        for (int offset = 4; offset > 0; offset /= 2) {
#pragma unroll
            for (int i = 0; i < n; i++) { score[i] += __shfl_xor_sync(0xFFFFFFFFu, score[i], offset); }
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            score[i] = i * DECODE_LAYER_GROUPS + own < left ? score[i] : -INFINITY;
            largest = fmaxf(largest, score[i]);
        }
        rescale(before);
#pragma unroll
        for (int i = 0; i < n; i++) {
            float share = exp2f(score[i] - largest);
            x128 value = vec128_from_bits<floatX>(tokens.values[i]);
            total += share;
#pragma unroll
            for (int e = 0; e < VEC; e++) { sum[e] += share * (float)value[e]; }
        }
    }
    // Writes what the warp knows to `part`.
    __device__ void store(float (&part)[DECODE_LAYER_PART]) {
        int lane = threadIdx.x % 32;
        float before = largest;
        largest = groups_max<8>(largest);
        rescale(before);
        total = groups_sum<8>(total);
#pragma unroll
        for (int e = 0; e < VEC; e++) { sum[e] = groups_sum<8>(sum[e]); }
        if (lane < 8) {
#pragma unroll
            for (int e = 0; e < VEC; e++) { part[lane * VEC + e] = sum[e]; }
        }
        if (lane == 0) { part[HS] = largest, part[HS + 1] = total; }
    }
};

// A thread of a team, and what it does in both kernels. A block has NUM_TEAMS teams and NUM_LOADERS threads more, which load.
template <int C, int cluster, class Team, int NUM_TEAMS, int NUM_LOADERS> struct DecodeLayerThread
    : DecodeLayerSizes<C, cluster> {
    struct Memory : DecodeLayerLoads<C, cluster> {
        Team teams[NUM_TEAMS];
    };
    typedef DecodeLayerSizes<C, cluster> Sizes;
    using Sizes::CHUNKS, Sizes::GROUPS, Sizes::HS, Sizes::NH, Sizes::OWN, Sizes::RESIDENT, Sizes::RING, Sizes::ROUNDS;
    using Sizes::SETS, Sizes::TOGETHER, Sizes::VEC, Sizes::WARPS;
    static constexpr int TEAMS = NUM_TEAMS, LOADERS = NUM_LOADERS, THREADS = TEAMS * DECODE_LAYER_THREADS + LOADERS;
    Memory& shared;
    int team, thread, warp, lane; // thread and warp: of the team
    Team& own;                    // the team's
    int rank;
    TmaRingPlace place;

    __device__ DecodeLayerThread(Memory& s)
        : shared(s), team(TEAMS == 1 ? 0 : warp_uniform(threadIdx.x / DECODE_LAYER_THREADS)),
          thread(threadIdx.x - team * DECODE_LAYER_THREADS), warp(warp_uniform(thread / 32)), lane(threadIdx.x % 32),
          own(s.teams[TEAMS == 1 ? 0 : team % TEAMS]), rank(cluster_rank()) {}
    static LaunchShape shape() { return LaunchShape(NH * cluster, THREADS, sizeof(Memory), cluster, true); }
    __device__ int head() const { return blockIdx.x / cluster; }
    __device__ int first() const { return rank * OWN; }                                  // of the block's columns
    __device__ void sync() const { named_barrier_sync(1 + team, DECODE_LAYER_THREADS); } // of the team
    // Waits at a barrier of the cluster. Thread 0 makes it ready for the next time.
    __device__ void wait(uint64_t* barrier, int parity, int bytes) const {
        mbarrier_wait_cluster(barrier, parity);
        if (thread == 0) { mbarrier_arrive_expect(barrier, bytes); }
    }

    // ---- weights ----

    // This lane's vectors of the next piece of the ring, which is of matrix 0 to 3 of the layer.
    __device__ const int4* take(int matrix) {
        if (RESIDENT) { place.stage = matrix; }
        shared.ring.wait(place);
        return shared.piece(place.stage) + lane;
    }
    __device__ void give_back() {
        __syncwarp();
        if (RESIDENT) { return; }
        mbarrier_arrive(&shared.ring.empty[place.stage]);
        place.next(RING);
    }
    // Where a layer fits the ring, its matrices are given back after half a layer. This is early enough for the next ones, and they do not
    // delay the exchange between the heads. With two teams the other one needs the first matrix of the next layer before.
    __device__ void give_back_product(int half) const {
        if (TEAMS == 2) { mbarrier_arrive(&shared.ring.empty[2 * half]); }
    }
    __device__ void give_back_half(int half) {
        __syncwarp();
        if (!RESIDENT) { return; }
        if (TEAMS == 1) { mbarrier_arrive(&shared.ring.empty[2 * half]); }
        mbarrier_arrive(&shared.ring.empty[2 * half + 1]);
        place.parity ^= half;
    }

    // ---- products ----

    // sums += 16 rows by 32 columns times x, of which this lane has 8 columns from lane % 4 * 8 on, of text lane / 4. The two halves of sums
    // are added up later.
    __device__ static void multiply(float (&sums)[2][4], int4 upper, int4 lower, int4 x) {
        uint32_t a[4] = {(uint32_t)upper.x, (uint32_t)lower.x, (uint32_t)upper.y, (uint32_t)lower.y};
        uint32_t b[4] = {(uint32_t)upper.z, (uint32_t)lower.z, (uint32_t)upper.w, (uint32_t)lower.w};
        mma_16x8x16(sums[0], a, (uint32_t)x.x, (uint32_t)x.y, floatX());
        mma_16x8x16(sums[1], b, (uint32_t)x.z, (uint32_t)x.w, floatX());
    }
    // sums += the warp's columns of the next matrix of the ring, (8 * groups * SETS, C), groups 3 or 4, times x: this lane's text, from
    // lane % 4 * 8 on. With 3 groups the third one is also the fourth.
    __device__ void product_sums(float (&sums)[SETS][2][2][4], int groups, const floatX* x) {
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round += TOGETHER) {
            int4 operand[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                int chunk = 8 * (round + j) + warp;
                operand[j] = chunk < CHUNKS ? *reinterpret_cast<const int4*>(x + chunk * 32) : make_int4(0, 0, 0, 0);
            }
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const int4* from = take(2 * (groups - 3)) + warp * groups * 32;
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) {
                    if (8 * (round + j) + warp < CHUNKS) {
                        multiply(sums[set][0], from[0], from[32], operand[j]);
                        multiply(sums[set][1], from[64], from[groups * 32 - 32], operand[j]);
                    }
                    from += 8 * groups * 32;
                }
                give_back();
            }
        }
    }
    // The sum over the warps of element i of their products.
    template <int n> __device__ static float sum_of_warps(const float (&products)[WARPS][n], int i) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) { sum += products[w][i]; }
        return sum;
    }
    // sums += the warp's tile of n in the next matrix of the ring, (16 * n, 64 * pairs), times x, as above.
    template <int pairs> __device__ void project_sums(float (&sums)[2][4], int n, const floatX* x) {
        const int4 *from = nullptr, *operand = reinterpret_cast<const int4*>(x);
#pragma unroll(TEAMS == 1 ? pairs : 1)
        for (int k = 0; k < pairs; k++) {
            if (!RESIDENT || k == 0) { from = take(pairs == 1 ? 1 : 3) + warp * 4 * 32; }
            if (warp < n) {
                multiply(sums, from[0], from[32], operand[8 * k]);
                multiply(sums, from[64], from[96], operand[8 * k + 4]);
            }
            from += n * 4 * 32;
            if (!RESIDENT && k < pairs - 1) { give_back(); }
        }
    }

    // ---- attention ----

    // This lane's part of token `first` + thread / 8. cache: the text's and head's keys or values
    __device__ const floatX* token(const floatX* cache, int first) const {
        return hold_pointer(cache + (size_t)(first + thread / 8) * C + lane % 8 * VEC);
    }
    // Loads the tokens from `first` onward; zeros from `end` onward. keys, values: what token() returns for them
    template <int n> __device__ void load_tokens(DecodeLayerTokens<n>& to, const floatX* keys, const floatX* values,
                                                 int first, int end) const {
#pragma unroll
        for (int i = 0; i < n; i++) {
            bool there = first + thread / 8 + i * GROUPS < end;
            to.keys[i] = there ? *reinterpret_cast<const int4*>(keys + i * GROUPS * C) : make_int4(0, 0, 0, 0);
            to.values[i] = there ? *reinterpret_cast<const int4*>(values + i * GROUPS * C) : make_int4(0, 0, 0, 0);
        }
    }
    // The key and value of token `now` become a row of the cache.
    __device__ void store_token(floatX* keys, floatX* values, int now) const {
        if (thread >= 2 * HS) { return; }
        floatX* to = thread < HS ? keys : values;
        to[(size_t)now * C + thread % HS] = (floatX)own.qkv[HS + thread];
    }
};

// ---- kernel 5: one text, with the attention to its tokens spread over the blocks of a cluster ----

template <int C, int cluster> struct DecodeLayerTeam5 : DecodeLayerTeam {
    alignas(16) float x[C];
    float attended[cluster][DECODE_LAYER_PART];                      // attention over a block's tokens
    float products[2][DECODE_LAYER_WARPS][32 * 8 / cluster + 4];     // of each warp's columns: of qkv, and of fc
    alignas(16) floatX normed[C];                                    // each warp reads only what it wrote
    alignas(16) floatX operand[DECODE_LAYER_WARPS][DECODE_LAYER_HS]; // attention, for attproj: of each warp
    alignas(16) floatX hidden[DECODE_LAYER_MLP * DECODE_LAYER_HS];   // of the head, for fcproj
};

template <int C, int cluster> struct DecodeLayerText
    : DecodeLayerThread<C, cluster, DecodeLayerTeam5<C, cluster>, 1, 32> {
    typedef DecodeLayerThread<C, cluster, DecodeLayerTeam5<C, cluster>, 1, 32> Thread;
    using Thread::CHUNKS, Thread::HS, Thread::OWN, Thread::ROUNDS, Thread::SETS, Thread::TILES, Thread::VEC;
    using Thread::give_back, Thread::head, Thread::load_tokens, Thread::product_sums, Thread::store_token;
    using Thread::sum_of_warps, Thread::sync, Thread::token, Thread::wait;
    using Thread::WARPS, Thread::own, Thread::thread, Thread::warp, Thread::lane, Thread::rank, Thread::first;
    static constexpr int CAPACITY = 1024;
    typedef DecodeLayerTokens<CAPACITY / cluster / Thread::GROUPS> Cache;
    int now;                 // the text's position, -1: it has ended
    bool texts;              // whether there is one
    DecodeLayerShare tokens; // before the newest one, which the last block takes

    __device__ DecodeLayerText(typename Thread::Memory& s, const DecodeLayer& l, int)
        : Thread(s), now(*l.position), texts(now >= 0) {
        tokens = decode_layer_share(now, rank, cluster);
    }
    __device__ int num_teams() const { return texts; } // that have texts
    __device__ void init() const {}
    // What arrives at the team's barriers, per layer or half of one.
    __device__ static int bytes_x() { return sizeof(own.x); }
    __device__ static int bytes_qkv() { return sizeof(own.qkv); }
    __device__ static int bytes_attention() { return sizeof(own.attended); }
    __device__ static int bytes_hidden() { return sizeof(own.hidden); }

    // ---- products ----

    // Of two tiles of 16 rows, lane 4i + j returns the result of row i of group j: of tile j / 2, row i or i + 8. Each of the 8 columns of a
    // tile is the product.
    __device__ float result(const float (&a)[2][4], const float (&b)[2][4]) const {
        float a0 = a[0][0] + a[1][0], a1 = a[0][2] + a[1][2], b0 = b[0][0] + b[1][0], b1 = b[0][2] + b[1][2];
        float even = lane & 2 ? b0 : a0, odd = lane & 2 ? b1 : a1;
        return lane & 1 ? odd : even;
    }
    // The next matrix of the ring times the normalised vector. The parts of the warps go to own.products.
    __device__ void product(int groups) {
        float sums[SETS][2][2][4] = {};
        product_sums(sums, groups, own.normed + lane % 4 * VEC);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float y = result(sums[set][0], sums[set][1]);
            if (lane % 4 < groups) { own.products[groups - 3][warp][(set * groups + lane % 4) * 8 + lane / 4] = y; }
        }
    }
    // Stores this head's partial sum of x: a vector of 64 elements for each pair of chunks, projected to the block's columns.
    template <int pairs> __device__ void project(const floatX* vector, uint4* parts, uint32_t phase) {
        uint64_t* to = reinterpret_cast<uint64_t*>(parts) + head() * C + first();
#pragma unroll 1
        for (int begin = 0; begin < TILES; begin += WARPS) {
            int n = min(TILES - begin, WARPS);
            float sums[2][4] = {};
            this->template project_sums<pairs>(sums, n, vector + lane % 4 * VEC);
            float y = result(sums, sums);
            if (warp < n && lane % 4 < 2) {
                store_relaxed(to + (begin + warp) * 16 + lane % 4 * 8 + lane / 4,
                              (uint64_t)phase << 32 | __float_as_uint(y));
            }
            give_back(); // after the parts, for which lanes of the same warp may wait
        }
    }

    // ---- the residual stream: a block's columns belong to its first OWN / 2 threads, two to each ----

    static constexpr int COLUMNS = 2;
    __device__ static int text() { return 0; }
    __device__ int column() const { return 2 * thread; } // of the block's
    __device__ bool has_column(int) const { return thread < OWN / 2; }
    // A part (NH,C) has for each column a float, and in the upper half the number of its phase.
    static constexpr int PART_STRIDE = C / 2; // from one head to the next
    __device__ int part() const { return (first() + column()) / 2; }
    __device__ static uint4 load_part(const uint4* from) {
        ulonglong2 x = load_relaxed_pair(reinterpret_cast<const uint64_t*>(from));
        return make_uint4((uint32_t)x.x, (uint32_t)(x.x >> 32), (uint32_t)x.y, (uint32_t)(x.y >> 32));
    }

    // Sends this thread's columns of x to all blocks of the cluster.
    __device__ void send_x(const float (&x)[2]) const {
        if (!has_column(0)) { return; }
        auto* to = reinterpret_cast<const float2*>(&own.x[first() + column()]);
#pragma unroll
        for (int r = 0; r < cluster; r++) { store_cluster_async(to, make_float2(x[0], x[1]), &own.x_there, r); }
    }
    // The layernorm of x, which has arrived, of the warp's chunks of columns.
    __device__ void normalise(const DecodeLayerVectors<C, cluster>& vectors, float epsilon) {
        constexpr int most = (C + 127) / 128;
        float sum = 0.0f, squares = 0.0f;
        float4 x[most]; // zeros past the end
#pragma unroll
        for (int i = 0; i < most; i++) {
            int c = (i * 32 + lane) * 4;
            x[i] = c < C ? *reinterpret_cast<const float4*>(own.x + c) : make_float4(0, 0, 0, 0);
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
                own.normed[c] = (floatX)((own.x[c] - mean) * rstd * weight + bias);
            }
        }
        __syncwarp();
    }

    // ---- attention ----

    __device__ size_t cache_begin(const DecodeLayer&) const { return head() * HS; } // of the block's text and head
    __device__ void load_cache(Cache& cache, const floatX* keys, const floatX* values) const {
        load_tokens(cache, token(keys, tokens.first), token(values, tokens.first), tokens.first,
                    tokens.first + tokens.n);
    }
    // Sends q, k and v of the block's rows to the cluster: warp r sends to block r.
    __device__ void send_qkv(const floatX* bias) const {
        if (warp >= cluster) { return; }
#pragma unroll
        for (int u = 0; u < SETS; u++) {
            int i = lane + 32 * u, row = rank * 24 * SETS + i;
            if (i >= 24 * SETS) { continue; }
            float value = (float)(floatX)(sum_of_warps(own.products[0], i) + (float)bias[row]);
            store_cluster_async(&own.qkv[row], value, &own.qkv_there, warp);
        }
    }
    // Returns the head's attention. The products for q, k and v have been added; `cache` has the block's tokens, keys and values are where
    // they come from.
    __device__ const floatX* attention(Cache& cache, floatX* keys, floatX* values, const floatX* bias, int i) {
        int parity = i >> 1 & 1;
        send_qkv(bias);
        wait(&own.qkv_there, parity, bytes_qkv());
        if (rank == 0) { store_token(keys, values, now); }
        DecodeLayerSums sums(own.qkv, rank == cluster - 1 && warp == 0);
        sums.add(cache, tokens.n);
        sums.store(own.warps[warp]);
        sync();
        float largest, total;
        if (warp < cluster) { // warp r adds up what all warps know, and sends it to block r
            float* to = own.attended[rank];
            float2 both = decode_layer_join(own.warps, WARPS, lane, lane + 32, largest, total);
            store_cluster_async(to + lane, both.x, &own.attention_there, warp);
            store_cluster_async(to + lane + 32, both.y, &own.attention_there, warp);
            if (lane < 2) {
                store_cluster_async(to + HS + lane, lane == 0 ? largest : total, &own.attention_there, warp);
            }
        }
        wait(&own.attention_there, parity, bytes_attention());
        float2 both = decode_layer_join(own.attended, cluster, lane, lane + 32, largest, total);
        floatX* vector = own.operand[warp];
        vector[lane] = (floatX)(both.x / total), vector[lane + 32] = (floatX)(both.y / total);
        __syncwarp();
        return vector;
    }

    // ---- the MLP ----

    // Returns the head's hidden units. Each block computes gelu of its own, 32 = 8 * DECODE_LAYER_MLP in a set, whose products have been
    // added, and sends them to the cluster: warp r sends to block r.
    __device__ const floatX* hidden(const floatX* bias, int parity) const {
#pragma unroll
        for (int i = lane; i < 32 * SETS && warp < cluster; i += 32) {
            float value = gelu(sum_of_warps(own.products[1], i) + (float)bias[i]),
                  next = __shfl_down_sync(0xFFFFFFFFu, value, 1);
            auto* to = reinterpret_cast<const uint32_t*>(&own.hidden[rank * 32 * SETS + i]);
            if (lane % 2 == 0) { store_cluster_async(to, pack_16x2(value, next, floatX()), &own.hidden_there, warp); }
        }
        wait(&own.hidden_there, parity, bytes_hidden());
        return own.hidden;
    }
};

// ---- kernel 6: 5 for up to 16 texts, each in one of the 8 columns of mma's other operand ----
// The blocks and the packed weights of kernel 5. Eight warps of a block, a team, compute 8 texts; a second team has 8 more. They share
// the weights in shared memory and nothing else, so that one computes while the other waits. Block r of a head's cluster attends for
// text r of each team, to all of its tokens, so there are no parts of a head to join. What the blocks of a cluster send each other is in
// 16 bits, as a product takes it.

constexpr int DECODE_LAYER_TEXTS = 16;

template <int C> struct DecodeLayerTeam6 : DecodeLayerTeam {
    static constexpr int OWN = C / 8, HS = DECODE_LAYER_HS, TEXTS = 8;
    static constexpr int GAP = 32; // after a text's elements: 64 bytes more than a multiple of 128, for the banks
    static constexpr int STRIDE = OWN + 4; // float2 of two texts in 8 rows have banks of their own
    // x, hidden and products are used up before attention begins: with two teams their place is its ring of keys and values
    alignas(16) floatX x[TEXTS][C + GAP];                          // the residual stream, and then its layernorm
    alignas(16) floatX hidden[TEXTS][DECODE_LAYER_MLP * HS + GAP]; // of the head
    alignas(16) float products[DECODE_LAYER_WARPS][32 * TEXTS];    // of each warp's columns
    alignas(16) floatX attention[TEXTS][HS + GAP];                 // of the head
    float projected[TEXTS][STRIDE];
};

template <int C, int NUM_TEAMS> struct DecodeLayerTexts : DecodeLayerThread<C, 8, DecodeLayerTeam6<C>, NUM_TEAMS, 128> {
    typedef DecodeLayerTeam6<C> Team;
    typedef DecodeLayerThread<C, 8, Team, NUM_TEAMS, 128> Thread;
    using Thread::first, Thread::give_back, Thread::head, Thread::load_tokens, Thread::product_sums, Thread::token;
    using Thread::GROUPS, Thread::HS, Thread::OWN, Thread::TEAMS, Thread::TILES, Thread::VEC, Thread::WARPS;
    using Thread::own, Thread::shared, Thread::team, Thread::thread, Thread::warp, Thread::lane, Thread::rank;
    using Thread::store_token, Thread::sum_of_warps, Thread::sync, Thread::wait;
    static_assert(Thread::RESIDENT && TILES <= WARPS, "");
    static constexpr int TEXTS = Team::TEXTS;
    static constexpr int TOKENS = TEAMS == 1 ? 4 : 1;     // that 8 lanes attend to at once
    static constexpr int SLOT = 2 * DECODE_LAYER_THREADS; // vectors of the ring: a key's and a value's of each thread
    static constexpr int RING_BYTES = sizeof(Team::x) + sizeof(Team::hidden) + sizeof(Team::products);
    static constexpr int RING = TEAMS == 1 ? 0 : RING_BYTES / (SLOT * (int)sizeof(int4)); // slots
    unsigned texts, all_texts; // a bit for each text that has not ended: of the team, and of both
    int now;                   // position of the text that the block attends for, -1: there is none

    __device__ DecodeLayerTexts(typename Thread::Memory& s, const DecodeLayer& l, int B) : Thread(s) {
        all_texts = __ballot_sync(0xFFFFFFFFu, lane < B && l.position[lane] >= 0);
        texts = all_texts >> (TEXTS * team) & 0xFF;
        now = TEXTS * team + rank < B ? l.position[TEXTS * team + rank] : -1;
    }
    __device__ int num_teams() const { return ((all_texts & 0xFF) != 0) + (all_texts >> 8 != 0); } // that have texts
    // The columns of texts that have ended are 0 until attention needs their place, and attention's stay 0. A text is a column of its
    // own in all products, so what is there reaches no other text.
    __device__ void init() const {
        for (int i = thread; i < TEXTS * C; i += DECODE_LAYER_THREADS) {
            int text = i / C, c = i % C;
            if (texts >> text & 1) { continue; }
            own.x[text][c] = (floatX)0.0f;
            if (c < HS) { own.attention[text][c] = (floatX)0.0f; }
        }
    }
    // What arrives at the team's barriers, per layer or half of one.
    __device__ int bytes_x() const { return __popc(texts) * (C - OWN) * (int)sizeof(floatX); }
    __device__ static int bytes_qkv() { return sizeof(own.qkv); }
    __device__ int bytes_attention() const { return __popc(texts) * HS * (int)sizeof(floatX); }
    __device__ static int bytes_hidden() { return TEXTS * 7 * 8 * DECODE_LAYER_MLP * (int)sizeof(floatX); }

    // ---- products ----

    // Of a tile, lane 4i + j has rows i and i + 8 of texts 2j and 2j + 1: put(row, values).
    template <class Put> __device__ void results(const float (&sums)[2][4], Put put) const {
        put(lane / 4, make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]));
        put(lane / 4 + 8, make_float2(sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]));
    }
    // The next matrix of the ring, (8 * groups,C), times the normalised texts. The parts of the warps go to own.products.
    __device__ void product(int groups) {
        float sums[1][2][2][4] = {};
        product_sums(sums, groups, own.x[lane / 4] + lane % 4 * VEC);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            results(sums[0][tile], [&](int row, float2 y) {
                row += 16 * tile;
                float* to = &own.products[warp][row * TEXTS + lane % 4 * 2];
                if (row < 8 * groups) { *reinterpret_cast<float2*>(to) = y; }
            });
        }
    }
    // Stores this head's partial sums of x: the vectors of the team's sequences, 64 * pairs elements each with GAP after them,
    // projected to the block's columns.
    template <int pairs> __device__ void project(const floatX* vectors, uint4* parts, uint32_t phase) {
        float sums[2][4] = {};
        const floatX* vector = vectors + lane / 4 * (64 * pairs + Team::GAP) + lane % 4 * VEC;
        this->template project_sums<pairs>(sums, TILES, vector);
        if (warp < TILES) {
            results(sums, [&](int row, float2 y) {
                int text = lane % 4 * 2;
                own.projected[text][16 * warp + row] = y.x, own.projected[text + 1][16 * warp + row] = y.y;
            });
        }
        sync();
        if (has_column(0)) {
            const float* projected = &own.projected[warp][column()];
            auto y = [&](int k) { return has_column(k) ? __float_as_uint(projected[k]) : 0u; };
            store_relaxed_16(parts + part() + head() * PART_STRIDE, make_uint4(y(0), y(1), y(2), phase));
        }
        give_back(); // after the parts, for which lanes of the same warp may wait
    }

    // ---- the residual stream: between the products, warp w of a team handles text w of the team, if there is one ----

    // Of a block's columns, lane l of a warp has the three from 3 * l on; the last one may have fewer.
    static constexpr int COLUMNS = 3, TRIPLES = (OWN + 2) / 3;
    __device__ int text() const { return TEXTS * team + warp; }
    __device__ int column() const { return 3 * lane; } // of the block's
    __device__ bool is_text() const { return texts >> warp & 1; }
    __device__ bool has_column(int k) const { return is_text() && (OWN == 96 || column() + k < OWN); }
    // A part (NH,texts,8,TRIPLES) has three floats and the number of its phase.
    static constexpr int PART_STRIDE = TEAMS * TEXTS * 8 * TRIPLES; // from one head to the next
    __device__ int part() const { return (text() * 8 + rank) * TRIPLES + lane; }
    __device__ static uint4 load_part(const uint4* from) { return load_relaxed_16(from); }

    // Sends x to all blocks of the cluster, 16 bytes at a time.
    __device__ void send_x(const float (&x)[3]) {
        constexpr int pieces = OWN / VEC;
        if (!is_text()) { return; }
        floatX* to = &own.x[warp][first()];
#pragma unroll
        for (int k = 0; k < 3; k++) {
            if (has_column(k)) { to[column() + k] = (floatX)x[k]; }
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
        constexpr int most = (C / VEC + 31) / 32;
        auto load = [&](const floatX* from, int i) { return load128(from + (i * 32 + lane) * VEC); };
        auto is = [&](int i) { return C / VEC % 32 == 0 || i * 32 + lane < C / VEC; };
        Floats128<floatX> x[most] = {};
        floatX* row = own.x[warp];
        if (is_text()) {
#pragma unroll
            for (int i = 0; i < most; i++) {
                if (is(i)) { x[i] = to_floats(load(row, i)); }
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
        sync();
    }

    // ---- attention ----

    // What is loaded ahead: two rounds of tokens in registers, and with two teams a token of each 8 lanes in each slot of the ring. All
    // loads to registers share one of the warp's scoreboards, so a wait is for the newest of them; copies to shared memory end in order.
    struct Cache {
        DecodeLayerTokens<TOKENS> rounds[2];
    };
    static constexpr int ROUND = TOKENS * GROUPS, ALL = 2 * ROUND + RING * GROUPS; // tokens: of a round, of all
    __device__ size_t cache_begin(const DecodeLayer& l) const {                    // of the block's text and head
        return (size_t)(TEXTS * team + rank) * l.capacity * C + head() * HS;
    }
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
    __device__ void load_cache(Cache& cache, const floatX* keys, const floatX* values) const {
        const floatX *key = token(keys, 0), *value = token(values, 0);
        load_tokens(cache.rounds[0], key, value, 0, now);
        load_tokens(cache.rounds[1], key + ROUND * C, value + ROUND * C, ROUND, now);
#pragma unroll
        for (int i = 0; i < RING; i++) { load_ring(i, keys, values, 2 * ROUND + i * GROUPS); }
    }
    // Sends q, k and v of the block's rows, each sequence's to the block that attends for it. The products have been added.
    __device__ void send_qkv(const floatX* bias) {
        int row = thread / 8, to = thread % 8;
        if (row >= 24 || !(texts >> to & 1)) { return; }
        float value = (float)(floatX)(sum_of_warps(own.products, row * TEXTS + to) + (float)bias[rank * 24 + row]);
        store_cluster_async(&own.qkv[rank * 24 + row], value, &own.qkv_there, to);
    }
    // Computes attention for this block's sequence and sends it to the cluster. Its q, k and v have arrived; the first tokens
    // are in `cache`.
    __device__ void attend(Cache& cache, floatX* keys, floatX* values) {
        store_token(keys, values, now);
        DecodeLayerSums sums(own.qkv, warp == 0);
        const floatX *key = token(keys, ALL), *value = token(values, ALL);
#pragma unroll 1
        for (int begin = 0; begin < now; begin += ALL) { // the next tokens are on their way meanwhile
            sums.add(cache.rounds[0], now - begin);
            load_tokens(cache.rounds[0], key, value, begin + ALL, now);
            if (begin + ROUND < now) { sums.add(cache.rounds[1], now - begin - ROUND); }
            load_tokens(cache.rounds[1], key + ROUND * C, value + ROUND * C, begin + ALL + ROUND, now);
            key += ALL * C, value += ALL * C;
#pragma unroll
            for (int i = 0; i < RING; i++) {
                int at = begin + 2 * ROUND + i * GROUPS;
                cp_async_wait<(RING > 0 ? RING - 1 : 0)>();
                if (at < now) {
                    DecodeLayerTokens<1> token = {{*ring(i)}, {ring(i)[DECODE_LAYER_THREADS]}};
                    sums.add(token, now - at);
                }
                load_ring(i, keys, values, at + ALL);
            }
        }
        if (RING > 0) { cp_async_wait<0>(); }
        sums.store(own.warps[warp]);
        sync();
        // warp r adds up what all warps know, and sends it to block r
        float largest, total;
        float2 sum = decode_layer_join(own.warps, WARPS, 2 * lane, 2 * lane + 1, largest, total);
        auto* out = reinterpret_cast<const uint32_t*>(&own.attention[rank][2 * lane]);
        store_cluster_async(out, pack_16x2(sum.x / total, sum.y / total, floatX()), &own.attention_there, warp);
    }
    // Returns the attention of the team's texts. The products for q, k and v have been added. i: of the half of a layer
    __device__ const floatX* attention(Cache& cache, floatX* keys, floatX* values, const floatX* bias, int i) {
        int parity = i >> 1 & 1;
        send_qkv(bias);
        if (TEAMS == 2) { sync(); } // before the ring takes the place of `products`
        if (now >= 0) {
            wait(&own.qkv_there, parity, bytes_qkv());
            // the teams attend in turn: while one reads the cache, the other one multiplies
            if (TEAMS == 2 && num_teams() == 2 && (team == 1 || i > 0)) {
                mbarrier_wait_cluster(&shared.teams[team ^ 1].attention_there, parity ^ team ^ 1);
            }
            // not earlier: what two teams have in flight would delay what they exchange by more than that saves
            if (TEAMS == 2) { load_cache(cache, keys, values); }
            attend(cache, keys, values);
        }
        wait(&own.attention_there, parity, bytes_attention());
        return own.attention[0];
    }

    // ---- the MLP ----

    // Returns the hidden units of the team's texts. Each block computes gelu of its own, 32 = 8 * DECODE_LAYER_MLP, and sends them to the
    // cluster, 16 bytes at a time.
    __device__ const floatX* hidden(const floatX* bias, int parity) {
        int unit = thread / 8, text = thread % 8;
        own.hidden[text][rank * 32 + unit] =
            (floatX)gelu(sum_of_warps(own.products, unit * TEXTS + text) + (float)bias[unit]);
        sync();
        if (warp != rank) { // warp r sends to block r
            const int4* from = reinterpret_cast<const int4*>(&own.hidden[lane / 4][rank * 32]) + lane % 4;
            store_cluster_async(from, *from, &own.hidden_there, warp);
        }
        wait(&own.hidden_there, parity, bytes_hidden());
        return own.hidden[0];
    }
};

// ---- shared by kernels 5 and 6: the sums of all heads; the kernel ----

// Adds every head's part to this thread's columns of x. Waits until each has arrived.
template <class Block> __device__ inline void decode_layer_add_up(float (&x)[Block::COLUMNS], const Block& block,
                                                                  const uint4* parts, uint32_t phase,
                                                                  const floatX* bias) {
    constexpr int NH = Block::NH, COLUMNS = Block::COLUMNS;
    // loads in flight, as many as there are registers for
    constexpr int together = NH <= 16 && Block::TEAMS == 1 ? NH : (NH + 1) / 2;
    if (!block.has_column(0)) { return; }
    const uint4* from = hold_pointer(parts + block.part());
    float sum[COLUMNS] = {};
#pragma unroll 1
    for (int begin = 0; begin < NH; begin += together) {
        uint4 part[together];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int h = 0; h < together; h++) {
                bool is = NH % together == 0 || begin + h < NH;
                part[h] = make_uint4(0, phase, 0, phase);
                if (is) { part[h] = Block::load_part(from + (begin + h) * Block::PART_STRIDE); }
            }
            // Testing all parts at once is faster if one batch holds all heads (C = 768, 12 layers: 94 us, not 99). With two
            // batches, stopping at the first missing part is faster (C = 1600: 274 us, not 321).
#pragma unroll
            for (int h = 0; h < together; h++) {
                if (together < NH) {
                    there = there && (COLUMNS == 3 || part[h].y == phase) && part[h].w == phase;
                } else {
                    there &= (COLUMNS == 3 || part[h].y == phase) & (part[h].w == phase);
                }
            }
        } while (!there);
#pragma unroll
        for (int h = 0; h < together; h++) {
            const uint32_t words[] = {part[h].x, COLUMNS == 3 ? part[h].y : part[h].z, part[h].z};
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) { sum[k] += __uint_as_float(words[k]); }
        }
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        if (block.has_column(k)) { x[k] = (float)(floatX)(x[k] + (float)bias[block.column() + k] + sum[k]); }
    }
}

// Kernels 5 and 6. Block: DecodeLayerText or DecodeLayerTexts
template <class Block> __device__ inline void decode_layers_run(const DecodeLayers& layers, const floatX* packed,
                                                                const DecodeLayerParts& parts) {
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    auto& shared = *reinterpret_cast<typename Block::Memory*>(decode_layer_dynamic);
    static_assert(sizeof(shared) <= 227 << 10, "more than a block can have");
    constexpr int TEAMS = Block::TEAMS, COLUMNS = Block::COLUMNS;
    const DecodeLayer& l = layers.first;
    Block block(shared, l, parts.B);
    const int num_teams = block.num_teams();
    if (num_teams == 0) { return; } // all texts have ended
    auto& own = block.own;
    const int loader =
        (block.team - TEAMS) * Block::WARPS + block.warp; // of the warps that load; below 0: this one computes
    if (threadIdx.x == 0) {
        shared.ring.init(num_teams * DECODE_LAYER_THREADS);
        for (int i = 0; i < 4; i++) { mbarrier_init(&shared.vectors_full[i / 2][i % 2], 1); }
    }
    if (loader < 0) {
        if (block.thread == 0) {
            for (uint64_t* there : {&own.x_there, &own.qkv_there, &own.attention_there, &own.hidden_there}) {
                mbarrier_init(there, 1);
            }
            mbarrier_init_fence();
            mbarrier_arrive_expect(&own.x_there, block.bytes_x());
            mbarrier_arrive_expect(&own.hidden_there, block.bytes_hidden());
            mbarrier_arrive_expect(&own.qkv_there, block.bytes_qkv());
            mbarrier_arrive_expect(&own.attention_there, block.bytes_attention());
        }
        block.init();
    }
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    if (loader >= 0) {
        if constexpr (Block::LOADERS == 128) { warpgroup_fewer_registers<24>(); }
        if (loader == 0 && block.lane == 0) { shared.load(layers, packed, block.rank); }
        return;
    }
    if constexpr (Block::LOADERS == 128) { warpgroup_more_registers<TEAMS == 1 ? 240 : 112>(); }
    if (!block.texts) { return; } // the other team goes on
    typename Block::Cache cache;
    size_t cache_at = block.cache_begin(l);
    // One team loads the first tokens of a layer ahead.
    if (TEAMS == 1) { block.load_cache(cache, l.keys + cache_at, l.values + cache_at); }
    grid_wait_dependency();

    uint32_t phase = *parts.phase;
    float x[COLUMNS] = {};
    floatX* row = l.x + block.text() * l.C + block.first() + block.column();
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        if (block.has_column(k)) { x[k] = (float)row[k]; }
    }
    const int num_halves = 2 * layers.num;
#pragma unroll 1
    for (int i = 0; i < num_halves; i++) {
        int half = i & 1, parity = i >> 1 & 1;
        uint4* to = parts.of_half[half];
        auto& vectors = shared.vectors[half][parity];
        phase++;
        block.send_x(x);
        mbarrier_wait(&shared.vectors_full[half][parity], i >> 2 & 1);
        block.wait(&own.x_there, half, block.bytes_x());
        block.normalise(vectors, l.epsilon);
        block.product(3 + half); // 3 for q, k and v; 4, DECODE_LAYER_MLP, for fc
        block.sync();
        block.give_back_product(half);
        if (half == 0) {
            const floatX* attention = block.attention(cache, l.keys + cache_at, l.values + cache_at, vectors.bias, i);
            block.template project<1>(attention, to, phase);
        } else {
            cache_at += layers.cache;
            if (TEAMS == 1 && i + 1 < num_halves) { block.load_cache(cache, l.keys + cache_at, l.values + cache_at); }
            block.template project<DECODE_LAYER_MLP>(block.hidden(vectors.bias, parity), to, phase);
            if (i + 1 == num_halves && block.head() != 0) { break; }
        }
        decode_layer_add_up(x, block, to, phase, vectors.out_bias);
        block.give_back_half(half);
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        if (block.head() == 0 && block.has_column(k)) { row[k] = (floatX)x[k]; }
    }
    if (block.thread == 0) { // all have read the phase before they arrive
        if (atomicAdd(parts.arrived, 1u) == num_teams * gridDim.x - 1) { *parts.arrived = 0, *parts.phase = phase; }
    }
}

template <int C, int cluster> __global__ void __launch_bounds__(DecodeLayerText<C, cluster>::THREADS, 1)
    decode_layer_sm90_kernel5(const __grid_constant__ DecodeLayers layers, const floatX* packed,
                              const __grid_constant__ DecodeLayerParts parts) {
    decode_layers_run<DecodeLayerText<C, cluster>>(layers, packed, parts);
}
template <int C, int TEAMS> __global__ void __launch_bounds__(DecodeLayerTexts<C, TEAMS>::THREADS, 1)
    decode_layer_sm90_kernel6(const __grid_constant__ DecodeLayers layers, const floatX* packed,
                              const __grid_constant__ DecodeLayerParts parts) {
    decode_layers_run<DecodeLayerTexts<C, TEAMS>>(layers, packed, parts);
}

// Blocks of a cluster, which computes a head, in the kernels for C. 0: there are none.
constexpr int decode_layer_blocks(int C) {
    return C == 128 || C == 768 ? 8 : C == 320 || C == 1024 || C == 1280 || C == 1600 ? 4 : 0;
}
// Calls run(kernel, shape) with kernel 5 or 6 for B texts and the shape of its launch. Returns false if there is none.
template <class Run> bool decode_layers_kernel(int number, int B, int C, const Run& run) {
    auto with = [&](auto channels) {
        constexpr int c = channels.value, cluster = decode_layer_blocks(c);
        if (C != c) { return false; }
        if (number == 5) { run(decode_layer_sm90_kernel5<c, cluster>, DecodeLayerText<c, cluster>::shape()); }
        if constexpr (cluster == 8) {
            if (number == 6 && B <= 8) { run(decode_layer_sm90_kernel6<c, 1>, DecodeLayerTexts<c, 1>::shape()); }
            if (number == 6 && B > 8) { run(decode_layer_sm90_kernel6<c, 2>, DecodeLayerTexts<c, 2>::shape()); }
        }
        return number == 5 || cluster == 8;
    };
    if (B < 1 || B > (number == 5 ? 1 : DECODE_LAYER_TEXTS)) { return false; }
    return with(std::integral_constant<int, 128>()) || with(std::integral_constant<int, 320>()) ||
           with(std::integral_constant<int, 768>()) || with(std::integral_constant<int, 1024>()) ||
           with(std::integral_constant<int, 1280>()) || with(std::integral_constant<int, 1600>());
}

#endif

// Whether decode_layers() runs B texts through such a model here. F: width of the MLP
bool decode_layers_runs(int B, int C, int F, int NH, int capacity) {
    bool fits = false;
#if !defined(ENABLE_FP32)
    if (C != NH * DECODE_LAYER_HS || F != DECODE_LAYER_MLP * C || !has_sm90a()) { return false; }
    if (B == 1 && capacity > DecodeLayerText<768, 8>::CAPACITY) { return false; }
    decode_layers_kernel(B == 1 ? 5 : 6, B, C, [&](auto kernel, const LaunchShape& shape) {
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
    require(decode_layer_blocks(C) > 0);
    unsigned blocks = (unsigned)ceil_div(n / x128::size, (size_t)256);
    launch_kernel(decode_layers_pack_kernel5, LaunchShape(blocks, 256), exec, packed, layers, decode_layer_blocks(C),
                  n / x128::size);
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
    size_t n = (size_t)NH * C / 2, n6 = decode_layers_triples(C, NH); // of kernel 5, of kernel 6
    uint4 *parts5 = reinterpret_cast<uint4*>(scratch), *parts6 = parts5 + 2 * n;
    uint32_t* counters = reinterpret_cast<uint32_t*>(parts6 + 2 * n6);
    DecodeLayerParts parts = {{parts5, parts5 + n}, counters, counters + 1, B};
    if (kernel == 6) { parts.of_half[0] = parts6, parts.of_half[1] = parts6 + n6; }
    bool done = decode_layers_kernel(kernel, B, C, [&](auto kernel, const LaunchShape& shape) {
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
