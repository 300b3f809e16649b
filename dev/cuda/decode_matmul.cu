/* decode_matmul: decode_matvec on tensor cores, for many texts: out = gelu?(layernorm?(x) weight^T + bias) + residual

   out (B,OC) floatX out, float for the head | x (B,K) floatX in | norm_weight, norm_bias (K) floatX in, or NULL
   weight (OC,K) in: floatX, or int8 or e4m3 with scales (OC) float | bias (OC) floatX in, or NULL
   residual (B,OC) floatX in, or NULL, may be out itself
   Operations with a ? are optional; a residual excludes gelu and a layernorm.
   Bound: memory, the bytes of the weight: 1 or 2 times OC*K; with few rows of weight, latency.
   Constraint: K % 8 == 0; 16-bit floatX; kernels 3 to 5 need sm_90a.
   Error: one ulp of floatX, and 1e-5 of the terms' magnitude for the sums. With a layernorm also two ulps of the terms'
   magnitude, as in decode_matvec.cu: the normalised x is rounded to floatX before the product.
   Source: layernorm: Ba et al. 2016, arXiv:1607.06450; gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415; moments of
   parts of a row: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
   variances"; mma: the PTX ISA; overlap: CUDA C++ Programming Guide, "Programmatic Dependent Launch and
   Synchronization".

   Shape flags and kinds are those of decode_matvec.cu: K = T*C and OC = V. Kind 0 is the first half of the feed-forward
   layer (with -V 2304 the product for q, k and v, except for its gelu), kind 1 with -V 768 the projection after
   attention, with -T 4 -V 768 the second half of the feed-forward layer; kind 2 is the head.

   Kernels (this list is written by versions.sh):
     0  layernorm, cuBLASLt and gelu, a launch each
     1  one warp per 16 rows and 8 texts, 4-byte loads
     2  16-byte loads, columns reordered in both operands
     3  columns split over warps, each block normalises x
     4  3, weights loaded while the previous kernel still runs
     5  4, columns split over the blocks of a cluster (promoted)
     6  the head alone: weights by TMA through a ring, wgmma (promoted) (kinds 2, 5, 8)
     kind 2: layernorm, product, float out
     kind 5: layernorm, product, float out; int8
     kind 8: layernorm, product, float out; e4m3

   nvcc -O3 --use_fast_math decode_matmul.cu -lcublasLt -o decode_matmul      (or: make decode_matmul)
   ./decode_matmul 5 -B 8      check kernel 5 against the CPU and sweep its tiles and clusters
   ./decode_matmul -B 64       every kernel, side by side                                         */
#include "../../llmc/gelu.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/weight_matrix.cuh"
#include "bench.h"
#include "cublaslt_linear.cuh"
#include "decode_weight.cuh"
#include "gelu_forward.cuh"
#include "layernorm_forward.cuh"

// ---- kernel 0: layernorm_forward, cuBLASLt and gelu_forward, a launch each ------------------------------------------

void decode_matmul0(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                    const floatX* weight, const floatX* bias, const floatX* residual, floatX* norm, float* moments,
                    bool gelu, int B, int K, int OC, float epsilon, cudaStream_t stream) {
    if (norm_weight) {
        layernorm_forward(norm, moments, moments + B, x, norm_weight, norm_bias, B, K, epsilon, stream);
        x = norm;
    }
    LinearCall call;
    call.out = out, call.inp = x, call.weight = weight, call.bias = bias, call.add = residual;
    call.M = B, call.N = OC, call.K = K;
    bool supported = cublaslt_linear(call, stream);
    require(supported);
    if (gelu) { gelu_forward(out, out, (size_t)B * OC, stream); }
}

#if !defined(ENABLE_FP32)

// ---- kernel 1: one warp per 16 rows of the weight and 8 texts, operands from memory in the order of mma -------------

// Kernels 1 and 2 do not compute the layernorm themselves; this kernel does it for them: one warp per text.
__global__ void decode_matmul_norm_kernel1(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                           int K, float epsilon) {
    x += (size_t)blockIdx.x * K, out += (size_t)blockIdx.x * K;
    float sum = 0.0f, squares = 0.0f;
    for (int k = threadIdx.x; k < K; k += 32) { sum += (float)x[k]; }
    float mean = warp_sum(sum) / K;
    for (int k = threadIdx.x; k < K; k += 32) { squares += ((float)x[k] - mean) * ((float)x[k] - mean); }
    float rstd = rsqrtf(warp_sum(squares) / K + epsilon);
    for (int k = threadIdx.x; k < K; k += 32) {
        out[k] = (floatX)(((float)x[k] - mean) * rstd * (float)weight[k] + (float)bias[k]);
    }
}

