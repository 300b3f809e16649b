/* ffn: out = gelu(inp weight1^T + bias1) weight2^T + bias2, a feed-forward layer

   out (N,C) floatX out | hidden (N,4C) floatX out, gelu's results | inp (N,C) floatX in | weight1 (4C,C), bias1 (4C)
   floatX in | weight2 (C,4C), bias2 (C) floatX in | counters (ceil(N / 128) + 1) int inout, 0 before and after the
   launch, only for kernel 4; N = B*T
   Bound: compute, 16*N*C*C FLOPs. Constraint: C % 8 == 0, pointers aligned to 16 bytes.
   Error: against the fp64 reference, which rounds hidden to floatX. out is a sum of 4C terms, of magnitude 1. Two
   ulps of floatX at 1, because kernel 1 also rounds gelu's argument to floatX: this is eight standard deviations of the
   error of such a sum. In addition 16 fp32 roundings at the size of the terms' absolute sum, which is 0.64 * sqrt(4C)
   here. In the case of a hot row, the first row of inp is HOT_ROW times larger, and so are these errors.
   Tuned: forms of kernel 3, rows per group of kernel 4. Kernels 1 and 2 are other ops and the library, which choose by
   themselves.
   Source: the tanh form of gelu is Hendrycks and Gimpel 2016, arXiv:1606.08415; the products: gemm.cuh;
   programmatic dependent launch: the CUDA C++ Programming Guide.

   Kernels (this list is written by versions.sh):
     1  matmul_forward, gelu_forward, matmul_forward
     2  cuBLASLt, gelu in its epilogue
     3  gemm.cuh twice, the second launched early (best)
     4  one launch, tiles of both products in one list (slower than 3)

   nvcc -O3 --use_fast_math ffn.cu -lcublasLt -o ffn      (or: make ffn)
   ./ffn 4      check kernel 4 against the CPU
   ./ffn        every kernel, side by side                                         */
#include "bench.h"
#include "cublaslt_linear.cuh"
#include "gelu_forward.cuh"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "matmul_forward.cuh"

struct FfnArgs {
    floatX *out, *hidden;          // (N,C), (N,4C)
    const floatX* inp;             // (N,C)
    const floatX *weight1, *bias1; // (4C,C), (4C)
    const floatX *weight2, *bias2; // (C,4C), (C)
    int N, C;
};

// ---- kernel 1: three operations: matmul_forward with bias, gelu_forward, matmul_forward with bias -----------------

void ffn1(const FfnArgs& f, floatX* pre_gelu, cudaStream_t stream) {
    matmul_forward(pre_gelu, NULL, f.inp, f.weight1, f.bias1, NULL, f.N, f.C, 4 * f.C, stream);
    gelu_forward(f.hidden, pre_gelu, (size_t)4 * f.N * f.C, stream);
    matmul_forward(f.out, NULL, f.hidden, f.weight2, f.bias2, NULL, f.N, 4 * f.C, f.C, stream);
}

// ---- kernel 2: cuBLASLt with bias and gelu in its epilogue, then matmul_forward with bias -------------------------

void ffn2(const FfnArgs& f, cudaStream_t stream) {
    LinearCall call;
    call.out = f.hidden, call.inp = f.inp, call.weight = f.weight1, call.bias = f.bias1;
    call.M = f.N, call.N = 4 * f.C, call.K = f.C;
    call.gelu = true;
    // in fp32 the error of the library's gelu is too large
    if (sizeof(floatX) == 4 || !cublaslt_linear(call, stream)) {
        call.gelu = false;
        bool supported = cublaslt_linear(call, stream);
        require(supported);
        gelu_forward(f.hidden, f.hidden, (size_t)4 * f.N * f.C, stream);
    }
    matmul_forward(f.out, NULL, f.hidden, f.weight2, f.bias2, NULL, f.N, 4 * f.C, f.C, stream);
}

#if !defined(ENABLE_FP32)

// ---- kernel 3: gemm.cuh twice; blocks of the second product start while the first product ends --------------------

// form % 10: the form of gemm.cuh for the first product; form / 10: for the second
void ffn3(const FfnArgs& f, cudaStream_t stream, int form) {
    GemmArgs first = {f.hidden, NULL, f.inp, f.weight1, NULL, f.N, 4 * f.C, f.C};
    GemmArgs second = {f.out, NULL, f.hidden, f.weight2, NULL, f.N, f.C, 4 * f.C};
    gemm_form(first, GemmBias<GEMM_GELU>{f.bias1}, false, stream, form % 10);
    gemm_form(second, GemmBias<0>{f.bias2}, true, stream, form / 10);
}

