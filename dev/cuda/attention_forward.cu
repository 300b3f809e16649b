/* attention_forward: out = softmax(scale * q k^T, causal) v, for each head; scale = 1 / sqrt(HS)

   out (B,T,NH,HS) floatX out | lse (B,NH,T) float out, or NULL: ln(sum over k of exp(scale * q.k))
   qkv (B,T,3,NH,HS) floatX in | C = NH * HS
   Bound: compute, 2*B*NH*T*T*HS FLOPs with the causal half counted once. Constraint: HS % 8 == 0, HS <= 256.
   Error: against the fp64 reference, one ulp of out and one of 1: P is rounded to floatX before it meets V, which costs
   at most half an ulp of sum(p |v|), a sum that is close to 2 in a few rows with few keys. fp32: 32 ulps of both, from
   the sums over HS and the exponent. Scores of size s are off by some 4 s ulps of fp32.
   Source: Dao 2023, FlashAttention-2, arXiv:2307.08691; Milakov and Gimelshein 2018, online softmax, arXiv:1805.02867.

   nvcc -O3 --use_fast_math attention_forward.cu -o attention_forward -lcublas -lcublasLt   (or: make attention_forward)
   ./attention_forward 8      check kernel 8 against the CPU
   ./attention_forward        every kernel, side by side
   Kernels from 9 on need -gencode arch=compute_90a,code=sm_90a and HS = 64.                                        */
#include "bench.h"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/ptx.cuh"
#include <cublas_v2.h>

#ifndef PROMOTED_ONLY // another op that includes this file wants no more of it than its promoted kernels

static cublasHandle_t cublas_handle() {
    static cublasHandle_t handle = NULL;
    if (!handle) { cublasCheck(cublasCreate(&handle)); }
    return handle;
}

// ---- kernel 0: cuBLAS for both products, a kernel for the softmax; the T x T matrix in memory ----
// Heads lie HS apart in the packed layout, which strided batches of one b can follow: no permutes.

// p[row] = softmax of the first row % T + 1 scores, then zeros; one block per row of (B*NH*T)
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
                        int NH, cublasHandle_t handle, cudaStream_t stream, int block_size) {
    const cudaDataType_t type = cublaslt_floatX;
    const float one = 1.0f, zero = 0.0f;
    int HS = C / NH;
    long long matrix = (long long)T * T;
    cublasCheck(cublasSetStream(handle, stream));
    // in cuBLAS's columns: scores^T (T,T) = k q^T of each head, out^T (HS,T) = v^T p^T
    for (int b = 0; b < B; b++) {
        const floatX* q = qkv + (size_t)b * T * 3 * C;
        cublasCheck(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &one, q + C, type, 3 * C, HS,
                                               q, type, 3 * C, HS, &zero, scores + (size_t)b * NH * matrix, CUDA_R_32F,
                                               T, matrix, NH, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
    attention_forward_softmax(p, lse, scores, B, T, NH, 1.0f / sqrtf((float)HS), stream, block_size);
    for (int b = 0; b < B; b++) {
        const floatX* v = qkv + (size_t)b * T * 3 * C + 2 * C;
        cublasCheck(cublasGemmStridedBatchedEx(
            handle, CUBLAS_OP_N, CUBLAS_OP_N, HS, T, T, &one, v, type, 3 * C, HS, p + (size_t)b * NH * matrix, type, T,
            matrix, &zero, out + (size_t)b * T * C, type, C, HS, NH, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
}

// ---- kernel 1: one thread per query, plain loops; scores are computed twice rather than stored ----

__device__ inline float attention_forward_dot(const floatX* a, const floatX* b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) { sum += (float)a[i] * (float)b[i]; }
    return sum;
}

__global__ void attention_forward_kernel1(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH,
                                          float scale) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T) { return; }
    int t = i % T, h = i / T % NH, b = i / T / NH, HS = C / NH;
    const floatX* first = qkv + (size_t)b * T * 3 * C + h * HS; // query 0; keys are C further, values 2 * C
    const floatX* q = first + (size_t)t * 3 * C;
    float m = -INFINITY, l = 0, o[256];
    for (int k = 0; k <= t; k++) { m = fmaxf(m, attention_forward_dot(q, first + C + (size_t)k * 3 * C, HS) * scale); }
    for (int d = 0; d < HS; d++) { o[d] = 0; }
    for (int k = 0; k <= t; k++) {
        float p = expf(attention_forward_dot(q, first + C + (size_t)k * 3 * C, HS) * scale - m);
        const floatX* v = first + 2 * C + (size_t)k * 3 * C;
        for (int d = 0; d < HS; d++) { o[d] += p * (float)v[d]; }
        l += p;
    }
    for (int d = 0; d < HS; d++) { out[((size_t)b * T + t) * C + h * HS + d] = (floatX)(o[d] / l); }
    lse[i] = m + logf(l);
}

void attention_forward1(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream,
                        int block_size) {
    require(C / NH <= 256);
    attention_forward_kernel1<<<ceil_div(B * NH * T, block_size), block_size, 0, stream>>>(
        out, lse, qkv, B, T, C, NH, 1.0f / sqrtf((float)(C / NH)));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: the T x T matrix in memory: a thread per score, a block per row, a thread per output ----

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
#endif

// ==== promoted: attention_forward ====
// softmax(scale * q k^T, causal) v without the T x T matrix: tiles of queries stay, tiles of keys stream past, and what
// has been summed is rescaled when a row's maximum grows. Kernel 16 is for Hopper, kernel 8 for other
// tensor cores, kernel 3 for anything.
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.

struct AttentionForwardWork {
    int head, tile; // of B*NH, and of the queries
};

// Blocks start in the order of their index. Within a group of heads, whose keys and values fit L2 together, the tiles
// with the most keys come first, so that what runs last is short.
__device__ inline AttentionForwardWork attention_forward_work(int num_heads, int num_tiles, int group) {
    int first = blockIdx.x / (group * num_tiles) * group;
    int rest = blockIdx.x % (group * num_tiles);
    int heads = min(group, num_heads - first);
    return {first + rest % heads, num_tiles - 1 - rest / heads};
}

inline int attention_forward_group(int T, int HS, int num_heads) {
    size_t bytes = (size_t)2 * T * HS * sizeof(floatX); // keys and values of a head
    size_t fit = (size_t)device_attribute(cudaDevAttrL2CacheSize) / 4 / bytes;
    return (int)(fit < 1 ? 1 : fit > (size_t)num_heads ? num_heads : fit);
}

// ---- kernel 3: fp32 arithmetic, register tiles, queries and keys in shared memory ----

// + 4: rows that follow each other start 4 banks apart, so that 8 lanes' 16 bytes meet no bank twice
template <int max_HS, int rows, int keys> struct AttentionForwardPlainSMem {
    float q[rows][max_HS + 4];
    float kv[keys][max_HS + 4]; // the keys of a tile, then its values
    float p[rows][keys + 4];
};

// Rows first..first+rows-1 of src, whose rows lie `stride` apart, as floats; zeros past T. Columns past HS stay as they
// are: what they lead to is not stored.
template <int max_HS, int rows> __device__ inline void
attention_forward_plain_load(float (*tile)[max_HS + 4], const floatX* src, int first, int T, int HS, size_t stride) {
    constexpr int vectors = max_HS / x128::size;
#pragma unroll
    for (int i = 0; i < rows * vectors / 128; i++) {
        int row = (i * 128 + threadIdx.x) / vectors, d = (i * 128 + threadIdx.x) % vectors * x128::size;
        if (d >= HS) { continue; }
        x128 x = {};
        if (first + row < T) { x = load128(src + (first + row) * stride + d); }
        for (int j = 0; j < x128::size; j += 4) {
            store128(&tile[row][d + j], f128{(float)x[j], (float)x[j + 1], (float)x[j + 2], (float)x[j + 3]});
        }
    }
}

// A warp owns rows / 4 queries, half a warp every other of them; a thread has keys / 16 columns of the scores and
// max_HS / 16 of the output.
template <int max_HS, int rows, int keys> __global__ void __launch_bounds__(128)
    attention_forward_kernel3(floatX* out, float* lse, const floatX* qkv, int T, int HS, int NH, int num_heads,
                              int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardPlainSMem<max_HS, rows, keys>*>(attention_forward_shared);
    constexpr int R = rows / 8, K = keys / 16, D = max_HS / 64;
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, rows), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * rows;
    size_t C = (size_t)NH * HS, stride = 3 * C;
    const floatX* src = qkv + b * T * stride + (size_t)h * HS;
    int tx = threadIdx.x % 16, row0 = threadIdx.x / 32 * (rows / 4) + threadIdx.x / 16 % 2; // rows row0, row0+2, ...

    float o[R][4 * D] = {}, m[R], l[R] = {}; // m: the maximum, times scale_log2; l: this thread's share of the sum
    for (int i = 0; i < R; i++) { m[i] = -INFINITY; }
    attention_forward_plain_load<max_HS, rows>(smem.q, src, q0, T, HS, stride);
    int num_keys = min(q0 + rows, T);
    for (int k0 = 0; k0 < num_keys; k0 += keys) {
        __syncthreads(); // the last tile's values have been read
        attention_forward_plain_load<max_HS, keys>(smem.kv, src + C, k0, T, HS, stride);
        __syncthreads();
        float s[R][K] = {};
        for (int d = 0; d < HS; d += 4) {
            f128 k[K];
            for (int j = 0; j < K; j++) { k[j] = load128(&smem.kv[tx + 16 * j][d]); }
            for (int i = 0; i < R; i++) {
                f128 q = load128(&smem.q[row0 + 2 * i][d]);
                for (int j = 0; j < K; j++) {
                    for (int e = 0; e < 4; e++) { s[i][j] = fmaf(q[e], k[j][e], s[i][j]); }
                }
            }
        }
        for (int i = 0; i < R; i++) {
            int row = row0 + 2 * i;
            float row_max = -INFINITY;
            for (int j = 0; j < K; j++) {
                if (k0 + tx + 16 * j > q0 + row) { s[i][j] = -INFINITY; }
                row_max = fmaxf(row_max, s[i][j]);
            }
            for (int offset = 8; offset > 0; offset /= 2) {
                row_max = fmaxf(row_max, __shfl_xor_sync(0xFFFFFFFFu, row_max, offset));
            }
            // finite from the first tile on: every row has key 0
            float new_m = fmaxf(m[i], row_max * scale_log2), rescale = exp2_approx(m[i] - new_m);
            m[i] = new_m, l[i] *= rescale;
            for (int j = 0; j < 4 * D; j++) { o[i][j] *= rescale; }
            for (int j = 0; j < K; j++) {
                float p = exp2_approx(fmaf(s[i][j], scale_log2, -new_m));
                l[i] += p;
                smem.p[row][tx + 16 * j] = p;
            }
        }
        __syncthreads(); // the keys have been read
        attention_forward_plain_load<max_HS, keys>(smem.kv, src + 2 * C, k0, T, HS, stride);
        __syncthreads();
        for (int key = 0; key < keys; key += 4) {
            f128 p[R];
            for (int i = 0; i < R; i++) { p[i] = load128(&smem.p[row0 + 2 * i][key]); }
            for (int e = 0; e < 4; e++) {
                for (int j = 0; j < D; j++) {
                    f128 v = load128(&smem.kv[key + e][64 * j + 4 * tx]); // past HS: not stored below
                    for (int i = 0; i < R; i++) {
                        for (int c = 0; c < 4; c++) { o[i][4 * j + c] = fmaf(p[i][e], v[c], o[i][4 * j + c]); }
                    }
                }
            }
        }
    }
    struct alignas(4 * sizeof(floatX)) Vec4 {
        floatX v[4];
    };
    for (int i = 0; i < R; i++) {
        for (int offset = 8; offset > 0; offset /= 2) { l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], offset); }
        int t = q0 + row0 + 2 * i;
        if (t >= T) { continue; }
        float inverse = 1.0f / l[i];
        floatX* dst = out + ((size_t)b * T + t) * C + (size_t)h * HS;
        for (int j = 0; j < D; j++) {
            Vec4 x;
            for (int c = 0; c < 4; c++) { x.v[c] = (floatX)(o[i][4 * j + c] * inverse); }
            if (64 * j + 4 * tx < HS) { *reinterpret_cast<Vec4*>(dst + 64 * j + 4 * tx) = x; }
        }
        if (lse && tx == 0) { lse[(size_t)work.head * T + t] = (m[i] + log2f(l[i])) * 0.69314718f; }
    }
}

