/* matmul_fp8: the products of a linear layer, out = inp weight^T + bias, and of its backward pass, with fp8 operands

   kind 0, forward     out (N,OC) floatX = inp (N,C) weight (OC,C)^T + bias (OC) floatX
   kind 1, 3, dX       dinp (N,C) floatX = dout (N,OC) columns of the weight (C,OC)^T
   kind 2, 4, dW       dweight (OC,C) float += columns of dout (OC,N) columns of inp (C,N)^T
   kind 5, GELU        rows (N,OC) and columns (OC,N) e4m3 = gelu(inp (N,C) weight (OC,C)^T + bias (OC)), with amax (1)
                       float and num_saturated (1) int inout, as quantize has them; scale (1) float in
   N = B*T. dout is e5m2 in kinds 1 and 2, all other operands are e4m3. `columns` are what quantize and layernorm_quantize
   store beside the rows, see fp8.cuh: the tensor cores of Hopper want k, the dimension of the sum, contiguous in both
   operands, so all three are the same product, written as

   out (M,N) = a (M,K) b (N,K)^T * a_scale * b_scale + bias | a_scale, b_scale (1) float in: one per tensor

   Bound: compute, 2*M*N*K FLOPs. Constraint: C % 16 == 0, OC % 16 == 0; in kinds 2, 4 and 5 N % 16 == 0, too.
   Error to the fp64 product of the quantised values, whose size is 1 here: an ulp of floatX, and what the tensor cores
   lose. They keep 14 bits of the terms of a sum, aligned to the largest (DeepSeek-AI 2024, arXiv:2412.19437, section
   3.5.2): with q = 2^-13, a wgmma of 32 products loses up to q of the sum so far. With partial sums of 128 products, 0.5%
   (40 q) of a sum of terms of one sign, and 2% (160 q) of 1, where terms cancel. With one sum over K (kernels 0, 2, 4, 6
   and 7) 1 + K/1280 times as much. Kind 5: rows and columns must be what the CPU makes of a number that close to the exact
   one, times 1.13, GELU's largest slope.
   Source: Micikevicius et al. 2022, arXiv:2209.05433; partial sums in fp32: DeepSeek-AI 2024, section 3.3.2; wgmma and
   TMA: the PTX ISA; tiles: gemm.cuh.

   Kernels (this list is written by versions.sh):
     0  cuBLASLt, first proposal
     1  one thread per element
     2  cuBLASLt, algorithms timed
     3  2 with partial sums in fp32
     4  gemm.cuh with wgmma of fp8
     5  4 with partial sums of 128 products in fp32
     6  not fused: 4, then kernel 5 of quantize with GELU (kind 5)
     7  4 with GELU and both e4m3 copies in the epilogue (kind 5)
     kind 5: forward with GELU in e4m3, with the transposed copy

   nvcc -O3 --use_fast_math matmul_fp8.cu -lcublasLt -o matmul_fp8      (or: make matmul_fp8)
   ./matmul_fp8 5                check kernel 5 against the CPU and time it
   ./matmul_fp8 --kind 2         dW: every kernel, side by side
   ./matmul_fp8 -C 768 -V 2304   here -V is OC                                        */
#define PROMOTED_ONLY
#include "gelu_backward.cu"
#include "gelu_forward.cu"
#include "quantize.cu"
#undef PROMOTED_ONLY
#include "bench.h"
#include "cublaslt_linear.cuh"
#include "fp8.cuh"
#include "gemm.cuh"

template <class A> struct MatmulFp8Args {
    floatX* out;                    // (M,N), or NULL
    float* sum;                     // (M,N), to which the product is added, or NULL
    const A* a;                     // (M,K)
    const __nv_fp8_e4m3* b;         // (N,K)
    const float *a_scale, *b_scale; // what a stored 1 stands for
    const floatX* bias;             // (N), or NULL
    int M, N, K;
};

#if !defined(ENABLE_FP32) // the library has no such product with a bias in fp32, gemm.cuh none in fp32

// ---- kernel 0: cuBLASLt, its first proposal ----

template <class A> void matmul_fp8_2(const MatmulFp8Args<A>& p, bool fast, cudaStream_t stream);

