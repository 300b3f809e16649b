/*
Part of bench.h: the device, and the checks of one shape, of huge and random shapes, and of all check shapes.
*/
#pragma once

#include "bench_declare.h"

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
    int device = bench_flags().device;
    if (device >= count) {
        cli_fail("--device: no GPU %d, there %s 0%s", device, count > 1 ? "are" : "is",
                 count > 1 ? (" to " + std::to_string(count - 1)).c_str() : "");
    }
    cudaCheck(cudaSetDevice(device));
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, device));
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
#ifdef CUDA_EMULATION // one binary for both devices
    d->compiled[0] = emulation_arch(), d->compiled[1] = emulation_arch() == 90 ? 90 : 0;
#endif
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

inline void bench_print_header(const BenchDevice& d, const char* op, const std::string& shape) {
    const BenchFlags& f = bench_flags();
    printf("%s, %s, %s\n", op, PRECISION_NAME, shape.c_str());
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
    static char text[160];
    if (k.min_arch == 0 || (k.min_arch > 0 && d.arch >= k.min_arch && d.compiled[0] >= k.min_arch) ||
        (k.min_arch < 0 && d.compiled[1] == -k.min_arch)) {
        return NULL;
    }
    snprintf(text, sizeof(text), "needs code for sm_%d%s, but the GPU is sm_%d and the program is compiled for sm_%d",
             abs(k.min_arch), k.min_arch < 0 ? "a" : "", d.arch, d.compiled[0]);
    return text;
}

// ---- what a check prints ------------------------------------------------------------------

// Returns "B 3 T 17 C 776": the numbers of a shape that declare() has read, or all of them.
inline std::string bench_shape_text(const BenchState& s, const Shape& shape, const char* dash = "") {
    const char* names[] = {"B", "T", "C", "NH", "V"};
    const int values[] = {shape.B, shape.T, shape.C, shape.NH, shape.V};
    bool any = std::any_of(s.reads, s.reads + 5, [](bool x) { return x; });
    std::string text;
    for (int i = 0; i < 5; i++) {
        if (any && !s.reads[i]) { continue; }
        text += (text.empty() ? "" : " ") + std::string(dash) + names[i] + " " + std::to_string(values[i]);
    }
    return text;
}

// Returns where a part of a text "HEAD: PART; PART ..." ends, from `at` on: a part begins with a name and a colon.
inline size_t bench_part_end(const std::string& text, size_t at) {
    for (size_t end = text.find("; ", at); end != std::string::npos; end = text.find("; ", end + 1)) {
        size_t word = text.find(' ', end + 2);
        if (word != std::string::npos && text[word - 1] == ':') { return end + 1; }
    }
    return text.size();
}

// Prints a text in lines of less than 200 characters. All but the first are indented; where one line is too short for the
// text, each part of it begins a line.
inline void bench_print_lines(const std::string& text) {
    const size_t width = 199;
    for (size_t at = 0; at < text.size(); at += text[at] == ' ') {
        size_t room = at == 0 ? width : width - 4, end = text.size();
        if (text.size() > width) { end = bench_part_end(text, at); }
        if (end > at + room) {
            size_t clause = text.rfind("; ", at + room - 1), space = text.rfind(' ', at + room);
            if (clause != std::string::npos && clause > at + room / 3) {
                end = clause + 1;
            } else {
                end = space == std::string::npos || space <= at ? at + room : space;
            }
        }
        printf("%s%s\n", at == 0 ? "" : "    ", text.substr(at, end - at).c_str());
        at = end;
        if (at == text.size()) { break; }
    }
    fflush(stdout);
}

// A reason to fail or to skip. It is printed where it is found first; afterwards it is counted.
struct BenchFinding {
    std::vector<std::string> keys; // of its parts
    std::string text;
    int more;
};
inline std::vector<BenchFinding>& bench_findings() {
    static std::vector<BenchFinding> findings;
    return findings;
}

