/*
matmul_forward: out (N,OC) = gelu?(inp (N,C) weight (OC,C)^T + bias (OC)) + residual (N,OC); bias and residual may be NULL
matmul_forward_float: out (N,OC) float = inp weight^T
matmul_forward_residual: out = inp weight^T + bias + residual, rounded once; product (N,OC) float is scratch
Constraint: C % 8 == 0, OC % 8 == 0; not both GELU and a residual; GELU needs a bias.
Kernels 25 (cuBLASLt, then the residual), 26 (cuBLASLt) and 27 (gemm) of matmul_forward.cu, which has the other kernels, errors and
sources.
*/
#pragma once

#include "../../llmc/adamw_state.cuh"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "gelu_forward.cuh"
#include "gemm.cuh"
#include "gemm_adamw.cuh"

// ==== promoted: matmul_forward ====
// ---- products in float, which kernel 25 uses, too: cuBLASLt without an epilogue ----

// out (N,OC) float = inp (N,C) weight (OC,C)^T, by cuBLASLt: for logits, which are not rounded to 16 bits
void matmul_forward_float(float* out, const floatX* inp, const floatX* weight, int N, int C, int OC,
                          const Execution& exec) {
    Op op(exec, ((double)N * C + (double)OC * C) * sizeof(floatX) + (double)N * OC * sizeof(float), 2.0 * N * C * OC,
          "matmul_forward %d -> %d, in float", C, OC);
    MatmulCall call;
    call.out = out, call.out_is_float = true;
    call.a = inp, call.b = weight, call.b_transposed = true;
    call.M = N, call.N = OC, call.K = C;
    require(cublaslt_matmul(call, exec));
}

// out (N,OC) = product (N,OC) + bias (OC) + residual (N,OC). A thread per vector.
__global__ void matmul_forward_add_kernel25(floatX* out, const float* product, const floatX* bias,
                                            const floatX* residual, int N, int OC) {
    grid_launch_dependents();
    grid_wait_dependency();
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= (size_t)N * OC) { return; }
    auto b = to_floats(load128(bias + i % OC)), r = to_floats(load128(residual + i));
    x128 y;
#pragma unroll
    for (int k = 0; k < x128::size; k += 4) {
        f128 part = load128cs(product + i + k);
        for (int j = 0; j < 4; j++) { y[k + j] = (floatX)(part[j] + b[k + j] + r[k + j]); }
    }
    store128(out + i, y);
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC) + residual (N,OC), rounded once, where cuBLASLt rounds the product to floatX
// before it adds the residual. product (N,OC) is scratch; residual may be out.
void matmul_forward_residual(floatX* out, float* product, const floatX* inp, const floatX* weight, const floatX* bias,
                             const floatX* residual, int N, int C, int OC, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    require(OC % 8 == 0);
    matmul_forward_float(product, inp, weight, N, C, OC, exec);
    unsigned num_blocks = (unsigned)ceil_div((size_t)N * OC, (size_t)block_size * x128::size);
    Op op(exec, (double)N * OC * (sizeof(float) + 2 * sizeof(floatX)), 0, "add_residual %d", OC);
    launch_early(matmul_forward_add_kernel25, num_blocks, block_size, 0, exec, out, (const float*)product, bias,
                 residual, N, OC);
}

// ---- kernel 26: cuBLASLt, everything in the epilogue, algorithms timed once per shape ----

