#!/usr/bin/env bash
# Runs compute-sanitizer's four tools on train_gpt2cu and on every op of dev/cuda. Needs a GPU.
#
#     dev/test/gpu/sanitize_gpu.sh [--list | PART ...]
#
# PART is train, train_graph (the step as a CUDA graph), sample (from train's checkpoint), ops, or the name of an op;
# a leading `ops` before names of ops is optional. Prints a line per tool and program, then
# `N passed, N failed, N skipped`.
#
#     TOOLS="memcheck racecheck initcheck synccheck"
#     SHAPES=small         small: the shapes below; odd: the shapes of --check, which have more tails and take minutes
#                          instead of seconds
#     PRECISION=BF16       FP16, FP32
#     JOBS=nproc/2         runs in parallel; at most one per 16 GB of memory, which racecheck needs
#     SANITIZE_TIMEOUT=240 seconds per tool and program
#
# Programs and logs are written below build/sanitize_gpu.
set -u -o pipefail
cd "$(dirname "$0")/../../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL
export PATH=$PATH:/usr/local/cuda/bin
tools=${TOOLS:-memcheck racecheck initcheck synccheck}
precision=${PRECISION:-BF16}
cores=$(nproc)
memory=$(awk '/^MemTotal/ { print int($2 / 16e6) }' /proc/meminfo)
jobs=${JOBS:-$((cores / 2 < memory ? cores / 2 : memory))}
[ "$jobs" != 0 ] || jobs=1
limit=${SANITIZE_TIMEOUT:-240}
dir=build/sanitize_gpu/$precision
usage() { echo "$0: $1" >&2; exit 2; }
for tool in $tools; do
    [[ " memcheck racecheck initcheck synccheck " == *" $tool "* ]] || usage "no tool '$tool'"
done
for number in "$jobs" "$limit"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || usage "JOBS and SANITIZE_TIMEOUT are whole numbers above 0, not '$number'"
done
[[ ${SHAPES:=small} =~ ^(small|odd)$ ]] || usage "SHAPES is small or odd, not '$SHAPES'"

# ---- what can be run: parts of the program, ops ----

all_ops=()
for source in dev/cuda/*.cu; do
    name=${source##*/}
    [[ $name != practice_* ]] || continue # of `make practice`
    # nccl_all_reduce has no kernel of its own and lacks the flags of the other ops
    [ ! -e "$source" ] || [ "$name" = nccl_all_reduce.cu ] || all_ops+=("${name%.cu}")
done
if [ "${1-}" = --list ]; then
    printf '%s\n' train train_graph train_fp8 sample "${all_ops[@]}"
    exit 0
fi
parts=() ops=() want_all_ops=
for name in "$@"; do
    if [[ $name =~ ^(train|train_graph|train_fp8|sample)$ ]]; then
        parts+=("$name")
    elif [ "$name" = ops ]; then
        want_all_ops=yes
    elif [[ " ${all_ops[*]} " == *" $name "* ]]; then
        ops+=("$name")
    else
        usage "no part '$name'; see --list"
    fi
