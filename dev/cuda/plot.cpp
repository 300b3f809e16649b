/*
Plots the measurements of `make bench`. For each OP.csv in a folder, it writes a bar chart OP.svg next to it, with one
bar per kernel in its best configuration. For each folder it writes roofline.svg, with a dot for the best kernel of each
op that counts FLOPs.

    make plots                              every folder of results/ that holds a CSV
    ./plot results/h200                     one or more folders
    ./plot --speed FILE.csv                 programs side by side: FILE.svg, bars of tokens per second

The same input gives the same bytes. If a folder has no CSV, or a file cannot be read or parsed, the program prints one
line on stderr and exits with code 1; if the command line is wrong, with code 2. Source of the roofline: Williams et al.
2009, doi:10.1145/1498765.1498785.
*/
#include "text.h" // die(), which csv.h calls

#include "csv.h"

#include <filesystem>

// ---- the CSV files of bench_report.h ----------------------------------------------------------------------

// One line of a CSV: one kernel in one configuration.
struct Row {
    std::string op, config_name, dtype, l2, gpu, what;
    int kernel, config, B, T, C, NH, V, num_launches;
    double time_ms, bytes, copy_gbs, flops, matrix_tflops, bytes_moved; // 0 means unknown, except for the time
    bool promoted, reads_only, best_kernel; // best_kernel: also of an op that has no copy in train_gpt2.cu
    double read_gbs;
    std::string matrix_type; // of the products whose rate is matrix_tflops
};

// One CSV file.
struct Op {
    std::string name;      // file name without .csv
    std::vector<Row> best; // the fastest row of each kernel, in ascending order of kernel numbers
};

static Row read_row(const Fields& f) {
    Row r;
    r.op = f.word("op"), r.dtype = f.word("dtype"), r.l2 = f.word("l2"), r.gpu = f.word("gpu"), r.what = f.word("what");
    r.kernel = f.integer("kernel");
    // older files have a column block_size, and neither names nor best_kernel
    r.config = f.integer(f.find("config") ? "config" : "block_size");
    r.config_name = f.find("config_name") ? f.word("config_name") : "block size";
    r.B = f.integer("B"), r.T = f.integer("T"), r.C = f.integer("C"), r.NH = f.integer("NH"), r.V = f.integer("V");
    r.time_ms = f.number("median_ms"), r.bytes = f.number("bytes"), r.flops = f.number("flops");
    r.copy_gbs = f.number("copy_gb_s"), r.matrix_tflops = f.number("matrix_tflop_s");
    r.num_launches = f.integer("kernel_launches", true), r.bytes_moved = f.number("bytes_moved", true);
    r.promoted = f.integer("promoted") != 0;
    r.read_gbs = f.number("read_gb_s", true), r.reads_only = f.integer("reads_only", true) != 0;
    r.matrix_type = f.find("matrix_type") ? f.word("matrix_type") : r.dtype; // older files do not have it
    r.best_kernel = f.find("best_kernel") ? f.integer("best_kernel") != 0 : r.promoted;
    if (r.time_ms == 0) { die("%s:%zu: median_ms is 0", f.path.c_str(), f.line); }
    return r;
}

static Op read_op(const std::filesystem::path& file) {
    std::string path = file.string();
    auto lines = parse_csv(path, read_file(path));
    if (lines.size() < 2) { die("%s: no line of a kernel", path.c_str()); }
    Op op = {file.stem().string(), {}};
    for (size_t i = 1; i < lines.size(); i++) {
        if (lines[i].size() != lines[0].size()) {
            die("%s:%zu: %zu fields, the header has %zu", path.c_str(), i + 1, lines[i].size(), lines[0].size());
        }
        Row r = read_row({path, i + 1, lines[0], lines[i]});
        if (!op.best.empty() && r.op != op.best[0].op) {
            die("%s:%zu: op is '%s' after '%s'", path.c_str(), i + 1, r.op.c_str(), op.best[0].op.c_str());
        }
        auto at = std::find_if(op.best.begin(), op.best.end(), [&](const Row& b) { return b.kernel >= r.kernel; });
        if (at == op.best.end() || at->kernel != r.kernel) {
            op.best.insert(at, r);
        } else if (r.time_ms < at->time_ms) {
            *at = r;
        }
    }
    return op;
}

// ---- SVG --------------------------------------------------------------------------------------------

