/* matmul_fp8: the products of a linear layer, out = inp weight^T + bias, and of its backward pass, with fp8 operands

   kind 0, forward     out (N,OC) floatX = inp (N,C) weight (OC,C)^T + bias (OC) floatX
   kind 1, 3, dX       dinp (N,C) floatX = dout (N,OC) columns of the weight (C,OC)^T
   kind 2, 4, dW       dweight (OC,C) float += columns of dout (OC,N) columns of inp (C,N)^T
   kind 5, 6, GELU     rows (N,OC) and columns (OC,N) = gelu(that of kind 0); 6: slope (N,OC) floatX out, GELU's slope
   kind 7, 8, 9, dX    rows (N,C) and columns (C,N) = dX times slope (N,C) floatX in; 9: sums (C) float += those of its
                       columns, before they are rounded
   N = B*T. dout is e5m2 in kinds 1, 2, 7 and 9, all other operands are e4m3. rows and columns have the type of dout, or
   e4m3; with them come scale (1) float in and amax (1) float inout, as in quantize.

   `columns` are what quantize and layernorm_quantize store beside the rows, see fp8.cuh: the tensor cores of Hopper
   want k, the dimension of the sum, contiguous in both operands. So all of these are the same product, written as

   out (M,N) = a (M,K) b (N,K)^T * a_scale * b_scale + bias | a_scale, b_scale (1) float in: one per tensor

   Bound: compute, 2*M*N*K FLOPs. Constraint: C % 16 == 0, OC % 16 == 0; N % 16 == 0, except in kinds 0, 1 and 3.
   Error to the fp64 product of the quantised values, whose size is 1 here: an ulp of floatX, and what the tensor cores
   lose. They keep 14 bits of the terms of a sum, aligned to the largest (DeepSeek-AI 2024, arXiv:2412.19437, section
   3.5.2): with q = 2^-13, each of the 32 products of a wgmma loses half of q of the sum so far, on average. With partial
   sums of 128 products, 0.5% (40 q) of a sum of terms of one sign, and 2% (160 q) of 1, where terms cancel. With one sum
   over K (all kernels but 1, 3 and 5) 1 + K/1280 times as much where terms cancel, and 1 + K/160 times as much where they
   have one sign: for K = 8192, 14% were seen on an H100. rows and columns must be what the CPU makes of a number that
   close to the exact one, times 1.13, GELU's largest slope.
   Source: Micikevicius et al. 2022, arXiv:2209.05433; partial sums in fp32: DeepSeek-AI 2024, section 3.3.2; wgmma and
   TMA: the PTX ISA; tiles: gemm.cuh.

   Kernels (this list is written by versions.sh):
     0  cuBLASLt, first candidate
     1  one thread per element
     2  cuBLASLt, algorithms timed (promoted)
     3  2 with partial sums in fp32
     4  gemm.cuh with wgmma of fp8
     5  4 with partial sums of 128 products in fp32 (slower than 4)
     6  not fused: 4, then kernel 5 of quantize with GELU (kind 5)
     7  4 with GELU and both e4m3 copies in the epilogue (kind 5)
     8  7 that saves GELU's slope (promoted) (kind 6)
     9  not fused: 4, then kernel 5 of quantize, times the slope (kinds 7, 8)
    10  4 times the slope, with both copies in the epilogue (kinds 7, 8)
    11  10 that sums the columns of its result (promoted) (kind 9)
     kind 5: forward with GELU in e4m3, with the transposed copy
     kind 6: 5 with GELU's slope saved
     kind 7: 1 times GELU's slope in e5m2, with the transposed copy
     kind 8: 3 times GELU's slope in e4m3, with the transposed copy
     kind 9: 7 with the sums of its columns

   nvcc -O3 --use_fast_math matmul_fp8.cu -lcublasLt -o matmul_fp8      (or: make matmul_fp8)
   ./matmul_fp8 5                check kernel 5 against the CPU and time it
   ./matmul_fp8 --kind 2         dW: every kernel, side by side
   ./matmul_fp8 -C 768 -V 2304   here -V is OC                                        */
