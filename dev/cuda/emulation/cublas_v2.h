// cuBLAS's names, as cublasLt.h has cuBLASLt's.
#pragma once

#include "cublasLt.h"

enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    *handle = (cublasHandle_t)1;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
template <class... Arguments> inline cublasStatus_t cublasGemmStridedBatchedEx(Arguments...) {
    emulation_unsupported("cuBLAS");
}
