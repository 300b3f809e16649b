/*
GPT-2 on the CPU, in fp32: trains from raw tokens, evaluates, saves, resumes, samples. Read this file first;
train_gpt2.cu is the same program for the GPU.

    1. layers            encoder, layernorm, matmul, attention, gelu, residual, classifier: forward and backward
    2. the model         parameters, activations, forward, backward, AdamW, Muon
    3. generation        key/value cache, prefill, one token at a time
    4. training          validation, one step, the loop
    5. other tasks       continue a text, evaluate, time
    6. command line      main

Shapes: B batch, T time, C channels, F channels of the MLP's hidden layer, V vocabulary, Vp V padded to a multiple of
128, NH heads, HS head size, L layers, OC output channels. Every tensor is row-major; the gradient of x is called dx.
Unless its comment says otherwise, a backward function overwrites the gradients of activations and adds to the gradients
of parameters.

Matmul and attention have two versions: plain loops, which show what is computed (--naive runs them), and a fast version
that calls llmc/matmul.h. Every operation is threaded with OpenMP and gives the same bits for any number of threads.

Sources: Radford et al. 2019, "Language models are unsupervised multitask learners"; the structure of the program
follows karpathy/llm.c.
*/
#include "llmc/checkpoint.h"   // defines: advise_huge, params_check
#include "llmc/dataloader.h"   // defines: Batch, dataloader_next, dataloader_reset
#include "llmc/eval_loader.h"  // defines: EvalLoader, eval_close
#include "llmc/evaluation.h"   // defines: Evaluator, evaluate_files, evaluate_hellaswag, Bench, bench_begin
#include "llmc/export.h"       // defines: export_model
#include "llmc/flags.h"        // defines: args, parse_flags, print_flags, chosen_task, uses_muon, run_demo
#include "llmc/gpt2.h"         // defines: GPT2Config, gpt2_params, num_parameters, param_size, param_offset
#include "llmc/logger.h"       // defines: logger_eval
#include "llmc/matmul.h"       // defines: matmul_nn, matmul_nt, matmul_tn
#include "llmc/model_source.h" // defines: ModelSource, resolve_model_path, model_source_open, model_source_read
#include "llmc/prompts.h"      // defines: Prompts, prompts_read, Continuations, continuations_begin, flags_sampler
#include "llmc/run.h"          // defines: Training, StepReport, Due, settle_batch, training_begin, training_due, ...
#include "llmc/run_state.h"    // defines: RunState
#include "llmc/sampler.h"      // defines: Sampler, sample_token, sampler_argmax, sampler_penalize, seen_add
#include "llmc/schedulers.h"   // defines: lr_at
#include "llmc/status.h"       // defines: output_begin, output_release
#include "llmc/stop.h"         // defines: run_stop_signal, run_will_save, run_install_signal_handlers
#include "llmc/text_output.h"  // defines: TextOutput, text_token
#include "llmc/tokenizer.h"    // defines: Tokenizer, tokenizer_free
#include "llmc/utils.h"        // defines: Error, die, require, malloc_check, time_ms
#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// Functions marked VECTOR are compiled for AVX-512, for AVX2 and for plain x86-64; the loader picks one at start.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTOR
#endif
#define INLINE __attribute__((always_inline)) static inline // part of the VECTOR functions that call it

// ================================================================================================
// 1. layers
// ================================================================================================

// ---- encoder: token embedding + position embedding ------------------------------------------

// out (B,T,C) | inp (B,T) token ids | wte (Vp,C) | wpe (maxT,C)
static void encoder_forward(float* out, const int* inp, const float* wte, const float* wpe, int B, int T, int C) {
#pragma omp parallel for
    for (long bt = 0; bt < (long)B * T; bt++) {
        const float* token = wte + (size_t)inp[bt] * C;
        const float* position = wpe + (size_t)(bt % T) * C;
        for (int c = 0; c < C; c++) { out[(size_t)bt * C + c] = token[c] + position[c]; }
    }
}

// dwte (Vp,C), dwpe (maxT,C) += | dout (B,T,C) | inp (B,T)
static void encoder_backward(float* dwte, float* dwpe, const float* dout, const int* inp, int B, int T, int C) {
    // a token can occur at several positions; each thread takes some channels of all positions, so no two threads add
    // to the same value
    const int width = 64;
#pragma omp parallel for
    for (int c0 = 0; c0 < C; c0 += width) {
        int c1 = c0 + width < C ? c0 + width : C;
        for (size_t bt = 0; bt < (size_t)B * T; bt++) {
            float* dtoken = dwte + (size_t)inp[bt] * C;
            float* dposition = dwpe + (bt % T) * C;
            const float* d = dout + bt * C;
            for (int c = c0; c < c1; c++) {
                dtoken[c] += d[c];
                dposition[c] += d[c];
            }
        }
    }
}

// ---- layernorm: out = (inp - mean) * rstd * weight + bias, with mean and rstd of each row -------
// Source: Ba et al. 2016, arXiv:1607.06450

VECTOR static void layernorm_row(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                 const float* bias, int C, float epsilon) {
    float sum = 0.0f, square = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) { sum += inp[c]; }
    float m = sum / C;
#pragma omp simd reduction(+ : square)
    for (int c = 0; c < C; c++) { square += (inp[c] - m) * (inp[c] - m); }
    float s = 1.0f / sqrtf(square / C + epsilon);
    for (int c = 0; c < C; c++) { out[c] = (inp[c] - m) * s * weight[c] + bias[c]; }
    *mean = m;
    *rstd = s;
}

// out (N,C), mean (N), rstd (N) | inp (N,C) | weight, bias (C); N rows, B*T of them in training
static void layernorm_forward(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                              const float* bias, int N, int C, float epsilon) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        layernorm_row(out + (size_t)n * C, &mean[n], &rstd[n], inp + (size_t)n * C, weight, bias, C, epsilon);
    }
}

// dinp += rstd * (dnorm - mean(dnorm) - norm * mean(dnorm * norm))
// with norm = (inp - mean) * rstd and dnorm = dout * weight
VECTOR static void layernorm_row_backward(float* dinp, const float* dout, const float* inp, const float* weight,
                                          float mean, float rstd, int C) {
    float sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
    for (int c = 0; c < C; c++) {
        float dnorm = dout[c] * weight[c];
        sum += dnorm;
        dot += dnorm * (inp[c] - mean) * rstd;
    }
    sum /= C;
    dot /= C;
    for (int c = 0; c < C; c++) { dinp[c] += rstd * (dout[c] * weight[c] - sum - (inp[c] - mean) * rstd * dot); }
}

VECTOR static void layernorm_columns_backward(float* dweight, float* dbias, const float* dout, const float* inp,
                                              const float* mean, const float* rstd, int N, int C, int c0, int c1) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (int c = c0; c < c1; c++) {
            dweight[c] += dout[n * C + c] * (inp[n * C + c] - mean[n]) * rstd[n];
            dbias[c] += dout[n * C + c];
        }
    }
}

// dinp (N,C) += | dweight, dbias (C) += | dout (N,C) | inp (N,C) | weight (C) | mean, rstd (N)
static void layernorm_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                               const float* weight, const float* mean, const float* rstd, int N, int C) {
#pragma omp parallel
    {
#pragma omp for nowait
        for (long n = 0; n < N; n++) {
            layernorm_row_backward(dinp + (size_t)n * C, dout + (size_t)n * C, inp + (size_t)n * C, weight, mean[n],
                                   rstd[n], C);
        }
#pragma omp for
        for (int c0 = 0; c0 < C; c0 += 64) {
            layernorm_columns_backward(dweight, dbias, dout, inp, mean, rstd, N, C, c0, c0 + 64 < C ? c0 + 64 : C);
        }
    }
}

// ---- matmul: out = inp weight^T + bias -----------------------------------------------------------

static void matmul_forward_naive(float* out, size_t ldo, const float* inp, const float* weight, const float* bias,
                                 int N, int C, int OC) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            float sum = bias ? bias[o] : 0.0f;
            for (int c = 0; c < C; c++) { sum += inp[(size_t)n * C + c] * weight[(size_t)o * C + c]; }
            out[(size_t)n * ldo + o] = sum;
        }
    }
}

// out (N,OC), whose rows are ldo floats apart | inp (N,C) | weight (OC,C) | bias (OC) or NULL
static void matmul_forward(float* out, size_t ldo, const float* inp, const float* weight, const float* bias, int N,
                           int C, int OC) {
    if (args->naive) {
        matmul_forward_naive(out, ldo, inp, weight, bias, N, C, OC);
    } else {
        matmul_nt(out, ldo, inp, C, weight, C, bias, N, OC, C, false);
    }
}

static void matmul_backward_naive(float* dinp, float* dweight, const float* dout, size_t ldo, const float* inp,
                                  const float* weight, int N, int C, int OC, bool accumulate) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) {
            float sum = 0.0f;
            for (int o = 0; o < OC; o++) { sum += dout[(size_t)n * ldo + o] * weight[(size_t)o * C + c]; }
            dinp[(size_t)n * C + c] = sum;
        }
    }
#pragma omp parallel for
    for (long o = 0; o < OC; o++) {
        for (int c = 0; c < C; c++) {
            float sum = accumulate ? dweight[(size_t)o * C + c] : 0.0f;
            for (int n = 0; n < N; n++) { sum += dout[(size_t)n * ldo + o] * inp[(size_t)n * C + c]; }
            dweight[(size_t)o * C + c] = sum;
        }
    }
}

VECTOR static void add_columns(float* dbias, const float* dout, size_t ldo, int N, int o0, int o1) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (int o = o0; o < o1; o++) { dbias[o] += dout[n * ldo + o]; }
    }
}

