/* matmul_adamw: a product of the forward pass, and the update of later layers by AdamW, side by side

   out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC); N = B*T, OC = V
   AdamW on layers 1 to LAYERS - 1 of a model with C channels, as adamw.cu: params, master, m, v inout, grads in

   The product is bound by tensor cores, the update by memory: what is the time of both? While a product of gemm.cuh runs, three
   warps of each block have nothing to do. They read no weight that the product reads, so they can update those of later
   layers. A training step ends with the update, and the next one begins with the forward pass, so the program does this.
   Bound: the longer of the two, 2*N*C*OC FLOPs or 30 bytes per updated value.
   Constraint: C % 8 == 0, OC % 8 == 0, pointers aligned to 16 bytes.
   Error: as matmul_forward and adamw; values do not depend on who computes them.

   Kernels (this list is written by versions.sh):
     1  matmul_forward, then adamw
     2  matmul_forward and adamw on two streams
     3  AdamW in idle warps of the product, what is left by a kernel (best)

   nvcc -O3 --use_fast_math matmul_adamw.cu -lcublasLt -o matmul_adamw      (or: make matmul_adamw)
   ./matmul_adamw 3      check kernel 3 against the CPU and time it
   ./matmul_adamw        every kernel, side by side                                                              */
#include "adamw.cuh"
#include "bench.h"
#include "gemm_adamw.cuh"
#include "matmul_forward.cuh"

constexpr int LAYERS = 4;

struct MatmulAdamW {
    floatX* out;
    const floatX *inp, *weight, *bias;
    int N, C, OC;
    DeferredUpdate update; // of layers 1 to LAYERS - 1
    AdamW optimizer;
    void product(cudaStream_t stream) const { matmul_forward(out, {NULL}, inp, weight, bias, NULL, N, C, OC, stream); }
    // in one launch per layer and kind of its tensors
    void whole_update(cudaStream_t stream) const {
        const DeferredUpdate& w = update;
        for (int layer = 1; layer < LAYERS; layer++) {
            for (int vectors = 0; vectors < 2; vectors++) {
                size_t at = layer * ((size_t)w.matrices + w.vectors) + (vectors ? w.matrices : 0);
                AdamW o = optimizer;
                if (vectors) { o.weight_decay = 0.0f; }
                uint32_t seed = w.seed == 0 ? 0 : hash_bits(1 + 2 * layer + vectors, w.seed) | 1;
                adamw(w.params + at, w.master ? w.master + at : NULL, w.m + at, w.v + at, w.grads + at, w.state,
                      vectors ? w.vectors : w.matrices, o, seed, stream);
            }
        }
    }
};

// ---- kernel 1: one after the other ----

void matmul_adamw1(const MatmulAdamW& f, cudaStream_t stream) {
    f.whole_update(stream);
    f.product(stream);
}

// ---- kernel 2: on two streams: blocks of the update run where the product's have not come yet, or have ended ----

void matmul_adamw2(const MatmulAdamW& f, cudaStream_t side, const cudaEvent_t (&events)[2], cudaStream_t stream) {
    cudaCheck(cudaEventRecord(events[0], stream));
    cudaCheck(cudaStreamWaitEvent(side, events[0], 0));
    f.product(stream);
    f.whole_update(side);
    cudaCheck(cudaEventRecord(events[1], side));
    cudaCheck(cudaStreamWaitEvent(stream, events[1], 0));
}

// ---- kernel 3: the idle warps of the product's blocks, see DeferredUpdateWork in gemm_adamw.cuh; a kernel updates the rest ----

#if !defined(ENABLE_FP32)
void matmul_adamw3(const MatmulAdamW& f, cudaStream_t stream) {
    DeferredUpdate update = f.update;
    Execution exec = stream;
    exec.update = &update;
    cudaCheck(cudaMemsetAsync(f.update.done, 0, f.update.num_workers * sizeof(int), stream));
    matmul_forward27(f.out, {NULL}, f.inp, f.weight, f.bias, NULL, f.N, f.C, f.OC, exec);
    finish_deferred_update(LAYERS, exec);
}
#endif

