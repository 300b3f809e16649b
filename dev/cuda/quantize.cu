/* quantize: out = f(inp) in e4m3 or e5m2, times a scale, with the tensor's amax

   rows (N,C) e4m3 or e5m2 out | columns (C,N), the same transposed, out, in kinds 1, 3, 4, 5 | unquantized (N,C) floatX out,
   f(inp), in kind 2 | amax (1) float inout | inp, dout (N,C) floatX in | scale (1) float in |
   losses (N) float, targets (N) int, dloss (1) float in, in kind 6; N = B*T. f is the copy, GELU, dout times GELU's slope
   at inp, or the gradient of the logits inp, (softmax - onehot(target)) * dloss. llmc/fp8.cuh says what is computed, and
   in which order `columns` has the tokens.
   Bound: memory; kind 0 reads 2 bytes and writes 1 per element. Constraint: C % 16 == 0, N % 16 == 0.
   Error: the copy has the CPU's bits. GELU and its slope may be off by what gelu_forward and gelu_backward allow in
   fp32, 1e-6 of the result plus 1e-6 or 3e-6, before they are rounded to floatX: the result must be what the CPU makes
   of a number that close to the exact one. amax: one ulp of floatX, or equal for the copy.
   Source: Micikevicius et al. 2022, arXiv:2209.05433; the tanh form of GELU is Hendrycks and Gimpel 2016,
   arXiv:1606.08415.

   Kernels (this list is written by versions.sh):
     1  one thread per element, an atomic each
     2  128-bit vectors, an atomic per block
     3  2 with few blocks: persistent (promoted)
     4  transposed by 64x32 tiles, byte by byte (kinds 1, 3, 4, 5, 6)
     5  transposed by ldmatrix: pairs of tokens as 16 bits (promoted) (kinds 1, 3, 4, 5, 6)
     6  not fused: gelu_forward or gelu_backward, then 3 or 5 (kinds 2 to 5)
     kind 1: weight, with the transposed copy in order
     kind 2: GELU, floatX beside it
     kind 3: GELU, with the transposed copy
     kind 4: GELU's backward pass, with the transposed copy
     kind 5: 4 in e5m2
     kind 6: gradients of logits in e5m2, with the transposed copy

   nvcc -O3 --use_fast_math quantize.cu -o quantize      (or: make quantize)
   ./quantize 2               check kernel 2 against the CPU and sweep its block sizes
   ./quantize --kind 3        GELU, with the transposed copy: every kernel, side by side            */
#include "bench.h"
#include "fp8.cuh"
#include "gelu_backward.cuh"
#include "gelu_forward.cuh"

#include "quantize.cuh" // kernels 3 and 5

// ---- kernel 1: one thread per element, an atomic each ----

// f(inp) of one element, rounded to floatX
__device__ inline floatX quantize_element(const QuantizeCopy& s, size_t i, int, int) { return s.inp[i]; }
__device__ inline floatX quantize_element(const QuantizeGelu& s, size_t i, int, int) {
    return (floatX)gelu((float)s.inp[i]);
}
__device__ inline floatX quantize_element(const QuantizeGeluBackward& s, size_t i, int, int) {
    return (floatX)((float)s.dout[i] * gelu_slope((float)s.inp[i]));
}
__device__ inline floatX quantize_element(const QuantizeDlogits& s, size_t i, int row, int column) {
    float lse = s.losses[row] + (float)s.logits[i - column + s.targets[row]];
    return s.value(s.logits[i], column, s.targets[row], lse, *s.dloss);
}

template <class F, class Source> __global__ void quantize_kernel1(QuantizeArgs<F> q, Source source) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)q.N * q.C) { return; }
    int token = (int)(i / q.C), column = (int)(i % q.C);
    floatX x = quantize_element(source, i, token, column);
    float scaled = (float)x * __ldg(q.to.scale);
    F out = (F)scaled;
    q.to.rows[i] = out;
    if (q.unquantized) { q.unquantized[i] = x; }
    if (q.to.columns) {
        int place = 0;
        while (fp8_token(place, q.to.in_order) != token % 16) { place++; }
        q.to.columns[(size_t)column * q.N + token / 16 * 16 + place] = out;
    }
    atomicMax(reinterpret_cast<unsigned*>(q.to.amax), __float_as_uint(fabsf((float)x)));
}

template <class F, class Source>
void quantize1(const QuantizeArgs<F>& q, const Source& source, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)q.N * q.C, (size_t)block_size);
    require(num_blocks <= INT_MAX);
    auto kernel = quantize_kernel1<F, Source>;
    kernel<<<(unsigned)num_blocks, block_size, 0, stream>>>(q, source);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: 128-bit vectors, an atomic per block ----

