#!/usr/bin/env bash
# Prints an op as one text: OP.cu, in which the header OP.cuh stands in place of the line `#include "OP.cuh"`, without the
# comment at the header's top and without `#pragma once`. The headers of other ops stay includes. Prints OP.cu as it is if
# there is no OP.cuh.
#
#     dev/cuda/op_text.sh OP         the text
#     dev/cuda/op_text.sh OP LINE    FILE:LINE, the place at which this line of the text stands
set -u -o pipefail
export LC_ALL=C
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*; see $0 --help" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")" || exit 1
[[ $# =~ ^[12]$ ]] || usage "an OP is wanted, and at most one LINE"
op=$1 line=${2-}
{ [[ $op =~ ^[A-Za-z0-9_]+$ ]] && [ -f "$op.cu" ]; } || usage "OP='$op' is no .cu file here"
[[ $# -eq 1 || $line =~ ^[1-9][0-9]*$ ]] || usage "LINE is the number of a line, not '$line'"
header=$op.cuh
[ -e "$header" ] || header=
[ -z "$header" ] || grep -q '^#pragma once' "$header" || fail "$header has no #pragma once"
awk -v header="$header" -v wanted="$line" '
    function put(text, file, number) {
        if (wanted == "") { print text }
        else if (++lines == wanted) { print file ":" number; found = 1; exit }
    }
    header != "" && index($0, "#include \"" header "\"") == 1 {
        while (!included && (getline text <header) > 0) {
            number++
            if (inside) { put(text, header, number) }
            if (text ~ /^#pragma once/) { inside = 1 } # what the header says about itself stands above this line
        }
        included = 1 # another include of it would add nothing
        next
    }
    { put($0, FILENAME, FNR) }
    END { exit wanted != "" && !found }' "$op.cu" || fail "$op has no line $line"
