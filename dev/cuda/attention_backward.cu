/* attention_backward: the gradient of causal attention, out = softmax(q k^T / sqrt(HS)) v, with respect to q, k and v

   dqkv (B,T,3,NH,HS) floatX out | scratch (attention_backward_scratch()) float | dout (B,T,NH,HS) floatX in |
   qkv (B,T,3,NH,HS) floatX in | out (B,T,NH,HS) floatX in |
   lse (B,NH,T) float in: ln(sum of exp(scores)) | kernel 13 also: dbias (3,NH,HS) float inout, += dqkv summed over all
   tokens
   Bound: compute, 5 products of 2*B*NH*T*T*HS FLOPs, of which the causal mask leaves half. Kernels 2 to 7 do 7
   products: they compute q k^T and dout v^T twice, so that each gradient has one writer and is deterministic. Kernels 8
   to 11 do 5 products, and sum dq over the keys in one fixed order.
   Constraint: HS a multiple of 8, at most 256; tensor cores for 32, 64, 96 and 128. Kernels 4, 5, 6 and 8: HS = 64.
   Kernels 9 to 11: HS = 64 and sm_90a. attention_backward() runs kernel 11, 7 or 3; the comment above it has a table.
   Tuned: the tiles of kernel 7. Kernels 9 to 11 fill an SM with one block of fixed tiles; kernels 3, 4, 5, 6 and 8
   have the tiles that their registers allow.
   Error: against the fp64 reference, which computes its own unrounded out. bf16 and fp16: one ulp of the gradient plus
   three ulps of 1, because P, dS and out are rounded to floatX and enter sums of terms of size 1 (emulated on a CPU:
   1.1 ulps of 1; the worst of millions of elements on an H200: 2.3). fp32: 8 ulps of the gradient plus 96 ulps of 1,
   because the argument of exp is rounded (emulated: 50). Two cases have queries and keys that are 4 times as large:
   the terms of dq and dk are, too, and the absolute part is 4 times as much. It is 8 times as much where that makes
   every softmax as sharp as only those of the first rows are otherwise: one term of dS, and the error of its dsum, then
   make up a gradient (emulated: 10 ulps of 1 among 270,000 elements). In fp32 the error is that of the argument of exp,
   which is 16 times as large there, so the absolute part is 64 times as much (scores summed in fp32, all else in double:
   20 times as much among 400,000 elements). With equal queries and equal keys all probabilities of a row have the same
   relative error, that of the argument of exp, so the relative part is 16 times as much (fp32 sums in order, without
   fused multiply-adds: 122 ulps).
   Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691. Scores as [keys][queries] (swapped operands):
   Shah et al. 2024, arXiv:2407.08608. wgmma and TMA: the PTX ISA.

   Kernels (this list is written by versions.sh):
     0  cuBLAS for the five products, T x T matrices in memory
     1  one thread per score, then one per gradient element
     2  no T x T matrix: one warp per row recomputes the scores
     3  fp32 arithmetic, tiles in shared memory and registers
     4  mma.sync, 16 rows per warp, P and dS through shared memory
     5  4 with P and dS as operands from registers
     6  cp.async, two stages, swizzled, 16 rows per warp
     7  6 with 32 rows per warp; any head size
     8  five products, one block per head, dq summed in L2 (slower than 7)
     9  wgmma and TMA, dq summed in L2 in the order of the keys
    10  a producer, two adders of dq, two consumer warpgroups
    11  persistent, work items by ticket; 7 or 3 where 11 cannot run (promoted)
    12  11, then matmul_backward_bias (kind 1)
    13  11 with the sums of dqkv from registers; 11 where it cannot run (promoted) (kind 1)
     kind 1: with dbias

   nvcc -O3 --use_fast_math attention_backward.cu -o attention_backward -lcublas -lcublasLt
   (or: make attention_backward)
   ./attention_backward 11     check kernel 11 against the CPU
   ./attention_backward        every kernel, side by side                                         */
#include "../../llmc/column_sums.cuh"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "cublas_batched.cuh"
#include "matmul_backward_bias.cuh"

// ---- kernel 0: cuBLAS for the five products, the T x T matrices in global memory ----

// Computes p and ds from scores and dp, all (B,NH,T,T), with the causal mask. One thread per element.
__global__ void attention_backward_softmax_kernel0(floatX* p, floatX* ds, const float* scores, const float* dp,
                                                   const float* lse, const float* dsum, int T, size_t n, float scale) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    size_t row = i / T;
    bool seen = i % T <= row % T;
    float x = seen ? expf(scale * scores[i] - lse[row]) : 0.0f;
    p[i] = (floatX)x;
    ds[i] = (floatX)(seen ? x * (dp[i] - dsum[row]) : 0.0f);
}

// out (T,HS) = alpha * a x, or alpha * a^T x if transposed, for each head. Each head's a is (T,T), row-major. The rows
// of x are x_stride elements apart, those of out 3 * C.
static void attention_backward_gemm0(floatX* out, const floatX* a, const floatX* x, int x_stride, bool transposed,
                                     float alpha, int T, int C, int NH, cudaStream_t stream) {
    cudaDataType type = sizeof(floatX) == 4 ? CUDA_R_32F : PRECISION_NAME[0] == 'b' ? CUDA_R_16BF : CUDA_R_16F;
    int HS = C / NH;
    float zero = 0.0f;
    cublas_batched(CUBLAS_OP_N, transposed ? CUBLAS_OP_T : CUBLAS_OP_N, HS, T, T, &alpha, x, type, x_stride, HS, a,
                   type, T, (long long)T * T, &zero, out, type, 3 * C, HS, NH, stream);
}

