#!/usr/bin/env bash
# train_gpt2.cu and test_gpt2.cu. With nvcc: they compile, for every architecture and in every precision if there is a
# GPU or LLMC_TEST_FULL=1, otherwise in two precisions without optimisation. With a GPU: each test of test_gpt2cu passes in every
# precision. Tests that cannot run here are skipped by name.
#
# Builds are kept below build/test_gpu: only what has changed is built again.
. "$(dirname "$0")/../test.sh"
. dev/test/gpu/builds.sh
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION GPU_COMPUTE_CAPABILITY SPILLS DEVICE_ONLY
export PATH=$PATH:/usr/local/cuda/bin
nvcc=${NVCC:-nvcc}
top=$PWD
builds=build/test_gpu

have_nvcc() { command -v "${nvcc%% *}" >/dev/null; }
have_gpu() { nvidia-smi -L >/dev/null 2>&1; }
arch=80 # replaced by the architecture of the local GPU, if there is one
if have_gpu; then arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .); fi
# the first is compiled by itself: in a build for a single architecture a register spill is an error
archs=(90 75 80 100)
if have_nvcc; then offered=$($nvcc --list-gpu-arch 2>&1); fi
others=()
for a in "${archs[@]:1}"; do grep -qx "compute_$a" <<<"${offered-}" && others+=("$a"); done
# A short run makes the builds in `few`. The first is shared with test_readme.sh and test_fake_gpu.sh, so it is compiled once for all
# three. The second adds another precision and test_gpt2.cu. No kernel runs, so quick_nvcc.sh compiles them, without ptxas.
# Optimised kernels for 90a, whose register spills are errors, take ten times as long. They are compiled, like FP16, 75 and 100, if
# LLMC_TEST_SINCE is set and the program has changed since. LLMC_TEST_FULL=1 compiles everything.
# test_gpt2.cu includes train_gpt2.cu. `device` leaves out the host code, which does not depend on the architecture.
few=("train_gpt2cu BF16 $cheap_arch" "test_gpt2cu FP32 80")
slow=("train_gpt2cu BF16 90 device" "test_gpt2cu FP16 75 device" "train_gpt2cu BF16 100 device")
quick=yes changed=
if changed_since train_gpt2.cu test_gpt2.cu llmc dev/cuda/nvcc.mk; then changed=yes; fi
if [ -n "${LLMC_TEST_FULL-}" ]; then quick='' few=() slow=("test_gpt2cu FP16 75 device"); fi # the other builds are in `all` below
if have_gpu; then quick='' few=() slow=(); fi

# ---- builds: PROGRAM PRECISION ARCH ... [device] is one call of nvcc, with a folder of its own ----

each_once() { printf '%s\n' "$@" | awk 'NF && !seen[$0]++'; } # drops repeated lines, keeps their order
is_one_of() { printf '%s\n' "${@:2}" | grep -qxF -- "$1"; } # WORD WORDS: true if WORD is one of WORDS
folder() { local IFS=_; echo "$builds/$*"; }

# Writes to the folder: `log`, the output of make, and `result`, its exit code.
build() { # PROGRAM PRECISION ARCH ... [device]
    local dir rc=0 half='' compiler=$nvcc
    dir=$(folder "$@")
    mkdir -p "$dir"
    if [ -n "$quick" ] && is_one_of "$*" "${few[@]}"; then compiler=$cheap_nvcc; fi
    if [ "${*: -1}" = device ]; then half=yes && set -- "${@:1:$#-1}"; fi
    make BIN_DIR="$dir" PRECISION="$2" GPU_COMPUTE_CAPABILITY="${*:3}" DEVICE_ONLY=$half NVCC="$compiler" "$dir/$1" \
        >"$dir/log" 2>&1 || rc=$?
    echo $rc >"$dir/result"
}

