/* permute: packed qkv (B,T,3,NH,HS), the output of the matmul before attention, to q, k, v (B,NH,T,HS), or back

   q, k, v (B,NH,T,HS) floatX out | packed (B,T,3,NH,HS) floatX in; of kind 1 the reverse; C = NH*HS
   Bound: memory, 2*B*T*3*C*sizeof(floatX) bytes. Constraint: HS % x128::size == 0 from kernel 3 on.
   Error: none, values are only moved.
   The HS elements of a head stay contiguous: 64 elements of 16 bits are a cache line of 128 bytes, so no order of
   access wastes part of a line. The kernels differ in how far apart the lines are that a block reads and writes, and in
   the arithmetic and the loads in flight per byte.
   A kernel that reads the packed tensor directly, as attention_forward does, needs no permute.
   Source: the layouts of Vaswani et al. 2017, arXiv:1706.03762: heads of a token side by side, or one head at a time.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  one block per token
     3  128-bit vectors
     4  four tokens per thread, its column computed once
     5  threads in the order of q, k, v (slower than 4)
     6  tiles through shared memory, long runs on both sides (slower than 4)

   nvcc -O3 --use_fast_math permute.cu -o permute      (or: make permute)
   ./permute 4           check kernel 4 against the CPU and sweep its block sizes
   ./permute             every kernel, side by side
   ./permute --kind 1    the reverse: q, k, v to packed                                      */
#include "bench.h"

// The tensors in both layouts. If the kernels' template parameter `back` is false, packed is the input; if it is true,
// q, k and v are.
struct Permute {
    floatX* packed;    // (B,T,3,NH,HS)
    floatX *q, *k, *v; // (B,NH,T,HS)
    int B, T, NH, HS;
};

// Returns the address of element d of a head in q, k or v. slot = part * NH + h is the head's index within a token of
// packed, with part 0, 1, 2 for q, k, v.
__device__ inline floatX* permute_split_at(const Permute& p, int b, int t, int slot, int d) {
    int part = slot / p.NH, h = slot % p.NH;
    floatX* first = part == 0 ? p.q : part == 1 ? p.k : p.v;
    return first + (((size_t)b * p.NH + h) * p.T + t) * p.HS + d;
}
// Returns the address of column 0 .. 3*NH*HS-1 of token (b, t) in packed.
__device__ inline floatX* permute_packed_at(const Permute& p, int b, int t, int column) {
    return p.packed + ((size_t)b * p.T + t) * 3 * p.NH * p.HS + column;
}

// ---- kernel 1: one thread per element, 64-bit divisions to find its address ----------------------

template <bool back> __global__ void permute_kernel1(Permute p) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, T = p.T, NH = p.NH, HS = p.HS;
    if (i >= p.B * T * 3 * NH * HS) { return; }
    size_t d = i % HS, slot = i / HS % (3 * NH), t = i / (HS * 3 * NH) % T, b = i / (HS * 3 * NH * T);
    floatX* split = permute_split_at(p, (int)b, (int)t, (int)slot, (int)d);
    if (back) {
        p.packed[i] = *split;
    } else {
        *split = p.packed[i];
    }
}

template <bool back> void permute1(const Permute& p, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)p.B * p.T * 3 * p.NH * p.HS, (size_t)block_size);
    require(num_blocks <= INT_MAX);
    permute_kernel1<back><<<(unsigned)num_blocks, block_size, 0, stream>>>(p);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one block per token; blockIdx.x is the token, and the divisions are 32-bit ----

template <bool back> __global__ void permute_kernel2(Permute p) {
    int b = blockIdx.x / p.T, t = blockIdx.x % p.T;
    for (int column = threadIdx.x; column < 3 * p.NH * p.HS; column += blockDim.x) {
        floatX* packed = permute_packed_at(p, b, t, column);
        floatX* split = permute_split_at(p, b, t, column / p.HS, column % p.HS);
        if (back) {
            *packed = *split;
        } else {
            *split = *packed;
        }
    }
}

