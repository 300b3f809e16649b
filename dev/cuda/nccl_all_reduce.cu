/* nccl_all_reduce: out = sum of inp over all GPUs, on every GPU; measures how fast NCCL all-reduces gradients

   out (n) float out, on each GPU | inp (n) float in, on each GPU
   Bound: the links between GPUs. With k GPUs, a ring sends 2*(k-1)/k of the message over each link. These bytes divided
   by the time are the bus bandwidth, to be compared with the bandwidth of a link. The bytes of the message divided by
   the time are the algorithm bandwidth. With one GPU the operation is a copy and the bus bandwidth is 0.
   Error: none. The inputs are integers whose sums the type holds exactly, so every order of additions gives the same
   result. The mean (sum times 1/k) is within one ulp. float, the type of the gradients, and floatX are checked.
   Source: NCCL; both bandwidths are defined in nccl-tests, PERFORMANCE.md.

   The harness of bench.h has one device and one stream. This program drives several devices from one process, so it has
   its own main; flag names, comparison of results, timing percentiles and file formats are those of bench.h.

   nvcc -O3 --use_fast_math nccl_all_reduce.cu -lnccl -o nccl_all_reduce      (or: make nccl_all_reduce)
   ./nccl_all_reduce --check     check against a sum on the CPU
   ./nccl_all_reduce             the same check, then time message sizes from 1 KB to 1 GB   */
#include <nccl.h>

#include "bench.h"

#define ncclCheck(expr) nccl_check((expr), #expr, __FILE__, __LINE__)
inline void nccl_check(ncclResult_t result, const char* expr, const char* file, int line) {
    if (result == ncclSuccess) { return; }
    die("%s:%d: %s: %s (%s)", file, line, expr, ncclGetErrorString(result), ncclGetLastError(NULL));
}

inline ncclDataType_t nccl_type(float) { return ncclFloat32; }
inline ncclDataType_t nccl_type(half) { return ncclFloat16; }
inline ncclDataType_t nccl_type(__nv_bfloat16) { return ncclBfloat16; }

// ---- flags ------------------------------------------------------------------------------------

struct Flags {
    int list = 0, check = 0, gpus = 0, repeats = 20;
    int64_t min_bytes = 1 << 10, max_bytes = 1 << 30;
    const char *csv = NULL, *json = NULL;
};

static void parse(int argc, char** argv, Flags* f) {
    const Option opts[] = {
        {OPT_SECTION, 0, NULL, "What to do", NULL, NULL, NULL, 0, 0},
        {OPT_BOOL, 0, NULL, "list", &f->list, NULL, "list what there is, needs no GPU", 0, 0},
        {OPT_BOOL, 0, NULL, "check", &f->check, NULL, "only check: sum and mean, in place and not, odd sizes", 0, 0},
        {OPT_INT, 0, NULL, "gpus", &f->gpus, NULL, "of those visible; 0: all", 0, 64},
        {OPT_SECTION, 0, NULL, "Measurement", NULL, NULL, NULL, 0, 0},
        {OPT_LONG, 0, NULL, "min-bytes", &f->min_bytes, "bytes", "the smallest message; each is twice the last", 4,
         1ll << 32},
        {OPT_LONG, 0, NULL, "max-bytes", &f->max_bytes, "bytes", "the largest message", 4, 1ll << 32},
        {OPT_INT, 0, NULL, "repeats", &f->repeats, "launches", "timed for each size", 1, 10000},
        {OPT_SECTION, 0, NULL, "Results", NULL, NULL, NULL, 0, 0},
        {OPT_STR, 0, NULL, "csv", &f->csv, "FILE", "the largest message, in the columns of every op", 0, 0},
        {OPT_STR, 0, NULL, "json", &f->json, "FILE", "every message, in Google Benchmark's layout", 0, 0},
    };
    const int num_opts = (int)(sizeof(opts) / sizeof(opts[0]));
    cli_program(argv[0]);
    cli_parse(argc, argv,
              "nccl_all_reduce: checks NCCL's sum over all GPUs of this machine against the CPU and times it.", opts,
              num_opts);
    if (f->max_bytes < f->min_bytes) { cli_fail("--max-bytes is less than --min-bytes"); }
}

// ---- the GPUs -----------------------------------------------------------------------------------

struct Gpu {
    int device;
    ncclComm_t comm;
    cudaStream_t stream;
    uint8_t *inp, *out; // (bytes)
    std::vector<cudaEvent_t> events;
};

