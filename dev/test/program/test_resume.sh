#!/usr/bin/env bash
# Stops train_gpt2 in every possible way and starts it again. The resumed run and an uninterrupted one must have the
# same losses to the last digit and the same weights and moments to the last bit, and no stop may destroy the last
# checkpoint.
. "$(dirname "$0")/../test.sh"

# The tests write a few hundred MB, to memory if possible, where a sync costs nothing.
if [ -n "$(df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 && $4 >= 2000')" ]; then
    rmdir "$tmp"
    tmp=$(mktemp -d /dev/shm/llmc_test_XXXXXX) || exit 1
fi
export OMP_NUM_THREADS=1 # the runs are tiny; the number of threads does not change any bit
export ASAN_OPTIONS=${ASAN_OPTIONS-}:verify_asan_link_order=0 # failing_write.so is loaded before the sanitizer's runtime
train=${TRAIN:-$BIN_DIR/train_gpt2} # TRAIN=$PWD/train_gpt2cu runs the same tests on the GPU program
[[ $train == /* ]] || train=$PWD/$train
shim=$tmp/failing_write.so
# The number of SIGKILLs at random moments. test_run_state kills a save at each of its operations, so these need only hit the other
# phases. Starting, training and sampling each take at least a fifth of the time, which 60 kills miss with a probability of 2e-6.
kills=${LLMC_KILLS:-$([ -z "${LLMC_TEST_FULL-}" ] && echo 60 || echo 200)}
ends=${LLMC_ENDS:-$([ -z "${LLMC_TEST_FULL-}" ] && echo 25 || echo 500)}             # random signals at random moments
owner_runs=${LLMC_OWNER_RUNS:-$([ -z "${LLMC_TEST_FULL-}" ] && echo 20 || echo 200)} # two runs that start at once
export LLMC_SAVE_SECONDS=0 TMPDIR=$tmp/rescue # the last save, if it fails, is tried once more, then goes there
mkdir "$TMPDIR"

# Creates shards of this source tree's text and their vocabulary; they are so small that a run has more than one epoch.
make_data() {
    [ -x "$train" ] && [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "$train or dev/data/tokenize is not there: make all"
    [ -e "$tmp/data" ] && return
    mkdir "$tmp/data.new"
    head -c 10000 llmc/gpt2.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 1000 -s 5000 2>"$tmp/tokenize.err" ||
        fail "$(cat "$tmp/tokenize.err")"
    "$CC" -shared -fPIC -o "$shim" dev/test/stand-ins/failing_write.c -ldl
    mv "$tmp/data.new" "$tmp/data"
}

# Sets the flags of a run into OUT: two layers of 32 channels, 2 x 2 micro-batches of 16 tokens, a checkpoint after each
# step, all of them kept. It validates and samples too, because their positions and random numbers are part of the
# state.
set_flags() { # OUT STEPS [FLAGS]
    flags=(--recipe llmc -e d6 --layers 2 --channels 32 --heads 2 --positions 16 -b 2 -t 16 -d 64 -i "$tmp/data/*_train_*.bin"
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

# The functions that poll files every 10 ms start no processes, which would take more time than the program.
exec {nothing}<> <(:) # a pipe from which nothing can be read
pause() { read -rt 0.01 -u "$nothing" || true; } # sleeps for 10 ms

# has TEXT FILE: true if the file contains the text
has() {
    local content=
    [ -e "$2" ] && { IFS= read -rd '' content <"$2" || true; } && [[ $content == *"$1"* ]]
}
# has_line REGEX FILE: true if the beginning of a line of the file matches the extended regular expression
has_line() {
    local line
    [ -e "$2" ] || return 1
    while IFS= read -r line; do [[ ! $line =~ ^$1 ]] || return 0; done <"$2"
    return 1
}
# has_hidden DIR: true if the directory has a hidden entry
has_hidden() { compgen -G "$1/.[!.]*" >/dev/null; }
saving() { compgen -G "$1/.tmp-*" >/dev/null; } # DIR: true while a checkpoint is being written

# wait_for WHAT COMMAND...: waits until COMMAND succeeds, while the program runs, for at most a minute
wait_for() {
    local i
    for ((i = 0; i < 6000; i++)); do
        ! "${@:2}" || return 0
        alive || { ! "${@:2}" || return 0; fail "ended without $1: $(tail -n 1 "$output")"; }
        pause
    done
    kill -KILL "$pid"
    fail "a minute without $1"
}

# ended WHAT: waits until the program has ended because of WHAT, for at most a minute, and returns its exit code
ended() {
    local i
    for ((i = 0; i < 6000; i++)); do
        alive || { wait "$pid" && return 0 || return $?; }
        pause
    done
    kill -KILL "$pid"
    fail "does not end after $1: $(tail -n 1 "$output")"
}

kill_now() {
    kill -KILL "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}

newest() { # DIR: prints the newest step; "" if there is none
    local name last=
    for name in "$1"/step_*; do last=${name##*/step_}; done
    [ "$last" = '*' ] || echo "${last:+$((10#$last))}"
}

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
    ! has_hidden "$out" || fail "hidden directories are left: $(ls -A "$out")"
}

