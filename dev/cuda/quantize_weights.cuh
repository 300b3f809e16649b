/*
quantize_weights: values (num_rows,K) in 8 bits, scales (num_rows) | weight (num_rows,K) floatX inout: rounded to values * scales
llmc/weight_matrix.cuh has the formats. decode_matvec.cu checks it.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/weight_matrix.cuh"
#include <cuda_fp8.h>

// ==== promoted: quantize_weights ====
// One warp per row. The maximum is taken of the bits of |weight|, in whose order infinity and NaN are above all
// numbers.
template <class W>
__global__ void quantize_weights_kernel1(W* values, float* scales, floatX* weight, size_t num_rows, int K) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (row >= num_rows) { return; }
    uint32_t bits = 0;
    for (int k = lane; k < K; k += 32) { bits = max(bits, __float_as_uint((float)weight[row * K + k]) & 0x7FFFFFFFu); }
    bits = lanes_max<32>(bits);
    // a row without a weight of 2^-100 or more is a row of zeros; divisions are IEEE's, also with --use_fast_math
    float largest = __uint_as_float(bits), scale = 1.0f;
    if (!(largest < 0x1p-100f)) { scale = __fdiv_rn(largest, weight_largest(W())); }
    if (lane == 0) { scales[row] = scale; }
    for (int k = lane; k < K; k += 32) {
        size_t i = row * K + k;
        W value = weight_rounded(__fdiv_rn((float)weight[i], scale), W());
        values[i] = value;
        weight[i] = (floatX)((float)value * scale);
    }
}

// values (num_rows,K) of the format, scales (num_rows) | weight (num_rows,K) inout: rounded to values * scales. A row
// with NaN or infinity has a scale of NaN or infinity, and becomes NaN.
void quantize_weights(void* values, float* scales, floatX* weight, WeightFormat format, size_t num_rows, int K,
                      const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    double bytes = (double)num_rows * K * (2 * sizeof(floatX) + 1) + (double)num_rows * sizeof(float);
    Op op(exec, bytes, 0, "quantize_weights");
    require(format != WEIGHTS_FULL && block_size % 32 == 0);
    size_t blocks = ceil_div(num_rows, (size_t)block_size / 32);
    auto launch = [&](auto kernel, auto* to) {
        launch_kernel(kernel, LaunchShape(blocks, block_size), exec, to, scales, weight, num_rows, K);
    };
    format == WEIGHTS_INT8 ? launch(quantize_weights_kernel1<int8_t>, (int8_t*)values)
                           : launch(quantize_weights_kernel1<__nv_fp8_e4m3>, (__nv_fp8_e4m3*)values);
}
// ==== end promoted: quantize_weights ====
