#!/usr/bin/env bash
# Stops train_gpt2 in every possible way and starts it again. The resumed run and an uninterrupted one must have the
# same losses to the last digit and the same weights and moments to the last bit, and no stop may destroy the last
# checkpoint.
. "$(dirname "$0")/test.sh"

export OMP_NUM_THREADS=1 # the runs are tiny; the number of threads does not change any bit
export ASAN_OPTIONS=${ASAN_OPTIONS-}:verify_asan_link_order=0 # failing_write.so is loaded before the sanitizer's runtime
train=${TRAIN:-$BIN_DIR/train_gpt2} # TRAIN=$PWD/train_gpt2cu runs the same tests on the GPU program
[[ $train == /* ]] || train=$PWD/$train
shim=$tmp/failing_write.so
kills=${LLMC_KILLS:-200}

# Creates shards of this source tree's text and their vocabulary; they are so small that a run has more than one epoch.
make_data() {
    [ -x "$train" ] && [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "$train or dev/data/tokenize is not there: make all"
    [ -e "$tmp/data" ] && return
    mkdir "$tmp/data.new"
    head -c 10000 llmc/gpt2.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 1000 -s 5000 2>"$tmp/tokenize.err" ||
        fail "$(cat "$tmp/tokenize.err")"
    "$CC" -shared -fPIC -o "$shim" dev/test/failing_write.c -ldl
    mv "$tmp/data.new" "$tmp/data"
}

# Sets the flags of a run into OUT: two layers of 32 channels, 2 x 2 micro-batches of 16 tokens, a checkpoint after each
# step, all of them kept. It validates and samples too, because their positions and random numbers are part of the
# state.
set_flags() { # OUT STEPS [FLAGS]
    flags=(-e d6 --layers 2 --channels 32 --heads 2 --positions 16 -b 2 -t 16 -d 64 -i "$tmp/data/*_train_*.bin"
        -j "$tmp/data/*_val_*.bin" -o "$1" -x "$2" -l 0.003 -u 2 -q 0.1 -c 0.1 -v 3 -m 2 -s 2 -g 8 -n 1 -nk 0 "${@:3}")
}

run() { # OUT STEPS [FLAGS]: trains
    set_flags "$@"
    "$train" "${flags[@]}"
}

start() { # OUT STEPS [FLAGS]: trains in the background; $pid is the program's PID, its output goes to OUT.txt
    set_flags "$@"
    output=$1.txt
    : >"$output" # clears the output of an earlier start
    "$train" "${flags[@]}" >"$output" 2>&1 &
    pid=$!
}

alive() { kill -0 "$pid" 2>/dev/null; }

# wait_for WHAT COMMAND...: waits until COMMAND succeeds, while the program runs, for at most a minute
wait_for() {
    local i
    for ((i = 0; i < 6000; i++)); do
        ! "${@:2}" || return 0
        alive || { ! "${@:2}" || return 0; fail "ended without $1: $(tail -n 1 "$output")"; }
        sleep 0.01
    done
    kill -KILL "$pid"
    fail "a minute without $1"
}

kill_now() {
    kill -KILL "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}

newest() { ls "$1" 2>/dev/null | grep '^step_' | tail -n 1 | sed 's/step_0*//'; } # the newest step; "" if there is none

# Prints what interruptions must not change: every loss, norm, learning rate and sample as logged, without the times.
losses() { sed -E 's/"(time_ms|tokens_per_second)":[^,}]*//g' "$1/log.jsonl"; }

step_name() { printf 'step_%08d' "$1"; }

# Makes the uninterrupted run of 8 steps, in $tmp/reference.
reference() {
    make_data
    [ -e "$tmp/reference" ] && return
    run "$tmp/reference.new" 8 >"$tmp/reference.out" 2>&1 || fail "the run fails: $(tail -n 1 "$tmp/reference.out")"
    want "number of losses" "$(grep -c '"type":"train"' "$tmp/reference.new/log.jsonl")" 8
    mv "$tmp/reference.new" "$tmp/reference"
}

# same OUT STEP [REFERENCE]: weights and moments after STEP must equal those of the reference
same() {
    local name file
    name=$(step_name "$2")
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/$name/$file" "${3:-$tmp/reference}/$name/$file" || fail "$name/$file differs from the uninterrupted run"
    done
}

# same_all OUT: the same after step 8, and all losses of the 8 steps must equal the reference's
same_all() {
    same "$1" 8
    want "the log without times" "$(losses "$1")" "$(losses "$tmp/reference")"
}

resume() { # OUT [FLAGS]: resumes and trains to step 8; its output goes to OUT.resumed
    local out=$1
    shift
    run "$out" 8 -y 1 "$@" >"$out.resumed" 2>&1 || fail "resuming fails: $(tail -n 1 "$out.resumed")"
    [ -z "$(ls -A "$out" | grep '^\.')" ] || fail "hidden directories are left: $(ls -A "$out")"
}

# Runs the program and writes a line for each of its file operations on OUT to $tmp/trace.
traced() { # OUT STEPS [FLAGS]
    rm -f "$tmp/trace"
    FAIL_DIR=$1 FAIL_TRACE=$tmp/trace LD_PRELOAD=$shim run "$@"
}

# ---- tests ------------------------------------------------------------------------------

# the comparison can fail: it notices another seed; a second run with the same seed passes
test_another_run_differs() {
    reference
    run "$tmp/other" 8 --seed 43 >/dev/null 2>&1
    (same_all "$tmp/other") >/dev/null && fail "a run with another seed passes for the same"
    run "$tmp/again" 8 >/dev/null 2>&1
    same_all "$tmp/again"
}

# for each k, dies as soon as step k has its checkpoint: the first operation after the rename is the kill
test_killed_after_each_step() {
    reference
    traced "$tmp/traced" 8 >/dev/null 2>&1
    same_all "$tmp/traced"
    local k at out
    for k in 1 2 3 4 5 6 7 8; do
        out=$tmp/after_$k
        at=$(awk -v name="/$(step_name $k)\$" '/ rename/ && $3 ~ name {print $1 + 1}' "$tmp/trace")
        (FAIL_DIR=$out FAIL_AT=$at FAIL_MODE=kill LD_PRELOAD=$shim run "$out" 8 >"$tmp/killed.out" 2>&1) &&
            fail "step $k: not killed"
        want "newest checkpoint" "$(newest "$out")" $k
        resume "$out"
        contains "resumed at step $k " "$out.resumed"
        same_all "$out"
    done
}

# straight STEP OUT: an uninterrupted run (of a million steps) that saves only STEP and is stopped after that
straight() {
    start "$2" 1000000 -n "$1"
    wait_for "checkpoint $1" test -e "$2/$(step_name "$1")"
    kill_now
}

# the first signal: the program finishes and saves the step and exits 0; the resumed run ends with the same bits
test_signals() {
    reference
    local signal out k code
    for signal in INT TERM; do
        out=$tmp/signal_$signal
        start "$out" 1000000 -n 0
        wait_for "step 5" grep -qs '"step":5,' "$out/log.jsonl"
        kill -$signal "$pid"
        code=0
        wait "$pid" || code=$?
        want "exit code after SIG$signal" $code 0
        k=$(newest "$out")
        [ "${k:-0}" -ge 5 ] || fail "SIG$signal: no checkpoint: $(ls "$out")"
        want "steps in the log" "$(grep -c '"type":"train"' "$out/log.jsonl")" "$k"
        start "$out" 1000000 -n $((k + 3)) -y 1
        wait_for "checkpoint $((k + 3))" test -e "$out/$(step_name $((k + 3)))"
        kill_now
        contains "resumed at step $k " "$out.txt"
        straight $((k + 3)) "$out.straight"
        same "$out" $((k + 3)) "$out.straight"
        want "losses" "$(losses "$out" | head -n $((k + 3)))" "$(losses "$out.straight" | head -n $((k + 3)))"
    done
}

# a second signal ends the program without waiting for the step
test_second_signal() {
    reference
    local code=0 out=$tmp/twice
    start "$out" 1000000 -n 0 -d 640000 # steps that take long
    wait_for "the first loss" grep -qs '"type":"val"' "$out/log.jsonl"
    kill -TERM "$pid"
    wait_for "a word on it" grep -qs "second signal" "$out.txt"
    kill -TERM "$pid"
    wait "$pid" || code=$?
    want "exit code" $code 143
    want "checkpoint" "$(newest "$out")" ""
}

# kill -9 at random moments, with a checkpoint after each step: every start finds the newest one intact, none is lost
test_kill_at_random_moments() {
    reference
    local out=$tmp/random i last=0 step seen
    # the kills are spread over twice the time to the first checkpoint, because starting takes longer with a sanitizer
    local before=${EPOCHREALTIME/[.,]/} window moment
    start "$tmp/first" 1000000
    wait_for "a checkpoint" grep -q "^saved" "$tmp/first.txt"
    kill_now
    window=$(((${EPOCHREALTIME/[.,]/} - before) * 2 / 1000))
    [ "$window" -ge 100 ] || window=100
    RANDOM=1
    for ((i = 0; i < kills; i++)); do
        start "$out" 1000000 -y 1 -nk 3
        moment=$((RANDOM % window))
        sleep "$(printf '%d.%03d' $((moment / 1000)) $((moment % 1000)))"
        kill_now
        grep -q "passed over\|^error" "$out.txt" && fail "start $i: $(grep -m 1 'passed over\|^error' "$out.txt")"
        seen=$(sed -nE 's/^resumed at step ([0-9]+).*/\1/p' "$out.txt")
        [ "${seen:-$last}" -eq "$last" ] || fail "start $i: resumed at step $seen, step $last was the newest"
        step=$(newest "$out")
        [ "${step:-0}" -ge "$last" ] || fail "start $i: the newest is step $step, it was $last"
        last=${step:-0}
    done
    [ "$last" -ge $((kills / 20)) ] || fail "only $last steps in $kills starts: nothing was tested"
    # one more start resumes there, saves, and leaves no temporary directories
    start "$out" 1000000 -y 1 -nk 3
    wait_for "a checkpoint" grep -q "^saved" "$out.txt"
    kill -TERM "$pid"
    wait "$pid" || fail "exit code $?"
    contains "resumed at step $last " "$out.txt"
    want "hidden directories" "$(ls -A "$out" | grep '^\.')" ""
    last=$(newest "$out")
    straight "$last" "$tmp/straight"
    same "$out" "$last" "$tmp/straight"
}

# A run that resumes, does a step and saves: each of its writes, syncs, opens, renames, mkdirs and closes fails once,
# alone (mode once) or with all that follow (mode from). Both modes run in parallel, because there are hundreds of runs.
test_failing_writes() {
    reference
    local total mode base=$tmp/base pids=()
    mkdir "$base"
    cp -r "$tmp/reference/step_00000007" "$base"
    cp "$tmp/reference/log.jsonl" "$tmp/reference/main.log" "$base"
    cp -r "$base" "$tmp/failing"
    traced "$tmp/failing" 8 -y 1 >/dev/null 2>&1
    same "$tmp/failing" 8
    total=$(wc -l <"$tmp/trace")
    [ "$total" -gt 40 ] || fail "only $total operations are seen"
    for mode in once from; do
        fail_each $mode "$total" >"$tmp/failing_$mode.out" 2>&1 &
        pids+=($!)
    done
    for mode in once from; do
        wait "${pids[0]}" || { kill "${pids[@]}" 2>/dev/null; cat "$tmp/failing_$mode.out"; exit 1; }
        pids=("${pids[@]:1}")
    done
}
fail_each() { # MODE TOTAL
    local at code last mode=$1 base=$tmp/base out=$tmp/failing_$1
    for ((at = 1; at <= $2; at++)); do
        rm -rf "$out"
        cp -r "$base" "$out"
        code=0
        (FAIL_DIR=$out FAIL_AT=$at FAIL_MODE=$mode LD_PRELOAD=$shim run "$out" 8 -y 1 >"$out.stdout" 2>"$out.stderr") ||
            code=$?
        case $code in
        0) # only operations outside of a checkpoint may fail without ending the run: on a log, closing a directory
            same "$out" 8
            ;;
        1)
            contains "No space left on device" "$out.stderr"
            want "lines of error" "$(grep -c '^error: ' "$out.stderr")" 1
            ;;
        *) fail "operation $at ($mode): exit code $code" ;;
        esac
        cmp "$out/step_00000007/model.safetensors" "$base/step_00000007/model.safetensors"
        [ -z "$(ls -A "$out" | grep '^\.')" ] || fail "operation $at ($mode) leaves $(ls -A "$out")"
        [ $code -eq 1 ] || continue
        last=$(newest "$out")
        resume "$out"
        contains "resumed at step $last " "$out.resumed"
        grep -q "passed over" "$out.resumed" && fail "operation $at ($mode): a checkpoint that is not whole"
        same "$out" 8
    done
}