// Returns what the same part has in common at other shapes: no threads, no indices, no numbers but those of lines.
inline std::string bench_part_key(const std::string& part) {
    size_t end = std::min({part.size(), part.find(", worst at "), part.find(", thread ("), part.find("; ")});
    std::string key;
    bool in_line = false;
    for (size_t i = 0; i < end; i++) {
        bool digit = isdigit((unsigned char)part[i]) != 0;
        in_line = digit && (in_line || (i > 0 && part[i - 1] == ':'));
        if (!digit || in_line) {
            key += part[i];
        } else if (key.empty() || key.back() != '#') {
            key += '#';
        }
    }
    return key;
}

// Prints "HEAD WHERE: WHY", or counts it if all parts of why have been printed with this head. again: repeats a failed check, so
// that the emulation can follow a thread.
inline void bench_report(const std::string& head, const std::string& where, std::string why,
                         [[maybe_unused]] const std::function<void()>& again = NULL) {
    std::vector<std::string> keys;
    for (size_t at = 0, end; at < why.size(); at = end + 1) {
        end = bench_part_end(why, at);
        keys.push_back(head + bench_part_key(why.substr(at, end - at)));
    }
    auto finding_with = [&](const std::string& key) -> BenchFinding* {
        for (BenchFinding& f : bench_findings()) {
            if (std::find(f.keys.begin(), f.keys.end(), key) != f.keys.end()) { return &f; }
        }
        return NULL;
    };
    if (std::all_of(keys.begin(), keys.end(), finding_with)) {
        finding_with(keys[0])->more++;
        return;
    }
#ifdef CUDA_EMULATION
    if (again) { // behind the first part
        size_t first = bench_part_end(why, 0);
        why.insert(first - (first < why.size()), emulation_explain(again));
    }
#endif
    size_t end = std::min({why.size(), why.find(", worst at "), why.find(", thread ("), why.find("; "), (size_t)140});
    bench_findings().push_back({keys, head + ": " + why.substr(0, end), 0});
    bench_print_lines(head + where + ": " + why);
}

inline void bench_print_repeats() {
    for (const BenchFinding& f : bench_findings()) {
        if (f.more > 0) { bench_print_lines("the same in " + std::to_string(f.more) + " more: " + f.text); }
    }
    bench_findings().clear();
}

// A launcher that declines a shape of the user's or of --stress is skipped there; the op's own shapes must suit its kernels.
inline bool bench_may_decline() { return bench_flags().shape_given || bench_flags().stress; }

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
#ifdef CUDA_EMULATION
    return emulation_checksum(x.dev, x.bytes); // a kernel would take most of a check's time
#endif
    unsigned long long sum;
    cudaCheck(cudaMemset(d.checksum, 0, sizeof(sum)));
    size_t num_blocks = std::min<size_t>(1024, ceil_div(x.bytes / 4 + 1, (size_t)256));
    bench_checksum_kernel<<<(unsigned)num_blocks, 256>>>(d.checksum, x.dev, x.bytes);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaMemcpy(&sum, d.checksum, sizeof(sum), cudaMemcpyDeviceToHost));
    return sum;
}

inline Bench bench_view(BenchState& s, const Shape& shape, cudaStream_t stream, bool dry) {
    return {{shape.B, &s.reads[0]},
            {shape.T, &s.reads[1]},
            {shape.C, &s.reads[2]},
            {shape.NH, &s.reads[3]},
            {shape.V, &s.reads[4]},
            stream,
            dry,
            s,
            s.rng};
}

// The cost of an op, by a call of declare() without a device.
inline BenchState bench_cost(void (*declare)(Bench&), const Shape& s, int which) {
    BenchState state;
    state.which = which, state.kind = s.kind;
    Bench dry = bench_view(state, s, 0, true);
    declare(dry);
    return state;
}