template <class F, class Source> __global__ void quantize_kernel2(QuantizeArgs<F> q, Source source) {
    Fp8Seen<F> seen(q.to);
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i < (size_t)q.N * q.C) {
        x128 x = source.vector(i);
        uint32_t words[x128::size / 4];
        seen.store_vector(q.to.rows + i, words, x);
        if (q.unquantized) { store128(q.unquantized + i, x); }
    }
    seen.store(q.to);
}

template <class F, class Source>
void quantize2(const QuantizeArgs<F>& q, const Source& source, cudaStream_t stream, int block_size) {
    require(q.C % 16 == 0 && !q.to.columns);
    size_t num_blocks = ceil_div((size_t)q.N * q.C, (size_t)x128::size * block_size);
    require(num_blocks <= INT_MAX);
    auto kernel = quantize_kernel2<F, Source>;
    kernel<<<(unsigned)num_blocks, block_size, 0, stream>>>(q, source);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32) // a vector is 8 elements

// ---- kernel 4: the transposed copy by 64x32 tiles in shared memory, byte by byte ----

template <class F, class Source> __global__ void __launch_bounds__(256)
    quantize_kernel4(QuantizeArgs<F> q, Source source) {
    __shared__ F tile[64][36]; // 36: the bytes of a column, one per row, are in 32 banks
    int num_columns = ceil_div(q.C, 32), token0 = blockIdx.x / num_columns * 64, c0 = blockIdx.x % num_columns * 32;
    Fp8Seen<F> seen(q.to);
    int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8; // a vector per thread
    if (token0 + row < q.N && c0 + column < q.C) {
        size_t i = (size_t)(token0 + row) * q.C + c0 + column;
        x128 x = quantize_vector(source, token0 + row, c0 + column, q.C);
        uint32_t words[2];
        seen.store_vector(q.to.rows + i, words, x);
        if (q.unquantized) { store128(q.unquantized + i, x); }
        *reinterpret_cast<uint32_t*>(&tile[row][column]) = words[0];
        *reinterpret_cast<uint32_t*>(&tile[row][column + 4]) = words[1];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 32; i += 256) { // neighbouring threads store neighbouring tokens
        int c = i / 64, place = i % 64, token = place / 16 * 16 + fp8_token(place % 16, q.to.in_order);
        if (c0 + c < q.C && token0 + place < q.N) {
            q.to.columns[(size_t)(c0 + c) * q.N + token0 + place] = tile[token][c];
        }
    }
    seen.store(q.to);
}

template <class F, class Source> void quantize4(const QuantizeArgs<F>& q, const Source& source, cudaStream_t stream) {
    require(q.C % 16 == 0 && q.N % 16 == 0 && q.to.columns);
    size_t num_blocks = ceil_div((size_t)q.N, (size_t)64) * ceil_div((size_t)q.C, (size_t)32);
    require(num_blocks <= INT_MAX);
    auto kernel = quantize_kernel4<F, Source>;
    kernel<<<(unsigned)num_blocks, 256, 0, stream>>>(q, source);
    cudaCheck(cudaGetLastError());
}

#endif

// ---- kernel 6: not fused: gelu_forward or gelu_backward, then kernel 3 or 5 ----

// active (N,C) is scratch for f(inp)
template <class F> void quantize6(const QuantizeArgs<F>& q, floatX* active, const floatX* dout, const floatX* inp,
                                  cudaStream_t stream, int block_size) {
    size_t n = (size_t)q.N * q.C;
    QuantizeArgs<F> copy = q;
    copy.unquantized = NULL;
    dout ? gelu_backward(active, dout, inp, n, stream) : gelu_forward(active, inp, n, stream);
#if !defined(ENABLE_FP32)
    if (q.to.columns) { return quantize5(copy, QuantizeCopy{active}, stream, block_size); }
#endif
    quantize3(copy, QuantizeCopy{active}, stream, block_size);
}

enum {
    QUANTIZE_ROWS,
    QUANTIZE_WEIGHT,
    QUANTIZE_GELU_ROWS,
    QUANTIZE_GELU,
    QUANTIZE_GRADIENT,
    QUANTIZE_GRADIENT_E5M2,
    QUANTIZE_DLOGITS
};

