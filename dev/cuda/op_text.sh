#!/usr/bin/env bash
# Prints an op as one text: OP.cu, in which its own headers, OP.cuh and such as attention_forward_blocks.cuh, stand in place of the
# lines that include them, without the comment at a header's top and without `#pragma once`. Other headers stay includes. If an
# include stands within a section, `// ---- kernel N: idea ----`, that line comes again behind the header, before the section's rest.
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
