/* global_norm: norm = sqrt(sum(grads^2)) over all gradients, for clipping

   norm one float out | scratch (global_norm_scratch()) float | grads (n) float in, aligned to 16 bytes
   Bound: memory, 4*n bytes. Constraint: n >= 1.
   Error: 1e-6 relative against the fp64 reference, also for 124M elements: each thread spreads a few hundred squares
   over 16 fp32 sums, and the block sums are added in double. A square above 3.4e38 makes the norm infinite; a NaN or an
   infinity in grads makes it NaN or infinite.
   Kernels 3 to 6 give the same bits in every run on the same kind of device; kernels 1 and 2 do not.

   Kernels (this list is written by versions.sh):
     1  one thread per element, one atomic per warp, in double
     2  grid-stride loop, one atomic per block
     3  deterministic: a second launch adds the block sums
     4  3 with 128-bit loads
     5  4 loads in flight per thread (promoted)
     6  one launch: the last block to finish adds the block sums

   nvcc -O3 --use_fast_math global_norm.cu -o global_norm      (or: make global_norm)
   ./global_norm 5      check kernel 5 against the CPU and sweep its block sizes
   ./global_norm        every kernel, side by side                                         */
#include "bench.h"

// ---- kernel 1: one thread per element, one atomic add per warp ----------------------------------

// The sum is a double: over millions of additions, a float would grow so large that it loses digits of each addend.
__global__ void global_norm_kernel1(double* sum, const float* grads, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float square = i < n ? grads[i] * grads[i] : 0.0f;
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) { atomicAdd(sum, (double)square); }
}

__global__ void global_norm_sqrt_kernel1(float* norm, const double* sum) { *norm = (float)sqrt(*sum); }

void global_norm1(float* norm, float* scratch, const float* grads, size_t n, cudaStream_t stream, int block_size) {
    double* sum = (double*)scratch;
    cudaCheck(cudaMemsetAsync(sum, 0, sizeof(double), stream));
    global_norm_kernel1<<<ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(sum, grads, n);
    global_norm_sqrt_kernel1<<<1, 1, 0, stream>>>(norm, sum);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: grid-stride loop with as many blocks as fit on the device, one atomic add per block ----

// The block's sum of squares.
__device__ inline float global_norm_block2(const float* grads, size_t n) {
    __shared__ float shared[32];
    float squares = 0.0f;
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        squares += grads[i] * grads[i];
    }
    return block_sum(squares, shared);
}

__global__ void __launch_bounds__(1024) global_norm_kernel2(double* sum, const float* grads, size_t n) {
    float squares = global_norm_block2(grads, n);
    if (threadIdx.x == 0) { atomicAdd(sum, (double)squares); }
}

void global_norm2(float* norm, float* scratch, const float* grads, size_t n, cudaStream_t stream, int block_size) {
    int blocks = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor) / block_size * num_multiprocessors();
    double* sum = (double*)scratch;
    cudaCheck(cudaMemsetAsync(sum, 0, sizeof(double), stream));
    global_norm_kernel2<<<blocks, block_size, 0, stream>>>(sum, grads, n);
    global_norm_sqrt_kernel1<<<1, 1, 0, stream>>>(norm, sum);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: one sum per block; a second launch adds them in a fixed order, so every run gives the same bits ----

__global__ void __launch_bounds__(1024) global_norm_kernel3(float* block_sums, const float* grads, size_t n) {
    float squares = global_norm_block2(grads, n);
    if (threadIdx.x == 0) { block_sums[blockIdx.x] = squares; }
}

__global__ void __launch_bounds__(1024)
    global_norm_finish_kernel3(float* norm, const float* block_sums, int num_blocks) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < num_blocks; i += blockDim.x) { sum += block_sums[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { *norm = sqrtf(sum); }
}

void global_norm3(float* norm, float* scratch, const float* grads, size_t n, cudaStream_t stream, int block_size) {
    int threads = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor) * num_multiprocessors();
    int num_blocks = min(threads / block_size, 4096); // scratch has 4096 floats
    global_norm_kernel3<<<num_blocks, block_size, 0, stream>>>(scratch, grads, n);
    global_norm_finish_kernel3<<<1, 1024, 0, stream>>>(norm, scratch, num_blocks);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: kernel 3 with 128-bit loads ----

__global__ void __launch_bounds__(1024) global_norm_kernel4(float* block_sums, const float* grads, size_t n) {
    __shared__ float shared[32];
    size_t num_vectors = n / f128::size, stride = (size_t)gridDim.x * blockDim.x;
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sums[f128::size] = {};
#pragma unroll 1 // one load in flight; by itself the compiler would unroll the loop by 4, which is kernel 5
    for (size_t i = thread; i < num_vectors; i += stride) {
        f128 x = load128(grads + i * f128::size);
        for (int k = 0; k < f128::size; k++) { sums[k] += x[k] * x[k]; }
    }
    if (thread < n % f128::size) {
        float x = grads[num_vectors * f128::size + thread];
        sums[0] += x * x;
    }
    float sum = block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]), shared);
    if (threadIdx.x == 0) { block_sums[blockIdx.x] = sum; }
}

