/* matmul_forward: out = gelu?(inp weight^T + bias) + residual, a linear layer fused with its epilogue

   out (N,OC) floatX out | pre_gelu (N,OC) floatX out, GELU's input (kernel 28: its slope), or NULL | inp (N,C) floatX in |
   weight (OC,C) floatX in | bias (OC) floatX in, or NULL | residual (N,OC) floatX in, or NULL; N = B*T
   Bound: compute, 2*N*C*OC FLOPs. Constraint: C % 8 == 0, OC % 8 == 0; not both GELU and residual; GELU needs bias.
   Error to the fp64 reference: one ulp of floatX. Where terms cancel, also 16 fp32 roundings of the sum of their
   magnitudes, which is 0.64 * sqrt(C) here. After GELU, 1.5 ulp (fp32: 8) of |out| + 0.1, because pre_gelu may be
   rounded before GELU.
   Tuned: stages of the rings of kernels 13 to 22, form of 27. The other kernels have the tiles that shared memory and
   registers suggest; kernels 0 and 26 are the library, which chooses by itself.
   Source: the tanh form of GELU is Hendrycks and Gimpel 2016, arXiv:1606.08415; wgmma and TMA: the PTX ISA.

   Kernels (this list is written by versions.sh):
     0  cuBLASLt, first candidate
     1  one thread per element
     2  one warp per element: coalesced
     3  32x32 tiles in shared memory
     4  64x64 tiles, 8 elements of a column per thread
     5  128x128 tiles, 8x8 elements per thread
     6  128-bit accesses of device memory
     7  transposed tiles: no bank conflicts
     8  double buffer, next tile in registers
     9  a tile of 64x32 per warp
    10  mma.sync, 32-bit loads of fragments
    11  ldmatrix
    12  swizzled instead of padded
    13  ring of cp.async stages
    14  steps of 64 columns
    15  wgmma on the ring of cp.async stages
    16  TMA and mbarriers
    17  producer warp and two consumer warpgroups (slower than 16)
    18  persistent: the ring runs on from tile to tile (slower than 16)
    19  ping-pong: a tile per consumer (loses to 16)
    20  19 with results stored by stmatrix and in rows of 128 bytes
    21  results stored by TMA
    22  128x192 tiles
    23  order of tiles: in groups of 16 rows
    24  clusters of two, weight tiles by multicast (slower than 22)
    25  cuBLASLt for the product, epilogue in a second kernel
    26  cuBLASLt, epilogue fused, algorithms timed
    27  gemm.cuh (promoted)
    28  27 that saves GELU's slope instead of its argument (kind 4)
     kind 4: 1 with GELU's slope saved

   nvcc -O3 --use_fast_math matmul_forward.cu -lcublasLt -o matmul_forward      (or: make matmul_forward)
   ./matmul_forward 8             check kernel 8 against the CPU
   ./matmul_forward               every kernel, side by side
   ./matmul_forward -C 768 -V 2304 --kind 3      here -V is OC; the kind is the epilogue: 0 bias, 1 bias and GELU,
                                  2 bias and residual, 3 none, 5 bias and GELU, whose input is not stored             */
#include "../../llmc/cublas_common.cuh"
#include "bench.h"
#include "gemm.cuh"
#include "gemm_forms.cuh"

// ---- shared by the kernels: arguments, epilogue, tiles ----
// Loops over register arrays are unrolled by a pragma: an array with an index that the compiler does not know would be
// in local memory.

struct MatmulForwardArgs {
    floatX *out, *pre_gelu;        // (N,OC); pre_gelu may be NULL
    const floatX *inp, *weight;    // (N,C), (OC,C)
    const floatX *bias, *residual; // (OC), (N,OC), each may be NULL
    int N, C, OC;
};

// n neighbouring elements of a row, accessed at once if they are 16 bytes or less
template <int n> struct alignas(n * sizeof(floatX) < 16 ? n * sizeof(floatX) : 16) MatmulRun { floatX v[n]; };

// The epilogue for n neighbouring elements of a row; col is a multiple of n.
template <int n> __device__ inline void matmul_forward_finish(const MatmulForwardArgs& f, const float* y, int row,
                                                              int col, MatmulRun<n>& out, MatmulRun<n>& pre_gelu) {
    MatmulRun<n> bias = {}, residual = {};
    if (f.bias) { bias = *reinterpret_cast<const MatmulRun<n>*>(f.bias + col); }
    if (f.residual) { residual = *reinterpret_cast<const MatmulRun<n>*>(f.residual + (size_t)row * f.OC + col); }
#pragma unroll
    for (int k = 0; k < n; k++) {
        float x = y[k] + (f.bias ? (float)bias.v[k] : 0.0f);
        pre_gelu.v[k] = (floatX)x;
        if (f.pre_gelu) { x = gelu(x); }
        out.v[k] = (floatX)(x + (f.residual ? (float)residual.v[k] : 0.0f));
    }
}

// The same, and the stores.
template <int n>
__device__ inline void matmul_forward_store(const MatmulForwardArgs& f, const float* y, int row, int col) {
    if (row >= f.N || col >= f.OC) { return; }
    size_t i = (size_t)row * f.OC + col;
    MatmulRun<n> out, pre_gelu;
    matmul_forward_finish<n>(f, y, row, col, out, pre_gelu);
    if (f.pre_gelu) { *reinterpret_cast<MatmulRun<n>*>(f.pre_gelu + i) = pre_gelu; }
    *reinterpret_cast<MatmulRun<n>*>(f.out + i) = out;
}

// Tiles are numbered along OC first. So blocks that run at the same time share rows of inp, and the weight stays in L2.
__device__ inline void matmul_forward_tile(const MatmulForwardArgs& f, int tile, int rows, int columns, int* n0,
                                           int* o0) {
    int num_columns = ceil_div(f.OC, columns);
    *n0 = tile / num_columns * rows;
    *o0 = tile % num_columns * columns;
}
static int matmul_forward_num_tiles(const MatmulForwardArgs& f, int rows, int columns) {
    size_t num_tiles = ceil_div((size_t)f.N, (size_t)rows) * ceil_div((size_t)f.OC, (size_t)columns);
    require(num_tiles <= INT_MAX && f.C % 8 == 0 && f.OC % 8 == 0);
    return (int)num_tiles;
}

// ---- kernel 0: cuBLASLt untuned: the whole epilogue fused, the library's first candidate ----

#include "matmul_forward.cuh" // kernels 25 to 27

void matmul_forward0(const MatmulForwardArgs& f, Execution exec) {
    exec.times_algorithms = false;
    matmul_forward26(f.out, f.pre_gelu, f.inp, f.weight, f.bias, f.residual, f.N, f.C, f.OC, exec);
}

// ---- kernel 1: one thread per element of out; neighbouring lanes read weight a whole row apart ----

__global__ void matmul_forward_kernel1(MatmulForwardArgs f) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)f.N * f.OC) { return; }
    int row = (int)(i / f.OC), col = (int)(i % f.OC);
    float sum = 0.0f;
    for (int k = 0; k < f.C; k++) {
        sum += (float)f.inp[(size_t)row * f.C + k] * (float)f.weight[(size_t)col * f.C + k];
    }
    matmul_forward_store<1>(f, &sum, row, col);
}

void matmul_forward1(const MatmulForwardArgs& f, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)f.N * f.OC, (size_t)block_size);
    require(num_blocks <= INT_MAX);
    matmul_forward_kernel1<<<(unsigned)num_blocks, block_size, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one warp per element of out: neighbouring lanes read neighbouring columns ----

__global__ void matmul_forward_kernel2(MatmulForwardArgs f) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (i >= (size_t)f.N * f.OC) { return; }
    int row = (int)(i / f.OC), col = (int)(i % f.OC), lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int k = lane; k < f.C; k += 32) {
        sum += (float)f.inp[(size_t)row * f.C + k] * (float)f.weight[(size_t)col * f.C + k];
    }
    sum = warp_sum(sum);
    if (lane == 0) { matmul_forward_store<1>(f, &sum, row, col); }
}

void matmul_forward2(const MatmulForwardArgs& f, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)f.N * f.OC, (size_t)block_size / 32);
    require(num_blocks <= INT_MAX);
    matmul_forward_kernel2<<<(unsigned)num_blocks, block_size, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: 32x32 tiles of both operands in shared memory, each value read 1/32 as often ----

__global__ void __launch_bounds__(1024) matmul_forward_kernel3(MatmulForwardArgs f) {
    __shared__ float inp[32][33], weight[32][33]; // 33: a column touches 32 banks
    int n0, o0, x = threadIdx.x % 32, y = threadIdx.x / 32;
    matmul_forward_tile(f, blockIdx.x, 32, 32, &n0, &o0);
    float sum = 0.0f;
    for (int k0 = 0; k0 < f.C; k0 += 32) {
        bool inside = k0 + x < f.C;
        inp[y][x] = inside && n0 + y < f.N ? (float)f.inp[(size_t)(n0 + y) * f.C + k0 + x] : 0.0f;
        weight[y][x] = inside && o0 + y < f.OC ? (float)f.weight[(size_t)(o0 + y) * f.C + k0 + x] : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += inp[y][k] * weight[x][k]; }
        __syncthreads();
    }
    matmul_forward_store<1>(f, &sum, n0 + y, o0 + x);
}

