/*
CUDA C++ and the CUDA runtime for a CPU: what a kernel and its launcher see when `make cpu` compiles them with g++ or
clang++. This file declares the language (threadIdx, __syncthreads, shuffles, atomics, launches) and the runtime
(cudaMalloc, events, attributes); engine.cpp, memory.cpp and runtime.cpp define them. Names and semantics are those of
the CUDA C++ Programming Guide and the CUDA Runtime API; what is not there is not used by this project.

The functions are not inline, because the code that includes this file is compiled with -fsanitize=thread: each of its
loads and stores calls a function of memory.cpp. The emulation's own code must not do that.
*/
#pragma once

#define CUDA_EMULATION 1  // for the hooks in bench.h
#define __CUDA_ARCH__ 900 // EMULATION_ARCH=80 in the environment: a device without sm_90a; =75: needs 750 here
#define __CUDA_ARCH_FEAT_SM90_ALL
#define CUDART_VERSION 12000

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "load.h"

#define __global__
#define __device__
#define __constant__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// ---- vectors --------------------------------------------------------------------------------

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

// ---- where a thread is ------------------------------------------------------------------------
// filter.cpp turns threadIdx, blockIdx, blockDim and gridDim into calls of these functions. A thread's place never
// changes, so the compiler may call them once per function.

uint3 emulation_thread_index() __attribute__((const));
uint3 emulation_block_index() __attribute__((const));
dim3 emulation_block_size() __attribute__((const));
dim3 emulation_grid_size() __attribute__((const));
const int warpSize = 32;

// ---- shared memory ----------------------------------------------------------------------------
// filter.cpp turns __shared__ variables into references to what these functions return. `key` is an address that is
// unique to the variable; all threads of a block get the same memory.

void* emulation_shared(const void* key, size_t bytes, size_t alignment, const char* name);
void* emulation_dynamic_shared(size_t alignment);

// ---- barriers, warps --------------------------------------------------------------------------

void __syncthreads();
int __syncthreads_or(int predicate);
int __syncthreads_and(int predicate);
int __syncthreads_count(int predicate);
void __syncwarp(unsigned mask = 0xFFFFFFFFu);
void emulation_named_barrier(int id, int threads, bool wait);
void __threadfence();
void __threadfence_block();

unsigned __ballot_sync(unsigned mask, int predicate);
int __any_sync(unsigned mask, int predicate);
int __all_sync(unsigned mask, int predicate);
unsigned emulation_match_any(unsigned mask, uint64_t bits);
template <class T> inline unsigned __match_any_sync(unsigned mask, T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    return emulation_match_any(mask, bits);
}
int __reduce_add_sync(unsigned mask, int value);
int __reduce_min_sync(unsigned mask, int value);
int __reduce_max_sync(unsigned mask, int value);
unsigned __reduce_add_sync(unsigned mask, unsigned value);
unsigned __reduce_min_sync(unsigned mask, unsigned value);
unsigned __reduce_max_sync(unsigned mask, unsigned value);
unsigned __reduce_and_sync(unsigned mask, unsigned value);
unsigned __reduce_or_sync(unsigned mask, unsigned value);
unsigned __reduce_xor_sync(unsigned mask, unsigned value);

// kind: 'i' from lane `operand`, 'x' from lane ^ operand, 'u' from lane - operand, 'd' from lane + operand
uint64_t emulation_shuffle(char kind, unsigned mask, uint64_t bits, int operand, int width);
template <class T> inline T emulation_shuffle_as(char kind, unsigned mask, T value, int operand, int width) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    bits = emulation_shuffle(kind, mask, bits, operand, width);
    memcpy(&value, &bits, sizeof(value));
    return value;
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return emulation_shuffle_as('i', mask, value, lane, width);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return emulation_shuffle_as('x', mask, value, lanes, width);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return emulation_shuffle_as('u', mask, value, (int)lanes, width);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return emulation_shuffle_as('d', mask, value, (int)lanes, width);
}

// ---- atomics ------------------------------------------------------------------------------------

