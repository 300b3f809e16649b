/*
The harness of every dev/cuda program: flags, inputs, correctness check, sweep of configurations, timing, tables.

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
                 [=](int bs) { gelu_forward(out, inp, n, {stream, bs}); },
                 {0, 128, 256, 512});
        b.promoted(2);                                                        // or b.best(2): no copy in the trainer
    }
    int main(int argc, char** argv) {
        return bench_main(argc, argv, "gelu_forward", declare, {64, 1024, 768, 12, 50257}, {{1, 1, 8}, {3, 17, 776}});
    }

The int of a launcher is 0 where its list has a 0: the launcher then chooses by itself. More of what a declare may say:

        require(b.C % b.NH == 0);                            // a condition of the op; other shapes are refused with this text
        int C = b.C, HS = C / b.NH;
        Buffer<float> start = b.input<float>("dbias_start", C);
        Buffer<float> dbias = b.inout<float>("dbias", C, start, ulps<float>(4)); // holds start before every launch
        Buffer<float> sums = b.scratch<float>("sums", 32 * C);                   // the kernels' own, NaN before every launch
        if (HS % x128::size == 0) {                          // a condition of one kernel: it is declared where it fits
            b.kernel(3, "mma.sync", [=](int) { ... }, {0}, 80);   // needs 8.0; -90: code for sm_90a. Skipped elsewhere
        }
        b.varies("BTH");                                     // --stress draws B, T and the number of heads

A launcher checks its own conditions with require(), too. Where one does not hold, --check fails that kernel at the op's own
shapes and skips it at a shape of the user's or of --stress.

An op whose arithmetic has weak points names further kinds of input, which --check tries at its small shapes, too:

        int which = b.cases({"normal", "large mean"});
        Buffer<floatX> inp = b.input<floatX>("inp", n, 1.0f, which == 1 ? 30.0f : 0.0f);

The int that a launcher takes is its configuration. It is a block size unless b.config() says what else it means:

        b.kernel(3, "mma.sync", [=](int rows) { ... }, {0, 64, 128}, 80);
        b.config("tile rows");
        b.kernel(4, "wgmma, persistent", [=](int form) { ... }, {0}, -90);
        b.config("form", {{0, "default"}, {2, "ping-pong 128x192"}, {4, "cooperative 128x256"}}); // replaces the {0}

An op that stands for several operations, such as a product with different epilogues, names them; `--kind N` selects
one. A shape of check_shapes is of kind 0, or of another one by with_kind():

        bool has_gelu = b.kinds({"bias", "bias and GELU"}) == 1;

Buffer<T> converts to T*. Its `host` member holds floats: for an input the values that were uploaded, for an output the
right values. Every run first calls declare without a GPU, to learn the numbers of the kernels: then b.dry is true,
buffers are NULL, and declare must not use the device.

A reference that would take long computes only the rows that b.sample() names; the other results must be finite.

Checks after a launch: the outputs are right, the inputs are unchanged, and so are the 256 bytes before and after each
buffer. Two more checks for the promoted or best kernel: a second launch gives the same bits, and the launcher, if it
reports a cost to the profiler (struct Op), reports that of b.cost(). The bytes around a buffer are NaN in every
floating-point type, so a kernel that reads past the end fails too.

--tune times the configurations of the promoted kernel and writes the fastest to a file for train_gpt2cu. The ops for which
it works are those of llmc/tuned.h; their ladders take the list of configurations from there, by bench_tunable().

The timed launches are compared, too: with the outputs set to NaN before the first of them, the last one's results are
checked when all are done.

Built by `make cpu`, the programs run on a CPU (dev/cuda/emulation, CUDA_EMULATION is defined): then they only check,
and what the emulation finds wrong in a kernel fails its check.

The numbers of the shape may be several: then each product of them is checked or timed, and the CSV has all of them.

Timing: each launch has its own pair of events. Before each launch the L2 cache is flushed and in-place buffers are
restored. For ops with FLOPs the GPU rests for 0.2 s before the timed launches of each kernel and configuration. Measured
first: the speed of a copy and of a read on the device, the time of an empty launch, the matrix rate of the vendor's
library. Each timing comes with the clock at which the SMs ran. Short kernels are also timed in a CUDA graph, and with
--sustained all are timed back to back. The README has the whole protocol.

The harness is in five files, each of which includes the one before: bench_declare.h, bench_check.h, bench_time.h,
bench_report.h, and this one, with --tune and main. Op files include this one alone.
*/
#pragma once