template <int max_HS, int rows, int keys> void attention_forward_plain_tiles(floatX* out, float* lse, const floatX* qkv,
                                                                             int B, int T, int HS, int NH,
                                                                             cudaStream_t stream) {
    auto kernel = attention_forward_kernel3<max_HS, rows, keys>;
    constexpr int shared = sizeof(AttentionForwardPlainSMem<max_HS, rows, keys>);
    static_assert(shared <= 64 << 10, "all that compute capability 7.5 has");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    kernel<<<B * NH * ceil_div(T, rows), 128, shared, stream>>>(
        out, lse, qkv, T, HS, NH, B * NH, attention_forward_group(T, HS, B * NH), 1.44269504f / sqrtf((float)HS));
    cudaCheck(cudaGetLastError());
}

void attention_forward_plain(floatX* out, float* lse, const floatX* qkv, int B, int T, int HS, int NH,
                             cudaStream_t stream) {
    if (HS <= 64) {
        attention_forward_plain_tiles<64, 64, 64>(out, lse, qkv, B, T, HS, NH, stream);
    } else if (HS <= 128) {
        attention_forward_plain_tiles<128, 32, 64>(out, lse, qkv, B, T, HS, NH, stream);
    } else {
        attention_forward_plain_tiles<256, 32, 16>(out, lse, qkv, B, T, HS, NH, stream);
    }
}

#if !defined(ENABLE_FP32)
// ---- kernel 8: steps of 32 keys, so that registers suffice for 3 blocks of 4 warps ----
// A warp has 16 * row_tiles queries. A row's sums are rescaled when its maximum has grown by more than 2^slack.

// 64 * row_tiles queries, and two stages of 64 keys: while one is read, the other is filled
template <int HS, int row_tiles> struct AttentionForwardSMem {
    floatX q[64 * row_tiles * HS]; // at the end the output, each warp its own rows
    floatX kv[2][2][64 * HS];      // of each stage the keys, then their values
};

// Where 16-byte chunk `chunk` of row `row` lies in a tile (rows, HS), in elements: chunks are permuted so that the same
// one of 8 rows that follow each other, which ldmatrix reads at once, falls on all 32 banks.
template <int HS> __device__ inline int attention_forward_at(int row, int chunk) {
    int permuted = HS % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return row * HS + permuted * 8;
}

// The shared-memory address 16 * d columns on in the same row, where the chunk was 0 or 1. Needs rows that start at a
// multiple of their swizzled span, which the alignment of 256 bytes gives.
template <int HS> __device__ inline uint32_t attention_forward_column(uint32_t address, int d) {
    return HS % 64 == 0 ? address ^ (d * 32) : (address ^ (d % 2 * 32)) + d / 2 * 64;
}

// Starts the copy of rows first..first+rows-1 of src, which lie 3 * C apart; zeros past T. parts = 2: then also of what
// lies C behind them, to a second tile. Not unrolled: it would keep all the addresses in registers.
template <int HS, int rows, int parts>
__device__ inline void attention_forward_load(floatX* tile, const floatX* src, int first, int T, size_t C) {
    constexpr int chunks = HS / 8;
    static_assert(rows * chunks % 128 == 0, "every thread copies as many");
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * chunks; i += 128) {
        int row = i / chunks, chunk = i % chunks;
        const floatX* from = src + (first + row) * 3 * C + chunk * 8;
#pragma unroll
        for (int part = 0; part < parts; part++) {
            cp_async_16(tile + part * rows * HS + attention_forward_at<HS>(row, chunk), from + part * C,
                        first + row < T);
        }
    }
}

// What a thread keeps of its warp's queries: rows g and g + 8 of each 16, where g = lane / 4.
template <int HS, int row_tiles> struct AttentionForwardState {
    uint32_t q[row_tiles][HS / 16][4];
    float o[row_tiles][HS / 8][4]; // the output, before its division by the sum
    float m[row_tiles][2];         // the maximum that o and l are relative to, times scale_log2
    float l[row_tiles][2];         // this thread's share of the sum of P
};

// One step: keys `key..key+step-1`, counted from the warp's first query where masked; k and v are the shared-memory
// addresses of this lane's rows of the first two of ldmatrix's operands.
template <bool masked, int step, int slack, int HS, int row_tiles> __device__ inline void
attention_forward_step(AttentionForwardState<HS, row_tiles>& x, uint32_t k, uint32_t v, int key, float scale_log2) {
    int lane = threadIdx.x % 32;
    constexpr int row_bytes = HS * sizeof(floatX);
    float s[row_tiles][step / 8][4] = {};
#pragma unroll
    for (int d = 0; d < HS / 16; d++) {
#pragma unroll
        for (int n = 0; n < step / 16; n++) {
            uint32_t b[4]; // keys 0-7 by 16 of HS, then keys 8-15
            ldmatrix_x4(b, attention_forward_column<HS>(k, d) + 16 * n * row_bytes);
#pragma unroll
            for (int i = 0; i < row_tiles; i++) {
                mma_16x8x16(s[i][2 * n], x.q[i][d], b[0], b[1], floatX());
                mma_16x8x16(s[i][2 * n + 1], x.q[i][d], b[2], b[3], floatX());
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
            grew |= new_m[i][half_row] > x.m[i][half_row] + slack;
        }
    }
    // P may exceed 1 by the slack: it is divided by its own sum in the end
    if (__any_sync(0xFFFFFFFFu, grew)) {
#pragma unroll
        for (int i = 0; i < row_tiles; i++) {
#pragma unroll
            for (int half_row = 0; half_row < 2; half_row++) {
                // finite from the first step on: every row has key 0
                float m = fmaxf(x.m[i][half_row], new_m[i][half_row]), rescale = exp2_approx(x.m[i][half_row] - m);
                x.m[i][half_row] = m, x.l[i][half_row] *= rescale;
#pragma unroll
                for (int n = 0; n < HS / 8; n++) {
                    x.o[i][n][2 * half_row] *= rescale, x.o[i][n][2 * half_row + 1] *= rescale;
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < step / 16; n++) {
        uint32_t p[row_tiles][4]; // 16 keys of P: two accumulators side by side are one operand
#pragma unroll
        for (int i = 0; i < row_tiles; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* score = &s[i][2 * n + j / 2][j % 2 * 2];
                float p0 = exp2_approx(fmaf(score[0], scale_log2, -x.m[i][j % 2]));
                float p1 = exp2_approx(fmaf(score[1], scale_log2, -x.m[i][j % 2]));
                x.l[i][j % 2] += p0 + p1;
                p[i][j] = pack_16x2(p0, p1, floatX());
            }
        }
#pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            uint32_t b[4]; // 16 keys by columns 0-7 of 16, then 8-15
            ldmatrix_x4_trans(b, attention_forward_column<HS>(v, d) + 16 * n * row_bytes);
#pragma unroll
            for (int i = 0; i < row_tiles; i++) {
                mma_16x8x16(x.o[i][2 * d], p[i], b[0], b[1], floatX());
                mma_16x8x16(x.o[i][2 * d + 1], p[i], b[2], b[3], floatX());
            }
        }
    }
}

// Divides by the sum and stores a warp's rows by 16 bytes, by way of its part of smem.q.
template <int HS, int row_tiles> __device__ inline void attention_forward_store(floatX* out, float* lse, floatX* tile,
                                                                                AttentionForwardState<HS, row_tiles>& x,
                                                                                int row0, int T, size_t C) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            int row = 16 * i + 8 * half_row + lane / 4;
            float l = x.l[i][half_row];
            l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
            l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
            float inverse = 1.0f / l;
            if (lse && lane % 4 == 0 && row0 + row < T) {
                lse[row0 + row] = (x.m[i][half_row] + log2f(l)) * 0.69314718f;
            }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                uint32_t pair =
                    pack_16x2(x.o[i][n][2 * half_row] * inverse, x.o[i][n][2 * half_row + 1] * inverse, floatX());
                *reinterpret_cast<uint32_t*>(tile + attention_forward_at<HS>(row, n) + lane % 4 * 2) = pair;
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * row_tiles * HS / 8; i += 32) {
        int row = i / (HS / 8), chunk = i % (HS / 8);
        if (row0 + row < T) {
            // not load128 and store128: the compiler makes a copy by 4 bytes of the two
            *reinterpret_cast<int4*>(out + (row0 + row) * C + chunk * 8) =
                *reinterpret_cast<const int4*>(tile + attention_forward_at<HS>(row, chunk));
        }
    }
}

template <int HS, int row_tiles, int step, int slack, int blocks> __global__ void __launch_bounds__(128, blocks)
    attention_forward_kernel8(floatX* out, float* lse, const floatX* qkv, int T, int NH, int num_heads, int group,
                              float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardSMem<HS, row_tiles>*>(attention_forward_shared);
    constexpr int rows = 64 * row_tiles;
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, rows), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * rows;
    int lane = threadIdx.x % 32;
    int warp_row = threadIdx.x / 32 * 16 * row_tiles; // the warp's first query is q0 + warp_row
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    int num_tiles = ceil_div(min(q0 + rows, T), 64), num_unmasked = q0 / 64;

    attention_forward_load<HS, rows, 1>(smem.q, src, q0, T, C);
    attention_forward_load<HS, 64, 2>(smem.kv[0][0], src + C, 0, T, C);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    AttentionForwardState<HS, row_tiles> x;
    floatX* warp_q = smem.q + warp_row * HS;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            ldmatrix_x4(x.q[i][d], warp_q + attention_forward_at<HS>(16 * i + lane % 16, 2 * d + lane / 16));
        }
        for (int n = 0; n < HS / 8; n++) {
            for (int e = 0; e < 4; e++) { x.o[i][n][e] = 0; }
        }
        for (int half_row = 0; half_row < 2; half_row++) { x.m[i][half_row] = -INFINITY, x.l[i][half_row] = 0; }
    }
    // ldmatrix reads keys 0-7 and 8-15, HS 0-7 and 8-15: as (HS, HS, keys) for S = Q K^T, and as (keys, HS) for P V
    constexpr int row_bytes = HS * sizeof(floatX), stage_bytes = sizeof(smem.kv[0]);
    uint32_t k_address =
        shared_address(smem.kv[0][0] + attention_forward_at<HS>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    uint32_t v_address = shared_address(smem.kv[0][1] + attention_forward_at<HS>(lane % 16, lane / 16));
    for (int tile = 0; tile < num_tiles; tile++) {
        if (tile > 0) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has come, and all have read the last one, whose place the next one takes
        }
        if (tile + 1 < num_tiles) {
            attention_forward_load<HS, 64, 2>(smem.kv[(tile + 1) % 2][0], src + C, (tile + 1) * 64, T, C);
            cp_async_commit();
        }
        uint32_t k = k_address + tile % 2 * stage_bytes, v = v_address + tile % 2 * stage_bytes;
        if (tile < num_unmasked) {
#pragma unroll 1
            for (int j = 0; j < 64; j += step) {
                attention_forward_step<false, step, slack>(x, k + j * row_bytes, v + j * row_bytes, 0, scale_log2);
            }
        } else {
            int key = tile * 64 - q0 - warp_row; // of the warp's 16 * row_tiles queries none sees keys past its last
#pragma unroll 1
            for (int j = 0; j < 64 && key + j < 16 * row_tiles; j += step) {
                attention_forward_step<true, step, slack>(x, k + j * row_bytes, v + j * row_bytes, key + j, scale_log2);
            }
        }
    }
    floatX* dst = out + ((size_t)b * T * NH + h) * HS;
    attention_forward_store(dst, lse ? lse + (size_t)work.head * T : nullptr, warp_q, x, q0 + warp_row, T, C);
}

