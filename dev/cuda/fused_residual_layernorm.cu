/* fused_residual_layernorm: residual = inp1 + inp2; normed = (residual - mean) * rstd * weight + bias, per row of C

   residual, normed (N,C) floatX out | mean, rstd (N) float out | inp1, inp2 (N,C) floatX in |
   weight, bias (C) floatX in; N = B*T
   mean, rstd and normed are computed from the rounded sum, as it is stored in residual.
   Bound: memory, 4*N*C*sizeof(floatX) bytes. Constraint: C % 8 == 0; C <= 6144 in fp32, 12288 in 16 bits. Kernels 8
   and 9 need 16 bits and C <= 2048, kernel 9 also sm_90a.
   Error: residual is exact. normed against the fp64 reference: half an ulp of floatX for the rounding, 8 ulps of fp32
   for the arithmetic, and an absolute 32 fp32 ulps of 1 for terms that cancel. mean and rstd: a few ulps of fp32.
   Source: Ba et al. 2016, arXiv:1607.06450.

   Kernels (this list is written by versions.sh):
     1  unfused: residual_forward, then layernorm_forward
     2  one warp per row, sums read back from the cache (slower than 1)
     3  128-bit loads, one block per row, the row in shared memory (promoted)
     4  one or more warps per row, the row in registers
     5  persistent, weight and bias in registers too (slower than 4)
     6  persistent, one pass for mean and variance (slower than 4)
     7  persistent, rows loaded ahead into shared memory (slower than 4)
     8  one warp per row, programmatic dependent launch
     9  persistent, a ring of rows per warp by bulk copies (slower than 4)

   nvcc -O3 --use_fast_math fused_residual_layernorm.cu -o fused_residual_layernorm
   (or: make fused_residual_layernorm)
   ./fused_residual_layernorm 3      check kernel 3 against the CPU and sweep its block sizes
   ./fused_residual_layernorm        every kernel, side by side                                         */
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "layernorm_forward.cuh"
#include "residual_forward.cuh"

// ---- kernel 1: two operations: residual_forward, then layernorm_forward, the best separate kernels ----

void fused_residual_layernorm_forward1(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       float epsilon, cudaStream_t stream) {
    residual_forward(residual, inp1, inp2, (size_t)N * C, stream);
    layernorm_forward(normed, mean, rstd, residual, weight, bias, N, C, epsilon, stream);
}

// ---- kernel 2: one launch, one warp per row: each lane reads its own sums back from the cache -----

__global__ void fused_residual_layernorm_kernel2(floatX* residual, floatX* normed, float* mean, float* rstd,
                                                 const floatX* inp1, const floatX* inp2, const floatX* weight,
                                                 const floatX* bias, int N, int C) {
    int lane = threadIdx.x % 32;
    size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= (size_t)N) { return; }
    floatX* x = residual + row * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane; c < C; c += 32) {
        floatX rounded = (floatX)((float)inp1[row * C + c] + (float)inp2[row * C + c]);
        x[c] = rounded;
        sum += (float)rounded;
    }
    float m = warp_sum(sum) / C;
    for (int c = lane; c < C; c += 32) {
        float centered = (float)x[c] - m;
        squares += centered * centered;
    }
    float r = rsqrtf(warp_sum(squares) / C + NORM_EPSILON);
    for (int c = lane; c < C; c += 32) {
        normed[row * C + c] = (floatX)(((float)x[c] - m) * r * (float)weight[c] + (float)bias[c]);
    }
    if (lane == 0) { mean[row] = m, rstd[row] = r; }
}

void fused_residual_layernorm_forward2(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       cudaStream_t stream, int block_size) {
    fused_residual_layernorm_kernel2<<<ceil_div(N, block_size / 32), block_size, 0, stream>>>(
        residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C);
    cudaCheck(cudaGetLastError());
}

#include "fused_residual_layernorm.cuh" // kernel 3

// ---- kernel 4: one or more warps per row keep the sum in registers; high occupancy hides latency ----------

// This is kernel 7 of layernorm_forward, which has the steps that lead to it, with a sum in place of the load.
// A row belongs to one warp or, if it is long, to a block of 2, 4, 8 or 16 warps. A thread holds up to 3 vectors of it.

