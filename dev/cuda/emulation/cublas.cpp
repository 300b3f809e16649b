/*
The products of cuBLAS and cuBLASLt, by plain loops on the host: sums in double, rounded once. Matrices are column-major,
element (row, column) at row + column * ld. Types: float, fp16, bf16, e4m3, e5m2. Scales of operands and results: float.
*/
#include "cublas_v2.h"

#include <math.h>

#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"
#include "engine.h"

// A description of a product or of a matrix; each uses some of it.
struct EmulationBlas {
    cudaDataType_t type, bias_type;
    size_t rows, columns, ld;
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    void *bias, *aux;
    size_t aux_ld;
    const float *a_scale, *b_scale, *d_scale;
};

static bool is_8_bit(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

static float load(const void* p, cudaDataType_t type, size_t i) {
    switch (type) {
    case CUDA_R_32F:
        return ((const float*)p)[i];
    case CUDA_R_16F:
        return emulation_half_value(((const uint16_t*)p)[i]);
    case CUDA_R_16BF:
        return __uint_as_float((uint32_t)((const uint16_t*)p)[i] << 16);
    case CUDA_R_8F_E5M2:
        return emulation_e5m2_value(((const uint8_t*)p)[i]);
    default:
        return emulation_e4m3_value(((const uint8_t*)p)[i]);
    }
}
static void store(void* p, cudaDataType_t type, size_t i, double x) {
    size_t bytes = type == CUDA_R_32F ? 4 : is_8_bit(type) ? 1 : 2;
    host_has_written((char*)p + i * bytes, bytes);
    switch (type) {
    case CUDA_R_32F:
        ((float*)p)[i] = (float)x;
        break;
    case CUDA_R_16F:
        ((uint16_t*)p)[i] = emulation_half_bits_of_double(x);
        break;
    case CUDA_R_16BF:
        ((uint16_t*)p)[i] = emulation_bf16_bits_of_double(x);
        break;
    case CUDA_R_8F_E5M2:
        ((uint8_t*)p)[i] = emulation_e5m2_bits((float)x);
        break;
    default:
        ((uint8_t*)p)[i] = emulation_e4m3_bits((float)x);
    }
}

// op(matrix) as floats, (rows, k) with k contiguous; by_k: the matrix is (k, rows) after op.
static std::vector<float> gather(const void* p, cudaDataType_t type, size_t ld, bool rows_first, size_t rows,
                                 size_t k) {
    std::vector<float> out(rows * k);
    for (size_t r = 0; r < rows; r++) {
        for (size_t j = 0; j < k; j++) { out[r * k + j] = load(p, type, rows_first ? r + j * ld : j + r * ld); }
    }
    return out;
}

// sums (m, n), column-major: op(a) op(b)
static std::vector<double> multiply(const std::vector<float>& a, const std::vector<float>& b, size_t m, size_t n,
                                    size_t k) {
    std::vector<double> sums(m * n);
    for (size_t column = 0; column < n; column++) {
        for (size_t row = 0; row < m; row++) {
            const float *x = a.data() + row * k, *y = b.data() + column * k;
            double sum[4] = {}; // side by side, so that they can be vectorised
            size_t j = 0;
            for (; j + 4 <= k; j += 4) {
                for (size_t i = 0; i < 4; i++) { sum[i] += (double)x[j + i] * y[j + i]; }
            }
            for (; j < k; j++) { sum[0] += (double)x[j] * y[j]; }
            sums[row + column * m] = sum[0] + sum[1] + (sum[2] + sum[3]);
        }
    }
    return sums;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* p, cublasComputeType_t, cudaDataType_t) {
    *p = new EmulationBlas();
    (*p)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t p) {
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* p, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    *p = new EmulationBlas();
    (*p)->type = type, (*p)->rows = rows, (*p)->columns = columns, (*p)->ld = (size_t)ld;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t p) {
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> static bool take(T* member, const void* value, size_t bytes) {
    if (bytes != sizeof(T)) { return false; }
    memcpy(member, value, bytes);
    return true;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t p, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    int64_t ld = 0;
    bool good = false;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        good = take(&p->op_a, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: // here every SM is free
        good = bytes == sizeof(int32_t);
        break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
        good = take(&p->op_b, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        good = take(&p->epilogue, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        good = take(&p->bias, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        good = take(&p->aux, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        good = take(&ld, value, bytes), p->aux_ld = (size_t)ld;
        break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        good = take(&p->a_scale, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        good = take(&p->b_scale, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER:
        good = take(&p->d_scale, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        good = take(&p->bias_type, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
        good = true;
        break;
    }
    return good ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

// With 8-bit operands: both have 8 bits, k is the first dimension of both ("TN"), e5m2 only meets e4m3, and k and the rows
// of the result are multiples of 16.
bool emulation_has_matmul(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b) {
    if (!is_8_bit(a->type) && !is_8_bit(b->type)) { return true; }
    bool sizes = a->rows % 16 == 0 && a->columns % 16 == 0;
    bool types = is_8_bit(a->type) && is_8_bit(b->type) && (a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3);
    return sizes && types && desc->op_a == CUBLAS_OP_T && desc->op_b == CUBLAS_OP_N;
}

static double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) {
    double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

// d = epilogue(factor * a b + add * c)
static void matmul(const EmulationBlas* desc, double factor, double add, const void* a, const EmulationBlas* a_layout,
                   const void* b, const EmulationBlas* b_layout, const void* c, const EmulationBlas* c_layout, void* d,
                   const EmulationBlas* d_layout) {
    bool a_by_k = desc->op_a == CUBLAS_OP_T, b_by_k = desc->op_b == CUBLAS_OP_N; // k is the first dimension
    size_t m = d_layout->rows, n = d_layout->columns, k = a_by_k ? a_layout->rows : a_layout->columns;
    std::vector<float> x = gather(a, a_layout->type, a_layout->ld, !a_by_k, m, k);
    std::vector<float> y = gather(b, b_layout->type, b_layout->ld, !b_by_k, n, k);
    std::vector<double> sums = multiply(x, y, m, n, k);
    if (desc->a_scale) { factor *= *desc->a_scale; }
    if (desc->b_scale) { factor *= *desc->b_scale; }
    cublasLtEpilogue_t e = desc->epilogue;
    bool has_bias =
             e == CUBLASLT_EPILOGUE_BIAS || e == CUBLASLT_EPILOGUE_GELU_BIAS || e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
         has_gelu =
             e == CUBLASLT_EPILOGUE_GELU || e == CUBLASLT_EPILOGUE_GELU_BIAS || e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    // the bias has d's type, or the operands' or another one if d has 8 bits
    cudaDataType_t bias_type = d_layout->type, aux_type = d_layout->type;
    if (is_8_bit(d_layout->type)) { bias_type = aux_type = c_layout->type; }
    if (desc->bias_type != CUDA_R_32F) { bias_type = desc->bias_type; }
    for (size_t column = 0; column < n; column++) {
        for (size_t row = 0; row < m; row++) {
            size_t to = row + column * d_layout->ld, aux = row + column * desc->aux_ld;
            double sum = factor * sums[row + column * m];
            if (add != 0) { sum += add * load(c, c_layout->type, row + column * c_layout->ld); }
            if (has_bias) { sum += load(desc->bias, bias_type, row); }
            if (e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) { store(desc->aux, aux_type, aux, sum); }
            if (has_gelu) { sum = gelu(sum); }
            if (e == CUBLASLT_EPILOGUE_DGELU) { sum *= gelu_slope(load(desc->aux, aux_type, aux)); }
            if (desc->d_scale) { sum *= *desc->d_scale; }
            store(d, d_layout->type, to, sum);
        }
    }
    for (size_t column = 0; e == CUBLASLT_EPILOGUE_BGRADB && column < n; column++) {
        double sum = 0;
        for (size_t j = 0; j < k; j++) { sum += y[column * k + j]; }
        store(desc->bias, d_layout->type, column, sum);
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
    double factor = *(const float*)alpha, add = *(const float*)beta;
    // copies: the caller may destroy the descriptions before the product runs
    emulation_put(stream, [=, desc = *desc, a_layout = *a_layout, b_layout = *b_layout, c_layout = *c_layout,
                           d_layout = *d_layout] {
        matmul(&desc, factor, add, a, &a_layout, b, &b_layout, c, &c_layout, d, &d_layout);
    });
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                                          int k, const void* alpha, const void* a, cudaDataType_t a_type, int lda,
                                          long long stride_a, const void* b, cudaDataType_t b_type, int ldb,
                                          long long stride_b, const void* beta, void* c, cudaDataType_t c_type, int ldc,
                                          long long stride_c, int num, cublasComputeType_t, cublasGemmAlgo_t) {
    EmulationBlas product = {}, a_layout = {}, b_layout = {}, c_layout = {};
    auto size_of = [](cudaDataType_t type) { return (long long)(type == CUDA_R_32F ? 4 : 2); };
    product.op_a = op_a, product.op_b = op_b, product.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    a_layout.type = a_type, a_layout.rows = (size_t)(op_a == CUBLAS_OP_T ? k : m), a_layout.ld = (size_t)lda;
    a_layout.columns = (size_t)(op_a == CUBLAS_OP_T ? m : k);
    b_layout.type = b_type, b_layout.ld = (size_t)ldb;
    c_layout.type = c_type, c_layout.rows = (size_t)m, c_layout.columns = (size_t)n, c_layout.ld = (size_t)ldc;
    for (int i = 0; i < num; i++) {
        char* out = (char*)c + i * stride_c * size_of(c_type);
        cublasLtMatmul(NULL, &product, alpha, (const char*)a + i * stride_a * size_of(a_type), &a_layout,
                       (const char*)b + i * stride_b * size_of(b_type), &b_layout, beta, out, &c_layout, out, &c_layout,
                       NULL, NULL, 0, NULL);
    }
    return CUBLAS_STATUS_SUCCESS;
}
