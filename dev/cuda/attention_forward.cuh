/*
attention_forward: out (B,T,NH,HS) = softmax(q k^T / sqrt(HS), causal) v for each head | lse (B,NH,T) float, or NULL: the log of the
sum of the exponentials | qkv (B,T,3,NH,HS)
Constraint: HS % 8 == 0, HS <= 256. attention_forward_choice() says which kernel runs: on Hopper with HS = 64 or 128, 25 or,
for long sequences, 27 (both wgmma, TMA); 15 (mma.sync) on other tensor cores and with other head sizes; otherwise 6 (fp32 arithmetic).
Kernels 6, 15, 25 and 27 of attention_forward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include <limits.h>

// ==== promoted: attention_forward ====
// out = softmax(scale * q k^T, causal) v without the T x T matrix. A tile of queries stays on chip while tiles of keys
// and values stream past. The softmax is online: each row keeps its running maximum m and its sum l of P = exp(score -
// m). When m grows, l and the output accumulator o += P v are rescaled; at the end out = o / l.
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.

// ---- shared by kernels 6 to 27: the arguments of the launchers, and which block computes which tile ----

struct AttentionForwardArgs {
    floatX* out;       // (B,T,NH,HS)
    float* lse;        // (B,NH,T) or NULL
    const floatX* qkv; // (B,T,3,NH,HS)
    int B, T, HS, NH;
    float scale; // of the scores q k^T
};

struct AttentionForwardWork {
    int head; // 0 to B*NH - 1
    int tile; // tile of queries within the head
};

// The work of this block. Blocks start in the order of their index. Heads are processed in groups whose keys and values
// fit in L2 together. Within a group the tiles with the most keys come first, so that the last blocks to start are short.
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

// Launches kernel 6 or 15, with tiles of `rows` queries.
template <class Kernel> void attention_forward_launch(Kernel kernel, int rows, int shared_bytes,
                                                      const AttentionForwardArgs& a, const Execution& exec) {
    int num_heads = a.B * a.NH, group = attention_forward_group(a.T, a.HS, num_heads);
    launch_kernel(kernel, LaunchShape(num_heads * ceil_div(a.T, rows), 128, shared_bytes), exec, a.out, a.lse, a.qkv,
                  a.T, a.HS, a.NH, num_heads, group, LOG2E * a.scale);
}

// ---- kernel 6: fp32 arithmetic in register tiles, 128-bit accesses, heads in groups that fit in L2; any head size ----

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
            // m is finite from the first tile on, because every row sees key 0
            float new_m = fmaxf(m[i], lanes_max<16>(row_max) * scale_log2), rescale = exp2_approx(m[i] - new_m);
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
    for (int i = 0; i < ROWS; i++) {
        l[i] = lanes_sum<16>(l[i]);
        int t = q0 + row0 + 2 * i;
        if (t >= T) { continue; }
        float inverse = 1.0f / l[i];
        floatX* dst = out + ((size_t)b * T + t) * C + (size_t)h * HS;
        for (int j = 0; j < VECTORS; j++) {
            x4 x;
            for (int c = 0; c < 4; c++) { x[c] = (floatX)(o[i][4 * j + c] * inverse); }
            if (64 * j + 4 * tx < HS) { *reinterpret_cast<x4*>(dst + 64 * j + 4 * tx) = x; }
        }
        if (lse && tx == 0) { lse[(size_t)work.head * T + t] = (m[i] + log2f(l[i])) * LN2; }
    }
}

template <int max_HS, int rows, int keys>
void attention_forward_plain_tiles(const AttentionForwardArgs& args, const Execution& exec) {
    constexpr int SHARED_BYTES = sizeof(AttentionForwardPlainSMem<max_HS, rows, keys>);
    static_assert(SHARED_BYTES <= 64 << 10, "the limit of compute capability 7.5");
    attention_forward_launch(attention_forward_kernel6<max_HS, rows, keys>, rows, SHARED_BYTES, args, exec);
}

// HS is a multiple of 8, at most 256.
void attention_forward_plain(const AttentionForwardArgs& args, const Execution& exec) {
    require(args.HS % 8 == 0 && args.HS <= 256);
    auto tiles = args.HS <= 64    ? attention_forward_plain_tiles<64, 64, 64>
                 : args.HS <= 128 ? attention_forward_plain_tiles<128, 32, 64>
                                  : attention_forward_plain_tiles<256, 32, 16>;
    tiles(args, exec);
}

#if !defined(ENABLE_FP32)
// ---- shared by kernels 11 to 16, tiles and products also by attention_backward: swizzled tiles, filled by cp.async; mma.sync ----
// Each warp owns 16 * row_tiles queries and processes `step` keys at a time. Rescaling is lazy: o and l are rescaled
// only when P of some row of the warp would exceed 2^slack.

// A tile has room for HS columns, a multiple of 16, which is the head size or more: columns past the head's are zeros, in the tile
// only. 64 is the head size itself, which costs fewer registers. Rows are this many elements apart, a multiple of 32.
template <int HS> constexpr int ATTENTION_FORWARD_PITCH = (HS + 31) / 32 * 32;
template <int HS> constexpr int ATTENTION_FORWARD_ROW_BYTES = ATTENTION_FORWARD_PITCH<HS> * sizeof(floatX);

// 64 * row_tiles queries, and two stages of `keys` keys and their values: one stage is read while the other is filled.
template <int HS, int row_tiles, int keys = 64> struct AttentionForwardMmaSMem {
    floatX q[64 * row_tiles * ATTENTION_FORWARD_PITCH<HS>]; // at the end each warp stages its output rows here
    floatX kv[2][2][keys * ATTENTION_FORWARD_PITCH<HS>];    // per stage: keys, then values
};

// The swizzle. Returns the element offset of 16-byte chunk `chunk` of row `row` in a tile. The chunks of a row are
// permuted by the row number, so that the same chunk of 8 consecutive rows, which ldmatrix reads at once, covers all 32
// banks. Position p of row r holds chunk p ^ (r % 8), as in TMA's 128-byte swizzle. If the pitch is no multiple of 64,
// it holds chunk p ^ (r / 2 % 4). The chunks at positions 0 to 7:
//
//     HS = 64    row 0    0 1 2 3 4 5 6 7
//                row 1    1 0 3 2 5 4 7 6
//                row 2    2 3 0 1 6 7 4 5
template <int HS> __device__ inline int attention_forward_at(int row, int chunk) {
    constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>;
    int permuted = PITCH % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return row * PITCH + permuted * 8;
}

// Given the shared-memory address of chunk 0 or 1 of a row, returns the address 16 * d columns further in the same row.
// Rows are aligned to the group of 8 or 4 chunks within which they are permuted, so the swizzle is an xor of address bits.
template <int HS> __device__ inline uint32_t attention_forward_column(uint32_t address, int d) {
    constexpr int GROUP = ATTENTION_FORWARD_PITCH<HS> % 64 == 0 ? 4 : 2; // pairs of chunks
    return (address ^ (d % GROUP * 32)) + d / GROUP * GROUP * 32;
}

// Issues cp.async for rows first..first+rows-1 of src, which are `stride` elements apart, into a tile. Rows past T and columns past
// head_size become zeros. Called by whole groups of `threads` threads.
template <int HS, int rows, int threads = 128> __device__ inline void
attention_forward_load(floatX* tile, const floatX* src, int stride, int first, int T, int head_size = HS) {
    constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>;
    constexpr int LANES = PITCH % 64 == 0 ? 8 : 4, ROWS = threads / LANES; // lanes per row, rows per pass
    int row = threadIdx.x % threads / LANES, lane = threadIdx.x % LANES;
    src += (size_t)(first + row) * stride + lane * 8;
#pragma unroll
    for (int i = 0; i < rows; i += ROWS) {
#pragma unroll
        for (int c = 0; c < PITCH / 8; c += LANES) {
            cp_async_16(tile + attention_forward_at<HS>(row + i, c + lane), src + c * 8,
                        first + row + i < T && (c + lane) * 8 < head_size);
        }
        src += ROWS * stride;
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

// sum (16*M, 8*N) += a (16*M, 16) keys (8*N, 16)^T, with columns 16 * k to 16 * k + 15 of the keys, or, if `values`, += a (16*M, 16)
// values (16, 8*N), with values 16 * k to 16 * k + 15. a: operand fragments; address: of the first 16 keys, or values, as above. They
// are `shift` bytes further: with a constant shift, tiles at equal distances share the xors of the swizzle.
template <int HS, bool values, int M, int N> __device__ inline void
attention_forward_multiply(float (&sum)[M][N][4], const uint32_t (&a)[M][4], uint32_t address, int k, int shift = 0) {
    constexpr int ROW_BYTES = ATTENTION_FORWARD_ROW_BYTES<HS>;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t b[4]; // b[0..1]: the operand for columns 0-7 of 16 columns of the sum; b[2..3]: for columns 8-15
        if (values) {
            ldmatrix_x4_trans(b, attention_forward_column<HS>(address, n / 2) + shift + 16 * k * ROW_BYTES);
        } else {
            ldmatrix_x4(b, attention_forward_column<HS>(address, k) + shift + 8 * n * ROW_BYTES);
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_16x8x16(sum[m][n], a[m], b[0], b[1], floatX());
            mma_16x8x16(sum[m][n + 1], a[m], b[2], b[3], floatX());
        }
    }
}

// rows[r] = factor * sum[r] for a warp's rows r < num_valid, 16 bytes at a time. `tile`: a staging area in shared memory, which only
// this warp has read.
template <int HS, int M> __device__ inline void attention_forward_store_rows(floatX* rows, int stride, int num_valid,
                                                                             const float (&sum)[M][HS / 8][4],
                                                                             float factor, floatX* tile,
                                                                             int head_size = HS) {
    __syncwarp();
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                const float* pair = &sum[m][n][2 * half_row];
                floatX* to = tile + attention_forward_at<HS>(16 * m + 8 * half_row + lane / 4, n) + lane % 4 * 2;
                *reinterpret_cast<uint32_t*>(to) = pack_16x2(factor * pair[0], factor * pair[1], floatX());
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * M * HS / 8; i += 32) {
        int row = i / (HS / 8), chunk = i % (HS / 8);
        if (row < num_valid && chunk * 8 < head_size) {
            // int4 instead of load128 and store128, because the compiler splits those into 4-byte copies here
            *reinterpret_cast<int4*>(rows + (size_t)row * stride + chunk * 8) =
                *reinterpret_cast<const int4*>(tile + attention_forward_at<HS>(row, chunk));
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
    uint32_t q[HS / 16][row_tiles][4];  // operand fragments of the queries
    float o[row_tiles][HS / 8][4] = {}; // accumulators of the output, not yet divided by l
    float m[row_tiles][2];              // per row, the maximum that P, o and l are relative to, times scale_log2
    float l[row_tiles][2] = {};         // per row, this lane's partial sum of P
};

// One step of the main loop, over `step` keys. k, v: the shared-memory addresses that this lane passes to ldmatrix for
// the first 16 keys and values. key: index of the first key relative to the warp's first query; only read if masked.
template <bool masked, int step, int slack, int HS, int row_tiles> __device__ inline void
attention_forward_step(AttentionForwardState<HS, row_tiles>& state, uint32_t k, uint32_t v, int key, float scale_log2) {
    int lane = threadIdx.x % 32;
    float s[row_tiles][step / 8][4] = {};
#pragma unroll
    for (int d = 0; d < HS / 16; d++) { attention_forward_multiply<HS, false>(s, state.q[d], k, d); }
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
            new_m[i][half_row] = quad_max(row_max) * scale_log2;
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
        attention_forward_multiply<HS, true>(state.o, p, v, n);
    }
}

// Loads the operand fragments of a warp's queries, whose tile in shared memory is warp_q, and starts m.
template <int HS, int row_tiles>
__device__ inline void attention_forward_start(AttentionForwardState<HS, row_tiles>& state, const floatX* warp_q) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            ldmatrix_x4(state.q[d][i], warp_q + attention_forward_at<HS>(16 * i + lane % 16, 2 * d + lane / 16));
        }
        state.m[i][0] = state.m[i][1] = -INFINITY;
    }
}

// ---- kernel 15: mma.sync, steps of 32 keys, which need few enough registers for 3 blocks of 4 warps per SM up to HS = 64 ----
// `blocks` is the number of blocks per SM, `keys` the number of keys of a tile.

// Epilogue: divides a warp's output rows by l and stores them. `tile` is the warp's own slice of smem.q.
template <int HS, int row_tiles>
__device__ inline void attention_forward_store(floatX* out, float* lse, floatX* tile,
                                               AttentionForwardState<HS, row_tiles>& state, int row0, int T, int C,
                                               int head_size = HS) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            int row = row0 + 16 * i + 8 * half_row + lane / 4;
            float l = quad_sum(state.l[i][half_row]), inverse = 1.0f / l;
            if (lse && lane % 4 == 0 && row < T) { lse[row] = (state.m[i][half_row] + log2f(l)) * LN2; }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                state.o[i][n][2 * half_row] *= inverse, state.o[i][n][2 * half_row + 1] *= inverse;
            }
        }
    }
    attention_forward_store_rows<HS>(out + (size_t)row0 * C, C, T - row0, state.o, 1.0f, tile, head_size);
}

template <int HS, int row_tiles, int step, int slack, int blocks, int keys>
__global__ void __launch_bounds__(128, blocks)
    attention_forward_kernel15(floatX* out, float* lse, const floatX* qkv, int T, int head_size, int NH, int num_heads,
                               int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardMmaSMem<HS, row_tiles, keys>*>(attention_forward_shared);
    constexpr int ROWS = 64 * row_tiles;
    if (HS == 64) { head_size = HS; }
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, ROWS), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * ROWS;
    out += ((size_t)b * T * NH + h) * head_size;
    int warp_row = threadIdx.x / 32 * 16 * row_tiles; // the warp's first query is q0 + warp_row
    int C = NH * head_size;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * head_size;
    int num_tiles = ceil_div(min(q0 + ROWS, T), keys), num_unmasked = q0 / keys;

    auto load = [&](int tile) { // of keys and values
        attention_forward_load<HS, keys>(smem.kv[tile % 2][0], src + C, 3 * C, tile * keys, T, head_size);
        attention_forward_load<HS, keys>(smem.kv[tile % 2][1], src + 2 * C, 3 * C, tile * keys, T, head_size);
        cp_async_commit();
    };
    attention_forward_load<HS, ROWS>(smem.q, src, 3 * C, q0, T, head_size);
    load(0);
    cp_async_wait<0>();
    __syncthreads();

    AttentionForwardState<HS, row_tiles> state;
    constexpr int ROW_BYTES = ATTENTION_FORWARD_ROW_BYTES<HS>, STAGE_BYTES = sizeof(smem.kv[0]);
    floatX* warp_q = smem.q + warp_row * ATTENTION_FORWARD_PITCH<HS>;
    attention_forward_start(state, warp_q);
    uint32_t k_address = attention_forward_k_address<HS>(smem.kv[0][0]);
    uint32_t v_address = attention_forward_v_address<HS>(smem.kv[0][1]);
    for (int tile = 0; tile < num_tiles; tile++) {
        if (tile > 0) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has landed, and all warps have read the stage that the next load overwrites
        }
        if (tile + 1 < num_tiles) { load(tile + 1); }
        uint32_t k = k_address + tile % 2 * STAGE_BYTES, v = v_address + tile % 2 * STAGE_BYTES;
        // the tile's first key, relative to the warp's first query; no query of the warp sees a key whose relative
        // index is 16 * row_tiles or more
        int key = tile * keys - q0 - warp_row;
        auto steps = [&](auto is_diagonal) {
            constexpr bool masked = decltype(is_diagonal)::value;
#pragma unroll 1
            for (int j = 0; j < keys && (!masked || key + j < 16 * row_tiles); j += step) {
                attention_forward_step<masked, step, slack>(state, k + j * ROW_BYTES, v + j * ROW_BYTES, key + j,
                                                            scale_log2);
            }
        };
        tile < num_unmasked ? steps(std::false_type()) : steps(std::true_type());
    }
    attention_forward_store(out, lse ? lse + (size_t)work.head * T : nullptr, warp_q, state, q0 + warp_row, T, C,
                            head_size);
}

// args.HS is HS or, if that is not 64, less.
template <int HS, int row_tiles, int step, int slack, int blocks, int keys = 64>
void attention_forward_mma_tiles(const AttentionForwardArgs& args, const Execution& exec) {
    constexpr int SHARED_BYTES = sizeof(AttentionForwardMmaSMem<HS, row_tiles, keys>);
    static_assert(SHARED_BYTES <= 99 << 10, "the limit of compute capability 8.6");
    attention_forward_launch(attention_forward_kernel15<HS, row_tiles, step, slack, blocks, keys>, 64 * row_tiles,
                             SHARED_BYTES, args, exec);
}

// HS is a multiple of 8, at most 256.
void attention_forward_mma(const AttentionForwardArgs& args, const Execution& exec) {
    int HS = args.HS;
    require(HS % 8 == 0 && HS <= 256);
    auto tiles = HS <= 32    ? attention_forward_mma_tiles<32, 2, 32, 8, 3>
                 : HS <= 48  ? attention_forward_mma_tiles<48, 2, 32, 8, 3>
                 : HS == 64  ? attention_forward_mma_tiles<64, 2, 32, 8, 3>
                 : HS <= 80  ? attention_forward_mma_tiles<80, 2, 32, 8, 2>
                 : HS <= 96  ? attention_forward_mma_tiles<96, 2, 32, 8, 2>
                 : HS <= 128 ? attention_forward_mma_tiles<128, 1, 64, 8, 2>
                             : attention_forward_mma_tiles<256, 1, 32, 8, 1, 32>;
    tiles(args, exec);
}

// ---- sm_90a: shared by kernels 17 to 27: wgmma products, online softmax in registers, output by TMA ----
// HS = 64; kernel 25 also accepts HS = 128. A warpgroup owns 64 queries, 16 per warp. Loops over register arrays are
// unrolled explicitly, because the compiler puts an array with a run-time index into local memory.
// Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.

constexpr int ATTENTION_FORWARD_ROW = 64; // columns of a box: 128 bytes, the width of TMA's swizzle
// elements of a box: 64 columns of 64 queries, keys or values; with HS = 128 two boxes in a row hold all 128 columns
constexpr int ATTENTION_FORWARD_BOX = 64 * ATTENTION_FORWARD_ROW;
constexpr int ATTENTION_FORWARD_BOX_UNITS = ATTENTION_FORWARD_BOX * sizeof(floatX) / 16; // in the unit of descriptors

// Issues s = q k^T for 64 queries and 64 keys, or 128 keys with HS = 64, and does not wait. q, k: wgmma descriptors. With HS = 128, q
// is in boxes of q_rows rows. The previous contents of s are overwritten, and the compiler knows that they are dead.
template <int HS = 64, int q_rows = 64, int num_s>
__device__ inline void attention_forward_sm90_scores(float (&s)[num_s], uint64_t q, uint64_t k) {
    static_assert(num_s == 32 || HS == 64, "");
    if constexpr (num_s == 32) {
        wgmma_64x64x16_new(s, q, k, floatX());
    } else {
        wgmma_64x128x16_new(s, q, k, floatX());
    }
#pragma unroll
    for (int d = 1; d < HS / 16; d++) { // 16 columns are 32 bytes, and the descriptor counts in units of 16 bytes
        uint64_t a = q + d / 4 * (q_rows / 64 * ATTENTION_FORWARD_BOX_UNITS) + d % 4 * 2;
        uint64_t b = k + d / 4 * ATTENTION_FORWARD_BOX_UNITS + d % 4 * 2;
        if constexpr (num_s == 32) {
            wgmma_64x64x16(s, a, b, 1, floatX());
        } else {
            wgmma_64x128x16(s, a, b, 1, floatX());
        }
    }
}

// Issues o += P v for 4 * n keys, and does not wait. p: P as operand fragments in registers; v: wgmma descriptor, with
// HS = 128 of two boxes (wgmma_descriptor_transposed). num_o = HS / 2.
template <int num_o, int n>
__device__ inline void attention_forward_sm90_values(float (&o)[num_o], const uint32_t (&p)[n], uint64_t v) {
#pragma unroll
    for (int k = 0; k < n / 4; k++) { // 16 keys are 2048 bytes: 128 of the descriptor's units
        if constexpr (num_o == 32) {
            wgmma_64x64x16_transposed(o, p + 4 * k, v + 128 * k, 1, floatX());
        } else {
            static_assert(num_o == 64, "HS is 64 or 128");
            wgmma_64x128x16_transposed(o, p + 4 * k, v + 128 * k, 1, floatX());
        }
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
        float m = quad_max(fmaxf(row_max[half_row][0], row_max[half_row][1]));
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

// Turns the scores s[first..end-1] into P = exp2(s * scale_log2 - m) in place, and adds P to l.
template <int num_s>
__device__ inline void attention_forward_sm90_exponents(float (&s)[num_s], AttentionForwardRows& rows, float scale_log2,
                                                        int first = 0, int end = num_s) {
#pragma unroll
    for (int i = first; i < end; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -rows.m[i / 2 % 2]));
        rows.l[i / 2 % 2] += s[i];
    }
}

// Like attention_forward_sm90_exponents, for the diagonal block. group: index of the group of 16 keys that has the same
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
            attention_forward_sm90_exponents(s, rows, scale_log2, n, n + 8);
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
        rows.m[half_row] = quad_max(row_max[half_row]) * scale_log2, rows.l[half_row] = 0, rows.rescale[half_row] = 1;
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
template <int num_o>
__device__ inline void attention_forward_sm90_rescale(float (&o)[num_o], const AttentionForwardRows& rows) {
#pragma unroll
    for (int i = 0; i < num_o; i++) { o[i] *= rows.rescale[i / 2 % 2]; }
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

// Writes operand fragment x, a warp's 16 rows and 16 columns, to columns 16 * d to 16 * d + 15 of a tile (16,64) in shared memory, in
// TMA's 128-byte swizzle. Columns from 64 on are in a second tile, ATTENTION_FORWARD_BOX elements further.
__device__ inline void attention_forward_sm90_write(floatX* tile, int d, const uint32_t* x) {
    int lane = threadIdx.x % 32;
    // stmatrix.x4 stores four 8x8 matrices: rows 0-7 and rows 8-15 of two adjacent 16-byte chunks
    uint32_t address = shared_address(tile + attention_forward_at<64>(lane % 16, lane / 16));
    stmatrix_x4(attention_forward_column<64>(address, d % 4) + d / 4 * ATTENTION_FORWARD_BOX * sizeof(floatX), x);
}

// Writes a warp's 16 rows of o, multiplied by `inverse`, to such a tile, or with HS = 128 to two of them.
template <int num_o> __device__ inline void attention_forward_sm90_to_shared(floatX* tile, const float (&o)[num_o],
                                                                             const float (&inverse)[2]) {
#pragma unroll
    for (int d = 0; d < num_o / 8; d++) { // 16 columns at a time
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            r[e] = pack_16x2(o[8 * d + 2 * e] * inverse[e % 2], o[8 * d + 2 * e + 1] * inverse[e % 2], floatX());
        }
        attention_forward_sm90_write(tile, d, r);
    }
}

// Divides a warp's 16 rows, tokens t..t+15, by their sums l and stores them by TMA. t < 0 is padding and is not stored.
// `tile` is this warp's staging area in shared memory; it must not be written again before tma_store_wait.
template <int num_o> __device__ inline void attention_forward_sm90_store(const CUtensorMap& out_map, floatX* tile,
                                                                         const float (&o)[num_o], const float (&l)[2],
                                                                         int t, int h, int b) {
    attention_forward_sm90_to_shared(tile, o, {1.0f / l[0], 1.0f / l[1]});
    tma_store_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && t >= 0) { // TMA rejects a box that is entirely before the tensor
#pragma unroll
        for (int j = 0; j < num_o / 32; j++) {
            tma_store_4d(&out_map, tile + j * ATTENTION_FORWARD_BOX, 0, num_o / 32 * h + j, t, b);
        }
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

// ---- kernel 25: one producer, four independent consumer warpgroups, steps of 64 keys; 27: three in ping-pong, 128 keys ----
// One persistent block per SM takes tiles of 256 queries, or of 128 if there are few tiles. One producer thread fills a
// ring of keys and values by TMA. Each consumer warpgroup owns 64 queries of the tile and walks over their keys, the
// diagonal first. With HS = 128, o takes twice the registers: three consumer warpgroups take tiles of 192 queries.
// Example: the tile of queries 256..511, in steps of 64 keys (d: diagonal, s: later step, -: skipped):
//
//     key block             7  6  5  4  3  2  1  0
//     queries 448..511      d  s  s  s  s  s  s  s       warpgroup 3, in the next tile warpgroup 0
//     queries 384..447      -  d  s  s  s  s  s  s       warpgroup 2, in the next tile warpgroup 1
//     queries 320..383      -  -  d  s  s  s  s  s       warpgroup 1, in the next tile warpgroup 2
//     queries 256..319      -  -  -  d  s  s  s  s       warpgroup 0, in the next tile warpgroup 3
//
// No barrier couples the consumers of kernel 25. Within the length of the ring each runs at its own pace, so that the softmax of one
// warpgroup is hidden behind the products of the others. Step i of one warpgroup over time:
//
//     tensor cores     S = q k_i^T     o += P v_(i-1)         (free for the other warpgroups)
//     other units      wait            row maximum of S       rescale o, P = exp2(S - m), sum, pack
//
// Kernel 27 is for long sequences with HS = 64. It has three consumer warpgroups, and steps of 128 keys halve the reads of q.
// The warpgroups alternate in issuing products (ping-pong), so that one computes its softmax during the products of the others.

// A tile, as the producer announces it to the consumers. Tiles are aligned to the end of the sequence, so that
// first_group, the tile's first group of 64 queries, is negative if the tile is partial.
struct AttentionForwardTile {
    int b; // sequence; negative: there are no more tiles
    int h, first_group;
};

// `groups` is the number of groups of 64 queries per tile; each consumer warpgroup owns one group. The struct takes
// 225 KB with four groups, and with three groups of HS = 128; 200 KB in kernel 27. A full barrier is completed by the producer's loads, and the
// consumers wait for it. At an empty barrier the consumer warps arrive, and the producer waits for it.
template <int groups, int head_size = 64, int keys = 64, bool in_turn = false> struct AttentionForwardSMem {
    static_assert(head_size == 64 || (head_size == 128 && keys == 64 && !in_turn),
                  "with HS = 128, named barriers 1 to 3 guard q");
    static constexpr int GROUPS = groups, HS = head_size, KEYS = keys; // KEYS: keys per step
    static constexpr bool IN_TURN = in_turn;
    static constexpr int SIZE = HS / 64 * ATTENTION_FORWARD_BOX; // elements of 64 queries, keys or values
    static constexpr unsigned STAGES = 512 / HS * 64 / KEYS;     // of the ring; a stage has KEYS keys and their values
    // With HS = 128 there is no room for `out`: a warp stages its output in q, in place of its own queries.
    static constexpr bool STAGED_IN_Q = HS == 128;
    floatX q[2][groups * SIZE];                  // queries of this tile and the next
    floatX kv[STAGES][2][KEYS / 64 * SIZE];      // per stage: keys, then values
    floatX out[STAGED_IN_Q ? 1 : groups * SIZE]; // 16 rows per warp: staging area of its output
    AttentionForwardTile tiles[2];
    uint64_t q_full[2], q_empty[2], full[STAGES], empty[STAGES];
};

// Initialises the barriers. Called by the whole block.
template <class SMem> __device__ inline void attention_forward_sm90_init(SMem& smem) {
    constexpr int CONSUMER_WARPS = 4 * SMem::GROUPS;
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.q_empty[j], CONSUMER_WARPS);
        }
        for (unsigned j = 0; j < smem.STAGES; j++) {
            mbarrier_init(&smem.full[j], 1);
            mbarrier_init(&smem.empty[j], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

// wgmma descriptors of the keys (values) of step i; kv is the descriptor of stage 0.
template <class SMem> __device__ inline uint64_t attention_forward_sm90_key_descriptor(uint64_t kv, unsigned i) {
    return kv + i % SMem::STAGES * (sizeof(SMem::kv[0]) / 16);
}
template <class SMem> __device__ inline uint64_t attention_forward_sm90_value_descriptor(uint64_t kv, unsigned i) {
    // changes bits 16 to 29 from wgmma_descriptor's 1 to the leading offset of wgmma_descriptor_transposed
    constexpr uint64_t LEADING = SMem::HS == 64 ? 0 : (uint64_t)(ATTENTION_FORWARD_BOX_UNITS - 1) << 16;
    return attention_forward_sm90_key_descriptor<SMem>(kv, i) + (LEADING + sizeof(SMem::kv[0][0]) / 16);
}

// The producer thread. Producer and consumers keep the same two counters: n counts tiles, i counts steps over all tiles.
template <class SMem> __device__ inline void attention_forward_sm90_producer(SMem& smem, const CUtensorMap& qkv_map,
                                                                             int T, int NH, AttentionForwardList list) {
    // BOXES: boxes per 64 queries, keys or values; PARTS: groups of 64 keys in a step
    constexpr int BOXES = SMem::HS / 64, PARTS = SMem::KEYS / 64, groups = SMem::GROUPS;
    unsigned i = 0, n = 0;
#pragma unroll 1
    for (; attention_forward_next_tile(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int first_group = ceil_div(T, 64) - groups * (list.num_tiles - list.tile);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        smem.tiles[n % 2] = {b, h, first_group};
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups * BOXES; j++) {
            tma_load_4d(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h * BOXES + j % BOXES,
                        (first_group + j / BOXES) * 64, b, &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int block = (first_group + groups - 1) / PARTS; block >= 0; block--, i++) {
            unsigned stage = i % smem.STAGES;
            mbarrier_wait(&smem.empty[stage], (i / smem.STAGES + 1) % 2);
            mbarrier_arrive_expect(&smem.full[stage], sizeof(smem.kv[0]));
#pragma unroll
            for (int j = 0; j < 2 * BOXES * PARTS; j++) {
                int box = j / PARTS, group = block * PARTS + j % PARTS;
                tma_load_4d(smem.kv[stage][0] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0,
                            ((box / BOXES + 1) * NH + h) * BOXES + box % BOXES, group * 64, b, &smem.full[stage]);
            }
        }
    }
    mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
    smem.tiles[n % 2] = {-1, 0, 0}; // announces that there are no more tiles
    mbarrier_arrive(&smem.q_full[n % 2]);
}

// A consumer warpgroup's 64 queries of a tile.
struct AttentionForwardQueries {
    int b, h, group; // group: index of the 64 queries in the sequence; negative for padding, which is not stored
    int num_steps;   // number of steps that contain keys they see; 1 for padding
    floatX* tile;    // the queries
    uint64_t q;      // their wgmma descriptor
};

// Begin and end a warpgroup's turn to issue products, if SMem::IN_TURN. A warpgroup takes one turn for each step of the ring,
// also for steps that it skips, so that the barriers stay matched. The last P V of a tile is issued outside of a turn.
template <class SMem> __device__ inline void attention_forward_sm90_turn_begin(int warpgroup) {
    if (SMem::IN_TURN) { named_barrier_sync(1 + warpgroup, 256); }
}
template <class SMem> __device__ inline void attention_forward_sm90_turn_end(int warpgroup) {
    if (SMem::IN_TURN) { named_barrier_arrive(1 + (warpgroup + 1) % SMem::GROUPS, 256); }
}

// Waits for tile n, and skips the steps of the ring whose keys only other warpgroups see. Returns false if there is no
// tile n.
template <class SMem> __device__ inline bool attention_forward_sm90_next_queries(AttentionForwardQueries& queries,
                                                                                 SMem& smem, int warpgroup, unsigned n,
                                                                                 unsigned& i) {
    constexpr int PARTS = SMem::KEYS / 64, groups = SMem::GROUPS;
    mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
    AttentionForwardTile tile = smem.tiles[n % 2];
    queries.b = warp_uniform(tile.b), queries.h = warp_uniform(tile.h);
    int first_group = warp_uniform(tile.first_group);
    if (queries.b < 0) { return false; }
    // later queries see more keys, so the order of the warpgroups is reversed from tile to tile
    int place = n % 2 ? groups - 1 - warpgroup : warpgroup;
    queries.group = first_group + place;
    queries.num_steps = max(queries.group / PARTS + 1, 1); // padding before the start of a sequence costs one step
    queries.tile = smem.q[n % 2] + place * smem.SIZE;
    queries.q = wgmma_descriptor(queries.tile);
#pragma unroll 1
    for (int skip = (first_group + groups - 1) / PARTS + 1 - queries.num_steps; skip > 0; skip--, i++) {
        mbarrier_wait(&smem.full[i % smem.STAGES], i / smem.STAGES % 2);
        if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[i % smem.STAGES]); }
        attention_forward_sm90_turn_begin<SMem>(warpgroup);
        attention_forward_sm90_turn_end<SMem>(warpgroup);
    }
    return true;
}

// The first step of a tile, step i of the ring, which contains the diagonal: computes P of its keys into p.
template <class SMem, int num_s, int num_p>
__device__ inline void attention_forward_sm90_first_step(float (&s)[num_s], uint32_t (&p)[num_p],
                                                         AttentionForwardRows& rows, SMem& smem,
                                                         const AttentionForwardQueries& queries, uint64_t kv,
                                                         unsigned i, int warpgroup, float scale_log2) {
    mbarrier_wait(&smem.full[i % smem.STAGES], i / smem.STAGES % 2);
    attention_forward_sm90_turn_begin<SMem>(warpgroup);
    wgmma_fence();
    attention_forward_sm90_scores<SMem::HS>(s, queries.q, attention_forward_sm90_key_descriptor<SMem>(kv, i));
    wgmma_commit();
    attention_forward_sm90_turn_end<SMem>(warpgroup);
    wgmma_wait<0>();
    wgmma_hold(s);
    // index in the step of the 16 keys at the positions of this warp's queries; & because group is negative for padding
    int own = (queries.group & (SMem::KEYS / 64 - 1)) * 4 + threadIdx.x / 32 % 4;
    attention_forward_sm90_diagonal(s, rows, own, scale_log2);
    attention_forward_sm90_pack(p, s);
    attention_forward_sm90_rounding(rows, p, own);
}

// Step i: the scores of the next keys, and P V of step i - 1, which overlaps with the search for the new row maximum.
// The exponentials take longest. P V is waited for before they begin, so that the compiler can interleave rescaling,
// sums and packing with them.
template <class SMem, int num_s, int num_p, int num_o>
__device__ inline void attention_forward_sm90_step(float (&s)[num_s], uint32_t (&p)[num_p], float (&o)[num_o],
                                                   AttentionForwardRows& rows, SMem& smem, uint64_t q, uint64_t kv,
                                                   unsigned i, int warpgroup, float scale_log2) {
    mbarrier_wait(&smem.full[i % smem.STAGES], i / smem.STAGES % 2);
    attention_forward_sm90_turn_begin<SMem>(warpgroup);
    wgmma_fence();
    attention_forward_sm90_scores<SMem::HS>(s, q, attention_forward_sm90_key_descriptor<SMem>(kv, i));
    wgmma_commit();
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_forward_sm90_value_descriptor<SMem>(kv, i - 1));
    wgmma_commit();
    attention_forward_sm90_turn_end<SMem>(warpgroup);
    wgmma_wait<1>();
    wgmma_hold(s);
    bool grew = attention_forward_sm90_max(s, rows, scale_log2);
    wgmma_wait<0>();
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[(i - 1) % smem.STAGES]); }
    if (grew) { attention_forward_sm90_rescale(o, rows); }
    attention_forward_sm90_exponents(s, rows, scale_log2);
    attention_forward_sm90_pack(p, s);
}

// The end of tile n: P V of its last step, i - 1, and lse. Adds rows.rounding to rows.l, which is then the divisor of
// o. t: the warp's first token. On return the warp's staging area for the output is free, and the queries have been read.
template <class SMem, int num_p, int num_o>
__device__ inline void attention_forward_sm90_last_product(float (&o)[num_o], uint32_t (&p)[num_p],
                                                           AttentionForwardRows& rows, SMem& smem,
                                                           const AttentionForwardQueries& queries, uint64_t kv,
                                                           unsigned n, unsigned i, float* lse, int t, int T, int NH) {
    int lane = threadIdx.x % 32;
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_forward_sm90_value_descriptor<SMem>(kv, i - 1));
    wgmma_commit();
    quad_sums(rows.l);
    quad_sums(rows.rounding);
    attention_forward_sm90_lse(lse ? lse + ((size_t)queries.b * NH + queries.h) * T : nullptr, rows.l, rows.m, t, T);
    rows.l[0] += rows.rounding[0], rows.l[1] += rows.rounding[1];
    if (!smem.STAGED_IN_Q && lane == 0) {
        mbarrier_arrive(&smem.q_empty[n % 2]);
        tma_store_wait<0>(); // TMA has read the previous tile's output from the staging area
    }
    __syncwarp();
    wgmma_wait<0>();
    wgmma_hold(o);
    if (lane == 0) { mbarrier_arrive(&smem.empty[(i - 1) % smem.STAGES]); }
    // PTX does not say which rows each warp reads: none overwrites its queries before all four have finished their products
    if (smem.STAGED_IN_Q) { named_barrier_sync(1 + threadIdx.x / 128, 128); }
}

// The number of this warp's consumer warpgroup, computed by warp votes, so that the compiler knows it is warp-uniform
// and keeps what depends on it in uniform registers.
__device__ inline int attention_forward_sm90_warpgroup() {
    return (__any_sync(0xFFFFFFFFu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xFFFFFFFFu, threadIdx.x & 256) ? 2 : 0);
}

// A consumer warp, over all tiles of the block.
template <class SMem> __device__ inline void
attention_forward_sm90_consumer(SMem& smem, const CUtensorMap& out_map, float* lse, int T, int NH, float scale_log2) {
    int warpgroup = attention_forward_sm90_warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (warpgroup == SMem::GROUPS - 1) {
        attention_forward_sm90_turn_end<SMem>(warpgroup);
    } // gives warpgroup 0 the first turn
    uint64_t kv = wgmma_descriptor(smem.kv[0][0]);
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        AttentionForwardQueries queries;
        if (!attention_forward_sm90_next_queries(queries, smem, warpgroup, n, i)) { break; }
        float s[SMem::KEYS / 2], o[SMem::HS / 2];
        uint32_t p[SMem::KEYS / 4];
        AttentionForwardRows rows;
        attention_forward_sm90_first_step(s, p, rows, smem, queries, kv, i, warpgroup, scale_log2);
        // this warp's staging area
        floatX* out = smem.STAGED_IN_Q ? queries.tile + warp * 16 * ATTENTION_FORWARD_ROW
                                       : smem.out + threadIdx.x / 32 * 16 * ATTENTION_FORWARD_ROW;
        if (smem.STAGED_IN_Q && lane == 0 && n > 0) {
            tma_store_wait<0>(); // TMA has read the previous tile's output from the place of its queries
            mbarrier_arrive(&smem.q_empty[(n - 1) % 2]);
        }
        int t = queries.group * 64 + warp * 16;
#pragma unroll
        for (int j = 0; j < SMem::HS / 2; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < queries.num_steps; step++, i++) {
            attention_forward_sm90_step(s, p, o, rows, smem, queries.q, kv, i, warpgroup, scale_log2);
        }
        attention_forward_sm90_last_product(o, p, rows, smem, queries, kv, n, i, lse, t, T, NH);
        attention_forward_sm90_store(out_map, out, o, rows.l, t, queries.h, queries.b);
    }
    if (warpgroup == 0) {
        attention_forward_sm90_turn_begin<SMem>(warpgroup);
    } // consumes the last arrival at barrier 1
    if (lane == 0) { tma_store_wait<0>(); }
}

template <class SMem> __global__ void __launch_bounds__(128 * (SMem::GROUPS + 1), 1)
    attention_forward_sm90_kernel25(float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                    AttentionForwardList list, float scale_log2,
                                    const __grid_constant__ CUtensorMap out_map) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    if (threadIdx.x == 0) { tma_prefetch_map(&qkv_map), tma_prefetch_map(&out_map); }
    constexpr int groups = SMem::GROUPS;
    auto& smem = shared_aligned_1024<SMem>(attention_forward_shared);
    attention_forward_sm90_init(smem);
    grid_launch_dependents(); // programmatic dependent launch: the next kernel's blocks start as blocks of this one end
    grid_wait_dependency();   // wait for the end of the previous kernel, whose results this one reads
    if (threadIdx.x < 128 * groups) {
        // registers per thread, with four groups: 4 consumer warpgroups * 112 + 32 for the producer warpgroup is the
        // 5 * 96 that the launch allocated; with three: 3 * 160 + 32 is 4 * 128
        warpgroup_more_registers<groups == 4 ? 112 : groups == 3 ? 160 : 208>();
        attention_forward_sm90_consumer(smem, out_map, lse, T, NH, scale_log2);
    } else {
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 128 * groups) { attention_forward_sm90_producer(smem, qkv_map, T, NH, list); }
    }
}

template <int groups, int HS = 64, int keys = 64, bool in_turn = false>
void attention_forward_sm90_launch(const AttentionForwardArgs& a, const Execution& exec) {
    typedef AttentionForwardSMem<groups, HS, keys, in_turn> SMem;
    constexpr int SHARED_BYTES = sizeof(SMem) + 1024;
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    CUtensorMap qkv_map = tensor_map_heads(a.qkv, a.B, a.T, 3 * a.NH * (HS / 64), 64);
    CUtensorMap out_map = tensor_map_heads(a.out, a.B, a.T, a.NH * (HS / 64), 16);
    int num_tiles = ceil_div(a.T, 64 * groups), num_blocks = min(a.B * a.NH * num_tiles, exec.free_sms());
    AttentionForwardList list = attention_forward_list(a.B * a.NH, num_tiles, num_blocks);
    launch_early(attention_forward_sm90_kernel25<SMem>, dim3(num_blocks), dim3(128 * (groups + 1)), SHARED_BYTES, exec,
                 a.lse, qkv_map, a.T, a.NH, list, LOG2E * a.scale, out_map);
}

// Groups of 64 queries per tile: as many as the registers allow, or 2 when there are fewer tiles than SMs, which shortens
// the longest tile.
inline int attention_forward_sm90_groups(int B, int T, int NH, int HS = 64) {
    int most = HS == 64 ? 4 : 3;
    return B * NH * ceil_div(T, 64 * most) < num_multiprocessors() ? 2 : most;
}

// Requires sm_90a. HS is 64 or 128.
void attention_forward_sm90(const AttentionForwardArgs& args, const Execution& exec) {
    int groups = attention_forward_sm90_groups(args.B, args.T, args.NH, args.HS);
    auto launch = groups == 4     ? attention_forward_sm90_launch<4>
                  : args.HS == 64 ? attention_forward_sm90_launch<2>
                  : groups == 3   ? attention_forward_sm90_launch<3, 128>
                                  : attention_forward_sm90_launch<2, 128>;
    launch(args, exec);
}
#endif

// The number of the kernel that attention_forward() runs; see the table below.
int attention_forward_choice(int B, int T, int NH, int HS) {
#if !defined(ENABLE_FP32)
    if ((HS == 64 || HS == 128) && has_sm90a()) {
        return HS == 64 && T >= 4096 && attention_forward_sm90_groups(B, T, NH) > 2 ? 27 : 25;
    }
    if (compiled_arch(attention_forward_kernel15<64, 2, 32, 8, 3, 64>) >= 80) { return 15; }
#endif
    (void)B, (void)T, (void)NH, (void)HS;
    return 6;
}

// out (B,T,NH,HS) | lse (B,NH,T) or NULL | qkv (B,T,3,NH,HS). C = NH * HS. All pointers are aligned to 16 bytes.
// The kernel depends on the head size, the precision, the architecture of the code that the binary has for this device,
// and the sequence length:
//
//     HS                        bf16, fp16:  sm_90a (H100)   8.0 and up (A100)   older          fp32
//     64, T >= 4096, tiles for all SMs       kernel 27       kernel 15           kernel 6       kernel 6
//     64, 128                                kernel 25       kernel 15           kernel 6       kernel 6
//     other multiples of 8, up to 256        kernel 15       kernel 15           kernel 6       kernel 6
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, float scale,
                       const Execution& exec) {
    double bytes = (4.0 * C * sizeof(floatX) + NH * sizeof(float)) * B * T;
    Op op(exec, bytes, 2.0 * B * T * T * C, "attention_forward");
    require(NH > 0 && C % NH == 0);
    int HS = C / NH;
    require(HS % 8 == 0 && HS <= 256);
    require((size_t)B * NH * ceil_div(T, 16) <= INT_MAX);
    int kernel = attention_forward_choice(B, T, NH, HS);
    auto launch = attention_forward_plain; // kernel 6
#if !defined(ENABLE_FP32)
    if (kernel == 15) { launch = attention_forward_mma; }
    if (kernel == 25) { launch = attention_forward_sm90; }
    if (kernel == 27) { launch = attention_forward_sm90_launch<3, 64, 128, true>; }
#endif
    launch({out, lse, qkv, B, T, HS, NH, scale}, exec);
}
// ==== end promoted: attention_forward ====
