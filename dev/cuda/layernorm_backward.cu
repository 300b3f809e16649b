/* layernorm_backward: gradient of layernorm_forward, plus the gradient of the residual stream that bypasses it

   dinp (N,C) floatX out | dweight, dbias (C) float inout, accumulated | scratch (layernorm_backward_scratch(C)) float
   dout (N,C) floatX in | dresidual (N,C) floatX in, may be NULL or dinp | inp (N,C), weight (C) floatX in
   mean, rstd (N) float in; N = B*T
   Per row, with norm = (inp - mean) * rstd and dnorm = dout * weight:
       dinp = dresidual + rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
   Over all rows: dweight += sum(dout * norm), dbias += sum(dout); kernel 13 also sums (C) += sum(dinp), the gradient of a
   bias that was added to inp.
   Bound: memory, 4*N*C*sizeof(floatX) bytes. Constraint: C % 8 == 0; C <= 6144 in fp32, 8192 in 16 bits (kernels 2,
   4 and 5: 6144).
   Error of dinp against the fp64 reference: half an ulp of floatX for the final rounding, plus the error of the fp32
   arithmetic: 8 fp32 ulps of the result and 64 fp32 ulps of 1, because terms cancel.
   Error of dweight, dbias: 16 fp32 ulps of the result plus 16 fp32 ulps of sqrt(N), the typical size of a sum of N
   terms of size 1. Kernel 2 may be off by twice as much, because it adds thousands of partial sums one by one.
   Source: Ba et al. 2016, arXiv:1607.06450.

   Kernels (this list is written by versions.sh):
     1  dinp: one thread per row; dweight, dbias: one per column and 256 rows
     2  one warp per row, column sums by atomics in shared memory
     3  no atomics: a second kernel rereads the inputs for the column sums
     4  one block per row, column sums in registers (slower than 3)
     5  one block for 4 rows at a time: one barrier, 9 shuffles
     6  one warp per row, column sums per warp in shared memory
     7  6 with the row in registers, inputs read once (slower than 6)
     8  column sums in registers, too
     9  8 with the next row copied ahead by cp.async
    10  9 with programmatic dependent launch of the second kernel
    11  5 with the next rows copied ahead by cp.async (promoted)
    12  11, then matmul_backward_bias (kind 3)
    13  11 with the sums of dinp's columns in registers (promoted) (kind 3)
     kind 3: 0 with the sums of dinp's columns

   nvcc -O3 --use_fast_math layernorm_backward.cu -o layernorm_backward      (or: make layernorm_backward)
   ./layernorm_backward 4      check kernel 4 against the CPU and sweep its block sizes
   ./layernorm_backward        every kernel, side by side                                         */
#include "../../llmc/column_sums.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "matmul_backward_bias.cuh"

// ---- kernel 1: one thread per row for dinp; one thread per column and 256 rows for dweight and dbias, atomics ----

__global__ void layernorm_backward_rows_kernel1(floatX* dinp, const floatX* dout, const floatX* dresidual,
                                                const floatX* inp, const floatX* weight, const float* mean,
                                                const float* rstd, int N, int C) {
    size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= (size_t)N) { return; }
    float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
    for (size_t i = row * C; i < (row + 1) * C; i++) {
        float dnorm = (float)dout[i] * (float)weight[i - row * C];
        sum += dnorm;
        dot += dnorm * ((float)inp[i] - m) * r;
    }
    for (size_t i = row * C; i < (row + 1) * C; i++) {
        float dnorm = (float)dout[i] * (float)weight[i - row * C], norm = ((float)inp[i] - m) * r;
        float gradient = r * (dnorm - sum / C - norm * (dot / C));
        dinp[i] = (floatX)((dresidual ? (float)dresidual[i] : 0.0f) + gradient);
    }
}

__global__ void layernorm_backward_columns_kernel1(float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                                                   const float* mean, const float* rstd, int N, int C) {
    int c = blockIdx.y * blockDim.x + threadIdx.x, start = blockIdx.x * 256;
    if (c >= C) { return; }
    float dw = 0.0f, db = 0.0f;
    for (int row = start; row < N && row < start + 256; row++) {
        size_t i = (size_t)row * C + c;
        dw += (float)dout[i] * ((float)inp[i] - mean[row]) * rstd[row];
        db += (float)dout[i];
    }
    atomicAdd(dweight + c, dw);
    atomicAdd(dbias + c, db);
}

