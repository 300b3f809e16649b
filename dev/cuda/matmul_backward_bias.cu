/* matmul_backward_bias: dbias += dout summed over its rows

   dbias (OC) float inout | dout (N,OC) floatX in; N = B*T, OC = 4C here
   Bound: memory, N*OC*sizeof(floatX) bytes. Constraint: OC % x128::size == 0 from kernel 4 on.
   Kernel 4 is not deterministic. Every other kernel sums in one fixed order for each block size.
   Error to the fp64 reference: the rounding of an fp32 sum of N terms of size 1, N * 2^-23.
   Source: Harris 2007, "Optimizing parallel reduction in CUDA"; kernel 9: Dakkak et al. 2019, arXiv:1811.09736.

   Kernels (this list is written by versions.sh):
     1  one thread per column
     2  one block per column
     3  warps on neighbouring columns, coalesced
     4  128-bit loads, float atomics
     5  partial sums in scratch (slower than 4)
     6  four rows in flight per warp, second kernel with 32 warps (slower than 4)
     7  one wave of blocks (promoted)
     8  the last block adds up the partial sums (slower than 7)
     9  tensor cores (mma.sync) add (slower than 7)
    10  one wave, second kernel launched early

   nvcc -O3 --use_fast_math matmul_backward_bias.cu -o matmul_backward_bias      (or: make matmul_backward_bias)
   ./matmul_backward_bias 7      check kernel 7 against the CPU and sweep its block sizes
   ./matmul_backward_bias        every kernel, side by side                                         */
#include "../../llmc/column_sums.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"

// ---- kernel 1: one thread per column -----------------------------------------------------

__global__ void matmul_backward_bias_kernel1(float* dbias, const floatX* dout, int N, int OC) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= OC) { return; }
    float sum = 0;
    for (int row = 0; row < N; row++) { sum += (float)dout[(size_t)row * OC + c]; }
    dbias[c] += sum;
}

