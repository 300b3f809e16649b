/* gelu_linear: out = gelu(inp) weight^T + bias, the second half of a transformer's FFN: inp has 4C columns, out C

   out (N,OC) floatX out | inp (N,K) floatX in | weight (OC,K), bias (OC) floatX in; N = B*T, K = 4C, OC = C
   Bound: compute, 2*N*K*OC FLOPs. Constraint: K % 8 == 0, OC % 8 == 0.
   Error: one ulp of floatX against the fp64 reference, and 1.5 ulps of 1, because gelu's result is rounded to floatX
   before the product: K roundings of terms of size 1/sqrt(K) add up like noise. In fp32, 32 ulps of the result, and 32
   ulps of the terms' absolute sum, which is 0.64 * sqrt(K) here: one large term makes all partial sums, and so their
   roundings, large. The result is finite for every finite inp.
   Tuned: forms of kernels 4, 5 and 7. Kernels 3 and 6 have one block per SM with all of its shared memory, kernel 8 all
   of its registers.
   Source: the tanh form of gelu is Hendrycks and Gimpel 2016, arXiv:1606.08415; wgmma, TMA, clusters: the PTX ISA;
   tiles and epilogue: gemm.cuh.

   What gelu costs: for each step of 64 along K, a tile of 128 rows and 256 columns needs gelu of 8192 values of inp.
   The tensor cores take 1024 cycles for the step. Spread over all four sub-partitions of an SM, one tanh per value
   keeps the special function units busy for 512 cycles, in fp32 as in 16 bits. Instruction issue takes 480 cycles in
   fp32 and 260 in 16 bits. On three sub-partitions (kernel 4, where the fourth warp loads) these figures are a third
   higher.
   By this count gelu can be hidden behind the products, although each of the OC / 256 tiles in a row of tiles repeats
   it. Measured, it is not hidden completely, because a warp stalls between dependent instructions: kernel 7 keeps the
   tensor cores 76% busy. In kernel 8 a tile has 384 columns, so that at OC = 768 gelu is computed twice per value, not
   three times.

   Why gelu is not computed once and shared by a cluster of blocks along the columns: the cluster is needed to save L2
   traffic. In 1024 cycles of products, each of two blocks that share the weight's tile reads 32 KB from L2 (27 KB with
   384 columns). Each of three blocks that share inp's tile would read 37 KB. Without a cluster a block reads 48 KB,
   which at 115 us is 7.7 TB/s in all. A block with all 768 columns of 64 rows would load the whole weight for every 64
   rows: 1.2 GB.

   Kernels (this list is written by versions.sh):
     1  gelu_forward, then matmul_forward
     2  one launch: 32x32 tiles, gelu as inp is loaded (slower than 1)
     3  wgmma, gelu in registers, overlapped with the products
     4  wgmma, dedicated warps apply gelu in shared memory (slower than 3)
     5  4 with gelu in 16 bits (slower than 3)
     6  3 with gelu in 16 bits
     7  6 in clusters of two that share the weight's tiles
     8  7 with tiles of 384 columns: gelu twice per value, not three times (best)

   nvcc -O3 --use_fast_math gelu_linear.cu -lcublasLt -o gelu_linear      (or: make gelu_linear)
   ./gelu_linear 8      check kernel 8 against the CPU and time it
   ./gelu_linear 4      the same for kernel 4, whose forms have other rings and clusters
   ./gelu_linear        every kernel, side by side                                         */
#include "bench.h"
#include "gelu_forward.cuh"
#include "gemm.cuh"
#include "gemm_forms.cuh"
#include "linear_sm90.cuh"
#include "matmul_forward.cuh"

// ---- kernel 1: two operations: gelu_forward, then matmul_forward ----

// active (N,K) is scratch for gelu(inp)
void gelu_linear1(floatX* out, floatX* active, const floatX* inp, const floatX* weight, const floatX* bias, int N,
                  int K, int OC, cudaStream_t stream) {
    gelu_forward(active, inp, (size_t)N * K, stream);
    matmul_forward(out, NULL, active, weight, bias, NULL, N, K, OC, stream);
}

// ---- kernel 2: 32x32 tiles in shared memory, gelu applied as inp is loaded ----

