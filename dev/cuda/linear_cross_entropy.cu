/* linear_cross_entropy: the head of the model, its loss, and both gradients: logits = inp weight^T, losses = cross-entropy

   losses (N) float out = log(sum(exp(logits))) - logits[target] per row, over the first V of Vp columns
   dinp (N,C) floatX out = dlogits weight | dweight (Vp,C) float out = dlogits^T inp, or inout if it accumulates, where
   dlogits (N,Vp) = (softmax(logits) - onehot(target)) * dloss, and 0 from column V on
   inp (N,C) floatX inout, overwritten by the backward pass | weight (Vp,C) floatX in, finite from row V on, too
   targets (N) int in, 0..V-1 | dloss (1) float in; N = B*T
   Bound: compute, 6*N*C*Vp FLOPs. Constraint: C % 8 == 0, Vp % 8 == 0, 1 <= V <= Vp, pointers aligned to 16 bytes.
   Error: kernel 1 rounds the logits to floatX, and so the losses are off by up to an ulp of floatX of the largest logits; in
   kernel 2 the losses have the error of a logit in fp32. The gradients have that of dlogits rounded to floatX; kernel 2 also
   rounds inp times a factor, and dinp twice. Limits of kernel 2: bf16 only; a logit counts as at most 97 larger than the
   target's, and as exp(logit) = 0 if it is 60 smaller.
   If a row of logits holds a NaN, its loss is NaN. An infinite logit: NaN with kernel 1; in kernel 2 it is at the limit, and
   NaN or infinite in the gradients.
   Tuned: nothing; the products choose by themselves.
   Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax). Two others that save memory, which this one does not:
   Wijmans et al. 2024, arXiv:2411.09009, do not store the logits and compute them again; Hsu et al. 2024, arXiv:2410.10989,
   go through the tokens in pieces.

   Kernels (this list is written by versions.sh):
     1  the product, fused_classifier, the products of the backward pass
     2  softmax begins in the product's epilogue, row factors applied later (promoted)

   nvcc -O3 --use_fast_math linear_cross_entropy.cu -lcublasLt -o linear_cross_entropy      (or: make linear_cross_entropy)
   ./linear_cross_entropy 2      check kernel 2 against the CPU and time it
   ./linear_cross_entropy        every kernel, side by side                                         */
#include "bench.h"
#include "matmul_backward.cuh"

#include "linear_cross_entropy.cuh" // kernels 1 and 2

static void declare(Bench& b) {
    b.varies("BTCV");
    int N = b.B * b.T, C = b.C, V = b.V, Vp = ceil_div(V, 128) * 128;
    if (!b.dry) { cublaslt_open(); }
    const float deviations[] = {1.0f, 10.0f, 1e-3f, 1.0f}; // of the logits
    int which =
        b.cases({"normal", "logits of some 40", "almost equal logits", "one token far above or below the others"});
    float far = which == 3 && V > 1 ? 200.0f : 1.0f, deviation = deviations[which], width = deviation / sqrtf((float)C);
    float dloss_value = 1.0f / 64;
    Buffer<floatX> inp = b.input<floatX>("inp", (size_t)N * C);
    Buffer<floatX> weight = b.input_from<floatX>("weight", (size_t)Vp * C, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, (size_t)Vp * C, seed, width, 0.0f);
        for (int k = 0; k < C; k++) { x[(size_t)(V / 2) * C + k] *= far; }
    });
    Buffer<int> targets = b.input_ids("targets", N, V);
    Buffer<float> dloss = b.input_from<float>("dloss", 1, [=](float* x) { *x = dloss_value; });
    // the error of a logit: 16 fp32 roundings at the size of the terms' absolute sum
    float logit = 16 * ulp_of<float>() * 0.64f * sqrtf((float)C) * deviation * far;
    // dlogits, inp and the result are rounded to floatX. A gradient's fp32 sum rounds 16 times; its largest terms are the targets', of
    // size dloss. Inputs reach 5 standard deviations.
    float rounding = (2 * ulp_of<floatX>() + 4 * logit + 16 * ulp_of<float>()) * 5 * dloss_value;
    Buffer<float> losses = b.output<float>("losses", N, {logit + 1e-6f, 2e-6f});
#if defined(ENABLE_FP16)
    float step = 0x1p-24f; // between the smallest numbers of fp16
#else
    float step = 0;
