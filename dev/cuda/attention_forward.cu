/* attention_forward: out = softmax(scale * q k^T, causal) v, for each head; scale = 1 / sqrt(HS)

   out (B,T,NH,HS) floatX out | lse (B,NH,T) float out, or NULL: ln(sum over k of exp(scale * q.k))
   qkv (B,T,3,NH,HS) floatX in | C = NH * HS. Kind 1 (kernels 1 and 3): q, k, v (B,T,NH,HS) each, and no causal mask.
   Bound: compute, 2*B*NH*T*T*HS FLOPs: two products of 2*T*T*HS per head, of which the causal mask leaves half.
   Constraint: HS % 8 == 0, HS <= 256.
   Tuned: tiles of kernels 6 and 15, tile of 25. The other rungs have the tiles that registers and shared memory suggest.
   Error: against the fp64 reference, one ulp of out plus one ulp of 1, because P is rounded to floatX before P V. That
   costs at most half an ulp of sum(p |v|), which is close to 2 in a few rows with few keys. fp32: 32 ulps of out plus
   32 ulps of 1, from the sums over HS and from exp. A score of size s has an error of about 4 s ulps of fp32.
   Source: Dao 2023, FlashAttention-2, arXiv:2307.08691; Milakov and Gimelshein 2018, online softmax, arXiv:1805.02867.

   Kernels (this list is written by versions.sh):
     0  cuBLAS for both products, T x T matrix in memory
     1  one thread per query
     2  one thread per score, T x T matrix in memory
     3  online softmax in registers, no T x T matrix
     4  keys and values in shared memory
     5  register tiles, 8 queries x 4 keys per thread
     6  128-bit accesses, heads in groups that fit L2; any head size
     7  mma.sync, 16 queries per warp, padded shared memory
     8  less arithmetic per score: masks at the diagonal only, one fma per exponent
     9  query fragments loaded once
    10  cp.async, two stages
    11  swizzled instead of padded
    12  output stored 16 bytes at a time, heads in groups that fit L2 (slower than 11)
    13  32 queries per warp, half the shared memory reads (slower than 11)
    14  lazy rescaling, only when P would exceed 2^8 (slower than 11)
    15  steps of 32 keys, 3 blocks per SM (loses to 14 at B = 16, wins at B = 64)
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

   nvcc -O3 --use_fast_math attention_forward.cu -o attention_forward -lcublas -lcublasLt   (or: make attention_forward)
   ./attention_forward 15     check kernel 15 against the CPU
   ./attention_forward        every kernel, side by side
   Kernels from 16 on need -gencode arch=compute_90a,code=sm_90a and HS = 64.                                        */
#include "bench.h"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/ptx.cuh"
#include "cublas_batched.cuh"

#ifndef PROMOTED_ONLY // an op that includes this file for attention_forward() leaves out the other kernels

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
                                      cudaStream_t stream, int block_size) {
    attention_forward_softmax_kernel<<<B * NH * T, block_size, 0, stream>>>(p, lse, scores, T, scale);
    cudaCheck(cudaGetLastError());
}

