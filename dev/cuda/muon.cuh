/*
muon_prepare: m = momentum * m + g; x (num,n,k) = g + momentum * m, divided by its norm, with g = grads * state->grad_scale
muon_apply: params -= learning_rate * (0.2 sqrt(max(rows,cols)) o + weight_decay * params) | o (num,n,k)
Constraint: rows * cols % 4 == 0. Nothing is written unless state->applied.
Kernel 1 of muon.cu, which has errors and sources.
*/
#pragma once

#include "../../llmc/adamw_state.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "adamw.cuh"

// ==== promoted: muon ====
// The momentum of a matrix is summed up in MUON_PARTS blocks, which leave the sum of squares of their part of u.
constexpr int MUON_PARTS = 256;
// x is written, and o is read, in tiles of 64x64, so that both sides of a transposition are coalesced.
constexpr int MUON_TILE = 64;

__device__ inline float muon_lookahead(float m, float grad, float grad_scale, float momentum) {
    return grad * grad_scale + momentum * m; // Nesterov: m after the next step if its gradient were the same
}

// m (num,size), parts (num,MUON_PARTS) | grads (num,size)
__global__ void __launch_bounds__(256) muon_momentum_kernel1(float* m, float* parts, const float* grads,
                                                             const StepState* state, size_t size, float momentum) {
    __shared__ float shared[32];
    if (!state->applied) { return; }
    float sum = 0.0f, grad_scale = state->grad_scale;
    m += blockIdx.y * size, grads += blockIdx.y * size;
    for (size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * 4; i < size; i += (size_t)MUON_PARTS * 256 * 4) {
        f128 m4 = load128(m + i), g4 = load128(grads + i);
        for (int k = 0; k < 4; k++) {
            m4[k] = momentum * m4[k] + g4[k] * grad_scale;
            float u = muon_lookahead(m4[k], g4[k], grad_scale, momentum);
            sum += u * u;
        }
        store128(m + i, m4);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { parts[blockIdx.y * MUON_PARTS + blockIdx.x] = sum; }
}

// Calls use(row, column) for the thread's elements of the block's tile, if they are inside; a warp has neighbouring
// columns.
template <class Use> __device__ inline void muon_for_tile(int row0, int column0, int rows, int cols, Use use) {
    int column = threadIdx.x % MUON_TILE;
#pragma unroll 4
    for (int row = threadIdx.x / MUON_TILE; row < MUON_TILE; row += 256 / MUON_TILE) {
        if (row0 + row < rows && column0 + column < cols) { use(row, column); }
    }
}

// x (num,n,k) | m, grads (num,rows,cols) | parts (num,MUON_PARTS)
__global__ void __launch_bounds__(256)
    muon_scale_kernel1(floatX* x, const float* m, const float* grads, const float* parts, const StepState* state,
                       int rows, int cols, float momentum) {
    __shared__ float tile[MUON_TILE][MUON_TILE + 1], shared[32];
    if (!state->applied) { return; }
    int num_columns = ceil_div(cols, MUON_TILE);
    int row0 = blockIdx.x / num_columns * MUON_TILE, column0 = blockIdx.x % num_columns * MUON_TILE;
    size_t matrix = (size_t)blockIdx.y * rows * cols;
    bool tall = rows > cols;
    float grad_scale = state->grad_scale;
    static_assert(MUON_PARTS == 256, "one part per thread");
    float inverse = 1.0f / (sqrtf(block_sum(parts[blockIdx.y * MUON_PARTS + threadIdx.x], shared)) + 1e-7f);
    muon_for_tile(row0, column0, rows, cols, [&](int row, int column) {
        size_t i = matrix + (size_t)(row0 + row) * cols + column0 + column;
        float u = inverse * muon_lookahead(m[i], grads[i], grad_scale, momentum);
        if (tall) {
            tile[row][column] = u;
        } else {
            x[i] = (floatX)u;
        }
    });
    if (!tall) { return; }
    __syncthreads(); // the tile is complete
    muon_for_tile(column0, row0, cols, rows, [&](int row, int column) {
        x[matrix + (size_t)(column0 + row) * rows + row0 + column] = (floatX)tile[column][row];
    });
}

// params, master (num,rows,cols) | o (num,n,k). seed: as in adamw, for random bits that depend on the place in params
__global__ void __launch_bounds__(256)
    muon_apply_kernel1(floatX* params, float* master, const floatX* o, const StepState* state, int rows, int cols,
                       float learning_rate, float weight_decay, uint32_t seed, size_t first) {
    __shared__ float tile[MUON_TILE][MUON_TILE + 1];
    if (!state->applied) { return; }
    int num_columns = ceil_div(cols, MUON_TILE);
    int row0 = blockIdx.x / num_columns * MUON_TILE, column0 = blockIdx.x % num_columns * MUON_TILE;
    size_t matrix = (size_t)blockIdx.y * rows * cols;
    bool tall = rows > cols;
    if (tall) {
        muon_for_tile(column0, row0, cols, rows, [&](int row, int column) {
            tile[column][row] = (float)o[matrix + (size_t)(column0 + row) * rows + row0 + column];
        });
        __syncthreads(); // the tile is complete
    }
    float keep = 1.0f - learning_rate * weight_decay;
    float rate = learning_rate * 0.2f * sqrtf((float)max(rows, cols));
    seed = adamw_seed(seed, state->num_updates);
    muon_for_tile(row0, column0, rows, cols, [&](int row, int column) {
        size_t i = matrix + (size_t)(row0 + row) * cols + column0 + column;
        float direction = tall ? tile[row][column] : (float)o[i];
        float p = keep * (master ? master[i] : (float)params[i]) - rate * direction;
        if (master) { master[i] = p; }
        params[i] = adamw_round(p, first + i, seed);
    });
}

static dim3 muon_tiles(int num, int rows, int cols) {
    require(num >= 1 && num <= 65535 && rows >= 1 && cols >= 1);
    return dim3(ceil_div(rows, MUON_TILE) * ceil_div(cols, MUON_TILE), num);
}

size_t muon_prepare_scratch(int num) { return (size_t)num * MUON_PARTS; } // in floats

// x (num,n,k) = the normalised momentum; m (num,rows,cols) is updated | scratch | grads (num,rows,cols)
void muon_prepare(floatX* x, float* m, float* scratch, const float* grads, const StepState* state, int num, int rows,
                  int cols, float momentum, const Execution& exec) {
    size_t size = (size_t)rows * cols;
    Op op(exec, (12.0 + sizeof(floatX)) * num * size, 0, "muon_prepare");
    require(size % 4 == 0 && ((size_t)m | (size_t)grads) % 16 == 0);
    dim3 tiles = muon_tiles(num, rows, cols);
    launch_kernel(muon_momentum_kernel1, LaunchShape(dim3(MUON_PARTS, num), 256), exec, m, scratch, grads, state, size,
                  momentum);
    launch_kernel(muon_scale_kernel1, LaunchShape(tiles, 256), exec, x, m, grads, scratch, state, rows, cols, momentum);
}

// params, master (num,rows,cols) | o (num,n,k). seed 0: params are rounded to nearest; else stochastically, as adamw
// does for a range of parameters that begins `first` values before params.
void muon_apply(floatX* params, float* master, const floatX* o, const StepState* state, int num, int rows, int cols,
                float learning_rate, float weight_decay, uint32_t seed, size_t first, const Execution& exec) {
    double bytes = (master ? 8.0 + sizeof(floatX) : 2.0 * sizeof(floatX)) + sizeof(floatX);
    Op op(exec, bytes * num * rows * cols, 0, "muon_apply");
    launch_kernel(muon_apply_kernel1, LaunchShape(muon_tiles(num, rows, cols), 256), exec, params, master, o, state,
                  rows, cols, learning_rate, weight_decay, seed, first);
}
// ==== end promoted: muon ====
