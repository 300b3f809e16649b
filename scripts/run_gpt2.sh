#!/usr/bin/env bash
# Trains GPT-2 124M, 350M, 774M or 1558M from scratch on public shards of tokens. See --help.
set -eu
cd "$(dirname "$0")/.."

usage() {
    cat <<'HELP'
usage: scripts/run_gpt2.sh SIZE [--optimizer NAME] [--plan] [flags of train_gpt2cu]
       scripts/run_gpt2_SIZE.sh [--optimizer NAME] [--plan] [flags of train_gpt2cu]

Trains GPT-2 of SIZE (124M, 350M, 774M or 1558M) from scratch on all GPUs of this machine. Run the same command again to resume
from the newest checkpoint. This script chooses the data, the tokens of a step, the steps and the GPUs; all else is the recipe pretrain of
train_gpt2cu. Flags override both: scripts/run_gpt2_124M.sh -b 32 --gpus 1

  --optimizer NAME  muon or adamw (default: muon for 124M, adamw for the others). adamw has llm.c's rate and a cosine schedule. muon:
                Muon for the matrices of the layers, AdamW for the rest, a constant rate that falls in the last fifth.
                On 100 million tokens of other text, muon ended at a validation loss of 2.42 and adamw at 2.81
                (dev/measured/README.md); neither has been compared over these data. --recipe NAME is the same.
  --plan        print what the run will do, need, take and cost, and the command that downloads its data; start nothing.
                This needs no GPU. Of the flags, --optimizer, -b and -o change the plan.
  --help, -h    this text

HellaSwag is measured with each validation if scripts/download.sh has fetched it. Where a log of the same settings is published, and
no flag but --optimizer adamw, -b, -o and --gpus is given, its validation losses are printed beside those of the run. -i and -j name
shards of your own; their vocabulary is beside them, and --hellaswag names the questions in it.

Environment:
  DATA_DIR             the --dir of scripts/download.sh (default: data)
  PRICE_PER_GPU_HOUR   a number, for example 2.5: --plan prints the cost too
HELP
}
fail() { # STATUS MESSAGE
    echo "$2" >&2
    exit "$1"
}

# Sets what a run of SIZE is trained on, and for how long, as in llm.c's scripts/run_gpt2_SIZE.sh, with two differences. 124M makes
# one whole pass over fineweb10B, as in the published log. 350M and 774M take FineWeb-Edu, as 1558M does, where llm.c takes FineWeb.
# tokens_per_second: of one H200 with this micro-batch, from dev/measured/README.md.
# sequence_gb: activations of one sequence, as train_gpt2cu prints them; test_fake_gpu.sh compares.
# published: STEP:LOSS ... of a log with adamw, and its source.
choose_data() { # SIZE
    published='' source='' name=adamw data=edu_fineweb100B prefix=edu_fineweb most_shards=1001 total=524288
    case $1 in
    124M)
        data=fineweb10B prefix=fineweb most_shards=103 name=muon
        depth=12 channels=768 steps=19560 micro=64 tokens_per_second=691000 sequence_gb=0.4156
        published='1000:4.3170 5000:3.5535 10000:3.3924 15000:3.3003 19560:3.2722'
        source="llm.c on 8 H100, modded-nanogpt's records/track_1_short/2024-10-13_llmc"
        ;;
    350M)
        depth=24 channels=1024 steps=60000 micro=32 tokens_per_second=244000 sequence_gb=0.9233
        ;;
    774M)
        depth=36 channels=1280 steps=286102 micro=16 tokens_per_second=112000 sequence_gb=1.6325
        ;;
    1558M)
        total=1048576
        depth=48 channels=1600 steps=32000 micro=8 tokens_per_second=51000 sequence_gb=2.6459
        ;;
    *) fail 2 "no size '$1': 124M, 350M, 774M or 1558M; see scripts/run_gpt2.sh --help" ;;
    esac
    size=$1 sequence=1024
    shards=$(((steps * total + 99999999) / 100000000)) # of 100 million tokens
    download="scripts/download.sh $data:$shards hellaswag vocab"
    if [ $shards -ge $most_shards ]; then
        shards=$most_shards
        download="scripts/download.sh $data hellaswag vocab"
    fi
    [ "$data_dir" = data ] || download="${download/.sh/.sh --dir $(printf %q "$data_dir")}"
}

# Sets what is to be said of the optimizer.
describe_optimizer() {
    case $name in
    adamw) caveat='' ;;
    muon)
        published=
        caveat="muon ended at a validation loss of 2.42 where adamw had 2.81, with 124M on 100 million tokens of other text, 65,536 a
           step (dev/measured/README.md); over this run's tokens they have not been compared. llm.c's: --optimizer adamw"
        ;;
    *) fail 2 "--optimizer wants muon or adamw, not '$name'" ;;
    esac
}