template <class A> void matmul_fp8_0(const MatmulFp8Args<A>& p, cudaStream_t stream) {
    cublaslt_tune(false);
    matmul_fp8_2(p, true, stream);
    cublaslt_tune(true);
}
#endif

// ---- kernel 1: one thread per element of out, each operand converted to float ----

template <class A> __global__ void matmul_fp8_kernel1(MatmulFp8Args<A> p) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.M * p.N) { return; }
    const A* a = p.a + i / p.N * p.K;
    const __nv_fp8_e4m3* b = p.b + i % p.N * p.K;
    float sum = 0.0f;
    for (int k = 0; k < p.K; k++) { sum += (float)a[k] * (float)b[k]; }
    sum = sum * (*p.a_scale * *p.b_scale) + (p.bias ? (float)p.bias[i % p.N] : 0.0f);
    if (p.out) {
        p.out[i] = (floatX)sum;
    } else {
        p.sum[i] += sum;
    }
}

template <class A> void matmul_fp8_1(const MatmulFp8Args<A>& p, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)p.M * p.N, (size_t)block_size);
    require(num_blocks <= INT_MAX);
    auto kernel = matmul_fp8_kernel1<A>;
    kernel<<<(unsigned)num_blocks, block_size, 0, stream>>>(p);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32)

// ---- kernels 2 and 3: cuBLASLt with one sum over K ("fast accumulation"), or with partial sums in fp32 ----

template <class A> void matmul_fp8_2(const MatmulFp8Args<A>& p, bool fast, cudaStream_t stream) {
    LinearCall call;
    call.inp = p.a, call.weight = p.b, call.bias = p.bias;
    call.inp_type = Fp8<A>::IS_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3, call.weight_type = CUDA_R_8F_E4M3;
    call.inp_scale = p.a_scale, call.weight_scale = p.b_scale, call.fast_accumulation = fast;
    call.M = p.M, call.N = p.N, call.K = p.K;
    call.out = p.out;
    if (p.sum) { call.add = call.out = p.sum, call.out_type = CUDA_R_32F; }
    cublasCheck(cublaslt_try_linear(call, stream));
}

// ---- kernel 4: gemm.cuh with wgmma of fp8: the tensor cores keep one sum over K ----

// The form G with an e5m2 a; compare GemmTilesE4M3.
template <class G> struct MatmulFp8TilesE5M2 : G {
    template <int n> static __device__ void wgmma(float (&sum)[n], uint64_t a, uint64_t b, bool accumulate) {
        static_assert(n == 96 || n == 128, "192 or 256 columns");
        if constexpr (n == 96) { wgmma_64x192x32_e5m2_e4m3(sum, a, b, accumulate); }
        if constexpr (n == 128) { wgmma_64x256x32_e5m2_e4m3(sum, a, b, accumulate); }
    }
};
template <class G, class A> using MatmulFp8Tiles =
    typename std::conditional<Fp8<A>::IS_E5M2, MatmulFp8TilesE5M2<G>, GemmTilesE4M3<G>>::type;

// to (M,N) += sum * scale, for a warp's 16 rows from `row` on of each part of the accumulators.
template <class G> __device__ inline void matmul_fp8_add(float (&sum)[G::PARTS][G::COLUMNS / 2], float scale, float* to,
                                                         int row, int column, int M, int N) {
    int lane = threadIdx.x % 32, first = column + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < G::PARTS; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
            int at = row + 64 * m + 8 * half + lane / 4;
            if (at >= M) { continue; }
            float2* p = reinterpret_cast<float2*>(to + (size_t)at * N + first);
#pragma unroll
            for (int j0 = 0; j0 < G::COLUMNS / 8;
                 j0 += 8) { // 8 loads before the first of 8 stores, so that they overlap
                float2 x[8];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (column + 8 * (j0 + j) < N) { x[j] = p[4 * (j0 + j)]; }
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int k = 4 * (j0 + j) + 2 * half;
                    if (column + 8 * (j0 + j) >= N) { continue; }
                    p[4 * (j0 + j)] = make_float2(x[j].x + scale * sum[m][k], x[j].y + scale * sum[m][k + 1]);
                }
            }
        }
    }
}

// ---- kernel 5: partial sums of 128 products in the tensor cores, added to a sum in fp32 registers ----
// A stage of the ring has 128 of K, so each stage is a partial sum of its own. The registers hold both, so a consumer has
// 64 rows of 192 columns at most: 96 accumulators twice. While one consumer adds, the other one multiplies.

