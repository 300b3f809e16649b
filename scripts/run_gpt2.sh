#!/usr/bin/env bash
# Trains GPT-2 124M, 350M, 774M or 1558M from nothing on public shards of tokens. See --help.
set -eu
cd "$(dirname "$0")/.."

usage() {
    cat <<'HELP'
usage: scripts/run_gpt2.sh SIZE [--plan] [flags of train_gpt2cu]
       scripts/run_gpt2_SIZE.sh [--plan] [flags of train_gpt2cu]

Trains GPT-2 of SIZE (124M, 350M, 774M or 1558M) from nothing on all GPUs of this machine. Started again, it goes on from its
newest checkpoint. The flags come after the script's own and win: scripts/run_gpt2_124M.sh -b 32 --gpus 1

  --plan        print what the run would do, need and cost, and start nothing; needs no GPU, and of the flags only -b
  --help, -h    this text

The shards come from scripts/download.sh; --plan names the command. HellaSwag is measured with each validation if its file is there.
Where a log of the same recipe has been published, its losses are printed beside those of the run.

Environment:
  TRAIN_DATA, VAL_DATA       shards to train and to validate on, as patterns
  OUT_DIR                    where checkpoints and logs go (default: log124M and so on)
  HELLASWAG                  made by dev/data/hellaswag (default: data/hellaswag_val.bin)
  TOKENIZER                  vocabulary for the samples (default: data/gpt2_tokenizer)
  PRICE_PER_GPU_HOUR         a number, for example 2.5: print costs too
  TRAIN                      the program (default: ./train_gpt2cu, which is compiled first)
HELP
}
fail() { # STATUS MESSAGE
    echo "$2" >&2
    exit "$1"
}

# Sets what SIZE stands for. Sources: the rates and the tokens per step of the four models are GPT-3's (Brown et al. 2020,
# arXiv:2005.14165, table 2.1, Small to XL); weight decay 0.1 too (its appendix B). The 700 steps of warm-up, the decay to 0 and
# the number of steps are those of llm.c's scripts/run_gpt2_SIZE.sh; for 124M they are one pass over fineweb10B.
# tokens_per_second: of one H200 with this micro-batch (dev/measured/README.md). published: STEP:LOSS of a published log.
recipe() { # SIZE
    published='' source='' data=edu_fineweb100B total=524288
    case $1 in
    124M)
        depth=12 channels=768 rate=6e-4 steps=19560 micro=64 save=1000 tokens_per_second=641000 data=fineweb10B
        published='1000:4.3170 5000:3.5535 10000:3.3924 15000:3.3003 19560:3.2722'
        source="llm.c on 8 H100 with these shards and this recipe (modded-nanogpt, records/track_1_short/2024-10-13_llmc)"
        ;;
    350M) depth=24 channels=1024 rate=3e-4 steps=60000 micro=32 save=500 tokens_per_second=221000 ;;
    774M) depth=36 channels=1280 rate=2.5e-4 steps=286102 micro=16 save=250 tokens_per_second=106000 ;;
    1558M) depth=48 channels=1600 rate=2e-4 total=1048576 steps=32000 micro=8 save=100 tokens_per_second=51000 ;;
    *) fail 2 "no size '$1': 124M, 350M, 774M or 1558M; see scripts/run_gpt2.sh --help" ;;
    esac
    size=$1 warmup=700 decay=0.1 sequence=1024
    prefix=${data%10*B}
    shards=$(((steps * total + 99999999) / 100000000)) # of 100 million tokens
    case $data in
    fineweb10B) most=103 ;;
    *) most=1001 ;;
    esac
    [ "$shards" -lt "$most" ] || shards=$most
    download="scripts/download.sh $data:$shards vocab"
    [ "$shards" -lt "$most" ] || download="scripts/download.sh $data vocab"
}