// Arguments as for matmul_forward.
void matmul_forward26(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                      const floatX* residual, int N, int C, int OC, const Execution& exec) {
    require(!saved.is_slope);
    MatmulCall call;
    call.out = out;
    call.a = inp, call.b = weight, call.b_transposed = true;
    call.M = N, call.N = OC, call.K = C;
    call.bias = bias;
    call.add = residual;
    if (saved.has_gelu() && sizeof(floatX) == 2) { // in fp32 the library's GELU would dominate the error
        call.epilogue = saved.tensor ? MATMUL_GELU_AUX : MATMUL_GELU;
        call.aux = saved.tensor;
        if (cublaslt_matmul(call, exec)) { return; }
    }
    call.epilogue = MATMUL_PLAIN;
    call.aux = NULL;
    floatX* sum = saved.tensor ? saved.tensor : out;
    call.out = sum;
    require(cublaslt_matmul(call, exec));
    if (saved.has_gelu()) { gelu_forward(out, sum, (size_t)N * OC, exec); }
}
// ---- kernel 27: gemm.cuh: kernel 24 with the bias loaded while the products run, and four boxes per warp ----
// The form is a type, so that other ops can have kernels of their own. matmul_forward() uses it where it is faster than
// kernel 26. gemm_sm90_kernel9 has its name from a shorter ladder.

#if !defined(ENABLE_FP32)
// Runs gemm, and in its idle warps the deferred update, if exec has one.
template <class Epilogue> void matmul_forward_gemm(const GemmArgs& g, const Epilogue& epilogue, const Execution& exec) {
    if (exec.update && exec.update->is_pending()) { return gemm(g, epilogue, exec, DeferredUpdateWork{*exec.update}); }
    gemm(g, epilogue, exec);
}
void matmul_forward27(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                      const floatX* residual, int N, int C, int OC, const Execution& exec) {
    GemmArgs g = {out, saved.tensor, inp, weight, residual, N, OC, C};
    if (saved.is_slope) { return matmul_forward_gemm(g, GemmBias<GEMM_GELU | GEMM_SECOND | GEMM_SLOPE>{bias}, exec); }
    if (saved.tensor) { return matmul_forward_gemm(g, GemmBias<GEMM_GELU | GEMM_SECOND>{bias}, exec); }
    // no backward pass will follow, so no update is pending
    if (saved.has_gelu()) { return gemm(g, GemmBias<GEMM_GELU>{bias}, exec); }
    if (residual) { return matmul_forward_gemm(g, GemmBias<GEMM_ADD>{bias}, exec); }
    matmul_forward_gemm(g, GemmBias<0>{bias}, exec);
}
#endif

// The number of the kernel to use for this device, binary and shape. Kernel 27 hides the epilogue of a tile behind the
// products of the next tile. This pays where C, the length of the sums, is not large, and where each block has two
// tiles or more.
inline int matmul_forward_choice(int N, int C, int OC) {
#if defined(ENABLE_FP32)
    (void)N, (void)C, (void)OC;
    return 26;
#else
    bool many = ceil_div((size_t)N, (size_t)128) * ceil_div(OC, 192) >= 2 * (size_t)num_multiprocessors();
    return C <= 2048 && many && has_sm90a() ? 27 : 26;
#endif
}

// out (N,OC) = gelu?(inp (N,C) weight (OC,C)^T + bias (OC)) + residual (N,OC), with GELU if saved.has_gelu(). saved.tensor (N,OC),
// which may be NULL, receives GELU's argument, or its slope, which needs kernel 27. bias and residual may be NULL. residual
// may be the same memory as out.
void matmul_forward(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                    const floatX* residual, int N, int C, int OC, const Execution& exec) {
    double outputs = (1.0 + (saved.tensor != NULL) + (residual != NULL)) * N * OC;
    const char* then = residual ? ", sum" : "";
    if (saved.has_gelu()) { then = ", gelu"; }
    Op op(exec, ((double)N * C + (double)OC * C + outputs) * sizeof(floatX), 2.0 * N * C * OC,
          "matmul_forward %d -> %d%s", C, OC, then);
    require(C % 8 == 0 && OC % 8 == 0);
    require(!saved.has_gelu() || (bias && !residual));
#if !defined(ENABLE_FP32)
    if (matmul_forward_choice(N, C, OC) == 27) {
        return matmul_forward27(out, saved, inp, weight, bias, residual, N, C, OC, exec);
    }
#endif
    matmul_forward26(out, saved, inp, weight, bias, residual, N, C, OC, exec);
}
// ==== end promoted: matmul_forward ====
