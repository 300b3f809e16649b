#!/usr/bin/env bash
# dev/cuda/promote.sh in a small source tree made for the test: the copies of the kernels stay identical. Also the form
# of the ladders of dev/cuda and of the promoted blocks of train_gpt2.cu, checked from their text alone.
. "$(dirname "$0")/../test.sh"
top=$PWD

# Creates a tree with two ops and a trainer that has the marks of both, with nothing between them, and changes into it.
new_tree() {
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cd "$tmp/tree"
    cp "$top/dev/cuda/promote.sh" dev/cuda/
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

# refuses TEXT: with and without --check promote.sh must exit 1, print TEXT and leave train_gpt2.cu unchanged
refuses() {
    local way rc
    cp train_gpt2.cu "$tmp/before.cu"
    for way in "" --check; do
        rc=0
        dev/cuda/promote.sh $way >"$tmp/out" 2>&1 || rc=$?
        want "the exit code of promote.sh $way" $rc 1
        contains "$1" "$tmp/out"
        cmp train_gpt2.cu "$tmp/before.cu" || fail "promote.sh $way changed the file"
    done
}

test_copies() {
    new_tree
    dev/cuda/promote.sh >"$tmp/out"
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
    dev/cuda/promote.sh --check >"$tmp/out"
    want "its output" "$(cat "$tmp/out")" "2 promoted blocks, all equal"
}

# code that only the ladder needs is between the pieces of a block; a .cuh has blocks like a .cu
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
    dev/cuda/promote.sh >"$tmp/out"
    want "the copy" "$(sed -n '/==== promoted: gelu/,/==== end/p' train_gpt2.cu | sed '1d;$d' | tr '\n' ';')" \
        "int first;;;int second;;"
    contains "int b = 1;" train_gpt2.cu
    dev/cuda/promote.sh --check >"$tmp/out"
    want "its output" "$(cat "$tmp/out")" "2 promoted blocks, all equal"
    sed -i 's/int second/int third/' dev/cuda/gelu.cu
    dev/cuda/promote.sh --check >"$tmp/out" 2>&1 && fail "a change of the second piece is not seen"
    contains "FAIL gelu: " "$tmp/out"
}

test_idempotent() {
    new_tree
    chmod 640 train_gpt2.cu
    dev/cuda/promote.sh >"$tmp/out"
    cp train_gpt2.cu "$tmp/once.cu"
    dev/cuda/promote.sh >"$tmp/out"
    contains "all equal already" "$tmp/out"
    cmp train_gpt2.cu "$tmp/once.cu" || fail "the second run changed something"
    want "its mode" "$(stat -c %a train_gpt2.cu)" 640
}

test_check_finds_one_digit() {
    new_tree
    dev/cuda/promote.sh >"$tmp/out"
    local changed rc
    for changed in 's/block_size = 256/block_size = 257/' 's/blanks  $/blanks /' '/int b = 1/d' 's/^int b/\n&/'; do
        cp train_gpt2.cu "$tmp/good.cu"
        sed -i "$changed" train_gpt2.cu
        cmp -s train_gpt2.cu "$tmp/good.cu" && fail "$changed changes nothing"
        rc=0
        dev/cuda/promote.sh --check >"$tmp/out" 2>&1 || rc=$?
        want "the exit code after $changed" $rc 1
        contains "1 of 2 promoted blocks differ" "$tmp/out"
        grep -q '^FAIL \(gelu\|adamw\): train_gpt2.cu:[0-9]* is not a copy of dev/cuda/' "$tmp/out" || fail "no name"
        dev/cuda/promote.sh >"$tmp/out"
        cmp train_gpt2.cu "$tmp/good.cu" || fail "promote.sh does not mend $changed"
    done
}

# the other direction: the op has changed, but was not promoted again
test_check_finds_a_changed_op() {
    new_tree
    dev/cuda/promote.sh >"$tmp/out"
    sed -i 's/0.5f/0.6f/' dev/cuda/gelu.cu
    dev/cuda/promote.sh --check >"$tmp/out" 2>&1 && fail "not seen"
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
    refuses "promoted: gellu is in no file of dev/cuda"
    new_tree
    cat dev/cuda/gelu.cu >>train_gpt2.cu
    refuses "promoted: gelu occurs twice here"
    new_tree
    cp dev/cuda/gelu.cu dev/cuda/gelu2.cu
    refuses "promoted: gelu is in more than one file"
    new_tree
    sed -i 's/promoted: gelu ====/& /' train_gpt2.cu
    refuses "not a mark"
}