// epilogue of kernels 1 and 2: stores the accumulators of 16 rows and 8 texts
__device__ inline void decode_matmul_store(floatX* out, const float d[4], const floatX* bias, const floatX* residual,
                                           bool has_gelu, int row, int b, int B, int OC) {
    for (int i = 0; i < 4; i++) {
        int r = row + threadIdx.x % 32 / 4 + i / 2 * 8, text = b + threadIdx.x % 4 * 2 + i % 2;
        if (r >= OC || text >= B) { continue; }
        float sum = d[i] + (float)bias[r];
        if (has_gelu) { sum = gelu(sum); }
        if (residual) { sum += (float)residual[(size_t)text * OC + r]; }
        out[(size_t)text * OC + r] = (floatX)sum;
    }
}

__global__ void decode_matmul_kernel1(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool has_gelu, int B, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * 16, b = blockIdx.y * 8;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float d[4] = {};
    // the elements k and k + 1 of a row; zeros outside of the matrix
    auto pair = [=](const floatX* matrix, int r, int num_rows, int k) -> uint32_t {
        return r < num_rows && k < K ? *reinterpret_cast<const uint32_t*>(matrix + (size_t)r * K + k) : 0u;
    };
    for (int k = 2 * t; k - 2 * t < K; k += 16) {
        uint32_t a[4] = {pair(weight, row + g, OC, k), pair(weight, row + g + 8, OC, k),
                         pair(weight, row + g, OC, k + 8), pair(weight, row + g + 8, OC, k + 8)};
        mma_16x8x16(d, a, pair(x, b + g, B, k), pair(x, b + g, B, k + 8), floatX());
    }
    decode_matmul_store(out, d, bias, residual, has_gelu, row, b, B, OC);
}

// ---- kernel 2: 16-byte loads: the order of the columns is the same in both operands, but not that of memory ---------

__global__ void decode_matmul_kernel2(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool has_gelu, int B, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * 16, b = blockIdx.y * 8;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float d[4] = {};
    auto vector = [=](const floatX* matrix, int r, int num_rows, int k) -> int4 {
        bool there = r < num_rows && k < K;
        return there ? *reinterpret_cast<const int4*>(matrix + (size_t)r * K + k) : make_int4(0, 0, 0, 0);
    };
    for (int k = 8 * t; k - 8 * t < K; k += 32) { // two steps of mma; see decode_matmul_multiply
        int4 upper = vector(weight, row + g, OC, k), lower = vector(weight, row + g + 8, OC, k);
        int4 v = vector(x, b + g, B, k);
        uint32_t first[4] = {(uint32_t)upper.x, (uint32_t)lower.x, (uint32_t)upper.y, (uint32_t)lower.y};
        uint32_t second[4] = {(uint32_t)upper.z, (uint32_t)lower.z, (uint32_t)upper.w, (uint32_t)lower.w};
        mma_16x8x16(d, first, v.x, v.y, floatX());
        mma_16x8x16(d, second, v.z, v.w, floatX());
    }
    decode_matmul_store(out, d, bias, residual, has_gelu, row, b, B, OC);
}

// Launches kernel 1 or 2. If there is a layernorm, the normalised x is first written to norm (B,K).
typedef void (*DecodeMatmulKernel12)(floatX*, const floatX*, const floatX*, const floatX*, const floatX*, bool, int,
                                     int, int);
void decode_matmul12(DecodeMatmulKernel12 kernel, floatX* out, const floatX* x, const floatX* norm_weight,
                     const floatX* norm_bias, const floatX* weight, const floatX* bias, const floatX* residual,
                     floatX* norm, bool gelu, int B, int K, int OC, float epsilon, cudaStream_t stream,
                     int block_size) {
    require(K % 8 == 0);
    if (norm_weight) {
        decode_matmul_norm_kernel1<<<B, 32, 0, stream>>>(norm, x, norm_weight, norm_bias, K, epsilon);
        cudaCheck(cudaGetLastError());
        x = norm;
    }
    kernel<<<dim3(ceil_div(OC, block_size / 2), ceil_div(B, 8)), block_size, 0, stream>>>(out, x, weight, bias,
                                                                                          residual, gelu, B, K, OC);
    cudaCheck(cudaGetLastError());
}

#endif

// ---- kernels 3 to 5: x in shared memory, normalised there; columns split over warps; many weights in flight ---------

#include "decode_matmul.cuh" // kernels 5 and 6