# Runs the program and writes a line for each of its file operations on OUT to $tmp/trace. It waits for each checkpoint:
# otherwise the order of the operations of its two threads would vary.
traced() { # OUT STEPS [FLAGS]
    rm -f "$tmp/trace"
    FAIL_DIR=$1 FAIL_TRACE=$tmp/trace LD_PRELOAD=$shim run "$@" --no-async-save
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
        (FAIL_DIR=$out FAIL_AT=$at FAIL_MODE=kill LD_PRELOAD=$shim run "$out" 8 --no-async-save >"$tmp/killed.out" 2>&1) &&
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

# the same with Muon, after steps 3 and 6
test_muon() {
    reference
    local muon=(--optimizer muon --muon-learning-rate 0.01) k at out
    traced "$tmp/muon" 8 "${muon[@]}" >/dev/null 2>&1
    cmp -s "$tmp/muon/$(step_name 8)/model.safetensors" "$tmp/reference/$(step_name 8)/model.safetensors" &&
        fail "Muon's weights are AdamW's"
    for k in 3 6; do
        out=$tmp/muon_after_$k
        at=$(awk -v name="/$(step_name $k)\$" '/ rename/ && $3 ~ name {print $1 + 1}' "$tmp/trace")
        (FAIL_DIR=$out FAIL_AT=$at FAIL_MODE=kill LD_PRELOAD=$shim run "$out" 8 "${muon[@]}" --no-async-save >"$tmp/killed.out" 2>&1) &&
            fail "step $k: not killed"
        resume "$out" "${muon[@]}"
        contains "resumed at step $k " "$out.resumed"
        same "$out" 8 "$tmp/muon"
        want "the log without times" "$(losses "$out")" "$(losses "$tmp/muon")"
    done
}

# every signal that asks for an end: the program saves the last complete step and exits 0, but 141 if its output was closed; the
# resumed run ends with the same bits
test_signals() {
    reference
    local signal out k code
    for signal in INT TERM HUP USR1 PIPE; do
        out=$tmp/signal_$signal
        start "$out" 1000000 -n 0
        wait_for "step 5" has '"step":5,' "$out/log.jsonl"
        kill -$signal "$pid"
        code=0
        wait "$pid" || code=$?
        want "exit code after SIG$signal" $code "$([ $signal = PIPE ] && echo 141 || echo 0)"
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

# under nohup the program ignores SIGHUP
test_nohup() {
    reference
    local out=$tmp/nohup
    set_flags "$out" 1000000 -n 0
    nohup "$train" "${flags[@]}" >"$out.txt" 2>&1 &
    pid=$! output=$out.txt
    wait_for "step 2" has '"step":2,' "$out/log.jsonl"
    kill -HUP "$pid"
    k=$(grep -c '"type":"train"' "$out/log.jsonl")
    wait_for "more steps" has "\"step\":$((k + 20))," "$out/log.jsonl"
    kill -TERM "$pid"
    wait "$pid" || fail "exit code $?"
}

# nobody reads the output any more: the run is saved
test_broken_pipe() {
    reference
    local out=$tmp/pipe code
    set_flags "$out" 1000000 -n 0
    "$train" "${flags[@]}" 2>"$out.err" | head -n 60 >"$out.txt"
    code=${PIPESTATUS[0]}
    [ -n "$(newest "$out")" ] || fail "no checkpoint: $(ls "$out")"
    want "exit code" "$code" 141
    contains "standard output was closed, stopping: the run finishes " "$out.err"
    same_as_straight "$out"
}
same_as_straight() { # OUT: its newest checkpoint is that of an uninterrupted run
    local k
    k=$(newest "$1")
    straight "$k" "$1.straight"
    same "$1" "$k" "$1.straight"
}

# a limit on the size of files (SIGXFSZ) makes a save fail and does not end the run without a word
test_file_size_limit() {
    reference
    local out=$tmp/limit code=0
    (ulimit -f 20 && run "$out" 3) >"$out.txt" 2>"$out.err" || code=$?
    want "exit code" $code 1
    contains "File too large" "$out.err"
    want "hidden directories" "$(ls -A "$out" | grep '^\.')" ""
}

# a signal in the middle of a step drops the step at its next micro-batch
test_step_is_dropped() {
    reference
    local code=0 out=$tmp/dropped before
    start "$out" 1000000 -n 0 -d 64000000 # steps that take minutes
    wait_for "the first loss" has '"type":"val"' "$out/log.jsonl"
    before=$SECONDS
    kill -TERM "$pid"
    wait "$pid" || code=$?
    want "exit code" $code 0
    [ $((SECONDS - before)) -le 10 ] || fail "it took $((SECONDS - before)) s to stop"
    want "checkpoint of no step" "$(newest "$out")" ""
    contains "stopped after step 0" "$out.txt"
}

# a second signal ends the program without waiting for the micro-batch
test_second_signal() {
    reference
    "$train" --help all | grep -q -- --naive || skip "needs micro-batches that take long"
    local code=0 out=$tmp/twice
    # one micro-batch of several seconds
    start "$out" 1000000 -n 0 --naive --layers 8 --channels 192 -b 60 -d 960 -v 0
    wait_for "the first step" test -e "$out/log.jsonl" # from then on signals are handled
    sleep 0.5
    kill -TERM "$pid"
    wait_for "a word on it" has "ends it at once" "$out.txt"
    kill -TERM "$pid"
    wait "$pid" || code=$?
    want "exit code" $code 143
    want "checkpoint" "$(newest "$out")" ""
}

# With the default saves, kill -9 loses ten minutes of work at most.
test_kills_by_the_clock() {
    make_data
    local out=$tmp/clock
    kill_by_the_clock "$out" "$train" -e d6 --layers 2 --channels 64 --heads 2 --positions 64 -i "$tmp/data/*_train_*.bin"
    contains "checkpoints: so that at most 10 minutes of work are lost, the newest 2 are kept" "$out.txt"
}

# kill -9 at random moments, with a checkpoint after each step: every start finds the newest one intact, none is lost
test_kill_at_random_moments() {
    reference
    local out=$tmp/random i last=0 step seen
    # the kills are spread over twice the time to the first checkpoint, because starting takes longer with a sanitizer
    local before=${EPOCHREALTIME/[.,]/} window moment
    start "$tmp/first" 1000000
    wait_for "a checkpoint" has_line saved "$tmp/first.txt"
    kill_now
    window=$(((${EPOCHREALTIME/[.,]/} - before) * 2 / 1000))
    [ "$window" -ge 60 ] || window=60
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
    wait_for "a checkpoint" has_line saved "$out.txt"
    kill -TERM "$pid"
    wait "$pid" || fail "exit code $?"
    contains "resumed at step $last " "$out.txt"
    want "hidden directories" "$(ls -A "$out" | grep '^\.')" ""
    last=$(newest "$out")
    straight "$last" "$tmp/straight"
    same "$out" "$last" "$tmp/straight"
}

# Random signals at random moments, also during saves, of one long run that saves only at its end or now and then: after each
# of them but SIGKILL the newest checkpoint is that of the last step, after SIGKILL it is the last one that was saved; the
# run goes on from there, and in the end has the losses, samples and weights of an uninterrupted run.
test_random_ends() {
    reference
    local out=$tmp/ends i last=0 signal code slow window moment saved count
    local signals=(INT TERM HUP USR1 PIPE KILL)
    start "$tmp/ends_first" 1000000 -n 0 -v 50 -s 70
    local before=${EPOCHREALTIME/[.,]/}
    wait_for "step 20" has '"step":20,' "$tmp/ends_first/log.jsonl"
    kill_now
    window=$(((${EPOCHREALTIME/[.,]/} - before) * 2 / 1000))
    [ "$window" -ge 100 ] || window=100
    RANDOM=2
    for ((i = 0; i < ends; i++)); do
        signal=${signals[RANDOM % 6]}
        slow=$((RANDOM % 3 * 10))
        moment=$((RANDOM % window))
        set_flags "$out" 1000000 -n $((RANDOM % 2 * 30)) -nk 2 -v 50 -s 70 -y 1
        output=$out.txt
        : >"$output"
        if [ $slow -gt 0 ]; then
            FAIL_DIR=$out FAIL_SLOW_MS=$slow LD_PRELOAD=$shim "$train" "${flags[@]}" >"$output" 2>&1 &
        else
            "$train" "${flags[@]}" >"$output" 2>&1 &
        fi
        pid=$!
        # before this the program has nothing to save, and a signal ends it as any other program
        wait_for "the start" has_line "(step +[0-9]|val loss|resumed|generating)" "$output"
        sleep "$(printf '%d.%03d' $((moment / 1000)) $((moment % 1000)))"
        kill "-$signal" "$pid" 2>/dev/null || true
        code=0
        ended "SIG$signal ($i)" || code=$?
        ! grep -q "passed over\|^error" "$output" || fail "end $i (SIG$signal): $(grep -m 1 'passed over\|^error' "$output")"
        seen=$(sed -nE 's/^resumed at step ([0-9]+).*/\1/p' "$output")
        [ "${seen:-$last}" -eq "$last" ] || fail "start $i: resumed at step $seen, step $last was the newest"
        saved=$(newest "$out")
        count=$(grep -ac '"type":"train"' "$out/log.jsonl" || true)
        if [ "$signal" = KILL ]; then
            [ "${saved:-0}" -ge "$last" ] || fail "end $i: the newest is step $saved, it was $last"
        elif [ $code -ne 0 ] && ! grep -q "standard output was closed" "$output"; then # at first there are no handlers
            [ $code -gt 128 ] && [ "${saved:-0}" -eq "$last" ] || fail "end $i: SIG$signal gives $code: $(tail -n 1 "$output")"
        else
            want "end $i (SIG$signal): the newest checkpoint" "${saved:-0}" "$count"
        fi
        last=${saved:-0}
    done
    [ "$last" -ge "$ends" ] || fail "only $last steps in $ends runs: nothing was tested"
    start "$out" 1000000 -n $((last + 3)) -nk 2 -v 50 -s 70 -y 1
    wait_for "checkpoint $((last + 3))" test -e "$out/$(step_name $((last + 3)))"
    kill_now
    start "$tmp/ends_straight" 1000000 -n $((last + 3)) -v 50 -s 70
    for ((i = 0; i < 60; i++)); do # wait_for waits a minute at most
        test ! -e "$tmp/ends_straight/$(step_name $((last + 3)))" || break
        sleep 1
    done
    wait_for "checkpoint $((last + 3))" test -e "$tmp/ends_straight/$(step_name $((last + 3)))"
    kill_now
    same "$out" $((last + 3)) "$tmp/ends_straight"
    until_last() { losses "$1" | sed "/\"step\":$((last + 3)),/q"; }
    cmp <(until_last "$out") <(until_last "$tmp/ends_straight") || fail "other losses than without interruption"
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
# LLMC_WRITE_STRIDE=5: each fifth operation, under the sanitizers
fail_each() { # MODE TOTAL
    local at code last mode=$1 base=$tmp/base out=$tmp/failing_$1
    for ((at = 1; at <= $2; at += ${LLMC_WRITE_STRIDE:-1})); do
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
        ! has_hidden "$out" || fail "operation $at ($mode) leaves $(ls -A "$out")"
        [ $code -eq 1 ] || continue
        rm -rf "$TMPDIR"/train_gpt2_rescue_*
        last=$(newest "$out")
        resume "$out"
        contains "resumed at step $last " "$out.resumed"
        grep -q "passed over" "$out.resumed" && fail "operation $at ($mode): a checkpoint that is not whole"
        same "$out" 8
    done
}

# The same while the training goes on: in a run that saves each of 8 steps asynchronously, one operation fails, alone or with
# all that follow. All of them are tried in `make test-full`, each eleventh (LLMC_STRIDE) otherwise.
test_failing_writes_beside_the_run() {
    reference
    local total at mode out=$tmp/beside code stride=${LLMC_STRIDE:-11} last
    [ -z "${LLMC_TEST_FULL-}" ] || stride=1
    traced "$tmp/beside_traced" 8 >/dev/null 2>&1
    total=$(wc -l <"$tmp/trace")
    [ "$total" -gt 200 ] || fail "only $total operations are seen"
    for mode in once from; do
        for ((at = 1; at <= total; at += stride)); do
            rm -rf "$out" "$TMPDIR"/train_gpt2_rescue_*
            code=0
            (FAIL_DIR=$out FAIL_AT=$at FAIL_MODE=$mode LD_PRELOAD=$shim run "$out" 8 >"$out.stdout" 2>"$out.stderr") || code=$?
            [ ! -e "$out" ] || ! has_hidden "$out" || fail "operation $at ($mode) leaves $(ls -A "$out")"
            case $code in
            0) same "$out" 8 ;; # the saves that failed were not the last one
            1) contains "No space left on device" "$out.stderr" ;;
            *) fail "operation $at ($mode): exit code $code" ;;
            esac
            [ -e "$out" ] || continue
            last=$(newest "$out")
            resume "$out"
            ! grep -q "passed over" "$out.resumed" || fail "operation $at ($mode): a checkpoint that is not whole"
            [ -z "$last" ] || contains "resumed at step $last " "$out.resumed"
            same "$out" 8
        done
    done
}

