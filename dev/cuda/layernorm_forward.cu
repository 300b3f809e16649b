/* layernorm_forward: out = (inp - mean) * rstd * weight + bias, per row of C elements; rstd = 1 / sqrt(var + epsilon)

   out (N,C) floatX out | mean, rstd (N) float out | inp (N,C) floatX in | weight, bias (C) floatX in; N = B*T
   Bound: memory, 2*N*C*sizeof(floatX) bytes. Constraint: C % 8 == 0; C <= 6144 in fp32, 12288 in 16 bits.
   Error of out against the fp64 reference: half an ulp of floatX for the final rounding, plus the error of the fp32
   arithmetic: 8 fp32 ulps of the result and 32 fp32 ulps of 1, because terms of size up to 5 cancel.
   Error of mean: 4 fp32 ulps of the result and of 1; of rstd: 16 fp32 ulps of the result.
   Kernel 13 has nothing to choose: its block has a thread per vector of a row.
   Source: Ba et al. 2016, arXiv:1607.06450; kernel 5: Chan, Golub and LeVeque 1983, on merging variances.

   Kernels (this list is written by versions.sh):
     1  one thread per row, three passes over memory
     2  one block per row, sums through shared memory
     3  one warp per row, sums by shuffles
     4  128-bit loads and stores
     5  statistics in one pass, by merging (slower than 4)
     6  one block per row, the row kept in shared memory (slower than 4)
     7  one or a few warps per row, the row in registers, 128-bit (promoted)
     8  persistent, weight and bias in registers too (slower than 7)
     9  persistent, the next row prefetched into registers (slower than 7)
    10  persistent, the next rows prefetched by cp.async (slower than 7)
    11  7 with the row in shared memory: more warps per SM
    12  11 with two rows per warp, weight and bias read once
    13  one vector per thread, one block per row (slower than 12)

   nvcc -O3 --use_fast_math layernorm_forward.cu -o layernorm_forward      (or: make layernorm_forward)
   ./layernorm_forward 7      check kernel 7 against the CPU and sweep its block sizes
   ./layernorm_forward        every kernel, side by side                                         */
#include "../../llmc/ptx.cuh"
#include "bench.h"

// ---- kernel 1: one thread per row, three passes over memory -----------------------------------

__global__ void layernorm_forward_kernel1(floatX* out, float* mean, float* rstd, const floatX* inp,
                                          const floatX* weight, const floatX* bias, int N, int C) {
    size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= (size_t)N) { return; }
    const floatX* x = inp + row * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < C; c++) { sum += (float)x[c]; }
    float m = sum / C;
    for (int c = 0; c < C; c++) {
        float centered = (float)x[c] - m;
        squares += centered * centered;
    }
    float r = rsqrtf(squares / C + NORM_EPSILON);
    for (int c = 0; c < C; c++) {
        out[row * C + c] = (floatX)(((float)x[c] - m) * r * (float)weight[c] + (float)bias[c]);
    }
    mean[row] = m;
    rstd[row] = r;
}

void layernorm_forward1(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_forward_kernel1<<<ceil_div(N, block_size), block_size, 0, stream>>>(out, mean, rstd, inp, weight, bias, N,
                                                                                  C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one block per row: coalesced reads, sums through shared memory --------

__global__ void layernorm_forward_kernel2(floatX* out, float* mean, float* rstd, const floatX* inp,
                                          const floatX* weight, const floatX* bias, int C) {
    __shared__ float shared[32];
    const floatX* x = inp + (size_t)blockIdx.x * C;
    floatX* y = out + (size_t)blockIdx.x * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { sum += (float)x[c]; }
    float m = block_sum(sum, shared) / C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float centered = (float)x[c] - m;
        squares += centered * centered;
    }
    float r = rsqrtf(block_sum(squares, shared) / C + NORM_EPSILON);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        y[c] = (floatX)(((float)x[c] - m) * r * (float)weight[c] + (float)bias[c]);
    }
    if (threadIdx.x == 0) { mean[blockIdx.x] = m, rstd[blockIdx.x] = r; }
}