# Builds everything that the tests below need, one build per core at a time, the longest first.
build_all() {
    local each running=0 list=()
    if [ -z "$quick" ]; then
        [ ${#others[@]} -eq 0 ] || list+=("train_gpt2cu BF16 ${others[*]}")
        list+=("train_gpt2cu BF16 90" "test_gpt2cu BF16 $arch" "test_gpt2cu FP16 $arch" "test_gpt2cu FP32 $arch"
            "train_gpt2cu FP16 $arch" "train_gpt2cu FP32 $arch")
        if have_gpu && [ "$arch" != 90 ]; then list+=("train_gpt2cu BF16 $arch"); fi
    fi
    rm -f $builds/*/result
    while read -r each; do
        [ $running -lt "$(nproc)" ] || { wait -n; running=$((running - 1)); }
        # shellcheck disable=SC2086
        build $each &
        running=$((running + 1))
    done < <(
        [ -z "$changed${LLMC_TEST_FULL-}" ] || list+=("${slow[@]}")
        each_once ${list[@]+"${list[@]}"} ${few[@]+"${few[@]}"}
    )
    wait
}

# Builds this unless this run has already built it; fails if the build fails.
built() { # PROGRAM PRECISION ARCH ... [device]
    local dir
    dir=$(folder "$@")
    have_nvcc || skip "needs nvcc"
    if [ ! -e "$tmp/all" ] || [ ! -e "$dir/result" ]; then build "$@"; fi
    [ "$(cat "$dir/result")" = 0 ] && return
    grep -aE 'error|warning' "$dir/log" | grep -v -e ' -gencode ' | head -n 20
    fail "$1 does not compile in $2 for ${*:3}, see $dir/log"
}

compiles() { # PROGRAM PRECISION ARCH [device]
    have_nvcc || skip "needs nvcc"
    grep -qx "compute_$3" <<<"$offered" || skip "this nvcc cannot compile for $3"
    if is_one_of "$*" "${few[@]}"; then
        built "$@"
    elif is_one_of "$*" "${slow[@]}" && [ -n "$changed${LLMC_TEST_FULL-}" ]; then
        built "$@"
    elif [ -n "$quick" ] && is_one_of "$*" "${slow[@]}"; then
        skip "make test-full compiles it; so does LLMC_TEST_SINCE=origin/main, if the program has changed since"
    elif [ -n "$quick" ]; then
        skip "make test-full compiles it"
    elif [[ "$1 $2" != "train_gpt2cu BF16" || $3 = 90 ]]; then
        built "$@"
    else # one nvcc compiles all others; if it fails, find out for which architecture
        (built train_gpt2cu BF16 "${others[@]}") >"$tmp/group" || built "$@"
    fi
}
all=()
for a in "${archs[@]}"; do all+=("train_gpt2cu BF16 $a"); done
for p in FP16 FP32; do all+=("train_gpt2cu $p $arch"); done
for p in BF16 FP16 FP32; do all+=("test_gpt2cu $p $arch"); done
compile_tests=()
while read -r each; do
    name=${each,,}
    name=${name// /_}
    eval "test_$name() { compiles $each; }"
    compile_tests+=("$name")
done < <(each_once ${few[@]+"${few[@]}"} ${slow[@]+"${slow[@]}"} "${all[@]}")

# ---- without a GPU ----

test_train_gpt2cu_without_a_gpu() {
    local rc=0 program words
    read -r -a words <<<"${few[0]-train_gpt2cu FP32 $arch}"
    built "${words[@]}"
    program=$(folder "${words[@]}")/train_gpt2cu
    CUDA_VISIBLE_DEVICES='' "$program" -e d6 --prompt x >"$tmp/out" 2>"$tmp/err" || rc=$?
    want "its exit code" $rc 1
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
    contains "error: no usable GPU" "$tmp/err"
    CUDA_VISIBLE_DEVICES='' "$program" --help all >"$tmp/out" || fail "--help fails"
    contains "--stochastic-rounding" "$tmp/out"
}

test_test_gpt2cu_without_a_gpu() {
    built test_gpt2cu FP32 "$arch"
    local program
    program=$(folder test_gpt2cu FP32 "$arch")/test_gpt2cu
    want "--list" "$("$program" --list | cut -d ' ' -f 1 | tr '\n' ' ')" "${gpu_tests[*]} "
    CUDA_VISIBLE_DEVICES='' "$program" >"$tmp/out" || fail "exit code $?"
    # the text queue's two tests need no GPU
    want "the last line" "$(tail -n 1 "$tmp/out")" "2 passed, 0 failed, $((${#gpu_tests[@]} - 2)) skipped"
}

# ---- promoted kernels ----

test_promoted_kernels() { dev/cuda/promote.sh --check || fail "not the copies of dev/cuda: make promote"; }

# changes one digit in each promoted block of a copy of the sources: the check names every block
test_changed_promoted_kernels() {
    mkdir -p "$tmp/tree/dev"
    ln -s "$top/dev/cuda" "$tmp/tree/dev/cuda"
    awk '/^\/\/ ==== promoted: / { fresh = 1 }
         /^\/\/ ==== end promoted: / { fresh = 0 }
         fresh && !/^\/\/ ====/ && match($0, /[0-9]/) {
             $0 = substr($0, 1, RSTART - 1) (substr($0, RSTART, 1) + 1) % 10 substr($0, RSTART + 1)
             fresh = 0
         }
         { print }' train_gpt2.cu >"$tmp/tree/train_gpt2.cu"
    local name rc=0 names
    names=$(sed -n 's|^// ==== promoted: \([A-Za-z0-9_]*\) ====$|\1|p' train_gpt2.cu)
    [ -n "$names" ] || fail "no marks in train_gpt2.cu"
    "$tmp/tree/dev/cuda/promote.sh" --check >"$tmp/out" 2>&1 || rc=$?
    want "the exit code" $rc 1
    for name in $names; do contains "FAIL $name: " "$tmp/out"; done
}

# ---- with a GPU: a run of test_gpt2cu in each precision; each of its tests is a test of this script ----

gpu_run() { # PRECISION: runs test_gpt2cu; its output goes to $tmp/PRECISION.log
    [ ! -e "$tmp/$1.log" ] || return 0
    built test_gpt2cu "$1" "$arch"
    built train_gpt2cu "$1" "$arch"
    local rc=0
    TRAIN_GPT2CU=$(folder train_gpt2cu "$1" "$arch")/train_gpt2cu \
        "$(folder test_gpt2cu "$1" "$arch")/test_gpt2cu" >"$tmp/$1.part" 2>&1 || rc=$?
    echo "test_gpt2cu ended with status $rc" >>"$tmp/$1.part"
    mv "$tmp/$1.part" "$tmp/$1.log"
}

gpu_test() { # PRECISION NAME
    have_nvcc || skip "needs nvcc"
    have_gpu || skip "needs a GPU"
    gpu_run "$1"
    local log=$tmp/$1.log reason
    grep -aq "^ok $2 (" "$log" && return
    reason=$(sed -n "s/^skip $2: //p" "$log")
    [ -z "$reason" ] || skip "$reason"
    sed -n "s/^FAIL $2: /    /p" "$log"
    reason=$(sed -n "s/^FAIL $2: //p" "$log" | head -n 1)
    [ -z "$reason" ] || fail "$reason"
    fail "not reached: $(tail -n 2 "$log" | tr '\n' ';')"
}

# the names in test_gpt2cu's table of tests, without those that only the emulation has; a test above checks that they are
# extracted correctly
read -r -a gpu_tests <<<"$(sed -n '/^static const Test tests\[\]/,/^};/{
    /^#ifdef CUDA_EMULATION/,/^#endif/d
    s/^ *{"\([A-Za-z0-9_]*\)",.*/\1/p
}' test_gpt2.cu | tr '\n' ' ')"

tests=(promoted_kernels changed_promoted_kernels)
tests+=("${compile_tests[@]}" train_gpt2cu_without_a_gpu test_gpt2cu_without_a_gpu)
if have_gpu && have_nvcc; then
    for p in BF16 FP16 FP32; do
        for name in "${gpu_tests[@]}"; do
            eval "test_${p,,}_$name() { gpu_test $p $name; }"
            tests+=("${p,,}_$name")
        done
    done
else # skip once: the reason is the same in every precision
    for name in "${gpu_tests[@]}"; do
        eval "test_$name() { gpu_test BF16 $name; }"
        tests+=("$name")
    done
fi

if [ "$BIN_DIR" = . ] && [ $# -eq 0 ] && have_nvcc; then
    build_all
    : >"$tmp/all"
fi
run_tests_once "$@"
