#!/usr/bin/env bash
# Every op of dev/cuda. With a GPU, `make test` in dev/cuda runs its --check in every precision. Without a GPU, this test compiles
#
#   - layernorm_forward, which has no matmul
#   - with LLMC_TEST_MORE=1, linear_gelu, which has wgmma and links cuBLASLt. In an op with wgmma, a register spill or a serialised
#     wgmma is an error
#   - if LLMC_TEST_SINCE is set, such as to origin/main, the ops that have changed since: OP.cu, or a .cuh of dev/cuda that it includes
#
# test_emulation.sh compiles the other ops as C++. With LLMC_TEST_FULL=1, `make test` of dev/cuda compiles each op in BF16 for every
# architecture and in FP16 and FP32 for 80. Then each op is compiled in BF16 for 90a, and for a pair of precision and architecture
# that depends on its place in the list, so that every pair occurs.
#
#     dev/test/gpu/test_ops.sh [--list | OP ...]      compiles these ops for 90a and for their pair
set -u -o pipefail
. "$(dirname "$0")/../test.sh"
. dev/test/gpu/builds.sh
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

# ---- some ops, or all of them ----

precisions=(BF16 FP16 FP32)
archs=() # 3 and 4 have no common divisor, so every pair occurs
offered=$($nvcc --list-gpu-arch)
for a in 75 80 90 100; do
    if grep -qx "compute_$a" <<<"$offered"; then archs+=("$a"); fi
done
[ ${#archs[@]} -gt 0 ] || { echo "$nvcc --list-gpu-arch lists none of 75, 80, 90, 100" >&2; exit 1; }

# uses PATTERN OP: true if the op's source, without comments, matches
uses() { grep -qE "$1" <<<"$(dev/cuda/op_text.sh "$2" | sed 's|//.*||')"; }

# changed OP: true if the op, or a header with kernels that it includes, has changed since LLMC_TEST_SINCE
changed() {
    local file new files=("$1.cu") i
    for ((i = 0; i < ${#files[@]}; i++)); do
        while read -r new; do
            [[ " ${files[*]} " == *" $new "* ]] || files+=("$new")
        done < <(sed -n 's/^#include "\([^"\/]*\.cuh\)".*/\1/p' "dev/cuda/${files[i]}")
    done
    for file in "${files[@]}"; do
        if changed_since "dev/cuda/$file"; then return 0; fi
    done
    return 1
}

# A build is "OP PRECISION ARCH HOW"; HOW is all, device (no host code) or quick (by quick_nvcc.sh). Builds with wgmma take longest,
# so they start first. Host code is compiled only if the op links a library.
first=() later=() skips=()
for i in "${!ops[@]}"; do
    op=${ops[i]} how=device
    [[ " ${chosen[*]} " == *" $op "* ]] || continue
    ! uses 'cublas|nccl' "$op" || how=all
    if [ -n "$named${LLMC_TEST_FULL-}" ]; then
        pair="${precisions[i % 3]} ${archs[i % ${#archs[@]}]}"
        [[ " ${archs[*]} " != *" 90 "* ]] || { first+=("$op BF16 90 $how") && how=device; }
        [ "$pair" = "BF16 90" ] || later+=("$op $pair $how")
    elif { [ "$op" = linear_gelu ] && [ -n "$more" ]; } || changed "$op"; then
        if uses 'wgmma|gemm\.cuh' "$op"; then first+=("$op BF16 90 $how"); else later+=("$op BF16 80 $how"); fi
        [ "$op" = linear_gelu ] || echo "$op has changed since $LLMC_TEST_SINCE"
    elif [ "$op" = layernorm_forward ]; then
        later+=("$op BF16 $cheap_arch quick")
    else
        skips+=("$op")
    fi
done
builds=(${first[@]+"${first[@]}"} ${later[@]+"${later[@]}"})

# Builds below build/test_ops, where the result is kept: only what has changed is built again.
build() { # I OP PRECISION ARCH HOW
    local dir=build/test_ops/$2_$3_$4_$5 rc=0 compiler=$nvcc half=
    mkdir -p "$dir"
    case $5 in
    quick) compiler=$cheap_nvcc ;;
    device) half=yes ;;
    esac
    make -C dev/cuda BIN_DIR="../../$dir" OPS="$2" PRECISION="$3" GPU_COMPUTE_CAPABILITY="$4" DEVICE_ONLY=$half \
        NVCC="$compiler" all >"$tmp/$1.log" 2>&1 || rc=$?
    echo $rc >"$tmp/$1.result"
}

report() { # I OP PRECISION ARCH HOW
    local what="$2 $3" arch=$4 half=
    [ "$arch" != 90 ] || arch=90a
    case $5 in
    device) half=", its device code" ;;
    quick) half=", up to PTX" ;;
    esac
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
        if [[ " ${skips[*]-} " == *" $op "* ]]; then
            echo "skip $op: compiled by make test-full, by dev/test/gpu/test_ops.sh $op, or with LLMC_TEST_SINCE=origin/main if it has changed since"
        else
            echo "skip $op: no GPU to check it on; other precisions and architectures: make test-full"
        fi
    done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