// scores, dp (B,NH,T,T) float and p, ds (B,NH,T,T) floatX are scratch; dsum (B,NH,T) comes from attention_backward_dsum
void attention_backward0(floatX* dqkv, float* scores, float* dp, floatX* p, floatX* ds, const float* dsum,
                         const floatX* dout, const floatX* qkv, const float* lse, int B, int T, int C, int NH,
                         cudaStream_t stream, int block_size) {
    cudaDataType type = sizeof(floatX) == 4 ? CUDA_R_32F : PRECISION_NAME[0] == 'b' ? CUDA_R_16BF : CUDA_R_16F;
    int HS = C / NH;
    size_t matrix = (size_t)T * T, n = (size_t)B * NH * matrix;
    float one = 1.0f, zero = 0.0f, scale = 1.0f / sqrtf((float)HS);
    for (int b = 0; b < B; b++) { // q k^T in row-major order is k q^T for cuBLAS, which is column-major
        const floatX *q = qkv + (size_t)b * T * 3 * C, *d = dout + (size_t)b * T * C;
        size_t first = (size_t)b * NH * matrix;
        cublas_batched(CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &one, q + C, type, 3 * C, HS, q, type, 3 * C, HS, &zero,
                       scores + first, CUDA_R_32F, T, (long long)matrix, NH, stream);
        cublas_batched(CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &one, q + 2 * C, type, 3 * C, HS, d, type, C, HS, &zero,
                       dp + first, CUDA_R_32F, T, (long long)matrix, NH, stream);
    }
    attention_backward_softmax_kernel0<<<(unsigned)ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(
        p, ds, scores, dp, lse, dsum, T, n, scale);
    cudaCheck(cudaGetLastError());
    for (int b = 0; b < B; b++) {
        const floatX *q = qkv + (size_t)b * T * 3 * C, *d = dout + (size_t)b * T * C;
        floatX* dq = dqkv + (size_t)b * T * 3 * C;
        size_t first = (size_t)b * NH * matrix;
        attention_backward_gemm0(dq, ds + first, q + C, 3 * C, false, scale, T, C, NH, stream);
        attention_backward_gemm0(dq + C, ds + first, q, 3 * C, true, scale, T, C, NH, stream);
        attention_backward_gemm0(dq + 2 * C, p + first, d, C, true, 1.0f, T, C, NH, stream);
    }
}

// ---- kernel 1: one thread per score, then one thread per element of the gradient; P and dS in global memory ----

__global__ void attention_backward_scores_kernel1(float* p, float* ds, const float* lse, const float* dsum,
                                                  const floatX* dout, const floatX* qkv, int T, int C, int NH, size_t n,
                                                  float scale) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    size_t row = i / T, t = row % T, key = i % T, b = row / T / NH, HS = C / NH, h = row / T % NH;
    if (key > t) { return; }
    const floatX *q = qkv + (b * T + t) * 3 * C + h * HS, *k = qkv + (b * T + key) * 3 * C + C + h * HS, *v = k + C;
    const floatX* d = dout + (b * T + t) * C + h * HS;
    float score = 0.0f, dp = 0.0f;
    for (size_t j = 0; j < HS; j++) {
        score += (float)q[j] * (float)k[j];
        dp += (float)d[j] * (float)v[j];
    }
    p[i] = expf(scale * score - lse[row]);
    ds[i] = p[i] * (dp - dsum[row]);
}

__global__ void attention_backward_gradients_kernel1(floatX* dqkv, const float* p, const float* ds, const floatX* dout,
                                                     const floatX* qkv, int T, int C, int NH, size_t n, float scale) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    // which: the gradient that this thread computes, dq (0), dk (1) or dv (2)
    size_t HS = C / NH, c = i % C, which = i / C % 3, t = i / C / 3 % T, b = i / C / 3 / T;
    size_t matrix = (b * NH + c / HS) * T * T; // offset of this head's T x T matrix
    const floatX* x = which == 2 ? dout + b * T * C + c : qkv + b * T * 3 * C + c + (which == 0 ? C : 0);
    size_t stride = which == 2 ? C : 3 * C;
    float sum = 0.0f;
    if (which == 0) {
        for (size_t k = 0; k <= t; k++) { sum += ds[matrix + t * T + k] * (float)x[k * stride]; }
    } else {
        for (size_t q = t; q < (size_t)T; q++) {
            sum += (which == 1 ? ds : p)[matrix + q * T + t] * (float)x[q * stride];
        }
    }
    dqkv[i] = (floatX)(which == 2 ? sum : scale * sum);
}

// p, ds (B,NH,T,T) are scratch
void attention_backward1(floatX* dqkv, float* p, float* ds, const float* lse, const float* dsum, const floatX* dout,
                         const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream, int block_size) {
    size_t scores = (size_t)B * NH * T * T, gradients = (size_t)B * T * 3 * C;
    float scale = 1.0f / sqrtf((float)(C / NH));
    attention_backward_scores_kernel1<<<(unsigned)ceil_div(scores, (size_t)block_size), block_size, 0, stream>>>(
        p, ds, lse, dsum, dout, qkv, T, C, NH, scores, scale);
    cudaCheck(cudaGetLastError());
    attention_backward_gradients_kernel1<<<(unsigned)ceil_div(gradients, (size_t)block_size), block_size, 0, stream>>>(
        dqkv, p, ds, dout, qkv, T, C, NH, gradients, scale);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: no T x T matrix; one warp per row of dq, or of dk and dv, recomputes the scores that it needs ----
// If `keys`, a warp owns a key, walks over the queries that see it, and computes dk and dv. Otherwise a warp owns a
// query, walks over the keys that it sees, and computes dq.

template <bool keys> __global__ void attention_backward_kernel2(floatX* dqkv, const float* lse, const float* dsum,
                                                                const floatX* dout, const floatX* qkv, int B, int T,
                                                                int C, int NH, float scale) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, HS = C / NH;
    if (i >= (size_t)B * NH * T) { return; }
    size_t t = i % T, h = i / T % NH, b = i / T / NH, stride = 3 * (size_t)C;
    const floatX *q = qkv + b * T * stride + h * HS, *k = q + C, *v = k + C, *d = dout + b * T * C + h * HS;
    size_t stride_d = C;
    const floatX *owned1 = (keys ? k : q) + t * stride, *owned2 = keys ? v + t * stride : d + t * stride_d;
    float o1[8], o2[8], sum1[8] = {}, sum2[8] = {}; // elements lane, lane + 32, ... of a row, HS <= 256
    for (int j = 0; j < 8; j++) {
        bool valid = lane + 32 * j < HS;
        o1[j] = valid ? (float)owned1[lane + 32 * j] : 0.0f;
        o2[j] = valid ? (float)owned2[lane + 32 * j] : 0.0f;
    }
    for (size_t w = keys ? t : 0; w < (keys ? (size_t)T : t + 1); w++) {
        const floatX *walked1 = (keys ? q : k) + w * stride, *walked2 = keys ? d + w * stride_d : v + w * stride;
        float w1[8], w2[8], score = 0.0f, dp = 0.0f;
        for (int j = 0; j < 8; j++) {
            bool valid = lane + 32 * j < HS;
            w1[j] = valid ? (float)walked1[lane + 32 * j] : 0.0f;
            w2[j] = valid ? (float)walked2[lane + 32 * j] : 0.0f;
            score += o1[j] * w1[j], dp += o2[j] * w2[j];
        }
        size_t query = (b * NH + h) * T + (keys ? w : t);
        float p = expf(scale * warp_sum(score) - lse[query]), ds = p * (warp_sum(dp) - dsum[query]);
        for (int j = 0; j < 8; j++) { sum1[j] += ds * w1[j], sum2[j] += p * w2[j]; }
    }
    floatX* out = dqkv + (b * T + t) * stride + h * HS + (keys ? C : 0);
    for (int j = 0; j < 8; j++) {
        if (lane + 32 * j < HS) {
            out[lane + 32 * j] = (floatX)(scale * sum1[j]);
            if (keys) { out[C + lane + 32 * j] = (floatX)sum2[j]; }
        }
    }
}

