#!/usr/bin/env bash
# train_gpt2cu with several ranks and no GPU: fake_cuda.c stands in for CUDA, fake_nccl.c for NCCL. Tests what the hosts do:
# starting, the collectives and their order, checkpoints, signals, faults. Needs nvcc. What the kernels compute, and how fast,
# is not tested here.
. "$(dirname "$0")/test.sh"
export PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 # the models are tiny
unset "${!FAKE_CUDA_@}" "${!FAKE_NCCL_@}" "${!LLMC_@}" "${!SLURM_@}" "${!OMPI_@}" CUDA_VISIBLE_DEVICES RANK WORLD_SIZE LOCAL_RANK
export FAKE_CUDA_DEVICES=16 LLMC_NCCL=$tmp/bin/fake_nccl.so
mkdir "$tmp/bin" "$tmp/rescue"
train=$tmp/bin/train_gpt2cu

# Builds the program and its stand-ins, and makes shards, once.
setup() {
    [ -e "$tmp/data" ] && return
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$BIN_DIR/dev/data/tokenize" ] && [ -x "$BIN_DIR/dev/data/hellaswag" ] || fail "dev/data/tokenize is not there: make all"
    nvcc -O1 -Xcompiler -fPIC -shared -cudart none dev/test/fake_cuda.c -o "$tmp/bin/fake_cuda.so" &
    nvcc -O1 -Xcompiler -fPIC -shared -cudart none dev/test/fake_nccl.c -o "$tmp/bin/fake_nccl.so"
    wait
    nvcc -O1 -std=c++17 -gencode arch=compute_80,code=compute_80 -Xcicc -O0 -Xcompiler -fopenmp -cudart none \
        train_gpt2.cu -o "$train" "$tmp/bin/fake_cuda.so" -ldl
    mkdir "$tmp/data.new"
    head -c 20000 llmc/training.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 2000 -s 9000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$tmp/data.new" "$tmp/data"
}

# Sets the flags of a run into OUT: two layers of 32 channels; 128 tokens a step, so 4 / RANKS micro-batches with -b 2 -t 16.
set_flags() { # OUT STEPS [FLAGS]
    flags=(-e d6 --layers 2 --channels 32 --heads 2 --positions 16 -b 2 -t 16 -d 128 -i "$tmp/data/*_train_*.bin"
        -j "$tmp/data/*_val_*.bin" -o "$1" -x "$2" -l 0.003 -u 2 -q 0.1 -c 0.1 -v 3 -m 2 -s 4 -g 8 -n 1 -nk 0 "${@:3}")
}

# Runs the program with N GPUs and sets `status`; its output goes to OUT.out and OUT.err. N by hand: starts the ranks itself.
gpus() { # N OUT STEPS [FLAGS]
    setup
    set_flags "${@:2}"
    status=0
    TMPDIR=$tmp/rescue LLMC_SAVE_SECONDS=0 timeout 100 "$train" --gpus "$1" "${flags[@]}" >"$2.out" 2>"$2.err" </dev/null || status=$?
}
# A rank of a run that no launcher started. PORT is any number from 0 to 999, another one for each run.
rank() { # RANK OF PORT OUT STEPS [FLAGS]
    set_flags "${@:4}"
    LLMC_RANK=$1 LLMC_NUM_RANKS=$2 LLMC_LOCAL_RANK=$1 LLMC_ADDRESS=127.0.0.1 LLMC_PORT=$((21000 + ($$ + $3 * 37) % 9000)) \
        LLMC_SAVE_SECONDS=0 timeout 60 "${program:-$train}" "${flags[@]}" >"$4.$1.out" 2>"$4.$1.err" </dev/null
}

good() { want "the exit code of $1" "$status: $(grep -aE 'error|warning|fake_' "$2.err")" "0: "; } # WHAT OUT
# failed WHAT OUT PATTERN: the program has ended with 1, has said why in a line, and which rank ended first in another
failed() {
    [ "$status" -eq 1 ] || [ "$status" -eq 137 ] || fail "$1: exit code $status: $(cat "$2.err")"
    grep -qE -- "$3" "$2.err" || fail "$1: no '$3' in: $(cat "$2.err")"
    [ "$(grep -vc '^note' "$2.err")" -le 3 ] || fail "$1: more than three lines: $(cat "$2.err")"
    [ "$(grep -c '^note' "$2.err")" -le 1 ] || fail "$1: a note of each rank: $(cat "$2.err")"
    gone "$1"
}
gone() { ! pgrep -f "$train" >/dev/null || fail "$1: processes are left: $(pgrep -af "$train")"; } # WHAT
losses() { sed -nE 's/.*(step +[0-9]+\/[0-9]+ \| loss [0-9.]+).*/\1/p; s/^(val loss .*)/\1/p' "$1.out"; } # OUT
newest() { ls "$1" 2>/dev/null | grep '^step_' | tail -n 1; }