void matmul_forward3(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel3<<<matmul_forward_num_tiles(f, 32, 32), 1024, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: 64x64 tiles, each thread computes 8 elements of a column: a weight is read once for 8 products ----

__global__ void __launch_bounds__(512) matmul_forward_kernel4(MatmulForwardArgs f) {
    __shared__ float inp[64][33], weight[64][33];
    int n0, o0, x = threadIdx.x % 64, y = threadIdx.x / 64 * 8;
    matmul_forward_tile(f, blockIdx.x, 64, 64, &n0, &o0);
    float sum[8] = {}; // rows y .. y+7 of column x
    for (int k0 = 0; k0 < f.C; k0 += 32) {
        int k = threadIdx.x % 32;
        for (int row = threadIdx.x / 32; row < 64; row += 16) {
            bool inside = k0 + k < f.C;
            inp[row][k] = inside && n0 + row < f.N ? (float)f.inp[(size_t)(n0 + row) * f.C + k0 + k] : 0.0f;
            weight[row][k] = inside && o0 + row < f.OC ? (float)f.weight[(size_t)(o0 + row) * f.C + k0 + k] : 0.0f;
        }
        __syncthreads();
        for (k = 0; k < 32; k++) {
            float b = weight[x][k];
            for (int i = 0; i < 8; i++) { sum[i] += inp[y + i][k] * b; }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { matmul_forward_store<1>(f, &sum[i], n0 + y + i, o0 + x); }
}

void matmul_forward4(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel4<<<matmul_forward_num_tiles(f, 64, 64), 512, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: 128x128 tiles, each thread computes 8x8 elements: 16 values are read for 64 products ----

__global__ void __launch_bounds__(256, 1) matmul_forward_kernel5(MatmulForwardArgs f) {
    __shared__ float inp[128][17], weight[128][17]; // half the columns of kernel 4: a step still fits in 17 KB
    int n0, o0, x = threadIdx.x % 16 * 8, y = threadIdx.x / 16 * 8;
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    float sum[8][8] = {}; // rows y .. y+7, columns x .. x+7
    for (int k0 = 0; k0 < f.C; k0 += 16) {
        int k = threadIdx.x % 16;
        for (int row = threadIdx.x / 16; row < 128; row += 16) {
            bool inside = k0 + k < f.C;
            inp[row][k] = inside && n0 + row < f.N ? (float)f.inp[(size_t)(n0 + row) * f.C + k0 + k] : 0.0f;
            weight[row][k] = inside && o0 + row < f.OC ? (float)f.weight[(size_t)(o0 + row) * f.C + k0 + k] : 0.0f;
        }
        __syncthreads();
        for (k = 0; k < 16; k++) {
            float a[8], b[8];
            for (int i = 0; i < 8; i++) { a[i] = inp[y + i][k], b[i] = weight[x + i][k]; }
            for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 8; j++) { sum[i][j] += a[i] * b[j]; }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) { matmul_forward_store<1>(f, &sum[i][j], n0 + y + i, o0 + x + j); }
    }
}

void matmul_forward5(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel5<<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: 128-bit accesses of device memory ----

// Loads 128 rows and 16 columns, from (row0, k0) on; zeros outside of (num_rows, C).
__device__ inline void matmul_forward_load6(float tile[128][17], const floatX* matrix, int row0, int k0, int num_rows,
                                            int C) {
    const int vectors = 16 / x128::size; // per row
    for (int v = threadIdx.x; v < 128 * vectors; v += 256) {
        int row = v / vectors, k = v % vectors * x128::size;
        bool inside = row0 + row < num_rows && k0 + k < C;
        x128 x = inside ? load128(matrix + (size_t)(row0 + row) * C + k0 + k) : x128();
        for (int j = 0; j < x128::size; j++) { tile[row][k + j] = (float)x[j]; }
    }
}

__global__ void __launch_bounds__(256, 1) matmul_forward_kernel6(MatmulForwardArgs f) {
    __shared__ float inp[128][17], weight[128][17];
    int n0, o0, x = threadIdx.x % 16 * 8, y = threadIdx.x / 16 * 8;
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    float sum[8][8] = {}; // rows y .. y+7, columns x .. x+7
    for (int k0 = 0; k0 < f.C; k0 += 16) {
        matmul_forward_load6(inp, f.inp, n0, k0, f.N, f.C);
        matmul_forward_load6(weight, f.weight, o0, k0, f.OC, f.C);
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            float a[8], b[8];
            for (int i = 0; i < 8; i++) { a[i] = inp[y + i][k], b[i] = weight[x + i][k]; }
            for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 8; j++) { sum[i][j] += a[i] * b[j]; }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { matmul_forward_store<8>(f, sum[i], n0 + y + i, o0 + x); }
}

void matmul_forward6(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel6<<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 7: tiles transposed in shared memory: 128-bit reads without bank conflicts ----

// Loads 128 rows and 16 columns, from (row0, k0) on, and transposes them; zeros outside of (num_rows, C).
__device__ inline void matmul_forward_load7(float tile[16][132], const floatX* matrix, int row0, int k0, int num_rows,
                                            int C) {
    const int vectors = 16 / x128::size; // per row
    for (int v = threadIdx.x; v < 128 * vectors; v += 256) {
        int row = v / vectors, k = v % vectors * x128::size;
        bool inside = row0 + row < num_rows && k0 + k < C;
        x128 x = inside ? load128(matrix + (size_t)(row0 + row) * C + k0 + k) : x128();
        for (int j = 0; j < x128::size; j++) { tile[k + j][row] = (float)x[j]; }
    }
}

__global__ void __launch_bounds__(256, 1) matmul_forward_kernel7(MatmulForwardArgs f) {
    __shared__ alignas(16) float inp[16][132], weight[16][132]; // [k][row]
    int n0, o0, x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    float sum[8][8] = {}; // rows y .. y+3 and y+64 .. y+67, columns x .. x+3 and x+64 .. x+67
    for (int k0 = 0; k0 < f.C; k0 += 16) {
        matmul_forward_load7(inp, f.inp, n0, k0, f.N, f.C);
        matmul_forward_load7(weight, f.weight, o0, k0, f.OC, f.C);
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            f128 a[2] = {load128(&inp[k][y]), load128(&inp[k][64 + y])};
            f128 b[2] = {load128(&weight[k][x]), load128(&weight[k][64 + x])};
            for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 8; j++) { sum[i][j] += a[i / 4][i % 4] * b[j / 4][j % 4]; }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = n0 + i / 4 * 64 + y + i % 4;
        matmul_forward_store<4>(f, &sum[i][0], row, o0 + x);
        matmul_forward_store<4>(f, &sum[i][4], row, o0 + 64 + x);
    }
}

void matmul_forward7(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel7<<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 8: double buffer: the next tile is loaded into registers while this one is multiplied ----

// Loads this thread's part of 128 rows and `columns` columns, from (row0, k0) on; zeros outside of (num_rows, C). Vector
// v of the tile, counted along its rows, is next[v / 256] of thread v % 256.
template <int columns> struct MatmulForwardNext8 { x128 v[128 * columns / x128::size / 256]; };
template <int columns> __device__ inline void
matmul_forward_fetch8(MatmulForwardNext8<columns>& next, const floatX* matrix, int row0, int k0, int num_rows, int C) {
    const int vectors = columns / x128::size; // per row
#pragma unroll
    for (int j = 0; j < 128 * vectors / 256; j++) {
        int v = threadIdx.x + 256 * j, row = v / vectors, k = v % vectors * x128::size;
        bool inside = row0 + row < num_rows && k0 + k < C;
        next.v[j] = inside ? load128(matrix + (size_t)(row0 + row) * C + k0 + k) : x128();
    }
}

__device__ inline void matmul_forward_put8(float tile[16][132], const MatmulForwardNext8<16>& next) {
    const int vectors = 16 / x128::size;
#pragma unroll
    for (int j = 0; j < 128 * vectors / 256; j++) {
        int v = threadIdx.x + 256 * j, row = v / vectors, k = v % vectors * x128::size;
        for (int i = 0; i < x128::size; i++) { tile[k + i][row] = (float)next.v[j][i]; }
    }
}

// A thread's 8x8 elements: rows y .. y+3 and y + ROWS_APART .. of the tile, columns x .. x+3 and x + COLUMNS_APART ..
struct MatmulForwardThreads8 {
    static constexpr int ROWS_APART = 64, COLUMNS_APART = 64;
    static __device__ int y() { return threadIdx.x / 16 * 4; }
    static __device__ int x() { return threadIdx.x % 16 * 4; }
};

template <class Threads> __global__ void __launch_bounds__(256, 1) matmul_forward_kernel8(MatmulForwardArgs f) {
    __shared__ alignas(16) float inp[2][16][132], weight[2][16][132]; // [buffer][k][row]
    const int rows_apart = Threads::ROWS_APART, columns_apart = Threads::COLUMNS_APART;
    int n0, o0, x = Threads::x(), y = Threads::y(), num_steps = ceil_div(f.C, 16);
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    MatmulForwardNext8<16> next_inp, next_weight;
    matmul_forward_fetch8(next_inp, f.inp, n0, 0, f.N, f.C);
    matmul_forward_fetch8(next_weight, f.weight, o0, 0, f.OC, f.C);
    float sum[8][8] = {};
    for (int step = 0; step < num_steps; step++) {
        int now = step % 2; // the other buffer may still be read by slower warps: they are at the step before
        matmul_forward_put8(inp[now], next_inp);
        matmul_forward_put8(weight[now], next_weight);
        __syncthreads();
        if (step + 1 < num_steps) { // in flight while this step's products are computed
            matmul_forward_fetch8(next_inp, f.inp, n0, (step + 1) * 16, f.N, f.C);
            matmul_forward_fetch8(next_weight, f.weight, o0, (step + 1) * 16, f.OC, f.C);
        }
        for (int k = 0; k < 16; k++) {
            f128 a[2] = {load128(&inp[now][k][y]), load128(&inp[now][k][rows_apart + y])};
            f128 b[2] = {load128(&weight[now][k][x]), load128(&weight[now][k][columns_apart + x])};
            for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 8; j++) { sum[i][j] += a[i / 4][i % 4] * b[j / 4][j % 4]; }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = n0 + i / 4 * rows_apart + y + i % 4;
        matmul_forward_store<4>(f, &sum[i][0], row, o0 + x);
        matmul_forward_store<4>(f, &sum[i][4], row, o0 + columns_apart + x);
    }
}

void matmul_forward8(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel8<MatmulForwardThreads8><<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 9: a tile per warp: its 32 threads compute 64x32 elements, which need fewer different values ----

// In kernel 8 a warp has 16 rows and all 128 columns, so per k it reads 144 different values. Here it has 64 rows and 32
// columns: 96 values, and each load of 16 bytes per lane has at most 128 bytes of them. The lanes of a warp's upper left
// quarter, 32 rows and 16 columns:
//
//     columns       0..3   4..7   8..11  12..15
//     rows 0..3       0      1      2      3
//     rows 4..7       4      5      6      7
//     ...
//     rows 28..31    28     29     30     31
struct MatmulForwardThreads9 {
    static constexpr int ROWS_APART = 32, COLUMNS_APART = 16;
    static __device__ int y() { return threadIdx.x / 128 * 64 + threadIdx.x % 32 / 4 * 4; }
    static __device__ int x() { return threadIdx.x / 32 % 4 * 32 + threadIdx.x % 4 * 4; }
};

void matmul_forward9(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_kernel8<MatmulForwardThreads9><<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// ---- kernel 10: tensor cores: mma.sync on fragments that are loaded from shared memory 32 bits at a time ----

// The epilogue of 16 rows and 32 columns, from (row0, col0) on, which a warp holds as four fragments d of mma_16x8x16.
__device__ inline void matmul_forward_store_warp(const MatmulForwardArgs& f, const float* d, int row0, int col0) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half_tile = 0; half_tile < 2; half_tile++) {
        float v[4][2];
        for (int j = 0; j < 4; j++) {
            v[j][0] = d[4 * j + 2 * half_tile];
            v[j][1] = d[4 * j + 2 * half_tile + 1];
        }
        mma_quad_transpose(v); // now this lane has 8 neighbouring elements of one row
        matmul_forward_store<8>(f, &v[0][0], row0 + 8 * half_tile + lane / 4, col0 + lane % 4 * 8);
    }
}

// Two neighbouring elements, an even number of elements from the tile's beginning.
__device__ inline uint32_t matmul_forward_pair10(const floatX* p) { return *reinterpret_cast<const uint32_t*>(p); }

// A row of 40 elements is 20 words. The 8 rows of a fragment then begin in banks 0, 20, 8, 28, 16, 4, 24, 12, and four
// lanes read four words of each: 32 different banks.
__device__ inline void matmul_forward_put10(floatX tile[128][40], const MatmulForwardNext8<32>& next) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int v = threadIdx.x + 256 * j;
        store128(&tile[v / 4][v % 4 * 8], next.v[j]);
    }
}

__global__ void __launch_bounds__(256, 2) matmul_forward_kernel10(MatmulForwardArgs f) {
    __shared__ alignas(16) floatX inp[2][128][40], weight[2][128][40]; // [buffer][row][k], as in memory
    int n0, o0, lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_steps = ceil_div(f.C, 32);
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    int warp_row = warp / 4 * 64, warp_col = warp % 4 * 32; // each warp computes 64x32 of the tile
    MatmulForwardNext8<32> next_inp, next_weight;
    matmul_forward_fetch8(next_inp, f.inp, n0, 0, f.N, f.C);
    matmul_forward_fetch8(next_weight, f.weight, o0, 0, f.OC, f.C);
    float sum[4][16] = {}; // [four tiles of 16 rows][four fragments of 8 columns, 4 values per lane]
    for (int step = 0; step < num_steps; step++) {
        int now = step % 2;
        matmul_forward_put10(inp[now], next_inp);
        matmul_forward_put10(weight[now], next_weight);
        __syncthreads();
        if (step + 1 < num_steps) {
            matmul_forward_fetch8(next_inp, f.inp, n0, (step + 1) * 32, f.N, f.C);
            matmul_forward_fetch8(next_weight, f.weight, o0, (step + 1) * 32, f.OC, f.C);
        }
#pragma unroll
        for (int k = 0; k < 32; k += 16) {
            uint32_t a[4][4], b[4][2];
            for (int i = 0; i < 4; i++) {
                const floatX* p = &inp[now][warp_row + 16 * i + lane / 4][k + lane % 4 * 2];
                a[i][0] = matmul_forward_pair10(p), a[i][1] = matmul_forward_pair10(p + 8 * 40);
                a[i][2] = matmul_forward_pair10(p + 8), a[i][3] = matmul_forward_pair10(p + 8 * 40 + 8);
            }
            for (int j = 0; j < 4; j++) {
                const floatX* p = &weight[now][warp_col + 8 * j + lane / 4][k + lane % 4 * 2];
                b[j][0] = matmul_forward_pair10(p), b[j][1] = matmul_forward_pair10(p + 8);
            }
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) { mma_16x8x16(sum[i] + 4 * j, a[i], b[j][0], b[j][1], floatX()); }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { matmul_forward_store_warp(f, sum[i], n0 + warp_row + 16 * i, o0 + warp_col); }
}

void matmul_forward10(const MatmulForwardArgs& f, cudaStream_t stream) {
    require(compiled_arch(matmul_forward_kernel10) >= 80);
    matmul_forward_kernel10<<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 11: ldmatrix: one instruction loads four 8x8 matrices, where kernel 10 needs four loads of 32 bits ----

// The layout of a tile of 128 rows: at(row, chunk) is the position of the chunk's first element. A chunk is what ldmatrix reads
// of a row: 8 elements, 16 bytes.
struct MatmulForwardPadded { // as in kernel 10
    static constexpr int COLUMNS = 32, SIZE = 128 * 40;
    static __device__ int at(int row, int chunk) { return row * 40 + chunk * 8; }
};

template <class Layout>
__device__ inline void matmul_forward_put11(floatX* tile, const MatmulForwardNext8<Layout::COLUMNS>& next) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int v = threadIdx.x + 256 * j;
        store128(tile + Layout::at(v / 4, v % 4), next.v[j]);
    }
}

// Adds the products of a step to a warp's sums: of 64 rows of inp and 32 rows of weight.
template <class Layout>
__device__ inline void matmul_forward_multiply11(float (&sum)[4][16], const floatX* inp, const floatX* weight) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // the rows whose address this lane gives to ldmatrix
    int inp_row = warp / 4 * 64 + lane % 16, weight_row = warp % 4 * 32 + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < Layout::COLUMNS / 16; k++) { // 16 columns per iteration: chunks 2k and 2k+1
        uint32_t a[4][4], b[2][4];
        // 16 rows further down, the distance to the row's beginning is the same
        const floatX* inp_at = inp + Layout::at(inp_row, 2 * k + lane / 16);
        const floatX* weight_at = weight + Layout::at(weight_row, 2 * k + lane / 8 % 2);
        for (int i = 0; i < 4; i++) { ldmatrix_x4(a[i], inp_at + Layout::at(16 * i, 0)); }
        for (int j = 0; j < 2; j++) { // two fragments of 8 columns each
            ldmatrix_x4(b[j], weight_at + Layout::at(16 * j, 0));
        }
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                mma_16x8x16(sum[i] + 4 * j, a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], floatX());
            }
        }
    }
}

