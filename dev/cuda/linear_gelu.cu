/* linear_gelu: out = gelu(inp weight^T + bias), the first half of a feed-forward layer in one launch

   out (N,OC) floatX out | inp (N,C) floatX in | weight (OC,C) floatX in | bias (OC) floatX in; N = B*T, OC = 4C here
   Bound: compute, 2*N*C*OC FLOPs. Constraint: C % 8 == 0, OC % 8 == 0, pointers aligned to 16 bytes.
   Error: against the fp64 reference, 1.5 ulps of floatX (fp32: 8) of |out| + 0.1, because kernel 1 rounds gelu's
   argument to floatX. Where terms cancel, also 16 fp32 roundings at the size of the terms' absolute sum, which is
   0.64 * sqrt(C) here. In the case of a hot row, the first row of inp is HOT_ROW times larger, and so is this term.
   Tuned: the form of kernel 3. Kernels 1 and 2 are other ops and the library, which choose by themselves.
   Source: the tanh form of gelu is Hendrycks and Gimpel 2016, arXiv:1606.08415; the product: gemm.cuh.

   Kernels (this list is written by versions.sh):
     1  matmul_forward with bias, then gelu_forward
     2  cuBLASLt, gelu in its epilogue
     3  gemm.cuh, gelu in its epilogue (best)

   nvcc -O3 --use_fast_math linear_gelu.cu -lcublasLt -o linear_gelu      (or: make linear_gelu)
   ./linear_gelu 3      check kernel 3 against the CPU and time the forms of gemm.cuh
   ./linear_gelu        every kernel, side by side
   The variant that also stores gelu's argument (pre_gelu), which a backward pass needs, is in matmul_forward.cu:
   ./matmul_forward -C 768 -V 3072 --kind 1                                                                         */
#include "bench.h"
#include "cublaslt_linear.cuh"
#include "gelu_forward.cuh"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "matmul_forward.cuh"

// ---- kernel 1: two operations: matmul_forward with bias, then gelu_forward ----------------------------------------

void linear_gelu1(floatX* out, floatX* pre_gelu, const floatX* inp, const floatX* weight, const floatX* bias, int N,
                  int C, int OC, cudaStream_t stream) {
    matmul_forward(pre_gelu, NULL, inp, weight, bias, NULL, N, C, OC, stream);
    gelu_forward(out, pre_gelu, (size_t)N * OC, stream);
}

// ---- kernel 2: cuBLASLt with bias and gelu in its epilogue ------------------------------------------------------

void linear_gelu2(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC,
                  cudaStream_t stream) {
    LinearCall call;
    call.out = out, call.inp = inp, call.weight = weight, call.bias = bias;
    call.M = N, call.N = OC, call.K = C;
    call.gelu = true;
    // not in fp32, where the error of the library's gelu is too large
    if (sizeof(floatX) == 2 && cublaslt_linear(call, stream)) { return; }
    call.gelu = false;
    bool supported = cublaslt_linear(call, stream);
    require(supported);
    gelu_forward(out, out, (size_t)N * OC, stream);
}

// ---- kernel 3: gemm.cuh, gelu on the accumulators in registers, hidden behind the next tile's products ----

// out (N,OC) = gelu(inp (N,C) weight (OC,C)^T + bias (OC)). form: GEMM_... of gemm.cuh, 0: the default. Devices and
// precisions without wgmma get kernel 2.
void linear_gelu(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC,
                 cudaStream_t stream, int form = 0) {
    require(C % 8 == 0 && OC % 8 == 0);
#if !defined(ENABLE_FP32)
    if (has_sm90a()) {
        GemmArgs g = {out, NULL, inp, weight, NULL, N, OC, C};
        return gemm_form(g, GemmBias<GEMM_GELU>{bias}, false, stream, form ? form : GEMM_PING_PONG_192_PAIRS);
    }
#endif
    (void)form;
    linear_gelu2(out, inp, weight, bias, N, C, OC, stream);
}

constexpr float HOT_ROW = 30.0f; // in the case of a hot row, it is this many times larger