__global__ void set_state_kernel(StepState* state, StepState value) { *state = value; }

static void declare(Bench& b) {
    int kind = b.kinds({"nearest", "stochastic rounding"});
    b.varies("BTCV");
    if (!b.dry) { cublaslt_open(); }
    int N = b.B * b.T, C = b.C, OC = b.V, updates_before = 4;
    MatmulAdamW f = {};
    f.N = N, f.C = C, f.OC = OC;
    f.optimizer = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    f.update.matrices = 12 * C * C, f.update.vectors = 13 * C;
    size_t of_layer = (size_t)f.update.matrices + f.update.vectors, n = LAYERS * of_layer;
    f.update.seed = kind == 1 ? 1337 : 0;
    bool has_master = sizeof(floatX) < 4;
    StepState start = {}; // the true norm is 2048 / 1024 = 2; clipping scales it to 1
    start.loss = 3.0f, start.scaled_norm = 2048.0f, start.loss_scale = 1024.0f, start.num_updates = updates_before;

    Buffer<floatX> inp = b.input<floatX>("inp", (size_t)N * C);
    Buffer<floatX> weight = b.input<floatX>("weight", (size_t)OC * C, 1.0f / sqrtf((float)C));
    Buffer<floatX> bias = b.input<floatX>("bias", OC);
    Buffer<floatX> params0 = b.input<floatX>("params0", n);
    Buffer<float> master0 = {}, master = {}, m0 = b.input<float>("m0", n, 0.1f);
    Buffer<float> v0 = b.input_from<float>("v0", n, [=](float* x) {
        for (size_t i = 0; i < n; i++) { x[i] = 0.01f + hash_bits((uint32_t)i, 7) / 4294967296.0f; }
    });
    Buffer<float> grads = b.input<float>("grads", n, 1024.0f);
    Tolerance product = ulps<floatX>(1, 0.0f);
    product.atol = 16 * ulp_of<float>() * 0.64f * sqrtf((float)C);
    Buffer<floatX> out = b.output<floatX>("out", (size_t)N * OC, product);
    float params_ulps = sizeof(floatX) == 4 ? 4.0f : 1.0f;
    Buffer<floatX> params =
        b.inout<floatX>("params", n, params0, ulps<floatX>(params_ulps, params_ulps == 4 ? 1 : 1e-3f));
    if (has_master) {
        master0 = b.input<float>("master0", n);
        master = b.inout<float>("master", n, master0, ulps<float>(4, 1));
    }
    Buffer<float> m = b.inout<float>("m", n, m0, ulps<float>(2, 0.5f)), v = b.inout<float>("v", n, v0, ulps<float>(4));
    Buffer<StepState> state = b.scratch<StepState>("state", 1);
    int num_workers = b.dry ? 1 : deferred_update_workers();
    Buffer<int> done = b.scratch<int>("done", num_workers);

    std::vector<size_t> rows = b.sample(N, 2.0 * C * OC);
    MatmulAdamW shape = f;
    b.reference([=] {
        std::vector<float> x = rows_of(inp.host, rows, C), y(rows.size() * OC);
        matmul_forward_cpu(y.data(), x.data(), weight.host, bias.host, NULL, rows.size(), C, OC);
        put_rows(out.host, y, rows, OC);
        float* p = has_master ? master.host : params.host;
        const float* p0 = has_master ? master0.host : params0.host;
        size_t bytes = of_layer * sizeof(float); // layer 0 stays as it is
        memcpy(params.host, params0.host, bytes), memcpy(m.host, m0.host, bytes), memcpy(v.host, v0.host, bytes);
        if (has_master) { memcpy(master.host, master0.host, bytes); }
        for (int layer = 1; layer < LAYERS; layer++) {
            for (int vectors = 0; vectors < 2; vectors++) {
                size_t at = layer * of_layer + (vectors ? shape.update.matrices : 0);
                size_t count = vectors ? shape.update.vectors : shape.update.matrices;
                const AdamW& o = shape.optimizer;
                adamw_cpu(p + at, m.host + at, v.host + at, p0 + at, m0.host + at, v0.host + at, grads.host + at, count,
                          1.0 / 2048.0, updates_before + 1, o.learning_rate, o.beta1, o.beta2, o.eps,
                          vectors ? 0.0f : o.weight_decay);
                if (has_master) { memcpy(params.host + at, p + at, count * sizeof(float)); }
            }
        }
    });
    double values = (double)(LAYERS - 1) * (double)of_layer;
    b.cost((double)sizeof(floatX) * ((double)N * C + (double)OC * C + (double)N * OC) +
               values * (20 + (has_master ? 8 + sizeof(floatX) : 2 * sizeof(floatX))),
           2.0 * N * C * OC);
    f.out = out, f.inp = inp, f.weight = weight, f.bias = bias;
    DeferredUpdate& w = f.update;
    w.params = params, w.master = master, w.m = m, w.v = v, w.grads = grads, w.state = state;
    w.num_workers = num_workers, w.done = done;
    w.first = w.chunks_of_layer(), w.last = LAYERS * w.chunks_of_layer();
    cudaStream_t stream = b.stream;
    auto kernel = [&](int number, const char* what, auto run, int arch) {
        b.kernel(
            number, what,
            [=](int) {
                set_state_kernel<<<1, 1, 0, stream>>>(state, start);
                adamw_prepare(state, f.optimizer, false, true, stream);
                run(f);
            },
            {0}, arch);
        if (!std::is_same<floatX, __nv_bfloat16>::value || kind != 1) { return; }
        std::vector<size_t> pieces;
        for (size_t at = 0; at < n - of_layer; at += of_layer) {
            pieces.push_back(at), pieces.push_back(at + f.update.matrices);
        }
        b.property("stochastic rounding", [=] {
            return bench_stochastic_rounding(
                [=](uint32_t seed, int num_updates) {
                    MatmulAdamW other = f;
                    StepState s = start;
                    other.update.seed = seed, s.num_updates = num_updates - 1;
                    set_state_kernel<<<1, 1, 0, stream>>>(state, s);
                    adamw_prepare(state, f.optimizer, false, true, stream);
                    run(other); // layer 0 stays as it is
                    size_t values = n - of_layer;
                    return BenchRounded{bench_download(master + of_layer, values),
                                        bench_download(params + of_layer, values)};
                },
                pieces);
        });
    };
    kernel(
        1, "matmul_forward, then adamw", [=](const MatmulAdamW& f) { matmul_adamw1(f, stream); }, 0);
    static cudaStream_t side;
    static cudaEvent_t events[2];
    if (!b.dry && !side) {
        cudaCheck(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
        for (cudaEvent_t& event : events) { cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    }
    kernel(
        2, "matmul_forward and adamw on two streams",
        [=](const MatmulAdamW& f) { matmul_adamw2(f, side, events, stream); }, 0);
#if !defined(ENABLE_FP32)
    kernel(
        3, "AdamW in idle warps of the product, what is left by a kernel",
        [=](const MatmulAdamW& f) { matmul_adamw3(f, stream); }, -90);
    b.best(3);
#else
    b.best(1);
#endif
    b.matrix_rate(cublaslt_matrix_rate);
}

// 65,536 tokens, the first product of the MLP
int main(int argc, char** argv) {
    return bench_main(argc, argv, "matmul_adamw", declare, {64, 1024, 768, 12, 3072},
                      {{1, 1, 8, 0, 8},
                       with_kind(1, {1, 300, 64, 0, 200}),
                       {2, 130, 72, 0, 136},
                       with_kind(1, {1, 640, 128, 0, 1000})});
}
