#!/usr/bin/env bash
# Several ranks of train_gpt2cu without a GPU: the program's own kernels in the emulation of dev/cuda/emulation, a process for each
# rank, and fake_nccl.c between them. Losses, norms and bits come from the real kernels; the times mean nothing. Only
# `make test-full` runs them. All are in fp32: the emulated card has four multiprocessors, and --overlap on leaves four to
# NCCL, so that kernels of sm_90a have none.
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
    before=(env EMULATION_GPUS=8 EMULATION_THREADS=1 "EMULATION_NAME=NVIDIA H100 80GB HBM3" "LLMC_NCCL=$tmp/bin/fake_nccl.so")
}

all=(many_ranks fp32 muon other_numbers)
for name in "${all[@]}"; do
    eval "test_$name() { [ -n \"\${LLMC_TEST_FULL-}\" ] || skip 'takes minutes: make test-full'; $name fake_nccl; }"
done

tests=("${all[@]}")
run_tests_once "$@"