#include "bench_report.h"

// ---- tuning -------------------------------------------------------------------------------

// Ends the program unless --tune can be done for this op and with the other flags. Returns the kernel to be timed.
inline int bench_tune_kernel(const char* op, const BenchState& declared) {
    const BenchFlags& f = bench_flags();
    if (!declared.is_promoted) { cli_fail("--tune: %s has no promoted kernel", op); }
    if (tunable_op(op) < 0) { cli_fail("--tune: the promoted kernel of %s takes no configuration", op); }
    if (!f.kernels.text.empty() && f.kernels.single() != declared.best) {
        cli_fail("--tune times kernel %d, the promoted one, not kernel %s", declared.best, f.kernels.text.c_str());
    }
    if (f.check || f.config >= 0) { cli_fail("--tune cannot be combined with --check or --config"); }
#ifdef CUDA_EMULATION
    cli_fail("--tune needs a GPU: the emulation's times would mean nothing");
#endif
    return declared.best;
}

// The name of a GPU's folder in results, as `make bench` spells it: "h200" for "NVIDIA H200".
inline std::string bench_gpu_folder(const char* gpu) {
    std::string name = gpu;
    for (const char* brand : {"NVIDIA ", "Tesla "}) {
        if (name.compare(0, strlen(brand), brand) == 0) { name.erase(0, strlen(brand)); }
    }
    for (char& c : name) { c = c == ' ' ? '_' : (char)tolower((unsigned char)c); }
    return name;
}

// True if x is faster than y by more than the noise.
inline bool bench_is_faster(const BenchTime& x, const BenchTime& y) {
    return x.median_ms < 0.99 * y.median_ms && x.median_ms < y.p10_ms && x.p90_ms < y.median_ms;
}

// Writes the fastest configuration of the promoted kernel to the file of --tune. It must be faster than the default in these
// results and then once more, when nothing but the two is timed; else the default is written.
inline void bench_tune(BenchDevice& d, BenchState& s, const char* op, const Shape& shape,
                       const std::vector<BenchResult>& results) {
    const BenchFlags& f = bench_flags();
    const BenchResult* best = bench_best(results, s.best);
    if (!best) { die("--tune: kernel %d cannot run here", s.best); }
    BenchTime usual = results[0].time, chosen = usual; // the list of configurations begins with the default
    require(results[0].config == 0);
    int config = 0;
    if (bench_is_faster(best->time, usual)) {
        chosen = bench_time(d, s, *best->kernel, best->config, f.repeats, 1000);
        usual = bench_time(d, s, *best->kernel, 0, f.repeats, 1000);
        config = bench_is_faster(chosen, usual) ? best->config : 0;
    }
    if (config == 0) { chosen = usual; }
    TunedRow row = {};
    row.op = tunable_op(op);
    snprintf(row.gpu, sizeof(row.gpu), "%s", d.name);
    snprintf(row.dtype, sizeof(row.dtype), "%s", PRECISION_NAME);
    row.B = shape.B, row.T = shape.T, row.C = shape.C, row.NH = shape.NH, row.V = shape.V;
    row.config = config, row.median_ms = chosen.median_ms, row.default_ms = usual.median_ms;

    Error err;
    TunedTable table = {};
    std::string folder = "results/" + bench_gpu_folder(d.name),
                path = f.tune_file ? f.tune_file : folder + "/tuned.csv";
    if (!f.tune_file && !make_directories(folder.c_str(), &err)) { die("%s", err.text); }
    if (file_exists(path.c_str()) && !tuned_read(&table, path.c_str(), &err)) { die("%s", err.text); }
    tuned_put(&table, &row);
    if (!tuned_write(&table, false, path.c_str(), &err)) { die("%s", err.text); }
    tuned_free(&table);
    printf("tuned %s: ", op);
    if (config) {
        printf("config %d takes %.4f ms, the default %.4f ms", config, chosen.median_ms, usual.median_ms);
    } else {
        printf("nothing is faster than the default, %.4f ms, by more than the noise", usual.median_ms);
    }
    printf("; in %s\n", path.c_str());
}

// ---- main -----------------------------------------------------------------------------------

