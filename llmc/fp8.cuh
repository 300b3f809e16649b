/*
fp8: tensors in 8 bits for tensor cores, e4m3 or e5m2 (type F below). A tensor stands for its stored values divided by a scale,
one float for the whole tensor:

    out = F(x * scale)              rounded to nearest, ties to even; beyond the largest number, the largest number
    amax = max(amax, max |x|)       from which the next scale is made

Values have saturated if amax * scale is beyond the largest number: 448 in e4m3, 57344 in e5m2. amax does not depend on
the order of the threads. It leaves NaN out, which stays NaN in both formats; infinity becomes the largest number.

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

#include "cuda_common.cuh"
#include "ptx.cuh"

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
};

// One operand of a product in fp8: rows, or columns, of a quantised tensor.
template <class F> struct Fp8Matrix {
    const F* values;
    const float* inverse; // what a stored 1 stands for; one float, aligned to 16 bytes, as cuBLASLt wants it
};

// The token, within a group of 16, that is stored at `place`.
__host__ __device__ inline int fp8_token(int place, bool in_order) {
    return in_order ? place : place / 2 + place % 2 * 8;
}

// What a thread has seen so far.
template <class F> struct Fp8Seen {
    float scale, amax = 0.0f;

    __device__ Fp8Seen(const Fp8Tensor<F>& t) : scale(__ldg(t.scale)) {}
    // returns x * scale
    __device__ float scaled(float x) {
        amax = fmaxf(amax, fabsf(x));
        return x * scale;
    }
    // Quantises n values, n a multiple of 4, into n / 4 words.
    template <int n> __device__ void quantize(uint32_t (&words)[n / 4], const float (&x)[n]) {
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
        quantize<x128::size>(words, x);
        if constexpr (x128::size == 8) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        } else {
            *reinterpret_cast<uint32_t*>(to) = words[0];
        }
    }
    // Adds what all threads of the block have seen to the tensor's. All threads call it, with whole warps.
    __device__ void store(const Fp8Tensor<F>& t) {
        __shared__ float shared[32];
        float largest = block_max(amax, shared);
        if (threadIdx.x == 0) { store_maximum(t, largest); }
    }
    // The same for the threads of a warp, all of which call it.
    __device__ void store_warp(const Fp8Tensor<F>& t) {
        float largest = warp_max(amax);
        if (threadIdx.x % 32 == 0) { store_maximum(t, largest); }
    }
    // The bits of numbers that are not negative have the order of the numbers.
    __device__ void store_maximum(const Fp8Tensor<F>& t, float largest) {
        atomicMax(reinterpret_cast<unsigned*>(t.amax), __float_as_uint(largest));
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