// Names the shape at which an op divides by zero: C / NH channels of a head, for example, are 0 if C is less than NH.
inline std::string& bench_division_text() {
    static std::string text;
    return text;
}
inline void bench_on_division(int) {
    fflush(stdout);
    const std::string& text = bench_division_text();
    if (write(STDERR_FILENO, text.data(), text.size()) < 0) { _exit(EXIT_FAILURE); }
    _exit(EXIT_FAILURE);
}
// what: the kernel and its configuration, or declare()
inline void bench_name_division(const BenchState& s, const std::string& shape, const char* what, const char* hint) {
    bench_division_text() =
        "error: " + std::string(s.op) + ", " + what + ", " + shape + ": a division by zero" + hint + "\n";
    signal(SIGFPE, bench_on_division);
}

// Maps the number of each kernel that declare() names without a device to its description, or to NULL once declare() has named it on
// the device as well.
inline std::map<int, const char*>& bench_undeclared() {
    static std::map<int, const char*> kernels;
    return kernels;
}

// Runs declare() for a shape and a kind of input, sets guards, takes the inputs' checksums and computes the references.
inline void bench_declare(BenchState& s, const BenchDevice& d, void (*declare)(Bench&), const Shape& shape, int which) {
    s.which = which, s.kind = shape.kind;
    bench_name_division(s, bench_shape_text(s, shape), "declare() or the reference",
                        ": do the shapes in main suit the op?");
    s.seed = (uint32_t)bench_flags().seed;
    s.rng.seed(s.seed);
    s.guards = bench_flags().guards;
    for (const BenchKernel& k : bench_cost(declare, shape, which).kernels) {
        bench_undeclared().insert({k.number, k.what});
    }
    Bench b = bench_view(s, shape, d.stream, false);
    declare(b);
    for (const BenchKernel& k : s.kernels) { bench_undeclared()[k.number] = NULL; }
    for (BenchBuffer& x : s.buffers) {
        bench_set_guards(x);
        if (x.kind == BenchKind::input) { x.checksum = bench_checksum(d, x); }
    }
    for (auto& reference : s.references) { reference(); }
}

inline bool bench_lasts(const BenchBuffer& x) { return x.kind == BenchKind::scratch || x.kind == BenchKind::state; }