void matmul_backward_bias1(float* dbias, const floatX* dout, int N, int OC, cudaStream_t stream, int block_size) {
    matmul_backward_bias_kernel1<<<ceil_div(OC, block_size), block_size, 0, stream>>>(dbias, dout, N, OC);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one block per column: enough threads, but each load of a lane is a memory sector of its own ----------

__global__ void matmul_backward_bias_kernel2(float* dbias, const floatX* dout, int N, int OC) {
    __shared__ float shared[32];
    float sum = 0;
    for (int row = threadIdx.x; row < N; row += blockDim.x) { sum += (float)dout[(size_t)row * OC + blockIdx.x]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { dbias[blockIdx.x] += sum; }
}

void matmul_backward_bias2(float* dbias, const floatX* dout, int N, int OC, cudaStream_t stream, int block_size) {
    matmul_backward_bias_kernel2<<<OC, block_size, 0, stream>>>(dbias, dout, N, OC);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: a warp reads 32 neighbouring columns, coalesced; the block's warps share the rows ------------------

__global__ void matmul_backward_bias_kernel3(float* dbias, const floatX* dout, int N, int OC) {
    __shared__ float shared[32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int c = blockIdx.x * 32 + lane;
    float sum = 0;
    for (int row = warp; row < N && c < OC; row += num_warps) { sum += (float)dout[(size_t)row * OC + c]; }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= OC) { return; }
    for (int w = 1; w < num_warps; w++) { sum += shared[w][lane]; }
    dbias[c] += sum;
}

void matmul_backward_bias3(float* dbias, const floatX* dout, int N, int OC, cudaStream_t stream, int block_size) {
    matmul_backward_bias_kernel3<<<ceil_div(OC, 32), block_size, 0, stream>>>(dbias, dout, N, OC);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: 128-bit loads; blocks also share the rows, and add their sums by float atomics ---------------------

// Calls store(c, sum) for each of the block's columns c, summed over the block's rows.
template <class Store>
__device__ inline void matmul_backward_bias_columns4(const floatX* dout, int N, int OC, int rows, const Store& store) {
    constexpr int columns = 32 * x128::size; // per warp
    extern __shared__ __align__(128) float matmul_backward_bias_shared[];
    float* shared = matmul_backward_bias_shared; // (warps, columns)
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int c = blockIdx.x * columns + lane * x128::size, end = min(N, (int)(blockIdx.y + 1) * rows);
    float sum[x128::size] = {};
    for (int row = blockIdx.y * rows + warp; row < end && c < OC; row += num_warps) {
        x128 x = load128(dout + (size_t)row * OC + c);
        for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[k]; }
    }
    for (int k = 0; k < x128::size; k++) { shared[warp * columns + lane * x128::size + k] = sum[k]; }
    __syncthreads();
    for (int i = threadIdx.x; i < columns && blockIdx.x * columns + i < OC; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < num_warps; w++) { total += shared[w * columns + i]; }
        store(blockIdx.x * columns + i, total);
    }
}

__global__ void matmul_backward_bias_kernel4(float* dbias, const floatX* dout, int N, int OC, int rows) {
    matmul_backward_bias_columns4(dout, N, OC, rows, [=](int c, float sum) { atomicAdd(dbias + c, sum); });
}

void matmul_backward_bias4(float* dbias, const floatX* dout, int N, int OC, cudaStream_t stream, int block_size) {
    require(OC % x128::size == 0);
    const int rows = 256, columns = 32 * x128::size;
    dim3 grid(ceil_div(OC, columns), ceil_div(N, rows));
    size_t shared = (size_t)block_size / 32 * columns * sizeof(float);
    matmul_backward_bias_kernel4<<<grid, block_size, shared, stream>>>(dbias, dout, N, OC, rows);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: deterministic: each block writes its sums to scratch, a second kernel adds them up in order --------

__global__ void matmul_backward_bias_kernel5(float* partial, const floatX* dout, int N, int OC, int rows) {
    matmul_backward_bias_columns4(dout, N, OC, rows,
                                  [=](int c, float sum) { partial[(size_t)blockIdx.y * OC + c] = sum; });
}

__global__ void matmul_backward_bias_join_kernel5(float* dbias, const float* partial, int num, int OC) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= OC) { return; }
    float sum = 0;
    for (int i = 0; i < num; i++) { sum += partial[(size_t)i * OC + c]; }
    dbias[c] += sum;
}

#include "matmul_backward_bias.cuh" // kernel 7

void matmul_backward_bias5(float* dbias, float* scratch, const floatX* dout, int N, int OC, cudaStream_t stream,
                           int block_size) {
    require(OC % x128::size == 0);
    const int columns = 32 * x128::size;
    int rows = matmul_backward_bias_rows(N, OC), num = ceil_div(N, rows);
    size_t shared = (size_t)block_size / 32 * columns * sizeof(float);
    dim3 grid(ceil_div(OC, columns), num);
    matmul_backward_bias_kernel5<<<grid, block_size, shared, stream>>>(scratch, dout, N, OC, rows);
    cudaCheck(cudaGetLastError());
    matmul_backward_bias_join_kernel5<<<ceil_div(OC, 128), 128, 0, stream>>>(dbias, scratch, num, OC);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: four rows in flight per warp, the second kernel uses 32 warps: kernel 7 with up to 2048 blocks -------

__global__ void matmul_backward_bias_kernel7(float* partial, const floatX* dout, int N, int OC, int rows);

void matmul_backward_bias6(float* dbias, float* scratch, const floatX* dout, int N, int OC, cudaStream_t stream,
                           int block_size) {
    require(OC % x128::size == 0);
    int rows = matmul_backward_bias_rows(N, OC), num = ceil_div(N, rows);
    size_t shared = (size_t)block_size / 32 * MATMUL_BACKWARD_BIAS_COLUMNS * sizeof(float);
    dim3 grid(ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS), num);
    matmul_backward_bias_kernel7<<<grid, block_size, shared, stream>>>(scratch, dout, N, OC, rows);
    cudaCheck(cudaGetLastError());
    column_sums<32>(dbias, NULL, NULL, scratch, num, OC, stream);
}

// ---- kernel 8: one launch: the last block to finish a group of columns adds up the partial sums of that group -------

__global__ void matmul_backward_bias_kernel8(float* dbias, float* partial, unsigned* finished, const floatX* dout,
                                             int N, int OC, int rows) {
    constexpr int columns = MATMUL_BACKWARD_BIAS_COLUMNS, unroll = 4;
    extern __shared__ __align__(128) float matmul_backward_bias_shared[];
    float* shared = matmul_backward_bias_shared; // (warps, columns)
    __shared__ bool is_last;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int c = blockIdx.x * columns + lane * x128::size;
    float sum[x128::size] = {};
    if (c < OC) {
        int row = blockIdx.y * rows + warp, end = min(N, (int)(blockIdx.y + 1) * rows);
        for (; row + (unroll - 1) * num_warps < end; row += unroll * num_warps) {
            x128 x[unroll];
#pragma unroll
            for (int u = 0; u < unroll; u++) { x[u] = load128(dout + (size_t)(row + u * num_warps) * OC + c); }
#pragma unroll
            for (int u = 0; u < unroll; u++) {
                for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[u][k]; }
            }
        }
        for (; row < end; row += num_warps) {
            x128 x = load128(dout + (size_t)row * OC + c);
            for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[k]; }
        }
    }
    for (int k = 0; k < x128::size; k++) { shared[warp * columns + k * 32 + lane] = sum[k]; }
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < num_warps; w++) { total += shared[w * columns + i]; }
        int column = blockIdx.x * columns + i % 32 * x128::size + i / 32;
        if (column < OC) { partial[(size_t)blockIdx.y * OC + column] = total; }
    }
    __threadfence(); // makes the partial sums visible before the count
    __syncthreads();
    if (threadIdx.x == 0) { is_last = atomicAdd(finished + blockIdx.x, 1) == gridDim.y - 1; }
    __syncthreads();
    if (!is_last) { return; }
    __threadfence();
    for (int i = threadIdx.x; i < columns && blockIdx.x * columns + i < OC; i += blockDim.x) {
        float total = 0;
#pragma unroll 16
        for (int y = 0; y < gridDim.y; y++) { total += __ldcg(partial + (size_t)y * OC + blockIdx.x * columns + i); }
        dbias[blockIdx.x * columns + i] += total;
    }
}

