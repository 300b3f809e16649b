/* decode_layer: one transformer layer for the newest token of one text, in a decoding step

   x (C) floatX inout: y = x + attproj(attention(qkv(layernorm(x)))); x = y + fcproj(gelu(fc(layernorm(y))))
   keys, values (capacity,C) floatX inout: the token's own become row `position` | position (1) int in
   Weights and biases, floatX in: ln1 and ln2 (C), qkv (3C,C), attproj (C,C), fc (4C,C), fcproj (C,4C).
   Bound: memory, 12*C*C weights and 2*(position+1)*C values of the cache. In practice latency: at C = 768 these are some
   4 us on an H100 (15.8 MB), and what each phase waits for the one before is more.
   Constraint: C % 8 == 0. Kernel 2: sm_90a, 16-bit floatX, heads of 64, C <= 1792, and what a block keeps of the weights
   and of the cache must fit its shared memory.
   Error: the results of five phases are rounded to floatX, as in training: 4 ulps of floatX of 1, and 2 ulps of x.
   Source: a cluster per head, for qkv, attention and projection: the idea is ClusterFusion's (Luo et al. 2025,
   arXiv:2508.18850); sums in fixed point, so that their order does not matter, are ours.

   Shape flags: the token attends over T tokens, itself included; B is not used.

   Kernels (this list is written by versions.sh):
     1  five launches: four products and attention (best)
     2  three launches: a cluster per head for qkv, attention and projection

   nvcc -O3 --use_fast_math decode_layer.cu -o decode_layer      (or: make decode_layer)
   ./decode_layer 2      check kernel 2 against the CPU and time it
   ./decode_layer        every kernel, side by side                                         */
#define PROMOTED_ONLY
#include "decode_attention.cu"
#include "decode_matvec.cu"
#undef PROMOTED_ONLY
#include "bench.h"

struct DecodeLayer {
    floatX *x, *keys, *values;
    const int* position;
    const floatX *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    const floatX *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
    int C, NH, capacity;
};

// ---- kernel 1: five launches: a product, attention, and three more products ----

struct DecodeLayerScratch1 {
    floatX *qkv, *atty, *fch; // (3C), (C), (4C)
    float* attention;
};

void decode_layer1(const DecodeLayer& l, const DecodeLayerScratch1& s, cudaStream_t stream) {
    int C = l.C;
    decode_matvec(s.qkv, l.x, l.ln1w, l.ln1b, l.qkvw, l.qkvb, NULL, false, 1, C, 3 * C, stream);
    decode_attention(s.atty, l.keys, l.values, s.attention, s.qkv, l.position, 1, C, l.NH, l.capacity, stream);
    decode_matvec(l.x, s.atty, NULL, NULL, l.attprojw, l.attprojb, l.x, false, 1, C, C, stream);
    decode_matvec(s.fch, l.x, l.ln2w, l.ln2b, l.fcw, l.fcb, NULL, true, 1, C, 4 * C, stream);
    decode_matvec(l.x, s.fch, NULL, NULL, l.fcprojw, l.fcprojb, l.x, false, 1, 4 * C, C, stream);
}

// ---- kernel 2: three launches: a cluster of blocks per head does qkv, attention and projection ----

#if !defined(ENABLE_FP32) // 8 lanes share a head's 64 numbers, 16 bytes each

constexpr int DECODE_LAYER_HS = 64, DECODE_LAYER_THREADS = 256, DECODE_LAYER_WARPS = 8;
constexpr int DECODE_LAYER_ROWS = 5;   // rows of qkv per warp, at most
constexpr int DECODE_LAYER_VALUES = 7; // columns of x per thread, at most: C <= 1792

// The residual stream between attention and the MLP, y, is a sum that all clusters add to. Its terms are integers, so the
// order in which they come does not change the result: 2^32 stands for 1. The element behind the last one becomes 1 when
// a term is not finite or too large, and then all of y is NaN.
typedef unsigned long long DecodeLayerSum; // atomicAdd has no signed 64-bit form; two's complement adds alike