// Colours of a white card with a border, which is readable on light and on dark pages.
static const char *INK = "#1f2328", *FAINT = "#59636e", *LINE = "#d1d9e0", *RUNG = "#8fb3d1", *PROMOTED = "#2da44e",
                  *LIBRARY = "#d4a72c", *ROOF = "#cf222e";

struct Svg {
    double width, height;
    std::string body;

    enum Style { PLAIN, BOLD, HALO };
    // HALO: a white outline for text that may cross a line. The text is drawn twice, because not every viewer supports
    // paint-order.
    void label(double x, double y, int size, const char* color, const std::string& s, const char* anchor = "start",
               Style style = PLAIN) {
        std::string place = text("<text x=\"%.2f\" y=\"%.2f\" font-size=\"%d\" text-anchor=\"%s\"%s", x, y, size,
                                 anchor, style == BOLD ? " font-weight=\"bold\"" : "");
        std::string end = escaped(s) + "</text>\n";
        if (style == HALO) { body += place + " fill=\"#ffffff\" stroke=\"#ffffff\" stroke-width=\"3\">" + end; }
        body += place + text(" fill=\"%s\">", color) + end;
    }
    void rect(double x, double y, double w, double h, const char* color, const std::string& more = "") {
        body += text("<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"%s/>\n", x, y, w, h, color,
                     more.c_str());
    }
    void line(double x1, double y1, double x2, double y2, const char* color, const char* more = "") {
        body += text("<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" stroke=\"%s\"%s/>\n", x1, y1, x2, y2, color,
                     more);
    }
    void write(const std::string& path) const {
        std::string head =
            text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
                 "font-family=\"sans-serif\">\n"
                 "<rect x=\"0.5\" y=\"0.5\" width=\"%.0f\" height=\"%.0f\" rx=\"6\" fill=\"#ffffff\" stroke=\"%s\"/>\n",
                 width, height, width, height, width - 1, height - 1, LINE);
        write_file(path, head + body + "</svg>\n");
    }
};

static std::string bytes_text(double bytes) {
    return bytes >= 1e9   ? text("%.2f GB", bytes / 1e9)
           : bytes >= 1e6 ? text("%.1f MB", bytes / 1e6)
                          : text("%.1f kB", bytes / 1e3);
}

// ---- bars ---------------------------------------------------------------------------------------------

// Returns the time in ms that the op would take at its roof: the matrix rate if the op counts FLOPs, else the speed of a
// copy, or of a read for an op that only reads. Returns 0 if that rate is unknown.
static double roof_ms(const Row& r) {
    if (r.flops > 0 && r.matrix_tflops > 0) { return r.flops / r.matrix_tflops / 1e9; }
    double gbs = r.reads_only ? r.read_gbs : r.copy_gbs;
    return gbs > 0 ? r.bytes / gbs / 1e6 : 0;
}
static std::string roof_name(const Row& r) {
    if (r.flops > 0 && r.matrix_tflops > 0) {
        return (r.matrix_type == r.dtype ? "" : r.matrix_type + " ") + "matrix rate";
    }
    return r.reads_only ? "read" : "copy";
}

static std::string bar_text(const Row& r) {
    std::string s = text("%.4f ms", r.time_ms);
    if (r.config) { s += text(", %s %d", r.config_name == "block size" ? "block" : r.config_name.c_str(), r.config); }
    if (r.flops > 0) {
        s += text(", %.1f TFLOP/s", r.flops / r.time_ms / 1e9);
    } else if (r.bytes > 0) {
        s += text(", %.2f TB/s", r.bytes / r.time_ms / 1e9);
    }
    if (roof_ms(r) > 0) { s += text(", %.1f%% of %s", 100 * roof_ms(r) / r.time_ms, roof_name(r).c_str()); }
    if (r.num_launches) {
        s += text(", %d launch%s", r.num_launches, r.num_launches == 1 ? "" : "es");
        if (r.bytes_moved > 0) { s += " moving " + bytes_text(r.bytes_moved); }
    }
    return s;
}

