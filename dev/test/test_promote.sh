#!/usr/bin/env bash
# scripts/promote.sh: copies of kernels that cannot drift, in a small tree of their own.
. "$(dirname "$0")/test.sh"
top=$PWD

# Two ops and a trainer that has the marks of both and nothing between them. The current directory becomes its top.
new_tree() {
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/scripts" "$tmp/tree/dev/cuda"
    cd "$tmp/tree"
    cp "$top/scripts/promote.sh" scripts/
    cat >dev/cuda/gelu.cu <<'CU'
#include "bench.h"
// ==== promoted: gelu ====

void gelu(float* x, int block_size = 256) { x[0] = 0.5f * "\n%s & \\1"[0]; }
// ==== end promoted: gelu ====
int main() {}
CU
    cat >dev/cuda/adamw.cu <<'CU'
// ==== promoted: adamw_prepare ====
int a;
// ==== end promoted: adamw_prepare ====
// ==== promoted: adamw ====
int b = 1;
	// a tab, and trailing blanks  
// ==== end promoted: adamw ====
CU
    cat >train_gpt2.cu <<'CU'
// before
// ==== promoted: adamw ====
// ==== end promoted: adamw ====
// between
// ==== promoted: gelu ====
int old;
// ==== end promoted: gelu ====
// after
CU
}

# refuses TEXT: both ways of calling it exit 1, say TEXT and leave train_gpt2.cu as it is
refuses() {
    local way rc
    cp train_gpt2.cu "$tmp/before.cu"
    for way in "" --check; do
        rc=0
        scripts/promote.sh $way >"$tmp/out" 2>&1 || rc=$?
        want "the exit code of promote.sh $way" $rc 1
        contains "$1" "$tmp/out"
        cmp train_gpt2.cu "$tmp/before.cu" || fail "promote.sh $way changed the file"
    done
}

test_copies() {
    new_tree
    scripts/promote.sh >"$tmp/out"
    contains "copied gelu" "$tmp/out"
    contains "copied adamw" "$tmp/out"
    {
        echo "// before"
        sed -n '4,$p' dev/cuda/adamw.cu
        echo "// between"
        sed -n '2,5p' dev/cuda/gelu.cu
        echo "// after"
    } >"$tmp/want.cu"
    cmp train_gpt2.cu "$tmp/want.cu" || { diff train_gpt2.cu "$tmp/want.cu" || fail "the copy is not byte for byte"; }
    scripts/promote.sh --check >"$tmp/out"
    want "its output" "$(cat "$tmp/out")" "2 promoted blocks, all equal"
}

# what only the ladder needs stands between the pieces of a block; a .cuh has blocks like a .cu
test_pieces() {
    new_tree
    cat >dev/cuda/gelu.cu <<'CU'
// ==== promoted: gelu ====
int first;
// ==== end promoted: gelu ====
int of_the_ladder_alone;
// ==== promoted: gelu ====
int second;
// ==== end promoted: gelu ====
CU
    mv dev/cuda/adamw.cu dev/cuda/adamw.cuh
    scripts/promote.sh >"$tmp/out"
    want "the copy" "$(sed -n '/==== promoted: gelu/,/==== end/p' train_gpt2.cu | sed '1d;$d' | tr '\n' ';')" \
        "int first;;;int second;;"
    contains "int b = 1;" train_gpt2.cu
    scripts/promote.sh --check >"$tmp/out"
    want "its output" "$(cat "$tmp/out")" "2 promoted blocks, all equal"
    sed -i 's/int second/int third/' dev/cuda/gelu.cu
    scripts/promote.sh --check >"$tmp/out" 2>&1 && fail "a change of the second piece is not seen"
    contains "FAIL gelu: " "$tmp/out"
}

test_idempotent() {
    new_tree
    chmod 640 train_gpt2.cu
    scripts/promote.sh >"$tmp/out"
    cp train_gpt2.cu "$tmp/once.cu"
    scripts/promote.sh >"$tmp/out"
    contains "all equal already" "$tmp/out"
    cmp train_gpt2.cu "$tmp/once.cu" || fail "the second run changed something"
    want "its mode" "$(stat -c %a train_gpt2.cu)" 640
}

test_check_finds_one_digit() {
    new_tree
    scripts/promote.sh >"$tmp/out"
    local changed rc
    for changed in 's/block_size = 256/block_size = 257/' 's/blanks  $/blanks /' '/int b = 1/d' 's/^int b/\n&/'; do
        cp train_gpt2.cu "$tmp/good.cu"
        sed -i "$changed" train_gpt2.cu
        cmp -s train_gpt2.cu "$tmp/good.cu" && fail "$changed changes nothing"
        rc=0
        scripts/promote.sh --check >"$tmp/out" 2>&1 || rc=$?
        want "the exit code after $changed" $rc 1
        contains "1 of 2 promoted blocks differ" "$tmp/out"
        grep -q '^FAIL \(gelu\|adamw\): train_gpt2.cu:[0-9]* is not a copy of dev/cuda/' "$tmp/out" || fail "no name"
        scripts/promote.sh >"$tmp/out"
        cmp train_gpt2.cu "$tmp/good.cu" || fail "promote.sh does not mend $changed"
    done
}

# the other direction: a change of the op that was not promoted
test_check_finds_a_changed_op() {
    new_tree
    scripts/promote.sh >"$tmp/out"
    sed -i 's/0.5f/0.6f/' dev/cuda/gelu.cu
    scripts/promote.sh --check >"$tmp/out" 2>&1 && fail "not seen"
    contains "FAIL gelu: " "$tmp/out"
    contains "0.6f" "$tmp/out"
}

test_refuses_missing_marks() {
    new_tree
    sed -i '/end promoted: gelu/d' train_gpt2.cu
    refuses "promoted: gelu has no end"
    new_tree
    sed -i '/end promoted: gelu/d' dev/cuda/gelu.cu
    refuses "promoted: gelu has no end"
    new_tree
    sed -i '/==== promoted: adamw/d' train_gpt2.cu
    refuses "end promoted: adamw without its begin"
    new_tree
    sed -i '/end promoted: adamw /d' train_gpt2.cu
    refuses "promoted: gelu begins inside adamw"
    new_tree
    sed -i '/promoted/d' train_gpt2.cu
    refuses "has no marks"
}

test_refuses_wrong_names() {
    new_tree
    sed -i 's/promoted: gelu/promoted: gellu/' train_gpt2.cu
    refuses "promoted: gellu stands in no file of dev/cuda"
    new_tree
    cat dev/cuda/gelu.cu >>train_gpt2.cu
    refuses "promoted: gelu stands here twice"
    new_tree
    cp dev/cuda/gelu.cu dev/cuda/gelu2.cu
    refuses "promoted: gelu stands in more than one file"
    new_tree
    sed -i 's/promoted: gelu ====/& /' train_gpt2.cu
    refuses "not a mark"
}

test_usage() {
    new_tree
    local rc=0
    scripts/promote.sh --chekc >"$tmp/out" 2>&1 || rc=$?
    want "the exit code" $rc 2
    contains "--chekc" "$tmp/out"
    rm train_gpt2.cu
    rc=0
    scripts/promote.sh --check >"$tmp/out" 2>&1 || rc=$?
    want "the exit code without train_gpt2.cu" $rc 1
}

tests=(copies pieces idempotent check_finds_one_digit check_finds_a_changed_op refuses_missing_marks refuses_wrong_names usage)
run_tests "$@"
