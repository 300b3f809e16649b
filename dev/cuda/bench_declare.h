/*
Part of bench.h: what a declare function uses (Bench, Buffer, kinds of input), and the flags of every program.
*/
#pragma once

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../llmc/cli.h"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"
#include "reference.h"

// ---- what a declare function or a launcher refuses -----------------------------------------------------------

// Says why a launcher or declare() cannot do what was asked of it.
struct BenchDeclined {
    std::string why;
    bool by_condition; // a require() does not hold; false: a CUDA call has failed
};
inline int& bench_trying() { // more than 0: what declines is thrown as a BenchDeclined, and does not end the program
    static int depth = 0;
    return depth;
}
inline const char* bench_file(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
PRINTF_LIKE(2, 3) inline void bench_decline(bool by_condition, const char* fmt, ...) {
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (!bench_trying()) { die("%s", text); }
    throw BenchDeclined{text, by_condition};
}
// Calls f. Returns what declined, with an empty text if nothing did.
template <class F> inline BenchDeclined bench_try(F f) {
    struct Depth {
        Depth() { bench_trying()++; }
        ~Depth() { bench_trying()--; }
    } depth;
    try {
        f();
    } catch (const BenchDeclined& declined) { return declined; }
    return {"", false};
}

// While the harness records a launcher into a graph, a failed call is kept here and does not end the program.
inline cudaError_t*& bench_kept_error() {
    static cudaError_t* kept = NULL;
    return kept;
}
inline void bench_cuda_check(cudaError_t e, const char* expr, const char* file, int line) {
    if (e != cudaSuccess && bench_kept_error()) {
        *bench_kept_error() = e;
    } else if (e != cudaSuccess && bench_trying()) {
        bench_decline(false, "%s:%d: %s: %s", bench_file(file), line, expr, cudaGetErrorString(e));
    } else {
        cuda_check(e, expr, file, line);
    }
}
#undef cudaCheck
#define cudaCheck(expr) bench_cuda_check((expr), #expr, __FILE__, __LINE__)
#undef require
#define require(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) { bench_decline(true, "%s:%d: %s needs %s", bench_file(__FILE__), __LINE__, __func__, #cond); }   \
    } while (0)

#include "bench_property.h"

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

enum class BenchKind { input, output, inout, scratch, state };

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
#ifdef CUDA_EMULATION
        *wrong += emulation_writer(dev, sizeof(T), all.at, n);
#endif
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
// the sums grow to about 2.5 K, and then almost all of it cancels: a sum that is kept as a 16-bit number on its way loses the
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

