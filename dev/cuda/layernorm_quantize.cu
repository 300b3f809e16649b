/* layernorm_quantize: layernorm_forward, or fused_residual_layernorm, whose result is e4m3, with amax

   rows (N,C) e4m3 out | unquantized (N,C) floatX out, the same before it is quantised, in kinds 0 and 3 | columns (C,N) e4m3
   out, transposed, in kinds 2 and 4 | residual (N,C) floatX out = inp + inp2, of which the layernorm is taken, in kinds 3
   and 4 | mean, rstd (N) float out | amax (1) float inout | inp, inp2 (N,C) floatX in | weight,
   bias (C) floatX in | scale (1) float in; N = B*T. llmc/fp8.cuh says what is computed, and in which order `columns` has
   the tokens.
   Bound: memory; kind 0 reads 2 bytes and writes 3 per element, kind 4 reads 4 and writes 4. Constraint: C % 16 == 0,
   C <= 1792; with columns N % 16 == 0.
   Error: before it is rounded to floatX, the result may be off by what layernorm_forward allows in fp32. rows and
   columns must be what the CPU makes of a number that close to the exact one.
   Source: Ba et al. 2016, arXiv:1607.06450; Micikevicius et al. 2022, arXiv:2209.05433.

   Kernels (this list is written by versions.sh):
     1  not fused: layernorm_forward, then quantize
     2  one warp per row, quantised from registers (promoted)
     3  2 with the transposed copy, by pairs of tokens (promoted) (kinds 2, 4)
     kind 2: e4m3 with the transposed copy
     kind 4: 2 of a residual sum

   nvcc -O3 --use_fast_math layernorm_quantize.cu -o layernorm_quantize      (or: make layernorm_quantize)
   ./layernorm_quantize 2               check kernel 2 against the CPU and sweep its block sizes
   ./layernorm_quantize --kind 2        with the transposed copy: every kernel, side by side            */
#include "bench.h"
#include "fp8.cuh"
#include "fused_residual_layernorm.cuh"
#include "layernorm_forward.cuh"
#include "quantize.cuh"

#include "layernorm_quantize.cuh" // kernels 2 and 3

// ---- kernel 1: not fused: layernorm_forward, then kernel 3 or 5 of quantize ----

// norm (N,C) is where floatX goes: `unquantized`, or scratch
void layernorm_quantize1(const LayernormQuantizeArgs& q, floatX* norm, cudaStream_t stream, int block_size) {
    if (q.residual) {
        fused_residual_layernorm_forward(q.residual, norm, q.mean, q.rstd, q.inp, q.inp2, q.weight, q.bias, q.N, q.C,
                                         q.epsilon, stream);
    } else {
        layernorm_forward(norm, q.mean, q.rstd, q.inp, q.weight, q.bias, q.N, q.C, q.epsilon, stream);
    }
    QuantizeArgs<F8> copy = {q.to, NULL, q.N, q.C};
#if !defined(ENABLE_FP32)
    if (q.to.columns) { return quantize5(copy, QuantizeCopy{norm}, stream, block_size); }
#endif
    quantize3(copy, QuantizeCopy{norm}, stream, block_size);
}

