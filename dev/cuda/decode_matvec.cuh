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
template <int batch>
__device__ void decode_matvec_norm(x128* shared, const DecodeProduct& p, int4 g, int4 s, int first_b) {
    __shared__ float mean[batch], rstd[batch];
    int lane = threadIdx.x % 32, num_warps = blockDim.x / 32, num_vec = p.K / x128::size;
    for (int b = threadIdx.x / 32; b < batch; b += num_warps) {
        const floatX* from = p.x + (size_t)min(first_b + b, p.B - 1) * p.K;
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
        float center = warp_sum(sum) / p.K;
        for (int v = lane; v < num_vec; v += 32) { // a lane reads only what it wrote: no barrier
            x128 value = shared[b * num_vec + v];
            for (int e = 0; e < x128::size; e++) { squares += ((float)value[e] - center) * ((float)value[e] - center); }
        }
        squares = warp_sum(squares);
        if (lane == 0) { mean[b] = center, rstd[b] = rsqrtf(squares / p.K + p.epsilon); }
    }
    __syncthreads();
    for (int v = threadIdx.x; v < num_vec; v += blockDim.x) {
        if (v != (int)threadIdx.x) {
            g = reinterpret_cast<const int4*>(p.norm_weight)[v];
            s = reinterpret_cast<const int4*>(p.norm_bias)[v];
        }
        x128 scale = vec128_from_bits<floatX>(g), shift = vec128_from_bits<floatX>(s);
#pragma unroll 2
        for (int b = 0; b < batch; b++) {
            shared[b * num_vec + v] = layernorm_vector(shared[b * num_vec + v], scale, shift, mean[b], rstd[b]);
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
    decode_matvec_kernel6(Out* out, const __grid_constant__ DecodeProduct p, int split) {
    constexpr int num_sums = rows * batch, lanes_per_sum = 32 / num_sums;
    constexpr bool scaled = sizeof(W) < sizeof(floatX);
    extern __shared__ __align__(128) int4 decode_matvec_shared[]; // (batch,K) floatX, if norm
    __shared__ float partial[8][num_sums];                        // sums of each warp over its share of the columns
    x128* normalised = reinterpret_cast<x128*>(decode_matvec_shared);
    const W* weight = reinterpret_cast<const W*>(p.weight.values);
    const float* scales = p.weight.scales;
    const floatX *own_x = p.x + (size_t)blockIdx.x * batch * p.K, *bias = p.bias;
    const int B = p.B, OC = p.OC;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, segment = warp % split;
    int num_vec = p.K / x128::size, first = segment * 32 + lane, step = split * 32;
    int rows_per_block = (int)blockDim.x / 32 / split * rows, first_b = blockIdx.x * batch;
    int row = blockIdx.y * rows_per_block + warp / split * rows; // the group's first row
    // the row (within the group) and the sequence of the output that this lane writes, if `writes`
    int own_row = lane / lanes_per_sum / batch, own_b = first_b + lane / lanes_per_sum % batch;
    bool writes = segment == 0 && lane % lanes_per_sum == 0 && own_b < B;

    WeightBits<W> w[rows][DECODE_MATVEC_AHEAD]; // raw bits: unpacked they would take twice the registers, or more
    int4 g = {}, s = {};
    float next_bias, next_scale;
    auto fetch_rows = [&] { // the first vectors of the group's rows, and what belongs to this lane's output
        decode_matvec_fetch<rows>(w, weight, row, first, step, num_vec, OC);
        next_bias = writes && bias && row + own_row < OC ? (float)bias[row + own_row] : 0.0f;
        next_scale = scaled && writes && row + own_row < OC ? scales[row + own_row] : 0.0f;
    };
    fetch_rows();
    if (norm && (int)threadIdx.x < num_vec) {
        g = reinterpret_cast<const int4*>(p.norm_weight)[threadIdx.x];
        s = reinterpret_cast<const int4*>(p.norm_bias)[threadIdx.x];
    }
    grid_launch_dependents(); // the next kernel may start; it waits for this one in its own grid_wait_dependency()
    grid_wait_dependency();   // what was read before this line is not written by earlier kernels of the step
    if (norm) { decode_matvec_norm<batch>(normalised, p, g, s, first_b); }

    // all groups of a block take the same number of iterations, because the loop has barriers
    for (int begin = blockIdx.y * rows_per_block; begin < OC; begin += gridDim.y * rows_per_block) {
        bool writes_now = writes && row + own_row < OC;
        size_t at = (size_t)own_b * OC + row + own_row;
        float bias_now = next_bias, scale_now = next_scale;
        float residual_now = writes_now && p.residual ? (float)p.residual[at] : 0.0f;
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
        fetch_rows();

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
        if (p.gelu) { sum = gelu(sum); }
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

template <class Out, class W, int batch, int rows>
void decode_matvec_batch(Out* out, const DecodeProduct& p, bool early, int block_size, const Execution& exec) {
    constexpr bool head = sizeof(Out) != sizeof(floatX); // always has a layernorm
    bool norm = p.norm_weight != NULL;
    int num_warps = block_size / 32, split = decode_matvec_split(rows, p.K, p.OC, num_warps);
    int most = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 256 / block_size;
    dim3 grid(ceil_div(p.B, batch), min(ceil_div(p.OC, num_warps / split * rows), most));
    auto kernel = decode_matvec_kernel6<Out, W, batch, rows, true>;
    if constexpr (!head) { kernel = norm ? kernel : decode_matvec_kernel6<Out, W, batch, rows, false>; }
    require(norm || !head);
    size_t shared_bytes = norm ? (size_t)batch * p.K * sizeof(floatX) : 0;
    launch_kernel(kernel, LaunchShape(grid, block_size, shared_bytes, 0, early), exec, out, p, split);
}

// Launches kernel 6; early: by programmatic dependent launch.
template <class Out> void decode_matvec_launch(Out* out, const DecodeProduct& p, bool early, const Execution& exec) {
    const size_t shared_limit = 40 * 1024; // of the 48 KB that a launch may use without cudaFuncSetAttribute
    bool norm = p.norm_weight != NULL;
    int block_size = exec.block_size ? exec.block_size : 256;
    require(p.B > 0 && p.K > 0 && p.K % x128::size == 0 && p.OC > 0 && norm == (p.norm_bias != NULL));
    require(!norm || p.K * sizeof(floatX) <= shared_limit);
    // at most 256 threads, because `partial` has 8 rows, one per warp
    require(block_size >= 32 && block_size <= 256 && (block_size & (block_size - 1)) == 0);

    int batch = 1; // sequences per block
    while (batch < min(p.B, 8) && (!norm || 2 * batch * p.K * sizeof(floatX) <= shared_limit)) { batch *= 2; }
    weight_dispatch(p.weight, [&](auto type) {
        typedef decltype(type) W;
        // From 4 sequences on a warp multiplies two rows of the weight at once, which share the loads and conversions of x.
        // So it does with 8 bits if it has several rows, to have as many bytes in flight as with one row of 16 bits.
        auto launch = batch == 8   ? decode_matvec_batch<Out, W, 8, 2>
                      : batch == 4 ? decode_matvec_batch<Out, W, 4, 2>
                      : batch == 2 ? decode_matvec_batch<Out, W, 2, 1>
                                   : decode_matvec_batch<Out, W, 1, 1>;
        if constexpr (sizeof(W) < sizeof(floatX)) {
            int groups = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 8 /
                         decode_matvec_split(1, p.K, p.OC, block_size / 32);
            if (batch <= 2 && p.OC > groups) {
                launch = batch == 2 ? decode_matvec_batch<Out, W, 2, 2> : decode_matvec_batch<Out, W, 1, 2>;
            }
        }
        launch(out, p, early, block_size, exec);
    });
}

// Computes p for few texts. Weights, their scales and biases are read while the previous kernel in the stream may still run, so no
// kernel of the step may write them.
void decode_matvec(floatX* out, const DecodeProduct& p, const Execution& exec) {
    Op op(exec, p.bytes(sizeof(*out)), p.flops(), "decode_matvec %d -> %d", p.K, p.OC);
    decode_matvec_launch(out, p, true, exec);
}

// logits (B,Vp) float: p with a layernorm alone
void decode_head(float* logits, const DecodeProduct& p, const Execution& exec) {
    Op op(exec, p.bytes(sizeof(*logits)), p.flops(), "decode_matvec %d -> %d, head", p.K, p.OC);
    require(p.norm_weight && !p.bias && !p.residual && !p.gelu);
    decode_matvec_launch(logits, p, true, exec);
}
// ==== end promoted: decode_matvec ====
