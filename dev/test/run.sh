#!/usr/bin/env bash
# Runs the test programs, one per core at a time, and adds up their results.
#
#     dev/test/run.sh [NAME ...]      these tests; default: all dev/test/*/test_*.c (already built) and dev/test/*/test_*.sh
#
# Each program ends with a line `N passed, N failed, N skipped`. So does this script, after a list of the failed and
# skipped tests and of the programs that used the most CPU time. A program that crashes, hangs, omits that line or contradicts
# it counts as one failure. The output of each program is printed after it exits, in the order of the names.
#
#     BIN_DIR=build/sanitize     directory of the binaries; default . (next to their sources)
#     TEST_JOBS=N                programs that run at the same time; default: the number of cores
#     TEST_TIMEOUT=2400          limit on the CPU seconds of a program and all its child processes. A correct program passes on a
#                                slow or busy machine, because wall time does not count. Without /proc, this limits wall time.
#     TEST_SILENCE=900           ends a program that for this many seconds prints nothing and uses less than 5% of a core
#     TEST_BUDGETS=FILE          fails a program that uses 1.5 times its CPU seconds in FILE, such as dev/test/budgets.txt
#     TEST_CPU=FILE              writes the CPU seconds of this run to FILE, in the format of TEST_BUDGETS
#     TEST_WRAPPER='valgrind -q' command to run each binary with; shell tests are then left out
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
export BIN_DIR=${BIN_DIR:-.}
limit=${TEST_TIMEOUT:-2400}
silence=${TEST_SILENCE:-900}
jobs=${TEST_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
wrapper=${TEST_WRAPPER-}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES # a test that runs make must not inherit these
closing='^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$'
ticks=$(getconf CLK_TCK 2>/dev/null || echo 100)
proc=
[ ! -e /proc/self/stat ] || ! command -v setsid >/dev/null || proc=yes

tmp=$(mktemp -d /tmp/llmc_run_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "error: TEST_JOBS is a whole number above 0, not '$jobs'" >&2; exit 2; }
# waiting OpenMP threads must not spin on cores that other programs could use
[ "$jobs" -eq 1 ] || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive}

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    for source in dev/test/{unit,program,gpu}/test_*.c dev/test/{unit,program,gpu}/test_*.sh; do
        [ -e "$source" ] || continue
        [ -n "$wrapper" ] && [[ $source == *.sh ]] && continue
        name=${source##*/}
        names+=("${name%.c}")
    done
fi

# ---- processes ----

# Prints the process IDs of session SID, one per line.
members() { # SID
    awk -v sid="$1" '{ sub(/.*\) /, "") } $4 == sid { n = split(FILENAME, part, "/"); print part[n - 1] }' /proc/[0-9]*/stat 2>/dev/null
}
# Terminates all processes of program I and kills those that still run after 10 s.
end() { # I
    local pid i
    pid=$(cat "$tmp/$1.pid" 2>/dev/null) || return 0
    [ -n "$proc" ] || { kill -TERM "$pid" 2>/dev/null; return 0; }
    for ((i = 0; i < 100; i++)); do
        # shellcheck disable=SC2046
        kill $([ $i -eq 0 ] && echo -TERM || echo -0) $(members "$pid") 2>/dev/null || return 0
        sleep 0.1
    done
    # shellcheck disable=SC2046
    kill -KILL $(members "$pid") 2>/dev/null
}

# Ends programs that exceed the limit on CPU time or are silent and idle for too long.
watch_over() {
    local each i pid used size now
    local -A last_size last_used last_time
    while sleep $((silence < 10 || limit < 10 ? 1 : 2)); do
        # sums the CPU time of each session over its processes and their children that have ended
        awk '{ sub(/.*\) /, ""); sum[$4] += $12 + $13 + $14 + $15 } END { for (s in sum) { print s, sum[s] } }' /proc/[0-9]*/stat \
            >"$tmp/used" 2>/dev/null
        now=$SECONDS
        for each in "$tmp"/*.pid; do
            [ -s "$each" ] || continue
            i=${each##*/} i=${i%.pid}
            pid=$(cat "$each" 2>/dev/null) || continue
            used=$(awk -v sid="$pid" -v ticks="$ticks" '$1 == sid { printf "%d", $2 / ticks }' "$tmp/used")
            size=$(wc -c <"$tmp/$i.log")
            if [ "${last_size[$i]-}" != "$size" ]; then
                last_size[$i]=$size last_used[$i]=${used:-0} last_time[$i]=$now
            fi
            if [ "${used:-0}" -gt "$limit" ]; then
                echo "killed: not done after $limit s of CPU time (TEST_TIMEOUT)" >"$tmp/$i.killed"
            elif [ $((now - last_time[$i])) -ge "$silence" ] && [ $(((${used:-0} - last_used[$i]) * 20)) -lt "$silence" ]; then
                echo "killed: it waits, for $silence s it has printed nothing and computed nothing (TEST_SILENCE)" >"$tmp/$i.killed"
            else
                continue
            fi
            end "$i"
        done
    done
}

