/* The timing half of dev/cuda/bench.h without a GPU: how clocks are computed, noted, printed and written, and which launches
   are timed and compared. test_emulation.sh builds it as an op of dev/cuda, with dev/cuda/emulation, and runs it. */
#include "bench.h"

static int num_failures = 0;
#define check(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) { num_failures++, printf("FAIL line %d: %s\n", __LINE__, #cond); }                                \
    } while (0)

static bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

static void check_percentiles() {
    std::vector<float> times;
    for (int i = 100; i >= 0; i--) { times.push_back((float)i); }
    BenchTime t = bench_percentiles(times);
    check(t.median_ms == 50 && t.p10_ms == 10 && t.p90_ms == 90 && t.launches == 101 && t.sm_mhz == 0);
    t = bench_percentiles({3});
    check(t.median_ms == 3 && t.p10_ms == 3 && t.p90_ms == 3 && t.launches == 1);
}

// SMs with 1000, 1500 and 2000 MHz over a millisecond; counters of different SMs have nothing in common.
static void check_sm_mhz() {
    const unsigned long long ms = 1000000;
    BenchClock before[4] = {{1, 7 * ms}, {1ull << 50, 9}, {123456789, 5 * ms}, {0, 0}};
    BenchClock after[4] = {
        {1 + ms, 8 * ms}, {(1ull << 50) + 3 * ms / 2, 9 + ms}, {123456789 + 2 * ms, 6 * ms}, {5 * ms, 10 * ms}};
    check(bench_sm_mhz(before, after, 3) == 1500);
    check(bench_sm_mhz(before, after, 4) == 1500); // the fourth was not read before
    check(bench_sm_mhz(before, after, 1) == 1000);
    check(bench_sm_mhz(before + 3, after + 3, 1) == 0);
    check(bench_sm_mhz(before, before, 3) == 0);
    after[0] = {1 + ms / 20, 7 * ms + ms / 20}; // 50 us are too short for the timer
    check(bench_sm_mhz(before, after, 1) == 0);
    after[0] = {0, 8 * ms}; // a counter that has not advanced
    check(bench_sm_mhz(before, after, 1) == 0);
}

// Kernel 0 without a clock and at 2000 MHz, kernel 3 at 1901, kernel 7 at 1890 and with hot times.
static std::vector<BenchResult> some_results(const std::vector<BenchKernel>& kernels) {
    std::vector<BenchResult> results;
    for (size_t i = 0; i < 4; i++) {
        results.push_back({&kernels[i / 2 + (i == 3)], (int)(64 * i), {0.5, 0.4, 0.6, 100}});
    }
    results[0].time.sm_mhz = 0; // not known: the next one is the first
    results[1].time.sm_mhz = 2000, results[2].time.sm_mhz = 1901, results[3].time.sm_mhz = 1890;
    results[3].hot = {0.0031, 0.0123, 1545};
    return results;
}

static std::vector<BenchKernel> some_kernels() {
    std::vector<BenchKernel> kernels;
    for (int number : {0, 3, 7}) { kernels.push_back({number, "what, with a comma", nullptr, {0, 64, 128, 192}, 0}); }
    kernels[2].rate_type = "e4m3", kernels[2].matrix_tflops = 1200;
    return kernels;
}

