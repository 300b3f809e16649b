/*
Draws one or several training runs as one SVG: training and validation loss, gradient norm, learning rate, tokens per
second, and HellaSwag's accuracy where it was logged.

    make scripts/plot_runs
    scripts/plot_runs log -o run.svg                     the run with -o log
    scripts/plot_runs log_a log_b -o runs.svg            two runs side by side, by the names of their directories
    scripts/plot_runs 'rate 6e-4=log_a' 'rate 3e-4=log_b' -o runs.svg      with names

It reads log.jsonl, or main.log where there is no other: llm.c's runs, which do not log their speed. A last line that is
still being written is left out. When a log goes back to an earlier step, because the run was resumed, the newer lines
count. The same logs give the same bytes.
*/
#include "../dev/cuda/svg.h"
#include "../llmc/cli.h"
#include "../llmc/json.h"

// ---- reading ----------------------------------------------------------------------------------------------

enum Kind { LOSS, NORM, RATE, SPEED, TOKENS, VALIDATION, HELLASWAG, NUM_KINDS };

struct Value {
    double step, value;
};
typedef std::vector<Value> Curve; // in the order of the steps

struct Run {
    std::string name, log;   // log: the path of the file
    Curve curves[NUM_KINDS]; // TOKENS: how many the run has seen after a step
    int not_finite;          // losses that cannot be drawn
};

static void drop_from(Curve* curve, double step) {
    while (!curve->empty() && curve->back().step >= step) { curve->pop_back(); }
}

static void add(Run* run, Kind kind, double step, double value) {
    bool fits = fabs(value) < 1e30; // what is greater would leave no room for the others; NaN is not less
    run->not_finite += kind == LOSS && !fits;
    if (fits) { run->curves[kind].push_back({step, value}); }
}

// Begins the line of a step. When the log has gone back to an earlier step, what it said of the later ones is dropped.
static void begin_step(Run* run, double step, bool training) {
    for (Kind kind : {LOSS, NORM, RATE, SPEED, TOKENS}) {
        if (training) { drop_from(&run->curves[kind], step); }
    }
    for (Kind kind : {VALIDATION, HELLASWAG}) {
        if (training) { drop_from(&run->curves[kind], step + 1); } // this step's may stand before its training line
    }
}

// A line of main.log: s:STEP, then words KEY:NUMBER. where: file and line, for messages.
static void read_text_line(Run* run, const std::string& line, const std::string& where) {
    static const struct {
        const char* key;
        Kind kind;
    } KEYS[] = {{"trl", LOSS}, {"lr", RATE}, {"norm", NORM}, {"tel", VALIDATION}, {"eval", HELLASWAG}};
    double step = -1;
    for (size_t at = 0; at < line.size();) {
        size_t end = std::min(line.find(' ', at), line.size());
        std::string word = line.substr(at, end - at);
        at = end + 1;
        if (word.empty()) { continue; }
        size_t colon = std::min(word.find(':'), word.size());
        std::string key = word.substr(0, colon), number = word.substr(std::min(colon + 1, word.size()));
        char* rest;
        double value = strtod(number.c_str(), &rest);
        if (number.empty() || *rest) { die("%s: '%s' is not KEY:NUMBER", where.c_str(), word.c_str()); }
        if (step < 0) {
            if (key != "s" || !(value >= 0 && value < 1e15 && value == floor(value))) {
                die("%s: a line of main.log begins with s:STEP, not '%s'", where.c_str(), word.c_str());
            }
            step = value;
            begin_step(run, step, line.find(" trl:") != std::string::npos);
            continue;
        }
        for (const auto& known : KEYS) {
            if (key != known.key) { continue; }
            if (known.kind >= VALIDATION) { drop_from(&run->curves[known.kind], step); }
            add(run, known.kind, step, value);
        }
    }
}

// A number of a JSON line; null, which stands for a value that is not finite, becomes NaN.
static double json_value(const JsonValue* line, const char* key, const std::string& where) {
    Error err;
    double value = NAN;
    const JsonValue* v = json_get(line, key);
    if (v && v->type == JSON_NULL) { return NAN; }
    if (!json_number(line, key, -1e300, 1e300, &value, where.c_str(), &err)) { die("%s", err.text); }
    return value;
}

