/*
The reference of each op: one function that takes and returns floats, computes in double, and runs on all cores. It uses
std::thread because the plain nvcc line has no -fopenmp. The code is written to be easy to read, not to be fast.
*/
#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

// Calls fn(i) for i in 0 .. n-1 from all cores, in any order. A thread takes a few indices at a time, because one index
// may need many times the work of another, as in causal attention.
inline void parallel_for(size_t n, const std::function<void(size_t)>& fn) {
    size_t num_threads = std::max<size_t>(1, std::min<size_t>(std::thread::hardware_concurrency(), n));
    size_t step = std::max<size_t>(1, n / (num_threads * 32));
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t begin; (begin = next.fetch_add(step)) < n;) {
            for (size_t i = begin; i < std::min(n, begin + step); i++) { fn(i); }
        }
    };
    std::vector<std::thread> threads;
    for (size_t t = 1; t < num_threads; t++) { threads.emplace_back(work); }
    work();
    for (std::thread& thread : threads) { thread.join(); }
}

// ---- a sample of the rows of a matrix ------------------------------------------------------------------

// Returns these rows of x (N,C), or nothing if x is NULL.
inline std::vector<float> rows_of(const float* x, const std::vector<size_t>& rows, size_t C) {
    std::vector<float> out(x ? rows.size() * C : 0);
    float* to = out.data();
    parallel_for(x ? rows.size() : 0, [=, &rows](size_t i) { memcpy(to + i * C, x + rows[i] * C, C * sizeof(float)); });
    return out;
}
// Copies `values`, one row of C after the other, to these rows of x (N,C).
inline void put_rows(float* x, const std::vector<float>& values, const std::vector<size_t>& rows, size_t C) {
    const float* from = values.data();
    parallel_for(rows.size(), [=, &rows](size_t i) { memcpy(x + rows[i] * C, from + i * C, C * sizeof(float)); });
}

// ---- gelu, tanh approximation: Hendrycks and Gimpel 2016, arXiv:1606.08415 ----------------------------

inline void gelu_forward_cpu(float* out, const float* inp, size_t n) {
    const double scale = sqrt(2.0 / M_PI);
    parallel_for((n + 4095) / 4096, [=](size_t chunk) {
        for (size_t i = chunk * 4096; i < n && i < (chunk + 1) * 4096; i++) {
            double x = inp[i];
            out[i] = (float)(0.5 * x * (1.0 + tanh(scale * (x + 0.044715 * x * x * x))));
        }
    });
}

// ---- residual stream: out = inp1 + inp2 --------------------------------------------------------

inline void residual_forward_cpu(float* out, const float* inp1, const float* inp2, size_t n) {
    parallel_for((n + 4095) / 4096, [=](size_t chunk) {
        for (size_t i = chunk * 4096; i < n && i < (chunk + 1) * 4096; i++) {
            out[i] = (float)((double)inp1[i] + (double)inp2[i]);
        }
    });
}

// ---- layernorm: Ba et al. 2016, arXiv:1607.06450 -------------------------------------------------

constexpr float NORM_EPSILON = 1e-5f; // GPT-2's

// mean, rstd (N) of the rows of inp (N,C)
inline void layernorm_statistics_cpu(float* mean, float* rstd, const float* inp, int N, int C) {
    parallel_for(N, [=](size_t row) {
        const float* x = inp + row * C;
        double sum = 0, squares = 0;
        for (int c = 0; c < C; c++) { sum += x[c]; }
        double m = sum / C;
        for (int c = 0; c < C; c++) { squares += (x[c] - m) * (x[c] - m); }
        mean[row] = (float)m;
        rstd[row] = (float)(1.0 / sqrt(squares / C + NORM_EPSILON));
    });
}

// out (N,C), mean, rstd (N) | inp (N,C), weight, bias (C)
inline void layernorm_forward_cpu(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                  const float* bias, int N, int C, float epsilon = NORM_EPSILON) {
    parallel_for(N, [=](size_t row) {
        const float* x = inp + row * C;
        double sum = 0, squares = 0;
        for (int c = 0; c < C; c++) { sum += x[c]; }
        double m = sum / C;
        for (int c = 0; c < C; c++) { squares += (x[c] - m) * (x[c] - m); }
        double r = 1.0 / sqrt(squares / C + epsilon);
        for (int c = 0; c < C; c++) { out[row * C + c] = (float)((x[c] - m) * r * weight[c] + bias[c]); }
        mean[row] = (float)m;
        rstd[row] = (float)r;
    });
}

// dinp (N,C) = dresidual (N,C) + gradient of inp; dweight, dbias (C) += their gradients. dresidual may be NULL.
inline void layernorm_backward_cpu(float* dinp, float* dweight, float* dbias, const float* dout, const float* dresidual,
                                   const float* inp, const float* weight, const float* mean, const float* rstd, int N,
                                   int C) {
    const int num_chunks = 64;
    std::vector<double> sums((size_t)num_chunks * 2 * C, 0.0); // per chunk of rows: dweight, dbias
    double* partial = sums.data();
    parallel_for(num_chunks, [=](size_t chunk) {
        double *dw = partial + chunk * 2 * C, *db = dw + C;
        for (size_t row = N * chunk / num_chunks; row < N * (chunk + 1) / num_chunks; row++) {
            const float *x = inp + row * C, *dy = dout + row * C;
            double m = mean[row], r = rstd[row], sum = 0, dot = 0;
            for (int c = 0; c < C; c++) {
                double norm = (x[c] - m) * r, dnorm = (double)dy[c] * weight[c];
                sum += dnorm;
                dot += dnorm * norm;
                dw[c] += dy[c] * norm;
                db[c] += dy[c];
            }
            for (int c = 0; c < C; c++) {
                double norm = (x[c] - m) * r, dnorm = (double)dy[c] * weight[c];
                double d = r * (dnorm - sum / C - norm * dot / C);
                dinp[row * C + c] = (float)((dresidual ? dresidual[row * C + c] : 0.0) + d);
            }
        }
    });
    for (int c = 0; c < C; c++) {
        double dw = dweight[c], db = dbias[c];
        for (int chunk = 0; chunk < num_chunks; chunk++) {
            dw += partial[(size_t)chunk * 2 * C + c];
            db += partial[(size_t)chunk * 2 * C + C + c];
        }
        dweight[c] = (float)dw;
        dbias[c] = (float)db;
    }
}

