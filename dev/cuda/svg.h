/*
A picture in SVG, legible on a light and on a dark page: for ../learn/figures.cpp and ../../scripts/plot_runs.cpp.

It knows where its texts are (the widths are those of DejaVu Sans, which is wider than the usual sans-serif fonts), so it
can tell whether they overlap, run out of their box or cross a line.
*/
#pragma once

#include "text.h"

#include <algorithm>
#include <vector>

// A card with a border, white on a light page and dark on a dark one. Classes: t ink, f faint ink, a to e fills with
// outlines, g grey, n outline only, l lines, m thin faint lines.
static const char* STYLE =
    ".t{fill:#1f2328}.f{fill:#59636e}.card{fill:#ffffff;stroke:#d1d9e0}"
    ".a{fill:#cfe3f6;stroke:#3b76ab}.b{fill:#fde0bd;stroke:#a8610c}.c{fill:#cdebd0;stroke:#2f7d3b}"
    ".d{fill:#e3d8f5;stroke:#7a55b8}.e{fill:#fad1d1;stroke:#b93a3a}.g{fill:#eceff2;stroke:#8b949e}"
    ".n{fill:none;stroke:#59636e}.l{stroke:#1f2328;fill:none}.m{stroke:#9aa4ae;fill:none}"
    "@media (prefers-color-scheme:dark){.t{fill:#e6edf3}.f{fill:#a2adb8}.card{fill:#0d1117;stroke:#3d444d}"
    ".a{fill:#173a5c;stroke:#6cb0ea}.b{fill:#553408;stroke:#f0a950}.c{fill:#16401f;stroke:#6bc77a}"
    ".d{fill:#3b2a63;stroke:#b699ee}.e{fill:#5c1f1f;stroke:#f08b8b}.g{fill:#222830;stroke:#7d8790}"
    ".n{fill:none;stroke:#a2adb8}.l{stroke:#e6edf3;fill:none}.m{stroke:#6e7781;fill:none}}";

// The widths of the characters ' ' to '~' in DejaVu Sans and in its bold face, in 1/1000 of the font size.
static const short WIDTHS[2][95] = {
    {318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361,  318, 337, 636, 636, 636,
     636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632,
     575, 775, 752, 295, 295, 656, 557, 863, 748, 787, 603, 787, 695, 635,  611, 732, 684, 989, 685,
     611, 685, 390, 337, 390, 838, 500, 500, 613, 635, 550, 635, 615, 352,  635, 634, 278, 278, 579,
     278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592,  525, 636, 337, 636, 838},
    {348, 456,  521, 838, 696, 1002, 872, 306, 457, 457, 523, 838, 380, 415,  380, 365, 696, 696,  696,
     696, 696,  696, 696, 696, 696,  696, 400, 400, 838, 838, 838, 580, 1000, 774, 762, 734, 830,  683,
     683, 821,  837, 372, 372, 775,  637, 995, 837, 850, 733, 850, 770, 720,  682, 812, 774, 1103, 771,
     724, 725,  457, 365, 457, 838,  500, 500, 675, 716, 593, 716, 678, 435,  716, 712, 343, 343,  665,
     343, 1042, 712, 687, 716, 716,  493, 595, 478, 712, 652, 924, 645, 652,  582, 712, 365, 712,  838}};

static inline double width_of(const std::string& s, int size, bool bold) {
    double sum = 0;
    for (char c : s) {
        if (c < ' ' || c > '~') { die("'%s': only printable ASCII is drawn", s.c_str()); }
        sum += WIDTHS[bold][c - ' '];
    }
    return sum * size / 1000;
}

// A coordinate, in tenths: 12.5, 13
static inline std::string num(double x) {
    double tenths = floor(x * 10 + 0.5);
    return fmod(tenths, 10) == 0 ? text("%.0f", tenths / 10 + 0.0) : text("%.1f", tenths / 10);
}

struct Point {
    double x, y;
};
struct Area {
    double left, top, right, bottom;
    bool meets(const Area& o) const { return left < o.right && o.left < right && top < o.bottom && o.top < bottom; }
    bool holds(const Area& o) const { return left <= o.left && o.right <= right && top <= o.top && o.bottom <= bottom; }
};

