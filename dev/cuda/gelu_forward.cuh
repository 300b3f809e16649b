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
    bool is_gelu = kind == ACT_GELU_TANH && !slope;
    int block_size = tuned_block_size(exec, "gelu_forward", n, 1, 128);
    Op op(exec, (slope ? 3.0 : 2.0) * n * sizeof(floatX), 0, "%s_forward", is_gelu ? "gelu" : "activation");
    require(n % x128::size == 0);
    LaunchShape shape(ceil_div(n, (size_t)x128::size * block_size), block_size);
    if (is_gelu) { return launch_kernel(gelu_forward_kernel2, shape, exec, out, inp, n); }
    with_activation(
        kind, [&](auto k) { launch_kernel(activation_forward_kernel2<k.value>, shape, exec, out, slope, inp, n); });
}
// out (n) = gelu(inp (n)); out may be inp
void gelu_forward(floatX* out, const floatX* inp, size_t n, const Execution& exec) {
    activation_forward(out, NULL, inp, n, ACT_GELU_TANH, exec);
}
// ==== end promoted: gelu_forward ====