// dinp (N,C) | dweight (OC,C): += if `accumulate` is true, else overwritten | dbias (OC) +=, or NULL
// dout (N,OC), whose rows are ldo floats apart | inp (N,C) | weight (OC,C)
static void matmul_backward(float* dinp, float* dweight, float* dbias, const float* dout, size_t ldo, const float* inp,
                            const float* weight, int N, int C, int OC, bool accumulate) {
    if (args->naive) {
        matmul_backward_naive(dinp, dweight, dout, ldo, inp, weight, N, C, OC, accumulate);
    } else {
        matmul_nn(dinp, C, dout, ldo, weight, C, N, C, OC, false);
        matmul_tn(dweight, C, dout, ldo, inp, C, OC, C, N, accumulate);
    }
    if (dbias) {
#pragma omp parallel for
        for (int o0 = 0; o0 < OC; o0 += 64) { add_columns(dbias, dout, ldo, N, o0, o0 + 64 < OC ? o0 + 64 : OC); }
    }
}

// ---- exp, in a form that compilers vectorise -----------------------------------------------------

// e^x within 2 ulp; 0 for x < -87, a large finite number for x > 88, NaN for NaN. With x = n ln2 + r, |r| <= ln2 / 2,
// the result is 2^n e^r, where e^r is computed by its Taylor series up to r^7. ln2 is split into two constants, so that
// r stays accurate (Cody and Waite 1980).
INLINE float fast_exp(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 rounds to an integer n, in the low bits
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 23) + 0x3F800000u; // n in the exponent of a float: the bits of 2^n
    float power;
    memcpy(&power, &bits, sizeof(power));
    float result = p * power;
    result = x < -87.0f ? 0.0f : result;
    return x != x ? x : result;
}

// ---- attention: causal, softmax(scale Q K^T) V for each head; scale: 1 / sqrt(HS) in GPT-2 -----------

// plain loops, one query at a time
static void attention_forward_naive(float* out, float* lse, const float* qkv, int B, int T, int C, int NH,
                                    float scale) {
    int HS = C / NH;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++) {
        for (int h = 0; h < NH; h++) {
            float* att = (float*)malloc_check((size_t)T * sizeof(float));
            const float* base = qkv + (size_t)b * T * 3 * C + (size_t)h * HS;
            for (int t = 0; t < T; t++) {
                const float* q = base + (size_t)t * 3 * C;
                float max = -INFINITY, sum = 0.0f;
                for (int t2 = 0; t2 <= t; t2++) {
                    const float* k = base + (size_t)t2 * 3 * C + C;
                    float dot = 0.0f;
                    for (int i = 0; i < HS; i++) { dot += q[i] * k[i]; }
                    att[t2] = dot * scale;
                    max = fmaxf(max, att[t2]);
                }
                for (int t2 = 0; t2 <= t; t2++) { sum += att[t2] = expf(att[t2] - max); }
                lse[((size_t)b * NH + h) * T + t] = max + logf(sum);
                float* o = out + ((size_t)b * T + t) * C + (size_t)h * HS;
                for (int i = 0; i < HS; i++) { o[i] = 0.0f; }
                for (int t2 = 0; t2 <= t; t2++) {
                    const float* v = base + (size_t)t2 * 3 * C + 2 * C;
                    for (int i = 0; i < HS; i++) { o[i] += att[t2] / sum * v[i]; }
                }
            }
            free(att);
        }
    }
}

static void attention_backward_naive(float* dqkv, const float* dout, const float* qkv, const float* out,
                                     const float* lse, int B, int T, int C, int NH, float scale) {
    int HS = C / NH;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++) {
        for (int h = 0; h < NH; h++) {
            const float* base = qkv + (size_t)b * T * 3 * C + (size_t)h * HS;
            float* dbase = dqkv + (size_t)b * T * 3 * C + (size_t)h * HS;
            for (int t = 0; t < T; t++) {
                for (int j = 0; j < 3; j++) { memset(dbase + ((size_t)t * 3 + j) * C, 0, (size_t)HS * sizeof(float)); }
            }
            for (int t = 0; t < T; t++) {
                const float *q = base + (size_t)t * 3 * C, *o = out + ((size_t)b * T + t) * C + (size_t)h * HS;
                const float* d = dout + ((size_t)b * T + t) * C + (size_t)h * HS;
                float* dq = dbase + (size_t)t * 3 * C;
                // the backward pass of softmax needs the sum of p * dp over t2, which equals the dot product d . o
                float delta = 0.0f;
                for (int i = 0; i < HS; i++) { delta += d[i] * o[i]; }
                for (int t2 = 0; t2 <= t; t2++) {
                    const float *k = base + (size_t)t2 * 3 * C + C, *v = k + C;
                    float *dk = dbase + (size_t)t2 * 3 * C + C, *dv = dk + C;
                    float s = 0.0f, dp = 0.0f;
                    for (int i = 0; i < HS; i++) {
                        s += q[i] * k[i];
                        dp += d[i] * v[i];
                    }
                    float p = expf(s * scale - lse[((size_t)b * NH + h) * T + t]);
                    float ds = p * (dp - delta) * scale;
                    for (int i = 0; i < HS; i++) {
                        dq[i] += ds * k[i];
                        dk[i] += ds * q[i];
                        dv[i] += p * d[i];
                    }
                }
            }
        }
    }
}

// Overwrites att[0..n) with softmax(att * scale) and att[n..width) with 0. Returns the log of the sum of exponentials.
VECTOR static float attention_softmax_row(float* att, float scale, int n, int width) {
    float max = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : max)
    for (int i = 0; i < n; i++) { max = att[i] > max ? att[i] : max; }
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        float e = fast_exp((att[i] - max) * scale);
        att[i] = e;
        sum += e;
    }
    float inverse = 1.0f / sum;
    for (int i = 0; i < n; i++) { att[i] *= inverse; }
    for (int i = n; i < width; i++) { att[i] = 0.0f; }
    return max * scale + logf(sum);
}

// Overwrites the scores p (n) with the probabilities, and dp (n), the gradients of the probabilities, with the
// gradients of the scores. Sets both arrays to 0 from n to width.
VECTOR static void attention_softmax_row_backward(float* p, float* dp, float scale, float lse, float delta, int n,
                                                  int width) {
    for (int i = 0; i < n; i++) {
        float e = fast_exp(p[i] * scale - lse);
        p[i] = e;
        dp[i] = e * (dp[i] - delta) * scale;
    }
    for (int i = n; i < width; i++) { p[i] = dp[i] = 0.0f; }
}

enum { ATTENTION_ROWS = 64 }; // queries per tile; a thread holds the scores of one tile, (64, T) floats