void attention_backward2(floatX* dqkv, const float* lse, const float* dsum, const floatX* dout, const floatX* qkv,
                         int B, int T, int C, int NH, cudaStream_t stream, int block_size) {
    unsigned grid = (unsigned)ceil_div((size_t)B * NH * T * 32, (size_t)block_size);
    float scale = 1.0f / sqrtf((float)(C / NH));
    attention_backward_kernel2<true><<<grid, block_size, 0, stream>>>(dqkv, lse, dsum, dout, qkv, B, T, C, NH, scale);
    cudaCheck(cudaGetLastError());
    attention_backward_kernel2<false><<<grid, block_size, 0, stream>>>(dqkv, lse, dsum, dout, qkv, B, T, C, NH, scale);
    cudaCheck(cudaGetLastError());
}

#include "attention_backward.cuh" // kernels 3, 7 and 11

#if !defined(ENABLE_FP32)
// ---- kernel 4: tensor cores, 64 x 64 tiles, 16 owned rows per warp, P and dS through shared memory ----
// ---- kernel 5: P and dS become operands in registers, because scores are computed as [owned][walked] ----
// A block owns 64 rows (keys if `keys`, otherwise queries) and walks over tiles of 64 rows of the other kind.

// Rows are padded from 64 to 72 elements, so that the 8 rows that ldmatrix reads at once cover all 32 banks.
struct TensorCoreSMem {
    floatX owned1[64][72], owned2[64][72], walked1[64][72], walked2[64][72], p[64][72];
};

__device__ static void load_tile4(floatX (*tile)[72], const floatX* rows, size_t stride, int num_valid) {
    for (int i = threadIdx.x; i < 64 * 8; i += 128) {
        int row = i / 8, column = i % 8 * 8;
        x128 zero = {};
        store128(&tile[row][column], row < num_valid ? load128(rows + row * stride + column) : zero);
    }
}

// sum (16,64) += x (16,64) tile (64,64). p: this warp's own staging area for x, not used if in_registers
template <bool in_registers> __device__ inline void multiply4(float (&sum)[8][4], const float (&x)[8][4],
                                                              const floatX (*tile)[72], floatX (*p)[72]) {
    int lane = threadIdx.x % 32;
    if (!in_registers) {
        __syncwarp(); // all lanes have read the previous contents of p
        for (int n = 0; n < 8; n++) {
            for (int i = 0; i < 4; i++) { p[i / 2 * 8 + lane / 4][8 * n + lane % 4 * 2 + i % 2] = (floatX)x[n][i]; }
        }
        __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t a[4];
        if (in_registers) {
            for (int i = 0; i < 4; i++) {
                const float* pair = &x[2 * k + i / 2][i % 2 * 2];
                a[i] = pack_16x2(pair[0], pair[1], floatX());
            }
        } else {
            ldmatrix_x4(a, &p[lane % 16][16 * k + lane / 16 * 8]);
        }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, &tile[16 * k + lane % 16][8 * n + lane / 16 * 8]);
            mma_16x8x16(sum[n], a, b[0], b[1], floatX());
            mma_16x8x16(sum[n + 1], a, b[2], b[3], floatX());
        }
    }
}

template <bool keys, bool in_registers> __global__ void __launch_bounds__(128)
    attention_backward_kernel4(floatX* dqkv, const float* lse, const float* dsum, const floatX* dout, const floatX* qkv,
                               int T, int C, int NH, float scale) {
    __shared__ TensorCoreSMem smem;
    int h = blockIdx.y % NH, b = blockIdx.y / NH, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tile = keys ? blockIdx.x : gridDim.x - 1 - blockIdx.x, owned = 64 * tile; // the longest walks start first
    size_t stride = 3 * (size_t)C, stride_d = C;
    const floatX *q = qkv + b * T * stride + h * 64, *k = q + C, *v = k + C, *d = dout + b * T * stride_d + h * 64;
    lse += ((size_t)b * NH + h) * T, dsum += ((size_t)b * NH + h) * T;
    load_tile4(smem.owned1, (keys ? k : q) + owned * stride, stride, T - owned);
    load_tile4(smem.owned2, keys ? v + owned * stride : d + owned * stride_d, keys ? stride : stride_d, T - owned);

    float sum1[8][4] = {}, sum2[8][4] = {};
    for (int walk = keys ? tile : 0; walk <= (keys ? ceil_div(T, 64) - 1 : tile); walk++) {
        int walked = 64 * walk;
        __syncthreads(); // all warps have read the previous tiles
        load_tile4(smem.walked1, (keys ? q : k) + walked * stride, stride, T - walked);
        load_tile4(smem.walked2, keys ? d + walked * stride_d : v + walked * stride, keys ? stride_d : stride,
                   T - walked);
        __syncthreads();
        float s[8][4] = {}, dp[8][4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t a1[4], a2[4];
            ldmatrix_x4(a1, &smem.owned1[16 * warp + lane % 16][16 * k + lane / 16 * 8]);
            ldmatrix_x4(a2, &smem.owned2[16 * warp + lane % 16][16 * k + lane / 16 * 8]);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t b1[4], b2[4];
                int row = 8 * n + lane / 16 * 8 + lane % 8, column = 16 * k + lane / 8 % 2 * 8;
                ldmatrix_x4(b1, &smem.walked1[row][column]);
                ldmatrix_x4(b2, &smem.walked2[row][column]);
                mma_16x8x16(s[n], a1, b1[0], b1[1], floatX());
                mma_16x8x16(s[n + 1], a1, b1[2], b1[3], floatX());
                mma_16x8x16(dp[n], a2, b2[0], b2[1], floatX());
                mma_16x8x16(dp[n + 1], a2, b2[2], b2[3], floatX());
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int o = owned + 16 * warp + i / 2 * 8 + lane / 4, w = walked + 8 * n + lane % 4 * 2 + i % 2;
                int query = keys ? w : o, key = keys ? o : w;
                bool seen = key <= query && query < T;
                s[n][i] = seen ? expf(scale * s[n][i] - lse[query]) : 0.0f;
                dp[n][i] = seen ? s[n][i] * (dp[n][i] - dsum[query]) : 0.0f;
            }
        }
        if (keys) { multiply4<in_registers>(sum2, s, smem.walked2, &smem.p[16 * warp]); }
        multiply4<in_registers>(sum1, dp, smem.walked1, &smem.p[16 * warp]);
    }

    floatX* out = dqkv + b * T * stride + h * 64 + (keys ? C : 0);
    for (int n = 0; n < 8; n++) {
        for (int i = 0; i < 4; i++) {
            int t = owned + 16 * warp + i / 2 * 8 + lane / 4, c = 8 * n + lane % 4 * 2 + i % 2;
            if (t < T) {
                out[t * stride + c] = (floatX)(scale * sum1[n][i]);
                if (keys) { out[t * stride + C + c] = (floatX)sum2[n][i]; }
            }
        }
    }
}

