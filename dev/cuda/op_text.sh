#!/usr/bin/env bash
# Prints an op as one text: OP.cu, in which its own headers, OP.cuh and such as attention_forward_blocks.cuh, stand in place of the
# lines that include them, without the comment at a header's top and without `#pragma once`. Other headers stay includes. If an
# include stands within a section, `// ---- kernel N: idea ----`, that line comes again behind the header, before the section's rest.
#
#     dev/cuda/op_text.sh OP         the text
#     dev/cuda/op_text.sh OP LINE    FILE:LINE, the place at which this line of the text stands
#     dev/cuda/op_text.sh OP FROM TO     the difference between the sections of two kernels; FROM's number is replaced by TO's
#     dev/cuda/op_text.sh --near NAME    the ops whose names are like this one: ", did you mean gelu_forward?", or nothing
set -u -o pipefail
export LC_ALL=C
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*; see $0 --help" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")" || exit 1

# near NAME: at most three ops that contain the name, or that are it after a few changes of letters, the nearest first
near() {
    printf '%s\n' *.cu | NAME=$1 awk '
        function least(a, b) { return a < b ? a : b }
        function distance(a, b,    i, j, row, diagonal, up) { # of Levenshtein
            for (j = 0; j <= length(b); j++) { row[j] = j }
            for (i = 1; i <= length(a); i++) {
                diagonal = row[0]; row[0] = i
                for (j = 1; j <= length(b); j++) {
                    up = row[j]
                    row[j] = least(least(up, row[j - 1]) + 1, diagonal + (substr(a, i, 1) != substr(b, j, 1)))
                    diagonal = up
                }
            }
            return row[length(b)]
        }
        BEGIN { name = ENVIRON["NAME"] }
        length(name) < 3 || /^practice_/ { next }
        {
            sub(/\.cu$/, "")
            at = index($0, name)
            d = at == 1 ? 0 : at ? 100 : distance(name, $0)
            family = name; sub(/_.*/, "_", family) # gelu_ of gelu_fwd
            if (at || d <= length(name) / 4) { print d, length($0), $0 } else if (index($0, family) == 1) { print 10 + d, length($0), $0 }
        }' | sort -n -k 1,1 -k 2,2 | head -n 3 | awk '{ text = text (NR > 1 ? " or " : ", did you mean ") $3 } END { if (NR) { print text "?" } }'
}
if [ "${1-}" = --near ] && [ $# -eq 2 ]; then
    near "$2"
    exit 0
fi
[[ $# =~ ^[123]$ ]] || usage "an OP is wanted, and at most one LINE or two kernels"
op=$1 line=
{ [[ $op =~ ^[A-Za-z0-9_]+$ ]] && [ -f "$op.cu" ]; } || usage "OP='$op' is no .cu file here$(near "$op")"
if [ $# -eq 3 ]; then
    tmp=$(mktemp -d /tmp/llmc_rungs_XXXXXX) || exit 1
    trap 'rm -rf "$tmp"' EXIT
    for rung in "$2" "$3"; do [[ $rung =~ ^[0-9]+$ ]] || usage "FROM and TO are the numbers of kernels, not '$rung'"; done
    for rung in "$2" "$3"; do
        "./${0##*/}" "$op" | awk -v rung="$((10#$rung))" '
            /^(static )?void declare/ { ended = 1 } # the kernels end here
            /^\/\/ ---- / { inside = !ended && /^\/\/ ---- kernels? / && $4 + 0 == rung }
            inside && !ended && !/^#include/ { print }' |
            sed -E "s/(kernel|$op)$((10#$2))([^0-9A-Za-z]|\$)/\1$((10#$3))\2/g" >"$tmp/kernel $rung"
        [ -s "$tmp/kernel $rung" ] || usage "$op.cu has no section of kernel $rung; those it has: $("./${0##*/}" "$op" |
            sed -n 's/^\/\/ ---- kernels* \([0-9]*\).*/\1/p' | sort -n -u | paste -s -d ' ')"
    done
    cd "$tmp" && diff -d -U 3 --label "$op kernel $2" --label "$op kernel $3" "kernel $2" "kernel $3"
    [ $? -le 1 ]
    exit
fi
[ $# -eq 1 ] || { line=$2 && [[ $line =~ ^[1-9][0-9]*$ ]]; } || usage "LINE is the number of a line, not '$2'"
headers=' ' # of this op: OP.cuh, and OP_PART.cuh unless it belongs to an OP_PART.cu
for file in "$op".cuh "${op}"_*.cuh; do
    [ -e "$file" ] || continue
    [ "$file" = "$op.cuh" ] || [ ! -e "${file%h}" ] || continue
    grep -q '^#pragma once' "$file" || fail "$file has no #pragma once"
    headers+="$file "
done
awk -v headers="$headers" -v wanted="$line" '
    function put(text, file, number) {
        if (wanted == "") { print text }
        else if (++lines == wanted) { print file ":" number; found = 1; exit }
    }
    function own_header(text) { # the header that this line includes, if it is one of the op
        if (!match(text, /^#include "[A-Za-z0-9_]+\.cuh"/)) { return "" }
        text = substr(text, 11, RLENGTH - 11)
        return index(headers, " " text " ") ? text : ""
    }
    function put_header(header,    text, number, inside) {
        if (header in included) { return } # another include of it would add nothing
        included[header] = 1
        while ((getline text <header) > 0) {
            number++
            if (own_header(text) != "") { put_header(own_header(text)) }
            else if (inside) { put(text, header, number) }
            if (text ~ /^#pragma once/) { inside = 1 } # what the header says about itself stands above this line
        }
    }
    own_header($0) != "" {
        put_header(own_header($0))
        goes_on = section
        next
    }
    /^\/\/ ---- / { section = $0; section_line = FNR; goes_on = "" }
    goes_on != "" && $0 != "" && !/^#/ {
        put(goes_on, FILENAME, section_line) # the section around the include goes on behind the header
        put("", FILENAME, section_line)
        goes_on = ""
    }
    { put($0, FILENAME, FNR) }
    END { exit wanted != "" && !found }' "$op.cu" || fail "$op has no line $line"
