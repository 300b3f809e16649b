/*
Compares two sets of measurements of `make bench`, kernel by kernel, and says which kernels became faster or slower by
more than the noise.

    make compare OLD=results/h200 NEW=/tmp/h200      two folders of CSV files; files of one name are compared
    make compare OLD=results/h200/gelu_forward.csv NEW=new.csv    two files, as ./gelu_forward --csv new.csv writes them
    make compare ALL=yes ...                         every configuration; default: the best one of each side
    make compare THRESHOLD=5 ...                     smaller differences than 5% count as the same; default: 2

A line per op and kernel: the medians, new / old, and the verdict.

    FAST, SLOW    The slower median is more than the threshold above the faster one, and neither median lies within
                  p10 .. p90 of the other side.
    SAME          Everything else. A line says "within p10 .. p90" if only the spread speaks for SAME: measure again.
    N/C           Not comparable: shape, type, L2 state or GPU differ. The line says which.
    GONE, NEW     Only one of the sides has it.

The threshold allows for what differs between two runs although nothing has changed: clocks, temperature, addresses. The
spread within each run, p10 .. p90, is often narrower than that; but some kernels vary more from launch to launch.

Exit code: 0, or 1 if anything is SLOW. On a usage error, a file that cannot be read or parsed, or if the two sides have
no op in common, the program prints one line on stderr and the exit code is 2. make turns each but 0 into its own 2; for
the others call ../../build/dev_cuda/compare, which make compare builds.
*/
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

[[noreturn]] __attribute__((format(printf, 1, 2))) static void die(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "error: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(2);
}

#include "csv.h"

// ---- the CSV files of bench_report.h ----------------------------------------------------------------------

// One line of a CSV: one kernel in one configuration.
struct Row {
    int kernel;
    std::string config; // the block size, or whatever the column says
    double median_ms, p10_ms, p90_ms;
    double sm_mhz;     // 0: not known
    std::string shape; // "B 64 T 1024 C 768 NH 12 V 50257"
    // what two rows must have in common to be comparable, {column, value}; a column that only one side has is left out
    std::vector<std::pair<std::string, std::string>> conditions;
};
typedef std::vector<Row> Table; // one CSV file, in its order

static Row read_row(const Fields& f) {
    Row r;
    r.kernel = f.integer("kernel");
    r.config = f.find("config") ? f.word("config") : f.word("block_size");
    r.median_ms = f.number("median_ms"), r.p10_ms = f.number("p10_ms"), r.p90_ms = f.number("p90_ms");
    if (!(r.p10_ms > 0 && r.p10_ms <= r.median_ms && r.median_ms <= r.p90_ms)) {
        die("%s:%zu: p10 %g, median %g and p90 %g ms are not times in ascending order", f.path.c_str(), f.line,
            r.p10_ms, r.median_ms, r.p90_ms);
    }
    const std::string* clock = f.find("sm_mhz"); // older files lack it, and it is empty where it could not be read
    r.sm_mhz = clock && !clock->empty() ? f.number("sm_mhz") : 0;
    for (const char* name : {"op", "dtype", "B", "T", "C", "NH", "V", "gpu"}) {
        r.conditions.push_back({name, f.word(name)});
        bool is_shape = strlen(name) <= 2 && strcmp(name, "op") != 0;
        if (is_shape) { r.shape += std::string(" ") + name + " " + f.word(name); }
    }
    for (const char* name : {"l2", "kind", "case"}) { // older files lack some
        if (f.find(name)) { r.conditions.push_back({name, f.word(name)}); }
    }
    return r;
}

static Table read_table(const std::string& path) {
    auto lines = parse_csv(path, read_file(path));
    if (lines.size() < 2) { die("%s: no line of a kernel", path.c_str()); }
    Table table;
    for (size_t i = 1; i < lines.size(); i++) {
        if (lines[i].size() != lines[0].size()) {
            die("%s:%zu: %zu fields, the header has %zu", path.c_str(), i + 1, lines[i].size(), lines[0].size());
        }
        Row r = read_row({path, i + 1, lines[0], lines[i]});
        for (const Row& other : table) {
            if (other.kernel == r.kernel && other.config == r.config && other.shape == r.shape) {
                die("%s:%zu: kernel %d, configuration '%s' occurs twice", path.c_str(), i + 1, r.kernel,
                    r.config.c_str());
            }
        }
        table.push_back(r);
    }
    return table;
}