// scores (B,NH,T,T) float scratch, p (B,NH,T,T) floatX scratch
void attention_forward0(floatX* out, float* lse, float* scores, floatX* p, const floatX* qkv, int B, int T, int C,
                        int NH, cudaStream_t stream, int block_size) {
    const cudaDataType_t type = cublaslt_floatX;
    const float one = 1.0f, zero = 0.0f;
    int HS = C / NH;
    long long matrix = (long long)T * T;
    // cuBLAS is column-major, so for each head it computes scores^T (T,T) = k q^T and out^T (HS,T) = v^T p^T
    for (int b = 0; b < B; b++) {
        const floatX* q = qkv + (size_t)b * T * 3 * C;
        cublas_batched(CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &one, q + C, type, 3 * C, HS, q, type, 3 * C, HS, &zero,
                       scores + (size_t)b * NH * matrix, CUDA_R_32F, T, matrix, NH, stream);
    }
    attention_forward_softmax(p, lse, scores, B, T, NH, 1.0f / sqrtf((float)HS), stream, block_size);
    for (int b = 0; b < B; b++) {
        const floatX* v = qkv + (size_t)b * T * 3 * C + 2 * C;
        cublas_batched(CUBLAS_OP_N, CUBLAS_OP_N, HS, T, T, &one, v, type, 3 * C, HS, p + (size_t)b * NH * matrix, type,
                       T, matrix, &zero, out + (size_t)b * T * C, type, C, HS, NH, stream);
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
                        cudaStream_t stream, int block_size) {
    require(C / NH <= 256);
    attention_forward_kernel1<<<ceil_div(B * NH * T, block_size), block_size, 0, stream>>>(
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
                        int NH, cudaStream_t stream, int block_size) {
    require(T <= 65535 && B * NH <= 65535);
    attention_forward_kernel2_scores<<<dim3(ceil_div(T, block_size), T, B * NH), block_size, 0, stream>>>(scores, qkv,
                                                                                                          T, C, NH);
    cudaCheck(cudaGetLastError());
    attention_forward_softmax(p, lse, scores, B, T, NH, 1.0f / sqrtf((float)(C / NH)), stream, block_size);
    attention_forward_kernel2_values<<<(unsigned)ceil_div((size_t)B * T * C, (size_t)block_size), block_size, 0,
                                       stream>>>(out, p, qkv, B, T, C, NH);
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
                        cudaStream_t stream) {
    attention_forward_kernel3<<<ceil_div(B * NH * T, 128), 128, 0, stream>>>(out, lse, inp, B, T, NH,
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

void attention_forward4(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_kernel4<<<dim3(B * NH, ceil_div(T, 128)), 128, 0, stream>>>(out, lse, qkv, T, NH,
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

void attention_forward5(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem5); // 49 KB: more than a launch gets without asking
    cudaCheck(
        cudaFuncSetAttribute(attention_forward_kernel5, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    attention_forward_kernel5<<<dim3(B * NH, ceil_div(T, 64)), 128, SHARED_BYTES, stream>>>(
        out, lse, qkv, T, NH, 1.0f / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}
#endif

// ==== promoted: attention_forward ====
// out = softmax(scale * q k^T, causal) v without the T x T matrix. A tile of queries stays on chip while tiles of keys
// and values stream past. The softmax is online: each row keeps its running maximum m and its sum l of P = exp(score -
// m). When m grows, l and the output accumulator o += P v are rescaled; at the end out = o / l.
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.

struct AttentionForwardWork {
    int head; // 0 to B*NH - 1
    int tile; // tile of queries within the head
};

// The work of this block. Blocks start in the order of their index. Heads are processed in groups whose keys and values
// fit L2 together. Within a group the tiles with the most keys come first, so that the last blocks to start are short.
__device__ inline AttentionForwardWork attention_forward_work(int num_heads, int num_tiles, int group) {
    int first = blockIdx.x / (group * num_tiles) * group;
    int rest = blockIdx.x % (group * num_tiles);
    int heads = min(group, num_heads - first);
    return {first + rest % heads, num_tiles - 1 - rest / heads};
}

// The number of heads per group: as many as have keys and values that fit a quarter of L2 together, but at least one.
inline int attention_forward_group(int T, int HS, int num_heads) {
    size_t bytes = (size_t)2 * T * HS * sizeof(floatX); // keys and values of one head
    size_t fit = (size_t)device_attribute(cudaDevAttrL2CacheSize) / 4 / bytes;
    return (int)(fit < 1 ? 1 : fit > (size_t)num_heads ? num_heads : fit);
}

// ---- kernel 6: fp32 arithmetic in register tiles, 128-bit accesses, heads in groups that fit L2; any head size ----

// Rows are padded by 4 floats, so that consecutive rows start 4 banks apart: 8 lanes that read 16 bytes each from 8
// rows have no bank conflict.
template <int max_HS, int rows, int keys> struct AttentionForwardPlainSMem {
    float q[rows][max_HS + 4];
    float kv[keys][max_HS + 4]; // first the keys of a tile, then its values
    float p[rows][keys + 4];
};

// Loads rows first..first+rows-1 of src, which are `stride` elements apart, and stores them as floats. Rows past T
// become zeros. Columns past HS stay uninitialised: they only affect output columns that are not stored.
template <int max_HS, int rows> __device__ inline void
attention_forward_plain_load(float (*tile)[max_HS + 4], const floatX* src, int first, int T, int HS, size_t stride) {
    constexpr int VECTORS = max_HS / x128::size; // per row
#pragma unroll
    for (int i = 0; i < rows * VECTORS / 128; i++) {
        int row = (i * 128 + threadIdx.x) / VECTORS, d = (i * 128 + threadIdx.x) % VECTORS * x128::size;
        if (d >= HS) { continue; }
        x128 x = {};
        if (first + row < T) { x = load128(src + (first + row) * stride + d); }
        for (int j = 0; j < x128::size; j += 4) {
            store128(&tile[row][d + j], f128{(float)x[j], (float)x[j + 1], (float)x[j + 2], (float)x[j + 3]});
        }
    }
}

// The block has four warps, each with rows / 4 queries. The two half-warps of a warp own alternate queries. For each of
// its queries a thread holds keys / 16 columns of the scores and max_HS / 16 columns of the output.
template <int max_HS, int rows, int keys> __global__ void __launch_bounds__(128)
    attention_forward_kernel6(floatX* out, float* lse, const floatX* qkv, int T, int HS, int NH, int num_heads,
                              int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardPlainSMem<max_HS, rows, keys>*>(attention_forward_shared);
    constexpr int ROWS = rows / 8, KEYS = keys / 16, VECTORS = max_HS / 64; // per thread; a vector is 4 columns
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, rows), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * rows;
    size_t C = (size_t)NH * HS, stride = 3 * C;
    const floatX* src = qkv + b * T * stride + (size_t)h * HS;
    // this thread's rows are row0, row0 + 2, ...; its columns of the scores are tx, tx + 16, ...
    int tx = threadIdx.x % 16, row0 = threadIdx.x / 32 * (rows / 4) + threadIdx.x / 16 % 2;

    // m: running row maximum, times scale_log2; l: this thread's partial row sum of P
    float o[ROWS][4 * VECTORS] = {}, m[ROWS], l[ROWS] = {};
    for (int i = 0; i < ROWS; i++) { m[i] = -INFINITY; }
    attention_forward_plain_load<max_HS, rows>(smem.q, src, q0, T, HS, stride);
    int num_keys = min(q0 + rows, T);
    for (int k0 = 0; k0 < num_keys; k0 += keys) {
        __syncthreads(); // all warps have read the values of the previous tile
        attention_forward_plain_load<max_HS, keys>(smem.kv, src + C, k0, T, HS, stride);
        __syncthreads();
        float s[ROWS][KEYS] = {};
        for (int d = 0; d < HS; d += 4) {
            f128 k[KEYS];
            for (int j = 0; j < KEYS; j++) { k[j] = load128(&smem.kv[tx + 16 * j][d]); }
            for (int i = 0; i < ROWS; i++) {
                f128 q = load128(&smem.q[row0 + 2 * i][d]);
                for (int j = 0; j < KEYS; j++) {
                    for (int e = 0; e < 4; e++) { s[i][j] = fmaf(q[e], k[j][e], s[i][j]); }
                }
            }
        }
        for (int i = 0; i < ROWS; i++) {
            int row = row0 + 2 * i;
            float row_max = -INFINITY;
            for (int j = 0; j < KEYS; j++) {
                if (k0 + tx + 16 * j > q0 + row) { s[i][j] = -INFINITY; }
                row_max = fmaxf(row_max, s[i][j]);
            }
            for (int offset = 8; offset > 0; offset /= 2) {
                row_max = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, offset));
            }
            // m is finite from the first tile on, because every row sees key 0
            float new_m = fmaxf(m[i], row_max * scale_log2), rescale = exp2_approx(m[i] - new_m);
            m[i] = new_m, l[i] *= rescale;
            for (int j = 0; j < 4 * VECTORS; j++) { o[i][j] *= rescale; }
            for (int j = 0; j < KEYS; j++) {
                float p = exp2_approx(fmaf(s[i][j], scale_log2, -new_m));
                l[i] += p;
                smem.p[row][tx + 16 * j] = p;
            }
        }
        __syncthreads(); // all warps have read the keys
        attention_forward_plain_load<max_HS, keys>(smem.kv, src + 2 * C, k0, T, HS, stride);
        __syncthreads();
        for (int key = 0; key < keys; key += 4) {
            f128 p[ROWS];
            for (int i = 0; i < ROWS; i++) { p[i] = load128(&smem.p[row0 + 2 * i][key]); }
            for (int e = 0; e < 4; e++) {
                for (int j = 0; j < VECTORS; j++) {
                    f128 v = load128(&smem.kv[key + e][64 * j + 4 * tx]); // columns past HS are not stored below
                    for (int i = 0; i < ROWS; i++) {
                        for (int c = 0; c < 4; c++) { o[i][4 * j + c] = fmaf(p[i][e], v[c], o[i][4 * j + c]); }
                    }
                }
            }
        }
    }
    struct alignas(4 * sizeof(floatX)) Vec4 {
        floatX v[4];
    };
    for (int i = 0; i < ROWS; i++) {
        for (int offset = 8; offset > 0; offset /= 2) { l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], offset); }
        int t = q0 + row0 + 2 * i;
        if (t >= T) { continue; }
        float inverse = 1.0f / l[i];
        floatX* dst = out + ((size_t)b * T + t) * C + (size_t)h * HS;
        for (int j = 0; j < VECTORS; j++) {
            Vec4 x;
            for (int c = 0; c < 4; c++) { x.v[c] = (floatX)(o[i][4 * j + c] * inverse); }
            if (64 * j + 4 * tx < HS) { *reinterpret_cast<Vec4*>(dst + 64 * j + 4 * tx) = x; }
        }
        if (lse && tx == 0) { lse[(size_t)work.head * T + t] = (m[i] + log2f(l[i])) * LN2; }
    }
}

template <int max_HS, int rows, int keys> void attention_forward_plain_tiles(floatX* out, float* lse, const floatX* qkv,
                                                                             int B, int T, int HS, int NH,
                                                                             cudaStream_t stream) {
    auto kernel = attention_forward_kernel6<max_HS, rows, keys>;
    constexpr int SHARED_BYTES = sizeof(AttentionForwardPlainSMem<max_HS, rows, keys>);
    static_assert(SHARED_BYTES <= 64 << 10, "the limit of compute capability 7.5");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<B * NH * ceil_div(T, rows), 128, SHARED_BYTES, stream>>>(
        out, lse, qkv, T, HS, NH, B * NH, attention_forward_group(T, HS, B * NH), LOG2E / sqrtf((float)HS));
    cudaCheck(cudaGetLastError());
}

// HS is a multiple of 8, at most 256.
void attention_forward_plain(floatX* out, float* lse, const floatX* qkv, int B, int T, int HS, int NH,
                             cudaStream_t stream) {
    if (HS <= 64) {
        attention_forward_plain_tiles<64, 64, 64>(out, lse, qkv, B, T, HS, NH, stream);
    } else if (HS <= 128) {
        attention_forward_plain_tiles<128, 32, 64>(out, lse, qkv, B, T, HS, NH, stream);
    } else {
        require(HS <= 256);
        attention_forward_plain_tiles<256, 32, 16>(out, lse, qkv, B, T, HS, NH, stream);
    }
}
// ==== end promoted: attention_forward ====

#ifndef PROMOTED_ONLY
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
// queries of one head, and 4 blocks fit an SM, with 128 registers per thread. Kernels 8 to 11 replace the parts of this
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

__global__ void __launch_bounds__(128, 4)
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
        attention_forward_softmax7(s, o, m, l, q0 + warp_row - k0, scale_log2);
        attention_forward_values7(o, s, v_tile);
    }
    attention_forward_store7(out + (size_t)b * T * C + h * HS, lse + (size_t)blockIdx.x * T, o, m, l, q0 + warp_row, T,
                             C);
}

template <class Kernel> static void attention_forward_launch7(Kernel kernel, floatX* out, float* lse, const floatX* qkv,
                                                              int B, int T, int NH, cudaStream_t stream) {
    kernel<<<dim3(B * NH, ceil_div(T, 64)), 128, 0, stream>>>(out, lse, qkv, T, NH, LOG2E / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}

void attention_forward7(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch7(attention_forward_kernel7, out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 8: less arithmetic per score: masks at the diagonal only, one fma per exponent, rescale only if m grows ----

// As attention_forward_softmax7.
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

__global__ void __launch_bounds__(128, 4)
    attention_forward_kernel8(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
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
        attention_forward_softmax8(s, o, m, l, q0 + warp_row - k0, scale_log2);
        attention_forward_values7(o, s, v_tile);
    }
    attention_forward_store7(out + (size_t)b * T * C + h * HS, lse + (size_t)blockIdx.x * T, o, m, l, q0 + warp_row, T,
                             C);
}

void attention_forward8(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch7(attention_forward_kernel8, out, lse, qkv, B, T, NH, stream);
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

void attention_forward9(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch7(attention_forward_kernel9, out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 10: cp.async: the next tile of keys and values arrives in a second stage while this one is used ----

// As attention_forward_load7, but does not wait.
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

void attention_forward10(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch7(attention_forward_kernel10, out, lse, qkv, B, T, NH, stream);
}
#endif
#endif

// ==== promoted: attention_forward ====
#if !defined(ENABLE_FP32)
// ---- shared by kernels 11 to 16: swizzled tiles, filled by cp.async; a step over the keys by mma.sync ----
// Each warp owns 16 * row_tiles queries and processes `step` keys at a time. Rescaling is lazy: o and l are rescaled
// only when P of some row of the warp would exceed 2^slack.

// 64 * row_tiles queries, and two stages of 64 keys and their values: one stage is read while the other is filled.
template <int HS, int row_tiles> struct AttentionForwardMmaSMem {
    floatX q[64 * row_tiles * HS]; // at the end each warp stages its output rows here
    floatX kv[2][2][64 * HS];      // per stage: keys, then values
};

// The swizzle. Returns the element offset of 16-byte chunk `chunk` of row `row` in a tile (rows, HS). The chunks of a
// row are permuted by the row number, so that the same chunk of 8 consecutive rows, which ldmatrix reads at once,
// covers all 32 banks. Position p of row r holds chunk p ^ (r % 8), as in TMA's 128-byte swizzle. If HS is 32 or 96, it
// holds chunk p ^ (r / 2 % 4). The chunks at positions 0 to 7:
//
//     HS = 64    row 0    0 1 2 3 4 5 6 7
//                row 1    1 0 3 2 5 4 7 6
//                row 2    2 3 0 1 6 7 4 5
template <int HS> __device__ inline int attention_forward_at(int row, int chunk) {
    int permuted = HS % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return row * HS + permuted * 8;
}

// Given the shared-memory address of chunk 0 or 1 of a row, returns the address 16 * d columns further in the same row.
// Tiles are aligned to 256 bytes, so the swizzle is an xor of address bits.
template <int HS> __device__ inline uint32_t attention_forward_column(uint32_t address, int d) {
    return HS % 64 == 0 ? address ^ (d * 32) : (address ^ (d % 2 * 32)) + d / 2 * 64;
}

// Issues cp.async for rows first..first+rows-1 of src, which are 3 * C elements apart, into a tile. Rows past T become
// zeros. If parts is 2, the rows C elements further (the values of these keys) are also copied, into the next tile.
// The loop is not unrolled, because the compiler would then keep all addresses in registers.
template <int HS, int rows, int parts>
__device__ inline void attention_forward_load(floatX* tile, const floatX* src, int first, int T, size_t C) {
    constexpr int CHUNKS = HS / 8; // per row
    static_assert(rows * CHUNKS % 128 == 0, "every thread copies the same number");
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * CHUNKS; i += 128) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        const floatX* from = src + (first + row) * 3 * C + chunk * 8;
#pragma unroll
        for (int part = 0; part < parts; part++) {
            cp_async_16(tile + part * rows * HS + attention_forward_at<HS>(row, chunk), from + part * C,
                        first + row < T);
        }
    }
}

// One lane's fragments for its warp's queries. In each 16x8 accumulator tile of mma.sync, lane 4g + t holds 4 floats:
//
//     columns          0   1     2   3     4   5     6   7
//     row g            lane 4g   4g + 1    4g + 2    4g + 3      c[0], c[1]
//     row g + 8        lane 4g   4g + 1    4g + 2    4g + 3      c[2], c[3]
//
// So a lane has two rows per 16 queries, g and g + 8, and shares each of them with the other three lanes of its quad.
template <int HS, int row_tiles> struct AttentionForwardState {
    uint32_t q[row_tiles][HS / 16][4]; // operand fragments of the queries
    float o[row_tiles][HS / 8][4];     // accumulators of the output, not yet divided by l
    float m[row_tiles][2];             // per row, the maximum that P, o and l are relative to, times scale_log2
    float l[row_tiles][2];             // per row, this lane's partial sum of P
};

// One step of the main loop, over `step` keys. k, v: the shared-memory addresses that this lane passes to ldmatrix for
// the first 16 keys and values. key: index of the first key relative to the warp's first query; only read if masked.
template <bool masked, int step, int slack, int HS, int row_tiles> __device__ inline void
attention_forward_step(AttentionForwardState<HS, row_tiles>& state, uint32_t k, uint32_t v, int key, float scale_log2) {
    int lane = threadIdx.x % 32;
    constexpr int ROW_BYTES = HS * sizeof(floatX);
    float s[row_tiles][step / 8][4] = {};
#pragma unroll
    for (int d = 0; d < HS / 16; d++) {
#pragma unroll
        for (int n = 0; n < step / 16; n++) {
            uint32_t b[4]; // b[0..1]: keys 0-7 by 16 columns; b[2..3]: keys 8-15 by 16 columns
            ldmatrix_x4(b, attention_forward_column<HS>(k, d) + 16 * n * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < row_tiles; i++) {
                mma_16x8x16(s[i][2 * n], state.q[i][d], b[0], b[1], floatX());
                mma_16x8x16(s[i][2 * n + 1], state.q[i][d], b[2], b[3], floatX());
            }
        }
    }
    float new_m[row_tiles][2];
    bool grew = false;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            int row = 16 * i + 8 * half_row + lane / 4;
            float row_max = -INFINITY;
#pragma unroll
            for (int n = 0; n < step / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& score = s[i][n][2 * half_row + e];
                    if (masked && key + 8 * n + lane % 4 * 2 + e > row) { score = -INFINITY; }
                    row_max = fmaxf(row_max, score);
                }
            }
            row_max = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, 1));
            row_max = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, 2));
            new_m[i][half_row] = row_max * scale_log2;
            grew |= new_m[i][half_row] > state.m[i][half_row] + slack;
        }
    }
    // between two rescales P can grow to 2^slack; o and l carry the same factor, which cancels in o / l
    if (__any_sync(0xFFFFFFFFu, grew)) {
#pragma unroll
        for (int i = 0; i < row_tiles; i++) {
#pragma unroll
            for (int half_row = 0; half_row < 2; half_row++) {
                // m is finite from the first step on, because every row sees key 0
                float m = fmaxf(state.m[i][half_row], new_m[i][half_row]),
                      rescale = exp2_approx(state.m[i][half_row] - m);
                state.m[i][half_row] = m, state.l[i][half_row] *= rescale;
#pragma unroll
                for (int n = 0; n < HS / 8; n++) {
                    state.o[i][n][2 * half_row] *= rescale, state.o[i][n][2 * half_row + 1] *= rescale;
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < step / 16; n++) {
        uint32_t p[row_tiles][4]; // P of 16 keys: two adjacent 16x8 accumulator tiles make one 16x16 operand fragment
#pragma unroll
        for (int i = 0; i < row_tiles; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* score = &s[i][2 * n + j / 2][j % 2 * 2];
                float p0 = exp2_approx(fmaf(score[0], scale_log2, -state.m[i][j % 2]));
                float p1 = exp2_approx(fmaf(score[1], scale_log2, -state.m[i][j % 2]));
                state.l[i][j % 2] += p0 + p1;
                p[i][j] = pack_16x2(p0, p1, floatX());
            }
        }
#pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            uint32_t b[4]; // b[0..1]: 16 keys by columns 0-7; b[2..3]: 16 keys by columns 8-15
            ldmatrix_x4_trans(b, attention_forward_column<HS>(v, d) + 16 * n * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < row_tiles; i++) {
                mma_16x8x16(state.o[i][2 * d], p[i], b[0], b[1], floatX());
                mma_16x8x16(state.o[i][2 * d + 1], p[i], b[2], b[3], floatX());
            }
        }
    }
}

