/*
Draws the figures of the course: figures/NAME.svg, referenced from the pages of dev/learn.

    make figures                       draws all of them
    ./draw_figures --list              their names, and what each shows
    ./draw_figures roofline banks      draws two
    ./draw_figures --check             compares with the files; names each that is stale, exit code 1

Run it in dev/learn, or name the folders: --out FOLDER (default: figures) and --results FOLDER, the CSV files of
`make bench` (default: ../cuda/results/h200).

Layouts, indices and schedules are computed by the formulas of the kernels that a figure explains; measured times are
read from the CSV files. The same input gives the same bytes. A figure whose texts overlap, run out of their box or cross
a line is an error: the widths are those of DejaVu Sans, which is wider than the usual sans-serif fonts.
*/
#include "../cuda/svg.h" // die(), which csv.h calls

#include "../cuda/csv.h"

#include <filesystem>

// ---- measured times ---------------------------------------------------------------------------------------

static std::string results = "../cuda/results/h200"; // --results

// A kernel of an op in its fastest configuration.
struct Measured {
    int kernel, config;
    double ms, bytes, flops, copy_gbs, read_gbs, matrix_tflops;
    std::string dtype, matrix_type, what, gpu;
    bool best;
};

// The kernels of an op, in ascending order.
static std::vector<Measured> measured(const std::string& op) {
    std::string path = results + "/" + op + ".csv";
    auto lines = parse_csv(path, read_file(path));
    std::vector<Measured> kernels;
    for (size_t i = 1; i < lines.size(); i++) {
        if (lines[i].size() != lines[0].size()) {
            die("%s:%zu: not as many fields as the header", path.c_str(), i + 1);
        }
        Fields f = {path, i + 1, lines[0], lines[i]};
        Measured m = {f.integer("kernel"),
                      f.integer("config"),
                      f.number("median_ms"),
                      f.number("bytes"),
                      f.number("flops"),
                      f.number("copy_gb_s"),
                      f.number("read_gb_s"),
                      f.number("matrix_tflop_s"),
                      f.word("dtype"),
                      f.word("matrix_type"),
                      f.word("what"),
                      f.word("gpu"),
                      f.integer("best_kernel") != 0};
        if (m.ms <= 0) { die("%s:%zu: median_ms is 0", path.c_str(), i + 1); }
        auto at = std::find_if(kernels.begin(), kernels.end(), [&](const Measured& k) { return k.kernel >= m.kernel; });
        if (at == kernels.end() || at->kernel != m.kernel) {
            kernels.insert(at, m);
        } else if (m.ms < at->ms) {
            *at = m;
        }
    }
    if (kernels.empty()) { die("%s: no line of a kernel", path.c_str()); }
    return kernels;
}
static Measured measured(const std::string& op, int kernel) {
    for (const Measured& m : measured(op)) {
        if (m.kernel == kernel) { return m; }
    }
    die("%s/%s.csv: no kernel %d", results.c_str(), op.c_str(), kernel);
}

// ---- an H200 ------------------------------------------------------------------------------------------------

static const int NUM_SMS = 132, MAX_WARPS = 64, MAX_BLOCKS = 32, NUM_REGISTERS = 65536;
static const double CLOCK = 1.98e9, SM_SHARED = 228 * 1024.0; // the highest clock; bytes of shared memory per SM

// A kernel's blocks per SM, as the occupancy calculator of the CUDA Toolkit counts them.
struct Occupancy {
    int blocks[4]; // as many as fit by warps, blocks, registers, shared memory
    int fits, limit;
};
static Occupancy occupancy(int threads, int registers, double shared) {
    int warps = threads / 32;
    int per_warp = (registers * 32 + 255) / 256 * 256;             // a warp gets registers in units of 256
    int warps_fit = NUM_REGISTERS / per_warp / 4 * 4;              // each of the SM's four parts holds as many warps
    double per_block = (floor((shared + 127) / 128) * 128) + 1024; // the system takes 1 KB per block
    Occupancy o = {{MAX_WARPS / warps, MAX_BLOCKS, warps_fit / warps, (int)(SM_SHARED / per_block)}, 0, 0};
    for (int i = 1; i < 4; i++) { o.limit = o.blocks[i] < o.blocks[o.limit] ? i : o.limit; }
    o.fits = o.blocks[o.limit];
    return o;
}

// ---- grid: blocks, threads, the index of an element; the example of simple_kernel.cu, kernel 1 --------------

static Svg draw_grid() {
    const int n = 10, block_size = 4, num_blocks = (n + block_size - 1) / block_size;
    const double cell = 52, block_width = block_size * cell + 20, left = 42, top = 104;
    Svg svg(
        800, 404, "A grid of blocks of threads: one thread per element",
        text("out[i] = 2 * inp[i] for n = %d elements, blockDim.x = %d; kernel 1 of simple_kernel.cu", n, block_size),
        text("Three blocks of four threads. The threads have the indices 0 to 11 and point at the elements 0 to 9; "
             "threads 10 and 11 have no element, the guard i < n keeps them from memory."));
    svg.rect(26, 64, 748, 158, "n");
    svg.label(40, 86, text("grid: gridDim.x = ceil_div(%d, %d) = %d blocks", n, block_size, num_blocks));
    const double array_left = (800 - n * cell) / 2, array_top = 272;
    for (int b = 0; b < num_blocks; b++) {
        double x0 = left + b * (block_width + 16);
        svg.rect(x0, top, block_width, 102, "g");
        svg.bold(x0 + 10, top + 18, text("blockIdx.x = %d", b));
        svg.faint(x0 + block_width - 10, top + 18, "threadIdx.x:", "end");
        for (int t = 0; t < block_size; t++) {
            int i = b * block_size + t;
            double x = x0 + 10 + t * cell;
            svg.box(x, top + 28, cell, 26, "a", {text("%d", t)});
            svg.rect(x, top + 62, cell, 26, i < n ? "b" : "n");
            svg.middle(x + cell / 2, top + 79, text("i = %d", i), i < n ? "t" : "f");
            if (i < n) {
                svg.arrow(x + cell / 2, top + 89, array_left + (i + 0.5) * cell, array_top - 3, "m");
            } else {
                svg.line(x + cell / 2, top + 89, x + cell / 2, top + 124, "m", " stroke-dasharray=\"3 3\"");
            }
        }
    }
    svg.middle(710, 242, "i < n is false:");
    svg.middle(710, 257, "no access");
    svg.label(30, array_top + 18, "inp, out");
    for (int i = 0; i < n; i++) { svg.box(array_left + i * cell, array_top, cell, 28, "c", {text("[%d]", i)}); }
    svg.bold(30, 334, "i = blockIdx.x * blockDim.x + threadIdx.x");
    svg.label(330, 334, text("block 2, thread 1: 2 * %d + 1 = %d", block_size, 2 * block_size + 1));
    double elements = 64.0 * 1024 * 768;
    svg.label(30, 360,
              text("As measured: n = %s elements, %d threads per block, so %s blocks.", thousands(elements).c_str(),
                   256, thousands(elements / 256).c_str()));
    svg.label(
        30, 380,
        text("32 threads with consecutive indices are a warp: a block of %d threads has %d of them.", 256, 256 / 32));
    return svg;
}

// ---- coalescing: the sectors of memory that one load of a warp touches --------------------------------------

// One load of a warp: lane l reads `bytes` bytes from byte first(l) on.
static void draw_request(Svg& svg, double y, const std::string& title, int bytes, int (*first)(int lane)) {
    const double left = 76, cell = 22, sector_height = 17;
    const int num_lines = 32;
    std::vector<int> used(4 * num_lines, 0); // bytes of each sector that are asked for
    for (int lane = 0; lane < 32; lane++) {
        for (int b = first(lane); b < first(lane) + bytes; b++) { used[(size_t)b / 32]++; }
    }
    int moved = 0, asked = 32 * bytes;
    for (int u : used) { moved += u > 0 ? 32 : 0; }
    svg.bold(20, y, title);
    svg.label(780, y,
              text("asked: %d bytes; moved: %d sectors, %s bytes; used: %g%%", asked, moved / 32,
                   thousands(moved).c_str(), 100.0 * asked / moved),
              "end");
    svg.faint(20, y + 24, "lane");
    double memory = y + 74;
    svg.faint(20, memory + 13, "sector 0");
    for (int s = 1; s < 4; s++) { svg.faint(68, memory + 13 + s * sector_height, text("%d", s), "end"); }
    for (int lane = 0; lane < 32; lane++) {
        double x = left + lane * cell, line = first(lane) / 128;
        svg.box(x, y + 10, cell, 20, "a", {text("%d", lane)});
        svg.line(x + cell / 2, y + 31, left + (line + 0.5) * cell, memory - 2, "m");
    }
    for (int s = 0; s < 4 * num_lines; s++) {
        double x = left + s / 4 * cell, top = memory + s % 4 * sector_height;
        svg.rect(x, top, cell, sector_height,
                 used[(size_t)s] == 32 ? "c"
                 : used[(size_t)s]     ? "e"
                                       : "n",
                 used[(size_t)s] ? "" : " stroke-width=\"0.5\"");
        if (used[(size_t)s]) { svg.middle(x + cell / 2, top + 13, text("%d", used[(size_t)s])); }
    }
}

static Svg draw_coalescing() {
    Svg svg(
        800, 644, "One load of a warp: which sectors of memory it moves",
        "Memory: 32 lines of 128 bytes side by side, each of 4 sectors of 32 bytes. A sector moves whole or not at "
        "all.",
        "Three loads of a warp on 32 lines of memory. Kernel 1: 32 lanes read 64 bytes in two sectors. Kernel 4: each "
        "lane touches a line of its own, 32 sectors for 64 bytes. Kernel 5: 512 bytes in 16 sectors, all used.");
    draw_request(svg, 80, "kernel 1: neighbours, 2 bytes per lane", 2, [](int lane) { return lane * 2; });
    draw_request(svg, 262, "kernel 4: a run of 64 elements per lane", 2, [](int lane) { return lane * 64 * 2; });
    draw_request(svg, 444, "kernel 5: 128-bit vectors", 16, [](int lane) { return lane * 16; });
    svg.label(20, 610,
              "The number in a sector says how many of its 32 bytes this load asked for. simple_kernel.cu, bf16.");
    svg.label(20, 628, "Kernel 4 asks for the rest of each sector in its next 15 loads, if the cache still has it.");
    return svg;
}

// ---- bytes in flight: Little's law -----------------------------------------------------------------------------

