#!/usr/bin/env bash
# Runs the test programs and adds up their results.
#
#     dev/test/run.sh [NAME ...]      these tests; default: all dev/test/test_*.c (already built) and dev/test/test_*.sh
#
# Each program ends with a line `N passed, N failed, N skipped`. So does this script, after listing the tests that
# failed or were skipped. A program that crashes, hangs, lacks that line or contradicts it counts as one failure.
#
#     BIN_DIR=build/sanitize     directory of the binaries; default . (next to their sources)
#     TEST_TIMEOUT=2400          seconds per program
#     TEST_JOBS=1                number of programs to run in parallel; if more than 1, the output of each is shown
#                                when it has ended, in order of the names
#     TEST_WRAPPER='valgrind -q' command to run each binary with; shell tests are then left out
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
export BIN_DIR=${BIN_DIR:-.}
limit=${TEST_TIMEOUT:-2400}
jobs=${TEST_JOBS:-1}
wrapper=${TEST_WRAPPER-}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES # a test that runs make must not inherit these
closing='^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$'

tmp=$(mktemp -d /tmp/llmc_run_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
interrupted() {
    local pid
    for pid in "$tmp"/*.pid; do [ ! -e "$pid" ] || kill -TERM "$(cat "$pid")"; done
    wait
    exit 130
}
trap interrupted INT TERM HUP
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "error: TEST_JOBS is a whole number above 0, not '$jobs'" >&2; exit 2; }
# waiting OpenMP threads must not spin on cores that other programs could use
[ "$jobs" -eq 1 ] || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive}

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

failure() { # NAME REASON: counts a failure that the program itself did not report
    failed=$((failed + 1))
    echo "FAIL $1: $2"
    echo "$1: $2" >>"$tmp/failures"
}

path_of() { if [[ $1 == *.sh ]]; then echo "dev/test/$1"; else echo "$BIN_DIR/dev/test/$1"; fi; }

# Runs program I and prints its output; its exit status goes to $tmp/I.status, its time in seconds to $tmp/I.seconds.
execute() { # I NAME
    local start=$SECONDS command path
    path=$(path_of "$2")
    command=("$path")
    [[ $2 == *.sh ]] || read -r -a command <<<"$wrapper $path"
    if [ -x "$path" ]; then
        # timeout ends the whole process group that it creates; the trap of this script ends timeout
        (echo "$BASHPID" >"$tmp/$1.pid" && exec timeout -k 10 "$limit" "${command[@]}" </dev/null 2>&1)
        echo $? >"$tmp/$1.status"
        rm "$tmp/$1.pid" # the PID may be reused by another process
    fi
    echo $((SECONDS - start)) >"$tmp/$1.seconds"
}

account() { # I NAME: adds the results of program I to the totals
    local name=$2 log=$tmp/$1.log rc line ours theirs path
    path=$(path_of "$name")
    if [ ! -x "$path" ]; then
        failure "$name" "$path is not there or not executable: make tests"
        return
    fi
    rc=$(<"$tmp/$1.status")
    [ "$(<"$tmp/$1.seconds")" -lt 10 ] || echo "$(<"$tmp/$1.seconds") s $name" >>"$tmp/slow"
    line=$(tail -n 1 "$log" | tr -d '\0')
    grep -aE '^FAIL ' "$log" | sed "s/^FAIL /$name: /" >>"$tmp/failures"
    grep -aE '^skip ' "$log" | sed "s/^skip /$name: /" >>"$tmp/skips"
    if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
        failure "$name" "killed, or not done after $limit s (TEST_TIMEOUT)"
        return
    elif [ "$rc" -gt 128 ]; then
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
    [ "$rc" -eq $theirs ] || failure "$name" "says '$line' but ends with status $rc"
    [ $((ours[0] + ours[2] + ours[4])) -gt 0 ] || failure "$name" "runs no test"
}

[ ${#names[@]} -gt 0 ] || failure run.sh "no dev/test/test_* here"
if [ "$jobs" -eq 1 ]; then
    for i in ${names[@]+"${!names[@]}"}; do
        echo "== ${names[i]}"
        execute "$i" "${names[i]}" | tee "$tmp/$i.log" & # in the background, so that a trap can end it
        wait $!
        account "$i" "${names[i]}"
    done
else
    # the longest first, and those that use one core before those that use all: if one of them ran last, the other cores would
    # be idle
    longest=(test_resume.sh test_emulation.sh test_learn.sh test_readme.sh test_program.sh test_several_gpus.sh test_dev_cuda.sh
        test_fake_gpu.sh test_ops.sh test_gpu.sh)
    order=() rest=() running=0 next=0
    for name in "${longest[@]}"; do
        for i in ${names[@]+"${!names[@]}"}; do [ "${names[i]}" != "$name" ] || order+=("$i"); done
    done
    for i in ${names[@]+"${!names[@]}"}; do [[ " ${longest[*]} " == *" ${names[i]} "* ]] || rest+=("$i"); done
    order+=(${rest[@]+"${rest[@]}"})
    while [ $next -lt ${#names[@]} ]; do
        while [ $running -lt "$jobs" ] && [ ${#order[@]} -gt 0 ]; do
            execute "${order[0]}" "${names[order[0]]}" >"$tmp/${order[0]}.log" &
            order=("${order[@]:1}") running=$((running + 1))
        done
        wait -n
        running=$((running - 1))
        while [ -e "$tmp/$next.seconds" ]; do
            echo "== ${names[next]}"
            cat "$tmp/$next.log"
            account $next "${names[next]}"
            next=$((next + 1))
        done
    done
fi

echo
if [ -s "$tmp/failures" ]; then printf 'failed:\n%s\n' "$(sed 's/^/  /' "$tmp/failures")"; fi
if [ -s "$tmp/slow" ]; then printf 'slowest:\n%s\n' "$(sort -rn "$tmp/slow" | sed 's/^/  /')"; fi
if [ -s "$tmp/skips" ]; then printf 'skipped:\n%s\n' "$(sed 's/^/  /' "$tmp/skips")"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
