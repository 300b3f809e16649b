/* decode_attention: one new token of each sequence attends over its cache of keys and values

   out (B,C) floatX out | keys, values (B,capacity,C) floatX inout: the kernel writes row positions[b] of the cache |
   scratch, see decode_attention_scratch() | qkv (B,3,NH,HS) floatX in, of the new token | positions (B) int in
   Bound: memory, 2*B*(position+1)*C*sizeof(floatX) bytes; with few sequences, latency.
   Constraint: HS % 8 == 0, HS <= 256.
   Error: one ulp of floatX, and 1e-5 of the values' size for the exponentials of the softmax. A score of size s has an
   error of about 4 s ulps of fp32.
   Tuned: blocks per SM of kernels 3 to 5, warps of kernel 6. Kernel 2 is kernel 4 with one part per head.
   Kernel 6 needs -gencode arch=compute_90a,code=sm_90a and HS = 64.
   This file also has decode_cache_fill, which copies the prompt's keys and values; the small shapes check it.
   Source: online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; split over the keys: Dao et al. 2023,
   "Flash-Decoding for long-context inference".

   Shape flags: the new token attends over T tokens, itself included; the cache has room for 3/2 T.

   Kernels (this list is written by versions.sh):
     1  one block per head, scores in shared memory
     2  one block per head, online softmax in registers
     3  keys split over blocks, a second kernel combines
     4  keys split over blocks, the last block combines
     5  all keys in equal shares, loads two iterations ahead (promoted)
     6  on tensor cores, keys and values by TMA, a share for each warp

   nvcc -O3 --use_fast_math decode_attention.cu -o decode_attention      (or: make decode_attention)
   ./decode_attention 5      check kernel 5 against the CPU and sweep its block sizes
   ./decode_attention        every kernel, side by side                                         */
#include "../../llmc/ptx.cuh"
#include "bench.h"

// ---- kernel 1: one block per head, scores in shared memory ----------------------------------------------------------

__global__ void decode_attention_kernel1(floatX* out, floatX* keys, floatX* values, const floatX* qkv,
                                         const int* positions, int NH, int HS, int capacity) {
    extern __shared__ __align__(128) float decode_attention_scores[]; // (capacity)
    __shared__ float shared[32];
    int h = blockIdx.x, b = blockIdx.y, now = positions[b], C = NH * HS;
    const floatX* q = qkv + (size_t)b * 3 * C + h * HS;
    keys += (size_t)b * capacity * C + h * HS, values += (size_t)b * capacity * C + h * HS;
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        keys[(size_t)now * C + i] = q[C + i];
        values[(size_t)now * C + i] = q[2 * C + i];
    }
    __syncthreads();
    float max = -INFINITY, sum = 0.0f;
    for (int t = threadIdx.x; t <= now; t += blockDim.x) {
        float score = 0.0f;
        for (int i = 0; i < HS; i++) { score += (float)q[i] * (float)keys[(size_t)t * C + i]; }
        decode_attention_scores[t] = score * rsqrtf((float)HS);
        max = fmaxf(max, decode_attention_scores[t]);
    }
    max = block_max(max, shared);
    for (int t = threadIdx.x; t <= now; t += blockDim.x) {
        decode_attention_scores[t] = expf(decode_attention_scores[t] - max);
        sum += decode_attention_scores[t];
    }
    sum = block_sum(sum, shared);
    __syncthreads();
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        float value = 0.0f;
        for (int t = 0; t <= now; t++) { value += decode_attention_scores[t] * (float)values[(size_t)t * C + i]; }
        out[(size_t)b * C + h * HS + i] = (floatX)(value / sum);
    }
}

