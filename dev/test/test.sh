# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # a script that sources this file sets tests
# Shared code of the shell tests, like test.h for C. A test is a function test_NAME, which runs in a subshell under
# `set -eu` in the top folder of the repository. It calls `fail REASON` or `skip REASON`, or succeeds; then of what it has
# printed, only lines `note: ...` are shown. At the end of a script:
#
#     tests=(NAME NAME ...)
#     run_tests "$@"        or run_tests_once "$@", if none of the programs that it tests is below BIN_DIR
#
# The programs under test are $BIN_DIR/train_gpt2, $BIN_DIR/dev/data/tokenize ...
# $tmp is a temporary directory of the script.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
BIN_DIR=${BIN_DIR:-.}
CC=${CC:-gcc}
called_for=$BIN_DIR
# `make test` runs what a user needs, .ci/run (LLMC_TEST_MORE=1) runs more, `make test-full` (LLMC_TEST_FULL=1) runs everything.
more=${LLMC_TEST_MORE-}${LLMC_TEST_FULL-}
wants_more() { [ -n "$more" ] || skip "takes too long for make test; .ci/run runs it, with LLMC_TEST_MORE=1"; }
tmp=$(mktemp -d /tmp/llmc_test_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
export XDG_CACHE_HOME=$tmp/cache # what the programs keep for later runs

fail() { echo "$*"; exit 1; }
skip() { echo "$*"; exit 77; }

# want WHAT GOT WANTED: fails unless the strings GOT and WANTED are equal
want() { [ "$2" = "$3" ] || fail "$1 is '$2', want '$3'"; }

# contains TEXT FILE: fails unless a line of the file contains the text
contains() { grep -aqF -- "$1" "$2" || { tail -n 30 "$2" && fail "no '$1' in the text above"; }; }

# same_checkpoint DIR1 DIR2: fails unless these checkpoints of train_gpt2cu have the same weights and moments, bit for bit
same_checkpoint() {
    local file
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/$file" "$2/$file" || fail "$file of $1 and $2 differ"
    done
}

# kill_by_the_clock OUT COMMAND ...: starts a run that never ends with -o OUT -y 1, kills all of its processes by kill -9 at a random
# moment, and so on, $LLMC_CLOCK_KILLS times (2; make test-full: 20). By a clock that is 300 times as fast, at most ten minutes of
# steps may be lost, the last start must resume, and two checkpoints are kept.
kill_by_the_clock() {
    local out=$1 i newest lost pid kills=${LLMC_CLOCK_KILLS:-$([ -n "${LLMC_TEST_FULL-}" ] && echo 20 || echo 2)}
    for ((i = 0; i < kills; i++)); do
        LLMC_CLOCK_RATE=300 setsid "${@:2}" -o "$out" -x 1000000 -s 0 -y 1 >"$out.txt" 2>&1 </dev/null &
        pid=$!
        # the last start is killed after its first step, so that its whole header can be read
        until [ $i -lt $((kills - 1)) ] || grep -qs '^step' "$out.txt" || ! kill -0 $pid 2>/dev/null; do sleep 0.05; done
        sleep $((i == 0 ? 3 : RANDOM % 4)).$((RANDOM % 10))
        kill -KILL -- -$pid 2>/dev/null || kill -KILL $pid 2>/dev/null || fail "start $i has ended by itself: $(tail -n 3 "$out.txt")"
        wait $pid 2>/dev/null || true
        newest=$(find "$out" -name 'step_*' | sort | tail -n 1)
        [ $i -gt 0 ] || [ -n "$newest" ] || { cat "$out.txt" && fail "nothing is saved after 15 minutes"; }
        newest=${newest##*_}
        lost=$(awk -F '[:,]' -v newest="$((10#${newest:-0}))" '/"train"/ && $2 > newest { for (k = 3; k < NF; k++) if ($k ~ /time_ms/) sum += $(k + 1) }
            END { printf "%d", sum * 0.3 }' "$out/log.jsonl")
        [ "$lost" -le 600 ] || fail "kill $i: $lost s are lost"
        [ "$(find "$out" -name 'step_*' | wc -l)" -le 3 ] || fail "$(find "$out" -name 'step_*' | wc -l) checkpoints are kept" # two, and the next one
    done
    [ "$kills" -lt 2 ] || contains "resumed at step" "$out.txt"
}

locked_emulation() { # COMMAND ...: while no other test builds or copies the emulation
    mkdir -p build/emulated
    if command -v flock >/dev/null; then flock build/emulated/lock "$@"; else "$@"; fi
}

# emulated TARGET ... [VARIABLE=VALUE ...]: builds these targets of dev/cuda for a CPU in build/emulated, where `make test` has
# already built most of them.
emulated() {
    [ -e dev/cuda/Makefile ] || skip "needs dev/cuda/Makefile"
    locked_emulation make -C dev/cuda --no-print-directory BIN_DIR=../../build/emulated NVCC=/nonexistent "$@" >"$tmp/log" 2>&1 ||
        { tail -n 30 "$tmp/log" && fail "make $* failed"; }
}

# share_emulated TREE: copies the built emulation into TREE, a copy of the sources with the same modification times
share_emulated() {
    [ -e build/dev_cuda/cpu ] || return 0
    mkdir -p "$1/build/dev_cuda"
    # .new: what a make that builds nothing writes and removes
    locked_emulation tar -C build/dev_cuda --exclude='*.new' -cf - cpu | tar -C "$1/build/dev_cuda" -xpf -
}

run_tests() { # [--list | NAME ...]
    local name rc passed=0 failed=0 skipped=0 chosen=("${tests[@]}")
    if [ "${1-}" = --list ]; then
        printf '%s\n' "${tests[@]}"
        return 0
    fi
    [ $# -eq 0 ] || chosen=("$@")
    for name in "${chosen[@]}"; do
        if [[ " ${tests[*]} " != *" $name "* ]]; then # a misspelt name must not look like a success
            echo "$0: no test '$name'; see --list" >&2
            return 2
        fi
        # not in a condition, where `set -e` would be ignored
        (set -eu; "test_$name") >"$tmp/.out" 2>&1 </dev/null
        rc=$?
        case $rc in
        0) passed=$((passed + 1)); echo "ok $name"; sed -n 's/^note: /     /p' "$tmp/.out" ;;
        77) skipped=$((skipped + 1)); echo "skip $name: $(tail -n 1 "$tmp/.out")" ;;
        *) failed=$((failed + 1)); head -n -1 "$tmp/.out"; echo "FAIL $name: $(tail -n 1 "$tmp/.out") (status $rc)" ;;
        esac
    done
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

# Like run_tests, but only `make test` runs the tests: `make sanitize` and others with another BIN_DIR skip them.
run_tests_once() { # [--list | NAME ...]
    local name
    if [ "$called_for" != . ]; then
        for name in "${tests[@]}"; do
            eval "test_$name() { skip 'does not depend on BIN_DIR=$called_for: make test runs it'; }"
        done
    fi
    run_tests "$@"
}
