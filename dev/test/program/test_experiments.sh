#!/usr/bin/env bash
# The patches of dev/learn/experiments, which change the model: each applies, and changes the programs in as many places as its README
# says. `make test` trains the CPU program with one of them. `make test-full` builds both programs with each, trains both on the same
# data, and compares their losses and their texts. The GPU program then runs in the emulation of dev/cuda/emulation. Three
# more experiments are flags.
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION
export OMP_NUM_THREADS=1 EMULATION_THREADS=1 # the models are tiny
CXX=${CXX:-g++}
top=$PWD
patches=(rmsnorm no_bias decay)
model=(-e d6 --layers 2 --channels 64 --heads 2 --positions 64)
# An eps as large as 1e-5 because AdamW divides gradients as small as their rounding errors by 1e-8.
# Seed 3: with the default, --norm-epsilon 1e-6 lets rounding errors grow; AVX-512 and portable code then differ by 6e-7.
run=(--recipe llmc -t 16 -b 2 -d 64 -x 20 -l 0.003 --eps 1e-5 -c 0.1 -v 0 -s 0 --seed 3)

wants_full() {
    [ -n "${LLMC_TEST_FULL-}" ] || skip "takes minutes: make test-full"
    command -v "$CXX" >/dev/null || skip "needs $CXX"
}

# limit_of NAME: prints the most hunks that the patch may have
limit_of() {
    case $1 in
    rmsnorm | no_bias) echo 10 ;;
    decay) echo 1 ;;
    esac
}

# ---- patches --------------------------------------------------------------------------------

