#!/usr/bin/env bash
# Tests the file of chosen cuBLASLt algorithms, by cublaslt_choices.cu. Needs nvcc, but no GPU.
. "$(dirname "$0")/../test.sh"
source=dev/test/gpu/cublaslt_choices.cu
export PATH=$PATH:/usr/local/cuda/bin

built() { # builds the test program once, into $tmp
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$tmp/choices" ] || nvcc -O1 -std=c++17 $source -lcublasLt -o "$tmp/choices" >"$tmp/log" 2>&1 ||
        { cat "$tmp/log" && fail "$source does not compile"; }
}

# runs one test of the program as a test of this script
choices_test() { # NAME
    built
    "$tmp/choices" "$1" >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "$1 fails"; }
    contains "ok $1" "$tmp/out"
}
read -r -a tests <<<"$(sed -n '/^static const Test tests\[\]/,/^};/s/^ *{"\([A-Za-z0-9_]*\)",.*/\1/p' $source | tr '\n' ' ')"
for name in "${tests[@]}"; do eval "test_$name() { choices_test $name; }"; done

# the table of tests above matches the program's --list
test_list() {
    built
    want "--list" "$("$tmp/choices" --list | cut -d ' ' -f 1 | tr '\n' ' ')" "${choices[*]} "
}
choices=("${tests[@]}")
tests+=(list)
run_tests_once "$@"