// Loads the operand fragments of a warp's queries, whose tile in shared memory is warp_q, and clears the rest.
template <int HS, int row_tiles>
__device__ inline void attention_forward_start(AttentionForwardState<HS, row_tiles>& state, const floatX* warp_q) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            ldmatrix_x4(state.q[i][d], warp_q + attention_forward_at<HS>(16 * i + lane % 16, 2 * d + lane / 16));
        }
        for (int n = 0; n < HS / 8; n++) {
            for (int e = 0; e < 4; e++) { state.o[i][n][e] = 0; }
        }
        for (int half_row = 0; half_row < 2; half_row++) { state.m[i][half_row] = -INFINITY, state.l[i][half_row] = 0; }
    }
}

// The addresses that this lane passes to ldmatrix for the first 16 keys, or values, of a tile. ldmatrix.x4 reads 16 keys
// by 16 columns as four 8x8 matrices. Their (keys, columns), in the order in which mma takes them as operand b:
//     S = Q K^T: (0-7, 0-7) (0-7, 8-15) (8-15, 0-7) (8-15, 8-15)
//     P V:       (0-7, 0-7) (8-15, 0-7) (0-7, 8-15) (8-15, 8-15), each transposed
template <int HS> __device__ inline uint32_t attention_forward_k_address(const floatX* tile) {
    int lane = threadIdx.x % 32;
    return shared_address(tile + attention_forward_at<HS>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}
template <int HS> __device__ inline uint32_t attention_forward_v_address(const floatX* tile) {
    int lane = threadIdx.x % 32;
    return shared_address(tile + attention_forward_at<HS>(lane % 16, lane / 16));
}
#endif
// ==== end promoted: attention_forward ====

#ifndef PROMOTED_ONLY
#if !defined(ENABLE_FP32)
// ---- kernel 11: swizzled tiles instead of padded ones: 40 KB instead of 45 ----

__global__ void __launch_bounds__(128, 4)
    attention_forward_kernel11(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(256) AttentionForwardMmaSMem<HS, 1> smem;
    int warp_row = threadIdx.x / 32 * 16;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, q0 = (gridDim.y - 1 - blockIdx.y) * 64;
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    attention_forward_load<HS, 64, 1>(smem.q, src, q0, T, C);
    attention_forward_load<HS, 64, 2>(smem.kv[0][0], src + C, 0, T, C);
    cp_async_commit();
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
        if (k0 + 64 < min(q0 + 64, T)) {
            attention_forward_load<HS, 64, 2>(smem.kv[1 - stage][0], src + C, k0 + 64, T, C);
            cp_async_commit();
        }
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

void attention_forward11(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch7(attention_forward_kernel11, out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 12: whole lines of memory: output rows are staged and stored 16 bytes at a time; heads in groups that fit L2
// Kernels 12 to 14 are kernel 15, which is defined below, with other template arguments.

template <int HS, int row_tiles, int step, int slack, int blocks>
void attention_forward_mma_tiles(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream);

void attention_forward12(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_mma_tiles<LADDER_HS, 1, 64, 0, 3>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 13: 32 queries per warp: each fragment of K and V is used twice, which halves shared memory reads ----

void attention_forward13(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_mma_tiles<LADDER_HS, 2, 64, 0, 2>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 14: lazy rescaling, only when P would exceed 2^8, which is rare after the first keys ----

void attention_forward14(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_mma_tiles<LADDER_HS, 2, 64, 8, 2>(out, lse, qkv, B, T, NH, stream);
}
#endif
#endif

// ==== promoted: attention_forward ====
#if !defined(ENABLE_FP32)
// ---- kernel 15: mma.sync, steps of 32 keys, which need few enough registers for 3 blocks of 4 warps per SM ----
// `blocks` is the number of blocks per SM.

// Epilogue: divides a warp's output rows by l and stores them, 16 bytes at a time. `tile`, the warp's own slice of
// smem.q, is the staging area.
template <int HS, int row_tiles>
__device__ inline void attention_forward_store(floatX* out, float* lse, floatX* tile,
                                               AttentionForwardState<HS, row_tiles>& state, int row0, int T, size_t C) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            int row = 16 * i + 8 * half_row + lane / 4;
            float l = state.l[i][half_row];
            l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
            l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
            float inverse = 1.0f / l;
            if (lse && lane % 4 == 0 && row0 + row < T) { lse[row0 + row] = (state.m[i][half_row] + log2f(l)) * LN2; }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                uint32_t pair = pack_16x2(state.o[i][n][2 * half_row] * inverse,
                                          state.o[i][n][2 * half_row + 1] * inverse, floatX());
                *reinterpret_cast<uint32_t*>(tile + attention_forward_at<HS>(row, n) + lane % 4 * 2) = pair;
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * row_tiles * HS / 8; i += 32) {
        int row = i / (HS / 8), chunk = i % (HS / 8);
        if (row0 + row < T) {
            // int4 instead of load128 and store128, because the compiler splits those into 4-byte copies here
            *reinterpret_cast<int4*>(out + (row0 + row) * C + chunk * 8) =
                *reinterpret_cast<const int4*>(tile + attention_forward_at<HS>(row, chunk));
        }
    }
}

template <int HS, int row_tiles, int step, int slack, int blocks> __global__ void __launch_bounds__(128, blocks)
    attention_forward_kernel15(floatX* out, float* lse, const floatX* qkv, int T, int NH, int num_heads, int group,
                               float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardMmaSMem<HS, row_tiles>*>(attention_forward_shared);
    constexpr int ROWS = 64 * row_tiles;
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, ROWS), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * ROWS;
    int warp_row = threadIdx.x / 32 * 16 * row_tiles; // the warp's first query is q0 + warp_row
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    int num_tiles = ceil_div(min(q0 + ROWS, T), 64), num_unmasked = q0 / 64;

    attention_forward_load<HS, ROWS, 1>(smem.q, src, q0, T, C);
    attention_forward_load<HS, 64, 2>(smem.kv[0][0], src + C, 0, T, C);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    AttentionForwardState<HS, row_tiles> state;
    floatX* warp_q = smem.q + warp_row * HS;
    attention_forward_start(state, warp_q);
    constexpr int ROW_BYTES = HS * sizeof(floatX), STAGE_BYTES = sizeof(smem.kv[0]);
    uint32_t k_address = attention_forward_k_address<HS>(smem.kv[0][0]);
    uint32_t v_address = attention_forward_v_address<HS>(smem.kv[0][1]);
    for (int tile = 0; tile < num_tiles; tile++) {
        if (tile > 0) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has landed, and all warps have read the stage that the next load overwrites
        }
        if (tile + 1 < num_tiles) {
            attention_forward_load<HS, 64, 2>(smem.kv[(tile + 1) % 2][0], src + C, (tile + 1) * 64, T, C);
            cp_async_commit();
        }
        uint32_t k = k_address + tile % 2 * STAGE_BYTES, v = v_address + tile % 2 * STAGE_BYTES;
        if (tile < num_unmasked) {
#pragma unroll 1
            for (int j = 0; j < 64; j += step) {
                attention_forward_step<false, step, slack>(state, k + j * ROW_BYTES, v + j * ROW_BYTES, 0, scale_log2);
            }
        } else {
            // the tile's first key, relative to the warp's first query; no query of the warp sees a key whose relative
            // index is 16 * row_tiles or more
            int key = tile * 64 - q0 - warp_row;
#pragma unroll 1
            for (int j = 0; j < 64 && key + j < 16 * row_tiles; j += step) {
                attention_forward_step<true, step, slack>(state, k + j * ROW_BYTES, v + j * ROW_BYTES, key + j,
                                                          scale_log2);
            }
        }
    }
    floatX* dst = out + ((size_t)b * T * NH + h) * HS;
    attention_forward_store(dst, lse ? lse + (size_t)work.head * T : nullptr, warp_q, state, q0 + warp_row, T, C);
}

template <int HS, int row_tiles, int step, int slack, int blocks> void
attention_forward_mma_tiles(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_kernel15<HS, row_tiles, step, slack, blocks>;
    constexpr int SHARED_BYTES = sizeof(AttentionForwardMmaSMem<HS, row_tiles>);
    static_assert(SHARED_BYTES <= 99 << 10, "the limit of compute capability 8.6");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<B * NH * ceil_div(T, 64 * row_tiles), 128, SHARED_BYTES, stream>>>(
        out, lse, qkv, T, NH, B * NH, attention_forward_group(T, HS, B * NH), LOG2E / sqrtf((float)HS));
    cudaCheck(cudaGetLastError());
}

// HS is 32, 64, 96 or 128.
void attention_forward_mma(floatX* out, float* lse, const floatX* qkv, int B, int T, int HS, int NH,
                           cudaStream_t stream) {
    if (HS == 32) {
        attention_forward_mma_tiles<32, 2, 32, 8, 3>(out, lse, qkv, B, T, NH, stream);
    } else if (HS == 64) {
        attention_forward_mma_tiles<64, 2, 32, 8, 3>(out, lse, qkv, B, T, NH, stream);
    } else if (HS == 96) {
        attention_forward_mma_tiles<96, 1, 64, 8, 3>(out, lse, qkv, B, T, NH, stream);
    } else {
        require(HS == 128);
        attention_forward_mma_tiles<128, 1, 64, 8, 2>(out, lse, qkv, B, T, NH, stream);
    }
}

// ---- sm_90a: shared by kernels 17 to 25: wgmma products, online softmax in registers, output by TMA ----
// HS = 64. A warpgroup owns 64 queries, 16 per warp. Loops over register arrays are unrolled explicitly, because the
// compiler puts an array with a run-time index into local memory.
// Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.

constexpr int ATTENTION_FORWARD_ROW = 64; // elements per query, key or value: 128 bytes, the width of TMA's swizzle
constexpr int ATTENTION_FORWARD_BOX = 64 * ATTENTION_FORWARD_ROW; // elements of 64 queries, keys or values

// Issues s = q k^T for 64 queries and 64 keys, and does not wait. q, k: wgmma descriptors. The previous contents of s
// are overwritten, and the compiler knows that they are dead.
__device__ inline void attention_forward_sm90_scores(float (&s)[32], uint64_t q, uint64_t k) {
    wgmma_64x64x16_new(s, q, k, floatX());
#pragma unroll
    for (int d = 1; d < 4; d++) { // 16 columns are 32 bytes, and the descriptor counts in units of 16 bytes
        wgmma_64x64x16(s, q + 2 * d, k + 2 * d, 1, floatX());
    }
}

// Issues o += P v for 4 * n keys, and does not wait. p: P as operand fragments in registers; v: wgmma descriptor.
template <int n>
__device__ inline void attention_forward_sm90_values(float (&o)[32], const uint32_t (&p)[n], uint64_t v) {
#pragma unroll
    for (int k = 0; k < n / 4; k++) { // 16 keys are 2048 bytes: 128 of the descriptor's units
        wgmma_64x64x16_transposed(o, p + 4 * k, v + 128 * k, 1, floatX());
    }
}

// The softmax state of a thread's two rows, g and g + 8 of its warp's 16, where lane = 4g + t. The wgmma accumulators s
// and o are 16x8 tiles side by side; of tile j (columns 8j..8j+7) each lane holds elements 4j..4j+3 of its array:
//
//     columns 8j +     0   1     2   3     4   5     6   7
//     row g            lane 4g   4g + 1    4g + 2    4g + 3      elements 4j, 4j + 1 (columns 8j + 2t, 8j + 2t + 1)
//     row g + 8        lane 4g   4g + 1    4g + 2    4g + 3      elements 4j + 2, 4j + 3 (the same columns)
//
// So element i belongs to row number i / 2 % 2 of the two, and the four lanes of a quad share a row.
struct AttentionForwardRows {
    float m[2];       // the maximum that P, o and l are relative to, times scale_log2
    float l[2];       // this thread's partial row sum of P
    float rescale[2]; // the factor by which o must be multiplied if the row maximum has grown in this step
    // Correction that is added to l before the final division. P V uses P rounded to 16 bits, but l sums P unrounded.
    // The correction covers two parts of the difference: the whole diagonal block, and each later row maximum, whose P
    // is 1 after rounding but was added to l as 1 + error.
    float rounding[2];
};

// Folds the scores s of a key block after the diagonal into the running row maximum, and rescales l. Returns true if o
// must be rescaled.
template <int num_s> __device__ inline bool attention_forward_sm90_max(const float (&s)[num_s],
                                                                       AttentionForwardRows& rows, float scale_log2) {
    float row_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}; // two independent chains of fmaxf per row
#pragma unroll
    for (int i = 0; i < num_s; i++) { row_max[i / 2 % 2][i % 2] = fmaxf(row_max[i / 2 % 2][i % 2], s[i]); }
    float raw_m[2], new_m[2];
    bool grew = false;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float m = fmaxf(row_max[half_row][0], row_max[half_row][1]);
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
        raw_m[half_row] = m, new_m[half_row] = m * scale_log2;
        grew |= new_m[half_row] > rows.m[half_row];
    }
    grew = __any_sync(0xFFFFFFFFu, grew);
    if (grew) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float m = fmaxf(rows.m[half_row], new_m[half_row]);
            rows.rescale[half_row] = exp2_approx(rows.m[half_row] - m);
            rows.l[half_row] *= rows.rescale[half_row];
            // at the row maximum the exponent raw_m * scale_log2 - m is not 0 but the rounding error of m, so P is
            // 1 + LN2 * error there; each of the quad's four lanes adds a quarter of the correction
            float error = rows.m[half_row] < m ? fmaf(raw_m[half_row], scale_log2, -m) : 0;
            rows.rounding[half_row] = fmaf(rows.rounding[half_row], rows.rescale[half_row], error * (-LN2 / 4));
            rows.m[half_row] = m;
        }
    }
    return grew;
}

