/* transformer_block: a block of GPT-2, forward: out = r + mlp(layernorm(r)), r = inp + proj(attention(layernorm(inp)))

   out (B,T,C) floatX out | inp (B,T,C) floatX in | 12 weight tensors floatX in, see TransformerBlockWeights
   Bound: compute, 24*B*T*C*C FLOPs for four products and 2*B*NH*T*T*HS for attention (only the causal half counted).
   Constraint: C % NH == 0 and C / NH % 8 == 0. Kernels 4, 6, 8, 9 and 14 to 16: C <= 2048. Kernel 5: HS = 64 and
   C <= 1792. Kernels with e4m3 products (6, 8, 9, 15, 16): C % 16 == 0; 15 and 16 also HS = 64. Kernel 14: see
   attention_projection_heads().

   Error against the fp64 reference, which rounds nothing in between: three ulps of floatX of the result, plus three
   ulps of 1. The kernels round all tensors between two products to floatX. In bf16 these roundings amount to a root
   mean square of 0.004, and the largest of 10^7 errors is 5.4 times that. fp32: 64 ulps, 512 for rows of equal values.
   The e4m3 kernels have 14 times the tolerance of bf16. e4m3 has 3 mantissa bits, so both factors of a product have a
   relative error of 0.025 (root mean square), and a sum of any number of products an error of 0.036 of its size. Three
   such layers in a row have an error of 0.041 to 0.056, depending on T. Kernels 15 and 16 have a fourth e4m3 product,
   and sums of which the tensor cores keep about 14 bits: their largest errors are 0.47 to 0.70 of the tolerance, those
   of kernels 6 and 8 are 0.29 to 0.58.
   Kernels 11 to 13 subtract a row's mean after the product. If the mean is q times the standard deviation, fp32
   roundings count q times. These kernels round the product of layernorm's and the linear layer's weights, not the
   normalised rows.
   Scores of +-1e4 are checked by attention_forward, not here: at this size one bf16 rounding of a score lets another
   key win the softmax.

   Tuned: forms of the products in kernels 4, 6, 8, 11, 12, 14 and 15. The other kernels are made of tuned ops, or put
   one of these kernels in a graph; kernel 5 is a single launch that fills the GPU.
   Source: Radford et al. 2019, "Language models are unsupervised multitask learners"; e4m3: Micikevicius et al. 2022,
   arXiv:2209.05433.

   Kernels (this list is written by versions.sh):
     1  one launch per operation
     2  as in training: fused epilogues, residual with layernorm
     3  7 as a CUDA graph: shorter pauses between launches
     4  all products by gemm.cuh, programmatic dependent launch (best)
     5  one cooperative launch with grid barriers (slower than 4)
     6  e4m3 products except the projection
     7  2 without storing GELU's argument (slower than 4)
     8  6 with GELU and e4m3 output in the epilogue
     9  8 as a CUDA graph: pauses between shorter kernels
    11  layernorms applied in the products' epilogues
    12  11 with the second statistics from the projection
    13  12 as a CUDA graph, which keeps the early launches
    14  4 with attention to second layernorm in one launch
    15  all products in e4m3, by gemm.cuh
    16  15 as a CUDA graph: early launches of the shortest kernels

   nvcc -O3 --use_fast_math transformer_block.cu -lcublasLt -o transformer_block      (or: make transformer_block)
   ./transformer_block 5            check kernel 5 against the CPU
   ./transformer_block              every kernel, side by side
   Kernels 4, 5 and 11 to 16 need -gencode arch=compute_90a,code=sm_90a.                                            */
#include "../../llmc/cublas_common.cuh"
#include "attention_forward.cuh"
#include "attention_forward_blocks.cuh"
#include "bench.h"
#include "cublaslt_linear.cuh"
#include "fused_attention_projection_residual_layernorm.cuh"
#include "fused_residual_layernorm.cuh"
#include "fused_residual_layernorm_early.cuh"
#include "gelu_forward.cuh"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "layernorm_forward.cuh"
#include "matmul_forward.cuh"
#include "residual_forward.cuh"
#include <cooperative_groups.h>
#include <cuda_fp8.h>
#include <memory>

// the next file needs those included above

// ---- shared by the kernels ----

struct TransformerBlockWeights {
    const floatX *ln1_weight, *ln1_bias;       // (C), (C)
    const floatX *qkv_weight, *qkv_bias;       // (3C,C), (3C)
    const floatX *proj_weight, *proj_bias;     // (C,C), (C)
    const floatX *ln2_weight, *ln2_bias;       // (C), (C)
    const floatX *fc_weight, *fc_bias;         // (4C,C), (4C)
    const floatX *fcproj_weight, *fcproj_bias; // (C,4C), (C)
};

struct TransformerBlock {
    floatX* out;       // (B,T,C)
    const floatX* inp; // (B,T,C)
    TransformerBlockWeights w;
    floatX* norm;          // (B,T,C) result of the first, then of the second layernorm; this and all below is scratch
    floatX* qkv;           // (B,T,3,NH,HS)
    floatX* attention;     // (B,T,NH,HS)
    floatX* projected;     // (B,T,C)
    floatX* residual;      // (B,T,C)
    floatX *hidden, *gelu; // (B,T,4C), before and after GELU
    float *mean, *rstd;    // (B,T)
    float* lse;            // (B,NH,T)
    int B, T, C, NH;
};

// gelu (N,4C) = gelu(norm fc_weight^T + fc_bias)
static void transformer_block_fc_gelu(const TransformerBlock& f, cudaStream_t stream) {
    LinearCall fc;
    fc.out = f.gelu, fc.inp = f.norm, fc.weight = f.w.fc_weight, fc.bias = f.w.fc_bias;
    fc.M = f.B * f.T, fc.N = 4 * f.C, fc.K = f.C;
    fc.gelu = true;
    // not in fp32, where the error of the library's gelu is too large
    if (sizeof(floatX) == 2 && cublaslt_linear(fc, stream)) { return; }
    matmul_forward(f.gelu, NULL, f.norm, f.w.fc_weight, f.w.fc_bias, NULL, fc.M, f.C, 4 * f.C, stream);
    gelu_forward(f.gelu, f.gelu, (size_t)fc.M * fc.N, stream);
}

// ---- kernel 1: ten launches, one per operation ----

void transformer_block_forward1(const TransformerBlock& f, cudaStream_t stream) {
    int N = f.B * f.T, C = f.C;
    size_t n = (size_t)N * C;
    const TransformerBlockWeights& w = f.w;
    layernorm_forward(f.norm, f.mean, f.rstd, f.inp, w.ln1_weight, w.ln1_bias, N, C, NORM_EPSILON, stream);
    matmul_forward(f.qkv, NULL, f.norm, w.qkv_weight, w.qkv_bias, NULL, N, C, 3 * C, stream);
    attention_forward(f.attention, f.lse, f.qkv, f.B, f.T, C, f.NH, 1.0f / sqrtf((float)(C / f.NH)), stream);
    matmul_forward(f.projected, NULL, f.attention, w.proj_weight, w.proj_bias, NULL, N, C, C, stream);
    residual_forward(f.residual, f.inp, f.projected, n, stream);
    layernorm_forward(f.norm, f.mean, f.rstd, f.residual, w.ln2_weight, w.ln2_bias, N, C, NORM_EPSILON, stream);
    matmul_forward(f.hidden, NULL, f.norm, w.fc_weight, w.fc_bias, NULL, N, C, 4 * C, stream);
    gelu_forward(f.gelu, f.hidden, 4 * n, stream);
    matmul_forward(f.projected, NULL, f.gelu, w.fcproj_weight, w.fcproj_bias, NULL, N, 4 * C, C, stream);
    residual_forward(f.out, f.residual, f.projected, n, stream);
}

// ---- kernel 2: GELU and one residual in the products' epilogues, one residual with the layernorm, as in training ----

void transformer_block_forward2(const TransformerBlock& f, cudaStream_t stream) {
    int N = f.B * f.T, C = f.C;
    const TransformerBlockWeights& w = f.w;
    layernorm_forward(f.norm, f.mean, f.rstd, f.inp, w.ln1_weight, w.ln1_bias, N, C, NORM_EPSILON, stream);
    matmul_forward(f.qkv, NULL, f.norm, w.qkv_weight, w.qkv_bias, NULL, N, C, 3 * C, stream);
    attention_forward(f.attention, f.lse, f.qkv, f.B, f.T, C, f.NH, 1.0f / sqrtf((float)(C / f.NH)), stream);
    matmul_forward(f.projected, NULL, f.attention, w.proj_weight, w.proj_bias, NULL, N, C, C, stream);
    fused_residual_layernorm_forward(f.residual, f.norm, f.mean, f.rstd, f.inp, f.projected, w.ln2_weight, w.ln2_bias,
                                     N, C, NORM_EPSILON, stream);
    matmul_forward(f.gelu, f.hidden, f.norm, w.fc_weight, w.fc_bias, NULL, N, C, 4 * C, stream);
    matmul_forward(f.out, NULL, f.gelu, w.fcproj_weight, w.fcproj_bias, f.residual, N, 4 * C, C, stream);
}

// ---- kernel 3: the seven launches of kernel 7 as a CUDA graph: recorded once, then started by one call ----
// The kernels are those of kernel 7; new is that the GPU knows all launches beforehand and begins each a little sooner
// after the one before it. This also saves the host's work per launch, but not in these times: the host is ahead of
// the GPU in both. So the gain is small, 1%, where launches take 15 to 130 us. Kernels 9, 13 and 16 do the same for
// faster blocks. In us on an H200, measured on 2026-11-23, at the same forms:
//
//     graph   launches by themselves       in the graph   why
//     3       7: 426.1, seven launches     422.3          the pauses between them take about 4 us in total
//     9       8: 311.3, seven launches     309.6          shorter products, so the pauses weigh more; yet less is
//                                                         gained than kernel 8 varies, 309.5 to 321.0
//     13      12: 397.5, six launches      390.7          the launches of gemm.cuh start early, before the one before
//                                                         them ends; the graph keeps that: 1.7%
//     16      15: 255.6, seven launches    251.4          the shortest launches of all, 25 to 64 us: 1.6%

struct TransformerBlockGraph {
    cudaGraphExec_t exec = NULL;
    TransformerBlockGraph() = default;
    TransformerBlockGraph(const TransformerBlockGraph&) = delete;
    ~TransformerBlockGraph() {
        if (exec) { cudaGraphExecDestroy(exec); }
    }
};