#include "bench.h"
#include "cublaslt_linear.cuh"
#include "fp8.cuh"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "quantize.cuh"

#include "matmul_fp8.cuh" // kernels 2, 7, 8 and 11

#if !defined(ENABLE_FP32)

// ---- kernel 0: cuBLASLt, its first candidate ----

template <class A> void matmul_fp8_0(const MatmulFp8Args<A>& p, Execution exec) {
    exec.times_algorithms = false;
    matmul_fp8_2(p, true, exec);
}
#endif

// ---- kernel 1: one thread per element of out, each operand converted to float ----

template <class A> __global__ void matmul_fp8_kernel1(MatmulFp8Args<A> p) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.M * p.N) { return; }
    const A* a = p.a.values + i / p.N * p.K;
    const __nv_fp8_e4m3* b = p.b.values + i % p.N * p.K;
    float sum = 0.0f;
    for (int k = 0; k < p.K; k++) { sum += (float)a[k] * (float)b[k]; }
    sum = sum * (*p.a.inverse * *p.b.inverse) + (p.bias ? (float)p.bias[i % p.N] : 0.0f);
    if (p.out) {
        p.out[i] = (floatX)sum;
    } else {
        p.sum[i] += sum;
    }
}

template <class A> void matmul_fp8_1(const MatmulFp8Args<A>& p, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)p.M * p.N, (size_t)block_size);
    require(num_blocks <= INT_MAX);
    auto kernel = matmul_fp8_kernel1<A>;
    kernel<<<(unsigned)num_blocks, block_size, 0, stream>>>(p);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32)

// ---- kernels 2 and 3: cuBLASLt with one sum over K ("fast accumulation"), or with partial sums in fp32: matmul_fp8_2 ----

// ---- kernel 4: gemm.cuh with wgmma of fp8: the tensor cores keep one sum over K ----

// The form G with an e5m2 a; compare GemmTilesE4M3.
template <class G> struct MatmulFp8TilesE5M2 : G {
    template <int n> static __device__ void wgmma(float (&sum)[n], uint64_t a, uint64_t b, bool accumulate) {
        static_assert(n == 96 || n == 128, "192 or 256 columns");
        if constexpr (n == 96) { wgmma_64x192x32_e5m2_e4m3(sum, a, b, accumulate); }
        if constexpr (n == 128) { wgmma_64x256x32_e5m2_e4m3(sum, a, b, accumulate); }
    }
};
template <class G, class A> using MatmulFp8Tiles =
    typename std::conditional<Fp8<A>::IS_E5M2, MatmulFp8TilesE5M2<G>, GemmTilesE4M3<G>>::type;

// to (M,N) += sum * scale, for a warp's 16 rows from `row` on of each part of the accumulators.
template <class G> __device__ inline void matmul_fp8_add(float (&sum)[G::PARTS][G::COLUMNS / 2], float scale, float* to,
                                                         int row, int column, int M, int N) {
    int lane = threadIdx.x % 32, first = column + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < G::PARTS; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
            int at = row + 64 * m + 8 * half + lane / 4;
            if (at >= M) { continue; }
            float2* p = reinterpret_cast<float2*>(to + (size_t)at * N + first);
#pragma unroll
            for (int j0 = 0; j0 < G::COLUMNS / 8;
                 j0 += 8) { // 8 loads before the first of 8 stores, so that they overlap
                float2 x[8];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (column + 8 * (j0 + j) < N) { x[j] = p[4 * (j0 + j)]; }
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int k = 4 * (j0 + j) + 2 * half;
                    if (column + 8 * (j0 + j) >= N) { continue; }
                    p[4 * (j0 + j)] = make_float2(x[j].x + scale * sum[m][k], x[j].y + scale * sum[m][k + 1]);
                }
            }
        }
    }
}

