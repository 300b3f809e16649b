/*
matmul_fp8_forward, _gelu, _backward_input, _gelu_backward, _backward_weight: a linear layer and its backward pass with operands
in e4m3 and e5m2, each product as out (M,N) = a (M,K) b (N,K)^T * a_scale * b_scale + bias
Constraint: 16-bit floatX, a GPU with fp8 tensor cores; C % 16 == 0, OC % 16 == 0. matmul_fp8_gelu and matmul_fp8_gelu_backward: sm_90a
and N % 16 == 0. matmul_fp8_backward_weight: N % 16 == 0.
Kernels 2 (cuBLASLt) and 7, 8 and 11 (gemm with fp8 copies of the result) of matmul_fp8.cu, which has the other kernels, errors and
sources.
*/
#pragma once

#include "../../llmc/column_sums.cuh"
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/fp8.cuh"
#include "../../llmc/gelu.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "gemm.cuh"
#include <cuda_fp8.h>

// ==== promoted: matmul_fp8 ====
// out (M,N) = a (M,K) b (N,K)^T * a_scale * b_scale + bias: a linear layer, or one product of its backward pass, see the
// operations below.
template <class A> struct MatmulFp8Args {
    floatX* out;                // (M,N), or NULL
    float* sum;                 // (M,N), if out is NULL
    bool accumulate;            // the product is added to sum
    Fp8Matrix<A> a;             // (M,K), e4m3 or e5m2
    Fp8Matrix<__nv_fp8_e4m3> b; // (N,K)
    const floatX* bias;         // (N), or NULL
    int M, N, K;
};

#if !defined(ENABLE_FP32) // the library has no such product with a bias in fp32, gemm.cuh none in fp32
// By cuBLASLt; fast: see MatmulCall::fast_accumulation.
template <class A> void matmul_fp8_2(const MatmulFp8Args<A>& p, bool fast, const Execution& exec) {
    MatmulCall call;
    call.a = p.a.values, call.b = p.b.values, call.b_transposed = true, call.bias = p.bias;
    call.a_type = Fp8<A>::IS_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3, call.b_type = CUDA_R_8F_E4M3;
    call.a_scale = p.a.inverse, call.b_scale = p.b.inverse, call.fast_accumulation = fast;
    call.M = p.M, call.N = p.N, call.K = p.K;
    call.out = p.out;
    if (!p.out) { call.out = p.sum, call.out_is_float = true, call.add = p.accumulate ? p.sum : NULL; }
    require(cublaslt_matmul(call, exec));
}

// The form of gemm.cuh for fp8. The code addresses two elements as one floatX, so it counts pairs of elements along K. A
// stage thus holds 128 columns of K in the same number of bytes, and its products take the same number of cycles. With 2 boxes
// per warp, there is room for two tiles of both consumers.
template <class A> struct MatmulFp8Form : GemmPingPong192Pairs {
    static constexpr int BOXES = 2;
    static __device__ void wgmma(float (&sum)[96], uint64_t a, uint64_t b, bool accumulate) {
        if constexpr (Fp8<A>::IS_E5M2) {
            wgmma_64x192x32_e5m2_e4m3(sum, a, b, accumulate);
        } else {
            wgmma_64x192x32_e4m3(sum, a, b, accumulate);
        }
    }
};

// ---- kernels 7 and 8: both fp8 copies of the result in the epilogue ----

// A consumer takes its accumulators in tiles of 64x64, through shared memory, from which TMA stores them. A thread has
// columns 2t and 2t + 1 of rows g and g + 8 in each fragment of 8 columns. Quantised, they are a word:
//
//     byte                 0      1      2        3
//     row, column       g,2t  g+8,2t  g,2t+1  g+8,2t+1
//
// Its halves are pairs of tokens, so stmatrix with the transposition stores it to `columns`, in the order 0 8 1 9 ...
// For `rows`, lanes 2i and 2i + 1 exchange words, and then have 4 neighbouring columns of rows g and g + 8, one lane in
// this fragment, the other one in the next.