static void read_json_line(Run* run, const std::string& line, const std::string& where) {
    Error err;
    JsonDoc doc;
    int64_t step;
    const char* type;
    if (!json_parse(&doc, line.data(), line.size(), where.c_str(), &err) ||
        !json_int(doc.root, "step", 0, 1000000000000000, &step, where.c_str(), &err) ||
        !json_string(doc.root, "type", &type, where.c_str(), &err)) {
        die("%s", err.text);
    }
    std::string t = type;
    double s = (double)step;
    begin_step(run, s, t == "train");
    if (t == "train") {
        double speed = json_value(doc.root, "tokens_per_second", where), ms = json_value(doc.root, "time_ms", where);
        const Curve& seen = run->curves[TOKENS];
        Value before = seen.empty() ? Value{s - 1, 0} : seen.back();
        add(run, TOKENS, s, before.value + round(speed * ms / 1e3) * (s - before.step));
        add(run, LOSS, s, json_value(doc.root, "loss", where));
        add(run, RATE, s, json_value(doc.root, "lr", where));
        add(run, NORM, s, json_value(doc.root, "grad_norm", where));
        add(run, SPEED, s, speed);
    } else if (t == "val" || t == "eval") {
        Kind kind = t == "val" ? VALIDATION : HELLASWAG;
        drop_from(&run->curves[kind], s);
        add(run, kind, s, json_value(doc.root, t == "val" ? "loss" : "accuracy", where));
    }
    json_free(&doc);
}

// Reads a run: its directory, or one of the two logs itself.
static Run read_run(const std::string& name, const std::string& path) {
    Run run = {name, path, {}, 0};
    MappedFile file;
    Error err;
    if (is_directory(path.c_str())) {
        run.log = path + "/log.jsonl";
        if (!file_exists(run.log.c_str())) { run.log = path + "/main.log"; }
        if (!file_exists(run.log.c_str())) {
            die("%s: neither log.jsonl nor main.log is here: name the -o directory of a run", path.c_str());
        }
    }
    if (!map_file(&file, run.log.c_str(), &err)) { die("%s", err.text); }
    const char* text = (const char*)file.data;
    bool is_json = file.size > 0 && text[0] == '{';
    size_t number = 0;
    for (size_t at = 0; at < file.size;) {
        const char* end = (const char*)memchr(text + at, '\n', file.size - at);
        if (!end) { break; } // still being written, or cut off
        std::string line(text + at, end), where = run.log + ":" + std::to_string(++number);
        if (!line.empty() && line.back() == '\r') { line.pop_back(); }
        if (!line.empty()) { (is_json ? read_json_line : read_text_line)(&run, line, where); }
        at = (size_t)(end - text) + 1;
    }
    unmap_file(&file);
    if (run.curves[LOSS].empty() && run.curves[VALIDATION].empty()) { die("%s: no loss in it", run.log.c_str()); }
    return run;
}

// ---- curves -----------------------------------------------------------------------------------------------

// The mean over n values, half of them on each side; over fewer near the ends, where it begins and ends like the curve.
static Curve smoothed(const Curve& curve, size_t n) {
    std::vector<double> sums = {0};
    for (const Value& v : curve) { sums.push_back(sums.back() + v.value); }
    Curve out = curve;
    for (size_t i = 0; i < curve.size(); i++) {
        size_t half = std::min({n / 2, i, curve.size() - 1 - i});
        out[i].value = (sums[i + half + 1] - sums[i - half]) / (double)(2 * half + 1);
    }
    return out;
}

// Replaces steps by tokens, as far as these are known: a validation counts for the training step before it.
static void count_in_tokens(Run* run) {
    const Curve seen = run->curves[TOKENS];
    if (seen.empty()) { die("%s: no tokens in it: log.jsonl has them, main.log has not", run->log.c_str()); }
    for (Curve& curve : run->curves) {
        size_t i = 0;
        for (Value& v : curve) {
            while (i < seen.size() && seen[i].step <= v.step) { i++; }
            v.step = i > 0 ? seen[i - 1].value : 0;
        }
    }
}

// ---- drawing ----------------------------------------------------------------------------------------------

enum { MAX_RUNS = 8 };

// Colours of the curves, k0 to k7, on a light and on a dark page.
static const char* const COLORS[2][MAX_RUNS] = {
    {"#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#0e7490", "#9a6700", "#57606a"},
    {"#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#ff7bba", "#39c5cf", "#d9a520", "#9ea7b3"}};

static std::string color(size_t i) { return text("k%zu", i); }