// Requires HS = 64.
template <bool in_registers> void attention_backward4(floatX* dqkv, const float* lse, const float* dsum,
                                                      const floatX* dout, const floatX* qkv, int B, int T, int C,
                                                      int NH, cudaStream_t stream) {
    require(C / NH == 64);
    dim3 grid(ceil_div(T, 64), B * NH);
    attention_backward_kernel4<true, in_registers>
        <<<grid, 128, 0, stream>>>(dqkv, lse, dsum, dout, qkv, T, C, NH, 0.125f);
    cudaCheck(cudaGetLastError());
    attention_backward_kernel4<false, in_registers>
        <<<grid, 128, 0, stream>>>(dqkv, lse, dsum, dout, qkv, T, C, NH, 0.125f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: cp.async into two swizzled stages, 16 rows per warp ----
// It runs the code of kernel 7, which is defined below, with 16 instead of 32 rows per warp. 3 blocks fit on an SM instead
// of 2, but each tile is read from shared memory twice as often.

// Requires HS = 64.
void attention_backward6(const AttentionBackwardArgs& a, cudaStream_t stream) {
    require(a.C / a.NH == 64);
    attention_backward_mma_sized<64, 1, 2, 3, 1, 4, 3>(a, stream);
}

// ---- kernel 8: five products in one kernel: one block per head, dq summed in fp32 in a buffer that stays in L2 ----

struct AttentionBackwardSMem8 {
    floatX tile1[2][64 * 64], tile2[2][64 * 64]; // q and dout, two stages
    floatX v[128 * 64], k[128 * 64];             // rows of the owned keys
    floatX ds[128 * 64];                         // (owned keys, queries of the tile)
    float lse[2][64], dsum[2][64];
};

// dq_sums (B, NH, T/64, 64, 64) holds the sums so far. Each thread reads only elements that it wrote itself, so no
// synchronisation is needed.
__global__ void __launch_bounds__(128, 2)
    attention_backward_kernel8(floatX* dqkv, float4* dq_sums, const float* lse, const float* dsum, const floatX* dout,
                               const floatX* qkv, int T, int C, int NH, float scale) {
    constexpr int HS = 64, M = 2, N = 2;
    extern __shared__ __align__(128) unsigned char attention_backward_memory[];
    AttentionBackwardSMem8& smem = *reinterpret_cast<AttentionBackwardSMem8*>(attention_backward_memory);
    int h = blockIdx.x % NH, b = blockIdx.x / NH, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int stride = 3 * C, num_walks = ceil_div(T, 64);
    const floatX *q = qkv + (size_t)b * T * stride + h * HS, *d = dout + (size_t)b * T * C + h * HS;
    lse += (size_t)blockIdx.x * T, dsum += (size_t)blockIdx.x * T;
    dq_sums += (size_t)blockIdx.x * num_walks * 1024;
    float scale2 = scale * LOG2E;

    for (int first = 0; first < num_walks; first += M) { // tiles of 64 * M keys
        int kv = 64 * first + 16 * M * warp;
        auto load = [&](int stage, int t) {
            attention_forward_load<HS, 64>(smem.tile1[stage], q, stride, t, T);
            attention_forward_load<HS, 64>(smem.tile2[stage], d, C, t, T);
            int i = threadIdx.x % 64;
            cp_async_4((threadIdx.x < 64 ? smem.lse : smem.dsum)[stage] + i, (threadIdx.x < 64 ? lse : dsum) + t + i,
                       t + i < T);
            cp_async_commit();
        };
        floatX *v_owned = smem.v + 16 * M * HS * warp, *k_owned = smem.k + 16 * M * HS * warp;
        floatX* ds_owned = smem.ds + 16 * M * 64 * warp;
        __syncthreads(); // all warps have read the previous tiles and keys
        attention_forward_load<HS, 16 * M, 32>(v_owned, q + 2 * C, stride, kv, T);
        attention_forward_load<HS, 16 * M, 32>(k_owned, q + C, stride, kv, T);
        load(0, 64 * first);
        uint32_t k_operand[HS / 16][M][4];
        attention_backward_load_operand<HS, M>(k_operand, q + C, stride, kv, T);
        float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
        for (int walk = first, stage = 0; walk < num_walks; walk++, stage ^= 1) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has landed for all warps, and all warps have read the previous tile and ds
            if (walk + 1 < num_walks) { load(stage ^ 1, 64 * (walk + 1)); }
#pragma unroll 1
            for (int row = 0; row < 64; row += 8 * N) {
                float p[M][N][4] = {}, ds[M][N][4] = {};
                int t = 64 * walk + row;
                if (t + 8 * N > kv) { // some of these queries see keys of this warp; otherwise ds stays 0
                    const float *x = smem.lse[stage] + row + lane % 4 * 2, *y = smem.dsum[stage] + row + lane % 4 * 2;
#pragma unroll
                    for (int n = 0; n < N; n++) {
#pragma unroll
                        for (int m = 0; m < M; m++) {
                            ds[m][n][0] = ds[m][n][2] = -y[8 * n], ds[m][n][1] = ds[m][n][3] = -y[8 * n + 1];
                        }
                    }
                    const floatX* rows = smem.tile1[stage] + row * HS; // of q; those of dout are `shift` bytes further
                    constexpr int shift = sizeof(smem.tile1);
                    uint32_t by_rows = attention_forward_k_address<HS>(rows);
                    attention_backward_multiply_rows<HS>(p, k_operand, by_rows, 0);
                    attention_backward_multiply_rows<HS>(ds, v_owned, by_rows, shift);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        float lse2[2] = {x[8 * n] * LOG2E, x[8 * n + 1] * LOG2E};
#pragma unroll
                        for (int m = 0; m < M; m++) {
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                p[m][n][i] = exp2_approx(p[m][n][i] * scale2 - lse2[i % 2]);
                                int key = kv + 16 * m + i / 2 * 8 + lane / 4;
                                if (key > t + 8 * n + lane % 4 * 2 + i % 2) { p[m][n][i] = 0.0f; }
                                ds[m][n][i] *= p[m][n][i];
                            }
                        }
                    }
                    uint32_t by_columns = attention_forward_v_address<HS>(rows);
                    attention_backward_multiply_columns<HS>(dv, p, by_columns, shift);
                    attention_backward_multiply_columns<HS>(dk, ds, by_columns, 0);
                }
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int n = 0; n < N; n++) {
#pragma unroll
                        for (int i = 0; i < 4; i += 2) {
                            int to = attention_forward_at<64>(16 * m + 4 * i + lane / 4, row / 8 + n);
                            uint32_t* pair = reinterpret_cast<uint32_t*>(ds_owned + to + lane % 4 * 2);
                            *pair = pack_16x2(ds[m][n][i], ds[m][n][i + 1], floatX());
                        }
                    }
                }
            }
            __syncthreads(); // all warps have written ds

            // dq of 16 queries per warp, over all keys of the tile
            float dq[1][HS / 8][4] = {};
            int offset_a = attention_forward_at<64>(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
            uint32_t keys = attention_forward_v_address<HS>(smem.k);
#pragma unroll 2
            for (int k = 0; k < 4 * M; k++) {
                uint32_t a[1][4];
                ldmatrix_x4_trans(a[0], smem.ds + offset_a + 16 * k * 64);
                attention_forward_multiply<HS, true>(dq, a, keys, k);
            }
            float4* sums = dq_sums + ((size_t)walk * 4 + warp) * (HS / 8) * 32 + lane;
            bool last = walk < first + M; // these queries see no later keys, so the sum is complete
            int t = 64 * walk + 16 * warp + lane / 4;
            floatX* out = dqkv + ((size_t)b * T + t) * stride + h * HS + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                float4 sum = make_float4(dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]);
                if (first > 0) {
                    float4 before = sums[32 * n];
                    sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
                }
                if (!last) {
                    sums[32 * n] = sum;
                } else {
                    uint32_t low = pack_16x2(scale * sum.x, scale * sum.y, floatX());
                    uint32_t high = pack_16x2(scale * sum.z, scale * sum.w, floatX());
                    if (t < T) { *reinterpret_cast<uint32_t*>(out + 8 * n) = low; }
                    if (t + 8 < T) { *reinterpret_cast<uint32_t*>(out + (size_t)8 * stride + 8 * n) = high; }
                }
            }
        }
        floatX* dk_rows = dqkv + ((size_t)b * T + kv) * stride + h * HS + C;
        attention_forward_store_rows<HS>(dk_rows, stride, T - kv, dk, scale, v_owned);
        attention_forward_store_rows<HS>(dk_rows + C, stride, T - kv, dv, 1.0f, v_owned);
    }
}