__device__ inline void decode_layer_add(DecodeLayerSum* sums, int i, int C, float x) {
    if (fabsf(x) < 0x1p30f) { // not if x is NaN
        atomicAdd(&sums[i], (DecodeLayerSum)llrintf(x * 0x1p32f));
    } else {
        sums[C] = 1;
    }
}
// y[i], rounded to floatX as the residual stream of a training step is
__device__ inline float decode_layer_value(const DecodeLayerSum* sums, int i, int C) {
    float x = (float)(long long)sums[i] * 0x1p-32f;
    return sums[C] ? NAN : (float)(floatX)x;
}

// The sum of the products of x128::size elements.
__device__ inline float decode_layer_dot(const x128& a, const float (&b)[x128::size]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < x128::size; e++) { sum += (float)a[e] * b[e]; }
    return sum;
}
// The sum over the 8 lanes that share a row of a head.
__device__ inline float decode_layer_row_sum(float x) {
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, offset); }
    return x;
}

// The layernorm of x, of which thread t has elements t, t + 256, ... in v; normed (C) is in shared memory. weight and bias:
// those of the same elements, loaded before.
__device__ inline void decode_layer_norm(floatX* normed, const float (&v)[DECODE_LAYER_VALUES],
                                         const float (&weight)[DECODE_LAYER_VALUES],
                                         const float (&bias)[DECODE_LAYER_VALUES], int C) {
    __shared__ float shared[32];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) { sum += v[i]; } // zeros past the end
    float mean = block_sum(sum, shared) / C;
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        bool there = (int)threadIdx.x + i * DECODE_LAYER_THREADS < C;
        squares += there ? (v[i] - mean) * (v[i] - mean) : 0.0f;
    }
    float rstd = rsqrtf(block_sum(squares, shared) / C + 1e-5f);
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        int c = threadIdx.x + i * DECODE_LAYER_THREADS;
        if (c < C) { normed[c] = (floatX)((v[i] - mean) * rstd * weight[i] + bias[i]); }
    }
}
// Loads this thread's elements of a vector (C); zeros past the end.
__device__ inline void decode_layer_load(float (&v)[DECODE_LAYER_VALUES], const floatX* from, int C) {
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        int c = threadIdx.x + i * DECODE_LAYER_THREADS;
        v[i] = c < C ? (float)from[c] : 0.0f;
    }
}

// The part of n things that block `rank` of a cluster has.
struct DecodeLayerShare {
    int first, n;
};
__host__ __device__ inline int decode_layer_most(int n, int ranks) { return (n + ranks - 1) / ranks; }
__host__ __device__ inline DecodeLayerShare decode_layer_share(int n, int rank, int ranks) {
    int most = decode_layer_most(n, ranks), first = rank * most < n ? rank * most : n;
    return {first, n - first < most ? n - first : most};
}

// What a block of the cluster of a head has in shared memory. All sizes are multiples of 16 bytes.
struct DecodeLayerShared {
    size_t qkv, proj, keys, values, normed, bytes; // where they begin; their end
    __host__ __device__ DecodeLayerShared(int C, int capacity, int ranks) {
        const size_t row = DECODE_LAYER_HS * sizeof(floatX), tokens = decode_layer_most(capacity, ranks);
        qkv = 0;                                                                         // rows of the weight, (,C)
        proj = qkv + decode_layer_most(3 * DECODE_LAYER_HS, ranks) * C * sizeof(floatX); // (,HS)
        keys = proj + decode_layer_most(C, ranks) * row, values = keys + tokens * row;   // (,HS) each
        normed = values + tokens * row;                                                  // (C)
        bytes = normed + C * sizeof(floatX);
    }
};

// What a block knows of the attention of its share of the tokens: the weighted sum of values, the largest score and the sum of
// the weights, 2^(score - largest).
constexpr int DECODE_LAYER_PART = DECODE_LAYER_HS + 2;

