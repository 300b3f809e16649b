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

__global__ void adamw_prepare_kernel(StepState* s, AdamW o, bool skip, bool later) {
    s->optimizer = o, s->is_later = later;
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
// skipped even if loss and norm are finite. later: layers are updated during the next forward pass.
void adamw_prepare(StepState* state, const AdamW& optimizer, bool skip, bool later, cudaStream_t stream) {
    Op op(stream, sizeof(StepState), 0, "step verdict");
    adamw_prepare_kernel<<<1, 1, 0, stream>>>(state, optimizer, skip, later);
    cudaCheck(cudaGetLastError());
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
// ==== end promoted: adamw ====

#ifndef PROMOTED_ONLY // muon.cu includes this file for adamw_round()
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

#endif

// ==== promoted: adamw ====
// ---- kernel 4: two groups of four elements per thread, all of their loads in flight at once ----

__global__ void __launch_bounds__(128)
    adamw_kernel4(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state,
                  size_t n, AdamW o, uint32_t seed) {
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
            x4 old = *reinterpret_cast<const x4*>(params + i);
            for (int k = 0; k < 4; k++) { p[j][k] = (float)old[k]; }
        }
    }
    StepState s = *state;
    if (!s.applied) { return; }
    seed = adamw_seed(seed, s.num_updates);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 > n) {
            for (; i < n; i++) { adamw_scalar(params, master, m, v, grads, s, o, i, seed); }
            continue;
        }
        x4 rounded;
        for (int k = 0; k < 4; k++) {
            p[j][k] = adamw_update(p[j][k], m4[j][k], v4[j][k], g4[j][k], s, o);
            rounded[k] = adamw_round(p[j][k], i + k, seed);
        }
        store128(m + i, m4[j]);
        store128(v + i, v4[j]);
        if (master) { store128(master + i, p[j]); }
        *reinterpret_cast<x4*>(params + i) = rounded;
    }
}

// ---- the update during the next forward pass, in chunks, by idle warps of its matrix products: kernel 3 of matmul_adamw.cu ----

// What a warp needs of a chunk of an AdamWLater.
struct AdamWChunk {
    size_t place; // of its piece in the arrays
    int begin, end;
    uint32_t seed;
    bool decays;
    __device__ AdamWChunk(const AdamWLater& w, int chunk, int num_updates) {
        int of_layer = w.chunks_of_layer(), of_matrices = w.chunks_of(w.matrices);
        int layer = chunk / of_layer, i = chunk % of_layer;
        decays = i < of_matrices;
        place = layer * ((size_t)w.matrices + w.vectors) + (decays ? 0 : w.matrices);
        begin = (decays ? i : i - of_matrices) * AdamWLater::CHUNK;
        end = min(begin + AdamWLater::CHUNK, decays ? w.matrices : w.vectors);
        // pieces are numbered as in llmc/layout.cuh
        seed = w.seed == 0 ? 0 : adamw_seed(hash_bits(1 + 2 * layer + !decays, w.seed) | 1, num_updates);
    }
};

// Four values of a chunk, i to i + 3 of its piece.
__device__ inline void adamw_values(const AdamWLater& w, const StepState& s, const AdamW& o, const AdamWChunk& c,
                                    int i) {
    size_t at = c.place + i;
    f128 p, m4 = load128(w.m + at), v4 = load128(w.v + at), g4 = load128(w.grads + at);
    if (w.master) {
        p = load128(w.master + at);
    } else {
        x4 old = *reinterpret_cast<const x4*>(w.params + at);
        for (int k = 0; k < 4; k++) { p[k] = (float)old[k]; }
    }
    x4 rounded;
    for (int k = 0; k < 4; k++) {
        p[k] = adamw_update(p[k], m4[k], v4[k], g4[k], s, o); // four at once: rounding has branches
    }
    for (int k = 0; k < 4; k++) { rounded[k] = adamw_round(p[k], i + k, c.seed); }
    store128(w.m + at, m4), store128(w.v + at, v4);
    if (w.master) { store128(w.master + at, p); }
    *reinterpret_cast<x4*>(w.params + at) = rounded;
}

// The work of a worker, until it has no chunk left or stop() is true for lane 0. All lanes of the warp call it.
template <class Stop> __device__ inline void adamw_work(const AdamWLater& w, int worker, const Stop& stop) {
    const StepState s = *w.state;
    if (!s.is_later || !s.applied || worker >= w.num_workers) { return; }
    int lane = threadIdx.x % 32;
    int chunk = max(w.done[worker], ceil_div(w.first - worker, w.num_workers) * w.num_workers + worker);
#pragma unroll 1
    while (chunk < w.last && !__shfl_sync(0xFFFFFFFFu, stop(), 0)) {
        AdamWChunk c(w, chunk, s.num_updates);
        chunk += w.num_workers;
        if (chunk < w.last && lane < 4) { // the next one's values
            AdamWChunk next(w, chunk, s.num_updates);
            const float* from = lane == 0 ? w.m : lane == 1 ? w.v : lane == 2 ? w.grads : w.master;
            if (from) { bulk_prefetch(from + next.place + next.begin, (next.end - next.begin) * (int)sizeof(float)); }
        }
        AdamW o = s.optimizer;
        if (!c.decays) { o.weight_decay = 0.0f; }
#pragma unroll 2 // 1% faster for product and update
        for (int i = c.begin + 4 * lane; i < c.end; i += 128) { adamw_values(w, s, o, c, i); }
    }
    __syncwarp();
    if (lane == 0) { w.done[worker] = chunk; }
}

