/*
fused_classifier: losses (N) = -log(softmax(logits)[target]) over the first V of Vp columns of logits (N,Vp); if dloss (1) is not NULL,
the logits are overwritten by their gradients, (softmax - onehot(target)) * dloss, 0 from column V on | targets (N) int
Constraint: Vp % 8 == 0, 1 <= V <= Vp.
Kernels 6 (a row is read twice) and 7 (a row in shared memory by cp.async) of fused_classifier.cu, which has the other kernels, errors
and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: fused_classifier ====
// ---- shared by kernels 3 to 8: online softmax over vectors ----

// Online softmax state of a thread: running maximum, sum of exp(x - max), and minimum of the logits it has seen.
struct FusedClassifierSums {
    float max, sum, min;
};

// Adds a vector to s. +infinity in x makes the sum NaN. -infinity shows only in min; fused_classifier_reduce tests it.
__device__ inline void fused_classifier_add(FusedClassifierSums& s, const x128& x) {
    float max = s.max;
    for (int k = 0; k < x128::size; k++) {
        max = fmaxf(max, (float)x[k]);
        s.min = fminf(s.min, (float)x[k]);
    }
    s.sum *= __expf(s.max - max);
    for (int k = 0; k < x128::size; k++) { s.sum += __expf((float)x[k] - max); }
    s.max = max;
}

// Combines the states of the block's threads into the row's maximum and sum of exp(x - max). The sum is NaN if any
// logit is NaN or infinite. shared (32) is scratch.
__device__ inline void fused_classifier_reduce(float* max, float* sum, const FusedClassifierSums& s, float* shared) {
    *max = block_max(s.max, shared);
    // exp(-inf) is 0, so the sum alone would hide a logit of -infinity
    *sum = block_sum(s.min == -INFINITY ? NAN : s.sum * __expf(s.max - *max), shared);
}

// Returns softmax(x) * dloss for one vector, without the target's -dloss. scale = dloss / sum.
__device__ inline x128 fused_classifier_gradient(const x128& x, float max, float scale) {
    x128 gradient;
    for (int k = 0; k < x128::size; k++) { gradient[k] = (floatX)(__expf((float)x[k] - max) * scale); }
    return gradient;
}

// Returns the index of the thread that writes column `target`. Thread t owns the vectors t, t + blockDim.x, ..., and
// column tail + t, where tail is the first column after the last whole vector.
__device__ inline int fused_classifier_owner(int target, int tail) {
    return target < tail ? target / x128::size % (int)blockDim.x : target - tail;
}

// ---- kernel 6: the row is read twice, the second time backwards, because its end is still in the caches ----

// Per-thread state for the tail (columns tail..V-1, after the last whole vector), of which each thread has at most one
// column, and for the target. The thread that owns the target's column writes the target's gradient and the loss.
struct FusedClassifierRow {
    int tail, target;
    bool owner;
    float x_tail, correct; // this thread's logit in the tail; the target's logit, set in the owner only
};

// Returns this thread's state, and initialises s with its logit in the tail, if it has one.
__device__ inline FusedClassifierRow fused_classifier_begin(FusedClassifierSums& s, const floatX* row, int target,
                                                            int V) {
    FusedClassifierRow r;
    r.tail = V / x128::size * x128::size, r.target = target;
    r.owner = (int)threadIdx.x == fused_classifier_owner(target, r.tail);
    r.correct = r.owner ? (float)row[target] : 0.0f;
    r.x_tail = r.tail + (int)threadIdx.x < V ? (float)row[r.tail + threadIdx.x] : 0.0f;
    s = {-INFINITY, 0.0f, INFINITY};
    if (r.tail + (int)threadIdx.x < V) { s = {r.x_tail, 1.0f, r.x_tail}; }
    return r;
}

// Writes the gradient of the tail, zeros from V to Vp, and the target's gradient.
__device__ inline void fused_classifier_finish(floatX* row, const FusedClassifierRow& r, float max, float scale,
                                               const float* dloss, int V, int Vp) {
    for (int c = r.tail + threadIdx.x; c < Vp; c += blockDim.x) {
        row[c] = (floatX)(c < V ? __expf(r.x_tail - max) * scale : 0.0f);
    }
    if (r.owner) { row[r.target] = (floatX)(__expf(r.correct - max) * scale - *dloss); }
}

__global__ void __launch_bounds__(1024)
    fused_classifier_kernel6(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    __shared__ float shared[32];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    FusedClassifierSums s;
    FusedClassifierRow r = fused_classifier_begin(s, row, targets[blockIdx.x], V);
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        fused_classifier_add(s, load128(row + i * x128::size));
    }
    float max, sum;
    fused_classifier_reduce(&max, &sum, s, shared);
    // log1pf because sum >= 1 may be close to 1, where logf() under --use_fast_math has an absolute error of 4e-7
    if (r.owner) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - r.correct); }
    if (dloss == NULL) { return; }

    // the second read goes backwards, because the end of the row is still in the caches
    float scale = *dloss / sum;
    int last = (num_vectors - 1) / (int)blockDim.x * (int)blockDim.x + (int)threadIdx.x;
    for (int i = last; i >= 0; i -= blockDim.x) {
        if (i >= num_vectors) { continue; }
        x128 x = load128(row + i * x128::size);
        store128(row + i * x128::size, fused_classifier_gradient(x, max, scale));
    }
    fused_classifier_finish(row, r, max, scale, dloss, V, Vp);
}

// ---- kernel 7: the row is read once, by cp.async into shared memory, and summed while its rest is in flight ----

// Reads the row once, with cp.async. Dynamic shared memory: the row's V / x128::size vectors, then 32 floats of
// reduction scratch.
__global__ void __launch_bounds__(1024)
    fused_classifier_kernel7(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    extern __shared__ __align__(128) int4 fused_classifier_row[];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    float* shared = reinterpret_cast<float*>(fused_classifier_row + num_vectors);
    // Four commit groups of `group` vectors each, summed below as they arrive. Each thread reads only what it copied
    // itself, so no barrier is needed.
    int group = ceil_div(num_vectors, 4 * (int)blockDim.x) * (int)blockDim.x;
    for (int j = 0; j < 4; j++) {
        int end = min((j + 1) * group, num_vectors);
        for (int i = j * group + threadIdx.x; i < end; i += blockDim.x) {
            cp_async_16(&fused_classifier_row[i], row + i * x128::size);
        }
        cp_async_commit();
    }

    FusedClassifierSums s;
    FusedClassifierRow r = fused_classifier_begin(s, row, targets[blockIdx.x], V);
    for (int j = 0; j < 4; j++) {
        if (j == 0) { cp_async_wait<3>(); }
        if (j == 1) { cp_async_wait<2>(); }
        if (j == 2) { cp_async_wait<1>(); }
        if (j == 3) { cp_async_wait<0>(); }
        int end = min((j + 1) * group, num_vectors);
        for (int i = j * group + threadIdx.x; i < end; i += blockDim.x) {
            fused_classifier_add(s, vec128_from_bits<floatX>(fused_classifier_row[i]));
        }
    }
    float max, sum;
    fused_classifier_reduce(&max, &sum, s, shared);
    if (r.owner) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - r.correct); }
    if (dloss == NULL) { return; }

    float scale = *dloss / sum;
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        x128 x = vec128_from_bits<floatX>(fused_classifier_row[i]);
        store128(row + i * x128::size, fused_classifier_gradient(x, max, scale));
    }
    fused_classifier_finish(row, r, max, scale, dloss, V, Vp);
}

// losses (N) = log(sum(exp(logits))) - logits[target] per row. The gradient overwrites logits (N,Vp) in place:
// dloss * (softmax(logits) - onehot(target)), and 0 from column V on. | targets (N), each in [0,V)
// dloss (1), or NULL: only the losses are computed, logits are not changed
void fused_classifier(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                      const Execution& exec) {
    int block_size = tuned_block_size(exec, "fused_classifier", N, V, sizeof(floatX) == 4 ? 1024 : 512);
    Op op(exec, (dloss ? 2.0 : 1.0) * N * Vp * sizeof(floatX), 0, "fused_classifier");
    require(Vp % 8 == 0 && 1 <= V && V <= Vp);
    size_t shared = (size_t)(V / x128::size) * sizeof(x128) + 32 * sizeof(float);
    // Rows too long for shared memory, and devices without cp.async, take kernel 6. An SM of an H200 holds two blocks
    // with GPT-2's rows in 16 bits, so that one row is read while the other is written. In fp32 it holds one block.
    bool fits = shared <= (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (fits && compiled_arch(fused_classifier_kernel7) >= 80) {
        cudaCheck(cudaFuncSetAttribute(fused_classifier_kernel7, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared)); // without this, only one block fits on an SM
        launch_kernel(fused_classifier_kernel7, LaunchShape(N, block_size, shared), exec, logits, losses, targets,
                      dloss, V, Vp);
    } else {
        launch_kernel(fused_classifier_kernel6, LaunchShape(N, block_size), exec, logits, losses, targets, dloss, V,
                      Vp);
    }
}
// ==== end promoted: fused_classifier ====
