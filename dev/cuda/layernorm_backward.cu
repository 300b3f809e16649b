/* layernorm_backward: the gradient of layernorm_forward, added to the gradient of the residual stream that runs past it

   dinp (N,C) floatX out | dweight, dbias (C) float, added to | scratch float, layernorm_backward_scratch(C) of them
   dout (N,C) floatX in | dresidual (N,C) floatX in, may be NULL or dinp | inp (N,C), weight (C) floatX in
   mean, rstd (N) float in; N = B*T
   With norm = (inp - mean) * rstd and dnorm = dout * weight, over each row:
       dinp = dresidual + rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
   and over all rows: dweight += sum(dout * norm), dbias += sum(dout).
   Bound: memory, 4*N*C*sizeof(floatX) bytes. Constraint: C % 8 == 0; C <= 6144 in fp32, 12288 in 16 bits.
   Error: against the fp64 reference, half an ulp of floatX for the rounding, and for the fp32 arithmetic 8 ulps of fp32
   of the result and 64 of 1 for terms that cancel; dweight and dbias 16 ulps of fp32 of the result and of sqrt(N), which
   is the size of a sum of N terms of size 1; twice that in kernel 2, which adds thousands of partial sums one by one.
   Source: Ba et al. 2016, arXiv:1607.06450.

   nvcc -O3 --use_fast_math layernorm_backward.cu -o layernorm_backward      (or: make layernorm_backward)
   ./layernorm_backward 4      check kernel 4 against the CPU and sweep its block sizes
   ./layernorm_backward        every kernel, side by side                                         */
#include "bench.h"
#include "../../llmc/ptx.cuh"