// Loads the thread's vectors of a row of inp1 and inp2.
template <int num_vecs> __device__ inline void fused_residual_layernorm_load(const LayernormForwardPlace<num_vecs>& at,
                                                                             x128 (&x)[num_vecs], x128 (&add)[num_vecs],
                                                                             const floatX* inp1, const floatX* inp2,
                                                                             int row) {
    size_t start = at.start(row);
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (at.inside(j)) {
            x[j] = load128(inp1 + start + j * at.stride);
            add[j] = load128(inp2 + start + j * at.stride);
        }
    }
}

// Adds `add` to x, rounds, stores the result in residual too, and returns the sum of the thread's part.
template <int num_vecs>
__device__ inline float fused_residual_layernorm_add(const LayernormForwardPlace<num_vecs>& at, x128 (&x)[num_vecs],
                                                     const x128 (&add)[num_vecs], floatX* residual, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; k < x128::size; k++) {
            x[j][k] = (floatX)((float)x[j][k] + (float)add[j][k]);
            sum += (float)x[j][k];
        }
        if (at.inside(j)) { store128(residual + at.start(row) + j * at.stride, x[j]); }
    }
    return sum;
}

template <int num_vecs> __global__ void __launch_bounds__(512)
    fused_residual_layernorm_kernel4(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                     int row_warps) {
    __shared__ float partial[2][16];
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    // whole warps return, and only with row_warps == 1, where there is no barrier
    if (at.row >= N) { return; }
    x128 x[num_vecs] = {}, add[num_vecs] = {};
    fused_residual_layernorm_load(at, x, add, inp1, inp2, at.row);
    float m = at.mean(fused_residual_layernorm_add(at, x, add, residual, at.row), partial[0]);
    float r = at.rstd(x, m, NORM_EPSILON, partial[1]);
    at.normalise(normed, mean, rstd, at.row, x, m, r, weight, bias);
}

void fused_residual_layernorm_forward4(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       cudaStream_t stream, int block_size) {
    layernorm_forward_launch([](auto n) { return fused_residual_layernorm_kernel4<n.value>; }, {false, 1, 0}, N, C,
                             stream, block_size, residual, normed, mean, rstd, inp1, inp2, weight, bias);
}

// ---- kernel 5: persistent; weight and bias stay in registers too, at the price of occupancy ----------
// Like kernel 8 of layernorm_forward.

template <int num_vecs> __global__ void __launch_bounds__(512)
    fused_residual_layernorm_kernel5(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                     int row_warps) {
    __shared__ float partial[2][16];
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    x128 w[num_vecs] = {}, b[num_vecs] = {};
    at.load(w, weight, 0), at.load(b, bias, 0);
    for (int row = at.row; row < N; row += at.row_step) {
        x128 x[num_vecs] = {}, add[num_vecs] = {};
        fused_residual_layernorm_load(at, x, add, inp1, inp2, row);
        float m = at.mean(fused_residual_layernorm_add(at, x, add, residual, row), partial[0]);
        float r = at.rstd(x, m, NORM_EPSILON, partial[1]);
        at.normalise(normed, mean, rstd, row, x, m, r, w, b);
    }
}

void fused_residual_layernorm_forward5(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       cudaStream_t stream, int block_size) {
    layernorm_forward_launch([](auto n) { return fused_residual_layernorm_kernel5<n.value>; }, {true, 1, 0}, N, C,
                             stream, block_size, residual, normed, mean, rstd, inp1, inp2, weight, bias);
}

// ---- kernel 6: one pass for mean and variance, from differences to an estimate of the mean -------------