done
if [ $# -eq 0 ]; then
    parts=(train train_graph sample) want_all_ops=yes
    [ "$precision" != BF16 ] || parts+=(train_fp8) # --fp8 is for bf16
fi
if [ -n "$want_all_ops" ] && [ ${#ops[@]} -eq 0 ]; then ops=("${all_ops[@]}"); fi

# shapes OP: prints a line of flags for each run of the op. The shapes are small enough for racecheck and, where the op
# allows it, no multiple of a tile. --list names the kinds of an op.
shapes() {
    [ "$SHAPES" = small ] || { echo; return; }
    case $1 in
    adamw) printf '%s\n' "-B 1 -T 17 -C 776 --kind 3" "-B 2 -T 16 -C 777" ;; # stochastic rounding; a master copy
    global_norm) echo "-B 2 -T 17 -C 777" ;;
    matmul_adamw) printf '%s\n' "-B 1 -T 300 -C 64 -V 200" "-B 1 -T 130 -C 136 -V 264 --kind 1" ;;
    ffn | gelu_linear | layernorm_linear | linear_gelu) echo "-B 1 -T 130 -C 136" ;; # two tiles of rows
    linear_cross_entropy) echo "-B 2 -T 65 -C 64 -V 1000" ;; # two tiles of rows, six of columns
    fused_attention_*) printf '%s\n' "-B 1 -T 17 -C 768 -NH 12" "-B 2 -T 130 -C 384 -NH 6" ;;
    transformer_block) echo "-B 1 -T 130 -C 384 -NH 6" ;;
    attention_forward) # the last shape wraps around the rings of the kernels that have one
        printf '%s\n' "-B 1 -T 17 -C 768 -NH 12" "-B 2 -T 70 -C 128 -NH 2" "-B 2 -T 70 -C 96 -NH 2" "-B 1 -T 130 -C 256 -NH 1" \
            "-B 1 -T 600 -C 64 -NH 1" "-B 1 -T 600 -C 128 -NH 1"
        ;;
    attention_*)
        printf '%s\n' "-B 1 -T 17 -C 768 -NH 12" "-B 2 -T 70 -C 128 -NH 2" "-B 2 -T 70 -C 96 -NH 2" "-B 1 -T 130 -C 256 -NH 1" \
            "-B 1 -T 200 -C 128 -NH 1"
        ;;
    decode_attention) printf '%s\n' "-B 2 -T 70 -C 128 -NH 2" "-B 34 -T 200 -C 64 -NH 1" ;;
    decode_layer) printf '%s\n' "-T 66 -C 320 -NH 5" "-B 8 -T 40 -C 128 -NH 2" "-B 11 -T 70 -C 128 -NH 2" ;;
    decode_matvec) # with layernorm, with residual; both in 8 bits, the last one with quantize_weights
        printf '%s\n' "-B 1 -T 1 -C 768 -V 77" "-B 3 -T 4 -C 128 -V 200 --kind 1" "-B 1 -T 4 -C 776 -V 1301 --kind 4" \
            "-B 3 -T 1 -C 128 -V 77 --kind 6"
        ;;
    decode_matmul) # clusters of 2 and 4, with layernorm and with residual; the head; 8 bits
        printf '%s\n' "-B 33 -T 1 -C 776 -V 77" "-B 17 -T 4 -C 776 -V 40 --kind 1" "-B 9 -T 1 -C 128 -V 1003 --kind 2" \
            "-B 17 -T 4 -C 776 -V 40 --kind 4" "-B 9 -T 1 -C 128 -V 1003 --kind 8"
        ;;
    decode_sample) printf '%s\n' "-B 2 -T 1 -V 1003" "-B 2 -T 1 -V 1003 --kind 4" "-B 2 -T 1 -V 1003 --kind 8" ;; # greedy; top-k and top-p; all rules
    matmul_forward) printf '%s\n' "-B 1 -T 17 -C 136 -V 264 --kind 1" "-B 1 -T 130 -C 200 -V 136 --kind 2" ;;
    matmul_backward) printf '%s\n' "-B 1 -T 17 -C 136 -V 264 --kind 1" "-B 1 -T 130 -C 200 -V 136 --kind 2" ;;
    quantize) printf '%s\n' "-B 1 -T 80 -C 272 --kind 1" "-B 1 -T 80 -C 272 --kind 5" "-B 1 -T 48 -C 272 --kind 2" ;;
    layernorm_quantize) printf '%s\n' "-B 1 -T 17 -C 784" "-B 1 -T 80 -C 784 --kind 2" ;;
    matmul_fp8) printf '%s\n' "-B 1 -T 130 -C 208 -V 400" "-B 1 -T 130 -C 208 -V 400 --kind 1" "-B 1 -T 272 -C 208 -V 272 --kind 2" \
        "-B 1 -T 272 -C 80 -V 592 --kind 6" "-B 1 -T 272 -C 592 -V 80 --kind 7" ;;
    newton_schulz) echo "-B 2 -T 264 -C 136" ;;
    trimat_forward) echo "-B 1 -T 70 -C 128 -NH 2" ;;
    permute) printf '%s\n' "-B 2 -T 17 -C 776 -NH 97" "-B 2 -T 17 -C 776 -NH 97 --kind 1" ;;
    *) echo "-B 2 -T 17 -C 776 -V 1003" ;;
    esac
}