static std::string curve_style() {
    std::string s, dark;
    for (size_t i = 0; i < MAX_RUNS; i++) {
        s += "." + color(i) + "{stroke:" + COLORS[0][i] + ";fill:none}";
        dark += "." + color(i) + "{stroke:" + COLORS[1][i] + ";fill:none}";
    }
    return s + "@media (prefers-color-scheme:dark){" + dark + "}";
}

// A number for an axis that ends at `largest`: 0.0006, 1500; 5k of 20k; 1.5M; 3B.
static std::string short_number(double x, double largest) {
    static const struct {
        double from, unit;
        const char* letter;
    } UNITS[] = {{1e9, 1e9, "B"}, {1e6, 1e6, "M"}, {1e4, 1e3, "k"}};
    for (const auto& u : UNITS) {
        if (x != 0 && largest >= u.from) { return text("%.4g%s", x / u.unit, u.letter); }
    }
    return text("%.4g", x);
}

const double LEAST_NORM = 1e-30; // a norm of 0 has no place on a logarithmic axis

// Maps low..high to the pixels from..to. A logarithmic axis has ticks at 1, 2, 5, 10 ...
struct Scale {
    double low, high, from, to;
    bool logarithmic;
    double at(double x) const {
        double part = logarithmic ? log(x / low) / log(high / low) : (x - low) / (high - low);
        return from + (to - from) * part;
    }
    std::vector<double> ticks(int most) const {
        std::vector<double> all;
        if (logarithmic) {
            for (double x = low; x <= high * 1.001; x = step_near(1.5 * x, true)) { all.push_back(x); }
        } else {
            double step = step_near((high - low) / most, true);
            for (double i = ceil(low / step - 1e-6); i * step <= high + 1e-6 * step; i++) {
                all.push_back(i * step + 0.0);
            } // no -0
        }
        return all;
    }
};

// One diagram: the curves of one kind, of all runs; the loss has training and validation in one.
struct Panel {
    const char *name, *title;
    Kind kind;
    bool from_zero, logarithmic;
};
static const Panel PANELS[] = {{"loss", "loss", LOSS, false, false},
                               {"norm", "gradient norm, logarithmic", NORM, false, true},
                               {"rate", "learning rate", RATE, true, false},
                               {"speed", "tokens per second", SPEED, true, false},
                               {"hellaswag", "HellaSwag accuracy", HELLASWAG, false, false}};

static const char *opt_output = "runs.svg", *opt_x = "step", *opt_title = "training runs",
                  *opt_panels = "loss,norm,rate,speed,hellaswag";
static int opt_smooth;
static float opt_min_loss, opt_max_loss;

static bool is_wanted(const char* panel) {
    return (std::string(",") + opt_panels + ",").find(std::string(",") + panel + ",") != std::string::npos;
}
static bool is_drawn(const Panel& panel, const std::vector<Run>& runs) {
    if (!is_wanted(panel.name)) { return false; }
    for (const Run& run : runs) {
        if (!run.curves[panel.kind].empty() || (panel.kind == LOSS && !run.curves[VALIDATION].empty())) { return true; }
    }
    return false;
}

static size_t window_of(const Run& run) {
    return opt_smooth > 0 ? (size_t)opt_smooth : std::max<size_t>(run.curves[LOSS].size() / 100, 1);
}

// At most two points for each pixel of the width, the least and the greatest there: a long run looks the same and takes
// no more bytes than a short one.
static std::vector<Point> points_of(const Curve& curve, const Scale& x, const Scale& y) {
    std::vector<Point> points;
    bool all = (double)curve.size() <= 2 * (x.to - x.from);
    for (size_t i = 0, next; i < curve.size(); i = next) {
        size_t low = i, high = i;
        for (next = i + 1; !all && next < curve.size(); next++) {
            if (floor(x.at(curve[next].step)) != floor(x.at(curve[i].step))) { break; }
            if (curve[next].value < curve[low].value) { low = next; }
            if (curve[next].value > curve[high].value) { high = next; }
        }
        if (high < low) { std::swap(low, high); }
        points.push_back({x.at(curve[low].step), y.at(curve[low].value)});
        if (high > low) { points.push_back({x.at(curve[high].step), y.at(curve[high].value)}); }
    }
    return points;
}

