/*
gelu_forward: out (n) = gelu(inp (n)), tanh form; out may be inp
activation_forward: the same for every activation (llmc/activation.h), also with its derivative
Constraint: n % x128::size == 0.
Kernel 2 of gelu_forward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: gelu_forward ====
// ---- kernel 2: one 128-bit vector per thread --------------------------------------------------

__device__ inline x128 gelu_forward_vector(const x128& x) {
    x128 y;
    for (int k = 0; k < x128::size; k++) { y[k] = (floatX)gelu((float)x[k]); }
    return y;
}

__global__ void gelu_forward_kernel2(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i < n) { store128(out + i, gelu_forward_vector(load128(inp + i))); }
}

// out (n) = gelu(inp (n)); out may be inp
void gelu_forward(floatX* out, const floatX* inp, size_t n, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : tuned_config(exec.tuned, "gelu_forward", n, 1, 128);
    Op op(exec, 2.0 * n * sizeof(floatX), 0, "gelu_forward");
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    launch_kernel(gelu_forward_kernel2, LaunchShape(num_blocks, block_size), exec, out, inp, n);
}

template <Activation kind>
__global__ void activation_forward_kernel2(floatX* out, floatX* slope, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i), y, slopes;
    for (int k = 0; k < x128::size; k++) {
        float s;
        y[k] = (floatX)activate_and_slope<kind>((float)x[k], &s);
        slopes[k] = (floatX)s;
    }
    store128(out + i, y);
    if (slope) { store128(slope + i, slopes); }
}

// out (n) = the activation of inp (n), and slope (n), which may be NULL, its derivative there; out or slope may be inp
void activation_forward(floatX* out, floatX* slope, const floatX* inp, size_t n, Activation kind,
                        const Execution& exec) {
    if (kind == ACT_GELU_TANH && !slope) { return gelu_forward(out, inp, n, exec); }
    const int block_size = 128;
    Op op(exec, (slope ? 3.0 : 2.0) * n * sizeof(floatX), 0, "activation_forward");
    require(n % x128::size == 0);
    with_activation(kind, [&](auto k) {
        launch_kernel(activation_forward_kernel2<k.value>,
                      LaunchShape(ceil_div(n, (size_t)x128::size * block_size), block_size), exec, out, slope, inp, n);
    });
}
// ==== end promoted: gelu_forward ====
