/* linear_cross_entropy: the head of the model, its loss, and both gradients: logits = inp weight^T, losses = cross-entropy

   losses (N) float out = log(sum(exp(logits))) - logits[target] per row, over the first V of Vp columns
   dinp (N,C) floatX out = dlogits weight | dweight (Vp,C) float out = dlogits^T inp, or inout if it accumulates, where
   dlogits (N,Vp) = (softmax(logits) - onehot(target)) * dloss, and 0 from column V on
   inp (N,C) floatX inout, overwritten by the backward pass | weight (Vp,C) floatX in, finite from row V on, too
   targets (N) int in, 0..V-1 | dloss (1) float in; N = B*T
   Bound: compute, 6*N*C*Vp FLOPs. Constraint: C % 8 == 0, Vp % 8 == 0, 1 <= V <= Vp, pointers aligned to 16 bytes.
   Error: kernel 1 rounds the logits to floatX, and so the losses are off by up to an ulp of floatX of the largest logits; in
   kernel 2 the losses have the error of a logit in fp32. The gradients have that of dlogits rounded to floatX; kernel 2 also
   rounds inp times a factor, and dinp twice. Limits of kernel 2: bf16 only; a logit counts as at most 97 larger than the
   target's, and as exp(logit) = 0 if it is 60 smaller.
   If a row of logits holds a NaN, its loss is NaN. An infinite logit: NaN with kernel 1; in kernel 2 it is at the limit, and
   NaN or infinite in the gradients.
   Tuned: nothing; the products choose by themselves.
   Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax). Two others that save memory, which this one does not:
   Wijmans et al. 2024, arXiv:2411.09009, do not store the logits and compute them again; Hsu et al. 2024, arXiv:2410.10989,
   go through the tokens in pieces.

   Kernels (this list is written by versions.sh):
     1  the product, fused_classifier, the products of the backward pass
     2  softmax begins in the product's epilogue, row factors applied later (promoted)

   nvcc -O3 --use_fast_math linear_cross_entropy.cu -lcublasLt -o linear_cross_entropy      (or: make linear_cross_entropy)
   ./linear_cross_entropy 2      check kernel 2 against the CPU and time it
   ./linear_cross_entropy        every kernel, side by side                                         */
#define PROMOTED_ONLY
#include "adamw.cu"
#include "fused_classifier.cu"
#include "gelu_backward.cu"
#include "gelu_forward.cu"
#include "gemm.cuh"
#include "matmul_backward_bias.cu"
#include "matmul_forward.cu"

#include "matmul_backward.cu" // it uses those before it
#undef PROMOTED_ONLY
#include "bench.h"

// ---- kernel 1: the product, fused_classifier on the logits in memory, the products of the backward pass ----

// ==== promoted: linear_cross_entropy ====
// What both passes are given.
struct LinearCrossEntropy {
    floatX* logits;       // (N,Vp): memory for what the forward pass leaves for the backward pass
    float* losses;        // (N)
    float* scratch;       // forward: (linear_cross_entropy_scratch); backward: (matmul_backward_weight_scratch)
    floatX* inp;          // (N,C); the backward pass overwrites it
    const floatX* weight; // (Vp,C)
    const int* targets;   // (N), for the forward pass
    const float* dloss;   // (1), or NULL if no backward pass follows
    int N, C, V, Vp;
};

void linear_cross_entropy_forward1(const LinearCrossEntropy& g, cudaStream_t stream) {
    matmul_forward(g.logits, NULL, g.inp, g.weight, NULL, NULL, g.N, g.C, g.Vp, stream);
    fused_classifier(g.logits, g.losses, g.targets, g.dloss, g.N, g.V, g.Vp, stream);
}

// dinp = dout weight, dweight = dout^T inp, or += if accumulate, with dout (N,Vp) in the memory of the logits
void linear_cross_entropy_backward1(const LinearCrossEntropy& g, floatX* dinp, float* dweight, bool accumulate,
                                    cudaStream_t stream) {
    matmul_backward_weight(dweight, g.scratch, g.logits, g.inp, g.N, g.C, g.Vp, accumulate, stream);
    matmul_backward_input(dinp, NULL, g.scratch, g.logits, g.weight, NULL, g.N, g.C, g.Vp, stream);
}
// ==== end promoted: linear_cross_entropy ====

