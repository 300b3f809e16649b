/*
adamw_prepare: decides whether the step is applied and computes the factors that adamw needs, all in `state`
adamw: one AdamW update of params (n) floatX, master (n) float or NULL, m, v (n) float | grads (n) float | state after adamw_prepare
Constraint: pointers aligned to 16 bytes; any n.
Kernel 4 of adamw.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/adamw_state.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

// ==== promoted: adamw ====
// In fp16 only: halves the loss scale after an overflow, doubles it after LOSS_SCALE_STEPS finite steps. If the loss
// itself is not finite, or the scale is already 1, the scale is not the cause of the overflow and is not halved.
__device__ inline void adamw_adapt_loss_scale(StepState* s) {
    constexpr int LOSS_SCALE_STEPS = 2000;
    constexpr float LARGEST_LOSS_SCALE = 65536.0f;
    float factor = 1.0f;
    if (isfinite(s->loss) && isfinite(s->scaled_norm)) {
        s->good_steps++;
        if (s->good_steps >= LOSS_SCALE_STEPS && s->loss_scale < LARGEST_LOSS_SCALE) { factor = 2.0f; }
    } else if (isfinite(s->loss) && s->loss_scale > 1.0f) {
        factor = 0.5f;
    }
    if (factor == 1.0f) { return; }
    s->loss_scale *= factor, s->dloss *= factor;
    s->good_steps = 0;
}

__global__ void adamw_prepare_kernel(StepState* s, AdamW o, bool skip, bool deferred) {
    s->optimizer = o, s->is_deferred = deferred;
    float unscale = __frcp_rn(s->loss_scale); // exact, because the scale is a power of two
    s->norm = s->scaled_norm * unscale;
    s->applied = isfinite(s->loss) && isfinite(s->scaled_norm) && !skip;
    int t = s->num_updates += s->applied;
    s->grad_scale = unscale * (o.clip > 0.0f && s->norm > o.clip ? o.clip / s->norm : 1.0f);
    s->inverse_bias1 = (float)(1.0 / (1.0 - pow((double)o.beta1, (double)t)));
    s->inverse_bias2 = (float)(1.0 / (1.0 - pow((double)o.beta2, (double)t)));
    if (IS_FP16) { adamw_adapt_loss_scale(s); }
}

// state (1) is in device memory and already holds loss and scaled_norm. Sets norm, the verdict `applied`, num_updates,
// grad_scale and the bias corrections; in fp16 also the loss scale of the next step. If skip is true, the update is
// skipped even if loss and norm are finite. deferred: layers are updated during the next forward pass.
void adamw_prepare(StepState* state, const AdamW& optimizer, bool skip, bool deferred, const Execution& exec) {
    Op op(exec, sizeof(StepState), 0, "step verdict");
    launch_kernel(adamw_prepare_kernel, LaunchShape(1, 1), exec, state, optimizer, skip, deferred);
}

// Returns the new parameter; updates m and v.
__device__ inline float adamw_update(float p, float& m, float& v, float grad, const StepState& s, const AdamW& o) {
    float g = grad * s.grad_scale;
    m = o.beta1 * m + (1.0f - o.beta1) * g;
    v = o.beta2 * v + (1.0f - o.beta2) * g * g;
    float direction = m * s.inverse_bias1 / (sqrtf(v * s.inverse_bias2) + o.eps);
    return p - o.learning_rate * (direction + o.weight_decay * p);
}

// The rounding seed of this update, from the seed of this range of parameters. Seed 0 means round to nearest and stays
// 0; `| 1` keeps any other seed from becoming 0.
__device__ inline uint32_t adamw_seed(uint32_t seed, int update) {
    return seed == 0 ? 0 : hash_bits((uint32_t)update, seed) | 1;
}

__device__ inline floatX adamw_round(float p, size_t i, uint32_t seed) {
    return seed == 0 ? (floatX)p : stochastic_round(p, hash_bits((uint32_t)i, seed));
}

__device__ inline void adamw_scalar(floatX* params, float* master, float* m, float* v, const float* grads,
                                    const StepState& s, const AdamW& o, size_t i, uint32_t seed) {
    float p = adamw_update(master ? master[i] : (float)params[i], m[i], v[i], grads[i], s, o);
    if (master) { master[i] = p; }
    params[i] = adamw_round(p, i, seed);
}

// Holds four neighbouring values of each array, starting at element `at`.
struct AdamWVector {
    f128 p, m, v, g;

    __device__ void load(const floatX* params, const float* master, const float* all_m, const float* all_v,
                         const float* grads, size_t at) {
        m = load128(all_m + at), v = load128(all_v + at), g = load128(grads + at);
        if (master) {
            p = load128(master + at);
        } else {
            x4 old = *reinterpret_cast<const x4*>(params + at);
            for (int k = 0; k < 4; k++) { p[k] = (float)old[k]; }
        }
    }
    // Updates and stores the values. i: the number of the first value, for its random bits
    __device__ void update(floatX* params, float* master, float* all_m, float* all_v, const StepState& s,
                           const AdamW& o, size_t at, size_t i, uint32_t seed) {
        x4 rounded;
        for (int k = 0; k < 4; k++) { p[k] = adamw_update(p[k], m[k], v[k], g[k], s, o); }
        for (int k = 0; k < 4; k++) { rounded[k] = adamw_round(p[k], i + k, seed); } // apart: rounding has branches
        store128(all_m + at, m), store128(all_v + at, v);
        if (master) { store128(master + at, p); }
        *reinterpret_cast<x4*>(params + at) = rounded;
    }
};

// ---- kernel 4: two groups of four elements per thread, all of their loads in flight at once ----

__global__ void __launch_bounds__(128)
    adamw_kernel4(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state,
                  size_t n, AdamW o, uint32_t seed) {
    size_t first = ((size_t)blockIdx.x * 2 * blockDim.x + threadIdx.x) * 4, stride = (size_t)blockDim.x * 4;
    AdamWVector x[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 <= n) { x[j].load(params, master, m, v, grads, i); }
    }
    StepState s = *state;
    if (!s.applied) { return; }
    seed = adamw_seed(seed, s.num_updates);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 <= n) {
            x[j].update(params, master, m, v, s, o, i, i, seed);
        } else {
            for (; i < n; i++) { adamw_scalar(params, master, m, v, grads, s, o, i, seed); }
        }
    }
}

// params (n) floatX; master (n) float, or NULL if params is the only copy of the weights; m, v (n) | grads (n);
// state (1), filled in by adamw_prepare. seed 0: round params to nearest; otherwise stochastically, with new random
// bits in every update.
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
           const AdamW& optimizer, uint32_t seed, const Execution& exec) {
    int block_size = tuned_block_size(exec, "adamw", n, 1, 128);
    // Bytes per element: 20 because m and v are read and written and grads are read. With master, master is read and
    // written and params are written; without master, params are read and written.
    double bytes = 20 + (master ? 8.0 + sizeof(floatX) : 2.0 * sizeof(floatX));
    Op op(exec, bytes * n, 0, "adamw");
    require(((size_t)params | (size_t)master | (size_t)m | (size_t)v | (size_t)grads) % 16 == 0);
    require(block_size <= 128);
    size_t num_blocks = ceil_div(n, 8 * (size_t)block_size);
    launch_kernel(adamw_kernel4, LaunchShape(num_blocks, block_size), exec, params, master, m, v, grads, state, n,
                  optimizer, seed);
}

__global__ void adamw_round_kernel(floatX* params, const float* master, size_t n, uint32_t seed, int update) {
    seed = adamw_seed(seed, update);
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { params[i] = adamw_round(master[i], i, seed); }
}

// Recomputes params (n) as they were after update number `update`, from the master weights (n) after that update.
void adamw_round_weights(floatX* params, const float* master, size_t n, uint32_t seed, int update,
                         const Execution& exec) {
    launch_kernel(adamw_round_kernel, LaunchShape(ceil_div(n, (size_t)256), 256), exec, params, master, n, seed,
                  update);
}
// ==== end promoted: adamw ====
