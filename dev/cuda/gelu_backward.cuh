/*
gelu_backward: dinp (n) = dout (n) * gelu'(inp (n)), tanh form; dinp may be dout
activation_backward: the same for every activation (llmc/activation.h)
Constraint: n % x128::size == 0.
Kernel 2 of gelu_backward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: gelu_backward ====
// ---- kernel 2: one 128-bit vector per thread --------------------------------------------------

template <Activation kind> __device__ x128 activation_backward_vector(const x128& dout, const x128& inp) {
    x128 dinp;
    for (int k = 0; k < x128::size; k++) { dinp[k] = (floatX)((float)dout[k] * activation_slope<kind>((float)inp[k])); }
    return dinp;
}
__device__ inline x128 gelu_backward_vector(const x128& dout, const x128& inp) {
    return activation_backward_vector<ACT_GELU_TANH>(dout, inp);
}

// no __restrict__, because dinp may be dout; that is safe, because each thread writes only elements that it has read
template <Activation kind>
__global__ void activation_backward_kernel2(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i < n) { store128(dinp + i, activation_backward_vector<kind>(load128(dout + i), load128(inp + i))); }
}

// dinp (n) = dout (n) times the derivative of the activation at inp (n); dinp may be dout
void activation_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, Activation kind,
                         const Execution& exec) {
    int block_size = tuned_block_size(exec, "gelu_backward", n, 1, 256);
    Op op(exec, 3.0 * n * sizeof(floatX), 0, "%s_backward", kind == ACT_GELU_TANH ? "gelu" : "activation");
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    with_activation(kind, [&](auto k) {
        launch_kernel(activation_backward_kernel2<k.value>, LaunchShape(num_blocks, block_size), exec, dinp, dout, inp,
                      n);
    });
}
// dinp (n) = dout (n) * gelu'(inp (n)); dinp may be dout
void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, const Execution& exec) {
    activation_backward(dinp, dout, inp, n, ACT_GELU_TANH, exec);
}
// ==== end promoted: gelu_backward ====