__global__ void __launch_bounds__(1024) gelu_linear_kernel2(floatX* out, const floatX* inp, const floatX* weight,
                                                            const floatX* bias, int N, int K, int OC) {
    __shared__ float a[32][33], b[32][33]; // 33: a column is spread over 32 banks
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    int columns = ceil_div(OC, 32), n0 = blockIdx.x / columns * 32, o0 = blockIdx.x % columns * 32;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 32) {
        bool inside = k0 + x < K;
        a[y][x] = inside && n0 + y < N ? gelu((float)inp[(size_t)(n0 + y) * K + k0 + x]) : 0.0f;
        b[y][x] = inside && o0 + y < OC ? (float)weight[(size_t)(o0 + y) * K + k0 + x] : 0.0f;
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += a[y][k] * b[x][k]; }
        __syncthreads();
    }
    if (n0 + y < N && o0 + x < OC) { out[(size_t)(n0 + y) * OC + o0 + x] = (floatX)(sum + (float)bias[o0 + x]); }
}

void gelu_linear2(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                  cudaStream_t stream) {
    size_t num_blocks = ceil_div((size_t)N, (size_t)32) * ceil_div(OC, 32);
    require(num_blocks <= INT_MAX);
    gelu_linear_kernel2<<<(unsigned)num_blocks, 1024, 0, stream>>>(out, inp, weight, bias, N, K, OC);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32)

// ---- kernel 3: wgmma takes gelu(inp) from registers; fp32 gelu is hidden behind the previous step's products ----

// gelu(x) = x / 2 (1 + tanh(u)). tanh is one instruction, within 2^-11. If x^3 overflows, tanh is 1 or -1, and the
// result is x or 0.
__device__ inline float gelu_linear_value(float x) {
    float u = x * (0.7978845608f + 0.0356774081f * x * x), h = 0.5f * x; // sqrt(2/pi), 0.044715 sqrt(2/pi)
    return h * tanh_approx(u) + h;
}

// Op of linear_sm90_kernel (layernorm_linear.cu) that applies gelu to inp in registers before the product.
struct GeluLinear {
    static constexpr bool changed = true, neighbours = false;
    typedef uint32_t Columns; // the biases of two neighbouring columns
    const floatX* bias;       // (OC)
    int OC;

    __device__ void begin(int, const LinearTiles&) {}
    __device__ void end(const LinearTiles&) {}
    __device__ void change(uint32_t* a, int) const { // gelu(0) = 0: the zeros beyond inp stay zeros
        for (int j = 0; j < 4; j++) {
            float2 x = unpack_16x2(a[j], floatX());
            a[j] = pack_16x2(gelu_linear_value(x.x), gelu_linear_value(x.y), floatX());
        }
    }
    __device__ Columns columns(int column) const {
        return column < OC ? *reinterpret_cast<const Columns*>(bias + column) : 0;
    }
    __device__ void finish(float* y, Columns bits) const {
        float2 b = unpack_16x2(bits, floatX());
        y[0] += b.x, y[1] += b.y, y[2] += b.x, y[3] += b.y;
    }
};

void gelu_linear3(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                  cudaStream_t stream) {
    linear_launch(GeluLinear{bias, OC}, out, inp, weight, N, K, OC, false, stream);
}

// ---- kernel 4: dedicated warps apply gelu to inp's tiles in shared memory ----
// Kernel 3 has gelu's instructions between the products of the consumers; here warps that would idle execute them.
//
//     inp:       TMA -> inp_full -> warps 1-3: gelu in place -> inp_ready -> consumers multiply -> inp_empty
//     weight:    TMA -> weight_full --------------------------------------> consumers multiply -> weight_empty
//
// A tile of inp stays in shared memory longer than a tile of the weight, so inp has its own ring, which may have more
// stages. Warps 1 to 3 would otherwise idle beside the producer warp. A fourth warpgroup for gelu would leave too few
// registers per thread for wgmma with 256 columns.
//
// Forms 1 and 2 have clusters of two, which share the weight, too: kernel 7's idea. Form 3 is this kernel by itself.

template <class Cluster, int ring_inp, int boxes> struct GeluLinearTiles
    : GemmTiles<128, 256, false, Cluster, 4, boxes> {
    static constexpr int RING_INP = ring_inp;
};

template <class G> struct GeluLinearSMem {
    floatX inp[G::RING_INP][128 * 64], weight[G::RING][256 * 64]; // stages of 64 columns, in TMA's swizzle
    floatX boxes[8][G::BOXES][16 * 64];                           // results of each consumer warp, for TMA
    uint64_t inp_full[G::RING_INP], inp_ready[G::RING_INP], inp_empty[G::RING_INP]; // ready: gelu has been applied
    uint64_t weight_full[G::RING], weight_empty[G::RING], box_full[8][G::BOXES];
};