template <class G> __device__ inline void matmul_fp8_multiply_split(float (&sum)[G::PARTS][G::COLUMNS / 2],
                                                                    GemmSMem<G>& smem, int first_row, int num_steps,
                                                                    int& i) {
    static_assert(G::PARTS == 1, "two sets of accumulators");
    gemm_clear<G>(sum);
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        auto& stage = smem.stages[i % G::RING];
        uint64_t a = wgmma_descriptor(stage.inp + first_row * 64);
        float part[G::COLUMNS / 2];
        mbarrier_wait(&smem.full[i % G::RING], i / G::RING % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { G::wgmma(part, a + 2 * k, G::weight_descriptor(stage.weight, k), k > 0); }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(part);
        G::release(&smem.empty[i % G::RING]);
#pragma unroll
        for (int j = 0; j < G::COLUMNS / 2; j++) { sum[0][j] += part[j]; }
    }
}

// ---- what kernels 4, 5 and 7 do with their accumulators: three types of result ----

// out (M,N) floatX, by gemm.cuh
struct MatmulFp8Stored {
    struct State {
        __device__ State(const MatmulFp8Stored&) {}
    };
    template <class G> __device__ void store(State&, float (&sum)[G::PARTS][G::COLUMNS / 2],
                                             const GemmScaledBias<0>& epilogue,
                                             const GemmColumns<G, GemmScaledBias<0>>& columns, GemmSMem<G>& smem,
                                             const GemmMaps& maps, int row, int column, int M, int, int& box) const {
        gemm_store<G>(sum, epilogue, columns, smem, maps.out, maps.second, maps.residual, row, column, M, box);
    }
    __device__ void end(State&) const {}
};

// added to a matrix of floats
struct MatmulFp8Added {
    float* to; // (M,N)
    struct State {
        __device__ State(const MatmulFp8Added&) {}
    };
    template <class G> __device__ void store(State&, float (&sum)[G::PARTS][G::COLUMNS / 2],
                                             const GemmScaledBias<0>& epilogue,
                                             const GemmColumns<G, GemmScaledBias<0>>&, GemmSMem<G>&, const GemmMaps&,
                                             int row, int column, int M, int N, int&) const {
        matmul_fp8_add<G>(sum, epilogue.scale, to, row, column, M, N);
    }
    __device__ void end(State&) const {}
};

// Kernels 4 and 5: as gemm_forms_sm90_kernel, with another type of result. `split`: see kernel 5.
template <class G, bool split, class Result> __global__ void __launch_bounds__(384, 1)
    matmul_fp8_sm90_kernel4(const __grid_constant__ GemmMaps maps, GemmScaledBias<0> epilogue, Result result, int M,
                            int N, int K, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    GemmSMem<G>& smem = gemm_smem<G>(gemm_dynamic);
    gemm_init(smem);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    int warpgroup = warp / 4, rank = G::rank(), num_steps = ceil_div(K, 64), i = 0;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
    if (warpgroup == 0) {
        gemm_produce(smem, maps, M, N, num_steps, first, stride, num_tiles, rank);
        return;
    }
    warpgroup_more_registers<240>();
    int box = 0, number = 0, first_row = gemm_is_ping_pong<G> ? 0 : (warpgroup - 1) * 64;
    if (gemm_is_ping_pong<G>) {
        first += (warpgroup - 1) * stride;
        stride *= 2;
        i = (warpgroup - 1) * num_steps;
    }
    epilogue.begin();
    typename Result::State state(result);
#pragma unroll 1
    for (int index = first; index < num_tiles; index += stride, number++) {
        float sum[G::PARTS][G::COLUMNS / 2];
        GemmTile tile = gemm_tile<G>(index, M, N, rank);
        int row = tile.row + first_row + warp % 4 * 16;
        GemmColumns<G, GemmScaledBias<0>> columns;
        gemm_prepare(columns, epilogue, smem, maps.residual, row, tile.column, N, box);
        if constexpr (split) {
            matmul_fp8_multiply_split<G>(sum, smem, first_row, num_steps, i);
        } else if constexpr (gemm_is_ping_pong<G>) {
            gemm_multiply<G>(sum, smem, num_steps, number, i);
            i += num_steps;
        } else {
            gemm_multiply_cooperative<G>(sum, smem, first_row, num_steps, i);
        }
        result.template store<G>(state, sum, epilogue, columns, smem, maps, row, tile.column, M, N, box);
    }
    result.end(state);
    gemm_end<G>();
#endif
}

