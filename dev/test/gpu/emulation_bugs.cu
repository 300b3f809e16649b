/* Kernels with planted bugs: test_emulation.sh demands that the emulation finds and names each of them. The text of a
   kernel in --list is what the report must say; a comment "bug N" marks the line that it must name. In kernels whose text
   begins with "right:", it must find nothing. */
#include "../../llmc/ptx.cuh"
#include "bench.h"

__global__ void bug_kernel0(float* out) { out[threadIdx.x] = 0.0f; } // right, but not the vendor's
__global__ void bug_kernel1(float* out) {
    __shared__ float x[64];
    x[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x] = x[threadIdx.x ^ 32]; // bug 1
}
__global__ void bug_kernel2(float* out) {
    __shared__ float x[64];
    x[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x] = x[threadIdx.x ^ 1]; // bug 2
}
__global__ void bug_kernel3(float* out) {
    __shared__ float x[64];
    if (threadIdx.x < 32) { x[threadIdx.x] = 0.0f; }
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x]; // bug 3
}
__global__ void bug_kernel4(float* out) {
    __shared__ float x[64];
    x[threadIdx.x + 1] = 0.0f; // bug 4
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x == 0 ? 1 : threadIdx.x];
}
__global__ void bug_kernel5(float* out) { out[threadIdx.x + 1] = 0.0f; } // bug 5
__global__ void bug_kernel6(float* out) {
    if (threadIdx.x == 0) { __syncwarp(0x3); } // bug 6
    __syncthreads();
    out[threadIdx.x] = 0.0f;
}
__global__ void bug_kernel7(float* out) {
    float x = threadIdx.x < 8 ? 0.0f : __shfl_sync(0xFFFFFF00u, 1.0f, 0); // bug 7
    out[threadIdx.x] = 0.0f * x;
}
__global__ void bug_kernel8(float* out) { out[0] += 1.0f; }                           // bug 8
__global__ void bug_kernel9(float*) { *(volatile float*)(size_t)threadIdx.x = 0.0f; } // bug 9
__global__ void bug_kernel10(float* out) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) { mbarrier_init(&barrier, 2); } // 2 arrivals per phase, and only one comes
    __syncthreads();
    if (threadIdx.x == 0) { mbarrier_arrive(&barrier); }
    mbarrier_wait(&barrier, 0); // bug 10
    out[threadIdx.x] = 0.0f;
}
__global__ void bug_kernel11(float* out) {
    if (threadIdx.x < 31) { *reinterpret_cast<uint64_t*>(out + 1 + 2 * threadIdx.x) = 0; } // bug 11
}
__global__ void bug_kernel12(float* out) {
    f128 x = {};
    if (threadIdx.x < 15) { store128(out + 2 + 4 * threadIdx.x, x); } // bug 12
}
__global__ void bug_kernel13(float* out) {
    __shared__ float x[4]; // bug 13
    if (threadIdx.x == 0) { x[0] = 0.0f; }
    __syncthreads();
    out[threadIdx.x] = x[0];
}

