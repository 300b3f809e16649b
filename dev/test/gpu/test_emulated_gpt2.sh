#!/usr/bin/env bash
# The whole program without a GPU: tests of test_gpt2.cu, which includes train_gpt2.cu, with the program's own kernels in the
# emulation of dev/cuda/emulation. The last test, `findings`, reports races and out-of-bounds accesses in all kernels that ran. Tests
# that take minutes run in `make test-full`; tests that take half a minute run in .ci/run. Left out are
# d12_tinyshakespeare, shapes, saved_slope, same_bits_again, neighbours and streams, whose models or batches are too large for the
# emulation, and the tests that start programs, which need a GPU.
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION
CXX=${CXX:-g++}
quick=(golden ten_steps two_models layout gradient_accumulation verdict greedy text_queue text_queue_failure generate_limits filters)
[ -z "$more" ] || quick+=(deferred_update weight_decay stochastic_rounding weights8)
slow=(recompute nan_is_seen muon cache batch_of_prompts sampling)

# Sets `program` and builds it, unless `make test` has built it.
build() { # PRECISION SUFFIX
    command -v "$CXX" >/dev/null || skip "needs $CXX"
    program=build/emulated/test_gpt2_cpu$2
    emulated CXX="$CXX" PRECISION="$1" "../../$program"
}

tests_pass() { # NAME ...
    timeout 3000 "$program" "$@" findings >"$tmp/out" 2>&1 || fail "$(grep -v '^ok' "$tmp/out")"
    contains "$(($# + 1)) passed, 0 failed, 0 skipped" "$tmp/out"
}

test_bf16() {
    build BF16 ""
    tests_pass "${quick[@]}"
    [ -z "${LLMC_TEST_FULL-}" ] || tests_pass "${slow[@]}"
}

test_other_precisions() {
    [ -n "${LLMC_TEST_FULL-}" ] || skip "takes minutes: make test-full"
    build FP32 _fp32
    tests_pass "${quick[@]}"
    build FP16 _fp16
    tests_pass "${quick[@]}"
}

tests=(bf16 other_precisions)
run_tests_once "$@"