# the run goes on while a checkpoint is written to a slow disk, and waits with --no-async-save; the weights are the same
test_asynchronous() {
    reference
    local steps out=$tmp/slow
    FAIL_DIR=$out FAIL_SLOW_MS=100 LD_PRELOAD=$shim run "$out" 200 -n 100 -v 0 -s 0 >"$out.txt" 2>&1
    steps=$(sed -nE '/^saved .*step_00000100 /q; s/^step +([0-9]+).*/\1/p' "$out.txt" | tail -n 1)
    [ "$steps" -gt 100 ] || fail "saved after step $steps: the run has waited"
    grep -qE '^saved .*step_00000100 \([0-9]+ ms; the run waited for [0-9]+ ms\)$' "$out.txt" || fail "$(grep ^saved "$out.txt")"
    grep -qE '^saved .*step_00000200 \([0-9]+ ms\)$' "$out.txt" || fail "$(grep ^saved "$out.txt")"
    FAIL_DIR=$out.sync FAIL_SLOW_MS=100 LD_PRELOAD=$shim run "$out.sync" 200 -n 100 -v 0 -s 0 --no-async-save >"$out.txt" 2>&1
    steps=$(sed -nE '/^saved .*step_00000100 /q; s/^step +([0-9]+).*/\1/p' "$out.txt" | tail -n 1)
    want "saved after step" "$steps" 100
    same "$out" 100 "$out.sync"
    same "$out" 200 "$out.sync"
    # a signal while a checkpoint is being written: it is completed, and so is that of the last step
    start_slow "$out.signal" 1000000 -n 100 -v 0 -s 0
    wait_for "a step beside a save" saving_after_step 101 "$out.signal"
    kill -TERM "$pid"
    wait "$pid" || fail "exit code $?"
    [ "$(grep -c "^saved" "$output")" -ge 2 ] || fail "$(cat "$output")"
    same_as_straight "$out.signal"
    # an error that ends the run while a checkpoint is being written
    cp -r "$tmp/data" "$tmp/cut"
    start_slow "$out.error" 1000000 -n 100 -v 0 -s 0 -i "$tmp/cut/*_train_*.bin"
    wait_for "a save" saving "$out.error"
    mv "$tmp"/cut/*_train_000000.bin "$tmp"/cut/gone
    ! wait "$pid" || fail "exit code 0"
    contains "saved $out.error/step_00000100" "$output"
    contains "are saved: resume with -y 1" "$output"
    same_as_straight "$out.error"
}
# STEP DIR: a checkpoint is being written and the run has printed STEP, a later one, so a signal makes it save that one, too
saving_after_step() { saving "$2" && has_line "step +$1/" "$output"; }
start_slow() { # OUT STEPS [FLAGS]: like start, on a slow disk
    set_flags "$@"
    output=$1.txt
    : >"$output"
    FAIL_DIR=$1 FAIL_SLOW_MS=100 LD_PRELOAD=$shim "$train" "${flags[@]}" >"$output" 2>&1 &
    pid=$!
}

# a file system that is really full
test_full_disk() {
    reference
    rm -rf "$TMPDIR"/train_gpt2_rescue_* # of an earlier test
    unshare -rm sh -c 'mount -t tmpfs none /mnt' 2>/dev/null || skip "may not mount a tmpfs here"
    # space for the log and two checkpoints, but not for eight
    local bytes
    bytes=$(du -sb "$tmp/reference/step_00000001" | cut -f 1)
    mkdir "$tmp/disk"
    export -f set_flags run step_name same fail contains want
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
        # the run went on: every save was tried, and the last one went elsewhere
        want "steps" "$(grep -c "\"type\":\"train\"" "$tmp/disk/log/log.jsonl")" 8
        want "warnings" "$(grep -c "^warning: the checkpoint of step [3-7] was not saved" "$tmp/disk.err")" 5
        want "errors" "$(grep -c "^error: " "$tmp/disk.err")" 1
        same "$TMPDIR"/train_gpt2_rescue_* 8
        mount -o remount,size=100m "$tmp/disk"
        cp -r "$tmp/disk/log" "$tmp/disk/rescued"
        run "$tmp/disk/log" 8 -y 1 >"$tmp/disk.out" 2>&1
        grep -q "resumed at step 2 " "$tmp/disk.out"
        same "$tmp/disk/log" 8
        # what the error names is the checkpoint itself
        mv "$(sed -nE "s/^error: .*; it was saved as (.*): move that directory .*/\1/p" "$tmp/disk.err")" "$tmp/disk/rescued"
        run "$tmp/disk/rescued" 8 -y 1 >"$tmp/disk.out" 2>&1
        contains "resumed at step 8 " "$tmp/disk.out"
        rmdir "$TMPDIR"/train_gpt2_rescue_*'
}

