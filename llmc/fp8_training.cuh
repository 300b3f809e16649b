/*
Training with --fp8: which products have operands in fp8, and how the scale of each tensor follows its values. The passes
are in train_gpt2.cu, the formats in fp8.cuh; the kernels come from quantize.cuh, layernorm_quantize.cuh, matmul_fp8.cuh and, for
sums that stay in 16 bits, fused_residual_layernorm.cuh in dev/cuda.

    stage      products of qkv, fc and fcproj in each layer, and of the head            operands
    forward    out = inp weight^T of the layers                                         rows of inp, rows of weight
    +dx        dinp = dout weight of the layers                                         rows of dout, columns of weight
    +head      out and dinp of the head                                                 likewise
    +dw        dweight = dout^T inp of the layers and the head                          columns of dout, columns of inp

dout is in e5m2, which has the range, everything else in e4m3, which has the precision. Attention and its projection, the
residual stream, layernorm, softmax, sums and the optimizer are as without --fp8. So are validation, samples and
checkpoints: the fp8 copies of the weights are made anew at the beginning of each step.

Scales are delayed: a tensor is written with a scale that was made before its values were known, from `largest`, the largest
absolute value of the earlier steps. The scale is a power of two, so scaling is exact. It puts `largest` at 64 to 128 of 448 in
e4m3 and at 8192 to 16384 of 57344 in e5m2, which is 1/7 to 2/7 of the format's largest number. So values may grow 3.5-fold
from one step to the next before some saturate. Unless a step's largest value is larger, `largest` is halved in each step. After
outliers it falls faster: to four times the largest value of the step, if that is less. NaN and infinity are ignored. There are
no earlier steps at the beginning, so passes over the first micro-batch, without an update,
measure the values. `largest` is saved with a checkpoint: a resumed run has the same bits. With several GPUs all have the
maximum of their values, and thus the same scales.

Source: Micikevicius et al. 2022, arXiv:2209.05433; delayed scaling as in NVIDIA's Transformer Engine.
*/
#pragma once

#include "cuda_common.cuh"
#include "distributed.cuh"
#include "flags.h"
#include "fp8.cuh"
#include "gpt2.h"
#include "memory_plan.cuh"
#include "ptx.cuh"
#include "run_state.h"
#include "utils.h"
#include <algorithm>

typedef __nv_fp8_e4m3 E4M3;
typedef __nv_fp8_e5m2 E5M2;
constexpr bool HAS_FP8 = sizeof(floatX) == 2; // FP32 builds have no kernels for fp8, and refuse --fp8

// ---- operations -----------------------------------------------------------------------------
// `to` is a quantized tensor (N,C), written as rows, and as columns unless these are NULL. unquantized (N,C), which may be NULL,
// receives the same values in floatX. N and C are multiples of 16.

// to = inp (N,C)
void quantize(const Fp8Tensor<E4M3>& to, const floatX* inp, int N, int C, const Execution& exec);
void quantize(const Fp8Tensor<E5M2>& to, const floatX* inp, int N, int C, const Execution& exec);
// to = gelu(inp)
void quantize_gelu(const Fp8Tensor<E4M3>& to, floatX* unquantized, const floatX* inp, int N, int C,
                   const Execution& exec);
// to = dout times GELU's slope at inp; unquantized may be dout
void quantize_gelu_backward(const Fp8Tensor<E5M2>& to, floatX* unquantized, const floatX* dout, const floatX* inp,
                            int N, int C, const Execution& exec);
// to (N,Vp) = (softmax(logits) - onehot(target)) * dloss, with columns | losses (N) and the logits from which they were made
void quantize_dlogits(const Fp8Tensor<E5M2>& to, const floatX* logits, const float* losses, const int* targets,
                      const float* dloss, int N, int V, int Vp, const Execution& exec);
