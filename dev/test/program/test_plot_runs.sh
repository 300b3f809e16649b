#!/usr/bin/env bash
# scripts/plot_runs.cpp on made-up logs and on those of a short run: which points it draws, and what it refuses.
. "$(dirname "$0")/../test.sh"
CXX=${CXX:-g++}
svg=$tmp/runs.svg

build() {
    command -v "$CXX" >/dev/null || skip "needs a C++ compiler"
    [ -x "$tmp/plot_runs" ] ||
        "$CXX" -O1 -std=c++17 -Wall -Wextra -Werror -Wno-format-truncation scripts/plot_runs.cpp -o "$tmp/plot_runs" ||
        fail "plot_runs.cpp does not compile"
    rm -rf "$tmp/a" "$tmp/b" "$svg"
    mkdir "$tmp/a" "$tmp/b"
}

# run RC ARGUMENT ...: fails unless the exit code is RC; an error is one line
run() {
    local rc=0 wanted=$1
    shift
    "$tmp/plot_runs" "$@" >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted"; }
    want "the lines on stderr" "$(wc -l <"$tmp/err")" $((wanted != 0))
}
draw() { # ARGUMENT ...
    run 0 "$@" -o "$svg"
    ! command -v xmllint >/dev/null || xmllint --noout "$svg" || fail "not XML"
}

# points ID: prints the points of a curve, "X Y" on a line each
points() { sed -n "/ id=\"$1\"/s/.* d=\"M\([^\"]*\)\".*/\1/p" "$svg" | tr L '\n'; }
count() { points "$1" | grep -c .; }
# same_place WHAT A B: the coordinates are equal but for rounding to tenths
same_place() { awk "BEGIN { d = ($2) - ($3); exit !(d < 0.11 && d > -0.11) }" || fail "$1: $2 and $3"; }

train() { # STEP LOSS [NORM]: a line of log.jsonl; 100 tokens a step
    echo "{\"step\":$1,\"type\":\"train\",\"loss\":$2,\"lr\":0.001,\"grad_norm\":${3-1},\"time_ms\":200,\"tokens_per_second\":500}"
}
val() { echo "{\"step\":$1,\"type\":\"val\",\"loss\":$2}"; }

# The curves go through the values: steps and losses are linear, norms logarithmic.
test_points() {
    build
    { val 0 6; train 1 4.0 100; train 2 3.0 10; val 2 3.5; train 3 null null; train 4 2.0 1
      echo '{"step":4,"type":"eval","accuracy":0.25}'; echo '{"step":4,"type":"text","text":"<&"}'
      echo '{"step":4,"type":"save_failed","error":"full"}'; } >"$tmp/a/log.jsonl"
    echo 's:1 trl:9.0' >"$tmp/a/main.log" # log.jsonl says more
    draw "$tmp/a/"
    want "what it says" "$(cat "$tmp/out")" "$tmp/a/log.jsonl: 3 steps, 2 validations; left out: 1 losses that are not finite
$svg: 5 diagrams of 1 run"
    want "points" "$(count loss0) $(count validation0) $(count norm0) $(count rate0) $(count speed0) $(count hellaswag0)" "3 2 3 4 4 1"
    local x1 y1 x2 y2 x4 y4 v0 v2
    { read -r x1 y1 && read -r x2 y2 && read -r x4 y4; } < <(points loss0)
    { read -r _ v0 && read -r _ v2; } < <(points validation0)
    same_place "steps" "$x4 - $x2" "2 * ($x2 - $x1)"
    same_place "losses" "$y4 - $y2" "$y2 - $y1"
    same_place "3.5 is between 3 and 4" "2 * $v2" "$y1 + $y2"
    same_place "6 is two above 4" "$y1 - $v0" "$y4 - $y1"
    { read -r _ y1 && read -r _ y2 && read -r _ y4; } < <(points norm0)
    same_place "norms" "$y4 - $y2" "$y2 - $y1"
    contains '>a</text>' "$svg"
    contains '>training 2.0000, validation 3.5000, HellaSwag 0.2500, 500 tok/s</text>' "$svg"
    contains 'prefers-color-scheme:dark' "$svg"
    cp "$svg" "$tmp/first.svg"
    draw "a=$tmp/a/log.jsonl"
    cmp "$svg" "$tmp/first.svg" || fail "another picture of the same log"
}

