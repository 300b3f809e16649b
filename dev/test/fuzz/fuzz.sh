#!/usr/bin/env bash
# Builds dev/test/fuzz/fuzz_*.c with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, runs one target per
# core at a time and prints a table. On a finding the exit status is 1, and the input is kept in build/fuzz/findings.
#
#     dev/test/fuzz/fuzz.sh [TARGET ...]     these targets (fuzz_json ...); default: all
#
#     FUZZ_SECONDS=60    time per target
#     FUZZ_RUNS=1000000  number of inputs per target, instead of a time
#     FUZZ_CC=clang      a compiler that has -fsanitize=fuzzer
#
# Inputs that reached new code are kept in build/fuzz/corpus/TARGET for the next run. If they exist,
# dev/test/fuzz/seeds/TARGET/ (a directory of initial inputs) and dev/test/fuzz/TARGET.dict (a dictionary) are used.
set -u
cd "$(dirname "$0")/../../.." || exit 1
cc=${FUZZ_CC:-clang}
runs=${FUZZ_RUNS:-}
seconds=${FUZZ_SECONDS:-60}
for number in "${runs:-1}" "$seconds"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "error: FUZZ_SECONDS and FUZZ_RUNS are whole numbers above 0, not '$number'" >&2; exit 2; }
done
# shellcheck disable=SC2054
flags=(-O1 -g -std=gnu11 -Wall -Wextra -Werror -Wno-unknown-pragmas -fno-omit-frame-pointer
    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all)
limits=(-rss_limit_mb=2048 -malloc_limit_mb=1024 -timeout=20 -max_len=65536)
# an allocation that is too large returns NULL, as on a small machine
export ASAN_OPTIONS=allocator_may_return_null=1:${ASAN_OPTIONS-}

targets=("$@")
if [ $# -eq 0 ]; then
    for source in dev/test/fuzz/fuzz_*.c; do
        [ -e "$source" ] && targets+=("$(basename "$source" .c)")
    done
fi
[ ${#targets[@]} -gt 0 ] || { echo "error: no dev/test/fuzz/fuzz_*.c here" >&2; exit 1; }

mkdir -p build/fuzz/findings
probe='#include <stddef.h>
#include <stdint.h>
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { return data && size > 9 ? -1 : 0; }'
if ! command -v "$cc" >/dev/null; then
    echo "skipped: fuzzing needs clang: apt-get install clang"
    exit 0
elif ! "$cc" "${flags[@]}" -x c - -o build/fuzz/probe <<<"$probe" 2>build/fuzz/probe.log; then
    major=$("$cc" -dumpversion | cut -d . -f 1)
    echo "skipped: $cc has no libFuzzer (build/fuzz/probe.log): apt-get install libclang-rt-$major-dev"
    exit 0
fi

# Prints a row of the table.
row() { printf '%-24s %12s %8s  %s\n' "$@"; }

# Builds and runs a target. Prints the findings, which the caller sends to TARGET.report; the table's row goes to
# TARGET.row, also in build/fuzz.
fuzz_one() { # TARGET
    local name=$1 log=build/fuzz/$1.log corpus=build/fuzz/corpus/$1 start=$SECONDS rc inputs found limit=()
    local seeds=dev/test/fuzz/seeds/$name dict=dev/test/fuzz/$name.dict directories=("$corpus")
    if ! "$cc" "${flags[@]}" "dev/test/fuzz/$name.c" -o "build/fuzz/$name" -lm -lpthread >"$log" 2>&1; then
        tail -n 20 "$log"
        row "$name" 0 0 "does not build" >"build/fuzz/$name.row"
        return 1
    fi
    mkdir -p "$corpus"
    [ -d "$seeds" ] && directories+=("$seeds")
    [ -e "$dict" ] && limit+=("-dict=$dict")
    if [ -n "$runs" ]; then limit+=("-runs=$runs"); else limit+=("-max_total_time=$seconds"); fi
    build/fuzz/"$name" "${limits[@]}" "${limit[@]}" -print_final_stats=1 -artifact_prefix="build/fuzz/findings/$name-" \
        "${directories[@]}" >"$log" 2>&1 </dev/null &
    wait $! # in the background, so that a trap can end it
    rc=$?
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
    if [ $rc -eq 0 ] && [ "${inputs:-0}" -gt 0 ]; then
        row "$name" "$inputs" $((SECONDS - start)) 0 >"build/fuzz/$name.row"
        return 0
    fi
    # the report without the target's own output
    grep -aE 'ERROR:|runtime error:|SUMMARY:|^ +#[0-9]+ |Test unit written' "$log" | head -n 20
    found=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    echo "$name: log in $log${found:+; again with: build/fuzz/$name $found}"
    row "$name" "${inputs:-?}" $((SECONDS - start)) "${found:-status $rc}" >"build/fuzz/$name.row"
    return 1
}

amount="$seconds s"
[ -z "$runs" ] || amount="$runs inputs"
trap 'kill $(jobs -pr) 2>/dev/null; wait; exit 130' INT TERM
for name in "${targets[@]}"; do
    [ -e "dev/test/fuzz/$name.c" ] || { echo "error: no dev/test/fuzz/$name.c" >&2; exit 2; }
done
for name in "${targets[@]}"; do
    while [ "$(jobs -pr | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    echo "fuzzing $name for $amount"
    rm -f "build/fuzz/$name.failed"
    {
        trap 'kill $! 2>/dev/null; exit 130' TERM
        fuzz_one "$name" || touch "build/fuzz/$name.failed"
    } >"build/fuzz/$name.report" &
done
wait

findings=0
for name in "${targets[@]}"; do
    cat "build/fuzz/$name.report"
    [ ! -e "build/fuzz/$name.failed" ] || findings=$((findings + 1))
done
row target inputs seconds findings
for name in "${targets[@]}"; do cat "build/fuzz/$name.row"; done
[ $findings -eq 0 ]