// ---- kernel 4: one launch, one list of tiles for both products; the second product fills the tail of the first ----
// Rows of tiles may be processed in groups, small enough for L2 to hold the group's rows of hidden. The first product
// runs ahead by `lag` tiles, so that hidden has been written when the second product of a group starts. The list:
//
//     first product     group 0, and the first `lag` tiles of group 1
//     second product    group 0
//     first product     the rest of group 1, and the first `lag` tiles of group 2
//     second product    group 1
//     ...
//
// No deadlock: a tile waits only for tiles before it in the list, and every block processes its tiles in list order.

typedef GemmPingPong192<GemmSingle> FfnTiles;

struct FfnList {
    int num_rows;           // rows of tiles
    int columns1, columns2; // columns of tiles of the first product (hidden) and of the second (out)
    int num_steps1, num_steps2;
    int group; // rows of tiles per group
    int lag;   // tiles by which the first product runs ahead of the second
};
struct FfnItem {
    bool second; // a tile of the second product
    GemmTile tile;
};

// Item number `index` of the list.
__device__ inline FfnItem ffn_item(const FfnList& list, int index) {
    int num1 = list.num_rows * list.columns1, num2 = list.num_rows * list.columns2;
    int begun1 = min(list.lag, num1), begun2 = 0;
    bool second = false;
    if (index >= begun1) {
        index -= begun1;
        while (true) {
            int count1 = min(list.group * list.columns1, num1 - begun1);
            int count2 = min(list.group * list.columns2, num2 - begun2);
            second = index >= count1;
            if (index < count1 + count2) { break; }
            begun1 += count1, begun2 += count2, index -= count1 + count2;
        }
        index += second ? begun2 - min(list.group * list.columns1, num1 - begun1) : begun1;
    }
    int num_columns = second ? list.columns2 : list.columns1;
    return {second, {index / num_columns * FfnTiles::ROWS, index % num_columns * FfnTiles::COLUMNS}};
}

struct FfnMaps { // operands in tiles; results in boxes of 16x64
    CUtensorMap inp, weight1, hidden_boxes, hidden, weight2, out_boxes;
};

// counters (num_rows + 1): for each row of tiles, the number of warps that have written their rows of a tile of hidden.
// The last counter is the number of producers that no longer need the others. The last of these producers sets all
// counters to 0.
__global__ void __launch_bounds__(384, 1)
    ffn_sm90_kernel4(int* counters, const __grid_constant__ FfnMaps maps, const GemmBias<GEMM_GELU> bias1,
                     const GemmBias<0> bias2, const __grid_constant__ FfnList list, int N, int C) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char ffn_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<FfnTiles>>(ffn_dynamic);
    if (threadIdx.x == 0) { tma_prefetch_map(&maps.inp), tma_prefetch_map(&maps.weight1); }
    gemm_init(smem);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // tells the compiler that it is warp-uniform
    int warpgroup = warp / 4, num_items = list.num_rows * (list.columns1 + list.columns2), i = 0;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<40>();
        if (threadIdx.x != 0) { return; }
#pragma unroll 1
        for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
            FfnItem item = ffn_item(list, index);
            if (item.second) { // wait for all tiles of this row of hidden, each stored by 4 warps
                while (load_acquire(counters + item.tile.row / FfnTiles::ROWS) < 4 * list.columns1) {}
                async_proxy_fence(); // orders TMA's loads of hidden (async proxy) after the load of the counter
            }
            int num_steps = item.second ? list.num_steps2 : list.num_steps1;
#pragma unroll 1
            for (int step = 0; step < num_steps; step++, i++) {
                gemm_load<FfnTiles>(smem, item.second ? maps.hidden : maps.inp,
                                    item.second ? maps.weight2 : maps.weight1, item.tile, step, 0, i);
            }
        }
        __threadfence();
        if (atomicAdd(counters + list.num_rows, 1) == (int)gridDim.x - 1) { // no producer waits any more
            __threadfence();
            for (int row = 0; row <= list.num_rows; row++) { counters[row] = 0; }
        }
        return;
    }
    warpgroup_more_registers<232>();
    int box = 0, turn = 1, number = 0; // turn: the consumer warpgroup that computes this item
