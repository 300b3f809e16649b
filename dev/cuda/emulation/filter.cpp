/*
Rewrites CUDA C++ as C++ for the headers in this folder: filter [--declare | --define] IN OUT NAME. It changes what C++
cannot express; line numbers stay as they are, and a #line directive gives the output the name NAME. For functions that
are neither templates nor members, --declare keeps only the declarations and --define makes the linkage external, so
that the harness is compiled once instead of once per op.

    kernel<4><<<grid, block>>>(a, b);    emulation_kernel(kernel<4>, grid, block)(a, b);
    __shared__ float x[32], y;           a reference to memory of the block for each variable, see shared_variables()
    asm volatile("ex2 ...", ...);        emulation_asm("ex2 ...", ...); asm statements without instructions stay
    threadIdx, blockDim, ...             emulation_thread_index(), ..., but not members of that name
    *reinterpret_cast<const T*>(p)       emulation_load(reinterpret_cast<const T*>(p)): one access, in this line
*/
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

static bool is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

// The first position from i on that is not white space or a comment.
static size_t skip_space(const std::string& s, size_t i) {
    while (i < s.size()) {
        if (isspace((unsigned char)s[i])) {
            i++;
        } else if (s.compare(i, 2, "//") == 0) {
            i = std::min(s.find('\n', i), s.size());
        } else if (s.compare(i, 2, "/*") == 0) {
            i = std::min(s.find("*/", i + 2), s.size() - 2) + 2;
        } else {
            break;
        }
    }
    return i;
}

// The position after the comment, string or character at i, or i if there is none.
static size_t skip_opaque(const std::string& s, size_t i) {
    if (s.compare(i, 2, "//") == 0 || s.compare(i, 2, "/*") == 0) { return skip_space(s, i); }
    bool digit_separator = s[i] == '\'' && i > 0 && isdigit((unsigned char)s[i - 1]);
    if ((s[i] != '"' && s[i] != '\'') || digit_separator) { return i; }
    size_t end = i + 1;
    while (end < s.size() && s[end] != s[i]) { end += s[end] == '\\' ? 2 : 1; }
    return end + 1;
}

// The position after the bracket that closes the one at i.
static size_t skip_brackets(const std::string& s, size_t i) {
    int depth = 0;
    do {
        depth += s[i] == '(' || s[i] == '[' || s[i] == '{';
        depth -= s[i] == ')' || s[i] == ']' || s[i] == '}';
        i++;
    } while (i < s.size() && depth > 0);
    return i;
}

// Where the expression that ends at the end of s begins: names, ::, ., -> and template arguments.
static size_t begin_of_kernel(const std::string& s) {
    size_t i = s.size();
    while (i > 0 && isspace((unsigned char)s[i - 1])) { i--; }
    int depth = 0; // of template arguments
    while (i > 0) {
        char c = s[i - 1];
        if (c == '>' && i > 1 && s[i - 2] == '-') {
            i -= 2;
        } else if (c == '>' || c == '<') {
            depth += c == '>' ? 1 : -1, i--;
        } else if (depth > 0 || is_name(c) || c == ':' || c == '.') {
            i--;
        } else {
            break;
        }
    }
    return i;
}

static std::string trimmed(const std::string& s) {
    size_t begin = s.find_first_not_of(" \t\n"), end = s.find_last_not_of(" \t\n");
    return begin == std::string::npos ? "" : s.substr(begin, end + 1 - begin);
}