// The first call for a graph runs `launches` once without capture, so that the library chooses its algorithms. Then it
// captures them. Every call launches the graph.
void transformer_block_forward3(TransformerBlockGraph& graph, const std::function<void(cudaStream_t)>& launches,
                                cudaStream_t stream) {
    if (!graph.exec) {
        cudaGraph_t recorded;
        launches(stream);
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        launches(stream);
        cudaCheck(cudaStreamEndCapture(stream, &recorded));
        cudaCheck(cudaGraphInstantiate(&graph.exec, recorded, 0));
        cudaCheck(cudaGraphDestroy(recorded));
    }
    cudaCheck(cudaGraphLaunch(graph.exec, stream));
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// ---- kernel 4: products by gemm.cuh, residuals and GELU in their epilogues; programmatic dependent launch ----

// The implementation of each product: a form of gemm.cuh (GEMM_...), or 0 for matmul_forward. Four decimal digits stand
// for the four products in this order: 2220 takes form 2 for all but fcproj.
struct TransformerBlockForms {
    int qkv, proj, fc, fcproj;
};
static TransformerBlockForms transformer_block_forms(int digits) {
    return {digits / 1000, digits / 100 % 10, digits / 10 % 10, digits % 10};
}
static const char* transformer_block_form_name(int form) { return form ? gemm_form_name(form) : "matmul_forward"; }
// Names the form of qkv, then those products that have another one.
static std::string transformer_block_forms_name(int digits) {
    if (digits == 0) { return "default"; }
    TransformerBlockForms forms = transformer_block_forms(digits);
    std::string name = transformer_block_form_name(forms.qkv);
    auto add = [&](const char* product, int form) {
        if (form != forms.qkv) { name += std::string("; ") + product + ": " + transformer_block_form_name(form); }
    };
    add("proj", forms.proj);
    add("fc", forms.fc);
    add("fcproj", forms.fcproj);
    return name;
}

// out (M,N) = gelu?(inp (M,K) weight (N,K)^T + bias) + residual?, where `extras` selects GEMM_GELU and GEMM_ADD.
template <int extras> static void transformer_block_product(floatX* out, const floatX* inp, const floatX* weight,
                                                            const floatX* bias, const floatX* residual, int M, int N,
                                                            int K, int form, cudaStream_t stream) {
    if (form == 0) {
        require(!(extras & GEMM_GELU));
        return matmul_forward(out, NULL, inp, weight, bias, residual, M, K, N, stream);
    }
    GemmArgs g = {out, NULL, inp, weight, residual, M, N, K};
    gemm_form(g, GemmBias<extras>{bias}, true, stream, form);
}

// First layernorm and qkv product: f.qkv from f.inp.
static void transformer_block_qkv4(const TransformerBlock& f, int form, cudaStream_t stream) {
    int N = f.B * f.T, C = f.C;
    fused_residual_layernorm_early(f.norm, NULL, NULL, NULL, f.inp, NULL, f.w.ln1_weight, f.w.ln1_bias, NULL, N, C,
                                   NORM_EPSILON, stream);
    transformer_block_product<0>(f.qkv, f.norm, f.w.qkv_weight, f.w.qkv_bias, NULL, N, 3 * C, C, form, stream);
}
// The last product: f.out from f.gelu and f.residual. form: a form of gemm.cuh, or 0 for matmul_forward.
static void transformer_block_fcproj(const TransformerBlock& f, int form, cudaStream_t stream) {
    transformer_block_product<GEMM_ADD>(f.out, f.gelu, f.w.fcproj_weight, f.w.fcproj_bias, f.residual, f.B * f.T, f.C,
                                        4 * f.C, form, stream);
}
// The feed-forward layer: f.out from f.norm (second layernorm) and f.residual.
static void transformer_block_mlp4(const TransformerBlock& f, const TransformerBlockForms& forms, cudaStream_t stream) {
    if (forms.fc == 0) {
        transformer_block_fc_gelu(f, stream);
    } else {
        transformer_block_product<GEMM_GELU>(f.gelu, f.norm, f.w.fc_weight, f.w.fc_bias, NULL, f.B * f.T, 4 * f.C, f.C,
                                             forms.fc, stream);
    }
    transformer_block_fcproj(f, forms.fcproj, stream);
}

void transformer_block_forward4(const TransformerBlock& f, const TransformerBlockForms& forms, cudaStream_t stream) {
    int N = f.B * f.T, C = f.C;
    const TransformerBlockWeights& w = f.w;
    transformer_block_qkv4(f, forms.qkv, stream);
    attention_forward(f.attention, NULL, f.qkv, f.B, f.T, C, f.NH, 1.0f / sqrtf((float)(C / f.NH)), stream);
    if (forms.proj == 0) { // the layernorm kernel adds the residual, not the product's epilogue
        transformer_block_product<0>(f.projected, f.attention, w.proj_weight, w.proj_bias, NULL, N, C, C, 0, stream);
        fused_residual_layernorm_early(f.norm, f.residual, NULL, NULL, f.inp, f.projected, w.ln2_weight, w.ln2_bias,
                                       NULL, N, C, NORM_EPSILON, stream);
    } else {
        transformer_block_product<GEMM_ADD>(f.residual, f.attention, w.proj_weight, w.proj_bias, f.inp, N, C, C,
                                            forms.proj, stream);
        fused_residual_layernorm_early(f.norm, NULL, NULL, NULL, f.residual, NULL, w.ln2_weight, w.ln2_bias, NULL, N, C,
                                       NORM_EPSILON, stream);
    }
    transformer_block_mlp4(f, forms, stream);
}

// ---- kernel 5: one cooperative launch: persistent blocks run all phases, with a grid barrier after each phase ----
//
//     layernorm | qkv product | attention | projection | layernorm | fc product | fcproj product
//
// A producer warpgroup loads by TMA, and two consumer warpgroups compute, as in the Hopper kernels for the single
// operations. After a grid barrier, TMA may load what any block stored in the phase before.

// A stage of the ring: 64 columns of 128 rows of inp and of 128 * halves rows of weight; or 128 keys and their values.
template <int halves> struct TransformerBlockStage { floatX a[128 * 64], b[halves * 128 * 64]; };

template <int halves> struct TransformerBlockSMem { // 209 KB: one block per SM
    static constexpr int ring = halves == 2 ? 4 : 6;
    TransformerBlockStage<halves> stages[ring];
    floatX queries[2][64 * 64]; // queries of both consumers
    // full: TMA has loaded it, consumers wait; empty: all consumer warps have read it, the producer waits
    uint64_t full[ring], empty[ring], queries_full, queries_empty;
};
static_assert(sizeof(TransformerBlockStage<2>) == 48 * 1024 && sizeof(TransformerBlockStage<1>) == 32 * 1024,
              "TMA announces this many bytes");
static_assert(sizeof(TransformerBlockSMem<1>) + 1024 <= 227 << 10 &&
                  sizeof(TransformerBlockSMem<2>) + 1024 <= 227 << 10,
              "all that compute capability 9.0 has");

struct TransformerBlockMaps { // boxes: 128 rows of inputs, 128 * halves rows of weights, 64 tokens of qkv
    CUtensorMap norm, attention, gelu, qkv_weight, proj_weight, fc_weight, fcproj_weight, qkv;
};

// out (M,N) = gelu?(inp (M,K) weight (N,K)^T + bias) + add
struct TransformerBlockProduct {
    floatX* out;
    const floatX *bias, *add; // (N), (M,N), may be NULL
    bool gelu;
    int M, N, K;
};

// Calls f(row, column) with the first row and column of each of this block's tiles. In the functions below, i counts
// the steps of the ring over all phases, in the same way in the producer and in the consumers.
template <int halves, class F>
__device__ inline void transformer_block_each_tile(const TransformerBlockProduct& p, F f) {
    int columns = 128 * halves, num_columns = ceil_div(p.N, columns), num_tiles = ceil_div(p.M, 128) * num_columns;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) { // blocks that run together share rows of inp
        f(tile / num_columns * 128, tile % num_columns * columns);
    }
}

template <int halves>
__device__ inline void transformer_block_load(TransformerBlockSMem<halves>& smem, const CUtensorMap& inp_map,
                                              const CUtensorMap& weight_map, const TransformerBlockProduct& p, int& i) {
    const int ring = TransformerBlockSMem<halves>::ring;
    transformer_block_each_tile<halves>(p, [&](int row, int column) {
        for (int k = 0; k < p.K; k += 64, i++) {
            TransformerBlockStage<halves>& stage = smem.stages[i % ring];
            mbarrier_wait(&smem.empty[i % ring], (i / ring + 1) % 2);
            mbarrier_arrive_expect(&smem.full[i % ring], sizeof(stage));
            tma_load_2d(stage.a, &inp_map, k, row, &smem.full[i % ring]);
            tma_load_2d(stage.b, &weight_map, k, column, &smem.full[i % ring]);
        }
    });
}

// The epilogue of a warp's 16 rows and 32 columns from (row0, column0) on. The accumulators d are four 16x8 tiles of
// mma_16x8x16: d[4 * j .. 4 * j + 3] is tile j. Rows from num_rows on and columns from p.N on are not stored.
__device__ inline void transformer_block_store(const TransformerBlockProduct& p, const float* d, int row0, int column0,
                                               int num_rows) {
    int lane = threadIdx.x % 32, column = column0 + lane % 4 * 8;
#pragma unroll
    for (int half_tile = 0; half_tile < 2; half_tile++) {
        float v[4][2];
        for (int j = 0; j < 4; j++) {
            v[j][0] = d[4 * j + 2 * half_tile];
            v[j][1] = d[4 * j + 2 * half_tile + 1];
        }
        mma_quad_transpose(v);
        int row = row0 + 8 * half_tile + lane / 4;
        if (row >= num_rows || column >= p.N) { continue; }
        size_t at = (size_t)row * p.N + column;
        x128 out, bias = {}, add = {};
        if (p.bias) { bias = load128(p.bias + column); }
        if (p.add) { add = load128(p.add + at); }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float x = v[k / 2][k % 2] + (float)bias[k];
            if (p.gelu) { x = gelu(x); }
            out[k] = (floatX)(x + (float)add[k]);
        }
        store128(p.out + at, out);
    }
}

