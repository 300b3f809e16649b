# shellcheck shell=bash
# shellcheck disable=SC2154 # the script that sources this file sets model, unit and broken_card
# Tests of train_gpt2cu with several ranks that need no more than ranks that run: test_several_gpus.sh runs them with stand-ins
# for CUDA and NCCL, test_ranks_on_a_gpu.sh with several ranks on a real GPU. A script that sources this sets
#
#     model=(...)   flags of a small model, and of a batch of $unit = B * T tokens
#     limit=100     seconds that a run may take
#     build         a function that makes the program $train
#     broken_card=(NAME=VALUE ...)   the environment of a rank whose GPU fails in the middle of a run
#     ranks=3       how many ranks the tests of faults have (default: 3)
. "$(dirname "${BASH_SOURCE[0]}")/../test.sh"
export PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 # the models are tiny
unset "${!FAKE_CUDA_@}" "${!FAKE_NCCL_@}" "${!SHARED_CARD@}" "${!SLURM_@}" "${!OMPI_@}" CUDA_VISIBLE_DEVICES RANK WORLD_SIZE LOCAL_RANK
kills=${LLMC_KILLS:-$([ -z "${LLMC_TEST_FULL-}" ] || echo 20)} # kill -9 at random moments of a run
for name in "${!LLMC_@}"; do [ "$name" = LLMC_TEST_FULL ] || unset "$name"; done
mkdir "$tmp/bin" "$tmp/rescue"
train=$tmp/bin/train_gpt2cu
ranks=${ranks:-3}
before=() # a command that runs the program, such as `env NAME=VALUE`
all_failed=$(printf ' 1%.0s' $(seq "$ranks")) # the exit codes of ranks that have all failed
preload=  # what LD_PRELOAD loads into the program

# Builds the program, and makes shards, once.
setup() {
    [ -e "$tmp/data" ] && return
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$BIN_DIR/dev/data/tokenize" ] && [ -x "$BIN_DIR/dev/data/hellaswag" ] || fail "dev/data/tokenize is not there: make all"
    build
    gcc -shared -fPIC -O1 -o "$tmp/bin/failing_write.so" dev/test/stand-ins/failing_write.c -ldl
    mkdir "$tmp/data.new"
    head -c 20000 llmc/tokenizer.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 2000 -s 9000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$tmp/data.new" "$tmp/data"
}

# Sets the flags of a run into OUT: 4 * unit tokens a step, so 4 / RANKS micro-batches. Tests of faults say -d $((2 * ranks * unit)): two
# micro-batches.
set_flags() { # OUT STEPS [FLAGS]
    flags=(--recipe llmc -e d6 "${model[@]}" -d $((4 * unit)) -i "$tmp/data/*_train_*.bin" -j "$tmp/data/*_val_*.bin" -o "$1" -x "$2"
        -l 0.003 -u 2 -q 0.1 -c 0.1 -v 3 -m 2 -s 4 -g 8 -n 1 -nk 0 "${@:3}")
}

# Runs the program with N GPUs and sets `status`; its output goes to OUT.out and OUT.err.
gpus() { # N OUT STEPS [FLAGS]
    setup
    set_flags "${@:2}"
    status=0
    TMPDIR=$tmp/rescue LLMC_SAVE_SECONDS=0 timeout "$limit" env "LD_PRELOAD=$preload" "${before[@]}" "$train" --gpus "$1" \
        "${flags[@]}" >"$2.out" 2>"$2.err" </dev/null || status=$?
}
# A rank of a run that no launcher started. PORT is any number from 0 to 999, another one for each run.
rank() { # RANK OF PORT OUT STEPS [FLAGS]
    set_flags "${@:4}"
    LLMC_RANK=$1 LLMC_NUM_RANKS=$2 LLMC_LOCAL_RANK=$1 LLMC_ADDRESS=127.0.0.1 LLMC_PORT=$((21000 + ($$ + $3 * 37) % 9000)) \
        TMPDIR=${rescue-$tmp/rescue} LLMC_SAVE_SECONDS=0 timeout "$limit" env "LD_PRELOAD=$preload" "${before[@]}" "${program:-$train}" \
        "${flags[@]}" >"$4.$1.out" 2>"$4.$1.err" </dev/null
}
# Ranks that no launcher started, of which rank 1 has the environment `odd`. Sets `codes`, and `seconds` from the end of
# the first one to the end of the last.
odd_rank() { # PORT OUT STEPS [FLAGS]
    setup
    local r pids=() first
    codes=
    for ((r = ranks - 1; r >= 0; r--)); do
        ([ $r -ne 1 ] || export "${odd[@]}" && rank $r "$ranks" "$1" "$2" "$3" -d $((2 * ranks * unit)) -v 0 -s 0 "${@:4}") & pids+=($!)
    done
    wait -n || true
    first=$SECONDS
    for ((r = ranks - 1; r >= 0; r--)); do
        status=0
        wait "${pids[ranks - 1 - r]}" || status=$?
        codes=" $status$codes"
    done
    seconds=$((SECONDS - first))
    gone "$2"
}
slowly() { FAKE_CUDA_SLOW_MS=30 SHARED_CARD_SLOW_MS=30 "$@"; } # COMMAND: the steps of its runs take a while

