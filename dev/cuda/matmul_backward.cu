/* matmul_backward: the gradients of a linear layer out = inp weight^T with respect to its input and its weight

   dinp (N,C) floatX out = dout weight, times gelu'(pre_gelu) if inp = gelu(pre_gelu) |
   dweight (OC,C) float = dout^T inp, out, or inout if it accumulates |
   dout (N,OC) floatX in | inp, pre_gelu (N,C) floatX in | weight (OC,C) floatX in; N = B*T
   Bound: compute, 4*N*C*OC FLOPs. Constraint: C % 8 == 0, OC % 8 == 0.
   Error of dinp to the fp64 reference: one ulp of floatX. Where terms cancel, also 16 fp32 roundings of the sum of
   their magnitudes, which is 0.64 * sqrt(OC) here. With gelu', 1.5 ulp (fp32: 8) of |dinp| + 0.3, because the library's
   tanh is approximate.
   Error of dweight: two ulp of float, and 16 roundings of the sum of the magnitudes, which is 0.64 * N here.
   Tuned: stages of the ring of kernel 4, blocks that share a tile of kernel 5. Kernels 2 and 3 have the tiles that
   shared memory and registers suggest; kernels 0, 6 and 7 are the library, which chooses by itself. Kernel 10 takes the
   number of clusters, but fewer than all are only for checks.
   Source: the tanh form of gelu is Hendrycks and Gimpel 2016, arXiv:1606.08415.

   Kernels (this list is written by versions.sh):
     0  cuBLASLt, first candidate
     1  one thread per element
     2  32x32 tiles in shared memory
     3  128x128 tiles, 8x8 accumulators per thread
     4  mma.sync, operands transposed by ldmatrix
     5  mma.sync, split K for dweight
     6  cuBLASLt, algorithms timed (promoted)
     7  cuBLASLt, bias gradient in the epilogue (kind 2)
     8  gemm.cuh for dinp with gelu', cuBLASLt for dweight (kind 1)
     9  dweight by wgmma, whole tiles
    10  9 with the steps of all tiles shared out evenly (stream-K)
    11  8 or 6, then matmul_backward_bias (kind 3)
    12  8 with the sums of dinp's columns in the epilogue; 6 with matmul_backward_bias (promoted) (kind 3)
    13  12 with the slope that the forward pass has saved (kind 4)
     kind 1: dinp times gelu'; dweight overwritten
     kind 2: 0 with the bias gradient
     kind 3: 1 with the sums of dinp's columns
     kind 4: 3 with GELU's slope saved

   nvcc -O3 --use_fast_math matmul_backward.cu -lcublasLt -o matmul_backward      (or: make matmul_backward)
   ./matmul_backward 5            check kernel 5 against the CPU
   ./matmul_backward              every kernel, side by side
   ./matmul_backward -C 3072 -V 768 --kind 1      here -V is OC; kind 0 accumulates into dweight, 1 multiplies dinp by
                                  gelu' and overwrites dweight, 2 is 0 with the bias gradient (kernel 7 only), 3 is 1 with
                                  the sums of dinp's columns, the bias gradient of the layer before (kernels 11, 12), 4 is 3
                                  with gelu' itself as input, which matmul_forward 28 saves (kernel 13)  */
#include "../../llmc/column_sums.cuh"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "matmul_backward_bias.cuh"

// ---- shared by the kernels: both gradients are products a b with row-major b (K,N); a is row- or column-major ----
// Loops over register arrays are unrolled by a pragma: an array with an index that the compiler does not know would be
// in local memory.

struct MatmulBackwardProduct {
    const floatX *a, *b;    // a (M,K), or (K,M) if a_by_k; b (K,N)
    bool a_by_k;            // true: a is stored as (K,M), a column-major (M,K)
    int M, N, K;            // the product sums over K
    floatX* dinp;           // (M,N), or NULL if the result is dweight
    const floatX* pre_gelu; // (M,N), or NULL
    float* dweight;         // (M,N)
    bool accumulate;        // add to dweight instead of overwriting it
};
struct MatmulBackwardArgs {
    MatmulBackwardProduct input, weight; // the product that gives dinp, and the one that gives dweight
};

__device__ inline size_t matmul_backward_a(const MatmulBackwardProduct& p, int m, int k) {
    return p.a_by_k ? (size_t)k * p.M + m : (size_t)m * p.K + k;
}

// n neighbouring elements of a row, in accesses of at most 16 bytes
template <class T, int n> struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) MatmulRun { T v[n]; };

