/* muon: what the optimizer Muon does before and after newton_schulz, for num adjacent matrices (rows,cols)

   muon_prepare: m = momentum * m + g,  u = g + momentum * m,  x = u / (|u| + 1e-7)      with g = grads * grad_scale
   muon_apply:   p -= learning_rate * (0.2 sqrt(max(rows,cols)) o + weight_decay * p)
   x and o, newton_schulz's input and output, are (n,k) with n <= k: a matrix with more rows than columns is transposed.

   x (num,n,k) floatX out, o (num,n,k) floatX in | m, master (num,rows,cols) float inout, master may be NULL
   params (num,rows,cols) floatX out, inout if master is NULL | grads (num,rows,cols) float in
   The flags -B, -T and -C are num, rows and cols. Neither writes anything if the step is not applied, see adamw_prepare in adamw.cu.
   Bound: memory. prepare: m and grads are read twice, because the norm must be known before x is written, and m is
   written; the least is 12 + sizeof(floatX) bytes per value. apply: 10 + sizeof(floatX) with master.
   Constraint: rows * cols % 4 == 0.
   Error: m, master: fp32 rounding of each term. x, params: one ulp of floatX; params may be rounded stochastically.
   Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the factor 0.2 sqrt(max(rows,cols)): Liu et al. 2025,
   arXiv:2502.16982.

   Kernels (this list is written by versions.sh):
     1  norm by parts, 64x64 tiles (promoted)

   nvcc -O3 --use_fast_math muon.cu -o muon      (or: make muon)
   ./muon 1                     check kernel 1 against the CPU
   ./muon --kind 1              muon_apply
   ./muon -B 1 -T 3072          a matrix that is transposed                                         */
#include "bench.h"

#include "muon.cuh" // kernel 1

// ---- main ------------------------------------------------------------------------------------------

__global__ void muon_set_state_kernel(StepState* state, StepState value) { *state = value; }

static void declare(Bench& b) {
    bool apply = b.kinds({"muon_prepare", "muon_apply"}) == 1;
    int num = b.B, rows = b.T, cols = b.C;
    b.varies(cols % 4 ? "B" : "BT"); // rows * cols % 4 == 0
    size_t n = (size_t)num * rows * cols;
    cudaStream_t stream = b.stream;
    const float learning_rate = 0.01f, momentum = 0.95f, weight_decay = 0.1f;
    bool zero = b.cases({"normal", "all gradients 0"}) == 1;
    StepState good = {}, bad = {};
    good.applied = 1, good.grad_scale = 1.0f / 1024, good.num_updates = 5;
    Buffer<StepState> state = b.scratch<StepState>("state", 1);
    // a step that is not applied changes nothing, then one that is
    auto twice = [=](std::function<void()> launch) {
        for (const StepState& s : {bad, good}) {
            muon_set_state_kernel<<<1, 1, 0, stream>>>(state, s);
            cudaCheck(cudaGetLastError());
            launch();
        }
    };
    float rms = 1.0f / sqrtf((float)rows * cols);
    if (!apply) {
        Buffer<float> m0 = b.input<float>("m0", n, zero ? 0.0f : 1.0f),
                      grads = b.input<float>("grads", n, zero ? 0.0f : 1024.0f);
        Buffer<float> m = b.inout<float>("m", n, m0, ulps<float>(2, 1.0f));
        Buffer<floatX> x = b.output<floatX>("x", n, ulps<floatX>(sizeof(floatX) == 4 ? 16.0f : 1.0f, rms));
        Buffer<float> scratch = b.scratch<float>("scratch", muon_prepare_scratch(num));
        b.reference(
            [=] { muon_prepare_cpu(x.host, m.host, m0.host, grads.host, num, rows, cols, 1.0 / 1024, momentum); });
        b.cost((12.0 + sizeof(floatX)) * n, 0);
        b.kernel(
            1, "norm by parts, 64x64 tiles",
            [=](int) { twice([=] { muon_prepare(x, m, scratch, grads, state, num, rows, cols, momentum, stream); }); },
            {0});
    } else {
        bool has_master = sizeof(floatX) < 4;
        Buffer<floatX> params0 = b.input<floatX>("params0", n),
                       o = b.input<floatX>("o", n, 1.0f / sqrtf((float)std::max(rows, cols)));
        Buffer<floatX> params =
            b.inout<floatX>("params", n, params0, ulps<floatX>(sizeof(floatX) == 4 ? 4.0f : 1.0f, 1e-3f));
        Buffer<float> master0 = {}, master = {};
        if (has_master) {
            master0 = b.input<float>("master0", n);
            master = b.inout<float>("master", n, master0, ulps<float>(4, 1.0f));
        }
        b.reference([=] {
            float* new_params = has_master ? master.host : params.host;
            muon_apply_cpu(new_params, has_master ? master0.host : params0.host, o.host, num, rows, cols, learning_rate,
                           weight_decay);
            if (has_master) { memcpy(params.host, master.host, n * sizeof(float)); }
        });
        b.cost(((has_master ? 8.0 : sizeof(floatX)) + 2 * sizeof(floatX)) * n, 0);
        b.kernel(1, "64x64 tiles",
                 [=](int) {
                     twice([=] {
                         muon_apply(params, master, o, state, num, rows, cols, learning_rate, weight_decay, 0, 0,
                                    stream);
                     });
                 },
                 {0});
        if (!std::is_same<floatX, __nv_bfloat16>::value) { return b.promoted(1); }
        b.property("stochastic rounding", [=] {
            return bench_stochastic_rounding([=](uint32_t seed, int num_updates) {
                StepState s = good;
                s.num_updates = num_updates;
                muon_set_state_kernel<<<1, 1, 0, stream>>>(state, s);
                return bench_round_weights([=](floatX* params, float* master, float* zeros, size_t n) {
                    int num = 2, rows = 512, cols = (int)n / (num * rows);
                    muon_apply(params, master, (floatX*)zeros, state, num, rows, cols, learning_rate, weight_decay,
                               seed, 0, stream);
                });
            });
        });
    }
    b.promoted(1);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "muon", declare, {4, 768, 768, 12, 50257},
                      {{1, 1, 8},
                       {2, 8, 1},
                       {3, 24, 16},
                       {2, 70, 136},
                       {1, 200, 72},
                       with_kind(1, {3, 24, 16, 0, 0}),
                       with_kind(1, {2, 70, 136, 0, 0}),
                       with_kind(1, {1, 200, 72, 0, 0})});
}