# Prints how many GPUs the run takes: of the visible ones, the largest power of two with which micro-batches fill a step. 0: none.
count_gpus() {
    local n=0 used=1
    if [ -n "${CUDA_VISIBLE_DEVICES-}" ]; then
        n=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
    elif command -v nvidia-smi >/dev/null; then
        n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || n=0
    fi
    while [ $((2 * used)) -le "$n" ] && [ $((2 * used * ${batch:-1} * sequence)) -le $total ]; do used=$((2 * used)); done
    if [ "$n" -eq 0 ]; then used=0; fi
    [ "$used" -eq "$n" ] ||
        echo "note: using $used of $n GPUs: a power of two, and each takes ${batch:-1} x $sequence of a step's $total tokens at least" >&2
    echo $used
}

num_files() { # PATTERN: the number of files that match
    compgen -G "$1" | wc -l
}

# Memory: 2 bytes of weights and 4 of gradients per parameter; AdamW's 12, of which Muon needs 8 for the matrices of the layers,
# and, with several GPUs, 4 more of gradients are shared (ZeRO-1); activations; then the driver and the libraries, as unplanned_bytes() in train_gpt2.cu has them.
print_plan() {
    local have gpus
    have=$(num_files "$train_data") gpus=$(count_gpus)
    : "${batch:=$micro}"
    [ $((total % (batch * sequence))) -eq 0 ] || fail 2 "-b $batch: $total tokens per step are not a multiple of $batch x $sequence"
    awk -v size="$size" -v L=$depth -v C=$channels -v steps=$steps -v total=$total -v shards="$shards" -v data=$data \
        -v name="$name" -v B="$batch" -v T=$sequence -v speed=$tokens_per_second \
        -v sequence_gb=$sequence_gb -v price="$price" -v out="$out" -v micro=$micro '
    function duration(s) {
        return s < 86400 ? sprintf("%dh%02dm", s / 3600, s / 60 % 60) : sprintf("%dd%02dh", s / 86400, s / 3600 % 24)
    }
    BEGIN {
        P = (50257 + 1024) * C + L * (12 * C * C + 13 * C) + 2 * C
        padded = P + 47 * C # vocabulary of 50304
        tokens = data == "fineweb10B" ? 10255324043 : shards * 1e8
        printf "plan of GPT-2 %s: %d layers, %d channels, %d heads, %.2f M parameters; nothing is started\n", size, L, C, C / 64, P * 1e-6
        printf "tokens     %.2f billion: %d steps of %d, %.2f passes over %d shards of %s\n", steps * total * 1e-9, steps, total,
            steps * total / tokens, shards, data
        printf "recipe     pretrain with %s: train_gpt2cu --help says what it sets, and a run prints it\n", name
        print "GPUs  micro-batch  accumulated  memory per GPU  time      " (price == "" ? "" : "cost")
        for (n = 1; n <= 8 && n * B * T <= total; n *= 2) {
            state = (12 + (n > 1 ? 4 : 0)) * padded - (name == "muon" ? 4 * 12 * C * C * L : 0)
            gb = (6 * padded + state / n) * 1e-9 + B * sequence_gb + (n > 1 ? 1.14 : 0.60)
            s = steps * total / speed / n
            printf "%-4d  %-11s  %-11d  %-14s  %-8s  %s\n", n, B " x " T, total / (B * T * n), sprintf("%.1f GB", gb), duration(s),
                price == "" ? "" : sprintf("%.0f", s / 3600 * n * price)
        }
        printf "time       at %d tokens/s, measured on one H200 with -b %d (dev/measured/README.md), times the number of GPUs: 2 to 8\n",
            speed, micro
        print "           H200s came to 97 to 101% of that with AdamW; validation, HellaSwag and samples come on top"
        print "memory     with the micro-batch shown; without -b a run takes the largest that its GPUs hold, 64 x 1024 at most"
        printf "disk       %.1f GB of shards; %.1f GB of checkpoints in %s: the last 2 and one being written\n", (2 * tokens + 2e8) * 1e-9,
            3 * 12 * P * 1e-9, out
    }'
    echo "here       $gpus GPUs; $have of $shards shards match $train_data"
    [ "$have" -ge "$shards" ] && [ -e "$data_dir/hellaswag_val.jsonl" ] || echo "download   $download"
    if [ -n "$caveat" ]; then echo "caveat     $caveat"; fi
    if [ -n "$published" ]; then echo "published  step:validation loss $published ($source)"; fi
    echo "           This program has not been run through all of this to its end yet."
}