void decode_attention1(floatX* out, floatX* keys, floatX* values, const floatX* qkv, const int* positions, int B, int C,
                       int NH, int capacity, cudaStream_t stream, int block_size) {
    require(capacity <= 11 * 1024); // 44 of the 48 KB that a launch may use without cudaFuncSetAttribute
    decode_attention_kernel1<<<dim3(NH, B), block_size, capacity * sizeof(float), stream>>>(
        out, keys, values, qkv, positions, NH, C / NH, capacity);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one block per head, 16-byte loads, online softmax in registers (kernel 4 with one part per head) -----

#include "decode_attention.cuh" // kernel 5, and what it shares with kernels 2 to 4

// Loads this thread's vectors of the keys (or values) of the iteration that starts at `row`; zeros from row `end` on.
template <int lanes, int depth> __device__ inline void decode_attention_fetch(int4 x[DECODE_ATTENTION_AHEAD][depth],
                                                                              const floatX* cache, int row, int end,
                                                                              int C, int num_vec) {
    constexpr int groups = DECODE_ATTENTION_THREADS / lanes;
#pragma unroll
    for (int u = 0; u < DECODE_ATTENTION_AHEAD; u++) {
        int t = row + u * groups + (int)threadIdx.x / lanes;
#pragma unroll
        for (int d = 0; d < depth; d++) {
            int v = threadIdx.x % lanes + d * lanes;
            bool there = t < end && v < num_vec;
            x[u][d] = there ? reinterpret_cast<const int4*>(cache + (size_t)t * C)[v] : make_int4(0, 0, 0, 0);
        }
    }
}

// One block attends over keys begin .. end-1 of a head; see DecodeAttentionState.
template <int lanes, int depth>
__device__ DecodeAttentionSum decode_attention_part(DecodeAttentionShared& shared, floatX* keys, floatX* values,
                                                    const floatX* qkv, int begin, int end, int now, int C, int HS) {
    constexpr int step = decode_attention_keys(lanes);
    int num_vec = HS / x128::size;
    int4 k[DECODE_ATTENTION_AHEAD][depth], v[DECODE_ATTENTION_AHEAD][depth];
    decode_attention_fetch<lanes, depth>(k, keys, begin, min(end, now), C, num_vec);
    decode_attention_fetch<lanes, depth>(v, values, begin, min(end, now), C, num_vec);
    grid_wait_dependency(); // what was read before this line is not written by earlier kernels of the step

    DecodeAttentionState<lanes, depth> state;
    state.start(qkv, HS, 1.0f / sqrtf((float)HS));
    for (int row = begin; row < end; row += step) {
        if (row != begin) {
            decode_attention_fetch<lanes, depth>(k, keys, row, min(end, now), C, num_vec);
            decode_attention_fetch<lanes, depth>(v, values, row, min(end, now), C, num_vec);
        }
        state.add(k, v, keys, values, qkv, row, end, now, C, HS);
    }
    return state.join(shared, HS);
}

inline void decode_attention_launch(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                                    const int* positions, int B, int C, int NH, int capacity, int part_keys,
                                    cudaStream_t stream);

void decode_attention2(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                       const int* positions, int B, int C, int NH, int capacity, cudaStream_t stream) {
    decode_attention_launch(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, capacity, stream);
}

// ---- kernel 3: the keys of a head are split over blocks; a second kernel combines their results ---------------------

// Keys per part of kernels 3 and 4, chosen so that a full cache gives four blocks per SM.
inline int decode_attention_part_keys(int B, int NH, int capacity) {
    int parts = max(1, min(ceil_div(4 * num_multiprocessors(), B * NH), ceil_div(capacity, DECODE_ATTENTION_STEP)));
    return ceil_div(ceil_div(capacity, parts), DECODE_ATTENTION_STEP) * DECODE_ATTENTION_STEP;
}

template <int lanes, int depth> __global__ void __launch_bounds__(DECODE_ATTENTION_THREADS)
    decode_attention_split_kernel3(floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                                   const int* positions, int NH, int HS, int capacity, int part_keys) {
    __shared__ DecodeAttentionShared shared;
    int part = blockIdx.x, h = blockIdx.y, b = blockIdx.z, C = NH * HS, i = threadIdx.x;
    int now = positions[b], begin = part * part_keys, end = min(begin + part_keys, now + 1);
    if (begin >= end) { return; }
    size_t cache = (size_t)b * capacity * C + h * HS;
    DecodeAttentionSum x = decode_attention_part<lanes, depth>(
        shared, keys + cache, values + cache, qkv + (size_t)b * 3 * C + h * HS, begin, end, now, C, HS);
    float* own =
        decode_attention_partials(scratch, gridDim.z * NH, b * NH + h, gridDim.x, HS) + (size_t)part * (HS + 2);
    if (i < HS) { own[2 + i] = x.sum; }
    if (i == 0) { own[0] = x.max, own[1] = x.total; }
}

__global__ void decode_attention_combine_kernel3(floatX* out, float* scratch, const int* positions, int NH, int HS,
                                                 int num_parts, int part_keys) {
    __shared__ DecodeAttentionShared shared;
    int h = blockIdx.x, b = blockIdx.y, i = threadIdx.x;
    const float* partials = decode_attention_partials(scratch, gridDim.y * NH, b * NH + h, num_parts, HS);
    DecodeAttentionSum x = decode_attention_combine(shared, partials, positions[b] / part_keys + 1, HS);
    if (i < HS) { out[(size_t)(b * NH + h) * HS + i] = (floatX)(x.sum / x.total); }
}

void decode_attention3(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                       const int* positions, int B, int C, int NH, int capacity, int part_keys, cudaStream_t stream) {
    int HS = C / NH, num_vec = HS / x128::size;
    require(HS % 8 == 0 && HS <= DECODE_ATTENTION_THREADS);
    auto kernel = decode_attention_split_kernel3<8, 1>;
    if (num_vec > 8) { kernel = decode_attention_split_kernel3<16, 1>; }
    if (num_vec > 16) { kernel = decode_attention_split_kernel3<32, 1>; }
    if (num_vec > 32) { kernel = decode_attention_split_kernel3<32, 2>; }
    dim3 grid(ceil_div(capacity, part_keys), NH, B);
    kernel<<<grid, DECODE_ATTENTION_THREADS, 0, stream>>>(keys, values, scratch, qkv, positions, NH, HS, capacity,
                                                          part_keys);
    cudaCheck(cudaGetLastError());
    decode_attention_combine_kernel3<<<dim3(NH, B), DECODE_ATTENTION_THREADS, 0, stream>>>(out, scratch, positions, NH,
                                                                                           HS, grid.x, part_keys);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: the keys of a head are split over blocks; the last block of the head to arrive combines the results --

template <int lanes, int depth> __global__ void __launch_bounds__(DECODE_ATTENTION_THREADS)
    decode_attention_kernel4(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                             const int* positions, int NH, int HS, int capacity, int part_keys) {
    __shared__ DecodeAttentionShared shared;
    grid_launch_dependents(); // the next kernel may start and load its weights
    int part = blockIdx.x, h = blockIdx.y, b = blockIdx.z, C = NH * HS, i = threadIdx.x;
    int now = positions[b], begin = part * part_keys, end = min(begin + part_keys, now + 1);
    if (begin >= end) { return; }
    size_t cache = (size_t)b * capacity * C + h * HS;
    DecodeAttentionSum x = decode_attention_part<lanes, depth>(
        shared, keys + cache, values + cache, qkv + (size_t)b * 3 * C + h * HS, begin, end, now, C, HS);

    int num_parts = now / part_keys + 1; // parts with keys; the grid covers the whole capacity
    if (num_parts > 1) {
        int head = b * NH + h, *counter = reinterpret_cast<int*>(scratch) + head;
        float* partials = decode_attention_partials(scratch, gridDim.z * NH, head, gridDim.x, HS);
        bool last = decode_attention_arrive(shared, counter, partials + (size_t)part * (HS + 2), x, num_parts, HS);
        if (!last) { return; }
        x = decode_attention_combine(shared, partials, num_parts, HS);
    }
    if (i < HS) { out[(size_t)b * C + h * HS + i] = (floatX)(x.sum / x.total); }
}

inline void decode_attention_launch(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                                    const int* positions, int B, int C, int NH, int capacity, int part_keys,
                                    cudaStream_t stream) {
    require(B > 0 && B <= 65535 && NH > 0 && NH <= 65535 && C % NH == 0 && capacity > 0);
    int HS = C / NH, num_vec = HS / x128::size;
    require(HS % 8 == 0 && HS <= DECODE_ATTENTION_THREADS);
    auto kernel = decode_attention_kernel4<8, 1>;
    if (num_vec > 8) { kernel = decode_attention_kernel4<16, 1>; }
    if (num_vec > 16) { kernel = decode_attention_kernel4<32, 1>; }
    if (num_vec > 32) { kernel = decode_attention_kernel4<32, 2>; }
    launch_early(kernel, dim3(ceil_div(capacity, part_keys), NH, B), DECODE_ATTENTION_THREADS, 0, stream, out, keys,
                 values, scratch, qkv, positions, NH, HS, capacity, part_keys);
}

// ---- kernel 6: products on tensor cores, keys and values by TMA, each warp with a share and a ring of its own ----

#if !defined(ENABLE_FP32)
constexpr int DECODE_ATTENTION_TILE = 32; // keys of one iteration of a warp, and their values: 8 KB

// What a warp knows of a head of 64 dimensions. mma multiplies 16 rows by 8 columns, where one query needs a single row. For the
// scores, rows 0 to 7 are all the query and rows 8 to 15 zero, so each lane has the scores of its columns, the keys. For the weighted
// sum, rows 0 to 7 are the weights rounded to 16 bits and rows 8 to 15 what the rounding has lost; both results together are as
// exact as products of floats. As in flash attention, the scores of one mma are in the lanes where the other one wants them.
struct DecodeAttentionTile {
    uint32_t q[8];    // lane 4g + t: [i] dimensions 8i + 2t and 8i + 2t + 1
    float sum[8][4];  // [j]: dimensions 8j + 2t and 8j + 2t + 1 by the rounded weights, and the same by the rest
    float max, total; // the maximum of the scores so far, times LOG2E / sqrt(64); the sum of this lane's weights
    uint32_t new_key, new_value; // dimensions 2 * lane and 2 * lane + 1

    // qkv points to the head's query; with_new: begins with the new token's key and value
    __device__ __forceinline__ void start(const floatX* qkv, int C, bool with_new) {
        int lane = threadIdx.x % 32, t = lane % 4;
        auto pair = [](const floatX* from, int i) { return reinterpret_cast<const uint32_t*>(from)[i]; };
#pragma unroll
        for (int i = 0; i < 8; i++) { q[i] = pair(qkv, 4 * i + t); }
        max = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) { sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f; }
        if (!with_new) { return; }
        new_key = pair(qkv + C, lane), new_value = pair(qkv + 2 * C, lane);
        float2 x = unpack_16x2(pair(qkv, lane), floatX()), y = unpack_16x2(new_key, floatX());
        max = warp_sum(x.x * y.x + x.y * y.y) * (LOG2E * 0.125f);
        total = t == 0 ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 v = unpack_16x2(__shfl_sync(0xFFFFFFFFu, new_value, 4 * j + t), floatX());
            sum[j][0] = v.x, sum[j][1] = v.y;
        }
    }

    // Adds the first `rows` of a tile of keys and values, in shared memory as TMA writes them.
    __device__ __forceinline__ void add(const floatX* keys, const floatX* values, int rows) {
        constexpr int num_keys = DECODE_ATTENTION_TILE;
        constexpr float scale = LOG2E * 0.125f; // exp2(LOG2E * x) is exp(x), 0.125 is 1 / sqrt(64)
        int lane = threadIdx.x % 32, t = lane % 4, row = lane % 8, matrix = lane / 8;
        bool whole = rows >= num_keys;
        uint32_t key_at = shared_address(keys) + row * 128 + ((matrix ^ row) << 4);
        uint32_t value_at = shared_address(values) + (matrix % 2 * 8 + row) * 128 + ((matrix / 2 ^ row) << 4);
        float scores[num_keys / 8][4]; // of keys 8n + 2t and 8n + 2t + 1; [2] and [3] are of the rows of zeros
#pragma unroll
        for (int n = 0; n < num_keys / 8; n++) {
            scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
            for (int half_head = 0; half_head < 2; half_head++) {
                uint32_t b[4];
                ldmatrix_x4(b, (key_at ^ half_head << 6) + n * 1024);
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    uint32_t a[4] = {q[4 * half_head + i], 0, q[4 * half_head + i + 1], 0};
                    mma_16x8x16(scores[n], a, b[i], b[i + 1], floatX());
                }
            }
        }
        float highest = -INFINITY;
#pragma unroll
        for (int n = 0; n < num_keys / 8; n++) {
            if (!whole) {
                if (8 * n + 2 * t >= rows) { scores[n][0] = -INFINITY; }
                if (8 * n + 2 * t + 1 >= rows) { scores[n][1] = -INFINITY; }
            }
            highest = fmaxf(highest, fmaxf(scores[n][0], scores[n][1]));
        }
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 2)) * scale;
        if (highest > max) {
            float rescale = exp2f(max - highest);
            max = highest, total *= rescale;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum[j][0] *= rescale, sum[j][1] *= rescale, sum[j][2] *= rescale, sum[j][3] *= rescale;
            }
        }
        uint32_t weights[num_keys / 8], rest[num_keys / 8];