// Turns the scores s into P = exp2(s * scale_log2 - m) in place, and adds P to l.
template <int num_s> __device__ inline void
attention_forward_sm90_exponents(float (&s)[num_s], AttentionForwardRows& rows, float scale_log2) {
#pragma unroll
    for (int i = 0; i < num_s; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -rows.m[i / 2 % 2]));
        rows.l[i / 2 % 2] += s[i];
    }
}

// As attention_forward_sm90_exponents, for the diagonal block. group: index of the group of 16 keys that has the same
// positions as the warp's 16 queries. P of later groups is 0.
template <int num_s> __device__ inline void
attention_forward_sm90_diagonal_exponents(float (&s)[num_s], AttentionForwardRows& rows, int group, float scale_log2) {
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        if (n / 8 > group) {
#pragma unroll
            for (int i = n; i < n + 8; i++) { s[i] = 0; }
        } else {
            asm volatile(""); // makes the compiler keep the branch, so that hidden groups cost nothing
#pragma unroll
            for (int i = n; i < n + 8; i++) {
                s[i] = exp2_approx(fmaf(s[i], scale_log2, -rows.m[i / 2 % 2]));
                rows.l[i / 2 % 2] += s[i];
            }
        }
    }
}

// Softmax of a tile's first key block, the one on the diagonal. Sets m, l and rescale. The warp's own group is the 16
// keys at the positions of its 16 rows, number `group` in the block. Every row sees all groups before the own group,
// and none after it. Only the own group needs a triangular mask (g = lane / 4; columns within the group):
//
//                      columns 0-7       columns 8-15
//     row g            column <= g       hidden
//     row g + 8        visible           column - 8 <= g
//
// The mask is added (0 or -1e38), because compares run at half the rate of fmaf and a branch makes the compiler copy s.
// Side effect: an infinite or NaN score in the own group is not hidden.
template <int num_s> __device__ inline void
attention_forward_sm90_diagonal(float (&s)[num_s], AttentionForwardRows& rows, int group, float scale_log2) {
    constexpr float HIDDEN = -1e38f;
    int lane = threadIdx.x % 32;
    // opaque to the compiler, so that it recomputes the masks in every tile instead of keeping them in registers
    asm volatile("" : "+r"(lane), "+r"(group));
    float mask[2] = {lane % 4 * 2 <= lane / 4 ? 0 : HIDDEN, lane % 4 * 2 + 1 <= lane / 4 ? 0 : HIDDEN};
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        float own = n / 8 == group ? 1.0f : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[n + e] = fmaf(own, mask[e], s[n + e]);
            s[n + 4 + e] = fmaf(own, HIDDEN, s[n + 4 + e]);
            s[n + 6 + e] = fmaf(own, mask[e], s[n + 6 + e]);
        }
    }
    wgmma_hold(s); // makes the compiler mask in place, in the registers of s
    // s[i], s[i + 1], s[i + 4] and s[i + 5] are this lane's four scores of one row and one group of 16 keys
#pragma unroll
    for (int i = 0; i < num_s; i += i % 8 == 0 ? 2 : 6) {
        float m = fmaxf(fmaxf(s[i], s[i + 1]), fmaxf(s[i + 4], s[i + 5]));
        row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], i / 8 <= group ? m : -INFINITY);
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

// Sets rows.rounding after the diagonal block: the sum of the rounded P (p) minus the sum of the unrounded P (l).
template <int num_p> __device__ inline void attention_forward_sm90_rounding(AttentionForwardRows& rows,
                                                                            const uint32_t (&p)[num_p], int group) {
    rows.rounding[0] = -rows.l[0], rows.rounding[1] = -rows.l[1];
#pragma unroll
    for (int n = 0; n < num_p; n += 4) { // one group of 16 keys
        if (n / 4 <= group) {
            asm volatile(""); // makes the compiler keep the branch, so that hidden groups cost nothing
#pragma unroll
            for (int j = n; j < n + 4; j++) {
                float2 pair = unpack_16x2(p[j], floatX());
                rows.rounding[j % 2] += pair.x;
                rows.rounding[j % 2] += pair.y;
            }
        }
    }
}

// Multiplies the rows of o by rows.rescale.
__device__ inline void attention_forward_sm90_rescale(float (&o)[32], const AttentionForwardRows& rows) {
#pragma unroll
    for (int i = 0; i < 32; i++) { o[i] *= rows.rescale[i / 2 % 2]; }
}