// The epilogue for n neighbouring elements of a row, and their stores; col is a multiple of n.
template <int n>
__device__ inline void matmul_backward_store(const MatmulBackwardProduct& p, const float* y, int row, int col) {
    if (row >= p.M || col >= p.N) { return; }
    size_t i = (size_t)row * p.N + col;
    if (p.dinp) {
        MatmulRun<floatX, n> dinp, pre_gelu = {};
        if (p.pre_gelu) { pre_gelu = *reinterpret_cast<const MatmulRun<floatX, n>*>(p.pre_gelu + i); }
#pragma unroll
        for (int k = 0; k < n; k++) {
            dinp.v[k] = (floatX)(y[k] * (p.pre_gelu ? gelu_slope((float)pre_gelu.v[k]) : 1.0f));
        }
        *reinterpret_cast<MatmulRun<floatX, n>*>(p.dinp + i) = dinp;
    } else {
        MatmulRun<float, n> dweight = {};
        if (p.accumulate) { dweight = *reinterpret_cast<const MatmulRun<float, n>*>(p.dweight + i); }
#pragma unroll
        for (int k = 0; k < n; k++) { dweight.v[k] += y[k]; }
        *reinterpret_cast<MatmulRun<float, n>*>(p.dweight + i) = dweight;
    }
}

__device__ inline void matmul_backward_tile(const MatmulBackwardProduct& p, int tile, int size, int* m0, int* n0) {
    int num_columns = ceil_div(p.N, size);
    *m0 = tile / num_columns * size;
    *n0 = tile % num_columns * size;
}
static int matmul_backward_num_tiles(const MatmulBackwardProduct& p, int size) {
    size_t num_tiles = ceil_div((size_t)p.M, (size_t)size) * ceil_div((size_t)p.N, (size_t)size);
    require(num_tiles <= INT_MAX && p.N % 8 == 0 && (p.a_by_k ? p.M : p.K) % 8 == 0);
    return (int)num_tiles;
}

// ---- kernel 0: cuBLASLt untuned: the library's first candidate ----

#include "matmul_backward.cuh" // kernels 6, 8 and 10

static void matmul_backward_cublaslt(const MatmulBackwardArgs& g, const Execution& exec) {
    const MatmulBackwardProduct &x = g.input, &w = g.weight;
    matmul_backward_input6(x.dinp, x.a, x.b, x.pre_gelu, x.M, x.N, x.K, exec);
    matmul_backward_weight6(w.dweight, w.a, w.b, w.K, w.N, w.M, w.accumulate, exec);
}

void matmul_backward0(const MatmulBackwardArgs& g, Execution exec) {
    exec.times_algorithms = false;
    matmul_backward_cublaslt(g, exec);
}

// ---- kernel 1: one thread per element of dinp, then of dweight ----

__global__ void matmul_backward_kernel1(MatmulBackwardProduct p) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.M * p.N) { return; }
    int row = (int)(i / p.N), col = (int)(i % p.N);
    float sum = 0.0f;
    for (int k = 0; k < p.K; k++) {
        sum += (float)p.a[matmul_backward_a(p, row, k)] * (float)p.b[(size_t)k * p.N + col];
    }
    matmul_backward_store<1>(p, &sum, row, col);
}

void matmul_backward1(const MatmulBackwardArgs& g, cudaStream_t stream, int block_size) {
    for (const MatmulBackwardProduct& p : {g.input, g.weight}) {
        size_t num_blocks = ceil_div((size_t)p.M * p.N, (size_t)block_size);
        require(num_blocks <= INT_MAX);
        matmul_backward_kernel1<<<(unsigned)num_blocks, block_size, 0, stream>>>(p);
        cudaCheck(cudaGetLastError());
    }
}

// ---- kernel 2: 32x32 tiles of both operands in shared memory ----

__global__ void __launch_bounds__(1024) matmul_backward_kernel2(MatmulBackwardProduct p) {
    __shared__ float a[32][33], b[32][33]; // [k][m], [k][n]; 33: a column touches 32 banks
    int m0, n0, x = threadIdx.x % 32, y = threadIdx.x / 32;
    matmul_backward_tile(p, blockIdx.x, 32, &m0, &n0);
    float sum = 0.0f;
    for (int k0 = 0; k0 < p.K; k0 += 32) {
        int m = p.a_by_k ? x : y, k = p.a_by_k ? y : x; // lanes along the contiguous dimension of a
        a[k][m] = m0 + m < p.M && k0 + k < p.K ? (float)p.a[matmul_backward_a(p, m0 + m, k0 + k)] : 0.0f;
        b[y][x] = n0 + x < p.N && k0 + y < p.K ? (float)p.b[(size_t)(k0 + y) * p.N + n0 + x] : 0.0f;
        __syncthreads();
        for (int j = 0; j < 32; j++) { sum += a[j][y] * b[j][x]; }
        __syncthreads();
    }
    matmul_backward_store<1>(p, &sum, m0 + y, n0 + x);
}