// ---- kernel 1: one thread per row; one thread per column and 256 rows, sums by atomics ------------

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
    // the columns first: dresidual may be dinp, but dout and inp are whole in any order
    dim3 grid(ceil_div(N, 256), ceil_div(C, block_size));
    layernorm_backward_columns_kernel1<<<grid, block_size, 0, stream>>>(dweight, dbias, dout, inp, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_rows_kernel1<<<ceil_div(N, block_size), block_size, 0, stream>>>(dinp, dout, dresidual, inp,
                                                                                        weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one kernel, one warp per row; a block sums columns in shared memory by atomics ---------

__global__ void layernorm_backward_kernel2(floatX* dinp, float* dweight, float* dbias, const floatX* dout,
                                           const floatX* dresidual, const floatX* inp, const floatX* weight,
                                           const float* mean, const float* rstd, int N, int C) {
    extern __shared__ float layernorm_backward_sums[]; // (2, C)
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
    require(C <= 6144); // 48 KB of shared memory
    int grid_size = min(ceil_div(N, block_size / 32), num_multiprocessors() * max(1, 1024 / block_size));
    layernorm_backward_kernel2<<<grid_size, block_size, 2 * C * sizeof(float), stream>>>(
        dinp, dweight, dbias, dout, dresidual, inp, weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: no atomics: rows in one kernel, columns in another that reads dout and inp again ---------

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

// A block sums 32 vectors' columns over its share of the rows: partials (gridDim.y, 2, C).
__global__ void layernorm_backward_columns_kernel3(float* partials, const floatX* dout, const floatX* inp,
                                                   const float* mean, const float* rstd, int N, int C) {
    __shared__ float sums[32][2 * x128::size]; // of one warp, all warps in turn
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

// dweight, dbias (C) += the sum of partials (num_partials, 2, C); one thread per column
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

// ---- kernel 4: one block per row: a thread keeps its columns, and their sums in registers, over many rows ------

constexpr int LAYERNORM_BACKWARD_MAX_BLOCK_SIZE4 = 768; // C = 6144 in 16 bits with one vector for each thread

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
                         const float* rstd, int N, int C, cudaStream_t stream, int) {
    require(C % x128::size == 0 && C <= 6144);
    constexpr int most = x128::size == 4 ? 2 : 1; // vectors a thread for the longest row
    int num_vecs = C / x128::size <= LAYERNORM_BACKWARD_MAX_BLOCK_SIZE4 ? 1 : most;
    int block_size = ceil_div(C / x128::size, 32 * num_vecs) * 32; // the row decides
    int grid_size = min(N, num_multiprocessors() * 4);             // as many as scratch has room for
    auto kernel = num_vecs == 1 ? layernorm_backward_kernel4<1> : layernorm_backward_kernel4<most>;
    kernel<<<grid_size, block_size, 0, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid_size, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: 4 rows at a time: one barrier for all of them, and 9 shuffles for their 8 sums --------------------

// The sums over the warp of 8 values: lane gets that of v[lane / 4]. A lane hands half of what it still has to its
// partner, and adds up the other half: 4 + 2 + 1 shuffles, then 2 for the 4 lanes that share a value.
__device__ inline float layernorm_backward_sum8(float v[8]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        bool upper = lane & (4 * half);
#pragma unroll
        for (int i = 0; i < half; i++) {
            float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
            v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, 4 * half);
        }
    }
    v[0] += __shfl_xor_sync(0xFFFFFFFFu, v[0], 2);
    return v[0] + __shfl_xor_sync(0xFFFFFFFFu, v[0], 1);
}

constexpr int LAYERNORM_BACKWARD_MAX_BLOCK_SIZE5 = 384; // 168 registers each

// Long rows have 2 or 4 vectors for each thread, and 2 or 1 at a time.
template <int num_vecs> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_MAX_BLOCK_SIZE5)
    layernorm_backward_kernel5(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C) {
    constexpr int rows = 4 / num_vecs;
    __shared__ float shared[2][32][8]; // of each warp: sum and dot of each row; two sets, used in turn
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
        float warp_total = layernorm_backward_sum8(sums);
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
                         const float* rstd, int N, int C, cudaStream_t stream, int) {
    require(C % x128::size == 0 && C <= 6144);
    constexpr int most = x128::size == 4 ? 4 : 2; // vectors a thread for the longest row
    int num_vecs = 1;
    while (C / x128::size > num_vecs * LAYERNORM_BACKWARD_MAX_BLOCK_SIZE5) { num_vecs *= 2; }
    int block_size = ceil_div(C / x128::size, 32 * num_vecs) * 32, resident;
    auto kernel = num_vecs == 1   ? layernorm_backward_kernel5<1>
                  : num_vecs == 2 ? layernorm_backward_kernel5<2>
                                  : layernorm_backward_kernel5<most>;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, 0));
    int grid_size = min(ceil_div(N, 4 / num_vecs), num_multiprocessors() * min(resident, 4));
    kernel<<<grid_size, block_size, 0, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid_size, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: one warp per row, no barrier; a warp's own column sums lie in shared memory ---------------------------

// The sums (warps, 2, C) take the registers' place: any C, many warps, for 16 bytes of shared memory traffic an element.
__global__ void layernorm_backward_kernel6(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                                           const floatX* inp, const floatX* weight, const float* mean,
                                           const float* rstd, int N, int C) {
    extern __shared__ int4 layernorm_backward_sums_memory[];
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

void layernorm_backward6(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    size_t warp_bytes = 2 * C * sizeof(float);
    size_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    block_size = min(block_size, 32 * (int)(limit / warp_bytes)); // rows are long: fewer warps
    require(block_size >= 32);
    size_t shared_bytes = block_size / 32 * warp_bytes;
    int resident;
    cudaCheck(cudaFuncSetAttribute(layernorm_backward_kernel6, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared_bytes));
    cudaCheck(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, layernorm_backward_kernel6, block_size, shared_bytes));
    int grid_size = min(ceil_div(N, block_size / 32), num_multiprocessors() * min(resident, 4));
    layernorm_backward_kernel6<<<grid_size, block_size, shared_bytes, stream>>>(dinp, scratch, dout, dresidual, inp,
                                                                                weight, mean, rstd, N, C);
    cudaCheck(cudaGetLastError());
    layernorm_backward_sum_kernel3<<<ceil_div(2 * C, 64), 64, 0, stream>>>(dweight, dbias, scratch, grid_size, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 7: persistent warps, row and column sums both in registers, everything read once ---------------------------

// ==== promoted: layernorm_backward ====
// A team of 1, 2, 4, 8 or 16 warps owns a row, and a thread holds up to 3 vectors of it. Its columns stay the same from
// row to row, so that dweight and dbias are summed in registers. At the end each block adds up its teams, one partial sum
// per column, and column_sums() adds up those of all blocks, always in the same order.
constexpr int LAYERNORM_BACKWARD_MAX_VECS = 3;
constexpr int LAYERNORM_BACKWARD_THREADS_PER_SM = 512; // 128 registers each
constexpr int LAYERNORM_BACKWARD_MIN_BLOCK_SIZE = 128; // bounds the number of partial sums
constexpr int LAYERNORM_BACKWARD_PADDING = 4;          // floats: threads that read one vector's columns hit all banks

// Sums a and b over the team; all its threads get the same bits. Callers alternate between two `shared` (2, 16) buffers,
// so one barrier per call is enough.
__device__ inline void layernorm_backward_team_sums(float& a, float& b, float (*shared)[16], int team_warps) {
    // the lower half warp sums a and the upper half b: 6 shuffles instead of 10
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
    __syncthreads(); // of the whole block: all its teams make the same number of calls
    a = b = 0.0f;
    for (int i = team * team_warps; i < (team + 1) * team_warps; i++) { a += shared[0][i], b += shared[1][i]; }
}

// Writes this block's row of partials (gridDim.x, 2, C): dweight and dbias summed over its teams, one vector per thread
// at a time. columns (2 * x128::size, blockDim.x + padding) is shared memory.
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
            int which = i / stride, column = i % stride; // 0: dweight, 1: dbias
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

// one_warp: a team is one warp. It meets no barrier, so it may have fewer rows than other teams.
template <int num_vecs, bool one_warp> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_THREADS_PER_SM, 1)
    layernorm_backward_kernel7(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C, int team_warps) {
    __shared__ float row_sums[2][2][16];
    extern __shared__ float layernorm_backward_columns[]; // (2 * x128::size, blockDim.x + padding)
    int team_size = 32 * team_warps, num_teams = blockDim.x / team_size;
    int team = threadIdx.x / team_size, first = threadIdx.x % team_size * x128::size, stride = team_size * x128::size;
    bool last_valid = first + (num_vecs - 1) * stride < C; // only a thread's last vector can lie beyond the row
    float inv_C = 1.0f / C;
    int parity = 0;

    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {};
    for (int turn = blockIdx.x * num_teams; turn < N; turn += gridDim.x * num_teams) {
        int row = turn + team;
        if (one_warp && row >= N) { break; }
        bool valid = one_warp || row < N;
        size_t start = (size_t)row * C + first;
        x128 dy[num_vecs] = {}, x[num_vecs] = {}, dx[num_vecs] = {}; // beyond the row dy is zero and adds nothing
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
            x128 w = {}; // read from L1 for every row: no register is left to keep it in
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
        // same value, hidden from the compiler, so that it recomputes norm from x: keeping norm would spill
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

// Floats of scratch: partial sums of dweight and dbias for each block.
size_t layernorm_backward_scratch(int C) {
    int blocks_per_sm = LAYERNORM_BACKWARD_THREADS_PER_SM / LAYERNORM_BACKWARD_MIN_BLOCK_SIZE;
    return (size_t)num_multiprocessors() * blocks_per_sm * 2 * C;
}

// Warps per row. Teams of several warps take at most 2 vectors per thread in 16 bits: 3 would spill.
inline int layernorm_backward_team_warps(int num_vectors) {
    const int team_vecs = sizeof(floatX) == 2 ? 2 : LAYERNORM_BACKWARD_MAX_VECS;
    int team_warps = 1;
    while (num_vectors > 32 * (team_warps > 1 ? team_vecs : LAYERNORM_BACKWARD_MAX_VECS) * team_warps) {
        team_warps *= 2;
    }
    return team_warps;
}

inline auto layernorm_backward_choose7(int num_vecs, int team_warps) {
    if (team_warps > 1) {
#if defined(ENABLE_FP32)
        if (num_vecs == 3) { return layernorm_backward_kernel7<3, false>; }
#endif
        return layernorm_backward_kernel7<2, false>;
    }
    return num_vecs == 1   ? layernorm_backward_kernel7<1, true>
           : num_vecs == 2 ? layernorm_backward_kernel7<2, true>
                           : layernorm_backward_kernel7<3, true>;
}

typedef void (*LayernormBackwardKernel)(floatX*, float*, const floatX*, const floatX*, const floatX*, const floatX*,
                                        const float*, const float*, int, int, int);

// How to launch the kernel that writes dinp and the partial sums: grid_size rows of them.
struct LayernormBackwardLaunch {
    LayernormBackwardKernel kernel;
    int grid_size, block_size, num_vecs, team_warps;
    size_t shared_bytes;
};

// Kernel 7 for rows of C elements; the block is enlarged to a whole team.
inline LayernormBackwardLaunch layernorm_backward_launch7(int N, int C, int block_size) {
    int num_vectors = C / x128::size, team_warps = layernorm_backward_team_warps(num_vectors);
    require(N >= 1 && C >= 8 && C % 8 == 0 && team_warps <= 16);
    block_size = max(block_size, 32 * team_warps);
    require(block_size % (32 * team_warps) == 0);
    require(block_size >= LAYERNORM_BACKWARD_MIN_BLOCK_SIZE && block_size <= LAYERNORM_BACKWARD_THREADS_PER_SM);
    int num_vecs = ceil_div(num_vectors, 32 * team_warps), num_teams = block_size / (32 * team_warps);
    int grid_size = num_multiprocessors() * (LAYERNORM_BACKWARD_THREADS_PER_SM / block_size);
    size_t shared_bytes = 2 * x128::size * (block_size + LAYERNORM_BACKWARD_PADDING) * sizeof(float);
    return {layernorm_backward_choose7(num_vecs, team_warps),
            min(grid_size, ceil_div(N, num_teams)),
            block_size,
            num_vecs,
            team_warps,
            shared_bytes};
}
// ==== end promoted: layernorm_backward ====

// Variants 7 and 8: the second kernel starts after the first one has ended.
static void layernorm_backward_two_kernels(const LayernormBackwardLaunch& l, floatX* dinp, float* dweight, float* dbias,
                                           float* scratch, const floatX* dout, const floatX* dresidual,
                                           const floatX* inp, const floatX* weight, const float* mean,
                                           const float* rstd, int N, int C, cudaStream_t stream) {
    l.kernel<<<l.grid_size, l.block_size, l.shared_bytes, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean,
                                                                    rstd, N, C, l.team_warps);
    cudaCheck(cudaGetLastError());
    column_sums_kernel<16><<<dim3(ceil_div(C, 32), 2), 512, 0, stream>>>(dweight, dbias, scratch, l.grid_size, C);
    cudaCheck(cudaGetLastError());
}

void layernorm_backward7(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_backward_two_kernels(layernorm_backward_launch7(N, C, block_size), dinp, dweight, dbias, scratch, dout,
                                   dresidual, inp, weight, mean, rstd, N, C, stream);
}

// ---- kernel 8: rows loaded ahead by cp.async: kernel 9, but the second launch waits for the end of the first ----

inline LayernormBackwardLaunch layernorm_backward_launch9(int N, int C, int block_size);

void layernorm_backward8(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                         const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                         const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    layernorm_backward_two_kernels(layernorm_backward_launch9(N, C, block_size), dinp, dweight, dbias, scratch, dout,
                                   dresidual, inp, weight, mean, rstd, N, C, stream);
}

// ---- kernel 9: rows loaded ahead, and the second kernel starts as the first one ends ----

// ==== promoted: layernorm_backward ====
// As kernel 7 with one warp per team; the next rows are copied into a ring in shared memory while this one is summed.
// A thread reads only what it copied itself, so waiting for its own copies is enough and no barrier is needed.
constexpr int LAYERNORM_BACKWARD_STAGES = 2;

template <int num_vecs> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_THREADS_PER_SM, 1)
    layernorm_backward_kernel9(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C, int /*team_warps*/) {
    extern __shared__ int4 layernorm_backward_ring[]; // (stages, num_vecs, 3, blockDim.x) of dout, inp, dresidual
    const int team_size = 32, stride = team_size * x128::size;
    int num_teams = blockDim.x / team_size, row_step = gridDim.x * num_teams;
    int team = threadIdx.x / team_size, first = threadIdx.x % team_size * x128::size;
    bool last_valid = first + (num_vecs - 1) * stride < C;
    float inv_C = 1.0f / C;
    int stage = 0;

    // one group of copies per row, empty ones after the last row, so that the number of groups in flight stays the same
    auto fetch = [&](int row, int to_stage) {
        if (row < N) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                size_t i = (size_t)row * C + first + j * stride;
                bool valid = j < num_vecs - 1 || last_valid;
                int4* slot = layernorm_backward_ring + (to_stage * num_vecs + j) * 3 * blockDim.x + threadIdx.x;
                // copies that are not valid fill in zeros, but still need a valid address
                cp_async_16(slot, dout + (valid ? i : 0), valid);
                cp_async_16(slot + blockDim.x, inp + (valid ? i : 0), valid);
                bool add = valid && dresidual;
                cp_async_16(slot + 2 * blockDim.x, add ? dresidual + i : dout, add);
            }
        }
        cp_async_commit();
    };
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {};
    int row = blockIdx.x * num_teams + team;
    for (int i = 0; i < LAYERNORM_BACKWARD_STAGES; i++) { fetch(row + i * row_step, i); }
    for (; row < N; row += row_step) {
        const floatX* slots =
            (const floatX*)(layernorm_backward_ring + stage * num_vecs * 3 * blockDim.x + threadIdx.x);
        int pitch = blockDim.x * x128::size;
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
        cp_async_wait<LAYERNORM_BACKWARD_STAGES - 1>();
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            x128 dy = load128(slots + 3 * j * pitch), x = load128(slots + (3 * j + 1) * pitch), w = {};
            if (j < num_vecs - 1 || last_valid) { w = load128(weight + first + j * stride); }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)dy[k], norm = ((float)x[k] - m) * r, dnorm = d * (float)w[k];
                sum += dnorm;
                dot += dnorm * norm;
                dw[j][k] += d * norm;
                db[j][k] += d;
            }
        }
        layernorm_backward_team_sums(sum, dot, nullptr, 1);
        sum *= inv_C;
        dot *= inv_C;
        __syncwarp(); // makes the compiler read shared memory again: keeping the row in registers would spill
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            x128 dy = load128(slots + 3 * j * pitch), x = load128(slots + (3 * j + 1) * pitch), w = {};
            x128 dx = load128(slots + (3 * j + 2) * pitch);
            if (j < num_vecs - 1 || last_valid) { w = load128(weight + first + j * stride); }
            for (int k = 0; k < x128::size; k++) {
                float norm = ((float)x[k] - m) * r, dnorm = (float)dy[k] * (float)w[k];
                dx[k] = (floatX)((float)dx[k] + r * (dnorm - sum - norm * dot));
            }
            if (j < num_vecs - 1 || last_valid) { store128(dinp + (size_t)row * C + first + j * stride, dx); }
        }
        fetch(row + LAYERNORM_BACKWARD_STAGES * row_step, stage); // its slot has been read
        stage = (stage + 1) % LAYERNORM_BACKWARD_STAGES;
    }
    cp_async_wait<0>();
    __syncthreads(); // the column sums reuse the ring's memory

    layernorm_backward_block_sums<num_vecs>(partials, dw, db, (float*)layernorm_backward_ring, C, team_size);
}