// ---- kernel 5: partial sums of 128 products in the tensor cores, added to a sum in fp32 registers ----
// A stage of the ring has 128 of K, so each stage is a partial sum of its own. The registers hold both, so a consumer
// has 64 rows of 192 columns at most: 96 accumulators twice. While one consumer adds, the other one multiplies.

template <class G> __device__ inline void matmul_fp8_multiply_split(float (&sum)[G::PARTS][G::COLUMNS / 2],
                                                                    GemmSMem<G>& smem, int first_row, int num_steps,
                                                                    int& i) {
    static_assert(G::PARTS == 1, "two sets of accumulators");
    gemm_clear<G>(sum);
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        auto& stage = smem.stages[i % G::RING];
        uint64_t a = wgmma_descriptor(stage.inp + first_row * 64);
        float part[G::COLUMNS / 2];
        smem.ring.wait(i);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            G::wgmma(part, a + 2 * k, GemmWeight<G>::descriptor(stage.weight) + 2 * k, k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(part);
        G::release(&smem.ring.empty[i % G::RING]);
#pragma unroll
        for (int j = 0; j < G::COLUMNS / 2; j++) { sum[0][j] += part[j]; }
    }
}

// Kernels 4 and 5: as gemm_forms_sm90_kernel, whose results may also be added to `to` (M,N). `split`: see kernel 5.
template <class G, bool split> __global__ void __launch_bounds__(384, 1)
    matmul_fp8_sm90_kernel4(const __grid_constant__ GemmMaps maps, GemmScaledBias<0> epilogue, float* to, int M, int N,
                            int K, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(gemm_dynamic);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles);
    if (warp < 4) { return; }
    int warpgroup = warp / 4, rank = G::rank(), num_steps = ceil_div(K, 64), i = 0;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
    int box = 0, number = 0, first_row = gemm_is_ping_pong<G> ? 0 : (warpgroup - 1) * 64;
    if (gemm_is_ping_pong<G>) {
        first += (warpgroup - 1) * stride;
        stride *= 2;
        i = (warpgroup - 1) * num_steps;
    }
    epilogue.begin();
#pragma unroll 1
    for (int index = first; index < num_tiles; index += stride, number++) {
        float sum[G::PARTS][G::COLUMNS / 2];
        GemmTile tile = gemm_tile<G>(index, M, N, rank);
        int row = tile.row + first_row + warp % 4 * 16;
        GemmColumns<G, GemmScaledBias<0>> columns;
        gemm_prepare(columns, epilogue, smem, maps.third, GemmTile{row, tile.column}, N, box);
        if constexpr (split) {
            matmul_fp8_multiply_split<G>(sum, smem, first_row, num_steps, i);
        } else {
            gemm_multiply<G>(sum, smem, num_steps, number, i);
        }
        if (gemm_is_ping_pong<G>) { i += num_steps; }
        if (to) {
            matmul_fp8_add<G>(sum, epilogue.scale, to, row, tile.column, M, N);
        } else {
            gemm_store<G>(sum, epilogue, columns, smem, maps.out, maps.second, maps.third, GemmTile{row, tile.column},
                          M, box);
        }
    }
    gemm_end<G>();
#endif
}

template <class G, bool split, class A> static void matmul_fp8_launch4(const MatmulFp8Args<A>& p, cudaStream_t stream) {
    typedef MatmulFp8Tiles<G, A> Tiles;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(p.K % 16 == 0 && p.N % 8 == 0 && (p.out || p.accumulate));
    // gemm.cuh addresses two fp8 elements as one floatX
    GemmArgs g = {p.out, NULL, (const floatX*)p.a.values, (const floatX*)p.b.values, NULL, p.M, p.N, p.K / 2};
    GemmScaledBias<0> epilogue = {{p.bias}, p.a.inverse, p.b.inverse, NULL, NULL, 0, 0, 0, 0};
    int num_tiles = gemm_num_tiles<Tiles>(g.M, g.N, g.K);
    gemm_start<Tiles>(matmul_fp8_sm90_kernel4<Tiles, split>, num_tiles, true, stream, gemm_maps<Tiles>(g), epilogue,
                      p.out ? (float*)NULL : p.sum, g.M, g.N, g.K, num_tiles);
}