void layernorm_backward1(floatX* dinp, float* dweight, float* dbias, float*, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    // the two launches could be in either order: the column kernel reads dout and inp, which the row kernel only reads
    dim3 grid(ceil_div(N, 256), ceil_div(C, block_size));
    layernorm_backward_columns_kernel1<<<grid, block_size, 0, stream>>>(dweight, dbias, dout, inp, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_rows_kernel1<<<ceil_div(N, block_size), block_size, 0, stream>>>(dinp, dout, dresidual, inp,
                                                                                        weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one launch, one warp per row; each block sums the columns by atomics in shared memory ---------

__global__ void layernorm_backward_kernel2(floatX* dinp, float* dweight, float* dbias, const floatX* dout,
                                           const floatX* dresidual, const floatX* inp, const floatX* weight,
                                           const float* mean, const float* rstd, int N, int C) {
    extern __shared__ __align__(128) float layernorm_backward_sums[]; // (2, C)
    float *block_dweight = layernorm_backward_sums, *block_dbias = layernorm_backward_sums + C;
    int lane = threadIdx.x % 32, block_rows = blockDim.x / 32;
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) { layernorm_backward_sums[c] = 0.0f; }
    __syncthreads();
    for (int row = blockIdx.x * block_rows + threadIdx.x / 32; row < N; row += gridDim.x * block_rows) {
        size_t start = (size_t)row * C;
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
        for (int c = lane; c < C; c += 32) {
            float dnorm = (float)dout[start + c] * (float)weight[c];
            sum += dnorm;
            dot += dnorm * ((float)inp[start + c] - m) * r;
        }
        sum = warp_sum(sum) / C;
        dot = warp_sum(dot) / C;
        for (int c = lane; c < C; c += 32) {
            float d = (float)dout[start + c], norm = ((float)inp[start + c] - m) * r;
            float gradient = r * (d * (float)weight[c] - sum - norm * dot);
            dinp[start + c] = (floatX)((dresidual ? (float)dresidual[start + c] : 0.0f) + gradient);
            atomicAdd(block_dweight + c, d * norm);
            atomicAdd(block_dbias + c, d);
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        atomicAdd(dweight + c, block_dweight[c]);
        atomicAdd(dbias + c, block_dbias[c]);
    }
}

void layernorm_backward2(floatX* dinp, float* dweight, float* dbias, float*, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    require(C <= 6144); // 2 * C floats must fit in 48 KB of shared memory
    int grid_size = min(ceil_div(N, block_size / 32), num_multiprocessors() * max(1, 1024 / block_size));
    layernorm_backward_kernel2<<<grid_size, block_size, 2 * C * sizeof(float), stream>>>(
        dinp, dweight, dbias, dout, dresidual, inp, weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: no atomics; one kernel for dinp, a second one reads dout and inp again for the column sums ---------

__global__ void layernorm_backward_rows_kernel3(floatX* dinp, const floatX* dout, const floatX* dresidual,
                                                const floatX* inp, const floatX* weight, const float* mean,
                                                const float* rstd, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = threadIdx.x % 32 * x128::size;
    if (row >= N) { return; }
    size_t start = (size_t)row * C;
    float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
    for (int c = first; c < C; c += 32 * x128::size) {
        x128 dy = load128(dout + start + c), x = load128(inp + start + c), w = load128(weight + c);
        for (int k = 0; k < x128::size; k++) {
            float dnorm = (float)dy[k] * (float)w[k];
            sum += dnorm;
            dot += dnorm * ((float)x[k] - m) * r;
        }
    }
    sum = warp_sum(sum) / C;
    dot = warp_sum(dot) / C;
    for (int c = first; c < C; c += 32 * x128::size) {
        x128 dy = load128(dout + start + c), x = load128(inp + start + c), w = load128(weight + c), dx = {};
        if (dresidual) { dx = load128(dresidual + start + c); }
        for (int k = 0; k < x128::size; k++) {
            float dnorm = (float)dy[k] * (float)w[k], norm = ((float)x[k] - m) * r;
            dx[k] = (floatX)((float)dx[k] + r * (dnorm - sum - norm * dot));
        }
        store128(dinp + start + c, dx);
    }
}

// partials (gridDim.y, 2, C): partial sums of dweight and dbias. Each block sums 32 vectors of columns, one vector per
// lane, over 1 / gridDim.y of the rows.
__global__ void layernorm_backward_columns_kernel3(float* partials, const floatX* dout, const floatX* inp,
                                                   const float* mean, const float* rstd, int N, int C) {
    __shared__ float sums[32][2 * x128::size]; // [lane][column]; the warps add to `sums` one after the other
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int c = (blockIdx.x * 32 + lane) * x128::size;
    float dw[x128::size] = {}, db[x128::size] = {};
    for (int row = blockIdx.y * num_warps + warp; c < C && row < N; row += gridDim.y * num_warps) {
        x128 dy = load128(dout + (size_t)row * C + c), x = load128(inp + (size_t)row * C + c);
        float m = mean[row], r = rstd[row];
        for (int k = 0; k < x128::size; k++) {
            dw[k] += (float)dy[k] * ((float)x[k] - m) * r;
            db[k] += (float)dy[k];
        }
    }
    for (int turn = 0; turn < num_warps; turn++) {
        if (warp == turn) {
            for (int k = 0; k < x128::size; k++) {
                sums[lane][k] = (turn ? sums[lane][k] : 0.0f) + dw[k];
                sums[lane][x128::size + k] = (turn ? sums[lane][x128::size + k] : 0.0f) + db[k];
            }
        }
        __syncthreads();
    }
    if (warp == 0 && c < C) {
        for (int k = 0; k < x128::size; k++) {
            partials[((size_t)blockIdx.y * 2 + 0) * C + c + k] = sums[lane][k];
            partials[((size_t)blockIdx.y * 2 + 1) * C + c + k] = sums[lane][x128::size + k];
        }
    }
}

// dweight, dbias (C) += partials (num_partials, 2, C) summed over num_partials; one thread per element of the result
__global__ void layernorm_backward_sum_kernel3(float* dweight, float* dbias, const float* partials, int num_partials,
                                               int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= 2 * C) { return; }
    float sum = 0.0f;
    for (int i = 0; i < num_partials; i++) { sum += partials[(size_t)i * 2 * C + c]; }
    *(c < C ? dweight + c : dbias + c - C) += sum;
}

void layernorm_backward3(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    layernorm_backward_rows_kernel3<<<ceil_div(N, block_size / 32), block_size, 0, stream>>>(dinp, dout, dresidual, inp,
                                                                                             weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    dim3 grid(ceil_div(C / x128::size, 32), min(ceil_div(N, block_size / 32), num_multiprocessors()));
    layernorm_backward_columns_kernel3<<<grid, block_size, 0, stream>>>(scratch, dout, inp, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid.y, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: one block per row, many rows per block; a thread sums the same columns of all rows in registers ----

constexpr int LAYERNORM_BACKWARD_MAX_BLOCK_SIZE4 = 768; // one 16-bit vector per thread covers C = 6144

template <int num_vecs> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_MAX_BLOCK_SIZE4)
    layernorm_backward_kernel4(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C) {
    __shared__ float shared[32];
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {};
    for (int row = blockIdx.x; row < N; row += gridDim.x) {
        x128 dy[num_vecs] = {}, x[num_vecs] = {}, w[num_vecs] = {}, dx[num_vecs] = {};
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            int c = (j * blockDim.x + threadIdx.x) * x128::size;
            if (c < C) {
                dy[j] = load128(dout + (size_t)row * C + c);
                x[j] = load128(inp + (size_t)row * C + c);
                if (dresidual) { dx[j] = load128(dresidual + (size_t)row * C + c); }
                w[j] = load128(weight + c);
            }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)dy[j][k], norm = ((float)x[j][k] - m) * r;
                sum += d * (float)w[j][k];
                dot += d * (float)w[j][k] * norm;
                dw[j][k] += d * norm;
                db[j][k] += d;
            }
        }
        sum = block_sum(sum, shared) / C;
        dot = block_sum(dot, shared) / C;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            int c = (j * blockDim.x + threadIdx.x) * x128::size;
            for (int k = 0; k < x128::size; k++) {
                float dnorm = (float)dy[j][k] * (float)w[j][k], norm = ((float)x[j][k] - m) * r;
                dx[j][k] = (floatX)((float)dx[j][k] + r * (dnorm - sum - norm * dot));
            }
            if (c < C) { store128(dinp + (size_t)row * C + c, dx[j]); }
        }
    }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        int c = (j * blockDim.x + threadIdx.x) * x128::size;
        for (int k = 0; k < x128::size && c < C; k++) {
            partials[((size_t)blockIdx.x * 2 + 0) * C + c + k] = dw[j][k];
            partials[((size_t)blockIdx.x * 2 + 1) * C + c + k] = db[j][k];
        }
    }
}

void layernorm_backward4(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int blocks_per_sm) {
    require(C % x128::size == 0 && C <= 6144 && blocks_per_sm <= 4);
    constexpr int most = x128::size == 4 ? 2 : 1; // vectors per thread for the longest row
    int num_vecs = C / x128::size <= LAYERNORM_BACKWARD_MAX_BLOCK_SIZE4 ? 1 : most;
    int block_size = ceil_div(C / x128::size, 32 * num_vecs) * 32; // fixed by the length of a row
    // scratch holds the partial sums of 4 blocks per SM
    int grid_size = min(N, num_multiprocessors() * (blocks_per_sm ? blocks_per_sm : 4));
    auto kernel = num_vecs == 1 ? layernorm_backward_kernel4<1> : layernorm_backward_kernel4<most>;
    kernel<<<grid_size, block_size, 0, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid_size, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: 4 rows at a time, with one barrier for the 4 rows and 9 shuffles for their 8 sums --------------------

constexpr int LAYERNORM_BACKWARD_MAX_BLOCK_SIZE5 = 384; // leaves 168 registers per thread

// Long rows take num_vecs = 2 or 4 vectors per thread; the block then handles only 2 rows or 1 row at a time.
template <int num_vecs> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_MAX_BLOCK_SIZE5)
    layernorm_backward_kernel5(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C) {
    constexpr int rows = 4 / num_vecs;
    // [buffer][warp]: sum and dot of each row; the two buffers alternate, so one barrier per iteration is enough
    __shared__ float shared[2][32][8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32, parity = 0;
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {}, inv_C = 1.0f / C;
    x128 w[num_vecs] = {};
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        int c = (j * blockDim.x + threadIdx.x) * x128::size;
        if (c < C) { w[j] = load128(weight + c); }
    }
    for (int start = blockIdx.x * rows; start < N; start += gridDim.x * rows) {
        x128 dy[rows][num_vecs] = {}, x[rows][num_vecs] = {}, dx[rows][num_vecs] = {};
        float m[rows] = {}, r[rows] = {}, sums[8] = {};
#pragma unroll
        for (int i = 0; i < rows; i++) {
            if (start + i < N) { m[i] = mean[start + i], r[i] = rstd[start + i]; }
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                int c = (j * blockDim.x + threadIdx.x) * x128::size;
                if (start + i < N && c < C) {
                    dy[i][j] = load128(dout + (size_t)(start + i) * C + c);
                    x[i][j] = load128(inp + (size_t)(start + i) * C + c);
                    if (dresidual) { dx[i][j] = load128(dresidual + (size_t)(start + i) * C + c); }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < rows; i++) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                for (int k = 0; k < x128::size; k++) {
                    float d = (float)dy[i][j][k], norm = ((float)x[i][j][k] - m[i]) * r[i];
                    sums[2 * i] += d * (float)w[j][k];
                    sums[2 * i + 1] += d * (float)w[j][k] * norm;
                    dw[j][k] += d * norm;
                    db[j][k] += d;
                }
            }
        }
        float warp_total = warp_sums<8>(sums);
        if (lane % 4 == 0) { shared[parity][warp][lane / 4] = warp_total; }
        __syncthreads();
        for (int i = 0; i < 2 * rows; i++) { sums[i] = 0.0f; }
        for (int v = 0; v < num_warps; v++) {
            for (int i = 0; i < 2 * rows; i++) { sums[i] += shared[parity][v][i]; }
        }
        parity = 1 - parity;
#pragma unroll
        for (int i = 0; i < rows; i++) {
            float sum = sums[2 * i] * inv_C, dot = sums[2 * i + 1] * inv_C;
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                int c = (j * blockDim.x + threadIdx.x) * x128::size;
                for (int k = 0; k < x128::size; k++) {
                    float dnorm = (float)dy[i][j][k] * (float)w[j][k], norm = ((float)x[i][j][k] - m[i]) * r[i];
                    dx[i][j][k] = (floatX)((float)dx[i][j][k] + r[i] * (dnorm - sum - norm * dot));
                }
                if (start + i < N && c < C) { store128(dinp + (size_t)(start + i) * C + c, dx[i][j]); }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        int c = (j * blockDim.x + threadIdx.x) * x128::size;
        for (int k = 0; k < x128::size && c < C; k++) {
            partials[((size_t)blockIdx.x * 2 + 0) * C + c + k] = dw[j][k];
            partials[((size_t)blockIdx.x * 2 + 1) * C + c + k] = db[j][k];
        }
    }
}

void layernorm_backward5(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int blocks_per_sm) {
    require(C % x128::size == 0 && C <= 6144 && blocks_per_sm <= 4);
    constexpr int most = x128::size == 4 ? 4 : 2; // vectors per thread for the longest row
    int num_vecs = 1;
    while (C / x128::size > num_vecs * LAYERNORM_BACKWARD_MAX_BLOCK_SIZE5) { num_vecs *= 2; }
    int block_size = ceil_div(C / x128::size, 32 * num_vecs) * 32, resident;
    auto kernel = num_vecs == 1   ? layernorm_backward_kernel5<1>
                  : num_vecs == 2 ? layernorm_backward_kernel5<2>
                                  : layernorm_backward_kernel5<most>;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, 0));
    int grid_size =
        min(ceil_div(N, 4 / num_vecs), num_multiprocessors() * min(resident, blocks_per_sm ? blocks_per_sm : 4));
    kernel<<<grid_size, block_size, 0, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid_size, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: one warp per row, no barrier between rows; each warp has its own column sums in shared memory ----

