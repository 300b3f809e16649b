/* adamw: one step of AdamW on one tensor, elementwise; adamw_prepare: what of it depends on this step's loss and norm

   m = beta1 * m + (1 - beta1) * g,  v = beta2 * v + (1 - beta2) * g^2,  with g = grads * grad_scale
   p -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p)

   params (n) floatX out, and in where master is NULL | master (n) float inout or NULL | m, v (n) float inout
   grads (n) float in | step one AdamWStep in device memory, from adamw_prepare
   Bound: memory: m, v, master read and written, grads read, params written: 30*n bytes for 16-bit params with master,
   28*n for fp32. Constraint: pointers aligned to 16 bytes; any n.
   Error: m, v, master a few ulps of fp32 (square root and division of --use_fast_math are good to 2 ulps, denormals
   become 0); params one ulp of floatX, rounded to nearest or stochastically.
   Source: Loshchilov and Hutter 2019, arXiv:1711.05101.

   nvcc -O3 --use_fast_math adamw.cu -o adamw      (or: make adamw)
   ./adamw 4      check kernel 4 against the CPU and sweep its block sizes
   ./adamw        every kernel, side by side                                         */
#include "bench.h"

// ==== promoted: adamw ====

// What adamw_prepare decides on the device, so that no step waits for the host.
struct AdamWStep {
    int apply;  // 0: the loss or a gradient is not finite, and the update does nothing
    int update; // t = 1, 2, ... of those that are applied
    float grad_scale;
    float inverse_bias1, inverse_bias2; // 1 / (1 - beta^t)
};

__global__ void adamw_prepare_kernel(AdamWStep* step, int* num_updates, const float* loss, const float* norm,
                                     float inverse_loss_scale, float clip, float beta1, float beta2) {
    step->apply = isfinite(*loss) && isfinite(*norm);
    int t = *num_updates + step->apply;
    *num_updates = t;
    step->update = t;
    float true_norm = *norm * inverse_loss_scale;
    step->grad_scale = inverse_loss_scale * (clip > 0.0f && true_norm > clip ? clip / true_norm : 1.0f);
    step->inverse_bias1 = (float)(1.0 / (1.0 - pow((double)beta1, (double)t)));
    step->inverse_bias2 = (float)(1.0 / (1.0 - pow((double)beta2, (double)t)));
}

// step (1) | num_updates (1) += 1 if the step is applied | loss (1) | norm (1) of the gradients before they are multiplied
// by inverse_loss_scale | clip: the largest norm, 0: no clipping
void adamw_prepare(AdamWStep* step, int* num_updates, const float* loss, const float* norm, float inverse_loss_scale,
                   float clip, float beta1, float beta2, cudaStream_t stream) {
    adamw_prepare_kernel<<<1, 1, 0, stream>>>(step, num_updates, loss, norm, inverse_loss_scale, clip, beta1, beta2);
    cudaCheck(cudaGetLastError());
}

// What is the same for all elements of a tensor.
struct AdamWScalars {
    float learning_rate, beta1, beta2, eps, weight_decay;
};

// The new parameter; updates m and v.
__device__ inline float adamw_update(float p, float& m, float& v, float grad, const AdamWStep& step,
                                     const AdamWScalars& s) {
    float g = grad * step.grad_scale;
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    float direction = m * step.inverse_bias1 / (sqrtf(v * step.inverse_bias2) + s.eps);
    return p - s.learning_rate * (direction + s.weight_decay * p);
}

// The seed of one update, from that of the tensor; 0, which rounds to nearest, stays 0.
__device__ inline uint32_t adamw_seed(uint32_t seed, int update) {
    return seed == 0 ? 0 : hash_bits((uint32_t)update, seed) | 1;
}

__device__ inline floatX adamw_round(float p, size_t i, uint32_t seed) {
    return seed == 0 ? (floatX)p : stochastic_round(p, hash_bits((uint32_t)i, seed));
}

// Four parameters: 8 or 16 bytes in one access.
struct alignas(4 * sizeof(floatX)) AdamWParams {
    floatX x[4];
};

