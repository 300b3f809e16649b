#!/usr/bin/env bash
# scripts/run_gpt2.sh without a GPU: its plans, what it refuses, a run of a toy on the CPU program, and, with a stand-in for the
# program, the flags that it passes on. That the plans' memory is what train_gpt2cu needs is tested in test_fake_gpu.sh.
. "$(dirname "$0")/test.sh"
export OMP_NUM_THREADS=1 # the models are tiny
unset TRAIN TRAIN_DATA VAL_DATA OUT_DIR HELLASWAG TOKENIZER PRICE_PER_GPU_HOUR WATCH_SECONDS CUDA_VISIBLE_DEVICES
train=$BIN_DIR/train_gpt2
[[ $train == /* ]] || train=$PWD/$train
mkdir "$tmp/bin"
export PATH=$tmp/bin:$PATH

stand_in() { # NAME: makes a script of what is on stdin
    { echo '#!/bin/sh' && cat; } >"$tmp/bin/$1"
    chmod +x "$tmp/bin/$1"
}
# nothing may be compiled here, and the machine's own GPUs are not to be seen
stand_in make <<<'echo "make $*" >&2; exit 9'
stand_in nvidia-smi <<<'for i in $(seq "${NUM_GPUS:-0}"); do echo "GPU $i: a card"; done'
# prints its arguments, one per line in brackets
stand_in arguments <<<'[ "$*" != --help ] || { echo "  --gpus N"; exit; }
for i; do echo "[$i]"; done'

# run RC SIZE FLAGS...: the exit code must be RC; output to $tmp/out and $tmp/err
run() {
    local rc=0
    scripts/run_gpt2.sh "${@:2}" >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
    [ $rc -eq "$1" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $1: ${*:2}"; }
}
# plan_row N: the row of N GPUs in the plan, with single spaces
plan_row() { grep "^$1 " "$tmp/out" | tr -s ' ' | sed 's/ $//'; }

# Makes empty files with the names of shards: DIR has N to train on and one to validate on.
empty_shards() { # DIR N
    local i
    mkdir -p "$1"
    for ((i = 1; i <= $2; i++)); do : >"$1/x_train_$i.bin"; done
    : >"$1/x_val_0.bin"
    export TRAIN_DATA="$1/x_train_*.bin" VAL_DATA="$1/x_val_*.bin"
}

test_plans() {
    local size
    run 0 124M --plan
    want "lines on standard error" "$(wc -l <"$tmp/err")" 0
    contains "plan of GPT-2 124M: 12 layers, 768 channels, 12 heads, 124.44 M parameters; nothing is started" "$tmp/out"
    contains "10.26 billion, 19560 steps of 524288: 1.00 passes over 103 shards of fineweb10B" "$tmp/out"
    contains "rate 6e-4 after 700 steps of warm-up, then a cosine to 0; weight decay 0.1" "$tmp/out"
    # 10,255,073,280 tokens at 641,000 a second are 15,998 s
    want "one GPU" "$(plan_row 1)" "1 64 x 1024 8 29.4 GB 4h26m"
    want "four GPUs" "$(plan_row 4)" "4 64 x 1024 2 29.0 GB 1h06m"
    want "eight GPUs" "$(plan_row 8)" "8 64 x 1024 1 28.7 GB 0h33m"
    contains "disk        shards 20.7 GB" "$tmp/out"
    contains "checkpoints 6.0 GB in log124M" "$tmp/out"
    contains "step 5000: 3.5535" "$tmp/out"
    contains "nobody has yet run this to the end with this program" "$tmp/out"
    run 0 350M --plan
    contains "354.82 M parameters" "$tmp/out"
    contains "31.46 billion, 60000 steps of 524288: 1.00 passes over 315 shards of edu_fineweb100B" "$tmp/out"
    contains "rate 3e-4" "$tmp/out"
    contains "no published log of this recipe" "$tmp/out"
    want "350M on one GPU" "$(plan_row 1)" "1 32 x 1024 16 36.5 GB 1d15h"
    run 0 774M --plan
    contains "774.03 M parameters" "$tmp/out"
    contains "150.00 billion, 286102 steps of 524288: 1.50 passes over 1001 shards" "$tmp/out"
    contains "rate 2.5e-4" "$tmp/out"
    want "774M on four GPUs" "$(plan_row 4)" "4 16 x 1024 8 35.0 GB 4d02h"
    run 0 1558M --plan
    contains "1557.61 M parameters" "$tmp/out"
    contains "33.55 billion, 32000 steps of 1048576: 1.00 passes over 336 shards" "$tmp/out"
    contains "rate 2e-4" "$tmp/out"
    want "1558M on eight GPUs" "$(plan_row 8)" "8 8 x 1024 16 34.8 GB 22h50m"
    for size in 124M 350M 774M 1558M; do
        want "the wrapper of $size" "$("scripts/run_gpt2_$size.sh" --plan)" "$(scripts/run_gpt2.sh $size --plan)"
    done
}

# What a plan depends on: -b, -o, the price, what is there already. The commands that it names must exist.
test_plan_of_this_machine() {
    local command item
    PRICE_PER_GPU_HOUR=2.5 run 0 124M -b 32 -o elsewhere --plan
    want "one GPU" "$(plan_row 1)" "1 32 x 1024 16 16.0 GB 4h26m 11"
    want "eight GPUs" "$(plan_row 8)" "8 32 x 1024 2 15.3 GB 0h33m 11"
    contains " in elsewhere: 3, and" "$tmp/out"
    run 0 124M --plan -b 48
    contains "another -b!" "$tmp/out"
    empty_shards "$tmp/some" 3
    : >"$tmp/hellaswag.bin"
    HELLASWAG=$tmp/hellaswag.bin run 0 1558M --plan
    contains "shards      3 of 336 are there ($tmp/some/x_train_*.bin): scripts/download.sh edu_fineweb100B:336 vocab" "$tmp/out"
    contains "HellaSwag   with each validation: $tmp/hellaswag.bin" "$tmp/out"
    unset TRAIN_DATA VAL_DATA
    scripts/download.sh --list | cut -d ' ' -f 1 | sort -u >"$tmp/items"
    for size in 124M 350M 774M 1558M; do
        run 0 $size --plan
        command=$(grep -o 'scripts/download.sh [a-zA-Z0-9: _]*' "$tmp/out" | cut -d ' ' -f 2-)
        want "items that download.sh lacks" "$(tr ' ' '\n' <<<"$command" | sed 's/:.*//' | sort -u | grep -vxFf "$tmp/items" || true)" ""
    done
    contains "dev/data/hellaswag -i data/hellaswag_val.jsonl --tokenizer data/gpt2_tokenizer -o data/hellaswag_val.bin" "$tmp/out"
}

test_refused() {
    run 2
    contains "usage: scripts/run_gpt2.sh SIZE" "$tmp/err"
    for size in 125M --plan 124m ""; do
        run 2 "$size"
        want "message on '$size'" "$(cat "$tmp/err")" \
            "no size '$size': 124M, 350M, 774M or 1558M; see scripts/run_gpt2.sh --help"
    done
    run 2 124M -b
    want "message on -b" "$(cat "$tmp/err")" "-b wants a number of sequences from 1 to 9999, not ''"
    run 2 124M -b 0 --plan
    run 2 124M --batch-size=x
    run 2 124M --gpus some
    want "message on --gpus" "$(cat "$tmp/err")" "--gpus wants a number from 0 to 64, not 'some'"
    for price in x 1e3 -2 2,5; do
        PRICE_PER_GPU_HOUR=$price run 2 124M --plan
        want "message on the price" "$(cat "$tmp/err")" "PRICE_PER_GPU_HOUR is a number such as 2.5, not '$price'"
    done
    run 0 --help
    run 0 124M --help
    contains "usage: scripts/run_gpt2.sh SIZE" "$tmp/out"
    export TRAIN=$tmp/bin/arguments TRAIN_DATA="$tmp/none_*"
    run 1 124M
    want "message on shards" "$(cat "$tmp/err")" \
        "no shards match $tmp/none_*: scripts/download.sh fineweb10B vocab, or set TRAIN_DATA and VAL_DATA"
    empty_shards "$tmp/one" 1
    VAL_DATA="$tmp/none_*" run 1 350M
    want "message on validation" "$(cat "$tmp/err")" \
        "no shards match $tmp/none_*: scripts/download.sh edu_fineweb100B:315 vocab, or set VAL_DATA"
    unset TRAIN
    run 9 124M # the program is compiled first
    contains "make train_gpt2cu" "$tmp/err"
    # what the script does not know is the program's to refuse
    [ -x "$train" ] || fail "$train is not there: make all"
    TRAIN=$train run 2 124M --nonsense
    contains "nonsense" "$tmp/err"
}

# The flags for the program: GPUs that divide a step's tokens, the validation data of llm.c, flags of one's own at the end.
test_flags() {
    export TRAIN=$tmp/bin/arguments
    empty_shards "$tmp/few" 2
    flags() { sed -n 's/^\[\(.*\)\]$/\1/p' "$tmp/out" | tr '\n' ' '; }
    NUM_GPUS=1 run 0 124M
    want "flags" "$(flags)" "-e d12 -i $TRAIN_DATA -j $VAL_DATA -o log124M -b 64 -t 1024 -d 524288 -x 19560 -l 6e-4 -k cosine \
-q 0 -u 700 -c 0.1 -s 5000 -n 1000 -nk 3 -y 1 -v 250 -m 160 --gpus 1 "
    contains "note: 2 of 103 shards, which the run repeats; all of them: scripts/download.sh fineweb10B vocab" "$tmp/out"
    contains "no HellaSwag: scripts/download.sh hellaswag vocab" "$tmp/out"
    NUM_GPUS=6 run 0 124M -x 5
    want "flags on six GPUs" "$(flags | grep -o -e '-b .*')" "-b 64 -t 1024 -d 524288 -x 19560 -l 6e-4 -k cosine \
-q 0 -u 700 -c 0.1 -s 5000 -n 1000 -nk 3 -y 1 -v 250 -m 40 --gpus 4 -x 5 "
    want "message about the others" "$(cat "$tmp/err")" "note: 4 of 6 GPUs, for 524288 tokens are not divided by 6"
    NUM_GPUS=16 run 0 124M
    want "flags on 16 GPUs" "$(flags | grep -oE -e '(-b|-m|--gpus) [0-9]+' | tr '\n' ' ')" "-b 32 -m 20 --gpus 16 "
    NUM_GPUS=8 CUDA_VISIBLE_DEVICES=2,3 run 0 1558M
    want "flags on two of eight GPUs" "$(flags | grep -oE -e '(-b|-m|--gpus) [0-9]+' | tr '\n' ' ')" "-b 8 -m 640 --gpus 2 "
    : >"$tmp/questions"
    mkdir -p "$tmp/vocabulary"
    HELLASWAG=$tmp/questions TOKENIZER=$tmp/vocabulary OUT_DIR=$tmp/o run 0 350M --gpus 8 -b 16
    want "files" "$(flags | grep -oE -e '-(-tokenizer|-hellaswag|o) [^ ]+' | tr '\n' ' ')" \
        "-o $tmp/o --tokenizer $tmp/vocabulary --hellaswag $tmp/questions "
    want "flags of one's own" "$(flags | grep -oE -e '-m [0-9]+ .*' | sed 's/--tok.*hellaswag [^ ]* //')" "-m 80 --gpus 8 --gpus 8 -b 16 "
}

# A toy on the CPU program from end to end: it is stopped, started again, and ends; HellaSwag is measured on the way.
test_a_toy_to_its_end() {
    local flags=(--layers 1 --heads 1 --channels 32 --positions 32 -b 1 -t 32 -d 32 -m 4 -s 0 -v 3 -n 2 -u 1)
    [ -x "$train" ] && [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "$train or dev/data/tokenize is not there: make all"
    mkdir "$tmp/toy"
    "$BIN_DIR/dev/data/tokenize" -i llmc/gpt2.h -o "$tmp/toy/x" -v 1000 -s 5000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    printf 'The cat sat\n1\n on a car.\n on the mat.\n by the sea.\n in a box.\n' >"$tmp/toy/questions"
    "$BIN_DIR/dev/data/hellaswag" -i "$tmp/toy/questions" --tokenizer "$tmp/toy" -o "$tmp/toy/h.bin" 2>"$tmp/log" ||
        fail "$(cat "$tmp/log")"
    export TRAIN=$train TRAIN_DATA="$tmp/toy/x_train_*.bin" VAL_DATA="$tmp/toy/x_val_*.bin" HELLASWAG=$tmp/toy/h.bin \
        TOKENIZER=$tmp/toy OUT_DIR=$tmp/toy/log
    run 0 124M "${flags[@]}" -x 4
    contains " 4/4 | loss" "$tmp/out"
    run 0 124M "${flags[@]}" -x 8
    contains "step_00000004" "$tmp/out"
    contains " 8/8 | loss" "$tmp/out"
    want "steps of the second start" "$(grep -c '^step .* | loss' "$tmp/out")" 4
    want "published losses of a toy" "$(grep -c published "$tmp/out")" 0
    want "checkpoints" "$(cd "$tmp/toy/log" && echo step_*)" "step_00000004 step_00000006 step_00000008"
    want "validations and HellaSwag" "$(grep -oE '^s:[0-9]+ (tel|eval)' "$tmp/toy/log/main.log" | tr '\n' ' ')" \
        "$(for i in 0 3 4 6 8; do printf 's:%d tel s:%d eval ' $i $i; done)"
}

# With all shards and the recipe as it is, the published losses are printed beside those of main.log, each once, also
# the last one, which comes as the program ends. The program has the script's PID and gives its exit code.
test_published_losses() {
    empty_shards "$tmp/all" 103
    stand_in program <<'END'
case "$*" in *--help*) echo "--gpus N"; exit ;; esac
echo "pid $$"
trap 'echo "terminated"; exit 7' TERM
mkdir -p "$OUT_DIR"
printf 's:0 tel:10.9\ns:1000 tel:4.4444\ns:1000 trl:4.4 lr:0 norm:1\ns:5000 tel:3.6\n' >"$OUT_DIR/main.log"
[ -z "$LINGER" ] || while :; do sleep 0.1; done
sleep 1
echo 's:19560 tel:3.3000' >>"$OUT_DIR/main.log"
exit 5
END
    export TRAIN=$tmp/bin/program OUT_DIR=$tmp/published WATCH_SECONDS=0.3 LINGER='' NUM_GPUS=4
    PRICE_PER_GPU_HOUR=3600 run 5 124M -b 32
    want "losses" "$(grep '^step [0-9]*:' "$tmp/out" | sed 's/ | .*//')" "step 1000: validation loss 4.4444, published 4.3170
step 5000: validation loss 3.6, published 3.5535
step 19560: validation loss 3.3000, published 3.2722"
    grep -qE '^step 19560: .* \| 0\.00 GPU hours since the start, cost [1-9][0-9]?\.[0-9]+$' "$tmp/out" || { cat "$tmp/out" && fail "no cost"; }
    contains "modded-nanogpt, records/track_1_short/2024-10-13_llmc" "$tmp/out"
    run 5 124M -l 1e-3 # another recipe
    want "published losses of another recipe" "$(grep -c published "$tmp/out")" 0
    # a signal for the script reaches the program
    LINGER=yes scripts/run_gpt2.sh 124M >"$tmp/out" 2>"$tmp/err" &
    local pid=$! rc=0 i
    for ((i = 0; i < 100; i++)); do
        ! grep -q '^step 5000' "$tmp/out" || break
        sleep 0.1
    done
    kill -TERM $pid
    wait $pid || rc=$?
    want "status after SIGTERM" $rc 7
    contains "pid $pid" "$tmp/out"
    contains "terminated" "$tmp/out"
}

tests=(plans plan_of_this_machine refused flags a_toy_to_its_end published_losses)
run_tests "$@"
