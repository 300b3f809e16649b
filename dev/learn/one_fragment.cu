// one_fragment: what each lane holds of one tensor core product; dev/learn/06_tensor_cores.md explains it
//
// nvcc -O3 -arch=native one_fragment.cu -o one_fragment && ./one_fragment 5 31         with a GPU
// make -f fragment.mk one_fragment_cpu && ./one_fragment_cpu 5 31                      without one, by g++
//
// One warp computes d (16x16) = a (16x16) b (16x16). The elements of a and b are their own numbers, 0 to 255, which
// 16 bits hold exactly, so each element that a lane holds tells where it comes from.
#include <stdio.h>
#include <stdlib.h>

#include "../../llmc/ptx.cuh"

struct Lane {
    float a[8], b[8]; // unpacked from registers a[0..3] and b[0..3], two elements each
    float d[2][4];    // [columns 0-7, columns 8-15]
};

__global__ void one_fragment(Lane* lanes) {               // (32)
    __shared__ __align__(16) floatX a[16][16], b[16][16]; // a[row][k], b[column][k]: k runs along both rows
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) { a[i / 16][i % 16] = b[i / 16][i % 16] = (floatX)(float)i; }
    __syncwarp();

    // each lane passes the address of one row of 8 elements; matrices 0 to 3 are those of lanes 0-7, 8-15, ...
    uint32_t a_bits[4], b_bits[4];
    ldmatrix_x4(a_bits, &a[lane % 16][lane / 16 * 8]);                   // (rows, k): (0, 0) (8, 0) (0, 8) (8, 8)
    ldmatrix_x4(b_bits, &b[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]); // (columns, k): (0, 0) (0, 8) (8, 0) (8, 8)

    float d[2][4] = {};
    mma_16x8x16(d[0], a_bits, b_bits[0], b_bits[1], floatX());
    mma_16x8x16(d[1], a_bits, b_bits[2], b_bits[3], floatX());

    for (int i = 0; i < 4; i++) {
        float2 a2 = unpack_16x2(a_bits[i], floatX()), b2 = unpack_16x2(b_bits[i], floatX());
        lanes[lane].a[2 * i] = a2.x, lanes[lane].a[2 * i + 1] = a2.y;
        lanes[lane].b[2 * i] = b2.x, lanes[lane].b[2 * i + 1] = b2.y;
        lanes[lane].d[0][i] = d[0][i], lanes[lane].d[1][i] = d[1][i];
    }
}

int main(int argc, char** argv) {
    Lane lanes[32], *d_lanes;
    require(compiled_arch(one_fragment) >= 80); // nvcc -arch=sm_80 or more
    cudaCheck(cudaMalloc(&d_lanes, sizeof(lanes)));
    one_fragment<<<1, 32>>>(d_lanes);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaMemcpy(lanes, d_lanes, sizeof(lanes), cudaMemcpyDeviceToHost));
    cudaCheck(cudaFree(d_lanes));

    int num_wrong = 0;
    for (int lane = 0; lane < 32; lane++) { // where d is, by the formula; what it is, by the definition of a product
        for (int i = 0; i < 8; i++) {
            int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = 0.0f;
            for (int k = 0; k < 16; k++) { sum += (float)(16 * row + k) * (float)(16 * column + k); }
            num_wrong += !(lanes[lane].d[i / 4][i % 4] == sum); // sums of whole numbers below 2^24 are exact
        }
    }
    for (int i = 1; i < argc; i++) { // elements as (row, k), (k, column), (row, column)
        int lane = atoi(argv[i]) & 31, g = lane / 4, t = lane % 4;
        printf("lane %d: g = %d, t = %d", lane, g, t);
        for (int j = 0; j < 8; j++) {
            int x = (int)lanes[lane].a[j];
            if (j % 2 == 0) { printf("%s  a[%d]", j == 0 ? "\n" : "", j / 2); }
            printf(" (%2d,%2d)", x / 16, x % 16);
        }
        for (int j = 0; j < 8; j++) {
            int x = (int)lanes[lane].b[j];
            if (j % 2 == 0) { printf("%s  b[%d]", j == 0 ? "\n" : "", j / 2); }
            printf(" (%2d,%2d)", x % 16, x / 16);
        }
        for (int j = 0; j < 4; j++) {
            printf("%s  d[%d] (%2d,%2d) %6.0f", j == 0 ? "\n" : "", j, g + j / 2 * 8, 2 * t + j % 2,
                   lanes[lane].d[0][j]);
        }
        printf("\n");
    }
    printf("%d of 256 results wrong\n", num_wrong);
    return num_wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