// Requires HS = 64. dq_sums: 4096 * B * NH * ceil(T / 64) floats, aligned to 16 bytes
void attention_backward8(floatX* dqkv, float* dq_sums, const float* lse, const float* dsum, const floatX* dout,
                         const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream) {
    require(C / NH == 64);
    cudaCheck(cudaFuncSetAttribute(attention_backward_kernel8, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)sizeof(AttentionBackwardSMem8)));
    attention_backward_kernel8<<<B * NH, 128, sizeof(AttentionBackwardSMem8), stream>>>(
        dqkv, reinterpret_cast<float4*>(dq_sums), lse, dsum, dout, qkv, T, C, NH, 0.125f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 9: wgmma and TMA, dq summed in L2 in the order of the keys ----
// No producer warp: thread 0 issues the loads and computes like all other threads.

// rows[r] = factor * sum[r] for a warp's 16 rows, of which num_valid exist.
__device__ inline void attention_backward_sm90_store(floatX* rows, size_t stride, int num_valid, const float (&sum)[32],
                                                     float factor) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) { // 8 rows and 32 columns at a time
        int row = i % 2 * 8 + lane / 4;
        float v[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j][0] = factor * sum[16 * (i / 2) + 4 * j + i % 2 * 2];
            v[j][1] = factor * sum[16 * (i / 2) + 4 * j + i % 2 * 2 + 1];
        }
        mma_quad_transpose(v); // now each lane has 8 adjacent columns of one row
        x128 x;
#pragma unroll
        for (int j = 0; j < 8; j++) { x[j] = (floatX)v[j / 2][j % 2]; }
        if (row < num_valid) { store128(rows + row * stride + i / 2 * 32 + lane % 4 * 8, x); }
    }
}

// Stores a warp's 16 rows, tokens t..t+15, of dq (which = 0), dk (1) or dv (2).
__device__ inline void attention_backward_sm90_store_rows(floatX* dqkv, const AttentionBackwardSm90Args& args,
                                                          int which, int head, int t, const float (&sum)[32],
                                                          float factor) {
    size_t token = (size_t)(head / args.NH) * args.T + t, stride = (size_t)3 * args.NH * 64;
    floatX* rows = dqkv + token * stride + ((size_t)which * args.NH + head % args.NH) * 64;
    attention_backward_sm90_store(rows, stride, args.T - t, sum, factor);
}

struct AttentionBackwardSMem9 {
    floatX q[2][128 * 64], dout[2][128 * 64]; // two stages
    floatX k[128 * 64], v[128 * 64], ds[2 * 128 * 64];
    float4 stats[2][64];
    uint64_t full[2];
};

