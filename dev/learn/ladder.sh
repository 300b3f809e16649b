#!/usr/bin/env bash
# Writes the ladder of an op into the page of the course that shows it: a table of what each rung costs and brings.
#
#     dev/learn/ladder.sh [OP ...]            writes; prints the names of the pages that changed
#     dev/learn/ladder.sh --check [OP ...]    changes nothing; exits 1 with a line for each table that is stale and for
#                                            each rung whose time is not what its text says
#
# A table stands between `<!-- ladder: OP GPU -->` and `<!-- end ladder: OP -->` in a page of dev/learn. GPU is a directory of
# results, as `make bench` names it; without it, h200. Without OP, all tables are meant. A table is made from three things:
#
# - The list of kernels at the top of OP.cu, without those that kind 0 lacks. A text that begins with cuBLAS is the library. The
#   second column of the page is kept as it is; a rung that is new there gets its text from the list.
# - results/GPU/OP.csv, as `make bench` writes it: each kernel at its fastest configuration. Each results/GPU/ladders/OP_*.csv
#   adds a column for another shape: `./matmul_forward --csv results/h200/ladders/matmul_forward_4096.csv -B 4 -T 1024 -C 4096 -V 4096`.
#   A kernel that a file lacks is "not measured yet".
# - The sections of OP.cu, with OP.cuh in it, from `// ---- kernel N:` to the next such heading. The lines changed are those
#   that `diff -d` adds or changes between the sections of two rungs, without comments, blank lines, indentation, #include and
#   #if; the numbers of the two rungs at the end of names are left out. A rung is compared with the last one before it that is
#   not the library and whose text does not say "loses to", or with N if its text begins "N with", "N in" or "N,". If that one
#   is only an instantiation of another kernel, then with the code of both. Shared lines are counted apart, with the first
#   rung that uses them: a section `// ---- shared by kernels N to M`, and the section of a later kernel that a rung
#   instantiates.
#
# A loser is a rung whose text says "(loses to N ...)". Any other rung that is slower than an earlier one gets "(slower than N)" by
# its time in results/GPU/OP.csv and the rule of versions.sh; the marks in OP.cu are those of an H200 and are not used. So without
# the rungs that have a mark, a ladder falls, or rises by at most 2% from the fastest rung so far.
#
# --check also refuses, at the shape of results/GPU/OP.csv, a rung that is slower by more than 2% but not by more than the spread,
# and a loser that is more than 1% faster than the rung it is said to lose to.
set -u -o pipefail
export LC_ALL=C
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")/../cuda" || exit 1
mode=--write
case ${1-} in
--check) mode=$1 && shift ;;
-*) usage "unknown flag $1; see $0 --help" ;;
esac
pages=../learn

# a line per table: page, op, directory of results
mapfile -t marks < <(awk '/^<!-- ladder: [a-z0-9_]+( [a-z0-9_.-]+)? -->$/ { print FILENAME, $3, ($4 == "-->" ? "h200" : $4) }' "$pages"/*.md /dev/null)
[ ${#marks[@]} -gt 0 ] || fail "no page of dev/learn has a line '<!-- ladder: OP -->'"
for op in "${@%.cu}"; do
    [ -e "$op.cu" ] || usage "no op '$op' in dev/cuda"
    [[ " ${marks[*]} " == *" $op "* ]] || usage "no page has a line '<!-- ladder: $op -->'"
done

tmp=$(mktemp -d /tmp/llmc_ladder_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT

# rungs OP SLOWER: from the list at its top and what versions.sh --slower prints, a line per kernel of kind 0: NUMBER, BASE,
# LOSES_TO, UNSURE, IS_LIBRARY, MARK, TEXT, by tabs. BASE is the rung to compare with, UNSURE one that is faster within the
# spread; MARK has "(loses to N ...)", "(promoted)", "(slower than N)". What is missing is "-".
rungs() {
    awk -v slower="$2" -v title='   Kernels (this list is written by versions.sh):' '
        $0 == title { inside = 1; next }
        !inside { next }
        /^ *$/ || /^ +kind [0-9]/ { exit }
        match($0, /^ +[0-9]+  /) { number[++n] = $1 + 0; sub(/^ +[0-9]+  /, ""); text[n] = $0; next }
        { sub(/^ +/, ""); text[n] = text[n] " " $0 }
        END {
            n_slower = split(slower, pair, " ")
            for (i = 1; i <= n_slower; i++) { split(pair[i], part, /[:~]/); than[part[1]] = part[2]; noise[part[1]] = pair[i] ~ /~/ }
            last = "-"
            for (i = 1; i <= n; i++) {
                if (text[i] ~ / \(kinds? [0-9, to]+\)$/) { continue }
                to = unsure = "-"
                mark = ""
                while (match(text[i], / \(((loses to|slower than) [0-9]+[^()]*|promoted|best)\)$/)) {
                    a_mark = substr(text[i], RSTART)
                    text[i] = substr(text[i], 1, RSTART - 1)
                    if (a_mark !~ /slower than/) { mark = a_mark mark }
                    if (sub(/^ .loses to /, "", a_mark)) { to = a_mark + 0 }
                }
                library = text[i] ~ /^cuBLAS/
                if (!library && to == "-" && (number[i] in than)) {
                    if (noise[number[i]]) { unsure = than[number[i]] } else { mark = mark " (slower than " than[number[i]] ")" }
                }
                base = library ? "-" : last
                if (text[i] ~ /^[0-9]+(,| with | in )/ && text[i] + 0 in is_rung) { base = text[i] + 0 }
                is_rung[number[i]] = 1
                if (!library && to == "-") { last = number[i] }
                print number[i] "\t" base "\t" to "\t" unsure "\t" library "\t" (mark == "" ? "-" : mark) "\t" text[i]
            }
        }' "$1.cu"
}

# sections OP DIR: the code of each section, as it is compared, to DIR/kernelN and DIR/sharedN
sections() {
    ./op_text.sh "$1" | awk -v dir="$2" '
        /^\/\/ ---- / {
            file = ""
            if (/^\/\/ ---- kernel [0-9]+:/) { file = dir "/kernel" ($4 + 0) }
            else if (match($0, /shared by kernels [0-9]+ to /)) { file = dir "/shared" (substr($0, RSTART + 18) + 0) }
            if (file != "") { printf "" >file }
        }
        /^(static )?void declare/ { file = "" } # the kernels end here
        file == "" { next }
        { sub(/[ \t]*\/\/.*/, ""); sub(/^[ \t]+/, "") }
        $0 != "" && !/^#(if|el|endif|include)/ { print >file }'
}

