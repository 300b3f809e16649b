/* gelu_backward: dinp = dout * gelu'(inp), elementwise, tanh approximation

   dinp (n) floatX out, may be dout | dout, inp (n) floatX in; n = B*T*4C
   Bound: memory, 3*n*sizeof(floatX) bytes. Constraint: n % x128::size == 0 from kernel 2 on.
   Error against the fp64 reference: one ulp of bf16 and fp16; in fp32 1e-6 relative plus 3e-6 absolute, for |dout| up
   to 6. The result is finite for every finite input, NaN for NaN.
   Source: Hendrycks and Gimpel 2016, arXiv:1606.08415; llmc/gelu.cuh has the formula of kernels 2 to 4.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  128-bit vectors (promoted)
     3  two vectors per thread in flight, streamed (evict-first) (slower than 2)
     4  persistent, the next vectors prefetched (slower than 2)

   nvcc -O3 --use_fast_math gelu_backward.cu -o gelu_backward      (or: make gelu_backward)
   ./gelu_backward 2      check kernel 2 against the CPU and sweep its block sizes
   ./gelu_backward        every kernel, side by side                                         */
#include "../../llmc/gelu.cuh"
#include "bench.h"

// ---- kernel 1: one thread per element ----------------------------------------------------

__device__ inline float gelu_backward_slope_by_exp(float x) {
    x = x > 9.0f ? 9.0f : (x < -9.0f ? -9.0f : x); // beyond +-9 the slope is 1 or 0, and x^2 may overflow
    float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    float slope_of_u = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
    float e = __expf(-2.0f * u), s = __fdividef(1.0f, 1.0f + e);
    return s + x * s * (e * s) * 2.0f * slope_of_u; // 1 - s = e * s
}

__global__ void gelu_backward_kernel1(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { dinp[i] = (floatX)((float)dout[i] * gelu_backward_slope_by_exp((float)inp[i])); }
}

void gelu_backward1(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, cudaStream_t stream,
                    int block_size) {
    gelu_backward_kernel1<<<(unsigned)ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(dinp, dout, inp, n);
    cudaCheck(cudaGetLastError());
}

#include "gelu_backward.cuh" // kernel 2

// ---- kernel 3: two 128-bit vectors per thread, streaming (evict-first) loads, all issued before the first use ----

__global__ void gelu_backward_kernel3(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * 2 * blockDim.x + threadIdx.x) * x128::size;
    size_t j = i + (size_t)blockDim.x * x128::size;
    if (j < n) {
        x128 x = load128cs(inp + i), y = load128cs(inp + j);
        x128 dx = load128cs(dout + i), dy = load128cs(dout + j);
        store128(dinp + i, gelu_backward_vector(dx, x));
        store128(dinp + j, gelu_backward_vector(dy, y));
    } else if (i < n) {
        store128(dinp + i, gelu_backward_vector(load128cs(dout + i), load128cs(inp + i)));
    }
}

void gelu_backward3(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, cudaStream_t stream,
                    int block_size) {
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)2 * x128::size * block_size);
    gelu_backward_kernel3<<<(unsigned)num_blocks, block_size, 0, stream>>>(dinp, dout, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: persistent, as many blocks as fit on the GPU at once; the next vectors are prefetched -----------

__global__ void gelu_backward_kernel4(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    size_t stride = (size_t)gridDim.x * blockDim.x * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i), dy = load128(dout + i);
    for (; i + stride < n; i += stride) {
        x128 next_x = load128(inp + i + stride), next_dy = load128(dout + i + stride);
        store128(dinp + i, gelu_backward_vector(dy, x));
        x = next_x, dy = next_dy;
    }
    store128(dinp + i, gelu_backward_vector(dy, x));
}

void gelu_backward4(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, cudaStream_t stream,
                    int block_size) {
    require(n % x128::size == 0);
    int per_sm;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, gelu_backward_kernel4, block_size, 0));
    gelu_backward_kernel4<<<num_multiprocessors() * per_sm, block_size, 0, stream>>>(dinp, dout, inp, n);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * 4 * b.C;
    Buffer<floatX> start = b.input<floatX>("dout", n);
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [&](float* x) { bench_fill_extremes(x, n, b.rng()); });
    Tolerance tolerance = sizeof(floatX) == 4 ? Tolerance{3e-6f, 1e-6f} : ulps<floatX>(1);
    bool in_place = b.kinds({"dinp apart", "dinp is dout"}) == 1;
    Buffer<floatX> dinp =
        in_place ? b.inout<floatX>("dinp", n, start, tolerance) : b.output<floatX>("dinp", n, tolerance);
    Buffer<floatX> dout = in_place ? dinp : start;
    b.reference([=] { gelu_backward_cpu(dinp.host, start.host, inp.host, n); });
    b.cost(3.0 * n * sizeof(floatX), 0);
    cudaStream_t stream = b.stream;
    b.kernel(1, "one thread per element", [=](int bs) { gelu_backward1(dinp, dout, inp, n, stream, bs); });
    b.kernel(2, "128-bit vectors",
             [=](int bs) {
                 gelu_backward(dinp, dout, inp, n, {stream, bs});
             },
             {bench_tunable("gelu_backward")});
    b.kernel(3, "two vectors per thread in flight, streamed (evict-first)",
             [=](int bs) { gelu_backward3(dinp, dout, inp, n, stream, bs); });
    b.kernel(4, "persistent, the next vectors prefetched",
             [=](int bs) { gelu_backward4(dinp, dout, inp, n, stream, bs); });
    b.promoted(2);
    b.huge(3.0 * (double)BenchHuge::elements(8) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements(8);
        floatX *x = h.input<floatX>(num, 0), *dy = h.input<floatX>(num, 1), *dx = h.output<floatX>(num);
        gelu_backward(dx, dy, x, num, h.stream);
        h.compare("dinp", dx, num / 8, 8, tolerance, [&](size_t row, float* want) {
            float values[8], gradients[8];
            h.fill(values, row * 8, 8, 0), h.fill(gradients, row * 8, 8, 1);
            gelu_backward_cpu(want, gradients, values, 8);
        });
    });
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "gelu_backward", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, with_kind(1, {2, 5, 24})});
}