void layernorm_forward2(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_forward_kernel2<<<N, block_size, 0, stream>>>(out, mean, rstd, inp, weight, bias, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: one warp per row: sums by shuffles, no barrier -----------------------------------

__global__ void layernorm_forward_kernel3(floatX* out, float* mean, float* rstd, const floatX* inp,
                                          const floatX* weight, const floatX* bias, int N, int C) {
    int lane = threadIdx.x % 32;
    size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= (size_t)N) { return; }
    const floatX* x = inp + row * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane; c < C; c += 32) { sum += (float)x[c]; }
    float m = warp_sum(sum) / C;
    for (int c = lane; c < C; c += 32) {
        float centered = (float)x[c] - m;
        squares += centered * centered;
    }
    float r = rsqrtf(warp_sum(squares) / C + NORM_EPSILON);
    for (int c = lane; c < C; c += 32) {
        out[row * C + c] = (floatX)(((float)x[c] - m) * r * (float)weight[c] + (float)bias[c]);
    }
    if (lane == 0) { mean[row] = m, rstd[row] = r; }
}

void layernorm_forward3(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_forward_kernel3<<<ceil_div(N, block_size / 32), block_size, 0, stream>>>(out, mean, rstd, inp, weight,
                                                                                       bias, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: kernel 3 with 128-bit loads and stores: an eighth of the instructions for as many bytes ----

__global__ void layernorm_forward_kernel4(floatX* out, float* mean, float* rstd, const floatX* inp,
                                          const floatX* weight, const floatX* bias, int N, int C) {
    int lane = threadIdx.x % 32;
    size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= (size_t)N) { return; }
    const floatX* x = inp + row * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        x128 xv = load128(x + c);
        for (int k = 0; k < x128::size; k++) { sum += (float)xv[k]; }
    }
    float m = warp_sum(sum) / C;
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        x128 xv = load128(x + c);
        for (int k = 0; k < x128::size; k++) {
            float centered = (float)xv[k] - m;
            squares += centered * centered;
        }
    }
    float r = rsqrtf(warp_sum(squares) / C + NORM_EPSILON);
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        x128 xv = load128(x + c), w = load128(weight + c), b = load128(bias + c), y;
        for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(((float)xv[k] - m) * r * (float)w[k] + (float)b[k]); }
        store128(out + row * C + c, y);
    }
    if (lane == 0) { mean[row] = m, rstd[row] = r; }
}

void layernorm_forward4(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    layernorm_forward_kernel4<<<ceil_div(N, block_size / 32), block_size, 0, stream>>>(out, mean, rstd, inp, weight,
                                                                                       bias, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: one pass for the statistics: partial means and variances are merged, so a row is read twice ----

// Count, mean and sum of squared deviations from the mean, for a subset of the row. Merging two subsets is exact up to
// rounding, even if their means are far apart.
struct LayernormForwardPart {
    float count, mean, squares;
};
__device__ inline LayernormForwardPart layernorm_forward_merge(LayernormForwardPart a, LayernormForwardPart b) {
    float count = a.count + b.count;
    float share = count > 0.0f ? b.count / count : 0.0f;
    float delta = b.mean - a.mean;
    return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
}

__global__ void layernorm_forward_kernel5(floatX* out, float* mean, float* rstd, const floatX* inp,
                                          const floatX* weight, const floatX* bias, int N, int C) {
    int lane = threadIdx.x % 32;
    size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= (size_t)N) { return; }
    const floatX* x = inp + row * C;
    LayernormForwardPart all = {0.0f, 0.0f, 0.0f};
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        x128 xv = load128(x + c);
        LayernormForwardPart part = {(float)x128::size, 0.0f, 0.0f};
        for (int k = 0; k < x128::size; k++) { part.mean += (float)xv[k] / x128::size; }
        for (int k = 0; k < x128::size; k++) {
            float centered = (float)xv[k] - part.mean;
            part.squares += centered * centered;
        }
        all = layernorm_forward_merge(all, part);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        LayernormForwardPart other = {__shfl_xor_sync(0xFFFFFFFFu, all.count, offset),
                                      __shfl_xor_sync(0xFFFFFFFFu, all.mean, offset),
                                      __shfl_xor_sync(0xFFFFFFFFu, all.squares, offset)};
        // both lanes of a pair merge the lower lane's subset first, so that both get the same bits
        all = lane & offset ? layernorm_forward_merge(other, all) : layernorm_forward_merge(all, other);
    }
    float m = all.mean, r = rsqrtf(all.squares / C + NORM_EPSILON);
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        x128 xv = load128(x + c), w = load128(weight + c), b = load128(bias + c), y;
        for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(((float)xv[k] - m) * r * (float)w[k] + (float)b[k]); }
        store128(out + row * C + c, y);
    }
    if (lane == 0) { mean[row] = m, rstd[row] = r; }
}