void matmul_backward2(const MatmulBackwardArgs& g, cudaStream_t stream) {
    for (const MatmulBackwardProduct& p : {g.input, g.weight}) {
        matmul_backward_kernel2<<<matmul_backward_num_tiles(p, 32), 1024, 0, stream>>>(p);
        cudaCheck(cudaGetLastError());
    }
}

// ---- kernel 3: 128x128 tiles, 8x8 accumulators per thread in registers ----

// Loads 16 rows (k) and 128 columns, from (k0, column0) on, of a matrix (K, num_columns); zeros outside of it.
__device__ inline void matmul_backward_load3(float tile[16][132], const floatX* matrix, int k0, int column0, int K,
                                             int num_columns) {
    const int vectors = 128 / x128::size; // per row
    for (int v = threadIdx.x; v < 16 * vectors; v += 256) {
        int k = v / vectors, column = v % vectors * x128::size;
        bool inside = k0 + k < K && column0 + column < num_columns;
        x128 x = inside ? load128(matrix + (size_t)(k0 + k) * num_columns + column0 + column) : x128();
        for (int j = 0; j < x128::size; j++) { tile[k][column + j] = (float)x[j]; }
    }
}
// Loads the same tile of a matrix that is stored as (num_columns, K), and transposes it.
__device__ inline void matmul_backward_load_transposed3(float tile[16][132], const floatX* matrix, int k0, int column0,
                                                        int K, int num_columns) {
    const int vectors = 16 / x128::size;
    for (int v = threadIdx.x; v < 128 * vectors; v += 256) {
        int column = v / vectors, k = v % vectors * x128::size;
        bool inside = column0 + column < num_columns && k0 + k < K;
        x128 x = inside ? load128(matrix + (size_t)(column0 + column) * K + k0 + k) : x128();
        for (int j = 0; j < x128::size; j++) { tile[k + j][column] = (float)x[j]; }
    }
}

__global__ void __launch_bounds__(256, 1) matmul_backward_kernel3(MatmulBackwardProduct p) {
    __shared__ alignas(16) float a[16][132], b[16][132];
    int m0, n0, x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
    matmul_backward_tile(p, blockIdx.x, 128, &m0, &n0);
    float sum[8][8] = {}; // rows y .. y+3 and y+64 .. y+67, columns x .. x+3 and x+64 .. x+67
    for (int k0 = 0; k0 < p.K; k0 += 16) {
        if (p.a_by_k) {
            matmul_backward_load3(a, p.a, k0, m0, p.K, p.M);
        } else {
            matmul_backward_load_transposed3(a, p.a, k0, m0, p.K, p.M);
        }
        matmul_backward_load3(b, p.b, k0, n0, p.K, p.N);
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            f128 r[2] = {load128(&a[k][y]), load128(&a[k][64 + y])};
            f128 c[2] = {load128(&b[k][x]), load128(&b[k][64 + x])};
            for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 8; j++) { sum[i][j] += r[i / 4][i % 4] * c[j / 4][j % 4]; }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = m0 + i / 4 * 64 + y + i % 4;
        matmul_backward_store<4>(p, &sum[i][0], row, n0 + x);
        matmul_backward_store<4>(p, &sum[i][4], row, n0 + 64 + x);
    }
}

