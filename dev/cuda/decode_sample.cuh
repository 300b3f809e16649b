/*
decode_sample: the next tokens (B) int from logits (B,Vp) float: the largest, or drawn after temperature, top-k, top-p and min-p; with a
repetition penalty first | positions (B) int, += 1, -1 stays | rng_state (B) | seen: bits of the text's tokens | scratch in floats
Constraint: Vp % 4 == 0, V <= 2^18.
Kernels 3 (largest logit), 5 (draw) and 6 (repetition penalty) of decode_sample.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"

// ==== promoted: decode_sample ====
// ---- kernel 3: largest logit, many blocks per sequence; the last block to arrive writes the token -------------------

// The 64-bit key of a token. A larger logit has a larger key; among equal logits the lower id has the larger key. Key 0
// means that the token is never drawn (NaN, -inf).
__device__ inline uint64_t decode_sample_key(float logit, int id) {
    if (!(logit > -INFINITY)) { return 0; } // also true for NaN
    uint32_t bits = __float_as_uint(logit);
    if (bits == 0x80000000u) { bits = 0; } // -0 equals 0
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}
__device__ inline int decode_sample_id(uint64_t key) { return key ? (int)~(uint32_t)key : -1; }
__device__ inline float decode_sample_logit(uint64_t key) {
    uint32_t bits = key >> 32;
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits);
}

// inclusive prefix sum over the lanes
__device__ inline uint64_t decode_sample_warp_scan(uint64_t x) {
    for (int offset = 1; offset < 32; offset *= 2) {
        uint64_t below = __shfl_up_sync(0xFFFFFFFFu, x, offset);
        if ((int)threadIdx.x % 32 >= offset) { x += below; }
    }
    return x;
}
// The maximum and the sum over the block: see block_reduce. 0 is neutral for both.
__device__ inline uint64_t decode_sample_max(uint64_t x, uint64_t* shared) {
    return block_reduce<lanes_max<32, uint64_t>>(x, shared, {});
}
__device__ inline uint64_t decode_sample_sum(uint64_t x, uint64_t* shared) {
    return block_reduce<lanes_sum<32, uint64_t>>(x, shared, {});
}

// The token sampled for text b. Its position moves on, unless the text has ended (-1).
__device__ inline void decode_sample_end(int b, int token, int* tokens, int* copy, int* positions) {
    tokens[b] = token;
    copy[b] = token;
    if (positions[b] >= 0) { positions[b] += 1; }
}

// tokens (B): the id of the largest logit of each sequence. best (B), arrived (B): scratch, zero before and after the
// launch.
__global__ void decode_sample_greedy_kernel3(int* tokens, int* copy, int* positions, uint64_t* best, int* arrived,
                                             const float* logits, int V, int Vp) {
    __shared__ uint64_t shared[32];
    int b = blockIdx.y, step = gridDim.x * blockDim.x;
    const float4* row = reinterpret_cast<const float4*>(logits + (size_t)b * Vp);
    grid_wait_dependency();
    uint64_t key = 0;
#pragma unroll 2
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i * 4 < V; i += step) {
        float4 x = row[i];
        key = max(key, decode_sample_key(x.x, 4 * i));
        if (4 * i + 1 < V) { key = max(key, decode_sample_key(x.y, 4 * i + 1)); }
        if (4 * i + 2 < V) { key = max(key, decode_sample_key(x.z, 4 * i + 2)); }
        if (4 * i + 3 < V) { key = max(key, decode_sample_key(x.w, 4 * i + 3)); }
    }
    key = decode_sample_max(key, shared);
    if (threadIdx.x != 0) { return; }
    unsigned long long* top = reinterpret_cast<unsigned long long*>(best + b);
    atomicMax(top, (unsigned long long)key); // the result does not depend on the order
    __threadfence();
    if (atomicAdd(arrived + b, 1) != (int)gridDim.x - 1) { return; }
    decode_sample_end(b, decode_sample_id(atomicExch(top, 0ull)), tokens, copy, positions);
    arrived[b] = 0;
}

// Launches kernel 3 with `blocks` blocks per sequence.
inline void decode_sample_greedy(int* tokens, int* copy, int* positions, float* scratch, const float* logits, int B,
                                 int V, int Vp, int blocks, const Execution& exec, int block_size) {
    uint64_t* best = reinterpret_cast<uint64_t*>(scratch);
    launch_early(decode_sample_greedy_kernel3, dim3(blocks, B), block_size, 0, exec, tokens, copy, positions, best,
                 reinterpret_cast<int*>(best + B), logits, V, Vp);
}
// ---- shared by kernels 4 and 5: a block per sequence; bisection finds the lowest key that top-k or top-p admits ------

constexpr int DECODE_SAMPLE_ROOM = 4096;    // candidates whose keys fit in shared memory: 32 KB
constexpr int DECODE_SAMPLE_THREADS = 1024; // of a block: 32 warps

struct DecodeSampleShared {
    uint64_t list[DECODE_SAMPLE_ROOM]; // keys of the candidates, unordered
    uint64_t reduce[32];
    int list_size;
};

// The candidates of a sequence: the `count` keys >= `floor`, among all n logits or, if `listed`, among the n keys of
// DecodeSampleShared's list.
struct DecodeSampleRow {
    const float* logits; // aligned to 16 bytes, and so is its end
    int n;
    bool listed;
    uint64_t best, floor, count; // best: the largest key
    float scale;                 // log2(e) / temperature
    uint64_t least;              // the smallest share that min-p admits
};

// The weight of a token in the draw: its probability relative to the most likely token, times 2^44. It is an integer,
// because the sum of integers does not depend on the order of summation.
__device__ inline uint64_t decode_sample_share(const DecodeSampleRow& row, uint64_t key) {
    float logit = decode_sample_logit(key), best = decode_sample_logit(row.best);
    float distance = logit == best ? 0.0f : (logit - best) * row.scale; // 0 also if both are inf: inf - inf is NaN
    return (uint64_t)(exp2f(distance) * 17592186044416.0f);
}
// The share of a token; 0 if top-k, top-p or min-p has removed it.
__device__ inline uint64_t decode_sample_admitted(const DecodeSampleRow& row, uint64_t key) {
    if (key < row.floor) { return 0; }
    uint64_t share = decode_sample_share(row, key);
    return share >= row.least ? share : 0;
}

// Calls visit(key) for the tokens `begin` to `end` - 1: thread `index` of `num_threads` takes every num_threads-th vector of
// 4 logits. begin is a multiple of 4.
template <class Visit> __device__ inline void decode_sample_visit(const DecodeSampleRow& row, int begin, int end,
                                                                  int index, int num_threads, Visit visit) {
#pragma unroll 4
    for (int i = begin + 4 * index; i < end; i += 4 * num_threads) {
        float4 x = *reinterpret_cast<const float4*>(row.logits + i);
        visit(decode_sample_key(x.x, i));
        if (i + 1 < end) { visit(decode_sample_key(x.y, i + 1)); }
        if (i + 2 < end) { visit(decode_sample_key(x.z, i + 2)); }
        if (i + 3 < end) { visit(decode_sample_key(x.w, i + 3)); }
    }
}
// Calls visit(key) for this thread's share of the block's candidates, and for keys that are none.
template <class Visit> __device__ inline void decode_sample_visit_all(const DecodeSampleShared& shared,
                                                                      const DecodeSampleRow& row, Visit visit) {
    if (row.listed) {
        for (int i = threadIdx.x; i < row.n; i += blockDim.x) { visit(shared.list[i]); }
    } else {
        decode_sample_visit(row, 0, row.n, threadIdx.x, blockDim.x, visit);
    }
}

// The n logits of a sequence, all of which are candidates but NaN and -inf.
__device__ DecodeSampleRow decode_sample_row(DecodeSampleShared& shared, const float* logits, int n, float temperature,
                                             float min_p) {
    uint64_t least = (uint64_t)(min_p * 17592186044416.0f); // the most likely token has a share of 2^44
    DecodeSampleRow row = {logits, n, false, 0, 0, 0, LOG2E / temperature, least};
    uint64_t best = 0, lowest = ~0ull, count = 0;
    decode_sample_visit_all(shared, row, [&](uint64_t key) {
        best = max(best, key);
        if (key) { lowest = min(lowest, key), count++; }
    });
    row.best = decode_sample_max(best, shared.reduce);
    row.floor = ~decode_sample_max(~lowest, shared.reduce);
    row.count = decode_sample_sum(count, shared.reduce);
    return row;
}

// Counts the candidates with keys >= `floor`. Returns the sum of their shares or, if `shares` is false, their count.
__device__ uint64_t decode_sample_weight(DecodeSampleShared& shared, const DecodeSampleRow& row, uint64_t floor,
                                         bool shares, uint64_t* count) {
    uint64_t weight = 0, number = 0;
    decode_sample_visit_all(shared, row, [&](uint64_t key) {
        if (key < floor) { return; }
        number++;
        if (shares) { weight += decode_sample_share(row, key); }
    });
    *count = decode_sample_sum(number, shared.reduce);
    return shares ? decode_sample_sum(weight, shared.reduce) : *count;
}

// Copies the keys of the candidates, at most DECODE_SAMPLE_ROOM, to the list.
__device__ void decode_sample_make_list(DecodeSampleShared& shared, DecodeSampleRow& row) {
    if (threadIdx.x == 0) { shared.list_size = 0; }
    __syncthreads();
    decode_sample_visit_all(shared, row, [&](uint64_t key) {
        if (key >= row.floor) { shared.list[atomicAdd(&shared.list_size, 1)] = key; }
    });
    __syncthreads();
    row.listed = true, row.n = (int)row.count;
}

// Raises row.floor by bisection, so that as few candidates as possible are left whose total weight reaches `target`:
// those with the largest keys. The weight of all candidates must reach `target`.
__device__ void decode_sample_select(DecodeSampleShared& shared, DecodeSampleRow& row, uint64_t target, bool shares) {
    uint64_t end = row.best + 1, end_count = 0; // the keys >= `end` weigh less than the target
    while (row.count - end_count > 1 && end - row.floor > 1) {
        if (!row.listed && row.count <= DECODE_SAMPLE_ROOM) { decode_sample_make_list(shared, row); }
        uint64_t middle = row.floor + (end - row.floor) / 2, count;
        if (decode_sample_weight(shared, row, middle, shares, &count) >= target) {
            row.floor = middle, row.count = count;
        } else {
            end = middle, end_count = count;
        }
    }
}

// Leaves of the candidates those that top-k (0: all) and then top-p (1: all) admit.
__device__ void decode_sample_restrict(DecodeSampleShared& shared, DecodeSampleRow& row, int top_k, float top_p) {
    if (top_k > 0 && (uint64_t)top_k < row.count) { decode_sample_select(shared, row, top_k, false); }
    if (top_p < 1.0f) {
        uint64_t count;
        double mass = top_p * (double)decode_sample_weight(shared, row, row.floor, true, &count);
        decode_sample_select(shared, row, max((uint64_t)ceil(mass), (uint64_t)1), true);
    }
}

// Advances *state and returns a number of 0 to 1, without 1: random_f64() of llmc/rand.h.
__device__ inline double decode_sample_random(uint64_t* state) {
    uint64_t x = *state ? *state : 0x9e3779b97f4a7c15ull;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return (double)((x * 0x2545f4914f6cdd1dull) >> 11) * (1.0 / 9007199254740992.0);
}

// ---- kernel 5: draw by two divisions into 32 parts, a warp per part --------------------------------------------------

// Each warp adds up the candidates' shares in one of 32 parts, of `size` tokens each, of the tokens `begin` to `end` - 1.
// Returns the running sum of the parts up to number `lane`, this one included. begin and size are multiples of 4; `sums` (32)
// is scratch.
__device__ inline uint64_t decode_sample_parts(uint64_t* sums, const DecodeSampleRow& row, int begin, int end,
                                               int size) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first = begin + warp * size;
    uint64_t sum = 0;
    decode_sample_visit(row, first, min(first + size, end), lane, 32,
                        [&](uint64_t key) { sum += decode_sample_admitted(row, key); });
    sum = lanes_sum<32>(sum);
    if (lane == 0) { sums[warp] = sum; }
    __syncthreads();
    return decode_sample_warp_scan(sums[lane]);
}
// Returns the first lane whose running sum `upto` exceeds *point, and subtracts from *point the sum before that lane.
__device__ inline int decode_sample_find(uint64_t upto, uint64_t* point) {
    int found = __ffs(__ballot_sync(0xFFFFFFFFu, upto > *point)) - 1;
    uint64_t before = __shfl_sync(0xFFFFFFFFu, upto, max(found - 1, 0));
    *point -= found > 0 ? before : 0;
    return found;
}

// Inverse transform sampling: returns the first token, in the order of ids, at which the running sum of the candidates'
// shares exceeds `random` (0 to 1) times their total. There must be a candidate. `sums` (2,32): scratch.
__device__ int decode_sample_draw(uint64_t* sums, const DecodeSampleRow& row, int V, double random) {
    int lane = threadIdx.x % 32;
    // the parts of the vocabulary
    int size = ceil_div(V, 32 * 128) * 128; // tokens per part: 4 per lane in each step of its warp
    uint64_t upto = decode_sample_parts(sums, row, 0, V, size);
    uint64_t sum = __shfl_sync(0xFFFFFFFFu, upto, 31);
    uint64_t point = min((uint64_t)(random * (double)sum), sum - 1);
    int begin = decode_sample_find(upto, &point) * size, end = min(begin + size, V);
    // the parts of that part
    size = ceil_div(size, 32 * 128) * 128;
    begin += decode_sample_find(decode_sample_parts(sums + 32, row, begin, end, size), &point) * size;
    // the lanes' tokens in that one, then the token
    int own = size / 32, first = begin + lane * own;
    uint64_t share = 0;
    auto add = [&](uint64_t key) { share += decode_sample_admitted(row, key); };
    decode_sample_visit(row, first, min(first + own, V), 0, 1, add);
    int token = begin + decode_sample_find(decode_sample_warp_scan(share), &point) * own;
    for (share = 0;; token++) {
        add(decode_sample_key(row.logits[token], token));
        if (share > point) { return token; }
    }
}

__global__ void __launch_bounds__(DECODE_SAMPLE_THREADS, 1)
    decode_sample_kernel5(int* tokens, int* copy, int* positions, const float* logits, uint64_t* rng_state,
                          float temperature, int top_k, float top_p, float min_p, int V, int Vp) {
    __shared__ DecodeSampleShared shared;
    __shared__ uint64_t sums[2 * 32];
    int b = blockIdx.x, token = -1; // the result if nothing can be drawn
    grid_wait_dependency();
    DecodeSampleRow row = decode_sample_row(shared, logits + (size_t)b * Vp, V, temperature, min_p);
    if (row.count > 0) {
        decode_sample_restrict(shared, row, top_k, top_p);
        uint64_t state = rng_state[b];
        token = decode_sample_draw(sums, row, V, decode_sample_random(&state));
        if (threadIdx.x == 0) { rng_state[b] = state; } // all threads have read it: the draw has barriers
    }
    if (threadIdx.x == 0) { decode_sample_end(b, token, tokens, copy, positions); }
}
// ---- kernel 6: repetition penalty, in front of kernel 3 or 5; one thread per 32 tokens of the vocabulary -------------

// Adds the newest token of each text to its set, and penalizes the logits of all tokens in the set.
__global__ void decode_sample_penalize_kernel6(uint32_t* seen, float* logits, const int* tokens, float penalty, int V,
                                               int Vp) {
    int b = blockIdx.y, num_words = ceil_div(V, 32), i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= num_words) { return; }
    grid_wait_dependency();
    uint32_t* word = seen + (size_t)b * num_words + i;
    uint32_t bits = *word;
    int token = tokens[b];
    if (token >= 0 && token / 32 == i) { *word = bits |= 1u << (token % 32); }
    for (; bits != 0; bits &= bits - 1) {
        float* logit = logits + (size_t)b * Vp + 32 * i + __ffs(bits) - 1;
        *logit = *logit > 0.0f ? __fdiv_rn(*logit, penalty) : *logit * penalty;
    }
}

// Size of scratch in floats. scratch must be aligned to 8 bytes and zero before the first launch; decode_sample leaves
// it zero.
size_t decode_sample_scratch(int B) { return (size_t)3 * B; }

// tokens (B), copy (B) the same tokens, may be the host's memory, positions (B) += 1 where they are not -1
// | scratch (decode_sample_scratch(B)) | logits (B,Vp), the first V of a row are used | rng_state (B) inout
// | seen (B, ceil(V/32)) inout
// temperature 0: takes the largest logit; rng_state may be NULL. Otherwise draws from softmax(logits / temperature),
// limited to the top_k largest logits (0: all), of these to the fewest most likely tokens whose share of the
// probability reaches top_p (1: all), and of these to the tokens at least min_p times as likely as the most likely one.
// NaN and -inf are never drawn; if a sequence has nothing else, its token is -1.
// penalty 1: seen may be NULL. Otherwise seen has the tokens of each text but for the newest one, which is in tokens; it is
// added. A positive logit of a token in the set is divided by the penalty, another one is multiplied with it.
void decode_sample(int* tokens, int* copy, int* positions, float* scratch, float* logits, uint64_t* rng_state,
                   uint32_t* seen, float temperature, int top_k, float top_p, float min_p, float penalty, int B, int V,
                   int Vp, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    Op op(exec, (double)B * V * sizeof(float), 0, "decode_sample");
    require(B > 0 && B <= 65535 && V > 0 && V <= Vp && V <= 1 << 18 && Vp % 4 == 0);
    require(temperature >= 0.0f && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f && min_p >= 0.0f && min_p <= 1.0f);
    if (penalty != 1.0f) {
        require(seen != NULL && penalty > 0.0f);
        launch_early(decode_sample_penalize_kernel6, dim3(ceil_div(ceil_div(V, 32), 256), B), 256, 0, exec, seen,
                     logits, (const int*)tokens, penalty, V, Vp);
    }
    if (temperature == 0.0f) {
        int blocks = ceil_div(V, 2 * 4 * block_size); // two vectors per thread
        decode_sample_greedy(tokens, copy, positions, scratch, logits, B, V, Vp, blocks, exec, block_size);
        return;
    }
    require(rng_state != NULL);
    launch_early(decode_sample_kernel5, dim3(B), DECODE_SAMPLE_THREADS, 0, exec, tokens, copy, positions,
                 (const float*)logits, rng_state, temperature, top_k, top_p, min_p, V, Vp);
}
// ==== end promoted: decode_sample ====