// True if the segment from a to b has a point in the area (Liang and Barsky's clipping).
static inline bool crosses(Point a, Point b, const Area& area) {
    double from = 0, to = 1, dx = b.x - a.x, dy = b.y - a.y;
    const double p[] = {-dx, dx, -dy, dy};
    const double q[] = {a.x - area.left, area.right - a.x, a.y - area.top, area.bottom - a.y};
    for (int i = 0; i < 4; i++) {
        if (p[i] == 0 && q[i] < 0) { return false; }
        if (p[i] < 0) { from = std::max(from, q[i] / p[i]); }
        if (p[i] > 0) { to = std::min(to, q[i] / p[i]); }
    }
    return from <= to;
}

struct Svg {
    double width, height;
    std::string title, description, body, style = STYLE;

    struct Label {
        Area area;
        std::string words;
        size_t order;
    };
    struct Rect {
        Area area;
        bool filled;
        size_t order;
    };
    struct Segment {
        Point a, b;
    };
    std::vector<Label> labels;
    std::vector<Rect> rects;
    std::vector<Segment> segments;
    size_t order = 0;

    // The title is drawn, too; below it the subtitle. desc: for readers who do not see the figure.
    Svg(double w, double h, const std::string& head, const std::string& subtitle, const std::string& desc)
        : width(w), height(h), title(head), description(desc) {
        label(20, 28, head, "start", "t", 16, true);
        if (!subtitle.empty()) { faint(20, 48, subtitle); }
    }

    void label(double x, double y, const std::string& s, const char* anchor = "start", const char* color = "t",
               int size = 12, bool bold = false) {
        double w = width_of(s, size, bold);
        double left = !strcmp(anchor, "start") ? x : !strcmp(anchor, "end") ? x - w : x - w / 2;
        labels.push_back({{left, y - 0.74 * size, left + w, y + 0.2 * size}, s, order++});
        body += "<text class=\"" + std::string(color) + "\" x=\"" + num(x) + "\" y=\"" + num(y) + "\"";
        if (strcmp(anchor, "start") != 0) { body += std::string(" text-anchor=\"") + anchor + "\""; }
        if (size != 12) { body += text(" font-size=\"%d\"", size); }
        if (bold) { body += " font-weight=\"bold\""; }
        body += ">" + escaped(s) + "</text>\n";
    }
    void faint(double x, double y, const std::string& s, const char* anchor = "start") { label(x, y, s, anchor, "f"); }
    void bold(double x, double y, const std::string& s, const char* anchor = "start", int size = 12) {
        label(x, y, s, anchor, "t", size, true);
    }
    void middle(double x, double y, const std::string& s, const char* color = "t") { label(x, y, s, "middle", color); }

