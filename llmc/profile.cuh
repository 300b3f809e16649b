/*
Describes each operation for profiling: a name for NVTX's timeline, and the least bytes and FLOPs that it must move and
compute. train_gpt2cu --profile times each operation with a pair of events. dev/cuda/bench.h checks that this cost is
equal to the cost that the op's file declares.

    void gelu_forward(floatX* out, const floatX* inp, size_t n, const Execution& exec) {
        Op op(exec, 2.0 * n * sizeof(floatX), 0, "gelu_forward");
        ...

NVTX's header loads its library with dlopen, and only when a profiler is attached.
*/
#pragma once

#include <nvtx3/nvToolsExt.h>
#include <algorithm>
#include <cmath>
#include <stdarg.h>
#include <string>
#include <vector>

#include "cuda_common.cuh"
#include "gpu_state.h"

constexpr int PROFILE_STEPS = 5; // that --profile times: long enough to read the card's clock and power often

struct ProfileEntry {
    char name[48];
    double bytes, flops;    // the least that the operation must move and compute
    cudaEvent_t begin, end; // recorded on its stream before and after it; NULL without timing
};

// The operations called so far, in order. If an operation calls others, only the outermost one is listed.
struct Profile {
    bool listing = false, timing = false; // if timing is true, every listed operation is timed by events
    int depth = 0;                        // operations that have begun and have not ended
    double library_flops = 0;             // of all products that were given to cuBLAS and cuBLASLt
    std::vector<ProfileEntry> entries;
    std::vector<ProfileEntry> empty; // pairs of events around a kernel that does nothing
    GpuState gpu;                    // clock and power between profile_begin() and profile_end()
};
inline Profile& profile() {
    static Profile state;
    return state;
}

inline nvtxDomainHandle_t nvtx_domain() {
    static nvtxDomainHandle_t domain = nvtxDomainCreateA("train_gpt2cu");
    return domain;
}

// A range in NVTX's timeline, from here to the end of the scope: a step, a micro-step, a layer. The name is a printf
// format.
struct Range {
    char name[48];
    __attribute__((format(printf, 2, 3))) Range(const char* format, ...) {
        va_list values;
        va_start(values, format);
        begin(format, values);
        va_end(values);
    }
    ~Range() { nvtxDomainRangePop(nvtx_domain()); }

  protected:
    Range() {} // for Op, which calls begin()
    void begin(const char* format, va_list values) {
        vsnprintf(name, sizeof(name), format, values);
        nvtxEventAttributes_t attributes = {};
        attributes.version = NVTX_VERSION;
        attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
        attributes.message.ascii = name;
        nvtxDomainRangePushEx(nvtx_domain(), &attributes);
    }
};

// Creates an event and records it.
inline void profile_event(cudaEvent_t* event, cudaStream_t stream) {
    cudaCheck(cudaEventCreate(event));
    cudaCheck(cudaEventRecord(*event, stream));
}
// The time of an entry in ms. To be called once.
inline double profile_take_ms(const ProfileEntry& e) {
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, e.begin, e.end));
    cudaCheck(cudaEventDestroy(e.begin));
    cudaCheck(cudaEventDestroy(e.end));
    return ms;
}

// A Range for an operation, with its cost. While profile().listing is set, it also adds an entry to profile().
struct Op : Range {
    cudaStream_t stream;
    int entry = -1; // index in profile().entries; -1: not listed

    __attribute__((format(printf, 5, 6))) Op(const Execution& exec, double bytes, double flops, const char* format, ...)
        : stream(exec.stream) {
        va_list values;
        va_start(values, format);
        begin(format, values);
        va_end(values);
        Profile& p = profile();
        if (p.depth++ > 0 || !p.listing) { return; }
        ProfileEntry e = {"", bytes, flops, NULL, NULL};
        memcpy(e.name, name, sizeof(name));
        if (p.timing) { profile_event(&e.begin, stream); }
        entry = (int)p.entries.size();
        p.entries.push_back(e);
    }
    ~Op() {
        Profile& p = profile();
        p.depth--;
        if (entry >= 0 && p.entries[entry].begin) { profile_event(&p.entries[entry].end, stream); }
    }
};