// gelu of two neighbouring values, in fp32. gelu(0) = 0: the zeros beyond inp stay zeros.
struct GeluLinearFloat {
    static __device__ uint32_t apply(uint32_t bits) {
        float2 x = unpack_16x2(bits, floatX());
        return pack_16x2(gelu_linear_value(x.x), gelu_linear_value(x.y), floatX());
    }
};

// Three warps apply gelu in place to all stages of all tiles; thread: 0..95.
template <class G, class Gelu>
__device__ inline void gelu_linear_apply(GeluLinearSMem<G>& smem, int thread, int num_stages) {
#pragma unroll 1
    for (int i = 0; i < num_stages; i++) {
        int s = i % G::RING_INP;
        uint4* vectors = reinterpret_cast<uint4*>(smem.inp[s]); // (1024); gelu is element-wise: any order will do
        mbarrier_wait(&smem.inp_full[s], i / G::RING_INP % 2);
#pragma unroll
        for (int first = 0; first < 11; first += 6) { // 10 vectors per thread, 11 for the first 64 threads
            uint4 x[6];
#pragma unroll
            for (int j = first; j < min(first + 6, 11); j++) { // no branches, so that all loads are in flight
                x[j - first] = vectors[j == 10 && thread >= 64 ? thread : 96 * j + thread];
            }
#pragma unroll
            for (int j = first; j < min(first + 6, 11); j++) {
                uint4& v = x[j - first];
                v.x = Gelu::apply(v.x), v.y = Gelu::apply(v.y), v.z = Gelu::apply(v.z), v.w = Gelu::apply(v.w);
                if (j < 10 || thread < 64) { vectors[96 * j + thread] = v; }
            }
        }
        tma_store_fence(); // wgmma reads shared memory through the async proxy, as TMA does
        __syncwarp();
        if (thread % 32 == 0) { mbarrier_arrive(&smem.inp_ready[s]); }
    }
}

// The producer thread: fills both rings. Its loads of inp run ahead of its loads of the weight by as many stages
// as inp's ring has more than the weight's ring.
template <class G> __device__ inline void gelu_linear_load(GeluLinearSMem<G>& smem, const CUtensorMap& inp_map,
                                                           const CUtensorMap& weight_map, int N, int OC, int num_steps,
                                                           int first, int stride, int num_stages, int rank) {
    const int ahead = G::RING_INP - G::RING, part = 256 / G::CLUSTER; // part: rows of the weight that this block loads
    int inp_index = first, inp_step = 0, row = 0, weight_index = first, weight_step = 0, column = 0;
#pragma unroll 1
    for (int i = 0; i < num_stages + ahead; i++) {
        if (i < num_stages) {
            int s = i % G::RING_INP;
            if (inp_step == 0) { row = gemm_tile<G>(inp_index, N, OC, rank).row; }
            mbarrier_wait(&smem.inp_empty[s], (i / G::RING_INP + 1) % 2);
            mbarrier_arrive_expect(&smem.inp_full[s], sizeof(smem.inp[0]));
            tma_load_2d(smem.inp[s], &inp_map, inp_step * 64, row, &smem.inp_full[s]);
            if (++inp_step == num_steps) { inp_step = 0, inp_index += stride; }
        }
        if (i >= ahead) {
            int s = (i - ahead) % G::RING;
            if (weight_step == 0) { column = gemm_tile<G>(weight_index, N, OC, rank).column; }
            uint64_t* full = &smem.weight_full[s];
            mbarrier_wait(&smem.weight_empty[s], ((i - ahead) / G::RING + 1) % 2);
            mbarrier_arrive_expect(full, sizeof(smem.weight[0]));
            if (G::CLUSTER == 1) {
                tma_load_2d(smem.weight[s], &weight_map, weight_step * 64, column, full);
            } else { // each block loads half and multicasts it to both blocks, where the stage is empty
                tma_load_2d_multicast(smem.weight[s] + rank * part * 64, &weight_map, weight_step * 64,
                                      column + rank * part, full, (1 << G::CLUSTER) - 1);
            }
            if (++weight_step == num_steps) { weight_step = 0, weight_index += stride; }
        }
    }
}

// Releases stage i of both rings after this warp has read it.
template <class G> __device__ inline void gelu_linear_release(GeluLinearSMem<G>& smem, int i) {
    int lane = threadIdx.x % 32;
    if (lane == 0) { mbarrier_arrive(&smem.inp_empty[i % G::RING_INP]); }
    if (G::CLUSTER == 1 && lane == 0) { mbarrier_arrive(&smem.weight_empty[i % G::RING]); }
    if (G::CLUSTER > 1 && lane < G::CLUSTER) { mbarrier_arrive_cluster(&smem.weight_empty[i % G::RING], lane); }
}

