/*
Part of bench.h: times of a kernel and configuration; what the device can do at most.
*/
#pragma once

#include "bench_check.h"

// ---- timing -----------------------------------------------------------------------------

struct BenchTime {
    double median_ms, p10_ms, p90_ms;
    int launches;
    double sm_mhz = 0; // clock of the SMs from the first launch to the last; 0: not known
    double noise = 0;  // see bench_noise()
};

inline BenchTime bench_percentiles(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    auto at = [&](double part) { return (double)times[(size_t)(part * (double)(times.size() - 1) + 0.5)]; };
    return {at(0.5), at(0.1), at(0.9), (int)times.size()};
}

// Returns half the width of the 95% confidence interval of the median, in percent of it. The interval's ends are two of the
// times, whatever their distribution; see Conover, Practical Nonparametric Statistics, 3.2.
inline double bench_noise(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    double n = (double)times.size(), half = 0.98 * sqrt(n); // 1.96 standard deviations of a binomial distribution
    if (n < 6) { return INFINITY; }
    size_t low = (size_t)std::max(0.0, floor(n / 2 - half) - 1), high = (size_t)std::min(n - 1, ceil(n / 2 + half));
    return 50 * (double)(times[high] - times[low]) / (double)times[times.size() / 2];
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

// Times n launches, each by its own pair of events, and adds them to `times`. before() runs before each launch and is not timed.
inline BenchTime bench_time_more(BenchDevice& d, int n, const std::function<void()>& before,
                                 const std::function<void()>& launch, std::vector<float>& times) {
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
    for (int i = 0; i < n; i++) {
        times.push_back(0);
        cudaCheck(cudaEventElapsedTime(&times.back(), d.events[2 * i], d.events[2 * i + 1]));
    }
    BenchTime time = bench_percentiles(times);
    time.sm_mhz = bench_measured_mhz(d);
    return time;
}
inline BenchTime bench_time_launches(BenchDevice& d, int n, const std::function<void()>& before,
                                     const std::function<void()>& launch) {
    std::vector<float> times;
    return bench_time_more(d, n, before, launch, times);
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
        if (x.compare) { x.compare(k.tolerance_of(x.name), &wrong); }
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
    std::vector<float> times;
    BenchTime time = bench_time_more(d, repeats, before, launch, times);
    auto begin = std::chrono::steady_clock::now();
    auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
    time.noise = bench_noise(times);
    while (bench_flags().noise > 0 && time.noise > bench_flags().noise && seconds() < bench_flags().noise_seconds) {
        time = bench_time_more(d, repeats, before, launch, times);
        time.noise = bench_noise(times);
    }
    return time;
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
    if (d.copy_gbs > 0) { return; } // at an earlier shape
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
    if (d.read_gbs > 0) { return; }
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
    if (d.empty_ms > 0) { return; }
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
inline double bench_measure_rate(const std::function<double(cudaStream_t)>& measure, cudaStream_t stream) {
    measure(stream);
    bench_rest();
    double tflops = measure(stream);
    return std::isfinite(tflops) ? tflops : 0;
}

// Measures the matrix rate of the op, and those of the kernels that will run and compute in another type.
inline void bench_measure_rates(BenchDevice& d, BenchState& s) {
    if (s.flops <= 0) { return; }
    if (s.matrix_rate && d.matrix_tflops == 0) {
        d.matrix_tflops = bench_measure_rate(s.matrix_rate, d.stream);
        printf("matrix rate of the vendor's library: %.1f TFLOP/s\n", d.matrix_tflops);
    }
    for (BenchKernel& k : s.kernels) {
        if (!k.measure_rate || !bench_wanted(k) || bench_skip_reason(d, k)) { continue; }
        const BenchKernel* same = NULL; // an earlier kernel with the same type
        for (const BenchKernel& other : s.kernels) {
            if (&other == &k) { break; }
            if (other.matrix_tflops > 0 && strcmp(other.rate_type, k.rate_type) == 0) { same = &other; }
        }
        k.matrix_tflops = same ? same->matrix_tflops : bench_measure_rate(k.measure_rate, d.stream);
        if (!same) {
            printf("matrix rate of the vendor's library in %s: %.1f TFLOP/s\n", k.rate_type, k.matrix_tflops);
        }
    }
}
