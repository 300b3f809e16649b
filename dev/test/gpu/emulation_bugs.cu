/* Kernels with planted bugs: test_emulation.sh demands that the emulation finds and names each of them. The text of a
   kernel in --list is what the report must say; a comment "bug N" marks a line that it must name. In kernels whose text
   begins with "right:", it must find nothing. */
#include <cooperative_groups.h>

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
    if (threadIdx.x == 0) { mbarrier_arrive(&barrier); } // bug 10
    mbarrier_wait(&barrier, 0);                          // bug 10
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

// ---- fences between blocks ----
// Two blocks of 64 threads. Each writes its part; the last one to count itself reads both. s.part and s.count are zero before.
struct Shared2 {
    float part[2][64];
    int count, flag[64];
    unsigned long long most;
};
__device__ inline void write_part(Shared2* s) { s->part[blockIdx.x][threadIdx.x] = 0.0f; }
__device__ inline bool is_last(int count) { return __syncthreads_or(count == 1); } // count: of thread 0
__device__ inline void add_parts(float* out, Shared2* s) {
    out[threadIdx.x] = s->part[0][threadIdx.x] + s->part[1][threadIdx.x];
}

__global__ void bug_kernel19(float* out, Shared2* s) {
    write_part(s);
    __syncthreads();
    if (!is_last(threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0)) { return; } // bug 19
    __threadfence();
    add_parts(out, s);
}
__global__ void bug_kernel20(float* out, Shared2* s) {
    write_part(s);
    __syncthreads();
    int count = threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0; // bug 20
    __threadfence();
    if (is_last(count)) { add_parts(out, s); }
}
__global__ void bug_kernel21(float* out, Shared2* s) {
    write_part(s);
    __threadfence_block(); // bug 21
    __syncthreads();
    if (!is_last(threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0)) { return; }
    __threadfence();
    add_parts(out, s);
}
__global__ void bug_kernel22(float* out, Shared2* s) {
    write_part(s);
    __threadfence();
    __syncthreads();
    int count = threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0; // bug 22
    if (is_last(count)) { add_parts(out, s); }
}
__global__ void bug_kernel23(float* out, Shared2* s) { // only what thread 0 has written comes before its fence
    write_part(s);
    if (threadIdx.x == 0) { __threadfence(); } // bug 23
    if (!is_last(threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0)) { return; }
    __threadfence();
    add_parts(out, s);
}
__global__ void bug_kernel24(float* out, Shared2* s) { // the fence of thread 0 comes after its own reads only
    write_part(s);
    __threadfence();
    __syncthreads();
    bool last = is_last(threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0);
    if (threadIdx.x == 0) { __threadfence(); } // bug 24
    if (last) { add_parts(out, s); }
}
// Who fences: every thread around the barriers, or thread 0 between them.
__global__ void fenced_kernel25(float* out, Shared2* s) {
    write_part(s);
    __threadfence();
    __syncthreads();
    if (!is_last(threadIdx.x == 0 ? atomicAdd(&s->count, 1) : 0)) { return; }
    __threadfence();
    add_parts(out, s);
}
__global__ void fenced_kernel26(float* out, Shared2* s) {
    write_part(s);
    __syncthreads();
    int count = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        count = atomicAdd(&s->count, 1);
        __threadfence();
    }
    if (is_last(count)) { add_parts(out, s); }
}