# Reads what the script must know of the flags that it passes on. comparable: no flag changes what the model learns.
read_flags() { # FLAG ...
    comparable=yes
    while [ $# -gt 0 ]; do
        case $1 in
        -b | --batch-size) batch=${2-} ;;
        --batch-size=*) batch=${1#*=} ;;
        --gpus) gpus=${2-} ;;
        --gpus=*) gpus=${1#*=} ;;
        -o | --output) out=${2-} ;;
        --output=*) out=${1#*=} ;;
        -[xlkuqcdeaij] | -sl | -sg | --steps* | --learning* | --schedule* | --warmup* | --final* | --weight-decay* | --total* | \
            --model* | --layers* | --channels* | --overfit | --beta* | --eps* | --clip* | --skip* | --train-data* | --val-data*)
            comparable=no
            ;;
        esac
        shift
    done
    [[ $batch =~ ^[1-9][0-9]{0,3}$ ]] || fail 2 "-b wants a number of sequences from 1 to 9999, not '$batch'"
    [[ $gpus =~ ^[0-9]{1,2}$ ]] || fail 2 "--gpus wants a number from 0 to 64, not '$gpus'"
}

# Prints the number of GPUs: of the visible ones, as many as divide the tokens of a step. 0: none is seen here.
count_gpus() {
    local n=0 used=1
    if [ -n "${CUDA_VISIBLE_DEVICES-}" ]; then
        n=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
    elif command -v nvidia-smi >/dev/null; then
        n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || n=0
    fi
    [ "$n" -gt 0 ] || { echo 0; return; }
    while [ $((2 * used)) -le "$n" ] && [ $((2 * used * sequence)) -le $total ]; do used=$((2 * used)); done
    [ "$used" -eq "$n" ] || echo "note: $used of $n GPUs, for $total tokens are not divided by $n" >&2
    echo $used
}

# Prints the gigabytes that a GPU needs: the sum of what train_gpt2.cu plans (plan_parameters, plan_activations) in bf16,
# and what it leaves to the driver and to NCCL (memory_beside).
memory_of() { # B GPUS
    awk -v B="$1" -v n="$2" -v T=$sequence -v L=$depth -v C=$channels 'BEGIN {
        V = 50304
        P = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
        parameters = 2 * P + 4 * P + (n > 1 ? 4 * P / n : 0) + 12 * P / n # weights, gradients, its share of them, AdamW
        activations = B * T * (2 * (16 * L * C + 4 * C + V) + 4 * (4 * L + L * C / 64 + 5))
        tiles = B * T / 128 * C / 64
        scratch = 4 * (tiles * (2 * 4096 + 258 + 8 * 64) + B * 8 * C) # of the backward pass of attention
        beside = (64 + (n > 1 ? 1024 : 512)) * 1048576
        printf "%.1f", (parameters + activations + scratch + beside) * 1e-9
    }'
}
parameters() { echo $(((50257 + 1024) * channels + depth * (12 * channels * channels + 13 * channels) + 2 * channels)); }
duration() { # SECONDS
    local s=$1
    if [ "$s" -lt 86400 ]; then printf '%dh%02dm' $((s / 3600)) $((s / 60 % 60)); return; fi
    printf '%dd%02dh' $((s / 86400)) $((s / 3600 % 24))
}
gigabytes() { awk -v n="$1" 'BEGIN { printf "%.1f GB", n * 1e-9 }'; }
num_files() { # PATTERN
    local n=0 file
    # shellcheck disable=SC2231 # the pattern is to be expanded
    for file in $1; do [ ! -e "$file" ] || n=$((n + 1)); done
    echo $n
}
hellaswag_command="scripts/download.sh hellaswag vocab; make dev/data/hellaswag; dev/data/hellaswag"
hellaswag_command+=" -i data/hellaswag_val.jsonl --tokenizer data/gpt2_tokenizer -o data/hellaswag_val.bin"