    void rect(double x, double y, double w, double h, const char* color, const std::string& more = "") {
        rects.push_back({{x, y, x + w, y + h}, color[0] != 'n', order++});
        body += "<rect class=\"" + std::string(color) + "\" x=\"" + num(x) + "\" y=\"" + num(y) + "\" width=\"" +
                num(w) + "\" height=\"" + num(h) + "\"" + more + "/>\n";
    }
    // A box with lines of text in its middle, the first one bold if `head`. Every line must fit.
    void box(double x, double y, double w, double h, const char* color, const std::vector<std::string>& lines,
             bool head = false, const std::string& more = "") {
        rect(x, y, w, h, color, more);
        double at = y + h / 2 - 15.0 / 2 * ((double)lines.size() - 1) + 4.5;
        for (size_t i = 0; i < lines.size(); i++, at += 15) {
            bool is_head = head && i == 0;
            if (width_of(lines[i], 12, is_head) > w - 3) {
                problem(text("'%s' is wider than its box of %.0f", lines[i].c_str(), w));
            }
            label(x + w / 2, at, lines[i], "middle", "t", 12, is_head);
        }
    }
    // Diagonal lines over an area: not used, masked, waiting.
    void hatch(double x, double y, double w, double h) {
        body += "<rect fill=\"url(#hatch)\" x=\"" + num(x) + "\" y=\"" + num(y) + "\" width=\"" + num(w) +
                "\" height=\"" + num(h) + "\"/>\n";
    }
    void hatch(const std::vector<Point>& points) {
        std::string d;
        for (const Point& p : points) { d += (d.empty() ? "M" : "L") + num(p.x) + " " + num(p.y); }
        body += "<path fill=\"url(#hatch)\" d=\"" + d + "Z\"/>\n";
    }
    void line(double x1, double y1, double x2, double y2, const char* color = "l", const std::string& more = "") {
        segments.push_back({{x1, y1}, {x2, y2}});
        body += "<path class=\"" + std::string(color) + "\" d=\"M" + num(x1) + " " + num(y1) + "L" + num(x2) + " " +
                num(y2) + "\"" + more + "/>\n";
    }
    // A curve, which texts may cross.
    void curve(const std::vector<Point>& points, const char* color, const std::string& more = "") {
        std::string d;
        for (const Point& p : points) { d += (d.empty() ? "M" : "L") + num(p.x) + " " + num(p.y); }
        body += "<path class=\"" + std::string(color) + "\" d=\"" + d + "\"" + more + "/>\n";
    }
    // A thin line that text may cross.
    void grid_line(double x1, double y1, double x2, double y2) {
        line(x1, y1, x2, y2, "m", " stroke-width=\"0.5\"");
        segments.pop_back();
    }
    void arrow(double x1, double y1, double x2, double y2, const char* color = "l", const std::string& more = "") {
        double length = hypot(x2 - x1, y2 - y1), ux = (x2 - x1) / length, uy = (y2 - y1) / length;
        line(x1, y1, x2 - 5 * ux, y2 - 5 * uy, color, more);
        body += std::string("<path class=\"") + (color[0] == 'l' ? "t" : "f") + "\" d=\"M" + num(x2) + " " + num(y2) +
                "L" + num(x2 - 8 * ux + 3.5 * uy) + " " + num(y2 - 8 * uy - 3.5 * ux) + "L" +
                num(x2 - 8 * ux - 3.5 * uy) + " " + num(y2 - 8 * uy + 3.5 * ux) + "Z\"/>\n";
    }
    void polygon(const std::vector<Point>& points, const char* color, bool closed = true, const char* more = "") {
        std::string d;
        for (size_t i = 0; i < points.size(); i++) { d += (i ? "L" : "M") + num(points[i].x) + " " + num(points[i].y); }
        for (size_t i = 1; i < points.size() && !closed; i++) { segments.push_back({points[i - 1], points[i]}); }
        body += "<path class=\"" + std::string(color) + "\" d=\"" + d + (closed ? "Z" : "") + "\"" + more + "/>\n";
    }
    void dot(double x, double y, double radius, const char* color, const std::string& more = "") {
        body += "<circle class=\"" + std::string(color) + "\" cx=\"" + num(x) + "\" cy=\"" + num(y) + "\" r=\"" +
                num(radius) + "\"" + more + "/>\n";
    }
    // One entry of a legend: a sample and a word. Returns where the next one starts.
    double legend(double x, double y, const char* color, const std::string& word, bool hatched = false) {
        rect(x, y - 10, 16, 12, color);
        if (hatched) { hatch(x, y - 10, 16, 12); }
        label(x + 22, y, word);
        return x + 22 + width_of(word, 12, false) + 22;
    }

    std::vector<std::string> problems;
    void problem(const std::string& s) { problems.push_back(s); }
    // Appends what makes the figure hard to read to `problems`.
    void inspect() {
        Area card = {8, 8, width - 8, height - 8};
        for (size_t i = 0; i < labels.size(); i++) {
            const Label& l = labels[i];
            const char* words = l.words.c_str();
            if (!card.holds(l.area)) { problem(text("'%s' runs out of the card", words)); }
            for (size_t j = i + 1; j < labels.size(); j++) {
                if (l.area.meets(labels[j].area)) {
                    problem(text("'%s' overlaps '%s'", words, labels[j].words.c_str()));
                }
            }
            for (const Rect& r : rects) {
                if (r.area.meets(l.area) && !r.area.holds(l.area)) {
                    problem(text("'%s' crosses a box at %.0f, %.0f", words, r.area.left, r.area.top));
                } else if (r.filled && r.order > l.order && r.area.holds(l.area)) {
                    problem(text("'%s' is hidden by a box", words));
                }
            }
            for (const Segment& s : segments) {
                if (crosses(s.a, s.b, l.area)) {
                    problem(text("'%s' is crossed by a line from %.0f, %.0f", words, s.a.x, s.a.y));
                }
            }
        }
    }
    std::string xml() const {
        return text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f "
                    "%.0f\" ",
                    width, height, width, height) +
               "font-family=\"sans-serif\" font-size=\"12\" role=\"img\" aria-labelledby=\"title desc\">\n"
               "<title id=\"title\">" +
               escaped(title) + "</title>\n<desc id=\"desc\">" + escaped(description) + "</desc>\n<style>" + style +
               "</style>\n<defs><pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">"
               "<path class=\"m\" d=\"M-1 1L1 -1M0 6L6 0M5 7L7 5\"/></pattern></defs>\n" +
               text("<rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"%.0f\" height=\"%.0f\" rx=\"6\"/>\n", width - 1,
                    height - 1) +
               body + "</svg>\n";
    }
};