// `near`, the average of the row's first vector, estimates the mean. With d = x - near, var = E[d^2] - E[d]^2 loses few
// digits, whatever the mean is. The two sums do not depend on each other, so their warp shuffles overlap.
template <int num_vecs> __global__ void __launch_bounds__(512, 1)
    fused_residual_layernorm_kernel6(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                     int row_warps) {
    __shared__ float partial[2][2][16];
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    int parity = 0;
    for (int row = at.row; row < N; row += at.row_step) {
        x128 near1 = load128(inp1 + (size_t)row * C), near2 = load128(inp2 + (size_t)row * C);
        float near = 0.0f;
        for (int k = 0; k < x128::size; k++) { near += (float)near1[k] + (float)near2[k]; }
        // rounded to floatX, so that x - near is exact and has no error that all x share
        near = (float)(floatX)(near / x128::size);
        x128 x[num_vecs] = {}, add[num_vecs] = {};
        fused_residual_layernorm_load(at, x, add, inp1, inp2, row);
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (at.inside(j)) {
                for (int k = 0; k < x128::size; k++) {
                    x[j][k] = (floatX)((float)x[j][k] + (float)add[j][k]);
                    float d = (float)x[j][k] - near;
                    sum += d;
                    squares += d * d;
                }
                store128(residual + at.start(row) + j * at.stride, x[j]);
            }
        }
        sum = warp_sum(sum);
        squares = warp_sum(squares);
        if (row_warps > 1) {
            int warp = threadIdx.x / 32;
            if (threadIdx.x % 32 == 0) { partial[parity][0][warp] = sum, partial[parity][1][warp] = squares; }
            __syncthreads();
            sum = squares = 0.0f;
            for (int i = 0; i < row_warps; i++) { sum += partial[parity][0][i], squares += partial[parity][1][i]; }
            parity = 1 - parity; // double buffer: one barrier per row is enough
        }
        float shift = sum * at.inv_C, m = near + shift;
        float r = rsqrtf(fmaxf(squares * at.inv_C - shift * shift, 0.0f) + NORM_EPSILON);
        at.normalise(normed, mean, rstd, row, x, m, r, weight, bias);
    }
}

void fused_residual_layernorm_forward6(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       cudaStream_t stream, int block_size) {
    layernorm_forward_launch([](auto n) { return fused_residual_layernorm_kernel6<n.value>; }, {true, 1, 0}, N, C,
                             stream, block_size, residual, normed, mean, rstd, inp1, inp2, weight, bias);
}

// ---- kernel 7: persistent; cp.async loads the next 2 rows into a ring in shared memory ------------------
// Like kernel 10 of layernorm_forward.

// A thread reads only the vectors that it copied, so it waits for its own copies and needs no barrier.
constexpr int FUSED_RESIDUAL_LAYERNORM_STAGES7 = 2;

template <int num_vecs> __global__ void __launch_bounds__(512)
    fused_residual_layernorm_kernel7(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                     const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                     int row_warps) {
    __shared__ float partial[2][16];
    // (stages, num_vecs, inp1 and inp2, blockDim.x)
    extern __shared__ __align__(128) int4 fused_residual_layernorm_ring[];
    LayernormForwardPlace<num_vecs> at(C, row_warps);
    auto slot = [&](int stage, int j) {
        return fused_residual_layernorm_ring + (stage * num_vecs + j) * 2 * blockDim.x + threadIdx.x;
    };
    // one group of copies per row; groups after the last row are empty, so that the number in flight stays constant
    auto fetch = [&](int row, int stage) {
        if (row < N) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                if (at.inside(j)) {
                    cp_async_16(slot(stage, j), inp1 + at.start(row) + j * at.stride);
                    cp_async_16(slot(stage, j) + blockDim.x, inp2 + at.start(row) + j * at.stride);
                }
            }
        }
        cp_async_commit();
    };
    int row = at.row, stage = 0;
    for (int i = 0; i < FUSED_RESIDUAL_LAYERNORM_STAGES7; i++) { fetch(row + i * at.row_step, i); }
    for (; row < N; row += at.row_step) {
        cp_async_wait<FUSED_RESIDUAL_LAYERNORM_STAGES7 - 1>();
        x128 x[num_vecs] = {}, add[num_vecs] = {};
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (at.inside(j)) {
                x[j] = load128((const floatX*)slot(stage, j));
                add[j] = load128((const floatX*)(slot(stage, j) + blockDim.x));
            }
        }
        float m = at.mean(fused_residual_layernorm_add(at, x, add, residual, row), partial[0]);
        fetch(row + FUSED_RESIDUAL_LAYERNORM_STAGES7 * at.row_step, stage); // this row's stage has been read
        stage = (stage + 1) % FUSED_RESIDUAL_LAYERNORM_STAGES7;
        float r = at.rstd(x, m, NORM_EPSILON, partial[1]);
        at.normalise(normed, mean, rstd, row, x, m, r, weight, bias);
    }
}

