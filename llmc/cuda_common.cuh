/*
Shared by train_gpt2.cu and dev/cuda: precision, error checks, 128-bit vectors, reductions, rounding.
A kernel uses only names from this file and from llmc/ptx.cuh, so that its text is the same in both places.
*/
#pragma once

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <type_traits>
#include <utility>

#include "utils.h"

// ---- precision ------------------------------------------------------------------
// floatX is the type of weights and activations. Sums, statistics and gradients of parameters are float.

#if defined(ENABLE_FP32)
typedef float floatX;
#define PRECISION_NAME "fp32"
#elif defined(ENABLE_FP16)
typedef half floatX;
#define PRECISION_NAME "fp16"
#else
#define ENABLE_BF16 1
typedef __nv_bfloat16 floatX;
#define PRECISION_NAME "bf16"
#endif
#if defined(ENABLE_FP16)
constexpr bool IS_FP16 = true; // the range of fp16 is so small that gradients need a loss scale
#else
constexpr bool IS_FP16 = false;
#endif

// ---- errors ---------------------------------------------------------------------
// If a CUDA call fails, cudaCheck() prints file, line, expression and reason, and exits with status 1. Preconditions
// are checked by require() of utils.h.

#define OTHER_PROGRAMS "end other programs on this GPU (nvidia-smi lists them)" // what to do if its memory is full

#define cudaCheck(expr) cuda_check((expr), #expr, __FILE__, __LINE__)
inline void cuda_check(cudaError_t e, const char* expr, const char* file, int line) {
    if (e == cudaSuccess) { return; }
    die("%s:%d: %s: %s (%s)%s", file, line, expr, cudaGetErrorString(e), cudaGetErrorName(e),
        e == cudaErrorMemoryAllocation ? "; " OTHER_PROGRAMS : "");
}

// ---- memory ---------------------------------------------------------------------

// Returns advice for a message that `need` bytes are not free: "" if they would not fit on an empty GPU either.
inline const char* other_programs(size_t need) {
    size_t free_bytes, all_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
    return need < all_bytes / 8 * 7 ? "; " OTHER_PROGRAMS : "";
}

// Allocates device memory for `what`. If there is not enough, returns NULL with the reason in err.
inline void* device_malloc(size_t bytes, const char* what, Error* err) {
    void* memory = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    cudaError_t e = cudaMalloc(&memory, bytes);
    if (e != cudaErrorMemoryAllocation) {
        cuda_check(e, "cudaMalloc(&memory, bytes)", __FILE__, __LINE__);
        return memory;
    }
    cudaGetLastError(); // clears the error
    cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
    error_set(err, "no GPU memory for %s: %.3f GB wanted, %.3f of %.1f free", what, (double)bytes * 1e-9,
              (double)free_bytes * 1e-9, (double)all_bytes * 1e-9);
    return NULL;
}
// The same, but ends the program with the reason.
inline void* device_malloc_check(size_t bytes, const char* what) {
    Error err;
    void* memory = device_malloc(bytes, what, &err);
    if (!memory) { die("%s; %s", err.text, OTHER_PROGRAMS); }
    return memory;
}

// Allocates pinned memory on the host, for asynchronous copies. If none can be had, the memory is ordinary: its copies
// are slower, the host waits for those from the GPU, and kernels must not use it. Free it with pinned_free().
inline void* pinned_malloc(size_t bytes) {
    void* memory;
    if (cudaMallocHost(&memory, bytes) == cudaSuccess) { return memory; }
    cudaGetLastError(); // clears the error
    return malloc_check(bytes);
}
inline void pinned_free(void* memory) {
    cudaError_t e = cudaFreeHost(memory);
    if (e != cudaErrorInvalidValue) {
        cuda_check(e, "cudaFreeHost(memory)", __FILE__, __LINE__);
        return;
    }
    cudaGetLastError(); // clears the error: it was ordinary memory
    free(memory);
}

// ---- the device -----------------------------------------------------------------

// Where there is no GPU, --plan computes for an H100: suppose_device() makes the queries below answer as one would.
inline bool& device_is_supposed() {
    static bool supposed;
    return supposed;
}
inline void suppose_device() { device_is_supposed() = true; }

