/* softmax_forward: out = exp(inp - max) / sum(exp(inp - max)) over the first V of Vp columns, for each row

   out (N,Vp) floatX out, columns V..Vp-1 become 0 | inp (N,Vp) floatX in, columns V..Vp-1 are not read; N = B*T
   Bound: memory, 2*N*Vp*sizeof(floatX) bytes. Constraint: Vp % 8 == 0, 1 <= V <= Vp.
   Error: one ulp of floatX; fp32 16 ulps, because exp(x) amplifies the rounding of x.
   Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax: kernels 4 and later).
   For study only: in the trainer, softmax is a part of fused_classifier and of attention.

   Kernels (this list is written by versions.sh):
     1  one thread per row
     2  one warp per row
     3  one block per row
     4  online softmax: two passes instead of three
     5  128-bit vectors
     6  second pass reads backwards
     7  one read: row in shared memory
     8  row copied by cp.async, in two halves
     9  row in registers (slower than 8)
    10  a cluster of blocks per row (slower than 8)

   nvcc -O3 --use_fast_math softmax_forward.cu -o softmax_forward      (or: make softmax_forward)
   ./softmax_forward 8      check kernel 8 against the CPU and sweep its block sizes
   ./softmax_forward        every kernel, side by side                                         */
#include <cooperative_groups.h>

#include "bench.h"
#include "../../llmc/ptx.cuh"

// ---- kernel 1: one thread per row ----------------------------------------------------------------

__global__ void softmax_forward_kernel1(floatX* out, const floatX* inp, int N, int V, int Vp) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const floatX* x = inp + (size_t)n * Vp;
    float max = -INFINITY;
    double sum = 0.0; // a float would lose digits, because one thread adds up the whole vocabulary
    for (int c = 0; c < V; c++) { max = fmaxf(max, (float)x[c]); }
    for (int c = 0; c < V; c++) { sum += __expf((float)x[c] - max); }
    float inverse = 1.0f / (float)sum;
    for (int c = 0; c < Vp; c++) {
        out[(size_t)n * Vp + c] = (floatX)(c < V ? __expf((float)x[c] - max) * inverse : 0.0f);
    }
}

