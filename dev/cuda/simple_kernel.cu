/* simple_kernel: out = 2 * inp, elementwise; the subject of the first lesson, dev/learn/01_first_kernel.md

   out (n) floatX out | inp (n) floatX in; n = B*T*C
   Bound: memory, 2*n*sizeof(floatX) bytes. Constraint: n % x128::size == 0 from kernel 5 on, pointers aligned to 16
   bytes.
   Error: none, doubling is exact.
   Source: the CUDA C++ Programming Guide, "Programming Model"; Harris 2013, "CUDA Pro Tip: Write Flexible Kernels with
   Grid-Stride Loops".

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  grid-stride loop, one block (slower than 1)
     3  grid-stride loop, as many blocks as the GPU holds at once
     4  64 contiguous elements per thread: not coalesced (slower than 3)
     5  128-bit vectors (best)
     6  four 128-bit vectors per thread in flight

   nvcc -O3 --use_fast_math simple_kernel.cu -o simple_kernel      (or: make simple_kernel)
   ./simple_kernel 1      check kernel 1 against the CPU and sweep its block sizes
   ./simple_kernel        every kernel, side by side

   The terms, for readers who have never written a kernel. A kernel is a function (__global__) that the GPU executes
   many times in parallel; each execution is a thread. A warp is 32 threads that execute each instruction together. A
   block is one or more warps, up to 1024 threads; it stays on one of the GPU's multiprocessors (SMs) until it is done.
   The grid is all blocks of a launch: kernel<<<blocks in the grid, threads in a block, bytes of shared memory,
   stream>>>(arguments). The launch returns at once; the stream is the queue from which the GPU takes the work. */
#include "bench.h"

// ---- kernel 1: one thread per element --------------------------------------------------------
// Index: the number of blocks before this one times the block size, plus the thread's index in its block.
//     block 0                 block 1                 block 2               with blockDim.x = 4, n = 10
//     i = 0   1   2   3       i = 4   5   6   7       i = 8   9   -   -
// Guard: a grid consists of whole blocks, so the last block may reach past n, where the memory belongs to someone else.

// Adjacent threads of a warp read adjacent elements (a coalesced access): 32 loads of 2 bytes become one request for 64
// bytes. floatX is bf16, fp16 or fp32; the arithmetic is done in float.

__global__ void simple_kernel_kernel1(floatX* out, const floatX* inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; // cast before the product: n may exceed 2^32
    if (i < n) { out[i] = (floatX)(2.0f * (float)inp[i]); }
}

void simple_kernel1(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div(n, (size_t)block_size); // rounded up: the remaining elements need a block too
    simple_kernel_kernel1<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError()); // only this call reports an invalid launch, e.g. 2048 threads per block
}

// ---- kernel 2: a grid-stride loop in a single block, to show what the grid is for -----------------------------
// After each element, a thread advances by the number of threads in the grid (a grid-stride loop). The loop is correct
// for a grid of any size. With only one block, one SM works and all others are idle.

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

// ---- kernel 3: kernel 2 with as many blocks as the GPU holds at once -----------------------

void simple_kernel3(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size) {
    int per_sm; // number of blocks that fit on one SM, limited by their registers and threads
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, simple_kernel_kernel2, block_size, 0));
    simple_kernel_kernel2<<<num_multiprocessors() * per_sm, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: contiguous elements per thread, as one would split work on a CPU; an example of uncoalesced access ---
// Adjacent threads now read addresses that are 64 elements apart. One load of a warp touches 32 cache lines and uses
// one element of each. The rest of a line is needed later and may have left the cache by then.
//     load 0 of the warp   X...............|X...............|X...............| ...     one line per thread
//     load 1               .X..............|.X..............|.X..............| ...

constexpr int SIMPLE_KERNEL_RUN = 64; // elements per thread: a cache line of 128 bytes in 16 bits

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

// ---- kernel 5: one 16-byte load per thread (CUDA's float4, here x128) -----------------------------
// 128 bits is the widest load that all these GPUs have: 4 floats, or 8 elements of 16 bits. In 16 bits, an eighth of
// the load instructions move the same bytes, and one request of a warp covers 512 contiguous bytes. The address must be
// a multiple of 16.

__global__ void simple_kernel_kernel5(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i);
    for (int k = 0; k < x128::size; k++) { x[k] = (floatX)(2.0f * (float)x[k]); }
    store128(out + i, x);
}

// out (n) = 2 * inp (n)
void simple_kernel(floatX* out, const floatX* inp, size_t n, cudaStream_t stream, int block_size = 128) {
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    simple_kernel_kernel5<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, n);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 6: four loads in flight per thread before the first value is used ----------------------------------
// A load takes hundreds of cycles. To use the full bandwidth, the bytes in flight (requested and not yet arrived) must
// be at least bandwidth * latency. Bytes in flight = threads on the GPU * loads in flight per thread * bytes per load.

// A thread stalls where it uses a value, not where it loads it, so loads issued back to back are in flight together.

__global__ void simple_kernel_kernel6(floatX* out, const floatX* inp, size_t n) {
    constexpr int num_loads = 4;
    size_t step = (size_t)blockDim.x * x128::size; // elements between a thread's loads; adjacent threads stay coalesced
    size_t first = (size_t)blockIdx.x * num_loads * step + threadIdx.x * x128::size;
    x128 x[num_loads]; // stays in registers, because the loops are unrolled
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
    bool extremes = b.cases({"normal", "extremes, whose double overflows"}) == 1;
    Buffer<floatX> inp = extremes ? b.input_filled<floatX>("inp", n, bench_fill_extremes) : b.input<floatX>("inp", n);
    Buffer<floatX> out = b.output<floatX>("out", n, {0, 0});
    b.reference([=] {
        simple_kernel_cpu(out.host, inp.host, n);
        for (size_t i = 0; i < n; i++) { out.host[i] = (float)(floatX)out.host[i]; } // too large: infinity
    });
    b.cost(bytes, 0);
    b.kernel(1, "one thread per element", [=](int bs) { simple_kernel1(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.kernel(2, "grid-stride loop, one block", [=](int bs) { simple_kernel2(out, inp, n, stream, bs); }, {256, 1024});
    b.moves(1, bytes);
    b.kernel(3, "grid-stride loop, as many blocks as the GPU holds at once",
             [=](int bs) { simple_kernel3(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.kernel(4, "64 contiguous elements per thread: not coalesced",
             [=](int bs) { simple_kernel4(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.kernel(5, "128-bit vectors",
             [=](int bs) { bs ? simple_kernel(out, inp, n, stream, bs) : simple_kernel(out, inp, n, stream); },
             {0, 64, 128, 256, 512, 1024});
    b.moves(1, bytes);
    b.kernel(6, "four 128-bit vectors per thread in flight", [=](int bs) { simple_kernel6(out, inp, n, stream, bs); });
    b.moves(1, bytes);
    b.best(5);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "simple_kernel", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8}, {3, 17, 776}, {1, 5, 24}});
}