static Svg draw_bars(const Op& op) {
    const double left = 20, top = 92, step = 44, bar_height = 16, longest = 440;
    const double cut =
        8; // bars longer than this multiple of the fastest are cut, so that the others stay distinguishable
    const Row& first = op.best[0];
    double fastest = first.time_ms, slowest = first.time_ms;
    bool has_promoted = false, has_best = false, has_library = false;
    for (const Row& r : op.best) {
        fastest = std::min(fastest, r.time_ms), slowest = std::max(slowest, r.time_ms);
        has_promoted |= r.promoted, has_best |= r.best_kernel && !r.promoted, has_library |= r.kernel == 0;
    }
    bool has_cut = slowest > cut * fastest;
    double per_ms = longest / (has_cut ? cut * fastest : slowest);
    double bottom = top + step * (double)op.best.size();
    Svg svg = {960, bottom + 16, ""};

    svg.label(left, 30, 18, INK,
              text("%s, %s, B %d T %d C %d NH %d V %d", first.op.c_str(), first.dtype.c_str(), first.B, first.T,
                   first.C, first.NH, first.V),
              "start", Svg::BOLD);
    std::string about = first.gpu + ", medians in the best configuration, L2 " + first.l2;
    if (first.bytes > 0) { about += ", at least " + bytes_text(first.bytes); }
    if (first.flops > 0) { about += text(", %.4g GFLOP", first.flops / 1e9); }
    if (has_cut) { about += text("; bars over %.4f ms are cut", cut * fastest); }
    svg.label(left, 50, 12, FAINT, about);

    double roof = roof_ms(first) * per_ms;
    bool has_roof = roof > 0 && roof <= longest;
    if (has_roof) {
        svg.label(left + roof - 2, top - 12, 11, ROOF,
                  text("| at 100%% of %s: %.4f ms", roof_name(first).c_str(), roof_ms(first)));
    }
    double x = svg.width - 20;
    auto legend = [&](const char* color, const char* name, double width) {
        x -= width;
        svg.rect(x, top - 22, 10, 10, color);
        svg.label(x + 15, top - 13, 11, FAINT, name);
    };
    if (has_library) { legend(LIBRARY, "library", 65); }
    if (has_promoted) { legend(PROMOTED, "promoted", 80); }
    if (has_best) { legend(PROMOTED, "best", 50); }

    for (size_t i = 0; i < op.best.size(); i++) {
        const Row& r = op.best[i];
        double y = top + step * (double)i;
        const char* color = r.best_kernel ? PROMOTED : r.kernel == 0 ? LIBRARY : RUNG;
        double width = std::min(r.time_ms * per_ms, longest);
        std::string name = text("%d  ", r.kernel) + r.what;
        if (name.size() > 110) { name = name.substr(0, 107) + "..."; }
        name += r.promoted ? " (promoted)" : r.best_kernel ? " (best)" : r.kernel == 0 ? " (library)" : "";
        svg.label(left, y + 12, 13, INK, name);
        svg.rect(left, y + 18, width, bar_height, color, text(" id=\"kernel%d\"", r.kernel));
        if (r.time_ms > cut * fastest) { // a slanted gap marks a cut bar
            svg.body += text("<path d=\"M%.2f %.2fl6 -18h6l-6 18z\" fill=\"#ffffff\"/>\n", left + width - 24, y + 35);
        }
        if (has_roof) { svg.line(left + roof, y + 15, left + roof, y + 37, ROOF); }
        svg.label(left + width + 8, y + 30, 12, INK, bar_text(r), "start", Svg::HALO);
    }
    return svg;
}

// ---- roofline -----------------------------------------------------------------------------------------

struct Dot {
    std::string name;         // op name and kernel number
    double intensity, tflops; // FLOPs per byte, TFLOP/s
};

struct Box {
    double x, y, w, h;
};
static bool overlap(const Box& a, const Box& b) {
    return a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;
}

// A logarithmic axis. It maps the values low..high to the pixels from..to. low and high are numbers of the series 1, 2,
// 5, 10 ...
struct Axis {
    double low, high, from, to;
    double at(double value) const { return from + (to - from) * log10(value / low) / log10(high / low); }
    double next(double value) const { return step_near(1.5 * value, true); }
};
static Axis make_axis(double smallest, double largest, double from, double to) {
    return {step_near(smallest, false), step_near(largest, true), from, to};
}

