/* planted_bugs: out = 2 * inp, one correct kernel and nine with a planted bug, which dev/cuda/bench.h must find; kernel 10
   is correct, but cannot be recorded in a CUDA graph

   out (n) floatX out | inp (n) floatX in; n = B*T*C
   Bound: memory, 2*n*sizeof(floatX) bytes. Error: none, doubling is exact.

   nvcc -O3 --use_fast_math -I../../cuda planted_bugs.cu -o planted_bugs      (dev/test/gpu/test_dev_cuda.sh builds and runs it)
   ./planted_bugs --check      ok for kernel 1, FAIL for kernels 0 and 2 to 7; the bugs of 8 and 9 show only after many
                               launches                                                                              */
#include "bench.h"

enum Bug {
    NO_BUG,
    ONE_OFF,
    ONE_NAN,
    ONE_UNWRITTEN,
    PAST_THE_END,
    CHANGES_INPUT,
    NOT_INFINITE,
    IDLE_LATER,
    IDLE_LAST,
    WAITS
};

// ---- kernels 1 to 10: one thread per element, the bug is a parameter ---------------------------

__global__ void planted_bugs_kernel(floatX* out, floatX* inp, size_t n, Bug bug) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, victim = n / 2;
    if (i == n && bug == PAST_THE_END) { out[n] = (floatX)0.0f; }
    if (i >= n || (i == victim && bug == ONE_UNWRITTEN)) { return; }
    float x = 2.0f * (float)inp[i];
    if (i == victim && bug == ONE_OFF) { x += 1.0f + fabsf(x); } // more than rounding hides
    if (i == victim && bug == ONE_NAN) { x = nanf(""); }
    if (isinf((float)(floatX)x) && bug == NOT_INFINITE) { x = 5.0f; }
    out[i] = (floatX)x;
    if (i == victim && bug == CHANGES_INPUT) { inp[i] = (floatX)(1.0f + x); }
}

void planted_bugs(floatX* out, floatX* inp, size_t n, Bug bug, cudaStream_t stream, int block_size) {
    static int num_calls[WAITS + 1] = {};
    num_calls[bug]++;
    if ((bug == IDLE_LATER && num_calls[bug] > 5) || (bug == IDLE_LAST && num_calls[bug] > 200)) { return; }
    planted_bugs_kernel<<<ceil_div(n + 1, (size_t)block_size), block_size, 0, stream>>>(out, inp, n, bug);
    cudaCheck(cudaGetLastError());
    if (bug == WAITS) { cudaCheck(cudaStreamSynchronize(stream)); }
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    cudaStream_t stream = b.stream;
    // twice the first ones is infinite
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [=](float* host) { bench_fill_extremes(host, n, 1); });
    Buffer<floatX> out = b.output<floatX>("out", n, {0, 0});
    b.reference([=] {
        for (size_t i = 0; i < n; i++) { out.host[i] = (float)(floatX)(2 * inp.host[i]); }
    });
    b.cost(2.0 * n * sizeof(floatX), 0);
    // kernel 0 must be the vendor's library
    b.kernel(0, "ours", [=](int bs) { planted_bugs(out, inp, n, NO_BUG, stream, bs); }, {64, 1024});
    const char* what[] = {"right",
                          "one element off",
                          "one NaN",
                          "one unwritten",
                          "one past the end",
                          "input changed",
                          "finite instead of infinite",
                          "nothing from the sixth call on",
                          "nothing from call 201 on",
                          "right, but the launcher waits"};
    for (int bug = NO_BUG; bug <= WAITS; bug++) {
        b.kernel(bug + 1, what[bug], [=](int bs) { planted_bugs(out, inp, n, (Bug)bug, stream, bs); }, {64, 1024});
    }
    b.promoted(1);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "planted_bugs", declare, {4, 64, 768, 12, 50257}, {{1, 1, 7}, {3, 17, 776}});
}
