/* trimat_forward: att = q k^T / sqrt(HS) for each head, lower triangle only: the scores of causal attention

   att (B,NH,T,T) floatX out, undefined above the diagonal | qkv (B,T,3,NH,HS) floatX in; C = NH*HS
   Bound: memory, B*NH*T*(T+1)/2 + 2*B*T*C elements of floatX, if tensor cores do the B*NH*T*(T+1)*HS FLOPs.
   Constraint: HS % 8 == 0 from kernel 3 on; T <= 65535, B*NH <= 65535.
   Error: against the fp64 reference, one ulp of floatX plus, because terms cancel, 16 ulps of fp32 of the sum of their
   absolute values, which is 0.64 * sqrt(HS) here.
   Kernels 2 to 5 have nothing to choose: all take tiles of 128x128 by 256 threads, so that they differ in one idea.
   Source: Vaswani et al. 2017, arXiv:1706.03762. The kernels optimise as for any matrix product, see matmul_forward.cu.

   The ladder. Both operands are small (25 MB at the default shape) and the result is large (100 MB), but each result is
   a sum of 64 products. Each kernel improves one number: how often is an operand used after it has been loaded?
     1  once                                  each multiply-add loads two operands from the caches
     2  8 times, from registers               an 8x8 square of results needs 16 loads for 64 multiply-adds
     3  as 2, in vectors of 16 bytes          one load brings 8 values of d: an eighth of the loads
     4  128 times, from shared memory         a block loads once what its threads used to load separately
     5  as 4, on tensor cores                 a warp multiplies 16x16 by 16x8 at once; what remains is writing att
   Kernel 0 is cuBLAS, which cannot skip the upper triangle: it computes and writes the whole square.

   Kernels (this list is written by versions.sh):
     0  cuBLAS, the whole square
     1  one thread per result
     2  8x8 results in registers
     3  128-bit loads and stores
     4  128x128 tiles in shared memory
     5  tensor cores, blocks of the triangle only

   nvcc -O3 --use_fast_math trimat_forward.cu -lcublas -lcublasLt -o trimat_forward      (or: make trimat_forward)
   ./trimat_forward 4      check kernel 4 against the CPU
   ./trimat_forward        every kernel, side by side                                         */
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "cublas_batched.cuh"

// The arguments of all kernels. A row of q or k is HS adjacent elements; the rows of a head are 3*C elements apart.
struct Trimat {
    floatX* att;       // (B,NH,T,T)
    const floatX* qkv; // (B,T,3,NH,HS)
    int B, T, NH, HS;
    float scale; // 1 / sqrt(HS)
};

// Returns row 0 of the queries of a head. Row 0 of the head's keys is C elements further.
__host__ __device__ inline const floatX* trimat_queries(const Trimat& a, int head) {
    return a.qkv + ((size_t)(head / a.NH) * a.T * 3 * a.NH + head % a.NH) * a.HS;
}
// Returns row t of att of a head: the scores of query t.
__device__ inline floatX* trimat_row(const Trimat& a, int head, int t) {
    return a.att + ((size_t)head * a.T + t) * a.T;
}

// ---- kernel 0: cuBLAS, one batched call per sequence; twice the work, because it computes the whole square ----

// cuBLAS is column-major, so it computes att^T = k q^T.
void trimat_forward0(const Trimat& a, cudaStream_t stream) {
    const cudaDataType_t type = cublaslt_floatX;
    int C = a.NH * a.HS;
    float beta = 0.0f;
    for (int b = 0; b < a.B; b++) {
        const floatX* q = trimat_queries(a, b * a.NH);
        cublas_batched(CUBLAS_OP_T, CUBLAS_OP_N, a.T, a.T, a.HS, &a.scale, q + C, type, 3 * C, a.HS, q, type, 3 * C,
                       a.HS, &beta, a.att + (size_t)b * a.NH * a.T * a.T, type, a.T, (long long)a.T * a.T, a.NH,
                       stream);
    }
}

// ---- kernel 1: one thread per result ----------------------------------------------------------
// Adjacent threads have the same query and adjacent keys, whose rows are 3*C elements apart, so the loads of k are not
// coalesced: a warp's load touches 32 cache lines and uses one element of each. It is bearable only because the caches
// still hold these lines for the next d.