static unsigned permute_num_tokens(const Permute& p) {
    require((size_t)p.B * p.T <= INT_MAX && (size_t)3 * p.NH * p.HS <= INT_MAX - 8192);
    return (unsigned)p.B * p.T;
}

template <bool back> void permute2(const Permute& p, cudaStream_t stream, int block_size) {
    permute_kernel2<back><<<permute_num_tokens(p), block_size, 0, stream>>>(p);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: 128-bit vectors --------------------------------------------------------------

template <bool back> __global__ void permute_kernel3(Permute p) {
    int b = blockIdx.x / p.T, t = blockIdx.x % p.T;
    for (int column = threadIdx.x * x128::size; column < 3 * p.NH * p.HS; column += blockDim.x * x128::size) {
        floatX* packed = permute_packed_at(p, b, t, column);
        floatX* split = permute_split_at(p, b, t, column / p.HS, column % p.HS);
        store128(back ? packed : split, load128(back ? split : packed));
    }
}

template <bool back> void permute3(const Permute& p, cudaStream_t stream, int block_size) {
    require(p.HS % x128::size == 0);
    permute_kernel3<back><<<permute_num_tokens(p), block_size, 0, stream>>>(p);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: each thread computes its column once for four successive tokens, with four loads in flight ----

constexpr int PERMUTE_NUM_LOADS = 4;

template <bool back> __global__ void permute_kernel4(Permute p, unsigned num_threads) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, row_vectors = 3u * p.NH * p.HS / x128::size;
    if (i >= num_threads) { return; }
    // group: index of the thread's group of 4 tokens; groups: their number per sequence
    unsigned group = i / row_vectors, groups = ceil_div(p.T, PERMUTE_NUM_LOADS);
    int column = (int)(i % row_vectors) * x128::size, b = group / groups, t0 = group % groups * PERMUTE_NUM_LOADS;
    floatX* packed = permute_packed_at(p, b, t0, column);
    floatX* split = permute_split_at(p, b, t0, column / p.HS, column % p.HS);
    size_t packed_step = (size_t)3 * p.NH * p.HS, split_step = p.HS; // elements from token to token
    x128 x[PERMUTE_NUM_LOADS];
#pragma unroll
    for (int j = 0; j < PERMUTE_NUM_LOADS; j++) {
        if (t0 + j < p.T) { x[j] = load128(back ? split + j * split_step : packed + j * packed_step); }
    }
#pragma unroll
    for (int j = 0; j < PERMUTE_NUM_LOADS; j++) {
        if (t0 + j < p.T) { store128(back ? packed + j * packed_step : split + j * split_step, x[j]); }
    }
}

template <bool back> void permute4(const Permute& p, cudaStream_t stream, int block_size) {
    require(p.HS % x128::size == 0);
    size_t num_threads = (size_t)p.B * ceil_div(p.T, PERMUTE_NUM_LOADS) * (3 * (size_t)p.NH * p.HS / x128::size);
    require(num_threads <= INT_MAX);
    unsigned num_blocks = (unsigned)ceil_div(num_threads, (size_t)block_size);
    permute_kernel4<back><<<num_blocks, block_size, 0, stream>>>(p, (unsigned)num_threads);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: threads in the order of q, k, v; a block's share is contiguous in q, k, v and scattered in packed ----

template <bool back> __global__ void permute_kernel5(Permute p, unsigned num_vectors) {
    unsigned first = blockIdx.x * blockDim.x * PERMUTE_NUM_LOADS + threadIdx.x, head_vectors = p.HS / x128::size;
    x128 x[PERMUTE_NUM_LOADS];
    floatX* to[PERMUTE_NUM_LOADS];
#pragma unroll
    for (int j = 0; j < PERMUTE_NUM_LOADS; j++) {
        unsigned i = first + j * blockDim.x;
        if (i >= num_vectors) { continue; }
        int d = (int)(i % head_vectors) * x128::size, t = i / head_vectors % p.T;
        unsigned head = i / head_vectors / p.T; // index into (3,B,NH)
        int h = head % p.NH, b = head / p.NH % p.B, part = head / p.NH / p.B;
        floatX* split = permute_split_at(p, b, t, part * p.NH + h, d);
        floatX* packed = permute_packed_at(p, b, t, (part * p.NH + h) * p.HS + d);
        x[j] = load128(back ? split : packed);
        to[j] = back ? packed : split;
    }
#pragma unroll
    for (int j = 0; j < PERMUTE_NUM_LOADS; j++) {
        if (first + j * blockDim.x < num_vectors) { store128(to[j], x[j]); }
    }
}

template <bool back> void permute5(const Permute& p, cudaStream_t stream, int block_size) {
    require(p.HS % x128::size == 0);
    size_t num_vectors = (size_t)p.B * p.T * 3 * p.NH * p.HS / x128::size;
    require(num_vectors <= INT_MAX);
    unsigned num_blocks = (unsigned)ceil_div(num_vectors, (size_t)block_size * PERMUTE_NUM_LOADS);
    permute_kernel5<back><<<num_blocks, block_size, 0, stream>>>(p, (unsigned)num_vectors);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: tiles of tokens and heads, transposed in shared memory; long contiguous runs on both sides ----

// In packed, a run is the tile's heads of one token; in q, k, v it is the tile's tokens of one head:
//     tile         head 0   head 1   ...
//     token 0      HS       HS             each row is a run in packed
//     token 1      HS       HS
//     ...          each column is a run in q, k or v
struct PermuteTile {
    int rows, heads;          // number of tokens; number of slots (heads of q, k or v)
    int head_vectors, width;  // vectors per head; vectors per token of the tile
    int num_vectors, in_time; // vectors in the tile; tiles per sequence
};

// Both functions return the address of the tile's vector i. The first counts i in the order of packed, the second in
// the order of q, k, v. *at = the vector's index in shared memory, or -1 if it is outside the tensor.
__device__ inline floatX* permute_packed_vector(const Permute& p, const PermuteTile& tile, int i, int* at) {
    int row = i / tile.width, column = i % tile.width, t = blockIdx.x % tile.in_time * tile.rows + row;
    bool inside = i < tile.num_vectors && t < p.T && blockIdx.y * tile.heads + column / tile.head_vectors < 3 * p.NH;
    *at = inside ? i : -1;
    return permute_packed_at(p, blockIdx.x / tile.in_time, t, blockIdx.y * tile.heads * p.HS + column * x128::size);
}
__device__ inline floatX* permute_split_vector(const Permute& p, const PermuteTile& tile, int i, int* at) {
    int d = i % tile.head_vectors, row = i / tile.head_vectors % tile.rows, head = i / tile.head_vectors / tile.rows;
    int t = blockIdx.x % tile.in_time * tile.rows + row, slot = blockIdx.y * tile.heads + head;
    bool inside = i < tile.num_vectors && t < p.T && slot < 3 * p.NH;
    *at = inside ? row * tile.width + head * tile.head_vectors + d : -1;
    return permute_split_at(p, blockIdx.x / tile.in_time, t, slot, d * x128::size);
}

template <bool back> __global__ void permute_kernel6(Permute p, PermuteTile tile) {
    extern __shared__ __align__(128) int4 permute_shared[]; // [rows][width]
    for (int first = threadIdx.x; first < tile.num_vectors; first += PERMUTE_NUM_LOADS * blockDim.x) {
        x128 x[PERMUTE_NUM_LOADS];
        int at[PERMUTE_NUM_LOADS];
#pragma unroll
        for (int j = 0; j < PERMUTE_NUM_LOADS; j++) {
            int i = first + j * blockDim.x;
            floatX* from = back ? permute_split_vector(p, tile, i, &at[j]) : permute_packed_vector(p, tile, i, &at[j]);
            if (at[j] >= 0) { x[j] = load128(from); }
        }
#pragma unroll
        for (int j = 0; j < PERMUTE_NUM_LOADS; j++) {
            if (at[j] >= 0) { permute_shared[at[j]] = vec128_bits(x[j]); }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tile.num_vectors; i += blockDim.x) {
        int at;
        floatX* to = back ? permute_packed_vector(p, tile, i, &at) : permute_split_vector(p, tile, i, &at);
        if (at >= 0) { store128(to, vec128_from_bits<floatX>(permute_shared[at])); }
    }
}

template <bool back> void permute6(const Permute& p, cudaStream_t stream, int block_size) {
    require(p.HS % x128::size == 0);
    int head_bytes = p.HS * (int)sizeof(floatX);
    // max_bytes: size limit of a tile, so that 7 blocks fit on an SM; run_bytes: bytes that a warp reads in one request
    const int max_bytes = 32 << 10, run_bytes = 512;
    require(head_bytes <= max_bytes);
    PermuteTile tile;
    tile.heads = head_bytes < run_bytes ? run_bytes / head_bytes : 1;
    if (tile.heads > 3 * p.NH) { tile.heads = 3 * p.NH; }
    tile.rows = max_bytes / (tile.heads * head_bytes);
    if (tile.rows > 64) { tile.rows = 64; }
    tile.head_vectors = p.HS / x128::size;
    tile.width = tile.heads * tile.head_vectors;
    tile.num_vectors = tile.rows * tile.width;
    tile.in_time = ceil_div(p.T, tile.rows);
    size_t num_blocks = (size_t)p.B * tile.in_time;
    dim3 grid((unsigned)num_blocks, ceil_div(3 * p.NH, tile.heads));
    require(num_blocks <= INT_MAX && grid.y <= 65535);
    permute_kernel6<back><<<grid, block_size, tile.num_vectors * 16, stream>>>(p, tile);
    cudaCheck(cudaGetLastError());
}

template <bool back> static void declare_kernels(Bench& b, const Permute& p) {
    cudaStream_t stream = b.stream;
    b.kernel(1, "one thread per element", [=](int bs) { permute1<back>(p, stream, bs); });
    b.kernel(2, "one block per token", [=](int bs) { permute2<back>(p, stream, bs); });
    if (p.HS % x128::size != 0) { return; }
    b.kernel(3, "128-bit vectors", [=](int bs) { permute3<back>(p, stream, bs); }, {64, 96, 128, 256, 288, 512});
    b.kernel(4, "four tokens per thread, its column computed once", [=](int bs) { permute4<back>(p, stream, bs); });
    b.kernel(5, "threads in the order of q, k, v", [=](int bs) { permute5<back>(p, stream, bs); });
    b.kernel(6, "tiles through shared memory, long runs on both sides", [=](int bs) { permute6<back>(p, stream, bs); });
}

static void declare(Bench& b) {
    b.varies("BTH");
    require(b.C % b.NH == 0);
    int B = b.B, T = b.T, NH = b.NH, HS = b.C / NH;
    bool back = b.kinds({"packed to q k v", "q k v to packed"}) == 1;
    size_t n = (size_t)B * T * b.C;
    auto part = [&](const char* name) {
        return back ? b.input<floatX>(name, n) : b.output<floatX>(name, n, {0.0f, 0.0f});
    };
    Buffer<floatX> q = part("q"), k = part("k"), v = part("v");
    Buffer<floatX> packed = back ? b.output<floatX>("packed", 3 * n, {0.0f, 0.0f}) : b.input<floatX>("packed", 3 * n);
    b.reference([=] {
        if (back) {
            unpermute_cpu(packed.host, q.host, k.host, v.host, B, T, NH, HS);
        } else {
            permute_cpu(q.host, k.host, v.host, packed.host, B, T, NH, HS);
        }
    });
    b.cost(6.0 * n * sizeof(floatX), 0);
    Permute p = {packed, q, k, v, B, T, NH, HS};
    if (back) {
        declare_kernels<true>(b, p);
    } else {
        declare_kernels<false>(b, p);
    }
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "permute", declare, {64, 1024, 768, 12},
                      {{1, 1, 8, 1},
                       {2, 5, 15, 3},
                       with_kind(1, {2, 5, 15, 3}),
                       {2, 17, 776, 97},
                       with_kind(1, {1, 33, 776, 1}),
                       {3, 70, 192, 3},
                       with_kind(1, {3, 70, 192, 3}),
                       with_kind(1, {1, 127, 1600, 25})});
}