static Svg draw_bytes_in_flight() {
    const double latency = 600e-9; // assumed
    Measured one = measured("simple_kernel", 1), vectors = measured("simple_kernel", 5),
             four = measured("simple_kernel", 6);
    double roof = one.copy_gbs / 2 / 1e3; // TB/s: half of what a copy moves is read
    Svg svg(
        800, 622, "Bytes in flight: what hides the latency of memory",
        "Little's law: bytes in flight = bandwidth x latency",
        "Above: a thread that loads one value at a time, and one that has four loads in flight. Below: the rate of "
        "reads grows in proportion to the bytes in flight per SM, until it meets the rate of a copy; three kernels of "
        "simple_kernel.cu as dots.");
    // two threads over time
    const double x0 = 180, wait = 128, use = 16, h = 15;
    svg.label(20, 90, "one load at a time");
    for (int i = 0; i < 4; i++) {
        double x = x0 + i * (wait + use);
        svg.rect(x, 78, wait, h + 2, "a");
        svg.middle(x + wait / 2, 91, text("load %d in flight", i));
        svg.rect(x + wait, 78, use, h + 2, "c");
    }
    svg.label(20, 142, "four loads in flight");
    for (int i = 0; i < 4; i++) {
        double x = x0 + i * use, y = 108 + i * h;
        svg.rect(x, y, wait, h, "a");
        svg.middle(x + wait / 2, y + 12, text("load %d in flight", i));
        svg.rect(x + wait, y, use, h, "c");
    }
    svg.label(400, 126, "The same four loads in a third of the time:");
    svg.label(400, 144, "the waits overlap.");
    svg.legend(400, 164, "c", "the value is used");
    // the rate against the bytes in flight
    const double left = 74, right = 770, top = 226, bottom = 520, most = 2.5;
    auto at_x = [&](double kb) { return left + (right - left) * log2(kb) / log2(256.0); };
    auto at_y = [&](double tbs) { return bottom - (bottom - top) * tbs / most; };
    svg.bold(20, 206, "reads, TB/s");
    for (int i = 0; i <= 5; i++) {
        svg.grid_line(left, at_y(i * 0.5), right, at_y(i * 0.5));
        svg.faint(left - 8, at_y(i * 0.5) + 4, text("%.1f", i * 0.5), "end");
    }
    for (int kb = 1; kb <= 256; kb *= 2) { svg.faint(at_x(kb), bottom + 18, text("%d", kb), "middle"); }
    svg.middle((left + right) / 2, bottom + 38, "KB in flight per SM (logarithmic)");
    auto rate = [&](double kb) { return std::min(roof, NUM_SMS * kb * 1024 / latency / 1e12); };
    std::vector<Point> curve;
    for (int i = 0; i <= 64; i++) {
        double kb = pow(2, i / 8.0);
        curve.push_back({at_x(kb), at_y(rate(kb))});
    }
    svg.polygon(curve, "l", false, " stroke-width=\"2\"");
    double enough = roof * 1e12 * latency / NUM_SMS; // bytes per SM
    svg.label(at_x(2.2), at_y(roof) - 8, text("half of the measured copy: %.2f TB/s", roof));
    svg.label(at_x(1.05), at_y(1.35), text("132 SMs x bytes / %.0f ns,", latency * 1e9));
    svg.label(at_x(1.05), at_y(1.35) + 16, text("if a load takes %.0f ns", latency * 1e9));
    struct {
        const Measured& m;
        int threads, bytes;
    } dots[] = {{one, 2048, 2}, {vectors, 2048, 16}, {four, occupancy(64, 40, 0).fits * 64, 64}};
    for (const auto& d : dots) {
        double kb = d.threads * d.bytes / 1024.0, tbs = d.m.bytes / 2 / d.m.ms / 1e9, x = at_x(kb), y = at_y(tbs);
        svg.dot(x, y, 5, "b");
        double down = d.m.kernel == 1 ? 4 : 30, to = d.m.kernel == 1 ? 14 : d.m.kernel == 6 ? 24 : 0;
        const char* anchor = d.m.kernel == 1 ? "start" : "middle";
        svg.label(x + to, y + down, text("kernel %d: %.2f TB/s,", d.m.kernel, tbs), anchor);
        svg.label(x + to, y + down + 16, text("%d threads x %d bytes", d.threads, d.bytes), anchor);
    }
    svg.label(
        20, 584,
        text("Enough by arithmetic: %.2f TB/s x %.0f ns = %.2f MB, that is %.1f KB per SM, %.1f bytes for each of 2048 "
             "threads.",
             roof, latency * 1e9, roof * latency * 1e6, enough / 1024, enough / 2048));
    svg.label(
        20, 604,
        "Dots: reads per second measured on an H200; bytes in flight are the most that the kernel's threads ask for.");
    return svg;
}

// ---- memory_hierarchy ---------------------------------------------------------------------------------------

static Svg draw_memory_hierarchy() {
    Measured copy = measured("simple_kernel", 1);
    struct {
        const char *name, *seen;
        double bytes, rate; // rate in bytes per second
        std::string size[2], speed[2];
    } levels[] = {
        {"registers",
         "one thread sees its own",
         NUM_SMS * 4.0 * NUM_REGISTERS,
         NUM_SMS * CLOCK * 128 * 3 * 4,
         {"132 SMs x 256 KB", "65,536 registers of 32 bits per SM"},
         {"by arithmetic: 128 FMAs per cycle and SM", "read 3 operands of 4 bytes each"}},
        {"shared memory, L1",
         "one block; L1: one SM",
         NUM_SMS * 256 * 1024.0,
         NUM_SMS * CLOCK * 128,
         {"132 SMs x 256 KB", "at most 227 KB per block, rest L1"},
         {"by arithmetic: 128 bytes per cycle and", "SM, 32 banks of 4 bytes"}},
        {"L2",
         "all SMs",
         60 * 1024 * 1024.0,
         CLOCK * 5120,
         {"as the driver reports it", ""},
         {"by arithmetic, if an H200 has the 5120", "bytes per cycle published for an A100"}},
        {"global memory (HBM)",
         "all SMs",
         141e9,
         copy.read_gbs * 1e9,
         {"NVIDIA's data sheet", ""},
         {text("measured read; a copy %.2f TB/s", copy.copy_gbs / 1e3), "(read + written)"}},
    };
    const double center = 400, half = 92, most = 268, row = 96, top = 84;
    Svg svg(
        800, 496, "The memories of an H200: the nearer, the smaller and the faster",
        "132 SMs at 1980 MHz, all SMs together. Both scales are logarithmic.",
        "Four levels from registers to global memory. To the left bars of their size, growing from 35 MB to 141 GB; to "
        "the right bars of their bandwidth, shrinking from 401 to 4.5 TB/s.");
    svg.bold(center - half - 12, top - 8, "size", "end");
    svg.bold(center + half + 12, top - 8, "bandwidth");
    for (int i = 0; i < 4; i++) {
        const auto& l = levels[i];
        double y = top + i * row, w = most * log10(l.bytes / 5e6) / log10(150e9 / 5e6);
        svg.box(center - half, y, 2 * half, 66, "g", {l.name, l.seen}, true);
        if (i < 3) {
            svg.arrow(center - 14, y + 68, center - 14, y + row - 2);
            svg.arrow(center + 14, y + row - 2, center + 14, y + 68);
        }
        svg.rect(center - half - 8 - w, y, w, 24, "a");
        std::string size = l.bytes > 1e9 ? text("%.0f GB", l.bytes / 1e9) : text("%.0f MB", l.bytes / 1e6);
        svg.bold(center - half - 14, y + 17, size, "end");
        for (int k = 0; k < 2; k++) { svg.label(center - half - 12, y + 42 + 16 * k, l.size[k], "end"); }
        w = most * log10(l.rate / 5e11) / log10(450 / 0.5);
        svg.rect(center + half + 8, y, w, 24, "b");
        svg.bold(center + half + 14, y + 17,
                 text(l.rate > 1e14   ? "%.0f TB/s"
                      : l.rate > 1e13 ? "%.1f TB/s"
                                      : "%.2f TB/s",
                      l.rate / 1e12));
        for (int k = 0; k < 2; k++) { svg.label(center + half + 12, y + 42 + 16 * k, l.speed[k]); }
    }
    svg.label(20, 462,
              "Bandwidth counts reads. By arithmetic: what the units move at most in every cycle. Measured: "
              "simple_kernel.csv.");
    svg.label(20, 480, "KB of an SM are 1024 bytes; MB, GB and TB are powers of 1000.");
    return svg;
}

// ---- softmax_passes: softmax_forward.cu, kernels 3, 4 and 8 ---------------------------------------------------

// softmax_add of kernel 4
static void softmax_add(float& max, float& sum, float x) {
    if (x > max) {
        sum *= expf(max - x);
        max = x;
    }
    sum += expf(x - max);
}

static Svg draw_softmax_passes() {
    const double left = 196, bar = 420, right = left + bar + 16, h = 24;
    Svg svg(
        800, 490, "Softmax of one row: how often the row is read",
        "softmax_forward.cu. A bar is a pass over a row of 50,257 logits, 100 KB in bf16. Times: H200, B=8, T=1024.",
        "Kernels 1 to 3 make three passes over the row in memory: maximum, sum, result. Kernels 4 to 6 make two, with "
        "the online softmax. Kernel 8 reads the row once into shared memory. Below, the online softmax on four "
        "numbers.");
    double y = 72;
    auto pass = [&](const char* color, const std::string& words) {
        svg.rect(left, y, bar, h, color);
        svg.label(left + 10, y + 16, words);
        svg.arrow(left + bar - 60, y + h / 2, left + bar - 8, y + h / 2);
        y += h + 5;
    };
    auto head = [&](const char* kernels, const char* idea, const char* passes, std::vector<int> timed) {
        svg.bold(20, y + 16, kernels);
        svg.label(20, y + 34, idea);
        svg.label(right, y + 16, passes);
        for (size_t i = 0; i < timed.size(); i++) {
            svg.label(right, y + 34 + 16 * (double)i,
                      text("kernel %d: %.3f ms", timed[i], measured("softmax_forward", timed[i]).ms));
        }
    };
    head("kernels 1 to 3", "three passes", "3 reads, 1 write", {3});
    pass("a", "pass 1 reads x: max of x");
    pass("a", "pass 2 reads x: sum of exp(x - max)");
    pass("b", "pass 3 reads x, writes exp(x - max) / sum");
    y += 22;
    head("kernels 4 to 6", "online softmax", "2 reads, 1 write", {4, 5});
    pass("a", "pass 1 reads x: max and sum, together");
    pass("b", "pass 2 reads x, writes exp(x - max) / sum");
    svg.faint(left, y + 12, "kernel 5 adds 128-bit vectors to kernel 4");
    y += 40;
    head("kernel 8", "row in shared memory", "1 read, 1 write", {8});
    pass("a", "cp.async: x into shared memory; max and sum");
    pass("c", "reads shared memory, writes the result");
    y += 18;
    svg.line(20, y, 780, y, "m");
    y += 24;
    svg.bold(20, y, "Online softmax: when x exceeds max, sum is multiplied by exp(old max - new max)");
    const float xs[] = {2, 1, 4, 3};
    float max = -INFINITY, sum = 0;
    svg.label(20, y + 26, "x");
    svg.label(20, y + 50, "max");
    svg.label(20, y + 74, "sum");
    for (int i = 0; i < 4; i++) {
        double x = 66 + i * 180;
        float old_max = max, old_sum = sum;
        softmax_add(max, sum, xs[i]);
        svg.box(x, y + 11, 164, 22, "a", {text("%g", xs[i])});
        svg.box(x, y + 35, 164, 22, max > old_max ? "e" : "n",
                {text(max > old_max && i ? "%g (was %g)" : "%g", max, old_max)});
        std::string how = i == 0          ? text("exp(0) = %.2f", sum)
                          : max > old_max ? text("%.2f exp(%g) + 1 = %.2f", old_sum, old_max - max, sum)
                                          : text("%.2f + exp(%g) = %.2f", old_sum, xs[i] - max, sum);
        svg.box(x, y + 59, 164, 22, "n", {how});
    }
    return svg;
}

