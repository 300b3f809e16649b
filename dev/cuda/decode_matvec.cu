/* decode_matvec: out = gelu?(layernorm?(x) weight^T + bias) + residual, for the B tokens of one decoding step

   out (B,OC) floatX out, float for the head | x (B,K) floatX in | norm_weight, norm_bias (K) floatX in, or NULL
   weight (OC,K) in: floatX, or int8 or e4m3 with scales (OC) float | bias (OC) floatX in, or NULL
   residual (B,OC) floatX in, or NULL, may be out itself
   Operations with a ? are optional. llmc/weight_matrix.cuh says what a weight of 8 bits stands for.
   Bound: memory, the bytes of the weight: 1 to 4 times OC*K.
   Constraint: K % 8 == 0; with a layernorm, a row of x of at most 40 KB.
   Error: one ulp of floatX, and 1e-5 of the terms' magnitude for the sums. With a layernorm also two ulps of the terms'
   magnitude: as in training, the normalised x is rounded to floatX before the product, and K such roundings add up.
   This file also has decode_embed, the first kernel of a decoding step, decode_head, its last product, and
   quantize_weights, which makes 8 bits of a weight. The small check shapes check them.
   Source: layernorm: Ba et al. 2016, arXiv:1607.06450; gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415;
   overlap: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".

   Shape flags: K = T*C and OC = V. Kind 0 is the first half of the feed-forward layer, with a layernorm before the
   product and gelu after it. Kind 1 adds a residual instead; with T = 4 and V = C it is the second half of the
   feed-forward layer. Kind 2 is the head: a layernorm before the product and nothing after it. Kinds 3 to 5 are these
   with a weight in int8, kinds 6 to 8 in e4m3, which needs compute capability 8.9.

   Kernels (this list is written by versions.sh):
     1  one thread per row of the weight
     2  one warp per row of the weight
     3  one warp per row, 16-byte loads
     4  one block per row
     5  every block computes the layernorm
     6  5, weights loaded while the previous kernel still runs (promoted)
     7  2 with weights of 8 bits, converted one by one (kinds 3, 4, 6, 7)
     kind 3: layernorm, product, gelu; int8
     kind 4: product, residual; int8
     kind 6: layernorm, product, gelu; e4m3
     kind 7: product, residual; e4m3

   nvcc -O3 --use_fast_math decode_matvec.cu -o decode_matvec      (or: make decode_matvec)
   ./decode_matvec 6      check kernel 6 against the CPU and sweep its block sizes
   ./decode_matvec        every kernel, side by side                                         */
#include "bench.h"
#include "decode_weight.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/weight_matrix.cuh"

#ifndef PROMOTED_ONLY // another op that includes this file uses its promoted kernels only

// ---- kernel 0: a separate layernorm for kernels 1 to 4, which do not compute it themselves: one warp per row --------

__global__ void decode_matvec_norm_kernel0(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                           int K) {
    x += (size_t)blockIdx.x * K, out += (size_t)blockIdx.x * K;
    float sum = 0.0f, squares = 0.0f;
    for (int k = threadIdx.x; k < K; k += 32) { sum += (float)x[k]; }
    float mean = warp_sum(sum) / K;
    for (int k = threadIdx.x; k < K; k += 32) { squares += ((float)x[k] - mean) * ((float)x[k] - mean); }
    float rstd = rsqrtf(warp_sum(squares) / K + 1e-5f);
    for (int k = threadIdx.x; k < K; k += 32) {
        out[k] = (floatX)(((float)x[k] - mean) * rstd * (float)weight[k] + (float)bias[k]);
    }
}

// epilogue of kernels 1 to 4: applies bias, gelu and residual to one output, and stores it
__device__ inline void decode_matvec_store(floatX* out, float sum, const floatX* bias, const floatX* residual,
                                           bool has_gelu, int row, int b, int OC) {
    size_t i = (size_t)b * OC + row;
    if (bias) { sum += (float)bias[row]; }
    if (has_gelu) { sum = gelu(sum); }
    if (residual) { sum += (float)residual[i]; }
    out[i] = (floatX)sum;
}