// Rounds P to 16 bits, as operand fragments: the two 16x8 accumulator tiles of 16 keys become the four registers of one
// 16x16 operand.
template <int num_p>
__device__ inline void attention_forward_sm90_pack(uint32_t (&p)[num_p], const float (&s)[2 * num_p]) {
#pragma unroll
    for (int i = 0; i < num_p; i++) { p[i] = pack_16x2(s[2 * i], s[2 * i + 1], floatX()); }
}

// Stores the log-sum-exp of a thread's two rows. lse: the T values of this sequence and head, or NULL; t: the warp's
// first token.
__device__ inline void attention_forward_sm90_lse(float* lse, const float (&l)[2], const float (&m)[2], int t, int T) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        int row = t + lane / 4 + 8 * half_row;
        if (lse && lane % 4 == 0 && row >= 0 && row < T) { lse[row] = (m[half_row] + log2f(l[half_row])) * LN2; }
    }
}
// Adds up l over the four lanes that share a row.
__device__ inline void attention_forward_sm90_row_sums(float (&l)[2]) {
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        l[half_row] += __shfl_xor_sync(0xFFFFFFFFu, l[half_row], 1);
        l[half_row] += __shfl_xor_sync(0xFFFFFFFFu, l[half_row], 2);
    }
}

// Writes a warp's 16 rows of o, multiplied by `inverse`, to a tile (16,64) in shared memory, in TMA's 128-byte swizzle.
__device__ inline void attention_forward_sm90_to_shared(floatX* tile, const float (&o)[32], const float (&inverse)[2]) {
    int lane = threadIdx.x % 32;
    // stmatrix.x4 stores four 8x8 matrices: rows 0-7 and rows 8-15 of two adjacent 16-byte chunks
    uint32_t address = shared_address(tile + attention_forward_at<64>(lane % 16, lane / 16));
#pragma unroll
    for (int d = 0; d < 4; d++) { // 16 columns at a time
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            r[e] = pack_16x2(o[8 * d + 2 * e] * inverse[e % 2], o[8 * d + 2 * e + 1] * inverse[e % 2], floatX());
        }
        stmatrix_x4(attention_forward_column<64>(address, d), r);
    }
}

// Divides a warp's 16 rows, tokens t..t+15, by their sums l and stores them by TMA. t < 0 is padding and is not stored.
// `tile` is this warp's staging area in shared memory; it must not be written again before tma_store_wait.
__device__ inline void attention_forward_sm90_store(const CUtensorMap& out_map, floatX* tile, const float (&o)[32],
                                                    const float (&l)[2], int t, int h, int b) {
    attention_forward_sm90_to_shared(tile, o, {1.0f / l[0], 1.0f / l[1]});
    tma_store_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && t >= 0) { // TMA rejects a box that is entirely before the tensor
        tma_store_4d(&out_map, tile, 0, h, t, b);
        tma_store_commit();
    }
}

// The static tile scheduler of a persistent block. In each round every block takes one pair of tiles, a long one and a
// short one, chosen so that all pairs are equal work. With 4 tiles per head, where tile i sees the keys of tiles 0 to
// i, two heads A and B make four pairs, each of which sees 5 tiles of keys:
//
//     block      0         1         2         3
//                A3 B0     B3 A0     A2 B1     B2 A1
//
// In the last rounds every block takes single tiles, the longest first, with the order of the blocks reversed in every
// other round. Pairs alone would leave blocks idle at the end: at B = 64, T = 1024, NH = 12 they fill 11.6 rounds of
// 132 blocks.
struct AttentionForwardList {
    int num_heads, num_tiles, num_paired; // num_tiles: tiles per head; the first num_paired heads are split into pairs
    int position;                         // 2 * number of rounds done, + 1 if the second tile of a pair comes next
    int head, tile;                       // the current tile
};
// Advances to the next tile. Returns false at the end.
__device__ inline bool attention_forward_next_tile(AttentionForwardList& list) {
    list.position++;
    if (list.position % 2 == 0) {
        list.head ^= 1, list.tile = list.num_tiles - 1 - list.tile;
        return true;
    }
    int blocks = gridDim.x, block = blockIdx.x, round = list.position / 2, first = round * blocks;
    // number of pairs; a pair takes its two tiles from two heads, because num_tiles may be odd
    int paired = list.num_paired / 2 * list.num_tiles;
    if (first + block < paired) {
        int two_heads = (first + block) / list.num_tiles;
        // + two_heads, so that no block gets the same pair in every round when num_tiles divides the number of blocks
        int pair = (first + block + two_heads) % list.num_tiles;
        list.head = 2 * two_heads + pair % 2, list.tile = list.num_tiles - 1 - pair / 2;
        return true;
    }
    list.position++;
    int whole = ceil_div(paired, blocks); // the first round in which all blocks take single tiles
    bool backwards = round > whole && (round - whole) % 2 == 1;
    int single = first + (backwards ? blocks - 1 - block : block) - paired, heads = list.num_heads - list.num_paired;
    if (single >= heads * list.num_tiles) { return false; } // this block gets no tile in later rounds either
    list.head = list.num_paired + single % heads, list.tile = list.num_tiles - 1 - single / heads;
    return true;
}

// The scheduler state before the first tile, for a grid of num_blocks.
inline AttentionForwardList attention_forward_list(int num_heads, int num_tiles, int num_blocks) {
    // number of rounds of pairs; the last 2 to 3 rounds' worth of pairs become single tiles
    int rounds = max(num_heads * num_tiles / 2 / num_blocks - 2, 0);
    return {num_heads, num_tiles, rounds * num_blocks / num_tiles * 2, 0, 0, 0};
}
#endif
// ==== end promoted: attention_forward ====

#if !defined(ENABLE_FP32)
// ---- shared by kernels 17 to 24 and by ops that include this file: steps of 128 keys ----

// Overloads of attention_forward_sm90_scores and _values that take shared-memory pointers instead of descriptors.
__device__ inline void attention_forward_sm90_scores(float (&s)[32], const floatX* q, const floatX* k) {
    attention_forward_sm90_scores(s, wgmma_descriptor(q), wgmma_descriptor(k));
}
template <int n>
__device__ inline void attention_forward_sm90_values(float (&o)[32], const uint32_t (&p)[n], const floatX* v) {
    attention_forward_sm90_values(o, p, wgmma_descriptor(v));
}

constexpr int ATTENTION_FORWARD_KEYS = 128 * ATTENTION_FORWARD_ROW; // elements of 128 keys, or of 128 values
constexpr int ATTENTION_FORWARD_KEY_BYTES = 16 * 1024; // their size in bytes, which the full barrier expects
static_assert(sizeof(floatX) * ATTENTION_FORWARD_KEYS == ATTENTION_FORWARD_KEY_BYTES, "");

// Issues the TMA loads of 128 keys or values, those of tokens t..t+127. vector: index into the 3 * NH vectors of a
// token (q of all heads, then k, then v).
__device__ inline void attention_forward_tma(floatX* keys, uint64_t* full, const CUtensorMap& qkv_map, int vector,
                                             int t, int b) {
    mbarrier_arrive_expect(full, ATTENTION_FORWARD_KEY_BYTES);
    tma_load_4d(keys, &qkv_map, 0, vector, t, b, full);
    tma_load_4d(keys + ATTENTION_FORWARD_BOX, &qkv_map, 0, vector, t + 64, b, full);
}

// Scores of 128 keys, from shared-memory pointers. If `held` is true, the compiler is not told that the previous
// contents of s are dead, and so keeps s in its registers. This gives better code where all registers are in use
// anyway.
template <bool held = false>
__device__ inline void attention_forward_sm90_scores(float (&s)[64], const floatX* q, const floatX* k) {
    uint64_t a = wgmma_descriptor(q), b = wgmma_descriptor(k);
    if constexpr (held) {
        wgmma_64x128x16(s, a, b, 0, floatX());
    } else {
        wgmma_64x128x16_new(s, a, b, floatX());
    }
#pragma unroll
    for (int d = 1; d < 4; d++) { wgmma_64x128x16(s, a + 2 * d, b + 2 * d, 1, floatX()); }
}

// Turns the scores of 2 * num_s keys into P, and adds P to l. If `masked`, row r of the warp does not see keys after
// diagonal + r. If `skip`, no exponentials are computed for groups of 16 keys that no row of the warp sees. Rescaling
// is lazy, as in kernel 14: if P would exceed 2^8, l is rescaled and true is returned, because o must be rescaled too.
template <bool masked, bool skip, int num_s> __device__ inline bool
attention_forward_sm90_lazy_softmax(float (&s)[num_s], AttentionForwardRows& rows, int diagonal, float scale_log2) {
    int lane = threadIdx.x % 32,
        last_key = diagonal + lane / 4 - lane % 4 * 2; // last key that row g sees, relative to this thread's column 2t
    float row_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}; // two independent chains of fmaxf per row
#pragma unroll
    for (int i = 0; i < num_s; i++) {
        if (masked && i / 4 * 8 + i % 2 > last_key + i / 2 % 2 * 8) { s[i] = -INFINITY; }
        row_max[i / 2 % 2][i % 2] = fmaxf(row_max[i / 2 % 2][i % 2], s[i]);
    }
    float new_m[2];
    bool grew = false;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float m = fmaxf(row_max[half_row][0], row_max[half_row][1]);
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
        new_m[half_row] = m * scale_log2;
        grew |= new_m[half_row] > rows.m[half_row] + 8.0f;
    }
    grew = __any_sync(0xFFFFFFFFu, grew);
    if (grew) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float m = fmaxf(rows.m[half_row], new_m[half_row]);
            rows.rescale[half_row] = exp2_approx(rows.m[half_row] - m);
            rows.l[half_row] *= rows.rescale[half_row];
            rows.m[half_row] = m;
        }
    }
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        if (skip && 2 * n > diagonal + 15) { // no row of the warp sees these 16 keys
#pragma unroll
            for (int i = n; i < n + 8; i++) { s[i] = 0; }
        } else {
            if (skip) { asm volatile(""); } // makes the compiler keep the branch, so that hidden groups cost nothing
#pragma unroll
            for (int i = n; i < n + 8; i++) {
                s[i] = exp2_approx(fmaf(s[i], scale_log2, -rows.m[i / 2 % 2]));
                rows.l[i / 2 % 2] += s[i];
            }
        }
    }
    return grew;
}

// The end of a step over 128 keys, after its exponentials: waits for P V of the previous step, then packs P. await()
// waits for the keys of the next step, if there is one (`more`). The condition !(l < 0) always holds. It makes the
// compiler keep the exponentials before the branch; otherwise it moves some of them behind wgmma_wait, where they no
// longer overlap with P V.
template <class F> __device__ inline void attention_forward_end_step(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                                     const AttentionForwardRows& rows, bool grew,
                                                                     bool more, F await, uint64_t* v_empty) {
    if (more && !(rows.l[0] + rows.l[1] < 0)) { await(); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(v_empty); }
    if (grew) { attention_forward_sm90_rescale(o, rows); }
    attention_forward_sm90_pack(p, s);
}

