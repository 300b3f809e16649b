#!/usr/bin/env bash
# The host code of train_gpt2cu without a GPU: fake_cuda.c stands in for the CUDA runtime and cuBLASLt. It can also fail at
# any call, which no real card does on demand. Needs nvcc. Whether kernels are right, and real timing, is not tested here.
. "$(dirname "$0")/../test.sh"
. dev/test/gpu/builds.sh
export PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 # the models are tiny
unset "${!FAKE_CUDA_@}" "${!FAKE_NVML_@}" CUDA_VISIBLE_DEVICES
mkdir "$tmp/bin" "$tmp/rescue"
train=$tmp/bin/train_gpt2cu
full=${LLMC_TEST_FULL-}
ends=${LLMC_ENDS:-$((full ? 40 : 18))} # 18: each of six signals with each of three intervals between checkpoints

# Builds the program and makes shards, once.
setup() {
    [ -e "$tmp/data" ] && return
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$BIN_DIR/dev/data/tokenize" ] && [ -x "$BIN_DIR/dev/data/hellaswag" ] || fail "dev/data/tokenize is not there: make all"
    build_on_stand_in "$tmp/bin"
    mkdir "$tmp/data.new"
    head -c 10000 llmc/gpt2.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 1000 -s 5000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$tmp/data.new" "$tmp/data"
}

# Sets the flags of a run into OUT: two layers of 32 channels, 2 x 2 micro-batches of 16 tokens, a checkpoint after each
# step, all of them kept; validation and samples.
set_flags() { # OUT STEPS [FLAGS]
    flags=(--recipe llmc -e d6 --layers 2 --channels 32 --heads 2 --positions 16 -b 2 -t 16 -d 64 -i "$tmp/data/*_train_*.bin"
        -j "$tmp/data/*_val_*.bin" -o "$1" -x "$2" -l 0.003 -u 2 -q 0.1 -c 0.1 -v 3 -m 2 -s 2 -g 8 -n 1 -nk 0 "${@:3}")
}

# Runs the program and sets `status`; its output goes to LOG.out and LOG.err. An assignment before it reaches the program.
program() { # LOG FLAGS
    status=0
    TMPDIR=$tmp/rescue LLMC_SAVE_SECONDS=0 timeout 60 "$train" "${@:2}" >"$1.out" 2>"$1.err" </dev/null || status=$?
}
train() { # OUT STEPS [FLAGS]
    set_flags "$@"
    program "$1" "${flags[@]}"
}

# good WHAT LOG: the program has succeeded, without an error or a warning
good() { want "the exit code of $1" "$status: $(grep -aE 'error|warning|fake_cuda' "$2.err")" "0: "; }

# refused WHAT LOG PATTERN...: the program has ended with one line of error that matches the patterns
refused() {
    local pattern
    [ "$status" -eq 1 ] || fail "$1: exit code $status, want 1: $(cat "$2.err")"
    want "$1: lines of error" "$(wc -l <"$2.err"): $(cat "$2.err")" "1: $(grep '^error: ' "$2.err")"
    for pattern in "${@:3}"; do grep -qE -- "$pattern" "$2.err" || fail "$1: no '$pattern' in: $(cat "$2.err")"; done
}

# nothing_left WHAT: the counts in $tmp/count tell that everything was freed
nothing_left() { ! grep -E '^left .* [1-9][0-9]*$' "$tmp/count" || fail "$1: this was not freed"; }
calls() { sed -n "s/^calls $1 //p" "$tmp/count"; } # NAME: the number of calls in $tmp/count
blocks() { sed -n "s/^block $1 //p" "$tmp/count" | sort -nu | tr '\n' ' '; } # KERNEL: its block sizes in $tmp/count

# Prints what no interruption may change: every loss, norm, learning rate and sample as logged, without the times.
losses() { sed -E 's/"(time_ms|tokens_per_second)":[^,}]*//g' "$1/log.jsonl"; }
newest() { ls "$1" 2>/dev/null | grep '^step_' | tail -n 1 | sed 's/step_0*//'; } # "" if there is no checkpoint

# Makes the uninterrupted run of 8 steps.
reference() {
    setup
    [ -e "$tmp/reference" ] && return
    FAKE_CUDA_COUNT=$tmp/count train "$tmp/reference.new" 8
    good "the run" "$tmp/reference.new"
    nothing_left "the run"
    mv "$tmp/reference.new" "$tmp/reference"
}

# same OUT STEP [REFERENCE]: its weights and moments are those of the reference
same() {
    local name
    name=$(printf 'step_%08d' "$2")
    same_checkpoint "$1/$name" "${3:-$tmp/reference}/$name"
}
# resume OUT: resumes and trains to step 8; the result and all losses are those of the reference
resume() {
    local last
    last=$(newest "$1")
    train "$1" 8 -y 1
    good "resuming" "$1"
    ! grep 'passed over' "$1.out" || fail "a checkpoint is damaged"
    [ -z "$last" ] || contains "resumed at step $last " "$1.out"
    [ -z "$(ls -A "$1" | grep '^\.')" ] || fail "hidden directories are left: $(ls -A "$1")"
    same "$1" 8
    want "the log without times" "$(losses "$1")" "$(losses "$tmp/reference")"
}

# ---- correct runs -----------------------------------------------------------------------

# Every task runs, and frees what it has allocated.
ok() { # WHAT FLAGS: the program succeeds
    FAKE_CUDA_COUNT=$tmp/count program "$tmp/$1" "${@:2}"
    good "$1" "$tmp/$1"
    nothing_left "$1"
}
test_tasks() {
    reference
    local model=$tmp/reference/step_00000008 each
    ok prompt -e "$model" --prompt 'int ' --num-tokens 9
    want "the prompt's echo" "$(head -c 4 "$tmp/prompt.out")" 'int '
    printf 'int\nfloat a\nchar\n' >"$tmp/lines"
    ok prompts -e "$model" --prompts "$tmp/lines" --num-tokens 8
    ok samples -e "$model" --prompt 'int ' --num-samples 20 --num-tokens 8 --temperature 0.5 # 20: another path than up to 8
    ok one_token -e "$model" --prompt 'int ' --num-tokens 1
    ok last_position -e "$model" --prompt '0123456789abcdef' --num-tokens 9
    ok eval_shards -e "$model" --eval "$tmp/data/*.bin" -b 2
    grep -qE '^all: 9[0-9]* tokens, loss [0-9.]+ ' "$tmp/eval_shards.out" || fail "$(cat "$tmp/eval_shards.out")"
    ok eval_text -e "$model" --eval "$tmp/text" -b 1
    for each in 0 1 2 3; do
        printf '{"ind":%d,"activity_label":"a","ctx":"%d b","label":%d,"endings":["c","de","f","gh"]}\n' $each $each $each
    done >"$tmp/questions.jsonl"
    "$BIN_DIR/dev/data/hellaswag" -i "$tmp/questions.jsonl" -t "$model" -o "$tmp/questions.bin" >"$tmp/log" 2>&1 || fail "$(cat "$tmp/log")"
    ok hellaswag -e "$model" --hellaswag "$tmp/questions.bin"
    contains "of 4 correct" "$tmp/hellaswag.out"
    printf '{"text": "ab cd e"}\n{"text": "a bc"}\n' >"$tmp/words.jsonl"
    printf '{"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "B"}\n' >"$tmp/arc.jsonl"
    for each in words:lambada arc:arc; do
        "$BIN_DIR/dev/data/${each#*:}" -i "$tmp/${each%:*}.jsonl" -t "$model" -o "$tmp/${each%:*}.bin" >"$tmp/log" 2>&1 ||
            fail "$(cat "$tmp/log")"
    done
    ok eval_files -e "$model" --eval "$tmp/text,$tmp/words.bin,$tmp/arc.bin,$tmp/questions.bin" --stride 5 --json -b 2
    want "the kinds of results" "$(sed -E 's/^\{"type":"([a-z_]+)".*"time_ms":[0-9.e+-]+\}$/\1/' "$tmp/eval_files.out" | tr '\n' ' ')" \
        'loss last_words choices choices '
    ok bench -e "$model" --bench --bench-prompt 8 --num-tokens 4 --num-samples 3
    program "$tmp/bench" -e "$model" --bench --bench-prompt 8 --num-tokens 4 --num-samples 65
    refused "a bench of texts that are not side by side" "$tmp/bench" '--bench: only 64 of 65 texts' '--parallel'
    ok int8 -e "$model" --prompt 'int ' --num-tokens 9 --weights int8
    contains '[weights in int8: ' "$tmp/int8.err"
    ok int8_eval -e "$model" --eval "$tmp/text" -b 1 --weights int8
    ok int8_bench -e "$model" --bench --bench-prompt 8 --num-tokens 4 --weights int8
    contains ', weights in int8; texts: 1' "$tmp/int8_bench.out"
    program "$tmp/fp8" -e "$model" --prompt 'int ' --weights fp8
    refused "fp8 on an old card" "$tmp/fp8" '--weights fp8 needs a GPU of compute capability 8.9, this one has 8.0; --weights int8'
    for each in "-i $tmp/data/a_train_000.bin" "--export $tmp/no_export"; do
        # shellcheck disable=SC2086
        program "$tmp/usage" -e "$model" $each --weights int8
        want "the exit code of --weights with $each" "$status" 2
        contains '--weights int8 is for --prompt, --eval and --bench, not for ' "$tmp/usage.err"
    done
    ok export -e "$model" --export "$tmp/exported"
    cmp "$tmp/exported/model.safetensors" "$model/model.safetensors"
    set_flags "$tmp/trained" 4 -b 4 --hellaswag "$tmp/questions.bin" -r 2 --no-graph -sl 5 -sg 5 -lg 1 --stochastic-rounding --keep-best
    ok train "${flags[@]}"
    want "HellaSwag in training" "$(grep -c '^HellaSwag: ' "$tmp/train.out")" 3
    profile empty
    grep -qE '^matmul_forward 32 -> 96 +4 +0\.040 ' "$tmp/profile.out" || fail "$(cat "$tmp/profile.out")"
}