# main.log says the same, but for the speed
test_main_log() {
    build
    printf '%s\n' 's:0 tel:5.0000' 's:1 trl:4.0000 lr:0.1 norm:1.00' 's:2 trl:nan lr:0.1 norm:inf' '' 's:3 trl:2.0000 lr:0.1 norm:0.00' \
        's:3 eval:0.2500' 's:3 new:1' >"$tmp/a/main.log"
    draw "$tmp/a"
    want "points" "$(count loss0) $(count validation0) $(count norm0) $(count rate0) $(count speed0) $(count hellaswag0)" "2 1 1 3 0 1"
    ! grep -q 'tok/s\|tokens per second' "$svg" || fail "a speed that nobody logged"
    run 1 "$tmp/a" -x tokens -o "$svg"
    contains "$tmp/a/main.log: no tokens in it: log.jsonl has them" "$tmp/err"
}

# A log that goes back to an earlier step: the newer lines count. A last line without its end is not read.
test_resumed_and_cut() {
    build
    { train 1 4; train 2 3; val 2 3; train 3 9; train 4 9; val 4 9; train 3 2; } >"$tmp/a/log.jsonl"
    draw "$tmp/a"
    want "points" "$(count loss0) $(count validation0)" "3 1"
    contains '>training 2.0000, validation 3.0000, 500 tok/s<' "$svg"
    cp "$svg" "$tmp/first.svg"
    train 4 1 | head -c 40 >>"$tmp/a/log.jsonl"
    draw "$tmp/a"
    cmp "$svg" "$tmp/first.svg" || fail "a cut line changes the picture"
    # llm.c validates a step before it trains on it
    printf '%s\n' 's:0 tel:5' 's:0 trl:5 lr:0 norm:1' 's:1 trl:4 lr:0 norm:1' 's:2 tel:9' 's:2 trl:9 lr:0 norm:1' 's:3 trl:9 lr:0 norm:1' \
        's:2 tel:3' 's:2 trl:3 lr:0 norm:1' >"$tmp/b/main.log"
    draw "$tmp/b"
    want "points" "$(count loss0) $(count validation0)" "3 2"
    contains '>training 3.0000, validation 3.0000<' "$svg"
    # wherever the last line is cut, the lines before it are drawn
    { train 1 4; train 2 3; } >"$tmp/whole"
    local n first
    first=$(train 1 4 | wc -c)
    for ((n = first; n < $(wc -c <"$tmp/whole"); n += 7)); do
        head -c "$n" "$tmp/whole" >"$tmp/a/log.jsonl"
        draw "$tmp/a"
        want "points after $n bytes" "$(count loss0)" 1
    done
}

