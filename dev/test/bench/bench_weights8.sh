#!/usr/bin/env bash
# What weights in 8 bits cost in loss. See --help.
set -u -o pipefail
cd "$(dirname "$0")/../../.." || exit 1

usage() {
    cat <<'HELP'
usage: dev/test/bench/bench_weights8.sh [--logs DIR]

What --weights int8 and fp8 cost: trains a model on tinyshakespeare, but for its first 32,768 tokens, and prints the loss of these and
the accuracy at HellaSwag with full weights and with both formats. A run that fails is named, and the exit code is then 1.

  --logs DIR    keep the checkpoint and the output of each run there
  --help, -h    this text

Environment:
  TRAIN         the program (default: ./train_gpt2cu)
  TOOLS         the directory of tokenize and hellaswag (default: dev/data)
  LLMC_DATA     a directory with the vocabulary gpt2_tokenizer/, tinyshakespeare.txt and hellaswag_val.txt, without which HellaSwag is
                left out (default: ../shared/data)
  BENCH_MODEL   flags of the model and of training (-e d12 -b 32 -t 1024 -l 6e-4 -x 100)
  BENCH_LIMIT   the seconds that a run may take (120)
HELP
}
. dev/test/bench/bench.sh

logs='' tokens=32768
read -r -a model <<<"${BENCH_MODEL:--e d12 -b 32 -t 1024 -l 6e-4 -x 100}"
train=${TRAIN:-./train_gpt2cu} tools=${TOOLS:-dev/data} data=${LLMC_DATA:-../shared/data} limit=${BENCH_LIMIT:-120}
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --logs) [ $# -ge 2 ] || fail 2 "--logs wants a value, see --help"; logs=$2; shift ;;
    *) fail 2 "unknown argument '$1', see --help" ;;
    esac
    shift
done
[ -x "$train" ] || fail 1 "$train is not there: make train_gpt2cu"
[ -x "$tools/tokenize" ] && [ -x "$tools/hellaswag" ] || fail 1 "$tools has no tokenize and hellaswag: make $tools/tokenize $tools/hellaswag"
bench_open "$data" "$logs"

# Runs a program; its output goes to NAME.out and NAME.err. Says why a run has failed.
run() { # NAME PROGRAM FLAGS ...
    local rc=0 why
    timeout -k 10 "$limit" "${@:2}" >"$logs/$1.out" 2>"$logs/$1.err" </dev/null || rc=$?
    [ $rc -eq 0 ] && return
    why=$(grep -ah '^error' "$logs/$1.err" | head -n 1)
    [ $rc -ne 124 ] || why="not done after $limit s"
    echo "$1 FAILED: ${why:-exit code $rc}"
    return 1
}

files="$tmp/ts_val_*.bin"
run tokenize "$tools/tokenize" -i "$data/tinyshakespeare.txt" -t "$data/gpt2_tokenizer" -o "$tmp/ts" -v $tokens || exit 1
if [ -s "$data/hellaswag_val.txt" ]; then
    run questions "$tools/hellaswag" -i "$data/hellaswag_val.txt" -t "$data/gpt2_tokenizer" -o "$tmp/hellaswag.bin" || exit 1
    files+=,$tmp/hellaswag.bin
fi
run train "$train" --recipe llmc "${model[@]}" -i "$tmp/ts_train_*.bin" -v 0 -s 0 -o "$logs/model" || exit 1

failed=0 loss='' full=''
printf '%-8s %10s %12s %10s\n' weights loss 'more, %' HellaSwag
for weights in full int8 fp8; do
    run $weights "$train" -e "$logs/model" --eval "$files" --weights $weights --json || { failed=1 && continue; }
    loss=$(sed -nE 's/.*"loss": ?([0-9.]+).*/\1/p' "$logs/$weights.out" | head -n 1)
    [ $weights != full ] || full=$loss
    printf '%-8s %10.5f %12s %10s\n' $weights "$loss" "$([ -z "$full" ] || awk "BEGIN { printf \"%.3f\", 100 * ($loss / $full - 1) }")" \
        "$(sed -nE 's/.*"acc_per_token": ?([0-9.]+).*/\1/p' "$logs/$weights.out" | head -n 1 | cut -c 1-6)"
done
exit $failed