// out (B,T,C), lse (B,NH,T): log of the sum of the exponentials of the scaled scores | qkv (B,T,3,NH,HS)
static void attention_forward(float* out, float* lse, const float* qkv, int B, int T, int C, int NH, float scale) {
    if (args->naive) {
        attention_forward_naive(out, lse, qkv, B, T, C, NH, scale);
        return;
    }
    int HS = C / NH, num_tiles = (T + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    size_t ld = 3 * (size_t)C;
#pragma omp parallel
    {
        float* att = (float*)malloc_check((size_t)ATTENTION_ROWS * T * sizeof(float));
#pragma omp for schedule(dynamic)
        for (int work = 0; work < B * NH * num_tiles; work++) {
            int b = work / (NH * num_tiles), h = work / num_tiles % NH, t0 = work % num_tiles * ATTENTION_ROWS;
            int rows = T - t0 < ATTENTION_ROWS ? T - t0 : ATTENTION_ROWS, width = t0 + rows;
            const float* q = qkv + (size_t)b * T * ld + (size_t)h * HS;
            const float *k = q + C, *v = k + C;
            matmul_nt(att, width, q + t0 * ld, ld, k, ld, NULL, rows, width, HS, false);
            for (int i = 0; i < rows; i++) {
                lse[((size_t)b * NH + h) * T + t0 + i] =
                    attention_softmax_row(att + (size_t)i * width, scale, t0 + i + 1, width);
            }
            matmul_nn(out + ((size_t)b * T + t0) * C + (size_t)h * HS, C, att, width, v, ld, rows, HS, width, false);
        }
        free(att);
    }
}

// dqkv (B,T,3,NH,HS) | dout (B,T,C) | qkv (B,T,3,NH,HS) | out (B,T,C) | lse (B,NH,T)
static void attention_backward(float* dqkv, const float* dout, const float* qkv, const float* out, const float* lse,
                               int B, int T, int C, int NH, float scale) {
    if (args->naive) {
        attention_backward_naive(dqkv, dout, qkv, out, lse, B, T, C, NH, scale);
        return;
    }
    int HS = C / NH, num_tiles = (T + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    size_t ld = 3 * (size_t)C;
#pragma omp parallel
    {
        float* p = (float*)malloc_check((size_t)ATTENTION_ROWS * T * sizeof(float));
        float* dp = (float*)malloc_check((size_t)ATTENTION_ROWS * T * sizeof(float));
#pragma omp for schedule(dynamic)
        for (int work = 0; work < B * NH; work++) {
            int b = work / NH, h = work % NH;
            const float* q = qkv + (size_t)b * T * ld + (size_t)h * HS;
            float* dq = dqkv + (size_t)b * T * ld + (size_t)h * HS;
            const float *k = q + C, *v = k + C;
            float *dk = dq + C, *dv = dk + C;
            // the last tile of queries attends to every key: it is computed first and overwrites dk and dv, and the
            // other tiles add to them
            for (int tile = num_tiles - 1; tile >= 0; tile--) {
                int t0 = tile * ATTENTION_ROWS, rows = T - t0 < ATTENTION_ROWS ? T - t0 : ATTENTION_ROWS,
                    width = t0 + rows;
                size_t at = ((size_t)b * T + t0) * C + (size_t)h * HS;
                const float *d = dout + at, *o = out + at;
                bool add = tile < num_tiles - 1;
                matmul_nt(p, width, q + t0 * ld, ld, k, ld, NULL, rows, width, HS, false);
                matmul_nt(dp, width, d, C, v, ld, NULL, rows, width, HS, false);
                for (int i = 0; i < rows; i++) {
                    float delta = 0.0f; // see attention_backward_naive
                    for (int j = 0; j < HS; j++) { delta += d[(size_t)i * C + j] * o[(size_t)i * C + j]; }
                    attention_softmax_row_backward(p + (size_t)i * width, dp + (size_t)i * width, scale,
                                                   lse[((size_t)b * NH + h) * T + t0 + i], delta, t0 + i + 1, width);
                }
                matmul_tn(dv, ld, p, width, d, C, width, HS, rows, add);
                matmul_nn(dq + t0 * ld, ld, dp, width, k, ld, rows, HS, width, false);
                matmul_tn(dk, ld, dp, width, q + t0 * ld, ld, width, HS, rows, add);
            }
        }
        free(p);
        free(dp);
    }
}

// ---- the activation of the MLP's hidden layer ----------------------------------------------------------
// GELU's tanh form, which is GPT-2's, is x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3), as 0.5 (1 + tanh u) = sigmoid(2 u).
// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415. GELU itself is x * Phi(x), where Phi is the normal distribution function.

enum { CHUNK = 4096 }; // elements per iteration of a threaded elementwise loop

INLINE float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// Returns Phi(x) with a relative error of at most 5e-7; density: exp(-x^2 / 2). Phi(-|x|) is density times a polynomial of
// 1 / (1 + 0.21 |x|), whose coefficients are a least-squares fit of the relative error for |x| <= 13.
INLINE float normal_distribution(float x, float density) {
    float t = 1.0f / (1.0f + 0.21f * fabsf(x));
    float p = 0.36072847f + t * (-0.33986497f + t * (0.28814301f + t * -0.07258017f));
    p = density * t *
        (0.08370179f + t * (0.08522033f + t * (0.06819454f + t * (0.12852621f + t * (-0.10206924f + t * p)))));
    return x < 0.0f ? p : 1.0f - p;
}

INLINE float activate(Activation kind, float x) {
    switch (kind) {
    case ACT_GELU_TANH:
        return x / (1.0f + fast_exp(-2.0f * 0.7978845608f * (x + 0.044715f * x * x * x)));
    case ACT_GELU:
        return x * normal_distribution(x, fast_exp(-0.5f * x * x));
    case ACT_RELU:
        return x > 0.0f ? x : x != x ? x : 0.0f;
    case ACT_RELU_SQUARED:
        return x < 0.0f ? 0.0f : x * x;
    case ACT_SILU:
        return x / (1.0f + fast_exp(-x));
    default:
        return 2.0f * sigmoid(2.0f * x) - 1.0f; // tanh
    }
}

// The derivative of activate() at x.
INLINE float activation_slope(Activation kind, float x) {
    if (kind == ACT_GELU_TANH) {
        float s = sigmoid(2.0f * 0.7978845608f * (x + 0.044715f * x * x * x));
        return s + x * s * (1.0f - s) * 2.0f * (0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x));
    } else if (kind == ACT_GELU) {
        float density = fast_exp(-0.5f * x * x);
        return normal_distribution(x, density) + 0.3989422804f * x * density;
    } else if (kind == ACT_RELU) {
        return x > 0.0f ? 1.0f : x != x ? x : 0.0f;
    } else if (kind == ACT_RELU_SQUARED) {
        return x < 0.0f ? 0.0f : 2.0f * x;
    } else if (kind == ACT_SILU) {
        float s = sigmoid(x);
        return s + x * s * (1.0f - s);
    }
    float y = activate(ACT_TANH, x);
    return 1.0f - y * y;
}

// A loop over i < n for each kind of activation, which is a constant in it.
#define FOR_EACH_KIND(kind, n, statement)                                                                              \
    switch (kind) {                                                                                                    \
        FOR_KIND(ACT_GELU_TANH, n, statement)                                                                          \
        FOR_KIND(ACT_GELU, n, statement)                                                                               \
        FOR_KIND(ACT_RELU, n, statement)                                                                               \
        FOR_KIND(ACT_RELU_SQUARED, n, statement)                                                                       \
        FOR_KIND(ACT_SILU, n, statement)                                                                               \
        FOR_KIND(ACT_TANH, n, statement)                                                                               \
    }
#define FOR_KIND(value, n, statement)                                                                                  \
    case value: {                                                                                                      \
        const Activation KIND = value;                                                                                 \
        for (size_t i = 0; i < (n); i++) { statement; }                                                                \
        break;                                                                                                         \
    }

VECTOR static void activation_chunk(Activation kind, float* out, const float* inp,
                                    size_t n){FOR_EACH_KIND(kind, n, out[i] = activate(KIND, inp[i]))} VECTOR
    static void activation_backward_chunk(Activation kind, float* inout, const float* inp, size_t n) {
    FOR_EACH_KIND(kind, n, inout[i] *= activation_slope(KIND, inp[i]))
}

// out (n) | inp (n)
static void activation_forward(Activation kind, float* out, const float* inp, size_t n) {
#pragma omp parallel for
    for (long i = 0; i < (long)n; i += CHUNK) {
        activation_chunk(kind, out + i, inp + i, n - i < CHUNK ? n - i : CHUNK);
    }
}

// inout (n): in, the gradient of the activation's output; out, the gradient of its input | inp (n)
static void activation_backward(Activation kind, float* inout, const float* inp, size_t n) {
#pragma omp parallel for
    for (long i = 0; i < (long)n; i += CHUNK) {
        activation_backward_chunk(kind, inout + i, inp + i, n - i < CHUNK ? n - i : CHUNK);
    }
}

// ---- residual: out = a + b ------------------------------------------------------------------------------

// out (n) | a (n) | b (n). There is no backward function: the gradient of the sum is the gradient of a and of b.
static void residual_forward(float* out, const float* a, const float* b, size_t n) {
#pragma omp parallel for
    for (long i = 0; i < (long)n; i++) { out[i] = a[i] + b[i]; }
}

// ---- classifier: softmax and cross-entropy over the vocabulary ------------------------------------------

// Returns the loss of one row. If dloss != 0, overwrites the logits with their gradients,
// (softmax - onehot(target)) * dloss.
VECTOR static float classifier_row(float* logits, int target, float dloss, int V) {
    float max = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : max)
    for (int v = 0; v < V; v++) { max = logits[v] > max ? logits[v] : max; }
#pragma omp simd reduction(+ : sum)
    for (int v = 0; v < V; v++) { sum += fast_exp(logits[v] - max); }
    float loss = max + logf(sum) - logits[target];
    if (dloss != 0.0f) {
        float scale = dloss / sum;
        for (int v = 0; v < V; v++) { logits[v] = fast_exp(logits[v] - max) * scale; }
        logits[target] -= dloss;
    }
    return loss;
}

// losses (N) | logits (N,V), whose rows are Vp floats apart, overwritten as in classifier_row | targets (N)
static void classifier(float* losses, float* logits, const int* targets, float dloss, int N, int V, int Vp) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) { losses[n] = classifier_row(logits + (size_t)n * Vp, targets[n], dloss, V); }
}

// ================================================================================================
// 2. the model
// ================================================================================================

// Pointers to the tensors of the table gpt2_params (llmc/gpt2.h), in the table's order. A second struct of this type
// points to their gradients.
typedef struct {
    float* wte;      // (Vp, C)
    float* wpe;      // (maxT, C)
    float* ln1w;     // (L, C)
    float* ln1b;     // (L, C)
    float* qkvw;     // (L, 3*C, C)
    float* qkvb;     // (L, 3*C)
    float* attprojw; // (L, C, C)
    float* attprojb; // (L, C)
    float* ln2w;     // (L, C)
    float* ln2b;     // (L, C)
    float* fcw;      // (L, F, C)
    float* fcb;      // (L, F)
    float* fcprojw;  // (L, C, F)
    float* fcprojb;  // (L, C)
    float* lnfw;     // (C)
    float* lnfb;     // (C)
    float* lmhead;   // (Vp, C); wte itself unless the head is untied
} Parameters;

// The activations of B x T tokens, which the forward pass keeps for the backward pass.
typedef struct {
    int B, T;         // allocated for this many tokens
    float* encoded;   // (B, T, C)
    float* ln1;       // (L, B, T, C)
    float* ln1_mean;  // (L, B, T)
    float* ln1_rstd;  // (L, B, T)
    float* qkv;       // (L, B, T, 3*C)
    float* atty;      // (L, B, T, C)
    float* lse;       // (L, B, NH, T)
    float* residual2; // (L, B, T, C): the residual stream after attention
    float* ln2;       // (L, B, T, C)
    float* ln2_mean;  // (L, B, T)
    float* ln2_rstd;  // (L, B, T)
    float* fch;       // (L, B, T, F)
    float* fch_gelu;  // (L, B, T, F)
    float* residual3; // (L, B, T, C): the residual stream after the MLP
    float* lnf;       // (B, T, C)
    float* lnf_mean;  // (B, T)
    float* lnf_rstd;  // (B, T)
    float* losses;    // (B, T)
    float* logits;    // (B, T, Vp); the classifier overwrites them with their gradients
    float* scratch;   // (B, T, C)
} Activations;

