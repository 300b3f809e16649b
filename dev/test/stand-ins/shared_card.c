/*
Lets several ranks share the GPUs of a machine, each believing that it has its own, for test_ranks_on_a_gpu.sh: rank r gets
GPU r, modulo their number. A program that was linked with -cudart shared takes it by LD_PRELOAD:

    nvcc -shared -Xcompiler -fPIC -cudart shared dev/test/stand-ins/shared_card.c -o shared_card.so -ldl
    SHARED_CARD=2 LD_PRELOAD=./shared_card.so ./train_gpt2cu --gpus 2 -i ...

NCCL refuses two ranks on a GPU of one host (init.cc, "Duplicate GPU detected"). So each rank gets a host of its own by
NCCL_HOSTID, and the ranks exchange their data over sockets: right, but slow, because the GPU runs the kernels of one process
at a time, and those of a collective wait for those of the other ranks.

SHARED_CARD             the number of GPUs that cudaGetDeviceCount() reports, if there are fewer
SHARED_CARD_HOSTS       0: all ranks are on the same host, and each has a GPU
SHARED_CARD_SLOW_MS     milliseconds that each launch of a graph takes, for tests that do something in the meantime
*/
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int setting(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text && text[0] ? atoi(text) : otherwise;
}

// The function of this name in the CUDA runtime.
static void* next(const char* name) {
    void* f = dlsym(RTLD_NEXT, name);
    if (!f) {
        fprintf(stderr, "shared_card: no %s: link the program with -cudart shared\n", name);
        abort();
    }
    return f;
}

cudaError_t cudaGetDeviceCount(int* count) {
    cudaError_t (*real)(int*);
    *(void**)&real = next("cudaGetDeviceCount");
    cudaError_t error = real(count);
    if (error == cudaSuccess && *count > 0 && *count < setting("SHARED_CARD", 1)) {
        *count = setting("SHARED_CARD", 1);
    }
    return error;
}

cudaError_t cudaSetDevice(int device) {
    cudaError_t (*real)(int);
    cudaError_t (*get_count)(int*);
    *(void**)&real = next("cudaSetDevice");
    *(void**)&get_count = next("cudaGetDeviceCount");
    int count = 0;
    cudaError_t error = get_count(&count);
    if (error != cudaSuccess) { return error; }
    return real(device < setting("SHARED_CARD", 1) ? device % count : device);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    cudaError_t (*real)(cudaGraphExec_t, cudaStream_t);
    *(void**)&real = next("cudaGraphLaunch");
    usleep(1000 * (useconds_t)setting("SHARED_CARD_SLOW_MS", 0));
    return real(graph, stream);
}

__attribute__((constructor)) static void name_host(void) {
    const char* rank = getenv("LLMC_RANK");
    char name[32];
    if (!rank || !setting("SHARED_CARD_HOSTS", 1)) { return; }
    snprintf(name, sizeof(name), "rank%s", rank);
    setenv("NCCL_HOSTID", name, 1);
}
