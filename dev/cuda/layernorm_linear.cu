/* layernorm_linear: out = layernorm(inp) linear_weight^T + linear_bias, as GPT-2 does before attention: OC = 3C

   out (N,OC) floatX out | inp (N,C) floatX in | weight, bias (C) floatX in, of the layernorm | linear_weight (OC,C),
   linear_bias (OC) floatX in; N = B*T
   Bound: compute, 2*N*C*OC FLOPs. Constraint: C % 8 == 0, OC % 8 == 0.
   Error: one ulp of floatX against the fp64 reference, and 1.5 ulps of 1 for the operands. They are rounded to floatX
   before the product (kernels 1 to 4: the normalised rows; 5 to 9: weight times linear_weight), and these roundings of
   C terms of size 1/sqrt(C) add up like noise. In fp32, 8 ulps, and 32 roundings at the size of the terms' absolute
   sum, which is 0.64 * sqrt(C) here.

   Kernels 5 to 9 subtract the mean after the product. If |mean| is q times the standard deviation, they subtract a
   value q times larger than the result, so fp32 roundings count q times. In a model of the tensor cores that truncates
   every sum of 16 products to fp32, the error at C = 768 is 4e-6 * q: less than half an ulp of 1 up to q = 1000 in
   bf16, 120 in fp16. Beyond that it grows with q. Rounding the weights does not add to this error, because the mean is
   multiplied by sums of the rounded weights. The variance has no such limit: it is summed around the row's first
   element, and (first - mean)^2 <= C * variance.

   Case 1 has hard rows: all elements equal (rstd is 316, so roundings count 316 times); q = 30; one element of 1000.
   Tuned: forms of kernels 6 to 9. Kernels 4 and 5 have one block per SM with all of its shared memory.
   Source: Ba et al. 2016, arXiv:1607.06450; mean and rstd applied after the product: Dao-AILab/quack; wgmma and TMA:
   the PTX ISA; the product of kernels 6 to 9: gemm.cuh.

   Kernels (this list is written by versions.sh):
     1  layernorm, then matmul_forward
     2  one launch: 32x32 tiles, statistics by each block (slower than 1)
     3  2 with statistics by a small kernel
     4  wgmma with normalised rows from registers (slower than 1)
     5  weights scaled, then wgmma on raw rows, overlapped with their statistics (slower than 1)
     6  statistics and weights, then gemm.cuh
     7  6 with weights prepared in advance
     8  weights, then ping-pong: the idle consumer computes statistics (best)
     9  8 with weights prepared in advance

   nvcc -O3 --use_fast_math layernorm_linear.cu -lcublasLt -o layernorm_linear      (or: make layernorm_linear)
   ./layernorm_linear 8      check kernel 8 against the CPU and time forms of gemm.cuh
   ./layernorm_linear        every kernel, side by side                                         */
#include "bench.h"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "layernorm_forward.cuh"
#include "matmul_forward.cuh"

#include "linear_sm90.cuh"

struct LayernormLinearArgs {
    floatX* out;                               // (N,OC)
    const floatX* inp;                         // (N,C)
    const floatX *weight, *bias;               // (C), parameters of the layernorm
    const floatX *linear_weight, *linear_bias; // (OC,C), (OC)
    int N, C, OC;
};

// ---- kernel 1: two launches: layernorm, then matmul_forward ----

// normed (N,C), mean, rstd (N) are scratch
void layernorm_linear1(const LayernormLinearArgs& l, floatX* normed, float* mean, float* rstd, cudaStream_t stream) {
    layernorm_forward(normed, mean, rstd, l.inp, l.weight, l.bias, l.N, l.C, NORM_EPSILON, stream);
    matmul_forward(l.out, NULL, normed, l.linear_weight, l.linear_bias, NULL, l.N, l.C, l.OC, stream);
}

// ---- kernel 2: 32x32 tiles in shared memory; a block computes the statistics of its rows first ----