// Places each label where it covers no dot and no other label: right of its dot, left of it, then further up and down.
static void draw_dots(Svg& svg, const std::vector<Dot>& dots, const Axis& ax, const Axis& ay, std::vector<Box> taken) {
    const double height = 14;
    for (const Dot& d : dots) { taken.push_back({ax.at(d.intensity) - 5, ay.at(d.tflops) - 5, 10, 10}); }
    for (const Dot& d : dots) {
        double x = ax.at(d.intensity), y = ay.at(d.tflops), width = 6.2 * (double)d.name.size();
        Box box = {x + 9, y - height / 2, width, height};
        bool found = false;
        for (int i = 0; i < 40 && !found; i++) {
            // shift in lines: 0, 1 down, 1 up, 2 down ...; for each, two places right of the dot and two left of it
            double shift = (i / 4 + 1) / 2 * height * ((i / 4) % 2 ? 1 : -1);
            double side = i % 4 == 0 ? x + 9 : i % 4 == 1 ? x - 9 - width : i % 4 == 2 ? x + 40 : x - 40 - width;
            Box tried = {side, y - height / 2 + shift, width, height};
            found = tried.x > ax.from && tried.x + width < svg.width && tried.y > ay.to && tried.y + height < ay.from &&
                    std::none_of(taken.begin(), taken.end(), [&](const Box& t) { return overlap(t, tried); });
            if (found) { box = tried; }
        }
        taken.push_back(box);
        double near = box.x > x ? box.x - 2 : box.x + width + 2;
        if (fabs(box.y + height / 2 - y) > 1 || fabs(near - x) > 10) {
            svg.line(x, y, near, box.y + height / 2, FAINT, " stroke-width=\"0.75\"");
        }
        svg.body += text("<circle cx=\"%.2f\" cy=\"%.2f\" r=\"4\" fill=\"%s\" stroke=\"#ffffff\"/>\n", x, y, PROMOTED);
        svg.label(box.x, box.y + 11, 11, INK, d.name, "start", Svg::HALO);
    }
}

static void draw_axes(Svg& svg, const Axis& ax, const Axis& ay) {
    for (double value = ax.low; value < 1.5 * ax.high; value = ax.next(value)) {
        svg.line(ax.at(value), ay.from, ax.at(value), ay.to, LINE);
        svg.label(ax.at(value), ay.from + 16, 11, FAINT, text("%g", value), "middle");
    }
    for (double value = ay.low; value < 1.5 * ay.high; value = ay.next(value)) {
        svg.line(ax.from, ay.at(value), ax.to, ay.at(value), LINE);
        svg.label(ax.from - 8, ay.at(value) + 4, 11, FAINT, text("%g", value), "end");
    }
    svg.label((ax.from + ax.to) / 2, ay.from + 36, 12, INK, "arithmetic intensity, FLOPs for each byte at least moved",
              "middle");
    svg.label(ax.from, ay.to - 10, 12, INK, "TFLOP/s");
}

// Draws the title and the words, separated by commas, below the figure, in lines of at most 130 characters, and
// enlarges the figure for them. Draws nothing if there are no words.
static void draw_list(Svg& svg, const std::string& title, const std::vector<std::string>& words) {
    std::string line = title;
    auto flush = [&] {
        svg.height += 16;
        svg.label(20, svg.height - 16, 12, FAINT, line);
    };
    for (size_t i = 0; i < words.size(); i++) {
        std::string word = words[i] + (i + 1 < words.size() ? "," : "");
        if (line.size() + 1 + word.size() > 130) { flush(), line = "   "; }
        line += " " + word;
    }
    if (!words.empty()) { flush(); }
}