// ---- matrix product ------------------------------------------------------------------------

// out[i][j] = start[i][j] + sum over k of a[i*a_row + k*a_column] * b[k*b_row + j*b_column]. out and start are (M,N); a
// start of NULL means zeros. The work is cut into blocks of BM x BN elements of out and BK of k, whose operands are
// copied to doubles in the order in which they are read. The inner loops sum tiles of RM x RN in registers.
inline void matmul_cpu(float* out, const float* start, const float* a, size_t a_row, size_t a_column, const float* b,
                       size_t b_row, size_t b_column, size_t M, size_t N, size_t K) {
    const size_t BM = 64, BN = 64, BK = 256, RM = 4, RN = 4;
    parallel_for((M + BM - 1) / BM, [=](size_t block) {
        std::vector<double> sums(BM * BN), a_block(BM * BK), b_block(BK * BN);
        size_t i0 = block * BM, rows = M - i0 < BM ? M - i0 : BM;
        for (size_t j0 = 0; j0 < N; j0 += BN) {
            size_t columns = N - j0 < BN ? N - j0 : BN;
            std::fill(sums.begin(), sums.end(), 0.0);
            for (size_t k0 = 0; k0 < K; k0 += BK) {
                size_t depth = K - k0 < BK ? K - k0 : BK;
                // a_block: panels of RM rows, as [panel][k][row]; b_block: panels of RN columns, as [panel][k][column]
                for (size_t i = 0; i < BM; i++) {
                    for (size_t k = 0; k < depth; k++) {
                        double x = i < rows ? a[(i0 + i) * a_row + (k0 + k) * a_column] : 0.0;
                        a_block[(i / RM * BK + k) * RM + i % RM] = x;
                    }
                }
                for (size_t k = 0; k < depth; k++) {
                    for (size_t j = 0; j < BN; j++) {
                        double x = j < columns ? b[(k0 + k) * b_row + (j0 + j) * b_column] : 0.0;
                        b_block[(j / RN * BK + k) * RN + j % RN] = x;
                    }
                }
                for (size_t i = 0; i < rows; i += RM) {
                    for (size_t j = 0; j < columns; j += RN) {
                        double tile[RM][RN] = {};
                        const double *x = &a_block[i * BK], *y = &b_block[j * BK];
                        for (size_t k = 0; k < depth; k++, x += RM, y += RN) {
                            for (size_t ii = 0; ii < RM; ii++) {
                                for (size_t jj = 0; jj < RN; jj++) { tile[ii][jj] += x[ii] * y[jj]; }
                            }
                        }
                        for (size_t ii = 0; ii < RM; ii++) {
                            for (size_t jj = 0; jj < RN; jj++) { sums[(i + ii) * BN + j + jj] += tile[ii][jj]; }
                        }
                    }
                }
            }
            for (size_t i = 0; i < rows; i++) {
                for (size_t j = 0; j < columns; j++) {
                    size_t at = (i0 + i) * N + j0 + j;
                    out[at] = (float)(sums[i * BN + j] + (start ? (double)start[at] : 0.0));
                }
            }
        }
    });
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC) + residual (N,OC); bias and residual may be NULL
inline void matmul_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                               const float* residual, size_t N, size_t C, size_t OC) {
    std::vector<float> start(N * OC);
    for (size_t i = 0; i < N * OC; i++) { start[i] = (bias ? bias[i % OC] : 0.0f) + (residual ? residual[i] : 0.0f); }
    matmul_cpu(out, start.data(), inp, C, 1, weight, 1, C, N, OC, C);
}
// dinp (N,C) = dout (N,OC) weight (OC,C), times gelu'(pre_gelu (N,C)) unless pre_gelu is NULL
inline void matmul_backward_input_cpu(float* dinp, const float* dout, const float* weight, const float* pre_gelu,
                                      size_t N, size_t C, size_t OC) {
    matmul_cpu(dinp, NULL, dout, OC, 1, weight, C, 1, N, C, OC);
    if (!pre_gelu) { return; }
    parallel_for(N, [=](size_t row) {
        for (size_t i = row * C; i < (row + 1) * C; i++) {
            double x = pre_gelu[i], scale = sqrt(2.0 / M_PI), t = tanh(scale * (x + 0.044715 * x * x * x));
            dinp[i] *= (float)(0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3.0 * 0.044715 * x * x));
        }
    });
}
// dweight (OC,C) = start + dout (N,OC)^T inp (N,C); start may be NULL
inline void matmul_backward_weight_cpu(float* dweight, const float* start, const float* dout, const float* inp,
                                       size_t N, size_t C, size_t OC) {
    matmul_cpu(dweight, start, dout, 1, OC, inp, C, 1, OC, C, N);
}

// ---- classifier: rows of logits (N, Vp); the first V columns are the vocabulary, the others padding ----

// Returns log(sum(exp(row))) over the first V logits of the row.
inline double logsumexp_cpu(const float* row, int V) {
    double max = -INFINITY, sum = 0.0;
    for (int i = 0; i < V; i++) { max = std::max(max, (double)row[i]); }
    for (int i = 0; i < V; i++) { sum += exp(row[i] - max); }
    return max + log(sum);
}

// out = softmax(inp) per row; out, inp (N, Vp); the padding of out is 0
inline void softmax_forward_cpu(float* out, const float* inp, int N, int V, int Vp) {
    parallel_for(N, [=](size_t n) {
        double lse = logsumexp_cpu(inp + n * Vp, V);
        for (int i = 0; i < Vp; i++) { out[n * Vp + i] = i < V ? (float)exp(inp[n * Vp + i] - lse) : 0.0f; }
    });
}