// A block waits for the flag of the one before it, and the last block reads what the first has written.
template <class Wait, class Set>
__device__ inline void chain(float* out, Shared2* s, const Wait& wait, const Set& set) {
    if (blockIdx.x == 0) { s->part[0][threadIdx.x] = 0.0f; }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (blockIdx.x > 0) { wait(&s->flag[blockIdx.x]); }
        if (blockIdx.x < gridDim.x - 1) { set(&s->flag[blockIdx.x + 1]); }
    }
    __syncthreads();
    if (blockIdx.x == gridDim.x - 1) { out[threadIdx.x] = s->part[0][threadIdx.x]; }
}
__global__ void bug_kernel27(float* out, Shared2* s) {
    auto wait = [](int* flag) {
        while (load_acquire(flag) == 0) {}
    };
    chain(out, s, wait, [](int* flag) { atomicExch(flag, 1); }); // bug 27
}
__global__ void bug_kernel28(float* out, Shared2* s) {
    auto wait = [](int* flag) {
        while (atomicAdd(flag, 0) == 0) {} // bug 28
    };
    chain(out, s, wait, [](int* flag) { store_release(flag, 1); });
}
__global__ void bug_kernel29(float* out, Shared2* s) {
    auto wait = [](int* flag) {
        while (*(volatile int*)flag == 0) {} // bug 29
    };
    chain(out, s, wait, [](int* flag) { __threadfence(), *(volatile int*)flag = 1; });
}
__global__ void fenced_kernel30(float* out, Shared2* s) {
    auto wait = [](int* flag) {
        while (load_acquire(flag) == 0) {}
    };
    chain(out, s, wait, [](int* flag) { add_release(flag, 1); });
}
__global__ void fenced_kernel31(float* out, Shared2* s) {
    auto wait = [](int* flag) {
        while (*(volatile int*)flag == 0) {}
        __threadfence();
    };
    chain(out, s, wait, [](int* flag) { __threadfence(), *(volatile int*)flag = 1; });
}
__global__ void bug_kernel32(float* out, Shared2* s) { // the flag itself is an ordinary store
    auto wait = [](int* flag) {
        while (load_acquire(flag) == 0) {}
    };
    chain(out, s, wait, [](int* flag) { __threadfence(), *flag = 1; }); // bug 32
}

__global__ void bug_kernel33(float* out) { // a fence is no barrier of the block
    out[threadIdx.x] = 0.0f;
    __threadfence();
    float x = out[threadIdx.x ^ 32]; // bug 33
    __syncthreads();
    out[threadIdx.x] = x;
}
template <bool fences> __device__ inline void take_most(float* out, Shared2* s) {
    if (threadIdx.x > 0) { return; }
    atomicMax(&s->most, 7ull + blockIdx.x);
    if (fences) { __threadfence(); }
    if (atomicAdd(&s->count, 1) == 0) { return; }
    if (fences) { __threadfence(); }
    unsigned long long most = atomicExch(&s->most, 0ull); // bug 34
    for (int i = 0; i < 64; i++) { out[i] = (float)most - 8.0f; }
}
__global__ void bug_kernel34(float* out, Shared2* s) { take_most<false>(out, s); }
__global__ void fenced_kernel35(float* out, Shared2* s) { take_most<true>(out, s); }

// Block 0 stores a row asynchronously, and the other block loads it so.
template <bool waits, bool fences> __device__ inline void pass_row(float* out, Shared2* s) {
    __shared__ alignas(16) float x[64];
    __shared__ uint64_t barrier;
    init_barrier(&barrier);
    x[threadIdx.x] = 0.0f;
    tma_store_fence();
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        bulk_store(s->part, x, 256);
        tma_store_commit();
        waits ? tma_store_wait_written() : tma_store_wait<0>();
        store_release(s->flag, 1); // bug 36
    }
    if (blockIdx.x == 0) { return; }
    if (threadIdx.x == 0) {
        while (load_acquire(s->flag) == 0) {}
        if (fences) { async_proxy_fence(); }
        load_row(x, s->part[0], &barrier); // bug 37
    }
    store_loaded_row(out, x, &barrier);
}
__global__ void bug_kernel36(float* out, Shared2* s) { pass_row<false, true>(out, s); }
__global__ void bug_kernel37(float* out, Shared2* s) { pass_row<true, false>(out, s); }
__global__ void fenced_kernel38(float* out, Shared2* s) { pass_row<true, true>(out, s); }