// The sums (num_warps, 2, C) are in shared memory, not in registers, so the registers limit neither C nor the number of
// warps. The price is 16 bytes of shared-memory traffic per element: two floats are read and written.
__global__ void layernorm_backward_kernel6(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                                           const floatX* inp, const floatX* weight, const float* mean,
                                           const float* rstd, int N, int C) {
    extern __shared__ __align__(128) int4 layernorm_backward_sums_memory[];
    float* layernorm_backward_sums = (float*)layernorm_backward_sums_memory;
    int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, first = threadIdx.x % 32 * x128::size;
    float *dw = layernorm_backward_sums + warp * 2 * C, *db = dw + C;
    for (int c = threadIdx.x; c < num_warps * 2 * C; c += blockDim.x) { layernorm_backward_sums[c] = 0.0f; }
    __syncthreads();
    for (int row = blockIdx.x * num_warps + warp; row < N; row += gridDim.x * num_warps) {
        size_t start = (size_t)row * C;
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
        for (int c = first; c < C; c += 32 * x128::size) {
            x128 dy = load128(dout + start + c), x = load128(inp + start + c), w = load128(weight + c);
            for (int k = 0; k < x128::size; k++) {
                float dnorm = (float)dy[k] * (float)w[k];
                sum += dnorm;
                dot += dnorm * ((float)x[k] - m) * r;
            }
        }
        sum = warp_sum(sum) / C;
        dot = warp_sum(dot) / C;
        for (int c = first; c < C; c += 32 * x128::size) {
            x128 dy = load128(dout + start + c), x = load128(inp + start + c), w = load128(weight + c), dx = {};
            float dw_add[x128::size], db_add[x128::size];
            if (dresidual) { dx = load128(dresidual + start + c); }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)dy[k], norm = ((float)x[k] - m) * r;
                dx[k] = (floatX)((float)dx[k] + r * (d * (float)w[k] - sum - norm * dot));
                dw_add[k] = d * norm;
                db_add[k] = d;
            }
            store128(dinp + start + c, dx);
            for (int k = 0; k < x128::size; k += f128::size) {
                f128 dw_sum = load128(dw + c + k), db_sum = load128(db + c + k);
                for (int i = 0; i < f128::size; i++) { dw_sum[i] += dw_add[k + i], db_sum[i] += db_add[k + i]; }
                store128(dw + c + k, dw_sum);
                store128(db + c + k, db_sum);
            }
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) {
        float sum = 0.0f;
        for (int v = 0; v < num_warps; v++) { sum += layernorm_backward_sums[v * 2 * C + c]; }
        partials[(size_t)blockIdx.x * 2 * C + c] = sum;
    }
}