// Returns the number of dots. Roofs differ between data types, so only one type is drawn: bf16 if any op has it. Adds
// the names of the ops that count no FLOPs to *without.
static size_t draw_roofline(const std::vector<Op>& ops, const std::string& path, std::vector<std::string>* without) {
    std::string dtype = ops[0].best[0].dtype, gpu;
    for (const Op& op : ops) { dtype = op.best[0].dtype == "bf16" ? "bf16" : dtype; }
    std::vector<Dot> dots;
    std::vector<std::string> others;
    double copy_tbs = 0, matrix_tflops = 0; // the roofs: the highest rates measured in the runs of these ops
    for (const Op& op : ops) {
        const Row* best = nullptr; // the fastest kernel other than the library's (kernel 0)
        for (const Row& r : op.best) {
            if (r.kernel > 0 && (!best || r.time_ms < best->time_ms)) { best = &r; }
        }
        const Row& first = op.best[0];
        if (first.dtype != dtype) {
            others.push_back(op.name);
            continue;
        }
        gpu = first.gpu;
        copy_tbs = std::max(copy_tbs, first.copy_gbs / 1e3);
        if (first.matrix_type == dtype) { matrix_tflops = std::max(matrix_tflops, first.matrix_tflops); }
        if (!best || best->flops <= 0 || best->bytes <= 0) {
            without->push_back(op.name);
            continue;
        }
        std::string name = text("%s %d", op.name.c_str(), best->kernel);
        if (best->matrix_type != dtype) { name += " (" + best->matrix_type + ")"; } // may lie above the roof
        dots.push_back({name, best->flops / best->bytes, best->flops / best->time_ms / 1e9});
    }
    if (dots.empty()) { return 0; }

    double least_x = dots[0].intensity, most_x = least_x, least_y = dots[0].tflops, most_y = least_y;
    for (const Dot& d : dots) {
        least_x = std::min(least_x, d.intensity), most_x = std::max(most_x, d.intensity);
        least_y = std::min(least_y, d.tflops), most_y = std::max(most_y, d.tflops);
    }
    double ridge = copy_tbs > 0 ? matrix_tflops / copy_tbs : 0; // intensity above which the op is bound by arithmetic
    if (ridge > 0) { least_x = std::min(least_x, ridge), most_x = std::max(most_x, 2 * ridge); }
    Axis ax = make_axis(least_x / 1.5, 1.5 * most_x, 64, 820);
    Axis ay = make_axis(least_y / 1.5, 1.2 * std::max(most_y, matrix_tflops), 520, 92);
    Svg svg = {960, 586, ""};
    svg.label(20, 30, 18, INK, text("roofline, %s, %s", dtype.c_str(), gpu.c_str()), "start", Svg::BOLD);
    svg.label(20, 50, 12, FAINT,
              "the fastest kernel of each op that is not the library's; roofs as measured in the same runs");
    draw_axes(svg, ax, ay);
    std::vector<Box> taken; // areas of the roofs' labels
    if (copy_tbs > 0) {
        // the sloped roof starts where it rises above the bottom of the frame, and ends at the ridge or at the frame
        double begin = std::max(ax.low, ay.low / copy_tbs), end = std::min(ax.high, ay.high / copy_tbs);
        if (ridge > 0) { end = std::min(end, ridge); }
        svg.line(ax.at(begin), ay.at(begin * copy_tbs), ax.at(end), ay.at(end * copy_tbs), ROOF,
                 " id=\"copy\" stroke-width=\"2\"");
        double x = ax.at(begin) + 44, y = ay.at(begin * copy_tbs) - 4;
        svg.label(x, y, 12, ROOF, text("copy %.2f TB/s", copy_tbs), "start", Svg::HALO);
        taken.push_back({x, y - 12, 100, 16});
    }
    if (matrix_tflops > 0) {
        double begin = std::max(ax.low, ridge);
        svg.line(ax.at(begin), ay.at(matrix_tflops), ax.to, ay.at(matrix_tflops), ROOF,
                 " id=\"matrix\" stroke-width=\"2\"");
        double y = ay.at(matrix_tflops) - 8;
        svg.label(ax.to, y, 12, ROOF, text("matrix rate %.1f TFLOP/s", matrix_tflops), "end", Svg::HALO);
        taken.push_back({ax.to - 170, y - 12, 170, 16});
    }
    draw_dots(svg, dots, ax, ay, taken);
    draw_list(svg, "left out, without FLOPs:", *without);
    draw_list(svg, "left out, of another type:", others);
    svg.write(path);
    return dots.size();
}

// ---- programs side by side ------------------------------------------------------------------------------

// One bar: a program whose training step of `tokens` tokens takes `ms`.
struct Speed {
    std::string group, program; // bars of the same group (a model, say) are compared with each other
    double ms, tokens;
    bool ours;
    double tokens_per_second() const { return tokens / ms * 1e3; }
};

