/*
newton_schulz: out (num,n,k) = about U V^T for each matrix inp (num,n,k) = U S V^T, whose Frobenius norm is at most 1 | scratch in floatX
Constraint: num <= 65535.
Kernels 2 (fp32, before sm_80, or n or k no multiple of 8), 4 (mma.sync) and 5 (wgmma) of newton_schulz.cu, which has the other kernels,
errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "gemm.cuh"
#include <limits.h>

// ==== promoted: newton_schulz ====
// The steps of Newton-Schulz on many matrices at once, see newton_schulz() below.

// One of a step's three products, for `num` matrices: out (M,N) = scale * left (M,K) right + add_scale * add (M,N),
// where right is (N,K), transposed, or (K,N). The matrices of each operand follow one another.
struct NewtonSchulzProduct {
    floatX* out;
    const floatX *left, *right, *add; // add is NULL if add_scale is 0
    float scale, add_scale;
    int M, N, K, num;
    bool right_by_k; // right is (K,N); otherwise out is symmetric
};

// Calls product() for each product of the five steps. The steps alternate between out and the first num*n*k values of
// scratch, where inp may be.
template <class Product>
void newton_schulz_steps(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, Product product) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    require(num >= 1 && num <= 65535 && n >= 1 && k >= 1);
    floatX *other = scratch, *gram = other + (size_t)num * n * k, *poly = gram + (size_t)num * n * n;
    const floatX* x = inp;
    for (int step = 0; step < 5; step++) {
        floatX* next = step % 2 == 0 ? out : other;
        product(NewtonSchulzProduct{gram, x, x, NULL, 1.0f, 0.0f, n, n, k, num, false});
        product(NewtonSchulzProduct{poly, gram, gram, gram, c, b, n, n, n, num, false}); // gram is its own transpose
        product(NewtonSchulzProduct{next, poly, x, x, 1.0f, a, n, k, n, num, true});
        x = next;
    }
}
// in values of floatX
size_t newton_schulz_scratch(int num, int n, int k) { return (size_t)num * n * ((size_t)k + 2 * (size_t)n); }

// The matrices of block blockIdx.y.
__device__ inline NewtonSchulzProduct newton_schulz_matrix(NewtonSchulzProduct p) {
    size_t matrix = blockIdx.y, M = p.M, N = p.N, K = p.K;
    p.out += matrix * M * N, p.left += matrix * M * K, p.right += matrix * N * K;
    if (p.add) { p.add += matrix * M * N; }
    return p;
}

// ---- kernel 2: 64x64 tiles in shared memory ------------------------------------------------------
// 256 threads with 4x4 results each. It needs no tensor cores: for fp32, and for GPUs before compute capability 8.0.

__global__ void __launch_bounds__(256) newton_schulz_kernel2(NewtonSchulzProduct batch) {
    __shared__ float left[16][64 + 1], right[16][64 + 1]; // [k][row or column]; + 1: against bank conflicts
    NewtonSchulzProduct p = newton_schulz_matrix(batch);
    int num_columns = ceil_div(p.N, 64), row0 = blockIdx.x / num_columns * 64, column0 = blockIdx.x % num_columns * 64;
    int x = threadIdx.x % 16, y = threadIdx.x / 16; // the thread's results: rows y + 16 i, columns x + 16 j
    float sum[4][4] = {};
    for (int k0 = 0; k0 < p.K; k0 += 16) {
        for (int i = threadIdx.x; i < 16 * 64; i += 256) { // neighbouring threads load neighbouring values
            int k = i % 16, row = i / 16;
            bool inside = k0 + k < p.K && row0 + row < p.M;
            left[k][row] = inside ? (float)p.left[(size_t)(row0 + row) * p.K + k0 + k] : 0.0f;
            int right_k = p.right_by_k ? i / 64 : k, column = p.right_by_k ? i % 64 : row;
            inside = k0 + right_k < p.K && column0 + column < p.N;
            size_t at = p.right_by_k ? (size_t)(k0 + right_k) * p.N + column0 + column
                                     : (size_t)(column0 + column) * p.K + k0 + right_k;
            right[right_k][column] = inside ? (float)p.right[at] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            float l[4], r[4];
            for (int i = 0; i < 4; i++) { l[i] = left[k][y + 16 * i], r[i] = right[k][x + 16 * i]; }
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) { sum[i][j] += l[i] * r[j]; }
            }
        }
        __syncthreads(); // all have read this tile
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int row = row0 + y + i / 4 * 16, column = column0 + x + i % 4 * 16;
        if (row >= p.M || column >= p.N) { continue; }
        size_t at = (size_t)row * p.N + column;
        p.out[at] = (floatX)(p.scale * sum[i / 4][i % 4] + (p.add ? p.add_scale * (float)p.add[at] : 0.0f));
    }
}

void newton_schulz2(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        launch_kernel(newton_schulz_kernel2, LaunchShape(dim3(ceil_div(p.M, 64) * ceil_div(p.N, 64), num), 256), exec,
                      p);
    });
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers
// ---- shared by kernels 3 and 4: a tile of 128x128 results by mma.sync, from a ring of stages -------

// A stage has 32 values of k. left and a right (N,K) are tiles (128,32), a right (K,N) is (32,128).
template <int ring> union NewtonSchulzSMem {
    struct {
        floatX left[ring][128 * 32], right[ring][128 * 32];
    };
    floatX transposed[128]
                     [128 + 8]; // kernel 4: the tile of results, [column][row]; + 8: keeps vectors aligned to 16 bytes
};

// Swizzles: the offset of chunk `chunk` (8 elements) of a row, in a tile (128,32) or (32,128). The same chunk of the 8
// neighbouring rows that ldmatrix reads at once is then in 8 different groups of 4 banks.
__device__ inline int newton_schulz_at_128x32(int row, int chunk) { return row * 32 + (chunk ^ (row / 2 % 4)) * 8; }
__device__ inline int newton_schulz_at_32x128(int row, int chunk) { return row * 128 + (chunk ^ (row % 8)) * 8; }

// Loads a tile of matrix (num_rows, num_columns) from (row0, column0) on; zeros outside of it.
template <bool is_128x32> __device__ inline void newton_schulz_load(floatX* tile, const floatX* matrix, int row0,
                                                                    int column0, int num_rows, int num_columns) {
    const int chunks = is_128x32 ? 4 : 16; // per row
    for (int v = threadIdx.x; v < 128 * 4; v += 256) {
        int row = v / chunks, chunk = v % chunks;
        bool inside = row0 + row < num_rows && column0 + chunk * 8 < num_columns;
        const floatX* from = inside ? matrix + (size_t)(row0 + row) * num_columns + column0 + chunk * 8 : matrix;
        int at = is_128x32 ? newton_schulz_at_128x32(row, chunk) : newton_schulz_at_32x128(row, chunk);
        cp_async_16(tile + at, from, inside);
    }
}

// sum = the tile of left * right at (row0, column0). Eight warps with 64x32 results each, as fragments of 16x8:
// [four groups of 16 rows][four fragments of 8 columns, 4 values per lane]
template <bool right_by_k, int ring>
__device__ inline void newton_schulz_multiply(float (&sum)[4][16], NewtonSchulzSMem<ring>& shared,
                                              const NewtonSchulzProduct& p, int row0, int column0) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    int num_steps = ceil_div(p.K, 32);
    auto load = [&](int step) {
        if (step < num_steps) {
            newton_schulz_load<true>(shared.left[step % ring], p.left, row0, step * 32, p.M, p.K);
            if (right_by_k) {
                newton_schulz_load<false>(shared.right[step % ring], p.right, step * 32, column0, p.K, p.N);
            } else {
                newton_schulz_load<true>(shared.right[step % ring], p.right, column0, step * 32, p.N, p.K);
            }
        }
        cp_async_commit(); // past the last step the group is empty: cp_async_wait counts one group per step
    };
    for (int step = 0; step < ring - 1; step++) { load(step); }
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        cp_async_wait<ring - 2>();
        __syncthreads(); // this step's stage has arrived, and all warps have read the previous step's stage
        load(step + ring - 1);
        const floatX *left = shared.left[step % ring], *right = shared.right[step % ring];
#pragma unroll
        for (int k = 0; k < 2; k++) { // 16 of the stage's 32 values of k per iteration
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ldmatrix_x4(a[i], left + newton_schulz_at_128x32(warp_row + 16 * i + lane % 16, 2 * k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) { // two fragments of 8 columns each
                int column = warp_column + 16 * j;
                if (right_by_k) {
                    ldmatrix_x4_trans(b[j],
                                      right + newton_schulz_at_32x128(16 * k + lane % 16, column / 8 + lane / 16));
                } else {
                    int row = column + lane / 16 * 8 + lane % 8;
                    ldmatrix_x4(b[j], right + newton_schulz_at_128x32(row, 2 * k + lane / 8 % 2));
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    mma_16x8x16(sum[i] + 4 * j, a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], floatX());
                }
            }
        }
    }
}

// Stores the tile: sum times scale, plus the added term. If `transposed` is not NULL, it receives the same values.
__device__ inline void newton_schulz_store(float (&sum)[4][16], floatX (*transposed)[128 + 8],
                                           const NewtonSchulzProduct& p, int row0, int column0) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 8; half++) { // rows 0..7 of the fragments, then 8..15
        const int i = half / 2, upper = half % 2;
        float v[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j][0] = sum[i][4 * j + 2 * upper];
            v[j][1] = sum[i][4 * j + 2 * upper + 1];
        }
        mma_quad_transpose(v); // now this lane has 8 neighbouring results of one row
        int row = warp / 4 * 64 + 16 * i + 8 * upper + lane / 4, column = warp % 4 * 32 + lane % 4 * 8;
        bool inside = row0 + row < p.M && column0 + column < p.N;
        size_t at = (size_t)(row0 + row) * p.N + column0 + column;
        x128 add = p.add && inside ? load128(p.add + at) : x128(), result;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            result[e] = (floatX)(p.scale * v[e / 2][e % 2] + p.add_scale * (p.add ? (float)add[e] : 0.0f));
        }
        if (inside) { store128(p.out + at, result); }
        for (int e = 0; transposed && e < 8; e++) { transposed[column + e][row] = result[e]; }
    }
}

// ---- kernel 4: of symmetric products, tiles on and above the diagonal, stored twice ----

//     tiles (row, column)      0,0  0,1  0,2          a block computes one of the numbered tiles, and stores it twice:
//     of a symmetric product    -   1,1  1,2          tile 0,1 also as tile 1,0. The tile is transposed in
//                               -    -   2,2          shared memory, so that both stores are of whole vectors.

// The row and column of tile `index` of a symmetric product. Column c has tiles 0 to c.
__device__ inline void newton_schulz_upper_tile(int index, int& row, int& column) {
    for (column = 0; index > column; column++) { index -= column + 1; }
    row = index;
}

template <bool right_by_k, int ring> __global__ void __launch_bounds__(256, 2)
    newton_schulz_kernel4(NewtonSchulzProduct batch) {
    extern __shared__ __align__(128) unsigned char newton_schulz_dynamic[];
    auto& shared = *reinterpret_cast<NewtonSchulzSMem<ring>*>(newton_schulz_dynamic);
    NewtonSchulzProduct p = newton_schulz_matrix(batch);
    int num_columns = ceil_div(p.N, 128), row = blockIdx.x / num_columns, column = blockIdx.x % num_columns;
    if (!right_by_k) { newton_schulz_upper_tile(blockIdx.x, row, column); }
    bool mirrored = !right_by_k && row < column;
    float sum[4][16] = {};
    newton_schulz_multiply<right_by_k>(sum, shared, p, row * 128, column * 128);
    cp_async_wait<0>();
    __syncthreads(); // all warps have read the last stage, in whose memory the transposed tile will be
    newton_schulz_store(sum, mirrored ? shared.transposed : NULL, p, row * 128, column * 128);
    if (!mirrored) { return; }
    __syncthreads(); // the transposed tile is complete
    for (int v = threadIdx.x; v < 128 * 16; v += 256) {
        // all columns are inside the matrix, because row < column
        int out_row = column * 128 + v / 16, out_column = row * 128 + v % 16 * 8;
        if (out_row < p.N) {
            store128(p.out + (size_t)out_row * p.N + out_column, load128(&shared.transposed[v / 16][v % 16 * 8]));
        }
    }
}

template <int ring = 4>
void newton_schulz4(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    require(n % 8 == 0 && k % 8 == 0);
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        auto kernel = p.right_by_k ? newton_schulz_kernel4<true, ring> : newton_schulz_kernel4<false, ring>;
        int rows = ceil_div(p.M, 128), tiles = p.right_by_k ? rows * ceil_div(p.N, 128) : rows * (rows + 1) / 2;
        launch_kernel(kernel, LaunchShape(dim3(tiles, num), 256, sizeof(NewtonSchulzSMem<ring>)), exec, p);
    });
}

// ---- kernel 5: as 4, by wgmma with operands by TMA, two consumers that alternate (ping-pong) -------

// The kernel is gemm_sm90_kernel9, with forms and an epilogue of its own. Tensor maps have three dimensions, (num, rows,
// columns), and a box is of one matrix: where a tile extends past the end of its matrix, zeros are loaded and nothing is
// stored. So tiles need not divide the matrices. Blocks form no clusters, which bring nothing at 128x192.

// A tile of one of the matrices.
struct NewtonSchulzTile : GemmTile {
    int matrix;

    __device__ void load(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        tma_load_3d(box, &map, x, y, matrix, full);
    }
    __device__ void load_once(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        load(box, map, x, y, full);
    }
    __device__ void store(const CUtensorMap& map, const void* box, int x, int y) const {
        tma_store_3d(&map, box, x, y, matrix);
    }
};

// The tiles of one matrix that are computed.
template <class G> __host__ __device__ inline int newton_schulz_tiles_per_matrix(int M, int N) {
    int num_rows = ceil_div(M, G::ROWS);
    return G::IS_KN ? num_rows * ceil_div(N, G::COLUMNS) : num_rows * (num_rows + 1) / 2;
}

// Adds to a form that tiles belong to many matrices, which follow one another.
template <class Form> struct NewtonSchulzTiles : Form {
    template <class G> static __device__ NewtonSchulzTile tile(int index, int M, int N, int) {
        int num_tiles = newton_schulz_tiles_per_matrix<G>(M, N), num_columns = ceil_div(N, G::COLUMNS);
        int matrix = index / num_tiles, row = index % num_tiles / num_columns, column = index % num_tiles % num_columns;
        if (!G::IS_KN) { newton_schulz_upper_tile(index % num_tiles, row, column); }
        return {{row * G::ROWS, column * G::COLUMNS}, matrix};
    }
};
// poly x: 192 divides 768 and 3072.
typedef NewtonSchulzTiles<GemmPingPong192<GemmSingle, true>> NewtonSchulzTiles192;
// Symmetric products have square tiles, so that a tile is on one side of the diagonal, or on it.
struct NewtonSchulzForm128 : GemmSingle {
    static constexpr int ROWS = 128, COLUMNS = 128, PARTS = 2, READERS = 4, RING = 5, BOXES = 4;
    static __device__ void wgmma(float (&sum)[64], uint64_t left, uint64_t right, bool accumulate) {
        wgmma_64x128x16(sum, left, right, accumulate, floatX());
    }
};
typedef NewtonSchulzTiles<NewtonSchulzForm128> NewtonSchulzTiles128;

// out = scale * sum + add_scale * third; of a symmetric product, a tile above the diagonal is also stored transposed.
template <bool is_symmetric> struct NewtonSchulzEpilogue : GemmBias<GEMM_NO_BIAS> {
    static constexpr int EXTRAS = GEMM_THIRD | GEMM_NO_BIAS | (is_symmetric ? GEMM_MIRRORED : 0);
    float scale, add_scale;
    // poly x always has a term to add
    __device__ bool reads_third() const { return !is_symmetric || add_scale != 0.0f; }
    __device__ float combined(float y, float third) const { return scale * y + add_scale * third; }

    // Stores a 128x128 tile transposed. results: the warp's boxes n = 2 m + q of 16x64 results, rows 64 m + 16 warp, columns
    // 64 q, as fragments. The consumer's memory is now one box of 64x64 per warp, number 2 q + m:
    //
    //     rows of the box: 64 columns of the tile    | warp 0 | warp 1 | warp 2 | warp 3 |     16 columns of the box, the
    //     from 64 q on                               |        |        |        |        |     16 rows of each warp's fragments
    __device__ void store_mirrored(const uint32_t (&results)[4][16], GemmSMem<NewtonSchulzTiles128>& smem,
                                   const CUtensorMap& map, const NewtonSchulzTile& tile) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, consumer = warp / 4, row = tile.row - warp % 4 * 16;
        if (row >= tile.column) { return; }
        if (lane == 0) { tma_store_wait<0>(); } // TMA has read this warp's boxes
        gemm_consumer_sync();
        // this lane's 16 bytes for stmatrix: row lane % 8 of matrix lane / 8, which are rows 0..7 and 8..15 of columns 0..7,
        // then of columns 8..15; swizzled
        uint32_t lane_at = (lane / 16 * 8 + lane % 8) * 128 + ((2 * (warp % 4) + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t at = shared_address(smem.boxes[4 * consumer + n % 2 * 2 + n / 2]) + lane_at;
#pragma unroll
            for (int p = 0; p < 4; p++) { stmatrix_x4_trans(at + p * 16 * 128, &results[n][4 * p]); }
        }
        tma_store_fence();
        gemm_consumer_sync();
        if (lane == 0) { // the box in this warp's memory
            tile.store(map, smem.boxes[warp], row + warp % 2 * 64, tile.column + warp % 4 / 2 * 64);
            tma_store_commit();
        }
    }
};

template <class G> void newton_schulz_product5(const NewtonSchulzProduct& p, const Execution& exec) {
    GemmMaps maps;
    maps.inp = tensor_map(p.left, {p.K, p.M, p.num}, {64, G::ROWS, 1});
    maps.weight = G::IS_KN ? tensor_map(p.right, {p.N, p.K, p.num}, {64, 64, 1})
                           : tensor_map(p.right, {p.K, p.N, p.num}, {64, G::COLUMNS, 1});
    maps.out = tensor_map(p.out, {p.N, p.M, p.num}, {64, 16, 1});
    maps.second = tensor_map(p.out, {p.N, p.M, p.num}, {64, 64, 1}); // for mirrored tiles
    maps.third = p.add ? tensor_map(p.add, {p.N, p.M, p.num}, {64, 16, 1}) : maps.out;
    NewtonSchulzEpilogue<!G::IS_KN> epilogue = {{NULL}, p.scale, p.add_scale};
    size_t num_tiles = (size_t)p.num * newton_schulz_tiles_per_matrix<G>(p.M, p.N);
    require(num_tiles * ceil_div(p.K, 64) <= INT_MAX / 2); // steps are counted in an int
    gemm_start<G>(gemm_sm90_kernel9<G, NewtonSchulzEpilogue<!G::IS_KN>>, (int)num_tiles, true, exec, maps, epilogue,
                  p.M, p.N, p.K, (int)num_tiles, GemmNoIdleWork());
}

void newton_schulz5(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    require(has_sm90a() && n % 8 == 0 && k % 8 == 0);
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        p.right_by_k ? newton_schulz_product5<NewtonSchulzTiles192>(p, exec)
                     : newton_schulz_product5<NewtonSchulzTiles128>(p, exec);
    });
}
#endif

// Five steps of Newton-Schulz on num matrices (n,k); n <= k is the cheaper way round.
// out (num,n,k) | scratch (newton_schulz_scratch) | inp (num,n,k), of norms up to 1; may be the beginning of scratch
void newton_schulz(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    double N = n, K = k;
    Op op(exec, 2.0 * num * N * K * sizeof(floatX), 5.0 * num * (N * (N + 1) * (N + K) + 2 * N * N * K),
          "newton_schulz");
#if !defined(ENABLE_FP32)
    if (n % 8 == 0 && k % 8 == 0) {
        if (has_sm90a()) { return newton_schulz5(out, scratch, inp, num, n, k, exec); }
        if (compiled_arch(newton_schulz_kernel4<true, 4>) >= 80) {
            return newton_schulz4(out, scratch, inp, num, n, k, exec);
        }
    }
#endif
    newton_schulz2(out, scratch, inp, num, n, k, exec);
}
// ==== end promoted: newton_schulz ====