if ! command -v compute-sanitizer >/dev/null; then
    reason="needs compute-sanitizer (cuda-sanitizer of the CUDA toolkit)"
elif ! nvidia-smi -L >/dev/null 2>&1; then
    reason="needs a GPU"
elif ! command -v "${NVCC:-nvcc}" >/dev/null; then
    reason="needs nvcc"
else
    reason=
fi
if [ -n "$reason" ]; then
    skipped=0
    for tool in $tools; do
        for name in ${parts[@]+"${parts[@]}"} ${ops[@]+"${ops[@]}"}; do
            echo "skip $tool $name: $reason"
            skipped=$((skipped + 1))
        done
    done
    echo "0 passed, 0 failed, $skipped skipped"
    exit 0
fi

# ---- programs and data ----

mkdir -p "$dir/ops" || exit 1
rm -rf "$dir/runs" "$dir/results"
mkdir "$dir/runs" "$dir/results"
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM HUP

make_quietly() { # TARGET ... [VARIABLE=VALUE ...]: prints make's output only if it fails
    make -k -j"$cores" --no-print-directory PRECISION="$precision" SPILLS=warn "$@" >"$dir/make.log" 2>&1 && return
    grep -aE 'error|warning' "$dir/make.log" | grep -v -e ' -gencode ' | tail -n 20
    echo "error: make $* failed, see $dir/make.log"
    return 1
}

# a short run: two micro-batches per step, validation, samples, a checkpoint; no tuning, so that all runs are identical
run_flags=(--recipe llmc -e d6 --layers 2 --heads 2 --channels 128 --positions 64 -i "$dir/data/code_train_*.bin"
    -j "$dir/data/code_val_*.bin" -b 2 -t 64 -d 256 -x 3 -v 2 -m 2 -s 2 -g 8 -n 3 -u 1 -c 0.1 --tune 0)