struct alignas(1024) MatmulFp8Tile { // rows of 64 bytes, swizzled as tensor_map() says
    unsigned char rows[64 * 64], columns[64 * 64];
};
// The byte of chunk `chunk` of 16 bytes in row `row` of such a matrix.
__device__ inline int matmul_fp8_swizzled(int row, int chunk) { return row * 64 + (chunk ^ (row / 2 % 4)) * 16; }

// rows (M,N) and columns (N,M): of floatX, as which TMA sees two fp8 elements
struct MatmulFp8Maps : GemmMaps {
    CUtensorMap rows, columns;
};

template <class G> struct MatmulFp8SMem : GemmSMem<G> { MatmulFp8Tile tiles[2][2]; };

// The epilogue's value: y = sum * scale + bias; see GemmBias.
template <int extras> struct MatmulFp8Epilogue : GemmBias<extras> {
    const float *a_scale, *b_scale; // what a stored 1 stands for
    float scale;                    // their product, set at the beginning of the kernel
    __device__ float value(float sum, float bias) const { return fmaf(sum, scale, bias); }
};

enum MatmulFp8Mode {
    MATMUL_FP8_MODE_GELU,       // x = gelu(y)
    MATMUL_FP8_MODE_SAVE_SLOPE, // the same, and GELU's slope at y is stored to maps.second
    MATMUL_FP8_MODE_TIMES_SLOPE // x = y * the matrix of maps.third
};

