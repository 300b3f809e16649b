/*
Linear layers by cuBLASLt for the fused ops: e4m3 and e5m2 operands, results narrower than floatX, GELU that saves nothing
for a backward pass. The trainer's products are in llmc/cublas_common.cuh; this file shares its tuner and state.
*/
#pragma once

#include <cuda_fp8.h>

#include "../../llmc/cublas_common.cuh"

// out = gelu?(inp weight^T + bias) + add. A matrix in fp8 (CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2) comes with a scale, a float
// in device memory. An operand's true values are its stored values times its scale; for out, results times the scale are
// stored. fp8 needs compute capability 8.9, N and K that are multiples of 16, and no two operands of e5m2. Matrices must
// be aligned to 256 bytes, as cudaMalloc aligns them, and scales to 16 bytes, or the library refuses the call.
struct LinearCall {
    void* out = NULL;          // (M,N) of out_type: floatX, float or e4m3
    const void* inp = NULL;    // (M,K) of inp_type: floatX or fp8
    const void* weight = NULL; // (N,K) of weight_type: floatX or fp8
    cudaDataType_t inp_type = cublaslt_floatX, weight_type = cublaslt_floatX, out_type = cublaslt_floatX;
    const float *inp_scale = NULL, *weight_scale = NULL; // multiply the stored values, if the operands are fp8
    const float* out_scale = NULL;                       // multiplies results on storing, if out_type is e4m3
    // With fp8 operands: the tensor cores keep the sum, with about 14 bits. Otherwise cuBLASLt adds partial
    // sums to fp32 registers, which takes longer.
    bool fast_accumulation = true;
    int M = 0, N = 0, K = 0;
    const floatX* bias = NULL; // (N), or NULL
    const void* add = NULL;    // (M,N) of out_type, not e4m3, or NULL to add nothing; may be out if that is float
    bool gelu = false;         // tanh form; needs bias
};
inline bool cublaslt_is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

struct LinearKey {
    int M, N, K, inp_type, weight_type, out_type, fast_accumulation, has_bias, has_add, gelu, tuned;
};
struct LinearPlan {
    LinearKey key;
    cublasStatus_t status; // if not CUBLAS_STATUS_SUCCESS: why there is no algorithm
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t weight, inp, add, out;
    cublasLtMatmulAlgo_t algo;
};

inline LinearKey cublaslt_linear_key(const LinearCall& c, bool tuned) {
    return {c.M,           c.N,    c.K,  c.inp_type, c.weight_type, c.out_type, c.fast_accumulation, c.bias != NULL,
            c.add != NULL, c.gelu, tuned};
}

// Sets the pointers that are part of the library's description of a product.
inline void cublaslt_linear_describe(const LinearPlan& plan, const LinearCall& c) {
    if (c.bias) { cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias); }
    if (cublaslt_is_fp8(c.inp_type)) {
        require(c.inp_scale && c.weight_scale);
        cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.weight_scale);
        cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.inp_scale);
    }
    if (c.out_type == CUDA_R_8F_E4M3) {
        require(c.out_scale != NULL);
        cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, c.out_scale);
    }
}

inline cublasStatus_t cublaslt_linear_launch(const LinearPlan& plan, const cublasLtMatmulAlgo_t& algo,
                                             const LinearCall& c, const Execution& exec) {
    CublasLt& lt = cublaslt_of(exec);
    float alpha = 1.0f, beta = c.add ? 1.0f : 0.0f;
    cublaslt_linear_describe(plan, c);
    // if nothing is added, the library still wants a pointer to add: it gets out, if out has the type of add
    const void* add = c.add ? c.add : cublaslt_is_fp8(c.out_type) ? NULL : c.out;
    return cublasLtMatmul(lt.handle, plan.product, &alpha, c.weight, plan.weight, c.inp, plan.inp, &beta, add, plan.add,
                          c.out, plan.out, &algo, lt.workspace, lt.workspace_bytes, exec.stream);
}