// ---- kernel 1: one thread per row of the weight ---------------------------------------------------------------------

__global__ void decode_matvec_kernel1(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    int row = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = 0; k < K; k++) { sum += (float)x[(size_t)b * K + k] * (float)weight[(size_t)row * K + k]; }
    decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC);
}

// ---- kernel 2: one warp per row of the weight -----------------------------------------------------------------------

__global__ void decode_matvec_kernel2(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, b = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = lane; k < K; k += 32) { sum += (float)x[(size_t)b * K + k] * (float)weight[(size_t)row * K + k]; }
    sum = warp_sum(sum);
    if (lane == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// ---- kernel 3: one warp per row, 16-byte loads ----------------------------------------------------------------------

__global__ void decode_matvec_kernel3(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, b = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = lane * x128::size; k < K; k += 32 * x128::size) {
        x128 w = load128cs(weight + (size_t)row * K + k), v = load128(x + (size_t)b * K + k);
        for (int e = 0; e < x128::size; e++) { sum += (float)v[e] * (float)w[e]; }
    }
    sum = warp_sum(sum);
    if (lane == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// ---- kernel 4: one block per row, so that every SM has work even if there are few rows ------------------------------

__global__ void decode_matvec_kernel4(floatX* out, const floatX* x, const floatX* weight, const floatX* bias,
                                      const floatX* residual, bool gelu, int K, int OC) {
    __shared__ float shared[32];
    int row = blockIdx.x, b = blockIdx.y;
    float sum = 0.0f;
    for (int k = threadIdx.x * x128::size; k < K; k += blockDim.x * x128::size) {
        x128 w = load128cs(weight + (size_t)row * K + k), v = load128(x + (size_t)b * K + k);
        for (int e = 0; e < x128::size; e++) { sum += (float)v[e] * (float)w[e]; }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// Launches one of kernels 1 to 4. If there is a layernorm, kernel 0 first writes the normalised x to scratch (B,K).
typedef void (*DecodeMatvecKernel)(floatX*, const floatX*, const floatX*, const floatX*, const floatX*, bool, int, int);
void decode_matvec1234(DecodeMatvecKernel kernel, int blocks, floatX* out, const floatX* x, const floatX* norm_weight,
                       const floatX* norm_bias, const floatX* weight, const floatX* bias, const floatX* residual,
                       floatX* scratch, bool gelu, int B, int K, int OC, cudaStream_t stream, int block_size) {
    if (norm_weight) {
        decode_matvec_norm_kernel0<<<B, 32, 0, stream>>>(scratch, x, norm_weight, norm_bias, K);
        cudaCheck(cudaGetLastError());
        x = scratch;
    }
    kernel<<<dim3(blocks, B), block_size, 0, stream>>>(out, x, weight, bias, residual, gelu, K, OC);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: every block computes the layernorm, for several sequences (kernel 6, launched without overlap) -------

template <class Out, class W> struct DecodeMatvecLaunch;
template <class Out, class W>
DecodeMatvecLaunch<Out, W> decode_matvec_launch6(bool norm, int B, int K, int OC, int block_size);

template <class Out> void decode_matvec5(Out* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                                         const WeightMatrix& weight, const floatX* bias, const floatX* residual,
                                         bool gelu, int B, int K, int OC, cudaStream_t stream, int block_size) {
    weight_dispatch(weight, [&](auto type) {
        typedef decltype(type) W;
        DecodeMatvecLaunch<Out, W> l = decode_matvec_launch6<Out, W>(norm_weight != NULL, B, K, OC, block_size);
        l.kernel<<<l.grid, block_size, l.shared_bytes, stream>>>(out, x, norm_weight, norm_bias,
                                                                 (const W*)weight.values, weight.scales, bias, residual,
                                                                 gelu, B, K, OC, l.split);
        cudaCheck(cudaGetLastError());
    });
}

#endif

// ---- kernel 6: programmatic dependent launch: loads its weights while the previous kernel still runs ----------------

// ==== promoted: decode_matvec ====
constexpr int DECODE_MATVEC_AHEAD = 3; // vectors in flight per lane and row; they cover a row of 768 elements

// Resident blocks of 256 threads per SM. 4 leave 64 registers per thread, 2 leave 128, which larger batches need.
__host__ __device__ constexpr int decode_matvec_blocks_per_sm(int batch) { return batch >= 4 ? 2 : 4; }

// Sums each of n values (n a power of two, at most 32) over the warp; lane i gets the sum of value i / (32 / n).
template <int n> __device__ inline float decode_matvec_sums(float* values) {
    int lane = threadIdx.x % 32, offset = 16;
    // in each round a lane keeps half of its values and gives the other half to lane ^ offset
#pragma unroll
    for (int half = n / 2; half > 0; half /= 2, offset /= 2) {
        bool upper = lane & offset;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float kept = upper ? values[i + half] : values[i], given = upper ? values[i] : values[i + half];
            values[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, offset);
        }
    }
#pragma unroll
    for (; offset > 0; offset /= 2) { values[0] += __shfl_xor_sync(0xFFFFFFFFu, values[0], offset); }
    return values[0];
}

// Writes the normalised x (batch,K) to shared memory; rows past B repeat the last row. g and s are this thread's first
// vectors of norm_weight and norm_bias, which the caller loads before grid_wait_dependency().
template <int batch> __device__ void decode_matvec_norm(x128* shared, const floatX* x, const floatX* norm_weight,
                                                        const floatX* norm_bias, int4 g, int4 s, int first_b, int B,
                                                        int K) {
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
        if (lane == 0) { mean[b] = center, rstd[b] = rsqrtf(squares / K + 1e-5f); }
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
                          bool has_gelu, int B, int K, int OC, int split) {
    constexpr int num_sums = rows * batch, lanes_per_sum = 32 / num_sums;
    constexpr bool scaled = sizeof(W) < sizeof(floatX);
    extern __shared__ int4 decode_matvec_shared[]; // (batch,K) floatX, if norm
    __shared__ float partial[8][num_sums];         // sums of each warp over its share of the columns
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
    if (norm) { decode_matvec_norm<batch>(normalised, x, norm_weight, norm_bias, g, s, first_b, B, K); }

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

        float sum = decode_matvec_sums<num_sums>(sums);
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

// The launch configuration of kernel 6; `split` is the kernel's last argument.
template <class Out, class W> struct DecodeMatvecLaunch {
    void (*kernel)(Out*, const floatX*, const floatX*, const floatX*, const W*, const float*, const floatX*,
                   const floatX*, bool, int, int, int, int);
    dim3 grid;
    size_t shared_bytes;
    int split;
};

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
DecodeMatvecLaunch<Out, W> decode_matvec_batch(bool norm, int B, int K, int OC, int block_size) {
    constexpr bool head = sizeof(Out) != sizeof(floatX); // always has a layernorm
    int num_warps = block_size / 32, split = decode_matvec_split(rows, K, OC, num_warps);
    int most = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 256 / block_size;
    int blocks = min(ceil_div(OC, num_warps / split * rows), most);
    size_t shared_bytes = norm ? (size_t)batch * K * sizeof(floatX) : 0;
    auto kernel = decode_matvec_kernel6<Out, W, batch, rows, true>;
    if constexpr (!head) { kernel = norm ? kernel : decode_matvec_kernel6<Out, W, batch, rows, false>; }
    require(norm || !head);
    return {kernel, dim3(ceil_div(B, batch), blocks), shared_bytes, split};
}

template <class Out, class W>
DecodeMatvecLaunch<Out, W> decode_matvec_launch6(bool norm, int B, int K, int OC, int block_size) {
    const size_t shared_limit = 40 * 1024; // of the 48 KB that a launch may use without cudaFuncSetAttribute
    require(B > 0 && K > 0 && K % x128::size == 0 && OC > 0);
    require(!norm || K * sizeof(floatX) <= shared_limit);
    // at most 256 threads, because `partial` has 8 rows, one per warp
    require(block_size >= 32 && block_size <= 256 && (block_size & (block_size - 1)) == 0);

    int batch = 1; // sequences per block
    while (batch < min(B, 8) && (!norm || 2 * batch * K * sizeof(floatX) <= shared_limit)) { batch *= 2; }
    // From 4 sequences on a warp multiplies two rows of the weight at once, which share the loads and conversions of x.
    // So it does with 8 bits if it has several rows, to have as many bytes in flight as with one row of 16 bits.
    auto launch = batch == 8   ? decode_matvec_batch<Out, W, 8, 2>
                  : batch == 4 ? decode_matvec_batch<Out, W, 4, 2>
                  : batch == 2 ? decode_matvec_batch<Out, W, 2, 1>
                               : decode_matvec_batch<Out, W, 1, 1>;
    if constexpr (sizeof(W) < sizeof(floatX)) {
        int groups = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 8 /
                     decode_matvec_split(1, K, OC, block_size / 32);
        if (batch <= 2 && OC > groups) {
            launch = batch == 2 ? decode_matvec_batch<Out, W, 2, 2> : decode_matvec_batch<Out, W, 1, 2>;
        }
    }
    return launch(norm, B, K, OC, block_size);
}

template <class Out> void decode_matvec_run(Out* out, const floatX* x, const floatX* norm_weight,
                                            const floatX* norm_bias, const WeightMatrix& weight, const floatX* bias,
                                            const floatX* residual, bool gelu, int B, int K, int OC,
                                            cudaStream_t stream, int block_size) {
    require((norm_weight != NULL) == (norm_bias != NULL));
    weight_dispatch(weight, [&](auto type) {
        typedef decltype(type) W;
        DecodeMatvecLaunch<Out, W> l = decode_matvec_launch6<Out, W>(norm_weight != NULL, B, K, OC, block_size);
        launch_early(l.kernel, l.grid, block_size, l.shared_bytes, stream, out, x, norm_weight, norm_bias,
                     (const W*)weight.values, weight.scales, bias, residual, gelu, B, K, OC, l.split);
    });
}

// out (B,OC) = gelu?(layernorm?(x) weight^T + bias) + residual | x (B,K) | norm_weight, norm_bias (K) or NULL
// | weight (OC,K) | bias (OC) or NULL | residual (B,OC) or NULL, may be out itself
// Weights, their scales and biases are read while the previous kernel in the stream may still run, so no kernel of the
// step may write them.
void decode_matvec(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, cudaStream_t stream, int block_size) {
    double others = (double)B * (K + (residual ? 2.0 : 1.0) * OC) * sizeof(floatX);
    Op op(stream, weight.bytes(OC, K) + others, 2.0 * B * OC * K, "decode_matvec %d -> %d", K, OC);
    decode_matvec_run(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, stream, block_size);
}
void decode_matvec(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, cudaStream_t stream) {
    decode_matvec(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, stream, 256);
}

// logits (B,Vp) float = layernorm(x) wte^T | x (B,C) | norm_weight, norm_bias (C) | wte (Vp,C)
void decode_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                 const WeightMatrix& wte, int B, int C, int Vp, cudaStream_t stream, int block_size) {
    double others = (double)B * C * sizeof(floatX) + (double)B * Vp * sizeof(float);
    Op op(stream, wte.bytes(Vp, C) + others, 2.0 * B * Vp * C, "decode_matvec %d -> %d, head", C, Vp);
    require(norm_weight != NULL);
    decode_matvec_run<float>(logits, x, norm_weight, norm_bias, wte, NULL, NULL, false, B, C, Vp, stream, block_size);
}
void decode_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                 const WeightMatrix& wte, int B, int C, int Vp, cudaStream_t stream) {
    decode_head(logits, x, norm_weight, norm_bias, wte, B, C, Vp, stream, 256);
}
// ==== end promoted: decode_matvec ====

#ifndef PROMOTED_ONLY // another op that includes this file uses its promoted kernels only

// ---- kernel 7: weights of 8 bits in kernel 2: one warp per row, one byte per load -----------------------------------

template <class W> __global__ void decode_matvec_kernel7(floatX* out, const floatX* x, const W* weight,
                                                         const float* scales, const floatX* bias,
                                                         const floatX* residual, bool gelu, int K, int OC) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, b = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= OC) { return; }
    float sum = 0.0f;
    for (int k = lane; k < K; k += 32) { sum += (float)x[(size_t)b * K + k] * (float)weight[(size_t)row * K + k]; }
    sum = warp_sum(sum) * scales[row];
    if (lane == 0) { decode_matvec_store(out, sum, bias, residual, gelu, row, b, OC); }
}

// If there is a layernorm, kernel 0 first writes the normalised x to scratch (B,K).
void decode_matvec7(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                    const WeightMatrix& weight, const floatX* bias, const floatX* residual, floatX* scratch, bool gelu,
                    int B, int K, int OC, cudaStream_t stream, int block_size) {
    if (norm_weight) {
        decode_matvec_norm_kernel0<<<B, 32, 0, stream>>>(scratch, x, norm_weight, norm_bias, K);
        cudaCheck(cudaGetLastError());
        x = scratch;
    }
    dim3 grid(ceil_div(OC, block_size / 32), B);
    if (weight.format == WEIGHTS_INT8) {
        decode_matvec_kernel7<int8_t><<<grid, block_size, 0, stream>>>(out, x, (const int8_t*)weight.values,
                                                                       weight.scales, bias, residual, gelu, K, OC);
    } else {
        decode_matvec_kernel7<__nv_fp8_e4m3><<<grid, block_size, 0, stream>>>(
            out, x, (const __nv_fp8_e4m3*)weight.values, weight.scales, bias, residual, gelu, K, OC);
    }
    cudaCheck(cudaGetLastError());
}

#endif

// ==== promoted: decode_embed ====
// Token -1 means that decode_sample found no logit to draw (all were NaN or -inf); its embedding is NaN.
__global__ void decode_embed_kernel1(floatX* x, const int* tokens, const int* positions, const floatX* wte,
                                     const floatX* wpe, int C) {
    grid_launch_dependents(); // the next kernel may start and load its weights
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * x128::size, b = blockIdx.y;
    if (c >= C) { return; }
    int token = tokens[b];
    int position = max(positions[b], 0); // -1: the text has ended, and nothing reads its x
    x128 t = load128(wte + (size_t)max(token, 0) * C + c), p = load128(wpe + (size_t)position * C + c), sum;
    for (int e = 0; e < x128::size; e++) { sum[e] = (floatX)(token < 0 ? NAN : (float)t[e] + (float)p[e]); }
    store128(x + (size_t)b * C + c, sum);
}

// x (B,C) = wte[token] + wpe[position] | tokens (B) | positions (B) | wte (Vp,C) | wpe (T,C)
// The first kernel of a step. It is launched without overlap: when it starts, the previous step has ended. The other
// kernels of the step rely on that.
void decode_embed(floatX* x, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe, int B,
                  int C, cudaStream_t stream, int block_size) {
    Op op(stream, 3.0 * B * C * sizeof(floatX), 0, "decode_embed");
    require(B > 0 && B <= 65535 && C % x128::size == 0);
    dim3 grid(ceil_div(C / x128::size, block_size), B);
    decode_embed_kernel1<<<grid, block_size, 0, stream>>>(x, tokens, positions, wte, wpe, C);
    cudaCheck(cudaGetLastError());
}
void decode_embed(floatX* x, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe, int B,
                  int C, cudaStream_t stream) {
    decode_embed(x, tokens, positions, wte, wpe, B, C, stream, 128);
}
// ==== end promoted: decode_embed ====

// ==== promoted: quantize_weights ====
// One warp per row. The maximum is taken of the bits of |weight|, in whose order infinity and NaN are above all
// numbers.
template <class W>
__global__ void quantize_weights_kernel1(W* values, float* scales, floatX* weight, size_t num_rows, int K) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (row >= num_rows) { return; }
    uint32_t bits = 0;
    for (int k = lane; k < K; k += 32) { bits = max(bits, __float_as_uint((float)weight[row * K + k]) & 0x7FFFFFFFu); }
    for (int offset = 16; offset > 0; offset /= 2) { bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, offset)); }
    // a row without a weight of 2^-100 or more is a row of zeros; divisions are IEEE's, also with --use_fast_math
    float largest = __uint_as_float(bits), scale = 1.0f;
    if (!(largest < 0x1p-100f)) { scale = __fdiv_rn(largest, weight_largest(W())); }
    if (lane == 0) { scales[row] = scale; }
    for (int k = lane; k < K; k += 32) {
        size_t i = row * K + k;
        W value = weight_rounded(__fdiv_rn((float)weight[i], scale), W());
        values[i] = value;
        weight[i] = (floatX)((float)value * scale);
    }
}