__global__ void __launch_bounds__(1024)
    layernorm_linear_kernel2(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias,
                             const floatX* linear_weight, const floatX* linear_bias, int N, int C, int OC) {
    __shared__ float a[32][33], b[32][33]; // 33: a column is spread over 32 banks
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    int columns = ceil_div(OC, 32), n0 = blockIdx.x / columns * 32, o0 = blockIdx.x % columns * 32;
    const floatX* row = inp + (size_t)min(n0 + y, N - 1) * C; // the row of warp y
    float sum = 0.0f, squares = 0.0f;
    for (int c = x; c < C; c += 32) { sum += (float)row[c]; }
    float mean = warp_sum(sum) / C;
    for (int c = x; c < C; c += 32) { squares += ((float)row[c] - mean) * ((float)row[c] - mean); }
    float rstd = rsqrtf(warp_sum(squares) / C + NORM_EPSILON);
    sum = 0.0f;
    for (int c0 = 0; c0 < C; c0 += 32) {
        int c = c0 + x;
        a[y][x] = c < C ? ((float)row[c] - mean) * rstd * (float)weight[c] + (float)bias[c] : 0.0f;
        b[y][x] = c < C && o0 + y < OC ? (float)linear_weight[(size_t)(o0 + y) * C + c] : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += a[y][k] * b[x][k]; }
        __syncthreads();
    }
    if (n0 + y < N && o0 + x < OC) { out[(size_t)(n0 + y) * OC + o0 + x] = (floatX)(sum + (float)linear_bias[o0 + x]); }
}

void layernorm_linear2(const LayernormLinearArgs& l, cudaStream_t stream) {
    size_t num_blocks = ceil_div((size_t)l.N, (size_t)32) * ceil_div(l.OC, 32);
    require(num_blocks <= INT_MAX);
    layernorm_linear_kernel2<<<(unsigned)num_blocks, 1024, 0, stream>>>(l.out, l.inp, l.weight, l.bias, l.linear_weight,
                                                                        l.linear_bias, l.N, l.C, l.OC);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32)

// ---- kernel 3: kernel 2 with statistics by a small kernel: once per row, not once per tile of 32 columns ----

