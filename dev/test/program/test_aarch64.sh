#!/usr/bin/env bash
# Cross-compiles the C programs and tests for 64-bit ARM and runs the C tests in an emulator. This checks that the portable
# code, compiled to NEON and fused multiply-adds, gives the golden values too. Only in `make test-full`, because the
# emulator takes five to ten minutes.
#
#     apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
#     LLMC_TEST_FULL=1 dev/test/program/test_aarch64.sh [--list | TEST ...]      the programs of dev/test/unit/test_*.c by name
set -u -o pipefail
cd "$(dirname "$0")/../../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL CFLAGS
called_for=${BIN_DIR:-.}
BIN_DIR=build/aarch64
compiler=aarch64-linux-gnu-gcc
emulator=(qemu-aarch64 -L /usr/aarch64-linux-gnu)

tests=()
for source in dev/test/unit/test_*.c; do
    name=${source##*/}
    tests+=("${name%.c}")
done
if [ "${1-}" = --list ]; then
    printf '%s\n' "${tests[@]}"
    exit 0
fi
for name in "$@"; do
    [[ " ${tests[*]} " == *" $name "* ]] || { echo "$0: no test '$name'; see --list" >&2; exit 2; }
done
[ $# -eq 0 ] || tests=("$@")

reason=
command -v "${emulator[0]}" >/dev/null || reason="needs qemu-aarch64: apt-get install qemu-user"
command -v $compiler >/dev/null || reason="needs $compiler: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
[ -n "${LLMC_TEST_FULL-}" ] || reason="takes minutes: make test-full"
[ "$called_for" = . ] || reason="does not depend on BIN_DIR=$called_for: make test-full runs it"
if [ -n "$reason" ]; then
    printf "skip %s: $reason\n" "${tests[@]}"
    echo "0 passed, 0 failed, ${#tests[@]} skipped"
    exit 0
fi
unset LLMC_TEST_FULL # the slow tests would take an hour in the emulator
export OMP_WAIT_POLICY=passive
log=$(mktemp /tmp/llmc_test_XXXXXX) || exit 1
trap 'rm -f "$log"' EXIT

# These tests start their own binary again. The kernel cannot execute it, because it is for another processor; only the
# first process runs in the emulator.
starts_itself=(order_of_syncs failing_save failing_replace full_disk full_disk_replace killed_save killed_replace
    short_and_odd failing_prune failing_operation killed_rank killed_unnoticed short_writes cannot_reserve)

passed=0 failed=0 skipped=0
if make -k CC=$compiler BIN_DIR=$BIN_DIR programs "${tests[@]/#/$BIN_DIR/dev/test/unit/}" >"$log" 2>&1; then
    echo "ok build"
    passed=$((passed + 1))
else
    grep -aE 'error|\*\*\*' "$log" | grep -av -- ' -o ' | head -n 20
    echo "FAIL build: does not build with $compiler"
    failed=$((failed + 1))
fi
for name in "${tests[@]}"; do
    program=$BIN_DIR/dev/test/unit/$name
    [ -x "$program" ] || continue
    chosen=()
    while read -r test _; do
        if [[ $name == test_run_* ]] && [[ " ${starts_itself[*]} " == *" $test "* ]]; then
            echo "skip $name $test: starts itself again, which needs an emulator that the kernel knows"
            skipped=$((skipped + 1))
        else
            chosen+=("$test")
        fi
    done < <("${emulator[@]}" "$program" --list)
    rc=0
    "${emulator[@]}" "$program" ${chosen[@]+"${chosen[@]}"} </dev/null >"$log" 2>&1 || rc=$?
    closing=$(tail -n 1 "$log" | grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$') || closing=
    grep -aE '^(ok|skip|FAIL) ' "$log" | sed -E "s/^(ok|skip|FAIL) /\1 $name /"
    if [ -z "$closing" ] || [ ${#chosen[@]} -eq 0 ]; then
        tail -n 5 "$log"
        echo "FAIL $name: ends with status $rc"
        closing="0 passed, 1 failed, 0 skipped"
    fi
    read -r ok _ bad _ left_out _ <<<"$closing"
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + left_out))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
