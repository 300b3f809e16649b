/* Like emulation_bugs.cu: kernels that break the rules of wgmma, one each. All operands are 0, and so are all results. */
#include "../../llmc/ptx.cuh"
#include "bench.h"

struct SMem {
    floatX a[64 * 64]; // 64 rows of 64 elements: wgmma reads 16 of them
    floatX b[32 * 64];
    uint64_t barrier;
};

// Clears the operands, so that wgmma can read them.
__device__ SMem& zero_operands(unsigned char* dynamic_shared) {
    SMem& smem = shared_aligned_1024<SMem>(dynamic_shared);
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) { smem.a[i] = (floatX)0.0f; }
    for (int i = threadIdx.x; i < 32 * 64; i += blockDim.x) { smem.b[i] = (floatX)0.0f; }
    if (threadIdx.x == 0) { mbarrier_init(&smem.barrier, 1), mbarrier_init_fence(); }
    tma_store_fence();
    __syncthreads();
    return smem;
}
#define OPERANDS                                                                                                       \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                    \
    SMem& smem = zero_operands(dynamic_shared);                                                                        \
    uint64_t a = wgmma_descriptor(smem.a), b = wgmma_descriptor(smem.b)

__global__ void wgmma_kernel1(float* out) {
    OPERANDS;
    float d[8] = {};
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX());
    wgmma_commit();
    out[threadIdx.x] = d[0]; // bug 1
    wgmma_wait<0>();
}
__global__ void wgmma_kernel2(float* out) {
    OPERANDS;
    float d[8] = {};
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX());
    wgmma_commit();
    d[3] = 0.0f; // bug 2
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0] + d[3];
}
__global__ void wgmma_kernel3(float* out) {
    OPERANDS;
    float d[8] = {}, e[8] = {};
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX());
    wgmma_commit();
    wgmma_64x16x16(e, a, b, 1, floatX());
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(d);
    wgmma_hold(e);
    out[threadIdx.x] = d[0];
    out[threadIdx.x] += e[0]; // bug 3
}
__global__ void wgmma_kernel4(float* out) {
    OPERANDS;
    float d[8] = {};
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX()); // it is in no group
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0]; // bug 4
}
__global__ void wgmma_kernel5(float* out) {
    OPERANDS;
    float d[8] = {};
    wgmma_64x16x16(d, a, b, 1, floatX()); // bug 5
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0];
}
__global__ void wgmma_kernel6(float* out) {
    OPERANDS;
    float d[8] = {};
    for (int i = 0; i < 2; i++) {
        if (i == 0) { wgmma_fence(); }
        wgmma_64x16x16(d, a, b, 1, floatX()); // bug 6
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(d);
        for (int j = 0; j < 8; j++) { d[j] *= 0.5f; }
    }
    out[threadIdx.x] = d[0];
}
__global__ void wgmma_kernel7(float* out) {
    OPERANDS;
    float d[8] = {};
    uint32_t p[4];
    wgmma_fence();
    for (int i = 0; i < 4; i++) { p[i] = pack_16x2(d[2 * i], d[2 * i + 1], floatX()); }
    float e[8] = {};
    wgmma_fence();
    p[0] = pack_16x2(0.0f, -0.0f, floatX());
    wgmma_64x16x16(e, p, b, 1, floatX()); // bug 7
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(e);
    out[threadIdx.x] = e[0] + 0 * a;
}
__global__ void wgmma_kernel8(float* out) {
    OPERANDS;
    float d[8] = {};
    uint32_t p[4] = {};
    wgmma_fence();
    wgmma_64x16x16(d, p, b, 1, floatX());
    wgmma_commit();
    p[0] = 0x3F803F80; // bug 8
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0] * p[0] + 0 * a;
}
__global__ void wgmma_kernel9(float* out) {
    OPERANDS;
    float d[8] = {}, e[8] = {};
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX());
    wgmma_64x16x16(e, a, b, 1, floatX());
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(e);
    out[threadIdx.x] = d[0]; // bug 9
}
__global__ void wgmma_kernel10(float* out) {
    OPERANDS;
    float d[8] = {};
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX());
    wgmma_commit();
    __syncthreads();
    if (threadIdx.x == 0) { smem.b[3] = (floatX)1.0f; } // bug 10
    __syncthreads();
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = 0 * d[0];
}
__global__ void wgmma_kernel11(float* out) {
    OPERANDS;
    float d[8] = {};
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&smem.barrier, 256);
        bulk_load(smem.b, out, 256, &smem.barrier);
    }
    __syncthreads();
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX()); // bug 11
    wgmma_commit();
    mbarrier_wait(&smem.barrier, 0);
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0];
}
__global__ void wgmma_kernel12(float* out) {
    OPERANDS;
    float d[16] = {};
    wgmma_fence();
    wgmma_64x32x16(d, a, b, 1, floatX());
    wgmma_64x16x16(d, a, b, 1, floatX()); // bug 12
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0];
}
__global__ void wgmma_kernel13(float* out) {
    OPERANDS;
    float d[8] = {};
    smem.b[threadIdx.x] = (floatX)0.0f; // bug 13
    __syncthreads();
    wgmma_fence();
    wgmma_64x16x16(d, a, b, 1, floatX());
    wgmma_commit();
    tma_store_fence();
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] = d[0];
}
__global__ void wgmma_kernel14(float* out) {
    OPERANDS;
    float d[8] = {};
    uint32_t p[4] = {};
    wgmma_fence();
    wgmma_64x16x16(d, p, b, 1, floatX());
    wgmma_64x16x16(d, p, b + 2, 1, floatX());
    wgmma_commit();
    out[threadIdx.x] = (float)p[0]; // bug 14
    wgmma_wait<0>();
    wgmma_hold(d);
    out[threadIdx.x] += d[0] + 0 * a;
}