// ---- reduction_tree: warp_sum and block_reduce of llmc/cuda_common.cuh ------------------------------------------

static Svg draw_reduction_tree() {
    const double left = 88, step = 22, row = 52, top = 66;
    Svg svg(
        800, 548, "warp_sum: five shuffles add up 32 lanes, and every lane gets the sum",
        "x += __shfl_xor_sync(0xFFFFFFFF, x, offset). The number in a box: from how many lanes its sum is.",
        "32 lanes in six rows. In each step a lane adds the value of the lane whose number differs in one bit: 16, 8, "
        "4, 2, 1. After five steps each lane has the sum of all 32. The inputs of lane 0 are drawn with thick lines.");
    std::vector<unsigned> has(32); // bit i: the value of lane i is in this lane's sum
    std::vector<int> rows_of_lane0[6];
    rows_of_lane0[5] = {0};
    for (int s = 4; s >= 0; s--) {
        for (int lane : rows_of_lane0[s + 1]) {
            rows_of_lane0[s].push_back(lane);
            rows_of_lane0[s].push_back(lane ^ (16 >> s));
        }
    }
    for (int lane = 0; lane < 32; lane++) { has[(size_t)lane] = 1u << lane; }
    auto center = [&](int lane) { return left + (lane + 0.5) * step; };
    for (int s = 0; s <= 5; s++) {
        double y = top + 22 + s * row;
        if (s > 0) {
            int offset = 32 >> s;
            std::vector<unsigned> before = has;
            const auto& wanted = rows_of_lane0[s];
            for (int pass = 0; pass < 2; pass++) { // thick lines last
                for (int lane = 0; lane < 32; lane++) {
                    bool thick = std::find(wanted.begin(), wanted.end(), lane) != wanted.end();
                    if (thick != (pass == 1)) { continue; }
                    for (int from : {lane, lane ^ offset}) {
                        svg.line(center(from), y - row + 17, center(lane), y - 1, thick ? "l" : "m",
                                 thick ? " stroke-width=\"1.5\"" : " stroke-width=\"0.7\"");
                    }
                }
            }
            for (int lane = 0; lane < 32; lane++) {
                has[(size_t)lane] = before[(size_t)lane] | before[(size_t)(lane ^ offset)];
            }
            svg.label(20, y - 12, text("offset %d", offset));
        }
        for (int lane = 0; lane < 32; lane++) {
            bool thick = std::find(rows_of_lane0[s].begin(), rows_of_lane0[s].end(), lane) != rows_of_lane0[s].end();
            int count = 0;
            for (unsigned bits = has[(size_t)lane]; bits; bits &= bits - 1) { count++; }
            svg.box(center(lane) - 10, y, 20, 17, s == 5 ? "c" : thick ? "b" : "a", {text("%d", count)});
        }
        if (s == 0) {
            svg.faint(20, top + 14, "lane");
            for (int lane = 0; lane < 32; lane++) { svg.faint(center(lane), top + 14, text("%d", lane), "middle"); }
        }
    }
    double y = top + 22 + 5 * row + 40;
    svg.line(20, y, 780, y, "m");
    svg.bold(20, y + 24, "block_reduce: two rounds of warp_sum, here a block of 256 threads");
    const int num_warps = 256 / 32;
    for (int w = 0; w < num_warps; w++) {
        double x = left + w * 88;
        svg.box(x, y + 36, 80, 24, "a", {text("warp %d: sum", w)});
        svg.arrow(x + 40, y + 61, x + 40, y + 77);
        svg.box(x, y + 78, 80, 22, "d", {text("shared[%d]", w)});
    }
    svg.label(20, y + 118,
              "__syncthreads(); then every warp reads shared[lane], 0 for lane >= 8, and sums once more by warp_sum:");
    svg.label(20, y + 136,
              "all 256 threads have the sum, with the same bits in every run, because the order is fixed.");
    return svg;
}

// ---- attention_tiles: attention_forward.cu, kernel 18 ----------------------------------------------------------

static Svg draw_attention_tiles() {
    const int T = 1024, tile = 128, n = T / tile;
    const double left = 116, top = 106, cell = 40;
    int full = 0, diagonal = 0, skipped = 0;
    Svg svg(800, 516, "Causal attention in tiles of 128 queries x 128 keys",
            "attention_forward.cu, kernel 18, T = 1024. A block owns one row of tiles: 128 queries of one head.",
            "A square of 8 by 8 tiles. Tiles below the diagonal are computed whole, tiles on the diagonal with a mask, "
            "tiles above it are skipped. A block starts on the diagonal and goes left. Beside it the first keys of a "
            "diagonal tile: a query sees the keys up to its own position.");
    svg.middle(left + n * cell / 2, top - 26, "keys");
    for (int q = 0; q < n; q++) {
        svg.faint(left + (q + 0.5) * cell, top - 8, text("%d..", q * tile), "middle");
        svg.faint(left - 8, top + q * cell + 24, text("%d..", q * tile), "end");
        for (int k = 0; k < n; k++) {
            double x = left + k * cell, y = top + q * cell;
            int first_key = k * tile, last_key = first_key + tile - 1, first_query = q * tile,
                last_query = first_query + tile - 1;
            if (first_key > last_query) { // no query of the tile sees any of these keys
                skipped++;
                svg.rect(x, y, cell, cell, "n", " stroke-dasharray=\"2 3\"");
                continue;
            }
            bool masked = last_key > first_query;
            (masked ? diagonal : full)++;
            svg.rect(x, y, cell, cell, masked ? "n" : "a");
            if (masked) {
                svg.polygon({{x, y}, {x, y + cell}, {x + cell, y + cell}}, "b");
                svg.hatch({{x, y}, {x + cell, y}, {x + cell, y + cell}});
            }
            // kernel 9 loads the keys (work.tile - step) * 128 in step `step`
            svg.middle(x + (masked ? 11 : cell / 2), y + (masked ? 32 : 25), text("%d", q - k));
        }
    }
    svg.label(20, top - 26, "queries");
    double y = top + n * cell + 24;
    svg.label(20, y,
              "Number in a tile: the step in which the block computes it. The diagonal comes first, then the tiles to "
              "its left.");
    double x = svg.legend(20, y + 22, "a", text("whole: %d tiles", full));
    svg.polygon({{x, y + 12}, {x, y + 24}, {x + 16, y + 24}}, "b");
    svg.hatch({{x, y + 12}, {x + 16, y + 12}, {x + 16, y + 24}});
    x = svg.legend(x, y + 22, "n", text("masked, on the diagonal: %d", diagonal));
    x = svg.legend(x, y + 22, "n", text("skipped: %d", skipped));
    svg.label(20, y + 44,
              text("%d of %d tiles are computed, %.0f%%. The T x T matrix of scores is never in memory: a tile of it "
                   "lives in registers.",
                   full + diagonal, n * n, 100.0 * (full + diagonal) / (n * n)));
    const double zoom = 512, size = 27;
    svg.bold(zoom - 20, top - 26, "a corner of a diagonal tile");
    svg.label(zoom - 20, top + 24, "query");
    for (int q = 0; q < 8; q++) {
        svg.faint(zoom + 14, top + 44 + q * size + 18, text("%d", q), "end");
        svg.faint(zoom + 24 + (q + 0.5) * size, top + 38, text("%d", q), "middle");
        for (int k = 0; k < 8; k++) {
            bool masked = k > q;
            svg.rect(zoom + 24 + k * size, top + 44 + q * size, size, size, masked ? "n" : "b");
            if (masked) { svg.hatch(zoom + 24 + k * size, top + 44 + q * size, size, size); }
        }
    }
    svg.middle(zoom + 24 + 4 * size, top + 20, "key");
    svg.label(zoom - 20, top + 44 + 8 * size + 24, "hatched: key > query, score = -infinity");
    return svg;
}

// ---- banks: unpadded, padded, swizzled tiles ------------------------------------------------------------------

// The position, in chunks of 16 bytes, of chunk c of row r, for rows of 64 16-bit elements.
static int chunk_unpadded(int r, int c) { return r * 8 + c; }
static int chunk_padded(int r, int c) { return r * 9 + c; }               // attention_forward.cu, kernel 7: HS + 8
static int chunk_swizzled(int r, int c) { return r * 8 + (c ^ (r % 8)); } // attention_forward_at, and TMA's swizzle

static void draw_chunks(Svg& svg, double left, const char* name, const char* formula, const char* used_by,
                        int (*at)(int r, int c)) {
    const double top = 140, cell = 28, height = 22;
    const int wanted = 2, num_rows = 8; // ldmatrix reads one chunk of 8 rows at once
    svg.bold(left, 84, name);
    svg.label(left, 102, formula);
    int lanes_of[8] = {};
    int last_line = 0;
    for (int group = 0; group < 8; group++) {
        svg.faint(left + (group + 0.5) * cell, top - 8, text("%d", group), "middle");
    }
    for (int r = 0; r < num_rows; r++) {
        for (int c = 0; c < 8; c++) {
            int chunk = at(r, c), line = chunk / 8, group = chunk % 8;
            last_line = std::max(last_line, line);
            lanes_of[group] += c == wanted;
            svg.box(left + group * cell, top + line * height, cell, height, c == wanted ? "b" : "n",
                    {text("%d.%d", r, c)}, c == wanted,
                    c == wanted ? " stroke-width=\"2.5\"" : " stroke-width=\"0.5\"");
        }
    }
    int conflicts = *std::max_element(lanes_of, lanes_of + 8);
    double y = top + 9 * height + 20;
    svg.bold(left, y, text("%d wavefront%s", conflicts, conflicts == 1 ? "" : "s"));
    svg.label(left, y + 18, conflicts == 1 ? "8 rows, 8 groups: no conflict" : "8 rows, one group: one by one");
    svg.faint(left, y + 36, used_by);
}