// Launches kernel 6 or 7, and the kernel that adds up the partial sums.
static void layernorm_backward_warps(decltype(&layernorm_backward_kernel6) kernel, floatX* dinp, float* dweight,
                                     float* dbias, float* scratch, const floatX* dout, const floatX* dresidual,
                                     const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                                     int N, int C, cudaStream_t stream, int block_size) {
    size_t warp_bytes = 2 * C * sizeof(float);
    size_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    block_size = min(block_size, 32 * (int)(limit / warp_bytes)); // fewer warps per block if rows are long
    require(block_size >= 32);
    size_t shared_bytes = block_size / 32 * warp_bytes;
    int resident;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, shared_bytes));
    int grid_size = min(ceil_div(N, block_size / 32), num_multiprocessors() * min(resident, 4));
    kernel<<<grid_size, block_size, shared_bytes, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean, rstd, N,
                                                            C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid_size, C);
    cudaCheck(cudaGetLastError());
}

void layernorm_backward6(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    layernorm_backward_warps(layernorm_backward_kernel6, dinp, dweight, dbias, scratch, dout, dresidual, inp, weight,
                             mean, rstd, N, C, stream, block_size);
}

// ---- kernel 7: kernel 6 with the row in registers: dout and inp are read once ----

// The column sums stay in shared memory. Rows of more than 3 vectors per lane take kernel 6.
template <int num_vecs> __global__ void layernorm_backward_kernel7(floatX* dinp, float* partials, const floatX* dout,
                                                                   const floatX* dresidual, const floatX* inp,
                                                                   const floatX* weight, const float* mean,
                                                                   const float* rstd, int N, int C) {
    extern __shared__ __align__(128) int4 layernorm_backward_sums_memory[];
    float* layernorm_backward_sums = (float*)layernorm_backward_sums_memory;
    int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, first = threadIdx.x % 32 * x128::size;
    float *dw = layernorm_backward_sums + warp * 2 * C, *db = dw + C;
    for (int c = threadIdx.x; c < num_warps * 2 * C; c += blockDim.x) { layernorm_backward_sums[c] = 0.0f; }
    __syncthreads();
    for (int row = blockIdx.x * num_warps + warp; row < N; row += gridDim.x * num_warps) {
        size_t start = (size_t)row * C;
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
        x128 dy[num_vecs], x[num_vecs], w[num_vecs];
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            int c = first + j * 32 * x128::size;
            if (c >= C) { continue; }
            dy[j] = load128(dout + start + c), x[j] = load128(inp + start + c), w[j] = load128(weight + c);
            for (int k = 0; k < x128::size; k++) {
                float dnorm = (float)dy[j][k] * (float)w[j][k];
                sum += dnorm;
                dot += dnorm * ((float)x[j][k] - m) * r;
            }
        }
        sum = warp_sum(sum) / C;
        dot = warp_sum(dot) / C;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            int c = first + j * 32 * x128::size;
            if (c >= C) { continue; }
            x128 dx = {};
            float dw_add[x128::size], db_add[x128::size];
            if (dresidual) { dx = load128(dresidual + start + c); }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)dy[j][k], norm = ((float)x[j][k] - m) * r;
                dx[k] = (floatX)((float)dx[k] + r * (d * (float)w[j][k] - sum - norm * dot));
                dw_add[k] = d * norm;
                db_add[k] = d;
            }
            store128(dinp + start + c, dx);
            for (int k = 0; k < x128::size; k += f128::size) {
                f128 dw_sum = load128(dw + c + k), db_sum = load128(db + c + k);
                for (int i = 0; i < f128::size; i++) { dw_sum[i] += dw_add[k + i], db_sum[i] += db_add[k + i]; }
                store128(dw + c + k, dw_sum);
                store128(db + c + k, db_sum);
            }
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) {
        float sum = 0.0f;
        for (int v = 0; v < num_warps; v++) { sum += layernorm_backward_sums[v * 2 * C + c]; }
        partials[(size_t)blockIdx.x * 2 * C + c] = sum;
    }
}

