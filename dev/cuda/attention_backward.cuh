/*
attention_backward: dqkv (B,T,3,NH,HS), the gradient of attention_forward's qkv | dbias (3,NH,HS) float, or NULL, += dqkv summed over
all tokens | scratch in floats | dout, out (B,T,NH,HS), qkv (B,T,3,NH,HS), lse (B,NH,T)
Constraint: HS % 8 == 0, HS <= 256. attention_backward_choice() says which kernel runs: 11 (wgmma, TMA) on Hopper with HS = 64 or
128; 7 (mma.sync) on other tensor cores and with other head sizes; else 3 (fp32 arithmetic).
Kernels 3, 7 and 11 of attention_backward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/column_sums.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "attention_forward.cuh"
#include "matmul_backward_bias.cuh"
#include <algorithm>
#include <limits.h>
#include <type_traits>

// ==== promoted: attention_backward ====
// ---- shared by kernels 3 to 11: the arguments of the launchers, and the size of scratch, which is the same on all devices ----

struct AttentionBackwardArgs {
    floatX* dqkv;                   // (B,T,3,NH,HS)
    float* dbias;                   // (3,NH,HS) or NULL
    float* scratch;                 // attention_backward_scratch() floats; kernels 3 and 7: dsum (B,NH,T)
    const floatX *dout, *qkv, *out; // (B,T,NH,HS), (B,T,3,NH,HS), (B,T,NH,HS)
    const float* lse;               // (B,NH,T)
    int B, T, C, NH;
    float scale; // of the scores q k^T
};

inline bool attention_backward_accepts_sm90(int HS) { return sizeof(floatX) == 2 && (HS == 64 || HS == 128); }

constexpr int ATTENTION_BACKWARD_LEAST_QUERIES = 16; // per block of kernel 11's first kernel

// The sizes in floats of kernel 11's scratch and of its first part, the terms of dbias. 0 if kernel 11 does not accept HS.
size_t attention_backward_sm90_terms(int B, int T, int NH, int HS) {
    size_t tiles = (size_t)B * NH * ceil_div(T, 128);
    if (!attention_backward_accepts_sm90(HS)) { return 0; }
    return tiles * (128 / ATTENTION_BACKWARD_LEAST_QUERIES) * HS + (size_t)(B + ceil_div(T, 128) - 1) * 8 * NH * 64;
}
size_t attention_backward_sm90_scratch(int B, int T, int NH, int HS) {
    size_t tiles = (size_t)B * NH * ceil_div(T, 128);
    if (!attention_backward_accepts_sm90(HS)) { return 0; }
    return attention_backward_sm90_terms(B, T, NH, HS) + tiles * (HS / 64 * (2 * 4096 + 1) + 256) + 1;
}

// The size of the part of scratch, at its beginning, that holds the terms of dbias, in floats: until column_sums_flush() where sums
// wait for that. A multiple of 4.
size_t attention_backward_bias_terms(int B, int T, int C, int NH) {
    size_t sm90 = attention_backward_sm90_terms(B, T, NH, C / NH);
    return ceil_div(std::max(sm90, matmul_backward_bias_scratch(B * T, 3 * C)), (size_t)4) * 4;
}

// The size of scratch in floats. Without kernel 11, scratch holds dsum (B,NH,T) and, when that is no longer needed, the scratch of
// matmul_backward_bias().
size_t attention_backward_scratch(int B, int T, int C, int NH) {
    size_t sm90 = attention_backward_sm90_scratch(B, T, NH, C / NH);
    return std::max({sm90, (size_t)B * NH * T, matmul_backward_bias_scratch(B * T, 3 * C)});
}

// ---- kernel 3: fp32 arithmetic, 4x4 register tiles per thread, one writer per gradient ----

// dsum = rowsum(dout * out). Both gradient kernels need it per query row, besides lse, because with
//
//     P = exp(scale * q k^T - lse)    dS = P * (dout v^T - dsum)
//     dv = P^T dout                   dk = scale * dS^T q              dq = scale * dS k
//
// The kernel runs 8 threads per row of HS elements.
__global__ void attention_backward_dsum_kernel3(float* dsum, const floatX* dout, const floatX* out, int T, int NH,
                                                int HS, int num_rows) {
    int row = (int)(((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 8), part = threadIdx.x % 8;
    float sum = 0.0f;
    if (row < num_rows) {
        for (int i = part * x128::size; i < HS; i += 8 * x128::size) {
            x128 a = load128(dout + (size_t)row * HS + i), b = load128(out + (size_t)row * HS + i);
            for (int j = 0; j < x128::size; j++) { sum += (float)a[j] * (float)b[j]; }
        }
    }
    for (int offset = 4; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset); }
    if (row < num_rows && part == 0) { // row = (b * T + t) * NH + h
        int h = row % NH, t = row / NH % T, b = row / NH / T;
        dsum[((size_t)b * NH + h) * T + t] = sum;
    }
}

// Writes dsum to a.scratch.
void attention_backward_dsum(const AttentionBackwardArgs& a, const Execution& exec) {
    require(a.C / a.NH % 8 == 0);
    int num_rows = a.B * a.T * a.NH, block_size = 256;
    launch_kernel(attention_backward_dsum_kernel3, LaunchShape(ceil_div(num_rows, block_size / 8), block_size), exec,
                  a.scratch, a.dout, a.out, a.T, a.NH, a.C / a.NH, num_rows);
}

// Loads 4 elements as floats.
__device__ inline f128 attention_backward_load4(const floatX* p) {
    x4 x = *reinterpret_cast<const x4*>(p);
    return {{(float)x[0], (float)x[1], (float)x[2], (float)x[3]}};
}

// sum[i][j] += a[k][4 * row + i] * b[k][4 * col + j], over k
template <int K> __device__ inline void attention_backward_multiply4x4(float (&sum)[4][4], const float (*a)[64],
                                                                       const float (*b)[64], int row, int col) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        f128 x = load128(&a[k][4 * row]), y = load128(&b[k][4 * col]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) { sum[i][j] += x[i] * y[j]; }
        }
    }
}

// A block owns 64 rows of one head and walks over tiles of 64 rows of the other side. If `keys`, it owns keys, walks
// over queries, and computes dk and dv; otherwise it owns queries, walks over keys, and computes dq. Scores are
// computed as [walked][owned], the layout in which the second product reads P and dS. D groups of 64 columns hold
// the HS columns.
template <bool keys, int D> __global__ void __launch_bounds__(256)
    attention_backward_plain_kernel3(floatX* dqkv, const float* lse, const float* dsum, const floatX* dout,
                                     const floatX* qkv, int T, int C, int NH, float scale) {
    struct SMem {
        float walked1[16][64], owned1[16][64], walked2[16][64], owned2[16][64]; // 16 columns of 64 rows, transposed
        float p[64][64], ds[64][64];
    };
    static_assert(sizeof(SMem) == 48 * 1024, "the limit without an opt-in");
    __shared__ SMem smem;
    int HS = C / NH, h = blockIdx.y % NH, b = blockIdx.y / NH;
    int tile = keys ? blockIdx.x : gridDim.x - 1 - blockIdx.x; // the longest walks start first
    int owned = 64 * tile, row = threadIdx.x / 16, col = threadIdx.x % 16;
    const floatX *q = qkv + (size_t)b * T * 3 * C + h * HS, *d = dout + (size_t)b * T * C + h * HS;
    const floatX *walked1 = keys ? q : q + C, *walked2 = keys ? d : q + 2 * C;
    const floatX *owned1 = keys ? q + C : q, *owned2 = keys ? q + 2 * C : d;
    lse += ((size_t)b * NH + h) * T, dsum += ((size_t)b * NH + h) * T;
    size_t stride = 3 * (size_t)C, walked_stride = keys ? C : stride,
           owned_stride = keys ? stride : C; // of walked2, owned2

    float sum1[D][4][4] = {}, sum2[keys ? D : 1][4][4] = {}; // accumulators of dk and dv, or of dq
    int first = keys ? tile : 0, last = keys ? ceil_div(T, 64) - 1 : tile;
    for (int walk = first; walk <= last; walk++) {
        int walked = 64 * walk;
        float s[4][4] = {}, dp[4][4] = {};
        for (int c = 0; c < HS; c += 16) {
            int r = threadIdx.x % 64, cc = threadIdx.x / 64 * 4;
            f128 w1 = {}, w2 = {}, o1 = {}, o2 = {};
            if (c + cc < HS && walked + r < T) {
                w1 = attention_backward_load4(walked1 + (walked + r) * stride + c + cc);
                w2 = attention_backward_load4(walked2 + (walked + r) * walked_stride + c + cc);
            }
            if (c + cc < HS && owned + r < T) {
                o1 = attention_backward_load4(owned1 + (owned + r) * stride + c + cc);
                o2 = attention_backward_load4(owned2 + (owned + r) * owned_stride + c + cc);
            }
            __syncthreads(); // all threads have read the previous tiles
#pragma unroll
            for (int i = 0; i < 4; i++) {
                smem.walked1[cc + i][r] = w1[i], smem.walked2[cc + i][r] = w2[i];
                smem.owned1[cc + i][r] = o1[i], smem.owned2[cc + i][r] = o2[i];
            }
            __syncthreads();
            attention_backward_multiply4x4<16>(s, smem.walked1, smem.owned1, row, col);
            attention_backward_multiply4x4<16>(dp, smem.walked2, smem.owned2, row, col);
        }

#pragma unroll
        for (int i = 0; i < 4; i++) {
            f128 p, ds;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int w = walked + 4 * row + i, o = owned + 4 * col + j;
                int query = keys ? w : o, key = keys ? o : w;
                bool seen = key <= query && query < T;
                p[j] = seen ? expf(scale * s[i][j] - lse[query]) : 0.0f;
                ds[j] = seen ? p[j] * (dp[i][j] - dsum[query]) : 0.0f;
            }
            if (keys) { store128(&smem.p[4 * row + i][4 * col], p); }
            store128(&smem.ds[4 * row + i][4 * col], ds);
        }

        // the products with dS and P, over 16 walked rows and 64 columns at a time
#pragma unroll
        for (int part = 0; part < D; part++) {
            for (int w = 0; w < 64; w += 16) {
                int t = walked + w + row, c = 64 * part + 4 * col;
                f128 y1 = {}, y2 = {};
                if (t < T && c < HS) {
                    y1 = attention_backward_load4(walked1 + t * stride + c);
                    if (keys) { y2 = attention_backward_load4(walked2 + t * walked_stride + c); }
                }
                __syncthreads(); // all threads have read the previous tiles, and have written p and ds
                store128(&smem.walked1[row][4 * col], y1);
                if (keys) { store128(&smem.walked2[row][4 * col], y2); }
                __syncthreads();
                attention_backward_multiply4x4<16>(sum1[part], &smem.ds[w], smem.walked1, row, col);
                if (keys) { attention_backward_multiply4x4<16>(sum2[part], &smem.p[w], smem.walked2, row, col); }
            }
        }
    }

    floatX* out1 = dqkv + (size_t)b * T * 3 * C + h * HS + (keys ? C : 0);
#pragma unroll
    for (int part = 0; part < D; part++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int t = owned + 4 * row + i, c = 64 * part + 4 * col + j;
                if (t < T && c < HS) {
                    out1[t * stride + c] = (floatX)(scale * sum1[part][i][j]);
                    if (keys) { out1[t * stride + C + c] = (floatX)sum2[part][i][j]; }
                }
            }
        }
    }
}

template <int D> void attention_backward_plain_sized(const AttentionBackwardArgs& a, const Execution& exec) {
    for (auto kernel : {attention_backward_plain_kernel3<true, D>, attention_backward_plain_kernel3<false, D>}) {
        launch_kernel(kernel, LaunchShape(dim3(ceil_div(a.T, 64), a.B * a.NH), 256), exec, a.dqkv, a.lse, a.scratch,
                      a.dout, a.qkv, a.T, a.C, a.NH, a.scale);
    }
}

void attention_backward_plain(const AttentionBackwardArgs& a, const Execution& exec) {
    int HS = a.C / a.NH;
    require(HS <= 256 && a.B * a.NH <= 65535);
    attention_backward_dsum(a, exec);
    auto sized = HS <= 64    ? attention_backward_plain_sized<1>
                 : HS <= 128 ? attention_backward_plain_sized<2>
                             : attention_backward_plain_sized<4>;
    sized(a, exec);
}

#if !defined(ENABLE_FP32)
// ---- kernel 7: tensor cores by mma.sync, 32 rows per warp, one owned operand in registers, one in shared memory ----
// A block owns keys and computes dk and dv, or it owns queries and computes dq. It walks over the tokens of the other kind:
//
//              owned, 16 * M rows per warp    walked, tiles of 64 rows, 8 * N at a time
//     dk, dv   k (registers), v (shared)      q, dout
//     dq       q (registers), dout (shared)   k, v
//
// Scores are computed as [owned][walked], so that the accumulators of P and dS become operands of the second product
// without leaving the registers. In each 16x8 accumulator tile of mma.sync, lane 4g + t holds 4 floats:
//
//     walked           0   1     2   3     4   5     6   7
//     owned g          lane 4g   4g + 1    4g + 2    4g + 3      c[0], c[1]
//     owned g + 8      lane 4g   4g + 1    4g + 2    4g + 3      c[2], c[3]
//
// Tiles are laid out as in kernel 15 of attention_forward.

// What a kernel computes. With both dk and dv, the sums of wide heads do not fit in the registers.
enum { ATTENTION_BACKWARD_DQ = 0, ATTENTION_BACKWARD_DK = 1, ATTENTION_BACKWARD_DV = 2 };

// Whether one owned operand is in registers. Rows as wide as these leave too few of them for the sums: both are in shared memory.
template <int HS> constexpr bool ATTENTION_BACKWARD_IN_REGISTERS = HS <= 128;
// Its type: fragments of mma's operand a, or where they are in this warp's shared memory.
template <int HS, int M> using AttentionBackwardOperand =
    std::conditional_t<ATTENTION_BACKWARD_IN_REGISTERS<HS>, uint32_t[HS / 16][M][4], const floatX*>;

// `walked` is the number of rows of a walked tile.
template <int HS, int M, int walked = 64> struct AttentionBackwardMmaSMem {
    static constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>, OWNED = ATTENTION_BACKWARD_IN_REGISTERS<HS> ? 1 : 2;
    floatX tile1[2][walked * PITCH], tile2[2][walked * PITCH]; // two stages of walked rows: q and dout, or k and v
    floatX owned[OWNED * 64 * M * PITCH];  // the owned operands that are not in registers: v, or dout; then k, or q
    float lse[2][walked], dsum[2][walked]; // two stages for the walked queries; not used for dq
};
static_assert(sizeof(AttentionBackwardMmaSMem<128, 1>) <= 99 * 1024, "the limit of compute capability 8.6");
static_assert(sizeof(AttentionBackwardMmaSMem<256, 1, 16>) <= 99 * 1024, "the limit of compute capability 8.6");

// Loads rows row..row+16*M-1 from global memory as fragments of mma's operand a. Rows past T and columns past head_size become 0.
template <int HS, int M> __device__ inline void attention_backward_load_operand(uint32_t (&a)[HS / 16][M][4],
                                                                                const floatX* rows, size_t stride,
                                                                                int row, int T, int head_size = HS) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half_m = 0; half_m < 2; half_m++) {
            int r = row + 16 * m + 8 * half_m + lane / 4;
            const uint32_t* p = reinterpret_cast<const uint32_t*>(rows + r * stride) + lane % 4;
#pragma unroll
            for (int k = 0; k < HS / 16; k++) {
                a[k][m][half_m] = r < T && 16 * k < head_size ? p[8 * k] : 0;
                a[k][m][half_m + 2] = r < T && 16 * k + 8 < head_size ? p[8 * k + 4] : 0;
            }
        }
    }
}

// sum (16*M, 8*N) += owned (16*M, HS) rows (8*N, HS)^T. Operand a is in registers, or in this warp's shared memory. Here and below,
// rows are `shift` bytes after those with this address.
template <int HS, int M, int N>
__device__ inline void attention_backward_multiply_rows(float (&sum)[M][N][4], const uint32_t (&owned)[HS / 16][M][4],
                                                        uint32_t rows, int shift) {
#pragma unroll
    for (int d = 0; d < HS / 16; d++) { attention_forward_multiply<HS, false>(sum, owned[d], rows, d, shift); }
}
template <int HS, int M, int N> __device__ inline void
attention_backward_multiply_rows(float (&sum)[M][N][4], const floatX* owned, uint32_t rows, int shift) {
    uint32_t address = attention_forward_v_address<HS>(owned);
#pragma unroll
    for (int d = 0; d < HS / 16; d++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            ldmatrix_x4(a[m], attention_forward_column<HS>(address, d) + 16 * m * ATTENTION_FORWARD_ROW_BYTES<HS>);
        }
        attention_forward_multiply<HS, false>(sum, a, rows, d, shift);
    }
}

// sum (16*M, HS) += x (16*M, 8*N) rows (8*N, HS). x: the accumulators of P or dS, which become operand a in registers
template <int HS, int M, int N> __device__ inline void
attention_backward_multiply_columns(float (&sum)[M][HS / 8][4], const float (&x)[M][N][4], uint32_t rows, int shift) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &x[m][2 * k + i / 2][i % 2 * 2];
                a[m][i] = pack_16x2(pair[0], pair[1], floatX());
            }
        }
        attention_forward_multiply<HS, true>(sum, a, rows, k, shift);
    }
}

// Adds the terms of 8 * N walked rows to sum1 (dk or dq) and sum2 (dv). rows: these rows of q, or of k; those of dout, or of v, are
// `shift` bytes further. owned, walked: the warp's first owned row and the first of these rows, only read if masked. lse and dsum: for
// dk and dv of these rows, from this lane's first column on; for dq of this lane's owned rows, and lse is in base 2.
template <bool masked, int what, int HS, int M, int N>
__device__ inline void attention_backward_step(float (&sum1)[M][HS / 8][4], float (&sum2)[M][HS / 8][4],
                                               const AttentionBackwardOperand<HS, M>& owned1, const floatX* owned2,
                                               const floatX* rows, int shift, const float* lse, const float* dsum,
                                               int owned, int walked, float scale2) {
    constexpr bool keys = what != ATTENTION_BACKWARD_DQ;
    int lane = threadIdx.x % 32;
    uint32_t by_rows = attention_forward_k_address<HS>(rows), by_columns = attention_forward_v_address<HS>(rows);
    auto query = [](int m, int n, int i) { return keys ? 8 * n + i % 2 : 2 * m + i / 2; }; // index in lse and dsum
    float p[M][N][4] = {}, ds[M][N][4]; // ds starts at -dsum, so that adding dout v^T yields dP - dsum
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { ds[m][n][i] = -dsum[query(m, n, i)]; }
        }
    }
    attention_backward_multiply_rows<HS>(p, owned1, by_rows, 0);
    if (what != ATTENTION_BACKWARD_DV) { attention_backward_multiply_rows<HS>(ds, owned2, by_rows, shift); }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float lse2 = lse[query(m, n, i)] * (keys ? LOG2E : 1.0f);
                int o = owned + 16 * m + i / 2 * 8 + lane / 4, w = walked + 8 * n + lane % 4 * 2 + i % 2;
                p[m][n][i] = exp2_approx(p[m][n][i] * scale2 - lse2);
                if (masked && (keys ? o > w : w > o)) { p[m][n][i] = 0.0f; }
                ds[m][n][i] *= p[m][n][i];
            }
        }
    }
    if (what & ATTENTION_BACKWARD_DV) { attention_backward_multiply_columns<HS>(sum2, p, by_columns, shift); }
    if (what != ATTENTION_BACKWARD_DV) { attention_backward_multiply_columns<HS>(sum1, ds, by_columns, 0); }
}

template <int what, int HS, int M, int N, int blocks_per_sm, int walked>
__global__ void __launch_bounds__(128, blocks_per_sm)
    attention_backward_kernel7(floatX* dqkv, const float* lse, const float* dsum, const floatX* dout, const floatX* qkv,
                               int T, int C, int NH, int head_size, float scale, int group) {
    extern __shared__ __align__(128) unsigned char attention_backward_memory[];
    auto& smem = *reinterpret_cast<AttentionBackwardMmaSMem<HS, M, walked>*>(attention_backward_memory);
    constexpr bool keys = what != ATTENTION_BACKWARD_DQ, IN_REGISTERS = ATTENTION_BACKWARD_IN_REGISTERS<HS>;
    constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>, WALKS = 64 * M / walked; // WALKS: walked tiles per owned tile
    if (HS == 64) { head_size = HS; }
    int num_tiles = ceil_div(T, 64 * M);
    AttentionForwardWork work = attention_forward_work(gridDim.x / num_tiles, num_tiles, group);
    // blocks with long walks start first: all queries see the first keys, and the last query sees all keys
    int tile = keys ? num_tiles - 1 - work.tile : work.tile;
    int h = work.head % NH, b = work.head / NH, warp = threadIdx.x / 32, owned = 64 * M * tile + 16 * M * warp;
    int stride = 3 * C, stride_w = keys ? C : stride;
    const floatX *q = qkv + (size_t)b * T * stride + h * head_size, *d = dout + (size_t)b * T * C + h * head_size;
    const floatX *owned1 = keys ? q + C : q, *owned2 = keys ? q + 2 * C : d;
    lse += (size_t)work.head * T, dsum += (size_t)work.head * T;
    float scale2 = scale * LOG2E;

    int first = keys ? WALKS * tile : 0;
    int num_walks = keys ? ceil_div(T, walked) : min(WALKS * (tile + 1), ceil_div(T, walked));
    const floatX *walked1 = keys ? q : q + C, *walked2 = keys ? d : q + 2 * C;
    auto load = [&](int stage, int t) {
        attention_forward_load<HS, walked>(smem.tile1[stage], walked1, stride, t, T, head_size);
        attention_forward_load<HS, walked>(smem.tile2[stage], walked2, stride_w, t, T, head_size);
        // queries past the end add 0, because their q, dout, lse and dsum are 0
        int i = threadIdx.x % 64;
        if (keys && (walked == 64 || i < walked)) {
            cp_async_4((threadIdx.x < 64 ? smem.lse : smem.dsum)[stage] + i, (threadIdx.x < 64 ? lse : dsum) + t + i,
                       t + i < T);
        }
        cp_async_commit();
    };
    floatX* own = smem.owned + 16 * M * PITCH * warp; // this warp's; where the results are staged at the end, too
    if (what != ATTENTION_BACKWARD_DV) {
        attention_forward_load<HS, 16 * M, 32>(own, owned2, keys ? stride : C, owned, T, head_size);
    }
    AttentionBackwardOperand<HS, M> operand;
    if constexpr (!IN_REGISTERS) {
        operand = own + 64 * M * PITCH;
        attention_forward_load<HS, 16 * M, 32>(own + 64 * M * PITCH, owned1, stride, owned, T, head_size);
    }
    load(0, walked * first);
    if constexpr (IN_REGISTERS) {
        attention_backward_load_operand<HS, M>(operand, owned1, stride, owned, T, head_size);
    }
    float lse2[2 * M], own_dsum[2 * M];
#pragma unroll
    for (int i = 0; i < 2 * M && !keys; i++) {
        int t = owned + 8 * i + threadIdx.x % 32 / 4;
        lse2[i] = t < T ? lse[t] * LOG2E : 0.0f;
        own_dsum[i] = t < T ? dsum[t] : 0.0f;
    }
    float sum1[M][HS / 8][4] = {}, sum2[M][HS / 8][4] = {};
    for (int walk = first, stage = 0; walk < num_walks; walk++, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); // this tile has landed for all warps, and all warps have read the previous tile
        if (walk + 1 < num_walks) { load(stage ^ 1, walked * (walk + 1)); }
        auto steps = [&](auto is_diagonal) {
            constexpr bool masked = decltype(is_diagonal)::value;
#pragma unroll 1
            for (int row = 0; row < walked; row += 8 * N) {
                int t = walked * walk + row, column = row + threadIdx.x % 4 * 2;
                if (masked && keys && t + 8 * N <= owned) { continue; } // none of these queries sees this warp's keys
                if (masked && !keys && t >= owned + 16 * M) { break; }  // no query of this warp sees these keys
                attention_backward_step<masked, what, HS, M, N>(
                    sum1, sum2, operand, own, smem.tile1[stage] + row * PITCH, sizeof(smem.tile1),
                    keys ? smem.lse[stage] + column : lse2, keys ? smem.dsum[stage] + column : own_dsum, owned, t,
                    scale2);
            }
        };
        bool diagonal = keys ? walk < first + WALKS : walk >= WALKS * tile;
        diagonal ? steps(std::true_type()) : steps(std::false_type());
    }

    floatX* rows = dqkv + ((size_t)b * T + owned) * stride + h * head_size + (keys ? C : 0);
    if (what != ATTENTION_BACKWARD_DV) {
        attention_forward_store_rows<HS>(rows, stride, T - owned, sum1, scale, own, head_size);
    }
    if (what & ATTENTION_BACKWARD_DV) {
        attention_forward_store_rows<HS>(rows + C, stride, T - owned, sum2, 1.0f, own, head_size);
    }
}

// kv_M, kv_N, kv_blocks: template arguments M, N, blocks_per_sm of the kernel for dk and dv; q_M, q_N, q_blocks: those
// of the kernel for dq. HS: see ATTENTION_FORWARD_PITCH.
template <int HS, int kv_M, int kv_N, int kv_blocks, int q_M, int q_N, int q_blocks, int walked = 64>
void attention_backward_mma_sized(const AttentionBackwardArgs& a, const Execution& exec) {
    size_t head_bytes = (size_t)4 * a.T * (a.C / a.NH) * sizeof(floatX); // q, k, v and dout of one head
    int group = (int)(((size_t)32 << 20) / head_bytes) + 1;              // 32 MB of the 40 to 50 MB of L2
    auto run = [&](auto kernel, int M, size_t bytes) {
        launch_kernel(kernel, LaunchShape(ceil_div(a.T, 64 * M) * a.B * a.NH, 128, bytes), exec, a.dqkv, a.lse,
                      a.scratch, a.dout, a.qkv, a.T, a.C, a.NH, a.C / a.NH, a.scale, group);
    };
    constexpr int DK = ATTENTION_BACKWARD_DK, DV = ATTENTION_BACKWARD_DV, FIRST = HS > 128 ? DV : DK | DV;
    size_t kv_bytes = sizeof(AttentionBackwardMmaSMem<HS, kv_M, walked>);
    run(attention_backward_kernel7<FIRST, HS, kv_M, kv_N, kv_blocks, walked>, kv_M, kv_bytes);
    if constexpr (!(FIRST & DK)) {
        run(attention_backward_kernel7<DK, HS, kv_M, kv_N, kv_blocks, walked>, kv_M, kv_bytes);
    }
    run(attention_backward_kernel7<ATTENTION_BACKWARD_DQ, HS, q_M, q_N, q_blocks, walked>, q_M,
        sizeof(AttentionBackwardMmaSMem<HS, q_M, walked>));
}

void attention_backward_mma(const AttentionBackwardArgs& a, const Execution& exec) {
    int HS = a.C / a.NH;
    require(HS % 8 == 0 && HS <= 256);
    attention_backward_dsum(a, exec);
    auto sized = HS <= 32    ? attention_backward_mma_sized<32, 2, 4, 2, 2, 4, 2>
                 : HS <= 48  ? attention_backward_mma_sized<48, 2, 4, 2, 2, 4, 2>
                 : HS == 64  ? attention_backward_mma_sized<64, 2, 2, 2, 2, 4, 2>
                 : HS <= 80  ? attention_backward_mma_sized<80, 1, 4, 2, 2, 2, 2>
                 : HS <= 96  ? attention_backward_mma_sized<96, 1, 4, 2, 1, 8, 2>
                 : HS <= 128 ? attention_backward_mma_sized<128, 1, 4, 2, 1, 4, 2>
                             : attention_backward_mma_sized<256, 1, 2, 2, 1, 2, 2, 16>;
    sized(a, exec);
}

// ---- sm_90a: shared by kernels 9 to 11: five wgmma products, tiles by TMA, dq summed in L2 in a fixed order ----
// HS = 64; kernel 11 also accepts HS = 128. A work item is a tile of 128 keys of one head, 64 keys per warpgroup. The two
// warpgroups walk over the tiles of 128 queries that see these keys. Scores are computed as
// [keys][queries], so that the accumulators of P and dS become operands in registers for dv and dk. dS is also written to
// shared memory, because dq sums over the keys of both warpgroups.
//
// dq is summed over the key tiles in one fixed order, so that it is deterministic. In most heads (kernels 9 and 10: in every head) the
// key tiles go down, and each starts its walk at the diagonal. Key tile j adds its term of query tile i in step i - j of its walk, after
// it has waited for the term of key tile j + 1:
//
//     query tile         0        1        2        3
//     key tile 3                                    step 0
//     key tile 2                           step 0   step 1
//     key tile 1                  step 0   step 1   step 2
//     key tile 0         step 0   step 1   step 2   step 3
//
// Each column, read downwards, is the order of one sum: step 0 stores the first term, key tile 0 adds the last one and
// writes dq. The work items of a head start in the order of the rows, from key tile 3 down. In kernel 11, items of several heads
// alternate, so an item starts some time after the item for which it waits.
//
// A head's longest items start last: while the last one runs, the other SMs run out of work. So in kernel 11 the key tiles of the last
// heads go up: they start from 0, walk from the last query tile to the diagonal, and add to dq in that order; the diagonal tile adds
// the last term. Of these items the later are the shorter, so the SMs finish at about the same time.
//
// With HS = 128 the query tiles have 64 queries, so that the accumulators fit in registers: two steps for each step above.
// A warpgroup then computes 64 of the 128 columns of dq, instead of 64 of the 128 queries.
//
// With tickets (kernel 11) there is no deadlock: an item waits only for items with smaller tickets, which have started; the
// oldest unfinished item never waits, however few blocks are resident. Source of computing the scores transposed, (keys,
// queries): Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.
struct AttentionBackwardSm90Args {
    float4* dq_sums;   // (B*NH, query tiles, 2, 8, 128): sums of dq so far, 8 float4 per thread of the two warpgroups
    int* turns;        // (B*NH, query tiles): number of terms in each sum so far
    int* ticket;       // the number of the next work item
    float4* stats;     // (B*NH, num_tiles, 64): for each pair of queries two lse in base 2, then two dsum
    float* dq_terms;   // (B + num_tiles - 1, 512 / HS, NH, HS): sums of dq over some queries, for dbias, or NULL
    float* dout_terms; // (blocks of queries, NH, HS): sums of dout over some queries, likewise, or NULL
    int T, NH, num_heads, num_tiles;
    int num_down;   // heads 0 to num_down - 1 go down, the others up
    unsigned group; // heads that go down and whose work items alternate
    float scale;
};

constexpr int ATTENTION_BACKWARD_TILE_BYTES = 128 * 64 * sizeof(floatX);
template <int HS> static AttentionBackwardSm90Args attention_backward_sm90_args(const AttentionBackwardArgs& a) {
    require(a.C / a.NH == HS);
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    AttentionBackwardSm90Args args = {};
    args.T = a.T, args.NH = a.NH, args.num_tiles = ceil_div(a.T, 128), args.scale = a.scale;
    args.num_heads = args.num_down = a.B * a.NH;
    // q, dout and the sums of dq of a group fill a third of L2: with more heads, they would evict each other
    size_t head_bytes = (size_t)args.num_tiles * 128 * HS * (2 * sizeof(floatX) + sizeof(float));
    args.group = std::clamp((int)(device_attribute(cudaDevAttrL2CacheSize) / 3 / head_bytes), 1, args.num_heads);
    size_t tiles = (size_t)args.num_heads * args.num_tiles;
    require(tiles * 128 <= INT_MAX);
    require((size_t)a.scratch % 16 == 0); // bulk copies need this alignment
    if (a.dbias) {
        args.dout_terms = a.scratch;
        args.dq_terms = a.scratch + tiles * (128 / ATTENTION_BACKWARD_LEAST_QUERIES) * HS;
    }
    args.dq_sums = reinterpret_cast<float4*>(a.scratch + attention_backward_sm90_terms(a.B, a.T, a.NH, HS));
    args.stats = args.dq_sums + tiles * (HS / 64) * 2048;
    args.turns = reinterpret_cast<int*>(args.stats + tiles * 64);
    args.ticket = args.turns + tiles * (HS / 64);
    return args;
}

// Writes lse and dsum of every query to stats, and resets turns and ticket. Queries past the end get an infinite lse, so
// their P is 0. A block has num_queries queries and num_heads heads from blockIdx.y * num_heads on, a thread 8 elements of a
// head, of every num_slots-th query: HS / 8 neighbouring threads have a head. If args.dout_terms is not NULL, it gets the sums of
// dout over the block's queries.
template <int HS> __global__ void attention_backward_sm90_stats_kernel11(AttentionBackwardSm90Args args,
                                                                         const floatX* dout, const floatX* out,
                                                                         const float* lse, int num_queries,
                                                                         int num_heads, int num_slots) {
    extern __shared__ __align__(128) float attention_backward_terms[];   // (num_slots, num_heads * HS)
    float* dsum = attention_backward_terms + num_slots * num_heads * HS; // (num_heads, num_queries)
    constexpr int LANES = HS / 8;                                        // per head
    int width = num_heads * LANES, slot = threadIdx.x / width,
        vector = threadIdx.x % width; // `width` threads per query
    int first_head = blockIdx.y * num_heads, h = first_head + vector / LANES, length = 128 * args.num_tiles;
    size_t thread = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    size_t num_threads = (size_t)gridDim.x * gridDim.y * blockDim.x;
    grid_launch_dependents();
    grid_wait_dependency();
    // <= instead of <, to reset ticket too, which is stored behind the last element of turns
    for (size_t i = thread; i <= (size_t)args.num_heads * args.num_tiles * (HS / 64); i += num_threads) {
        args.turns[i] = 0;
    }
    float terms[x128::size] = {};
    int b = blockIdx.x * num_queries / length, start = blockIdx.x * num_queries % length;
    int num_valid = min(num_queries, args.T - start); // may be negative
    constexpr int unroll = 4;                         // queries in flight per thread
    for (int query = slot; query < num_valid && h < args.NH; query += unroll * num_slots) {
        x128 x[unroll], y[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) { // a load behind a condition would wait for the one before
            int t = start + min(query + u * num_slots, num_valid - 1);
            size_t i = (((size_t)b * args.T + t) * args.NH + h) * HS + vector % LANES * x128::size;
            x[u] = load128(dout + i), y[u] = load128(out + i);
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            bool valid = query + u * num_slots < num_valid;
            float sum = 0.0f;
            for (int k = 0; k < x128::size; k++) {
                sum += (float)x[u][k] * (float)y[u][k];
                terms[k] += valid ? (float)x[u][k] : 0.0f;
            }
            unsigned group = ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES); // the lanes of this head
            for (int offset = LANES / 2; offset > 0; offset /= 2) { sum += __shfl_xor_sync(group, sum, offset); }
            if (vector % LANES == 0 && valid) { dsum[vector / LANES * num_queries + query + u * num_slots] = sum; }
        }
    }
    if (args.dout_terms) {
        for (int k = 0; k < x128::size; k++) {
            attention_backward_terms[(slot * width + vector) * x128::size + k] = terms[k];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_heads * num_queries / 2; i += blockDim.x) { // two queries of a head
        int head_of_block = i / (num_queries / 2), query = i % (num_queries / 2) * 2;
        size_t head = (size_t)b * args.NH + first_head + head_of_block;
        if (first_head + head_of_block >= args.NH) { break; }
        float2 of_lse = make_float2(INFINITY, INFINITY), of_dsum = make_float2(0.0f, 0.0f);
        const float* lse_of_query = lse + head * args.T + start + query;
        const float* dsum_of_query = dsum + head_of_block * num_queries + query;
        if (query < num_valid) { of_lse.x = lse_of_query[0] * LOG2E, of_dsum.x = dsum_of_query[0]; }
        if (query + 1 < num_valid) { of_lse.y = lse_of_query[1] * LOG2E, of_dsum.y = dsum_of_query[1]; }
        args.stats[(head * length + start + query) / 2] = make_float4(of_lse.x, of_lse.y, of_dsum.x, of_dsum.y);
    }
    for (int i = threadIdx.x; args.dout_terms && i < num_heads * HS; i += blockDim.x) {
        int column = first_head * HS + i;
        float sum = 0.0f;
        for (int k = 0; k < num_slots; k++) { sum += attention_backward_terms[k * num_heads * HS + i]; }
        if (column < args.NH * HS) { args.dout_terms[(size_t)blockIdx.x * args.NH * HS + column] = sum; }
    }
}

// Returns the number of rows of args.dout_terms, one for each block of queries: many queries, so that there are few rows, but
// not so many that SMs are idle.
template <int HS> static int attention_backward_sm90_stats(const AttentionBackwardSm90Args& args,
                                                           const AttentionBackwardArgs& a, const Execution& exec) {
    int num_groups = ceil_div(args.NH, 16), num_heads = ceil_div(args.NH, num_groups), num_slots = 32 / num_heads;
    int queries = 64, all = 128 * args.num_tiles * (args.num_heads / args.NH),
        threads = num_slots * num_heads * (HS / 8);
    while (queries > ATTENTION_BACKWARD_LEAST_QUERIES && all / queries * num_groups < 4 * num_multiprocessors()) {
        queries /= 2;
    }
    size_t shared = (threads * x128::size + num_heads * queries) * sizeof(float);
    launch_early(attention_backward_sm90_stats_kernel11<HS>, dim3(all / queries, num_groups), dim3(threads), shared,
                 exec, args, a.dout, a.out, a.lse, queries, num_heads, num_slots);
    return all / queries;
}

// A warpgroup's 64 keys of k or v as the left operand of a product. HS = 64: fragments in registers, because the bandwidth of shared
// memory would otherwise limit the kernel about as much as the tensor cores. HS = 128: a descriptor, because no registers are left.
template <int HS> using AttentionBackwardSm90Keys = std::conditional_t<HS == 64, uint32_t[4][4], uint64_t>;

// Loads or describes this operand. tile: k or v (128 keys, HS); row: the warp's first key.
__device__ inline void attention_backward_sm90_operand(uint64_t& x, const floatX* tile, int row) {
    x = wgmma_descriptor(tile + row / 64 * 64 * 64);
}
__device__ inline void attention_backward_sm90_operand(uint32_t (&x)[4][4], const floatX* tile, int row) {
    int lane_row = threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
#pragma unroll
    for (int d = 0; d < 4; d++) { // 16 columns: two chunks of 16 bytes, whose order is swizzled
        ldmatrix_x4(x[d], tile + (row + lane_row) * 64 + ((2 * d + chunk) ^ (lane_row % 8)) * 8);
    }
}

// The next four functions issue the wgmmas of a product and do not wait.
// s (64 keys, 64 queries) = x (64 keys, HS) queries (64, HS)^T; HS = 128 for a descriptor x, 64 for fragments
__device__ inline void attention_backward_sm90_scores(float (&s)[32], uint64_t x, const floatX* queries) {
    attention_forward_sm90_scores<128, 128>(s, x, wgmma_descriptor(queries));
}
__device__ inline void attention_backward_sm90_scores(float (&s)[32], const uint32_t (&x)[4][4],
                                                      const floatX* queries) {
    uint64_t b = wgmma_descriptor(queries);
    wgmma_64x64x16_new(s, x[0], b, floatX());
#pragma unroll
    for (int d = 1; d < 4; d++) { wgmma_64x64x16(s, x[d], b + 2 * d, 1, floatX()); }
}
// sum (64 keys, HS) += x (64 keys, queries) queries (queries, HS)
template <int HS, int n> __device__ inline void
attention_backward_sm90_keys(float (&sum)[HS / 2], const uint32_t (&x)[n], const floatX* queries) {
    attention_forward_sm90_values(
        sum, x, HS == 64 ? wgmma_descriptor(queries) : wgmma_descriptor_transposed(queries, 64 * 64 * sizeof(floatX)));
}
// dq (64 queries, 64) = ds (128 keys, 64 queries)^T keys (128, 64)
__device__ inline void attention_backward_sm90_queries(float (&dq)[32], const floatX* ds, const floatX* keys) {
    uint64_t a = wgmma_descriptor(ds), b = wgmma_descriptor(keys);
    wgmma_64x64x16_transposed_new(dq, a, b, floatX());
#pragma unroll
    for (int k = 1; k < 8; k++) { wgmma_64x64x16_transposed(dq, a + 128 * k, b + 128 * k, 1, floatX()); }
}

// Applies the causal mask of the diagonal tile, where key r and query r are the same token, so that query r sees the
// keys up to r. key: this thread's first key, counted from the first query of s.
template <int n> __device__ inline void attention_backward_sm90_mask(float (&s)[n], int key) {
    int ahead = key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < n; j++) {
        if (j / 4 * 8 + j % 2 - j % 4 / 2 * 8 < ahead) { s[j] = -INFINITY; }
    }
}

// Turns the scores s into P = exp2(s * scale2 - lse), in place. stats: lse (base 2) and dsum of the queries of s.
template <int n> __device__ inline void attention_backward_sm90_p(float (&s)[n], const float4* stats, float scale2) {
    stats += threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < n / 4; j++) {
        float2 lse = *reinterpret_cast<const float2*>(stats + 4 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) { s[4 * j + i] = exp2_approx(s[4 * j + i] * scale2 - (i % 2 ? lse.y : lse.x)); }
    }
}

// Packs P, which s contains, into the operand fragments p, and dS = P * (dp - dsum) into ds.
template <int n> __device__ inline void attention_backward_sm90_ds(uint32_t (&p)[n / 2], uint32_t (&ds)[n / 2],
                                                                   const float (&s)[n], const float (&dp)[n],
                                                                   const float4* stats) {
    stats += threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < n / 4; j++) {
        float2 dsum = *(reinterpret_cast<const float2*>(stats + 4 * j) + 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int k = 4 * j + 2 * i;
            p[2 * j + i] = pack_16x2(s[k], s[k + 1], floatX());
            ds[2 * j + i] = pack_16x2(s[k] * (dp[k] - dsum.x), s[k + 1] * (dp[k + 1] - dsum.y), floatX());
        }
    }
}

// Writes dS to shared memory, as matrices (128 keys, 64 queries), swizzled for wgmma. row: the warp's first key.
template <int n>
__device__ inline void attention_backward_sm90_store_ds(floatX* matrices, const uint32_t (&ds)[n], int row) {
#pragma unroll
    for (int k = 0; k < n / 4; k++) {
        attention_forward_sm90_write(matrices + k / 4 * 128 * 64 + row * 64, k % 4, ds + 4 * k);
    }
}

// Of a thread's part of dq: terms[c] (or +=, if add) = the sum of its two rows in its column number c; each element of
// `terms` is a float4, 128 apart.
__device__ inline void attention_backward_sm90_sum_rows(float4* terms, const float (&dq)[32], bool add) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const float* x = dq + 8 * c;
        float4 sum = make_float4(x[0] + x[2], x[1] + x[3], x[4] + x[6], x[5] + x[7]);
        if (add) {
            float4 before = terms[128 * c];
            sum = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
        }
        terms[128 * c] = sum;
    }
}

// ---- shared by kernels 10 and 11: warp-specialised: one producer, two adders of dq, two consumer warpgroups ----
// One step of the consumers, from top to bottom, and the roles that run beside them:
//
//     tensor cores                      other units of a consumer warpgroup
//     s = k q^T, then dp = v dout^T     P = exp2(s - lse) as soon as s is complete
//                                       dS = P * (dp - dsum)
//     dv += P dout                      dS to shared memory
//                                       barrier of the two warpgroups: dS of all 128 keys is complete
//     dq = dS^T k                       wait
//     dk += dS q                        dq to shared memory, for the adder
//
// With HS = 64, a step takes its 128 queries in two parts, to save registers. Before the barrier:
//
//     s0, dp0, s1                       P0, dS0
//     dp1, dv += P0 dout0               dS0 to shared memory, P1, dS1
//     dv += P1 dout1                    dS1 to shared memory
//
// At the end of an item, TMA stores dk and dv from the stage of dS that is not in use. It also stores dq from there when its last
// term is added. A warp writes its own rows there. Before it writes there again, it waits for the stores.
//
//     producer (1 thread)               loads q, dout and stats of the next steps (two stages), k and v of each item
//     adders (2 threads, in turns)      wait for the turn of this key tile, add dq to dq_sums, pass the turn on;
//                                       last term: load the sums for the consumers

template <int head_size = 64> struct AttentionBackwardSMem {
    static constexpr int HS = head_size, QUERIES = HS == 64 ? 128 : 64; // queries per step
    static constexpr int BOXES = HS / 64;                               // of 64 columns
    static constexpr int STEPS = 128 / QUERIES;                         // steps per key tile
    floatX q[2][QUERIES * HS], dout[2][QUERIES * HS];                   // two stages
    floatX k[128 * HS], v[128 * HS];
    // two stages, so one barrier per step is enough; also holds what TMA writes, with HS = 128 in a third matrix, too
    floatX ds[HS == 64 ? 2 : 3][128 * QUERIES];
    float4 dq[2][8 * 128]; // per warpgroup, a tile of dq to be added to dq_sums, or (last term) the sums so far
    float4 stats[2][QUERIES / 2];
    float4 dq_terms[2][4 * 128]; // for dbias: per thread of a warpgroup, 16 sums of its rows of dq
    // full: the loads complete it, and the consumers wait for it; empty: the consumers arrive, and the producer waits
    uint64_t q_full[2], q_empty[2]; // for q and stats
    uint64_t dout_full[2], dout_empty[2];
    uint64_t k_full, k_empty, v_full, v_empty;
    // Each completes a phase in every step (dq_full[w][s] in every second), also for a last term: two phases off, a parity would be
    // misread. dq_ready[warpgroup]: an adder arrives when the next step may write dq; sums_ready[warpgroup]: when dq holds the sums so
    // far (last term); dq_full[warpgroup][step % 2]: the warpgroup's threads arrive when dq has been written, or (last term) read.
    uint64_t dq_ready[2], sums_ready[2], dq_full[2][2];
    uint64_t work_full[2], work_empty[2]; // the producer writes `work`; all other roles read it
    int work[2];                          // numbers of work items, two stages
};
static_assert(sizeof(AttentionBackwardSMem<64>) <= 227 << 10 && sizeof(AttentionBackwardSMem<128>) <= 227 << 10,
              "the limit of compute capability 9.0");

// Initialises the barriers. Called by the whole block.
template <class SMem> __device__ inline void attention_backward_sm90_init(SMem& smem) {
    if (threadIdx.x == 0) {
        mbarrier_init(&smem.k_full, 1);
        mbarrier_init(&smem.v_full, 1);
        mbarrier_init(&smem.k_empty, 8); // one arrival per consumer warp
        mbarrier_init(&smem.v_empty, 8);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&smem.q_full[i], 1);
            mbarrier_init(&smem.q_empty[i], 8 + 256); // per warp: q has been read; per thread: stats have been read
            mbarrier_init(&smem.dout_full[i], 1);
            mbarrier_init(&smem.dout_empty[i], 8);
            mbarrier_init(&smem.dq_ready[i], 1);
            mbarrier_init(&smem.sums_ready[i], 1);
            mbarrier_init(&smem.dq_full[i][0], 128);
            mbarrier_init(&smem.dq_full[i][1], 128);
            mbarrier_init(&smem.work_full[i], 1);
            mbarrier_init(&smem.work_empty[i], 256 + 2); // all consumer threads and the two adders
        }
        mbarrier_init_fence();
        for (int i = 0; i < 2; i++) { mbarrier_arrive(&smem.dq_ready[i]); } // dq may be written in step 0
    }
    __syncthreads();
}

// Issues the TMA loads of rows (num_rows, HS) of one head, tokens t..t + num_rows - 1, to a tile (HS / 64, num_rows, 64).
template <int HS, int num_rows> __device__ inline void
attention_backward_load_rows(floatX* tile, const CUtensorMap& map, int vector, int t, int b, uint64_t* full) {
    constexpr int BOXES = HS / 64, BOX_ROWS = AttentionBackwardSMem<HS>::QUERIES;
#pragma unroll
    for (int j = 0; j < BOXES * num_rows / BOX_ROWS; j++) {
        int row = j * BOX_ROWS % num_rows, box = j * BOX_ROWS / num_rows;
        tma_load_4d(tile + (box * num_rows + row) * 64, &map, 0, vector * BOXES + box, t + row, b, full);
    }
}

// A work item: a head and a tile of keys, with the order of its steps.
template <int STEPS> struct AttentionBackwardSm90Item {
    int head, j, num_steps; // key tile j; its query tiles, of 128 / STEPS queries, begin at STEPS * j, on the diagonal
    bool up;
    __device__ AttentionBackwardSm90Item(const AttentionBackwardSm90Args& args, int work)
        : head(work / args.num_tiles), j(args.num_tiles - 1 - work % args.num_tiles),
          num_steps(STEPS * (args.num_tiles - j)), up(head >= args.num_down) {}
    // the query tile of a step, counted from the diagonal
    __device__ int query_tile(int step) const { return up ? num_steps - 1 - step : step; }
    // the number of key tiles that add to dq of a query tile before this one; whether this one is the last
    __device__ int num_terms(int tile) const { return up ? j : tile / STEPS; }
    __device__ bool is_last_term(int tile) const { return up ? tile < STEPS : j == 0; }
};

// The producer's part of a work item: issues its loads. work: number of the item; n: how many items the block has done
// before; i: counts steps over all items of the block.
template <class SMem> __device__ inline void attention_backward_sm90_load_item(const AttentionBackwardSm90Args& args,
                                                                               SMem& smem, const CUtensorMap& qkv_map,
                                                                               const CUtensorMap& dout_map, int work,
                                                                               unsigned n, unsigned& i) {
    constexpr int HS = SMem::HS, QUERIES = SMem::QUERIES, STEPS = SMem::STEPS;
    constexpr int STATS_BYTES = sizeof(smem.stats[0]), KEY_BYTES = sizeof(smem.k);
    AttentionBackwardSm90Item<STEPS> item(args, work);
    int h = item.head % args.NH, b = item.head / args.NH, step = 0;
    auto load_queries = [&]() {
        int tile = STEPS * item.j + item.query_tile(step);
        mbarrier_wait(&smem.q_empty[i % 2], (i / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.q_full[i % 2], ATTENTION_BACKWARD_TILE_BYTES + STATS_BYTES);
        bulk_load(smem.stats[i % 2], args.stats + (size_t)(item.head * STEPS * args.num_tiles + tile) * (QUERIES / 2),
                  STATS_BYTES, &smem.q_full[i % 2]);
        attention_backward_load_rows<HS, QUERIES>(smem.q[i % 2], qkv_map, h, QUERIES * tile, b, &smem.q_full[i % 2]);
        mbarrier_wait(&smem.dout_empty[i % 2], (i / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.dout_full[i % 2], ATTENTION_BACKWARD_TILE_BYTES);
        attention_backward_load_rows<HS, QUERIES>(smem.dout[i % 2], dout_map, h, QUERIES * tile, b,
                                                  &smem.dout_full[i % 2]);
        i++, step++;
    };
    load_queries();
    mbarrier_wait(&smem.v_empty, (n + 1) % 2); // the consumers release v before k
    mbarrier_arrive_expect(&smem.v_full, KEY_BYTES);
    attention_backward_load_rows<HS, 128>(smem.v, qkv_map, 2 * args.NH + h, 128 * item.j, b, &smem.v_full);
    mbarrier_wait(&smem.k_empty, (n + 1) % 2);
    mbarrier_arrive_expect(&smem.k_full, KEY_BYTES);
    attention_backward_load_rows<HS, 128>(smem.k, qkv_map, args.NH + h, 128 * item.j, b, &smem.k_full);
#pragma unroll 1
    while (step < item.num_steps) { load_queries(); }
}

// An adder's part of a work item. In every second step, it adds dq to dq_sums: 16 KB per warpgroup. If the term is the last one, it
// loads the sums so far instead, and the consumers add the term in registers.
// adder: 0 or 1. i: the number of steps of the block's earlier items.
template <class SMem> __device__ inline void attention_backward_sm90_add_item(const AttentionBackwardSm90Args& args,
                                                                              SMem& smem, int adder, int work, int i) {
    constexpr int BYTES = sizeof(smem.dq[0]), STEPS = SMem::STEPS;
    AttentionBackwardSm90Item<STEPS> item(args, work);
#pragma unroll 1
    for (int step = (i + adder) % 2; step < item.num_steps; step += 2) {
        int query_tile = item.query_tile(step), num_terms = item.num_terms(query_tile); // already in the sum
        bool last = item.is_last_term(query_tile);
        int tile = (item.head * args.num_tiles + item.j) * STEPS + query_tile;
        int* turn = args.turns + tile;
        if (num_terms > 0) {
            while (load_acquire(turn) < num_terms) {} // until the terms of the key tiles before this one are in the sum
            async_proxy_fence();
        }
        unsigned n = i + step; // counts the block's steps
        float4* sums = args.dq_sums + (size_t)2 * tile * 1024;
#pragma unroll 1
        for (int w = 0; last && w < 2; w++) {
            // dq of the step before has been written or read, and its bulk copies have read it
            mbarrier_wait(&smem.dq_full[w][(n + 1) % 2], ((n + 1) / 2 + 1) % 2);
            mbarrier_wait(&smem.dq_ready[w], n % 2);
            if (num_terms == 0) {
                mbarrier_arrive(&smem.sums_ready[w]);
            } else {
                mbarrier_arrive_expect(&smem.sums_ready[w], BYTES);
                bulk_load(smem.dq[w], sums + 1024 * w, BYTES, &smem.sums_ready[w]);
            }
        }
#pragma unroll 1
        for (int w = 0; w < 2; w++) {
            mbarrier_wait(&smem.dq_full[w][n % 2], n / 2 % 2);
            mbarrier_arrive(last ? &smem.dq_ready[w] : &smem.sums_ready[w]);
            if (last) { continue; }
            mbarrier_wait(&smem.sums_ready[w], n % 2); // returns at once; synccheck requires a wait in every phase
            float *dq = reinterpret_cast<float*>(smem.dq[w]), *sum = reinterpret_cast<float*>(sums + 1024 * w);
            if (num_terms == 0) {
                bulk_store(sum, dq, BYTES);
            } else {
                bulk_add(sum, dq, BYTES);
            }
            tma_store_commit();
        }
        if (last) { continue; }
        // the consumers may overwrite dq that the bulk copies have read from shared memory
        tma_store_wait<1>();
        mbarrier_arrive(&smem.dq_ready[0]);
        tma_store_wait<0>();
        mbarrier_arrive(&smem.dq_ready[1]);
        tma_store_wait_written(); // the sums have reached global memory: the next key tile may use them
        async_proxy_fence();
        store_release(turn, num_terms + 1);
    }
}

// Adds up a warp's rows of dq and writes the scaled sums to args.dq_terms[set]. box is 0 or 1: the first or last 64 columns.
// This thread's partial sums are elements 0, 128, 256 and 384 of terms. NULL stands for zeros.
template <class SMem>
__device__ inline void attention_backward_sm90_store_dq_terms(const AttentionBackwardSm90Args& args,
                                                              const float4* terms, int set, int head, int row,
                                                              int box) {
    float scale = args.scale, sums[16];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float4 x = terms ? terms[128 * c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sums[4 * c] = scale * x.x, sums[4 * c + 1] = scale * x.y;
        sums[4 * c + 2] = scale * x.z, sums[4 * c + 3] = scale * x.w;
    }
    // a row of the set per warp, or (HS = 128) per pair of warps with the same rows
    size_t term = (size_t)set * (8 / SMem::BOXES) + row % SMem::QUERIES / 16;
    float2* to =
        reinterpret_cast<float2*>(args.dq_terms + ((term * args.NH + head % args.NH) * SMem::BOXES + box) * 64);
    to[threadIdx.x % 32] = fragment_column_sums(sums);
}

// Computes one work item, as one of the consumer warps. work: the item's index; n: how many items the block has done
// before; i: the step, counted over all items of the block; row: the warp's first row in a tile, where a row is a
// key in the key tile and a query in the query tiles.
//
// If args.dq_terms is not NULL, the items that write dq also sum its columns, for dbias.
// In the last batch element, the items that do not write dq set their rows of dq_terms to zero.
template <class SMem>
__device__ inline void attention_backward_sm90_compute_item(const AttentionBackwardSm90Args& args, SMem& smem,
                                                            const CUtensorMap& dqkv_map, int warpgroup, int row,
                                                            int work, int n, int& i) {
    constexpr int HS = SMem::HS, QUERIES = SMem::QUERIES, STEPS = SMem::STEPS, BOXES = SMem::BOXES;
    constexpr int PARTS = QUERIES / 64; // of a step, of 64 queries each: 1 or 2
    int lane = threadIdx.x % 32;
    float scale = args.scale;
    AttentionBackwardSm90Keys<HS> k, v;
    float4* dq_out = smem.dq[warpgroup] + threadIdx.x % 128;
    float4* dq_terms = smem.dq_terms[warpgroup] + threadIdx.x % 128;
    AttentionBackwardSm90Item<STEPS> item(args, work);
    // a variable for the batch element, head / args.NH, would cost 1 to 2%: ptxas then starts the exponentials later
    int head = item.head, j = item.j;
    int box = BOXES == 1 ? 0 : warpgroup; // of dq: with HS = 128 a warpgroup computes 64 columns, instead of 64 queries
    float dk[HS / 2] = {}, dv[HS / 2] = {};
    // The two matrices from which a warp's rows may be written after a step: of dS of the step before, which nobody reads
    // any more, and with HS = 128 the third matrix.
    auto staging = [&](int matrix, int step) {
        return BOXES == 2 && matrix == 1 ? smem.ds[2] : smem.ds[(step + 1) % 2] + matrix * 128 * 64;
    };
    // Starts to write factor * sum to a warp's 16 tokens, t + row to t + row + 15, of 64 columns, number `box` of dq (which = 0),
    // dk (1) or dv (2), through the warp's rows of the matrix `rows`.
    auto store = [&](int which, int box, floatX* rows, int t, const float(&sum)[32], float factor) {
        attention_forward_sm90_to_shared(rows + row * 64, sum, {factor, factor});
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            int vector = (which * args.NH + head % args.NH) * BOXES + box;
            tma_store_4d(&dqkv_map, rows + row * 64, 0, vector, t + row, head / args.NH);
            tma_store_commit();
        }
    };
    auto wait_for_stores = [&]() { // until they have read shared memory
        if (lane == 0) { tma_store_wait<0>(); }
        __syncwarp();
    };
    mbarrier_wait(&smem.k_full, n % 2);
    attention_backward_sm90_operand(k, smem.k, row);
    mbarrier_wait(&smem.v_full, n % 2);
    attention_backward_sm90_operand(v, smem.v, row);
    if (HS == 64) { // v is in registers
        __syncwarp();
        if (lane == 0) { mbarrier_arrive(&smem.v_empty); }
    }
#pragma unroll 1
    for (int step = 0; step < item.num_steps; step++, i++) {
        int query_tile = item.query_tile(step);
        bool last_term = item.is_last_term(query_tile);
        const floatX *q = smem.q[i % 2], *dout = smem.dout[i % 2];
        float s[PARTS][32], dp[PARTS][32], dq[32];
        uint32_t p[PARTS][16], ds[PARTS][16];
        mbarrier_wait(&smem.q_full[i % 2], i / 2 % 2);
        wgmma_fence();
        attention_backward_sm90_scores(s[0], k, q);
        wgmma_commit();
        mbarrier_wait(&smem.dout_full[i % 2], i / 2 % 2);
        wgmma_fence();
        attention_backward_sm90_scores(dp[0], v, dout);
        wgmma_commit();
        if constexpr (PARTS == 2) {
            wgmma_fence();
            attention_backward_sm90_scores(s[1], k, q + 64 * 64);
            wgmma_commit();
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const float4* stats = smem.stats[i % 2] + 32 * part;
            // in flight, the oldest first: this part's s and dp, then in part 0 of two the next s, in part 1 dv
            wgmma_wait<PARTS>();
            wgmma_hold(s[part]);
            if (query_tile < STEPS) {
                attention_backward_sm90_mask(s[part], row + lane / 4 - QUERIES * query_tile - 64 * part);
            }
            attention_backward_sm90_p(s[part], stats, scale * LOG2E);
            wgmma_wait<PARTS - 1>();
            wgmma_hold(dp[part]);
            if (PARTS == 2) { __syncwarp(); } // not for correctness: ptxas then schedules a loop that is 1% faster
            attention_backward_sm90_ds(p[part], ds[part], s[part], dp[part], stats);
            if (part + 1 < PARTS) {
                wgmma_fence();
                attention_backward_sm90_scores(dp[PARTS - 1], v, dout + 64 * 64);
                wgmma_commit();
            } else {
                if (HS == 128 && step + 1 == item.num_steps && lane == 0) { mbarrier_arrive(&smem.v_empty); }
                mbarrier_arrive(&smem.q_empty[i % 2]); // this thread has read stats
            }
            wgmma_fence();
            attention_backward_sm90_keys<HS>(dv, p[part], dout + 64 * 64 * part);
            wgmma_commit();
            if (part == 0 && (step == 0 || last_term)) { wait_for_stores(); }
            attention_backward_sm90_store_ds(smem.ds[i % 2] + 128 * 64 * part, ds[part], row);
        }
        tma_store_fence(); // wgmma reads through the async proxy
        wgmma_fence();
        named_barrier_sync(1, 256); // both warpgroups have written ds
        wgmma_fence();
        attention_backward_sm90_queries(dq, smem.ds[i % 2] + (warpgroup - box) * 128 * 64, smem.k + box * 128 * 64);
        wgmma_commit();
#pragma unroll
        for (int part = 0; part < PARTS; part++) { // dk runs while dq is written
            attention_backward_sm90_keys<HS>(dk, ds[part], q + 64 * 64 * part);
        }
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(dv);
        if (lane == 0) { mbarrier_arrive(&smem.dout_empty[i % 2]); }
        wgmma_hold(dq);
        if (step + 1 == item.num_steps && lane == 0) { mbarrier_arrive(&smem.k_empty); }

        mbarrier_wait(&smem.dq_ready[warpgroup], i % 2);
        if (!last_term) {
#pragma unroll
            for (int c = 0; c < 32; c += 4) { dq_out[32 * c] = make_float4(dq[c], dq[c + 1], dq[c + 2], dq[c + 3]); }
            tma_store_fence();
        } else {
            mbarrier_wait(&smem.sums_ready[warpgroup], i % 2);
            if (item.num_terms(query_tile) > 0) {
#pragma unroll
                for (int c = 0; c < 32; c += 4) {
                    float4 x = dq_out[32 * c];
                    dq[c] += x.x, dq[c + 1] += x.y, dq[c + 2] += x.z, dq[c + 3] += x.w;
                }
            }
            store(0, box, staging(0, i), 128 * j + QUERIES * query_tile - 64 * box, dq, scale);
            bool first = item.up ? query_tile == STEPS - 1 : step == 0;
            if (args.dq_terms) { attention_backward_sm90_sum_rows(dq_terms, dq, !first); }
        }
        mbarrier_arrive(&smem.dq_full[warpgroup][i % 2]);
        wgmma_wait<0>();
        wgmma_hold(dk);
        if (lane == 0) { mbarrier_arrive(&smem.q_empty[i % 2]); }
    }
    if (item.up || j == 0) { wait_for_stores(); } // of dq
#pragma unroll
    for (int m = 0; m < 2 * BOXES; m++) { // dk, then dv, 64 columns at a time
        const auto& sum = reinterpret_cast<const float(&)[32]>((m < BOXES ? dk : dv)[32 * (m % BOXES)]);
        if (m == 2) { wait_for_stores(); }
        store(1 + m / BOXES, m % BOXES, staging(m % 2, i - 1), 128 * j, sum, m < BOXES ? scale : 1.0f);
    }
    // all heads that go up belong to the last batch element
    if (args.dq_terms && (j == 0 || head / args.NH + 1 == args.num_heads / args.NH)) {
        attention_backward_sm90_store_dq_terms<SMem>(args, item.up || j == 0 ? dq_terms : NULL, head / args.NH + j,
                                                     head, row, box);
    }
}

// ---- kernel 11: persistent blocks that draw their work items by ticket ----

// Calls f(work, n) for the block's work items, n = 0, 1, ... All roles use it except the producer, which announces the
// items in smem.work.
template <class SMem, class F> __device__ inline void attention_backward_sm90_each(SMem& smem, int num_work, F f) {
#pragma unroll 1
    for (int n = 0;; n++) {
        mbarrier_wait(&smem.work_full[n % 2], n / 2 % 2);
        int work = smem.work[n % 2];
        mbarrier_arrive(&smem.work_empty[n % 2]);
        if (work >= num_work) { return; }
        f(work, n);
    }
}

// Returns the work item of a ticket. The heads that go down come first, group by group: key tiles from the last down, and for each all
// heads of the group. Then come the heads that go up, all together: key tiles from the first up.
__device__ inline int attention_backward_sm90_item(const AttentionBackwardSm90Args& args, unsigned ticket) {
    unsigned num_down = args.num_down;
    if (ticket >= num_down * args.num_tiles) {
        unsigned num_up = args.num_heads - num_down;
        ticket -= num_down * args.num_tiles;
        return (num_down + ticket % num_up + 1) * args.num_tiles - 1 - ticket / num_up;
    }
    unsigned first = ticket / (args.group * args.num_tiles) * args.group;
    unsigned num_heads = min(args.group, num_down - first);
    ticket -= first * args.num_tiles;
    return (first + ticket % num_heads) * args.num_tiles + ticket / num_heads;
}

// The producer thread. It draws the next ticket only after issuing all loads of the current item: a ticket drawn
// earlier would idle here while later items, which depend on it, start on other SMs.
template <class SMem> __device__ inline void attention_backward_sm90_producer(const AttentionBackwardSm90Args& args,
                                                                              SMem& smem, const CUtensorMap& qkv_map,
                                                                              const CUtensorMap& dout_map) {
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        int ticket = atomicAdd(args.ticket, 1), num_work = args.num_heads * args.num_tiles;
        int work = ticket < num_work ? attention_backward_sm90_item(args, ticket) : num_work;
        mbarrier_wait(&smem.work_empty[n % 2], (n / 2 + 1) % 2);
        smem.work[n % 2] = work;
        mbarrier_arrive(&smem.work_full[n % 2]);
        if (work >= num_work) { return; }
        attention_backward_sm90_load_item(args, smem, qkv_map, dout_map, work, n, i);
    }
}

template <int HS> __global__ void __launch_bounds__(384, 1)
    attention_backward_sm90_kernel11(AttentionBackwardSm90Args args, const __grid_constant__ CUtensorMap qkv_map,
                                     const __grid_constant__ CUtensorMap dout_map,
                                     const __grid_constant__ CUtensorMap dqkv_map) {
    extern __shared__ __align__(1024) unsigned char attention_backward_sm90_memory[]; // aligned for TMA's swizzle
    auto& smem = *reinterpret_cast<AttentionBackwardSMem<HS>*>(attention_backward_sm90_memory);
    if (shared_address(&smem) % 1024 != 0) { __trap(); }
    // the shuffle makes `warp` warp-uniform to the compiler
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    attention_backward_sm90_init(smem);
    grid_launch_dependents();
    grid_wait_dependency();
    if (warp < 4) {
        warpgroup_fewer_registers<40>();
        if (lane != 0) { return; }
        if (warp == 0) { attention_backward_sm90_producer(args, smem, qkv_map, dout_map); }
        if (warp == 1 || warp == 2) {
            int i = 0;
            attention_backward_sm90_each(smem, args.num_heads * args.num_tiles, [&](int work, int) {
                attention_backward_sm90_add_item(args, smem, warp - 1, work, i);
                i += AttentionBackwardSMem<HS>::STEPS * (work % args.num_tiles + 1);
            });
        }
        return;
    }
    warpgroup_more_registers<232>();
    int warpgroup = warp / 4 - 1, row = (warp - 4) * 16, i = 0;
    attention_backward_sm90_each(smem, args.num_heads * args.num_tiles, [&](int work, int n) {
        attention_backward_sm90_compute_item(args, smem, dqkv_map, warpgroup, row, work, n, i);
    });
    if (lane == 0) { tma_store_wait<0>(); }
}

// Kernel 11; if dbias is not NULL, it also sums the columns of dq and of dout. Requires sm_90a. HS is 64 or 128.
//
// Of dbias only the queries' third needs dqkv. dv of a key is the sum of P * dout over the queries, and P of a query adds up to
// 1 over the keys, so dv summed over all keys is dout summed over all queries. dk of a key is the sum of dS * q over the
// queries, and dS of a query adds up to 0 over the keys, because a number that is added to all of its scores does not change
// the softmax: dk summed over all keys is 0. The kernels' roundings are all that is left out.
template <int HS> void attention_backward_sm90(const AttentionBackwardArgs& a, const Execution& exec) {
    AttentionBackwardSm90Args args = attention_backward_sm90_args<HS>(a);
    // at most two items per SM of an H100; a constant, so that dq's bits do not depend on the GPU. They do depend on
    // whether a sequence is the last one of its batch
    args.num_down -= std::clamp(256 / args.num_tiles, 1, a.NH);
    int vectors = HS / 64 * a.NH, box_tokens = AttentionBackwardSMem<HS>::QUERIES;
    CUtensorMap qkv_map = tensor_map_heads(a.qkv, a.B, a.T, 3 * vectors, box_tokens);
    CUtensorMap dout_map = tensor_map_heads(a.dout, a.B, a.T, vectors, box_tokens);
    CUtensorMap dqkv_map = tensor_map_heads(a.dqkv, a.B, a.T, 3 * vectors, 16);
    int num_blocks_of_queries = attention_backward_sm90_stats<HS>(args, a, exec);
    int num_blocks = min(args.num_heads * args.num_tiles, exec.free_sms());
    launch_early(attention_backward_sm90_kernel11<HS>, dim3(num_blocks), dim3(384), sizeof(AttentionBackwardSMem<HS>),
                 exec, args, qkv_map, dout_map, dqkv_map);
    if (!a.dbias) { return; }
    column_sums<16>(a.dbias, NULL, NULL, args.dq_terms, 512 / HS * (a.B + args.num_tiles - 1), a.C, exec);
    column_sums<16>(a.dbias + 2 * a.C, NULL, NULL, args.dout_terms, num_blocks_of_queries, a.C, exec);
}
#endif

// The number of the kernel that attention_backward() runs; see the table below.
inline int attention_backward_choice(int HS) {
    if (attention_backward_accepts_sm90(HS) && has_sm90a()) { return 11; }
#if !defined(ENABLE_FP32)
    if (compiled_arch(attention_backward_kernel7<ATTENTION_BACKWARD_DQ, 64, 2, 4, 2, 64>) >= 80) { return 7; }
#endif
    return 3;
}

// dqkv (B,T,3,NH,HS) | dbias (3,NH,HS) += dqkv summed over all tokens, the gradient of the bias that qkv contains; may be
// NULL | scratch: attention_backward_scratch() floats | dout (B,T,NH,HS), qkv (B,T,3,NH,HS), out (B,T,NH,HS), lse
// (B,NH,T). lse is a natural logarithm. C = NH * HS. All pointers are aligned to 16 bytes.
// The kernel depends on the head size, the precision, and the architecture of the code that the binary has for this
// device:
//
//     HS                        bf16, fp16:  sm_90a (H100)   8.0 and up (A100)   older          fp32
//     64, 128                                kernel 11       kernel 7            kernel 3       kernel 3
//     other multiples of 8, up to 256        kernel 7        kernel 7            kernel 3       kernel 3
//
// Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
void attention_backward(floatX* dqkv, float* dbias, float* scratch, const floatX* dout, const floatX* qkv,
                        const floatX* out, const float* lse, int B, int T, int C, int NH, float scale,
                        const Execution& exec) {
    require(C % NH == 0 && C / NH % 8 == 0 && C / NH <= 256);
    int kernel = attention_backward_choice(C / NH);
    auto launch = attention_backward_plain; // kernel 3
#if !defined(ENABLE_FP32)
    if (kernel == 7) { launch = attention_backward_mma; }
    if (kernel == 11) { launch = C / NH == 64 ? attention_backward_sm90<64> : attention_backward_sm90<128>; }
#endif
    {
        double bytes = (8.0 * C * sizeof(floatX) + NH * sizeof(float)) * B * T;
        Op op(exec, bytes, 5.0 * B * T * T * C, "attention_backward");
        launch({dqkv, dbias, scratch, dout, qkv, out, lse, B, T, C, NH, scale}, exec);
    }
    if (dbias && kernel != 11) { matmul_backward_bias(dbias, scratch, dqkv, B * T, 3 * C, exec); }
}
// ==== end promoted: attention_backward ====