// Sets all buffers that a kernel may write: in-place ones to their start, state to zeros, all others to NaN. again: scratch and
// state remain as the launch before has left them.
inline void bench_reset(BenchState& s, bool again = false) {
    for (BenchBuffer& x : s.buffers) {
        if (again && bench_lasts(x)) {
#ifdef CUDA_EMULATION
            emulation_watch(x.dev, x.bytes, EMULATION_LEFT);
#endif
            continue;
        }
        if (x.kind == BenchKind::inout) {
            cudaCheck(cudaMemcpy(x.dev, x.start, x.bytes, cudaMemcpyDeviceToDevice));
        } else if (x.kind != BenchKind::input) {
            int nan = 0xFF; // in every floating-point type
            cudaCheck(cudaMemset(x.dev, x.kind == BenchKind::state ? 0 : nan, x.bytes));
        }
#ifdef CUDA_EMULATION
        bool unwritten = x.kind == BenchKind::output || x.kind == BenchKind::scratch;
        emulation_watch(x.dev, x.bytes, unwritten ? EMULATION_UNWRITTEN : EMULATION_WRITTEN);
#endif
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
#ifdef CUDA_EMULATION
    if (emulation_depends_on_sms()) { return ""; } // declare() has had 4 SMs
#endif
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
// Returns "block size  256", "form   22 (two consumers)", or "default": for a 0 without a label, or if there is no other.
inline std::string bench_config_text(const BenchKernel& k, int config, bool align = true) {
    std::string label = bench_config_label(k, config);
    if (bench_is_fixed(k) || (config == 0 && label.empty())) { return "default"; }
    char text[64];
    snprintf(text, sizeof(text), align ? "%s %4d" : "%s %d", k.config_name, config);
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

// Gives the values of an input to other elements of it.
inline void bench_rotate(const BenchBuffer& x) {
    std::vector<uint64_t> values(x.bytes / 8); // of any type
    cudaCheck(cudaMemcpy(values.data(), x.dev, values.size() * 8, cudaMemcpyDeviceToHost));
    std::rotate(values.begin(), values.begin() + (long)values.size() / 2, values.end());
    cudaCheck(cudaMemcpy(x.dev, values.data(), values.size() * 8, cudaMemcpyHostToDevice));
}

// Launches again, where scratch and state are as the launch before has left them: tickets, phases and counters must have been
// reset. If there are any, one launch with other inputs comes between, so that its intermediate results are not taken for right
// ones. Results must be right again, and those of the promoted kernel bitwise the same. Returns the errors, or "".
inline std::string bench_check_again(const BenchDevice& d, BenchState& s, const BenchKernel& k, int config) {
    bool lasts = std::any_of(s.buffers.begin(), s.buffers.end(), bench_lasts), best = k.number == s.best;
#ifdef CUDA_EMULATION
    lasts = lasts && s.bytes <= 2e6 && s.flops <= 1e7; // larger shapes would take too long
#endif
    int launches = lasts && config == k.configs[0] ? 3 : best ? 2 : 1;
    std::vector<uint64_t> first;
    for (BenchBuffer& x : s.buffers) {
        if (bench_is_output(x)) { first.push_back(bench_checksum(d, x)); }
    }
    std::string wrong;
    for (int launch = 2; launch <= launches && wrong.empty(); launch++) {
        bool others = launch < launches && launches == 3;
        for (BenchBuffer& x : s.buffers) {
            if (others && x.kind == BenchKind::input) { bench_rotate(x); }
        }
        bench_reset(s, true);
        k.launch(config);
        cudaCheck(cudaDeviceSynchronize());
#ifdef CUDA_EMULATION
        int num_findings;
        wrong = emulation_findings(&num_findings);
#endif
        size_t i = 0;
        for (BenchBuffer& x : s.buffers) {
            if (others && x.kind == BenchKind::input) { x.upload(); }
            if (others || !bench_is_output(x)) { continue; }
            bool differs = bench_checksum(d, x) != first[i++];
            if (differs && best) {
                wrong += (wrong.empty() ? "" : "; ") + std::string(x.name) + ": differs from launch to launch";
            }
            if (differs && x.compare) { x.compare(k.tolerance_of(x.name), &wrong); }
        }
#ifdef CUDA_EMULATION
        std::string left = emulation_unwritten_reads();
        if (!wrong.empty() && !left.empty()) { wrong += "; " + left; }
#endif
        if (!wrong.empty()) {
            wrong = "launch " + std::to_string(launch) + ", with the scratch of the one before: " + wrong;
        }
    }
    return wrong;
}

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
#ifdef CUDA_EMULATION
    emulation_begin_check(false);
#endif
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
#ifdef CUDA_EMULATION
            wrong += emulation_writer(x.dev, 2, SIZE_MAX, x.bytes / 2);
#endif
            x.upload(); // restore it for the kernels after this one
        }
        if (x.compare) { *worst = std::max(*worst, x.compare(k.tolerance_of(x.name), &wrong)); }
    }
#ifdef CUDA_EMULATION
    std::string unwritten = emulation_unwritten_reads();
    if (!wrong.empty() && !unwritten.empty()) { wrong += "; " + unwritten; }
#endif
    for (const std::string& text : {bench_check_cost(s, s.op), bench_check_library(s, k)}) {
        if (!text.empty()) { wrong += (wrong.empty() ? "" : "; ") + text; }
    }
    return wrong.empty() ? bench_check_again(d, s, k, config) : wrong;
}

// True if --config may select this configuration. A kernel takes block sizes that it does not sweep, too.
inline bool bench_has_config(const BenchKernel& k, int config) {
    bool listed = std::find(k.configs.begin(), k.configs.end(), config) != k.configs.end();
    bool is_block_size = !bench_is_fixed(k) && strcmp(k.config_name, "block size") == 0;
    return listed || (is_block_size && config >= 32 && config <= 1024 && config % 32 == 0);
}
inline std::vector<int> bench_configs(const BenchKernel& k) {
    int config = bench_flags().config;
    return config >= 0 && bench_has_config(k, config) ? std::vector<int>{config} : k.configs;
}
inline bool bench_wanted(const BenchKernel& k) { return bench_flags().kernels.has(k.number); }

