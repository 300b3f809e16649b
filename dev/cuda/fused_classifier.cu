/* fused_classifier: loss = log(sum(exp(logits))) - logits[target] per row; the gradient overwrites the logits in place:
   logits = (softmax(logits) - onehot(target)) * dloss. mean_loss: mean += sum(losses) * scale

   logits (N,Vp) floatX inout, columns V..Vp-1 are not read and are set to 0 | losses (N) float out
   targets (N) int in, 0..V-1 | dloss (1) float in, or NULL: only the losses are computed, logits are not changed
   Bound: memory, 2*N*Vp*sizeof(floatX) bytes. On an H200 the 2 exponentials per element take half as long as the memory
   traffic.
   Constraint: Vp % 8 == 0, 1 <= V <= Vp.
   Error of losses: 1e-6 relative. Error of gradients: one ulp in 16 bits; 16 ulps in fp32, because exp(x) amplifies the
   rounding error of x. At the target's column, p - 1 adds up to 4 fp32 ulps of dloss.
   If a row holds a NaN or an infinity, its loss and all of its gradients are NaN.
   Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).

   Kernels (this list is written by versions.sh):
     1  one block per row, three passes
     2  online softmax: two passes
     3  128-bit vectors
     4  row read once, kept in registers (slower than 3)
     5  row read once, kept in shared memory
     6  row read twice, the second time backwards (slower than 5)
     7  row read once by cp.async, summed as it arrives (promoted)
     8  persistent, bulk copies prefetch the next row (slower than 7)

   nvcc -O3 --use_fast_math fused_classifier.cu -o fused_classifier      (or: make fused_classifier)
   ./fused_classifier 7      check kernel 7 against the CPU and sweep its block sizes
   ./fused_classifier        every kernel, side by side                                         */
#include "../../llmc/ptx.cuh"
#include "bench.h"

// ---- kernel 1: one block per row, three passes: maximum, sum, gradient ----

__global__ void __launch_bounds__(1024)
    fused_classifier_kernel1(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    __shared__ float shared[32];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float correct = (float)row[target];
    float max = -INFINITY, sum = 0.0f;
    for (int c = threadIdx.x; c < V; c += blockDim.x) { max = fmaxf(max, (float)row[c]); }
    max = block_max(max, shared);
    for (int c = threadIdx.x; c < V; c += blockDim.x) { sum += __expf((float)row[c] - max); }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - correct); }
    float scale = 1.0f / sum;
    for (int c = threadIdx.x; c < Vp; c += blockDim.x) {
        float p = c < V ? __expf((float)row[c] - max) * scale : 0.0f;
        row[c] = (floatX)((p - (c == target)) * *dloss);
    }
}

void fused_classifier1(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    fused_classifier_kernel1<<<N, block_size, 0, stream>>>(logits, losses, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: online softmax; maximum and sum in one pass, the sum is rescaled when the maximum grows ----

__global__ void __launch_bounds__(1024)
    fused_classifier_kernel2(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    __shared__ float shared[32];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    float correct = (float)row[target];
    float thread_max = -INFINITY, sum = 0.0f;
    for (int c = threadIdx.x; c < V; c += blockDim.x) {
        float x = (float)row[c];
        if (x > thread_max) {
            sum *= __expf(thread_max - x);
            thread_max = x;
        }
        sum += __expf(x - thread_max);
    }
    float max = block_max(thread_max, shared);
    sum = block_sum(sum * __expf(thread_max - max), shared);
    if (threadIdx.x == 0) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - correct); }
    float scale = 1.0f / sum;
    for (int c = threadIdx.x; c < Vp; c += blockDim.x) {
        float p = c < V ? __expf((float)row[c] - max) * scale : 0.0f;
        row[c] = (floatX)((p - (c == target)) * *dloss);
    }
}