# a file system that is really full
test_full_disk() {
    reference
    unshare -rm sh -c 'mount -t tmpfs none /mnt' 2>/dev/null || skip "may not mount a tmpfs here"
    # space for the log and two checkpoints, but not for eight
    local bytes
    bytes=$(du -sb "$tmp/reference/step_00000001" | cut -f 1)
    mkdir "$tmp/disk"
    export -f set_flags run step_name same fail contains
    export tmp train
    unshare -rm bash -euc '
        mount -t tmpfs -o size='$((bytes * 5 / 2 + 65536))' none "$tmp/disk"
        code=0
        run "$tmp/disk/log" 8 >"$tmp/disk.out" 2>"$tmp/disk.err" || code=$?
        [ $code -eq 1 ] || fail "exit code $code"
        contains "No space left on device" "$tmp/disk.err"
        contains "earlier ones are untouched" "$tmp/disk.err"
        [ "$(ls -A "$tmp/disk/log" | grep -c step_)" -eq 2 ] || fail "left: $(ls -A "$tmp/disk/log")"
        same "$tmp/disk/log" 1
        same "$tmp/disk/log" 2
        mount -o remount,size=100m "$tmp/disk"
        run "$tmp/disk/log" 8 -y 1 >"$tmp/disk.out" 2>&1
        grep -q "resumed at step 2 " "$tmp/disk.out"
        same "$tmp/disk/log" 8'
}

