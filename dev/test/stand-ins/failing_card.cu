/*
Makes a GPU fail, for test_card.sh. A program that was linked with -cudart shared takes it by LD_PRELOAD:

    nvcc -arch=native -shared -Xcompiler -fPIC -cudart shared dev/test/stand-ins/failing_card.cu -o failing_card.so -ldl
    FAILING_CARD=launch:20 LD_PRELOAD=./failing_card.so ./train_gpt2cu -i ...

FAILING_CARD         launch:N: before the N-th launch of a kernel, a kernel that traps is put on the same stream; if the
                     stream is being captured, into the graph. From then on the program has lost its card.
                     malloc:N: the N-th cudaMalloc asks for more memory than any card has
FAILING_CARD_COUNT   file to which, at exit, `launches N` and `allocations N` are written
*/
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__global__ void trap_kernel() { __trap(); }

static int launches, allocations;
static bool own; // whether the launch is that of trap_kernel

static bool due(const char* event, int count) {
    const char* wanted = getenv("FAILING_CARD");
    size_t n = strlen(event);
    return wanted && strncmp(wanted, event, n) == 0 && wanted[n] == ':' && atoi(wanted + n + 1) == count;
}

static void before_launch(cudaStream_t stream) {
    if (own || !due("launch", ++launches)) { return; }
    own = true;
    trap_kernel<<<1, 1, 0, stream>>>();
    own = false;
}

// The function of this name in the CUDA runtime.
static void* next(const char* name) {
    void* f = dlsym(RTLD_NEXT, name);
    if (!f) {
        fprintf(stderr, "failing_card: no %s: link the program with -cudart shared\n", name);
        abort();
    }
    return f;
}

extern "C" {

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
    static auto real = (cudaError_t(*)(const void*, dim3, dim3, void**, size_t, cudaStream_t))next("cudaLaunchKernel");
    before_launch(stream);
    return real(kernel, grid, block, arguments, shared, stream);
}

// what <<<>>> calls since CUDA 13
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
    static auto real =
        (cudaError_t(*)(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t))next("__cudaLaunchKernel");
    before_launch(stream);
    return real(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
    static auto real = (cudaError_t(*)(const cudaLaunchConfig_t*, const void*, void**))next("cudaLaunchKernelExC");
    before_launch(config->stream);
    return real(config, kernel, arguments);
}

// the name is set for the linker alone, because nvcc has a cudaMalloc of its own for device code
cudaError_t failing_malloc(void** memory, size_t bytes) __asm__("cudaMalloc");
cudaError_t failing_malloc(void** memory, size_t bytes) {
    static auto real = (cudaError_t(*)(void**, size_t))next("cudaMalloc");
    return real(memory, due("malloc", ++allocations) ? (size_t)1 << 60 : bytes);
}

__attribute__((destructor)) static void write_counts() {
    const char* path = getenv("FAILING_CARD_COUNT");
    bool used = launches + allocations > 0; // false in a process without CUDA that loads this library, such as timeout
    FILE* f = path && used ? fopen(path, "w") : NULL;
    if (!f) { return; }
    fprintf(f, "launches %d\nallocations %d\n", launches, allocations);
    fclose(f);
}
}
