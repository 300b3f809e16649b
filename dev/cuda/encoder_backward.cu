/* encoder_backward: dwte[inp[b,t],:] += dout[b,t,:], dwpe[t,:] += dout[b,t,:]

   dwte (Vp,C), dwpe (maxT,C) float inout | dout (B,T,C) floatX in | inp (B,T) int in, each in [0,V), V <= Vp
   Bound: memory: one read of dout, one read and one write of the dwte rows of tokens that occur and of T rows of dwpe.
   Kernels 3, 4, 6 and 7 are deterministic, at the cost of reading dout twice: once for dwpe, once for dwte.
   Constraint: C % x128::size == 0 from kernel 2 on, B*T <= 2^30. Kernels 1, 2 and 5 are not deterministic.
   Error against the fp64 reference: n * 2^-22, the rounding error of an fp32 sum of n random terms of size 1, whose
   partial sums grow to about sqrt(n). n is the number of times that the most frequent token occurs (dwte), or B (dwpe).
   Source: radix sort with ranks from ballots: Merrill and Grimshaw 2011, "High performance and scalable radix sorting".

   Kernels (this list is written by versions.sh):
     1  one thread per element, atomics
     2  dwpe in registers, dwte by 128-bit atomics (slower than 1)
     3  deterministic: each block owns tokens and scans all ids (slower than 1)
     4  positions sorted by token, one warp per run (slower than 1)
     5  one warp per 32 sorted positions, atomics
     6  deterministic: runs across tiles joined (promoted)
     7  CUB's radix sort

   nvcc -O3 --use_fast_math encoder_backward.cu -o encoder_backward      (or: make encoder_backward)
   ./encoder_backward 6      check kernel 6 against the CPU and sweep its block sizes
   ./encoder_backward        every kernel, side by side                                         */
#include "bench.h"

// ---- kernel 1: one thread per element, atomics on both gradients -----------------------------

__global__ void encoder_backward_kernel1(float* dwte, float* dwpe, const floatX* dout, const int* inp, int B, int T,
                                         int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * T * C) { return; }
    size_t row = i / C, c = i % C;
    float d = (float)dout[i];
    atomicAdd(dwte + (size_t)inp[row] * C + c, d);
    atomicAdd(dwpe + row % T * C + c, d);
}