// ---- kernel 2: softmax begins in the product's epilogue, so no pass reads and writes the logits ----

// ==== promoted: linear_cross_entropy ====
// dlogits[i][v] = (softmax(logits)[i][v] - onehot(target)[v]) * dloss needs the sum of a row of exponentials before its first
// element is known, so a classifier reads all logits and writes them again. But the sum is one number for the row, and a factor
// of a row can wait. The product's epilogue stores
//
//     ratio[i][v] = RATIO_UNIT * exp(logits[i][v] - logits[i][target])
//
// and sums each row. Rounding a ratio to bf16 costs the same relative error as rounding dlogits. The target's column needs
// ratio - sum, which the third kernel writes once the sum is known. Then dlogits[i][v] = ratio[i][v] * dloss / sum[i]. This
// factor of row i multiplies two small tensors instead: inp, before the product for dweight, and dinp, after its product.
//
// The target's logit, computed before, stands in for the maximum that softmax usually subtracts. Its ratio is RATIO_UNIT = 2^-40,
// the largest is limited to 2^100, and below 2^-126 a ratio is 0, so that ratios, their sums and the products fit bf16's range,
// which is that of fp32. 2^140 is exp(97), 2^86 is exp(60).
#if defined(ENABLE_BF16)
constexpr float RATIO_UNIT = 0x1p-40f, RATIO_LOG2_UNIT = -40.0f, RATIO_LOG2_MAX = 100.0f;

// shifts (N) = log2(RATIO_UNIT) - log2(e) * logit of the target. A warp per row.
__global__ void linear_cross_entropy_shift_kernel2(float* shifts, const floatX* inp, const floatX* weight,
                                                   const int* targets, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    const floatX *x = inp + (size_t)row * C, *w = weight + (size_t)targets[row] * C;
    float logit = 0.0f;
    for (int i = lane * x128::size; i < C; i += 32 * x128::size) {
        auto a = to_floats(load128(x + i)), b = to_floats(load128(w + i));
        for (int e = 0; e < x128::size; e++) { logit += a[e] * b[e]; }
    }
    logit = warp_sum(logit);
    if (lane == 0) { shifts[row] = RATIO_LOG2_UNIT - LOG2E * logit; }
}

// The epilogue for gemm(): ratios, and the sum of each row in each tile of columns.
struct GemmRatios {
    static constexpr int EXTRAS = GEMM_ROW_SUMS;
    const float* shifts; // (N)
    float* sums;         // (tiles of columns, N)
    int N, V;

    typedef float Row;
    typedef uint32_t Pair;
    typedef float Column;                                 // 0, or -infinity from column V on
    __device__ Row row(int i) const { return shifts[i]; } // the kernel before writes them, so not __ldg()
    __device__ Pair pair(int column) const {
        return pack_16x2(column < V ? 0.0f : -INFINITY, column + 1 < V ? 0.0f : -INFINITY, floatX());
    }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        float2 x = unpack_16x2(pair, floatX());
        c[0] = x.x, c[1] = x.y;
    }
    __device__ float value(float sum, const Row& shift, const Column& c) const {
        return exp2_approx(min_or_nan(fmaf(sum, LOG2E, shift) + c, RATIO_LOG2_MAX));
    }
    __device__ void store_row_sum(int i, int tile, float sum) const { sums[(size_t)tile * N + i] = sum; }
};

