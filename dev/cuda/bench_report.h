/*
Part of bench.h: results as lines, as a table and as files.
*/
#pragma once

#include "bench_time.h"

// ---- results ----------------------------------------------------------------------------

struct BenchResult {
    const BenchKernel* kernel;
    int config;
    BenchTime time;
    BenchHot hot = {};
};

inline double bench_gbs(const BenchState& s, const BenchResult& r) { return s.bytes / r.time.median_ms / 1e6; }
inline double bench_tflops(const BenchState& s, const BenchResult& r) { return s.flops / r.time.median_ms / 1e9; }

// The bandwidth that is the op's ceiling, and its name.
inline double bench_roof_gbs(const BenchDevice& d, const BenchState& s) {
    return s.reads_only ? d.read_gbs : d.copy_gbs;
}
inline const char* bench_roof_name(const BenchState& s) { return s.reads_only ? "read" : "copy"; }

// The matrix rate that is the kernel's ceiling, in TFLOP/s, and the type of its products. 0: not known
inline double bench_matrix_tflops(const BenchDevice& d, const BenchKernel& k) {
    return k.rate_type ? k.matrix_tflops : d.matrix_tflops;
}
inline const char* bench_rate_type(const BenchKernel& k) { return k.rate_type ? k.rate_type : PRECISION_NAME; }

// Returns the clock of the first timing that has one, or 0. results: in the order of time
inline double bench_first_mhz(const std::vector<BenchResult>& results) {
    for (const BenchResult& r : results) {
        if (r.time.sm_mhz > 0) { return r.time.sm_mhz; }
    }
    return 0;
}
inline bool bench_is_slow_clock(double sm_mhz, double first_mhz) { return sm_mhz > 0 && sm_mhz < 0.95 * first_mhz; }

// Returns a note for each timing whose clock was below 95% of the first one's: its time cannot be compared.
inline std::string bench_clock_notes(const std::vector<BenchResult>& results) {
    double first = bench_first_mhz(results);
    std::string notes;
    for (const BenchResult& r : results) {
        if (!bench_is_slow_clock(r.time.sm_mhz, first)) { continue; }
        char line[256];
        snprintf(line, sizeof(line), "note: kernel %d %s ran at %.0f MHz, %.1f%% below the first timing's %.0f\n",
                 r.kernel->number, bench_config_text(*r.kernel, r.config, false).c_str(), r.time.sm_mhz,
                 100 * (1 - r.time.sm_mhz / first), first);
        notes += line;
    }
    return notes;
}

// The part of a line of output about clocks and hot times: what was measured of them.
inline std::string bench_clock_text(const BenchResult& r) {
    char text[4][64] = {};
    if (r.time.sm_mhz > 0) { snprintf(text[0], sizeof(text[0]), " | %.0f MHz", r.time.sm_mhz); }
    if (r.hot.graph_ms > 0) { snprintf(text[1], sizeof(text[1]), " | in a graph %.4f ms", r.hot.graph_ms); }
    if (r.hot.sustained_ms > 0) { snprintf(text[2], sizeof(text[2]), " | sustained %.4f ms", r.hot.sustained_ms); }
    if (r.hot.sustained_mhz > 0) { snprintf(text[3], sizeof(text[3]), " at %.0f MHz", r.hot.sustained_mhz); }
    return std::string(text[0]) + text[1] + text[2] + text[3];
}

// The part of a row of the table about clocks and hot times, or of the table's head if r is NULL. A * marks a clock below
// 95% of the first timing's. results: of the whole run; what none of them has gets no column.
inline std::string bench_clock_cells(const std::vector<BenchResult>& results, const BenchResult* r) {
    double first = bench_first_mhz(results);
    bool has_graph = false, has_sustained = false;
    for (const BenchResult& other : results) {
        has_graph |= other.hot.graph_ms > 0, has_sustained |= other.hot.sustained_ms > 0;
    }
    std::string cells;
    auto add = [&](bool wanted, const char* name, const char* format, double value, const char* mark) {
        char number[32] = "-", cell[64];
        if (r && value > 0) { snprintf(number, sizeof(number), format, value); }
        snprintf(cell, sizeof(cell), " %9s%s", r ? number : name, mark);
        if (wanted) { cells += cell; }
    };
    add(first > 0, "MHz", "%.0f", r ? r->time.sm_mhz : 0, r && bench_is_slow_clock(r->time.sm_mhz, first) ? "*" : " ");
    add(has_graph, "in graph", "%.4f", r ? r->hot.graph_ms : 0, "");
    add(has_sustained, "sustained", "%.4f", r ? r->hot.sustained_ms : 0, "");
    return cells;
}