enum { MATMUL_FP8_PING_PONG_192 = 1, MATMUL_FP8_COOPERATIVE_256 };
template <class A> void matmul_fp8_4(const MatmulFp8Args<A>& p, int form, cudaStream_t stream) {
    if (form == MATMUL_FP8_PING_PONG_192) { return matmul_fp8_launch4<GemmPingPong192Pairs, false>(p, stream); }
    require(form == MATMUL_FP8_COOPERATIVE_256);
    matmul_fp8_launch4<GemmCooperative256Pairs, false>(p, stream);
}

typedef GemmTiles<128, 192, false, GemmPair, 4, 4> MatmulFp8Cooperative192Pairs;
typedef GemmTiles<128, 192, false, GemmSingle, 4, 4> MatmulFp8Cooperative192;
enum { MATMUL_FP8_PAIRS = 1, MATMUL_FP8_SINGLE };
template <class A> void matmul_fp8_5(const MatmulFp8Args<A>& p, int form, cudaStream_t stream) {
    if (form == MATMUL_FP8_PAIRS) { return matmul_fp8_launch4<MatmulFp8Cooperative192Pairs, true>(p, stream); }
    require(form == MATMUL_FP8_SINGLE);
    matmul_fp8_launch4<MatmulFp8Cooperative192, true>(p, stream);
}

// ---- kernel 6: not fused: kernel 4, then GELU and both copies by kernel 5 of quantize ----

// hidden (M,N) is scratch
void matmul_fp8_6(MatmulFp8Args<__nv_fp8_e4m3> p, const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* hidden,
                  cudaStream_t stream) {
    p.out = hidden;
    matmul_fp8_4(p, MATMUL_FP8_PING_PONG_192, stream);
    QuantizeArgs<__nv_fp8_e4m3> q = {to, NULL, p.M, p.N};
    quantize5(q, QuantizeGelu{hidden}, stream, 256);
}

// rows, columns = gelu(y)
void matmul_fp8_7(const MatmulFp8Args<__nv_fp8_e4m3>& p, const Fp8Tensor<__nv_fp8_e4m3>& to, cudaStream_t stream) {
    matmul_fp8_launch7(p, MatmulFp8Quantized<__nv_fp8_e4m3, MATMUL_FP8_MODE_GELU>{to, NULL}, NULL, NULL, stream);
}

// ---- kernel 9: not fused: kernel 4, then times the slope and both copies by kernel 5 of quantize ----

struct MatmulFp8TimesSlope { // what is quantised, see QuantizeCopy
    const floatX *inp, *slope;
    __device__ x128 vector(size_t i) const {
        x128 x = load128(inp + i), s = load128(slope + i);
        for (int k = 0; k < x128::size; k++) { x[k] = (floatX)((float)x[k] * (float)s[k]); }
        return x;
    }
};

// hidden (M,N) is scratch
template <class A> void matmul_fp8_9(MatmulFp8Args<A> p, const Fp8Tensor<A>& to, const floatX* slope, floatX* hidden,
                                     cudaStream_t stream) {
    p.out = hidden;
    matmul_fp8_4(p, MATMUL_FP8_PING_PONG_192, stream);
    QuantizeArgs<A> q = {to, NULL, p.M, p.N};
    quantize5(q, MatmulFp8TimesSlope{hidden, slope}, stream, 256);
}

// ---- kernel 10: dX times the slope that kernel 8 has saved, in the type of dout ----

template <class A>
void matmul_fp8_10(const MatmulFp8Args<A>& p, const Fp8Tensor<A>& to, const floatX* slope, cudaStream_t stream) {
    matmul_fp8_launch7(p, MatmulFp8Quantized<A, MATMUL_FP8_MODE_TIMES_SLOPE>{to, NULL}, NULL, slope, stream);
}

