/*
fp8: what the kernels that quantise share, and how their results are checked.

A tensor in e4m3 or e5m2 (type F below) stands for its stored values divided by a scale, one float for the whole tensor:

    out = F(x * scale)              rounded to nearest, ties to even; beyond the largest number, the largest number
    amax = max(amax, max |x|)       from which the next scale is made
    num_saturated += the number of values with |x * scale| beyond the largest number: 448 in e4m3, 57344 in e5m2

x is rounded to floatX first, so a copy in fp8 has the same bits whether or not the tensor is stored in floatX, too. amax
and num_saturated do not depend on the order of the threads: the maximum is taken of the bits of |x|, which as unsigned
integers have the order of the numbers. Infinity is above all of these, and NaN above infinity, so neither is lost.

The tensor cores of Hopper multiply fp8 operands only if k, the dimension of the sum, is contiguous in both. A weight
gradient sums over tokens, so it needs its operands (N,C) transposed: (C,N). But a sum may take the tokens in any order, as
long as both operands have the same. In the order that these kernels write, the 16 tokens of a group are

    place        0  1  2  3  4  5  ...  14 15
    token        0  8  1  9  2 10  ...   7 15

because a thread of mma.sync or wgmma has rows g and g + 8 of a column: it packs these two into 16 bits, and instructions
for 16-bit elements (ldmatrix, stmatrix) do the rest. There is none that transposes 8-bit elements. A weight is transposed
in order, because dX sums over its rows, and these are the columns of dout.

Source: formats: Micikevicius et al. 2022, arXiv:2209.05433.
*/
#pragma once

#include <cuda_fp8.h>

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"

// ---- rounding, amax, saturation -------------------------------------------------------------------------------------

template <class F> struct Fp8;
template <> struct Fp8<__nv_fp8_e4m3> {
    static constexpr float LARGEST = 448.0f;
    static constexpr bool IS_E5M2 = false;
    static __device__ uint32_t pack(float a, float b, float c, float d) { return pack_e4m3x4(a, b, c, d); }
};
template <> struct Fp8<__nv_fp8_e5m2> {
    static constexpr float LARGEST = 57344.0f;
    static constexpr bool IS_E5M2 = true;
    static __device__ uint32_t pack(float a, float b, float c, float d) { return pack_e5m2x4(a, b, c, d); }
};

// A quantised tensor (N,C), and what is measured while it is written.
template <class F> struct Fp8Tensor {
    F* rows;            // (N,C)
    F* columns;         // (C,N), or NULL
    bool in_order;      // the order of the tokens in `columns`: as they come, or 0 8 1 9 ... in each group of 16
    const float* scale; // one float
    float* amax;        // one float, 0 or more
    int* num_saturated; // one int
};

// The token, within a group of 16, that is stored at `place`.
__host__ __device__ inline int fp8_token(int place, bool in_order) {
    return in_order ? place : place / 2 + place % 2 * 8;
}

// What a thread has seen so far.
template <class F> struct Fp8Seen {
    float scale;
    uint32_t amax = 0; // the bits of the largest |x|
    int num_saturated = 0;

    __device__ Fp8Seen(const Fp8Tensor<F>& t) : scale(__ldg(t.scale)) {}
    // returns x * scale
    __device__ float scaled(float x) {
        amax = max(amax, __float_as_uint(x) & 0x7FFFFFFFu);
        float y = x * scale;
        num_saturated += fabsf(y) > Fp8<F>::LARGEST;
        return y;
    }
    // Quantises n values, n a multiple of 4, into n / 4 words.
    template <int n> __device__ void quantise(uint32_t (&words)[n / 4], const float (&x)[n]) {
#pragma unroll
        for (int i = 0; i < n / 4; i++) {
            words[i] = Fp8<F>::pack(scaled(x[4 * i]), scaled(x[4 * i + 1]), scaled(x[4 * i + 2]), scaled(x[4 * i + 3]));
        }
    }
    // Quantises a vector and stores it to `to`. words: the same, for the caller.
    __device__ void store_vector(F* to, uint32_t (&words)[x128::size / 4], const x128& vector) {
        float x[x128::size];
#pragma unroll
        for (int k = 0; k < x128::size; k++) { x[k] = (float)vector[k]; }
        quantise<x128::size>(words, x);
        if constexpr (x128::size == 8) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        } else {
            *reinterpret_cast<uint32_t*>(to) = words[0];
        }
    }
    // Adds what all threads of the block have seen to the tensor's. All threads call it, with whole warps.
    __device__ void store(const Fp8Tensor<F>& t) {
        __shared__ uint32_t maxima[32];
        __shared__ int counts[32];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
        reduce_warp();
        if (lane == 0) { maxima[warp] = amax, counts[warp] = num_saturated; }
        __syncthreads();
        if (warp > 0) { return; }
        amax = lane < num_warps ? maxima[lane] : 0, num_saturated = lane < num_warps ? counts[lane] : 0;
        store_warp(t);
    }
    // The same for the threads of a warp, all of which call it.
    __device__ void store_warp(const Fp8Tensor<F>& t) {
        reduce_warp();
        if (threadIdx.x % 32 > 0) { return; }
        atomicMax(reinterpret_cast<unsigned*>(t.amax), amax);
        if (num_saturated > 0) { atomicAdd(t.num_saturated, num_saturated); }
    }
    __device__ void reduce_warp() {
        for (int offset = 16; offset > 0; offset /= 2) {
            amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
            num_saturated += __shfl_xor_sync(0xFFFFFFFFu, num_saturated, offset);
        }
    }
};