// The two blocks of a cluster read what the other one has written, in device memory and in shared memory.
template <bool releases> __device__ inline void exchange(float* out, Shared2* s, bool in_shared) {
    __shared__ float x[64];
    x[threadIdx.x] = 0.0f;
    write_part(s);
    if (!releases) { cluster_arrive_relaxed(); }
    cluster_wait();
    float* there = cooperative_groups::this_cluster().map_shared_rank(x, cluster_rank() ^ 1);
    float y = in_shared ? there[threadIdx.x] : s->part[cluster_rank() ^ 1][threadIdx.x]; // bug 39
    if (cluster_rank() == 0) { out[threadIdx.x] = y; }
    cluster_sync();
}
__global__ void bug_kernel39(float* out, Shared2* s) { exchange<false>(out, s, false); }
__global__ void bug_kernel40(float* out, Shared2* s) { exchange<false>(out, s, true); }
__global__ void fenced_kernel41(float* out, Shared2* s) { exchange<true>(out, s, false); }
__global__ void fenced_kernel42(float* out, Shared2* s) { exchange<true>(out, s, true); }
// A remote arrival says that this thread has read, and does not publish what it has written.
__global__ void bug_kernel43(float* out, Shared2* s) {
    __shared__ uint64_t barrier;
    init_barrier(&barrier);
    cluster_sync();
    if (cluster_rank() == 1 && threadIdx.x == 0) {
        s->part[1][0] = 0.0f;
        mbarrier_arrive_cluster(&barrier, 0);
    }
    if (cluster_rank() == 0) {
        mbarrier_wait(&barrier, 0);
        out[threadIdx.x] = s->part[1][0]; // bug 43
    }
    cluster_sync();
}

// ---- waits that never end: the report names the arrival that is missing, and the last one that came ----

__global__ void bug_kernel44(float* out) { // expects 512 bytes, and 256 come
    __shared__ alignas(16) float x[128];
    __shared__ uint64_t barrier;
    init_barrier(&barrier);
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&barrier, 512); // bug 44
        bulk_load(x, out, 256, &barrier);
    }
    store_loaded_row(out, x, &barrier);
}
__global__ void
bug_kernel45(float* out) { // of 64 threads that barrier 1 waits for, the second warp arrives at barrier 2
    if (threadIdx.x < 32) {
        named_barrier_sync(1, 64); // bug 45
    } else {
        named_barrier_arrive(2, 64);
    }
    out[threadIdx.x] = 0.0f;
}
__global__ void bug_kernel46(float* out, Shared2* s) { // waits for its own flag, and the other block sets another one
    if (blockIdx.x == 0) { store_release(&s->flag[3], 1); }
    if (blockIdx.x == 1) {
        while (load_acquire(&s->flag[2]) == 0) {} // bug 46
        out[threadIdx.x] = 0.0f;
    }
}
__global__ void bug_kernel47(float* out, Shared2* s) { // a counter that 2 are waited for, and one block counts itself
    if (threadIdx.x > 0) { return; }
    if (blockIdx.x == 0) { add_release(&s->count, 1); } // bug 47
    while (load_acquire(&s->count) < 2) {}
    out[0] = 0.0f;
}
__global__ void bug_kernel48(float* out, Shared2* s) { // a block does not come to the barrier of its cluster
    if (cluster_rank() == 1) {
        while (load_acquire(&s->count) == 0) {}
    }
    cluster_sync(); // bug 48
    out[threadIdx.x] = 0.0f;
}
__global__ void bug_kernel49(float* out) { // the slot is free, but nobody says so
    __shared__ uint64_t empty;
    init_barrier(&empty);
    __syncthreads();
    if (threadIdx.x == 0) { mbarrier_wait(&empty, 0); } // bug 49
    __syncthreads();
    out[threadIdx.x] = 0.0f;
}

// ---- wrong results: who wrote the element, and who has read what nobody wrote ----