void layernorm_backward7(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    int num_vecs = ceil_div(C, 32 * x128::size);
    auto kernel = num_vecs == 1   ? layernorm_backward_kernel7<1>
                  : num_vecs == 2 ? layernorm_backward_kernel7<2>
                  : num_vecs == 3 ? layernorm_backward_kernel7<3>
                                  : layernorm_backward_kernel6;
    layernorm_backward_warps(kernel, dinp, dweight, dbias, scratch, dout, dresidual, inp, weight, mean, rstd, N, C,
                             stream, block_size);
}

// ---- kernel 8: column sums also in registers; teams of several warps for long rows ----

// A team of 1, 2, 4, 8 or 16 warps processes one row at a time; each thread holds up to 3 vectors of the row:
//     vector of the row   0 .. team_size-1 | team_size .. 2*team_size-1 | 2*team_size ..
//     held by thread      0 .. team_size-1 | 0 .. team_size-1           | 0 ..             of the team
//     as its vector       j = 0            | j = 1                      | j = 2
// A thread has the same columns in every row, so it sums dweight and dbias in registers. At the end each block adds up
// its teams and writes one partial sum per column; column_sums() adds the partial sums of all blocks in a fixed order.
constexpr int LAYERNORM_BACKWARD_MAX_VECS = 3;
constexpr int LAYERNORM_BACKWARD_THREADS_PER_SM = 512; // leaves 128 registers per thread
constexpr int LAYERNORM_BACKWARD_MIN_BLOCK_SIZE = 128; // bounds the number of partial sums
constexpr int LAYERNORM_BACKWARD_PADDING = 4; // floats after each row of `columns`, against bank conflicts in 16 bits

// Sums a and b over the team; all threads of the team get the same bits. Callers alternate between two `shared` (2, 16)
// buffers, so one barrier per call is enough.
__device__ inline void layernorm_backward_team_sums(float& a, float& b, float (*shared)[16], int team_warps) {
    // the lower half-warp sums a, the upper half-warp sums b: 6 shuffles instead of 10
    bool upper = threadIdx.x & 16;
    float mine = upper ? b : a, other = upper ? a : b;
    mine += __shfl_xor_sync(0xFFFFFFFFu, other, 16);
    for (int offset = 8; offset > 0; offset /= 2) { mine += __shfl_xor_sync(0xFFFFFFFFu, mine, offset); }
    other = __shfl_xor_sync(0xFFFFFFFFu, mine, 16);
    a = upper ? other : mine;
    b = upper ? mine : other;
    if (team_warps == 1) { return; }
    int warp = threadIdx.x / 32, team = warp / team_warps;
    if (threadIdx.x % 32 == 0) { shared[0][warp] = a, shared[1][warp] = b; }
    __syncthreads(); // safe for the whole block, because all its teams make the same number of calls
    a = b = 0.0f;
    for (int i = team * team_warps; i < (team + 1) * team_warps; i++) { a += shared[0][i], b += shared[1][i]; }
}

// Writes row blockIdx.x of partials (gridDim.x, 2, C): dweight and dbias, summed over the block's teams. The sums are
// exchanged through `columns` (2 * x128::size, blockDim.x + padding) in shared memory, one vector per thread at a time.
template <int num_vecs> __device__ inline void layernorm_backward_block_sums(float* partials,
                                                                             const float (*dw)[x128::size],
                                                                             const float (*db)[x128::size],
                                                                             float* columns, int C, int team_size) {
    int num_teams = blockDim.x / team_size, stride = team_size * x128::size;
    int pitch = blockDim.x + LAYERNORM_BACKWARD_PADDING;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; k < x128::size; k++) {
            columns[k * pitch + threadIdx.x] = dw[j][k];
            columns[(x128::size + k) * pitch + threadIdx.x] = db[j][k];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 2 * stride; i += blockDim.x) {
            int which = i / stride, column = i % stride; // which: 0 is dweight, 1 is dbias
            int member = column / x128::size, k = column % x128::size, c = j * stride + column;
            float sum = 0.0f;
            for (int t = 0; t < num_teams; t++) {
                sum += columns[(which * x128::size + k) * pitch + t * team_size + member];
            }
            if (c < C) { partials[((size_t)blockIdx.x * 2 + which) * C + c] = sum; }
        }
        __syncthreads();
    }
}