// losses = log(sum(exp(logits))) - logits[target] per row; losses, targets (N), logits (N, Vp)
inline void crossentropy_forward_cpu(float* losses, const float* logits, const float* targets, int N, int V, int Vp) {
    parallel_for(N, [=](size_t n) {
        losses[n] = (float)(logsumexp_cpu(logits + n * Vp, V) - logits[n * Vp + (size_t)targets[n]]);
    });
}

// dlogits = (probs - onehot(target)) * dloss; dlogits, probs (N, Vp), targets (N); the padding of dlogits is 0
inline void crossentropy_softmax_backward_cpu(float* dlogits, const float* probs, const float* targets, float dloss,
                                              int N, int V, int Vp) {
    parallel_for(N, [=](size_t n) {
        for (int i = 0; i < Vp; i++) {
            double p = i < V ? probs[n * Vp + i] : 0.0;
            dlogits[n * Vp + i] = (float)((p - (i == (int)targets[n])) * dloss);
        }
    });
}

// the losses and their gradient, from the logits; losses, targets (N), dlogits, logits (N, Vp); the padding of dlogits
// is 0
inline void fused_classifier_cpu(float* dlogits, float* losses, const float* logits, const float* targets, float dloss,
                                 int N, int V, int Vp) {
    parallel_for(N, [=](size_t n) {
        const float* row = logits + n * Vp;
        double lse = logsumexp_cpu(row, V);
        losses[n] = (float)(lse - row[(size_t)targets[n]]);
        for (int i = 0; i < Vp; i++) {
            double p = i < V ? exp(row[i] - lse) : 0.0;
            dlogits[n * Vp + i] = (float)((p - (i == (int)targets[n])) * dloss);
        }
    });
}

// ---- optimizer ------------------------------------------------------------------------------------

// Returns the square root of the sum of squares of grads (n).
inline double global_norm_cpu(const float* grads, size_t n) {
    size_t num_chunks = (n + 65535) / 65536;
    std::vector<double> sums(num_chunks, 0.0);
    double* chunk_sums = sums.data();
    parallel_for(num_chunks, [=](size_t chunk) {
        for (size_t i = chunk * 65536; i < n && i < (chunk + 1) * 65536; i++) {
            chunk_sums[chunk] += (double)grads[i] * grads[i];
        }
    });
    double sum = 0.0;
    for (double chunk_sum : sums) { sum += chunk_sum; }
    return sqrt(sum);
}

// Update number t (1, 2, ...) of AdamW. Reads params0, m0, v0 and writes params, m, v, all (n). The gradients are
// grads * grad_scale. Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
inline void adamw_cpu(float* params, float* m, float* v, const float* params0, const float* m0, const float* v0,
                      const float* grads, size_t n, double grad_scale, int t, float learning_rate, float beta1,
                      float beta2, float eps, float weight_decay) {
    double bias1 = 1.0 - pow(beta1, t), bias2 = 1.0 - pow(beta2, t);
    parallel_for((n + 4095) / 4096, [=](size_t chunk) {
        for (size_t i = chunk * 4096; i < n && i < (chunk + 1) * 4096; i++) {
            double g = grads[i] * grad_scale, p = params0[i];
            double m1 = beta1 * (double)m0[i] + (1.0 - beta1) * g, v1 = beta2 * (double)v0[i] + (1.0 - beta2) * g * g;
            m[i] = (float)m1;
            v[i] = (float)v1;
            params[i] = (float)(p - learning_rate * (m1 / bias1 / (sqrt(v1 / bias2) + eps) + weight_decay * p));
        }
    });
}

// ---- decoding: one new token for each of B sequences -----------------------------------------------

// x (B,C) = wte[token] + wpe[position]; tokens and positions (B) are floats, as in every buffer of the harness
inline void decode_embed_cpu(float* x, const float* tokens, const float* positions, const float* wte, const float* wpe,
                             int B, int C) {
    parallel_for(B, [=](size_t b) {
        const float *t = wte + (size_t)tokens[b] * C, *p = wpe + (size_t)fmaxf(positions[b], 0.0f) * C;
        for (int c = 0; c < C; c++) { x[b * C + c] = (float)((double)t[c] + (double)p[c]); }
    });
}

// out (B,OC) = gelu(layernorm(x (B,K)) weight (OC,K)^T + bias (OC)) + residual (B,OC). GELU is applied only if `gelu`
// is true, layernorm only if norm_weight is not NULL. bias and residual may be NULL.
inline void decode_matvec_cpu(float* out, const float* x, const float* norm_weight, const float* norm_bias,
                              const float* weight, const float* bias, const float* residual, bool gelu, int B, int K,
                              int OC, float epsilon) {
    std::vector<double> normalised((size_t)B * K);
    double* n = normalised.data();
    for (int b = 0; b < B; b++) {
        const float* from = x + (size_t)b * K;
        double sum = 0.0, squares = 0.0;
        for (int k = 0; k < K; k++) { sum += from[k]; }
        for (int k = 0; k < K; k++) { squares += (from[k] - sum / K) * (from[k] - sum / K); }
        for (int k = 0; k < K; k++) {
            double plain = from[k], scaled = (plain - sum / K) / sqrt(squares / K + epsilon);
            n[(size_t)b * K + k] = norm_weight ? scaled * norm_weight[k] + norm_bias[k] : plain;
        }
    }
    parallel_for(OC, [=](size_t row) {
        for (int b = 0; b < B; b++) {
            double sum = bias ? bias[row] : 0.0;
            for (int k = 0; k < K; k++) { sum += n[(size_t)b * K + k] * weight[row * K + k]; }
            if (gelu) { sum = 0.5 * sum * (1.0 + tanh(sqrt(2.0 / M_PI) * (sum + 0.044715 * sum * sum * sum))); }
            out[(size_t)b * OC + row] = (float)(sum + (residual ? residual[(size_t)b * OC + row] : 0.0));
        }
    });
}