# Copies to TREE what both programs are built from.
copy_tree() { # TREE
    mkdir -p "$1/dev/test"
    cp -rp Makefile train_gpt2.c train_gpt2.cu test_gpt2.cu llmc "$1/"
    cp -rp dev/cuda "$1/dev/"
    cp -p dev/test/test.h dev/test/golden.h dev/test/variants.h "$1/dev/test/"
    rm -f "$1"/dev/cuda/*_cpu*
}

# hunks OLD NEW: prints how many hunks of `git diff -U0` are between two trees in the programs and their headers
hunks() {
    local path
    for path in train_gpt2.c train_gpt2.cu llmc; do git diff --no-index -U0 "$1/$path" "$2/$path" || true; done | grep -c '^@@ '
}

# Applies the patch to a copy of the sources, in $tmp/NAME, once. Sets `tree` to the copy, and writes the number of its hunks to
# $tmp/NAME.hunks.
patched() { # NAME
    command -v git >/dev/null || skip "needs git"
    tree=$tmp/$1
    [ ! -e "$tmp/$1.hunks" ] || return 0
    rm -rf "$tree"
    copy_tree "$tree"
    cd "$tree"
    git apply "$top/dev/learn/experiments/$1.patch" >"$tmp/log" 2>&1 || fail "$1.patch does not apply: $(cat "$tmp/log")"
    hunks "$top" "$tree" >"$tmp/hunks" || fail "$1.patch changes no program"
    dev/cuda/promote.sh >"$tmp/log" 2>&1 || fail "promote.sh fails: $(cat "$tmp/log")"
    cd "$top"
    mv "$tmp/hunks" "$tmp/$1.hunks"
}

test_hunks() {
    local name number
    for name in "${patches[@]}"; do
        patched "$name"
        number=$(cat "$tmp/$name.hunks")
        [ "$number" -le "$(limit_of "$name")" ] || fail "$name.patch has $number hunks, at most $(limit_of "$name") are wanted"
        want "the hunks of $name in README.md" "$(sed -n "s/^| \[$name\].* | \([0-9]*\) |\$/\1/p" dev/learn/experiments/README.md)" "$number"
        echo "note: $name: $number hunks"
    done
    want "the patches" "$(ls dev/learn/experiments/*.patch)" "$(printf 'dev/learn/experiments/%s.patch\n' "${patches[@]}" | sort)"
}

# A patch changes the programs outside of section 6, their headers, and in dev/cuda promoted kernels and their references. It can be
# undone.
test_files() {
    local name file
    for name in "${patches[@]}"; do
        patched "$name"
        git apply --numstat "dev/learn/experiments/$name.patch" | cut -f 3 >"$tmp/files"
        [ -s "$tmp/files" ] || fail "$name.patch changes nothing"
        while read -r file; do
            case $file in
            train_gpt2.c | train_gpt2.cu | llmc/*) ;;
            dev/cuda/reference.h | dev/cuda/*.cu) ;; # what --check compares the kernels with
            dev/cuda/*.cuh) grep -q '^// ==== promoted: ' "$file" || fail "$name.patch changes $file, which is in no program" ;;
            *) fail "$name.patch changes $file" ;;
            esac
        done <"$tmp/files"
        rm -rf "$tmp/undone"
        copy_tree "$tmp/undone"
        cd "$tmp/undone"
        git apply "$top/dev/learn/experiments/$name.patch"
        sed -n '/^\/\/ 6\. kernels/,$p' train_gpt2.cu | cmp - <(sed -n '/^\/\/ 6\. kernels/,$p' "$top/train_gpt2.cu") ||
            fail "$name.patch changes section 6, which promote.sh writes"
        dev/cuda/promote.sh >"$tmp/log"
        git apply -R "$top/dev/learn/experiments/$name.patch"
        dev/cuda/promote.sh >"$tmp/log"
        cd "$top"
        want "what is left of $name" "$(diff -r llmc "$tmp/undone/llmc"
            for file in train_gpt2.c train_gpt2.cu dev/cuda/*.cuh; do cmp "$file" "$tmp/undone/$file"; done)" ""
    done
}

test_hunks_are_counted() {
    mkdir -p "$tmp/old/llmc" "$tmp/new/llmc"
    printf '%s\n' a b c d e f >"$tmp/old/llmc/x.h"
    cp "$tmp/old/llmc/x.h" "$tmp/old/train_gpt2.c"
    cp "$tmp/old/llmc/x.h" "$tmp/old/train_gpt2.cu"
    cp -r "$tmp/old/." "$tmp/new"
    hunks "$tmp/old" "$tmp/new" && fail "there are none"
    sed -i 's/b/B/;s/c/C/;s/e/E/' "$tmp/new/llmc/x.h" # two neighbours are one hunk; a line between two makes two
    sed -i '1d' "$tmp/new/train_gpt2.c"
    printf 'g\n' >>"$tmp/new/train_gpt2.cu"
    printf 'new\nfile\n' >"$tmp/new/llmc/y.h"
    want "the hunks" "$(hunks "$tmp/old" "$tmp/new")" 5
}

# ---- runs -------------------------------------------------------------------------------------

make_data() {
    [ ! -e "$tmp/data" ] || return 0
    [ -x ./train_gpt2 ] && [ -x dev/data/tokenize ] || fail "train_gpt2 or dev/data/tokenize is not there: make programs"
    head -c 20000 llmc/tokenizer.h >"$tmp/text"
    dev/data/tokenize -i "$tmp/text" -o "$tmp/data.new/a" -v 2000 -s 9000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$tmp/data.new" "$tmp/data"
}

# Builds the CPU program of a tree. The default flags would take twice as long to compile.
make_cpu() { # TREE
    make -C "$1" --no-print-directory train_gpt2 CC="$CC" CFLAGS=-O1 >"$tmp/log" 2>&1 ||
        { tail -n 30 "$tmp/log" && fail "train_gpt2.c does not compile"; }
    ! grep -q 'warning:' "$tmp/log" || { cat "$tmp/log" && fail "warnings"; }
}

# Sets `gpu`, the GPU program of a tree, and builds it in the emulation. TREE: a patched copy, or . for this tree
make_gpu() { # TREE PRECISION
    gpu=build/emulated/train_gpt2_cpu$([ "$2" = BF16 ] || echo "_${2,,}")
    if [ "$1" = . ]; then
        emulated CXX="$CXX" PRECISION="$2" "../../$gpu"
    else
        [ -e "$1/build/dev_cuda" ] || share_emulated "$1"
        make -C "$1/dev/cuda" --no-print-directory BIN_DIR=../../build/emulated NVCC=/nonexistent CXX="$CXX" PRECISION="$2" "../../$gpu" \
            >"$tmp/log" 2>&1 || { tail -n 30 "$tmp/log" && fail "train_gpt2.cu does not compile"; }
    fi
    gpu=$1/$gpu
}

# train PROGRAM OUT [FLAGS]: trains into the directory OUT; what the program prints goes to OUT.out
train() {
    rm -rf "$2"
    "$1" "${model[@]}" "${run[@]}" -i "$tmp/data/*_train_*.bin" -o "$2" "${@:3}" >"$2.out" 2>"$2.err" || fail "$1: $(tail -n 1 "$2.err")"
}
# A card whose rate is known, so that the program does not measure it.
train_gpu() { EMULATION_NAME="NVIDIA H100 80GB HBM3" train "$gpu" "$1" --no-tune "${@:2}"; } # OUT [FLAGS]

losses() { sed -nE 's/^step +[0-9]+\/.* loss ([^ ]+) .*/\1/p' "$1.out"; } # OUT

# apart OUT1 OUT2: prints the largest relative difference of their losses
apart() {
    paste -d ' ' <(losses "$1") <(losses "$2") |
        awk '{ d = $1 / $2 - 1; if (d < 0) { d = -d } if (!(d <= most)) { most = d } } END { printf "%.1e\n", NR < 3 ? "nan" : most }'
}
less() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a + 0 < b + 0 && a ~ /^[0-9]/ && b ~ /^[0-9]/) }'; } # A B