template <class G, bool split, class A, class Result>
static void matmul_fp8_launch4(const MatmulFp8Args<A>& p, const Result& result, cudaStream_t stream) {
    typedef MatmulFp8Tiles<G, A> Tiles;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(p.K % 16 == 0 && p.N % 8 == 0);
    // gemm.cuh addresses two fp8 elements as one floatX
    GemmArgs g = {p.out, NULL, (const floatX*)p.a, (const floatX*)p.b, NULL, p.M, p.N, p.K / 2};
    GemmScaledBias<0> epilogue = {p.a_scale, p.b_scale, p.bias, NULL, NULL, 0, 0, 0, 0};
    int num_tiles = gemm_num_tiles<Tiles>(g.M, g.N, g.K),
        num_clusters = min(num_tiles, num_multiprocessors() / G::CLUSTER);
    gemm_start(matmul_fp8_sm90_kernel4<Tiles, split, Result>, num_clusters * G::CLUSTER, G::CLUSTER,
               GemmSMem<Tiles>::bytes(), true, stream, gemm_maps<Tiles>(g), epilogue, result, g.M, g.N, g.K, num_tiles);
}
template <class G, bool split, class A> static void matmul_fp8_launch4(const MatmulFp8Args<A>& p, cudaStream_t stream) {
    if (p.sum) { return matmul_fp8_launch4<G, split>(p, MatmulFp8Added{p.sum}, stream); }
    matmul_fp8_launch4<G, split>(p, MatmulFp8Stored{}, stream);
}

enum { MATMUL_FP8_PING_PONG_192 = 1, MATMUL_FP8_COOPERATIVE_256 };
template <class A> void matmul_fp8_4(const MatmulFp8Args<A>& p, int form, cudaStream_t stream) {
    if (form == MATMUL_FP8_PING_PONG_192) { return matmul_fp8_launch4<GemmPingPong192Pairs, false>(p, stream); }
    require(form == MATMUL_FP8_COOPERATIVE_256);
    matmul_fp8_launch4<GemmCooperative256Pairs, false>(p, stream);
}

typedef GemmTiles<128, 192, false, GemmPair, 4, 4> MatmulFp8Cooperative192Pairs;
typedef GemmTiles<128, 192, false, GemmSingle, 4, 4> MatmulFp8Cooperative192;
enum { MATMUL_FP8_PAIRS = 1, MATMUL_FP8_SINGLE };
template <class A> void matmul_fp8_5(const MatmulFp8Args<A>& p, int form, cudaStream_t stream) {
    if (form == MATMUL_FP8_PAIRS) { return matmul_fp8_launch4<MatmulFp8Cooperative192Pairs, true>(p, stream); }
    require(form == MATMUL_FP8_SINGLE);
    matmul_fp8_launch4<MatmulFp8Cooperative192, true>(p, stream);
}

// ---- kernel 6: not fused: kernel 4, then GELU and both copies by kernel 5 of quantize ----

// hidden (M,N) is scratch
void matmul_fp8_6(MatmulFp8Args<__nv_fp8_e4m3> p, const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* hidden,
                  cudaStream_t stream) {
    p.out = hidden;
    matmul_fp8_4(p, MATMUL_FP8_PING_PONG_192, stream);
    QuantizeArgs<__nv_fp8_e4m3> q = {to, NULL, p.M, p.N};
    quantize5(q, QuantizeGelu{hidden}, stream, 256);
}

// ---- kernel 7: 4 with GELU and both e4m3 copies in the epilogue ----
// A consumer takes its accumulators 64 rows at a time, through the memory of its boxes, from which it stores 16 bytes at a
// time. A thread has columns 2t and 2t + 1 of rows g and g + 8 in each fragment of 8 columns. Quantised, they are a word:
//
//     byte                 0      1      2        3
//     row, column       g,2t  g+8,2t  g,2t+1  g+8,2t+1
//
// Its halves are pairs of tokens, so stmatrix with the transposition stores it to `columns`, in the order 0 8 1 9 ...
// For `rows`, lanes 2i and 2i + 1 exchange words, and then have 4 neighbouring columns of rows g and g + 8, one lane in
// this fragment, the other one in the next.