template <class Layout> __global__ void __launch_bounds__(256, 2) matmul_forward_kernel11(MatmulForwardArgs f) {
    __shared__ alignas(128) floatX inp[2][Layout::SIZE], weight[2][Layout::SIZE];
    int n0, o0, warp = threadIdx.x / 32, num_steps = ceil_div(f.C, 32);
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    MatmulForwardNext8<32> next_inp, next_weight;
    matmul_forward_fetch8(next_inp, f.inp, n0, 0, f.N, f.C);
    matmul_forward_fetch8(next_weight, f.weight, o0, 0, f.OC, f.C);
    float sum[4][16] = {}; // [four tiles of 16 rows][four fragments of 8 columns, 4 values per lane]
    for (int step = 0; step < num_steps; step++) {
        int now = step % 2;
        matmul_forward_put11<Layout>(inp[now], next_inp);
        matmul_forward_put11<Layout>(weight[now], next_weight);
        __syncthreads();
        if (step + 1 < num_steps) {
            matmul_forward_fetch8(next_inp, f.inp, n0, (step + 1) * 32, f.N, f.C);
            matmul_forward_fetch8(next_weight, f.weight, o0, (step + 1) * 32, f.OC, f.C);
        }
        matmul_forward_multiply11<Layout>(sum, inp[now], weight[now]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        matmul_forward_store_warp(f, sum[i], n0 + warp / 4 * 64 + 16 * i, o0 + warp % 4 * 32);
    }
}

template <class Layout> static void matmul_forward_launch11(const MatmulForwardArgs& f, cudaStream_t stream) {
    require(compiled_arch(matmul_forward_kernel11<Layout>) >= 80);
    matmul_forward_kernel11<Layout><<<matmul_forward_num_tiles(f, 128, 128), 256, 0, stream>>>(f);
    cudaCheck(cudaGetLastError());
}

void matmul_forward11(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_launch11<MatmulForwardPadded>(f, stream);
}

// ---- kernel 12: a swizzle takes the place of the padding: the stores into the tile lose their bank conflicts, too ----

// A store of 8 lanes writes two rows. With rows of 80 bytes, some chunks of the second row are in the banks of the first.
// Here rows have 64 bytes, and chunk c of row r is at position c ^ (r / 2 % 4). The 8 rows that ldmatrix reads at once are
// then in 8 different groups of 4 banks:
//
//     position        0 1 2 3  0 1 2 3
//     rows 0 and 1    0 1 2 3  0 1 2 3     two rows of 64 bytes cover the 32 banks; the digits are the chunks
//     rows 2 and 3    1 0 3 2  1 0 3 2
//     rows 4 and 5    2 3 0 1  2 3 0 1
//     rows 6 and 7    3 2 1 0  3 2 1 0
struct MatmulForwardSwizzled64 {
    static constexpr int COLUMNS = 32, SIZE = 128 * 32;
    static __device__ int at(int row, int chunk) { return row * 32 + (chunk ^ (row / 2 % 4)) * 8; }
};

void matmul_forward12(const MatmulForwardArgs& f, cudaStream_t stream) {
    matmul_forward_launch11<MatmulForwardSwizzled64>(f, stream);
}

// ---- kernel 13: a ring of four stages, filled by cp.async ----

// Calls launch(stages) with the number of stages as a type: std::integral_constant. 0 is the first one of the list.
template <int first, int... others, class Launch>
static void matmul_forward_with_stages(int stages, const Launch& launch) {
    if (stages == 0 || stages == first) { return launch(std::integral_constant<int, first>()); }
    bool found = ((stages == others && (launch(std::integral_constant<int, others>()), true)) || ...);
    require(found);
}

template <class Layout> struct MatmulForwardStage13 { floatX inp[Layout::SIZE], weight[Layout::SIZE]; };

template <class Layout> __device__ inline void matmul_forward_load13(floatX* tile, const floatX* matrix, int row0,
                                                                     int k0, int num_rows, int C) {
    const int chunks = Layout::COLUMNS / 8; // per row
    for (int v = threadIdx.x; v < 128 * chunks; v += 256) {
        int row = v / chunks, chunk = v % chunks;
        bool inside = row0 + row < num_rows && k0 + chunk * 8 < C;
        const floatX* from = inside ? matrix + (size_t)(row0 + row) * C + k0 + chunk * 8 : matrix;
        cp_async_16(tile + Layout::at(row, chunk), from, inside);
    }
}

// With 4 stages of 16 KB three blocks would fit on an SM, registers allow two.
template <int ring, class Layout> __global__ void __launch_bounds__(256, 2)
    matmul_forward_kernel13(MatmulForwardArgs f) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    auto stages = reinterpret_cast<MatmulForwardStage13<Layout>*>(dynamic_shared);
    const int columns = Layout::COLUMNS;
    int n0, o0, warp = threadIdx.x / 32, num_steps = ceil_div(f.C, columns);
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    auto load = [&](int step) {
        if (step < num_steps) {
            matmul_forward_load13<Layout>(stages[step % ring].inp, f.inp, n0, step * columns, f.N, f.C);
            matmul_forward_load13<Layout>(stages[step % ring].weight, f.weight, o0, step * columns, f.OC, f.C);
        }
        cp_async_commit(); // past the last step the group is empty: cp_async_wait counts one group per step
    };
    for (int step = 0; step < ring - 1; step++) { load(step); }
    float sum[4][16] = {}; // [four tiles of 16 rows][four fragments of 8 columns, 4 values per lane]
    for (int step = 0; step < num_steps; step++) {
        cp_async_wait<ring - 2>();
        __syncthreads(); // this step's stage has arrived, and all warps have read the previous step's stage
        load(step + ring - 1);
        matmul_forward_multiply11<Layout>(sum, stages[step % ring].inp, stages[step % ring].weight);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        matmul_forward_store_warp(f, sum[i], n0 + warp / 4 * 64 + 16 * i, o0 + warp % 4 * 32);
    }
}

