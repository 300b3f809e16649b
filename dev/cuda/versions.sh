#!/usr/bin/env bash
# Writes the list of kernels into the comment at the top of each op, from what `./op --list` prints.
#
#     dev/cuda/versions.sh [OP ...]              writes; prints the names of the files that changed
#     dev/cuda/versions.sh --check [OP ...]      changes nothing; names the files whose list is stale and exits 1
#     dev/cuda/versions.sh --check-text [OP ...] the same without building: compares with the source of declare() only
#     dev/cuda/versions.sh --slower CSV          prints "K:N" for each kernel K that is slower than an earlier one, N, in this file
#
# The list stands above the nvcc line, as a paragraph of its own. A kernel that kind 0 of the operation lacks is followed by
# the kinds that have it. Which kernel is (promoted) or (best) may depend on the GPU: where results/h200/OP.csv says so, the
# list says what it is on an H200, otherwise what --list says without a GPU. (slower than N) is from the same file: kernel N, the
# fastest of the earlier ones of the same matrix type, is faster by more than 2% and by more than the spread of both times. The
# library has no such mark and is no N, and a text that says "loses to" has no such mark. Where the spread is too large to say,
# --slower prints "K~N".
#
# The programs are built for a CPU with dev/cuda/emulation, in bf16, in build/emulated, as for `make test`. Needs no nvcc and no GPU.
# What a program has listed is kept in build/emulated/lists until the op's own text changes, or a .cuh that it includes.
set -u -o pipefail
export LC_ALL=C
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES PRECISION OP OPS BIN_DIR
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
# slower CSV: "K:N " for each kernel K that is more than 2% slower than the fastest earlier one, N, of the same matrix type; "K~N "
# if their spreads overlap
slower() {
    awk -F , '
        NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i } next }
        $at["kind"] + $at["case"] == 0 && $at["what"] !~ /^"?cuBLAS/ {
            k = $at["kernel"] + 0; ms = $at["median_ms"] + 0
            if (k > last) { last = k }
            if (!(k in best) || ms < best[k]) {
                best[k] = ms; low[k] = $at["p10_ms"] + 0; high[k] = $at["p90_ms"] + 0; type[k] = $at["matrix_type"]
            }
        }
        END {
            for (k = 1; k <= last; k++) { # not the library, number 0
                faster = 0
                for (n = 1; n < k; n++) {
                    if ((k in best) && (n in best) && type[n] == type[k] && (!faster || best[n] < best[faster])) { faster = n }
                }
                if (faster && best[k] > 1.02 * best[faster]) { printf "%d%s%d ", k, (low[k] > high[faster] ? ":" : "~"), faster }
            }
        }' "$1"
}

if [ "${1-}" = --slower ]; then
    [ -f "${2-}" ] || usage "--slower needs a CSV of make bench; see $0 --help"
    slower "$2" || fail "$2 cannot be read"
    exit 0
fi
cd "$(dirname "$0")" || exit 1
CXX=${CXX:-g++}
mode=--write
case ${1-} in
--check | --check-text) mode=$1 && shift ;;
-*) usage "unknown flag $1; see $0 --help" ;;
esac
title='   Kernels (this list is written by versions.sh):'
build=../../build/emulated
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

ops=()
for op in "$@"; do
    op=${op%.cu}
    [ -e "$op.cu" ] || usage "no op '$op' in dev/cuda"
    ops+=("$op")