// y = x + attproj(attention(qkv(layernorm(x)))), into sums (C+1), which are zero before. `ranks` blocks of 256 threads, a
// cluster, have a head. Each of them has a share of the rows of q, k and v; then, of the tokens; and then, of the outputs
// of the projection. What the others need is sent to their shared memory, where it arrives at an mbarrier:
//
//     weights of the share, keys, values       before the previous kernel has ended
//     layernorm(x), in every block             x arrives
//     q, k, v of the share          -> all     normed
//     scores and sums of the share  -> all     q, k, v: 192 numbers
//     projection of the share       -> sums    66 numbers from each block
__global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_sm90_kernel2(DecodeLayer l, DecodeLayerSum* sums, int ranks) {
    extern __shared__ __align__(16) unsigned char decode_layer_dynamic[];
    __shared__ uint64_t qkv_there, parts_there;
    __shared__ float qkv[3 * DECODE_LAYER_HS], parts[8][DECODE_LAYER_PART],
        warps[DECODE_LAYER_WARPS][DECODE_LAYER_PART];
    constexpr int HS = DECODE_LAYER_HS, vec = x128::size, row_vecs = HS / vec;
    int C = l.C, rank = cluster_rank(), head = blockIdx.x / ranks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = lane / row_vecs,
        part = lane % row_vecs * vec; // 8 lanes have a row of a head; this lane's first element
    int now = *l.position;            // not written by earlier kernels of the step
    DecodeLayerShared at(C, l.capacity, ranks);
    auto array = [&](size_t begin) { return reinterpret_cast<floatX*>(decode_layer_dynamic + begin); };
    floatX *weight = array(at.qkv), *proj = array(at.proj), *normed = array(at.normed);
    floatX *keys = array(at.keys), *values = array(at.values);
    DecodeLayerShare rows = decode_layer_share(3 * HS, rank, ranks), outs = decode_layer_share(C, rank, ranks);
    DecodeLayerShare tokens = decode_layer_share(now, rank, ranks); // before the newest one, which the last block takes

    // what does not depend on x
    auto weight_row = [&](int i) { return (rows.first + i) / HS * C + head * HS + (rows.first + i) % HS; };
    for (int i = warp; i < rows.n; i += DECODE_LAYER_WARPS) {
        const floatX* from = l.qkvw + (size_t)weight_row(i) * C;
        for (int c = lane * vec; c < C; c += 32 * vec) { cp_async_16(weight + i * C + c, from + c); }
    }
    for (int i = threadIdx.x; i < outs.n * row_vecs; i += DECODE_LAYER_THREADS) {
        int r = i / row_vecs, c = i % row_vecs * vec;
        cp_async_16(proj + r * HS + c, l.attprojw + (size_t)(outs.first + r) * C + head * HS + c);
    }
    for (int i = threadIdx.x; i < tokens.n * row_vecs; i += DECODE_LAYER_THREADS) {
        int r = i / row_vecs, c = i % row_vecs * vec;
        size_t from = (size_t)(tokens.first + r) * C + head * HS + c;
        cp_async_16(keys + r * HS + c, l.keys + from);
        cp_async_16(values + r * HS + c, l.values + from);
    }
    cp_async_commit();
    float x[DECODE_LAYER_VALUES], norm_weight[DECODE_LAYER_VALUES], norm_bias[DECODE_LAYER_VALUES];
    decode_layer_load(norm_weight, l.ln1w, C);
    decode_layer_load(norm_bias, l.ln1b, C);
    int own_row = warp + DECODE_LAYER_WARPS * lane; // lane j has the bias of the warp's j-th row
    float row_bias = own_row < rows.n ? (float)l.qkvb[weight_row(own_row)] : 0.0f;
    if (threadIdx.x == 0) {
        mbarrier_init(&qkv_there, 1), mbarrier_init(&parts_there, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect(&qkv_there, sizeof(qkv));
        mbarrier_arrive_expect(&parts_there, ranks * DECODE_LAYER_PART * (int)sizeof(float));
    }
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    grid_wait_dependency();

    decode_layer_load(x, l.x, C);
    if (head == 0) { // of all heads, one adds x and the bias
        for (int i = threadIdx.x; i < outs.n; i += DECODE_LAYER_THREADS) {
            int c = outs.first + i;
            decode_layer_add(sums, c, C, (float)l.x[c]);
            decode_layer_add(sums, c, C, (float)l.attprojb[c]);
        }
    }
    decode_layer_norm(normed, x, norm_weight, norm_bias, C);
    cp_async_wait<0>();
    __syncthreads();

    // q, k, v of this block's rows, to all blocks
    float row_sums[DECODE_LAYER_ROWS] = {};
    for (int c = lane * vec; c < C; c += 32 * vec) {
        x128 n = load128(normed + c);
        float elements[vec];
#pragma unroll
        for (int e = 0; e < vec; e++) { elements[e] = (float)n[e]; }
#pragma unroll
        for (int j = 0; j < DECODE_LAYER_ROWS; j++) {
            int i = warp + DECODE_LAYER_WARPS * j;
            if (i < rows.n) { row_sums[j] += decode_layer_dot(load128(weight + i * C + c), elements); }
        }
    }
#pragma unroll
    for (int j = 0; j < DECODE_LAYER_ROWS; j++) {
        int i = warp + DECODE_LAYER_WARPS * j;
        float value = (float)(floatX)(warp_sum(row_sums[j]) + __shfl_sync(0xFFFFFFFFu, row_bias, j));
        if (i < rows.n && lane < ranks) { store_async_cluster(&qkv[rows.first + i], value, &qkv_there, lane); }
    }
    mbarrier_wait_cluster(&qkv_there, 0);
    if (rank == 0 && threadIdx.x < 2 * HS) {
        floatX* cache = threadIdx.x < HS ? l.keys : l.values;
        cache[(size_t)now * C + head * HS + threadIdx.x % HS] = (floatX)qkv[HS + threadIdx.x];
    }

    // attention over this block's tokens: 8 lanes have a token
    float q[vec], sum[vec] = {}, largest = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
    for (int e = 0; e < vec; e++) { q[e] = qkv[part + e] * (LOG2E * rsqrtf((float)HS)); }
    int num_tokens = tokens.n + (rank == ranks - 1);
    for (int first = warp * 4; first < num_tokens; first += 4 * DECODE_LAYER_WARPS) { // all lanes together: shuffles
        int t = first + group;
        bool cached = t < tokens.n, there = t < num_tokens;
        x128 k = {}, v = {};
        if (cached) { k = load128(keys + t * HS + part), v = load128(values + t * HS + part); }
        if (there && !cached) {
#pragma unroll
            for (int e = 0; e < vec; e++) { k[e] = (floatX)qkv[HS + part + e], v[e] = (floatX)qkv[2 * HS + part + e]; }
        }
        float score = decode_layer_row_sum(decode_layer_dot(k, q));
        float before = largest;
        if (there) { largest = fmaxf(largest, score); }
        float rescale = exp2f(before - largest), share = there ? exp2f(score - largest) : 0.0f;
        total = total * rescale + share;
#pragma unroll
        for (int e = 0; e < vec; e++) { sum[e] = sum[e] * rescale + share * (float)v[e]; }
    }
    float own = largest;
#pragma unroll
    for (int offset = 16; offset >= row_vecs; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
    }
    float rescale = exp2f(own - largest);
    total *= rescale;
#pragma unroll
    for (int offset = 16; offset >= row_vecs; offset /= 2) { total += __shfl_xor_sync(0xFFFFFFFFu, total, offset); }
#pragma unroll
    for (int e = 0; e < vec; e++) {
        sum[e] *= rescale;
#pragma unroll
        for (int offset = 16; offset >= row_vecs; offset /= 2) {
            sum[e] += __shfl_xor_sync(0xFFFFFFFFu, sum[e], offset);
        }
        if (group == 0) { warps[warp][part + e] = sum[e]; }
    }
    if (lane == 0) { warps[warp][HS] = largest, warps[warp][HS + 1] = total; }
    __syncthreads();

    // the warps' results together, to all blocks: thread t sends number t
    if (threadIdx.x < DECODE_LAYER_PART) {
        float all = DECODE_ATTENTION_LOWEST, number = 0.0f;
#pragma unroll
        for (int w = 0; w < DECODE_LAYER_WARPS; w++) { all = fmaxf(all, warps[w][HS]); }
#pragma unroll
        for (int w = 0; w < DECODE_LAYER_WARPS; w++) { number += exp2f(warps[w][HS] - all) * warps[w][threadIdx.x]; }
        if (threadIdx.x == HS) { number = all; }
        for (int r = 0; r < ranks; r++) { store_async_cluster(&parts[rank][threadIdx.x], number, &parts_there, r); }
    }
    mbarrier_wait_cluster(&parts_there, 0);
    float all = DECODE_ATTENTION_LOWEST, weights = 0.0f, attention[vec] = {};
    for (int r = 0; r < ranks; r++) { all = fmaxf(all, parts[r][HS]); }
    for (int r = 0; r < ranks; r++) {
        float share = exp2f(parts[r][HS] - all);
        weights += share * parts[r][HS + 1];
#pragma unroll
        for (int e = 0; e < vec; e++) { attention[e] += share * parts[r][part + e]; }
    }
#pragma unroll
    for (int e = 0; e < vec; e++) { attention[e] = (float)(floatX)(attention[e] / weights); }

    // the projection of this block's outputs: 8 lanes have a row
    for (int first = warp * 4; first < outs.n; first += 4 * DECODE_LAYER_WARPS) {
        int i = first + group;
        x128 w = {};
        if (i < outs.n) { w = load128(proj + i * HS + part); }
        float y = decode_layer_row_sum(decode_layer_dot(w, attention));
        if (i < outs.n && part == 0) { decode_layer_add(sums, outs.first + i, C, y); }
    }
}

// fch (4C) = gelu(fc(layernorm(y))), one warp per row. vecs: vectors of a row per lane. Zeroes `other` (C+1), the sums of the
// next layer, which the kernels before have read.
template <int vecs> __global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_fc_kernel2(floatX* fch, DecodeLayer l, const DecodeLayerSum* sums, DecodeLayerSum* other) {
    __shared__ alignas(16) floatX normed[DECODE_LAYER_VALUES * DECODE_LAYER_THREADS];
    int C = l.C, lane = threadIdx.x % 32, row = blockIdx.x * DECODE_LAYER_WARPS + threadIdx.x / 32;
    bool there = row < 4 * C;
    int4 w[vecs];
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = lane + 32 * i;
        const int4* from = reinterpret_cast<const int4*>(l.fcw + (size_t)row * C) + v;
        w[i] = there && v < C / x128::size ? __ldcs(from) : make_int4(0, 0, 0, 0);
    }
    float bias = there ? (float)l.fcb[row] : 0.0f;
    float y[DECODE_LAYER_VALUES], norm_weight[DECODE_LAYER_VALUES], norm_bias[DECODE_LAYER_VALUES];
    decode_layer_load(norm_weight, l.ln2w, C);
    decode_layer_load(norm_bias, l.ln2b, C);
    grid_launch_dependents();
    grid_wait_dependency();
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        int c = threadIdx.x + i * DECODE_LAYER_THREADS;
        y[i] = c < C ? decode_layer_value(sums, c, C) : 0.0f;
    }
    int zero = blockIdx.x * DECODE_LAYER_THREADS + threadIdx.x;
    if (zero <= C) { other[zero] = 0; }
    decode_layer_norm(normed, y, norm_weight, norm_bias, C);
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = lane + 32 * i;
        float elements[x128::size] = {};
        if (v < C / x128::size) {
            x128 n = load128(normed + v * x128::size);
#pragma unroll
            for (int e = 0; e < x128::size; e++) { elements[e] = (float)n[e]; }
        }
        sum += decode_layer_dot(vec128_from_bits<floatX>(w[i]), elements);
    }
    sum = warp_sum(sum);
    if (there && lane == 0) { fch[row] = (floatX)gelu(sum + bias); }
}