void matmul_backward3(const MatmulBackwardArgs& g, cudaStream_t stream) {
    for (const MatmulBackwardProduct& p : {g.input, g.weight}) {
        matmul_backward_kernel3<<<matmul_backward_num_tiles(p, 128), 256, 0, stream>>>(p);
        cudaCheck(cudaGetLastError());
    }
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// ---- kernel 4: tensor cores by mma.sync; ldmatrix transposes the operands that need it ----

// With 4 stages three blocks would fit on an SM, registers allow two.
template <int ring> struct MatmulBackwardSMem { floatX a[ring][128 * 32], b[ring][32 * 128]; };
constexpr int MATMUL_BACKWARD_RING = 4; // the default

// Swizzles: the offset of chunk `chunk` (8 elements) of a row, in a tile (128,32) or (32,128). The same chunk of the 8
// neighbouring rows that ldmatrix reads at once is then in 8 different groups of 4 banks.
__device__ inline int matmul_backward_at_128x32(int row, int chunk) { return row * 32 + (chunk ^ (row / 2 % 4)) * 8; }
__device__ inline int matmul_backward_at_32x128(int row, int chunk) { return row * 128 + (chunk ^ (row % 8)) * 8; }

// Loads a tile of `matrix` (num_rows, num_columns) from (row0, column0) on; zeros outside of it.
template <bool is_128x32> __device__ inline void matmul_backward_load4(floatX* tile, const floatX* matrix, int row0,
                                                                       int column0, int num_rows, int num_columns) {
    const int chunks = is_128x32 ? 4 : 16; // per row
    for (int v = threadIdx.x; v < 128 * 4; v += 256) {
        int row = v / chunks, chunk = v % chunks;
        bool inside = row0 + row < num_rows && column0 + chunk * 8 < num_columns;
        const floatX* from = inside ? matrix + (size_t)(row0 + row) * num_columns + column0 + chunk * 8 : matrix;
        int at = is_128x32 ? matmul_backward_at_128x32(row, chunk) : matmul_backward_at_32x128(row, chunk);
        cp_async_16(tile + at, from, inside);
    }
}

// Computes the tile of a b at (m0, n0), summed over k_begin <= k < k_end only; k_begin is a multiple of 32.
template <bool a_by_k, int ring>
__device__ inline void matmul_backward_mma(const MatmulBackwardProduct& p, int m0, int n0, int k_begin, int k_end) {
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    auto& shared = *reinterpret_cast<MatmulBackwardSMem<ring>*>(dynamic_shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp / 4 * 64, warp_col = warp % 4 * 32; // each warp computes 64x32 of the tile
    int num_steps = ceil_div(k_end - k_begin, 32);
    auto load = [&](int step) {
        int k0 = k_begin + step * 32;
        if (step < num_steps) {
            if (a_by_k) {
                matmul_backward_load4<false>(shared.a[step % ring], p.a, k0, m0, k_end, p.M);
            } else {
                matmul_backward_load4<true>(shared.a[step % ring], p.a, m0, k0, p.M, p.K);
            }
            matmul_backward_load4<false>(shared.b[step % ring], p.b, k0, n0, k_end, p.N);
        }
        cp_async_commit(); // past the last step the group is empty: cp_async_wait counts one group per step
    };
    for (int step = 0; step < ring - 1; step++) { load(step); }
    float sum[4][16] = {}; // [four tiles of 16 rows][four fragments of 8 columns, 4 values per lane]
    for (int step = 0; step < num_steps; step++) {
        cp_async_wait<ring - 2>();
        __syncthreads(); // this step's stage has arrived, and all warps have read the previous step's stage
        load(step + ring - 1);
        const floatX *a_tile = shared.a[step % ring], *b_tile = shared.b[step % ring];
#pragma unroll
        for (int k = 0; k < 2; k++) { // 16 of the stage's 32 values of k per iteration
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int m = warp_row + 16 * i;
                if (a_by_k) {
                    int row = 16 * k + lane / 16 * 8 + lane % 8, chunk = m / 8 + lane / 8 % 2;
                    ldmatrix_x4_trans(a[i], a_tile + matmul_backward_at_32x128(row, chunk));
                } else {
                    ldmatrix_x4(a[i], a_tile + matmul_backward_at_128x32(m + lane % 16, 2 * k + lane / 16));
                }
            }
#pragma unroll
            for (int j = 0; j < 2; j++) { // two fragments of 8 columns each
                int row = 16 * k + lane % 16, chunk = (warp_col + 16 * j) / 8 + lane / 16;
                ldmatrix_x4_trans(b[j], b_tile + matmul_backward_at_32x128(row, chunk));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    mma_16x8x16(sum[i] + 4 * j, a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], floatX());
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) { // rows 0..7 of the fragments, then 8..15
            float v[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j][0] = sum[i][4 * j + 2 * upper];
                v[j][1] = sum[i][4 * j + 2 * upper + 1];
            }
            mma_quad_transpose(v); // now this lane has 8 neighbouring elements of one row
            int row = m0 + warp_row + 16 * i + 8 * upper + lane / 4;
            matmul_backward_store<8>(p, &v[0][0], row, n0 + warp_col + lane % 4 * 8);
        }
    }
}

template <bool a_by_k, int ring> __global__ void __launch_bounds__(256, 2)
    matmul_backward_kernel4(MatmulBackwardProduct p) {
    int m0, n0;
    matmul_backward_tile(p, blockIdx.x, 128, &m0, &n0);
    matmul_backward_mma<a_by_k, ring>(p, m0, n0, 0, p.K);
}

template <bool a_by_k, int ring>
static void matmul_backward_product4(const MatmulBackwardProduct& p, cudaStream_t stream) {
    auto kernel = matmul_backward_kernel4<a_by_k, ring>;
    require(p.a_by_k == a_by_k && compiled_arch(kernel) >= 80);
    const int bytes = sizeof(MatmulBackwardSMem<ring>);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<matmul_backward_num_tiles(p, 128), 256, bytes, stream>>>(p);
    cudaCheck(cudaGetLastError());
}