// values (num_rows,K) of the format, scales (num_rows) | weight (num_rows,K) inout: rounded to values * scales. A row
// with NaN or infinity has a scale of NaN or infinity, and becomes NaN.
void quantize_weights(void* values, float* scales, floatX* weight, WeightFormat format, size_t num_rows, int K,
                      cudaStream_t stream, int block_size) {
    double bytes = (double)num_rows * K * (2 * sizeof(floatX) + 1) + (double)num_rows * sizeof(float);
    Op op(stream, bytes, 0, "quantize_weights");
    require(format != WEIGHTS_FULL && block_size % 32 == 0);
    size_t blocks = ceil_div(num_rows, (size_t)block_size / 32);
    if (format == WEIGHTS_INT8) {
        quantize_weights_kernel1<int8_t>
            <<<(unsigned)blocks, block_size, 0, stream>>>((int8_t*)values, scales, weight, num_rows, K);
    } else {
        quantize_weights_kernel1<__nv_fp8_e4m3>
            <<<(unsigned)blocks, block_size, 0, stream>>>((__nv_fp8_e4m3*)values, scales, weight, num_rows, K);
    }
    cudaCheck(cudaGetLastError());
}
void quantize_weights(void* values, float* scales, floatX* weight, WeightFormat format, size_t num_rows, int K,
                      cudaStream_t stream) {
    quantize_weights(values, scales, weight, format, num_rows, K, stream, 256);
}
// ==== end promoted: quantize_weights ====