static std::vector<Gpu> open_gpus(int wanted, size_t bytes, size_t num_events) {
    int visible;
    cudaCheck(cudaGetDeviceCount(&visible));
    if (wanted > visible) { cli_fail("--gpus %d, but %d are visible", wanted, visible); }
    int num_gpus = wanted ? wanted : visible;
    std::vector<int> devices(num_gpus);
    std::vector<ncclComm_t> comms(num_gpus);
    for (int i = 0; i < num_gpus; i++) { devices[i] = i; }
    ncclCheck(ncclCommInitAll(comms.data(), num_gpus, devices.data()));
    std::vector<Gpu> gpus(num_gpus);
    for (int i = 0; i < num_gpus; i++) {
        Gpu& g = gpus[i];
        g.device = i, g.comm = comms[i];
        cudaCheck(cudaSetDevice(i));
        cudaCheck(cudaStreamCreate(&g.stream));
        cudaCheck(cudaMalloc(&g.inp, bytes));
        cudaCheck(cudaMalloc(&g.out, bytes));
        cudaCheck(cudaMemset(g.inp, 0, bytes));
        g.events.resize(num_events);
        for (cudaEvent_t& event : g.events) { cudaCheck(cudaEventCreate(&event)); }
    }
    return gpus;
}

static void close_gpus(std::vector<Gpu>& gpus) {
    for (Gpu& g : gpus) {
        cudaCheck(cudaSetDevice(g.device));
        for (cudaEvent_t event : g.events) { cudaCheck(cudaEventDestroy(event)); }
        cudaCheck(cudaFree(g.inp));
        cudaCheck(cudaFree(g.out));
        cudaCheck(cudaStreamDestroy(g.stream));
        ncclCheck(ncclCommDestroy(g.comm));
    }
}

static void synchronize(std::vector<Gpu>& gpus) {
    for (Gpu& g : gpus) {
        cudaCheck(cudaSetDevice(g.device));
        cudaCheck(cudaStreamSynchronize(g.stream));
        ncclResult_t failed;
        ncclCheck(ncclCommGetAsyncError(g.comm, &failed));
        ncclCheck(failed);
    }
}

// One host thread issues the calls for all GPUs; NCCL starts the calls between GroupStart and GroupEnd together.
template <class T> static void all_reduce(std::vector<Gpu>& gpus, size_t n, bool in_place) {
    ncclCheck(ncclGroupStart());
    for (Gpu& g : gpus) {
        ncclCheck(ncclAllReduce(in_place ? g.out : g.inp, g.out, n, nccl_type(T()), ncclSum, g.comm, g.stream));
    }
    ncclCheck(ncclGroupEnd());
}

// ---- check ----------------------------------------------------------------------------------------

// Turns the sum into the mean by scale = 1 / num_gpus, as the optimizer scales gradients.
template <class T> __global__ void scale_kernel(T* inout, float scale, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { inout[i] = (T)((float)inout[i] * scale); }
}

// Random integers in -limit..limit. Sums over all GPUs stay below 256 in size, which every type here holds exactly.
static float check_value(size_t i, int gpu, int num_gpus) {
    int limit = 255 / num_gpus;
    return (float)((int)(bench_random(i, (uint32_t)gpu) % (2u * limit + 1)) - limit);
}

template <class T> static std::string check(std::vector<Gpu>& gpus, size_t n, bool in_place, bool mean) {
    int num_gpus = (int)gpus.size();
    const size_t guarded = 64; // elements after the result that must not change
    std::vector<float> right(n, 0.0f), host(n);
    for (Gpu& g : gpus) {
        for (size_t i = 0; i < n; i++) {
            host[i] = check_value(i, g.device, num_gpus);
            right[i] += host[i];
        }
        cudaCheck(cudaSetDevice(g.device));
        cudaCheck(cudaMemset(g.out, 0xFF, (n + guarded) * sizeof(T))); // NaN in every floating-point type
        bench_upload((T*)(in_place ? g.out : g.inp), host.data(), n);
        cudaCheck(cudaDeviceSynchronize());
    }
    all_reduce<T>(gpus, n, in_place);
    synchronize(gpus);
    std::string wrong;
    Tolerance tolerance = mean ? ulps<T>(1) : Tolerance{0.0f, 0.0f};
    if (mean) {
        for (float& x : right) { x /= (float)num_gpus; }
    }
    for (Gpu& g : gpus) {
        cudaCheck(cudaSetDevice(g.device));
        if (mean) {
            scale_kernel<<<(unsigned)ceil_div(n, (size_t)256), 256, 0, g.stream>>>((T*)g.out, 1.0f / num_gpus, n);
            cudaCheck(cudaGetLastError());
            cudaCheck(cudaStreamSynchronize(g.stream));
        }
        char name[32];
        snprintf(name, sizeof(name), "GPU %d", g.device);
        bench_compare<T>(name, (T*)g.out, right.data(), n, tolerance, false, 1, &wrong);
        uint8_t after[guarded * sizeof(T)];
        cudaCheck(cudaMemcpy(after, (T*)g.out + n, sizeof(after), cudaMemcpyDeviceToHost));
        bool changed = false;
        for (uint8_t byte : after) { changed |= byte != 0xFF; }
        if (changed) { wrong += (wrong.empty() ? "" : "; ") + std::string(name) + ": written past its end"; }
    }
    return wrong;
}

