/* decode_sample: the next token from the logits: the largest, or one drawn after temperature, top-k, top-p and min-p

   tokens (B) int out | positions (B) int inout, += 1, -1 stays | scratch, see decode_sample_scratch() | logits (B,Vp) float in
   rng_state (B) uint64_t inout, state of xorshift64*, advanced once per drawn token
   With a repetition penalty: tokens inout, before: the newest token | logits inout, penalized
   seen (B, ceil(V/32)) uint32_t inout: a set of bits, the tokens of the text; the newest token is added
   Bound: latency, and memory: B*V*sizeof(float) bytes from L2. Constraint: Vp % 4 == 0, V <= 2^18.
   Error: none for the largest; among equal logits the lowest id wins. A draw weighs each token by its probability in
   steps of 2^-44, within 1e-5 of the exact value. A draw follows the rule of sample_token() in
   llmc/sampler.h and takes the same random numbers. Without top-k and top-p, both draw the same token, except for these
   roundings. With top-k or top-p, sample_token() adds up the tokens in another order, so the tokens may differ. The penalty
   is that of sampler_penalize(), without an error.
   Kernels 4 and 5 have nothing to choose: one block of 1024 threads per sequence.
   Source: Fan, Lewis and Dauphin 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2019, arXiv:1904.09751 (top-p);
   Nguyen et al. 2024, arXiv:2407.01082 (min-p); Keskar et al. 2019, arXiv:1909.05858 (repetition penalty);
   Vigna 2016, arXiv:1402.6246 (xorshift64*).

   Kernels (this list is written by versions.sh):
     1  largest: one block, tree reduction in shared memory
     2  largest: one block, 16-byte loads, 64-bit keys
     3  largest: many blocks (promoted)
     4  draw: one block, top-k and top-p by bisection, 1024 chunks (kinds 1 to 6)
     5  4, drawn by two divisions into 32 parts, a warp per part (promoted) (kinds 1 to 6)
     6  penalty: one thread per 32 tokens, then 3 or 5 (promoted) (kinds 7, 8)
     kind 1: temperature 0.8
     kind 2: temperature and top-k 50
     kind 3: temperature and top-p 0.9
     kind 4: temperature, top-k and top-p
     kind 5: temperature and min-p 0.1
     kind 6: temperature, top-k, top-p and min-p
     kind 7: the largest, repetition penalty 1.3
     kind 8: temperature, top-k, top-p, min-p and repetition penalty

   nvcc -O3 --use_fast_math decode_sample.cu -o decode_sample      (or: make decode_sample)
   ./decode_sample 3      check kernel 3 against the CPU and sweep its block sizes
   ./decode_sample 5 --kind 3      draw with top-p 0.9
   ./decode_sample        every kernel, side by side                                         */
#include "../../llmc/ptx.cuh"
#include "bench.h"

// ---- kernel 1: largest logit, one block per sequence, tree reduction in shared memory -------------------------------

__global__ void decode_sample_kernel1(int* tokens, int* copy, int* positions, const float* logits, int V, int Vp) {
    __shared__ float max[1024];
    __shared__ int best[1024];
    int i = threadIdx.x, b = blockIdx.x;
    max[i] = -INFINITY, best[i] = -1;
    for (int v = i; v < V; v += blockDim.x) {
        float logit = logits[(size_t)b * Vp + v];
        if (logit > max[i]) { max[i] = logit, best[i] = v; }
    }
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (i >= half || best[i + half] < 0) { continue; }
        if (max[i + half] > max[i] || (max[i + half] == max[i] && best[i + half] < best[i])) {
            max[i] = max[i + half], best[i] = best[i + half];
        }
    }
    if (i == 0) {
        tokens[b] = copy[b] = best[0];
        if (positions[b] >= 0) { positions[b] += 1; }
    }
}