plan_row() { printf '%-5s %-13s %-13s %-15s %-9s %s\n' "$@"; }
print_plan() {
    local tokens n b seconds cost checkpoint parts have
    checkpoint=$((12 * $(parameters))) # weights and two moments in fp32
    have=$(num_files "$train_data")
    awk -v s="$size" -v L=$depth -v C=$channels -v p="$(parameters)" 'BEGIN {
        printf "plan of GPT-2 %s: %d layers, %d channels, %d heads, ", s, L, C, C / 64
        printf "%.2f M parameters; nothing is started\n", p * 1e-6 }'
    [ $data = fineweb10B ] && tokens=10255324043 || tokens=${shards}00000000
    awk -v steps=$steps -v total=$total -v shards="$shards" -v data=$data -v n="$tokens" 'BEGIN {
        printf "tokens      %.2f billion, %d steps of %d: %.2f passes over %d shards of %s\n", steps * total * 1e-9, steps,
            total, steps * total / n, shards, data }'
    echo "schedule    rate $rate after $warmup steps of warm-up, then a cosine to 0; weight decay $decay, gradients clipped at 1"
    if [ "$size" = 124M ]; then
        echo "            llm.c's, which are those of GPT-3 Small; one pass, where llm.c's script has 18,865 steps"
    else
        echo "            rate and batch of GPT-3's model of about this size (table 2.1); the number of steps of llm.c's script"
    fi
    plan_row GPUs micro-batch accumulated "memory per GPU" time "${price:+cost}"
    for n in 1 4 8; do
        b=$batch
        while [ $((b * sequence * n)) -gt $total ]; do b=$((b / 2)); done
        seconds=$((steps * total / tokens_per_second / n))
        cost=${price:+$(awk -v s=$seconds -v n=$n -v p="${price:-0}" 'BEGIN { printf "%.0f", s / 3600 * n * p }')}
        parts=$((total / (b * sequence * n)))
        [ $((parts * b * sequence * n)) -eq $total ] || parts="another -b!"
        plan_row "$n" "$b x $sequence" "$parts" \
            "$(memory_of "$b" "$n") GB" "$(duration $seconds)" "$cost"
    done
    echo "            time: at $tokens_per_second tokens/s, measured on one H200 with -b $micro (dev/measured/README.md);"
    echo "            validation, HellaSwag and samples come on top; that N GPUs are N times as fast has not been measured"
    echo "disk        shards $(gigabytes $((2 * tokens + 200000000)))"
    echo "            checkpoints $(gigabytes $((4 * checkpoint))) in $out: 3, and one that is being written"
    if [ "$have" -lt "$shards" ]; then
        echo "shards      $have of $shards are there ($train_data): $download"
    else
        echo "shards      $have are there: $train_data"
    fi
    if [ -e "$hellaswag" ]; then
        echo "HellaSwag   with each validation: $hellaswag"
    else
        echo "HellaSwag   left out, no $hellaswag: $hellaswag_command"
    fi
    print_published
    echo "            nobody has yet run this to the end with this program"
}

print_published() {
    local point
    if [ -z "$published" ]; then
        echo "published   no published log of this recipe"
        return
    fi
    echo "published   validation loss of $source:"
    for point in $published; do echo "            step ${point%:*}: ${point#*:}"; done
    echo "            HellaSwag 29.9% at the end (llm.c, discussion 481; its questions lack the activity labels, which ours have)"
}

# Prints a line for each point of the published log that the run has reached: both losses, and what this start has cost.
compare() {
    local hours
    [ -e "$out/main.log" ] || return 0
    hours=$(awk -v s=$SECONDS -v n="${gpus#0}" 'BEGIN { printf "%.4f", s / 3600 * (n > 0 ? n : 1) }')
    awk -v points="$published" -v hours="$hours" -v price="$price" '
        $2 ~ /^tel:/ { loss[substr($1, 3)] = substr($2, 5) }
        END {
            for (i = 1; i <= split(points, point, " "); i++) {
                split(point[i], p, ":")
                if (!(p[1] in loss)) { continue }
                printf "step %s: validation loss %s, published %s", p[1], loss[p[1]], p[2]
                if (price != "") { printf " | %.2f GPU hours since the start, cost %.2f", hours, hours * price }
                print ""
            }
        }' "$out/main.log"
}