// losses from the sums (num_tiles,N), which a block of 8 warps adds up for 32 rows: warp w takes every 8th tile. For a backward
// pass also the ratio at the target's column.
__global__ void __launch_bounds__(256)
    linear_cross_entropy_finish_kernel2(floatX* ratios, float* losses, const float* sums, const int* targets,
                                        int num_tiles, int N, int Vp, bool backward_follows) {
    __shared__ float shared[8][32];
    grid_launch_dependents();
    grid_wait_dependency();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (row < N) {
#pragma unroll 8
        for (int t = warp; t < num_tiles; t += 8) { sum += sums[(size_t)t * N + row]; }
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || row >= N) { return; }
    for (int w = 1; w < 8; w++) { sum += shared[w][lane]; }
    // log1pf because logf() under --use_fast_math is less exact near 1; a large sum divided by the unit would overflow
    float loss = sum < 0x1p80f ? log1pf(sum / RATIO_UNIT - 1.0f) : log1pf(sum - 1.0f) - RATIO_LOG2_UNIT / LOG2E;
    losses[row] = loss < 0.0f ? 0.0f : loss; // by rounding of the shift; NaN stays
    if (backward_follows) { ratios[(size_t)row * Vp + targets[row]] = (floatX)(RATIO_UNIT - sum); }
}

// x (N,C) *= dloss / sum of the row's ratios, which is dloss / RATIO_UNIT * exp(-loss). A warp per row.
__global__ void linear_cross_entropy_scale_kernel2(floatX* x, const float* losses, const float* dloss, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    float scale = *dloss * exp2_approx(-RATIO_LOG2_UNIT - LOG2E * losses[row]);
    for (int i = lane * x128::size; i < C; i += 32 * x128::size) {
        auto v = to_floats(load128(x + (size_t)row * C + i));
        x128 y;
        for (int e = 0; e < x128::size; e++) { y[e] = (floatX)(v[e] * scale); }
        store128(x + (size_t)row * C + i, y);
    }
}
void linear_cross_entropy_scale2(floatX* x, const LinearCrossEntropy& g, cudaStream_t stream) {
    Op op(stream, 2.0 * g.N * g.C * sizeof(floatX), 0, "scale_rows %d", g.C);
    launch_early(linear_cross_entropy_scale_kernel2, ceil_div(g.N, 8), 256, 0, stream, x, (const float*)g.losses,
                 g.dloss, g.N, g.C);
}

inline int linear_cross_entropy_tiles(int Vp) { return ceil_div(Vp, GemmPingPong192Pairs::COLUMNS); }

void linear_cross_entropy_forward2(const LinearCrossEntropy& g, cudaStream_t stream) {
    float *shifts = g.scratch, *sums = g.scratch + g.N;
    int num_tiles = linear_cross_entropy_tiles(g.Vp);
    Op op(stream, ((double)g.N * (g.C + g.Vp) + (double)g.Vp * g.C) * sizeof(floatX), 2.0 * g.N * g.C * g.Vp,
          "matmul_forward %d -> %d, loss", g.C, g.Vp);
    launch_early(linear_cross_entropy_shift_kernel2, ceil_div(g.N, 8), 256, 0, stream, shifts, (const floatX*)g.inp,
                 g.weight, g.targets, g.N, g.C);
    gemm(GemmArgs{g.logits, NULL, g.inp, g.weight, NULL, g.N, g.Vp, g.C}, GemmRatios{shifts, sums, g.N, g.V}, stream);
    launch_early(linear_cross_entropy_finish_kernel2, ceil_div(g.N, 32), 256, 0, stream, g.logits, g.losses,
                 (const float*)sums, g.targets, num_tiles, g.N, g.Vp, g.dloss != NULL);
}

void linear_cross_entropy_backward2(const LinearCrossEntropy& g, floatX* dinp, float* dweight, bool accumulate,
                                    cudaStream_t stream) {
    linear_cross_entropy_scale2(g.inp, g, stream);
    linear_cross_entropy_backward1(g, dinp, dweight, accumulate, stream);
    linear_cross_entropy_scale2(dinp, g, stream);
}
#endif

// The number of the kernel for this device, binary and shape: 2 in bf16 where matmul_forward() would take gemm(), which alone has
// this epilogue.
inline int linear_cross_entropy_choice(int N, int C, int Vp) {
#if defined(ENABLE_BF16)
    return matmul_forward_choice(N, C, Vp) == 21 ? 2 : 1;
#else
    (void)N, (void)C, (void)Vp;
    return 1;
#endif
}

// Floats of scratch for the forward pass.
size_t linear_cross_entropy_scratch(int N, int C, int Vp) {
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) { return (size_t)N * (1 + linear_cross_entropy_tiles(Vp)); }
#endif
    (void)N, (void)C, (void)Vp;
    return 0;
}

