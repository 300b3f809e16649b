/*
decode_matmul, decode_matmul_head: decode_matvec and decode_head on tensor cores, for 2 to 64 texts (the head: 1 to 64). Return false and
launch nothing where they do not run. Constraint: sm_90a, 16-bit floatX, K % 8 == 0; a residual excludes gelu and a layernorm.
Kernels 5 (products) and 6 (the head) of decode_matmul.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/weight_matrix.cuh"

// ==== promoted: decode_matmul ====
#if !defined(ENABLE_FP32)

// decode_matmul() takes this many texts. One text needs no tensor cores; for more than 64, blocks for 64 texts each would
// read the weights twice. To compare, with -B: ./decode_matvec 6, ./decode_matmul 0 (cuBLASLt) and ./decode_matmul 5.
constexpr int DECODE_MATMUL_MIN_TEXTS = 2, DECODE_MATMUL_MAX_TEXTS = 64;
constexpr int DECODE_MATMUL_WARPS = 8; // per block
constexpr int DECODE_MATMUL_THREADS = 32 * DECODE_MATMUL_WARPS;
constexpr int DECODE_MATMUL_CHUNK = 32; // columns of a chunk: two steps of mma, 16 bytes per lane and row
constexpr int DECODE_MATMUL_MAX_CLUSTER = 8;
constexpr int DECODE_MATMUL_PAIRS = 2; // pairs of results that a thread stores, at most, if it adds up partial sums

// Chunks in flight per warp: 6 are 48 KB per block. Of weights in 8 bits these are 12, or as many as there are registers for.
__host__ __device__ constexpr int decode_matmul_ahead(bool scaled, int texts, bool norm) {
    if (!scaled) { return 6; }
    return texts == 64 ? (norm ? 5 : 10) : texts == 16 && norm ? 10 : 12;
}

struct DecodeMatmulArguments {
    const floatX *x, *norm_weight, *norm_bias;
    WeightMatrix weight;
    const floatX *bias, *residual;
    int B, K, OC;
    bool gelu;
    float epsilon;   // of the layernorm
    int log_rows;    // log2 of the rows of the weight per tile: 16 per group of warps
    int log_cluster; // log2 of the blocks per cluster
    int stride;      // of the rows of x in shared memory, in elements
};

// The columns that a block multiplies: chunks begin .. end - 1. A cluster splits all chunks evenly over its blocks.
struct DecodeMatmulSlice {
    int begin, end;
    __device__ DecodeMatmulSlice(const DecodeMatmulArguments& a, int rank) {
        int num_chunks = ceil_div(a.K, DECODE_MATMUL_CHUNK);
        begin = num_chunks * rank >> a.log_cluster, end = num_chunks * (rank + 1) >> a.log_cluster;
    }
    // vectors of 8 columns that exist; the last chunk of a row may be incomplete
    __device__ int num_vec(int K) const {
        return (min(end * DECODE_MATMUL_CHUNK, K) - begin * DECODE_MATMUL_CHUNK) / x128::size;
    }
};

// This lane's vectors of a chunk of the warp's 16 rows of the weight, which start at `row`: those of rows lane / 4 and
// lane / 4 + 8. Outside of the matrix, and if not `there`, they are zeros.
template <class W> struct DecodeMatmulRows {
    const WeightBits<W>* upper;
    bool has_upper, has_lower;
    __device__ DecodeMatmulRows(const WeightMatrix& weight, int row, int K, int OC) {
        int r = row + threadIdx.x % 32 / 4;
        const W* values = reinterpret_cast<const W*>(weight.values);
        upper = reinterpret_cast<const WeightBits<W>*>(values + (size_t)r * K) + threadIdx.x % 4;
        has_upper = r < OC, has_lower = r + 8 < OC;
    }
    __device__ void fetch(WeightBits<W> w[2], int chunk, bool there, int K) const {
        const WeightBits<W>* from = upper + chunk * 4;
        there = there && (chunk * 4 + (int)threadIdx.x % 4) * x128::size < K;
        w[0] = there && has_upper ? __ldcs(from) : WeightBits<W>{};
        w[1] = there && has_lower ? __ldcs(from + K) : WeightBits<W>{}; // 8 rows are K vectors
    }
};

// A chunk of 16 rows of the weight as the operands of two steps of mma: pairs of columns of rows lane / 4 and lane / 4 + 8.
struct DecodeMatmulPairs {
    uint32_t first[4], second[4];

    // arranged: w is in the order of the operands already, which arrange() has brought it to
    template <class W> __device__ DecodeMatmulPairs(const WeightBits<W> w[2], W, bool arranged) {
        uint32_t upper[4], lower[4];
        weight_pairs(upper, w[0], W()), weight_pairs(lower, w[1], W());
#pragma unroll
        for (int i = 0; i < 2; i++) {
            first[2 * i] = upper[i], first[2 * i + 1] = lower[i];
            second[2 * i] = upper[2 + i], second[2 * i + 1] = lower[2 + i];
        }
        if (!arranged) { return; }
#pragma unroll
        for (int i = 0; i < 4; i++) { first[i] = upper[i], second[i] = lower[i]; }
    }
    // Writes the operands back to w. Weights in 8 bits stay as they are: as operands they would take twice the registers.
    __device__ void arrange(int4 w[2]) const {
        w[0] = make_int4(first[0], first[1], first[2], first[3]);
        w[1] = make_int4(second[0], second[1], second[2], second[3]);
    }
    template <class Bits> __device__ void arrange(Bits*) const {}
};

// sums += a chunk of 16 rows of the weight times `texts` rows of x; `x` is this lane's vector of text lane / 4. A vector
// goes to two steps of mma. What mma takes for columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a step are other columns in
// memory, but the same ones for both operands, and a sum does not depend on the order of its terms:
//
//     vector of lane t of a quad:   columns 8t + 0, 1   8t + 2, 3   8t + 4, 5   8t + 6, 7
//     is, in a step of mma:         first: 2t, 2t+1     2t+8, 2t+9  second: 2t, 2t+1  2t+8, 2t+9
// An mma waits for an earlier one that adds to the same sums. So n groups of 8 texts are multiplied in turn; 8 texts, a group alone, have a
// second accumulator.
template <int texts, int n> __device__ inline void
decode_matmul_multiply(float sums[2][texts / 8][4], const DecodeMatmulPairs& w, const floatX* x, int stride) {
#pragma unroll
    for (int begin = 0; begin < texts / 8; begin += n) {
        int4 v[n];
#pragma unroll
        for (int j = 0; j < n; j++) { v[j] = *reinterpret_cast<const int4*>(x + (begin + j) * 8 * stride); }
#pragma unroll
        for (int j = 0; j < n; j++) { mma_16x8x16(sums[0][begin + j], w.first, v[j].x, v[j].y, floatX()); }
#pragma unroll
        for (int j = 0; j < n; j++) {
            mma_16x8x16(sums[texts == 8 ? 1 : 0][begin + j], w.second, v[j].z, v[j].w, floatX());
        }
    }
}

__device__ inline int4 decode_matmul_normalise(int4 bits, const x128& scale, const x128& shift, float mean,
                                               float rstd) {
    x128 v = vec128_from_bits<floatX>(bits);
#pragma unroll
    for (int e = 0; e < x128::size; e++) {
        v[e] = (floatX)(((float)v[e] - mean) * rstd * (float)scale[e] + (float)shift[e]);
    }
    return vec128_bits(v);
}

// Writes the block's columns of the normalised x to shared_x (texts,stride); rows past B repeat the last row. shared_norm
// (2,num_columns) holds the block's columns of norm_weight and of norm_bias, which cp.async may still be writing. In a
// cluster, moments (cluster,texts) receive the mean and the sum of squared differences of each block's columns; their
// bytes arrive at `barrier`.
template <int texts> __device__ void decode_matmul_norm(floatX* shared_x, const x128* shared_norm, float2* moments,
                                                        uint64_t* barrier, const DecodeMatmulArguments& a, int first_b,
                                                        int num_columns, int rank) {
    constexpr int lanes = DECODE_MATMUL_THREADS / texts; // per text
    constexpr int ahead = texts == 8 ? 3 : 6;            // vectors of x in flight per thread: 768 columns of 8 texts
    DecodeMatmulSlice slice(a, rank);
    int cluster = 1 << a.log_cluster, b = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    int num_vec = slice.num_vec(a.K), padded_vec = (slice.end - slice.begin) * DECODE_MATMUL_CHUNK / x128::size;
    const int4* from = reinterpret_cast<const int4*>(a.x + (size_t)min(first_b + b, a.B - 1) * a.K +
                                                     slice.begin * DECODE_MATMUL_CHUNK);
    int4* to = reinterpret_cast<int4*>(shared_x + b * a.stride);

    // the moments of this thread's vectors, `ahead` at a time; the last ones stay in v
    int4 v[ahead];
    float count = 0.0f, mean = 0.0f, squares = 0.0f; // squares: the sum of the squared differences from the mean
    int begin = 0;
#pragma unroll 1
    for (;; begin += ahead * lanes) {
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            int at = begin + i * lanes + lane;
            v[i] = at < num_vec ? __ldcg(from + at) : make_int4(0, 0, 0, 0);
        }
        float now = (float)(min(max(ceil_div(num_vec - begin - lane, lanes), 0), ahead) * x128::size), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ahead; i++) { // vectors that do not exist are zeros
            x128 x = vec128_from_bits<floatX>(v[i]);
            for (int e = 0; e < x128::size; e++) { sum += (float)x[e]; }
        }
        float center = now > 0.0f ? sum / now : 0.0f, own = 0.0f;
        hold_packed(v);
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            float less = begin + i * lanes + lane < num_vec ? center : 0.0f;
            x128 x = vec128_from_bits<floatX>(v[i]);
            for (int e = 0; e < x128::size; e++) { own += ((float)x[e] - less) * ((float)x[e] - less); }
        }
        hold_packed(v);
        float both = count + now, share = both > 0.0f ? now / both : 0.0f;
        squares += own + (center - mean) * (center - mean) * count * share;
        mean += (center - mean) * share, count = both;
        if (begin + ahead * lanes >= num_vec) { break; }
#pragma unroll
        for (int i = 0; i < ahead; i++) { to[begin + i * lanes + lane] = v[i]; } // all of them exist
    }
    // of the text's columns in this block, then of all columns
    float center = lanes_sum<lanes>(mean * count) / (float)max(num_vec * x128::size, 1);
    squares = lanes_sum<lanes>(squares + count * (mean - center) * (mean - center));
    mean = center;
    if (cluster > 1) {
        if (lane == 0) {
            float2 own = make_float2(mean, squares);
            moments[rank * texts + b] = own;
#pragma unroll 1
            for (int r = 0; r < cluster; r++) {
                if (r != rank) { store_cluster_async(moments + rank * texts + b, own, barrier, r); }
            }
        }
        __syncthreads();
        mbarrier_wait_cluster(barrier, 0);
        mean = 0.0f, squares = 0.0f;
#pragma unroll 1
        for (int r = 0; r < cluster; r++) {
            float columns = (float)(DecodeMatmulSlice(a, r).num_vec(a.K) * x128::size);
            mean += moments[r * texts + b].x * (columns / (float)a.K);
        }
#pragma unroll 4
        for (int r = 0; r < cluster; r++) {
            float columns = (float)(DecodeMatmulSlice(a, r).num_vec(a.K) * x128::size);
            float2 part = moments[r * texts + b];
            squares += part.y + columns * (part.x - mean) * (part.x - mean);
        }
    }
    float rstd = rsqrtf(squares / (float)a.K + a.epsilon);

    cp_async_wait<0>();
    __syncthreads(); // every thread has stored its part of shared_norm
    const x128 *scale = shared_norm, *shift = shared_norm + num_columns / x128::size;
#pragma unroll 1
    for (int at = lane; at < begin; at += lanes) {
        to[at] = decode_matmul_normalise(to[at], scale[at], shift[at], mean, rstd);
    }
#pragma unroll
    for (int i = 0; i < ahead; i++) {
        int at = begin + i * lanes + lane;
        if (at < num_vec) { to[at] = decode_matmul_normalise(v[i], scale[at], shift[at], mean, rstd); }
    }
#pragma unroll 1
    for (int at = num_vec + lane; at < padded_vec; at += lanes) { to[at] = make_int4(0, 0, 0, 0); }
}

// Starts the copy of the block's columns of x to shared_x (texts,stride); zeros outside of the matrix.
template <int texts> __device__ inline void decode_matmul_copy(floatX* shared_x, const DecodeMatmulArguments& a,
                                                               int first_b, const DecodeMatmulSlice& slice) {
    constexpr int lanes = DECODE_MATMUL_THREADS / texts; // per text
    int b = threadIdx.x / lanes, begin = slice.begin * DECODE_MATMUL_CHUNK, end = slice.end * DECODE_MATMUL_CHUNK;
    const floatX* from = a.x + (size_t)min(first_b + b, a.B - 1) * a.K;
    for (int column = begin + threadIdx.x % lanes * x128::size; column < end; column += lanes * x128::size) {
        bool there = first_b + b < a.B && column < a.K;
        cp_async_16(shared_x + b * a.stride + column - begin, from + (there ? column : 0), there);
    }
    cp_async_commit();
}

struct alignas(2 * sizeof(floatX)) DecodeMatmulPair {
    floatX x, y;
};

// The sum of n pairs of floats, 1, 2, 4 or 8, each `stride` floats after the last, in this order. Their loads are in flight together.
template <int n> __device__ inline float2 decode_matmul_add(const float* from, int stride) {
    float2 pairs[n], sum = {};
#pragma unroll
    for (int i = 0; i < n; i++) { pairs[i] = *reinterpret_cast<const float2*>(from + i * stride); }
#pragma unroll
    for (int i = 0; i < n; i++) { sum.x += pairs[i].x, sum.y += pairs[i].y; }
    return sum;
}
__device__ inline float2 decode_matmul_add_up(const float* from, int n, int stride) {
    static_assert(DECODE_MATMUL_WARPS <= 8 && DECODE_MATMUL_MAX_CLUSTER <= 8, "");
    return n == 1   ? decode_matmul_add<1>(from, stride)
           : n == 2 ? decode_matmul_add<2>(from, stride)
           : n == 4 ? decode_matmul_add<4>(from, stride)
                    : decode_matmul_add<8>(from, stride);
}

// Applies gelu to one result and stores it.
template <class Out>
__device__ inline void decode_matmul_finish(Out* out, const DecodeMatmulArguments& a, float sum, int row, int b) {
    if (row >= a.OC || b >= a.B) { return; }
    out[(size_t)b * a.OC + row] = (Out)(a.gelu ? gelu(sum) : sum);
}

// Stores the sums of a warp's 16 rows, from `row` on: of the head as results, of other products to `partial`, this lane's first place.
template <bool head, int texts, class Out>
__device__ inline void decode_matmul_store(Out* out, float* partial, const DecodeMatmulArguments& a,
                                           const float (&sums)[2][texts / 8][4], const float (&row_scales)[2], int row,
                                           int first_b, int stride) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < texts / 8; j++, partial += 8 * stride) {
#pragma unroll
        for (int i = 0; i < 4; i++) { // element i is of row lane / 4 + i / 2 * 8 and of text lane % 4 * 2 + i % 2
            float sum = sums[0][j][i] + (texts == 8 ? sums[1][j][i] : 0.0f);
            int r = lane / 4 + i / 2 * 8, b = j * 8 + lane % 4 * 2 + i % 2;
            if (head) {
                decode_matmul_finish(out, a, sum * row_scales[i / 2], row + r, first_b + b);
            } else {
                partial[i % 2 * stride + i / 2 * 8] = sum;
            }
        }
    }
}

// Prepares the barriers for the bytes that the cluster's other blocks send: moments (texts) each, and sums (pairs) each.
template <int texts, bool norm>
__device__ inline void decode_matmul_init(uint64_t (&barriers)[2], int cluster, int pairs) {
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers[0], 1), mbarrier_init(&barriers[1], 1);
        mbarrier_init_fence();
        if (norm) { mbarrier_arrive_expect(&barriers[0], (cluster - 1) * texts * (int)sizeof(float2)); }
        mbarrier_arrive_expect(&barriers[1], (cluster - 1) * pairs * (int)sizeof(float2));
    }
    cluster_arrive_relaxed();
}

// Starts the copy of the block's columns of norm_weight and norm_bias to shared_norm (2, num_columns); zeros past K.
__device__ inline void decode_matmul_copy_norm(floatX* shared_norm, const DecodeMatmulArguments& a,
                                               const DecodeMatmulSlice& slice, int num_columns) {
#pragma unroll 1
    for (int at = threadIdx.x; at < num_columns / x128::size; at += DECODE_MATMUL_THREADS) {
        int column = slice.begin * DECODE_MATMUL_CHUNK + at * x128::size;
        bool there = column < a.K;
        cp_async_16(shared_norm + at * x128::size, a.norm_weight + (there ? column : 0), there);
        cp_async_16(shared_norm + num_columns + at * x128::size, a.norm_bias + (there ? column : 0), there);
    }
    cp_async_commit();
}

// Sends each pair of sums, sum_of(i), to the block of the cluster that stores it: sums (cluster, pairs) there. Waits for the others'.
template <class Sum> __device__ inline void decode_matmul_exchange(float2* sums, uint64_t* barrier, int rank,
                                                                   int cluster, int pairs, int log_pairs,
                                                                   const Sum& sum_of) {
#pragma unroll 1
    for (int i = threadIdx.x; i < cluster * pairs; i += DECODE_MATMUL_THREADS) {
        int owner = i >> log_pairs;
        float2 sum = sum_of(i), *to = sums + rank * pairs + (i & (pairs - 1));
        if (owner == rank) {
            *to = sum;
        } else {
            store_cluster_async(to, sum, barrier, owner);
        }
    }
    __syncthreads(); // the block has stored its own sums
    mbarrier_wait_cluster(barrier, 0);
}

// A block multiplies `rows` rows of the weight by `texts` texts. The blocks of a cluster take a share of the columns
// each; within a block, so do the warps of a group, which have 16 rows in common. With rows = 32 and a cluster of 2:
//
//     chunks          0 1 2    3 4 5    6 7 8    9 10 11  12 13 14 ...
//     rows  0 - 15    warp 0   warp 1   warp 2   warp 3   warp 0   ...
//     rows 16 - 31    warp 4   warp 5   warp 6   warp 7   warp 4   ...
//                     |------------ block 0 ------------| block 1  ...
//
// The warps of a group add up their sums in shared memory. Then each block of the cluster gets the others' sums of its
// share of the results, adds them in the order of the blocks, and stores the results.
//
// The head has so many rows that no sums are split: rows = 128, a warp has all columns and stores its results itself, and
// a block goes on with the rows of tile blockIdx.z + gridDim.z.
template <class Out, class W, int texts, bool norm> __global__ void __launch_bounds__(DECODE_MATMUL_THREADS, 2)
    decode_matmul_sm90_kernel5(Out* out, const DecodeMatmulArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int num_pairs = DECODE_MATMUL_PAIRS;
    constexpr bool head = sizeof(Out) != sizeof(floatX), scaled = sizeof(W) < sizeof(floatX);
    constexpr int ahead = decode_matmul_ahead(scaled, texts, norm);
    extern __shared__ __align__(128) int4 decode_matmul_shared[];
    __shared__ uint64_t barriers[2]; // the moments, the sums of the cluster's other blocks have arrived
    int rank = blockIdx.x, cluster = gridDim.x, first_b = blockIdx.y * texts, tile = blockIdx.z;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int rows = 1 << a.log_rows, log_split = 7 - a.log_rows, split = 1 << log_split; // warps per group: 128 / rows
    int group = warp >> log_split, part = warp & (split - 1);
    DecodeMatmulSlice slice(a, rank);
    int num_chunks = slice.end - slice.begin;
    // of the largest slice: shared memory has the same layout in all blocks of a cluster, because they store to it
    int num_columns = ceil_div(ceil_div(a.K, DECODE_MATMUL_CHUNK), cluster) * DECODE_MATMUL_CHUNK;
    int begin = slice.begin + (num_chunks * part >> log_split),
        end = slice.begin + (num_chunks * (part + 1) >> log_split);
    int row = tile * rows + group * 16; // the warp's first row
    int stride = rows + 4;              // of `partial`: a warp's stores of sums are spread over all banks
    int half_rows = rows / 2, log_half = a.log_rows - 1;
    // results that this block stores, in pairs: neighbouring rows of one text
    int pairs = texts * half_rows >> a.log_cluster;

    floatX* shared_x = reinterpret_cast<floatX*>(decode_matmul_shared);                    // (texts, a.stride)
    floatX* shared_norm = shared_x + texts * a.stride;                                     // (2, num_columns), if norm
    float* partial = reinterpret_cast<float*>(shared_norm + (norm ? 2 * num_columns : 0)); // (split, texts, stride)
    float2* sums_there = reinterpret_cast<float2*>(partial + split * texts * stride);      // (cluster, pairs)
    float2* moments = sums_there + cluster * pairs;                                        // (cluster, texts), if norm

    // everything up to grid_wait_dependency() overlaps with the previous kernel
    if (cluster > 1) { decode_matmul_init<texts, norm>(barriers, cluster, pairs); }
    WeightBits<W> w[ahead][2];
    DecodeMatmulRows<W> first_rows(a.weight, row, a.K, a.OC);
#pragma unroll
    for (int i = 0; i < ahead; i++) { first_rows.fetch(w[i], begin + i, begin + i < end, a.K); }
    grid_launch_dependents();
    if (norm) { decode_matmul_copy_norm(shared_norm, a, slice, num_columns); }
    // the place of this thread's pairs of results in the tile
    auto place = [=](int u, int* b, int* r) {
        int i = rank * pairs + threadIdx.x + u * DECODE_MATMUL_THREADS;
        *b = i >> log_half, *r = (i & (half_rows - 1)) * 2;
        return (int)threadIdx.x + u * DECODE_MATMUL_THREADS < pairs;
    };
    // two neighbours of a row of bias or residual; zeros outside of it
    auto pair_of = [=](const floatX* from, int r) {
        DecodeMatmulPair x = {(floatX)0.0f, (floatX)0.0f};
        if (tile * rows + r < a.OC) { x.x = from[tile * rows + r]; }
        if (tile * rows + r + 1 < a.OC) { x.y = from[tile * rows + r + 1]; }
        return x;
    };
    DecodeMatmulPair bias[num_pairs] = {}, residual[num_pairs] = {};
    float2 scales[num_pairs] = {};
    for (int u = 0; u < num_pairs; u++) {
        int b, r;
        if (head || !place(u, &b, &r)) { continue; }
        if (a.bias) { bias[u] = pair_of(a.bias, r); }
        if (scaled && tile * rows + r < a.OC) { scales[u].x = a.weight.scales[tile * rows + r]; }
        if (scaled && tile * rows + r + 1 < a.OC) { scales[u].y = a.weight.scales[tile * rows + r + 1]; }
    }
    constexpr bool prepares = !head && !scaled && texts < 64; // for 64 texts there are not enough registers
    bool all_loaded = prepares && begin + ahead >= end; // the warp's weights: they become operands before the wait
    if (all_loaded) {
#pragma unroll
        for (int i = 0; i < ahead; i++) { DecodeMatmulPairs(w[i], W(), false).arrange(w[i]); }
    }
    if (cluster > 1) { cluster_wait(); } // no block stores to another one before that one's barriers exist
    grid_wait_dependency();              // what was read before this line is not written by earlier kernels of the step

    if (!norm) { decode_matmul_copy<texts>(shared_x, a, first_b, slice); }
    for (int u = 0; u < num_pairs; u++) {
        int b, r;
        if (norm || !place(u, &b, &r) || !a.residual || first_b + b >= a.B) { continue; }
        residual[u] = pair_of(a.residual + (size_t)(first_b + b) * a.OC, r);
    }
    if (norm) {
        decode_matmul_norm<texts>(shared_x, reinterpret_cast<const x128*>(shared_norm), moments, &barriers[0], a,
                                  first_b, num_columns, rank);
    } else {
        cp_async_wait<0>();
    }
    __syncthreads();

    // this lane's vector of the first chunk of the block, in text lane / 4
    const floatX* own_x = shared_x + lane / 4 * a.stride + lane % 4 * x128::size;
    for (; tile * rows < a.OC; tile += gridDim.z) { // only the head has more than one tile
        float sums[2][texts / 8][4] = {};
        float row_scales[2] = {1.0f, 1.0f}; // of the head's rows lane / 4 and lane / 4 + 8
        for (int i = 0; i < 2; i++) {
            if (scaled && head && row + lane / 4 + 8 * i < a.OC) {
                row_scales[i] = a.weight.scales[row + lane / 4 + 8 * i];
            }
        }
        int next_row = row + (int)gridDim.z * rows;
        // Multiplies `ahead` chunks and loads the next ones. only: there are no next ones, and this code has no instructions for them.
        auto round = [&](int chunk, auto is_only) {
            constexpr bool only = decltype(is_only)::value;
            bool more = chunk + ahead < end; // in this tile; if not, the head loads the next one's first chunks
            int next_chunk = more ? chunk + ahead : begin;
            DecodeMatmulRows<W> next(a.weight, more ? row : next_row, a.K, a.OC);
#pragma unroll
            for (int i = 0; i < ahead; i++) {
                if (chunk + i < end) {
                    DecodeMatmulPairs p(w[i], W(), only);
                    const floatX* x = own_x + (chunk + i - slice.begin) * DECODE_MATMUL_CHUNK;
                    decode_matmul_multiply<texts, (only && texts > 8 ? 2 : 1)>(sums, p, x, a.stride);
                }
                if (!only && (more || head)) { next.fetch(w[i], next_chunk + i, next_chunk + i < end, a.K); }
                // keeps the compiler from loading all chunks of x ahead, for which there are not enough registers
                if ((i + 1) % (texts <= 16 ? 24 / texts : 1) == 0) { __syncwarp(); }
            }
        };
        if (all_loaded) {
            round(begin, std::bool_constant<prepares>());
        } else {
            for (int chunk = begin; chunk < end; chunk += ahead) { round(chunk, std::false_type()); }
        }
        float* to_partial = partial + (part * texts + lane % 4 * 2) * stride + group * 16 + lane / 4;
        decode_matmul_store<head, texts>(out, to_partial, a, sums, row_scales, row, first_b, stride);
        if (!head) { break; }
        row = next_row;
    }
    if (head) { return; }

    __syncthreads();
    // the sum over the block's columns of pair i of the tile
    auto sum_of = [=](int i) {
        return decode_matmul_add_up(partial + (i >> log_half) * stride + (i & (half_rows - 1)) * 2, split,
                                    texts * stride);
    };
    if (cluster > 1) {
        int log_pairs = log_half + (texts == 8 ? 3 : texts == 16 ? 4 : texts == 32 ? 5 : 6) - a.log_cluster;
        decode_matmul_exchange(sums_there, &barriers[1], rank, cluster, pairs, log_pairs, sum_of);
    }
#pragma unroll
    for (int u = 0; u < num_pairs; u++) {
        int b, r;
        if (!place(u, &b, &r)) { continue; }
        int k = threadIdx.x + u * DECODE_MATMUL_THREADS;
        const float* there = reinterpret_cast<const float*>(sums_there + k);
        float2 sum = cluster == 1 ? sum_of(k) : decode_matmul_add_up(there, cluster, 2 * pairs);
        if (scaled) { sum.x *= scales[u].x, sum.y *= scales[u].y; }
        sum.x += (float)bias[u].x + (float)residual[u].x, sum.y += (float)bias[u].y + (float)residual[u].y;
        decode_matmul_finish(out, a, sum.x, tile * rows + r, first_b + b);
        decode_matmul_finish(out, a, sum.y, tile * rows + r + 1, first_b + b);
    }
#endif
}

// How kernel 5 is launched.
struct DecodeMatmulPlan {
    int texts, cluster, rows, stride;
    dim3 grid;
    size_t shared_bytes;
};

// Texts per block for B texts.
inline int decode_matmul_texts(int B) {
    int texts = 8;
    while (texts < min(B, 64)) { texts *= 2; }
    return texts;
}
// The most rows of a tile for which a thread stores no more than DECODE_MATMUL_PAIRS pairs of results.
inline int decode_matmul_max_rows(int texts, int cluster) {
    return 2 * DECODE_MATMUL_PAIRS * DECODE_MATMUL_THREADS * cluster / texts;
}

// The launch for blocks of `texts` texts. cluster, rows: 0 to choose them.
inline DecodeMatmulPlan decode_matmul_plan(int texts, int cluster, int rows, bool norm, bool head, int B, int K,
                                           int OC) {
    int num_sms = num_multiprocessors(), num_chunks = ceil_div(K, DECODE_MATMUL_CHUNK), num_y = ceil_div(B, texts);
    if (head) { cluster = 1, rows = 16 * DECODE_MATMUL_WARPS; }
    if (cluster == 0) { // each block reads at most 32 KB of x and, without a layernorm, at most 768 columns
        cluster = 1;
        while (cluster < DECODE_MATMUL_MAX_CLUSTER && (texts * K > cluster * 16384 || (!norm && K > cluster * 768))) {
            cluster *= 2;
        }
    }
    int max_rows = decode_matmul_max_rows(texts, cluster);
    // the most that leave a block for every second SM: fewer blocks read x. Without a layernorm, 32 are faster than 16
    if (rows == 0) {
        int least = norm ? 16 : min(32, max_rows);
        for (rows = 64; rows > least; rows /= 2) {
            if (rows <= max_rows && 2 * ceil_div(OC, rows) * cluster * num_y >= num_sms) { break; }
        }
    }
    require(rows <= 16 * DECODE_MATMUL_WARPS && (head || rows <= max_rows));
    int columns = ceil_div(num_chunks, cluster) * DECODE_MATMUL_CHUNK, split = 16 * DECODE_MATMUL_WARPS / rows;
    // 64 bytes more than a multiple of 128: the 16-byte loads of 8 lanes, from two rows, are spread over all banks
    int stride = ceil_div(columns, 64) * 64 + 32, tiles = ceil_div(OC, rows);
    size_t bytes = ((size_t)texts * stride + (norm ? 2 * columns : 0)) * sizeof(floatX);
    if (!head) { bytes += (size_t)split * texts * (rows + 4) * sizeof(float); }
    if (cluster > 1) { bytes += ((size_t)texts * rows / 2 + cluster * texts) * sizeof(float2); }
    if (head) { tiles = min(tiles, max(1, num_sms * (bytes <= 100 << 10 ? 2 : 1) / num_y)); } // as many as fit
    return {texts, cluster, rows, stride, dim3(cluster, num_y, tiles), bytes};
}

// The plan for a shape. If x does not fit in shared memory, a block takes fewer texts; with too many columns for that,
// shared_bytes of the plan exceeds what an SM has.
constexpr size_t DECODE_MATMUL_MAX_SHARED = (227 << 10) - 1024; // the kernel also has barriers in static shared memory
inline DecodeMatmulPlan decode_matmul_choose(int cluster, int rows, bool norm, bool head, int B, int K, int OC) {
    int texts = decode_matmul_texts(B);
    // Compiled for 16 texts, each chunk of the head waits for all loads, the newest ones too: 46 us instead of 32 (H200, C = 768).
    if (head && texts == 16) { texts = 32; }
    DecodeMatmulPlan plan = decode_matmul_plan(texts, cluster, rows, norm, head, B, K, OC);
    while (plan.shared_bytes > DECODE_MATMUL_MAX_SHARED && texts > 8) {
        texts /= 2;
        plan = decode_matmul_plan(texts, cluster, rows, norm, head, B, K, OC);
    }
    return plan;
}

template <class Out, class W, bool norm> auto decode_matmul_kernel(int texts) {
    return texts == 8    ? decode_matmul_sm90_kernel5<Out, W, 8, norm>
           : texts == 16 ? decode_matmul_sm90_kernel5<Out, W, 16, norm>
           : texts == 32 ? decode_matmul_sm90_kernel5<Out, W, 32, norm>
                         : decode_matmul_sm90_kernel5<Out, W, 64, norm>;
}

// Launches kernel 5; `early`: by programmatic dependent launch.
template <class Out> void decode_matmul_launch(Out* out, DecodeMatmulArguments a, const DecodeMatmulPlan& plan,
                                               bool early, const Execution& exec) {
    require(a.B > 0 && a.K > 0 && a.K % x128::size == 0 && a.OC > 0);
    require(!a.residual || (!a.gelu && !a.norm_weight));
    require((a.norm_weight != NULL) == (a.norm_bias != NULL) && plan.shared_bytes <= DECODE_MATMUL_MAX_SHARED);
    require(plan.grid.y <= 65535 && plan.grid.z <= 65535);
    a.log_rows = __builtin_ctz(plan.rows), a.log_cluster = __builtin_ctz(plan.cluster), a.stride = plan.stride;
    auto kernel = decode_matmul_kernel<Out, floatX, true>(plan.texts);
    weight_dispatch(a.weight, [&](auto type) {
        typedef decltype(type) W;
        kernel = decode_matmul_kernel<Out, W, true>(plan.texts);
        if constexpr (sizeof(Out) == sizeof(floatX)) { // the head always has a layernorm
            if (!a.norm_weight) { kernel = decode_matmul_kernel<Out, W, false>(plan.texts); }
        }
    });
    launch_kernel(kernel, LaunchShape(plan.grid, DECODE_MATMUL_THREADS, plan.shared_bytes, plan.cluster, early), exec,
                  out, a);
}

bool decode_matmul_runs(const DecodeMatmulPlan& plan, int B) {
    return B >= DECODE_MATMUL_MIN_TEXTS && plan.shared_bytes <= DECODE_MATMUL_MAX_SHARED && has_sm90a();
}

// Whether decode_matmul() runs such a product here.
bool decode_matmul_runs(bool norm, int B, int K, int OC) {
    return B <= DECODE_MATMUL_MAX_TEXTS && decode_matmul_runs(decode_matmul_choose(0, 0, norm, false, B, K, OC), B);
}

// out (B,OC) = gelu?(layernorm?(x) weight^T + bias) + residual | x (B,K) | norm_weight, norm_bias (K) or NULL
// | weight (OC,K) | bias (OC) or NULL | residual (B,OC) or NULL, may be out itself; a residual excludes gelu and a layernorm
// Weights and biases are read while the previous kernel in the stream may still run, so no kernel of the step may write
// them. Returns false, and launches nothing, for other numbers of texts than DECODE_MATMUL_MIN_TEXTS to
// DECODE_MATMUL_MAX_TEXTS, for a K too large for shared memory, and where the device has no code for sm_90a.
bool decode_matmul(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec) {
    DecodeMatmulPlan plan = decode_matmul_choose(0, 0, norm_weight != NULL, false, B, K, OC);
    if (B > DECODE_MATMUL_MAX_TEXTS || !decode_matmul_runs(plan, B)) { return false; }
    double others = (double)B * (K + (residual ? 2.0 : 1.0) * OC) * sizeof(floatX);
    Op op(exec, weight.bytes(OC, K) + others, 2.0 * B * OC * K, "decode_matmul %d -> %d", K, OC);
    decode_matmul_launch(out, {x, norm_weight, norm_bias, weight, bias, residual, B, K, OC, gelu, epsilon, 0, 0, 0},
                         plan, true, exec);
    return true;
}
// ---- kernel 6: the head alone; weights by TMA through a ring in shared memory, which is full when x arrives -----------

constexpr int DECODE_HEAD_CONSUMERS = 256;              // threads: two warpgroups
constexpr int DECODE_HEAD_ROWS = 128;                   // of a tile: 64 of each warpgroup
constexpr int DECODE_HEAD_BOX = DECODE_HEAD_ROWS * 128; // bytes of 128 rows and 64 columns, or 128 of weights in 8 bits
constexpr int DECODE_HEAD_MIN_STAGES = 4, DECODE_HEAD_MAX_STAGES = 13;
// With more texts and full weights, cuBLASLt is faster than kernel 5: 64 texts of 768 channels 34 us instead of 52.
constexpr int DECODE_HEAD_MAX_TEXTS5 = 32;

struct DecodeHeadArguments {
    const floatX *x, *norm_weight, *norm_bias;
    const float* scales;
    int B, K, OC, num_boxes, num_stages; // num_boxes: of the weight, per tile
    float epsilon;                       // of the layernorm
};

// sum += a (64,16) b (16,texts); a: a descriptor, or the warp's registers
template <class A> __device__ inline void decode_head_multiply(float (&sum)[8], A a, uint64_t b, int accumulate) {
    wgmma_64x16x16(sum, a, b, accumulate, floatX());
}
template <class A> __device__ inline void decode_head_multiply(float (&sum)[16], A a, uint64_t b, int accumulate) {
    wgmma_64x32x16(sum, a, b, accumulate, floatX());
}
template <class A> __device__ inline void decode_head_multiply(float (&sum)[32], A a, uint64_t b, int accumulate) {
    wgmma_64x64x16(sum, a, b, accumulate, floatX());
}

// Weights in 8 bits become operands in registers. Of 64 columns, lane t of a quad reads 16 t to 16 t + 15 of rows lane / 4 and lane / 4 + 8
// of its warp's 16, which are its columns in four steps of 16. So columns have another order than in memory, in x, too: column
// 16 t + 4 s + j, j = 0 to 3, is column 2 t, 2 t + 1, 2 t + 8 or 2 t + 9 of step s.
// rows[i]: of step i of a box's 128 columns. `box` begins with the warp's rows.
template <class W> __device__ inline void decode_head_rows(uint32_t (&rows)[8][4], const unsigned char* box) {
    int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int lower = 0; lower < 2; lower++) { // row % 8 is the same for both
            int4 bits = reinterpret_cast<const int4*>(box + (row + 8 * lower) * 128)[(4 * half + t) ^ row];
            uint32_t pairs[2][4];
            weight_pairs(pairs[0], make_int2(bits.x, bits.y), W()),
                weight_pairs(pairs[1], make_int2(bits.z, bits.w), W());
#pragma unroll
            for (int i = 0; i < 8; i++) { rows[4 * half + i / 2][i % 2 * 2 + lower] = pairs[i / 4][i % 4]; }
        }
    }
}

// shared_x = layernorm(x), as boxes of `texts` rows and 64 columns with the 128-byte swizzle; zeros for texts past B and columns past K.
// A warp has every eighth text, a lane of it up to `most` vectors. scaled: columns in the order of decode_head_rows().
template <bool scaled, int texts, int most>
__device__ inline void decode_head_norm(unsigned char* shared_x, const DecodeHeadArguments& a) {
    constexpr int size = x128::size, warps = DECODE_HEAD_CONSUMERS / 32;
    constexpr int together =
        texts / warps < 8 / most * 2 ? texts / warps : 8 / most * 2; // texts of a warp on their way: 2 or 4
    int lane = threadIdx.x % 32, num_vec = a.K / size;
    auto vec = [=](int i) { return i * 32 + lane; };
    int4 weight[most], bias[most];
#pragma unroll
    for (int i = 0; i < most; i++) {
        bool there = vec(i) < num_vec;
        weight[i] = there ? reinterpret_cast<const int4*>(a.norm_weight)[vec(i)] : make_int4(0, 0, 0, 0);
        bias[i] = there ? reinterpret_cast<const int4*>(a.norm_bias)[vec(i)] : make_int4(0, 0, 0, 0);
    }
    grid_wait_dependency(); // what was read before this line is not written by earlier kernels of the step
    const int4* rows = reinterpret_cast<const int4*>(a.x);
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < texts; first += warps * together) {
        int4 x[together][most];
#pragma unroll
        for (int t = 0; t < together; t++) {
            const int4* row = rows + (size_t)min(first + t * warps, a.B - 1) * num_vec;
#pragma unroll
            for (int i = 0; i < most; i++) {
                x[t][i] = vec(i) < num_vec ? __ldcg(row + vec(i)) : make_int4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int t = 0; t < together; t++) {
            int b = first + t * warps;
            float sum = 0.0f, squares = 0.0f;
#pragma unroll
            for (int i = 0; i < most; i++) {
                x128 v = vec128_from_bits<floatX>(x[t][i]);
                for (int e = 0; e < size; e++) { sum += (float)v[e]; }
            }
            float mean = lanes_sum<32>(sum) / (float)a.K;
            hold_packed(x[t]);
#pragma unroll
            for (int i = 0; i < most; i++) {
                x128 v = vec128_from_bits<floatX>(x[t][i]);
                float less = vec(i) < num_vec ? mean : 0.0f;
                for (int e = 0; e < size; e++) { squares += ((float)v[e] - less) * ((float)v[e] - less); }
            }
            float rstd = rsqrtf(lanes_sum<32>(squares) / (float)a.K + a.epsilon);
            hold_packed(x[t]), hold_packed(weight), hold_packed(bias);
#pragma unroll
            for (int i = 0; i < most; i++) {
                int box = vec(i) / 8, chunk = vec(i) % 8;
                if (box >= a.num_boxes * (scaled ? 2 : 1)) { break; }
                x128 scale = vec128_from_bits<floatX>(weight[i]), shift = vec128_from_bits<floatX>(bias[i]);
                int4 normed = decode_matmul_normalise(x[t][i], scale, shift, mean, rstd);
                if (b >= a.B || vec(i) >= num_vec) { normed = make_int4(0, 0, 0, 0); }
                int4* to = reinterpret_cast<int4*>(shared_x + (size_t)(box * texts + b) * 128);
                if (!scaled) {
                    to[chunk ^ b % 8] = normed;
                    continue;
                }
                int pairs[4] = {normed.x, normed.y, normed.z, normed.w};
#pragma unroll
                for (int p = 0; p < 4; p++) { // pair p of the lane's 8 columns, at its place in a chunk
                    reinterpret_cast<int*>(to + ((chunk % 2 * 4 + p) ^ b % 8))[chunk / 2] = pairs[p];
                }
            }
        }
    }
}

// logits (B,OC) = layernorm(x) weight^T. Blocks take tiles of 128 rows of the weight in turn. One warp loads them box by box; each of two
// warpgroups multiplies 64 rows by all texts. As the weights are in shared memory, not in registers on their way, a third of them can be
// there before the kernel in front of this one has ended.
template <class W, int texts, int most> __global__ void __launch_bounds__(DECODE_HEAD_CONSUMERS + 32, 1)
    decode_matmul_head_sm90_kernel6(float* logits, const __grid_constant__ CUtensorMap weight,
                                    const __grid_constant__ DecodeHeadArguments a) {
    constexpr bool scaled = sizeof(W) < sizeof(floatX);
    constexpr int x_boxes = scaled ? 2 : 1; // of 64 columns, per box of the weight
    __shared__ uint64_t full[DECODE_HEAD_MAX_STAGES], empty[DECODE_HEAD_MAX_STAGES];
    extern __shared__ __align__(128) unsigned char decode_head_shared[];
    unsigned char* shared_x =
        &shared_aligned_1024<unsigned char>(decode_head_shared);          // (num_boxes * x_boxes, texts, 64)
    unsigned char* ring = shared_x + a.num_boxes * x_boxes * texts * 128; // (num_stages, 128 rows, 128 bytes)
    int num_tiles = ceil_div(a.OC, DECODE_HEAD_ROWS), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.num_stages; i++) {
            mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], DECODE_HEAD_CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    int stage = 0, parity = 0;
    auto next = [&] {
        if (++stage == a.num_stages) { stage = 0, parity ^= 1; }
    };
    if (warp == DECODE_HEAD_CONSUMERS / 32) {
        if (lane != 0) { return; }
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            for (int k = 0; k < a.num_boxes; k++, next()) {
                mbarrier_wait(&empty[stage], parity ^ 1); // at first all are empty
                mbarrier_arrive_expect(&full[stage], DECODE_HEAD_BOX);
                tma_load_2d_once(ring + stage * DECODE_HEAD_BOX, &weight, k * 64, tile * DECODE_HEAD_ROWS,
                                 &full[stage]);
            }
        }
        return;
    }
    decode_head_norm<scaled, texts, most>(shared_x, a);
    tma_store_fence(); // wgmma reads what these threads have written
    named_barrier_sync(1, DECODE_HEAD_CONSUMERS);
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        float sum[texts / 2] = {};
        int before = 0;
        for (int k = 0; k < a.num_boxes; k++, next()) {
            mbarrier_wait(&full[stage], parity);
            const unsigned char* box = ring + stage * DECODE_HEAD_BOX;
            const unsigned char* x = shared_x + k * x_boxes * texts * 128;
            if constexpr (scaled) {
                uint32_t rows[8][4];
                decode_head_rows<W>(rows, box + warp * 16 * 128);
                __syncwarp();
                if (lane == 0) { mbarrier_arrive(&empty[stage]); }
                wgmma_hold(sum);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    decode_head_multiply(sum, (const uint32_t*)rows[j],
                                         wgmma_descriptor(x + j / 4 * texts * 128) + 2 * (j % 4), k > 0 || j > 0);
                }
                wgmma_commit();
                wgmma_hold(sum);
                wgmma_wait<0>();
#pragma unroll
                for (int j = 0; j < 8; j++) { wgmma_hold(rows[j]); }
            } else {
                uint64_t rows = wgmma_descriptor(box + warp / 4 * 64 * 128), columns = wgmma_descriptor(x);
                wgmma_hold(sum);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    decode_head_multiply(sum, rows + 2 * j, columns + 2 * j, k > 0 || j > 0);
                }
                wgmma_commit();
                wgmma_hold(sum);
                wgmma_wait<1>(); // for the box before
                if (k > 0 && lane == 0) { mbarrier_arrive(&empty[before]); }
            }
            before = stage;
        }
        wgmma_wait<0>();
        wgmma_hold(sum);
        if (!scaled && lane == 0) { mbarrier_arrive(&empty[before]); }
        int first = tile * DECODE_HEAD_ROWS + warp * 16 + lane / 4; // of the lane's two rows
        float scales[2] = {1.0f, 1.0f};
        for (int i = 0; i < 2; i++) {
            if (scaled && first + 8 * i < a.OC) { scales[i] = a.scales[first + 8 * i]; }
        }
#pragma unroll
        for (int i = 0; i < texts / 2; i++) {
            int row = first + i % 4 / 2 * 8, b = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (row < a.OC && b < a.B) { logits[(size_t)b * a.OC + row] = sum[i] * scales[i % 4 / 2]; }
        }
    }
}

// Texts that kernel 6 is compiled for, and stages in what their x leaves of shared memory. 0 stages: it does not run.
struct DecodeHeadPlan {
    int texts, num_boxes, x_boxes, num_stages;
    size_t shared_bytes() const {
        return 1024 + (size_t)num_boxes * x_boxes * texts * 128 + num_stages * DECODE_HEAD_BOX;
    }
};
inline DecodeHeadPlan decode_head_plan(const WeightMatrix& weight, int B, int K) {
    int x_boxes = weight.format == WEIGHTS_FULL ? 1 : 2;
    DecodeHeadPlan plan = {B <= 16 ? 16 : B <= 32 ? 32 : 64, ceil_div(K, 64 * x_boxes), x_boxes, 0};
    int stages = ((int)DECODE_MATMUL_MAX_SHARED - (int)plan.shared_bytes()) / DECODE_HEAD_BOX;
    bool runs = B <= 64 && K <= 7 * 256 && K % (8 * x_boxes) == 0 && has_sm90a(); // a row is aligned to 16 bytes
    plan.num_stages = runs && stages >= DECODE_HEAD_MIN_STAGES ? min(stages, DECODE_HEAD_MAX_STAGES) : 0;
    return plan;
}

template <class W, int most> auto decode_head_kernel(int texts) {
    return texts == 16   ? decode_matmul_head_sm90_kernel6<W, 16, most>
           : texts == 32 ? decode_matmul_head_sm90_kernel6<W, 32, most>
                         : decode_matmul_head_sm90_kernel6<W, 64, most>;
}
inline void decode_head_launch(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                               const WeightMatrix& weight, int B, int K, int OC, float epsilon,
                               const DecodeHeadPlan& plan, const Execution& exec) {
    require(B > 0 && K % x128::size == 0 && OC > 0);
    void (*kernel)(float*, const CUtensorMap, const DecodeHeadArguments) = NULL;
    weight_dispatch(weight, [&](auto type) {
        typedef decltype(type) W;
        kernel = K <= 4 * 256 ? decode_head_kernel<W, 4>(plan.texts) : decode_head_kernel<W, 7>(plan.texts);
    });
    // two weights in 8 bits are as one of floatX for a copy
    CUtensorMap map = tensor_map((const floatX*)weight.values, {K / plan.x_boxes, OC}, {64, DECODE_HEAD_ROWS});
    DecodeHeadArguments a = {x, norm_weight, norm_bias,      weight.scales,   B,
                             K, OC,          plan.num_boxes, plan.num_stages, epsilon};
    launch_early(kernel, dim3(min(num_multiprocessors(), ceil_div(OC, DECODE_HEAD_ROWS))),
                 dim3(DECODE_HEAD_CONSUMERS + 32), plan.shared_bytes(), exec, logits, map, a);
}

// logits (B,Vp) float = layernorm(x) wte^T | x (B,C) | norm_weight, norm_bias (C) | wte (Vp,C). By kernel 6 for 1 to 64 texts, by kernel
// 5 where that does not run: for 2 to DECODE_HEAD_MAX_TEXTS5 texts, with weights in 8 bits for any number from 2 on. Returns false, and
// launches nothing, elsewhere. wte is read while the previous kernel in the stream may still run.
bool decode_matmul_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                        const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec) {
    DecodeHeadPlan ring = decode_head_plan(wte, B, C);
    DecodeMatmulPlan plan = decode_matmul_choose(0, 0, true, true, B, C, Vp);
    bool many = B > DECODE_HEAD_MAX_TEXTS5 && wte.format == WEIGHTS_FULL;
    if (!ring.num_stages && (many || !decode_matmul_runs(plan, B))) { return false; }
    double others = (double)B * C * sizeof(floatX) + (double)B * Vp * sizeof(float);
    Op op(exec, wte.bytes(Vp, C) + others, 2.0 * B * Vp * C, "decode_matmul %d -> %d, head", C, Vp);
    if (ring.num_stages) {
        decode_head_launch(logits, x, norm_weight, norm_bias, wte, B, C, Vp, epsilon, ring, exec);
        return true;
    }
    decode_matmul_launch(logits, {x, norm_weight, norm_bias, wte, NULL, NULL, B, C, Vp, false, epsilon, 0, 0, 0}, plan,
                         true, exec);
    return true;
}

#else // the tensor cores multiply 16-bit floats

bool decode_matmul_runs(bool, int, int, int) { return false; }
bool decode_matmul(floatX*, const floatX*, const floatX*, const floatX*, const WeightMatrix&, const floatX*,
                   const floatX*, bool, int, int, int, float, const Execution&) {
    return false;
}
bool decode_matmul_head(float*, const floatX*, const floatX*, const floatX*, const WeightMatrix&, int, int, int, float,
                        const Execution&) {
    return false;
}

#endif
// ==== end promoted: decode_matmul ====