// x in type F, rows and columns. has_sums: the columns of x are also summed, before they are rounded.
template <class F, MatmulFp8Mode mode, bool has_sums = false> struct MatmulFp8Quantized {
    static constexpr int EXTRAS = mode == MATMUL_FP8_MODE_TIMES_SLOPE ? GEMM_THIRD | GEMM_NO_BIAS : 0;
    typedef MatmulFp8Epilogue<EXTRAS> Epilogue;
    Fp8Tensor<F> to;
    float* sums; // (row tiles, N), see GemmBiasSums; NULL unless has_sums
    __device__ Fp8Seen<F> seen() const { return Fp8Seen<F>(to); }

    // The words of 16 columns, two fragments: sum has their accumulators, column 16 * p of the box is the first.
    // slopes: the fragments of GELU's slope, read or written. column_sums: of this lane's two rows, added to them.
    template <class G> __device__ void words(uint32_t (&words)[2], uint32_t (&slopes)[4], Fp8Seen<F>& seen,
                                             const float* sum, const Epilogue& epilogue, typename Epilogue::Pair pair,
                                             int p, float* column_sums) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float two[2] = {}, v[4], slope[4];
            if constexpr (mode == MATMUL_FP8_MODE_TIMES_SLOPE) {
                float2 upper = unpack_16x2(slopes[2 * j], floatX()), lower = unpack_16x2(slopes[2 * j + 1], floatX());
                slope[0] = upper.x, slope[1] = upper.y, slope[2] = lower.x, slope[3] = lower.y;
            } else {
                epilogue.columns(two, gemm_shuffle(pair, 8 * p + 4 * j + threadIdx.x % 4));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float y = epilogue.value(sum[4 * j + i], two[i % 2]), x;
                if constexpr (mode == MATMUL_FP8_MODE_TIMES_SLOPE) { x = y * slope[i]; }
                if constexpr (mode != MATMUL_FP8_MODE_TIMES_SLOPE) { x = gelu_and_slope_approx(y, &slope[i]); }
                v[i] = seen.scaled(x);
                if (has_sums) { column_sums[2 * j + i % 2] += x; }
            }
            if constexpr (mode == MATMUL_FP8_MODE_SAVE_SLOPE) { gemm_pack(slopes + 2 * j, slope); }
            words[j] = Fp8<F>::pack(v[0], v[2], v[1], v[3]);
        }
    }
    // Stores them to the tile's rows. at: chunk 16 * p of row g of this warp.
    __device__ void store_rows(unsigned char* at, const uint32_t (&words)[2]) const {
        bool odd = threadIdx.x & 1;
        // the rows' halves: columns 2t, 2t + 1 of row g, of row g + 8
        uint32_t first = __byte_perm(words[0], 0, 0x3120), second = __byte_perm(words[1], 0, 0x3120);
        uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
        uint32_t left = odd ? got : first, right = odd ? second : got;
        // t = 0 and 2 have columns 0-3 and 4-7 of the 16, t = 1 and 3 columns 8-11 and 12-15
        unsigned char* p = at + (odd ? 8 : 0) + threadIdx.x % 4 / 2 * 4;
        *reinterpret_cast<uint32_t*>(p) = __byte_perm(left, right, 0x5410);
        *reinterpret_cast<uint32_t*>(p + 8 * 64) = __byte_perm(left, right, 0x7632); // swizzled as row g is
    }
    // Stores a tile of the consumer. Its two tiles take turns: the barrier also says that the other one has been read.
    template <class G> __device__ void store(Fp8Seen<F>& seen, float (&sum)[G::PARTS][G::COLUMNS / 2],
                                             const Epilogue& epilogue, const GemmColumns<G, Epilogue>& columns,
                                             GemmSMem<G>& smem, MatmulFp8Tile (&tiles)[2], const MatmulFp8Maps& maps,
                                             const GemmTile& tile, int M, int N, int& box) const {
        static_assert(G::READERS == 4 && G::BOXES == 2, "a tile is one consumer's, which has two");
        const int num_columns = G::COLUMNS / 64, num_boxes = G::PARTS * num_columns;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, first_box = box, warp_row = warp % 4 * 16;
        bool stores = threadIdx.x % 128 == 1;    // lane 1, because lane 0 waits for its stores of slopes apart
        float column_sums[num_columns][16] = {}; // of this lane's rows, see fragment_column_sums
        uint32_t lane_at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16; // in a box of slopes, as in gemm_store
#pragma unroll
        for (int n = 0; n < num_boxes; n++, box++) {
            const int m = n / num_columns, q = n % num_columns;
            int slot = box % G::BOXES, box_row = tile.row + 64 * m, box_column = tile.column + 64 * q;
            uint32_t at = shared_address(smem.boxes[warp][slot]) + lane_at;
            MatmulFp8Tile& values = tiles[slot];
            if (mode == MATMUL_FP8_MODE_TIMES_SLOPE) { mbarrier_wait(&smem.box_full[warp][slot], box / G::BOXES % 2); }
            if (mode == MATMUL_FP8_MODE_SAVE_SLOPE) {
                if (lane == 0) { tma_store_wait<G::BOXES - 1>(); }
                __syncwarp();
            }
#pragma unroll
            for (int p = 0; p < 4; p += 2) { // 32 columns, of which stmatrix stores 4 matrices
                uint32_t fragments[2][2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t slopes[4];
                    if (mode == MATMUL_FP8_MODE_TIMES_SLOPE) { ldmatrix_x4(slopes, at ^ (p + i) << 5); }
                    float largest = seen.amax;
                    words<G>(fragments[i], slopes, seen, sum[m] + 32 * q + 8 * (p + i), epilogue, columns.pairs[q],
                             p + i, column_sums[q] + 4 * (p + i));
                    // past the end there are biases without products; M and N are multiples of 16
                    if (mode != MATMUL_FP8_MODE_TIMES_SLOPE && (box_row >= M || box_column + 16 * (p + i) >= N)) {
                        seen.amax = largest;
                    }
                    if (mode == MATMUL_FP8_MODE_SAVE_SLOPE) { stmatrix_x4(at ^ (p + i) << 5, slopes); }
                    store_rows(values.rows + matmul_fp8_swizzled(warp_row + lane / 4, p + i), fragments[i]);
                }
                stmatrix_x4_trans(shared_address(values.columns + matmul_fp8_swizzled(16 * p + lane, warp % 4)),
                                  fragments[0]);
            }
            if (stores) { tma_store_wait<0>(); }
            tma_store_fence(); // tile and box were read, or written, by ordinary accesses
            gemm_consumer_sync();
            if (stores) {
                tma_store_2d(&maps.rows, values.rows, box_column / 2, box_row - warp_row);
                tma_store_2d(&maps.columns, values.columns, (box_row - warp_row) / 2, box_column);
                tma_store_commit();
            }
            if (mode == MATMUL_FP8_MODE_SAVE_SLOPE && lane == 0) {
                tma_store_2d(&maps.second, smem.boxes[warp][slot], box_column, box_row);
                tma_store_commit();
            }
            if (mode == MATMUL_FP8_MODE_TIMES_SLOPE && lane == 0 && n + G::BOXES < num_boxes) {
                gemm_load_box<G>(smem, maps.third, tile, n + G::BOXES, first_box);
            }
        }
        if constexpr (has_sums) { gemm_store_sums<G>(column_sums, sums, smem, tile.row, tile.column, M, N); }
    }
};