# a file system that is full for a while: the saves of that time fail, the run goes on, and the next save succeeds
test_disk_full_for_a_while() {
    reference
    unshare -rm sh -c 'mount -t tmpfs none /mnt' 2>/dev/null || skip "may not mount a tmpfs here"
    mkdir "$tmp/while"
    export -f set_flags fail contains want
    export tmp train
    unshare -rm bash -euc '
        mount -t tmpfs -o size=8m none "$tmp/while"
        set_flags "$tmp/while/log" 1000000 -nk 3
        "$train" "${flags[@]}" >"$tmp/while.out" 2>"$tmp/while.err" &
        pid=$!
        until grep -q "^saved" "$tmp/while.out"; do sleep 0.02; done
        cat /dev/zero >"$tmp/while/filler" 2>/dev/null || true
        until grep -q "was not saved, earlier ones are untouched.*No space left on device; the run goes on" "$tmp/while.err"; do
            kill -0 $pid || fail "ended: $(tail -n 1 "$tmp/while.err")"
            sleep 0.02
        done
        rm "$tmp/while/filler"
        saved=$(grep -c "^saved" "$tmp/while.out")
        until [ "$(grep -c "^saved" "$tmp/while.out")" -gt $((saved + 3)) ]; do sleep 0.02; done
        kill -TERM $pid
        wait $pid
        grep -qE "^[0-9]+ saves? failed$" "$tmp/while.out" || fail "no count of failed saves"
        steps=$(sed -nE "s/.*\"step\":([0-9]+),\"type\":\"train\".*/\1/p" "$tmp/while/log/log.jsonl")
        want "steps in the log" "$(wc -l <<<"$steps")" "$(tail -n 1 <<<"$steps")"
        contains "\"type\":\"save_failed\",\"error\":\"" "$tmp/while/log/log.jsonl"'
}