// x = y + fcproj(fch); four warps have a row. vecs: vectors of a row per lane.
template <int vecs> __global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_fcproj_kernel2(const floatX* fch, DecodeLayer l, const DecodeLayerSum* sums) {
    __shared__ float partial[DECODE_LAYER_WARPS];
    int C = l.C, lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 2 + warp / 4;
    int num_vecs = 4 * C / x128::size;
    int4 w[vecs];
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = warp % 4 * 32 + lane + 128 * i;
        const int4* from = reinterpret_cast<const int4*>(l.fcprojw + (size_t)row * 4 * C) + v;
        w[i] = row < C && v < num_vecs ? __ldcs(from) : make_int4(0, 0, 0, 0);
    }
    float bias = row < C ? (float)l.fcprojb[row] : 0.0f;
    grid_launch_dependents();
    grid_wait_dependency();
    float y = row < C && warp % 4 == 0 ? decode_layer_value(sums, row, C) : 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = min(warp % 4 * 32 + lane + 128 * i, num_vecs - 1); // past the end the weights are 0
        x128 h = load128(fch + v * x128::size);
        float elements[x128::size];
#pragma unroll
        for (int e = 0; e < x128::size; e++) { elements[e] = (float)h[e]; }
        sum += decode_layer_dot(vec128_from_bits<floatX>(w[i]), elements);
    }
    sum = warp_sum(sum);
    if (lane == 0) { partial[warp] = sum; }
    __syncthreads();
    if (row < C && threadIdx.x % 128 == 0) {
        for (int i = 1; i < 4; i++) { sum += partial[warp + i]; }
        l.x[row] = (floatX)(sum + bias + y);
    }
}