// A check with buffers of more than 2^32 elements: an index of 32 bits, signed or not, or a product of two ints, would
// overflow. The largest check has four buffers: 34 GB in 16 bits, 69 GB in fp32. A device with less memory skips it.
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

    // the least multiple of C that is more than 2^32 by a million
    static size_t elements(size_t C) { return ceil_div(((size_t)1 << 32) + (1 << 20), C) * C; }
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
    // Compares rows (C) of out (num_rows,C): the first and the last ones, those around elements 2^31 and 2^32 and around
    // byte 2^32, and 64 random ones. reference(row, want) writes the right values of a row.
    template <class T> void compare(const char* name, const T* out, size_t num_rows, size_t C, Tolerance tolerance,
                                    const std::function<void(size_t, float*)>& reference) {
        std::vector<size_t> rows = {0, 1, num_rows - 2, num_rows - 1};
        for (size_t element : {(size_t)1 << 31, (size_t)1 << 32, ((size_t)1 << 32) / sizeof(T)}) {
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

// A number of the shape. It remembers that declare() has read it: lines of output leave the other numbers out.
struct BenchDim {
    int value;
    bool* was_read;
    operator int() const { return *was_read = true, value; }
};

struct BenchKernel {
    int number;
    const char* what;
    std::function<void(int)> launch;
    std::vector<int> configs;                 // what the run sweeps
    int min_arch;                             // see Bench::kernel
    const char* config_name = "block size";   // what the launcher's int means
    std::vector<std::string> config_labels{}; // one per configuration, or empty

    int num_launches = 0;              // 0: not declared
    double bytes = 0;                  // memory traffic of all its launches, with intermediate results; 0: not declared
    float tolerance = 1;               // factor on the tolerances of the outputs
    const char* coarser_output = NULL; // the one that has another factor, coarser_factor
    float coarser_factor = 1;
    std::vector<std::pair<const char*, std::function<std::string()>>> properties{}; // see Bench::property()

    // if its matrix products are not in floatX: their type, what measures the library's rate, the measured TFLOP/s
    const char* rate_type = NULL;
    std::function<double(cudaStream_t)> measure_rate = nullptr;
    double matrix_tflops = 0;

    float tolerance_of(const char* output) const {
        return coarser_output && strcmp(output, coarser_output) == 0 ? coarser_factor : tolerance;
    }
};

// What declare() declared, for one shape.
struct BenchState {
    const char* op = "";                         // the op's name
    double bytes = 0, flops = 0;                 // the least that a launch must move and compute
    double bytes_by_data = 0, flops_by_data = 0; // the part of these costs that depends on the inputs' values
    bool reads_only = false;                     // its writes are negligible
    int best = -1;                               // number of the promoted or best kernel; -1: none
    std::string best_at;                         // where declare() says so: "op.cu:80: b.best(3)"
    bool is_promoted = false;                    // true if a copy of kernel `best` is in train_gpt2.cu
    uint32_t seed = 0, num_inputs = 0;
    bool guards = true;
    bool sampled = false;           // some references compute only a part of the results
    const char* varies = "BTC";     // see Bench::varies
    std::vector<const char*> cases; // names of the kinds of input; empty: there is one kind
    int number = 0;                 // of the case
    int which = 0;                  // the kind of input that declare() was called for
    std::vector<const char*> kinds; // names of the kinds of operation; empty: there is one kind
    int kind = 0;                   // the kind of operation that declare() was called for
    bool reads[5] = {};             // which of B, T, C, NH, V declare() has read
    std::mt19937 rng;
    std::vector<BenchBuffer> buffers;
    std::vector<BenchKernel> kernels;
    std::vector<std::function<void()>> references;
    std::function<double(cudaStream_t)> matrix_rate;
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
    BenchDim B, T, C, NH, V; // the shape
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
    // Device memory for the kernels' own use, filled with NaN before the first launch. --check launches again without filling it.
    template <class T> Buffer<T> scratch(const char* name, size_t n) {
        return make<T>(BenchKind::scratch, name, n, false);
    }
    // The same for what a launch leaves behind for the next one, such as tickets that it has reset: zeros before the first.
    template <class T> Buffer<T> state_of_launches(const char* name, size_t n) {
        return make<T>(BenchKind::state, name, n, false);
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
                std::vector<int> configs = {64, 128, 256, 512, 1024}, int min_arch = 0,
                const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        for (const BenchKernel& k : state.kernels) {
            if (k.number != number) { continue; }
            die("%s:%d: b.kernel(%d, \"%s\"): \"%s\" has this number, too", bench_file(file), line, number, what,
                k.what);
        }
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
    void kernel_rate(const char* type, std::function<double(cudaStream_t)> measure) {
        state.kernels.back().rate_type = type, state.kernels.back().measure_rate = measure;
    }
    // Lets the errors of the kernel declared last be `factor` times larger, because it computes in a coarser type or
    // sums in a worse order. The comment at the top of the op's file gives the reason.
    void coarser(float factor) { state.kernels.back().tolerance = factor; }
    // The same for one output alone.
    void coarser(float factor, const char* output) {
        state.kernels.back().coarser_factor = factor, state.kernels.back().coarser_output = output;
    }
    // A property of the kernel declared last that no comparison of one launch with a reference shows, such as a distribution.
    // check() launches it as often as it likes, with any buffers, and returns what is wrong, or "". --check calls it once, at
    // the first shape whose declare() has it. See bench_property.h for tests of random numbers.
    void property(const char* what, std::function<std::string()> check) {
        state.kernels.back().properties.push_back({what, check});
    }
    // The kernel that is copied to train_gpt2.cu; the op's file has the marks `// ==== promoted: OP ====`. The run prints
    // a note if another kernel is faster by more than 2%.
    void promoted(int number, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        set_best(number, true, std::string(bench_file(file)) + ":" + std::to_string(line) + ": b.promoted");
    }
    // The same for an op without a copy in train_gpt2.cu.
    void best(int number, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        set_best(number, false, std::string(bench_file(file)) + ":" + std::to_string(line) + ": b.best");
    }
    // measure() returns the TFLOP/s that the vendor's library reaches in this run. It is called once, before timing.
    // For ops bound by FLOPs.
    void matrix_rate(std::function<double(cudaStream_t)> measure) { state.matrix_rate = measure; }

    // The check that --huge runs, with this much device memory; see BenchHuge.
    void huge(double bytes, std::function<void(BenchHuge&)> check) { state.huge_bytes = bytes, state.huge = check; }

    // ---- used by the harness itself ----
    void set_best(int number, bool is_promoted, const std::string& where) {
        state.best = number, state.is_promoted = is_promoted;
        state.best_at = where + "(" + std::to_string(number) + ")";
    }
    template <class T> Buffer<T> make(BenchKind kind, const char* name, size_t n, bool has_host) {
        Buffer<T> x = {nullptr, nullptr};
        if (dry) { return x; }
        size_t guard = state.guards ? BENCH_GUARD : 0, bytes = n * sizeof(T);
        uint8_t* memory;
        cudaCheck(cudaMalloc(&memory, std::max<size_t>(bytes + 2 * guard, 1)));
        x.dev = (T*)(memory + guard);
        if (has_host) { x.host = (float*)malloc_check(n * sizeof(float)); }
#ifdef CUDA_EMULATION
        emulation_name(memory, name);
#endif
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

// The kernels that the first argument names: "4", "3,5", "2-4", "7-".
struct BenchChoice {
    std::string text;                       // empty: all kernels
    std::vector<std::pair<int, int>> parts; // first and last number of each part
    bool has(int number) const {
        auto in = [=](const std::pair<int, int>& part) { return part.first <= number && number <= part.second; };
        return parts.empty() || std::any_of(parts.begin(), parts.end(), in);
    }
    int single() const { // the number, if it is one; else -1
        return parts.size() == 1 && parts[0].first == parts[0].second ? parts[0].first : -1;
    }
};
// Reads such a text. Returns false if it is none.
inline bool bench_read_choice(const char* text, BenchChoice* choice) {
    *choice = {text, {}};
    auto number = [&](int* n) {
        size_t length = strspn(text, "0123456789");
        if (length < 1 || length > 6) { return false; }
        *n = atoi(text), text += length;
        return true;
    };
    for (;; text++) {
        std::pair<int, int> part;
        if (!number(&part.first)) { return false; }
        part.second = part.first;
        if (*text == '-') {
            part.second = INT_MAX, text++;
            if (*text && *text != ',' && !number(&part.second)) { return false; }
        }
        if (part.second < part.first) { return false; }
        choice->parts.push_back(part);
        if (*text != ',') { return *text == '\0'; }
    }
}

struct BenchFlags {
    BenchChoice kernels;
    int list = 0, check = 0, full = 0, huge = 0, tune = 0, hot = 0, sustained = 0;
#ifdef CUDA_EMULATION
    int guards = 0; // the emulation itself knows where each buffer ends
#else
    int guards = 1;
#endif
    int transactions = 0, picture = 0; // of the emulation
    int config = -1, input_case = -1, kind = -1, sample = 0, stress = 0, seed = 1337, repeats = 100, schedule = -1;
    int device = 0, first_failure = 0;
    float noise = 0; // in percent; 0: the number of launches does not depend on it
    double noise_seconds = 10;
    const char *flush = "read", *csv = NULL, *json = NULL, *tune_file = NULL;
    bool shape_given = false;
    std::vector<Shape> shapes; // those of -B -T -C -NH -V, or the op's own
};
inline BenchFlags& bench_flags() {
    static BenchFlags flags;
    return flags;
}
inline size_t bench_sample_size() { return (size_t)bench_flags().sample; }

// Reads "256", "256,512", "256:4096:*2" or "256:1024:128": one number of a shape, or several.
inline std::vector<int> bench_read_numbers(const char* flag, const char* text) {
    const char* at = text;
    std::vector<int> numbers;
    auto fail = [&](const char* why) {
        cli_fail("%s wants whole numbers from 1, as 256, 256,512, 256:4096:*2 or 256:1024:128, got '%s'%s", flag, text,
                 why);
    };
    auto number = [&] {
        char digits[11] = "";
        size_t length = strspn(at, "0123456789");
        memcpy(digits, at, std::min<size_t>(length, 10));
        if (length == 0 || length > 10 || atoll(digits) < 1 || atoll(digits) > INT_MAX) { fail(""); }
        at += length;
        return atoll(digits);
    };
    for (;; at++) {
        long long first = number(), last = first, step = 1;
        bool multiplies = false;
        if (*at == ':') {
            at++, last = number();
            if (*at != ':') { fail(": a step is missing"); }
            multiplies = *++at == '*';
            at += multiplies, step = number();
            if (last < first || (multiplies && step < 2)) { fail(""); }
        }
        for (long long x = first; x <= last; x = multiplies ? x * step : x + step) {
            numbers.push_back((int)x);
            if (numbers.size() > 1000) { fail(": more than 1000"); }
        }
        if (*at != ',') { break; }
    }
    if (*at) { fail(""); }
    return numbers;
}

// Sets the shapes of the flags. texts: of -B -T -C -NH -V, NULL for those of the op's own shape
inline void bench_read_shapes(const char* const texts[5], const Shape& own) {
    const char* names[] = {"-B", "-T", "-C", "-NH", "-V"};
    const int usual[] = {own.B, own.T, own.C, own.NH, own.V};
    std::vector<int> numbers[5];
    for (int i = 0; i < 5; i++) {
        numbers[i] = texts[i] ? bench_read_numbers(names[i], texts[i]) : std::vector<int>{usual[i]};
    }
    BenchFlags& f = bench_flags();
    f.shapes.clear();
    for (int B : numbers[0]) {
        for (int T : numbers[1]) {
            for (int C : numbers[2]) {
                for (int NH : numbers[3]) {
                    for (int V : numbers[4]) { f.shapes.push_back({B, T, C, NH, V}); }
                }
            }
        }
    }
    if (f.shapes.size() > 1000) { cli_fail("%zu shapes are more than 1000", f.shapes.size()); }
}

// Parses argv into flags. own: the op's own shape. Exits on --help and on usage errors.
inline void bench_parse(int argc, char** argv, const char* name, const Shape& own) {
    BenchFlags& f = bench_flags();
    const std::string usual[] = {std::to_string(own.B), std::to_string(own.T), std::to_string(own.C),
                                 std::to_string(own.NH), std::to_string(own.V)};
    const char* texts[5]; // of the numbers of the shape
    for (int i = 0; i < 5; i++) { texts[i] = usual[i].c_str(); }
    const Option opts[] = {
        {OPT_SECTION, 0, NULL, "What to do", NULL, NULL, NULL, 0, 0},
        {OPT_BOOL, 0, NULL, "list", &f.list, NULL, "list the kernels; needs no GPU", 0, 0},
        {OPT_BOOL, 0, NULL, "check", &f.check, NULL,
         "only check, do not time: every kernel and configuration, at odd shapes or at the given shape", 0, 0},
        {OPT_BOOL, 0, NULL, "full", &f.full, NULL, "with --check: check at the shape that is timed", 0, 0},
        {OPT_BOOL, 0, NULL, "first-failure", &f.first_failure, NULL, "with --check: end with the first failure", 0, 0},
        {OPT_BOOL, 0, NULL, "huge", &f.huge, NULL,
         "with --check: check the promoted kernel with more than 2^32 elements instead, in ops that can", 0, 0},
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
        {OPT_SECTION, 0, NULL, "Shape; several: -T 256,512 or -T 256:4096:*2 (a step of 128: 256:1024:128)", NULL, NULL,
         NULL, 0, 0},
        {OPT_STR, 'B', NULL, "batch", &texts[0], "N", "sequences", 0, 0},
        {OPT_STR, 'T', NULL, "time", &texts[1], "N", "tokens in a sequence", 0, 0},
        {OPT_STR, 'C', NULL, "channels", &texts[2], "N", "channels", 0, 0},
        {OPT_STR, 0, "NH", "heads", &texts[3], "N", "attention heads", 0, 0},
        {OPT_STR, 'V', NULL, "vocab", &texts[4], "N", "tokens in the vocabulary", 0, 0},
        {OPT_SECTION, 0, NULL, "Measurement", NULL, NULL, NULL, 0, 0},
        {OPT_BOOL, 0, NULL, "hot", &f.hot, NULL, "do not flush the L2 cache before each timed launch", 0, 0},
        {OPT_BOOL, 0, NULL, "sustained", &f.sustained, NULL,
         "also time launches back to back for a second, as in a training step: no flush, no rest", 0, 0},
        {OPT_STR, 0, NULL, "flush", &f.flush, "write|read",
         "how the L2 cache is flushed; write leaves it full of dirty lines, whose write-back overlaps the timed kernel",
         0, 0},
        {OPT_INT, 0, NULL, "repeats", &f.repeats, "launches",
         "timed launches per configuration; fewer if they take more than a second", 1, 10000},
        {OPT_FLOAT, 0, NULL, "noise", &f.noise, "%",
         "go on timing, in runs of --repeats, until the median is known to so many percent (95% confidence), for at "
         "most 10 s; 0: "
         "one run",
         0, 100},
        {OPT_INT, 0, NULL, "device", &f.device, NULL, "number of the GPU, among those that are visible", 0, INT_MAX},
        {OPT_INT, 0, NULL, "seed", &f.seed, NULL, "seed of the random inputs", 0, INT_MAX},
        {OPT_BOOL, 0, NULL, "guards", &f.guards, NULL,
         "check the bytes around each buffer; turn it off for compute-sanitizer, which then sees reads past the end", 0,
         0},
#ifdef CUDA_EMULATION
        {OPT_INT, 0, NULL, "schedule", &f.schedule, NULL,
         "order of warps and lanes: 0 by their numbers, others drawn; -1: another one for each launch", -1, INT_MAX},
        {OPT_BOOL, 0, NULL, "transactions", &f.transactions, NULL,
         "run once and count, per source line, what memory is asked for and what a GPU would move; README, \"Without a "
         "GPU\"",
         0, 0},
        {OPT_BOOL, 0, NULL, "picture", &f.picture, NULL,
         "the same, and draw the sectors or banks of each line's first request", 0, 0},
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
    // the kernels: the first argument, or one that follows no flag with a value
    auto takes_value = [&](const char* flag) {
        auto names = [&](const Option& o) {
            const char dash_letter[] = {'-', o.letter, '\0'};
            return o.type != OPT_SECTION && o.type != OPT_BOOL &&
                   ((o.letter && strcmp(flag, dash_letter) == 0) || (o.alias && flag + 1 == std::string(o.alias)) ||
                    flag == std::string("--") + o.name);
        };
        return flag[0] == '-' && std::any_of(opts, opts + num_opts, names);
    };
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' || (i > 1 && takes_value(argv[i - 1]))) { continue; }
        if (!bench_read_choice(argv[i], &f.kernels)) {
            cli_fail("'%s' does not name kernels, as 4, 3,5 or 7- do; see %s --list", argv[i], argv[0]);
        }
        args.erase(args.begin() + i);
        break;
    }
    args.push_back(NULL);
    std::string about = std::string(name) +
                        ": checks kernels against the CPU and times them. An argument may name kernels, as 4, 3,5, 2-4 "
                        "or 7- (from 7 on): "
                        "then only those run, in all their configurations. Without it all kernels run, side by side.";
    cli_parse((int)args.size() - 1, args.data(), about.c_str(), opts, num_opts);
    for (int i = 0; i < 5; i++) {
        bool given = texts[i] != usual[i].c_str();
        f.shape_given |= given;
        texts[i] = given ? texts[i] : NULL;
    }
    bench_read_shapes(texts, own);
}
