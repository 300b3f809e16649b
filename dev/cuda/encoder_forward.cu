/* encoder_forward: out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]

   out (B,T,C) floatX out | inp (B,T) int in, each in [0,V) | wte (Vp,C), wpe (maxT,C) floatX in, maxT >= T
   Bound: memory; out is written once, the wte rows of the tokens that occur and T rows of wpe are read.
   Constraint: C % x128::size == 0 from kernel 2 on, T*C < 2^31, B <= 262140.
   Error: one ulp of floatX against the fp64 reference.
   Source: Radford et al. 2019, "Language models are unsupervised multitask learners" (token + position embedding).
   Not fused with the layernorm that follows: that would save 24 us of a step of 102 ms; see README.md, "Not here".

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  128-bit vectors
     3  one warp per row
     4  four sequences per thread share its vector of wpe (promoted)

   nvcc -O3 --use_fast_math encoder_forward.cu -o encoder_forward      (or: make encoder_forward)
   ./encoder_forward 4      check kernel 4 against the CPU and sweep its block sizes
   ./encoder_forward        every kernel, side by side                                         */
#include "bench.h"

// ---- kernel 1: one thread per element ----------------------------------------------------

__global__ void encoder_forward_kernel1(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T,
                                        int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * T * C) { return; }
    size_t row = i / C, c = i % C;
    out[i] = (floatX)((float)wte[(size_t)inp[row] * C + c] + (float)wpe[row % T * C + c]);
}

void encoder_forward1(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T, int C,
                      cudaStream_t stream, int block_size) {
    unsigned num_blocks = (unsigned)ceil_div((size_t)B * T * C, (size_t)block_size);
    encoder_forward_kernel1<<<num_blocks, block_size, 0, stream>>>(out, inp, wte, wpe, B, T, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one 128-bit vector per thread --------------------------------------------------

__global__ void encoder_forward_kernel2(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T,
                                        int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= (size_t)B * T * C) { return; }
    size_t row = i / C, c = i % C;
    x128 token = load128(wte + (size_t)inp[row] * C + c), position = load128(wpe + row % T * C + c), sum;
    for (int k = 0; k < x128::size; k++) { sum[k] = (floatX)((float)token[k] + (float)position[k]); }
    store128(out + i, sum);
}

void encoder_forward2(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T, int C,
                      cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    unsigned num_blocks = (unsigned)ceil_div((size_t)B * T * C, (size_t)block_size * x128::size);
    encoder_forward_kernel2<<<num_blocks, block_size, 0, stream>>>(out, inp, wte, wpe, B, T, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: one warp per row; a lane reads the token id and divides in 64 bits once per row, not per vector ----

__global__ void encoder_forward_kernel3(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T,
                                        int C) {
    int lane = threadIdx.x % 32;
    size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= (size_t)B * T) { return; }
    const floatX *token_row = wte + (size_t)inp[row] * C, *position_row = wpe + row % T * C;
    for (int c = lane * x128::size; c < C; c += 32 * x128::size) {
        x128 token = load128(token_row + c), position = load128(position_row + c), sum;
        for (int k = 0; k < x128::size; k++) { sum[k] = (floatX)((float)token[k] + (float)position[k]); }
        store128(out + row * C + c, sum);
    }
}

void encoder_forward3(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T, int C,
                      cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    unsigned num_blocks = (unsigned)ceil_div((size_t)B * T, (size_t)block_size / 32);
    encoder_forward_kernel3<<<num_blocks, block_size, 0, stream>>>(out, inp, wte, wpe, B, T, C);
    cudaCheck(cudaGetLastError());
}

#include "encoder_forward.cuh" // kernel 4

static void declare(Bench& b) {
    b.varies("BTCV");
    int B = b.B, T = b.T, C = b.C, V = b.V;
    size_t N = (size_t)B * T;
    bool last = b.cases({"as in text", "all tokens are the last one of the vocabulary"}) == 1;
    Buffer<int> inp = b.input_from<int>("inp", N, [&](float* ids) {
        bench_fill_ids(ids, N, V, b.rng);
        if (last) { std::fill(ids, ids + N, (float)(V - 1)); }
    });
    Buffer<floatX> wte = b.input<floatX>("wte", (size_t)V * C);
    Buffer<floatX> wpe = b.input<floatX>("wpe", (size_t)T * C);
    Buffer<floatX> out = b.output<floatX>("out", N * C, ulps<floatX>(1));
    b.reference([=] { encoder_forward_cpu(out.host, inp.host, wte.host, wpe.host, B, T, C); });
    size_t num_tokens = 0; // number of different tokens
    if (inp.host) {
        std::vector<char> seen(V);
        for (size_t i = 0; i < N; i++) { seen[(size_t)inp.host[i]] = 1; }
        num_tokens = std::count(seen.begin(), seen.end(), 1);
    }
    b.cost((double)(N + num_tokens + T) * C * sizeof(floatX) + N * sizeof(int), 0,
           (double)num_tokens * C * sizeof(floatX));
    cudaStream_t stream = b.stream;
    b.kernel(1, "one thread per element", [=](int bs) { encoder_forward1(out, inp, wte, wpe, B, T, C, stream, bs); });
    b.kernel(2, "128-bit vectors", [=](int bs) { encoder_forward2(out, inp, wte, wpe, B, T, C, stream, bs); });
    b.kernel(3, "one warp per row", [=](int bs) { encoder_forward3(out, inp, wte, wpe, B, T, C, stream, bs); });
    b.kernel(4, "four sequences per thread share its vector of wpe",
             [=](int bs) {
                 encoder_forward(out, inp, wte, wpe, B, T, C, {stream, bs});
             },
             {bench_tunable("encoder_forward")});
    b.promoted(4);
    b.huge((double)BenchHuge::elements((size_t)T * C) * sizeof(floatX), [=](BenchHuge& h) {
        size_t num = h.elements((size_t)T * C), num_rows = num / C;
        std::vector<float> ids(num_rows), tokens((size_t)V * C), positions((size_t)T * C);
        for (size_t i = 0; i < num_rows; i++) { ids[i] = (float)(bench_random(i, 1) % (unsigned)V); }
        h.fill(tokens.data(), 0, tokens.size(), 2), h.fill(positions.data(), 0, positions.size(), 3);
        floatX* y = h.output<floatX>(num);
        encoder_forward(y, h.upload<int>(ids), h.upload<floatX>(tokens), h.upload<floatX>(positions),
                        (int)(num_rows / T), T, C, h.stream);
        h.compare("out", y, num_rows, C, ulps<floatX>(1), [&](size_t row, float* want) {
            for (int c = 0; c < C; c++) { want[c] = tokens[(size_t)ids[row] * C + c] + positions[row % T * C + c]; }
        });
    });
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "encoder_forward", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8, 0, 1}, {3, 17, 776, 0, 1001}, {5, 33, 24, 0, 77}});
}