__global__ void bug_kernel50(float* out) {
    out[threadIdx.x] = threadIdx.x == 40 ? 1.0f : 0.0f; // bug 50
}
__global__ void bug_kernel51(float* out, Shared2* s) {   // the sums of one block of two
    out[threadIdx.x] = s->part[blockIdx.x][threadIdx.x]; // bug 51
}
__global__ void bug_kernel52(float* out) {
    if (threadIdx.x != 40) { out[threadIdx.x] = 0.0f; } // bug 52
}

// ---- state that the next launches need ----

__global__ void bug_kernel53(float* out, int* state) { // the counter is not reset
    if (__syncthreads_or(threadIdx.x == 0 && atomicAdd(state, 1) == 0)) { out[threadIdx.x] = 0.0f; } // bug 53
}
__global__ void bug_kernel54(float* out,
                             int* state) { // launches take turns with two sums, and nobody sets them to zero
    int launch = state[0], *sum = state + 1 + launch % 2; // bug 54
    __syncthreads();
    if (threadIdx.x == 0) { state[0] = launch + 1, *sum += 1; }
    __syncthreads();
    out[threadIdx.x] = (float)(*sum - 1);
}

// The others are launched early, after this one.
__global__ void early_kernel(float* shared) { shared[threadIdx.x] = 0.0f; }
__global__ void bug_kernel55(float* out, float* shared) {
    out[threadIdx.x] = shared[threadIdx.x]; // bug 55
    grid_wait_dependency();
}
__global__ void bug_kernel56(float* out, float* shared) {
    shared[threadIdx.x] = 1.0f; // bug 56
    grid_wait_dependency();
    out[threadIdx.x] = 0.0f;
}
__global__ void bug_kernel57(float* out, float*) { out[threadIdx.x] = 0.0f; }
__global__ void waiting_kernel58(float* out, float* shared) { // thread 0 waits for its block
    grid_launch_dependents();
    if (threadIdx.x == 0) { grid_wait_dependency(); }
    __syncthreads();
    out[threadIdx.x] = shared[threadIdx.x];
}
__global__ void releasing_kernel(float* other) { // the next kernel may start while early_kernel still runs
    grid_launch_dependents();
    grid_wait_dependency();
    other[threadIdx.x] = 0.0f;
}
__global__ void waiting_kernel(float* other) { // the next kernel starts when early_kernel has ended
    grid_wait_dependency();
    grid_launch_dependents();
    other[threadIdx.x] = 0.0f;
}

// ---- what a thread has executed before its result was wrong ----