template <int HS, int row_tiles, int step, int slack, int blocks> void
attention_forward_mma_tiles(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_kernel8<HS, row_tiles, step, slack, blocks>;
    constexpr int shared = sizeof(AttentionForwardSMem<HS, row_tiles>);
    static_assert(shared <= 99 << 10, "all that compute capability 8.6 has");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    kernel<<<B * NH * ceil_div(T, 64 * row_tiles), 128, shared, stream>>>(
        out, lse, qkv, T, NH, B * NH, attention_forward_group(T, HS, B * NH), 1.44269504f / sqrtf((float)HS));
    cudaCheck(cudaGetLastError());
}

// HS is 32, 64, 96 or 128
void attention_forward_mma(floatX* out, float* lse, const floatX* qkv, int B, int T, int HS, int NH,
                           cudaStream_t stream) {
    if (HS == 32) {
        attention_forward_mma_tiles<32, 2, 32, 8, 3>(out, lse, qkv, B, T, NH, stream);
    } else if (HS == 64) {
        attention_forward_mma_tiles<64, 2, 32, 8, 3>(out, lse, qkv, B, T, NH, stream);
    } else if (HS == 96) {
        attention_forward_mma_tiles<96, 1, 64, 8, 3>(out, lse, qkv, B, T, NH, stream);
    } else {
        attention_forward_mma_tiles<128, 1, 64, 8, 2>(out, lse, qkv, B, T, NH, stream);
    }
}

// ---- kernel 16: Hopper: wgmma on what TMA brings ----
// For compute capability 9.0 and HS = 64. A persistent block an SM goes over tiles of 256 queries, or of 128 where there
// are few. One thread loads; each of four warpgroups (or two) has 64 queries and goes over their keys by 64, the diagonal
// first, at its own pace: as far as the ring of keys reaches none waits for another, so that the softmax of some is under
// the products of others. Loops over registers are unrolled by name: else arrays with an index would lie in memory.
// Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.

const int ATTENTION_FORWARD_ROW = 64; // elements of a query, key or value: 128 bytes, as wide as TMA's swizzle
const int ATTENTION_FORWARD_BOX = 64 * ATTENTION_FORWARD_ROW; // 64 queries, keys or values
const int ATTENTION_FORWARD_STAGES = 8;                       // of 64 keys and their values, in the ring

// How TMA sees (B,T,num_vectors,64): boxes of box_rows tokens of one vector. T is a dimension of its own, so past a
// sequence's end zeros are read and nothing is written, never the next sequence.
inline CUtensorMap attention_forward_tensor_map(const floatX* tensor, int B, int T, int num_vectors, int box_rows) {
    return tensor_map(tensor, {ATTENTION_FORWARD_ROW, num_vectors, T, B}, {ATTENTION_FORWARD_ROW, 1, box_rows, 1});
}

// Dynamic shared memory is aligned to less than the 1024 bytes that the swizzle counts from: a KB is asked for more.
template <class SMem> __device__ inline SMem& attention_forward_sm90_shared(unsigned char* dynamic_shared) {
    uint32_t address = shared_address(dynamic_shared);
    return *reinterpret_cast<SMem*>(dynamic_shared + (1024 - address % 1024) % 1024);
}

// s = q k^T for a warpgroup's 64 queries and 64 keys, by their wgmma_descriptors. Starts it, waits for nothing. The
// registers of s were free before.
__device__ inline void attention_forward_wgmma_scores(float (&s)[32], uint64_t q, uint64_t k) {
    wgmma_64x64x16_new(s, q, k, floatX());
#pragma unroll
    for (int d = 1; d < 4; d++) { wgmma_64x64x16(s, q + 2 * d, k + 2 * d, 1, floatX()); } // 16 columns are 2 * 16 bytes
}

// o += p v for 4 * n keys. Starts it, waits for nothing.
template <int n>
__device__ inline void attention_forward_wgmma_values(float (&o)[32], const uint32_t (&p)[n], uint64_t v) {
#pragma unroll
    for (int k = 0; k < n / 4; k++) { // 16 rows are 128 * 16 bytes
        wgmma_64x64x16_transposed(o, p + 4 * k, v + 128 * k, 1, floatX());
    }
}

// What a thread knows of its two rows, g = lane / 4 and g + 8 of its warp's 16: elements i of s and o with
// i / 2 % 2 = 0 belong to the first of them.
struct AttentionForwardRows {
    float m[2];       // the maximum that o and l are relative to, times scale_log2
    float l[2];       // this thread's share of the sum of P
    float rescale[2]; // what o must be multiplied by, if the last softmax said so
    // Added to l before o is divided by it: what P gains by being rounded for the product with the values, as far as
    // that is known: at the diagonal, and of a largest P, which is 1 when rounded, but 1 + error in l.
    float rounding[2];
};

// The maximum of x becomes that of s too, the scores of some keys after those of the diagonal. True if o must be
// rescaled.
template <int num_s>
__device__ inline bool attention_forward_wgmma_max(const float (&s)[num_s], AttentionForwardRows& x, float scale_log2) {
    float row_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}; // chains that do not wait for each other
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
        grew |= new_m[half_row] > x.m[half_row];
    }
    grew = __any_sync(0xFFFFFFFFu, grew);
    if (grew) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float m = fmaxf(x.m[half_row], new_m[half_row]);
            x.rescale[half_row] = exp2_approx(x.m[half_row] - m);
            x.l[half_row] *= x.rescale[half_row];
            float error = x.m[half_row] < m ? fmaf(raw_m[half_row], scale_log2, -m) : 0; // of m, an exponent
            x.rounding[half_row] = fmaf(x.rounding[half_row], x.rescale[half_row], error * (-0.69314718f / 4));
            x.m[half_row] = m;
        }
    }
    return grew;
}

// Those scores to P, not packed yet.
template <int num_s>
__device__ inline void attention_forward_wgmma_exponents(float (&s)[num_s], AttentionForwardRows& x, float scale_log2) {
#pragma unroll
    for (int i = 0; i < num_s; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -x.m[i / 2 % 2]));
        x.l[i / 2 % 2] += s[i];
    }
}

// Both for a row's first scores, which x says nothing of yet, at the diagonal. Of each group of 16 keys the warp's
// rows see all before the warp's own group, some of that one, none after it; no group before first_masked / 8 is the
// warp's own. With g = lane / 4 and t = lane % 4, rows g and g + 8 have columns 2t, 2t + 1, 2t + 8 and 2t + 9 of the
// group: the upper row sees neither of the last two, the lower one both of the first, and the others are seen as column
// 2t or 2t + 1 is by row g. Masked by arithmetic: comparisons run at half its rate, and a branch would have the scores
// copied. So a score that is infinite or NaN, in the own group, shows in rows before it too.
template <int first_masked, int num_s> __device__ inline void
attention_forward_wgmma_diagonal(float (&s)[num_s], AttentionForwardRows& x, int group, float scale_log2) {
    const float hidden = -1e38f;
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane), "+r"(group)); // what follows from them is not kept in registers from tile to tile
    float mask[2] = {lane % 4 * 2 <= lane / 4 ? 0 : hidden, lane % 4 * 2 + 1 <= lane / 4 ? 0 : hidden};
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = first_masked; n < num_s; n += 8) {
        float own = n / 8 == group ? 1.0f : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[n + e] = fmaf(own, mask[e], s[n + e]);
            s[n + 4 + e] = fmaf(own, hidden, s[n + 4 + e]);
            s[n + 6 + e] = fmaf(own, mask[e], s[n + 6 + e]);
        }
    }
    wgmma_hold(s); // in place
#pragma unroll
    for (int i = 0; i < num_s; i += i % 8 == 0 ? 2 : 6) { // the first two columns of a row in a group
        float m = fmaxf(fmaxf(s[i], s[i + 1]), fmaxf(s[i + 4], s[i + 5]));
        row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], i < first_masked || i / 8 <= group ? m : -INFINITY);
    }
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float m = row_max[half_row];
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
        x.m[half_row] = m * scale_log2, x.l[half_row] = 0, x.rescale[half_row] = 1;
    }
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        if (n / 8 > group) {
#pragma unroll
            for (int i = n; i < n + 8; i++) { s[i] = 0; }
        } else {
            asm volatile(""); // stays a branch
#pragma unroll
            for (int i = n; i < n + 8; i++) {
                s[i] = exp2_approx(fmaf(s[i], scale_log2, -x.m[i / 2 % 2]));
                x.l[i / 2 % 2] += s[i];
            }
        }
    }
}

// After the diagonal, whose P is s: what l gains by rounding.
template <int num_p> __device__ inline void attention_forward_wgmma_rounding(AttentionForwardRows& x,
                                                                             const uint32_t (&p)[num_p], int group) {
    x.rounding[0] = -x.l[0], x.rounding[1] = -x.l[1];
#pragma unroll
    for (int n = 0; n < num_p; n += 4) { // 16 keys
        if (n / 4 <= group) {
            asm volatile(""); // stays a branch
#pragma unroll
            for (int j = n; j < n + 4; j++) {
                float2 pair = unpack_16x2(p[j], floatX());
                x.rounding[j % 2] += pair.x;
                x.rounding[j % 2] += pair.y;
            }
        }
    }
}

__device__ inline void attention_forward_wgmma_rescale(float (&o)[32], const AttentionForwardRows& x) {
#pragma unroll
    for (int i = 0; i < 32; i++) { o[i] *= x.rescale[i / 2 % 2]; }
}

// The accumulators of 16 keys, two 16x8 tiles, are the four registers of an operand.
template <int num_p, int n>
__device__ inline void attention_forward_wgmma_pack(uint32_t (&p)[num_p], const float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < num_p; i++) { p[i] = 2 * i < n ? pack_16x2(s[2 * i], s[2 * i + 1], floatX()) : 0; }
}