// Rewrites the declaration `text`, what stands between __shared__ and the semicolon:
//     extern __shared__ T x[];    T* x = (T*)emulation_dynamic_shared(alignment)
//     __shared__ T x[n];          T (&x)[n] = *(T (*)[n])emulation_shared(key, sizeof(T[n]), alignment, "x")
static std::string shared_variables(std::string text, bool dynamic) {
    std::string alignment;
    size_t newlines = 0;
    for (char& c : text) {
        newlines += c == '\n';
        if (c == '\n') { c = ' '; }
    }
    text = trimmed(text);
    for (const char* word : {"__align__(", "alignas("}) {
        size_t at = text.find(word);
        if (at == std::string::npos) { continue; }
        size_t begin = at + strlen(word) - 1, end = skip_brackets(text, begin);
        alignment = text.substr(begin, end - begin);
        text = trimmed(text.substr(0, at) + text.substr(end));
    }
    // the declarators, split at commas outside of brackets; the type is what precedes the first one's name
    std::vector<std::string> parts = {""};
    int depth = 0;
    for (char c : text) {
        depth += c == '[' || c == '(' || c == '<';
        depth -= c == ']' || c == ')' || c == '>';
        if (c == ',' && depth == 0) {
            parts.push_back("");
        } else {
            parts.back() += c;
        }
    }
    size_t name_end = std::min(parts[0].find('['), parts[0].size());
    while (name_end > 0 && !is_name(parts[0][name_end - 1])) { name_end--; }
    size_t name_begin = name_end;
    while (name_begin > 0 && is_name(parts[0][name_begin - 1])) { name_begin--; }
    std::string type = trimmed(parts[0].substr(0, name_begin)), out;
    parts[0] = parts[0].substr(name_begin);
    if (alignment.empty()) { alignment = "alignof(" + type + ")"; }
    for (const std::string& part : parts) {
        std::string declarator = trimmed(part);
        size_t bracket = std::min(declarator.find('['), declarator.size());
        std::string name = trimmed(declarator.substr(0, bracket)), dims = declarator.substr(bracket);
        if (dynamic) {
            out += type + "* " + name + " = (" + type + "*)emulation_dynamic_shared(" + alignment + ");";
        } else {
            bool array = !dims.empty();
            out += "static char emulation_key_" + name + "; " + type + (array ? " (&" : "& ") + name +
                   (array ? ")" : "") + dims + " = *(" + type + (array ? " (*)" : "*") + dims +
                   ")emulation_shared(&emulation_key_" + name + ", sizeof(" + type + dims + "), " + alignment + ", \"" +
                   name + "\");";
        }
    }
    return out + std::string(newlines, '\n');
}

// The built-in variables of a kernel.
static const struct {
    const char *name, *function;
} places[] = {{"threadIdx", "emulation_thread_index()"},
              {"blockIdx", "emulation_block_index()"},
              {"blockDim", "emulation_block_size()"},
              {"gridDim", "emulation_grid_size()"}};

// The function that stands for the word at in[i], or NULL.
static const char* place_at(const std::string& in, size_t i) {
    if (i > 0 && (in[i - 1] == '.' || in[i - 1] == '>')) { return NULL; } // config.gridDim, config->gridDim
    for (const auto& place : places) {
        size_t n = strlen(place.name);
        if (in.compare(i, n, place.name) == 0 && !is_name(in[i + n])) { return place.function; }
    }
    return NULL;
}

// The position after the load *reinterpret_cast<const T*>(p) at i, or i if there is none.
static size_t skip_load(const std::string& in, size_t i) {
    const char* begin = "*reinterpret_cast<const ";
    if (in.compare(i, strlen(begin), begin) != 0) { return i; }
    size_t open = in.find(">(", i);
    if (open == std::string::npos) { return i; }
    size_t end = skip_brackets(in, open + 1);
    return in[end] == '[' || in[end] == '.' || in[end] == '-' ? i : end;
}