test_usage() {
    new_tree
    local rc=0
    dev/cuda/promote.sh --chekc >"$tmp/out" 2>&1 || rc=$?
    want "the exit code" $rc 2
    contains "--chekc" "$tmp/out"
    rm train_gpt2.cu
    rc=0
    dev/cuda/promote.sh --check >"$tmp/out" 2>&1 || rc=$?
    want "the exit code without train_gpt2.cu" $rc 1
}

# unordered FILE: prints a line for each kernel number that comes after a larger one, in the banners or in declare()
unordered() {
    awk '
        function bad(line, text) { print FILENAME ":" line ": " text; found = 1 }
        match($0, /^\/\/ ---- kernels? [0-9]+((,| and| to) [0-9]+)*/) {
            count = split(substr($0, RSTART, RLENGTH), numbers, /[^0-9]+/) # numbers[1] is empty
            if (numbers[2] + 0 <= last) { bad(FNR, "kernel " numbers[2] " comes after kernel " last) }
            for (i = 2; i <= count; i++) { if (numbers[i] + 0 > last) { last = numbers[i] + 0 } }
        }
        BEGIN { last = declared = -1 }
        # a call may continue on the next line: kernel(\n 7, "what", ...
        /(^|[^A-Za-z0-9_])(kernel|variant)\($/ { open = 1; next }
        {
            line = open ? "kernel(" $0 : $0
            open = 0
            while (match(line, /(^|[^A-Za-z0-9_])(kernel|variant)\( *[0-9]+,/)) {
                number = substr(line, RSTART, RLENGTH)
                gsub(/[^0-9]/, "", number)
                if (number + 0 < declared) { bad(FNR, "kernel " number " is declared after kernel " declared) }
                if (number + 0 > declared) { declared = number + 0 }
                line = substr(line, RSTART + RLENGTH)
            }
        }
        END { exit found }' "$1"
}

# the source of an op and its --list are in the order of kernel numbers, the naive kernel first
test_ladders_ascend() {
    local file failed=0
    for file in dev/cuda/*.cu dev/cuda/*.cuh; do
        [ ! -e "$file" ] || unordered "$file" || failed=$((failed + 1))
    done
    [ $failed -eq 0 ] || fail "$failed files of dev/cuda have a ladder that is not in ascending order"
}

test_order_is_checked() {
    cat >"$tmp/good.cu" <<'CU'
// ---- kernel 1: naive ----
// ---- kernels 2 and 3: better ----
// ---- kernel 4: best ----
    b.kernel(0, "library", f, {0});
    b.kernel(1, "naive", f);
    variant(2, "better", f);
    b.kernel(
        10, "best", f);
CU
    unordered "$tmp/good.cu" || fail "a ladder in order is refused"
    local change
    for change in 's/kernel 4: best/kernel 3: best/' 's/kernel 4: best/kernel 1: best/' 's/kernels 2/kernels 1/' \
        's/b.kernel(0/b.kernel(3/' 's/variant(2/variant(11/' 's/ 10, "best"/ 1, "best"/'; do
        sed "$change" "$tmp/good.cu" >"$tmp/bad.cu"
        cmp -s "$tmp/good.cu" "$tmp/bad.cu" && fail "$change changes nothing"
        unordered "$tmp/bad.cu" >"$tmp/out" && fail "not seen: $change"
        contains "$tmp/bad.cu:" "$tmp/out"
    done
}

# misnamed FILE: prints a line if declare() of an op says b.promoted() although neither OP.cu nor OP.cuh has marks, or b.best()
# although one has. An op may have neither.
misnamed() {
    local marks=0 promoted=0 best=0
    grep -qs '^// ==== promoted: ' "$1" "${1}h" && marks=1
    grep -qE '(^|[^A-Za-z0-9_])b\.promoted\(' "$1" && promoted=1
    grep -qE '(^|[^A-Za-z0-9_])b\.best\(' "$1" && best=1
    [ $promoted -le $marks ] || { echo "$1: b.promoted() without a block for train_gpt2.cu: b.best()"; return 1; }
    [ $marks -le $promoted ] || { echo "$1: a promoted block without b.promoted()"; return 1; }
    [ $((promoted + best)) -le 1 ] || { echo "$1: b.promoted() and b.best()"; return 1; }
}

# --list, tables and CSV say (promoted) only of kernels whose copy is in train_gpt2.cu, of others (best)
test_promoted_or_best() {
    local file name failed=0
    for file in dev/cuda/*.cu; do
        [[ $file != */practice_* ]] || continue # of `make practice`
        [ ! -e "$file" ] || misnamed "$file" || failed=$((failed + 1))
        for name in $(sed -n 's|^// ==== promoted: \([A-Za-z0-9_]*\) ====$|\1|p' "$file" "${file}h" 2>/dev/null); do
            grep -qx "// ==== promoted: $name ====" train_gpt2.cu || { echo "$file: $name is not in train_gpt2.cu" && failed=1; }
        done
    done
    [ $failed -eq 0 ] || fail "$failed ops of dev/cuda call their best kernel by the wrong name"
    printf '// ==== promoted: gelu ====\n    b.promoted(2);\n' >"$tmp/good.cu"
    misnamed "$tmp/good.cu" || fail "a promoted kernel is refused"
    printf '    b.best(2);\n' >"$tmp/good.cu"
    misnamed "$tmp/good.cu" || fail "a best kernel is refused"
    local bad
    for bad in '    b.promoted(2);' '// ==== promoted: gelu ====\n    b.best(2);' '// ==== promoted: gelu ====' \
        '// ==== promoted: gelu ====\n    b.promoted(2);\n    b.best(2);'; do
        printf '%b\n' "$bad" >"$tmp/bad.cu"
        misnamed "$tmp/bad.cu" >"$tmp/out" && fail "not seen: $bad"
        contains "$tmp/bad.cu:" "$tmp/out"
    done
    echo '// ==== promoted: gelu ====' | tee "$tmp/good.cuh" >"$tmp/bad.cuh"
    misnamed "$tmp/good.cu" >"$tmp/out" && fail "not seen: b.best() beside a header with marks"
    echo '    b.promoted(2);' >"$tmp/bad.cu"
    misnamed "$tmp/bad.cu" || fail "a promoted kernel in a header is refused"
}