#pragma unroll
        for (int n = 0; n < num_keys / 8; n++) {
            float w0 = exp2_approx(scores[n][0] * scale - max), w1 = exp2_approx(scores[n][1] * scale - max);
            total += w0 + w1;
            weights[n] = pack_16x2(w0, w1, floatX());
            float2 rounded = unpack_16x2(weights[n], floatX());
            rest[n] = pack_16x2(w0 - rounded.x, w1 - rounded.y, floatX());
        }
#pragma unroll
        for (int n = 0; n < num_keys / 8; n += 2) { // keys 8n to 8n + 15
            if (8 * n >= rows) { break; }
            uint32_t a[4] = {weights[n], rest[n], weights[n + 1], rest[n + 1]};
#pragma unroll
            for (int j = 0; j < 8; j += 2) { // dimensions 8j to 8j + 15
                uint32_t b[4];
                ldmatrix_x4_trans(b, (value_at ^ j << 4) + n * 1024);
                if (!whole) { // 0 times what is behind the text's last value must be 0
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int left = rows - (8 * (n + i % 2) + 2 * t);
                        b[i] &= left >= 2 ? 0xFFFFFFFFu : left == 1 ? 0xFFFFu : 0u;
                    }
                }
                mma_16x8x16(sum[j], a, b[0], b[1], floatX());
                mma_16x8x16(sum[j + 1], a, b[2], b[3], floatX());
            }
        }
    }

    // The weighted sum of dimensions 2 * lane and 2 * lane + 1. Afterwards `total` is that of the warp.
    __device__ __forceinline__ float2 finish() {
        float2 x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) { x[j] = {sum[j][0] + sum[j][2], sum[j][1] + sum[j][3]}; }