struct BenchCounts {
    int passed, failed, skipped;
    bool stops() const { return failed && bench_flags().first_failure; }
};

// Skips the wanted kernels that declare() has left out on the device, at each shape so far.
inline void bench_skip_undeclared(const BenchDevice& d, BenchCounts* counts) {
    for (const auto& k : std::exchange(bench_undeclared(), {})) {
        if (!k.second || !bench_flags().kernels.has(k.first) || counts->stops()) { continue; }
        bench_report("skip kernel " + std::to_string(k.first) + " (" + k.second + ")", "",
                     "needs another GPU or another shape: declare() leaves it out on sm_" + std::to_string(d.arch));
        counts->skipped++;
    }
}

// Checks the properties of a kernel that have not been checked yet.
inline void bench_check_properties(const BenchKernel& k, BenchCounts* counts) {
    static std::vector<std::pair<int, std::string>> done;
    for (const auto& property : k.properties) {
        std::pair<int, std::string> name = {k.number, property.first};
        if (std::find(done.begin(), done.end(), name) != done.end()) { continue; }
        done.push_back(name);
#ifdef CUDA_EMULATION
        emulation_begin_check(true);
#endif
        std::string wrong = property.second();
        cudaCheck(cudaDeviceSynchronize());
#ifdef CUDA_EMULATION
        int num_findings;
        wrong += emulation_findings(&num_findings);
#endif
        (wrong.empty() ? counts->passed : counts->failed)++;
        std::string where = " kernel " + std::to_string(k.number) + ", " + property.first;
        wrong.empty() ? bench_print_lines("ok" + where)
                      : bench_report("FAIL", where, wrong, [&] { property.second(); });
    }
}

// Prints one line per kernel and configuration; if quiet, only for failures. failed_kernels may be NULL.
inline void bench_check_shape(const BenchDevice& d, BenchState& s, const Shape& shape, bool quiet, BenchCounts* counts,
                              std::vector<int>* failed_kernels) {
    std::string at = ", " + bench_shape_text(s, shape);
    if (!s.kinds.empty()) { at += std::string(", ") + s.kinds[s.kind]; }
    if (s.which) { at += std::string(", ") + s.cases[s.which]; }
    if (bench_flags().stress) { at += ", seed " + std::to_string(s.seed); }
    for (const BenchKernel& k : s.kernels) {
        if (!bench_wanted(k) || counts->stops()) { continue; }
        std::string number = "kernel " + std::to_string(k.number);
        auto skip = [&](const std::string& where, const std::string& why) {
            bench_report("skip " + number + " (" + k.what + ")", where, why);
            counts->skipped++;
        };
        const char* reason = bench_skip_reason(d, k);
        if (reason) { skip("", reason); }
        [[maybe_unused]] int number_of_config = 0;
        for (int config : reason ? std::vector<int>{} : bench_configs(k)) {
            double worst;
            std::string wrong;
            const char* missing = NULL;
            std::string what = number + " " + bench_config_text(k, config);
#ifdef CUDA_EMULATION
            emulation_sms((s.number + number_of_config++) % 2 ? 2 : 4);
#endif
            bench_name_division(s, bench_shape_text(s, shape), what.c_str(),
                                config ? "" : "; configuration 0 stands for the launcher's default");
            Range range("check %s", what.c_str());
            BenchDeclined declined = bench_try([&] {
#ifdef CUDA_EMULATION
                missing = emulation_try([&] { wrong = bench_check(d, s, k, config, &worst); });
#else
                wrong = bench_check(d, s, k, config, &worst);
#endif
            });
            if (missing) {
                skip("", "needs " + std::string(missing) + ", which is not emulated");
                break;
            }
            if (!declined.why.empty()) {
                profile().listing = false;
                if (failed_kernels) { failed_kernels->push_back(k.number); }
                if (declined.by_condition && bench_may_decline()) {
                    skip(at, "declines: " + declined.why);
                    break;
                }
                wrong = "the launcher declines: " + declined.why;
                if (declined.by_condition) {
                    wrong += "; declare the kernel only where it fits, or change the shapes in main";
                }
            }
            std::string where = at;
#ifdef CUDA_EMULATION
            if (emulation_depends_on_sms()) { where += ", EMULATION_SMS=2"; }
#endif
            (wrong.empty() ? counts->passed : counts->failed)++;
            if (!wrong.empty() && failed_kernels) { failed_kernels->push_back(k.number); }
            auto again = [&] { bench_check(d, s, k, config, &worst); };
            if (!wrong.empty()) { bench_report("FAIL " + number, what.substr(number.size()) + where, wrong, again); }
            if (counts->stops()) { break; }
            if (!wrong.empty() || quiet) { continue; }
            printf("ok %s%s: error %.2f of ", what.c_str(), where.c_str(), worst);
            if (k.tolerance != 1) { printf("%g times the ", k.tolerance); }
            printf("tolerance");
            if (k.coarser_output) { printf(" (%s: %g times it)", k.coarser_output, k.coarser_factor); }
            printf("\n");
            fflush(stdout);
        }
        if (!quiet && !counts->stops()) { bench_check_properties(k, counts); }
    }
}