// Checks the kernels at the shape that is timed, then times them. A kernel that fails is not timed. is_first: of several shapes.
// *fastest: a line about this shape is added.
inline int bench_run(BenchDevice& d, const char* op, void (*declare)(Bench&), const Shape& shape, bool is_first,
                     std::string* fastest) {
    const BenchFlags& f = bench_flags();
    BenchState s;
    s.op = op;
    bench_print_header(d, op, bench_shape_text(bench_cost(declare, shape, 0), shape));
    bench_declare(s, d, declare, shape, std::max(0, f.input_case));
    std::stable_sort(s.kernels.begin(), s.kernels.end(),
                     [](const BenchKernel& a, const BenchKernel& b) { return a.number < b.number; });
    if (!s.kinds.empty()) { printf("kind %d: %s\n", s.kind, s.kinds[s.kind]); }
    if (s.which > 0) { printf("case %d: %s\n", s.which, s.cases[s.which]); }
    bool single = f.kernels.single() >= 0;
    if (!f.kernels.text.empty()) { printf("Using kernel %s\n", f.kernels.text.c_str()); }
    BenchCounts counts = {0, 0, 0};
    std::vector<int> failed;
    bench_check_shape(d, s, shape, true, &counts, &failed);
    bench_skip_undeclared(d, &counts);
    bench_print_repeats();
    if (s.sampled) { printf("A sample of the results is compared with the CPU; the others must be finite.\n"); }
    if (counts.failed) {
        printf("%d of %d results do not match.\n", counts.failed, counts.failed + counts.passed);
    } else if (counts.passed) {
        printf("All results match. Starting benchmarks.\n");
    }
    bench_measure_copy(d);
    bench_measure_read(d);
    bench_measure_empty(d);
    bench_measure_rates(d, s);
    // shown: the results of the kernels asked for; results also has kernels 0 and 1, timed as baselines
    std::vector<BenchResult> results, shown;
    for (const BenchKernel& k : s.kernels) {
        bool wanted = bench_wanted(k);
        bool is_base = !wanted && k.number <= 1 && !f.tune;
        if ((!wanted && !is_base) || bench_skip_reason(d, k) ||
            std::find(failed.begin(), failed.end(), k.number) != failed.end()) {
            continue;
        }
        if (wanted) { printf("%skernel %d: %s\n", single ? "" : "\n", k.number, k.what); }
        for (int config : wanted ? bench_configs(k) : k.configs) {
            BenchTime time;
            Range range("time kernel %d %s", k.number, bench_config_text(k, config, false).c_str());
            BenchDeclined declined =
                bench_try([&] { time = bench_time(d, s, k, config, wanted ? f.repeats : 20, wanted ? 1000 : 100); });
            if (!declined.why.empty()) {
                if (wanted) { die("kernel %d: %s", k.number, declined.why.c_str()); }
                break; // it is only there to compare with
            }
            results.push_back({&k, config, time});
            if (wanted) {
                BenchResult& r = results.back();
                std::string wrong = bench_check_timed(d, s, k), wrong_hot;
                r.hot = bench_time_hot(d, s, k, config, r.time.median_ms, &wrong_hot);
                shown.push_back(r);
                bench_print_line(d, s, results, r);
                auto report = [&](const char* when, const std::string& errors) {
                    if (errors.empty()) { return; }
                    printf("FAIL kernel %d %s: after %s: %s\n", k.number, bench_config_text(k, config).c_str(), when,
                           errors.c_str());
                    counts.failed++;
                };
                report("the timed launches", wrong);
                report("the launches in a graph or back to back", wrong_hot);
            }
        }
        if (is_base) {
            const BenchResult* best = bench_best(results, k.number);
            if (!best) { continue; }
            printf("to compare with, not checked: kernel %d, %s, %.4f ms: %s\n", k.number,
                   bench_config_text(k, best->config, false).c_str(), best->time.median_ms, k.what);
        }
    }
    if (!single && !results.empty()) { bench_print_table(d, s, results); }
    bench_print_notes(s, shown);
    printf("%s", bench_clock_notes(results).c_str());
    for (const BenchBuffer& x : s.buffers) {
        const char* broken = bench_broken_guard(x);
        if (broken) { printf("FAIL %s: %s while timed\n", x.name, broken), counts.failed++; }
    }
    *fastest +=
        bench_shape_text(s, shape) + ": " + (results.empty() ? "nothing was timed\n" : bench_fastest_text(results));
    if (f.csv) { bench_write_csv(f.csv, d, s, op, shape, shown, !is_first); }
    if (f.json) { bench_write_json(f.json, d, s, op, shape, shown); }
    if (f.tune && !counts.failed) { bench_tune(d, s, op, shape, shown); }
    bench_free(s);
    return counts.failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// The same at each shape that the flags name. One that the op declines is skipped.
inline int bench_run_shapes(BenchDevice& d, const char* op, void (*declare)(Bench&), int kind) {
    int rc = EXIT_SUCCESS;
    std::string fastest;
    bool is_first = true; // of those in the CSV
    for (Shape shape : bench_flags().shapes) {
        shape.kind = kind;
        if (!fastest.empty()) { printf("\n"); }
        BenchDeclined declined = bench_try([&] { bench_cost(declare, shape, 0); });
        if (!declined.why.empty()) {
            fastest += bench_shape_text(BenchState(), shape) + ": skipped: " + declined.why + "\n";
            continue;
        }
        rc |= bench_run(d, op, declare, shape, is_first, &fastest);
        is_first = false;
    }
    if (bench_flags().shapes.size() > 1) { printf("\n%s", fastest.c_str()); }
    return rc;
}

// What declare() declares without a device: for all kinds of operation, or for the one that --kind selects.
struct BenchNames {
    BenchState first;                 // what the first of these kinds has declared
    std::vector<BenchKernel> kernels; // of all of them, ascending
    std::vector<const char*> marks;   // one per kernel, see bench_mark
    int kind = -1;                    // the first kind that has the kernel asked for
};
inline BenchNames bench_names(void (*declare)(Bench&), const Shape& shape) {
    const BenchFlags& f = bench_flags();
    BenchNames names;
    int num_kinds = 1;
    for (int kind = 0; kind < num_kinds; kind++) {
        BenchState s;
        s.kind = kind;
        Bench dry = bench_view(s, shape, 0, true);
        BenchDeclined declined = bench_try([&] { declare(dry); });
        if (!declined.why.empty()) { cli_fail("%s: %s", bench_shape_text(s, shape).c_str(), declined.why.c_str()); }
        bool has_best =
            std::any_of(s.kernels.begin(), s.kernels.end(), [&](const BenchKernel& k) { return k.number == s.best; });
        if (s.best >= 0 && !has_best && !f.shape_given) { // a kernel may be declared at some shapes alone
            die("%s, but there is no such kernel", s.best_at.c_str());
        }
        num_kinds = std::max(1, (int)s.kinds.size());
        if (f.kind >= num_kinds) { cli_fail("no kind %d, there are 0 to %d", f.kind, num_kinds - 1); }
        if (f.kind >= 0 && kind != f.kind) { continue; }
        for (const BenchKernel& k : s.kernels) {
            if (names.kind < 0 && bench_wanted(k)) { names.kind = kind; }
            size_t at = 0;
            while (at < names.kernels.size() && names.kernels[at].number < k.number) { at++; }
            if (at < names.kernels.size() && names.kernels[at].number == k.number) { continue; }
            names.kernels.insert(names.kernels.begin() + (long)at, k);
            names.marks.insert(names.marks.begin() + (long)at, bench_mark(s, k));
        }
        if (names.first.kernels.empty()) { names.first = std::move(s); }
    }
    return names;
}

// Ends the program if no kernel that is wanted has the configuration of --config.
inline void bench_check_config(const std::vector<BenchKernel>& kernels) {
    int config = bench_flags().config;
    std::string known;
    for (const BenchKernel& k : kernels) {
        if (!bench_wanted(k)) { continue; }
        if (config < 0 || bench_has_config(k, config)) { return; }
        known +=
            "; kernel " + std::to_string(k.number) + " has no configuration " + std::to_string(config) + ", there are";
        for (int other : k.configs) { known += " " + std::to_string(other); }
        if (strcmp(k.config_name, "block size") == 0 && !bench_is_fixed(k)) {
            known += ", and other multiples of 32 up to 1024";
        }
    }
    if (bench_flags().kernels.single() >= 0) { cli_fail("%s", known.c_str() + 2); }
    cli_fail("no kernel has configuration %d, see %s --list", config, cli_program(NULL));
}

// --list: a line per kernel; below it what its configurations are, if they are not block sizes. Then kinds and cases.
inline void bench_print_list(const BenchNames& names) {
    for (size_t i = 0; i < names.kernels.size(); i++) {
        const BenchKernel& k = names.kernels[i];
        if (!bench_wanted(k)) { continue; }
        printf("%d  %s%s\n", k.number, k.what, names.marks[i]);
        bool named = !bench_is_fixed(k) && strcmp(k.config_name, "block size") != 0;
        if (!k.config_labels.empty()) {
            for (int config : k.configs) { printf("     %s\n", bench_config_text(k, config).c_str()); }
        } else if (named) {
            printf("     %s", k.config_name);
            for (int config : k.configs) { config ? printf(" %d", config) : printf(" default"); }
            printf("\n");
        }
    }
    auto print = [](const char* what, const std::vector<const char*>& texts) {
        for (size_t i = 0; i < texts.size(); i++) { printf("%s %zu  %s\n", what, i, texts[i]); }
    };
    print("kind", names.first.kinds);
    if (names.first.cases.size() > 1) { print("case", names.first.cases); }
}

// shape: the shape that is timed. check_shapes: those that --check uses; a 0 in them stands for the value of `shape`.
inline int bench_main(int argc, char** argv, const char* name, void (*declare)(Bench&), Shape shape,
                      std::vector<Shape> check_shapes) {
    BenchFlags& f = bench_flags();
    bench_parse(argc, argv, name, shape);
    shape = f.shapes[0];
    BenchNames names = bench_names(declare, shape);
    if (names.kind < 0) {
        std::string known;
        for (const BenchKernel& k : names.kernels) { known += (known.empty() ? "" : " ") + std::to_string(k.number); }
        if (known.empty()) { cli_fail("--kind %d has no kernels in a build for " PRECISION_NAME, f.kind); }
        cli_fail("no kernel %s, there are %s", f.kernels.text.c_str(), known.c_str());
    }
    shape.kind = names.kind;
    int num_cases = std::max(1, (int)names.first.cases.size());
    if (f.input_case >= num_cases) { cli_fail("no case %d, there are 0 to %d", f.input_case, num_cases - 1); }
    bench_check_config(names.kernels);
    if ((f.stress || f.huge) && !f.check) { cli_fail("--stress and --huge are for --check"); }
    const char* times = f.csv ? "--csv" : f.json ? "--json" : NULL; // the flag that asks for a file of times
    if (times && (f.check || f.list)) {
        cli_fail("%s cannot be combined with --%s, which takes no times", times, f.list ? "list" : "check");
    }
    const char* one_shape = f.json ? "--json" : f.tune ? "--tune" : f.stress ? "--stress" : f.list ? "--list" : NULL;
    if (one_shape && f.shapes.size() > 1) { cli_fail("%s takes one shape, not %zu", one_shape, f.shapes.size()); }
    if (f.first_failure && !f.check) { cli_fail("--first-failure is for --check"); }
    if (f.list) {
        bench_print_list(names);
        return EXIT_SUCCESS;
    }
    if (f.tune) { bench_read_choice(std::to_string(bench_tune_kernel(name, names.first)).c_str(), &f.kernels); }
#ifdef CUDA_EMULATION
    if (times) { cli_fail("%s needs a GPU: the emulation's times would mean nothing", times); }
    bool counts = f.transactions || f.picture;
    if (counts && f.shapes.size() > 1) { cli_fail("--transactions takes one shape, not %zu", f.shapes.size()); }
    if (counts && (f.stress || f.huge)) { cli_fail("--transactions cannot be combined with --stress or --huge"); }
    if (!f.check && !counts) {
        printf("No GPU: the emulation's times would mean nothing, so this only checks, as --check.\n");
    }
    f.check = 1;
    emulation_schedule(counts && f.schedule < 0 ? 0 : f.schedule); // the same counts in each run
#endif
    BenchDevice device;
    if (!bench_open(&device, name)) { return EXIT_FAILURE; }
#ifdef CUDA_EMULATION
    if (counts) { return bench_run_transactions(device, name, declare, shape, check_shapes); }
#endif
    if (f.huge) { return bench_run_huge(device, name, names.first); }
    return f.check ? bench_run_check(device, name, declare, shape, check_shapes, names.first)
                   : bench_run_shapes(device, name, declare, shape.kind);
}