// to = the layernorm of residual (N,C) = inp + inp2; residual and inp2 may be NULL: that of inp. mean, rstd (N); C <= 1792
void layernorm_quantize(const Fp8Tensor<E4M3>& to, floatX* unquantized, floatX* residual, float* mean, float* rstd,
                        const floatX* inp, const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                        float epsilon, const Execution& exec);

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC), which may be NULL
void matmul_fp8_forward(floatX* out, const Fp8Matrix<E4M3>& inp, const Fp8Matrix<E4M3>& weight, const floatX* bias,
                        int N, int C, int OC, const Execution& exec);
// to (N,OC) = gelu(that), with columns; slope (N,OC) = GELU's slope there
void matmul_fp8_gelu(const Fp8Tensor<E4M3>& to, floatX* slope, const Fp8Matrix<E4M3>& inp,
                     const Fp8Matrix<E4M3>& weight, const floatX* bias, int N, int C, int OC, const Execution& exec);
// dinp (N,C) = dout (N,OC) weight (OC,C), of which `weight` has the columns (C,OC)
void matmul_fp8_backward_input(floatX* dinp, const Fp8Matrix<E5M2>& dout, const Fp8Matrix<E4M3>& weight, int N, int C,
                               int OC, const Execution& exec);
// to (N,C) = that times slope (N,C), with columns; dinp_sums (C) += its column sums
void matmul_fp8_gelu_backward(const Fp8Tensor<E5M2>& to, float* dinp_sums, float* scratch, const Fp8Matrix<E5M2>& dout,
                              const Fp8Matrix<E4M3>& weight, const floatX* slope, int N, int C, int OC,
                              const Execution& exec);
size_t matmul_fp8_gelu_backward_scratch(int N, int C); // floats
// dweight (OC,C) = dout^T inp, or += if accumulate | columns of dout (OC,N) and inp (C,N)
void matmul_fp8_backward_weight(float* dweight, const Fp8Matrix<E5M2>& dout, const Fp8Matrix<E4M3>& inp, int N, int C,
                                int OC, bool accumulate, const Execution& exec);

// dbias (OC) += the column sums of dout (N,OC)
void matmul_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC, const Execution& exec);
size_t matmul_backward_bias_scratch(int N, int OC); // floats

inline size_t fp8_backward_scratch(int N, int F) {
    return std::max(matmul_fp8_gelu_backward_scratch(N, F), matmul_backward_bias_scratch(N, F));
}

// ---- scales ---------------------------------------------------------------------------------

// The quantised tensors of a layer, and after those of all layers the head's.
enum Fp8Name {
    FP8_LN1,
    FP8_LN2,
    FP8_GELU,
    FP8_DQKV,
    FP8_DFCH,
    FP8_DFCPROJ,
    FP8_QKVW,
    FP8_FCW,
    FP8_FCPROJW,
    FP8_PER_LAYER
};
enum Fp8HeadName { FP8_LNF, FP8_DLOGITS, FP8_WTE, FP8_OF_HEAD };

struct alignas(16) Fp8Scale {
    float inverse, scale; // what a stored 1 stands for, and 1 / inverse
};

// In device memory, for all num tensors: tensor i of layer l has number l * FP8_PER_LAYER + i.
struct Fp8Scales {
    int num;
    Fp8Scale* scales; // (num)
    float* amax;      // (num): the largest absolute values of this step so far
    float* largest;   // (num): those of the steps before, decayed
    float* no_amax;   // (1): for a tensor that is computed again
};

inline int fp8_num_tensors(const GPT2Config* config) { return config->num_layers * FP8_PER_LAYER + FP8_OF_HEAD; }

