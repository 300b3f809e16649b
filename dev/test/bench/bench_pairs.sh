#!/usr/bin/env bash
# Compares the speed of two builds of train_gpt2cu or train_gpt2. See --help.
set -u -o pipefail
. "$(dirname "$0")/bench.sh"

usage() {
    cat <<'HELP'
usage: dev/test/bench/bench_pairs.sh [--pairs N] OLD NEW FLAGS ...

Runs the programs OLD and NEW in turn, OLD NEW NEW OLD ..., so that a drift of the clock slows both. Prints the time of each run and
the ratio new/old of each pair, then the median of the ratios, and their mean with its 95% interval. The time is the program's own: of
a training run, the median of the last two thirds of its steps; of a generation, the time of a step.

    ... ./old ./new --recipe llmc -e d12 -i 'data/ts_train_*.bin' -b 64 -t 1024 -v 0 -s 0 --no-tune -x 60
    ... ./old ./new -e d12 --tokenizer data/gpt2 --temperature 0 --stop-at-eot 0 --prompt '' --num-tokens 1023 --num-samples 64

  --pairs N     2 to 20 (default: 5)
  --help, -h    this text
HELP
}
pairs=5
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --pairs)
        [[ ${2-} =~ ^[0-9]+$ ]] && [ "$2" -ge 2 ] && [ "$2" -le 20 ] || fail 2 "--pairs wants a number from 2 to 20"
        pairs=$2 && shift 2 ;;
    -*) fail 2 "unknown flag '$1' before the two programs, see --help" ;;
    *) break ;;
    esac
done
[ $# -ge 3 ] || fail 2 "two programs and their flags are wanted, see --help"
programs=("$1" "$2") flags=("${@:3}")
for each in "${programs[@]}"; do [ -x "$each" ] || fail 1 "$each is not a program"; done
# Prints the time of a run. Version 1.0 prints every step, and has no --log-every.
run() { # 0|1
    local out rc=0 every=()
    [[ " ${flags[*]} " == *" --prompt "* ]] || ! "${programs[$1]}" --help all 2>/dev/null | grep -aq -e --log-every || every=(--log-every 1)
    out=$("${programs[$1]}" "${flags[@]}" ${every[@]+"${every[@]}"} 2>&1 </dev/null) || rc=$?
    [ $rc -eq 0 ] || { grep -a '^error' <<<"$out" | head -n 1 >&2 && fail 1 "${programs[$1]}: exit code $rc"; }
    awk '
        /^\[loaded/ && match($0, /[0-9.]+ us a step/) { print substr($0, RSTART, RLENGTH); done = 1; exit }
        /^step +[0-9]+\// && match($0, /[0-9.]+ ms \|/) { ms[++n] = substr($0, RSTART) + 0 }
        END {
            if (done) { exit }
            if (!n) { exit 1 }
            first = int(n / 3)
            for (i = first + 1; i <= n; i++) {
                less = 0
                for (j = first + 1; j <= n; j++) { less += ms[j] < ms[i] || (ms[j] == ms[i] && j < i) }
                if (less == int((n - first) / 2)) { print ms[i], "ms a step" }
            }
        }' <<<"$out" || fail 1 "${programs[$1]} printed no times: $(tail -n 1 <<<"$out")"
}

for ((i = 0; i < pairs; i++)); do
    for which in $((i % 2)) $((1 - i % 2)); do
        took=$(run $which) || exit 1
        times[which]=$took
    done
    awk -v old="${times[0]%% *}" -v new="${times[1]%% *}" 'BEGIN { printf "%s %s %.4f\n", old, new, new / old }'
done | awk '
    BEGIN { split("12.71 4.30 3.18 2.78 2.57 2.45 2.36 2.31 2.26 2.23 2.20 2.18 2.16 2.14 2.13 2.12 2.11 2.10 2.09", t, " ") } # Student
    { printf "old %s new %s ratio %s\n", $1, $2, $3; r[NR] = $3; sum += $3; squares += $3 * $3 }
    END {
        if (NR < 2) { exit 1 }
        for (i = 1; i <= NR; i++) { for (j = i; j > 1 && r[j - 1] > r[j]; j--) { x = r[j]; r[j] = r[j - 1]; r[j - 1] = x } }
        mean = sum / NR
        deviation = sqrt((squares - NR * mean * mean > 0 ? squares - NR * mean * mean : 0) / (NR - 1))
        printf "new/old: median %.4f, mean %.4f +- %.4f (95%%), %d pairs\n", (r[int((NR + 1) / 2)] + r[int(NR / 2) + 1]) / 2, mean,
            t[NR - 1] * deviation / sqrt(NR), NR
    }'
