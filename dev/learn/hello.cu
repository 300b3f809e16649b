// hello: a whole CUDA program, out = 2 * inp; dev/learn/01_first_kernel.md reads it line by line
//
// nvcc -O3 hello.cu -o hello && ./hello      with a GPU
// make hello_cpu && ./hello_cpu              without one, by g++ (dev/cuda/emulation); its time means nothing
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

static void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) { return; }
    fprintf(stderr, "error: %s: %s\n", what, cudaGetErrorString(error));
    exit(EXIT_FAILURE);
}

__global__ void twice(float* out, const float* inp, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = 2.0f * inp[i]; }
}

int main() {
    const int n = 10000000, block_size = 256, num_blocks = (n + block_size - 1) / block_size;
    const size_t bytes = n * sizeof(float);
    float *inp = (float*)malloc(bytes), *out = (float*)malloc(bytes), *d_inp, *d_out; // d_: on the device
    for (int i = 0; i < n; i++) { inp[i] = (float)i; }
    check(cudaMalloc(&d_inp, bytes), "cudaMalloc");
    check(cudaMalloc(&d_out, bytes), "cudaMalloc");
    check(cudaMemcpy(d_inp, inp, bytes, cudaMemcpyHostToDevice), "copy to the device");

    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    twice<<<num_blocks, block_size>>>(d_out, d_inp, n); // warm-up: the first launch also loads the kernel
    check(cudaEventRecord(begin), "cudaEventRecord");
    twice<<<num_blocks, block_size>>>(d_out, d_inp, n);
    check(cudaGetLastError(), "launch"); // could the kernel be started?
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaDeviceSynchronize(), "kernel"); // did it run to its end?
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");

    check(cudaMemcpy(out, d_out, bytes, cudaMemcpyDeviceToHost), "copy from the device");
    int num_wrong = 0;
    for (int i = 0; i < n; i++) { num_wrong += out[i] != 2.0f * inp[i]; }
    printf("%d blocks of %d threads, %d of %d elements wrong\n", num_blocks, block_size, num_wrong, n);
    printf("%.4f ms, %.1f GB/s\n", ms, 2e-6 * bytes / ms);

    cudaEventDestroy(begin), cudaEventDestroy(end);
    cudaFree(d_inp), cudaFree(d_out);
    free(inp), free(out);
    return num_wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