void layernorm_forward5(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    layernorm_forward_kernel5<<<ceil_div(N, block_size / 32), block_size, 0, stream>>>(out, mean, rstd, inp, weight,
                                                                                       bias, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: one block per row, which is kept in shared memory, so that global memory is read once ------

__global__ void layernorm_forward_kernel6(floatX* out, float* mean, float* rstd, const floatX* inp,
                                          const floatX* weight, const floatX* bias, int C) {
    __shared__ float shared[32];
    extern __shared__ __align__(128) int4 layernorm_forward_row[]; // (C) floatX
    floatX* x = (floatX*)layernorm_forward_row;
    float sum = 0.0f, squares = 0.0f;
    // each thread reads back only what it wrote itself, so the row needs no barriers besides those in block_sum()
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(inp + (size_t)blockIdx.x * C + c);
        store128(x + c, xv);
        for (int k = 0; k < x128::size; k++) { sum += (float)xv[k]; }
    }
    float m = block_sum(sum, shared) / C;
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(x + c);
        for (int k = 0; k < x128::size; k++) {
            float centered = (float)xv[k] - m;
            squares += centered * centered;
        }
    }
    float r = rsqrtf(block_sum(squares, shared) / C + NORM_EPSILON);
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(x + c), w = load128(weight + c), b = load128(bias + c), y;
        for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(((float)xv[k] - m) * r * (float)w[k] + (float)b[k]); }
        store128(out + (size_t)blockIdx.x * C + c, y);
    }
    if (threadIdx.x == 0) { mean[blockIdx.x] = m, rstd[blockIdx.x] = r; }
}

void layernorm_forward6(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    require(C * sizeof(floatX) <= 48 * 1024 - 32 * sizeof(float));
    layernorm_forward_kernel6<<<N, block_size, C * sizeof(floatX), stream>>>(out, mean, rstd, inp, weight, bias, C);
    cudaCheck(cudaGetLastError());
}

#include "layernorm_forward.cuh" // kernel 7

// ---- kernel 8: persistent; weight and bias stay in registers too, so fewer warps fit on an SM -----------------

template <int num_vecs> __global__ void __launch_bounds__(512)
    layernorm_forward_kernel8(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, int N, int C, int row_warps) {
    __shared__ float partial[2][16];
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    x128 w[num_vecs] = {}, b[num_vecs] = {};
    at.load(w, weight, 0), at.load(b, bias, 0);
    for (int row = at.row; row < N; row += at.row_step) {
        x128 x[num_vecs] = {};
        at.load(x, inp, row);
        float m = at.mean(at.sum(x), partial[0]), r = at.rstd(x, m, NORM_EPSILON, partial[1]);
        at.normalise(out, mean, rstd, row, x, m, r, w, b);
    }
}

void layernorm_forward8(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_forward_launch([](auto n) { return layernorm_forward_kernel8<n.value>; }, {true, 1, 0}, N, C, stream,
                             block_size, out, mean, rstd, inp, weight, bias);
}

// ---- kernel 9: persistent; the next row is loaded into registers while the current row is summed ---------

template <int num_vecs> __global__ void __launch_bounds__(512)
    layernorm_forward_kernel9(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, int N, int C, int row_warps) {
    __shared__ float partial[2][16];
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    x128 next[num_vecs] = {};
    if (at.row < N) { at.load(next, inp, at.row); }
    for (int row = at.row; row < N; row += at.row_step) {
        Floats128<floatX> x[num_vecs];
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            for (int k = 0; k < x128::size; k++) { x[j][k] = (float)next[j][k]; }
        }
        float sum = at.sum(x);
        if (row + at.row_step < N) { at.load(next, inp, row + at.row_step); }
        float m = at.mean(sum, partial[0]), r = at.rstd(x, m, NORM_EPSILON, partial[1]);
        at.normalise(out, mean, rstd, row, x, m, r, weight, bias);
    }
}

void layernorm_forward9(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                        const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_forward_launch([](auto n) { return layernorm_forward_kernel9<n.value>; }, {true, 1, 0}, N, C, stream,
                             block_size, out, mean, rstd, inp, weight, bias);
}

// ---- kernel 10: persistent; a ring of 4 stages in shared memory, filled by cp.async, holds the next rows ------

// Each thread reads only what it copied itself, so it waits for its own copies and needs no barrier.
constexpr int LAYERNORM_FORWARD_STAGES = 4;