#pragma unroll
        for (int n = 1; n < 8; n *= 2) { // x[0] becomes x[g]
#pragma unroll
            for (int j = 0; j < 8; j += 2 * n) { x[j] = threadIdx.x & 4 * n ? x[j + n] : x[j]; }
        }
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
        return x[0];
    }
};

// A weighted sum of values, of dimensions 2 * lane and 2 * lane + 1, over some keys of a head.
struct DecodeAttentionPair {
    float2 sum;
    float max, total;

    __device__ void add(float2 more, float more_max, float more_total) {
        float both = fmaxf(max, more_max), scale = exp2f(max - both), more_scale = exp2f(more_max - both);
        max = both, total = total * scale + more_total * more_scale;
        sum.x = sum.x * scale + more.x * more_scale, sum.y = sum.y * scale + more.y * more_scale;
    }
};

// The tiles on their way to each warp of a block, and what the warps have of heads that they share: of the head in which a
// warp begins, and of the one in which it ends.
template <int warps, int slots> struct DecodeAttentionTiles {
    floatX keys[warps][slots][DECODE_ATTENTION_TILE * 64], values[warps][slots][DECODE_ATTENTION_TILE * 64];
    uint64_t full[warps][slots]; // the tile has arrived
    struct {
        float2 sum[32];
        float max, total;
        int head, begin, end; // -1: none; where the head begins and ends in the list
        bool first;           // of the parts of this head in the block
    } parts[warps][2];
};