void fused_classifier2(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    fused_classifier_kernel2<<<N, block_size, 0, stream>>>(logits, losses, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: 128-bit vectors; the row is read twice, both times from its start ----

#include "fused_classifier.cuh" // kernels 6 and 7, and what they share with kernels 3 to 8

// The end of kernels 3 to 5 and 8: writes the gradient of the tail (columns after the last whole vector), zeros from V
// on, the target's gradient and the loss. x_tail: this thread's logit in the tail; correct: the target's logit.
__device__ inline void classifier_rest(floatX* row, float* losses, float dloss, float max, float sum, float x_tail,
                                       float correct, int target, int n, int V, int Vp) {
    int tail = V / x128::size * x128::size;
    float scale = dloss / sum;
    for (int c = tail + threadIdx.x; c < Vp; c += blockDim.x) {
        row[c] = (floatX)(c < V ? __expf(x_tail - max) * scale : 0.0f);
    }
    if ((int)threadIdx.x == fused_classifier_owner(target, tail)) {
        row[target] = (floatX)(__expf(correct - max) * scale - dloss);
        losses[n] = log1pf(sum - 1.0f) + (max - correct);
    }
}

__global__ void __launch_bounds__(1024)
    fused_classifier_kernel3(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    __shared__ float shared[32];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size, tail = num_vectors * x128::size, target = targets[blockIdx.x];
    float correct = (float)row[target], x_tail = 0.0f, max, sum;
    FusedClassifierSums s = {-INFINITY, 0.0f, INFINITY};
    if (tail + (int)threadIdx.x < V) {
        x_tail = (float)row[tail + threadIdx.x];
        s = {x_tail, 1.0f, x_tail};
    }
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        fused_classifier_add(s, load128(row + i * x128::size));
    }
    fused_classifier_reduce(&max, &sum, s, shared);
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        x128 x = load128(row + i * x128::size);
        store128(row + i * x128::size, fused_classifier_gradient(x, max, *dloss / sum));
    }
    classifier_rest(row, losses, *dloss, max, sum, x_tail, correct, target, blockIdx.x, V, Vp);
}

