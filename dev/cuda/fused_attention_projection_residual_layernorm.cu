/* fused_attention_projection_residual_layernorm: from qkv to the second layernorm of a GPT-2 block:
   residual = inp + attention(qkv) proj_weight^T + proj_bias; normed = (residual - mean) * rstd * weight + bias

   residual, normed (B,T,C) floatX out | mean, rstd (B,T) float out | lse (B,NH,T) float out, or NULL |
   qkv (B,T,3,NH,HS) floatX in | inp (B,T,C) floatX in | proj_weight (C,C) floatX in, one row per output |
   proj_bias, weight, bias (C) floatX in; C = NH * HS
   mean, rstd and normed are computed from the rounded residual, as it is stored.
   Bound: compute, 2*B*NH*T*T*HS FLOPs (only the causal half counted) and 2*B*T*C*C; 6*B*T*C*sizeof(floatX) bytes.
   Constraint: HS % 8 == 0, HS <= 256. Kernel 4: HS = 64, and C a multiple of 256 or 320 (up to 8 times) or 384 (up to 3
   times).

   Error against the fp64 reference. residual: one ulp of floatX and 1.5 ulps of 1. P, attention's output and, unfused,
   the projection are rounded to floatX, and the projection sums C such errors with weights of 1/sqrt(C). normed: one
   ulp of floatX and 4 ulps of 1. Such an error can round a residual the other way, and a residual between 4 and 8 then
   moves by 4 ulps of 1, times rstd (at most 0.7) and weight (at most 1.4). A smaller residual moves less; if it is
   larger, normed is larger too, unless bias cancels it. fp32: 32 times as much. With scores of 10^4: 4e-3 more.
   Tuned: the form of kernel 5. Kernels 1 and 2 are other ops; kernel 4 has as many heads per block as shared memory
   holds.
   Source: Dao 2023, FlashAttention-2, arXiv:2307.08691; Ba et al. 2016, arXiv:1607.06450.

   Kernels (this list is written by versions.sh):
     1  unfused: attention, matmul_forward, residual, layernorm
     2  three launches: residual and layernorm fused
     3  one launch: one warp per token and head, one thread per output (slower than 2)
     4  one launch, clusters: blocks have heads, then columns; wgmma, TMA (slower than 2)
     5  three overlapped launches, residual in the epilogue (best)

   nvcc -O3 --use_fast_math fused_attention_projection_residual_layernorm.cu -lcublasLt -lcublas -o fused
   (or: make fused_attention_projection_residual_layernorm)
   ./fused_attention_projection_residual_layernorm 5      check kernel 5 against the CPU
   ./fused_attention_projection_residual_layernorm        every kernel, side by side
   Kernels 4 and 5 need -gencode arch=compute_90a,code=sm_90a.                                            */
#include "../../llmc/ptx.cuh"
#include "attention_forward.cuh"
#include "bench.h"
#include "gemm_forms.cuh"
#include "layernorm_forward.cuh"
#include "matmul_forward.cuh"
#include "residual_forward.cuh"

#include "fused_attention_projection_residual_layernorm.cuh"

// ---- kernel 1: four launches, one per operation ----

// attention (B,T,C) and projection (B,T,C) are scratch
void fused_attention_projection_residual_layernorm1(const AttentionProjection& f, floatX* attention, floatX* projection,
                                                    cudaStream_t stream) {
    int N = f.B * f.T;
    attention_forward(attention, f.lse, f.qkv, f.B, f.T, f.C, f.NH, 1.0f / sqrtf((float)(f.C / f.NH)), stream);
    matmul_forward(projection, NULL, attention, f.proj_weight, f.proj_bias, NULL, N, f.C, f.C, stream);
    residual_forward(f.residual, f.inp, projection, (size_t)N * f.C, stream);
    layernorm_forward(f.normed, f.mean, f.rstd, f.residual, f.weight, f.bias, N, f.C, f.epsilon, stream);
}

// ---- kernel 2: three launches: attention; the projection by matmul_forward; residual and layernorm fused ----

// ---- kernel 3: one launch, one block per 8 tokens: one warp per token and head, then one thread per output ----

const int ATTENTION_PROJECTION_TOKENS3 = 8; // tokens per block: they share one pass over proj_weight

