/*
decode_embed: x (B,C) = wte[tokens (B)] + wpe[positions (B)] for one token of each text. decode_matvec.cu checks it.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"

// ==== promoted: decode_embed ====
// Token -1 means that decode_sample found no logit to draw (all were NaN or -inf); its embedding is NaN.
__global__ void decode_embed_kernel1(floatX* x, const int* tokens, const int* positions, const floatX* wte,
                                     const floatX* wpe, int C) {
    grid_launch_dependents(); // the next kernel may start and load its weights
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * x128::size, b = blockIdx.y;
    if (c >= C) { return; }
    int token = tokens[b];
    int position = max(positions[b], 0); // -1: the text has ended, and nothing reads its x
    x128 t = load128(wte + (size_t)max(token, 0) * C + c), p = load128(wpe + (size_t)position * C + c), sum;
    for (int e = 0; e < x128::size; e++) { sum[e] = (floatX)(token < 0 ? NAN : (float)t[e] + (float)p[e]); }
    store128(x + (size_t)b * C + c, sum);
}

// x (B,C) = wte[token] + wpe[position] | tokens (B) | positions (B) | wte (Vp,C) | wpe (T,C)
// The first kernel of a step. It is launched without overlap: when it starts, the previous step has ended. The other
// kernels of the step rely on that.
void decode_embed(floatX* x, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe, int B,
                  int C, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 128;
    Op op(exec, 3.0 * B * C * sizeof(floatX), 0, "decode_embed");
    require(B > 0 && B <= 65535 && C % x128::size == 0);
    dim3 grid(ceil_div(C / x128::size, block_size), B);
    launch_kernel(decode_embed_kernel1, LaunchShape(grid, block_size), exec, x, tokens, positions, wte, wpe, C);
}
// ==== end promoted: decode_embed ====