__global__ void trimat_forward_kernel1(Trimat a) {
    int s = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, head = blockIdx.z;
    if (s > t) { return; } // the key comes after the query
    size_t C = (size_t)a.NH * a.HS;
    const floatX *q = trimat_queries(a, head) + t * 3 * C, *k = trimat_queries(a, head) + C + s * 3 * C;
    float sum = 0.0f;
    for (int d = 0; d < a.HS; d++) { sum += (float)q[d] * (float)k[d]; }
    trimat_row(a, head, t)[s] = (floatX)(sum * a.scale);
}

void trimat_forward1(const Trimat& a, cudaStream_t stream, int block_size) {
    require(a.T <= 65535 && a.B * a.NH <= 65535);
    trimat_forward_kernel1<<<dim3(ceil_div(a.T, block_size), a.T, a.B * a.NH), block_size, 0, stream>>>(a);
    cudaCheck(cudaGetLastError());
}

// ---- shared by kernels 2 to 5: tiles of 128x128 results, 256 threads with 64 results each ----------
// Tiles above the diagonal are skipped. Tiles on the diagonal are computed completely, but only their lower triangle is
// stored.

constexpr int TRIMAT_TILE = 128;

static dim3 trimat_tiles(const Trimat& a) {
    require(a.T <= 65535 && a.B * a.NH <= 65535);
    int n = ceil_div(a.T, TRIMAT_TILE);
    return dim3(n, n, a.B * a.NH);
}

// ---- kernel 2: 8x8 results in registers ---------------------------------------------------------
// 16 loads for 64 multiply-adds, where kernel 1 needs 128 loads. Each load still uses one element of a cache line.

__global__ void __launch_bounds__(256) trimat_forward_kernel2(Trimat a) {
    if (blockIdx.x > blockIdx.y) { return; }
    int s0 = blockIdx.x * TRIMAT_TILE + threadIdx.x % 16 * 8, t0 = blockIdx.y * TRIMAT_TILE + threadIdx.x / 16 * 8;
    size_t C = (size_t)a.NH * a.HS;
    const floatX *q = trimat_queries(a, blockIdx.z), *k = q + C;
    float sums[8][8] = {}; // [query][key]
    for (int d = 0; d < a.HS; d++) {
        float q_d[8], k_d[8];
        for (int i = 0; i < 8; i++) {
            q_d[i] = t0 + i < a.T ? (float)q[(t0 + i) * 3 * C + d] : 0.0f;
            k_d[i] = s0 + i < a.T ? (float)k[(s0 + i) * 3 * C + d] : 0.0f;
        }
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < 8; j++) { sums[i][j] += q_d[i] * k_d[j]; }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            bool inside = t0 + i < a.T && s0 + j <= t0 + i;
            if (inside) { trimat_row(a, blockIdx.z, t0 + i)[s0 + j] = (floatX)(sums[i][j] * a.scale); }
        }
    }
}