#pragma unroll 1
    for (int index = blockIdx.x; index < num_items; index += gridDim.x, turn = 3 - turn) {
        FfnItem item = ffn_item(list, index);
        int num_steps = item.second ? list.num_steps2 : list.num_steps1;
        if (turn != warpgroup) {
            i += num_steps;
            continue;
        }
        float sum[FfnTiles::PARTS][FfnTiles::COLUMNS / 2];
        int row = item.tile.row + warp % 4 * 16, column = item.tile.column;
        GemmColumns<FfnTiles, GemmBias<GEMM_GELU>> columns1;
        GemmColumns<FfnTiles, GemmBias<0>> columns2;
        if (item.second) {
            gemm_load_columns(columns2, bias2, column, C);
        } else {
            gemm_load_columns(columns1, bias1, column, 4 * C);
        }
        gemm_multiply<FfnTiles>(sum, smem, num_steps, number++, i);
        if (item.second) {
            gemm_store<FfnTiles>(sum, bias2, columns2, smem, maps.out_boxes, maps.out_boxes, maps.out_boxes,
                                 GemmTile{row, column}, N, box);
            continue;
        }
        gemm_store<FfnTiles>(sum, bias1, columns1, smem, maps.hidden_boxes, maps.hidden_boxes, maps.hidden_boxes,
                             GemmTile{row, column}, N, box);
        if (threadIdx.x % 32 == 0) {
            tma_store_wait_written(); // hidden must be in memory before the counter counts it
            async_proxy_fence();
            add_release(counters + item.tile.row / FfnTiles::ROWS, 1);
        }
    }
    gemm_end<FfnTiles>();
#endif
}

// counters (ffn_num_counters(N)) are 0 before and after. group: rows of tiles per group; 0: all rows in one group.
inline int ffn_num_counters(int N) { return ceil_div(N, FfnTiles::ROWS) + 1; }
void ffn4(const FfnArgs& f, int* counters, cudaStream_t stream, int group) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    FfnMaps maps;
    maps.inp = tensor_map(f.inp, {f.C, f.N}, {64, FfnTiles::ROWS});
    maps.weight1 = tensor_map(f.weight1, {f.C, 4 * f.C}, {64, FfnTiles::COLUMNS});
    maps.hidden_boxes = gemm_box_map(f.hidden, f.N, 4 * f.C);
    maps.hidden = tensor_map((const floatX*)f.hidden, {4 * f.C, f.N}, {64, FfnTiles::ROWS});
    maps.weight2 = tensor_map(f.weight2, {4 * f.C, f.C}, {64, FfnTiles::COLUMNS});
    maps.out_boxes = gemm_box_map(f.out, f.N, f.C);
    FfnList list;
    list.num_rows = ceil_div(f.N, FfnTiles::ROWS);
    list.columns1 = ceil_div(4 * f.C, FfnTiles::COLUMNS), list.columns2 = ceil_div(f.C, FfnTiles::COLUMNS);
    list.num_steps1 = ceil_div(f.C, 64), list.num_steps2 = ceil_div(4 * f.C, 64);
    require((size_t)list.num_rows * list.columns1 * (list.num_steps1 + list.num_steps2) <= INT_MAX);
    int num_items = list.num_rows * (list.columns1 + list.columns2);
    int num_blocks =
        std::min(num_items, num_multiprocessors()); // all resident at once: they wait for each other's tiles
    list.group = group ? group : list.num_rows;
    list.lag = 2 * num_blocks; // two tiles per block: time for a tile of the first product to be written
    gemm_start<FfnTiles>(ffn_sm90_kernel4, num_blocks, false, stream, counters, maps, GemmBias<GEMM_GELU>{f.bias1},
                         GemmBias<0>{f.bias2}, list, f.N, f.C);
}
#endif

// out (N,C) = gelu(inp (N,C) weight1 (4C,C)^T + bias1) weight2 (C,4C)^T + bias2; hidden (N,4C) is gelu's results.
// form: the forms of both products, as in ffn3; 0: the default. Devices and precisions without wgmma get kernel 2.
void ffn(floatX* out, floatX* hidden, const floatX* inp, const floatX* weight1, const floatX* bias1,
         const floatX* weight2, const floatX* bias2, int N, int C, cudaStream_t stream, int form = 0) {
    require(C % 8 == 0);
    FfnArgs f = {out, hidden, inp, weight1, bias1, weight2, bias2, N, C};
#if !defined(ENABLE_FP32)
    if (has_sm90a()) { return ffn3(f, stream, form ? form : 11 * GEMM_PING_PONG_192); }
#endif
    (void)form;
    ffn2(f, stream);
}

constexpr float HOT_ROW = 30.0f; // in the case of a hot row, it is this many times larger