// Launches kernel 5 if the code was compiled for a compute capability below 8.0, which has no cp.async.
void fused_residual_layernorm_forward7(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                       const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                       cudaStream_t stream, int block_size) {
    if (compiled_arch(fused_residual_layernorm_kernel7<1>) < 80) {
        fused_residual_layernorm_forward5(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C, stream,
                                          block_size);
        return;
    }
    layernorm_forward_launch([](auto n) { return fused_residual_layernorm_kernel7<n.value>; },
                             {true, 1, 2 * FUSED_RESIDUAL_LAYERNORM_STAGES7}, N, C, stream, block_size, residual,
                             normed, mean, rstd, inp1, inp2, weight, bias);
}

#include "fused_residual_layernorm_early.cuh" // kernels 8 and 9

#if !defined(ENABLE_FP32)
// fused_residual_layernorm_early() with `warps` warps per block.
template <int warps, int num_vectors = 1>
static void fused_residual_layernorm_forward8(floatX* residual, floatX* normed, float* mean, float* rstd,
                                              const floatX* inp1, const floatX* inp2, const floatX* weight,
                                              const floatX* bias, int N, int C, float epsilon, cudaStream_t stream) {
    require(C % 8 == 0 && C <= 8 * 256);
    if constexpr (num_vectors < 8) {
        if (C > 256 * num_vectors) {
            return fused_residual_layernorm_forward8<warps, num_vectors + 1>(residual, normed, mean, rstd, inp1, inp2,
                                                                             weight, bias, N, C, epsilon, stream);
        }
    }
    launch_early(fused_residual_layernorm_kernel8<floatX, num_vectors, warps>, dim3(ceil_div(N, warps)),
                 dim3(32 * warps), 0, stream, normed, residual, mean, rstd, inp1, inp2, weight, bias,
                 (const float*)NULL, N, C, epsilon);
}
#endif