static void check_texts() {
    std::vector<BenchKernel> kernels = some_kernels();
    std::vector<BenchResult> results = some_results(kernels);
    check(!bench_is_slow_clock(1900, 2000) && bench_is_slow_clock(1899, 2000));
    check(!bench_is_slow_clock(0, 2000) && !bench_is_slow_clock(1000, 0)); // not known
    check(bench_clock_notes(results) ==
          "note: kernel 7 block size 192 ran at 1890 MHz, 5.5% below the first timing's 2000\n");
    check(bench_clock_notes({}) == "");
    results[3].config = 0;
    check(contains(bench_clock_notes(results), "note: kernel 7 default ran at "));
    results[3].config = 192;
    check(bench_clock_text(results[0]) == "");
    check(bench_clock_text(results[1]) == " | 2000 MHz");
    check(bench_clock_text(results[3]) == " | 1890 MHz | in a graph 0.0031 ms | sustained 0.0123 ms at 1545 MHz");
    std::string head = bench_clock_cells(results, NULL), slow = bench_clock_cells(results, &results[3]);
    check(contains(head, "MHz") && contains(head, "in graph") && contains(head, "sustained"));
    check(contains(slow, "1890*") && contains(slow, "0.0031") && contains(slow, "0.0123"));
    check(!contains(bench_clock_cells(results, &results[2]), "*") && head.size() == slow.size());
    results.pop_back();
    check(bench_clock_cells(results, NULL) == "       MHz "); // nothing else was measured
}

// How a configuration is called: 0 is the default, unless it is a form that has a name.
static void check_configurations() {
    BenchKernel sizes = {1, "a", nullptr, {0, 64}, 0}, fixed = {2, "b", nullptr, {0}, 0};
    check(bench_config_text(sizes, 64) == "block size   64" && bench_config_text(sizes, 64, false) == "block size 64");
    check(bench_config_text(sizes, 0) == "default" && bench_config_text(sizes, 0, false) == "default");
    check(bench_config_text(fixed, 0) == "default");
    BenchKernel forms = {3, "c", nullptr, {0, 22}, 0};
    forms.config_name = "form", forms.config_labels = {"by the shape", "two consumers"};
    check(bench_config_text(forms, 0) == "form    0 (by the shape)");
    check(bench_config_text(forms, 22, false) == "form 22 (two consumers)");
    fixed.config_labels = {"the only one"};
    check(bench_config_text(fixed, 0) == "default");
    std::vector<BenchResult> results = {{&forms, 22, {0.3, 0.2, 0.4, 100}}, {&sizes, 64, {0.2, 0.1, 0.3, 100}}};
    check(bench_fastest_text(results) == "fastest: kernel 1 (a), block size 64, 0.2000 ms\n");
    results.push_back({&sizes, 0, {0.1, 0.1, 0.1, 100}});
    check(bench_fastest_text(results) == "fastest: kernel 1 (a), default, 0.1000 ms\n");
    results.push_back({&forms, 0, {0.05, 0.05, 0.05, 100}});
    check(bench_fastest_text(results) == "fastest: kernel 3 (c), form 0 (by the shape), 0.0500 ms\n");
    check(bench_fastest_text({}) == "");
}

static std::vector<std::string> fields(const std::string& line, size_t n) { // the first n; the last one takes the rest
    std::vector<std::string> found(1);
    for (char c : line) {
        if (c == ',' && found.size() < n) {
            found.push_back("");
        } else {
            found.back() += c;
        }
    }
    return found;
}

