#!/usr/bin/env bash
# Runs test programs one after another and adds up what they report.
#
#     dev/test/run.sh [NAME ...]      all of dev/test/test_*.c (built) and dev/test/test_*.sh, or the ones named
#
# Each program ends with a line `N passed, N failed, N skipped`; so does this script, after the names of what failed and
# what was skipped. A program that crashes, hangs, does not end with that line or contradicts it counts as one failure.
#
#     BIN_DIR=build/sanitize     where the binaries lie, default . (beside their sources)
#     TEST_TIMEOUT=2400          seconds for each program
#     TEST_WRAPPER='valgrind -q' is put before each binary; shell tests are then left out
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
export BIN_DIR=${BIN_DIR:-.}
limit=${TEST_TIMEOUT:-2400}
wrapper=${TEST_WRAPPER-}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES # a test that runs make starts afresh
closing='^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$'

tmp=$(mktemp -d /tmp/llmc_run_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'kill -TERM "$(cat "$tmp/pid")"; exit 130' INT TERM HUP

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    for source in dev/test/test_*.c dev/test/test_*.sh; do
        [ -e "$source" ] || continue
        [ -n "$wrapper" ] && [[ $source == *.sh ]] && continue
        name=${source##*/}
        names+=("${name%.c}")
    done
fi

passed=0 failed=0 skipped=0
: >"$tmp/failures"
: >"$tmp/skips"

failure() { # NAME REASON: one that the program itself did not report
    failed=$((failed + 1))
    echo "FAIL $1: $2"
    echo "$1: $2" >>"$tmp/failures"
}

run_one() { # NAME
    local name=$1 rc line ours theirs
    local path=$BIN_DIR/dev/test/$name
    [[ $name == *.sh ]] && path=dev/test/$name
    echo "== $name"
    if [ ! -x "$path" ]; then
        failure "$name" "$path is not there or not executable: make tests"
        return
    fi
    local command=("$path")
    [[ $name == *.sh ]] || read -r -a command <<<"$wrapper $path"
    # timeout ends the whole process group that it makes; in the background, so that a trap can end timeout
    (echo "$BASHPID" >"$tmp/pid" && exec timeout -k 10 "$limit" "${command[@]}" </dev/null 2>&1) | tee "$tmp/log" &
    wait $!
    rc=$?
    line=$(tail -n 1 "$tmp/log" | tr -d '\0')
    grep -aE '^FAIL ' "$tmp/log" | sed "s/^FAIL /$name: /" >>"$tmp/failures"
    grep -aE '^skip ' "$tmp/log" | sed "s/^skip /$name: /" >>"$tmp/skips"
    if [ $rc -eq 124 ] || [ $rc -eq 137 ]; then
        failure "$name" "killed, or not done after $limit s (TEST_TIMEOUT)"
        return
    elif [ $rc -gt 128 ]; then
        failure "$name" "ended by signal $((rc - 128)) ($(kill -l $((rc - 128))))"
        return
    elif ! [[ $line =~ $closing ]]; then
        failure "$name" "ended with status $rc without a line 'N passed, N failed, N skipped'"
        return
    fi
    read -r -a ours <<<"$line"
    passed=$((passed + ours[0]))
    failed=$((failed + ours[2]))
    skipped=$((skipped + ours[4]))
    theirs=$((ours[2] > 0))
    [ $rc -eq $theirs ] || failure "$name" "says '$line' but ends with status $rc"
    [ $((ours[0] + ours[2] + ours[4])) -gt 0 ] || failure "$name" "runs no test"
}

[ ${#names[@]} -gt 0 ] || failure run.sh "no dev/test/test_* here"
for name in ${names[@]+"${names[@]}"}; do run_one "$name"; done

echo
if [ -s "$tmp/failures" ]; then printf 'failed:\n%s\n' "$(sed 's/^/  /' "$tmp/failures")"; fi
if [ -s "$tmp/skips" ]; then printf 'skipped:\n%s\n' "$(sed 's/^/  /' "$tmp/skips")"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