# the data cannot be read any more: the weights of the last complete step are saved, and the run can be resumed
test_data_goes() {
    reference
    local out=$tmp/goes k code kind
    mkdir "$tmp/going"
    for kind in moved bad_id; do
        rm -rf "$out" "$tmp/going"
        cp -r "$tmp/data" "$tmp/going"
        set_flags "$out" 1000000 -n 0 -v 0 -i "$tmp/going/*_train_*.bin"
        if [ $kind = bad_id ]; then # token 4000 of the first shard becomes 60000
            printf '\x60\xea' | dd of="$tmp/going/a_train_000000.bin" bs=1 seek=$((1024 + 8000)) conv=notrunc 2>/dev/null
        fi
        "$train" "${flags[@]}" >"$out.txt" 2>"$out.err" &
        pid=$! output=$out.err
        if [ $kind = moved ]; then
            wait_for "step 3" has '"step":3,' "$out/log.jsonl"
            mkdir "$tmp/going/away"
            mv "$tmp"/going/*_train_*.bin "$tmp/going/away/"
        fi
        code=0
        wait "$pid" || code=$?
        want "exit code ($kind)" $code 1
        k=$(newest "$out")
        [ "${k:-0}" -ge 1 ] || fail "$kind: no checkpoint: $(cat "$out.err")"
        contains "the weights after step $k are saved: resume with -y 1" "$out.err"
        want "steps in the log ($kind)" "$(grep -c '"type":"train"' "$out/log.jsonl")" "$k"
        [ $kind = moved ] || continue
        mv "$tmp"/going/away/* "$tmp/going/"
        "$train" "${flags[@]}" -y 1 -n $((k + 3)) >"$out.txt" 2>&1 &
        pid=$! output=$out.txt
        wait_for "checkpoint $((k + 3))" test -e "$out/$(step_name $((k + 3)))"
        kill_now
        contains "resumed at step $k " "$out.txt"
        straight $((k + 3)) "$out.straight"
        same "$out" $((k + 3)) "$out.straight"
    done
}

# a directory has one owner: of two runs that start together one runs, the other ends at once and touches nothing
test_owner() {
    reference
    local out=$tmp/owned i each good codes flags_of_second
    start "$out" 1000000 -nk 3
    wait_for "a checkpoint" has_line saved "$out.txt"
    for flags_of_second in "" "-y 1"; do
        # shellcheck disable=SC2086
        if run "$out" 8 $flags_of_second >"$tmp/second.txt" 2>"$tmp/second.err"; then fail "a second run in $out"; fi
        contains "is in use by process $pid on " "$tmp/second.err"
        want "lines of error" "$(wc -l <"$tmp/second.err")" 1
    done
    alive || fail "the first run has ended"
    kill -KILL "$pid" # the lock goes with the process
    wait "$pid" || true
    start "$out" 1000000 -nk 3 -y 1
    wait_for "a checkpoint" has_line saved "$out.txt"
    kill -TERM "$pid"
    wait "$pid" || fail "exit code $?"
    # two runs that start within 50 ms, each a new one or one to resume, in an empty directory or one with checkpoints
    local resuming=("" "-y 1")
    for ((i = 0; i < owner_runs; i++)); do
        rm -rf "$tmp/race"
        if [ $((i % 8)) -ge 4 ]; then
            cp -r "$tmp/reference" "$tmp/race"
            rm -r "$tmp"/race/step_0000000[5-8]
        fi
        codes=()
        for each in 0 1; do
            # shellcheck disable=SC2086
            run "$tmp/race" 8 ${resuming[$((i >> each & 1))]} >"$tmp/race$each.txt" 2>"$tmp/race$each.err" &
            codes+=($!)
            sleep "0.0$((RANDOM % 5))"
        done
        good=0
        for each in 0 1; do ! wait "${codes[$each]}" || good=$((good + 1)); done
        case $good in
        0) # two new runs where there are checkpoints: both are refused, nothing is touched
            want "combination without a run" $((i % 8)) 4
            want "refusals" "$(cat "$tmp"/race?.err | grep -c "holds checkpoints of an earlier run\|is in use by")" 2
            want "newest checkpoint" "$(newest "$tmp/race")" 4
            continue
            ;;
        1) grep -q "is in use by\|started at the same time\|holds checkpoints of an earlier run" "$tmp"/race?.err || fail "$(cat "$tmp"/race?.err)" ;;
        2) grep -q "resumed at step 8 " "$tmp"/race?.txt || fail "two runs in one directory" ;; # one after the other
        esac
        same_all "$tmp/race"
    done
}

# The directory of a run is moved away, and another run takes its name: the first run notices, writes and removes nothing there,
# goes on, saves its last checkpoint elsewhere and ends with 1.
test_output_goes() {
    reference
    local out=$tmp/moving step code=0 rescued first
    start "$out" 1000000 -nk 3 -d 6400 # slow steps
    first=$output
    wait_for "a checkpoint" has_line saved "$first"
    mv "$out" "$out.away"
    wait_for "a warning" has "$out/run.lock, which this run has locked, is gone" "$first"
    [ ! -e "$out" ] || fail "the run has made $out again: $(ls -A "$out")"
    run "$out" 8 >"$tmp/second.txt" 2>&1 || fail "$(cat "$tmp/second.txt")"
    wait_for "another warning" has "$out/run.lock, which this run has locked, was replaced" "$first"
    kill -TERM "$pid"
    ended SIGTERM || code=$?
    want "exit code" $code 1
    same_all "$out"
    want "what the second run has left" "$(ls -A "$out" | sed 's/events.*/events/')" "$(ls -A "$tmp/reference" | sed 's/events.*/events/')"
    rescued=$(sed -nE 's/^error: .*; it was saved as (.*): move that directory .*/\1/p' "$first")
    step=$((10#${rescued##*_}))
    mv "$rescued" "$out.away"
    start "$out.away" 1000000 -nk 3 -d 6400 -y 1
    wait_for "a checkpoint" has_line saved "$output"
    kill_now
    contains "resumed at step $step " "$output"
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

tests=(another_run_differs killed_after_each_step muon signals nohup broken_pipe file_size_limit step_is_dropped second_signal
    kill_at_random_moments random_ends failing_writes failing_writes_beside_the_run asynchronous full_disk disk_full_for_a_while data_goes owner output_goes damaged_checkpoint keep
    no_resume_no_overwrite kills_by_the_clock)
run_tests "$@"