# near WHAT OUT1 OUT2: the same losses but for 0.2%: the kernels that do nothing make gradients depend on the shares
near() {
    paste -d ' ' <(losses "$2") <(losses "$3") | awk -v what="$1" '
        { n = NF / 2; x = $n; y = $NF; if (!(x > 0) || (x - y) ^ 2 > (0.002 * x) ^ 2) { print what ": " $0; bad = 1 } }
        END { exit bad || NR < 4 }' || fail "$1: other losses: $(losses "$2"; losses "$3")"
}

# same OUT1 OUT2 STEP: the same weights and moments, bit for bit
same() {
    local file name
    name=$(printf 'step_%08d' "$3")
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/$name/$file" "$2/$name/$file" || fail "$name/$file of $1 and $2 differ"
    done
    [ -z "$(ls -A "$1" | grep '^\.')" ] || fail "hidden directories are left: $(ls -A "$1")"
}

# Makes the undisturbed runs of 8 steps with 1 and with 2 GPUs, of as many sequences at a time in all.
reference() {
    setup
    [ -e "$tmp/two" ] && return
    gpus 1 "$tmp/one" 8 -b 4
    good "one GPU" "$tmp/one"
    FAKE_CUDA_COUNT=$tmp/count FAKE_NCCL_COUNT=$tmp/calls gpus 2 "$tmp/two.new" 8
    good "two GPUs" "$tmp/two.new"
    gone "two GPUs"
    mv "$tmp/two.new" "$tmp/two" && mv "$tmp/two.new.out" "$tmp/two.out"
}

# ---- correct runs -----------------------------------------------------------------------

# The losses and the validation losses are those of one GPU; the first are equal, because nothing has been updated.
test_losses() {
    reference
    want "the first loss" "$(losses "$tmp/two" | head -n 2)" "$(losses "$tmp/one" | head -n 2)"
    near "ZeRO-1" "$tmp/one" "$tmp/two"
    gpus 2 "$tmp/all" 8 -z 0
    good "-z 0" "$tmp/all"
    near "-z 0" "$tmp/one" "$tmp/all"
    gpus 4 "$tmp/four" 8 -b 1 --no-graph
    near "four GPUs" "$tmp/one" "$tmp/four"
}

# Each rank makes the same calls: of each step a reduction and a gathering of each of the 4 buckets, and one of the figures.
test_collectives() {
    reference
    local i
    for i in 0 1; do grep '^calls\|^ran' "$tmp/calls.$i" | grep -v 'UniqueId\|AsyncError' >"$tmp/made.$i"; done
    cmp "$tmp/made.0" "$tmp/made.1" || fail "the ranks make other calls: $(diff "$tmp/made.0" "$tmp/made.1")"
    want "the reductions" "$(sed -n 's/^calls ncclReduceScatter //p' "$tmp/calls.0")" 32
    # 3 arrays of 4 buckets for each of 8 checkpoints
    want "the gatherings" "$(sed -n 's/^calls ncclAllGather //p' "$tmp/calls.0")" $((8 * 5 + 8 * 12))
}

# Two runs are equal, bit for bit; so are one that was resumed, and one with other saves.
test_repeats() {
    reference
    gpus 2 "$tmp/again" 8 -n 3
    good "the second run" "$tmp/again"
    same "$tmp/again" "$tmp/two" 8
    cp -r "$tmp/two" "$tmp/part"
    rm -r "$tmp"/part/step_0000000[678]
    gpus 2 "$tmp/part" 8 -y 1 --no-async-save
    good "resuming" "$tmp/part"
    contains "resumed at step 5 " "$tmp/part.out"
    same "$tmp/part" "$tmp/two" 8
}

