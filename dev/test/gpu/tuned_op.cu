// An op for the test of --tune without a GPU, on the stand-in for CUDA (fake_cuda.c): its kernel is a copy, which the stand-in
// does run and whose time depends on the configuration. It takes the name of an op that can be tuned.
//
//     TUNED_OP_NAME=permute   another name
//     TUNED_OP_PROMOTED=0     no kernel is promoted
//     TUNED_OP_FASTEST=128    the configuration that takes half as long as the others; 0: the default
//     TUNED_OP_NOISE=64       the configuration that is fast only when it is timed for the first time
//     TUNED_OP_WRONG=256      the configuration whose results are wrong
#include "bench.h"

static int setting(const char* name) { return getenv(name) ? atoi(getenv(name)) : -1; }

static void declare(Bench& b) {
    size_t n = (size_t)b.B * b.T * b.C;
    cudaStream_t stream = b.stream;
    Buffer<float> inp = b.input<float>("inp", n), out = b.output<float>("out", n, {0, 0});
    b.reference([=] { memcpy(out.host, inp.host, n * sizeof(float)); });
    b.cost(2.0 * (double)n * sizeof(float), 0);
    auto copy = [=](int config) {
        static int last = -1, rounds = 0; // of the noisy configuration; its check counts as the first round
        rounds += config == setting("TUNED_OP_NOISE") && last != config;
        last = config;
        bool fast = config == setting("TUNED_OP_FASTEST") || (config == setting("TUNED_OP_NOISE") && rounds <= 2);
        size_t bytes = config == setting("TUNED_OP_WRONG") ? sizeof(float) : n * sizeof(float);
        for (int i = 0; i < (fast ? 1 : 2); i++) {
            cudaCheck(cudaMemcpyAsync(out, inp, bytes, cudaMemcpyDeviceToDevice, stream));
        }
    };
    b.kernel(1, "untuned", copy, {0});
    b.kernel(2, "tuned", copy, {bench_tunable("gelu_forward")});
    if (setting("TUNED_OP_PROMOTED") != 0) { b.promoted(2); }
}

int main(int argc, char** argv) {
    const char* name = getenv("TUNED_OP_NAME");
    return bench_main(argc, argv, name ? name : "gelu_forward", declare, {2, 16, 32, 2, 100}, {{1, 1, 8}});
}
