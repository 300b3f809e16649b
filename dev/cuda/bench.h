/*
The harness of every dev/cuda program: flags, inputs, correctness check, block-size sweep, timing, tables.

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
        b.promoted(2);
    }
    int main(int argc, char** argv) {
        return bench_main(argc, argv, "gelu_forward", declare, {64, 1024, 768, 12, 50257}, {{1, 1, 8}, {3, 17, 776}});
    }

An op whose arithmetic has weak points names further kinds of input, which --check tries at its small shapes, too:

        int which = b.cases({"normal", "large mean"});
        Buffer<floatX> inp = b.input<floatX>("inp", n, 1.0f, which == 1 ? 30.0f : 0.0f);

Buffer<T> converts to T*. Its `host` member holds floats: for an input the values that were uploaded, for an output the
right values. Every run first calls declare without a GPU, to learn the numbers of the kernels: then b.dry is true,
buffers are NULL, and declare must not use the device.

A reference that would take long computes only the rows that b.sample() names; the other results must be finite.

Checks after a launch: the outputs are right, the inputs are unchanged, and so are the 256 bytes before and after each
buffer. Two more checks for the promoted kernel: a second launch gives the same bits, and the launcher reports the same
cost to the profiler (struct Op) as b.cost() declares. The bytes around a buffer are NaN in every floating-point type,
so a kernel that reads past the end fails too.

The timed launches are compared, too: with the outputs set to NaN before the first of them, the last one's results are
checked when all are done.

Built by `make cpu`, the programs run on a CPU (dev/cuda/emulation, CUDA_EMULATION is defined): then they only check,
and what the emulation finds wrong in a kernel fails its check.

Timing: each launch has its own pair of events. Before each launch the L2 cache is flushed and in-place buffers are
restored. For ops with FLOPs the GPU rests for 0.2 s before the timed launches of each kernel and block size. The speed
of a copy on the device and the matrix rate of the vendor's library are measured first, without a rest.
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
#include "reference.h"

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
};

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

struct BenchKernel {
    int number;
    const char* what;
    std::function<void(int)> launch;
    std::vector<int> block_sizes;
    int min_arch;         // see Bench::kernel
    int num_launches = 0; // 0: not declared
    double bytes = 0;     // memory traffic of all its launches, with intermediate results; 0: not declared
    float tolerance = 1;  // factor on the tolerances of the outputs
};

// What declare() declared, for one shape.
struct BenchState {
    const char* op = "";                         // the op's name
    double bytes = 0, flops = 0;                 // the least that a launch must move and compute
    double bytes_by_data = 0, flops_by_data = 0; // the part of these costs that depends on the inputs' values
    int promoted = -1;                           // number of the promoted kernel; -1: none
    uint32_t seed = 0, num_inputs = 0;
    bool guards = true;
    bool sampled = false; // some references compute only a part of the results
    const char* varies = "BTC";
    std::vector<const char*> cases; // names of the kinds of input; empty: there is one kind
    int which = 0;                  // the kind that declare() was called for
    std::mt19937 rng;
    std::vector<BenchBuffer> buffers;
    std::vector<BenchKernel> kernels;
    std::vector<std::function<void()>> references;
    std::function<double()> matrix_rate;
    std::function<void(BenchHuge&)> huge; // see Bench::huge()
    double huge_bytes = 0;
};

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
    // Names the kinds of input that the op is checked with; number 0 is the one that is timed. Returns the number of the kind
    // to declare.
    int cases(std::vector<const char*> names) {
        state.cases = names;
        require(state.which < (int)names.size());
        return state.which;
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
    // the inputs' values, which the launcher cannot know. The rest must equal the cost in the promoted launcher's Op.
    void cost(double least_bytes, double least_flops, double bytes_by_data = 0, double flops_by_data = 0) {
        state.bytes = least_bytes, state.flops = least_flops;
        state.bytes_by_data = bytes_by_data, state.flops_by_data = flops_by_data;
    }
    // Declares a kernel; number 0 is the vendor's library, which must compute the FLOPs of cost(). The run sweeps block_sizes; {0} means that the kernel has no
    // choice of block size. A 0 among other sizes means the launcher's default, and the run prints a note if another
    // size is more than 2% faster.
    // min_arch: 80 if the kernel needs a device and a binary of compute capability 8.0 or more, -90 if it needs code
    // compiled for sm_90a. If they do not fit, the kernel is skipped.
    void kernel(int number, const char* what, std::function<void(int)> launch,
                std::vector<int> block_sizes = {64, 128, 256, 512, 1024}, int min_arch = 0) {
        for (const BenchKernel& k : state.kernels) { require(k.number != number); }
        require(number >= 0 && !block_sizes.empty());
        state.kernels.push_back({number, what, launch, block_sizes, min_arch});
    }
    // Sets the number of launches of the kernel declared last, and the bytes that these launches move. For ops that
    // compare fused with unfused kernels.
    void moves(int num_launches, double bytes) {
        state.kernels.back().num_launches = num_launches, state.kernels.back().bytes = bytes;
    }
    // Lets the errors of the kernel declared last be `factor` times larger, because it computes in a coarser type or
    // sums in a worse order. The comment at the top of the op's file gives the reason.
    void coarser(float factor) { state.kernels.back().tolerance = factor; }
    // The kernel that is copied to train_gpt2.cu. The run prints a note if another kernel is faster by more than 2%.
    void promoted(int number) { state.promoted = number; }
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
    int list = 0, check = 0, full = 0, huge = 0, hot = 0, guards = 1;
    int block_size = 0, input_case = -1, sample = 0, stress = 0, seed = 1337, repeats = 100, schedule = -1;
    const char *flush = "read", *csv = NULL, *json = NULL;
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
         "only check, do not time: every kernel and block size, at odd shapes or at the given shape", 0, 0},
        {OPT_BOOL, 0, NULL, "full", &f.full, NULL, "with --check: check at the shape that is timed", 0, 0},
        {OPT_BOOL, 0, NULL, "huge", &f.huge, NULL,
         "with --check: check the promoted kernel with more than 2^31 elements instead, in ops that can", 0, 0},
        {OPT_INT, 0, NULL, "stress", &f.stress, "N",
         "with --check: check N random shapes, each with a random seed and kind of input; --seed repeats the choice", 0,
         INT_MAX},
        {OPT_INT, 0, NULL, "block-size", &f.block_size, NULL,
         "use only this block size; 0: sweep each kernel's own list", 0, 1024},
        {OPT_INT, 0, NULL, "case", &f.input_case, NULL,
         "kind of input, by its number in --list; -1: --check tries all of them, timing takes 0", -1, INT_MAX},
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
        {OPT_STR, 0, NULL, "flush", &f.flush, "write|read",
         "how the L2 cache is flushed; write leaves it full of dirty lines, whose write-back overlaps the timed kernel",
         0, 0},
        {OPT_INT, 0, NULL, "repeats", &f.repeats, "launches",
         "timed launches per block size; fewer if they take more than a second", 1, 10000},
        {OPT_INT, 0, NULL, "seed", &f.seed, NULL, "seed of the random inputs", 0, INT_MAX},
        {OPT_BOOL, 0, NULL, "guards", &f.guards, NULL,
         "check the bytes around each buffer; turn it off for compute-sanitizer, which then sees reads past the end", 0,
         0},
#ifdef CUDA_EMULATION
        {OPT_INT, 0, NULL, "schedule", &f.schedule, NULL,
         "order of warps and lanes: 0 by their numbers, others drawn; -1: another one for each launch", -1, INT_MAX},
#endif
        {OPT_SECTION, 0, NULL, "Results", NULL, NULL, NULL, 0, 0},
        {OPT_STR, 0, NULL, "csv", &f.csv, "FILE", "write one row per kernel and block size", 0, 0},
        {OPT_STR, 0, NULL, "json", &f.json, "FILE", "write the same in Google Benchmark's layout", 0, 0},
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
        "kernel: then only that one runs, at all its block sizes. Without it all kernels run, side by side.";
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
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begin < ns);
}

struct BenchDevice {
    char name[256] = "";
    int arch = 0;         // compute capability of the device, 90 for 9.0
    int compiled[2] = {}; // [0]: architecture that its code was compiled for; [1]: 90 if for sm_90a, else 0
    size_t l2_bytes = 0;
    uint8_t* flush = NULL; // (flush_bytes) zeros
    size_t flush_bytes = 0;
    unsigned long long* checksum = NULL; // (1)
    cudaStream_t stream = 0;
    std::vector<cudaEvent_t> events;
    double copy_gbs = 0;      // speed of a copy on the device, bytes read + written; 0: not measured
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
    s.which = which;
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
inline void bench_launch_fresh(BenchState& s, const BenchKernel& k, int block_size) {
    bench_reset(s);
    k.launch(block_size);
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
inline std::string bench_check(const BenchDevice& d, BenchState& s, const BenchKernel& k, int block_size,
                               double* worst) {
    std::string wrong;
    auto say = [&](const BenchBuffer& x, const char* what) {
        wrong += (wrong.empty() ? "" : "; ") + std::string(x.name) + ": " + what;
    };
    *worst = 0;
    profile().entries.clear();
    profile().listing = k.number == s.promoted;
    profile().library_flops = 0;
    bench_launch_fresh(s, k, block_size);
    profile().listing = false;
    cudaError_t e = cudaDeviceSynchronize();
    if (e != cudaSuccess) { // the CUDA context is lost, so no later kernel could run
        printf("FAIL kernel %d block_size %4d: %s\n", k.number, block_size, cudaGetErrorString(e));
        die("kernel %d, block_size %d: %s", k.number, block_size, cudaGetErrorString(e));
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
    if (k.number != s.promoted || !wrong.empty()) { return wrong; }
    std::vector<uint64_t> first;
    for (BenchBuffer& x : s.buffers) {
        if (bench_is_output(x)) { first.push_back(bench_checksum(d, x)); }
    }
    bench_launch_fresh(s, k, block_size);
    size_t i = 0;
    for (BenchBuffer& x : s.buffers) {
        if (bench_is_output(x) && bench_checksum(d, x) != first[i++]) { say(x, "differs from launch to launch"); }
    }
    return wrong;
}

inline std::vector<int> bench_block_sizes(const BenchKernel& k) {
    bool fixed = k.block_sizes.size() == 1 && k.block_sizes[0] == 0;
    if (bench_flags().block_size == 0 || fixed) { return k.block_sizes; }
    return {bench_flags().block_size};
}
inline bool bench_wanted(const BenchKernel& k) { return bench_flags().kernel < 0 || bench_flags().kernel == k.number; }

struct BenchCounts {
    int passed, failed, skipped;
};

// Prints one line per kernel and block size; if quiet, only for failures. failed_kernels may be NULL.
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
        for (int block_size : bench_block_sizes(k)) {
            double worst;
            std::string wrong;
#ifdef CUDA_EMULATION
            const char* missing = emulation_try([&] { wrong = bench_check(d, s, k, block_size, &worst); });
            if (missing) {
                if (!bench_flags().stress) {
                    printf("skip kernel %d (%s): needs %s, which is not emulated\n", k.number, k.what, missing);
                }
                counts->skipped++;
                break;
            }
#else
            wrong = bench_check(d, s, k, block_size, &worst);
#endif
            (wrong.empty() ? counts->passed : counts->failed)++;
            if (!wrong.empty() && failed_kernels) { failed_kernels->push_back(k.number); }
            if (wrong.empty() && quiet) { continue; }
            printf("%s kernel %d block_size %4d, B %d T %d C %d NH %d V %d%s%s: ", wrong.empty() ? "ok" : "FAIL",
                   k.number, block_size, shape.B, shape.T, shape.C, shape.NH, shape.V, s.which ? ", " : "",
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
    cost.which = which;
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
    printf("%s kernel %d, %.1f GB: ", h.wrong.empty() ? "ok" : "FAIL", s.promoted, s.huge_bytes * 1e-9);
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
    state.which = which;
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
        printf("reproduce: %s --check --seed %d --case %d -B %d -T %d -C %d -NH %d -V %d\n", cli_program(NULL), f.seed,
               which, s.B, s.T, s.C, s.NH, s.V);
        fflush(stdout);
    }
    printf("%d random shapes: %d passed, %d failed, %d skipped\n", num_shapes, counts.passed, counts.failed,
           counts.skipped);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// ---- all check shapes -------------------------------------------------------------------------

inline int bench_run_check(const BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& shape,
                           const std::vector<Shape>& check_shapes, int num_cases) {
    std::vector<Shape> shapes = check_shapes;
    if (bench_flags().shape_given || bench_flags().full || shapes.empty()) { shapes = {shape}; }
    for (Shape& s : shapes) {
        s = {s.B ? s.B : shape.B, s.T ? s.T : shape.T, s.C ? s.C : shape.C, s.NH ? s.NH : shape.NH,
             s.V ? s.V : shape.V};
    }
    if (bench_flags().stress) { return bench_run_stress(d, op, declare, shapes, num_cases); }
    BenchCounts counts = {0, 0, 0};
    for (size_t i = 0; i < shapes.size(); i++) {
        const Shape& s = shapes[i];
        for (int which = 0; which < num_cases; which++) {
            if (bench_flags().input_case >= 0 && which != bench_flags().input_case) { continue; }
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
};

inline BenchTime bench_percentiles(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    auto at = [&](double part) { return (double)times[(size_t)(part * (double)(times.size() - 1) + 0.5)]; };
    return {at(0.5), at(0.1), at(0.9), (int)times.size()};
}

// Times n launches, each by its own pair of events. before() runs before each launch and is not timed.
inline BenchTime bench_time_launches(BenchDevice& d, int n, const std::function<void()>& before,
                                     const std::function<void()>& launch) {
    while (d.events.size() < 2 * (size_t)n) {
        cudaEvent_t event;
        cudaCheck(cudaEventCreate(&event));
        d.events.push_back(event);
    }
    // 20 us per launch is more than the host needs to queue it
    bench_delay_kernel<<<1, 1, 0, d.stream>>>(20000ull * (unsigned long long)n);
    cudaCheck(cudaGetLastError());
    for (int i = 0; i < n; i++) {
        before();
        cudaCheck(cudaEventRecord(d.events[2 * i], d.stream));
        launch();
        cudaCheck(cudaEventRecord(d.events[2 * i + 1], d.stream));
    }
    cudaCheck(cudaStreamSynchronize(d.stream));
    std::vector<float> times(n);
    for (int i = 0; i < n; i++) { cudaCheck(cudaEventElapsedTime(&times[i], d.events[2 * i], d.events[2 * i + 1])); }
    return bench_percentiles(times);
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

// Times `repeats` launches. Before them all outputs are set to NaN, so that bench_check_timed() sees what they wrote. If these would take longer than limit_ms, it times fewer, but at least 3.
inline BenchTime bench_time(BenchDevice& d, BenchState& s, const BenchKernel& k, int block_size, int repeats,
                            double limit_ms) {
    auto before = [&] {
        for (BenchBuffer& x : s.buffers) {
            if (x.kind != BenchKind::inout) { continue; }
            cudaCheck(cudaMemcpyAsync(x.dev, x.start, x.bytes, cudaMemcpyDeviceToDevice, d.stream));
        }
        bench_flush_l2(d);
    };
    auto launch = [&] { k.launch(block_size); };
    double estimate_ms = bench_time_launches(d, 3, before, launch).median_ms; // also the warm-up
    if (repeats * estimate_ms > limit_ms) { repeats = std::max(3, (int)(limit_ms / estimate_ms)); }
    // Tensor cores draw more power than a card can sustain, so its clocks fall. After a rest all kernels start with the
    // same clocks, in whatever order they are timed.
    if (s.flops > 0) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }
    bench_reset(s);
    return bench_time_launches(d, repeats, before, launch);
}

// Measures the GB/s of a copy on the device (bytes read plus bytes written), the ceiling of a memory-bound kernel.
inline void bench_measure_copy(BenchDevice& d) {
    size_t bytes = std::max<size_t>((size_t)1 << 30, 4 * d.l2_bytes), free_bytes, total_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total_bytes));
    while (2 * bytes > free_bytes / 2 && bytes > ((size_t)1 << 20)) { bytes /= 2; }
    uint8_t *from, *to;
    cudaCheck(cudaMalloc(&from, bytes));
    cudaCheck(cudaMalloc(&to, bytes));
    cudaCheck(cudaMemset(from, 1, bytes));
    auto copy = [&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, d.stream)); };
    bench_time_launches(
        d, 3, [] {}, copy);
    d.copy_gbs = 2.0 * (double)bytes /
                 bench_time_launches(
                     d, 20, [] {}, copy)
                     .median_ms /
                 1e6;
    cudaCheck(cudaFree(from));
    cudaCheck(cudaFree(to));
    printf("copy on the device: %.1f GB/s read + written (%zu MB, median of 20)\n", d.copy_gbs, bytes >> 20);
}

// ---- results ----------------------------------------------------------------------------

struct BenchResult {
    const BenchKernel* kernel;
    int block_size;
    BenchTime time;
};

inline double bench_gbs(const BenchState& s, const BenchResult& r) { return s.bytes / r.time.median_ms / 1e6; }
inline double bench_tflops(const BenchState& s, const BenchResult& r) { return s.flops / r.time.median_ms / 1e9; }

// Returns the fastest result of kernel `number` (-1: of all kernels), or NULL if there is none.
inline const BenchResult* bench_best(const std::vector<BenchResult>& results, int number) {
    const BenchResult* best = NULL;
    for (const BenchResult& r : results) {
        bool better = !best || r.time.median_ms < best->time.median_ms;
        if ((number < 0 || r.kernel->number == number) && better) { best = &r; }
    }
    return best;
}

inline void bench_print_line(const BenchDevice& d, const BenchState& s, const std::vector<BenchResult>& results,
                             const BenchResult& r) {
    printf("block_size %4d | time %.4f ms", r.block_size, r.time.median_ms);
    if (s.bytes > 0) { printf(" | bandwidth %.2f GB/s", bench_gbs(s, r)); }
    printf(" | p10 %.4f p90 %.4f ms", r.time.p10_ms, r.time.p90_ms);
    if (s.flops > 0) { printf(" | %.2f TFLOP/s", bench_tflops(s, r)); }
    if (s.bytes > 0 && d.copy_gbs > 0) { printf(" | %.1f%% of copy", 100 * bench_gbs(s, r) / d.copy_gbs); }
    if (s.flops > 0 && d.matrix_tflops > 0) {
        printf(" | %.1f%% of matrix rate", 100 * bench_tflops(s, r) / d.matrix_tflops);
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
    printf("\nkernel block_size   time ms       p10       p90      GB/s  %% copy   TFLOP/s  %% rate  x kernel 0  x "
           "kernel 1%s  what\n",
           moves ? "  launches  MB moved" : "");
    for (const BenchKernel& k : s.kernels) {
        const BenchResult* r = bench_best(results, k.number);
        if (!r) { continue; }
        char cells[8][24];
        for (auto& cell : cells) { snprintf(cell, sizeof(cell), "-"); }
        if (r->block_size) { snprintf(cells[0], sizeof(cells[0]), "%d", r->block_size); }
        if (!r->block_size && k.block_sizes.size() > 1) { snprintf(cells[0], sizeof(cells[0]), "default"); }
        if (s.bytes > 0) {
            snprintf(cells[1], sizeof(cells[1]), "%.1f", bench_gbs(s, *r));
            snprintf(cells[2], sizeof(cells[2]), "%.1f", 100 * bench_gbs(s, *r) / d.copy_gbs);
        }
        if (s.flops > 0) { snprintf(cells[3], sizeof(cells[3]), "%.2f", bench_tflops(s, *r)); }
        if (s.flops > 0 && d.matrix_tflops > 0) {
            snprintf(cells[4], sizeof(cells[4]), "%.1f", 100 * bench_tflops(s, *r) / d.matrix_tflops);
        }
        if (vendor) { snprintf(cells[5], sizeof(cells[5]), "%.2f", vendor->time.median_ms / r->time.median_ms); }
        if (naive) { snprintf(cells[6], sizeof(cells[6]), "%.2f", naive->time.median_ms / r->time.median_ms); }
        printf("%6d %10s %9.4f %9.4f %9.4f %9s %7s %9s %7s %11s %11s", k.number, cells[0], r->time.median_ms,
               r->time.p10_ms, r->time.p90_ms, cells[1], cells[2], cells[3], cells[4], cells[5], cells[6]);
        if (moves) { printf("  %8d  %8.1f", k.num_launches, k.bytes / 1e6); }
        printf("  %s%s\n", k.what, k.number == s.promoted ? " (promoted)" : "");
    }
    const BenchResult* winner = bench_best(results, -1);
    if (winner) {
        printf("\nfastest: kernel %d (%s), block_size %d, %.4f ms\n", winner->kernel->number, winner->kernel->what,
               winner->block_size, winner->time.median_ms);
    }
}

// Prints a note if a default block size, or the promoted kernel, is no longer the best by more than 2%.
inline void bench_print_notes(const BenchState& s, const std::vector<BenchResult>& results) {
    for (const BenchResult& r : results) {
        const BenchResult* best = bench_best(results, r.kernel->number);
        double more = r.time.median_ms / best->time.median_ms - 1;
        if (r.block_size == 0 && more > 0.02) {
            printf("note: kernel %d takes %.1f%% longer with its default argument than with block_size %d\n",
                   r.kernel->number, 100 * more, best->block_size);
        }
    }
    const BenchResult *ours = s.promoted >= 0 ? bench_best(results, s.promoted) : NULL, *best = NULL;
    for (const BenchResult& r : results) { // except kernel 0, which is the vendor's
        if (r.kernel->number > 0 && (!best || r.time.median_ms < best->time.median_ms)) { best = &r; }
    }
    if (ours && best && ours->time.median_ms > 1.02 * best->time.median_ms) {
        printf("note: kernel %d, promoted, takes %.1f%% longer than kernel %d\n", s.promoted,
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

// `what` is the last field, because it may contain commas; a reader can split the fields before it at commas.
inline void bench_write_csv(const char* path, const BenchDevice& d, const BenchState& s, const char* op,
                            const Shape& shape, const std::vector<BenchResult>& results) {
    FILE* f = bench_create(path);
    fprintf(f, "op,kernel,block_size,dtype,B,T,C,NH,V,median_ms,p10_ms,p90_ms,launches,l2,bytes,gb_s,copy_gb_s,flops,"
               "tflop_s,matrix_tflop_s,best,promoted,kernel_launches,bytes_moved,gpu,what\n");
    for (const BenchResult& r : results) {
        std::string what;
        for (const char* p = r.kernel->what; *p; p++) { what += *p == '"' ? "\"\"" : std::string(1, *p); }
        fprintf(
            f,
            "%s,%d,%d,%s,%d,%d,%d,%d,%d,%.5f,%.5f,%.5f,%d,%s,%.0f,%.2f,%.2f,%.0f,%.3f,%.3f,%d,%d,%d,%.0f,%s,\"%s\"\n",
            op, r.kernel->number, r.block_size, PRECISION_NAME, shape.B, shape.T, shape.C, shape.NH, shape.V,
            r.time.median_ms, r.time.p10_ms, r.time.p90_ms, r.time.launches, bench_flags().hot ? "hot" : "cold",
            s.bytes, bench_gbs(s, r), d.copy_gbs, s.flops, bench_tflops(s, r), d.matrix_tflops,
            &r == bench_best(results, r.kernel->number), r.kernel->number == s.promoted, r.kernel->num_launches,
            r.kernel->bytes, d.name, what.c_str());
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
            "\"driver\": %s, \"dtype\": \"%s\", \"l2\": \"%s\", \"copy_gb_s\": %.2f, \"B\": %d, \"T\": %d, \"C\": %d, "
            "\"NH\": %d, \"V\": %d},\n  \"benchmarks\": [",
            date, bench_json_string(cli_program(NULL)).c_str(), std::thread::hardware_concurrency(),
            bench_json_string(d.name).c_str(), bench_json_string(bench_driver().c_str()).c_str(), PRECISION_NAME,
            bench_flags().hot ? "hot" : "cold", d.copy_gbs, shape.B, shape.T, shape.C, shape.NH, shape.V);
    int family = -1, instance = 0;
    for (size_t i = 0; i < results.size(); i++) {
        const BenchResult& r = results[i];
        bool same = i > 0 && results[i - 1].kernel == r.kernel;
        instance = same ? instance + 1 : 0;
        family += !same;
        char name[256];
        snprintf(name, sizeof(name), "%s/kernel:%d/block_size:%d", op, r.kernel->number, r.block_size);
        fprintf(f,
                "%s\n    {\"name\": \"%s\", \"family_index\": %d, \"per_family_instance_index\": %d, \"run_name\": "
                "\"%s\", \"run_type\": \"iteration\", \"repetitions\": 1, \"repetition_index\": 0, \"threads\": 1, "
                "\"iterations\": %d, \"real_time\": %.5f, \"cpu_time\": %.5f, \"time_unit\": \"ms\", "
                "\"bytes_per_second\": %.6e, \"flops_per_second\": %.6e, \"p10_ms\": %.5f, \"p90_ms\": %.5f, "
                "\"label\": %s}",
                i ? "," : "", name, family, instance, name, r.time.launches, r.time.median_ms, r.time.median_ms,
                1e9 * bench_gbs(s, r), 1e12 * bench_tflops(s, r), r.time.p10_ms, r.time.p90_ms,
                bench_json_string(r.kernel->what).c_str());
    }
    fprintf(f, "\n  ]\n}\n");
    bench_close(f, path);
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
    if (s.matrix_rate && s.flops > 0) {
        d.matrix_tflops = s.matrix_rate();
        printf("matrix rate of the vendor's library: %.1f TFLOP/s\n", d.matrix_tflops);
    }
    // shown: the results of the kernels asked for; results also has kernels 0 and 1, timed as baselines
    std::vector<BenchResult> results, shown;
    for (const BenchKernel& k : s.kernels) {
        bool wanted = bench_wanted(k);
        bool is_base = !wanted && k.number <= 1;
        if ((!wanted && !is_base) || bench_skip_reason(d, k) ||
            std::find(failed.begin(), failed.end(), k.number) != failed.end()) {
            continue;
        }
        if (wanted) { printf("%skernel %d: %s\n", f.kernel < 0 ? "\n" : "", k.number, k.what); }
        for (int block_size : wanted ? bench_block_sizes(k) : k.block_sizes) {
            results.push_back(
                {&k, block_size, bench_time(d, s, k, block_size, wanted ? f.repeats : 20, wanted ? 1000 : 100)});
            if (wanted) {
                shown.push_back(results.back());
                bench_print_line(d, s, results, results.back());
                std::string wrong = bench_check_timed(d, s, k);
                if (!wrong.empty()) {
                    printf("FAIL kernel %d block_size %4d: after the timed launches: %s\n", k.number, block_size,
                           wrong.c_str());
                    counts.failed++;
                }
            }
        }
        if (is_base) {
            const BenchResult* best = bench_best(results, k.number);
            printf("to compare with, not checked: kernel %d, block_size %d, %.4f ms: %s\n", k.number, best->block_size,
                   best->time.median_ms, k.what);
        }
    }
    if (f.kernel < 0 && !results.empty()) { bench_print_table(d, s, results); }
    bench_print_notes(s, shown);
    for (const BenchBuffer& x : s.buffers) {
        const char* broken = bench_broken_guard(x);
        if (broken) { printf("FAIL %s: %s while timed\n", x.name, broken), counts.failed++; }
    }
    if (f.csv) { bench_write_csv(f.csv, d, s, op, shape, shown); }
    if (f.json) { bench_write_json(f.json, d, s, op, shape, shown); }
    bench_free(s);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// shape: the shape that is timed. check_shapes: those that --check uses; a 0 in them stands for the value of `shape`.
inline int bench_main(int argc, char** argv, const char* name, void (*declare)(Bench&), Shape shape,
                      std::vector<Shape> check_shapes) {
    BenchFlags& f = bench_flags();
    bench_parse(argc, argv, name, &shape);
    BenchState names; // filled by declare() without a device, for the numbers and names of the kernels
    Bench dry = bench_view(names, shape, 0, true);
    declare(dry);
    std::string known;
    bool found = f.kernel < 0;
    for (const BenchKernel& k : names.kernels) {
        known += (known.empty() ? "" : " ") + std::to_string(k.number);
        found |= k.number == f.kernel;
    }
    if (!found) { cli_fail("no kernel %d, there are %s", f.kernel, known.c_str()); }
    int num_cases = std::max(1, (int)names.cases.size());
    if (f.input_case >= num_cases) { cli_fail("no case %d, there are 0 to %d", f.input_case, num_cases - 1); }
    if ((f.stress || f.huge) && !f.check) { cli_fail("--stress and --huge are for --check"); }
    if (f.list) {
        for (const BenchKernel& k : names.kernels) {
            if (!bench_wanted(k)) { continue; }
            printf("%d  %s%s\n", k.number, k.what, k.number == names.promoted ? " (promoted)" : "");
        }
        for (int i = 0; i < num_cases && num_cases > 1; i++) { printf("case %d  %s\n", i, names.cases[i]); }
        return EXIT_SUCCESS;
    }
#ifdef CUDA_EMULATION
    if (!f.check) { printf("No GPU: the emulation's times would mean nothing, so this only checks, as --check.\n"); }
    f.check = 1;
    emulation_schedule(f.schedule);
#endif
    BenchDevice device;
    if (!bench_open(&device, name)) { return EXIT_FAILURE; }
    if (f.huge) { return bench_run_huge(device, name, names); }
    return f.check ? bench_run_check(device, name, declare, shape, check_shapes, num_cases)
                   : bench_run(device, name, declare, shape);
}