#endif
    Buffer<floatX> dinp =
        b.output<floatX>("dinp", (size_t)N * C, {rounding * width * far + step, 2 * ulp_of<floatX>()});
    Buffer<float> dweight = b.output<float>("dweight", (size_t)Vp * C, {rounding, 2 * ulp_of<floatX>()});
    Buffer<floatX> logits = b.scratch<floatX>("logits", (size_t)N * Vp);
    Buffer<floatX> scaled =
        b.scratch<floatX>("scaled", (size_t)N * C); // a copy of inp, which the backward pass overwrites
    size_t num = b.dry ? 0 : matmul_backward_weight_scratch(N, C, Vp);
#if defined(ENABLE_BF16)
    num = std::max(num, (size_t)N * (1 + linear_cross_entropy_tiles(Vp)));
#endif
    Buffer<float> scratch = b.scratch<float>("scratch", num);
    std::vector<size_t> rows = b.sample(N, 4.0 * C * Vp);
    b.reference([=] {
        size_t n = rows.size();
        std::vector<float> x = rows_of(inp.host, rows, C), y(n * Vp), d(n * Vp), loss(n), dx(n * C), ids(n);
        for (size_t i = 0; i < n; i++) { ids[i] = targets.host[rows[i]]; }
        matmul_forward_cpu(y.data(), x.data(), weight.host, NULL, NULL, n, C, Vp);
        for (size_t i = 0; which == 3 && i < n; i++) { // the limit of kernel 2: 97 above the target's logit
            float limit = y[i * Vp + (size_t)ids[i]] + 140.0f * logf(2.0f);
            for (int v = 0; v < V; v++) { y[i * Vp + v] = std::min(y[i * Vp + v], limit); }
        }
        fused_classifier_cpu(d.data(), loss.data(), y.data(), ids.data(), dloss_value, (int)n, V, Vp);
        matmul_backward_input_cpu(dx.data(), d.data(), weight.host, NULL, n, C, Vp);
        put_rows(losses.host, loss, rows, 1);
        put_rows(dinp.host, dx, rows, C);
        // a row of dweight needs all tokens: it is compared where all are computed
        if (n == (size_t)N) { matmul_backward_weight_cpu(dweight.host, NULL, d.data(), inp.host, N, C, Vp); }
    });
    cudaStream_t stream = b.stream;
    b.cost(sizeof(floatX) * (2.0 * N * C + (double)Vp * C) + sizeof(float) * (double)Vp * C, 6.0 * N * C * Vp);
    b.matrix_rate(cublaslt_matrix_rate);
    auto both = [=](auto forward, auto backward) {
        LinearCrossEntropy g = {logits, losses, scratch, scaled, weight, targets, dloss, N, C, V, Vp};
        cudaCheck(cudaMemcpyAsync(scaled, inp, (size_t)N * C * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        bool after_event = true; // a copy is no kernel that could let the next one start early
        Execution exec = stream;
        exec.after_event = &after_event;
        forward(g, exec);
        backward(g, (floatX*)dinp, (float*)dweight, false, exec);
    };
    if (which != 3) { // kernel 1 has no limit, so it would differ from the reference
        b.kernel(1, "the product, fused_classifier, the products of the backward pass",
                 [=](int) { both(linear_cross_entropy_forward1, linear_cross_entropy_backward1); }, {0});
        // It rounds the logits, of which 4 deviations is a large one; `rounding` lets dlogits be 10 ulps off.
        if (sizeof(floatX) == 2) {
            float off = 4 * deviation * ulp_of<floatX>();
            b.coarser(std::max(1.0f, off / (10 * ulp_of<floatX>())));
            b.coarser(off / (logit + 1e-6f), "losses");
        }
    }
#if defined(ENABLE_BF16)
    b.kernel(
        2, "softmax begins in the product's epilogue, row factors applied later",
        [=](int) { both(linear_cross_entropy_forward2, linear_cross_entropy_backward2); }, {0}, -90);
    b.promoted(b.dry || linear_cross_entropy_choice(N, C, Vp) == 2 ? 2 : 1);
#else
    b.promoted(1);
#endif
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "linear_cross_entropy", declare, {8, 1024, 768, 1, 50257},
        {{1, 1, 8, 1, 1}, {1, 3, 136, 1, 11}, {2, 65, 64, 1, 1000}, {1, 300, 72, 1, 640}, {1, 130, 776, 1, 129}});
}