__global__ void __launch_bounds__(256, 1)
    attention_backward_sm90_kernel9(floatX* dqkv, AttentionBackwardSm90Args args,
                                    const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap dout_map) {
    extern __shared__ __align__(1024) unsigned char attention_backward_sm90_memory[]; // aligned for TMA's swizzle
    auto& smem = *reinterpret_cast<AttentionBackwardSMem9*>(attention_backward_sm90_memory);
    if (shared_address(&smem) % 1024 != 0) { __trap(); }
    int head = blockIdx.x / args.num_tiles, j = args.num_tiles - 1 - blockIdx.x % args.num_tiles;
    int h = head % args.NH, b = head / args.NH, warpgroup = threadIdx.x / 128, num_steps = args.num_tiles - j;
    int row = threadIdx.x / 32 * 16; // the warp's first key and query
    if (threadIdx.x == 0) {
        mbarrier_init(&smem.full[0], 1);
        mbarrier_init(&smem.full[1], 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    auto load = [&](int step) {
        uint64_t* full = &smem.full[step % 2];
        int tiles = step == 0 ? 4 : 2;
        mbarrier_arrive_expect(full, tiles * ATTENTION_BACKWARD_TILE_BYTES + (int)sizeof(smem.stats[0]));
        if (step == 0) {
            tma_load_4d(smem.k, &qkv_map, 0, args.NH + h, 128 * j, b, full);
            tma_load_4d(smem.v, &qkv_map, 0, 2 * args.NH + h, 128 * j, b, full);
        }
        int i = j + step;
        tma_load_4d(smem.q[step % 2], &qkv_map, 0, h, 128 * i, b, full);
        tma_load_4d(smem.dout[step % 2], &dout_map, 0, h, 128 * i, b, full);
        bulk_load(smem.stats[step % 2], args.stats + ((size_t)head * args.num_tiles + i) * 64, sizeof(smem.stats[0]),
                  full);
    };
    if (threadIdx.x == 0) { load(0); }
    float dk[32] = {}, dv[32] = {};
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        if (threadIdx.x == 0 && step + 1 < num_steps) { load(step + 1); }
        const floatX *q = smem.q[step % 2], *dout = smem.dout[step % 2];
        const float4* stats = smem.stats[step % 2];
        mbarrier_wait(&smem.full[step % 2], step / 2 % 2);
        __syncwarp(); // reconverges warp 0, whose lane 0 may still be issuing loads
        float s[64], dp[64], dq[32];
        uint32_t p[32], ds[32];
        wgmma_fence();
        attention_forward_sm90_scores(s, wgmma_descriptor(smem.k + warpgroup * 64 * 64), wgmma_descriptor(q));
        attention_forward_sm90_scores(dp, wgmma_descriptor(smem.v + warpgroup * 64 * 64), wgmma_descriptor(dout));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        wgmma_hold(dp);
        if (step == 0) { attention_backward_sm90_mask(s, row + threadIdx.x % 32 / 4); }
        attention_backward_sm90_p(s, stats, args.scale * LOG2E);
        attention_backward_sm90_ds(p, ds, s, dp, stats);
        attention_backward_sm90_store_ds(smem.ds, ds, row);
        tma_store_fence(); // wgmma reads through the async proxy
        __syncthreads();   // all warps have written ds
        wgmma_fence();
        attention_backward_sm90_keys<64>(dv, p, dout);
        attention_backward_sm90_keys<64>(dk, ds, q);
        attention_backward_sm90_queries(dq, smem.ds + warpgroup * 128 * 64, smem.k);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(dv);
        wgmma_hold(dk);
        wgmma_hold(dq);

        size_t tile = (size_t)head * args.num_tiles + j + step;
        if (step > 0) {
            if (threadIdx.x == 0) {
                while (load_acquire(args.turns + tile) < step) {}
            }
            __syncthreads();
        }
        float4* sums = args.dq_sums + (tile * 2 + warpgroup) * 1024 + threadIdx.x % 128;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (step > 0) {
                float4 x = __ldcg(sums + 128 * n);
                dq[4 * n] += x.x, dq[4 * n + 1] += x.y, dq[4 * n + 2] += x.z, dq[4 * n + 3] += x.w;
            }
            if (j > 0) { __stcg(sums + 128 * n, make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3])); }
        }
        if (j == 0) { attention_backward_sm90_store_rows(dqkv, args, 0, head, 128 * step + row, dq, args.scale); }
        __syncthreads(); // all warps have stored their sums, and have read the stage of this step
        if (j > 0 && threadIdx.x == 0) {
            __threadfence();
            store_release(args.turns + tile, step + 1);
        }
    }
    attention_backward_sm90_store_rows(dqkv, args, 1, head, 128 * j + row, dk, args.scale);
    attention_backward_sm90_store_rows(dqkv, args, 2, head, 128 * j + row, dv, 1.0f);
}