good() { want "the exit code of $1" "$status: $(grep -aE 'error|warning|fake_' "$2.err")" "0: "; } # WHAT OUT
# failed WHAT OUT PATTERN: the program has ended with 1, has said why in a line, and which rank ended first in another
failed() {
    [ "$status" -eq 1 ] || [ "$status" -eq 137 ] || fail "$1: exit code $status: $(cat "$2.err")"
    grep -qE -- "$3" "$2.err" || fail "$1: no '$3' in: $(cat "$2.err")"
    [ "$(grep -vc '^note' "$2.err")" -le 3 ] || fail "$1: more than three lines: $(cat "$2.err")"
    [ "$(grep -c '^note' "$2.err")" -le 1 ] || fail "$1: a note of each rank: $(cat "$2.err")"
    gone "$1"
}
gone() { ! pgrep -f "^$train" >/dev/null || fail "$1: processes are left: $(pgrep -af "^$train")"; } # WHAT
# Sets pids: the process that --gpus was given to, and then the ranks that it has started, in their order.
find_processes() {
    local pid rank found=() parent=
    for pid in $(pgrep -f "^$train --gpus"); do
        rank=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^LLMC_RANK=//p') || continue
        if [ -n "$rank" ]; then found[rank]=$pid; else parent=$pid; fi
    done
    pids=("$parent" "${found[@]}")
}
losses() { sed -nE 's/.*(step +[0-9]+\/[0-9]+ \| loss [0-9.]+).*/\1/p; s/^(val loss .*)/\1/p' "$1.out"; } # OUT
newest() { ls "$1" 2>/dev/null | grep '^step_' | tail -n 1; }

# near WHAT OUT1 OUT2 LIMIT [COUNT]: at least COUNT losses, the same but for LIMIT, relatively
near() {
    paste -d ' ' <(losses "$2") <(losses "$3") | awk -v what="$1" -v limit="$4" -v count="${5-4}" '
        { n = NF / 2; x = $n; y = $NF; if (!(x > 0) || (x - y) ^ 2 > (limit * x) ^ 2) { print what ": " $0; bad = 1 } }
        END { exit bad || NR < count }' || fail "$1: other losses: $(losses "$2"; losses "$3")"
}

# same OUT1 OUT2 STEP: the same weights and moments, bit for bit
same() {
    local name
    name=$(printf 'step_%08d' "$3")
    same_checkpoint "$1/$name" "$2/$name"
    [ -z "$(ls -A "$1" | grep '^\.')" ] || fail "hidden directories are left: $(ls -A "$1")"
}

# await_step OUT.out N: until the run has printed step N
await_step() {
    local i
    for ((i = 0; i < 20 * limit; i++)); do
        grep -q "^step *$2/" "$1" 2>/dev/null && return
        sleep 0.05
    done
    fail "no step $2: $(cat "${1%out}err")"
}

# await_missed OUT: until the others have said that they miss a rank. Not a fixed time: a machine that pauses for seconds looks to
# the ranks as if they had been stopped (Ctrl-Z), which does not count.
await_missed() {
    local i
    for ((i = 0; i < 20 * limit; i++)); do
        grep -qE 'no answer for [0-9.]+ s from rank [0-9]|has not ended after 2 s' "$1.err" && return
        sleep 0.05
    done
    fail "nobody misses the stopped rank: $(cat "$1.err")"
}

# ---- correct runs -----------------------------------------------------------------------