static Svg draw_banks() {
    Svg svg(800, 552, "Shared memory has 32 banks of 4 bytes: reading a column of a tile",
            "Tile of 8 rows of 128 bytes. A cell, row.chunk, is 16 bytes in a group of 4 banks. 8 lanes read chunk 2, "
            "one row each.",
            "Three layouts of a tile of 8 rows of 8 chunks. Unpadded, chunk 2 of all rows lies in the same banks. "
            "Padded by "
            "16 bytes per row, and swizzled, it lies in eight different groups. Below, a column of 32x32 and 32x33 "
            "floats.");
    draw_chunks(svg, 30, "unpadded", "group = chunk", "as the rows come from memory", chunk_unpadded);
    draw_chunks(svg, 288, "padded: 144 bytes per row", "group = (9 * row + chunk) % 8",
                "attention 7; empty cells: padding", chunk_padded);
    draw_chunks(svg, 546, "swizzled: 128 bytes per row", "group = chunk ^ (row % 8)", "attention 11 and later, TMA",
                chunk_swizzled);
    double y = 418;
    svg.line(20, y, 780, y, "m");
    svg.bold(20, y + 22, "A column of floats, tile[lane][0]: how many of the 32 lanes fall into each bank");
    for (int pitch = 32; pitch <= 33; pitch++) {
        double top = y + 52 + (pitch - 32) * 40;
        int lanes_of[32] = {};
        for (int lane = 0; lane < 32; lane++) { lanes_of[lane * pitch % 32]++; }
        svg.label(20, top + 14, text("[32][%d]", pitch));
        for (int bank = 0; bank < 32; bank++) {
            double x = 84 + bank * 18.5;
            if (pitch == 32 && bank % 4 == 0) { svg.faint(x + 9, top - 5, text("%d", bank), "middle"); }
            svg.box(x, top, 18.5, 20, lanes_of[bank] ? "b" : "n", {text("%d", lanes_of[bank])});
        }
        int most = *std::max_element(lanes_of, lanes_of + 32);
        svg.label(686, top + 14, text("%d wavefront%s", most, most == 1 ? "" : "s"));
    }
    return svg;
}

// ---- mma_fragments: mma_16x8x16 of llmc/ptx.cuh -----------------------------------------------------------------

// The elements of operands and accumulator that a lane holds, as in llmc/ptx.cuh: row and column of the first of the
// two elements in register r. The second one is the next column, for b the next row.
static Point fragment_a(int lane, int r) { return {lane % 4 * 2.0 + r / 2 * 8, lane / 4 + r % 2 * 8.0}; }
static Point fragment_b(int lane, int r) { return {lane / 4 + 0.0, lane % 4 * 2.0 + r * 8}; }
static Point fragment_d(int lane, int r) { return {lane % 4 * 2.0, lane / 4 + r * 8.0}; } // r: d[2r], d[2r + 1]

static void draw_fragment(Svg& svg, double left, double top, double element_width, double element_height, int width,
                          int height, bool vertical, int num_registers, Point (*at)(int lane, int r)) {
    const char* colors[] = {"a", "b", "c", "d"};
    const int chosen = 5; // this lane is marked
    std::vector<int> covered((size_t)(width * height), 0);
    for (int pass = 0; pass < 2; pass++) {
        for (int r = 0; r < num_registers; r++) {
            for (int lane = 0; lane < 32; lane++) {
                if ((lane == chosen) != (pass == 1)) { continue; }
                Point p = at(lane, r);
                covered[(size_t)(p.y * width + p.x)]++;
                covered[(size_t)((p.y + vertical) * width + p.x + !vertical)]++;
                svg.box(left + p.x * element_width, top + p.y * element_height, element_width * (vertical ? 1 : 2),
                        element_height * (vertical ? 2 : 1), colors[r], {text("%d", lane)}, lane == chosen,
                        lane == chosen ? " stroke-width=\"3\"" : " stroke-width=\"0.6\"");
            }
        }
    }
    for (int c : covered) {
        if (c != 1) { svg.problem("an element of a fragment is held by no lane, or by two"); }
    }
}

static Svg draw_mma_fragments() {
    const double a_left = 84, d_left = 462, bottom_top = 298, b_top = 84, unit = 17;
    Svg svg(
        800, 658, "mma.sync m16n8k16: which lane holds which elements",
        "d (16x8) += a (16x16) b (16x8). Each cell is two elements in one lane; its number is the lane. Lane 5 is "
        "marked.",
        "The operand a below left, b above right, the accumulator d below right, as in a product by hand. Each cell of "
        "two elements names its lane: lane = 4 g + t, with g = lane / 4 and t = lane % 4.");
    draw_fragment(svg, a_left, bottom_top, 18, unit + 2, 16, 16, false, 4, fragment_a);
    draw_fragment(svg, d_left, b_top, 30, 12, 8, 16, true, 2, fragment_b);
    draw_fragment(svg, d_left, bottom_top, 30, unit + 2, 8, 16, false, 2, fragment_d);
    const double half = 8 * (unit + 2);
    svg.label(a_left - 10, bottom_top + half / 2 + 4, "a[0]", "end");
    svg.label(a_left - 10, bottom_top + half * 1.5 + 4, "a[1]", "end");
    svg.label(a_left + 298, bottom_top + half / 2 + 4, "a[2]");
    svg.label(a_left + 298, bottom_top + half * 1.5 + 4, "a[3]");
    svg.label(d_left + 250, b_top + 52, "b[0]");
    svg.label(d_left + 250, b_top + 148, "b[1]");
    svg.label(d_left + 250, bottom_top + half / 2 + 4, "d[0], d[1]");
    svg.label(d_left + 250, bottom_top + half * 1.5 + 4, "d[2], d[3]");
    svg.bold(d_left, b_top - 10, "b: 16 (k) x 8 (n), cells of two rows");
    svg.bold(a_left, bottom_top - 8, "a: 16 (m) x 16 (k), cells of two columns");
    svg.bold(d_left, bottom_top - 8, "d: 16 (m) x 8 (n) in fp32, cells of two columns");
    const double notes = 20;
    svg.bold(notes, 92, "lane = 4 g + t, t = 0..3, g = 0..7");
    const char* lines[] = {"a[0]: row g, columns 2t, 2t+1",       "a[1]: row g+8, columns 2t, 2t+1",
                           "a[2]: row g, columns 2t+8, 2t+9",     "a[3]: row g+8, columns 2t+8, 2t+9",
                           "b[0]: rows 2t, 2t+1, column g",       "b[1]: rows 2t+8, 2t+9, column g",
                           "d[0], d[1]: row g, columns 2t, 2t+1", "d[2], d[3]: row g+8, columns 2t, 2t+1"};
    for (int i = 0; i < 8; i++) { svg.label(notes, 114 + 18 * i, lines[i]); }
    svg.label(
        20, 634,
        "A row of d is in four lanes, a quad: two shuffles, xor 1 and 2, complete the maximum or the sum of a row.");
    return svg;
}

// ---- gemm_tiles: matmul_forward.cu, kernels 13 and 7 --------------------------------------------------------------

static void draw_gemm_matrices(Svg& svg) {
    const double cell = 40, left = 130, top = 152, strip = 96;
    const int rows = 4, columns = 5, row = 1, column = 3;
    svg.bold(20, 78, "1. the grid: one block per 128x128 tile of out");
    for (int j = 0; j < columns; j++) { svg.rect(left + j * cell, top - 66, cell, 58, j == column ? "b" : "n"); }
    for (int i = 0; i < rows; i++) {
        svg.rect(left - 8 - strip, top + i * cell, strip, cell, i == row ? "a" : "n");
        for (int j = 0; j < columns; j++) {
            bool is_tile = i == row && j == column;
            svg.rect(left + j * cell, top + i * cell, cell, cell, is_tile ? "c" : "n",
                     is_tile ? " stroke-width=\"2.5\"" : "");
        }
    }
    for (int k = 1; k < 6; k++) { // the strips are walked in steps of 32 columns
        svg.line(left - 8 - strip + k * 16, top + row * cell, left - 8 - strip + k * 16, top + (row + 1) * cell, "m");
        svg.line(left + column * cell, top - 66 + k * 9.7, left + (column + 1) * cell, top - 66 + k * 9.7, "m");
    }
    svg.arrow(left - 8 - strip, top + (row + 0.5) * cell, left - 14, top + (row + 0.5) * cell);
    svg.arrow(left + (column + 0.5) * cell, top - 66, left + (column + 0.5) * cell, top - 13);
    svg.middle(left - 8 - strip / 2, top + rows * cell + 18, "inp (N,C)");
    svg.middle(left + columns * cell / 2, top + rows * cell + 18, "out (N,OC)");
    svg.label(left - 14, top - 46, "weight^T", "end");
    svg.label(left - 14, top - 30, "(C,OC)", "end");
}

static Svg draw_gemm_tiles() {
    Svg svg(800, 628, "A matrix product in tiles: block, warp, fragment, thread",
            "matmul_forward.cu: 1 to 3 are kernel 13 (tensor cores), 4 is kernel 7 (fp32 arithmetic). Sizes are rows x "
            "columns.",
            "Four pictures, each inside the one before. A block computes a tile of 128x128 of out and walks along C in "
            "steps "
            "of 32. Eight warps share the tile, 64x32 each. A warp's tile is 16 fragments of 16x8. In kernel 7 a "
            "thread has "
            "four squares of 4x4.");
    draw_gemm_matrices(svg);
    const double size = 224, right = 440, top = 92;
    svg.bold(right, 78, "2. the tile of a block: 8 warps, 64x32 each");
    for (int warp = 0; warp < 8; warp++) { // kernel 13: warp_row, warp_col
        int warp_row = warp / 4 * 64, warp_col = warp % 4 * 32;
        bool chosen = warp == 6;
        svg.box(right + warp_col * size / 128, top + warp_row * size / 128, 32 * size / 128, 64 * size / 128,
                chosen ? "b" : "c", {text("warp %d", warp)}, chosen, chosen ? " stroke-width=\"2.5\"" : "");
    }
    svg.label(right + size + 12, top + 20, "128x128");
    svg.label(right + size + 12, top + 38, "256 threads");
    double y = 372;
    svg.bold(20, y, "3. the tile of a warp: 16 fragments of 16x8");
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            bool chosen = i == 0 && j == 1;
            svg.box(34 + j * 42, y + 14 + i * 56, 42, 56, "b", {"16x8", text("%d, %d", i, j)}, chosen,
                    chosen ? " stroke-width=\"2.5\"" : " stroke-width=\"0.8\"");
        }
    }
    const char* notes[] = {"64x32; in a cell: i, j",
                           "",
                           "A lane has 4 values of",
                           "each: sum[i][4j .. 4j+3].",
                           "",
                           "Per 16 columns of C, 4",
                           "fragments of inp and 4 of",
                           "weight feed 16 mma.sync."};
    for (int i = 0; i < 8; i++) { svg.label(220, y + 32 + 17 * i, notes[i]); }
    svg.bold(right, y, "4. kernel 7: a thread has 8x8 of 128x128");
    svg.rect(right, y + 14, size, size, "n");
    svg.line(right + size / 2, y + 14, right + size / 2, y + 14 + size, "m");
    svg.line(right, y + 14 + size / 2, right + size, y + 14 + size / 2, "m");
    const int thread = 85, tx = thread % 16 * 4, ty = thread / 16 * 4;
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) { // rows y .. y+3 and y+64 .. y+67, columns x .. x+3 and x+64 .. x+67
            int r = i / 4 * 64 + ty + i % 4, c = j / 4 * 64 + tx + j % 4;
            svg.rect(right + c * size / 128, y + 14 + r * size / 128, size / 128, size / 128, "d",
                     " stroke-width=\"0.5\"");
        }
    }
    svg.label(right + size + 12, y + 32, text("thread %d:", thread));
    svg.label(right + size + 12, y + 50, text("x = %d, y = %d", tx, ty));
    svg.label(right + size + 12, y + 76, "rows and columns");
    svg.label(right + size + 12, y + 94, text("%d-%d, %d-%d", ty, ty + 3, ty + 64, ty + 67));
    return svg;
}