static void declare(Bench& b) {
    int N = b.B * b.T, C = b.C, OC = 4 * C;
    size_t n = (size_t)N * OC;
    int which = b.cases({"normal", "a hot row, a row of equal values", "large terms that cancel"});
    bool hard = which == 1, cancelling = which == 2;
    cudaStream_t stream = b.stream;
    if (!b.dry) { cublaslt_open(); }
    Buffer<floatX> inp = b.input_from<floatX>("inp", (size_t)N * C, [=, &rng = b.rng](float* host) {
        bench_fill_normal(host, (size_t)N * C, rng(), 1.0f, 0.0f);
        if (cancelling) { bench_fill_exact_large(host, (size_t)N * C, rng()), bench_negate_halves(host, N, C); }
        for (int k = 0; hard && k < C; k++) {
            host[k] *= HOT_ROW;
            host[(size_t)(N - 1) * C + k] = 1.0f;
        }
    });
    Buffer<floatX> weight = cancelling ? b.input_filled<floatX>("weight", (size_t)OC * C, bench_fill_exact_small)
                                       : b.input<floatX>("weight", (size_t)OC * C, 1.0f / sqrtf((float)C));
    Buffer<floatX> bias = b.input<floatX>("bias", OC);
    Tolerance tolerance = ulps<floatX>(sizeof(floatX) == 4 ? 8.0f : 1.5f, 0.1f);
    // 1.13: the largest slope of gelu
    tolerance.atol += (hard ? HOT_ROW : 1.0f) * 1.13f * 16 * ulp_of<float>() * 0.64f * sqrtf((float)C);
    Buffer<floatX> out = b.output<floatX>("out", n, tolerance);
    Buffer<floatX> pre_gelu = b.scratch<floatX>("pre_gelu", n); // for kernel 1
    std::vector<size_t> rows = b.sample(N, 2.0 * C * OC);
    b.reference([=] {
        std::vector<float> x = rows_of(inp.host, rows, C), y(rows.size() * OC);
        matmul_forward_cpu(y.data(), x.data(), weight.host, bias.host, NULL, rows.size(), C, OC);
        gelu_forward_cpu(y.data(), y.data(), y.size());
        put_rows(out.host, y, rows, OC);
    });
    double operands = (double)N * C + (double)OC * C, least = sizeof(floatX) * (operands + (double)n);
    b.cost(least, 2.0 * N * C * OC);
    b.kernel(1, "matmul_forward with bias, then gelu_forward",
             [=](int) { linear_gelu1(out, pre_gelu, inp, weight, bias, N, C, OC, stream); }, {0});
    b.moves(2, least + 2.0 * sizeof(floatX) * (double)n);
    b.kernel(2, sizeof(floatX) == 2 ? "cuBLASLt, gelu in its epilogue" : "cuBLASLt with bias, then gelu_forward",
             [=](int) { linear_gelu2(out, inp, weight, bias, N, C, OC, stream); }, {0});
    b.moves(sizeof(floatX) == 2 ? 1 : 2, least + (sizeof(floatX) == 2 ? 0 : 2.0 * sizeof(floatX) * (double)n));
#if !defined(ENABLE_FP32)
    b.kernel(
        3, "gemm.cuh, gelu in its epilogue",
        [=](int form) { linear_gelu(out, inp, weight, bias, N, C, OC, stream, form); },
        {0, GEMM_PING_PONG_192, GEMM_PING_PONG_192_PAIRS, GEMM_COOPERATIVE_256, GEMM_COOPERATIVE_256_PAIRS,
         GEMM_PING_PONG_128_PAIRS},
        -90);
    b.config("form", gemm_form_name);
    b.moves(1, least);
    b.best(3);
#else
    b.best(2);
#endif
    b.matrix_rate(cublaslt_matrix_rate);
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "linear_gelu", declare, {32, 512, 768, 12, 50257},
        {{1, 1, 8}, {1, 1, 384}, {1, 5, 776}, {3, 43, 136}, {2, 65, 64}, {1, 127, 1600}, {2, 640, 256}, {1, 130, 768}});
}