// one_warp: each team is one warp. It then needs no barrier, so the teams may process different numbers of rows.
template <int num_vecs, bool one_warp> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_THREADS_PER_SM, 1)
    layernorm_backward_kernel8(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C, int team_warps) {
    __shared__ float row_sums[2][2][16];
    extern __shared__ __align__(128) float layernorm_backward_columns[]; // (2 * x128::size, blockDim.x + padding)
    int team_size = 32 * team_warps, num_teams = blockDim.x / team_size;
    int team = threadIdx.x / team_size, first = threadIdx.x % team_size * x128::size, stride = team_size * x128::size;
    bool last_valid = first + (num_vecs - 1) * stride < C; // only a thread's last vector can be past the row's end
    float inv_C = 1.0f / C;
    int parity = 0;
    grid_wait_dependency(); // layernorm_backward10() launches it early

    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {};
    for (int turn = blockIdx.x * num_teams; turn < N; turn += gridDim.x * num_teams) {
        int row = turn + team;
        if (one_warp && row >= N) { break; }
        bool valid = one_warp || row < N;
        size_t start = (size_t)row * C + first;
        x128 dy[num_vecs] = {}, x[num_vecs] = {}, dx[num_vecs] = {}; // dy is 0 past the row's end and adds nothing
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (valid && (j < num_vecs - 1 || last_valid)) {
                dy[j] = load128(dout + start + j * stride);
                x[j] = load128(inp + start + j * stride);
            }
        }
        if (dresidual && valid) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                if (j < num_vecs - 1 || last_valid) { dx[j] = load128(dresidual + start + j * stride); }
            }
        }
        float m = valid ? mean[row] : 0.0f, r = valid ? rstd[row] : 0.0f, sum = 0.0f, dot = 0.0f,
              dnorm[num_vecs][x128::size];
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            x128 w = {}; // the weights are reread from L1 for every row, because no registers are left for them
            if (j < num_vecs - 1 || last_valid) { w = load128(weight + first + j * stride); }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)dy[j][k], norm = ((float)x[j][k] - m) * r;
                dnorm[j][k] = d * (float)w[k];
                sum += dnorm[j][k];
                dot += dnorm[j][k] * norm;
                dw[j][k] += d * norm;
                db[j][k] += d;
            }
        }
        layernorm_backward_team_sums(sum, dot, row_sums[parity], one_warp ? 1 : team_warps);
        parity = 1 - parity;
        sum *= inv_C;
        dot *= inv_C;
        // The shuffle does not change m, but the compiler cannot know that, so it recomputes norm from x below. Without
        // the shuffle it would keep norm in registers and spill.
        m = __shfl_sync(0xFFFFFFFFu, m, 0);
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            for (int k = 0; k < x128::size; k++) {
                float norm = ((float)x[j][k] - m) * r;
                dx[j][k] = (floatX)((float)dx[j][k] + r * (dnorm[j][k] - sum - norm * dot));
            }
            if (valid && (j < num_vecs - 1 || last_valid)) { store128(dinp + start + j * stride, dx[j]); }
        }
    }

    layernorm_backward_block_sums<num_vecs>(partials, dw, db, layernorm_backward_columns, C, team_size);
}

// Returns the number of warps per team. In 16 bits, a thread in a team of several warps holds at most 2 vectors,
// because 3 would spill.
static int layernorm_backward_team_warps(int num_vectors) {
    const int team_vecs = sizeof(floatX) == 2 ? 2 : LAYERNORM_BACKWARD_MAX_VECS;
    int team_warps = 1;
    while (num_vectors > 32 * (team_warps > 1 ? team_vecs : LAYERNORM_BACKWARD_MAX_VECS) * team_warps) {
        team_warps *= 2;
    }
    return team_warps;
}

static auto layernorm_backward_choose8(int num_vecs, int team_warps) {
    if (team_warps > 1) {
#if defined(ENABLE_FP32)
        if (num_vecs == 3) { return layernorm_backward_kernel8<3, false>; }
#endif
        return layernorm_backward_kernel8<2, false>;
    }
    return num_vecs == 1   ? layernorm_backward_kernel8<1, true>
           : num_vecs == 2 ? layernorm_backward_kernel8<2, true>
                           : layernorm_backward_kernel8<3, true>;
}

typedef void (*LayernormBackwardKernel)(floatX*, float*, const floatX*, const floatX*, const floatX*, const floatX*,
                                        const float*, const float*, int, int, int);

// How to launch the kernel that writes dinp and partials (grid_size, 2, C).
struct LayernormBackwardLaunch {
    LayernormBackwardKernel kernel;
    int grid_size, block_size, num_vecs, team_warps;
    size_t shared_bytes;
};

// Chooses the instance and the grid of kernel 8 for rows of C elements. A block is at least one team.
static LayernormBackwardLaunch layernorm_backward_launch8(int N, int C, int block_size) {
    int num_vectors = C / x128::size, team_warps = layernorm_backward_team_warps(num_vectors);
    require(N >= 1 && C >= 8 && C % 8 == 0 && team_warps <= 16);
    block_size = max(block_size, 32 * team_warps);
    require(block_size % (32 * team_warps) == 0);
    require(block_size >= LAYERNORM_BACKWARD_MIN_BLOCK_SIZE && block_size <= LAYERNORM_BACKWARD_THREADS_PER_SM);
    int num_vecs = ceil_div(num_vectors, 32 * team_warps), num_teams = block_size / (32 * team_warps);
    int grid_size = num_multiprocessors() * (LAYERNORM_BACKWARD_THREADS_PER_SM / block_size);
    size_t shared_bytes = 2 * x128::size * (block_size + LAYERNORM_BACKWARD_PADDING) * sizeof(float);
    auto kernel = layernorm_backward_choose8(num_vecs, team_warps);
    return {kernel, min(grid_size, ceil_div(N, num_teams)), block_size, num_vecs, team_warps, shared_bytes};
}

// Kernels 8 and 9: column_sums_kernel is launched as usual, so it starts after the first kernel has ended.
static void layernorm_backward_two_kernels(const LayernormBackwardLaunch& l, floatX* dinp, float* dweight, float* dbias,
                                           float* scratch, const floatX* dout, const floatX* dresidual,
                                           const floatX* inp, const floatX* weight, const float* mean,
                                           const float* rstd, int N, int C, cudaStream_t stream) {
    launch_kernel(l.kernel, LaunchShape(l.grid_size, l.block_size, l.shared_bytes), stream, dinp, scratch, dout,
                  dresidual, inp, weight, mean, rstd, N, C, l.team_warps);
    ColumnSums list = {};
    list.add({dweight, scratch, l.grid_size, 2 * C, C});
    list.add({dbias, scratch + C, l.grid_size, 2 * C, C});
    column_sums_kernel<16><<<2 * ceil_div(C, 32), 512, 0, stream>>>(list);
    cudaCheck(cudaGetLastError());
}

void layernorm_backward8(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_backward_two_kernels(layernorm_backward_launch8(N, C, block_size), dinp, dweight, dbias, scratch, dout,
                                   dresidual, inp, weight, mean, rstd, N, C, stream);
}

// ---- kernel 9: cp.async prefetches the next row ----

constexpr int LAYERNORM_BACKWARD_STAGES9 = 2;