// The range of a panel: of its values, or for the loss the one that the flags ask for.
static Scale y_scale(const Panel& panel, const std::vector<Run>& runs, double from, double to) {
    double low = INFINITY, high = -INFINITY;
    for (const Run& run : runs) {
        for (Kind kind : {panel.kind, panel.kind == LOSS ? VALIDATION : panel.kind}) {
            for (const Value& v : run.curves[kind]) {
                if (panel.logarithmic && v.value < LEAST_NORM) { continue; }
                low = std::min(low, v.value), high = std::max(high, v.value);
            }
        }
    }
    if (panel.logarithmic) {
        if (!(high > 0)) { low = high = 1; } // all of them are 0
        low = step_near(low, false), high = step_near(high, true);
        return {low, high > low ? high : 2 * low, from, to, true};
    }
    if (panel.from_zero) { low = 0, high = std::max(low, high); }
    if (panel.kind == LOSS && opt_max_loss > 0) { high = opt_max_loss, low = std::min(low, high); }
    if (panel.kind == LOSS && opt_min_loss > 0) { low = opt_min_loss, high = std::max(low, high); }
    double step = step_near(std::max((high - low) / 5, std::max(fabs(high), 1e-9) * 1e-6), true);
    low = floor(low / step + 1e-6) * step, high = ceil(high / step - 1e-6) * step;
    return {low, high > low ? high : low + step, from, to, false};
}

// The curves of a run in a panel. With several runs each has a colour; with one, training and validation have.
static void draw_curves(Svg& svg, const Panel& panel, const std::vector<Run>& runs, size_t r, const Scale& x,
                        const Scale& y) {
    const Run& run = runs[r];
    Curve curve = run.curves[panel.kind], validation = run.curves[VALIDATION];
    if (panel.logarithmic) {
        curve.erase(std::remove_if(curve.begin(), curve.end(), [](const Value& v) { return v.value < LEAST_NORM; }),
                    curve.end());
    }
    size_t window = window_of(run);
    std::string id = text(" id=\"%s%zu\"", panel.name, r), clip = text(" clip-path=\"url(#clip_%s)\"", panel.name);
    if ((panel.kind == LOSS || panel.kind == NORM) && window > 1) {
        svg.curve(points_of(curve, x, y), color(r).c_str(), clip + " opacity=\"0.3\" stroke-width=\"0.8\"");
        curve = smoothed(curve, window);
    }
    if (!curve.empty()) { svg.curve(points_of(curve, x, y), color(r).c_str(), id + clip + " stroke-width=\"1.5\""); }
    if (panel.kind == HELLASWAG) {
        for (const Point& p : points_of(curve, x, y)) { svg.dot(p.x, p.y, 2.5, color(r).c_str(), clip); }
    }
    if (panel.kind != LOSS || validation.empty()) { return; }
    std::string own = color(runs.size() == 1 ? 1 : r);
    svg.curve(points_of(validation, x, y), own.c_str(),
              text(" id=\"validation%zu\"", r) + clip + " stroke-dasharray=\"4 3\"");
    for (const Point& p : points_of(validation, x, y)) { svg.dot(p.x, p.y, 2.5, own.c_str(), clip); }
}

static void draw_panel(Svg& svg, const Panel& panel, const std::vector<Run>& runs, const Area& area) {
    double last = 1;
    for (const Run& run : runs) {
        for (const Curve& curve : run.curves) { last = std::max(last, curve.empty() ? 0 : curve.back().step); }
    }
    Scale x = {0, last, area.left + 46, area.right, false};
    Scale y = y_scale(panel, runs, area.bottom - 36, area.top + 14);
    bool large = area.right - area.left > 400;
    svg.bold(area.left, area.top, panel.title);
    svg.body +=
        text("<clipPath id=\"clip_%s\"><rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\"/></clipPath>\n",
             panel.name, x.from - 3, y.to - 3, x.to - x.from + 6, y.from - y.to + 6);
    double last_y = INFINITY;
    for (double value : y.ticks(large ? 8 : 4)) {
        svg.grid_line(x.from, y.at(value), x.to, y.at(value));
        if (last_y - y.at(value) < 15) { continue; } // no room for another number
        last_y = y.at(value);
        svg.faint(x.from - 6, last_y + 4, short_number(value, y.high), "end");
    }
    for (double value : x.ticks(large ? 8 : 3)) {
        svg.grid_line(x.at(value), y.from, x.at(value), y.from + 4);
        svg.faint(x.at(value), y.from + 18, short_number(value, x.high), "middle");
    }
    if (large) { svg.faint((x.from + x.to) / 2, y.from + 36, opt_x, "middle"); }
    for (size_t r = 0; r < runs.size(); r++) { draw_curves(svg, panel, runs, r, x, y); }
}

