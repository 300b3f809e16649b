// What the programs use of cuBLAS.
#pragma once

#include "cublasLt.h"

enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    *handle = (cublasHandle_t)1;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                                          int k, const void* alpha, const void* a, cudaDataType_t a_type, int lda,
                                          long long stride_a, const void* b, cudaDataType_t b_type, int ldb,
                                          long long stride_b, const void* beta, void* c, cudaDataType_t c_type, int ldc,
                                          long long stride_c, int num, cublasComputeType_t, cublasGemmAlgo_t);
