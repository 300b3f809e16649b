/*
The CUDA runtime for one device, whose work is done when a call returns; conversions of small floating-point types.

With EMULATION_STREAMS=early or late, a stream is a queue instead, and its tasks run when the host waits. While several streams have
a task that may run, those of streams created with cudaStreamNonBlocking come first (early) or last (late). So both extreme orders
that the events allow can be tried: a missing event, or one that is recorded too early, gives wrong results.
*/
#include <assert.h>
#include <time.h>

#include <algorithm>
#include <deque>
#include <map>

#include "cuda_fp16.h"
#include "cuda_bf16.h"
#include "cuda_fp8.h"
#include "engine.h"

// ---- errors -----------------------------------------------------------------------------------------

static cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t e) { return last_error = e; }

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "driver version is insufficient"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image for this device"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
const char* cudaGetErrorName(cudaError_t e) {
    for (const auto& known : errors) {
        if (known.error == e) { return known.name; }
    }
    return "an error without a name";
}
const char* cudaGetErrorString(cudaError_t e) {
    for (const auto& known : errors) {
        if (known.error == e) { return known.text; }
    }
    return "unknown error";
}

// ---- streams, events, graphs ------------------------------------------------------------------------------------

struct EmulationEvent {
    timespec time;
    long queued, done; // how often it was put on a stream to be recorded, and was recorded
};
struct Task {
    std::function<void()> run; // unless the task only waits
    cudaEvent_t event;         // must have been recorded `records` times before; NULL: no wait
    long records;
};
struct EmulationStream {
    bool blocking;
    std::deque<Task> tasks;
};
static std::vector<EmulationStream*> streams;
const void* emulation_running; // the stream whose task runs

// Runs the next task of a blocking stream, or of one that is not. Returns false if none of their tasks may run.
static bool run_a_task(bool blocking) {
    for (EmulationStream* stream : streams) {
        if (stream->blocking != blocking || stream->tasks.empty()) { continue; }
        Task& next = stream->tasks.front();
        if (next.event && next.event->done < next.records) { continue; }
        Task task = std::move(next);
        stream->tasks.pop_front();
        emulation_running = stream;
        if (task.run) { task.run(); }
        emulation_running = NULL;
        return true;
    }
    return false;
}
template <class Done> static void run_until(Done done) {
    const char* order = getenv("EMULATION_STREAMS");
    bool blocking_first = order && strcmp(order, "late") == 0;
    while (!done()) {
        bool ran = run_a_task(blocking_first) || run_a_task(!blocking_first);
        assert(ran); // a task waits only for records that were queued before it
        (void)ran;
    }
}
static bool idle(bool also_non_blocking) {
    for (EmulationStream* stream : streams) {
        if ((stream->blocking || also_non_blocking) && !stream->tasks.empty()) { return false; }
    }
    return true;
}

cudaError_t cudaDeviceSynchronize() {
    run_until([] { return idle(true); });
    return last_error;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    *stream = NULL;
    if (!getenv("EMULATION_STREAMS")) { return cudaSuccess; }
    *stream = new EmulationStream{flags != cudaStreamNonBlocking, {}};
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream) { return cudaSuccess; }
    cudaStreamSynchronize(stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    run_until([=] { return stream ? stream->tasks.empty() : idle(false); });
    return last_error;
}

struct EmulationGraph {
    std::vector<std::function<void(cudaStream_t)>> work; // each puts something on the stream
};
static bool capturing;
static EmulationGraph captured;

void emulation_put(cudaStream_t stream, const std::function<void()>& work) {
    if (capturing) {
        captured.work.push_back([=](cudaStream_t to) { emulation_put(to, work); });
    } else if (stream) {
        stream->tasks.push_back({work, NULL, 0});
    } else {
        cudaStreamSynchronize(NULL);
        work();
    }
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new EmulationEvent(), cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaDeviceSynchronize(); // no task may name it any longer
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (capturing) {
        captured.work.push_back([=](cudaStream_t to) { cudaEventRecord(event, to); });
        return cudaSuccess;
    }
    long number = ++event->queued;
    emulation_put(stream, [=] {
        clock_gettime(CLOCK_MONOTONIC, &event->time);
        event->done = number;
    });
    return cudaSuccess;
}
// A capture is one list, so only a wait for an event outside of it counts.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (!capturing && !stream) { return cudaEventSynchronize(event); }
    if (!capturing) { stream->tasks.push_back({{}, event, event->queued}); }
    if (capturing && flags == cudaEventWaitExternal) {
        captured.work.push_back([=](cudaStream_t to) { cudaStreamWaitEvent(to, event, cudaEventWaitDefault); });
    }
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    run_until([=] { return event->done == event->queued; });
    return last_error;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = (float)((double)(end->time.tv_sec - begin->time.tv_sec) * 1e3 +
                  (double)(end->time.tv_nsec - begin->time.tv_nsec) * 1e-6);
    return cudaSuccess;
}