# The questions of HellaSwag are divided among the ranks.
test_hellaswag() {
    setup
    local i
    for i in 1 2 3 4 5 6 7; do
        printf '{"ind": %d, "ctx": "number %d is", "label": %d, "endings": ["a", "b b", "c", "dd"]}\n' $i $i $((i % 4))
    done >"$tmp/questions.jsonl"
    "$BIN_DIR/dev/data/hellaswag" -i "$tmp/questions.jsonl" -t "$tmp/data" -o "$tmp/questions.bin" >"$tmp/log" 2>&1 ||
        skip "dev/data/hellaswag: $(cat "$tmp/log")"
    gpus 1 "$tmp/ask1" 1 -b 4 --hellaswag "$tmp/questions.bin"
    good "one GPU" "$tmp/ask1"
    gpus 2 "$tmp/ask2" 1 -b 4 --hellaswag "$tmp/questions.bin"
    good "two GPUs" "$tmp/ask2"
    want "the score" "$(sed -n 's/^HellaSwag: \(.*\) (.*/\1/p' "$tmp/ask2.out" | head -n 1)" \
        "$(sed -n 's/^HellaSwag: \(.*\) (.*/\1/p' "$tmp/ask1.out" | head -n 1)"
}

# ---- refusals -----------------------------------------------------------------------------

# Ranks that do not belong together.
test_strangers() {
    setup
    local out=$tmp/strangers
    rank 1 2 1 "$out" 2 -l 0.1 & # another flag
    rank 0 2 1 "$out" 2 && fail "other flags were accepted"
    wait
    grep -q 'learning-rate' "$out.0.err" "$out.1.err" || fail "the flag is not named: $(cat "$out".?.err)"
    { cat "$train" && echo; } >"$tmp/bin/other" && chmod +x "$tmp/bin/other"
    program=$tmp/bin/other rank 1 2 2 "$out" 2 &
    rank 0 2 2 "$out" 2 && fail "another program was accepted"
    wait
    grep -qi 'another program\|binary\|build' "$out.0.err" || fail "the program is not named: $(cat "$out".?.err)"
    rank 1 3 3 "$out" 2 & # another number of ranks
    rank 0 2 3 "$out" 2 && fail "another number of ranks was accepted"
    wait
    grep -q '3' "$out.0.err" || fail "the number is not named: $(cat "$out".?.err)"
    gone "strangers"
}

# ---- ends -----------------------------------------------------------------------------------

# disturbed OUT STEPS COMMAND [FLAGS]: runs COMMAND, with the processes in pids (0: the parent), when three steps are done
disturbed() {
    local out=$1 steps=$2 command=$3 pids
    setup
    rm -rf "$out" "$out".*
    slowly gpus "$ranks" "$out" "$steps" -d $((2 * ranks * unit)) -v 0 -s 0 "${@:4}" &
    await_step "$out.out" 3
    find_processes
    [ ${#pids[@]} -eq $((ranks + 1)) ] || fail "no $ranks ranks run: $(cat "$out.err")"
    eval "$command"
    wait $! || true
    wait
}

# A signal to one rank, or to the parent, ends all at the same micro-batch; the run goes on as if nothing had happened.
test_signals() {
    local out=$tmp/signal victim
    setup
    gpus "$ranks" "$tmp/calm" 12 -d $((2 * ranks * unit)) -v 0 -s 0 -n 0
    good "the undisturbed run" "$tmp/calm"
    for victim in 0 1 "$ranks"; do
        disturbed "$out" 12 "kill -TERM \${pids[$victim]}" -n 0
        contains "stopped after step" "$out.out"
        [ -n "$(newest "$out")" ] || fail "nothing saved: $(cat "$out.err")"
        gone "a signal"
        gpus "$ranks" "$out" 12 -d $((2 * ranks * unit)) -v 0 -s 0 -n 0 -y 1
        good "resuming" "$out"
        same "$out" "$tmp/calm" 12
    done
    # Ctrl-Z, and fg after longer than --timeout
    disturbed "$out" 12 'kill -TSTP ${pids[0]}; sleep 5; kill -CONT ${pids[0]}' -n 0 --timeout 3
    want "what a stopped run says" "$(grep -v '^note' "$out.err")" ""
    same "$out" "$tmp/calm" 12
}

# A rank that dies or hangs ends all others, by name; with --restarts the run ends as if nothing had happened.
test_faults() {
    local out=$tmp/fault start
    setup
    disturbed "$out" 100 'start=$SECONDS; kill -KILL ${pids[2]}' -n 0
    contains "was ended by signal 9" "$out.err"
    contains "has ended" "$out.err"
    [ $((SECONDS - start)) -lt 30 ] || fail "took $((SECONDS - start)) s"
    echo "note: one of $ranks ranks is killed: all have ended after $((SECONDS - start)) s"
    gone "a killed rank"
    disturbed "$out" 100 'kill -STOP ${pids[2]}; await_missed "$out"; kill -CONT ${pids[2]}' -n 0 --timeout 2
    gone "a stopped rank"
    gpus "$ranks" "$tmp/still" 12 -d $((2 * ranks * unit)) -v 0 -s 0 -n 2
    disturbed "$out" 12 'kill -KILL ${pids[-1]}' -n 2 --restarts 2
    contains "starting all ranks again: restart 1 of 2" "$out.err"
    same "$out" "$tmp/still" 12
}

# The GPU of one rank fails, or the rank is killed while it writes a checkpoint: all end, and the checkpoints that are there are
# whole. What the GPU computes after a failure is not saved.
test_one_rank_fails() {
    local out=$tmp/one_fails at port=10
    setup
    gpus "$ranks" "$tmp/healthy" 12 -d $((2 * ranks * unit)) -v 0 -s 0 -n 2
    good "the undisturbed run" "$tmp/healthy"
    odd=("${broken_card[@]}")
    for at in card 3 20; do
        [ $at = card ] || odd=("preload=$preload:$tmp/bin/failing_write.so" "FAIL_DIR=$out" "FAIL_AT=$at" FAIL_MODE=kill)
        rm -rf "$out"
        port=$((port + 1))
        odd_rank $port "$out" 12 -n 2
        case $codes in
        "$all_failed") grep -qE '^error: rank 1: .*(cuda|launch failure)' "$out.1.err" || fail "$at: $(cat "$out".?.err)" ;;
        "${all_failed/1 1/1 137}") cat "$out".?.err | grep -qE 'rank 1 \(host .*\) has ended' || fail "$at: $(cat "$out".?.err)" ;;
        *) fail "$at: exit codes$codes: $(cat "$out".?.err)" ;;
        esac
        [ $seconds -lt 20 ] || fail "$at: the last rank ended $seconds s after the first"
        echo "note: rank 1 fails ($at): all have ended after $seconds s; saved: $(newest "$out")"
        gpus "$ranks" "$out" 12 -d $((2 * ranks * unit)) -v 0 -s 0 -n 2 -y 1
        good "resuming" "$out"
        ! grep 'passed over' "$out.out" || fail "$at: a checkpoint is damaged"
        same "$out" "$tmp/healthy" 12
    done
}

