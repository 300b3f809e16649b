#!/usr/bin/env bash
# The Makefile and dev/test/run.sh in a small source tree made for the test: what is rebuilt when, and sums of results.
. "$(dirname "$0")/../test.sh"
unset BIN_DIR CFLAGS WERROR MAKEFLAGS MFLAGS MAKELEVEL TEST_WRAPPER TEST_TIMEOUT TEST_SILENCE TEST_BUDGETS TEST_CPU TEST_JOBS LLMC_TEST_FULL LLMC_TEST_MORE
export CC # the compiler that `make test` was called with
top=$PWD

# Creates a tree with one program, which prints the number in its header, and changes into it.
new_tree() {
    command -v make >/dev/null || skip "needs make"
    rm -rf "$tmp/tree"
    mkdir -p "$tmp"/tree/{llmc,dev/data,dev/cuda} "$tmp"/tree/dev/test/{unit,program,gpu,fuzz}
    cd "$tmp/tree"
    cp "$top/Makefile" .
    cp "$top/dev/cuda/nvcc.mk" dev/cuda/
    cp "$top/dev/test/run.sh" dev/test/
    echo '#define NUMBER 1' >llmc/number.h
    : >llmc/cold.h
    : >llmc/matmul.h # an object of its own
    cat >train_gpt2.c <<'C'
#include "llmc/number.h"
#include <stdio.h>
int main(void) {
    printf("%d\n", NUMBER);
    return 0;
}
C
    sed 's|llmc/|../../llmc/|' train_gpt2.c >dev/data/tool.c
}

# test_program NAME BODY: writes dev/test/unit/test_NAME.c
test_program() {
    printf '#include <signal.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\nint main(void) { %s }\n' "$2" \
        >"dev/test/unit/test_$1.c"
}

test_help() {
    new_tree
    make >"$tmp/out" 2>&1
    for target in train_gpt2cu all demo test test-full quick check sanitize valgrind fuzz fuzz-program bench check-style check-words clean; do
        grep -q "^make $target " "$tmp/out" || fail "make does not explain $target"
    done
    [ ! -e build ] && [ ! -e train_gpt2 ] || fail "make alone builds something"
}

test_builds_and_rebuilds() {
    new_tree
    make -j2 all >"$tmp/out" 2>&1
    want "the program prints" "$(./train_gpt2) $(dev/data/tool)" "1 1"
    want "compilations" "$(grep -c -- '-o ' "$tmp/out")" 3
    make all >"$tmp/out" 2>&1
    want "compilations when nothing changed" "$(grep -c -- '-o ' "$tmp/out")" 0
    sleep 0.05
    echo '#define NUMBER 2' >llmc/number.h
    make all >/dev/null 2>&1
    want "after a change of the header the program prints" "$(./train_gpt2) $(dev/data/tool)" "2 2"
    sleep 0.05
    touch train_gpt2.c
    make all >"$tmp/out" 2>&1
    want "files compiled after an edit of the program" "$(grep -o ' [^ ]*[.][ch] ' "$tmp/out")" " llmc/cold.h 
 train_gpt2.c "
    make all CFLAGS=-O0 >"$tmp/out" 2>&1
    want "compilations after a change of CFLAGS" "$(grep -c -- '-o ' "$tmp/out")" 2
    make all CFLAGS=-O0 >"$tmp/out" 2>&1
    want "compilations with the same CFLAGS again" "$(grep -c -- '-o ' "$tmp/out")" 0
    find build -name 'train_gpt2.d' -delete
    make all CFLAGS=-O0 >"$tmp/out" 2>&1
    want "compilations when a dependency file is lost" "$(grep -c -- '-o ' "$tmp/out")" 1
    # a header may be removed together with its last use
    sed -i '/include "/d; s/NUMBER/3/' train_gpt2.c dev/data/tool.c
    rm llmc/number.h
    make all CFLAGS=-O0 >/dev/null 2>&1
    want "without the header the program prints" "$(./train_gpt2)" 3
    make BIN_DIR=build/other all >/dev/null 2>&1
    want "the program below BIN_DIR prints" "$(build/other/train_gpt2)" 3
    make clean >/dev/null
    [ ! -e build ] && [ ! -e train_gpt2 ] && [ ! -e dev/data/tool ] || fail "make clean leaves something"
}