void fused_classifier3(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    fused_classifier_kernel3<<<N, block_size, 0, stream>>>(logits, losses, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: the row is read once; the block's threads hold it in registers ----

template <int vectors_per_thread, int threads> __global__ void __launch_bounds__(threads)
    fused_classifier_kernel4(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    __shared__ float shared[32];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size, tail = num_vectors * x128::size, target = targets[blockIdx.x];
    int4 x[vectors_per_thread];
    for (int j = 0; j < vectors_per_thread; j++) {
        int i = j * blockDim.x + threadIdx.x;
        if (i < num_vectors) { x[j] = vec128_bits(load128(row + i * x128::size)); }
    }
    float correct = (float)row[target], x_tail = 0.0f, max, sum;
    FusedClassifierSums s = {-INFINITY, 0.0f, INFINITY};
    if (tail + (int)threadIdx.x < V) {
        x_tail = (float)row[tail + threadIdx.x];
        s = {x_tail, 1.0f, x_tail};
    }
    for (int j = 0; j < vectors_per_thread; j++) {
        int i = j * blockDim.x + threadIdx.x;
        if (i < num_vectors) { fused_classifier_add(s, vec128_from_bits<floatX>(x[j])); }
    }
    fused_classifier_reduce(&max, &sum, s, shared);
    for (int j = 0; j < vectors_per_thread; j++) {
        int i = j * blockDim.x + threadIdx.x;
        if (i >= num_vectors) { continue; }
        store128(row + i * x128::size, fused_classifier_gradient(vec128_from_bits<floatX>(x[j]), max, *dloss / sum));
    }
    classifier_rest(row, losses, *dloss, max, sum, x_tail, correct, target, blockIdx.x, V, Vp);
}

// vectors per thread of 512: GPT-2's 50257 logits per row take 52 registers per thread in 16 bits, 100 in fp32
constexpr int KERNEL4_VECTORS = sizeof(floatX) == 4 ? 25 : 13;

void fused_classifier4(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    require(V / x128::size <= KERNEL4_VECTORS * 512 && (block_size == 256 || block_size == 512));
    auto kernel = block_size == 512 ? fused_classifier_kernel4<KERNEL4_VECTORS, 512>
                                    : fused_classifier_kernel4<2 * KERNEL4_VECTORS, 256>;
    kernel<<<N, block_size, 0, stream>>>(logits, losses, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: the row is read once, through registers into shared memory; an SM holds two rows ----

// Dynamic shared memory: the row's V / x128::size vectors, then 32 floats of reduction scratch.
__global__ void __launch_bounds__(1024)
    fused_classifier_kernel5(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    extern __shared__ __align__(128) int4 fused_classifier_row[];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size, tail = num_vectors * x128::size, target = targets[blockIdx.x];
    float* shared = reinterpret_cast<float*>(fused_classifier_row + num_vectors);
    float correct = (float)row[target], x_tail = 0.0f, max, sum;
    FusedClassifierSums s = {-INFINITY, 0.0f, INFINITY};
    if (tail + (int)threadIdx.x < V) {
        x_tail = (float)row[tail + threadIdx.x];
        s = {x_tail, 1.0f, x_tail};
    }
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        x128 x = load128(row + i * x128::size);
        fused_classifier_row[i] = vec128_bits(x);
        fused_classifier_add(s, x);
    }
    fused_classifier_reduce(&max, &sum, s, shared);
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        x128 x = vec128_from_bits<floatX>(fused_classifier_row[i]);
        store128(row + i * x128::size, fused_classifier_gradient(x, max, *dloss / sum));
    }
    classifier_rest(row, losses, *dloss, max, sum, x_tail, correct, target, blockIdx.x, V, Vp);
}

void fused_classifier5(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    int shared = V / x128::size * (int)sizeof(x128) + 32 * (int)sizeof(float);
    cudaCheck(cudaFuncSetAttribute(fused_classifier_kernel5, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaCheck(cudaFuncSetAttribute(fused_classifier_kernel5, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared));
    fused_classifier_kernel5<<<N, block_size, shared, stream>>>(logits, losses, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

void fused_classifier6(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    fused_classifier_kernel6<<<N, block_size, 0, stream>>>(logits, losses, targets, dloss, V, Vp);
    cudaCheck(cudaGetLastError());
}

void fused_classifier7(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    fused_classifier(logits, losses, targets, dloss, N, V, Vp, {stream, block_size});
}

// ---- kernel 8: persistent blocks with two rows in shared memory; bulk copies prefetch the next row ----

// Dynamic shared memory: two rows of ceil(V / x128::size) vectors, then this struct.
struct ClassifierTail8 {
    uint64_t barriers[2][4]; // [row buffer][quarter of the row]: full barriers; all threads wait for the copies
    float reduce[32];        // scratch of the block reductions
};
static_assert(sizeof(ClassifierTail8) == 64 + 128, "8 barriers and 32 floats");

// Starts the copy of a row, in four parts of `part` vectors, one barrier each. Called by one thread.
__device__ inline void classifier_fetch_row(int4* buffer, const floatX* row, uint64_t* barriers, int num_vectors,
                                            int part) {
    for (int j = 0; j < 4; j++) {
        int begin = min(j * part, num_vectors), end = min((j + 1) * part, num_vectors);
        int bytes = (end - begin) * (int)sizeof(int4);
        mbarrier_arrive_expect(&barriers[j], bytes);
        if (bytes > 0) { bulk_load(buffer + begin, row + begin * x128::size, bytes, &barriers[j]); }
    }
}

__global__ void __launch_bounds__(1024) fused_classifier_sm90_kernel8(floatX* logits, float* losses, const int* targets,
                                                                      const float* dloss_, int N, int V, int Vp) {
    extern __shared__ __align__(128) int4 fused_classifier_row[];
    int num_vectors = V / x128::size, tail = num_vectors * x128::size;
    int num_copied = ceil_div(V, x128::size), part = ceil_div(num_copied, 4); // the vector with the tail is copied too
    ClassifierTail8* rest = reinterpret_cast<ClassifierTail8*>(fused_classifier_row + 2 * num_copied);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 8; i++) { mbarrier_init(&rest->barriers[i / 4][i % 4], 1); }
        mbarrier_init_fence();
        for (int i = 0; i < 2; i++) {
            int n = blockIdx.x + i * gridDim.x;
            if (n >= N) { continue; }
            classifier_fetch_row(fused_classifier_row + i * num_copied, logits + (size_t)n * Vp, rest->barriers[i],
                                 num_copied, part);
        }
    }
    __syncthreads();

    float dloss = *dloss_;
    int target = targets[blockIdx.x];
    for (int n = blockIdx.x, turn = 0; n < N; n += gridDim.x, turn++) {
        int next_target = n + (int)gridDim.x < N ? targets[n + gridDim.x] : 0;
        uint64_t* barriers = rest->barriers[turn % 2];
        int4* buffer = fused_classifier_row + turn % 2 * num_copied;
        const floatX* x = reinterpret_cast<const floatX*>(buffer);
        floatX* row = logits + (size_t)n * Vp;
        FusedClassifierSums s = {-INFINITY, 0.0f, INFINITY};
        for (int j = 0; j < 4; j++) {
            mbarrier_wait(&barriers[j], turn / 2 % 2);
            // each thread takes the vectors i with i % blockDim.x == threadIdx.x, as fused_classifier_owner assumes
            int begin = j * part, end = min((j + 1) * part, num_vectors), block = blockDim.x;
            for (int i = begin + (threadIdx.x + block - begin % block) % block; i < end; i += block) {
                fused_classifier_add(s, vec128_from_bits<floatX>(buffer[i]));
            }
        }
        float x_tail = 0.0f, correct = (float)x[target], max, sum;
        if (tail + (int)threadIdx.x < V) {
            x_tail = (float)x[tail + threadIdx.x];
            float old_max = s.max;
            s.max = fmaxf(s.max, x_tail);
            s.min = fminf(s.min, x_tail);
            s.sum = s.sum * __expf(old_max - s.max) + __expf(x_tail - s.max);
        }
        fused_classifier_reduce(&max, &sum, s, rest->reduce);
        for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
            x128 v = vec128_from_bits<floatX>(buffer[i]);
            store128(row + i * x128::size, fused_classifier_gradient(v, max, dloss / sum));
        }
        __syncthreads(); // now all threads have read the buffer, and the next copy may overwrite it
        if (threadIdx.x == 0 && n + 2 * (int)gridDim.x < N) {
            classifier_fetch_row(buffer, row + 2 * (size_t)gridDim.x * Vp, barriers, num_copied, part);
        }
        classifier_rest(row, losses, dloss, max, sum, x_tail, correct, target, n, V, Vp);
        target = next_target;
    }
}

int fused_classifier8_shared(int V) {
    return 2 * ceil_div(V, x128::size) * (int)sizeof(x128) + (int)sizeof(ClassifierTail8);
}

void fused_classifier8(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                       cudaStream_t stream, int block_size) {
    int shared = fused_classifier8_shared(V), blocks;
    cudaCheck(cudaFuncSetAttribute(fused_classifier_sm90_kernel8, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaCheck(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fused_classifier_sm90_kernel8, block_size, shared));
    int grid = min(N, blocks * num_multiprocessors());
    fused_classifier_sm90_kernel8<<<grid, block_size, shared, stream>>>(logits, losses, targets, dloss, N, V, Vp);
    cudaCheck(cudaGetLastError());
}

#include "mean_loss.cuh"

// True if the binary's code for this kernel is for architecture `arch` or later, and a block may use `shared` bytes of
// shared memory.
static bool can_run(const void* kernel, int arch, int shared) {
    cudaFuncAttributes attributes;
    cudaCheck(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= arch && shared <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

typedef void (*Classifier)(floatX*, float*, const int*, const float*, int, int, int, cudaStream_t, int);

static void declare(Bench& b) {
    b.varies("BTV");
    int N = b.B * b.T, V = b.V, Vp = ceil_div(V, 128) * 128;
    // exp of the large ones overflows unless the maximum is subtracted first
    const float scales[] = {3.0f, 60.0f, 1e-3f, 3.0f};
    int which = b.cases({"normal", "logits of some 100", "almost equal logits", "one logit far above the others"});
    float scale = scales[which];
    uint32_t seed = b.state.seed;
    float dloss_value = 1024.0f; // a loss scale: without it most gradients would underflow in 16 bits
    Buffer<floatX> logits = b.input_from<floatX>("logits", (size_t)N * Vp, [=](float* x) {
        parallel_for(N, [=](size_t n) {
            for (int i = 0; i < Vp; i++) {
                uint32_t r1 = hash_bits(i, 2 * n + seed), r2 = hash_bits(i, 2 * n + seed + 1);
                float u1 = (r1 + 1.0f) / 4294967296.0f, u2 = r2 / 4294967296.0f;
                x[n * Vp + i] = i < V ? scale * sqrtf(-2.0f * logf(u1)) * cosf(6.2831853f * u2) : NAN;
            }
            if (which == 3) { x[n * Vp + bench_random(n, seed) % V] = 120.0f; }
        });
    });
    Buffer<int> targets = b.input_ids("targets", N, V);
    Buffer<float> dloss = b.input_from<float>("dloss", 1, [=](float* x) { *x = dloss_value; });
    Tolerance tolerance = ulps<floatX>(sizeof(floatX) == 4 ? 16 : 1);
    // with few columns p of the target may be close to 1, and p - 1 keeps the absolute rounding error of p
    if (V < 1000) { tolerance.atol += 4 * ulp_of<float>() * dloss_value; }
    Buffer<floatX> dlogits = b.inout<floatX>("dlogits", (size_t)N * Vp, logits, tolerance);
    Buffer<float> losses = b.output<float>("losses", N, {1e-6f, 1e-6f});
    b.reference(
        [=] { fused_classifier_cpu(dlogits.host, losses.host, logits.host, targets.host, dloss_value, N, V, Vp); });
    b.cost(2.0 * N * Vp * sizeof(floatX), 0);
    // mean_loss and dloss = NULL are not timed; they are checked at the small shapes only
    bool small = N < 1024;
    Buffer<float> zero = {}, mean = {}, losses_alone = {};
    if (small) {
        zero = b.input_from<float>("zero", 1, [](float* x) { *x = 0.5f; });
        mean = b.inout<float>("mean", 1, zero, {1e-5f, 1e-6f});
        losses_alone = b.output<float>("losses_alone", N, {1e-6f, 1e-6f});
        b.reference([=] {
            *mean.host = 0.5f;
            for (int n = 0; n < N; n++) { *mean.host += losses.host[n] / N; }
            memcpy(losses_alone.host, losses.host, N * sizeof(float));
        });
    }
    cudaStream_t stream = b.stream;
    auto kernel = [&](int number, const char* what, Classifier classifier, std::vector<int> block_sizes) {
        b.kernel(
            number, what,
            [=](int bs) {
                if (small) { fused_classifier(dlogits, losses_alone, targets, NULL, N, V, Vp, stream); }
                classifier(dlogits, losses, targets, dloss, N, V, Vp, stream, bs);
                if (small) { mean_loss(mean, losses, N, 1.0f / N, stream); }
            },
            block_sizes);
    };
    std::vector<int> sizes = {128, 256, 512, 1024};
    int shared5 = V / x128::size * (int)sizeof(x128) + 32 * (int)sizeof(float);
    kernel(1, "one block per row, three passes", fused_classifier1, sizes);
    kernel(2, "online softmax: two passes", fused_classifier2, sizes);
    kernel(3, "128-bit vectors", fused_classifier3, sizes);
    if (V / x128::size <= KERNEL4_VECTORS * 512) {
        kernel(4, "row read once, kept in registers", fused_classifier4,
               {256, 512}); // 1024 threads have too few registers
    }
    if (b.dry || can_run((const void*)fused_classifier_kernel5, 0, shared5)) {
        kernel(5, "row read once, kept in shared memory", fused_classifier5, sizes);
    }
    kernel(6, "row read twice, the second time backwards", fused_classifier6, sizes);
    kernel(7, "row read once by cp.async, summed as it arrives", fused_classifier7,
           {bench_tunable("fused_classifier")});
    b.promoted(7);
    b.huge((double)BenchHuge::elements(Vp) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements(Vp), num_rows = num / Vp;
        std::vector<float> ids(num_rows);
        for (size_t i = 0; i < num_rows; i++) { ids[i] = (float)(bench_random(i, 1) % (unsigned)V); }
        floatX* x = h.input<floatX>(num, 0);
        float* loss = h.output<float>(num_rows);
        fused_classifier(x, loss, h.upload<int>(ids), h.upload<float>({dloss_value}), (int)num_rows, V, Vp, h.stream);
        h.compare("dlogits", x, num_rows, Vp, tolerance, [&](size_t row, float* want) {
            float row_loss;
            std::vector<float> values(Vp);
            h.fill(values.data(), row * Vp, Vp, 0);
            fused_classifier_cpu(want, &row_loss, values.data(), &ids[row], dloss_value, 1, V, Vp);
        });
    });
    int shared8 = fused_classifier8_shared(V);
    if (b.dry || (has_sm90a() && can_run((const void*)fused_classifier_sm90_kernel8, 90, shared8))) {
        kernel(8, "persistent, bulk copies prefetch the next row", fused_classifier8, {256, 512, 1024});
    }
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "fused_classifier", declare, {8, 1024, 768, 12, 50257},
                      {{1, 1, 0, 0, 1},
                       {1, 3, 0, 0, 11},
                       {2, 5, 0, 0, 1000},
                       {1, 7, 0, 0, 50257},
                       {1, 2, 0, 0, 130001},
                       {2, 130, 0, 0, 24}});
}