# instance DIR NUMBER: if section NUMBER has no __global__, prints the number of the section whose __global__ template it
# instantiates, directly or through a template in the section of an earlier instantiation
instance() {
    local name number
    if grep -q __global__ "$1/kernel$2"; then return; fi
    for name in $(grep -oE '[a-z_0-9]+<[^<>]*>([(,;]|<<<)' "$1/kernel$2" | sed 's/<.*//' | sort -u); do
        for number in $(cd "$1" && grep -lE "(^|[^a-z_0-9])$name\(" kernel* | sed 's/kernel//'); do
            if grep -q __global__ "$1/kernel$number"; then
                echo "$number" && return
            elif [ "$number" -lt "$2" ]; then
                instance "$1" "$number" && return
            fi
        done
    done
}

# changed DIR NUMBER BASE INSTANCE: prints how many lines of NUMBER's section are not in that of BASE ("-": all of them), and not
# in that of the kernel that BASE is an instantiation of
changed() {
    local names="s/([A-Za-z]{2}|_)($2|$3|${4:-$3})([^0-9A-Za-z]|\$)/\\1N\\3/g" file
    sed -E "$names" "$1/kernel$2" >"$tmp/new"
    for file in ${4:+"$1/kernel$4"} "$1/kernel$3"; do
        [ "$3" = - ] || sed -E "$names" "$file"
    done >"$tmp/old"
    diff -d "$tmp/old" "$tmp/new" | grep -c '^>'
}

# measured OP CSV: a line with what stands above its column, the shape, its type and its card, by tabs; then per kernel of kind 0
# its number, its milliseconds and its TFLOP/s at its fastest configuration
measured() {
    awk -F , -v op="$1" '
        function no(reason) { print reason; failed = 1; exit 1 }
        NR == 1 {
            for (i = 1; i <= NF; i++) { at[$i] = i }
            n = split("op kernel kind case dtype B T C NH V median_ms p10_ms p90_ms tflop_s matrix_type gpu", name, " ")
            for (i = 1; i <= n; i++) { if (!(name[i] in at)) { no("has no column " name[i]) } }
            next
        }
        $at["op"] != op { no("line " NR " is not about " op) }
        $at["kind"] != 0 || $at["case"] != 0 { next }
        $at["median_ms"] !~ /^[0-9]+[.]?[0-9]*$/ || $at["median_ms"] <= 0 { no("line " NR " has no time") }
        {
            B = $at["B"]; T = $at["T"]; C = $at["C"]; V = $at["V"]; ms = $at["median_ms"] + 0; k = $at["kernel"] + 0
            shape = "B " B ", T " T ", C " C ($at["NH"] > 1 ? ", NH " $at["NH"] : "") (V > 0 ? ", V " V : "") "\t" $at["dtype"] "\t" $at["gpu"]
            if (before != "" && shape != before) { no("line " NR " has another shape, type or card than the lines before it") }
            before = shape
            if (!(k in best) || ms < best[k]) { best[k] = ms; tflops[k] = $at["tflop_s"] }
        }
        END {
            if (failed) { exit 1 }
            if (before == "") { no("has no row of kind 0") }
            print (op ~ /^matmul/ ? B * T " x " C " x " V : "B " B ", T " T) "\t" before
            for (k in best) { print k "\t" best[k] "\t" tflops[k] }
        }' "$2"
}