# A checkpoint does not know the number of GPUs.
test_other_numbers() {
    local n out=$tmp/numbers
    reference
    cp -r "$tmp/two" "$out"
    rm -r "$out"/step_0000000[5-8]
    for n in 1 4 2; do
        gpus $n "$out" $((5 + (n == 4) + 2 * (n == 2))) -y 1
        good "resuming with $n" "$out"
    done
    "$BIN_DIR/train_gpt2" -e "$out" --eval "$tmp/data/*_val_*.bin" -b 2 >"$tmp/log" 2>&1 || fail "$(cat "$tmp/log")"
    contains "perplexity" "$tmp/log"
}

# The questions of HellaSwag are divided among the ranks.
test_hellaswag() {
    reference
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

test_refusals() {
    setup
    gpus 17 "$tmp/no" 1
    failed "too many GPUs" "$tmp/no" '^error: --gpus 17: there are only 16 GPUs here'
    gpus 3 "$tmp/no" 1
    failed "-d" "$tmp/no" '^error: rank 0: -d 128 is not a multiple of -b 2 times -t 16 times 3 ranks = 96 tokens$'
    LLMC_NCCL=/nonexistent.so gpus 2 "$tmp/no" 1
    failed "no NCCL" "$tmp/no" '^error: NCCL, which several GPUs need: .*/nonexistent.so.*; install it with apt-get install libnccl2'
    want "the lines" "$(wc -l <"$tmp/no.err")" 1
    FAKE_NCCL_VERSION=21700 gpus 2 "$tmp/no" 1
    failed "an old NCCL" "$tmp/no" 'NCCL 2.17.0 is too old'
    mkdir "$tmp/model" && cp -r "$tmp/data" "$tmp/model/step_00000001"
    gpus 2 "$tmp/model" 1
    failed "an output directory that is in use" "$tmp/model" '^error: rank 0: '
}

# Ranks that do not belong together.
test_strangers() {
    setup
    local out=$tmp/strangers code
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
    local out=$1 steps=$2 command=$3 i pids
    setup
    rm -rf "$out" "$out".*
    FAKE_CUDA_SLOW_MS=30 gpus 3 "$out" "$steps" -d 192 -v 0 -s 0 "${@:4}" &
    for ((i = 0; i < 400; i++)); do
        grep -q '^step *3/' "$out.out" 2>/dev/null && break
        sleep 0.05
    done
    mapfile -t pids < <(pgrep -f "$train --gpus" | sort -n | tail -n 4) # timeout(1) may be before them
    [ ${#pids[@]} -ge 4 ] || fail "no three ranks run: $(cat "$out.err")"
    eval "$command"
    wait $! || true
    wait
}

# A signal to one rank, or to the parent, ends all at the same micro-batch; the run goes on as if nothing had happened.
test_signals() {
    local out=$tmp/signal
    setup
    gpus 3 "$tmp/calm" 12 -d 192 -v 0 -s 0 -n 0
    good "the undisturbed run" "$tmp/calm"
    for victim in 0 1 3; do
        disturbed "$out" 12 "kill -TERM \${pids[$victim]}" -n 0
        contains "stopped after step" "$out.out"
        [ -n "$(newest "$out")" ] || fail "nothing saved: $(cat "$out.err")"
        gone "a signal"
        gpus 3 "$out" 12 -d 192 -v 0 -s 0 -n 0 -y 1
        good "resuming" "$out"
        same "$out" "$tmp/calm" 12
    done
}

# A rank that dies or hangs ends all others, by name; with --restarts the run ends as if nothing had happened.
test_faults() {
    local out=$tmp/fault start
    setup
    start=$SECONDS
    disturbed "$out" 100 'kill -KILL ${pids[2]}' -n 0
    contains "was ended by signal 9" "$out.err"
    contains "has ended" "$out.err"
    [ $((SECONDS - start)) -lt 30 ] || fail "took $((SECONDS - start)) s"
    gone "a killed rank"
    disturbed "$out" 100 'kill -STOP ${pids[2]}; sleep 6; kill -CONT ${pids[2]}' -n 0 --timeout 2
    grep -qE 'no answer for [0-9.]+ s from rank [0-9]|has not ended after 2 s' "$out.err" || fail "$(cat "$out.err")"
    gone "a stopped rank"
    gpus 3 "$tmp/still" 12 -d 192 -v 0 -s 0 -n 2
    disturbed "$out" 12 'kill -KILL ${pids[3]}' -n 2 --restarts 2
    contains "starting all ranks again: restart 1 of 2" "$out.err"
    same "$out" "$tmp/still" 12
}

# Errors of NCCL.
test_nccl_errors() {
    local out=$tmp/nccl
    setup
    FAKE_NCCL_FAIL=ncclReduceScatter:6:3 FAKE_NCCL_RANK=1 gpus 2 "$out" 6
    failed "a collective that fails" "$out" '^error: rank 1: NCCL: reduce_scatter of [0-9]+ bytes, rank 1 of 2: '
    rm -rf "$out"
    FAKE_NCCL_ASYNC=20 FAKE_NCCL_RANK=1 gpus 2 "$out" 6
    failed "an error in the background" "$out" '^error: rank 1: NCCL: '
    rm -rf "$out"
    FAKE_NCCL_HANG=ncclAllGather:12 FAKE_NCCL_RANK=0 gpus 2 "$out" 6 --timeout 2 -n 0
    failed "a collective that hangs" "$out" 'step [0-9]+ has not ended after 2 s|no answer for'
    rm -rf "$out"
    FAKE_NCCL_FAIL=ncclCommInitRankConfig:1:2 gpus 2 "$out" 6
    failed "a communicator that cannot be opened" "$out" 'NCCL: connecting rank [01] with 1 others: '
}

# A shard that is damaged for all, while the run goes on: what was computed is saved.
test_data_goes() {
    local out=$tmp/goes
    setup
    mkdir -p "$tmp/shards"
    cp "$tmp"/data/* "$tmp/shards/"
    FAKE_CUDA_SLOW_MS=20 gpus 2 "$out" 2000 -n 0 -v 0 -s 0 -i "$tmp/shards/*_train_*.bin" &
    local i
    for ((i = 0; i < 400; i++)); do
        grep -q '^step *3/' "$out.out" 2>/dev/null && break
        sleep 0.05
    done
    for i in "$tmp"/shards/*_train_*.bin; do printf 'xxxx' | dd of="$i" conv=notrunc status=none; done
    wait
    grep -q 'are saved: resume with -y 1' "$out.err" || fail "$(cat "$out.err")"
    [ -n "$(newest "$out")" ] || fail "nothing saved"
    gone "data that goes"
}

# The output directory is gone: all ranks save to the place that rank 0 chooses.
test_output_goes() {
    local out=$tmp/vanishes saved
    setup
    disturbed "$out" 60 'mv "$out" "$out.away"; : >"$out"' -n 0
    grep -q '^error: rank 0: the checkpoint of step 60 was not saved to -o: .* it is in .*train_gpt2_rescue_' "$out.err" || fail "$(cat "$out.err")"
    saved=$(ls -d "$tmp"/rescue/*/step_00000060)
    "$BIN_DIR/train_gpt2" -e "$saved" --eval "$tmp/data/*_val_*.bin" -b 2 >"$tmp/log" 2>&1 || fail "$(cat "$tmp/log")"
    gone "an output directory that vanishes"
}

# Whatever a rank waits for when a collective hangs, --timeout ends it.
test_hangs() {
    local flags out=$tmp/hangs
    setup
    for flags in "-sl 5" "-d 256" "-n 1 --no-async-save"; do
        rm -rf "$out"
        # shellcheck disable=SC2086
        FAKE_NCCL_HANG=ncclReduceScatter:20 gpus 2 "$out" 20 -v 0 -s 0 --timeout 2 $flags
        failed "$flags" "$out" 'has not ended after 2 s|no answer for'
    done
}

# Without a launcher that says so, the other ranks name rank 0 when it has died.
test_rank0_dies() {
    local out=$tmp/headless i pids
    setup
    for i in 2 1 0; do FAKE_CUDA_SLOW_MS=30 rank $i 3 4 "$out" 100 -d 192 -v 0 -s 0 -n 0 & done
    for ((i = 0; i < 400; i++)); do
        grep -q '^step *3/' "$out.0.out" 2>/dev/null && break
        sleep 0.05
    done
    mapfile -t pids < <(pgrep -x train_gpt2cu)
    for i in "${pids[@]}"; do grep -qz '^LLMC_RANK=0$' "/proc/$i/environ" && kill -KILL "$i"; done
    wait
    contains "error: rank 1: rank 0 (host " "$out.1.err"
    contains "has ended" "$out.2.err"
    gone "rank 0"
}

tests=(losses collectives repeats other_numbers hellaswag refusals strangers signals faults nccl_errors data_goes output_goes hangs
    rank0_dies)
run_tests_once "$@"