static const size_t check_sizes[] = {1, 3, 1000, 65537, (1 << 20) + 1};

template <class T> static void check_type(std::vector<Gpu>& gpus, const char* type, BenchCounts* counts) {
    for (size_t n : check_sizes) {
        for (int variant = 0; variant < 4; variant++) {
            bool in_place = variant % 2, mean = variant / 2;
            std::string wrong = check<T>(gpus, n, in_place, mean);
            (wrong.empty() ? counts->passed : counts->failed)++;
            printf("%s %s, %s, %s, %zu elements on %zu GPUs%s%s\n", wrong.empty() ? "ok" : "FAIL",
                   mean ? "mean" : "sum", in_place ? "in place" : "out of place", type, n, gpus.size(),
                   wrong.empty() ? "" : ": ", wrong.c_str());
        }
    }
}

static int check_all(std::vector<Gpu>& gpus) {
    BenchCounts counts = {0, 0, 0};
    check_type<float>(gpus, "fp32", &counts);
    if (sizeof(floatX) != sizeof(float)) { check_type<floatX>(gpus, PRECISION_NAME, &counts); }
    printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, counts.skipped);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// ---- timing -----------------------------------------------------------------------------------------

// The time of a launch is the maximum over the GPUs. All launches are queued while a delay kernel keeps the GPUs busy,
// so that they run back to back and no GPU waits for the host.
static BenchTime time_size(std::vector<Gpu>& gpus, size_t n, int launches) {
    all_reduce<float>(gpus, n, false); // NCCL sets up its connections at the first use
    synchronize(gpus);
    for (Gpu& g : gpus) {
        cudaCheck(cudaSetDevice(g.device));
        bench_delay_kernel<<<1, 1, 0, g.stream>>>(30000ull * gpus.size() * (launches + 2)); // 30 us per GPU and launch
        cudaCheck(cudaGetLastError());
    }
    for (int i = -2; i < launches; i++) {   // the first two all-reduces are not timed; they synchronise the GPUs
        for (int end = 0; end < 2; end++) { // end = 0 records the event before the all-reduce, end = 1 the one after it
            for (Gpu& g : gpus) {
                if (i < 0) { continue; }
                cudaCheck(cudaSetDevice(g.device));
                cudaCheck(cudaEventRecord(g.events[2 * i + end], g.stream));
            }
            if (end == 0) { all_reduce<float>(gpus, n, false); }
        }
    }
    synchronize(gpus);
    std::vector<float> times(launches, 0.0f);
    for (Gpu& g : gpus) {
        for (int i = 0; i < launches; i++) {
            float ms;
            cudaCheck(cudaEventElapsedTime(&ms, g.events[2 * i], g.events[2 * i + 1]));
            times[i] = std::max(times[i], ms);
        }
    }
    return bench_percentiles(times);
}

struct Row {
    size_t bytes;
    BenchTime time;
};

static double algorithm_gbs(const Row& r) { return (double)r.bytes / r.time.median_ms / 1e6; }
static double bus_gbs(const Row& r, int num_gpus) { return algorithm_gbs(r) * 2 * (num_gpus - 1) / num_gpus; }