struct MatmulFp8Tile { // of a consumer: 64 rows of 192 columns; the padding spreads rows over the banks
    static constexpr int COLUMNS = 192;
    __nv_fp8_storage_t rows[64][COLUMNS + 16];
    __nv_fp8_storage_t columns[COLUMNS][64 + 16];
};

struct MatmulFp8Gelu {
    Fp8Tensor<__nv_fp8_e4m3> to;
    struct State : Fp8Seen<__nv_fp8_e4m3> {
        __device__ State(const MatmulFp8Gelu& result) : Fp8Seen(result.to) {}
    };

    // The words of 16 columns from 16 * p on: fragments 2p and 2p + 1.
    template <class G> __device__ void words(uint32_t (&words)[2], State& state, const float* sum,
                                             const GemmScaledBias<0>& epilogue,
                                             const GemmColumns<G, GemmScaledBias<0>>& columns, int p) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float two[2], v[4];
            epilogue.columns(two, gemm_shuffle(columns.pairs[p / 4], p % 4 * 8 + 4 * j + threadIdx.x % 4));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float y = gelu(epilogue.value(sum[8 * p + 4 * j + i], {}, two[i % 2]));
                v[i] = state.scaled((float)(floatX)y);
            }
            words[j] = pack_e4m3x4(v[0], v[2], v[1], v[3]);
        }
    }
    // Stores them to the tile's rows. at: where the tile has row g of this warp.
    __device__ void store_rows(__nv_fp8_storage_t* at, const uint32_t (&words)[2], int p) const {
        bool odd = threadIdx.x & 1;
        // the rows' halves: columns 2t, 2t + 1 of row g, of row g + 8
        uint32_t first = __byte_perm(words[0], 0, 0x3120), second = __byte_perm(words[1], 0, 0x3120);
        uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
        uint32_t left = odd ? got : first, right = odd ? second : got;
        // t = 0 and 2 have columns 0-3 and 4-7 of the 16, t = 1 and 3 columns 8-11 and 12-15
        __nv_fp8_storage_t* to = at + 16 * p + (odd ? 8 : 0) + threadIdx.x % 4 / 2 * 4;
        *reinterpret_cast<uint32_t*>(to) = __byte_perm(left, right, 0x5410);
        *reinterpret_cast<uint32_t*>(to + 8 * (MatmulFp8Tile::COLUMNS + 16)) = __byte_perm(left, right, 0x7632);
    }
    // All threads of the consumer store the tile, whose first element is in this row and column, 16 bytes at a time.
    __device__ void store_tile(const MatmulFp8Tile& tile, int row, int column, int M, int N) const {
        const int row_chunks = MatmulFp8Tile::COLUMNS / 16;
        for (int i = threadIdx.x % 128; i < 64 * row_chunks; i += 128) {
            int r = i / row_chunks, c = i % row_chunks * 16;
            if (row + r < M && column + c < N) {
                *reinterpret_cast<uint4*>(to.rows + (size_t)(row + r) * N + column + c) =
                    *reinterpret_cast<const uint4*>(&tile.rows[r][c]);
            }
        }
        for (int i = threadIdx.x % 128; i < MatmulFp8Tile::COLUMNS * 4; i += 128) {
            int c = i / 4, r = i % 4 * 16;
            if (row + r < M && column + c < N) {
                *reinterpret_cast<uint4*>(to.columns + (size_t)(column + c) * M + row + r) =
                    *reinterpret_cast<const uint4*>(&tile.columns[c][r]);
            }
        }
    }
    template <class G> __device__ void store(State& state, float (&sum)[G::PARTS][G::COLUMNS / 2],
                                             const GemmScaledBias<0>& epilogue,
                                             const GemmColumns<G, GemmScaledBias<0>>& columns, GemmSMem<G>& smem,
                                             const GemmMaps&, int row, int column, int M, int N, int&) const {
        static_assert(G::COLUMNS == MatmulFp8Tile::COLUMNS && G::READERS == 4, "a tile is one consumer's");
        static_assert(sizeof(MatmulFp8Tile) <= 4 * sizeof(smem.boxes[0]), "the boxes of its four warps");
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, consumer = threadIdx.x / 128 - 1;
        auto& tile = *reinterpret_cast<MatmulFp8Tile*>(smem.boxes[4 * consumer]);
        auto barrier = [&] { consumer == 0 ? named_barrier_sync(1, 128) : named_barrier_sync(2, 128); };
#pragma unroll
        for (int m = 0; m < G::PARTS; m++) {
#pragma unroll
            for (int p = 0; p < G::COLUMNS / 16; p += 2) { // 32 columns, of which stmatrix stores 4 matrices
                uint32_t fragments[2][2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    words<G>(fragments[i], state, sum[m], epilogue, columns, p + i);
                    store_rows(&tile.rows[16 * warp + lane / 4][0], fragments[i], p + i);
                }
                stmatrix_x4_trans(shared_address(&tile.columns[16 * p + lane][16 * warp]), fragments[0]);
            }
            barrier();
            store_tile(tile, row - 16 * warp + 64 * m, column, M, N);
            barrier(); // the tile may be overwritten
        }
    }
    __device__ void end(State& state) const { state.store_warp(to); }
};