# together N FLAGS: continues the lines of $tmp/prompts, at most N side by side
together() {
    FAKE_CUDA_COUNT=$tmp/count program "$tmp/together" -e "$tmp/reference" --prompts "$tmp/prompts" --parallel "$@"
    good "$*" "$tmp/together"
    nothing_left "$*"
}
# Hundreds of prompts of unequal lengths: a text that ends makes room for the next. Nothing depends on how many are side by side,
# on the neighbours, or on who had the slot before: the tokens, the random numbers, the tokens that a penalty counts; the order
# is that of the file.
test_many_prompts() {
    reference
    local i flags each n=300
    for ((i = 0; i < n; i++)); do head -c $((i * 7 % 16)) <<<"$((i * 7919 % 1000))abcdefghijklmn" && echo; done >"$tmp/prompts"
    for flags in '--temperature 0 --num-tokens 6' '--seed 3 --num-tokens 100' '--seed 4 --num-tokens 9 --repetition-penalty 2' \
        '--temperature 0 --repetition-penalty 2' '--seed 5 --stop e --stop \n --stop a --stop u --stop o --stop i' '--num-tokens 1'; do
        # shellcheck disable=SC2086
        together 1 $flags
        mv "$tmp/together.out" "$tmp/one_by_one"
        want "the headers" "$(grep -a '^---- ' "$tmp/one_by_one")" "$(seq -f "---- %.0f of $n ----" $n)"
        for each in 2 7 64 100 256; do
            # shellcheck disable=SC2086
            together $each $flags
            cmp "$tmp/together.out" "$tmp/one_by_one"
            contains "; $each texts side by side; prompts: " "$tmp/together.err"
        done
        # shellcheck disable=SC2086
        FAKE_CUDA_EAGER=1 together 7 $flags
        cmp "$tmp/together.out" "$tmp/one_by_one"
    done
    # each text is what its prompt gives alone; the first one also draws as it does alone
    together 7 --temperature 0 --num-tokens 6
    csplit -s -n 3 -f "$tmp/text." "$tmp/together.out" '/^---- /' '{*}'
    for i in 1 9 150 300; do
        sed -n "${i}p" "$tmp/prompts" >"$tmp/prompt"
        program "$tmp/alone" -e "$tmp/reference" --prompt-file "$tmp/prompt" --temperature 0 --num-tokens 6
        cmp <(tail -n +2 "$tmp/text.$(printf %03d "$i")") "$tmp/alone.out"
    done
    # the penalty and the stop strings change something
    together 7 --temperature 0
    cp "$tmp/together.out" "$tmp/plain.out"
    together 7 --temperature 0 --repetition-penalty 2
    ! cmp -s "$tmp/together.out" "$tmp/plain.out" || fail "the penalty has no effect"
    together 7 --temperature 0 --stop e
    [ "$(wc -c <"$tmp/together.out")" -lt "$(wc -c <"$tmp/plain.out")" ] || fail "the stop string has no effect"
}

# with little memory, fewer texts are side by side, and the result is the same
test_many_samples_with_little_memory() {
    setup
    local mb last=0 now flags=(--recipe llmc -e d6 --layers 2 --channels 128 --heads 2 --prompt-ids "$(seq -s ' ' 1000)" --num-samples 300 --num-tokens 3)
    program "$tmp/plenty" "${flags[@]}" --seed 1 --parallel 8
    good "with enough memory" "$tmp/plenty"
    for mb in 700 740 2000; do
        FAKE_CUDA_MEMORY=${mb}000000 program "$tmp/less" "${flags[@]}" --seed 1 --parallel 256
        good "$mb MB" "$tmp/less"
        cmp "$tmp/less.out" "$tmp/plenty.out"
        now=$(sed -nE 's/.*; ([0-9]+) texts side by side.*/\1/p' "$tmp/less.err")
        [ "$now" -gt "$last" ] || fail "$mb MB: $now side by side, with less it was $last"
        last=$now
    done
    want "texts side by side" "$last" 256
}

# the progress is told while texts are complete and others are not
test_progress() {
    reference
    seq 30 >"$tmp/prompts"
    LLMC_PROGRESS_SECONDS=0 together 4 --num-tokens 5
    want "the first and the last line" "$(grep -E '^\[[0-9]+ of 30 texts, [0-9]+ tokens, [0-9]+ tok/s, ETA [0-9dhms]+\]$' "$tmp/together.err" |
        sed -n 's/ texts.*//;1p;$p')" "[1 of 30
[29 of 30"
    together 4 --num-tokens 5
    ! grep 'ETA' "$tmp/together.err" || fail "progress of a short run"
}

# profile empty|nvml|nvml_old [FLAGS]: runs --profile with what stands for the driver's library; its output goes to $tmp/profile.out,
# and what it says of clock and power to $tmp/said
profile() {
    setup
    if [ ! -e "$tmp/nvml_old/libnvidia-ml.so.1" ]; then
        mkdir "$tmp/empty" "$tmp/nvml" "$tmp/nvml_old"
        : >"$tmp/empty/libnvidia-ml.so.1" # cannot be loaded, and hides the one of a real driver
        local compile=("$CC" -O1 -Wall -Wextra -Werror -shared -fPIC dev/test/stand-ins/fake_nvml.c)
        "${compile[@]}" -o "$tmp/nvml/libnvidia-ml.so.1"
        "${compile[@]}" -DOLD -o "$tmp/nvml_old/libnvidia-ml.so.1"
    fi
    set_flags "$tmp/profiled" 4 "${@:2}"
    LD_LIBRARY_PATH=$tmp/$1 FAKE_CUDA_COUNT=$tmp/count ok profile "${flags[@]}" --profile
    sed -n '/^mean of 5 steps$/,/^roofline measured here: /p' "$tmp/profile.out" | sed '1d;$d' >"$tmp/said"
    want "the table's sum" "$(grep -c '^sum ' "$tmp/profile.out")" 1
}

# --profile: clock and power of the card are those that NVML gives, and the table is there without it
test_profile() {
    local num mhz watts
    export FAKE_NVML_COUNT=$tmp/readings FAKE_CUDA_SLOW_MS=10 # so that the steps take a tenth of a second
    FAKE_NVML_CLOCK=1980,1740,1755 FAKE_NVML_POWER=655000,702400 FAKE_NVML_REASONS=4 profile nvml
    read -r num mhz watts <<<"$(awk '/clock/ { printf "%d %.0f ", $2, $3 / $2 } /power/ { printf "%.0f", $3 / $2 / 1000 }' "$tmp/readings")"
    [ "$num" -ge 3 ] || fail "only $num readings"
    want "clock and power" "$(cat "$tmp/said")" \
        "SM clock $mhz MHz (1740 to 1980), board power $watts W (at most 702) of 700 W allowed, $num readings
clock held down by the power limit"
    FAKE_NVML_REASONS=1 profile nvml
    contains "SM clock 1755 MHz (1755 to 1755), board power 655 W (at most 655) of 700 W allowed, " "$tmp/said"
    want "the second line" "$(tail -n 1 "$tmp/said")" "nothing held the clock down"
    FAKE_NVML_REASONS=4,0x68,0,0 profile nvml
    want "two reasons" "$(tail -n 1 "$tmp/said")" "$(awk '/clock/ {
        printf "clock held down by the power limit in %.0f%% of the readings, by the temperature in %.0f%% of the readings",
            100 * int(($2 + 3) / 4) / $2, 100 * int(($2 + 2) / 4) / $2 }' "$tmp/readings")"
    FAKE_NVML_REASONS=0x84 FAKE_NVML_POWER=300000 profile nvml_old
    contains "board power 300 W (at most 300) of 700 W allowed" "$tmp/said"
    contains "clock held down by the power limit, by the power supply (power brake)" "$tmp/said"
}