#endif

// What a tolerance is multiplied by for one sum over K, see the top of the file.
static float matmul_fp8_one_sum(int K, int which) { return 1 + (float)K / (which == 1 || which == 3 ? 160 : 1280); }

template <class A> static void declare_kernels(Bench& b, const MatmulFp8Args<A>& p, int which) {
    cudaStream_t stream = b.stream;
    float one_sum = matmul_fp8_one_sum(p.K, which);
    auto declared = [&](bool has_one_sum) {
        if (has_one_sum) { b.coarser(one_sum); }
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    };
#if !defined(ENABLE_FP32)
    b.kernel(
        0, "cuBLASLt, first candidate", [=](int) { matmul_fp8_0(p, stream); }, {0}, 89);
    declared(true);
#endif
    b.kernel(
        1, "one thread per element", [=](int bs) { matmul_fp8_1(p, stream, bs); }, {64, 256, 1024}, 89);
    declared(false);
#if !defined(ENABLE_FP32)
    b.kernel(
        2, "cuBLASLt, algorithms timed", [=](int) { matmul_fp8_2(p, true, stream); }, {0}, 89);
    declared(true);
    b.kernel(
        3, "2 with partial sums in fp32", [=](int) { matmul_fp8_2(p, false, stream); }, {0}, 89);
    declared(false);
    b.kernel(
        4, "gemm.cuh with wgmma of fp8", [=](int form) { matmul_fp8_4(p, form, stream); }, {0}, -90);
    b.config("form", {{MATMUL_FP8_PING_PONG_192, "ping-pong 128x192 in clusters of two"},
                      {MATMUL_FP8_COOPERATIVE_256, "cooperative 128x256 in clusters of two"}});
    declared(true);
    b.kernel(
        5, "4 with partial sums of 128 products in fp32", [=](int form) { matmul_fp8_5(p, form, stream); }, {0}, -90);
    b.config("form", {{MATMUL_FP8_PAIRS, "cooperative 128x192 in clusters of two"},
                      {MATMUL_FP8_SINGLE, "cooperative 128x192"}});
    declared(false);
#endif
}

enum {
    MATMUL_FP8_FORWARD,
    MATMUL_FP8_DX,
    MATMUL_FP8_DW,
    MATMUL_FP8_DX_E4M3,
    MATMUL_FP8_DW_E4M3,
    MATMUL_FP8_GELU,
    MATMUL_FP8_GELU_SLOPE,
    MATMUL_FP8_DX_SLOPE,
    MATMUL_FP8_DX_SLOPE_E4M3,
    MATMUL_FP8_DX_SLOPE_SUMS
};
const float MATMUL_FP8_Q = 1.0f / (1 << 13); // see the top of the file

// The inputs of a product, and its reference.
template <class A> struct MatmulFp8Inputs {
    Buffer<A> a;
    Buffer<__nv_fp8_e4m3> b;
    Buffer<float> a_scale, b_scale;
    Buffer<floatX> bias; // or NULL
    int M, N, K;
    std::vector<size_t> rows; // of out, that are compared

    MatmulFp8Args<A> args(floatX* out, float* sum, bool accumulate) const {
        return {out, sum, accumulate, {a, a_scale}, {b, b_scale}, bias, M, N, K};
    }
    // The product of these rows, plus the bias.
    std::vector<float> product() const {
        std::vector<float> x = rows_of(a.host, rows, K), y(rows.size() * N);
        matmul_forward_cpu(y.data(), x.data(), b.host, NULL, NULL, rows.size(), K, N);
        double scale = (double)a_scale.host[0] * b_scale.host[0];
        for (size_t i = 0; i < y.size(); i++) { y[i] = (float)(y[i] * scale + (bias.host ? bias.host[i % N] : 0.0f)); }
        return y;
    }
};

