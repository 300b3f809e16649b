#!/usr/bin/env bash
# Keeps the pages of the course true: types their commands and compares what is printed with what the page shows.
#
#     dev/learn/pages.sh [--check] [PAGE ...]     runs the commands and checks the structure; exit code 1 if one fails
#     dev/learn/pages.sh --update [PAGE ...]      writes what the commands print into the pages
#     dev/learn/pages.sh --commands [PAGE ...]    only runs the commands
#     dev/learn/pages.sh --structure [PAGE ...]   only checks the structure
#
# PAGE is 02, 02_memory or dev/learn/02_memory.md; without one, all pages. A block of commands is a ```sh block with a
# comment on the line before it, and its output is the plain ``` block that follows it:
#
#     <!-- run: cpu -->               run on any machine
#     <!-- run: nvcc -->              run where there is an nvcc, else skipped
#     <!-- run: h200 -->              measured on an H200: skipped
#     <!-- run: cpu, in: . -->        in this folder, from the top of the repository on; otherwise in dev/cuda
#     <!-- run: cpu, status: 1 -->    the block must end with this exit code
#
# A block runs in one bash, standard output and error together, in a copy of the files that git knows or would know, so the
# checkout stays as it is. What a page has changed there is undone before the next page, except for what it has built. `...`
# on a line of its own stands for any lines, also none; all else must be equal, so output that varies needs a `...`. Where
# the page shows no output, each command must end with 0 (`bash -e`); where it shows some, only that counts, because a check
# that fails, or diff, has other exit codes. What make prints while it builds a program is left out, because it depends on
# what was built before.
#
# --update keeps a block that is right. Of one that is right but for its numbers, such as those of lines, it keeps the
# `...`. Others it writes in full.
#
#     PAGES_TREE=DIR       keeps the copy there, so that the next call builds less
#     PAGES_TIMEOUT=120    seconds per block
#
# The structure: a line `Time: ...` at the beginning, `## Further reading`, three exercises and three answers where there is
# an answers/PAGE.txt or the page says `make answer`; lines of at most 140 characters outside of code and tables; links to files,
# sections and figures that are there; no figure that no page shows; in README.md the times of the pages.
set -u -o pipefail
export LC_ALL=C
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES PRECISION SPILLS DEVICE_ONLY BIN_DIR OP OPS ANSWERS_DIR SHOW FORCE
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")/../.." || exit 1
top=$PWD
export PATH=$PATH:/usr/local/cuda/bin
mode=--check
case ${1-} in
--check | --update | --commands | --structure) mode=$1 && shift ;;
-*) usage "unknown flag $1; see $0 --help" ;;
esac
limit=${PAGES_TIMEOUT:-120}
[[ $limit =~ ^[1-9][0-9]*$ ]] || usage "PAGES_TIMEOUT is a whole number of seconds, not '$limit'"
# pages that are an index or a list and no lesson: they need no time, no exercises and no further reading
lists=" README cuda_basics "