void encoder_backward1(float* dwte, float* dwpe, const floatX* dout, const int* inp, int B, int T, int C,
                       cudaStream_t stream, int block_size) {
    unsigned num_blocks = (unsigned)ceil_div((size_t)B * T * C, (size_t)block_size);
    encoder_backward_kernel1<<<num_blocks, block_size, 0, stream>>>(dwte, dwpe, dout, inp, B, T, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one read of dout; dwpe is summed over B in registers, dwte by 128-bit atomics ---------

__device__ inline void atomic_add_f128(float* p, f128 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float4*>(p), make_float4(x[0], x[1], x[2], x[3]));
#else
    for (int k = 0; k < 4; k++) { atomicAdd(p + k, x[k]); }
#endif
}

__global__ void encoder_backward_kernel2(float* dwte, float* dwpe, const floatX* dout, const int* inp, int B, int T,
                                         int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size, stride = (size_t)T * C;
    if (i >= stride) { return; }
    size_t t = i / C, c = i % C;
    float sum[x128::size] = {};
    for (int b = 0; b < B; b++) {
        x128 d = load128(dout + b * stride + i);
        float* row = dwte + (size_t)inp[(size_t)b * T + t] * C + c;
        for (int k = 0; k < x128::size; k += 4) {
            f128 x;
            for (int j = 0; j < 4; j++) { sum[k + j] += x[j] = (float)d[k + j]; }
            atomic_add_f128(row + k, x);
        }
    }
    for (int k = 0; k < x128::size; k++) { dwpe[i + k] += sum[k]; }
}

void encoder_backward2(float* dwte, float* dwpe, const floatX* dout, const int* inp, int B, int T, int C,
                       cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    unsigned num_blocks = (unsigned)ceil_div((size_t)T * C, (size_t)block_size * x128::size);
    encoder_backward_kernel2<<<num_blocks, block_size, 0, stream>>>(dwte, dwpe, dout, inp, B, T, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 3: deterministic; each block owns some tokens, scans all ids for them and adds their rows in order -----

static void encoder_backward_positions(float* dwpe, const floatX* dout, int B, int T, int C, const Execution& exec,
                                       int block_size);

// A block owns the token ids with id % gridDim.x == blockIdx.x. Neighbouring ids are about equally frequent, so this
// balances the blocks.
__global__ void encoder_backward_kernel3(float* dwte, const floatX* dout, const int* inp, int N, int C) {
    __shared__ int found[1024], counts[32]; // indices into inp found in this round; how many each warp found
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    for (int start = 0; start < N; start += blockDim.x) {
        int i = start + threadIdx.x;
        bool mine = i < N && inp[i] % gridDim.x == blockIdx.x;
        unsigned mask = __ballot_sync(0xFFFFFFFFu, mine);
        if (lane == 0) { counts[warp] = __popc(mask); }
        __syncthreads();
        int before = 0, total = 0;
        for (int w = 0; w < num_warps; w++) {
            before += w < warp ? counts[w] : 0;
            total += counts[w];
        }
        if (mine) { found[before + __popc(mask & ((1u << lane) - 1))] = i; }
        __syncthreads();
        for (int j = 0; j < total; j++) {
            const floatX* row = dout + (size_t)found[j] * C;
            float* sum = dwte + (size_t)inp[found[j]] * C;
            for (int c = threadIdx.x; c < C; c += blockDim.x) { sum[c] += (float)row[c]; }
        }
        __syncthreads(); // the next round overwrites counts and found
    }
}

void encoder_backward3(float* dwte, float* dwpe, const floatX* dout, const int* inp, int B, int T, int C,
                       cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    encoder_backward_positions(dwpe, dout, B, T, C, stream, block_size);
    encoder_backward_kernel3<<<512, block_size, 0, stream>>>(dwte, dout, inp, B * T, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 4: positions sorted by token, one warp per run of equal tokens --------------------------

#include "encoder_backward.cuh" // kernel 6

// Each warp handles one index i of the sorted list and 32 vectors of columns. If a run of equal tokens starts at i, the
// warp sums the run; otherwise it returns.
__global__ void encoder_backward_kernel4(float* dwte, const floatX* dout, const int* positions, const int* tokens,
                                         int N, int C) {
    int lane = threadIdx.x % 32;
    int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int c = (blockIdx.y * 32 + lane) * x128::size;
    if (i >= N || c >= C) { return; }
    int token = tokens[i];
    if (i > 0 && tokens[i - 1] == token) { return; }
    float sum[x128::size] = {};
    for (; i < N && tokens[i] == token; i++) {
        x128 d = load128(dout + (size_t)positions[i] * C + c);
        for (int k = 0; k < x128::size; k++) { sum[k] += (float)d[k]; }
    }
    float* row = dwte + (size_t)token * C + c;
    for (int k = 0; k < x128::size; k++) { row[k] += sum[k]; }
}

void encoder_backward4(float* dwte, float* dwpe, int* scratch, const floatX* dout, const int* inp, int B, int T, int C,
                       int V, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    int N = B * T;
    encoder_backward_positions(dwpe, dout, B, T, C, stream, block_size);
    EncoderScratch s = encoder_backward_sort(scratch, inp, N, V, stream);
    dim3 grid(ceil_div(N, block_size / 32), ceil_div(C, 32 * x128::size));
    encoder_backward_kernel4<<<grid, block_size, 0, stream>>>(dwte, dout, s.positions[0], s.tokens, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: one warp per tile of 32 sorted positions, so the runs of a frequent token have many warps ----

// Kernel 4 gives a run to one warp, however long it is. Here each warp sums 32 sorted positions. A run that crosses
// tiles is added to its row of dwte by several warps, with atomics. Other rows have one writer, and the same bits in
// every run. Kernel 6 replaces the atomics.
__global__ void encoder_backward_kernel5(float* dwte, const floatX* dout, const int* positions, const int* tokens,
                                         int N, int C) {
    int lane = threadIdx.x % 32;
    int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 32, end = min(N, first + 32);
    int c = (blockIdx.y * 32 + lane) * x128::size;
    if (first >= N || c >= C) { return; }
    float sum[x128::size] = {};
    for (int i = first; i < end; i++) {
        x128 d = load128(dout + (size_t)positions[i] * C + c);
        for (int k = 0; k < x128::size; k++) { sum[k] += (float)d[k]; }
        int token = tokens[i];
        if (i + 1 < end && tokens[i + 1] == token) { continue; }
        float* row = dwte + (size_t)token * C + c;
        for (int k = 0; k < x128::size; k++) {
            atomicAdd(row + k, sum[k]);
            sum[k] = 0.0f;
        }
    }
}

void encoder_backward5(float* dwte, float* dwpe, int* scratch, const floatX* dout, const int* inp, int B, int T, int C,
                       int V, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    int N = B * T;
    encoder_backward_positions(dwpe, dout, B, T, C, stream, block_size);
    EncoderScratch s = encoder_backward_sort(scratch, inp, N, V, stream);
    dim3 grid(ceil_div(N, block_size), ceil_div(C, 32 * x128::size)); // a warp has 32 positions
    encoder_backward_kernel5<<<grid, block_size, 0, stream>>>(dwte, dout, s.positions[0], s.tokens, N, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 7: CUB's radix sort in place of kernel 6's ----------------------------------------------

#include <cub/device/device_radix_sort.cuh>

// CUB sorts pairs, so the list of positions must be in memory before the first pass.
__global__ void encoder_backward_fill_kernel7(int* positions, int N) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) { positions[i] = i; }
}

// Sorts the pairs (token, position) by token, which has as many bits as V - 1. Without a place for its temporary
// storage, CUB only computes the size of this storage, and launches nothing.
static void encoder_backward_sort_pairs(void* storage, size_t* bytes, int* tokens, int* sorted, const int* inp,
                                        const int* positions, int N, int V, cudaStream_t stream) {
    int num_bits = 1;
    while (num_bits < 31 && (V - 1) >> num_bits) { num_bits++; }
    cudaCheck(cub::DeviceRadixSort::SortPairs(storage, *bytes, inp, tokens, positions, sorted, N, 0, num_bits, stream));
}

// Number of ints in scratch: kernel 6's layout without the counts, then CUB's temporary storage.
static size_t encoder_backward_scratch7(int B, int T, int V) {
    int N = B * T;
    size_t bytes = 0;
    encoder_backward_sort_pairs(NULL, &bytes, NULL, NULL, NULL, NULL, N, V, 0);
    return encoder_backward_layout(NULL, N).counts - (int*)NULL + ceil_div(bytes, sizeof(int));
}

void encoder_backward7(float* dwte, float* dwpe, int* scratch, const floatX* dout, const int* inp, int B, int T, int C,
                       int V, cudaStream_t stream, int block_size) {
    require(C % x128::size == 0);
    require(block_size <= ENCODER_MAX_BLOCK);
    int N = B * T, num_tiles = ceil_div(N, ENCODER_TILE);
    encoder_backward_positions(dwpe, dout, B, T, C, stream, block_size);
    EncoderScratch s = encoder_backward_layout(scratch, N);
    size_t bytes = (encoder_backward_scratch7(B, T, V) - (s.counts - scratch)) * sizeof(int);
    encoder_backward_fill_kernel7<<<ceil_div(N, 512), 512, 0, stream>>>(s.positions[1], N);
    encoder_backward_sort_pairs(s.counts, &bytes, s.tokens, s.positions[0], inp, s.positions[1], N, V, stream);
    for (int c0 = 0; c0 < C; c0 += ENCODER_COLUMNS) {
        int num_slices = ceil_div(min(ENCODER_COLUMNS, C - c0), ENCODER_WARP_COLUMNS);
        int num_blocks = ceil_div(num_tiles * num_slices, block_size / 32);
        encoder_backward_tile_kernel6<<<num_blocks, block_size, 0, stream>>>(dwte, s.partial, dout, s.positions[0],
                                                                             s.tokens, N, C, c0, num_slices);
        encoder_backward_join_kernel6<<<dim3(num_tiles, num_slices), 256, 0, stream>>>(dwte, s.partial, s.tokens, N, C,
                                                                                       c0);
    }
    cudaCheck(cudaGetLastError());
}

static void declare(Bench& b) {
    b.varies("BTCV");
    int B = b.B, T = b.T, C = b.C, V = b.V;
    size_t N = (size_t)B * T;
    // exact: dout has a mean of 28; in the order in which a kernel adds them, all sums up to 8192 terms are exact
    int which =
        b.cases({"as in text", "all tokens are the last one of the vocabulary", "neighbours differ, exact sums"});
    bool exact = which == 2;
    Buffer<int> inp = b.input_from<int>("inp", N, [&](float* ids) {
        bench_fill_ids(ids, N, V, b.rng);
        for (size_t i = 0; which > 0 && i < N; i++) { ids[i] = which == 1 ? (float)(V - 1) : (float)(i % V); }
    });
    auto start = [&](const char* name, size_t n) {
        return exact ? b.input_filled<float>(name, n, bench_fill_exact_small) : b.input<float>(name, n);
    };
    Buffer<floatX> dout =
        exact ? b.input_filled<floatX>("dout", N * C, bench_fill_exact_large) : b.input<floatX>("dout", N * C);
    Buffer<float> dwte0 = start("dwte0", (size_t)V * C), dwpe0 = start("dwpe0", (size_t)T * C);
    size_t num_tokens = 0, most = 0; // number of different tokens; occurrences of the most frequent one
    if (inp.host) {
        std::vector<size_t> counts(V);
        for (size_t i = 0; i < N; i++) { most = std::max(most, ++counts[(size_t)inp.host[i]]); }
        num_tokens = V - std::count(counts.begin(), counts.end(), 0);
    }
    Buffer<float> dwte = b.inout<float>("dwte", (size_t)V * C, dwte0, ulps<float>(1, 2 * most + 4));
    Buffer<float> dwpe = b.inout<float>("dwpe", (size_t)T * C, dwpe0, ulps<float>(1, B + 4));
    size_t num_scratch = std::max(encoder_backward_scratch(B, T, V), encoder_backward_scratch7(B, T, V));
    Buffer<int> scratch = b.scratch<int>("scratch", num_scratch);
    b.reference([=] {
        memcpy(dwte.host, dwte0.host, (size_t)V * C * sizeof(float));
        memcpy(dwpe.host, dwpe0.host, (size_t)T * C * sizeof(float));
        encoder_backward_cpu(dwte.host, dwpe.host, dout.host, inp.host, B, T, C, V);
    });
    b.cost((double)N * (C * sizeof(floatX) + sizeof(int)) + (double)(num_tokens + T) * C * 2 * sizeof(float), 0,
           (double)num_tokens * C * 2 * sizeof(float));
    cudaStream_t s = b.stream;
    b.kernel(1, "one thread per element, atomics",
             [=](int bs) { encoder_backward1(dwte, dwpe, dout, inp, B, T, C, s, bs); });
    b.kernel(2, "dwpe in registers, dwte by 128-bit atomics",
             [=](int bs) { encoder_backward2(dwte, dwpe, dout, inp, B, T, C, s, bs); });
    b.kernel(3, "deterministic: each block owns tokens and scans all ids",
             [=](int bs) { encoder_backward3(dwte, dwpe, dout, inp, B, T, C, s, bs); });
    b.kernel(4, "positions sorted by token, one warp per run",
             [=](int bs) { encoder_backward4(dwte, dwpe, scratch, dout, inp, B, T, C, V, s, bs); });
    b.kernel(5, "one warp per 32 sorted positions, atomics",
             [=](int bs) { encoder_backward5(dwte, dwpe, scratch, dout, inp, B, T, C, V, s, bs); });
    b.kernel(6, "deterministic: runs across tiles joined",
             [=](int bs) {
                 encoder_backward(dwte, dwpe, scratch, dout, inp, B, T, C, V, {s, bs});
             },
             {bench_tunable("encoder_backward")});
    b.kernel(7, "CUB's radix sort",
             [=](int bs) { encoder_backward7(dwte, dwpe, scratch, dout, inp, B, T, C, V, s, bs); },
             {64, 128, 256, 512});
    b.promoted(6);
}

// With V = 1 all tokens are the same; V > 65536 takes three sort passes.
int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "encoder_backward", declare, {64, 1024, 768, 12, 50257},
        {{1, 1, 8, 0, 1}, {8, 150, 776, 0, 1}, {3, 17, 776, 0, 300}, {11, 333, 24, 0, 70000}, {2, 64, 1600, 0, 40}});
}