template <int halves> __device__ inline void
transformer_block_compute(TransformerBlockSMem<halves>& smem, const TransformerBlockProduct& p, int warp, int& i) {
    const int ring = TransformerBlockSMem<halves>::ring;
    int lane = threadIdx.x % 32, group_row = warp / 4 * 64;
    transformer_block_each_tile<halves>(p, [&](int row, int column) {
        float sum[halves][64];
#pragma unroll
        for (int j = 0; j < 64; j++) { // uninitialised, sum would occupy registers in all earlier phases
            for (int h = 0; h < halves; h++) { sum[h][j] = 0; }
        }
        for (int k = 0; k < p.K; k += 64, i++) {
            TransformerBlockStage<halves>& stage = smem.stages[i % ring];
            mbarrier_wait(&smem.full[i % ring], i / ring % 2);
            wgmma_fence();
            uint64_t a = wgmma_descriptor(stage.a + group_row * 64);
#pragma unroll
            for (int h = 0; h < halves; h++) {
                uint64_t b = wgmma_descriptor(stage.b + h * 128 * 64);
#pragma unroll
                for (int j = 0; j < 4; j++) { // 16 columns are 32 bytes, 2 in the descriptor's units of 16 bytes
                    wgmma_64x128x16(sum[h], a + 2 * j, b + 2 * j, 1, floatX());
                }
            }
            wgmma_commit();
            wgmma_wait<1>(); // the previous step's products have completed: its stage can be released
            if (k > 0 && lane == 0) { mbarrier_arrive(&smem.empty[(i - 1) % ring]); }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < halves; h++) { wgmma_hold(sum[h]); }
        if (lane == 0) { mbarrier_arrive(&smem.empty[(i - 1) % ring]); }
        int warp_row = row + group_row + warp % 4 * 16;
#pragma unroll
        for (int h = 0; h < halves; h++) {
#pragma unroll
            for (int q = 0; q < 4; q++) {
                transformer_block_store(p, sum[h] + 16 * q, warp_row, column + 128 * h + 32 * q, p.M);
            }
        }
    });
}

// The producer's attention phase. n counts tiles of queries.
template <int halves> __device__ inline void transformer_block_load_attention(TransformerBlockSMem<halves>& smem,
                                                                              const CUtensorMap& qkv_map,
                                                                              const TransformerBlock& f, int& i) {
    const int ring = TransformerBlockSMem<halves>::ring;
    int n = 0;
    attention_forward_each_tile<true>(f.B * f.NH, ceil_div(f.T, 128), 1, [&](int head, int tile) {
        int b = head / f.NH, h = head % f.NH;
        mbarrier_wait(&smem.queries_empty, (n + 1) % 2);
        attention_forward_tma(smem.queries[0], &smem.queries_full, qkv_map, h, tile * 128, b);
        n++;
        for (int step = tile; step >= 0; step--, i++) { // the diagonal first
            TransformerBlockStage<halves>& stage = smem.stages[i % ring];
            uint64_t* full = &smem.full[i % ring];
            mbarrier_wait(&smem.empty[i % ring], (i / ring + 1) % 2);
            mbarrier_arrive_expect(full, 2 * ATTENTION_FORWARD_KEY_BYTES);
            for (int j = 0; j < 2; j++) {
                tma_load_4d(stage.a + j * 64 * 64, &qkv_map, 0, f.NH + h, step * 128 + j * 64, b, full);
                tma_load_4d(stage.b + j * 64 * 64, &qkv_map, 0, 2 * f.NH + h, step * 128 + j * 64, b, full);
            }
        }
    });
}

template <int halves> __device__ inline void transformer_block_attention(TransformerBlockSMem<halves>& smem,
                                                                         const TransformerBlock& f, int warp, int& i) {
    const int ring = TransformerBlockSMem<halves>::ring;
    const float scale_log2 = LOG2E * 0.125f; // 1 / sqrt(64)
    int lane = threadIdx.x % 32, n = 0;
    attention_forward_each_tile<true>(f.B * f.NH, ceil_div(f.T, 128), 1, [&](int head, int tile) {
        const floatX* q = smem.queries[warp / 4];
        float s[64], o[32];
        uint32_t p[32];
        AttentionForwardRows x = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = s[j] = s[32 + j] = 0; }
        mbarrier_wait(&smem.queries_full, n++ % 2);
#pragma unroll 1
        for (int step = tile; step >= 0; step--, i++) {
            TransformerBlockStage<halves>& stage = smem.stages[i % ring];
            mbarrier_wait(&smem.full[i % ring], i / ring % 2);
            wgmma_fence();
            attention_forward_sm90_scores(s, q, stage.a);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(s);
            bool grew = step == tile ? attention_forward_sm90_lazy_softmax<true, true>(s, x, warp * 16, scale_log2)
                                     : attention_forward_sm90_lazy_softmax<false, false>(s, x, 0, scale_log2);
            if (grew) { attention_forward_sm90_rescale(o, x); }
            attention_forward_sm90_pack(p, s);
            wgmma_hold(o);
            wgmma_hold(p);
            wgmma_fence();
            attention_forward_sm90_values(o, p, stage.b);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(o);
            wgmma_hold(p);
            if (lane == 0) { mbarrier_arrive(&smem.empty[i % ring]); }
        }
        if (lane == 0) { mbarrier_arrive(&smem.queries_empty); }
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float l = x.l[half_row];
            l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
            l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
            x.rescale[half_row] = 1.0f / l;
        }
        attention_forward_sm90_rescale(o, x);
        TransformerBlockProduct out = {f.attention + (size_t)(head / f.NH) * f.T * f.C, NULL, NULL, false, f.T, f.C, 0};
        for (int half = 0; half < 2; half++) {
            transformer_block_store(out, o + 16 * half, tile * 128 + warp * 16, head % f.NH * 64 + half * 32, f.T);
        }
    });
}

// The layernorm phase: each of the eight consumer warps has one row at a time, in registers.
const int transformer_block_max_vecs = 7; // C <= 1792
__device__ inline void transformer_block_layernorm(floatX* norm, const floatX* inp, const floatX* weight,
                                                   const floatX* bias, int N, int C, int warp) {
    int lane = threadIdx.x % 32;
    for (int row = blockIdx.x * 8 + warp; row < N; row += gridDim.x * 8) {
        x128 x[transformer_block_max_vecs];
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int j = 0; j < transformer_block_max_vecs; j++) {
            int c = (lane + 32 * j) * x128::size;
            x[j] = c < C ? load128(inp + (size_t)row * C + c) : x128();
        }
#pragma unroll
        for (int j = 0; j < transformer_block_max_vecs; j++) {
            for (int k = 0; k < x128::size; k++) { sum += (float)x[j][k]; }
        }
        float m = warp_sum(sum) / C;
#pragma unroll
        for (int j = 0; j < transformer_block_max_vecs; j++) {
            if ((lane + 32 * j) * x128::size >= C) { continue; }
            for (int k = 0; k < x128::size; k++) {
                float centered = (float)x[j][k] - m;
                squares += centered * centered;
            }
        }
        float r = rsqrtf(warp_sum(squares) / C + NORM_EPSILON);
#pragma unroll
        for (int j = 0; j < transformer_block_max_vecs; j++) {
            int c = (lane + 32 * j) * x128::size;
            if (c >= C) { continue; }
            x128 w = load128(weight + c), b = load128(bias + c), y;
            for (int k = 0; k < x128::size; k++) {
                y[k] = (floatX)(((float)x[j][k] - m) * r * (float)w[k] + (float)b[k]);
            }
            store128(norm + (size_t)row * C + c, y);
        }
    }
}

// A barrier of all threads of the grid. Stores before it are visible after it, also to TMA.
__device__ inline void transformer_block_barrier() {
    async_proxy_fence();
    cooperative_groups::this_grid().sync();
    async_proxy_fence();
}

template <int halves> __global__ void __launch_bounds__(384, 1)
    transformer_block_sm90_kernel5(const __grid_constant__ TransformerBlock f,
                                   const __grid_constant__ TransformerBlockMaps maps) {
    extern __shared__ __align__(256) unsigned char transformer_block_shared[];
    auto& smem = shared_aligned_1024<TransformerBlockSMem<halves>>(transformer_block_shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < smem.ring; s++) {
            mbarrier_init(&smem.full[s], 1);
            mbarrier_init(&smem.empty[s], 8); // all consumer warps arrive
        }
        mbarrier_init(&smem.queries_full, 1);
        mbarrier_init(&smem.queries_empty, 8);
        mbarrier_init_fence();
    }
    __syncthreads();
    int N = f.B * f.T, C = f.C, i = 0;
    TransformerBlockProduct qkv = {f.qkv, f.w.qkv_bias, NULL, false, N, 3 * C, C};
    TransformerBlockProduct proj = {f.residual, f.w.proj_bias, f.inp, false, N, C, C};
    TransformerBlockProduct fc = {f.gelu, f.w.fc_bias, NULL, true, N, 4 * C, C};
    TransformerBlockProduct fcproj = {f.out, f.w.fcproj_bias, f.residual, false, N, C, 4 * C};
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - 4; // tells the compiler that it is warp-uniform
    if (warp < 0) {
        warpgroup_fewer_registers<56>();
        bool loads = threadIdx.x == 0;
        transformer_block_barrier(); // f.norm is complete
        if (loads) { transformer_block_load(smem, maps.norm, maps.qkv_weight, qkv, i); }
        __syncwarp();
        transformer_block_barrier();
        if (loads) { transformer_block_load_attention(smem, maps.qkv, f, i); }
        __syncwarp();
        transformer_block_barrier();
        if (loads) { transformer_block_load(smem, maps.attention, maps.proj_weight, proj, i); }
        __syncwarp();
        transformer_block_barrier();
        transformer_block_barrier(); // f.norm is complete
        if (loads) { transformer_block_load(smem, maps.norm, maps.fc_weight, fc, i); }
        __syncwarp();
        transformer_block_barrier();
        if (loads) { transformer_block_load(smem, maps.gelu, maps.fcproj_weight, fcproj, i); }
        return;
    }
    warpgroup_more_registers<224>();
    transformer_block_layernorm(f.norm, f.inp, f.w.ln1_weight, f.w.ln1_bias, N, C, warp);
    transformer_block_barrier();
    transformer_block_compute(smem, qkv, warp, i);
    transformer_block_barrier();
    transformer_block_attention(smem, f, warp, i);
    transformer_block_barrier();
    transformer_block_compute(smem, proj, warp, i);
    transformer_block_barrier();
    transformer_block_layernorm(f.norm, f.residual, f.w.ln2_weight, f.w.ln2_bias, N, C, warp);
    transformer_block_barrier();
    transformer_block_compute(smem, fc, warp, i);
    transformer_block_barrier();
    transformer_block_compute(smem, fcproj, warp, i);
}