void decode_sample1(int* tokens, int* copy, int* positions, const float* logits, int B, int V, int Vp,
                    cudaStream_t stream, int block_size) {
    decode_sample_kernel1<<<B, block_size, 0, stream>>>(tokens, copy, positions, logits, V, Vp);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: largest logit, 16-byte loads, logit and id as one 64-bit key (kernel 3, one block per sequence) ------

#include "decode_sample.cuh" // kernels 3, 5 and 6

void decode_sample2(int* tokens, int* copy, int* positions, float* scratch, const float* logits, int B, int V, int Vp,
                    cudaStream_t stream, int block_size) {
    decode_sample_greedy(tokens, copy, positions, scratch, logits, B, V, Vp, 1, stream, block_size);
}

// ---- kernel 4: draw from 1024 chunks of the vocabulary, whose weights the warps add up one chunk after the other -----

constexpr int DECODE_SAMPLE_CHUNKS = 1024; // one per thread

struct DecodeSampleChunks {
    uint64_t sum[DECODE_SAMPLE_CHUNKS]; // of the shares of a chunk's tokens
    uint64_t rest;                      // distance of the drawn point from the start of chunk `found`
    int found, token;
};

// Inverse transform sampling: returns the first token, in the order of ids, at which the running sum of the candidates'
// shares exceeds `random` (0 to 1) times their total.
__device__ int decode_sample_draw4(DecodeSampleShared& shared, DecodeSampleChunks& chunks, const DecodeSampleRow& row,
                                   int V, double random) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int size = ceil_div(ceil_div(V, DECODE_SAMPLE_CHUNKS), 32) * 32; // tokens per chunk
    for (int c = warp; c < DECODE_SAMPLE_CHUNKS; c += blockDim.x / 32) {
        uint64_t sum = 0;
        for (int i = c * size + lane; i < min((c + 1) * size, V); i += 32) {
            sum += decode_sample_admitted(row, decode_sample_key(row.logits[i], i));
        }
        sum = lanes_sum<32>(sum);
        if (lane == 0) { chunks.sum[c] = sum; }
    }
    __syncthreads();
    // upto: inclusive prefix sum of the chunks' shares, first within each warp, then over all warps
    uint64_t own = chunks.sum[threadIdx.x], upto = decode_sample_warp_scan(own);
    if (lane == 31) { shared.reduce[warp] = upto; }
    __syncthreads();
    uint64_t warps_upto = decode_sample_warp_scan(shared.reduce[lane]);
    uint64_t sum = __shfl_sync(0xFFFFFFFFu, warps_upto, 31);
    uint64_t warps_before = __shfl_sync(0xFFFFFFFFu, warps_upto, max(warp - 1, 0));
    upto += warp > 0 ? warps_before : 0;
    uint64_t point = min((uint64_t)(random * (double)sum), sum - 1);
    if (upto - own <= point && point < upto) { // true in exactly one thread
        chunks.found = threadIdx.x;
        chunks.rest = point - (upto - own);
    }
    __syncthreads();
    if (warp == 0) {
        uint64_t rest = chunks.rest, before = 0;
        for (int begin = chunks.found * size;; begin += 32) { // walks the chunk that holds the token
            uint64_t key = begin + lane < V ? decode_sample_key(row.logits[begin + lane], begin + lane) : 0;
            uint64_t reached = before + decode_sample_warp_scan(decode_sample_admitted(row, key));
            unsigned past = __ballot_sync(0xFFFFFFFFu, reached > rest);
            if (past) {
                if (lane == 0) { chunks.token = begin + __ffs(past) - 1; }
                break;
            }
            before = __shfl_sync(0xFFFFFFFFu, reached, 31);
        }
    }
    __syncthreads();
    return chunks.token;
}

__global__ void __launch_bounds__(DECODE_SAMPLE_CHUNKS, 1)
    decode_sample_kernel4(int* tokens, int* copy, int* positions, const float* logits, uint64_t* rng_state,
                          float temperature, int top_k, float top_p, float min_p, int V, int Vp) {
    __shared__ DecodeSampleShared shared;
    __shared__ DecodeSampleChunks chunks;
    int b = blockIdx.x, token = -1; // the result if nothing can be drawn
    DecodeSampleRow row = decode_sample_row(shared, logits + (size_t)b * Vp, V, temperature, min_p);
    if (row.count > 0) {
        decode_sample_restrict(shared, row, top_k, top_p);
        uint64_t state = rng_state[b];
        token = decode_sample_draw4(shared, chunks, row, V, decode_sample_random(&state));
        if (threadIdx.x == 0) { rng_state[b] = state; } // all threads have read it: the draw has barriers
    }
    if (threadIdx.x == 0) { decode_sample_end(b, token, tokens, copy, positions); }
}

