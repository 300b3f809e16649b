/* simple_kernel: out = 2 * inp, elementwise: the first lesson, see dev/learn/1_simple_kernel.md

   out (n) floatX out | inp (n) floatX in; n = B*T*C
   Bound: memory, 2*n*sizeof(floatX) bytes. Constraint: n % x128::size == 0 from kernel 5 on, pointers aligned to 16
   bytes.
   Error: none, doubling is exact.
   Source: the CUDA C++ Programming Guide, "Programming Model"; Harris 2013, "CUDA Pro Tip: Write Flexible Kernels with
   Grid-Stride Loops".

   nvcc -O3 --use_fast_math simple_kernel.cu -o simple_kernel      (or: make simple_kernel)
   ./simple_kernel 1      check kernel 1 against the CPU and sweep its block sizes
   ./simple_kernel        every kernel, side by side

   Words, for who has never written a kernel. A kernel is a function (__global__) that the GPU runs many times at once;
   one run is a thread. 32 threads, a warp, execute each instruction together. Some warps form a block (up to 1024
   threads), which stays on one of the chip's multiprocessors, SMs, until it is done. All blocks of a launch are its
   grid: kernel<<<blocks in the grid, threads in a block, bytes of shared memory, stream>>>(arguments). The launch
   returns at once; the stream is the queue in which the GPU finds the work. */
#include "bench.h"

// ---- kernel 1: one thread for each element --------------------------------------------------------
// The index: blocks in front of this one times their size, plus the place in this one. The guard: a grid consists of
// whole blocks, so the last one reaches past n, and what lies there belongs to someone else. Neighbours in a warp read
// neighbours in memory: 32 loads of 2 bytes are one request for 64 bytes. floatX is bf16, fp16 or fp32; arithmetic is
// done in float.

__global__ void simple_kernel_kernel1(floatX* out, const floatX* inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; // size_t before the product: n may pass 2^32
    if (i < n) { out[i] = (floatX)(2.0f * (float)inp[i]); }
}

void simple_kernel1(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div(n, (size_t)block_size); // rounded up: the elements left over need a block too
    simple_kernel_kernel1<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError()); // a launch that cannot be made, say of 2048 threads a block, is seen only here
}

// ---- kernel 2: a single block steps over everything: what the grid is for -----------------------------
// The loop is a grid stride: a thread takes its element, then the one that lies as many elements further as the grid
// has threads. It is right for a grid of any size, so the size is free to be chosen; with one block, one SM works and
// the others are idle.

__global__ void simple_kernel_kernel2(floatX* out, const floatX* inp, size_t n) {
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        out[i] = (floatX)(2.0f * (float)inp[i]);
    }
}

void simple_kernel2(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    simple_kernel_kernel2<<<1, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: the same kernel, a grid of as many blocks as the chip holds at once -----------------------

void simple_kernel3(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    int per_sm; // blocks that fit one SM, by registers and threads
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, simple_kernel_kernel2, block_size, 0));
    simple_kernel_kernel2<<<num_multiprocessors() * per_sm, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: a run of elements for each thread, as one would cut it for CPU threads: what goes wrong -----
// Now neighbours in a warp are a run apart. One load of the warp touches 32 lines of memory and takes an element out of
// each; that the rest of a line is still in the cache when its turn comes, is luck.

constexpr int SIMPLE_KERNEL_RUN = 64; // elements: a line of 128 bytes in 16 bits

__global__ void simple_kernel_kernel4(floatX* out, const floatX* inp, size_t n) {
    size_t begin = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * SIMPLE_KERNEL_RUN;
    size_t end = begin + SIMPLE_KERNEL_RUN < n ? begin + SIMPLE_KERNEL_RUN : n;
    for (size_t i = begin; i < end; i++) { out[i] = (floatX)(2.0f * (float)inp[i]); }
}

void simple_kernel4(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div(n, (size_t)SIMPLE_KERNEL_RUN * block_size);
    simple_kernel_kernel4<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: 16 bytes for each thread, in one load: CUDA's float4, here x128 -----------------------------
// A 128-bit load is the widest that all these GPUs have; it holds 4 floats or 8 numbers of 16 bits. An eighth of the
// instructions moves the same bytes, and a warp's request covers 512 bytes in a row. It needs an address that is a
// multiple of 16.

__global__ void simple_kernel_kernel5(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i);
    for (int k = 0; k < x128::size; k++) { x[k] = (floatX)(2.0f * (float)x[k]); }
    store128(out + i, x);
}

// out, inp (n)
void simple_kernel(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size = 128) {
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    simple_kernel_kernel5<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: four loads under way in each thread before the first is used ----------------------------------
// Memory answers after hundreds of cycles. To be kept busy it needs bandwidth times that delay of bytes asked for and
// not yet arrived: bytes in flight. They are threads on the chip, times loads a thread, times bytes a load. A thread
// waits where it uses a value, not where it loads it, so loads that stand together are under way together.

__global__ void simple_kernel_kernel6(floatX* out, const floatX* inp, size_t n) {
    constexpr int num_loads = 4;
    size_t step = (size_t)blockDim.x * x128::size; // from one load of a thread to its next: neighbours stay neighbours
    size_t first = (size_t)blockIdx.x * num_loads * step + threadIdx.x * x128::size;
    x128 x[num_loads]; // in registers, for the loops are unrolled
#pragma unroll
    for (int j = 0; j < num_loads; j++) {
        if (first + j * step < n) { x[j] = load128(inp + first + j * step); }
    }
#pragma unroll
    for (int j = 0; j < num_loads; j++) {
        for (int k = 0; k < x128::size; k++) { x[j][k] = (floatX)(2.0f * (float)x[j][k]); }
        if (first + j * step < n) { store128(out + first + j * step, x[j]); }
    }
}

void simple_kernel6(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)4 * x128::size * block_size);
    simple_kernel_kernel6<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    double bytes = 2.0 * n * sizeof(floatX);
    cudaStream_t stream = b.stream;
    Buffer<floatX> inp = b.input<floatX>("inp", n);
    Buffer<floatX> out = b.output<floatX>("out", n, {0, 0});
    b.reference([=] { simple_kernel_cpu(out.host, inp.host, n); });
    b.cost(bytes, 0);
    b.kernel(1, "one thread per element", [=](int bs) { simple_kernel1(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.kernel(2, "grid stride, one block", [=](int bs) { simple_kernel2(out, inp, n, stream, bs); }, {256, 1024});
    b.moves(1, bytes);
    b.kernel(3, "grid stride, a chip full of blocks", [=](int bs) { simple_kernel3(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.kernel(4, "a run of 64 elements a thread", [=](int bs) { simple_kernel4(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.kernel(5, "128-bit vectors",
             [=](int bs) { bs ? simple_kernel(out, inp, n, stream, bs) : simple_kernel(out, inp, n, stream); },
             {0, 64, 128, 256, 512, 1024});
    b.moves(1, bytes);
    b.kernel(6, "four vectors in flight", [=](int bs) { simple_kernel6(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.promoted(5);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "simple_kernel", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {1, 5, 24}});
}