if [ ${#parts[@]} -gt 0 ]; then
    make_quietly BIN_DIR="$dir" "$dir/train_gpt2cu" "$dir/dev/data/tokenize" || exit 1
    rm -rf "$dir/data"
    "$dir/dev/data/tokenize" -i 'llmc/*.h' -o "$dir/data/code" --val-tokens 20000 >"$dir/tokenize.log" 2>&1 ||
        { cat "$dir/tokenize.log"; exit 1; }
fi
if [[ " ${parts[*]-} " == *" sample "* ]]; then
    "$dir/train_gpt2cu" "${run_flags[@]}" -o "$dir/runs/plain" >"$dir/plain.log" 2>&1 ||
        { tail -n 5 "$dir/plain.log"; echo "error: a run without compute-sanitizer fails, see $dir/plain.log"; exit 1; }
fi
if [ ${#ops[@]} -gt 0 ]; then
    make_quietly -C dev/cuda BIN_DIR="../../$dir/ops" OPS="${ops[*]}" all # an op that did not build fails below
fi

# ---- runs ----

# True if a log has reports, all those that it shows are of the library, and the program itself succeeded.
only_vendor() { # LOG REPORTS-OF-THE-LIBRARY REPORTS-SHOWN
    [ "$2" -gt 0 ] && [ "$2" = "$3" ] && grep -aqE '^[0-9]+ passed, 0 failed' "$1"
}

# True if a log of racecheck has reports, all of them are between accesses of cuBLASLt's own kernels (nvjet), and the
# program itself succeeded. The tool does not understand how those kernels order their accesses; excluding them makes
# the tool fail.
only_vendor_races() { # LOG
    local vendor displayed
    vendor=$(awk '/Race reported between/ { theirs = / at nvjet_/; n += theirs }
                  /=========     and / && theirs && !/ at nvjet_/ { theirs = 0; n-- }
                  END { print n + 0 }' "$1")
    displayed=$(sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazards\{0,1\} displayed.*/\1/p' "$1")
    only_vendor "$1" "$vendor" "$displayed"
}

# The same for initcheck, which accuses cuBLASLt's split-K kernel, whose results are right, of reading what nobody has written.
only_vendor_reads() { # LOG
    local vendor displayed
    vendor=$(awk '/Uninitialized .* memory read/ { report = 1; next }
                  report { n += / at .*cublasLt::splitKreduce_kernel</; report = 0 }
                  END { print n + 0 }' "$1")
    displayed=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) errors\{0,1\}$/\1/p' "$1")
    only_vendor "$1" "$vendor" "$displayed"
}

# Runs one tool on one program. Prints one line and, on failure, the tool's findings; writes ok or FAIL to results/.
check() { # TOOL NAME COMMAND ...
    local tool=$1 name=$2 log=$dir/$1_$2.log rc=0 start=$SECONDS verdict excuse='' limits=()
    shift 2
    case $tool in
    racecheck) excuse=only_vendor_races ;;
    initcheck) excuse=only_vendor_reads ;;
    esac
    [ -z "$excuse" ] || limits=(--print-limit 0) # it counts all reports
    trap 'kill $!; exit 130' TERM # timeout ends its child processes
    timeout -k 10 "$limit" compute-sanitizer --tool "$tool" --error-exitcode 99 ${limits[@]+"${limits[@]}"} "$@" \
        >"$log" 2>&1 </dev/null &
    wait $! || rc=$?
    local took="$((SECONDS - start)) s" clean='ERROR SUMMARY: 0 errors' findings
    [ "$tool" != racecheck ] || clean='RACECHECK SUMMARY: 0 hazards' # warnings are hazards too
    local ok=
    if [ $rc -eq 0 ] && grep -aqF "$clean" "$log"; then ok=yes; fi
    if [ $rc -eq 99 ] && [ -n "$excuse" ] && "$excuse" "$log"; then
        ok=yes took+=", reports in cuBLASLt's kernels alone"
    fi
    if [ -n "$ok" ]; then
        verdict="ok $tool $name ($took)"
        : >"$dir/results/ok_${tool}_$name"
    else
        verdict="FAIL $tool $name: status $rc after $took, see $log"
        if [ $rc -eq 124 ] || [ $rc -eq 137 ]; then verdict="FAIL $tool $name: not done after $limit s (SANITIZE_TIMEOUT)"; fi
        findings=$(grep -aE '^=========|^FAIL|error: ' "$log" | awk 'NR <= 12 || /SUMMARY/ { print "    " $0 }')
        [ -z "$findings" ] || verdict+=$'\n'$findings
        : >"$dir/results/FAIL_${tool}_$name"
    fi
    echo "$verdict" # one write, so that the lines of parallel runs do not mix
}

start() { # as check, in the background
    while [ "$(jobs -pr | wc -l)" -ge "$jobs" ]; do wait -n; done
    check "$@" &
}

for tool in $tools; do
    # the longest runs first
    for name in ${parts[@]+"${parts[@]}"}; do
        case $name in
        train | train_graph)
            graph=0
            [ "$name" = train ] || graph=1
            start "$tool" "$name" "$dir/train_gpt2cu" "${run_flags[@]}" --graph $graph -o "$dir/runs/${tool}_$name"
            ;;
        train_fp8)
            short=() # racecheck needs more host memory with every step
            [ "$tool" != racecheck ] || short=(-d 128 -x 2 -v 0 -s 0)
            start "$tool" "$name" "$dir/train_gpt2cu" "${run_flags[@]}" ${short[@]+"${short[@]}"} --fp8 -o "$dir/runs/${tool}_$name"
            ;;
        sample)
            start "$tool" "$name" "$dir/train_gpt2cu" -e "$dir/runs/plain" --prompt 'for (int i' --num-samples 5 --parallel 2 \
                --num-tokens 12 --top-k 20 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2 --tune 0
            ;;
        esac
    done
    for op in ${ops[@]+"${ops[@]}"}; do
        i=0
        while read -r flags; do
            i=$((i + 1))
            name=$op
            [ $i -eq 1 ] || name=${op}_$i
            # shellcheck disable=SC2086
            start "$tool" "$name" "$dir/ops/$op" --check --no-guards $flags
        done < <(shapes "$op")
    done
done
wait

count() { find "$dir/results" -name "$1_*" | wc -l; }
passed=$(count ok) failed=$(count FAIL)
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
