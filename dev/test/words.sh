#!/usr/bin/env bash
# Finds words that a native engineer would replace, in the text of *.md and in the comments of C and CUDA sources:
#
#     dev/test/words.sh             prints the hits of the rules of words.tsv that fail, and counts the others; exit 1 on a hit
#     WARN=yes dev/test/words.sh    also prints the hits of the others, each with what to write instead
#
# Blocks of code in Markdown, dev/test/fixtures/*.c and files that git ignores are not read. `make check-words` runs this script.
set -euo pipefail
export LC_ALL=C
[ $# -eq 0 ] || { echo "$0: unknown argument '$1'; usage: [WARN=yes] $0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
if ! echo a1 | grep -qP 'a\d' 2>/dev/null; then echo 'skip check-words: needs grep -P, of GNU grep'; exit 0; fi
tmp=$(mktemp -d /tmp/llmc_words_XXXXXX)
trap 'rm -rf "$tmp"' EXIT

{ git ls-files --cached --others --exclude-standard 2>/dev/null || find . -type f ! -path './.git/*' ! -path './build/*'; } |
    sed 's|^\./||' | grep -E '\.(md|cu|cuh|h|c|cpp)$' | grep -v '^dev/test/fixtures/.*\.c$' | sort >"$tmp/names"
while IFS= read -r name; do if [ -f "$name" ]; then echo "$name"; fi; done <"$tmp/names" >"$tmp/files" # not deleted

# a line of text in $tmp/text, and its FILE:LINE in the same line of $tmp/places
xargs awk -v places="$tmp/places" '
    function emit(text) { print text; print FILENAME ":" FNR >> places }
    FNR == 1 { inside = 0; markdown = FILENAME ~ /\.md$/ }
    markdown && /^ *```/ { inside = !inside; next }
    markdown { if (!inside && $0 != "") { emit($0) } next }
    {
        line = $0
        if (!inside) {
            gsub(/\047"\047/, "", line)
            gsub(/"([^"\\]|\\.)*"/, "\"\"", line) # a string may contain //
            if (!match(line, /\/\/|\/\*/)) { next }
            inside = substr(line, RSTART, 2) == "/*"
            line = substr(line, RSTART + 2)
        }
        if (inside && (end = index(line, "*/"))) { line = substr(line, 1, end - 1); inside = 0 }
        sub(/^[ \t*]+/, "", line)
        if (line != "") { emit(line) }
    }' <"$tmp/files" >"$tmp/text"

failures=0 warnings=0 rules=0
while IFS=$'\t' read -r name judged regex better; do
    [[ $name != \#* ]] || continue
    grep -nP -- "$regex" "$tmp/text" >"$tmp/hits" || [ $? -eq 1 ] || { echo "error: words.tsv, '$name': $regex" >&2; exit 1; }
    hits=$(wc -l <"$tmp/hits")
    if [ "$judged" = 10/10 ]; then
        failures=$((failures + hits)) rules=$((rules + 1))
    else
        warnings=$((warnings + hits))
        [ -n "${WARN-}" ] || continue
    fi
    [ "$hits" -gt 0 ] || continue
    awk -v name="$name" -v better="$better" 'NR == FNR { place[FNR] = $0; next }
        { n = $0; sub(/:.*/, "", n); sub(/^[0-9]*:/, ""); print place[n] ": " $0 "\n    " name ": " better }' "$tmp/places" "$tmp/hits"
done <"$here/words.tsv"
[ -n "${WARN-}" ] || [ "$warnings" -eq 0 ] || hint="; make check-words WARN=yes prints them"
echo "check-words: $(wc -l <"$tmp/text") lines of text: $failures hits of $rules rules that fail, $warnings of the others${hint-}"
[ "$failures" -eq 0 ]