// The columns of a CSV about clocks and roofs, and their values. 0: not measured
inline const char* bench_clock_columns() {
    return "sm_mhz,graph_ms,sustained_ms,sustained_mhz,empty_ms,read_gb_s,reads_only,matrix_type";
}
inline std::string bench_clock_values(const BenchDevice& d, const BenchState& s, const BenchResult& r) {
    char text[256];
    snprintf(text, sizeof(text), "%.0f,%.5f,%.5f,%.0f,%.5f,%.2f,%d,%s", r.time.sm_mhz, r.hot.graph_ms,
             r.hot.sustained_ms, r.hot.sustained_mhz, d.empty_ms, d.read_gbs, s.reads_only, bench_rate_type(*r.kernel));
    return text;
}

// Returns the fastest result of kernel `number` (-1: of all kernels), or NULL if there is none.
inline const BenchResult* bench_best(const std::vector<BenchResult>& results, int number) {
    const BenchResult* best = NULL;
    for (const BenchResult& r : results) {
        bool better = !best || r.time.median_ms < best->time.median_ms;
        if ((number < 0 || r.kernel->number == number) && better) { best = &r; }
    }
    return best;
}

// Returns " (promoted)" or " (best)" for the kernel that b.promoted() or b.best() names, otherwise "".
inline const char* bench_mark(const BenchState& s, const BenchKernel& k) {
    return k.number != s.best ? "" : s.is_promoted ? " (promoted)" : " (best)";
}

inline void bench_print_line(const BenchDevice& d, const BenchState& s, const std::vector<BenchResult>& results,
                             const BenchResult& r) {
    int width = bench_is_fixed(*r.kernel) ? 0 : (int)strlen(r.kernel->config_name) + 5; // of "block size  256"
    printf("%-*s | time %.4f ms", width, bench_config_text(*r.kernel, r.config).c_str(), r.time.median_ms);
    if (s.bytes > 0) { printf(" | bandwidth %.2f GB/s", bench_gbs(s, r)); }
    printf(" | p10 %.4f p90 %.4f ms%s", r.time.p10_ms, r.time.p90_ms, bench_clock_text(r).c_str());
    if (bench_flags().noise > 0) { printf(" | median +- %.2f%%, %d launches", r.time.noise, r.time.launches); }
    if (s.flops > 0) { printf(" | %.2f TFLOP/s", bench_tflops(s, r)); }
    double roof_gbs = bench_roof_gbs(d, s), rate = bench_matrix_tflops(d, *r.kernel);
    if (s.bytes > 0 && roof_gbs > 0) {
        printf(" | %.1f%% of %s", 100 * bench_gbs(s, r) / roof_gbs, bench_roof_name(s));
    }
    if (s.flops > 0 && rate > 0) {
        const char* type = r.kernel->rate_type;
        printf(" | %.1f%% of %s%smatrix rate", 100 * bench_tflops(s, r) / rate, type ? type : "", type ? " " : "");
    }
    for (int number = 0; number <= 1; number++) {
        const BenchResult* base = bench_best(results, number);
        if (base && r.kernel->number != number) {
            printf(" | %.2fx kernel %d", base->time.median_ms / r.time.median_ms, number);
        }
    }
    if (r.kernel->num_launches) {
        printf(" | %d launch%s, %.1f MB", r.kernel->num_launches, r.kernel->num_launches == 1 ? "" : "es",
               r.kernel->bytes / 1e6);
    }
    printf("\n");
    fflush(stdout);
}

