// What AdamW's kernels share: its hyperparameters, the results of a step, and the deferred update, which runs during the next
// forward pass. The kernels: dev/cuda/adamw.cu.
#pragma once

#include "cuda_common.cuh"

// Hyperparameters of one update, set by the host.
struct AdamW {
    float learning_rate, beta1, beta2, eps, weight_decay;
    float clip; // maximum norm of the gradient; 0: no clipping
};

// Results that a step's kernels pass on to later ones: one struct in device memory, copied by the host after the step.
struct StepState {
    float loss;        // mean over the tokens of the step
    float scaled_norm; // norm of the gradients with the loss scale still in them
    float norm;        // norm of the true gradients; set by adamw_prepare
    int applied;       // verdict of adamw_prepare: 1 = update; 0 = no update (loss or norm not finite, or host skips)
    int num_updates;   // steps that changed the weights: t of AdamW
    float
        loss_scale; // factor on the gradients in fp16, by way of dloss, else 1; adamw_prepare sets that of the next step
    float dloss;    // derivative of the scaled loss by one token's loss: loss_scale / tokens in a step
    int good_steps;                     // finite steps since the loss scale last changed
    float grad_scale;                   // factor on the gradients in adamw: clipping factor / loss_scale
    float inverse_bias1, inverse_bias2; // bias corrections 1 / (1 - beta^t)
    float saturated;                    // with --fp8: tensors with values over their format's largest, but no infinity
    AdamW optimizer;                    // of the update
    int is_deferred; // 1: layers after the first are updated during the next forward pass: DeferredUpdate
};

// The deferred update: AdamW updates all layers except the first during the next forward pass. While the pass computes a layer,
// otherwise idle warps of its matmuls (gemm.cuh) update the weights of later layers. Before the pass reads a layer,
// finish_deferred_update() updates what is left of it. A layer's values are cut into chunks, which are numbered over all layers.
// Worker i, a warp, has chunks i, i + num_workers, i + 2 num_workers, ... The results do not depend on which warp computes them.
// A launch of the forward pass may be captured in a graph, so this struct has nothing that changes from step to step: `state` and
// `done`, in device memory, have that.
struct DeferredUpdate {
    static constexpr int CHUNK = 512; // values
    floatX* params;                   // of layer 0, like the other four arrays
    float *master, *m, *v;            // master may be NULL
    const float* grads;
    StepState* state;
    int matrices, vectors; // values of a layer, multiples of 4: first those of matrices, then of vectors, without decay
    uint32_t seed;         // hash_bits(piece, seed) | 1 is the seed of a piece; 0: no stochastic rounding
    int first, last;       // chunks [first, last) may still have to be updated; first == last: nothing is pending
    int num_workers;
    int* done; // (num_workers) in device memory: the first chunk that the worker has not updated, or less than `first`

    __host__ __device__ int chunks_of(int n) const { return (n + CHUNK - 1) / CHUNK; }
    __host__ __device__ int chunks_of_layer() const { return chunks_of(matrices) + chunks_of(vectors); }
    bool is_pending() const { return first < last; }
};

// Each block of a matmul has three idle warps.
inline int deferred_update_workers() { return 3 * num_multiprocessors(); }
