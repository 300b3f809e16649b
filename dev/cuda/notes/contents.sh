#!/usr/bin/env bash
# Writes the contents of dev/cuda/notes into its README.md: a link to each file.
#
#     dev/cuda/notes/contents.sh            writes the list between the lines `<!-- contents -->` and `<!-- end contents -->`
#     dev/cuda/notes/contents.sh --check    changes nothing; exits 1 if the list is stale
#
# Both refuse a heading that is neither `## DATE, IDEA: VERDICT` nor `## Not tried`, and an entry that is newer than the entry
# above it. DATE is YYYY-MM-DD or undated.
set -u -o pipefail
export LC_ALL=C
case ${1-} in
--help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" && exit 0 ;;
'' | --check) ;;
*) echo "error: unknown argument $1; see $0 --help" >&2 && exit 2 ;;
esac
cd "$(dirname "$0")" || exit 1
pages=()
for page in *.md; do [ "$page" = README.md ] || pages+=("$page"); done

list=$(awk '
    function item() { if (page != "") { printf "%s[%s](%s)", pages++ ? ",\n" : "", title, page } }
    function wrong(text) { printf "error: dev/cuda/notes/%s:%d: %s\n", FILENAME, FNR, text >"/dev/stderr"; failed = 1 }
    FNR == 1 {
        item()
        page = FILENAME; title = substr($0, 3); last = ""
        if (!/^# /) { wrong("the first line is no title: # OP") }
    }
    !/^## / || $0 == "## Not tried" { next }
    !/^## (20[0-9][0-9]-[01][0-9]-[0-3][0-9]|undated), .*: ./ { wrong("the heading is not \"## DATE, IDEA: VERDICT\""); next }
    {
        date = substr($2, 1, length($2) - 1)
        if (date == "undated") { next }
        if (last != "" && date > last) { wrong("the entry is newer than the one above it") }
        last = date
    }
    END { item(); exit failed }' "${pages[@]}") || exit 1
contents=$(awk -v list="$list" '
    $0 == "<!-- end contents -->" { inside = 0; ended = 1 }
    !inside { print }
    $0 == "<!-- contents -->" { inside = 1; print list }
    END { exit !ended }' README.md) || { echo "error: dev/cuda/notes/README.md lacks the lines of the contents" >&2; exit 1; }
[ "$contents" != "$(cat README.md)" ] || exit 0
if [ "${1-}" = --check ]; then
    echo "error: dev/cuda/notes/README.md: its contents are stale; run dev/cuda/notes/contents.sh" >&2
    exit 1
fi
printf '%s\n' "$contents" >README.md
echo "wrote the contents of dev/cuda/notes/README.md"