// The log-sum-exp of a thread's two rows to lse, of this sequence and head, or NULL; the warp's first row is token t.
__device__ inline void attention_forward_wgmma_lse(float* lse, const float (&l)[2], const float (&m)[2], int t, int T) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        int row = t + lane / 4 + 8 * half_row;
        if (lse && lane % 4 == 0 && row >= 0 && row < T) {
            lse[row] = (m[half_row] + log2f(l[half_row])) * 0.69314718f;
        }
    }
}
// A thread's share of two sums to those of its rows.
__device__ inline void attention_forward_wgmma_row_sums(float (&l)[2]) {
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        l[half_row] += __shfl_xor_sync(0xFFFFFFFFu, l[half_row], 1);
        l[half_row] += __shfl_xor_sync(0xFFFFFFFFu, l[half_row], 2);
    }
}

// A warp's 16 rows, each times `inverse`, to a tile in shared memory, (16,64) in TMA's swizzle.
__device__ inline void attention_forward_wgmma_to_shared(floatX* tile, const float (&o)[32],
                                                         const float (&inverse)[2]) {
    int lane = threadIdx.x % 32;
    // four matrices of 8 rows and 8 columns: the upper and the lower rows of two chunks
    uint32_t address = shared_address(tile + attention_forward_at<64>(lane % 16, lane / 16));
#pragma unroll
    for (int d = 0; d < 4; d++) { // 16 columns
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            r[e] = pack_16x2(o[8 * d + 2 * e] * inverse[e % 2], o[8 * d + 2 * e + 1] * inverse[e % 2], floatX());
        }
        stmatrix_x4(attention_forward_column<64>(address, d), r);
    }
}

// Divides a warp's 16 rows from token t on by their sums l and gives them to TMA, by way of `tile`, which must be left
// alone until tma_store_wait.
__device__ inline void attention_forward_wgmma_store(const CUtensorMap& out_map, floatX* tile, const float (&o)[32],
                                                     const float (&l)[2], int t, int h, int b) {
    attention_forward_wgmma_to_shared(tile, o, {1.0f / l[0], 1.0f / l[1]});
    tma_store_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && t >= 0) { // a box that lies before the tensor as a whole is an error to TMA
        tma_store_4d(&out_map, tile, 0, h, t, b);
        tma_store_commit();
    }
}

// The tiles of a block, one after the other: pairs of equal work, then single tiles, the longest first and every other
// round backwards. Whole pairs to the end would leave blocks idle: at B = 64, T = 1024 they are 11.6 rounds of 132.
struct AttentionForwardList {
    int num_heads, num_tiles, num_paired; // num_tiles of queries to a head; pairs are of the first num_paired heads
    int place;                            // 2 * the round, + 1 if the second tile of a pair comes next; 0 at first
    int head, tile;
};
__device__ inline bool attention_forward_next(AttentionForwardList& x) {
    x.place++;
    if (x.place % 2 == 0) {
        x.head ^= 1, x.tile = x.num_tiles - 1 - x.tile;
        return true;
    }
    int blocks = gridDim.x, block = blockIdx.x, round = x.place / 2, first = round * blocks;
    int paired = x.num_paired / 2 * x.num_tiles; // a pair is of two heads, for their number of tiles may be odd
    if (first + block < paired) {
        int two_heads = (first + block) / x.num_tiles;
        int pair = (first + block + two_heads) % x.num_tiles; // not the same one of all heads for a block
        x.head = 2 * two_heads + pair % 2, x.tile = x.num_tiles - 1 - pair / 2;
        return true;
    }
    x.place++;
    int whole = ceil_div(paired, blocks); // from this round on all tiles are single ones
    bool backwards = round > whole && (round - whole) % 2 == 1;
    int single = first + (backwards ? blocks - 1 - block : block) - paired, heads = x.num_heads - x.num_paired;
    if (single >= heads * x.num_tiles) { return false; } // nor is there one in later rounds
    x.head = x.num_paired + single % heads, x.tile = x.num_tiles - 1 - single / heads;
    return true;
}

// What the thread that loads says of a tile: sequence (negative: no more tiles), head, and the number of its first 64
// queries. Tiles are counted from a sequence's end, so of one that is not full it may be negative.
struct AttentionForwardTile {
    int b, h, first_group;
};

// groups: of 64 queries, in a tile. 225 KB for four of them.
template <int groups> struct AttentionForwardSM90 {
    floatX q[2][groups * ATTENTION_FORWARD_BOX];                   // of this tile and the next
    floatX kv[ATTENTION_FORWARD_STAGES][2][ATTENTION_FORWARD_BOX]; // keys, then values
    floatX out[groups * ATTENTION_FORWARD_BOX];
    AttentionForwardTile tiles[2];
    uint64_t q_full[2], q_empty[2], full[ATTENTION_FORWARD_STAGES], empty[ATTENTION_FORWARD_STAGES];
};

// By the whole block.
template <int groups> __device__ inline void attention_forward_sm90_init(AttentionForwardSM90<groups>& smem) {
    const int warps = 4 * groups; // that compute
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.q_empty[j], warps);
        }
        for (int j = 0; j < ATTENTION_FORWARD_STAGES; j++) {
            mbarrier_init(&smem.full[j], 1);
            mbarrier_init(&smem.empty[j], warps);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

// The wgmma_descriptors of the keys and values of step i, of that of the ring.
__device__ inline uint64_t attention_forward_sm90_keys(uint64_t kv, unsigned i) {
    return kv + i % ATTENTION_FORWARD_STAGES * (2 * ATTENTION_FORWARD_BOX * sizeof(floatX) / 16);
}
__device__ inline uint64_t attention_forward_sm90_values(uint64_t kv, unsigned i) {
    return attention_forward_sm90_keys(kv, i) + ATTENTION_FORWARD_BOX * sizeof(floatX) / 16;
}

// The part of the one thread that loads. It and those who compute count the same: n tiles, i steps over 64 keys.
// once: L2 need not keep what is loaded.
template <int groups, bool once> __device__ inline void attention_forward_sm90_load(AttentionForwardSM90<groups>& smem,
                                                                                    const CUtensorMap& qkv_map, int T,
                                                                                    int NH, AttentionForwardList list) {
    const unsigned stages = ATTENTION_FORWARD_STAGES;
    auto load = once ? tma_load_4d_once : tma_load_4d;
    unsigned i = 0, n = 0;
#pragma unroll 1
    for (; attention_forward_next(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int first_group = ceil_div(T, 64) - groups * (list.num_tiles - list.tile);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        smem.tiles[n % 2] = {b, h, first_group};
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            load(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, (first_group + j) * 64, b,
                 &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int block = first_group + groups - 1; block >= 0; block--, i++) {
            unsigned stage = i % stages;
            mbarrier_wait(&smem.empty[stage], (i / stages + 1) % 2);
            mbarrier_arrive_expect(&smem.full[stage], sizeof(smem.kv[0]));
            load(smem.kv[stage][0], &qkv_map, 0, NH + h, block * 64, b, &smem.full[stage]);
            load(smem.kv[stage][1], &qkv_map, 0, 2 * NH + h, block * 64, b, &smem.full[stage]);
        }
    }
    mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
    smem.tiles[n % 2].b = -1;
    mbarrier_arrive(&smem.q_full[n % 2]);
}

// The scores of 64 more keys, number i of the ring, and the product with the values before them, which runs while the
// maximum of the new scores is found; then it is waited for, so that nothing stands in the way of what can be done
// between exponents, which take the longest: sums, packing, rescaling.
template <class SMem> __device__ inline void attention_forward_sm90_step(float (&s)[32], uint32_t (&p)[16],
                                                                         float (&o)[32], AttentionForwardRows& x,
                                                                         SMem& smem, uint64_t q, uint64_t kv,
                                                                         unsigned i, float scale_log2) {
    const unsigned stages = ATTENTION_FORWARD_STAGES;
    mbarrier_wait(&smem.full[i % stages], i / stages % 2);
    wgmma_fence();
    attention_forward_wgmma_scores(s, q, attention_forward_sm90_keys(kv, i));
    wgmma_commit();
    wgmma_fence();
    attention_forward_wgmma_values(o, p, attention_forward_sm90_values(kv, i - 1));
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    bool grew = attention_forward_wgmma_max(s, x, scale_log2);
    wgmma_wait<0>();
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[(i - 1) % stages]); }
    if (grew) { attention_forward_wgmma_rescale(o, x); }
    attention_forward_wgmma_exponents(s, x, scale_log2);
    attention_forward_wgmma_pack(p, s);
}

// Where a warp's 16 rows of a head go, from token t on, which is negative if they lie before the first; place: 2 KB of
// the warp's own in shared memory. prepare() is called under a tile's first steps, store() at its end. once: of
// attention_forward_sm90_load.
struct AttentionForwardStore {
    static const bool once = false;
    const CUtensorMap& out_map;
    __device__ void prepare(floatX*, int, int, int) {}
    __device__ void store(floatX* place, const float (&o)[32], const float (&l)[2], int t, int h, int b) {
        attention_forward_wgmma_store(out_map, place, o, l, t, h, b);
    }
};

// The part of the warps that compute.
template <int groups, class Store>
__device__ inline void attention_forward_sm90_compute(AttentionForwardSM90<groups>& smem, float* lse, int T, int NH,
                                                      float scale_log2, Store& store) {
    const unsigned stages = ATTENTION_FORWARD_STAGES;
    // by votes, so that the compiler knows it to be the same for a warp: what it leads to then is in uniform registers
    int warpgroup =
        (__any_sync(0xFFFFFFFFu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xFFFFFFFFu, threadIdx.x & 256) ? 2 : 0);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    uint64_t kv = wgmma_descriptor(smem.kv[0][0]);
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
        AttentionForwardTile tile = smem.tiles[n % 2];
        int b = warp_uniform(tile.b), h = warp_uniform(tile.h), first_group = warp_uniform(tile.first_group);
        if (b < 0) { break; }
        // later queries have more keys: who had them in this tile has earlier ones in the next
        int place = n % 2 ? groups - 1 - warpgroup : warpgroup, group = first_group + place;
        int my_steps = max(group + 1, 1); // queries before the sequence's first cost a step and are not stored
        uint64_t q = wgmma_descriptor(smem.q[n % 2] + place * ATTENTION_FORWARD_BOX);
#pragma unroll 1
        for (int skip = first_group + groups - my_steps; skip > 0; skip--, i++) { // keys that only others see
            mbarrier_wait(&smem.full[i % stages], i / stages % 2);
            if (lane == 0) { mbarrier_arrive(&smem.empty[i % stages]); }
        }
        float s[32], o[32];
        uint32_t p[16];
        AttentionForwardRows x;
        mbarrier_wait(&smem.full[i % stages], i / stages % 2);
        wgmma_fence();
        attention_forward_wgmma_scores(s, q, attention_forward_sm90_keys(kv, i));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        attention_forward_wgmma_diagonal<0>(s, x, warp, scale_log2);
        attention_forward_wgmma_pack(p, s);
        attention_forward_wgmma_rounding(x, p, warp);
        floatX* out = smem.out + threadIdx.x / 32 * 16 * ATTENTION_FORWARD_ROW;
        int t = group * 64 + warp * 16;
        store.prepare(out, t, h, b);
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < my_steps; step++, i++) {
            attention_forward_sm90_step(s, p, o, x, smem, q, kv, i, scale_log2);
        }
        wgmma_hold(o);
        wgmma_hold(p);
        wgmma_fence();
        attention_forward_wgmma_values(o, p, attention_forward_sm90_values(kv, i - 1));
        wgmma_commit();
        attention_forward_wgmma_row_sums(x.l);
        attention_forward_wgmma_row_sums(x.rounding);
        attention_forward_wgmma_lse(lse ? lse + ((size_t)b * NH + h) * T : nullptr, x.l, x.m, t, T);
        x.l[0] += x.rounding[0], x.l[1] += x.rounding[1];
        if (lane == 0) {
            mbarrier_arrive(&smem.q_empty[n % 2]);
            tma_store_wait<0>(); // the tile before has left its place
        }
        __syncwarp();
        wgmma_wait<0>();
        wgmma_hold(o);
        if (lane == 0) { mbarrier_arrive(&smem.empty[(i - 1) % stages]); }
        store.store(out, o, x.l, t, h, b);
    }
    if (lane == 0) { tma_store_wait<0>(); }
}

