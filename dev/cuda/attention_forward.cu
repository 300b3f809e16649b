/* attention_forward: out = softmax(scale * q k^T, causal) v, for each head; scale = 1 / sqrt(HS)

   out (B,T,NH,HS) floatX out | lse (B,NH,T) float out, or NULL: ln(sum over k of exp(scale * q.k))
   qkv (B,T,3,NH,HS) floatX in | C = NH * HS. Kind 1 (kernels 1 and 3): q, k, v (B,T,NH,HS) each, and no causal mask.
   Bound: compute, 2*B*NH*T*T*HS FLOPs: two products of 2*T*T*HS per head, of which the causal mask leaves half.
   Constraint: HS % 8 == 0, HS <= 256.
   Tuned: tiles of kernels 6 and 15, tile of 25. The other rungs have the tiles that registers and shared memory suggest.
   Error: against the fp64 reference, one ulp of out plus one ulp of 1, because P is rounded to floatX before P V. That
   costs at most half an ulp of sum(p |v|), which is close to 2 in a few rows with few keys. fp32: 32 ulps of out plus
   32 ulps of 1, from the sums over HS and from exp. A score of size s has an error of about 4 s ulps of fp32,
   times sqrt(HS / 64) for larger heads.
   Source: Dao 2023, FlashAttention-2, arXiv:2307.08691; Milakov and Gimelshein 2018, online softmax, arXiv:1805.02867.

   Kernels (this list is written by versions.sh):
     0  cuBLAS for both products, T x T matrix in memory
     1  one thread per query
     2  one thread per score, T x T matrix in memory
     3  online softmax in registers, no T x T matrix
     4  keys and values in shared memory
     5  register tiles, 8 queries x 4 keys per thread
     6  128-bit accesses, heads in groups that fit in L2; any head size
     7  mma.sync, 16 queries per warp, padded shared memory
     8  less arithmetic per score: masks at the diagonal only, one fma per exponent
     9  query fragments loaded once
    10  cp.async, two stages
    11  swizzled instead of padded
    12  output stored 16 bytes at a time, heads in groups that fit in L2 (slower than 11)
    13  32 queries per warp, half the shared memory reads (slower than 11)
    14  lazy rescaling, only when P would exceed 2^8 (slower than 11)
    15  steps of 32 keys, 3 blocks per SM; any head size (loses to 14 at B = 16, wins at B = 64)
    16  TMA and mbarriers instead of cp.async
    17  wgmma, steps of 64 keys, two blocks per SM
    18  steps of 128 keys, the diagonal first
    19  a producer and two consumer warpgroups, P V overlaps the softmax (loses to 18)
    20  19 in ping-pong: the two consumers alternate (loses to 18)
    21  20, persistent, pairs of tiles of equal work
    22  21 with 192 queries per tile, three consumer warpgroups (loses to 21 at T = 1024)
    23  21 with consecutive tiles overlapped, no ping-pong (loses to 21 at B = 16)
    24  23 with three consumers that skip keys they do not see
    25  four independent consumer warpgroups, steps of 64 keys (promoted)
    26  25 with three consumers and steps of 128 keys (loses to 25 at T = 1024)
    27  26 in ping-pong, promoted for T >= 4096 (loses to 26 at T = 1024)

   nvcc -O3 --use_fast_math attention_forward.cu -o attention_forward -lcublas -lcublasLt   (or: make attention_forward)
   ./attention_forward 15     check kernel 15 against the CPU
   ./attention_forward        every kernel, side by side
   Kernels from 16 on need -gencode arch=compute_90a,code=sm_90a and HS = 64; kernel 25 also takes HS = 128.         */
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "cublas_batched.cuh"

// ---- kernel 0: cuBLAS for both products, one kernel for the softmax, the T x T matrix in global memory ----
// In the packed layout the heads of a sequence are HS elements apart, so one strided-batched product per sequence needs
// no permutation.

// p[row] = softmax of the first row % T + 1 scores of that row, then zeros for the masked keys. One block per row,
// B*NH*T rows.
__global__ void attention_forward_softmax_kernel(floatX* p, float* lse, const float* scores, int T, float scale) {
    __shared__ float shared[32];
    size_t row = blockIdx.x;
    int num_keys = (int)(row % T) + 1;
    scores += row * T, p += row * T;
    float row_max = -INFINITY, sum = 0;
    for (int k = threadIdx.x; k < num_keys; k += blockDim.x) { row_max = fmaxf(row_max, scores[k]); }
    row_max = block_max(row_max, shared);
    for (int k = threadIdx.x; k < num_keys; k += blockDim.x) { sum += expf((scores[k] - row_max) * scale); }
    sum = block_sum(sum, shared);
    for (int k = threadIdx.x; k < T; k += blockDim.x) {
        p[k] = (floatX)(k < num_keys ? expf((scores[k] - row_max) * scale) / sum : 0.0f);
    }
    if (threadIdx.x == 0) { lse[row] = row_max * scale + logf(sum); }
}

static void attention_forward_softmax(floatX* p, float* lse, const float* scores, int B, int T, int NH, float scale,
                                      const Execution& exec, int block_size) {
    attention_forward_softmax_kernel<<<B * NH * T, block_size, 0, exec.stream>>>(p, lse, scores, T, scale);
    cudaCheck(cudaGetLastError());
}

// scores (B,NH,T,T) float scratch, p (B,NH,T,T) floatX scratch
void attention_forward0(floatX* out, float* lse, float* scores, floatX* p, const floatX* qkv, int B, int T, int C,
                        int NH, const Execution& exec, int block_size) {
    const cudaDataType_t type = cublaslt_floatX;
    const float one = 1.0f, zero = 0.0f;
    int HS = C / NH;
    long long matrix = (long long)T * T;
    // cuBLAS is column-major, so for each head it computes scores^T (T,T) = k q^T and out^T (HS,T) = v^T p^T
    for (int b = 0; b < B; b++) {
        const floatX* q = qkv + (size_t)b * T * 3 * C;
        cublas_batched(CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &one, q + C, type, 3 * C, HS, q, type, 3 * C, HS, &zero,
                       scores + (size_t)b * NH * matrix, CUDA_R_32F, T, matrix, NH, exec);
    }
    attention_forward_softmax(p, lse, scores, B, T, NH, 1.0f / sqrtf((float)HS), exec, block_size);
    for (int b = 0; b < B; b++) {
        const floatX* v = qkv + (size_t)b * T * 3 * C + 2 * C;
        cublas_batched(CUBLAS_OP_N, CUBLAS_OP_N, HS, T, T, &one, v, type, 3 * C, HS, p + (size_t)b * NH * matrix, type,
                       T, matrix, &zero, out + (size_t)b * T * C, type, C, HS, NH, exec);
    }
}

// ---- kernel 1: one thread per query, plain loops; scores are computed twice rather than stored ----

__device__ inline float attention_forward_dot(const floatX* a, const floatX* b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) { sum += (float)a[i] * (float)b[i]; }
    return sum;
}

// The inputs of kernels 1 and 3. Packed (B,T,3,NH,HS): k = q + C, v = q + 2 * C, stride = 3 * C. Three tensors
// (B,T,NH,HS): stride = C.
struct AttentionForwardInputs {
    const floatX *q, *k, *v;
    size_t stride; // elements from one token to the next
    bool causal;   // false: each query sees all T keys
};

__global__ void attention_forward_kernel1(floatX* out, float* lse, AttentionForwardInputs inp, int B, int T, int C,
                                          int NH, float scale) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T) { return; }
    int t = i % T, h = i / T % NH, b = i / T / NH, HS = C / NH, num_keys = inp.causal ? t + 1 : T;
    size_t first = (size_t)b * T * inp.stride + h * HS; // token 0 of this head
    const floatX *q = inp.q + first + t * inp.stride, *keys = inp.k + first, *values = inp.v + first;
    float m = -INFINITY, l = 0, o[256];
    for (int k = 0; k < num_keys; k++) { m = fmaxf(m, attention_forward_dot(q, keys + k * inp.stride, HS) * scale); }
    for (int d = 0; d < HS; d++) { o[d] = 0; }
    for (int k = 0; k < num_keys; k++) {
        float p = expf(attention_forward_dot(q, keys + k * inp.stride, HS) * scale - m);
        for (int d = 0; d < HS; d++) { o[d] += p * (float)values[k * inp.stride + d]; }
        l += p;
    }
    for (int d = 0; d < HS; d++) { out[((size_t)b * T + t) * C + h * HS + d] = (floatX)(o[d] / l); }
    lse[i] = m + logf(l);
}

void attention_forward1(floatX* out, float* lse, const AttentionForwardInputs& inp, int B, int T, int C, int NH,
                        const Execution& exec, int block_size) {
    require(C / NH <= 256);
    attention_forward_kernel1<<<ceil_div(B * NH * T, block_size), block_size, 0, exec.stream>>>(
        out, lse, inp, B, T, C, NH, 1.0f / sqrtf((float)(C / NH)));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one thread per score, one block per softmax row, one thread per output; T x T in global memory ----

__global__ void attention_forward_kernel2_scores(float* scores, const floatX* qkv, int T, int C, int NH) {
    int k = blockIdx.x * blockDim.x + threadIdx.x, q = blockIdx.y, b = blockIdx.z / NH, h = blockIdx.z % NH;
    if (k > q) { return; }
    const floatX* first = qkv + (size_t)b * T * 3 * C + h * (C / NH);
    scores[((size_t)blockIdx.z * T + q) * T + k] =
        attention_forward_dot(first + (size_t)q * 3 * C, first + C + (size_t)k * 3 * C, C / NH);
}

__global__ void attention_forward_kernel2_values(floatX* out, const floatX* p, const floatX* qkv, int B, int T, int C,
                                                 int NH) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * T * C) { return; }
    int c = i % C, t = i / C % T, b = i / C / T, h = c / (C / NH);
    const floatX* v = qkv + (size_t)b * T * 3 * C + 2 * C + c;
    p += (((size_t)b * NH + h) * T + t) * T;
    float sum = 0;
    for (int k = 0; k <= t; k++) { sum += (float)p[k] * (float)v[(size_t)k * 3 * C]; }
    out[i] = (floatX)sum;
}

void attention_forward2(floatX* out, float* lse, float* scores, floatX* p, const floatX* qkv, int B, int T, int C,
                        int NH, const Execution& exec, int block_size) {
    require(T <= 65535 && B * NH <= 65535);
    attention_forward_kernel2_scores<<<dim3(ceil_div(T, block_size), T, B * NH), block_size, 0, exec.stream>>>(
        scores, qkv, T, C, NH);
    cudaCheck(cudaGetLastError());
    attention_forward_softmax(p, lse, scores, B, T, NH, 1.0f / sqrtf((float)(C / NH)), exec, block_size);
    attention_forward_kernel2_values<<<(unsigned)ceil_div((size_t)B * T * C, (size_t)block_size), block_size, 0,
                                       exec.stream>>>(out, p, qkv, B, T, C, NH);
    cudaCheck(cudaGetLastError());
}