# what NVML does not give is said in a line, and everything else is printed
test_profile_without_nvml() {
    local unknown='clock and power are not known: '
    profile empty
    grep -qE "^${unknown}NVML, the driver's library: .*libnvidia-ml.so.1: " "$tmp/said" || fail "$(cat "$tmp/said")"
    want "lines" "$(wc -l <"$tmp/said")" 1
    FAKE_NVML_BUS_ID=0000:01:00.0 profile nvml
    want "another card" "$(cat "$tmp/said")" "${unknown}NVML does not give the card at 0000:3B:00.0: Not Found"
    FAKE_NVML_FAIL=nvmlInit_v2:9 profile nvml
    want "no driver" "$(cat "$tmp/said")" "${unknown}NVML, the driver's library, does not start: Unknown Error"
    FAKE_NVML_FAIL=nvmlDeviceGetClockInfo:3 profile nvml
    want "no clock" "$(cat "$tmp/said")" "${unknown}NVML does not give the card's clock: Not Supported"
    FAKE_NVML_FAIL=nvmlDeviceGetPowerUsage:3 profile nvml_old
    contains ", board power not known of 700 W allowed, " "$tmp/said"
    FAKE_NVML_FAIL=nvmlDeviceGetEnforcedPowerLimit:3 profile nvml
    contains ", board power 655 W (at most 655), " "$tmp/said"
    FAKE_NVML_FAIL=nvmlDeviceGetCurrentClocksEventReasons:3 profile nvml
    want "no reasons" "$(tail -n 1 "$tmp/said")" "the driver does not say whether something held the clock down"
}

# The last line of --profile: the rooflines of all operations, of which matmuls are most here. Of the others, the stand-in
# takes no time, so that the table does not tell their rooflines.
test_perfect_step() {
    profile empty --channels 256 --heads 4 -d 2048
    tail -n 1 "$tmp/profile.out" | grep -qE '^a perfect step, .*, would take [0-9.]+ ms; measured: [0-9.]+ ms, [0-9.]+ times as long$' ||
        fail "$(tail -n 1 "$tmp/profile.out")"
    awk '/^matmul_(forward|backward_input|backward_weight) / { roof += $(NF - 4) * $NF / 100 } # without the % sign
         /^sum / { sum = $3 }
         /^a perfect step/ { perfect = $12; measured = $15; ratio = $17 }
         END {
             print "perfect", perfect, "matmuls", roof, "measured", measured, "sum", sum, "ratio", ratio
             exit !(roof > 0 && perfect > roof && perfect < 1.5 * roof && measured == sum && ratio > 0 &&
                    ratio / (measured / perfect) > 0.98 && ratio / (measured / perfect) < 1.02)
         }' "$tmp/profile.out" >"$tmp/log" || fail "$(cat "$tmp/log")"
}

# graphs, several micro-batches and recomputation change no bit of what a graph of micro-batches gives
test_graph() {
    reference
    train "$tmp/no_graph" 8 --no-graph
    good "without graphs" "$tmp/no_graph"
    same "$tmp/no_graph" 8
    want "the log without times" "$(losses "$tmp/no_graph")" "$(losses "$tmp/reference")"
}

# The host waits for the card where it must: the results are the same whether the card does everything at once or as late as
# possible.
test_waiting() {
    reference
    local several=(-d 96 -n 4) # several steps without a pause, of an odd number of micro-batches
    train "$tmp/lazy" 8 "${several[@]}"
    FAKE_CUDA_EAGER=1 train "$tmp/eager" 8 "${several[@]}"
    good "a card that is fast" "$tmp/eager"
    same "$tmp/eager" 8 "$tmp/lazy"
    want "the log without times" "$(losses "$tmp/eager")" "$(losses "$tmp/lazy")"
    FAKE_CUDA_EAGER=1 program "$tmp/sampled_eagerly" -e "$tmp/reference" --prompt 'int ' --num-samples 3 --num-tokens 12
    program "$tmp/sampled" -e "$tmp/reference" --prompt 'int ' --num-samples 3 --num-tokens 12
    cmp "$tmp/sampled_eagerly.out" "$tmp/sampled.out"
}

# A resumed run takes the matmul algorithms that the run before it had chosen, though others are faster now.
test_matmul_choices() {
    reference
    local out=$tmp/choices
    cp -r "$tmp/reference" "$out"
    rm -r "$out"/step_0000000[5-8]
    cp -r "$out" "$out.lost"
    FAKE_CUDA_FASTEST=2 resume "$out"
    rm "$out.lost/matmul_choices.txt" # without them, the last bits differ: the comparison can fail
    XDG_CACHE_HOME=$tmp/nothing_cached FAKE_CUDA_FASTEST=2 train "$out.lost" 8 -y 1
    good "resuming" "$out.lost"
    ! (same "$out.lost" 8) >/dev/null || fail "the choices make no difference"
}