void emulation_clock(unsigned long long* cycles, unsigned long long* ns) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *ns = (unsigned long long)now.tv_sec * 1000000000 + (unsigned long long)now.tv_nsec;
    *cycles = *ns / 2 * 3;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    if (capturing) { return fail(cudaErrorInvalidValue); }
    captured.work.clear();
    capturing = true;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    if (!capturing) { return fail(cudaErrorInvalidValue); }
    capturing = false;
    *graph = new EmulationGraph(captured);
    return last_error;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, EmulationGraph**, size_t* num_nodes) {
    *num_nodes = graph->work.size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new EmulationGraph(*graph);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaGraphDestroy(exec); }
cudaError_t cudaMallocHost(void** p, size_t bytes) {
    cudaError_t error = emulation_malloc(p, bytes);
    if (error == cudaSuccess) { pin(*p); }
    return error;
}
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
    emulation_put(stream, [=] { function(argument); });
    return last_error;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (capturing) { return fail(cudaErrorInvalidValue); }
    for (const auto& work : exec->work) { work(stream); }
    return last_error;
}

// ---- memory -----------------------------------------------------------------------------------------------

void emulation_copy(void* to, const void* from, size_t bytes) {
    host_reads(from, bytes);
    memmove(to, from, bytes);
    host_has_written(to, bytes);
}
static void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (emulation_counting) {
        bool reads = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        bool writes = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        count_copy(reads ? bytes : 0, writes ? bytes : 0);
    }
    emulation_copy(to, from, bytes);
}
static void fill(void* p, int value, size_t bytes) {
    if (emulation_counting) { count_copy(0, bytes); }
    memset(p, value, bytes);
    host_has_written(p, bytes);
}
// False if one side of a copy is not in the memory that its kind names, or extends past its allocation.
static bool is_end(const void* p, size_t bytes, bool on_device) {
    size_t offset;
    bool pinned;
    if (!device_offset(p, &offset)) { return !on_device; }
    return is_allocated(p, bytes, &pinned) && (on_device || pinned);
}
static bool can_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    size_t offset;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) {
        to_device = device_offset(to, &offset), from_device = device_offset(from, &offset);
    }
    return bytes == 0 || (is_end(to, bytes, to_device) && is_end(from, bytes, from_device));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (!can_copy(to, from, bytes, kind)) { return fail(cudaErrorInvalidValue); }
    cudaStreamSynchronize(NULL);
    copy(to, from, bytes, kind);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (!can_copy(to, from, bytes, kind)) { return fail(cudaErrorInvalidValue); }
    size_t offset; // memory of the host that cudaMallocHost() has not given is pageable
    bool queues = stream && !capturing;
    bool reads_pageable = queues && kind == cudaMemcpyHostToDevice && !device_offset(from, &offset);
    bool writes_pageable = queues && kind == cudaMemcpyDeviceToHost && !device_offset(to, &offset);
    if (reads_pageable) { // is read before the call returns
        std::vector<char> staged((const char*)from, (const char*)from + bytes);
        emulation_put(stream, [=] { copy(to, staged.data(), bytes, kind); });
    } else {
        emulation_put(stream, [=] { copy(to, from, bytes, kind); });
    }
    return writes_pageable ? cudaStreamSynchronize(stream) : cudaSuccess; // is written before the call returns
}
cudaError_t emulation_copy_to_symbol(void* symbol, size_t size, const void* from, size_t bytes, size_t offset,
                                     cudaMemcpyKind kind) {
    bool fits = offset <= size && bytes <= size - offset;
    if (!fits || (bytes > 0 && !is_end(from, bytes, kind == cudaMemcpyDeviceToDevice))) {
        return fail(cudaErrorInvalidValue);
    }
    cudaStreamSynchronize(NULL);
    emulation_copy((char*)symbol + offset, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    if (bytes > 0 && !is_end(p, bytes, true)) { return fail(cudaErrorInvalidValue); }
    cudaStreamSynchronize(NULL);
    fill(p, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    if (bytes > 0 && !is_end(p, bytes, true)) { return fail(cudaErrorInvalidValue); }
    emulation_put(stream, [=] { fill(p, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = *total_bytes = (size_t)4 << 30;
    return cudaSuccess;
}

int emulation_arch() {
    static int arch = 0;
    if (arch == 0) {
        int asked = (int)emulation_setting("EMULATION_ARCH", 90);
        arch = asked >= 90 ? 90 : asked >= 80 ? 80 : 75;
    }
    return arch;
}

uint64_t emulation_checksum(const void* p,
                            size_t bytes) { // each step is invertible: one changed word changes the result
    uint64_t sum = bytes, word = 0;
    for (size_t i = 0; i < bytes; i += sizeof(word)) {
        memcpy(&word, (const char*)p + i, std::min(sizeof(word), bytes - i));
        sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
        sum ^= sum >> 32;
    }
    return sum;
}

// ---- device -------------------------------------------------------------------------------------------------
// A small device, so that persistent kernels and grid-stride loops take more than one round at small shapes.

static int usual_sms = 4;
static bool sms_are_asked_for;
void emulation_sms(int number) { usual_sms = number, sms_are_asked_for = false; }
bool emulation_depends_on_sms() { return usual_sms == 2 && sms_are_asked_for && !getenv("EMULATION_SMS"); }
static int num_sms() {
    sms_are_asked_for = true;
    return (int)emulation_setting("EMULATION_SMS", usual_sms);
}
cudaError_t cudaGetDeviceCount(int* count) { return *count = (int)emulation_setting("EMULATION_GPUS", 1), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    int count;
    cudaGetDeviceCount(&count);
    return device >= 0 && device < count ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceGetPCIBusId(char*, int, int) { return fail(cudaErrorInvalidValue); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    const char* name = getenv("EMULATION_NAME");
    snprintf(properties->name, sizeof(properties->name), "%s", name ? name : "CPU emulation (its times mean nothing)");
    properties->major = emulation_arch() / 10, properties->minor = emulation_arch() % 10;
    properties->multiProcessorCount = num_sms();
    properties->totalGlobalMem = (size_t)4 << 30;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = num_sms();
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = 2048;
        break;
    case cudaDevAttrL2CacheSize:
        *value = 1 << 20;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = SHARED_DEFAULT;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = SHARED_LIMIT;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = SHARED_LIMIT + 1024;
        break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
        *value = 1024;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = emulation_arch() / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = emulation_arch() % 10;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

// ---- kernels --------------------------------------------------------------------------------------------------

// Bytes of dynamic shared memory that cudaFuncSetAttribute allows a kernel.
static std::map<const void*, int>& shared_limits() {
    static std::map<const void*, int> limits;
    return limits;
}
static size_t shared_limit(const void* kernel) {
    auto found = shared_limits().find(kernel);
    return found == shared_limits().end() ? (size_t)SHARED_DEFAULT : (size_t)found->second;
}
size_t emulation_shared_limit(const void* kernel) {
    return shared_limits().count(kernel) ? (size_t)SHARED_LIMIT : (size_t)SHARED_DEFAULT;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    *attributes = {};
    attributes->maxThreadsPerBlock = MAX_THREADS, attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = emulation_arch();
    attributes->maxDynamicSharedSizeBytes = (int)shared_limit(kernel);
    return cudaSuccess;
}
cudaError_t emulation_set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || value > SHARED_LIMIT) { return fail(cudaErrorInvalidValue); }
        shared_limits()[kernel] = value;
    }
    return cudaSuccess;
}
cudaError_t emulation_occupancy(int* blocks, int block_size, size_t shared_bytes) {
    *blocks = block_size < 1 || block_size > MAX_THREADS || shared_bytes > SHARED_LIMIT ? 0
              : 2 * shared_bytes > SHARED_LIMIT                                         ? 1
                                                                                        : 2;
    return cudaSuccess;
}
cudaError_t emulation_check_config(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes) {
    size_t threads = (size_t)block.x * block.y * block.z;
    bool fits = grid.x > 0 && grid.x <= INT32_MAX && grid.y > 0 && grid.y <= 65535 && grid.z > 0 && grid.z <= 65535 &&
                threads > 0 && threads <= MAX_THREADS && block.z <= 64;
    if (!fits) { return fail(cudaErrorInvalidConfiguration); }
    if (shared_bytes > shared_limit(kernel)) { return fail(cudaErrorInvalidValue); }
    return cudaSuccess;
}
int emulation_cluster(const cudaLaunchConfig_t& config) {
    int cluster = 1;
    for (unsigned i = 0; i < config.numAttrs; i++) {
        const cudaLaunchAttribute& a = config.attrs[i];
        if (a.id != cudaLaunchAttributeClusterDimension) { continue; }
        unsigned x = a.val.clusterDim.x;
        bool fits =
            x >= 1 && x <= 16 && a.val.clusterDim.y == 1 && a.val.clusterDim.z == 1 && config.gridDim.x % x == 0;
        if (!fits) { return fail(cudaErrorInvalidConfiguration), 0; }
        cluster = (int)x;
    }
    if (cluster > 1 && emulation_arch() < 90) { emulation_unsupported("clusters"); }
    return cluster;
}
bool emulation_launches_early(const cudaLaunchConfig_t& config) {
    bool early = false;
    for (unsigned i = 0; i < config.numAttrs; i++) {
        const cudaLaunchAttribute& a = config.attrs[i];
        early |=
            a.id == cudaLaunchAttributeProgrammaticStreamSerialization && a.val.programmaticStreamSerializationAllowed;
    }
    return early && emulation_arch() >= 90;
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    emulation_unsupported("a cooperative launch through an untyped pointer");
}

// ---- small floating-point types -----------------------------------------------------------------------------------

// Rounds a finite x >= 0 to nearest, ties to even, in a format with this many bits of mantissa whose smallest normal
// exponent is min_exponent. ldexp and nearbyint are exact, so there is one rounding.
static double round_to(double x, int mantissa, int min_exponent) {
    int exponent;
    frexp(x, &exponent); // x = f * 2^exponent with f in [0.5, 1)
    int ulp = std::max(exponent - 1, min_exponent) - mantissa;
    return ldexp(nearbyint(ldexp(x, -ulp)), ulp);
}
// The bits of a rounded x >= 0 in that format.
static uint32_t pack_bits(double x, int mantissa, int min_exponent) {
    int exponent;
    frexp(x, &exponent);
    if (x == 0 || exponent - 1 < min_exponent) { return (uint32_t)ldexp(x, mantissa - min_exponent); } // subnormal
    uint32_t fraction = (uint32_t)ldexp(x, mantissa - (exponent - 1)) - (1u << mantissa);
    return (uint32_t)(exponent - min_exponent) << mantissa | fraction;
}

uint16_t emulation_half_bits_of_double(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) { return 0x7FFF; }
    double rounded = isinf(x) ? INFINITY : round_to(fabs(x), 10, -14);
    return (uint16_t)(sign | (rounded > 65504 ? 0x7C00 : pack_bits(rounded, 10, -14)));
}
uint16_t emulation_half_bits(float x) {
    uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFF;
    if (magnitude < 0x38800000 || magnitude >= 0x477FE000) { return emulation_half_bits_of_double((double)x); }
    uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1); // normal and below 65504: plain integer arithmetic
    return (uint16_t)((bits >> 16 & 0x8000) | ((rounded - 0x38000000) >> 13));
}
float emulation_half_value(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    if (exponent == 31) { return __uint_as_float(sign | 0x7F800000 | fraction << 13); }
    if (exponent > 0) { return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13); }
    float value = (float)fraction / 16777216.0f; // subnormal: in units of 2^-24
    return sign ? -value : value;
}

uint16_t emulation_bf16_bits_of_double(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x)) { return 0x7FFF; }
    double rounded = isinf(x) ? INFINITY : round_to(fabs(x), 7, -126);
    return (uint16_t)(sign | (rounded > 3.3895313892515355e38 ? 0x7F80 : pack_bits(rounded, 7, -126)));
}

uint8_t emulation_e4m3_bits(float x) {
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) { return 0x7F; }
    double rounded = isinf(x) ? 448 : std::min(round_to(fabs((double)x), 3, -6), 448.0);
    return (uint8_t)(sign | pack_bits(rounded, 3, -6));
}
uint8_t emulation_e5m2_bits(float x) {
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) { return 0x7F; }
    double rounded = isinf(x) ? 57344 : std::min(round_to(fabs((double)x), 2, -14), 57344.0);
    return (uint8_t)(sign | pack_bits(rounded, 2, -14));
}
float emulation_e4m3_value(uint8_t bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    if (exponent == 15 && fraction == 7) { return NAN; }
    float value = exponent ? ldexpf((float)(8 + fraction), exponent - 10) : ldexpf((float)fraction, -9);
    return bits & 0x80 ? -value : value;
}