template <int num_vecs> __global__ void __launch_bounds__(512)
    layernorm_forward_kernel10(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                               const floatX* bias, int N, int C, int row_warps) {
    __shared__ float partial[2][16];
    extern __shared__ __align__(128) int4 layernorm_forward_ring[]; // (stages, num_vecs, blockDim.x)
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    auto slot = [&](int stage, int j) {
        return layernorm_forward_ring + (stage * num_vecs + j) * blockDim.x + threadIdx.x;
    };
    // one commit group per row, empty past the last row, so that the number of groups in flight stays the same
    auto fetch = [&](int row, int stage) {
        if (row < N) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                if (at.inside(j)) { cp_async_16(slot(stage, j), inp + at.start(row) + j * at.stride); }
            }
        }
        cp_async_commit();
    };
    int row = at.row, stage = 0;
    for (int i = 0; i < LAYERNORM_FORWARD_STAGES; i++) { fetch(row + i * at.row_step, i); }
    for (; row < N; row += at.row_step) {
        cp_async_wait<LAYERNORM_FORWARD_STAGES - 1>();
        Floats128<floatX> x[num_vecs];
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            x128 xv = at.inside(j) ? load128((const floatX*)slot(stage, j)) : x128();
            for (int k = 0; k < x128::size; k++) { x[j][k] = (float)xv[k]; }
        }
        float m = at.mean(at.sum(x), partial[0]);
        fetch(row + LAYERNORM_FORWARD_STAGES * at.row_step, stage); // the row in this stage is in registers now
        stage = (stage + 1) % LAYERNORM_FORWARD_STAGES;
        float r = at.rstd(x, m, NORM_EPSILON, partial[1]);
        at.normalise(out, mean, rstd, row, x, m, r, weight, bias);
    }
}

// If the device code has no cp.async (compute capability below 8.0), kernel 9 runs instead.
void layernorm_forward10(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                         const floatX* bias, int N, int C, cudaStream_t stream, int block_size) {
    if (compiled_arch(layernorm_forward_kernel10<1>) < 80) {
        layernorm_forward9(out, mean, rstd, inp, weight, bias, N, C, stream, block_size);
        return;
    }
    layernorm_forward_launch([](auto n) { return layernorm_forward_kernel10<n.value>; },
                             {true, 1, LAYERNORM_FORWARD_STAGES}, N, C, stream, block_size, out, mean, rstd, inp,
                             weight, bias);
}

// ---- kernels 11 and 12: rows in shared memory, half the registers, more warps; 12 takes two rows per warp ------

// Like layernorm_forward_row_sum, for several rows at once, with one barrier; the shuffles of different rows overlap.
template <int rows>
__device__ inline void layernorm_forward_row_sums(float x[rows], float partial[rows][16], int row_warps) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int i = 0; i < rows; i++) { x[i] += __shfl_xor_sync(0xFFFFFFFFu, x[i], offset); }
    }
    if (row_warps == 1) { return; }
#pragma unroll
    for (int i = 0; i < rows; i++) {
        if (threadIdx.x % 32 == 0) { partial[i][threadIdx.x / 32] = x[i]; }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < rows; i++) {
        x[i] = 0.0f;
        for (int w = 0; w < row_warps; w++) { x[i] += partial[i][w]; }
    }
}

constexpr int layernorm_forward_min_blocks(int rows) { // resident blocks per SM, of 256 threads each
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
    return rows == 1 ? 8 : 5;
#else
    return rows == 1 ? 4 : 3; // other SMs may hold no more than 1024 threads
#endif
}

// Kernel 7 keeps the row in registers as floats, with 57 registers and 32 warps per SM. Kernel 11 (rows = 1) reads it
// from shared memory three times, with 32 registers and 64 warps. Kernel 12 (rows = 2) has 48 registers and 40 warps,
// but twice the bytes in flight per warp, and one read of weight and bias for two rows.