// Blocks per head: as many as there are SMs for, but 5 to 8; or 0 if what a block keeps does not fit.
static int decode_layer_ranks(int C, int NH, int capacity, int num_sms) {
    if (C != NH * DECODE_LAYER_HS || C > DECODE_LAYER_VALUES * DECODE_LAYER_THREADS) { return 0; }
    int ranks = std::max(5, std::min(8, num_sms / NH)); // with 5, a warp has 5 rows of qkv
    return DecodeLayerShared(C, capacity, ranks).bytes + 8192 <= 227 << 10 ? ranks : 0; // 8 KB: the other arrays
}

// Two layers take turns: the sums of one are zeroed while the other adds to its own.
struct DecodeLayerTurns {
    DecodeLayerSum* sums[2]; // (C+1) each; those of the next layer are zero
    int C, next;
};
// They live as long as the program, because a buffer of the harness does not stay zero between two launches.
static DecodeLayerTurns* decode_layer_turns(int C) {
    static DecodeLayerTurns turns;
    if (turns.C != C) {
        size_t bytes = (C + 1) * sizeof(DecodeLayerSum);
        cudaCheck(cudaFree(turns.sums[0]));
        cudaCheck(cudaMalloc(&turns.sums[0], 2 * bytes));
        cudaCheck(cudaMemset(turns.sums[0], 0, 2 * bytes));
        turns.sums[1] = turns.sums[0] + C + 1, turns.C = C, turns.next = 0;
    }
    return &turns;
}