done
if [ $# -eq 0 ]; then # those whose main is that of bench.h; practice files are not ops
    mapfile -t ops < <(grep -l 'return bench_main(' ./*.cu | sed 's|^\./||; s/\.cu$//' | grep -v '^practice_')
fi
[ ${#ops[@]} -gt 0 ] || fail "no ops here"

tmp=$(mktemp -d /tmp/llmc_versions_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT

# the paragraph of a header: from its title to the empty line after it
paragraph() { awk -v title="$title" '/^ *$/ { inside = 0 } $0 == title { inside = 1 } inside { print } /\*\// { exit }' "$1"; }

if [ "$mode" = --check-text ]; then
    failed=0
    for op in "${ops[@]}"; do
        paragraph "$op.cu" >"$tmp/have"
        # every text of the list is a string of the source, every number of declare() is in the list, and the other way round
        awk -v op="$op" '
            FNR == NR {
                if (FNR == 1) { next }
                if (match($0, /^ +[0-9]+  /)) { n++; number[n] = $1 + 0; sub(/^ +[0-9]+  /, ""); text[n] = $0 }
                else if (/^ +kind [0-9]/) { in_kinds = 1 }
                else if (!in_kinds) { sub(/^ +/, ""); text[n] = text[n] " " $0 }
                next
            }
            { sub(/\/\/.*/, ""); code = code $0 " " }
            END {
                gsub(/" +"/, "", code) # adjacent strings are one
                for (i = 1; i <= n; i++) {
                    sub(/ \(kinds? [0-9, to]+\)$/, "", text[i])
                    sub(/ \(slower than [0-9]+\)$/, "", text[i])
                    marks += sub(/ \((promoted|best)\)/, "", text[i])
                    listed[number[i]] = 1
                    is_text[text[i]] = 1
                    if (!index(code, "\"" text[i] "\"")) { print op ".cu: its list names kernel " number[i] " \"" text[i] "\", its code does not"; bad = 1 }
                }
                # FUNCTION(NUMBER, "text": a function that declares one kernel of the list declares no other
                by["kernel"] = 1
                for (pass = 1; pass <= 2; pass++) {
                    rest = code
                    while (match(rest, /[A-Za-z0-9_]+\( *[0-9]+, /)) {
                        call = substr(rest, RSTART, RLENGTH)
                        rest = substr(rest, RSTART + RLENGTH)
                        name = at = call
                        sub(/\(.*/, "", name); sub(/.*\( */, "", at); at += 0
                        what = rest
                        if (sub(/^ *"/, "", what)) { sub(/".*/, "", what) } else { what = "" }
                        if (pass == 1 && what in is_text) { by[name] = 1 }
                        if (pass == 2 && name in by) {
                            declared[at] = 1
                            if (!(at in listed)) { print op ".cu: kernel " at " is not in the list"; bad = 1 }
                        }
                    }
                }
                for (i = 1; i <= n; i++) {
                    if (!(number[i] in declared)) { print op ".cu: kernel " number[i] " of the list is not in declare()"; bad = 1 }
                }
                if (code ~ /[^A-Za-z0-9_]b\.(promoted|best)\(/ && !marks) { print op ".cu: no kernel of its list is (promoted) or (best)"; bad = 1 }
                exit bad
            }' "$tmp/have" "$op.cu" || failed=$((failed + 1))
    done
    [ $failed -eq 0 ] || fail "the list of $failed ops is stale: dev/cuda/versions.sh writes it"
    exit 0
fi

# ---- what the programs list ----

# key OP: a sum of what decides on the list: the op, the .cuh files that it includes, and the code that prints lists
key() {
    local files=("$1.cu") i new
    for ((i = 0; i < ${#files[@]}; i++)); do
        while read -r new; do
            [[ " ${files[*]} " == *" $new "* || ! -e $new ]] || files+=("$new")
        done < <(sed -n 's/^#include "\([^"\/]*\.cuh\)".*/\1/p' "${files[i]}")
    done
    # without the comment at the op's top, in which the list stands
    { sed -n '/^inline void bench_print_list/,/^}/p' bench.h && sed '1,/\*\//d' "${files[0]}" && cat /dev/null "${files[@]:1}"; } | cksum
}
# one OP: writes the op's list to $lists/OP.list, its list for each kind of operation to $lists/OP.list.KIND, and the key
one() {
    local op=$1 kind=0
    rm -f "$lists/$op".*
    "$build/${op}_cpu" --list >"$lists/$op.list" || return 1
    while grep -q "^kind $kind " "$lists/$op.list"; do
        "$build/${op}_cpu" --list --kind $kind >"$lists/$op.list.$kind" || return 1
        kind=$((kind + 1))
    done
    key "$op" >"$lists/$op.key"
}
lists=$build/lists
mkdir -p "$lists" || exit 1
changed=()
for op in "${ops[@]}"; do
    [ -e "$lists/$op.key" ] && [ "$(key "$op")" = "$(cat "$lists/$op.key")" ] || changed+=("$op")
done
if [ ${#changed[@]} -gt 0 ]; then
    command -v "$CXX" >/dev/null || fail "no $CXX: apt-get install g++, or set CXX="
    [ ${#changed[@]} -lt 5 ] || echo "building ${#changed[@]} ops, whose lists are not known yet" >&2
    make -k -j"$jobs" --no-print-directory CXX="$CXX" BIN_DIR="$build" OP= OPS="${changed[*]}" cpu >"$tmp/log" 2>&1 ||
        { tail -n 20 "$tmp/log" >&2 && fail "an op does not build"; }
    for op in "${changed[@]}"; do one "$op" || fail "$op does not list its kernels"; done
fi

# best_on_h200 OP: "promoted" or "best", a tab, and the text of the kernel that is it, if results/h200 says so
best_on_h200() {
    [ -e "results/h200/$1.csv" ] || return 0
    awk -F , '
        NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i } next }
        at["best_kernel"] && $at["best_kernel"] == 1 && $at["kind"] == 0 {
            text = $0
            for (i = 1; i < at["what"]; i++) { sub(/^[^,]*,/, "", text) } # the last field, which may have commas
            gsub(/^"|"$/, "", text); gsub(/""/, "\"", text)
            print ($at["promoted"] == 1 ? "promoted" : "best") "\t" text
            exit
        }' "results/h200/$1.csv"
}

# list OP: the paragraph, in lines of at most 120 characters
list() {
    local op=$1 kinds=("$lists/$1".list.*) best slower=""
    [ -e "${kinds[0]}" ] || kinds=()
    best=$(best_on_h200 "$op")
    [ ! -e "results/h200/$op.csv" ] || slower=$(slower "results/h200/$op.csv")
    awk -v title="$title" -v best="${best//\\/}" -v slower="$slower" '
        function kind_of(file) { sub(/.*\./, "", file); return file + 0 }
        function put(first, text,    n, word, i, line) { # in lines of at most 120 characters
            n = split(text, word, " ")
            line = first
            for (i = 1; i <= n; i++) {
                if (length(line) + 1 + length(word[i]) > 120) { print line; line = "          " word[i] }
                else { line = line (i == 1 ? "" : " ") word[i] }
            }
            print line
        }
        FILENAME ~ /[.]list$/ && /^[0-9]+  / { number[++n] = $1; sub(/^[0-9]+  /, ""); text[n] = $0; next }
        FILENAME ~ /[.]list$/ && /^kind [0-9]+  / { k = $2 + 0; sub(/^kind [0-9]+  /, ""); kind_text[k] = $0; num_kinds++; next }
        FILENAME ~ /[.]list[.]/ && /^[0-9]+  / { has[$1, kind_of(FILENAME)] = 1 }
        END {
            split(best, mark, "\t")
            n_slower = split(slower, pair, " ")
            for (i = 1; i <= n_slower; i++) { if (split(pair[i], part, ":") == 2) { than[part[1]] = part[2] } }
            for (i = 1; i <= n; i++) {
                plain[i] = text[i]
                sub(/ \((promoted|best)\)$/, "", plain[i])
                if (best != "" && plain[i] == mark[2]) { known = 1 }
            }
            print title
            for (i = 1; i <= n; i++) {
                in_0 = num_kinds == 0 || ((number[i], 0) in has)
                if (known && in_0) { text[i] = plain[i] (plain[i] == mark[2] ? " (" mark[1] ")" : "") }
                if (in_0 && (number[i] in than) && text[i] !~ /loses to|^cuBLAS/) { text[i] = text[i] " (slower than " than[number[i]] ")" }
                kinds = ""; count = 0; last = -1; run = 1
                for (k = 0; !in_0 && k < num_kinds; k++) {
                    if (!((number[i], k) in has)) { continue }
                    if (count++ == 0) { first = k } else if (k != last + 1) { run = 0 }
                    kinds = kinds (kinds == "" ? "" : ", ") k
                    last = k
                    named[k] = 1
                }
                if (count > 2 && run) { kinds = first " to " last }
                put(sprintf("   %3d  ", number[i]), text[i] (in_0 ? "" : " (kind" (count > 1 ? "s " : " ") kinds ")"))
            }
            for (k = 0; k < num_kinds; k++) {
                if (k in named) { put("     kind " k ": ", kind_text[k]) }
            }
        }' "$lists/$op.list" ${kinds[@]+"${kinds[@]}"}
}

# with_list OP: the file with the list of $tmp/OP.new above its nvcc line
with_list() {
    awk -v title="$title" -v list="$tmp/$1.new" '
        done { print; next }
        /^   nvcc / {
            while ((getline line <list) > 0) { print line }
            print ""
            done = 1
        }
        /\*\// { failed = !done; done = 1 }
        $0 == title { skipping = 1 }
        !skipping { print }
        skipping && /^ *$/ { skipping = 0 }
        END { exit failed }' "$1.cu"
}

stale=0
for op in "${ops[@]}"; do
    list "$op" >"$tmp/$op.new"
    with_list "$op" >"$tmp/$op.cu" || fail "$op.cu has no nvcc line in the comment at its top: '   nvcc -O3 --use_fast_math $op.cu -o $op' belongs above its end"
    cmp -s "$tmp/$op.cu" "$op.cu" && continue
    stale=$((stale + 1))
    if [ "$mode" = --check ]; then
        echo "$op.cu: its list is stale:"
        diff "$op.cu" "$tmp/$op.cu" | sed -n 's/^\([<>]\)/    \1/p' | head -n 6
    else
        cat "$tmp/$op.cu" >"$op.cu" || fail "$op.cu cannot be written"
        echo "wrote the list of $op.cu"
    fi
done
if [ "$mode" = --check ]; then
    [ $stale -eq 0 ] || fail "$stale of ${#ops[@]} lists are stale: dev/cuda/versions.sh writes them"
    echo "${#ops[@]} lists of kernels, all as --list prints them"
else
    [ $stale -gt 0 ] || echo "${#ops[@]} lists of kernels, all as --list prints them already"
fi