// One warp computes {mean, rstd} of `rows` rows from `row` on; all lanes get them. Past N the last row is repeated.
template <int rows> __device__ inline void layernorm_linear_statistics(float2 (&statistics)[rows], const floatX* inp,
                                                                       int row, int N, int C) {
    int lane = threadIdx.x % 32;
    const floatX* x[rows];
    float shift[rows], sum[rows], squares[rows]; // sums of x - shift; shift: the row's first element
#pragma unroll
    for (int r = 0; r < rows; r++) {
        x[r] = inp + (size_t)min(row + r, N - 1) * C;
        shift[r] = (float)x[r][0], sum[r] = squares[r] = 0.0f;
    }
#pragma unroll 1
    for (int c = lane * 8; c < C; c += 768) {
        x128 v[3][rows]; // loaded without branches, so that many loads are in flight
#pragma unroll
        for (int j = 0; j < 3; j++) {
#pragma unroll
            for (int r = 0; r < rows; r++) { v[j][r] = load128(x[r] + min(c + 256 * j, C - 8)); }
        }
#pragma unroll
        for (int j = 0; j < 3; j++) {
            float inside = c + 256 * j < C ? 1.0f : 0.0f;
#pragma unroll
            for (int r = 0; r < rows; r++) {
                for (int k = 0; k < 8; k++) {
                    float d = (float)v[j][r][k] * inside - shift[r] * inside;
                    sum[r] += d, squares[r] += d * d;
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < rows; r++) {
        float mean = warp_sum(sum[r]) / C, variance = fmaxf(warp_sum(squares[r]) / C - mean * mean, 0.0f);
        statistics[r] = make_float2(mean + shift[r], rsqrtf(variance + NORM_EPSILON));
    }
}

// The layernorm's parameters folded into the linear layer: out = rstd * (inp scaled^T - mean * u) + v, where
// scaled = weight * linear_weight, u = the sum of a row of scaled, and v = linear_bias + the sum of
// bias * linear_weight.
struct LayernormLinearWeights {
    floatX* scaled; // (OC,C)
    float2* sums;   // (OC): u, v
};
__device__ inline void layernorm_linear_scale(const LayernormLinearWeights& w, const LayernormLinearArgs& l, int row) {
    float u = 0.0f, v = 0.0f;
#pragma unroll 3
    for (int c = threadIdx.x % 32 * 8; c < l.C; c += 256) {
        size_t i = (size_t)row * l.C + c;
        x128 linear = load128(l.linear_weight + i), weight = load128(l.weight + c), bias = load128(l.bias + c), scaled;
        for (int k = 0; k < 8; k++) {
            scaled[k] = (floatX)((float)weight[k] * (float)linear[k]);
            u += (float)scaled[k]; // the rounded value, which the product uses, so that the mean cancels
            v += (float)bias[k] * (float)linear[k];
        }
        store128(w.scaled + i, scaled);
    }
    u = warp_sum(u), v = warp_sum(v);
    if (threadIdx.x % 32 == 0) { w.sums[row] = make_float2(u, v + (float)l.linear_bias[row]); }
}

// One warp per row: num_scaled rows of the weight, then num_rows rows of inp.
__global__ void __launch_bounds__(256)
    layernorm_linear_begin_kernel3(float* mean, float* rstd, const LayernormLinearWeights w,
                                   const LayernormLinearArgs l, int num_scaled, int num_rows) {
    grid_launch_dependents();
    int row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row < num_scaled) {
        layernorm_linear_scale(w, l, row);
    } else if (row - num_scaled < num_rows) {
        row -= num_scaled;
        float2 statistics[1];
        layernorm_linear_statistics(statistics, l.inp, row, l.N, l.C);
        if (threadIdx.x % 32 == 0) { mean[row] = statistics[0].x, rstd[row] = statistics[0].y; }
    }
}

// Computes mean, rstd (N) of inp unless mean is NULL, and prepares the weights unless w.scaled is NULL.
void layernorm_linear_begin(float* mean, float* rstd, const LayernormLinearWeights& w, const LayernormLinearArgs& l,
                            cudaStream_t stream) {
    require(l.N >= 1 && l.OC >= 1 && l.C % 8 == 0 && l.N <= INT_MAX / 2 && l.OC <= INT_MAX / 2 - 8);
    int num_scaled = w.scaled ? l.OC : 0, num_rows = mean ? l.N : 0;
    layernorm_linear_begin_kernel3<<<ceil_div(num_scaled + num_rows, 8), 256, 0, stream>>>(mean, rstd, w, l, num_scaled,
                                                                                           num_rows);
    cudaCheck(cudaGetLastError());
}

__global__ void __launch_bounds__(1024)
    layernorm_linear_kernel3(const LayernormLinearArgs l, const float* means, const float* rstds) {
    __shared__ float a[32][33], b[32][33]; // 33: a column is spread over 32 banks
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    int columns = ceil_div(l.OC, 32), n0 = blockIdx.x / columns * 32, o0 = blockIdx.x % columns * 32;
    int n = min(n0 + y, l.N - 1); // the row of warp y
    const floatX* row = l.inp + (size_t)n * l.C;
    float mean = means[n], rstd = rstds[n], sum = 0.0f;
    for (int c0 = 0; c0 < l.C; c0 += 32) {
        int c = c0 + x;
        a[y][x] = c < l.C ? ((float)row[c] - mean) * rstd * (float)l.weight[c] + (float)l.bias[c] : 0.0f;
        b[y][x] = c < l.C && o0 + y < l.OC ? (float)l.linear_weight[(size_t)(o0 + y) * l.C + c] : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += a[y][k] * b[x][k]; }
        __syncthreads();
    }
    if (n0 + y < l.N && o0 + x < l.OC) {
        l.out[(size_t)(n0 + y) * l.OC + o0 + x] = (floatX)(sum + (float)l.linear_bias[o0 + x]);
    }
}

// mean, rstd (N) are scratch
void layernorm_linear3(const LayernormLinearArgs& l, float* mean, float* rstd, cudaStream_t stream) {
    layernorm_linear_begin(mean, rstd, {}, l, stream);
    size_t num_blocks = ceil_div((size_t)l.N, (size_t)32) * ceil_div(l.OC, 32);
    require(num_blocks <= INT_MAX);
    layernorm_linear_kernel3<<<(unsigned)num_blocks, 1024, 0, stream>>>(l, mean, rstd);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: wgmma, which takes the normalised rows from registers ----

// Op of linear_sm90_kernel that normalises inp in registers before the product.
struct LayernormLinearNormalise {
    static constexpr bool changed = true, neighbours = false;
    typedef uint32_t Columns;                  // linear_bias of two neighbouring columns
    const float *mean, *rstd;                  // (N)
    const floatX *weight, *bias, *linear_bias; // (C), (C), (OC)
    int C, OC;
    float r[2], offset[2]; // rstd and -mean * rstd of rows lane / 4 and lane / 4 + 8

    __device__ void begin(int row0, const LinearTiles& tiles) {
        for (int h = 0; h < 2; h++) {
            int row = row0 + threadIdx.x % 32 / 4 + 8 * h;
            r[h] = row < tiles.N ? rstd[row] : 0.0f;
            offset[h] = row < tiles.N ? -mean[row] * r[h] : 0.0f;
        }
    }
    // a[0], a[1]: rows lane / 4 and lane / 4 + 8, at `column` and column + 1; a[2], a[3]: the same rows 8 columns on
    __device__ void change(uint32_t* a, int column) const {
        for (int j = 0; j < 2; j++, column += 8) {
            bool inside = column < C; // beyond C the weight is 0, but the operand must not be NaN
            float2 w = unpack_16x2(inside ? *reinterpret_cast<const uint32_t*>(weight + column) : 0, floatX());
            float2 b = unpack_16x2(inside ? *reinterpret_cast<const uint32_t*>(bias + column) : 0, floatX());
            for (int h = 0; h < 2; h++) {
                float2 x = unpack_16x2(a[2 * j + h], floatX());
                float low = (x.x * r[h] + offset[h]) * w.x + b.x, high = (x.y * r[h] + offset[h]) * w.y + b.y;
                a[2 * j + h] = pack_16x2(low, high, floatX());
            }
        }
    }
    __device__ void end(const LinearTiles&) {}
    __device__ Columns columns(int column) const {
        return column < OC ? *reinterpret_cast<const Columns*>(linear_bias + column) : 0;
    }
    __device__ void finish(float* y, Columns bits) const {
        float2 b = unpack_16x2(bits, floatX());
        y[0] += b.x, y[1] += b.y, y[2] += b.x, y[3] += b.y;
    }
};

// mean, rstd (N) are scratch
void layernorm_linear4(const LayernormLinearArgs& l, float* mean, float* rstd, cudaStream_t stream) {
    layernorm_linear_begin(mean, rstd, {}, l, stream);
    LayernormLinearNormalise op = {mean, rstd, l.weight, l.bias, l.linear_bias, l.C, l.OC, {}, {}};
    linear_launch(op, l.out, l.inp, l.linear_weight, l.N, l.C, l.OC, true, stream);
}

// ---- kernel 5: multiplies inp unnormalised; the epilogue applies mean and rstd, summed during the products ----

// Op of linear_sm90_kernel: out = rstd * (sum - mean * u) + v, where sum is the product of raw inp and scaled weights.
struct LayernormLinearDeferred {
    static constexpr bool changed = false, neighbours = true; // consecutive tiles share rows and their statistics
    typedef float4 Columns;                                   // u, v of two neighbouring columns
    const float2* sums;                                       // (OC): u, v
    int C, OC;
    int row0 = -1; // m and r belong to this row and the next 15
    bool new_rows = false;
    float shift, sum, squares; // sums of x - shift over half of row lane / 2; shift: the row's first element
    float m[2], r[2];          // mean and rstd of rows lane / 4 and lane / 4 + 8

    __device__ void begin(int first_row, const LinearTiles&) {
        new_rows = first_row != row0;
        row0 = first_row;
        sum = squares = 0.0f;
    }
    // inp: this warpgroup's 64 rows in shared memory, 64 columns from `column` on
    __device__ void look(const floatX* inp, int column) {
        if (!new_rows) { return; }
        // two lanes per row: the even lane reads chunks 0 to 3 of the row's 8 chunks, the odd lane chunks 4 to 7
        int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 2, first = lane % 2 * 4;
        const char* tile = reinterpret_cast<const char*>(inp);
        if (column == 0) { shift = (float)*reinterpret_cast<const floatX*>(tile + linear_swizzle(row, 0)); }
        x128 x[4];
        float part = 0.0f, part_squares = 0.0f; // summing in two levels has smaller rounding errors
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[j] = load128(reinterpret_cast<const floatX*>(tile + linear_swizzle(row, first + j)));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (column + (first + j) * 8 >= C) { break; } // zeros that TMA filled in
            for (int k = 0; k < 8; k++) {
                float d = (float)x[j][k] - shift;
                part += d, part_squares += d * d;
            }
        }
        sum += part, squares += part_squares;
    }
    __device__ void end(const LinearTiles&) {
        if (!new_rows) { return; }
        int lane = threadIdx.x % 32;
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        squares += __shfl_xor_sync(0xFFFFFFFFu, squares, 1);
        float mean = sum / C, rstd = rsqrtf(fmaxf(squares / C - mean * mean, 0.0f) + NORM_EPSILON);
        mean += shift;
        for (int h = 0; h < 2; h++) {
            m[h] = __shfl_sync(0xFFFFFFFFu, mean, lane / 4 * 2 + 16 * h);
            r[h] = __shfl_sync(0xFFFFFFFFu, rstd, lane / 4 * 2 + 16 * h);
        }
    }
    __device__ Columns columns(int column) const {
        return column < OC ? *reinterpret_cast<const Columns*>(sums + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    __device__ void finish(float* y, const Columns& s) const {
        for (int h = 0; h < 2; h++) {
            y[2 * h] = (y[2 * h] - m[h] * s.x) * r[h] + s.y;
            y[2 * h + 1] = (y[2 * h + 1] - m[h] * s.z) * r[h] + s.w;
        }
    }
};

// w is scratch
void layernorm_linear5(const LayernormLinearArgs& l, const LayernormLinearWeights& w, cudaStream_t stream) {
    layernorm_linear_begin(NULL, NULL, w, l, stream);
    LayernormLinearDeferred op = {};
    op.sums = w.sums, op.C = l.C, op.OC = l.OC, op.row0 = -1;
    linear_launch(op, l.out, l.inp, w.scaled, l.N, l.C, l.OC, true, stream);
}

// ---- kernel 6: one small kernel for statistics and weights, then gemm.cuh, whose epilogue applies mean and rstd ----

// l.out from prepared weights w; mean, rstd (N) are the statistics of inp. form: GEMM_... of gemm.cuh
void layernorm_linear_deferred(const LayernormLinearArgs& l, const float* mean, const float* rstd,
                               const LayernormLinearWeights& w, cudaStream_t stream, int form) {
    GemmArgs g = {l.out, NULL, l.inp, w.scaled, NULL, l.N, l.OC, l.C};
    gemm_form(g, GemmLayernorm<0>{mean, rstd, w.sums}, true, stream, form);
}

// mean, rstd (N), w are scratch
void layernorm_linear6(const LayernormLinearArgs& l, float* mean, float* rstd, const LayernormLinearWeights& w,
                       cudaStream_t stream, int form = GEMM_PING_PONG_192_PAIRS) {
    layernorm_linear_begin(mean, rstd, w, l, stream);
    layernorm_linear_deferred(l, mean, rstd, w, stream, form);
}

// ---- kernel 7: kernel 6 with weights prepared in advance, because they change only once per training step ----

void layernorm_linear7(const LayernormLinearArgs& l, float* mean, float* rstd, const LayernormLinearWeights& w,
                       cudaStream_t stream, int form = GEMM_PING_PONG_192_PAIRS) {
    layernorm_linear_begin(mean, rstd, {}, l, stream);
    layernorm_linear_deferred(l, mean, rstd, w, stream, form);
}

// ---- kernel 8: ping-pong; the consumer that waits for its turn computes the statistics of its rows, from L2 ----
// A cluster takes consecutive tiles. Their rows of inp change only at the end of a row of tiles, so statistics are
// rarely computed. At the start the second consumer has to wait, so it computes the statistics for both
// consumers.

// There are fewer boxes (buffers of TMA stores) than in the forms of gemm.cuh, to make room for the statistics.
typedef GemmTiles<128, 192, true, GemmSingle, 4, 3> LayernormLinearPingPong192;
typedef GemmTiles<128, 192, true, GemmPair, 4, 3> LayernormLinearPingPong192Pairs;
typedef GemmTiles<128, 128, true, GemmPair, 5, 3> LayernormLinearPingPong128Pairs;

template <class G> struct LayernormLinearSMem {
    GemmSMem<G> gemm;
    float2 statistics[2][128]; // mean and rstd of the rows of each consumer's tile
    uint64_t first;            // barrier: the statistics of the first consumer's first tile are written
};

struct LayernormLinearOwn : GemmLayernorm<0> {
    const float2* statistics; // of the tile's rows, from the warp's first row on

    // A warp owns 16 rows of the tile and the 16 rows that are 64 below them. gemm_store replaces rows past the
    // matrix by the last row, which may belong to another warp. The remainders (%) keep the index within this warp's
    // rows; what is computed for rows past the matrix is not stored.
    __device__ Row row(int row) const {
        float2 s = statistics[row % 16 + row / 64 % 2 * 64];
        return {s.x, s.y};
    }
};

// Computes {mean, rstd} of 32 rows, one per lane: the 16 rows from `row` on, then the 16 rows that are 64 below them.
__device__ inline float2 layernorm_linear_warp_statistics(const floatX* inp, int row, int N, int C) {
    float2 mine = {};
#pragma unroll 1
    for (int first = 0; first < 32; first += 8) {
        float2 statistics[8];
        layernorm_linear_statistics(statistics, inp, row + first / 16 * 64 + first % 16, N, C);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            if (threadIdx.x % 32 == first + r) { mine = statistics[r]; }
        }
    }
    return mine;
}

template <class G> __global__ void __launch_bounds__(384, 1)
    layernorm_linear_sm90_kernel8(const __grid_constant__ CUtensorMap inp_map,
                                  const __grid_constant__ CUtensorMap weight_map,
                                  const __grid_constant__ CUtensorMap out_map, LayernormLinearOwn epilogue,
                                  const floatX* inp, int N, int C, int OC, int num_tiles, int num_each) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(gemm_is_ping_pong<G> && G::ROWS == 128, "a warp has 16 rows, and 16 that are 64 below");
    extern __shared__ __align__(256) unsigned char layernorm_linear_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(layernorm_linear_dynamic);
    LayernormLinearSMem<G>& shared = reinterpret_cast<LayernormLinearSMem<G>&>(smem); // gemm is its first member
    if (threadIdx.x == 0) {
        tma_prefetch_map(&inp_map), tma_prefetch_map(&weight_map), tma_prefetch_map(&out_map);
        mbarrier_init(&shared.first, 128); // each thread arrives after its write
    }
    gemm_init(smem);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // tells the compiler that it is warp-uniform
    int warpgroup = warp / 4, rank = G::CLUSTER > 1 ? cluster_rank() : 0, num_steps = ceil_div(C, 64);
    int num_columns = ceil_div(OC, G::COLUMNS), begin = blockIdx.x / G::CLUSTER * num_each;
    int end = min(begin + num_each, num_tiles);
    auto tile_of = [=](int index) -> GemmTile {
        return {(index / num_columns * G::CLUSTER + rank) * G::ROWS, index % num_columns * G::COLUMNS};
    };
    if (warpgroup == 0) {
        warpgroup_fewer_registers<24>();
        if (threadIdx.x != 0) { return; }
        int i = 0;
#pragma unroll 1
        for (int index = begin; index < end; index++) {
            GemmTile tile = tile_of(index);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++, i++) {
                gemm_load<G>(smem, inp_map, weight_map, tile, step, rank, i);
            }
        }
        return;
    }
    warpgroup_more_registers<240>();
    int lane = threadIdx.x % 32, warp_row = warp % 4 * 16, lane_row = warp_row + lane / 16 * 64 + lane % 16;
    epilogue.statistics = shared.statistics[warpgroup - 1] + warp_row;
    if (warpgroup == 2) {
        float2 mine = layernorm_linear_warp_statistics(inp, tile_of(begin).row + warp_row, N, C);
        shared.statistics[0][lane_row] = shared.statistics[1][lane_row] = mine;
        mbarrier_arrive(&shared.first);
        __syncwarp();
    }
#pragma unroll 1
    for (int index = begin + warpgroup - 1; index < end; index += 2) {
        GemmTile tile = tile_of(index);
        if (tile.row != tile_of(max(index - 2, begin)).row) { // shared.statistics has other rows
            float2 mine = layernorm_linear_warp_statistics(inp, tile.row + warp_row, N, C);
            shared.statistics[warpgroup - 1][lane_row] = mine;
            __syncwarp();
        }
        // without this initialization, which the matmul overwrites, ptxas would keep registers for sum from an earlier point on
        float sum[G::PARTS][G::COLUMNS / 2] = {};
        int number = (index - begin) / 2, i = (index - begin) * num_steps;
        GemmColumns<G, LayernormLinearOwn> columns;
        gemm_load_columns(columns, epilogue, tile.column, OC);
        gemm_multiply<G>(sum, smem, num_steps, number, i);
        if (index == begin) { mbarrier_wait(&shared.first, 0); }
        int box = (index - begin) / 2 * (G::PARTS * G::COLUMNS / 64);
        gemm_store<G>(sum, epilogue, columns, smem, out_map, out_map, out_map,
                      GemmTile{tile.row + warp_row, tile.column}, N, box);
    }
    gemm_end<G>();
#endif
}