// Like gemm_multiply for a cooperative form, with a ring for each operand.
template <class G> __device__ inline void gelu_linear_multiply(float (&sum)[1][128], GeluLinearSMem<G>& smem,
                                                               int first_row, int num_steps, int& i) {
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        int s = i % G::RING_INP, t = i % G::RING;
        uint64_t inp = wgmma_descriptor(smem.inp[s] + first_row * 64), weight = wgmma_descriptor(smem.weight[t]);
        mbarrier_wait(&smem.weight_full[t], i / G::RING % 2);
        mbarrier_wait(&smem.inp_ready[s], i / G::RING_INP % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 columns are 32 bytes, 2 in the descriptor's units of 16 bytes
            wgmma_64x256x16(sum[0], inp + 2 * k, weight + 2 * k, step > 0 || k > 0, floatX());
        }
        wgmma_commit();
        wgmma_wait<1>(); // the previous step's products have completed
        if (step > 0) { gelu_linear_release(smem, i - 1); }
    }
    wgmma_wait<0>();
    wgmma_hold(sum[0]);
    gelu_linear_release(smem, i - 1);
}

// One persistent block per SM. Warp 0 is the producer, warps 1 to 3 apply gelu, warpgroups 1 and 2 are the consumers.
template <class G, class Gelu> __global__ void __launch_bounds__(384, 1)
    gelu_linear_sm90_kernel4(const __grid_constant__ CUtensorMap inp_map,
                             const __grid_constant__ CUtensorMap weight_map,
                             const __grid_constant__ CUtensorMap out_map, const GemmBias<0> bias, int N, int K, int OC,
                             int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gelu_linear_dynamic[];
    uint32_t address = shared_address(gelu_linear_dynamic);
    GeluLinearSMem<G>& smem =
        *reinterpret_cast<GeluLinearSMem<G>*>(gelu_linear_dynamic + (1024 - address % 1024) % 1024);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&inp_map), tma_prefetch_map(&weight_map), tma_prefetch_map(&out_map);
        for (int s = 0; s < G::RING_INP; s++) {
            mbarrier_init(&smem.inp_full[s], 1), mbarrier_init(&smem.inp_ready[s], 3); // 3 gelu warps arrive
            mbarrier_init(&smem.inp_empty[s], 8);                                      // 8 consumer warps arrive
        }
        for (int s = 0; s < G::RING; s++) {
            mbarrier_init(&smem.weight_full[s], 1), mbarrier_init(&smem.weight_empty[s], 8 * G::CLUSTER);
        }
        mbarrier_init_fence();
    }
    if (G::CLUSTER > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // tells the compiler that it is warp-uniform
    int warpgroup = warp / 4, rank = G::CLUSTER > 1 ? cluster_rank() : 0, num_steps = ceil_div(K, 64), i = 0;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
    if (warpgroup == 0) {
        warpgroup_fewer_registers<88>();
        int num_stages = ceil_div(num_tiles - first, stride) * num_steps;
        if (warp > 0) {
            gelu_linear_apply<G, Gelu>(smem, threadIdx.x - 32, num_stages);
        } else if (threadIdx.x == 0) {
            gelu_linear_load(smem, inp_map, weight_map, N, OC, num_steps, first, stride, num_stages, rank);
        }
        return;
    }
    warpgroup_more_registers<208>(); // 2 * 208 + 88 = 3 * 168, what the launch allocates
    int box = 0, first_row = (warpgroup - 1) * 64;
#pragma unroll 1
    for (int index = first; index < num_tiles; index += stride) {
        float sum[1][128];
        GemmTile tile = gemm_tile<G>(index, N, OC, rank);
        GemmColumns<G, GemmBias<0>> columns;
        gemm_load_columns(columns, bias, tile.column, OC);
        gelu_linear_multiply(sum, smem, first_row, num_steps, i);
        gemm_store<G>(sum, bias, columns, smem, out_map, out_map, out_map,
                      GemmTile{tile.row + first_row + warp % 4 * 16, tile.column}, N, box);
    }
    gemm_end<G>();
#endif
}