static void declare(Bench& b) {
    int kind = b.kinds({"floatX beside e4m3", "e4m3 alone", "e4m3 with the transposed copy", "0 of a residual sum",
                        "2 of a residual sum"});
    int which = b.cases({"normal", "large mean, another epsilon"});
    float epsilon = which == 1 ? 0.5f : NORM_EPSILON;
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    bool has_unquantized = kind == 0 || kind == 3, has_columns = kind == 2 || kind == 4, has_sum = kind >= 3;
    b.varies(has_columns ? "BC" : "BTC"); // with columns the number of tokens stays a multiple of 16
    Buffer<float> scale = b.input_from<float>("scale", 1, [](float* x) { x[0] = 448.0f / 3.0f; });
    Buffer<floatX> inp = b.input<floatX>("inp", n, 1.0f, which == 1 ? 30.0f : 0.0f);
    Buffer<floatX> weight = b.input<floatX>("weight", C), bias = b.input<floatX>("bias", C), unquantized = {NULL, NULL};
    Buffer<floatX> inp2 = {NULL, NULL}, residual = {NULL, NULL};
    if (has_sum) {
        inp2 = b.input<floatX>("inp2", n);
        residual = b.output<floatX>("residual", n, {0, 0});
    }
    // as in layernorm_forward, before the result is rounded to floatX
    Tolerance exact = {(which == 1 ? 31 : 1) * 32 * ulp_of<float>(), 8 * ulp_of<float>()};
    Buffer<F8> rows = fp8_output<F8>(b, "rows", n, scale, exact), columns = {NULL, NULL};
    if (has_columns) { columns = fp8_output<F8>(b, "columns", n, scale, exact); }
    Buffer<float> amax = fp8_amax(b, exact);
    if (has_unquantized) {
        unquantized = b.output<floatX>("unquantized", n, {exact.atol, 0.5f * ulp_of<floatX>() + exact.rtol});
    }
    Buffer<float> mean = b.output<float>("mean", N, ulps<float>(4, 1.0f));
    Buffer<float> rstd = b.output<float>("rstd", N, ulps<float>(which == 1 ? 32 : 16, 0.0f));
    b.reference([=] {
        for (size_t i = 0; has_sum && i < n; i++) { residual.host[i] = (float)(floatX)(inp.host[i] + inp2.host[i]); }
        layernorm_forward_cpu(rows.host, mean.host, rstd.host, has_sum ? residual.host : inp.host, weight.host,
                              bias.host, N, C, epsilon);
        if (has_columns) { fp8_transpose_cpu(columns.host, rows.host, N, C, false); }
        if (has_unquantized) { memcpy(unquantized.host, rows.host, n * sizeof(float)); }
        fp8_amax_cpu(amax.host, rows.host, n);
    });
    b.cost((double)n * ((1 + 2 * has_sum + has_unquantized) * sizeof(floatX) + 1 + has_columns), 0);
    Fp8Tensor<F8> to = {rows, columns, false, scale, amax};
    LayernormQuantizeArgs q = {to, unquantized, residual, mean, rstd, inp, inp2, weight, bias, N, C, epsilon};
    cudaStream_t stream = b.stream;
#if defined(ENABLE_FP32)
    if (has_columns) { return; }
#endif
    floatX* norm = has_unquantized ? (floatX*)unquantized : (floatX*)b.scratch<floatX>("norm", n);
    b.kernel(
        1, "not fused: layernorm_forward, then quantize", [=](int bs) { layernorm_quantize1(q, norm, stream, bs); },
        {128, 256, 512}, 89);
#if !defined(ENABLE_FP32)
    if (!has_columns) {
        b.kernel(
            2, "one warp per row, quantised from registers", [=](int bs) { layernorm_quantize2(q, stream, bs); },
            {64, 128, 256, 512}, 89);
        return b.promoted(2);
    }
    b.kernel(
        3, "2 with the transposed copy, by pairs of tokens", [=](int bs) { layernorm_quantize3(q, stream, bs); },
        {128, 256, 512}, 89);
    b.promoted(3);
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "layernorm_quantize", declare, {64, 1024, 768, 1, 1},
                      {{1, 1, 16},
                       {3, 17, 784},
                       with_kind(1, {2, 33, 1600}),
                       with_kind(1, {3, 5, 272}),
                       with_kind(2, {1, 16, 16}),
                       with_kind(2, {5, 16, 784}),
                       with_kind(2, {1, 48, 1600}),
                       with_kind(2, {2, 64, 1040}),
                       with_kind(3, {3, 17, 784}),
                       with_kind(3, {2, 33, 1600}),
                       with_kind(4, {5, 16, 784}),
                       with_kind(4, {1, 48, 1600})});
}