# What a run has timed is kept in the user's cache folder: the next run of the same program on such a card times nothing, and has
# the same bits, though other algorithms are faster now.
test_choices_cache() {
    setup
    local out=$tmp/cached file each untimed pids=()
    local -x XDG_CACHE_HOME=$tmp/cached_choices
    FAKE_CUDA_COUNT=$tmp/count train "$out.0" 4 --no-tune
    untimed=$(calls cublasLtMatmul)
    FAKE_CUDA_COUNT=$tmp/count train "$out.1" 4
    good "the first run" "$out.1"
    file=$(echo "$XDG_CACHE_HOME"/train_gpt2cu/*)
    contains "matmul choices: what this run times is kept in $file" "$out.1.out"
    [ "$(calls cublasLtMatmul)" -gt "$untimed" ] || fail "nothing was timed"
    FAKE_CUDA_FASTEST=2 FAKE_CUDA_COUNT=$tmp/count train "$out.2" 4
    good "the second run" "$out.2"
    want "matmuls of the second run" "$(calls cublasLtMatmul)" "$untimed"
    contains "matmul choices: $(grep -c '^[0-9]' "$file") from $file; --tune again times them again" "$out.2.out"
    same "$out.2" 4 "$out.1"
    cmp "$out.2/matmul_choices.txt" "$out.1/matmul_choices.txt"
    cp "$file" "$tmp/before"
    # measured again, for this run and later ones
    FAKE_CUDA_FASTEST=2 FAKE_CUDA_COUNT=$tmp/count train "$out.3" 4 --tune again
    [ "$(calls cublasLtMatmul)" -gt "$untimed" ] || fail "--tune again does not time"
    ! (same "$out.3" 4 "$out.1") >/dev/null || fail "the choices make no difference"
    want "lines" "$(wc -l <"$file")" "$(wc -l <"$tmp/before")"
    train "$out.4" 4
    same "$out.4" 4 "$out.3"
    # a resumed run keeps its own, whatever is in the cache
    cp -r "$out.3" "$out.5"
    XDG_CACHE_HOME=$tmp/nothing_cached train "$out.5" 6 -y 1
    cp "$tmp/before" "$file"
    train "$out.3" 6 -y 1
    contains "matmul choices: $(grep -c '^[0-9]' "$out.3/matmul_choices.txt") of the run itself" "$out.3.out"
    same "$out.3" 6 "$out.5"
    # --no-tune reads and writes none
    cp "$tmp/before" "$file"
    train "$out.6" 4 --no-tune
    ! grep 'matmul choices' "$out.6.out" || fail "--no-tune has choices"
    cmp "$file" "$tmp/before"
    # a file that is no good is replaced, after one note
    for each in 's/^[0-9]* /7 /' 's/Fake GPU/Other GPU/' 'd'; do
        sed -i "$each" "$file"
        rm -r "$out.1"
        train "$out.1" 4
        want "notes after $each" "$(cat "$out.1.err")" "note: $file: $(grep -oE 'is damaged|of another GPU, library or version' "$out.1.err"): it is not used, and matmuls are timed again"
        same "$out.1" 4 "$out.2"
        cmp <(sort "$file") <(sort "$tmp/before")
    done
    # runs that begin at the same time, and would choose differently, have the same bits
    rm -r "$XDG_CACHE_HOME" "$out".[0-6]
    for each in 0 1 2; do
        FAKE_CUDA_FASTEST=$each train "$out.$each" 4 &
        pids+=($!)
    done
    wait "${pids[@]}"
    same "$out.1" 4 "$out.0"
    same "$out.2" 4 "$out.0"
    want "files" "$(ls "$XDG_CACHE_HOME/train_gpt2cu")" "${file##*/}"
}

# without a folder to write to, the run goes on
test_choices_without_cache() {
    setup
    local out=$tmp/uncached
    : >"$tmp/not_a_folder"
    XDG_CACHE_HOME=$tmp/not_a_folder train "$out.1" 2
    want "the exit code" "$status" 0
    want "notes" "$(cat "$out.1.err")" \
        "note: choices of matmul algorithms cannot be kept: $tmp/not_a_folder/train_gpt2cu: Not a directory; the last bits of the next run may differ"
    XDG_CACHE_HOME='' HOME=relative train "$out.2" 2
    want "the run without a home" "$status: $(cat "$out.2.err")" "0: "
    ! grep 'matmul choices' "$out.2.out" || fail "choices without a folder"
    XDG_CACHE_HOME='' HOME=$tmp/home train "$out.3" 2
    want "files in ~/.cache" "$(ls "$tmp/home/.cache/train_gpt2cu" | sed 's/_[0-9a-f]*[.]/_X./')" matmul_choices_X.txt
}

# tuned_rows FILE ROW...: writes a file of kernel configurations, from rows of OP,GPU,DTYPE,B,T,C,NH,V,CONFIG
tuned_rows() {
    echo "op,gpu,dtype,B,T,C,NH,V,config,median_ms,default_ms" >"$1"
    printf '%s,1.00000,2.00000\n' "${@:2}" >>"$1"
}

# --tuned: kernels are launched with the configurations of the file, which are saved beside the checkpoints. A resumed run
# goes on with them, or tells what another file changes.
test_tuned() {
    reference
    local file=$tmp/tuned.csv other=$tmp/other.csv out=$tmp/tuned V used
    V=$(sed -n 's/.* vocabulary \([0-9]*\): .*/\1/p' "$tmp/reference.new.out")
    used=("layernorm_forward,Fake GPU,bf16,1,16,32,2,$V,512" "layernorm_forward,Fake GPU,bf16,2,16,32,2,$V,256"
        "matmul_backward_bias,Fake GPU,bf16,2,16,32,2,$V,128" "fused_classifier,Fake GPU,bf16,2,16,768,12,$V,1024"
        "global_norm,Fake GPU,bf16,2,16,768,12,$V,128" "adamw,Fake GPU,bf16,2,16,768,12,$V,0")
    tuned_rows "$file" "${used[@]}" "layernorm_backward,Fake GPU,bf16,2,16,64,2,$V,128" \
        "layernorm_backward,Other GPU,bf16,2,16,32,2,$V,128" "layernorm_backward,Fake GPU,fp32,2,16,32,2,$V,128"
    FAKE_CUDA_COUNT=$tmp/count train "$out" 8 --tuned "$file"
    good "the run" "$out"
    want "layernorm_forward, in training and for one token" "$(blocks layernorm_forward_kernel7)" "256 512 "
    want "matmul_backward_bias, 128 columns and others" "$(blocks matmul_backward_bias_kernel7)" "128 512 "
    want "fused_classifier" "$(blocks 'fused_classifier_kernel[67]')" "1024 "
    want "global_norm" "$(blocks global_norm_kernel5)" "128 "
    want "adamw, where the default is the fastest" "$(blocks adamw_kernel4)" "128 "
    want "layernorm_backward, which has no row here" "$(blocks layernorm_backward_kernel11)" "32 "
    tuned_rows "$tmp/want.csv" "${used[@]}"
    cmp "$out/tuned.csv" "$tmp/want.csv"
    ! (same "$out" 8) >/dev/null || fail "the configurations make no difference"

    cp -r "$out" "$out.part"
    rm -r "$out.part"/step_0000000[5-8]
    cp -r "$out.part" "$out.lost"
    cp -r "$out.part" "$out.other"
    FAKE_CUDA_COUNT=$tmp/count train "$out.part" 8 -y 1
    good "resuming" "$out.part"
    same "$out.part" 8 "$out"
    want "the log without times" "$(losses "$out.part")" "$(losses "$out")"
    want "global_norm, resumed" "$(blocks global_norm_kernel5)" "128 "
    cmp "$out.part/tuned.csv" "$tmp/want.csv"
    ! grep 'note: --tuned' "$out.part.out" || fail "a note without a change"
    rm "$out.lost/tuned.csv" # without it, the last bits differ: the comparison can fail
    train "$out.lost" 8 -y 1
    good "resuming" "$out.lost"
    ! (same "$out.lost" 8 "$out") >/dev/null || fail "the configurations make no difference"

    cp -r "$out.other" "$out.same"
    train "$out.same" 8 -y 1 --tuned "$file"
    good "resuming" "$out.same"
    same "$out.same" 8 "$out"
    ! grep 'note: --tuned' "$out.same.out" || fail "a note without a change"
    tuned_rows "$other" "global_norm,Fake GPU,bf16,2,16,768,12,$V,256"
    FAKE_CUDA_COUNT=$tmp/count train "$out.other" 8 -y 1 --tuned "$other"
    good "resuming" "$out.other"
    want "global_norm, with another file" "$(blocks global_norm_kernel5)" "256 "
    want "the notes" "$(grep -ac 'note: --tuned changes ' "$out.other.out")" 4
    contains "note: --tuned changes the configuration of global_norm from 128 to 256: last bits may differ from here on" "$out.other.out"
    contains "note: --tuned changes the configuration of fused_classifier from 1024 to 512: last bits" "$out.other.out"
    cmp "$out.other/tuned.csv" "$other"
    cp -r "$tmp/reference" "$out.late" # a run that had no file
    train "$out.late" 9 -y 1 --tuned "$other"
    good "resuming" "$out.late"
    want "the notes" "$(grep -a 'note: --tuned' "$out.late.out")" \
        "note: --tuned changes the configuration of global_norm from 512 to 256: last bits may differ from here on"
}