template <class Layout, int... rings>
static void matmul_forward_launch13(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<rings...>(stages, [&](auto ring) {
        auto kernel = matmul_forward_kernel13<decltype(ring)::value, Layout>;
        require(compiled_arch(kernel) >= 80);
        const int bytes = decltype(ring)::value * sizeof(MatmulForwardStage13<Layout>);
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<matmul_forward_num_tiles(f, 128, 128), 256, bytes, stream>>>(f);
        cudaCheck(cudaGetLastError());
    });
}

void matmul_forward13(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch13<MatmulForwardSwizzled64, 4, 2, 3, 5>(f, stream, stages);
}

// ---- kernel 14: steps of 64 columns: half as many barriers, and each row is read in lines of 128 bytes ----

// A stage has 32 KB, so with 3 stages two blocks fit on an SM: 96 KB each. The swizzle is the one that TMA writes and wgmma
// reads, see tensor_map().
struct MatmulForwardSwizzled128 {
    static constexpr int COLUMNS = 64, SIZE = 128 * 64;
    static __device__ int at(int row, int chunk) { return row * 64 + (chunk ^ row % 8) * 8; }
};

void matmul_forward14(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch13<MatmulForwardSwizzled128, 3, 2, 4>(f, stream, stages);
}

// ---- kernel 15: wgmma: a warpgroup multiplies operands in shared memory, and no fragment is loaded ----

typedef MatmulForwardStage13<MatmulForwardSwizzled128> MatmulForwardStage;

// Dynamic shared memory, aligned to the 1024 bytes that the swizzle needs. The driver aligns it to less, so launchers
// request 1 KB more.
__device__ inline MatmulForwardStage* matmul_forward_stages(unsigned char* dynamic_shared) {
    uint32_t address = shared_address(dynamic_shared);
    return reinterpret_cast<MatmulForwardStage*>(dynamic_shared + (1024 - address % 1024) % 1024);
}

// Issues sum (64x128) += inp weight^T, or = if accumulate is false, for 64 rows of inp and 128 of weight, over 64
// columns. The caller commits the products and waits for them.
__device__ inline void matmul_forward_wgmma(float sum[64], const floatX* inp, const floatX* weight, bool accumulate) {
    uint64_t a = wgmma_descriptor(inp), b = wgmma_descriptor(weight);
#pragma unroll
    for (int k = 0; k < 4; k++) { // 16 columns are 32 bytes, 2 in the descriptor's units of 16 bytes
        wgmma_64x128x16(sum, a + 2 * k, b + 2 * k, accumulate || k > 0, floatX());
    }
}

// With 3 stages of the ring 2 blocks fit on an SM: 97 KB each.
template <int ring> __global__ void __launch_bounds__(256, 2) matmul_forward_sm90_kernel15(MatmulForwardArgs f) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    MatmulForwardStage* stages = matmul_forward_stages(dynamic_shared);
    int n0, o0, warp = threadIdx.x / 32, group = warp / 4; // each warpgroup computes 64 rows of the tile
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    int num_steps = ceil_div(f.C, 64);
    auto load = [&](int step) {
        if (step < num_steps) {
            matmul_forward_load13<MatmulForwardSwizzled128>(stages[step % ring].inp, f.inp, n0, step * 64, f.N, f.C);
            matmul_forward_load13<MatmulForwardSwizzled128>(stages[step % ring].weight, f.weight, o0, step * 64, f.OC,
                                                            f.C);
        }
        cp_async_commit(); // past the last step the group is empty: cp_async_wait counts one group per step
    };
    for (int step = 0; step < ring - 1; step++) { load(step); }
    float sum[64];
    for (int step = 0; step < num_steps; step++) {
        cp_async_wait<ring - 2>();
        tma_store_fence(); // wgmma reads shared memory as TMA does, by the async proxy: cp.async's writes come before
        __syncthreads();   // this step's stage has arrived, and both warpgroups have read the previous step's stage
        load(step + ring - 1);
        const MatmulForwardStage& stage = stages[step % ring];
        wgmma_fence();
        matmul_forward_wgmma(sum, stage.inp + group * 64 * 64, stage.weight, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
    }
#pragma unroll
    for (int q = 0; q < 4; q++) { matmul_forward_store_warp(f, sum + 16 * q, n0 + 16 * warp, o0 + 32 * q); }
}

void matmul_forward15(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<3, 2, 4, 6>(stages, [&](auto ring) {
        auto kernel = matmul_forward_sm90_kernel15<decltype(ring)::value>;
        require(compiled_arch(kernel) == 90); // nvcc -gencode arch=compute_90a,code=sm_90a
        const int bytes = decltype(ring)::value * sizeof(MatmulForwardStage) + 1024;
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<matmul_forward_num_tiles(f, 128, 128), 256, bytes, stream>>>(f);
        cudaCheck(cudaGetLastError());
    });
}

// ---- kernel 16: TMA: one thread starts the copy of a stage, an mbarrier says when it has arrived ----

static_assert(sizeof(MatmulForwardStage) == 32 * 1024, "TMA announces this many bytes");

__device__ inline void matmul_forward_tma(MatmulForwardStage& stage, uint64_t* full, const CUtensorMap& inp_map,
                                          const CUtensorMap& weight_map, int n0, int o0, int step) {
    mbarrier_arrive_expect(full, sizeof(MatmulForwardStage));
    tma_load_2d(stage.inp, &inp_map, step * 64, n0, full);
    tma_load_2d(stage.weight, &weight_map, step * 64, o0, full);
}

template <int ring> __global__ void __launch_bounds__(256, 2)
    matmul_forward_sm90_kernel16(MatmulForwardArgs f, const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap weight_map) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    __shared__ uint64_t full[ring];
    MatmulForwardStage* stages = matmul_forward_stages(dynamic_shared);
    int n0, o0, warp = threadIdx.x / 32, group = warp / 4;
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    int num_steps = ceil_div(f.C, 64);
    if (threadIdx.x == 0) {
        for (int s = 0; s < ring; s++) { mbarrier_init(&full[s], 1); }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int s = 0; s < ring && s < num_steps; s++) {
            matmul_forward_tma(stages[s], &full[s], inp_map, weight_map, n0, o0, s);
        }
    }
    float sum[64];
    for (int step = 0; step < num_steps; step++) {
        int s = step % ring;
        mbarrier_wait(&full[s], step / ring % 2);
        wgmma_fence();
        matmul_forward_wgmma(sum, stages[s].inp + group * 64 * 64, stages[s].weight, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads(); // both warpgroups have read the stage
        if (threadIdx.x == 0 && step + ring < num_steps) {
            matmul_forward_tma(stages[s], &full[s], inp_map, weight_map, n0, o0, step + ring);
        }
    }
#pragma unroll
    for (int q = 0; q < 4; q++) { matmul_forward_store_warp(f, sum + 16 * q, n0 + 16 * warp, o0 + 32 * q); }
}

// Launches one of kernels 16 to 21: a block per tile, or persistent blocks. Shared memory: `ring` stages, then box_bytes.
template <bool persistent, int ring, class... Parameters, class... Maps>
static void matmul_forward_launch16(void (*kernel)(Parameters...), std::integral_constant<int, ring>, int threads,
                                    const MatmulForwardArgs& f, cudaStream_t stream, int box_bytes = 0,
                                    const Maps&... maps) {
    require(compiled_arch(kernel) == 90); // nvcc -gencode arch=compute_90a,code=sm_90a
    CUtensorMap inp_map = tensor_map(f.inp, {f.C, f.N}, {64, 128});
    CUtensorMap weight_map = tensor_map(f.weight, {f.C, f.OC}, {64, 128});
    int num_tiles = matmul_forward_num_tiles(f, 128, 128), bytes = ring * sizeof(MatmulForwardStage) + box_bytes + 1024;
    if constexpr (persistent) {
        LaunchShape shape(std::min(num_tiles, num_multiprocessors()), threads, bytes);
        launch_kernel(kernel, shape, stream, f, inp_map, weight_map, maps..., num_tiles);
    } else {
        launch_kernel(kernel, LaunchShape(num_tiles, threads, bytes), stream, f, inp_map, weight_map);
    }
}