# table PAGE OP GPU: the table and what stands below it
table() {
    local op=$2 made=$tmp/$2.$3 columns=("$tmp/$2.$3".column*)
    echo
    # the page's rows, the lines of rungs(), of changed() and of measured()
    awk -F '\t' -v op="$op" '
        function idea(row) { # the second column, without the marks at its end
            sub(/^\|[^|]*\| */, "", row); sub(/ *\|.*/, "", row)
            while (sub(/ \(((loses to|slower than) [0-9]+[^()]*|promoted|best)\)$/, "", row)) {}
            return row
        }
        FNR == 1 { file++ }
        file == 1 && index($0, "<!-- ladder: " op " ") == 1 { inside = 1 }
        file == 1 && $0 == "<!-- end ladder: " op " -->" { inside = 0 }
        file == 1 { if (inside && match($0, /^\| *[0-9]+ *\|/)) { kept[substr($0, 2) + 0] = idea($0) }; next }
        file == 2 { number[++n] = $1; base[$1] = $2; library[$1] = $5; mark[$1] = $6; text[$1] = $7; next }
        file == 3 { lines[$1] = $2; shared[$1] = $3; note[$1] = $4; next }
        FNR == 1 { name[file - 4] = $1; next }
        { ms[file - 4, $1] = $2; tflops[file - 4, $1] = $3 }
        function duration(x) { return sprintf(x < 1 ? "%.4f" : x < 10 ? "%.3f" : "%.2f", x) }
        function rate(x) { return sprintf(x < 1 ? "%.2f" : "%.1f", x) }
        END {
            head = "| kernel | new idea | lines changed | ms | TFLOP/s |"
            rule = "|---|---|---|---|---|"
            for (c = 1; c <= file - 4; c++) { head = head " TFLOP/s at " name[c] " |"; rule = rule "---|" }
            print head
            print rule
            for (i = 1; i <= n; i++) {
                k = number[i]
                cell = ""
                if (!library[k]) {
                    cell = lines[k] (shared[k] ? " + " shared[k] " shared" : "") note[k]
                    if (base[k] != "-" && base[k] != number[i - 1]) { cell = cell " (from " base[k] ")" }
                }
                row = "| " k " | " (k in kept ? kept[k] : text[k]) (mark[k] == "-" ? "" : mark[k]) " | " cell " | "
                row = row ((0, k) in ms ? duration(ms[0, k]) " | " rate(tflops[0, k]) " |" : "not measured yet | |")
                for (c = 1; c <= file - 4; c++) { row = row " " ((c, k) in ms ? rate(tflops[c, k]) : "not measured yet") " |" }
                gsub(/\|  \|/, "| |", row)
                print row
            }
        }' "$1" "$made.rungs" "$made.lines" "${columns[@]}"
    echo
    awk -F '\t' -v op="$op" -v gpu="$3" -v others=$((${#columns[@]} - 1)) '
        FNR == 1 { file++ }
        file == 1 { if (FNR == 1) { shape = $2; type = $3; card = $4 } else { ms[$1] = $2 } }
        file == 2 && !($1 in ms) { newer = 1 }
        file == 2 && $6 ~ /slower than/ { slower = 1 }
        END {
            print "Measured on an " card " at " shape ", in " type ", each kernel at its fastest configuration:"
            print "[results/" gpu "/" op ".csv](../cuda/results/" gpu "/" op ".csv)" (others ? "; for the other shapes, [ladders](../cuda/results/" gpu "/ladders)." : ".")
            if (others && op ~ /^matmul/) { print "These are given as N x C x OC." }
            if (slower) { print "\"Slower than N\": kernel N comes before it and is faster in these figures by more than 2% and more than the spread." }
            if (newer) { print "\"Not measured yet\": the kernel is newer than these figures." }
        }' "$made.column0" "$made.rungs"
    cat <<'CAPTION'

"Lines changed": the lines under the kernel's heading in the source that are not under the heading of the kernel before it (`diff`).
Comments, blank lines, `#if` and the kernel's number in names do not count. The kernel before it is the last one that is not the library
and does not say "loses to", or the one that its text in the source names; "from" says which, where it is not the row above. "Shared"
is code that later kernels use, too, counted with the first. Of the first kernel all lines count.
[ladder.sh](ladder.sh) writes this table.
CAPTION
    echo
}

# judge OP GPU: a line per rung that may be slower than an earlier one, or is faster than its text says
judge() {
    awk -F '\t' -v op="$1" '
        NR == FNR { if (FNR > 1) { ms[$1] = $2 + 0 }; next }
        $4 != "-" {
            printf "%s: kernel %d takes %.5f ms, kernel %d before it %.5f, and the spread is too large to call it slower: measure again\n",
                op, $1, ms[$1], $4, ms[$4]
        }
        ($1 in ms) && ($3 in ms) && ms[$1] < 0.99 * ms[$3] {
            printf "%s: kernel %d takes %.5f ms and is said to lose to %d, which takes %.5f\n", op, $1, ms[$1], $3, ms[$3]
        }' "$tmp/$1.$2.column0" "$tmp/$1.$2.rungs"
}

# prepare OP GPU: $tmp/OP.GPU.rungs, .lines, .column0 for results/GPU/OP.csv and .column1 ... for further shapes
prepare() {
    local op=$1 made=$tmp/$1.$2 csv slower num=0 number base rest count shared of note dir=$tmp/$1.$2.sections counted=" " instances=()
    [ ! -e "$made.rungs" ] || return 0
    [ -e "results/$2/$op.csv" ] || fail "no results/$2/$op.csv: make bench writes it"
    for csv in "results/$2/$op.csv" "results/$2/ladders/$op"_*.csv; do
        [ -e "$csv" ] || continue
        measured "$op" "$csv" >"$tmp/column" || fail "$csv $(tail -n 1 "$tmp/column")"
        mv "$tmp/column" "$made.column$num"
        num=$((num + 1))
    done
    slower=$(./versions.sh --slower "results/$2/$op.csv") || exit 1
    rungs "$op" "$slower" >"$tmp/rungs"
    [ -s "$tmp/rungs" ] || fail "$op.cu has no list of kernels in the comment at its top: versions.sh writes it"
    mkdir "$dir" && sections "$op" "$dir" || exit 1
    while IFS=$'\t' read -r number base rest; do
        [ -s "$dir/kernel$number" ] || fail "$op.cu has no section '// ---- kernel $number: ...'"
        shared=0 of="" note=""
        [ ! -e "$dir/shared$number" ] || shared=$(wc -l <"$dir/shared$number")
        instances[number]=$(instance "$dir" "$number")
        if [[ ${instances[number]} -gt $number && $counted != *" ${instances[number]} "* ]]; then
            shared=$((shared + $(wc -l <"$dir/kernel${instances[number]}")))
            counted+="${instances[number]} "
        fi
        [ "$base" = - ] || of=${instances[base]}
        [ "$of" != "$number" ] || note=", other template arguments"
        count=$(changed "$dir" "$number" "$base" "$of")
        printf '%d\t%d\t%d\t%s\n' "$number" "$count" "$shared" "$note"
    done <"$tmp/rungs" >"$made.lines" || exit 1
    mv "$tmp/rungs" "$made.rungs"
}

num_problems=0
problem() { echo "$*" && num_problems=$((num_problems + 1)); }
judged=" " written=0 shown=0
for mark in "${marks[@]}"; do
    read -r page op gpu <<<"$mark"
    [ -e "$op.cu" ] || fail "$page shows the ladder of $op: no such op in dev/cuda"
    [[ $# -eq 0 || " ${*%.cu} " == *" $op "* ]] || continue
    shown=$((shown + 1))
    grep -qx "<!-- end ladder: $op -->" "$page" || fail "$page has no line '<!-- end ladder: $op -->'"
    prepare "$op" "$gpu"
    table "$page" "$op" "$gpu" >"$tmp/table" || exit 1
    awk -v op="$op" -v table="$tmp/table" '
        $0 == "<!-- end ladder: " op " -->" { inside = 0 }
        !inside { print }
        index($0, "<!-- ladder: " op " ") == 1 {
            inside = 1
            while ((getline line <table) > 0) { print line }
        }' "$page" >"$tmp/page" || fail "$page could not be rewritten"
    if [ "$mode" = --check ]; then
        cmp -s "$tmp/page" "$page" || problem "dev/learn/${page##*/}: its ladder of $op is stale: dev/learn/ladder.sh writes it"
        [[ $judged != *" $op.$gpu "* ]] || continue
        judged+="$op.$gpu "
        while IFS= read -r line; do problem "$line"; done < <(judge "$op" "$gpu")
    elif ! cmp -s "$tmp/page" "$page"; then
        cat "$tmp/page" >"$page" || fail "$page cannot be written"
        echo "wrote the ladder of $op into dev/learn/${page##*/}"
        written=$((written + 1))
    fi
done
if [ "$mode" = --check ]; then
    [ $num_problems -eq 0 ] || exit 1
    echo "$shown ladders, all as measured"
else
    [ $written -gt 0 ] || echo "$shown ladders, all as measured already"
fi