# The program and the parts of its kernels are objects: an edit compiles the program and the part that it is in.
test_parts_of_the_gpu_program() {
    new_tree
    cat >nvcc <<'SH'
#!/bin/sh
# compiles or links C
[ "$1" != --version ] || exec echo nvcc
parts='' out='' source='' depends=''
while [ $# -gt 0 ]; do
    case $1 in
    -o) out=$2 && shift ;;
    -MF) depends=$2 && shift ;;
    -MT) shift ;;
    -D*) parts="$parts $1" ;;
    *.cu | *.o) source="$source $1" ;;
    esac
    shift
done
[ -z "$depends" ] || echo "$out: ${source# }" >"$depends"
case $source in
*.cu) exec gcc -x c $parts -c $source -o "$out" ;;
*) exec gcc $source -o "$out" ;;
esac
SH
    chmod +x nvcc
    printf '%s\n' '#include <stdio.h>' 'int a(void), b(void);' '// 2. the model' '#if PART <= 1' 'int main(void) { printf("1 %d %d\n", a(), b()); }' \
        '#endif' '// 6. kernels' '#if PART == 0 || PART == 2' 'int a(void) { return 2; }' '#endif' '#if PART == 0 || PART == 3' \
        'int b(void) { return 3; }' '#endif' >train_gpt2.cu
    local build=(make train_gpt2cu NVCC=./nvcc "KERNEL_PARTS=2 3") edit
    # SED_SCRIPT, number of compilations, what the program then prints
    for edit in ':3:1 2 3' 's/"1/"one/:1:one 2 3' 's/2; }/20; }/:2:one 20 3' 's/3; }/30; }/:2:one 20 30' ':0:one 20 30'; do
        sleep 0.02
        [ -z "${edit%%:*}" ] || sed -i "${edit%%:*}" train_gpt2.cu
        "${build[@]}" >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "the build after '${edit%%:*}'"; }
        want "compilations after '${edit%%:*}' and what it prints" "$(grep -c -- ' -c ' "$tmp/out"):$(./train_gpt2cu)" "${edit#*:}"
    done
    make BIN_DIR=build/whole build/whole/train_gpt2cu NVCC=./nvcc KERNEL_PARTS= >"$tmp/out" 2>&1 || true
    want "calls of nvcc in one piece" "$(grep -c '^./nvcc' "$tmp/out")" 1
}

test_another_compiler_rebuilds() {
    new_tree
    command -v clang >/dev/null || skip "needs clang"
    make all CC=gcc >/dev/null 2>&1
    make all CC=clang >"$tmp/out" 2>&1
    want "compilations after a change of CC" "$(grep -c -- '-o ' "$tmp/out")" 3
    want "the program prints" "$(./train_gpt2)" 1
}

test_without_openmp() {
    new_tree
    sed -i 's|^int main|#pragma omp declare simd\nint f(void);\nint main|' train_gpt2.c
    cat >cc_without_openmp <<'C'
#!/bin/sh
for a in "$@"; do
    [ "$a" = -fopenmp ] && { echo "no -fopenmp here" >&2; exit 1; }
done
exec "${REAL_CC:-gcc}" "$@"
C
    chmod +x cc_without_openmp
    REAL_CC=$CC make all CC=./cc_without_openmp >"$tmp/out" 2>&1
    contains "note: ./cc_without_openmp has no OpenMP" "$tmp/out"
    want "the program prints" "$(./train_gpt2)" 1
    REAL_CC=$CC make CC=./cc_without_openmp >"$tmp/out"
    contains "note: ./cc_without_openmp has no OpenMP" "$tmp/out"
}

# another compiler may warn of more than ours do; only .ci/run wants none
test_warnings_are_errors_when_asked() {
    local compiler
    for compiler in gcc clang; do
        command -v $compiler >/dev/null || continue
        new_tree
        sed -i 's|^int main.*|&\n    int never_used;|' train_gpt2.c
        make train_gpt2 CC=$compiler >"$tmp/out" 2>&1 || fail "$compiler: a warning is an error"
        contains "warning: unused variable" "$tmp/out"
        ! WERROR=-Werror make train_gpt2 CC=$compiler >"$tmp/out" 2>&1 || fail "$compiler: WERROR=-Werror lets a warning pass"
        make dev/data/tool CC=$compiler WERROR=-Werror >"$tmp/out" 2>&1 || fail "$compiler: WERROR=-Werror refuses sound code"
    done
    [ -e "$tmp/out" ] || skip "needs gcc or clang"
}

