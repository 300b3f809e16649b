/* layernorm_quantize: layernorm_forward, or fused_residual_layernorm, whose result is e4m3, with amax

   rows (N,C) e4m3 out | beside (N,C) floatX out, the same before it is quantised, in kinds 0 and 3 | columns (C,N) e4m3
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
#define PROMOTED_ONLY
#include "fused_residual_layernorm.cu"
#include "gelu_backward.cu"
#include "gelu_forward.cu"
#include "layernorm_forward.cu"
#include "quantize.cu"
#undef PROMOTED_ONLY

// ==== promoted: layernorm_quantize ====
typedef __nv_fp8_e4m3 F8;

struct LayernormQuantizeArgs {
    Fp8Tensor<F8> to;
    floatX* beside;     // (N,C), or NULL
    floatX* residual;   // (N,C) = inp + inp2, of which the layernorm is taken; or NULL: that of inp
    float *mean, *rstd; // (N)
    const floatX *inp, *inp2, *weight, *bias;
    int N, C;
};
// ==== end promoted: layernorm_quantize ====

// ---- kernel 1: not fused: layernorm_forward, then kernel 3 or 5 of quantize ----

// norm (N,C) is where floatX goes: `beside`, or scratch
void layernorm_quantize1(const LayernormQuantizeArgs& q, floatX* norm, cudaStream_t stream, int block_size) {
    if (q.residual) {
        fused_residual_layernorm_forward(q.residual, norm, q.mean, q.rstd, q.inp, q.inp2, q.weight, q.bias, q.N, q.C,
                                         stream);
    } else {
        layernorm_forward(norm, q.mean, q.rstd, q.inp, q.weight, q.bias, q.N, q.C, stream);
    }
    QuantizeArgs<F8> copy = {q.to, NULL, q.N, q.C};
#if !defined(ENABLE_FP32)
    if (q.to.columns) { return quantize5(copy, QuantizeCopy{norm}, stream, block_size); }
#endif
    quantize3(copy, QuantizeCopy{norm}, stream, block_size);
}

// ==== promoted: layernorm_quantize ====
#if !defined(ENABLE_FP32) // a vector is 8 elements
// ---- kernel 2: one warp per row, the row in registers; quantised on the way to memory ----

// The layernorm of a row of num_vecs vectors per lane, the last of which may be past the row's end; in place.
template <int num_vecs> __device__ inline void layernorm_quantize_row(x128 (&x)[num_vecs], float* mean, float* rstd,
                                                                      const LayernormQuantizeArgs& q, int row) {
    int first = threadIdx.x % 32 * x128::size;
    auto inside = [&](int j) { return j < num_vecs - 1 || first + j * 256 < q.C; };
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        size_t i = (size_t)row * q.C + first + j * 256;
        x[j] = inside(j) ? load128(q.inp + i) : x128();
        if (!q.residual || !inside(j)) { continue; }
        x128 y = load128(q.inp2 + i);
        for (int k = 0; k < x128::size; k++) { x[j][k] = (floatX)((float)x[j][k] + (float)y[k]); }
        store128(q.residual + i, x[j]);
    }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; k < x128::size; k++) { sum += (float)x[j][k]; }
    }
    float m = warp_sum(sum) / q.C;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; inside(j) && k < x128::size; k++) { squares += ((float)x[j][k] - m) * ((float)x[j][k] - m); }
    }
    float r = rsqrtf(warp_sum(squares) / q.C + 1e-5f);
    if (threadIdx.x % 32 == 0) { *mean = m, *rstd = r; }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (!inside(j)) { continue; }
        x128 w = load128(q.weight + first + j * 256), b = load128(q.bias + first + j * 256);
        for (int k = 0; k < x128::size; k++) {
            x[j][k] = (floatX)(((float)x[j][k] - m) * r * (float)w[k] + (float)b[k]);
        }
    }
}

template <int num_vecs> __global__ void __launch_bounds__(512) layernorm_quantize_kernel2(LayernormQuantizeArgs q) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = threadIdx.x % 32 * x128::size;
    Fp8Seen<F8> seen(q.to);
    if (row < q.N) {
        x128 x[num_vecs];
        layernorm_quantize_row(x, q.mean + row, q.rstd + row, q, row);
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            size_t i = (size_t)row * q.C + first + j * 256;
            uint32_t words[2];
            if (first + j * 256 >= q.C) { continue; }
            seen.store_vector(q.to.rows + i, words, x[j]);
            if (q.beside) { store128(q.beside + i, x[j]); }
        }
    }
    seen.store(q.to);
}

// Calls launch(n) with the vectors per lane that a row of C needs, as a constant.
template <class Launch> static void layernorm_quantize_vectors(int C, Launch launch) {
    require(C % 16 == 0);
    with_constant<7>(ceil_div(C, 256), launch); // C <= 1792
}

static void layernorm_quantize2(const LayernormQuantizeArgs& q, cudaStream_t stream, int block_size) {
    require(!q.to.columns && block_size <= 512);
    layernorm_quantize_vectors(q.C, [&](auto num_vecs) {
        auto kernel = layernorm_quantize_kernel2<decltype(num_vecs)::value>;
        kernel<<<ceil_div(q.N, block_size / 32), block_size, 0, stream>>>(q);
    });
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: 2 with the transposed copy: a block has 64 tokens, a warp takes pairs of them, see fp8.cuh ----

template <int num_vecs> __global__ void __launch_bounds__(512) layernorm_quantize_kernel3(LayernormQuantizeArgs q) {
    extern __shared__ __align__(16) unsigned char layernorm_quantize_tile[]; // fp8_tile_bytes(C)
    int first_token = blockIdx.x * FP8_TILE_TOKENS, first = threadIdx.x % 32 * x128::size;
    int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    Fp8Seen<F8> seen(q.to);
#pragma unroll 1
    for (int pair = warp; pair < FP8_TILE_PAIRS; pair += num_warps) {
        int token = first_token + fp8_first_token(pair, q.to.in_order);
        uint32_t words[2][num_vecs][2] = {};
        if (token < q.N) { // both of the pair, because N % 16 == 0
#pragma unroll
            for (int second = 0; second < 2; second++) {
                int row = token + second * fp8_pair_distance(q.to.in_order);
                x128 x[num_vecs];
                layernorm_quantize_row(x, q.mean + row, q.rstd + row, q, row);
#pragma unroll
                for (int j = 0; j < num_vecs; j++) {
                    if (first + j * 256 >= q.C) { continue; }
                    seen.store_vector(q.to.rows + (size_t)row * q.C + first + j * 256, words[second][j], x[j]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (first + j * 256 >= q.C) { continue; }
            *reinterpret_cast<uint4*>(fp8_tile_at(layernorm_quantize_tile, pair, first + j * 256, q.C)) =
                fp8_pair(words[0][j], words[1][j]);
        }
    }
    __syncthreads();
    auto* to = reinterpret_cast<__nv_fp8_storage_t*>(q.to.columns) + first_token;
    for (int c = 8 * warp; c < q.C; c += 8 * num_warps) {
        fp8_store_columns(to, layernorm_quantize_tile, c, q.C, q.C, q.N - first_token, q.N);
    }
    seen.store(q.to);
}

static void layernorm_quantize3(const LayernormQuantizeArgs& q, cudaStream_t stream, int block_size) {
    require(q.to.columns && !q.beside && q.N % 16 == 0 && block_size <= 512);
    layernorm_quantize_vectors(q.C, [&](auto num_vecs) {
        auto kernel = layernorm_quantize_kernel3<decltype(num_vecs)::value>;
        int bytes = fp8_tile_bytes(q.C);
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<ceil_div(q.N, FP8_TILE_TOKENS), block_size, bytes, stream>>>(q);
    });
    cudaCheck(cudaGetLastError());
}

void layernorm_quantize(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* beside, floatX* residual, float* mean, float* rstd,
                        const floatX* inp, const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                        cudaStream_t stream) {
    Op op(stream, (double)N * C * ((inp2 ? 3 : 1) * sizeof(floatX) + (beside ? 2 : 0) + (to.columns ? 2 : 1)), 0,
          "layernorm_quantize");
    LayernormQuantizeArgs q = {to, beside, residual, mean, rstd, inp, inp2, weight, bias, N, C};
    to.columns ? layernorm_quantize3(q, stream, 256) : layernorm_quantize2(q, stream, 256);
}
#endif
// ==== end promoted: layernorm_quantize ====

static void declare(Bench& b) {
    int kind = b.kinds({"floatX beside e4m3", "e4m3 alone", "e4m3 with the transposed copy", "0 of a residual sum",
                        "2 of a residual sum"});
    int which = b.cases({"normal", "large mean"});
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    bool has_beside = kind == 0 || kind == 3, has_columns = kind == 2 || kind == 4, has_sum = kind >= 3;
    b.varies(has_columns ? "BC" : "BTC"); // with columns the number of tokens stays a multiple of 16
    Buffer<float> scale = b.input_from<float>("scale", 1, [](float* x) { x[0] = 448.0f / 3.0f; });
    Buffer<floatX> inp = b.input<floatX>("inp", n, 1.0f, which == 1 ? 30.0f : 0.0f);
    Buffer<floatX> weight = b.input<floatX>("weight", C), bias = b.input<floatX>("bias", C), beside = {NULL, NULL};
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
    if (has_beside) { beside = b.output<floatX>("beside", n, {exact.atol, 0.5f * ulp_of<floatX>() + exact.rtol}); }
    Buffer<float> mean = b.output<float>("mean", N, ulps<float>(4, 1.0f));
    Buffer<float> rstd = b.output<float>("rstd", N, ulps<float>(which == 1 ? 32 : 16, 0.0f));
    b.reference([=] {
        for (size_t i = 0; has_sum && i < n; i++) { residual.host[i] = (float)(floatX)(inp.host[i] + inp2.host[i]); }
        layernorm_forward_cpu(rows.host, mean.host, rstd.host, has_sum ? residual.host : inp.host, weight.host,
                              bias.host, N, C);
        if (has_columns) { fp8_transpose_cpu(columns.host, rows.host, N, C, false); }
        if (has_beside) { memcpy(beside.host, rows.host, n * sizeof(float)); }
        fp8_amax_cpu(amax.host, rows.host, n);
    });
    b.cost((double)n * ((1 + 2 * has_sum + has_beside) * sizeof(floatX) + 1 + has_columns), 0);
    Fp8Tensor<F8> to = {rows, columns, false, scale, amax};
    LayernormQuantizeArgs q = {to, beside, residual, mean, rstd, inp, inp2, weight, bias, N, C};
    cudaStream_t stream = b.stream;
#if defined(ENABLE_FP32)
    if (has_columns) { return; }
#endif
    floatX* norm = has_beside ? (floatX*)beside : (floatX*)b.scratch<floatX>("norm", n);
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