// All of it, for a kernel of groups + 1 warpgroups.
template <int groups, class Store>
__device__ inline void attention_forward_sm90_block(AttentionForwardSM90<groups>& smem, float* lse,
                                                    const CUtensorMap& qkv_map, int T, int NH,
                                                    const AttentionForwardList& list, float scale_log2, Store store) {
    attention_forward_sm90_init(smem);
    grid_launch_dependents(); // they find room when this grid's blocks end
    grid_wait_dependency();
    if (threadIdx.x < 128 * groups) {
        warpgroup_more_registers<groups == 4 ? 112 : 208>(); // 4 * 112 + 32 of a thread of each are 5 * 96
        attention_forward_sm90_compute(smem, lse, T, NH, scale_log2, store);
    } else {
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 128 * groups) {
            attention_forward_sm90_load<groups, Store::once>(smem, qkv_map, T, NH, list);
        }
    }
}

template <int groups> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    attention_forward_sm90_kernel16(float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                    AttentionForwardList list, float scale_log2,
                                    const __grid_constant__ CUtensorMap out_map) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    if (threadIdx.x == 0) { tma_prefetch_map(&qkv_map), tma_prefetch_map(&out_map); }
    auto& smem = attention_forward_sm90_shared<AttentionForwardSM90<groups>>(attention_forward_shared);
    attention_forward_sm90_block(smem, lse, qkv_map, T, NH, list, scale_log2, AttentionForwardStore{out_map});
}

// Launches kernel 16, or another of attention_forward_sm90_block, with SMem in shared memory, which takes `out` last.
template <int groups, class SMem = AttentionForwardSM90<groups>, class Kernel, class... Out>
void attention_forward_sm90_launch(Kernel kernel, float* lse, const floatX* qkv, int B, int T, int NH,
                                   cudaStream_t stream, const Out&... out) {
    CUtensorMap qkv_map = attention_forward_tensor_map(qkv, B, T, 3 * NH, 64);
    const int bytes = sizeof(SMem) + 1024;
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int num_heads = B * NH, num_tiles = ceil_div(T, 64 * groups);
    int num_blocks = min(num_heads * num_tiles, num_multiprocessors());
    int rounds = max(num_heads * num_tiles / 2 / num_blocks - 2, 0); // of pairs: two or three are left to single tiles
    AttentionForwardList list = {num_heads, num_tiles, rounds * num_blocks / num_tiles * 2, 0, 0, 0};
    launch_early(kernel, dim3(num_blocks), dim3(128 * (groups + 1)), bytes, stream, lse, qkv_map, T, NH, list,
                 1.44269504f / sqrtf(64.0f), out...);
}
// Groups of 64 queries in a tile: two where there are few tiles, which is a shorter way to the longest one's end.
inline int attention_forward_sm90_groups(int B, int T, int NH) {
    return B * NH * ceil_div(T, 256) < num_multiprocessors() ? 2 : 4;
}

void attention_forward_sm90(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    CUtensorMap out_map = attention_forward_tensor_map(out, B, T, NH, 16);
    if (attention_forward_sm90_groups(B, T, NH) == 2) {
        attention_forward_sm90_launch<2>(attention_forward_sm90_kernel16<2>, lse, qkv, B, T, NH, stream, out_map);
    } else {
        attention_forward_sm90_launch<4>(attention_forward_sm90_kernel16<4>, lse, qkv, B, T, NH, stream, out_map);
    }
}

// The number of the kernel for this device, binary and head size.
inline int attention_forward_choice(int HS) {
    if (HS == 64 && has_sm90a()) { return 16; }
    bool has_tiles = HS == 32 || HS == 64 || HS == 96 || HS == 128;
    return has_tiles && compiled_arch(attention_forward_kernel8<64, 2, 32, 8, 3>) >= 80 ? 8 : 3;
}
#endif

// out (B,T,NH,HS), lse (B,NH,T) or NULL, qkv (B,T,3,NH,HS), C = NH * HS. All pointers are aligned to 16 bytes.
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, cudaStream_t stream) {
    double bytes = (4.0 * C * sizeof(floatX) + NH * sizeof(float)) * B * T;
    Op op(stream, bytes, 2.0 * B * T * T * C, "attention_forward");
    require(NH > 0 && C % NH == 0);
    int HS = C / NH;
    require(HS % 8 == 0 && HS <= 256);
    require((size_t)B * NH * ceil_div(T, 16) <= INT_MAX);
#if !defined(ENABLE_FP32)
    switch (attention_forward_choice(HS)) {
    case 8:
        return attention_forward_mma(out, lse, qkv, B, T, HS, NH, stream);
    case 16:
        return attention_forward_sm90(out, lse, qkv, B, T, NH, stream);
    }
#endif
    attention_forward_plain(out, lse, qkv, B, T, HS, NH, stream);
}
// ==== end promoted: attention_forward ====

#if !defined(ENABLE_FP32)
// For kernels 9 to 15, and for ops that include this file: steps of 128 keys.

// As above, by pointers.
__device__ inline void attention_forward_wgmma_scores(float (&s)[32], const floatX* q, const floatX* k) {
    attention_forward_wgmma_scores(s, wgmma_descriptor(q), wgmma_descriptor(k));
}
template <int n>
__device__ inline void attention_forward_wgmma_values(float (&o)[32], const uint32_t (&p)[n], const floatX* v) {
    attention_forward_wgmma_values(o, p, wgmma_descriptor(v));
}

const int ATTENTION_FORWARD_KEYS = 128 * ATTENTION_FORWARD_ROW; // 128 keys, or their values
const int ATTENTION_FORWARD_KEY_BYTES = 16 * 1024;              // what TMA announces for them
static_assert(sizeof(floatX) * ATTENTION_FORWARD_KEYS == ATTENTION_FORWARD_KEY_BYTES, "");

// Brings 128 keys or values, `vector` of the 3 * NH of a token, from token t on.
__device__ inline void attention_forward_tma(floatX* keys, uint64_t* full, const CUtensorMap& qkv_map, int vector,
                                             int t, int b) {
    mbarrier_arrive_expect(full, ATTENTION_FORWARD_KEY_BYTES);
    tma_load_4d(keys, &qkv_map, 0, vector, t, b, full);
    tma_load_4d(keys + ATTENTION_FORWARD_BOX, &qkv_map, 0, vector, t + 64, b, full);
}

// The same for 128 keys, by pointers. held: the registers of s were not free before; where all are taken anyway the
// compiler does better so.
template <bool held = false>
__device__ inline void attention_forward_wgmma_scores(float (&s)[64], const floatX* q, const floatX* k) {
    uint64_t a = wgmma_descriptor(q), b = wgmma_descriptor(k);
    if constexpr (held) {
        wgmma_64x128x16(s, a, b, 0, floatX());
    } else {
        wgmma_64x128x16_new(s, a, b, floatX());
    }
#pragma unroll
    for (int d = 1; d < 4; d++) { wgmma_64x128x16(s, a + 2 * d, b + 2 * d, 1, floatX()); }
}

// Scores of 128 keys to P, not packed yet. masked: of row r of the warp the keys after diagonal + r are in the future;
// skip: where none of the rows sees 16 keys, exponents are not taken. True if the warp's sums are relative to a new
// maximum: if one grew by more than 2^8, as in kernel 7.
template <bool masked, bool skip> __device__ inline bool
attention_forward_wgmma_lazy_softmax(float (&s)[64], AttentionForwardRows& x, int diagonal, float scale_log2) {
    int lane = threadIdx.x % 32, last_key = diagonal + lane / 4 - lane % 4 * 2; // from this thread's first column on
    float row_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}; // chains that do not wait for each other
#pragma unroll
    for (int i = 0; i < 64; i++) {
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
        grew |= new_m[half_row] > x.m[half_row] + 8.0f;
    }
    grew = __any_sync(0xFFFFFFFFu, grew);
    if (grew) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float m = fmaxf(x.m[half_row], new_m[half_row]);
            x.rescale[half_row] = exp2_approx(x.m[half_row] - m);
            x.l[half_row] *= x.rescale[half_row];
            x.m[half_row] = m;
        }
    }
#pragma unroll
    for (int n = 0; n < 64; n += 8) {
        if (skip && 2 * n > diagonal + 15) { // 16 keys that none of the warp's rows sees
#pragma unroll
            for (int i = n; i < n + 8; i++) { s[i] = 0; }
        } else {
            if (skip) { asm volatile(""); } // stays a branch
#pragma unroll
            for (int i = n; i < n + 8; i++) {
                s[i] = exp2_approx(fmaf(s[i], scale_log2, -x.m[i / 2 % 2]));
                x.l[i / 2 % 2] += s[i];
            }
        }
    }
    return grew;
}

// The end of a step over 128 keys, after its exponents: P, when the product with the values before is done. await() waits
// for the next step's keys, if there are `more`, here and where sums are not negative, which they never are: else the
// compiler moves exponents behind wgmma_wait, and they no longer run under the product.
template <class F> __device__ inline void attention_forward_end_step(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                                     const AttentionForwardRows& x, bool grew,
                                                                     bool more, F await, uint64_t* v_empty) {
    if (more && !(x.l[0] + x.l[1] < 0)) { await(); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(v_empty); }
    if (grew) { attention_forward_wgmma_rescale(o, x); }
    attention_forward_wgmma_pack(p, s);
}

// Calls f(head, tile) for every tile of queries of this block. persistent: a block takes two tiles of a head at a time,
// whose numbers of keys together are the same for all such pairs, from the whole grid's list.
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
const int LADDER_HS = 64; // kernels 4 to 7 know this head size alone

// ---- kernel 4: mma.sync, a warp for 16 queries, tiles in padded shared memory ----
// + 8: rows 144 bytes apart, so that the 8 rows that ldmatrix reads meet no bank twice