template <int halves> static void transformer_block_forward5(const TransformerBlock& f, cudaStream_t stream) {
    auto kernel = transformer_block_sm90_kernel5<halves>;
    int N = f.B * f.T, C = f.C;
    const TransformerBlockWeights& w = f.w;
    TransformerBlockMaps maps = {tensor_map(f.norm, {C, N}, {64, 128}),
                                 tensor_map(f.attention, {C, N}, {64, 128}),
                                 tensor_map(f.gelu, {4 * C, N}, {64, 128}),
                                 tensor_map(w.qkv_weight, {C, 3 * C}, {64, 128 * halves}),
                                 tensor_map(w.proj_weight, {C, C}, {64, 128 * halves}),
                                 tensor_map(w.fc_weight, {C, 4 * C}, {64, 128 * halves}),
                                 tensor_map(w.fcproj_weight, {4 * C, C}, {64, 128 * halves}),
                                 tensor_map_heads(f.qkv, f.B, f.T, 3 * f.NH, 64)};
    const int bytes = sizeof(TransformerBlockSMem<halves>) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    TransformerBlock parameters = f;
    void* arguments[] = {&parameters, &maps};
    cudaCheck(cudaLaunchCooperativeKernel((const void*)kernel, num_multiprocessors(), 384, arguments, bytes, stream));
}

// Takes tiles of 256 columns if there are enough of them for all SMs, otherwise tiles of 128 columns.
void transformer_block_forward5(const TransformerBlock& f, cudaStream_t stream) {
    require(has_sm90a() && f.C == 64 * f.NH && f.C <= transformer_block_max_vecs * 256);
    require((size_t)ceil_div(f.B * f.T, 128) * ceil_div(4 * f.C, 128) <= INT_MAX);
    int num_tiles = ceil_div(f.B * f.T, 128) * ceil_div(f.C, 256);
    num_tiles >= num_multiprocessors() ? transformer_block_forward5<2>(f, stream)
                                       : transformer_block_forward5<1>(f, stream);
}

#endif

#if defined(ENABLE_BF16)

// ---- kernel 6: e4m3 products except the projection; activations are quantised by the kernels that produce them ----
// The projection stays in bf16: quantising attention's output in a pass of its own would cost the time that e4m3 saves.
//
// The scales follow from bounds that depend on the weights alone. A normalised row has a Euclidean length of at most
// sqrt(C), so none of its elements exceeds sqrt(C). By Cauchy-Schwarz, its dot product with a row of weights is at most
// sqrt(C) times the length of that row. These bounds are some ten times too wide, which is harmless: e4m3 keeps its
// full precision between 2^-6 and 448.

// The factors by which values are multiplied before they are stored as e4m3 (multiplier) and after they are loaded
// (inverse). Aligned as the library requires.
struct TransformerBlockScale {
    alignas(16) float multiplier;
    alignas(16) float inverse;
};
struct TransformerBlockScales {
    TransformerBlockScale norm1, attention, norm2, gelu, qkv_weight, proj_weight, fc_weight, fcproj_weight;
};

// The block's weights in e4m3, in device memory; written by transformer_block_prepare_fp8 when weights change.
struct TransformerBlockFp8 {
    __nv_fp8_e4m3 *qkv_weight, *fc_weight, *fcproj_weight; // (3C,C), (4C,C), (C,4C)
    // for kernel 15: (C,C), (C,4C), with each group of 64 columns in the order of gemm_e4m3_column
    __nv_fp8_e4m3 *ordered_proj_weight, *ordered_fcproj_weight;
    TransformerBlockScales* scales; // (1)
    unsigned* maxima;               // (TRANSFORMER_BLOCK_NUM_MAXIMA) scratch; the bits of floats >= 0
};
enum TransformerBlockMaximum { // largest magnitudes; ..._SQUARES: the largest sum of squares of a row
    MAX_QKV_WEIGHT,
    MAX_PROJ_WEIGHT,
    MAX_FC_WEIGHT,
    MAX_FCPROJ_WEIGHT,
    MAX_LN1_WEIGHT,
    MAX_LN1_BIAS,
    MAX_LN2_WEIGHT,
    MAX_LN2_BIAS,
    MAX_QKV_BIAS,
    MAX_FC_BIAS,
    MAX_QKV_SQUARES,
    MAX_FC_SQUARES,
    TRANSFORMER_BLOCK_NUM_MAXIMA
};

// One warp per row. The maxima do not depend on the order of the atomics. squares may be NULL.
__global__ void transformer_block_maxima_kernel6(unsigned* value, unsigned* squares, const floatX* matrix, int rows,
                                                 int columns) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) { return; }
    float largest = 0.0f, sum = 0.0f;
    for (int c = lane * x128::size; c < columns; c += 32 * x128::size) {
        x128 x = load128(matrix + (size_t)row * columns + c);
        for (int k = 0; k < x128::size; k++) {
            largest = fmaxf(largest, fabsf((float)x[k]));
            sum += (float)x[k] * (float)x[k];
        }
    }
    largest = warp_max(largest), sum = warp_sum(sum);
    if (lane == 0) {
        atomicMax(value, __float_as_uint(largest)); // floats >= 0 are in the order of their bits
        if (squares) { atomicMax(squares, __float_as_uint(sum)); }
    }
}

__device__ inline TransformerBlockScale transformer_block_scale(float bound) {
    float multiplier = 448.0f / fmaxf(bound, 1e-20f); // 448: the largest e4m3 value
    return {multiplier, 1.0f / multiplier};
}
__global__ void transformer_block_scales_kernel6(TransformerBlockScales* scales, const unsigned* maxima, int C) {
    auto largest = [=](int i) { return __uint_as_float(maxima[i]); };
    float length = sqrtf((float)C);
    float norm1 = largest(MAX_LN1_WEIGHT) + largest(MAX_LN1_BIAS);
    float norm2 = largest(MAX_LN2_WEIGHT) + largest(MAX_LN2_BIAS);
    // a bound of all values; attention's output, a weighted mean of values, is no larger
    float value = length * norm1 * sqrtf(largest(MAX_QKV_SQUARES)) + largest(MAX_QKV_BIAS);
    scales->norm1 = transformer_block_scale(length * largest(MAX_LN1_WEIGHT) + largest(MAX_LN1_BIAS));
    scales->attention = transformer_block_scale(value);
    scales->norm2 = transformer_block_scale(length * largest(MAX_LN2_WEIGHT) + largest(MAX_LN2_BIAS));
    scales->gelu = transformer_block_scale(length * norm2 * sqrtf(largest(MAX_FC_SQUARES)) + largest(MAX_FC_BIAS));
    scales->qkv_weight = transformer_block_scale(largest(MAX_QKV_WEIGHT));
    scales->proj_weight = transformer_block_scale(largest(MAX_PROJ_WEIGHT));
    scales->fc_weight = transformer_block_scale(largest(MAX_FC_WEIGHT));
    scales->fcproj_weight = transformer_block_scale(largest(MAX_FCPROJ_WEIGHT));
}

// out = scale->multiplier * inp, or * gelu(inp) if has_gelu, in e4m3. ordered: each group of 64 elements is in the
// order of gemm_e4m3_column. n is a multiple of 8, or of 64 if ordered.
template <bool has_gelu, bool ordered>
__global__ void transformer_block_quantize_kernel6(__nv_fp8_e4m3* out, const floatX* inp,
                                                   const TransformerBlockScale* scale, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    float multiplier = scale->multiplier, y[8];
    x128 x;
    if (ordered) {
        for (int k = 0; k < 8; k++) { x[k] = inp[i / 64 * 64 + gemm_e4m3_column(i % 64 + k)]; }
    } else {
        x = load128(inp + i);
    }
    for (int k = 0; k < 8; k++) { y[k] = multiplier * (has_gelu ? gelu((float)x[k]) : (float)x[k]); }
    fused_residual_layernorm_store8(out + i, y);
}
template <bool gelu, bool ordered = false> static void transformer_block_quantize(__nv_fp8_e4m3* out, const floatX* inp,
                                                                                  const TransformerBlockScale* scale,
                                                                                  size_t n, cudaStream_t stream) {
    transformer_block_quantize_kernel6<gelu, ordered>
        <<<(unsigned)ceil_div(n, (size_t)256 * x128::size), 256, 0, stream>>>(out, inp, scale, n);
    cudaCheck(cudaGetLastError());
}

// Prepares the e4m3 weights and the scales. It runs once per change of the weights and is not part of the kernels'
// time.
void transformer_block_prepare_fp8(const TransformerBlockFp8& q, const TransformerBlockWeights& w, int C,
                                   cudaStream_t stream) {
    cudaCheck(cudaMemsetAsync(q.maxima, 0, TRANSFORMER_BLOCK_NUM_MAXIMA * sizeof(unsigned), stream));
    auto maximum = [&](int value, const floatX* matrix, int rows, int columns) {
        unsigned* squares = value == MAX_QKV_WEIGHT  ? q.maxima + MAX_QKV_SQUARES
                            : value == MAX_FC_WEIGHT ? q.maxima + MAX_FC_SQUARES
                                                     : NULL;
        transformer_block_maxima_kernel6<<<ceil_div(rows, 8), 256, 0, stream>>>(q.maxima + value, squares, matrix, rows,
                                                                                columns);
        cudaCheck(cudaGetLastError());
    };
    maximum(MAX_QKV_WEIGHT, w.qkv_weight, 3 * C, C);
    maximum(MAX_PROJ_WEIGHT, w.proj_weight, C, C);
    maximum(MAX_FC_WEIGHT, w.fc_weight, 4 * C, C);
    maximum(MAX_FCPROJ_WEIGHT, w.fcproj_weight, C, 4 * C);
    maximum(MAX_LN1_WEIGHT, w.ln1_weight, 1, C);
    maximum(MAX_LN1_BIAS, w.ln1_bias, 1, C);
    maximum(MAX_LN2_WEIGHT, w.ln2_weight, 1, C);
    maximum(MAX_LN2_BIAS, w.ln2_bias, 1, C);
    maximum(MAX_QKV_BIAS, w.qkv_bias, 1, 3 * C);
    maximum(MAX_FC_BIAS, w.fc_bias, 1, 4 * C);
    transformer_block_scales_kernel6<<<1, 1, 0, stream>>>(q.scales, q.maxima, C);
    cudaCheck(cudaGetLastError());
    size_t CC = (size_t)C * C;
    transformer_block_quantize<false>(q.qkv_weight, w.qkv_weight, &q.scales->qkv_weight, 3 * CC, stream);
    transformer_block_quantize<false>(q.fc_weight, w.fc_weight, &q.scales->fc_weight, 4 * CC, stream);
    transformer_block_quantize<false>(q.fcproj_weight, w.fcproj_weight, &q.scales->fcproj_weight, 4 * CC, stream);
    if (C % 64 != 0) { return; } // only kernel 15 uses the ordered weights, and it needs C = 64 * NH
    transformer_block_quantize<false, true>(q.ordered_proj_weight, w.proj_weight, &q.scales->proj_weight, CC, stream);
    transformer_block_quantize<false, true>(q.ordered_fcproj_weight, w.fcproj_weight, &q.scales->fcproj_weight, 4 * CC,
                                            stream);
}

