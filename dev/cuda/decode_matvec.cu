/* decode_matvec: out = gelu?(layernorm?(x) weight^T + bias) + residual, for the B tokens of one decoding step

   out (B,OC) floatX out, float for the head | x (B,K) floatX in | norm_weight, norm_bias (K) floatX in, or NULL
   weight (OC,K) in: floatX, or int8 or e4m3 with scales (OC) float | bias (OC) floatX in, or NULL
   residual (B,OC) floatX in, or NULL, may be out itself
   Operations with a ? are optional. llmc/weight_matrix.cuh says what a weight of 8 bits stands for.
   Bound: memory, the bytes of the weight: 1 to 4 times OC*K.
   Constraint: K % 8 == 0; with a layernorm, a row of x of at most 40 KB.
   Error: one ulp of floatX, and 1e-5 of the terms' magnitude for the sums. With a layernorm also two ulps of the terms'
   magnitude: as in training, the normalised x is rounded to floatX before the product, and K such roundings add up.
   This file also has decode_embed, the first kernel of a decoding step, decode_head, its last product, and
   quantize_weights, which makes 8 bits of a weight. The small check shapes check them.
   Source: layernorm: Ba et al. 2016, arXiv:1607.06450; gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415;
   overlap: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".

   Shape flags: K = T*C and OC = V. Kind 0 is the first half of the feed-forward layer, with a layernorm before the
   product and gelu after it. Kind 1 adds a residual instead; with T = 4 and V = C it is the second half of the
   feed-forward layer. Kind 2 is the head: a layernorm before the product and nothing after it. Kinds 3 to 5 are these
   with a weight in int8, kinds 6 to 8 in e4m3, which needs compute capability 8.9.

   Kernels (this list is written by versions.sh):
     1  one thread per row of the weight
     2  one warp per row of the weight
     3  one warp per row, 16-byte loads
     4  one block per row
     5  every block computes the layernorm
     6  5, weights loaded while the previous kernel still runs (promoted)
     7  2 with weights of 8 bits, converted one by one (kinds 3, 4, 6, 7)
     kind 3: layernorm, product, gelu; int8
     kind 4: product, residual; int8
     kind 6: layernorm, product, gelu; e4m3
     kind 7: product, residual; e4m3

   nvcc -O3 --use_fast_math decode_matvec.cu -o decode_matvec      (or: make decode_matvec)
   ./decode_matvec 6      check kernel 6 against the CPU and sweep its block sizes
   ./decode_matvec        every kernel, side by side                                         */
#include "../../llmc/gelu.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/weight_matrix.cuh"
#include "bench.h"
#include "decode_weight.cuh"

// ---- kernel 0: a separate layernorm for kernels 1 to 4, which do not compute it themselves: one warp per row --------

__global__ void decode_matvec_norm_kernel0(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
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

// epilogue of kernels 1 to 4: applies bias, gelu and residual to one output, and stores it
__device__ inline void decode_matvec_store(floatX* out, float sum, const floatX* bias, const floatX* residual,
                                           bool has_gelu, int row, int b, int OC) {
    size_t i = (size_t)b * OC + row;
    if (bias) { sum += (float)bias[row]; }
    if (has_gelu) { sum = gelu(sum); }
    if (residual) { sum += (float)residual[i]; }
    out[i] = (floatX)sum;
}

// ---- kernel 1: one thread per row of the weight ---------------------------------------------------------------------

__global__ void decode_matvec_kernel1(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    int row = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = 0; k < K; k++) { sum += (float)x[(size_t)b * K + k] * (float)weight[(size_t)row * K + k]; }
    decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC);
}

// ---- kernel 2: one warp per row of the weight -----------------------------------------------------------------------