// Returns the line that names the fastest kernel of all, or "" if there are no results.
inline std::string bench_fastest_text(const std::vector<BenchResult>& results) {
    const BenchResult* r = bench_best(results, -1);
    if (!r) { return ""; }
    char number[32], ms[32];
    snprintf(number, sizeof(number), "fastest: kernel %d (", r->kernel->number);
    snprintf(ms, sizeof(ms), ", %.4f ms\n", r->time.median_ms);
    return std::string(number) + r->kernel->what + "), " + bench_config_text(*r->kernel, r->config, false) + ms;
}

inline void bench_print_table(const BenchDevice& d, const BenchState& s, const std::vector<BenchResult>& results) {
    const BenchResult *vendor = bench_best(results, 0), *naive = bench_best(results, 1);
    bool moves =
        std::any_of(s.kernels.begin(), s.kernels.end(), [](const BenchKernel& k) { return k.num_launches > 0; });
    printf("\nkernel     config   time ms       p10       p90%s      GB/s  %% %s   TFLOP/s  %% rate  x kernel 0  x "
           "kernel 1%s  what\n",
           bench_clock_cells(results, NULL).c_str(), bench_roof_name(s), moves ? "  launches  MB moved" : "");
    bool any_slow = false;
    double first_mhz = bench_first_mhz(results);
    for (const BenchKernel& k : s.kernels) {
        const BenchResult* r = bench_best(results, k.number);
        if (!r) { continue; }
        char cells[8][24];
        for (auto& cell : cells) { snprintf(cell, sizeof(cell), "-"); }
        if (r->config) { snprintf(cells[0], sizeof(cells[0]), "%d", r->config); }
        if (!r->config && k.configs.size() > 1) { snprintf(cells[0], sizeof(cells[0]), "default"); }
        if (s.bytes > 0) {
            snprintf(cells[1], sizeof(cells[1]), "%.1f", bench_gbs(s, *r));
            snprintf(cells[2], sizeof(cells[2]), "%.1f", 100 * bench_gbs(s, *r) / bench_roof_gbs(d, s));
        }
        if (s.flops > 0) { snprintf(cells[3], sizeof(cells[3]), "%.2f", bench_tflops(s, *r)); }
        double rate = bench_matrix_tflops(d, k);
        if (s.flops > 0 && rate > 0) { snprintf(cells[4], sizeof(cells[4]), "%.1f", 100 * bench_tflops(s, *r) / rate); }
        if (vendor) { snprintf(cells[5], sizeof(cells[5]), "%.2f", vendor->time.median_ms / r->time.median_ms); }
        if (naive) { snprintf(cells[6], sizeof(cells[6]), "%.2f", naive->time.median_ms / r->time.median_ms); }
        printf("%6d %10s %9.4f %9.4f %9.4f%s %9s %7s %9s %7s %11s %11s", k.number, cells[0], r->time.median_ms,
               r->time.p10_ms, r->time.p90_ms, bench_clock_cells(results, r).c_str(), cells[1], cells[2], cells[3],
               cells[4], cells[5], cells[6]);
        if (moves) { printf("  %8d  %8.1f", k.num_launches, k.bytes / 1e6); }
        std::string config = bench_config_text(k, r->config, false);
        printf("  %s%s", k.what, bench_mark(s, k));
        if (config != "default" && strcmp(k.config_name, "block size") != 0) { printf(", %s", config.c_str()); }
        printf("\n");
        any_slow |= bench_is_slow_clock(r->time.sm_mhz, first_mhz);
    }
    if (any_slow) { printf("* below 95%% of the first timing's clock, %.0f MHz\n", first_mhz); }
    for (const BenchKernel& k : s.kernels) {
        if (!k.rate_type || k.matrix_tflops <= 0 || !bench_best(results, k.number)) { continue; }
        printf("%% rate of kernel %d: of the rate in %s, %.1f TFLOP/s\n", k.number, k.rate_type, k.matrix_tflops);
    }
    printf("\n%s", bench_fastest_text(results).c_str());
}