// losses (N) = log(sum(exp(logits))) - logits[target] over the first V of the Vp columns of inp (N,C) weight (Vp,C)^T | targets (N),
// each in [0,V) | dloss (1), or NULL if no backward pass follows | logits (N,Vp) is filled for linear_cross_entropy_backward; if
// dloss is NULL, the first V columns are the logits, or numbers of which a larger one stands for a larger logit of the same row
// | scratch (linear_cross_entropy_scratch(N, C, Vp))
void linear_cross_entropy_forward(floatX* logits, float* losses, float* scratch, const floatX* inp,
                                  const floatX* weight, const int* targets, const float* dloss, int N, int C, int V,
                                  int Vp, cudaStream_t stream) {
    require(C % 8 == 0 && Vp % 8 == 0 && 1 <= V && V <= Vp);
    LinearCrossEntropy g = {logits, losses, scratch, (floatX*)inp, weight, targets, dloss, N, C, V, Vp};
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) { return linear_cross_entropy_forward2(g, stream); }
#endif
    linear_cross_entropy_forward1(g, stream);
}

// dinp (N,C) = dlogits weight, dweight (Vp,C) = dlogits^T inp, or += if accumulate, where dlogits = (softmax(logits) -
// onehot(target)) * dloss. Call after the forward pass with dloss, whose logits, losses, inp and weight these are; inp is
// overwritten | scratch (matmul_backward_weight_scratch(N, C, Vp))
void linear_cross_entropy_backward(floatX* dinp, float* dweight, float* scratch, floatX* logits, float* losses,
                                   floatX* inp, const floatX* weight, const float* dloss, int N, int C, int Vp,
                                   bool accumulate, cudaStream_t stream) {
    require(dloss);
    LinearCrossEntropy g = {logits, losses, scratch, inp, weight, NULL, dloss, N, C, Vp, Vp};
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) {
        return linear_cross_entropy_backward2(g, dinp, dweight, accumulate, stream);
    }
#endif
    linear_cross_entropy_backward1(g, dinp, dweight, accumulate, stream);
}
// ==== end promoted: linear_cross_entropy ====

static void declare(Bench& b) {
    b.varies("BTCV");
    int N = b.B * b.T, C = b.C, V = b.V, Vp = ceil_div(V, 128) * 128;
    if (!b.dry) { cublaslt_open(); }
    const float deviations[] = {1.0f, 10.0f, 1e-3f, 1.0f}; // of the logits
    int which =
        b.cases({"normal", "logits of some 40", "almost equal logits", "one token far above or below the others"});
    float far = which == 3 && V > 1 ? 200.0f : 1.0f, deviation = deviations[which], width = deviation / sqrtf((float)C);
    float dloss_value = 1.0f / 64;
    Buffer<floatX> inp = b.input<floatX>("inp", (size_t)N * C);
    Buffer<floatX> weight = b.input_from<floatX>("weight", (size_t)Vp * C, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, (size_t)Vp * C, seed, width, 0.0f);
        for (int k = 0; k < C; k++) { x[(size_t)(V / 2) * C + k] *= far; }
    });
    Buffer<int> targets = b.input_ids("targets", N, V);
    Buffer<float> dloss = b.input_from<float>("dloss", 1, [=](float* x) { *x = dloss_value; });
    // the error of a logit: 16 fp32 roundings at the size of the terms' absolute sum
    float logit = 16 * ulp_of<float>() * 0.64f * sqrtf((float)C) * deviation * far;
    // an element of dlogits, of inp and of the result is rounded to floatX; 5 standard deviations are the largest
    float rounding = (2 * ulp_of<floatX>() + 4 * logit) * 5 * dloss_value;
    Buffer<float> losses = b.output<float>("losses", N, {logit + 1e-6f, 2e-6f});
#if defined(ENABLE_FP16)
    float step = 0x1p-24f; // between the smallest numbers of fp16
#else
    float step = 0;