# nameless FILE: prints a line for each promoted block that launches kernels but does not declare their cost with an Op,
# and for each launcher `void NAME(..., int block_size) {` without an Op, or without its overload directly after it.
# Only blocks count that define the op of the same name (NAME, NAME_forward or NAME_backward) as a plain function: a
# template from which ops are made, such as a product with an epilogue, has no name or cost of its own.
nameless() {
    awk '
        function bad(text) { print FILENAME ":" FNR ": " text; found = 1 }
        /^\/\/ ==== promoted: / { block = $4; kernels = ops = op = 0 }
        block == "" { next }
        /^\/\/ ==== end promoted: / {
            if (kernels && op && !ops) { bad("promoted: " block " has no Op") }
            if (wanted != "") { bad(wanted " has no overload without block_size behind it") }
            block = wanted = ""
        }
        /__global__/ { kernels = 1 }
        /(^| )Op op\(/ { ops++; named = 1 }
        /^void [a-z0-9_]+\(/ && !after_template {
            name = $2
            sub(/\(.*/, "", name)
            if (name == block || name == block "_forward" || name == block "_backward") { op = 1 }
            if (wanted != "" && wanted != name) { bad(wanted " has no overload without block_size behind it") }
            wanted = launcher = ""
            signature = ""
            inside = 1
        }
        inside { signature = signature $0 }
        inside && /\{$/ {
            inside = named = 0
            if (signature ~ /int block_size\) \{$/) { launcher = name }
        }
        /^}/ && launcher != "" {
            if (!named) { bad(launcher " has no Op") }
            wanted = launcher
            launcher = ""
        }
        { after_template = /^template <.*>$/ }
        END { exit found }' "$1"
}

test_launchers_say_their_cost() {
    nameless train_gpt2.cu || fail "see above"
}

test_missing_cost_is_seen() {
    cat >"$tmp/good.cu" <<'CU'
// ==== promoted: gelu ====
__global__ void gelu_kernel2(float* x) {}
void gelu_forward(float* x, size_t n, cudaStream_t stream,
                  int block_size) {
    Op op(stream, 8.0 * n, 0, "gelu_forward");
}
void gelu_forward(float* x, size_t n, cudaStream_t stream) {
    gelu_forward(x, n, stream, 256);
}
// ==== end promoted: gelu ====
// ==== promoted: product ====
__global__ void product_kernel2(float* x) {}
template <class Epilogue>
void product(float* x, Epilogue e, cudaStream_t stream) {
}
// ==== end promoted: product ====
CU
    nameless "$tmp/good.cu" || fail "what is right is refused"
    local change
    for change in '/Op op/d' '/template/d' '7,9d' '3s/gelu_forward/gelu_other/' '4s/ int block_size//;/Op op/d'; do
        sed "$change" "$tmp/good.cu" >"$tmp/bad.cu"
        cmp -s "$tmp/good.cu" "$tmp/bad.cu" && fail "$change changes nothing"
        nameless "$tmp/bad.cu" >"$tmp/out" && fail "not seen: $change"
        contains "$tmp/bad.cu:" "$tmp/out"
    done
}

tests=(copies pieces idempotent check_finds_one_digit check_finds_a_changed_op refuses_missing_marks refuses_wrong_names usage
    ladders_ascend order_is_checked promoted_or_best launchers_say_their_cost missing_cost_is_seen)
run_tests_once "$@"