// dinp = dout * derivative of x (1 + t) / 2, where t = tanh(sqrt(2 / pi) (x + 0.044715 x^3))
inline void gelu_backward_cpu(float* dinp, const float* dout, const float* inp, size_t n) {
    const double scale = sqrt(2.0 / M_PI);
    parallel_for((n + 4095) / 4096, [=](size_t chunk) {
        for (size_t i = chunk * 4096; i < n && i < (chunk + 1) * 4096; i++) {
            double x = inp[i], t = tanh(scale * (x + 0.044715 * x * x * x));
            double slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3.0 * 0.044715 * x * x);
            dinp[i] = (float)(dout[i] * slope);
        }
    });
}

// ---- embeddings: inp (B,T) token ids, wte (V,C), wpe (T,C) ------------------------------------

inline void encoder_forward_cpu(float* out, const float* inp, const float* wte, const float* wpe, int B, int T, int C) {
    parallel_for((size_t)B * T, [=](size_t i) {
        const float *token = wte + (size_t)inp[i] * C, *position = wpe + (i % T) * C;
        for (int c = 0; c < C; c++) { out[i * C + c] = (float)((double)token[c] + position[c]); }
    });
}

// Adds the gradients to dwte (V,C) and dwpe (T,C). Each parallel task handles up to eight columns.
inline void encoder_backward_cpu(float* dwte, float* dwpe, const float* dout, const float* inp, int B, int T, int C,
                                 int V) {
    parallel_for((C + 7) / 8, [=](size_t group) {
        size_t width = std::min((size_t)8, C - 8 * group);
        std::vector<double> tokens((size_t)V * width), positions((size_t)T * width);
        for (size_t i = 0; i < (size_t)B * T; i++) {
            for (size_t k = 0; k < width; k++) {
                double d = dout[i * C + group * 8 + k];
                tokens[(size_t)inp[i] * width + k] += d;
                positions[i % T * width + k] += d;
            }
        }
        for (size_t j = 0; j < tokens.size(); j++) {
            float* p = dwte + j / width * C + group * 8 + j % width;
            *p = (float)(*p + tokens[j]);
        }
        for (size_t j = 0; j < positions.size(); j++) {
            float* p = dwpe + j / width * C + group * 8 + j % width;
            *p = (float)(*p + positions[j]);
        }
    });
}

// ---- bias gradient: dbias (OC) += column sums of dout (N,OC) ----------------------------------

// Each parallel task sums 16 columns: one cache line of floats per row.
inline void matmul_backward_bias_cpu(float* dbias, const float* dout, int N, int OC) {
    parallel_for((OC + 15) / 16, [=](size_t group) {
        int first = (int)group * 16, num = OC - first < 16 ? OC - first : 16;
        double sum[16] = {};
        for (int row = 0; row < N; row++) {
            for (int k = 0; k < num; k++) { sum[k] += dout[(size_t)row * OC + first + k]; }
        }
        for (int k = 0; k < num; k++) { dbias[first + k] = (float)(dbias[first + k] + sum[k]); }
    });
}

// Attention of one new token per sequence. Its key and value, from qkv (B,3,C), are first stored as row positions[b] of
// keys and values (B,capacity,C). Then out (B,C) is the attention over rows 0 .. positions[b].
inline void decode_attention_cpu(float* out, float* keys, float* values, const float* qkv, const float* positions,
                                 int B, int C, int NH, int capacity) {
    int HS = C / NH;
    parallel_for((size_t)B * NH, [=](size_t i) {
        size_t b = i / NH, first = i % NH * HS; // first: index of the head's first element in a row of C
        int now = (int)positions[b];            // -1: the text has ended
        if (now < 0) { return; }
        const float* q = qkv + b * 3 * C + first;
        float *k = keys + b * capacity * C + first, *v = values + b * capacity * C + first;
        memcpy(k + (size_t)now * C, q + C, HS * sizeof(float));
        memcpy(v + (size_t)now * C, q + 2 * C, HS * sizeof(float));
        std::vector<double> weights(now + 1), sums(HS);
        double max = -INFINITY, total = 0.0;
        for (int t = 0; t <= now; t++) {
            for (int d = 0; d < HS; d++) { weights[t] += (double)q[d] * k[(size_t)t * C + d] / sqrt((double)HS); }
            max = fmax(max, weights[t]);
        }
        for (int t = 0; t <= now; t++) {
            double weight = exp(weights[t] - max);
            total += weight;
            for (int d = 0; d < HS; d++) { sums[d] += weight * v[(size_t)t * C + d]; }
        }
        for (int d = 0; d < HS; d++) { out[b * C + first + d] = (float)(sums[d] / total); }
    });
}

// copies rows 0 .. T-1 of keys and values (B,capacity,C) from qkv (B,T,3,C)
inline void decode_cache_fill_cpu(float* keys, float* values, const float* qkv, int B, int T, int C, int capacity) {
    parallel_for((size_t)B * T, [=](size_t i) {
        size_t to = (i / T * capacity + i % T) * C;
        memcpy(keys + to, qkv + i * 3 * C + C, C * sizeof(float));
        memcpy(values + to, qkv + i * 3 * C + 2 * C, C * sizeof(float));
    });
}

// ---- attention, causal, scale 1/sqrt(HS): Vaswani et al. 2017, arXiv:1706.03762 -----------------