// What kernels 14 to 18 share: a row of 64 floats is copied to shared memory, asynchronously, and from there to out.
__device__ inline void init_barrier(uint64_t* barrier) {
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
    }
}
__device__ inline void load_row(float* x, const float* from, uint64_t* barrier) {
    mbarrier_arrive_expect(barrier, 256);
    bulk_load(x, from, 256, barrier);
}
__device__ inline void store_loaded_row(float* out, const float* x, uint64_t* barrier) {
    mbarrier_wait(barrier, 0);
    out[threadIdx.x] = x[threadIdx.x];
}
__global__ void bug_kernel14(float* out) {
    __shared__ alignas(16) float x[64];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        mbarrier_init(&barrier, 1);
        load_row(x, out, &barrier); // bug 14
    }
    __syncthreads();
    store_loaded_row(out, x, &barrier);
}
__global__ void bug_kernel15(float* out) {
    __shared__ alignas(16) float x[64];
    x[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store_fence();             // of this thread's writes, not of the others'
        bulk_store(out, x, sizeof(x)); // bug 15
        tma_store_commit();
        tma_store_wait<0>();
    }
}
__global__ void bug_kernel16(float* out) {
    __shared__ alignas(16) float x[64];
    __shared__ uint64_t barrier;
    init_barrier(&barrier);
    x[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) { load_row(x, out, &barrier); } // bug 16
    store_loaded_row(out, x, &barrier);
}
__global__ void bug_kernel17(float* out) {
    __shared__ alignas(16) float x[64];
    __shared__ uint64_t barrier;
    init_barrier(&barrier);
    out[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) { load_row(x, out, &barrier); } // bug 17
    store_loaded_row(out, x, &barrier);
}
// 15, 16 and 17 with the fences: nothing may be reported.
__global__ void fenced_kernel18(float* out) {
    __shared__ alignas(16) float x[64];
    __shared__ uint64_t barrier;
    init_barrier(&barrier);
    x[threadIdx.x] = 0.0f;
    tma_store_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(out, x, sizeof(x));
        tma_store_commit();
        tma_store_wait_written();
        async_proxy_fence();
        load_row(x, out, &barrier);
    }
    store_loaded_row(out, x, &barrier);
}

static void declare(Bench& b) {
    Buffer<float> out = b.output<float>("out", 64, {0, 0});
    b.reference([=] { std::fill(out.host, out.host + 64, 0.0f); });
    b.cost(1, 0);
    auto kernel = [&](int number, const char* what, void (*bug)(float*), int num_blocks, size_t dynamic = 0) {
        b.kernel(number, what,
                 [=](int) {
                     cudaCheck(cudaMemset(out, 0, 64 * sizeof(float)));
                     bug<<<num_blocks, 64, dynamic>>>(out);
                     cudaCheck(cudaGetLastError());
                 },
                 {0});
    };
    kernel(0, "kernel 0 is not the vendor's library", bug_kernel0, 1);
    kernel(1, "race: a read of what another thread writes", bug_kernel1, 1);
    kernel(2, "race: a read of what another thread writes", bug_kernel2, 1);
    kernel(3, "a read of uninitialised memory of x, byte 128 of 256", bug_kernel3, 1);
    kernel(4, "a write out of bounds of x, byte 256 of 256", bug_kernel4, 1);
    kernel(5, "a write out of bounds of device memory, byte 256 of an allocation of 256", bug_kernel5, 1);
    kernel(6, "a deadlock: the threads wait for others that do not come", bug_kernel6, 1);
    kernel(7, "a shuffle reads from a lane that does not take part", bug_kernel7, 1);
    kernel(8, "what another thread writes of device memory", bug_kernel8, 2);
    kernel(9, "an access through a pointer to no memory", bug_kernel9, 1);
    kernel(10, "a deadlock: all threads poll memory that nobody writes", bug_kernel10, 1);
    kernel(11, "a misaligned access of 8 bytes", bug_kernel11, 1);
    kernel(12, "a misaligned access of 16 bytes", bug_kernel12, 1);
    kernel(13, "too much shared memory, 49168 bytes, static and dynamic", bug_kernel13, 1, 48 << 10);
    kernel(14, "to an mbarrier that was initialised without mbarrier_init_fence()", bug_kernel14, 1);
    kernel(15, "what a thread has written without tma_store_fence()", bug_kernel15, 1);
    kernel(16, "what a thread has written without tma_store_fence()", bug_kernel16, 1);
    kernel(17, "an asynchronous read of what its launch has written, without async_proxy_fence()", bug_kernel17, 1);
    kernel(18, "right: 15, 16 and 17 with fences", fenced_kernel18, 1);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "emulation_bugs", declare, {1, 1, 8, 1, 8}, {{1, 1, 8}});
}