// Products in a chain, two accumulators in turn, operands in registers, another shape after a wait.
__global__ void right_kernel15(float* out) {
    OPERANDS;
    float d[8] = {}, e[8];
    wgmma_hold(d);
    wgmma_fence();
    for (int i = 0; i < 2; i++) {
        wgmma_64x16x16(d, a + 2 * i, b, 1, floatX());
        wgmma_64x16x16(e, a, b + 2 * i, i, floatX());
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    wgmma_hold(e);
    for (int step = 0; step < 3; step++) {
        uint32_t p[4];
        for (int i = 0; i < 4; i++) { p[i] = pack_16x2(d[2 * i], e[2 * i + 1], floatX()); }
        wgmma_hold(p);
        wgmma_fence();
        wgmma_64x16x16(e, a, b, 0, floatX());
        wgmma_commit();
        wgmma_64x16x16(d, p, b, 1, floatX());
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(e);
        e[step] += 1.0f - 1.0f;
        wgmma_wait<0>();
        wgmma_hold(d);
    }
    float wide[16];
    for (int i = 0; i < 16; i++) { wide[i] = d[i / 2]; }
    wgmma_fence();
    wgmma_64x32x16(wide, a, b, 1, floatX());
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(wide);
    wgmma_fence();
    if (threadIdx.x < 128) { out[threadIdx.x] = d[0] + e[0] + wide[0]; }
}

static void declare(Bench& b) {
    Buffer<float> out = b.output<float>("out", 128, {0, 0});
    b.reference([=] { std::fill(out.host, out.host + 128, 0.0f); });
    b.cost(1, 0);
    auto kernel = [&](int number, const char* what, void (*bug)(float*)) {
        b.kernel(number, what,
                 [=](int) {
                     cudaCheck(cudaMemset(out, 0, 128 * sizeof(float)));
                     bug<<<1, 128, sizeof(SMem) + 1024>>>(out);
                     cudaCheck(cudaGetLastError());
                 },
                 {0});
    };
    kernel(1, "an access to accumulators of a wgmma that has not been waited for", wgmma_kernel1);
    kernel(2, "an access to accumulators of a wgmma that has not been waited for", wgmma_kernel2);
    kernel(3, "an access to accumulators of a wgmma that has not been waited for", wgmma_kernel3);
    kernel(4, "an access to accumulators of a wgmma that has not been waited for", wgmma_kernel4);
    kernel(5, "wgmma without a wgmma_fence() before the first one", wgmma_kernel5);
    kernel(6, "wgmma without wgmma_fence() since an access to its registers", wgmma_kernel6);
    kernel(7, "wgmma without wgmma_fence() since an access to its registers", wgmma_kernel7);
    kernel(8, "an access to an operand in registers of a wgmma that has not been waited for", wgmma_kernel8);
    kernel(9, "a read of accumulators without wgmma_hold() since the wait", wgmma_kernel9);
    kernel(10, "a wgmma in flight reads what is overwritten of dynamic shared memory", wgmma_kernel10);
    kernel(11, "a wgmma reads what an asynchronous copy is still writing", wgmma_kernel11);
    kernel(12, "wgmma without wgmma_fence() since a wgmma of another shape with the same accumulators", wgmma_kernel12);
    kernel(13, "what a thread has written without tma_store_fence()", wgmma_kernel13);
    kernel(14, "an access to an operand in registers of a wgmma that has not been waited for", wgmma_kernel14);
    kernel(15, "right: products in chains, in groups, of two shapes", right_kernel15);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "emulation_wgmma", declare, {1, 1, 8, 1, 8}, {{1, 1, 8}});
}
