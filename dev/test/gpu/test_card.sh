#!/usr/bin/env bash
# train_gpt2cu on a real GPU that is full, shared, or fails in the middle of a run. Needs nvcc, and a GPU for itself: while
# a failed kernel is cleaned up, other programs may not find the GPU. What a GPU does not do on demand, at every single
# call, test_fake_gpu.sh tests with a stand-in for CUDA.
# shellcheck disable=SC2086 # numbers and names of signals are one word
. "$(dirname "$0")/../test.sh"
export PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 # the models are tiny
unset "${!FAILING_CARD@}" CUDA_VISIBLE_DEVICES
mkdir "$tmp/bin" "$tmp/rescue"
train=$tmp/bin/train_gpt2cu
other=$tmp/bin/train_gpt2cu_fp32
traps=$([ -z "${LLMC_TEST_FULL-}" ] && echo 12 || echo 60) # launches of a kernel that fail

# Builds the programs and makes shards, once. The CUDA runtime is shared, so that failing_card.so can stand before it.
setup() {
    [ -e "$tmp/data" ] && return
    nvidia-smi -L >/dev/null 2>&1 || skip "needs a GPU"
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "dev/data/tokenize is not there: make all"
    local arch pids=() pid
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    [ "$arch" != 90 ] || arch=90a
    local flags=(-O1 -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch" -cudart shared)
    nvcc "${flags[@]}" -Xcompiler -fopenmp train_gpt2.cu -o "$train" -lcublasLt -ldl >"$tmp/log1" 2>&1 & pids+=($!)
    nvcc "${flags[@]}" -Xcompiler -fopenmp -DENABLE_FP32 train_gpt2.cu -o "$other" -lcublasLt -ldl >"$tmp/log2" 2>&1 & pids+=($!)
    nvcc "${flags[@]}" -shared -Xcompiler -fPIC dev/test/stand-ins/failing_card.cu -o "$tmp/bin/failing_card.so" -ldl >"$tmp/log3" 2>&1 & pids+=($!)
    nvcc "${flags[@]}" dev/test/stand-ins/fill_card.cu -o "$tmp/bin/fill_card" >"$tmp/log4" 2>&1 & pids+=($!)
    for pid in "${pids[@]}"; do wait "$pid" || { cat "$tmp"/log? && fail "does not compile"; }; done
    mkdir "$tmp/data.new"
    head -c 10000 llmc/gpt2.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 1000 -s 5000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$tmp/data.new" "$tmp/data"
}

# Sets the flags of a run into OUT: two layers of 128 channels, 2 micro-batches a step, a checkpoint after each step.
set_flags() { # OUT STEPS [FLAGS]
    flags=(--recipe llmc -e d6 --layers 2 --channels 128 --heads 2 --positions 64 -b 2 -t 64 -d 256 -i "$tmp/data/*_train_*.bin"
        -j "$tmp/data/*_val_*.bin" -o "$1" -x "$2" -l 0.003 -u 2 -q 0.1 -c 0.1 -v 3 -m 2 -s 2 -g 8 -n 1 -nk 0 --no-tune "${@:3}")
}

# Runs the program and sets `status`; its output goes to LOG.out and LOG.err. An assignment before it reaches the program.
program() { # LOG FLAGS
    status=0
    TMPDIR=$tmp/rescue LLMC_SAVE_SECONDS=0 timeout 100 "${program:-$train}" "${@:2}" >"$1.out" 2>"$1.err" </dev/null || status=$?
}
train() { # OUT STEPS [FLAGS]
    set_flags "$@"
    program "$1" "${flags[@]}"
}
# the same with failing_card.so
failing() { # EVENT OUT STEPS [FLAGS]
    set_flags "${@:2}"
    status=0
    TMPDIR=$tmp/rescue LLMC_SAVE_SECONDS=0 FAILING_CARD=$1 FAILING_CARD_COUNT=$2.count LD_PRELOAD=$tmp/bin/failing_card.so \
        timeout 100 "$train" "${flags[@]}" >"$2.out" 2>"$2.err" </dev/null || status=$?
}
calls() { sed -n "s/^$1 //p" "$2.count"; } # launches|allocations LOG

# good WHAT LOG: the program has succeeded, without an error or a warning
good() { want "the exit code of $1" "$status: $(grep -aE 'error|warning' "$2.err")" "0: "; }

# refused WHAT LOG PATTERN...: the program has ended with one line of error that matches the patterns
refused() {
    local pattern
    [ "$status" -eq 1 ] || fail "$1: exit code $status, want 1: $(cat "$2.err")"
    want "$1: lines of error" "$(grep -c '^error: ' "$2.err"): $(tail -n 1 "$2.err")" "1: $(grep '^error: ' "$2.err")"
    for pattern in "${@:3}"; do grep -qE -- "$pattern" "$2.err" || fail "$1: no '$pattern' in: $(cat "$2.err")"; done
}

losses() { sed -E '/"type":"text"/d; s/"(time_ms|tokens_per_second)":[^,}]*//g' "$1/log.jsonl"; }

# Makes the uninterrupted run of 6 steps.
reference() {
    setup
    [ -e "$tmp/reference" ] && return
    failing none "$tmp/reference.new" 6
    good "the run" "$tmp/reference.new"
    mv "$tmp/reference.new.count" "$tmp/reference.count"
    mv "$tmp/reference.new" "$tmp/reference"
}
# same OUT: its losses, its last weights and moments are those of the reference. Samples may have been left out.
same() {
    same_checkpoint "$1/step_00000006" "$tmp/reference/step_00000006"
    want "the log without times" "$(losses "$1")" "$(losses "$tmp/reference")"
}

# ---- memory -----------------------------------------------------------------------------

# Another process has taken all but some memory. The program needs it or not; if it does, one line says so, and nothing is
# written to -o. When the other process has ended, it runs.
fill() { # MB: sets `filler`, to be ended by empty
    rm -f "$tmp/hold"
    mkfifo "$tmp/hold"
    "$tmp/bin/fill_card" "$1" <"$tmp/hold" >"$tmp/filled" & filler=$!
    exec 7>"$tmp/hold"
    until grep -q filled "$tmp/filled"; do kill -0 $filler && sleep 0.05; done
}
empty() {
    exec 7>&-
    wait $filler
}
test_filled_by_another_process() {
    reference
    local mb refusals=0 runs=0 filler out=$tmp/full full='out of memory|no GPU memory|the (run|model) needs [0-9.]+ GB and .* has [0-9.]+ free'
    for mb in 0 200 500 700 900 1500 4000; do
        fill $mb
        train "$out" 6
        cat "$tmp/filled"
        case $status in
        0) good "$mb MB" "$out" && same "$out" && runs=$((runs + 1)) ;;
        *)
            refused "$mb MB" "$out" "$full" 'end other programs on this GPU'
            [ ! -e "$out" ] || fail "$mb MB: has written to -o"
            refusals=$((refusals + 1))
            ;;
        esac
        rm -rf "$out"
        program "$tmp/prompt" -e "$tmp/reference" --prompt 'int ' --num-tokens 5
        [ $status -eq 0 ] || refused "a prompt with $mb MB" "$tmp/prompt" "$full" 'end other programs on this GPU'
        program "$tmp/large" --recipe llmc -e d36 -b 4 -t 1024 -d 4096 -i "$tmp/data/*_train_*.bin" -o "$out" -x 1
        refused "774M with $mb MB" "$tmp/large" "$full" 'end other programs on this GPU'
        [ ! -e "$out" ] || fail "$mb MB: 774M has written to -o"
        empty
    done
    [ $refusals -gt 0 ] && [ $runs -gt 0 ] || fail "$refusals refused, $runs run"
    train "$out" 6
    good "afterwards" "$out"
    same "$out"
}