// The blocks share the list of steps evenly, and the warps of a block share its tiles. Parts of a head are added up in the order of
// the keys: those of a block by the first of its warps that has one, those of several blocks by the last block to arrive.
template <int warps, int slots> __global__ void __launch_bounds__(32 * warps)
    decode_attention_kernel6(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                             const int* positions, int B, int NH, int capacity,
                             const __grid_constant__ CUtensorMap keys_map,
                             const __grid_constant__ CUtensorMap values_map) {
    constexpr int HS = 64, tile = DECODE_ATTENTION_TILE, tile_bytes = 2 * tile * HS * (int)sizeof(floatX);
    typedef DecodeAttentionCursor<tile> Cursor;
    extern __shared__ __align__(128) unsigned char decode_attention_tiles[];
    auto& shared = shared_aligned_1024<DecodeAttentionTiles<warps, slots>>(decode_attention_tiles);
    if (threadIdx.x == 0) { tma_prefetch_map(&keys_map), tma_prefetch_map(&values_map); }
    grid_launch_dependents(); // the next kernel may start and load its weights
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, C = NH * HS;
    // the shares of the first `longer` blocks are one step longer than those of the others
    int steps = Cursor::total(positions, B, NH) / Cursor::per_step, num_shares = min((int)gridDim.x, steps);
    int share = blockIdx.x;
    if (share >= num_shares) { return; }
    int share_steps = steps / num_shares, longer = steps % num_shares;
    auto share_of = [=](int place) {
        int step = place / Cursor::per_step, in_longer = longer * (share_steps + 1);
        return step < in_longer ? step / (share_steps + 1) : longer + (step - in_longer) / share_steps;
    };
    int block_begin = (share_steps * share + min(share, longer)) * Cursor::per_step;
    int block_tiles = (share_steps + (share < longer)) * Cursor::per_step;
    int begin = block_begin + block_tiles * warp / warps, end = block_begin + block_tiles * (warp + 1) / warps;
    if (lane < slots) { mbarrier_init(&shared.full[warp][lane], 1); }
    if (lane < 2) { shared.parts[warp][lane].head = -1; }
    mbarrier_init_fence();
    __syncwarp();
    Cursor at, loads; // loads: `slots` tiles ahead of `at`
    at.find(min(begin, block_begin + block_tiles - 1), positions, B, NH);
    loads = at;
    auto load = [&](int place, int slot) { // starts the loads of a place, if there is one
        if (place >= end) { return; }
        if (place > begin) { loads.advance(positions, NH); }
        if (lane != 0) { return; }
        uint64_t* full = &shared.full[warp][slot];
        int first = loads.i * tile;
        if (first >= loads.now) { // the new token's row is not in the cache yet
            mbarrier_arrive(full);
            return;
        }
        mbarrier_arrive_expect(full, tile_bytes);
        tma_load_4d(shared.keys[warp][slot], &keys_map, 0, loads.h, first, loads.b, full);
        tma_load_4d(shared.values[warp][slot], &values_map, 0, loads.h, first, loads.b, full);
    };
    for (int slot = 0; slot < slots; slot++) { load(begin + slot, slot); }
    grid_wait_dependency(); // what was read before this line is not written by earlier kernels of the step

    auto store = [&](int head, const DecodeAttentionPair& x) {
        reinterpret_cast<uint32_t*>(out + (size_t)head * HS)[lane] =
            pack_16x2(x.sum.x / x.total, x.sum.y / x.total, floatX());
    };
    int slot = 0, parity = 0;
#pragma unroll 1
    for (int place = begin; place < end;) { // the warp's part of one head after the other
        DecodeAttentionTile state;
        int head = at.b * NH + at.h, count = at.count(), head_begin = place - at.i; // the head's place in the list
        int head_end = min(head_begin + count, end), new_place = head_begin + at.now / tile;
        bool with_new =
            new_place >= place && new_place < head_end; // this warp has the tile with the row of the new token
        bool whole = at.i == 0 && head_begin + count <= end;
        auto& part = shared.parts[warp][place == begin ? 0 : 1];
        bool first = at.i == 0 || place == block_begin;
        state.start(qkv + (size_t)at.b * 3 * C + at.h * HS, C, with_new);
#pragma unroll 1
        for (; place < head_end; place++) {
            mbarrier_wait(&shared.full[warp][slot], parity);
            int rows = at.now - (place - head_begin) * tile;
            if (rows > 0) { state.add(shared.keys[warp][slot], shared.values[warp][slot], rows); }
            __syncwarp(); // all lanes have read the tile
            load(place + slots, slot);
            if (++slot == slots) { slot = 0, parity ^= 1; }
        }
        if (with_new) { // now that the tile with this row has been loaded
            size_t row = ((size_t)at.b * capacity + at.now) * C + at.h * HS;
            reinterpret_cast<uint32_t*>(keys + row)[lane] = state.new_key;
            reinterpret_cast<uint32_t*>(values + row)[lane] = state.new_value;
        }
        DecodeAttentionPair x;
        x.sum = state.finish(), x.max = state.max, x.total = state.total;
        if (whole) {
            store(head, x);
        } else {
            part.sum[lane] = x.sum;
            if (lane == 0) {
                part.max = x.max, part.total = x.total, part.first = first;
                part.head = head, part.begin = head_begin, part.end = head_begin + count;
            }
        }
        at.i = count - 1; // advance() goes to the next head
        if (place < end) { at.advance(positions, NH); }
    }
    __syncthreads(); // every warp has stored its partial results

#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const auto& own = shared.parts[warp][part];
        int head = own.head;
        if (head < 0 || !own.first) { continue; }
        DecodeAttentionPair x = {own.sum[lane], own.max, own.total};
        for (int w = warp + 1; w < warps; w++) {
            const auto& more = shared.parts[w][0];
            if (more.head == head) { x.add(more.sum[lane], more.max, more.total); }
        }
        int first_share = share_of(own.begin), num_parts = share_of(own.end - 1) - first_share + 1;
        if (num_parts > 1) {
            float* parts =
                decode_attention_partials(scratch, B * NH, head, ceil_div(capacity, DECODE_ATTENTION_STEP), HS);
            float* to = parts + (size_t)(share - first_share) * (HS + 2);
            to[2 + 2 * lane] = x.sum.x, to[3 + 2 * lane] = x.sum.y;
            if (lane == 0) { to[0] = x.max, to[1] = x.total; }
            __threadfence(); // makes the part visible before the count
            __syncwarp();
            int* counter = reinterpret_cast<int*>(scratch) + head;
            int arrived = lane == 0 ? atomicAdd(counter, 1) : 0;
            if (__shfl_sync(0xFFFFFFFFu, arrived, 0) != num_parts - 1) { continue; }
            if (lane == 0) { *counter = 0; } // reset for the next launch
            __threadfence();
            x = {{0.0f, 0.0f}, DECODE_ATTENTION_LOWEST, 0.0f};
#pragma unroll 4
            for (int p = 0; p < num_parts; p++) {
                const float* from = parts + (size_t)p * (HS + 2);
                float2 more = {__ldcg(from + 2 + 2 * lane), __ldcg(from + 3 + 2 * lane)};
                x.add(more, __ldcg(from), __ldcg(from + 1));
            }
        }
        store(head, x);
    }
}

