/*
The CSV files that bench_report.h writes, for plot.cpp and compare.cpp. A program defines die() before it includes this:
printf for an error message that ends the program.
*/
#pragma once

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

static std::string read_file(const std::string& path) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) { die("%s: %s", path.c_str(), strerror(errno)); }
    std::string content;
    char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), f)) > 0;) { content.append(buffer, n); }
    if (ferror(f)) { die("%s: cannot be read", path.c_str()); }
    fclose(f);
    return content;
}

// Splits a CSV file into lines of fields. Quotes are as in RFC 4180, but a quoted field cannot contain a newline.
static std::vector<std::vector<std::string>> parse_csv(const std::string& path, const std::string& content) {
    std::vector<std::vector<std::string>> lines;
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (size_t i = 0; i < content.size(); i++) {
        char c = content[i];
        bool doubled = quoted && c == '"' && i + 1 < content.size() && content[i + 1] == '"';
        if (doubled) {
            fields.back() += '"', i++;
        } else if (c == '"') {
            quoted = !quoted;
        } else if (c == '\n') {
            if (quoted) { die("%s:%zu: a quote is not closed", path.c_str(), lines.size() + 1); }
            lines.push_back(fields);
            fields.assign(1, "");
        } else if (c == ',' && !quoted) {
            fields.emplace_back();
        } else if (c != '\r') {
            fields.back() += c;
        }
    }
    if (quoted || fields.size() > 1 || !fields[0].empty()) {
        die("%s:%zu: the file ends within a line", path.c_str(), lines.size() + 1);
    }
    return lines;
}

// Access to the fields of one line by column name. An error in the file ends the program.
struct Fields {
    const std::string& path;
    size_t line; // line number in the file; the header is line 1
    const std::vector<std::string>&names, &values;

    const std::string* find(const char* name) const {
        auto at = std::find(names.begin(), names.end(), name);
        return at == names.end() ? nullptr : &values[(size_t)(at - names.begin())];
    }
    const std::string& word(const char* name) const {
        const std::string* value = find(name);
        if (!value) { die("%s: no column '%s'", path.c_str(), name); }
        return *value;
    }
    // Returns a number >= 0. A missing optional column counts as 0.
    double number(const char* name, bool optional = false) const {
        if (optional && !find(name)) { return 0; }
        const std::string& value = word(name);
        char* end;
        double x = strtod(value.c_str(), &end);
        if (value.empty() || *end || !std::isfinite(x) || x < 0) {
            die("%s:%zu: %s is '%s', not a number from 0", path.c_str(), line, name, value.c_str());
        }
        return x;
    }
    int integer(const char* name, bool optional = false) const {
        double x = number(name, optional);
        if (x > 2e9 || x != floor(x)) {
            die("%s:%zu: %s is '%s', not a whole number", path.c_str(), line, name, word(name).c_str());
        }
        return (int)x;
    }
};