void matmul_fp8_7(const MatmulFp8Args<__nv_fp8_e4m3>& p, const Fp8Tensor<__nv_fp8_e4m3>& to, cudaStream_t stream) {
    require(p.M % 16 == 0 && p.N % 16 == 0);
    matmul_fp8_launch4<GemmPingPong192Pairs, false>(p, MatmulFp8Gelu{to}, stream);
}
#endif

template <class A> static void declare_kernels(Bench& b, const MatmulFp8Args<A>& p) {
    cudaStream_t stream = b.stream;
    float one_sum = 1 + (float)p.K / 1280; // see the top of the file
    auto declared = [&](bool has_one_sum) {
        if (has_one_sum) { b.coarser(one_sum); }
        b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    };
#if !defined(ENABLE_FP32)
    b.kernel(
        0, "cuBLASLt, first proposal", [=](int) { matmul_fp8_0(p, stream); }, {0}, 89);
    declared(true);
#endif
    b.kernel(
        1, "one thread per element", [=](int bs) { matmul_fp8_1(p, stream, bs); }, {64, 256, 1024}, 89);
    declared(false);
#if !defined(ENABLE_FP32)
    b.kernel(
        2, "cuBLASLt, algorithms timed", [=](int) { matmul_fp8_2(p, true, stream); }, {0}, 89);
    declared(true);
    b.kernel(
        3, "2 with partial sums in fp32", [=](int) { matmul_fp8_2(p, false, stream); }, {0}, 89);
    declared(false);
    b.kernel(
        4, "gemm.cuh with wgmma of fp8", [=](int form) { matmul_fp8_4(p, form, stream); }, {0}, -90);
    b.config("form", {{MATMUL_FP8_PING_PONG_192, "ping-pong 128x192 in clusters of two"},
                      {MATMUL_FP8_COOPERATIVE_256, "cooperative 128x256 in clusters of two"}});
    declared(true);
    b.kernel(
        5, "4 with partial sums of 128 products in fp32", [=](int form) { matmul_fp8_5(p, form, stream); }, {0}, -90);
    b.config("form", {{MATMUL_FP8_PAIRS, "cooperative 128x192 in clusters of two"},
                      {MATMUL_FP8_SINGLE, "cooperative 128x192"}});
    declared(false);
#endif
}

enum { MATMUL_FP8_FORWARD, MATMUL_FP8_DX, MATMUL_FP8_DW, MATMUL_FP8_DX_E4M3, MATMUL_FP8_DW_E4M3, MATMUL_FP8_GELU };
const float MATMUL_FP8_Q = 1.0f / (1 << 13); // see the top of the file