# A process that fills the card beside a run that has all of its memory does not disturb it; at most samples are left out.
test_filled_beside_a_run() {
    reference
    local out=$tmp/beside pid code filler mb samples
    set_flags "$out" 400 -v 50 -n 100
    program "$out" "${flags[@]}"
    good "the run alone" "$out"
    samples=$(grep -c '"type":"text"' "$out/log.jsonl")
    mv "$out" "$tmp/alone"
    for mb in 0 4 30; do
        code=0
        set_flags "$out" 400 -v 50 -n 100
        "$train" "${flags[@]}" >"$out.out" 2>"$out.err" </dev/null & pid=$!
        until grep -q '^step  *[1-9][0-9]*/' "$out.out"; do kill -0 $pid && sleep 0.02; done
        kill -STOP $pid
        fill $mb
        kill -CONT $pid
        wait $pid || code=$?
        empty
        want "with $mb MB: exit code" "$code $(cat "$out.err")" "0 "
        cmp "$out/step_00000400/model.safetensors" "$tmp/alone/step_00000400/model.safetensors"
        want "with $mb MB: the log without times" "$(losses "$out")" "$(losses "$tmp/alone")"
        echo "$mb MB: $(grep -c '"type":"text"' "$out/log.jsonl") samples of $samples"
        rm -r "$out"
    done
}

