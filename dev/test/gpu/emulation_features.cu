/* Kernels for what the ops of dev/cuda use rarely or not at all: named barriers, votes of a block, masks of half a warp,
   grid barriers, blocks that wait for one another, graphs, threads and blocks that end before their cluster's barrier,
   two streams.
   test_emulation.sh demands that they pass under dev/cuda/emulation. */
#include <cooperative_groups.h>

#include "../../llmc/ptx.cuh"
#include "bench.h"

// warp 0 produces, warp 1 consumes
__global__ void feature_kernel1(float* out) {
    __shared__ float x[32];
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        x[lane] = (float)lane;
        named_barrier_arrive(1, 64);
    } else {
        named_barrier_sync(1, 64);
        out[lane] = x[31 - lane] + (float)lane;
    }
    if (threadIdx.x < 32) { out[32 + lane] = 31.0f; }
}

__global__ void feature_kernel2(float* out) {
    int count = __syncthreads_count(threadIdx.x % 4 == 0), any = __syncthreads_or(threadIdx.x == 5);
    int none = __syncthreads_or(threadIdx.x == 64), all = __syncthreads_and(threadIdx.x < 64);
    out[threadIdx.x] = (float)(count + 4 * any + 8 * none + 11 * all); // 16 + 4 + 0 + 11
}

// the two halves of each warp do different things
__global__ void feature_kernel3(float* out) {
    __shared__ float x[64];
    int lane = threadIdx.x % 32;
    x[threadIdx.x] = 1.0f;
    if (lane < 16) {
        __syncwarp(0xFFFFu);
        out[threadIdx.x] = x[threadIdx.x ^ 1] + (float)__reduce_add_sync(0xFFFFu, lane / 8) + 22.0f;
    } else {
        float sum = 1.0f;
        for (int offset = 8; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xFFFF0000u, sum, offset); }
        out[threadIdx.x] = sum + (float)__popc(__match_any_sync(0xFFFF0000u, lane % 2)) + 7.0f;
    }
}

__global__ void feature_kernel4(float* out, float* scratch) {
    if (threadIdx.x == 0) { scratch[blockIdx.x] = 10.0f * (float)blockIdx.x; }
    cooperative_groups::this_grid().sync();
    float sum = 1.0f;
    for (unsigned i = 0; i < gridDim.x; i++) { sum += scratch[i]; }
    if (blockIdx.x == 1) { out[threadIdx.x] = sum; } // 1 + 0 + 10 + 20
}

// each block waits for the next one, so the first one ends last
__global__ void feature_kernel5(float* out, int* turn) {
    if (threadIdx.x == 0) {
        while (load_acquire(turn) != (int)(gridDim.x - 1 - blockIdx.x)) {}
        for (int i = 0; i < 64; i++) { out[i] = blockIdx.x == 0 ? 31.0f : -1.0f; }
        add_release(turn, 1);
    }
}

__global__ void feature_kernel6(float* out, float x) { out[threadIdx.x] += x; }

// A graph of a fill, a launch and a copy. Nothing runs while it is captured, and it keeps the arguments of then.
static void feature_graph(float* out, float* scratch) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStream_t stream;
    float x = 31.0f;
    cudaCheck(cudaStreamCreate(&stream));
    cudaCheck(cudaMemset(out, 0, 64 * sizeof(float)));
    cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaCheck(cudaMemsetAsync(scratch, 0, 64 * sizeof(float), stream));
    feature_kernel6<<<1, 64, 0, stream>>>(scratch, x);
    cudaCheck(cudaMemcpyAsync(out, scratch, 64 * sizeof(float), cudaMemcpyDeviceToDevice, stream));
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    x = -1.0f;
    float before = -1.0f;
    cudaCheck(cudaMemcpy(&before, out, sizeof(before), cudaMemcpyDeviceToHost));
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++) { cudaCheck(cudaGraphLaunch(exec, stream)); }
    if (before != 0.0f) { cudaCheck(cudaMemset(out, 0, 64 * sizeof(float))); } // it ran too early: a wrong result
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaGraphExecDestroy(exec));
    cudaCheck(cudaStreamDestroy(stream));
}

// Thread 0 of each block and all of block 2 have ended when the others meet at the cluster's barrier.
__global__ void feature_kernel7(float* out, int* polled) {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        mbarrier_init(&barrier, 1);
        mbarrier_init_fence();
    }
    cluster_sync();
    if (threadIdx.x == 0 || cluster_rank() == 2) { return; }
    if (threadIdx.x == 1 && cluster_rank() == 1) {
        for (int i = 0; i < 1000; i++) { (void)load_acquire(polled); } // lets block 0 run
        mbarrier_arrive_cluster(&barrier, 0);                          // it must still be there
    }
    cluster_sync();
    if (cluster_rank() != 0) { return; }
    out[threadIdx.x] = 31.0f;
    if (threadIdx.x == 1) { out[0] = 31.0f; }
}

