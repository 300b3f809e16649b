#!/usr/bin/env bash
# Makes an exercise of a kernel: practice_OP.cu is OP.cu, with OP.cuh in it, without the body of that kernel, for you to
# write it again.
#
#     make practice OP=softmax_forward                        which kernels there are to practise, and their ideas
#     make practice OP=softmax_forward RUNG=4                 writes practice_softmax_forward.cu; says how to go on
#     make practice OP=softmax_forward RUNG=4 SOLUTION=yes    prints the original
#     make practice-time OP=softmax_forward RUNG=4            with a GPU: your time beside the original's
#     ../learn/practice.sh OP [RUNG [solution | time]]
#
# Another RUNG of the same op is cut out of the practice file that is there, in which your kernels stay. Only FORCE=yes
# overwrites a practice file. PRECISION=FP32 or FP16 is for the commands that are printed: the file is the same in every
# precision. Helpers, launchers, the check and its inputs stay as they are. Git ignores practice files, and `make all`,
# `make test` and `make bench` leave them out.
#
# A kernel can be practised if it has a function of its own, OP..._kernelN, that does more than call a helper.
set -u -o pipefail
export LC_ALL=C
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")/../cuda" || exit 1
op=${1-} rung=${2-} action=${3-}
[ -n "$op" ] || usage "no OP: make practice OP=softmax_forward RUNG=4; make help lists more"
[[ $op != practice_* ]] || usage "OP is the op without practice_: make practice OP=${op#practice_}"
if ! [[ $op =~ ^[a-z0-9_]+$ ]] || [ ! -e "$op.cu" ]; then
    near=$(./op_text.sh --near "$op")
    usage "OP='$op' is no .cu file here${near:-: make practice OP=softmax_forward RUNG=4}"