static double median_of(const Curve& curve) {
    std::vector<double> values;
    for (const Value& v : curve) { values.push_back(v.value); }
    std::nth_element(values.begin(), values.begin() + (long)(values.size() / 2), values.end());
    return values[values.size() / 2];
}

// What the legend says of a run: where it ended.
static std::string summary_of(const Run& run) {
    const Curve *loss = &run.curves[LOSS], *validation = &run.curves[VALIDATION], *accuracy = &run.curves[HELLASWAG];
    std::string s;
    if (!loss->empty()) {
        Curve end(loss->end() - (long)std::min(window_of(run), loss->size()), loss->end());
        double sum = 0;
        for (const Value& v : end) { sum += v.value; }
        s += text(", training %.4f", sum / (double)end.size());
    }
    if (!validation->empty()) { s += text(", validation %.4f", validation->back().value); }
    if (!accuracy->empty()) { s += text(", HellaSwag %.4f", accuracy->back().value); }
    if (!run.curves[SPEED].empty() && is_wanted("speed")) {
        s += ", " + thousands(median_of(run.curves[SPEED])) + " tok/s";
    }
    return s.substr(std::min<size_t>(2, s.size()));
}

// A name in at most `width` pixels, in printable ASCII.
static std::string fitted(std::string name, double width) {
    for (char& c : name) { c = c >= ' ' && c <= '~' ? c : '?'; }
    if (width_of(name, 12, true) <= width) { return name; }
    while (!name.empty() && width_of(name + "...", 12, true) > width) { name.pop_back(); }
    return name + "...";
}

static Svg draw(const std::vector<Run>& runs) {
    std::vector<const Panel*> small;
    bool has_loss = is_drawn(PANELS[0], runs);
    for (const Panel& panel : PANELS) {
        if (panel.kind != LOSS && is_drawn(panel, runs)) { small.push_back(&panel); }
    }
    if (!has_loss && small.empty()) { die("%s: nothing of --panels %s in it", runs[0].log.c_str(), opt_panels); }
    size_t columns = small.size() == 4 ? 2 : std::max<size_t>(small.size(), 1),
           rows = (small.size() + columns - 1) / columns;
    const double width = 800, left = 20, right = width - 24, gap = 24, loss_height = 300, small_height = 160;
    double y = 54 + 18 * (double)runs.size(), step = (right - left + gap) / (double)columns;
    size_t window = 0;
    for (const Run& run : runs) { window = std::max(window, window_of(run)); }
    double below = columns == 1 ? 12 : 0; // the lowest diagram is wide enough to say what it is drawn over
    Svg svg(width, y + (has_loss ? loss_height + 20 : 0) + (small_height + 16) * (double)rows + below,
            fitted(opt_title, 600), "", "Curves of " + std::to_string(runs.size()) + " training runs, by " + opt_x);
    svg.style += curve_style();
    for (size_t r = 0; r < runs.size(); r++) {
        double at = 52 + 18 * (double)r;
        svg.line(left, at - 4, left + 20, at - 4, color(r).c_str(), " stroke-width=\"3\"");
        std::string name = fitted(runs[r].name, 260);
        svg.bold(left + 28, at, name);
        svg.faint(left + 28 + width_of(name, 12, true) + 12, at, summary_of(runs[r]));
    }
    y += 20;
    if (has_loss) {
        bool validated =
            std::any_of(runs.begin(), runs.end(), [](const Run& r) { return !r.curves[VALIDATION].empty(); });
        std::string key = window > 1 ? text("mean of %zu steps", window) : "training";
        if (validated) { key += ", dots: validation"; }
        svg.faint(right, y, key, "end");
        draw_panel(svg, PANELS[0], runs, {left, y, right, y + loss_height});
        y += loss_height + 20;
    }
    for (size_t i = 0; i < small.size(); i++) {
        double x = left + step * (double)(i % columns), top = y + (small_height + 16) * (double)(i / columns);
        draw_panel(svg, *small[i], runs, {x, top, x + step - gap, top + small_height});
    }
    return svg;
}

// ---- main -------------------------------------------------------------------------------------------------