int atomicAdd(int* p, int x);
unsigned atomicAdd(unsigned* p, unsigned x);
unsigned long long atomicAdd(unsigned long long* p, unsigned long long x);
float atomicAdd(float* p, float x);
double atomicAdd(double* p, double x);
float4 atomicAdd(float4* p, float4 x);
int atomicMax(int* p, int x);
unsigned atomicMax(unsigned* p, unsigned x);
unsigned long long atomicMax(unsigned long long* p, unsigned long long x);
int atomicMin(int* p, int x);
unsigned atomicMin(unsigned* p, unsigned x);
int atomicExch(int* p, int x);
unsigned atomicExch(unsigned* p, unsigned x);
float atomicExch(float* p, float x);
unsigned long long atomicExch(unsigned long long* p, unsigned long long x);
int atomicCAS(int* p, int compare, int x);
unsigned atomicCAS(unsigned* p, unsigned compare, unsigned x);
unsigned long long atomicCAS(unsigned long long* p, unsigned long long compare, unsigned long long x);
unsigned atomicInc(unsigned* p, unsigned limit);
unsigned atomicOr(unsigned* p, unsigned x);
unsigned atomicAnd(unsigned* p, unsigned x);

// ---- loads, stores, bits, arithmetic ----------------------------------------------------------------

template <class T> inline T __ldg(const T* p) { return emulation_load(p); }
template <class T> inline T __ldcs(const T* p) { return emulation_load(p); }
template <class T> inline T __ldcg(const T* p) { return emulation_load(p); }
template <class T> inline T __ldca(const T* p) { return emulation_load(p); }
template <class T> inline T __ldcv(const T* p) { return emulation_load(p); }
template <class T> inline void __stcs(T* p, T x) { *p = x; }
template <class T> inline void __stcg(T* p, T x) { *p = x; }
template <class T> inline void __stwb(T* p, T x) { *p = x; }
template <class T> inline void __stwt(T* p, T x) { *p = x; }

// Digit i of `selector` (0 is the lowest) chooses byte i of the result out of the 8 bytes of y and x, x the lower four.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) { out |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i; }
    return out;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

// The fast functions are exact here, so a check can pass that a GPU's approximation would fail, by some ulps.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
template <class A, class B> inline typename std::common_type<A, B>::type min(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> inline typename std::common_type<A, B>::type max(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)a < (T)b ? (T)b : (T)a;
}
inline float min(float a, float b) { return fminf(a, b); } // the other operand if one is NaN
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- what the emulation cannot do ----------------------------------------------------------------------

// Thrown on the host when a kernel or its launcher needs something that is not emulated; the harness then skips the
// kernel by name.
struct EmulationUnsupported {
    const char* what; // "wgmma"
};
// Ends the launch if a thread of a kernel calls it; throws EmulationUnsupported on the host in either case.
[[noreturn]] void emulation_unsupported(const char* what);
// Calls f() and returns NULL, or what it needs that is not emulated.
template <class F> inline const char* emulation_try(F f) {
    try {
        f();
    } catch (const EmulationUnsupported& e) { return e.what; }
    return NULL;
}
// griddepcontrol. Each launch has ended before the next one begins; memory.cpp checks what an early launch may touch.
void emulation_launch_dependents();
void emulation_wait_dependency();
// filter.cpp turns asm statements with instructions into this.
#define emulation_asm(...)                                                                                             \
    do {                                                                                                               \
        if (strstr(#__VA_ARGS__, "griddepcontrol.wait")) {                                                             \
            emulation_wait_dependency();                                                                               \
        } else if (strstr(#__VA_ARGS__, "griddepcontrol.launch_dependents")) {                                         \
            emulation_launch_dependents();                                                                             \
        } else {                                                                                                       \
            emulation_unsupported("inline PTX: " #__VA_ARGS__);                                                        \
        }                                                                                                              \
    } while (0)
[[noreturn]] void __trap();
uint64_t __cvta_generic_to_shared(const void* p);
// The counters clock64 and globaltimer of an SM that runs at 1500 MHz.
void emulation_clock(unsigned long long* cycles, unsigned long long* ns);

// ---- errors, memory ------------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
};
const char* cudaGetErrorName(cudaError_t e);
extern "C" const char* cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
typedef struct EmulationStream* cudaStream_t; // NULL, but with EMULATION_STREAMS: see runtime.cpp
cudaError_t emulation_malloc(void** p, size_t bytes);
template <class T> inline cudaError_t cudaMalloc(T** p, size_t bytes) {
    void* memory = NULL;
    cudaError_t e = emulation_malloc(&memory, bytes);
    *p = (T*)memory;
    return e;
}
cudaError_t cudaFree(void* p);
extern "C" cudaError_t cudaMallocHost(void** p, size_t bytes);
template <class T> inline cudaError_t cudaMallocHost(T** p, size_t bytes) { return cudaMallocHost((void**)p, bytes); }
extern "C" cudaError_t cudaFreeHost(void* p);
template <class T> inline cudaError_t cudaMallocManaged(T** p, size_t bytes, unsigned flags = 1) {
    (void)flags;
    return cudaMallocHost(p, bytes);
}
enum { cudaHostRegisterDefault = 0 };
inline cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
extern "C" cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                       cudaStream_t stream = NULL);
cudaError_t emulation_copy_to_symbol(void* symbol, size_t size, const void* from, size_t bytes, size_t offset,
                                     cudaMemcpyKind kind);
template <class T> inline cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0,
                                                         cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return emulation_copy_to_symbol((void*)&symbol, sizeof(symbol), from, bytes, offset, kind);
}
void emulation_copy(void* to, const void* from, size_t bytes); // for work on a stream: waits for nothing
cudaError_t cudaMemset(void* p, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream = NULL);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);