// Every finite number of the format, the ties between neighbours and what is next to these in bf16, and numbers beyond.
static void quantize_fill_ties(float* x, size_t n, bool is_e5m2, bool has_infinity) {
    std::vector<float> numbers, values = {0.0f, 1e4f, 6e4f, INFINITY};
    for (int exponent = is_e5m2 ? -16 : -9; exponent < (is_e5m2 ? 16 : 9); exponent++) {
        for (int i = 0; i < 8; i++) {
            numbers.push_back(fp8_round_cpu(ldexpf(1.0f + (float)i / 8, exponent), is_e5m2));
        }
    }
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    numbers.push_back(2 * numbers.back() - numbers[numbers.size() - 2]); // the next one, if the format had it
    float before = 0.0f;
    for (float number : numbers) {
        float tie = (before + number) / 2;
        values.insert(values.end(), {number, tie, tie * (1 - 1.0f / 128), tie * (1 + 1.0f / 128)});
        before = number;
    }
    auto overflows = [](float value) { return std::isinf((float)(floatX)value); };
    if (!has_infinity) { values.erase(std::remove_if(values.begin(), values.end(), overflows), values.end()); }
    for (size_t i = 0; i < n; i++) { x[i] = (i / values.size() % 2 ? -1.0f : 1.0f) * values[i % values.size()]; }
}

template <class F, class Source> static void declare_kernels(Bench& b, const QuantizeArgs<F>& q, const Source& source,
                                                             const floatX* dout, const floatX* inp, int kind) {
    cudaStream_t stream = b.stream;
    bool has_columns = kind != QUANTIZE_ROWS && kind != QUANTIZE_GELU_ROWS;
    b.kernel(
        1, "one thread per element, an atomic each", [=](int bs) { quantize1(q, source, stream, bs); }, {128, 256, 512},
        89);
    if constexpr (!std::is_same<Source, QuantizeDlogits>::value) { // which always has columns
        if (!has_columns) {
            b.kernel(
                2, "128-bit vectors, an atomic per block", [=](int bs) { quantize2(q, source, stream, bs); },
                {64, 128, 256, 512, 1024}, 89);
            b.kernel(
                3, "2 with few blocks: persistent", [=](int bs) { quantize3(q, source, stream, bs); },
                {64, 128, 256, 512, 1024}, 89);
        }
    }
#if !defined(ENABLE_FP32)
    if (has_columns) {
        b.kernel(
            4, "transposed by 64x32 tiles, byte by byte", [=](int) { quantize4(q, source, stream); }, {0}, 89);
        b.kernel(
            5, "transposed by ldmatrix: pairs of tokens as 16 bits", [=](int bs) { quantize5(q, source, stream, bs); },
            {128, 256, 512}, 89);
    }
#endif
    if (kind < QUANTIZE_GELU_ROWS || kind == QUANTIZE_DLOGITS || (has_columns && sizeof(floatX) == 4)) { return; }
    floatX* active = q.unquantized ? q.unquantized : (floatX*)b.scratch<floatX>("active", (size_t)q.N * q.C);
    b.kernel(
        6, "not fused: gelu_forward or gelu_backward, then 3 or 5",
        [=](int bs) { quantize6(q, active, dout, inp, stream, bs); }, {128, 256, 512}, 89);
}

template <class F> static void declare_as(Bench& b, int kind, int which) {
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    bool is_copy = kind <= QUANTIZE_WEIGHT, is_backward = kind >= QUANTIZE_GRADIENT;
    bool has_columns = kind != QUANTIZE_ROWS && kind != QUANTIZE_GELU_ROWS;
    // a scale that saturates about 0.3% of normal values; 1, so that ties stay ties
    Buffer<float> scale =
        b.input_from<float>("scale", 1, [=](float* x) { x[0] = which == 1 ? 1.0f : Fp8<F>::LARGEST / 3.0f; });
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [=, seed = b.next_seed()](float* x) {
        if (which == 1) { return quantize_fill_ties(x, n, Fp8<F>::IS_E5M2, is_copy); }
        is_copy ? bench_fill_normal(x, n, seed, 1.0f, 0.0f) : bench_fill_extremes(x, n, seed);
    });
    Buffer<floatX> dout = {NULL, NULL}, unquantized = {NULL, NULL};
    if (is_backward) { dout = b.input<floatX>("dout", n); }
    Tolerance exact = is_copy ? Tolerance{0, 0} : Tolerance{is_backward ? 3e-6f : 1e-6f, 1e-6f};
    Buffer<F> rows = fp8_output<F>(b, "rows", n, scale, exact), columns = {NULL, NULL};
    if (has_columns) { columns = fp8_output<F>(b, "columns", n, scale, exact); }
    Buffer<float> amax = fp8_amax(b, exact);
    if (kind == QUANTIZE_GELU_ROWS) {
        unquantized =
            b.output<floatX>("unquantized", n, sizeof(floatX) == 4 ? Tolerance{1e-6f, 1e-6f} : ulps<floatX>(1));
    }
    Fp8Tensor<F> to = {rows, columns, kind == QUANTIZE_WEIGHT, scale, amax};
    QuantizeArgs<F> q = {to, unquantized, N, C};
    b.reference([=] {
        if (is_copy) { memcpy(rows.host, inp.host, n * sizeof(float)); }
        if (is_backward) { gelu_backward_cpu(rows.host, dout.host, inp.host, n); }
        if (!is_copy && !is_backward) { gelu_forward_cpu(rows.host, inp.host, n); }
        if (has_columns) { fp8_transpose_cpu(columns.host, rows.host, N, C, q.to.in_order); }
        if (unquantized.host) { memcpy(unquantized.host, rows.host, n * sizeof(float)); }
        fp8_amax_cpu(amax.host, rows.host, n);
    });
    int num_inputs = 1 + is_backward, num_outputs = 1 + has_columns; // of 2 bytes and of 1 byte
    b.cost((double)n * ((num_inputs + (kind == QUANTIZE_GELU_ROWS)) * sizeof(floatX) + num_outputs), 0);
    if (is_copy) { declare_kernels(b, q, QuantizeCopy{inp}, NULL, inp, kind); }
    if (is_backward) { declare_kernels(b, q, QuantizeGeluBackward{dout, inp}, dout, inp, kind); }
    if (!is_copy && !is_backward) { declare_kernels(b, q, QuantizeGelu{inp}, NULL, inp, kind); }