# The disk is full for one rank alone: the run goes on, without checkpoints, and all ranks save the last one elsewhere.
test_one_disk_is_full() {
    local out=$tmp/one_full saved
    setup
    odd=("preload=$preload:$tmp/bin/failing_write.so" "FAIL_DIR=$out" FAIL_AT=3 FAIL_MODE=from rescue=) # it has no TMPDIR
    odd_rank 20 "$out" 6 -n 2
    want "exit codes" "$codes" "$all_failed"
    contains "warning: rank 1: " "$out.1.err"
    contains "No space left on device" "$out.1.err"
    contains "the run goes on" "$out.0.err"
    grep -q '^error: rank 0: the checkpoint of step 6 was not saved to -o: .*; it was saved as .*/step_00000006: move' "$out.0.err" || fail "$(cat "$out".?.err)"
    saved=$(ls -d "$tmp"/rescue/*/step_00000006)
    "$BIN_DIR/train_gpt2" -e "$saved" --eval "$tmp/data/*_val_*.bin" -b 2 >"$tmp/log" 2>&1 || fail "$(cat "$tmp/log")"
    rm -r "$tmp"/rescue/*
}

# A rank is killed while the ranks meet, open their GPUs, or connect them.
test_killed_at_the_start() {
    local out=$tmp/start i n run pids seconds=(00 10 40)
    [ -z "${LLMC_TEST_FULL-}" ] || seconds=(00 05 10 20 40 80)
    setup
    for i in "${seconds[@]}"; do
        rm -rf "$out" "$out".*
        slowly gpus "$ranks" "$out" 200 -d $((2 * ranks * unit)) -v 0 -s 0 -n 0 & run=$!
        for ((n = 0; n < 1000; n++)); do
            find_processes
            [ ${#pids[@]} -ne $((ranks + 1)) ] || break
            sleep 0.01
        done
        sleep "0.$i"
        kill -KILL "${pids[1 + n % ranks]}"
        n=$SECONDS
        wait $run || true
        contains "was ended by signal 9" "$out.err"
        [ $((SECONDS - n)) -lt 30 ] || fail "killed after 0.$i s: the last rank ended $((SECONDS - n)) s later"
        gone "a rank that was killed after 0.$i s"
    done
}

# A rank is killed again and again; the run ends with the weights of an undisturbed one.
test_random_kills() {
    [ -n "$kills" ] || skip "takes a minute or two: make test-full, or LLMC_KILLS=20"
    local out=$tmp/kills i run pids lines=0 steps=$((20 * kills + 20)) limit=$((limit + 30 * kills))
    setup
    gpus 2 "$out.calm" $steps -v 0 -s 0 -n 2
    good "the undisturbed run" "$out.calm"
    slowly gpus 2 "$out" $steps -v 0 -s 0 -n 2 --restarts "$kills" & run=$!
    for ((i = 0; i < kills; i++)); do
        until [ "$(grep -cs '^step ' "$out.out")" -ge $((lines + 3)) ]; do
            kill -0 $run || fail "only $i kills: $(cat "$out.err")"
            sleep 0.05
        done
        sleep 0.$((RANDOM % 4))$((RANDOM % 10))
        lines=$(grep -c '^step ' "$out.out")
        find_processes
        [ ${#pids[@]} -eq 1 ] || kill -KILL "${pids[1 + RANDOM % (${#pids[@]} - 1)]}" || true
    done
    wait $run || true
    want "the restarts" "$(grep -c 'starting all ranks again' "$out.err")" "$kills"
    same "$out" "$out.calm" $steps
}

# A shard that is damaged for all, while the run goes on: what was computed is saved.
test_data_goes() {
    local out=$tmp/goes i
    setup
    mkdir -p "$tmp/shards"
    cp "$tmp"/data/* "$tmp/shards/"
    slowly gpus 2 "$out" 2000 -n 0 -v 0 -s 0 -i "$tmp/shards/*_train_*.bin" &
    await_step "$out.out" 3
    for i in "$tmp"/shards/*_train_*.bin; do printf 'xxxx' | dd of="$i" conv=notrunc status=none; done
    wait
    grep -q 'are saved: resume with -y 1' "$out.err" || fail "$(cat "$out.err")"
    [ -n "$(newest "$out")" ] || fail "nothing saved"
    gone "data that goes"
}

# A shard that is damaged for one rank alone: one line names the rank and the shard, and what was computed is saved.
test_data_of_one_rank_goes() {
    local out=$tmp/one_goes i place
    setup
    mkdir "$tmp/here" "$tmp/there"
    cp -r "$tmp/data" "$tmp/here/" && cp -r "$tmp/data" "$tmp/there/"
    for ((i = ranks - 1; i >= 0; i--)); do
        place=$([ $i -eq 1 ] && echo there || echo here)
        (cd "$tmp/$place" && slowly rank $i "$ranks" 30 "$out" 2000 -d $((2 * ranks * unit)) -v 0 -s 0 -n 0 -i 'data/*_train_*.bin') &
    done
    await_step "$out.0.out" 3
    for i in "$tmp"/there/data/*_train_*.bin; do printf 'xxxx' | dd of="$i" conv=notrunc status=none; done
    wait
    grep -q '^error: rank 1: .*data/a_train_.*are saved: resume with -y 1' "$out.1.err" || fail "$(cat "$out".?.err)"
    want "the lines of error" "$(cat "$out".?.err | grep -c '^error')" 1
    [ -n "$(newest "$out")" ] || fail "nothing saved"
    gone "data of one rank that goes"
}

# The output directory is gone: all ranks save to the place that rank 0 chooses.
test_output_goes() {
    local out=$tmp/vanishes saved
    setup
    disturbed "$out" 60 'mv "$out" "$out.away"; : >"$out"' -n 0
    grep -q '^error: rank 0: the checkpoint of step 60 was not saved to -o: .* it was saved as .*/step_00000060: move' "$out.err" || fail "$(cat "$out.err")"
    saved=$(ls -d "$tmp"/rescue/*/step_00000060)
    "$BIN_DIR/train_gpt2" -e "$saved" --eval "$tmp/data/*_val_*.bin" -b 2 >"$tmp/log" 2>&1 || fail "$(cat "$tmp/log")"
    gone "an output directory that vanishes"
}

# Without a launcher that says so, the other ranks name rank 0 when it has died.
test_rank0_dies() {
    local out=$tmp/headless i pids
    setup
    for ((i = ranks - 1; i >= 0; i--)); do slowly rank $i "$ranks" 4 "$out" 100 -d $((2 * ranks * unit)) -v 0 -s 0 -n 0 & done
    await_step "$out.0.out" 3
    mapfile -t pids < <(pgrep -f "^$train ") # not those of another run on this machine
    for i in "${pids[@]}"; do grep -qz '^LLMC_RANK=0$' "/proc/$i/environ" && kill -KILL "$i"; done
    wait
    contains "error: rank 1: rank 0 (host " "$out.1.err"
    contains "has ended" "$out.$((ranks - 1)).err"
    gone "rank 0"
}