# a file of kernel configurations that cannot be used is refused before anything is written, one for another GPU only noted
test_tuned_refused() {
    reference
    local out=$tmp/refused file=$tmp/refused.csv each
    for each in "layernorm_forward,Fake GPU,bf16,2,16,32,2,9,96" "adamw,Fake GPU,bf16,2,16,32,2,9,256" \
        "layernorm,Fake GPU,bf16,2,16,32,2,9,64" "adamw,Fake GPU,bf16,2,16,32,2,9"; do
        tuned_rows "$file" "$each"
        train "$out" 2 --tuned "$file"
        refused "$each" "$out" "--tuned $file:2: " '; delete the line'
        [ ! -e "$out" ] || fail "$each: has written to -o"
    done
    train "$out" 2 --tuned "$tmp/text"
    refused "a text" "$out" "--tuned $tmp/text:1: is not 'op,gpu,dtype,"
    train "$out" 2 --tuned "$tmp/not_there"
    refused "no file" "$out" "--tuned $tmp/not_there: No such file"
    tuned_rows "$file" "adamw,Other GPU,bf16,2,16,32,2,9,64"
    FAKE_CUDA_COUNT=$tmp/count program "$out" -e "$tmp/reference" --prompt 'int ' --num-tokens 5 --tuned "$file"
    want "exit code" $status 0
    contains "note: $file has no row for Fake GPU in bf16" "$out.err"
    cp -r "$tmp/reference" "$out.damaged"
    head -c 70 "$file" >"$out.damaged/tuned.csv"
    train "$out.damaged" 9 -y 1
    refused "a damaged file beside the checkpoints" "$out.damaged" "$out.damaged/tuned.csv:2: the file is cut off here"
}

# stochastic rounding goes on with the same random numbers
test_stochastic_rounding() {
    reference
    local out=$tmp/rounded
    train "$out.whole" 8 --stochastic-rounding
    train "$out" 4 -x 8 -n 4 --stochastic-rounding
    rm -r "$out/step_00000008"
    train "$out" 8 -y 1 --stochastic-rounding
    good "resuming" "$out"
    same "$out" 8 "$out.whole"
    want "the log without times" "$(losses "$out")" "$(losses "$out.whole")"
    ! cmp -s "$out/step_00000008/model.safetensors" "$tmp/reference/step_00000008/model.safetensors" || fail "rounding has no effect"
}

# Muon, with stochastic rounding: resumed with the same bits, and not with the other optimizer
test_muon() {
    reference
    local name out=$tmp/muon
    train "$out.whole" 8 --optimizer muon --muon-learning-rate 0.02 --stochastic-rounding
    good "Muon" "$out.whole"
    # 86.1M parameters, of which 84.9M are in matrices: 12 bytes each, or 8 in Muon's matrices
    for name in "AdamW 1.03 GB" "Muon and AdamW 0.69 GB"; do
        FAKE_CUDA_MEMORY=1000000000 program "$out.plan" --verbose -i "$tmp/data/*_train_*.bin" -e d12 -b 4 -t 1024 -x 1 --optimizer \
            "$([[ $name != Muon* ]] && echo adamw || echo muon)"
        contains ", $name, activations" "$out.plan.out"
    done
    train "$out" 4 -x 8 -n 4 --optimizer muon --muon-learning-rate 0.02 --stochastic-rounding
    rm -r "$out/step_00000008"
    train "$out" 8 -y 1
    refused "AdamW for a run with Muon" "$out" 'step_00000004 was saved with --optimizer muon'
    train "$out" 8 -y 1 --optimizer muon --muon-learning-rate 0.02 --stochastic-rounding
    good "resuming" "$out"
    same "$out" 8 "$out.whole"
    want "the log without times" "$(losses "$out")" "$(losses "$out.whole")"
    train "$out.other" 8 --optimizer muon --stochastic-rounding
    ! cmp -s "$out/step_00000008/model.safetensors" "$out.other/step_00000008/model.safetensors" || fail "Muon's rate has no effect"
}

# In fp16 the first gradients overflow, until the loss scale is low enough; it is a part of the state.
test_fp16() {
    [ -n "$full" ] || skip "make test-full builds it"
    setup
    local half=$tmp/half each
    mkdir -p "$half"
    build_on_stand_in "$half" FP16
    local train=$half/train_gpt2cu small=(-b 1 -t 4 -d 4)
    train "$half/whole" 8 "${small[@]}"
    good "the run" "$half/whole"
    want "overflows" "$(grep -c 'loss scale lowered' "$half/whole.out")" 2
    contains "2 of 8 steps were skipped" "$half/whole.out"
    ! grep "CUDA cores" "$half/whole.out" || fail "the line above, on compute capability 8.0"
    FAKE_CUDA_ARCH=75 train "$half/old" 8 "${small[@]}"
    good "a run on an old card" "$half/old"
    contains "note: attention runs on CUDA cores: tensor cores need compute capability 8.0 or later" "$half/old.out"
    for each in 1 2 5; do
        cp -r "$half/whole" "$half/part"
        ls -d "$half"/part/step_* | tail -n +$((each + 1)) | xargs rm -r
        train "$half/part" 8 "${small[@]}" -y 1
        good "resuming at step $each" "$half/part"
        same "$half/part" 8 "$half/whole"
        want "the log without times" "$(losses "$half/part")" "$(losses "$half/whole")"
        rm -r "$half/part"
    done
}

# The tests of test_program.sh and test_resume.sh with this program: of the first all but those whose model must learn a text,
# compute, or have probabilities;
# of the second those that are quick, and all in `make test-full`. They run beside the others, because they mostly wait.
learn=(hellaswag eval_values end_of_text_of_another_name stop_strings repetition_penalty min_p other_settings chat)
learns_nothing() { dev/test/program/test_program.sh --list | grep -vxF "$(printf '%s\n' "${learn[@]}")"; }
quick=(another_run_differs killed_after_each_step signals nohup broken_pipe file_size_limit step_is_dropped asynchronous data_goes
    owner damaged_checkpoint keep no_resume_no_overwrite)
[ -z "$full" ] || quick=()
start_shared() { # NAME [TEST...]
    local code=0
    LLMC_KILLS=${LLMC_KILLS:-$((full ? 100 : 20))} LLMC_OWNER_RUNS=4 TRAIN=$train "dev/test/program/test_$1.sh" "${@:2}" >"$tmp/$1.log" 2>&1 || code=$?
    echo $code >"$tmp/$1.code"
}
shared_test() { # NAME [TEST...]: waits for it, or runs it
    setup
    [ -e "$tmp/beside" ] || start_shared "$@"
    until [ -e "$tmp/$1.code" ]; do sleep 0.1; done
    [ "$(cat "$tmp/$1.code")" = 0 ] || { cat "$tmp/$1.log" && fail "$1 fails"; }
}
# shellcheck disable=SC2046
test_program() { wants_more && shared_test program $(learns_nothing); }
test_resume() { wants_more && shared_test resume "${quick[@]}"; }

# ---- no memory --------------------------------------------------------------------------

no_memory=cudaErrorMemoryAllocation

# Each allocation of GPU memory fails once. Either the run does without it, or one line says what is missing and what to do.
test_out_of_memory() {
    reference
    local at model=$tmp/reference/step_00000008 task out=$tmp/oom ended
    # shellcheck disable=SC2034 # prompt and eval are read through a nameref
    local prompt=(-e "$model" --prompt 'int ' --num-samples 9 --num-tokens 9) eval=(-e "$model" --eval "$tmp/text" -b 1)
    for task in train prompt eval; do
        ended=0
        for ((at = 1; ; at++)); do
            rm -rf "$out"
            set_flags "$out" 3
            [ $task = train ] || { local -n other=$task && flags=("${other[@]}"); }
            FAKE_CUDA_FAIL=cudaMalloc:$at:$no_memory FAKE_CUDA_COUNT=$tmp/count program "$out" "${flags[@]}"
            [ "$(calls cudaMalloc)" -ge $at ] || break # there is no such call
            case $status in
            0) nothing_left "allocation $at" ;;
            *)
                refused "$task, allocation $at" "$out" 'no GPU memory for ' '[0-9.]+ [GM]B' '; .*(smaller|fewer|other programs)'
                ended=$((ended + 1))
                [ ! -e "$out/log.jsonl" ] || fail "allocation $at: has begun to write to -o"
                ;;
            esac
            [ $task != train ] || [ $status -ne 0 ] || want "allocation $at: the last step" "$(newest "$out")" 3
        done
        [ $at -gt 2 ] && [ $ended -ge 2 ] || fail "$task: only $ended of $at allocations end it"
    done
}