interrupted() {
    local each i
    [ -z "${watcher-}" ] || kill "$watcher"
    for each in "$tmp"/*.pid; do
        i=${each##*/}
        [ ! -e "$each" ] || end "${i%.pid}"
    done
    wait
    exit 130
}
trap interrupted INT TERM HUP

# ---- results ----

passed=0 failed=0 skipped=0
: >"$tmp/failures"
: >"$tmp/skips"
: >"$tmp/cpu"

failure() { # NAME REASON: counts a failure that the program itself did not report
    failed=$((failed + 1))
    echo "FAIL $1: $2"
    echo "$1: $2" >>"$tmp/failures"
}

path_of() { # NAME: prints the path of a program, or where it should be if its source does not exist
    local source
    for source in dev/test/*/"$1" dev/test/*/"$1.c"; do
        case $source in
        *'*'*) ;;
        *.sh) [ ! -e "$source" ] || { echo "$source" && return; } ;;
        *) [ ! -e "$source" ] || { echo "$BIN_DIR/${source%.c}" && return; } ;;
        esac
    done
    echo "$BIN_DIR/dev/test/unit/$1"
}

# Runs program I. Writes its output to $tmp/I.log, its exit status to $tmp/I.status and, last, its CPU seconds to $tmp/I.cpu.
execute() { # I NAME
    local path wall=$limit command
    path=$(path_of "$2")
    command=("$path")
    [[ $2 == *.sh ]] || read -r -a command <<<"$wrapper $path"
    [ -z "$proc" ] || wall=0
    : >"$tmp/$1.log"
    if [ -x "$path" ]; then
        # a shell makes its background processes ignore interrupts, and timeout undoes this
        (echo "$BASHPID" >"$tmp/$1.pid" && exec ${proc:+setsid} timeout -k 10 "$wall" "${command[@]}" </dev/null >"$tmp/$1.log" 2>&1) 2>/dev/null
        echo $? >"$tmp/$1.status"
        rm "$tmp/$1.pid" # the PID may be reused by another process
    fi
    times >"$tmp/$1.times" # line 2 holds the user and system time of the terminated children, as 0m1.234s
    awk -F '[ms ]+' 'NR == 2 { printf "%.1f\n", 60 * ($1 + $3) + $2 + $4 }' "$tmp/$1.times" >"$tmp/$1.new"
    mv "$tmp/$1.new" "$tmp/$1.cpu"
}