__global__ void decode_matvec_kernel2(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, b = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = lane; k < K; k += 32) { sum += (float)x[(size_t)b * K + k] * (float)weight[(size_t)row * K + k]; }
    sum = warp_sum(sum);
    if (lane == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// ---- kernel 3: one warp per row, 16-byte loads ----------------------------------------------------------------------

__global__ void decode_matvec_kernel3(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, b = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = lane * x128::size; k < K; k += 32 * x128::size) {
        x128 w = load128cs(weight + (size_t)row * K + k), v = load128(x + (size_t)b * K + k);
        for (int e = 0; e < x128::size; e++) { sum += (float)v[e] * (float)w[e]; }
    }
    sum = warp_sum(sum);
    if (lane == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// ---- kernel 4: one block per row, so that every SM has work even if there are few rows ------------------------------

__global__ void decode_matvec_kernel4(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    __shared__ float shared[32];
    int row = blockIdx.x, b = blockIdx.y;
    float sum = 0.0f;
    for (int k = threadIdx.x * x128::size; k < K; k += blockDim.x * x128::size) {
        x128 w = load128cs(weight + (size_t)row * K + k), v = load128(x + (size_t)b * K + k);
        for (int e = 0; e < x128::size; e++) { sum += (float)v[e] * (float)w[e]; }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// Launches one of kernels 1 to 4. If there is a layernorm, kernel 0 first writes the normalised x to scratch (B,K).
typedef void (*DecodeMatvecKernel)(floatX*, const floatX*, const floatX*, const floatX*, const floatX*, bool, int, int);
void decode_matvec1234(DecodeMatvecKernel kernel, int blocks, floatX* out, const floatX* x, const floatX* norm_weight,
                       const floatX* norm_bias, const floatX* weight, const floatX* bias, const floatX* residual,
                       floatX* scratch, bool gelu, int B, int K, int OC, float epsilon, cudaStream_t stream,
                       int block_size) {
    if (norm_weight) {
        decode_matvec_norm_kernel0<<<B, 32, 0, stream>>>(scratch, x, norm_weight, norm_bias, K, epsilon);
        cudaCheck(cudaGetLastError());
        x = scratch;
    }
    kernel<<<dim3(blocks, B), block_size, 0, stream>>>(out, x, weight, bias, residual, gelu, K, OC);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: every block computes the layernorm, for several sequences (kernel 6, launched without overlap) -------

#include "decode_matvec.cuh" // kernel 6

template <class Out> void decode_matvec5(Out* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                                         const WeightMatrix& weight, const floatX* bias, const floatX* residual,
                                         bool gelu, int B, int K, int OC, float epsilon, cudaStream_t stream,
                                         int block_size) {
    decode_matvec_run(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, epsilon,
                      Execution(stream, block_size), false);
}

// ---- kernel 7: weights of 8 bits in kernel 2: one warp per row, one byte per load -----------------------------------

template <class W> __global__ void decode_matvec_kernel7(floatX* out, const floatX* x, const W* weight,
                                                         const float* scales, const floatX* bias,
                                                         const floatX* residual, bool gelu, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, b = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = lane; k < K; k += 32) { sum += (float)x[(size_t)b * K + k] * (float)weight[(size_t)row * K + k]; }
    sum = warp_sum(sum) * scales[row];
    if (lane == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// If there is a layernorm, kernel 0 first writes the normalised x to scratch (B,K).
void decode_matvec7(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                    const WeightMatrix& weight, const floatX* bias, const floatX* residual, floatX* scratch, bool gelu,
                    int B, int K, int OC, float epsilon, cudaStream_t stream, int block_size) {
    if (norm_weight) {
        decode_matvec_norm_kernel0<<<B, 32, 0, stream>>>(scratch, x, norm_weight, norm_bias, K, epsilon);
        cudaCheck(cudaGetLastError());
        x = scratch;
    }
    dim3 grid(ceil_div(OC, block_size / 32), B);
    if (weight.format == WEIGHTS_INT8) {
        decode_matvec_kernel7<int8_t><<<grid, block_size, 0, stream>>>(out, x, (const int8_t*)weight.values,
                                                                       weight.scales, bias, residual, gelu, K, OC);
    } else {
        decode_matvec_kernel7<__nv_fp8_e4m3><<<grid, block_size, 0, stream>>>(
            out, x, (const __nv_fp8_e4m3*)weight.values, weight.scales, bias, residual, gelu, K, OC);
    }
    cudaCheck(cudaGetLastError());
}

#include "decode_embed.cuh"

#include "quantize_weights.cuh"

// quantize_weights has no benchmark of its own. With small shapes (K <= 128) of the kinds in 8 bits, each launch of a
// kernel first runs it, and the check covers its outputs.
static std::function<void()> declare_quantize(Bench& b, WeightFormat format) {
    int rows = 37, K = b.T * b.C;
    if (K > 128) {
        return [] {};
    }
    size_t n = (size_t)rows * K;
    cudaStream_t stream = b.stream;
    Buffer<floatX> plain = b.input_from<floatX>("plain", n, [=, seed = b.next_seed()](float* host) {
        bench_fill_normal(host, n, seed, 0.02f, 0.0f);
        for (int k = 0; k < K; k++) { host[k] = 0.0f, host[K + k] *= 1e-25f, host[2 * K + k] *= 1e-35f; }
        host[3 * K + K / 2] = 1e4f;
    });
    Buffer<floatX> rounded = b.inout<floatX>("rounded", n, plain, {0, 0});
    Buffer<float> scales = b.output<float>("new_scales", rows, {0, 0});
    Buffer<int8_t> ints = {nullptr, nullptr};
    Buffer<__nv_fp8_e4m3> floats = {nullptr, nullptr};
    if (format == WEIGHTS_INT8) { ints = b.output<int8_t>("new_values", n, {0, 0}); }
    if (format == WEIGHTS_FP8) { floats = b.output<__nv_fp8_e4m3>("new_values", n, {0, 0}); }
    float* host = format == WEIGHTS_INT8 ? ints.host : floats.host;
    b.reference([=] {
        quantize_weights_cpu(host, scales.host, rounded.host, plain.host, format == WEIGHTS_INT8, rows, K);
        for (size_t i = 0; i < n; i++) { rounded.host[i] = (float)(floatX)rounded.host[i]; }
    });
    void* values = format == WEIGHTS_INT8 ? (void*)ints.dev : floats.dev;
    return [=] { quantize_weights(values, scales, rounded, format, rows, K, stream); };
}

// decode_embed has no benchmark of its own. With small shapes (C <= 128) each launch of a kernel below first runs
// decode_embed, and the check covers its output too.
static std::function<void()> declare_embed(Bench& b) {
    if (b.C > 128) {
        return [] {};
    }
    int B = b.B, C = b.C, V = 1000, T = 16;
    cudaStream_t stream = b.stream;
    Buffer<int> tokens = b.input_ids("tokens", B, V);
    Buffer<int> positions = b.input_from<int>("positions", B, [=](float* p) {
        for (int i = 0; i < B; i++) { p[i] = (float)(i * 7 % (T + 1) - 1); } // -1: as position 0
    });
    Buffer<floatX> wte = b.input<floatX>("wte", (size_t)V * C), wpe = b.input<floatX>("wpe", (size_t)T * C);
    Buffer<floatX> embedded = b.output<floatX>("embedded", (size_t)B * C, ulps<floatX>(1));
    b.reference([=] { decode_embed_cpu(embedded.host, tokens.host, positions.host, wte.host, wpe.host, B, C); });
    return [=] { decode_embed(embedded, tokens, positions, wte, wpe, B, C, stream); };
}

static void declare(Bench& b) {
    b.varies("BTCV");
    int B = b.B, K = b.T * b.C, OC = b.V;
    int kind = b.kinds(decode_kinds());
    WeightFormat format = (WeightFormat)(kind / 3);
    bool head = kind % 3 == 2, norm = kind % 3 != 1, gelu = kind % 3 == 0, full = format == WEIGHTS_FULL;
    cudaStream_t stream = b.stream;
    // with a layernorm, x has a large mean, which must be subtracted before anything is squared
    bool cancelling = b.cases({"normal", "large terms that cancel"}) == 1, exact = cancelling && !norm;
    float epsilon = cancelling ? 0.5f : NORM_EPSILON; // another value shows whether a kernel has one of its own
    Buffer<floatX> x = b.input_from<floatX>("x", (size_t)B * K, [=, seed = b.next_seed()](float* host) {
        bench_fill_normal(host, (size_t)B * K, seed, 1.0f, cancelling ? 30.0f : 0.1f);
        if (exact) { bench_fill_exact_large(host, (size_t)B * K, seed), bench_negate_halves(host, B, K); }
    });
    DecodeWeight w = declare_weight(b, format, exact, OC, K);
    WeightMatrix weight = w.matrix;
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
    std::function<void()> quantize = full ? [] {} : declare_quantize(b, format);

    float ulp = ulp_of<floatX>(), of_terms = (norm ? 2.0f * ulp : 0.0f) + 1e-5f;
    std::function<void(int)> launch5, launch6, launch7;
    if (head) {
        Buffer<float> logits = b.output<float>("logits", (size_t)B * OC, {of_terms, 1e-5f});
        b.reference([=] {
            decode_matvec_cpu(logits.host, x.host, norm_weight.host, norm_bias.host, w.host().data(), NULL, NULL, false,
                              B, K, OC, epsilon);
        });
        launch5 = [=](int bs) {
            quantize();
            decode_matvec5<float>(logits, x, norm_weight, norm_bias, weight, NULL, NULL, false, B, K, OC, epsilon,
                                  stream, bs);
        };
        launch6 = [=](int bs) {
            quantize();
            decode_head(logits, x, norm_weight, norm_bias, weight, B, K, OC, epsilon, {stream, bs});
        };
    } else {
        std::function<void()> embed = full ? declare_embed(b) : quantize;
        Buffer<floatX> scratch = b.scratch<floatX>("scratch", (size_t)B * K);
        Buffer<floatX> out = b.output<floatX>("out", (size_t)B * OC, {of_terms, ulp + 1e-5f});
        b.reference([=] {
            decode_matvec_cpu(out.host, x.host, norm_weight.host, norm_bias.host, w.host().data(), bias.host,
                              residual.host, gelu, B, K, OC, epsilon);
        });
        auto launch1234 = [=](DecodeMatvecKernel kernel, int rows_per_block, int bs) {
            embed();
            decode_matvec1234(kernel, ceil_div(OC, rows_per_block), out, x, norm_weight, norm_bias,
                              (const floatX*)weight.values, bias, residual, scratch, gelu, B, K, OC, epsilon, stream,
                              bs);
        };
        launch5 = [=](int bs) {
            embed();
            decode_matvec5<floatX>(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, epsilon,
                                   stream, bs);
        };
        launch6 = [=](int bs) {
            embed();
            decode_matvec(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, epsilon,
                          {stream, bs});
        };
        if (full) {
            b.kernel(1, "one thread per row of the weight", [=](int bs) { launch1234(decode_matvec_kernel1, bs, bs); });
            b.kernel(2, "one warp per row of the weight",
                     [=](int bs) { launch1234(decode_matvec_kernel2, bs / 32, bs); });
            b.kernel(3, "one warp per row, 16-byte loads",
                     [=](int bs) { launch1234(decode_matvec_kernel3, bs / 32, bs); });
            b.kernel(4, "one block per row", [=](int bs) { launch1234(decode_matvec_kernel4, 1, bs); },
                     {32, 64, 128, 256});
        }
        launch7 = [=](int bs) {
            quantize();
            decode_matvec7(out, x, norm_weight, norm_bias, weight, bias, residual, scratch, gelu, B, K, OC, epsilon,
                           stream, bs);
        };
    }
    const char* what5 = head ? "every block computes the layernorm, float out" : "every block computes the layernorm";
    int arch = format == WEIGHTS_FP8 ? 89 : 0; // e4m3 in hardware
    b.kernel(5, what5, launch5, {64, 128, 256}, arch);
    b.kernel(6, "5, weights loaded while the previous kernel still runs", launch6, {0, 64, 128, 256}, arch);
    if (!full && !head) {
        b.kernel(7, "2 with weights of 8 bits, converted one by one", launch7, {64, 128, 256, 512, 1024}, arch);
    }
    b.promoted(6);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "decode_matvec", declare, {1, 1, 768, 12, 3072},
                      {{1, 1, 8, 1, 1},
                       {2, 1, 128, 1, 77},
                       {5, 1, 776, 1, 33},
                       with_kind(1, {13, 3, 64, 1, 129}),
                       with_kind(1, {1, 4, 768, 1, 768}),
                       {3, 1, 1600, 1, 65},
                       with_kind(1, {9, 4, 1600, 1, 50}),
                       with_kind(2, {1, 1, 64, 1, 32769}),
                       with_kind(2, {7, 1, 64, 1, 50257}),
                       with_kind(3, {1, 1, 8, 1, 1}),
                       with_kind(3, {5, 1, 776, 1, 33}),
                       with_kind(4, {13, 3, 64, 1, 129}),
                       with_kind(4, {1, 4, 768, 1, 768}),
                       with_kind(3, {2, 1, 128, 1, 201}),
                       with_kind(4, {2, 4, 776, 1, 1301}),
                       with_kind(5, {1, 1, 64, 1, 32769}),
                       with_kind(6, {1, 1, 128, 1, 201}),
                       with_kind(7, {1, 4, 776, 1, 1301}),
                       with_kind(6, {2, 1, 128, 1, 77}),
                       with_kind(6, {3, 1, 1600, 1, 65}),
                       with_kind(7, {4, 3, 40, 1, 50}),
                       with_kind(7, {1, 4, 768, 1, 768}),
                       with_kind(8, {7, 1, 64, 1, 8257})});
}