// ---- device, streams, events ------------------------------------------------------------------------------

enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrReservedSharedMemoryPerBlock = 111,
};
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
};
int emulation_arch(); // 90, or 80 or 75 if EMULATION_ARCH says so
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetPCIBusId(char* bus_id, int size, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
extern "C" cudaError_t cudaDeviceSynchronize();
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

typedef struct EmulationEvent* cudaEvent_t;
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = NULL);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end);
enum { cudaEventDefault = 0, cudaEventDisableTiming = 2 };
enum { cudaEventRecordDefault = 0, cudaEventRecordExternal = 1, cudaEventWaitDefault = 0, cudaEventWaitExternal = 1 };
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
inline cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

// A graph is the list of the launches, copies and fills that were captured, with their arguments. During a capture they are
// not run; a capture takes all streams.
typedef struct EmulationGraph* cudaGraph_t;
typedef struct EmulationGraph* cudaGraphExec_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
void emulation_put(cudaStream_t stream, const std::function<void()>& work); // runs, queues or captures it
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
extern "C" cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, EmulationGraph** nodes, size_t* num_nodes);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);

// ---- kernels ------------------------------------------------------------------------------------------------

struct cudaFuncAttributes {
    size_t sharedSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 13,
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t emulation_set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
    return emulation_set_attribute((const void*)kernel, attribute, value);
}
cudaError_t emulation_occupancy(int* blocks, int block_size, size_t shared_bytes);
template <class Kernel> inline cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int block_size, size_t shared_bytes) {
    return emulation_occupancy(blocks, block_size, shared_bytes);
}

// Runs call(closure) once in each thread of the grid. If all_resident, no block waits for another to end before it
// starts. `cluster` blocks, neighbours along x, form a cluster. early: a programmatic dependent launch.
void emulation_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, bool all_resident, int cluster,
                      bool early, void (*call)(void*), void* closure);

// Tells the next emulation_launch() where parameter `number` is stored and, for a pointer, where it points, so that accesses
// through pointers to the host's memory are found. Number 0 is the launch's own description.
void emulation_parameter(int number, const void* place, size_t bytes, const void* pointer);
template <class T> inline const void* emulation_pointer(const T&) { return NULL; }
template <class T>
inline typename std::enable_if<!std::is_function<T>::value, const void*>::type emulation_pointer(T* const& p) {
    return const_cast<const void*>((const volatile void*)p);
}

// kernel<<<grid, block, shared_bytes, stream>>>(arguments), which filter.cpp writes as
// emulation_kernel(kernel, grid, block, shared_bytes, stream)(arguments)
template <class... Parameters> struct EmulationKernel {
    void (*kernel)(Parameters...);
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    bool all_resident;
    int cluster;
    bool early;
    void operator()(Parameters... parameters) const {
        EmulationKernel launch = *this;
        emulation_put(stream, [=] {
            auto call = [&] { launch.kernel(parameters...); }; // each thread gets its own copies
            int number = 0;
            emulation_parameter(number, &launch, sizeof(launch), NULL);
            (emulation_parameter(++number, &parameters, sizeof(parameters), emulation_pointer(parameters)), ...);
            emulation_launch((const void*)launch.kernel, launch.grid, launch.block, launch.shared_bytes,
                             launch.all_resident, launch.cluster, launch.early,
                             [](void* closure) { (*(decltype(call)*)closure)(); }, &call);
        });
    }
};
template <class... Parameters>
inline EmulationKernel<Parameters...> emulation_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                                       size_t shared_bytes = 0, cudaStream_t stream = NULL) {
    return {kernel, grid, block, shared_bytes, stream, false, 1, false};
}

enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttributeValue {
    int programmaticStreamSerializationAllowed;
    struct {
        unsigned x, y, z;
    } clusterDim;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
int emulation_cluster(const cudaLaunchConfig_t& config); // blocks per cluster; 0: clusters that cannot be launched
bool emulation_launches_early(const cudaLaunchConfig_t& config);
template <class... Parameters, class... Arguments> inline cudaError_t
cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    int cluster = emulation_cluster(*config);
    if (cluster == 0) { return cudaGetLastError(); }
    EmulationKernel<Parameters...> launch = {
        kernel,         config->gridDim, config->blockDim, config->dynamicSmemBytes,
        config->stream, false,           cluster,          emulation_launches_early(*config)};
    launch(std::forward<Arguments>(arguments)...);
    return cudaPeekAtLastError();
}
template <class Kernel>
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, const cudaLaunchConfig_t* config) {
    int size = 0; // without the attribute an H200 says 0 clusters
    for (unsigned i = 0; i < config->numAttrs; i++) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            size = (int)config->attrs[i].val.clusterDim.x;
        }
    }
    *clusters = size ? 20 / size : 0; // 20 blocks run at once
    return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream);
template <size_t... i, class... Parameters>
inline cudaError_t emulation_launch_cooperative(std::index_sequence<i...>, void (*kernel)(Parameters...), dim3 grid,
                                                dim3 block, void** arguments, size_t shared_bytes,
                                                cudaStream_t stream) {
    EmulationKernel<Parameters...>{kernel, grid, block, shared_bytes, stream, true, 1, false}(
        *(typename std::remove_reference<Parameters>::type*)arguments[i]...);
    return cudaPeekAtLastError();
}
template <class... Parameters>
inline cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                                               size_t shared_bytes, cudaStream_t stream) {
    return emulation_launch_cooperative(std::index_sequence_for<Parameters...>(), kernel, grid, block, arguments,
                                        shared_bytes, stream);
}

// ---- for the harness ----------------------------------------------------------------------------------------

// Sets the order in which warps and lanes run: 0 in the order of their numbers, others drawn from the number; -1, the
// default: another one for each launch.
void emulation_schedule(int number);
// Sets the device's number of SMs, which is 4 at first; the variable EMULATION_SMS overrides it. emulation_depends_on_sms() is true
// if the number is 2 and a kernel or its launcher has queried it since.
void emulation_sms(int number);
bool emulation_depends_on_sms();
// What was found since the last call: races, accesses out of bounds, reads of uninitialised shared memory, deadlocks.
// A text for the user, "" if nothing. *count: how many of them.
const char* emulation_findings(int* count);
// These functions find the cause of a wrong result. emulation_watch() says before a launch that a buffer has its start values, that
// nobody has written it, or that it is as an earlier launch has left it. Afterwards emulation_writer() tells who wrote element `at` of its n,
// of `size` bytes each: ", written at op.cu:40 by ...", or, if there is no such element, the first one that a kernel has written.
// emulation_unwritten_reads() tells which accesses have read what nobody had written. A check begins with
// emulation_begin_check(). A check of a property judges all values that it reads together. If a check fails,
// emulation_explain() repeats it and returns what the first thread that was named had done: "; before: ...", or "".
uint64_t emulation_checksum(const void* p, size_t bytes);
void emulation_name(const void* p, const char* name); // of the allocation at p, for messages
enum EmulationWatch { EMULATION_WRITTEN, EMULATION_UNWRITTEN, EMULATION_LEFT };
void emulation_watch(const void* p, size_t bytes, EmulationWatch watch);
const char* emulation_writer(const void* p, size_t size, size_t at, size_t n);
void emulation_begin_check(bool is_property);
const char* emulation_explain(const std::function<void()>& again);
const char* emulation_unwritten_reads();
// Counts the memory transactions of all launches from emulation_count(true) to emulation_count(false), and prints them:
// see transactions.cpp.
void emulation_count(bool on);
void emulation_print_transactions(bool pictures);
// False if a check of an op with this cost takes too long here. EMULATION_LIMIT=10 allows ten times the default.
bool emulation_affords(double bytes, double flops);
