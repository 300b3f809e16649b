/*
Fills the memory of a GPU, for test_card.sh: takes all of it but MB megabytes, prints `filled`, and holds it until its
standard input ends.

    nvcc dev/test/stand-ins/fill_card.cu -o fill_card
    ./fill_card 600
*/
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
    size_t leave = (size_t)(argc > 1 ? atoi(argv[1]) : 0) << 20, free_bytes = 0, all_bytes = 0;
    for (size_t chunk = (size_t)1 << 32; chunk >= (size_t)1 << 20; chunk /= 2) {
        void* memory;
        for (;;) {
            if (cudaMemGetInfo(&free_bytes, &all_bytes) != cudaSuccess) { return 1; }
            if (free_bytes < leave + chunk || cudaMalloc(&memory, chunk) != cudaSuccess) { break; }
        }
        cudaGetLastError(); // clears the error of a chunk that does not fit
    }
    printf("filled: %zu MB of %zu are free\n", free_bytes >> 20, all_bytes >> 20);
    fflush(stdout);
    while (getchar() != EOF) {}
    return 0;
}