// The inputs of a product, and its reference.
template <class A> struct MatmulFp8Inputs {
    Buffer<A> a;
    Buffer<__nv_fp8_e4m3> b;
    Buffer<float> a_scale, b_scale;
    Buffer<floatX> bias; // or NULL
    int M, N, K;
    std::vector<size_t> rows; // of out, that are compared

    // The product of these rows, plus the bias.
    std::vector<float> product() const {
        std::vector<float> x = rows_of(a.host, rows, K), y(rows.size() * N);
        matmul_forward_cpu(y.data(), x.data(), b.host, NULL, NULL, rows.size(), K, N);
        double scale = (double)a_scale.host[0] * b_scale.host[0];
        for (size_t i = 0; i < y.size(); i++) { y[i] = (float)(y[i] * scale + (bias.host ? bias.host[i % N] : 0.0f)); }
        return y;
    }
};

// Normal values of a, and of b by 1 / sqrt(K), are multiplied by a factor and quantised. which: see declare()
template <class A> static MatmulFp8Inputs<A> declare_inputs(Bench& b, int which, int M, int N, int K, bool has_bias) {
    const float a_factor = Fp8<A>::LARGEST / 6.0f, b_factor = 448.0f / 6.0f;
    auto fill = [=](float* x, size_t n, uint32_t seed, float factor) {
        bench_fill_normal(x, n, seed, factor, 0.0f);
        for (size_t i = 0; which == 1 && i < n; i++) { x[i] = fabsf(x[i]); }
    };
    MatmulFp8Inputs<A> x;
    x.M = M, x.N = N, x.K = K, x.bias = {NULL, NULL};
    x.a = b.input_from<A>("a", (size_t)M * K, [=, seed = b.next_seed()](float* values) {
        if (which != 2) { return fill(values, (size_t)M * K, seed, a_factor); }
        bench_fill_one_hot(values, M, K, seed);
        for (size_t i = 0; i < (size_t)M * K; i++) { values[i] *= a_factor; }
    });
    x.b = b.input_from<__nv_fp8_e4m3>(
        "b", (size_t)N * K, [=, seed = b.next_seed()](float* values) { fill(values, (size_t)N * K, seed, b_factor); });
    x.a_scale = b.input_from<float>("a_scale", 1, [=](float* scale) { scale[0] = 1 / a_factor; });
    x.b_scale = b.input_from<float>("b_scale", 1, [=](float* scale) { scale[0] = 1 / (b_factor * sqrtf((float)K)); });
    if (has_bias) { x.bias = b.input<floatX>("bias", N); }
    x.rows = b.sample(M, 2.0 * N * K);
    return x;
}

template <class A> static void declare_as(Bench& b, int kind, int which, bool is_dw) {
    bool is_forward = kind == MATMUL_FP8_FORWARD, is_dx = !is_forward && !is_dw;
    int tokens = b.B * b.T, C = b.C, OC = b.V;
    int M = is_dw ? OC : tokens, N = is_forward ? OC : C, K = is_forward ? C : is_dx ? OC : tokens;
    MatmulFp8Inputs<A> x = declare_inputs<A>(b, which, M, N, K, is_forward);
    Buffer<floatX> out = {NULL, NULL};
    Buffer<float> start = {NULL, NULL}, sum = {NULL, NULL};
    Tolerance tolerance = {160 * MATMUL_FP8_Q, 40 * MATMUL_FP8_Q};
    if (is_dw) {
        start = b.input<float>("start", (size_t)M * N);
        sum = b.inout<float>("dweight", (size_t)M * N, start, tolerance);
    } else {
        out = b.output<floatX>("out", (size_t)M * N, {tolerance.atol, tolerance.rtol + ulp_of<floatX>()});
    }
    b.reference([=] {
        std::vector<float> y = x.product(), before = rows_of(start.host, x.rows, N);
        for (size_t i = 0; i < before.size(); i++) { y[i] += before[i]; }
        put_rows(is_dw ? sum.host : out.host, y, x.rows, N);
    });
    double bytes = is_dw ? 2.0 * sizeof(float) : sizeof(floatX);
    b.cost((double)M * K + (double)N * K + bytes * M * N, 2.0 * M * N * K);
    declare_kernels(b, MatmulFp8Args<A>{out, sum, x.a, x.b, x.a_scale, x.b_scale, x.bias, M, N, K});
}