# -ffast-math would change results without a word
test_fast_math_is_refused() {
    local flag source
    cd "$top"
    command -v "$CC" >/dev/null || skip "needs $CC"
    for source in train_gpt2.c dev/data/tokenize.c; do
        for flag in -Ofast -ffast-math -ffinite-math-only; do
            ! "$CC" -std=gnu11 $flag -fsyntax-only -Wfatal-errors "$source" 2>"$tmp/err" || fail "$source compiles with $flag"
            contains "needs IEEE arithmetic: compile without -Ofast" "$tmp/err"
        done
        "$CC" -std=gnu11 -O3 -fno-math-errno -fno-trapping-math -fsyntax-only "$source" || fail "$source does not compile"
    done
}

test_missing_compiler_is_named() {
    new_tree
    rc=0
    make all CC=no-such-cc >"$tmp/out" 2>&1 || rc=$?
    [ $rc -ne 0 ] || fail "make succeeds without a compiler"
    contains "error: no compiler no-such-cc" "$tmp/out"
}

# SINCE and FILES select tests by their includes, and make builds no other tests
test_only_what_a_change_touches() {
    new_tree
    cp "$top/dev/test/affected.sh" dev/test/
    test_program one 'puts("ok a\n1 passed, 0 failed, 0 skipped"); return 0;'
    sed 's|^|#include "../../../llmc/number.h"\n|; 2,$d' dev/test/unit/test_one.c >dev/test/unit/test_two.c
    cat dev/test/unit/test_one.c >>dev/test/unit/test_two.c
    touch LICENSE
    make test FILES=llmc/number.h >"$tmp/out" 2>&1
    want "the tests that ran" "$(grep '^== ' "$tmp/out")" "== test_two"
    [ ! -e train_gpt2 ] && [ ! -e dev/test/unit/test_one ] || fail "make test FILES= builds more than the test"
    make test FILES=LICENSE >"$tmp/out" 2>&1
    want "the last line when no test is touched" "$(tail -n 1 "$tmp/out")" "0 passed, 0 failed, 0 skipped"
    mkdir -p dev/cuda bin
    printf '#!/bin/sh\n' | tee dev/cuda/promote.sh dev/test/words.sh >bin/clang-format
    chmod +x dev/cuda/promote.sh dev/test/words.sh bin/clang-format
    PATH=$PWD/bin:$PATH make quick FILES=llmc/number.h >"$tmp/out" 2>&1
    want "the last line of make quick" "$(tail -n 1 "$tmp/out")" "1 passed, 0 failed, 0 skipped"
    ! make test SINCE=no-such-commit >"$tmp/out" 2>&1 || fail "make test accepts an unknown commit"
    FILES=LICENSE make test >"$tmp/out" 2>&1 # a variable of the environment chooses nothing
    want "the last line of all tests" "$(tail -n 1 "$tmp/out")" "2 passed, 0 failed, 0 skipped"
}