// An attribute of the current device. The query does not synchronise.
inline int device_attribute(cudaDeviceAttr attribute) {
    int device, value;
    if (device_is_supposed()) {
        return attribute == cudaDevAttrMultiProcessorCount            ? 132
               : attribute == cudaDevAttrComputeCapabilityMajor       ? 9
               : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448
                                                                      : 0;
    }
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}
inline int num_multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Writes the current device's name to name (256).
inline void device_name(char* name) {
    cudaDeviceProp properties;
    int device;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&properties, device));
    snprintf(name, 256, "%s", properties.name);
}

// Writes the device's name to name (256) and returns its free memory in bytes.
inline size_t device_memory(char* name) {
    size_t free_bytes, all_bytes;
    device_name(name);
    cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
    return free_bytes;
}

// The architecture that a kernel was compiled for: 75, 80, 90, ..., which is __CUDA_ARCH__ / 10 in the kernel. If the
// binary only holds older code, it is lower than the device's. A kernel that needs a newer one must then not be
// launched.
template <class Kernel> int compiled_arch(Kernel* kernel) {
    cudaFuncAttributes attributes;
    cudaCheck(cudaFuncGetAttributes(&attributes, (const void*)kernel));
    return attributes.ptxVersion;
}

// ---- execution ------------------------------------------------------------------

struct ColumnSums;     // column_sums.cuh
struct CublasLt;       // cublas_common.cuh
struct DeferredUpdate; // adamw_state.cuh
struct TunedState;     // tuned.h

// The last argument of every operation says where and how it is launched, and is passed on to the operations that it calls.
// A stream converts to an Execution with the defaults. Two streams must not share after_event, sums, update or library.
struct Execution {
    cudaStream_t stream;
    int block_size = 0;       // threads of a block; 0: the launcher's default, or what was measured (tuned)
    int reserved_sms = 0;     // SMs that persistent kernels leave to another stream's kernels
    bool* after_event = NULL; // set by whoever records an event, or waits for one: see may_launch_early()
    ColumnSums* sums = NULL;  // column_sums() adds to this list, and its owner launches it; NULL: each launches its own
    DeferredUpdate* update = NULL; // AdamW's update that idle warps of matmul_forward may work on; NULL: none
    CublasLt* library = NULL;      // handle, workspace and algorithms; NULL: those of cublaslt()
    bool times_algorithms = true;  // cuBLASLt's algorithms are chosen by timing; false: its first candidate
    TunedState* tuned = NULL;      // configurations that were measured; NULL: each launcher's default

    Execution(cudaStream_t stream = NULL, int block_size = 0) : stream(stream), block_size(block_size) {}
    // The SMs for a persistent kernel. Its grid must have no more blocks than fit on them: a block that is not resident
    // from the beginning makes the kernel take twice as long. Two at least, for a cluster.
    int free_sms() const { return std::max(2, num_multiprocessors() - reserved_sms); }
    // Returns whether the next kernel may be launched early. Not after an event's record or wait: a graph has no programmatic
    // edge from an event to a kernel.
    bool may_launch_early() const { return !(after_event && std::exchange(*after_event, false)); }
    void follows_event() const { // call after such a record or wait
        if (after_event) { *after_event = true; }
    }
};

// ---- programmatic dependent launch ------------------------------------------------
// A kernel starts while the previous kernel of the stream is still ending. Below compute capability 9.0 the feature
// does not exist, and the two device functions do nothing.

// Allows the next kernel of the stream to start early, if it was launched by launch_early().
__device__ inline void grid_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
// Waits until the previous kernel of the stream has ended; its results may then be read.
__device__ inline void grid_wait_dependency() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// ---- launches ----------------------------------------------------------------------

// The shape of a launch. early: a programmatic dependent launch, where exec and the kernel's code allow it; see launch_early().
struct LaunchShape {
    dim3 grid, block;
    size_t shared_bytes; // dynamic shared memory of a block
    int cluster;         // blocks of a cluster, along x; 0: no clusters
    bool early;

    LaunchShape(dim3 grid, dim3 block, size_t shared_bytes = 0, int cluster = 0, bool early = false)
        : grid(grid), block(block), shared_bytes(shared_bytes), cluster(cluster), early(early) {}
};

// The arguments of cudaLaunchKernelEx() for a LaunchShape. Also sets the kernel's limit of dynamic shared memory, which is 48 KB
// minus the static shared memory by default, to that of this launch.
struct LaunchConfig : cudaLaunchConfig_t {
    cudaLaunchAttribute own[2] = {};