// Kernel 8 with one warp per team and the next row in flight: cp.async copies it into a ring in shared memory while the
// current row is summed. Each thread reads only what it copied itself, so it waits for its own copies, without barrier.
//                before the loop   1st row           2nd row           3rd row
//     stage 0    copy row 0        read 0, copy 2    (2 in flight)     read 2, copy 4
//     stage 1    copy row 1        (1 in flight)     read 1, copy 3    (3 in flight)
template <int num_vecs> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_THREADS_PER_SM, 1)
    layernorm_backward_kernel9(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C, int /*team_warps*/) {
    // (stages, num_vecs, 3, blockDim.x); 3: dout, inp, dresidual
    extern __shared__ __align__(128) int4 layernorm_backward_ring[];
    const int team_size = 32, stride = team_size * x128::size;
    int num_teams = blockDim.x / team_size, row_step = gridDim.x * num_teams;
    int team = threadIdx.x / team_size, first = threadIdx.x % team_size * x128::size;
    bool last_valid = first + (num_vecs - 1) * stride < C;
    float inv_C = 1.0f / C;
    int stage = 0;
    grid_launch_dependents(); // for kernel 10
    grid_wait_dependency();

    // one commit group per row, empty past the last row, so that the number of groups in flight stays the same
    auto fetch = [&](int row, int to_stage) {
        if (row < N) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                size_t i = (size_t)row * C + first + j * stride;
                bool valid = j < num_vecs - 1 || last_valid;
                int4* slot = layernorm_backward_ring + (to_stage * num_vecs + j) * 3 * blockDim.x + threadIdx.x;
                // an invalid copy writes zeros and reads nothing, but still needs a valid address
                cp_async_16(slot, dout + (valid ? i : 0), valid);
                cp_async_16(slot + blockDim.x, inp + (valid ? i : 0), valid);
                bool add = valid && dresidual;
                cp_async_16(slot + 2 * blockDim.x, add ? dresidual + i : dout, add);
            }
        }
        cp_async_commit();
    };
    auto vector_of_weight = [&](int j) { // the same for all rows, so these loads hit L1
        return to_floats(j < num_vecs - 1 || last_valid ? load128(weight + first + j * stride) : x128());
    };
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {};
    int row = blockIdx.x * num_teams + team;
    for (int i = 0; i < LAYERNORM_BACKWARD_STAGES9; i++) { fetch(row + i * row_step, i); }
    for (; row < N; row += row_step) {
        const floatX* slots =
            (const floatX*)(layernorm_backward_ring + stage * num_vecs * 3 * blockDim.x + threadIdx.x);
        int pitch = blockDim.x * x128::size;
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
        cp_async_wait<LAYERNORM_BACKWARD_STAGES9 - 1>();
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            auto dy = to_floats(load128(slots + 3 * j * pitch)), x = to_floats(load128(slots + (3 * j + 1) * pitch));
            auto w = vector_of_weight(j);
            for (int k = 0; k < x128::size; k++) {
                float norm = (x[k] - m) * r, dnorm = dy[k] * w[k];
                sum += dnorm;
                dot += dnorm * norm;
                dw[j][k] += dy[k] * norm;
                db[j][k] += dy[k];
            }
        }
        layernorm_backward_team_sums(sum, dot, nullptr, 1);
        // dinp = dresidual + rstd * (dnorm - sum - norm * dot) is a sum of dresidual, dnorm and inp with factors of the row
        float of_inp = -r * r * dot * inv_C, constant = -r * sum * inv_C - of_inp * m;
        __syncwarp(); // makes the compiler reread the row from shared memory; keeping it in registers would spill
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            auto dy = to_floats(load128(slots + 3 * j * pitch)), x = to_floats(load128(slots + (3 * j + 1) * pitch));
            auto dx = to_floats(load128(slots + (3 * j + 2) * pitch)), w = vector_of_weight(j);
            x128 result;
            for (int k = 0; k < x128::size; k++) {
                float y = dx[k] + constant + r * (dy[k] * w[k]) + of_inp * x[k];
                result[k] = (floatX)y;
            }
            if (j < num_vecs - 1 || last_valid) { store128(dinp + (size_t)row * C + first + j * stride, result); }
        }
        fetch(row + LAYERNORM_BACKWARD_STAGES9 * row_step, stage); // the row in this stage has been read
        stage = (stage + 1) % LAYERNORM_BACKWARD_STAGES9;
    }
    cp_async_wait<0>();
    __syncthreads(); // now all threads have read the ring, and the column sums may reuse its memory

    layernorm_backward_block_sums<num_vecs>(partials, dw, db, (float*)layernorm_backward_ring, C, team_size);
}

// Chooses kernel 9 if a team is one warp, the device code has cp.async and the ring fits in shared memory; otherwise
// kernel 8.
static LayernormBackwardLaunch layernorm_backward_launch9(int N, int C, int block_size) {
    LayernormBackwardLaunch l = layernorm_backward_launch8(N, C, block_size);
    LayernormBackwardKernel kernel = NULL;
    with_constant<3>(l.num_vecs, [&](auto n) { kernel = layernorm_backward_kernel9<n.value>; });
    size_t ring_bytes = (size_t)LAYERNORM_BACKWARD_STAGES9 * l.num_vecs * 3 * l.block_size * sizeof(x128);
    size_t shared_bytes = max(ring_bytes, l.shared_bytes);
    size_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4 * 16 * sizeof(float);
    if (l.team_warps == 1 && compiled_arch(kernel) >= 80 && shared_bytes <= limit) {
        l.kernel = kernel, l.shared_bytes = shared_bytes;
    }
    return l;
}

void layernorm_backward9(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_backward_two_kernels(layernorm_backward_launch9(N, C, block_size), dinp, dweight, dbias, scratch, dout,
                                   dresidual, inp, weight, mean, rstd, N, C, stream);
}

// ---- kernel 10: 9 with programmatic dependent launch of the second kernel ----

void layernorm_backward10(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                          const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                          const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    LayernormBackwardLaunch l = layernorm_backward_launch9(N, C, block_size);
    launch_early(l.kernel, dim3(l.grid_size), dim3(l.block_size), l.shared_bytes, stream, dinp, scratch, dout,
                 dresidual, inp, weight, mean, rstd, N, C, l.team_warps);
    column_sums<16>(dweight, dbias, NULL, scratch, l.grid_size, C, stream);
}

#include "layernorm_backward.cuh" // kernel 11