static std::vector<Row> sweep(std::vector<Gpu>& gpus, const Flags& f) {
    std::vector<Row> rows;
    printf("\n%12s  %9s %9s %9s  %15s  %11s\n", "bytes", "time ms", "p10", "p90", "algorithm GB/s", "bus GB/s");
    for (size_t bytes = (size_t)f.min_bytes / 4 * 4; bytes <= (size_t)f.max_bytes; bytes *= 2) {
        rows.push_back({bytes, time_size(gpus, bytes / 4, f.repeats)});
        const Row& r = rows.back();
        printf("%12zu  %9.4f %9.4f %9.4f  %15.2f  %11.2f\n", bytes, r.time.median_ms, r.time.p10_ms, r.time.p90_ms,
               algorithm_gbs(r), bus_gbs(r, (int)gpus.size()));
        fflush(stdout);
    }
    return rows;
}

// ---- files --------------------------------------------------------------------------------------------

// Column C is the number of elements, NH the number of GPUs; bytes and GB/s are those on the bus.
static void write_csv(const char* path, const BenchDevice& d, const Row& r, int num_gpus) {
    BenchState state;
    state.bytes = (double)r.bytes * 2 * (num_gpus - 1) / num_gpus;
    BenchKernel kernel = {1, "ncclAllReduce, GB/s on the bus", nullptr, {0}, 0};
    Shape shape = {1, 1, (int)(r.bytes / 4), num_gpus, 1};
    bench_write_csv(path, d, state, "nccl_all_reduce", shape, {{&kernel, 0, r.time}});
}

static void write_json(const char* path, const BenchDevice& d, const std::vector<Row>& rows, int num_gpus) {
    FILE* f = bench_create(path);
    int version;
    ncclCheck(ncclGetVersion(&version));
    fprintf(
        f,
        "{\n  \"context\": {\"executable\": %s, \"gpu\": %s, \"gpus\": %d, \"driver\": %s, \"nccl\": %d, \"dtype\": "
        "\"fp32\"},\n  \"benchmarks\": [",
        bench_json_string(cli_program(NULL)).c_str(), bench_json_string(d.name).c_str(), num_gpus,
        bench_json_string(bench_driver().c_str()).c_str(), version);
    for (size_t i = 0; i < rows.size(); i++) {
        const Row& r = rows[i];
        fprintf(f,
                "%s\n    {\"name\": \"nccl_all_reduce/gpus:%d/bytes:%zu\", \"run_type\": \"iteration\", "
                "\"iterations\": %d, \"real_time\": %.5f, \"cpu_time\": %.5f, \"time_unit\": \"ms\", "
                "\"bytes_per_second\": %.6e, \"bus_bytes_per_second\": %.6e, \"p10_ms\": %.5f, \"p90_ms\": %.5f}",
                i ? "," : "", num_gpus, r.bytes, r.time.launches, r.time.median_ms, r.time.median_ms,
                1e9 * algorithm_gbs(r), 1e9 * bus_gbs(r, num_gpus), r.time.p10_ms, r.time.p90_ms);
    }
    fprintf(f, "\n  ]\n}\n");
    bench_close(f, path);
}

int main(int argc, char** argv) {
    Flags f;
    parse(argc, argv, &f);
    if (f.list) {
        printf("1  ncclAllReduce, sum over all GPUs of this process\n");
        return EXIT_SUCCESS;
    }
    BenchDevice device; // the first GPU
    if (!bench_open(&device, "nccl_all_reduce")) { return EXIT_FAILURE; }
    size_t check_bytes = (check_sizes[sizeof(check_sizes) / sizeof(check_sizes[0]) - 1] + 64) * sizeof(float);
    size_t bytes = f.check ? check_bytes : std::max(check_bytes, (size_t)f.max_bytes);
    std::vector<Gpu> gpus = open_gpus(f.gpus, bytes, f.check ? 0 : 2 * (size_t)f.repeats);
    int num_gpus = (int)gpus.size(), version;
    ncclCheck(ncclGetVersion(&version));
    cudaCheck(cudaSetDevice(0));
    printf("nccl_all_reduce, %d x %s, NCCL %d.%d.%d, driver %s\n", num_gpus, device.name, version / 10000,
           version / 100 % 100, version % 100, bench_driver().c_str());
    int rc = check_all(gpus);
    if (!f.check && rc == EXIT_SUCCESS) {
        printf("All results match. Starting benchmarks.\n");
        std::vector<Row> rows = sweep(gpus, f);
        cudaCheck(cudaSetDevice(0));
        if (f.csv) { write_csv(f.csv, device, rows.back(), num_gpus); }
        if (f.json) { write_json(f.json, device, rows, num_gpus); }
    }
    close_gpus(gpus);
    return rc;
}