void decode_sample4(int* tokens, int* copy, int* positions, const float* logits, uint64_t* rng_state, float temperature,
                    int top_k, float top_p, float min_p, int B, int V, int Vp, cudaStream_t stream) {
    decode_sample_kernel4<<<B, DECODE_SAMPLE_CHUNKS, 0, stream>>>(tokens, copy, positions, logits, rng_state,
                                                                  temperature, top_k, top_p, min_p, V, Vp);
    cudaCheck(cudaGetLastError());
}

// Texts draw from the same 8 logits, several times in a row: as often as the probabilities say, and each for itself.
// draw(tokens, copy, positions, scratch, logits, rng_state, B, V, Vp) is one launch, at temperature 0.8.
typedef void Draw(int*, int*, int*, float*, float*, uint64_t*, int, int, int);
static std::string check_draws(const std::function<Draw>& draw) {
    enum { B = 64, V = 8, Vp = 128 };
#ifdef CUDA_EMULATION
    const int launches = 8;
#else
    const int launches = 256;
#endif
    std::vector<float> logits((size_t)B * Vp, NAN);
    std::vector<double> p(V);
    double sum = 0;
    for (int v = 0; v < V; v++) { sum += p[v] = exp((double)(v % 5) * 0.5 / 0.8); }
    for (int v = 0; v < V; v++) { p[v] /= sum; }
    for (int i = 0; i < B * V; i++) { logits[(size_t)i / V * Vp + i % V] = (float)(i % V % 5) * 0.5f; }
    std::vector<uint64_t> states(B);
    for (int b = 0; b < B; b++) { states[b] = (uint64_t)hash_bits(b, 1) << 32 | hash_bits(b, 2); }
    char* memory = (char*)device_malloc_check(1 << 20, "draws");
    cudaCheck(cudaMemset(memory, 0, 1 << 20));
    float *logits_dev = (float*)memory, *scratch = logits_dev + (size_t)B * Vp;
    uint64_t* states_dev = (uint64_t*)(memory + (1 << 19));
    int *tokens = (int*)(states_dev + B), *copy = tokens + B, *positions = copy + B;
    cudaCheck(cudaMemcpy(logits_dev, logits.data(), logits.size() * sizeof(float), cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(states_dev, states.data(), B * sizeof(uint64_t), cudaMemcpyHostToDevice));
    std::vector<int> draws;
    for (int i = 0; i < launches; i++) {
        draw(tokens, copy, positions, scratch, logits_dev, states_dev, B, V, Vp);
        for (float x : bench_download(tokens, B)) { draws.push_back((int)x); }
    }
    cudaCheck(cudaFree(memory));
    std::string wrong = bench_frequencies(draws, p);
    std::vector<int> later(draws.begin() + B, draws.end()), earlier(draws.begin(), draws.end() - B);
    if (wrong.empty()) { wrong = bench_independent_draws(earlier, later, p, "equal draws of a text in two launches"); }
    std::vector<int> next(draws.begin() + 1, draws.end()), own(draws.begin(), draws.end() - 1);
    if (wrong.empty()) { wrong = bench_independent_draws(own, next, p, "equal draws of two texts"); }
    return wrong;
}

static void declare(Bench& b) {
    int B = b.B, V = b.V, Vp = ceil_div(V, 128) * 128, words = ceil_div(V, 32);
    int kind =
        b.kinds({"the largest", "temperature 0.8", "temperature and top-k 50", "temperature and top-p 0.9",
                 "temperature, top-k and top-p", "temperature and min-p 0.1", "temperature, top-k, top-p and min-p",
                 "the largest, repetition penalty 1.3", "temperature, top-k, top-p, min-p and repetition penalty"});
    bool penalizes = kind >= 7, greedy = kind == 0 || kind == 7, all = kind == 6 || kind == 8;
    b.varies(greedy ? "BV" : "B"); // a draw next to the boundary of two tokens could fall on either side
    cudaStream_t stream = b.stream;
    int which =
        b.cases({"normal", "equal logits", "one logit far above the others", "temperature 0.01", "temperature 100"});
    const float temperatures[] = {0.8f, 0.8f, 0.8f, 0.01f, 100.0f};
    float temperature = greedy ? 0.0f : temperatures[which], top_p = kind == 3 || kind == 4 || all ? 0.9f : 1.0f;
    float min_p = kind == 5 || all ? 0.1f : 0.0f, penalty = penalizes ? 1.3f : 1.0f;
    int top_k = kind == 2 || kind == 4 || all ? 50 : 0;
    // The padding past V is NaN, because it must not be read. Small vocabularies also have ties, scattered NaN and
    // -inf, and one sequence of nothing but NaN and -inf. With a penalty, logits are compared, so they are numbers of both signs.
    Buffer<float> logits_before = b.input_from<float>("logits", (size_t)B * Vp, [=](float* x) {
        std::mt19937 rng(V + 1 + kind);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < (size_t)B * Vp; i++) {
            float value = 3.0f * normal(rng) - (penalizes ? 4.0f : 30.0f);
            if (which == 1) { value = penalizes && i / Vp % 2 ? 30.0f : -30.0f; }
            if (which == 2 && i % Vp == i / Vp * 31 % V) { value = 120.0f; }
            x[i] = V > 20000 ? value : roundf(4.0f * value) / 4.0f;
            if (penalizes) { continue; }
            if ((int)(i % Vp) >= V) { x[i] = NAN; }
            if (V <= 20000 && (i / Vp == 1 || i % 13 == 7)) { x[i] = i % 2 ? NAN : -INFINITY; }
        }
    });
    Buffer<uint64_t> rng_before = b.input_from<uint64_t>("rng_before", B, [=](float* x) {
        for (int i = 0; i < B; i++) { x[i] = (float)(i * 54321 + V + 1 + kind); }
    });
    Buffer<int> positions_before = b.input_from<int>("positions_before", B, [=](float* p) {
        for (int i = 0; i < B; i++) { p[i] = i % 3 == 2 ? -1.0f : 11.0f * i; } // -1: a text that has ended
    });
    Buffer<float> zeros = b.input_from<float>("zeros", decode_sample_scratch(B),
                                              [=](float* x) { std::fill(x, x + decode_sample_scratch(B), 0.0f); });
    Buffer<int> positions = b.inout<int>("positions", B, positions_before, {0.0f, 0.0f});
    Buffer<uint64_t> rng_state = b.inout<uint64_t>("rng_state", B, rng_before, {0.0f, 1e-6f}); // compared as float
    Buffer<float> scratch = b.inout<float>("scratch", decode_sample_scratch(B), zeros, {0.0f, 0.0f});
    Buffer<int> tokens, newest, copy = b.output<int>("copy", B, {0.0f, 0.0f});
    Buffer<float> logits = logits_before;
    Buffer<uint32_t> seen, seen_before;
    if (penalizes) {
        newest = b.input_from<int>("newest", B, [=](float* x) { // -1: nothing could be drawn
            for (int i = 0; i < B; i++) { x[i] = i % 4 == 3 ? -1.0f : (float)((i * 7919 + 31) % V); }
        });
        seen_before = b.input_from<uint32_t>("seen_before", (size_t)B * words, [=](float* x) {
            std::mt19937 rng(V);
            for (int i = 0; i < B * words; i++) { // up to 24 of 32 bits, so that a float holds them
                uint32_t bits = (rng() & rng() & 0xFFFFFF) << rng() % 9;
                int left = V - i % words * 32;
                x[i] = (float)(left < 32 ? bits & ((1u << left) - 1) : bits);
            }
        });
        tokens = b.inout<int>("tokens", B, newest, {0.0f, 0.0f});
        logits = b.inout<float>("penalized", (size_t)B * Vp, logits_before, {0.0f, 0.0f});
        seen = b.inout<uint32_t>("seen", (size_t)B * words, seen_before, {0.0f, 1e-6f}); // compared as float
    } else {
        tokens = b.output<int>("tokens", B, {0.0f, 0.0f});
    }
    b.reference([=] {
        for (int i = 0; i < B; i++) {
            positions.host[i] = positions_before.host[i] + (positions_before.host[i] >= 0.0f);
        }
        std::fill(scratch.host, scratch.host + decode_sample_scratch(B), 0.0f);
        if (penalizes) {
            decode_sample_penalize_cpu(seen.host, logits.host, seen_before.host, logits_before.host, newest.host,
                                       penalty, B, V, Vp);
        }
        decode_sample_cpu(tokens.host, rng_state.host, logits.host, rng_before.host, temperature, top_k, top_p, min_p,
                          B, V, Vp);
        std::copy(tokens.host, tokens.host + B, copy.host);
    });
    b.cost((double)B * V * sizeof(float), 0);
    b.reads_only();

    auto promoted = [=](int bs) {
        uint32_t* set = penalizes ? (uint32_t*)seen : NULL;
        decode_sample(tokens, copy, positions, scratch, logits, rng_state, set, temperature, top_k, top_p, min_p,
                      penalty, B, V, Vp, {stream, bs});
    };
    if (greedy && !penalizes) {
        b.kernel(1, "largest: one block, tree reduction in shared memory",
                 [=](int bs) { decode_sample1(tokens, copy, positions, logits, B, V, Vp, stream, bs); });
        b.kernel(2, "largest: one block, 16-byte loads, 64-bit keys",
                 [=](int bs) { decode_sample2(tokens, copy, positions, scratch, logits, B, V, Vp, stream, bs); });
        b.kernel(3, "largest: many blocks", promoted, {0, 128, 256, 512, 1024});
        b.promoted(3);
    } else if (!penalizes) {
        auto chunks = [=](int) {
            decode_sample4(tokens, copy, positions, logits, rng_state, temperature, top_k, top_p, min_p, B, V, Vp,
                           stream);
        };
        const char* property = "frequencies of the draws, and their independence";
        b.kernel(4, "draw: one block, top-k and top-p by bisection, 1024 chunks", chunks, {0});
        if (kind == 1) {
            b.property(property, [=] {
                return check_draws([=](int* tokens, int* copy, int* positions, float*, float* logits,
                                       uint64_t* rng_state, int B, int V, int Vp) {
                    decode_sample4(tokens, copy, positions, logits, rng_state, 0.8f, 0, 1, 0, B, V, Vp, stream);
                });
            });
        }
        b.kernel(5, "4, drawn by two divisions into 32 parts, a warp per part", promoted, {0});
        if (kind == 1) {
            b.property(property, [=] {
                return check_draws([=](int* tokens, int* copy, int* positions, float* scratch, float* logits,
                                       uint64_t* rng_state, int B, int V, int Vp) {
                    decode_sample(tokens, copy, positions, scratch, logits, rng_state, NULL, 0.8f, 0, 1, 0, 1, B, V, Vp,
                                  {stream, 0});
                });
            });
        }
        b.promoted(5);
    } else {
        b.kernel(6, "penalty: one thread per 32 tokens, then 3 or 5", promoted, {0});
        b.promoted(6);
    }
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "decode_sample", declare, {1, 1, 768, 12, 50257},
                      {{1, 1, 0, 0, 1},
                       {3, 1, 0, 0, 77},
                       {5, 1, 0, 0, 9000},
                       with_kind(1, {1, 1, 0, 0, 1}),
                       with_kind(1, {3, 1, 0, 0, 77}),
                       with_kind(2, {3, 1, 0, 0, 1234}),
                       with_kind(3, {3, 1, 0, 0, 6001}),
                       with_kind(4, {4, 1, 0, 0, 9000}),
                       with_kind(5, {3, 1, 0, 0, 77}),
                       with_kind(6, {4, 1, 0, 0, 9000}),
                       with_kind(7, {1, 1, 0, 0, 1}),
                       with_kind(7, {5, 1, 0, 0, 9000}),
                       with_kind(8, {4, 1, 0, 0, 1234}),
                       with_kind(1, {4, 1, 0, 0, 50257}),
                       with_kind(2, {4, 1, 0, 0, 50257}),
                       with_kind(3, {4, 1, 0, 0, 50257}),
                       with_kind(4, {4, 1, 0, 0, 50257}),
                       with_kind(5, {4, 1, 0, 0, 50257}),
                       with_kind(8, {4, 1, 0, 0, 50257})});
}