# what run.sh reports for programs that behave and for programs that do not
test_reports_are_added_up() {
    new_tree
    test_program good 'puts("ok a\nskip b: needs the moon\n1 passed, 0 failed, 1 skipped"); return 0;'
    printf '#!/bin/sh\necho "ok c"\necho "2 passed, 0 failed, 0 skipped"\n' >dev/test/program/test_shell.sh
    chmod +x dev/test/program/test_shell.sh
    make test >"$tmp/out" 2>"$tmp/err"
    want "the last line" "$(tail -n 1 "$tmp/out")" "3 passed, 0 failed, 1 skipped"
    contains "  test_good: b: needs the moon" "$tmp/out"
    want "standard error" "$(grep -v '^note:' "$tmp/err")" ""

    test_program fails 'puts("FAIL d: two is not one\n0 passed, 1 failed, 0 skipped"); return 1;'
    test_program crashes 'fflush(stdout); raise(SIGSEGV); return 0;'
    test_program hangs 'for (;;) { sleep(1); }'
    test_program spins 'for (volatile int i = 0;; i++) { if (i % 100000000 == 0) { puts("still here"); fflush(stdout); } }'
    test_program silent 'puts("ok"); return 0;'
    test_program contradicts 'puts("1 passed, 0 failed, 0 skipped"); return 1;'
    test_program hides 'puts("1 passed, 1 failed, 0 skipped"); return 0;'
    test_program empty 'puts("0 passed, 0 failed, 0 skipped"); return 0;'
    test_program exits_late 'puts("1 passed, 0 failed, 0 skipped\nafterwards"); return 0;'
    printf '#!/bin/sh\nkill -9 $$\n' >dev/test/gpu/test_killed.sh # also not executable
    rc=0
    TEST_TIMEOUT=1 TEST_SILENCE=1 make -k test >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -ne 0 ] || fail "make test succeeds with failures"
    want "the last line" "$(tail -n 1 "$tmp/out")" "5 passed, 11 failed, 1 skipped"
    contains "  test_fails: d: two is not one" "$tmp/out"
    contains "  test_crashes: ended by signal 11 (SEGV)" "$tmp/out"
    contains "  test_hangs: killed: it waits, for 1 s it has printed nothing" "$tmp/out"
    contains "  test_spins: killed: not done after 1 s of CPU time" "$tmp/out"
    contains "  test_silent: ended with status 0 without a line" "$tmp/out"
    contains "  test_contradicts: says '1 passed, 0 failed, 0 skipped' but ends with status 1" "$tmp/out"
    contains "  test_hides: says '1 passed, 1 failed, 0 skipped' but ends with status 0" "$tmp/out"
    contains "  test_empty: runs no test" "$tmp/out"
    contains "  test_exits_late: ended with status 0 without a line" "$tmp/out"
    contains "  test_killed.sh: dev/test/gpu/test_killed.sh is not there or not executable" "$tmp/out"
}

# parallel runs print the same lines in the same order, although the programs run in another order
test_side_by_side() {
    new_tree
    test_program a 'sleep(1); puts("ok a\n1 passed, 0 failed, 0 skipped"); return 0;'
    test_program b 'puts("skip b: no\n0 passed, 0 failed, 1 skipped"); return 0;'
    test_program c 'puts("half a line"); fflush(stdout); raise(SIGSEGV); return 0;'
    make tests >/dev/null
    TEST_JOBS=3 dev/test/run.sh test_a test_b test_absent test_c >"$tmp/three" && fail "succeeds with failures"
    TEST_JOBS=1 dev/test/run.sh test_a test_b test_absent test_c >"$tmp/one" && fail "succeeds with failures"
    # but for the CPU times
    diff <(sed 's/^  [0-9.]* /  /' "$tmp/one" | sort) <(sed 's/^  [0-9.]* /  /' "$tmp/three" | sort)
    diff <(sed '/^dearest/,$d' "$tmp/one") <(sed '/^dearest/,$d' "$tmp/three")
    want "the last line" "$(tail -n 1 "$tmp/three")" "1 passed, 2 failed, 1 skipped"
    rc=0
    TEST_JOBS=0 dev/test/run.sh 2>"$tmp/err" || rc=$?
    want "status" $rc 2
    # if a signal ends run.sh, it ends all of its programs
    test_program hangs 'FILE* f = fopen("pid", "w"); fprintf(f, "%d", getpid()); fclose(f); for (;;) { sleep(1); }'
    make tests >/dev/null
    TEST_JOBS=2 dev/test/run.sh test_hangs test_a >/dev/null &
    local i
    for ((i = 0; i < 500 && $(cat pid 2>/dev/null | wc -c) == 0; i++)); do sleep 0.01; done
    kill -TERM $!
    rc=0
    wait $! || rc=$?
    want "status after a signal" $rc 130
    ! kill -0 "$(cat pid)" 2>/dev/null || fail "a test outlives run.sh"
}

