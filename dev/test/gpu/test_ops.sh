#!/usr/bin/env bash
# Every op of dev/cuda. With a GPU: its --check in every precision, by `make test` in dev/cuda. Without a GPU: that it
# compiles. Each op has its turn every third day, in the next precision and for the next architecture:
#
#     turn      1    2    3    4    5    6    7    8    9    10   11   12   13 ...
#     precision BF16 FP16 FP32 BF16 FP16 FP32 BF16 FP16 FP32 BF16 FP16 FP32 BF16
#     arch      75   80   90a  100  75   80   90a  100  75   80   90a  100  75
#
# An op that the last day's commits have changed, or that was changed since, is compiled on the other days, too. Of the
# others, test_emulation.sh compiles each as C++, and test_gpu.sh those parts that are in train_gpt2.cu.
#
# An op with wgmma is also compiled for 90a in BF16, where a register spill or a serialised wgmma is an error. Host code
# takes most of the time, so it is compiled and linked only for ops that link a library; dev/test/gpu/test_dev_cuda.sh
# builds others. With LLMC_TEST_FULL=1 every op has its turn, `make test` of dev/cuda first compiles each op in every
# precision, and all ops are compiled for 90a in BF16.
#
#     dev/test/gpu/test_ops.sh [--list | OP ...]      LLMC_TEST_DAY=20000: the turns of another day
set -u -o pipefail
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION GPU_COMPUTE_CAPABILITY SPILLS DEVICE_ONLY
export PATH=$PATH:/usr/local/cuda/bin
nvcc=${NVCC:-nvcc}

ops=()
for source in dev/cuda/*.cu; do
    name=${source##*/}
    [[ $name != practice_* ]] || continue # of `make practice`
    [ ! -e "$source" ] || ops+=("${name%.cu}")
done
if [ "${1-}" = --list ]; then
    printf '%s\n' "${ops[@]}"
    exit 0
fi
for name in "$@"; do
    [[ " ${ops[*]} " == *" $name "* ]] || { echo "$0: no op '$name'; see --list" >&2; exit 2; }
done
chosen=("${ops[@]}") named=
[ $# -eq 0 ] || chosen=("$@") named=yes

reason=
[ "${BIN_DIR:-.}" = . ] || reason="does not depend on BIN_DIR=$BIN_DIR: make test runs it"
command -v "${nvcc%% *}" >/dev/null || reason="needs nvcc"
if [ -n "$reason" ]; then
    printf "skip %s: $reason\n" "${chosen[@]}"
    echo "0 passed, 0 failed, ${#chosen[@]} skipped"
    exit 0
fi

# ---- every op in every precision ----

passed=0 failed=0 skipped=0
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }
if has_gpu || [ -n "${LLMC_TEST_FULL-}" ]; then
    # -k: if one op does not compile, the others are still built
    make -k -j"$(nproc)" --no-print-directory -C dev/cuda test OPS="${chosen[*]}" NVCC="$nvcc" 2>&1 |
        tee "$tmp/log" | grep -aE --line-buffered '^(ok|skip|FAIL) |error|Performance Loss' | grep -av --line-buffered -e ' -gencode ' -e '^make'
    # make may print a line of its own after the closing line
    closing=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$tmp/log" | tail -n 1)
    [ -n "$closing" ] || { tail -n 20 "$tmp/log"; exit 1; }
    read -r passed _ failed _ skipped _ <<<"$closing"
    if has_gpu; then
        echo "$closing"
        [ "$failed" -eq 0 ]
        exit
    fi
fi

# ---- the ops whose turn it is, in one precision and for one architecture ----

precisions=(BF16 FP16 FP32)
archs=() # 3 and 4 have no common divisor, so every pair occurs
offered=$($nvcc --list-gpu-arch)
for a in 75 80 90 100; do
    if grep -qx "compute_$a" <<<"$offered"; then archs+=("$a"); fi