# Without pinned memory, training copies more slowly, and that is all. Generation needs it, because a kernel writes to it.
test_no_pinned_memory() {
    reference
    local name each
    for name in cudaHostAlloc cudaHostRegister; do
        for each in "1+" 1 2 3; do
            rm -rf "$tmp/unpinned"
            FAKE_CUDA_FAIL=$name:$each:$no_memory FAKE_CUDA_COUNT=$tmp/count train "$tmp/unpinned" 8
            good "a run without $name" "$tmp/unpinned"
            nothing_left "a run without $name"
            same "$tmp/unpinned" 8
        done
    done
    FAKE_CUDA_FAIL=cudaHostAlloc:1+:$no_memory program "$tmp/unpinned" -e "$tmp/reference" --prompt 'int ' --num-tokens 5
    want "exit code of sampling without pinned memory" $status 1
    grep -q '^error: no pinned memory for 1 text of up to' "$tmp/unpinned.err" || fail "no reason: $(cat "$tmp/unpinned.err")"
}

# a sample in the training is left out if there is no memory for it, and the run goes on
test_no_memory_for_a_sample() {
    reference
    local at
    FAKE_CUDA_COUNT=$tmp/count train "$tmp/unsampled" 8 -s 0
    at=$(($(calls cudaMalloc) + 2)) # nothing but samples allocates more: one before the first step, which loads their kernels
    rm -r "$tmp/unsampled"
    FAKE_CUDA_FAIL=cudaMalloc:$at+:$no_memory FAKE_CUDA_COUNT=$tmp/count train "$tmp/unsampled" 8
    good "the run" "$tmp/unsampled"
    nothing_left "the run"
    contains "no sample: no GPU memory" "$tmp/unsampled.out"
    same "$tmp/unsampled" 8
}