template <int ring> static void matmul_backward4_stages(const MatmulBackwardArgs& g, cudaStream_t stream) {
    matmul_backward_product4<false, ring>(g.input, stream);
    matmul_backward_product4<true, ring>(g.weight, stream);
}
void matmul_backward4(const MatmulBackwardArgs& g, cudaStream_t stream, int stages) {
    switch (stages) { // with 2 stages registers are spilled
    case 3:
        return matmul_backward4_stages<3>(g, stream);
    case 5:
        return matmul_backward4_stages<5>(g, stream);
    }
    require(stages == 0);
    matmul_backward4_stages<MATMUL_BACKWARD_RING>(g, stream);
}

// ---- kernel 5: split-K for dweight, which has few tiles and a long K; a second kernel adds up the parts ----

__global__ void __launch_bounds__(256, 2)
    matmul_backward_split_kernel5(MatmulBackwardProduct p, float* parts, int part_length) {
    int m0, n0, part = blockIdx.y;
    matmul_backward_tile(p, blockIdx.x, 128, &m0, &n0);
    p.dweight = parts + (size_t)part * p.M * p.N;
    p.accumulate = false;
    matmul_backward_mma<true, MATMUL_BACKWARD_RING>(p, m0, n0, part * part_length, min((part + 1) * part_length, p.K));
}

__global__ void matmul_backward_sum_kernel5(float* dweight, const float* parts, size_t n, int num_parts,
                                            bool accumulate) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * f128::size;
    if (i >= n) { return; }
    f128 sum = accumulate ? load128(dweight + i) : f128();
    for (int part = 0; part < num_parts; part++) {
        f128 x = load128cs(parts + (size_t)part * n + i);
        for (int k = 0; k < f128::size; k++) { sum[k] += x[k]; }
    }
    store128(dweight + i, sum);
}

// The number of blocks that share a tile of dweight. It gives about blocks_per_sm blocks in all for each of 132 SMs,
// and each block at least 512 of K.
static int matmul_backward_num_parts(int N, int C, int OC, int blocks_per_sm) {
    int num_tiles = ceil_div(OC, 128) * ceil_div(C, 128);
    return std::max(1, std::min(blocks_per_sm * 132 / num_tiles, N / 512));
}
constexpr int MATMUL_BACKWARD_MAX_BLOCKS = 8; // per SM, the most that is tried