void softmax_forward1(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    softmax_forward_kernel1<<<ceil_div(N, block_size), block_size, 0, stream>>>(out, inp, N, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one warp per row; adjacent lanes read adjacent columns (coalesced) -------------------

__global__ void softmax_forward_kernel2(floatX* out, const floatX* inp, int N, int V, int Vp) {
    int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (n >= N) { return; }
    const floatX* x = inp + (size_t)n * Vp;
    float max = -INFINITY;
    double sum = 0.0; // one lane still adds thousands of terms
    for (int c = lane; c < V; c += 32) { max = fmaxf(max, (float)x[c]); }
    max = warp_max(max);
    for (int c = lane; c < V; c += 32) { sum += __expf((float)x[c] - max); }
    float inverse = 1.0f / warp_sum((float)sum);
    for (int c = lane; c < Vp; c += 32) {
        out[(size_t)n * Vp + c] = (floatX)(c < V ? __expf((float)x[c] - max) * inverse : 0.0f);
    }
}

void softmax_forward2(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    softmax_forward_kernel2<<<ceil_div(N, block_size / 32), block_size, 0, stream>>>(out, inp, N, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: one block per row; fewer rows are in flight, so more of each row stays in the caches ----

__global__ void __launch_bounds__(1024) softmax_forward_kernel3(floatX* out, const floatX* inp, int V, int Vp) {
    __shared__ float shared[32];
    const floatX* x = inp + (size_t)blockIdx.x * Vp;
    float max = -INFINITY, sum = 0.0f;
    for (int c = threadIdx.x; c < V; c += blockDim.x) { max = fmaxf(max, (float)x[c]); }
    max = block_max(max, shared);
    for (int c = threadIdx.x; c < V; c += blockDim.x) { sum += __expf((float)x[c] - max); }
    float inverse = 1.0f / block_sum(sum, shared);
    for (int c = threadIdx.x; c < Vp; c += blockDim.x) {
        out[(size_t)blockIdx.x * Vp + c] = (floatX)(c < V ? __expf((float)x[c] - max) * inverse : 0.0f);
    }
}

void softmax_forward3(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    softmax_forward_kernel3<<<N, block_size, 0, stream>>>(out, inp, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: online softmax; maximum and sum in one pass, the sum is rescaled when the maximum grows ----

// Online softmax state: running maximum and sum of exp(x - max).
struct SoftmaxSums {
    float max, sum;
};

__device__ inline void softmax_add(SoftmaxSums& s, float x) {
    if (x > s.max) {
        s.sum *= __expf(s.max - x);
        s.max = x;
    }
    s.sum += __expf(x - s.max);
}

// Combines s over the whole block; every thread gets the result. `shared` (32) is scratch. Threads without a column
// pass max = -infinity and sum = 0.
__device__ inline SoftmaxSums softmax_reduce(const SoftmaxSums& s, float* shared) {
    float max = block_max(s.max, shared);
    return {max, block_sum(s.sum * __expf(s.max - max), shared)};
}

__global__ void __launch_bounds__(1024) softmax_forward_kernel4(floatX* out, const floatX* inp, int V, int Vp) {
    __shared__ float shared[32];
    const floatX* x = inp + (size_t)blockIdx.x * Vp;
    SoftmaxSums s = {-INFINITY, 0.0f};
    for (int c = threadIdx.x; c < V; c += blockDim.x) { softmax_add(s, (float)x[c]); }
    s = softmax_reduce(s, shared);
    float inverse = 1.0f / s.sum;
    for (int c = threadIdx.x; c < Vp; c += blockDim.x) {
        out[(size_t)blockIdx.x * Vp + c] = (floatX)(c < V ? __expf((float)x[c] - s.max) * inverse : 0.0f);
    }
}

void softmax_forward4(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    softmax_forward_kernel4<<<N, block_size, 0, stream>>>(out, inp, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: 128-bit vectors, one rescale per vector (eight columns in 16 bits) ----

__device__ inline void softmax_add_vector(SoftmaxSums& s, const x128& x) {
    float max = s.max;
    for (int k = 0; k < x128::size; k++) { max = fmaxf(max, (float)x[k]); }
    s.sum *= __expf(s.max - max);
    for (int k = 0; k < x128::size; k++) { s.sum += __expf((float)x[k] - max); }
    s.max = max;
}

__device__ inline x128 softmax_probs(const x128& x, float max, float inverse) {
    x128 probs;
    for (int k = 0; k < x128::size; k++) { probs[k] = (floatX)(__expf((float)x[k] - max) * inverse); }
    return probs;
}

// The tail is the columns past the last whole vector, at most one per thread. softmax_tail_begin returns the sums of a
// thread with only its tail column, if it has one. softmax_tail_write writes the tail's results, and zeros up to Vp.
__device__ inline SoftmaxSums softmax_tail_begin(const floatX* x, int V) {
    int c = V / x128::size * x128::size + threadIdx.x;
    if (c >= V) { return {-INFINITY, 0.0f}; }
    return {(float)x[c], 1.0f};
}
__device__ inline void softmax_tail_write(floatX* out, const floatX* x, float max, float inverse, int V, int Vp) {
    for (int c = V / x128::size * x128::size + threadIdx.x; c < Vp; c += blockDim.x) {
        out[c] = (floatX)(c < V ? __expf((float)x[c] - max) * inverse : 0.0f);
    }
}

__global__ void __launch_bounds__(1024) softmax_forward_kernel5(floatX* out, const floatX* inp, int V, int Vp) {
    __shared__ float shared[32];
    out += (size_t)blockIdx.x * Vp, inp += (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    SoftmaxSums s = softmax_tail_begin(inp, V);
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        softmax_add_vector(s, load128(inp + i * x128::size));
    }
    s = softmax_reduce(s, shared);
    float inverse = 1.0f / s.sum;
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        store128(out + i * x128::size, softmax_probs(load128(inp + i * x128::size), s.max, inverse));
    }
    softmax_tail_write(out, inp, s.max, inverse, V, Vp);
}

void softmax_forward5(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0);
    softmax_forward_kernel5<<<N, block_size, 0, stream>>>(out, inp, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: the second pass reads backwards, because the end of the row is still in the caches ----

__global__ void __launch_bounds__(1024) softmax_forward_kernel6(floatX* out, const floatX* inp, int V, int Vp) {
    __shared__ float shared[32];
    out += (size_t)blockIdx.x * Vp, inp += (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size, block = blockDim.x;
    SoftmaxSums s = softmax_tail_begin(inp, V);
    for (int i = threadIdx.x; i < num_vectors; i += block) { softmax_add_vector(s, load128(inp + i * x128::size)); }
    s = softmax_reduce(s, shared);
    float inverse = 1.0f / s.sum;
    for (int i = (num_vectors - 1) / block * block + (int)threadIdx.x; i >= 0; i -= block) {
        if (i >= num_vectors) { continue; }
        store128(out + i * x128::size, softmax_probs(load128(inp + i * x128::size), s.max, inverse));
    }
    softmax_tail_write(out, inp, s.max, inverse, V, Vp);
}

void softmax_forward6(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0);
    softmax_forward_kernel6<<<N, block_size, 0, stream>>>(out, inp, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 7: the row is read once and kept in shared memory; two rows fit on an SM ----

// Dynamic shared memory: the row's V / x128::size vectors, then 32 floats for the reductions. Each thread reads only what it
// stored itself, so no barrier is needed.
__global__ void __launch_bounds__(1024) softmax_forward_kernel7(floatX* out, const floatX* inp, int V, int Vp) {
    extern __shared__ __align__(128) int4 softmax_row[];
    out += (size_t)blockIdx.x * Vp, inp += (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    float* shared = reinterpret_cast<float*>(softmax_row + num_vectors);
    SoftmaxSums s = softmax_tail_begin(inp, V);
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        x128 x = load128(inp + i * x128::size);
        softmax_row[i] = vec128_bits(x);
        softmax_add_vector(s, x);
    }
    s = softmax_reduce(s, shared);
    float inverse = 1.0f / s.sum;
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        store128(out + i * x128::size, softmax_probs(vec128_from_bits<floatX>(softmax_row[i]), s.max, inverse));
    }
    softmax_tail_write(out, inp, s.max, inverse, V, Vp);
}

int softmax_forward_row_bytes(int V) { return V / x128::size * (int)sizeof(x128) + 32 * (int)sizeof(float); }

// launches kernel 7 or 8
void softmax_forward_launch7(void (*kernel)(floatX*, const floatX*, int, int), floatX* out, const floatX* inp, int N,
                             int V, int Vp, cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0);
    int shared = softmax_forward_row_bytes(V);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared)); // otherwise only one row fits on an SM
    kernel<<<N, block_size, shared, stream>>>(out, inp, V, Vp);
    cudaCheck(cudaGetLastError());
}

void softmax_forward7(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    softmax_forward_launch7(softmax_forward_kernel7, out, inp, N, V, Vp, stream, block_size);
}

// ---- kernel 8: the row is copied by cp.async, in two halves: the first is summed while the second is in flight ----

__global__ void __launch_bounds__(1024) softmax_forward_kernel8(floatX* out, const floatX* inp, int V, int Vp) {
    extern __shared__ __align__(128) int4 softmax_row[];
    out += (size_t)blockIdx.x * Vp, inp += (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    float* shared = reinterpret_cast<float*>(softmax_row + num_vectors);
    int half_row = ceil_div(num_vectors, 2 * (int)blockDim.x) * (int)blockDim.x;
    for (int i = threadIdx.x; i < min(half_row, num_vectors); i += blockDim.x) {
        cp_async_16(&softmax_row[i], inp + i * x128::size);
    }
    cp_async_commit();
    for (int i = half_row + threadIdx.x; i < num_vectors; i += blockDim.x) {
        cp_async_16(&softmax_row[i], inp + i * x128::size);
    }
    cp_async_commit();
    SoftmaxSums s = softmax_tail_begin(inp, V);
    cp_async_wait<1>();
    for (int i = threadIdx.x; i < min(half_row, num_vectors); i += blockDim.x) {
        softmax_add_vector(s, vec128_from_bits<floatX>(softmax_row[i]));
    }
    cp_async_wait<0>();
    for (int i = half_row + threadIdx.x; i < num_vectors; i += blockDim.x) {
        softmax_add_vector(s, vec128_from_bits<floatX>(softmax_row[i]));
    }
    s = softmax_reduce(s, shared);
    float inverse = 1.0f / s.sum;
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        store128(out + i * x128::size, softmax_probs(vec128_from_bits<floatX>(softmax_row[i]), s.max, inverse));
    }
    softmax_tail_write(out, inp, s.max, inverse, V, Vp);
}

void softmax_forward8(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    softmax_forward_launch7(softmax_forward_kernel8, out, inp, N, V, Vp, stream, block_size);
}

// ---- kernel 9: the row is kept in registers, not in shared memory ----

// Vectors per thread with which a block of 512 threads holds a row of GPT-2's vocabulary in 16 bits. They take 52 registers and
// leave too few for a second block on the SM. In 32 bits such a row would need 25 vectors, which spill.
constexpr int KERNEL9_VECTORS = 13;

__global__ void __launch_bounds__(512) softmax_forward_kernel9(floatX* out, const floatX* inp, int V, int Vp) {
    __shared__ float shared[32];
    out += (size_t)blockIdx.x * Vp, inp += (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    int4 x[KERNEL9_VECTORS];
#pragma unroll
    for (int j = 0; j < KERNEL9_VECTORS; j++) {
        int i = threadIdx.x + j * blockDim.x;
        if (i < num_vectors) { x[j] = vec128_bits(load128(inp + i * x128::size)); }
    }
    SoftmaxSums s = softmax_tail_begin(inp, V);
#pragma unroll
    for (int j = 0; j < KERNEL9_VECTORS; j++) {
        if (threadIdx.x + j * blockDim.x < num_vectors) { softmax_add_vector(s, vec128_from_bits<floatX>(x[j])); }
    }
    s = softmax_reduce(s, shared);
    float inverse = 1.0f / s.sum;
#pragma unroll
    for (int j = 0; j < KERNEL9_VECTORS; j++) {
        int i = threadIdx.x + j * blockDim.x;
        if (i >= num_vectors) { continue; }
        store128(out + i * x128::size, softmax_probs(vec128_from_bits<floatX>(x[j]), s.max, inverse));
    }
    softmax_tail_write(out, inp, s.max, inverse, V, Vp);
}

void softmax_forward9(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0 && V / x128::size <= KERNEL9_VECTORS * block_size);
    softmax_forward_kernel9<<<N, block_size, 0, stream>>>(out, inp, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 10: a cluster of blocks per row, each with a part of the row, so that blocks of several rows fit on an SM ----
// The blocks exchange their maxima and sums through distributed shared memory.

// Vectors per thread with which 4 blocks of 512 threads hold a row of GPT-2's vocabulary: 4 in 16 bits, 7 in 32 bits.
constexpr int KERNEL10_VECTORS = sizeof(floatX) == 4 ? 7 : 4;

__global__ void __launch_bounds__(512) softmax_forward_sm90_kernel10(floatX* out, const floatX* inp, int V, int Vp) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ float shared[32];
    __shared__ SoftmaxSums block_sums;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    int num_blocks = cluster.num_blocks(), rank = cluster.block_rank();
    size_t row = blockIdx.x / num_blocks;
    out += row * Vp, inp += row * Vp;
    int num_vectors = V / x128::size, stride = num_blocks * blockDim.x, first = rank * blockDim.x + threadIdx.x;
    int4 x[KERNEL10_VECTORS];
#pragma unroll
    for (int j = 0; j < KERNEL10_VECTORS; j++) {
        int i = first + j * stride;
        if (i < num_vectors) { x[j] = vec128_bits(load128(inp + i * x128::size)); }
    }
    SoftmaxSums s = {-INFINITY, 0.0f};
    if (rank == 0) { s = softmax_tail_begin(inp, V); }
#pragma unroll
    for (int j = 0; j < KERNEL10_VECTORS; j++) {
        if (first + j * stride < num_vectors) { softmax_add_vector(s, vec128_from_bits<floatX>(x[j])); }
    }
    s = softmax_reduce(s, shared);
    if (s.max == -INFINITY) { s.sum = 0.0f; } // a block without columns: exp(-inf - -inf) has made its sum NaN
    if (threadIdx.x == 0) { block_sums = s; }
    cluster.sync();
    float max = -INFINITY, sum = 0.0f;
    for (int r = 0; r < num_blocks; r++) { max = fmaxf(max, cluster.map_shared_rank(&block_sums, r)->max); }
    for (int r = 0; r < num_blocks; r++) {
        SoftmaxSums other = *cluster.map_shared_rank(&block_sums, r);
        sum += other.sum * __expf(other.max - max);
    }
    float inverse = 1.0f / sum;
#pragma unroll
    for (int j = 0; j < KERNEL10_VECTORS; j++) {
        int i = first + j * stride;
        if (i >= num_vectors) { continue; }
        store128(out + i * x128::size, softmax_probs(vec128_from_bits<floatX>(x[j]), max, inverse));
    }
    if (rank == 0) { softmax_tail_write(out, inp, max, inverse, V, Vp); }
    cluster.sync(); // no block exits while another reads its block_sums
#endif
}

// cluster: blocks per cluster, 4 of 512 threads or 8 of 256
void softmax_forward10(floatX* out, const floatX* inp, int N, int V, int Vp, cudaStream_t stream, int cluster) {
    int block_size = 2048 / cluster;
    require(Vp % 8 == 0 && (cluster == 4 || cluster == 8));
    require(V / x128::size <= KERNEL10_VECTORS * cluster * block_size);
    launch_kernel(softmax_forward_sm90_kernel10, LaunchShape(N * cluster, block_size, 0, cluster), stream, out, inp, V,
                  Vp);
}

// True if the binary's code for this kernel is for architecture `arch` or later, and a block may use `shared` bytes of
// shared memory.
static bool can_run(const void* kernel, int arch, int shared) {
    cudaFuncAttributes attributes;
    cudaCheck(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= arch && shared <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

static void declare(Bench& b) {
    b.varies("BTV");
    int N = b.B * b.T, V = b.V, Vp = ceil_div(V, 128) * 128;
    // exp of the large ones overflows unless the maximum is subtracted first
    const float scales[] = {3.0f, 60.0f, 1e-3f, 3.0f};
    int which = b.cases({"normal", "logits of some 100", "almost equal logits", "one logit far above the others"});
    float scale = scales[which];
    uint32_t seed = b.state.seed;
    Buffer<floatX> inp = b.input_from<floatX>("inp", (size_t)N * Vp, [=](float* x) {
        parallel_for(N, [=](size_t n) {
            for (int i = 0; i < Vp; i++) {
                uint32_t r1 = hash_bits(i, 2 * n + seed), r2 = hash_bits(i, 2 * n + seed + 1);
                float u1 = (r1 + 1.0f) / 4294967296.0f, u2 = r2 / 4294967296.0f;
                x[n * Vp + i] = i < V ? scale * sqrtf(-2.0f * logf(u1)) * cosf(6.2831853f * u2) : NAN;
            }
            if (which == 3) { x[n * Vp + bench_random(n, seed) % V] = 120.0f; }
        });
    });
    // an absolute tolerance for tokens of small probability: in fp16 exp(x) is too small for full precision, and in
    // fp32 exp(x) amplifies the rounding error of x
    float smallest = ulp_of<floatX>() == ulp_of<half>() ? 1e-4f : 1e-6f;
    Tolerance tolerance = ulps<floatX>(sizeof(floatX) == 4 ? 16 : 1, smallest);
    Buffer<floatX> out = b.output<floatX>("out", (size_t)N * Vp, tolerance);
    b.reference([=] { softmax_forward_cpu(out.host, inp.host, N, V, Vp); });
    b.cost(2.0 * N * Vp * sizeof(floatX), 0);
    cudaStream_t stream = b.stream;
    auto kernel = [&](int number, const char* what,
                      void (*softmax)(floatX*, const floatX*, int, int, int, cudaStream_t, int),
                      std::vector<int> block_sizes) {
        b.kernel(
            number, what, [=](int bs) { softmax(out, inp, N, V, Vp, stream, bs); }, block_sizes);
    };
    std::vector<int> sizes = {128, 256, 512, 1024};
    kernel(1, "one thread per row", softmax_forward1, {32, 64});
    kernel(2, "one warp per row", softmax_forward2, sizes);
    kernel(3, "one block per row", softmax_forward3, sizes);
    kernel(4, "online softmax: two passes instead of three", softmax_forward4, sizes);
    kernel(5, "128-bit vectors", softmax_forward5, sizes);
    kernel(6, "second pass reads backwards", softmax_forward6, sizes);
    int row_bytes = softmax_forward_row_bytes(V);
    if (b.dry || can_run((const void*)softmax_forward_kernel7, 75, row_bytes)) {
        kernel(7, "one read: row in shared memory", softmax_forward7, sizes);
    }
    if (b.dry || can_run((const void*)softmax_forward_kernel8, 80, row_bytes)) {
        kernel(8, "row copied by cp.async, in two halves", softmax_forward8, sizes);
    }
    if (V / x128::size <= KERNEL9_VECTORS * 512) { kernel(9, "row in registers", softmax_forward9, {512}); }
    bool fits10 = V / x128::size <= KERNEL10_VECTORS * 4 * 512;
    if (fits10 && (b.dry || can_run((const void*)softmax_forward_sm90_kernel10, 90, 0))) {
        kernel(10, "a cluster of blocks per row", softmax_forward10, {4, 8});
        b.config("blocks per cluster");
    }
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "softmax_forward", declare, {8, 1024, 768, 12, 50257},
        {{1, 1, 0, 0, 1}, {1, 3, 0, 0, 11}, {2, 5, 0, 0, 1000}, {1, 7, 0, 0, 50257}, {1, 2, 0, 0, 130001}});
}
