#!/usr/bin/env bash
# dev/test/affected.sh: which tests depend on a file, in a small tree made for the test and in this repository.
. "$(dirname "$0")/../test.sh"
top=$PWD

# Creates a tree with three tests, without git, and changes into it.
new_tree() {
    rm -rf "$tmp/tree"
    mkdir -p "$tmp"/tree/{llmc,scripts,docs,dev/cuda,dev/data} "$tmp"/tree/dev/test/{unit,program,fixtures}
    cd "$tmp/tree"
    cp "$top/dev/test/affected.sh" dev/test/
    echo '#include "b.h"' >llmc/a.h
    touch llmc/b.h llmc/c.h dev/cuda/op.cu dev/test/fixtures/values.json scripts/other.sh docs/page.md LICENSE unknown
    echo '#include "llmc/c.h"' >program.c
    echo '#include "../../llmc/b.h"' >dev/data/tool.c
    printf '#include "../../../llmc/a.h"\nconst char* name = "dev/test/fixtures/values.json";\n' >dev/test/unit/test_a.c
    printf '. "$(dirname "$0")/../lib.sh"\n# not scripts/other.sh\n"$BIN_DIR/program"\nuses\n' >dev/test/program/test_b.sh
    printf '. "$(dirname "$0")/../lib.sh"\nfor op in dev/cuda/*.cu; do echo "$op"; done\nscripts/run.sh\nmake check\n' \
        >dev/test/program/test_c.sh
    printf 'uses() {\n    "$BIN_DIR/dev/data/tool"\n}\n' >dev/test/lib.sh
    echo 'cat docs/data.txt' >scripts/run.sh
    touch docs/data.txt scripts/check.sh
    printf 'check: FORCE\n\t@scripts/check.sh\n' >Makefile
}

# touched FILES TESTS: fails unless the files affect exactly these tests; spaces separate the entries of both lists
touched() {
    local files
    read -r -a files <<<"$1"
    want "what $1 touches" "$(dev/test/affected.sh "${files[@]}" | LC_ALL=C sort | tr '\n' ' ' | sed 's/ $//')" "$2"
}

test_small_tree() {
    new_tree
    touched llmc/a.h test_a
    touched ./llmc/b.h "test_a test_b.sh" # through a.h, and through the tool that a function of lib.sh runs
    touched llmc/c.h test_b.sh
    touched "program.c dev/test/fixtures/values.json" "test_a test_b.sh"
    touched dev/test/lib.sh "test_b.sh test_c.sh"
    touched dev/cuda/op.cu test_c.sh
    touched "docs/data.txt" test_c.sh # through scripts/run.sh
    touched scripts/check.sh test_c.sh # through make check
    touched "docs/page.md LICENSE" ""
    touched unknown "test_a test_b.sh test_c.sh"
    touched scripts/other.sh "test_a test_b.sh test_c.sh" # named in a comment only
    touched no_such_file "test_a test_b.sh test_c.sh"
    touched Makefile "test_a test_b.sh test_c.sh"
    (cd llmc && "../dev/test/affected.sh" c.h) >"$tmp/out"
    want "what c.h in llmc touches" "$(cat "$tmp/out")" test_b.sh
    want "the table's line of test_a" "$(dev/test/affected.sh --table | grep '^test_a:' | tr ' ' '\n' | LC_ALL=C sort | tr '\n' ' ')" \
        "dev/test/fixtures/values.json dev/test/unit/test_a.c llmc/a.h llmc/b.h test_a: "
}

test_since_a_commit() {
    command -v git >/dev/null || skip "needs git"
    new_tree
    git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm first
    want "what no change touches" "$(dev/test/affected.sh --since HEAD)" ""
    echo >>llmc/a.h
    want "what a change touches" "$(dev/test/affected.sh --since HEAD)" test_a
    git -c user.name=a -c user.email=a@b commit -qam second
    want "what a commit touches" "$(dev/test/affected.sh --since HEAD~1)" test_a
    git checkout -q -b other HEAD~1
    echo '"$BIN_DIR/program"' >dev/test/program/test_new.sh
    want "what a new test touches" "$(dev/test/affected.sh --since 'HEAD@{1}')" test_new.sh
    git rm -q llmc/c.h scripts/other.sh scripts/check.sh dev/test/unit/test_a.c
    touched llmc/c.h "test_b.sh test_new.sh" # their program still includes it
    touched scripts/check.sh test_c.sh
    want "tests when a file was removed that nothing named" "$(dev/test/affected.sh --since HEAD | wc -l)" 3
}

test_usage() {
    local rc=0
    dev/test/affected.sh >"$tmp/out" 2>"$tmp/err" || rc=$?
    want "the exit code without arguments" $rc 2
    contains "usage: dev/test/affected.sh --since REF" "$tmp/err"
    rc=0
    dev/test/affected.sh --since no-such-commit >"$tmp/out" 2>"$tmp/err" || rc=$?
    want "the exit code for an unknown commit" $rc 2
    contains "no commit 'no-such-commit'" "$tmp/err"
}

# among FILE TEST ...: fails unless the file affects at least these tests
among() {
    local name
    dev/test/affected.sh "$1" >"$tmp/out"
    for name in "${@:2}"; do grep -qxF "$name" "$tmp/out" || fail "$1 does not touch $name"; done
}

test_this_repository() {
    among llmc/json.h test_json test_tokenizer test_program.sh test_tokenize.sh test_headers.sh
    ! grep -qxF test_cli "$tmp/out" || fail "llmc/json.h touches test_cli"
    among dev/cuda/gelu_forward.cu test_emulation.sh test_ops.sh test_dev_cuda.sh
    ! grep -q '^test_[a-z0-9_]*$' "$tmp/out" || fail "a kernel's ladder touches a unit test"
    among train_gpt2.cu test_emulated_gpt2.sh test_gpu.sh test_structure.sh test_promote.sh
    among README.md test_readme.sh
    among dev/manual/train.md test_readme.sh test_run_gpt2.sh
    among dev/learn/03_reductions.md test_learn.sh
    dev/test/affected.sh dev/test/test.h >"$tmp/out"
    for name in dev/test/unit/test_*.c; do
        grep -qxF "$(basename "$name" .c)" "$tmp/out" || fail "dev/test/test.h does not touch $name"
    done
    for name in .ci/run dev/test/run.sh Makefile dev/cuda/nvcc.mk; do
        want "tests that $name touches" "$(dev/test/affected.sh $name | wc -l)" \
            "$(find dev/test -name 'test_*.c' -o -name 'test_*.sh' | wc -l)"
    done
}

tests=(small_tree since_a_commit usage this_repository)
run_tests_once "$@"