account() { # I NAME: adds the results of program I to the totals
    local name=$2 log=$tmp/$1.log rc line ours theirs path
    path=$(path_of "$name")
    if [ ! -x "$path" ]; then
        failure "$name" "$path is not there or not executable: make tests"
        return
    fi
    rc=$(<"$tmp/$1.status")
    echo "$(<"$tmp/$1.cpu") $name" >>"$tmp/cpu"
    line=$(tail -n 1 "$log" | tr -d '\0')
    grep -aE '^FAIL ' "$log" | sed "s/^FAIL /$name: /" >>"$tmp/failures"
    grep -aE '^skip ' "$log" | sed "s/^skip /$name: /" >>"$tmp/skips"
    if [ -e "$tmp/$1.killed" ]; then
        failure "$name" "$(<"$tmp/$1.killed")"
        return
    elif [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
        failure "$name" "killed${proc:+ by another process}, or not done after $limit s (TEST_TIMEOUT)"
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

# ---- budgets: CPU seconds of each program, scaled by the time of a calibration loop ----

# Writes the CPU seconds of a fixed loop, which runs in as many processes at the same time as test programs do. Called again when a
# program ends, at most once a minute, because a machine that others use too is not equally fast all the time.
calibrated=$SECONDS
calibrate() {
    local copy i
    [ -n "${TEST_BUDGETS-}${TEST_CPU-}" ] || return 0
    calibrated=$SECONDS
    for ((copy = 0; copy < jobs; copy++)); do
        (TIMEFORMAT=%U && time for ((i = 0; i < 400000; i++)); do :; done) 2>&1 &
    done | cat >>"$tmp/loops"
}

# Fails each program that used more than 1.5 times its budget plus 3 s, which allow for a few more process starts. LOOP is the
# mean of calibrate() on this machine, in milliseconds; $TEST_BUDGETS holds that of the machine that measured the budgets.
over_budget() { # LOOP
    local name reason
    while read -r name reason; do failure "$name" "$reason"; done < <(awk -v loop="$1" -v file="$TEST_BUDGETS" '
        FNR == NR { budget[$2] = $1; if ($1 == "loop") { machine = loop / $2 } next }
        {
            allowed = 1.5 * budget[$2] * machine + 3
            if ($1 > allowed) {
                printf "%s used %.0f s of CPU time, more than %.0f s: 1.5 times the %s s of %s, times %.2f for this machine, and 3 s\n",
                    $2, $1, allowed, budget[$2] + 0, file, machine
            }
        }' "$TEST_BUDGETS" "$tmp/cpu")
}

# ---- the run ----

[ -z "${TEST_BUDGETS-}" ] || [ -r "$TEST_BUDGETS" ] || { echo "error: TEST_BUDGETS=$TEST_BUDGETS cannot be read" >&2; exit 2; }
calibrate
[ ${#names[@]} -gt 0 ] || failure run.sh "no dev/test/*/test_* here"
[ -z "$proc" ] || { watch_over & watcher=$!; }

# start the most expensive programs first: one that starts last leaves the other cores idle
weights=() order=()
for i in ${names[@]+"${!names[@]}"}; do
    weights[i]=$(awk -v name="${names[i]}" '$2 == name { print int($1) }' dev/test/budgets.txt 2>/dev/null)
    weights[i]=$((${weights[i]:-0} + 1))
done
for i in $(for each in ${names[@]+"${!names[@]}"}; do echo "${weights[each]} $each"; done | sort -k 1,1nr -k 2,2n | cut -d ' ' -f 2); do order+=("$i"); done

# Prints the progress and the estimated remaining time on stderr: at a terminal after each program, otherwise once a minute.
told=0
progress() {
    local ended=0 weight=0 i line
    [ -t 2 ] || [ $((SECONDS - told)) -ge 60 ] || return 0
    told=$SECONDS
    for i in "${!names[@]}"; do
        weight=$((weight + weights[i]))
        [ ! -e "$tmp/$i.cpu" ] || ended=$((ended + weights[i]))
    done
    [ $ended -gt 0 ] || return 0
    line="$(ended) of ${#names[@]} programs in $SECONDS s, about $((SECONDS * (weight - ended) / ended)) s left"
    if [ -t 2 ]; then printf '\r%s\033[K' "$line" >&2; else echo "$line" >&2; fi
}
ended() { find "$tmp" -name '*.cpu' | wc -l | tr -d ' '; } # prints the number of programs that have ended

started=0 next=0
while [ $next -lt ${#names[@]} ]; do
    while [ $started -lt ${#names[@]} ] && [ $((started - $(ended))) -lt "$jobs" ]; do
        execute "${order[started]}" "${names[order[started]]}" &
        started=$((started + 1))
    done
    wait -n 2>/dev/null || sleep 0.2
    progress
    [ $((SECONDS - calibrated)) -lt 60 ] || calibrate
    while [ -e "$tmp/$next.cpu" ]; do
        [ ! -t 2 ] || printf '\r\033[K' >&2
        echo "== ${names[next]}"
        cat "$tmp/$next.log"
        account $next "${names[next]}"
        next=$((next + 1))
    done
done
[ -z "${watcher-}" ] || kill "$watcher"
calibrate
if [ -e "$tmp/loops" ]; then
    loop=$(awk '{ sum += $1 } END { printf "%d", 1000 * sum / NR }' "$tmp/loops")
    [ -z "${TEST_BUDGETS-}" ] || over_budget "$loop"
    [ -z "${TEST_CPU-}" ] || { echo "loop $loop" && sort -rn "$tmp/cpu"; } >"$TEST_CPU"
fi

echo
if [ -s "$tmp/failures" ]; then printf 'failed:\n%s\n' "$(sed 's/^/  /' "$tmp/failures")"; fi
if [ -s "$tmp/cpu" ]; then
    printf 'dearest, CPU seconds of %s:\n' "$(awk '{ sum += $1 } END { printf "%.0f", sum }' "$tmp/cpu")"
    sort -rn "$tmp/cpu" | head -n 10 | sed 's/^/  /'
fi
if [ -s "$tmp/skips" ]; then printf 'skipped:\n%s\n' "$(sed 's/^/  /' "$tmp/skips")"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