// Like gemm_sm90_kernel9, for a quantised result.
template <class G, class Result> __global__ void __launch_bounds__(384, 1)
    matmul_fp8_sm90_kernel7(const __grid_constant__ MatmulFp8Maps maps, typename Result::Epilogue epilogue,
                            Result result, int M, int N, int K, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    auto& smem = shared_aligned_1024<MatmulFp8SMem<G>>(gemm_dynamic);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles);
    if (warp < 4) { return; }
    auto& tiles = smem.tiles[warp / 4 - 1];
    epilogue.scale = __ldg(epilogue.a_scale) * __ldg(epilogue.b_scale);
    auto seen = result.seen();
    gemm_consume(smem, warp, maps, epilogue, M, N, K, num_tiles, [&](auto& sum, auto& columns, auto& tile, int& box) {
        result.template store<G>(seen, sum, epilogue, columns, smem, tiles, maps, tile, M, N, box);
    });
    seen.store_warp(result.to);
    if (threadIdx.x % 128 == 1) { tma_store_wait<0>(); }
    gemm_end<G>();
#endif
}

// second, third (M,N): GELU's slope, written to second or read from third, or NULL
template <class A, class Result> static void matmul_fp8_launch7(const MatmulFp8Args<A>& p, const Result& result,
                                                                floatX* second, const floatX* third,
                                                                const Execution& exec) {
    typedef MatmulFp8Form<A> G;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(p.M % 16 == 0 && p.N % 16 == 0 && p.K % 16 == 0);
    // gemm.cuh addresses two fp8 elements as one floatX
    GemmArgs g = {NULL, second, (const floatX*)p.a.values, (const floatX*)p.b.values, third, p.M, p.N, p.K / 2};
    typename Result::Epilogue epilogue = {{p.bias}, p.a.inverse, p.b.inverse, 0.0f};
    MatmulFp8Maps maps = {gemm_maps<G>(g), tensor_map((floatX*)result.to.rows, {p.N / 2, p.M}, {32, 64}),
                          tensor_map((floatX*)result.to.columns, {p.M / 2, p.N}, {32, 64})};
    int num_tiles = gemm_num_tiles<G>(g.M, g.N, g.K);
    gemm_start<G, MatmulFp8SMem<G>>(matmul_fp8_sm90_kernel7<G, Result>, num_tiles, true, exec, maps, epilogue, result,
                                    g.M, g.N, g.K, num_tiles);
}

// rows, columns = gelu(y); slope (M,N) = GELU's slope at y, for the backward pass
void matmul_fp8_8(const MatmulFp8Args<__nv_fp8_e4m3>& p, const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* slope,
                  const Execution& exec) {
    matmul_fp8_launch7(p, MatmulFp8Quantized<__nv_fp8_e4m3, MATMUL_FP8_MODE_SAVE_SLOPE>{to, NULL}, slope, NULL, exec);
}

// ---- kernel 11: 10 that also sums the columns of its result, which is the gradient of a bias ----