// ---- a tile of 64 tokens, transposed as pairs of tokens -------------------------------------------------------------
// In shared memory a row is a pair of tokens; each 16 bits are the two tokens' values of one column. Pair p of group g
// (of 16 tokens) is row 8g + p. A row has 16 bytes of padding, and a group 32 more, so that the rows that ldmatrix
// reads at once (below) are in different groups of 4 banks.
//
//     columns         0      1      2    ...                     the token order 0 8 1 9 ...: a is token p, b is p + 8
//     row 0         a0 b0  a1 b1  a2 b2  ...                     in order: a is token 2p, b is 2p + 1
//     row 1         a0 b0  a1 b1  ...

constexpr int FP8_TILE_TOKENS = 64, FP8_TILE_PAIRS = 32;

__host__ __device__ inline int fp8_tile_row_bytes(int columns) { return 2 * columns + 16; }
__host__ __device__ inline int fp8_tile_bytes(int columns) {
    return FP8_TILE_PAIRS * fp8_tile_row_bytes(columns) + FP8_TILE_PAIRS / 8 * 32;
}
// Where a tile has the pair of columns from `column` on.
__device__ inline unsigned char* fp8_tile_at(unsigned char* tile, int pair, int column, int columns) {
    return tile + pair * fp8_tile_row_bytes(columns) + pair / 8 * 32 + 2 * column;
}
// The first token of a pair, within the tile, and how far the second one is from it.
__device__ inline int fp8_first_token(int pair, bool in_order) {
    return pair / 8 * 16 + (in_order ? pair % 8 * 2 : pair % 8);
}
__device__ inline int fp8_pair_distance(bool in_order) { return in_order ? 1 : 8; }

// Packs 8 columns of two tokens, each 8 bytes, into the 16 bytes that a tile has of them.
__device__ inline uint4 fp8_pair(const uint32_t (&a)[2], const uint32_t (&b)[2]) {
    return make_uint4(__byte_perm(a[0], b[0], 0x5140), __byte_perm(a[0], b[0], 0x7362), __byte_perm(a[1], b[1], 0x5140),
                      __byte_perm(a[1], b[1], 0x7362));
}

// A warp stores 8 columns of the tile, from `column` of the tile on, to `to`, the tile's first byte in the tensor's
// `columns`: rows of N bytes. ldmatrix loads four matrices of 8 pairs and 8 columns, and transposes them. A lane gets two
// pairs of one column from each. Which pairs a matrix has is free: here rows 2t and 2t + 1 of matrix m are pairs 2m and
// 2m + 1 of group t, so lane t of a quad gets all 16 tokens of group t.
__device__ inline void fp8_store_columns(__nv_fp8_storage_t* to, unsigned char* tile, int column, int columns,
                                         int num_columns, int num_tokens, int N) {
    int lane = threadIdx.x % 32, row = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    uint32_t tokens[4];
    ldmatrix_x4_trans(tokens, fp8_tile_at(tile, row, column, columns));
    int c = column + lane / 4, group = lane % 4;
    if (c < num_columns && 16 * group < num_tokens) {
        *reinterpret_cast<uint4*>(to + (size_t)c * N + 16 * group) =
            make_uint4(tokens[0], tokens[1], tokens[2], tokens[3]);
    }
}

// ---- checks ---------------------------------------------------------------------------------------------------------

// How far a result may be from x before it is rounded.
inline float fp8_off(float x, Tolerance tolerance, double factor) {
    return std::isfinite(x) ? (float)factor * (tolerance.atol + tolerance.rtol * fabsf(x)) : 0.0f;
}
// What a kernel stores for x.
inline float fp8_of(float x, float scale, bool is_e5m2) { return fp8_round_cpu((float)(floatX)x * scale, is_e5m2); }

