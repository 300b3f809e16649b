#!/usr/bin/env bash
# Which lines the tests run. See --help.
set -u -o pipefail
cd "$(dirname "$0")/../../.." || exit 1

usage() {
    cat <<'HELP'
usage: dev/test/program/coverage.sh [--op OP ...] [--flags FLAGS] [--missed FILE]

Prints for each source file how many of its lines the tests have run, by gcc's gcov. Without --op: the programs for the CPU and
their headers, by all tests that run these programs; this takes some minutes. With --op: kernels of dev/cuda, by the op's --check
in the emulation on the CPU; EMULATION_LIMIT=10 allows larger shapes.

  --op OP        an op of dev/cuda, for example layernorm_forward; may be repeated
  --flags FLAGS  what the op's --check gets, too: "25 --case 0" runs one kernel. Several such words, with commas between
                 them, are runs that add up: "25 -B 1 -T 700 -C 128 -NH 2,25 -B 1 -T 64 -C 64 -NH 1"
  --missed FILE  print the lines of FILE that have not run, for example llmc/json.h
  --help, -h     this text

make coverage, make coverage OP=layernorm_forward
HELP
}
fail() { # STATUS MESSAGE
    echo "error: $2" >&2
    exit "$1"
}

ops=() missed="" flags=""
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --op | --missed | --flags) [ $# -ge 2 ] || fail 2 "$1 wants a value, see --help" ;;
    *) fail 2 "unknown argument '$1', see --help" ;;
    esac
    case $1 in
    --op) ops+=("$2") ;;
    --flags) flags=$2 ;;
    *) missed=$2 ;;
    esac
    shift 2
done
command -v gcov >/dev/null || fail 1 "no gcov: apt-get install gcc"
for op in ${ops[@]+"${ops[@]}"}; do [ -e "dev/cuda/$op.cu" ] || fail 2 "no op '$op': ls dev/cuda/*.cu"; done
dir=$PWD/build/coverage
find "$dir" -name '*.gcda' -delete 2>/dev/null

run_host() {
    make --no-print-directory BIN_DIR=build/coverage CC=gcc CFLAGS='-O0 -g --coverage -fprofile-update=atomic' TEST_CFLAGS= programs tests >"$dir.log" 2>&1 ||
        { tail -n 20 "$dir.log" && fail 1 "does not build"; }
    BIN_DIR=build/coverage CC=gcc dev/test/run.sh >"$dir.log" 2>&1 || echo "note: some tests have failed, see build/coverage.log"
    tail -n 1 "$dir.log"
}
# A tree of its own, because objects with other flags must not take the place of those of `make cpu`.
run_ops() {
    mkdir -p "$dir/tree"
    git ls-files -z llmc dev/cuda | xargs -0 cp --parents -t "$dir/tree" || fail 1 "needs git and its checkout"
    for op in "${ops[@]}"; do
        make --no-print-directory -C "$dir/tree/dev/cuda" cpu OP="$op" CXX=g++ CPU_CXXFLAGS='-O1 -g --coverage' \
            CPU_LINK='-pthread -no-pie --coverage' >"$dir.log" 2>&1 || { tail -n 20 "$dir.log" && fail 1 "$op does not build"; }
        while read -r words; do
            # shellcheck disable=SC2086
            (cd "$dir/tree/dev/cuda" && "./${op}_cpu" $words --check) >"$dir.log" 2>&1 ||
                echo "note: $op $words: some checks have failed, see build/coverage.log"
            echo "$op $words: $(tail -n 1 "$dir.log")"
        done <<<"${flags//,/$'\n'}"
    done
}

mkdir -p "$dir"
if [ ${#ops[@]} -gt 0 ]; then run_ops; else run_host; fi
# One program runs some lines of a header, another one others: a line counts if it has run in any of them, and in any instance of
# a template. gcov writes "COUNT: LINE: TEXT", with - for lines without code and ##### or ===== for those that have not run.
# The names of an op's sources are relative to dev/cuda.
of='^(llmc|dev/data)/|^train_gpt2' from=.
[ ${#ops[@]} -eq 0 ] || of='^dev/cuda/[a-z0-9_]+[.]cuh?$|^llmc/[a-z_]+[.]cuh$' from=$dir/tree/dev/cuda
find "$dir" -name '*.gcda' -print0 | (cd "$from" && xargs -0 -n 1 gcov -t 2>/dev/null) | awk -v top="$PWD/" -v of="$of" -v ops=${#ops[@]} -v missed="$missed" '
    /^ *-:    0:Source:/ {
        file = substr($0, index($0, ":Source:") + 8); sub("^" top, "", file)
        if (ops) { file = "dev/cuda/" file; sub(/^dev\/cuda\/\.\.\/\.\.\//, "", file) }
        wanted = file ~ of; next }
    !wanted { next }
    match($0, /^ *([0-9]+\*?|#####|=====): *[0-9]+:/) {
        split(substr($0, 1, RLENGTH), part, ":"); count = part[1]; line = part[2] + 0; gsub(/ /, "", count)
        key = file SUBSEP line
        if (!(key in runs)) { runs[key] = 0; lines[file]++; text[key] = substr($0, RLENGTH + 1) }
        if (count !~ /[#=]/ && count + 0 > 0 && !runs[key]) { runs[key] = 1; ran[file]++ } }
    END {
        for (file in lines) { all += lines[file]; good += ran[file]; printf "1 %-52s %6d %6d %6.1f%%\n", file, lines[file], ran[file], 100 * ran[file] / lines[file] }
        if (!all || (missed != "" && !(missed in lines))) {
            print "error: " (all ? missed " was not measured; without --missed, all files are listed" : "nothing was measured") >"/dev/stderr"; exit 1 }
        printf "2 %-52s %6d %6d %6.1f%%\n", "all", all, good, 100 * good / all
        for (key in runs) { split(key, part, SUBSEP); if (part[1] == missed && !runs[key]) { printf "3 %06d %s\n", part[2], text[key] } } }' |
    { echo "0 $(printf '%-52s %6s %6s' file lines run)" && cat; } | sort | sed 's/^[0-3] //; s/^0*\([0-9]\{1,6\} .*\)/\1/'