// rows, columns = dX times the slope that kernel 8 has saved, in the type of dout; sums (N) += the sums of its columns;
// partials (ceil(M / 128), N) is scratch
template <class A> void matmul_fp8_11(const MatmulFp8Args<A>& p, const Fp8Tensor<A>& to, float* sums, float* partials,
                                      const floatX* slope, const Execution& exec) {
    matmul_fp8_launch7(p, MatmulFp8Quantized<A, MATMUL_FP8_MODE_TIMES_SLOPE, true>{to, partials}, NULL, slope, exec);
    column_sums<16>(sums, NULL, NULL, partials, ceil_div(p.M, 128), p.N, exec);
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias
void matmul_fp8_forward(floatX* out, const Fp8Matrix<__nv_fp8_e4m3>& inp, const Fp8Matrix<__nv_fp8_e4m3>& weight,
                        const floatX* bias, int N, int C, int OC, const Execution& exec) {
    Op op(exec, (double)N * C + (double)OC * C + (double)N * OC * sizeof(floatX), 2.0 * N * C * OC,
          "matmul_fp8_forward %d -> %d", C, OC);
    matmul_fp8_2(MatmulFp8Args<__nv_fp8_e4m3>{out, NULL, false, inp, weight, bias, N, OC, C}, true, exec);
}
void matmul_fp8_gelu(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* slope, const Fp8Matrix<__nv_fp8_e4m3>& inp,
                     const Fp8Matrix<__nv_fp8_e4m3>& weight, const floatX* bias, int N, int C, int OC,
                     const Execution& exec) {
    Op op(exec, (double)N * C + (double)OC * C + (double)N * OC * (sizeof(floatX) + 2), 2.0 * N * C * OC,
          "matmul_fp8_gelu %d -> %d", C, OC);
    matmul_fp8_8({NULL, NULL, false, inp, weight, bias, N, OC, C}, to, slope, exec);
}
void matmul_fp8_backward_input(floatX* dinp, const Fp8Matrix<__nv_fp8_e5m2>& dout,
                               const Fp8Matrix<__nv_fp8_e4m3>& weight, int N, int C, int OC, const Execution& exec) {
    Op op(exec, (double)N * OC + (double)OC * C + (double)N * C * sizeof(floatX), 2.0 * N * C * OC,
          "matmul_fp8_backward_input %d <- %d", C, OC);
    matmul_fp8_2(MatmulFp8Args<__nv_fp8_e5m2>{dinp, NULL, false, dout, weight, NULL, N, C, OC}, false, exec);
}
void matmul_fp8_gelu_backward(const Fp8Tensor<__nv_fp8_e5m2>& to, float* dinp_sums, float* scratch,
                              const Fp8Matrix<__nv_fp8_e5m2>& dout, const Fp8Matrix<__nv_fp8_e4m3>& weight,
                              const floatX* slope, int N, int C, int OC, const Execution& exec) {
    Op op(exec, (double)N * OC + (double)OC * C + (double)N * C * (sizeof(floatX) + 2), 2.0 * N * C * OC,
          "matmul_fp8_gelu_backward %d <- %d", C, OC);
    matmul_fp8_11({NULL, NULL, false, dout, weight, NULL, N, C, OC}, to, dinp_sums, scratch, slope, exec);
}
void matmul_fp8_backward_weight(float* dweight, const Fp8Matrix<__nv_fp8_e5m2>& dout,
                                const Fp8Matrix<__nv_fp8_e4m3>& inp, int N, int C, int OC, bool accumulate,
                                const Execution& exec) {
    Op op(exec, (double)N * (C + OC) + (accumulate ? 8.0 : 4.0) * C * OC, 2.0 * N * C * OC,
          "matmul_fp8_backward_weight %d <- %d", C, OC);
    matmul_fp8_2(MatmulFp8Args<__nv_fp8_e5m2>{NULL, dweight, accumulate, dout, inp, NULL, OC, C, N}, false, exec);
}
#endif
size_t matmul_fp8_gelu_backward_scratch(int N, int C) { return (size_t)ceil_div(N, 128) * C; }
// ==== end promoted: matmul_fp8 ====