// ---- double_buffer: attention_forward.cu, kernels 9 and 10 -----------------------------------------------------

static Svg draw_double_buffer() {
    const int n = 4;
    const double load = 3, products = 4, left = 116, unit = 23;
    Svg svg(
        800, 452, "Double buffering: cp.async loads the next tile while this one is used",
        "attention_forward.cu. Chosen lengths: a load of keys and values 3 units of time, the products with them 4.",
        "Two timelines of four tiles. With one buffer, loads and arithmetic take turns. With two stages, the load of a "
        "tile runs during the arithmetic of the tile before it, in the other stage.");
    auto bar = [&](double from, double to, double y, const char* color, const std::string& words) {
        svg.box(left + from * unit, y, (to - from) * unit, 26, color, {words});
    };
    // kernel 9: load, barrier, products, barrier
    double y = 96, time = 0;
    svg.bold(20, y - 14, "kernel 9: one buffer");
    svg.label(20, y + 17, "buffer");
    for (int tile = 0; tile < n; tile++) {
        bar(time, time + load, y, "a", text("load %d", tile));
        bar(time + load, time + load + products, y, "c", text("products %d", tile));
        time += load + products;
    }
    svg.label(left + time * unit, y + 44, text("%g units", time), "end");
    // kernel 10: in step `tile` the load of the next tile is issued once this tile has landed and the one before is used
    y = 186;
    svg.bold(20, y - 14, "kernel 10: two stages");
    svg.label(20, y + 17, "stage 0");
    svg.label(20, y + 49, "stage 1");
    std::vector<double> landed(n + 1, load), begins(n);
    double end = 0;
    bar(0, load, y, "a", "load 0");
    for (int tile = 0; tile < n; tile++) {
        double begin = std::max(end, landed[(size_t)tile]);
        if (tile + 1 < n) {
            landed[(size_t)tile + 1] = begin + load;
            bar(begin, begin + load, y + (tile + 1) % 2 * 32, "a", text("load %d", tile + 1));
        }
        end = begin + products;
        begins[(size_t)tile] = begin;
        bar(begin, end, y + tile % 2 * 32, "c", text("products %d", tile));
    }
    for (int tile = 0; tile < n; tile++) {
        double x = left + begins[(size_t)tile] * unit;
        svg.line(x, y - 6, x, y + 84, "l", " stroke-dasharray=\"4 3\"");
        svg.middle(x, y + 98, text("wait %d", tile));
    }
    svg.label(left + end * unit + 10, y + 34, text("%g units", end));
    svg.faint(20, y + 98, "barrier");
    y = 318;
    svg.line(20, y, 780, y, "m");
    svg.bold(20, y + 24, "At each dashed line, for tile i:");
    const char* steps[] = {
        "1. cp_async_wait<0>: this thread's copies of tile i have landed.",
        "2. __syncthreads: so have those of all threads, and all have used tile i - 1.",
        "3. cp_async for tile i + 1, into stage (i + 1) % 2, which tile i - 1 has left; cp_async_commit.",
        "4. The products of tile i, while the copies are in flight."};
    for (int i = 0; i < 4; i++) { svg.label(36, y + 46 + 20 * i, steps[i]); }
    return svg;
}

// ---- producer_consumer: the ring of gemm.cuh --------------------------------------------------------------------

static Svg draw_producer_consumer() {
    const int ring = 4, steps_per_tile = 3, num_steps = 9;
    const double load = 1.5, left = 128, unit = 60, h = 30, top = 96;
    Svg svg(
        800, 516, "A ring of four stages: full and empty barriers over time",
        "gemm.cuh, here with 3 steps per tile. Chosen lengths: a load 1.5 units of time, the products of a step 1.",
        "Four rows, the stages of the ring, over time. In each, loads, full stages that wait and products follow each "
        "other. A filled dot is a full barrier that completes, an open one an empty barrier. Below, the products of "
        "two consumers, and the parities that the two sides wait for.");
    auto at = [&](double time) { return left + time * unit; };
    std::vector<double> issued(num_steps), full(num_steps), begin(num_steps), done(num_steps);
    for (int i = 0; i < num_steps; i++) {
        size_t s = (size_t)i;
        issued[s] = i < ring ? 0 : done[(size_t)(i - ring)]; // the empty barrier of its stage
        full[s] = issued[s] + load;
        begin[s] = std::max(full[s], i ? done[s - 1] : 0);
        done[s] = begin[s] + 1;
    }
    double last = at(done[num_steps - 1]);
    for (int s = 0; s < ring; s++) { svg.label(20, top + s * 38 + 20, text("stage %d", s)); }
    for (int i = 0; i < num_steps; i++) {
        size_t s = (size_t)i;
        double y = top + i % ring * 38;
        svg.box(at(issued[s]), y, load * unit, h, "a", {text("load %d", i)});
        if (begin[s] > full[s]) {
            svg.rect(at(full[s]), y, (begin[s] - full[s]) * unit, h, "n");
            svg.hatch(at(full[s]), y, (begin[s] - full[s]) * unit, h);
        }
        svg.box(at(begin[s]), y, unit, h, "c", {text("prod. %d", i)});
    }
    for (int i = 0; i < num_steps; i++) { // over the bars
        size_t s = (size_t)i;
        svg.dot(at(full[s]), top + i % ring * 38, 4.5, "t");
        svg.dot(at(done[s]), top + i % ring * 38, 4.5, "card l");
    }
    double y = top + ring * 38 + 12;
    for (int consumer = 0; consumer < 2; consumer++) {
        svg.label(20, y + consumer * 34 + 18, text("consumer %d", consumer));
        for (int tile = consumer; tile < num_steps / steps_per_tile; tile += 2) {
            size_t first = (size_t)(tile * steps_per_tile), end = first + steps_per_tile - 1;
            svg.box(at(begin[first]), y + consumer * 34, (done[end] - begin[first]) * unit, 26, "d",
                    {text("tile %d: products %zu to %zu", tile, first, end)});
        }
    }
    for (int t = 0; t <= (int)done[num_steps - 1]; t++) { svg.faint(at(t), top - 10, text("%d", t), "middle"); }
    svg.faint(20, top - 10, "time");
    svg.line(last, top - 14, last, top - 14, "m");
    y += 94;
    double x = svg.legend(20, y, "a", "load in flight");
    x = svg.legend(x, y, "n", "full, waits for a consumer", true);
    x = svg.legend(x, y, "c", "products");
    svg.dot(x + 4, y - 4, 4.5, "t");
    svg.label(x + 14, y, "full completes");
    svg.dot(x + 130, y - 4, 4.5, "card l");
    svg.label(x + 140, y, "empty completes");
    y += 18;
    svg.line(20, y, 780, y, "m");
    svg.label(20, y + 22, "step i");
    svg.label(20, y + 44, "stage i % 4");
    svg.label(20, y + 66, "consumer waits for parity i / 4 % 2 of full");
    svg.label(20, y + 88, "producer waits for parity (i / 4 + 1) % 2 of empty");
    for (int i = 0; i < num_steps; i++) { // gemm_load and gemm_multiply
        double column = 390 + i * 44;
        svg.bold(column, y + 22, text("%d", i), "middle");
        svg.middle(column, y + 44, text("%d", i % ring));
        svg.middle(column, y + 66, text("%d", i / ring % 2));
        svg.middle(column, y + 88, text("%d", (i / ring + 1) % 2));
    }
    svg.faint(20, y + 114, "On a fresh barrier a wait for parity 1 returns at once: the first four loads do not wait.");
    return svg;
}

// ---- multicast: clusters of two blocks in gemm.cuh ---------------------------------------------------------------

