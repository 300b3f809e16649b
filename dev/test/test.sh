# shellcheck shell=bash
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
# What is too much for each run is tried in turn, by the number of the day; LLMC_TEST_FULL=1 tries all of it, and
# LLMC_TEST_DAY=20000 what another day tries.
day=${LLMC_TEST_DAY:-$(($(date +%s) / 86400))}
# Runs do not measure what is 100% MFU, which takes longer than all else in a run of a few steps.
export LLMC_MACHINE_GFLOPS=${LLMC_MACHINE_GFLOPS-100}
tmp=$(mktemp -d /tmp/llmc_test_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT

# The files below DIR that the commits of the newest one's last 24 hours have changed, or that are not committed.
changed_lately() { # DIR
    local base
    base=$(git rev-list -1 --before=$(($(git log -1 --format=%ct) - 86400)) HEAD 2>/dev/null) || return 0
    git diff --name-only "${base:-$(git hash-object -t tree /dev/null)}" -- "$1" # without an older commit: all of them
    git ls-files --others --exclude-standard "$1"
}
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

# share_engine TREE: gives a copy of the sources the engine of dev/cuda/emulation, if it was built here from what is here now,
# as .ci/run does before the tests. Each copy that has to build its own takes 14 s more.
share_engine() {
    make -q -C dev/cuda cpu-engine >/dev/null 2>&1 || return 0
    mkdir -p "$1/build/dev_cuda/cpu"
    cp build/dev_cuda/cpu/*.o "$1/build/dev_cuda/cpu/" # newer than the copied sources
}

# emulated_tree TREE: copies the sources from which dev/cuda builds the whole program for a CPU, because other tests build such
# programs at the same time
emulated_tree() {
    mkdir -p "$1/dev/test"
    cp -r llmc ./*.cu "$1/"
    cp -r dev/cuda "$1/dev/"
    cp dev/test/*.h "$1/dev/test/"
    rm -f "$1"/dev/cuda/*_cpu*
    share_engine "$1"
}

run_tests() { # [--list | NAME ...]
    local name rc passed=0 failed=0 skipped=0 wanted=("${tests[@]}")
    if [ "${1-}" = --list ]; then
        printf '%s\n' "${tests[@]}"
        return 0
    fi
    [ $# -eq 0 ] || wanted=("$@")
    for name in "${wanted[@]}"; do
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
