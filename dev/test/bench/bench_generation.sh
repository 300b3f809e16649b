#!/usr/bin/env bash
# Measures how fast train_gpt2cu generates text. See --help.
set -u -o pipefail
cd "$(dirname "$0")/../../.." || exit 1

usage() {
    cat <<'HELP'
usage: dev/test/bench/bench_generation.sh [--quick] [--logs DIR]

How fast text is generated, with random weights: microseconds a step for 1 to 64 texts side by side, greedy, 1023 tokens after the first;
with weights in 8 bits; for 1558M; the time of a prompt; and 1,000 prompts of random lengths, continued side by side as others end,
against batches of 64 that each wait for their longest text. Prints a line when a run has ended. A run that fails is named, and the
others go on. The exit code is 1 if one has failed.

  --quick       1, 8 and 64 texts only, without 8 bits, and 200 prompts
  --logs DIR    keep the output of each run there
  --help, -h    this text

Environment:
  TRAIN         the program (default: ./train_gpt2cu)
  LLMC_DATA     a directory with the vocabulary gpt2_tokenizer/ and tinyshakespeare.txt, of whose words the prompts are
                (default: ../shared/data)
  BENCH_MODEL, BENCH_LARGE, BENCH_TOKENS, BENCH_LIMIT
                flags of the models (-e d12, -e d48), positions of a text (1024), and the seconds that a run may take (120)
HELP
}
. dev/test/bench/bench.sh

quick='' logs=''
read -r -a model <<<"${BENCH_MODEL:--e d12}"
read -r -a large <<<"${BENCH_LARGE:--e d48}"
positions=${BENCH_TOKENS:-1024} limit=${BENCH_LIMIT:-120}
train=${TRAIN:-./train_gpt2cu} data=${LLMC_DATA:-../shared/data}
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --quick) quick=yes ;;
    --logs) [ $# -ge 2 ] || fail 2 "--logs wants a value, see --help"; logs=$2; shift ;;
    *) fail 2 "unknown argument '$1', see --help" ;;
    esac
    shift
done
[ -x "$train" ] || fail 1 "$train is not there: make train_gpt2cu"
bench_open "$data" "$logs"

failed=0 runs=0
# Generates. Sets `value` to the number before UNIT in the program's line of times, and prints it behind TEXT unless that is empty;
# names a run that failed, and why.
run() { # NAME TEXT UNIT FLAGS ...
    local rc=0
    runs=$((runs + 1)) value=''
    timeout -k 10 "$limit" "$train" --temperature 0 --stop-at-eot 0 --tokenizer "$data/gpt2_tokenizer" "${@:4}" \
        >"$logs/$1.out" 2>"$logs/$1.err" </dev/null || rc=$?
    value=$(grep -a '^\[loaded' "$logs/$1.err" | sed -nE "s|.* ([0-9.]+) $3.*|\1|p")
    if [ $rc -eq 0 ] && [ -n "$value" ]; then
        [ -z "$2" ] || printf "%-52s %10s %s\n" "$2" "$value" "${3%%;*}"
        return
    fi
    failed=$((failed + 1)) value=''
    printf '%-52s FAILED: %s\n' "${2:-$1}" \
        "$([ $rc -eq 124 ] && echo "not done after $limit s" || { grep -ah '^error' "$logs/$1.err" || echo "exit code $rc"; } | head -n 1)"
}

# ---- texts side by side ----

texts=(1 2 4 8 16 32 64) formats=(int8 fp8)
[ -z "$quick" ] || { texts=(1 8 64) formats=(); }
long=(--prompt '' --num-tokens $((positions - 1)))
for n in "${texts[@]}"; do
    run "texts$n" "${model[*]}, $n texts" "us a step" "${model[@]}" "${long[@]}" --num-samples "$n"
done
for format in ${formats[@]+"${formats[@]}"}; do
    for n in 1 8 64; do
        run "${format}_$n" "${model[*]}, $n texts, --weights $format" "us a step" "${model[@]}" "${long[@]}" --num-samples "$n" --weights "$format"
    done
done
run large "${large[*]}, 1 text" "us a step" "${large[@]}" "${long[@]}"
for format in ${formats[@]+"${formats[@]}"}; do
    run "large_$format" "${large[*]}, 1 text, --weights $format" "us a step" "${large[@]}" "${long[@]}" --weights "$format"
done

# ---- prompts ----

# prompts N: N lines of words of the text; each line has a random number of words, up to half of the positions
prompts() {
    for _ in {1..20}; do cat "$data/tinyshakespeare.txt"; done | tr -s ' ' '\n' | awk -v n="$1" -v most=$((positions / 2)) '
        BEGIN { srand(1); left = 1 + int(rand() * most) }
        NF && lines < n { line = line (line == "" ? "" : " ") $0; if (--left == 0) { print line; line = ""; lines++; left = 1 + int(rand() * most) } }
        END { exit lines < n }'
}
count=1000
[ -z "$quick" ] || count=200
run first "${model[*]}, a prompt of one token" "ms; generated" "${model[@]}" --prompt 'The' --num-tokens 2
prompts $count >"$tmp/prompts" || fail 1 "$data/tinyshakespeare.txt has too few words"
made=() # tokens per second
for parallel in 64 256; do
    run "parallel$parallel" "${model[*]}, $count prompts, --parallel $parallel" "tok/s" "${model[@]}" --prompts "$tmp/prompts" \
        --num-tokens "$positions" --parallel $parallel
    made+=("$value")
done
# Batches of 64: a text that has ended leaves its place empty until the batch has ended.
tokens=0 seconds=0 ok=yes
split -l 64 "$tmp/prompts" "$tmp/batch."
for batch in "$tmp"/batch.*; do
    run "static.${batch##*.}" "" "us a step" "${model[@]}" --prompts "$batch" --num-tokens "$positions" --parallel 64
    [ -n "$value" ] || { ok='' && break; }
    # the time of the prompts, and of all tokens but the first ones, which come with the prompts
    read -r ms new rate <<<"$(sed -nE 's|.*tokens in ([0-9.]+) ms; generated: ([0-9]+) tokens, .* ([0-9.]+) tok/s.*|\1 \2 \3|p' \
        "$logs/static.${batch##*.}.err")"
    ms=$(awk "BEGIN { print $ms + 1e3 * ($new - $(wc -l <"$batch")) / $rate }")
    tokens=$((tokens + new)) seconds=$(awk "BEGIN { print $seconds + $ms / 1e3 }")
done
if [ -n "$ok" ]; then
    rate=$(awk "BEGIN { printf \"%.1f\", $tokens / $seconds }")
    printf '%-52s %10s tok/s\n' "${model[*]}, $count prompts in batches of 64" "$rate"
    [ -z "${made[0]}" ] || awk "BEGIN { printf \"%-52s %10.2f times\n\", \"side by side, against batches\", ${made[0]} / $rate }"
fi
echo "$runs runs, $failed failed, $SECONDS s"
[ $failed -eq 0 ]
