#!/usr/bin/env bash
# Every op of dev/cuda, by `make test` there: with a GPU its --check in every precision, without one that it compiles.
#
#     dev/test/test_ops.sh [--list | OP ...]
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION GPU_COMPUTE_CAPABILITY SPILLS
export PATH=$PATH:/usr/local/cuda/bin
nvcc=${NVCC:-nvcc}

ops=()
for source in dev/cuda/*.cu; do
    name=${source##*/}
    [ ! -e "$source" ] || ops+=("${name%.cu}")
done
if [ "${1-}" = --list ]; then
    printf '%s\n' "${ops[@]}"
    exit 0
fi
for name in "$@"; do
    [[ " ${ops[*]} " == *" $name "* ]] || { echo "$0: no op '$name'; see --list" >&2; exit 2; }
done
[ $# -eq 0 ] || ops=("$@")

reason=
[ "${BIN_DIR:-.}" = . ] || reason="does not depend on BIN_DIR=$BIN_DIR: make test runs it"
command -v "${nvcc%% *}" >/dev/null || reason="needs nvcc"
if [ -n "$reason" ]; then
    printf "skip %s: $reason\n" "${ops[@]}"
    echo "0 passed, 0 failed, ${#ops[@]} skipped"
    exit 0
fi

# -k: an op that does not compile leaves the others their chance
log=$(mktemp /tmp/llmc_test_XXXXXX) || exit 1
trap 'rm -f "$log"' EXIT
make -k -j"$(nproc)" --no-print-directory -C dev/cuda test OPS="${ops[*]}" NVCC="$nvcc" 2>&1 |
    tee "$log" | grep -aE --line-buffered '^(ok|skip|FAIL) |error|Performance Loss' | grep -av --line-buffered -e ' -gencode ' -e '^make'
# make has a word of its own after the closing line
closing=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
[ -n "$closing" ] || { tail -n 20 "$log"; exit 1; }
echo "$closing"
[[ $closing == *" 0 failed, "* ]]