// As work beside the products of gemm.cuh.
struct AdamWBeside : AdamWLater {
    static constexpr bool WORKS = true;
    static constexpr int REGISTERS = 56; // nothing spills, neither here nor in the consumers, which then have 224
    __device__ void run(int warp, uint64_t* loaded) const {
        adamw_work(*this, blockIdx.x * 3 + warp,
                   [=] { return threadIdx.x % 32 == 0 && mbarrier_has_completed(loaded, 0); });
    }
};

// A warp per chunk.
__global__ void __launch_bounds__(256) adamw_finish_kernel(const __grid_constant__ AdamWLater w) {
    int chunk = w.first + blockIdx.x * 8 + threadIdx.x / 32;
    grid_launch_dependents();
    grid_wait_dependency();
    const StepState s = *w.state;
    if (!s.is_later || !s.applied || chunk >= w.last || chunk < w.done[chunk % w.num_workers]) { return; }
    AdamWChunk c(w, chunk, s.num_updates);
    AdamW o = s.optimizer;
    if (!c.decays) { o.weight_decay = 0.0f; }
#pragma unroll
    for (int k = 0; k < AdamWLater::CHUNK / 128; k++) {
        int i = c.begin + 4 * (threadIdx.x % 32) + 128 * k;
        if (i < c.end) { adamw_values(w, s, o, c, i); }
    }
}

// Ends the update that the forward pass has taken along for the layers before `layer`: their weights may be read afterwards.
void adamw_finish(int layer, cudaStream_t stream) {
    AdamWLater w = adamw_later();
    w.last = std::min(w.last, layer * w.chunks_of_layer());
    if (!w.is_open()) { return; }
    Op op(stream, 0, 0, "adamw, rest"); // idle warps may have updated most of the values, or all
    launch_early(adamw_finish_kernel, dim3(ceil_div(w.last - w.first, 8)), dim3(256), 0, stream, w);
    adamw_later().first = w.last;
    if (!adamw_later().is_open()) { cudaCheck(cudaMemsetAsync(&w.state->is_later, 0, sizeof(int), stream)); }
}

// params (n) floatX; master (n) float, or NULL if params is the only copy of the weights; m, v (n) | grads (n);
// state (1), filled in by adamw_prepare. seed 0: round params to nearest; otherwise stochastically, with new random
// bits in every update.
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
           const AdamW& optimizer, uint32_t seed, cudaStream_t stream, int block_size) {
    // Bytes per element: 20 because m and v are read and written and grads are read. With master, master is read and
    // written and params are written; without master, params are read and written.
    double bytes = 20 + (master ? 8.0 + sizeof(floatX) : 2.0 * sizeof(floatX));
    Op op(stream, bytes * n, 0, "adamw");
    require(((size_t)params | (size_t)master | (size_t)m | (size_t)v | (size_t)grads) % 16 == 0);
    require(block_size <= 128);
    size_t num_blocks = ceil_div(n, 8 * (size_t)block_size);
    adamw_kernel4<<<num_blocks, block_size, 0, stream>>>(params, master, m, v, grads, state, n, optimizer, seed);
    cudaCheck(cudaGetLastError());
}
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
           const AdamW& optimizer, uint32_t seed, cudaStream_t stream) {
    int config = tuned_config("adamw", n, 1, 128);
    adamw(params, master, m, v, grads, state, n, optimizer, seed, stream, config);
}

__global__ void adamw_round_kernel(floatX* params, const float* master, size_t n, uint32_t seed, int update) {
    seed = adamw_seed(seed, update);
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { params[i] = adamw_round(master[i], i, seed); }
}

// Recomputes params (n) as they were after update number `update`, from the master weights (n) after that update.
void adamw_round_weights(floatX* params, const float* master, size_t n, uint32_t seed, int update,
                         cudaStream_t stream) {
    adamw_round_kernel<<<ceil_div(n, (size_t)256), 256, 0, stream>>>(params, master, n, seed, update);
    cudaCheck(cudaGetLastError());
}
// ==== end promoted: adamw ====

#ifndef PROMOTED_ONLY
// The promoted launcher; block size 0 is its default.
void adamw4(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
            const AdamW& optimizer, uint32_t seed, cudaStream_t stream, int block_size) {
    if (block_size == 0) {
        adamw(params, master, m, v, grads, state, n, optimizer, seed, stream);
    } else {
        adamw(params, master, m, v, grads, state, n, optimizer, seed, stream, block_size);
    }
}

__global__ void set_state_kernel(StepState* state, StepState value) { *state = value; }
__global__ void get_verdict_kernel(float* verdict, const StepState* s) { // (5)
    verdict[0] = s->applied, verdict[1] = s->num_updates, verdict[2] = s->norm, verdict[3] = s->loss_scale;
    verdict[4] = s->dloss;
}

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
    typedef void Update(floatX*, float*, float*, float*, const float*, const StepState*, size_t, const AdamW&, uint32_t,
                        cudaStream_t, int);
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
#endif
