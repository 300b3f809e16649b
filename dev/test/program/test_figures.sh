#!/usr/bin/env bash
# dev/learn/figures.cpp: the figures of the course are what it draws, legible, and well-formed.
. "$(dirname "$0")/../test.sh"
CXX=${CXX:-g++}

build() {
    command -v "$CXX" >/dev/null || skip "needs a C++ compiler"
    [ -x "$tmp/draw" ] || "$CXX" -O1 -std=c++17 -Wall -Wextra -Werror -ffp-contract=off dev/learn/figures.cpp -o "$tmp/draw" ||
        fail "figures.cpp does not compile"
    rm -rf "$tmp/out"
    mkdir "$tmp/out"
}

# run RC ARGUMENT ...: in dev/learn; fails unless the exit code is RC
run() {
    local rc=0 wanted=$1
    shift
    (cd dev/learn && "$tmp/draw" "$@") >"$tmp/stdout" 2>"$tmp/stderr" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/stdout" "$tmp/stderr" && fail "exit code $rc, want $wanted"; }
}

# balanced FILE: true if every element is closed in its place, and texts have no < > & but entities
balanced() {
    grep -o '<[^>]*>' "$1" | awk '
        /^<\// { name = substr($0, 3, length($0) - 3); if (n == 0 || open[n] != name) { bad = 1; exit } n--; next }
        /\/>$/ { next }
        { name = substr($1, 2); sub(/>.*/, "", name); open[++n] = name; count++ }
        END { exit bad || n != 0 || count == 0 }' || return 1
    ! sed -e 's/<[^<>]*>//g' -e 's/&\(amp\|lt\|gt\);//g' "$1" | grep -q '[<>&]'
}

test_up_to_date() {
    build
    run 0 --check
    contains "19 figures compared" "$tmp/stdout"
    want "the files" "$(cd dev/learn/figures && printf '%s\n' *.svg)" "$("$tmp/draw" --list | sed 's/ .*/.svg/' | LC_ALL=C sort)"
}

test_well_formed() {
    build
    local file names=0
    for file in dev/learn/figures/*.svg; do
        balanced "$file" || fail "$file is not XML"
        ! command -v xmllint >/dev/null || xmllint --noout "$file" || fail "$file is not XML"
        names=$((names + 1))
    done
    [ $names -gt 0 ] || fail "no figure"
    sed '0,/<\/text>/s///' dev/learn/figures/grid.svg >"$tmp/out/broken.svg" # the check itself
    ! balanced "$tmp/out/broken.svg" || fail "a text that is not closed passes"
    sed '0,/kernel 1/s//kernel \& 1/' dev/learn/figures/grid.svg >"$tmp/out/broken.svg"
    ! cmp -s "$tmp/out/broken.svg" dev/learn/figures/grid.svg || fail "nothing was broken"
    ! balanced "$tmp/out/broken.svg" || fail "a bare & passes"
}

test_legible() {
    local file width size
    for file in dev/learn/figures/*.svg; do
        width=$(sed -n '1s/.* width="\([0-9]*\)".*/\1/p' "$file")
        [ "${width:-9999}" -le 800 ] || fail "$file: width '$width', at most 800"
        for size in $(grep -o 'font-size="[0-9]*"' "$file" | tr -dc '0-9\n'); do
            [ "$size" -ge 12 ] || fail "$file: a font of $size"
        done
        grep -q '<title id="title">..*</title>' "$file" || fail "$file: no title"
        grep -q '<desc id="desc">..*</desc>' "$file" || fail "$file: no description"
        contains "prefers-color-scheme:dark" "$file"
        ! grep -q '<text[^>]*fill=' "$file" || fail "$file: a text with a colour of its own is illegible on one of the two backgrounds"
    done
}

