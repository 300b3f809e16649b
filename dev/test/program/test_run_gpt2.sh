#!/usr/bin/env bash
# scripts/run_gpt2.sh without a GPU: its plans, what it refuses, the flags that it passes on, published losses beside those of a
# log, and a toy that the CPU program trains from start to end. That a plan's memory is what train_gpt2cu asks for is tested in
# test_fake_gpu.sh.
. "$(dirname "$0")/../test.sh"
export OMP_NUM_THREADS=1 # the models are tiny
unset DATA_DIR PRICE_PER_GPU_HOUR CUDA_VISIBLE_DEVICES
[[ $BIN_DIR == /* ]] || BIN_DIR=$PWD/$BIN_DIR

# The script runs in a folder of its own, $tree, where train_gpt2cu is a stand-in or the CPU program.
tree=$tmp/tree
mkdir -p "$tmp/bin" "$tree/scripts" "$tree/dev/data"
cp scripts/run_gpt2*.sh "$tree/scripts/"
export PATH=$tmp/bin:$PATH

stand_in() { # FILE: makes a script of what is on stdin
    { echo '#!/bin/sh' && cat; } >"$1"
    chmod +x "$1"
}
# nothing is compiled here, and the machine's own GPUs are not to be seen
stand_in "$tmp/bin/make" <<<'echo "make $*" >&2'
stand_in "$tmp/bin/nvidia-smi" <<<'for i in $(seq "${NUM_GPUS:-0}"); do echo "GPU $i: a card"; done'

# run RC SIZE FLAGS...: the exit code must be RC; output to $tmp/out and $tmp/err
run() {
    local rc=0
    "$tree/scripts/run_gpt2.sh" "${@:2}" >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
    [ $rc -eq "$1" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $1: ${*:2}"; }
}
# plan_row N: the row of N GPUs in the plan, with single spaces
plan_row() { grep "^$1 " "$tmp/out" | tr -s ' ' | sed 's/ $//'; }

# Makes empty files with the names of shards: N to train on and one to validate on.
empty_shards() { # PREFIX N
    local i
    mkdir -p "$(dirname "$1")"
    for ((i = 1; i <= $2; i++)); do : >"$1_train_$i.bin"; done
    : >"$1_val_0.bin"
}
# The program prints its arguments, one per line in brackets.
print_arguments() {
    rm -f "$tree/train_gpt2cu"
    stand_in "$tree/train_gpt2cu" <<<'for i; do echo "[$i]"; done'
}
flags() { sed -n 's/^\[\(.*\)\]$/\1/p' "$tmp/out" | tr '\n' ' '; }

# table_row SIZE: the row of the manual's table, from the plan
table_row() {
    "$tree/scripts/run_gpt2.sh" "$1" --plan | awk -v size="$1" '
        /^tokens/ { tokens = $2 " billion" }
        /^1 / { memory = $6 " GB" }
        /^disk/ { print "| " size " | " tokens " | " $2 " GB | " $6 " GB | " memory " |" }'
}

# measured_speeds MODEL: prints "B TOKENS_PER_SECONDk" for each run of train_gpt2cu on one H200 in records.csv, by the median of its times
measured_speeds() {
    awk -F , -v model="$1" '
        $4 == "H200" && $5 == "training" && $6 == model && $7 == "" && $10 == "train_gpt2cu" {
            n = split($11, ms, " ")
            for (i = 2; i <= n; i++) { for (j = i; j > 1 && ms[j - 1] > ms[j]; j--) { t = ms[j]; ms[j] = ms[j - 1]; ms[j - 1] = t } }
            printf "%d %.0fk\n", $8, $8 * $9 / ((ms[int((n + 1) / 2)] + ms[int(n / 2) + 1]) / 2)
        }' dev/measured/records.csv
}

# measured_loss RECIPE: prints the mean validation loss of the seeds in records.csv
measured_loss() {
    awk -F , -v recipe="$1" '
        $5 == "losses" && $7 ~ /^validation/ && $10 == recipe { n = split($11, x, " "); for (i = 1; i <= n; i++) { sum += x[i] / n } }
        END { printf "%.2f", sum }' dev/measured/records.csv
}

test_plans() {
    local size speed
    run 0 124M --plan
    want "lines on standard error" "$(wc -l <"$tmp/err")" 0
    contains "plan of GPT-2 124M: 12 layers, 768 channels, 12 heads, 124.44 M parameters; nothing is started" "$tmp/out"
    contains "10.26 billion: 19560 steps of 524288, 1.00 passes over 103 shards of fineweb10B" "$tmp/out"
    contains "recipe     pretrain with muon: train_gpt2cu --help says what it sets" "$tmp/out"
    contains "caveat     muon ended at a validation loss of 2.42 where adamw had 2.81" "$tmp/out"
    grep -qF '|Muon -l 1.8e-3 -k wsd --muon-learning-rate 3.6e-3|' dev/measured/README.md || fail "these rates were not measured"
    want "the losses of muon and adamw" "$(measured_loss 'Muon -l 1.8e-3 -k wsd --muon-learning-rate 3.6e-3') $(measured_loss 'AdamW -l 6e-4 -k cosine')" '2.42 2.81'
    grep -qF '{"pretrain", "learning-rate", "1.8e-3", RECIPE_VALUE, 0, 0, "muon",' llmc/recipes.h || fail "the recipe has another rate"
    want "published" "$(grep -c published "$tmp/out")" 0
    # 10,255,073,280 tokens at 691,000 a second are 14,841 s
    want "one GPU" "$(plan_row 1)" "1 64 x 1024 8 29.1 GB 4h07m"
    want "two GPUs" "$(plan_row 2)" "2 64 x 1024 4 29.3 GB 2h03m"
    want "eight GPUs" "$(plan_row 8)" "8 64 x 1024 1 28.7 GB 0h30m"
    run 0 124M --plan --recipe adamw
    contains "recipe     pretrain with adamw: " "$tmp/out"
    want "caveat" "$(grep -c caveat "$tmp/out")" 0
    want "one GPU" "$(plan_row 1)" "1 64 x 1024 8 29.4 GB 4h07m"
    want "two GPUs" "$(plan_row 2)" "2 64 x 1024 4 29.5 GB 2h03m"
    contains "20.7 GB of shards; 4.5 GB of checkpoints in log_gpt2_124M" "$tmp/out"
    contains "1000:4.3170 5000:3.5535 10000:3.3924 15000:3.3003 19560:3.2722 (llm.c" "$tmp/out"
    run 0 350M --plan
    contains "354.82 M parameters" "$tmp/out"
    contains "31.46 billion: 60000 steps of 524288, 1.00 passes over 315 shards of edu_fineweb100B" "$tmp/out"
    contains "pretrain with adamw" "$tmp/out"
    want "published" "$(grep -c published "$tmp/out")" 0
    want "350M on one GPU" "$(plan_row 1)" "1 32 x 1024 16 36.5 GB 1d11h"
    run 0 774M --plan
    contains "774.03 M parameters" "$tmp/out"
    contains "150.00 billion: 286102 steps of 524288, 1.50 passes over 1001 shards" "$tmp/out"
    want "774M on four GPUs" "$(plan_row 4)" "4 16 x 1024 8 35.0 GB 3d21h"
    run 0 1558M --plan
    contains "1557.61 M parameters" "$tmp/out"
    contains "33.55 billion: 32000 steps of 1048576, 1.00 passes over 336 shards" "$tmp/out"
    want "1558M on eight GPUs" "$(plan_row 8)" "8 8 x 1024 16 34.8 GB 22h50m"
    for size in 124M 350M 774M 1558M; do
        speed=$("$tree/scripts/run_gpt2.sh" $size --plan | sed -n 's/^time *at \([0-9]*\)000 tokens.s, measured on one H200 with -b \([0-9]*\) .*/\2 \1k/p')
        measured_speeds "${size/350M/355M}" | grep -qx "${speed:-none}" || fail "$size was not measured at '$speed'"
        contains "$(table_row $size)" dev/manual/train.md
        want "the wrapper of $size" "$("$tree/scripts/run_gpt2_$size.sh" --plan)" "$("$tree/scripts/run_gpt2.sh" $size --plan)"
    done
}

# What a plan depends on: -b, -o, the price, what is there already. download.sh must know the items that it names.
test_plan_of_this_machine() {
    local size items
    run 0 124M --plan -b 16
    want "-b 16" "$(plan_row 1)" "1 16 x 1024 32 9.2 GB 4h07m"
    contains '124M with `-b 16` takes 9.2 GB' dev/manual/train.md
    PRICE_PER_GPU_HOUR=2.5 NUM_GPUS=4 run 0 124M --batch-size=32 -o elsewhere --plan
    want "one GPU" "$(plan_row 1)" "1 32 x 1024 16 15.8 GB 4h07m 10"
    want "eight GPUs" "$(plan_row 8)" "8 32 x 1024 2 15.4 GB 0h30m 10"
    contains "of checkpoints in elsewhere:" "$tmp/out"
    contains "here       4 GPUs; 0 of 103 shards match data/fineweb10B/fineweb_train_*.bin" "$tmp/out"
    run 2 124M --plan -b 48
    want "message on -b" "$(cat "$tmp/err")" "-b 48: 524288 tokens per step are not a multiple of 48 x 1024"
    empty_shards "$tmp/some/edu_fineweb100B/edu_fineweb" 3
    DATA_DIR=$tmp/some run 0 1558M --plan
    contains "3 of 336 shards match $tmp/some/edu_fineweb100B/edu_fineweb_train_*.bin" "$tmp/out"
    contains "download   scripts/download.sh --dir $tmp/some edu_fineweb100B:336 hellaswag vocab" "$tmp/out"
    mkdir "$tmp/with space"
    DATA_DIR="$tmp/with space" run 0 1558M --plan
    contains "download   scripts/download.sh --dir $tmp/with\\ space edu_fineweb100B:336 hellaswag vocab" "$tmp/out"
    : >"$tmp/some/hellaswag_val.jsonl"
    DATA_DIR=$tmp/some run 0 1558M --plan
    want "downloads for shards alone" "$(grep -c download "$tmp/out")" 1
    empty_shards "$tmp/some/fineweb10B/fineweb" 103
    DATA_DIR=$tmp/some run 0 124M --plan
    want "downloads" "$(grep -c download "$tmp/out")" 0
    scripts/download.sh --list | cut -d ' ' -f 1 | sort -u >"$tmp/items"
    for size in 124M 350M 774M 1558M; do
        run 0 $size --plan
        items=$(sed -n 's/^download *scripts.download.sh //p' "$tmp/out" | tr ' ' '\n' | sed 's/:.*//' | sort -u)
        want "items of $size" "$(wc -w <<<"$items")" 3
        want "items that download.sh lacks" "$(grep -vxFf "$tmp/items" <<<"$items" || true)" ""
    done
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
    want "message on -b" "$(cat "$tmp/err")" "-b wants a value"
    run 2 124M -b 0 --plan
    want "message on -b 0" "$(cat "$tmp/err")" "-b wants a number of sequences from 1 to 9999, not '0'"
    run 2 124M --batch-size=x
    run 2 124M --recipe
    want "message on --recipe" "$(cat "$tmp/err")" "--recipe wants a value"
    run 2 124M --recipe=lion --plan
    want "message on the recipe" "$(cat "$tmp/err")" "--optimizer wants muon or adamw, not 'lion'"
    run 2 124M --gpus some
    want "message on --gpus" "$(cat "$tmp/err")" "--gpus wants a number from 0 to 64, not 'some'"
    for price in x 1e3 -2 2,5; do
        PRICE_PER_GPU_HOUR=$price run 2 124M --plan
        want "message on the price" "$(cat "$tmp/err")" "PRICE_PER_GPU_HOUR is a number such as 2.5, not '$price'"
    done
    run 0 --help
    run 0 124M --help
    contains "usage: scripts/run_gpt2.sh SIZE" "$tmp/out"
    print_arguments
    run 1 124M
    want "message on shards" "$(cat "$tmp/err")" "no shards match data/fineweb10B/fineweb_train_*.bin: \
scripts/download.sh fineweb10B hellaswag vocab, or name your own with -i and -j"
    empty_shards "$tmp/one/x" 1
    run 1 350M -i "$tmp/one/x_train*"
    want "message on validation" "$(cat "$tmp/err")" "no shards match data/edu_fineweb100B/edu_fineweb_val_*.bin: \
scripts/download.sh edu_fineweb100B:315 hellaswag vocab, or name your own with -j"
    # what the script does not know is the program's to refuse
    [ -x "$BIN_DIR/train_gpt2" ] || fail "$BIN_DIR/train_gpt2 is not there: make all"
    ln -sf "$BIN_DIR/train_gpt2" "$tree/train_gpt2cu"
    run 2 124M -i "$tmp/one/x_train*" -j "$tmp/one/x_val*" --nonsense
    contains "nonsense" "$tmp/err"
}

# The flags for the program: GPUs that divide a step's tokens, the validation data of llm.c, one's own flags at the end.
test_flags() {
    print_arguments
    empty_shards "$tmp/data/fineweb10B/fineweb" 2
    empty_shards "$tmp/data/edu_fineweb100B/edu_fineweb" 2
    export DATA_DIR=$tmp/data
    local recipe="--recipe pretrain -e d12" run="-d 524288 -x 19560 -y 1"
    local files="-i $tmp/data/fineweb10B/fineweb_train_*.bin -j $tmp/data/fineweb10B/fineweb_val_*.bin"
    run 0 124M
    want "flags without a GPU" "$(flags)" "$recipe $files -o log_gpt2_124M $run "
    contains "make train_gpt2cu" "$tmp/err"
    contains "optimizer  muon ended at a validation loss of 2.42 where adamw had 2.81" "$tmp/out"
    run 0 124M --recipe adamw
    want "flags of adamw" "$(flags)" "$recipe $files -o log_gpt2_124M $run --optimizer adamw "
    run 0 1558M --optimizer=muon
    want "muon for 1558M" "$(flags | grep -o -e '-d .*')" "-d 1048576 -x 32000 -y 1 --optimizer muon "
    run 0 124M
    contains "note: 2 of 103 shards, which the run repeats; all of them: scripts/download.sh --dir $tmp/data fineweb10B" "$tmp/err"
    contains "note: without HellaSwag: scripts/download.sh --dir $tmp/data fineweb10B hellaswag vocab" "$tmp/err"
    NUM_GPUS=6 run 0 124M -x 5 --output=elsewhere
    want "flags on six GPUs" "$(flags)" "$recipe $files -o elsewhere $run --gpus 4 -x 5 "
    contains "note: using 4 of 6 GPUs: a power of two, and each takes 1 x 1024 of a step's 524288 tokens at least" "$tmp/err"
    few() { flags | grep -oE -e '(-b|--gpus) [0-9]+' | tr '\n' ' '; }
    NUM_GPUS=16 run 0 124M
    want "flags on 16 GPUs" "$(few)" "--gpus 16 "
    NUM_GPUS=16 run 0 124M -b 64
    want "flags on 16 GPUs with -b 64" "$(few)" "-b 64 --gpus 8 "
    NUM_GPUS=8 CUDA_VISIBLE_DEVICES=2,3 run 0 1558M
    want "flags on two of eight GPUs" "$(few)" "--gpus 2 "
    NUM_GPUS=8 run 0 350M --gpus 2
    want "flags with --gpus 2" "$(few)" "--gpus 2 "
    mkdir -p "$tmp/data/gpt2_tokenizer"
    : >"$tmp/data/hellaswag_val.bin"
    run 0 124M
    want "vocabulary and HellaSwag" "$(flags | grep -oE -e '--(tok|hell).*')" \
        "--tokenizer $tmp/data/gpt2_tokenizer --hellaswag $tmp/data/hellaswag_val.bin "
    empty_shards "$tmp/own/x" 1
    run 0 124M -i "$tmp/own/x_train*" -j "$tmp/own/x_val*"
    want "own shards" "$(flags | cut -d ' ' -f 6,8)" "$tmp/own/x_train* $tmp/own/x_val*"
    want "public vocabulary for own shards" "$(flags | grep -c -e --tokenizer)" 0
    want "standard error with own shards" "$(cat "$tmp/err")" "make train_gpt2cu"
}

# A toy on the CPU program from start to end: it is stopped, started again, and ends; HellaSwag is measured on the way.
test_a_toy_to_its_end() {
    local flags=(--layers 1 --heads 1 --channels 32 --positions 32 -b 4 -t 32 -d 128 -m 4 -s 0 -v 3 -n 2 -u 1 -o log) data=$tmp/toy
    [ -x "$BIN_DIR/train_gpt2" ] && [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "train_gpt2 or dev/data/tokenize is not there: make all"
    ln -sf "$BIN_DIR/train_gpt2" "$tree/train_gpt2cu"
    ln -sf "$BIN_DIR/dev/data/hellaswag" "$tree/dev/data/hellaswag"
    mkdir -p "$data/fineweb10B" "$data/gpt2_tokenizer"
    "$BIN_DIR/dev/data/tokenize" -i llmc/gpt2.h -o "$data/fineweb10B/fineweb" -v 1000 -s 5000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$data/fineweb10B"/{vocab.json,merges.txt} "$data/gpt2_tokenizer/"
    echo '{"ind": 1, "activity_label": "Sitting", "ctx": "The cat sat", "label": 1,
        "endings": ["on a car.", "on the mat.", "by the sea.", "in a box."]}' | tr '\n' ' ' >"$data/hellaswag_val.jsonl"
    export DATA_DIR=$data
    run 0 124M "${flags[@]}" -x 4
    contains " 4/4 | loss" "$tmp/out"
    contains "make dev/data/hellaswag" "$tmp/err"
    run 0 124M "${flags[@]}" -x 8
    contains "step_00000004" "$tmp/out"
    contains " 8/8 | loss" "$tmp/out"
    want "steps of the second start" "$(grep -c '^step .* | loss' "$tmp/out")" 4
    want "questions made into tokens again" "$(grep -c "make dev/data/hellaswag" "$tmp/err")" 0
    want "published losses of a toy" "$(grep -c published "$tmp/out")" 0
    want "checkpoints" "$(cd "$tree/log" && echo step_*)" "step_00000002 step_00000004 step_00000006 step_00000008"
    want "validations and HellaSwag" "$(grep -oE '^s:[0-9]+ (tel|eval)' "$tree/log/main.log" | tr '\n' ' ')" \
        "$(for i in 0 3 4 6 8; do printf 's:%d eval s:%d tel ' $i $i; done)"
}

# With all shards and the flags of the recipe adamw, each published loss is printed beside that of main.log, once, even if main.log is
# replaced, as it is when a run resumes; also the last one, which is written as the program ends. The program has the script's PID.
test_published_losses() {
    empty_shards "$tmp/all/fineweb10B/fineweb" 103
    rm -f "$tree/train_gpt2cu"
    mkdir -p "$tree/curve"
    printf 's:0 tel:10.9\ns:1000 tel:4.4444\ns:1000 trl:4.4 lr:0 norm:1\ns:5000 tel:3.6\ns:5250 tel:3.5\n' >"$tree/curve/main.log"
    stand_in "$tree/train_gpt2cu" <<'END'
echo "pid $$"
sleep 1.5 # tail looks once a second
head -n 3 curve/main.log >curve/new
mv curve/new curve/main.log
sleep 0.5
echo 's:19560 tel:3.3000' >>curve/main.log
exit 5
END
    export DATA_DIR=$tmp/all NUM_GPUS=4
    mkfifo "$tmp/pipe"
    cat "$tmp/pipe" >"$tmp/out" &
    local reader=$! pid rc=0 i
    "$tree/scripts/run_gpt2.sh" 124M --recipe adamw -b 32 -o curve >"$tmp/pipe" 2>"$tmp/err" &
    pid=$!
    wait $pid || rc=$?
    want "exit code" $rc 5
    for ((i = 0; i < 100; i++)); do
        kill -0 $reader 2>/dev/null || break
        sleep 0.1
    done
    [ $i -lt 100 ] || { kill $reader && fail "something of the script is left 10 s after its end"; }
    contains "pid $pid" "$tmp/out"
    want "losses" "$(grep '^step ' "$tmp/out")" "step 1000: validation loss 4.4444, published 4.3170
step 5000: validation loss 3.6, published 3.5535
step 19560: validation loss 3.3000, published 3.2722"
    contains "modded-nanogpt's records/track_1_short/2024-10-13_llmc" "$tmp/out"
    run 5 124M -o curve --recipe adamw -l 1e-3 # another recipe
    want "published losses of another recipe" "$(grep -c published "$tmp/out")" 0
}

tests=(plans plan_of_this_machine refused flags a_toy_to_its_end published_losses)
run_tests "$@"