#ifndef PROMOTED_ONLY // another op that includes this file uses its promoted kernels only

// quantize_weights has no benchmark of its own. With small shapes (K <= 128) of the kinds in 8 bits, each launch of a
// kernel first runs it, and the check covers its outputs.
static std::function<void()> declare_quantize(Bench& b, WeightFormat format) {
    int rows = 37, K = b.T * b.C;
    if (K > 128) {
        return [] {};
    }
    size_t n = (size_t)rows * K;
    cudaStream_t stream = b.stream;
    Buffer<floatX> plain = b.input_from<floatX>("plain", n, [=, seed = b.next_seed()](float* host) {
        bench_fill_normal(host, n, seed, 0.02f, 0.0f);
        for (int k = 0; k < K; k++) { host[k] = 0.0f, host[K + k] *= 1e-25f, host[2 * K + k] *= 1e-35f; }
        host[3 * K + K / 2] = 1e4f;
    });
    Buffer<floatX> rounded = b.inout<floatX>("rounded", n, plain, {0, 0});
    Buffer<float> scales = b.output<float>("new_scales", rows, {0, 0});
    Buffer<int8_t> ints = {nullptr, nullptr};
    Buffer<__nv_fp8_e4m3> floats = {nullptr, nullptr};
    if (format == WEIGHTS_INT8) { ints = b.output<int8_t>("new_values", n, {0, 0}); }
    if (format == WEIGHTS_FP8) { floats = b.output<__nv_fp8_e4m3>("new_values", n, {0, 0}); }
    float* host = format == WEIGHTS_INT8 ? ints.host : floats.host;
    b.reference([=] {
        quantize_weights_cpu(host, scales.host, rounded.host, plain.host, format == WEIGHTS_INT8, rows, K);
        for (size_t i = 0; i < n; i++) { rounded.host[i] = (float)(floatX)rounded.host[i]; }
    });
    void* values = format == WEIGHTS_INT8 ? (void*)ints.dev : floats.dev;
    return [=] { quantize_weights(values, scales, rounded, format, rows, K, stream); };
}