void matmul_forward16(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<3, 2, 4, 6>(stages, [&](auto ring) {
        matmul_forward_launch16<false>(matmul_forward_sm90_kernel16<decltype(ring)::value>, ring, 256, f, stream);
    });
}

// ---- kernel 17: a producer warp loads, two consumer warpgroups multiply; no barrier joins them all in every step ----

// Kernel 16 stops all warps in every step: the products drain, then __syncthreads(), and only then is the stage loaded
// again. Here the next step's products are issued while the previous ones run, and a stage is free as soon as the
// eight consumer warps have arrived at its empty barrier.
template <int ring> __global__ void __launch_bounds__(288, 2)
    matmul_forward_sm90_kernel17(MatmulForwardArgs f, const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap weight_map) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    // full: TMA has loaded the stage, consumers wait; empty: consumers have read it, the producer waits
    __shared__ uint64_t full[ring], empty[ring];
    MatmulForwardStage* stages = matmul_forward_stages(dynamic_shared);
    int n0, o0, lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
    matmul_forward_tile(f, blockIdx.x, 128, 128, &n0, &o0);
    int num_steps = ceil_div(f.C, 64);
    if (threadIdx.x == 0) {
        for (int s = 0; s < ring; s++) { mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 8); }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == 8) { // the producer
        if (lane != 0) { return; }
        for (int step = 0; step < num_steps; step++) {
            int s = step % ring;
            mbarrier_wait(&empty[s], (step / ring + 1) % 2); // returns at once in the first round
            matmul_forward_tma(stages[s], &full[s], inp_map, weight_map, n0, o0, step);
        }
        return;
    }
    float sum[64];
    for (int step = 0; step < num_steps; step++) {
        int s = step % ring;
        mbarrier_wait(&full[s], step / ring % 2);
        wgmma_fence();
        matmul_forward_wgmma(sum, stages[s].inp + group * 64 * 64, stages[s].weight, step > 0);
        wgmma_commit();
        wgmma_wait<1>(); // the previous step's products are done: its stage is free
        if (step > 0 && lane == 0) { mbarrier_arrive(&empty[(step - 1) % ring]); }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int q = 0; q < 4; q++) { matmul_forward_store_warp(f, sum + 16 * q, n0 + 16 * warp, o0 + 32 * q); }
}

void matmul_forward17(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<3, 2, 4, 6>(stages, [&](auto ring) {
        matmul_forward_launch16<false>(matmul_forward_sm90_kernel17<decltype(ring)::value>, ring, 288, f, stream);
    });
}

// ---- kernel 18: persistent blocks: the ring runs on from tile to tile, so loads are overlapped with the epilogue ----

// One block per SM, with a ring twice as long, takes tiles until none is left. While the consumers store a tile, the
// producer loads the next one's first stages. The barriers are initialised and the ring is filled once per block, not
// once per tile. But there is no second block any more that multiplies meanwhile: kernel 19 brings that back.
template <int ring> __global__ void __launch_bounds__(288, 1)
    matmul_forward_sm90_kernel18(MatmulForwardArgs f, const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap weight_map, int num_tiles) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    // full: TMA has loaded the stage, consumers wait; empty: consumers have read it, the producer waits
    __shared__ uint64_t full[ring], empty[ring];
    MatmulForwardStage* stages = matmul_forward_stages(dynamic_shared);
    int n0, o0, lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
    int num_steps = ceil_div(f.C, 64);
    if (threadIdx.x == 0) {
        for (int s = 0; s < ring; s++) { mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 8); }
        mbarrier_init_fence();
    }
    __syncthreads();
    int i = 0;       // the step among all steps of the block
    if (warp == 8) { // the producer
        if (lane != 0) { return; }
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            matmul_forward_tile(f, tile, 128, 128, &n0, &o0);
            for (int step = 0; step < num_steps; step++, i++) {
                mbarrier_wait(&empty[i % ring], (i / ring + 1) % 2);
                matmul_forward_tma(stages[i % ring], &full[i % ring], inp_map, weight_map, n0, o0, step);
            }
        }
        return;
    }
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        float sum[64];
        for (int step = 0; step < num_steps; step++, i++) {
            MatmulForwardStage& stage = stages[i % ring];
            mbarrier_wait(&full[i % ring], i / ring % 2);
            wgmma_fence();
            matmul_forward_wgmma(sum, stage.inp + group * 64 * 64, stage.weight, step > 0);
            wgmma_commit();
            wgmma_wait<1>(); // the previous step's products are done: its stage is free
            if (step > 0 && lane == 0) { mbarrier_arrive(&empty[(i - 1) % ring]); }
        }
        wgmma_wait<0>();
        if (lane == 0) { mbarrier_arrive(&empty[(i - 1) % ring]); }
        matmul_forward_tile(f, tile, 128, 128, &n0, &o0);
#pragma unroll
        for (int q = 0; q < 4; q++) { matmul_forward_store_warp(f, sum + 16 * q, n0 + 16 * warp, o0 + 32 * q); }
    }
}

void matmul_forward18(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<6, 3, 4, 7>(stages, [&](auto ring) {
        matmul_forward_launch16<true>(matmul_forward_sm90_kernel18<decltype(ring)::value>, ring, 288, f, stream);
    });
}

// ---- kernel 19: ping-pong: each consumer has a tile of its own, one stores while the other multiplies ----

// In kernel 18 both consumers store at the same time, and then the tensor cores wait. Here they alternate, so there is
// no pause. A consumer holds a whole tile, 128 accumulators per thread, so setmaxnreg moves registers from the
// producer, which is a warpgroup now, to the consumers.

// Kernel 19's lanes store results to global memory directly. Kernels 20 and 21 pass other classes, which stage results in boxes.
struct MatmulForwardResults19 {
    struct Maps {};
    __device__ MatmulForwardResults19(floatX (*)[16 * 64], const Maps&) {}
    __device__ void end() {}
};

// Stores a warp's two times 16 rows, 64 apart, and 128 columns.
__device__ inline void matmul_forward_store_tile(const MatmulForwardArgs& f, const float (&sum)[2][64],
                                                 MatmulForwardResults19&, int row0, int col0) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        matmul_forward_store_warp(f, sum[i / 4] + i % 4 * 16, row0 + i / 4 * 64, col0 + i % 4 * 32);
    }
}

// With 6 stages of the ring a block takes 193 KB, so there is one block per SM.
template <int ring, class Results> __global__ void __launch_bounds__(384, 1)
    matmul_forward_sm90_kernel19(MatmulForwardArgs f, const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap weight_map,
                                 const __grid_constant__ typename Results::Maps maps, int num_tiles) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    // full: TMA has loaded the stage, consumers wait; empty: consumers have read it, the producer waits
    __shared__ uint64_t full[ring], empty[ring];
    __shared__ uint64_t turn[2]; // consumer c waits for turn[c]; the other consumer arrives once it issued its products
    MatmulForwardStage* stages = matmul_forward_stages(dynamic_shared);
    int n0, o0, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, group = threadIdx.x / 128;
    int num_steps = ceil_div(f.C, 64);
    if (threadIdx.x == 0) {
        for (int s = 0; s < ring; s++) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], 4); // the four warps of the one consumer that reads the stage
        }
        for (int g = 0; g < 2; g++) { mbarrier_init(&turn[g], 4); }
        mbarrier_init_fence();
    }
    __syncthreads();
    // Warpgroup 0 is the producer, warpgroups 1 and 2 are the consumers. The block's tiles, numbered 0, 1, 2, ..., go
    // to warpgroups 1, 2, 1, ...; their steps go through the ring in that order.
    if (group == 0) {
        warpgroup_fewer_registers<40>();
        if (threadIdx.x != 0) { return; }
        int i = 0;
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            matmul_forward_tile(f, tile, 128, 128, &n0, &o0);
            for (int step = 0; step < num_steps; step++, i++) {
                mbarrier_wait(&empty[i % ring], (i / ring + 1) % 2);
                matmul_forward_tma(stages[i % ring], &full[i % ring], inp_map, weight_map, n0, o0, step);
            }
        }
        return;
    }
    warpgroup_more_registers<232>();
    Results results(reinterpret_cast<floatX(*)[2][16 * 64]>(stages + ring)[threadIdx.x / 32 - 4], maps);
    // A consumer waits for its turn before it waits for a stage. A barrier's parity is one bit, so a consumer more than
    // a round of the ring ahead would take an earlier tile's stage for its own.
    // i: this consumer's next step among all steps of the block; number: tiles that this consumer has begun
    int i = (group - 1) * num_steps, number = 0;
    for (int tile = blockIdx.x + (group - 1) * gridDim.x; tile < num_tiles; tile += 2 * gridDim.x, i += num_steps) {
        float sum[2][64]; // rows 0..63, 64..127
        mbarrier_wait(&turn[group - 1], (number++ + group) % 2);
        for (int step = 0; step < num_steps; step++, i++) {
            MatmulForwardStage& stage = stages[i % ring];
            mbarrier_wait(&full[i % ring], i / ring % 2);
            wgmma_fence();
            matmul_forward_wgmma(sum[0], stage.inp, stage.weight, step > 0);
            matmul_forward_wgmma(sum[1], stage.inp + 64 * 64, stage.weight, step > 0);
            wgmma_commit();
            wgmma_wait<1>(); // the previous step's products are done: its stage is free
            if (step > 0 && lane == 0) { mbarrier_arrive(&empty[(i - 1) % ring]); }
        }
        if (lane == 0) { mbarrier_arrive(&turn[2 - group]); }
        wgmma_wait<0>();
        if (lane == 0) { mbarrier_arrive(&empty[(i - 1) % ring]); }
        matmul_forward_tile(f, tile, 128, 128, &n0, &o0);
        matmul_forward_store_tile(f, sum, results, n0 + 16 * warp, o0);
    }
    results.end();
}