    template <class Kernel> LaunchConfig(Kernel* kernel, const LaunchShape& shape, const Execution& exec)
        : cudaLaunchConfig_t() {
        if (shape.shared_bytes > 0) {
            cudaCheck(
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shape.shared_bytes));
        }
        cudaLaunchConfig_t& c = *this; // gridDim alone is also a variable of CUDA's
        c.gridDim = shape.grid, c.blockDim = shape.block, c.dynamicSmemBytes = shape.shared_bytes;
        c.stream = exec.stream, c.attrs = own;
        if (shape.cluster > 0) {
            own[numAttrs].id = cudaLaunchAttributeClusterDimension;
            own[numAttrs].val.clusterDim.x = shape.cluster;
            own[numAttrs].val.clusterDim.y = own[numAttrs].val.clusterDim.z = 1;
            numAttrs++;
        }
        // code older than 9.0 would not wait in grid_wait_dependency()
        if (shape.early && compiled_arch(kernel) >= 90 && exec.may_launch_early()) {
            own[numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            own[numAttrs++].val.programmaticStreamSerializationAllowed = 1;
        }
    }
    LaunchConfig(const LaunchConfig&) = delete; // attrs points into it
};

template <class... Parameters, class... Arguments> void launch_kernel(void (*kernel)(Parameters...),
                                                                      const LaunchShape& shape, const Execution& exec,
                                                                      const Arguments&... arguments) {
    LaunchConfig config(kernel, shape, exec);
    cudaCheck(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// A programmatic dependent launch: the kernel's blocks start as the blocks of the previous kernel end. The kernel must
// call grid_wait_dependency() before it touches memory that the previous kernel writes. If the device or the code is
// older than 9.0, or an event comes before, this is an ordinary launch.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, const Execution& exec,
                  const Arguments&... arguments) {
    launch_kernel(kernel, LaunchShape(grid, block, shared_bytes, 0, true), exec, arguments...);
}

// Calls launch(std::integral_constant<int, n>()), so that n, from 1 to `most`, can be the argument of a template.
template <int most, int i = 1, class Launch> void with_constant(int n, const Launch& launch) {
    if constexpr (i <= most) {
        n == i ? launch(std::integral_constant<int, i>()) : with_constant<most, i + 1>(n, launch);
    } else {
        require(false);
    }
}

// Work that is launched again and again on a stream, as a CUDA graph from the second time on. The first time the work is
// launched as it is, because it may choose cuBLASLt's algorithms by timing them, which cannot be captured.
struct LaunchGraph {
    cudaGraphExec_t exec;
    bool launched;  // once, as it is
    bool no_memory; // for a graph: the work goes on being launched as it is, which is slower
};
template <class Launch> void launch_as_graph(LaunchGraph* g, cudaStream_t stream, Launch launch) {
    if (!g->launched || g->no_memory) {
        g->launched = true;
        return launch();
    }
    if (!g->exec) {
        cudaGraph_t graph;
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        launch();
        cudaCheck(cudaStreamEndCapture(stream, &graph));
        cudaError_t e = cudaGraphInstantiate(&g->exec, graph, 0);
        cudaCheck(cudaGraphDestroy(graph));
        g->no_memory = e == cudaErrorMemoryAllocation;
        if (!g->no_memory) { cudaCheck(e); }
        if (g->no_memory) {
            cudaGetLastError(); // clears the error
            fprintf(stderr,
                    "warning: no GPU memory for a CUDA graph: steps are launched kernel by kernel, which is slower; "
                    "a smaller -b leaves room\n");
            return launch();
        }
    }
    cudaCheck(cudaGraphLaunch(g->exec, stream));
}
inline void graph_free(LaunchGraph* g) {
    if (g->exec) { cudaCheck(cudaGraphExecDestroy(g->exec)); }
    *g = {};
}

// ---- shapes ---------------------------------------------------------------------

template <class T> __host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }

// ---- constants ------------------------------------------------------------------

constexpr float LOG2E = 1.4426950409f; // log2(e): exp(x) = exp2(x * LOG2E)
constexpr float LN2 = 0.6931471806f;   // ln(2): ln(x) = log2(x) * LN2

// ---- 128-bit vectors --------------------------------------------------------------

template <class T> struct alignas(16) Vec128 {
    static constexpr int size = 16 / sizeof(T);
    T v[size];
    __host__ __device__ T& operator[](int i) { return v[i]; }
    __host__ __device__ const T& operator[](int i) const { return v[i]; }
};
typedef Vec128<floatX> x128; // 8 bf16 or fp16, 4 fp32
typedef Vec128<float> f128;