static void check_files() {
    std::vector<BenchKernel> kernels = some_kernels();
    std::vector<BenchResult> results = some_results(kernels);
    BenchDevice d;
    snprintf(d.name, sizeof(d.name), "a card");
    d.copy_gbs = 4000, d.read_gbs = 4500, d.empty_ms = 0.0021, d.matrix_tflops = 800;
    BenchState s;
    s.bytes = 1e9, s.flops = 1e12, s.reads_only = true;
    check(bench_roof_gbs(d, s) == 4500 && strcmp(bench_roof_name(s), "read") == 0);
    check(bench_matrix_tflops(d, kernels[1]) == 800 && bench_matrix_tflops(d, kernels[2]) == 1200);
    char path[] = "/tmp/llmc_test_XXXXXX";
    int fd = mkstemp(path);
    require(fd >= 0);
    close(fd);
    bench_write_csv(path, d, s, "op", {1, 1, 8, 1, 8}, results);
    FILE* f = fopen(path, "r");
    require(f != NULL);
    char line[1024];
    std::vector<std::vector<std::string>> rows;
    while (fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = '\0';
        rows.push_back(fields(line, rows.empty() ? 1000 : rows[0].size()));
    }
    fclose(f);
    remove(path);
    check(rows.size() == 5 && rows[0].back() == "what");
    const char* values[][3] = {{"sm_mhz", "2000", "1890"},
                               {"sustained_ms", "0.00000", "0.01230"},
                               {"sustained_mhz", "0", "1545"},
                               {"graph_ms", "0.00000", "0.00310"},
                               {"empty_ms", "0.00210", "0.00210"},
                               {"read_gb_s", "4500.00", "4500.00"},
                               {"reads_only", "1", "1"},
                               {"matrix_tflop_s", "800.000", "1200.000"},
                               {"matrix_type", PRECISION_NAME, "e4m3"},
                               {"gpu", "a card", "a card"},
                               {"what", "\"what, with a comma\"", "\"what, with a comma\""}};
    for (auto& value : values) {
        size_t at = (size_t)(std::find(rows[0].begin(), rows[0].end(), value[0]) - rows[0].begin());
        check(at < rows[0].size());
        for (size_t i = 0; i < 2 && at < rows[0].size(); i++) {
            bool equal = rows[2 + 2 * i].size() > at && rows[2 + 2 * i][at] == value[1 + i];
            check(equal);
            if (!equal) { printf("%s is not %s\n", value[0], value[1 + i]); }
        }
    }
}

// ---- real launches ------------------------------------------------------------------------------

__global__ void count_kernel(float* out, int add) { out[threadIdx.x] = (add ? out[threadIdx.x] : 0.0f) + 1.0f; }

static int idle_from; // from this launch on, kernel 2 does nothing
static int num_launches;

static void declare_small(Bench& b) {
    require(b.V != 4);
    bool in_place = b.V == 2;
    Buffer<float> zeros = b.input_from<float>("zeros", 32, [](float* host) { std::fill(host, host + 32, 0.0f); });
    Buffer<float> out = in_place ? b.inout<float>("out", 32, zeros, {0, 0}) : b.output<float>("out", 32, {0, 0});
    b.reference([=] { std::fill(out.host, out.host + 32, 1.0f); });
    b.cost(128, 0);
    b.kernel(1, "adds one", [=](int) { num_launches++, count_kernel<<<1, 32>>>(out, in_place); }, {0});
    auto idle = [=](int) {
        if (num_launches++ < idle_from) { count_kernel<<<1, 32>>>(out, in_place); }
    };
    b.kernel(2, "stops", idle, {0});
}

// Times kernel `number` back to back, after it was timed by itself; returns what was found wrong.
static std::string time_small(BenchDevice& d, int V, int number, BenchTime* time, BenchHot* hot, bool counted = true) {
    BenchState s;
    bench_declare(s, d, declare_small, {1, 1, 8, 1, V}, 0);
    const BenchKernel& k = s.kernels[number - 1];
    num_launches = 0;
    *time = bench_time(d, s, k, 0, 200, 1000);
    std::string wrong = bench_check_timed(d, s, k), wrong_hot;
    check(!counted || num_launches == 3 + 200);
    *hot = bench_time_hot(d, s, k, 0, time->median_ms, &wrong_hot);
    bench_free(s);
    return wrong + wrong_hot;
}