static void declare_gelu(Bench& b, int which) {
    typedef __nv_fp8_e4m3 F;
    int M = b.B * b.T, N = b.V, K = b.C;
    size_t n = (size_t)M * N;
    MatmulFp8Inputs<F> x = declare_inputs<F>(b, which, M, N, K, true);
    Buffer<float> scale = b.input_from<float>("scale", 1, [](float* values) { values[0] = 448.0f / 4.0f; });
    // of GELU's result before it is rounded; 1.13: its largest slope. Kernel 6 rounds GELU's argument to floatX.
    Tolerance exact = {1.13f * 160 * MATMUL_FP8_Q, 1.13f * 40 * MATMUL_FP8_Q + ulp_of<floatX>()};
    Buffer<F> rows = fp8_output<F>(b, "rows", n, scale, exact), columns = fp8_output<F>(b, "columns", n, scale, exact);
    Buffer<int> num_saturated = fp8_num_saturated(b, rows, n, scale, exact);
    Buffer<float> amax = fp8_amax(b, exact);
    b.reference([=] {
        std::vector<float> y = x.product();
        gelu_forward_cpu(y.data(), y.data(), y.size());
        put_rows(rows.host, y, x.rows, N);
        fp8_transpose_cpu(columns.host, rows.host, M, N, false);
        if (x.rows.size() == (size_t)M) { fp8_amax_cpu(amax.host, rows.host, n); }
    });
    b.cost((double)M * K + (double)N * K + 2.0 * n, 2.0 * M * N * K);
#if !defined(ENABLE_FP32)
    MatmulFp8Args<F> p = {NULL, NULL, x.a, x.b, x.a_scale, x.b_scale, x.bias, M, N, K};
    Fp8Tensor<F> to = {rows, columns, false, scale, amax, num_saturated};
    floatX* hidden = b.scratch<floatX>("hidden", n);
    b.kernel(
        6, "not fused: 4, then kernel 5 of quantize with GELU",
        [=, stream = b.stream](int) { matmul_fp8_6(p, to, hidden, stream); }, {0}, -90);
    b.coarser(1 + (float)K / 1280);
    b.kernel_rate("e4m3", cublaslt_e4m3_rate);
    b.kernel(
        7, "4 with GELU and both e4m3 copies in the epilogue",
        [=, stream = b.stream](int) { matmul_fp8_7(p, to, stream); }, {0}, -90);
    b.coarser(1 + (float)K / 1280);
    b.kernel_rate("e4m3", cublaslt_e4m3_rate);
#endif
}

static void declare(Bench& b) {
    int kind = b.kinds({"forward", "dX with an e5m2 gradient", "dW with an e5m2 gradient", "dX with an e4m3 gradient",
                        "dW with an e4m3 gradient", "forward with GELU in e4m3, with the transposed copy"});
    int which = b.cases({"normal", "terms of one sign", "one nonzero per row"});
    bool is_dw = kind == MATMUL_FP8_DW || kind == MATMUL_FP8_DW_E4M3;
    // where it matters, the number of tokens stays a multiple of 16
    b.varies(is_dw || kind == MATMUL_FP8_GELU ? "BCV" : "BTCV");
    if (!b.dry) { cublaslt_open(); }
    b.matrix_rate(cublaslt_matrix_rate);
    if (kind == MATMUL_FP8_GELU) { return declare_gelu(b, which); }
    bool is_e5m2 = kind == MATMUL_FP8_DX || kind == MATMUL_FP8_DW;
    is_e5m2 ? declare_as<__nv_fp8_e5m2>(b, kind, which, is_dw) : declare_as<__nv_fp8_e4m3>(b, kind, which, is_dw);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "matmul_fp8", declare, {64, 1024, 768, 1, 3072},
                      {{1, 16, 16, 1, 16},
                       {1, 37, 784, 1, 208},
                       {1, 300, 272, 1, 400},
                       with_kind(1, {1, 5, 208, 1, 784}),
                       with_kind(1, {1, 144, 272, 1, 1040}),
                       with_kind(2, {1, 16, 16, 1, 16}),
                       with_kind(2, {1, 8192, 48, 1, 64}), // long sums, which need partial sums
                       with_kind(2, {1, 272, 400, 1, 272}),
                       with_kind(3, {2, 144, 272, 1, 528}),
                       with_kind(4, {5, 80, 208, 1, 144}),
                       with_kind(5, {1, 16, 16, 1, 16}),
                       with_kind(5, {1, 336, 272, 1, 208}),
                       with_kind(5, {1, 272, 80, 1, 592})});
}