// `finished` has one counter per group of columns
void matmul_backward_bias8(float* dbias, float* scratch, unsigned* finished, const floatX* dout, int N, int OC,
                           cudaStream_t stream, int block_size) {
    require(OC % x128::size == 0);
    int rows = matmul_backward_bias_rows(N, OC), tiles = ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS);
    size_t shared = (size_t)block_size / 32 * MATMUL_BACKWARD_BIAS_COLUMNS * sizeof(float);
    cudaCheck(cudaMemsetAsync(finished, 0, tiles * sizeof(unsigned), stream));
    dim3 grid(tiles, ceil_div(N, rows));
    matmul_backward_bias_kernel8<<<grid, block_size, shared, stream>>>(dbias, scratch, finished, dout, N, OC, rows);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 9: tensor cores add: no conversion to float, and an eighth of the instructions ----------------------

#if !defined(ENABLE_FP32)
// dout is the operand b. A 32-bit register of dout holds two neighbouring columns of one row, but mma_16x8x16 takes
// them for neighbours in k. So the operand a has two rows of ones: row 0 has them at even k and sums the even columns,
// row 1 at odd k and sums the odd columns. Lane 4g + t loads vector g (8 columns) of rows t and t + 4. Register r of
// these two loads is the operand b of product r, one mma over eight rows:
//
//     b of product r      n = g: columns 8g + 2r and 8g + 2r + 1 of eight rows of dout
//       k = 0, 1          row 0, even and odd column       (lane t = 0, first load)
//       k = 2, 3          row 1                            (lane t = 1, first load)
//       k = 8, 9          row 4                            (lane t = 0, second load)
//     d of product r      (0, g): the sum of column 8g + 2r; (1, g): of column 8g + 2r + 1
__global__ void matmul_backward_bias_kernel9(float* partial, const floatX* dout, int N, int OC, int rows) {
    constexpr int columns = 64, unroll = 2; // columns per block; groups of eight rows in flight per warp
    __shared__ float shared[32][columns];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    int c = blockIdx.x * columns + g * 8, end = min(N, (int)(blockIdx.y + 1) * rows);
    uint32_t ones = g == 0 ? pack_16x2(1, 0, floatX()) : g == 1 ? pack_16x2(0, 1, floatX()) : 0;
    const uint32_t a[4] = {ones, 0, ones, 0};
    float d[4][4] = {};
    for (int row = blockIdx.y * rows + warp * 8 * unroll; row < end; row += num_warps * 8 * unroll) {
        int4 x[2 * unroll];
#pragma unroll
        for (int u = 0; u < 2 * unroll; u++) {
            int r = row + u * 4 + t;
            x[u] = make_int4(0, 0, 0, 0);
            if (r < end && c < OC) { x[u] = __ldcs(reinterpret_cast<const int4*>(dout + (size_t)r * OC + c)); }
        }
#pragma unroll
        for (int u = 0; u < 2 * unroll; u += 2) {
            mma_16x8x16(d[0], a, x[u].x, x[u + 1].x, floatX());
            mma_16x8x16(d[1], a, x[u].y, x[u + 1].y, floatX());
            mma_16x8x16(d[2], a, x[u].z, x[u + 1].z, floatX());
            mma_16x8x16(d[3], a, x[u].w, x[u + 1].w, floatX());
        }
    }
    // lane 4g + t has row g of the product, columns 2t and 2t + 1: element 2r + g of the vectors 2t and 2t + 1
    for (int r = 0; r < 4 && g < 2; r++) {
        for (int j = 0; j < 2; j++) { shared[warp][(2 * t + j) * 8 + 2 * r + g] = d[r][j]; }
    }
    __syncthreads();
    int i = threadIdx.x;
    if (i >= columns || blockIdx.x * columns + i >= OC) { return; }
    float total = 0;
    for (int w = 0; w < num_warps; w++) { total += shared[w][i]; }
    partial[(size_t)blockIdx.y * OC + blockIdx.x * columns + i] = total;
}