static Svg draw_multicast() {
    const int rows = 128, columns = 192, depth = 64, bytes = 2, cluster = 2;
    const double inp_kb = rows * depth * bytes / 1024.0, weight_kb = columns * depth * bytes / 1024.0;
    const double each = cluster * (inp_kb + weight_kb), shared = cluster * inp_kb + weight_kb;
    Svg svg(800, 486, "Multicast: two blocks of a cluster share a tile of the weight",
            "gemm.cuh, GemmPair: one step of 64 columns. The tiles of the two blocks lie one below the other in out.",
            "In L2 above: a tile of inp for each block, and the two halves of a tile of the weight. Each block loads "
            "its own "
            "tile of inp, and one half of the weight into the shared memory of both blocks.");
    svg.rect(20, 64, 760, 92, "g");
    svg.bold(32, 84, "L2: the operands of one step");
    const double x0 = 40, width = 160, y = 96, h = 48, block_top = 236;
    svg.box(x0, y, width, h, "a", {"inp, rows of block 0", text("%dx%d, %g KB", rows, depth, inp_kb)});
    svg.box(x0 + 190, y, width, h, "b", {"weight, rows 0-95", text("%dx%d, %g KB", columns / 2, depth, weight_kb / 2)});
    svg.box(x0 + 370, y, width, h, "d",
            {"weight, rows 96-191", text("%dx%d, %g KB", columns / 2, depth, weight_kb / 2)});
    svg.box(x0 + 560, y, width, h, "a", {"inp, rows of block 1", text("%dx%d, %g KB", rows, depth, inp_kb)});
    for (int rank = 0; rank < cluster; rank++) {
        double left = 20 + rank * 390;
        svg.rect(left, block_top, 370, 130, "n", " stroke-width=\"2\"");
        svg.bold(left + 12, block_top + 118, text("block %d of the cluster: one stage in shared memory", rank));
        double inp = rank == 0 ? left + 12 : left + 252, weight = rank == 0 ? left + 126 : left + 12;
        svg.box(inp, block_top + 22, 106, 62, "a", {text("inp %d", rank), text("%dx%d", rows, depth)});
        svg.box(weight, block_top + 22, 116, 62, "b", {"weight", "rows 0-95"});
        svg.box(weight + 116, block_top + 22, 116, 62, "d", {"weight", "rows 96-191"});
    }
    svg.arrow(x0 + 60, y + h + 2, 85, block_top + 20, "l", " stroke-width=\"1.5\"");
    svg.arrow(x0 + 560 + 100, y + h + 2, 715, block_top + 20, "l", " stroke-width=\"1.5\"");
    svg.arrow(x0 + 260, y + h + 2, 204, block_top + 20, "l", " stroke-width=\"2.5\"");
    svg.arrow(x0 + 280, y + h + 2, 480, block_top + 20, "l", " stroke-width=\"2.5\"");
    svg.arrow(x0 + 440, y + h + 2, 320, block_top + 20, "m", " stroke-width=\"2.5\" stroke-dasharray=\"7 3\"");
    svg.arrow(x0 + 460, y + h + 2, 596, block_top + 20, "m", " stroke-width=\"2.5\" stroke-dasharray=\"7 3\"");
    double at = block_top + 156;
    svg.line(20, at, 46, at, "l", " stroke-width=\"2.5\"");
    svg.label(54, at + 4, "loaded by block 0, into both");
    svg.line(290, at, 316, at, "m", " stroke-width=\"2.5\" stroke-dasharray=\"7 3\"");
    svg.label(324, at + 4, "loaded by block 1, into both");
    svg.line(560, at, 586, at, "l", " stroke-width=\"1.5\"");
    svg.label(594, at + 4, "by the block itself");
    svg.label(
        20, at + 34,
        text("From L2 per step: %d x (%g + %g) = %g KB without multicast; %d x %g + %g = %g KB with it, %.0f%% less.",
             cluster, inp_kb, weight_kb, each, cluster, inp_kb, weight_kb, shared, 100 * (1 - shared / each)));
    svg.label(20, at + 56,
              text("full: a block waits for all %g KB of its stage, from its own loads and from the other block's.",
                   inp_kb + weight_kb));
    svg.label(20, at + 76,
              text("empty: %d arrivals, 4 warps of a consumer in each block, because a load overwrites both stages.",
                   4 * cluster));
    return svg;
}

// ---- epilogue_overlap: ping-pong in gemm.cuh ----------------------------------------------------------------------

static Svg draw_epilogue_overlap() {
    const int n = 4;
    const double products = 3, epilogue = 2, left = 132, unit = 31, h = 28;
    Svg svg(
        800, 408, "Ping-pong: an epilogue hidden behind the next tile's products",
        "gemm.cuh: two consumer warpgroups, one set of tensor cores. Chosen lengths: products 3 units, epilogue 2.",
        "Two timelines of four tiles. With one consumer the tensor cores are idle during each epilogue. With two that "
        "alternate, one consumer's epilogue runs while the other's products do, and the tensor cores are always busy.");
    auto at = [&](double time) { return left + time * unit; };
    auto busy = [&](double y, const std::vector<double>& begins, double end) {
        svg.label(20, y + 14, "tensor cores");
        svg.rect(left, y, end * unit, 18, "n");
        double from = 0;
        for (double begin : begins) {
            if (begin > from) { svg.hatch(at(from), y, (begin - from) * unit, 18); }
            svg.rect(at(begin), y, products * unit, 18, "c");
            from = begin + products;
        }
        svg.hatch(at(from), y, (end - from) * unit, 18);
    };
    double y = 92, time = 0;
    svg.bold(20, y - 12, "one consumer");
    svg.label(20, y + 18, "consumer");
    std::vector<double> begins;
    for (int tile = 0; tile < n; tile++) {
        begins.push_back(time);
        svg.box(at(time), y, products * unit, h, "a", {text("products %d", tile)});
        svg.box(at(time + products), y, epilogue * unit, h, "b", {text("epil. %d", tile)});
        time += products + epilogue;
    }
    busy(y + 36, begins, time);
    svg.label(at(time), y + 74, text("%g units; tensor cores busy %.0f%%", time, 100 * n * products / time), "end");
    // ping-pong: a tile's products wait for the products of the tile before, and for its consumer's last epilogue
    y = 208;
    svg.bold(20, y - 12, "two consumers");
    std::vector<double> begin(n);
    double end = 0;
    for (int tile = 0; tile < n; tile++) {
        size_t i = (size_t)tile;
        double turn = tile ? begin[i - 1] + products : 0, free = tile > 1 ? begin[i - 2] + products + epilogue : 0;
        begin[i] = std::max(turn, free);
        double top = y + tile % 2 * 40;
        svg.box(at(begin[i]), top, products * unit, h, "a", {text("products %d", tile)});
        svg.box(at(begin[i] + products), top, epilogue * unit, h, "b", {text("epil. %d", tile)});
        end = begin[i] + products + epilogue;
        if (tile) { svg.arrow(at(begin[i]), tile % 2 ? y + h : y + 40, at(begin[i]), tile % 2 ? y + 40 : y + h); }
    }
    svg.label(20, y + 18, "consumer 0");
    svg.label(20, y + 58, "consumer 1");
    busy(y + 78, begin, end);
    svg.label(at(end), y + 116, text("%g units; tensor cores busy %.0f%%", end, 100 * n * products / end), "end");
    y = 358;
    svg.label(
        20, y,
        "Short arrows: the barrier turn[c]. A consumer arrives at the other's when it has issued its last products.");
    double x = svg.legend(20, y + 26, "c", "tensor cores busy");
    x = svg.legend(x, y + 26, "n", "idle", true);
    return svg;
}

// ---- fusing_bytes: fused_residual_layernorm.cu --------------------------------------------------------------------

static Svg draw_fusing_bytes() {
    const double mb = 32.0 * 512 * 768 * 2 / 1e6; // B=32, T=512, C=768, bf16, as in 09_fusing.md
    Measured unfused = measured("fused_residual_layernorm", 1), fused = measured("fused_residual_layernorm", 3);
    const double copy = fused.copy_gbs / 1e3, w = 104, h = 44;
    Svg svg(
        800, 456, "What a fused kernel saves: boxes of bytes",
        text("residual and layernorm at B=32, T=512, C=768, bf16: every box is a tensor (B,T,C) of %.1f MB.", mb),
        "Two kernels: the first reads two boxes and writes one, the second reads that one back and writes another, "
        "five "
        "boxes in all. The fused kernel reads two and writes two, four boxes. The box that is read back is hatched.");
    auto tensor = [&](double x, double y, const char* color, const char* name, bool again = false) {
        svg.rect(x, y, w, h, color);
        if (again) {
            svg.hatch(x, y, w, h);
            svg.rect(x + 12, y + 8, w - 24, 30, color, " stroke-width=\"0\"");
        }
        svg.middle(x + w / 2, y + 20, name);
        svg.middle(x + w / 2, y + 34, text("%.1f MB", mb));
    };
    double y = 92;
    svg.bold(20, y - 12, "kernel 1: two launches");
    tensor(20, y, "a", "inp1");
    tensor(20, y + 56, "a", "inp2");
    svg.box(166, y + 22, 118, 56, "g", {"residual_", "forward"});
    tensor(320, y + 28, "b", "residual");
    svg.arrow(126, y + 22, 164, y + 40);
    svg.arrow(126, y + 78, 164, y + 60);
    svg.arrow(285, y + 50, 318, y + 50);
    tensor(438, y + 28, "a", "residual", true);
    svg.box(584, y + 22, 70, 56, "g", {"layernorm", "_forward"}, false);
    tensor(676, y + 28, "b", "normed");
    svg.arrow(543, y + 50, 582, y + 50);
    svg.arrow(655, y + 50, 674, y + 50, "l");
    svg.label(320, y + 94, "written, then read back");
    y = 252;
    svg.bold(20, y - 12, "kernel 3: one launch");
    tensor(20, y, "a", "inp1");
    tensor(20, y + 56, "a", "inp2");
    svg.box(166, y + 4, 248, 92, "g",
            {"fused_residual_layernorm", "a row stays in shared memory", "until its mean is known"}, true);
    tensor(450, y, "b", "residual");
    tensor(450, y + 56, "b", "normed");
    svg.arrow(126, y + 22, 164, y + 34);
    svg.arrow(126, y + 78, 164, y + 66);
    svg.arrow(415, y + 34, 448, y + 22);
    svg.arrow(415, y + 66, 448, y + 78);
    y = 384;
    svg.line(20, y - 10, 780, y - 10, "m");
    svg.label(20, y + 10,
              text("By arithmetic, at a copy's %.2f TB/s: 5 boxes, %.0f MB, take %.1f us; 4 boxes, %.0f MB, %.1f us. "
                   "Ratio %.2f.",
                   copy, 5 * mb, 5 * mb / copy, 4 * mb, 4 * mb / copy, 5.0 / 4));
    svg.label(
        20, y + 30,
        text("Measured at B=64, boxes of %.0f MB: %.1f us and %.1f us. Ratio %.2f. (mean and rstd are not drawn.)",
             4 * mb, unfused.ms * 1e3, fused.ms * 1e3, unfused.ms / fused.ms));
    double x = svg.legend(20, y + 54, "a", "read");
    x = svg.legend(x, y + 54, "b", "written");
    svg.legend(x, y + 54, "a", "read back, saved by fusing", true);
    return svg;
}

// ---- layernorm_backward: kernel 9 ----------------------------------------------------------------------------------

