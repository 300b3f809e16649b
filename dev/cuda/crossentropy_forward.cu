/* crossentropy_forward: losses = log(sum(exp(logits))) - logits[target], per row

   losses (N) float out | logits (N,Vp) floatX in, columns V..Vp-1 are not read | targets (N) int in, 0..V-1; N = B*T
   The input is logits because probabilities rounded to 16 bits would leave only 2 or 3 correct digits in the losses.
   Bound: memory, N*Vp*sizeof(floatX) bytes. Constraint: Vp % 8 == 0, 1 <= V <= Vp.
   Error: 1e-6 relative.
   Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
   For study only: the trainer computes the losses in fused_classifier.

   Kernels (this list is written by versions.sh):
     1  one thread per row
     2  one block per row, two passes
     3  online softmax: one pass, 128-bit vectors
     4  3 with four vectors per thread in flight

   nvcc -O3 --use_fast_math crossentropy_forward.cu -o crossentropy_forward      (or: make crossentropy_forward)
   ./crossentropy_forward 3      check kernel 3 against the CPU and sweep its block sizes
   ./crossentropy_forward        every kernel, side by side                                         */
#include "bench.h"

// ---- kernel 1: one thread per row ----------------------------------------------------------------

__global__ void crossentropy_forward_kernel1(float* losses, const floatX* logits, const int* targets, int N, int V,
                                             int Vp) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const floatX* x = logits + (size_t)n * Vp;
    float max = -INFINITY;
    double sum = 0.0; // a float would lose digits, because one thread adds up the whole vocabulary
    for (int c = 0; c < V; c++) { max = fmaxf(max, (float)x[c]); }
    for (int c = 0; c < V; c++) { sum += __expf((float)x[c] - max); }
    // log1pf because sum >= 1 may be close to 1, where logf() under --use_fast_math has an absolute error of 4e-7
    losses[n] = log1pf((float)(sum - 1.0)) + (max - (float)x[targets[n]]);
}

void crossentropy_forward1(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                           cudaStream_t stream, int block_size) {
    crossentropy_forward_kernel1<<<ceil_div(N, block_size), block_size, 0, stream>>>(losses, logits, targets, N, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one block per row, two passes -----------------------------------------------------

__global__ void __launch_bounds__(1024)
    crossentropy_forward_kernel2(float* losses, const floatX* logits, const int* targets, int V, int Vp) {
    __shared__ float shared[32];
    const floatX* x = logits + (size_t)blockIdx.x * Vp;
    float max = -INFINITY, sum = 0.0f;
    for (int c = threadIdx.x; c < V; c += blockDim.x) { max = fmaxf(max, (float)x[c]); }
    max = block_max(max, shared);
    for (int c = threadIdx.x; c < V; c += blockDim.x) { sum += __expf((float)x[c] - max); }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - (float)x[targets[blockIdx.x]]); }
}