// The library's products with e4m3 operands. e4m3 activations are stored in the first half of f.norm and f.gelu.
struct TransformerBlockCalls {
    LinearCall qkv, fc, fcproj;
};

// If gelu_epilogue is true, the fc product applies GELU and stores e4m3 to f.gelu. Otherwise it stores floatX to
// f.hidden, without GELU.
static TransformerBlockCalls transformer_block_calls(const TransformerBlock& f, const TransformerBlockFp8& q,
                                                     bool gelu_epilogue) {
    int N = f.B * f.T, C = f.C;
    const TransformerBlockScales* s = q.scales;
    auto linear = [=](void* out, const floatX* inp, const TransformerBlockScale& inp_scale, const __nv_fp8_e4m3* weight,
                      const TransformerBlockScale& weight_scale, const floatX* bias, int K, int OC) {
        LinearCall call;
        call.out = out, call.inp = inp, call.weight = weight, call.bias = bias;
        call.inp_type = call.weight_type = CUDA_R_8F_E4M3;
        call.inp_scale = &inp_scale.inverse, call.weight_scale = &weight_scale.inverse;
        call.M = N, call.N = OC, call.K = K;
        return call;
    };
    TransformerBlockCalls calls = {
        linear(f.qkv, f.norm, s->norm1, q.qkv_weight, s->qkv_weight, f.w.qkv_bias, C, 3 * C),
        linear(f.hidden, f.norm, s->norm2, q.fc_weight, s->fc_weight, f.w.fc_bias, C, 4 * C),
        linear(f.out, f.gelu, s->gelu, q.fcproj_weight, s->fcproj_weight, f.w.fcproj_bias, 4 * C, C)};
    if (gelu_epilogue) {
        calls.fc.gelu = true, calls.fc.out = f.gelu, calls.fc.out_type = CUDA_R_8F_E4M3;
        calls.fc.out_scale = &s->gelu.multiplier;
    }
    calls.fcproj.add = f.residual;
    return calls;
}
static bool transformer_block_has_fp8(const TransformerBlock& f, const TransformerBlockFp8& q, bool gelu_epilogue) {
    TransformerBlockCalls calls = transformer_block_calls(f, q, gelu_epilogue);
    return cublaslt_has_linear(calls.qkv) && cublaslt_has_linear(calls.fc) && cublaslt_has_linear(calls.fcproj);
}

// Kernel 6, or kernel 8 if gelu_epilogue is true. proj_form is the projection's form of gemm.cuh, whose epilogue adds
// the residual. If it is 0, matmul_forward computes the projection, and the layernorm kernel adds the residual.
void transformer_block_forward6(const TransformerBlock& f, const TransformerBlockFp8& q, bool gelu_epilogue,
                                int proj_form, cudaStream_t stream) {
    int N = f.B * f.T, C = f.C;
    const TransformerBlockWeights& w = f.w;
    __nv_fp8_e4m3 *norm = (__nv_fp8_e4m3*)f.norm, *gelu = (__nv_fp8_e4m3*)f.gelu;
    const TransformerBlockScales* s = q.scales;
    TransformerBlockCalls calls = transformer_block_calls(f, q, gelu_epilogue);
    const float *scale1 = &s->norm1.multiplier, *scale2 = &s->norm2.multiplier;
    fused_residual_layernorm_early(norm, NULL, NULL, NULL, f.inp, NULL, w.ln1_weight, w.ln1_bias, scale1, N, C,
                                   NORM_EPSILON, stream);
    cublasCheck(cublaslt_try_linear(calls.qkv, stream));
    attention_forward(f.attention, NULL, f.qkv, f.B, f.T, C, f.NH, 1.0f / sqrtf((float)(C / f.NH)), stream);
    if (proj_form == 0) {
        transformer_block_product<0>(f.projected, f.attention, w.proj_weight, w.proj_bias, NULL, N, C, C, 0, stream);
        fused_residual_layernorm_early(norm, f.residual, NULL, NULL, f.inp, f.projected, w.ln2_weight, w.ln2_bias,
                                       scale2, N, C, NORM_EPSILON, stream);
    } else {
        transformer_block_product<GEMM_ADD>(f.residual, f.attention, w.proj_weight, w.proj_bias, f.inp, N, C, C,
                                            proj_form, stream);
        fused_residual_layernorm_early(norm, NULL, NULL, NULL, f.residual, NULL, w.ln2_weight, w.ln2_bias, scale2, N, C,
                                       NORM_EPSILON, stream);
    }
    cublasCheck(cublaslt_try_linear(calls.fc, stream));
    if (!gelu_epilogue) { transformer_block_quantize<true>(gelu, f.hidden, &s->gelu, (size_t)N * 4 * C, stream); }
    cublasCheck(cublaslt_try_linear(calls.fcproj, stream));
}
#endif

// ---- kernel 7: kernel 2 without storing GELU's argument, which only the backward pass needs ----

void transformer_block_forward7(const TransformerBlock& f, cudaStream_t stream) {
    int N = f.B * f.T, C = f.C;
    const TransformerBlockWeights& w = f.w;
    layernorm_forward(f.norm, f.mean, f.rstd, f.inp, w.ln1_weight, w.ln1_bias, N, C, NORM_EPSILON, stream);
    matmul_forward(f.qkv, NULL, f.norm, w.qkv_weight, w.qkv_bias, NULL, N, C, 3 * C, stream);
    attention_forward(f.attention, NULL, f.qkv, f.B, f.T, C, f.NH, 1.0f / sqrtf((float)(C / f.NH)), stream);
    matmul_forward(f.projected, NULL, f.attention, w.proj_weight, w.proj_bias, NULL, N, C, C, stream);
    fused_residual_layernorm_forward(f.residual, f.norm, f.mean, f.rstd, f.inp, f.projected, w.ln2_weight, w.ln2_bias,
                                     N, C, NORM_EPSILON, stream);
    transformer_block_fc_gelu(f, stream);
    matmul_forward(f.out, NULL, f.gelu, w.fcproj_weight, w.fcproj_bias, f.residual, N, 4 * C, C, stream);
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// ---- kernel 11: normalised rows are never stored; products take raw rows, their epilogues apply mean and rstd ----
// layernorm(x) W^T + b = rstd (x W'^T - mean u) + v, where W' = weight * W, u = the sums of the rows of W', and
// v = W bias + b

// One layernorm folded into the linear layer after it, in device memory; written by transformer_block_prepare_deferred
// when weights change.
struct TransformerBlockFolded {
    floatX* weight; // W' (OC,C)
    float2* sums;   // u, v (OC)
};
struct TransformerBlockDeferred {
    TransformerBlockFolded qkv, fc; // OC = 3C, 4C
};

// One warp per row of linear_weight.
__global__ void transformer_block_fold_kernel11(TransformerBlockFolded folded, const floatX* weight, const floatX* bias,
                                                const floatX* linear_weight, const floatX* linear_bias, int OC, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float u = 0.0f, v = 0.0f;
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        size_t at = (size_t)row * C + c;
        x128 l = load128(linear_weight + at), w = load128(weight + c), b = load128(bias + c), product;
        for (int k = 0; k < x128::size; k++) {
            product[k] = (floatX)((float)w[k] * (float)l[k]);
            u += (float)product[k]; // the rounded value, so that rows of equal values cancel exactly
            v += (float)b[k] * (float)l[k];
        }
        store128(folded.weight + at, product);
    }
    u = warp_sum(u), v = warp_sum(v);
    if (lane == 0) { folded.sums[row] = make_float2(u, v + (float)linear_bias[row]); }
}

// Prepares the folded weights of kernels 11 to 13. It runs once per change of the weights and is not part of the
// kernels' time.
void transformer_block_prepare_deferred(const TransformerBlockDeferred& d, const TransformerBlockWeights& w, int C,
                                        cudaStream_t stream) {
    require(C % x128::size == 0);
    transformer_block_fold_kernel11<<<ceil_div(3 * C, 8), 256, 0, stream>>>(d.qkv, w.ln1_weight, w.ln1_bias,
                                                                            w.qkv_weight, w.qkv_bias, 3 * C, C);
    cudaCheck(cudaGetLastError());
    transformer_block_fold_kernel11<<<ceil_div(4 * C, 8), 256, 0, stream>>>(d.fc, w.ln2_weight, w.ln2_bias, w.fc_weight,
                                                                            w.fc_bias, 4 * C, C);
    cudaCheck(cudaGetLastError());
}

// mean, rstd (N) of the rows of inp (N,C), one warp per row. It sums differences from the row's first element, so that
// the terms that cancel are at most C times the variance.
__global__ void __launch_bounds__(256)
    transformer_block_statistics_kernel11(float* mean, float* rstd, const floatX* inp, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    const floatX* x = inp + (size_t)row * C;
    float first = (float)x[0], sum = 0.0f, squares = 0.0f;
    for (int begin = lane * x128::size; begin < C; begin += 3 * 32 * x128::size) {
        x128 v[3]; // all three in flight at once
#pragma unroll
        for (int j = 0; j < 3; j++) {
            int c = begin + 32 * j * x128::size;
            if (c < C) { v[j] = load128(x + c); }
        }
#pragma unroll
        for (int j = 0; j < 3; j++) {
            if (begin + 32 * j * x128::size >= C) { continue; }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)v[j][k] - first;
                sum += d, squares += d * d;
            }
        }
    }
    float d = warp_sum(sum) / C, variance = fmaxf(warp_sum(squares) / C - d * d, 0.0f);
    if (lane == 0) { mean[row] = first + d, rstd[row] = rsqrtf(variance + NORM_EPSILON); }
}
static void transformer_block_statistics(const TransformerBlock& f, const floatX* inp, cudaStream_t stream) {
    int N = f.B * f.T;
    launch_early(transformer_block_statistics_kernel11, dim3(ceil_div(N, 8)), dim3(256), 0, stream, f.mean, f.rstd, inp,
                 N, f.C);
}