// Gradients of activations; every layer's backward pass reuses them.
typedef struct {
    float* dresidual; // (B, T, C): gradient of the residual stream; every layer updates it, from the last to the first
    float* dbtc;      // (B, T, C)
    float* dqkv;      // (B, T, 3*C)
    float* dfch;      // (B, T, F)
} Gradients;

typedef struct {
    GPT2Config config;
    float* params_memory; // (num_params), all tensors one after the other
    float* grads_memory;  // (num_params), NULL unless training
    float* m_memory;      // (num_params), AdamW's first moment, or Muon's momentum; NULL unless training
    float* v_memory;      // (num_params), AdamW's second moment, 0 for Muon's matrices; NULL unless training
    Parameters params, grads;
    Activations acts;
    Gradients dacts;
} GPT2;

// Returns n zeroed floats, to be released with free(). They are on huge pages where the system has them, which cause
// fewer page faults and TLB misses.
static float* allocate_floats(size_t n) {
    const size_t huge = 2 << 20;
    const size_t unit = n * sizeof(float) < huge ? 64 : huge; // a small tensor does not fill a huge page
    size_t bytes = (n * sizeof(float) + unit - 1) / unit * unit;
    float* p = (float*)aligned_alloc(unit, bytes ? bytes : unit);
    if (!p) {
        die("out of memory: cannot allocate %.3g GB%s", (double)bytes / 1e9,
            args->train_data ? "; a smaller -b or -t needs less" : "");
    }
    advise_huge(p, bytes);
#pragma omp parallel for
    for (long i = 0; i < (long)n; i += CHUNK) { memset(p + i, 0, (n - i < CHUNK ? n - i : CHUNK) * sizeof(float)); }
    return p;
}

enum { MAX_TENSORS = 32 }; // maximum length of a TensorList, below

// A tensor whose pointer is a member of a struct.
typedef struct {
    float** pointer; // address of the member
    size_t size;     // in floats
} Tensor;

// All tensors of a struct, to allocate, count and free them. The list ends at the first entry whose pointer is NULL.
typedef struct {
    Tensor tensors[MAX_TENSORS];
} TensorList;

static size_t total_floats(TensorList list) {
    size_t sum = 0;
    for (int i = 0; i < MAX_TENSORS && list.tensors[i].pointer; i++) { sum += list.tensors[i].size; }
    return sum;
}

static void allocate_tensors(TensorList list) {
    for (int i = 0; i < MAX_TENSORS && list.tensors[i].pointer; i++) {
        *list.tensors[i].pointer = allocate_floats(list.tensors[i].size);
    }
}

static void free_tensors(TensorList list) {
    for (int i = 0; i < MAX_TENSORS && list.tensors[i].pointer; i++) { free(*list.tensors[i].pointer); }
}

static void point_parameters(Parameters* p, float* memory, const GPT2Config* config) {
    float** tensors = (float**)p; // Parameters has NUM_PARAMS pointers, in the order of the table
    for (int i = 0; i < NUM_PARAMS; i++) { tensors[i] = memory + param_offset(config, i); }
    if (!config->untied_head) { p->lmhead = p->wte; }
}

static void gpt2_allocate(GPT2* model, const GPT2Config* config) {
    memset(model, 0, sizeof(*model));
    model->config = *config;
    model->params_memory = allocate_floats(num_parameters(config));
    point_parameters(&model->params, model->params_memory, config);
}

static void gpt2_allocate_training(GPT2* model) {
    size_t n = num_parameters(&model->config);
    model->grads_memory = allocate_floats(n);
    model->m_memory = allocate_floats(n);
    model->v_memory = allocate_floats(n);
    point_parameters(&model->grads, model->grads_memory, &model->config);
}

// Lists the activations of B x T tokens. If all_logits is true, there are logits for every token, otherwise only for
// one token per sequence.
static TensorList activation_list(Activations* a, const GPT2Config* config, int B, int T, bool all_logits) {
    size_t BT = (size_t)B * T, C = config->channels, L = config->num_layers, NH = config->num_heads;
    size_t num_logits = all_logits ? BT : (size_t)B, F = config->mlp_channels, Vp = config->padded_vocab_size;
    TensorList list = {{
        {&a->encoded, BT * C},
        {&a->ln1, L * BT * C},
        {&a->ln1_mean, L * BT},
        {&a->ln1_rstd, L * BT},
        {&a->qkv, L * BT * 3 * C},
        {&a->atty, L * BT * C},
        {&a->lse, L * BT * NH},
        {&a->residual2, L * BT * C},
        {&a->ln2, L * BT * C},
        {&a->ln2_mean, L * BT},
        {&a->ln2_rstd, L * BT},
        {&a->fch, L * BT * F},
        {&a->fch_gelu, L * BT * F},
        {&a->residual3, L * BT * C},
        {&a->lnf, BT * C},
        {&a->lnf_mean, BT},
        {&a->lnf_rstd, BT},
        {&a->losses, BT},
        {&a->logits, num_logits * Vp},
        {&a->scratch, BT * C},
    }};
    return list;
}

static TensorList gradient_list(Gradients* d, const GPT2Config* config, int B, int T) {
    size_t BTC = (size_t)B * T * config->channels;
    TensorList list = {{
        {&d->dresidual, BTC},
        {&d->dbtc, BTC},
        {&d->dqkv, BTC * 3},
        {&d->dfch, (size_t)B * T * config->mlp_channels},
    }};
    return list;
}

static void activations_allocate(Activations* acts, const GPT2Config* config, int B, int T, bool all_logits) {
    acts->B = B;
    acts->T = T;
    allocate_tensors(activation_list(acts, config, B, T, all_logits));
}

static void activations_free(Activations* acts, const GPT2Config* config) {
    free_tensors(activation_list(acts, config, acts->B, acts->T, true));
    memset(acts, 0, sizeof(*acts));
}

// Allocates the activations and gradients of a forward and backward pass over B x T tokens.
static void gpt2_allocate_batch(GPT2* model, int B, int T) {
    activations_allocate(&model->acts, &model->config, B, T, true);
    allocate_tensors(gradient_list(&model->dacts, &model->config, B, T));
}

static void gpt2_free(GPT2* model) {
    free_tensors(gradient_list(&model->dacts, &model->config, model->acts.B, model->acts.T));
    activations_free(&model->acts, &model->config);
    free(model->params_memory);
    free(model->grads_memory);
    free(model->m_memory);
    free(model->v_memory);
    memset(model, 0, sizeof(*model));
}

// Runs inputs (B,T) through all layers and the last layernorm. All activations are kept in acts.
static void gpt2_forward(const GPT2* model, Activations* acts, const int* inputs, int B, int T) {
    require((size_t)B * T <= (size_t)acts->B * acts->T && T <= model->config.max_seq_len);
    const Parameters* p = &model->params;
    int L = model->config.num_layers, NH = model->config.num_heads, C = model->config.channels, BT = B * T;
    int F = model->config.mlp_channels;
    float epsilon = model->config.norm_epsilon;
    Activation activation = (Activation)model->config.activation;
    size_t BTC = (size_t)BT * C, BTF = (size_t)BT * F, CC = (size_t)C * C, FC = (size_t)F * C;

    encoder_forward(acts->encoded, inputs, p->wte, p->wpe, B, T, C);
    const float* residual = acts->encoded; // (B,T,C)
    for (size_t l = 0; l < (size_t)L; l++) {
        float* ln1 = acts->ln1 + l * BTC;             // (B,T,C)
        float* qkv = acts->qkv + l * BTC * 3;         // (B,T,3*C)
        float* atty = acts->atty + l * BTC;           // (B,T,C)
        float* residual2 = acts->residual2 + l * BTC; // (B,T,C)
        float* ln2 = acts->ln2 + l * BTC;             // (B,T,C)
        float* fch = acts->fch + l * BTF;             // (B,T,F)
        float* gelu = acts->fch_gelu + l * BTF;       // (B,T,F)
        float* residual3 = acts->residual3 + l * BTC; // (B,T,C)

        layernorm_forward(ln1, acts->ln1_mean + l * BT, acts->ln1_rstd + l * BT, residual, p->ln1w + l * C,
                          p->ln1b + l * C, BT, C, epsilon);
        matmul_forward(qkv, 3 * C, ln1, p->qkvw + l * 3 * CC, p->qkvb + l * 3 * C, BT, C, 3 * C);
        attention_forward(atty, acts->lse + l * BT * NH, qkv, B, T, C, NH, attention_scale(&model->config, l));
        matmul_forward(acts->scratch, C, atty, p->attprojw + l * CC, p->attprojb + l * C, BT, C, C);
        residual_forward(residual2, residual, acts->scratch, BTC);

        layernorm_forward(ln2, acts->ln2_mean + l * BT, acts->ln2_rstd + l * BT, residual2, p->ln2w + l * C,
                          p->ln2b + l * C, BT, C, epsilon);
        matmul_forward(fch, F, ln2, p->fcw + l * FC, p->fcb + l * F, BT, C, F);
        activation_forward(activation, gelu, fch, BTF);
        matmul_forward(acts->scratch, C, gelu, p->fcprojw + l * FC, p->fcprojb + l * C, BT, F, C);
        residual_forward(residual3, residual2, acts->scratch, BTC);
        residual = residual3;
    }
    layernorm_forward(acts->lnf, acts->lnf_mean, acts->lnf_rstd, residual, p->lnfw, p->lnfb, BT, C, epsilon);
}

// logits (N,Vp) = lnf (N,C) lmhead^T. Columns V..Vp are not written.
static void gpt2_head(const GPT2* model, float* logits, const float* lnf, int N) {
    matmul_forward(logits, model->config.padded_vocab_size, lnf, model->params.lmhead, NULL, N, model->config.channels,
                   model->config.vocab_size);
}