template <class G> void layernorm_linear_tiles(const LayernormLinearArgs& l, const LayernormLinearWeights& w,
                                               bool early, cudaStream_t stream) {
    CUtensorMap inp_map = tensor_map(l.inp, {l.C, l.N}, {64, G::ROWS});
    CUtensorMap weight_map = tensor_map(w.scaled, {l.C, l.OC}, {64, G::COLUMNS / G::CLUSTER});
    LayernormLinearOwn epilogue = {};
    epilogue.sums = w.sums;
    int num_tiles = gemm_num_tiles<G>(l.N, l.OC, l.C), num_clusters = num_multiprocessors() / G::CLUSTER;
    int num_each = ceil_div(num_tiles, min(num_tiles, num_clusters)); // tiles per cluster; the last may have fewer
    gemm_start<G, LayernormLinearSMem<G>>(layernorm_linear_sm90_kernel8<G>, ceil_div(num_tiles, num_each), early,
                                          stream, inp_map, weight_map, gemm_box_map(l.out, l.N, l.OC), epilogue, l.inp,
                                          l.N, l.C, l.OC, num_tiles, num_each);
}

// l.out from prepared weights w. If `early` is true, the previous kernel in the stream prepares them, and this launch
// overlaps with that kernel. form: a ping-pong form of gemm.cuh
void layernorm_linear_prepared(const LayernormLinearArgs& l, const LayernormLinearWeights& w, bool early,
                               cudaStream_t stream, int form = GEMM_PING_PONG_192_PAIRS) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(l.N > 0 && l.C > 0 && l.OC > 0 && l.C % 8 == 0 && l.OC % 8 == 0);
    switch (form) {
    case GEMM_PING_PONG_192:
        return layernorm_linear_tiles<LayernormLinearPingPong192>(l, w, early, stream);
    case GEMM_PING_PONG_192_PAIRS:
        return layernorm_linear_tiles<LayernormLinearPingPong192Pairs>(l, w, early, stream);
    case GEMM_PING_PONG_128_PAIRS:
        return layernorm_linear_tiles<LayernormLinearPingPong128Pairs>(l, w, early, stream);
    }
    require(!"a ping-pong form of gemm.cuh");
}