// First layernorm, qkv product and attention: f.attention from f.inp.
static void transformer_block_attention11(const TransformerBlock& f, const TransformerBlockDeferred& d,
                                          cudaStream_t stream) {
    require(has_sm90a());
    int N = f.B * f.T, C = f.C;
    transformer_block_statistics(f, f.inp, stream);
    GemmArgs qkv = {f.qkv, NULL, f.inp, d.qkv.weight, NULL, N, 3 * C, C};
    GemmLayernorm<0> layernorm = {f.mean, f.rstd, d.qkv.sums};
    gemm_tiles<GemmPingPong192Pairs>(qkv, layernorm, true, stream);
    attention_forward(f.attention, NULL, f.qkv, f.B, f.T, C, f.NH, 1.0f / sqrtf((float)(C / f.NH)), stream);
}

void transformer_block_forward11(const TransformerBlock& f, const TransformerBlockDeferred& d, cudaStream_t stream,
                                 int fcproj_form) {
    int N = f.B * f.T, C = f.C;
    transformer_block_attention11(f, d, stream);
    transformer_block_product<GEMM_ADD>(f.residual, f.attention, f.w.proj_weight, f.w.proj_bias, f.inp, N, C, C,
                                        GEMM_PING_PONG_192, stream);
    transformer_block_statistics(f, f.residual, stream);
    GemmArgs fc = {f.gelu, NULL, f.residual, d.fc.weight, NULL, N, 4 * C, C};
    GemmLayernorm<GEMM_GELU> layernorm = {f.mean, f.rstd, d.fc.sums};
    gemm_tiles<GemmPingPong192Pairs>(fc, layernorm, true, stream);
    transformer_block_fcproj(f, fcproj_form, stream);
}

// ---- kernel 12: kernel 11 with the second layernorm's statistics from the projection's epilogue ----
// For each row of each of its tiles, the projection stores partial statistics, called a part: the mean, and the sum of
// squared differences from this mean. The epilogue of the fc product combines the parts of a row.

typedef GemmPingPong192<GemmSingle> TransformerBlockTiles12;

// GemmLayernorm that computes mean and rstd of a row from its parts (M, tiles per row). C: length of the rows.
template <int extras> struct TransformerBlockPartsNorm : GemmLayernorm<extras> {
    const float2* parts;
    int C;

    typedef typename GemmLayernorm<extras>::Row Row;
    __device__ Row row(int row) const {
        const int columns = TransformerBlockTiles12::COLUMNS;
        int num_parts = ceil_div(C, columns);
        const float2* p = parts + (size_t)row * num_parts;
        float first = p[0].x, sum = 0.0f, squares = 0.0f;
#pragma unroll 4
        for (int i = 0; i < num_parts; i++) {
            float2 part = p[i];
            float count = (float)min(columns, C - i * columns), d = part.x - first;
            sum += count * d, squares += part.y + count * d * d;
        }
        float d = sum / C;
        return {first + d, rsqrtf(fmaxf(squares / C - d * d, 0.0f) + NORM_EPSILON)};
    }
};

// Stores results as gemm_store does for bias and residual. Then computes the parts (mean, sum of squares) of
// this warp's rows from the stored, rounded values.
template <class G> __device__ inline void transformer_block_store12(float (&sum)[G::PARTS][G::COLUMNS / 2],
                                                                    const GemmColumns<G, GemmBias<GEMM_ADD>>& columns,
                                                                    GemmSMem<G>& smem, const GemmMaps& maps,
                                                                    float2* parts, int row, int column, int M, int N,
                                                                    int& box) {
    constexpr int num_columns = G::COLUMNS / 64, num_boxes = G::PARTS * num_columns, ahead = G::BOXES / 2;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, first_box = box;
    uint32_t lane_at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int n = 0; n < num_boxes; n++, box++) {
        const int m = n / num_columns, q = n % num_columns, place = box % G::BOXES;
        if (n + ahead >= G::BOXES && n + ahead < num_boxes && lane == 0) {
            tma_store_wait<G::BOXES - ahead - 1>();
            gemm_load_box<G>(smem, maps.third, GemmTile{row, column}, n + ahead, first_box);
        }
        mbarrier_wait(&smem.box_full[warp][place], box / G::BOXES % 2);
        uint32_t at = shared_address(smem.boxes[warp][place]) + lane_at;
#pragma unroll
        for (int p = 0; p < 4; p++) { // 16 columns per iteration
            uint32_t out[4], residual[4];
            ldmatrix_x4(residual, at ^ p << 5);
#pragma unroll
            for (int j = 0; j < 2; j++) { // 8 columns per iteration
                float bias[2];
                GemmBias<0>().columns(bias, gemm_shuffle(columns.pairs[q], 8 * p + 4 * j + lane % 4));
#pragma unroll
                for (int half = 0; half < 2; half++) { // rows 0..7, then 8..15
                    const int k = 32 * q + 8 * p + 4 * j + 2 * half;
                    float2 add = unpack_16x2(residual[2 * j + half], floatX());
                    uint32_t bits = pack_16x2(sum[m][k] + bias[0] + add.x, sum[m][k + 1] + bias[1] + add.y, floatX());
                    float2 stored = unpack_16x2(bits, floatX());
                    sum[m][k] = stored.x, sum[m][k + 1] = stored.y;
                    out[2 * j + half] = bits;
                }
            }
            stmatrix_x4(at ^ p << 5, out);
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(&maps.out, smem.boxes[warp][place], column + 64 * q, row + 64 * m);
            tma_store_commit();
        }
    }
    int count = min(G::COLUMNS, N - column), num_parts = ceil_div(N, G::COLUMNS);
#pragma unroll
    for (int i = 0; i < 2 * G::PARTS; i++) { // one row: in each 16x8 tile, a lane has 2 of the 8 columns
        const int m = i / 2, half = i % 2;
        float total = 0.0f, squares = 0.0f;
#pragma unroll
        for (int j = 0; j < G::COLUMNS / 8; j++) {
            bool inside = 8 * j < count; // all 8 columns or none, because N % 8 == 0
            total += inside ? sum[m][4 * j + 2 * half] + sum[m][4 * j + 2 * half + 1] : 0.0f;
        }
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
        float mean = total / count;
#pragma unroll
        for (int j = 0; j < G::COLUMNS / 8; j++) {
            float x = sum[m][4 * j + 2 * half] - mean, y = sum[m][4 * j + 2 * half + 1] - mean;
            squares += 8 * j < count ? x * x + y * y : 0.0f;
        }
        squares += __shfl_xor_sync(0xFFFFFFFFu, squares, 1);
        squares += __shfl_xor_sync(0xFFFFFFFFu, squares, 2);
        int at = row + 64 * m + 8 * half + lane / 4;
        if (lane % 4 == 0 && at < M) {
            parts[(size_t)at * num_parts + column / G::COLUMNS] = make_float2(mean, squares);
        }
    }
}

// gemm_sm90_kernel9 without clusters, with the epilogue above.
__global__ void __launch_bounds__(384, 1)
    transformer_block_sm90_kernel12(const __grid_constant__ GemmMaps maps, const GemmBias<GEMM_ADD> epilogue,
                                    float2* parts, int M, int N, int K, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef TransformerBlockTiles12 G;
    static_assert(gemm_is_ping_pong<G> && G::CLUSTER == 1, "as the loops below are");
    extern __shared__ __align__(256) unsigned char transformer_block_shared12[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(transformer_block_shared12);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles);
    if (warp < 4) { return; }
    int warpgroup = warp / 4, num_steps = ceil_div(K, 64), i = 0;
    int box = 0, number = 0;
    i = (warpgroup - 1) * num_steps;
#pragma unroll 1
    for (int index = blockIdx.x + (warpgroup - 1) * gridDim.x; index < num_tiles; index += 2 * gridDim.x, number++) {
        float sum[G::PARTS][G::COLUMNS / 2];
        GemmTile tile = gemm_tile<G>(index, M, N, 0);
        int row = tile.row + warp % 4 * 16;
        GemmColumns<G, GemmBias<GEMM_ADD>> columns;
        gemm_prepare(columns, epilogue, smem, maps.third, GemmTile{row, tile.column}, N, box);
        gemm_multiply<G, false>(sum, smem, num_steps, number, i);
        i += num_steps;
        transformer_block_store12(sum, columns, smem, maps, parts, row, tile.column, M, N, box);
    }
    gemm_end<G>();
#endif
}

// parts (B*T, C / 192 rounded up) is scratch.
void transformer_block_forward12(const TransformerBlock& f, const TransformerBlockDeferred& d, float2* parts,
                                 cudaStream_t stream, int fcproj_form) {
    typedef TransformerBlockTiles12 G;
    int N = f.B * f.T, C = f.C;
    transformer_block_attention11(f, d, stream);
    GemmMaps maps;
    maps.inp = tensor_map(f.attention, {C, N}, {64, G::ROWS});
    maps.weight = tensor_map(f.w.proj_weight, {C, C}, {64, G::COLUMNS});
    maps.out = maps.second = gemm_box_map(f.residual, N, C);
    maps.third = gemm_box_map(f.inp, N, C);
    int num_tiles = gemm_num_tiles<G>(N, C, C);
    gemm_start<G>(transformer_block_sm90_kernel12, num_tiles, true, stream, maps, GemmBias<GEMM_ADD>{f.w.proj_bias},
                  parts, N, C, C, num_tiles);
    GemmArgs fc = {f.gelu, NULL, f.residual, d.fc.weight, NULL, N, 4 * C, C};
    TransformerBlockPartsNorm<GEMM_GELU> layernorm = {{NULL, NULL, d.fc.sums}, parts, C};
    gemm_tiles<GemmPingPong192Pairs>(fc, layernorm, true, stream);
    transformer_block_fcproj(f, fcproj_form, stream);
}