constexpr int LADDER_HS =
    64; // the only head size of the rungs that attention_forward() does not call, from kernel 3 on

// ---- kernel 3: online softmax, so one pass over the keys; the thread's query and its output stay in registers ----

__global__ void attention_forward_kernel3(floatX* out, float* lse, AttentionForwardInputs inp, int B, int T, int NH,
                                          float scale) {
    constexpr int HS = LADDER_HS;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T) { return; }
    int t = i % T, h = i / T % NH, b = i / T / NH, num_keys = inp.causal ? t + 1 : T;
    size_t C = (size_t)NH * HS, first = (size_t)b * T * inp.stride + h * HS;
    const floatX *keys = inp.k + first, *values = inp.v + first;
    float m = -INFINITY, l = 0, q[HS], o[HS] = {};
    for (int d = 0; d < HS; d++) { q[d] = (float)inp.q[first + t * inp.stride + d]; }
    for (int k = 0; k < num_keys; k++) { // the 32 queries of a warp read the same key at once
        const floatX *key = keys + k * inp.stride, *value = values + k * inp.stride;
        float s = 0;
        for (int d = 0; d < HS; d++) { s += q[d] * (float)key[d]; }
        // what has been summed so far is relative to the old maximum
        float new_m = fmaxf(m, s * scale), rescale = expf(m - new_m), p = expf(s * scale - new_m);
        m = new_m, l = l * rescale + p;
        for (int d = 0; d < HS; d++) { o[d] = o[d] * rescale + p * (float)value[d]; }
    }
    for (int d = 0; d < HS; d++) { out[((size_t)b * T + t) * C + h * HS + d] = (floatX)(o[d] / l); }
    lse[i] = m + logf(l);
}

void attention_forward3(floatX* out, float* lse, const AttentionForwardInputs& inp, int B, int T, int NH,
                        const Execution& exec) {
    attention_forward_kernel3<<<ceil_div(B * NH * T, 128), 128, 0, exec.stream>>>(out, lse, inp, B, T, NH,
                                                                                  1.0f / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: keys and values in shared memory: converted to float once per block instead of once per thread ----
// The block owns 128 queries of one head. Tiles with the most keys start first, so that the last blocks are short.

__global__ void __launch_bounds__(128)
    attention_forward_kernel4(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(16) float keys[32][HS], values[32][HS];
    int q0 = (gridDim.y - 1 - blockIdx.y) * 128, t = q0 + threadIdx.x, b = blockIdx.x / NH, h = blockIdx.x % NH;
    size_t C = (size_t)NH * HS;
    const floatX* first = qkv + (size_t)b * T * 3 * C + h * HS;
    float m = -INFINITY, l = 0, q[HS], o[HS] = {};
    for (int d = 0; d < HS; d++) { q[d] = t < T ? (float)first[t * 3 * C + d] : 0; }
    for (int k0 = 0; k0 < min(q0 + 128, T); k0 += 32) {
        __syncthreads(); // all warps have read the previous tile
        for (int i = threadIdx.x; i < 32 * HS; i += 128) {
            int row = i / HS, d = i % HS;
            const floatX* key = first + C + (k0 + row) * 3 * C + d;
            keys[row][d] = k0 + row < T ? (float)key[0] : 0;
            values[row][d] = k0 + row < T ? (float)key[C] : 0;
        }
        __syncthreads();
        for (int k = 0; k < min(32, t - k0 + 1); k++) {
            float s = 0;
            for (int d = 0; d < HS; d++) { s += q[d] * keys[k][d]; }
            float new_m = fmaxf(m, s * scale), rescale = expf(m - new_m), p = expf(s * scale - new_m);
            m = new_m, l = l * rescale + p;
            for (int d = 0; d < HS; d++) { o[d] = o[d] * rescale + p * values[k][d]; }
        }
    }
    if (t >= T) { return; }
    for (int d = 0; d < HS; d++) { out[((size_t)b * T + t) * C + h * HS + d] = (floatX)(o[d] / l); }
    lse[(size_t)blockIdx.x * T + t] = m + logf(l);
}

void attention_forward4(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_kernel4<<<dim3(B * NH, ceil_div(T, 128)), 128, 0, exec.stream>>>(out, lse, qkv, T, NH,
                                                                                       1.0f / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: register tiles: 8 queries x 4 keys per thread, so 12 values are read for 32 products ----
// The block owns 64 queries, each warp 16, each half-warp 8 of them: row0, row0 + 2, ... Of the scores a thread holds
// columns tx, tx + 16, ..., of the output likewise. P goes through shared memory, because its columns are spread over
// the half-warp.

struct AttentionForwardSMem5 {              // 65: 16 rows at the same column lie in 16 banks
    float q[64][65], kv[64][65], p[64][65]; // kv: first the keys of a tile, then its values
};

__device__ inline void attention_forward_load5(float (*tile)[65], const floatX* src, int first, int T, size_t stride) {
    for (int i = threadIdx.x; i < 64 * LADDER_HS; i += 128) {
        int row = i / LADDER_HS, d = i % LADDER_HS;
        tile[row][d] = first + row < T ? (float)src[(first + row) * stride + d] : 0;
    }
}

__global__ void __launch_bounds__(128)
    attention_forward_kernel5(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale) {
    constexpr int HS = LADDER_HS, ROWS = 8, COLUMNS = 4; // per thread
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardSMem5*>(attention_forward_shared);
    int q0 = (gridDim.y - 1 - blockIdx.y) * 64, b = blockIdx.x / NH, h = blockIdx.x % NH;
    int tx = threadIdx.x % 16, row0 = threadIdx.x / 32 * 16 + threadIdx.x / 16 % 2;
    size_t C = (size_t)NH * HS;
    const floatX* first = qkv + (size_t)b * T * 3 * C + h * HS;
    float m[ROWS], l[ROWS] = {}, o[ROWS][COLUMNS] = {}; // l: this thread's partial sum
    for (int i = 0; i < ROWS; i++) { m[i] = -INFINITY; }
    attention_forward_load5(smem.q, first, q0, T, 3 * C);
    for (int k0 = 0; k0 < min(q0 + 64, T); k0 += 64) {
        __syncthreads(); // all warps have read the values of the previous tile
        attention_forward_load5(smem.kv, first + C, k0, T, 3 * C);
        __syncthreads();
        float s[ROWS][COLUMNS] = {};
        for (int d = 0; d < HS; d++) {
            float k[COLUMNS];
            for (int j = 0; j < COLUMNS; j++) { k[j] = smem.kv[tx + 16 * j][d]; }
            for (int i = 0; i < ROWS; i++) {
                float q = smem.q[row0 + 2 * i][d];
                for (int j = 0; j < COLUMNS; j++) { s[i][j] += q * k[j]; }
            }
        }
        for (int i = 0; i < ROWS; i++) {
            int row = row0 + 2 * i;
            float new_m = m[i];
            for (int j = 0; j < COLUMNS; j++) {
                s[i][j] = k0 + tx + 16 * j > q0 + row ? -INFINITY : s[i][j] * scale;
                new_m = fmaxf(new_m, s[i][j]);
            }
            for (int offset = 8; offset > 0; offset /= 2) { // the 16 threads of a half-warp share the row
                new_m = fmaxf(new_m, __shfl_xor_sync(0xFFFFFFFFu, new_m, offset));
            }
            float rescale = expf(m[i] - new_m);
            m[i] = new_m, l[i] *= rescale;
            for (int j = 0; j < COLUMNS; j++) {
                o[i][j] *= rescale;
                float p = expf(s[i][j] - new_m);
                l[i] += p;
                smem.p[row][tx + 16 * j] = p;
            }
        }
        __syncthreads(); // all warps have read the keys
        attention_forward_load5(smem.kv, first + 2 * C, k0, T, 3 * C);
        __syncthreads();
        for (int key = 0; key < 64; key++) {
            float v[COLUMNS];
            for (int j = 0; j < COLUMNS; j++) { v[j] = smem.kv[key][tx + 16 * j]; }
            for (int i = 0; i < ROWS; i++) {
                float p = smem.p[row0 + 2 * i][key];
                for (int j = 0; j < COLUMNS; j++) { o[i][j] += p * v[j]; }
            }
        }
    }
    for (int i = 0; i < ROWS; i++) {
        for (int offset = 8; offset > 0; offset /= 2) { l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], offset); }
        int t = q0 + row0 + 2 * i;
        if (t >= T) { continue; }
        for (int j = 0; j < COLUMNS; j++) {
            out[((size_t)b * T + t) * C + h * HS + tx + 16 * j] = (floatX)(o[i][j] / l[i]);
        }
        if (tx == 0) { lse[(size_t)blockIdx.x * T + t] = m[i] + logf(l[i]); }
    }
}

void attention_forward5(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem5); // 49 KB: more than a launch gets without asking
    cudaCheck(
        cudaFuncSetAttribute(attention_forward_kernel5, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    attention_forward_kernel5<<<dim3(B * NH, ceil_div(T, 64)), 128, SHARED_BYTES, exec.stream>>>(
        out, lse, qkv, T, NH, 1.0f / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}

#include "attention_forward.cuh" // kernels 6, 15 and 25, and the template of 26 and 27

#if !defined(ENABLE_FP32)
// ---- kernel 7: mma.sync, 16 queries per warp, tiles in padded shared memory ----
// Rows are padded by 8 elements to 144 bytes, so that the 8 rows that ldmatrix reads at once have no bank conflict.
//
// s[n] and o[n] are 16x8 accumulator tiles of mma.sync (columns 8n..8n+7), 4 floats per lane. Lane 4g + t holds:
//
//     columns          0   1     2   3     4   5     6   7
//     row g            lane 4g   4g + 1    4g + 2    4g + 3      c[0], c[1]
//     row g + 8        lane 4g   4g + 1    4g + 2    4g + 3      c[2], c[3]
//
// So a row is shared by the four lanes of a quad: shuffles by 1 and 2 complete its maximum and its sum. A block owns 64
// queries of one head, and 4 blocks fit on an SM, with 128 registers per thread. Kernels 8 to 11 replace the parts of this
// kernel, one after the other.

constexpr int LADDER_ROW = LADDER_HS + 8; // elements of a padded row

// Rows first..first+63 of src, which are 3 * C elements apart; zeros past T.
__device__ inline void attention_forward_load7(floatX (*tile)[LADDER_ROW], const floatX* src, int first, int T,
                                               size_t C) {
    for (int i = threadIdx.x; i < 64 * LADDER_HS / 8; i += 128) {
        int row = i / (LADDER_HS / 8), d = i % (LADDER_HS / 8) * 8;
        x128 x = {};
        if (first + row < T) { x = load128(src + (first + row) * 3 * C + d); }
        store128(&tile[row][d], x);
    }
}

// Turns the scores of a warp's 16 queries and 64 keys into P. Row r does not see keys after diagonal + r. l: this
// lane's partial sums.
__device__ inline void attention_forward_softmax7(float (&s)[8][4], float (&o)[8][4], float (&m)[2], float (&l)[2],
                                                  int diagonal, float scale_log2) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) { // rows g and g + 8
        float new_m = m[r];
        for (int n = 0; n < 8; n++) {
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                bool masked = 8 * n + 2 * t + e % 2 > diagonal + 8 * r + g;
                s[n][e] = masked ? -INFINITY : s[n][e] * scale_log2;
                new_m = fmaxf(new_m, s[n][e]);
            }
        }
        new_m = fmaxf(new_m, __shfl_xor_sync(0xFFFFFFFFu, new_m, 1));
        new_m = fmaxf(new_m, __shfl_xor_sync(0xFFFFFFFFu, new_m, 2));
        float rescale = exp2_approx(m[r] - new_m);
        m[r] = new_m, l[r] *= rescale;
        for (int n = 0; n < 8; n++) { o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale; }
        for (int n = 0; n < 8; n++) {
            for (int e = 2 * r; e < 2 * r + 2; e++) { l[r] += s[n][e] = exp2_approx(s[n][e] - new_m); }
        }
    }
}

// o += P v for 64 keys. Two accumulator tiles of P, rounded to 16 bits, are an operand fragment.
__device__ inline void attention_forward_values7(float (&o)[8][4], const float (&s)[8][4],
                                                 floatX (*v_tile)[LADDER_ROW]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t p[4] = {pack_16x2(s[n][0], s[n][1], floatX()), pack_16x2(s[n][2], s[n][3], floatX()),
                         pack_16x2(s[n + 1][0], s[n + 1][1], floatX()), pack_16x2(s[n + 1][2], s[n + 1][3], floatX())};
#pragma unroll
        for (int d = 0; d < 8; d += 2) {
            uint32_t v[4];
            ldmatrix_x4_trans(v, &v_tile[8 * n + lane % 16][8 * d + lane / 16 * 8]);
            mma_16x8x16(o[d], p, v[0], v[1], floatX());
            mma_16x8x16(o[d + 1], p, v[2], v[3], floatX());
        }
    }
}