static Svg draw_layernorm_backward() {
    const int N = 16, grid = 4, num_teams = 2, vectors = 12;
    const double left = 88, top = 104, cell = 22, row_height = 16;
    Svg svg(800, 532, "layernorm_backward: sums along rows, and sums along columns",
            "Kernel 9, here with 16 rows, 4 blocks of 2 warps. One reading of dout and inp serves both kinds of sums.",
            "A matrix of 16 rows. Two rows of the first block's first warp are marked. Arrows to the right: two sums "
            "per row "
            "give dinp. Arrows down: each thread sums its own columns over its rows; blocks write partial sums, and a "
            "second "
            "kernel adds them up to dweight and dbias.");
    svg.bold(left + 44, top - 12, "dout, inp, dresidual (N,C)");
    for (int block = 0; block < grid; block++) {
        for (int team = 0; team < num_teams; team++) { // row, row_step of kernel 9
            for (int row = block * num_teams + team; row < N; row += grid * num_teams) {
                bool chosen = block == 0 && team == 0;
                double y = top + row * row_height;
                svg.label(20, y + 12, text("b %d, w %d", block, team), "start", chosen ? "t" : "f");
                for (int v = 0; v < vectors; v++) {
                    svg.rect(left + v * cell, y, cell, row_height, chosen ? "a" : "n", " stroke-width=\"0.6\"");
                }
                if (chosen) { svg.arrow(left + vectors * cell + 4, y + 8, 428, y + 8); }
            }
        }
    }
    const double bottom = top + N * row_height;
    svg.faint(20, top - 12, "block, warp");
    for (int i = 0; i < 2; i++) {
        double y = top - 12 + i * 116;
        std::vector<std::string> words = {"per row: two sums", "sum(dnorm)", "sum(dnorm * norm)", "by shuffles"};
        if (i == 1) {
            words = {"the warp's next row:", text("%d rows further down,", grid * num_teams), "4 blocks x 2 warps"};
        }
        svg.box(430, y, 178, 78, "b", words, true);
        svg.arrow(609, y + 39, 640, y + 39);
        svg.box(642, y, 138, 78, "c", {"dinp (N,C)", "this row", "is complete"}, true);
    }
    for (int v = 0; v < vectors; v += 2) {
        svg.arrow(left + (v + 1) * cell, bottom + 4, left + (v + 1) * cell, bottom + 30, "m");
    }
    svg.box(left, bottom + 32, vectors * cell, 52, "d",
            {"registers of each thread: dw, db of", "its own columns, over all its rows"});
    svg.arrow(left + vectors * cell + 4, bottom + 58, 402, bottom + 58);
    svg.faint(378, bottom + 50, "at end", "middle");
    svg.box(404, bottom + 32, 176, 52, "d", {"partials (blocks, 2, C)", "fp32, one row per block"});
    svg.arrow(581, bottom + 58, 612, bottom + 58);
    svg.box(614, bottom + 32, 166, 52, "e", {"column_sums kernel:", "dweight, dbias (C) +="});
    const char* formulas[] = {"norm = (inp - mean) * rstd", "dnorm = dout * weight", "dw += dout * norm", "db += dout"};
    for (int i = 0; i < 4; i++) { svg.label(20 + 200 * i, bottom + 110, formulas[i]); }
    svg.label(20, bottom + 130, "dinp = dresidual + rstd * (dnorm - sum(dnorm) / C - norm * sum(dnorm * norm) / C)");
    svg.label(20, bottom + 150,
              "Bytes: dout, inp, dresidual are read once, dinp is written once: 8 * N * C bytes in bf16, and the small "
              "partials.");
    return svg;
}

// ---- roofline -------------------------------------------------------------------------------------------------------

struct Dot {
    std::string name;
    double intensity, tflops; // FLOPs per byte, TFLOP/s
};

// The fastest kernel in bf16, without the library's, of each op that counts FLOPs. *without: the names of the others.
static std::vector<Dot> roofline_dots(std::vector<std::string>* without) {
    std::vector<std::string> ops;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(results, error)) {
        if (entry.path().extension() == ".csv" && entry.path().filename() != "tuned.csv") {
            ops.push_back(entry.path().stem().string());
        }
    }
    if (error) { die("%s: %s: run this in dev/learn, or name --results", results.c_str(), error.message().c_str()); }
    std::sort(ops.begin(), ops.end());
    std::vector<Dot> dots;
    for (const std::string& op : ops) {
        const Measured* best = nullptr;
        std::vector<Measured> kernels = measured(op);
        for (const Measured& m : kernels) {
            if (m.kernel > 0 && m.matrix_type == "bf16" && (!best || m.ms < best->ms)) { best = &m; }
        }
        if (!best) { continue; } // no kernel in bf16
        if (best->flops > 0 && best->bytes > 0) {
            dots.push_back(
                {text("%s %d", op.c_str(), best->kernel), best->flops / best->bytes, best->flops / best->ms / 1e9});
        } else {
            without->push_back(op);
        }
    }
    std::sort(dots.begin(), dots.end(), [](const Dot& a, const Dot& b) { return a.intensity < b.intensity; });
    return dots;
}

// Letters beside their dots, moved until none covers another letter or a dot.
static void draw_letters(Svg& svg, const std::vector<Point>& at) {
    std::vector<Area> taken;
    for (Point p : at) { taken.push_back({p.x - 4, p.y - 4, p.x + 4, p.y + 4}); }
    const double angles[] = {0, 3.1416, 1.5708, 4.7124, 0.7854, 5.4978, 2.3562, 3.927};
    for (size_t i = 0; i < at.size(); i++) {
        for (int k = 0; k < 8 * 12; k++) {
            double radius = 12 + 5 * (k / 8), x = at[i].x + radius * cos(angles[k % 8]),
                   y = at[i].y + radius * sin(angles[k % 8]);
            Area a = {x - 6, y - 6, x + 6, y + 6};
            if (std::any_of(taken.begin(), taken.end(), [&](const Area& t) { return t.meets(a); }) ||
                std::any_of(svg.segments.begin(), svg.segments.end(),
                            [&](const Svg::Segment& s) { return crosses(s.a, s.b, a); })) {
                continue;
            }
            taken.push_back(a);
            if (radius > 13) {
                svg.line(at[i].x, at[i].y, x - 7 * cos(angles[k % 8]), y - 7 * sin(angles[k % 8]), "m");
            }
            svg.bold(x, y + 4, text("%c", (char)('a' + i)), "middle");
            break;
        }
    }
}

// The head and the words, separated by commas, in lines that fit the card.
static void faint_list(Svg& svg, double y, const std::string& head, const std::vector<std::string>& words) {
    std::string line = head;
    for (size_t i = 0; i < words.size(); i++) {
        std::string word = words[i] + (i + 1 < words.size() ? "," : "");
        if (width_of(line + " " + word, 12, false) > svg.width - 44) {
            svg.faint(20, y, line);
            line = word, y += 16;
        } else {
            line += " " + word;
        }
    }
    svg.faint(20, y, line);
}

static Svg draw_roofline() {
    std::vector<std::string> without;
    std::vector<Dot> dots = roofline_dots(&without);
    std::vector<Measured> ladder = measured("matmul_forward");
    const Measured& library = ladder[0];
    double copy = library.copy_gbs / 1e3, matrix = library.matrix_tflops;
    if (dots.size() > 26) { die("more than 26 ops with FLOPs: the figure has letters for 26"); }
    const double left = 60, right = 520, top = 92, bottom = 420;
    const double low = 0.1, high = 2000, from = 0.3, to = 10000; // TFLOP/s; FLOPs per byte
    const double list_top = 510, list_height = 18.0 * (double)std::max(dots.size(), ladder.size() + 3);
    Svg svg(
        800, list_top + list_height + 72, "Roofline: the fastest bf16 kernel of each op, and the ladder of one op",
        text("%s, bf16, cold L2. Roofs as measured in the run of matmul_forward. Both axes are logarithmic.",
             library.gpu.c_str()),
        "Left: dots of ops under a sloped roof, the rate of a copy, and a flat one, the rate of the library's matrix "
        "product. Right: the kernels of matmul_forward as dots, connected, that climb towards the flat roof; their "
        "numbers stand below.");
    auto at_x = [&](double v) { return left + (right - left) * log10(v / from) / log10(to / from); };
    auto at_y = [&](double v) { return bottom - (bottom - top) * log10(v / low) / log10(high / low); };
    const double ladder_left = 556, ladder_right = 776;
    svg.bold(20, 76, "TFLOP/s");
    for (double v : {0.1, 1.0, 10.0, 100.0, 1000.0}) {
        svg.grid_line(left, at_y(v), right, at_y(v));
        svg.grid_line(ladder_left, at_y(v), ladder_right, at_y(v));
        svg.faint(left - 6, at_y(v) + 4, text("%g", v), "end");
    }
    for (double v : {1.0, 10.0, 100.0, 1000.0, 10000.0}) {
        svg.grid_line(at_x(v), top, at_x(v), bottom);
        svg.faint(at_x(v), bottom + 18, text("%g", v), "middle");
    }
    svg.middle((left + right) / 2, bottom + 38, "arithmetic intensity, FLOPs per byte at least moved");
    double ridge = matrix / copy;
    svg.polygon({{at_x(from), at_y(from * copy)}, {at_x(ridge), at_y(matrix)}, {right, at_y(matrix)}}, "l", false,
                " stroke-width=\"2\"");
    svg.label(at_x(3.4), at_y(32), text("copy: %.2f TB/s", copy), "end");
    svg.label(at_x(2), at_y(1000) - 5, text("matrix product: %.0f TFLOP/s", matrix));
    std::vector<Point> places;
    for (const Dot& d : dots) {
        places.push_back({at_x(d.intensity), at_y(d.tflops)});
        svg.dot(places.back().x, places.back().y, 4, "b");
    }
    draw_letters(svg, places);
    // the ladder, one column per kernel; the roof at its intensity
    double intensity = library.flops / library.bytes, roof = std::min(matrix, intensity * copy);
    svg.bold(ladder_left, 76, text("matmul_forward, %.0f FLOPs/byte", intensity));
    svg.line(ladder_left, at_y(roof), ladder_right, at_y(roof), "l", " stroke-width=\"2\"");
    std::vector<Point> climb;
    std::vector<const Measured*> rungs;
    for (const Measured& m : ladder) {
        if (m.kernel > 0) { rungs.push_back(&m); }
    }
    for (size_t i = 0; i < rungs.size(); i++) {
        double x = ladder_left + (ladder_right - ladder_left) * ((double)i + 0.5) / (double)rungs.size();
        climb.push_back({x, at_y(rungs[i]->flops / rungs[i]->ms / 1e9)});
    }
    svg.polygon(climb, "l", false, " stroke-width=\"1.5\"");
    for (size_t i = 0; i < rungs.size(); i++) {
        svg.dot(climb[i].x, climb[i].y, 4.5, "c");
        svg.faint(climb[i].x, bottom + 14 + 14.0 * (double)(i % 2), text("%d", rungs[i]->kernel), "middle");
    }
    svg.faint((ladder_left + ladder_right) / 2, bottom + 43, "kernel", "middle");
    svg.line(20, list_top - 40, 780, list_top - 40, "m");
    svg.bold(20, list_top - 20, "op and kernel: TFLOP/s");
    svg.bold(504, list_top - 20, "kernel of matmul_forward: TFLOP/s");
    for (size_t i = 0; i < dots.size(); i++) {
        double y = list_top + 18.0 * (double)i;
        svg.bold(20, y, text("%c", (char)('a' + i)));
        svg.label(38, y, text("%s: %.3g", dots[i].name.c_str(), dots[i].tflops));
    }
    for (size_t i = 0; i < rungs.size(); i++) {
        double y = list_top + 18.0 * (double)i;
        std::string what = rungs[i]->what.substr(0, rungs[i]->what.find_first_of(",:"));
        for (const char* rest : {" and ", " on "}) {
            if (width_of(what, 13, false) > 200) { what = what.substr(0, what.find(rest)); }
        }
        svg.bold(504, y, text("%d", rungs[i]->kernel));
        svg.label(526, y, text("%s: %.3g", what.c_str(), rungs[i]->flops / rungs[i]->ms / 1e9));
    }
    double y = list_top + 18.0 * (double)rungs.size();
    svg.faint(504, y, text("the library's first candidate: %.3g", library.flops / library.ms / 1e9));
    svg.faint(504, y + 18, "kernels 19 and 20 call the library, too");
    faint_list(svg, list_top + list_height + 8, "Without FLOPs, so not drawn (their roof is the copy):", without);
    return svg;
}