// Four elements in one access: 8 bytes of 16-bit elements, 16 bytes of fp32.
struct alignas(4 * sizeof(floatX)) x4 {
    floatX v[4];
    __host__ __device__ floatX& operator[](int i) { return v[i]; }
    __host__ __device__ const floatX& operator[](int i) const { return v[i]; }
};

template <class T> __device__ inline Vec128<T> vec128_from_bits(int4 bits) {
    Vec128<T> x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
template <class T> __device__ inline int4 vec128_bits(const Vec128<T>& x) {
    int4 bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// The elements of a vector as floats. A bf16 number is the upper half of a float: by bits that is one instruction for each
// element, where (float)x[i] takes two for every second one.
template <class T> struct Floats128 {
    float v[Vec128<T>::size];
    __device__ float& operator[](int i) { return v[i]; }
    __device__ const float& operator[](int i) const { return v[i]; }
};
template <class T> __device__ inline Floats128<T> to_floats(const Vec128<T>& x) {
    Floats128<T> y;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        int4 bits = vec128_bits(x);
        const unsigned words[4] = {(unsigned)bits.x, (unsigned)bits.y, (unsigned)bits.z, (unsigned)bits.w};
        for (int i = 0; i < 4; i++) {
            y[2 * i] = __uint_as_float(words[i] << 16), y[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
    } else {
        for (int i = 0; i < Vec128<T>::size; i++) { y[i] = (float)x[i]; }
    }
    return y;
}

// p is aligned to 16 bytes. Suffix cs: streaming, for data that is not read again soon; the caches evict it first (3-7%
// slower than plain accesses on an H200 wherever it was tried). Suffix cg: cached in L2 only.
template <class T> __device__ inline Vec128<T> load128(const T* p) {
    return vec128_from_bits<T>(*reinterpret_cast<const int4*>(p));
}
template <class T> __device__ inline Vec128<T> load128cs(const T* p) {
    return vec128_from_bits<T>(__ldcs(reinterpret_cast<const int4*>(p)));
}
template <class T> __device__ inline Vec128<T> load128cg(const T* p) {
    return vec128_from_bits<T>(__ldcg(reinterpret_cast<const int4*>(p)));
}
template <class T> __device__ inline void store128(T* p, const Vec128<T>& x) {
    *reinterpret_cast<int4*>(p) = vec128_bits(x);
}
template <class T> __device__ inline void store128cs(T* p, const Vec128<T>& x) {
    __stcs(reinterpret_cast<int4*>(p), vec128_bits(x));
}
template <class T> __device__ inline void store128cg(T* p, const Vec128<T>& x) {
    __stcg(reinterpret_cast<int4*>(p), vec128_bits(x));
}

// ---- reductions -------------------------------------------------------------------

// All 32 lanes must call these. Every lane gets the result, with the same bits.
__device__ inline float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, offset); }
    return x;
}
__device__ inline float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2) { x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset)); }
    return x;
}

// Reduces over a block of whole warps (blockDim.x % 32 == 0, at most 1024). `shared` (32) is scratch and may be reused
// after the call. Every thread gets the result. The order of the sum depends only on the size of the block.
template <auto warp_op, class T> __device__ inline T block_reduce(T x, T* shared, T neutral) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    x = warp_op(x);
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    x = warp_op(lane < num_warps ? shared[lane] : neutral);
    __syncthreads(); // from here on `shared` may be overwritten
    return x;
}
__device__ inline float block_sum(float x, float* shared) { return block_reduce<warp_sum>(x, shared, 0.0f); }
__device__ inline float block_max(float x, float* shared) { return block_reduce<warp_max>(x, shared, -INFINITY); }

// Return the sum and the maximum of x over each group of `lanes` neighbouring lanes.
template <int lanes, class T> __device__ inline T lanes_sum(T x) {
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, offset); }
    return x;
}
template <int lanes, class T> __device__ inline T lanes_max(T x) {
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) { x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset)); }
    return x;
}
// Sums and the maximum over a quad: the four lanes that share a row of an accumulator of mma or wgmma. lanes_sum<4> adds them in
// another order.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
template <int n> __device__ inline void quad_sums(float (&x)[n]) { // of each element, in place
#pragma unroll
    for (int i = 0; i < n; i++) { x[i] = quad_sum(x[i]); }
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// The sum and the maximum of x over the lanes of a warp that have the same place in their groups of `lanes`.
template <int lanes> __device__ inline float groups_sum(float x) {
#pragma unroll
    for (int offset = 16; offset >= lanes; offset /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, offset); }
    return x;
}
template <int lanes> __device__ inline float groups_max(float x) {
#pragma unroll
    for (int offset = 16; offset >= lanes; offset /= 2) { x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset)); }
    return x;
}