// Requires HS = 64 and sm_90a.
void attention_backward9(const AttentionBackwardArgs& a, cudaStream_t stream) {
    AttentionBackwardSm90Args args = attention_backward_sm90_args<64>(a);
    CUtensorMap qkv_map = tensor_map_heads(a.qkv, a.B, a.T, 3 * a.NH, 128);
    CUtensorMap dout_map = tensor_map_heads(a.dout, a.B, a.T, a.NH, 128);
    attention_backward_sm90_stats<64>(args, a, stream);
    constexpr int SHARED_BYTES = sizeof(AttentionBackwardSMem9);
    cudaCheck(cudaFuncSetAttribute(attention_backward_sm90_kernel9, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   SHARED_BYTES));
    attention_backward_sm90_kernel9<<<args.num_heads * args.num_tiles, 256, SHARED_BYTES, stream>>>(a.dqkv, args,
                                                                                                    qkv_map, dout_map);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 10: one block per work item, relying on blocks starting in the order of their index ----

__global__ void __launch_bounds__(384, 1)
    attention_backward_sm90_kernel10(AttentionBackwardSm90Args args, const __grid_constant__ CUtensorMap qkv_map,
                                     const __grid_constant__ CUtensorMap dout_map,
                                     const __grid_constant__ CUtensorMap dqkv_map) {
    extern __shared__ __align__(1024) unsigned char attention_backward_sm90_memory[]; // aligned for TMA's swizzle
    auto& smem = *reinterpret_cast<AttentionBackwardSMem<>*>(attention_backward_sm90_memory);
    if (shared_address(&smem) % 1024 != 0) { __trap(); }
    // the shuffle makes `warp` warp-uniform to the compiler
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    attention_backward_sm90_init(smem);
    if (warp < 4) {
        warpgroup_fewer_registers<24>();
        if (lane != 0) { return; }
        if (warp == 0) {
            unsigned i = 0;
            attention_backward_sm90_load_item(args, smem, qkv_map, dout_map, blockIdx.x, 0, i);
        }
        if (warp == 1 || warp == 2) { attention_backward_sm90_add_item(args, smem, warp - 1, blockIdx.x, 0); }
        return;
    }
    warpgroup_more_registers<240>();
    int i = 0;
    attention_backward_sm90_compute_item(args, smem, dqkv_map, warp / 4 - 1, (warp - 4) * 16, blockIdx.x, 0, i);
    if (lane == 0) { tma_store_wait<0>(); }
}

// Requires HS = 64 and sm_90a.
void attention_backward10(const AttentionBackwardArgs& a, cudaStream_t stream) {
    AttentionBackwardSm90Args args = attention_backward_sm90_args<64>(a);
    CUtensorMap qkv_map = tensor_map_heads(a.qkv, a.B, a.T, 3 * a.NH, 128);
    CUtensorMap dout_map = tensor_map_heads(a.dout, a.B, a.T, a.NH, 128);
    CUtensorMap dqkv_map = tensor_map_heads(a.dqkv, a.B, a.T, 3 * a.NH, 16);
    attention_backward_sm90_stats<64>(args, a, stream);
    auto kernel = attention_backward_sm90_kernel10;
    constexpr int SHARED_BYTES = sizeof(AttentionBackwardSMem<>);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<args.num_heads * args.num_tiles, 384, SHARED_BYTES, stream>>>(args, qkv_map, dout_map, dqkv_map);
    cudaCheck(cudaGetLastError());
}

// The configurations of kernel 7 for HS = 64; 0 is what attention_backward() takes.
typedef void AttentionBackwardMma(const AttentionBackwardArgs& args, const Execution& exec);
struct AttentionBackwardForm {
    BenchConfig config;
    AttentionBackwardMma* launch; // NULL: the default
};
static const std::vector<AttentionBackwardForm> attention_backward_forms7 = {
    {{0, "dk dv: 32 rows x 16; dq: 32 rows x 32"}, NULL},
    {{1, "dk dv: 32 rows x 16; dq: 32 rows x 16"}, attention_backward_mma_sized<64, 2, 2, 2, 2, 2, 2>},
    {{2, "dk dv: 16 rows x 32; dq: 32 rows x 32"}, attention_backward_mma_sized<64, 1, 4, 2, 2, 4, 2>},
    {{3, "dk dv: 32 rows x 16; dq: 16 rows x 32"}, attention_backward_mma_sized<64, 2, 2, 2, 1, 4, 3>}};
#endif

static void declare(Bench& b) {
    b.varies("BTH");
    int B = b.B, T = b.T, C = b.C, NH = b.NH, HS = C / NH;
    cudaStream_t stream = b.stream;
    size_t n = (size_t)B * T * C, num_rows = (size_t)B * T * NH;
    // Queries and keys are `size` times as large, so the terms of dq and dk are, too. With scores of a few dozen, every
    // row has the few large probabilities, and so the errors, that only the first rows have otherwise: twice more for
    // the worst of so many.
    int which = b.cases({"normal", "scores of a few dozen", "equal queries, equal keys"});
    float size = which == 0 ? 1.0f : 4.0f;
    Buffer<floatX> qkv = b.input_from<floatX>("qkv", 3 * n, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, 3 * n, seed, 1.0f, 0.0f);
        bench_pieces(3 * n, [=](size_t begin, size_t end) {
            for (size_t i = begin; i < end && which > 0; i++) {
                if (i / C % 3 < 2) { x[i] = which == 1 ? size * x[i] : size; }
            }
        });
    });
    Buffer<floatX> dout = b.input<floatX>("dout", n);
    std::vector<size_t> heads = b.sample((size_t)B * NH, 7.0 * T * T * HS);
    std::vector<size_t> positions = b.sample(T, 10.0 * T * HS * (double)heads.size());
    std::vector<float> lse_host(b.dry ? 0 : num_rows);
    Buffer<floatX> out = b.input_from<floatX>("out", n, [&](float* host) {
        // heads that are not in the sample get plausible numbers; with large scores exp(score - lse) must not overflow
        std::fill(host, host + n, 0.1f);
        std::fill(lse_host.begin(), lse_host.end(), which == 0 ? logf((float)T) : 1e4f);
        std::vector<size_t> rows;
        for (size_t i = 0; i < heads.size() * T; i++) { rows.push_back(heads[i / T] * T + i % T); }
        attention_forward_rows_cpu(host, lse_host.data(), qkv.host, B, T, C, NH, rows);
    });
    Buffer<float> lse = b.input_from<float>(
        "lse", num_rows, [&](float* host) { memcpy(host, lse_host.data(), num_rows * sizeof(float)); });
    float ulp = ulp_of<floatX>();
    Tolerance tolerance = sizeof(floatX) == 2 ? Tolerance{3 * ulp, ulp} : Tolerance{96 * ulp, 8 * ulp};
    tolerance.atol *= which != 1 ? size : sizeof(floatX) == 2 ? 2 * size : size * size * size;
    if (which == 2 && sizeof(floatX) == 4) { tolerance.rtol *= size * size; }
    Buffer<floatX> dqkv = b.output<floatX>("dqkv", 3 * n, tolerance);
    Buffer<float> scratch = b.scratch<float>("scratch", attention_backward_scratch(B, T, C, NH));
    Buffer<float> dbias_start = {NULL, NULL}, dbias = {NULL, NULL};
    float scale = 1.0f / sqrtf((float)HS);
    bool has_bias = b.kinds({"without dbias", "with dbias"}) == 1;
    if (has_bias) { // the errors of the rows are independent, but for those of equal queries and keys
        float N = (float)B * T;
        dbias_start = b.input<float>("dbias_start", 3 * C);
        dbias = b.inout<float>("dbias", 3 * C, dbias_start,
                               Tolerance{tolerance.atol * (which == 2 ? N : sqrtf(N)), tolerance.rtol});
    }
    b.reference([=] {
        attention_backward_rows_cpu(dqkv.host, dout.host, qkv.host, B, T, C, NH, heads, positions);
        if (has_bias && heads.size() == (size_t)B * NH && positions.size() == (size_t)T) {
            memcpy(dbias.host, dbias_start.host, 3 * C * sizeof(float));
            matmul_backward_bias_cpu(dbias.host, dqkv.host, B * T, 3 * C);
        }
    });
    b.cost(8.0 * n * sizeof(floatX) + num_rows * sizeof(float), 5.0 * B * NH * T * (double)T * HS);

    AttentionBackwardArgs args = {dqkv, NULL, scratch, dout, qkv, out, lse, B, T, C, NH, scale};
    auto run = [=](float* dbias) {
        attention_backward(dqkv, dbias, scratch, dout, qkv, out, lse, B, T, C, NH, scale, stream);
    };
    if (!has_bias) {
        if ((double)num_rows * T <= 1 << 30) { // at most 12 GB of T x T matrices
            Buffer<float> scores = b.scratch<float>("scores", num_rows * T), dp = b.scratch<float>("dp", num_rows * T);
            Buffer<floatX> p = b.scratch<floatX>("p", num_rows * T), ds = b.scratch<floatX>("ds", num_rows * T);
            if (!b.dry) { cublas_handle(); } // it allocates memory, which no timed launch should do
            auto kernel0 = [=](int bs) {
                attention_backward_dsum(args, stream);
                attention_backward0(dqkv, scores, dp, p, ds, scratch, dout, qkv, lse, B, T, C, NH, stream, bs);
            };
            b.kernel(0, "cuBLAS for the five products, T x T matrices in memory", kernel0, {256});
            auto kernel1 = [=](int bs) {
                attention_backward_dsum(args, stream);
                attention_backward1(dqkv, scores, dp, lse, scratch, dout, qkv, B, T, C, NH, stream, bs);
            };
            b.kernel(1, "one thread per score, then one per gradient element", kernel1, {128, 256, 512});
        }
        auto kernel2 = [=](int bs) {
            attention_backward_dsum(args, stream);
            attention_backward2(dqkv, lse, scratch, dout, qkv, B, T, C, NH, stream, bs);
        };
        b.kernel(2, "no T x T matrix: one warp per row recomputes the scores", kernel2, {128, 256, 512});
        auto kernel3 = [=](int) { attention_backward_plain(args, stream); };
        b.kernel(3, "fp32 arithmetic, tiles in shared memory and registers", kernel3, {0});
#if !defined(ENABLE_FP32)
        if (HS == 64) {
            auto kernel4 = [=](int) {
                attention_backward_dsum(args, stream);
                attention_backward4<false>(dqkv, lse, scratch, dout, qkv, B, T, C, NH, stream);
            };
            b.kernel(4, "mma.sync, 16 rows per warp, P and dS through shared memory", kernel4, {0}, 80);
            auto kernel5 = [=](int) {
                attention_backward_dsum(args, stream);
                attention_backward4<true>(dqkv, lse, scratch, dout, qkv, B, T, C, NH, stream);
            };
            b.kernel(5, "4 with P and dS as operands from registers", kernel5, {0}, 80);
            auto kernel6 = [=](int) {
                attention_backward_dsum(args, stream);
                attention_backward6(args, stream);
            };
            b.kernel(6, "cp.async, two stages, swizzled, 16 rows per warp", kernel6, {0}, 80);
        }
        auto kernel7 = [=](int form) {
            if (form == 0) { return attention_backward_mma(args, stream); }
            attention_backward_dsum(args, stream);
            attention_backward_forms7[form].launch(args, stream);
        };
        b.kernel(7, "6 with 32 rows per warp; any head size", kernel7, {0}, 80);
        if (HS == 64) {
            std::vector<BenchConfig> configs;
            for (const AttentionBackwardForm& form : attention_backward_forms7) { configs.push_back(form.config); }
            b.config("form", configs);
            Buffer<float> dq_sums = b.scratch<float>("dq_sums", (size_t)B * NH * ceil_div(T, 64) * 4096);
            auto kernel8 = [=](int) {
                attention_backward_dsum(args, stream);
                attention_backward8(dqkv, dq_sums, lse, scratch, dout, qkv, B, T, C, NH, stream);
            };
            b.kernel(8, "five products, one block per head, dq summed in L2", kernel8, {0}, 80);
            auto kernel9 = [=](int) { attention_backward9(args, stream); };
            b.kernel(9, "wgmma and TMA, dq summed in L2 in the order of the keys", kernel9, {0}, -90);
            auto kernel10 = [=](int) { attention_backward10(args, stream); };
            b.kernel(10, "a producer, two adders of dq, two consumer warpgroups", kernel10, {0}, -90);
        }
#endif
        auto promoted = [=](int) { run(NULL); };
        b.kernel(11, "persistent, work items by ticket; 7 or 3 where 11 cannot run", promoted, {0});
        return b.promoted(11);
    }
    auto two_ops = [=](int) {
        run(NULL);
        matmul_backward_bias(dbias, scratch, dqkv, B * T, 3 * C, stream);
    };
    auto fused = [=](int) { run(dbias); };
    b.kernel(12, "11, then matmul_backward_bias", two_ops, {0});
    b.kernel(13, "11 with the sums of dqkv from registers; 11 where it cannot run", fused, {0});
    b.promoted(13);
}