static void declare(Bench& b) {
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    cudaStream_t stream = b.stream;
    Buffer<floatX> dout = b.input<floatX>("dout", n);
    Buffer<floatX> dresidual = b.input<floatX>("dresidual", n);
    // a large mean shows whether it is subtracted before anything is multiplied and added up
    float shift = b.cases({"normal", "large mean"}) == 1 ? 30.0f : 0.0f;
    Buffer<floatX> inp = b.input<floatX>("inp", n, 1.0f, shift);
    Buffer<floatX> weight = b.input<floatX>("weight", C);
    Buffer<float> mean = b.input_from<float>("mean", N, [=](float* host) {
        std::vector<float> other(N);
        layernorm_statistics_cpu(host, other.data(), inp.host, N, C);
    });
    Buffer<float> rstd = b.input_from<float>("rstd", N, [=](float* host) {
        std::vector<float> other(N);
        layernorm_statistics_cpu(other.data(), host, inp.host, N, C);
    });
    Buffer<float> dweight_start = b.input<float>("dweight_start", C);
    Buffer<float> dbias_start = b.input<float>("dbias_start", C);
    Tolerance rounding = {64 * ulp_of<float>(), 0.5f * ulp_of<floatX>() + 8 * ulp_of<float>()};
    int kind =
        b.kinds({"with dresidual", "dresidual is dinp", "without dresidual", "0 with the sums of dinp's columns"});
    const bool no_residual = kind == 2, in_place = kind == 1, has_sums = kind == 3;
    Buffer<floatX> dinp =
        in_place ? b.inout<floatX>("dinp", n, dresidual, rounding) : b.output<floatX>("dinp", n, rounding);
    floatX* dresidual_dev = no_residual ? NULL : in_place ? dinp.dev : dresidual.dev;
    Buffer<float> dweight = b.inout<float>("dweight", C, dweight_start, ulps<float>(16, sqrtf((float)N)));
    Buffer<float> dbias = b.inout<float>("dbias", C, dbias_start, ulps<float>(16, sqrtf((float)N)));
    Buffer<float> sums_start = {NULL, NULL}, sums = {NULL, NULL};
    if (has_sums) { // dinp is some units large; the roundings of its rows, which kernel 12 sums, are independent
        sums_start = b.input<float>("sums_start", C);
        Tolerance of_sums = ulps<float>(16, 4 * sqrtf((float)N));
        of_sums.atol += 6 * ulp_of<floatX>() * sqrtf((float)N);
        sums = b.inout<float>("sums", C, sums_start, of_sums);
    }
    Buffer<float> scratch =
        b.scratch<float>("scratch", b.dry ? 0 : max(layernorm_backward_scratch(C), matmul_backward_bias_scratch(N, C)));
    b.reference([=] {
        memcpy(dweight.host, dweight_start.host, C * sizeof(float));
        memcpy(dbias.host, dbias_start.host, C * sizeof(float));
        layernorm_backward_cpu(dinp.host, dweight.host, dbias.host, dout.host, no_residual ? NULL : dresidual.host,
                               inp.host, weight.host, mean.host, rstd.host, N, C);
        if (has_sums) {
            memcpy(sums.host, sums_start.host, C * sizeof(float));
            matmul_backward_bias_cpu(sums.host, dinp.host, N, C);
        }
    });
    b.cost((no_residual ? 3.0 : 4.0) * n * sizeof(floatX), 0);

    auto variant = [&](int number, const char* what, auto launch, std::vector<int> block_sizes) {
        b.kernel(
            number, what,
            [=](int bs) {
                launch(dinp, dweight, dbias, scratch, dout, dresidual_dev, inp, weight, mean, rstd, N, C, stream, bs);
            },
            block_sizes);
    };
    if (!has_sums) {
        variant(1, "dinp: one thread per row; dweight, dbias: one per column and 256 rows", layernorm_backward1,
                {64, 128, 256, 512, 1024});
        variant(2, "one warp per row, column sums by atomics in shared memory", layernorm_backward2,
                {64, 128, 256, 512, 1024});
        b.coarser(2);
        variant(3, "no atomics: a second kernel rereads the inputs for the column sums", layernorm_backward3,
                {64, 128, 256, 512, 1024});
        variant(4, "one block per row, column sums in registers", layernorm_backward4, {0, 1, 2});
        b.config("blocks per SM");
        variant(5, "one block for 4 rows at a time: one barrier, 9 shuffles", layernorm_backward5, {0, 1, 2});
        b.config("blocks per SM");
        variant(6, "one warp per row, column sums per warp in shared memory", layernorm_backward6, {64, 128, 256, 512});
        variant(7, "6 with the row in registers, inputs read once", layernorm_backward7, {64, 128, 256, 512});
        variant(8, "column sums in registers, too", layernorm_backward8, {128, 256, 512});
        variant(9, "8 with the next row copied ahead by cp.async", layernorm_backward9, {128, 256, 512});
        variant(10, "9 with programmatic dependent launch of the second kernel", layernorm_backward10, {128, 256, 512});
    }
    auto promoted = [=](float* sums_dev, int threads_per_sm) {
        layernorm_backward(dinp, sums_dev, dweight, dbias, scratch, dout, dresidual_dev, inp, weight, mean, rstd, N, C,
                           {stream, threads_per_sm});
    };
    if (!has_sums) {
        b.kernel(
            11, "5 with the next rows copied ahead by cp.async", [=](int threads) { promoted(NULL, threads); },
            bench_tunable("layernorm_backward"));
        b.config("threads per SM");
        return b.promoted(11);
    }
    auto two_ops = [=](int) {
        promoted(NULL, 0);
        matmul_backward_bias(sums, scratch, dinp, N, C, stream);
    };
    b.kernel(12, "11, then matmul_backward_bias", two_ops, {0});
    b.kernel(13, "11 with the sums of dinp's columns in registers", [=](int) { promoted(sums, 0); }, {0});
    b.promoted(13);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "layernorm_backward", declare, {64, 1024, 768, 12, 50257},
                      {with_kind(2, {1, 1, 8}),
                       with_kind(2, {3, 17, 776}),
                       with_kind(3, {1, 1, 8}),
                       with_kind(3, {3, 171, 768}),
                       with_kind(3, {2, 133, 1600}),
                       with_kind(3, {1, 67, 3080}),
                       with_kind(3, {1, 13, sizeof(floatX) == 4 ? 6144 : 8192}),
                       {1, 5, 768},
                       with_kind(1, {2, 33, 1600}),
                       with_kind(2, {1, 7, 3080}),
                       {1, 3, 6144},
                       with_kind(2, {7, 171, 264})});
}