static void declare(Bench& b) {
    int N = b.B * b.T, C = b.C;
    size_t n = (size_t)N * C, num_weights = (size_t)4 * C * C;
    bool hard = b.cases({"normal", "a hot row, a row of equal values"}) == 1;
    cudaStream_t stream = b.stream;
    if (!b.dry) { cublaslt_open(); }
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [=, &rng = b.rng](float* host) {
        bench_fill_normal(host, n, rng(), 1.0f, 0.0f);
        for (int k = 0; hard && k < C; k++) {
            host[k] *= HOT_ROW;
            host[(size_t)(N - 1) * C + k] = 1.0f;
        }
    });
    Buffer<floatX> weight1 = b.input<floatX>("weight1", num_weights, 1.0f / sqrtf((float)C));
    Buffer<floatX> bias1 = b.input<floatX>("bias1", 4 * C);
    Buffer<floatX> weight2 = b.input<floatX>("weight2", num_weights, 0.5f / sqrtf((float)C)); // 1 / sqrt(4C)
    Buffer<floatX> bias2 = b.input<floatX>("bias2", C);
    float size = hard ? HOT_ROW : 1.0f, roundings = 16 * ulp_of<float>() * 0.64f * sqrtf((float)C) * size;
    Tolerance after_gelu = ulps<floatX>(sizeof(floatX) == 4 ? 8.0f : 1.5f, 0.1f);
    after_gelu.atol += 1.13f * roundings; // 1.13: the largest slope of gelu
    Buffer<floatX> hidden = b.output<floatX>("hidden", 4 * n, after_gelu);
    Buffer<floatX> out = b.output<floatX>("out", n, {2 * ulp_of<floatX>() * size + 2 * roundings, ulp_of<floatX>()});
    Buffer<floatX> pre_gelu = b.scratch<floatX>("pre_gelu", 4 * n); // for kernel 1
    std::vector<size_t> rows = b.sample(N, 16.0 * C * C);
    b.reference([=] {
        size_t num = rows.size();
        std::vector<float> x = rows_of(inp.host, rows, C), active(num * 4 * C), y(num * C);
        matmul_forward_cpu(active.data(), x.data(), weight1.host, bias1.host, NULL, num, C, 4 * C);
        gelu_forward_cpu(active.data(), active.data(), active.size());
        put_rows(hidden.host, active, rows, 4 * C);
        bench_pieces(active.size(), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) { active[i] = (float)(floatX)active[i]; }
        });
        matmul_forward_cpu(y.data(), active.data(), weight2.host, bias2.host, NULL, num, 4 * C, C);
        put_rows(out.host, y, rows, C);
    });
    FfnArgs f = {out, hidden, inp, weight1, bias1, weight2, bias2, N, C};
    double least = sizeof(floatX) * 2.0 * ((double)n + (double)num_weights);
    double hidden_bytes = sizeof(floatX) * 4.0 * (double)n;
    b.cost(least, 16.0 * (double)n * C);
    b.kernel(1, "matmul_forward, gelu_forward, matmul_forward", [=](int) { ffn1(f, pre_gelu, stream); }, {0});
    b.moves(3, least + 4 * hidden_bytes);
    const bool fused = sizeof(floatX) == 2;
    b.kernel(2, fused ? "cuBLASLt, gelu in its epilogue" : "cuBLASLt, gelu_forward in place",
             [=](int) { ffn2(f, stream); }, {0});
    b.moves(fused ? 2 : 3, least + (fused ? 2 : 4) * hidden_bytes);
#if !defined(ENABLE_FP32)
    Buffer<int> zeros = b.input_ids("zeros", ffn_num_counters(N), 1);
    Buffer<int> counters = b.inout<int>("counters", ffn_num_counters(N), zeros, {0, 0});
    b.reference([=] { memcpy(counters.host, zeros.host, ffn_num_counters(N) * sizeof(float)); });
    const int single = 11 * GEMM_PING_PONG_192, pairs = 11 * GEMM_PING_PONG_192_PAIRS;
    const int long_cooperative = 10 * GEMM_COOPERATIVE_256_PAIRS + GEMM_PING_PONG_192_PAIRS;
    b.kernel(
        3, "gemm.cuh twice, the second launched early",
        [=](int form) { ffn(out, hidden, inp, weight1, bias1, weight2, bias2, N, C, stream, form); },
        {0, single, pairs, long_cooperative}, -90);
    b.config("forms", [](int forms) -> std::string {
        if (forms == 0 || forms / 10 == forms % 10) { return gemm_form_name(forms % 10); }
        return std::string(gemm_form_name(forms / 10)) + "; then " + gemm_form_name(forms % 10);
    });
    b.moves(2, least + 2 * hidden_bytes);
    b.kernel(
        4, "one launch, tiles of both products in one list", [=](int group) { ffn4(f, counters, stream, group); },
        {0, 33, 66},
        -90); // at C = 768, 33 rows of tiles are one tile of the second product per SM: 33 * 4 = 132
    b.config("tile rows per group");
    b.moves(1, least + hidden_bytes); // hidden is written to memory, but read from L2
    b.best(3);
#else
    b.best(2);
#endif
    b.matrix_rate(cublaslt_matrix_rate);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "ffn", declare, {32, 512, 768, 12, 50257},
                      {{1, 1, 8},
                       {1, 1, 384},
                       {1, 5, 776},
                       {3, 43, 136},
                       {1, 127, 1600},
                       {2, 640, 256},
                       {5, 1000, 64},
                       {1, 130, 768}});
}