// out (B,T,NH,HS), lse (B,NH,T) or NULL: ln(sum of exp(scale * q.k)), qkv (B,T,3,NH,HS), C = NH * HS
inline void attention_forward_cpu(float* out, float* lse, const float* qkv, int B, int T, int C, int NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    parallel_for((size_t)B * NH, [=](size_t head) {
        size_t b = head / NH, h = head % NH;
        const float* first = qkv + b * T * 3 * C + h * HS;
        // keys as (HS,T) and values as (T,HS), so that the inner loops run over contiguous elements
        std::vector<double> keys(HS * T), values(T * HS), p(T), o(HS);
        for (size_t t = 0; t < (size_t)T; t++) {
            for (size_t d = 0; d < HS; d++) {
                keys[d * T + t] = first[t * 3 * C + C + d];
                values[t * HS + d] = first[t * 3 * C + 2 * C + d];
            }
        }
        for (size_t t = 0; t < (size_t)T; t++) {
            std::fill(p.begin(), p.end(), 0.0);
            std::fill(o.begin(), o.end(), 0.0);
            for (size_t d = 0; d < HS; d++) {
                double q = first[t * 3 * C + d] * scale;
                const double* key = &keys[d * T];
                for (size_t k = 0; k <= t; k++) { p[k] += q * key[k]; }
            }
            double max = *std::max_element(p.begin(), p.begin() + t + 1), sum = 0.0;
            for (size_t k = 0; k <= t; k++) {
                p[k] = exp(p[k] - max);
                sum += p[k];
                const double* value = &values[k * HS];
                for (size_t d = 0; d < HS; d++) { o[d] += p[k] * value[d]; }
            }
            for (size_t d = 0; d < HS; d++) { out[(b * T + t) * C + h * HS + d] = (float)(o[d] / sum); }
            if (lse) { lse[head * T + t] = (float)(max + log(sum)); }
        }
    });
}

// Like attention_forward_cpu, but only for the elements of lse that `rows` lists, and their rows of out (HS). If not
// causal, each query sees all keys.
inline void attention_forward_rows_cpu(float* out, float* lse, const float* qkv, int B, int T, int C, int NH,
                                       const std::vector<size_t>& rows, bool causal = true) {
    if (causal && rows.size() == (size_t)B * NH * T) { return attention_forward_cpu(out, lse, qkv, B, T, C, NH); }
    size_t HS = C / NH, length = T, stride = 3 * (size_t)C;
    double scale = 1.0 / sqrt((double)HS);
    parallel_for(rows.size(), [=, &rows](size_t i) {
        size_t t = rows[i] % length, h = rows[i] / length % NH, b = rows[i] / length / NH;
        const float *first = qkv + b * length * stride + h * HS, *q = first + t * stride;
        size_t num_keys = causal ? t + 1 : length;
        std::vector<double> p(num_keys), o(HS);
        double max = -INFINITY, sum = 0.0;
        for (size_t k = 0; k < num_keys; k++) {
            const float* key = first + k * stride + C;
            for (size_t d = 0; d < HS; d++) { p[k] += (double)q[d] * key[d]; }
            p[k] *= scale;
            max = std::max(max, p[k]);
        }
        for (size_t k = 0; k < num_keys; k++) {
            const float* value = first + k * stride + 2 * C;
            p[k] = exp(p[k] - max);
            sum += p[k];
            for (size_t d = 0; d < HS; d++) { o[d] += p[k] * value[d]; }
        }
        for (size_t d = 0; d < HS; d++) { out[(b * length + t) * C + h * HS + d] = (float)(o[d] / sum); }
        if (lse) { lse[rows[i]] = (float)(max + log(sum)); }
    });
}
// The rows of lse (B,NH,T) that belong to these tokens (B,T).
inline std::vector<size_t> attention_rows(const std::vector<size_t>& tokens, int T, int NH) {
    std::vector<size_t> rows;
    for (size_t token : tokens) {
        for (size_t h = 0; h < (size_t)NH; h++) { rows.push_back((token / T * NH + h) * T + token % T); }
    }
    return rows;
}

// Adds the newest token of each text to its set of bits, seen (B, ceil(V/32)), and writes the logits (B,Vp) with the repetition
// penalty for the tokens in it. The words of the sets are floats.
inline void decode_sample_penalize_cpu(float* seen, float* penalized, const float* seen_before, const float* logits,
                                       const float* newest, float penalty, int B, int V, int Vp) {
    int words = (V + 31) / 32;
    for (int b = 0; b < B; b++) {
        for (int v = 0; v < Vp; v++) {
            float logit = logits[(size_t)b * Vp + v];
            bool in_set = v < V && ((uint32_t)seen_before[b * words + v / 32] >> v % 32 & 1 || v == (int)newest[b]);
            penalized[(size_t)b * Vp + v] = !in_set ? logit : logit > 0.0f ? logit / penalty : logit * penalty;
        }
        for (int i = 0; i < words; i++) {
            uint32_t bits = (uint32_t)seen_before[b * words + i];
            if (newest[b] >= 0.0f && (int)newest[b] / 32 == i) { bits |= 1u << (int)newest[b] % 32; }
            seen[b * words + i] = (float)bits;
        }
    }
}

// Samples tokens (B) from logits (B,Vp), of which V are used. rng (B) and rng_out (B) are states of xorshift64*, as
// floats. The candidates are sorted, then cut by top_k, top_p and min_p. The draw goes through the remaining ones in the order
// of their ids.
inline void decode_sample_cpu(float* tokens, float* rng_out, const float* logits, const float* rng, float temperature,
                              int top_k, float top_p, float min_p, int B, int V, int Vp) {
    parallel_for(B, [=](size_t b) {
        const float* row = logits + b * Vp;
        std::vector<int> ids;
        for (int i = 0; i < V; i++) {
            if (row[i] > -INFINITY) { ids.push_back(i); }
        }
        std::stable_sort(ids.begin(), ids.end(), [=](int i, int j) { return row[i] > row[j]; });
        tokens[b] = ids.empty() ? -1.0f : (float)ids[0];
        rng_out[b] = rng[b];
        if (ids.empty() || temperature == 0.0f) { return; }
        if (top_k > 0 && (size_t)top_k < ids.size()) { ids.resize(top_k); }
        float best = row[ids[0]];
        auto share = [=](int i) { return exp(((double)row[i] - best) / temperature); };
        double sum = 0.0, kept = 0.0, reached = 0.0;
        for (int i : ids) { sum += share(i); }
        size_t n = 0;
        while (n < ids.size() && (top_p == 1.0f || kept < sum * top_p)) { kept += share(ids[n++]); }
        while (share(ids[n - 1]) < min_p) { kept -= share(ids[--n]); } // the share of the most likely one is 1
        ids.resize(n);
        std::sort(ids.begin(), ids.end());
        uint64_t x = rng[b] != 0.0f ? (uint64_t)rng[b] : 0x9e3779b97f4a7c15ull;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        rng_out[b] = (float)x;
        double point = (double)((x * 0x2545f4914f6cdd1dull) >> 11) / 9007199254740992.0 * kept;
        float token = (float)ids.back();
        for (int i : ids) {
            reached += share(i);
            if (reached > point) {
                token = (float)i;
                break;
            }
        }
        tokens[b] = token;
    });
}