void trimat_forward2(const Trimat& a, cudaStream_t stream) {
    trimat_forward_kernel2<<<trimat_tiles(a), 256, 0, stream>>>(a);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: loads and stores of 16 bytes -------------------------------------------------------
// A load also brings the next values of d, so there are fewer loads, and no part of a loaded cache line is wasted.

// Stores 8 results of query t, for keys s..s+7; s is a multiple of 8. Uses vector stores if the row is aligned and none
// of the 8 keys is above the diagonal.
__device__ inline void trimat_store8(const Trimat& a, const float* sums, int head, int t, int s) {
    if (t >= a.T || s > t) { return; }
    floatX* out = trimat_row(a, head, t) + s;
    if (s + 7 <= t && a.T % x128::size == 0) {
#pragma unroll
        for (int j = 0; j < 8; j += x128::size) {
            x128 x;
            for (int i = 0; i < x128::size; i++) { x[i] = (floatX)(sums[j + i] * a.scale); }
            store128(out + j, x);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (s + j <= t) { out[j] = (floatX)(sums[j] * a.scale); }
    }
}

__global__ void __launch_bounds__(256) trimat_forward_kernel3(Trimat a) {
    if (blockIdx.x > blockIdx.y) { return; }
    int s0 = blockIdx.x * TRIMAT_TILE + threadIdx.x % 16 * 8, t0 = blockIdx.y * TRIMAT_TILE + threadIdx.x / 16 * 8;
    size_t C = (size_t)a.NH * a.HS;
    const floatX *q = trimat_queries(a, blockIdx.z), *k = q + C;
    float sums[8][8] = {};
#pragma unroll 1
    for (int d = 0; d < a.HS; d += x128::size) {
        x128 q_d[8];
#pragma unroll
        for (int i = 0; i < 8; i++) { q_d[i] = t0 + i < a.T ? load128(q + (t0 + i) * 3 * C + d) : x128(); }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x128 k_d = s0 + j < a.T ? load128(k + (s0 + j) * 3 * C + d) : x128();
            for (int i = 0; i < 8; i++) {
                for (int e = 0; e < x128::size; e++) { sums[i][j] += (float)q_d[i][e] * (float)k_d[e]; }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { trimat_store8(a, sums[i], blockIdx.z, t0 + i, s0); }
}

void trimat_forward3(const Trimat& a, cudaStream_t stream) {
    require(a.HS % 8 == 0);
    trimat_forward_kernel3<<<trimat_tiles(a), 256, 0, stream>>>(a);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: the tile's rows of q and k in shared memory -----------------------------------------
// In kernel 3 the 16 threads of one row of the tile load the same queries separately. Here the block loads them once
// and stores them as floats, [d][row], so that a thread reads its 8 rows with two 16-byte loads, without conversion.

struct TrimatSMem4 {
    float q[16][TRIMAT_TILE + 4], k[16][TRIMAT_TILE + 4]; // + 4: spreads the stores over banks, keeps 16-byte alignment
};
static_assert(sizeof(TrimatSMem4) == 16896, "what registers allow fits on an SM many times");

// Loads rows row0..row0+127 and columns d0..d0+15; zeros outside of the matrix.
__device__ inline void trimat_load4(float tile[16][TRIMAT_TILE + 4], const floatX* matrix, int row0, int d0,
                                    const Trimat& a) {
    const int vectors = 16 / x128::size; // x128 vectors per row
    for (int i = threadIdx.x; i < TRIMAT_TILE * vectors; i += 256) {
        int row = i / vectors, d = i % vectors * x128::size;
        bool inside = row0 + row < a.T && d0 + d < a.HS;
        x128 x = inside ? load128(matrix + (size_t)(row0 + row) * 3 * a.NH * a.HS + d0 + d) : x128();
        for (int e = 0; e < x128::size; e++) { tile[d + e][row] = (float)x[e]; }
    }
}

__global__ void __launch_bounds__(256) trimat_forward_kernel4(Trimat a) {
    if (blockIdx.x > blockIdx.y) { return; }
    __shared__ alignas(16) TrimatSMem4 shared;
    int s0 = blockIdx.x * TRIMAT_TILE, t0 = blockIdx.y * TRIMAT_TILE;
    int s = threadIdx.x % 16 * 8, t = threadIdx.x / 16 * 8; // the thread's first key and query within the tile
    const floatX *q = trimat_queries(a, blockIdx.z), *k = q + (size_t)a.NH * a.HS;
    float sums[8][8] = {};
    for (int d0 = 0; d0 < a.HS; d0 += 16) {
        trimat_load4(shared.q, q, t0, d0, a);
        trimat_load4(shared.k, k, s0, d0, a);
        __syncthreads();
        for (int d = 0; d < 16; d++) {
            f128 q_d[2] = {load128(&shared.q[d][t]), load128(&shared.q[d][t + 4])};
            f128 k_d[2] = {load128(&shared.k[d][s]), load128(&shared.k[d][s + 4])};
            for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 8; j++) { sums[i][j] += q_d[i / 4][i % 4] * k_d[j / 4][j % 4]; }
            }
        }
        __syncthreads(); // now all threads have read these columns, and the next ones may overwrite them
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { trimat_store8(a, sums[i], blockIdx.z, t0 + t + i, s0 + s); }
}

void trimat_forward4(const Trimat& a, cudaStream_t stream) {
    require(a.HS % 8 == 0);
    trimat_forward_kernel4<<<trimat_tiles(a), 256, 0, stream>>>(a);
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// ---- kernel 5: tensor cores ---------------------------------------------------------------------
// Eight warps with 64x32 results each, as 4x4 accumulator tiles of 16x8. Operands stay in 16 bits all the way: cp.async
// copies them to shared memory without passing through registers, and ldmatrix loads them in mma's operand layout. The
// grid contains only the tiles of the triangle, so that no block starts without work.

struct TrimatSMem5 {
    floatX q[TRIMAT_TILE][64], k[TRIMAT_TILE][64]; // a row is 8 chunks of 16 bytes, swizzled
};
static_assert(sizeof(TrimatSMem5) == 32 * 1024, "registers, not this, decide how many blocks fit on an SM");

// The element offset of a chunk within its row. The xor puts the same chunk of the 8 rows that ldmatrix reads at once
// into 8 different groups of 4 banks.
__device__ inline int trimat_swizzle5(int row, int chunk) { return (chunk ^ (row % 8)) * 8; }

// Issues cp.async for rows row0..row0+127 and columns d0..d0+63; zeros outside of the matrix.
__device__ inline void trimat_load5(floatX tile[TRIMAT_TILE][64], const floatX* matrix, int row0, int d0,
                                    const Trimat& a) {
    for (int i = threadIdx.x; i < TRIMAT_TILE * 8; i += 256) {
        int row = i / 8, chunk = i % 8;
        bool inside = row0 + row < a.T && d0 + chunk * 8 < a.HS;
        const floatX* from = inside ? matrix + (size_t)(row0 + row) * 3 * a.NH * a.HS + d0 + chunk * 8 : matrix;
        cp_async_16(&tile[row][trimat_swizzle5(row, chunk)], from, inside);
    }
}

__global__ void __launch_bounds__(256, 2) trimat_forward_kernel5(Trimat a) {
    __shared__ alignas(128) TrimatSMem5 shared;
    // the tiles of the triangle are numbered row by row; row r begins with tile r (r + 1) / 2
    int row = (int)((sqrtf(8.0f * blockIdx.x + 1.0f) - 1.0f) * 0.5f);
    while (row * (row + 1) / 2 > (int)blockIdx.x) { row--; } // sqrtf is not exact
    while ((row + 1) * (row + 2) / 2 <= (int)blockIdx.x) { row++; }
    int t0 = row * TRIMAT_TILE, s0 = (int)(blockIdx.x - row * (row + 1) / 2) * TRIMAT_TILE, head = blockIdx.y;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_t = warp / 4 * 64, warp_s = warp % 4 * 32;
    const floatX *q = trimat_queries(a, head), *k = q + (size_t)a.NH * a.HS;
    float sums[4][16] = {}; // [group of 16 queries][4 accumulator tiles of 8 keys]
#pragma unroll 1
    for (int d0 = 0; d0 < a.HS; d0 += 64) {
        if (d0 > 0) { __syncthreads(); } // now all warps have read the columns that the next loads overwrite
        trimat_load5(shared.q, q, t0, d0, a);
        trimat_load5(shared.k, k, s0, d0, a);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) { // 16 columns at a time
            uint32_t q_d[4][4], k_d[2][4];
            for (int i = 0; i < 4; i++) {
                int r = warp_t + 16 * i + lane % 16;
                ldmatrix_x4(q_d[i], &shared.q[r][trimat_swizzle5(r, chunk + lane / 16)]);
            }
            for (int j = 0; j < 2; j++) { // 16 keys, for two accumulator tiles
                int r = warp_s + 16 * j + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(k_d[j], &shared.k[r][trimat_swizzle5(r, chunk + lane / 8 % 2)]);
            }
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) {
                    mma_16x8x16(sums[i] + 4 * j, q_d[i], k_d[j / 2][j % 2 * 2], k_d[j / 2][j % 2 * 2 + 1], floatX());
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) { // rows g = lane / 4 and g + 8 of the accumulator tiles
            float v[4][2];
            for (int j = 0; j < 4; j++) {
                v[j][0] = sums[i][4 * j + 2 * upper];
                v[j][1] = sums[i][4 * j + 2 * upper + 1];
            }
            mma_quad_transpose(v); // now each lane has 8 adjacent keys of one query, which it stores as one vector
            trimat_store8(a, &v[0][0], head, t0 + warp_t + 16 * i + 8 * upper + lane / 4, s0 + warp_s + lane % 4 * 8);
        }
    }
}

void trimat_forward5(const Trimat& a, cudaStream_t stream) {
    require(a.HS % 8 == 0 && a.T <= 65535 && a.B * a.NH <= 65535);
    require(compiled_arch(trimat_forward_kernel5) >= 80);
    int n = ceil_div(a.T, TRIMAT_TILE);
    trimat_forward_kernel5<<<dim3(n * (n + 1) / 2, a.B * a.NH), 256, 0, stream>>>(a);
    cudaCheck(cudaGetLastError());
}
#endif

// ---- main ------------------------------------------------------------------------------------------

// Writes zeros above the diagonal before the comparison, because the reference has zeros there and a kernel may leave
// anything.
__global__ void trimat_clear_kernel(floatX* att, int T, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && i % T > i / T % T) { att[i] = (floatX)0.0f; }
}

static void declare(Bench& b) {
    b.varies("BTH");
    require(b.C % b.NH == 0);
    int B = b.B, T = b.T, C = b.C, NH = b.NH, HS = C / NH;
    size_t n = (size_t)B * NH * T * T;
    cudaStream_t stream = b.stream;
    if (!b.dry) {
        cublaslt_open(); // needed to measure the matrix rate
        cublas_handle();
    }
    bool cancelling = b.cases({"normal", "large terms that cancel"}) == 1;
    Buffer<floatX> qkv = b.input_from<floatX>("qkv", (size_t)B * T * 3 * C, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, (size_t)B * T * 3 * C, seed, 1.0f, 0.0f);
        for (size_t row = 0; cancelling && row < (size_t)B * T; row++) {
            float* q = x + row * 3 * C;
            bench_fill_exact_large(q, C, hash_bits((uint32_t)row, seed)), bench_negate_halves(q, NH, HS);
            bench_fill_exact_small(q + C, C, hash_bits((uint32_t)row, seed + 1));
        }
    });
    Tolerance tolerance = ulps<floatX>(1, 0.0f);
    tolerance.atol = 16 * ulp_of<float>() * 0.64f * sqrtf((float)HS);
    Buffer<floatX> att = b.output<floatX>("att", n, tolerance);
    if (!b.dry) {
        auto compare = b.state.buffers.back().compare;
        b.state.buffers.back().compare = [=](double factor, std::string* wrong) {
            trimat_clear_kernel<<<(unsigned)ceil_div(n, (size_t)256), 256, 0, stream>>>(att, T, n);
            cudaCheck(cudaGetLastError());
            return compare(factor, wrong);
        };
    }
    b.reference([=] { trimat_forward_cpu(att.host, qkv.host, B, T, C, NH); });
    double triangle = (double)B * NH * T * (T + 1.0) / 2;
    b.cost((triangle + 2.0 * B * T * C) * sizeof(floatX), 2 * triangle * HS);
    b.matrix_rate(cublaslt_matrix_rate);
    Trimat a = {att, qkv, B, T, NH, HS, 1.0f / sqrtf((float)HS)};
    b.kernel(0, "cuBLAS, the whole square", [=](int) { trimat_forward0(a, stream); }, {0});
    b.kernel(1, "one thread per result", [=](int bs) { trimat_forward1(a, stream, bs); });
    b.kernel(2, "8x8 results in registers", [=](int) { trimat_forward2(a, stream); }, {0});
    b.kernel(3, "128-bit loads and stores", [=](int) { trimat_forward3(a, stream); }, {0});
    b.kernel(4, "128x128 tiles in shared memory", [=](int) { trimat_forward4(a, stream); }, {0});
#if !defined(ENABLE_FP32)
    b.kernel(
        5, "tensor cores, blocks of the triangle only", [=](int) { trimat_forward5(a, stream); }, {0}, 80);
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "trimat_forward", declare, {8, 1024, 768, 12, 50257},
                      {{1, 1, 8, 1},
                       {2, 17, 64, 4},
                       {1, 128, 64, 1},
                       {2, 129, 192, 3},
                       {1, 200, 776, 1},
                       {1, 136, 240, 2},
                       {1, 520, 160, 2}});
}