__device__ inline float value62() {
    return threadIdx.x == 40; // bug 62
}
__device__ inline void put63(float* x) {
    x[threadIdx.x] = threadIdx.x == 8; // bug 63
}
__device__ inline bool comes64() {
    return blockIdx.x == 0; // bug 64
}
__device__ inline void wait65(const float* out) {
    for (unsigned i = 0; i != 63 && !(out[threadIdx.x] > 0.0f); i += 2) {} // bug 65
}
__global__ void bug_kernel66(float* out) {
    assert(threadIdx.x < 40); // bug 66
    out[threadIdx.x] = 0.0f;
}
__global__ void bug_kernel62(float* out) {
    float value = value62();
    out[threadIdx.x] = value;
}
__global__ void bug_kernel63(float* out) {
    __shared__ float x[32];
    if (threadIdx.x < 32) { put63(x); }
    __syncthreads();
    out[threadIdx.x] = threadIdx.x < 32 ? 0.0f : x[threadIdx.x - 32];
}
__global__ void bug_kernel64(float* out) {
    if (!comes64()) { return; }
    out[blockIdx.x * 32 + threadIdx.x] = 0.0f;
}
__global__ void bug_kernel65(float* out) {
    wait65(out);
    out[threadIdx.x] = 0.0f;
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
    Buffer<float> shared = b.scratch<float>("shared", sizeof(Shared2) / sizeof(float));
    auto blocks = [&](int number, const char* what, void (*bug)(float*, Shared2*), int num_blocks, int cluster = 1) {
        auto launch = [=](int) {
            cudaCheck(cudaMemset(shared, 0, sizeof(Shared2)));
            cudaLaunchAttribute attribute = {};
            attribute.id = cudaLaunchAttributeClusterDimension;
            attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
            cudaLaunchConfig_t config = {};
            config.gridDim = dim3(num_blocks), config.blockDim = dim3(64);
            config.attrs = &attribute, config.numAttrs = 1;
            cudaCheck(cudaLaunchKernelEx(&config, bug, (float*)out, (Shared2*)(float*)shared));
        };
        b.kernel(number, what, launch, {0});
    };
    auto launch51 = [=](int) { // without cudaMemset
        bug_kernel51<<<1, 64>>>(out, (Shared2*)(float*)shared);
        cudaCheck(cudaGetLastError());
    };
    auto launch52 = [=](int) {
        bug_kernel52<<<1, 64>>>(out);
        cudaCheck(cudaGetLastError());
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
    kernel(10, "of barrier, byte 0 of 8: phase 0 has 1 of 2 arrivals, the last arrival was at", bug_kernel10, 1);
    kernel(11, "a misaligned access of 8 bytes", bug_kernel11, 1);
    kernel(12, "a misaligned access of 16 bytes", bug_kernel12, 1);
    kernel(13, "too much shared memory, 49168 bytes, static and dynamic", bug_kernel13, 1, 48 << 10);
    kernel(14, "to an mbarrier that was initialised without mbarrier_init_fence()", bug_kernel14, 1);
    kernel(15, "what a thread has written without tma_store_fence()", bug_kernel15, 1);
    kernel(16, "what a thread has written without tma_store_fence()", bug_kernel16, 1);
    kernel(17, "an asynchronous read of what its launch has written, without async_proxy_fence()", bug_kernel17, 1);
    kernel(18, "right: 15, 16 and 17 with fences", fenced_kernel18, 1);
    blocks(19, "the writer has not fenced before the atomic (emulation_bugs.cu:", bug_kernel19, 2);
    blocks(20, "comes after the atomic (emulation_bugs.cu:", bug_kernel20, 2);
    blocks(21, "is of block scope, before the atomic (emulation_bugs.cu:", bug_kernel21, 2);
    blocks(22, "comes before the atomic, and none after it (emulation_bugs.cu:", bug_kernel22, 2);
    blocks(23, "is not ordered after the write, but before the atomic (emulation_bugs.cu:", bug_kernel23, 2);
    blocks(24, "no barrier orders this access after the reader's fence (emulation_bugs.cu:", bug_kernel24, 2);
    blocks(25, "right: every thread fences", fenced_kernel25, 2);
    blocks(26, "right: thread 0 fences for its block", fenced_kernel26, 2);
    blocks(27, "the writer has not fenced before the atomic (emulation_bugs.cu:", bug_kernel27, 2);
    blocks(28, "the reader has not fenced after the atomic (emulation_bugs.cu:", bug_kernel28, 2);
    blocks(29, "the reader has not fenced after the atomic (emulation_bugs.cu:", bug_kernel29, 2);
    blocks(30, "right: release and acquire, over three blocks", fenced_kernel30, 3);
    blocks(31, "right: volatile flags between fences, over three blocks", fenced_kernel31, 3);
    blocks(32, "what another thread writes of device memory", bug_kernel32, 2);
    kernel(33, "race: a read of what another thread writes of device memory", bug_kernel33, 1);
    blocks(34, "race: an exchange takes what an atomic of another block may not have reached yet", bug_kernel34, 2);
    blocks(35, "right: an exchange behind fences", fenced_kernel35, 2);
    blocks(36, "the writer has not called tma_store_wait_written() before the atomic", bug_kernel36, 2);
    blocks(37, "an asynchronous read of what its launch has written, without async_proxy_fence()", bug_kernel37, 2);
    blocks(38, "right: 36 and 37 with the wait and the fence", fenced_kernel38, 2);
    blocks(39, "race: a read of what another thread writes of device memory", bug_kernel39, 2, 2);
    blocks(40, "race: a read of what another thread writes in shared memory of another block", bug_kernel40, 2, 2);
    blocks(41, "right: a cluster's barrier orders device memory", fenced_kernel41, 2, 2);
    blocks(42, "right: a cluster's barrier orders shared memory", fenced_kernel42, 2, 2);
    blocks(43, "race: a read of what another thread writes of device memory", bug_kernel43, 2, 2);
    kernel(44, "phase 0 has 1 of 1 arrivals and 256 of 512 bytes, the last arrival was at", bug_kernel44, 1);
    kernel(45, "32 threads wait at barrier 1, at which 32 of 64 threads have arrived", bug_kernel45, 1);
    blocks(46, "shared, which is 0; no other atomic of this launch has written it", bug_kernel46, 2);
    blocks(47, "shared, which is 1; its last atomic write was at", bug_kernel47, 2);
    blocks(48, "at the barrier of the cluster, to which 1 of 2 blocks have come, the last one at", bug_kernel48, 2, 2);
    kernel(49, "of empty, byte 0 of 8: phase 0 has 0 of 1 arrivals, and nobody has ever arrived", bug_kernel49, 1);
    kernel(50, "out: 1 of 64 wrong, worst at 40: got 1, want 0, written at", bug_kernel50, 1);
    b.kernel(51, "a read of what nobody has written, of device memory, byte 0 of", launch51, {0});
    b.kernel(52, "which nobody has written; element 39 was written at", launch52, {0});
    Buffer<int> state = b.state_of_launches<int>("state", 3);
    auto again = [&](int number, const char* what, void (*bug)(float*, int*)) {
        b.kernel(number, what, [=](int) { bug<<<1, 64>>>(out, state); }, {0});
    };
    again(53, "launch 3, with the scratch of the one before: out: 64 of 64 wrong", bug_kernel53);
    again(54, "launch 3, with the scratch of the one before: out: 64 of 64 wrong", bug_kernel54);
    typedef void Between(float*);
    auto early = [&](int number, const char* what, void (*bug)(float*, float*), Between* between = NULL) {
        auto launch = [=](int) {
            early_kernel<<<1, 64>>>(shared);
            if (between) { launch_early(between, 1, 64, 0, Execution(), shared + 64); }
            launch_early(bug, 1, 64, 0, Execution(), (float*)out, (float*)shared);
        };
        b.kernel(number, what, launch, {0});
    };
    early(55, "before grid_wait_dependency(), a read of what a previous kernel writes", bug_kernel55);
    early(56, "before grid_wait_dependency(), a write of what a previous kernel writes", bug_kernel56);
    early(57, "launched early, it writes device memory, and no thread calls grid_wait_dependency()", bug_kernel57);
    early(58, "right: a thread waits for its block", waiting_kernel58, releasing_kernel);
    early(59, "before grid_wait_dependency(), a read of what a previous kernel writes", bug_kernel55, releasing_kernel);
    early(60, "right: the kernel before the previous one has ended", bug_kernel55, waiting_kernel);
    kernel(61, "a deadlock: all threads poll memory that nobody writes, at emulation_bugs.cu:", bug_kernel10, 1);
    kernel(62, "before: thread (40,0,0) of block (0,0,0) was at", bug_kernel62, 1);
    kernel(63, "input: written at emulation_bugs.cu:", bug_kernel63, 1);
    b.kernel(64, "before: thread (31,0,0) of block (1,0,0) was at", [=](int) { bug_kernel64<<<2, 32>>>(out); }, {0});
    kernel(65, "a launch that does not end", bug_kernel65, 1);
    kernel(66, "; threadIdx.x < 40", bug_kernel66, 1);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "emulation_bugs", declare, {1, 1, 8, 1, 8}, {{1, 1, 8}});
}