__global__ void __launch_bounds__(128)
    attention_forward_kernel4(floatX* out, float* lse, const floatX* qkv, int T, int NH, float scale_log2) {
    constexpr int HS = LADDER_HS;
    __shared__ __align__(16) floatX q_tile[64][HS + 8], k_tile[64][HS + 8], v_tile[64][HS + 8];
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, q0 = (gridDim.y - 1 - blockIdx.y) * 64;
    size_t C = (size_t)NH * HS;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * HS;
    auto load = [=](floatX(*tile)[HS + 8], const floatX* from, int first) {
        for (int i = threadIdx.x; i < 64 * HS / 8; i += 128) {
            int row = i / (HS / 8), d = i % (HS / 8) * 8;
            x128 x = {};
            if (first + row < T) { x = load128(from + (first + row) * 3 * C + d); }
            store128(&tile[row][d], x);
        }
    };
    load(q_tile, src, q0);
    float o[HS / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    for (int k0 = 0; k0 < min(q0 + 64, T); k0 += 64) {
        __syncthreads(); // the last tile has been read
        load(k_tile, src + C, k0);
        load(v_tile, src + 2 * C, k0);
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
        for (int r = 0; r < 2; r++) { // rows g and g + 8
            float new_m = m[r];
            for (int n = 0; n < 8; n++) {
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    bool masked = k0 + 8 * n + 2 * t + e % 2 > q0 + warp_row + 8 * r + g;
                    s[n][e] = masked ? -INFINITY : s[n][e] * scale_log2;
                    new_m = fmaxf(new_m, s[n][e]);
                }
            }
            new_m = fmaxf(new_m, __shfl_xor_sync(0xFFFFFFFFu, new_m, 1));
            new_m = fmaxf(new_m, __shfl_xor_sync(0xFFFFFFFFu, new_m, 2));
            float rescale = exp2_approx(m[r] - new_m);
            m[r] = new_m, l[r] *= rescale;
            for (int n = 0; n < HS / 8; n++) { o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale; }
            for (int n = 0; n < 8; n++) {
                for (int e = 2 * r; e < 2 * r + 2; e++) { l[r] += s[n][e] = exp2_approx(s[n][e] - new_m); }
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t p[4] = {pack_16x2(s[n][0], s[n][1], floatX()), pack_16x2(s[n][2], s[n][3], floatX()),
                             pack_16x2(s[n + 1][0], s[n + 1][1], floatX()),
                             pack_16x2(s[n + 1][2], s[n + 1][3], floatX())};
#pragma unroll
            for (int d = 0; d < HS / 8; d += 2) {
                uint32_t v[4];
                ldmatrix_x4_trans(v, &v_tile[8 * n + lane % 16][8 * d + lane / 16 * 8]);
                mma_16x8x16(o[d], p, v[0], v[1], floatX());
                mma_16x8x16(o[d + 1], p, v[2], v[3], floatX());
            }
        }
    }
    for (int r = 0; r < 2; r++) {
        l[r] += __shfl_xor_sync(0xFFFFFFFFu, l[r], 1);
        l[r] += __shfl_xor_sync(0xFFFFFFFFu, l[r], 2);
        int row = q0 + warp_row + 8 * r + g;
        if (row >= T) { continue; }
        for (int n = 0; n < HS / 8; n++) {
            uint32_t pair = pack_16x2(o[n][2 * r] / l[r], o[n][2 * r + 1] / l[r], floatX());
            *reinterpret_cast<uint32_t*>(out + ((size_t)b * T + row) * C + h * HS + 8 * n + 2 * t) = pair;
        }
        if (t == 0) { lse[(size_t)blockIdx.x * T + row] = (m[r] + log2f(l[r])) * (float)M_LN2; }
    }
}

void attention_forward4(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_kernel4<<<dim3(B * NH, ceil_div(T, 64)), 128, 0, stream>>>(
        out, lse, qkv, T, NH, (float)M_LOG2E / sqrtf((float)LADDER_HS));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: cp.async into two stages, swizzled instead of padded, Q in registers, heavy tiles first ----

void attention_forward5(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_mma_tiles<LADDER_HS, 1, 64, 0, 3>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 6: a warp for 32 queries: what ldmatrix brings is used twice, half the reads of shared memory ----

void attention_forward6(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_mma_tiles<LADDER_HS, 2, 64, 0, 2>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 7: rescaled only where a maximum grew by more than 2^8: hardly ever after the first keys ----

void attention_forward7(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward_mma_tiles<LADDER_HS, 2, 64, 8, 2>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 9: wgmma and TMA, two blocks an SM: the tensor cores of one work under the softmax of the other ----
// On the helpers of kernel 16, which stand above; steps go over 128 keys, the diagonal first.

struct AttentionForwardSMem9 {          // 81 KB: two blocks an SM
    floatX q[2][ATTENTION_FORWARD_BOX]; // of both warpgroups; in the end their output
    floatX k[2][ATTENTION_FORWARD_KEYS], v[2][ATTENTION_FORWARD_KEYS];
    uint64_t q_full, k_full[2], v_full[2];
};

__global__ void __launch_bounds__(256, 2)
    attention_forward_sm90_kernel9(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                   const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads, int group,
                                   float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = attention_forward_sm90_shared<AttentionForwardSMem9>(attention_forward_shared);
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
        attention_forward_tma(smem.q[0], &smem.q_full, qkv_map, h, work.tile * 128, b); // 128 queries
        for (int step = 0; step < min(num_steps, 2); step++) { load(step); }
    }
    float s[64], o[32];
    uint32_t p[32];
    AttentionForwardRows x = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
#pragma unroll
    for (int i = 0; i < 32; i++) { o[i] = 0; }
    mbarrier_wait(&smem.q_full, 0);
    for (int step = 0; step < num_steps; step++) {
        int stage = step % 2, parity = step / 2 % 2;
        mbarrier_wait(&smem.k_full[stage], parity);
        wgmma_fence();
        attention_forward_wgmma_scores(s, smem.q[warp / 4], smem.k[stage]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        bool grew = step == 0 ? attention_forward_wgmma_lazy_softmax<true, true>(s, x, warp * 16, scale_log2)
                              : attention_forward_wgmma_lazy_softmax<false, false>(s, x, 0, scale_log2);
        if (grew) { attention_forward_wgmma_rescale(o, x); }
        attention_forward_wgmma_pack(p, s);
        mbarrier_wait(&smem.v_full[stage], parity);
        wgmma_hold(o);
        wgmma_hold(p);
        wgmma_fence();
        attention_forward_wgmma_values(o, p, smem.v[stage]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
        __syncthreads(); // both warpgroups have read the stage
        if (threadIdx.x == 0 && step + 2 < num_steps) { load(step + 2); }
    }
    floatX* tile = smem.q[0] + warp * 16 * ATTENTION_FORWARD_ROW; // all have read their queries
    int row0 = work.tile * 128 + warp * 16;
    attention_forward_wgmma_row_sums(x.l);
    attention_forward_wgmma_lse(lse ? lse + (size_t)work.head * T : nullptr, x.l, x.m, row0, T);
    attention_forward_wgmma_store(out_map, tile, o, x.l, row0, h, b);
    if (lane == 0) { tma_store_wait<0>(); }
}

void attention_forward9(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_sm90_kernel9;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap qkv_map = attention_forward_tensor_map(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = attention_forward_tensor_map(out, B, T, NH, 16);
    const int bytes = sizeof(AttentionForwardSMem9) + 1024;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<B * NH * ceil_div(T, 128), 256, bytes, stream>>>(
        lse, qkv_map, out_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), 1.44269504f / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 10: one warpgroup loads, two compute: the product with these values under the softmax of the next ----

template <int groups> struct AttentionForwardSMem10 { // 112 KB, or 136 with three groups: one block an SM
    floatX q[2][groups * ATTENTION_FORWARD_BOX];      // of this tile and the next
    floatX k[2][ATTENTION_FORWARD_KEYS], v[2][ATTENTION_FORWARD_KEYS];
    floatX out[groups * ATTENTION_FORWARD_BOX];
    uint64_t q_full[2], q_empty[2], k_full[2], k_empty[2], v_full[2], v_empty[2];
};

// As attention_forward_step14, with a ring of two stages.
template <bool masked, bool pingpong, int groups>
__device__ inline void attention_forward_step10(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                AttentionForwardRows& x, AttentionForwardSMem10<groups>& smem,
                                                const floatX* q, int warpgroup, int i, bool more, int diagonal,
                                                float scale_log2) {
    int k = i % 2, v = (i - 1) % 2;
    if (pingpong) { named_barrier_sync(warpgroup, 256); }
    wgmma_fence();
    attention_forward_wgmma_scores(s, q, smem.k[k]);
    wgmma_commit();
    mbarrier_wait(&smem.v_full[v], (i - 1) / 2 % 2);
    wgmma_fence();
    attention_forward_wgmma_values(o, p, smem.v[v]);
    wgmma_commit();
    if (pingpong) { named_barrier_arrive(warpgroup % groups + 1, 256); }
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[k]); }
    bool grew = attention_forward_wgmma_lazy_softmax<masked, false>(s, x, diagonal, scale_log2);
    auto await = [&] { mbarrier_wait(&smem.k_full[(i + 1) % 2], (i + 1) / 2 % 2); };
    attention_forward_end_step(s, p, o, x, grew, more, await, &smem.v_empty[v]);
}

template <int groups> __device__ inline void attention_forward_init10(AttentionForwardSMem10<groups>& smem) {
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.k_full[j], 1);
            mbarrier_init(&smem.v_full[j], 1);
            mbarrier_init(&smem.q_empty[j], 4 * groups); // all warps that compute
            mbarrier_init(&smem.k_empty[j], 4 * groups);
            mbarrier_init(&smem.v_empty[j], 4 * groups);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

template <bool persistent, int groups>
__device__ inline void attention_forward_load10(AttentionForwardSMem10<groups>& smem, const CUtensorMap& qkv_map, int T,
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
        for (int step = 0; step <= num_steps; step++) { // keys of `step`, values of step - 1
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

// pingpong: the warpgroups that compute take turns at the tensor cores, so that they do not all wait for them at once.
template <int groups, bool pingpong, bool persistent> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    attention_forward_sm90_kernel10(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads,
                                    int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = attention_forward_sm90_shared<AttentionForwardSMem10<groups>>(attention_forward_shared);
    attention_forward_init10(smem);
    constexpr int rows = 64 * groups;
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // now the compiler knows it to be the same for a warp
    int warpgroup = warp / 4, lane = threadIdx.x % 32, n = 0, i = 0;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<groups == 2 ? 24 : 32>();
        if (threadIdx.x == 0) { attention_forward_load10<persistent>(smem, qkv_map, T, NH, num_heads, group); }
        return;
    }
    warpgroup_more_registers<groups == 2 ? 240 : 160>();
    int warp_row = (warp - 4) * 16;
    floatX* out_tile = smem.out + warp_row * ATTENTION_FORWARD_ROW;
    if (pingpong && warpgroup == groups) { named_barrier_arrive(1, 256); } // the first may begin
    attention_forward_each_tile<persistent>(num_heads, ceil_div(T, rows), group, [&](int head, int tile) {
        int q0 = tile * rows, num_steps = ceil_div(min(q0 + rows, T), 128), num_unmasked = q0 / 128;
        const floatX* q = smem.q[n % 2] + (warpgroup - 1) * ATTENTION_FORWARD_BOX;
        float s[64], o[32];
        uint32_t p[32];
        AttentionForwardRows x = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        // where a warpgroup sees none of the first 128 keys, P is 0: the maximum is not -INFINITY but a finite one
        int diagonal = q0 + warp_row - (num_steps - 1) * 128;
        mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
        mbarrier_wait(&smem.k_full[i % 2], i / 2 % 2);
        wgmma_fence();
        attention_forward_wgmma_scores(s, q, smem.k[i % 2]);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        if (lane == 0) { mbarrier_arrive(&smem.k_empty[i % 2]); }
        attention_forward_wgmma_lazy_softmax<true, groups == 2>(s, x, diagonal, scale_log2);
        attention_forward_wgmma_pack(p, s);
        i++;
        int key_tile = num_steps - 2;
        if (key_tile >= 0) { mbarrier_wait(&smem.k_full[i % 2], i / 2 % 2); }
        if (groups != 2) { // 192 queries meet the diagonal in more than 128 keys
#pragma unroll 1
            for (; key_tile >= num_unmasked; key_tile--, i++) {
                diagonal += 128;
                attention_forward_step10<true, pingpong>(s, p, o, x, smem, q, warpgroup, i, key_tile > 0, diagonal,
                                                         scale_log2);
            }
        }
#pragma unroll 1
        for (; key_tile >= 0; key_tile--, i++) {
            attention_forward_step10<false, pingpong>(s, p, o, x, smem, q, warpgroup, i, key_tile > 0, 0, scale_log2);
        }
        if (lane == 0) { mbarrier_arrive(&smem.q_empty[n % 2]); }
        int v = (i - 1) % 2;
        mbarrier_wait(&smem.v_full[v], (i - 1) / 2 % 2);
        wgmma_hold(o);
        wgmma_hold(p);
        wgmma_fence();
        attention_forward_wgmma_values(o, p, smem.v[v]);
        wgmma_commit();
        if (lane == 0) { tma_store_wait<0>(); } // the tile before has left out_tile
        __syncwarp();
        wgmma_wait<0>();
        wgmma_hold(o);
        if (lane == 0) { mbarrier_arrive(&smem.v_empty[v]); }
        attention_forward_wgmma_row_sums(x.l);
        attention_forward_wgmma_lse(lse ? lse + (size_t)head * T : nullptr, x.l, x.m, q0 + warp_row, T);
        attention_forward_wgmma_store(out_map, out_tile, o, x.l, q0 + warp_row, head % NH, head / NH);
        n++;
    });
    if (pingpong && warpgroup == 1) { named_barrier_sync(1, 256); } // the last arrival
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups, bool pingpong, bool persistent>
void attention_forward10_groups(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_sm90_kernel10<groups, pingpong, persistent>;
    CUtensorMap qkv_map = attention_forward_tensor_map(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = attention_forward_tensor_map(out, B, T, NH, 16);
    const int bytes = sizeof(AttentionForwardSMem10<groups>) + 1024, num_tiles = ceil_div(T, 64 * groups);
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int num_blocks = persistent ? min(B * NH * ceil_div(num_tiles, 2), num_multiprocessors()) : B * NH * num_tiles;
    kernel<<<num_blocks, 128 * (groups + 1), bytes, stream>>>(
        lse, qkv_map, out_map, T, NH, B * NH, attention_forward_group(T, 64, B * NH), 1.44269504f / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward10(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward10_groups<2, false, false>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 11: the warpgroups take turns: the products of one under the softmax of the other ----

void attention_forward11(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward10_groups<2, true, false>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 12: a persistent block an SM takes pairs of tiles of equal work; the next tile loads under this one ----

void attention_forward12(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward10_groups<2, true, true>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 13: 192 queries, three warpgroups: more to choose from while one waits, keys are read less often ----

void attention_forward13(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward10_groups<3, true, true>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 14: kernel 12 without a pause between tiles, a ring of four stages, no turns, and an even end ----
// A tile's first scores and the last product of the tile before are under way together, where kernel 12 waits for each
// alone. Every row's maximum is its true one: its largest P is 1, which no rounding changes.

template <int groups> struct AttentionForwardSMem14 { // 176 KB, or 200 with three groups
    static const int stages = 4;
    floatX q[2][groups * ATTENTION_FORWARD_BOX]; // of this tile and the next
    floatX k[stages][ATTENTION_FORWARD_KEYS], v[stages][ATTENTION_FORWARD_KEYS];
    floatX out[groups * ATTENTION_FORWARD_BOX];
    uint64_t q_full[2], q_empty[2], k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
};

// A tile's first query, and its steps over 128 keys. Three groups take tiles from the sequence's end, so that it is the
// shortest one that is not full: its first query may be negative.
template <int groups> __host__ __device__ inline int attention_forward_first_query(int T, int tile, int num_tiles) {
    return groups == 2 ? 128 * tile : 64 * (ceil_div(T, 64) - groups * (num_tiles - tile));
}
template <int groups> __host__ __device__ inline int attention_forward_steps(int q0) {
    return ceil_div(q0 + 64 * groups, 128);
}

// The part of the one thread that loads. It and those who compute count the same: n tiles of queries, i steps over 128
// keys. They come as k0 k1 v0 k2 v1 ..., the order in which they are released: what is awaited is never behind in line.
template <int groups> __device__ inline void attention_forward_load14(AttentionForwardSMem14<groups>& smem,
                                                                      const CUtensorMap& qkv_map, int T, int NH,
                                                                      AttentionForwardList list) {
    const unsigned stages = smem.stages;
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0; attention_forward_next(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int q0 = attention_forward_first_query<groups>(T, list.tile, list.num_tiles);
        int num_steps = attention_forward_steps<groups>(q0);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups; j++) {
            tma_load_4d(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h, q0 + 64 * j, b, &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int step = 0; step <= num_steps; step++) { // keys of `step`, values of step - 1
            if (step < num_steps) {
                unsigned k = (i + step) % stages;
                mbarrier_wait(&smem.k_empty[k], ((i + step) / stages + 1) % 2);
                attention_forward_tma(smem.k[k], &smem.k_full[k], qkv_map, NH + h, (num_steps - 1 - step) * 128, b);
            }
            if (step > 0) {
                unsigned v = (i + step - 1) % stages;
                mbarrier_wait(&smem.v_empty[v], ((i + step - 1) / stages + 1) % 2);
                attention_forward_tma(smem.v[v], &smem.v_full[v], qkv_map, 2 * NH + h, (num_steps - step) * 128, b);
            }
        }
        i += num_steps;
    }
}

// The scores of 128 more keys, number i of the ring, and the product with the values before them, which runs under the
// softmax of the new scores. `more`: others follow.
template <int groups>
__device__ inline void attention_forward_step14(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                AttentionForwardRows& x, AttentionForwardSMem14<groups>& smem,
                                                const floatX* q, unsigned i, bool more, float scale_log2) {
    const unsigned stages = smem.stages;
    unsigned k = i % stages, v = (i - 1) % stages;
    wgmma_fence();
    attention_forward_wgmma_scores(s, q, smem.k[k]);
    wgmma_commit();
    mbarrier_wait(&smem.v_full[v], (i - 1) / stages % 2);
    wgmma_fence();
    attention_forward_wgmma_values(o, p, smem.v[v]);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[k]); }
    bool grew = attention_forward_wgmma_max(s, x, scale_log2);
    attention_forward_wgmma_exponents(s, x, scale_log2);
    auto await = [&] { mbarrier_wait(&smem.k_full[(i + 1) % stages], (i + 1) / stages % 2); };
    attention_forward_end_step(s, p, o, x, grew, more, await, &smem.v_empty[v]);
}

// The scores of the first 64 or 128 keys at the diagonal, number i of the ring; under their softmax the last product of
// the tile before, with `values`.
template <int groups, int num_s>
__device__ inline void attention_forward_diagonal14(float (&s)[num_s], uint32_t (&p)[32], float (&o)[32],
                                                    AttentionForwardRows& x, AttentionForwardSMem14<groups>& smem,
                                                    const floatX* q, const floatX* values, unsigned i, bool more,
                                                    int group, float scale_log2) {
    const unsigned stages = smem.stages;
    wgmma_fence();
    attention_forward_wgmma_scores(s, q, smem.k[i % stages]);
    wgmma_commit();
    wgmma_fence();
    attention_forward_wgmma_values(o, p, values);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[i % stages]); }
    attention_forward_wgmma_diagonal<num_s - 32>(s, x, group, scale_log2);
    if (more && !(x.l[0] + x.l[1] < 0)) { mbarrier_wait(&smem.k_full[(i + 1) % stages], (i + 1) / stages % 2); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    attention_forward_wgmma_pack(p, s);
    attention_forward_wgmma_rounding(x, p, group);
}

// A warp's 16 rows of a tile, whose last product is still to be started or to be stored.
struct AttentionForwardPending14 {
    int head, row0; // the warp's first row
    float l[2];     // the sums of the thread's two rows
};

template <int groups> __device__ inline void attention_forward_store14(AttentionForwardSMem14<groups>& smem,
                                                                       const CUtensorMap& out_map, const float (&o)[32],
                                                                       const AttentionForwardPending14& tile, int NH) {
    if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); } // the tile before has left its place
    __syncwarp();
    floatX* place = smem.out + (threadIdx.x / 32 - 4) * 16 * ATTENTION_FORWARD_ROW;
    attention_forward_wgmma_store(out_map, place, o, tile.l, tile.row0, tile.head % NH, tile.head / NH);
}

template <int groups>
__device__ inline void attention_forward_finish14(AttentionForwardSMem14<groups>& smem, const CUtensorMap& out_map,
                                                  float (&o)[32], uint32_t (&p)[32],
                                                  const AttentionForwardPending14& tile, unsigned i, int NH) {
    const unsigned stages = smem.stages, v = i % stages;
    mbarrier_wait(&smem.v_full[v], i / stages % 2);
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_wgmma_values(o, p, smem.v[v]);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(o);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.v_empty[v]); }
    attention_forward_store14(smem, out_map, o, tile, NH);
}

// Passes over step i of the ring, which others take part in.
__device__ inline void attention_forward_pass14(uint64_t* full, uint64_t* empty, unsigned parity) {
    mbarrier_wait(full, parity);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(empty); }
}

template <int groups> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    attention_forward_sm90_kernel14(float* lse, const __grid_constant__ CUtensorMap qkv_map,
                                    const __grid_constant__ CUtensorMap out_map, int T, int NH, int num_heads,
                                    int num_tiles, int num_paired, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    typedef AttentionForwardSMem14<groups> SMem;
    SMem& smem = attention_forward_sm90_shared<SMem>(attention_forward_shared);
    const unsigned stages = SMem::stages;
    if (threadIdx.x == 0) {
        for (unsigned j = 0; j < stages; j++) {
            if (j < 2) {
                mbarrier_init(&smem.q_full[j], 1);
                mbarrier_init(&smem.q_empty[j], 4 * groups); // all warps that compute
            }
            mbarrier_init(&smem.k_full[j], 1);
            mbarrier_init(&smem.v_full[j], 1);
            mbarrier_init(&smem.k_empty[j], 4 * groups);
            mbarrier_init(&smem.v_empty[j], 4 * groups);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    // by votes, so that the compiler knows it to be the same for a warp: what it leads to then is in uniform registers
    int warpgroup =
        (__any_sync(0xFFFFFFFFu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xFFFFFFFFu, threadIdx.x & 256) ? 2 : 0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<groups == 2 ? 40 : 32>();
        if (threadIdx.x == 0) {
            attention_forward_load14(smem, qkv_map, T, NH, {num_heads, num_tiles, num_paired, 0, 0, 0});
        }
        return;
    }
    warpgroup_more_registers<groups == 2 ? 232 : 160>();
    AttentionForwardList list = {num_heads, num_tiles, num_paired, 0, 0, 0};
    AttentionForwardPending14 tile = {0, 0, {1, 1}};
    AttentionForwardRows x = {{0, 0}, {0, 0}, {0, 0}};
    float s[64], o[32];
    uint32_t p[32];
#pragma unroll
    for (int j = 0; j < 32; j++) { o[j] = 0, p[j] = 0; }
    unsigned i = 0; // steps over 128 keys
    unsigned n = 0;
#pragma unroll 1
    for (; attention_forward_next(list); n++) {
        int q0 = attention_forward_first_query<groups>(T, list.tile, list.num_tiles);
        int num_steps = attention_forward_steps<groups>(q0);
        // a warpgroup passes over the tile's last keys if its queries all come before them, which is one step at most;
        // rows before the sequence's first query cost a step and are not stored
        int row0 = q0 + (warpgroup - 1) * 64, my_steps = max(ceil_div(row0 + 64, 128), 1);
        bool passes = groups != 2 && my_steps < num_steps;
        unsigned v = (i - 1) % stages;
        bool v_parity = (i - 1) / stages % 2;
        mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
        if (passes) {
            attention_forward_pass14(&smem.k_full[i % stages], &smem.k_empty[i % stages], i / stages % 2);
            i++;
        }
        // the diagonal, and the tile before's last product under it
        const floatX* q = smem.q[n % 2] + (warpgroup - 1) * ATTENTION_FORWARD_BOX;
        unsigned k = i % stages;
        mbarrier_wait(&smem.k_full[k], i / stages % 2);
        if (n > 0) { mbarrier_wait(&smem.v_full[v], v_parity); }
        x = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
        int group = (row0 - (my_steps - 1) * 128) / 16 + warp % 4; // of 16 keys: the warp's own; negative: none
        // without a branch, which would cost registers: the first tile's product is of what happens to lie there
        const floatX* values = n > 0 ? smem.v[v] : smem.out;
        if (row0 % 128 == 0) {
            attention_forward_diagonal14(reinterpret_cast<float(&)[32]>(s), p, o, x, smem, q, values, i, my_steps > 1,
                                         group, scale_log2);
        } else {
            attention_forward_diagonal14(s, p, o, x, smem, q, values, i, my_steps > 1, group, scale_log2);
        }
        if (n > 0) {
            if (lane == 0) { mbarrier_arrive(&smem.v_empty[v]); }
            attention_forward_store14(smem, out_map, o, tile, NH);
        }
        if (passes) {
            attention_forward_pass14(&smem.v_full[(i - 1) % stages], &smem.v_empty[(i - 1) % stages],
                                     (i - 1) / stages % 2);
        }
#pragma unroll
        for (int j = 0; j < 32; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < my_steps; step++, i++) {
            attention_forward_step14(s, p, o, x, smem, smem.q[n % 2] + (threadIdx.x / 128 - 1) * ATTENTION_FORWARD_BOX,
                                     i, step + 1 < my_steps, scale_log2);
        }
        if (lane == 0) { mbarrier_arrive(&smem.q_empty[n % 2]); }
        q0 = attention_forward_first_query<groups>(T, list.tile, list.num_tiles); // not kept in a register till here
        attention_forward_wgmma_row_sums(x.l);
        attention_forward_wgmma_row_sums(x.rounding);
        tile = {list.head, q0 + (warp - 4) * 16, {x.l[0] + x.rounding[0], x.l[1] + x.rounding[1]}};
        attention_forward_wgmma_lse(lse ? lse + (size_t)list.head * T : nullptr, x.l, x.m, tile.row0, T);
    }
    if (n > 0) { attention_forward_finish14(smem, out_map, o, p, tile, i - 1, NH); }
    if (lane == 0) { tma_store_wait<0>(); }
}

template <int groups>
void attention_forward14_groups(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    auto kernel = attention_forward_sm90_kernel14<groups>;
    CUtensorMap qkv_map = attention_forward_tensor_map(qkv, B, T, 3 * NH, 64);
    CUtensorMap out_map = attention_forward_tensor_map(out, B, T, NH, 16);
    const int bytes = sizeof(AttentionForwardSMem14<groups>) + 1024, num_heads = B * NH;
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int num_tiles = ceil_div(T, 64 * groups), num_blocks = min(num_heads * num_tiles, num_multiprocessors());
    int rounds = max(num_heads * num_tiles / 2 / num_blocks - 2, 0); // of pairs: two or three are left to single tiles
    int num_paired = rounds * num_blocks / num_tiles * 2;
    kernel<<<num_blocks, 128 * (groups + 1), bytes, stream>>>(lse, qkv_map, out_map, T, NH, num_heads, num_tiles,
                                                              num_paired, 1.44269504f / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

void attention_forward14(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward14_groups<2>(out, lse, qkv, B, T, NH, stream);
}

// ---- kernel 15: kernel 14 with three warpgroups, each of which passes over keys that none of its queries sees ----
// At T = 1024 27 steps of three warpgroups a head, where kernel 12 has 36 of two and kernel 13 32 of three.

void attention_forward15(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream) {
    attention_forward14_groups<3>(out, lse, qkv, B, T, NH, stream);
}
#endif

// Queries, keys and values (B,T,NH,HS): normal, queries and keys times `size`. At 4 the scores differ by a few dozen,
// at 30 by 10^4: both lead to a new maximum after the diagonal by more than 2^8. At 30 every other head has rows that
// are all alike, so that the softmax is uniform.
static void fill_qkv(float* qkv, int B, int T, int NH, int HS, float size, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < (size_t)B * T * 3 * NH * HS; i++) {
        size_t h = i / HS % NH, part = i / HS / NH % 3;
        qkv[i] = normal(rng);
        if (part < 2) { qkv[i] = size == 30.0f && h % 2 == 1 ? size : size * qkv[i]; }
    }
}

static void declare(Bench& b) {
    int B = b.B, T = b.T, C = b.C, NH = b.NH, HS = C / NH;
    cudaStream_t stream = b.stream;
    float size = b.V == 1 ? 30.0f : b.V == 2 ? 4.0f : 1.0f; // how the check shapes ask for large scores
    size_t n = (size_t)B * T * C, num_rows = (size_t)B * T * NH;
    Buffer<floatX> qkv =
        b.input_from<floatX>("qkv", 3 * n, [=, &rng = b.rng](float* host) { fill_qkv(host, B, T, NH, HS, size, rng); });
    float score_error = size == 30.0f ? 4e-3f : size == 4.0f ? 5e-5f : 0; // 4 s ulps of fp32 at s = 10^4, at 100
    Tolerance tolerance = ulps<floatX>(sizeof(floatX) == 2 ? 1 : 32, 1.0f);
    Buffer<floatX> out = b.output<floatX>("out", n, {tolerance.atol + score_error, tolerance.rtol});
    Buffer<float> lse = b.output<float>("lse", num_rows, {1e-5f + score_error, 2e-6f});
    b.reference([=] { attention_forward_cpu(out.host, lse.host, qkv.host, B, T, C, NH); });
    b.cost(4.0 * n * sizeof(floatX) + num_rows * sizeof(float), 2.0 * B * NH * T * (double)T * HS);

    if ((double)num_rows * T <= 1 << 30) { // 6 GB of matrices
        Buffer<float> scores = b.scratch<float>("scores", num_rows * T);
        Buffer<floatX> p = b.scratch<floatX>("p", num_rows * T);
        cublasHandle_t handle = b.dry ? NULL : cublas_handle();
        b.kernel(0, "cuBLAS for both products, the matrix in memory",
                 [=](int bs) { attention_forward0(out, lse, scores, p, qkv, B, T, C, NH, handle, stream, bs); }, {256});
        b.kernel(1, "one thread per query", [=](int bs) { attention_forward1(out, lse, qkv, B, T, C, NH, stream, bs); },
                 {64, 128, 256});
        b.kernel(2, "one thread per score, the matrix in memory",
                 [=](int bs) { attention_forward2(out, lse, scores, p, qkv, B, T, C, NH, stream, bs); });
    }
    // the kernel that attention_forward chooses here is checked and timed by way of it
#if defined(ENABLE_FP32)
    int promoted = 3;
#else
    int promoted = b.dry ? 16 : attention_forward_choice(HS);
#endif
    auto kernel = [&](int number, const char* what, std::function<void()> launch, int min_arch) {
        auto either = [=](int) {
            number == promoted ? attention_forward(out, lse, qkv, B, T, C, NH, stream) : launch();
        };
        b.kernel(number, what, either, {0}, min_arch);
    };
    kernel(
        3, "fp32 arithmetic, no matrix: tiles in shared memory and registers",
        [=] { attention_forward_plain(out, lse, qkv, B, T, HS, NH, stream); }, 0);
#if !defined(ENABLE_FP32)
    typedef void Rung(floatX * out, float* lse, const floatX* qkv, int B, int T, int NH, cudaStream_t stream);
    auto rung = [&](int number, const char* what, Rung* launch, int min_arch) {
        if (HS == LADDER_HS) {
            kernel(
                number, what, [=] { launch(out, lse, qkv, B, T, NH, stream); }, min_arch);
        }
    };
    rung(4, "mma.sync, 16 queries a warp, padded shared memory", attention_forward4, 80);
    rung(5, "cp.async, two stages, swizzled, Q in registers", attention_forward5, 80);
    rung(6, "32 queries a warp", attention_forward6, 80);
    rung(7, "rescaled only where a maximum grew by 2^8", attention_forward7, 80);
    if (HS == 32 || HS == 64 || HS == 96 || HS == 128) {
        kernel(
            8, "steps of 32 keys, 3 blocks an SM", [=] { attention_forward_mma(out, lse, qkv, B, T, HS, NH, stream); },
            80);
    }
    rung(9, "wgmma and TMA, two blocks an SM", attention_forward9, -90);
    rung(10, "one warpgroup loads, two overlap products and softmax", attention_forward10, -90);
    rung(11, "the two take turns", attention_forward11, -90);
    rung(12, "persistent, pairs of tiles of equal work", attention_forward12, -90);
    rung(13, "192 queries, three warpgroups", attention_forward13, -90);
    rung(14, "12 without a pause between tiles, the last tiles shared out singly", attention_forward14, -90);
    rung(15, "14 with three warpgroups that pass over what they do not see", attention_forward15, -90);
    rung(16, "four warpgroups, each at its own pace, steps of 64 keys", attention_forward_sm90, -90);
#endif
    b.promoted(promoted);
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "attention_forward", declare, {16, 1024, 768, 12, 50257},
        {{1, 1, 64, 1},     {2, 17, 64, 2},       {1, 64, 192, 3},      {1, 127, 128, 2},     {2, 128, 64, 1},
         {2, 200, 128, 2},  {1, 333, 128, 2},     {1, 129, 64, 1},      {2, 513, 128, 2},     {3, 1000, 768, 12},
         {1, 2100, 64, 1},  {1, 200, 64, 2},      {2, 127, 192, 2},     {1, 200, 256, 2},     {1, 65, 8, 1},
         {1, 130, 240, 3},  {1, 100, 512, 2},     {1, 90, 416, 2},      {1, 300, 256, 4, 1},  {1, 300, 256, 4, 2},
         {2, 1024, 192, 3}, {1, 1024, 256, 4, 1}, {1, 1024, 256, 4, 2}, {1, 4096, 128, 2, 1}, {1, 4096, 128, 2, 2},
         {40, 400, 768, 12}}); // as many tiles as make every kernel go several rounds
}
#endif
