#!/usr/bin/env bash
# cublaslt_choices.cu: the file of chosen cuBLASLt algorithms. Needs nvcc, no GPU.
. "$(dirname "$0")/test.sh"
source=dev/test/cublaslt_choices.cu
export PATH=$PATH:/usr/local/cuda/bin

built() { # once, into $tmp
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$tmp/choices" ] || nvcc -O1 -std=c++17 $source -lcublasLt -o "$tmp/choices" >"$tmp/log" 2>&1 ||
        { cat "$tmp/log" && fail "$source does not compile"; }
}

# each test of the program as one of this script
choices_test() { # NAME
    built
    "$tmp/choices" "$1" >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "$1 fails"; }
    contains "ok $1" "$tmp/out"
}
read -r -a tests <<<"$(sed -n '/^static const Test tests\[\]/,/^};/s/^ *{"\([A-Za-z0-9_]*\)",.*/\1/p' $source | tr '\n' ' ')"
for name in "${tests[@]}"; do eval "test_$name() { choices_test $name; }"; done

# the table above is read rightly
test_list() {
    built
    want "--list" "$("$tmp/choices" --list | cut -d ' ' -f 1 | tr '\n' ' ')" "${choices[*]} "
}
choices=("${tests[@]}")
tests+=(list)
run_tests_once "$@"