// Call after gpt2_forward. Returns the mean loss over B x T tokens. dloss is the weight of one token's loss in the
// step's loss: 1 / (tokens in a step). If dloss != 0, the logits are overwritten by their gradients, for gpt2_backward.
static double gpt2_loss(GPT2* model, const int* targets, float dloss, int B, int T) {
    Activations* acts = &model->acts;
    gpt2_head(model, acts->logits, acts->lnf, B * T);
    classifier(acts->losses, acts->logits, targets, dloss, B * T, model->config.vocab_size,
               model->config.padded_vocab_size);
    double sum = 0.0;
    for (int i = 0; i < B * T; i++) { sum += acts->losses[i]; }
    return sum / ((double)B * T);
}

// Call after gpt2_loss with dloss != 0. Computes the gradients of all parameters. If `first` is true, for the first
// micro-batch of a step, they overwrite the old gradients; otherwise they are added to them.
static void gpt2_backward(GPT2* model, const int* inputs, int B, int T, bool first) {
    const Parameters *p = &model->params, *g = &model->grads;
    Activations* acts = &model->acts;
    int L = model->config.num_layers, NH = model->config.num_heads, C = model->config.channels, BT = B * T;
    int F = model->config.mlp_channels, V = model->config.vocab_size, Vp = model->config.padded_vocab_size;
    size_t BTC = (size_t)BT * C, BTF = (size_t)BT * F, CC = (size_t)C * C, FC = (size_t)F * C;
    // the first micro-batch overwrites the gradients of matrices, which saves zeroing them; the gradients of vectors
    // and of embeddings, unless the head has written them, are only ever added to, so they are zeroed here
    bool add = !first;
    for (int i = 0; first && i < NUM_PARAMS; i++) {
        float* tensor = ((float* const*)g)[i];
        bool embedding = gpt2_params[i].place == PLACE_EMBEDDINGS && tensor != g->lmhead;
        if (gpt2_params[i].rows == DIM_1 || embedding) {
            memset(tensor, 0, param_size(&model->config, i) * sizeof(float));
        }
    }
    float *dresidual = model->dacts.dresidual, *dbtc = model->dacts.dbtc; // (B,T,C)
    float *dqkv = model->dacts.dqkv, *dfch = model->dacts.dfch;           // (B,T,3*C), (B,T,F)
    memset(dresidual, 0, BTC * sizeof(float));

    matmul_backward(dbtc, g->lmhead, NULL, acts->logits, Vp, acts->lnf, p->lmhead, BT, C, V, add);
    const float* residual = acts->residual3 + (L - 1) * BTC;
    layernorm_backward(dresidual, g->lnfw, g->lnfb, dbtc, residual, p->lnfw, acts->lnf_mean, acts->lnf_rstd, BT, C);
    for (size_t l = (size_t)L; l-- > 0;) {
        residual = l == 0 ? acts->encoded : acts->residual3 + (l - 1) * BTC;
        const float *ln1 = acts->ln1 + l * BTC, *ln2 = acts->ln2 + l * BTC, *residual2 = acts->residual2 + l * BTC;
        const float *qkv = acts->qkv + l * BTC * 3, *atty = acts->atty + l * BTC;
        const float *fch = acts->fch + l * BTF, *gelu = acts->fch_gelu + l * BTF;

        matmul_backward(dfch, g->fcprojw + l * FC, g->fcprojb + l * C, dresidual, C, gelu, p->fcprojw + l * FC, BT, F,
                        C, add);
        activation_backward((Activation)model->config.activation, dfch, fch, BTF);
        matmul_backward(dbtc, g->fcw + l * FC, g->fcb + l * F, dfch, F, ln2, p->fcw + l * FC, BT, C, F, add);
        layernorm_backward(dresidual, g->ln2w + l * C, g->ln2b + l * C, dbtc, residual2, p->ln2w + l * C,
                           acts->ln2_mean + l * BT, acts->ln2_rstd + l * BT, BT, C);

        matmul_backward(dbtc, g->attprojw + l * CC, g->attprojb + l * C, dresidual, C, atty, p->attprojw + l * CC, BT,
                        C, C, add);
        attention_backward(dqkv, dbtc, qkv, atty, acts->lse + l * BT * NH, B, T, C, NH,
                           attention_scale(&model->config, l));
        matmul_backward(dbtc, g->qkvw + l * 3 * CC, g->qkvb + l * 3 * C, dqkv, 3 * C, ln1, p->qkvw + l * 3 * CC, BT, C,
                        3 * C, add);
        layernorm_backward(dresidual, g->ln1w + l * C, g->ln1b + l * C, dbtc, residual, p->ln1w + l * C,
                           acts->ln1_mean + l * BT, acts->ln1_rstd + l * BT, BT, C);
    }
    encoder_backward(g->wte, g->wpe, dresidual, inputs, B, T, C);
}

VECTOR static double sum_of_squares_chunk(const float* x, size_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) { sum += x[i] * x[i]; }
    return sum;
}

// The Euclidean norm of x (n). The sums of the chunks are added in order, so the bits do not depend on the number of
// threads.
static double euclidean_norm(const float* x, size_t n) {
    size_t num_chunks = (n + CHUNK - 1) / CHUNK;
    double* sums = (double*)malloc_check(num_chunks * sizeof(double));
#pragma omp parallel for
    for (long i = 0; i < (long)num_chunks; i++) {
        size_t at = (size_t)i * CHUNK;
        sums[i] = sum_of_squares_chunk(x + at, n - at < CHUNK ? n - at : CHUNK);
    }
    double sum = 0.0;
    for (size_t i = 0; i < num_chunks; i++) { sum += sums[i]; }
    free(sums);
    return sqrt(sum);
}

// The norm of all gradients.
static double gpt2_gradient_norm(const GPT2* model) {
    return euclidean_norm(model->grads_memory, num_parameters(&model->config));
}

typedef struct {
    float learning_rate, beta1, beta2, eps, weight_decay;
    float bias1, bias2;   // bias corrections: 1 - beta1^t and 1 - beta2^t in update t = 1, 2, ...
    float gradient_scale; // every gradient is multiplied by this; less than 1 when gradients are clipped
} AdamW;

VECTOR static void adamw_chunk(float* param, float* m, float* v, const float* grad, const AdamW* o, float decay,
                               size_t n) {
    float lr = o->learning_rate, beta1 = o->beta1, beta2 = o->beta2, scale = o->gradient_scale, eps = o->eps;
    float inverse1 = 1.0f / o->bias1, inverse2 = 1.0f / o->bias2;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * scale;
        m[i] = beta1 * m[i] + (1.0f - beta1) * g;
        v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
        param[i] -= lr * (m[i] * inverse1 / (sqrtf(v[i] * inverse2) + eps) + decay * param[i]);
    }
}

// ---- Muon: momentum, whose matrices are replaced by orthogonal ones -------------------------------
// A gradient matrix usually has a few large singular values and many small ones, so AdamW's or SGD's updates move the
// weights in few directions only. Muon keeps the singular vectors of the momentum, and makes its singular values about 1:
//
//     m = momentum * m + g
//     param -= rate * (0.2 * sqrt(max(rows, cols)) * orthogonal(g + momentum * m) + decay * param)
//
// An orthogonal matrix has entries of mean square 1 / max(rows, cols). The factor gives the update the root mean square
// 0.2 that AdamW's updates have in practice, so that AdamW's rates and weight decay serve for Muon, too.
// Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the factor: Liu et al. 2025, arXiv:2502.16982.

typedef struct {
    float learning_rate, momentum, weight_decay;
    float gradient_scale; // every gradient is multiplied by this
} Muon;

// out (n) = a * x (n) + b * y (n); out may be x or y
static void linear_combination(float* out, float a, const float* x, float b, const float* y, size_t n) {
#pragma omp parallel for
    for (long i = 0; i < (long)n; i++) { out[i] = a * x[i] + b * y[i]; }
}

// Replaces x (rows,cols) = U S V^T by U S' V^T, where S' is between about 0.7 and 1.2 unless S is tiny, by five steps of
// the Newton-Schulz iteration
//     x <- a x + (b A + c A^2) x,  A = x x^T          which maps each singular value s to  a s + b s^3 + c s^5
// Its coefficients, Jordan's, make small singular values grow by a = 3.4 in each step, and give up convergence to 1 for
// it. If x has more rows than columns, A = x^T x stands on the right instead, which is smaller. scratch has
// rows * cols + 2 * min(rows, cols)^2 floats.
static void newton_schulz(float* x, float* scratch, int rows, int cols) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    bool tall = rows > cols;
    size_t size = (size_t)rows * cols, n = tall ? cols : rows;
    float *gram = scratch, *gram2 = gram + n * n, *product = gram2 + n * n; // A, A^2, and (b A + c A^2) x
    // the Frobenius norm is at least the largest singular value: afterwards none is above 1
    linear_combination(x, (float)(1.0 / (euclidean_norm(x, size) + 1e-7)), x, 0.0f, x, size);
    for (int step = 0; step < 5; step++) {
        if (tall) {
            matmul_tn(gram, n, x, n, x, n, n, n, rows, false);
        } else {
            matmul_nt(gram, n, x, cols, x, cols, NULL, n, n, cols, false);
        }
        matmul_nn(gram2, n, gram, n, gram, n, n, n, n, false);
        linear_combination(gram, b, gram, c, gram2, n * n);
        if (tall) {
            matmul_nn(product, n, x, n, gram, n, rows, n, n, false);
        } else {
            matmul_nn(product, cols, gram, n, x, cols, n, cols, n, false);
        }
        linear_combination(x, a, x, 1.0f, product, size);
    }
}

