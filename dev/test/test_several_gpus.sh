#!/usr/bin/env bash
# train_gpt2cu with several ranks and no GPU: fake_cuda.c stands in for CUDA, fake_nccl.c for NCCL. Tests what the hosts do:
# starting, the collectives and their order, checkpoints, signals, faults. Needs nvcc. What the kernels compute, and how fast,
# is not tested here.
. "$(dirname "$0")/ranks.sh"
export FAKE_CUDA_DEVICES=16 LLMC_NCCL=$tmp/bin/fake_nccl.so
model=(--layers 2 --channels 32 --heads 2 --positions 16 -b 2 -t 16)
unit=32 limit=100
broken_card=(FAKE_CUDA_FAIL=cudaGraphLaunch:5:cudaErrorLaunchFailure)

build() {
    nvcc -O1 -Xcompiler -fPIC -shared -cudart none dev/test/fake_cuda.c -o "$tmp/bin/fake_cuda.so" &
    nvcc -O1 -Xcompiler -fPIC -shared -cudart none dev/test/fake_nccl.c -o "$tmp/bin/fake_nccl.so"
    wait
    nvcc -O1 -std=c++17 -gencode arch=compute_80,code=compute_80 -Xcicc -O0 -Xcompiler -fopenmp -cudart none \
        train_gpt2.cu -o "$train" "$tmp/bin/fake_cuda.so" -ldl
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

# The losses and the validation losses are those of one GPU, but for 0.2%, because the kernels that do nothing make gradients
# depend on the shares; the first are equal, because nothing has been updated.
test_losses() {
    reference
    want "the first loss" "$(losses "$tmp/two" | head -n 2)" "$(losses "$tmp/one" | head -n 2)"
    near "ZeRO-1" "$tmp/one" "$tmp/two" 0.002
    grep -qE '^step +8/8 .* \| slowest: rank [01], \+[0-9.]+% \|' "$tmp/two.out" || fail "the slowest rank is not named: $(tail -n 1 "$tmp/two.out")"
    gpus 2 "$tmp/all" 8 -z 0
    good "-z 0" "$tmp/all"
    near "-z 0" "$tmp/one" "$tmp/all" 0.002
    gpus 4 "$tmp/four" 8 -b 1 --no-graph
    near "four GPUs" "$tmp/one" "$tmp/four" 0.002
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

# Muon updates whole matrices: with -z 0 it gives what one GPU gives, and with -z 1 it is refused.
test_muon() {
    setup
    gpus 2 "$tmp/muon" 8 --optimizer muon
    failed "Muon with ZeRO-1" "$tmp/muon" '^error: .*--optimizer muon updates whole matrices.*: take -z 0$'
    rm -rf "$tmp/muon"
    gpus 1 "$tmp/muon_one" 8 -b 4 --optimizer muon
    good "Muon on one GPU" "$tmp/muon_one"
    gpus 2 "$tmp/muon" 8 -z 0 --optimizer muon
    good "Muon on two GPUs" "$tmp/muon"
    near "Muon" "$tmp/muon_one" "$tmp/muon" 0.002
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
    FAKE_NCCL_HANG=ncclAllGather:12 FAKE_NCCL_RANK=0 gpus 2 "$out" 6 --timeout 2 -n 0
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
        FAKE_NCCL_HANG=ncclReduceScatter:20 gpus 2 "$out" 20 -v 0 -s 0 --timeout 2 $flags
        failed "$flags" "$out" 'has not ended after 2 s|no answer for'
    done
}

tests=(losses collectives repeats other_numbers muon hellaswag refusals strangers signals faults one_rank_fails one_disk_is_full
    killed_at_the_start random_kills nccl_errors data_goes data_of_one_rank_goes output_goes hangs rank0_dies)
run_tests_once "$@"