// out (HS): attention of one token and head by one warp, which takes 32 keys at a time, one per lane
__device__ inline void attention_projection_head3(floatX* out, const AttentionProjection& f, size_t token, int h) {
    int lane = threadIdx.x % 32, HS = f.C / f.NH, t = (int)(token % f.T);
    size_t stride = (size_t)3 * f.C;
    const floatX* q = f.qkv + token * stride + h * HS;
    const floatX* keys = q - t * stride + f.C; // keys of token 0; values are C elements further
    float o[8] = {}, m = -INFINITY, l = 0, scale = rsqrtf((float)HS);
    for (int k0 = 0; k0 <= t; k0 += 32) {
        float score = -INFINITY;
        if (k0 + lane <= t) {
            score = 0;
            for (int d = 0; d < HS; d += x128::size) {
                x128 a = load128(q + d), b = load128(keys + (k0 + lane) * stride + d);
                for (int i = 0; i < x128::size; i++) { score += (float)a[i] * (float)b[i]; }
            }
            score *= scale;
        }
        float new_m = fmaxf(m, warp_max(score)), rescale = expf(m - new_m), p = expf(score - new_m);
        m = new_m, l = l * rescale + warp_sum(p);
        for (int i = 0; i < 8; i++) { o[i] *= rescale; }
        for (int k = k0; k < k0 + 32 && k <= t; k++) {
            float key_p = __shfl_sync(0xFFFFFFFFu, p, k - k0);
            for (int i = 0; i < 8; i++) {
                if (lane + 32 * i < HS) { o[i] += key_p * (float)keys[f.C + k * stride + lane + 32 * i]; }
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        if (lane + 32 * i < HS) { out[lane + 32 * i] = (floatX)(o[i] / l); }
    }
    if (f.lse && lane == 0) { f.lse[(token / f.T * f.NH + h) * f.T + t] = m + logf(l); }
}

__global__ void fused_attention_projection_residual_layernorm_kernel3(AttentionProjection f) {
    extern __shared__ __align__(128) int4 attention_projection_rows3[];
    floatX* attention = (floatX*)attention_projection_rows3; // (8,C)
    const int tokens = ATTENTION_PROJECTION_TOKENS3;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32, C = f.C;
    size_t first = (size_t)blockIdx.x * tokens, N = (size_t)f.B * f.T;
    for (int i = warp; i < tokens * f.NH; i += num_warps) {
        int token = i / f.NH, h = i % f.NH;
        if (first + token < N) {
            attention_projection_head3(attention + (size_t)token * C + h * (C / f.NH), f, first + token, h);
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float sum[tokens] = {};
        for (int k = 0; k < C; k += x128::size) {
            x128 w = load128(f.proj_weight + (size_t)c * C + k);
#pragma unroll
            for (int token = 0; token < tokens; token++) { // tokens past N are not stored
                x128 a = load128(attention + (size_t)token * C + k);
                for (int i = 0; i < x128::size; i++) { sum[token] += (float)a[i] * (float)w[i]; }
            }
        }
#pragma unroll
        for (int token = 0; token < tokens; token++) {
            size_t i = (first + token) * C + c;
            if (first + token < N) { f.residual[i] = (floatX)(sum[token] + (float)f.proj_bias[c] + (float)f.inp[i]); }
        }
    }
    __syncthreads(); // the block's rows of residual are complete
    for (int token = warp; token < tokens && first + token < N; token += num_warps) {
        const floatX* x = f.residual + (first + token) * C;
        float sum = 0.0f, squares = 0.0f;
        for (int c = lane; c < C; c += 32) { sum += (float)x[c]; }
        float m = warp_sum(sum) / C;
        for (int c = lane; c < C; c += 32) { squares += ((float)x[c] - m) * ((float)x[c] - m); }
        float r = rsqrtf(warp_sum(squares) / C + f.epsilon);
        for (int c = lane; c < C; c += 32) {
            f.normed[(first + token) * C + c] = (floatX)(((float)x[c] - m) * r * (float)f.weight[c] + (float)f.bias[c]);
        }
        if (lane == 0) { f.mean[first + token] = m, f.rstd[first + token] = r; }
    }
}

void fused_attention_projection_residual_layernorm3(const AttentionProjection& f, cudaStream_t stream, int block_size) {
    auto kernel = fused_attention_projection_residual_layernorm_kernel3;
    require(f.C % 8 == 0 && f.C % f.NH == 0 && f.C / f.NH % 8 == 0 && f.C / f.NH <= 256);
    require(block_size % 32 == 0);
    size_t N = (size_t)f.B * f.T, bytes = (size_t)ATTENTION_PROJECTION_TOKENS3 * f.C * sizeof(floatX);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<(unsigned)ceil_div(N, (size_t)ATTENTION_PROJECTION_TOKENS3), block_size, bytes, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// Heads per block of kernel 4, or 0 if it does not support the shape. A cluster has up to 8 blocks; with 6 heads per

// Normal values. If `large`, scores have a magnitude of 10^4, and in every second head all queries and keys are equal.
static void fill_qkv(float* qkv, int B, int T, int NH, int HS, bool large, std::mt19937& rng) {
    size_t n = (size_t)B * T * 3 * NH * HS;
    bench_fill_normal(qkv, n, rng(), 1.0f, 0.0f);
    for (size_t i = 0; large && i < n; i++) {
        size_t h = i / HS % NH, part = i / HS / NH % 3;
        if (part < 2) { qkv[i] = h % 2 == 1 ? 30.0f : 30.0f * qkv[i]; }
    }
}

// Normal values. If `special`, all elements of every second row are equal, and row 4 is 100 times larger.
static void fill_inp(float* inp, int N, int C, bool special, std::mt19937& rng) {
    bench_fill_normal(inp, (size_t)N * C, rng(), 1.0f, 0.0f);
    for (size_t i = 0; special && i < (size_t)N * C; i++) {
        size_t row = i / C;
        inp[i] = row % 2 == 1 ? 0.5f * (float)(row % 7) : row == 4 ? 100.0f * inp[i] : inp[i];
    }
}

static void declare(Bench& b) {
    b.varies("BTH");
    int B = b.B, T = b.T, C = b.C, NH = b.NH, HS = C / NH, N = B * T;
    cudaStream_t stream = b.stream;
    int which =
        b.cases({"normal", "scores of some 10^4, or equal ones", "rows of equal values, a row 100 times larger"});
    bool large = which == 1, special = which == 2;
    size_t n = (size_t)N * C;
    if (!b.dry) { cublaslt_open(); }
    Buffer<floatX> qkv = b.input_from<floatX>(
        "qkv", 3 * n, [=, &rng = b.rng](float* host) { fill_qkv(host, B, T, NH, HS, large, rng); });
    Buffer<floatX> inp =
        b.input_from<floatX>("inp", n, [=, &rng = b.rng](float* host) { fill_inp(host, N, C, special, rng); });
    // special: the projection adds nothing, so that the rows of inp reach the layernorm unchanged
    Buffer<floatX> proj_weight = b.input<floatX>("proj_weight", (size_t)C * C, special ? 0.0f : 1.0f / sqrtf((float)C));
    Buffer<floatX> proj_bias = b.input<floatX>("proj_bias", C, special ? 0.0f : 1.0f);
    Buffer<floatX> weight = b.input<floatX>("weight", C, 0.1f, 1.0f);
    Buffer<floatX> bias = b.input<floatX>("bias", C);
    float score_error = large ? 4e-3f : 0; // as in attention_forward
    float ulp = ulp_of<floatX>() * (sizeof(floatX) == 4 ? 32 : 1);
    Buffer<floatX> residual = b.output<floatX>("residual", n, {1.5f * ulp + score_error, ulp});
    Buffer<floatX> normed = b.output<floatX>("normed", n, {4 * ulp + score_error, ulp});
    // The errors of C elements are independent, about 0.45 ulps each (rms), and average out: 0.45 / sqrt(C) ulps in the mean and
    // in the standard deviation. 5.5 times that, because thousands of rows are compared, at least 0.1; and a few ulps of fp32.
    float part = std::max(0.1f, 2.5f / sqrtf((float)C)) * (ulp + score_error), fp32_ulp = ulp_of<float>();
    Buffer<float> mean = b.output<float>("mean", N, {part + 4 * fp32_ulp, 8 * fp32_ulp});
    Buffer<float> rstd = b.output<float>("rstd", N, {0, part + 16 * fp32_ulp});
    Buffer<float> lse = b.output<float>("lse", (size_t)N * NH, {1e-5f + score_error, 2e-6f});
    std::vector<size_t> tokens = b.sample(N, 2.0 * T * C + 2.0 * C * C);
    b.reference([=] {
        size_t num = tokens.size();
        std::vector<float> attention(n), sum(num * C), y(num * C), m(num), r(num);
        attention_forward_rows_cpu(attention.data(), lse.host, qkv.host, B, T, C, NH, attention_rows(tokens, T, NH));
        attention = rows_of(attention.data(), tokens, C);
        matmul_forward_cpu(sum.data(), attention.data(), proj_weight.host, proj_bias.host,
                           rows_of(inp.host, tokens, C).data(), num, C, C);
        for (float& x : sum) { x = (float)(floatX)x; }
        layernorm_forward_cpu(y.data(), m.data(), r.data(), sum.data(), weight.host, bias.host, (int)num, C);
        put_rows(residual.host, sum, tokens, C), put_rows(normed.host, y, tokens, C);
        put_rows(mean.host, m, tokens, 1), put_rows(rstd.host, r, tokens, 1);
    });
    double tensor = (double)n * sizeof(floatX), rest = (double)C * C * sizeof(floatX) + 4.0 * N * (NH + 2); // bytes
    b.cost(6 * tensor + rest, 2.0 * B * T * (double)T * C + 2.0 * N * C * C);

    Buffer<floatX> attention = b.scratch<floatX>("attention", n);
    Buffer<floatX> projection = b.scratch<floatX>("projection", n);
    AttentionProjection f = {residual,  normed, mean, rstd, lse, qkv, inp, proj_weight,
                             proj_bias, weight, bias, B,    T,   C,   NH,  NORM_EPSILON};
    b.kernel(1, "unfused: attention, matmul_forward, residual, layernorm",
             [=](int) { fused_attention_projection_residual_layernorm1(f, attention, projection, stream); }, {0});
    b.moves(4, 11 * tensor + rest);
    b.coarser(2); // these kernels also round the projection
    b.kernel(2, "three launches: residual and layernorm fused",
             [=](int) { fused_attention_projection_residual_layernorm2(f, attention, projection, stream); }, {0});
    b.moves(3, 10 * tensor + rest);
    b.coarser(2);
    b.kernel(3, "one launch: one warp per token and head, one thread per output",
             [=](int bs) { fused_attention_projection_residual_layernorm3(f, stream, bs); }, {256});
    b.moves(1, 6 * tensor + rest);
#if defined(ENABLE_FP32)
    b.best(2);
#else
    if (attention_projection_heads(C, HS) > 0) {
        b.kernel(
            4, "one launch, clusters: blocks have heads, then columns; wgmma, TMA",
            [=](int) { fused_attention_projection_residual_layernorm4(f, stream); }, {0}, -90);
        b.moves(1, 6 * tensor + rest);
    }
    if (C % 8 == 0 && C <= 2048) {
        b.kernel(
            5, "three overlapped launches, residual in the epilogue",
            [=](int form) {
                form == 0 ? fused_attention_projection_residual_layernorm_forward(
                                residual, normed, mean, rstd, lse, attention, projection, qkv, inp, proj_weight,
                                proj_bias, weight, bias, B, T, C, NH, NORM_EPSILON, stream)
                          : fused_attention_projection_residual_layernorm5(f, attention, stream, form);
            },
            {0, GEMM_PING_PONG_192, GEMM_PING_PONG_192_PAIRS, GEMM_PING_PONG_128_PAIRS}, -90);
        b.config("form", gemm_form_name);
        b.moves(3, 9 * tensor + rest);
    }
    b.best(b.dry ? 5 : attention_projection_choice(C));
#endif
    b.matrix_rate(cublaslt_matrix_rate);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "fused_attention_projection_residual_layernorm", declare, {32, 512, 768, 12},
                      {{1, 1, 768, 12},
                       {1, 1, 384, 6},
                       {2, 130, 384, 6},
                       {1, 300, 768, 12},
                       {1, 512, 768, 12},
                       {70, 3, 768, 12},
                       {140, 2, 384, 6},
                       {1, 1000, 768, 12},
                       {2, 257, 1152, 18},
                       {1, 200, 1024, 16},
                       {1, 129, 1600, 25},
                       {3, 140, 320, 5},
                       {1, 200, 256, 4},
                       {1, 70, 1536, 24},
                       {2, 33, 192, 3},
                       {1, 20, 768, 8},
                       {1, 9, 96, 2},
                       {1, 300, 768, 12},
                       {1, 150, 768, 12}});
}