void crossentropy_forward2(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                           cudaStream_t stream, int block_size) {
    crossentropy_forward_kernel2<<<N, block_size, 0, stream>>>(losses, logits, targets, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: online softmax over 128-bit vectors; one pass, the sum is rescaled when the maximum grows ----

// Online softmax state: running maximum and sum of exp(x - max).
struct CrossentropySums {
    float max, sum;
};

__device__ inline void crossentropy_add(CrossentropySums& s, const x128& x) {
    float max = s.max;
    for (int k = 0; k < x128::size; k++) { max = fmaxf(max, (float)x[k]); }
    s.sum *= __expf(s.max - max);
    for (int k = 0; k < x128::size; k++) { s.sum += __expf((float)x[k] - max); }
    s.max = max;
}

// Returns a thread's initial state. The columns after the last whole vector are split one per thread, from thread 0 on.
__device__ inline CrossentropySums crossentropy_begin(const floatX* x, int V) {
    int c = V / x128::size * x128::size + threadIdx.x;
    if (c >= V) { return {-INFINITY, 0.0f}; }
    return {(float)x[c], 1.0f};
}

// Combines the states of the block's threads and writes the loss. correct: the target's logit; shared (32) is scratch.
__device__ inline void crossentropy_finish(float* loss, const CrossentropySums& s, float correct, float* shared) {
    float max = block_max(s.max, shared);
    float sum = block_sum(s.sum * __expf(s.max - max), shared);
    if (threadIdx.x == 0) { *loss = log1pf(sum - 1.0f) + (max - correct); }
}

__global__ void __launch_bounds__(1024)
    crossentropy_forward_kernel3(float* losses, const floatX* logits, const int* targets, int V, int Vp) {
    __shared__ float shared[32];
    const floatX* x = logits + (size_t)blockIdx.x * Vp;
    float correct = (float)x[targets[blockIdx.x]]; // loaded early to hide its latency
    CrossentropySums s = crossentropy_begin(x, V);
    for (int i = threadIdx.x; i < V / x128::size; i += blockDim.x) { crossentropy_add(s, load128(x + i * x128::size)); }
    crossentropy_finish(&losses[blockIdx.x], s, correct, shared);
}

void crossentropy_forward3(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                           cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0);
    crossentropy_forward_kernel3<<<N, block_size, 0, stream>>>(losses, logits, targets, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: kernel 3 with four vectors per thread in flight ----

__global__ void __launch_bounds__(1024)
    crossentropy_forward_kernel4(float* losses, const floatX* logits, const int* targets, int V, int Vp) {
    __shared__ float shared[32];
    const floatX* x = logits + (size_t)blockIdx.x * Vp;
    float correct = (float)x[targets[blockIdx.x]];
    CrossentropySums s = crossentropy_begin(x, V);
    int num_vectors = V / x128::size, block = blockDim.x, i = threadIdx.x;
    for (; i + 3 * block < num_vectors; i += 4 * block) {
        int4 bits[4]; // not converted yet: as floats, 16-bit elements would take twice the registers
        for (int j = 0; j < 4; j++) { bits[j] = vec128_bits(load128(x + (i + j * block) * x128::size)); }
        for (int j = 0; j < 4; j++) { crossentropy_add(s, vec128_from_bits<floatX>(bits[j])); }
    }
    for (; i < num_vectors; i += block) { crossentropy_add(s, load128(x + i * x128::size)); }
    crossentropy_finish(&losses[blockIdx.x], s, correct, shared);
}

void crossentropy_forward4(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                           cudaStream_t stream, int block_size) {
    require(Vp % 8 == 0);
    crossentropy_forward_kernel4<<<N, block_size, 0, stream>>>(losses, logits, targets, V, Vp);
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    b.varies("BTV");
    int N = b.B * b.T, V = b.V, Vp = ceil_div(V, 128) * 128;
    // exp of the large ones overflows unless the maximum is subtracted first
    const float scales[] = {3.0f, 60.0f, 1e-3f, 3.0f};
    int which = b.cases({"normal", "logits of some 100", "almost equal logits", "one logit far above the others"});
    Buffer<floatX> logits = b.input_from<floatX>("logits", (size_t)N * Vp, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, (size_t)N * Vp, seed, scales[which], 0.0f);
        for (size_t n = 0; which == 3 && n < (size_t)N; n++) { x[n * Vp + bench_random(n, seed) % V] = 120.0f; }
    });
    Buffer<int> targets = b.input_ids("targets", N, V);
    Buffer<float> losses = b.output<float>("losses", N, {1e-6f, 1e-6f});
    b.reference([=] { crossentropy_forward_cpu(losses.host, logits.host, targets.host, N, V, Vp); });
    b.cost((double)N * Vp * sizeof(floatX), 0);
    b.reads_only();
    cudaStream_t stream = b.stream;
    std::vector<int> sizes = {128, 256, 512, 1024};
    b.kernel(1, "one thread per row",
             [=](int bs) { crossentropy_forward1(losses, logits, targets, N, V, Vp, stream, bs); }, {32, 64});
    b.kernel(
        2, "one block per row, two passes",
        [=](int bs) { crossentropy_forward2(losses, logits, targets, N, V, Vp, stream, bs); }, sizes);
    b.kernel(
        3, "online softmax: one pass, 128-bit vectors",
        [=](int bs) { crossentropy_forward3(losses, logits, targets, N, V, Vp, stream, bs); }, sizes);
    b.kernel(
        4, "3 with four vectors per thread in flight",
        [=](int bs) { crossentropy_forward4(losses, logits, targets, N, V, Vp, stream, bs); }, sizes);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "crossentropy_forward", declare, {8, 1024, 768, 12, 50257},
                      {{1, 1, 0, 0, 1}, {1, 3, 0, 0, 11}, {2, 5, 0, 0, 1000}, {1, 7, 0, 0, 50257}});
}