// One step of Muon on a matrix (rows,cols). scratch has 2 * rows * cols + 2 * min(rows, cols)^2 floats.
static void muon_matrix(float* param, float* m, const float* grad, float* scratch, const Muon* o, float decay, int rows,
                        int cols) {
    size_t size = (size_t)rows * cols;
    float scale = 0.2f * sqrtf((float)(rows > cols ? rows : cols));
    linear_combination(m, o->momentum, m, o->gradient_scale, grad, size);
    // Nesterov's momentum looks a step ahead
    linear_combination(scratch, o->momentum, m, o->gradient_scale, grad, size);
    newton_schulz(scratch, scratch + size, rows, cols);
    linear_combination(param, 1.0f - o->learning_rate * decay, param, -o->learning_rate * scale, scratch, size);
}

// The size of muon_matrix's scratch: it is large enough for the matrices of every tensor.
static size_t muon_scratch_floats(const GPT2Config* config) {
    size_t floats = 0;
    for (int p = 0; p < NUM_PARAMS; p++) {
        int matrices = param_muon_matrices(p);
        if (matrices == 0) { continue; }
        size_t rows = param_rows(config, p) / matrices, cols = param_cols(config, p), n = rows < cols ? rows : cols;
        size_t need = 2 * rows * cols + 2 * n * n;
        if (need > floats) { floats = need; }
    }
    return floats;
}

// One step of Muon on the matrices of all layers.
static void muon_update(GPT2* model, const Muon* optimizer) {
    float* scratch = allocate_floats(muon_scratch_floats(&model->config));
    for (int p = 0; p < NUM_PARAMS; p++) {
        int matrices = param_muon_matrices(p), count = matrices * param_copies(&model->config, p);
        if (matrices == 0) { continue; }
        int rows = (int)param_rows(&model->config, p) / matrices, cols = (int)param_cols(&model->config, p);
        float decay = gpt2_params[p].decay ? optimizer->weight_decay : 0.0f;
        for (size_t i = 0; i < (size_t)count; i++) {
            size_t at = param_offset(&model->config, p) + i * rows * cols;
            muon_matrix(model->params_memory + at, model->m_memory + at, model->grads_memory + at, scratch, optimizer,
                        decay, rows, cols);
        }
    }
    free(scratch);
}

// One step of AdamW on all parameters. If muon is not NULL, the matrices of the layers have a step of Muon instead.
// Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
static void gpt2_update(GPT2* model, const AdamW* optimizer, const Muon* muon) {
    if (muon) { muon_update(model, muon); }
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (muon && param_muon_matrices(p) > 0) { continue; }
        size_t n = param_size(&model->config, p), offset = param_offset(&model->config, p);
        float decay = gpt2_params[p].decay ? optimizer->weight_decay : 0.0f;
#pragma omp parallel for
        for (long i = 0; i < (long)n; i += CHUNK) {
            size_t at = offset + (size_t)i, count = n - (size_t)i < CHUNK ? n - (size_t)i : CHUNK;
            adamw_chunk(model->params_memory + at, model->m_memory + at, model->v_memory + at, model->grads_memory + at,
                        optimizer, decay, count);
        }
    }
}

// ================================================================================================
// 3. generation
// ================================================================================================

// The key/value cache of one text, and the activations of one token.
typedef struct {
    int length, capacity; // number of positions in use, and of positions that the cache has room for
    float* keys;          // (L, capacity, C)
    float* values;        // (L, capacity, C)
    float* x;             // (C): the residual stream
    float* norm;          // (C)
    float* qkv;           // (3*C)
    float* out;           // (C)
    float* fch;           // (F)
    float* att;           // (NH, capacity)
    float* logits;        // (Vp)
} Generator;

static TensorList generator_list(Generator* g, const GPT2Config* config, int capacity) {
    size_t C = config->channels, cache = (size_t)config->num_layers * capacity * C;
    TensorList list = {{
        {&g->keys, cache},
        {&g->values, cache},
        {&g->x, C},
        {&g->norm, C},
        {&g->qkv, 3 * C},
        {&g->out, C},
        {&g->fch, (size_t)config->mlp_channels},
        {&g->att, (size_t)config->num_heads * capacity},
        {&g->logits, (size_t)config->padded_vocab_size},
    }};
    return list;
}

static void generator_allocate(Generator* g, const GPT2Config* config, int capacity) {
    g->length = 0;
    g->capacity = capacity;
    allocate_tensors(generator_list(g, config, capacity));
}

static void generator_free(Generator* g, const GPT2Config* config) {
    free_tensors(generator_list(g, config, g->capacity));
    memset(g, 0, sizeof(*g));
}

VECTOR static float dot_row(const float* a, const float* b, int n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

// out (C) = attention of one query q (C) over `length` cached keys and values (capacity, C). att (NH, capacity) is
// scratch.
static void attention_one(float* out, float* att, const float* q, const float* keys, const float* values, int length,
                          int capacity, int C, int NH, float scale) {
    int HS = C / NH;
#pragma omp parallel for if ((long)length * C > 32768)
    for (int h = 0; h < NH; h++) {
        float *a = att + (size_t)h * capacity, *o = out + (size_t)h * HS;
        for (int t = 0; t < length; t++) {
            a[t] = dot_row(q + (size_t)h * HS, keys + (size_t)t * C + (size_t)h * HS, HS);
        }
        attention_softmax_row(a, scale, length, length);
        for (int i = 0; i < HS; i++) { o[i] = 0.0f; }
        for (int t = 0; t < length; t++) {
            const float* v = values + (size_t)t * C + (size_t)h * HS;
            for (int i = 0; i < HS; i++) { o[i] += a[t] * v[i]; }
        }
    }
}

// Runs one token through the model. The logits of the next token are then in g->logits.
static void generator_step(Generator* g, const GPT2* model, int token) {
    const Parameters* p = &model->params;
    int L = model->config.num_layers, NH = model->config.num_heads, C = model->config.channels, t = g->length;
    require(t < g->capacity);
    int F = model->config.mlp_channels;
    size_t CC = (size_t)C * C, FC = (size_t)F * C;
    float mean, rstd, epsilon = model->config.norm_epsilon;
    for (int c = 0; c < C; c++) { g->x[c] = p->wte[(size_t)token * C + c] + p->wpe[(size_t)t * C + c]; }
    for (size_t l = 0; l < (size_t)L; l++) {
        float *keys = g->keys + l * g->capacity * C, *values = g->values + l * g->capacity * C;
        layernorm_row(g->norm, &mean, &rstd, g->x, p->ln1w + l * C, p->ln1b + l * C, C, epsilon);
        matmul_forward(g->qkv, 3 * C, g->norm, p->qkvw + l * 3 * CC, p->qkvb + l * 3 * C, 1, C, 3 * C);
        memcpy(keys + (size_t)t * C, g->qkv + C, C * sizeof(float));
        memcpy(values + (size_t)t * C, g->qkv + 2 * C, C * sizeof(float));
        attention_one(g->norm, g->att, g->qkv, keys, values, t + 1, g->capacity, C, NH,
                      attention_scale(&model->config, l));
        matmul_forward(g->out, C, g->norm, p->attprojw + l * CC, p->attprojb + l * C, 1, C, C);
        for (int c = 0; c < C; c++) { g->x[c] += g->out[c]; }
        layernorm_row(g->norm, &mean, &rstd, g->x, p->ln2w + l * C, p->ln2b + l * C, C, epsilon);
        matmul_forward(g->fch, F, g->norm, p->fcw + l * FC, p->fcb + l * F, 1, C, F);
        activation_chunk((Activation)model->config.activation, g->fch, g->fch, F);
        matmul_forward(g->out, C, g->fch, p->fcprojw + l * FC, p->fcprojb + l * C, 1, F, C);
        for (int c = 0; c < C; c++) { g->x[c] += g->out[c]; }
    }
    layernorm_row(g->norm, &mean, &rstd, g->x, p->lnfw, p->lnfb, C, epsilon);
    gpt2_head(model, g->logits, g->norm, 1);
    g->length++;
}

// Runs a prompt, tokens (n) with n >= 1, in one pass, and fills the cache. The logits of the next token are then in
// g->logits.
static void generator_prefill(Generator* g, const GPT2* model, const int* tokens, int n) {
    require(g->length == 0 && n >= 1 && n <= g->capacity);
    Activations acts;
    activations_allocate(&acts, &model->config, 1, n, false);
    gpt2_forward(model, &acts, tokens, 1, n);
    size_t C = model->config.channels;
    for (size_t l = 0; l < (size_t)model->config.num_layers; l++) {
        for (size_t t = 0; t < (size_t)n; t++) {
            const float* qkv = acts.qkv + (l * n + t) * 3 * C;
            memcpy(g->keys + (l * g->capacity + t) * C, qkv + C, C * sizeof(float));
            memcpy(g->values + (l * g->capacity + t) * C, qkv + 2 * C, C * sizeof(float));
        }
    }
    gpt2_head(model, g->logits, acts.lnf + (size_t)(n - 1) * C, 1);
    g->length = n;
    activations_free(&acts, &model->config);
}

// Continues prompt (n), n >= 1. The text ends after num_tokens new tokens, before the end-of-text token `stop` (-1:
// none), when `out` has met a stop string, or at the model's last position. The new tokens are written to new_tokens
// (num_tokens) and, as text, to `out`; either may be NULL. Adds to *times, unless it is NULL. Returns the number of new
// tokens, or -1 if the logits are not numbers.
static int generate(const GPT2* model, Sampler* sampler, const int* prompt, int n, int num_tokens, int stop,
                    int* new_tokens, TextOutput* out, GenerationTimes* times) {
    int maxT = model->config.max_seq_len, V = model->config.vocab_size, made = 0;
    int capacity = num_tokens < maxT - n ? n + num_tokens : maxT;
    Generator g;
    generator_allocate(&g, &model->config, capacity);
    float* scratch = (float*)malloc_check(sampler_scratch_bytes(V));
    bool penalize = sampler->repetition_penalty != 1.0f;
    uint32_t* seen = (uint32_t*)calloc_check(seen_words(V), sizeof(uint32_t)); // the tokens of the text so far
    for (int i = 0; i < n; i++) { seen_add(seen, prompt[i]); }
    double start = time_ms();
    generator_prefill(&g, model, prompt, n);
    double middle = time_ms();
    while (made < num_tokens) {
        if (penalize) { sampler_penalize(g.logits, seen, V, sampler->repetition_penalty); }
        int token = sample_token(sampler, g.logits, V, scratch);
        if (token < 0) {
            made = -1;
            break;
        }
        if (token == stop) { break; }
        if (new_tokens) { new_tokens[made] = token; }
        seen_add(seen, token);
        made++;
        bool stopped = out && text_token(out, token);
        if (stopped || made == num_tokens || g.length == g.capacity) { break; }
        generator_step(&g, model, token);
        if (times) { times->steps++; }
    }
    if (times) { times->prefill_ms += middle - start, times->decode_ms += time_ms() - middle; }
    free(scratch);
    free(seen);
    generator_free(&g, &model->config);
    return made;
}

// ================================================================================================
// 4. training
// ================================================================================================

typedef struct {
    GPT2 model;
    Training job;          // data, checkpoints, logs: llmc/run.h
    int *inputs, *targets; // (B,T)
    Evaluator evaluator;   // for --hellaswag
    EvalLoader hellaswag;
} Trainer;

// This machine's memory in GB.
static double machine_memory_gb(void) { return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) * 1e-9; }