// Folded weights of one block, prepared at the first use.
struct TransformerBlockDeferredCache {
    TransformerBlockDeferred d = {};
    bool prepared = false;
    TransformerBlockDeferredCache(int C) {
        auto allocate = [=](TransformerBlockFolded& folded, int OC) {
            cudaCheck(cudaMalloc(&folded.weight, (size_t)OC * C * sizeof(floatX)));
            cudaCheck(cudaMalloc(&folded.sums, OC * sizeof(float2)));
        };
        allocate(d.qkv, 3 * C);
        allocate(d.fc, 4 * C);
    }
    TransformerBlockDeferredCache(const TransformerBlockDeferredCache&) = delete;
    ~TransformerBlockDeferredCache() {
        for (const TransformerBlockFolded& folded : {d.qkv, d.fc}) {
            cudaFree(folded.weight);
            cudaFree(folded.sums);
        }
    }
    const TransformerBlockDeferred& get(const TransformerBlockWeights& w, int C, cudaStream_t stream) {
        if (!prepared) { transformer_block_prepare_deferred(d, w, C, stream); }
        prepared = true;
        return d;
    }
};

// ---- kernel 14: kernel 4 with attention, projection, residual and layernorm in one launch ----

// forms.proj is not used.
void transformer_block_forward14(const TransformerBlock& f, const TransformerBlockForms& forms, cudaStream_t stream) {
    const TransformerBlockWeights& w = f.w;
    transformer_block_qkv4(f, forms.qkv, stream);
    AttentionProjection attention = {f.residual,  f.norm,       f.mean,     f.rstd, NULL, f.qkv, f.inp, w.proj_weight,
                                     w.proj_bias, w.ln2_weight, w.ln2_bias, f.B,    f.T,  f.C,   f.NH};
    fused_attention_projection_residual_layernorm4(attention, stream);
    transformer_block_mlp4(f, forms, stream);
}

#endif

#if defined(ENABLE_BF16)

// ---- kernel 15: all four products in e4m3 by gemm.cuh; attention and GELU convert to e4m3 in registers ----