// Ends the program if this program, GPU, model or batch of BT tokens cannot use fp8, with the reason.
inline void check_fp8(const GPT2Config* config, int BT, int stage) {
    if (stage == FP8_OFF) { return; }
    int C = config->channels;
    if (strcmp(PRECISION_NAME, "bf16") != 0) {
        die("--fp8 goes with bf16, this program is built for %s: make PRECISION=BF16 train_gpt2cu", PRECISION_NAME);
    }
    if (!has_sm90a()) {
        die("--fp8 needs an H100 or H200, and a program with code for sm_90a; this GPU trains without --fp8");
    }
    if (C % 16 != 0 || C > 1792) { die("%d channels: --fp8 wants a multiple of 16 up to 1792", C); }
    if (config->mlp_channels % 16 != 0) {
        die("%d channels in the MLP: --fp8 wants a multiple of 16", config->mlp_channels);
    }
    if (fp8_num_tensors(config) > RUN_MAX_FP8) { die("%d layers: --fp8 goes with fewer", config->num_layers); }
    if (BT % 16 != 0) { die("%d tokens in a micro-batch: --fp8 wants a multiple of 16, see -b and -t", BT); }
}

// Whether tensor i is a gradient of activations, in e5m2.
__host__ __device__ inline bool fp8_is_e5m2(int i, int num) {
    int in_head = i - (num - FP8_OF_HEAD), in_layer = i % FP8_PER_LAYER;
    return in_head >= 0 ? in_head == FP8_DLOGITS : in_layer >= FP8_DQKV && in_layer <= FP8_DFCPROJ;
}

// The scale of a tensor whose largest absolute value was `largest`. 0: nothing is known yet.
__host__ __device__ inline Fp8Scale fp8_scale(float largest, bool is_e5m2, float dloss) {
    // a gradient that is not known yet is taken for one as large as the losses' derivatives
    if (largest == 0.0f) { largest = is_e5m2 ? dloss : 1.0f; }
    int exponent = (is_e5m2 ? 13 : 6) - ilogbf(largest); // 57344 = 1.75 * 2^15, 448 = 1.75 * 2^8
    exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
    return {ldexpf(1.0f, -exponent), ldexpf(1.0f, exponent)};
}

// The scales from `largest`, as it is (update = false) or after it has taken in amax, which becomes 0. *saturated = the
// number of tensors with values beyond the format's largest number. The gradients of the logits are bounded by dloss.
__global__ void fp8_scales_kernel(Fp8Scales s, bool update, float* saturated, const float* dloss) {
    int count = 0;
    for (int i = threadIdx.x; i < s.num; i += blockDim.x) {
        bool is_e5m2 = fp8_is_e5m2(i, s.num);
        float amax = s.amax[i], largest = s.largest[i];
        if (update && isfinite(amax)) { count += amax * s.scales[i].scale > (is_e5m2 ? 57344.0f : 448.0f); }
        if (update && isfinite(amax) && amax > 0.0f) { largest = fmaxf(amax, fminf(largest / 2, 4 * amax)); }
        if (i == s.num - FP8_OF_HEAD + FP8_DLOGITS) { largest = *dloss; }
        s.scales[i] = fp8_scale(largest, is_e5m2, *dloss);
        s.largest[i] = largest, s.amax[i] = 0.0f;
    }
    __shared__ float shared[32];
    float sum = block_sum((float)count, shared);
    if (threadIdx.x == 0) { *saturated = sum; }
}

// All ranks must call it, with update.
inline void fp8_set_scales(const Fp8Scales& s, bool update, float* saturated, const float* dloss,
                           const Execution& exec) {
    if (update) { maximum_of_ranks(s.amax, s.num, exec); }
    fp8_scales_kernel<<<1, 256, 0, exec.stream>>>(s, update, saturated, dloss);
    cudaCheck(cudaGetLastError());
}

// ---- memory ---------------------------------------------------------------------------------

// A tensor (N,C): rows (N,C) and columns (C,N), of which the stages use what they need.
template <class F> struct Fp8Copies {
    F *rows, *columns;
    Fp8Scale* scale;
    float* amax;

    Fp8Tensor<F> to_rows() const { return {rows, NULL, false, &scale->scale, amax}; } // to be written
    Fp8Tensor<F> to_both(bool in_order = false) const { return {rows, columns, in_order, &scale->scale, amax}; }
    Fp8Matrix<F> as_rows() const { return {rows, &scale->inverse}; } // to be read
    Fp8Matrix<F> as_columns() const { return {columns, &scale->inverse}; }
};