# Runs beside the program, which has the PID of this script: prints each line of compare() once.
watch() {
    local printed=0 lines alive=yes
    while [ $alive = yes ]; do
        sleep "${WATCH_SECONDS:-2}"
        kill -0 $$ 2>/dev/null || alive=no
        lines=$(compare)
        [ -z "$lines" ] || tail -n +$((printed + 1)) <<<"$lines"
        printed=$(grep -c . <<<"$lines") || true
    done
}

main() {
    local plan=no flags=() own have
    [ $# -gt 0 ] || { usage >&2; exit 2; }
    case $1 in
    -h | --help) usage; exit ;;
    esac
    recipe "$1"
    shift
    for own in "$@"; do
        case $own in
        --plan) plan=yes ;;
        -h | --help) usage; exit ;;
        *) flags+=("$own") ;;
        esac
    done
    price=${PRICE_PER_GPU_HOUR-}
    [[ $price =~ ^([0-9]{1,4}(\.[0-9]{1,4})?)?$ ]] || fail 2 "PRICE_PER_GPU_HOUR is a number such as 2.5, not '$price'"
    train_data=${TRAIN_DATA:-data/$data/${prefix}_train_*.bin} val_data=${VAL_DATA:-data/$data/${prefix}_val_*.bin}
    hellaswag=${HELLASWAG:-data/hellaswag_val.bin} tokenizer=${TOKENIZER:-data/gpt2_tokenizer}
    out=${OUT_DIR:-log$size} batch=$micro gpus=0
    read_flags ${flags[@]+"${flags[@]}"}
    if [ $plan = yes ]; then
        print_plan
        exit
    fi

    [ "$gpus" -gt 0 ] || gpus=$(count_gpus)
    while [ $((batch * sequence * gpus)) -gt "$total" ] && [ "$batch" -gt 1 ]; do batch=$((batch / 2)); done
    [ -n "${TRAIN-}" ] || make train_gpt2cu
    [ "$(num_files "$train_data")" -gt 0 ] || fail 1 "no shards match $train_data: $download, or set TRAIN_DATA and VAL_DATA"
    [ "$(num_files "$val_data")" -gt 0 ] || fail 1 "no shards match $val_data: $download, or set VAL_DATA"
    own=(-e "d$depth" -i "$train_data" -j "$val_data" -o "$out" -b "$batch" -t "$sequence" -d "$total" -x "$steps"
        -l "$rate" -k cosine -q 0 -u "$warmup" -c "$decay" -s 5000 -n "$save" -nk 3 -y 1
        -v 250 -m $((10485760 / (batch * sequence * (gpus > 0 ? gpus : 1))))) # llm.c validates on 10,485,760 tokens
    [ ! -e "$tokenizer" ] || own+=(--tokenizer "$tokenizer")
    if [ -e "$hellaswag" ]; then own+=(--hellaswag "$hellaswag"); else echo "no HellaSwag: $hellaswag_command"; fi
    if "${TRAIN:-./train_gpt2cu}" --help | grep -q -e '--gpus'; then own+=(--gpus "$gpus"); fi # the CPU program lacks it
    have=$(num_files "$train_data")
    [ "$have" -ge "$shards" ] || echo "note: $have of $shards shards, which the run repeats; all of them: $download"
    if [ $comparable = no ] || [ "$have" -ne "$shards" ]; then published=; fi
    if [ -n "$published" ]; then
        print_published
        (watch &) # not a child of the program, which waits for those that it starts
    fi
    exec "${TRAIN:-./train_gpt2cu}" "${own[@]}" ${flags[@]+"${flags[@]}"}
}

main "$@"
