/*
Batched matrix products by cuBLAS, for the kernels 0 of the attention ops. The trainer's products are in
llmc/cublas_common.cuh.
*/
#pragma once

#include <cublas_v2.h>

#include "../../llmc/cublas_common.cuh"

inline cublasHandle_t cublas_handle() {
    static cublasHandle_t handle = NULL;
    if (!handle) { cublasCheck(cublasCreate(&handle)); }
    return handle;
}

// c[i] (m,n) = alpha op(a[i]) op(b[i]) + beta c[i] for i < num, column-major, with sums in fp32. Matrix i + 1 of an
// operand is its stride in elements after matrix i.
inline void cublas_batched(cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const float* alpha,
                           const void* a, cudaDataType_t a_type, int lda, long long stride_a, const void* b,
                           cudaDataType_t b_type, int ldb, long long stride_b, const float* beta, void* c,
                           cudaDataType_t c_type, int ldc, long long stride_c, int num, const Execution& exec) {
    profile().library_flops += 2.0 * m * n * k * num;
    cublasCheck(cublasSetStream(cublas_handle(), exec.stream));
    cublasCheck(cublasGemmStridedBatchedEx(cublas_handle(), op_a, op_b, m, n, k, alpha, a, a_type, lda, stride_a, b,
                                           b_type, ldb, stride_b, beta, c, c_type, ldc, stride_c, num,
                                           CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}