// Checks all kernels with one shape and one kind of input. may_skip: the emulation may leave it out if it takes too long.
// number: the index of the case. Every second configuration runs on 2 emulated SMs instead of 4, so blocks of persistent kernels
// take more tiles.
inline void bench_check_case(const BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& s, int which,
                             bool may_skip, int number, BenchCounts* counts) {
    BenchState state, cost;
    state.op = op, state.number = number;
    std::string missing;
    BenchDeclined declined = bench_try([&] { cost = bench_cost(declare, s, which); });
    if (!declined.why.empty()) {
        bool own = !bench_may_decline();
        bench_report(own ? "FAIL" : "skip", " " + bench_shape_text(state, s),
                     "declare() declines: " + declined.why + (own ? "; change the shapes in main" : ""));
        (own ? counts->failed : counts->skipped)++;
        return;
    }
#ifdef CUDA_EMULATION
    if (may_skip && !emulation_affords(cost.bytes, cost.flops)) {
        missing = "takes the emulation too long; EMULATION_LIMIT=10 allows ten times the work";
        std::copy(cost.reads, cost.reads + 5, state.reads);
    } else {
        emulation_sms(4);
        const char* needs = emulation_try([&] { bench_declare(state, d, declare, s, which); });
        if (needs) { missing = "needs " + std::string(needs) + ", which is not emulated"; }
    }
#else
    (void)may_skip;
    bench_declare(state, d, declare, s, which);
#endif
    if (missing.empty()) {
        bench_check_shape(d, state, s, bench_flags().stress > 0, counts, NULL);
    } else {
        bench_report("skip " + bench_shape_text(state, s), "", missing);
        counts->skipped++;
    }
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

inline bool bench_affords(const BenchState& cost, double most_bytes, double most_flops) {
#ifdef CUDA_EMULATION
    if (!emulation_affords(cost.bytes, cost.flops)) { return false; }
#endif
    return cost.bytes <= most_bytes && cost.flops <= most_flops;
}

// Draws a shape that costs no more than the most expensive check shape, and in the emulation not too much time, and whose kind
// has a kernel that is wanted. shapes: the check shapes. Returns false if there is none among many.
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
        BenchState cost;
        if (!bench_try([&] { cost = bench_cost(declare, s, which); }).why.empty()) { continue; } // declare() declines
        bool wanted = std::any_of(cost.kernels.begin(), cost.kernels.end(), bench_wanted);
        if (wanted && bench_affords(cost, most_bytes, most_flops)) { return true; }
    }
    return false;
}