# the program refuses a figure whose texts overlap, leave their box or the card, or are crossed by a line
test_layout() {
    build
    local x y error
    # one program draws all of them: it reads the position of a text from the environment
    sed 's/svg.middle(710,\s257,/svg.middle(atoi(getenv("X")), atoi(getenv("Y")),/' dev/learn/figures.cpp >"$tmp/out/changed.cpp"
    ! cmp -s "$tmp/out/changed.cpp" dev/learn/figures.cpp || fail "the text is not where it was"
    "$CXX" -O0 -std=c++17 -I dev/learn -iquote dev/learn "$tmp/out/changed.cpp" -o "$tmp/out/draw" || fail "does not compile"
    (cd dev/learn && X=710 Y=257 "$tmp/out/draw" --out "$tmp/out" grid) 2>"$tmp/stderr" || fail "refused in its place: $(cat "$tmp/stderr")"
    while read -r x y error; do
        ! (cd dev/learn && X=$x Y=$y "$tmp/out/draw" --out "$tmp/out" grid) 2>"$tmp/stderr" || fail "drawn at $x, $y"
        contains "error: grid: $error" "$tmp/stderr"
    done <<'EOF'
710 246 'i < n is false:' overlaps 'no access'
790 257 'no access' runs out of the card
630 257 'no access' is crossed by a line
710 222 'no access' crosses a box
EOF
}

test_same_bytes() {
    build
    run 0 --out "$tmp/out"
    diff -r "$tmp/out" dev/learn/figures >/dev/null || fail "drawn elsewhere, other bytes"
    rm "$tmp"/out/*
    run 0 --out "$tmp/out" banks grid
    want "what two names draw" "$(cd "$tmp/out" && echo *)" "banks.svg grid.svg"
}

test_stale() {
    build
    cp dev/learn/figures/*.svg "$tmp/out/"
    run 0 --check --out "$tmp/out"
    echo >>"$tmp/out/banks.svg"
    rm "$tmp/out/grid.svg"
    cp "$tmp/out/banks.svg" "$tmp/before"
    run 1 --check --out "$tmp/out"
    want "the lines on stderr" "$(wc -l <"$tmp/stderr")" 2
    contains "error: $tmp/out/banks.svg is stale: make figures in dev/learn" "$tmp/stderr"
    contains "error: $tmp/out/grid.svg is stale" "$tmp/stderr"
    cmp "$tmp/before" "$tmp/out/banks.svg" || fail "--check writes"
    [ ! -e "$tmp/out/grid.svg" ] || fail "--check writes"
    run 0 --check --out "$tmp/out" roofline
}

# measured times are read from the CSV files
test_measured() {
    build
    cp -r dev/cuda/results/h200 "$tmp/out/h200"
    run 0 --check --results "$tmp/out/h200"
    sed -i '/^matmul_forward,27,/s/,0\.05[0-9]*,/,0.06100,/' "$tmp/out/h200/matmul_forward.csv"
    run 1 --check --results "$tmp/out/h200"
    want "the lines on stderr" "$(cat "$tmp/stderr")" "error: figures/roofline.svg is stale: make figures in dev/learn"
    rm "$tmp/out/h200/softmax_forward.csv"
    run 1 --out "$tmp/out" --results "$tmp/out/h200" softmax_passes
    want "the lines on stderr" "$(wc -l <"$tmp/stderr")" 1
    contains "softmax_forward.csv: No such file" "$tmp/stderr"
    run 0 --out "$tmp/out" --results "$tmp/out/none" banks # a figure without measured times needs none
    run 1 --out "$tmp/out" --results "$tmp/out/none" roofline
}

test_arguments() {
    build
    run 0 --list
    want "names" "$(wc -l <"$tmp/stdout")" 19
    run 2 no_such_figure
    want "what it says" "$(cat "$tmp/stderr")" "error: no figure 'no_such_figure'; see --list"
    run 2 --check grid no_such_figure
    run 2 --help
    run 2 --out
    run 1 --out "$tmp/no/such/folder" grid
    contains "no such folder: run this in dev/learn, or name --out" "$tmp/stderr"
}

tests=(up_to_date well_formed legible layout same_bytes stale measured arguments)
run_tests_once "$@"