template <class G, class Gelu> void gelu_linear_tiles(floatX* out, const floatX* inp, const floatX* weight,
                                                      const floatX* bias, int N, int K, int OC, cudaStream_t stream) {
    CUtensorMap inp_map = tensor_map(inp, {K, N}, {64, 128});
    CUtensorMap weight_map = tensor_map(weight, {K, OC}, {64, 256 / G::CLUSTER});
    int num_tiles = gemm_num_tiles<G>(N, OC, K);
    gemm_start<G, GeluLinearSMem<G>>(gelu_linear_sm90_kernel4<G, Gelu>, num_tiles, false, stream, inp_map, weight_map,
                                     gemm_box_map(out, N, OC), GemmBias<0>{bias}, N, K, OC, num_tiles);
}

// DEEP: inp has five stages, each warp one box for results. FLAT: four stages, two boxes. PAIRS: clusters of two.
enum { GELU_LINEAR_DEEP_PAIRS = 1, GELU_LINEAR_FLAT_PAIRS, GELU_LINEAR_DEEP };
template <class Gelu> void gelu_linear_form(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias,
                                            int N, int K, int OC, cudaStream_t stream, int form) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(N > 0 && K > 0 && OC > 0 && K % 8 == 0 && OC % 8 == 0);
    switch (form) {
    case GELU_LINEAR_DEEP_PAIRS:
        return gelu_linear_tiles<GeluLinearTiles<GemmPair, 5, 1>, Gelu>(out, inp, weight, bias, N, K, OC, stream);
    case GELU_LINEAR_FLAT_PAIRS:
        return gelu_linear_tiles<GeluLinearTiles<GemmPair, 4, 2>, Gelu>(out, inp, weight, bias, N, K, OC, stream);
    case GELU_LINEAR_DEEP:
        return gelu_linear_tiles<GeluLinearTiles<GemmSingle, 5, 1>, Gelu>(out, inp, weight, bias, N, K, OC, stream);
    }
    require(!"a form of gelu_linear");
}

// out (N,OC) | inp (N,K), weight (OC,K), bias (OC)
void gelu_linear4(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                  cudaStream_t stream, int form = GELU_LINEAR_FLAT_PAIRS) {
    gelu_linear_form<GeluLinearFloat>(out, inp, weight, bias, N, K, OC, stream, form);
}

// ---- kernel 5: kernel 4 with gelu in 16 bits, two values per instruction ----

__device__ inline uint32_t gelu_linear_pair(uint32_t bits, __nv_bfloat16) {
    uint32_t y = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __nv_bfloat162 x, t;
    memcpy(&x, &bits, sizeof(x));
    __nv_bfloat162 a = __float2bfloat162_rn(0.7978845608f), b = __float2bfloat162_rn(0.0356774081f);
    __nv_bfloat162 u = __hmul2(x, __hfma2(__hmul2(x, x), b, a)), h = __hmul2(x, __float2bfloat162_rn(0.5f));
    uint32_t u_bits, t_bits;
    memcpy(&u_bits, &u, sizeof(u));
    asm("tanh.approx.bf16x2 %0, %1;" : "=r"(t_bits) : "r"(u_bits));
    memcpy(&t, &t_bits, sizeof(t));
    x = __hfma2(h, t, h);
    memcpy(&y, &x, sizeof(y));
#endif
    return y;
}
__device__ inline uint32_t gelu_linear_pair(uint32_t bits, half) {
    uint32_t y = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    half2 x, t;
    memcpy(&x, &bits, sizeof(x));
    half2 a = __float2half2_rn(0.7978845608f), b = __float2half2_rn(0.0356774081f);
    half2 u = __hmul2(x, __hfma2(__hmul2(x, x), b, a)), h = __hmul2(x, __float2half2_rn(0.5f));
    uint32_t u_bits, t_bits;
    memcpy(&u_bits, &u, sizeof(u));
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(t_bits) : "r"(u_bits));
    memcpy(&t, &t_bits, sizeof(t));
    x = __hfma2(h, t, h);
    memcpy(&y, &x, sizeof(y));
#endif
    return y;
}

struct GeluLinearPairs {
    static __device__ uint32_t apply(uint32_t bits) { return gelu_linear_pair(bits, floatX()); }
};

void gelu_linear5(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                  cudaStream_t stream, int form = GELU_LINEAR_DEEP) {
    gelu_linear_form<GeluLinearPairs>(out, inp, weight, bias, N, K, OC, stream, form);
}

// ---- kernel 6: kernel 3 with the 16-bit gelu of kernel 5 ----

struct GeluLinear6 : GeluLinear {
    __device__ void change(uint32_t* a, int) const {
        for (int j = 0; j < 4; j++) { a[j] = gelu_linear_pair(a[j], floatX()); }
    }
};

// out (N,OC) | inp (N,K), weight (OC,K), bias (OC)
void gelu_linear6(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                  cudaStream_t stream) {
    linear_launch(GeluLinear6{{bias, OC}}, out, inp, weight, N, K, OC, false, stream);
}