// The persistent kernel 8 also saves reads of weight and bias. But in kernels 8 to 10 each block has a fixed share of
// the rows, and the SMs do not get equal shares of the bandwidth, so all wait for the slowest SM. The short-lived
// blocks of kernels 7, 11 and 12 are scheduled on whichever SM has room.
template <int rows, int num_vecs> __global__ void __launch_bounds__(256, layernorm_forward_min_blocks(rows))
    layernorm_forward_kernel11(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                               const floatX* bias, int N, int C, int row_warps) {
    __shared__ float partial[2][rows][16];
    extern __shared__ __align__(128) int4 layernorm_forward_rows[]; // (rows, num_vecs, blockDim.x)
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    int row = at.row * rows;
    if (row >= N) { return; }
    bool second_valid = row + rows - 1 < N;
    float m[rows], r[rows];
    int4* own = layernorm_forward_rows + threadIdx.x; // vector j of row i: own[(i * num_vecs + j) * blockDim.x]

    const floatX* from = inp + at.start(row);
    int4 bits[rows][num_vecs] = {};
#pragma unroll
    for (int i = 0; i < rows; i++) {
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (at.inside(j) && (i == 0 || second_valid)) {
                bits[i][j] = vec128_bits(load128(from + i * C + j * at.stride));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < rows; i++) {
        m[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            own[(i * num_vecs + j) * blockDim.x] = bits[i][j];
            x128 x = vec128_from_bits<floatX>(bits[i][j]);
            for (int k = 0; k < x128::size; k++) { m[i] += (float)x[k]; }
        }
    }
    layernorm_forward_row_sums<rows>(m, partial[0], row_warps);
    __syncwarp(); // no thread needs it; it makes the compiler reread the rows from shared memory, not keep registers
#pragma unroll
    for (int i = 0; i < rows; i++) {
        m[i] *= at.inv_C, r[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (!at.inside(j)) { continue; }
            x128 x = vec128_from_bits<floatX>(own[(i * num_vecs + j) * blockDim.x]);
            for (int k = 0; k < x128::size; k++) {
                float centered = (float)x[k] - m[i];
                r[i] += centered * centered;
            }
        }
    }
    layernorm_forward_row_sums<rows>(r, partial[1], row_warps);
    __syncwarp(); // as above
#pragma unroll
    for (int i = 0; i < rows; i++) { r[i] = rsqrtf(r[i] * at.inv_C + NORM_EPSILON); }
    floatX* to = out + at.start(row);
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (!at.inside(j)) { continue; }
        x128 w = at.parameter(weight, j), b = at.parameter(bias, j), y;
#pragma unroll
        for (int i = 0; i < rows; i++) {
            x128 x = vec128_from_bits<floatX>(own[(i * num_vecs + j) * blockDim.x]);
            for (int k = 0; k < x128::size; k++) {
                y[k] = (floatX)(((float)x[k] - m[i]) * r[i] * (float)w[k] + (float)b[k]);
            }
            if (i == 0 || second_valid) { store128(to + i * C + j * at.stride, y); }
        }
    }
    if (at.first != 0) { return; }
    mean[row] = m[0], rstd[row] = r[0];
    if (rows == 2 && second_valid) { mean[row + 1] = m[rows - 1], rstd[row + 1] = r[rows - 1]; }
}

template <int rows> void layernorm_forward11(floatX* out, float* mean, float* rstd, const floatX* inp,
                                             const floatX* weight, const floatX* bias, int N, int C,
                                             cudaStream_t stream, int block_size) {
    if (C / x128::size > 8 * 32 * LAYERNORM_FORWARD_OTHER_MAX_VECS) { // more warps than the 8 of __launch_bounds__
        layernorm_forward(out, mean, rstd, inp, weight, bias, N, C, NORM_EPSILON, stream);
        return;
    }
    require(block_size <= 256);
    layernorm_forward_launch([](auto n) { return layernorm_forward_kernel11<rows, n.value>; }, {false, rows, rows}, N,
                             C, stream, block_size, out, mean, rstd, inp, weight, bias);
}

// ---- kernel 13: kernel 7 with one vector per thread and one row per block, with as many warps as the row needs ----

