/*
decode_cache_fill: the keys and values in qkv (B,T,3,C) become rows 0 to T-1 of keys, values (B,capacity,C). decode_attention.cu
checks it.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"

// ==== promoted: decode_cache_fill ====
__global__ void decode_cache_fill_kernel1(floatX* keys, floatX* values, const floatX* qkv, int T, int num_vec,
                                          int capacity, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    int v = i % num_vec, t = i / num_vec % T, b = i / num_vec / T;
    const floatX* from = qkv + (((size_t)b * T + t) * 3 * num_vec + v) * x128::size;
    size_t to = (((size_t)b * capacity + t) * num_vec + v) * x128::size;
    store128(keys + to, load128(from + (size_t)num_vec * x128::size));
    store128(values + to, load128(from + (size_t)2 * num_vec * x128::size));
}

// Copies the prompt's keys and values to the cache: rows 0 .. T-1 of keys, values (B,capacity,C) | qkv (B,T,3,C)
void decode_cache_fill(floatX* keys, floatX* values, const floatX* qkv, int B, int T, int C, int capacity,
                       const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    Op op(exec, 4.0 * B * T * C * sizeof(floatX), 0, "decode_cache_fill");
    require(B > 0 && T > 0 && T <= capacity && C % x128::size == 0);
    int num_vec = C / x128::size;
    size_t n = (size_t)B * T * num_vec;
    launch_kernel(decode_cache_fill_kernel1, LaunchShape(ceil_div(n, (size_t)block_size), block_size), exec, keys,
                  values, qkv, T, num_vec, capacity, n);
}
// ==== end promoted: decode_cache_fill ====