// Divides a warp's 16 rows, tokens t0..t0+15, by their sums and stores them. out, lse: those of this sequence and head.
__device__ inline void attention_forward_store7(floatX* out, float* lse, const float (&o)[8][4], const float (&m)[2],
                                                const float (&l)[2], int t0, int T, size_t C) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = l[r];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        int row = t0 + 8 * r + g;
        if (row >= T) { continue; }
        for (int n = 0; n < 8; n++) {
            uint32_t pair = pack_16x2(o[n][2 * r] / sum, o[n][2 * r + 1] / sum, floatX());
            *reinterpret_cast<uint32_t*>(out + row * C + 8 * n + 2 * t) = pair;
        }
        if (t == 0) { lse[row] = (m[r] + log2f(sum)) * LN2; }
    }
}

// softmax: attention_forward_softmax7 or _softmax8
template <auto softmax> __global__ void __launch_bounds__(128, 4)
    attention_forward_kernel7(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(16) floatX q_tile[64][LADDER_ROW], k_tile[64][LADDER_ROW], v_tile[64][LADDER_ROW];
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, q0 = (gridDim.y - 1 - blockIdx.y) * 64;
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    attention_forward_load7(q_tile, src, q0, T, C);
    float o[8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    for (int k0 = 0; k0 < min(q0 + 64, T); k0 += 64) {
        __syncthreads(); // all warps have read the previous tile
        attention_forward_load7(k_tile, src + C, k0, T, C);
        attention_forward_load7(v_tile, src + 2 * C, k0, T, C);
        __syncthreads();
        float s[8][4] = {};
#pragma unroll
        for (int d = 0; d < HS; d += 16) {
            uint32_t q[4];
            ldmatrix_x4(q, &q_tile[warp_row + lane % 16][d + lane / 16 * 8]);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t k[4];
                ldmatrix_x4(k, &k_tile[8 * n + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
                mma_16x8x16(s[n], q, k[0], k[1], floatX());
                mma_16x8x16(s[n + 1], q, k[2], k[3], floatX());
            }
        }
        softmax(s, o, m, l, q0 + warp_row - k0, scale_log2);
        attention_forward_values7(o, s, v_tile);
    }
    attention_forward_store7(out + (size_t)b * T * C + h * HS, lse + (size_t)blockIdx.x * T, o, m, l, q0 + warp_row, T,
                             C);
}

template <class Kernel> static void attention_forward_launch7(Kernel kernel, floatX* out, float* lse, const floatX* qkv,
                                                              int B, int T, int NH, const Execution& exec) {
    kernel<<<dim3(B * NH, ceil_div(T, 64)), 128, 0, exec.stream>>>(out, lse, qkv, T, NH,
                                                                   LOG2E / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}

void attention_forward7(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch7(attention_forward_kernel7<attention_forward_softmax7>, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 8: less arithmetic per score: masks at the diagonal only, one fma per exponent, rescale only if m grows ----

// Like attention_forward_softmax7.
__device__ inline void attention_forward_softmax8(float (&s)[8][4], float (&o)[8][4], float (&m)[2], float (&l)[2],
                                                  int diagonal, float scale_log2) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (diagonal < 63) { // row 0 does not see all keys
#pragma unroll
        for (int n = 0; n < 8; n++) {
            for (int e = 0; e < 4; e++) {
                if (8 * n + 2 * t + e % 2 > diagonal + e / 2 * 8 + g) { s[n][e] = -INFINITY; }
            }
        }
    }
    float new_m[2];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2; r++) { // rows g and g + 8
        float row_max = -INFINITY;
        for (int n = 0; n < 8; n++) { row_max = fmaxf(row_max, fmaxf(s[n][2 * r], s[n][2 * r + 1])); }
        row_max = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, 2));
        new_m[r] = fmaxf(m[r], row_max * scale_log2);
        grew |= new_m[r] > m[r];
    }
    if (__any_sync(0xFFFFFFFFu, grew)) { // after the first tiles few rows have a new maximum
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float rescale = exp2_approx(m[r] - new_m[r]);
            m[r] = new_m[r], l[r] *= rescale;
            for (int n = 0; n < 8; n++) { o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale; }
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
        for (int e = 0; e < 4; e++) { l[e / 2] += s[n][e] = exp2_approx(fmaf(s[n][e], scale_log2, -m[e / 2])); }
    }
}

void attention_forward8(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch7(attention_forward_kernel7<attention_forward_softmax8>, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 9: the fragments of the queries are loaded once, not again for each tile of keys ----

// The operand fragments of a warp's 16 queries.
__device__ inline void attention_forward_queries9(uint32_t (&q)[4][4], floatX (*warp_q)[LADDER_ROW]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < 4; d++) { ldmatrix_x4(q[d], &warp_q[lane % 16][16 * d + lane / 16 * 8]); }
}

// s = q k^T for 64 keys.
__device__ inline void attention_forward_scores9(float (&s)[8][4], const uint32_t (&q)[4][4],
                                                 floatX (*k_tile)[LADDER_ROW]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < 4; d++) {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t k[4];
            ldmatrix_x4(k, &k_tile[8 * n + lane / 16 * 8 + lane % 8][16 * d + lane / 8 % 2 * 8]);
            mma_16x8x16(s[n], q[d], k[0], k[1], floatX());
            mma_16x8x16(s[n + 1], q[d], k[2], k[3], floatX());
        }
    }
}