void global_norm4(float* norm, float* scratch, const float* grads, size_t n, cudaStream_t stream, int block_size) {
    int threads = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor) * num_multiprocessors();
    int num_blocks = min(threads / block_size, 4096); // scratch has 4096 floats
    global_norm_kernel4<<<num_blocks, block_size, 0, stream>>>(scratch, grads, n);
    global_norm_finish_kernel3<<<1, 1024, 0, stream>>>(norm, scratch, num_blocks);
    cudaCheck(cudaGetLastError());
}

#include "global_norm.cuh" // kernel 5

// ---- kernel 6: one launch: the last block to finish adds the block sums ----

__global__ void __launch_bounds__(1024)
    global_norm_kernel6(float* norm, float* block_sums, unsigned* num_done, const float* grads, size_t n) {
    __shared__ float shared[32];
    __shared__ bool last;
    size_t num_vectors = n / f128::size, stride = (size_t)gridDim.x * blockDim.x;
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sums[f128::size] = {};
#pragma unroll 4
    for (size_t i = thread; i < num_vectors; i += stride) {
        f128 x = load128(grads + i * f128::size);
        for (int k = 0; k < f128::size; k++) { sums[k] += x[k] * x[k]; }
    }
    if (thread < n % f128::size) {
        float x = grads[num_vectors * f128::size + thread];
        sums[0] += x * x;
    }
    float block = block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]), shared);
    if (threadIdx.x == 0) {
        block_sums[blockIdx.x] = block;
        __threadfence(); // makes the block's sum visible to other blocks before the count
        last = atomicAdd(num_done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x >= 32) { return; }
    __threadfence(); // orders the reads of block_sums after the count
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += 32) { sum += __ldcg(block_sums + i); }
    for (int offset = 16; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset); }
    if (threadIdx.x == 0) { *norm = (float)sqrt(sum); }
}

// scratch[0] counts the finished blocks; the block sums follow
void global_norm6(float* norm, float* scratch, const float* grads, size_t n, cudaStream_t stream, int block_size) {
    int threads = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor) * num_multiprocessors();
    int num_blocks = (int)min((size_t)threads / block_size, global_norm_scratch() - 1);
    cudaCheck(cudaMemsetAsync(scratch, 0, sizeof(unsigned), stream));
    global_norm_kernel6<<<num_blocks, block_size, 0, stream>>>(norm, scratch + 1, (unsigned*)scratch, grads, n);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    int which = b.cases({"normal", "zeros", "one large among small ones", "one infinite"});
    uint32_t seed = b.state.seed;
    Buffer<float> grads = b.input_from<float>("grads", n, [=](float* x) {
        const float scales[] = {1.0f, 0.0f, 1e-3f, 1.0f};
        bench_fill_normal(x, n, hash_bits(0, seed), scales[which], 0.0f);
        if (which == 2) { x[n / 2] = 1e4f; }
        if (which == 3) { x[n - 1] = -INFINITY; }
    });
    Buffer<float> norm = b.output<float>("norm", 1, {0.0f, 1e-6f});
    Buffer<float> scratch = b.scratch<float>("scratch", global_norm_scratch());
    b.reference([=] { *norm.host = (float)global_norm_cpu(grads.host, n); });
    b.cost(4.0 * n, 2.0 * n);
    b.reads_only();
    cudaStream_t stream = b.stream;
    std::vector<int> sizes = {128, 256, 512, 1024};
    b.kernel(
        1, "one thread per element, one atomic per warp, in double",
        [=](int bs) { global_norm1(norm, scratch, grads, n, stream, bs); }, sizes);
    b.kernel(
        2, "grid-stride loop, one atomic per block", [=](int bs) { global_norm2(norm, scratch, grads, n, stream, bs); },
        sizes);
    b.kernel(
        3, "deterministic: a second launch adds the block sums",
        [=](int bs) { global_norm3(norm, scratch, grads, n, stream, bs); }, sizes);
    b.kernel(
        4, "3 with 128-bit loads", [=](int bs) { global_norm4(norm, scratch, grads, n, stream, bs); }, sizes);
    b.kernel(5, "4 loads in flight per thread",
             [=](int bs) {
                 global_norm(norm, scratch, grads, n, {stream, bs});
             },
             {bench_tunable("global_norm")});
    b.promoted(5);
    b.kernel(
        6, "one launch: the last block to finish adds the block sums",
        [=](int bs) { global_norm6(norm, scratch, grads, n, stream, bs); }, sizes);
}

// 158 * 1024 * 768: the 124M parameters of GPT-2
int main(int argc, char** argv) {
    return bench_main(argc, argv, "global_norm", declare, {158, 1024, 768, 12, 50257},
                      {{1, 1, 1, 0, 0}, {1, 3, 5, 0, 0}, {2, 17, 776, 0, 0}, {3, 1001, 777, 0, 0}});
}