// The check shapes have head sizes 64, 32, 96 and 128, and 40, 72, 136 and 200, which tiles pad. The shapes with
// 12 * 6 heads of 3 tiles have more work items than an H200 has SMs; at T = 1100 up to nine key tiles add to one sum. Of 129
// heads with two tiles, 128 go up.
int main(int argc, char** argv) {
    return bench_main(argc, argv, "attention_backward", declare, {8, 1024, 768, 12},
                      {{1, 1, 64, 1},
                       with_kind(1, {1, 1, 64, 1}),
                       with_kind(1, {2, 129, 128, 2}),
                       with_kind(1, {12, 257, 384, 6}),
                       with_kind(1, {1, 130, 400, 2}),
                       with_kind(1, {2, 257, 128, 1}),
                       with_kind(1, {1, 129, 8256, 129}),
                       {2, 17, 128, 2},
                       {1, 64, 64, 2},
                       {2, 127, 192, 3},
                       {1, 128, 128, 2},
                       {2, 129, 64, 1},
                       {3, 700, 128, 2},
                       {12, 257, 384, 6},
                       {2, 1100, 128, 2},
                       {1, 128, 192, 2},
                       {2, 200, 256, 4},
                       {1, 200, 192, 2},
                       {1, 200, 256, 2},
                       {12, 257, 768, 6},
                       {1, 300, 128, 4},
                       {1, 70, 80, 2},
                       {2, 100, 72, 1},
                       {1, 150, 136, 1},
                       {1, 130, 400, 2}});
}