#if !defined(ENABLE_FP32)
// A configuration of kernels 3 to 5: 1000 * blocks per cluster + rows per tile; 0: as decode_matmul() chooses.
static std::string decode_matmul_label(int config) {
    if (config == 0) { return "default"; }
    char text[64];
    snprintf(text, sizeof(text), "cluster of %d; %d rows", config / 1000, config % 1000);
    return text;
}
#endif

static void declare(Bench& b) {
    b.varies("BTCV");
    int B = b.B, K = b.T * b.C, OC = b.V;
    int kind = b.kinds(decode_kinds());
    WeightFormat format = (WeightFormat)(kind / 3);
    bool head = kind % 3 == 2, norm = kind % 3 != 1, gelu = kind % 3 == 0, full = format == WEIGHTS_FULL;
    cudaStream_t stream = b.stream;
    if (!b.dry) { cublaslt_open(); }
    // with a layernorm, x has a large mean, which must be subtracted before anything is squared
    bool cancelling = b.cases({"normal", "large terms that cancel"}) == 1, exact = cancelling && !norm;
    float epsilon = cancelling ? 0.5f : NORM_EPSILON; // another value shows whether a kernel has one of its own
    Buffer<floatX> x = b.input_from<floatX>("x", (size_t)B * K, [=, seed = b.next_seed()](float* host) {
        bench_fill_normal(host, (size_t)B * K, seed, 1.0f, cancelling ? 30.0f : 0.1f);
        if (exact) { bench_fill_exact_large(host, (size_t)B * K, seed), bench_negate_halves(host, B, K); }
    });
    DecodeWeight w = declare_weight(b, format, exact, OC, K);
    WeightMatrix weight = w.matrix;
    const floatX* full_weight = (const floatX*)weight.values; // of kernels 0 to 2
    Buffer<floatX> norm_weight = {nullptr, nullptr}, norm_bias = norm_weight, bias = norm_weight,
                   residual = norm_weight;
    if (norm) {
        norm_weight = b.input<floatX>("norm_weight", K, 0.1f, 1.0f);
        norm_bias = b.input<floatX>("norm_bias", K, 0.1f);
    }
    if (!head) { bias = b.input<floatX>("bias", OC); }
    if (!norm) { residual = b.input<floatX>("residual", (size_t)B * OC); }
    // bytes of out, and of residual if there is one
    double outputs = (double)B * OC * (head ? sizeof(float) : (norm ? 1 : 2) * sizeof(floatX));
    b.cost(weight.bytes(OC, K) + (double)B * K * sizeof(floatX) + outputs, 2.0 * B * OC * K);
    b.reads_only();

    float ulp = ulp_of<floatX>(), of_terms = (norm ? 2.0f * ulp : 0.0f) + 1e-5f;
    Buffer<floatX> scratch = b.scratch<floatX>("scratch", (size_t)B * K);
    Buffer<float> moments = b.scratch<float>("moments", (size_t)2 * B);
    Buffer<float> logits = {nullptr, nullptr};
    Buffer<floatX> out = {nullptr, nullptr};
    if (head) {
        logits = b.output<float>("logits", (size_t)B * OC, {of_terms, 1e-5f});
    } else {
        out = b.output<floatX>("out", (size_t)B * OC, {of_terms, ulp + 1e-5f});
    }
    b.reference([=] {
        decode_matvec_cpu(head ? logits.host : out.host, x.host, norm_weight.host, norm_bias.host, w.host().data(),
                          bias.host, residual.host, gelu, B, K, OC, epsilon);
    });
    if (full && !head && OC % 8 == 0) { // the library aligns rows to 16 bytes
        b.kernel(0, "layernorm, cuBLASLt and gelu, a launch each",
                 [=](int) {
                     decode_matmul0(out, x, norm_weight, norm_bias, full_weight, bias, residual, scratch, moments, gelu,
                                    B, K, OC, epsilon, stream);
                 },
                 {0});
    }
#if !defined(ENABLE_FP32)
    bool rings = head && (b.dry ? B <= 64 : decode_head_plan(weight, B, K).num_stages > 0);
    auto launch345 = [=](int config, int cluster, bool early) {
        DecodeMatmulArguments a = {x, norm_weight, norm_bias, weight, bias, residual, B, K, OC, gelu, epsilon, 0, 0, 0};
        DecodeMatmulPlan plan =
            decode_matmul_choose(config ? config / 1000 : cluster, config % 1000, norm, head, B, K, OC);
        head ? decode_matmul_launch<float>(logits, a, plan, early, stream)
             : decode_matmul_launch<floatX>(out, a, plan, early, stream);
    };
    if (full && !head) {
        b.kernel(
            1, "one warp per 16 rows and 8 texts, 4-byte loads",
            [=](int bs) {
                decode_matmul12(decode_matmul_kernel1, out, x, norm_weight, norm_bias, full_weight, bias, residual,
                                scratch, gelu, B, K, OC, epsilon, stream, bs);
            },
            {32, 64, 128, 256}, 80);
        b.kernel(
            2, "16-byte loads, columns reordered in both operands",
            [=](int bs) {
                decode_matmul12(decode_matmul_kernel2, out, x, norm_weight, norm_bias, full_weight, bias, residual,
                                scratch, gelu, B, K, OC, epsilon, stream, bs);
            },
            {32, 64, 128, 256}, 80);
    }
    // tiles of 16 rows are right for every number of texts: a thread stores at most two pairs of results
    b.kernel(
        3, "columns split over warps, each block normalises x", [=](int config) { launch345(config, 1, false); },
        {1016}, -90);
    b.config("tile", decode_matmul_label);
    b.kernel(
        4, "3, weights loaded while the previous kernel still runs", [=](int config) { launch345(config, 1, true); },
        {1016}, -90);
    b.config("tile", decode_matmul_label);
    std::vector<int> configs = {0};
    for (int cluster = 1; cluster <= DECODE_MATMUL_MAX_CLUSTER && !head; cluster *= 2) {
        for (int rows = 16; rows <= 64; rows *= 2) {
            if (rows <= decode_matmul_max_rows(decode_matmul_texts(B), cluster)) {
                configs.push_back(1000 * cluster + rows);
            }
        }
    }
    b.kernel(
        5, "4, columns split over the blocks of a cluster",
        [=](int config) {
            bool launched = false;
            if (config == 0 && !rings) {
                launched =
                    head ? decode_matmul_head(logits, x, norm_weight, norm_bias, weight, B, K, OC, epsilon, stream)
                         : decode_matmul(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC,
                                         epsilon, stream);
            }
            if (!launched) { launch345(config, 0, true); } // any number of texts
        },
        configs, -90);
    b.config("tile", decode_matmul_label);
    if (rings) {
        b.kernel(
            6, "the head alone: weights by TMA through a ring, wgmma",
            [=](int) {
                bool launched =
                    decode_matmul_head(logits, x, norm_weight, norm_bias, weight, B, K, OC, epsilon, stream);
                require(launched);
            },
            {0}, -90);
    }
    b.promoted(rings ? 6 : 5);
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "decode_matmul", declare, {8, 1, 768, 12, 3072},
                      {{2, 1, 8, 1, 1},
                       {2, 1, 120, 1, 77},
                       {5, 1, 776, 1, 33},
                       with_kind(1, {13, 3, 72, 1, 129}),
                       with_kind(1, {8, 4, 768, 1, 96}),
                       {16, 1, 1600, 1, 72},
                       {33, 1, 768, 1, 136},
                       {20, 1, 1600, 1, 72}, // more chunks than are loaded before the wait
                       {20, 1, 8, 1, 3},     // blocks of a cluster without columns
                       {64, 1, 120, 1, 200},
                       with_kind(1, {65, 4, 480, 1, 56}),
                       with_kind(1, {64, 4, 776, 1, 40}),
                       with_kind(1, {24, 1, 1280, 1, 1280}), // 48 KB of dynamic shared memory
                       with_kind(2, {2, 1, 64, 1, 32769}),
                       with_kind(2, {17, 1, 120, 1, 17000}),
                       with_kind(2, {1, 1, 8, 1, 1}),
                       with_kind(2, {16, 1, 72, 1, 9001}), // blocks with one tile and with two
                       with_kind(2, {64, 1, 776, 1, 300}),
                       with_kind(2, {33, 1, 1280, 1, 200}),
                       with_kind(2, {5, 1, 1600, 1, 201}),
                       with_kind(2, {70, 1, 64, 1, 17001}),
                       with_kind(3, {2, 1, 8, 1, 1}),
                       with_kind(3, {5, 1, 776, 1, 33}),
                       with_kind(3, {33, 1, 768, 1, 136}),
                       with_kind(4, {13, 3, 72, 1, 129}),
                       with_kind(4, {64, 4, 776, 1, 40}),
                       with_kind(5, {17, 1, 120, 1, 17000}),
                       with_kind(5, {16, 1, 80, 1, 9001}),
                       with_kind(5, {40, 1, 784, 1, 200}),
                       with_kind(8, {3, 1, 1280, 1, 150}),
                       with_kind(6, {2, 1, 120, 1, 77}),
                       with_kind(6, {16, 1, 1600, 1, 72}),
                       with_kind(7, {8, 4, 768, 1, 96}),
                       with_kind(7, {65, 4, 480, 1, 56}),
                       with_kind(8, {70, 1, 64, 1, 17001})});
}