__global__ void __launch_bounds__(128, 4)
    attention_forward_kernel9(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(16) floatX q_tile[64][LADDER_ROW], k_tile[64][LADDER_ROW], v_tile[64][LADDER_ROW];
    int warp_row = threadIdx.x / 32 * 16;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, q0 = (gridDim.y - 1 - blockIdx.y) * 64;
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    attention_forward_load7(q_tile, src, q0, T, C);
    __syncthreads();
    uint32_t q[4][4];
    attention_forward_queries9(q, q_tile + warp_row);
    float o[8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    for (int k0 = 0; k0 < min(q0 + 64, T); k0 += 64) {
        __syncthreads(); // all warps have read the previous tile
        attention_forward_load7(k_tile, src + C, k0, T, C);
        attention_forward_load7(v_tile, src + 2 * C, k0, T, C);
        __syncthreads();
        float s[8][4] = {};
        attention_forward_scores9(s, q, k_tile);
        attention_forward_softmax8(s, o, m, l, q0 + warp_row - k0, scale_log2);
        attention_forward_values7(o, s, v_tile);
    }
    attention_forward_store7(out + (size_t)b * T * C + h * HS, lse + (size_t)blockIdx.x * T, o, m, l, q0 + warp_row, T,
                             C);
}

void attention_forward9(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch7(attention_forward_kernel9, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 10: cp.async: the next tile of keys and values arrives in a second stage while this one is used ----

// Like attention_forward_load7, but does not wait.
__device__ inline void attention_forward_load10(floatX (*tile)[LADDER_ROW], const floatX* src, int first, int T,
                                                size_t C) {
    for (int i = threadIdx.x; i < 64 * LADDER_HS / 8; i += 128) {
        int row = i / (LADDER_HS / 8), d = i % (LADDER_HS / 8) * 8;
        cp_async_16(&tile[row][d], src + (first + row) * 3 * C + d, first + row < T);
    }
}

__global__ void __launch_bounds__(128, 4)
    attention_forward_kernel10(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(16) floatX q_tile[64][LADDER_ROW], k_tile[2][64][LADDER_ROW], v_tile[2][64][LADDER_ROW];
    int warp_row = threadIdx.x / 32 * 16;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, q0 = (gridDim.y - 1 - blockIdx.y) * 64;
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    attention_forward_load10(q_tile, src, q0, T, C);
    attention_forward_load10(k_tile[0], src + C, 0, T, C);
    attention_forward_load10(v_tile[0], src + 2 * C, 0, T, C);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    uint32_t q[4][4];
    attention_forward_queries9(q, q_tile + warp_row);
    float o[8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    for (int k0 = 0; k0 < min(q0 + 64, T); k0 += 64) {
        int stage = k0 / 64 % 2;
        if (k0 > 0) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has arrived, and all warps have read the stage that is loaded next
        }
        if (k0 + 64 < min(q0 + 64, T)) {
            attention_forward_load10(k_tile[1 - stage], src + C, k0 + 64, T, C);
            attention_forward_load10(v_tile[1 - stage], src + 2 * C, k0 + 64, T, C);
            cp_async_commit();
        }
        float s[8][4] = {};
        attention_forward_scores9(s, q, k_tile[stage]);
        attention_forward_softmax8(s, o, m, l, q0 + warp_row - k0, scale_log2);
        attention_forward_values7(o, s, v_tile[stage]);
    }
    attention_forward_store7(out + (size_t)b * T * C + h * HS, lse + (size_t)blockIdx.x * T, o, m, l, q0 + warp_row, T,
                             C);
}

void attention_forward10(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch7(attention_forward_kernel10, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 11: swizzled tiles instead of padded ones: 40 KB instead of 45 ----

__global__ void __launch_bounds__(128, 4)
    attention_forward_kernel11(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(256) AttentionForwardMmaSMem<HS, 1> smem;
    int warp_row = threadIdx.x / 32 * 16;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, q0 = (gridDim.y - 1 - blockIdx.y) * 64;
    int C = NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    auto load = [&](int stage, int t) { // of 64 keys and their values
        attention_forward_load<HS, 64>(smem.kv[stage][0], src + C, 3 * C, t, T);
        attention_forward_load<HS, 64>(smem.kv[stage][1], src + 2 * C, 3 * C, t, T);
        cp_async_commit();
    };
    attention_forward_load<HS, 64>(smem.q, src, 3 * C, q0, T);
    load(0, 0);
    cp_async_wait<0>();
    __syncthreads();
    AttentionForwardState<HS, 1> state;
    attention_forward_start(state, smem.q + warp_row * HS);
    uint32_t k_address = attention_forward_k_address<HS>(smem.kv[0][0]);
    uint32_t v_address = attention_forward_v_address<HS>(smem.kv[0][1]);
    for (int k0 = 0; k0 < min(q0 + 64, T); k0 += 64) {
        int stage = k0 / 64 % 2;
        if (k0 > 0) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has arrived, and all warps have read the stage that is loaded next
        }
        if (k0 + 64 < min(q0 + 64, T)) { load(1 - stage, k0 + 64); }
        uint32_t k = k_address + stage * sizeof(smem.kv[0]), v = v_address + stage * sizeof(smem.kv[0]);
        if (k0 < q0) {
            attention_forward_step<false, 64, 0>(state, k, v, 0, scale_log2);
        } else {
            attention_forward_step<true, 64, 0>(state, k, v, k0 - q0 - warp_row, scale_log2);
        }
    }
    attention_forward_store7(out + (size_t)b * T * C + h * HS, lse + (size_t)blockIdx.x * T, state.o[0], state.m[0],
                             state.l[0], q0 + warp_row, T, C);
}

void attention_forward11(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch7(attention_forward_kernel11, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 12: whole lines of memory: output rows are staged and stored 16 bytes at a time; heads in groups that fit in L2
// Kernels 12 to 14 are kernel 15 with other template arguments.

void attention_forward12(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_mma_tiles<LADDER_HS, 1, 64, 0, 3>({out, lse, qkv, B, T, LADDER_HS, NH, 1.0f / sqrtf(LADDER_HS)},
                                                        exec);
}

// ---- kernel 13: 32 queries per warp: each fragment of K and V is used twice, which halves shared memory reads ----

void attention_forward13(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_mma_tiles<LADDER_HS, 2, 64, 0, 2>({out, lse, qkv, B, T, LADDER_HS, NH, 1.0f / sqrtf(LADDER_HS)},
                                                        exec);
}

// ---- kernel 14: lazy rescaling, only when P would exceed 2^8, which is rare after the first keys ----

void attention_forward14(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_mma_tiles<LADDER_HS, 2, 64, 8, 2>({out, lse, qkv, B, T, LADDER_HS, NH, 1.0f / sqrtf(LADDER_HS)},
                                                        exec);
}
#endif

#include "attention_forward_blocks.cuh"

#if !defined(ENABLE_FP32)
// ---- kernel 16: TMA and mbarriers instead of cp.async: one thread starts the copy of a whole tile ----
// The other threads compute no addresses. TMA writes zeros for tokens past T, and swizzles as attention_forward_at().
// The products and the softmax are those of kernel 15.

struct AttentionForwardSMem16 { // 48 KB
    AttentionForwardMmaSMem<64, 2> tiles;
    uint64_t q_full, full[2];
    int h, b; // of this block; not in registers, all of which are in use
};

__device__ inline void attention_forward_init16(AttentionForwardSMem16& smem, int h, int b) {
    if (threadIdx.x == 0) {
        smem.h = h, smem.b = b;
        mbarrier_init(&smem.q_full, 1);
        mbarrier_init(&smem.full[0], 1);
        mbarrier_init(&smem.full[1], 1);
        mbarrier_init_fence();
    }
    __syncthreads();
}

// Starts the loads of 128 queries, tokens t..t+127.
__device__ inline void attention_forward_load_queries16(AttentionForwardSMem16& smem, const CUtensorMap& qkv_map,
                                                        int t) {
    mbarrier_arrive_expect(&smem.q_full, sizeof(smem.tiles.q));
    tma_load_4d(smem.tiles.q, &qkv_map, 0, smem.h, t, smem.b, &smem.q_full);
    tma_load_4d(smem.tiles.q + ATTENTION_FORWARD_BOX, &qkv_map, 0, smem.h, t + 64, smem.b, &smem.q_full);
}
// Starts the loads of tile number `tile` of 64 keys and their values.
__device__ inline void attention_forward_load_keys16(AttentionForwardSMem16& smem, const CUtensorMap& qkv_map, int NH,
                                                     int tile) {
    uint64_t* full = &smem.full[tile % 2];
    mbarrier_arrive_expect(full, sizeof(smem.tiles.kv[0]));
    tma_load_4d(smem.tiles.kv[tile % 2][0], &qkv_map, 0, NH + smem.h, tile * 64, smem.b, full);
    tma_load_4d(smem.tiles.kv[tile % 2][1], &qkv_map, 0, 2 * NH + smem.h, tile * 64, smem.b, full);
}

__global__ void __launch_bounds__(128, 3)
    attention_forward_sm90_kernel16(floatX* out, float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                    int num_heads, int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<AttentionForwardSMem16>(attention_forward_shared);
    constexpr int ROW_BYTES = 64 * sizeof(floatX), STAGE_BYTES = sizeof(smem.tiles.kv[0]);
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, 128), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * 128;
    int warp_row = threadIdx.x / 32 * 32, num_tiles = ceil_div(min(q0 + 128, T), 64), num_unmasked = q0 / 64;
    attention_forward_init16(smem, h, b);
    if (threadIdx.x == 0) {
        attention_forward_load_queries16(smem, qkv_map, q0);
        for (int tile = 0; tile < min(num_tiles, 2); tile++) { attention_forward_load_keys16(smem, qkv_map, NH, tile); }
    }
    AttentionForwardState<64, 2> state;
    floatX* warp_q = smem.tiles.q + warp_row * 64;
    mbarrier_wait(&smem.q_full, 0);
    attention_forward_start(state, warp_q);
    uint32_t k_address = attention_forward_k_address<64>(smem.tiles.kv[0][0]);
    uint32_t v_address = attention_forward_v_address<64>(smem.tiles.kv[0][1]);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; tile++) {
        mbarrier_wait(&smem.full[tile % 2], tile / 2 % 2);
        uint32_t k = k_address + tile % 2 * STAGE_BYTES, v = v_address + tile % 2 * STAGE_BYTES;
        if (tile < num_unmasked) {
#pragma unroll 1
            for (int j = 0; j < 64; j += 32) {
                attention_forward_step<false, 32, 8>(state, k + j * ROW_BYTES, v + j * ROW_BYTES, 0, scale_log2);
            }
        } else {
            int key = (tile - num_unmasked) * 64 - warp_row; // the tile's first key, relative to the warp's first query
#pragma unroll 1
            for (int j = 0; j < 64 && key + j < 32; j += 32) {
                attention_forward_step<true, 32, 8>(state, k + j * ROW_BYTES, v + j * ROW_BYTES, key + j, scale_log2);
            }
        }
        __syncthreads(); // all warps have read the stage
        if (threadIdx.x == 0 && tile + 2 < num_tiles) { attention_forward_load_keys16(smem, qkv_map, NH, tile + 2); }
    }
    int head = smem.b * NH + smem.h;
    attention_forward_store(out + ((size_t)smem.b * T * NH + smem.h) * 64, lse + (size_t)head * T, warp_q, state,
                            num_unmasked * 64 + warp_row, T, NH * 64);
}

void attention_forward16(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    auto kernel = attention_forward_sm90_kernel16;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem16) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<B * NH * ceil_div(T, 128), 128, SHARED_BYTES, exec.stream>>>(
        out, lse, qkv_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 17: wgmma: the warps of a warpgroup share one operand, which stays in shared memory ----
// A block has two warpgroups of 64 queries each; its tiles and loads are those of kernel 16, and the output leaves by
// TMA as well. P stays in registers: the accumulators of S become operand fragments.

__global__ void __launch_bounds__(256, 2)
    attention_forward_sm90_kernel17(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads,
                                    int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<AttentionForwardSMem16>(attention_forward_shared);
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, 128), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * 128;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int num_tiles = ceil_div(min(q0 + 128, T), 64), num_unmasked = q0 / 64;
    attention_forward_init16(smem, h, b);
    if (threadIdx.x == 0) {
        attention_forward_load_queries16(smem, qkv_map, q0);
        for (int tile = 0; tile < min(num_tiles, 2); tile++) { attention_forward_load_keys16(smem, qkv_map, NH, tile); }
    }
    float s[32], o[32];
    uint32_t p[16];
    // m starts at -1e30 instead of -INFINITY, because no query of the first warpgroup sees a key of the last tile
    AttentionForwardRows rows = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
#pragma unroll
    for (int i = 0; i < 32; i++) { o[i] = 0; }
    mbarrier_wait(&smem.q_full, 0);
    for (int tile = 0; tile < num_tiles; tile++) {
        mbarrier_wait(&smem.full[tile % 2], tile / 2 % 2);
        wgmma_fence();
        attention_forward_sm90_scores(s, smem.tiles.q + warp / 4 * ATTENTION_FORWARD_BOX, smem.tiles.kv[tile % 2][0]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        int diagonal = q0 + warp * 16 - tile * 64;
        bool grew = tile < num_unmasked
                        ? attention_forward_sm90_lazy_softmax<false, false>(s, rows, 0, scale_log2)
                        : attention_forward_sm90_lazy_softmax<true, true>(s, rows, diagonal, scale_log2);
        if (grew) { attention_forward_sm90_rescale(o, rows); }
        attention_forward_sm90_pack(p, s);
        wgmma_hold(o);
        wgmma_hold(p);
        wgmma_fence();
        attention_forward_sm90_values(o, p, smem.tiles.kv[tile % 2][1]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
        __syncthreads(); // both warpgroups have read the stage
        if (threadIdx.x == 0 && tile + 2 < num_tiles) { attention_forward_load_keys16(smem, qkv_map, NH, tile + 2); }
    }
    floatX* tile = smem.tiles.q + warp * 16 * ATTENTION_FORWARD_ROW; // all warps have read their queries
    int row0 = q0 + warp * 16;
    quad_sums(rows.l);
    attention_forward_sm90_lse(lse + (size_t)work.head * T, rows.l, rows.m, row0, T);
    attention_forward_sm90_store(out_map, tile, o, rows.l, row0, h, b);
    if (lane == 0) { tma_store_wait<0>(); }
}

// Launches kernel 17 or 18, each with tiles of 128 queries.
template <class SMem, class Kernel> static void attention_forward_launch17(Kernel kernel, floatX* out, float* lse,
                                                                           const floatX* qkv, int B, int T, int NH,
                                                                           const Execution& exec) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = tensor_map_heads(out, B, T, NH, 16);
    constexpr int SHARED_BYTES = sizeof(SMem) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<B * NH * ceil_div(T, 128), 256, SHARED_BYTES, exec.stream>>>(
        lse, qkv_map, out_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward17(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch17<AttentionForwardSMem16>(attention_forward_sm90_kernel17, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 18: steps of 128 keys, the diagonal first: half as many waits, and only the first step is masked ----
// Like in kernel 17, two blocks fit on an SM: one block's softmax is hidden behind the other's products. Keys and values have
// barriers of their own, so that the scores need not wait for the values.

struct AttentionForwardSMem18 {         // 81 KB: two blocks per SM
    floatX q[2][ATTENTION_FORWARD_BOX]; // the queries of each warpgroup; at the end the staging area of its output
    floatX k[2][ATTENTION_FORWARD_KEYS], v[2][ATTENTION_FORWARD_KEYS];
    uint64_t q_full, k_full[2], v_full[2];
};

__global__ void __launch_bounds__(256, 2)
    attention_forward_sm90_kernel18(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads,
                                    int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<AttentionForwardSMem18>(attention_forward_shared);
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, 128), group);
    int b = work.head / NH, h = work.head % NH, num_steps = work.tile + 1;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        mbarrier_init(&smem.q_full, 1);
        for (int stage = 0; stage < 2; stage++) {
            mbarrier_init(&smem.k_full[stage], 1);
            mbarrier_init(&smem.v_full[stage], 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    auto load = [&](int step) {
        int t = (work.tile - step) * 128, stage = step % 2;
        attention_forward_tma(smem.k[stage], &smem.k_full[stage], qkv_map, NH + h, t, b);
        attention_forward_tma(smem.v[stage], &smem.v_full[stage], qkv_map, 2 * NH + h, t, b);
    };
    if (threadIdx.x == 0) {
        attention_forward_tma(smem.q[0], &smem.q_full, qkv_map, h, work.tile * 128, b); // the tile's 128 queries
        for (int step = 0; step < min(num_steps, 2); step++) { load(step); }
    }
    float s[64], o[32];
    uint32_t p[32];
    AttentionForwardRows rows = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
#pragma unroll
    for (int i = 0; i < 32; i++) { o[i] = 0; }
    mbarrier_wait(&smem.q_full, 0);
    for (int step = 0; step < num_steps; step++) {
        int stage = step % 2, parity = step / 2 % 2;
        mbarrier_wait(&smem.k_full[stage], parity);
        wgmma_fence();
        attention_forward_sm90_scores(s, smem.q[warp / 4], smem.k[stage]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        bool grew = step == 0 ? attention_forward_sm90_lazy_softmax<true, true>(s, rows, warp * 16, scale_log2)
                              : attention_forward_sm90_lazy_softmax<false, false>(s, rows, 0, scale_log2);
        if (grew) { attention_forward_sm90_rescale(o, rows); }
        attention_forward_sm90_pack(p, s);
        mbarrier_wait(&smem.v_full[stage], parity);
        wgmma_hold(o);
        wgmma_hold(p);
        wgmma_fence();
        attention_forward_sm90_values(o, p, smem.v[stage]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
        __syncthreads(); // both warpgroups have read the stage
        if (threadIdx.x == 0 && step + 2 < num_steps) { load(step + 2); }
    }
    floatX* tile = smem.q[0] + warp * 16 * ATTENTION_FORWARD_ROW; // all warps have read their queries
    int row0 = work.tile * 128 + warp * 16;
    quad_sums(rows.l);
    attention_forward_sm90_lse(lse ? lse + (size_t)work.head * T : nullptr, rows.l, rows.m, row0, T);
    attention_forward_sm90_store(out_map, tile, o, rows.l, row0, h, b);
    if (lane == 0) { tma_store_wait<0>(); }
}

void attention_forward18(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward_launch17<AttentionForwardSMem18>(attention_forward_sm90_kernel18, out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 19: a producer and two consumer warpgroups: P V of one step overlaps with the softmax of the next ----

template <int groups> struct AttentionForwardSMem19 { // 112 KB, or 136 with three groups: one block per SM
    floatX q[2][groups * ATTENTION_FORWARD_BOX];      // queries of this tile and the next
    floatX k[2][ATTENTION_FORWARD_KEYS], v[2][ATTENTION_FORWARD_KEYS];
    floatX out[groups * ATTENTION_FORWARD_BOX];
    uint64_t q_full[2], q_empty[2], k_full[2], k_empty[2], v_full[2], v_empty[2];
};

// Step i: the scores of 128 more keys, and P V of step i - 1, which overlaps with the softmax of the new scores. `more`
// is true if there is a next step. If `pingpong`, named barriers make the warpgroups issue their products in turn.
template <bool masked, bool pingpong, int groups>
__device__ inline void attention_forward_step19(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                AttentionForwardRows& rows, AttentionForwardSMem19<groups>& smem,
                                                const floatX* q, int warpgroup, int i, bool more, int diagonal,
                                                float scale_log2) {
    int k = i % 2, v = (i - 1) % 2;
    if (pingpong) { named_barrier_sync(warpgroup, 256); }
    wgmma_fence();
    attention_forward_sm90_scores(s, q, smem.k[k]);
    wgmma_commit();
    mbarrier_wait(&smem.v_full[v], (i - 1) / 2 % 2);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[v]);
    wgmma_commit();
    if (pingpong) { named_barrier_arrive(warpgroup % groups + 1, 256); }
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[k]); }
    bool grew = attention_forward_sm90_lazy_softmax<masked, false>(s, rows, diagonal, scale_log2);
    auto await = [&] { mbarrier_wait(&smem.k_full[(i + 1) % 2], (i + 1) / 2 % 2); };
    attention_forward_end_step(s, p, o, rows, grew, more, await, &smem.v_empty[v]);
}

template <int groups> __device__ inline void attention_forward_init19(AttentionForwardSMem19<groups>& smem) {
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.k_full[j], 1);
            mbarrier_init(&smem.v_full[j], 1);
            mbarrier_init(&smem.q_empty[j], 4 * groups); // one arrival per consumer warp
            mbarrier_init(&smem.k_empty[j], 4 * groups);
            mbarrier_init(&smem.v_empty[j], 4 * groups);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

template <bool persistent, int groups>
__device__ inline void attention_forward_load19(AttentionForwardSMem19<groups>& smem, const CUtensorMap& qkv_map, int T,
                                                int NH, int num_heads, int group) {
    int n = 0, i = 0;
    attention_forward_each_tile<persistent>(num_heads, ceil_div(T, 64 * groups), group, [&](int head, int tile) {
        int b = head / NH, h = head % NH, q0 = tile * 64 * groups;
        int num_steps = ceil_div(min(q0 + 64 * groups, T), 128);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            tma_load_4d(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, q0 + 64 * j, b, &smem.q_full[n % 2]);
        }
        for (int step = 0; step <= num_steps; step++) { // loads the keys of `step` and the values of step - 1
            if (step < num_steps) {
                int k = (i + step) % 2;
                mbarrier_wait(&smem.k_empty[k], ((i + step) / 2 + 1) % 2);
                attention_forward_tma(smem.k[k], &smem.k_full[k], qkv_map, NH + h, (num_steps - 1 - step) * 128, b);
            }
            if (step > 0) {
                int v = (i + step - 1) % 2;
                mbarrier_wait(&smem.v_empty[v], ((i + step - 1) / 2 + 1) % 2);
                attention_forward_tma(smem.v[v], &smem.v_full[v], qkv_map, 2 * NH + h, (num_steps - step) * 128, b);
            }
        }
        n++, i += num_steps;
    });
}

// If `pingpong`, the consumer warpgroups alternate on the tensor cores, so that they do not all wait for the
// tensor cores at once.
template <int groups, bool pingpong, bool persistent> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    attention_forward_sm90_kernel19(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads,
                                    int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<AttentionForwardSMem19<groups>>(attention_forward_shared);
    attention_forward_init19(smem);
    constexpr int TILE = 64 * groups;                         // queries
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    int warpgroup = warp / 4, lane = threadIdx.x % 32, n = 0, i = 0;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<groups == 2 ? 24 : 32>();
        if (threadIdx.x == 0) { attention_forward_load19<persistent>(smem, qkv_map, T, NH, num_heads, group); }
        return;
    }
    warpgroup_more_registers<groups == 2 ? 240 : 160>();
    int warp_row = (warp - 4) * 16;
    floatX* out_tile = smem.out + warp_row * ATTENTION_FORWARD_ROW;
    if (pingpong && warpgroup == groups) { named_barrier_arrive(1, 256); } // lets warpgroup 1 begin
    attention_forward_each_tile<persistent>(num_heads, ceil_div(T, TILE), group, [&](int head, int tile) {
        int q0 = tile * TILE, num_steps = ceil_div(min(q0 + TILE, T), 128), num_unmasked = q0 / 128;
        const floatX* q = smem.q[n % 2] + (warpgroup - 1) * ATTENTION_FORWARD_BOX;
        float s[64], o[32];
        uint32_t p[32];
        AttentionForwardRows rows = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        // m starts at -1e30 instead of -INFINITY, so that a warpgroup that sees none of the first 128 keys gets P = 0
        // instead of NaN
        int diagonal = q0 + warp_row - (num_steps - 1) * 128;
        mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
        mbarrier_wait(&smem.k_full[i % 2], i / 2 % 2);
        wgmma_fence();
        attention_forward_sm90_scores(s, q, smem.k[i % 2]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        if (lane == 0) { mbarrier_arrive(&smem.k_empty[i % 2]); }
        attention_forward_sm90_lazy_softmax<true, groups == 2>(s, rows, diagonal, scale_log2);
        attention_forward_sm90_pack(p, s);
        i++;
        int key_tile = num_steps - 2;
        if (key_tile >= 0) { mbarrier_wait(&smem.k_full[i % 2], i / 2 % 2); }
        if (groups != 2) { // with 192 queries the diagonal spans more than 128 keys
#pragma unroll 1
            for (; key_tile >= num_unmasked; key_tile--, i++) {
                diagonal += 128;
                attention_forward_step19<true, pingpong>(s, p, o, rows, smem, q, warpgroup, i, key_tile > 0, diagonal,
                                                         scale_log2);
            }
        }
#pragma unroll 1
        for (; key_tile >= 0; key_tile--, i++) {
            attention_forward_step19<false, pingpong>(s, p, o, rows, smem, q, warpgroup, i, key_tile > 0, 0,
                                                      scale_log2);
        }
        if (lane == 0) { mbarrier_arrive(&smem.q_empty[n % 2]); }
        int v = (i - 1) % 2;
        mbarrier_wait(&smem.v_full[v], (i - 1) / 2 % 2);
        wgmma_hold(o);
        wgmma_hold(p);
        wgmma_fence();
        attention_forward_sm90_values(o, p, smem.v[v]);
        wgmma_commit();
        if (lane == 0) { tma_store_wait<0>(); } // TMA has read the previous tile's output: the staging area is free
        __syncwarp();
        wgmma_wait<0>();
        wgmma_hold(o);
        if (lane == 0) { mbarrier_arrive(&smem.v_empty[v]); }
        quad_sums(rows.l);
        attention_forward_sm90_lse(lse ? lse + (size_t)head * T : nullptr, rows.l, rows.m, q0 + warp_row, T);
        attention_forward_sm90_store(out_map, out_tile, o, rows.l, q0 + warp_row, head % NH, head / NH);
        n++;
    });
    if (pingpong && warpgroup == 1) { named_barrier_sync(1, 256); } // consumes the last arrival at the barrier
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups, bool pingpong, bool persistent> void
attention_forward19_groups(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    auto kernel = attention_forward_sm90_kernel19<groups, pingpong, persistent>;
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = tensor_map_heads(out, B, T, NH, 16);
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem19<groups>) + 1024;
    int num_tiles = ceil_div(T, 64 * groups);
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    int num_blocks = persistent ? min(B * NH * ceil_div(num_tiles, 2), num_multiprocessors()) : B * NH * num_tiles;
    kernel<<<num_blocks, 128 * (groups + 1), SHARED_BYTES, exec.stream>>>(
        lse, qkv_map, out_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward19(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward19_groups<2, false, false>(out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 20: ping-pong: the softmax of one consumer is hidden behind the products of the other ----

void attention_forward20(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward19_groups<2, true, false>(out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 21: one persistent block per SM takes pairs of tiles of equal work and prefetches the next tile ----

void attention_forward21(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward19_groups<2, true, true>(out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 22: 192 queries and three consumers: more warps to run while one waits, and keys are read less often ----

void attention_forward22(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward19_groups<3, true, true>(out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 23: kernel 21 with consecutive tiles overlapped, four stages, no ping-pong, single tiles at the end ----
// The first scores of a tile are in flight together with the last P V of the previous tile; kernel 21 waits for each of
// them separately. Every row is scaled by its true maximum (no lazy rescaling), so its largest P is 1, which rounds
// exactly.

template <int groups> struct AttentionForwardSMem23 { // 176 KB, or 200 with three groups
    static constexpr unsigned STAGES = 4;
    floatX q[2][groups * ATTENTION_FORWARD_BOX]; // queries of this tile and the next
    floatX k[STAGES][ATTENTION_FORWARD_KEYS], v[STAGES][ATTENTION_FORWARD_KEYS];
    floatX out[groups * ATTENTION_FORWARD_BOX];
    uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// A tile's first query, and its number of steps over 128 keys. With three groups, tiles are aligned to the end of the
// sequence, so that the partial tile is the one with the fewest keys; its first query may be negative.
template <int groups> __host__ __device__ inline int attention_forward_first_query(int T, int tile, int num_tiles) {
    return groups == 2 ? 128 * tile : 64 * (ceil_div(T, 64) - groups * (num_tiles - tile));
}
template <int groups> __host__ __device__ inline int attention_forward_steps(int q0) {
    return ceil_div(q0 + 64 * groups, 128);
}

// The producer thread. Producer and consumers keep the same counters: n tiles of queries, i steps over 128 keys. Loads
// are issued as k0 k1 v0 k2 v1 ..., the order in which the consumers release the stages, so that no load waits behind a
// stage that is released later than its own.
template <int groups> __device__ inline void attention_forward_load23(AttentionForwardSMem23<groups>& smem,
                                                                      const CUtensorMap& qkv_map, int T, int NH,
                                                                      AttentionForwardList list) {
    constexpr unsigned STAGES = AttentionForwardSMem23<groups>::STAGES;
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0; attention_forward_next_tile(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int q0 = attention_forward_first_query<groups>(T, list.tile, list.num_tiles);
        int num_steps = attention_forward_steps<groups>(q0);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            tma_load_4d(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, q0 + 64 * j, b, &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int step = 0; step <= num_steps; step++) { // loads the keys of `step` and the values of step - 1
            if (step < num_steps) {
                unsigned k = (i + step) % STAGES;
                mbarrier_wait(&smem.k_empty[k], ((i + step) / STAGES + 1) % 2);
                attention_forward_tma(smem.k[k], &smem.k_full[k], qkv_map, NH + h, (num_steps - 1 - step) * 128, b);
            }
            if (step > 0) {
                unsigned v = (i + step - 1) % STAGES;
                mbarrier_wait(&smem.v_empty[v], ((i + step - 1) / STAGES + 1) % 2);
                attention_forward_tma(smem.v[v], &smem.v_full[v], qkv_map, 2 * NH + h, (num_steps - step) * 128, b);
            }
        }
        i += num_steps;
    }
}

// Step i of the ring: the scores of 128 more keys, and P V of step i - 1, which overlaps with the softmax of the new
// scores. `more` is true if there is a next step.
template <int groups>
__device__ inline void attention_forward_step23(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                AttentionForwardRows& rows, AttentionForwardSMem23<groups>& smem,
                                                const floatX* q, unsigned i, bool more, float scale_log2) {
    constexpr unsigned STAGES = AttentionForwardSMem23<groups>::STAGES;
    unsigned k = i % STAGES, v = (i - 1) % STAGES;
    wgmma_fence();
    attention_forward_sm90_scores(s, q, smem.k[k]);
    wgmma_commit();
    mbarrier_wait(&smem.v_full[v], (i - 1) / STAGES % 2);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[v]);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[k]); }
    bool grew = attention_forward_sm90_max(s, rows, scale_log2);
    attention_forward_sm90_exponents(s, rows, scale_log2);
    auto await = [&] { mbarrier_wait(&smem.k_full[(i + 1) % STAGES], (i + 1) / STAGES % 2); };
    attention_forward_end_step(s, p, o, rows, grew, more, await, &smem.v_empty[v]);
}

// Like kernel 25's pack, for P of 64 keys in registers that have room for 128 keys: the second half becomes 0.
__device__ inline void attention_forward_sm90_pack(uint32_t (&p)[32], const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) { p[i] = 2 * i < 32 ? pack_16x2(s[2 * i], s[2 * i + 1], floatX()) : 0; }
}

// Like kernel 25's attention_forward_sm90_diagonal, but elements of s before first_masked are not masked: in the callers
// the warp's own group never starts before that element.
template <int first_masked, int num_s> __device__ inline void
attention_forward_diagonal_softmax23(float (&s)[num_s], AttentionForwardRows& rows, int group, float scale_log2) {
    constexpr float HIDDEN = -1e38f;
    int lane = threadIdx.x % 32;
    // opaque to the compiler, so that it recomputes the masks in every tile instead of keeping them in registers
    asm volatile("" : "+r"(lane), "+r"(group));
    float mask[2] = {lane % 4 * 2 <= lane / 4 ? 0 : HIDDEN, lane % 4 * 2 + 1 <= lane / 4 ? 0 : HIDDEN};
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = first_masked; n < num_s; n += 8) {
        float own = n / 8 == group ? 1.0f : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[n + e] = fmaf(own, mask[e], s[n + e]);
            s[n + 4 + e] = fmaf(own, HIDDEN, s[n + 4 + e]);
            s[n + 6 + e] = fmaf(own, mask[e], s[n + 6 + e]);
        }
    }
    wgmma_hold(s);
#pragma unroll
    for (int i = 0; i < num_s; i += i % 8 == 0 ? 2 : 6) {
        float m = fmaxf(fmaxf(s[i], s[i + 1]), fmaxf(s[i + 4], s[i + 5]));
        row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], i < first_masked || i / 8 <= group ? m : -INFINITY);
    }
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float m = row_max[half_row];
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
        rows.m[half_row] = m * scale_log2, rows.l[half_row] = 0, rows.rescale[half_row] = 1;
    }
    attention_forward_sm90_diagonal_exponents(s, rows, group, scale_log2);
}

// A tile's first step, step i of the ring: scores and softmax of the 64 or 128 keys on the diagonal. The softmax
// overlaps with the last P V of the previous tile; `values` points to the values of that product.
template <int groups, int num_s>
__device__ inline void attention_forward_diagonal23(float (&s)[num_s], uint32_t (&p)[32], float (&o)[32],
                                                    AttentionForwardRows& rows, AttentionForwardSMem23<groups>& smem,
                                                    const floatX* q, const floatX* values, unsigned i, bool more,
                                                    int group, float scale_log2) {
    constexpr unsigned STAGES = AttentionForwardSMem23<groups>::STAGES;
    wgmma_fence();
    attention_forward_sm90_scores(s, q, smem.k[i % STAGES]);
    wgmma_commit();
    wgmma_fence();
    attention_forward_sm90_values(o, p, values);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[i % STAGES]); }
    attention_forward_diagonal_softmax23<num_s - 32>(s, rows, group, scale_log2);
    if (more && !(rows.l[0] + rows.l[1] < 0)) { mbarrier_wait(&smem.k_full[(i + 1) % STAGES], (i + 1) / STAGES % 2); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    attention_forward_sm90_pack(p, s);
    attention_forward_sm90_rounding(rows, p, group);
}

// A warp's 16 rows of the previous tile, whose last P V has not been issued yet, or whose output is not stored yet.
struct AttentionForwardPending23 {
    int head, row0; // row0: the warp's first token
    float l[2];     // the row sums of the thread's two rows
};

template <int groups> __device__ inline void attention_forward_store23(AttentionForwardSMem23<groups>& smem,
                                                                       const CUtensorMap& out_map, const float (&o)[32],
                                                                       const AttentionForwardPending23& tile, int NH) {
    if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); } // TMA has read the last output: the staging area is free
    __syncwarp();
    floatX* place = smem.out + (threadIdx.x / 32 - 4) * 16 * ATTENTION_FORWARD_ROW;
    attention_forward_sm90_store(out_map, place, o, tile.l, tile.row0, tile.head % NH, tile.head / NH);
}

// The end of a block's last tile: its last P V, step i of the ring, and its output.
template <int groups>
__device__ inline void attention_forward_finish23(AttentionForwardSMem23<groups>& smem, const CUtensorMap& out_map,
                                                  float (&o)[32], uint32_t (&p)[32],
                                                  const AttentionForwardPending23& tile, unsigned i, int NH) {
    constexpr unsigned STAGES = AttentionForwardSMem23<groups>::STAGES;
    unsigned v = i % STAGES;
    mbarrier_wait(&smem.v_full[v], i / STAGES % 2);
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[v]);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(o);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.v_empty[v]); }
    attention_forward_store23(smem, out_map, o, tile, NH);
}

// Skips a stage of the ring that only other warpgroups read: waits until it is full, then releases it.
__device__ inline void attention_forward_pass23(uint64_t* full, uint64_t* empty, unsigned parity) {
    mbarrier_wait(full, parity);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(empty); }
}

template <int groups> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    attention_forward_sm90_kernel23(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads,
                                    int num_tiles, int num_paired, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    typedef AttentionForwardSMem23<groups> SMem;
    SMem& smem = shared_aligned_1024<SMem>(attention_forward_shared);
    constexpr unsigned STAGES = SMem::STAGES;
    if (threadIdx.x == 0) {
        for (unsigned j = 0; j < STAGES; j++) {
            if (j < 2) {
                mbarrier_init(&smem.q_full[j], 1);
                mbarrier_init(&smem.q_empty[j], 4 * groups); // one arrival per consumer warp
            }
            mbarrier_init(&smem.k_full[j], 1);
            mbarrier_init(&smem.v_full[j], 1);
            mbarrier_init(&smem.k_empty[j], 4 * groups);
            mbarrier_init(&smem.v_empty[j], 4 * groups);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    // computed by warp votes, so that the compiler knows it is warp-uniform and keeps what depends on it in uniform
    // registers
    int warpgroup =
        (__any_sync(0xFFFFFFFFu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xFFFFFFFFu, threadIdx.x & 256) ? 2 : 0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<groups == 2 ? 40 : 32>();
        if (threadIdx.x == 0) {
            attention_forward_load23(smem, qkv_map, T, NH, {num_heads, num_tiles, num_paired, 0, 0, 0});
        }
        return;
    }
    warpgroup_more_registers<groups == 2 ? 232 : 160>();
    AttentionForwardList list = {num_heads, num_tiles, num_paired, 0, 0, 0};
    AttentionForwardPending23 tile = {0, 0, {1, 1}};
    AttentionForwardRows rows = {{0, 0}, {0, 0}, {0, 0}};
    float s[64], o[32];
    uint32_t p[32];
#pragma unroll
    for (int j = 0; j < 32; j++) { o[j] = 0, p[j] = 0; }
    unsigned i = 0; // steps over 128 keys
    unsigned n = 0;
#pragma unroll 1
    for (; attention_forward_next_tile(list); n++) {
        int q0 = attention_forward_first_query<groups>(T, list.tile, list.num_tiles);
        int num_steps = attention_forward_steps<groups>(q0);
        // a warpgroup whose queries all precede the tile's last 128 keys skips that step, at most one per tile; rows
        // before the start of the sequence cost one step and are not stored
        int row0 = q0 + (warpgroup - 1) * 64, my_steps = max(ceil_div(row0 + 64, 128), 1);
        bool passes = groups != 2 && my_steps < num_steps;
        unsigned v = (i - 1) % STAGES;
        bool v_parity = (i - 1) / STAGES % 2;
        mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
        if (passes) {
            attention_forward_pass23(&smem.k_full[i % STAGES], &smem.k_empty[i % STAGES], i / STAGES % 2);
            i++;
        }
        // the diagonal, overlapped with the last P V of the previous tile
        const floatX* q = smem.q[n % 2] + (warpgroup - 1) * ATTENTION_FORWARD_BOX;
        unsigned k = i % STAGES;
        mbarrier_wait(&smem.k_full[k], i / STAGES % 2);
        if (n > 0) { mbarrier_wait(&smem.v_full[v], v_parity); }
        rows = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
        // number of the warp's own group of 16 keys in this key block; negative: padding rows, which see none of them
        int group = (row0 - (my_steps - 1) * 128) / 16 + warp % 4;
        // a branch around this product would cost registers, so before the first tile it multiplies P = 0 by whatever
        // smem.out contains, and its result is discarded
        const floatX* values = n > 0 ? smem.v[v] : smem.out;
        if (row0 % 128 == 0) {
            attention_forward_diagonal23(reinterpret_cast<float(&)[32]>(s), p, o, rows, smem, q, values, i,
                                         my_steps > 1, group, scale_log2);
        } else {
            attention_forward_diagonal23(s, p, o, rows, smem, q, values, i, my_steps > 1, group, scale_log2);
        }
        if (n > 0) {
            if (lane == 0) { mbarrier_arrive(&smem.v_empty[v]); }
            attention_forward_store23(smem, out_map, o, tile, NH);
        }
        if (passes) {
            attention_forward_pass23(&smem.v_full[(i - 1) % STAGES], &smem.v_empty[(i - 1) % STAGES],
                                     (i - 1) / STAGES % 2);
        }
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < my_steps; step++, i++) {
            attention_forward_step23(s, p, o, rows, smem,
                                     smem.q[n % 2] + (threadIdx.x / 128 - 1) * ATTENTION_FORWARD_BOX, i,
                                     step + 1 < my_steps, scale_log2);
        }
        if (lane == 0) { mbarrier_arrive(&smem.q_empty[n % 2]); }
        // q0 is recomputed instead of kept in a register
        q0 = attention_forward_first_query<groups>(T, list.tile, list.num_tiles);
        quad_sums(rows.l);
        quad_sums(rows.rounding);
        tile = {list.head, q0 + (warp - 4) * 16, {rows.l[0] + rows.rounding[0], rows.l[1] + rows.rounding[1]}};
        attention_forward_sm90_lse(lse ? lse + (size_t)list.head * T : nullptr, rows.l, rows.m, tile.row0, T);
    }
    if (n > 0) { attention_forward_finish23(smem, out_map, o, p, tile, i - 1, NH); }
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups> void attention_forward23_groups(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH,
                                                      const Execution& exec) {
    auto kernel = attention_forward_sm90_kernel23<groups>;
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = tensor_map_heads(out, B, T, NH, 16);
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem23<groups>) + 1024;
    int num_heads = B * NH;
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    int num_tiles = ceil_div(T, 64 * groups), num_blocks = min(num_heads * num_tiles, num_multiprocessors());
    // number of rounds of pairs; the last 2 to 3 rounds' worth of pairs become single tiles
    int rounds = max(num_heads * num_tiles / 2 / num_blocks - 2, 0);
    int num_paired = rounds * num_blocks / num_tiles * 2;
    kernel<<<num_blocks, 128 * (groups + 1), SHARED_BYTES, exec.stream>>>(lse, qkv_map, out_map, T, NH, num_heads,
                                                                          num_tiles, num_paired, LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward23(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward23_groups<2>(out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 24: kernel 23 with three consumers, each of which skips keys that none of its queries sees ----
// Steps of the ring per head at T = 1024: 27 here, 36 in kernel 21 with its two consumers, 32 in kernel 22 with three.

void attention_forward24(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec) {
    attention_forward23_groups<3>(out, lse, qkv, B, T, NH, exec);
}

// ---- kernel 26: kernel 25 with three consumers and steps of 128 keys: half the reads of q, fewer instructions per key ----

void attention_forward26(const AttentionForwardArgs& args, const Execution& exec) {
    attention_forward_sm90_launch<3, 64, 128>(args, exec);
}

// ---- kernel 27: kernel 26 in ping-pong: the consumers alternate in issuing products ----

void attention_forward27(const AttentionForwardArgs& args, const Execution& exec) {
    attention_forward_sm90_launch<3, 64, 128, true>(args, exec);
}
#endif

// ---- inputs and checks ----

// Fills parts first..first+parts-1 of queries, keys and values, (B,T,parts,NH,HS), with normal numbers; queries and keys
// are multiplied by `size`. Size 4 makes scores differ by a few dozen, size 30 by 10^4. With either size P would exceed
// 2^8 after the diagonal, which tests lazy rescaling. With size 30, all queries and keys of every other head are equal,
// so that its softmax is uniform.
static void fill_qkv(float* qkv, int first, int parts, int B, int T, int NH, int HS, float size, uint32_t seed) {
    size_t n = (size_t)B * T * parts * NH * HS;
    bench_fill_normal(qkv, n, seed, 1.0f, 0.0f);
    bench_pieces(n, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end && size > 1; i++) {
            size_t h = i / HS % NH, part = first + i / HS / NH % parts;
            if (part < 2) { qkv[i] = size == 30.0f && h % 2 == 1 ? size : size * qkv[i]; }
        }
    });
}

// The configurations of kernels 6, 15 and 25 for HS = 64, and of kernel 25 for HS = 128; 0 is what attention_forward() takes.
typedef void AttentionForward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, const Execution& exec);
typedef void AttentionForwardLauncher(const AttentionForwardArgs& args, const Execution& exec);
struct AttentionForwardForm {
    BenchConfig config;
    AttentionForwardLauncher* launch; // NULL: the default
};
static const std::vector<AttentionForwardForm> attention_forward_forms6 = {
    {{0, "64 queries x 64 keys"}, NULL},
    {{1, "64 queries x 32 keys"}, attention_forward_plain_tiles<64, 64, 32>},
    {{2, "32 queries x 64 keys"}, attention_forward_plain_tiles<64, 32, 64>},
    {{3, "32 queries x 32 keys"}, attention_forward_plain_tiles<64, 32, 32>}};
#if !defined(ENABLE_FP32)
static const std::vector<AttentionForwardForm> attention_forward_forms15 = {
    {{0, "32 queries per warp; steps of 32 keys; 3 blocks per SM"}, NULL},
    {{1, "32 queries per warp; steps of 16 keys; 3 blocks per SM"}, attention_forward_mma_tiles<64, 2, 16, 8, 3>},
    {{2, "32 queries per warp; steps of 32 keys; 2 blocks per SM"}, attention_forward_mma_tiles<64, 2, 32, 8, 2>},
    {{3, "16 queries per warp; steps of 32 keys; 4 blocks per SM"}, attention_forward_mma_tiles<64, 1, 32, 8, 4>},
    {{4, "16 queries per warp; steps of 64 keys; 3 blocks per SM"}, attention_forward_mma_tiles<64, 1, 64, 8, 3>}};
static const std::vector<AttentionForwardForm> attention_forward_forms25 = {
    {{0, "by the number of tiles"}, NULL},
    {{2, "two consumers: tiles of 128 queries"}, attention_forward_sm90_launch<2>},
    {{4, "four consumers: tiles of 256 queries"}, attention_forward_sm90_launch<4>}};
static const std::vector<AttentionForwardForm> attention_forward_forms25_128 = {
    {{0, "by the number of tiles"}, NULL},
    {{2, "two consumers: tiles of 128 queries"}, attention_forward_sm90_launch<2, 128>},
    {{3, "three consumers: tiles of 192 queries"}, attention_forward_sm90_launch<3, 128>}};
#endif

// kind 1: no mask, and queries, keys and values are three tensors
static AttentionForwardInputs declare_apart(Bench& b, float size, Buffer<floatX> out, Buffer<float> lse,
                                            const std::vector<size_t>& rows) {
    int B = b.B, T = b.T, C = b.C, NH = b.NH;
    size_t n = (size_t)B * T * C;
    auto part = [&](const char* name, int number) {
        return b.input_from<floatX>(
            name, n, [=, &rng = b.rng](float* host) { fill_qkv(host, number, 1, B, T, NH, C / NH, size, rng()); });
    };
    Buffer<floatX> q = part("q", 0), k = part("k", 1), v = part("v", 2);
    b.reference([=] {
        std::vector<float> qkv(3 * n);
        const float* parts[] = {q.host, k.host, v.host};
        for (size_t i = 0; i < 3 * n; i++) { qkv[i] = parts[i / C % 3][i / C / 3 * C + i % C]; }
        attention_forward_rows_cpu(out.host, lse.host, qkv.data(), B, T, C, NH, rows, false);
    });
    b.cost(4.0 * n * sizeof(floatX) + (double)B * T * NH * sizeof(float), 4.0 * n * T);
    return {q, k, v, (size_t)C, false};
}

static void declare(Bench& b) {
    bool apart = b.kinds({"causal", "every key, q k v apart"}) == 1;
    b.varies("BTH");
    int B = b.B, T = b.T, C = b.C, NH = b.NH, HS = C / NH;
    cudaStream_t stream = b.stream;
    const float sizes[] = {1.0f, 4.0f, 30.0f};
    float size = sizes[b.cases({"normal", "scores of a few dozen", "scores of some 10^4, or equal ones"})];
    size_t n = (size_t)B * T * C, num_rows = (size_t)B * T * NH;
    // 4 s ulps of fp32 for scores s of about 10^4, or 100, with HS = 64; the error of a dot product grows with the square
    // root of its length
    float score_error = (size == 30.0f ? 4e-3f : size == 4.0f ? 5e-5f : 0) * fmaxf(1, sqrtf(HS / 64.0f));
    Tolerance tolerance = ulps<floatX>(sizeof(floatX) == 2 ? 1 : 32, 1.0f);
    Buffer<floatX> out = b.output<floatX>("out", n, {tolerance.atol + score_error, tolerance.rtol});
    Buffer<float> lse = b.output<float>("lse", num_rows, {1e-5f + score_error, 2e-6f});
    std::vector<size_t> rows = b.sample(num_rows, (apart ? 4.0 : 2.0) * T * HS);
    Buffer<floatX> qkv = {NULL, NULL};
    AttentionForwardInputs inp;
    if (apart) {
        inp = declare_apart(b, size, out, lse, rows);
    } else {
        qkv = b.input_from<floatX>("qkv", 3 * n,
                                   [=, &rng = b.rng](float* host) { fill_qkv(host, 0, 3, B, T, NH, HS, size, rng()); });
        b.reference([=] { attention_forward_rows_cpu(out.host, lse.host, qkv.host, B, T, C, NH, rows); });
        b.cost(4.0 * n * sizeof(floatX) + num_rows * sizeof(float), 2.0 * B * NH * T * (double)T * HS);
        inp = {qkv, qkv + C, qkv + 2 * C, 3 * (size_t)C, true};
    }

    bool few_scores = (double)num_rows * T <= 1 << 30; // at most 6 GB of T x T matrices
    Buffer<float> scores = {NULL, NULL};
    Buffer<floatX> p = {NULL, NULL};
    if (few_scores && !apart) {
        scores = b.scratch<float>("scores", num_rows * T);
        p = b.scratch<floatX>("p", num_rows * T);
        if (!b.dry) { cublas_handle(); } // it allocates memory, which no timed launch should do
        b.kernel(0, "cuBLAS for both products, T x T matrix in memory",
                 [=](int bs) { attention_forward0(out, lse, scores, p, qkv, B, T, C, NH, stream, bs); }, {256});
    }
    if (few_scores) {
        b.kernel(1, "one thread per query", [=](int bs) { attention_forward1(out, lse, inp, B, T, C, NH, stream, bs); },
                 {64, 128, 256});
    }
    if (few_scores && !apart) {
        b.kernel(2, "one thread per score, T x T matrix in memory",
                 [=](int bs) { attention_forward2(out, lse, scores, p, qkv, B, T, C, NH, stream, bs); });
    }
    if (HS == LADDER_HS) {
        b.kernel(3, "online softmax in registers, no T x T matrix",
                 [=](int) { attention_forward3(out, lse, inp, B, T, NH, stream); }, {0});
    }
    if (apart) { return; }
    AttentionForwardArgs args = {out, lse, qkv, B, T, HS, NH, 1.0f / sqrtf((float)HS)};
    // the kernel that attention_forward() chooses here is checked and timed through attention_forward()
    int promoted = !b.dry ? attention_forward_choice(B, T, NH, HS) : sizeof(floatX) == 2 ? 25 : 6;
    auto kernel = [&](int number, const char* what, std::function<void()> launch, int min_arch,
                      std::vector<AttentionForwardForm> forms = {}) {
        auto either = [=](int config) {
            for (const AttentionForwardForm& form : forms) {
                if (config > 0 && form.config.value == config) { return form.launch(args, stream); }
            }
            number == promoted ? attention_forward(out, lse, qkv, B, T, C, NH, args.scale, stream) : launch();
        };
        b.kernel(number, what, either, {0}, min_arch);
        if (forms.empty()) { return; }
        std::vector<BenchConfig> configs;
        for (const AttentionForwardForm& form : forms) { configs.push_back(form.config); }
        b.config("form", configs);
    };
    auto if_64 = [=](const std::vector<AttentionForwardForm>& forms) {
        return HS == 64 ? forms : std::vector<AttentionForwardForm>();
    };
    auto rung = [&](int number, const char* what, AttentionForward* launch, int min_arch) {
        if (HS == LADDER_HS) {
            kernel(
                number, what, [=] { launch(out, lse, qkv, B, T, NH, stream); }, min_arch);
        }
    };
    rung(4, "keys and values in shared memory", attention_forward4, 0);
    rung(5, "register tiles, 8 queries x 4 keys per thread", attention_forward5, 0);
    kernel(
        6, "128-bit accesses, heads in groups that fit in L2; any head size",
        [=] { attention_forward_plain(args, stream); }, 0, if_64(attention_forward_forms6));
#if !defined(ENABLE_FP32)
    rung(7, "mma.sync, 16 queries per warp, padded shared memory", attention_forward7, 80);
    rung(8, "less arithmetic per score: masks at the diagonal only, one fma per exponent", attention_forward8, 80);
    rung(9, "query fragments loaded once", attention_forward9, 80);
    rung(10, "cp.async, two stages", attention_forward10, 80);
    rung(11, "swizzled instead of padded", attention_forward11, 80);
    rung(12, "output stored 16 bytes at a time, heads in groups that fit in L2", attention_forward12, 80);
    rung(13, "32 queries per warp, half the shared memory reads", attention_forward13, 80);
    rung(14, "lazy rescaling, only when P would exceed 2^8", attention_forward14, 80);
    kernel(
        15, "steps of 32 keys, 3 blocks per SM; any head size (loses to 14 at B = 16, wins at B = 64)",
        [=] { attention_forward_mma(args, stream); }, 80, if_64(attention_forward_forms15));
    rung(16, "TMA and mbarriers instead of cp.async", attention_forward16, -90);
    rung(17, "wgmma, steps of 64 keys, two blocks per SM", attention_forward17, -90);
    rung(18, "steps of 128 keys, the diagonal first", attention_forward18, -90);
    rung(19, "a producer and two consumer warpgroups, P V overlaps the softmax (loses to 18)", attention_forward19,
         -90);
    rung(20, "19 in ping-pong: the two consumers alternate (loses to 18)", attention_forward20, -90);
    rung(21, "20, persistent, pairs of tiles of equal work", attention_forward21, -90);
    rung(22, "21 with 192 queries per tile, three consumer warpgroups (loses to 21 at T = 1024)", attention_forward22,
         -90);
    rung(23, "21 with consecutive tiles overlapped, no ping-pong (loses to 21 at B = 16)", attention_forward23, -90);
    rung(24, "23 with three consumers that skip keys they do not see", attention_forward24, -90);
    if (HS == 64 || HS == 128) {
        kernel(
            25, "four independent consumer warpgroups, steps of 64 keys", [=] { attention_forward_sm90(args, stream); },
            -90, HS == 64 ? attention_forward_forms25 : attention_forward_forms25_128);
    }
    auto longer = [&](int number, const char* what, AttentionForwardLauncher* launch) {
        if (HS == 64) {
            kernel(
                number, what, [=] { launch(args, stream); }, -90);
        }
    };
    longer(26, "25 with three consumers and steps of 128 keys (loses to 25 at T = 1024)", attention_forward26);
    longer(27, "26 in ping-pong, promoted for T >= 4096 (loses to 26 at T = 1024)", attention_forward27);
#endif
    b.promoted(promoted);
}

int main(int argc, char** argv) {
    // the last two shapes of kind 0 have enough tiles for several rounds of every persistent kernel
    return bench_main(argc, argv, "attention_forward", declare, {16, 1024, 768, 12},
                      {{1, 1, 64, 1},
                       {2, 17, 64, 2},
                       {1, 64, 192, 3},
                       {1, 127, 128, 2},
                       {2, 128, 64, 1},
                       {2, 200, 128, 2},
                       {1, 333, 128, 2},
                       {1, 129, 64, 1},
                       {2, 513, 128, 2},
                       {3, 1000, 768, 12},
                       {1, 2100, 64, 1},
                       {1, 200, 64, 2},
                       {2, 127, 192, 2},
                       {1, 200, 256, 2},
                       {1, 129, 128, 1},
                       {5, 200, 128, 1},
                       {1, 65, 8, 1},
                       {1, 130, 240, 3},
                       {1, 100, 512, 2},
                       {1, 90, 416, 2},
                       {1, 300, 256, 4},
                       {2, 1024, 192, 3},
                       {1, 1024, 256, 4},
                       {1, 4096, 128, 2},
                       {40, 400, 768, 12},
                       {30, 401, 768, 6},
                       with_kind(1, {1, 1, 64, 1}),
                       with_kind(1, {2, 127, 192, 3}),
                       with_kind(1, {2, 200, 240, 3})});
}
