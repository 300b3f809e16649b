/*
What kernels 17 to 24 of attention_forward.cu and fused ops share beyond attention_forward.cuh: steps of 128 keys, and kernel 25
with another epilogue. Constraint: sm_90a, 16-bit floatX, HS = 64.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/ptx.cuh"
#include "attention_forward.cuh"

#if !defined(ENABLE_FP32)
// ---- shared by kernels 17 to 24 and by ops that include this file: steps of 128 keys ----

// Overloads of attention_forward_sm90_scores and _values that take shared-memory pointers instead of descriptors.
__device__ inline void attention_forward_sm90_scores(float (&s)[32], const floatX* q, const floatX* k) {
    attention_forward_sm90_scores(s, wgmma_descriptor(q), wgmma_descriptor(k));
}
template <int n>
__device__ inline void attention_forward_sm90_values(float (&o)[32], const uint32_t (&p)[n], const floatX* v) {
    attention_forward_sm90_values(o, p, wgmma_descriptor(v));
}

constexpr int ATTENTION_FORWARD_KEYS = 128 * ATTENTION_FORWARD_ROW; // elements of 128 keys, or of 128 values
constexpr int ATTENTION_FORWARD_KEY_BYTES = 16 * 1024; // their size in bytes, which the full barrier expects
static_assert(sizeof(floatX) * ATTENTION_FORWARD_KEYS == ATTENTION_FORWARD_KEY_BYTES, "");

// Issues the TMA loads of 128 keys or values, those of tokens t..t+127. vector: index into the 3 * NH vectors of a
// token (q of all heads, then k, then v).
__device__ inline void attention_forward_tma(floatX* keys, uint64_t* full, const CUtensorMap& qkv_map, int vector,
                                             int t, int b) {
    mbarrier_arrive_expect(full, ATTENTION_FORWARD_KEY_BYTES);
    tma_load_4d(keys, &qkv_map, 0, vector, t, b, full);
    tma_load_4d(keys + ATTENTION_FORWARD_BOX, &qkv_map, 0, vector, t + 64, b, full);
}

// Scores of 128 keys, from shared-memory pointers. If `held` is true, the compiler is not told that the previous
// contents of s are dead, and so keeps s in its registers. This gives better code where all registers are in use
// anyway.
template <bool held = false>
__device__ inline void attention_forward_sm90_scores(float (&s)[64], const floatX* q, const floatX* k) {
    uint64_t a = wgmma_descriptor(q), b = wgmma_descriptor(k);
    if constexpr (held) {
        wgmma_64x128x16(s, a, b, 0, floatX());
    } else {
        wgmma_64x128x16_new(s, a, b, floatX());
    }
#pragma unroll
    for (int d = 1; d < 4; d++) { wgmma_64x128x16(s, a + 2 * d, b + 2 * d, 1, floatX()); }
}

// Turns the scores of 2 * num_s keys into P, and adds P to l. If `masked`, row r of the warp does not see keys after
// diagonal + r. If `skip`, no exponentials are computed for groups of 16 keys that no row of the warp sees. Rescaling
// is lazy, as in kernel 14: if P would exceed 2^8, l is rescaled and true is returned, because o must be rescaled too.
template <bool masked, bool skip, int num_s> __device__ inline bool
attention_forward_sm90_lazy_softmax(float (&s)[num_s], AttentionForwardRows& rows, int diagonal, float scale_log2) {
    int lane = threadIdx.x % 32,
        last_key = diagonal + lane / 4 - lane % 4 * 2; // last key that row g sees, relative to this thread's column 2t
    float row_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}; // two independent chains of fmaxf per row
#pragma unroll
    for (int i = 0; i < num_s; i++) {
        if (masked && i / 4 * 8 + i % 2 > last_key + i / 2 % 2 * 8) { s[i] = -INFINITY; }
        row_max[i / 2 % 2][i % 2] = fmaxf(row_max[i / 2 % 2][i % 2], s[i]);
    }
    float new_m[2];
    bool grew = false;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        new_m[half_row] = quad_max(fmaxf(row_max[half_row][0], row_max[half_row][1])) * scale_log2;
        grew |= new_m[half_row] > rows.m[half_row] + 8.0f;
    }
    grew = __any_sync(0xFFFFFFFFu, grew);
    if (grew) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float m = fmaxf(rows.m[half_row], new_m[half_row]);
            rows.rescale[half_row] = exp2_approx(rows.m[half_row] - m);
            rows.l[half_row] *= rows.rescale[half_row];
            rows.m[half_row] = m;
        }
    }
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        if (skip && 2 * n > diagonal + 15) { // no row of the warp sees these 16 keys
#pragma unroll
            for (int i = n; i < n + 8; i++) { s[i] = 0; }
        } else {
            if (skip) { asm volatile(""); } // makes the compiler keep the branch, so that hidden groups cost nothing
#pragma unroll
            for (int i = n; i < n + 8; i++) {
                s[i] = exp2_approx(fmaf(s[i], scale_log2, -rows.m[i / 2 % 2]));
                rows.l[i / 2 % 2] += s[i];
            }
        }
    }
    return grew;
}

// The end of a step over 128 keys, after its exponentials: waits for P V of the previous step, then packs P. await()
// waits for the keys of the next step, if there is one (`more`). The condition !(l < 0) always holds. It makes the
// compiler keep the exponentials before the branch; otherwise it moves some of them behind wgmma_wait, where they no
// longer overlap with P V.
template <class F> __device__ inline void attention_forward_end_step(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                                     const AttentionForwardRows& rows, bool grew,
                                                                     bool more, F await, uint64_t* v_empty) {
    if (more && !(rows.l[0] + rows.l[1] < 0)) { await(); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(v_empty); }
    if (grew) { attention_forward_sm90_rescale(o, rows); }
    attention_forward_sm90_pack(p, s);
}

// Calls f(head, tile) for every tile of queries of this block. If `persistent`, the block takes every gridDim.x-th pair
// of tiles. A pair is a long and a short tile of one head; all pairs of a head see the same number of keys. Otherwise
// the block takes one tile.
template <bool persistent, class F>
__device__ inline void attention_forward_each_tile(int num_heads, int num_tiles, int group, F f) {
    if (!persistent) {
        AttentionForwardWork work = attention_forward_work(num_heads, num_tiles, group);
        f(work.head, work.tile);
        return;
    }
    int num_pairs = ceil_div(num_tiles, 2);
#pragma unroll 1
    for (int i = blockIdx.x; i < num_heads * num_pairs; i += gridDim.x) {
        int first = i % num_pairs, last = num_tiles - 1 - first;
#pragma unroll 1
        for (int tile = last; tile >= first; tile -= max(last - first, 1)) { f(i / num_pairs, tile); }
    }
}

// ---- for ops that include this file: kernel 25 with an object of a class Store as its epilogue ----
// A Store has two functions. prepare(tile, t, h, b) is called after a tile's first step, and its work overlaps with the
// steps that follow. store(tile, o, l, t, h, b) ends a tile: it writes the warp's rows o / l, tokens t..t+15 of head h;
// t < 0 is padding and is not stored. `tile` is the warp's own 2 KB of shared memory.

// Like attention_forward_sm90_producer, but with evict-first loads, so that L2 does not keep what they read.
template <int groups> __device__ inline void attention_forward_sm90_producer_once(AttentionForwardSMem<groups>& smem,
                                                                                  const CUtensorMap& qkv_map, int T,
                                                                                  int NH, AttentionForwardList list) {
    unsigned i = 0, n = 0;
#pragma unroll 1
    for (; attention_forward_next_tile(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int first_group = ceil_div(T, 64) - groups * (list.num_tiles - list.tile);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        smem.tiles[n % 2] = {b, h, first_group};
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            tma_load_4d_once(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, (first_group + j) * 64, b,
                             &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int block = first_group + groups - 1; block >= 0; block--, i++) {
            unsigned stage = i % smem.STAGES;
            mbarrier_wait(&smem.empty[stage], (i / smem.STAGES + 1) % 2);
            mbarrier_arrive_expect(&smem.full[stage], sizeof(smem.kv[0]));
            tma_load_4d_once(smem.kv[stage][0], &qkv_map, 0, NH + h, block * 64, b, &smem.full[stage]);
            tma_load_4d_once(smem.kv[stage][1], &qkv_map, 0, 2 * NH + h, block * 64, b, &smem.full[stage]);
        }
    }
    mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
    smem.tiles[n % 2] = {-1, 0, 0};
    mbarrier_arrive(&smem.q_full[n % 2]);
}

// As the consumer of kernel 25, with a Store as the epilogue.
template <int groups, class Store>
__device__ inline void attention_forward_sm90_consumer(AttentionForwardSMem<groups>& smem, float* lse, int T, int NH,
                                                       float scale_log2, Store& store) {
    int warpgroup = attention_forward_sm90_warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    uint64_t kv = wgmma_descriptor(smem.kv[0][0]);
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        AttentionForwardQueries queries;
        if (!attention_forward_sm90_next_queries(queries, smem, warpgroup, n, i)) { break; }
        float s[32], o[32];
        uint32_t p[16];
        AttentionForwardRows rows;
        attention_forward_sm90_first_step(s, p, rows, smem, queries, kv, i, warpgroup, scale_log2);
        floatX* tile = smem.out + threadIdx.x / 32 * 16 * ATTENTION_FORWARD_ROW;
        int t = queries.group * 64 + warp * 16;
        store.prepare(tile, t, queries.h, queries.b);
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < queries.num_steps; step++, i++) {
            attention_forward_sm90_step(s, p, o, rows, smem, queries.q, kv, i, warpgroup, scale_log2);
        }
        attention_forward_sm90_last_product(o, p, rows, smem, queries, kv, n, i, lse, t, T, NH);
        store.store(tile, o, rows.l, t, queries.h, queries.b);
    }
    if (lane == 0) { tma_store_wait<0>(); }
}

// The body of a kernel that has groups + 1 warpgroups and a Store as its epilogue. If `once`, the loads are
// evict-first.
template <bool once = false, int groups, class Store>
__device__ inline void attention_forward_sm90_block(AttentionForwardSMem<groups>& smem, float* lse,
                                                    const CUtensorMap& qkv_map, int T, int NH,
                                                    const AttentionForwardList& list, float scale_log2, Store store) {
    attention_forward_sm90_init(smem);
    grid_launch_dependents();
    grid_wait_dependency();
    if (threadIdx.x < 128 * groups) {
        warpgroup_more_registers<groups == 4 ? 112 : 208>();
        attention_forward_sm90_consumer(smem, lse, T, NH, scale_log2, store);
    } else {
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 128 * groups) {
            if (once) {
                attention_forward_sm90_producer_once(smem, qkv_map, T, NH, list);
            } else {
                attention_forward_sm90_producer(smem, qkv_map, T, NH, list);
            }
        }
    }
}

// Launches a kernel whose body is attention_forward_sm90_block. SMem: the type of its shared memory; out: its last
// arguments, which only the Store uses.
template <int groups, class SMem, class Kernel, class... Out>
void attention_forward_sm90_launch_kernel(Kernel kernel, float* lse, const floatX* qkv, int B, int T, int NH,
                                          const Execution& exec, const Out&... out) {
    constexpr int SHARED_BYTES = sizeof(SMem) + 1024;
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    int num_tiles = ceil_div(T, 64 * groups), num_blocks = min(B * NH * num_tiles, exec.free_sms());
    AttentionForwardList list = attention_forward_list(B * NH, num_tiles, num_blocks);
    launch_early(kernel, dim3(num_blocks), dim3(128 * (groups + 1)), SHARED_BYTES, exec, lse, qkv_map, T, NH, list,
                 LOG2E / sqrtf(64.0f), out...);
}
#endif
