/*
fused_attention_projection_residual_layernorm_forward: residual (B,T,C) = inp + attention(qkv) proj_weight^T + proj_bias; normed (B,T,C),
mean, rstd (B,T) are its layernorm | lse (B,NH,T) or NULL | attention, projection (B,T,C) are scratch
Constraint: as kernels 2, 4 and 5 of fused_attention_projection_residual_layernorm.cu, which has the other kernels, errors and
sources; transformer_block.cu uses these.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/ptx.cuh"
#include "attention_forward.cuh"
#include "attention_forward_blocks.cuh"
#include "fused_residual_layernorm.cuh"
#include "fused_residual_layernorm_early.cuh"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "matmul_forward.cuh"
#include <limits.h>

// The arguments of all kernels.
struct AttentionProjection {
    floatX *residual, *normed;   // (B,T,C)
    float *mean, *rstd, *lse;    // (B,T), (B,T), (B,NH,T) or NULL
    const floatX *qkv, *inp;     // (B,T,3,NH,HS), (B,T,C)
    const floatX* proj_weight;   // (C,C)
    const floatX* proj_bias;     // (C)
    const floatX *weight, *bias; // (C)
    int B, T, C, NH;
    float epsilon; // of the layernorm
};

// attention (B,T,C) and projection (B,T,C) are scratch
void fused_attention_projection_residual_layernorm2(const AttentionProjection& f, floatX* attention, floatX* projection,
                                                    const Execution& exec) {
    int N = f.B * f.T;
    attention_forward(attention, f.lse, f.qkv, f.B, f.T, f.C, f.NH, 1.0f / sqrtf((float)(f.C / f.NH)), exec);
    matmul_forward(projection, NULL, attention, f.proj_weight, f.proj_bias, NULL, N, f.C, f.C, exec);
    fused_residual_layernorm_forward(f.residual, f.normed, f.mean, f.rstd, f.inp, projection, f.weight, f.bias, N, f.C,
                                     f.epsilon, exec);
}

// block only 3, because shared memory is short.
inline int attention_projection_heads(int C, int HS) {
    if (HS != 64) { return 0; }
    if (C % 384 == 0 && C / 384 <= 3) { return 6; }
    if (C % 320 == 0 && C / 320 <= 8) { return 5; }
    return C % 256 == 0 && C / 256 <= 8 ? 4 : 0;
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

const int ATTENTION_PROJECTION_TILE = 128 * 64; // elements: 128 tokens of a head, or rows of proj_weight
const int ATTENTION_PROJECTION_BYTES = 16 * 1024;
const int ATTENTION_PROJECTION_RING = 6;
static_assert(sizeof(floatX) * ATTENTION_PROJECTION_TILE == ATTENTION_PROJECTION_BYTES, "what TMA announces");

struct AttentionProjectionMaps {
    CUtensorMap qkv, proj_weight, inp; // boxes of (128,64)
    CUtensorMap residual, normed;      // boxes of (16,64)
};

// The ring: position i is slot i % RING in round i / RING. The producer claims a position before it loads, consumers
// await it and release it once per warp.
template <class SMem> __device__ inline void attention_projection_claim(SMem& smem, unsigned i) {
    mbarrier_wait(&smem.empty[i % ATTENTION_PROJECTION_RING], (i / ATTENTION_PROJECTION_RING + 1) % 2);
    mbarrier_arrive_expect(&smem.full[i % ATTENTION_PROJECTION_RING], ATTENTION_PROJECTION_BYTES);
}
template <class SMem> __device__ inline void attention_projection_await(SMem& smem, unsigned i) {
    mbarrier_wait(&smem.full[i % ATTENTION_PROJECTION_RING], i / ATTENTION_PROJECTION_RING % 2);
}
template <class SMem> __device__ inline void attention_projection_release(SMem& smem, unsigned i) {
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[i % ATTENTION_PROJECTION_RING]); }
}
template <class SMem> __device__ inline floatX* attention_projection_slot(SMem& smem, unsigned i) {
    return smem.ring[i % ATTENTION_PROJECTION_RING];
}

// These convert two neighbouring elements of a row between floats and one packed register. The asm in pack() keeps the
// pair packed; the compiler would otherwise spread it over two registers.
__device__ inline float2 attention_projection_unpack(uint32_t bits) {
#if defined(ENABLE_BF16)
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
#else
    floatX x[2];
    memcpy(x, &bits, sizeof(x));
    return {(float)x[0], (float)x[1]};
#endif
}
__device__ inline uint32_t attention_projection_pack(float low, float high) {
    uint32_t bits = pack_16x2(low, high, floatX());
    asm volatile("" : "+r"(bits));
    return bits;
}
__device__ inline float2 attention_projection_pair(const floatX* p) {
    return attention_projection_unpack(*reinterpret_cast<const uint32_t*>(p));
}

template <int heads, class Kernel>
void attention_projection_launch(const AttentionProjection& f, Kernel* kernel, int bytes, const Execution& exec) {
    AttentionProjectionMaps maps;
    maps.qkv = tensor_map_heads(f.qkv, f.B, f.T, 3 * f.NH, 128);
    maps.proj_weight = tensor_map(f.proj_weight, {f.C, f.C}, {64, 128});
    maps.inp = tensor_map_heads(f.inp, f.B, f.T, f.NH, 128);
    maps.residual = tensor_map_heads(f.residual, f.B, f.T, f.NH, 16);
    maps.normed = tensor_map_heads(f.normed, f.B, f.T, f.NH, 16);
    int num_ranks = f.C / (64 * heads), num_tiles = ceil_div(f.T, 128), num_clusters;
    require((size_t)f.B * num_tiles * num_ranks <= INT_MAX);
    LaunchShape shape(num_ranks, 384, bytes, num_ranks);
    LaunchConfig config(kernel, shape, exec);
    cudaCheck(cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config));
    require(num_clusters > 0);
    // work items are tiles of 128 tokens, or pairs of tiles if there are more tiles than clusters
    int num_items = f.B * (f.B * num_tiles <= num_clusters ? num_tiles : ceil_div(num_tiles, 2));
    shape.grid = dim3((unsigned)(min(num_clusters, num_items) * num_ranks));
    launch_kernel(kernel, shape, exec, f, maps, num_ranks, LOG2E / sqrtf(64.0f));
}

// ---- kernel 4: one launch, one cluster per 128 tokens; each block has some heads, then some output columns ----
// For compute capability 9.0 and HS = 64. A block of the cluster computes the attention of `heads` heads; their outputs
// stay in its shared memory as tiles of (128,64). Then it computes 64 * heads columns of the projection, accumulated in
// registers. For these it needs the attention tiles of the whole cluster, so the blocks send each other their tiles:
//
//     block (rank)           0              1              C = 768: 2 blocks of 6 heads
//     attention of heads     0 .. 5         6 .. 11
//     all to all             <--- tiles of (128,64) --->   through distributed shared memory
//     projection, columns    0 .. 383       384 .. 767
//     layernorm              <--- row sums --->
//
// The first warpgroup loads and sends; each of the two consumer warpgroups has 64 of the tokens. All loads go through
// one ring of 16 KB tiles in the order of use: keys and values, then proj_weight with the other blocks' tiles, then
// inp. So the first tiles of each phase are loaded while the phase before it ends. The blocks of a cluster use the
// same positions of the ring for the same purpose, so a block can compute the slot of another block's ring that its
// tile goes to. A cluster takes pairs of tiles of tokens, chosen so that all pairs have the same work. Every other
// pair is processed in the opposite order, so that not all clusters project, and read inp, at the same time.

// The struct is largest with 6 heads: 226 KB, so one block per SM. Tiles are aligned to 1024 bytes, the swizzle's unit.
template <int heads> struct AttentionProjectionSMem {
    static constexpr int max_ranks = heads == 6 ? 3 : 8;
    floatX o[heads][ATTENTION_PROJECTION_TILE]; // attention's output; at the end normed, before its TMA stores
    floatX q[2][ATTENTION_PROJECTION_TILE];     // queries of this head and the next
    floatX ring[ATTENTION_PROJECTION_RING][ATTENTION_PROJECTION_TILE];
    float sums[2][max_ranks - 1][128]; // sums of each row from the other blocks: of x, of squares
    // full: the slot has been written, consumers wait; empty: all consumer warps have read it, the producer waits
    uint64_t full[ATTENTION_PROJECTION_RING], empty[ATTENTION_PROJECTION_RING];
    uint64_t q_full[2], q_empty[2];
    uint64_t o_full[heads];                     // consumers arrive when the head's output is complete, the sender waits
    uint64_t may_send[(max_ranks - 1) * heads]; // the receiver arrives when its slot is empty, the sender waits
    uint64_t sums_full[2][8];                   // the other blocks' sums of a consumer warp's rows have arrived
};
static_assert(sizeof(AttentionProjectionSMem<6>) <= 227 << 10, "all that compute capability 9.0 has");

// Calls each(b, tile) for all tiles of 128 tokens of this cluster. The loop has a single counter, to save registers.
template <class F> __device__ inline void attention_projection_each_tile(int B, int T, int num_ranks, F each) {
#pragma unroll 1
    for (int i = 0;; i++) {
        int num_tiles = ceil_div(T, 128), num_pairs = ceil_div(num_tiles, 2);
        int item = (i / 2 * gridDim.x + blockIdx.x) / num_ranks, pair = item % num_pairs, side = i % 2;
        if (item >= B * num_pairs) { break; }
        int other = num_tiles - 1 - pair;
        if (side == 1 && pair == other) { continue; }
        each(item / num_pairs, (side + pair) % 2 == 0 ? other : pair);
    }
}

template <int heads> __device__ inline void attention_projection_init(AttentionProjectionSMem<heads>& smem) {
    if (shared_address(&smem) % 1024 != 0) { __trap(); }
    if (threadIdx.x == 0) {
        for (int j = 0; j < ATTENTION_PROJECTION_RING; j++) {
            mbarrier_init(&smem.full[j], 1);
            mbarrier_init(&smem.empty[j], 8); // all consumer warps arrive
        }
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.q_empty[j], 8);
            for (int warp = 0; warp < 8; warp++) { mbarrier_init(&smem.sums_full[j][warp], 1); }
        }
        for (int j = 0; j < heads; j++) { mbarrier_init(&smem.o_full[j], 8); }
        for (int j = 0; j < (smem.max_ranks - 1) * heads; j++) { mbarrier_init(&smem.may_send[j], 1); }
        mbarrier_init_fence();
    }
}

// The producer thread. Per tile of tokens it loads, in this order:
//
//     attention     the queries of each head; keys and values of all heads as one sequence k0 k1 v0 k2 v1 ...
//     projection    for each 64 columns of proj_weight: the attention tile that they are multiplied with, which takes
//                   a slot only if another block sends it; then the columns, 128 rows at a time
//     epilogue      inp
template <int heads>
__device__ inline void attention_projection_load(AttentionProjectionSMem<heads>& smem, const AttentionProjection& f,
                                                 const AttentionProjectionMaps& maps, int rank, int num_ranks) {
    constexpr int weight_tiles = ceil_div(heads, 2);
    unsigned i = 0;
    int num_queries = 0, n = 0; // number of heads and of tiles of tokens so far
    attention_projection_each_tile(f.B, f.T, num_ranks, [&](int b, int tile) {
        for (int j = 0; j < heads; j++) { tma_prefetch_4d(&maps.inp, 0, rank * heads + j, tile * 128, b); }
        int num_steps = heads * (tile + 1), key_tile = tile, value_tile = tile, h = rank * heads, value_h = h;
        for (int step = 0; step <= num_steps; step++) { // the keys of `step` and the values of step - 1
            if (step < num_steps) {
                if (key_tile == tile) {
                    int q = num_queries % 2;
                    mbarrier_wait(&smem.q_empty[q], (num_queries / 2 + 1) % 2);
                    mbarrier_arrive_expect(&smem.q_full[q], ATTENTION_PROJECTION_BYTES);
                    tma_load_4d(smem.q[q], &maps.qkv, 0, h, tile * 128, b, &smem.q_full[q]);
                    num_queries++;
                }
                attention_projection_claim(smem, i);
                tma_load_4d(attention_projection_slot(smem, i), &maps.qkv, 0, f.NH + h, key_tile * 128, b,
                            &smem.full[i % ATTENTION_PROJECTION_RING]);
                i++;
                if (key_tile-- == 0) { key_tile = tile, h++; }
            }
            if (step > 0) {
                attention_projection_claim(smem, i);
                tma_load_4d(attention_projection_slot(smem, i), &maps.qkv, 0, 2 * f.NH + value_h, value_tile * 128, b,
                            &smem.full[i % ATTENTION_PROJECTION_RING]);
                i++;
                if (value_tile-- == 0) { value_tile = tile, value_h++; }
            }
        }
        for (int k = 0; k < num_ranks * heads; k++) {
            int from = (rank + k / heads) % num_ranks;
            if (from != rank) { // block `from` fills the slot
                attention_projection_claim(smem, i);
                mbarrier_arrive_cluster(&smem.may_send[k - heads], from);
                i++;
            }
            for (int j = 0; j < weight_tiles; j++) { // with 5 heads, half of the last tile is not used
                attention_projection_claim(smem, i);
                tma_load_2d(attention_projection_slot(smem, i), &maps.proj_weight, (from * heads + k % heads) * 64,
                            rank * heads * 64 + j * 128, &smem.full[i % ATTENTION_PROJECTION_RING]);
                i++;
            }
        }
        for (int j = 0; j < heads; j++) {
            attention_projection_claim(smem, i);
            tma_load_4d(attention_projection_slot(smem, i), &maps.inp, 0, rank * heads + j, tile * 128, b,
                        &smem.full[i % ATTENTION_PROJECTION_RING]);
            i++;
        }
        n++;
    });
}

// The sender thread: copies this block's tiles of attention into the rings of the other blocks.
template <int heads> __device__ inline void
attention_projection_send(AttentionProjectionSMem<heads>& smem, const AttentionProjection& f, int rank, int num_ranks) {
    constexpr int weight_tiles = ceil_div(heads, 2);
    unsigned i = 0;
    int n = 0;
    attention_projection_each_tile(f.B, f.T, num_ranks, [&](int, int tile) {
        i += heads * (2 * (tile + 1) + weight_tiles); // skips keys, values, and proj_weight for a block's own tiles
        for (int k = 0; k < (num_ranks - 1) * heads; k++) {
            int to = (rank - 1 - k / heads + num_ranks) % num_ranks;
            mbarrier_wait_cluster(&smem.may_send[k], n % 2);
            mbarrier_wait(&smem.o_full[k % heads], n % 2);
            bulk_copy_cluster(attention_projection_slot(smem, i), smem.o[k % heads], ATTENTION_PROJECTION_BYTES,
                              &smem.full[i % ATTENTION_PROJECTION_RING], to);
            i += 1 + weight_tiles;
        }
        i += heads; // skips inp
        n++;
    });
}

// The state of a consumer warp.
struct AttentionProjectionPlace {
    unsigned i; // position in the ring
    int n;      // number of tiles of tokens so far
    int row;    // the first of the warp's 16 rows of 128
    int pair;   // offset in a swizzled tile (16,64) of this thread's first two columns, in the first of its two rows
};

// One step of the attention loop, as attention_forward_step23: the scores of the next 128 keys (ring position i) and
// the product of P with the values (position i + 1) of the keys before them. new_head: these keys are the first of
// the next head, and x is that head's softmax state. q: the stage of their queries. If last_keys is true, the queries
// are not needed after this step. If `more` is true, another step follows.
template <bool new_head, int heads>
__device__ inline void attention_projection_step(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                 AttentionForwardRows& x, AttentionProjectionSMem<heads>& smem,
                                                 AttentionProjectionPlace& at, int q, bool last_keys, bool more,
                                                 float scale_log2) {
    named_barrier_sync(1 + at.row / 64, 256);
    wgmma_fence();
    attention_forward_sm90_scores(s, smem.q[q] + at.row / 64 * ATTENTION_FORWARD_BOX,
                                  attention_projection_slot(smem, at.i));
    wgmma_commit();
    attention_projection_await(smem, at.i + 1);
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_projection_slot(smem, at.i + 1));
    wgmma_commit();
    named_barrier_arrive(2 - at.row / 64, 256);
    wgmma_wait<1>();
    wgmma_hold(s);
    attention_projection_release(smem, at.i);
    if (last_keys && threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.q_empty[q]); }
    bool grew = false;
    if constexpr (new_head) {
        attention_forward_sm90_diagonal(s, x, at.row / 16, scale_log2);
    } else {
        grew = attention_forward_sm90_lazy_softmax<false, false>(s, x, 0, scale_log2);
    }
    // the condition on l always holds; the branch keeps exp() before the wait, see attention_forward_end_step
    if (more && !(x.l[0] + x.l[1] < 0)) { attention_projection_await(smem, at.i + 2); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    attention_projection_release(smem, at.i + 1);
    if (!new_head && grew) { attention_forward_sm90_rescale(o, x); }
    attention_forward_sm90_pack(p, s);
    at.i += 2;
}

// Divides a warp's 16 rows of output, from token t on, by the sums l of the softmax. Writes them to `tile` (16,64),
// from which wgmma and the sender thread read them.
__device__ inline void attention_projection_head(floatX* tile, float* lse, const float (&o)[32],
                                                 const AttentionForwardRows& x, const AttentionProjectionPlace& at,
                                                 int t, int T) {
    int lane = threadIdx.x % 32;
    float inverse[2];
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float l = quad_sum(x.l[half_row]);
        inverse[half_row] = 1.0f / l;
        int row = t + lane / 4 + 8 * half_row;
        if (lse && lane % 4 == 0 && row < T) { lse[row] = (x.m[half_row] + log2f(l)) * LN2; }
    }
    if (lane == 0) { tma_store_wait<0>(); } // until TMA has read the previous output from `tile`
    __syncwarp();
    attention_forward_sm90_to_shared(tile, o, inverse);
    tma_store_fence();
    __syncwarp();
}

// The attention of all heads of this block for one tile of tokens, into smem.o. The last product P V of a head overlaps
// with the first scores of the next head.
template <int heads> __device__ inline void attention_projection_attend(AttentionProjectionSMem<heads>& smem,
                                                                        const AttentionProjection& f,
                                                                        AttentionProjectionPlace& at, int b, int tile,
                                                                        int rank, float scale_log2) {
    const AttentionForwardRows fresh = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
    float s[64], o[32];
    uint32_t p[32];
    AttentionForwardRows x = fresh;
    unsigned num_queries = at.n * heads; // loads of queries before this tile: one per tile and head
    int q = num_queries % 2;
    mbarrier_wait(&smem.q_full[q], num_queries / 2 % 2);
    attention_projection_await(smem, at.i);
    wgmma_fence();
    attention_forward_sm90_scores(s, smem.q[q] + at.row / 64 * ATTENTION_FORWARD_BOX,
                                  attention_projection_slot(smem, at.i));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(s);
    attention_projection_release(smem, at.i);
    if (tile == 0 && threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.q_empty[q]); }
    at.i++;
    attention_forward_sm90_diagonal(s, x, at.row / 16, scale_log2);
    attention_forward_sm90_pack(p, s);
    if (heads > 1 || tile > 0) { attention_projection_await(smem, at.i); }
#pragma unroll 1
    for (int head = 0; head < heads; head++) {
        bool last_head = head + 1 == heads;
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
#pragma unroll 1
        for (int key_tile = tile - 1; key_tile >= 0; key_tile--) {
            attention_projection_step<false>(s, p, o, x, smem, at, num_queries % 2, key_tile == 0,
                                             key_tile > 0 || !last_head, scale_log2);
        }
        AttentionForwardRows next = fresh;
        if (!last_head) {
            num_queries++;
            mbarrier_wait(&smem.q_full[num_queries % 2], num_queries / 2 % 2);
            attention_projection_step<true>(s, p, o, next, smem, at, num_queries % 2, tile == 0,
                                            tile > 0 || head + 2 < heads, scale_log2);
        } else {
            attention_projection_await(smem, at.i);
            wgmma_hold(o);
            wgmma_hold(p);
            wgmma_fence();
            attention_forward_sm90_values(o, p, attention_projection_slot(smem, at.i));
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(o);
            attention_projection_release(smem, at.i);
            at.i++;
        }
        int h = rank * heads + head;
        attention_projection_head(smem.o[head] + at.row * 64, f.lse ? f.lse + ((size_t)b * f.NH + h) * f.T : nullptr, o,
                                  x, at, tile * 128 + at.row, f.T);
        // the sender may copy the head's output to the other blocks, if there are any
        if (f.C > heads * 64 && threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.o_full[head]); }
        x = next;
    }
}

// The projection: sum (64, 64 * heads) = the attention output of the cluster's heads times this block's rows of
// proj_weight, for a consumer's 64 tokens. Operands are released one product later, when their product has completed.
template <int heads> __device__ inline void attention_projection_multiply(float (&sum)[32 * heads],
                                                                          AttentionProjectionSMem<heads>& smem,
                                                                          AttentionProjectionPlace& at, int num_ranks) {
    constexpr int weight_tiles = ceil_div(heads, 2);
    unsigned i = at.i;
#pragma unroll
    for (int j = 0; j < 32 * heads; j++) { sum[j] = 0; } // uninitialised, sum would occupy registers earlier
#pragma unroll 1
    for (int k = 0; k < num_ranks * heads; k++) {
        bool own = k < heads;
        const floatX* tile = own ? smem.o[own ? k : 0] : attention_projection_slot(smem, i);
        if (!own) { attention_projection_await(smem, i++); }
        uint64_t a = wgmma_descriptor(tile + at.row / 64 * ATTENTION_FORWARD_BOX);
#pragma unroll
        for (int j = 0; j < weight_tiles; j++, i++) {
            attention_projection_await(smem, i);
            uint64_t w = wgmma_descriptor(attention_projection_slot(smem, i));
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < 4; d++) {
                if (2 * j + 1 < heads) {
                    wgmma_64x128x16(sum + 64 * j, a + 2 * d, w + 2 * d, 1, floatX());
                } else {
                    wgmma_64x64x16(sum + 64 * j, a + 2 * d, w + 2 * d, 1, floatX());
                }
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (j > 0) {
                attention_projection_release(smem, i - 1);
            } else if (k > 0) {
                attention_projection_release(smem, i - (own ? 1 : 2));
                if (k > heads) { attention_projection_release(smem, i - 2 - weight_tiles); }
            }
        }
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    attention_projection_release(smem, i - 1);
    if (num_ranks > 1) { attention_projection_release(smem, i - 1 - weight_tiles); }
    at.i = i;
}

// Sums x[0] and x[1], which belong to a thread's two rows, over the four threads that share the rows and over the
// blocks of the cluster. Blocks are added in the order of their ranks, so all get the same bits. pass: 0 for sums of
// x, 1 for squares.
template <int heads> __device__ inline void attention_projection_row_sums(float (&x)[2],
                                                                          AttentionProjectionSMem<heads>& smem,
                                                                          const AttentionProjectionPlace& at, int pass,
                                                                          int rank, int num_ranks) {
    int lane = threadIdx.x % 32, row = at.row + lane / 4;
    quad_sums(x);
    if (num_ranks == 1) { return; }
    uint64_t* barrier = &smem.sums_full[pass][at.row / 16];
    if (lane == 0) { mbarrier_arrive_expect(barrier, (num_ranks - 1) * 16 * (int)sizeof(float)); }
    if (lane % 4 == 0) {
#pragma unroll 1
        for (int s = 1; s < num_ranks; s++) { // seen from block `to`, this block is num_ranks - s further
            int to = (rank + s) % num_ranks;
            store_cluster_async(&smem.sums[pass][num_ranks - s - 1][row], x[0], barrier, to);
            store_cluster_async(&smem.sums[pass][num_ranks - s - 1][row + 8], x[1], barrier, to);
        }
    }
    __syncwarp();
    mbarrier_wait(barrier, at.n % 2);
    float sum[2] = {0, 0};
#pragma unroll 1
    for (int r = 0; r < num_ranks; r++) {
        int s = (r - rank + num_ranks) % num_ranks;
        sum[0] += s == 0 ? x[0] : smem.sums[pass][s - 1][row];
        sum[1] += s == 0 ? x[1] : smem.sums[pass][s - 1][row + 8];
    }
    x[0] = sum[0], x[1] = sum[1];
}

// The epilogue: residual and layernorm. Of each 16x8 tile of `sum`, a thread has two neighbouring columns in two rows.
// residual overwrites inp in the ring, normed overwrites attention's output in smem.o; TMA stores both from there. The
// residual is kept in registers as pairs of floatX: it is rounded anyway, and this leaves registers for loads in
// flight.
template <int heads>
__device__ inline void attention_projection_finish(const float (&sum)[32 * heads], AttentionProjectionSMem<heads>& smem,
                                                   const AttentionProjection& f, const AttentionProjectionMaps& maps,
                                                   AttentionProjectionPlace& at, int b, int tile, int rank,
                                                   int num_ranks) {
    int lane = threadIdx.x % 32, column = rank * heads * 64 + lane % 4 * 2, t = tile * 128 + at.row;
    float total[2] = {0, 0}, squares[2] = {0, 0}, inverse_C = 1.0f / f.C;
    uint32_t x[16 * heads]; // pairs of residual, in the order of `sum`
#pragma unroll
    for (int h = 0; h < heads; h++) {
        attention_projection_await(smem, at.i + h);
        floatX* box = attention_projection_slot(smem, at.i + h) + at.row * 64;
#pragma unroll
        for (int i = 16 * h; i < 16 * h + 16; i++) {
            int half_row = i % 2, offset = (at.pair ^ i % 16 / 2 * 8) + half_row * 8 * 64;
            float2 bias = attention_projection_pair(f.proj_bias + column + i / 2 * 8);
            float2 inp = attention_projection_pair(box + offset);
            x[i] = attention_projection_pack(sum[2 * i] + bias.x + inp.x, sum[2 * i + 1] + bias.y + inp.y);
            *reinterpret_cast<uint32_t*>(box + offset) = x[i];
            float2 rounded = attention_projection_unpack(x[i]);
            total[half_row] += rounded.x + rounded.y;
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tma_store_4d(&maps.residual, box, 0, rank * heads + h, t, b);
            tma_store_commit();
        }
    }
    attention_projection_row_sums(total, smem, at, 0, rank, num_ranks);
    // the sums of the other blocks show that they have received this block's tiles: smem.o may be overwritten
    if (lane == 0) { tma_store_wait<0>(); }
#pragma unroll
    for (int h = 0; h < heads; h++) { attention_projection_release(smem, at.i + h); }
    at.i += heads;
    float mean[2] = {total[0] * inverse_C, total[1] * inverse_C}, rstd[2];
#pragma unroll
    for (int i = 0; i < 16 * heads; i++) {
        float2 y = attention_projection_unpack(x[i]);
        y.x -= mean[i % 2], y.y -= mean[i % 2];
        squares[i % 2] += y.x * y.x + y.y * y.y;
    }
    attention_projection_row_sums(squares, smem, at, 1, rank, num_ranks);
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        rstd[half_row] = rsqrtf(squares[half_row] * inverse_C + f.epsilon);
        int row = t + lane / 4 + 8 * half_row;
        if (rank == 0 && lane % 4 == 0 && row < f.T) {
            f.mean[(size_t)b * f.T + row] = mean[half_row];
            f.rstd[(size_t)b * f.T + row] = rstd[half_row];
        }
    }
#pragma unroll
    for (int h = 0; h < heads; h++) {
        floatX* box = smem.o[h] + at.row * 64;
#pragma unroll
        for (int i = 16 * h; i < 16 * h + 16; i++) {
            int half_row = i % 2, offset = (at.pair ^ i % 16 / 2 * 8) + half_row * 8 * 64;
            float2 weight = attention_projection_pair(f.weight + column + i / 2 * 8);
            float2 bias = attention_projection_pair(f.bias + column + i / 2 * 8);
            float2 y = attention_projection_unpack(x[i]);
            y.x = (y.x - mean[half_row]) * rstd[half_row] * weight.x + bias.x;
            y.y = (y.y - mean[half_row]) * rstd[half_row] * weight.y + bias.y;
            *reinterpret_cast<uint32_t*>(box + offset) = attention_projection_pack(y.x, y.y);
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tma_store_4d(&maps.normed, box, 0, rank * heads + h, t, b);
            tma_store_commit();
        }
    }
}

template <int heads> __global__ void __launch_bounds__(384, 1)
    fused_attention_projection_residual_layernorm_sm90_kernel4(AttentionProjection f,
                                                               const __grid_constant__ AttentionProjectionMaps maps,
                                                               int num_ranks, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char attention_projection_shared[];
    auto& smem = *reinterpret_cast<AttentionProjectionSMem<heads>*>(attention_projection_shared);
    attention_projection_init(smem);
    __syncwarp();
    cluster_sync();
    int rank = cluster_rank();
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // tells the compiler that it is warp-uniform
    if (warp < 4) {
        warpgroup_fewer_registers<40>();
        if (threadIdx.x == 0) { attention_projection_load(smem, f, maps, rank, num_ranks); }
        if (threadIdx.x == 32) { attention_projection_send(smem, f, rank, num_ranks); }
        __syncwarp();
        cluster_sync();
        return;
    }
    warpgroup_more_registers<232>();
    int lane = threadIdx.x % 32;
    AttentionProjectionPlace at = {0, 0, (warp - 4) * 16, attention_forward_at<64>(lane / 4, 0) + lane % 4 * 2};
    if (warp >= 8) { named_barrier_arrive(1, 256); } // lets the first consumer begin
    attention_projection_each_tile(f.B, f.T, num_ranks, [&](int b, int tile) {
        attention_projection_attend(smem, f, at, b, tile, rank, scale_log2);
        float sum[32 * heads];
        named_barrier_sync(3 + at.row / 64, 128); // the warpgroup's rows of smem.o are written
        attention_projection_multiply(sum, smem, at, num_ranks);
        named_barrier_sync(3 + at.row / 64, 128); // all four warps have read them
        attention_projection_finish(sum, smem, f, maps, at, b, tile, rank, num_ranks);
        at.n++;
    });
    if (warp < 8) { named_barrier_sync(1, 256); } // matches the last arrival of the second consumer
    if (lane == 0) { tma_store_wait<0>(); }
    __syncwarp();
    cluster_sync(); // no block exits while another one writes to its shared memory
}

template <int heads> void attention_projection_sm90(const AttentionProjection& f, const Execution& exec) {
    auto kernel = fused_attention_projection_residual_layernorm_sm90_kernel4<heads>;
    attention_projection_launch<heads>(f, kernel, (int)sizeof(AttentionProjectionSMem<heads>), exec);
}

void fused_attention_projection_residual_layernorm4(const AttentionProjection& f, const Execution& exec) {
    int heads = attention_projection_heads(f.C, f.C / f.NH);
    require(heads > 0 && has_sm90a());
    heads == 6   ? attention_projection_sm90<6>(f, exec)
    : heads == 5 ? attention_projection_sm90<5>(f, exec)
                 : attention_projection_sm90<4>(f, exec);
}

// ---- kernel 5: three launches, each overlapped with the end of the one before; the product's epilogue adds inp ----

// attention (B,T,C) is scratch. form: GEMM_... of gemm.cuh. C <= 2048.
void fused_attention_projection_residual_layernorm5(const AttentionProjection& f, floatX* attention,
                                                    const Execution& exec, int form = GEMM_PING_PONG_192) {
    int N = f.B * f.T;
    attention_forward(attention, f.lse, f.qkv, f.B, f.T, f.C, f.NH, 1.0f / sqrtf((float)(f.C / f.NH)), exec);
    GemmArgs g = {f.residual, NULL, attention, f.proj_weight, f.inp, N, f.C, f.C};
    gemm_form(g, GemmBias<GEMM_ADD>{f.proj_bias}, true, exec, form);
    fused_residual_layernorm_early(f.normed, NULL, f.mean, f.rstd, f.residual, NULL, f.weight, f.bias, NULL, N, f.C,
                                   f.epsilon, exec);
}
#endif

// The number of the fastest kernel that this device, this binary and C support.
inline int attention_projection_choice(int C) {
#if defined(ENABLE_FP32)
    (void)C;
    return 2;
#else
    return C % 8 == 0 && C <= 2048 && has_sm90a() ? 5 : 2;
#endif
}

// Arguments as in AttentionProjection; attention and projection (B,T,C) are scratch.
void fused_attention_projection_residual_layernorm_forward(floatX* residual, floatX* normed, float* mean, float* rstd,
                                                           float* lse, floatX* attention, floatX* projection,
                                                           const floatX* qkv, const floatX* inp,
                                                           const floatX* proj_weight, const floatX* proj_bias,
                                                           const floatX* weight, const floatX* bias, int B, int T,
                                                           int C, int NH, float epsilon, const Execution& exec) {
    require(B > 0 && T > 0 && NH > 0 && C % NH == 0);
    AttentionProjection f = {residual,  normed, mean, rstd, lse, qkv, inp, proj_weight,
                             proj_bias, weight, bias, B,    T,   C,   NH,  epsilon};
#if !defined(ENABLE_FP32)
    if (attention_projection_choice(C) == 5) {
        return fused_attention_projection_residual_layernorm5(f, attention, exec);
    }
#endif
    fused_attention_projection_residual_layernorm2(f, attention, projection, exec);
}