__device__ inline void adamw_scalar(floatX* params, float* master, float* m, float* v, const float* grads,
                                    const AdamWStep& step, const AdamWScalars& s, size_t i, uint32_t seed) {
    float p = adamw_update(master ? master[i] : (float)params[i], m[i], v[i], grads[i], step, s);
    if (master) { master[i] = p; }
    params[i] = adamw_round(p, i, seed);
}
// ==== end promoted: adamw ====

// ---- kernel 1: one thread per element --------------------------------------------------------------

__global__ void adamw_kernel1(floatX* params, float* master, float* m, float* v, const float* grads,
                              const AdamWStep* step, size_t n, AdamWScalars s, uint32_t seed) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && step->apply) {
        adamw_scalar(params, master, m, v, grads, *step, s, i, adamw_seed(seed, step->update));
    }
}

void adamw1(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step, size_t n,
            float learning_rate, float beta1, float beta2, float eps, float weight_decay, uint32_t seed,
            cudaStream_t stream, int block_size) {
    AdamWScalars scalars = {learning_rate, beta1, beta2, eps, weight_decay};
    size_t num_blocks = ceil_div(n, (size_t)block_size);
    adamw_kernel1<<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, step, n, scalars, seed);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: four elements per thread in 128-bit vectors, cached as usual ----

// streamed: see kernel 3
template <bool streamed> __global__ void __launch_bounds__(512)
    adamw_kernel2(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step_,
                  size_t n, AdamWScalars s, uint32_t seed) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    AdamWStep step = *step_;
    if (!step.apply) { return; }
    seed = adamw_seed(seed, step.update);
    if (i + 4 > n) {
        for (; i < n; i++) { adamw_scalar(params, master, m, v, grads, step, s, i, seed); }
        return;
    }
    auto load = [](const float* from) { return streamed ? load128cs(from) : load128(from); };
    auto store = [](float* to, const f128& x) { streamed ? store128cs(to, x) : store128(to, x); };
    f128 p, m4 = load(m + i), v4 = load(v + i), g4 = load(grads + i);
    if (master) {
        p = load(master + i);
    } else {
        AdamWParams old = *reinterpret_cast<const AdamWParams*>(params + i);
        for (int k = 0; k < 4; k++) { p[k] = (float)old.x[k]; }
    }
    AdamWParams rounded;
    for (int k = 0; k < 4; k++) {
        p[k] = adamw_update(p[k], m4[k], v4[k], g4[k], step, s);
        rounded.x[k] = adamw_round(p[k], i + k, seed);
    }
    store(m + i, m4);
    store(v + i, v4);
    if (master) { store(master + i, p); }
    *reinterpret_cast<AdamWParams*>(params + i) = rounded; // the next forward pass reads it: never streamed
}

void adamw2(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step, size_t n,
            float learning_rate, float beta1, float beta2, float eps, float weight_decay, uint32_t seed,
            cudaStream_t stream, int block_size) {
    AdamWScalars scalars = {learning_rate, beta1, beta2, eps, weight_decay};
    size_t num_blocks = ceil_div(n, 4 * (size_t)block_size);
    adamw_kernel2<false><<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, step, n, scalars, seed);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: kernel 2, its tensors of floats streamed past what the caches hold ----

void adamw3(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step, size_t n,
            float learning_rate, float beta1, float beta2, float eps, float weight_decay, uint32_t seed,
            cudaStream_t stream, int block_size) {
    AdamWScalars scalars = {learning_rate, beta1, beta2, eps, weight_decay};
    size_t num_blocks = ceil_div(n, 4 * (size_t)block_size);
    adamw_kernel2<true><<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, step, n, scalars, seed);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: two groups of four elements per thread, all of their loads in flight at once ----