// Draws FILE.csv as FILE.svg. The columns are group, program, ours (1 or 0), median_ms and tokens per step, and
// optionally about (the subtitle). The length of a bar is the program's tokens per second relative to the fastest
// program of its group. Its label gives the tokens per second, and how many times as fast the program marked `ours` is.
static void draw_speed(const std::string& path) {
    const double left = 20, bars = 250, longest = 470, bar_height = 18, step = 26;
    std::filesystem::path file = path;
    if (file.extension() != ".csv") { die("%s: not a .csv", path.c_str()); }
    auto lines = parse_csv(path, read_file(path));
    if (lines.size() < 2) { die("%s: no line of a program", path.c_str()); }
    std::vector<Speed> speeds;
    std::string about;
    for (size_t i = 1; i < lines.size(); i++) {
        if (lines[i].size() != lines[0].size()) {
            die("%s:%zu: %zu fields, the header has %zu", path.c_str(), i + 1, lines[i].size(), lines[0].size());
        }
        Fields f = {path, i + 1, lines[0], lines[i]};
        Speed s = {f.word("group"), f.word("program"), f.number("median_ms"), f.number("tokens"),
                   f.integer("ours") != 0};
        if (s.ms == 0 || s.tokens == 0) { die("%s:%zu: median_ms or tokens is 0", path.c_str(), i + 1); }
        speeds.push_back(s);
        if (about.empty() && f.find("about")) { about = f.word("about"); }
    }
    Svg svg = {960, 0, ""};
    svg.label(left, 30, 18, INK, "training speed, tokens per second (longer is faster)", "start", Svg::BOLD);
    svg.label(left, 50, 12, FAINT, about);
    double y = 62;
    for (size_t i = 0; i < speeds.size(); i++) {
        const Speed& s = speeds[i];
        double best = 0, ours = 0;
        for (const Speed& other : speeds) {
            if (other.group != s.group) { continue; }
            best = std::max(best, other.tokens_per_second());
            if (other.ours) { ours = other.tokens_per_second(); }
        }
        if (i == 0 || s.group != speeds[i - 1].group) {
            y += 24;
            svg.label(left, y, 13, INK, s.group, "start", Svg::BOLD);
            y += 10;
        }
        double width = longest * s.tokens_per_second() / best;
        svg.label(bars - 8, y + 14, 13, INK, s.program, "end");
        svg.rect(bars, y, width, bar_height, s.ours ? PROMOTED : RUNG, text(" id=\"bar%zu\"", i));
        std::string figure = thousands(s.tokens_per_second());
        if (!s.ours && ours > 0) { figure += text("  (ours is %.2f times as fast)", ours / s.tokens_per_second()); }
        svg.label(bars + width + 8, y + 14, 12, INK, figure);
        y += step;
    }
    svg.height = y + 12;
    svg.write(file.replace_extension(".svg").string());
}

// ---- main -----------------------------------------------------------------------------------------------

static void draw_folder(const std::string& folder) {
    std::vector<std::filesystem::path> files;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
        bool is_tuning = entry.path().filename() == "tuned.csv"; // of make tune
        if (entry.path().extension() == ".csv" && !is_tuning) { files.push_back(entry.path()); }
    }
    if (error) { die("%s: %s", folder.c_str(), error.message().c_str()); }
    if (files.empty()) { die("%s: no CSV here: make bench writes them, on a machine with a GPU", folder.c_str()); }
    std::sort(files.begin(), files.end());
    std::vector<Op> ops; // all files are read before the first chart is written
    for (const auto& file : files) { ops.push_back(read_op(file)); }
    for (const Op& op : ops) { draw_bars(op).write(folder + "/" + op.name + ".svg"); }
    std::vector<std::string> without;
    size_t num_dots = draw_roofline(ops, folder + "/roofline.svg", &without);
    printf("%s: %zu bar chart%s, ", folder.c_str(), ops.size(), ops.size() == 1 ? "" : "s");
    printf("%s", num_dots ? text("a roofline of %zu of them", num_dots).c_str() : "no roofline");
    for (size_t i = 0; i < without.size(); i++) { printf("%s%s", i ? ", " : "; without FLOPs: ", without[i].c_str()); }
    printf("\n");
}

int main(int argc, char** argv) {
    std::string first = argc < 2 ? "" : argv[1];
    if (first == "--speed" && argc == 3) { return draw_speed(argv[2]), EXIT_SUCCESS; }
    if (first.empty() || first[0] == '-') {
        fprintf(stderr,
                "usage: %s FOLDER ...              draws FOLDER/*.csv, which make bench writes\n"
                "       %s --speed FILE.csv        draws tokens per second: FILE.svg\n",
                argv[0], argv[0]);
        return 2;
    }
    for (int i = 1; i < argc; i++) {
        std::string folder = argv[i];
        while (folder.size() > 1 && folder.back() == '/') { folder.pop_back(); }
        draw_folder(folder);
    }
    return EXIT_SUCCESS;
}
