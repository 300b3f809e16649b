#!/usr/bin/env bash
# check.sh BINARY ...: runs --check of programs that `make cpu` has built, CPU_JOBS at a time (default: one per core),
# and prints a table: which kernels ran, which did not and why, how many checks passed. Exit 1 if a check failed.
# CPU_FLAGS_CHECK="--schedule 3" passes flags on, CPU_LOGS=DIR keeps the programs' output, CPU_TIMEOUT=900 seconds per op.
set -u
flags=${CPU_FLAGS_CHECK:-}

if [ "${1-}" = --one ]; then # BINARY LOGS: the check of one program
    binary=$2
    log=$3/$(basename "$2")
    "$binary" --list >"$log.list"
    begin=$(date +%s)
    # one thread per program; no guards: the emulation itself knows where each allocation ends
    # shellcheck disable=SC2086
    EMULATION_THREADS=1 timeout "${CPU_TIMEOUT:-900}" "$binary" --check --no-guards $flags >"$log.log" 2>&1
    echo $? >"$log.status"
    echo $(($(date +%s) - begin)) >"$log.seconds"
    exit 0
fi

[ $# -gt 0 ] || { echo "usage: $0 BINARY ..." >&2; exit 2; }
jobs=${CPU_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
logs=${CPU_LOGS:-$(mktemp -d /tmp/llmc_cpu_XXXXXX)} || exit 1
[ -n "${CPU_LOGS:-}" ] || trap 'rm -rf "$logs"' EXIT
mkdir -p "$logs"
for binary in "$@"; do
    case $binary in */*) echo "$binary" ;; *) echo "./$binary" ;; esac
done | xargs -P "$jobs" -I{} "$0" --one {} "$logs"

printf '%-48s %8s %8s %7s %7s %7s  %s\n' op emulated skipped passed failed seconds 'not emulated'
failures=0
for binary in "$@"; do
    log=$logs/$(basename "$binary")
    # a line per kernel that did not run, with the reason that its check gave
    awk -v op="$(basename "$binary")" -v seconds="$(cat "$log.seconds")" -v status="$(cat "$log.status")" '
        FILENAME ~ /[.]list$/ { if ($1 ~ /^[0-9]+$/) { listed[++n] = $1 } next }
        /^ok kernel /   { ran[$3] = 1; passed++ }
        /^FAIL kernel / { ran[$3] = 1; failed++ }
        /^[0-9]+ passed, [0-9]+ failed, / { passed = $1; failed = $3 } # a failure that was found before has no line
        /^skip kernel / {
            why = $0; sub(/.*\): /, "", why); sub(/, but the GPU.*/, "", why); sub(/, which is not emulated/, "", why)
            skip[$3] = why
        }
        /^skip [A-Z].*: needs cu/ { why = $0; sub(/.*: /, "", why); sub(/, which is not emulated/, "", why); shape = why }
        END {
            for (i = 1; i <= n; i++) {
                k = listed[i]
                if (ran[k]) { emulated++; continue }
                skipped++
                why = skip[k] != "" ? skip[k] : shape != "" ? shape " to declare it" : "not declared for this device"
                if (!(why in names)) { order[++m] = why }
                names[why] = names[why] (names[why] == "" ? "" : " ") k
            }
            for (i = 1; i <= m; i++) { text = text (i > 1 ? "; " : "") names[order[i]] ": " order[i] }
            if (status == 124) { text = "TIMED OUT; " text }
            else if (status != 0 && !failed) { text = "ENDED WITH STATUS " status "; " text }
            printf "%-48s %8d %8d %7d %7d %7d  %s\n", op, emulated, skipped, passed, failed, seconds, text
        }' "$log.list" "$log.log"
done | tee "$logs/table"
awk '{ e += $2; s += $3; p += $4; f += $5 } END { printf "%d kernels emulated, %d skipped; %d passed, %d failed\n", e, s, p, f }' \
    "$logs/table"
for binary in "$@"; do # what failed, at most 5 lines per op
    log=$logs/$(basename "$binary")
    [ "$(cat "$log.status")" -eq 0 ] && continue
    failures=$((failures + 1))
    echo "FAIL $(basename "$binary") (status $(cat "$log.status")):"
    grep '^FAIL' "$log.log" | head -n 5
    tail -n 1 "$log.log"
done
[ "$failures" -eq 0 ]