// ==== promoted: adamw ====
__global__ void __launch_bounds__(128)
    adamw_kernel4(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step_,
                  size_t n, AdamWScalars s, uint32_t seed) {
    size_t first = ((size_t)blockIdx.x * 2 * blockDim.x + threadIdx.x) * 4, stride = (size_t)blockDim.x * 4;
    f128 p[2], m4[2], v4[2], g4[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 > n) { continue; }
        m4[j] = load128(m + i), v4[j] = load128(v + i), g4[j] = load128(grads + i);
        if (master) {
            p[j] = load128(master + i);
        } else {
            AdamWParams old = *reinterpret_cast<const AdamWParams*>(params + i);
            for (int k = 0; k < 4; k++) { p[j][k] = (float)old.x[k]; }
        }
    }
    AdamWStep step = *step_;
    if (!step.apply) { return; }
    seed = adamw_seed(seed, step.update);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 > n) {
            for (; i < n; i++) { adamw_scalar(params, master, m, v, grads, step, s, i, seed); }
            continue;
        }
        AdamWParams rounded;
        for (int k = 0; k < 4; k++) {
            p[j][k] = adamw_update(p[j][k], m4[j][k], v4[j][k], g4[j][k], step, s);
            rounded.x[k] = adamw_round(p[j][k], i + k, seed);
        }
        store128(m + i, m4[j]);
        store128(v + i, v4[j]);
        if (master) { store128(master + i, p[j]); }
        *reinterpret_cast<AdamWParams*>(params + i) = rounded;
    }
}

// One step of AdamW on n elements: params, m, v (n) | master (n), or NULL if params are the only weights | grads (n)
// | step from adamw_prepare. seed 0: round params to nearest; otherwise stochastically, with new bits in every update.
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step, size_t n,
           float learning_rate, float beta1, float beta2, float eps, float weight_decay, uint32_t seed,
           cudaStream_t stream, int block_size) {
    // m, v and the weights are read and written, the gradient is read, a rounded copy of master is written
    double bytes = 20 + (master ? 8.0 + sizeof(floatX) : 2.0 * sizeof(floatX));
    Op op(stream, bytes * n, 0, "adamw");
    require(((size_t)params | (size_t)master | (size_t)m | (size_t)v | (size_t)grads) % 16 == 0);
    require(block_size <= 128);
    AdamWScalars scalars = {learning_rate, beta1, beta2, eps, weight_decay};
    size_t num_blocks = ceil_div(n, 8 * (size_t)block_size);
    adamw_kernel4<<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, step, n, scalars, seed);
    cudaCheck(cudaGetLastError());
}
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step, size_t n,
           float learning_rate, float beta1, float beta2, float eps, float weight_decay, uint32_t seed,
           cudaStream_t stream) {
    adamw(params, master, m, v, grads, step, n, learning_rate, beta1, beta2, eps, weight_decay, seed, stream, 128);
}

__global__ void adamw_round_kernel(floatX* params, const float* master, size_t n, uint32_t seed, int update) {
    seed = adamw_seed(seed, update);
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { params[i] = adamw_round(master[i], i, seed); }
}

// Recomputes params (n) as adamw left them in update number `update` | master (n), the weights that it left
void adamw_round_weights(floatX* params, const float* master, size_t n, uint32_t seed, int update,
                         cudaStream_t stream) {
    adamw_round_kernel<<<ceil_div(n, (size_t)256), 256, 0, stream>>>(params, master, n, seed, update);
    cudaCheck(cudaGetLastError());
}
// ==== end promoted: adamw ====

// The promoted kernel; block size 0 is its default.
void adamw4(floatX* params, float* master, float* m, float* v, const float* grads, const AdamWStep* step, size_t n,
            float learning_rate, float beta1, float beta2, float eps, float weight_decay, uint32_t seed,
            cudaStream_t stream, int block_size) {
    if (block_size == 0) {
        adamw(params, master, m, v, grads, step, n, learning_rate, beta1, beta2, eps, weight_decay, seed, stream);
    } else {
        adamw(params, master, m, v, grads, step, n, learning_rate, beta1, beta2, eps, weight_decay, seed, stream,
              block_size);
    }
}

typedef void (*AdamW)(floatX*, float*, float*, float*, const float*, const AdamWStep*, size_t, float, float, float,
                      float, float, uint32_t, cudaStream_t, int);