# Each allocation fails once. Either the run does without it, or one line says what is missing and what to do.
test_each_allocation() {
    reference
    local at total ended=0
    total=$(calls allocations "$tmp/reference")
    [ "$total" -gt 5 ] || fail "only $total allocations"
    for ((at = 1; at <= total; at++)); do
        (
            failing malloc:$at "$tmp/oom_$at" 6
            [ "$(calls allocations "$tmp/oom_$at")" -ge $at ] || fail "there was no allocation $at"
            if [ $status -eq 0 ]; then good "allocation $at" "$tmp/oom_$at" && same "$tmp/oom_$at" && exit; fi
            refused "allocation $at" "$tmp/oom_$at" 'no GPU memory for ' '[0-9.]+ GB'
            [ ! -e "$tmp/oom_$at/log.jsonl" ] || fail "allocation $at: has begun to write to -o"
            : >"$tmp/oom_$at.ended"
        ) >"$tmp/oom_$at.log" 2>&1 && rm "$tmp/oom_$at.log" &
        [ $((at % 6)) -ne 0 ] || wait
    done
    wait
    ! cat "$tmp"/oom_*.log 2>/dev/null || fail "see above"
    ended=$(ls "$tmp"/oom_*.ended | wc -l)
    [ "$ended" -ge 3 ] || fail "only $ended of $total allocations end it"
}

# ---- failures ---------------------------------------------------------------------------

# The N-th launch fails, and with it everything after it. The program ends with one line of error, does not hang, and its
# checkpoints are whole: it is resumed to the same end.
trapped() { # N
    local out=$tmp/trap_$1
    failing launch:$1 "$out" 6
    refused "launch $1" "$out" 'unspecified launch failure|CUBLAS_STATUS'
    [ -z "$(ls -A "$out" 2>/dev/null | grep '^\.')" ] || fail "launch $1 leaves hidden directories: $(ls -A "$out")"
    train "$out" 6 -y 1
    good "resuming after launch $1" "$out"
    ! grep 'passed over' "$out.out" || fail "launch $1: a checkpoint is damaged"
    same "$out"
}
test_a_kernel_fails() {
    reference
    local total i
    total=$(calls launches "$tmp/reference")
    [ "$total" -gt 200 ] || fail "only $total launches"
    for ((i = 0; i < traps; i++)); do trapped $((1 + i * (total - 1) / (traps - 1))); done
}

# ---- two runs, no card, another precision -----------------------------------------------

# Runs that share a card have the results that each has alone.
test_several_on_one_card() {
    reference
    local i pids=() pid
    for i in 1 2 3 4; do
        (train "$tmp/several_$i" 6; good "run $i" "$tmp/several_$i"; same "$tmp/several_$i") >"$tmp/several_$i.log" 2>&1 & pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || { cat "$tmp"/several_*.log && fail "see above"; }; done
}

test_no_card() {
    setup
    local visible task
    for visible in '' -1 99; do
        for task in "-e d6 --prompt x" "-i none.bin -o $tmp/none" "-e d6 --eval x" "-e d6 --bench"; do
            # shellcheck disable=SC2086
            CUDA_VISIBLE_DEVICES=$visible program "$tmp/nocard" $task
            refused "CUDA_VISIBLE_DEVICES=$visible, $task" "$tmp/nocard" 'no usable GPU: no CUDA-capable device is detected; ./train_gpt2'
        done
    done
    [ ! -e "$tmp/none" ] || fail "has written to -o"
}