void matmul_backward_bias9(float* dbias, float* scratch, const floatX* dout, int N, int OC, cudaStream_t stream,
                           int block_size) {
    require(OC % x128::size == 0);
    int rows = matmul_backward_bias_rows(N, OC), num = ceil_div(N, rows);
    matmul_backward_bias_kernel9<<<dim3(ceil_div(OC, 64), num), block_size, 0, stream>>>(scratch, dout, N, OC, rows);
    cudaCheck(cudaGetLastError());
    column_sums<32>(dbias, NULL, NULL, scratch, num, OC, stream);
}
#endif

// ---- kernel 10: kernel 7 that lets the second kernel launch early: its blocks wait on the SMs for the sums ----------

__global__ void matmul_backward_bias_kernel10(float* partial, const floatX* dout, int N, int OC, int rows) {
    grid_launch_dependents(); // the second kernel's blocks start as soon as there is room for them
    matmul_backward_bias_sums(partial, dout, N, OC, rows);
}

void matmul_backward_bias10(float* dbias, float* scratch, const floatX* dout, int N, int OC, cudaStream_t stream,
                            int block_size) {
    require(OC % x128::size == 0);
    size_t shared = (size_t)block_size / 32 * MATMUL_BACKWARD_BIAS_COLUMNS * sizeof(float);
    int per_sm, tiles = ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS);
    cudaCheck(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, matmul_backward_bias_kernel10, block_size, shared));
    int room = ceil_div(N, matmul_backward_bias_rows(N, OC));
    int rows = ceil_div(N, min(room, max(1, num_multiprocessors() * per_sm / tiles)));
    int num = ceil_div(N, rows);
    matmul_backward_bias_kernel10<<<dim3(tiles, num), block_size, shared, stream>>>(scratch, dout, N, OC, rows);
    cudaCheck(cudaGetLastError());
    column_sums<32>(dbias, NULL, NULL, scratch, num, OC, stream);
}