// Several shapes in one run: one CSV, a line for each, and one that declare() declines.
static void check_shapes(BenchDevice& d) {
    BenchFlags& f = bench_flags();
    char path[] = "/tmp/llmc_test_XXXXXX";
    int fd = mkstemp(path);
    require(fd >= 0);
    close(fd);
    d.copy_gbs = d.read_gbs = d.empty_ms = 1; // measured before
    idle_from = 1 << 30;
    f.csv = path, f.repeats = 4, f.sustained = 0, f.shape_given = true;
    f.shapes = {{1, 1, 8, 1, 1}, {1, 1, 8, 1, 4}, {1, 1, 8, 1, 3}};
    check(bench_run_shapes(d, "small", declare_small, 0) == EXIT_SUCCESS);
    FILE* file = fopen(path, "r");
    require(file != NULL);
    char line[1024];
    std::string kernels;
    while (fgets(line, sizeof(line), file)) {
        std::vector<std::string> columns = fields(line, 12);
        kernels += columns[1] + "@" + columns[10] + " ";
    }
    fclose(file);
    remove(path);
    check(kernels == "kernel@V 1@1 2@1 1@3 2@3 ");
    f.csv = NULL;
    // with --noise it goes on until the median is known, or the time is over
    BenchTime time;
    BenchHot hot;
    f.noise = 1e-6f, f.noise_seconds = 1; // the first round takes a tenth of it on a busy machine
    const int launches[] = {f.repeats, 200};
    time_small(d, 1, 1, &time, &hot, false);
    check(time.launches > launches[1] && time.launches % launches[1] == 0);
    f.noise = 100;
    time_small(d, 1, 1, &time, &hot, false);
    check(time.launches == launches[1] && time.noise < 100);
    f.noise = 0;
}

static void check_numbers() {
    auto same = [](const char* text, std::vector<int> numbers) { return bench_read_numbers("-T", text) == numbers; };
    check(same("7", {7}) && same("7,3", {7, 3}) && same("256:4096:*2", {256, 512, 1024, 2048, 4096}));
    check(same("2:9:3,1", {2, 5, 8, 1}) && same("2:9:*3", {2, 6}) &&
          same("2147483646:2147483647:1", {INT_MAX - 1, INT_MAX}));
    BenchChoice choice;
    check(bench_read_choice("2-4,9-", &choice) && choice.has(4) && choice.has(9) && choice.has(99) && !choice.has(5));
    check(choice.single() == -1 && bench_read_choice("7", &choice) && choice.single() == 7 && !choice.has(8));
    for (const char* bad : {"", "-", "x", "1,", "4-2", "1-2-3", "1234567"}) { check(!bench_read_choice(bad, &choice)); }
    std::vector<float> times;
    for (int i = 1; i <= 100; i++) { times.push_back((float)i); }
    check(fabs(bench_noise(times) - 100 * (61 - 40) / 2.0 / 51) < 1e-6); // the 40th and the 61st of 100
    check(bench_noise({1, 1}) == INFINITY && bench_noise(std::vector<float>(50, 2.0f)) == 0);
}

static void check_launches() {
    BenchDevice d;
    check(bench_open(&d, "bench_functions"));
    bench_flags().hot = 1; // a flush takes seconds here
    BenchTime time;
    BenchHot hot;
    idle_from = 1 << 30;
    for (int V : {1, 2}) { // 2: in place. What was timed by itself is compared, although a launch adds one to it
        bench_flags().sustained = 0;
        check(time_small(d, V, 1, &time, &hot) == "");
        check(hot.sustained_ms == 0 && hot.graph_ms == 0 && num_launches == 3 + 200);
        check(fabs(time.sm_mhz - 1500) < 1);
        bench_flags().sustained = 1;
        check(time_small(d, V, 1, &time, &hot) == "");
        check(hot.sustained_ms > 0 && fabs(hot.sustained_mhz - 1500) < 1);
        // about two seconds of launches, from whose number the time of one follows
        check(num_launches > 500 && hot.sustained_ms * num_launches > 900);
    }
    bench_flags().sustained = 0;
    idle_from = 3; // only the warm-up writes
    check(contains(time_small(d, 1, 2, &time, &hot), "out: 32 of 32 wrong"));
    bench_flags().sustained = 1;
    idle_from = 300;
    std::string wrong = time_small(d, 1, 2, &time, &hot);
    check(contains(wrong, "out: 32 of 32 wrong")); // as NaN, although the first launches have written it
    check_shapes(d);
}

int main() {
    check_percentiles();
    check_sm_mhz();
    check_texts();
    check_configurations();
    check_files();
    check_numbers();
    check_launches();
    printf("%d failures\n", num_failures);
    return num_failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