inline int bench_run_stress(const BenchDevice& d, const char* op, void (*declare)(Bench&), std::vector<Shape> shapes,
                            int num_cases) {
    BenchFlags& f = bench_flags();
    BenchCounts counts = {0, 0, 0};
    size_t found = 0; // findings that have been printed
    std::mt19937 rng((uint32_t)f.seed);
    int num_shapes = 0;
    auto checks = [&] { return counts.passed + counts.failed + counts.skipped; };
    // of some shapes it turns out only on the device that no wanted kernel takes them
    for (int tries = 0; num_shapes < f.stress && tries < 20 * f.stress; tries++) {
        int before = checks();
        int which = f.input_case >= 0 ? f.input_case : (int)(rng() % (unsigned)num_cases), failed = counts.failed;
        f.seed = (int)(rng() >> 1);
        Shape s;
        if (!bench_draw_shape(&s, declare, shapes, which, rng)) { continue; }
        bench_check_case(d, op, declare, s, which, false, f.seed / 2, &counts);
        num_shapes += checks() > before;
        if (counts.failed == failed) { continue; }
        if (std::exchange(found, bench_findings().size()) == bench_findings().size()) { continue; } // nothing new
        printf("reproduce: %s --check --seed %d --case %d --kind %d -B %d -T %d -C %d -NH %d -V %d\n",
               cli_program(NULL), f.seed, which, s.kind, s.B, s.T, s.C, s.NH, s.V);
        fflush(stdout);
        if (counts.stops()) { break; }
    }
    bench_skip_undeclared(d, &counts);
    bench_print_repeats();
    printf("%d random shapes: %d passed, %d failed, %d skipped\n", num_shapes, counts.passed, counts.failed,
           counts.skipped);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// ---- all check shapes -------------------------------------------------------------------------

#ifdef CUDA_EMULATION
const char BENCH_ON_A_GPU[] = ", on a GPU: the emulation may take hours";
#else
const char BENCH_ON_A_GPU[] = "";
#endif

// names: what declare() has declared without a device.
inline int bench_run_check(const BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& shape,
                           const std::vector<Shape>& check_shapes, const BenchState& names) {
    const BenchFlags& f = bench_flags();
    std::vector<Shape> shapes = check_shapes;
    bool given = f.shape_given || f.full || shapes.empty();
    if (given) { shapes = f.shapes; }
    for (Shape& s : shapes) { s.kind = given ? shape.kind : s.kind; }
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
    auto same = [&](const Shape& s) {
        const int a[] = {s.B, s.T, s.C, s.NH, s.V}, b[] = {shape.B, shape.T, shape.C, shape.NH, shape.V};
        for (int i = 0; i < 5; i++) {
            if (names.reads[i] && a[i] != b[i]) { return false; }
        }
        return s.kind == shape.kind;
    };
    bool has_timed = given || std::any_of(shapes.begin(), shapes.end(), same);
    for (size_t i = 0; i < shapes.size(); i++) {
        const Shape& s = shapes[i];
        for (int which = 0; which < num_cases; which++) {
            if ((f.input_case >= 0 && which != f.input_case) || counts.stops()) { continue; }
            int number = given ? f.seed / 2 : (int)i; // even for the default seed
            bench_check_case(d, op, declare, s, which, i > 0, number, &counts);
        }
    }
    bench_skip_undeclared(d, &counts);
    bench_print_repeats();
    if (counts.stops()) { printf("ended with the first failure\n"); }
    if (!has_timed) {
        printf("note: the shape that is timed, %s, was not checked; --check --full does that%s\n",
               bench_shape_text(names, shape).c_str(), BENCH_ON_A_GPU);
    }
    printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// ---- --transactions ------------------------------------------------------------------------------
#ifdef CUDA_EMULATION

// A shape for which the counts take a second or two: the op's default with one sequence and few tokens, if need be fewer
// columns; else the most expensive of the check shapes that is small enough.
inline Shape bench_counted_shape(void (*declare)(Bench&), const Shape& usual, const std::vector<Shape>& check_shapes) {
    auto affords = [&](const Shape& s) {
        BenchState cost = bench_cost(declare, s, 0);
        return cost.bytes <= 4e6 && cost.flops <= 4e7;
    };
    Shape s = usual;
    s.B = 1;
    for (int cut = 1; cut <= 8 && usual.V % cut == 0; cut *= 2) {
        s.V = usual.V / cut;
        for (s.T = std::min(usual.T, 64); s.T >= std::min(usual.T, 32); s.T /= 2) {
            if (affords(s)) { return s; }
        }
    }
    s.V = usual.V;
    for (s.T = std::min(usual.T, 16); s.T >= 8; s.T /= 2) {
        if (affords(s)) { return s; }
    }
    s.kind = -1;
    for (Shape other : check_shapes) {
        if (other.kind != usual.kind) { continue; }
        other.B = other.B ? other.B : usual.B, other.T = other.T ? other.T : usual.T;
        other.C = other.C ? other.C : usual.C;
        other.NH = other.NH ? other.NH : usual.NH, other.V = other.V ? other.V : usual.V;
        double cost = bench_cost(declare, other, 0).bytes, best = s.kind < 0 ? 0 : bench_cost(declare, s, 0).bytes;
        if (s.kind < 0 || (affords(other) && cost > best)) { s = other; }
    }
    return s.kind < 0 ? usual : s;
}

// Runs each wanted kernel once, checks its results, and prints what it moves.
inline int bench_run_transactions(const BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& usual,
                                  const std::vector<Shape>& check_shapes) {
    const BenchFlags& f = bench_flags();
    Shape shape = f.shape_given || f.full ? usual : bench_counted_shape(declare, usual, check_shapes);
    BenchState s;
    s.op = op;
    const char* missing = emulation_try([&] { bench_declare(s, d, declare, shape, std::max(0, f.input_case)); });
    if (missing) { die("the inputs of %s need %s, which is not emulated", op, missing); }
    printf("%s, %s, %s%s%s%s\n", op, PRECISION_NAME, bench_shape_text(s, shape).c_str(), s.kinds.empty() ? "" : ", ",
           s.kinds.empty() ? "" : s.kinds[s.kind],
           f.shape_given || f.full ? "" : " (a small shape; -B -T -C -NH -V set another one)");
    BenchCounts counts = {0, 0, 0};
    for (const BenchKernel& k : s.kernels) {
        if (!bench_wanted(k)) { continue; }
        std::vector<int> configs = bench_configs(k);
        bool has_256 = std::find(configs.begin(), configs.end(), 256) != configs.end();
        int config = configs[0] != 0 && has_256 ? 256 : configs[0];
        const char* reason = bench_skip_reason(d, k);
        std::string wrong;
        missing = NULL;
        if (!reason) {
            missing = emulation_try([&] {
                bench_reset(s);
                emulation_count(true);
                k.launch(config);
            });
        }
        emulation_count(false);
        if (reason || missing) {
            std::string why = reason ? reason : "needs " + std::string(missing) + ", which is not emulated";
            printf("skip kernel %d (%s): %s\n", k.number, k.what, why.c_str());
            counts.skipped++;
            continue;
        }
        printf("kernel %d, %s: %s\n\n", k.number, bench_config_text(k, config, false).c_str(), k.what);
        emulation_print_transactions(f.picture);
        int num_findings;
        wrong = emulation_findings(&num_findings);
        for (BenchBuffer& x : s.buffers) {
            if (x.compare) { x.compare(k.tolerance_of(x.name), &wrong); }
        }
        (wrong.empty() ? counts.passed : counts.failed)++;
        if (!wrong.empty()) { printf("FAIL kernel %d: %s\n", k.number, wrong.c_str()); }
        if (f.kernels.single() < 0) { printf("\n"); }
        fflush(stdout);
    }
    bench_skip_undeclared(d, &counts);
    bench_free(s);
    return counts.failed || !counts.passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
#endif
