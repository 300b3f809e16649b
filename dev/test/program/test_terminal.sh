#!/usr/bin/env bash
# What a run shows on a terminal, as script(1) of bsdutils records it: few lines that stay, a last line that is rewritten, and
# never two seconds of silence. Files and pipes have every step.
. "$(dirname "$0")/../test.sh"

export OMP_NUM_THREADS=1
train=${TRAIN:-$BIN_DIR/train_gpt2}
[[ $train == /* ]] || train=$PWD/$train
world=$tmp/world
run=(-e d6 -l 3e-4 --layers 2 --heads 2 --channels 64 --positions 64 -i "'data/a_train_*.bin'" -b 4 -t 64 -s 0)

setup() {
    command -v script >/dev/null || skip "needs script (bsdutils)"
    [ -e "$world" ] && return
    mkdir -p "$tmp/new"
    head -c 60000 llmc/tokenizer.h >"$tmp/new/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/new/text" -o "$tmp/new/data/a" -v 8000 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    mv "$tmp/new" "$world"
}

# record COMMAND: runs it on a terminal; sets `status`. $tmp/typescript has what it wrote, $tmp/timing when.
record() {
    status=0 elapsed=$SECONDS
    (cd "$world" && script -qefc "$1" -T "$tmp/timing" "$tmp/typescript" </dev/null >/dev/null 2>&1) || status=$?
    elapsed=$((SECONDS - elapsed))
    sed -i '1d;$d' "$tmp/typescript" # script's own lines
}

# lasting: prints the lines that stay: what a carriage return leads back to is gone when something else is written there
lasting() { tr -d '\n' <"$tmp/typescript" | sed 's/\r\r*\x1b\[K/\r/g' | tr '\r' '\n' | grep -v -e $'\x1b\\[K$' -e '^$'; }

# Fails if more lines stay from each minute, or if nothing was written for two seconds
few_lines_and_no_silence() { # MOST
    local lines
    lines=$(lasting | wc -l)
    [ "$lines" -le $(($1 * (1 + elapsed / 60))) ] || fail "$lines lines stay: $(lasting | cut -c 1-60 | head -n 40)"
    awk '{ for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+\.[0-9]+$/) { if ($i > 2) { print "silent for " $i " s"; exit 1 } break } }' "$tmp/timing" ||
        fail "silence"
}

# 300 steps, with validation: the last line has a bar, few lines stay, the first and the last among them; a pipe gets all
test_run() {
    setup
    [[ $BIN_DIR != *sanitize* ]] || skip "300 steps take minutes under a sanitizer, which sees as much in the other tests"
    local flags="${run[*]} -j 'data/a_val_*.bin' -x 300 -v 20 -m 20"
    record "$train $flags"
    want status $status 0
    few_lines_and_no_silence 25
    lasting >"$tmp/lasting"
    grep -q '^step    1/300 | loss .* tok/s' "$tmp/lasting" && grep -q '^step  300/300 | loss ' "$tmp/lasting" || fail "$(cat "$tmp/lasting")"
    grep -q '^step    0/300 | val loss ' "$tmp/lasting" && grep -q '^step  300/300 | val loss ' "$tmp/lasting" || fail "$(cat "$tmp/lasting")"
    grep -aqP '\r\[#+\.+\] \d+/300 \| loss [\d.]+, val [\d.]+ \| \d+ tok/s \| ETA \d+s\x1b\[K' "$tmp/typescript" || fail "no bar"
    grep -aqE $'\rthe validation: [0-9]+ of 20 batches' "$tmp/typescript" || fail "validation shows no progress"
    awk -v RS='\r' '/\x1b\[K$/ && length($0) > 79 + 3 { print; bad = 1 } END { exit bad }' "$tmp/typescript" || fail "longer than the terminal is wide"
    (cd "$world" && eval "$train $flags") >"$tmp/out"
    want "lines of steps in a pipe" "$(grep -cE '^step +[0-9]+/300 \| loss ' "$tmp/out")" 300
    want "lines of validation" "$(grep -c '^val loss ' "$tmp/out")" 16
    ! grep -q $'[\r\x1b]' "$tmp/out" || fail "a pipe gets what is for terminals"
    # every N steps, and on a terminal that knows no escape codes
    record "$train $flags --log-every 30"
    want "lines that stay" "$(lasting | grep -E '^step .* tok/s' | sed -E 's/^step +([0-9]+).*/\1/' | tr '\n' ' ')" "1 30 60 90 120 150 180 210 240 270 300 "
    (cd "$world" && eval "$train $flags --log-every 100") >"$tmp/out"
    want "lines in a pipe" "$(grep -E '^step .* tok/s' "$tmp/out" | sed -E 's/^step +([0-9]+).*/\1/' | tr '\n' ' ')" "1 100 200 300 "
    record "TERM=dumb $train $flags -x 30"
    want "lines on a dumb terminal" "$(grep -cE '^step +[0-9]+/30 ' "$tmp/typescript")" 30
    ! grep -aq $'\x1b' "$tmp/typescript" || fail "escape codes on a dumb terminal"
}

# a step, a validation and a start that take seconds
test_long_steps() {
    setup
    [[ $BIN_DIR != *sanitize* ]] || skip "a sanitizer changes how long a step takes"
    record "timeout --foreground -s INT 7 $train ${run[*]} -x 3 -d 100000000"
    few_lines_and_no_silence 12
    grep -aqE $'\r(starting|step 1 of 3|making).*\\([0-9]+s\\)' "$tmp/typescript" || fail "does not say that it is busy: $(tail -c 300 "$tmp/typescript")"
}

# Ctrl-C says what it waits for; the second one ends at once
test_interrupt() {
    setup
    [[ $train != *cu ]] || skip "the fake GPU has no long steps"
    local pid code=0 line
    for line in '-o log:, then saves a checkpoint' ':, and saves nothing, because -o is not given'; do
        rm -rf "$world/log"
        record "timeout --foreground -s INT 3 $train ${run[*]} -x 1000000 ${line%%:*}"
        grep -aq "stopping: the run finishes this micro-batch${line#*:}; a second Ctrl-C or SIGTERM ends it at once" "$tmp/typescript" ||
            fail "$(tail -c 400 "$tmp/typescript")"
        lasting | tail -n 1 | grep -q '^Interrupt: stopped after step ' || fail "$(lasting | tail -n 2)"
    done
    # a validation that takes minutes
    : >"$tmp/out" # clears what an earlier test has printed
    (cd "$world" && exec "$train" -e d6 --positions 64 -i 'data/a_train_*.bin' -j 'data/a_train_*.bin' \
        -b 1 -t 64 -x 10 -v 1 -m 100000) >"$tmp/out" 2>"$tmp/err" </dev/null &
    pid=$!
    until grep -q '^data: ' "$tmp/out"; do kill -0 $pid && sleep 0.05; done
    sleep 0.3
    kill -INT $pid
    sleep 0.2
    kill -0 $pid || fail "the validation was too short"
    contains "stopping: the run finishes the validation, and saves nothing" "$tmp/err"
    kill -INT $pid
    wait $pid || code=$?
    want "the exit code" $code 130
}

# HellaSwag's questions and a save show how far they are
test_other_tasks() {
    setup
    local i
    for ((i = 0; i < 400; i++)); do printf 'the cat sat\n%d\nsits mat\nand the\non the mat.\nqqq zz\n' $((i % 4)); done >"$tmp/questions"
    "$BIN_DIR/dev/data/hellaswag" -i "$tmp/questions" -o "$world/questions.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    record "$train ${run[*]} -x 2 --hellaswag questions.bin -v 2 -o tasks -n 1"
    want status $status 0
    few_lines_and_no_silence 25
    grep -aqE $'\r[0-9]+ of 400 examples of questions.bin' "$tmp/typescript" || [[ $train == *cu ]] || fail "HellaSwag shows no progress"
    grep -aqE $'\rsaving step 2 to tasks' "$tmp/typescript" || fail "a save is not shown"
    want "lines" "$(lasting | sed -nE 's/^(HellaSwag|saved|step).*/\1/p' | sort | uniq -c | xargs)" "2 HellaSwag 2 saved 2 step"
}

# the demo ends within its time and says what to do next
test_demo() {
    setup
    [ -n "${LLMC_TEST_FULL-}" ] || skip "takes a minute: make test-full"
    local start=$SECONDS
    record "cd $PWD && BIN_DIR=$BIN_DIR scripts/demo.sh $train"
    want status $status 0
    note="the demo took $((SECONDS - start)) s and $(lasting | wc -l) lines"
    few_lines_and_no_silence 80
    echo "note: $note"
}

tests=(run long_steps interrupt other_tasks demo)
run_tests "$@"
