/* Kernels whose memory transactions follow by arithmetic: test_emulation.sh compares what --transactions counts. A comment
   "site N" marks the line whose counts are compared. */
#include "../../llmc/ptx.cuh"
#include "bench.h"

__global__ void site_kernel1(float* out) {
    __shared__ float x[64];
    x[2 * threadIdx.x] = 1.0f; // site 1
    __syncthreads();
    out[threadIdx.x] = x[2 * threadIdx.x];
}
__global__ void site_kernel2(float* out) {
    __shared__ float x[32][32];
    for (int i = 0; i < 32; i++) { x[i][threadIdx.x] = 1.0f; }
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x][3]; // site 2
}
__global__ void site_kernel3(float* out) {
    __shared__ float x[32][33];
    for (int i = 0; i < 32; i++) { x[i][threadIdx.x] = 1.0f; }
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x][3]; // site 3
}
__global__ void site_kernel4(float* out) {
    __shared__ float x[32];
    x[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = x[7]; // site 4
}
__global__ void site_kernel5(float* out) {
    __shared__ float4 x[32];
    x[threadIdx.x] = make_float4(0.0f, 0.25f, 0.25f, 0.5f);
    __syncthreads();
    float4 v = x[31 - threadIdx.x]; // site 5
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
__global__ void site_kernel6(float* out, const float* inp) {
    float4 v = reinterpret_cast<const float4*>(inp)[threadIdx.x]; // site 6
    out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
__global__ void site_kernel7(float* out, const float* inp) {
    const float* p = inp + 2 * threadIdx.x;
    out[threadIdx.x] = 2.0f * (p[0] + p[1]); // site 7
}
// lane i makes i + 1 rounds: the first request has 32 lanes, the last one has 1
__global__ void site_kernel8(float* out, const float* inp) {
    float sum = 0.0f;
    for (int i = 0; i <= threadIdx.x; i++) {
        sum += inp[i]; // site 8
    }
    out[threadIdx.x] = sum / (float)(threadIdx.x + 1) + 0.75f;
}
// an access whose first address is in the middle of a sector
__global__ void site_kernel9(float* out, const float* inp) {
    out[threadIdx.x] = inp[threadIdx.x + 4] + 0.75f; // site 9
}
// half of the lanes leave out the even rounds: the barrier keeps the rounds apart
__global__ void site_kernel10(float* out, const float* inp) {
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        if (threadIdx.x < 16 || i % 2 == 1) {
            sum += inp[i % 2 * 64]; // site 10
        }
        __syncwarp();
    }
    out[threadIdx.x] = threadIdx.x < 16 ? sum : 2.0f * sum;
}
// atomics of one address are served one by one
__global__ void site_kernel11(float* out) {
    __shared__ int sum;
    if (threadIdx.x == 0) { sum = 0; }
    __syncthreads();
    atomicAdd(&sum, 1); // site 11
    __syncthreads();
    out[threadIdx.x] = (float)sum / 32.0f;
}

// rows of 16 bytes, next to one another
__global__ void site_kernel12(float* out, const float* inp) {
    __shared__ alignas(16) float x[32][4];
    cp_async_16(x[threadIdx.x], inp + 4 * threadIdx.x); // site 12
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4(r, x[threadIdx.x]);
    out[threadIdx.x] = 4.0f * __uint_as_float(r[0] & 0xFFFF0000u);
}
// rows of 16 bytes, 128 bytes apart: all in the same four banks
__global__ void site_kernel13(float* out, const float* inp) {
    __shared__ alignas(16) float x[32][32];
    for (int i = 0; i < 4; i++) { x[threadIdx.x][i] = inp[threadIdx.x]; }
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, x[threadIdx.x]); // site 13
    out[threadIdx.x] = 4.0f * __uint_as_float(r[0] & 0xFFFF0000u);
}

static void declare(Bench& b) {
    Buffer<float> inp =
        b.input_filled<float>("inp", 128, [](float* x, size_t n, uint32_t) { std::fill(x, x + n, 0.25f); });
    Buffer<float> out = b.output<float>("out", 32, {0, 0});
    b.reference([=] { std::fill(out.host, out.host + 32, 1.0f); });
    b.cost(1, 0);
    b.kernel(1, "2-way conflict", [=](int) { site_kernel1<<<1, 32>>>(out); }, {0});
    b.kernel(2, "32-way conflict", [=](int) { site_kernel2<<<1, 32>>>(out); }, {0});
    b.kernel(3, "padded", [=](int) { site_kernel3<<<1, 32>>>(out); }, {0});
    b.kernel(4, "broadcast", [=](int) { site_kernel4<<<1, 32>>>(out); }, {0});
    b.kernel(5, "float4, shared", [=](int) { site_kernel5<<<1, 32>>>(out); }, {0});
    b.kernel(6, "float4", [=](int) { site_kernel6<<<1, 32>>>(out, inp); }, {0});
    b.kernel(7, "two floats", [=](int) { site_kernel7<<<1, 32>>>(out, inp); }, {0});
    b.kernel(8, "a triangle", [=](int) { site_kernel8<<<1, 32>>>(out, inp); }, {0});
    b.kernel(9, "not aligned", [=](int) { site_kernel9<<<1, 32>>>(out, inp); }, {0});
    b.kernel(10, "rounds left out", [=](int) { site_kernel10<<<1, 32>>>(out, inp); }, {0});
    b.kernel(11, "atomics", [=](int) { site_kernel11<<<1, 32>>>(out); }, {0});
    b.kernel(12, "cp.async", [=](int) { site_kernel12<<<1, 32>>>(out, inp); }, {0});
    b.kernel(13, "ldmatrix with conflicts", [=](int) { site_kernel13<<<1, 32>>>(out, inp); }, {0});
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "emulation_transactions", declare, {1, 1, 8, 1, 8}, {{1, 1, 8}});
}