// ---- kernel 7: kernel 6 in clusters of two, which share the weight's tiles: a third less L2 traffic ----

// linear_multiply_changed calls this when a warp has read stage i. All lanes read inp (ldmatrix), so they meet first.
template <class G> __device__ inline void linear_release(GemmSMem<G>& shared, int i) {
    __syncwarp();
    G::release(&shared.ring.empty[i % G::RING]);
}

// Like gemm_sm90_kernel9, but cooperative and with gelu in the main loop.
template <class G> __global__ void __launch_bounds__(384, 1)
    gelu_linear_sm90_kernel7(const __grid_constant__ GemmMaps maps, const GeluLinear6 gelu, const GemmBias<0> bias,
                             int N, int K, int OC, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_assert(!gemm_is_ping_pong<G> && G::ROWS == 128 && G::COLUMNS == 256, "as in linear_multiply_changed");
    extern __shared__ __align__(256) unsigned char gelu_linear_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(gelu_linear_dynamic);
    int warp = gemm_begin(smem, maps, N, OC, K, num_tiles);
    if (warp < 4) { return; }
    int warpgroup = warp / 4, rank = G::CLUSTER > 1 ? cluster_rank() : 0, num_steps = ceil_div(K, 64), i = 0;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
    int box = 0, group = warpgroup - 1;
#pragma unroll 1
    for (int index = first; index < num_tiles; index += stride) {
        float sum[1][128];
        GemmTile tile = gemm_tile<G>(index, N, OC, rank);
        GemmColumns<G, GemmBias<0>> columns;
        gemm_load_columns(columns, bias, tile.column, OC);
        linear_multiply_changed(gelu, smem, sum[0], group, index == first, num_steps, i);
        gemm_store<G>(sum, bias, columns, smem, maps.out, maps.out, maps.out,
                      GemmTile{tile.row + group * 64 + warp % 4 * 16, tile.column}, N, box);
    }
    gemm_end<G>();
#endif
}

template <class G, class Kernel> void gelu_linear_launch7(Kernel kernel, floatX* out, const floatX* inp,
                                                          const floatX* weight, const floatX* bias, int N, int K,
                                                          int OC, cudaStream_t stream) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    int num_tiles = gemm_num_tiles<G>(N, OC, K);
    gemm_start<G>(kernel, num_tiles, false, stream, gemm_maps<G>({out, NULL, inp, weight, NULL, N, OC, K}),
                  GeluLinear6{{NULL, 0}}, GemmBias<0>{bias}, N, K, OC, num_tiles);
}

// form: 0 four stages, 1 three stages, 2 four stages without a cluster
void gelu_linear7(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                  cudaStream_t stream, int form) {
    typedef GemmCooperative256Pairs G;
    typedef GemmTiles<128, 256, false, GemmPair, 3, 2> Three;
    typedef GemmCooperative256 Single;
    require(form >= 0 && form <= 2);
    if (form == 1) {
        return gelu_linear_launch7<Three>(gelu_linear_sm90_kernel7<Three>, out, inp, weight, bias, N, K, OC, stream);
    }
    if (form == 2) {
        return gelu_linear_launch7<Single>(gelu_linear_sm90_kernel7<Single>, out, inp, weight, bias, N, K, OC, stream);
    }
    gelu_linear_launch7<G>(gelu_linear_sm90_kernel7<G>, out, inp, weight, bias, N, K, OC, stream);
}

// ---- kernel 8: tiles of 384 columns: at OC = 768 gelu is computed twice per element, not three times ----
// According to ncu, kernel 7 waits for gelu's instructions, not for the tensor cores. Beside its accumulators of
// 64 x 384, a warpgroup has registers for two fragments of 32 columns of inp: while the products read one, gelu is
// applied to the next.

typedef GemmTiles<128, 384, false, GemmPair, 3, 2> GeluLinearTiles8;