// Kernel 9 where a team is one warp and the ring fits, else kernel 7.
inline LayernormBackwardLaunch layernorm_backward_launch9(int N, int C, int block_size) {
    LayernormBackwardLaunch l = layernorm_backward_launch7(N, C, block_size);
    auto kernel = l.num_vecs == 1   ? layernorm_backward_kernel9<1>
                  : l.num_vecs == 2 ? layernorm_backward_kernel9<2>
                                    : layernorm_backward_kernel9<3>;
    size_t ring_bytes = (size_t)LAYERNORM_BACKWARD_STAGES * l.num_vecs * 3 * l.block_size * sizeof(x128);
    size_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4 * 16 * sizeof(float);
    if (l.team_warps == 1 && compiled_arch(kernel) >= 80 && max(ring_bytes, l.shared_bytes) <= limit) {
        l.kernel = kernel;
        l.shared_bytes = max(ring_bytes, l.shared_bytes);
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)l.shared_bytes));
    }
    return l;
}

// dinp (N,C) = dresidual + the gradient of inp; dweight, dbias (C) += theirs | scratch (layernorm_backward_scratch(C))
// | dout (N,C), dresidual (N,C) or NULL, may be dinp; inp (N,C), weight (C), mean, rstd (N)
void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                        const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                        const float* rstd, int N, int C, cudaStream_t stream, int block_size) {
    Op op(stream, (dresidual ? 4.0 : 3.0) * N * C * sizeof(floatX), 0, "layernorm_backward");
    LayernormBackwardLaunch l = layernorm_backward_launch9(N, C, block_size);
    l.kernel<<<l.grid_size, l.block_size, l.shared_bytes, stream>>>(dinp, scratch, dout, dresidual, inp, weight, mean,
                                                                    rstd, N, C, l.team_warps);
    cudaCheck(cudaGetLastError());
    column_sums<16>(dweight, dbias, scratch, l.grid_size, C, stream);
}
void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                        const floatX* dresidual, const floatX* inp, const floatX* weight, const float* mean,
                        const float* rstd, int N, int C, cudaStream_t stream) {
    layernorm_backward(dinp, dweight, dbias, scratch, dout, dresidual, inp, weight, mean, rstd, N, C, stream, 512);
}
// ==== end promoted: layernorm_backward ====