# A checkpoint does not depend on the precision of the program that wrote it: the other one samples from it and goes on.
test_another_precision() {
    reference
    local out=$tmp/precision loss wanted
    cp -r "$tmp/reference" "$out"
    rm -r "$out/step_00000005" "$out/step_00000006"
    program=$other train "$out" 6 -y 1
    good "fp32 after bf16" "$out"
    contains "resumed at step 4 " "$out.out"
    loss=$(grep '"type":"train"' "$out/log.jsonl" | tail -n 1 | sed -E 's/.*"loss":([^,]*),.*/\1/')
    wanted=$(grep '"type":"train"' "$tmp/reference/log.jsonl" | tail -n 1 | sed -E 's/.*"loss":([^,]*),.*/\1/')
    awk -v a="$loss" -v b="$wanted" 'BEGIN { exit !(a > 0 && a != b && a - b < 0.05 && b - a < 0.05) }' || fail "loss $loss after $wanted"
    program "$tmp/precision2" -e "$out" --prompt 'int ' --num-tokens 5
    good "a sample in bf16 of fp32" "$tmp/precision2"
    train "$out" 8 -y 1
    good "bf16 after fp32" "$out"
    contains "resumed at step 6 " "$out.out"
}

# Ctrl-C and SIGKILL at random moments of 124M, in a step, in the capture of its graph, in a save; the memory of the card is
# free again at once.
test_ended_at_random() {
    setup
    local i signal out=$tmp/ended pid code steps
    for i in 1 2 3 4 5 6 7 8; do
        rm -rf "$out"
        signal=$([ $((i % 2)) -eq 0 ] && echo KILL || echo INT)
        "$train" --recipe llmc -e d12 --positions 128 -b 8 -t 128 -i "$tmp/data/*_train_*.bin" -o "$out" -x 100000 -n 5 -nk 1 -v 0 -s 0 --no-tune \
            >"$out.out" 2>"$out.err" </dev/null & pid=$!
        sleep $((i / 2 + 1)).$((RANDOM % 10))
        kill -$signal $pid
        code=0
        wait $pid || code=$?
        steps=$(grep -c '"type":"train"' "$out/log.jsonl" || true)
        echo "$signal after step ${steps:-0}: exit code $code; $(ls "$out"); $(cat "$out.err")"
        case $signal:$code in
        INT:0) [ "${steps:-0}" -eq 0 ] || [ -d "$out/$(printf 'step_%08d' "$steps")" ] || fail "step $steps is not saved" ;;
        INT:130) [ "${steps:-0}" -eq 0 ] || fail "ended by the signal after step $steps" ;;
        KILL:137) ;;
        *) fail "exit code $code" ;;
        esac
        ls "$out"/step_* >/dev/null 2>&1 || continue
        program "$out.resumed" --recipe llmc -e d12 --positions 128 -b 8 -t 128 -i "$tmp/data/*_train_*.bin" -o "$out" -x $((steps + 2)) -y 1 -n 0 -v 0 -s 0
        good "resuming" "$out.resumed"
        contains "resumed at step" "$out.resumed.out"
    done
}

# Ten runs of one command in ten directories end with the same bits: the first run times cuBLASLt's algorithms, and the others take its
# choices from the cache.
test_ten_runs() {
    setup
    local model file i
    for model in d6 d12 "d6 --fp8" "d12 --fp8"; do
        [[ $model != *fp8 ]] || nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | grep -q '^9.0' || continue
        for i in {1..10}; do
            program "$tmp/ten.$i" --recipe llmc -e $model -b 8 -t 128 -i "$tmp/data/*_train_*.bin" -o "$tmp/ten.$i" -x 4 -v 0 -s 0
            good "run $i of $model" "$tmp/ten.$i"
            for file in "$tmp"/ten.1/step_00000004/*.safetensors; do
                cmp "$file" "$tmp/ten.$i/step_00000004/${file##*/}" || fail "run $i of $model"
            done
        done
        rm -r "$tmp"/ten.*
    done
}

tests=(ten_runs filled_by_another_process filled_beside_a_run each_allocation a_kernel_fails several_on_one_card no_card another_precision
    ended_at_random)
run_tests_once "$@"
