#!/usr/bin/env bash
# Tests the messages of dev/test/program/coverage.sh and, in full runs, the coverage of one op. Full coverage takes minutes: not tested.
. "$(dirname "$0")/../test.sh"

test_usage() {
    local flags rc
    dev/test/program/coverage.sh --help >"$tmp/out"
    contains "usage: dev/test/program/coverage.sh" "$tmp/out"
    for flags in --what --op "--op no_such_op"; do
        rc=0
        # shellcheck disable=SC2086
        dev/test/program/coverage.sh $flags >"$tmp/out" 2>&1 || rc=$?
        want "the exit code of $flags" "$rc: $(grep -c '^error: ' "$tmp/out")" "2: 1"
    done
}

# Nearly all of an op's file runs in its --check, and a line that does not run is named.
test_op() {
    [ -n "${LLMC_TEST_FULL-}" ] || skip "takes two minutes: make test-full"
    command -v g++ >/dev/null && git ls-files >/dev/null 2>&1 || skip "needs g++ and git"
    local lines run
    dev/test/program/coverage.sh --op global_norm --missed llmc/cuda_common.cuh >"$tmp/out"
    contains "global_norm: " "$tmp/out"
    read -r _ lines run _ < <(grep '^dev/cuda/global_norm.cu ' "$tmp/out")
    [ "$run" -gt 0 ] && [ $((100 * run)) -ge $((90 * lines)) ] || fail "$(cat "$tmp/out")"
    read -r _ lines run _ < <(grep '^llmc/cuda_common.cuh ' "$tmp/out")
    want "the lines of cuda_common.cuh that have not run" "$(grep -cE '^[0-9]+ ' "$tmp/out")" $((lines - run))
}

tests=(usage op)
run_tests_once "$@"