#endif
    Buffer<floatX> dinp =
        b.output<floatX>("dinp", (size_t)N * C, {rounding * width * far + step, 2 * ulp_of<floatX>()});
    Buffer<float> dweight = b.output<float>("dweight", (size_t)Vp * C, {rounding, 2 * ulp_of<floatX>()});
    Buffer<floatX> logits = b.scratch<floatX>("logits", (size_t)N * Vp);
    Buffer<floatX> scaled =
        b.scratch<floatX>("scaled", (size_t)N * C); // a copy of inp, which the backward pass overwrites
    size_t num = b.dry ? 0 : matmul_backward_weight_scratch(N, C, Vp);
#if defined(ENABLE_BF16)
    num = std::max(num, (size_t)N * (1 + linear_cross_entropy_tiles(Vp)));
#endif
    Buffer<float> scratch = b.scratch<float>("scratch", num);
    std::vector<size_t> rows = b.sample(N, 4.0 * C * Vp);
    b.reference([=] {
        size_t n = rows.size();
        std::vector<float> x = rows_of(inp.host, rows, C), y(n * Vp), d(n * Vp), loss(n), dx(n * C), ids(n);
        for (size_t i = 0; i < n; i++) { ids[i] = targets.host[rows[i]]; }
        matmul_forward_cpu(y.data(), x.data(), weight.host, NULL, NULL, n, C, Vp);
        for (size_t i = 0; which == 3 && i < n; i++) { // the limit of kernel 2: 97 above the target's logit
            float limit = y[i * Vp + (size_t)ids[i]] + 140.0f * logf(2.0f);
            for (int v = 0; v < V; v++) { y[i * Vp + v] = std::min(y[i * Vp + v], limit); }
        }
        fused_classifier_cpu(d.data(), loss.data(), y.data(), ids.data(), dloss_value, (int)n, V, Vp);
        matmul_backward_input_cpu(dx.data(), d.data(), weight.host, NULL, n, C, Vp);
        put_rows(losses.host, loss, rows, 1);
        put_rows(dinp.host, dx, rows, C);
        // a row of dweight needs all tokens: it is compared where all are computed
        if (n == (size_t)N) { matmul_backward_weight_cpu(dweight.host, NULL, d.data(), inp.host, N, C, Vp); }
    });
    cudaStream_t stream = b.stream;
    b.cost(sizeof(floatX) * (2.0 * N * C + (double)Vp * C) + sizeof(float) * (double)Vp * C, 6.0 * N * C * Vp);
    b.matrix_rate(cublaslt_matrix_rate);
    auto both = [=](auto forward, auto backward) {
        LinearCrossEntropy g = {logits, losses, scratch, scaled, weight, targets, dloss, N, C, V, Vp};
        cudaCheck(cudaMemcpyAsync(scaled, inp, (size_t)N * C * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        follows_event() = true; // a copy is no kernel that could let the next one start early
        forward(g, stream);
        backward(g, (floatX*)dinp, (float*)dweight, false, stream);
    };
    if (which != 3) { // kernel 1 has no limit, so it would differ from the reference
        b.kernel(1, "the product, fused_classifier, the products of the backward pass",
                 [=](int) { both(linear_cross_entropy_forward1, linear_cross_entropy_backward1); }, {0});
        // It rounds the logits, of which 4 deviations is a large one; `rounding` lets dlogits be 10 ulps off.
        if (sizeof(floatX) == 2) {
            float off = 4 * deviation * ulp_of<floatX>();
            b.coarser(std::max(1.0f, off / (10 * ulp_of<floatX>())));
            b.coarser(off / (logit + 1e-6f), "losses");
        }
    }
#if defined(ENABLE_BF16)
    b.kernel(
        2, "softmax begins in the product's epilogue, row factors applied later",
        [=](int) { both(linear_cross_entropy_forward2, linear_cross_entropy_backward2); }, {0}, -90);
    b.promoted(b.dry || linear_cross_entropy_choice(N, C, Vp) == 2 ? 2 : 1);
#else
    b.promoted(1);
#endif
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "linear_cross_entropy", declare, {8, 1024, 768, 1, 50257},
        {{1, 1, 8, 1, 1}, {1, 3, 136, 1, 11}, {2, 65, 64, 1, 1000}, {1, 300, 72, 1, 640}, {1, 130, 776, 1, 129}});
}