// Ends the program if the weights alone do not fit in memory, because the machine would only swap. Called before
// anything is allocated.
static void check_memory(const GPT2Config* config) {
    double weights = (double)num_parameters(config) * 4e-9, have = machine_memory_gb();
    if (weights > have) { die("the weights need %.1f GB and the machine has %.1f", weights, have); }
}

// Gigabytes of the activations and their gradients of a micro-batch.
static double activations_gb(const GPT2Config* config, int B, int T) {
    Activations acts;
    Gradients dacts;
    return 4e-9 * (double)(total_floats(activation_list(&acts, config, B, T, true)) +
                           total_floats(gradient_list(&dacts, config, B, T)));
}

// Gigabytes of AdamW's or Muon's state.
static double optimizer_gb(const GPT2Config* config) {
    return 8e-9 * (double)num_parameters(config) + (uses_muon() ? 4e-9 * (double)muon_scratch_floats(config) : 0);
}

// Bytes that a training run needs.
static double training_bytes(const GPT2Config* config, int B, int T) {
    return 8.0 * (double)num_parameters(config) + 1e9 * (optimizer_gb(config) + activations_gb(config, B, T));
}

// Prints how much memory a training run needs, before it is allocated, and ends the program if the machine has less. Returns
// how much is left, in bytes.
static double print_memory_need(const GPT2Config* config, int B, int T) {
    double activations = activations_gb(config, B, T);
    double params = (double)num_parameters(config) * 4e-9, have = machine_memory_gb();
    double optimizer = optimizer_gb(config);
    double need = 2 * params + optimizer + activations;
    printf("%d layers, %d heads, %d channels, %d positions, vocabulary %d: %.2f M parameters\n", config->num_layers,
           config->num_heads, config->channels, config->max_seq_len, config->vocab_size,
           (double)num_parameters(config) * 1e-6);
    char text[5][32];
    printf("memory: weights %s, gradients %s, %s %s, activations %s: %s of this machine's %.1f GB\n",
           format_bytes(text[0], 32, params * 1e9), format_bytes(text[1], 32, params * 1e9),
           uses_muon() ? "Muon and AdamW" : "AdamW", format_bytes(text[2], 32, optimizer * 1e9),
           format_bytes(text[3], 32, activations * 1e9), format_bytes(text[4], 32, need * 1e9), have);
    if (4 * params > have) {
        die("the weights with gradients and moments need %.1f GB and the machine has %.1f: take a smaller model",
            4 * params, have);
    }
    if (need > have) { die("the run needs %.1f GB and the machine has %.1f; take a smaller -b or -t", need, have); }
    return (have - need) * 1e9;
}

// Lets each thread have at least 50 MFLOP of a pass of `flops`, about half a millisecond: with less, the threads wait for one
// another longer than they compute, above all on a machine with other work. OMP_NUM_THREADS overrides this.
static void limit_threads(double flops) {
#ifdef _OPENMP
    double useful = flops / 50e6 > 1 ? flops / 50e6 : 1;
    if (!getenv("OMP_NUM_THREADS") && useful < omp_get_max_threads()) { omp_set_num_threads((int)useful); }
#else
    (void)flops;
#endif
}

static void load_model(GPT2* model, ModelSource* source) {
    check_memory(&source->config);
    gpt2_allocate(model, &source->config);
    model_source_read(source, model->params_memory);
}

static void save_checkpoint(Trainer* t, bool last) {
    float* const tensors[3] = {t->model.params_memory, t->model.m_memory, t->model.v_memory};
    training_finish_save(&t->job);
    if (training_is_unsaved(&t->job)) { training_save(&t->job, tensors, last); }
}

// Ends a run that cannot read its data, after saving what it has.
__attribute__((noreturn)) static void end_with_error(Trainer* t, const Error* reason) {
    if (args->output) { save_checkpoint(t, true); }
    training_fail(&t->job, reason);
}

// Computes losses (B,T), for llmc/evaluation.h.
static void compute_losses(void* gpt2, float* losses, const int* inputs, const int* targets, int B, int T) {
    GPT2* model = (GPT2*)gpt2;
    gpt2_forward(model, &model->acts, inputs, B, T);
    gpt2_loss(model, targets, 0.0f, B, T);
    memcpy(losses, model->acts.losses, (size_t)B * T * sizeof(float));
}

// The most likely token at position i of the B x T of the last compute_losses, for llmc/evaluation.h.
static int most_likely_token(void* gpt2, size_t i) {
    const GPT2* model = (const GPT2*)gpt2;
    return sampler_argmax(model->acts.logits + i * model->config.padded_vocab_size, model->config.vocab_size);
}

// The mean loss on the validation data.
static double validation_loss(Trainer* t) {
    Error err;
    Batch batch = t->job.batch;
    double sum = 0.0;
    dataloader_reset(&t->job.val);
    for (int64_t i = 0; i < t->job.num_val_batches; i++) {
        training_show_task("the validation", i, t->job.num_val_batches);
        if (!dataloader_next(&t->job.val, t->inputs, t->targets, &err)) { end_with_error(t, &err); }
        gpt2_forward(&t->model, &t->model.acts, t->inputs, t->job.val_B, batch.T);
        sum += gpt2_loss(&t->model, t->targets, 0.0f, t->job.val_B, batch.T);
    }
    return sum / (double)t->job.num_val_batches;
}

static void sample_in_training(Trainer* t) {
    TrainingSample s;
    training_sample_begin(&t->job, &s);
    int n = generate(&t->model, &s.sampler, &s.prompt, 1, args->sample_tokens, -1, NULL, &s.out, NULL);
    training_sample_end(&t->job, &s, n >= 0 ? NULL : "the logits are not numbers");
}

// Computes the gradients of one step and its loss, the mean over all its micro-batches. Returns false if a signal
// requested a stop: the step is then dropped.
static bool accumulate_gradients(Trainer* t, double* loss) {
    Error err;
    Batch batch = t->job.batch;
    *loss = 0.0;
    if (args->overfit) { dataloader_reset(&t->job.train); }
    for (int64_t i = 0; i < batch.micro_steps; i++) {
        if (run_stop_signal) { return false; }
        if (!dataloader_next(&t->job.train, t->inputs, t->targets, &err)) { end_with_error(t, &err); }
        gpt2_forward(&t->model, &t->model.acts, t->inputs, batch.B, batch.T);
        double mean = gpt2_loss(&t->model, t->targets, 1.0f / (float)batch.total, batch.B, batch.T);
        gpt2_backward(&t->model, t->inputs, batch.B, batch.T, i == 0);
        *loss += mean / (double)batch.micro_steps;
    }
    return true;
}

// Ends a run after too many consecutive steps that were not finite.
__attribute__((noreturn)) static void give_up(Trainer* t) {
    // a step that is not finite does not change the weights, so they are good unless an earlier update overflowed them
    bool good = params_check(&t->model.config, t->model.params_memory, FLT_MAX, NULL);
    if (good && args->output) { save_checkpoint(t, true); }
    training_give_up(&t->job, good);
}

static void train_step(Trainer* t) {
    RunState* run = &t->job.run;
    StepReport r = {.step = run->step + 1, .learning_rate = lr_at(&t->job.schedule, run->step)};
    double start = time_ms();
    if (!accumulate_gradients(t, &r.loss)) { return; }
    r.norm = gpt2_gradient_norm(&t->model);
    bool sound = training_judge(&t->job, &r);
    training_count(&t->job, &r, sound);
    if (sound) {
        int64_t updates = r.step - run->skipped_steps;
        AdamW optimizer = {r.learning_rate, args->beta1, args->beta2, args->eps, args->weight_decay, 1.0f, 1.0f, 1.0f};
        optimizer.bias1 = (float)(1.0 - pow(args->beta1, (double)updates));
        optimizer.bias2 = (float)(1.0 - pow(args->beta2, (double)updates));
        if (args->clip > 0 && r.norm > args->clip) { optimizer.gradient_scale = (float)(args->clip / r.norm); }
        Muon muon = {lr_at(&t->job.muon_schedule, run->step), args->muon_momentum, args->weight_decay,
                     optimizer.gradient_scale};
        gpt2_update(&t->model, &optimizer, uses_muon() ? &muon : NULL);
    }
    training_step_done(&t->job);
    r.ms = time_ms() - start;
    training_report(&t->job, &r, 0, "fp32", "");
    if (t->job.nonfinite_in_a_row >= args->max_nonfinite) { give_up(t); }
}