// Normal values of a, and of b by 1 / sqrt(K), are multiplied by a factor and quantised. which: see declare()
template <class A> static MatmulFp8Inputs<A> declare_inputs(Bench& b, int which, int M, int N, int K, bool has_bias) {
    const float a_factor = Fp8<A>::LARGEST / 6.0f, b_factor = 448.0f / 6.0f;
    auto fill = [=](float* x, size_t n, uint32_t seed, float factor) {
        bench_fill_normal(x, n, seed, factor, 0.0f);
        for (size_t i = 0; (which == 1 || which == 3) && i < n; i++) { x[i] = fabsf(x[i]); }
    };
    MatmulFp8Inputs<A> x;
    x.M = M, x.N = N, x.K = K, x.bias = {NULL, NULL};
    x.a = b.input_from<A>("a", (size_t)M * K, [=, seed = b.next_seed()](float* values) {
        if (which != 2) { return fill(values, (size_t)M * K, seed, a_factor); }
        bench_fill_one_hot(values, M, K, seed);
        for (size_t i = 0; i < (size_t)M * K; i++) { values[i] *= a_factor; }
    });
    x.b = b.input_from<__nv_fp8_e4m3>("b", (size_t)N * K, [=, seed = b.next_seed()](float* values) {
        fill(values, (size_t)N * K, seed, b_factor);
        for (size_t i = 0; which == 3 && i < (size_t)N * K; i++) { values[i] = -values[i]; }
    });
    x.a_scale = b.input_from<float>("a_scale", 1, [=](float* scale) { scale[0] = 1 / a_factor; });
    x.b_scale = b.input_from<float>("b_scale", 1, [=](float* scale) { scale[0] = 1 / (b_factor * sqrtf((float)K)); });
    if (has_bias) { x.bias = b.input<floatX>("bias", N); }
    x.rows = b.sample(M, 2.0 * N * K);
    return x;
}

template <class A> static void declare_as(Bench& b, int kind, int which, bool is_dw) {
    bool is_forward = kind == MATMUL_FP8_FORWARD, is_dx = !is_forward && !is_dw;
    int tokens = b.B * b.T, C = b.C, OC = b.V;
    int M = is_dw ? OC : tokens, N = is_forward ? OC : C, K = is_forward ? C : is_dx ? OC : tokens;
    MatmulFp8Inputs<A> x = declare_inputs<A>(b, which, M, N, K, is_forward);
    Buffer<floatX> out = {NULL, NULL};
    Buffer<float> start = {NULL, NULL}, sum = {NULL, NULL};
    Tolerance tolerance = {160 * MATMUL_FP8_Q, 40 * MATMUL_FP8_Q};
    if (is_dw) {
        start = b.input<float>("start", (size_t)M * N);
        sum = b.inout<float>("dweight", (size_t)M * N, start, tolerance);
    } else {
        out = b.output<floatX>("out", (size_t)M * N, {tolerance.atol, tolerance.rtol + ulp_of<floatX>()});
    }
    b.reference([=] {
        std::vector<float> y = x.product(), before = rows_of(start.host, x.rows, N);
        for (size_t i = 0; i < before.size(); i++) { y[i] += before[i]; }
        put_rows(is_dw ? sum.host : out.host, y, x.rows, N);
    });
    double bytes = is_dw ? 2.0 * sizeof(float) : sizeof(floatX);
    b.cost((double)M * K + (double)N * K + bytes * M * N, 2.0 * M * N * K);
    declare_kernels(b, x.args(out, sum, true), which);
#if !defined(ENABLE_FP32)
    if (is_forward || Fp8<A>::IS_E5M2) { b.promoted(is_forward ? 2 : 3); }
#endif
}