// Like linear_multiply_changed, in half steps of 32 columns. inp_row: the row of the tile that this lane addresses for
// ldmatrix.
template <class G, class Gelu> __device__ inline void
gelu_linear_multiply8(const Gelu& gelu, float (&sum)[1][192], GemmSMem<G>& smem, int inp_row, int num_steps, int& i) {
    int lane = threadIdx.x % 32;
    uint32_t a[8], b[8];
    auto change = [&](uint32_t(&a)[8], int i, int half) {
        uint32_t inp = shared_address(smem.stages[i % G::RING].inp);
        if (half == 0) { smem.ring.wait(i); }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            ldmatrix_x4(a + 4 * k, inp + linear_swizzle(inp_row, 4 * half + 2 * k + lane / 16));
        }
#pragma unroll
        for (int k = 0; k < 2; k++) { gelu.change(a + 4 * k, 0); }
    };
    auto multiply = [&](uint32_t(&a)[8], uint32_t(&next)[8], int step, int half) {
        uint64_t weight = wgmma_descriptor(smem.stages[i % G::RING].weight) + 4 * half; // 32 columns are 64 bytes
        wgmma_hold(a);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int n = 0; n < 2; n++) { // 192 rows of weight are 24 KB, 1536 units of 16 bytes
                wgmma_64x192x16(sum[0] + 96 * n, a + 4 * k, weight + 1536 * n + 2 * k, step > 0 || half > 0 || k > 0,
                                floatX());
            }
        }
        wgmma_commit();
        if (half == 0 || step + 1 < num_steps) {
            change(next, i + half, 1 - half);
            wgmma_hold(next); // makes the compiler place gelu before the wait
        }
        wgmma_wait<0>();
        if (half == 1) { linear_release(smem, i); }
    };
    change(a, i, 0);
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        multiply(a, b, step, 0);
        multiply(b, a, step, 1);
    }
    wgmma_hold(sum[0]);
}

// Like kernel 7, with tiles of 384 columns.
__global__ void __launch_bounds__(384, 1)
    gelu_linear_sm90_kernel8(const __grid_constant__ GemmMaps maps, const GeluLinear6 gelu, const GemmBias<0> bias,
                             int N, int K, int OC, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef GeluLinearTiles8 G;
    extern __shared__ __align__(256) unsigned char gelu_linear_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(gelu_linear_dynamic);
    int warp = gemm_begin(smem, maps, N, OC, K, num_tiles);
    if (warp < 4) { return; }
    int warpgroup = warp / 4, rank = cluster_rank(), num_steps = ceil_div(K, 64), i = 0;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
    int box = 0, warp_row = (warp - 4) * 16;
#pragma unroll 1
    for (int index = first; index < num_tiles; index += stride) {
        float sum[1][192];
        GemmTile tile = gemm_tile<G>(index, N, OC, rank);
        GemmColumns<G, GemmBias<0>> columns;
        gemm_load_columns(columns, bias, tile.column, OC);
        gelu_linear_multiply8(gelu, sum, smem, warp_row + (int)threadIdx.x % 16, num_steps, i);
        gemm_store<G>(sum, bias, columns, smem, maps.out, maps.out, maps.out,
                      GemmTile{tile.row + warp_row, tile.column}, N, box);
    }
    gemm_end<G>();
#endif
}

// out (N,OC) | inp (N,K), weight (OC,K), bias (OC)
void gelu_linear(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int K, int OC,
                 cudaStream_t stream) {
    gelu_linear_launch7<GeluLinearTiles8>(gelu_linear_sm90_kernel8, out, inp, weight, bias, N, K, OC, stream);
}

#endif

// Normal values. If `hard`, every second row is one of three special kinds, in turn: all elements -1e4; large negative
// values; one element of 1000.
static void fill_rows(float* inp, int N, int K, bool hard, std::mt19937& rng) {
    bench_fill_normal(inp, (size_t)N * K, rng(), 1.0f, 0.0f);
    for (int row = 0; row < N && hard; row++) {
        float* x = inp + (size_t)row * K;
        for (int k = 0; k < K; k++) { x[k] = row % 6 == 1 ? -1e4f : row % 6 == 3 ? -fabsf(1000.0f * x[k]) : x[k]; }
        if (row % 6 == 5) { x[row % K] = 1000.0f; }
    }
}