// Opens everything that a run needs, in an order that finds all mistakes of the user before anything is written.
static void trainer_open(Trainer* t) {
    ModelSource source;
    training_find_checkpoint(&t->job);
    training_open_model(&t->job, &source);
    choose_batch(&source.config, 4, 1e9 * machine_memory_gb(), training_bytes); // more would not be faster
    t->job.batch = settle_batch(&source.config);
    int B = t->job.batch.B, T = t->job.batch.T;
    double memory_left = print_memory_need(&source.config, B, T);
    load_model(&t->model, &source);
    training_open_data(&t->job, &t->model.config);
    gpt2_allocate_training(&t->model);
    gpt2_allocate_batch(&t->model, B, T);
    t->inputs = (int*)malloc_check((size_t)B * T * sizeof(int));
    t->targets = (int*)malloc_check((size_t)B * T * sizeof(int));
    open_questions(&t->hellaswag, B, T, source.config.vocab_size);
    if (args->hellaswag) { evaluator_open(&t->evaluator, compute_losses, NULL, &t->model, B, T); }
    training_allocate_copy(&t->job, &t->model.config, memory_left);
    limit_threads(training_flops_per_token(&t->model.config, T) * B * T);
    t->job.run.loss_scale = 1.0;
    training_begin(&t->job, &t->model.config, t->model.params_memory, t->model.m_memory, t->model.v_memory);
    output_release();
    training_next_step(&t->job);
}

// Validation, and --hellaswag.
static void validate(Trainer* t) {
    double start = time_ms();
    double accuracy = args->hellaswag ? evaluate_hellaswag(&t->evaluator, &t->hellaswag) : 0.0;
    if (args->hellaswag) { logger_eval(&t->job.logger, t->job.run.step, accuracy); }
    if (t->job.has_val) { training_validated(&t->job, validation_loss(t), start); }
}

// The training run. Returns the exit code.
static int train(void) {
    static Trainer trainer;
    Trainer* t = &trainer;
    trainer_open(t);
    run_will_save = args->output != NULL;
    run_install_signal_handlers();
    for (;;) {
        Due due = training_due(&t->job, run_stop_signal);
        if (due.validate) { validate(t); }
        if (due.sample) { sample_in_training(t); }
        // a signal may have arrived during validation or sampling
        t->job.tasks_step = t->job.run.step;
        due = training_due(&t->job, run_stop_signal);
        if (due.save) { save_checkpoint(t, due.stop); }
        if (due.stop) { break; }
        train_step(t);
    }
    int code = training_end(&t->job);
    if (args->hellaswag) {
        eval_close(&t->hellaswag);
        evaluator_close(&t->evaluator);
    }
    free(t->inputs);
    free(t->targets);
    gpt2_free(&t->model);
    return code;
}

// ================================================================================================
// 5. other tasks
// ================================================================================================

// The model that -e names, its weights in memory, and its vocabulary.
typedef struct {
    GPT2 model;
    ModelSource source;
    Tokenizer tokenizer;
    const Tokenizer* vocabulary; // &tokenizer, or NULL if there is none
    double load_ms;
} LoadedModel;

// Opens the model that -e names. files: what --eval evaluates, or NULL.
static void loaded_model_open(LoadedModel* m, const EvalFiles* files) {
    double start = time_ms();
    bool has_tokenizer;
    model_source_open(&m->source, resolve_model_path(args->model), &has_tokenizer, &m->tokenizer);
    m->vocabulary = has_tokenizer ? &m->tokenizer : NULL;
    if (files) { eval_files_check(files, m->vocabulary); }
    if (args->prompt && args->prompt[0]) { prompt_check_vocabulary(m->vocabulary); }
    load_model(&m->model, &m->source);
    // generating a token is bound by reading the weights: one of them takes as long as about 100 FLOPs
    limit_threads(100.0 * (double)num_parameters(&m->model.config));
    m->load_ms = time_ms() - start;
}

static void loaded_model_close(LoadedModel* m) {
    if (m->vocabulary) { tokenizer_free(&m->tokenizer); }
    gpt2_free(&m->model);
}

// --prompt and the like: continues texts, one after the other. Returns the exit code.
static int sample(void) {
    LoadedModel m;
    Prompts prompts;
    Sampler sampler = flags_sampler();
    loaded_model_open(&m, NULL);
    prompts_read(&prompts, m.vocabulary, &m.source);
    Continuations c = continuations_begin(&prompts, m.vocabulary, stdout);
    GenerationTimes times = {0, 0, 0, 0};
    for (int b = 0; b < prompts.B; b++) {
        Sampler own = sampler;
        own.rng = prompts_rng(&sampler, b);
        c.counts[b] = generate(&m.model, &own, prompts.tokens + (size_t)b * prompts.T, prompts.lengths[b],
                               args->num_tokens, prompts.stop, NULL, &c.texts[b], &times);
        if (c.counts[b] < 0) { die("%s: its logits are not numbers", args->model); }
        continuations_end(&c, b);
    }
    prompts_print_times(&prompts, c.counts, m.model.config.max_seq_len, m.load_ms, &times);
    continuations_free(&c);
    prompts_free(&prompts);
    loaded_model_close(&m);
    return EXIT_SUCCESS;
}

// --eval, or --hellaswag without -i. Returns the exit code.
static int evaluate(void) {
    LoadedModel m;
    EvalFiles files = eval_files_find();
    loaded_model_open(&m, &files);
    int B = evaluation_rows(&files), T = settle_batch(&m.model.config).T;
    activations_allocate(&m.model.acts, &m.model.config, B, T, true);
    evaluate_files(&files, compute_losses, most_likely_token, &m.model, B, T, m.vocabulary, m.model.config.vocab_size);
    loaded_model_close(&m);
    return EXIT_SUCCESS;
}

// --bench: times the prompt and the generation of --num-samples texts, one after the other. Returns the exit code.
static int bench(void) {
    LoadedModel m;
    loaded_model_open(&m, NULL);
    Bench b = bench_begin(&m.model.config, "fp32");
    Sampler sampler = flags_sampler();
    for (int repeat = -1; repeat < BENCH_REPEATS; repeat++) { // the first one warms up
        GenerationTimes times = {0, 0, 0, 0};
        for (int text = 0; text < b.B; text++) {
            if (generate(&m.model, &sampler, b.tokens, b.prompt, b.decode + 1, -1, NULL, NULL, &times) < 0) {
                die("%s: its logits are not numbers", args->model);
            }
        }
        bench_add(&b, repeat, &times);
    }
    bench_end(&b);
    loaded_model_close(&m);
    return EXIT_SUCCESS;
}

// --plan. Returns the exit code.
static int plan(void) {
    double have = memory_flag();
    print_plans(have > 0 ? have : 1e9 * machine_memory_gb(), 1.0, 4 * 1024, training_bytes);
    return EXIT_SUCCESS;
}

// ================================================================================================
// 6. command line
// ================================================================================================

#ifndef TESTING
// A thread that waits in libgomp (GCC's OpenMP runtime) spins for milliseconds by default. On a machine with other work it then
// occupies the core that the awaited thread needs. libgomp reads its settings before main begins, so the program starts itself
// again with a spin of 20 microseconds, after which a thread sleeps. Medians in ms of a step, 6 layers of 192 channels, 2 cores
// of an AMD EPYC, 2026-11-30.
//
//     spin, microseconds                    2.5     20    250
//     nothing else runs                     194    122    123
//     4 endless loops run                   782    617   1968
//     6 loops that start processes run      335    415   1707
//
// libgomp limits the number of iterations, not the time. An iteration takes 1 to 50 ns, so one is timed first.
static void spin_briefly(char** argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) { return; }
    const int turns = 200;
    volatile int flag = 0;
    char count[16];
    double ms = INFINITY; // of the fastest of 10 attempts: a slower one was interrupted
    for (int attempt = 0; attempt < 10; attempt++) {
        double start = time_ms();
        for (int i = 0; i < turns && !flag; i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        ms = fmin(ms, time_ms() - start);
    }
    snprintf(count, sizeof(count), "%d", (int)fmin(fmax(0.02 / ms * turns, 100), 100000));
    setenv("GOMP_SPINCOUNT", count, 1);
    execv("/proc/self/exe", argv); // returns only if it fails; the program then goes on with the default
}

int main(int argc, char** argv) {
    open_standard_streams();
    spin_briefly(argv);
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); // print each line at once, even to a file or a pipe
    if (argc == 1) { run_demo(argv[0]); }
    parse_flags(argc, argv,
                "GPT-2 on the CPU: trains, continues texts, evaluates, times, exports. Without flags: a demo.");
    switch (chosen_task()) {
    case TASK_SAMPLE:
        return sample();
    case TASK_EVALUATE:
        return evaluate();
    case TASK_BENCH:
        return bench();
    case TASK_EXPORT:
        return export_model();
    case TASK_PLAN:
        return plan();
    case TASK_TRAIN:
        break;
    }
    run_heed_interrupt();
    choose_recipe();
    output_begin(!args->verbose); // an error of the set-up stands alone
    print_flags();
    return train();
}
#endif