// dqkv, qkv (B,T,3,NH,HS), dout (B,T,NH,HS). The softmax is recomputed from qkv in double. So if a kernel reads rounded
// values of out and lse, the effect of their rounding counts as an error of the kernel.
inline void attention_backward_cpu(float* dqkv, const float* dout, const float* qkv, int B, int T, int C, int NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    parallel_for((size_t)B * NH, [=](size_t head) {
        size_t b = head / NH, h = head % NH, stride = 3 * (size_t)C;
        const float *q = qkv + b * T * stride + h * HS, *d = dout + b * T * C + h * HS;
        float* dq = dqkv + b * T * stride + h * HS;
        // keys and values also as (HS,T), so that the inner loops run over contiguous elements
        std::vector<double> key_columns(HS * T), value_columns(HS * T), dk(T * HS), dv(T * HS), p(T), dp(T), sum(HS);
        for (size_t t = 0; t < (size_t)T; t++) {
            for (size_t i = 0; i < HS; i++) {
                key_columns[i * T + t] = q[t * stride + C + i];
                value_columns[i * T + t] = q[t * stride + 2 * C + i];
            }
        }
        for (size_t t = 0; t < (size_t)T; t++) {
            std::fill(p.begin(), p.end(), 0.0);
            std::fill(dp.begin(), dp.end(), 0.0);
            std::fill(sum.begin(), sum.end(), 0.0);
            for (size_t i = 0; i < HS; i++) {
                double q_i = q[t * stride + i] * scale, d_i = d[t * C + i];
                const double *key = &key_columns[i * T], *value = &value_columns[i * T];
                for (size_t k = 0; k <= t; k++) { p[k] += q_i * key[k], dp[k] += d_i * value[k]; }
            }
            double max = *std::max_element(p.begin(), p.begin() + t + 1), p_sum = 0.0, p_dp = 0.0;
            for (size_t k = 0; k <= t; k++) {
                p[k] = exp(p[k] - max);
                p_sum += p[k], p_dp += p[k] * dp[k];
            }
            for (size_t k = 0; k <= t; k++) {
                double p_k = p[k] / p_sum, ds = scale * p_k * (dp[k] - p_dp / p_sum);
                const float* key = q + k * stride + C;
                for (size_t i = 0; i < HS; i++) {
                    sum[i] += ds * key[i];
                    dk[k * HS + i] += ds * q[t * stride + i];
                    dv[k * HS + i] += p_k * d[t * C + i];
                }
            }
            for (size_t i = 0; i < HS; i++) { dq[t * stride + i] = (float)sum[i]; }
        }
        for (size_t t = 0; t < (size_t)T; t++) {
            for (size_t i = 0; i < HS; i++) {
                dq[t * stride + C + i] = (float)dk[t * HS + i];
                dq[t * stride + 2 * C + i] = (float)dv[t * HS + i];
            }
        }
    });
}

// Like attention_backward_cpu, but only at these positions of these heads: dq, dk and dv of each. heads: b * NH + h.
inline void attention_backward_rows_cpu(float* dqkv, const float* dout, const float* qkv, int B, int T, int C, int NH,
                                        const std::vector<size_t>& heads, const std::vector<size_t>& positions) {
    if (heads.size() == (size_t)B * NH && positions.size() == (size_t)T) {
        return attention_backward_cpu(dqkv, dout, qkv, B, T, C, NH);
    }
    size_t HS = C / NH, length = T, stride = 3 * (size_t)C;
    double scale = 1.0 / sqrt((double)HS);
    for (size_t head : heads) {
        const float* q = qkv + head / NH * length * stride + head % NH * HS;
        const float* d = dout + head / NH * length * C + head % NH * HS;
        float* dq = dqkv + head / NH * length * stride + head % NH * HS;
        auto dot = [=](const float* x, const float* y) {
            double sum = 0.0;
            for (size_t i = 0; i < HS; i++) { sum += (double)x[i] * y[i]; }
            return sum;
        };
        // of each query: the logarithm of its softmax's sum, and the sum of p * dp over its keys
        std::vector<double> lse(length), p_dp(length);
        parallel_for(length, [&](size_t t) {
            std::vector<double> p(t + 1);
            double max = -INFINITY, sum = 0.0;
            for (size_t k = 0; k <= t; k++) {
                p[k] = scale * dot(q + t * stride, q + k * stride + C);
                max = std::max(max, p[k]);
            }
            for (size_t k = 0; k <= t; k++) {
                double weight = exp(p[k] - max);
                sum += weight;
                p_dp[t] += weight * dot(d + t * C, q + k * stride + 2 * C);
            }
            lse[t] = max + log(sum);
            p_dp[t] /= sum;
        });
        parallel_for(positions.size(), [&](size_t i) {
            size_t now = positions[i];
            std::vector<double> sums(3 * HS); // dq, dk, dv
            auto p_of = [&](size_t t, size_t k) {
                return exp(scale * dot(q + t * stride, q + k * stride + C) - lse[t]);
            };
            auto ds_of = [&](size_t t, size_t k, double p) {
                return scale * p * (dot(d + t * C, q + k * stride + 2 * C) - p_dp[t]);
            };
            for (size_t k = 0; k <= now; k++) {
                double ds = ds_of(now, k, p_of(now, k));
                for (size_t j = 0; j < HS; j++) { sums[j] += ds * q[k * stride + C + j]; }
            }
            for (size_t t = now; t < length; t++) {
                double p = p_of(t, now), ds = ds_of(t, now, p);
                for (size_t j = 0; j < HS; j++) {
                    sums[HS + j] += ds * q[t * stride + j];
                    sums[2 * HS + j] += p * d[t * C + j];
                }
            }
            for (size_t j = 0; j < 3 * HS; j++) { dq[now * stride + j / HS * C + j % HS] = (float)sums[j]; }
        });
    }
}