// Declares a quantised output of n values. The reference writes the exact values to its .host, unscaled. A result is right
// if the CPU gets it from a number within `tolerance` of the exact one: with a tolerance of 0 it must have the same bits,
// otherwise it may only differ where two results are that close to the exact value.
template <class F>
Buffer<F> fp8_output(Bench& b, const char* name, size_t n, Buffer<float> scale, Tolerance tolerance) {
    Buffer<F> x = b.output<F>(name, n, tolerance);
    if (b.dry) { return x; }
    b.state.buffers.back().compare = [=](double factor, std::string* wrong) {
        std::vector<F> out(n);
        cudaCheck(cudaMemcpy(out.data(), x.dev, n, cudaMemcpyDeviceToHost));
        std::atomic<size_t> bad{0}, worst{0};
        bench_pieces(n, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) {
                float want = x.host[i], got = (float)out[i], s = scale.host[0];
                if (bench_is_left_out(want)) { // see Bench::sample
                    if (!std::isfinite(got)) { bad++, worst = i; }
                    continue;
                }
                float off = fp8_off(want, tolerance, factor);
                float low = fp8_of(want - off, s, Fp8<F>::IS_E5M2), high = fp8_of(want + off, s, Fp8<F>::IS_E5M2);
                if (!(low <= got && got <= high)) { bad++, worst = i; }
            }
        });
        if (bad > 0) {
            char text[256];
            size_t i = worst;
            snprintf(text, sizeof(text), "%s: %zu of %zu wrong, one at %zu: got %.9g, want %.9g", name, (size_t)bad, n,
                     i, (double)(float)out[i], (double)fp8_of(x.host[i], scale.host[0], Fp8<F>::IS_E5M2));
            *wrong += (wrong->empty() ? "" : "; ") + std::string(text);
        }
        return bad > 0 ? (double)INFINITY : 0.0;
    };
    return x;
}

// Declares num_saturated, which starts at 3, for the output `x` (n) of fp8_output().
template <class F>
Buffer<int> fp8_num_saturated(Bench& b, Buffer<F> x, size_t n, Buffer<float> scale, Tolerance tolerance) {
    Buffer<int> start = b.input_from<int>("num_saturated_start", 1, [](float* host) { host[0] = 3; });
    Buffer<int> count = b.inout<int>("num_saturated", 1, start, {0, 0});
    if (b.dry) { return count; }
    b.state.buffers.back().compare = [=](double factor, std::string* wrong) {
        int got;
        std::atomic<int> least{3}, most{3};
        cudaCheck(cudaMemcpy(&got, count.dev, sizeof(got), cudaMemcpyDeviceToHost));
        bench_pieces(n, [&](size_t begin, size_t end) {
            int sure = 0, possible = 0; // of this piece
            for (size_t i = begin; i < end; i++) {
                float want = fabsf(x.host[i]), off = fp8_off(want, tolerance, factor);
                bool left_out = bench_is_left_out(x.host[i]);
                sure += !left_out && (float)(floatX)(want - off) * scale.host[0] > Fp8<F>::LARGEST;
                possible += left_out || (float)(floatX)(want + off) * scale.host[0] > Fp8<F>::LARGEST;
            }
            least += sure, most += possible;
        });
        if (least <= got && got <= most) { return 0.0; }
        char text[128];
        snprintf(text, sizeof(text), "num_saturated: got %d, want %d to %d", got, (int)least, (int)most);
        *wrong += (wrong->empty() ? "" : "; ") + std::string(text);
        return (double)INFINITY;
    };
    return count;
}

// Declares amax, which starts at 2^-20. The reference calls fp8_amax_cpu(). tolerance: of values that are not yet rounded to
// floatX; 0: amax must be equal.
inline Buffer<float> fp8_amax(Bench& b, Tolerance tolerance) {
    if (tolerance.rtol > 0) { tolerance.rtol += ulp_of<floatX>(); }
    Buffer<float> start = b.input_from<float>("amax_start", 1, [](float* host) { host[0] = 0x1p-20f; });
    return b.inout<float>("amax", 1, start, tolerance);
}
inline void fp8_amax_cpu(float* amax, const float* x, size_t n) {
    std::vector<float> largest(ceil_div(n, (size_t)4096), 0x1p-20f);
    parallel_for(largest.size(), [&](size_t piece) {
        for (size_t i = piece * 4096; i < std::min(n, (piece + 1) * 4096); i++) {
            largest[piece] = fmaxf(largest[piece], fabsf((float)(floatX)x[i]));
        }
    });
    *amax = *std::max_element(largest.begin(), largest.end());
}
// columns (C,N) = rows (N,C) transposed, each group of 16 tokens in the order of fp8_token()
inline void fp8_transpose_cpu(float* columns, const float* rows, int N, int C, bool in_order) {
    parallel_for(C, [=](size_t c) {
        for (int place = 0; place < N; place++) {
            int token = place / 16 * 16 + fp8_token(place % 16, in_order);
            columns[c * N + place] = rows[(size_t)token * C + c];
        }
    });
}