// Prints a note if a default configuration, or the promoted or best kernel, is no longer the best by more than 2%.
inline void bench_print_notes(const BenchState& s, const std::vector<BenchResult>& results) {
    for (const BenchResult& r : results) {
        const BenchResult* best = bench_best(results, r.kernel->number);
        double more = r.time.median_ms / best->time.median_ms - 1;
        if (r.config == 0 && more > 0.02) {
            printf("note: kernel %d takes %.1f%% longer with its default argument than with %s\n", r.kernel->number,
                   100 * more, bench_config_text(*best->kernel, best->config, false).c_str());
        }
    }
    const BenchResult *ours = s.best >= 0 ? bench_best(results, s.best) : NULL, *best = NULL;
    for (const BenchResult& r : results) { // except kernel 0, which is the vendor's
        if (r.kernel->number > 0 && (!best || r.time.median_ms < best->time.median_ms)) { best = &r; }
    }
    if (ours && best && ours->time.median_ms > 1.02 * best->time.median_ms) {
        printf("note: kernel %d, %s, takes %.1f%% longer than kernel %d\n", s.best, s.is_promoted ? "promoted" : "best",
               100 * (ours->time.median_ms / best->time.median_ms - 1), best->kernel->number);
    }
}

// ---- files --------------------------------------------------------------------------------

inline FILE* bench_create(const char* path, const char* mode = "w") {
    FILE* f = fopen(path, mode);
    if (!f) { die("%s: %s", path, strerror(errno)); }
    return f;
}
inline void bench_close(FILE* f, const char* path) {
    bool failed = ferror(f) != 0;
    if (fclose(f) != 0 || failed) { die("%s: cannot be written: %s", path, strerror(errno)); }
}

// `what` is the last field, because it may contain commas; a reader can split the fields before it at commas. best: the
// fastest configuration of its kernel; best_kernel: the kernel of b.promoted() or b.best(). append: the file has rows of
// other shapes already.
inline void bench_write_csv(const char* path, const BenchDevice& d, const BenchState& s, const char* op,
                            const Shape& shape, const std::vector<BenchResult>& results, bool append = false) {
    FILE* f = bench_create(path, append ? "a" : "w");
    if (!append) {
        fprintf(
            f,
            "op,kernel,config,config_name,config_label,dtype,B,T,C,NH,V,kind,case,median_ms,p10_ms,p90_ms,launches,l2,"
            "bytes,gb_s,copy_gb_s,flops,tflop_s,matrix_tflop_s,best,best_kernel,promoted,kernel_launches,bytes_moved,"
            "%s,gpu,what\n",
            bench_clock_columns());
    }
    for (const BenchResult& r : results) {
        std::string what;
        for (const char* p = r.kernel->what; *p; p++) { what += *p == '"' ? "\"\"" : std::string(1, *p); }
        fprintf(f,
                "%s,%d,%d,%s,%s,%s,%d,%d,%d,%d,%d,%d,%d,%.5f,%.5f,%.5f,%d,%s,%.0f,%.2f,%.2f,%.0f,%.3f,%.3f,%d,%d,%d,%d,"
                "%.0f,%s,%s,\"%s\"\n",
                op, r.kernel->number, r.config, bench_is_fixed(*r.kernel) ? "" : r.kernel->config_name,
                bench_config_label(*r.kernel, r.config).c_str(), PRECISION_NAME, shape.B, shape.T, shape.C, shape.NH,
                shape.V, s.kind, s.which, r.time.median_ms, r.time.p10_ms, r.time.p90_ms, r.time.launches,
                bench_flags().hot ? "hot" : "cold", s.bytes, bench_gbs(s, r), d.copy_gbs, s.flops, bench_tflops(s, r),
                bench_matrix_tflops(d, *r.kernel), &r == bench_best(results, r.kernel->number),
                r.kernel->number == s.best, r.kernel->number == s.best && s.is_promoted, r.kernel->num_launches,
                r.kernel->bytes, bench_clock_values(d, s, r).c_str(), d.name, what.c_str());
    }
    bench_close(f, path);
}

