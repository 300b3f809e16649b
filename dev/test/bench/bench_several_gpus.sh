#!/usr/bin/env bash
# Measures train_gpt2cu on each GPU of this machine alone and on all of them together. See --help.
set -u -o pipefail
cd "$(dirname "$0")/../../.." || exit 1

usage() {
    cat <<'HELP'
usage: dev/test/bench/bench_several_gpus.sh [--gpus N] [--rows NAME,...] [--logs DIR]

What several GPUs bring: tokens per second of 124M with one micro-batch and with several, with -z 0, with --overlap on and off, and of
1558M, each against N times the slowest card alone, in the same call. Which card is the slowest is found by letting each train by itself,
all at once. It is then timed alone before and after the rows that are compared with it, because a card slows down when it is hot. Prints
a line when a run has ended, and a table last. A run that fails is named, and the others go on. Two cards take some four minutes.

  --gpus N      so many cards (default: those of CUDA_VISIBLE_DEVICES, else all)
  --rows NAME,...
                rows to measure, with the card alone beside them (default: every one). 124M: all (one micro-batch), beside and
                separate (--overlap on and off), reduced (-z 0), micro (several micro-batches). 1558M: large, large_beside,
                large_separate, adamw (large, and what sharding AdamW saves)
  --logs DIR    keep the output of each run there
  --help, -h    this text

Needs ./train_gpt2cu, dev/data/tokenize and NCCL (LLMC_NCCL=.../libnccl.so.2 if the dynamic linker does not find it).

Environment:
  TRAIN         the program (default: ./train_gpt2cu)
  LLMC_DATA     a directory with tinyshakespeare.txt and the vocabulary gpt2_tokenizer/ (default: ../shared/data), or any text
                file. Without a vocabulary a token is a byte; models keep GPT-2's vocabulary.
  BENCH_MODEL, BENCH_B, BENCH_LARGE, BENCH_LARGE_B, BENCH_T, BENCH_STEPS, BENCH_LIMIT
                flags of the models (-e d12, -e d48), sequences per micro-batch (64, 8), their length (1024), steps of a run (25),
                and the seconds that it may take (120)
HELP
}
fail() { # STATUS MESSAGE
    echo "error: $2" >&2
    exit "$1"
}

cards=() logs="" all_rows=all,beside,separate,reduced,micro,large,large_beside,large_separate,adamw
rows=$all_rows
read -r -a model <<<"${BENCH_MODEL:--e d12}"
read -r -a large <<<"${BENCH_LARGE:--e d48}"
B=${BENCH_B:-64} large_B=${BENCH_LARGE_B:-8} T=${BENCH_T:-1024} steps=${BENCH_STEPS:-25} limit=${BENCH_LIMIT:-120}
warmup=$((steps / 5))
train=${TRAIN:-./train_gpt2cu} data=${LLMC_DATA:-../shared/data}
IFS=, read -r -a cards <<<"${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -s -d ,)}"
N=${#cards[@]}
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --gpus | --rows | --logs) [ $# -ge 2 ] || fail 2 "$1 wants a value, see --help" ;;
    *) fail 2 "unknown argument '$1', see --help" ;;
    esac
    case $1 in
    --logs) logs=$2 ;;
    --rows)
        [[ ,$2, != *,,* ]] || fail 2 "--rows wants names, separated by commas, see --help"
        IFS=, read -r -a names <<<"$2"
        for name in "${names[@]}"; do [[ ,$all_rows, == *",$name,"* ]] || fail 2 "--rows: there is no '$name', see --help"; done
        rows=$2
        [[ ,$rows, != *,adamw,* ]] || rows=$rows,large
        ;;
    *) [[ $2 =~ ^[1-9][0-9]?$ ]] || fail 2 "$1 wants a number from 1 to 99, got '$2'" ;;&
    --gpus) N=$2 ;;
    esac
    shift 2
