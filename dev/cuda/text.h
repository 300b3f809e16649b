/*
Text, numbers and files for the programs that draw: plot.cpp, svg.h.
*/
#pragma once

#include "../../llmc/utils.h"

#include <math.h>

#include <string>

PRINTF_LIKE(1, 2) static inline std::string text(const char* format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    return line;
}

static inline std::string thousands(double x) { // 1234567 -> 1,234,567
    std::string s = text("%.0f", x);
    for (int i = (int)s.size() - 3; i > 0; i -= 3) { s.insert((size_t)i, ","); }
    return s;
}

static inline std::string escaped(const std::string& s) {
    std::string out;
    for (char c : s) {
        if (c == '&') {
            out += "&amp;";
        } else if (c == '<') {
            out += "&lt;";
        } else if (c == '>') {
            out += "&gt;";
        } else {
            out += c >= ' ' && c <= '~' ? c : '?'; // bytes outside ASCII may be invalid UTF-8
        }
    }
    return out;
}

// Returns a number of the series ... 1, 2, 5, 10, 20, 50 ...: the smallest >= x if `above`, else the largest <= x.
static inline double step_near(double x, bool above) {
    const double mantissas[] = {0.1, 0.2, 0.5, 1, 2, 5, 10};
    double decade = pow(10, floor(log10(x))), step = 0;
    for (double mantissa : mantissas) {
        double tried = mantissa * decade;
        if (above && tried >= x * (1 - 1e-9)) { return tried; }
        if (!above && tried <= x * (1 + 1e-9)) { step = tried; }
    }
    return step;
}

// Replaces a file, or writes to a device or a pipe. On failure a file that was there stays, and the program ends.
static inline void write_file(const std::string& path, const std::string& content) {
    struct stat st;
    bool direct = lstat(path.c_str(), &st) == 0 && !S_ISREG(st.st_mode);
    std::string part = direct ? path : path + ".part-" + std::to_string(getpid());
    FILE* f = fopen(part.c_str(), "wb");
    bool ok = f && fwrite(content.data(), 1, content.size(), f) == content.size();
    ok = f && fclose(f) == 0 && ok && (direct || rename(part.c_str(), path.c_str()) == 0);
    if (ok) { return; }
    int error = errno;
    if (f && !direct) { remove(part.c_str()); }
    die("%s: cannot be written: %s", path.c_str(), strerror(error));
}