static void declare(Bench& b) {
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C;
    cudaStream_t stream = b.stream;
    // a large mean shows whether the variance is summed around it; the mean's rounding error, 4 ulps of it, is in normed
    // Without a variance rstd is 316, and multiplies the mean's rounding error.
    int which = b.cases({"normal", "large mean", "equal values in each row", "another epsilon"});
    bool shifted = which == 1, other_epsilon = which == 3; // kernels 2 and 4 to 7 have GPT-2's
    float epsilon = other_epsilon ? 0.5f : NORM_EPSILON;
    auto rows = [=](uint32_t seed) { return [=](float* x) { bench_fill_rows(x, N, C, seed); }; };
    Buffer<floatX> inp1 = which == 2 ? b.input_from<floatX>("inp1", n, rows(b.next_seed()))
                                     : b.input<floatX>("inp1", n, 1.0f, shifted ? 30.0f : 0.0f);
    Buffer<floatX> inp2 =
        which == 2 ? b.input_from<floatX>("inp2", n, rows(b.next_seed())) : b.input<floatX>("inp2", n);
    Buffer<floatX> weight = b.input<floatX>("weight", C);
    Buffer<floatX> bias = b.input<floatX>("bias", C);
    const float out_terms[] = {1, 31, 316, 1};
    Tolerance rounding = {out_terms[which] * 32 * ulp_of<float>(), 0.5f * ulp_of<floatX>() + 8 * ulp_of<float>()};
    Buffer<floatX> residual = b.output<floatX>("residual", n, {0.0f, 0.0f});
    Buffer<floatX> normed = b.output<floatX>("normed", n, rounding);
    Buffer<float> mean = b.output<float>("mean", N, ulps<float>(4, 1.0f));
    Buffer<float> rstd = b.output<float>("rstd", N, ulps<float>(shifted ? 32 : 16, 0.0f));
    b.reference([=] {
        residual_forward_cpu(residual.host, inp1.host, inp2.host, n);
        for (size_t i = 0; i < n; i++) { residual.host[i] = (float)(floatX)residual.host[i]; }
        layernorm_forward_cpu(normed.host, mean.host, rstd.host, residual.host, weight.host, bias.host, N, C, epsilon);
    });
    double tensor = (double)n * sizeof(floatX); // bytes
    b.cost(4 * tensor, 0);

    b.kernel(1, "unfused: residual_forward, then layernorm_forward",
             [=](int) {
                 fused_residual_layernorm_forward1(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C,
                                                   epsilon, stream);
             },
             {0});
    b.moves(2, 5 * tensor);
    auto variant = [&](int number, const char* what, auto launch, std::vector<int> block_sizes) {
        if (other_epsilon) { return; }
        b.kernel(
            number, what,
            [=](int bs) { launch(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C, stream, bs); },
            block_sizes);
        b.moves(1, 4 * tensor);
    };
    variant(2, "one warp per row, sums read back from the cache", fused_residual_layernorm_forward2,
            {64, 128, 256, 512, 1024});
    b.kernel(3, "128-bit loads, one block per row, the row in shared memory",
             [=](int bs) {
                 fused_residual_layernorm_forward(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C, epsilon,
                                                  {stream, bs});
             },
             {bench_tunable("fused_residual_layernorm")});
    b.moves(1, 4 * tensor);
    b.promoted(3);
    b.huge(4.0 * (double)BenchHuge::elements(C) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements(C), num_rows = num / C;
        std::vector<float> w(C), shift(C);
        h.fill(w.data(), 0, C, 2), h.fill(shift.data(), 0, C, 3);
        floatX *x = h.input<floatX>(num, 0), *y = h.input<floatX>(num, 1);
        floatX *sum = h.output<floatX>(num), *out = h.output<floatX>(num);
        float *m = h.output<float>(num_rows), *r = h.output<float>(num_rows);
        fused_residual_layernorm_forward(sum, out, m, r, x, y, h.upload<floatX>(w), h.upload<floatX>(shift),
                                         (int)num_rows, C, NORM_EPSILON, h.stream);
        auto add = [=](size_t row, float* want) {
            for (size_t i = 0; i < (size_t)C; i++) {
                want[i] = (float)(floatX)(h.value(row * C + i, 0) + h.value(row * C + i, 1));
            }
        };
        h.compare("residual", sum, num_rows, C, {0, 0}, add);
        h.compare("normed", out, num_rows, C, rounding, [&](size_t row, float* want) {
            float row_mean, row_rstd;
            add(row, want);
            layernorm_forward_cpu(want, &row_mean, &row_rstd, want, w.data(), shift.data(), 1, C);
        });
    });
    variant(4, "one or more warps per row, the row in registers", fused_residual_layernorm_forward4,
            {64, 128, 256, 512});
    variant(5, "persistent, weight and bias in registers too", fused_residual_layernorm_forward5, {64, 128, 256, 512});
    variant(6, "persistent, one pass for mean and variance", fused_residual_layernorm_forward6, {64, 128, 256, 512});
    variant(7, "persistent, rows loaded ahead into shared memory", fused_residual_layernorm_forward7,
            {64, 128, 256, 512});
#if !defined(ENABLE_FP32)
    if (C <= 2048) {
        b.kernel(8, "one warp per row, programmatic dependent launch",
                 [=](int bs) {
                     auto launch = bs == 64    ? fused_residual_layernorm_forward8<2>
                                   : bs == 128 ? fused_residual_layernorm_forward8<4>
                                   : bs == 512 ? fused_residual_layernorm_forward8<16>
                                               : fused_residual_layernorm_forward8<8>;
                     require(bs == 0 || bs == 64 || bs == 128 || bs == 256 || bs == 512);
                     if (bs > 0) {
                         return launch(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C, epsilon, stream);
                     }
                     fused_residual_layernorm_early<floatX>(normed, residual, mean, rstd, inp1, inp2, weight, bias,
                                                            NULL, N, C, epsilon, stream);
                 },
                 {0, 64, 128, 256, 512});
        b.moves(1, 4 * tensor);
        b.kernel(
            9, "persistent, a ring of rows per warp by bulk copies",
            [=](int stages) {
                fused_residual_layernorm_forward9(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C, epsilon,
                                                  stream, stages ? stages : FUSED_RESIDUAL_LAYERNORM_STAGES);
            },
            {0, 2, 3, 4}, -90);
        b.config("stages");
        b.moves(1, 4 * tensor);
    }
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "fused_residual_layernorm", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {1, 5, 768}, {2, 33, 1600}, {1, 7, 3080}, {1, 3, 6144}, {7, 129, 264}});
}