// Adds a table to a side. One with several shapes becomes as many tables, "op B 64 T 1024 ...".
static void add_table(std::map<std::string, Table>* side, const std::string& op, const Table& table) {
    bool several = std::any_of(table.begin(), table.end(), [&](const Row& r) { return r.shape != table[0].shape; });
    for (const Row& r : table) { (*side)[several ? op + r.shape : op].push_back(r); }
}

// Returns {op, table} for each *.csv in a folder, or for one file. op is the file's name without .csv; that of a single
// file is its column `op`, because such a file may have any name.
static std::map<std::string, Table> read_side(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code e;
    std::map<std::string, Table> side;
    if (fs::is_directory(path, e)) {
        for (fs::directory_iterator it(path, e), end; !e && it != end; it.increment(e)) {
            fs::path file = it->path();
            if (file.extension() == ".csv") { add_table(&side, file.stem().string(), read_table(file.string())); }
        }
        if (e) { die("%s: %s", path.c_str(), e.message().c_str()); }
        if (side.empty()) { die("%s: no *.csv; make bench writes results/GPU/OP.csv", path.c_str()); }
    } else {
        Table table = read_table(path);
        add_table(&side, table[0].conditions[0].second, table);
    }
    return side;
}

// ---- comparison --------------------------------------------------------------------------------------

struct Counts {
    int faster, same, slower, not_comparable;
};

// Returns how the conditions of two rows differ, as in "B 64 -> 32, gpu A -> B", or "".
static std::string difference(const Row& a, const Row& b) {
    std::string text;
    for (const auto& [name, value] : a.conditions) {
        for (const auto& [other_name, other_value] : b.conditions) {
            if (name == other_name && value != other_value) {
                text += (text.empty() ? "" : ", ") + name + " " + value + " -> " + other_value;
            }
        }
    }
    return text;
}

static const Row* find_row(const Table& table, int kernel, const std::string& config) {
    for (const Row& r : table) {
        if (r.kernel == kernel && r.config == config) { return &r; }
    }
    return nullptr;
}
static const Row* best_row(const Table& table, int kernel) {
    const Row* best = nullptr;
    for (const Row& r : table) {
        if (r.kernel == kernel && (!best || r.median_ms < best->median_ms)) { best = &r; }
    }
    return best;
}

// Prints the line of one kernel; a or b may be NULL. width: of the column of ops
static void compare_rows(const std::string& op, int width, const Row* a, const Row* b, double threshold,
                         Counts* counts) {
    std::string config = a ? a->config : b->config, verdict, note;
    if (a && b && a->config != b->config) { config += " -> " + b->config; }
    char old_ms[32] = "-", new_ms[32] = "-", ratio[32] = "-";
    if (a) { snprintf(old_ms, sizeof(old_ms), "%.5f", a->median_ms); }
    if (b) { snprintf(new_ms, sizeof(new_ms), "%.5f", b->median_ms); }
    if (!a || !b) {
        verdict = a ? "GONE" : "NEW";
    } else if (!(note = difference(*a, *b)).empty()) {
        verdict = "N/C", note = "not comparable: " + note, counts->not_comparable++;
    } else {
        double more = std::max(a->median_ms, b->median_ms) / std::min(a->median_ms, b->median_ms) - 1;
        bool within = (a->p10_ms <= b->median_ms && b->median_ms <= a->p90_ms) ||
                      (b->p10_ms <= a->median_ms && a->median_ms <= b->p90_ms);
        snprintf(ratio, sizeof(ratio), "%.3f", b->median_ms / a->median_ms);
        if (more <= threshold || within) {
            verdict = "SAME", counts->same++;
            if (more > threshold) { note = "within p10 .. p90: measure again"; }
        } else if (b->median_ms < a->median_ms) {
            verdict = "FAST", counts->faster++;
        } else {
            verdict = "SLOW", counts->slower++;
        }
    }
    if (a && b && a->sm_mhz > 0 && b->sm_mhz > 0 && fabs(b->sm_mhz / a->sm_mhz - 1) > 0.05) {
        char clocks[96];
        snprintf(clocks, sizeof(clocks), "SM clock %.0f -> %.0f MHz", a->sm_mhz, b->sm_mhz);
        note += (note.empty() ? "" : "; ") + std::string(clocks);
    }
    printf("%-*s %6d  %-12s %9s %9s %6s  %s%s%s\n", width, op.c_str(), a ? a->kernel : b->kernel, config.c_str(),
           old_ms, new_ms, ratio, verdict.c_str(), note.empty() ? "" : "  ", note.c_str());
}