# A program fails if it uses more CPU time than its budget, scaled to the speed of this machine.
test_budgets() {
    new_tree
    test_program dear 'while (clock() < 3.2 * CLOCKS_PER_SEC) {} puts("1 passed, 0 failed, 0 skipped"); return 0;'
    sed -i 's|<unistd.h>|<time.h>|' dev/test/unit/test_dear.c
    make tests >/dev/null
    printf 'loop 1\n0.01 test_dear\n' >budgets # this machine is much slower than that one
    TEST_BUDGETS=budgets TEST_CPU=new_budgets dev/test/run.sh >"$tmp/out" || fail "$(tail -n 3 "$tmp/out")"
    want "what was measured" "$(sed 's/[0-9.]* test/N test/; s/loop [0-9]*$/loop N/' new_budgets | tr '\n' ' ')" "loop N N test_dear "
    printf 'loop 1000000\n1 test_other\n' >budgets # and much faster
    TEST_BUDGETS=budgets dev/test/run.sh >"$tmp/out" && fail "a program without a budget may be dear"
    grep -qE '^  test_dear: used 3 s of CPU time, more than 3 s: 1.5 times the 0 s of budgets, ' "$tmp/out" || fail "$(cat "$tmp/out")"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 passed, 1 failed, 0 skipped"
}

test_no_tests_is_a_failure() {
    new_tree
    rc=0
    dev/test/run.sh >"$tmp/out" || rc=$?
    want "status" $rc 1
    want "the last line" "$(tail -n 1 "$tmp/out")" "0 passed, 1 failed, 0 skipped"
    rc=0
    dev/test/run.sh test_absent >"$tmp/out" || rc=$?
    want "status for an absent test" $rc 1
}

# tests that send an interrupt need signals that are not ignored, as in a terminal
test_signals_are_not_ignored() {
    new_tree
    test_program signals 'raise(SIGINT); puts("1 passed, 0 failed, 0 skipped"); return 0;'
    make test >"$tmp/out" 2>&1 && fail "SIGINT is ignored in a test"
    contains "test_signals: ended by signal 2 (INT)" "$tmp/out"
}

# lives PID: true if the process still runs after two seconds. A zombie that nobody has waited for does not count.
lives() {
    local state
    for ((i = 0; i < 40; i++)); do
        state=$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null) || return 1
        [ "$state" != Z ] || return 1
        sleep 0.05
    done
}

# children that a test leaves behind must end at its time limit, and an interrupt must end the running test
test_interrupt_and_children() {
    new_tree
    printf '#!/bin/bash\nsleep 300 &\necho $! >child\nsleep 300\n' >dev/test/program/test_children.sh
    chmod +x dev/test/program/test_children.sh
    TEST_SILENCE=1 dev/test/run.sh >"$tmp/out" && fail "a hanging test passed"
    ! lives "$(cat child)" || fail "a child of a killed test lives on"
    rm child
    dev/test/run.sh >"$tmp/out" &
    for ((i = 0; i < 100; i++)); do [ -s child ] || sleep 0.05; done
    kill -TERM $!
    rc=0
    wait $! || rc=$?
    want "status of an interrupted run" $rc 130
    ! lives "$(cat child)" || fail "a test outlives an interrupted run"
}

test_sanitize_finds_a_bug() {
    new_tree
    echo 'int main(void) { return 0; }' | $CC -x c -fsanitize=address,undefined - -o "$tmp/probe" 2>/dev/null ||
        skip "$CC has no sanitizers"
    closing='puts("1 passed, 0 failed, 0 skipped"); return 0;'
    test_program address "volatile char* volatile p = malloc(4); free((void*)p); *p = 1; $closing"
    test_program undefined "volatile int i = 0x7fffffff; i += 1; if (i == 5) { return 5; } $closing"
    test_program leak "char* volatile p = malloc(4); *p = 1; p = 0; $closing"
    rc=0
    make sanitize >"$tmp/out" 2>&1 || rc=$?
    [ $rc -ne 0 ] || fail "make sanitize succeeds with three bugs"
    contains "heap-use-after-free" "$tmp/out"
    contains "signed integer overflow" "$tmp/out"
    contains "detected memory leaks" "$tmp/out"
    contains "0 passed, 3 failed, 0 skipped" "$tmp/out"
    [ ! -e dev/test/unit/test_address ] || fail "make sanitize writes beside the sources"
}

tests=(help budgets builds_and_rebuilds parts_of_the_gpu_program another_compiler_rebuilds without_openmp warnings_are_errors_when_asked fast_math_is_refused
    missing_compiler_is_named only_what_a_change_touches reports_are_added_up side_by_side no_tests_is_a_failure signals_are_not_ignored
    interrupt_and_children sanitize_finds_a_bug)
run_tests_once "$@"