static const Option OPTIONS[] = {
    {OPT_STR, 'o', NULL, "output", &opt_output, "FILE.svg", "the picture", 0, 0},
    {OPT_STR, 0, NULL, "title", &opt_title, "TEXT", "what stands on top of it", 0, 0},
    {OPT_STR, 0, NULL, "panels", &opt_panels, "LIST", "which diagrams, as far as the runs have logged them", 0, 0},
    {OPT_STR, 'x', NULL, "x", &opt_x, "step|tokens", "what the curves are drawn over", 0, 0},
    {OPT_INT, 0, NULL, "smooth", &opt_smooth, "steps",
     "training loss and norm: draw the mean over so many steps; 1: none; 0: a hundredth of the run", 0, 1000000},
    {OPT_FLOAT, 0, NULL, "min-loss", &opt_min_loss, NULL, "where the axis of the loss begins; 0: at the least", 0, 1e6},
    {OPT_FLOAT, 0, NULL, "max-loss", &opt_max_loss, NULL, "where it ends; 0: at the greatest", 0, 1e6},
};

static void check_options() {
    std::string output = opt_output;
    if (output.size() < 5 || output.compare(output.size() - 4, 4, ".svg") != 0) {
        cli_fail("--output wants a name that ends in .svg, got '%s'", opt_output);
    }
    for (const char* p = opt_panels; *p; p += strcspn(p, ",") + (p[strcspn(p, ",")] == ',')) {
        std::string word(p, strcspn(p, ","));
        if (std::none_of(std::begin(PANELS), std::end(PANELS),
                         [&](const Panel& panel) { return word == panel.name; })) {
            cli_fail("--panels: no diagram '%s': loss, norm, rate, speed, hellaswag", word.c_str());
        }
    }
    if (opt_min_loss > 0 && opt_max_loss > 0 && opt_min_loss >= opt_max_loss) {
        cli_fail("--min-loss %g is not below --max-loss %g", (double)opt_min_loss, (double)opt_max_loss);
    }
}

// Splits NAME=PATH. A path alone is named by its last part.
static void split_argument(const std::string& argument, std::string* name, std::string* path) {
    size_t equals = argument.find('=');
    *path = argument;
    if (equals != std::string::npos && !file_exists(argument.c_str())) {
        *name = argument.substr(0, equals);
        *path = argument.substr(equals + 1);
        return;
    }
    while (path->size() > 1 && path->back() == '/') { path->pop_back(); }
    *name = path->substr(path->rfind('/') + 1);
}

int main(int argc, char** argv) {
    open_standard_streams();
    std::vector<const char*> arguments((size_t)argc + 1);
    int n =
        cli_parse_arguments(argc, argv,
                            "Draws training runs as one SVG. A RUN is the -o directory of train_gpt2 or train_gpt2cu, "
                            "or NAME=DIRECTORY.",
                            OPTIONS, sizeof(OPTIONS) / sizeof(OPTIONS[0]), " RUN ...", arguments.data());
    if (n == 0) { cli_fail("no run: name the -o directory of one, see %s --help", argv[0]); }
    if (n > MAX_RUNS) { cli_fail("%d runs, at most %d fit one picture", n, MAX_RUNS); }
    check_options();
    std::vector<Run> runs;
    for (int i = 0; i < n; i++) {
        std::string name, path;
        split_argument(arguments[(size_t)i], &name, &path);
        runs.push_back(read_run(name, path));
        if (strcmp(opt_x, "tokens") == 0) { count_in_tokens(&runs.back()); }
    }
    for (Run& run : runs) { // two directories of one name are told apart by their paths
        auto same = [&](const Run& other) { return other.name == run.name; };
        if (std::count_if(runs.begin(), runs.end(), same) > 1) { run.name = run.log; }
    }
    write_file(opt_output, draw(runs).xml());
    for (const Run& run : runs) {
        print_line(stdout, "%s: %zu steps, %zu validations%s", run.log.c_str(), run.curves[LOSS].size(),
                   run.curves[VALIDATION].size(),
                   run.not_finite ? text("; left out: %d losses that are not finite", run.not_finite).c_str() : "");
    }
    long num_panels =
        std::count_if(std::begin(PANELS), std::end(PANELS), [&](const Panel& panel) { return is_drawn(panel, runs); });
    print_line(stdout, "%s: %ld diagram%s of %zu run%s", opt_output, num_panels, num_panels == 1 ? "" : "s",
               runs.size(), runs.size() == 1 ? "" : "s");
    return EXIT_SUCCESS;
}