void matmul_forward19(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<6, 3, 4, 7>(stages, [&](auto ring) {
        auto kernel = matmul_forward_sm90_kernel19<decltype(ring)::value, MatmulForwardResults19>;
        matmul_forward_launch16<true>(kernel, ring, 384, f, stream, 0, MatmulForwardResults19::Maps());
    });
}

// ---- kernel 20: results pass through shared memory: stmatrix stores fragments, then eight lanes store a row of 128 bytes ----

// Kernel 19's lanes store 16 bytes each: a warp's store touches 8 rows, 64 bytes in each, and before it the four lanes that
// hold a row exchange their results by shuffles. Here a warp collects 16 rows of 64 columns, a box: stmatrix stores
// fragments as they are, the inverse of ldmatrix. Then eight lanes store the 128 bytes of a row.

// The epilogue of 16 rows and 64 columns, from (row0, col0) on, which a warp holds as eight fragments d of mma_16x8x16. The
// results go to box, GELU's input to pre_gelu_box, both in the 128-byte swizzle. What the epilogue does is known when it is
// compiled: with a branch per element it would take longer than the products.
template <bool has_gelu, bool has_residual>
__device__ inline void matmul_forward_fill_box(const MatmulForwardArgs& f, const float* d, floatX* box,
                                               floatX* pre_gelu_box, int row0, int col0) {
    int lane = threadIdx.x % 32;
    // this lane's 16 bytes for stmatrix: row lane % 16, chunk lane / 16. The swizzle XORs the row into the chunk, so 16 * p
    // columns further is the address ^ p << 5.
    uint32_t at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    // this lane's first element, and how many columns there are from there on
    int row = row0 + lane / 4, col = col0 + lane % 4 * 2, columns_left = f.OC - col;
    auto pair_at = [](const floatX* matrix, size_t i) { // two elements
        return unpack_16x2(__ldg(reinterpret_cast<const uint32_t*>(matrix + i)), floatX());
    };
#pragma unroll
    for (int p = 0; p < 4; p++) { // 16 columns: two fragments of 8
        uint32_t out[4], pre_gelu[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int right = 16 * p + 8 * j;
            bool inside = right < columns_left;
            float2 bias = f.bias && inside ? pair_at(f.bias + col, right) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int half = 0; half < 2; half++) { // rows 0 to 7, 8 to 15
                const float* sum = d + 8 * p + 4 * j + 2 * half;
                float x = sum[0] + bias.x, y = sum[1] + bias.y;
                pre_gelu[2 * j + half] = pack_16x2(x, y, floatX());
                if (has_gelu) { x = gelu(x), y = gelu(y); }
                if (has_residual && inside && row + 8 * half < f.N) {
                    float2 add = pair_at(f.residual + (size_t)(row + 8 * half) * f.OC + col, right);
                    x += add.x, y += add.y;
                }
                out[2 * j + half] = pack_16x2(x, y, floatX());
            }
        }
        stmatrix_x4(shared_address(box) + (at ^ p << 5), out);
        if (has_gelu) { stmatrix_x4(shared_address(pre_gelu_box) + (at ^ p << 5), pre_gelu); }
    }
}

// A warp's two boxes, the second one for pre_gelu, and how they are stored.
struct MatmulForwardBoxes20 {
    struct Maps {};
    static Maps maps(const MatmulForwardArgs&) { return {}; }

    floatX (*boxes)[16 * 64];
    __device__ MatmulForwardBoxes20(floatX (*boxes)[16 * 64], const Maps&) : boxes(boxes) {}
    // the box to be filled next
    template <bool has_gelu> __device__ floatX* next() { return boxes[0]; }
    template <bool has_gelu> __device__ void store(const MatmulForwardArgs& f, const floatX* box, int row0, int col0) {
        int lane = threadIdx.x % 32, col = col0 + lane % 8 * 8;
        __syncwarp();
#pragma unroll 2 // with all four, registers spill
        for (int i = 0; i < 16; i += 4) {
            int row = i + lane / 8, at = MatmulForwardSwizzled128::at(row, lane % 8);
            if (row0 + row >= f.N || col >= f.OC) { continue; }
            size_t to = (size_t)(row0 + row) * f.OC + col;
            store128(f.out + to, load128(box + at));
            if (has_gelu) { store128(f.pre_gelu + to, load128(boxes[1] + at)); }
        }
        __syncwarp(); // all lanes have read the boxes
    }
    __device__ void end() {}
};

// Stores a warp's two times 16 rows, 64 apart, and 2 * sums columns through boxes.
template <int sums, class Boxes> __device__ inline void
matmul_forward_store_tile(const MatmulForwardArgs& f, const float (&sum)[2][sums], Boxes& boxes, int row0, int col0) {
    constexpr int n = sums / 32;
    auto store = [&](auto has_gelu, auto has_residual) {
#pragma unroll
        for (int i = 0; i < 2 * n; i++) {
            int row = row0 + i / n * 64, col = col0 + i % n * 64;
            floatX* box = boxes.template next<has_gelu.value>();
            matmul_forward_fill_box<has_gelu.value, has_residual.value>(f, sum[i / n] + i % n * 32, box, boxes.boxes[1],
                                                                        row, col);
            boxes.template store<has_gelu.value>(f, box, row, col);
        }
    };
    if (f.pre_gelu) {
        store(std::true_type(), std::false_type());
    } else if (f.residual) {
        store(std::false_type(), std::true_type());
    } else {
        store(std::false_type(), std::false_type());
    }
}

// With 6 stages of the ring and 32 KB of boxes a block takes 225 KB; 227 KB is the limit.
template <class Boxes>
static void matmul_forward_launch20(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_with_stages<6, 3, 4>(stages, [&](auto ring) {
        auto kernel = matmul_forward_sm90_kernel19<decltype(ring)::value, Boxes>;
        matmul_forward_launch16<true>(kernel, ring, 384, f, stream, 8 * 2 * sizeof(floatX[16 * 64]), Boxes::maps(f));
    });
}

void matmul_forward20(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch20<MatmulForwardBoxes20>(f, stream, stages);
}

// ---- kernel 21: boxes leave by TMA, and the consumer goes on while they do ----

// TMA writes a box by itself and skips what is outside of the matrix. The two boxes of a warp take turns, but with pre_gelu
// each matrix has one of them.
struct MatmulForwardBoxes21 {
    struct Maps {
        CUtensorMap out, pre_gelu;
    };
    static Maps maps(const MatmulForwardArgs& f) {
        CUtensorMap out = tensor_map(f.out, {f.OC, f.N}, {64, 16});
        return {out, f.pre_gelu ? tensor_map(f.pre_gelu, {f.OC, f.N}, {64, 16}) : out};
    }

    floatX (*boxes)[16 * 64];
    const Maps& to;
    int number; // how many boxes the warp has stored before
    __device__ MatmulForwardBoxes21(floatX (*boxes)[16 * 64], const Maps& maps) : boxes(boxes), to(maps), number(0) {}
    template <bool has_gelu> __device__ floatX* next() {
        if (threadIdx.x % 32 == 0) { tma_store_wait<has_gelu ? 0 : 1>(); } // TMA has read what the box had before
        __syncwarp();
        return boxes[has_gelu ? 0 : number++ % 2];
    }
    template <bool has_gelu> __device__ void store(const MatmulForwardArgs&, const floatX* box, int row0, int col0) {
        tma_store_fence();
        __syncwarp();
        if (threadIdx.x % 32 != 0) { return; }
        tma_store_2d(&to.out, box, col0, row0);
        if (has_gelu) { tma_store_2d(&to.pre_gelu, boxes[1], col0, row0); }
        tma_store_commit();
    }
    // shared memory stays until TMA has read it
    __device__ void end() {
        if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); }
    }
};

void matmul_forward21(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch20<MatmulForwardBoxes21>(f, stream, stages);
}

// ---- kernel 22: tiles of 128x192: a value of inp in shared memory is used for 192 columns instead of 128 ----

// A tile reads 2 (128 + 192) bytes for 2 * 128 * 192 FLOPs, 1/77 byte per FLOP where kernel 21 reads 1/64. In exchange
// 192 of a consumer's 240 registers per thread are accumulators. 192 divides 768 and 3072.
struct MatmulForwardStage22 {
    floatX inp[128 * 64], weight[192 * 64];
};

// The tiles of a block, and how it loads and frees a stage. Kernels 23 and 24 have others.
struct MatmulForwardBlocks22 {
    static constexpr int CLUSTER = 1; // blocks of a cluster
    static __device__ void tile(const MatmulForwardArgs& f, int index, int* n0, int* o0) {
        matmul_forward_tile(f, index, 128, 192, n0, o0);
    }
    static __device__ void load_weight(floatX* weight, const CUtensorMap& map, int k, int o0, uint64_t* full) {
        tma_load_2d(weight, &map, k, o0, full);
    }
    // called by a warp that has read a stage
    static __device__ void release(uint64_t* empty) {
        if (threadIdx.x % 32 == 0) { mbarrier_arrive(empty); }
    }
    static __device__ void sync() { __syncthreads(); }
};