// The kinds whose result is quantised: in the type of a.
template <class A> static void declare_quantized(Bench& b, int kind, int which) {
    bool is_forward = kind <= MATMUL_FP8_GELU_SLOPE, saves_slope = kind == MATMUL_FP8_GELU_SLOPE;
    int M = b.B * b.T, N = is_forward ? b.V : b.C, K = is_forward ? b.C : b.V;
    size_t n = (size_t)M * N;
    MatmulFp8Inputs<A> x = declare_inputs<A>(b, which, M, N, K, is_forward);
    Buffer<float> scale = b.input_from<float>("scale", 1, [](float* to) { to[0] = Fp8<A>::LARGEST / 4.0f; });
    Buffer<floatX> slope = {NULL, NULL};
    // of the result before it is rounded; 1.13: GELU's largest slope. Kernels 6 and 9 round the product to floatX.
    Tolerance exact = {1.13f * 160 * MATMUL_FP8_Q, 1.13f * 40 * MATMUL_FP8_Q + ulp_of<floatX>()};
    // 1.2: its largest second derivative; see gelu_and_slope()
    Tolerance of_slope = {1.2f * 160 * MATMUL_FP8_Q + 2e-4f, exact.rtol};
    if (saves_slope) { slope = b.output<floatX>("slope", n, of_slope); }
    if (!is_forward) {
        slope = b.input_from<floatX>("slope", n, [=, seed = b.next_seed()](float* to) {
            bench_fill_normal(to, n, seed, 0.4f, 0.5f);
            for (size_t i = 0; i < n; i++) { to[i] = fminf(fmaxf(to[i], -0.13f), 1.13f); }
        });
    }
    Buffer<A> rows = fp8_output<A>(b, "rows", n, scale, exact), columns = fp8_output<A>(b, "columns", n, scale, exact);
    Buffer<float> amax = fp8_amax(b, exact);
    Buffer<float> start = {NULL, NULL}, sums = {NULL, NULL};
    if (kind == MATMUL_FP8_DX_SLOPE_SUMS) { // the errors of the rows are independent, unless the terms have one sign
        float factor = which == 1 || which == 3 ? (float)M : sqrtf((float)M);
        start = b.input<float>("start", N);
        sums = b.inout<float>("sums", N, start, Tolerance{factor * exact.atol, exact.rtol});
    }
    b.reference([=] {
        std::vector<float> y = x.product(), ones(y.size(), 1.0f), slopes = y;
        if (saves_slope) {
            gelu_backward_cpu(slopes.data(), ones.data(), y.data(), y.size());
            put_rows(slope.host, slopes, x.rows, N);
        }
        if (is_forward) {
            gelu_forward_cpu(y.data(), y.data(), y.size());
        } else {
            slopes = rows_of(slope.host, x.rows, N);
            for (size_t i = 0; i < y.size(); i++) { y[i] *= slopes[i]; }
        }
        put_rows(rows.host, y, x.rows, N);
        fp8_transpose_cpu(columns.host, rows.host, M, N, false);
        if (x.rows.size() < (size_t)M) { return; }
        fp8_amax_cpu(amax.host, rows.host, n);
        if (!sums.host) { return; }
        memcpy(sums.host, start.host, N * sizeof(float));
        matmul_backward_bias_cpu(sums.host, rows.host, M, N);
    });
    b.cost((double)M * K + (double)N * K + (2.0 + (kind == MATMUL_FP8_GELU ? 0 : sizeof(floatX))) * n, 2.0 * M * N * K);
#if !defined(ENABLE_FP32)
    MatmulFp8Args<A> p = x.args(NULL, NULL, false);
    Fp8Tensor<A> to = {rows, columns, false, scale, amax};
    cudaStream_t stream = b.stream;
    auto variant = [&](int number, const char* what, std::function<void(int)> launch) {
        b.kernel(number, what, launch, {0}, -90);
        b.coarser(matmul_fp8_one_sum(K, which));
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    };
    floatX* hidden = saves_slope ? NULL : (floatX*)b.scratch<floatX>("hidden", n);
    if constexpr (!Fp8<A>::IS_E5M2) {
        if (kind == MATMUL_FP8_GELU) {
            variant(6, "not fused: 4, then kernel 5 of quantize with GELU",
                    [=](int) { matmul_fp8_6(p, to, hidden, stream); });
            return variant(7, "4 with GELU and both e4m3 copies in the epilogue",
                           [=](int) { matmul_fp8_7(p, to, stream); });
        }
        if (saves_slope) {
            variant(8, "7 that saves GELU's slope", [=](int) { matmul_fp8_8(p, to, slope, stream); });
            return b.promoted(8);
        }
    }
    if (kind != MATMUL_FP8_DX_SLOPE_SUMS) {
        variant(9, "not fused: 4, then kernel 5 of quantize, times the slope",
                [=](int) { matmul_fp8_9(p, to, slope, hidden, stream); });
        return variant(10, "4 times the slope, with both copies in the epilogue",
                       [=](int) { matmul_fp8_10(p, to, slope, stream); });
    }
    float* partials = b.scratch<float>("partials", (size_t)ceil_div(M, 128) * N);
    variant(11, "10 that sums the columns of its result",
            [=](int) { matmul_fp8_11(p, to, sums, partials, slope, stream); });
    b.promoted(11);
#endif
}