// Calls f(head, tile) for every tile of queries of this block. If `persistent`, the block takes every gridDim.x-th pair
// of tiles. A pair is a long and a short tile of one head; all pairs of a head see the same number of keys. Otherwise
// the block takes one tile.
template <bool persistent, class F>
__device__ inline void attention_forward_each_tile(int num_heads, int num_tiles, int group, F f) {
    if (!persistent) {
        AttentionForwardWork work = attention_forward_work(num_heads, num_tiles, group);
        f(work.head, work.tile);
        return;
    }
    int num_pairs = ceil_div(num_tiles, 2);
#pragma unroll 1
    for (int i = blockIdx.x; i < num_heads * num_pairs; i += gridDim.x) {
        int first = i % num_pairs, last = num_tiles - 1 - first;
#pragma unroll 1
        for (int tile = last; tile >= first; tile -= max(last - first, 1)) { f(i / num_pairs, tile); }
    }
}
#endif

#ifndef PROMOTED_ONLY
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
                            num_unmasked * 64 + warp_row, T, (size_t)NH * 64);
}

void attention_forward16(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_sm90_kernel16;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem16) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<B * NH * ceil_div(T, 128), 128, SHARED_BYTES, stream>>>(
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
    attention_forward_sm90_row_sums(rows.l);
    attention_forward_sm90_lse(lse + (size_t)work.head * T, rows.l, rows.m, row0, T);
    attention_forward_sm90_store(out_map, tile, o, rows.l, row0, h, b);
    if (lane == 0) { tma_store_wait<0>(); }
}

// Launches kernel 17 or 18, each with tiles of 128 queries.
template <class SMem, class Kernel> static void attention_forward_launch17(Kernel kernel, floatX* out, float* lse,
                                                                           const floatX* qkv, int B, int T, int NH,
                                                                           cudaStream_t stream) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = tensor_map_heads(out, B, T, NH, 16);
    constexpr int SHARED_BYTES = sizeof(SMem) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<B * NH * ceil_div(T, 128), 256, SHARED_BYTES, stream>>>(
        lse, qkv_map, out_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward17(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch17<AttentionForwardSMem16>(attention_forward_sm90_kernel17, out, lse, qkv, B, T, NH,
                                                       stream);
}

// ---- kernel 18: steps of 128 keys, the diagonal first: half as many waits, and only the first step is masked ----
// As in kernel 17 two blocks fit an SM: one block's softmax is hidden behind the other's products. Keys and values have
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
    attention_forward_sm90_row_sums(rows.l);
    attention_forward_sm90_lse(lse ? lse + (size_t)work.head * T : nullptr, rows.l, rows.m, row0, T);
    attention_forward_sm90_store(out_map, tile, o, rows.l, row0, h, b);
    if (lane == 0) { tma_store_wait<0>(); }
}

