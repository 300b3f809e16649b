/* adamw: one AdamW update of a range of the parameters, elementwise
   adamw_prepare: decides before the update whether the step is applied, and computes the factors that adamw needs

   m = beta1 * m + (1 - beta1) * g,  v = beta2 * v + (1 - beta2) * g^2,  with g = grads * grad_scale
   p -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p)

   params (n) floatX out, inout if master is NULL | master (n) float inout or NULL | m, v (n) float inout
   grads (n) float in | state (1) StepState in device memory, after adamw_prepare
   Bound: memory. m, v and master are read and written, grads are read, params are written: 30*n bytes for 16-bit params
   with master, 28*n for fp32. Constraint: pointers aligned to 16 bytes; any n.
   Error of m, v, master: a few fp32 ulps (square root and division of --use_fast_math are accurate to 2 ulps, denormals
   are flushed to 0). Error of params: one ulp of floatX, rounded to nearest or stochastically.
   Source: Loshchilov and Hutter 2019, arXiv:1711.05101; dynamic loss scale: Micikevicius et al. 2018, arXiv:1710.03740.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  128-bit vectors, cached
     3  128-bit vectors, streamed (evict-first) (slower than 2)
     4  two vectors per thread in flight (promoted)

   nvcc -O3 --use_fast_math adamw.cu -o adamw      (or: make adamw)
   ./adamw 4      check kernel 4 against the CPU and sweep its block sizes
   ./adamw        every kernel, side by side                                         */
#include "../../llmc/adamw_state.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"

#include "adamw.cuh" // kernel 4

// ---- kernel 1: one thread per element --------------------------------------------------------------

__global__ void adamw_kernel1(floatX* params, float* master, float* m, float* v, const float* grads,
                              const StepState* state, size_t n, AdamW o, uint32_t seed) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && state->applied) {
        adamw_scalar(params, master, m, v, grads, *state, o, i, adamw_seed(seed, state->num_updates));
    }
}

void adamw1(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
            const AdamW& optimizer, uint32_t seed, cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div(n, (size_t)block_size);
    adamw_kernel1<<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, state, n, optimizer, seed);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: four elements per thread in 128-bit vectors, cached as usual ----
// ---- kernel 3: kernel 2 with streaming (evict-first) loads and stores ----

template <bool streamed> __device__ inline f128 adamw_load(const float* p) {
    return streamed ? load128cs(p) : load128(p);
}
template <bool streamed> __device__ inline void adamw_store(float* p, const f128& x) {
    streamed ? store128cs(p, x) : store128(p, x);
}

template <bool streamed> __global__ void __launch_bounds__(512)
    adamw_kernel3(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state,
                  size_t n, AdamW o, uint32_t seed) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    StepState s = *state;
    if (!s.applied) { return; }
    seed = adamw_seed(seed, s.num_updates);
    if (i + 4 > n) {
        for (; i < n; i++) { adamw_scalar(params, master, m, v, grads, s, o, i, seed); }
        return;
    }
    f128 p, m4 = adamw_load<streamed>(m + i), v4 = adamw_load<streamed>(v + i), g4 = adamw_load<streamed>(grads + i);
    if (master) {
        p = adamw_load<streamed>(master + i);
    } else {
        x4 old = *reinterpret_cast<const x4*>(params + i);
        for (int k = 0; k < 4; k++) { p[k] = (float)old[k]; }
    }
    x4 rounded;
    for (int k = 0; k < 4; k++) {
        p[k] = adamw_update(p[k], m4[k], v4[k], g4[k], s, o);
        rounded[k] = adamw_round(p[k], i + k, seed);
    }
    adamw_store<streamed>(m + i, m4);
    adamw_store<streamed>(v + i, v4);
    if (master) { adamw_store<streamed>(master + i, p); }
    *reinterpret_cast<x4*>(params + i) = rounded; // not streamed: the next forward pass reads it
}

template <bool streamed> void adamw3(floatX* params, float* master, float* m, float* v, const float* grads,
                                     const StepState* state, size_t n, const AdamW& optimizer, uint32_t seed,
                                     cudaStream_t stream, int block_size) {
    size_t num_blocks = ceil_div(n, 4 * (size_t)block_size);
    adamw_kernel3<streamed>
        <<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, state, n, optimizer, seed);
    cudaCheck(cudaGetLastError());
}

void adamw4(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
            const AdamW& optimizer, uint32_t seed, cudaStream_t stream, int block_size) {
    adamw(params, master, m, v, grads, state, n, optimizer, seed, {stream, block_size});
}

__global__ void set_state_kernel(StepState* state, StepState value) { *state = value; }
__global__ void get_verdict_kernel(float* verdict, const StepState* s) { // (5)
    verdict[0] = s->applied, verdict[1] = s->num_updates, verdict[2] = s->norm, verdict[3] = s->loss_scale;
    verdict[4] = s->dloss;
}