static void compare_tables(const std::string& op, int width, const Table& a, const Table& b, bool all, double threshold,
                           Counts* counts) {
    std::vector<int> kernels;
    for (const Table* table : {&a, &b}) {
        for (const Row& r : *table) { kernels.push_back(r.kernel); }
    }
    std::sort(kernels.begin(), kernels.end());
    kernels.erase(std::unique(kernels.begin(), kernels.end()), kernels.end());
    for (int kernel : kernels) {
        const Row *best_a = best_row(a, kernel), *best_b = best_row(b, kernel);
        if (!all || !best_a || !best_b) {
            compare_rows(op, width, best_a, best_b, threshold, counts);
            continue;
        }
        for (const Row& r : a) {
            if (r.kernel == kernel) { compare_rows(op, width, &r, find_row(b, kernel, r.config), threshold, counts); }
        }
        for (const Row& r : b) {
            if (r.kernel == kernel && !find_row(a, kernel, r.config)) {
                compare_rows(op, width, nullptr, &r, threshold, counts);
            }
        }
    }
}

// ---- main -----------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    bool all = false;
    double threshold = 2; // percent
    std::vector<std::string> paths;
    for (int i = 1; i < argc; i++) {
        std::string arg = argv[i];
        if (arg == "--help") {
            printf("usage: %s [--all] [--threshold PERCENT] OLD NEW\n"
                   "Compares two folders of CSV files, or two files, that make bench or ./OP --csv wrote.\n"
                   "  --all                 every configuration (default: the best one of each side)\n"
                   "  --threshold PERCENT   a smaller difference counts as the same (default: 2)\n"
                   "FAST, SLOW: the medians differ by more than the threshold, and neither lies within p10 .. p90 of\n"
                   "the other side. N/C: shape, type, L2 state or GPU differ. Exit code 1 if anything is SLOW.\n",
                   argv[0]);
            return EXIT_SUCCESS;
        } else if (arg == "--all") {
            all = true;
        } else if (arg == "--threshold") {
            const char* value = i + 1 < argc ? argv[++i] : "";
            char* end;
            threshold = strtod(value, &end);
            if (!*value || *end || !(threshold >= 0 && threshold <= 1000)) {
                die("--threshold is a percentage from 0 to 1000, not '%s'; see %s --help", value, argv[0]);
            }
        } else if (arg[0] == '-') {
            die("unknown option '%s'; see %s --help", argv[i], argv[0]);
        } else {
            paths.push_back(arg);
        }
    }
    if (paths.size() != 2) { die("OLD and NEW are wanted, two folders or two files; see %s --help", argv[0]); }

    std::map<std::string, Table> a = read_side(paths[0]), b = read_side(paths[1]);
    if (std::none_of(a.begin(), a.end(), [&](const auto& op) { return b.count(op.first) > 0; })) {
        die("%s and %s have no op in common", paths[0].c_str(), paths[1].c_str());
    }
    std::map<std::string, Table> ops = a; // the names of both sides, in order
    ops.insert(b.begin(), b.end());
    size_t width = 0;
    for (const auto& op : ops) { width = std::max(width, op.first.size()); }
    printf("%-*s %6s  %-12s %9s %9s %6s  %s\n", (int)width, "op", "kernel", "config", "old ms", "new ms", "ratio",
           "verdict");
    Counts counts = {0, 0, 0, 0};
    for (const auto& op : ops) {
        compare_tables(op.first, (int)width, a[op.first], b[op.first], all, threshold / 100, &counts);
    }
    printf("%d faster, %d same, %d slower, %d not comparable\n", counts.faster, counts.same, counts.slower,
           counts.not_comparable);
    return counts.slower > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