// All that --fp8 keeps. Rows are needed at once only, so all layers share them. Columns of activations are for dW: each layer has
// its own, unless -r makes the backward pass compute them again. Gradients are in the memory of the logits.
struct Fp8Memory {
    int stage;                   // Fp8Stage
    bool begun;                  // the scales are there
    size_t keep_norm, keep_gelu; // 1: each layer has its own columns, 0: all share one
    Fp8Scales scales;
    E4M3* weights;      // (L, fp8_weights()): rows and columns of qkvw, fcw, fcprojw
    E4M3* wte;          // rows (Vp,C), columns (C,Vp); from +head on
    E4M3* norm_rows;    // (B*T, C): the output of a layernorm
    E4M3* gelu_rows;    // (B*T, max(F, 2*C)); also for rows and columns of the last layernorm's output
    E4M3* ln1_columns;  // (L, C, B*T) with +dw
    E4M3* ln2_columns;  // (L, C, B*T) with +dw
    E4M3* gelu_columns; // (L, F, B*T) with +dw
    E5M2* gradients;    // (fp8_gradients()), behind dfch and dqkv in the memory of the logits
};

// The head takes so many of BT tokens at once: a quarter.
inline int fp8_head_tokens(int BT) { return ceil_div(BT, 64) * 16; }

// Values of a layer's weights, as rows and columns: qkvw (3*C,C), fcw (F,C), fcprojw (C,F).
inline size_t fp8_weights(const GPT2Config* config) {
    size_t C = config->channels, F = config->mlp_channels;
    return 2 * (3 * C * C + 2 * F * C);
}
// Values of the gradients dfch, dqkv, dfcproj of BT tokens, as rows and columns.
inline size_t fp8_gradients(int BT, const GPT2Config* config) {
    return 2 * (size_t)BT * (config->mlp_channels + 4 * config->channels);
}

// Values of floatX that the logits' memory must have: dfch and dqkv, and the gradients in fp8; or the head's logits, and their
// gradients as rows and columns.
inline size_t fp8_logits(int BT, const GPT2Config* config) {
    size_t layer = (size_t)BT * (config->mlp_channels + 3 * config->channels) + fp8_gradients(BT, config) / 2;
    return std::max(layer, (size_t)fp8_head_tokens(BT) * 2 * config->padded_vocab_size);
}

inline void plan_fp8(Plan* parameters, Plan* activations, Fp8Memory* m, const GPT2Config* config, int BT, int stage,
                     int recompute) {
    size_t L = config->num_layers, C = config->channels, F = config->mlp_channels, num = fp8_num_tensors(config);
    *m = {};
    m->stage = stage;
    if (stage == FP8_OFF) { return; }
    m->scales.num = (int)num;
    m->keep_norm = recompute < 2, m->keep_gelu = recompute < 1;
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.scales, num);
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.amax, num);
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.largest, num);
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.no_amax, 1);
    plan_add(parameters, PLAN_WEIGHTS, &m->weights, L * fp8_weights(config));
    if (stage >= FP8_HEAD) { plan_add(parameters, PLAN_WEIGHTS, &m->wte, 2 * C * config->padded_vocab_size); }
    plan_add(activations, PLAN_ACTIVATIONS, &m->norm_rows, BT * C);
    plan_add(activations, PLAN_ACTIVATIONS, &m->gelu_rows, BT * std::max(F, 2 * C));
    if (stage < FP8_DW) { return; }
    plan_add(activations, PLAN_ACTIVATIONS, &m->ln1_columns, (m->keep_norm ? L : 1) * BT * C);
    plan_add(activations, PLAN_ACTIVATIONS, &m->ln2_columns, (m->keep_norm ? L : 1) * BT * C);
    plan_add(activations, PLAN_ACTIVATIONS, &m->gelu_columns, (m->keep_gelu ? L : 1) * BT * F);
}

