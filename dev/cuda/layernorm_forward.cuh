/*
layernorm_forward: out (N,C) = (inp - mean) * rstd * weight + bias; mean, rstd (N) | inp (N,C) | weight, bias (C)
rstd = 1 / sqrt(variance + epsilon)
Constraint: C % 8 == 0; C <= 6144 in fp32, 12288 in 16 bits.
Kernel 7 of layernorm_forward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: layernorm_forward ====
// ---- kernel 7: one or a few warps keep the row in registers; the other warps of the SM hide the latency ----

// One warp processes a row; for long rows, a block of 2, 4, 8 or 16 warps does. Each thread holds up to 8 vectors, in fp32 up to 3:
// a warp with more registers costs less than the barriers of a block.
//     vector of the row   0 .. width-1 | width .. 2*width-1 | 2*width ..      width = 32 * row_warps threads
//     held by thread      0 .. width-1 | 0 .. width-1       | 0 ..
//     as its vector       x[0]         | x[1]               | x[2]
constexpr int LAYERNORM_FORWARD_MAX_VECS = sizeof(floatX) == 2 ? 8 : 3;

// Sums x over the warps of the row; all threads get the same bits. Callers alternate between two `partial` (16)
// buffers, so one barrier per call is enough.
__device__ inline float layernorm_forward_row_sum(float x, float* partial, int row_warps) {
    x = warp_sum(x);
    if (row_warps == 1) { return x; }
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = x; }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < row_warps; i++) { sum += partial[i]; }
    return sum;
}

template <int num_vecs> __global__ void __launch_bounds__(num_vecs == 6 ? 256 : 512)
    layernorm_forward_kernel7(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, int N, int C, float epsilon, int row_warps) {
    __shared__ float partial[2][16];
    int width = 32 * row_warps, first = threadIdx.x % width * x128::size, stride = width * x128::size;
    int row = blockIdx.x * (blockDim.x / width) + threadIdx.x / width;
    if (row >= N) { return; } // whole warps return, and only if row_warps is 1: then there are no barriers
    bool last_valid = first + (num_vecs - 1) * stride < C; // only a thread's last vector can be past the row's end
    float inv_C = 1.0f / C;
    grid_launch_dependents();
    grid_wait_dependency();

    const floatX* inp_row = inp + (size_t)row * C + first;
    Floats128<floatX> x[num_vecs]; // zeros past the row's end
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        x[j] = to_floats(j < num_vecs - 1 || last_valid ? load128(inp_row + j * stride) : x128());
    }
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; k < x128::size; k++) { sum += x[j][k]; }
    }
    float m = layernorm_forward_row_sum(sum, partial[0], row_warps) * inv_C;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (j < num_vecs - 1 || last_valid) {
            for (int k = 0; k < x128::size; k++) {
                x[j][k] -= m;
                squares += x[j][k] * x[j][k];
            }
        }
    }
    float r = rsqrtf(layernorm_forward_row_sum(squares, partial[1], row_warps) * inv_C + epsilon);
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (j < num_vecs - 1 || last_valid) {
            // weight and bias are the same for all rows, so these loads hit L1
            auto w = to_floats(load128(weight + first + j * stride)), b = to_floats(load128(bias + first + j * stride));
            x128 y;
            for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(x[j][k] * r * w[k] + b[k]); }
            store128(out + (size_t)row * C + first + j * stride, y);
        }
    }
    if (first == 0) { mean[row] = m, rstd[row] = r; }
}

// out (N,C) = (inp - mean) * rstd * weight + bias; mean, rstd (N) per row | inp (N,C), weight, bias (C)
// rstd = 1 / sqrt(variance + epsilon)
void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, float epsilon, const Execution& exec) {
    int block_size = tuned_block_size(exec, "layernorm_forward", N, C, 64);
    Op op(exec, 2.0 * N * C * sizeof(floatX), 0, "layernorm_forward");
    int row_warps = 1, num_vectors = C / x128::size;
    while (num_vectors > 32 * LAYERNORM_FORWARD_MAX_VECS * row_warps) { row_warps *= 2; }
    require(N >= 1 && C >= 8 && C % 8 == 0 && row_warps <= 16);
    if (row_warps > 1) { block_size = 32 * row_warps; } // one row per block, because the barrier is block-wide
    int num_vecs = ceil_div(num_vectors, 32 * row_warps), most = num_vecs == 6 ? 256 : 512; // 6 would spill on sm_80
    if (row_warps == 1) { block_size = min(block_size, most); }
    require(block_size % 32 == 0 && block_size <= most);
    int block_rows = block_size / (32 * row_warps);
    decltype(&layernorm_forward_kernel7<1>) kernel = NULL;
    with_constant<LAYERNORM_FORWARD_MAX_VECS>(num_vecs, [&](auto n) { kernel = layernorm_forward_kernel7<n.value>; });
    launch_early(kernel, dim3(ceil_div(N, block_rows)), dim3(block_size), 0, exec, out, mean, rstd, inp, weight, bias,
                 N, C, epsilon, row_warps);
}
// ==== end promoted: layernorm_forward ====

// ---- shared by kernels 8 to 12 of layernorm_forward.cu and kernels 4 to 7 of fused_residual_layernorm.cu ----

// The most vectors of a row that a thread of these kernels holds.
constexpr int LAYERNORM_FORWARD_OTHER_MAX_VECS = 3;

// A thread's place in the rows, which have the layout of kernel 7: one or a few warps per row. The thread's part of a row is
// num_vecs vectors; vector j starts at element start(row) + j * stride. Type X holds this part in registers: num_vecs vectors of
// floatX or of float, with zeros past the row's end.
template <int num_vecs> struct LayernormForwardPlace {
    int C, row_warps, first, stride;
    int row,
        row_step; // the thread's first row (kernel 12: pair of rows); a persistent kernel goes on with row + row_step
    bool last_valid; // only a thread's last vector can be past the row's end
    float inv_C;

    __device__ LayernormForwardPlace(int C, int row_warps) : C(C), row_warps(row_warps) {
        int width = 32 * row_warps, block_rows = blockDim.x / width;
        first = threadIdx.x % width * x128::size, stride = width * x128::size;
        row = blockIdx.x * block_rows + threadIdx.x / width, row_step = gridDim.x * block_rows;
        last_valid = first + (num_vecs - 1) * stride < C;
        inv_C = 1.0f / C;
    }
    __device__ bool inside(int j) const { return j < num_vecs - 1 || last_valid; }
    __device__ size_t start(int row) const { return (size_t)row * C + first; }

    // Loads the thread's part of a row of p (N,C). A vector past the row's end is left as it is: the caller clears x.
    __device__ void load(x128 (&x)[num_vecs], const floatX* p, int row) const {
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (inside(j)) { x[j] = load128(p + start(row) + j * stride); }
        }
    }
    // Returns vector j of weight or bias (C), from memory or from the thread's part in registers.
    __device__ x128 parameter(const floatX* p, int j) const { return load128(p + first + j * stride); }
    __device__ x128 parameter(const x128* part, int j) const { return part[j]; }

    // Returns the sum of the thread's part of the row.
    template <class X> __device__ float sum(const X& x) const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            for (int k = 0; k < x128::size; k++) { sum += (float)x[j][k]; }
        }
        return sum;
    }
    // Returns the row's mean. sum: the sum of the thread's part. Callers pass mean() and rstd() two different `partial` (16) buffers:
    // see layernorm_forward_row_sum().
    __device__ float mean(float sum, float* partial) const {
        return layernorm_forward_row_sum(sum, partial, row_warps) * inv_C;
    }
    // Returns 1 / sqrt(variance + epsilon) of the row, whose mean is m.
    template <class X> __device__ float rstd(const X& x, float m, float epsilon, float* partial) const {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (inside(j)) {
                for (int k = 0; k < x128::size; k++) {
                    float centered = (float)x[j][k] - m;
                    squares += centered * centered;
                }
            }
        }
        return rsqrtf(layernorm_forward_row_sum(squares, partial, row_warps) * inv_C + epsilon);
    }
    // Stores the thread's part of the normalised row; the row's first thread stores mean m and rstd r. weight and bias are what
    // parameter() reads.
    template <class X, class W> __device__ void normalise(floatX* out, float* mean, float* rstd, int row, const X& x,
                                                          float m, float r, const W* weight, const W* bias) const {
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (inside(j)) {
                // weight and bias are the same for all rows, so loads of them hit L1
                x128 w = parameter(weight, j), b = parameter(bias, j), y;
                for (int k = 0; k < x128::size; k++) {
                    y[k] = (floatX)(((float)x[j][k] - m) * r * (float)w[k] + (float)b[k]);
                }
                store128(out + start(row) + j * stride, y);
            }
        }
        if (first == 0) { mean[row] = m, rstd[row] = r; }
    }
};

// The launch grid of these kernels. A warp, or a block if rows are long, takes `rows` adjacent rows at a time; dynamic shared memory
// holds shared_rows of them. A persistent kernel has as many blocks as fit on the device at once, each looping over
// many rows; its `rows` is 1.
struct LayernormForwardGrid {
    bool persistent;
    int rows, shared_rows;
};

// Launches a kernel that has a LayernormForwardPlace. instance(n) returns the kernel for n.value vectors per thread. The kernel's
// parameters are the types of `arguments`, then N, C and row_warps.
template <class Instance, class... Arguments>
void layernorm_forward_launch(const Instance& instance, LayernormForwardGrid grid, int N, int C, cudaStream_t stream,
                              int block_size, const Arguments&... arguments) {
    int row_warps = 1, num_vectors = C / x128::size;
    while (num_vectors > 32 * LAYERNORM_FORWARD_OTHER_MAX_VECS * row_warps) { row_warps *= 2; }
    require(N >= 1 && C >= 8 && C % 8 == 0 && row_warps <= 16);
    if (row_warps > 1) { block_size = 32 * row_warps; } // all warps of the block share rows: the barrier is block-wide
    require(block_size % 32 == 0 && block_size <= 512);
    int num_vecs = ceil_div(num_vectors, 32 * row_warps), block_rows = grid.rows * (block_size / (32 * row_warps));
    size_t shared_bytes = (size_t)grid.shared_rows * num_vecs * block_size * sizeof(x128);
    int grid_size = ceil_div(N, block_rows);
    with_constant<LAYERNORM_FORWARD_OTHER_MAX_VECS>(num_vecs, [&](auto n) {
        auto kernel = instance(n);
        if (grid.persistent) {
            int resident;
            cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
            cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, shared_bytes));
            grid_size = min(grid_size, num_multiprocessors() * resident);
        }
        launch_kernel(kernel, LaunchShape(grid_size, block_size, shared_bytes), stream, arguments..., N, C, row_warps);
    });
}