done
[ ${#cards[@]} -gt 0 ] || for ((i = 0; i < N; i++)); do cards+=("$i"); done
[ "$N" -ge 2 ] || fail 1 "needs two GPUs, there are $N here: nvidia-smi -L"
[ "$N" -le ${#cards[@]} ] || fail 1 "--gpus $N: there are only ${#cards[@]} GPUs here"
[ -x "$train" ] || fail 1 "$train is not there: make train_gpt2cu"
[ -x dev/data/tokenize ] || fail 1 "dev/data/tokenize is not there: make dev/data/tokenize"
cards=("${cards[@]:0:N}")
export CUDA_DEVICE_ORDER=PCI_BUS_ID

tmp=$(mktemp -d /tmp/llmc_bench_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
logs=${logs:-$tmp/logs}
mkdir -p "$logs" && rm -f "$logs"/nccl.* "$logs"/*.out "$logs"/*.err || exit 1

# ---- data ----

# Makes shards with a micro-batch for each card, and more, from the text over and over.
make_shards() {
    local text=$data vocabulary=() bytes=$((8 * N * B * T))
    if [ -d "$data" ]; then
        text=$data/tinyshakespeare.txt
        [ ! -d "$data/gpt2_tokenizer" ] || vocabulary=(-t "$data/gpt2_tokenizer")
    fi
    [ -s "$text" ] || fail 1 "$text is not there: LLMC_DATA names a directory with tinyshakespeare.txt and gpt2_tokenizer/, or a text file"
    while [ "$(($(stat -c %s "$tmp/text" 2>/dev/null || echo 0)))" -lt $bytes ]; do cat "$text" >>"$tmp/text"; done
    dev/data/tokenize -i "$tmp/text" "${vocabulary[@]}" -o "$tmp/data/bench" --val-tokens 0 2>"$tmp/tokenize.err" ||
        fail 1 "dev/data/tokenize: $(tail -n 1 "$tmp/tokenize.err")"
    [ ${#vocabulary[@]} -gt 0 ] || echo "note: no vocabulary: a token is a byte, which makes some kernels slower or faster than text does"
    find "$tmp/data" -type f ! -name '*.bin' -delete # so that models have GPT-2's vocabulary
}

# ---- runs ----

declare -A ms spread plan used text tokens
names=()

# Sets rc; output to $logs/NAME.out and .err.
start() { # NAME GPUS FLAGS ...
    rc=0
    timeout -k 10 "$limit" "$train" --gpus "$2" -i "$tmp/data/*.bin" -t "$T" --recipe llmc -v 0 -s 0 "${@:3}" \
        >"$logs/$1.out" 2>"$logs/$1.err" </dev/null || rc=$?
}
reason() { # NAME: why it has failed
    if [ "$rc" -eq 124 ]; then echo "not done after $limit s"; return; fi
    { grep -ah '^error' "$logs/$1.err" || echo "exit code $rc, nothing said"; } | head -n 1
}

# Trains and prints a line; sets the figures of NAME. TOKENS: of all cards in a step.
run() { # NAME TEXT GPUS TOKENS FLAGS ...
    local begin=$SECONDS
    start "$1" "$3" -x "$steps" -lg $((steps - 1)) "${@:5}"
    report "$1" "$2" "$4"
}
# The same of a run that has ended. The caller's `begin` is when it began, and `rc` its exit code.
report() { # NAME TEXT TOKENS
    local name=$1 figures low high
    names+=("$name") text[$name]=$2 tokens[$name]=$3 ms[$name]=''
    figures=$(sed -nE 's/^step +([0-9]+)\/.*\| ([0-9.]+) ms \|.*/\1 \2/p' "$logs/$name.out" | awk -v skip=$warmup '$1 > skip { print $2 }' |
        sort -n | awk '{ v[NR] = $1 } END { if (NR) { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2, v[1 + int(NR / 10)], v[NR - int(NR / 10)] } }')
    if [ "$rc" -ne 0 ] || [ -z "$figures" ]; then
        printf '%-46s FAILED: %s\n' "$2" "$(reason "$name")"
        return
    fi
    read -r "ms[$name]" low high <<<"$figures"
    spread[$name]="$low..$high"
    plan[$name]=$(sed -nE 's/^memory: .*: ([0-9.]+) GB of the .*/\1/p' "$logs/$name.out")
    used[$name]=$(sed -nE 's/^GPU memory: ([0-9.]+) GB in use.*/\1/p' "$logs/$name.out" | tail -n 1)
    printf '%-46s %9.2f ms (%s), %s tok/s, memory of rank 0: plan %s GB, in use %s, took %d s\n' "$2" "${ms[$name]}" "${spread[$name]}" \
        "$(per_second "$name")" "${plan[$name]}" "${used[$name]}" $((SECONDS - begin))
}
per_second() { awk "BEGIN { printf \"%.0f\", ${tokens[$1]} * 1e3 / ${ms[$1]} }"; } # NAME

# Times AdamW by --profile, and has NCCL say what it does, which would disturb a timed run. Sets adamw[NAME].
declare -A adamw=()
profile() { # NAME TEXT GPUS FLAGS ...
    export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,TUNING NCCL_DEBUG_FILE=$logs/nccl.%p
    start "$1" "$3" --profile "${@:4}"
    unset NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE
    adamw[$1]=$(awk '$1 == "adamw" { print $3 }' "$logs/$1.out")
    if [ $rc -ne 0 ] || [ -z "${adamw[$1]}" ]; then
        adamw[$1]=
        printf '%-46s FAILED: %s\n' "$2" "$(reason "$1")"
        return
    fi
    printf '%-46s AdamW takes %s ms of a step\n' "$2" "${adamw[$1]}"
}

# The version, and for each collective its algorithm, protocol and channels (one CTA each), as far as this NCCL says them.
nccl_says() {
    sed -nE 's/^(exchanges: .*)/\1/p' "$logs"/{all,micro,large}.out 2>/dev/null
    sed -nE 's/^[0-9]+ ranks .*: (NCCL [0-9.]+), .*/\1/p' "$logs"/*.out | sort -u
    cat "$logs"/nccl.* 2>/dev/null | grep -aoE '[0-9]+ coll channels' | sort -u
    cat "$logs"/nccl.* 2>/dev/null | grep -aoE '([A-Za-z]+: )?[0-9]+ Bytes -> Algo .*' | sed -E 's/ time [0-9.]+$//' | awk '
        { name = $1 ~ /:$/ ? $1 : "collective:"; bytes = $1 ~ /:$/ ? $2 : $1; sub(/.* Bytes -> /, ""); key = name " " $0
          calls[key]++; if (bytes > most[key]) { most[key] = bytes } }
        END { for (key in calls) { printf "%s, %d calls, up to %.1f MB\n", key, calls[key], most[key] / 1e6 } }' | sort
}

# ---- the table ----

# Lets each card train by itself, all at once, so that they share power and cooling as in the runs of all cards. Sets card: the slowest.
find_slowest() {
    local i begin=$SECONDS slow=
    for ((i = 0; i < N; i++)); do
        { CUDA_VISIBLE_DEVICES=${cards[i]} start "card$i" 1 -x "$steps" -lg $((steps - 1)) "${both[@]}" -d $share && echo "$rc" >"$tmp/rc$i"; } &
    done
    wait
    for ((i = 0; i < N; i++)); do
        rc=$(cat "$tmp/rc$i")
        report "card$i" "card ${cards[i]} beside the others, $name -b $B -d $share" $share
        [ -n "${ms[card$i]}" ] || continue
        if [ -z "$slow" ] || awk "BEGIN { exit !(${ms[card$i]} > ${ms[card$slow]}) }"; then slow=$i; fi
    done
    card=${cards[${slow:-0}]}
}
# Sets the figures of NAME: the mean of a card's run before and one after those of all cards, because a card slows down when it is
# hot; if one of them has failed, the other.
bracket() { # NAME BEFORE AFTER
    local one=${ms[${2:-none}]-} two=${ms[$3]-}
    ms[$1]='' tokens[$1]=${tokens[$3]} text[$1]="card $card alone, before and after"
    [ -z "$one$two" ] || ms[$1]=$(awk "BEGIN { print (${one:-$two} + ${two:-$one}) / 2 }")
    [ -z "${ms[$1]}" ] || printf '%-46s %10.2f %12.0f\n' "${text[$1]}" "${ms[$1]}" "$(per_second "$1")"
}
# Prints a row: a run of all cards against N times one card alone, which takes as many micro-batches. SAVED: ms that a step of the
# card alone takes for what the others would do for it.
row() { # NAME ALONE [SAVED TEXT]
    local alone=${2:-none}
    [ -n "${ms[$1]-}" ] && [ -n "${ms[$alone]-}" ] || { printf '%-46s %12s\n' "${4-${text[$1]}}" "not measured"; return; }
    awk -v text="${4-${text[$1]}}" -v ms="${ms[$1]}" -v alone="${ms[$alone]}" -v saved="${3-0}" -v n="$N" -v tokens="${tokens[$1]}" \
        'BEGIN { printf "%-46s %10.2f %12.0f %14.0f %8.2f%%\n", text, ms, tokens * 1e3 / ms, tokens * 1e3 / (alone - saved), 100 * (alone - saved) / ms }'
}

make_shards
micro=$((N == 2 ? 4 : N < 16 ? 32 / N : 2)) # micro-batches of a card: 524288 tokens a step for 2 cards, 2097152 for 4 and 8
total=$((micro * N * B * T))
name=${model[*]} large_name=${large[*]}
echo "$N cards (${cards[*]}), $steps steps a run, medians without the first $warmup; -t $T"
both=("${model[@]}" -b "$B") both_large=("${large[@]}" -b "$large_B") share=$((total / N)) # share: tokens of a card in a step of `total`
find_slowest
wanted() { # NAME ...: whether a row is one of them
    local name
    for name in "$@"; do [[ ,$rows, != *,$name,* ]] || return 0; done
    return 1
}
together() { CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${cards[*]}") "$@"; }
by_itself() { CUDA_VISIBLE_DEVICES=$card "$@"; }
# trains on all cards, if the row NAME is wanted
row_of() { ! wanted "$1" || together run "$1" "$N cards, $2" "$N" "${@:3}"; } # NAME TEXT TOKENS FLAGS ...
! wanted all beside separate reduced || by_itself run alone "card $card alone, $name -b $B" 1 $((B * T)) "${both[@]}"
row_of all "$name -b $B" $((N * B * T)) "${both[@]}"
row_of beside "$name -b $B --overlap on" $((N * B * T)) "${both[@]}" --overlap on
row_of separate "$name -b $B --overlap off" $((N * B * T)) "${both[@]}" --overlap off
row_of reduced "$name -b $B -z 0" $((N * B * T)) "${both[@]}" -z 0
! wanted all beside separate reduced || by_itself run again "card $card alone again, $name -b $B" 1 $((B * T)) "${both[@]}"
if wanted micro; then
    by_itself run alone_micro "card $card alone, $name -b $B -d $share" 1 $share "${both[@]}" -d $share
    row_of micro "$name -b $B -d $total" $total "${both[@]}" -d $total
    by_itself run again_micro "card $card alone again, $name -b $B -d $share" 1 $share "${both[@]}" -d $share
fi
if wanted large large_beside large_separate adamw; then
    by_itself run alone_large "card $card alone, $large_name -b $large_B" 1 $((large_B * T)) "${both_large[@]}"
    row_of large "$large_name -b $large_B" $((N * large_B * T)) "${both_large[@]}"
    row_of large_beside "$large_name -b $large_B --overlap on" $((N * large_B * T)) "${both_large[@]}" --overlap on
    row_of large_separate "$large_name -b $large_B --overlap off" $((N * large_B * T)) "${both_large[@]}" --overlap off
    by_itself run again_large "card $card alone again, $large_name -b $large_B" 1 $((large_B * T)) "${both_large[@]}"
fi
if wanted adamw; then
    by_itself profile profile1 "card $card alone, $large_name, --profile" 1 "${both_large[@]}"
    together profile profileN "$N cards, $large_name, --profile" "$N" "${both_large[@]}"
fi

echo
sed -nE 's/^memory: .* GB free on (.*)/card: \1/p' "$logs/card0.out"
nccl_says | sed 's/^/NCCL: /; s/^NCCL: NCCL/NCCL:/'
! wanted adamw || [ -e "$(echo "$logs"/nccl.* | cut -d ' ' -f 1)" ] || echo "NCCL: protocol and channels were not said"
printf '%-46s %10s %12s %14s %9s\n' "" "ms" "tok/s" "$N x slowest" ""
print_rows() { # REFERENCE BEFORE AFTER NAME ...: the wanted ones, below the card alone
    local name
    wanted "${@:4}" || return 0
    bracket "${@:1:3}"
    for name in "${@:4}"; do ! wanted "$name" || row "$name" "$1"; done
}
print_rows reference alone again all beside separate reduced
print_rows reference_micro alone_micro again_micro micro
print_rows reference_large alone_large again_large large large_beside large_separate
if [ -n "${adamw[profile1]-}" ] && [ -n "${adamw[profileN]-}" ]; then
    saved=$(awk "BEGIN { print ${adamw[profile1]} - ${adamw[profileN]} }")
    row large reference_large "$saved" "  without the $saved ms that AdamW's shares save"
fi
failed=0
for name in "${names[@]}"; do [ -n "${ms[$name]}" ] || failed=$((failed + 1)); done
for name in "${!adamw[@]}"; do [ -n "${adamw[$name]}" ] || failed=$((failed + 1)); done
echo "$((${#names[@]} + ${#adamw[@]})) runs, $failed failed, $SECONDS s"
[ $failed -eq 0 ]