// With 4 stages of the ring, 40 KB each, and 32 KB of boxes a block takes 193 KB.
template <int ring, class Blocks> __global__ void __launch_bounds__(384, 1)
    matmul_forward_sm90_kernel22(MatmulForwardArgs f, const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap weight_map,
                                 const __grid_constant__ MatmulForwardBoxes21::Maps maps, int num_tiles) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    // full: TMA has loaded the stage, consumers wait; empty: consumers have read it, the producer waits
    __shared__ uint64_t full[ring], empty[ring];
    __shared__ uint64_t turn[2]; // consumer c waits for turn[c]; the other consumer arrives once it issued its products
    auto stages = reinterpret_cast<MatmulForwardStage22*>(matmul_forward_stages(dynamic_shared));
    int n0, o0, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, group = threadIdx.x / 128;
    int num_steps = ceil_div(f.C, 64), first = blockIdx.x / Blocks::CLUSTER, stride = gridDim.x / Blocks::CLUSTER;
    if (threadIdx.x == 0) {
        for (int s = 0; s < ring; s++) {
            mbarrier_init(&full[s], 1);
            // the four warps of the one consumer, in each block, that reads the stage
            mbarrier_init(&empty[s], 4 * Blocks::CLUSTER);
        }
        for (int g = 0; g < 2; g++) { mbarrier_init(&turn[g], 4); }
        mbarrier_init_fence();
    }
    Blocks::sync();
    // Warpgroup 0 is the producer, warpgroups 1 and 2 are the consumers. The block's tiles, numbered 0, 1, 2, ..., go
    // to warpgroups 1, 2, 1, ...; their steps go through the ring in that order.
    if (group == 0) {
        warpgroup_fewer_registers<24>();
        if (threadIdx.x != 0) { return; }
        int i = 0;
        for (int tile = first; tile < num_tiles; tile += stride) {
            Blocks::tile(f, tile, &n0, &o0);
            for (int step = 0; step < num_steps; step++, i++) {
                mbarrier_wait(&empty[i % ring], (i / ring + 1) % 2);
                MatmulForwardStage22& stage = stages[i % ring];
                mbarrier_arrive_expect(&full[i % ring], sizeof(stage));
                tma_load_2d(stage.inp, &inp_map, step * 64, n0, &full[i % ring]);
                Blocks::load_weight(stage.weight, weight_map, step * 64, o0, &full[i % ring]);
            }
        }
        return;
    }
    warpgroup_more_registers<240>();
    MatmulForwardBoxes21 boxes(reinterpret_cast<floatX(*)[2][16 * 64]>(stages + ring)[threadIdx.x / 32 - 4], maps);
    // A consumer waits for its turn before it waits for a stage. A barrier's parity is one bit, so a consumer more than
    // a round of the ring ahead would take an earlier tile's stage for its own.
    // i: this consumer's next step among all steps of the block; number: tiles that this consumer has begun
    int i = (group - 1) * num_steps, number = 0;
    for (int tile = first + (group - 1) * stride; tile < num_tiles; tile += 2 * stride, i += num_steps) {
        // Rows 0..63, 64..127. Zeros take the place of a first product that overwrites: the compiler would take the old
        // sums for its input, and the epilogue would have too few registers.
        float sum[2][96] = {};
        mbarrier_wait(&turn[group - 1], (number++ + group) % 2);
        for (int step = 0; step < num_steps; step++, i++) {
            MatmulForwardStage22& stage = stages[i % ring];
            mbarrier_wait(&full[i % ring], i / ring % 2);
            wgmma_fence();
            uint64_t inp = wgmma_descriptor(stage.inp), weight = wgmma_descriptor(stage.weight);
#pragma unroll
            for (int k = 0; k < 8; k++) { // in the descriptor's units 16 columns are 2 and 64 rows are 512
                wgmma_64x192x16(sum[k % 2], inp + 512 * (k % 2) + k / 2 * 2, weight + k / 2 * 2, true, floatX());
            }
            wgmma_commit();
            wgmma_wait<1>(); // the previous step's products are done: its stage is free
            if (step > 0) { Blocks::release(&empty[(i - 1) % ring]); }
        }
        if (lane == 0) { mbarrier_arrive(&turn[2 - group]); }
        wgmma_wait<0>();
        Blocks::release(&empty[(i - 1) % ring]);
        Blocks::tile(f, tile, &n0, &o0);
        matmul_forward_store_tile(f, sum, boxes, n0 + 16 * warp, o0);
    }
    boxes.end();
    if (Blocks::CLUSTER > 1) { Blocks::sync(); } // the other block may still write to this one's shared memory
}

template <class Blocks>
static void matmul_forward_launch22(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    const int cluster = Blocks::CLUSTER;
    matmul_forward_with_stages<4, 2, 3>(stages, [&](auto ring) {
        auto kernel = matmul_forward_sm90_kernel22<decltype(ring)::value, Blocks>;
        require(compiled_arch(kernel) == 90); // nvcc -gencode arch=compute_90a,code=sm_90a
        CUtensorMap inp_map = tensor_map(f.inp, {f.C, f.N}, {64, 128});
        CUtensorMap weight_map = tensor_map(f.weight, {f.C, f.OC}, {64, 192 / cluster});
        const int bytes = decltype(ring)::value * sizeof(MatmulForwardStage22) + 8 * 2 * sizeof(floatX[16 * 64]) + 1024;
        int num_tiles = matmul_forward_num_tiles(f, 128 * cluster, 192); // with clusters: pairs of tiles
        int num_clusters = std::min(num_tiles, num_multiprocessors() / cluster);
        launch_kernel(kernel, LaunchShape(num_clusters * cluster, 384, bytes, cluster), stream, f, inp_map, weight_map,
                      MatmulForwardBoxes21::maps(f), num_tiles);
    });
}

void matmul_forward22(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch22<MatmulForwardBlocks22>(f, stream, stages);
}

// ---- kernel 23: order of tiles: groups of 16 rows of tiles, each column by column, so both operands stay in L2 ----

// The blocks of 132 SMs work on 132 consecutive tiles. Along OC these are few rows of tiles, but the whole weight: 77 MB for
// GPT-2's vocabulary, which L2 does not hold. In groups they are 16 rows of tiles and 8 or 9 columns, however large OC is.
__device__ inline void matmul_forward_grouped_tile(const MatmulForwardArgs& f, int index, int rows, int columns,
                                                   int height, int* n0, int* o0) {
    int num_rows = ceil_div(f.N, rows), num_columns = ceil_div(f.OC, columns);
    int first = index / (height * num_columns) * height, within = index % (height * num_columns);
    height = min(height, num_rows - first);
    *n0 = (first + within % height) * rows;
    *o0 = within / height * columns;
}

struct MatmulForwardBlocks23 : MatmulForwardBlocks22 {
    static __device__ void tile(const MatmulForwardArgs& f, int index, int* n0, int* o0) {
        matmul_forward_grouped_tile(f, index, 128, 192, 16, n0, o0);
    }
};

void matmul_forward23(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch22<MatmulForwardBlocks23>(f, stream, stages);
}

// ---- kernel 24: clusters of two blocks: each loads half of a weight tile, and TMA multicasts it to both ----

// The blocks of a cluster compute two tiles, one below the other, so both need the same tile of the weight. A stage is empty
// when the consumers of both blocks have read it: a lane arrives at the barrier of each.
struct MatmulForwardBlocks24 {
    static constexpr int CLUSTER = 2;
    static __device__ void tile(const MatmulForwardArgs& f, int index, int* n0, int* o0) {
        matmul_forward_grouped_tile(f, index, 256, 192, 8, n0, o0);
        *n0 += 128 * cluster_rank();
    }
    static __device__ void load_weight(floatX* weight, const CUtensorMap& map, int k, int o0, uint64_t* full) {
        int rank = cluster_rank();
        tma_load_2d_multicast(weight + rank * 96 * 64, &map, k, o0 + rank * 96, full, 3);
    }
    static __device__ void release(uint64_t* empty) {
        int lane = threadIdx.x % 32;
        if (lane < 2) { mbarrier_arrive_cluster(empty, lane); }
    }
    static __device__ void sync() { cluster_sync(); }
};

void matmul_forward24(const MatmulForwardArgs& f, cudaStream_t stream, int stages) {
    matmul_forward_launch22<MatmulForwardBlocks24>(f, stream, stages);
}

#endif

// ---- kernel 25: cuBLASLt for the product alone, in float; a second kernel is the epilogue ----
// The generator takes its form for a residual, which rounds once, as decode_matvec does: so a text goes on the same alone and among
// others.

__global__ void matmul_forward_finish_kernel25(MatmulForwardArgs f, const float* product) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= (size_t)f.N * f.OC) { return; }
    float y[x128::size];
#pragma unroll
    for (int k = 0; k < x128::size; k += 4) {
        f128 part = load128cs(product + i + k);
        for (int j = 0; j < 4; j++) { y[k + j] = part[j]; }
    }
    matmul_forward_store<x128::size>(f, y, (int)(i / f.OC), (int)(i % f.OC));
}

// product (N,OC) is scratch, in float: rounded to 16 bits it would lose accuracy where the bias cancels it
void matmul_forward25(const MatmulForwardArgs& f, float* product, cudaStream_t stream, int block_size) {
    if (f.residual) {
        return matmul_forward_residual(f.out, product, f.inp, f.weight, f.bias, f.residual, f.N, f.C, f.OC,
                                       {stream, block_size});
    }
    require(f.OC % x128::size == 0);
    matmul_forward_float(product, f.inp, f.weight, f.N, f.C, f.OC, stream);
    unsigned num_blocks = (unsigned)ceil_div((size_t)f.N * f.OC, (size_t)block_size * x128::size);
    matmul_forward_finish_kernel25<<<num_blocks, block_size, 0, stream>>>(f, product);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32)
// Kernel 27 with a given form of gemm.cuh (GEMM_PING_PONG_192, ...).
void matmul_forward27(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                      const floatX* residual, int N, int C, int OC, cudaStream_t stream, int form) {
    GemmArgs g = {out, saved.tensor, inp, weight, residual, N, OC, C};
    if (saved.tensor) { return gemm_form(g, GemmBias<GEMM_GELU | GEMM_SECOND>{bias}, false, stream, form); }
    if (saved.has_gelu()) { return gemm_form(g, GemmBias<GEMM_GELU>{bias}, false, stream, form); }
    if (residual) { return gemm_form(g, GemmBias<GEMM_ADD>{bias}, false, stream, form); }
    gemm_form(g, GemmBias<0>{bias}, false, stream, form);
}
#endif