// decode_embed has no benchmark of its own. With small shapes (C <= 128) each launch of a kernel below first runs
// decode_embed, and the check covers its output too.
static std::function<void()> declare_embed(Bench& b) {
    if (b.C > 128) {
        return [] {};
    }
    int B = b.B, C = b.C, V = 1000, T = 16;
    cudaStream_t stream = b.stream;
    Buffer<int> tokens = b.input_ids("tokens", B, V);
    Buffer<int> positions = b.input_from<int>("positions", B, [=](float* p) {
        for (int i = 0; i < B; i++) { p[i] = (float)(i * 7 % (T + 1) - 1); } // -1: as position 0
    });
    Buffer<floatX> wte = b.input<floatX>("wte", (size_t)V * C), wpe = b.input<floatX>("wpe", (size_t)T * C);
    Buffer<floatX> embedded = b.output<floatX>("embedded", (size_t)B * C, ulps<floatX>(1));
    b.reference([=] { decode_embed_cpu(embedded.host, tokens.host, positions.host, wte.host, wpe.host, B, C); });
    return [=] { decode_embed(embedded, tokens, positions, wte, wpe, B, C, stream); };
}

static void declare(Bench& b) {
    b.varies("BTCV");
    int B = b.B, K = b.T * b.C, OC = b.V;
    int kind = b.kinds(decode_kinds());
    WeightFormat format = (WeightFormat)(kind / 3);
    bool head = kind % 3 == 2, norm = kind % 3 != 1, gelu = kind % 3 == 0, full = format == WEIGHTS_FULL;
    cudaStream_t stream = b.stream;
    // with a layernorm, x has a large mean, which must be subtracted before anything is squared
    bool cancelling = b.cases({"normal", "large terms that cancel"}) == 1, exact = cancelling && !norm;
    Buffer<floatX> x = b.input_from<floatX>("x", (size_t)B * K, [=, seed = b.next_seed()](float* host) {
        bench_fill_normal(host, (size_t)B * K, seed, 1.0f, cancelling ? 30.0f : 0.1f);
        if (exact) { bench_fill_exact_large(host, (size_t)B * K, seed), bench_negate_halves(host, B, K); }
    });
    DecodeWeight w = declare_weight(b, format, exact, OC, K);
    WeightMatrix weight = w.matrix;
    Buffer<floatX> norm_weight = {nullptr, nullptr}, norm_bias = norm_weight, bias = norm_weight,
                   residual = norm_weight;
    if (norm) {
        norm_weight = b.input<floatX>("norm_weight", K, 0.1f, 1.0f);
        norm_bias = b.input<floatX>("norm_bias", K, 0.1f);
    }
    if (!head) { bias = b.input<floatX>("bias", OC); }
    if (!norm) { residual = b.input<floatX>("residual", (size_t)B * OC); }
    // bytes of out, and of residual if there is one
    double outputs = (double)B * OC * (head ? sizeof(float) : (norm ? 1 : 2) * sizeof(floatX));
    b.cost(weight.bytes(OC, K) + (double)B * K * sizeof(floatX) + outputs, 2.0 * B * OC * K);
    b.reads_only();
    std::function<void()> quantize = full ? [] {} : declare_quantize(b, format);

    float ulp = ulp_of<floatX>(), of_terms = (norm ? 2.0f * ulp : 0.0f) + 1e-5f;
    std::function<void(int)> launch5, launch6, launch7;
    if (head) {
        Buffer<float> logits = b.output<float>("logits", (size_t)B * OC, {of_terms, 1e-5f});
        b.reference([=] {
            decode_matvec_cpu(logits.host, x.host, norm_weight.host, norm_bias.host, w.host().data(), NULL, NULL, false,
                              B, K, OC);
        });
        launch5 = [=](int bs) {
            quantize();
            decode_matvec5<float>(logits, x, norm_weight, norm_bias, weight, NULL, NULL, false, B, K, OC, stream, bs);
        };
        launch6 = [=](int bs) {
            quantize();
            bs ? decode_head(logits, x, norm_weight, norm_bias, weight, B, K, OC, stream, bs)
               : decode_head(logits, x, norm_weight, norm_bias, weight, B, K, OC, stream);
        };
    } else {
        std::function<void()> embed = full ? declare_embed(b) : quantize;
        Buffer<floatX> scratch = b.scratch<floatX>("scratch", (size_t)B * K);
        Buffer<floatX> out = b.output<floatX>("out", (size_t)B * OC, {of_terms, ulp + 1e-5f});
        b.reference([=] {
            decode_matvec_cpu(out.host, x.host, norm_weight.host, norm_bias.host, w.host().data(), bias.host,
                              residual.host, gelu, B, K, OC);
        });
        auto launch1234 = [=](DecodeMatvecKernel kernel, int rows_per_block, int bs) {
            embed();
            decode_matvec1234(kernel, ceil_div(OC, rows_per_block), out, x, norm_weight, norm_bias,
                              (const floatX*)weight.values, bias, residual, scratch, gelu, B, K, OC, stream, bs);
        };
        launch5 = [=](int bs) {
            embed();
            decode_matvec5<floatX>(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, stream, bs);
        };
        launch6 = [=](int bs) {
            embed();
            bs ? decode_matvec(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, stream, bs)
               : decode_matvec(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, stream);
        };
        if (full) {
            b.kernel(1, "one thread per row of the weight", [=](int bs) { launch1234(decode_matvec_kernel1, bs, bs); });
            b.kernel(2, "one warp per row of the weight",
                     [=](int bs) { launch1234(decode_matvec_kernel2, bs / 32, bs); });
            b.kernel(3, "one warp per row, 16-byte loads",
                     [=](int bs) { launch1234(decode_matvec_kernel3, bs / 32, bs); });
            b.kernel(4, "one block per row", [=](int bs) { launch1234(decode_matvec_kernel4, 1, bs); },
                     {32, 64, 128, 256});
        }
        launch7 = [=](int bs) {
            quantize();
            decode_matvec7(out, x, norm_weight, norm_bias, weight, bias, residual, scratch, gelu, B, K, OC, stream, bs);
        };
    }
    const char* what5 = head ? "every block computes the layernorm, float out" : "every block computes the layernorm";
    int arch = format == WEIGHTS_FP8 ? 89 : 0; // e4m3 in hardware
    b.kernel(5, what5, launch5, {64, 128, 256}, arch);
    b.kernel(6, "5, weights loaded while the previous kernel still runs", launch6, {0, 64, 128, 256}, arch);
    if (!full && !head) {
        b.kernel(7, "2 with weights of 8 bits, converted one by one", launch7, {64, 128, 256, 512, 1024}, arch);
    }
    b.promoted(6);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "decode_matvec", declare, {1, 1, 768, 12, 3072},
                      {{1, 1, 8, 1, 1},
                       {2, 1, 128, 1, 77},
                       {5, 1, 776, 1, 33},
                       with_kind(1, {13, 3, 64, 1, 129}),
                       with_kind(1, {1, 4, 768, 1, 768}),
                       {3, 1, 1600, 1, 65},
                       with_kind(1, {9, 4, 1600, 1, 50}),
                       with_kind(2, {1, 1, 64, 1, 32769}),
                       with_kind(2, {7, 1, 64, 1, 50257}),
                       with_kind(3, {1, 1, 8, 1, 1}),
                       with_kind(3, {5, 1, 776, 1, 33}),
                       with_kind(4, {13, 3, 64, 1, 129}),
                       with_kind(4, {1, 4, 768, 1, 768}),
                       with_kind(3, {2, 1, 128, 1, 201}),
                       with_kind(4, {2, 4, 776, 1, 1301}),
                       with_kind(5, {1, 1, 64, 1, 32769}),
                       with_kind(6, {1, 1, 128, 1, 201}),
                       with_kind(7, {1, 4, 776, 1, 1301}),
                       with_kind(6, {2, 1, 128, 1, 77}),
                       with_kind(6, {3, 1, 1600, 1, 65}),
                       with_kind(7, {4, 3, 40, 1, 50}),
                       with_kind(7, {1, 4, 768, 1, 768}),
                       with_kind(8, {7, 1, 64, 1, 8257})});
}
#endif