typedef void Update(floatX*, float*, float*, float*, const float*, const StepState*, size_t, const AdamW&, uint32_t,
                    cudaStream_t, int);

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    // without master weights some steps are tried, too, that must be skipped
    int kind = b.kinds({"master weights", "master weights, stochastic rounding", "no master weights",
                        "no master weights, stochastic rounding"});
    uint32_t seed = kind % 2 == 1 ? 1337 : 0;
    bool has_master = sizeof(floatX) < 4 && kind < 2, try_bad_steps = kind >= 2;
    const AdamW optimizer = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    const int updates_before = 4;
    StepState start = {}; // the true norm is 2048 / 1024 = 2; clipping scales it to 1
    start.loss = 3.0f, start.scaled_norm = 2048.0f, start.loss_scale = 1024.0f, start.dloss = 8.0f;
    start.num_updates = updates_before;

    // without gradients and moments an update divides 0 by eps
    bool zero = b.cases({"normal", "no moments, every second gradient 0"}) == 1;
    Buffer<floatX> params0 = b.input<floatX>("params0", n);
    Buffer<float> master0 = {}, master = {};
    Buffer<float> m0 = b.input<float>("m0", n, zero ? 0.0f : 0.1f), v0 = b.input_from<float>("v0", n, [=](float*x) {
        for (size_t i = 0; i < n; i++) { x[i] = zero ? 0.0f : 0.01f + hash_bits((uint32_t)i, 7) / 4294967296.0f; }
    });
    uint32_t grads_seed = hash_bits(b.state.num_inputs, b.state.seed);
    Buffer<float> grads = b.input_from<float>("grads", n, [=](float* x) {
        bench_fill_normal(x, n, grads_seed, 1024.0f, 0.0f);
        for (size_t i = 0; zero && i < n; i += 2) { x[i] = 0.0f; }
    });

    float params_ulps = sizeof(floatX) == 4 ? 4.0f : 1.0f;
    Buffer<floatX> params =
        b.inout<floatX>("params", n, params0, ulps<floatX>(params_ulps, params_ulps == 4 ? 1 : 1e-3f));
    if (has_master) {
        master0 = b.input<float>("master0", n);
        master = b.inout<float>("master", n, master0, ulps<float>(4, 1));
    }
    Buffer<float> m = b.inout<float>("m", n, m0, ulps<float>(2, 0.5f)), v = b.inout<float>("v", n, v0, ulps<float>(4));
    Buffer<StepState> state = b.scratch<StepState>("state", 1);
    Buffer<float> good = b.output<float>("verdict", 5, {0, 0}), overflow = {};
    if (try_bad_steps) { overflow = b.output<float>("verdict on an overflow", 5, {0, 0}); }
    b.reference([=] {
        float good_verdict[] = {1, updates_before + 1, 2, 1024, 8};
        float halved = IS_FP16 ? 0.5f : 1.0f,
              overflow_verdict[] = {0, updates_before, INFINITY, 1024 * halved, 8 * halved};
        memcpy(good.host, good_verdict, sizeof(good_verdict));
        if (try_bad_steps) { memcpy(overflow.host, overflow_verdict, sizeof(overflow_verdict)); }
        adamw_cpu(has_master ? master.host : params.host, m.host, v.host, has_master ? master0.host : params0.host,
                  m0.host, v0.host, grads.host, n, 1.0 / 2048.0, updates_before + 1, optimizer.learning_rate,
                  optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay);
        if (has_master) { memcpy(params.host, master.host, n * sizeof(float)); }
    });
    b.cost((double)n * (20 + (has_master ? 8 + sizeof(floatX) : 2 * sizeof(floatX))), 0);
    cudaStream_t stream = b.stream;
    auto kernel = [&](int number, const char* what, Update* update, std::vector<int> block_sizes) {
        auto run = [=](float loss, float scaled_norm, bool skip, float* verdict, int bs) {
            StepState before = start;
            before.loss = loss, before.scaled_norm = scaled_norm;
            set_state_kernel<<<1, 1, 0, stream>>>(state, before);
            adamw_prepare(state, optimizer, skip, false, stream);
            update(params, master, m, v, grads, state, n, optimizer, seed, stream, bs);
            get_verdict_kernel<<<1, 1, 0, stream>>>(verdict, state);
            cudaCheck(cudaGetLastError());
        };
        b.kernel(
            number, what,
            [=](int bs) {
                if (try_bad_steps) { // a skipped step must not change weights or moments
                    run(NAN, start.scaled_norm, false, good, bs);
                    run(start.loss, start.scaled_norm, true, good, bs);
                    run(start.loss, INFINITY, false, overflow, bs);
                }
                run(start.loss, start.scaled_norm, false, good, bs);
            },
            block_sizes);
        if (!std::is_same<floatX, __nv_bfloat16>::value || kind != 1) { return; }
        b.property("stochastic rounding", [=] {
            return bench_stochastic_rounding([=](uint32_t seed, int num_updates) {
                StepState s = {};
                s.applied = 1, s.grad_scale = s.inverse_bias1 = s.inverse_bias2 = 1.0f, s.num_updates = num_updates;
                set_state_kernel<<<1, 1, 0, stream>>>(state, s);
                return bench_round_weights([=](floatX* params, float* master, float* zeros, size_t n) {
                    update(params, master, zeros, zeros + n, zeros + 2 * n, state, n, optimizer, seed, stream, 128);
                });
            });
        });
    };
    kernel(1, "one thread per element", adamw1, {64, 128, 256, 512, 1024});
    kernel(2, "128-bit vectors, cached", adamw3<false>, {64, 128, 256, 512});
    kernel(3, "128-bit vectors, streamed (evict-first)", adamw3<true>, {64, 128, 256, 512});
    kernel(4, "two vectors per thread in flight", adamw4, {bench_tunable("adamw")});
    b.promoted(4);
}

// 158 * 1024 * 768: the 124M parameters of GPT-2
int main(int argc, char** argv) {
    return bench_main(argc, argv, "adamw", declare, {158, 1024, 768, 12, 50257},
                      {with_kind(3, {1, 1, 1, 0, 0}),
                       with_kind(3, {1, 3, 5, 0, 0}),
                       with_kind(1, {2, 3, 7, 0, 0}),
                       {2, 16, 777, 0, 0},
                       with_kind(2, {1, 18, 776, 0, 0}),
                       with_kind(1, {3, 17, 776, 0, 0})});
}