# A card whose memory is mostly taken: the message names flags, which do fit. The more is free, the less has to be given up.
test_little_memory() {
    setup
    local mb advice words fitted=0 hopeless=0 kept=0
    for ((mb = 720; mb <= 840; mb += full ? 10 : 20)); do
        set_flags "$tmp/little" 1 --layers 4 --channels 192 --positions 2048 -b 2 -t 2048 -d 4096 -j "$tmp/data/*_train_*.bin" -v 0 -s 0 -n 0
        rm -rf "$tmp/little"
        export FAKE_CUDA_MEMORY=${mb}000000
        program "$tmp/little" "${flags[@]}"
        if [ $status -eq 0 ]; then
            kept=$((kept + 1))
            continue
        fi
        refused "$mb MB" "$tmp/little" 'the run needs [0-9.]+ GB and Fake GPU has [0-9.]+ free; '
        [ ! -e "$tmp/little" ] || fail "$mb MB: has written to -o"
        if grep -q 'take a smaller model' "$tmp/little.err"; then
            [ $fitted -eq 0 ] || fail "$mb MB: less was enough before"
            hopeless=$((hopeless + 1))
            program "$tmp/little" "${flags[@]}" -r 2 -b 1
            [ $status -ne 0 ] || fail "$mb MB: -r 2 -b 1 would be enough"
            continue
        fi
        for advice in $(grep -oE -- '; (-[rbd] [0-9]+ )+' "$tmp/little.err" | tr ' ' _); do
            read -r -a words <<<"$(tr _ ' ' <<<"${advice#;}")"
            rm -rf "$tmp/little"
            program "$tmp/little" "${flags[@]}" "${words[@]}"
            [ $status -eq 0 ] || fail "$mb MB with ${words[*]}: $(tail -n 1 "$tmp/little.err")"
            fitted=$((fitted + 1))
        done
    done
    [ $hopeless -gt 0 ] && [ $fitted -gt 3 ] && [ $kept -gt 0 ] || fail "hopeless $hopeless, fitted $fitted, kept $kept"
}

# The memory in the plans of scripts/run_gpt2.sh is what the program asks for, to 0.05 GB: on a card that has too little, it says.
test_plans_of_run_gpt2() {
    setup
    local data=$tmp/plain need plan sizes=(124M d12 64 350M d24 32 774M d36 16 1558M d48 8 124M d12 8 1558M d48 1) i recipe
    mkdir "$data"
    # a shard without a vocabulary beside it, so of GPT-2's: magic, version, 4,000 tokens
    { printf '\210\330\064\001\001\000\000\000\240\017\000\000' && head -c $((1012 + 2 * 4000)) /dev/zero; } >"$data/x_train_1.bin"
    for recipe in adamw muon; do
        for ((i = 0; i < ${#sizes[@]}; i += 3)); do
            FAKE_CUDA_MEMORY=1000000000 program "$tmp/plan" -i "$data/*" -e "${sizes[i + 1]}" -b "${sizes[i + 2]}" -t 1024 -x 1 \
                --optimizer $recipe
            need=$(sed -n 's/.*the run needs \([0-9.]*\) GB.*/\1/p' "$tmp/plan.err")
            plan=$(scripts/run_gpt2.sh "${sizes[i]}" --recipe $recipe --plan -b "${sizes[i + 2]}" | sed -n 's/^1 .* \([0-9.]*\) GB .*/\1/p')
            awk -v a="${need:-0}" -v b="${plan:-9}" 'BEGIN { exit !(a - b <= 0.051 && b - a <= 0.051) }' ||
                fail "${sizes[i]}, $recipe, -b ${sizes[i + 2]}: the plan says '$plan' GB, the program '$need': $(tail -n 1 "$tmp/plan.err")"
        done
    done
}

# --plan, with a card and without one: the memory is what a run asks for, and one sequence more does not fit.
test_plan() {
    setup
    local out=$tmp/plan_of each B need needs=() flags=(-e d12 --optimizer adamw -t 1024)
    FAKE_CUDA_FAIL=cudaGetDeviceCount:1:cudaErrorNoDevice program "$out" --plan --memory 12GB
    good "--plan without a GPU" "$out"
    want "models" "$(grep -cE '^d[0-9]+, .* M parameters, -t 1024: (-b [0-9]+ at most|does not fit, -b 1) needs' "$out.out")" 5
    FAKE_CUDA_FAIL=cudaGetDeviceCount:1:cudaErrorNoDevice program "$out" --plan
    refused "no GPU and no size" "$out" 'there is no GPU here: --memory 24GB'
    FAKE_CUDA_MEMORY=12000000000 program "$out" --plan "${flags[@]}"
    good "--plan with a card" "$out"
    contains "plan for 12.0 GB that are free here" "$out.out"
    read -r B need <<<"$(sed -nE 's/^d12, .*: -b ([0-9]+) at most needs ([0-9.]+) GB.*/\1 \2/p' "$out.out")"
    printf '\210\330\064\001\001\000\000\000\001\000\002\000' >"$tmp/planned.bin" && head -c $((1012 + 2 * 131073)) /dev/zero >>"$tmp/planned.bin"
    for each in "$B" $((B + 1)); do
        FAKE_CUDA_MEMORY=1000000000 program "$out" "${flags[@]}" -i "$tmp/planned.bin" -b "$each" -x 1
        refused "-b $each" "$out" 'the run needs [0-9.]+ GB'
        needs+=("$(sed -nE 's/.*the run needs ([0-9.]+) GB.*/\1/p' "$out.err")")
    done
    want "the need of -b $B" "${needs[0]}" "$need"
    awk "BEGIN { exit !(${needs[0]} <= 12 && ${needs[1]} > 12) }" || fail "-b $B and one more need ${needs[*]} GB"
}

# Without -b, the recipe takes the largest micro-batch that divides -d and fits the card; twice as much does not fit. The run keeps it.
test_batch_of_the_recipe() {
    setup
    local out=$tmp/fitting data=$tmp/zeros flags each B
    mkdir "$data"
    # a shard without a vocabulary beside it, so of GPT-2's: magic, version, 131,073 tokens
    { printf '\210\330\064\001\001\000\000\000\001\000\002\000' && head -c $((1012 + 2 * 131073)) /dev/zero; } >"$data/x_train_1.bin"
    flags=(-e d6 --layers 1 --channels 32 --heads 2 --positions 1024 -i "$data/*" -d 16384 -s 0 -x 1)
    for each in 900000000:1 1300000000:4 2000000000:8 4000000000:16; do
        B=${each#*:}
        FAKE_CUDA_MEMORY=${each%:*} program "$out" "${flags[@]}"
        good "-b $B on a card with ${each%:*} bytes" "$out"
        contains "recipe pretrain: --batch-size $B " "$out.out"
        [ "$B" -lt 16 ] || continue # all of -d
        FAKE_CUDA_MEMORY=${each%:*} program "$out" "${flags[@]}" -b $((2 * B)) -r 0
        [ "$status" -ne 0 ] || awk -F '[:,]' '/^memory:/ { split($NF, w, " "); exit !(w[1] > 0.97 * w[5]) }' "$out.out" ||
            fail "-b $((2 * B)) fits, too"
    done
    FAKE_CUDA_MEMORY=2000000000 program "$out" "${flags[@]}" -o "$out.run"
    good "a run" "$out"
    FAKE_CUDA_MEMORY=4000000000 program "$out" "${flags[@]}" -o "$out.run" -y 1 -x 2
    good "its continuation" "$out"
    contains "recipe pretrain, resumed: --batch-size 8 " "$out.out"
}

# On an H100 the kernels depend on the shape. A micro-batch of training may be large enough for some that little validation data, or
# the questions of HellaSwag, are too small for.
test_hopper() {
    setup
    local flags
    mkdir "$tmp/large"
    head -c 40000 llmc/tokenizer.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/large/a" -v 3000 -s 9000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    for flags in "" "--fp8" "-ge 0" "-r 1" "-r 2 --optimizer muon"; do
        # shellcheck disable=SC2086
        FAKE_CUDA_ARCH=90 program "$tmp/hopper" --recipe llmc -e d12 --layers 1 --positions 1024 -b 4 -t 1024 -i "$tmp/large/*_train_*.bin" \
            -j "$tmp/large/*_val_*.bin" -x 2 -v 1 -s 1 -g 8 $flags
        good "a run on an H100, $flags" "$tmp/hopper"
        contains "note: little validation data: -b 2 instead of 4 there" "$tmp/hopper.out"
    done
}

# Without --overlap off, one GPU updates layers during the next forward pass. What else reads the weights or the moments comes
# first: checkpoints, samples and validation are the same, and so is a resumed run.
test_deferred_update() {
    setup
    export FAKE_CUDA_ARCH=90
    local step extra
    for extra in "--stochastic-rounding 1" "--stochastic-rounding 0" "-d 32 -w 0"; do
        # shellcheck disable=SC2086
        train "$tmp/at_once" 8 --layers 4 --overlap off $extra
        good "a run with --overlap off $extra" "$tmp/at_once"
        # shellcheck disable=SC2086
        FAKE_CUDA_COUNT=$tmp/count train "$tmp/deferred" 8 --layers 4 $extra
        good "a run with $extra" "$tmp/deferred"
        nothing_left "a run with $extra"
        grep -q '^block .*finish_deferred_update_kernel' "$tmp/count" || fail "$extra: no update was deferred"
        for ((step = 1; step <= 8; step++)); do same "$tmp/deferred" $step "$tmp/at_once"; done
        want "the log without times" "$(losses "$tmp/deferred")" "$(losses "$tmp/at_once")"
        rm -r "$tmp/at_once" "$tmp/deferred"
    done
    train "$tmp/at_once" 8 --layers 4 --overlap off
    train "$tmp/seldom" 8 --layers 4 -n 4 -s 5 -v 7
    good "a run with few checkpoints" "$tmp/seldom"
    same "$tmp/seldom" 4 "$tmp/at_once"
    same "$tmp/seldom" 8 "$tmp/at_once"
    rm -r "$tmp/seldom/step_00000008"
    train "$tmp/seldom" 8 --layers 4 --overlap on -n 4 -s 5 -v 7 -y 1
    good "a resumed run" "$tmp/seldom"
    same "$tmp/seldom" 8 "$tmp/at_once"
}

# bench_generation.sh measures what it says: all runs, a line for each, and a table that follows from their output; a run that
# fails is named. With the stand-in its figures mean nothing.
# shellcheck disable=SC2178,SC2128 # `small` is an array in another function only
test_bench_generation() {
    setup
    local rc=0 small='-e d6 --layers 1 --channels 32 --heads 2 --positions 1024' out=$tmp/generation.out made
    mkdir -p "$tmp/generation/gpt2_tokenizer"
    cat llmc/*.h >"$tmp/generation/tinyshakespeare.txt"
    cp "$tmp"/data/{vocab.json,merges.txt} "$tmp/generation/gpt2_tokenizer/"
    export LLMC_DATA=$tmp/generation BENCH_LARGE=$small BENCH_TOKENS=32 BENCH_LIMIT=60
    TRAIN=$train BENCH_MODEL="$small" dev/test/bench/bench_generation.sh --quick --logs "$tmp/generation/logs" >"$out" 2>&1 || rc=$?
    [ $rc -eq 0 ] || fail "exit code $rc: $(cat "$out")"
    want "lines of texts" "$(grep -cE '^-e d6 .*, (1|8|64) texts? +[0-9.]+ us a step$' "$out")" 4
    want "lines of prompts" "$(grep -cE '^-e d6 .*, 200 prompts(, --parallel (64|256)| in batches of 64) +[0-9.]+ tok/s$' "$out")" 3
    want "the end" "$(grep -oE '^[0-9]+ runs, [0-9]+ failed' "$out")" "11 runs, 0 failed"
    made=$(sed -nE 's|.*, ([0-9.]+) tok/s.*|\1|p' "$tmp/generation/logs/parallel64.err")
    grep -qE -- "--parallel 64 +$made tok/s$" "$out" || fail "the rate is not the program's, $made: $(cat "$out")"
    TRAIN=$train BENCH_MODEL="$small --channels 33" dev/test/bench/bench_generation.sh --quick >"$out" 2>&1 || rc=$?
    want "the exit code when runs fail" "$rc: $(grep -c 'FAILED: error' "$out")" "1: 7"
}

# bench_weights8.sh prints the losses that the program prints; a format that the card has not is named.
test_bench_weights8() {
    setup
    local rc=0 out=$tmp/weights8.out logs=$tmp/weights8/logs weights loss acc
    mkdir -p "$tmp/weights8/gpt2_tokenizer"
    cat llmc/*.h >"$tmp/weights8/tinyshakespeare.txt"
    printf '%s\n' 'the sea' 1 'is dry' 'is wet' 'is a tree' 'sings' 'the sun' 0 'is hot' 'is cold' 'is old' 'is a dog' \
        >"$tmp/weights8/hellaswag_val.txt"
    cp "$tmp"/data/{vocab.json,merges.txt} "$tmp/weights8/gpt2_tokenizer/"
    TRAIN=$train TOOLS=$BIN_DIR/dev/data LLMC_DATA=$tmp/weights8 \
        BENCH_MODEL='-e d6 --layers 1 --channels 32 --heads 2 --positions 64 -b 2 -t 64 -x 2' dev/test/bench/bench_weights8.sh --logs "$logs" \
        >"$out" 2>&1 || rc=$?
    want "the exit code" "$rc: $(cat "$out")" "1: $(cat "$out")"
    for weights in full int8; do
        loss=$(sed -nE 's/.*"loss": ?([0-9.]+).*/\1/p' "$logs/$weights.out")
        acc=$(sed -nE 's/.*"acc_per_token": ?([0-9.]+).*/\1/p' "$logs/$weights.out")
        want "loss and HellaSwag with $weights" "$(awk -v w=$weights '$1 == w { print $2, $4 }' "$out")" "$(printf %.5f "$loss") $acc"
        [ -n "$acc" ] || fail "no accuracy with $weights: $(cat "$logs/$weights.out")"
    done
    grep -qE '^fp8 FAILED: error: .*8\.9' "$out" || fail "fp8 is not refused: $(cat "$out")"
}

# ---- a card that fails ------------------------------------------------------------------

# From the N-th call on, the card is lost. The program must end with one line of error, and not hang; the checkpoints that it
# has written must be whole. A new start goes on bit for bit.
lost_at() { # N SAVE_EVERY ERROR MESSAGE
    local out=$tmp/lost_$1
    FAKE_CUDA_FAIL=any:$1:$3 train "$out" 4 --no-tune -n "$2"
    refused "call $1" "$out" "$4"
    [ ! -e "$out" ] || [ -z "$(ls -A "$out" | grep '^\.')" ] || fail "call $1 leaves hidden directories: $(ls -A "$out")"
    train "$out" 4 -y 1 --no-tune
    good "resuming after call $1" "$out"
    ! grep 'passed over' "$out.out" || fail "call $1: a checkpoint is damaged"
    same "$out" 4 "$tmp/untuned"
    want "call $1: the log without times" "$(losses "$out")" "$(losses "$tmp/untuned")"
    rm -r "$out" "$out.out" "$out.err"
}
test_lost_card() {
    reference
    local total of_every_second at stride step=0 jobs=0 error every
    FAKE_CUDA_COUNT=$tmp/count train "$tmp/untuned_2" 4 --no-tune -n 2
    of_every_second=$(calls any)
    FAKE_CUDA_COUNT=$tmp/count train "$tmp/untuned" 4 --no-tune
    good "the run" "$tmp/untuned"
    total=$(calls any)
    [ "$total" -gt 1000 ] || fail "only $total calls"
    stride=$((full ? 1 : total / 25))
    for ((at = 1; at <= total; at += stride)); do
        error=(cudaErrorECCUncorrectable "uncorrectable ECC error")
        [ $((step++ % 2)) -eq 0 ] || error=(cudaErrorLaunchFailure "unspecified launch failure")
        every=1
        [ $at -gt "$of_every_second" ] || every=$((step / 2 % 2 + 1))
        (lost_at $at $every "${error[@]}") >"$tmp/lost_$at.log" 2>&1 && rm "$tmp/lost_$at.log" &
        [ $((++jobs)) -lt 2 ] || { wait -n || break; jobs=1; }
    done
    wait
    ! cat "$tmp"/lost_*.log 2>/dev/null || fail "see above"
}

# The message names what the card says, also where something else is more common.
test_error_at_the_start() {
    setup
    local error
    for error in cudaErrorECCUncorrectable cudaErrorMemoryAllocation cudaErrorDevicesUnavailable; do
        FAKE_CUDA_FAIL=cudaFuncGetAttributes:1:$error program "$tmp/start" -e d6 --prompt x
        refused $error "$tmp/start" $error
    done
    FAKE_CUDA_FAIL=cudaFuncGetAttributes:1:cudaErrorNoKernelImageForDevice program "$tmp/start" -e d6 --prompt x
    refused "another card" "$tmp/start" 'not built for this GPU \(compute capability 8.0\)' 'GPU_COMPUTE_CAPABILITY=80'
}

# A matmul that fails while it is timed is passed over; one that fails in a step ends the run.
test_failing_matmul() {
    reference
    FAKE_CUDA_FAIL=cublasLtMatmul:60:14 train "$tmp/matmul" 8 --tune again # an algorithm that does not run here
    good "the run" "$tmp/matmul"
    FAKE_CUDA_FAIL=cublasLtMatmul:20+:13 train "$tmp/matmul2" 8 --no-tune
    refused "a failing matmul" "$tmp/matmul2" 'CUBLAS_STATUS_EXECUTION_FAILED'
}

test_no_device() {
    setup
    local task
    for task in "-e d6 --prompt x" "-i none.bin -o $tmp/none" "-e d6 --eval x" "-e d6 --bench"; do
        # shellcheck disable=SC2086
        CUDA_VISIBLE_DEVICES='' program "$tmp/nodevice" $task
        refused "$task" "$tmp/nodevice" 'no usable GPU: no CUDA-capable device is detected; ./train_gpt2 is the same program'
        # shellcheck disable=SC2086
        FAKE_CUDA_FAIL=cudaGetDeviceCount:1+:cudaErrorInsufficientDriver program "$tmp/nodevice" $task
        refused "$task" "$tmp/nodevice" 'no usable GPU: no NVIDIA driver, or one older than this program.s CUDA' 'train_gpt2'
    done
    [ ! -e "$tmp/none" ] || fail "has written to -o"
}

# ---- ends -------------------------------------------------------------------------------

# Sends a signal at a random moment after a random step: in a step, a graph capture, a validation or a save. The last complete step
# (after SIGKILL, an earlier step) must be saved, and the resumed run must be bitwise identical.
end_at_random() { # NUMBER
    local signals=(INT TERM HUP USR1 PIPE KILL) signal out=$tmp/end_$1 pid code=0 steps saved n step=$((RANDOM % 8))
    signal=${signals[$1 / 3 % 6]}
    local every=$(($1 % 3 + 1))
    set_flags "$out" 8 -n $every
    FAKE_CUDA_SLOW_MS=15 "$train" "${flags[@]}" >"$out.out" 2>"$out.err" </dev/null &
    pid=$!
    for ((n = 0; n < 3000 && step > 0; n++)); do
        ! grep -q "^step *$step/" "$out.out" || break
        sleep 0.01
    done
    sleep "0.$(printf %02d $((RANDOM % (step ? 10 : 60))))"
    kill "-$signal" $pid 2>/dev/null || true
    wait $pid || code=$?
    echo "SIG$signal: exit code $code; $(tail -n 1 "$out.out"); $(cat "$out.err")"
    steps=$(grep -c '"type":"train"' "$out/log.jsonl" 2>/dev/null || true)
    saved=$(newest "$out")
    case $signal:$code in
    *:0 | PIPE:141) [ "${steps:-0}" -eq 0 ] || [ "${saved:-0}" -eq "$steps" ] || fail "step $steps is not saved, step ${saved:-0} is" ;;
    KILL:137) [ "${saved:-0}" -ge $((${steps:-0} - 2 * every)) ] || fail "step $steps, and only step ${saved:-0} is saved" ;;
    *:1[2-4]?) [ -z "$saved" ] && [ "${steps:-0}" -eq 0 ] || fail "ends by the signal after step $steps" ;; # before the run began
    *) fail "exit code $code" ;;
    esac
    [ $code -ne 0 ] || [ ! -s "$out.err" ] || contains "stopping: the run finishes " "$out.err"
    resume "$out"
    echo "${saved:-0}" >"$tmp/end_$1.step"
    rm -r "$out"
}
test_ends() {
    reference
    local i running=0
    RANDOM=$((full ? RANDOM : 7))
    for ((i = 0; i < ends; i++)); do
        (end_at_random $i) >"$tmp/end_$i.log" 2>&1 &
        [ $((++running)) -lt 3 ] || { wait -n || break; running=2; }
        : $RANDOM
    done
    wait
    for ((i = 0; i < ends; i++)); do
        [ -e "$tmp/end_$i.step" ] || { cat "$tmp/end_$i.log" && fail "end $i"; }
    done
    [ "$(cat "$tmp"/end_*.step | sort -u | wc -l)" -ge 4 ] || fail "all ends came after the steps $(cat "$tmp"/end_*.step | sort -u)"
}

tests=(tasks many_prompts many_samples_with_little_memory progress profile profile_without_nvml perfect_step graph waiting matmul_choices choices_cache choices_without_cache tuned tuned_refused stochastic_rounding muon deferred_update fp16
    out_of_memory no_pinned_memory no_memory_for_a_sample little_memory plans_of_run_gpt2 plan batch_of_the_recipe hopper bench_generation bench_weights8 lost_card error_at_the_start
    failing_matmul no_device ends program resume)
if [ -n "$more" ] && [ "$called_for" = . ] && [ $# -eq 0 ] && (setup) >/dev/null 2>&1; then
    : >"$tmp/beside"
    # shellcheck disable=SC2046
    start_shared program $(learns_nothing) &
    start_shared resume "${quick[@]}" &
fi
run_tests_once "$@"
