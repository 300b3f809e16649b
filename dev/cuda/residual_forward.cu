/* residual_forward: out = inp1 + inp2, elementwise

   out (n) floatX out | inp1, inp2 (n) floatX in; n = B*T*C
   Bound: memory, 3*n*sizeof(floatX) bytes. Constraint: n % x128::size == 0, pointers aligned to 16 bytes.
   Error: none, the result is the exact sum rounded once.
   Source: He et al. 2015, arXiv:1512.03385.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  one 128-bit vector per thread (best)
     3  persistent, 4 vectors per input in flight

   nvcc -O3 --use_fast_math residual_forward.cu -o residual_forward      (or: make residual_forward)
   ./residual_forward 2      check kernel 2 against the CPU and sweep its block sizes
   ./residual_forward        every kernel, side by side                                         */
#include "bench.h"

// ---- kernel 1: one thread per element -----------------------------------------------------------

__global__ void residual_forward_kernel1(floatX* out, const floatX* inp1, const floatX* inp2, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = (floatX)((float)inp1[i] + (float)inp2[i]); }
}

void residual_forward1(floatX* out, const floatX* inp1, const floatX* inp2, size_t n, cudaStream_t stream,
                       int block_size) {
    residual_forward_kernel1<<<ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(out, inp1, inp2, n);
    cudaCheck(cudaGetLastError());
}

#include "residual_forward.cuh" // kernel 2

// ---- kernel 3: persistent, a grid-stride loop with 4 vectors of each input in flight per thread ---

__global__ void residual_forward_kernel3(floatX* out, const floatX* inp1, const floatX* inp2, size_t n) {
    constexpr int unroll = 4;
    size_t chunk = (size_t)blockDim.x * x128::size; // elements that a block covers with one vector per thread
    for (size_t start = blockIdx.x * unroll * chunk; start < n; start += gridDim.x * unroll * chunk) {
        x128 a[unroll], b[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            size_t i = start + u * chunk + threadIdx.x * x128::size;
            if (i < n) { a[u] = load128(inp1 + i), b[u] = load128(inp2 + i); }
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            size_t i = start + u * chunk + threadIdx.x * x128::size;
            for (int k = 0; k < x128::size; k++) { a[u][k] = (floatX)((float)a[u][k] + (float)b[u][k]); }
            if (i < n) { store128(out + i, a[u]); }
        }
    }
}

void residual_forward3(floatX* out, const floatX* inp1, const floatX* inp2, size_t n, cudaStream_t stream,
                       int block_size) {
    require(n >= 1 && n % x128::size == 0);
    int resident;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, residual_forward_kernel3, block_size, 0));
    size_t blocks_needed = ceil_div(n / x128::size, (size_t)4 * block_size);
    size_t grid_size = min(blocks_needed, (size_t)(num_multiprocessors() * resident));
    residual_forward_kernel3<<<grid_size, block_size, 0, stream>>>(out, inp1, inp2, n);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    cudaStream_t stream = b.stream;
    bool extremes = b.cases({"normal", "sums that cancel or overflow"}) == 1;
    Buffer<floatX> inp1 =
        extremes ? b.input_filled<floatX>("inp1", n, bench_fill_extremes) : b.input<floatX>("inp1", n);
    Buffer<floatX> inp2 = b.input_from<floatX>("inp2", n, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, n, seed, 1.0f, 0.0f);
        for (size_t i = 0; extremes && i < n; i++) { x[i] = i < 2 ? inp1.host[i] : i % 3 == 0 ? -inp1.host[i] : x[i]; }
    });
    Buffer<floatX> out = b.output<floatX>("out", n, {0.0f, 0.0f});
    b.reference([=] {
        residual_forward_cpu(out.host, inp1.host, inp2.host, n);
        for (size_t i = 0; i < n; i++) { out.host[i] = (float)(floatX)out.host[i]; }
    });
    b.cost(3.0 * n * sizeof(floatX), 0);

    b.kernel(1, "one thread per element", [=](int bs) { residual_forward1(out, inp1, inp2, n, stream, bs); });
    b.kernel(2, "one 128-bit vector per thread",
             [=](int bs) {
                 residual_forward(out, inp1, inp2, n, {stream, bs});
             },
             {0, 64, 128, 256, 512, 1024});
    b.best(2);
    b.huge(3.0 * (double)BenchHuge::elements(8) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements(8);
        floatX *x = h.input<floatX>(num, 0), *y = h.input<floatX>(num, 1), *sum = h.output<floatX>(num);
        residual_forward(sum, x, y, num, h.stream);
        h.compare("out", sum, num / 8, 8, {0, 0}, [&](size_t row, float* want) {
            for (size_t i = row * 8; i < row * 8 + 8; i++) { *want++ = (float)(floatX)(h.value(i, 0) + h.value(i, 1)); }
        });
    });
    b.kernel(3, "persistent, 4 vectors per input in flight",
             [=](int bs) { residual_forward3(out, inp1, inp2, n, stream, bs); }, {64, 128, 256, 512});
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "residual_forward", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {5, 7, 8}});
}