// fch (4C) is scratch.
void decode_layer2(const DecodeLayer& l, DecodeLayerTurns* turns, floatX* fch, cudaStream_t stream) {
    int C = l.C, ranks = decode_layer_ranks(C, l.NH, l.capacity, num_multiprocessors());
    require(ranks > 0);
    DecodeLayerSum *own = turns->sums[turns->next], *other = turns->sums[1 - turns->next];
    turns->next = 1 - turns->next;
    size_t bytes = DecodeLayerShared(C, l.capacity, ranks).bytes;
    cudaCheck(cudaFuncSetAttribute(decode_layer_sm90_kernel2, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = ranks, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(l.NH * ranks);
    config.blockDim = dim3(DECODE_LAYER_THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaCheck(cudaLaunchKernelEx(&config, decode_layer_sm90_kernel2, l, own, ranks));
    with_constant<DECODE_LAYER_VALUES>(ceil_div(C, 32 * x128::size), [&](auto vecs) { // vectors of a row of C per lane
        launch_early(decode_layer_fc_kernel2<vecs.value>, dim3(4 * C / DECODE_LAYER_WARPS), dim3(DECODE_LAYER_THREADS),
                     0, stream, fch, l, own, other);
        launch_early(decode_layer_fcproj_kernel2<vecs.value>, dim3(ceil_div(C, 2)), dim3(DECODE_LAYER_THREADS), 0,
                     stream, fch, l, own);
    });
}

#endif // !defined(ENABLE_FP32)

// ---- CPU reference ----

static void decode_layer_norm_cpu(std::vector<double>& out, const double* x, const float* weight, const float* bias,
                                  int C) {
    double mean = 0, squares = 0;
    for (int c = 0; c < C; c++) { mean += x[c] / C; }
    for (int c = 0; c < C; c++) { squares += (x[c] - mean) * (x[c] - mean) / C; }
    out.resize(C);
    for (int c = 0; c < C; c++) { out[c] = (x[c] - mean) / sqrt(squares + 1e-5) * weight[c] + bias[c]; }
}
static std::vector<double> decode_layer_product_cpu(const std::vector<double>& x, const float* weight,
                                                    const float* bias, int OC) {
    size_t K = x.size();
    std::vector<double> out(bias, bias + OC);
    parallel_for(OC, [&](size_t row) {
        for (size_t k = 0; k < K; k++) { out[row] += x[k] * weight[row * K + k]; }
    });
    return out;
}

// l: the host's arrays, in float
struct DecodeLayerHost {
    float *x, *keys, *values;
    const float *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
};
static void decode_layer_cpu(const DecodeLayerHost& l, const float* x, int now, int C, int NH) {
    int HS = C / NH;
    std::vector<double> y(x, x + C), normed, attention(C);
    decode_layer_norm_cpu(normed, y.data(), l.ln1w, l.ln1b, C);
    std::vector<double> qkv = decode_layer_product_cpu(normed, l.qkvw, l.qkvb, 3 * C);
    for (int c = 0; c < C; c++) { // the cache holds floatX, and the token attends to what is there
        l.keys[(size_t)now * C + c] = (float)(floatX)(float)qkv[C + c];
        l.values[(size_t)now * C + c] = (float)(floatX)(float)qkv[2 * C + c];
    }
    for (int h = 0; h < NH; h++) {
        std::vector<double> scores(now + 1);
        double largest = -INFINITY, total = 0;
        for (int t = 0; t <= now; t++) {
            for (int i = h * HS; i < (h + 1) * HS; i++) {
                scores[t] += qkv[i] * l.keys[(size_t)t * C + i] / sqrt((double)HS);
            }
            largest = std::max(largest, scores[t]);
        }
        for (double& score : scores) { total += score = exp(score - largest); }
        for (int i = h * HS; i < (h + 1) * HS; i++) {
            for (int t = 0; t <= now; t++) { attention[i] += scores[t] / total * l.values[(size_t)t * C + i]; }
        }
    }
    std::vector<double> projected = decode_layer_product_cpu(attention, l.attprojw, l.attprojb, C);
    for (int c = 0; c < C; c++) { y[c] += projected[c]; }
    decode_layer_norm_cpu(normed, y.data(), l.ln2w, l.ln2b, C);
    std::vector<double> fch = decode_layer_product_cpu(normed, l.fcw, l.fcb, 4 * C);
    for (double& h : fch) { h = 0.5 * h * (1 + tanh(sqrt(2 / M_PI) * (h + 0.044715 * h * h * h))); }
    std::vector<double> out = decode_layer_product_cpu(fch, l.fcprojw, l.fcprojb, C);
    for (int c = 0; c < C; c++) { l.x[c] = (float)(y[c] + out[c]); }
}

static void declare(Bench& b) {
    b.varies("TCH");
    int T = b.T, C = b.C, NH = b.NH, capacity = T + T / 2, now = T - 1;
    cudaStream_t stream = b.stream;
    size_t n = (size_t)capacity * C, c = C;
    // large: the residual stream of a trained model has values of some hundreds in a few columns
    bool large = b.cases({"normal", "large values in x"}) == 1;
    Buffer<floatX> x_before = b.input_from<floatX>("x_before", C, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, C, seed, 1.0f, 0.1f);
        for (int i = 0; large && i < C; i += 97) { x[i] *= 256.0f; }
    });
    Buffer<floatX> keys_before = b.input<floatX>("keys_before", n), values_before = b.input<floatX>("values_before", n);
    auto weight = [&](const char* name, size_t rows, size_t columns) {
        return b.input<floatX>(name, rows * columns, 1.0f / sqrtf((float)columns));
    };
    Buffer<floatX> ln1w = b.input<floatX>("ln1w", c, 0.1f, 1.0f), ln1b = b.input<floatX>("ln1b", c, 0.1f);
    Buffer<floatX> qkvw = weight("qkvw", 3 * c, c), qkvb = b.input<floatX>("qkvb", 3 * c, 0.1f);
    Buffer<floatX> attprojw = weight("attprojw", c, c), attprojb = b.input<floatX>("attprojb", c, 0.1f);
    Buffer<floatX> ln2w = b.input<floatX>("ln2w", c, 0.1f, 1.0f), ln2b = b.input<floatX>("ln2b", c, 0.1f);
    Buffer<floatX> fcw = weight("fcw", 4 * c, c), fcb = b.input<floatX>("fcb", 4 * c, 0.1f);
    Buffer<floatX> fcprojw = weight("fcprojw", c, 4 * c), fcprojb = b.input<floatX>("fcprojb", c, 0.1f);
    Buffer<int> position = b.input_from<int>("position", 1, [=](float* p) { *p = (float)now; });
    float ulp = ulp_of<floatX>();
    Tolerance tolerance = {4 * ulp + 1e-5f, 2 * ulp + 1e-5f};
    Buffer<floatX> x = b.inout<floatX>("x", C, x_before, tolerance);
    Buffer<floatX> keys = b.inout<floatX>("keys", n, keys_before, tolerance);
    Buffer<floatX> values = b.inout<floatX>("values", n, values_before, tolerance);
    Buffer<floatX> qkv = b.scratch<floatX>("qkv", 3 * c), atty = b.scratch<floatX>("atty", c);
    Buffer<floatX> fch = b.scratch<floatX>("fch", 4 * c);
    size_t num_scratch = decode_attention_scratch(1, C, NH, capacity);
    Buffer<float> zeros =
        b.input_from<float>("zeros", num_scratch, [=](float* p) { std::fill(p, p + num_scratch, 0.0f); });
    Buffer<float> scratch = b.inout<float>("scratch", num_scratch, zeros, {INFINITY, 0.0f}); // any value but NaN passes
    b.reference([=] {
        memcpy(keys.host, keys_before.host, n * sizeof(float));
        memcpy(values.host, values_before.host, n * sizeof(float));
        std::fill(scratch.host, scratch.host + num_scratch, 0.0f);
        decode_layer_cpu({x.host, keys.host, values.host, ln1w.host, ln1b.host, qkvw.host, qkvb.host, attprojw.host,
                          attprojb.host, ln2w.host, ln2b.host, fcw.host, fcb.host, fcprojw.host, fcprojb.host},
                         x_before.host, now, C, NH);
    });
    b.cost((12.0 * C * C + 2.0 * T * C) * sizeof(floatX), 24.0 * C * C + 4.0 * T * C);
    b.reads_only();
    DecodeLayer l = {x,    keys, values, position, ln1w,    ln1b,    qkvw, qkvb, attprojw, attprojb,
                     ln2w, ln2b, fcw,    fcb,      fcprojw, fcprojb, C,    NH,   capacity};
    // small shapes run twice: the second launch fails if the first did not leave its sums and counters as it found them
    auto launch = [=](std::function<void()> layer) {
        layer();
        if (T > 100) { return; }
        cudaCheck(cudaMemcpyAsync(x, x_before, C * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        layer();
    };
    b.kernel(1, "five launches: four products and attention",
             [=](int) { launch([=] {
                            decode_layer1(l, {qkv, atty, fch, scratch}, stream);
                        }); }, {0});
#if !defined(ENABLE_FP32)
    if (decode_layer_ranks(C, NH, capacity, b.dry ? 132 : num_multiprocessors())) {
        b.kernel(
            2, "three launches: a cluster per head for qkv, attention and projection",
            [=](int) { launch([=] { decode_layer2(l, decode_layer_turns(C), fch, stream); }); }, {0}, -90);
    }
#endif
    b.best(1);
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "decode_layer", declare, {1, 512, 768, 12, 50257},
        {{1, 1, 64, 1}, {1, 17, 72, 3}, {1, 66, 320, 5}, {1, 200, 256, 4}, {1, 77, 512, 4}, {1, 300, 768, 12}});
}