// w is scratch
void layernorm_linear(const LayernormLinearArgs& l, const LayernormLinearWeights& w, cudaStream_t stream,
                      int form = GEMM_PING_PONG_192_PAIRS) {
    layernorm_linear_begin(NULL, NULL, w, l, stream);
    layernorm_linear_prepared(l, w, true, stream, form);
}

// ---- kernel 9: kernel 8 with weights prepared in advance (only layernorm_linear_prepared is launched) ----

#endif

// Normal values. If `hard`, every second row is one of three special kinds, in turn: all elements equal; values far
// from zero; one element much larger than the rest.
static void fill_rows(float* inp, int N, int C, bool hard, std::mt19937& rng) {
    bench_fill_normal(inp, (size_t)N * C, rng(), 1.0f, 0.0f);
    for (int row = 0; row < N && hard; row++) {
        float* x = inp + (size_t)row * C;
        for (int c = 0; c < C; c++) { x[c] = row % 6 == 1 ? 3.0f : row % 6 == 3 ? x[c] + 30.0f : x[c]; }
        if (row % 6 == 5) { x[row % 12 == 5 ? 0 : row % C] = 1000.0f; }
    }
}

static void declare(Bench& b) {
    if (!b.dry) { cublaslt_open(); }
    int N = b.B * b.T, C = b.C, OC = 3 * C;
    bool hard = b.cases({"normal", "rows of equal values, of large mean, with one large value"}) == 1;
    size_t n = (size_t)N * OC, size = (size_t)OC * C;
    cudaStream_t stream = b.stream;
    Buffer<floatX> inp = b.input_from<floatX>("inp", (size_t)N * C,
                                              [=, &rng = b.rng](float* host) { fill_rows(host, N, C, hard, rng); });
    Buffer<floatX> weight = b.input<floatX>("weight", C, 0.2f, 1.0f);
    Buffer<floatX> bias = b.input<floatX>("bias", C, 0.2f);
    Buffer<floatX> linear_weight = b.input<floatX>("linear_weight", size, 1.0f / sqrtf((float)C));
    Buffer<floatX> linear_bias = b.input<floatX>("linear_bias", OC, 0.5f);
    float terms = ulp_of<float>() * 0.64f * sqrtf((float)C); // one ulp of fp32 of the terms' absolute sum
    Tolerance tolerance = sizeof(floatX) == 4 ? ulps<float>(8, 0.0f) : ulps<floatX>(1, 1.5f);
    tolerance.atol += (hard ? 3 * 316.0f : 32.0f) * terms; // 3 roundings, times an rstd of 316
    Buffer<floatX> out = b.output<floatX>("out", n, tolerance);
    std::vector<size_t> sample = b.sample(N, 2.0 * C * OC);
    b.reference([=] {
        std::vector<float> x = rows_of(inp.host, sample, C), y(sample.size() * OC);
        layernorm_linear_cpu(y.data(), x.data(), weight.host, bias.host, linear_weight.host, linear_bias.host,
                             (int)sample.size(), C, OC);
        put_rows(out.host, y, sample, OC);
    });
    double e = sizeof(floatX), rows = e * N * C, weights = e * (double)size, results = e * (double)n;
    b.cost(rows + weights + results, 2.0 * N * C * OC);

    Buffer<floatX> normed = b.scratch<floatX>("normed", (size_t)N * C);
    Buffer<float> mean = b.scratch<float>("mean", N), rstd = b.scratch<float>("rstd", N);
    LayernormLinearArgs l = {out, inp, weight, bias, linear_weight, linear_bias, N, C, OC};
    b.kernel(1, "layernorm, then matmul_forward", [=](int) { layernorm_linear1(l, normed, mean, rstd, stream); }, {0});
    b.moves(2, 3 * rows + weights + results);
    b.kernel(2, "one launch: 32x32 tiles, statistics by each block", [=](int) { layernorm_linear2(l, stream); }, {0});
    b.moves(1, rows + weights + results);
    b.best(1);
#if !defined(ENABLE_FP32)
    LayernormLinearWeights w = {b.scratch<floatX>("scaled", size), b.scratch<float2>("sums", OC)};
    Buffer<floatX> ready = b.input_from<floatX>("prepared weights", size, [=](float* host) {
        for (size_t i = 0; i < size; i++) { host[i] = weight.host[i % C] * linear_weight.host[i]; }
    });
    Buffer<float> ready_sums = b.input_from<float>("their sums", 2 * (size_t)OC, [=](float* host) {
        parallel_for(OC, [=](size_t o) {
            double u = 0, v = linear_bias.host[o];
            for (size_t c = 0; c < (size_t)C; c++) {
                u += ready.host[o * C + c];
                v += (double)bias.host[c] * linear_weight.host[o * C + c];
            }
            host[2 * o] = (float)u, host[2 * o + 1] = (float)v;
        });
    });
    LayernormLinearWeights prepared = {ready.dev, (float2*)ready_sums.dev};
    b.kernel(3, "2 with statistics by a small kernel", [=](int) { layernorm_linear3(l, mean, rstd, stream); }, {0});
    b.moves(2, 2 * rows + weights + results);
    b.kernel(
        4, "wgmma with normalised rows from registers", [=](int) { layernorm_linear4(l, mean, rstd, stream); }, {0},
        -90);
    b.moves(2, 2 * rows + weights + results);
    b.kernel(
        5, "weights scaled, then wgmma on raw rows, overlapped with their statistics",
        [=](int) { layernorm_linear5(l, w, stream); }, {0}, -90);
    b.moves(2, rows + 3 * weights + results);
    const std::vector<int> forms = {0, GEMM_PING_PONG_192, GEMM_PING_PONG_192_PAIRS, GEMM_PING_PONG_128_PAIRS};
    b.kernel(
        6, "statistics and weights, then gemm.cuh",
        [=](int form) {
            form ? layernorm_linear6(l, mean, rstd, w, stream, form) : layernorm_linear6(l, mean, rstd, w, stream);
        },
        forms, -90);
    b.config("form", gemm_form_name);
    b.moves(2, 2 * rows + 3 * weights + results);
    b.kernel(
        7, "6 with weights prepared in advance",
        [=](int form) {
            form ? layernorm_linear7(l, mean, rstd, prepared, stream, form)
                 : layernorm_linear7(l, mean, rstd, prepared, stream);
        },
        forms, -90);
    b.config("form", gemm_form_name);
    b.moves(2, 2 * rows + weights + results);
    b.kernel(
        8, "weights, then ping-pong: the idle consumer computes statistics",
        [=](int form) { form ? layernorm_linear(l, w, stream, form) : layernorm_linear(l, w, stream); }, forms, -90);
    b.config("form", gemm_form_name);
    b.moves(2, rows + 3 * weights + results);
    b.kernel(
        9, "8 with weights prepared in advance",
        [=](int form) {
            form ? layernorm_linear_prepared(l, prepared, false, stream, form)
                 : layernorm_linear_prepared(l, prepared, false, stream);
        },
        forms, -90);
    b.config("form", gemm_form_name);
    b.moves(1, rows + weights + results);
    b.best(8);
#endif
    b.matrix_rate(cublaslt_matrix_rate);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "layernorm_linear", declare, {32, 512, 768, 12, 50257},
                      {{1, 1, 8},
                       {1, 5, 776},
                       {1, 129, 64},
                       {3, 43, 384},
                       {2, 260, 768},
                       {1, 127, 1600},
                       {5, 1640, 256},
                       {6, 9000, 8},
                       {3, 7000, 72},
                       {1, 300, 768},
                       {1, 140, 1600}});
}