// Two streams. A copy without events on the non-blocking stream sees none, one or two of the launches before and after it, as
// EMULATION_STREAMS says; with events it sees one. A copy from pageable memory has the bytes of the time of the call.
static void feature_streams(float* out, float* scratch) {
    const char* order = getenv("EMULATION_STREAMS");
    float want = !order ? 1.0f : strcmp(order, "early") == 0 ? 0.0f : 2.0f, seen, x = 30.0f;
    float* free_copy = scratch + 32;
    cudaStream_t first, second;
    cudaEvent_t computed, copied;
    cudaCheck(cudaStreamCreate(&first));
    cudaCheck(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreate(&computed));
    cudaCheck(cudaEventCreate(&copied));
    cudaCheck(cudaMemset(scratch, 0, 64 * sizeof(float)));
    feature_kernel6<<<1, 32, 0, first>>>(scratch, 1.0f);
    cudaCheck(cudaMemcpyAsync(free_copy, scratch, 32 * sizeof(float), cudaMemcpyDeviceToDevice, second));
    feature_kernel6<<<1, 32, 0, first>>>(scratch, 1.0f);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(&seen, free_copy, sizeof(seen), cudaMemcpyDeviceToHost));

    cudaCheck(cudaMemset(out, 0, 64 * sizeof(float)));
    for (int i = 0; i < 64; i++) {
        cudaCheck(cudaMemcpyAsync(scratch + i, &x, sizeof(x), cudaMemcpyHostToDevice, first));
    }
    x = -1.0f;
    feature_kernel6<<<1, 64, 0, first>>>(scratch, 1.0f);
    cudaCheck(cudaEventRecord(computed, first));
    cudaCheck(cudaStreamWaitEvent(second, computed, 0));
    cudaCheck(cudaMemcpyAsync(out, scratch, 64 * sizeof(float), cudaMemcpyDeviceToDevice, second));
    cudaCheck(cudaEventRecord(copied, second));
    cudaCheck(cudaStreamWaitEvent(first, copied, 0));
    feature_kernel6<<<1, 64, 0, first>>>(scratch, 1.0f);
    cudaCheck(cudaStreamSynchronize(first)); // so the copy is done, too
    if (seen != want) { cudaCheck(cudaMemset(out, 0, 64 * sizeof(float))); }
    cudaCheck(cudaEventDestroy(computed));
    cudaCheck(cudaEventDestroy(copied));
    cudaCheck(cudaStreamDestroy(first));
    cudaCheck(cudaStreamDestroy(second));
}

// Constants and managed memory; pinned memory, which the host may access; copies that are refused.
__constant__ float terms[2];
__global__ void feature_kernel9(float* out, const float* managed) {
    out[threadIdx.x] = terms[0] + terms[1] + managed[0];
}
static void feature_memory(float* out, float* scratch) {
    float *managed, *pinned, host[2] = {10.0f, 20.0f};
    cudaCheck(cudaMemcpyToSymbol(terms, host, sizeof(terms)));
    cudaCheck(cudaMallocManaged(&managed, sizeof(float)));
    managed[0] = 1.0f;
    feature_kernel9<<<1, 64>>>(out, managed);
    cudaCheck(cudaMallocHost(&pinned, 64 * sizeof(float)));
    cudaCheck(cudaMemcpy(pinned, out, 64 * sizeof(float), cudaMemcpyDeviceToHost));
    cudaError_t refused[] = {cudaMemcpy(scratch, host, sizeof(host), cudaMemcpyDeviceToHost),
                             cudaMemcpy(host, scratch, sizeof(host), cudaMemcpyHostToDevice),
                             cudaMemcpy(scratch, host, sizeof(host), cudaMemcpyDeviceToDevice),
                             cudaMemcpy(pinned, out, 65 * sizeof(float), cudaMemcpyDeviceToHost),
                             cudaMemcpy(scratch + 1, host, (size_t)-4, cudaMemcpyHostToDevice),
                             cudaMemset(host, 0, sizeof(host)),
                             cudaMemsetAsync(pinned, 0, 65 * sizeof(float), NULL),
                             cudaMemcpyToSymbol(terms, host, 3 * sizeof(float)),
                             cudaMemcpyToSymbol(terms, host, 2 * sizeof(float), 4)};
    bool right = pinned[63] == 31.0f;
    for (cudaError_t e : refused) { right = right && e == cudaErrorInvalidValue; }
    (void)cudaGetLastError();
    if (!right) { cudaCheck(cudaMemset(out, 0, 64 * sizeof(float))); }
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(managed));
}

static void declare(Bench& b) {
    Buffer<float> out = b.output<float>("out", 64, {0, 0}), scratch = b.scratch<float>("scratch", 64);
    b.reference([=] { std::fill(out.host, out.host + 64, 31.0f); });
    b.cost(1, 0);
    b.kernel(1, "named barriers", [=](int) { feature_kernel1<<<1, 64>>>(out); }, {0});
    b.kernel(2, "votes of a block", [=](int) { feature_kernel2<<<1, 64>>>(out); }, {0});
    b.kernel(3, "half warps", [=](int) { feature_kernel3<<<1, 64>>>(out); }, {0});
    auto cooperative = [=](int) {
        float *to = out, *sums = scratch;
        void* arguments[] = {&to, &sums};
        cudaCheck(cudaLaunchCooperativeKernel(feature_kernel4, 3, 64, arguments, 0, (cudaStream_t)NULL));
    };
    b.kernel(4, "a grid barrier", cooperative, {0});
    auto polling = [=](int) {
        cudaCheck(cudaMemset(scratch, 0, sizeof(int)));
        feature_kernel5<<<5, 64>>>(out, (int*)(float*)scratch);
    };
    b.kernel(5, "blocks that wait for one another", polling, {0});
    b.kernel(6, "a graph", [=](int) { feature_graph(out, scratch); }, {0});
    auto cluster = [=](int) {
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = 3, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(3), config.blockDim = dim3(64);
        config.attrs = &attribute, config.numAttrs = 1;
        cudaCheck(cudaLaunchKernelEx(&config, feature_kernel7, (float*)out, (int*)(float*)scratch));
    };
    b.kernel(7, "a cluster's barrier after threads and a block have ended", cluster, {0});
    b.kernel(8, "two streams", [=](int) { feature_streams(out, scratch); }, {0});
    b.kernel(9, "kinds of memory", [=](int) { feature_memory(out, scratch); }, {0});
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "emulation_features", declare, {1, 1, 8, 1, 8}, {{1, 1, 8}});
}