// One step of the sums below, with half = 8, 4, 2 or 1: adds the values v[0 .. 2 * half - 1] of lanes that differ in bit `offset`.
// Each lane gives half of its values to the other lane and adds what it receives to the half that it keeps, v[0 .. half - 1].
__device__ inline void warp_sums_step(float* v, int half, int offset) {
    bool upper = threadIdx.x & offset;
#pragma unroll
    for (int i = 0; i < half; i++) {
        float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
        v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, offset);
    }
}
// Sums each of n values, n a power of two up to 32, over the warp. Returns the sum of v[lane / (32 / n)]. v is overwritten.
// For n = 8 these are 4 + 2 + 1 + 1 + 1 shuffles. Values that each lane keeps:
//     lane      0-3   4-7   8-11  12-15  16-19  20-23  24-27  28-31
//     half = 4  v[0], v[1], v[2], v[3]   v[4], v[5], v[6], v[7]           exchange with lane ^ 16
//     half = 2  v[0], v[1]  v[2], v[3]   v[4], v[5]    v[6], v[7]         exchange with lane ^ 8
//     half = 1  v[0]  v[1]  v[2]  v[3]   v[4]   v[5]   v[6]   v[7]        exchange with lane ^ 4
template <int n> __device__ inline float warp_sums(float* v) {
#pragma unroll
    for (int half = n / 2, offset = 16; half > 0; half /= 2, offset /= 2) { warp_sums_step(v, half, offset); }
    return lanes_sum<32 / n>(v[0]);
}
// The column sums of a matrix of a warp's 64 columns, spread over the lanes as wgmma and mma.sync leave results: lane l
// has the columns 8j + l % 4 * 2 + e, j = 0..7, e = 0, 1, and v[2j + e] is its own sum of such a column. Returns the sums
// over all rows of columns 2l and 2l + 1, with 8 + 4 + 2 shuffles. v is overwritten.
__device__ inline float2 fragment_column_sums(float (&v)[16]) {
    warp_sums_step(v, 8, 16), warp_sums_step(v, 4, 8), warp_sums_step(v, 2, 4);
    return make_float2(v[0], v[1]);
}

// Returns the mean and 1 / sqrt(variance + epsilon) of a row in a warp's registers, n vectors per lane. Vector j counts if
// inside(j); otherwise it is zeros. mean_of(sum) divides a sum by the number of elements.
template <class T, int n, class MeanOf, class Inside> __device__ inline float2
layernorm_statistics(const T (&x)[n], const MeanOf& mean_of, float epsilon, const Inside& inside) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < n; j++) {
        for (int k = 0; k < x128::size; k++) { sum += (float)x[j][k]; }
    }
    float mean = mean_of(warp_sum(sum));
#pragma unroll
    for (int j = 0; j < n; j++) {
        for (int k = 0; inside(j) && k < x128::size; k++) {
            squares += ((float)x[j][k] - mean) * ((float)x[j][k] - mean);
        }
    }
    return make_float2(mean, rsqrtf(mean_of(warp_sum(squares)) + epsilon));
}

// ---- rounding -----------------------------------------------------------------------

// 32 pseudo-random bits, a hash of (index, seed): two rounds of a multiply-xorshift mix. Source: Wellons, "Prospecting
// for hash functions", lowbias32.
__host__ __device__ inline uint32_t hash_bits(uint32_t index, uint32_t seed) {
    uint32_t x = index ^ (seed * 0x9E3779B9u + 0x7F4A7C15u);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Stochastic rounding of x to bf16: up or down to one of its two neighbours, the nearer one with the larger
// probability, so that the expected value is x. `random` are 32 uniform bits. Infinities and NaN are only converted.
// Other types than bf16 round to nearest: the trick needs a type whose bits are the upper half of a float's.
__device__ inline floatX stochastic_round(float x, uint32_t random) {
#if defined(ENABLE_BF16)
    if (!isfinite(x)) { return (floatX)x; }
    return (floatX)__uint_as_float((__float_as_uint(x) + (random & 0xFFFFu)) & 0xFFFF0000u);
#else
    (void)random;
    return (floatX)x;
#endif
}