void attention_forward18(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_launch17<AttentionForwardSMem18>(attention_forward_sm90_kernel18, out, lse, qkv, B, T, NH,
                                                       stream);
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
        attention_forward_sm90_row_sums(rows.l);
        attention_forward_sm90_lse(lse ? lse + (size_t)head * T : nullptr, rows.l, rows.m, q0 + warp_row, T);
        attention_forward_sm90_store(out_map, out_tile, o, rows.l, q0 + warp_row, head % NH, head / NH);
        n++;
    });
    if (pingpong && warpgroup == 1) { named_barrier_sync(1, 256); } // consumes the last arrival at the barrier
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups, bool pingpong, bool persistent>
void attention_forward19_groups(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_sm90_kernel19<groups, pingpong, persistent>;
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = tensor_map_heads(out, B, T, NH, 16);
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem19<groups>) + 1024;
    int num_tiles = ceil_div(T, 64 * groups);
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    int num_blocks = persistent ? min(B * NH * ceil_div(num_tiles, 2), num_multiprocessors()) : B * NH * num_tiles;
    kernel<<<num_blocks, 128 * (groups + 1), SHARED_BYTES, stream>>>(
        lse, qkv_map, out_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward19(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward19_groups<2, false, false>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 20: ping-pong: the softmax of one consumer is hidden behind the products of the other ----

void attention_forward20(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward19_groups<2, true, false>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 21: one persistent block per SM takes pairs of tiles of equal work and prefetches the next tile ----

void attention_forward21(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward19_groups<2, true, true>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 22: 192 queries and three consumers: more warps to run while one waits, and keys are read less often ----

void attention_forward22(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward19_groups<3, true, true>(out, lse, qkv, B, T, NH, stream);
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

// As kernel 25's pack, for P of 64 keys in registers that have room for 128 keys: the second half becomes 0.
__device__ inline void attention_forward_sm90_pack(uint32_t (&p)[32], const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) { p[i] = 2 * i < 32 ? pack_16x2(s[2 * i], s[2 * i + 1], floatX()) : 0; }
}

// As kernel 25's attention_forward_sm90_diagonal, but elements of s before first_masked are not masked: in the callers
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
        attention_forward_sm90_row_sums(rows.l);
        attention_forward_sm90_row_sums(rows.rounding);
        tile = {list.head, q0 + (warp - 4) * 16, {rows.l[0] + rows.rounding[0], rows.l[1] + rows.rounding[1]}};
        attention_forward_sm90_lse(lse ? lse + (size_t)list.head * T : nullptr, rows.l, rows.m, tile.row0, T);
    }
    if (n > 0) { attention_forward_finish23(smem, out_map, o, p, tile, i - 1, NH); }
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups>
void attention_forward23_groups(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
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
    kernel<<<num_blocks, 128 * (groups + 1), SHARED_BYTES, stream>>>(lse, qkv_map, out_map, T, NH, num_heads, num_tiles,
                                                                     num_paired, LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward23(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward23_groups<2>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 24: kernel 23 with three consumers, each of which skips keys that none of its queries sees ----
// Steps of the ring per head at T = 1024: 27 here, 36 in kernel 21 with its two consumers, 32 in kernel 22 with three.

void attention_forward24(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward23_groups<3>(out, lse, qkv, B, T, NH, stream);
}
#endif
#endif

// ==== promoted: attention_forward ====
#if !defined(ENABLE_FP32)
// ---- kernel 25: one producer, four consumer warpgroups that do not wait for each other, steps of 64 keys ----
// One persistent block per SM takes tiles of 256 queries, or of 128 if there are few tiles. One producer thread fills a
// ring of keys and values by TMA. Each consumer warpgroup owns 64 queries of the tile and walks over their keys, the
// diagonal first. Example: the tile of queries 256..511, by blocks of 64 keys (d: diagonal, s: later step, -: skipped):
//
//     key block             7  6  5  4  3  2  1  0
//     queries 448..511      d  s  s  s  s  s  s  s       warpgroup 3, in the next tile warpgroup 0
//     queries 384..447      -  d  s  s  s  s  s  s       warpgroup 2, in the next tile warpgroup 1
//     queries 320..383      -  -  d  s  s  s  s  s       warpgroup 1, in the next tile warpgroup 2
//     queries 256..319      -  -  -  d  s  s  s  s       warpgroup 0, in the next tile warpgroup 3
//
// No barrier couples the consumers. Within the length of the ring each runs at its own pace, so that the softmax of one
// warpgroup is hidden behind the products of the others. Step i of one warpgroup over time:
//
//     tensor cores     S = q k_i^T     o += P v_(i-1)         (free for the other warpgroups)
//     other units      wait            row maximum of S       rescale o, P = exp2(S - m), sum, pack

constexpr unsigned ATTENTION_FORWARD_STAGES = 8; // of the ring; each stage holds 64 keys and their values

// A tile, as the producer announces it to the consumers. Tiles are aligned to the end of the sequence, so that
// first_group, the tile's first group of 64 queries, is negative if the tile is partial.
struct AttentionForwardTile {
    int b; // sequence; negative: there are no more tiles
    int h, first_group;
};

// `groups` is the number of groups of 64 queries per tile; each consumer warpgroup owns one group. The struct takes
// 225 KB with four groups. A full barrier is completed by the producer's loads, and the consumers wait for it. At an
// empty barrier the consumer warps arrive, and the producer waits for it.
template <int groups> struct AttentionForwardSMem {
    floatX q[2][groups * ATTENTION_FORWARD_BOX];                   // queries of this tile and the next
    floatX kv[ATTENTION_FORWARD_STAGES][2][ATTENTION_FORWARD_BOX]; // per stage: keys, then values
    floatX out[groups * ATTENTION_FORWARD_BOX];                    // 16 rows per warp: staging area of its output
    AttentionForwardTile tiles[2];
    uint64_t q_full[2], q_empty[2], full[ATTENTION_FORWARD_STAGES], empty[ATTENTION_FORWARD_STAGES];
};

// Initialises the barriers. Called by the whole block.
template <int groups> __device__ inline void attention_forward_sm90_init(AttentionForwardSMem<groups>& smem) {
    constexpr int CONSUMER_WARPS = 4 * groups;
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.q_empty[j], CONSUMER_WARPS);
        }
        for (unsigned j = 0; j < ATTENTION_FORWARD_STAGES; j++) {
            mbarrier_init(&smem.full[j], 1);
            mbarrier_init(&smem.empty[j], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

// wgmma descriptors of the keys (values) of step i; kv is the descriptor of stage 0.
__device__ inline uint64_t attention_forward_sm90_key_descriptor(uint64_t kv, unsigned i) {
    return kv + i % ATTENTION_FORWARD_STAGES * (2 * ATTENTION_FORWARD_BOX * sizeof(floatX) / 16);
}
__device__ inline uint64_t attention_forward_sm90_value_descriptor(uint64_t kv, unsigned i) {
    return attention_forward_sm90_key_descriptor(kv, i) + ATTENTION_FORWARD_BOX * sizeof(floatX) / 16;
}

// The producer thread. Producer and consumers keep the same two counters: n counts tiles, i counts steps of 64 keys
// over all tiles.
template <int groups> __device__ inline void attention_forward_sm90_producer(AttentionForwardSMem<groups>& smem,
                                                                             const CUtensorMap& qkv_map, int T, int NH,
                                                                             AttentionForwardList list) {
    unsigned i = 0, n = 0;
#pragma unroll 1
    for (; attention_forward_next_tile(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int first_group = ceil_div(T, 64) - groups * (list.num_tiles - list.tile);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        smem.tiles[n % 2] = {b, h, first_group};
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            tma_load_4d(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, (first_group + j) * 64, b,
                        &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int block = first_group + groups - 1; block >= 0; block--, i++) {
            unsigned stage = i % ATTENTION_FORWARD_STAGES;
            mbarrier_wait(&smem.empty[stage], (i / ATTENTION_FORWARD_STAGES + 1) % 2);
            mbarrier_arrive_expect(&smem.full[stage], sizeof(smem.kv[0]));
            tma_load_4d(smem.kv[stage][0], &qkv_map, 0, NH + h, block * 64, b, &smem.full[stage]);
            tma_load_4d(smem.kv[stage][1], &qkv_map, 0, 2 * NH + h, block * 64, b, &smem.full[stage]);
        }
    }
    mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
    smem.tiles[n % 2] = {-1, 0, 0}; // announces that there are no more tiles
    mbarrier_arrive(&smem.q_full[n % 2]);
}

// A consumer warpgroup's 64 queries of a tile.
struct AttentionForwardQueries {
    int b, h, group; // group: index of the 64 queries in the sequence; negative for padding, which is not stored
    int num_steps;   // number of blocks of 64 keys that they see
    uint64_t q;      // wgmma descriptor of the queries
};

// Waits for tile n, and skips the steps of the ring whose keys only other warpgroups see. Returns false if there is no
// tile n.
template <int groups> __device__ inline bool attention_forward_sm90_next_queries(AttentionForwardQueries& queries,
                                                                                 AttentionForwardSMem<groups>& smem,
                                                                                 int warpgroup, unsigned n,
                                                                                 unsigned& i) {
    mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
    AttentionForwardTile tile = smem.tiles[n % 2];
    queries.b = warp_uniform(tile.b), queries.h = warp_uniform(tile.h);
    int first_group = warp_uniform(tile.first_group);
    if (queries.b < 0) { return false; }
    // later queries see more keys, so the order of the warpgroups is reversed from tile to tile
    int place = n % 2 ? groups - 1 - warpgroup : warpgroup;
    queries.group = first_group + place;
    queries.num_steps = max(queries.group + 1, 1); // padding before the start of a sequence costs one step
    queries.q = wgmma_descriptor(smem.q[n % 2] + place * ATTENTION_FORWARD_BOX);
#pragma unroll 1
    for (int skip = first_group + groups - queries.num_steps; skip > 0; skip--, i++) {
        mbarrier_wait(&smem.full[i % ATTENTION_FORWARD_STAGES], i / ATTENTION_FORWARD_STAGES % 2);
        if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[i % ATTENTION_FORWARD_STAGES]); }
    }
    return true;
}

// The first step of a tile, step i of the ring: p = P of the 64 keys on the diagonal. warp: index of the warp in its
// warpgroup, 0 to 3.
template <int groups>
__device__ inline void attention_forward_sm90_first_step(float (&s)[32], uint32_t (&p)[16], AttentionForwardRows& rows,
                                                         AttentionForwardSMem<groups>& smem, uint64_t q, uint64_t kv,
                                                         unsigned i, int warp, float scale_log2) {
    mbarrier_wait(&smem.full[i % ATTENTION_FORWARD_STAGES], i / ATTENTION_FORWARD_STAGES % 2);
    wgmma_fence();
    attention_forward_sm90_scores(s, q, attention_forward_sm90_key_descriptor(kv, i));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(s);
    attention_forward_sm90_diagonal(s, rows, warp, scale_log2);
    attention_forward_sm90_pack(p, s);
    attention_forward_sm90_rounding(rows, p, warp);
}

// Step i: the scores of 64 more keys, then P V of step i - 1, which overlaps with the search for the new row maximum.
// The exponentials take longest. P V is waited for before they begin, so that the compiler can interleave rescaling,
// sums and packing with them.
template <int groups> __device__ inline void attention_forward_sm90_step(float (&s)[32], uint32_t (&p)[16],
                                                                         float (&o)[32], AttentionForwardRows& rows,
                                                                         AttentionForwardSMem<groups>& smem, uint64_t q,
                                                                         uint64_t kv, unsigned i, float scale_log2) {
    mbarrier_wait(&smem.full[i % ATTENTION_FORWARD_STAGES], i / ATTENTION_FORWARD_STAGES % 2);
    wgmma_fence();
    attention_forward_sm90_scores(s, q, attention_forward_sm90_key_descriptor(kv, i));
    wgmma_commit();
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_forward_sm90_value_descriptor(kv, i - 1));
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    bool grew = attention_forward_sm90_max(s, rows, scale_log2);
    wgmma_wait<0>();
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[(i - 1) % ATTENTION_FORWARD_STAGES]); }
    if (grew) { attention_forward_sm90_rescale(o, rows); }
    attention_forward_sm90_exponents(s, rows, scale_log2);
    attention_forward_sm90_pack(p, s);
}

// The end of tile n: P V of its last step, i - 1, and lse. Adds rows.rounding to rows.l, which is then the divisor of
// o. t: the warp's first token. On return the warp's staging area for the output is free.
template <int groups> __device__ inline void
attention_forward_sm90_last_product(float (&o)[32], uint32_t (&p)[16], AttentionForwardRows& rows,
                                    AttentionForwardSMem<groups>& smem, const AttentionForwardQueries& queries,
                                    uint64_t kv, unsigned n, unsigned i, float* lse, int t, int T, int NH) {
    int lane = threadIdx.x % 32;
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_forward_sm90_value_descriptor(kv, i - 1));
    wgmma_commit();
    attention_forward_sm90_row_sums(rows.l);
    attention_forward_sm90_row_sums(rows.rounding);
    attention_forward_sm90_lse(lse ? lse + ((size_t)queries.b * NH + queries.h) * T : nullptr, rows.l, rows.m, t, T);
    rows.l[0] += rows.rounding[0], rows.l[1] += rows.rounding[1];
    if (lane == 0) {
        mbarrier_arrive(&smem.q_empty[n % 2]);
        tma_store_wait<0>(); // TMA has read the previous tile's output from the staging area
    }
    __syncwarp();
    wgmma_wait<0>();
    wgmma_hold(o);
    if (lane == 0) { mbarrier_arrive(&smem.empty[(i - 1) % ATTENTION_FORWARD_STAGES]); }
}

// The number of this warp's consumer warpgroup, computed by warp votes, so that the compiler knows it is warp-uniform
// and keeps what depends on it in uniform registers.
__device__ inline int attention_forward_sm90_warpgroup() {
    return (__any_sync(0xFFFFFFFFu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xFFFFFFFFu, threadIdx.x & 256) ? 2 : 0);
}

// A consumer warp, over all tiles of the block.
template <int groups> __device__ inline void attention_forward_sm90_consumer(AttentionForwardSMem<groups>& smem,
                                                                             const CUtensorMap& out_map, float* lse,
                                                                             int T, int NH, float scale_log2) {
    int warpgroup = attention_forward_sm90_warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    uint64_t kv = wgmma_descriptor(smem.kv[0][0]);
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        AttentionForwardQueries queries;
        if (!attention_forward_sm90_next_queries(queries, smem, warpgroup, n, i)) { break; }
        float s[32], o[32];
        uint32_t p[16];
        AttentionForwardRows rows;
        attention_forward_sm90_first_step(s, p, rows, smem, queries.q, kv, i, warp, scale_log2);
        floatX* out = smem.out + threadIdx.x / 32 * 16 * ATTENTION_FORWARD_ROW; // this warp's staging area
        int t = queries.group * 64 + warp * 16;
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < queries.num_steps; step++, i++) {
            attention_forward_sm90_step(s, p, o, rows, smem, queries.q, kv, i, scale_log2);
        }
        attention_forward_sm90_last_product(o, p, rows, smem, queries, kv, n, i, lse, t, T, NH);
        attention_forward_sm90_store(out_map, out, o, rows.l, t, queries.h, queries.b);
    }
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    attention_forward_sm90_kernel25(float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                    AttentionForwardList list, float scale_log2,
                                    const __grid_constant__ CUtensorMap out_map) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    if (threadIdx.x == 0) { tma_prefetch_map(&qkv_map), tma_prefetch_map(&out_map); }
    auto& smem = shared_aligned_1024<AttentionForwardSMem<groups>>(attention_forward_shared);
    attention_forward_sm90_init(smem);
    grid_launch_dependents(); // programmatic dependent launch: the next kernel's blocks start as blocks of this one end
    grid_wait_dependency();   // wait for the end of the previous kernel, whose results this one reads
    if (threadIdx.x < 128 * groups) {
        // registers per thread, with four groups: 4 consumer warpgroups * 112 + 32 for the producer warpgroup is the
        // 5 * 96 that the launch allocated
        warpgroup_more_registers<groups == 4 ? 112 : 208>();
        attention_forward_sm90_consumer(smem, out_map, lse, T, NH, scale_log2);
    } else {
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 128 * groups) { attention_forward_sm90_producer(smem, qkv_map, T, NH, list); }
    }
}

template <int groups> void attention_forward_sm90_launch(floatX* out, float* lse, const floatX* qkv, int B, int T,
                                                         int NH, cudaStream_t stream) {
    auto kernel = attention_forward_sm90_kernel25<groups>;
    constexpr int SHARED_BYTES = sizeof(AttentionForwardSMem<groups>) + 1024;
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64), out_map = tensor_map_heads(out, B, T, NH, 16);
    int num_tiles = ceil_div(T, 64 * groups), num_blocks = min(B * NH * num_tiles, free_multiprocessors());
    AttentionForwardList list = attention_forward_list(B * NH, num_tiles, num_blocks);
    launch_early(kernel, dim3(num_blocks), dim3(128 * (groups + 1)), SHARED_BYTES, stream, lse, qkv_map, T, NH, list,
                 LOG2E / sqrtf(64.0f), out_map);
}

// Groups of 64 queries per tile: 4, or 2 when there are fewer tiles than SMs, which halves the longest tile.
inline int attention_forward_sm90_groups(int B, int T, int NH) {
    return B * NH * ceil_div(T, 256) < num_multiprocessors() ? 2 : 4;
}

// Requires HS = 64 and sm_90a.
void attention_forward_sm90(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    if (attention_forward_sm90_groups(B, T, NH) == 2) {
        attention_forward_sm90_launch<2>(out, lse, qkv, B, T, NH, stream);
    } else {
        attention_forward_sm90_launch<4>(out, lse, qkv, B, T, NH, stream);
    }
}
#endif

// The number of the kernel that attention_forward() runs; see the table below.
inline int attention_forward_choice(int HS) {
#if !defined(ENABLE_FP32)
    if (HS == 64 && has_sm90a()) { return 25; }
    bool has_tiles = HS == 32 || HS == 64 || HS == 96 || HS == 128;
    if (has_tiles && compiled_arch(attention_forward_kernel15<64, 2, 32, 8, 3>) >= 80) { return 15; }
#endif
    (void)HS;
    return 6;
}