// If `tuned` is true, times cuBLASLt's candidates on the operands themselves. Otherwise takes the first candidate.
inline LinearPlan cublaslt_linear_plan(const LinearCall& c, bool tuned, const Execution& exec) {
    require(cublaslt_of(exec).handle != NULL); // cublaslt_open() sets it
    require(c.M > 0 && c.N > 0 && c.K > 0 && (!c.gelu || c.bias) && (!c.add || !cublaslt_is_fp8(c.out_type)));
    LinearPlan plan = {};
    plan.key = cublaslt_linear_key(c, tuned);
    plan.weight = cublaslt_layout(c.weight_type, c.N, c.K);
    plan.inp = cublaslt_layout(c.inp_type, c.M, c.K);
    // the library needs it even if nothing is added
    plan.add = cublaslt_layout(cublaslt_is_fp8(c.out_type) ? cublaslt_floatX : c.out_type, c.M, c.N);
    plan.out = cublaslt_layout(c.out_type, c.M, c.N);
    cublasCheck(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)CUBLAS_OP_T);
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)CUBLAS_OP_N);
    cublasLtEpilogue_t epilogue = c.gelu   ? CUBLASLT_EPILOGUE_GELU_BIAS
                                  : c.bias ? CUBLASLT_EPILOGUE_BIAS
                                           : CUBLASLT_EPILOGUE_DEFAULT;
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)epilogue);
    if (c.bias) { cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)cublaslt_floatX); }
    if (cublaslt_is_fp8(c.inp_type)) {
        cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)c.fast_accumulation);
    }
    cublaslt_linear_describe(plan, c);
    const int max_candidates = 16;
    cublasLtMatmulHeuristicResult_t candidates[max_candidates];
    int n;
    cublasStatus_t status = cublaslt_candidates(cublaslt_of(exec), candidates, tuned ? max_candidates : 1, &n,
                                                plan.product, plan.weight, plan.inp, plan.add, plan.out, 256);
    // one of these three means that the library does not support this combination of types and epilogue
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED &&
        status != CUBLAS_STATUS_INVALID_VALUE && status != CUBLAS_STATUS_ARCH_MISMATCH) {
        cublasCheck(status);
    }
    plan.status = status == CUBLAS_STATUS_SUCCESS && n == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status;
    if (plan.status != CUBLAS_STATUS_SUCCESS) { return plan; }
    int best = 0;
    if (tuned && n > 1) {
        LinearCall timed = c;
        void* stand_in = NULL; // for an out that accumulates, so that it keeps its values
        if (c.add == c.out) {
            size_t bytes = (size_t)c.M * c.N * sizeof(float);
            stand_in = device_malloc_check(bytes, "timing cuBLASLt's candidates");
            cudaCheck(cudaMemsetAsync(stand_in, 0, bytes, exec.stream));
            timed.add = timed.out = stand_in;
        }
        best = cublaslt_fastest(n, exec, [&](int i) {
            cublasStatus_t launched = cublaslt_linear_launch(plan, candidates[i].algo, timed, exec);
            if (launched != CUBLAS_STATUS_SUCCESS) { plan.status = launched; } // stays if no candidate runs
            return launched;
        });
        cudaCheck(cudaFree(stand_in));
    }
    if (best >= 0) { plan.algo = candidates[best].algo, plan.status = CUBLAS_STATUS_SUCCESS; }
    return plan;
}

// True if cublaslt_linear() can compute this product on this device. Launches nothing.
inline bool cublaslt_has_linear(const LinearCall& c) {
    LinearPlan plan = cublaslt_linear_plan(c, false, 0);
    cublasCheck(cublasLtMatmulDescDestroy(plan.product));
    for (cublasLtMatrixLayout_t layout : {plan.weight, plan.inp, plan.add, plan.out}) {
        cublasCheck(cublasLtMatrixLayoutDestroy(layout));
    }
    return plan.status == CUBLAS_STATUS_SUCCESS;
}