static void declare(Bench& b) {
    int N = b.B * b.T, OC = 4 * b.C;
    // exact: dout has a mean of 28, and fp32 sums of up to 65536 rows are exact in any order
    bool exact = b.cases({"normal", "exact sums of large values"}) == 1;
    Buffer<floatX> dout = exact ? b.input_filled<floatX>("dout", (size_t)N * OC, bench_fill_exact_large)
                                : b.input<floatX>("dout", (size_t)N * OC);
    Buffer<float> start =
        exact ? b.input_filled<float>("dbias0", OC, bench_fill_exact_small) : b.input<float>("dbias0", OC);
    Buffer<float> dbias = b.inout<float>("dbias", OC, start, ulps<float>(1, N + 4));
    Buffer<float> scratch = b.scratch<float>("scratch", matmul_backward_bias_scratch(N, OC));
    Buffer<unsigned> finished = b.scratch<unsigned>("finished", OC);
    b.reference([=] {
        memcpy(dbias.host, start.host, OC * sizeof(float));
        matmul_backward_bias_cpu(dbias.host, dout.host, N, OC);
    });
    b.cost((double)N * OC * sizeof(floatX), 0);
    b.reads_only();
    cudaStream_t s = b.stream;
    b.kernel(1, "one thread per column", [=](int bs) { matmul_backward_bias1(dbias, dout, N, OC, s, bs); });
    b.kernel(2, "one block per column", [=](int bs) { matmul_backward_bias2(dbias, dout, N, OC, s, bs); });
    b.kernel(3, "warps on neighbouring columns, coalesced",
             [=](int bs) { matmul_backward_bias3(dbias, dout, N, OC, s, bs); });
    b.kernel(4, "128-bit loads, float atomics", [=](int bs) { matmul_backward_bias4(dbias, dout, N, OC, s, bs); });
    b.kernel(5, "partial sums in scratch", [=](int bs) { matmul_backward_bias5(dbias, scratch, dout, N, OC, s, bs); });
    b.kernel(6, "four rows in flight per warp, second kernel with 32 warps",
             [=](int bs) { matmul_backward_bias6(dbias, scratch, dout, N, OC, s, bs); });
    b.kernel(7, "one wave of blocks",
             [=](int bs) {
                 matmul_backward_bias(dbias, scratch, dout, N, OC, {s, bs});
             },
             {bench_tunable("matmul_backward_bias")});
    b.kernel(8, "the last block adds up the partial sums",
             [=](int bs) { matmul_backward_bias8(dbias, scratch, finished, dout, N, OC, s, bs); });
#if !defined(ENABLE_FP32)
    b.kernel(
        9, "tensor cores (mma.sync) add", [=](int bs) { matmul_backward_bias9(dbias, scratch, dout, N, OC, s, bs); },
        {64, 128, 256, 512, 1024}, 80);
#endif
    b.kernel(
        10, "one wave, second kernel launched early",
        [=](int bs) { matmul_backward_bias10(dbias, scratch, dout, N, OC, s, bs); }, {128, 256, 512, 1024}, 90);
    b.promoted(7);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "matmul_backward_bias", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 2}, {1, 1, 8}, {3, 171, 776}, {2, 1030, 62}, {1, 64, 200}});
}
