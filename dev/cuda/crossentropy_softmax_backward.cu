/* crossentropy_softmax_backward: dlogits = (probs - onehot(target)) * dloss, per row

   dlogits (N,Vp) floatX out, columns V..Vp-1 are set to 0 | probs (N,Vp) floatX in, columns V..Vp-1 are not used
   targets (N) int in, 0..V-1 | dloss (1) float in; N = B*T
   Bound: memory, 2*N*Vp*sizeof(floatX) bytes. Constraint: Vp % 8 == 0, 1 <= V <= Vp.
   Error: one ulp of floatX.
   For study only: the trainer computes this gradient in fused_classifier, which needs no probs.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  one block per row
     3  one 128-bit vector per thread

   nvcc -O3 --use_fast_math crossentropy_softmax_backward.cu -o crossentropy_softmax_backward
   ./crossentropy_softmax_backward 3      check kernel 3 against the CPU and sweep its block sizes
   ./crossentropy_softmax_backward        every kernel, side by side                                */
#include "bench.h"

// ---- kernel 1: one thread per element, which divides by Vp to find its row --------------------------------

__global__ void crossentropy_softmax_backward_kernel1(floatX* dlogits, const floatX* probs, const int* targets,
                                                      const float* dloss, int N, int V, int Vp) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * Vp) { return; }
    int n = (int)(i / Vp), c = (int)(i % Vp);
    float p = c < V ? (float)probs[i] : 0.0f;
    dlogits[i] = (floatX)((p - (c == targets[n])) * *dloss);
}

void crossentropy_softmax_backward1(floatX* dlogits, const floatX* probs, const int* targets, const float* dloss, int N,
                                    int V, int Vp, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div((size_t)N * Vp, (size_t)block_size);
    crossentropy_softmax_backward_kernel1<<<num_blocks, block_size, 0, stream>>>(dlogits, probs, targets, dloss, N, V,
                                                                                 Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one block per row, so no division, and each thread reads the target once ---------------------------

__global__ void __launch_bounds__(1024)
    crossentropy_softmax_backward_kernel2(floatX* dlogits, const floatX* probs, const int* targets, const float* dloss,
                                          int V, int Vp) {
    size_t row = (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float scale = *dloss;
    for (int c = threadIdx.x; c < Vp; c += blockDim.x) {
        float p = c < V ? (float)probs[row + c] : 0.0f;
        dlogits[row + c] = (floatX)((p - (c == target)) * scale);
    }
}

void crossentropy_softmax_backward2(floatX* dlogits, const floatX* probs, const int* targets, const float* dloss, int N,
                                    int V, int Vp, cudaStream_t stream, int block_size) {
    crossentropy_softmax_backward_kernel2<<<N, block_size, 0, stream>>>(dlogits, probs, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: one 128-bit vector per thread, so all loads of a row are in flight at once; blockIdx.y is the row ----

__global__ void __launch_bounds__(1024)
    crossentropy_softmax_backward_kernel3(floatX* dlogits, const floatX* probs, const int* targets, const float* dloss,
                                          int V, int Vp) {
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (c >= Vp) { return; }
    size_t i = (size_t)blockIdx.y * Vp + c;
    int target = targets[blockIdx.y];
    float scale = *dloss;
    x128 p = load128(probs + i), gradient;
    for (int k = 0; k < x128::size; k++) {
        float x = c + k < V ? (float)p[k] : 0.0f;
        gradient[k] = (floatX)((x - (c + k == target)) * scale);
    }
    store128(dlogits + i, gradient);
}

void crossentropy_softmax_backward3(floatX* dlogits, const floatX* probs, const int* targets, const float* dloss, int N,
                                    int V, int Vp, cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0 && N <= 65535); // 65535: the limit of gridDim.y
    dim3 grid(ceil_div(Vp / (int)x128::size, block_size), N);
    crossentropy_softmax_backward_kernel3<<<grid, block_size, 0, stream>>>(dlogits, probs, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    b.varies("BTV");
    int N = b.B * b.T, V = b.V, Vp = ceil_div(V, 128) * 128;
    float dloss_value = 1024.0f; // a loss scale: without it most gradients would underflow in 16 bits
    // random values of the size of probabilities; the padding columns have them too, because they must not matter
    bool certain = b.cases({"normal", "probabilities of 0 and 1"}) == 1;
    Buffer<int> targets = b.input_ids("targets", N, V);
    Buffer<floatX> probs = b.input_from<floatX>("probs", (size_t)N * Vp, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, (size_t)N * Vp, seed, 0.25f / V, 1.0f / V);
        for (size_t n = 0; certain && n < (size_t)N; n++) { // every second row is certain of its target
            std::fill(x + n * Vp, x + n * Vp + V, 0.0f);
            x[n * Vp + (n % 2 ? (size_t)targets.host[n] : bench_random(n, seed) % V)] = 1.0f;
        }
    });
    Buffer<float> dloss = b.input_from<float>("dloss", 1, [=](float* x) { *x = dloss_value; });
    Buffer<floatX> dlogits = b.output<floatX>("dlogits", (size_t)N * Vp, ulps<floatX>(1));
    b.reference(
        [=] { crossentropy_softmax_backward_cpu(dlogits.host, probs.host, targets.host, dloss_value, N, V, Vp); });
    b.cost(2.0 * N * Vp * sizeof(floatX), 0);
    cudaStream_t stream = b.stream;
    b.kernel(1, "one thread per element",
             [=](int bs) { crossentropy_softmax_backward1(dlogits, probs, targets, dloss, N, V, Vp, stream, bs); });
    b.kernel(2, "one block per row",
             [=](int bs) { crossentropy_softmax_backward2(dlogits, probs, targets, dloss, N, V, Vp, stream, bs); });
    b.kernel(3, "one 128-bit vector per thread",
             [=](int bs) { crossentropy_softmax_backward3(dlogits, probs, targets, dloss, N, V, Vp, stream, bs); });
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "crossentropy_softmax_backward", declare, {8, 1024, 768, 12, 50257},
                      {{1, 1, 0, 0, 1}, {1, 3, 0, 0, 11}, {2, 5, 0, 0, 1000}, {1, 7, 0, 0, 50257}});
}