// Launches the product and returns success. If the library cannot compute it, returns the reason and launches nothing.
// The first call with a shape times cuBLASLt's candidates, unless exec says otherwise or the stream is
// being captured.
inline cublasStatus_t cublaslt_try_linear(const LinearCall& c, const Execution& exec) {
    static std::vector<LinearPlan> plans;
    require(c.out && c.inp && c.weight && (c.add != c.out || c.out_type == CUDA_R_32F));
    // cublaslt_linear_plan promised this alignment to the library
    for (const void* p : {(const void*)c.out, c.inp, c.weight, c.add}) { require((uintptr_t)p % 256 == 0); }
    for (const float* scale : {c.inp_scale, c.weight_scale, c.out_scale}) { require((uintptr_t)scale % 16 == 0); }
    LinearKey key = cublaslt_linear_key(c, exec.times_algorithms);
    size_t i = 0;
    while (i < plans.size() && memcmp(&plans[i].key, &key, sizeof(key)) != 0) { i++; }
    if (i == plans.size()) {
        plans.push_back(cublaslt_linear_plan(c, key.tuned && !cublaslt_is_captured(exec.stream), exec));
        plans.back().key = key;
    }
    const LinearPlan& plan = plans[i];
    if (plan.status != CUBLAS_STATUS_SUCCESS) { return plan.status; }
    profile().library_flops += 2.0 * c.M * c.N * c.K;
    cublasCheck(cublaslt_linear_launch(plan, plan.algo, c, exec));
    return CUBLAS_STATUS_SUCCESS;
}
// Like cublaslt_try_linear, but returns false if the library cannot compute the product.
inline bool cublaslt_linear(const LinearCall& c, const Execution& exec) {
    return cublaslt_try_linear(c, exec) == CUBLAS_STATUS_SUCCESS;
}

// Measures the library's rate of products of e4m3 matrices in TFLOP/s: 8192^3 with random numbers, sums in float, results
// of floatX. Returns 0 if the library has no such product here, or if there is no memory for the matrices.
inline double cublaslt_e4m3_rate(const Execution& exec) {
    const int n = 8192, num_products = 10;
    const size_t period = 1 << 20, size = (size_t)n * n; // the random numbers repeat after `period`
    std::vector<__nv_fp8_e4m3> values(period);
    for (size_t i = 0; i < period; i++) {
        values[i] = (__nv_fp8_e4m3)((float)hash_bits((uint32_t)i, 1) * (2.0f / 4294967296.0f) - 1.0f);
    }
    Error err;
    // the scale, the operand (twice the same) and the results, each aligned to 256 bytes
    uint8_t* memory = (uint8_t*)device_malloc(256 + size * (1 + sizeof(floatX)), "measuring the rate of e4m3", &err);
    if (!memory) { return 0; }
    const float one = 1.0f;
    cudaCheck(cudaMemcpy(memory, &one, sizeof(one), cudaMemcpyHostToDevice));
    LinearCall call;
    call.inp = call.weight = memory + 256, call.out = memory + 256 + size;
    for (size_t i = 0; i < size; i += period) {
        cudaCheck(cudaMemcpy(memory + 256 + i, values.data(), period, cudaMemcpyHostToDevice));
    }
    call.inp_type = call.weight_type = CUDA_R_8F_E4M3;
    call.inp_scale = call.weight_scale = (const float*)memory;
    call.M = call.N = call.K = n;
    cudaEvent_t start, end;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&end));
    bool supported = cublaslt_linear(call, exec); // not timed
    cudaCheck(cudaEventRecord(start, exec.stream));
    for (int i = 0; i < num_products && supported; i++) { cublaslt_linear(call, exec); }
    cudaCheck(cudaEventRecord(end, exec.stream));
    cudaCheck(cudaEventSynchronize(end));
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, start, end));
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(end));
    cudaCheck(cudaFree(memory));
    return supported ? 2.0 * n * n * (double)n * num_products / ms * 1e-9 : 0;
}
