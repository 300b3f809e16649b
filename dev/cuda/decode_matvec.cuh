/*
decode_matvec: out (B,OC) = gelu?(layernorm?(x (B,K)) weight (OC,K)^T + bias (OC)) + residual (B,OC); a NULL argument and its operation
are left out. decode_head: logits (B,Vp) float = layernorm(x (B,C)) wte (Vp,C)^T
Constraint: K % 8 == 0; with a layernorm, a row of x of at most 40 KB.
Kernel 6 of decode_matvec.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/weight_matrix.cuh"

// ==== promoted: decode_matvec ====
// ---- kernel 6: programmatic dependent launch: loads its weights while the previous kernel still runs ----------------

constexpr int DECODE_MATVEC_AHEAD = 3; // vectors in flight per lane and row; they cover a row of 768 elements

// Resident blocks of 256 threads per SM. 4 leave 64 registers per thread, 2 leave 128, which larger batches need.
__host__ __device__ constexpr int decode_matvec_blocks_per_sm(int batch) { return batch >= 4 ? 2 : 4; }

// Writes the normalised x (batch,K) to shared memory; rows past B repeat the last row. g and s are this thread's first
// vectors of norm_weight and norm_bias, which the caller loads before grid_wait_dependency().
template <int batch> __device__ void decode_matvec_norm(x128* shared, const floatX* x, const floatX* norm_weight,
                                                        const floatX* norm_bias, int4 g, int4 s, int first_b, int B,
                                                        int K, float epsilon) {
    __shared__ float mean[batch], rstd[batch];
    int lane = threadIdx.x % 32, num_warps = blockDim.x / 32, num_vec = K / x128::size;
    for (int b = threadIdx.x / 32; b < batch; b += num_warps) {
        const floatX* from = x + (size_t)min(first_b + b, B - 1) * K;
        float sum = 0.0f, squares = 0.0f;
        for (int first = lane; first < num_vec; first += 32 * DECODE_MATVEC_AHEAD) {
            int4 value[DECODE_MATVEC_AHEAD]; // all loads in flight at once
#pragma unroll
            for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
                value[i] = reinterpret_cast<const int4*>(from)[min(first + 32 * i, num_vec - 1)];
            }
#pragma unroll
            for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
                if (first + 32 * i >= num_vec) { continue; }
                x128 elements = vec128_from_bits<floatX>(value[i]);
                for (int e = 0; e < x128::size; e++) { sum += (float)elements[e]; }
                shared[b * num_vec + first + 32 * i] = elements;
            }
        }
        float center = warp_sum(sum) / K;
        for (int v = lane; v < num_vec; v += 32) { // a lane reads only what it wrote: no barrier
            x128 value = shared[b * num_vec + v];
            for (int e = 0; e < x128::size; e++) { squares += ((float)value[e] - center) * ((float)value[e] - center); }
        }
        squares = warp_sum(squares);
        if (lane == 0) { mean[b] = center, rstd[b] = rsqrtf(squares / K + epsilon); }
    }
    __syncthreads();
    for (int v = threadIdx.x; v < num_vec; v += blockDim.x) {
        if (v != (int)threadIdx.x) {
            g = reinterpret_cast<const int4*>(norm_weight)[v];
            s = reinterpret_cast<const int4*>(norm_bias)[v];
        }
        x128 scale = vec128_from_bits<floatX>(g), shift = vec128_from_bits<floatX>(s);
        for (int b = 0; b < batch; b++) {
            x128 value = shared[b * num_vec + v];
            for (int e = 0; e < x128::size; e++) {
                value[e] = (floatX)(((float)value[e] - mean[b]) * rstd[b] * (float)scale[e] + (float)shift[e]);
            }
            shared[b * num_vec + v] = value;
        }
    }
    __syncthreads();
}

// Loads this lane's next vectors of the warp's `rows` rows of the weight; vectors outside the matrix are zeros.
template <int rows, class W> __device__ inline void decode_matvec_fetch(WeightBits<W> w[rows][DECODE_MATVEC_AHEAD],
                                                                        const W* weight, int row, int first, int step,
                                                                        int num_vec, int OC) {
#pragma unroll
    for (int r = 0; r < rows; r++) {
#pragma unroll
        for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
            int v = first + i * step;
            bool there = row + r < OC && v < num_vec;
            const WeightBits<W>* from =
                reinterpret_cast<const WeightBits<W>*>(weight) + (size_t)(row + r) * num_vec + v;
            w[r][i] = there ? __ldcs(from) : WeightBits<W>{};
        }
    }
}

// A block consists of groups of `split` warps. A group multiplies `rows` rows of the weight, of type W, at a time, and
// each of its warps takes a share of the columns. blockIdx.x selects `batch` sequences, blockIdx.y the rows. An example
// with split = 2:
//
//     vectors of a row    0 .. 31   32 .. 63   64 .. 95   96 .. 127  ...
//     group 0             warp 0    warp 1     warp 0     warp 1     ...     lane l of a warp loads its vector l
//     group 1             warp 2    warp 3     warp 2     warp 3     ...     (the next `rows` rows)
template <class Out, class W, int batch, int rows, bool norm>
__global__ void __launch_bounds__(256, decode_matvec_blocks_per_sm(batch))
    decode_matvec_kernel6(Out* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                          const W* weight, const float* scales, const floatX* bias, const floatX* residual,
                          bool has_gelu, int B, int K, int OC, float epsilon, int split) {
    constexpr int num_sums = rows * batch, lanes_per_sum = 32 / num_sums;
    constexpr bool scaled = sizeof(W) < sizeof(floatX);
    extern __shared__ __align__(128) int4 decode_matvec_shared[]; // (batch,K) floatX, if norm
    __shared__ float partial[8][num_sums];                        // sums of each warp over its share of the columns
    x128* normalised = reinterpret_cast<x128*>(decode_matvec_shared);
    const floatX* own_x = x + (size_t)blockIdx.x * batch * K;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, segment = warp % split;
    int num_vec = K / x128::size, first = segment * 32 + lane, step = split * 32;
    int rows_per_block = (int)blockDim.x / 32 / split * rows, first_b = blockIdx.x * batch;
    int row = blockIdx.y * rows_per_block + warp / split * rows; // the group's first row
    // the row (within the group) and the sequence of the output that this lane writes, if `writes`
    int own_row = lane / lanes_per_sum / batch, own_b = first_b + lane / lanes_per_sum % batch;
    bool writes = segment == 0 && lane % lanes_per_sum == 0 && own_b < B;

    WeightBits<W> w[rows][DECODE_MATVEC_AHEAD]; // raw bits: unpacked they would take twice the registers, or more
    int4 g = {}, s = {};
    decode_matvec_fetch<rows>(w, weight, row, first, step, num_vec, OC);
    float next_bias = writes && bias && row + own_row < OC ? (float)bias[row + own_row] : 0.0f;
    float next_scale = scaled && writes && row + own_row < OC ? scales[row + own_row] : 0.0f;
    if (norm && (int)threadIdx.x < num_vec) {
        g = reinterpret_cast<const int4*>(norm_weight)[threadIdx.x];
        s = reinterpret_cast<const int4*>(norm_bias)[threadIdx.x];
    }
    grid_launch_dependents(); // the next kernel may start; it waits for this one in its own grid_wait_dependency()
    grid_wait_dependency();   // what was read before this line is not written by earlier kernels of the step
    if (norm) { decode_matvec_norm<batch>(normalised, x, norm_weight, norm_bias, g, s, first_b, B, K, epsilon); }

    // all groups of a block take the same number of iterations, because the loop has barriers
    for (int begin = blockIdx.y * rows_per_block; begin < OC; begin += gridDim.y * rows_per_block) {
        bool writes_now = writes && row + own_row < OC;
        size_t at = (size_t)own_b * OC + row + own_row;
        float bias_now = next_bias, scale_now = next_scale;
        float residual_now = writes_now && residual ? (float)residual[at] : 0.0f;
        float sums[num_sums] = {};
        for (int chunk = first; chunk < num_vec; chunk += DECODE_MATVEC_AHEAD * step) {
            if (chunk != first) { decode_matvec_fetch<rows>(w, weight, row, chunk, step, num_vec, OC); }
#pragma unroll
            for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
                // past the end of the row the weights are 0; v is clamped so that the loads of x need no branch and are
                // issued together
                int v = min(chunk + i * step, num_vec - 1);
                float weights[rows][x128::size];
#pragma unroll
                for (int r = 0; r < rows; r++) { weight_floats(weights[r], w[r][i], W()); }
                int at_x = v, last_x = (B - 1 - first_b) * num_vec + v;
#pragma unroll
                for (int b = 0; b < batch; b++) {
                    x128 value = norm ? normalised[b * num_vec + v] : load128(own_x + at_x * x128::size);
                    // one running offset, because an address per sequence would take registers
                    at_x = min(at_x + num_vec, last_x);
#pragma unroll
                    for (int e = 0; e < x128::size; e++) {
#pragma unroll
                        for (int r = 0; r < rows; r++) { sums[r * batch + b] += (float)value[e] * weights[r][e]; }
                    }
                }
            }
        }
        row += gridDim.y * rows_per_block;
        // the loads of the next rows are in flight during the warp sums
        decode_matvec_fetch<rows>(w, weight, row, first, step, num_vec, OC);
        next_bias = writes && bias && row + own_row < OC ? (float)bias[row + own_row] : 0.0f;
        next_scale = scaled && writes && row + own_row < OC ? scales[row + own_row] : 0.0f;

        float sum = warp_sums<num_sums>(sums);
        if (split > 1) {
            if (lane % lanes_per_sum == 0) { partial[warp][lane / lanes_per_sum] = sum; }
            __syncthreads();
            if (writes) {
                for (int s = 1; s < split; s++) { sum += partial[warp + s][lane / lanes_per_sum]; }
            }
            __syncthreads(); // now `partial` may be overwritten
        }
        sum = scaled ? sum * scale_now + bias_now : sum + bias_now;
        if (has_gelu) { sum = gelu(sum); }
        if (writes_now) { out[at] = (Out)(sum + residual_now); }
    }
}

// Warps that share a row. Rows are split over more of them while a lane cannot have its whole share in flight, or while
// there are fewer than two blocks per SM and a lane has more than one vector.
inline int decode_matvec_split(int rows, int K, int OC, int num_warps) {
    int num_vec = K / x128::size, num_sms = num_multiprocessors(), split = 1;
    while (split < num_warps && (num_vec > 32 * DECODE_MATVEC_AHEAD * split ||
                                 (num_vec > 32 * split && ceil_div(OC, num_warps / split * rows) < 2 * num_sms))) {
        split *= 2;
    }
    return split;
}

template <class Out, class W, int batch, int rows, class Run>
void decode_matvec_batch(bool norm, int B, int K, int OC, int block_size, const Run& run) {
    constexpr bool head = sizeof(Out) != sizeof(floatX); // always has a layernorm
    int num_warps = block_size / 32, split = decode_matvec_split(rows, K, OC, num_warps);
    int most = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 256 / block_size;
    int blocks = min(ceil_div(OC, num_warps / split * rows), most);
    size_t shared_bytes = norm ? (size_t)batch * K * sizeof(floatX) : 0;
    auto kernel = decode_matvec_kernel6<Out, W, batch, rows, true>;
    if constexpr (!head) { kernel = norm ? kernel : decode_matvec_kernel6<Out, W, batch, rows, false>; }
    require(norm || !head);
    run(kernel, LaunchShape(dim3(ceil_div(B, batch), blocks), block_size, shared_bytes), split);
}

// Calls run(kernel, shape, split) with kernel 6 for a product (B,K) (OC,K)^T; `split` is the kernel's last argument.
template <class Out, class W, class Run>
void decode_matvec_kernel(bool norm, int B, int K, int OC, int block_size, const Run& run) {
    const size_t shared_limit = 40 * 1024; // of the 48 KB that a launch may use without cudaFuncSetAttribute
    require(B > 0 && K > 0 && K % x128::size == 0 && OC > 0);
    require(!norm || K * sizeof(floatX) <= shared_limit);
    // at most 256 threads, because `partial` has 8 rows, one per warp
    require(block_size >= 32 && block_size <= 256 && (block_size & (block_size - 1)) == 0);

    int batch = 1; // sequences per block
    while (batch < min(B, 8) && (!norm || 2 * batch * K * sizeof(floatX) <= shared_limit)) { batch *= 2; }
    // From 4 sequences on a warp multiplies two rows of the weight at once, which share the loads and conversions of x.
    // So it does with 8 bits if it has several rows, to have as many bytes in flight as with one row of 16 bits.
    auto choose = batch == 8   ? decode_matvec_batch<Out, W, 8, 2, Run>
                  : batch == 4 ? decode_matvec_batch<Out, W, 4, 2, Run>
                  : batch == 2 ? decode_matvec_batch<Out, W, 2, 1, Run>
                               : decode_matvec_batch<Out, W, 1, 1, Run>;
    if constexpr (sizeof(W) < sizeof(floatX)) {
        int groups = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 8 /
                     decode_matvec_split(1, K, OC, block_size / 32);
        if (batch <= 2 && OC > groups) {
            choose = batch == 2 ? decode_matvec_batch<Out, W, 2, 2, Run> : decode_matvec_batch<Out, W, 1, 2, Run>;
        }
    }
    choose(norm, B, K, OC, block_size, run);
}

// early: by programmatic dependent launch
template <class Out> void decode_matvec_run(Out* out, const floatX* x, const floatX* norm_weight,
                                            const floatX* norm_bias, const WeightMatrix& weight, const floatX* bias,
                                            const floatX* residual, bool gelu, int B, int K, int OC, float epsilon,
                                            const Execution& exec, bool early = true) {
    int block_size = exec.block_size ? exec.block_size : 256;
    require((norm_weight != NULL) == (norm_bias != NULL));
    weight_dispatch(weight, [&](auto type) {
        typedef decltype(type) W;
        auto run = [&](auto kernel, LaunchShape shape, int split) {
            shape.early = early;
            launch_kernel(kernel, shape, exec, out, x, norm_weight, norm_bias, (const W*)weight.values, weight.scales,
                          bias, residual, gelu, B, K, OC, epsilon, split);
        };
        decode_matvec_kernel<Out, W>(norm_weight != NULL, B, K, OC, block_size, run);
    });
}

// out (B,OC) = gelu?(layernorm?(x) weight^T + bias) + residual | x (B,K) | norm_weight, norm_bias (K) or NULL
// | weight (OC,K) | bias (OC) or NULL | residual (B,OC) or NULL, may be out itself
// Weights, their scales and biases are read while the previous kernel in the stream may still run, so no kernel of the
// step may write them.
void decode_matvec(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec) {
    double others = (double)B * (K + (residual ? 2.0 : 1.0) * OC) * sizeof(floatX);
    Op op(exec, weight.bytes(OC, K) + others, 2.0 * B * OC * K, "decode_matvec %d -> %d", K, OC);
    decode_matvec_run(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, epsilon, exec);
}

// logits (B,Vp) float = layernorm(x) wte^T | x (B,C) | norm_weight, norm_bias (C) | wte (Vp,C)
void decode_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                 const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec) {
    double others = (double)B * C * sizeof(floatX) + (double)B * Vp * sizeof(float);
    Op op(exec, wte.bytes(Vp, C) + others, 2.0 * B * Vp * C, "decode_matvec %d -> %d, head", C, Vp);
    require(norm_weight != NULL);
    decode_matvec_run<float>(logits, x, norm_weight, norm_bias, wte, NULL, NULL, false, B, C, Vp, epsilon, exec);
}
// ==== end promoted: decode_matvec ====