// ---- permute: packed (B,T,3,NH,HS) to q, k, v (B,NH,T,HS) each, and back ----

// q, k, v (B,NH,T,HS) from packed (B,T,3,NH,HS)
inline void permute_cpu(float* q, float* k, float* v, const float* packed, int B, int T, int NH, int HS) {
    parallel_for((size_t)B * T, [=](size_t token) {
        size_t b = token / T, t = token % T;
        for (size_t slot = 0; slot < 3 * (size_t)NH; slot++) {
            float* part = slot / NH == 0 ? q : slot / NH == 1 ? k : v;
            memcpy(part + ((b * NH + slot % NH) * T + t) * HS, packed + (token * 3 * NH + slot) * HS,
                   HS * sizeof(float));
        }
    });
}

// packed (B,T,3,NH,HS) from q, k, v (B,NH,T,HS)
inline void unpermute_cpu(float* packed, const float* q, const float* k, const float* v, int B, int T, int NH, int HS) {
    parallel_for((size_t)B * T, [=](size_t token) {
        size_t b = token / T, t = token % T;
        for (size_t slot = 0; slot < 3 * (size_t)NH; slot++) {
            const float* part = slot / NH == 0 ? q : slot / NH == 1 ? k : v;
            memcpy(packed + (token * 3 * NH + slot) * HS, part + ((b * NH + slot % NH) * T + t) * HS,
                   HS * sizeof(float));
        }
    });
}

// ---- Muon before and after Newton-Schulz, on num matrices (rows,cols): Liu et al. 2025, arXiv:2502.16982 ----

// The place of element (row, column) in a matrix that is transposed if it has more rows than columns.
inline size_t muon_place(size_t row, size_t column, size_t rows, size_t cols) {
    return rows > cols ? column * rows + row : row * cols + column;
}

inline void muon_prepare_cpu(float* x, float* m, const float* m0, const float* grads, int num, size_t rows, size_t cols,
                             double grad_scale, double momentum) {
    size_t size = rows * cols;
    for (size_t matrix = 0; matrix < (size_t)num; matrix++, x += size, m += size, m0 += size, grads += size) {
        double squares = 0.0;
        std::vector<double> u(size);
        for (size_t i = 0; i < size; i++) {
            double g = grads[i] * grad_scale, m1 = momentum * m0[i] + g;
            m[i] = (float)m1;
            u[i] = g + momentum * m1;
            squares += u[i] * u[i];
        }
        for (size_t i = 0; i < size; i++) {
            x[muon_place(i / cols, i % cols, rows, cols)] = (float)(u[i] / (sqrt(squares) + 1e-7));
        }
    }
}

inline void muon_apply_cpu(float* params, const float* params0, const float* o, int num, size_t rows, size_t cols,
                           double learning_rate, double weight_decay) {
    size_t size = rows * cols;
    double scale = 0.2 * sqrt((double)std::max(rows, cols));
    for (size_t i = 0; i < (size_t)num * size; i++) {
        size_t in = i % size, place = i - in + muon_place(in / cols, in % cols, rows, cols);
        params[i] = (float)(params0[i] - learning_rate * (scale * o[place] + weight_decay * params0[i]));
    }
}

// ---- five steps of Newton-Schulz on num matrices (n,k): Jordan et al. 2024, kellerjordan.github.io/posts/muon ----

inline void newton_schulz_cpu(float* out, const float* inp, int num, int n, int k) {
    const double a = 3.4445, b = -4.7750, c = 2.0315;
    size_t N = n, K = k;
    for (size_t m = 0; m < (size_t)num; m++) {
        std::vector<double> x(inp + m * N * K, inp + (m + 1) * N * K), gram(N * N), poly(N * N), next(N * K);
        for (int step = 0; step < 5; step++) {
            parallel_for(N, [&](size_t i) {
                for (size_t j = 0; j < N; j++) {
                    double sum = 0.0;
                    for (size_t h = 0; h < K; h++) { sum += x[i * K + h] * x[j * K + h]; }
                    gram[i * N + j] = sum;
                }
            });
            parallel_for(N, [&](size_t i) {
                for (size_t j = 0; j < N; j++) { poly[i * N + j] = b * gram[i * N + j]; }
                for (size_t h = 0; h < N; h++) {
                    for (size_t j = 0; j < N; j++) { poly[i * N + j] += c * gram[i * N + h] * gram[h * N + j]; }
                }
            });
            parallel_for(N, [&](size_t i) {
                for (size_t j = 0; j < K; j++) { next[i * K + j] = a * x[i * K + j]; }
                for (size_t h = 0; h < N; h++) {
                    for (size_t j = 0; j < K; j++) { next[i * K + j] += poly[i * N + h] * x[h * K + j]; }
                }
            });
            x.swap(next);
        }
        for (size_t i = 0; i < N * K; i++) { out[m * N * K + i] = (float)x[i]; }
    }
}

// ---- scores of causal attention -------------------------------------------------------------------

// att (B,NH,T,T): q.k / sqrt(HS) for keys up to the query, 0 for later keys; qkv (B,T,3,NH,HS), C = NH * HS
inline void trimat_forward_cpu(float* att, const float* qkv, int B, int T, int C, int NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    parallel_for((size_t)B * NH, [=](size_t head) {
        size_t b = head / NH, h = head % NH;
        const float* first = qkv + b * T * 3 * C + h * HS;
        std::vector<double> keys(HS * T), sums(T); // keys as (HS,T), so that the inner loop is contiguous
        for (size_t t = 0; t < (size_t)T; t++) {
            for (size_t d = 0; d < HS; d++) { keys[d * T + t] = first[t * 3 * C + C + d]; }
        }
        for (size_t t = 0; t < (size_t)T; t++) {
            std::fill(sums.begin(), sums.end(), 0.0);
            for (size_t d = 0; d < HS; d++) {
                double q = first[t * 3 * C + d] * scale;
                const double* key = &keys[d * T];
                for (size_t s = 0; s <= t; s++) { sums[s] += q * key[s]; }
            }
            for (size_t s = 0; s < (size_t)T; s++) { att[(head * T + t) * T + s] = (float)sums[s]; }
        }
    });
}