// Measures the bandwidth of a large copy on the device in bytes/s, read plus written. The best of 20 copies counts,
// because the result serves as a roofline. Returns INFINITY if there is no memory for the copy.
inline double measure_copy_bandwidth(cudaStream_t stream) {
    size_t bytes = (size_t)1 << 30;
    void* allocated = NULL;
    for (; bytes >= (size_t)256 << 20 && cudaMalloc(&allocated, 2 * bytes) != cudaSuccess; bytes /= 2) {
        cudaGetLastError();
    }
    if (!allocated) { return INFINITY; } // a copy of less would stay in the caches
    char* memory = (char*)allocated;
    cudaCheck(cudaMemset(memory, 1, 2 * bytes));
    float least = INFINITY, ms;
    cudaEvent_t begin, end;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (int i = 0; i < 20; i++) {
        cudaCheck(cudaEventRecord(begin, stream));
        cudaCheck(cudaMemcpyAsync(memory + bytes, memory, bytes, cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaEventRecord(end, stream));
        cudaCheck(cudaEventSynchronize(end));
        cudaCheck(cudaEventElapsedTime(&ms, begin, end));
        least = ms < least ? ms : least;
    }
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    cudaCheck(cudaFree(memory));
    return 2.0 * bytes / least * 1e3;
}

// Finds the current device in the driver's library. Let the GPU work between this and profile_begin(): the library takes its
// time to start, in which an idle GPU cools down.
inline void profile_open() {
    char bus_id[32];
    int device;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
    gpu_state_open(&profile().gpu, bus_id);
}

template <int> __global__ void profile_empty_kernel() {}

// From here to profile_end(), every operation is timed, and the device's clock and power are read. Call it while the stream is busy:
// what the events themselves take is measured first, and the host must be ahead of the device for that.
inline void profile_begin(cudaStream_t stream) {
    for (int i = 0; i < 20; i++) {
        ProfileEntry e = {"", 0.0, 0.0, NULL, NULL};
        profile_event(&e.begin, stream);
        profile_empty_kernel<0><<<1, 32, 0, stream>>>();
        cudaCheck(cudaGetLastError());
        profile_event(&e.end, stream);
        profile().empty.push_back(e);
    }
    profile().listing = profile().timing = true;
    gpu_state_begin(&profile().gpu);
}
inline void profile_end() {
    gpu_state_end(&profile().gpu);
    profile().listing = profile().timing = false;
}

// One operation in a step: the sums over its calls, as means over PROFILE_STEPS steps.
struct ProfileRow {
    std::string name;
    int calls;
    double ms, bytes, flops;
    double roof_ms; // lower bound on this machine: the larger of bytes / bandwidth and FLOPs / rate
};

// Sums the operations of PROFILE_STEPS steps by name, the longest first. bandwidth is in bytes/s, rate in FLOP/s. Of each call's time,
// empty_ms is left out, which is what its events take.
inline std::vector<ProfileRow> profile_rows(double bandwidth, double rate, double empty_ms) {
    std::vector<ProfileRow> rows;
    for (const ProfileEntry& e : profile().entries) {
        double ms = std::max(profile_take_ms(e) - empty_ms, 1e-4);
        auto row = std::find_if(rows.begin(), rows.end(), [&](const ProfileRow& r) { return r.name == e.name; });
        if (row == rows.end()) { row = rows.insert(row, {e.name, 0, 0, 0, 0, 0}); }
        row->calls++, row->ms += ms, row->bytes += e.bytes, row->flops += e.flops;
        row->roof_ms += std::max(e.bytes / bandwidth, e.flops / rate) * 1e3;
    }
    for (ProfileRow& row : rows) {
        row.calls /= PROFILE_STEPS;
        for (double* sum : {&row.ms, &row.bytes, &row.flops, &row.roof_ms}) { *sum /= PROFILE_STEPS; }
    }
    std::sort(rows.begin(), rows.end(), [](const ProfileRow& a, const ProfileRow& b) { return a.ms > b.ms; });
    return rows;
}

// Prints clock and power, the operations as a table, and last the time that a step would take if each operation took the
// time of its roof. bandwidth in bytes/s, rate in FLOP/s; precision: of the matmuls. To be called once.
inline void profile_print(double bandwidth, double rate, const char* precision) {
    double empty_ms = INFINITY; // the least: no operation is shown faster than it is
    for (const ProfileEntry& e : profile().empty) { empty_ms = std::min(empty_ms, profile_take_ms(e)); }
    std::vector<ProfileRow> rows = profile_rows(bandwidth, rate, empty_ms);
    int calls = 0;
    double sum = 0.0, roof_sum = 0.0;
    for (const ProfileRow& row : rows) { calls += row.calls, sum += row.ms, roof_sum += row.roof_ms; }
    printf("\nmean of %d steps\n", PROFILE_STEPS);
    gpu_state_print(&profile().gpu, stdout);
    gpu_state_close(&profile().gpu);
    if (!isfinite(bandwidth) || !isfinite(rate)) {
        printf("note: no memory was left to measure the roofline, a smaller -b leaves some: inf stands for what is not "
               "known\n");
    }
    printf("roofline measured here: copy %.2f TB/s, %s matmul %.0f TFLOP/s\n", bandwidth * 1e-12, precision,
           rate * 1e-12);
    printf("the two events of an operation take %.1f us, which are left out\n", 1e3 * empty_ms);
    printf("%-42s %6s %9s %7s %8s %8s %10s\n", "operation", "calls", "ms", "share", "TB/s", "TFLOP/s", "% of roof");
    for (const ProfileRow& row : rows) {
        printf("%-42s %6d %9.3f %6.1f%% %8.2f %8.1f %9.1f%%\n", row.name.c_str(), row.calls, row.ms,
               100.0 * row.ms / sum, row.bytes / row.ms * 1e-9, row.flops / row.ms * 1e-9,
               100.0 * row.roof_ms / row.ms);
    }
    printf("%-42s %6d %9.3f\n", "sum", calls, sum);
    if (!std::isfinite(rate)) { return; } // there was no memory to measure it
    printf(
        "a perfect step, with every operation at its roof, would take %.3f ms; measured: %.3f ms, %.2f times as long\n",
        roof_sum, sum, sum / roof_sum);
}
