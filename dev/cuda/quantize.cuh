/*
quantize, quantize_gelu, quantize_gelu_backward, quantize_dlogits: `to` (N,C), an Fp8Tensor of llmc/fp8.cuh, is written as rows,
and as columns unless these are NULL; its amax is raised | see the comment at each launcher
Constraint: C % 16 == 0, N % 16 == 0.
Kernels 3 (rows) and 5 (rows and columns) of quantize.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/fp8.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "gelu_backward.cuh"
#include "gelu_forward.cuh"
#include <algorithm>
#include <cuda_fp8.h>
#include <limits.h>

// ==== promoted: quantize ====
// ---- shared by the kernels: what is quantised, and where it goes ----

// f(inp) rounded to floatX: the vector that begins with element i.
struct QuantizeCopy {
    const floatX* inp; // (N,C)
    __device__ x128 vector(size_t i) const { return load128(inp + i); }
};
struct QuantizeGelu {
    const floatX* inp;
    __device__ x128 vector(size_t i) const { return gelu_forward_vector(load128(inp + i)); }
};
struct QuantizeGeluBackward {
    const floatX *dout, *inp;
    __device__ x128 vector(size_t i) const { return gelu_backward_vector(load128(dout + i), load128(inp + i)); }
};

// The gradients of logits whose losses are known: (softmax - onehot(target)) * dloss over the first V of C columns, else 0.
struct QuantizeDlogits {
    const floatX* logits; // (N,C)
    const float* losses;  // (N) = log(sum of exp(logits)) - logits[target]
    const int* targets;   // (N)
    const float* dloss;   // (1)
    int V;
    __device__ floatX value(floatX logit, int c, int target, float lse, float scale) const {
        float p = c < V ? expf((float)logit - lse) : 0.0f;
        return (floatX)((p - (c == target ? 1.0f : 0.0f)) * scale);
    }
};

template <class F> struct QuantizeArgs {
    Fp8Tensor<F> to;
    floatX* unquantized; // (N,C), or NULL
    int N, C;
};

// The vector at (row, column) of what is quantised.
template <class Source> __device__ x128 quantize_vector(const Source& source, int row, int column, int C) {
    return source.vector((size_t)row * C + column);
}
__device__ inline x128 quantize_vector(const QuantizeDlogits& s, int row, int column, int C) {
    const floatX* logits = s.logits + (size_t)row * C;
    int target = __ldg(s.targets + row);
    float lse = __ldg(s.losses + row) + (float)logits[target], scale = __ldg(s.dloss);
    x128 x = load128(logits + column);
#pragma unroll
    for (int k = 0; k < x128::size; k++) { x[k] = s.value(x[k], column + k, target, lse, scale); }
    return x;
}

// ---- kernel 3: persistent, as many blocks as fit on the GPU at once, so there are few atomics ----

template <class F, class Source> __global__ void quantize_kernel3(QuantizeArgs<F> q, Source source) {
    Fp8Seen<F> seen(q.to);
    size_t n = (size_t)q.N * q.C, stride = (size_t)gridDim.x * blockDim.x * x128::size;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size; i < n; i += stride) {
        x128 x = source.vector(i);
        uint32_t words[x128::size / 4];
        seen.store_vector(q.to.rows + i, words, x);
        if (q.unquantized) { store128(q.unquantized + i, x); }
    }
    seen.store(q.to);
}

template <class F, class Source>
void quantize3(const QuantizeArgs<F>& q, const Source& source, const Execution& exec, int block_size) {
    require(q.C % 16 == 0 && !q.to.columns);
    int per_sm;
    auto kernel = quantize_kernel3<F, Source>;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, block_size, 0));
    size_t most = ceil_div((size_t)q.N * q.C, (size_t)x128::size * block_size);
    int num_blocks = (int)std::min(most, (size_t)exec.free_sms() * per_sm);
    launch_kernel(kernel, LaunchShape(num_blocks, block_size), exec, q, source);
}

#if !defined(ENABLE_FP32)
// ---- kernel 5: the transposed copy by pairs of tokens: 16 bits, which ldmatrix transposes; tiles of 64x256 ----

struct QuantizeSMem {
    static constexpr int COLUMNS = 256;
    unsigned char tile[FP8_TILE_PAIRS * (2 * COLUMNS + 16) + FP8_TILE_PAIRS / 8 * 32]; // fp8_tile_bytes(COLUMNS)
};

template <class F, class Source> __global__ void __launch_bounds__(512)
    quantize_kernel5(QuantizeArgs<F> q, Source source) {
    __shared__ alignas(16) QuantizeSMem shared;
    const int columns = QuantizeSMem::COLUMNS;
    int num_columns = ceil_div(q.C, columns), first_token = blockIdx.x / num_columns * FP8_TILE_TOKENS;
    int first_column = blockIdx.x % num_columns * columns;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32, column = first_column + 8 * lane;
    Fp8Seen<F> seen(q.to);
    for (int pair = warp; pair < FP8_TILE_PAIRS; pair += num_warps) {
        int token = first_token + fp8_first_token(pair, q.to.in_order);
        uint32_t words[2][2] = {};
        if (token < q.N && column < q.C) { // both of the pair, because N % 16 == 0
#pragma unroll
            for (int second = 0; second < 2; second++) {
                int row = token + second * fp8_pair_distance(q.to.in_order);
                size_t i = (size_t)row * q.C + column;
                x128 x = quantize_vector(source, row, column, q.C);
                seen.store_vector(q.to.rows + i, words[second], x);
                if (q.unquantized) { store128(q.unquantized + i, x); }
            }
        }
        *reinterpret_cast<uint4*>(fp8_tile_at(shared.tile, pair, 8 * lane, columns)) = fp8_pair(words[0], words[1]);
    }
    __syncthreads();
    auto* to = reinterpret_cast<__nv_fp8_storage_t*>(q.to.columns) + (size_t)first_column * q.N + first_token;
    for (int c = 8 * warp; c < columns; c += 8 * num_warps) {
        fp8_store_columns(to, shared.tile, c, columns, q.C - first_column, q.N - first_token, q.N);
    }
    seen.store(q.to);
}

template <class F, class Source>
void quantize5(const QuantizeArgs<F>& q, const Source& source, const Execution& exec, int block_size) {
    require(q.C % 16 == 0 && q.N % 16 == 0 && q.to.columns && block_size <= 512);
    size_t num_blocks =
        ceil_div((size_t)q.N, (size_t)FP8_TILE_TOKENS) * ceil_div((size_t)q.C, (size_t)QuantizeSMem::COLUMNS);
    require(num_blocks <= INT_MAX);
    auto kernel = quantize_kernel5<F, Source>;
    launch_kernel(kernel, LaunchShape(num_blocks, block_size), exec, q, source);
}

template <class F, class Source>
void quantize(const QuantizeArgs<F>& q, const Source& source, int num_inputs, const char* what, const Execution& exec) {
    size_t bytes = (num_inputs + (q.unquantized != NULL)) * sizeof(floatX) + (q.to.columns ? 2 : 1);
    Op op(exec, (double)bytes * q.N * q.C, 0, "quantize%s", what);
    q.to.columns ? quantize5(q, source, exec, 256) : quantize3(q, source, exec, 256);
}

void quantize(const Fp8Tensor<__nv_fp8_e4m3>& to, const floatX* inp, int N, int C, const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e4m3>{to, NULL, N, C}, QuantizeCopy{inp}, 1, "", exec);
}
void quantize(const Fp8Tensor<__nv_fp8_e5m2>& to, const floatX* inp, int N, int C, const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e5m2>{to, NULL, N, C}, QuantizeCopy{inp}, 1, "", exec);
}
void quantize_gelu(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* unquantized, const floatX* inp, int N, int C,
                   const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e4m3>{to, unquantized, N, C}, QuantizeGelu{inp}, 1, "_gelu", exec);
}
void quantize_gelu_backward(const Fp8Tensor<__nv_fp8_e5m2>& to, floatX* unquantized, const floatX* dout,
                            const floatX* inp, int N, int C, const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e5m2>{to, unquantized, N, C}, QuantizeGeluBackward{dout, inp}, 2, "_gelu_backward",
             exec);
}
void quantize_dlogits(const Fp8Tensor<__nv_fp8_e5m2>& to, const floatX* logits, const float* losses, const int* targets,
                      const float* dloss, int N, int V, int Vp, const Execution& exec) {
    require(to.columns);
    Op op(exec, (double)N * Vp * (sizeof(floatX) + 2), 0, "quantize_dlogits");
    QuantizeDlogits source = {logits, losses, targets, dloss, V};
    quantize5(QuantizeArgs<__nv_fp8_e5m2>{to, NULL, N, Vp}, source, exec, 256);
}
#endif
// ==== end promoted: quantize ====
