/*
The forms of gemm.cuh that were slower or that only fused ops need: cooperative kernels, blocks without a cluster, e4m3 operands and
results, a layernorm in the epilogue. matmul_forward.cu, kernel 27, has them as configurations.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/ptx.cuh"
#include "gemm.cuh"
#include <cuda_fp8.h>

#if !defined(ENABLE_FP32)

// ---- other forms: cooperative, without clusters, other tiles ------------------------------------------------------
// In a cooperative form, both consumers work on one larger tile, each on 64 of its rows. Such forms are meant for a
// long K.

// A form, defined by its parameters. Cluster is GemmPair or GemmSingle.
template <int rows, int columns, bool ping_pong, class Cluster, int ring, int boxes> struct GemmTiles : Cluster {
    static constexpr int ROWS = rows, COLUMNS = columns, RING = ring, BOXES = boxes;
    static constexpr int PARTS = rows / (ping_pong ? 64 : 128), READERS = ping_pong ? 4 : 8;
    static_assert(PARTS >= 1 && PARTS * columns <= 2 * 192, "so many accumulators fit a thread's registers");
    template <int n> static __device__ void wgmma(float (&sum)[n], uint64_t inp, uint64_t weight, bool accumulate) {
        static_assert(n == 64 || n == 96 || n == 128, "128, 192 or 256 columns");
        if constexpr (n == 64) { wgmma_64x128x16(sum, inp, weight, accumulate, floatX()); }
        if constexpr (n == 96) { wgmma_64x192x16(sum, inp, weight, accumulate, floatX()); }
        if constexpr (n == 128) { wgmma_64x256x16(sum, inp, weight, accumulate, floatX()); }
    }
};
// The form G with e4m3 operands. The code addresses two e4m3 elements as one floatX, so it counts pairs of elements
// along K. A stage thus holds 128 columns of K in the same number of bytes, and its products take the same number of
// cycles.
template <class G> struct GemmTilesE4M3 : G {
    template <int n> static __device__ void wgmma(float (&sum)[n], uint64_t inp, uint64_t weight, bool accumulate) {
        static_assert(n == 64 || n == 96 || n == 128, "128, 192 or 256 columns");
        if constexpr (n == 64) { wgmma_64x128x32_e4m3(sum, inp, weight, accumulate); }
        if constexpr (n == 96) { wgmma_64x192x32_e4m3(sum, inp, weight, accumulate); }
        if constexpr (n == 128) { wgmma_64x256x32_e4m3(sum, inp, weight, accumulate); }
    }
};
template <class G> using GemmTilesSame = G;

typedef GemmTiles<128, 256, false, GemmSingle, 4, 2> GemmCooperative256;
typedef GemmTiles<128, 256, false, GemmPair, 4, 2> GemmCooperative256Pairs;
typedef GemmTiles<128, 128, true, GemmPair, 5, 4> GemmPingPong128Pairs;
// The numbers of the forms, which the benchmark takes as configurations.
enum {
    GEMM_PING_PONG_192 = 1,
    GEMM_PING_PONG_192_PAIRS, // the promoted form
    GEMM_COOPERATIVE_256,
    GEMM_COOPERATIVE_256_PAIRS,
    GEMM_PING_PONG_128_PAIRS
};
// What these numbers stand for; 0 stands for the launcher's default.
inline const char* gemm_form_name(int form) {
    const char* names[] = {"default",
                           "ping-pong 128x192",
                           "ping-pong 128x192 in clusters of two",
                           "cooperative 128x256",
                           "cooperative 128x256 in clusters of two",
                           "ping-pong 128x128 in clusters of two"};
    return form >= 0 && form < 6 ? names[form] : "unknown";
}

// ---- other epilogues ----------------------------------------------------------------------------------------------

enum { GEMM_E4M3 = 8 }; // out is e4m3, its columns permuted as gemm_store_e4m3 does; only combines with GEMM_GELU

__device__ inline float4 gemm_shuffle(const float4& pair, int lane) {
    return make_float4(__shfl_sync(0xFFFFFFFFu, pair.x, lane), __shfl_sync(0xFFFFFFFFu, pair.y, lane),
                       __shfl_sync(0xFFFFFFFFu, pair.z, lane), __shfl_sync(0xFFFFFFFFu, pair.w, lane));
}

// The epilogue of a linear layer after a layernorm, for a product whose inp has not been normalised:
//     y = rstd_i * (sum - mean_i * u_j) + v_j
// The layernorm's weight is multiplied into `weight`. u (N) are the sums of the rows of that weight, v (N) is the
// layernorm's bias passed through the layer, plus the layer's own bias.
template <int extras> struct GemmLayernorm {
    static constexpr int EXTRAS = extras;
    const float *mean, *rstd; // (M)
    const float2* sums;       // (N), each is u, v; aligned to 16 bytes

    struct Row {
        float mean, rstd;
    };
    typedef float4 Pair;
    struct Column {
        float u, v;
    };
    __device__ Row row(int row) const { return {mean[row], rstd[row]}; }
    __device__ Pair pair(int column) const { return __ldg(reinterpret_cast<const float4*>(sums + column)); }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        c[0].u = pair.x, c[0].v = pair.y, c[1].u = pair.z, c[1].v = pair.w;
    }
    __device__ float value(float sum, const Row& r, const Column& c) const {
        return r.rstd * (sum - r.mean * c.u) + c.v;
    }
};

// The epilogue y = sum * scale + bias, where scale undoes the scales of the two e4m3 operands.
template <int extras> struct GemmScaledBias : GemmBias<extras> {
    const float *inp_scale, *weight_scale; // one float each, 1 / (the factor by which the operand was multiplied)
    __nv_fp8_e4m3* out;                    // (M,N), used with GEMM_E4M3 only
    const float* out_scale;                // one float, multiplies the results; used with GEMM_E4M3 only

    // Set by begin(), once per kernel. With both GEMM_GELU and GEMM_E4M3, value() returns x = y * out_scale / 2. Then
    // out_scale * gelu(y) = x tanh(x (a + b x^2)) + x, which saves two multiplications per element.
    float scale, out_multiplier, a, b;

    typedef typename GemmBias<extras>::Row Row;
    static constexpr bool IS_E4M3 = extras & GEMM_E4M3, IS_GELU = extras & GEMM_GELU;
    __device__ void begin() {
        scale = __ldg(inp_scale) * __ldg(weight_scale);
        if (IS_E4M3) {
            out_multiplier = IS_GELU ? 0.5f * __ldg(out_scale) : __ldg(out_scale);
            scale *= out_multiplier;
            a = 0.7978845608f / out_multiplier;                                     // sqrt(2/pi)
            b = 0.0356774081f / (out_multiplier * out_multiplier * out_multiplier); // 0.044715 sqrt(2/pi)
        }
    }
    __device__ void columns(float (&c)[2], uint32_t pair) const {
        GemmBias<extras>::columns(c, pair);
        if (IS_E4M3) { c[0] *= out_multiplier, c[1] *= out_multiplier; }
    }
    __device__ float value(float sum, const Row&, float c) const { return fmaf(sum, scale, c); }
    __device__ float finish(float x) const { return IS_GELU ? fmaf(x, tanh_approx(x * fmaf(x * x, b, a)), x) : x; }
};
template <class Epilogue> constexpr bool gemm_is_scaled = false;
template <int extras> constexpr bool gemm_is_scaled<GemmScaledBias<extras>> = true;

// Like gemm_store, but out (M,N) is e4m3 and is stored from registers; N % 64 == 0. Columns are permuted within each
// group of 64: column 8j + 2t + e, with t < 4 and e < 2, is stored at position 16t + 2j + e. A thread's results in a
// row and a group are then one store of 16 bytes. If `out` is an input of another product, the columns of that
// product's weight must be permuted in the same way; gemm_e4m3_column gives the order.
template <class G, class Epilogue>
__device__ inline void gemm_store_e4m3(float (&sum)[G::PARTS][G::COLUMNS / 2], const Epilogue& epilogue,
                                       const GemmColumns<G, Epilogue>& columns, int row, int column, int M, int N) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < G::PARTS * (G::COLUMNS / 64); n++) {
        const int m = n % G::PARTS, q = n / G::PARTS;
        typename Epilogue::Row rows[2];
        uint32_t words[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows[half] = epilogue.row(min(row + 64 * m + 8 * half + lane / 4, M - 1));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { // 16 columns per iteration
            typename Epilogue::Column two[2][2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                epilogue.columns(two[j], gemm_shuffle(columns.pairs[q], 8 * i + 4 * j + lane % 4));
            }
#pragma unroll
            for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
                float y[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float x = sum[m][32 * q + 8 * i + k / 2 * 4 + 2 * half + k % 2];
                    y[k] = epilogue.finish(epilogue.value(x, rows[half], two[k / 2][k % 2]));
                }
                words[half][i] = pack_e4m3x4(y[0], y[1], y[2], y[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = row + 64 * m + 8 * half + lane / 4, first = column + 64 * q;
            if (at < M && first < N) {
                *reinterpret_cast<uint4*>(epilogue.out + (size_t)at * N + first + lane % 4 * 16) =
                    make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
            }
        }
    }
}
// The column, within a group of 64, that is stored at position `place`.
__host__ __device__ inline int gemm_e4m3_column(int place) { return place % 16 / 2 * 8 + place / 16 * 2 + place % 2; }

// ---- the kernel for all forms and epilogues -----------------------------------------------------------------------

// Like gemm_sm90_kernel9, but also for cooperative forms and scaled epilogues.
template <class G, class Epilogue> __global__ void __launch_bounds__(384, 1)
    gemm_forms_sm90_kernel(const __grid_constant__ GemmMaps maps, Epilogue epilogue, int M, int N, int K,
                           int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(gemm_dynamic);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles);
    if (warp < 4) { return; }
    if constexpr (gemm_is_scaled<Epilogue>) { epilogue.begin(); }
    gemm_consume(smem, warp, maps, epilogue, M, N, K, num_tiles, [&](auto& sum, auto& columns, auto& tile, int& box) {
        if constexpr (Epilogue::EXTRAS & GEMM_E4M3) {
            gemm_store_e4m3<G>(sum, epilogue, columns, tile.row, tile.column, M, N);
        } else {
            gemm_store<G>(sum, epilogue, columns, smem, maps.out, maps.second, maps.third, tile, M, box);
        }
    });
    gemm_end<G>();
#endif
}

// ---- launch -------------------------------------------------------------------------------------------------------

// Like gemm(), with the form G. If GEMM_E4M3 is set, g.out is NULL, because the epilogue has its own pointer `out`.
template <class G, class Epilogue>
void gemm_tiles(const GemmArgs& g, const Epilogue& epilogue, bool early, const Execution& exec) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require((g.second != NULL) == ((Epilogue::EXTRAS & GEMM_SECOND) != 0));
    require((g.third != NULL) == ((Epilogue::EXTRAS & GEMM_THIRD) != 0));
    int num_tiles = gemm_num_tiles<G>(g.M, g.N, g.K);
    GemmMaps maps = gemm_maps<G>(g);
    if constexpr (gemm_is_ping_pong<G> && !gemm_is_scaled<Epilogue>) {
        gemm_start<G>(gemm_sm90_kernel9<G, Epilogue>, num_tiles, early, exec, maps, epilogue, g.M, g.N, g.K, num_tiles,
                      GemmNoIdleWork());
    } else {
        gemm_start<G>(gemm_forms_sm90_kernel<G, Epilogue>, num_tiles, early, exec, maps, epilogue, g.M, g.N, g.K,
                      num_tiles);
    }
}

// Like gemm(), with form number `form`.
template <class Epilogue, template <class> class Tiles = GemmTilesSame>
void gemm_form(const GemmArgs& g, const Epilogue& epilogue, bool early, const Execution& exec, int form) {
    switch (form) {
    case GEMM_PING_PONG_192:
        return gemm_tiles<Tiles<GemmPingPong192<GemmSingle>>>(g, epilogue, early, exec);
    case GEMM_PING_PONG_192_PAIRS:
        return gemm_tiles<Tiles<GemmPingPong192Pairs>>(g, epilogue, early, exec);
    case GEMM_COOPERATIVE_256:
        return gemm_tiles<Tiles<GemmCooperative256>>(g, epilogue, early, exec);
    case GEMM_COOPERATIVE_256_PAIRS:
        return gemm_tiles<Tiles<GemmCooperative256Pairs>>(g, epilogue, early, exec);
    case GEMM_PING_PONG_128_PAIRS:
        return gemm_tiles<Tiles<GemmPingPong128Pairs>>(g, epilogue, early, exec);
    }
    require(!"a form of gemm");
}

// Like gemm_form, but the operands are e4m3, (M,K) and (N,K), K % 16 == 0. g's pointers to them are cast to floatX, so
// g.K counts pairs of elements: it is half of K.
template <class Epilogue>
void gemm_form_e4m3(const GemmArgs& g, const Epilogue& epilogue, bool early, const Execution& exec, int form) {
    require(!(Epilogue::EXTRAS & GEMM_E4M3) || g.N % 64 == 0);
    gemm_form<Epilogue, GemmTilesE4M3>(g, epilogue, early, exec, form);
}

#endif