// ---- the two smallest ops: out = 2 * inp, out = scale * gelu(inp) -------------------------------------

inline void simple_kernel_cpu(float* out, const float* inp, size_t n) {
    parallel_for((n + 4095) / 4096, [=](size_t chunk) {
        for (size_t i = chunk * 4096; i < n && i < (chunk + 1) * 4096; i++) { out[i] = (float)(2.0 * inp[i]); }
    });
}

inline void gelu_scale_cpu(float* out, const float* inp, size_t n, float scale) {
    const double root = sqrt(2.0 / M_PI);
    parallel_for((n + 4095) / 4096, [=](size_t chunk) {
        for (size_t i = chunk * 4096; i < n && i < (chunk + 1) * 4096; i++) {
            double x = inp[i];
            out[i] = (float)(scale * (0.5 * x * (1.0 + tanh(root * (x + 0.044715 * x * x * x)))));
        }
    });
}

// ---- a block of GPT-2: pre-layernorm attention and feed-forward, each added to the residual stream ---------------

// out, inp (B,T,C). weights: the block's 12 tensors in the order of GPT-2's checkpoints: layernorm (C), (C), qkv
// (3C,C), (3C), projection (C,C), (C), layernorm (C), (C), feed-forward (4C,C), (4C), projection (C,4C), (C)
inline void transformer_block_cpu(float* out, const float* inp, const float* const weights[12], int B, int T, int C,
                                  int NH) {
    size_t N = (size_t)B * T, n = N * C, channels = C;
    std::vector<float> norm(n), qkv(3 * n), attention(n), residual(n), hidden(4 * n), mean(N), rstd(N), lse(N * NH);
    layernorm_forward_cpu(norm.data(), mean.data(), rstd.data(), inp, weights[0], weights[1], (int)N, C);
    matmul_forward_cpu(qkv.data(), norm.data(), weights[2], weights[3], NULL, N, channels, 3 * channels);
    attention_forward_cpu(attention.data(), lse.data(), qkv.data(), B, T, C, NH);
    matmul_forward_cpu(residual.data(), attention.data(), weights[4], weights[5], inp, N, channels, channels);
    layernorm_forward_cpu(norm.data(), mean.data(), rstd.data(), residual.data(), weights[6], weights[7], (int)N, C);
    matmul_forward_cpu(hidden.data(), norm.data(), weights[8], weights[9], NULL, N, channels, 4 * channels);
    gelu_forward_cpu(hidden.data(), hidden.data(), 4 * n);
    matmul_forward_cpu(out, hidden.data(), weights[10], weights[11], residual.data(), N, 4 * channels, channels);
}

// ---- a linear layer after layernorm; a linear layer after gelu ----------------------------------------

// out (N,OC) = layernorm(inp (N,C)) linear_weight (OC,C)^T + linear_bias (OC); weight, bias (C)
inline void layernorm_linear_cpu(float* out, const float* inp, const float* weight, const float* bias,
                                 const float* linear_weight, const float* linear_bias, int N, int C, int OC) {
    std::vector<float> normed((size_t)N * C), mean(N), rstd(N);
    layernorm_forward_cpu(normed.data(), mean.data(), rstd.data(), inp, weight, bias, N, C);
    matmul_forward_cpu(out, normed.data(), linear_weight, linear_bias, NULL, N, C, OC);
}
// out (N,OC) = gelu(inp (N,C)) weight (OC,C)^T + bias (OC)
inline void gelu_linear_cpu(float* out, const float* inp, const float* weight, const float* bias, int N, int C,
                            int OC) {
    std::vector<float> active((size_t)N * C);
    gelu_forward_cpu(active.data(), inp, active.size());
    matmul_forward_cpu(out, active.data(), weight, bias, NULL, N, C, OC);
}

// ---- fp8: Micikevicius et al. 2022, arXiv:2209.05433 ------------------------------------------------------------

// x rounded to the nearest number of e4m3, or of e5m2; ties go to the number whose last bit is 0. Beyond the largest
// number, the result is the largest number: 448, or 57344. NaN stays NaN.
inline float fp8_round_cpu(float x, bool is_e5m2) {
    const int mantissa_bits = is_e5m2 ? 2 : 3, least_exponent = is_e5m2 ? -14 : -6; // of normal numbers
    const double largest = is_e5m2 ? 57344 : 448;
    double magnitude = fabs((double)x);
    if (isnan(x)) { return x; }
    if (magnitude == 0) { return x; }
    if (magnitude >= largest) { return (float)copysign(largest, x); }
    double spacing = ldexp(1.0, std::max(ilogb(magnitude), least_exponent) - mantissa_bits);
    return (float)copysign(std::min(largest, nearbyint(magnitude / spacing) * spacing), x);
}

// Each row (K) of weight in 8 bits: values are the nearest integers up to 127, or e4m3 up to 448, of weight / scale.
// The scale is the row's largest |weight| divided by 127 or 448, or 1 if it is below 2^-100. rounded = values * scale.
inline void quantize_weights_cpu(float* values, float* scales, float* rounded, const float* weight, bool is_int8,
                                 int num_rows, int K) {
    parallel_for(num_rows, [=](size_t row) {
        float largest = 0.0f;
        for (int k = 0; k < K; k++) { largest = std::max(largest, fabsf(weight[row * K + k])); }
        scales[row] = largest < 0x1p-100f ? 1.0f : largest / (is_int8 ? 127.0f : 448.0f);
        for (size_t i = row * K; i < (row + 1) * K; i++) {
            values[i] = is_int8 ? nearbyintf(weight[i] / scales[row]) : fp8_round_cpu(weight[i] / scales[row], false);
            rounded[i] = values[i] * scales[row];
        }
    });
}