# if the newest checkpoint is damaged, it is reported and the one before it is used; the run ends with the same bits
test_damaged_checkpoint() {
    reference
    local out=$tmp/damaged
    cp -r "$tmp/reference" "$out"
    printf x | dd of="$out/step_00000008/optimizer.safetensors" bs=1 seek=5000 conv=notrunc 2>/dev/null
    rm "$out/step_00000007/config.json"
    truncate -s -1 "$out/step_00000006/model.safetensors"
    resume "$out"
    contains "passed over checkpoint step_00000008: " "$out.resumed"
    contains "optimizer.safetensors: is damaged" "$out.resumed"
    contains "step_00000007/config.json: No such file" "$out.resumed"
    contains "step_00000006/model.safetensors: has " "$out.resumed"
    contains "resumed at step 5 " "$out.resumed"
    same_all "$out"
    rm "$out"/step_*/state.json
    run "$out" 8 -y 1 >"$tmp/none.out" 2>"$tmp/none.err" && fail "goes on without any good checkpoint"
    contains "none of its 8 checkpoints is intact" "$tmp/none.err"
}

# -nk keeps the newest checkpoints, and the multiples
test_keep() {
    reference
    run "$tmp/keep" 8 -nk 2 -nm 3 >/dev/null 2>&1
    want "checkpoints" "$(ls -A "$tmp/keep" | grep step_ | sed 's/step_0*//' | tr '\n' ' ')" "3 6 7 8 "
    same_all "$tmp/keep"
}

# a new run refuses a directory that has another run's checkpoints
test_no_resume_no_overwrite() {
    reference
    cp -r "$tmp/reference" "$tmp/kept"
    local code=0
    run "$tmp/kept" 8 >/dev/null 2>"$tmp/kept.err" || code=$?
    want "exit code" $code 1
    diff -r "$tmp/kept" "$tmp/reference"
}

tests=(another_run_differs killed_after_each_step signals second_signal kill_at_random_moments failing_writes
    full_disk damaged_checkpoint keep no_resume_no_overwrite)
run_tests "$@"
