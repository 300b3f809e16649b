#!/usr/bin/env bash
# Prints the names of the tests that a change affects, one per line, as arguments for dev/test/run.sh:
#
#     dev/test/affected.sh FILE ...       the tests that depend on these files
#     dev/test/affected.sh --since REF    on files changed since the merge base with REF, also uncommitted and untracked
#     dev/test/affected.sh --table        each test, followed by all files that it depends on
#
# The script reads the dependencies from the sources. A C or CUDA file depends on the files that it includes; a C file below
# dev/test also depends on the paths in its string literals. A shell script depends on every path in its text except comments.
# A binary stands for its source. A folder, or a pattern or variable in a folder, stands for the whole folder. A function of
# a sourced file such as test.sh, or a target or variable of the Makefile, counts only for the files that name it.
#
# All tests depend on the files that build or run them. A file that no test depends on affects all tests, unless it is
# documentation. When in doubt, the script lists a test.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/../.."
usage() { sed -n '4,6s/^# */usage: /p' dev/test/affected.sh >&2; exit 2; }

case ${1-} in
--table) [ $# -eq 1 ] || usage; changed= ;;
--since)
    [ $# -eq 2 ] || usage
    base=$(git merge-base "$2" HEAD 2>/dev/null) || { echo "error: no commit '$2' to compare with" >&2; exit 2; }
    changed=$(git diff --name-only --no-renames "$base" && git ls-files --others --exclude-standard)
    [ -n "$changed" ] || exit 0 ;;
-* | '') usage ;;
*)
    changed=$(for file in "$@"; do # paths are relative to the top folder or to the folder of the caller
        [ -e "$file" ] || [ ! -e "$from/$file" ] || file=$from/$file
        file=${file#"$PWD/"}
        echo "${file#./}"
    done) ;;
esac

{
    git ls-files --cached --others --exclude-standard 2>/dev/null || find . -type f ! -path './.git/*' | sed 's|^\./||'
    echo "$changed" # other files may still name a removed file
} | CHANGED=$changed awk '
    # Returns the path without "." and "..".
    function normal(path,    n, i, out, part) {
        n = split(path, part, "/")
        for (i = 1; i <= n; i++) {
            if (part[i] == "..") { if (!sub(/\/[^\/]*$/, "", out)) { out = "" } }
            else if (part[i] != "" && part[i] != ".") { out = out (out == "" ? "" : "/") part[i] }
        }
        return out
    }
    function beside(path, word) { sub(/[^\/]*$/, "", path); return normal(path word) } # resolves WORD relative to the folder of PATH

    function edge(from, to) { if (!((from, to) in known)) { known[from, to]; edges[from] = edges[from] "\n" to } }

    # Adds an edge from a node to the file or folder that a word names, if the word ends with a path or the last parts of a path.
    function name(node, path, word,    rest) {
        sub(/^\$[A-Za-z_0-9]*\//, "", word)
        if (word ~ /\.\.\// && beside(path, word) in names) { edge(node, beside(path, word)); return }
        for (rest = normal(word); rest != ""; ) {
            if (rest in names && (rest ~ /[.\/]/ || rest in highest)) { edge(node, word ~ /^\.\/\*/ ? word : rest); return }
            if (!sub(/^[^\/]*\//, "", rest)) { break }
        }
        if (match(word, /[^\/]*[*?$].*/)) { sub(/\/?[^\/]*[*?$].*/, "", word); name(node, path, word) } # a pattern stands for its folder
    }
    function script(node, path, line,    n, i, word, each, make) {
        # drops what the line creates, prints or compares with a pattern: none of it is a dependency
        gsub(/mkdir [^;&|]*|[ {(](skip|fail) ("[^"(]*"|\047[^\047(]*\047)|== *\*[^ ]*|^[ \t]*\*[^ ()]*\)/, "", line)
        while (match(line, /cp [^;&|)]*[ \t][^ \t;&|)]+/)) { # drops the last word, the destination of the copy
            word = substr(line, RSTART + 3, RLENGTH - 3)
            if (word !~ /-t /) { sub(/[^ \t]+$/, "", word) }
            line = substr(line, 1, RSTART - 1) word substr(line, RSTART + RLENGTH)
        }
        make = path == "Makefile" || line ~ /make/
        n = split(line, each, /[^A-Za-z0-9_.*?$\/-]+/)
        for (i = 1; i <= n; i++) {
            word = each[i]
            if (word in functions) { edges[node] = edges[node] functions[word] }
            if (make && word in targets) { edge(node, "make " word) }
            if (word == "make") { edge(node, "Makefile") }
            if (word ~ /[.\/]/ || word in highest) { name(node, path, word) }
        }
    }
    function literals(path, line,    word) {
        while (match(line, /"[^"]*"/)) {
            word = substr(line, RSTART + 1, RLENGTH - 2)
            line = substr(line, RSTART + RLENGTH)
            if (word ~ /[a-z]\//) { name(path, path, word) }
        }
    }

    function kind(path) {
        return path ~ /\.(c|h|cu|cuh|cpp)$/ ? "c" : path ~ /\.(sh|py)$/ ? "script" : path ~ /\.md$/ ? "page" : \
            path ~ /(^|\/)Makefile$|\.mk$/ ? "make" : ""
    }
    # Returns the node that a line defines: a function of a sourced file, or a target or list of files of the Makefile.
    function definition(path, line) {
        if (path in sourced && match(line, /^[A-Za-z_0-9]+\(\)/)) { return "function " path " " substr(line, 1, RLENGTH - 2) }
        if (path == "Makefile" && (line ~ /^[A-Z_]+ := .*wildcard/ || line ~ /^[a-z-]+:/) && match(line, /^[A-Za-z_-]+/)) {
            return "make " substr(line, 1, RLENGTH)
        }
        return ""
    }
    function read(path,    type, line, node, inside, word, quoted) {
        type = kind(path)
        node = path
        page[path] = type == "page"
        if (type == "" || path == "dev/test/run.sh") { return }
        while ((getline line <path) > 0) {
            if (type == "c") {
                if (line ~ /^[ \t]*#[ \t]*include[ \t]*"/) {
                    split(line, quoted, "\"")
                    edge(path, beside(path, quoted[2]) in exists ? beside(path, quoted[2]) : quoted[2])
                } else if (path ~ /^dev\/test\//) { literals(path, line) }
                continue
            }
            if (type == "page" && line ~ /^```/) { inside = !inside }
            if (line ~ /```/) { types[path] }
            if (line ~ /^[ \t]*#( |!|$)/ || type == "page" && !inside) { continue }
            word = definition(path, line)
            if (word == "make test") { word = "" } # a test cannot run all tests, because it is one of them
            if (word != "") { node = word } else if (type == "make" && line ~ /^[^ \t]/) { node = path }
            if (node != "Makefile" || line ~ /^include/) { script(node, path, line) }
            if (path in sourced && line ~ /^}|^[A-Za-z_0-9]+\(\).*}$/) { node = path }
        }
        close(path)
    }
    # Marks everything that a node (a path, a part of a path, a function or a target) depends on. Files of a folder count with
    # their includes only.
    function reach(node,    n, i, to) {
        if (!(node in exists)) {
            n = split(names[node], to, "\n")
            for (i = 2; i <= n; i++) { if (n == 2) { reach(to[i]) } else { include(to[i]) } }
        }
        if (expanded[node] == run || split(node, to, " ") == 3 && reached[to[2]] != run) { return } # its file is not sourced
        expanded[node] = run
        include(node)
        if (page[node] && !(path[t] in types)) { return } # only a test that looks for ``` runs the commands of a page
        n = split(edges[node], to, "\n")
        for (i = 2; i <= n; i++) { reach(to[i]) }
    }
    function include(path,    n, i, to) {
        if (reached[path] == run) { return }
        reached[path] = run
        if (kind(path) != "c") { return }
        n = split(edges[path], to, "\n")
        for (i = 2; i <= n; i++) { if (to[i] in exists) { include(to[i]) } else { reach(to[i]) } }
    }

    # Adds a file to the files that a part of a path, such as "cuda/gelu_forward.cu" or "dev/cuda", may stand for.
    function part_of(key, path) { names[key] = names[key] "\n" path }
    $0 != "" && !($0 in exists) {
        exists[$0]
        path[++paths] = $0
        binary = $0
        if (!sub(/\.(c|cpp)$/, "", binary) && !sub(/\.cu$/, "cu", binary)) { binary = "" }
        depth = split($0, part, "/")
        highest[part[1]]
        if (depth == 1 && binary != "") { highest[binary] }
        for (i = 1; i <= depth; i++) {
            key = part[i]
            if (i == 1 || key ~ /\./) { part_of(key, $0) }
            for (j = i + 1; j <= depth; j++) { key = key "/" part[j]; part_of(key, $0) }
            if (binary ~ /\// || i == 1 && binary != "") { part_of(binary, $0); sub(/^[^\/]*\//, "", binary) }
        }
        if (match($0, /\.[a-z]+$/)) {
            key = "*" substr($0, RSTART)
            part_of(key, $0)
            if (depth == 1) { part_of("./" key, $0) }
            for (i = depth - 1; i > 0; i--) { key = part[i] "/" key; part_of(key, $0) }
        }
    }
    END {
        for (i = 1; i <= paths; i++) {
            if (kind(path[i]) != "script") { continue }
            while ((getline line <path[i]) > 0) {
                if (line ~ /^ *(\.|source) .*\.sh"?$/) {
                    sub(/^ *(\.|source) +"?(\$\([^)]*\)\/*)?/, "", line)
                    sub(/"$/, "", line)
                    sourced[line in exists ? line : beside(path[i], line)]
                }
            }
            close(path[i])
        }
        for (i = 1; i <= paths; i++) {
            if (!(path[i] in sourced) && path[i] != "Makefile") { continue }
            while ((getline line <path[i]) > 0) {
                word = line = definition(path[i], line)
                sub(/.* /, "", word)
                if (line ~ /^function/) { functions[word] = functions[word] "\n" line } else if (line != "") { targets[word] }
            }
            close(path[i])
        }
        for (i = 1; i <= paths; i++) { read(path[i]) }

        changes = split(ENVIRON["CHANGED"], changed, "\n")
        run = "all" # marks the files that every make reads
        reach("Makefile")
        for (i = 1; i <= changes; i++) {
            all = all || reached[changed[i]] == run || changed[i] ~ /^(\.ci\/.*|dev\/test\/(run|test)\.sh)$/
        }
        for (t = 1; t <= paths; t++) {
            if (path[t] !~ /^dev\/test\/(unit|program|gpu)\/test_[^\/]*\.(c|sh)$/ || (getline line <path[t]) < 0) { continue }
            test = path[t]
            sub(/.*\//, "", test); sub(/\.c$/, "", test)
            tests[++n_tests] = test
            run = t
            reach(path[t])
            if (!changes) {
                printf "%s:", test
                for (i = 1; i <= paths; i++) { if (reached[path[i]] == t) { printf " %s", path[i] } }
                print ""
            }
            for (i = 1; i <= changes; i++) { if (reached[changed[i]] == t) { touched[test]; wanted[changed[i]] } }
        }
        for (i = 1; i <= changes; i++) {
            all = all || !(changed[i] in wanted) && changed[i] !~ /\.(md|svg|png)$|^LICENSE$|^\.github\//
        }
        for (t = 1; t <= n_tests; t++) { if (changes && (all || tests[t] in touched)) { print tests[t] } }
    }'