inline std::string bench_json_string(const char* text) {
    std::string quoted = "\"";
    for (const char* p = text; *p; p++) {
        if (*p == '"' || *p == '\\') { quoted += '\\'; }
        quoted += (unsigned char)*p < 32 ? ' ' : *p;
    }
    return quoted + "\"";
}

// Google Benchmark's layout, which its compare.py reads. Values that this layout has no field for become user counters.
inline void bench_write_json(const char* path, const BenchDevice& d, const BenchState& s, const char* op,
                             const Shape& shape, const std::vector<BenchResult>& results) {
    FILE* f = bench_create(path);
    char date[64];
    time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S+00:00", gmtime(&now));
    fprintf(f,
            "{\n  \"context\": {\"date\": \"%s\", \"executable\": %s, \"num_cpus\": %u, \"mhz_per_cpu\": 0, "
            "\"cpu_scaling_enabled\": false, \"caches\": [], \"library_build_type\": \"release\", \"gpu\": %s, "
            "\"driver\": %s, \"dtype\": \"%s\", \"l2\": \"%s\", \"copy_gb_s\": %.2f, \"read_gb_s\": %.2f, "
            "\"empty_ms\": %.5f, \"B\": %d, \"T\": %d, \"C\": %d, "
            "\"NH\": %d, \"V\": %d, \"kind\": %d, \"case\": %d},\n  \"benchmarks\": [",
            date, bench_json_string(cli_program(NULL)).c_str(), std::thread::hardware_concurrency(),
            bench_json_string(d.name).c_str(), bench_json_string(bench_driver().c_str()).c_str(), PRECISION_NAME,
            bench_flags().hot ? "hot" : "cold", d.copy_gbs, d.read_gbs, d.empty_ms, shape.B, shape.T, shape.C, shape.NH,
            shape.V, s.kind, s.which);
    int family = -1, instance = 0;
    for (size_t i = 0; i < results.size(); i++) {
        const BenchResult& r = results[i];
        bool same = i > 0 && results[i - 1].kernel == r.kernel;
        instance = same ? instance + 1 : 0;
        family += !same;
        char name[256];
        std::string axis = bench_is_fixed(*r.kernel) ? "config" : r.kernel->config_name; // as in "tile_rows:128"
        std::replace(axis.begin(), axis.end(), ' ', '_');
        snprintf(name, sizeof(name), "%s/kernel:%d/%s:%d", op, r.kernel->number, axis.c_str(), r.config);
        std::string label = r.kernel->what, form = bench_config_label(*r.kernel, r.config);
        if (!form.empty()) { label += "; " + form; }
        fprintf(f,
                "%s\n    {\"name\": \"%s\", \"family_index\": %d, \"per_family_instance_index\": %d, \"run_name\": "
                "\"%s\", \"run_type\": \"iteration\", \"repetitions\": 1, \"repetition_index\": 0, \"threads\": 1, "
                "\"iterations\": %d, \"real_time\": %.5f, \"cpu_time\": %.5f, \"time_unit\": \"ms\", "
                "\"bytes_per_second\": %.6e, \"flops_per_second\": %.6e, \"p10_ms\": %.5f, \"p90_ms\": %.5f, "
                "\"sm_mhz\": %.0f, \"graph_ms\": %.5f, \"sustained_ms\": %.5f, \"sustained_mhz\": %.0f, \"label\": %s}",
                i ? "," : "", name, family, instance, name, r.time.launches, r.time.median_ms, r.time.median_ms,
                1e9 * bench_gbs(s, r), 1e12 * bench_tflops(s, r), r.time.p10_ms, r.time.p90_ms, r.time.sm_mhz,
                r.hot.graph_ms, r.hot.sustained_ms, r.hot.sustained_mhz, bench_json_string(label.c_str()).c_str());
    }
    fprintf(f, "\n  ]\n}\n");
    bench_close(f, path);
}