# Adds to `extra` the flags for the vocabulary and HellaSwag, as far as they are there. The first run makes tokens of the questions.
use_downloads() {
    local vocabulary=$data_dir/gpt2_tokenizer questions=$data_dir/hellaswag_val
    if [ -e "$vocabulary" ]; then extra+=(--tokenizer "$vocabulary"); fi
    if [ ! -e "$questions.bin" ] && [ -e "$questions.jsonl" ] && [ -e "$vocabulary" ]; then
        make dev/data/hellaswag
        dev/data/hellaswag -i "$questions.jsonl" --tokenizer "$vocabulary" -o "$questions.bin"
    fi
    if [ -e "$questions.bin" ]; then extra+=(--hellaswag "$questions.bin"); else echo "note: without HellaSwag: $download" >&2; fi
}

# In the background, prints each published loss beside the run's own when that is in main.log, until the program has ended, which
# has the PID of this script. The subshell keeps it from being a child of the program, which waits for its children.
compare_losses() {
    (tail -n +1 -s 1 --pid=$$ -F "$out/main.log" 2>/dev/null | while read -r step loss _; do
        step=${step#s:}
        [[ $loss == tel:* && " $published" =~ " $step:"([0-9.]+) ]] || continue
        echo "step $step: validation loss ${loss#tel:}, published ${BASH_REMATCH[1]}"
        published=${published/$step:${BASH_REMATCH[1]}/}
    done &)
}

# Reads the flags that this script must know; the others go into `flags`, for the program.
read_flags() { # FLAG ...
    plan=no flags=() own_data=no out=log_gpt2_$size batch='' gpus=0 optimizer=()
    train_data="$data_dir/$data/${prefix}_train_*.bin" val_data="$data_dir/$data/${prefix}_val_*.bin"
    while [ $# -gt 0 ]; do
        case $1 in
        --batch-size=* | --train-data=* | --val-data=* | --output=* | --gpus=* | --recipe=* | --optimizer=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            ;;
        esac
        case $1 in
        -b | --batch-size | -i | --train-data | -j | --val-data | -o | --output | --gpus | --recipe | --optimizer)
            [ $# -gt 1 ] || fail 2 "$1 wants a value"
            ;;
        esac
        case $1 in
        --plan) plan=yes ;;
        -h | --help) usage; exit ;;
        -b | --batch-size) batch=$2; shift ;;
        -i | --train-data) train_data=$2 own_data=yes published=; shift ;;
        -j | --val-data) val_data=$2 published=; shift ;;
        -o | --output) out=$2; shift ;;
        --gpus) gpus=$2; shift ;;
        --recipe | --optimizer) name=$2 optimizer=(--optimizer "$2"); shift ;;
        *) flags+=("$1") published= ;;
        esac
        shift
    done
    [[ $batch =~ ^([1-9][0-9]{0,3})?$ ]] || fail 2 "-b wants a number of sequences from 1 to 9999, not '$batch'"
    [[ $gpus =~ ^(0|[1-9][0-9]?)$ ]] || fail 2 "--gpus wants a number from 0 to 64, not '$gpus'"
}

run() {
    local have own extra=()
    have=$(num_files "$train_data")
    [ "$have" -gt 0 ] || fail 1 "no shards match $train_data: $download, or name your own with -i and -j"
    [ "$(num_files "$val_data")" -gt 0 ] || fail 1 "no shards match $val_data: $download, or name your own with -j"
    if [ "$have" -lt "$shards" ] && [ $own_data = no ]; then
        published=
        echo "note: $have of $shards shards, which the run repeats; all of them: $download" >&2
    fi
    [ "$gpus" -gt 0 ] || gpus=$(count_gpus)
    make train_gpt2cu
    [ $own_data = yes ] || use_downloads
    own=(--recipe pretrain -e "d$depth" -i "$train_data" -j "$val_data" -o "$out" -d "$total" -x "$steps" -y 1
        ${batch:+-b "$batch"} ${optimizer[@]+"${optimizer[@]}"})
    [ "$gpus" -eq 0 ] || own+=(--gpus "$gpus")
    if [ -n "$caveat" ]; then echo "optimizer  $caveat"; fi
    if [ -n "$published" ]; then
        echo "published  step:validation loss $published ($source)"
        compare_losses
    fi
    exec ./train_gpt2cu "${own[@]}" ${extra[@]+"${extra[@]}"} ${flags[@]+"${flags[@]}"}
}

main() {
    [ $# -gt 0 ] || { usage >&2; exit 2; }
    case $1 in
    -h | --help) usage; exit ;;
    esac
    data_dir=${DATA_DIR:-data} price=${PRICE_PER_GPU_HOUR-}
    [[ $price =~ ^([0-9]{1,4}(\.[0-9]{1,4})?)?$ ]] || fail 2 "PRICE_PER_GPU_HOUR is a number such as 2.5, not '$price'"
    choose_data "$1"
    read_flags "${@:2}"
    describe_optimizer
    if [ $plan = yes ]; then print_plan; else run; fi
}

main "$@"
