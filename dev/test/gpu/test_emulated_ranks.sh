#!/usr/bin/env bash
# Several ranks of train_gpt2cu without a GPU: the program's own kernels in the emulation of dev/cuda/emulation, a process for each
# rank, and fake_nccl.c between them. Losses, norms and bits come from the real kernels; the times mean nothing. Only
# `make test-full` runs them. All are in fp32: the emulated card has four multiprocessors, and --overlap on leaves four to
# NCCL, so that kernels of sm_90a have none. NCCL's stand-in runs as early as the events allow: what is exchanged before it is complete
# changes losses.
cards=1 ranks=2 bits_in=FP32
. "$(dirname "$0")/ranks.sh"
. "$(dirname "$0")/ranks_compute.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION
CXX=${CXX:-g++}
model=(--layers 2 --channels 64 --heads 1 --positions 16 -b 2 -t 16 --no-tune)
unit=32 limit=600
suffix_of() { [ "$1" = BF16 ] || echo "_${1,,}"; } # PRECISION

build() {
    local headers=/usr/local/cuda/include
    command -v "$CXX" >/dev/null || skip "needs $CXX"
    [ -e "$headers/cuda_runtime_api.h" ] || skip "needs the headers of CUDA"
    gcc -shared -fPIC -O1 "-I$headers" -o "$tmp/bin/fake_nccl.so" dev/test/stand-ins/fake_nccl.c || fail "fake_nccl.c does not compile"
}

# The program is built when a test first wants the precision.
with() { # LIBRARY [PRECISION [RANKS]]
    setup
    train=build/emulated/train_gpt2_cpu$(suffix_of "${2-BF16}")
    emulated CXX="$CXX" PRECISION="${2-BF16}" "../../$train"
    train=$PWD/$train
    # a card whose rate is known, so that the program does not measure it; and one thread for each rank
    before=(env EMULATION_GPUS=8 EMULATION_THREADS=1 EMULATION_STREAMS=early "EMULATION_NAME=NVIDIA H100 80GB HBM3" "LLMC_NCCL=$tmp/bin/fake_nccl.so")
}

# flipped PRECISION PROGRAM: builds the program in a copy of the tree, in which some tensors have the other weight decay: all tensors of a
# piece, and one in the middle of each of two other pieces ("parameters in memory" in train_gpt2.cu). Sets built.
flipped() {
    local tree=$tmp/flipped name
    if [ ! -e "$tree" ]; then
        mkdir -p "$tree/dev/test"
        cp -rp llmc train_gpt2.cu test_gpt2.cu "$tree/"
        cp -rp dev/cuda "$tree/dev/"
        cp -p dev/test/test.h dev/test/golden.h "$tree/dev/test/"
        share_emulated "$tree"
        for name in wte wpe attprojw ln2w; do
            sed -i "/^    {\"$name\", /{s/true},\$/false},/;t;s/false},\$/true},/}" "$tree/llmc/gpt2.h"
        done
        want "the number of rows that differ" "$(diff llmc/gpt2.h "$tree/llmc/gpt2.h" | grep -c '^>')" 4
    fi
    built=$tree/build/emulated/$2$(suffix_of "$1")
    (cd "$tree" && emulated CXX="$CXX" PRECISION="$1" "../../${built#"$tree/"}")
}

# Whatever tensors decay, two ranks have the losses of one; and without weight decay, they have the bits of the tree as it is.
decay() { # LIBRARY
    local out=$tmp/decay_$1 calm=(-n 5 -l 3e-4) built
    with "$1" FP32
    train 2 "$out.unchanged" 5 "${calm[@]}" -c 0
    flipped FP32 train_gpt2_cpu
    train=$built
    train 2 "$out.flipped" 5 "${calm[@]}" -c 0
    same "$out.unchanged" "$out.flipped" 5
    train 1 "$out.1" 10 "${calm[@]}" -b 4
    train 2 "$out.2" 10 "${calm[@]}"
    agree "$out.1" "$out.2" 1e-5
    flipped BF16 test_gpt2_cpu # stochastic_rounding resumes, also with Muon
    "$built" layout weight_decay stochastic_rounding >"$tmp/out" 2>&1 || fail "$(grep -v '^ok' "$tmp/out")"
}

all=(many_ranks fp32 muon other_numbers decay)
for name in "${all[@]}"; do
    eval "test_$name() { [ -n \"\${LLMC_TEST_FULL-}\" ] || skip 'takes minutes: make test-full'; $name fake_nccl; }"
done

tests=("${all[@]}")
run_tests_once "$@"