static void declare(Bench& b) {
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    cudaStream_t stream = b.stream;
    Buffer<floatX> dout = b.input<floatX>("dout", n);
    Buffer<floatX> dresidual = b.input<floatX>("dresidual", n);
    Buffer<floatX> inp = b.input<floatX>("inp", n);
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
    // some shapes are checked without dresidual, some with dresidual in dinp itself
    const bool no_residual = C % 16 != 0, in_place = !no_residual && C % 128 != 0;
    Buffer<floatX> dinp =
        in_place ? b.inout<floatX>("dinp", n, dresidual, rounding) : b.output<floatX>("dinp", n, rounding);
    floatX* dresidual_dev = no_residual ? NULL : in_place ? dinp.dev : dresidual.dev;
    Buffer<float> dweight = b.inout<float>("dweight", C, dweight_start, ulps<float>(16, sqrtf((float)N)));
    Buffer<float> dbias = b.inout<float>("dbias", C, dbias_start, ulps<float>(16, sqrtf((float)N)));
    Buffer<float> scratch = b.scratch<float>("scratch", b.dry ? 0 : layernorm_backward_scratch(C));
    b.reference([=] {
        memcpy(dweight.host, dweight_start.host, C * sizeof(float));
        memcpy(dbias.host, dbias_start.host, C * sizeof(float));
        layernorm_backward_cpu(dinp.host, dweight.host, dbias.host, dout.host, no_residual ? NULL : dresidual.host,
                               inp.host, weight.host, mean.host, rstd.host, N, C);
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
    variant(1, "one thread per row; one per column and 256 rows", layernorm_backward1, {64, 128, 256, 512, 1024});
    variant(2, "one warp per row, column sums by shared atomics", layernorm_backward2, {64, 128, 256, 512, 1024});
    b.coarser(2);
    variant(3, "no atomics: rows, then columns from memory again", layernorm_backward3, {64, 128, 256, 512, 1024});
    variant(4, "one block per row, column sums in registers", layernorm_backward4, {0});
    variant(5, "4 rows at a time: one barrier, 9 shuffles", layernorm_backward5, {0});
    variant(6, "one warp per row, its column sums in shared memory", layernorm_backward6, {64, 128, 256, 512});
    variant(7, "one warp per row, all sums in registers, read once", layernorm_backward7, {128, 256, 512});
    variant(8, "rows loaded ahead into shared memory", layernorm_backward8, {128, 256, 512});
    b.kernel(9, "the second kernel starts under the first",
             [=](int bs) {
                 bs ? layernorm_backward(dinp, dweight, dbias, scratch, dout, dresidual_dev, inp, weight, mean, rstd, N,
                                         C, stream, bs)
                    : layernorm_backward(dinp, dweight, dbias, scratch, dout, dresidual_dev, inp, weight, mean, rstd, N,
                                         C, stream);
             },
             {0, 128, 256, 512});
    b.promoted(9);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "layernorm_backward", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {1, 5, 768}, {2, 33, 1600}, {1, 7, 3080}, {1, 3, 6144}, {7, 129, 264}});
}
