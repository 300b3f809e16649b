/* gelu_scale: out = scale * gelu(inp), elementwise, tanh approximation: the smallest fusion there is

   out (n) floatX out | inp (n) floatX in | scale float; n = B*T*4C
   Scratch: kernel 1 gelu (n) floatX; kernel 2 piece (min(n, 2^22)) floatX.
   Bound: memory, 2*n*sizeof(floatX) bytes; unfused twice as many. Constraint: n % x128::size == 0 except in kernel 3;
   pointers aligned to 16 bytes.
   Error against the fp64 reference: one ulp of bf16 and fp16; the unfused kernels round twice and come close to one
   ulp, the fused kernels to half an ulp. In fp32 1e-6, relative plus absolute. The result is finite for every finite
   input if |scale| <= 1.
   Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

   Kernels (this list is written by versions.sh):
     1  unfused: gelu, then scale
     2  unfused, in pieces whose intermediate result stays in L2 (slower than 1)
     3  fused, one thread per element (slower than 1)
     4  fused, 128-bit vectors (best)
     5  fused, two vectors per thread in flight

   nvcc -O3 --use_fast_math gelu_scale.cu -o gelu_scale      (or: make gelu_scale)
   ./gelu_scale 4      check kernel 4 against the CPU and sweep its block sizes
   ./gelu_scale        every kernel, side by side                                         */
#include "bench.h"
#include "gelu_forward.cuh"

// ---- kernel 1: unfused, gelu_forward and then a second kernel that scales --------------------------------------

__global__ void gelu_scale_scale_kernel1(floatX* out, const floatX* inp, float scale, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i);
    for (int k = 0; k < x128::size; k++) { x[k] = (floatX)(scale * (float)x[k]); }
    store128(out + i, x);
}

// gelu (n) is scratch
void gelu_scale1(floatX* out, floatX* gelu, const floatX* inp, size_t n, float scale, cudaStream_t stream,
                 int block_size) {
    gelu_forward(gelu, inp, n, {stream, block_size});
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    gelu_scale_scale_kernel1<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, gelu, scale, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: unfused, in pieces, so that the intermediate result stays in L2, at the cost of many launches ----

enum { GELU_SCALE_PIECE = 1 << 22 }; // elements; in 16 bits 8 MB, and with inp and out 24 MB, which fits an L2 of 50 MB

// piece (min(n, GELU_SCALE_PIECE)) is scratch for the intermediate result, reused by every piece
void gelu_scale2(floatX* out, floatX* piece, const floatX* inp, size_t n, float scale, cudaStream_t stream,
                 int block_size) {
    for (size_t begin = 0; begin < n; begin += GELU_SCALE_PIECE) {
        size_t size = n - begin < GELU_SCALE_PIECE ? n - begin : (size_t)GELU_SCALE_PIECE;
        gelu_scale1(out + begin, piece, inp + begin, size, scale, stream, block_size);
    }
}

// ---- kernel 3: fused, one thread per element ------------------------------------------------------------

__global__ void gelu_scale_kernel3(floatX* out, const floatX* inp, float scale, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = (floatX)(scale * gelu((float)inp[i])); }
}

void gelu_scale3(floatX* out, const floatX* inp, size_t n, float scale, cudaStream_t stream, int block_size) {
    gelu_scale_kernel3<<<(unsigned)ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(out, inp, scale, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: fused, one 128-bit vector per thread ----------------------------------------------------------

__device__ inline x128 gelu_scale_vector(const x128& x, float scale) {
    x128 y;
    for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(scale * gelu((float)x[k])); }
    return y;
}

__global__ void gelu_scale_kernel4(floatX* out, const floatX* inp, float scale, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i < n) { store128(out + i, gelu_scale_vector(load128(inp + i), scale)); }
}

// out (n) = scale * gelu(inp (n)); out may be inp
void gelu_scale(floatX* out, const floatX* inp, size_t n, float scale, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 128;
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    gelu_scale_kernel4<<<(unsigned)num_blocks, block_size, 0, exec.stream>>>(out, inp, scale, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: fused, two vectors per thread, both loads issued before the first use --------------------------------

__global__ void gelu_scale_kernel5(floatX* out, const floatX* inp, float scale, size_t n) {
    size_t i = ((size_t)blockIdx.x * 2 * blockDim.x + threadIdx.x) * x128::size;
    size_t j = i + (size_t)blockDim.x * x128::size;
    if (j < n) {
        x128 x = load128(inp + i), y = load128(inp + j);
        store128(out + i, gelu_scale_vector(x, scale));
        store128(out + j, gelu_scale_vector(y, scale));
    } else if (i < n) {
        store128(out + i, gelu_scale_vector(load128(inp + i), scale));
    }
}

void gelu_scale5(floatX* out, const floatX* inp, size_t n, float scale, cudaStream_t stream, int block_size) {
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)2 * x128::size * block_size);
    gelu_scale_kernel5<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, scale, n);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    const float scale = 0.7f; // not a power of two, because multiplying by a power of two does not round
    size_t n = (size_t)b.B * b.T * 4 * b.C;
    double tensor = (double)n * sizeof(floatX); // bytes of inp, and of out
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [&](float* x) { bench_fill_extremes(x, n, b.rng()); });
    Tolerance tolerance = sizeof(floatX) == 4 ? Tolerance{1e-6f, 1e-6f} : ulps<floatX>(1);
    Buffer<floatX> out = b.output<floatX>("out", n, tolerance);
    Buffer<floatX> gelu = b.scratch<floatX>("gelu", n);
    b.reference([=] { gelu_scale_cpu(out.host, inp.host, n, scale); });
    b.cost(2 * tensor, 0);
    cudaStream_t stream = b.stream;
    b.kernel(1, "unfused: gelu, then scale", [=](int bs) { gelu_scale1(out, gelu, inp, n, scale, stream, bs); },
             {128, 256, 512});
    b.moves(2, 4 * tensor);
    b.kernel(2, "unfused, in pieces whose intermediate result stays in L2",
             [=](int bs) { gelu_scale2(out, gelu, inp, n, scale, stream, bs); }, {128, 256, 512});
    b.moves(2 * (int)ceil_div(n, (size_t)GELU_SCALE_PIECE), 2 * tensor);
    b.kernel(3, "fused, one thread per element", [=](int bs) { gelu_scale3(out, inp, n, scale, stream, bs); });
    b.moves(1, 2 * tensor);
    b.kernel(4, "fused, 128-bit vectors",
             [=](int bs) {
                 gelu_scale(out, inp, n, scale, {stream, bs});
             },
             {0, 64, 128, 256, 512, 1024});
    b.moves(1, 2 * tensor);
    b.kernel(5, "fused, two vectors per thread in flight",
             [=](int bs) { gelu_scale5(out, inp, n, scale, stream, bs); });
    b.moves(1, 2 * tensor);
    b.best(4);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "gelu_scale", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {1, 5, 24}, {1, 1366, 768}});
}