// Output policy of attention: stores the result times *scale as e4m3 (B,T,NH,64), the 64 elements of a head in the
// order of gemm_e4m3_column.
struct TransformerBlockStore15 {
    __nv_fp8_e4m3* out;
    const float* scale;
    int T, NH;
    __device__ void prepare(floatX*, int, int, int) {}
    __device__ void store(floatX*, const float (&o)[32], const float (&l)[2], int t, int h, int b) {
        int lane = threadIdx.x % 32;
        float multiplier = __ldg(scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = t + 8 * half + lane / 4;
            float x = multiplier / l[half];
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { // 16 columns per iteration
                const float* y = o + 8 * i + 2 * half;
                words[i] = pack_e4m3x4(y[0] * x, y[1] * x, y[4] * x, y[5] * x);
            }
            if (row >= 0 && row < T) {
                *reinterpret_cast<uint4*>(out + (((size_t)b * T + row) * NH + h) * 64 + lane % 4 * 16) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};
// Kernel 25 of attention_forward, with TransformerBlockStore15 as its output policy.
template <int groups> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    transformer_block_attention_kernel15(float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                         AttentionForwardList list, float scale_log2, __nv_fp8_e4m3* out,
                                         const float* scale) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    if (threadIdx.x == 0) { tma_prefetch_map(&qkv_map); }
    auto& smem = shared_aligned_1024<AttentionForwardSMem<groups>>(attention_forward_shared);
    attention_forward_sm90_block(smem, lse, qkv_map, T, NH, list, scale_log2,
                                 TransformerBlockStore15{out, scale, T, NH});
}
template <int groups> static void transformer_block_attention15(const TransformerBlock& f, __nv_fp8_e4m3* out,
                                                                const float* scale, cudaStream_t stream) {
    float* no_lse = NULL;
    attention_forward_sm90_launch_kernel<groups, AttentionForwardSMem<groups>>(
        transformer_block_attention_kernel15<groups>, no_lse, f.qkv, f.B, f.T, f.NH, stream, out, scale);
}

// out (M,N) = inp (M,K) weight (N,K)^T + bias, and the operations of `extras`; inp and weight are e4m3
template <int extras> static void transformer_block_product15(const GemmScaledBias<extras>& epilogue, floatX* out,
                                                              const __nv_fp8_e4m3* inp, const __nv_fp8_e4m3* weight,
                                                              const floatX* residual, int M, int N, int K, int form,
                                                              cudaStream_t stream) {
    // K / 2, because gemm.cuh addresses two e4m3 elements as one floatX
    GemmArgs g = {out, NULL, (const floatX*)inp, (const floatX*)weight, residual, M, N, K / 2};
    gemm_form_e4m3(g, epilogue, true, stream, form);
}

// Needs C = 64 * NH. digits: see TransformerBlockForms. e4m3 activations are stored in the first half of f.norm,
// f.attention and f.gelu.
void transformer_block_forward15(const TransformerBlock& f, const TransformerBlockFp8& q, cudaStream_t stream,
                                 int digits = 2222) {
    require(f.C == 64 * f.NH);
    TransformerBlockForms forms = transformer_block_forms(digits);
    int N = f.B * f.T, C = f.C;
    const TransformerBlockWeights& w = f.w;
    const TransformerBlockScales* s = q.scales;
    __nv_fp8_e4m3 *norm = (__nv_fp8_e4m3*)f.norm, *attention = (__nv_fp8_e4m3*)f.attention;
    __nv_fp8_e4m3* gelu = (__nv_fp8_e4m3*)f.gelu;
    fused_residual_layernorm_early(norm, NULL, NULL, NULL, f.inp, NULL, w.ln1_weight, w.ln1_bias, &s->norm1.multiplier,
                                   N, C, NORM_EPSILON, stream);
    GemmScaledBias<0> to_qkv = {{w.qkv_bias}, &s->norm1.inverse, &s->qkv_weight.inverse, NULL, NULL};
    transformer_block_product15(to_qkv, f.qkv, norm, q.qkv_weight, NULL, N, 3 * C, C, forms.qkv, stream);
    bool few = attention_forward_sm90_groups(f.B, f.T, f.NH) == 2;
    (few ? transformer_block_attention15<2> : transformer_block_attention15<4>)(f, attention, &s->attention.multiplier,
                                                                                stream);
    GemmScaledBias<GEMM_ADD> to_residual = {{w.proj_bias}, &s->attention.inverse, &s->proj_weight.inverse, NULL, NULL};
    transformer_block_product15(to_residual, f.residual, attention, q.ordered_proj_weight, f.inp, N, C, C, forms.proj,
                                stream);
    fused_residual_layernorm_early(norm, NULL, NULL, NULL, f.residual, NULL, w.ln2_weight, w.ln2_bias,
                                   &s->norm2.multiplier, N, C, NORM_EPSILON, stream);
    GemmScaledBias<GEMM_GELU | GEMM_E4M3> to_gelu = {
        {w.fc_bias}, &s->norm2.inverse, &s->fc_weight.inverse, gelu, &s->gelu.multiplier};
    transformer_block_product15(to_gelu, NULL, norm, q.fc_weight, NULL, N, 4 * C, C, forms.fc, stream);
    GemmScaledBias<GEMM_ADD> to_out = {{w.fcproj_bias}, &s->gelu.inverse, &s->fcproj_weight.inverse, NULL, NULL};
    transformer_block_product15(to_out, f.out, gelu, q.ordered_fcproj_weight, f.residual, N, C, 4 * C, forms.fcproj,
                                stream);
}

// The weights of one block in e4m3, prepared at the first use.
struct TransformerBlockCache {
    TransformerBlockFp8 q = {};
    bool prepared = false;
    TransformerBlockCache(int C) {
        size_t CC = (size_t)C * C;
        cudaCheck(cudaMalloc(&q.qkv_weight, 3 * CC));
        cudaCheck(cudaMalloc(&q.fc_weight, 4 * CC));
        cudaCheck(cudaMalloc(&q.fcproj_weight, 4 * CC));
        cudaCheck(cudaMalloc(&q.ordered_proj_weight, CC));
        cudaCheck(cudaMalloc(&q.ordered_fcproj_weight, 4 * CC));
        cudaCheck(cudaMalloc(&q.scales, sizeof(TransformerBlockScales)));
        cudaCheck(cudaMalloc(&q.maxima, TRANSFORMER_BLOCK_NUM_MAXIMA * sizeof(unsigned)));
    }
    TransformerBlockCache(const TransformerBlockCache&) = delete;
    ~TransformerBlockCache() {
        for (void* p : {(void*)q.qkv_weight, (void*)q.fc_weight, (void*)q.fcproj_weight, (void*)q.ordered_proj_weight,
                        (void*)q.ordered_fcproj_weight, (void*)q.scales, (void*)q.maxima}) {
            cudaFree(p);
        }
    }
};

#endif

// True if kernel 4 supports this device and C; otherwise transformer_block_forward runs kernel 7.
inline bool transformer_block_has_sm90(int C) {
#if defined(ENABLE_FP32)
    (void)C;
    return false;
#else
    return C % 8 == 0 && C <= 2048 && has_sm90a();
#endif
}

// The block f.out = block(f.inp); everything else in f is scratch. forms: see TransformerBlockForms.
void transformer_block_forward(const TransformerBlock& f, cudaStream_t stream, int forms = 2222) {
#if !defined(ENABLE_FP32)
    if (transformer_block_has_sm90(f.C)) {
        return transformer_block_forward4(f, transformer_block_forms(forms), stream);
    }
#endif
    (void)forms;
    transformer_block_forward7(f, stream);
}

// Fills inp. which = 1: rows of equal values, below 1 so that the attention output is not lost when it is added; 2: one
// row 1000 times larger than the others; 0: random numbers.
static void fill_inp(float* inp, int N, int C, int which, uint32_t seed) {
    bench_fill_normal(inp, (size_t)N * C, seed, 1.0f, 0.0f);
    for (size_t i = 0; i < (size_t)N * C; i++) {
        size_t row = i / C;
        if (which == 1) { inp[i] = 0.25f * (float)(row % 7) - 0.75f; }
        if (which == 2 && row == (size_t)N / 2) { inp[i] *= 1000.0f; }
    }
}

static void declare(Bench& b) {
    b.varies("BTH");
    if (!b.dry) { cublaslt_open(); }
    int B = b.B, T = b.T, C = b.C, NH = b.NH, N = B * T;
    int which = b.cases({"normal", "equal values in each row", "a hot row"});
    size_t n = (size_t)N * C, channels = C, CC = channels * channels;
    cudaStream_t stream = b.stream;
    uint32_t seed = b.state.seed;
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [=](float* host) { fill_inp(host, N, C, which, seed); });
    // layernorms near the identity; products whose results have the size of their inputs
    float scale = 1.0f / sqrtf((float)C);
    Buffer<floatX> w[12] = {
        b.input<floatX>("ln1_weight", C, 0.2f, 1.0f),        b.input<floatX>("ln1_bias", C, 0.1f),
        b.input<floatX>("qkv_weight", 3 * CC, scale),        b.input<floatX>("qkv_bias", 3 * channels, 0.1f),
        b.input<floatX>("proj_weight", CC, scale),           b.input<floatX>("proj_bias", C, 0.1f),
        b.input<floatX>("ln2_weight", C, 0.2f, 1.0f),        b.input<floatX>("ln2_bias", C, 0.1f),
        b.input<floatX>("fc_weight", 4 * CC, scale),         b.input<floatX>("fc_bias", 4 * channels, 0.1f),
        b.input<floatX>("fcproj_weight", 4 * CC, scale / 2), b.input<floatX>("fcproj_bias", C, 0.1f)};
    // fp32: in rows of equal values, the rounding error of the mean is multiplied by an rstd of 316
    Tolerance tolerance = ulps<floatX>(sizeof(floatX) == 2 ? 3.0f : which == 1 ? 512.0f : 64.0f, 1.0f);
    Buffer<floatX> out = b.output<floatX>("out", n, tolerance);
    std::vector<size_t> sequences = b.sample(B, 24.0 * T * CC + 2.0 * T * T * C);
    b.reference([=] {
        const float* weights[12];
        for (int i = 0; i < 12; i++) { weights[i] = w[i].host; }
        std::vector<float> x = rows_of(inp.host, sequences, T * channels), y(x.size());
        transformer_block_cpu(y.data(), x.data(), weights, (int)sequences.size(), T, C, NH);
        put_rows(out.host, y, sequences, T * channels);
    });
    double tensor = (double)n * sizeof(floatX), weights = 12.0 * CC * sizeof(floatX);
    b.cost(2 * tensor + weights, 24.0 * N * CC + 2.0 * B * C * T * (double)T);
    b.matrix_rate(cublaslt_matrix_rate);

    TransformerBlock f = {out,
                          inp,
                          {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11]},
                          b.scratch<floatX>("norm", n),
                          b.scratch<floatX>("qkv", 3 * n),
                          b.scratch<floatX>("attention", n),
                          b.scratch<floatX>("projected", n),
                          b.scratch<floatX>("residual", n),
                          b.scratch<floatX>("hidden", 4 * n),
                          b.scratch<floatX>("gelu", 4 * n),
                          b.scratch<float>("mean", N),
                          b.scratch<float>("rstd", N),
                          b.scratch<float>("lse", (size_t)N * NH),
                          B,
                          T,
                          C,
                          NH};
    // b.moves: the number of launches, and the bytes read and written, counted in tensors of (B,T,C)
    bool is_16bit = sizeof(floatX) == 2, fast = !b.dry && transformer_block_has_sm90(C);
    b.kernel(1, "one launch per operation", [=](int) { transformer_block_forward1(f, stream); }, {0});
    b.moves(10, 38 * tensor + weights);
    b.kernel(2, "as in training: fused epilogues, residual with layernorm",
             [=](int) { transformer_block_forward2(f, stream); }, {0});
    b.moves(is_16bit ? 7 : 8, (is_16bit ? 31 : 35) * tensor + weights);
    auto graph = std::make_shared<TransformerBlockGraph>();
    b.kernel(3, "7 as a CUDA graph: shorter pauses between launches",
             [=](int) {
                 transformer_block_forward3(
                     *graph, [=](cudaStream_t s) { transformer_block_forward7(f, s); }, stream);
             },
             {0});
    b.moves(is_16bit ? 7 : 8, (is_16bit ? 27 : 35) * tensor + weights);
#if !defined(ENABLE_FP32)
    bool has_norm = C <= 2048; // the limit of fused_residual_layernorm_early
    if (has_norm) {
        b.kernel(
            4, "all products by gemm.cuh, programmatic dependent launch",
            [=](int digits) {
                digits ? transformer_block_forward(f, stream, digits) : transformer_block_forward(f, stream);
            },
            {0, 2222, 2220, 2121, 2122, 2111, 1111, 3333, 4444, 5555}, -90);
        b.config("forms", transformer_block_forms_name);
        b.moves(7, 26 * tensor + weights);
    }
    if (C == 64 * NH && C <= transformer_block_max_vecs * 256) {
        b.kernel(
            5, "one cooperative launch with grid barriers", [=](int) { transformer_block_forward5(f, stream); }, {0},
            -90);
        b.moves(1, 26 * tensor + weights);
    }
#endif
#if defined(ENABLE_BF16)
    bool takes_fp8 = C % 16 == 0 && has_norm;
    auto cache = b.dry || !takes_fp8 ? NULL : std::make_shared<TransformerBlockCache>(C);
    auto prepared = [=](cudaStream_t s) -> const TransformerBlockFp8& {
        if (!cache->prepared) { transformer_block_prepare_fp8(cache->q, f.w, C, s); }
        cache->prepared = true;
        return cache->q;
    };
    auto launch_fp8 = [=](bool gelu_epilogue, int proj_form, cudaStream_t s) {
        transformer_block_forward6(f, prepared(s), gelu_epilogue, proj_form, s);
    };
    std::vector<int> proj_forms = {0}; // forms of the projection
    if (b.dry || has_sm90a()) { proj_forms.push_back(GEMM_PING_PONG_192); }
    double weights_fp8 = 13.0 * CC; // bytes: two per weight of the projection, one per other weight
    bool has_products = takes_fp8 && (b.dry || transformer_block_has_fp8(f, cache->q, false));
    bool has_epilogue = takes_fp8 && (b.dry || transformer_block_has_fp8(f, cache->q, true));
    if (takes_fp8 && !has_products) {
        printf("skip kernel 6: the library has no products of e4m3 for this device and shape\n");
    }
    if (takes_fp8 && !has_epilogue) { printf("skip kernels 8, 9: the library has no GELU that stores e4m3 here\n"); }
    if (has_products) {
        b.kernel(
            6, "e4m3 products except the projection", [=](int form) { launch_fp8(false, form, stream); }, proj_forms,
            89);
        b.config("form of the projection", transformer_block_form_name);
        b.moves(8, 29 * tensor + weights_fp8);
        b.coarser(14);
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    }
#endif
    b.kernel(7, "2 without storing GELU's argument", [=](int) { transformer_block_forward7(f, stream); }, {0});
    b.moves(is_16bit ? 7 : 8, (is_16bit ? 27 : 35) * tensor + weights);
#if defined(ENABLE_BF16)
    if (has_epilogue) {
        auto fp8_graph = std::make_shared<TransformerBlockGraph>();
        b.kernel(
            8, "6 with GELU and e4m3 output in the epilogue", [=](int form) { launch_fp8(true, form, stream); },
            proj_forms, 89);
        b.config("form of the projection", transformer_block_form_name);
        b.moves(7, 21 * tensor + weights_fp8);
        b.coarser(14);
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
        b.kernel(
            9, "8 as a CUDA graph: pauses between shorter kernels",
            [=](int) {
                transformer_block_forward3(
                    *fp8_graph, [=](cudaStream_t s) { launch_fp8(true, proj_forms.back(), s); }, stream);
            },
            {0}, 89);
        b.moves(7, 21 * tensor + weights_fp8);
        b.coarser(14);
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    }
#endif
#if !defined(ENABLE_FP32)
    auto deferred = b.dry ? NULL : std::make_shared<TransformerBlockDeferredCache>(C);
    b.kernel(
        11, "layernorms applied in the products' epilogues",
        [=](int form) { transformer_block_forward11(f, deferred->get(f.w, C, stream), stream, form); }, {0, 1, 4}, -90);
    b.config("form of the last product", transformer_block_form_name);
    b.moves(7, 24 * tensor + weights);
    Buffer<float2> parts = b.scratch<float2>("parts", (size_t)N * ceil_div(C, (int)TransformerBlockTiles12::COLUMNS));
    b.kernel(
        12, "11 with the second statistics from the projection",
        [=](int form) { transformer_block_forward12(f, deferred->get(f.w, C, stream), parts, stream, form); },
        {0, 1, 4}, -90);
    b.config("form of the last product", transformer_block_form_name);
    b.moves(6, 23 * tensor + weights);
    auto deferred_graph = std::make_shared<TransformerBlockGraph>();
    b.kernel(
        13, "12 as a CUDA graph, which keeps the early launches",
        [=](int) {
            transformer_block_forward3(
                *deferred_graph,
                [=](cudaStream_t s) { transformer_block_forward12(f, deferred->get(f.w, C, s), parts, s, 0); }, stream);
        },
        {0}, -90);
    b.moves(6, 23 * tensor + weights);
    if (has_norm && attention_projection_heads(C, C / NH) > 0) { // > 0: the fused kernel supports the shape
        b.kernel(
            14, "4 with attention to second layernorm in one launch",
            [=](int digits) { transformer_block_forward14(f, transformer_block_forms(digits), stream); },
            {2021, 2022, 2020}, -90);
        b.config("forms", transformer_block_forms_name);
        b.moves(5, 23 * tensor + weights);
    }
#endif
#if defined(ENABLE_BF16)
    if (takes_fp8 && C == 64 * NH) {
        b.kernel(
            15, "all products in e4m3, by gemm.cuh",
            [=](int digits) {
                digits ? transformer_block_forward15(f, prepared(stream), stream, digits)
                       : transformer_block_forward15(f, prepared(stream), stream);
            },
            {0, 2222, 2111, 2211, 2122, 1111, 3333, 4444, 5555}, -90);
        b.config("forms", transformer_block_forms_name);
        b.moves(7, 19 * tensor + 12.0 * CC);
        b.coarser(14);
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
        auto graph15 = std::make_shared<TransformerBlockGraph>();
        b.kernel(
            16, "15 as a CUDA graph: early launches of the shortest kernels",
            [=](int) {
                transformer_block_forward3(
                    *graph15, [=](cudaStream_t s) { transformer_block_forward15(f, prepared(s), s); }, stream);
            },
            {0}, -90);
        b.moves(7, 19 * tensor + 12.0 * CC);
        b.coarser(14);
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    }
#endif
    b.best(fast ? 4 : 7);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "transformer_block", declare, {32, 512, 768, 12},
                      {{1, 1, 192, 3},
                       {1, 1, 768, 12},
                       {2, 17, 384, 6},
                       {3, 127, 384, 6},
                       {2, 128, 768, 12},
                       {1, 333, 768, 12},
                       {1, 200, 1600, 25},
                       {1, 513, 384, 6},
                       {1, 65, 136, 17},
                       {4, 100, 512, 4}});
}