// out (B,T,NH,HS) | lse (B,NH,T) or NULL | qkv (B,T,3,NH,HS). C = NH * HS. All pointers are aligned to 16 bytes.
// The kernel depends on the head size, the precision, and the architecture of the code that the binary has for this
// device:
//
//     HS                        bf16, fp16:  sm_90a (H100)   8.0 and up (A100)   older          fp32
//     64                                     kernel 25       kernel 15           kernel 6       kernel 6
//     32, 96, 128                            kernel 15       kernel 15           kernel 6       kernel 6
//     other multiples of 8, up to 256        kernel 6        kernel 6            kernel 6       kernel 6
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream) {
    double bytes = (4.0 * C * sizeof(floatX) + NH * sizeof(float)) * B * T;
    Op op(stream, bytes, 2.0 * B * T * T * C, "attention_forward");
    require(NH > 0 && C % NH == 0);
    int HS = C / NH;
    require(HS % 8 == 0 && HS <= 256);
    require((size_t)B * NH * ceil_div(T, 16) <= INT_MAX);
    int kernel = attention_forward_choice(HS);
#if !defined(ENABLE_FP32)
    if (kernel == 25) { return attention_forward_sm90(out, lse, qkv, B, T, NH, stream); }
    if (kernel == 15) { return attention_forward_mma(out, lse, qkv, B, T, HS, NH, stream); }
#endif
    require(kernel == 6);
    attention_forward_plain(out, lse, qkv, B, T, HS, NH, stream);
}
// ==== end promoted: attention_forward ====

#if !defined(ENABLE_FP32)
// ---- for ops that include this file: kernel 25 with an object of a class Store as its epilogue ----
// A Store has two functions. prepare(tile, t, h, b) is called after a tile's first step, and its work overlaps with the
// steps that follow. store(tile, o, l, t, h, b) ends a tile: it writes the warp's rows o / l, tokens t..t+15 of head h;
// t < 0 is padding and is not stored. `tile` is the warp's own 2 KB of shared memory.

// As attention_forward_sm90_producer, but with evict-first loads, so that L2 does not keep what they read.
template <int groups> __device__ inline void attention_forward_sm90_producer_once(AttentionForwardSMem<groups>& smem,
                                                                                  const CUtensorMap& qkv_map, int T,
                                                                                  int NH, AttentionForwardList list) {
    unsigned i = 0, n = 0;
#pragma unroll 1
    for (; attention_forward_next_tile(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int first_group = ceil_div(T, 64) - groups * (list.num_tiles - list.tile);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        smem.tiles[n % 2] = {b, h, first_group};
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            tma_load_4d_once(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, (first_group + j) * 64, b,
                             &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int block = first_group + groups - 1; block >= 0; block--, i++) {
            unsigned stage = i % ATTENTION_FORWARD_STAGES;
            mbarrier_wait(&smem.empty[stage], (i / ATTENTION_FORWARD_STAGES + 1) % 2);
            mbarrier_arrive_expect(&smem.full[stage], sizeof(smem.kv[0]));
            tma_load_4d_once(smem.kv[stage][0], &qkv_map, 0, NH + h, block * 64, b, &smem.full[stage]);
            tma_load_4d_once(smem.kv[stage][1], &qkv_map, 0, 2 * NH + h, block * 64, b, &smem.full[stage]);
        }
    }
    mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
    smem.tiles[n % 2] = {-1, 0, 0};
    mbarrier_arrive(&smem.q_full[n % 2]);
}

// As the consumer of kernel 25, with a Store as the epilogue.
template <int groups, class Store>
__device__ inline void attention_forward_sm90_consumer(AttentionForwardSMem<groups>& smem, float* lse, int T, int NH,
                                                       float scale_log2, Store& store) {
    int warpgroup = attention_forward_sm90_warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    uint64_t kv = wgmma_descriptor(smem.kv[0][0]);
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        AttentionForwardQueries queries;
        if (!attention_forward_sm90_next_queries(queries, smem, warpgroup, n, i)) { break; }
        float s[32], o[32];
        uint32_t p[16];
        AttentionForwardRows rows;
        attention_forward_sm90_first_step(s, p, rows, smem, queries.q, kv, i, warp, scale_log2);
        floatX* tile = smem.out + threadIdx.x / 32 * 16 * ATTENTION_FORWARD_ROW;
        int t = queries.group * 64 + warp * 16;
        store.prepare(tile, t, queries.h, queries.b);
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < queries.num_steps; step++, i++) {
            attention_forward_sm90_step(s, p, o, rows, smem, queries.q, kv, i, scale_log2);
        }
        attention_forward_sm90_last_product(o, p, rows, smem, queries, kv, n, i, lse, t, T, NH);
        store.store(tile, o, rows.l, t, queries.h, queries.b);
    }
    if (lane == 0) { tma_store_wait<0>(); }
}

// The body of a kernel that has groups + 1 warpgroups and a Store as its epilogue. If `once`, the loads are
// evict-first.
template <bool once = false, int groups, class Store>
__device__ inline void attention_forward_sm90_block(AttentionForwardSMem<groups>& smem, float* lse,
                                                    const CUtensorMap& qkv_map, int T, int NH,
                                                    const AttentionForwardList& list, float scale_log2, Store store) {
    attention_forward_sm90_init(smem);
    grid_launch_dependents();
    grid_wait_dependency();
    if (threadIdx.x < 128 * groups) {
        warpgroup_more_registers<groups == 4 ? 112 : 208>();
        attention_forward_sm90_consumer(smem, lse, T, NH, scale_log2, store);
    } else {
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 128 * groups) {
            if (once) {
                attention_forward_sm90_producer_once(smem, qkv_map, T, NH, list);
            } else {
                attention_forward_sm90_producer(smem, qkv_map, T, NH, list);
            }
        }
    }
}

// Launches a kernel whose body is attention_forward_sm90_block. SMem: the type of its shared memory; out: its last
// arguments, which only the Store uses.
template <int groups, class SMem, class Kernel, class... Out>
void attention_forward_sm90_launch_kernel(Kernel kernel, float* lse, const floatX* qkv, int B, int T, int NH,
                                          cudaStream_t stream, const Out&... out) {
    constexpr int SHARED_BYTES = sizeof(SMem) + 1024;
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    int num_tiles = ceil_div(T, 64 * groups), num_blocks = min(B * NH * num_tiles, free_multiprocessors());
    AttentionForwardList list = attention_forward_list(B * NH, num_tiles, num_blocks);
    launch_early(kernel, dim3(num_blocks), dim3(128 * (groups + 1)), SHARED_BYTES, stream, lse, qkv_map, T, NH, list,
                 LOG2E / sqrtf(64.0f), out...);
}
#endif

#ifndef PROMOTED_ONLY

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

// The configurations of kernels 6, 15 and 25 for HS = 64; 0 is what attention_forward() takes.
typedef void AttentionForward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream);

template <int rows, int keys>
static void attention_forward6(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_plain_tiles<64, rows, keys>(out, lse, qkv, B, T, 64, NH, stream);
}
struct AttentionForwardForm {
    BenchConfig config;
    AttentionForward* launch; // NULL: the default
};
static const std::vector<AttentionForwardForm> attention_forward_forms6 = {
    {{0, "64 queries x 64 keys"}, NULL},
    {{1, "64 queries x 32 keys"}, attention_forward6<64, 32>},
    {{2, "32 queries x 64 keys"}, attention_forward6<32, 64>},
    {{3, "32 queries x 32 keys"}, attention_forward6<32, 32>}};
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
    float score_error = size == 30.0f ? 4e-3f : size == 4.0f ? 5e-5f : 0; // 4 s ulps of fp32 for s = 10^4 and 100
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
    // the kernel that attention_forward() chooses here is checked and timed through attention_forward()
    int promoted = !b.dry ? attention_forward_choice(HS) : sizeof(floatX) == 2 ? 25 : 6;
    auto kernel = [&](int number, const char* what, std::function<void()> launch, int min_arch,
                      std::vector<AttentionForwardForm> forms = {}) {
        auto either = [=](int config) {
            for (const AttentionForwardForm& form : forms) {
                if (config > 0 && form.config.value == config) { return form.launch(out, lse, qkv, B, T, NH, stream); }
            }
            number == promoted ? attention_forward(out, lse, qkv, B, T, C, NH, stream) : launch();
        };
        b.kernel(number, what, either, {0}, min_arch);
        if (forms.empty() || HS != 64) { return; }
        std::vector<BenchConfig> configs;
        for (const AttentionForwardForm& form : forms) { configs.push_back(form.config); }
        b.config("form", configs);
    };
    auto rung = [&](int number, const char* what, AttentionForward* launch, int min_arch,
                    std::vector<AttentionForwardForm> forms = {}) {
        if (HS == LADDER_HS) {
            kernel(
                number, what, [=] { launch(out, lse, qkv, B, T, NH, stream); }, min_arch, forms);
        }
    };
    rung(4, "keys and values in shared memory", attention_forward4, 0);
    rung(5, "register tiles, 8 queries x 4 keys per thread", attention_forward5, 0);
    kernel(
        6, "128-bit accesses, heads in groups that fit L2; any head size",
        [=] { attention_forward_plain(out, lse, qkv, B, T, HS, NH, stream); }, 0, attention_forward_forms6);
#if !defined(ENABLE_FP32)
    rung(7, "mma.sync, 16 queries per warp, padded shared memory", attention_forward7, 80);
    rung(8, "less arithmetic per score: masks at the diagonal only, one fma per exponent", attention_forward8, 80);
    rung(9, "query fragments loaded once", attention_forward9, 80);
    rung(10, "cp.async, two stages", attention_forward10, 80);
    rung(11, "swizzled instead of padded", attention_forward11, 80);
    rung(12, "output stored 16 bytes at a time, heads in groups that fit L2", attention_forward12, 80);
    rung(13, "32 queries per warp, half the shared memory reads", attention_forward13, 80);
    rung(14, "lazy rescaling, only when P would exceed 2^8", attention_forward14, 80);
    if (HS == 32 || HS == 64 || HS == 96 || HS == 128) {
        kernel(
            15, "steps of 32 keys, 3 blocks per SM (loses to 14 at B = 16, wins at B = 64)",
            [=] { attention_forward_mma(out, lse, qkv, B, T, HS, NH, stream); }, 80, attention_forward_forms15);
    }
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
    rung(25, "four independent consumer warpgroups, steps of 64 keys", attention_forward_sm90, -90,
         attention_forward_forms25);
#endif
    b.promoted(promoted);
}

int main(int argc, char** argv) {
    // the last shape of kind 0 has enough tiles for several rounds of every persistent kernel
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
                       {1, 65, 8, 1},
                       {1, 130, 240, 3},
                       {1, 100, 512, 2},
                       {1, 90, 416, 2},
                       {1, 300, 256, 4},
                       {2, 1024, 192, 3},
                       {1, 1024, 256, 4},
                       {1, 4096, 128, 2},
                       {40, 400, 768, 12},
                       with_kind(1, {1, 1, 64, 1}),
                       with_kind(1, {2, 127, 192, 3}),
                       with_kind(1, {2, 200, 240, 3})});
}
#endif
