#!/usr/bin/env bash
# train_gpt2cu with several ranks and no GPU: fake_cuda.c stands in for CUDA, fake_nccl.c for NCCL. Tests what the hosts do:
# starting, the collectives and their order, checkpoints, signals, faults. Needs nvcc. What the kernels compute, and how fast,
# is not tested here.
. "$(dirname "$0")/ranks.sh"
. dev/test/gpu/builds.sh
export FAKE_CUDA_DEVICES=16 LLMC_NCCL=$tmp/bin/fake_nccl.so
model=(--layers 2 --channels 32 --heads 2 --positions 16 -b 2 -t 16)
unit=32 limit=100
broken_card=(FAKE_CUDA_FAIL=cudaGraphLaunch:5:cudaErrorLaunchFailure)

build() {
    build_on_stand_in "$tmp/bin"
    nvcc -O1 -Xcompiler -fPIC -shared -cudart none dev/test/stand-ins/fake_nccl.c -o "$tmp/bin/fake_nccl.so"
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

# The losses and the validation losses are those of one GPU: the same sums of floats in another order, printed with 6 decimals.
test_losses() {
    setup
    export FAKE_CUDA_SMOOTH=1
    local out=$tmp/losses
    gpus 1 "$out.1" 8 -b 4
    good "one GPU" "$out.1"
    gpus 2 "$out.2" 8
    good "ZeRO-1" "$out.2"
    near "ZeRO-1" "$out.1" "$out.2" 5e-7
    grep -qE '^step +8/8 .* \| slowest: rank [01], \+[0-9.]+% \|' "$out.2.out" || fail "the slowest rank is not named: $(tail -n 1 "$out.2.out")"
    gpus 2 "$out.all" 8 -z 0
    good "-z 0" "$out.all"
    near "-z 0" "$out.1" "$out.all" 5e-7
    gpus 4 "$out.4" 8 -b 1 --no-graph
    good "four GPUs" "$out.4"
    near "four GPUs" "$out.1" "$out.4" 5e-7
}

# Each rank makes the same calls: of each step a reduction and a gathering of each of the 4 buckets, and one of the figures; and
# at the start, to time them, five reductions of bucket 0 and three times the exchanges of a step.
test_collectives() {
    reference
    local i
    for i in 0 1; do grep '^calls\|^ran' "$tmp/calls.$i" | grep -v 'UniqueId\|AsyncError' >"$tmp/made.$i"; done
    cmp "$tmp/made.0" "$tmp/made.1" || fail "the ranks make other calls: $(diff "$tmp/made.0" "$tmp/made.1")"
    want "the reductions" "$(sed -n 's/^calls ncclReduceScatter //p' "$tmp/calls.0")" $((8 * 4 + 5 + 3 * 4))
    # 3 arrays of 4 buckets for each of 8 checkpoints
    want "the gatherings" "$(sed -n 's/^calls ncclAllGather //p' "$tmp/calls.0")" $((8 * 5 + 8 * 12 + 3 * 4))
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

# A recipe that nobody has typed, with Muon: all ranks have the micro-batch that rank 0 has chosen, and keep it when they resume.
test_recipe() {
    setup
    local out=$tmp/recipe steps status
    for steps in 4 6; do
        status=0
        timeout "$limit" "$train" --gpus 2 "${model[@]:0:8}" -e d6 -d 512 -i "$tmp/data/*_train_*.bin" -o "$out" -x $steps -s 0 -y 1 \
            >"$out.out" 2>"$out.err" </dev/null || status=$?
        good "$steps steps" "$out"
        contains "--batch-size 16 --learning-rate 0.0018 " "$out.out"
    done
    contains "recipe pretrain, resumed" "$out.out"
    contains "resumed at step 4 " "$out.out"
}

# Saves by the clock: rank 0 decides, and the losses are those of a run without saves.
test_save_clock() {
    setup
    local out=$tmp/by_clock saves
    LLMC_CLOCK_RATE=3000 gpus 2 "$out" 3000 -n 0 --save-minutes 10 -nk 2 -v 0 -s 0
    good "saves by the clock" "$out"
    saves=$(grep -c '^saved ' "$out.out")
    [ "$saves" -ge 3 ] || fail "$saves saves: $(tail -n 1 "$out.out")"
    want "checkpoints" "$(ls -d "$out"/step_* | wc -l)" 2
    gpus 2 "$out.none" 3000 -n 0 -v 0 -s 0
    want "losses" "$(losses "$out")" "$(losses "$out.none")"
}

# With the default saves, kill -9 of all ranks loses ten minutes of work at most.
test_kills_by_the_clock() {
    wants_more
    setup
    kill_by_the_clock "$tmp/killed" "$train" --gpus 2 "${model[@]}" -e d6 -d 128 -i "$tmp/data/*_train_*.bin"
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

# --overlap off changes when the ranks exchange, not what. Each of 8 steps waits once more before the reductions and after the
# gatherings, but once for AdamW, not for each of 4 buckets: all reductions are a group, and so are all gatherings of a model
# this small.
test_no_overlap() {
    reference
    local out=$tmp/separate flags waits=() groups=() i
    gpus 2 "$out" 8 --overlap off
    good "--overlap off" "$out"
    gpus 2 "$out.on" 8 --overlap on
    same "$out" "$out.on" 8
    gpus 2 "$tmp/all_overlap" 8 -z 0 -n 0 --overlap on
    gpus 2 "$tmp/all_separate" 8 -z 0 -n 0 --overlap off
    good "-z 0 --overlap off" "$tmp/all_separate"
    same "$tmp/all_overlap" "$tmp/all_separate" 8
    for i in 0 1; do
        flags=(-v 0 -s 0 -n 0 --overlap "$([ $i -eq 0 ] && echo on || echo off)")
        rank 1 2 $((40 + i)) "$out.$i" 8 "${flags[@]}" &
        FAKE_CUDA_COUNT=$out.count FAKE_NCCL_COUNT=$out.calls rank 0 2 $((40 + i)) "$out.$i" 8 "${flags[@]}" || fail "$(cat "$out.$i.0.err")"
        wait
        waits+=("$(sed -n 's/^calls cudaStreamWaitEvent //p' "$out.count")")
        groups+=("$(sed -n 's/^calls ncclGroupEnd //p' "$out.calls.0")")
    done
    want "the waits" "${waits[1]}" $((waits[0] + 8 * (1 + 1 - 3)))
    want "the groups" "${groups[*]}" "0 $((8 * 2))"
}

# Weights are gathered in groups of at least 24 MiB: four layers of 512 channels have that, so the first group is the embeddings
# and four layers, and the second the other layers and the last layernorm, which is no group of its own. No bit depends on it.
# `make test-full` repeats the test with Muon.
test_groups() {
    wants_more
    setup
    local out=$tmp/groups optimizer optimizers=(adamw) larger
    [ -z "${LLMC_TEST_FULL-}" ] || optimizers+=(muon)
    for optimizer in "${optimizers[@]}"; do
        larger=(--layers 8 --channels 512 --heads 8 --optimizer "$optimizer" -v 0 -s 0 -n 0 -w 0)
        FAKE_NCCL_COUNT=$out.calls gpus 2 "$out.off" 2 "${larger[@]}" --overlap off
        good "$optimizer" "$out.off"
        want "the groups" "$(sed -n 's/^calls ncclGroupEnd //p' "$out.calls.1")" $((2 * (1 + 2)))
        gpus 2 "$out.on" 2 "${larger[@]}" --overlap on
        good "$optimizer, --overlap on" "$out.on"
        same "$out.off" "$out.on" 2
        rm -r "$out.off" "$out.on"
    done
}

# On an H100 kernels are launched before the previous one has ended, but not after an event: see Execution::may_launch_early().
test_early_launches() {
    setup
    FAKE_CUDA_ARCH=90 gpus 2 "$tmp/hopper" 3 --overlap on
    good "two H100s" "$tmp/hopper"
}

# What --overlap auto has chosen stands in a file, and a resumed run of as many ranks does not choose again.
test_overlap_choice() {
    reference
    local out=$tmp/choice words=(between beside) file=$tmp/choice/exchange_choice.txt chosen
    contains "exchanges: " "$tmp/two.out"
    chosen=$(sed -nE 's/^exchanges: .*: (beside|between)$/\1/p' "$tmp/two.out")
    want "the file" "$(cat "$tmp/two/exchange_choice.txt")" "2 ranks, -z 1: exchanges $chosen computations"
    for word in "${words[@]}"; do
        rm -rf "$out" && cp -r "$tmp/two" "$out" && rm -r "$out/step_00000008"
        echo "2 ranks, -z 1: exchanges $word computations" >"$file"
        gpus 2 "$out" 8 -y 1
        good "resuming $word" "$out"
        grep -q "^exchanges: .*: $word, as before$" "$out.out" || fail "chosen again: $(cat "$out.out")"
        contains "$word" "$file"
        same "$out" "$tmp/two" 8
    done
    rm -rf "$out" && cp -r "$tmp/two" "$out" && rm -r "$out/step_00000008"
    gpus 4 "$out" 8 -b 1 -y 1
    grep -qE '^exchanges: .*: (beside|between)$' "$out.out" || fail "not chosen again for four ranks: $(cat "$out.out")"
    gpus 2 "$tmp/choice_on" 2 --overlap on
    ! grep -q '^exchanges: ' "$tmp/choice_on.out" || fail "chosen in spite of --overlap on"
}

# bench_several_gpus.sh with three cards that do not compute: which runs it makes, what it adds up, and that it goes on when a run
# fails. A wrapper replaces the milliseconds of card 1 by the number of the step, so that it is the slowest; lets -z 0 fail; and writes what
# NCCL writes when it is asked for its choices.
test_bench() {
    wants_more
    setup
    local out=$tmp/bench.out rc=0 small='--layers 2 --channels 32 --heads 2 --positions 16' i
    cat >"$tmp/bin/wrapper" <<WRAPPER
#!/usr/bin/env bash
if [ -n "\${NCCL_DEBUG_FILE-}" ]; then
    for i in 100 2000000; do echo "host:1:2 [0] NCCL INFO AllGather: \$i Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..7}"; done
    echo "host:1:2 [0] NCCL INFO 8 coll channels, 8 collnet channels, 0 nvls channels"
fi >"\${NCCL_DEBUG_FILE-/dev/null}"
[[ " \$* " != *" -z 0 "* ]] || { echo "error: rank 1: no luck" >&2 && exit 1; }
[ "\${CUDA_VISIBLE_DEVICES-}" != 1 ] || { "$train" "\$@" | sed -E 's/^(step +([0-9]+).*\| )[0-9]+(\.[0-9]+ ms)/\1\2\3/' && exit; }
exec "$train" "\$@"
WRAPPER
    chmod +x "$tmp/bin/wrapper"
    TRAIN=$tmp/bin/wrapper LLMC_DATA=llmc/tokenizer.h BENCH_MODEL="-e d6 $small" BENCH_LARGE="-e d12 $small" BENCH_B=2 BENCH_T=16 \
        BENCH_LARGE_B=1 BENCH_STEPS=10 BENCH_LIMIT=$limit \
        dev/test/bench/bench_several_gpus.sh --gpus 3 --logs "$tmp/bench" >"$out" 2>"$tmp/bench.err" || rc=$?
    want "the exit code" "$rc: $(cat "$tmp/bench.err")" "1: "
    grep -q '^19 runs, 1 failed, [0-9]* s$' "$out" || fail "$(cat "$out")"
    grep -qE '^3 cards, .* -b 2 -z 0 +FAILED: error: rank 1: no luck$' "$out" || fail "$(cat "$out")"
    grep -qE '^3 cards, .* -b 2 -z 0 +not measured$' "$out" || fail "$(cat "$out")"
    want "lines of runs" "$(grep -c ' ms ([0-9.]*\.\.[0-9.]*), [0-9]* tok/s, memory of rank 0: plan [0-9.]* GB, in use [0-9.]*, took [0-9]* s$' "$out")" 16
    want "cards alone" "$(grep -cE '^card 1 alone( again)?, -e d6 .* -b 2 ' "$out")" 4
    want "cards at once" "$(grep -cE '^card [012] beside the others, -e d6 .* -b 2 -d 320 ' "$out")" 3
    contains "NCCL: AllGather: Algo RING proto SIMPLE channel{Lo..Hi}={0..7}, 2 calls, up to 2.0 MB" "$out"
    contains "NCCL: 8 coll channels" "$out"
    grep -q '^NCCL: [0-9.]*$' "$out" || fail "no version of NCCL: $(cat "$out")"
    # 3 cards with 2 sequences of 16 tokens, and with 10 micro-batches: medians of steps 3 to 10, and what follows from them
    local median=() figures
    for i in card1:320 alone:32 again:32 all:96 alone_micro:320 again_micro:320 micro:960; do
        figures=$(sed -nE 's/^step +([3-9]|10)\/.*\| ([0-9.]+) ms \|.*/\2/p' "$tmp/bench/${i%:*}.out" | sort -n |
            awk -v tokens="${i#*:}" '{ v[NR] = $1 } END { m = (v[4] + v[5]) / 2; printf "%.4f %.2f ms %.0f tok/s", m, m, tokens * 1e3 / m }')
        median+=("${figures%% *}")
        figures=${figures#* }
        grep -qE " ${figures% ms *} ms \\(.*\\), ${figures#* ms }," "$out" || fail "not of $i: $figures: $(cat "$out")"
    done
    grep -qE "^3 cards, -e d6 .* -b 2 -d 960 .* $(awk "BEGIN { printf \"%.2f\", 50 * (${median[4]} + ${median[5]}) / ${median[6]} }")%$" "$out" ||
        fail "not the mean of ${median[4]} and ${median[5]} / ${median[6]}: $(cat "$out")"
    grep -qE "^3 cards, -e d6 .* -b 2 +[0-9.]+ +[0-9]+ +[0-9]+ +$(awk "BEGIN { printf \"%.2f\", 50 * (${median[1]} + ${median[2]}) / ${median[3]} }")%$" "$out" ||
        fail "not the mean of ${median[1]} and ${median[2]} / ${median[3]}: $(cat "$out")"
    dev/test/bench/bench_several_gpus.sh --help >"$out"
    contains "usage: dev/test/bench/bench_several_gpus.sh" "$out"
    for i in "--gpus=0" "--gpus" "--cards=2" "--rows=most" "--rows=all,al?" "--rows=all micro" "--rows=,all"; do
        rc=0
        IFS='=' read -r -a words <<<"$i"
        TRAIN=$tmp/bin/wrapper dev/test/bench/bench_several_gpus.sh "${words[@]}" >"$out" 2>&1 || rc=$?
        want "the exit code of $i" "$rc: $(wc -l <"$out")" "2: 1"
    done
}

# --rows of the bench runs only the rows that it names
test_bench_rows() {
    [ -n "${LLMC_TEST_FULL-}" ] || skip "make test-full: bench makes the runs of all rows"
    setup
    local out=$tmp/bench_rows.out small='--layers 2 --channels 32 --heads 2 --positions 16'
    TRAIN=$train LLMC_DATA=llmc/tokenizer.h BENCH_MODEL="-e d6 $small" BENCH_B=2 BENCH_T=16 BENCH_STEPS=10 BENCH_LIMIT=$limit \
        dev/test/bench/bench_several_gpus.sh --gpus 3 --rows beside >"$out" 2>&1 || fail "$(cat "$out")"
    grep -q '^6 runs, 0 failed' "$out" || fail "$(cat "$out")"
    want "rows" "$(grep -cE '^3 cards, .* --overlap on +[0-9.]+ +[0-9]+ +[0-9]+ +[0-9.]+%$' "$out")" 1
    TRAIN=$train LLMC_DATA=llmc/tokenizer.h BENCH_LARGE="-e d6 $small" BENCH_MODEL="-e d6 $small" BENCH_B=2 BENCH_T=16 \
        BENCH_STEPS=10 BENCH_LIMIT=$limit dev/test/bench/bench_several_gpus.sh --gpus 3 --rows adamw >"$out" 2>&1 || fail "$(cat "$out")"
    grep -qE "^  without the .* ms that AdamW's shares save .*%$" "$out" || fail "$(cat "$out")"
}

# ZeRO-1 changes no bit where gradients are not clipped by their norm, which is added up in another order. With NCCL itself that
# holds for two ranks: its rings add the gradients of more in an order of their own.
test_zero() {
    setup
    local optimizer n z out
    for optimizer in adamw muon; do
        for n in 2 3; do
            for z in 0 1; do
                out=$tmp/zero_$optimizer$n.$z
                # two ranks have several layers each; of three ranks one has none. -w 0: the checkpoint has the 16-bit weights
                gpus $n "$out" 8 --layers $((n == 2 ? 5 : 2)) -w $((n - 2)) -d $((2 * n * unit)) -z $z --clip 0 --optimizer $optimizer
                good "$optimizer, -z $z" "$out"
            done
            same "${out%.1}.0" "$out" 8
        done
    done
}

# Muon updates whole matrices, so with ZeRO-1 each layer belongs to one rank.
test_muon() {
    setup
    export FAKE_CUDA_SMOOTH=1
    local n out=$tmp/muon muon=(--optimizer muon --clip 0)
    gpus 1 "$out.1" 8 -b 4 "${muon[@]}"
    good "one GPU" "$out.1"
    FAKE_NCCL_COUNT=$tmp/muon_calls gpus 2 "$out.2" 8 "${muon[@]}"
    good "two GPUs" "$out.2"
    near "two GPUs" "$out.1" "$out.2" 5e-7
    cmp -s "$out.2/step_00000008/optimizer.safetensors" "$out.1/step_00000008/optimizer.safetensors" && fail "the runs are the same"
    contains "Muon and AdamW" "$out.2.out"
    contains "(the largest of 2 shares)" "$out.2.out"
    # of 4 buckets, that of the embeddings is shared, and the others belong to one rank each; 3 arrays for each of 8 checkpoints;
    # at the start the embeddings are reduced five times, and all buckets are exchanged three times
    want "the calls" "$(sed -nE 's/^calls nccl(Reduce|ReduceScatter|Broadcast|AllReduce) /\1 /p' "$tmp/muon_calls.1" | sort | paste -sd ' ')" \
        "AllReduce 0 Broadcast $((8 * 3 + 8 * 9 + 3 * 3)) Reduce $((8 * 3 + 3 * 3)) ReduceScatter $((8 + 5 + 3))"
    gpus 2 "$out.separate" 8 "${muon[@]}" --overlap off -n 0
    same "$out.2" "$out.separate" 8
    # resumed with as many ranks, and with more, where it is as without ZeRO-1
    mkdir "$out.old" && cp -r "$out.2"/step_0000000[34] "$out.old"
    for n in 2:1 4:0 4:1; do
        cp -r "$out.old" "$out.$n"
        gpus ${n%:*} "$out.$n" 8 -y 1 "${muon[@]}" -z ${n#*:} -b $((4 / ${n%:*}))
        good "resuming with $n" "$out.$n"
        contains "resumed at step 4 " "$out.$n.out"
    done
    same "$out.2" "$out.2:1" 8
    same "$out.4:0" "$out.4:1" 8
}

# ---- refusals -----------------------------------------------------------------------------

test_refusals() {
    setup
    gpus 17 "$tmp/no" 1
    failed "too many GPUs" "$tmp/no" '^error: --gpus 17: there are only 16 GPUs here'
    status=0
    "$train" --gpus 2 --restarts 1 -i "$tmp/data/*_train_*.bin" >"$tmp/no.out" 2>"$tmp/no.err" || status=$?
    want "--restarts without -o" "$status: $(cat "$tmp/no.err")" "2: $train: --restarts needs -o: a restart resumes what was saved there"
    gpus 3 "$tmp/no" 1
    failed "-d" "$tmp/no" '^error: rank 0: -d 128 is not a multiple of -b 2 times -t 16 times 3 ranks = 96 tokens: take 96$'
    LLMC_NCCL=/nonexistent.so gpus 2 "$tmp/no" 1
    failed "no NCCL" "$tmp/no" '^error: NCCL, which several GPUs need: .*/nonexistent.so.*; install it with apt-get install libnccl2'
    want "the lines" "$(wc -l <"$tmp/no.err")" 1
    FAKE_NCCL_VERSION=21700 gpus 2 "$tmp/no" 1
    failed "an old NCCL" "$tmp/no" 'NCCL 2.17.0 is too old'
    mkdir "$tmp/model" && cp -r "$tmp/data" "$tmp/model/step_00000001"
    gpus 2 "$tmp/model" 1
    failed "an output directory that is in use" "$tmp/model" '^error: rank 0: '
}

# A launcher that has started one process, as srun does by itself, leaves the starting to --gpus.
test_one_task() {
    reference
    OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 gpus 2 "$tmp/task" 8
    good "two GPUs in one task" "$tmp/task"
    same "$tmp/task" "$tmp/two" 8
}

# ---- ends -----------------------------------------------------------------------------------

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
    FAKE_NCCL_HANG=ncclAllGather:24 FAKE_NCCL_RANK=0 gpus 2 "$out" 6 --timeout 2 -n 0
    failed "a collective that hangs" "$out" 'step [0-9]+ has not ended after 2 s|no answer for'
    rm -rf "$out"
    FAKE_NCCL_FAIL=ncclCommInitRankConfig:1:2 gpus 2 "$out" 6
    failed "a communicator that cannot be opened" "$out" 'NCCL: connecting rank [01] with 1 others: '
}

# Whatever a rank waits for when a collective hangs, --timeout ends it.
test_hangs() {
    local flags out=$tmp/hangs
    setup
    for flags in "-sl 5" "-d 256" "-n 1 --no-async-save"; do
        rm -rf "$out"
        # shellcheck disable=SC2086
        FAKE_NCCL_HANG=ncclReduceScatter:27 gpus 2 "$out" 20 -v 0 -s 0 --timeout 2 $flags
        failed "$flags" "$out" 'has not ended after 2 s|no answer for'
    done
}

# A rank that does not answer is missed by the next exchange, whichever that is: rank 1 hangs before each one of a step with a
# validation and a sample. At the end of a run, where a checkpoint is saved, it is waited for, and named.
test_silence() {
    local out=$tmp/silence n first last each=(-d $((2 * unit)) -v 1 -m 1 -s 1 -n 0)
    setup
    preload=$preload:$tmp/bin/failing_write.so
    for n in 2 3; do
        FAIL_TRACE=$out.$n.sends gpus 2 "$out.$n" $n "${each[@]}"
        good "$n steps" "$out.$n"
    done
    first=$(grep -c ' send 1$' "$out.2.sends") last=$(($(grep -c ' send 1$' "$out.3.sends") - 1))
    [ "$last" -ge $((first + 6)) ] || fail "a step has exchanges $first to $last only"
    for ((n = first; n <= last; n++)); do
        { FAIL_TRACE=$out.at$n.sends FAIL_SLOW_SEND=1:$n:8 gpus 2 "$out.at$n" 9 "${each[@]}" --timeout 2 && echo $status >"$out.at$n.status"; } &
    done
    wait
    FAIL_SLOW_SEND=1:$((first - 1)):12 gpus 2 "$out.end" 2 "${each[@]}" --timeout 4
    good "silent at the end" "$out.end"
    want "who is named" "$(sed -nE 's/^note: no answer for [0-9]+ s from (rank [0-9]) .*; waiting$/\1/p' "$out.end.err")" "rank 1"
    for ((n = first; n <= last; n++)); do
        status=$(cat "$out.at$n.status")
        failed "silent before exchange $n" "$out.at$n" 'no answer for [0-9.]+ s from rank 1|has not ended after 2 s'
        contains "$n send 1" "$out.at$n.sends"
    done
}

tests=(losses collectives repeats no_overlap groups early_launches overlap_choice other_numbers recipe save_clock kills_by_the_clock zero muon bench bench_rows hellaswag refusals one_task strangers signals faults one_rank_fails one_disk_is_full
    killed_at_the_start random_kills nccl_errors data_goes data_of_one_rank_goes output_goes hangs silence rank0_dies)
run_tests_once "$@"