// kernels 0 to 25; in_float (N,OC) is for kernel 25
static void declare_ladder(Bench& b, const MatmulForwardArgs& f, const Buffer<float>& in_float) {
    cudaStream_t stream = b.stream;
    b.kernel(0, "cuBLASLt, first candidate", [=](int) { matmul_forward0(f, stream); }, {0});
    b.kernel(1, "one thread per element", [=](int bs) { matmul_forward1(f, stream, bs); }, {64, 256, 1024});
    b.kernel(2, "one warp per element: coalesced", [=](int bs) { matmul_forward2(f, stream, bs); }, {64, 256, 1024});
    b.kernel(3, "32x32 tiles in shared memory", [=](int) { matmul_forward3(f, stream); }, {0});
    b.kernel(4, "64x64 tiles, 8 elements of a column per thread", [=](int) { matmul_forward4(f, stream); }, {0});
    b.kernel(5, "128x128 tiles, 8x8 elements per thread", [=](int) { matmul_forward5(f, stream); }, {0});
    b.kernel(6, "128-bit accesses of device memory", [=](int) { matmul_forward6(f, stream); }, {0});
    b.kernel(7, "transposed tiles: no bank conflicts", [=](int) { matmul_forward7(f, stream); }, {0});
    b.kernel(8, "double buffer, next tile in registers", [=](int) { matmul_forward8(f, stream); }, {0});
    b.kernel(9, "a tile of 64x32 per warp", [=](int) { matmul_forward9(f, stream); }, {0});
#if !defined(ENABLE_FP32)
    b.kernel(
        10, "mma.sync, 32-bit loads of fragments", [=](int) { matmul_forward10(f, stream); }, {0}, 80);
    b.kernel(
        11, "ldmatrix", [=](int) { matmul_forward11(f, stream); }, {0}, 80);
    b.kernel(
        12, "swizzled instead of padded", [=](int) { matmul_forward12(f, stream); }, {0}, 80);
    b.kernel(
        13, "ring of cp.async stages", [=](int stages) { matmul_forward13(f, stream, stages); }, {0, 2, 3, 5}, 80);
    b.config("stages");
    b.kernel(
        14, "steps of 64 columns", [=](int stages) { matmul_forward14(f, stream, stages); }, {0, 2, 4}, 80);
    b.config("stages");
    b.kernel(
        15, "wgmma on the ring of cp.async stages", [=](int stages) { matmul_forward15(f, stream, stages); },
        {0, 2, 4, 6}, -90);
    b.config("stages");
    b.kernel(
        16, "TMA and mbarriers", [=](int stages) { matmul_forward16(f, stream, stages); }, {0, 2, 4, 6}, -90);
    b.config("stages");
    b.kernel(
        17, "producer warp and two consumer warpgroups", [=](int stages) { matmul_forward17(f, stream, stages); },
        {0, 2, 4, 6}, -90);
    b.config("stages");
    b.kernel(
        18, "persistent: the ring runs on from tile to tile", [=](int stages) { matmul_forward18(f, stream, stages); },
        {0, 3, 4, 7}, -90);
    b.config("stages");
    b.kernel(
        19, "ping-pong: a tile per consumer (loses to 16)", [=](int stages) { matmul_forward19(f, stream, stages); },
        {0, 3, 4, 7}, -90);
    b.config("stages");
    b.kernel(
        20, "19 with results stored by stmatrix and in rows of 128 bytes",
        [=](int stages) { matmul_forward20(f, stream, stages); }, {0, 3, 4}, -90);
    b.config("stages");
    b.kernel(
        21, "results stored by TMA", [=](int stages) { matmul_forward21(f, stream, stages); }, {0, 3, 4}, -90);
    b.config("stages");
    b.kernel(
        22, "128x192 tiles", [=](int stages) { matmul_forward22(f, stream, stages); }, {0, 2, 3}, -90);
    b.config("stages");
    b.kernel(
        23, "order of tiles: in groups of 16 rows", [=](int stages) { matmul_forward23(f, stream, stages); }, {0, 3},
        -90);
    b.config("stages");
    b.kernel(
        24, "clusters of two, weight tiles by multicast", [=](int stages) { matmul_forward24(f, stream, stages); },
        {0, 3}, -90);
    b.config("stages");
#endif
    b.kernel(25, "cuBLASLt for the product, epilogue in a second kernel",
             [=](int bs) { matmul_forward25(f, in_float, stream, bs); }, {256, 512});
}

static void declare_slope(Bench& b, const MatmulForwardArgs& f);

static void declare(Bench& b) {
    int kind = b.kinds(
        {"bias", "bias and GELU", "bias and residual", "no bias", "1 with GELU's slope saved", "1 with nothing saved"});
    b.varies("BTCV");
    if (!b.dry) { cublaslt_open(); }
    int N = b.B * b.T, C = b.C, OC = b.V;
    bool has_slope = kind == 4, saves = kind == 1 || has_slope, has_gelu = saves || kind == 5, has_residual = kind == 2;
    bool has_bias = kind != 3;
    size_t n = (size_t)N * OC;
    int which = b.cases({"normal", "large terms that cancel", "one nonzero per row"});
    Buffer<floatX> inp = b.input_from<floatX>("inp", (size_t)N * C, [=, seed = b.next_seed()](float* x) {
        if (which == 0) { bench_fill_normal(x, (size_t)N * C, seed, 1.0f, 0.0f); }
        if (which == 1) { bench_fill_exact_large(x, (size_t)N * C, seed), bench_negate_halves(x, N, C); }
        if (which == 2) { bench_fill_one_hot(x, N, C, seed); }
    });
    Buffer<floatX> weight = which == 1 ? b.input_filled<floatX>("weight", (size_t)OC * C, bench_fill_exact_small)
                                       : b.input<floatX>("weight", (size_t)OC * C, 1.0f / sqrtf((float)C));
    Buffer<floatX> bias = {NULL, NULL}, residual = {NULL, NULL}, pre_gelu = {NULL, NULL};
    if (has_bias) { bias = b.input<floatX>("bias", OC); }
    if (has_residual) { residual = b.input<floatX>("residual", n); }
    Tolerance product = ulps<floatX>(1, 0.0f);
    product.atol = 16 * ulp_of<float>() * 0.64f * sqrtf((float)C);
    Tolerance of_slope = product;
    of_slope.atol = 1.2f * product.atol + 2e-4f; // gelu's largest second derivative; see gelu_and_slope()
    if (saves) { pre_gelu = b.output<floatX>(has_slope ? "slope" : "pre_gelu", n, has_slope ? of_slope : product); }
    Tolerance after_gelu = ulps<floatX>(sizeof(floatX) == 4 ? 8.0f : 1.5f, 0.1f);
    after_gelu.atol += 1.13f * product.atol; // gelu's largest slope
    Buffer<floatX> out = b.output<floatX>("out", n, has_gelu ? after_gelu : product);
    std::vector<size_t> rows = b.sample(N, 2.0 * C * OC);
    b.reference([=] {
        std::vector<float> x = rows_of(inp.host, rows, C), add = rows_of(residual.host, rows, OC);
        std::vector<float> y(rows.size() * OC);
        matmul_forward_cpu(y.data(), x.data(), weight.host, bias.host, has_residual ? add.data() : NULL, rows.size(), C,
                           OC);
        if (has_gelu) {
            std::vector<float> ones(y.size(), 1.0f), saved = y;
            if (has_slope) { gelu_backward_cpu(saved.data(), ones.data(), y.data(), y.size()); }
            if (saves) { put_rows(pre_gelu.host, saved, rows, OC); }
            gelu_forward_cpu(y.data(), y.data(), y.size());
        }
        put_rows(out.host, y, rows, OC);
    });
    b.cost((double)sizeof(floatX) * ((double)N * C + (double)OC * C + (1.0 + saves + has_residual) * (double)n),
           2.0 * N * C * OC);
    Buffer<float> in_float = b.scratch<float>("product", n); // for kernel 25
    MatmulForwardArgs f = {out, pre_gelu, inp, weight, bias, residual, N, C, OC};
    cudaStream_t stream = b.stream;
    int choice = b.dry ? 26 : matmul_forward_choice(N, C, OC);
    if (has_slope) { return declare_slope(b, f); }
    if (kind != 5) { declare_ladder(b, f, in_float); }
    GeluSaved saved = kind == 5 ? GeluSaved::not_kept() : GeluSaved(pre_gelu);
    b.kernel(26, "cuBLASLt, epilogue fused, algorithms timed",
             [=](int) { matmul_forward26(out, saved, inp, weight, bias, residual, N, C, OC, stream); }, {0});
#if !defined(ENABLE_FP32)
    std::vector<int> forms = {GEMM_PING_PONG_192, GEMM_PING_PONG_192_PAIRS, GEMM_COOPERATIVE_256,
                              GEMM_COOPERATIVE_256_PAIRS, GEMM_PING_PONG_128_PAIRS};
    if (b.dry || choice == 27) { forms.insert(forms.begin(), 0); } // 0: matmul_forward(), which chooses this kernel
    b.kernel(
        27, "gemm.cuh",
        [=](int form) {
            form ? matmul_forward27(out, saved, inp, weight, bias, residual, N, C, OC, stream, form)
                 : matmul_forward(out, saved, inp, weight, bias, residual, N, C, OC, stream);
        },
        forms, -90);
    b.config("form", gemm_form_name);
#endif
    b.promoted(choice);
    b.matrix_rate(cublaslt_matrix_rate);
}

// kind 4
static void declare_slope(Bench& b, const MatmulForwardArgs& f) {
#if !defined(ENABLE_FP32)
    auto save_slope = [=, stream = b.stream](int) {
        matmul_forward27(f.out, {f.pre_gelu, true}, f.inp, f.weight, f.bias, NULL, f.N, f.C, f.OC, stream);
    };
    b.kernel(28, "27 that saves GELU's slope instead of its argument", save_slope, {0}, -90);
#endif
    (void)b, (void)f;
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "matmul_forward", declare, {8, 1024, 768, 1, 3072},
        {{1, 1, 8, 1, 8},
         {1, 5, 776, 1, 136},
         with_kind(1, {3, 43, 776, 1, 200}),
         with_kind(2, {2, 65, 64, 1, 2304}),
         with_kind(3, {1, 127, 1600, 1, 264}),
         with_kind(4, {3, 43, 776, 1, 200}),
         with_kind(4, {1, 300, 264, 1, 392}),
         with_kind(5, {3, 43, 776, 1, 200}),
         with_kind(5, {1, 300, 264, 1, 392}),
         with_kind(5, {3, 1000, 768, 1, 1920}),
         with_kind(1, {2, 640, 256, 1, 1024}),
         with_kind(1, {3, 1000, 768, 1, 1920})}); // 360 tiles of 128x128: persistent blocks have up to three
}