#if defined(ENABLE_FP32)
    if (has_columns) { return; }
#endif
    b.promoted(has_columns ? 5 : 3);
}

// V: the columns that are no padding
static void declare_dlogits(Bench& b, int which) {
    typedef __nv_fp8_e5m2 F;
    int N = b.B * b.T, C = b.C, V = C - 7;
    size_t n = (size_t)N * C;
    const float dloss_value = 1.0f / 1024;
    Buffer<float> scale = b.input_from<float>("scale", 1, [=](float* x) { x[0] = Fp8<F>::LARGEST / 2 / dloss_value; });
    Buffer<float> dloss = b.input_from<float>("dloss", 1, [=](float* x) { x[0] = dloss_value; });
    Buffer<floatX> logits = b.input<floatX>("logits", n, which == 1 ? 30.0f : 3.0f);
    Buffer<int> targets = b.input_ids("targets", N, V);
    Buffer<float> losses = b.input_from<float>(
        "losses", N, [=](float* x) { crossentropy_forward_cpu(x, logits.host, targets.host, N, V, C); });
    // the target's term is a difference; an exponent is as exact as the logarithm of the sum and the logit, up to 256
    Tolerance exact = {4 * ulp_of<float>() * dloss_value, 256 * ulp_of<float>()};
    Buffer<F> rows = fp8_output<F>(b, "rows", n, scale, exact), columns = fp8_output<F>(b, "columns", n, scale, exact);
    Buffer<float> amax = fp8_amax(b, exact);
    b.reference([=] {
        std::vector<float> ignored(N);
        fused_classifier_cpu(rows.host, ignored.data(), logits.host, targets.host, dloss_value, N, V, C);
        fp8_transpose_cpu(columns.host, rows.host, N, C, false);
        fp8_amax_cpu(amax.host, rows.host, n);
    });
    b.cost((double)n * (sizeof(floatX) + 2), 0);
    QuantizeArgs<F> q = {{rows, columns, false, scale, amax}, NULL, N, C};
    declare_kernels(b, q, QuantizeDlogits{logits, losses, targets, dloss, V}, NULL, NULL, QUANTIZE_DLOGITS);
#if !defined(ENABLE_FP32)
    b.promoted(5);
#endif
}

static void declare(Bench& b) {
    int kind = b.kinds({"copy", "weight, with the transposed copy in order", "GELU, floatX beside it",
                        "GELU, with the transposed copy", "GELU's backward pass, with the transposed copy", "4 in e5m2",
                        "gradients of logits in e5m2, with the transposed copy"});
    int which = b.cases({"normal", "ties of the format, or large numbers"});
    if (kind == QUANTIZE_DLOGITS) { return declare_dlogits(b, which); }
    kind == QUANTIZE_GRADIENT_E5M2 ? declare_as<__nv_fp8_e5m2>(b, kind, which)
                                   : declare_as<__nv_fp8_e4m3>(b, kind, which);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "quantize", declare, {64, 1024, 3072, 1, 1},
                      {{1, 16, 16},
                       {3, 16, 784},
                       with_kind(1, {3, 16, 784}),
                       with_kind(1, {1, 80, 272}),
                       with_kind(2, {1, 48, 272}),
                       with_kind(3, {1, 16, 16}),
                       with_kind(3, {5, 16, 528}),
                       with_kind(4, {1, 96, 272}),
                       with_kind(5, {3, 32, 784}),
                       with_kind(6, {1, 48, 272}),
                       with_kind(6, {3, 32, 1040})});
}