pages=()
for name in "$@"; do
    name=${name##*/}
    name=${name%.md}
    [[ ! $name =~ ^[0-9]$ ]] || name=0$name
    if [[ $name =~ ^[0-9]+$ ]]; then found=(dev/learn/"$name"_*.md); else found=("dev/learn/$name.md"); fi
    [ -e "${found[0]}" ] || usage "no page '$name' in dev/learn"
    pages+=("${found[@]}")
done
[ $# -gt 0 ] || pages=(dev/learn/*.md)
[ -e "${pages[0]}" ] || fail "no pages in dev/learn"

tmp=$(mktemp -d /tmp/llmc_pages_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
passed=0 failed=0 skipped=0 h200=0

# ---- structure ----

# facts PAGE: prints "KIND LINE TEXT" for what a page has: long lines, links, anchors, exercises ...
facts() {
    awk '
        function slug(text) { # as GitHub makes them
            gsub(/`/, "", text); gsub(/\]\([^)]*\)/, "", text); gsub(/\[/, "", text)
            text = tolower(text)
            gsub(/[!-,.\/:-@\[\\\]^{-~]/, "", text)
            gsub(/ /, "-", text)
            return text
        }
        /^ *```/ { code = !code; next }
        code { next }
        {
            text = $0
            gsub(/[\200-\277]/, "", text)
            if (length(text) > 140 && text !~ /^\|/) { print "long", FNR, length(text) }
        }
        /^#+ / {
            section = $0; sub(/^#+ +/, "", section)
            name = slug(section)
            print "anchor", FNR, name (count[name]++ ? "-" count[name] - 1 : "")
        }
        /^Time: / && FNR <= 6 { print "time", FNR }
        section == "Exercises" && /^[0-9]+\. / { print "exercise", FNR, $1 + 0 }
        /make answer EXERCISE=/ { print "asks", FNR }
        {
            text = $0
            gsub(/`[^`]*`/, "", text)
            while (match(text, /\]\([^()]*(\([^()]*\))?[^()]*\)/)) {
                target = substr(text, RSTART + 2, RLENGTH - 3)
                sub(/ +".*"$/, "", target)
                if (target !~ /^[a-z]+:/) { print "link", FNR, target }
                text = substr(text, RSTART + RLENGTH)
            }
        }
        END { if (code) { print "open", FNR } }' "$1"
}
anchors_of() { # FILE
    local key=$tmp/anchors_${1//\//%}
    [ -e "$key" ] || facts "$1" | sed -n 's/^anchor [0-9]* //p' >"$key"
    echo "$key"
}
problems() { # PAGE: prints "LINE: TEXT" for each fault of its structure
    local page=$1 name kind line text file anchor answers
    name=$(basename "$page" .md)
    answers=dev/learn/answers/$name.txt
    facts "$page" >"$tmp/facts"
    if [[ $lists != *" $name "* ]]; then
        grep -q '^time ' "$tmp/facts" || echo "1: no line 'Time: 40 minutes. Needs: ...' below its title"
        grep -qx 'anchor [0-9]* further-reading' "$tmp/facts" || echo "1: no section '## Further reading'"
        if [ -e "$answers" ] || grep -q '^asks ' "$tmp/facts"; then
            text=$(sed -n 's/^exercise [0-9]* //p' "$tmp/facts" | paste -s -d ' ')
            [ "$text" = "1 2 3" ] || echo "1: its exercises are '$text', want 1. 2. 3. in '## Exercises'"
            text=$(cut -d ' ' -f 1 "$answers" 2>/dev/null | paste -s -d ' ')
            [ "$text" = "1 2 3" ] || echo "1: $answers answers '$text', want 1 2 3"
        fi
    fi
    while read -r kind line text; do
        case $kind in
        long) echo "$line: $text characters, at most 140 are wanted" ;;
        open) echo "$line: a code block is not closed" ;;
        link)
            file=${text%%#*} anchor=
            [[ $text != *"#"* ]] || anchor=${text#*#}
            if [ -z "$file" ]; then file=$page; else file=$(dirname "$page")/$file; fi
            if [ ! -e "$file" ]; then
                echo "$line: a link to $text, which is not there"
            elif [ -n "$anchor" ] && [[ $file == *.md ]]; then
                grep -qxF -- "$anchor" "$(anchors_of "$file")" || echo "$line: a link to $text: no such section"
            fi ;;
        esac
    done <"$tmp/facts"
}
structure() {
    local page figure name line before
    for page in "${pages[@]}"; do
        problems "$page" >"$tmp/problems"
        if [ -s "$tmp/problems" ]; then
            sed "s|^|FAIL $page:|" "$tmp/problems"
            failed=$((failed + 1))
        else
            echo "ok $page: its structure"
            passed=$((passed + 1))
        fi
    done
    [ ${#pages[@]} -gt 1 ] || return 0 # with all pages: what none of them shows
    before=$failed
    for figure in dev/learn/figures/*.svg; do
        [ -e "$figure" ] || continue
        name=$(basename "$figure")
        grep -qF "](figures/$name)" dev/learn/*.md && continue
        echo "FAIL $figure: no page shows it"
        failed=$((failed + 1))
    done
    for figure in dev/learn/answers/*.txt; do
        [ ! -e "$figure" ] || [ -e "dev/learn/$(basename "$figure" .txt).md" ] || {
            echo "FAIL $figure: there is no such page"
            failed=$((failed + 1))
        }
    done
    while read -r name line; do
        if [ ! -e "dev/learn/$name" ] || grep -q "^Time: $line minutes" "dev/learn/$name"; then continue; fi
        echo "FAIL dev/learn/README.md: $name takes $line min, and the page says something else"
        failed=$((failed + 1))
    done < <(sed -nE 's/^\|.*\]\(([a-z0-9_]+\.md)\).*\| ([0-9]+) min \|$/\1 \2/p' dev/learn/README.md 2>/dev/null)
    [ "$failed" -ne "$before" ] || { echo "ok figures, answers and times agree with the pages" && passed=$((passed + 1)); }
}

# ---- blocks ----

# blocks PAGE: prints a line per block: AT FIRST LAST OUT_FIRST OUT_LAST WHERE FOLDER STATUS. AT is the line of its comment;
# the commands are FIRST to LAST; the output is OUT_FIRST to OUT_LAST, 0 0 without a block of output. Or "bad LINE TEXT".
blocks() {
    awk '
        function finish() { if (first) { print at, first, last, 0, 0, where, folder, status; first = 0 } }
        function bad(text) { print "bad", FNR, text; failed = 1; exit }
        /^ *```/ && inside == "" {
            inside = $0; sub(/^ */, "", inside)
            if (inside == "```sh" && marked == FNR - 1 && marked) { finish(); first = FNR + 1; at = marked }
            else if (inside == "```" && first && last && near) { out = FNR + 1 }
            else { finish() }
            next
        }
        /^ *```$/ && inside != "" {
            if (first && inside == "```sh" && first > last) { last = FNR - 1; near = 1 }
            if (out) { print at, first, last, out, FNR - 1, where, folder, status; first = out = 0 }
            inside = ""
            next
        }
        inside != "" { next }
        /^ *<!-- *run:/ {
            finish()
            if ($0 !~ /^<!-- run: (cpu|nvcc|h200)(, in: [A-Za-z0-9_.\/]+)?(, status: [0-9]+)? -->$/) { bad("not a mark as in pages.sh --help: " $0) }
            marked = FNR; last = 0; where = $3; sub(/,/, "", where)
            folder = "dev/cuda"; status = "any"
            if (match($0, /, in: [^ ,]+/)) { folder = substr($0, RSTART + 6, RLENGTH - 6) }
            if (match($0, /, status: [0-9]+/)) { status = substr($0, RSTART + 10, RLENGTH - 10) }
            next
        }
        marked == FNR - 1 && marked { bad("no ```sh block follows the mark on the line before") }
        /[^ ]/ { near = 0; finish() }
        END { if (!failed) { finish() } }' "$1"
}

# The copy. Of a file that a page has changed, the copy is written anew, so that make sees that it is newer.
copy() {
    local list=$tmp/list
    git ls-files -z --cached --others --exclude-standard >"$tmp/all" 2>/dev/null || fail "pages.sh copies the files that git knows: this is no git repository"
    while IFS= read -r -d '' file; do
        [ ! -f "$file" ] || [ -L "$file" ] || printf '%s\0' "$file"
    done <"$tmp/all" >"$list"
    mkdir -p "$tree" || fail "$tree cannot be made"
    xargs -0 sha1sum <"$list" >"$tmp/sums"
    (cd "$tree" && sha1sum --quiet -c "$tmp/sums" 2>/dev/null) | sed 's/: FAILED.*//' | tr '\n' '\0' >"$tmp/changed"
    xargs -0 -r cp -p --parents -t "$tree" <"$tmp/changed" || fail "the files cannot be copied to $tree"
}
restore() { # undoes what a page has done, except for build/ and programs beside the sources of ops
    local file
    copy
    tr '\0' '\n' <"$tmp/list" | sort >"$tmp/known"
    (cd "$tree" && find . -path ./build -prune -o -path ./.git -prune -o -type f -print) | sed 's|^\./||' | sort |
        comm -23 - "$tmp/known" | while IFS= read -r file; do
        case $file in
        dev/cuda/practice_*) ;;
        dev/cuda/*_cpu | dev/cuda/*_cpu_fp16 | dev/cuda/*_cpu_fp32) continue ;;
        dev/cuda/*) [ ! -e "$tree/$file.cu" ] || continue ;;
        esac
        rm -f "$tree/$file"
    done
}

# make that says nothing while it builds programs, unless that fails. Of other targets, the compiler's lines are left out.
mkdir "$tmp/bin"
cat >"$tmp/bin/make" <<'MAKE'
#!/usr/bin/env bash
make=$(PATH=${PATH#*:} command -v make) || { echo "make: command not found" >&2; exit 127; }
builds=
folder=.
before=
for argument in "$@"; do
    [ "$before" != -C ] || folder=$argument
    before=$argument
done
for argument in "$@"; do
    name=${argument%_cpu}
    for source in "$name.cu" "$name.c" "$name.cpp" "${name%cu}.cu"; do [ ! -e "$folder/$source" ] || builds=yes; done
    [ "$argument" != cpu ] || builds=yes
done
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
export -n PAGES_MAKE_FAILED
if [ -n "$builds" ]; then
    "$make" --no-print-directory "$@" >"$log" 2>&1
    status=$?
    [ $status -eq 0 ] || cat "$log"
else
    "$make" --no-print-directory "$@" >"$log" 2>&1
    status=$?
    grep -avE "^(gcc|g\+\+|clang|clang\+\+|cc|c\+\+|nvcc) |^make: (Nothing to be done for|'.*' is up to date)" "$log"
fi
[ $status -eq 0 ] || : >"$PAGES_MAKE_FAILED"
exit $status
MAKE
chmod +x "$tmp/bin/make"

# matches WANTED SEEN: true if the lines are the same, where `...` in WANTED is any lines. On a difference prints it.
matches() {
    awk '
        FNR == NR { want[++n] = $0; next }
        { seen[++m] = $0 }
        END {
            # at[j]: whether the first i lines of want can be the first j of seen
            at[0] = 1
            for (i = 1; i <= n; i++) {
                if (want[i] == "...") { reached = 0; for (j = 0; j <= m; j++) { if (at[j]) { reached = 1 } next_at[j] = reached } }
                else { next_at[0] = 0; for (j = 1; j <= m; j++) { next_at[j] = at[j - 1] && want[i] == seen[j] } }
                for (j = 0; j <= m; j++) { at[j] = next_at[j] }
            }
            exit !at[m]
        }' "$1" "$2"
}

# refit WANTED SEEN: prints WANTED with the numbers and the spaces of SEEN, if that is all in which they differ
refit() {
    awk '
        function same(a, b) { gsub(/[0-9]+/, "0", a); gsub(/[0-9]+/, "0", b); gsub(/ +/, " ", a); gsub(/ +/, " ", b); return a == b }
        FNR == NR { want[++n] = $0; next }
        { seen[++m] = $0 }
        END {
            # fits[i, j]: whether want from i on can be seen from j on
            fits[n + 1, m + 1] = 1
            for (i = n; i >= 1; i--) {
                for (j = m + 1; j >= 1; j--) {
                    if (want[i] == "...") { fits[i, j] = fits[i + 1, j] || (j <= m && fits[i, j + 1]) }
                    else { fits[i, j] = j <= m && fits[i + 1, j + 1] && same(want[i], seen[j]) }
                }
            }
            if (!fits[1, 1]) { exit 1 }
            j = 1
            for (i = 1; i <= n; i++) {
                if (want[i] != "...") { print seen[j++]; continue }
                print "..."
                while (!fits[i + 1, j]) { j++ }
            }
        }' "$1" "$2"
}

# run_block PAGE FIRST LAST FOLDER FLAG: runs a block, by bash with this flag; its output goes to $tmp/seen, its exit code to rc
run_block() {
    rc=0
    sed -n "$2,$3p" "$1" >"$tmp/commands"
    rm -f "$tmp/make_failed"
    [ -d "$tree/$4" ] || { echo "there is no folder $4" >"$tmp/seen" && rc=1 && return 0; }
    (cd "$tree/$4" && PATH="$tmp/bin:$PATH" PAGES_MAKE_FAILED="$tmp/make_failed" timeout -k 5 "$limit" bash "$5" "$tmp/commands") \
        >"$tmp/seen" 2>&1 </dev/null || rc=$?
}

# builds the ops that the blocks build for a CPU, on all cores; if one does not compile, its block will say so. Starts
# with a copy of what is already built in this repository.
build_ahead() {
    local page at first last folder where ops=()
    for page in "${pages[@]}"; do
        while read -r at first last _ _ where folder _; do
            [ "$where $folder" = "cpu dev/cuda" ] || continue
            sed -n "${first},${last}p" "$page" | grep -oE 'cpu OP=[a-z0-9_]+( |$)' | sed 's/.*OP=//; s/ //'
        done <"$tmp/blocks.$(basename "$page")"
    done | sort -u | while read -r op; do [ ! -e "$tree/dev/cuda/$op.cu" ] || echo "$op"; done >"$tmp/ops"
    mapfile -t ops <"$tmp/ops"
    [ ${#ops[@]} -gt 0 ] || return 0
    if [ ! -e "$tree/build/dev_cuda" ] && [ -e build/dev_cuda/cpu ]; then
        mkdir -p "$tree/build/dev_cuda"
        cp -a build/dev_cuda/cpu "$tree/build/dev_cuda/"
    fi
    make -k -j"$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)" -C "$tree/dev/cuda" cpu OPS="${ops[*]}" >/dev/null 2>&1 || true
}

run_pages() {
    local page name at first last out_first out_last where folder status why good shown flag refitted rc lines shift_by
    tree=${PAGES_TREE:-$tmp/tree}
    mkdir -p "$tree" || fail "$tree cannot be made"
    tree=$(cd "$tree" && pwd)
    [ "$tree" != "$top" ] || usage "PAGES_TREE is the checkout: its files would be changed"
    local any=
    for page in "${pages[@]}"; do
        blocks "$page" >"$tmp/blocks.$(basename "$page")"
        ! grep -qE ' (cpu|nvcc) [^ ]+ [0-9any]+$' "$tmp/blocks.$(basename "$page")" || any=yes
    done
    if [ -n "$any" ]; then restore && build_ahead; fi
    for page in "${pages[@]}"; do
        name=$(basename "$page")
        cp "$page" "$tmp/new.md"
        shift_by=0
        grep -qE ' cpu | nvcc ' "$tmp/blocks.$name" && restore
        while read -r at first last out_first out_last where folder status; do
            if [ "$at" = bad ]; then
                echo "FAIL $page:$first: $last $out_first $out_last $where $folder $status"
                failed=$((failed + 1))
                continue
            fi
            case $where in
            h200) h200=$((h200 + 1)) && continue ;;
            nvcc)
                if ! command -v nvcc >/dev/null; then
                    echo "skip $page:$at: needs nvcc"
                    skipped=$((skipped + 1))
                    continue
                fi ;;
            esac
            : >"$tmp/wanted"
            [ "$out_last" -lt "$out_first" ] || [ "$out_first" -eq 0 ] || sed -n "${out_first},${out_last}p" "$page" >"$tmp/wanted"
            shown='' flag=+e
            [ "$out_first" -eq 0 ] || [ "$(grep -cvx -e '\.\.\.' -e '' "$tmp/wanted")" -eq 0 ] || shown=yes
            [ -n "$shown" ] || flag=-e
            run_block "$page" "$first" "$last" "$folder" "$flag"
            good='' why='' refitted=''
            if [ "$out_first" -eq 0 ] || matches "$tmp/wanted" "$tmp/seen"; then good=yes; fi
            if [ "$rc" -eq 124 ]; then
                why="not done after $limit s (PAGES_TIMEOUT)"
            elif [ "$status" != any ] && [ "$rc" -ne "$status" ]; then
                why="exit code $rc, want $status"
            elif [ -z "$good" ] && [ -e "$tmp/make_failed" ]; then
                why="make failed"
            elif [ "$status" = any ] && [ "$rc" -ne 0 ] && [ -z "$shown" ]; then
                why="exit code $rc; if that is meant, end the mark with ', status: $rc -->'"
            fi
            if [ -z "$why$good" ] && refit "$tmp/wanted" "$tmp/seen" >"$tmp/refitted"; then
                refitted=yes
                cp "$tmp/refitted" "$tmp/seen"
            fi
            if [ -z "$why$good$refitted" ] && [ "$mode" = --update ] && [ "$status" = any ] && [ "$rc" -ne 0 ]; then
                why="exit code $rc; if that is meant, end the mark with ', status: $rc -->'"
            fi
            if [ -n "$why" ]; then
                echo "FAIL $page:$at: $why"
                tail -n 20 "$tmp/seen"
                failed=$((failed + 1))
            elif [ -n "$good" ]; then
                echo "ok $page:$at"
                passed=$((passed + 1))
            elif [ "$mode" = --update ]; then
                # an empty block is FIRST, FIRST - 1
                { head -n $((out_first - 1 + shift_by)) "$tmp/new.md" && cat "$tmp/seen" &&
                    tail -n +$((out_last + 1 + shift_by)) "$tmp/new.md"; } >"$tmp/newer.md"
                lines=$(wc -l <"$tmp/seen")
                shift_by=$((shift_by + lines - (out_last - out_first + 1)))
                mv "$tmp/newer.md" "$tmp/new.md"
                [ -z "$refitted" ] || why=', only numbers differed'
                [ -n "$refitted" ] || ! grep -qx '\.\.\.' "$tmp/wanted" || why='; shorten them again, the ... no longer fitted'
                echo "written $page:$at: $lines lines$why"
                passed=$((passed + 1))
            else
                [ "$rc" -eq 0 ] || why=", exit code $rc"
                echo "FAIL $page:$at: prints something else$why ('-' is the page, '+' what was printed):"
                diff -U 2 "$tmp/wanted" "$tmp/seen" | tail -n +3 | head -n 40
                failed=$((failed + 1))
            fi
        done <"$tmp/blocks.$name"
        [ "$mode" != --update ] || cmp -s "$tmp/new.md" "$page" || cat "$tmp/new.md" >"$page"
    done
}

[ "$mode" = --structure ] || run_pages
[ "$mode" = --commands ] || structure
[ $h200 -eq 0 ] || echo "$h200 blocks were measured on an H200 and are not repeated here"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