// scratch holds the parts of MATMUL_BACKWARD_MAX_BLOCKS; blocks_per_sm 0 is the default
void matmul_backward5(const MatmulBackwardArgs& g, float* scratch, cudaStream_t stream, int blocks_per_sm) {
    matmul_backward_product4<false, MATMUL_BACKWARD_RING>(g.input, stream);
    const MatmulBackwardProduct& p = g.weight;
    const int bytes = sizeof(MatmulBackwardSMem<MATMUL_BACKWARD_RING>);
    cudaCheck(cudaFuncSetAttribute(matmul_backward_split_kernel5, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int num_parts = matmul_backward_num_parts(p.K, p.N, p.M, blocks_per_sm ? blocks_per_sm : 4);
    int part_length = ceil_div(ceil_div(p.K, num_parts), 32) * 32;
    num_parts = ceil_div(p.K, part_length); // because part_length was rounded up, the last parts may be empty
    dim3 grid(matmul_backward_num_tiles(p, 128), num_parts);
    matmul_backward_split_kernel5<<<grid, 256, bytes, stream>>>(p, scratch, part_length);
    cudaCheck(cudaGetLastError());
    size_t n = (size_t)p.M * p.N;
    unsigned num_blocks = (unsigned)ceil_div(n, (size_t)256 * f128::size);
    matmul_backward_sum_kernel5<<<num_blocks, 256, 0, stream>>>(p.dweight, scratch, n, num_parts, p.accumulate);
    cudaCheck(cudaGetLastError());
}

#endif

// ---- kernel 7: cuBLASLt; dweight's epilogue also sums dout over its rows, so the bias gradient needs no extra read --

// Returns false if the library has no such algorithm.
static bool matmul_backward7(const MatmulBackwardArgs& g, float* dbias, cudaStream_t stream) {
    const MatmulBackwardProduct &x = g.input, &w = g.weight;
    matmul_backward_input6(x.dinp, x.a, x.b, x.pre_gelu, x.M, x.N, x.K, stream);
    MatmulCall call;
    call.out = w.dweight, call.out_is_float = true;
    call.a = w.a, call.a_transposed = true;
    call.b = w.b;
    call.M = w.M, call.N = w.N, call.K = w.K;
    call.add = w.accumulate ? w.dweight : NULL;
    call.epilogue = MATMUL_BIAS_GRAD;
    call.bias_grad = dbias;
    return cublaslt_matmul(call, stream);
}

// ---- kernel 9: dweight by wgmma and TMA: a producer, cooperative consumers, a cluster per tile of 256 rows ----
// This is kernel 10 with whole tiles only: its schedule cuts no tile, so a cluster computes one after the other. 36
// tiles of 256x256 on 66 clusters leave almost half of the GPU without work.

#if !defined(ENABLE_FP32)
void matmul_backward_weight9(float* dweight, const floatX* dout, const floatX* inp, int N, int C, int OC,
                             bool accumulate, cudaStream_t stream, int max_clusters) {
    int num_tiles = ceil_div(OC, 256) * ceil_div(C, matmul_backward_columns(C));
    MatmulBackwardSchedule s = {ceil_div(N, 64), num_tiles, 0, std::min(max_clusters, num_tiles)};
    matmul_backward_weight10(dweight, NULL, dout, inp, N, C, OC, accumulate, stream, s);
}
#endif

static void declare(Bench& b) {
    int kind = b.kinds({"dweight accumulated", "dinp times gelu'; dweight overwritten", "0 with the bias gradient",
                        "1 with the sums of dinp's columns", "3 with GELU's slope saved"});
    b.varies("BTCV");
    if (!b.dry) { cublaslt_open(); }
    int N = b.B * b.T, C = b.C, OC = b.V;
    bool has_slope = kind == 4, has_gelu = kind == 1 || kind == 3 || has_slope, accumulate = !has_gelu,
         has_bias = kind == 2, has_sums = kind == 3 || has_slope;
    size_t num_weights = (size_t)OC * C;
    int which = b.cases({"normal", "large terms that cancel", "one nonzero per row"});
    bool cancelling = which == 1; // both sums do: over the columns of dout for dinp, over its rows for dweight
    Buffer<floatX> dout = b.input_from<floatX>("dout", (size_t)N * OC, [=, seed = b.next_seed()](float* x) {
        if (which == 0) { bench_fill_normal(x, (size_t)N * OC, seed, 1.0f, 0.0f); }
        if (which == 1) {
            bench_fill_exact_large(x, (size_t)N * OC, seed);
            bench_negate_halves(x, N, OC);
            // whole rows, so that every sum over a row still cancels if N is odd
            for (size_t i = (size_t)((N + 1) / 2) * OC; i < (size_t)N * OC; i++) { x[i] = -x[i]; }
        }
        if (which == 2) { bench_fill_one_hot(x, N, OC, seed); }
    });
    Buffer<floatX> inp = cancelling ? b.input_filled<floatX>("inp", (size_t)N * C, bench_fill_exact_small)
                                    : b.input<floatX>("inp", (size_t)N * C);
    Buffer<floatX> weight = cancelling ? b.input_filled<floatX>("weight", num_weights, bench_fill_exact_small)
                                       : b.input<floatX>("weight", num_weights, 1.0f / sqrtf((float)OC));
    Buffer<floatX> pre_gelu = {NULL, NULL};
    if (has_gelu) { pre_gelu = b.input<floatX>(has_slope ? "slope" : "pre_gelu", (size_t)N * C); }
    Tolerance product = ulps<floatX>(1, 0.0f), sums = ulps<float>(2, 0.0f);
    product.atol = 16 * ulp_of<float>() * 0.64f * sqrtf((float)OC);
    sums.atol = 16 * ulp_of<float>() * 0.64f * (float)N;
    Tolerance after_gelu = ulps<floatX>(sizeof(floatX) == 4 ? 8.0f : 1.5f, 0.3f);
    after_gelu.atol += 1.13f * product.atol; // gelu's largest slope
    Buffer<floatX> dinp = b.output<floatX>("dinp", (size_t)N * C, has_gelu ? after_gelu : product);
    Buffer<float> start = {NULL, NULL}, dweight, dbias = {NULL, NULL};
    if (accumulate) {
        start = cancelling ? b.input_filled<float>("start", num_weights, bench_fill_exact_small)
                           : b.input<float>("start", num_weights);
        dweight = b.inout<float>("dweight", num_weights, start, sums);
    } else {
        dweight = b.output<float>("dweight", num_weights, sums);
    }
    if (has_bias) { dbias = b.output<float>("dbias", OC, sums); }
    Buffer<float> dinp_sums = {NULL, NULL}, sums_start = {NULL, NULL};
    if (has_sums && cancelling) { // sums of large, rounded numbers say nothing
        dinp_sums = b.scratch<float>("dinp_sums", C);
    } else if (has_sums) { // the errors of the rows are independent
        sums_start = b.input<float>("sums_start", C);
        dinp_sums =
            b.inout<float>("dinp_sums", C, sums_start, Tolerance{sqrtf((float)N) * after_gelu.atol, after_gelu.rtol});
    }
    std::vector<size_t> rows = b.sample(N, 2.0 * C * OC), outputs = b.sample(OC, 2.0 * N * C);
    b.reference([=] {
        std::vector<float> d = rows_of(dout.host, rows, OC), before = rows_of(pre_gelu.host, rows, C);
        std::vector<float> gradient(rows.size() * C);
        matmul_backward_input_cpu(gradient.data(), d.data(), weight.host, has_gelu && !has_slope ? before.data() : NULL,
                                  rows.size(), C, OC);
        for (size_t i = 0; has_slope && i < gradient.size(); i++) { gradient[i] *= before[i]; }
        put_rows(dinp.host, gradient, rows, C);
        if (has_sums && rows.size() == (size_t)N && !cancelling) {
            memcpy(dinp_sums.host, sums_start.host, C * sizeof(float));
            matmul_backward_bias_cpu(dinp_sums.host, dinp.host, N, C);
        }
        size_t num = outputs.size();
        std::vector<float> columns(N * num), added = rows_of(start.host, outputs, C), sums(num * C);
        for (size_t i = 0; i < N * num; i++) { columns[i] = dout.host[i / num * OC + outputs[i % num]]; }
        matmul_backward_weight_cpu(sums.data(), accumulate ? added.data() : NULL, columns.data(), inp.host, N, C, num);
        put_rows(dweight.host, sums, outputs, C);
        for (int o = 0; has_bias && o < OC; o++) {
            double sum = 0.0;
            for (int i = 0; i < N; i++) { sum += dout.host[(size_t)i * OC + o]; }
            dbias.host[o] = (float)sum;
        }
    });
    int choice = b.dry ? 6 : matmul_backward_input_choice(N, C, has_gelu);
    double activations =
        2.0 * N * OC + (2.0 + has_gelu + (has_sums && choice == 6)) * (double)N * C + (double)num_weights;
    b.cost(sizeof(floatX) * activations + (1.0 + accumulate) * sizeof(float) * (double)num_weights, 4.0 * N * C * OC);
    b.matrix_rate(cublaslt_matrix_rate);

    MatmulBackwardArgs g = {{dout, weight, false, N, C, OC, dinp, pre_gelu, NULL, false},
                            {dout, inp, true, OC, C, N, NULL, NULL, dweight, accumulate}};
    cudaStream_t stream = b.stream;
    int promoted = !b.dry && matmul_backward_weight_choice(N, C, OC) == 10 ? 10 : choice;
    Buffer<float> scratch = {NULL, NULL}, parts = {NULL, NULL};
    size_t num_scratch = has_sums && !b.dry ? matmul_backward_bias_scratch(N, C) : 0; // of kernel 11
#if !defined(ENABLE_FP32)
    if (has_gelu && !b.dry) { num_scratch = std::max(num_scratch, matmul_backward_input_scratch(N, C)); }
    if (has_slope) { num_scratch = std::max(num_scratch, (size_t)ceil_div(N, 128) * C); }
    size_t four = (size_t)4 * 256 * matmul_backward_columns(C); // configuration 4, on a device that fits fewer clusters
    if (!has_bias) {
        parts = b.scratch<float>("parts", b.dry ? 0 : std::max(matmul_backward_weight_scratch10(C), four));
    }
#endif
    if (has_gelu) { scratch = b.scratch<float>("scratch", num_scratch); }
    if (!has_sums) {
        // kernel `number`, with kernels `input` for dinp and `weight` for dweight; the promoted one as the trainer calls it
        auto launch = [=](int number, int input, int weight_kernel, int max_clusters) {
            if (number == promoted && max_clusters == 0) {
                matmul_backward_input(dinp, NULL, scratch, dout, weight, {pre_gelu}, N, C, OC, stream);
                matmul_backward_weight(dweight, parts, dout, inp, N, C, OC, accumulate, stream);
                return;
            }
#if !defined(ENABLE_FP32)
            if (input == 8) { matmul_backward_input8(dinp, NULL, NULL, dout, weight, {pre_gelu}, N, C, OC, stream); }
            int clusters = max_clusters ? max_clusters : matmul_backward_max_clusters();
            if (weight_kernel == 9) {
                matmul_backward_weight9(dweight, dout, inp, N, C, OC, accumulate, stream, clusters);
            }
            if (weight_kernel == 10) {
                MatmulBackwardSchedule s = matmul_backward_schedule(N, C, OC, clusters);
                matmul_backward_weight10(dweight, parts, dout, inp, N, C, OC, accumulate, stream, s);
            }
#endif
            if (input == 6) { matmul_backward_input6(dinp, dout, weight, pre_gelu, N, C, OC, stream); }
            if (weight_kernel == 6) { matmul_backward_weight6(dweight, dout, inp, N, C, OC, accumulate, stream); }
        };
        if (!has_bias) {
            b.kernel(0, "cuBLASLt, first candidate", [=](int) { matmul_backward0(g, stream); }, {0});
            b.kernel(1, "one thread per element", [=](int bs) { matmul_backward1(g, stream, bs); }, {64, 256, 1024});
            b.kernel(2, "32x32 tiles in shared memory", [=](int) { matmul_backward2(g, stream); }, {0});
            b.kernel(3, "128x128 tiles, 8x8 accumulators per thread", [=](int) { matmul_backward3(g, stream); }, {0});
#if !defined(ENABLE_FP32)
            size_t num_parts = matmul_backward_num_parts(N, C, OC, MATMUL_BACKWARD_MAX_BLOCKS);
            Buffer<float> scratch = b.scratch<float>("scratch", num_weights * num_parts);
            b.kernel(
                4, "mma.sync, operands transposed by ldmatrix",
                [=](int stages) { matmul_backward4(g, stream, stages); }, {0, 3, 5}, 80);
            b.config("stages");
            b.kernel(
                5, "mma.sync, split K for dweight", [=](int blocks) { matmul_backward5(g, scratch, stream, blocks); },
                {0, 1, 2, MATMUL_BACKWARD_MAX_BLOCKS}, 80);
            b.config("blocks per SM");
#endif
            b.kernel(6, "cuBLASLt, algorithms timed", [=](int) { launch(6, 6, 6, 0); }, {0});
        } else if (b.dry || matmul_backward7(g, dbias, stream)) {
            b.kernel(7, "cuBLASLt, bias gradient in the epilogue", [=](int) { matmul_backward7(g, dbias, stream); },
                     {0});
        }
#if !defined(ENABLE_FP32)
        if (has_gelu) {
            b.kernel(
                8, "gemm.cuh for dinp with gelu', cuBLASLt for dweight", [=](int) { launch(8, 8, 6, 0); }, {0}, -90);
        }
        if (!has_bias) {
            b.kernel(
                9, "dweight by wgmma, whole tiles", [=](int clusters) { launch(9, choice, 9, clusters); }, {0, 4}, -90);
            b.config("clusters"); // 0: one for two SMs; 4: even small shapes have more tiles than clusters
            b.kernel(
                10, "9 with the steps of all tiles shared out evenly (stream-K)",
                [=](int clusters) { launch(10, choice, 10, clusters); }, {0, 4}, -90);
            b.config("clusters");
        }
#endif
        if (!has_bias) { b.promoted(promoted); }
        return;
    }
    if (!has_slope) {
        auto two_ops = [=](int) {
            matmul_backward_input(dinp, NULL, scratch, dout, weight, {pre_gelu}, N, C, OC, stream);
            matmul_backward_bias(dinp_sums, scratch, dinp, N, C, stream);
            matmul_backward_weight(dweight, parts, dout, inp, N, C, OC, accumulate, stream);
        };
        auto fused = [=](int) {
            matmul_backward_input(dinp, dinp_sums, scratch, dout, weight, {pre_gelu}, N, C, OC, stream);
            matmul_backward_weight(dweight, parts, dout, inp, N, C, OC, accumulate, stream);
        };
        b.kernel(11, "8 or 6, then matmul_backward_bias", two_ops, {0});
        b.kernel(12, "8 with the sums of dinp's columns in the epilogue; 6 with matmul_backward_bias", fused, {0});
        return b.promoted(12);
    }
#if !defined(ENABLE_FP32)
    auto multiply = [=](int) {
        matmul_backward_input8(dinp, dinp_sums, scratch, dout, weight, {pre_gelu, true}, N, C, OC, stream);
        matmul_backward_weight(dweight, parts, dout, inp, N, C, OC, accumulate, stream);
    };
    b.kernel(13, "12 with the slope that the forward pass has saved", multiply, {0}, -90);
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "matmul_backward", declare, {8, 1024, 768, 1, 3072},
                      {{1, 1, 8, 1, 8},
                       with_kind(1, {1, 5, 776, 1, 136}),
                       {3, 43, 264, 1, 200},
                       {1, 1000, 24, 1, 16}, // with 4 SMs, two clusters share one tile of dweight
                       with_kind(1, {2, 65, 64, 1, 2304}),
                       {1, 2100, 128, 1, 72},
                       {1, 1000, 520, 1, 520},
                       {1, 1000, 504, 1, 1096},
                       with_kind(1, {2, 1057, 248, 1, 264}),
                       with_kind(2, {1, 77, 200, 1, 96}),
                       with_kind(3, {1, 77, 200, 1, 96}),
                       with_kind(3, {5, 463, 3080, 1, 136}),
                       with_kind(4, {1, 77, 200, 1, 96}),
                       with_kind(4, {2, 463, 776, 1, 136})});
}
