/*
residual_forward: out (n) = inp1 (n) + inp2 (n); out may be inp1 or inp2. Constraint: n % x128::size == 0, pointers aligned to 16
bytes. Kernel 2 of residual_forward.cu, for fused ops.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"

// ---- kernel 2: one 128-bit vector per thread; with 16-bit types that is 1/8 of the instructions ----

__global__ void residual_forward_kernel2(floatX* out, const floatX* inp1, const floatX* inp2, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    x128 a = load128(inp1 + i), b = load128(inp2 + i), sum;
    for (int k = 0; k < x128::size; k++) { sum[k] = (floatX)((float)a[k] + (float)b[k]); }
    store128(out + i, sum); // no streaming hint: the next kernel reads out, so as much of it as fits should stay in L2
}

// out (n) = inp1 (n) + inp2 (n); out may be inp1 or inp2
void residual_forward(floatX* out, const floatX* inp1, const floatX* inp2, size_t n, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    require(n >= 1 && n % x128::size == 0);
    size_t grid_size = ceil_div(n / x128::size, (size_t)block_size);
    launch_kernel(residual_forward_kernel2, LaunchShape(grid_size, block_size), exec, out, inp1, inp2, n);
}
