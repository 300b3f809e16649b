/* gelu_forward: out = gelu(inp), elementwise, tanh approximation

   out (n) floatX out | inp (n) floatX in; n = B*T*4C
   Bound: memory, 2*n*sizeof(floatX) bytes. Constraint: n % x128::size == 0 from kernel 2 on.
   Error against the fp64 reference: one ulp of bf16 and fp16; in fp32 1e-6, relative plus absolute. The result is
   finite for every finite input, NaN for NaN.
   Source: Hendrycks and Gimpel 2016, arXiv:1606.08415; llmc/gelu.cuh has the formula of kernels 2 to 4.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  128-bit vectors (promoted)
     3  two vectors per thread in flight
     4  persistent, the next vector prefetched (slower than 2)

   nvcc -O3 --use_fast_math gelu_forward.cu -o gelu_forward      (or: make gelu_forward)
   ./gelu_forward 2      check kernel 2 against the CPU and sweep its block sizes
   ./gelu_forward        every kernel, side by side                                         */
#include "../../llmc/gelu.cuh"
#include "bench.h"

// ---- kernel 1: one thread per element ----------------------------------------------------

__device__ inline float gelu_forward_by_exp(float x) {
    float u = 0.7978845608f * (x + 0.044715f * x * x * x); // sqrt(2/pi) (x + 0.044715 x^3)
    return __fdividef(x, 1.0f + __expf(-2.0f * u));        // right even if x^3 overflows: then x / 1 or x / inf
}

__global__ void gelu_forward_kernel1(floatX* out, const floatX* inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = (floatX)gelu_forward_by_exp((float)inp[i]); }
}

void gelu_forward1(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    gelu_forward_kernel1<<<(unsigned)ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

#include "gelu_forward.cuh" // kernel 2

// ---- kernel 3: two 128-bit vectors per thread, both loads issued before the first use ------

__global__ void gelu_forward_kernel3(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * 2 * blockDim.x + threadIdx.x) * x128::size;
    size_t j = i + (size_t)blockDim.x * x128::size;
    if (j < n) {
        x128 x = load128(inp + i), y = load128(inp + j);
        store128(out + i, gelu_forward_vector(x));
        store128(out + j, gelu_forward_vector(y));
    } else if (i < n) {
        store128(out + i, gelu_forward_vector(load128(inp + i)));
    }
}

void gelu_forward3(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)2 * x128::size * block_size);
    gelu_forward_kernel3<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: persistent, as many blocks as fit on the GPU at once; the next vector is prefetched -----------

__global__ void gelu_forward_kernel4(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    size_t stride = (size_t)gridDim.x * blockDim.x * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i);
    for (; i + stride < n; i += stride) {
        x128 next = load128(inp + i + stride);
        store128(out + i, gelu_forward_vector(x));
        x = next;
    }
    store128(out + i, gelu_forward_vector(x));
}

void gelu_forward4(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    require(n % x128::size == 0);
    int per_sm;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, gelu_forward_kernel4, block_size, 0));
    gelu_forward_kernel4<<<num_multiprocessors() * per_sm, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * 4 * b.C;
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [&](float* x) { bench_fill_extremes(x, n, b.rng()); });
    Tolerance tolerance = sizeof(floatX) == 4 ? Tolerance{1e-6f, 1e-6f} : ulps<floatX>(1);
    Buffer<floatX> out = b.output<floatX>("out", n, tolerance);
    b.reference([=] { gelu_forward_cpu(out.host, inp.host, n); });
    b.cost(2.0 * n * sizeof(floatX), 0);
    cudaStream_t stream = b.stream;
    b.kernel(1, "one thread per element", [=](int bs) { gelu_forward1(out, inp, n, stream, bs); });
    b.kernel(2, "128-bit vectors",
             [=](int bs) {
                 gelu_forward(out, inp, n, {stream, bs});
             },
             {bench_tunable("gelu_forward")});
    b.kernel(3, "two vectors per thread in flight", [=](int bs) { gelu_forward3(out, inp, n, stream, bs); });
    b.kernel(4, "persistent, the next vector prefetched", [=](int bs) { gelu_forward4(out, inp, n, stream, bs); });
    b.promoted(2);
    b.huge(2.0 * (double)BenchHuge::elements(8) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements(8);
        floatX *x = h.input<floatX>(num, 0), *y = h.output<floatX>(num);
        gelu_forward(y, x, num, h.stream);
        h.compare("out", y, num / 8, 8, tolerance, [&](size_t row, float* want) {
            h.fill(want, row * 8, 8, 0);
            gelu_forward_cpu(want, want, 8);
        });
    });
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "gelu_forward", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {1, 5, 24}});
}
