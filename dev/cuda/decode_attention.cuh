/*
decode_attention: out (B,C) = attention of the new token in qkv (B,3,NH,HS) to itself and the positions[b] tokens before it; its key and
value become row positions[b] of keys, values (B,capacity,C). Position -1: the text is left out | scratch in floats
Constraint: HS % 8 == 0, HS <= 256.
Kernel 5 of decode_attention.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"

// ==== promoted: decode_attention ====
// ---- shared by kernels 2 to 5: 16-byte loads, online softmax in registers ----

constexpr int DECODE_ATTENTION_WARPS = 8;                             // per block
constexpr int DECODE_ATTENTION_THREADS = 32 * DECODE_ATTENTION_WARPS; // one per element of a head: HS <= 256
constexpr int DECODE_ATTENTION_STEP = 64;         // the keys of one part (a block's share) are a multiple of this
constexpr int DECODE_ATTENTION_AHEAD = 2;         // keys in flight per thread
constexpr float DECODE_ATTENTION_LOWEST = -1e30f; // initial maximum; finite, because -inf - -inf is NaN

struct DecodeAttentionShared {
    float sum[DECODE_ATTENTION_WARPS][DECODE_ATTENTION_THREADS];      // weighted sums of values, per warp
    float max[DECODE_ATTENTION_WARPS], total[DECODE_ATTENTION_WARPS]; // maximum score, sum of weights, per warp
    bool last;                                                        // this block is the last of its head to arrive
};

// One element of the weighted sum of values. The weights are exp2(score - max), and `total` is their sum.
struct DecodeAttentionSum {
    float sum, max, total;
};

// Combines the results of all warps, which are in shared memory, for element threadIdx.x. The order of the warps is
// fixed, so the result is deterministic.
__device__ inline DecodeAttentionSum decode_attention_join(const DecodeAttentionShared& shared) {
    DecodeAttentionSum x = {0.0f, DECODE_ATTENTION_LOWEST, 0.0f};
#pragma unroll
    for (int w = 0; w < DECODE_ATTENTION_WARPS; w++) { x.max = fmaxf(x.max, shared.max[w]); }
#pragma unroll
    for (int w = 0; w < DECODE_ATTENTION_WARPS; w++) {
        float scale = exp2f(shared.max[w] - x.max);
        x.sum += scale * shared.sum[w][threadIdx.x];
        x.total += scale * shared.total[w];
    }
    return x;
}

// Keys that a block takes in one iteration, with this many lanes per key.
__host__ __device__ constexpr int decode_attention_keys(int lanes) {
    return DECODE_ATTENTION_AHEAD * (DECODE_ATTENTION_THREADS / lanes);
}

// What a thread knows of a head: its part of the query, and of the weighted sum of the values of its keys. `lanes` lanes
// share a key and hold `depth` vectors of it each.
//
//     one iteration, lanes = 8:   warp 0, lanes 0-7    8-15    16-23    24-31    warp 1, lanes 0-7   ...   warp 7, 24-31
//     key of u = 0                row + 0              + 1     + 2      + 3      + 4                 ...   + 31
//     key of u = 1                row + 32             + 33    + 34     + 35     + 36                ...   + 63
template <int lanes, int depth> struct DecodeAttentionState {
    float q[depth][x128::size], sum[depth][x128::size], max, total;

    // qkv points to the head's query
    __device__ void start(const floatX* qkv, int HS, float scale) {
        scale *= LOG2E; // exp2(LOG2E * x) is exp(x)
        max = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
        for (int d = 0; d < depth; d++) {
            int v = threadIdx.x % lanes + d * lanes;
            x128 vec = {};
            if (v < HS / x128::size) { vec = load128(qkv + v * x128::size); }
#pragma unroll
            for (int e = 0; e < x128::size; e++) { q[d][e] = (float)vec[e] * scale, sum[d][e] = 0.0f; }
        }
    }

    // Adds the keys k and values v of the iteration that starts at `row`, up to key end - 1. Key `now` is the new token's:
    // it is read from qkv and written to the cache. keys, values and qkv point to the head's first element.
    __device__ void add(int4 k[DECODE_ATTENTION_AHEAD][depth], int4 v[DECODE_ATTENTION_AHEAD][depth], floatX* keys,
                        floatX* values, const floatX* qkv, int row, int end, int now, int C, int HS) {
        constexpr int groups = DECODE_ATTENTION_THREADS / lanes, ahead = DECODE_ATTENTION_AHEAD;
        float score[ahead], old_max = max;
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            int t = row + u * groups + (int)threadIdx.x / lanes;
            score[u] = 0.0f;
#pragma unroll
            for (int d = 0; d < depth; d++) {
                int i = threadIdx.x % lanes + d * lanes;
                if (t == now && t < end && i < HS / x128::size) {
                    k[u][d] = reinterpret_cast<const int4*>(qkv + C)[i];
                    v[u][d] = reinterpret_cast<const int4*>(qkv + 2 * C)[i];
                    reinterpret_cast<int4*>(keys + (size_t)now * C)[i] = k[u][d];
                    reinterpret_cast<int4*>(values + (size_t)now * C)[i] = v[u][d];
                }
                x128 key = vec128_from_bits<floatX>(k[u][d]);
#pragma unroll
                for (int e = 0; e < x128::size; e++) { score[u] += q[d][e] * (float)key[e]; }
            }
            score[u] = lanes_sum<lanes>(score[u]);
            if (t >= end) { score[u] = -INFINITY; }
            max = fmaxf(max, score[u]);
        }
        float rescale = exp2f(old_max - max);
        total *= rescale;
#pragma unroll
        for (int d = 0; d < depth; d++) {
#pragma unroll
            for (int e = 0; e < x128::size; e++) { sum[d][e] *= rescale; }
        }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            float weight = exp2f(score[u] - max);
            total += weight;
#pragma unroll
            for (int d = 0; d < depth; d++) {
                x128 value = vec128_from_bits<floatX>(v[u][d]);
#pragma unroll
                for (int e = 0; e < x128::size; e++) { sum[d][e] += weight * (float)value[e]; }
            }
        }
    }

    // The result over all threads of the block, for element threadIdx.x; in threads from HS on it is meaningless.
    __device__ DecodeAttentionSum join(DecodeAttentionShared& shared, int HS) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float warp_max = groups_max<lanes>(max); // the groups of lanes had different keys
        float rescale = exp2f(max - warp_max);
        total = groups_sum<lanes>(total * rescale);
#pragma unroll
        for (int d = 0; d < depth; d++) {
#pragma unroll
            for (int e = 0; e < x128::size; e++) {
                float x = groups_sum<lanes>(sum[d][e] * rescale);
                int i = (lane % lanes + d * lanes) * x128::size + e;
                if (lane < lanes && i < HS) { shared.sum[warp][i] = x; }
            }
        }
        if (lane == 0) { shared.max[warp] = warp_max, shared.total[warp] = total; }
        __syncthreads();
        return decode_attention_join(shared);
    }
};

// ---- shared by kernels 3 to 5: the results of the parts of a head, and how they are combined ----

// Combines num_parts partial results, each {max, total, sum (HS)}; warp w takes parts w, w + 8 ...
__device__ inline DecodeAttentionSum decode_attention_combine(DecodeAttentionShared& shared, const float* partial,
                                                              int num_parts, int HS) {
    constexpr int num_elements = DECODE_ATTENTION_THREADS / 32; // per lane
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[num_elements] = {}, max = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll 2
    for (int p = warp; p < num_parts; p += DECODE_ATTENTION_WARPS) {
        const float* from = partial + (size_t)p * (HS + 2);
        float part_max = __ldcg(from), part_total = __ldcg(from + 1), both = fmaxf(max, part_max);
        float old_scale = exp2f(max - both), part_scale = exp2f(part_max - both);
        max = both, total = total * old_scale + part_total * part_scale;
#pragma unroll
        for (int j = 0; j < num_elements; j++) {
            float x = lane + 32 * j < HS ? __ldcg(from + 2 + lane + 32 * j) : 0.0f;
            sum[j] = sum[j] * old_scale + x * part_scale;
        }
    }
#pragma unroll
    for (int j = 0; j < num_elements; j++) { shared.sum[warp][lane + 32 * j] = sum[j]; }
    if (lane == 0) { shared.max[warp] = max, shared.total[warp] = total; }
    __syncthreads();
    return decode_attention_join(shared);
}

// The partial results of a head in scratch, which starts with one counter per head.
__device__ inline float* decode_attention_partials(float* scratch, int num_heads, int head, int num_parts, int HS) {
    return scratch + num_heads + (size_t)head * num_parts * (HS + 2);
}

// Writes a part's result x to `own`. Returns true in the last block to call this for a head; it finds all num_parts there.
__device__ inline bool decode_attention_arrive(DecodeAttentionShared& shared, int* counter, float* own,
                                               const DecodeAttentionSum& x, int num_parts, int HS) {
    int i = threadIdx.x;
    if (i < HS) { own[2 + i] = x.sum; }
    if (i == 0) { own[0] = x.max, own[1] = x.total; }
    __threadfence(); // makes the partial results visible before the count
    __syncthreads();
    if (i == 0) {
        shared.last = atomicAdd(counter, 1) == num_parts - 1;
        if (shared.last) { *counter = 0; } // reset for the next launch
        __threadfence();
    }
    __syncthreads();
    return shared.last;
}

// Size of scratch in floats: a counter per head, and room for as many partial results as there are steps. It must be zero
// before the first launch; decode_attention leaves its counters at zero.
size_t decode_attention_scratch(int B, int C, int NH, int capacity) {
    return (size_t)B * NH * (1 + (size_t)ceil_div(capacity, DECODE_ATTENTION_STEP) * (C / NH + 2));
}

// ---- kernel 5: all keys of all texts and heads in equal shares, one per resident block; loads two iterations ahead ----

// Where a block is in the list of all iterations: iteration i over the keys of head h of text b, whose position is `now`.
// The list is sorted by b, then h, then i. The number of iterations is that of whole steps; a text that has ended (position -1) has none.
template <int keys> struct DecodeAttentionCursor { // keys: of one iteration
    static constexpr int per_step = DECODE_ATTENTION_STEP / keys;
    int b, h, i, now;

    __device__ static int iterations(int position) {
        return position < 0 ? 0 : (position / DECODE_ATTENTION_STEP + 1) * per_step;
    }
    __device__ int count() const { return iterations(now); } // of each head of text b
    // of all heads and texts
    __device__ static int total(const int* positions, int B, int NH) {
        int sum = 0;
        for (int text = threadIdx.x % 32; text < B; text += 32) { sum += iterations(positions[text]); }
        return lanes_sum<32>(sum) * NH;
    }
    // Goes to place `target` of the list, which must be less than total().
    __device__ void find(int target, const int* positions, int B, int NH) {
        int lane = threadIdx.x % 32, first = 0; // first: the place where a group of 32 texts begins
        for (int text = 0;; text += 32) {
            int own = text + lane < B ? iterations(positions[text + lane]) * NH : 0, upto = own;
            for (int offset = 1; offset < 32; offset *= 2) {
                int below = __shfl_up_sync(0xFFFFFFFFu, upto, offset);
                if (lane >= offset) { upto += below; }
            }
            unsigned past = __ballot_sync(0xFFFFFFFFu, first + upto > target);
            if (past) {
                int which = __ffs(past) - 1;
                target -= first + __shfl_sync(0xFFFFFFFFu, upto - own, which);
                b = text + which;
                break;
            }
            first += __shfl_sync(0xFFFFFFFFu, upto, 31);
        }
        now = positions[b], h = target / count(), i = target % count();
    }
    // Goes to the next place, which must exist.
    __device__ void advance(const int* positions, int NH) {
        if (++i < count()) { return; }
        i = 0;
        if (++h < NH) { return; }
        h = 0;
        do { now = positions[++b]; } while (now < 0);
    }
};

// A ring in shared memory for loads in flight. Each thread reads only what it copied itself, so there are no barriers.
template <int lanes, int depth> struct DecodeAttentionRing {
    static constexpr int slots = depth == 1 ? 2 : 1; // 32 KB: with DecodeAttentionShared less than 48 KB
    int4 k[slots][DECODE_ATTENTION_AHEAD][depth][DECODE_ATTENTION_THREADS];
    int4 v[slots][DECODE_ATTENTION_AHEAD][depth][DECODE_ATTENTION_THREADS];

    // Starts this thread's copies of the iteration at `row`; zeros from row `end` on. keys and values point to the head.
    __device__ void copy(int slot, const floatX* keys, const floatX* values, int row, int end, int C, int num_vec) {
#pragma unroll
        for (int u = 0; u < DECODE_ATTENTION_AHEAD; u++) {
            int t = row + (u * DECODE_ATTENTION_THREADS + (int)threadIdx.x) / lanes;
#pragma unroll
            for (int d = 0; d < depth; d++) {
                int i = threadIdx.x % lanes + d * lanes;
                bool there = t < end && i < num_vec;
                size_t at = there ? (size_t)t * C + i * x128::size : 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 // no cp.async
                k[slot][u][d][threadIdx.x] = there ? vec128_bits(load128(keys + at)) : make_int4(0, 0, 0, 0);
                v[slot][u][d][threadIdx.x] = there ? vec128_bits(load128(values + at)) : make_int4(0, 0, 0, 0);
#else
                cp_async_16(&k[slot][u][d][threadIdx.x], keys + at, there);
                cp_async_16(&v[slot][u][d][threadIdx.x], values + at, there);
#endif
            }
        }
    }
    // Ends what copy() of one iteration has started.
    __device__ void commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
        cp_async_commit();
#endif
    }
    // Waits for the oldest of `slots` committed iterations.
    __device__ void wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
        cp_async_wait<slots - 1>();
#endif
    }
};

// gridDim.x blocks share the list of iterations evenly. A head that lies in the shares of several blocks is combined by the
// last of them to arrive. The share is a multiple of a step, so a head has at most as many parts as steps.
template <int lanes, int depth> __global__ void __launch_bounds__(DECODE_ATTENTION_THREADS, depth == 1 ? 3 : 2)
    decode_attention_kernel5(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                             const int* positions, int B, int NH, int HS, int capacity, float scale) {
    constexpr int ahead = DECODE_ATTENTION_AHEAD, step = decode_attention_keys(lanes);
    typedef DecodeAttentionCursor<step> Cursor;
    typedef DecodeAttentionRing<lanes, depth> Ring;
    __shared__ DecodeAttentionShared shared;
    // without this alignment a step of 64 sequences takes 10% longer: notes/decode_attention.md
    extern __shared__ __align__(128) int4 decode_attention_ring[];
    Ring& ring = *reinterpret_cast<Ring*>(decode_attention_ring);
    grid_launch_dependents(); // the next kernel may start and load its weights
    int C = NH * HS, num_vec = HS / x128::size, max_parts = ceil_div(capacity, DECODE_ATTENTION_STEP);
    int total = Cursor::total(positions, B, NH);
    int share = ceil_div(ceil_div(total, (int)gridDim.x), Cursor::per_step) * Cursor::per_step;
    int begin = blockIdx.x * share, end = min(begin + share, total);
    if (begin >= end) { return; }
    Cursor at, loads; // loads: `slots` iterations ahead of `at`
    at.find(begin, positions, B, NH);
    loads = at;
    auto copy = [&](int place) { // starts the loads of a place, if there is one
        if (place < end) {
            if (place > begin) { loads.advance(positions, NH); }
            size_t cache = (size_t)loads.b * capacity * C + loads.h * HS;
            ring.copy((place - begin) % Ring::slots, keys + cache, values + cache, loads.i * step, loads.now, C,
                      num_vec);
        }
        ring.commit();
    };
    for (int slot = 0; slot < Ring::slots; slot++) { copy(begin + slot); }
    grid_wait_dependency(); // what was read before this line is not written by earlier kernels of the step

#pragma unroll 1
    for (int place = begin; place < end;) { // the share's part of one head after the other
        DecodeAttentionState<lanes, depth> state;
        int head = at.b * NH + at.h, count = at.count(), head_begin = place - at.i; // the head's place in the list
        size_t cache = (size_t)at.b * capacity * C + at.h * HS;
        const floatX* head_qkv = qkv + (size_t)at.b * 3 * C + at.h * HS;
        state.start(head_qkv, HS, scale);
        for (int head_end = min(head_begin + count, end); place < head_end; place++) {
            int4 k[ahead][depth], v[ahead][depth];
            int slot = (place - begin) % Ring::slots;
            ring.wait();
#pragma unroll
            for (int u = 0; u < ahead; u++) {
#pragma unroll
                for (int d = 0; d < depth; d++) {
                    k[u][d] = ring.k[slot][u][d][threadIdx.x], v[u][d] = ring.v[slot][u][d][threadIdx.x];
                }
            }
            copy(place + Ring::slots);
            state.add(k, v, keys + cache, values + cache, head_qkv, (place - head_begin) * step, at.now + 1, at.now, C,
                      HS);
        }
        DecodeAttentionSum x = state.join(shared, HS);
        int first_block = head_begin / share, num_parts = (head_begin + count - 1) / share - first_block + 1;
        bool last = num_parts == 1;
        if (num_parts > 1) {
            float* partials = decode_attention_partials(scratch, B * NH, head, max_parts, HS);
            last = decode_attention_arrive(shared, reinterpret_cast<int*>(scratch) + head,
                                           partials + (size_t)(blockIdx.x - first_block) * (HS + 2), x, num_parts, HS);
            if (last) { x = decode_attention_combine(shared, partials, num_parts, HS); }
        }
        if (last && (int)threadIdx.x < HS) {
            out[(size_t)at.b * C + at.h * HS + threadIdx.x] = (floatX)(x.sum / x.total);
        }
        __syncthreads();  // now `shared` may be overwritten
        at.i = count - 1; // advance() goes to the next head
        if (place < end) { at.advance(positions, NH); }
    }
}

// The new token of each sequence attends over the positions[b] tokens before it and itself; its key and value become
// row positions[b] of the cache. With a position of -1, nothing is read or written for that sequence. The positions and the
// earlier rows are read while the previous kernel may still run: only kernels before this step's decode_embed write them,
// and those have ended.
// out (B,C) | keys, values (B,capacity,C) inout | scratch: decode_attention_scratch | qkv (B,3,NH,HS) | positions (B)
void decode_attention(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                      const int* positions, int B, int C, int NH, int capacity, float scale, const Execution& exec,
                      int blocks_per_sm) {
    // bytes without the reads of the cache, which depend on the positions
    Op op(exec, 4.0 * B * C * sizeof(floatX), 0, "decode_attention");
    require(B > 0 && NH > 0 && C % NH == 0 && capacity > 0 && blocks_per_sm > 0);
    int HS = C / NH, num_vec = HS / x128::size;
    require(HS % 8 == 0 && HS <= DECODE_ATTENTION_THREADS);
    auto kernel = decode_attention_kernel5<8, 1>;
    if (num_vec > 8) { kernel = decode_attention_kernel5<16, 1>; }
    if (num_vec > 16) { kernel = decode_attention_kernel5<32, 1>; }
    if (num_vec > 32) { kernel = decode_attention_kernel5<32, 2>; }
    size_t bytes = sizeof(DecodeAttentionRing<8, 1>); // the same for all of them
    static_assert(sizeof(DecodeAttentionRing<8, 1>) == sizeof(DecodeAttentionRing<32, 2>), "");
    double most = (double)B * NH * ceil_div(capacity, DECODE_ATTENTION_STEP); // steps, if the cache is full
    require(most <= 1 << 28);
    int blocks = min(num_multiprocessors() * blocks_per_sm, (int)most);
    launch_early(kernel, blocks, DECODE_ATTENTION_THREADS, bytes, exec, out, keys, values, scratch, qkv, positions, B,
                 NH, HS, capacity, scale);
}
void decode_attention(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                      const int* positions, int B, int C, int NH, int capacity, float scale, const Execution& exec) {
    decode_attention(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, scale, exec, 3);
}
// ==== end promoted: decode_attention ====