static Buffer<float> constant(Bench& b, const char* name, float value) {
    return b.input_from<float>(name, 1, [=](float* x) { *x = value; });
}

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    // shapes of an odd T check stochastic rounding, those of one batch go without a master and try a NaN loss first
    uint32_t seed = b.T % 2 ? 1337 : 0;
    bool has_master = sizeof(floatX) < 4 && b.B > 1, try_nan = b.B == 1;
    float learning_rate = 0.01f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    float inverse_loss_scale = 1.0f / 1024.0f, clip = 1.0f, norm_value = 2048.0f; // a norm of 2 becomes 1

    Buffer<floatX> params0 = b.input<floatX>("params0", n);
    Buffer<float> master0 = {}, master = {};
    Buffer<float> m0 = b.input<float>("m0", n, 0.1f), v0 = b.input_from<float>("v0", n, [=](float*x) {
        for (size_t i = 0; i < n; i++) { x[i] = 0.01f + hash_bits((uint32_t)i, 7) / 4294967296.0f; }
    });
    Buffer<float> grads = b.input<float>("grads", n, 1024.0f);
    Buffer<float> loss = constant(b, "loss", 3.0f), nan_loss = constant(b, "nan_loss", NAN);
    Buffer<float> norm = constant(b, "norm", norm_value);
    Buffer<int> num_updates0 = b.input_ids("num_updates0", 1, 10);

    float params_ulps = sizeof(floatX) == 4 ? 4.0f : 1.0f;
    Buffer<floatX> params =
        b.inout<floatX>("params", n, params0, ulps<floatX>(params_ulps, params_ulps == 4 ? 1 : 1e-3f));
    if (has_master) {
        master0 = b.input<float>("master0", n);
        master = b.inout<float>("master", n, master0, ulps<float>(4, 1));
    }
    Buffer<float> m = b.inout<float>("m", n, m0, ulps<float>(2, 0.5f)), v = b.inout<float>("v", n, v0, ulps<float>(4));
    Buffer<int> num_updates = b.inout<int>("num_updates", 1, num_updates0, {0, 0});
    Buffer<AdamWStep> step = b.scratch<AdamWStep>("step", 1);
    b.reference([=] {
        *num_updates.host = *num_updates0.host + 1;
        double grad_scale = (double)inverse_loss_scale * clip / (norm_value * inverse_loss_scale);
        adamw_cpu(has_master ? master.host : params.host, m.host, v.host, has_master ? master0.host : params0.host,
                  m0.host, v0.host, grads.host, n, grad_scale, (int)*num_updates.host, learning_rate, beta1, beta2, eps,
                  weight_decay);
        if (has_master) { memcpy(params.host, master.host, n * sizeof(float)); }
    });
    b.cost((double)n * (20 + (has_master ? 8 + sizeof(floatX) : 2 * sizeof(floatX))), 0);
    cudaStream_t stream = b.stream;
    auto kernel = [&](int number, const char* what, AdamW update, std::vector<int> block_sizes) {
        auto run = [=](float* its_loss, int bs) {
            adamw_prepare(step, num_updates, its_loss, norm, inverse_loss_scale, clip, beta1, beta2, stream);
            update(params, master, m, v, grads, step, n, learning_rate, beta1, beta2, eps, weight_decay, seed, stream,
                   bs);
        };
        b.kernel(
            number, what,
            [=](int bs) {
                if (try_nan) { run(nan_loss, bs); } // must change nothing
                run(loss, bs);
            },
            block_sizes);
    };
    kernel(1, "one thread per element", adamw1, {64, 128, 256, 512, 1024});
    kernel(2, "128-bit vectors", adamw2, {64, 128, 256, 512});
    kernel(3, "streamed", adamw3, {64, 128, 256, 512});
    kernel(4, "two vectors a thread in flight", adamw4, {0, 64, 128});
    b.promoted(4);
}

// 158 * 1024 * 768: the 124M parameters of GPT-2
int main(int argc, char** argv) {
    return bench_main(argc, argv, "adamw", declare, {158, 1024, 768, 12, 50257},
                      {{1, 1, 1, 0, 0},
                       {1, 3, 5, 0, 0},
                       {2, 3, 7, 0, 0},
                       {2, 16, 777, 0, 0},
                       {1, 18, 776, 0, 0},
                       {3, 17, 776, 0, 0}});
}