static std::string filtered(const std::string& in) {
    std::string out;
    bool launching = false;        // between <<< and >>>
    std::vector<size_t> load_ends; // of the loads that have begun, the inner one last
    for (size_t i = 0; i < in.size();) {
        if (!load_ends.empty() && i >= load_ends.back()) {
            out += ")", load_ends.pop_back();
            continue;
        }
        size_t end = skip_opaque(in, i);
        bool word = is_name(in[i]) && (i == 0 || !is_name(in[i - 1]));
        if (end > i) { // copied as it is
        } else if (skip_load(in, i) > i) {
            load_ends.push_back(skip_load(in, i));
            out += "emulation_load(", i++;
            continue;
        } else if (in.compare(i, 3, "<<<") == 0) {
            out.insert(begin_of_kernel(out), "emulation_kernel(");
            out += ", ", i += 3, launching = true;
            continue;
        } else if (launching && in.compare(i, 3, ">>>") == 0) {
            out += ")", i += 3, launching = false;
            continue;
        } else if (word && place_at(in, i)) {
            out += place_at(in, i);
            while (is_name(in[i])) { i++; }
            continue;
        } else if (word && in.compare(i, 10, "__shared__") == 0) {
            size_t semicolon = in.find(';', i), before = out.rfind("extern");
            bool dynamic = before != std::string::npos && trimmed(out.substr(before)) == "extern";
            if (dynamic) { out.resize(before); }
            out += shared_variables(in.substr(i + 10, semicolon - i - 10), dynamic);
            i = semicolon + 1;
            continue;
        } else if (word && in.compare(i, 3, "asm") == 0 && !is_name(in[i + 3])) {
            size_t open = skip_space(in, i + 3);
            if (in.compare(open, 8, "volatile") == 0) { open = skip_space(in, open + 8); }
            size_t first = in[open] == '(' ? skip_space(in, open + 1) : i;
            if (in[open] == '(' && in.compare(first, 2, "\"\"") != 0) {
                out += "emulation_asm", i = open;
                continue;
            }
        }
        end = end > i ? end : i + 1;
        out.append(in, i, end - i);
        i = end;
    }
    return out;
}

// Removes `inline` from the functions that start a line with `inline` or `__global__`. With `declare`, also removes
// their bodies.
static std::string external(const std::string& in, bool declare) {
    std::string out;
    for (size_t i = 0; i < in.size();) {
        size_t end = std::max(skip_opaque(in, i), i + 1);
        if (i > 0 && in[i - 1] == '\n' && (in.compare(i, 7, "inline ") == 0 || in.compare(i, 11, "__global__ ") == 0)) {
            size_t head = in.find_first_of("{;", skip_brackets(in, in.find('(', i)));
            if (in[i] == 'i') { i += 7; }
            out.append(in, i, head - i);
            end = head;
            if (declare && in[head] == '{') {
                int depth = 0;
                do { // comments and strings may contain braces
                    depth += (in[end] == '{') - (in[end] == '}');
                    end = std::max(skip_opaque(in, end), end + 1);
                } while (depth > 0);
                out += ";" + std::string(std::count(in.begin() + head, in.begin() + end, '\n'), '\n');
            }
        } else {
            out.append(in, i, end - i);
        }
        i = end;
    }
    return out;
}

static std::string read_file(const char* path, bool must_exist) {
    std::string text;
    FILE* f = fopen(path, "rb");
    if (!f && must_exist) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    char buffer[4096];
    for (size_t n; f && (n = fread(buffer, 1, sizeof(buffer), f)) > 0;) { text.append(buffer, n); }
    if (f) { fclose(f); }
    return text;
}

int main(int argc, char** argv) {
    std::string mode = argc == 5 ? argv[1] : "";
    if ((argc != 4 && argc != 5) || (argc == 5 && mode != "--declare" && mode != "--define")) {
        fprintf(stderr, "usage: filter [--declare | --define] IN OUT NAME\n");
        return 2;
    }
    argv += argc - 4;
    std::string out = filtered(read_file(argv[1], true));
    if (mode != "") { out = external(out, mode == "--declare"); }
    out = std::string("#line 1 \"") + argv[3] + "\"\n" + out;
    if (out == read_file(argv[2], false)) { return EXIT_SUCCESS; } // unchanged: nothing that includes it is rebuilt
    FILE* f = fopen(argv[2], "wb");
    if (!f || fwrite(out.data(), 1, out.size(), f) != out.size() || fclose(f) != 0) {
        perror(argv[2]);
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