// ---- occupancy: what limits the warps of an SM ------------------------------------------------------------------------

static Svg draw_occupancy() {
    const double gemm_stage = (128 + 192) * 64 * 2, gemm_boxes = 8 * 4 * 16 * 64 * 2,
                 gemm_barriers = (4 + 4 + 32 + 2) * 8;
    struct {
        const char *name, *detail;
        int threads, registers;
        double shared;
    } kernels[] = {
        {"simple_kernel, kernel 6", "ptxas: 40 registers", 64, 40, 0},
        {"the same with 1024 threads", "ptxas: 40 registers", 1024, 40, 0},
        {"a block of one warp", "say, 32 registers", 32, 32, 0},
        {"attention_forward, kernel 15", "at most 168 registers, 48 KB", 128, 168, (128 * 64 + 2 * 2 * 64 * 64) * 2.0},
        {"softmax_forward, kernel 8", "at most 64 registers, row of 98 KB", 512, 64, 50257 / 8 * 16 + 32 * 4.0},
        {"gemm.cuh, ping-pong", "at most 168 registers, ring of 4", 384, 168,
         4 * gemm_stage + gemm_boxes + gemm_barriers + 1024},
    };
    const int num = (int)(sizeof(kernels) / sizeof(kernels[0]));
    const char* resources[] = {"threads", "blocks", "registers", "shared memory"};
    Svg svg(
        800, 120 + num * 84 + 24, "Occupancy: what limits the warps on an SM of an H200",
        "64 warps, 32 blocks, 65,536 registers, 228 KB of shared memory. A block takes 1 KB more than it asks for.",
        "Six kernels. For each, 64 cells for the warps that an SM can hold, those that are there filled and divided by "
        "block, and how many blocks each of the four resources allows; the smallest number is the limit.");
    svg.bold(20, 78, "kernel");
    svg.bold(252, 78, "warps on an SM, of 64");
    svg.bold(630, 78, "blocks that fit by");
    for (int i = 0; i < num; i++) {
        const auto& k = kernels[i];
        Occupancy o = occupancy(k.threads, k.registers, k.shared);
        int warps = k.threads / 32, held = o.fits * warps;
        double y = 96 + i * 84;
        svg.grid_line(20, y - 8, 780, y - 8);
        svg.bold(20, y + 12, k.name);
        svg.label(20, y + 30, text("%d threads per block", k.threads));
        svg.label(20, y + 48, k.detail);
        for (int w = 0; w < MAX_WARPS; w++) {
            const char* color = w >= held ? "n" : w / warps % 2 ? "b" : "a";
            svg.rect(252 + w % 32 * 11, y + 2 + w / 32 * 17, 11, 14, color, w < held ? "" : " stroke-width=\"0.5\"");
        }
        svg.label(252, y + 56,
                  text("%d block%s x %d warp%s = %d warps, %.0f%%", o.fits, o.fits == 1 ? "" : "s", warps,
                       warps == 1 ? "" : "s", held, 100.0 * held / MAX_WARPS));
        for (int r = 0; r < 4; r++) {
            bool limit = o.blocks[r] == o.fits;
            std::string count = r == 3 && k.shared == 0 ? "-" : text("%d", o.blocks[r]);
            svg.label(630, y + 10 + r * 17, resources[r], "start", limit ? "t" : "f", 12, limit);
            svg.label(780, y + 10 + r * 17, limit ? count + " <" : count, "end", limit ? "t" : "f", 12, limit);
        }
    }
    double y = 96 + num * 84 + 14;
    svg.label(20, y,
              "Neighbouring blocks differ in colour. The limit is bold and marked by <. At most: what "
              "__launch_bounds__ leaves per thread.");
    svg.label(20, y + 18,
              "Registers are given out per warp in units of 256, and each quarter of an SM holds as many warps as the "
              "others.");
    return svg;
}

// ---- block_timeline: launches, a graph, programmatic dependent launch ---------------------------------------------------

static Svg draw_block_timeline() {
    const int n = 4;
    const double left = 96, work = 128, tail = 30, h = 36;
    Svg svg(800, 454, "Four kernels: one by one, as a CUDA graph, with early launches",
            "Lengths are chosen, not measured. Height: the SMs at work, fewer and fewer at a kernel's end.",
            "Three timelines of four kernels. In a stream there is a gap after each kernel. In a graph the gaps are "
            "smaller. "
            "With programmatic dependent launch the next kernel's blocks start on the SMs that the last blocks of the "
            "kernel before have left, and wait there for its end.");
    auto kernel = [&](double x, double y, int i) {
        svg.polygon({{x, y}, {x + work - tail, y}, {x + work, y + h}, {x, y + h}}, i % 2 ? "b" : "a");
        svg.middle(x + (work - tail) / 2, y + 23, text("kernel %d", i));
    };
    auto timeline = [&](double y, double gap, const char* end) {
        svg.faint(20, y + 23, "GPU");
        double x = left;
        for (int i = 0; i < n; i++, x += work + gap) {
            kernel(x, y, i);
            if (i + 1 < n && gap > 0) { svg.hatch(x + work, y, gap, h); }
        }
        svg.line(x - gap, y - 4, x - gap, y + h + 4, "l", " stroke-dasharray=\"4 3\"");
        svg.label(x - gap + 8, y + 23, end);
    };
    double y = 92;
    svg.bold(20, y - 14, "one by one");
    svg.faint(20, y + 16, "host");
    for (int i = 0; i < n; i++) { svg.box(left - 40 + i * 70, y, 66, 24, "g", {text("launch %d", i)}); }
    svg.label(left + 256, y + 16, "the host queues each kernel");
    timeline(y + 34, 40, "end");
    y = 210;
    svg.bold(20, y - 14, "CUDA graph: one call of the host starts all four");
    svg.faint(20, y + 16, "host");
    svg.box(left - 40, y, 66, 24, "g", {"graph"});
    timeline(y + 34, 16, "end");
    y = 328;
    svg.bold(20, y - 14, "programmatic dependent launch");
    timeline(y, 0, "end");
    for (int i = 1; i < n; i++) { // blocks of kernel i start where blocks of kernel i - 1 have ended
        double x = left + i * work;
        svg.polygon({{x - tail, y}, {x, y}, {x, y + h}}, "c");
    }
    y += h + 26;
    double x = svg.legend(20, y, "n", "gap: no kernel at work", true);
    svg.legend(x, y, "c", "blocks that started early: prologue, then grid_wait_dependency()");
    svg.label(20, y + 26,
              "Measured on an H200 (dev/cuda/notes): an empty kernel in a graph costs 1.0 us. Decoding one token, 61 "
              "kernels in a graph:");
    svg.label(20, y + 44,
              "256 us, and 208 us with programmatic dependent launches. gemm.cuh calls grid_launch_dependents() in "
              "gemm_init.");
    return svg;
}

// ---- main -------------------------------------------------------------------------------------------------------------

static const struct {
    const char *name, *what;
    Svg (*draw)();
} FIGURES[] = {
    {"grid", "grid, blocks, threads, and the index of an element", draw_grid},
    {"coalescing", "the sectors that one load of a warp moves", draw_coalescing},
    {"bytes_in_flight", "loads in flight, and the bandwidth they give", draw_bytes_in_flight},
    {"memory_hierarchy", "registers, shared memory, L2, HBM: size and bandwidth", draw_memory_hierarchy},
    {"softmax_passes", "three passes, online softmax, one pass", draw_softmax_passes},
    {"reduction_tree", "a sum over a warp by shuffles", draw_reduction_tree},
    {"attention_tiles", "causal attention in tiles of queries and keys", draw_attention_tiles},
    {"banks", "shared memory banks: unpadded, padded, swizzled", draw_banks},
    {"mma_fragments", "which lane holds what in mma.sync", draw_mma_fragments},
    {"gemm_tiles", "tiles of a block, a warp, a thread", draw_gemm_tiles},
    {"double_buffer", "cp.async with two stages, over time", draw_double_buffer},
    {"producer_consumer", "a ring with full and empty barriers, over time", draw_producer_consumer},
    {"multicast", "a cluster of two blocks that share a tile", draw_multicast},
    {"epilogue_overlap", "two consumers that alternate", draw_epilogue_overlap},
    {"fusing_bytes", "bytes of two kernels, and of one", draw_fusing_bytes},
    {"layernorm_backward", "sums along rows and along columns", draw_layernorm_backward},
    {"roofline", "ops under their roofs, and the ladder of one", draw_roofline},
    {"occupancy", "what limits the warps on an SM", draw_occupancy},
    {"block_timeline", "launches, a graph, programmatic dependent launch", draw_block_timeline},
};

int main(int argc, char** argv) {
    const char* usage = "usage: %s [--list | --check] [--out FOLDER] [--results FOLDER] [NAME ...]\n";
    std::string out = "figures";
    bool check = false;
    std::vector<std::string> names;
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        if (word == "--list") {
            for (const auto& figure : FIGURES) { printf("%-20s%s\n", figure.name, figure.what); }
            return EXIT_SUCCESS;
        } else if (word == "--check") {
            check = true;
        } else if ((word == "--out" || word == "--results") && i + 1 < argc) {
            (word == "--out" ? out : results) = argv[++i];
        } else if (word.empty() || word[0] == '-') {
            fprintf(stderr, usage, argv[0]);
            return 2;
        } else if (std::none_of(std::begin(FIGURES), std::end(FIGURES), [&](auto& f) { return word == f.name; })) {
            fprintf(stderr, "error: no figure '%s'; see --list\n", word.c_str());
            return 2;
        } else {
            names.push_back(word);
        }
    }
    if (!std::filesystem::is_directory(out)) {
        die("%s: no such folder: run this in dev/learn, or name --out", out.c_str());
    }
    int drawn = 0, wrong = 0;
    for (const auto& figure : FIGURES) {
        if (!names.empty() && std::find(names.begin(), names.end(), figure.name) == names.end()) { continue; }
        Svg svg = figure.draw();
        svg.inspect();
        for (const std::string& problem : svg.problems) {
            fprintf(stderr, "error: %s: %s\n", figure.name, problem.c_str());
        }
        std::string path = out + "/" + figure.name + ".svg", xml = svg.xml();
        bool stale = check && (!std::filesystem::exists(path) || read_file(path) != xml);
        if (stale) { fprintf(stderr, "error: %s is stale: make figures in dev/learn\n", path.c_str()); }
        if (!check) { write_file(path, xml); }
        wrong += stale || !svg.problems.empty();
        drawn++;
    }
    printf("%d figure%s %s\n", drawn, drawn == 1 ? "" : "s", check ? "compared" : "drawn");
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