test_smoothing() {
    build
    local i
    for ((i = 1; i <= 9; i++)); do train $i $((i % 2 ? 3 : 6)); done >"$tmp/a/log.jsonl"
    draw "$tmp/a" --smooth 3
    contains '>mean of 3 steps<' "$svg"
    contains 'training 4.0000' "$svg" # the last three: 3, 6, 3
    want "curves of the loss" "$(grep -c 'clip-path="url(#clip_loss)"' "$svg")" 2
    # 3, then means of 4 and 5 in turn, then 3
    local ys
    read -r -d '' -a ys < <(points loss0 | cut -d ' ' -f 2) || true
    same_place "the second mean" "${ys[1]} - ${ys[2]}" "${ys[0]} - ${ys[1]}"
    same_place "the ends" "${ys[0]}" "${ys[8]}"
    draw "$tmp/a" --smooth 1
    want "curves of the loss" "$(grep -c 'clip-path="url(#clip_loss)"' "$svg")" 1
    # a long run takes no more bytes than two points a pixel, and keeps its peaks
    awk 'BEGIN { for (i = 1; i <= 20000; i++) { printf "s:%d trl:%s lr:0.001 norm:1.00\n", i, i == 7777 ? 9 : 3 } }' >"$tmp/b/main.log"
    draw "$tmp/b" --smooth 1
    [ "$(count loss0)" -le 1500 ] || fail "$(count loss0) points"
    want "peaks" "$(points loss0 | cut -d ' ' -f 2 | sort -u | wc -l)" 2
}

# Twice the tokens per step: the same tokens in half the steps.
test_tokens() {
    build
    { val 0 5; train 1 4; train 2 3; train 3 2; train 4 1; val 4 1; } >"$tmp/a/log.jsonl"
    { train 1 4; train 2 3; } | sed 's/:200,/:400,/' >"$tmp/b/log.jsonl"
    draw "$tmp/a" "$tmp/b" -x tokens
    same_place "the ends" "$(points loss0 | tail -n 1 | cut -d ' ' -f 1)" "$(points loss1 | tail -n 1 | cut -d ' ' -f 1)"
    same_place "the validation of the end" "$(points loss0 | tail -n 1 | cut -d ' ' -f 1)" "$(points validation0 | tail -n 1 | cut -d ' ' -f 1)"
    contains '>tokens<' "$svg"
    same_place "the tick of 400 tokens" "$(points loss0 | tail -n 1 | cut -d ' ' -f 1)" \
        "$(sed -n '/>400</s/.* x="\([0-9.]*\)".*/\1/p' "$svg" | head -n 1)"
    draw "$tmp/a" "$tmp/b"
    same_place "by step" "$(points loss0 | sed -n 2p | cut -d ' ' -f 1)" "$(points loss1 | tail -n 1 | cut -d ' ' -f 1)"
    contains '>step<' "$svg"
}

test_names_and_panels() {
    build
    local range
    train 1 4 >"$tmp/a/log.jsonl"
    train 1 3 >"$tmp/b/log.jsonl"
    mkdir -p "$tmp/b/a" "$tmp/c=d"
    cp "$tmp/b/log.jsonl" "$tmp/b/a/"
    cp "$tmp/b/log.jsonl" "$tmp/c=d/"
    draw "$tmp/a" "fast & <loose>=$tmp/b" "$tmp/c=d"
    contains '>a</text>' "$svg"
    contains '>fast &amp; &lt;loose&gt;</text>' "$svg"
    contains '>c=d</text>' "$svg" # a directory, though its name has an equals sign
    want "colours" "$(grep -o 'class="k[0-9]"' "$svg" | sort -u | wc -l)" 3
    draw "$tmp/a" "$tmp/b/a"
    contains ">$tmp/a/log.jsonl</text>" "$svg"
    draw "$(printf 'n%.0s' {1..200})=$tmp/a" # a long name ends in dots
    grep -qE '>n{10,40}\.\.\.</text>' "$svg" || fail "a long name runs out of the picture"
    draw "$tmp/a" --panels loss,rate --title 'two of them'
    contains '>two of them</text>' "$svg"
    want "panels" "$(grep -o '<clipPath id="clip_[a-z]*' "$svg" | tr '\n' ' ')" '<clipPath id="clip_loss <clipPath id="clip_rate '
    draw "$tmp/a" --panels norm
    ! grep -q clip_loss "$svg" || fail "a panel that is not wanted"
    run 1 "$tmp/a" --panels hellaswag -o "$svg"
    contains "nothing of --panels hellaswag" "$tmp/err"
    { train 1 4 0; train 2 1e300 1e-310; train 3 -2; } >"$tmp/a/log.jsonl" # extreme values, and a range with nothing in it
    for range in --min-loss --max-loss; do
        draw "$tmp/a" $range 9
        want "points" "$(count loss0) $(count norm0)" "2 1"
        ! grep -qE '[" ML]-?(nan|inf)' "$svg" || fail "a place that is no number"
    done
    val 1 2.5 >"$tmp/a/log.jsonl" # only a validation
    draw "$tmp/a" --min-loss 2 --max-loss 3
    contains '>2.2<' "$svg"
}

# damaged MESSAGE FILE: what stands on stdin is refused with a line that names the file and this message
damaged() {
    cat >"$tmp/a/$2"
    run 1 "$tmp/a" -o "$svg"
    contains "error: $tmp/a/$2:$1" "$tmp/err"
    [ ! -e "$svg" ] || fail "a picture beside an error"
    rm "$tmp/a/$2"
}
test_damaged() {
    build
    { train 1 4; train 2 3 | head -c 50; echo; train 3 3; } | damaged '2: not valid JSON at byte 45: an unterminated string' log.jsonl
    { train 1 4; echo 'garbage'; } | damaged '2: not valid JSON at byte 0' log.jsonl
    { train 1 4; echo '[]'; } | damaged '2: "step" is missing' log.jsonl
    train 1 4 | sed 's/"loss":4/"loss":"4"/' | damaged '1: "loss" is a string, want a number' log.jsonl
    train 1 4 | sed 's/"grad_norm":1,//' | damaged '1: "grad_norm" is missing' log.jsonl
    train -1 4 | damaged '1: "step" is -1, want 0 to' log.jsonl
    train 1.5 4 | damaged '1: "step" is 1.5, want an integer' log.jsonl
    printf 's:1 trl:4\ns:2 trl:x\n' | damaged "2: 'trl:x' is not KEY:NUMBER" main.log
    printf 's:1 trl:4\ns:2 trl:\n' | damaged "2: 'trl:' is not KEY:NUMBER" main.log
    printf 's:1 trl:4\nhello\n' | damaged "2: 'hello' is not KEY:NUMBER" main.log
    printf 'trl:4 s:1\n' | damaged "1: a line of main.log begins with s:STEP, not 'trl:4'" main.log
    printf 's:0.5 trl:4\n' | damaged "1: a line of main.log begins with s:STEP, not 's:0.5'" main.log
    printf '\1\2\377\n' | damaged "1: '???' is not KEY:NUMBER" main.log
    printf '' | damaged ' no loss in it' main.log
    train 1 null | damaged ' no loss in it' log.jsonl
    run 1 "$tmp/a" -o "$svg"
    contains "$tmp/a: neither log.jsonl nor main.log is here" "$tmp/err"
    run 1 "$tmp/none" -o "$svg"
    contains "$tmp/none: No such file" "$tmp/err"
}

test_arguments() {
    build
    train 1 4 >"$tmp/a/log.jsonl"
    # without -o the picture is runs.svg in the current folder, which is said
    (cd "$tmp/b" && run 0 "$tmp/a" --panels loss)
    want "what it says" "$(cat "$tmp/out")" "$tmp/a/log.jsonl: 1 steps, 0 validations
runs.svg: 1 diagram of 1 run"
    [ -s "$tmp/b/runs.svg" ] || fail "no runs.svg"
    run 0 --help
    contains "usage: $tmp/plot_runs [flags] RUN ..." "$tmp/out"
    run 2
    run 2 "$tmp/a" --smoth 3
    contains "did you mean '--smooth'" "$tmp/err"
    run 2 "$tmp/a" --x time
    run 2 "$tmp/a" --panels loss,speeed
    contains "no diagram 'speeed'" "$tmp/err"
    run 2 "$tmp/a" -o "$tmp/a/log.jsonl" # not a picture: it would be overwritten
    run 2 "$tmp/a" --min-loss 3 --max-loss 2
    # shellcheck disable=SC2046 # nine words
    run 2 $(printf "$tmp/a %.0s" {1..9})
    contains "9 runs, at most 8" "$tmp/err"
    mkdir "$tmp/a/x.svg"
    run 1 "$tmp/a" -o "$tmp/a/x.svg"
    contains "$tmp/a/x.svg: cannot be written: Is a directory" "$tmp/err"
    want "what is left" "$(ls "$tmp/a")" "log.jsonl"$'\n'"x.svg"
    # a full disk: the picture that was there stays
    echo old >"$svg"
    (trap '' XFSZ && ulimit -f 1 && run 1 "$tmp/a" -o "$svg")
    contains "$svg: cannot be written: File too large" "$tmp/err"
    want "the picture" "$(cat "$svg")" old
    [ ! -e "$svg.part" ] || fail "$svg.part is left"
}

# Two runs of the program itself, one of them resumed.
test_end_to_end() {
    build
    local small=(--recipe llmc -e d6 --layers 1 --heads 1 --channels 32 --positions 16 -b 2 -t 16 -v 2 -s 0 -n 3) log
    cat README.md >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data/x" --val-tokens 1000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    for log in a:6 b:3 b:8; do
        OMP_NUM_THREADS=1 "$BIN_DIR/train_gpt2" "${small[@]}" -i "$tmp/data/x_train_*.bin" -j "$tmp/data/x_val_*.bin" -o "$tmp/${log%:*}" -x "${log#*:}" \
            -y 1 >"$tmp/log" 2>&1 || fail "$(cat "$tmp/log")"
    done
    draw "$tmp/a" "$tmp/b" --x tokens
    want "what it says" "$(cut -d / -f 4- "$tmp/out")" \
        "$(printf '%s\n' 'a/log.jsonl: 6 steps, 4 validations' 'b/log.jsonl: 8 steps, 6 validations' 'runs.svg: 4 diagrams of 2 runs')"
    want "points" "$(count loss0) $(count loss1) $(count rate1) $(count speed1) $(count norm1)" "6 8 8 8 8"
    contains '>250<' "$svg" # 8 steps of 32 tokens
    contains "validation $(sed -n 's/^s:8 tel://p' "$tmp/b/main.log")" "$svg"
    draw "main=$tmp/b/main.log"
    want "points of main.log" "$(count loss0) $(count validation0) $(count speed0)" "8 6 0"
}

tests=(points main_log resumed_and_cut smoothing tokens names_and_panels damaged arguments end_to_end)
run_tests_once "$@"
