// What AdamW's kernels share: its hyperparameters, the results of a step, and an update that is done beside the next forward
// pass. The kernels: dev/cuda/adamw.cu.
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
    float loss_scale;  // factor on the loss in fp16, else 1; adamw_prepare replaces it with the next step's factor
    float dloss;       // derivative of the scaled loss by one token's loss: loss_scale / tokens in a step
    int good_steps;    // finite steps since the loss scale last changed
    float grad_scale;  // factor on the gradients in adamw: clipping factor / loss_scale
    float inverse_bias1, inverse_bias2; // bias corrections 1 / (1 - beta^t)
    float saturated;                    // with --fp8: tensors with values beyond the largest number of their format
    AdamW optimizer;                    // of the update
    int is_later; // the weights of later layers are updated during the next forward pass: AdamWLater
};

// The update of all layers but the first during the next forward pass. While that pass is at a layer, warps of its
// matrix products that would be idle (gemm.cuh) update the weights of later layers; what they have not done when it comes to a
// layer, adamw_finish() does. A layer's values are cut into chunks, numbered from layer 0 on. Worker i, a warp, has chunks i,
// i + num_workers, i + 2 num_workers, ... The values do not depend on who computes them. A launch of the forward pass may
// be captured in a graph, so this has nothing that changes from step to step: that is in `state` and `done`.
struct AdamWLater {
    static constexpr int CHUNK = 512; // values
    floatX* params;                   // of layer 0, as the other four arrays
    float *master, *m, *v;            // master may be NULL
    const float* grads;
    StepState* state;
    int matrices, vectors; // values of a layer, multiples of 4: first those of matrices, then of vectors, without decay
    uint32_t seed;         // hash_bits(piece, seed) | 1 is the seed of a piece; 0: no stochastic rounding
    int first, last;       // chunks [first, last) may have to be done; none: nothing is open
    int num_workers;
    int* done; // (num_workers) in device memory: the first of a worker's chunks that is not done, or less than `first`

    __host__ __device__ int chunks_of(int n) const { return (n + CHUNK - 1) / CHUNK; }
    __host__ __device__ int chunks_of_layer() const { return chunks_of(matrices) + chunks_of(vectors); }
    bool is_open() const { return first < last; }
};

// Three warps per block of a product.
inline int adamw_num_workers() { return 3 * num_multiprocessors(); }

// What the forward pass that is being launched takes along; there is one model in training.
inline AdamWLater& adamw_later() {
    static AdamWLater later = {};
    return later;
}