# falls OUT: the run has printed a number for each step, and the mean of the last five losses is 10% below the first
falls() {
    losses "$1" | awk -v steps="$(losses "$1" | wc -l)" '
        !/^[0-9]+\.[0-9]+$/ { bad = 1 }
        NR == 1 { first = $1 }
        NR > steps - 5 { last += $1 / 5 }
        END { exit bad || NR < 20 || !(last < 0.9 * first) }' || fail "the losses of $1 do not fall: $(losses "$1" | tr '\n' ' ')"
}

# The experiment on the CPU: it trains, and is another model than GPT-2.
test_trains() {
    make_data
    patched rmsnorm
    make_cpu "$tree"
    train "$tree/train_gpt2" "$tmp/changed"
    train ./train_gpt2 "$tmp/plain"
    falls "$tmp/changed"
    falls "$tmp/plain"
    less 1e-3 "$(apart "$tmp/changed" "$tmp/plain")" || fail "the patch changes nothing: $(apart "$tmp/changed" "$tmp/plain")"
}

# texts PROGRAM OUT: draws eight texts from the last checkpoint of the run OUT
texts() {
    "$1" -e "$2" --prompt "static inline " --num-tokens 16 --num-samples 8 --seed 1 2>"$tmp/log" || fail "$1: $(tail -n 1 "$tmp/log")"
}

# agree NAME TREE [FLAGS]: both programs of the tree have the same losses in fp32, and continue a text by the same tokens, drawn at
# random: a wrong logit soon draws another one. Without a patch, losses differ by 3e-7, which is one in the last printed digit.
agree() {
    local out=$tmp/$1 cpu=$2/train_gpt2 difference
    make_data
    make_gpu "$2" FP32
    train "$cpu" "$out.cpu" "${@:3}"
    train_gpu "$out.gpu" "${@:3}"
    falls "$out.cpu"
    difference=$(apart "$out.cpu" "$out.gpu")
    less "$difference" 1e-6 ||
        { paste <(losses "$out.cpu") <(losses "$out.gpu") && fail "the losses of both programs, above, differ by $difference"; }
    train ./train_gpt2 "$tmp/plain"
    less 3e-5 "$(apart "$out.cpu" "$tmp/plain")" || fail "the losses are those of GPT-2"
    texts "$cpu" "$out.gpu" >"$out.cpu.text"
    texts "$gpu" "$out.gpu" >"$out.gpu.text"
    cmp "$out.cpu.text" "$out.gpu.text" || { diff "$out.cpu.text" "$out.gpu.text" || fail "the programs draw other texts"; }
    echo "note: $1: the programs differ by $difference, from GPT-2 by $(apart "$out.cpu" "$tmp/plain")"
}

agree_patched() { # NAME
    wants_full
    patched "$1"
    make_cpu "$tree"
    agree "$1" "$tree"
}
for name in "${patches[@]}"; do eval "test_$name() { agree_patched $name; }"; done
test_mlp_width() {
    wants_full
    agree mlp_width . --mlp-channels 192
}
test_epsilon() {
    wants_full
    agree epsilon . --norm-epsilon 1e-6
}

test_relu_squared() {
    wants_full
    agree relu_squared . --activation relu2
}

# kernels_of NAME: prints the kernels that the patch changes, directly or by a header, as the name of an op and their numbers
kernels_of() {
    case $1 in
    rmsnorm) printf '%s\n' "layernorm_forward 7" "layernorm_backward 11" "fused_residual_layernorm 3" "layernorm_quantize 2 3" \
        "decode_matvec 6" "decode_matmul 5 6" "decode_layer 5 6" ;;
    esac
}

# In 16 bits other kernels run, too. Each is checked on its own, against a reference that the patch has changed as well.
test_kernels() {
    wants_full
    local name op numbers number
    for name in "${patches[@]}"; do
        [ -n "$(kernels_of "$name")" ] || continue
        patched "$name"
        [ -e "$tree/build/dev_cuda" ] || share_emulated "$tree"
        while read -r op numbers; do
            make -C "$tree/dev/cuda" --no-print-directory NVCC=/nonexistent CXX="$CXX" cpu OP="$op" >"$tmp/log" 2>&1 </dev/null ||
                { tail -n 30 "$tmp/log" && fail "$op does not compile"; }
            for number in $numbers; do
                "$tree/dev/cuda/${op}_cpu" "$number" --check --no-guards >"$tmp/log" 2>&1 </dev/null ||
                    { grep '^FAIL' "$tmp/log" | head -n 5; fail "$name: kernel $number of $op"; }
                grep -q '^[1-9][0-9]* passed, 0 failed' "$tmp/log" || fail "$name: no check of kernel $number of $op has run"
            done
        done < <(kernels_of "$name")
    done
}

tests=(hunks files hunks_are_counted trains "${patches[@]}" mlp_width epsilon relu_squared kernels)
run_tests_once "$@"
