/*
mean_loss: mean (1) float += scale * the sum of losses (N) float. fused_classifier.cu checks it.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"

// ==== promoted: mean_loss ====
// A single block adds all losses, so that the order of the sum is fixed. It takes a few microseconds for 64 KB.
__global__ void __launch_bounds__(1024) mean_loss_kernel1(float* mean, const float* losses, int N, float scale) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < N; i += blockDim.x) { sum += losses[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { *mean += sum * scale; }
}

// mean (1) += scale * sum(losses) | losses (N) | scale: 1 / the tokens of a step, on all ranks
void mean_loss(float* mean, const float* losses, int N, float scale, const Execution& exec) {
    Op op(exec, (double)N * sizeof(float), 0, "mean_loss");
    launch_kernel(mean_loss_kernel1, LaunchShape(1, 1024), exec, mean, losses, N, scale);
}
// ==== end promoted: mean_loss ====
