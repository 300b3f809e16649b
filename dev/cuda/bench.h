/*
The harness of every dev/cuda program: flags, inputs, correctness check, sweep of configurations, timing, tables.

An op file has a `declare` function. For one shape it declares the inputs, the outputs, a reference that computes the
right outputs, and the kernels. The file's main is one call of bench_main:

    static void declare(Bench& b) {
        size_t n = (size_t)b.B * b.T * 4 * b.C;
        cudaStream_t stream = b.stream;
        Buffer<floatX> inp = b.input<floatX>("inp", n);                       // random normal
        Buffer<floatX> out = b.output<floatX>("out", n, ulps<floatX>(1));     // NaN before every launch
        b.reference([=] { gelu_forward_cpu(out.host, inp.host, n); });        // fills out.host with the right values
        b.cost(2.0 * n * sizeof(floatX), 0);                                  // least bytes, FLOPs
        b.kernel(1, "one thread per element", [=](int bs) { gelu_forward1(out, inp, n, stream, bs); });
        b.kernel(2, "128-bit loads",                                          // bs = 0: the launcher's default
                 [=](int bs) { bs ? gelu_forward(out, inp, n, stream, bs) : gelu_forward(out, inp, n, stream); },
                 {0, 128, 256, 512});
        b.promoted(2);                                                        // or b.best(2): no copy in the trainer
    }
    int main(int argc, char** argv) {
        return bench_main(argc, argv, "gelu_forward", declare, {64, 1024, 768, 12, 50257}, {{1, 1, 8}, {3, 17, 776}});
    }

An op whose arithmetic has weak points names further kinds of input, which --check tries at its small shapes, too:

        int which = b.cases({"normal", "large mean"});
        Buffer<floatX> inp = b.input<floatX>("inp", n, 1.0f, which == 1 ? 30.0f : 0.0f);

The int that a launcher takes is its configuration. It is a block size unless b.config() says what else it means:

        b.kernel(3, "mma.sync", [=](int rows) { ... }, {0, 64, 128}, 80);
        b.config("tile rows");
        b.kernel(4, "wgmma, persistent", [=](int form) { ... }, {0}, -90);
        b.config("form", {{0, "default"}, {2, "ping-pong 128x192"}, {4, "cooperative 128x256"}}); // replaces the {0}

An op that stands for several operations, such as a product with different epilogues, names them; `--kind N` selects
one. A shape of check_shapes is of kind 0, or of another one by with_kind():

        bool has_gelu = b.kinds({"bias", "bias and GELU"}) == 1;

Buffer<T> converts to T*. Its `host` member holds floats: for an input the values that were uploaded, for an output the
right values. Every run first calls declare without a GPU, to learn the numbers of the kernels: then b.dry is true,
buffers are NULL, and declare must not use the device.

A reference that would take long computes only the rows that b.sample() names; the other results must be finite.

Checks after a launch: the outputs are right, the inputs are unchanged, and so are the 256 bytes before and after each
buffer. Two more checks for the promoted or best kernel: a second launch gives the same bits, and the launcher, if it
reports a cost to the profiler (struct Op), reports that of b.cost(). The bytes around a buffer are NaN in every
floating-point type, so a kernel that reads past the end fails too.

--tune times the configurations of the promoted kernel and writes the fastest to a file for train_gpt2cu. The ops for which
it works are those of llmc/tuned.h; their ladders take the list of configurations from there, by bench_tunable().

The timed launches are compared, too: with the outputs set to NaN before the first of them, the last one's results are
checked when all are done.

Built by `make cpu`, the programs run on a CPU (dev/cuda/emulation, CUDA_EMULATION is defined): then they only check,
and what the emulation finds wrong in a kernel fails its check.

Timing: each launch has its own pair of events. Before each launch the L2 cache is flushed and in-place buffers are
restored. For ops with FLOPs the GPU rests for 0.2 s before the timed launches of each kernel and configuration. Measured
first: the speed of a copy and of a read on the device, the time of an empty launch, the matrix rate of the vendor's
library. Each timing comes with the clock at which the SMs ran. Short kernels are also timed in a CUDA graph, and with
--sustained all are timed back to back. The README has the whole protocol.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../llmc/cli.h"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"
#include "reference.h"

// While the harness records a launcher into a graph, a failed call is kept here and does not end the program.
inline cudaError_t*& bench_kept_error() {
    static cudaError_t* kept = NULL;
    return kept;
}
inline void bench_cuda_check(cudaError_t e, const char* expr, const char* file, int line) {
    if (e != cudaSuccess && bench_kept_error()) {
        *bench_kept_error() = e;
    } else {
        cuda_check(e, expr, file, line);
    }
}
#undef cudaCheck
#define cudaCheck(expr) bench_cuda_check((expr), #expr, __FILE__, __LINE__)

// |out - ref| <= atol + rtol * |ref|, computed in such a way that NaN fails
struct Tolerance {
    float atol, rtol;
};
template <class T> inline float ulp_of(); // spacing of T's numbers just above 1
template <> inline float ulp_of<float>() { return 1.0f / (1 << 23); }
template <> inline float ulp_of<half>() { return 1.0f / (1 << 10); }
template <> inline float ulp_of<__nv_bfloat16>() { return 1.0f / (1 << 7); }
// A tolerance of n ulps: relative to the result, plus an absolute part of n ulps of `scale`. scale is the size of the
// terms of which the result is the sum.
template <class T> inline Tolerance ulps(float n, float scale = 1e-3f) {
    return {n * ulp_of<T>() * scale, n * ulp_of<T>()};
}

template <class T> struct Buffer {
    T* dev;      // (n), NULL if Bench::dry
    float* host; // (n), NULL for scratch and if Bench::dry
    operator T*() const { return dev; }
};

struct Shape {
    int B = 0, T = 0, C = 0, NH = 0, V = 0; // 0: the op's default
    int kind = 0;                           // of operation, see Bench::kinds
};
// A check shape of another kind of operation than 0.
inline Shape with_kind(int kind, Shape s) {
    s.kind = kind;
    return s;
}

// ---- buffers: memory, inputs, comparison ---------------------------------------------

enum { BENCH_GUARD = 256 }; // bytes before and after each buffer; a size that keeps cudaMalloc's alignment

// Byte i of a guard. As 16-bit words they are 0xFFC1, which is a NaN in bf16, fp16 and fp32 that no kernel computes.
inline uint8_t bench_guard_byte(size_t i) { return i % 2 ? 0xFF : 0xC1; }

enum class BenchKind { input, output, inout, scratch };

struct BenchBuffer {
    BenchKind kind;
    const char* name;
    uint8_t* dev;                 // (bytes) between two guards
    size_t bytes;                 // without guards
    float* host;                  // one float per element, or NULL
    const void* start;            // inout: device memory with the values before each launch (bytes)
    uint64_t checksum;            // input: checksum of the uploaded values
    bool guarded;                 // true if there are guards before and after dev
    std::function<void()> upload; // input: copies host to dev
    // outputs: compare(factor, &text) returns the worst error in units of factor times the tolerance. If this is more
    // than 1, a description is added to text.
    std::function<double(double, std::string*)> compare;
};

// Splits 0 .. n-1 into pieces and calls fn(begin, end) for each piece, on all cores.
template <class F> inline void bench_pieces(size_t n, F fn) {
    const size_t piece = 1 << 16;
    parallel_for(ceil_div(n, piece), [&](size_t i) { fn(i * piece, std::min(n, (i + 1) * piece)); });
}

// Returns host memory for the harness's own copies, valid until the next call. All calls share one allocation, because
// large copies to freshly allocated pages are slow.
inline void* bench_staging(size_t bytes) {
    static void* memory = NULL;
    static size_t size = 0;
    if (bytes > size) {
        free(memory);
        memory = malloc_check(bytes), size = bytes;
    }
    return memory;
}

template <class T> inline void bench_upload(T* dev, const float* host, size_t n) {
    T* values = (T*)bench_staging(n * sizeof(T));
    bench_pieces(n, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) { values[i] = (T)host[i]; }
    });
    cudaCheck(cudaMemcpy(dev, values, n * sizeof(T), cudaMemcpyHostToDevice));
}

// Stands in an output's host memory for a result that the reference left out, see Bench::sample(): a NaN that no
// computation returns.
inline float bench_left_out() {
    const uint32_t bits = 0x7FC5A3B1;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
inline bool bench_is_left_out(float x) {
    float left_out = bench_left_out();
    return memcmp(&x, &left_out, sizeof(x)) == 0;
}

// Returns the largest error, in units of `factor` times the tolerance. NaN counts as an infinite error. If `sampled`,
// a result without a reference only has to be finite.
template <class T> inline double bench_compare(const char* name, const T* dev, const float* ref, size_t n,
                                               Tolerance tolerance, bool sampled, double factor, std::string* wrong) {
    T* out = (T*)bench_staging(n * sizeof(T));
    cudaCheck(cudaMemcpy(out, dev, n * sizeof(T), cudaMemcpyDeviceToHost));
    const size_t piece = 1 << 16, pieces = ceil_div(n, piece);
    struct Piece {
        double worst;
        size_t at, bad;
    };
    std::vector<Piece> found(pieces, Piece{-1, 0, 0});
    parallel_for(pieces, [&](size_t p) {
        Piece f = {-1, 0, 0};
        for (size_t i = p * piece; i < std::min(n, (p + 1) * piece); i++) {
            double got = (double)(float)out[i], want = (double)ref[i], err = fabs(got - want);
            if (sampled && std::isfinite(got) && bench_is_left_out(ref[i])) { continue; }
            double allowed = factor * ((double)tolerance.atol + (double)tolerance.rtol * fabs(want));
            // an infinite result must be that infinity: its err is NaN, and any other value would be within `allowed`
            bool right = got == want || (std::isfinite(want) && err <= allowed);
            double ratio = got == want ? 0 : err / allowed;
            if (!right && !(ratio > 1)) { ratio = INFINITY; }
            f.bad += !right;
            if (ratio > f.worst) { f.worst = ratio, f.at = i; }
        }
        found[p] = f;
    });
    Piece all = {0, 0, 0};
    for (const Piece& f : found) {
        all.bad += f.bad;
        if (f.worst > all.worst) { all.worst = f.worst, all.at = f.at; }
    }
    if (all.bad) {
        char text[512];
        snprintf(text, sizeof(text), "%s: %zu of %zu wrong, worst at %zu: got %.9g, want %.9g", name, all.bad, n,
                 all.at, (double)(float)out[all.at], (double)ref[all.at]);
        *wrong += (wrong->empty() ? "" : "; ") + std::string(text);
    }
    return all.worst;
}

// 32 pseudo-random bits. Two rounds, because after one round two seeds give the same numbers in another order.
inline uint32_t bench_random(size_t i, uint32_t seed) { return hash_bits(hash_bits((uint32_t)i, seed), seed + 1); }

// Independent normal random numbers by Box and Muller 1958. Element i depends on (seed, i) only.
inline void bench_fill_normal(float* host, size_t n, uint32_t seed, float scale, float shift) {
    bench_pieces(n, [=](size_t begin, size_t end) { // begin is even, so no pair is split between pieces
        for (size_t i = begin; i < end; i += 2) {
            double u = (bench_random(i, seed) + 0.5) / 4294967296.0;
            double angle = 2 * M_PI * bench_random(i + 1, seed) / 4294967296.0, radius = sqrt(-2 * log(u));
            host[i] = shift + scale * (float)(radius * cos(angle));
            if (i + 1 < end) { host[i + 1] = shift + scale * (float)(radius * sin(angle)); }
        }
    });
}

// Rows (C) of equal values, multiples of 1/8 between -4 and 4: their sums are exact in float up to C = 2^18.
inline void bench_fill_rows(float* host, size_t num_rows, size_t C, uint32_t seed) {
    for (size_t row = 0; row < num_rows; row++) {
        float value = (float)((int)(bench_random(row, seed) % 65) - 32) / 8;
        for (size_t c = 0; c < C; c++) { host[row * C + c] = value; }
    }
}

// Values of so few bits that the sums of their products are exact in fp32, in any order. Every float type holds them.
inline void bench_fill_exact_large(float* host, size_t n, uint32_t seed) { // multiples of 1/8 from 24 to 31.875
    bench_pieces(n, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) { host[i] = 24.0f + (float)(bench_random(i, seed) % 64) / 8; }
    });
}
inline void bench_fill_exact_small(float* host, size_t n, uint32_t seed) { // multiples of 1/64 from 1/8 to 15/64
    bench_pieces(n, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) { host[i] = (float)(8 + bench_random(i, seed) % 8) / 64; }
    });
}
// The second half of each row (K) becomes negative. If rows of exact large values are multiplied with exact small ones,
// the sums grow to some 2.5 K, and then almost all of it cancels: a sum that is kept in 16 bits on its way loses the
// result. In fp32 partial sums are exact, because they are multiples of 2^-9 and less than 2^15 (K <= 8704).
inline void bench_negate_halves(float* host, size_t num_rows, size_t K) {
    bench_pieces(num_rows * K, [=](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i++) { host[i] = i % K < K / 2 ? host[i] : -host[i]; }
    });
}
// Rows (K) of zeros, but one normal random value in each.
inline void bench_fill_one_hot(float* host, size_t num_rows, size_t K, uint32_t seed) {
    std::vector<float> values(num_rows);
    bench_fill_normal(values.data(), num_rows, seed, 1.0f, 0.0f);
    std::fill(host, host + num_rows * K, 0.0f);
    for (size_t row = 0; row < num_rows; row++) { host[row * K + bench_random(row, seed) % K] = values[row]; }
}

// Token ids distributed as in text: the probability of id i is proportional to 1 / (i + 1).
inline void bench_fill_ids(float* ids, size_t n, int V, std::mt19937& rng) {
    for (size_t i = 0; i < n; i++) {
        double u = (rng() + 0.5) / 4294967296.0;
        ids[i] = (float)std::min(V - 1, (int)exp(u * log(V + 1.0)) - 1);
    }
}

// Normal random values, except the first ones: the largest finite values, whose x^3 overflows, +-1e4, +-20 and +-0.
inline void bench_fill_extremes(float* inp, size_t n, uint32_t seed) {
    bench_fill_normal(inp, n, seed, 1.0f, 0.0f);
    const float largest = sizeof(floatX) == 4                 ? 3.40282347e38f
                          : std::is_same<floatX, half>::value ? 65504.0f
                                                              : 3.38953139e38f;
    const float special[] = {largest, -largest, 1e4f, -1e4f, 20.0f, -20.0f, 0.0f, -0.0f};
    for (size_t i = 0; i < 8 && i < n; i++) { inp[i] = special[i]; }
}

// ---- what an op file declares ------------------------------------------------------------

// Element i of a huge input, on the device and on the host: a multiple of 1/64 between -2 and 2, which every float type
// holds. The position has 64 bits.
__host__ __device__ inline float bench_huge_value(size_t i, uint32_t seed) {
    uint32_t bits = hash_bits(hash_bits((uint32_t)i, seed), seed + (uint32_t)(i >> 32));
    return (float)((int)(bits % 257) - 128) / 64;
}
template <class T> __global__ void bench_huge_fill_kernel(T* x, size_t n, uint32_t seed) {
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        x[i] = (T)bench_huge_value(i, seed);
    }
}

// A check with buffers of more than 2^31 elements: an index of 32 bits, or a product of two ints, would overflow.
// Inputs are made on the device, and a sample of the output's rows is compared with the op's reference.
//
//     b.huge(2 * BenchHuge::elements(1) * sizeof(floatX), [](BenchHuge& h) {
//         size_t n = h.elements(1);
//         const floatX* inp = h.input<floatX>(n, 0); // 0: the seed
//         floatX* out = h.output<floatX>(n);
//         simple_kernel(out, inp, n, h.stream);
//         h.compare("out", out, n, 1, {0, 0}, [&](size_t row, float* want) { want[0] = 2 * h.value(row, 0); });
//     });
struct BenchHuge {
    cudaStream_t stream;
    std::vector<void*> memory; // device memory of this check
    std::string wrong;
    size_t compared; // rows

    // the least multiple of C that is more than 2^31 by a million
    static size_t elements(size_t C) { return ceil_div(((size_t)1 << 31) + (1 << 20), C) * C; }
    static float value(size_t i, uint32_t seed) { return bench_huge_value(i, seed); }
    static void fill(float* host, size_t first, size_t n, uint32_t seed) { // n values of an input, from `first` on
        for (size_t i = 0; i < n; i++) { host[i] = bench_huge_value(first + i, seed); }
    }
    template <class T> T* output(size_t n) {
        T* x = (T*)device_malloc_check(n * sizeof(T), "--huge");
        memory.push_back(x);
        cudaCheck(cudaMemset(x, 0xFF, n * sizeof(T))); // NaN
        return x;
    }
    template <class T> T* input(size_t n, uint32_t seed) {
        T* x = output<T>(n);
        bench_huge_fill_kernel<T><<<4096, 256>>>(x, n, seed);
        cudaCheck(cudaGetLastError());
        return x;
    }
    // an input of less than 2^31 elements with values of the op's own; kept on the host, too
    template <class T> T* upload(const std::vector<float>& host) {
        T* x = output<T>(host.size());
        bench_upload(x, host.data(), host.size());
        return x;
    }
    // Compares rows (C) of out (num_rows,C): the first and the last ones, those around element 2^31 and around byte 2^32,
    // and 64 random ones. reference(row, want) writes the right values of a row.
    template <class T> void compare(const char* name, const T* out, size_t num_rows, size_t C, Tolerance tolerance,
                                    const std::function<void(size_t, float*)>& reference) {
        std::vector<size_t> rows = {0, 1, num_rows - 2, num_rows - 1};
        for (size_t element : {(size_t)1 << 31, ((size_t)1 << 32) / sizeof(T)}) {
            size_t row = element / C;
            for (size_t r = row - 2; r <= row + 2; r++) { rows.push_back(r); }
        }
        for (size_t i = 0; i < 64; i++) {
            rows.push_back((((size_t)bench_random(i, 1) << 32) + bench_random(i, 2)) % num_rows);
        }
        std::vector<float> want(C);
        for (size_t row : rows) {
            if (row >= num_rows || !wrong.empty()) { continue; }
            reference(row, want.data());
            bench_compare(name, out + row * C, want.data(), C, tolerance, false, 1, &wrong);
            if (!wrong.empty()) { wrong += " in row " + std::to_string(row); }
            compared++;
        }
    }
};

// A configuration of a kernel, and what it stands for; see Bench::config.
struct BenchConfig {
    int value;
    std::string label; // without commas and quotes
};

struct BenchKernel {
    int number;
    const char* what;
    std::function<void(int)> launch;
    std::vector<int> configs;                 // what the run sweeps
    int min_arch;                             // see Bench::kernel
    const char* config_name = "block size";   // what the launcher's int means
    std::vector<std::string> config_labels{}; // one per configuration, or empty

    int num_launches = 0; // 0: not declared
    double bytes = 0;     // memory traffic of all its launches, with intermediate results; 0: not declared
    float tolerance = 1;  // factor on the tolerances of the outputs

    // if its matrix products are not in floatX: their type, what measures the library's rate, the measured TFLOP/s
    const char* rate_type = NULL;
    std::function<double()> measure_rate = nullptr;
    double matrix_tflops = 0;
};

// What declare() declared, for one shape.
struct BenchState {
    const char* op = "";                         // the op's name
    double bytes = 0, flops = 0;                 // the least that a launch must move and compute
    double bytes_by_data = 0, flops_by_data = 0; // the part of these costs that depends on the inputs' values
    bool reads_only = false;                     // its writes are negligible
    int best = -1;                               // number of the promoted or best kernel; -1: none
    bool is_promoted = false;                    // true if a copy of kernel `best` is in train_gpt2.cu
    uint32_t seed = 0, num_inputs = 0;
    bool guards = true;
    bool sampled = false;           // some references compute only a part of the results
    const char* varies = "BTC";     // see Bench::varies
    std::vector<const char*> cases; // names of the kinds of input; empty: there is one kind
    int which = 0;                  // the kind of input that declare() was called for
    std::vector<const char*> kinds; // names of the kinds of operation; empty: there is one kind
    int kind = 0;                   // the kind of operation that declare() was called for
    std::mt19937 rng;
    std::vector<BenchBuffer> buffers;
    std::vector<BenchKernel> kernels;
    std::vector<std::function<void()>> references;
    std::function<double()> matrix_rate;
    std::function<void(BenchHuge&)> huge; // see Bench::huge()
    double huge_bytes = 0;
};

// The configurations of an op's promoted kernel: 0, which is the launcher's default, and those in llmc/tuned.h.
inline std::vector<int> bench_tunable(const char* op) {
    int index = tunable_op(op);
    require(index >= 0);
    std::vector<int> configs = {0};
    for (const int* config = tunable_ops[index].configs; *config; config++) { configs.push_back(*config); }
    return configs;
}
inline size_t bench_sample_size(); // --sample

struct Bench {
    int B, T, C, NH, V; // the shape
    cudaStream_t stream;
    bool dry;          // declare() must not use the device: it is called only for the list of kernels
    BenchState& state; // owned by the harness; copies of a Bench share it
    std::mt19937& rng; // for input_from

    // Random normal values times `scale` plus `shift`, rounded to T.
    template <class T> Buffer<T> input(const char* name, size_t n, float scale = 1.0f, float shift = 0.0f) {
        uint32_t seed = hash_bits(state.num_inputs, state.seed);
        return input_from<T>(name, n, [=](float* host) { bench_fill_normal(host, n, seed, scale, shift); });
    }
    // Values by one of the functions bench_fill_...
    template <class T> Buffer<T> input_filled(const char* name, size_t n, void (*fill)(float*, size_t, uint32_t)) {
        uint32_t seed = next_seed();
        return input_from<T>(name, n, [=](float* host) { fill(host, n, seed); });
    }
    uint32_t next_seed() const { return hash_bits(state.num_inputs, state.seed); } // of the next input
    // Uniform random integers 0 .. limit-1.
    Buffer<int> input_ids(const char* name, size_t n, int limit) {
        uint32_t seed = hash_bits(state.num_inputs, state.seed);
        return input_from<int>(name, n, [=](float* host) {
            for (size_t i = 0; i < n; i++) { host[i] = (float)(bench_random(i, seed) % (unsigned)limit); }
        });
    }
    // An input with the op's own values: fill(host) is called at once and writes n floats, which are then rounded to T.
    template <class T> Buffer<T> input_from(const char* name, size_t n, std::function<void(float*)> fill) {
        Buffer<T> x = make<T>(BenchKind::input, name, n, true);
        state.num_inputs++;
        if (dry) { return x; }
        fill(x.host);
        bench_pieces(n, [=](size_t begin, size_t end) {
            for (size_t i = begin; i < end; i++) { x.host[i] = (float)(T)x.host[i]; }
        });
        state.buffers.back().upload = [=] { bench_upload(x.dev, x.host, n); };
        state.buffers.back().upload();
        return x;
    }
    // An output. It is filled with NaN before every launch and compared with its .host afterwards.
    template <class T> Buffer<T> output(const char* name, size_t n, Tolerance tolerance) {
        Buffer<T> x = make<T>(BenchKind::output, name, n, true);
        compared(x, name, n, tolerance);
        return x;
    }
    // A buffer that kernels update in place or add to. It is set to start's values before every launch and compared
    // with its .host afterwards.
    template <class T> Buffer<T> inout(const char* name, size_t n, Buffer<T> start, Tolerance tolerance) {
        Buffer<T> x = make<T>(BenchKind::inout, name, n, true);
        compared(x, name, n, tolerance);
        if (!dry) { state.buffers.back().start = start.dev; }
        return x;
    }
    // Device memory for the kernels' own use, filled with NaN before every launch.
    template <class T> Buffer<T> scratch(const char* name, size_t n) {
        return make<T>(BenchKind::scratch, name, n, false);
    }
    // Names the kinds of input that the op is checked with, at every check shape; number 0 is the one that is timed.
    // Returns the number of the kind to declare.
    int cases(std::vector<const char*> names) {
        state.cases = names;
        require(state.which < (int)names.size());
        return state.which;
    }
    // Names the kinds of operation that the op stands for; number 0 is the one that is timed unless --kind selects
    // another. Returns the number of the kind to declare.
    int kinds(std::vector<const char*> names) {
        state.kinds = names;
        require(state.kind < (int)names.size());
        return state.kind;
    }
    // What --stress may draw: B, T, C and V for these numbers of the shape, up to the largest value in the check shapes
    // and divisible by what divides all values there, and H for the number of heads, with C / NH as in a check shape.
    void varies(const char* letters) { state.varies = letters; }
    // fn reads the .host of the inputs and writes the right values to the .host of the outputs. It runs once per shape,
    // but not if dry.
    void reference(std::function<void()> fn) { state.references.push_back(fn); }
    // The rows whose results the reference computes, in ascending order. These are all rows, or, if that would take more
    // than 2^37 FLOPs (a second on 16 cores), a sample with the first and the last row. A row is any independent part of
    // the work: a token, a head, a sequence. Results of other rows only have to be finite.
    std::vector<size_t> sample(size_t num_rows, double flops_per_row) {
        std::vector<size_t> rows;
        if (dry) { return rows; }
        const double limit = 1ull << 37, most = 256;
        size_t wanted = bench_sample_size();
        if (wanted == 0) {
            bool all = (double)num_rows * flops_per_row <= limit;
            wanted = all ? num_rows : (size_t)std::max(2.0, std::min(most, limit / 4 / flops_per_row));
        }
        if (wanted >= num_rows) {
            for (size_t row = 0; row < num_rows; row++) { rows.push_back(row); }
            return rows;
        }
        state.sampled = true;
        rows = {0, num_rows - 1};
        for (size_t i = 2; i < wanted; i++) { rows.push_back(bench_random(i, state.seed) % num_rows); }
        std::sort(rows.begin(), rows.end());
        rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
        return rows;
    }
    // The least that a launch must move and compute. bytes_by_data and flops_by_data are the part of it that depends on
    // the inputs' values, which the launcher cannot know. The rest must equal the cost in the Op of the launcher.
    void cost(double least_bytes, double least_flops, double bytes_by_data = 0, double flops_by_data = 0) {
        state.bytes = least_bytes, state.flops = least_flops;
        state.bytes_by_data = bytes_by_data, state.flops_by_data = flops_by_data;
    }
    // The op writes next to nothing, so its bandwidth is compared with that of a read, not of a copy.
    void reads_only() { state.reads_only = true; }
    // Declares a kernel; number 0 is the vendor's library, which must compute the FLOPs of cost(). The run sweeps the
    // configurations, which are block sizes unless config() says otherwise; {0} means that the kernel has one
    // configuration only. A 0 among others means the launcher's default, and the run prints a note if another
    // configuration is more than 2% faster.
    // min_arch: 80 if the kernel needs a device and a binary of compute capability 8.0 or more, -90 if it needs code
    // compiled for sm_90a. If they do not fit, the kernel is skipped.
    void kernel(int number, const char* what, std::function<void(int)> launch,
                std::vector<int> configs = {64, 128, 256, 512, 1024}, int min_arch = 0) {
        for (const BenchKernel& k : state.kernels) { require(k.number != number); }
        require(number >= 0 && !configs.empty());
        state.kernels.push_back({number, what, launch, configs, min_arch});
    }
    // Says what the configurations of the kernel declared last are, if they are not block sizes.
    void config(const char* name) { state.kernels.back().config_name = name; }
    // The same for configurations that need a name each. They replace the list given to kernel() ...
    void config(const char* name, const std::vector<BenchConfig>& configs) {
        BenchKernel& k = state.kernels.back();
        k.config_name = name, k.configs.clear(), k.config_labels.clear();
        for (const BenchConfig& c : configs) {
            require(c.label.find_first_of(",\"") == std::string::npos);
            k.configs.push_back(c.value), k.config_labels.push_back(c.label);
        }
    }
    // ... or label(configuration) names each of that list.
    void config(const char* name, std::function<std::string(int)> label) {
        std::vector<BenchConfig> configs;
        for (int value : state.kernels.back().configs) { configs.push_back({value, label(value)}); }
        config(name, configs);
    }
    // Sets the number of launches of the kernel declared last, and the bytes that these launches move. For ops that
    // compare fused with unfused kernels.
    void moves(int num_launches, double bytes) {
        state.kernels.back().num_launches = num_launches, state.kernels.back().bytes = bytes;
    }
    // The matrix products of the kernel declared last have this type, "e4m3" for example. Its share of the matrix rate
    // is then of what measure() returns: the TFLOP/s of the vendor's library with the same type.
    void kernel_rate(const char* type, std::function<double()> measure) {
        state.kernels.back().rate_type = type, state.kernels.back().measure_rate = measure;
    }
    // Lets the errors of the kernel declared last be `factor` times larger, because it computes in a coarser type or
    // sums in a worse order. The comment at the top of the op's file gives the reason.
    void coarser(float factor) { state.kernels.back().tolerance = factor; }
    // The kernel that is copied to train_gpt2.cu; the op's file has the marks `// ==== promoted: OP ====`. The run prints
    // a note if another kernel is faster by more than 2%.
    void promoted(int number) { state.best = number, state.is_promoted = true; }
    // The same for an op without a copy in train_gpt2.cu.
    void best(int number) { state.best = number, state.is_promoted = false; }
    // measure() returns the TFLOP/s that the vendor's library reaches in this run. It is called once, before timing.
    // For ops bound by FLOPs.
    void matrix_rate(std::function<double()> measure) { state.matrix_rate = measure; }

    // The check that --huge runs, with this much device memory; see BenchHuge.
    void huge(double bytes, std::function<void(BenchHuge&)> check) { state.huge_bytes = bytes, state.huge = check; }

    // ---- used by the harness itself ----
    template <class T> Buffer<T> make(BenchKind kind, const char* name, size_t n, bool has_host) {
        Buffer<T> x = {nullptr, nullptr};
        if (dry) { return x; }
        size_t guard = state.guards ? BENCH_GUARD : 0, bytes = n * sizeof(T);
        uint8_t* memory;
        cudaCheck(cudaMalloc(&memory, std::max<size_t>(bytes + 2 * guard, 1)));
        x.dev = (T*)(memory + guard);
        if (has_host) { x.host = (float*)malloc_check(n * sizeof(float)); }
        state.buffers.push_back({kind, name, memory + guard, bytes, x.host, NULL, 0, guard > 0, nullptr, nullptr});
        return x;
    }
    template <class T> void compared(Buffer<T> x, const char* name, size_t n, Tolerance tolerance) {
        if (dry) { return; }
        const BenchState* s = &state;
        state.buffers.back().compare = [=](double factor, std::string* wrong) {
            return bench_compare(name, x.dev, x.host, n, tolerance, s->sampled, factor, wrong);
        };
        bench_pieces(n, [=](size_t begin, size_t end) { std::fill(x.host + begin, x.host + end, bench_left_out()); });
    }
};

// ---- flags -------------------------------------------------------------------------------

struct BenchFlags {
    int kernel = -1; // number of the kernel to run; -1: all
    int list = 0, check = 0, full = 0, huge = 0, tune = 0, hot = 0, sustained = 0, guards = 1;
    int config = -1, input_case = -1, kind = -1, sample = 0, stress = 0, seed = 1337, repeats = 100, schedule = -1;
    const char *flush = "read", *csv = NULL, *json = NULL, *tune_file = NULL;
    bool shape_given = false;
};
inline BenchFlags& bench_flags() {
    static BenchFlags flags;
    return flags;
}
inline size_t bench_sample_size() { return (size_t)bench_flags().sample; }

// Parses argv into flags and *shape, which holds the op's default shape before the call. Exits on --help and on usage
// errors.
inline void bench_parse(int argc, char** argv, const char* name, Shape* shape) {
    BenchFlags& f = bench_flags();
    const Option opts[] = {
        {OPT_SECTION, 0, NULL, "What to do", NULL, NULL, NULL, 0, 0},
        {OPT_BOOL, 0, NULL, "list", &f.list, NULL, "list the kernels; needs no GPU", 0, 0},
        {OPT_BOOL, 0, NULL, "check", &f.check, NULL,
         "only check, do not time: every kernel and configuration, at odd shapes or at the given shape", 0, 0},
        {OPT_BOOL, 0, NULL, "full", &f.full, NULL, "with --check: check at the shape that is timed", 0, 0},
        {OPT_BOOL, 0, NULL, "huge", &f.huge, NULL,
         "with --check: check the promoted kernel with more than 2^31 elements instead, in ops that can", 0, 0},
        {OPT_INT, 0, NULL, "stress", &f.stress, "N",
         "with --check: check N random shapes, each with a random seed and kind of input; --seed repeats the choice", 0,
         INT_MAX},
        {OPT_BOOL, 0, NULL, "tune", &f.tune, NULL,
         "time every configuration of the promoted kernel and keep the fastest, for train_gpt2cu --tuned", 0, 0},
        {OPT_INT, 0, NULL, "config", &f.config, NULL,
         "use only this configuration (block size, tile rows, form: see --list) of the kernels that have it; 0: their "
         "default; -1: sweep all",
         -1, INT_MAX},
        {OPT_INT, 0, NULL, "block-size", &f.config, NULL, "the older name of --config", -1, INT_MAX},
        {OPT_INT, 0, NULL, "case", &f.input_case, NULL,
         "kind of input, by its number in --list; -1: --check tries all of them, timing takes 0", -1, INT_MAX},
        {OPT_INT, 0, NULL, "kind", &f.kind, NULL,
         "kind of operation, by its number in --list; -1: --check tries all of them, timing takes the first that fits",
         -1, INT_MAX},
        {OPT_INT, 0, NULL, "sample", &f.sample, "rows",
         "compare only so many rows, heads or sequences with the CPU, in ops that can; 0: all, unless that takes "
         "seconds",
         0, INT_MAX},
        {OPT_SECTION, 0, NULL, "Shape", NULL, NULL, NULL, 0, 0},
        {OPT_INT, 'B', NULL, "batch", &shape->B, NULL, "sequences", 1, INT_MAX},
        {OPT_INT, 'T', NULL, "time", &shape->T, NULL, "tokens in a sequence", 1, INT_MAX},
        {OPT_INT, 'C', NULL, "channels", &shape->C, NULL, "channels", 1, INT_MAX},
        {OPT_INT, 0, "NH", "heads", &shape->NH, NULL, "attention heads", 1, INT_MAX},
        {OPT_INT, 'V', NULL, "vocab", &shape->V, NULL, "tokens in the vocabulary", 1, INT_MAX},
        {OPT_SECTION, 0, NULL, "Measurement", NULL, NULL, NULL, 0, 0},
        {OPT_BOOL, 0, NULL, "hot", &f.hot, NULL, "do not flush the L2 cache before each timed launch", 0, 0},
        {OPT_BOOL, 0, NULL, "sustained", &f.sustained, NULL,
         "also time launches back to back for a second, as in a training step: no flush, no rest", 0, 0},
        {OPT_STR, 0, NULL, "flush", &f.flush, "write|read",
         "how the L2 cache is flushed; write leaves it full of dirty lines, whose write-back overlaps the timed kernel",
         0, 0},
        {OPT_INT, 0, NULL, "repeats", &f.repeats, "launches",
         "timed launches per configuration; fewer if they take more than a second", 1, 10000},
        {OPT_INT, 0, NULL, "seed", &f.seed, NULL, "seed of the random inputs", 0, INT_MAX},
        {OPT_BOOL, 0, NULL, "guards", &f.guards, NULL,
         "check the bytes around each buffer; turn it off for compute-sanitizer, which then sees reads past the end", 0,
         0},
#ifdef CUDA_EMULATION
        {OPT_INT, 0, NULL, "schedule", &f.schedule, NULL,
         "order of warps and lanes: 0 by their numbers, others drawn; -1: another one for each launch", -1, INT_MAX},
#endif
        {OPT_SECTION, 0, NULL, "Results", NULL, NULL, NULL, 0, 0},
        {OPT_STR, 0, NULL, "csv", &f.csv, "FILE", "write one row per kernel and configuration", 0, 0},
        {OPT_STR, 0, NULL, "json", &f.json, "FILE", "write the same in Google Benchmark's layout", 0, 0},
        {OPT_STR, 0, NULL, "tune-file", &f.tune_file, "FILE",
         "the file of --tune, which replaces its row of the same op, GPU, precision and shape; default: "
         "results/GPU/tuned.csv",
         0, 0},
    };
    const int num_opts = (int)(sizeof(opts) / sizeof(opts[0]));
    cli_program(argv[0]);
    std::vector<char*> args(argv, argv + argc);
    if (argc > 1 && argv[1][0] != '-') {
        int64_t number;
        bool fits;
        if (!cli_read_integer(argv[1], &number, &fits) || !fits || number < 0 || number > INT_MAX) {
            cli_fail("'%s' is not the number of a kernel, see %s --list", argv[1], argv[0]);
        }
        f.kernel = (int)number;
        args.erase(args.begin() + 1);
    }
    args.push_back(NULL);
    std::string about =
        std::string(name) +
        ": checks kernels against the CPU and times them. The first argument may be the number of a "
        "kernel: then only that one runs, in all its configurations. Without it all kernels run, side by side.";
    cli_parse((int)args.size() - 1, args.data(), about.c_str(), opts, num_opts);
    for (int i = 0; i < num_opts; i++) {
        const void* v = opts[i].value;
        bool is_shape = v == &shape->B || v == &shape->T || v == &shape->C || v == &shape->NH || v == &shape->V;
        f.shape_given |= is_shape && cli_changed(opts, i);
    }
}

// ---- the device ----------------------------------------------------------------------------

// arch[0] = architecture that this code was compiled for (90 for sm_90); arch[1] = 90 if for sm_90a, else 0
__global__ void bench_probe_kernel(int* arch) {
#ifdef __CUDA_ARCH__
    arch[0] = __CUDA_ARCH__ / 10;
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    arch[1] = 90;
#else
    arch[1] = 0;
#endif
}

// Adds a hash of data (n bytes) to *sum. The sum is of integers, so it does not depend on the order of the additions.
__global__ void bench_checksum_kernel(unsigned long long* sum, const uint8_t* data, size_t n) {
    unsigned long long mine = 0;
    size_t words = n / 4, stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += stride) {
        mine += hash_bits(reinterpret_cast<const uint32_t*>(data)[i], (uint32_t)i);
    }
    if (blockIdx.x == 0 && threadIdx.x < n % 4) {
        mine += hash_bits(data[words * 4 + threadIdx.x], (uint32_t)(words * 4 + threadIdx.x));
    }
    for (int offset = 16; offset > 0; offset /= 2) { mine += __shfl_xor_sync(0xFFFFFFFFu, mine, offset); }
    if (threadIdx.x % 32 == 0) { atomicAdd(sum, mine); }
}

// Reads n vectors, which are all zero. The store never happens, but it forces the compiler to keep the loads.
__global__ void bench_read_kernel(int4* data, size_t n) {
    int sum = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        int4 x = __ldcg(data + i);
        sum |= x.x | x.y | x.z | x.w;
    }
    if (sum != 0) { data[0].x = sum; }
}

// Keeps the device busy while the host queues the launches to be timed, so that none of them waits for the host.
__global__ void bench_delay_kernel(unsigned long long ns) {
#ifdef CUDA_EMULATION
    (void)ns; // a launch ends before the next one is queued
#else
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begin < ns);
#endif
}

__global__ void bench_empty_kernel() {}

// The two counters of an SM, read one after the other.
struct alignas(16) BenchClock {
    unsigned long long cycles, ns;
};
enum { BENCH_MAX_SMS = 1024 }; // numbers of SMs may have gaps

// Sets clocks[i] to the counters of SM i, for each SM that runs a block of this launch. clocks: (BENCH_MAX_SMS)
__global__ void bench_clock_kernel(BenchClock* clocks) {
    unsigned sm;
    BenchClock now;
#ifdef CUDA_EMULATION
    sm = blockIdx.x;
    emulation_clock(&now.cycles, &now.ns);
#else
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now.cycles));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now.ns));
#endif
    if (sm < BENCH_MAX_SMS) { clocks[sm] = now; }
}

struct BenchDevice {
    char name[256] = "";
    int arch = 0;         // compute capability of the device, 90 for 9.0
    int compiled[2] = {}; // [0]: architecture that its code was compiled for; [1]: 90 if for sm_90a, else 0
    size_t l2_bytes = 0;
    uint8_t* flush = NULL; // (flush_bytes) zeros
    size_t flush_bytes = 0;
    unsigned long long* checksum = NULL; // (1)
    BenchClock* clocks = NULL;           // (2,BENCH_MAX_SMS) before and after the launches that are timed
    cudaStream_t stream = 0;
    std::vector<cudaEvent_t> events;
    double copy_gbs = 0;      // speed of a copy on the device, bytes read + written; 0: not measured
    double read_gbs = 0;      // speed of a read on the device; 0: not measured
    double empty_ms = 0;      // time of an empty launch; 0: not measured
    double matrix_tflops = 0; // speed of cuBLASLt's matmul, for "% of matrix rate"; 0: not known
};

// Returns true and fills *d if there is a GPU. Otherwise prints one line on stderr.
inline bool bench_open(BenchDevice* d, const char* op) {
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count == 0) {
        fprintf(stderr,
                "error: no GPU here (%s). On Modal: GPU_NAME=H200 modal run benchmark_on_modal.py --compile-command "
                "\"make %s\" --run-command \"./%s\"\n",
                e != cudaSuccess ? cudaGetErrorString(e) : "no device", op, op);
        return false;
    }
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    snprintf(d->name, sizeof(d->name), "%s", properties.name);
    d->arch = 10 * properties.major + properties.minor;
    d->l2_bytes = (size_t)device_attribute(cudaDevAttrL2CacheSize);
    // a blocking stream: its work is ordered with the default stream, on which the harness copies
    cudaCheck(cudaStreamCreate(&d->stream));
    int* probe;
    cudaCheck(cudaMalloc(&probe, 2 * sizeof(int)));
    bench_probe_kernel<<<1, 1>>>(probe);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaMemcpy(d->compiled, probe, 2 * sizeof(int), cudaMemcpyDeviceToHost));
    cudaCheck(cudaFree(probe));
    cudaCheck(cudaMalloc(&d->checksum, sizeof(*d->checksum)));
    cudaCheck(cudaMalloc(&d->clocks, 2 * BENCH_MAX_SMS * sizeof(*d->clocks)));
    return true;
}

// Returns the versions of the driver ("580.65.06", if /proc has it) and of the CUDA that the driver supports.
inline std::string bench_driver() {
    char line[512] = "", version[64] = "";
    FILE* f = fopen("/proc/driver/nvidia/version", "r");
    if (f) {
        if (!fgets(line, sizeof(line), f)) { line[0] = '\0'; }
        fclose(f);
    }
    for (char* word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n")) {
        if (isdigit((unsigned char)word[0]) && strchr(word, '.')) {
            snprintf(version, sizeof(version), "%s", word);
            break;
        }
    }
    int cuda = 0;
    cudaCheck(cudaDriverGetVersion(&cuda));
    char text[128];
    snprintf(text, sizeof(text), "%s%sCUDA %d.%d", version, version[0] ? ", " : "", cuda / 1000, cuda % 1000 / 10);
    return text;
}

inline void bench_print_header(const BenchDevice& d, const char* op, const Shape& s) {
    const BenchFlags& f = bench_flags();
    printf("%s, %s, B %d T %d C %d NH %d V %d\n", op, PRECISION_NAME, s.B, s.T, s.C, s.NH, s.V);
    printf("%s, %d SMs, clocks up to %d MHz (memory %d MHz), L2 %.0f MB, driver %s\n", d.name, num_multiprocessors(),
           device_attribute(cudaDevAttrClockRate) / 1000, device_attribute(cudaDevAttrMemoryClockRate) / 1000,
           (double)d.l2_bytes / 1e6, bench_driver().c_str());
    printf("code for compute capability %d.%d%s, L2 %s, seed %d\n", d.compiled[0] / 10, d.compiled[0] % 10,
           d.compiled[1] ? "a" : "",
           f.hot                          ? "hot"
           : strcmp(f.flush, "read") == 0 ? "flushed by reads before each launch"
                                          : "flushed by writes before each launch",
           f.seed);
}

// Returns the reason why this kernel cannot run here, or NULL.
inline const char* bench_skip_reason(const BenchDevice& d, const BenchKernel& k) {
    static char text[128];
    if (k.min_arch == 0 || (k.min_arch > 0 && d.arch >= k.min_arch && d.compiled[0] >= k.min_arch) ||
        (k.min_arch < 0 && d.compiled[1] == -k.min_arch)) {
        return NULL;
    }
    snprintf(text, sizeof(text), "needs code for sm_%d%s, device %d, binary %d", abs(k.min_arch),
             k.min_arch < 0 ? "a" : "", d.arch, d.compiled[0]);
    return text;
}

// ---- one shape: declare, check, free -----------------------------------------------------

inline void bench_free(BenchState& s) {
    cudaCheck(cudaDeviceSynchronize());
    for (BenchBuffer& x : s.buffers) {
        cudaCheck(cudaFree(x.dev - (x.guarded ? BENCH_GUARD : 0)));
        free(x.host);
    }
    s.buffers.clear();
}

inline void bench_set_guards(const BenchBuffer& x) {
    if (!x.guarded) { return; }
    uint8_t guard[BENCH_GUARD + 1];
    for (size_t i = 0; i < sizeof(guard); i++) { guard[i] = bench_guard_byte(i); }
    cudaCheck(cudaMemcpy(x.dev - BENCH_GUARD, guard, BENCH_GUARD, cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(x.dev + x.bytes, guard + x.bytes % 2, BENCH_GUARD, cudaMemcpyHostToDevice));
}

// Returns which guard a kernel has overwritten, or NULL.
inline const char* bench_broken_guard(const BenchBuffer& x) {
    if (!x.guarded) { return NULL; }
    uint8_t before[BENCH_GUARD], after[BENCH_GUARD];
    cudaCheck(cudaMemcpy(before, x.dev - BENCH_GUARD, BENCH_GUARD, cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(after, x.dev + x.bytes, BENCH_GUARD, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < BENCH_GUARD; i++) {
        if (before[i] != bench_guard_byte(i)) { return "written before its begin"; }
        if (after[i] != bench_guard_byte(x.bytes + i)) { return "written past its end"; }
    }
    return NULL;
}

inline uint64_t bench_checksum(const BenchDevice& d, const BenchBuffer& x) {
    unsigned long long sum;
    cudaCheck(cudaMemset(d.checksum, 0, sizeof(sum)));
    size_t num_blocks = std::min<size_t>(1024, ceil_div(x.bytes / 4 + 1, (size_t)256));
    bench_checksum_kernel<<<(unsigned)num_blocks, 256>>>(d.checksum, x.dev, x.bytes);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaMemcpy(&sum, d.checksum, sizeof(sum), cudaMemcpyDeviceToHost));
    return sum;
}

inline Bench bench_view(BenchState& s, const Shape& shape, cudaStream_t stream, bool dry) {
    return {shape.B, shape.T, shape.C, shape.NH, shape.V, stream, dry, s, s.rng};
}

// Runs declare() for a shape and a kind of input, sets guards, takes the inputs' checksums and computes the references.
inline void bench_declare(BenchState& s, const BenchDevice& d, void (*declare)(Bench&), const Shape& shape, int which) {
    s.which = which, s.kind = shape.kind;
    s.seed = (uint32_t)bench_flags().seed;
    s.rng.seed(s.seed);
    s.guards = bench_flags().guards;
    Bench b = bench_view(s, shape, d.stream, false);
    declare(b);
    for (BenchBuffer& x : s.buffers) {
        bench_set_guards(x);
        if (x.kind == BenchKind::input) { x.checksum = bench_checksum(d, x); }
    }
    for (auto& reference : s.references) { reference(); }
}

// Sets all buffers that a kernel may write: in-place ones to their start, all others to NaN.
inline void bench_reset(BenchState& s) {
    for (BenchBuffer& x : s.buffers) {
        if (x.kind == BenchKind::inout) {
            cudaCheck(cudaMemcpy(x.dev, x.start, x.bytes, cudaMemcpyDeviceToDevice));
        } else if (x.kind != BenchKind::input) {
            cudaCheck(cudaMemset(x.dev, 0xFF, x.bytes)); // NaN in every floating-point type
        }
    }
}

// Launches after setting all buffers that the kernel may write.
inline void bench_launch_fresh(BenchState& s, const BenchKernel& k, int config) {
    bench_reset(s);
    k.launch(config);
}

// Checks the cost that the launcher reported to the profiler in its Op. The sum over the entries whose names begin with
// the op's name must be b.cost(). Of entries with equal names only the last counts, because some checks launch twice.
// Returns the error, or "".
inline std::string bench_check_cost(const BenchState& s, const char* op) {
    double bytes = s.bytes_by_data, flops = s.flops_by_data;
    std::vector<const ProfileEntry*> last; // the last entry of each name
    for (const ProfileEntry& e : profile().entries) {
        if (strncmp(e.name, op, strlen(op)) != 0) { continue; }
        auto same = [&](const ProfileEntry* other) { return strcmp(other->name, e.name) == 0; };
        auto found = std::find_if(last.begin(), last.end(), same);
        found == last.end() ? last.push_back(&e) : (void)(*found = &e);
    }
    for (const ProfileEntry* e : last) { bytes += e->bytes, flops += e->flops; }
    auto near = [](double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); };
    if (last.empty() || (near(bytes, s.bytes) && near(flops, s.flops))) { return ""; }
    char text[256];
    snprintf(text, sizeof(text), "the launcher's Op has %.0f bytes and %.0f FLOPs, b.cost() has %.0f and %.0f", bytes,
             flops, s.bytes, s.flops);
    return text;
}

// A kernel with one configuration only.
inline bool bench_is_fixed(const BenchKernel& k) { return k.configs.size() == 1 && k.configs[0] == 0; }
// Returns what a form stands for, or "" for configurations that are plain numbers.
inline std::string bench_config_label(const BenchKernel& k, int config) {
    for (size_t i = 0; i < k.config_labels.size(); i++) {
        if (k.configs[i] == config) { return k.config_labels[i]; }
    }
    return "";
}
// Returns "block size  256", "form   22 (two consumers)", or "default" if the kernel has one configuration only.
inline std::string bench_config_text(const BenchKernel& k, int config, bool align = true) {
    if (bench_is_fixed(k)) { return "default"; }
    char text[64];
    snprintf(text, sizeof(text), align ? "%s %4d" : "%s %d", k.config_name, config);
    std::string label = bench_config_label(k, config);
    return label.empty() ? text : text + (" (" + label + ")");
}

// Kernel 0 is the vendor's library: its products must make up all FLOPs of b.cost(). Call it after the launch, before
// which library_flops was 0. Returns the error, or "".
inline std::string bench_check_library(const BenchState& s, const BenchKernel& k) {
    double flops = profile().library_flops;
    if (k.number != 0 || (flops > 0 && flops >= 0.999999 * s.flops)) { return ""; }
    char text[256];
    snprintf(text, sizeof(text), "kernel 0 is not the vendor's library: that was given %.0f of %.0f FLOPs", flops,
             s.flops);
    return text;
}

inline bool bench_is_output(const BenchBuffer& x) { return x.kind == BenchKind::output || x.kind == BenchKind::inout; }

// Launches once and returns the errors, or "". *worst: the largest error in units of the tolerance.
inline std::string bench_check(const BenchDevice& d, BenchState& s, const BenchKernel& k, int config, double* worst) {
    std::string wrong;
    auto say = [&](const BenchBuffer& x, const char* what) {
        wrong += (wrong.empty() ? "" : "; ") + std::string(x.name) + ": " + what;
    };
    *worst = 0;
    profile().entries.clear();
    profile().listing = k.number == s.best;
    profile().library_flops = 0;
    bench_launch_fresh(s, k, config);
    profile().listing = false;
    cudaError_t e = cudaDeviceSynchronize();
    if (e != cudaSuccess) { // the CUDA context is lost, so no later kernel could run
        std::string text = bench_config_text(k, config);
        printf("FAIL kernel %d %s: %s\n", k.number, text.c_str(), cudaGetErrorString(e));
        die("kernel %d, %s: %s", k.number, text.c_str(), cudaGetErrorString(e));
    }
#ifdef CUDA_EMULATION
    int num_findings; // races, deadlocks, accesses out of bounds
    wrong = emulation_findings(&num_findings);
#endif
    for (BenchBuffer& x : s.buffers) {
        const char* broken = bench_broken_guard(x);
        if (broken) {
            say(x, broken);
            bench_set_guards(x);
        }
        if (x.kind == BenchKind::input && bench_checksum(d, x) != x.checksum) {
            say(x, "an input, changed");
            x.upload(); // restore it for the kernels after this one
        }
        if (x.compare) { *worst = std::max(*worst, x.compare(k.tolerance, &wrong)); }
    }
    for (const std::string& text : {bench_check_cost(s, s.op), bench_check_library(s, k)}) {
        if (!text.empty()) { wrong += (wrong.empty() ? "" : "; ") + text; }
    }
    if (k.number != s.best || !wrong.empty()) { return wrong; }
    std::vector<uint64_t> first;
    for (BenchBuffer& x : s.buffers) {
        if (bench_is_output(x)) { first.push_back(bench_checksum(d, x)); }
    }
    bench_launch_fresh(s, k, config);
    size_t i = 0;
    for (BenchBuffer& x : s.buffers) {
        if (bench_is_output(x) && bench_checksum(d, x) != first[i++]) { say(x, "differs from launch to launch"); }
    }
    return wrong;
}

// True if --config may select this configuration. A kernel takes block sizes that it does not sweep, too.
inline bool bench_has_config(const BenchKernel& k, int config) {
    bool listed = std::find(k.configs.begin(), k.configs.end(), config) != k.configs.end();
    bool is_block_size = !bench_is_fixed(k) && strcmp(k.config_name, "block size") == 0;
    return listed || (is_block_size && config >= 1 && config <= 1024);
}
inline std::vector<int> bench_configs(const BenchKernel& k) {
    int config = bench_flags().config;
    return config >= 0 && bench_has_config(k, config) ? std::vector<int>{config} : k.configs;
}
inline bool bench_wanted(const BenchKernel& k) { return bench_flags().kernel < 0 || bench_flags().kernel == k.number; }

struct BenchCounts {
    int passed, failed, skipped;
};

// Prints one line per kernel and configuration; if quiet, only for failures. failed_kernels may be NULL.
inline void bench_check_shape(const BenchDevice& d, BenchState& s, const Shape& shape, bool quiet, BenchCounts* counts,
                              std::vector<int>* failed_kernels) {
    for (const BenchKernel& k : s.kernels) {
        if (!bench_wanted(k)) { continue; }
        const char* reason = bench_skip_reason(d, k);
        if (reason) {
            if (!bench_flags().stress) { printf("skip kernel %d (%s): %s\n", k.number, k.what, reason); }
            counts->skipped++;
            continue;
        }
        for (int config : bench_configs(k)) {
            double worst;
            std::string wrong;
#ifdef CUDA_EMULATION
            const char* missing = emulation_try([&] { wrong = bench_check(d, s, k, config, &worst); });
            if (missing) {
                if (!bench_flags().stress) {
                    printf("skip kernel %d (%s): needs %s, which is not emulated\n", k.number, k.what, missing);
                }
                counts->skipped++;
                break;
            }
#else
            wrong = bench_check(d, s, k, config, &worst);
#endif
            (wrong.empty() ? counts->passed : counts->failed)++;
            if (!wrong.empty() && failed_kernels) { failed_kernels->push_back(k.number); }
            if (wrong.empty() && quiet) { continue; }
            printf("%s kernel %d %s, B %d T %d C %d NH %d V %d%s%s%s%s: ", wrong.empty() ? "ok" : "FAIL", k.number,
                   bench_config_text(k, config).c_str(), shape.B, shape.T, shape.C, shape.NH, shape.V,
                   s.kinds.empty() ? "" : ", ", s.kinds.empty() ? "" : s.kinds[s.kind], s.which ? ", " : "",
                   s.which ? s.cases[s.which] : "");
            if (wrong.empty()) {
                printf("error %.2f of ", worst);
                if (k.tolerance != 1) { printf("%g times the ", k.tolerance); }
                printf("tolerance\n");
            } else {
                printf("%s\n", wrong.c_str());
            }
            fflush(stdout);
        }
    }
}

// Checks all kernels with one shape and one kind of input. may_skip: the emulation may leave it out if it takes too long.
inline void bench_check_case(const BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& s, int which,
                             bool may_skip, BenchCounts* counts) {
    BenchState state;
    state.op = op;
#ifdef CUDA_EMULATION
    BenchState cost;
    cost.which = which, cost.kind = s.kind;
    Bench dry = bench_view(cost, s, 0, true);
    declare(dry);
    const char* missing = may_skip && !emulation_affords(cost.bytes, cost.flops) ? "less time" : NULL;
    if (!missing) {
        missing = emulation_try([&] { bench_declare(state, d, declare, s, which); });
    }
    if (missing) {
        printf("skip B %d T %d C %d NH %d V %d: needs %s, in the emulation\n", s.B, s.T, s.C, s.NH, s.V, missing);
        bench_free(state);
        return;
    }
#else
    (void)may_skip;
    bench_declare(state, d, declare, s, which);
#endif
    bench_check_shape(d, state, s, bench_flags().stress > 0, counts, NULL);
    bench_free(state);
}

// ---- --huge --------------------------------------------------------------------------------

inline int bench_run_huge(const BenchDevice& d, const char* op, const BenchState& s) {
    size_t free_bytes, total_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total_bytes));
    const char* missing = NULL;
    if (!s.huge) { missing = "the op has no such check"; }
    if (s.huge && s.huge_bytes > 0.95 * (double)free_bytes) { missing = "too little memory"; }
#ifdef CUDA_EMULATION
    missing = "it needs a GPU";
#endif
    if (missing) {
        printf("skip %s --huge (%.1f GB): %s\n0 passed, 0 failed, 1 skipped\n", op, s.huge_bytes * 1e-9, missing);
        return EXIT_SUCCESS;
    }
    BenchHuge h = {d.stream, {}, "", 0};
    s.huge(h);
    for (void* memory : h.memory) { cudaCheck(cudaFree(memory)); }
    printf("%s kernel %d, %.1f GB: ", h.wrong.empty() ? "ok" : "FAIL", s.best, s.huge_bytes * 1e-9);
    if (h.wrong.empty()) {
        printf("%zu rows compared\n1 passed, 0 failed, 0 skipped\n", h.compared);
    } else {
        printf("%s\n0 passed, 1 failed, 0 skipped\n", h.wrong.c_str());
    }
    return h.wrong.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
}

// ---- --stress: random shapes ---------------------------------------------------------------

// Of one number of a shape in all check shapes: the largest value, and the greatest common divisor.
struct BenchRange {
    int max = 0, divisor = 0;
    void add(int x) {
        max = std::max(max, x);
        for (int y = x; y;) { // Euclid: divisor = gcd(divisor, x)
            int rest = divisor % y;
            divisor = y, y = rest;
        }
    }
    // Small values are as likely as large ones: the logarithm is uniform.
    int draw(std::mt19937& rng) const {
        double part = (rng() + 0.5) / 4294967296.0;
        return (int)exp(part * log((double)(max / divisor) + 1)) * divisor;
    }
};

// The cost of an op, by a call of declare() without a device.
inline BenchState bench_cost(void (*declare)(Bench&), const Shape& s, int which) {
    BenchState state;
    state.which = which, state.kind = s.kind;
    Bench dry = bench_view(state, s, 0, true);
    declare(dry);
    return state;
}

inline bool bench_affords(const BenchState& cost, double most_bytes, double most_flops) {
#ifdef CUDA_EMULATION
    if (!emulation_affords(cost.bytes, cost.flops)) { return false; }
#endif
    return cost.bytes <= most_bytes && cost.flops <= most_flops;
}

// Draws a shape that costs no more than the most expensive check shape, and in the emulation not too much time. shapes:
// the check shapes. Returns false if there is none among many.
inline bool bench_draw_shape(Shape* drawn, void (*declare)(Bench&), const std::vector<Shape>& shapes, int which,
                             std::mt19937& rng) {
    BenchRange B, T, C, V;
    double most_bytes = 0, most_flops = 0;
    for (const Shape& s : shapes) {
        B.add(s.B), T.add(s.T), C.add(s.C), V.add(s.V);
        BenchState cost = bench_cost(declare, s, which);
        most_bytes = std::max(most_bytes, cost.bytes), most_flops = std::max(most_flops, cost.flops);
    }
    for (int tries = 0; tries < 100; tries++) {
        Shape s = shapes[rng() % shapes.size()];
        const char* letters = bench_cost(declare, s, which).varies;
        if (strchr(letters, 'B')) { s.B = B.draw(rng); }
        if (strchr(letters, 'T')) { s.T = T.draw(rng); }
        if (strchr(letters, 'C')) { s.C = C.draw(rng); }
        if (strchr(letters, 'V')) { s.V = V.draw(rng); }
        if (strchr(letters, 'H')) {
            int HS = s.C / s.NH;
            s.NH = 1 + (int)(rng() % (unsigned)std::max(4, s.NH)), s.C = s.NH * HS;
        }
        *drawn = s;
        if (bench_affords(bench_cost(declare, s, which), most_bytes, most_flops)) { return true; }
    }
    return false;
}

inline int bench_run_stress(const BenchDevice& d, const char* op, void (*declare)(Bench&), std::vector<Shape> shapes,
                            int num_cases) {
    BenchFlags& f = bench_flags();
    BenchCounts counts = {0, 0, 0};
    std::mt19937 rng((uint32_t)f.seed);
    int num_shapes = 0;
    for (int i = 0; i < f.stress; i++) {
        int which = f.input_case >= 0 ? f.input_case : (int)(rng() % (unsigned)num_cases), failed = counts.failed;
        f.seed = (int)(rng() >> 1);
        Shape s;
        if (!bench_draw_shape(&s, declare, shapes, which, rng)) { continue; }
        bench_check_case(d, op, declare, s, which, false, &counts);
        num_shapes++;
        if (counts.failed == failed) { continue; }
        printf("reproduce: %s --check --seed %d --case %d --kind %d -B %d -T %d -C %d -NH %d -V %d\n",
               cli_program(NULL), f.seed, which, s.kind, s.B, s.T, s.C, s.NH, s.V);
        fflush(stdout);
    }
    printf("%d random shapes: %d passed, %d failed, %d skipped\n", num_shapes, counts.passed, counts.failed,
           counts.skipped);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// ---- all check shapes -------------------------------------------------------------------------

// names: what declare() has declared without a device.
inline int bench_run_check(const BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& shape,
                           const std::vector<Shape>& check_shapes, const BenchState& names) {
    const BenchFlags& f = bench_flags();
    std::vector<Shape> shapes = check_shapes;
    bool given = f.shape_given || f.full || shapes.empty();
    if (given) { shapes = {shape}; }
    for (Shape& s : shapes) {
        s.B = s.B ? s.B : shape.B, s.T = s.T ? s.T : shape.T, s.C = s.C ? s.C : shape.C;
        s.NH = s.NH ? s.NH : shape.NH, s.V = s.V ? s.V : shape.V;
    }
    if (!given && f.kind >= 0) {
        auto other = [&](const Shape& s) { return s.kind != f.kind; };
        shapes.erase(std::remove_if(shapes.begin(), shapes.end(), other), shapes.end());
    }
    int num_cases = std::max(1, (int)names.cases.size());
    if (f.stress) { return bench_run_stress(d, op, declare, shapes, num_cases); }
    BenchCounts counts = {0, 0, 0};
    for (size_t i = 0; i < shapes.size(); i++) {
        const Shape& s = shapes[i];
        for (int which = 0; which < num_cases; which++) {
            if (f.input_case >= 0 && which != f.input_case) { continue; }
            bench_check_case(d, op, declare, s, which, i > 0, &counts);
        }
    }
    printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// ---- timing -----------------------------------------------------------------------------

struct BenchTime {
    double median_ms, p10_ms, p90_ms;
    int launches;
    double sm_mhz = 0; // clock of the SMs from the first launch to the last; 0: not known
};

inline BenchTime bench_percentiles(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    auto at = [&](double part) { return (double)times[(size_t)(part * (double)(times.size() - 1) + 0.5)]; };
    return {at(0.5), at(0.1), at(0.9), (int)times.size()};
}

// Returns the clock in MHz between two readings of n SMs: the median over the SMs that are in both. Returns 0 if there
// is none, or if less than 100 us lie between the readings, because some timers advance in steps of a microsecond.
inline double bench_sm_mhz(const BenchClock* before, const BenchClock* after, int n) {
    std::vector<double> mhz;
    for (int i = 0; i < n; i++) {
        const BenchClock &from = before[i], &to = after[i];
        if (from.ns == 0 || to.ns < from.ns + 100000 || to.cycles <= from.cycles) { continue; }
        mhz.push_back(1e3 * (double)(to.cycles - from.cycles) / (double)(to.ns - from.ns));
    }
    if (mhz.empty()) { return 0; }
    std::nth_element(mhz.begin(), mhz.begin() + mhz.size() / 2, mhz.end());
    return mhz[mhz.size() / 2];
}

// Queues a reading of the SMs' counters; `which` is 0 before the launches to be timed and 1 after them.
inline void bench_read_clocks(BenchDevice& d, int which) {
    size_t bytes = BENCH_MAX_SMS * sizeof(*d.clocks);
    BenchClock* clocks = d.clocks + which * BENCH_MAX_SMS;
    cudaCheck(cudaMemsetAsync(clocks, 0, bytes, d.stream));
    bench_clock_kernel<<<num_multiprocessors(), 1, 0, d.stream>>>(clocks);
    cudaCheck(cudaGetLastError());
}

// Returns the clock in MHz between the last two readings, or 0.
inline double bench_measured_mhz(const BenchDevice& d) {
    std::vector<BenchClock> clocks(2 * BENCH_MAX_SMS);
    cudaCheck(cudaMemcpy(clocks.data(), d.clocks, clocks.size() * sizeof(clocks[0]), cudaMemcpyDeviceToHost));
    return bench_sm_mhz(clocks.data(), clocks.data() + BENCH_MAX_SMS, BENCH_MAX_SMS);
}

// Makes sure that there are n events.
inline void bench_need_events(BenchDevice& d, size_t n) {
    while (d.events.size() < n) {
        cudaEvent_t event;
        cudaCheck(cudaEventCreate(&event));
        d.events.push_back(event);
    }
}

// Times n launches, each by its own pair of events. before() runs before each launch and is not timed.
inline BenchTime bench_time_launches(BenchDevice& d, int n, const std::function<void()>& before,
                                     const std::function<void()>& launch) {
    bench_need_events(d, 2 * (size_t)n);
    // 20 us per launch is more than the host needs to queue it
    bench_delay_kernel<<<1, 1, 0, d.stream>>>(20000ull * (unsigned long long)n);
    cudaCheck(cudaGetLastError());
    bench_read_clocks(d, 0);
    for (int i = 0; i < n; i++) {
        before();
        cudaCheck(cudaEventRecord(d.events[2 * i], d.stream));
        launch();
        cudaCheck(cudaEventRecord(d.events[2 * i + 1], d.stream));
    }
    bench_read_clocks(d, 1);
    cudaCheck(cudaStreamSynchronize(d.stream));
    std::vector<float> times(n);
    for (int i = 0; i < n; i++) { cudaCheck(cudaEventElapsedTime(&times[i], d.events[2 * i], d.events[2 * i + 1])); }
    BenchTime time = bench_percentiles(times);
    time.sm_mhz = bench_measured_mhz(d);
    return time;
}

inline void bench_flush_l2(BenchDevice& d) {
    if (bench_flags().hot) { return; }
    if (!d.flush) {
        d.flush_bytes = std::max<size_t>(2 * d.l2_bytes, 64 << 20) / 16 * 16;
        cudaCheck(cudaMalloc(&d.flush, d.flush_bytes));
        cudaCheck(cudaMemset(d.flush, 0, d.flush_bytes));
    }
    if (strcmp(bench_flags().flush, "read") == 0) {
        bench_read_kernel<<<1024, 256, 0, d.stream>>>((int4*)d.flush, d.flush_bytes / 16);
        cudaCheck(cudaGetLastError());
    } else {
        cudaCheck(cudaMemsetAsync(d.flush, 0, d.flush_bytes, d.stream));
    }
}

// Compares what the timed launches have written, without another launch. Returns the errors, or "".
inline std::string bench_check_timed(const BenchDevice& d, BenchState& s, const BenchKernel& k) {
    std::string wrong;
    for (BenchBuffer& x : s.buffers) {
        if (x.compare) { x.compare(k.tolerance, &wrong); }
        if (x.kind != BenchKind::input || bench_checksum(d, x) == x.checksum) { continue; }
        wrong += (wrong.empty() ? "" : "; ") + std::string(x.name) + ": an input, changed";
        x.upload(); // restore it for the kernels after this one
    }
    return wrong;
}

// Tensor cores draw more power than a card can sustain, so its clocks fall. After a rest all kernels start with the same
// clocks, in whatever order they are timed.
inline void bench_rest() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

// Times `repeats` launches. If these would take longer than limit_ms, it times fewer, but at least 3. Before them all
// outputs are set to NaN, so that bench_check_timed() sees what they wrote.
inline BenchTime bench_time(BenchDevice& d, BenchState& s, const BenchKernel& k, int config, int repeats,
                            double limit_ms) {
    auto before = [&] {
        for (BenchBuffer& x : s.buffers) {
            if (x.kind != BenchKind::inout) { continue; }
            cudaCheck(cudaMemcpyAsync(x.dev, x.start, x.bytes, cudaMemcpyDeviceToDevice, d.stream));
        }
        bench_flush_l2(d);
    };
    auto launch = [&] { k.launch(config); };
    double estimate_ms = bench_time_launches(d, 3, before, launch).median_ms; // also the warm-up
    if (repeats * estimate_ms > limit_ms) { repeats = std::max(3, (int)(limit_ms / estimate_ms)); }
    if (s.flops > 0 || bench_flags().sustained) { bench_rest(); }
    bench_reset(s);
    return bench_time_launches(d, repeats, before, launch);
}

// Times of a hot kernel: L2 is not flushed, and in-place buffers are not restored between launches. 0: not measured
struct BenchHot {
    double graph_ms = 0;                        // per launch, in a CUDA graph
    double sustained_ms = 0, sustained_mhz = 0; // per launch, back to back for a second; clock of the SMs meanwhile
};

enum { BENCH_GRAPH_LAUNCHES = 20 };
const double BENCH_GRAPH_BELOW_MS = 0.02; // kernels that take longer are not timed in a graph

// Records n launches in a graph. Returns NULL if they cannot be recorded, because the launcher waits for the GPU, for
// example.
inline cudaGraphExec_t bench_record(BenchDevice& d, int n, const std::function<void()>& launch) {
#ifdef CUDA_EMULATION
    return NULL; // no graphs
#endif
    cudaError_t kept = cudaSuccess;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaCheck(cudaStreamSynchronize(d.stream));
    bench_kept_error() = &kept;
    cudaCheck(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n && kept == cudaSuccess; i++) { launch(); }
    cudaCheck(cudaStreamEndCapture(d.stream, &graph));
    bench_kept_error() = NULL;
    size_t num_nodes = 0;
    if (kept == cudaSuccess && graph) { cudaCheck(cudaGraphGetNodes(graph, NULL, &num_nodes)); }
    // fewer nodes than launches: the work is not, or not all, on this stream
    if (num_nodes >= (size_t)n && cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) { exec = NULL; }
    if (graph) { cudaCheck(cudaGraphDestroy(graph)); }
    cudaGetLastError(); // clears the error
    return exec;
}

// Returns the time per launch in a graph, or 0.
inline double bench_time_graph(BenchDevice& d, const std::function<void()>& launch) {
    cudaGraphExec_t exec = bench_record(d, BENCH_GRAPH_LAUNCHES, launch);
    if (!exec) { return 0; }
    auto run = [&] { cudaCheck(cudaGraphLaunch(exec, d.stream)); };
    auto nothing = [] {};
    bench_time_launches(d, 3, nothing, run); // the warm-up
    double ms = bench_time_launches(d, 10, nothing, run).median_ms;
    cudaCheck(cudaGraphExecDestroy(exec));
    return ms / BENCH_GRAPH_LAUNCHES;
}

// Times n launches back to back by one pair of events; returns the time per launch.
inline double bench_time_together(BenchDevice& d, int n, const std::function<void()>& launch) {
    bench_need_events(d, 2);
    bench_read_clocks(d, 0);
    cudaCheck(cudaEventRecord(d.events[0], d.stream));
    for (int i = 0; i < n; i++) { launch(); }
    cudaCheck(cudaEventRecord(d.events[1], d.stream));
    bench_read_clocks(d, 1);
    cudaCheck(cudaStreamSynchronize(d.stream));
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, d.events[0], d.events[1]));
    return (double)ms / n;
}

// Times a kernel in a graph, if it is short, and back to back, if --sustained was given. estimate_ms: its time by itself.
// The launches work on buffers as bench_reset() leaves them. For an op without in-place buffers, the outputs are compared
// afterwards, and errors are added to *wrong. In-place buffers drift from launch to launch, so nothing is compared.
inline BenchHot bench_time_hot(BenchDevice& d, BenchState& s, const BenchKernel& k, int config, double estimate_ms,
                               std::string* wrong) {
    BenchHot hot;
    auto launch = [&] { k.launch(config); };
    bool in_place = std::any_of(s.buffers.begin(), s.buffers.end(),
                                [](const BenchBuffer& x) { return x.kind == BenchKind::inout; });
    auto check = [&] {
        std::string found = in_place ? "" : bench_check_timed(d, s, k);
        if (wrong->empty()) { *wrong = found; }
    };
    if (estimate_ms < BENCH_GRAPH_BELOW_MS) {
        bench_reset(s);
        hot.graph_ms = bench_time_graph(d, launch);
        if (hot.graph_ms > 0) { check(); }
    }
    if (bench_flags().sustained) {
        // the first second warms the card up, and tells how many launches take a second
        for (int second = 0; second < 2; second++) {
            bench_reset(s);
            estimate_ms = bench_time_together(d, (int)ceil(1000 / std::max(estimate_ms, 1e-3)), launch);
        }
        hot.sustained_ms = estimate_ms, hot.sustained_mhz = bench_measured_mhz(d);
        check();
    }
    return hot;
}

// ---- what the device can do ---------------------------------------------------------------

// Size of a buffer that is much larger than L2; `count` of them fit into half of the free memory.
inline size_t bench_large_bytes(const BenchDevice& d, size_t count) {
    size_t bytes = std::max<size_t>((size_t)1 << 30, 4 * d.l2_bytes), free_bytes, total_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total_bytes));
    while (count * bytes > free_bytes / 2 && bytes > ((size_t)1 << 20)) { bytes /= 2; }
    return bytes;
}

// Measures the GB/s of a copy on the device (bytes read plus bytes written), the ceiling of a memory-bound kernel.
inline void bench_measure_copy(BenchDevice& d) {
    size_t bytes = bench_large_bytes(d, 2);
    uint8_t *from, *to;
    cudaCheck(cudaMalloc(&from, bytes));
    cudaCheck(cudaMalloc(&to, bytes));
    cudaCheck(cudaMemset(from, 1, bytes));
    auto copy = [&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, d.stream)); };
    auto nothing = [] {};
    bench_time_launches(d, 3, nothing, copy);
    d.copy_gbs = 2.0 * (double)bytes / bench_time_launches(d, 20, nothing, copy).median_ms / 1e6;
    cudaCheck(cudaFree(from));
    cudaCheck(cudaFree(to));
    printf("copy on the device: %.1f GB/s read + written (%zu MB, median of 20)\n", d.copy_gbs, bytes >> 20);
}

// Measures the GB/s of a read, the ceiling of a kernel that writes next to nothing.
inline void bench_measure_read(BenchDevice& d) {
    size_t bytes = bench_large_bytes(d, 1);
    int4* data;
    cudaCheck(cudaMalloc(&data, bytes));
    cudaCheck(cudaMemset(data, 0, bytes));
    auto nothing = [] {};
    // from blocks that stay and loop to blocks that read some vectors and end
    const int blocks_per_sm[] = {8, 16, 32, 128, 512};
    for (int blocks : blocks_per_sm) {
        auto read = [&] {
            bench_read_kernel<<<blocks * num_multiprocessors(), 256, 0, d.stream>>>(data, bytes / sizeof(int4));
            cudaCheck(cudaGetLastError());
        };
        bench_time_launches(d, 3, nothing, read);
        double gbs = (double)bytes / bench_time_launches(d, 20, nothing, read).median_ms / 1e6;
        d.read_gbs = std::max(d.read_gbs, gbs);
    }
    cudaCheck(cudaFree(data));
    printf("read on the device: %.1f GB/s (%zu MB, median of 20, the best of 5 grids)\n", d.read_gbs, bytes >> 20);
}

// Measures what a launch costs that computes nothing, timed as the kernels are. It is part of every time.
inline void bench_measure_empty(BenchDevice& d) {
    auto before = [&] { bench_flush_l2(d); };
    auto launch = [&] {
        bench_empty_kernel<<<1, 1, 0, d.stream>>>();
        cudaCheck(cudaGetLastError());
    };
    bench_time_launches(d, 3, before, launch);
    d.empty_ms = bench_time_launches(d, 100, before, launch).median_ms;
    printf("empty launch: %.1f us; kernels below %.0f us are also timed in a graph of %d launches, with a hot L2\n",
           1e3 * d.empty_ms, 1e3 * BENCH_GRAPH_BELOW_MS, BENCH_GRAPH_LAUNCHES);
}

// Returns a library's TFLOP/s, or 0 if it cannot be measured. The first call lets the library choose its algorithm, the
// second one is timed after the same rest as the kernels.
inline double bench_measure_rate(const std::function<double()>& measure) {
    measure();
    bench_rest();
    double tflops = measure();
    return std::isfinite(tflops) ? tflops : 0;
}

// Measures the matrix rate of the op, and those of the kernels that will run and compute in another type.
inline void bench_measure_rates(BenchDevice& d, BenchState& s) {
    if (s.flops <= 0) { return; }
    if (s.matrix_rate) {
        d.matrix_tflops = bench_measure_rate(s.matrix_rate);
        printf("matrix rate of the vendor's library: %.1f TFLOP/s\n", d.matrix_tflops);
    }
    for (BenchKernel& k : s.kernels) {
        if (!k.measure_rate || !bench_wanted(k) || bench_skip_reason(d, k)) { continue; }
        const BenchKernel* same = NULL; // an earlier kernel with the same type
        for (const BenchKernel& other : s.kernels) {
            if (&other == &k) { break; }
            if (other.matrix_tflops > 0 && strcmp(other.rate_type, k.rate_type) == 0) { same = &other; }
        }
        k.matrix_tflops = same ? same->matrix_tflops : bench_measure_rate(k.measure_rate);
        if (!same) {
            printf("matrix rate of the vendor's library in %s: %.1f TFLOP/s\n", k.rate_type, k.matrix_tflops);
        }
    }
}

// ---- results ----------------------------------------------------------------------------

struct BenchResult {
    const BenchKernel* kernel;
    int config;
    BenchTime time;
    BenchHot hot = {};
};

inline double bench_gbs(const BenchState& s, const BenchResult& r) { return s.bytes / r.time.median_ms / 1e6; }
inline double bench_tflops(const BenchState& s, const BenchResult& r) { return s.flops / r.time.median_ms / 1e9; }

// The bandwidth that is the op's ceiling, and its name.
inline double bench_roof_gbs(const BenchDevice& d, const BenchState& s) {
    return s.reads_only ? d.read_gbs : d.copy_gbs;
}
inline const char* bench_roof_name(const BenchState& s) { return s.reads_only ? "read" : "copy"; }

// The matrix rate that is the kernel's ceiling, in TFLOP/s, and the type of its products. 0: not known
inline double bench_matrix_tflops(const BenchDevice& d, const BenchKernel& k) {
    return k.rate_type ? k.matrix_tflops : d.matrix_tflops;
}
inline const char* bench_rate_type(const BenchKernel& k) { return k.rate_type ? k.rate_type : PRECISION_NAME; }

// Returns the clock of the first timing that has one, or 0. results: in the order of time
inline double bench_first_mhz(const std::vector<BenchResult>& results) {
    for (const BenchResult& r : results) {
        if (r.time.sm_mhz > 0) { return r.time.sm_mhz; }
    }
    return 0;
}
inline bool bench_is_slow_clock(double sm_mhz, double first_mhz) { return sm_mhz > 0 && sm_mhz < 0.95 * first_mhz; }

// Returns a note for each timing whose clock was below 95% of the first one's: its time cannot be compared.
inline std::string bench_clock_notes(const std::vector<BenchResult>& results) {
    double first = bench_first_mhz(results);
    std::string notes;
    for (const BenchResult& r : results) {
        if (!bench_is_slow_clock(r.time.sm_mhz, first)) { continue; }
        char line[256];
        snprintf(line, sizeof(line), "note: kernel %d %s ran at %.0f MHz, %.1f%% below the first timing's %.0f\n",
                 r.kernel->number, bench_config_text(*r.kernel, r.config).c_str(), r.time.sm_mhz,
                 100 * (1 - r.time.sm_mhz / first), first);
        notes += line;
    }
    return notes;
}

// The part of a line of output about clocks and hot times: what was measured of them.
inline std::string bench_clock_text(const BenchResult& r) {
    char text[4][64] = {};
    if (r.time.sm_mhz > 0) { snprintf(text[0], sizeof(text[0]), " | %.0f MHz", r.time.sm_mhz); }
    if (r.hot.graph_ms > 0) { snprintf(text[1], sizeof(text[1]), " | in a graph %.4f ms", r.hot.graph_ms); }
    if (r.hot.sustained_ms > 0) { snprintf(text[2], sizeof(text[2]), " | sustained %.4f ms", r.hot.sustained_ms); }
    if (r.hot.sustained_mhz > 0) { snprintf(text[3], sizeof(text[3]), " at %.0f MHz", r.hot.sustained_mhz); }
    return std::string(text[0]) + text[1] + text[2] + text[3];
}

// The part of a row of the table about clocks and hot times, or of the table's head if r is NULL. A * marks a clock below
// 95% of the first timing's. results: of the whole run; what none of them has gets no column.
inline std::string bench_clock_cells(const std::vector<BenchResult>& results, const BenchResult* r) {
    double first = bench_first_mhz(results);
    bool has_graph = false, has_sustained = false;
    for (const BenchResult& other : results) {
        has_graph |= other.hot.graph_ms > 0, has_sustained |= other.hot.sustained_ms > 0;
    }
    std::string cells;
    auto add = [&](bool wanted, const char* name, const char* format, double value, const char* mark) {
        char number[32] = "-", cell[64];
        if (r && value > 0) { snprintf(number, sizeof(number), format, value); }
        snprintf(cell, sizeof(cell), " %9s%s", r ? number : name, mark);
        if (wanted) { cells += cell; }
    };
    add(first > 0, "MHz", "%.0f", r ? r->time.sm_mhz : 0, r && bench_is_slow_clock(r->time.sm_mhz, first) ? "*" : " ");
    add(has_graph, "in graph", "%.4f", r ? r->hot.graph_ms : 0, "");
    add(has_sustained, "sustained", "%.4f", r ? r->hot.sustained_ms : 0, "");
    return cells;
}

// The columns of a CSV about clocks and roofs, and their values. 0: not measured
inline const char* bench_clock_columns() {
    return "sm_mhz,graph_ms,sustained_ms,sustained_mhz,empty_ms,read_gb_s,reads_only,matrix_type";
}
inline std::string bench_clock_values(const BenchDevice& d, const BenchState& s, const BenchResult& r) {
    char text[256];
    snprintf(text, sizeof(text), "%.0f,%.5f,%.5f,%.0f,%.5f,%.2f,%d,%s", r.time.sm_mhz, r.hot.graph_ms,
             r.hot.sustained_ms, r.hot.sustained_mhz, d.empty_ms, d.read_gbs, s.reads_only, bench_rate_type(*r.kernel));
    return text;
}

// Returns the fastest result of kernel `number` (-1: of all kernels), or NULL if there is none.
inline const BenchResult* bench_best(const std::vector<BenchResult>& results, int number) {
    const BenchResult* best = NULL;
    for (const BenchResult& r : results) {
        bool better = !best || r.time.median_ms < best->time.median_ms;
        if ((number < 0 || r.kernel->number == number) && better) { best = &r; }
    }
    return best;
}

// Returns " (promoted)" or " (best)" for the kernel that b.promoted() or b.best() names, otherwise "".
inline const char* bench_mark(const BenchState& s, const BenchKernel& k) {
    return k.number != s.best ? "" : s.is_promoted ? " (promoted)" : " (best)";
}

inline void bench_print_line(const BenchDevice& d, const BenchState& s, const std::vector<BenchResult>& results,
                             const BenchResult& r) {
    printf("%s | time %.4f ms", bench_config_text(*r.kernel, r.config).c_str(), r.time.median_ms);
    if (s.bytes > 0) { printf(" | bandwidth %.2f GB/s", bench_gbs(s, r)); }
    printf(" | p10 %.4f p90 %.4f ms%s", r.time.p10_ms, r.time.p90_ms, bench_clock_text(r).c_str());
    if (s.flops > 0) { printf(" | %.2f TFLOP/s", bench_tflops(s, r)); }
    double roof_gbs = bench_roof_gbs(d, s), rate = bench_matrix_tflops(d, *r.kernel);
    if (s.bytes > 0 && roof_gbs > 0) {
        printf(" | %.1f%% of %s", 100 * bench_gbs(s, r) / roof_gbs, bench_roof_name(s));
    }
    if (s.flops > 0 && rate > 0) {
        const char* type = r.kernel->rate_type;
        printf(" | %.1f%% of %s%smatrix rate", 100 * bench_tflops(s, r) / rate, type ? type : "", type ? " " : "");
    }
    for (int number = 0; number <= 1; number++) {
        const BenchResult* base = bench_best(results, number);
        if (base && r.kernel->number != number) {
            printf(" | %.2fx kernel %d", base->time.median_ms / r.time.median_ms, number);
        }
    }
    if (r.kernel->num_launches) {
        printf(" | %d launch%s, %.1f MB", r.kernel->num_launches, r.kernel->num_launches == 1 ? "" : "es",
               r.kernel->bytes / 1e6);
    }
    printf("\n");
    fflush(stdout);
}

inline void bench_print_table(const BenchDevice& d, const BenchState& s, const std::vector<BenchResult>& results) {
    const BenchResult *vendor = bench_best(results, 0), *naive = bench_best(results, 1);
    bool moves =
        std::any_of(s.kernels.begin(), s.kernels.end(), [](const BenchKernel& k) { return k.num_launches > 0; });
    printf("\nkernel     config   time ms       p10       p90%s      GB/s  %% %s   TFLOP/s  %% rate  x kernel 0  x "
           "kernel 1%s  what\n",
           bench_clock_cells(results, NULL).c_str(), bench_roof_name(s), moves ? "  launches  MB moved" : "");
    bool any_slow = false;
    double first_mhz = bench_first_mhz(results);
    for (const BenchKernel& k : s.kernels) {
        const BenchResult* r = bench_best(results, k.number);
        if (!r) { continue; }
        char cells[8][24];
        for (auto& cell : cells) { snprintf(cell, sizeof(cell), "-"); }
        if (r->config) { snprintf(cells[0], sizeof(cells[0]), "%d", r->config); }
        if (!r->config && k.configs.size() > 1) { snprintf(cells[0], sizeof(cells[0]), "default"); }
        if (s.bytes > 0) {
            snprintf(cells[1], sizeof(cells[1]), "%.1f", bench_gbs(s, *r));
            snprintf(cells[2], sizeof(cells[2]), "%.1f", 100 * bench_gbs(s, *r) / bench_roof_gbs(d, s));
        }
        if (s.flops > 0) { snprintf(cells[3], sizeof(cells[3]), "%.2f", bench_tflops(s, *r)); }
        double rate = bench_matrix_tflops(d, k);
        if (s.flops > 0 && rate > 0) { snprintf(cells[4], sizeof(cells[4]), "%.1f", 100 * bench_tflops(s, *r) / rate); }
        if (vendor) { snprintf(cells[5], sizeof(cells[5]), "%.2f", vendor->time.median_ms / r->time.median_ms); }
        if (naive) { snprintf(cells[6], sizeof(cells[6]), "%.2f", naive->time.median_ms / r->time.median_ms); }
        printf("%6d %10s %9.4f %9.4f %9.4f%s %9s %7s %9s %7s %11s %11s", k.number, cells[0], r->time.median_ms,
               r->time.p10_ms, r->time.p90_ms, bench_clock_cells(results, r).c_str(), cells[1], cells[2], cells[3],
               cells[4], cells[5], cells[6]);
        if (moves) { printf("  %8d  %8.1f", k.num_launches, k.bytes / 1e6); }
        bool named = !bench_is_fixed(k) && strcmp(k.config_name, "block size") != 0;
        printf("  %s%s", k.what, bench_mark(s, k));
        if (named) { printf(", %s", bench_config_text(k, r->config, false).c_str()); }
        printf("\n");
        any_slow |= bench_is_slow_clock(r->time.sm_mhz, first_mhz);
    }
    if (any_slow) { printf("* below 95%% of the first timing's clock, %.0f MHz\n", first_mhz); }
    for (const BenchKernel& k : s.kernels) {
        if (!k.rate_type || k.matrix_tflops <= 0 || !bench_best(results, k.number)) { continue; }
        printf("%% rate of kernel %d: of the rate in %s, %.1f TFLOP/s\n", k.number, k.rate_type, k.matrix_tflops);
    }
    const BenchResult* winner = bench_best(results, -1);
    if (winner) {
        printf("\nfastest: kernel %d (%s), %s, %.4f ms\n", winner->kernel->number, winner->kernel->what,
               bench_config_text(*winner->kernel, winner->config, false).c_str(), winner->time.median_ms);
    }
}

// Prints a note if a default configuration, or the promoted or best kernel, is no longer the best by more than 2%.
inline void bench_print_notes(const BenchState& s, const std::vector<BenchResult>& results) {
    for (const BenchResult& r : results) {
        const BenchResult* best = bench_best(results, r.kernel->number);
        double more = r.time.median_ms / best->time.median_ms - 1;
        if (r.config == 0 && more > 0.02) {
            printf("note: kernel %d takes %.1f%% longer with its default argument than with %s\n", r.kernel->number,
                   100 * more, bench_config_text(*best->kernel, best->config, false).c_str());
        }
    }
    const BenchResult *ours = s.best >= 0 ? bench_best(results, s.best) : NULL, *best = NULL;
    for (const BenchResult& r : results) { // except kernel 0, which is the vendor's
        if (r.kernel->number > 0 && (!best || r.time.median_ms < best->time.median_ms)) { best = &r; }
    }
    if (ours && best && ours->time.median_ms > 1.02 * best->time.median_ms) {
        printf("note: kernel %d, %s, takes %.1f%% longer than kernel %d\n", s.best, s.is_promoted ? "promoted" : "best",
               100 * (ours->time.median_ms / best->time.median_ms - 1), best->kernel->number);
    }
}

// ---- files --------------------------------------------------------------------------------

inline FILE* bench_create(const char* path) {
    FILE* f = fopen(path, "w");
    if (!f) { die("%s: %s", path, strerror(errno)); }
    return f;
}
inline void bench_close(FILE* f, const char* path) {
    bool failed = ferror(f) != 0;
    if (fclose(f) != 0 || failed) { die("%s: cannot be written: %s", path, strerror(errno)); }
}

// `what` is the last field, because it may contain commas; a reader can split the fields before it at commas. best: the
// fastest configuration of its kernel; best_kernel: the kernel of b.promoted() or b.best().
inline void bench_write_csv(const char* path, const BenchDevice& d, const BenchState& s, const char* op,
                            const Shape& shape, const std::vector<BenchResult>& results) {
    FILE* f = bench_create(path);
    fprintf(f,
            "op,kernel,config,config_name,config_label,dtype,B,T,C,NH,V,kind,case,median_ms,p10_ms,p90_ms,launches,l2,"
            "bytes,gb_s,copy_gb_s,flops,tflop_s,matrix_tflop_s,best,best_kernel,promoted,kernel_launches,bytes_moved,"
            "%s,gpu,what\n",
            bench_clock_columns());
    for (const BenchResult& r : results) {
        std::string what;
        for (const char* p = r.kernel->what; *p; p++) { what += *p == '"' ? "\"\"" : std::string(1, *p); }
        fprintf(f,
                "%s,%d,%d,%s,%s,%s,%d,%d,%d,%d,%d,%d,%d,%.5f,%.5f,%.5f,%d,%s,%.0f,%.2f,%.2f,%.0f,%.3f,%.3f,%d,%d,%d,%d,"
                "%.0f,%s,%s,\"%s\"\n",
                op, r.kernel->number, r.config, bench_is_fixed(*r.kernel) ? "" : r.kernel->config_name,
                bench_config_label(*r.kernel, r.config).c_str(), PRECISION_NAME, shape.B, shape.T, shape.C, shape.NH,
                shape.V, s.kind, s.which, r.time.median_ms, r.time.p10_ms, r.time.p90_ms, r.time.launches,
                bench_flags().hot ? "hot" : "cold", s.bytes, bench_gbs(s, r), d.copy_gbs, s.flops, bench_tflops(s, r),
                bench_matrix_tflops(d, *r.kernel), &r == bench_best(results, r.kernel->number),
                r.kernel->number == s.best, r.kernel->number == s.best && s.is_promoted, r.kernel->num_launches,
                r.kernel->bytes, bench_clock_values(d, s, r).c_str(), d.name, what.c_str());
    }
    bench_close(f, path);
}

inline std::string bench_json_string(const char* text) {
    std::string quoted = "\"";
    for (const char* p = text; *p; p++) {
        if (*p == '"' || *p == '\\') { quoted += '\\'; }
        quoted += (unsigned char)*p < 32 ? ' ' : *p;
    }
    return quoted + "\"";
}

// Google Benchmark's layout, which its compare.py reads. Values that this layout has no field for become user counters.
inline void bench_write_json(const char* path, const BenchDevice& d, const BenchState& s, const char* op,
                             const Shape& shape, const std::vector<BenchResult>& results) {
    FILE* f = bench_create(path);
    char date[64];
    time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S+00:00", gmtime(&now));
    fprintf(f,
            "{\n  \"context\": {\"date\": \"%s\", \"executable\": %s, \"num_cpus\": %u, \"mhz_per_cpu\": 0, "
            "\"cpu_scaling_enabled\": false, \"caches\": [], \"library_build_type\": \"release\", \"gpu\": %s, "
            "\"driver\": %s, \"dtype\": \"%s\", \"l2\": \"%s\", \"copy_gb_s\": %.2f, \"read_gb_s\": %.2f, "
            "\"empty_ms\": %.5f, \"B\": %d, \"T\": %d, \"C\": %d, "
            "\"NH\": %d, \"V\": %d, \"kind\": %d, \"case\": %d},\n  \"benchmarks\": [",
            date, bench_json_string(cli_program(NULL)).c_str(), std::thread::hardware_concurrency(),
            bench_json_string(d.name).c_str(), bench_json_string(bench_driver().c_str()).c_str(), PRECISION_NAME,
            bench_flags().hot ? "hot" : "cold", d.copy_gbs, d.read_gbs, d.empty_ms, shape.B, shape.T, shape.C, shape.NH,
            shape.V, s.kind, s.which);
    int family = -1, instance = 0;
    for (size_t i = 0; i < results.size(); i++) {
        const BenchResult& r = results[i];
        bool same = i > 0 && results[i - 1].kernel == r.kernel;
        instance = same ? instance + 1 : 0;
        family += !same;
        char name[256];
        std::string axis = bench_is_fixed(*r.kernel) ? "config" : r.kernel->config_name; // as in "tile_rows:128"
        std::replace(axis.begin(), axis.end(), ' ', '_');
        snprintf(name, sizeof(name), "%s/kernel:%d/%s:%d", op, r.kernel->number, axis.c_str(), r.config);
        std::string label = r.kernel->what, form = bench_config_label(*r.kernel, r.config);
        if (!form.empty()) { label += "; " + form; }
        fprintf(f,
                "%s\n    {\"name\": \"%s\", \"family_index\": %d, \"per_family_instance_index\": %d, \"run_name\": "
                "\"%s\", \"run_type\": \"iteration\", \"repetitions\": 1, \"repetition_index\": 0, \"threads\": 1, "
                "\"iterations\": %d, \"real_time\": %.5f, \"cpu_time\": %.5f, \"time_unit\": \"ms\", "
                "\"bytes_per_second\": %.6e, \"flops_per_second\": %.6e, \"p10_ms\": %.5f, \"p90_ms\": %.5f, "
                "\"sm_mhz\": %.0f, \"graph_ms\": %.5f, \"sustained_ms\": %.5f, \"sustained_mhz\": %.0f, \"label\": %s}",
                i ? "," : "", name, family, instance, name, r.time.launches, r.time.median_ms, r.time.median_ms,
                1e9 * bench_gbs(s, r), 1e12 * bench_tflops(s, r), r.time.p10_ms, r.time.p90_ms, r.time.sm_mhz,
                r.hot.graph_ms, r.hot.sustained_ms, r.hot.sustained_mhz, bench_json_string(label.c_str()).c_str());
    }
    fprintf(f, "\n  ]\n}\n");
    bench_close(f, path);
}

// ---- tuning -------------------------------------------------------------------------------

// Ends the program unless --tune can be done for this op and with the other flags. Returns the kernel to be timed.
inline int bench_tune_kernel(const char* op, const BenchState& declared) {
    const BenchFlags& f = bench_flags();
    if (!declared.is_promoted) { cli_fail("--tune: %s has no promoted kernel", op); }
    if (tunable_op(op) < 0) { cli_fail("--tune: the promoted kernel of %s takes no configuration", op); }
    if (f.kernel >= 0 && f.kernel != declared.best) {
        cli_fail("--tune times kernel %d, the promoted one, not kernel %d", declared.best, f.kernel);
    }
    if (f.check || f.config >= 0) { cli_fail("--tune cannot be combined with --check or --config"); }
#ifdef CUDA_EMULATION
    cli_fail("--tune needs a GPU: the emulation's times would mean nothing");
#endif
    return declared.best;
}

// The name of a GPU's folder in results, as `make bench` spells it: "h200" for "NVIDIA H200".
inline std::string bench_gpu_folder(const char* gpu) {
    std::string name = gpu;
    for (const char* brand : {"NVIDIA ", "Tesla "}) {
        if (name.compare(0, strlen(brand), brand) == 0) { name.erase(0, strlen(brand)); }
    }
    for (char& c : name) { c = c == ' ' ? '_' : (char)tolower((unsigned char)c); }
    return name;
}

// True if x is faster than y by more than the noise.
inline bool bench_is_faster(const BenchTime& x, const BenchTime& y) {
    return x.median_ms < 0.99 * y.median_ms && x.median_ms < y.p10_ms && x.p90_ms < y.median_ms;
}

// Writes the fastest configuration of the promoted kernel to the file of --tune. It must be faster than the default in these
// results and then once more, when nothing but the two is timed; else the default is written.
inline void bench_tune(BenchDevice& d, BenchState& s, const char* op, const Shape& shape,
                       const std::vector<BenchResult>& results) {
    const BenchFlags& f = bench_flags();
    const BenchResult* best = bench_best(results, s.best);
    if (!best) { die("--tune: kernel %d cannot run here", s.best); }
    BenchTime usual = results[0].time, chosen = usual; // the list of configurations begins with the default
    require(results[0].config == 0);
    int config = 0;
    if (bench_is_faster(best->time, usual)) {
        chosen = bench_time(d, s, *best->kernel, best->config, f.repeats, 1000);
        usual = bench_time(d, s, *best->kernel, 0, f.repeats, 1000);
        config = bench_is_faster(chosen, usual) ? best->config : 0;
    }
    if (config == 0) { chosen = usual; }
    TunedRow row = {};
    row.op = tunable_op(op);
    snprintf(row.gpu, sizeof(row.gpu), "%s", d.name);
    snprintf(row.dtype, sizeof(row.dtype), "%s", PRECISION_NAME);
    row.B = shape.B, row.T = shape.T, row.C = shape.C, row.NH = shape.NH, row.V = shape.V;
    row.config = config, row.median_ms = chosen.median_ms, row.default_ms = usual.median_ms;

    Error err;
    TunedTable table = {};
    std::string folder = "results/" + bench_gpu_folder(d.name),
                path = f.tune_file ? f.tune_file : folder + "/tuned.csv";
    if (!f.tune_file && !make_directories(folder.c_str(), &err)) { die("%s", err.text); }
    if (file_exists(path.c_str()) && !tuned_read(&table, path.c_str(), &err)) { die("%s", err.text); }
    tuned_put(&table, &row);
    if (!tuned_write(&table, false, path.c_str(), &err)) { die("%s", err.text); }
    tuned_free(&table);
    printf("tuned %s: ", op);
    if (config) {
        printf("config %d takes %.4f ms, the default %.4f ms", config, chosen.median_ms, usual.median_ms);
    } else {
        printf("nothing is faster than the default, %.4f ms, by more than the noise", usual.median_ms);
    }
    printf("; in %s\n", path.c_str());
}

// ---- main -----------------------------------------------------------------------------------

// Checks the kernels at the shape that is timed, then times them. A kernel that fails is not timed.
inline int bench_run(BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& shape) {
    const BenchFlags& f = bench_flags();
    BenchState s;
    s.op = op;
    bench_print_header(d, op, shape);
    bench_declare(s, d, declare, shape, std::max(0, f.input_case));
    std::stable_sort(s.kernels.begin(), s.kernels.end(),
                     [](const BenchKernel& a, const BenchKernel& b) { return a.number < b.number; });
    if (!s.kinds.empty()) { printf("kind %d: %s\n", s.kind, s.kinds[s.kind]); }
    if (s.which > 0) { printf("case %d: %s\n", s.which, s.cases[s.which]); }
    if (f.kernel >= 0) { printf("Using kernel %d\n", f.kernel); }
    BenchCounts counts = {0, 0, 0};
    std::vector<int> failed;
    bench_check_shape(d, s, shape, true, &counts, &failed);
    if (s.sampled) { printf("A sample of the results is compared with the CPU; the others must be finite.\n"); }
    if (counts.failed) {
        printf("%d of %d results do not match.\n", counts.failed, counts.failed + counts.passed);
    } else if (counts.passed) {
        printf("All results match. Starting benchmarks.\n");
    }
    bench_measure_copy(d);
    bench_measure_read(d);
    bench_measure_empty(d);
    bench_measure_rates(d, s);
    // shown: the results of the kernels asked for; results also has kernels 0 and 1, timed as baselines
    std::vector<BenchResult> results, shown;
    for (const BenchKernel& k : s.kernels) {
        bool wanted = bench_wanted(k);
        bool is_base = !wanted && k.number <= 1 && !f.tune;
        if ((!wanted && !is_base) || bench_skip_reason(d, k) ||
            std::find(failed.begin(), failed.end(), k.number) != failed.end()) {
            continue;
        }
        if (wanted) { printf("%skernel %d: %s\n", f.kernel < 0 ? "\n" : "", k.number, k.what); }
        for (int config : wanted ? bench_configs(k) : k.configs) {
            results.push_back({&k, config, bench_time(d, s, k, config, wanted ? f.repeats : 20, wanted ? 1000 : 100)});
            if (wanted) {
                BenchResult& r = results.back();
                std::string wrong = bench_check_timed(d, s, k), wrong_hot;
                r.hot = bench_time_hot(d, s, k, config, r.time.median_ms, &wrong_hot);
                shown.push_back(r);
                bench_print_line(d, s, results, r);
                auto report = [&](const char* when, const std::string& errors) {
                    if (errors.empty()) { return; }
                    printf("FAIL kernel %d %s: after %s: %s\n", k.number, bench_config_text(k, config).c_str(), when,
                           errors.c_str());
                    counts.failed++;
                };
                report("the timed launches", wrong);
                report("the launches in a graph or back to back", wrong_hot);
            }
        }
        if (is_base) {
            const BenchResult* best = bench_best(results, k.number);
            printf("to compare with, not checked: kernel %d, %s, %.4f ms: %s\n", k.number,
                   bench_config_text(k, best->config, false).c_str(), best->time.median_ms, k.what);
        }
    }
    if (f.kernel < 0 && !results.empty()) { bench_print_table(d, s, results); }
    bench_print_notes(s, shown);
    printf("%s", bench_clock_notes(results).c_str());
    for (const BenchBuffer& x : s.buffers) {
        const char* broken = bench_broken_guard(x);
        if (broken) { printf("FAIL %s: %s while timed\n", x.name, broken), counts.failed++; }
    }
    if (f.csv) { bench_write_csv(f.csv, d, s, op, shape, shown); }
    if (f.json) { bench_write_json(f.json, d, s, op, shape, shown); }
    if (f.tune && !counts.failed) { bench_tune(d, s, op, shape, shown); }
    bench_free(s);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// What declare() declares without a device: for all kinds of operation, or for the one that --kind selects.
struct BenchNames {
    BenchState first;                 // what the first of these kinds has declared
    std::vector<BenchKernel> kernels; // of all of them, ascending
    std::vector<const char*> marks;   // one per kernel, see bench_mark
    int kind = -1;                    // the first kind that has the kernel asked for
};
inline BenchNames bench_names(void (*declare)(Bench&), const Shape& shape) {
    const BenchFlags& f = bench_flags();
    BenchNames names;
    int num_kinds = 1;
    for (int kind = 0; kind < num_kinds; kind++) {
        BenchState s;
        s.kind = kind;
        Bench dry = bench_view(s, shape, 0, true);
        declare(dry);
        num_kinds = std::max(1, (int)s.kinds.size());
        if (f.kind >= num_kinds) { cli_fail("no kind %d, there are 0 to %d", f.kind, num_kinds - 1); }
        if (f.kind >= 0 && kind != f.kind) { continue; }
        for (const BenchKernel& k : s.kernels) {
            if (names.kind < 0 && bench_wanted(k)) { names.kind = kind; }
            size_t at = 0;
            while (at < names.kernels.size() && names.kernels[at].number < k.number) { at++; }
            if (at < names.kernels.size() && names.kernels[at].number == k.number) { continue; }
            names.kernels.insert(names.kernels.begin() + (long)at, k);
            names.marks.insert(names.marks.begin() + (long)at, bench_mark(s, k));
        }
        if (names.first.kernels.empty()) { names.first = std::move(s); }
    }
    return names;
}

// --list: a line per kernel; below it what its configurations are, if they are not block sizes. Then kinds and cases.
inline void bench_print_list(const BenchNames& names) {
    for (size_t i = 0; i < names.kernels.size(); i++) {
        const BenchKernel& k = names.kernels[i];
        if (!bench_wanted(k)) { continue; }
        printf("%d  %s%s\n", k.number, k.what, names.marks[i]);
        bool named = !bench_is_fixed(k) && strcmp(k.config_name, "block size") != 0;
        if (!k.config_labels.empty()) {
            for (int config : k.configs) { printf("     %s\n", bench_config_text(k, config).c_str()); }
        } else if (named) {
            printf("     %s", k.config_name);
            for (int config : k.configs) { config ? printf(" %d", config) : printf(" default"); }
            printf("\n");
        }
    }
    auto print = [](const char* what, const std::vector<const char*>& texts) {
        for (size_t i = 0; i < texts.size(); i++) { printf("%s %zu  %s\n", what, i, texts[i]); }
    };
    print("kind", names.first.kinds);
    if (names.first.cases.size() > 1) { print("case", names.first.cases); }
}

// shape: the shape that is timed. check_shapes: those that --check uses; a 0 in them stands for the value of `shape`.
inline int bench_main(int argc, char** argv, const char* name, void (*declare)(Bench&), Shape shape,
                      std::vector<Shape> check_shapes) {
    BenchFlags& f = bench_flags();
    bench_parse(argc, argv, name, &shape);
    BenchNames names = bench_names(declare, shape);
    if (names.kind < 0) {
        std::string known;
        for (const BenchKernel& k : names.kernels) { known += (known.empty() ? "" : " ") + std::to_string(k.number); }
        cli_fail("no kernel %d, there are %s", f.kernel, known.c_str());
    }
    shape.kind = names.kind;
    int num_cases = std::max(1, (int)names.first.cases.size());
    if (f.input_case >= num_cases) { cli_fail("no case %d, there are 0 to %d", f.input_case, num_cases - 1); }
    for (const BenchKernel& k : names.kernels) {
        if (f.kernel != k.number || f.config < 0 || bench_has_config(k, f.config)) { continue; }
        std::string known;
        for (int config : k.configs) { known += " " + std::to_string(config); }
        cli_fail("kernel %d has no configuration %d, there are%s", k.number, f.config, known.c_str());
    }
    if ((f.stress || f.huge) && !f.check) { cli_fail("--stress and --huge are for --check"); }
    if (f.list) {
        bench_print_list(names);
        return EXIT_SUCCESS;
    }
    if (f.tune) { f.kernel = bench_tune_kernel(name, names.first); }
#ifdef CUDA_EMULATION
    if (!f.check) { printf("No GPU: the emulation's times would mean nothing, so this only checks, as --check.\n"); }
    f.check = 1;
    emulation_schedule(f.schedule);
#endif
    BenchDevice device;
    if (!bench_open(&device, name)) { return EXIT_FAILURE; }
    if (f.huge) { return bench_run_huge(device, name, names.first); }
    return f.check ? bench_run_check(device, name, declare, shape, check_shapes, names.first)
                   : bench_run(device, name, declare, shape);
}