static void declare(Bench& b) {
    if (!b.dry) { cublaslt_open(); }
    int N = b.B * b.T, K = 4 * b.C, OC = b.C;
    int which = b.cases({"normal", "rows where gelu is 0, rows with one large value", "large terms that cancel"});
    bool hard = which == 1, cancelling = which == 2; // cancelling: gelu(x) = x, so the sums are exact
    size_t n = (size_t)N * OC;
    cudaStream_t stream = b.stream;
    Buffer<floatX> inp = b.input_from<floatX>("inp", (size_t)N * K, [=, &rng = b.rng](float* host) {
        fill_rows(host, N, K, hard, rng);
        if (cancelling) { bench_fill_exact_large(host, (size_t)N * K, rng()); }
    });
    Buffer<floatX> weight = b.input_from<floatX>("weight", (size_t)OC * K, [=, seed = b.next_seed()](float* host) {
        bench_fill_normal(host, (size_t)OC * K, seed, 1.0f / sqrtf((float)K), 0.0f);
        if (cancelling) { bench_fill_exact_small(host, (size_t)OC * K, seed), bench_negate_halves(host, OC, K); }
    });
    Buffer<floatX> bias = b.input<floatX>("bias", OC);
    float terms = ulp_of<float>() * 0.64f * sqrtf((float)K); // one ulp of fp32 of the terms' absolute sum
    Tolerance tolerance = sizeof(floatX) == 4 ? ulps<float>(32, 0.0f) : ulps<floatX>(1, 1.5f);
    tolerance.atol += 32.0f * terms;
    Buffer<floatX> out = b.output<floatX>("out", n, tolerance);
    std::vector<size_t> sample = b.sample(N, 2.0 * K * OC);
    b.reference([=] {
        std::vector<float> x = rows_of(inp.host, sample, K), y(sample.size() * OC);
        gelu_linear_cpu(y.data(), x.data(), weight.host, bias.host, (int)sample.size(), K, OC);
        put_rows(out.host, y, sample, OC);
    });
    double e = sizeof(floatX), rows = e * N * K, weights = e * (double)OC * K, results = e * (double)n;
    b.cost(rows + weights + results, 2.0 * N * K * OC);

    Buffer<floatX> active = b.scratch<floatX>("active", (size_t)N * K);
    b.kernel(1, "gelu_forward, then matmul_forward",
             [=](int) { gelu_linear1(out, active, inp, weight, bias, N, K, OC, stream); }, {0});
    b.moves(2, 3 * rows + weights + results);
    b.kernel(2, "one launch: 32x32 tiles, gelu as inp is loaded",
             [=](int) { gelu_linear2(out, inp, weight, bias, N, K, OC, stream); }, {0});
    b.moves(1, rows + weights + results);
    b.best(1);
#if !defined(ENABLE_FP32)
    b.kernel(
        3, "wgmma, gelu in registers, overlapped with the products",
        [=](int) { gelu_linear3(out, inp, weight, bias, N, K, OC, stream); }, {0}, -90);
    b.moves(1, rows + weights + results);
    const std::vector<BenchConfig> forms = {{0, "default"},
                                            {GELU_LINEAR_DEEP_PAIRS, "five stages in clusters of two"},
                                            {GELU_LINEAR_FLAT_PAIRS, "four stages in clusters of two"},
                                            {GELU_LINEAR_DEEP, "five stages"}};
    b.kernel(
        4, "wgmma, dedicated warps apply gelu in shared memory",
        [=](int form) {
            form ? gelu_linear4(out, inp, weight, bias, N, K, OC, stream, form)
                 : gelu_linear4(out, inp, weight, bias, N, K, OC, stream);
        },
        {0}, -90);
    b.config("form", forms);
    b.moves(1, rows + weights + results);
    b.kernel(
        5, "4 with gelu in 16 bits",
        [=](int form) {
            form ? gelu_linear5(out, inp, weight, bias, N, K, OC, stream, form)
                 : gelu_linear5(out, inp, weight, bias, N, K, OC, stream);
        },
        {0}, -90);
    b.config("form", forms);
    b.moves(1, rows + weights + results);
    b.kernel(
        6, "3 with gelu in 16 bits", [=](int) { gelu_linear6(out, inp, weight, bias, N, K, OC, stream); }, {0}, -90);
    b.moves(1, rows + weights + results);
    b.kernel(
        7, "6 in clusters of two that share the weight's tiles",
        [=](int form) { gelu_linear7(out, inp, weight, bias, N, K, OC, stream, form); }, {0}, -90);
    b.config("form", {{0, "four stages"}, {1, "three stages"}, {2, "four stages without a cluster"}});
    b.moves(1, rows + weights + results);
    b.kernel(
        8, "7 with tiles of 384 columns: gelu twice per value, not three times",
        [=](int) { gelu_linear(out, inp, weight, bias, N, K, OC, stream); }, {0}, -90);
    b.moves(1, rows + weights + results);
    b.best(8);
#endif
    b.matrix_rate(cublaslt_matrix_rate);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "gelu_linear", declare, {32, 512, 768, 12, 50257},
                      {{1, 1, 8},
                       {1, 5, 392},
                       {1, 129, 64},
                       {3, 43, 384},
                       {2, 260, 768},
                       {1, 127, 264},
                       {9, 2048, 24},
                       {1, 300, 192}});
}