fi
[[ $rung =~ ^[0-9]*$ ]] || usage "RUNG is the number of a kernel, not '$rung'"
[[ $action =~ ^(solution|time)?$ ]] || usage "'$action' is neither solution nor time"
[ -n "$rung" ] || [ -z "$action" ] || usage "no RUNG: make practice OP=$op lists those that there are"
[[ ${PRECISION:=BF16} =~ ^(BF16|FP16|FP32)$ ]] || usage "PRECISION is BF16, FP16 or FP32, not '$PRECISION'"
rung=${rung:+$((10#$rung))}
practice=practice_$op
bin=${BIN_DIR:-.}

tmp=$(mktemp -d /tmp/llmc_practice_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT

# Reads C++ character by character, so that a brace in a comment or a string does not count. Prints, tab-separated:
#     banner  NUMBER LINE IDEA                                        of each number that a banner names
#     kernel  NAME LINE  OPEN COLUMN  CLOSE COLUMN  STATEMENTS CALLS  of each function that is __global__ and has a body
#     bad     LINE TEXT                                               what this does not understand
scan='
function reset() { head = ""; head_line = 0 }
function begin_body(    text, n) {
    open = FNR; open_column = i; code = ""; nested = 0
    text = head
    gsub(/__launch_bounds__ *\([^()]*(\([^()]*\)[^()]*)*\)/, "", text)
    n = match(text, /[A-Za-z_0-9]+ *\(/)
    name = substr(text, n, RLENGTH)
    sub(/ *\($/, "", name)
}
function end_body(    statements, calls, seen, word, rest) {
    if (nested != 0) { print "bad\t" open "\t" name ": an #if or #endif without its other half"; return }
    if (FNR > open && i != 1) { print "bad\t" open "\t" name ": no } in the first column ends it"; return }
    rest = code
    statements = gsub(/;/, ";", rest)
    rest = code
    while (match(rest, /[A-Za-z_][A-Za-z_0-9]*(<[^<>;()]*>)?\(/)) {
        word = substr(rest, RSTART, RLENGTH - 1)
        # a method has no name of its own
        if (substr(rest, RSTART - 1, 1) == ".") { word = "" }
        rest = substr(rest, RSTART + RLENGTH)
        sub(/<.*/, "", word)
        if (word ~ /^(|if|for|while|switch|return|sizeof|defined|float|int|size_t|double|unsigned|floatX|dim3|static_cast|reinterpret_cast|__align__)$/) { continue }
        if (word ~ /^(static_assert|alignas|decltype|__launch_bounds__)$/ || seen[word]++) { continue }
        calls = calls (calls == "" ? "" : " ") word
    }
    print "kernel\t" name "\t" head_line "\t" open "\t" open_column "\t" FNR "\t" i "\t" statements "\t" calls
}
BEGIN { state = "code"; reset() }
/^\/\/ ---- kernels? [0-9]/ {
    numbers = idea = $0
    sub(/^\/\/ ---- kernels? /, "", numbers); sub(/:.*/, "", numbers)
    sub(/^[^:]*: */, "", idea); sub(/ *-+ *$/, "", idea)
    n = split(numbers, number, /[^0-9]+/)
    if (numbers ~ / to /) { for (k = number[1]; k <= number[2]; k++) { print "banner\t" k "\t" FNR "\t" idea } }
    else { for (k = 1; k <= n; k++) { print "banner\t" number[k] "\t" FNR "\t" idea } }
}
{
    length_ = length($0)
    if (state == "code" && (continued || $0 ~ /^[ \t]*#/)) { # of the preprocessor
        if (depth > 0 && $0 ~ /^[ \t]*#[ \t]*if/) { nested++ }
        if (depth > 0 && $0 ~ /^[ \t]*#[ \t]*endif/) { nested-- }
        if (depth == 0 && head !~ /__global__/) { reset() }
        continued = $0 ~ /\\$/
        next
    }
    for (i = 1; i <= length_; i++) {
        c = substr($0, i, 1); two = substr($0, i, 2)
        if (state == "comment") { if (two == "*/") { state = "code"; i++ }; continue }
        if (state == "string") { if (c == "\\") { i++ } else if (c == quote) { state = "code" }; continue }
        if (two == "//") { break }
        if (two == "/*") { state = "comment"; i++; continue }
        if (two == "R\"") { print "bad\t" FNR "\ta raw string" }
        if (c == "\"" || (c == "\047" && substr($0, i - 1, 1) !~ /[0-9A-Za-z_]/)) { state = "string"; quote = c; continue }
        if (depth == 0) {
            if (c !~ /[ \t]/ && head_line == 0) { head_line = FNR }
            head = head c
            if (c == "(") { parens++ } else if (c == ")") { parens-- }
            if (c == ";" && parens == 0) { reset(); continue }
        } else { code = code c }
        if (c == "{") {
            if (depth++ == 0) { is_kernel = head ~ /__global__/; if (is_kernel) { begin_body() } else { nested = 0 } }
        } else if (c == "}") {
            if (--depth < 0) { print "bad\t" FNR "\ta } without its {"; exit }
            if (depth == 0) { if (is_kernel) { end_body() }; reset() }
        }
    }
    if (state == "string" && $0 !~ /\\$/) { print "bad\t" FNR "\ta string without its end"; state = "code" }
    if (depth == 0 && head != "") { head = head " " }
    else { code = code " " }
}
END { if (depth != 0 || state != "code") { print "bad\t" FNR "\tthe file ends within a function or a comment" } }'
# the op as one text, in which the lines of the scan count
text=$tmp/$op.cu
./op_text.sh "$op" >"$text" || exit 1
place() { ./op_text.sh "$op" "$1"; }
awk "$scan" "$text" >"$tmp/scan" || fail "$op.cu cannot be read"
bad=$(awk -F '\t' '$1 == "bad" { print $2 ": " $3; exit }' "$tmp/scan")
[ -z "$bad" ] || fail "$(place "${bad%%:*}"):${bad#*:}; mend it, or practise another op"

# One line per rung: NUMBER, then "yes" or the reason why it cannot be practised, then the idea.
# To $tmp/others: the functions that rungs launch which are not their own, as NAME and NUMBER.
: >"$tmp/others"
awk -F '\t' -v OFS='\t' -v others="$tmp/others" '
    FNR == NR && $1 == "banner" && !($2 in idea) { order[++n] = $2; idea[$2] = $4; next }
    FNR == NR && $1 == "kernel" {
        name[++m] = $2; line[m] = $3; last[m] = $6
        if (match($2, /_kernel[0-9]+(_|$)/)) {
            number = substr($2, RSTART + 7, RLENGTH - 7); sub(/_/, "", number)
            if (number == 0) { next } # the library, or part of several kernels
            if ($8 > 1) { own[number] = own[number] " " $2 }
            else { small[number] = $9; sub(/ .*/, "", small[number]); small_name[number] = $2 }
        }
        next
    }
    FNR == NR { next }
    # which kernel functions a rung launches, from the banner on
    /^\/\/ ---- / {
        at = -1
        if (match($0, /^\/\/ ---- kernels? [0-9]+/)) { at = substr($0, 1, RLENGTH); sub(/.* /, "", at); at += 0 }
        next
    }
    /^(static )?void declare\(|^int main\(/ { at = -1 }
    at >= 0 {
        for (k = 1; k <= m; k++) {
            if (FNR >= line[k] && FNR <= last[k]) { continue }
            p = index($0, name[k])
            if (p && substr($0, p + length(name[k]), 1) !~ /[A-Za-z0-9_]/ && !((at, k) in used)) {
                used[at, k] = 1
                uses[at] = uses[at] (uses[at] == "" ? "" : ", ") name[k]
            }
        }
    }
    END {
        for (i = 1; i <= n; i++) {
            number = order[i]
            if (number == 0) { verdict = "the library, or a part that other kernels share" }
            else if (number in own) { verdict = "yes" }
            else if (number in small) { verdict = small_name[number] "() only calls " small[number] "()" }
            else if (number in uses) { verdict = "no function of its own: it launches " uses[number] }
            else { verdict = "no function of its own" }
            for (k = 1; k <= m; k++) {
                if ((number, k) in used && index(own[number] " ", " " name[k] " ") == 0) { print name[k], number >others }
            }
            print number, verdict, idea[number]
        }
    }' "$tmp/scan" "$text" >"$tmp/rungs"
[ -s "$tmp/rungs" ] || fail "$op.cu has no banner of the form '// ---- kernel 4: idea ----', so there is nothing to practise"
list() {
    awk -F '\t' '$2 == "yes" { printf "%4d  %s\n", $1, $3 }' "$tmp/rungs"
    awk -F '\t' '$2 != "yes" { if (!n++) { print "not to be practised:" } printf "%4d  %s\n", $1, $2 }' "$tmp/rungs"
}
if ! cut -f 2 "$tmp/rungs" | grep -qx yes; then
    list >&2
    fail "no kernel of $op can be practised: all are made of other ops' kernels"
fi
if [ -z "$rung" ]; then
    echo "$op: kernels to practise, as in: make practice OP=$op RUNG=$(awk -F '\t' '$2 == "yes" { print $1; exit }' "$tmp/rungs")"
    list
    exit 0
fi
verdict=$(awk -F '\t' -v n="$rung" '$1 == n { print $2; exit }' "$tmp/rungs")
if [ "$verdict" != yes ]; then
    echo "error: kernel $rung of $op cannot be practised: ${verdict:-there is none of that number}; there are:" >&2
    list | sed '/^not/,$d' >&2
    exit 2
fi

# the functions of this rung: those lines of the scan
own_functions() { awk -F '\t' -v n="$rung" '$1 == "kernel" && $8 > 1 && $2 ~ ("_kernel" n "(_|$)")' "$tmp/scan"; }
own_functions >"$tmp/cut"

if [ "$action" = solution ]; then
    while IFS=$'\t' read -r _ _ first _ _ last _; do
        echo "// $(place "$first")"
        sed -n "${first},${last}p" "$text"
    done <"$tmp/cut"
    exit 0
fi

if [ "$action" = time ]; then
    [ -e "$practice.cu" ] || fail "no $practice.cu: make practice OP=$op RUNG=$rung"
    { [ -x "$bin/$op" ] && [ -x "$bin/$practice" ]; } || fail "not built: make practice-time OP=$op RUNG=$rung"
    for program in "$op" "$practice"; do
        "$bin/$program" "$rung" --csv "$tmp/$program.csv" >"$tmp/out" 2>&1 ||
            { cat "$tmp/out" >&2 && fail "$program $rung fails, see above"; }
    done
    # the fastest configuration of each
    for program in "$op" "$practice"; do
        awk -F , -v program="$program" '
            NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i } next }
            !best || $at["median_ms"] + 0 < best { best = $at["median_ms"] + 0; row = $0 }
            END {
                split(row, f, ",")
                printf "%s\t%s\t%s\t%s\t%s\n", program, f[at["median_ms"]], f[at["p10_ms"]], f[at["p90_ms"]],
                    f[at["config"]] == 0 ? "default" : f[at["config_name"]] " " f[at["config"]]
            }' "$tmp/$program.csv"
    done | awk -F '\t' -v rung="$rung" '
        { name = $1 " " rung; if (NR == 1) { first = $2 }
          printf "%-36s %s ms (%s to %s), %s%s\n", name, $2, $3, $4, $5,
              NR == 2 ? sprintf(": %.2f x the time of the original", $2 / first) : "" }'
    exit 0
fi

# A practice file that is there is cut once more, at another kernel; what you have written in it stays.
base=$text
had=
if [ -e "$practice.cu" ] && [ "${FORCE-}" != yes ]; then
    had=$(sed -n '1s/^\/\/ practice: [a-z0-9_]* kernels \([0-9 ]*\), made by .*/\1/p' "$practice.cu")
    [ -n "$had" ] || fail "$practice.cu is there already: FORCE=yes overwrites it, or rename it"
    [[ " $had " != *" $rung "* ]] ||
        fail "$practice.cu has kernel $rung already; FORCE=yes overwrites the file with a new one, or rename it"
    base=$practice.cu
    awk "$scan" "$base" >"$tmp/scan" || fail "$base cannot be read"
    bad=$(awk -F '\t' '$1 == "bad" { print $2 ": " $3; exit }' "$tmp/scan")
    [ -z "$bad" ] || fail "$base:$bad; mend it, or FORCE=yes overwrites the file"
    own_functions >"$tmp/cut"
    [ -s "$tmp/cut" ] || fail "$base has no function of kernel $rung any more: FORCE=yes overwrites the file"
fi

# ---- what the comment in place of the body says ----

# the lines of the head comment that name the tensors: its second paragraph, up to what bounds the op; of OP.cu, else of OP.cuh
for file in "$op.cu" "$op.cuh"; do
    { [ -e "$file" ] && [ ! -s "$tmp/shapes" ]; } || continue
    awk 'NR == 1 { next } /^ *$/ { if (shapes) { exit } next } /^ *(Bound|Constraint|Error|Source|For study)/ { exit }
         / (in|out|inout)(;|,|:| |\||$)/ || shapes { shapes = 1; sub(/^ */, ""); print }' "$file" >"$tmp/shapes"
done
idea=$(awk -F '\t' -v n="$rung" '$1 == n { print $3; exit }' "$tmp/rungs")

# launches NAME: the statements that launch this kernel function
launches() {
    awk -v name="$1" '
        /^[ \t]*\/\// { next }
        !inside && (p = index($0, name)) && substr($0, p + length(name)) ~ /^(<[^<>]*>)?(<<<|[,)])/ && !/__global__/ &&
            ($0 ~ /<<</ || $0 ~ /(Launch|launch)/) && !/[.]kernel\(/ { inside = 1; n++ }
        inside && n <= 3 { sub(/^[ \t]*/, ""); print "    " $0 }
        inside && /;/ { inside = 0 }' "$text"
}
# places CALLS: these functions, grouped by the file that defines them, as a text
places() {
    local word file where
    for word in $1; do
        where=3
        [[ $word != __* ]] || { echo "$where|$word" && continue; }
        for file in "$text" ../../llmc/cuda_common.cuh ../../llmc/ptx.cuh ./*.cuh ./*.cu; do
            if grep -qE "__device__.*[ *&]$word\(" "$file"; then
                case $file in
                "$text") where="1 (defined in this file)" ;;
                ../../*) where="2 (in ${file#../../})" ;;
                *) where="2 (in ${file#./})" ;;
                esac
                break
            fi
        done
        echo "$where|$word"
    done | sort -s -t '|' -k 1,1 | awk -F '|' '
        $1 != at { if (n++) { printf "%s, ", at == 3 ? "" : substr(at, 2) } at = $1; printf "%s", $2; next }
        { printf ", %s", $2 }
        END { if (n) { printf "%s", at == 3 ? "" : substr(at, 2) } }'
}
comments() { # makes comments of the lines on stdin, which keep their indentation; breaks those that are too long
    awk '{
        match($0, /^ */); indent = substr($0, 1, RLENGTH); n = split($0, word, " "); line = "    // " indent
        if (n == 0) { print "    //"; next }
        for (i = 1; i <= n; i++) {
            if (i > 1 && length(line) + 1 + length(word[i]) > 128) { print line; line = "    // " indent "    " }
            line = line (line ~ / $/ ? "" : " ") word[i]
        }
        print line
    }'
}
number=0
while IFS=$'\t' read -r _ name _ _ _ _ _ _ calls; do
    number=$((number + 1))
    launches "$name" >"$tmp/launches"
    {
        echo "Practice: write the body of $name()."
        echo "Idea of kernel $rung: $idea"
        echo ""
        cat "$tmp/shapes"
        if [ -s "$tmp/launches" ]; then echo "" && echo "It is launched by:" && cat "$tmp/launches"; fi
        if [ -n "$calls" ]; then echo "" && echo "The original calls $(places "$calls")."; fi
    } | comments >"$tmp/comment.$number"
done <"$tmp/cut"

# ---- the copy ----

# Marks of promoted code are left out: promote.sh would find the block twice.
awk -F '\t' -v op="$op" -v rung="$rung" -v had="$had" -v comment="$tmp/comment." '
    FNR == NR { open[++n] = $4; open_column[n] = $5; close_[n] = $6; close_column[n] = $7; next }
    FNR == 1 {
        print "// practice: " op " kernels " (had == "" ? "" : had " ") rung ", made by practice.sh from " op ".cu"
        if (had != "") { in_header = 2; next }
    }
    /^\/\/ ==== (end )?promoted: / { next }
    in_header == 0 && /^\/\*/ { in_header = 1 }
    in_header == 1 {
        gsub("-o " op, "-o practice_" op); gsub(" " op "[.]cu", " practice_" op ".cu")
        gsub("make " op, "make practice_" op); gsub("[.]/" op " ", "./practice_" op " ")
        if (/\*\//) { in_header = 2 }
    }
    at < n && FNR == open[at + 1] {
        at++
        print substr($0, 1, open_column[at])
        while ((getline line <(comment at)) > 0) { print line }
        close(comment at)
        cut = 1
    }
    !cut { print }
    cut && FNR == close_[at] { print substr($0, close_column[at]); cut = 0 }' "$tmp/cut" FS=' ' "$base" >"$tmp/new" ||
    fail "$base cannot be copied"
cp "$tmp/new" "$practice.cu" || fail "$practice.cu cannot be written"

setting=''
suffix=_cpu
if [ "$PRECISION" != BF16 ]; then
    setting=" PRECISION=$PRECISION"
    suffix=_cpu_${PRECISION,,}
fi
echo "$practice.cu: kernel $rung, $idea. To write:"
awk -F '\t' 'FNR == NR { name[FNR] = $2; next }
    { for (k in name) { if ($0 ~ "[ *]" name[k] "\\(" ) { at[k] = FNR } } }
    END { for (k = 1; k in name; k++) { printf "    line %d  %s()\n", at[k], name[k] } }' "$tmp/cut" <(
    awk '{ sub(/\/\/.*/, "") } 1' "$practice.cu" | sed 's/^.*<<<.*$//')
also=$(awk -F '\t' 'FNR == NR { own[$2]; next } $1 in own { print $2 }' "$tmp/cut" "$tmp/others" | sort -nu | paste -s -d ' ')
[ -z "$also" ] || echo "    launched by kernel ${also// /, } too, which therefore fails as long as it is missing"
echo "Then check it, without a GPU (lines of checks that pass are left out; the last line must say '0 failed'):"
echo "    make cpu OP=$practice$setting && ./$practice$suffix $rung | grep -v '^ok '"
echo "or with one, and compare its time with the original's:"
echo "    make $practice$setting && ./$practice $rung"
echo "    make practice-time OP=$op RUNG=$rung$setting"
echo "The original: make practice OP=$op RUNG=$rung SOLUTION=yes"
