/*
layernorm_quantize: to = the layernorm of residual (N,C) = inp + inp2 in e4m3; residual and inp2 may be NULL: that of inp | unquantized
(N,C), or NULL: the same before it is quantised | mean, rstd (N)
Constraint: C % 16 == 0, C <= 1792; with columns N % 16 == 0.
Kernels 2 (rows) and 3 (rows and columns) of layernorm_quantize.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/fp8.cuh"
#include "../../llmc/profile.cuh"
#include <cuda_fp8.h>

// ==== promoted: layernorm_quantize ====
typedef __nv_fp8_e4m3 F8;

struct LayernormQuantizeArgs {
    Fp8Tensor<F8> to;
    floatX* unquantized; // (N,C), or NULL
    floatX* residual;    // (N,C) = inp + inp2, of which the layernorm is taken; or NULL: that of inp
    float *mean, *rstd;  // (N)
    const floatX *inp, *inp2, *weight, *bias;
    int N, C;
    float epsilon;
};

#if !defined(ENABLE_FP32) // a vector is 8 elements
// ---- kernel 2: one warp per row, the row in registers; quantised on the way to memory ----

// The layernorm of a row of num_vecs vectors per lane, the last of which may be past the row's end; in place.
template <int num_vecs> __device__ inline void layernorm_quantize_row(x128 (&x)[num_vecs], float* mean, float* rstd,
                                                                      const LayernormQuantizeArgs& q, int row) {
    int first = threadIdx.x % 32 * x128::size;
    auto inside = [&](int j) { return j < num_vecs - 1 || first + j * 256 < q.C; };
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        size_t i = (size_t)row * q.C + first + j * 256;
        x[j] = inside(j) ? load128(q.inp + i) : x128();
        if (!q.residual || !inside(j)) { continue; }
        x128 y = load128(q.inp2 + i);
        for (int k = 0; k < x128::size; k++) { x[j][k] = (floatX)((float)x[j][k] + (float)y[k]); }
        store128(q.residual + i, x[j]);
    }
    float2 statistics = layernorm_statistics(
        x, [&](float sum) { return sum / q.C; }, q.epsilon, inside);
    float m = statistics.x, r = statistics.y;
    if (threadIdx.x % 32 == 0) { *mean = m, *rstd = r; }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (!inside(j)) { continue; }
        x128 w = load128(q.weight + first + j * 256), b = load128(q.bias + first + j * 256);
        for (int k = 0; k < x128::size; k++) {
            x[j][k] = (floatX)(((float)x[j][k] - m) * r * (float)w[k] + (float)b[k]);
        }
    }
}

template <int num_vecs> __global__ void __launch_bounds__(512) layernorm_quantize_kernel2(LayernormQuantizeArgs q) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = threadIdx.x % 32 * x128::size;
    Fp8Seen<F8> seen(q.to);
    if (row < q.N) {
        x128 x[num_vecs];
        layernorm_quantize_row(x, q.mean + row, q.rstd + row, q, row);
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            size_t i = (size_t)row * q.C + first + j * 256;
            uint32_t words[2];
            if (first + j * 256 >= q.C) { continue; }
            seen.store_vector(q.to.rows + i, words, x[j]);
            if (q.unquantized) { store128(q.unquantized + i, x[j]); }
        }
    }
    seen.store(q.to);
}

// Calls launch(n) with the vectors per lane that a row of C needs, as a constant.
template <class Launch> static void layernorm_quantize_vectors(int C, Launch launch) {
    require(C % 16 == 0);
    with_constant<7>(ceil_div(C, 256), launch); // C <= 1792
}

static void layernorm_quantize2(const LayernormQuantizeArgs& q, const Execution& exec, int block_size) {
    require(!q.to.columns && block_size <= 512);
    layernorm_quantize_vectors(q.C, [&](auto num_vecs) {
        auto kernel = layernorm_quantize_kernel2<decltype(num_vecs)::value>;
        launch_kernel(kernel, LaunchShape(ceil_div(q.N, block_size / 32), block_size), exec, q);
    });
}

// ---- kernel 3: 2 with the transposed copy: a block has 64 tokens, a warp takes pairs of them, see fp8.cuh ----

template <int num_vecs> __global__ void __launch_bounds__(512) layernorm_quantize_kernel3(LayernormQuantizeArgs q) {
    extern __shared__ __align__(128) unsigned char layernorm_quantize_tile[]; // fp8_tile_bytes(C)
    int first_token = blockIdx.x * FP8_TILE_TOKENS, first = threadIdx.x % 32 * x128::size;
    int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    Fp8Seen<F8> seen(q.to);
#pragma unroll 1
    for (int pair = warp; pair < FP8_TILE_PAIRS; pair += num_warps) {
        int token = first_token + fp8_first_token(pair, q.to.in_order);
        uint32_t words[2][num_vecs][2] = {};
        if (token < q.N) { // both of the pair, because N % 16 == 0
#pragma unroll
            for (int second = 0; second < 2; second++) {
                int row = token + second * fp8_pair_distance(q.to.in_order);
                x128 x[num_vecs];
                layernorm_quantize_row(x, q.mean + row, q.rstd + row, q, row);
#pragma unroll
                for (int j = 0; j < num_vecs; j++) {
                    if (first + j * 256 >= q.C) { continue; }
                    seen.store_vector(q.to.rows + (size_t)row * q.C + first + j * 256, words[second][j], x[j]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (first + j * 256 >= q.C) { continue; }
            *reinterpret_cast<uint4*>(fp8_tile_at(layernorm_quantize_tile, pair, first + j * 256, q.C)) =
                fp8_pair(words[0][j], words[1][j]);
        }
    }
    __syncthreads();
    auto* to = reinterpret_cast<__nv_fp8_storage_t*>(q.to.columns) + first_token;
    for (int c = 8 * warp; c < q.C; c += 8 * num_warps) {
        fp8_store_columns(to, layernorm_quantize_tile, c, q.C, q.C, q.N - first_token, q.N);
    }
    seen.store(q.to);
}

static void layernorm_quantize3(const LayernormQuantizeArgs& q, const Execution& exec, int block_size) {
    require(q.to.columns && !q.unquantized && q.N % 16 == 0 && block_size <= 512);
    layernorm_quantize_vectors(q.C, [&](auto num_vecs) {
        auto kernel = layernorm_quantize_kernel3<decltype(num_vecs)::value>;
        launch_kernel(kernel, LaunchShape(ceil_div(q.N, FP8_TILE_TOKENS), block_size, fp8_tile_bytes(q.C)), exec, q);
    });
}

void layernorm_quantize(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* unquantized, floatX* residual, float* mean,
                        float* rstd, const floatX* inp, const floatX* inp2, const floatX* weight, const floatX* bias,
                        int N, int C, float epsilon, const Execution& exec) {
    Op op(exec, (double)N * C * ((inp2 ? 3 : 1) * sizeof(floatX) + (unquantized ? 2 : 0) + (to.columns ? 2 : 1)), 0,
          "layernorm_quantize");
    LayernormQuantizeArgs q = {to, unquantized, residual, mean, rstd, inp, inp2, weight, bias, N, C, epsilon};
    to.columns ? layernorm_quantize3(q, exec, 256) : layernorm_quantize2(q, exec, 256);
}
#endif
// ==== end promoted: layernorm_quantize ====