template <int warps, int slots> void decode_attention6(floatX* out, floatX* keys, floatX* values, float* scratch,
                                                       const floatX* qkv, const int* positions, int B, int C, int NH,
                                                       int capacity, cudaStream_t stream) {
    require(C == 64 * NH && has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap keys_map = tensor_map_heads(keys, B, capacity, NH, DECODE_ATTENTION_TILE);
    CUtensorMap values_map = tensor_map_heads(values, B, capacity, NH, DECODE_ATTENTION_TILE);
    auto kernel = decode_attention_kernel6<warps, slots>;
    int bytes = sizeof(DecodeAttentionTiles<warps, slots>) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    launch_early(kernel, num_multiprocessors(), 32 * warps, bytes, stream, out, keys, values, scratch, qkv, positions,
                 B, NH, capacity, keys_map, values_map);
}
#endif

#include "decode_cache_fill.cuh"

// decode_cache_fill has no benchmark of its own. With small shapes (T <= 100) each launch of a kernel below first runs
// decode_cache_fill, and the check covers its output too.
static std::function<void()> declare_cache_fill(Bench& b, int capacity) {
    if (b.T > 100) {
        return [] {};
    }
    int B = b.B, T = b.T, C = b.C;
    cudaStream_t stream = b.stream;
    size_t n = (size_t)B * capacity * C;
    Buffer<floatX> qkv = b.input<floatX>("prompt_qkv", (size_t)B * T * 3 * C);
    Buffer<floatX> keys_before = b.input<floatX>("filled_keys_before", n);
    Buffer<floatX> values_before = b.input<floatX>("filled_values_before", n);
    Buffer<floatX> keys = b.inout<floatX>("filled_keys", n, keys_before, {0.0f, 0.0f});
    Buffer<floatX> values = b.inout<floatX>("filled_values", n, values_before, {0.0f, 0.0f});
    b.reference([=] {
        memcpy(keys.host, keys_before.host, n * sizeof(float));
        memcpy(values.host, values_before.host, n * sizeof(float));
        decode_cache_fill_cpu(keys.host, values.host, qkv.host, B, T, C, capacity);
    });
    return [=] { decode_cache_fill(keys, values, qkv, B, T, C, capacity, stream); };
}

// Keys per part for kernels 3 and 4, so that a full cache gives `blocks` blocks per SM; 0: as decode_attention().
static int decode_attention_part_of(int B, int NH, int capacity, int blocks) {
    if (blocks == 0) { return decode_attention_part_keys(B, NH, capacity); }
    int parts = std::min(ceil_div(blocks * num_multiprocessors(), B * NH), ceil_div(capacity, DECODE_ATTENTION_STEP));
    return ceil_div(ceil_div(capacity, parts), DECODE_ATTENTION_STEP) * DECODE_ATTENTION_STEP;
}

static void declare(Bench& b) {
    b.varies("BTH");
    int B = b.B, T = b.T, C = b.C, NH = b.NH, capacity = T + T / 2;
    cudaStream_t stream = b.stream;
    size_t n = (size_t)B * capacity * C, num_scratch = 0;
    // the smallest parts give the most partial results: as decode_attention_scratch(), with parts of one step
    if (!b.dry) {
        num_scratch = (size_t)B * NH * (1 + (size_t)ceil_div(capacity, DECODE_ATTENTION_STEP) * (C / NH + 2));
    }
    require(b.dry || num_scratch >= decode_attention_scratch(B, C, NH, capacity));
    int which = b.cases({"normal", "scores of some 100", "equal scores", "texts that have ended"});
    bool ended = which == 3;
    Buffer<floatX> qkv = b.input_from<floatX>("qkv", (size_t)B * 3 * C, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, (size_t)B * 3 * C, seed, 1.5f, 0.0f);
        for (size_t i = 0; i < (size_t)B * 3 * C; i++) { // only queries
            if (i % (3 * C) >= (size_t)C) { continue; }
            if (which == 1) { x[i] *= 20.0f; }
            if (which == 2) { x[i] = 0.0f; }
        }
    });
    Buffer<int> positions = b.input_from<int>("positions", B, [=](float* p) {
        for (int i = 0; i < B; i++) { // sequences of different lengths
            p[i] = ended && i % 3 != 1 ? -1.0f : T - 1 - i % 3 * (T / 4);
        }
    });
    Buffer<floatX> keys_before = b.input<floatX>("keys_before", n), values_before = b.input<floatX>("values_before", n);
    Buffer<floatX> keys = b.inout<floatX>("keys", n, keys_before, {0.0f, 0.0f});
    Buffer<floatX> values = b.inout<floatX>("values", n, values_before, {0.0f, 0.0f});
    Buffer<float> scratch = b.state_of_launches<float>("scratch", num_scratch);
    float score_error = which == 1 ? 1e-4f : 0; // 4 s ulps of fp32 for s = 200
    Tolerance tolerance = {2e-5f + score_error, ulp_of<floatX>() + 1e-5f};
    Buffer<floatX> out_before = b.input<floatX>("out_before", (size_t)B * C);
    Buffer<floatX> out = ended ? b.inout<floatX>("out", (size_t)B * C, out_before, tolerance)
                               : b.output<floatX>("out", (size_t)B * C, tolerance);
    std::function<void()> cache_fill = declare_cache_fill(b, capacity);
    b.reference([=] {
        memcpy(keys.host, keys_before.host, n * sizeof(float));
        memcpy(values.host, values_before.host, n * sizeof(float));
        if (ended) { memcpy(out.host, out_before.host, (size_t)B * C * sizeof(float)); }
        decode_attention_cpu(out.host, keys.host, values.host, qkv.host, positions.host, B, C, NH, capacity);
    });
    b.cost(2.0 * B * T * C * sizeof(floatX) + 4.0 * B * C * sizeof(floatX), 4.0 * B * T * C,
           2.0 * B * T * C * sizeof(floatX), 4.0 * B * T * C);
    b.reads_only();

    float scale = 1.0f / sqrtf((float)(C / NH));
    auto launch = [=](std::function<void()> op) {
        cache_fill();
        op();
    };
    if (!ended) { // these kernels cannot leave a text out
        b.kernel(1, "one block per head, scores in shared memory", [=](int bs) {
            cache_fill();
            decode_attention1(out, keys, values, qkv, positions, B, C, NH, capacity, stream, bs);
        });
        b.kernel(2, "one block per head, online softmax in registers",
                 [=](int) {
                     launch([=] {
                         decode_attention2(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, stream);
                     });
                 },
                 {0});
        b.kernel(3, "keys split over blocks, a second kernel combines",
                 [=](int blocks) {
                     int part_keys = decode_attention_part_of(B, NH, capacity, blocks);
                     launch([=] {
                         decode_attention3(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, part_keys,
                                           stream);
                     });
                 },
                 {0, 1, 2, 8});
        b.config("blocks per SM");
        b.kernel(4, "keys split over blocks, the last block combines",
                 [=](int blocks) {
                     int part_keys = decode_attention_part_of(B, NH, capacity, blocks);
                     launch([=] {
                         decode_attention_launch(out, keys, values, scratch, qkv, positions, B, C, NH, capacity,
                                                 part_keys, stream);
                     });
                 },
                 {0, 1, 2, 8});
        b.config("blocks per SM");
    }
    b.kernel(5, "all keys in equal shares, loads two iterations ahead",
             [=](int blocks) {
                 launch([=] {
                     blocks ? decode_attention(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, scale,
                                               stream, blocks)
                            : decode_attention(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, scale,
                                               stream);
                 });
             },
             {0, 1, 2, 3, 4, 6});
    b.config("blocks per SM");
    b.promoted(5);
#if !defined(ENABLE_FP32)
    if (b.dry || C / NH == 64) {
        b.kernel(
            6, "on tensor cores, keys and values by TMA, a share for each warp",
            [=](int warps) {
                auto run = warps == 4   ? decode_attention6<4, 3>
                           : warps == 6 ? decode_attention6<6, 3>
                                        : decode_attention6<8, 2>;
                launch([=] { run(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, stream); });
            },
            {0, 4, 6}, 90);
        b.config("warps");
    }
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "decode_attention", declare, {1, 1024, 768, 12, 50257},
                      {{1, 1, 8, 1},
                       {2, 17, 72, 3},
                       {3, 66, 320, 4},
                       {2, 200, 256, 2},
                       {1, 333, 512, 2},
                       {1, 700, 776, 97},
                       {67, 70, 16, 2},
                       {9, 300, 64, 1},
                       {3, 190, 192, 3}});
}