// The tensors of a layer. Without --fp8 all is 0.
struct Fp8Layer {
    int stage;                 // Fp8Stage
    bool new_weights;          // they have to be quantized
    bool keep_norm, keep_gelu; // the forward pass keeps columns of ln1 and ln2, and of gelu
    float* no_amax;
    Fp8Copies<E4M3> ln1, ln2, gelu, qkvw, fcw, fcprojw;
    Fp8Copies<E5M2> dqkv, dfch, dfcproj; // gradients of the outputs of qkv, fc and fcproj

    Fp8Tensor<E5M2> gradient(const Fp8Copies<E5M2>& copies) const { // to be written
        return stage == FP8_DW ? copies.to_both() : copies.to_rows();
    }
    // Returns the target for a tensor that the forward pass has already written: the scale is the same, and its largest value is not
    // measured again.
    Fp8Tensor<E4M3> again(const Fp8Copies<E4M3>& copies) const {
        Fp8Tensor<E4M3> to = copies.to_both();
        to.amax = no_amax;
        return to;
    }
};
// The tensors of the head, of fp8_head_tokens(BT) tokens at a time.
struct Fp8Head {
    Fp8Copies<E4M3> lnf, wte;
    Fp8Copies<E5M2> dlogits;
};

template <class F> Fp8Copies<F> fp8_copies(const Fp8Memory& m, int number, F* rows, F* columns) {
    const Fp8Scales& s = m.scales;
    return {rows, columns, s.scales + number, s.amax + number};
}

inline Fp8Layer fp8_layer(const Fp8Memory& m, const GPT2Config* config, int BT, int l, bool new_weights) {
    size_t C = config->channels, F = config->mlp_channels, BTC = BT * C, BTF = BT * F;
    int first = l * FP8_PER_LAYER;
    E4M3 *w = m.weights + l * fp8_weights(config), *fcw = w + 6 * C * C, *fcprojw = fcw + 2 * F * C;
    E5M2 *dfch = m.gradients, *dqkv = dfch + 2 * BTF, *dfcproj = dqkv + 6 * BTC;
    Fp8Layer a = {m.stage, new_weights, m.keep_norm > 0, m.keep_gelu > 0, m.scales.no_amax};
    a.ln1 = fp8_copies(m, first + FP8_LN1, m.norm_rows, m.ln1_columns + m.keep_norm * l * BTC);
    a.ln2 = fp8_copies(m, first + FP8_LN2, m.norm_rows, m.ln2_columns + m.keep_norm * l * BTC);
    a.gelu = fp8_copies(m, first + FP8_GELU, m.gelu_rows, m.gelu_columns + m.keep_gelu * l * BTF);
    a.qkvw = fp8_copies(m, first + FP8_QKVW, w, w + 3 * C * C);
    a.fcw = fp8_copies(m, first + FP8_FCW, fcw, fcw + F * C);
    a.fcprojw = fp8_copies(m, first + FP8_FCPROJW, fcprojw, fcprojw + F * C);
    a.dfch = fp8_copies(m, first + FP8_DFCH, dfch, dfch + BTF);
    a.dqkv = fp8_copies(m, first + FP8_DQKV, dqkv, dqkv + 3 * BTC);
    a.dfcproj = fp8_copies(m, first + FP8_DFCPROJ, dfcproj, dfcproj + BTC);
    return a;
}

// logits: the memory of the logits. The gradients lie in it behind the logits of these tokens.
inline Fp8Head fp8_head(const Fp8Memory& m, const GPT2Config* config, int BT, floatX* logits) {
    size_t most = fp8_head_tokens(BT), C = config->channels, Vp = config->padded_vocab_size;
    int number = m.scales.num - FP8_OF_HEAD;
    E5M2* dlogits = (E5M2*)(logits + most * Vp);
    return {fp8_copies(m, number + FP8_LNF, m.gelu_rows, m.gelu_rows + most * C),
            fp8_copies(m, number + FP8_WTE, m.wte, m.wte + Vp * C),
            fp8_copies(m, number + FP8_DLOGITS, dlogits, dlogits + most * Vp)};
}