static void declare(Bench& b) {
    int kind = b.kinds({"forward", "dX with an e5m2 gradient", "dW with an e5m2 gradient", "dX with an e4m3 gradient",
                        "dW with an e4m3 gradient", "forward with GELU in e4m3, with the transposed copy",
                        "5 with GELU's slope saved", "1 times GELU's slope in e5m2, with the transposed copy",
                        "3 times GELU's slope in e4m3, with the transposed copy", "7 with the sums of its columns"});
    // the last: without its negative terms a result is the bias alone, as past the end
    int which = b.cases({"normal", "terms of one sign", "one nonzero per row", "negative terms"});
    bool is_dw = kind == MATMUL_FP8_DW || kind == MATMUL_FP8_DW_E4M3;
    // where it matters, the number of tokens stays a multiple of 16
    b.varies(is_dw || kind >= MATMUL_FP8_GELU ? "BCV" : "BTCV");
    if (!b.dry) { cublaslt_open(); }
    b.matrix_rate(cublaslt_matrix_rate);
    if (kind == MATMUL_FP8_DX_SLOPE || kind == MATMUL_FP8_DX_SLOPE_SUMS) {
        return declare_quantized<__nv_fp8_e5m2>(b, kind, which);
    }
    if (kind >= MATMUL_FP8_GELU) { return declare_quantized<__nv_fp8_e4m3>(b, kind, which); }
    bool is_e5m2 = kind == MATMUL_FP8_DX || kind == MATMUL_FP8_DW;
    is_e5m2 ? declare_as<__nv_fp8_e5m2>(b, kind, which, is_dw) : declare_as<__nv_fp8_e4m3>(b, kind, which, is_dw);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "matmul_fp8", declare, {64, 1024, 768, 1, 3072},
                      {{1, 16, 16, 1, 16},
                       {1, 37, 784, 1, 208},
                       {1, 300, 272, 1, 400},
                       with_kind(1, {1, 5, 208, 1, 784}),
                       with_kind(1, {1, 144, 272, 1, 1040}),
                       with_kind(2, {1, 16, 16, 1, 16}),
                       with_kind(2, {1, 8192, 48, 1, 64}), // long sums, which need partial sums
                       with_kind(2, {1, 272, 400, 1, 272}),
                       with_kind(3, {2, 144, 272, 1, 528}),
                       with_kind(4, {5, 80, 208, 1, 144}),
                       with_kind(5, {1, 16, 16, 1, 16}),
                       with_kind(5, {1, 336, 272, 1, 208}),
                       with_kind(5, {1, 272, 80, 1, 592}),
                       with_kind(6, {1, 272, 80, 1, 592}),
                       with_kind(6, {1, 16, 272, 1, 208}),
                       with_kind(7, {1, 336, 208, 1, 272}),
                       with_kind(8, {1, 272, 592, 1, 80}),
                       with_kind(9, {1, 336, 208, 1, 272}),
                       with_kind(9, {1, 16, 592, 1, 80})});
}