done
[ ${#archs[@]} -gt 0 ] || { echo "$nvcc --list-gpu-arch lists none of 75, 80, 90, 100" >&2; exit 1; }

# uses PATTERN OP: true if the op's source, without comments, matches
uses() { grep -qE "$1" <<<"$(sed 's|//.*||' "dev/cuda/$2.cu")"; }

changed=$(changed_lately dev/cuda)
# its_turn I: true if op I is compiled in this run
its_turn() {
    [ -n "$named" ] || [ -n "${LLMC_TEST_FULL-}" ] || [ $(((day + $1) % 3)) -eq 0 ] || grep -qx "dev/cuda/${ops[$1]}.cu" <<<"$changed"
}

# A build is "OP PRECISION ARCH DEVICE_ONLY". The builds with wgmma take longest and come first.
turns=() first=() later=()
for i in "${!ops[@]}"; do
    turn=$(((day + i) / 3))
    op=${ops[i]} precision=${precisions[turn % 3]} arch=${archs[turn % ${#archs[@]}]} device_only=yes
    [[ " ${chosen[*]} " == *" $op "* ]] || continue
    its_turn "$i" || { later+=("$op") && continue; }
    ! uses 'cublas|nccl' "$op" || device_only=
    if [[ " ${archs[*]} " == *" 90 "* ]] && { [ -n "${LLMC_TEST_FULL-}" ] || uses 'wgmma|gemm\.cuh' "$op"; }; then
        first+=("$op BF16 90 $device_only")
        [ "$precision $arch" != "BF16 90" ] || continue
        device_only=yes
    fi
    turns+=("$op $precision $arch $device_only")
done
builds=(${first[@]+"${first[@]}"} ${turns[@]+"${turns[@]}"})

# Builds below build/test_ops, where the result is kept: only what has changed is built again.
build() { # I OP PRECISION ARCH DEVICE_ONLY
    local dir=build/test_ops/$2_$3_$4${5:+_device} rc=0
    mkdir -p "$dir"
    make -C dev/cuda BIN_DIR="../../$dir" OPS="$2" PRECISION="$3" GPU_COMPUTE_CAPABILITY="$4" DEVICE_ONLY="${5-}" \
        NVCC="$nvcc" all >"$tmp/$1.log" 2>&1 || rc=$?
    echo $rc >"$tmp/$1.result"
}

report() { # I OP PRECISION ARCH DEVICE_ONLY
    local what="$2 $3" arch=$4 half=
    [ "$arch" != 90 ] || arch=90a
    [ -z "${5-}" ] || half=", its device code"
    if [ "$(<"$tmp/$1.result")" = 0 ]; then
        passed=$((passed + 1))
        echo "ok $what: compiles for $arch$half"
    elif grep -aq '^error: .* needs NCCL' "$tmp/$1.log"; then
        skipped=$((skipped + 1))
        echo "skip $what: needs NCCL"
    else
        failed=$((failed + 1))
        grep -aE 'error|Performance Loss|spill' "$tmp/$1.log" | grep -av -e ' -gencode ' -e '^make' | head -n 20
        echo "FAIL $what: does not compile for $arch$half"
    fi
}

started=0 reported=0
while [ $reported -lt ${#builds[@]} ]; do
    while [ $started -lt ${#builds[@]} ] && [ "$(jobs -pr | wc -l)" -lt "$(nproc)" ]; do
        # shellcheck disable=SC2086
        build $started ${builds[started]} &
        started=$((started + 1))
    done
    wait -n
    while [ -e "$tmp/$reported.result" ]; do
        # shellcheck disable=SC2086
        report $reported ${builds[reported]}
        reported=$((reported + 1))
    done
done
if [ -z "${LLMC_TEST_FULL-}" ]; then
    for op in "${chosen[@]}"; do
        skipped=$((skipped + 1))
        if [[ " ${later[*]-} " == *" $op "* ]]; then
            echo "skip $op: compiled every third day, not on day $day; now: dev/test/gpu/test_ops.sh $op, or make test-full"
        else
            echo "skip $op: no GPU to check it on; other precisions and architectures: make test-full"
        fi
    done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