void layernorm_forward13(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                         const floatX* bias, int N, int C, cudaStream_t stream, int) {
    require(C % x128::size == 0);
    int row_warps = ceil_div(C / x128::size, 32);
    if (row_warps > 16) { // longer rows take kernel 7
        layernorm_forward(out, mean, rstd, inp, weight, bias, N, C, NORM_EPSILON, stream);
        return;
    }
    layernorm_forward_kernel7<1>
        <<<N, 32 * row_warps, 0, stream>>>(out, mean, rstd, inp, weight, bias, N, C, NORM_EPSILON, row_warps);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    cudaStream_t stream = b.stream;
    // A large mean shows whether the variance is summed around it. In out, the mean's rounding error is multiplied by rstd: the
    // mean has a few ulps of 30 in the second case, and rstd is 316, one over the root of eps, in the third.
    int which = b.cases({"normal", "large mean", "equal values in each row", "another epsilon"});
    float out_terms[] = {1, 31, 316, 1}, rstd_ulps[] = {16, 32, 16, 16};
    bool other_epsilon = which == 3; // only kernel 7 has it as an argument
    float epsilon = other_epsilon ? 0.5f : NORM_EPSILON;
    Buffer<floatX> inp = which == 2
                             ? b.input_from<floatX>("inp", n, [=](float* x) { bench_fill_rows(x, N, C, b.state.seed); })
                             : b.input<floatX>("inp", n, 1.0f, which == 1 ? 30.0f : 0.0f);
    Buffer<floatX> weight = b.input<floatX>("weight", C);
    Buffer<floatX> bias = b.input<floatX>("bias", C);
    Tolerance rounding = {out_terms[which] * 32 * ulp_of<float>(), 0.5f * ulp_of<floatX>() + 8 * ulp_of<float>()};
    Buffer<floatX> out = b.output<floatX>("out", n, rounding);
    Buffer<float> mean = b.output<float>("mean", N, ulps<float>(4, 1.0f));
    Buffer<float> rstd = b.output<float>("rstd", N, ulps<float>(rstd_ulps[which], 0.0f));
    b.reference([=] {
        layernorm_forward_cpu(out.host, mean.host, rstd.host, inp.host, weight.host, bias.host, N, C, epsilon);
    });
    b.cost(2.0 * n * sizeof(floatX), 0);

    auto variant = [&](int number, const char* what, auto launch, std::vector<int> block_sizes) {
        if (other_epsilon) { return; }
        b.kernel(
            number, what, [=](int bs) { launch(out, mean, rstd, inp, weight, bias, N, C, stream, bs); }, block_sizes);
    };
    variant(1, "one thread per row, three passes over memory", layernorm_forward1, {64, 128, 256, 512, 1024});
    if (which == 1) { b.coarser(8); } // a thread adds up a whole row, in order: the error of the sum grows with C
    variant(2, "one block per row, sums through shared memory", layernorm_forward2, {64, 128, 256, 512, 1024});
    variant(3, "one warp per row, sums by shuffles", layernorm_forward3, {64, 128, 256, 512, 1024});
    variant(4, "128-bit loads and stores", layernorm_forward4, {64, 128, 256, 512, 1024});
    variant(5, "statistics in one pass, by merging", layernorm_forward5, {64, 128, 256, 512, 1024});
    variant(6, "one block per row, the row kept in shared memory", layernorm_forward6, {64, 128, 256, 512, 1024});
    b.kernel(7, "one or a few warps per row, the row in registers, 128-bit",
             [=](int bs) {
                 layernorm_forward(out, mean, rstd, inp, weight, bias, N, C, epsilon, {stream, bs});
             },
             {bench_tunable("layernorm_forward")});
    b.promoted(7);
    b.huge(2.0 * (double)BenchHuge::elements(C) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements(C), num_rows = num / C;
        std::vector<float> w(C), shift(C);
        h.fill(w.data(), 0, C, 1), h.fill(shift.data(), 0, C, 2);
        floatX *x = h.input<floatX>(num, 0), *y = h.output<floatX>(num);
        float *m = h.output<float>(num_rows), *r = h.output<float>(num_rows);
        layernorm_forward(y, m, r, x, h.upload<floatX>(w), h.upload<floatX>(shift), (int)num_rows, C, NORM_EPSILON,
                          h.stream);
        h.compare("out", y, num_rows, C, rounding, [&](size_t row, float* want) {
            float row_mean, row_rstd;
            h.fill(want, row * C, C, 0);
            layernorm_forward_cpu(want, &row_mean, &row_rstd, want, w.data(), shift.data(), 1, C);
        });
    });
    variant(8, "persistent, weight and bias in registers too", layernorm_forward8, {64, 128, 256, 512});
    variant(9, "persistent, the next row prefetched into registers", layernorm_forward9, {64, 128, 256, 512});
    variant(10, "persistent, the next rows prefetched by cp.async", layernorm_forward10, {64, 128, 256, 512});
    variant(11, "7 with the row in shared memory: more warps per SM", layernorm_forward11<1>, {64, 128, 256});
    variant(12, "11 with two rows per warp, weight and bias read once", layernorm_forward11<2>, {64, 128, 256});
    variant(13, "one vector per thread, one block per row", layernorm_forward13, {0});
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "layernorm_forward", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8},
                       {3, 17, 776},
                       {1, 5, 768},
                       {2, 33, 1600},
                       {1, 7, 3080},
                       {1, 3, 6144},
                       {7, 129, 264},
                       {2, 9, 1288},
                       {1, 3, 2048}});
}
