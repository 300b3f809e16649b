#!/usr/bin/env bash
# Every header of llmc/ is self-contained: alone in a file it compiles without a warning, as C11 and as C++17, with gcc
# and with clang. One test per header.
. "$(dirname "$0")/../test.sh"

flags=(-O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -fsyntax-only)

# Includes the header twice, to test its include guard.
compiles() { # HEADER
    printf '#include "%s"\n#include "%s"\n' "$PWD/$1" "$PWD/$1" >"$tmp/alone.c"
    cp "$tmp/alone.c" "$tmp/alone.cc"
    local tried=0
    for compiler in "gcc -std=gnu11" "g++ -std=gnu++17" "clang -std=gnu11" "clang++ -std=gnu++17"; do
        command -v "${compiler%% *}" >/dev/null || continue
        local file=$tmp/alone.c
        [[ $compiler == *++17 ]] && file=$tmp/alone.cc
        $compiler "${flags[@]}" "$file" || fail "$compiler refuses $1"
        tried=$((tried + 1))
    done
    [ $tried -gt 0 ] || skip "needs gcc or clang"
}

tests=()
for header in llmc/*.h; do
    name=$(basename "$header" .h)
    eval "test_$name() { compiles '$header'; }"
    tests+=("$name")
done

# the check itself: it must reject a header that relies on another's includes, and one that compiles only as C
test_refuses_a_bad_header() {
    mkdir -p "$tmp/llmc"
    cd "$tmp"
    echo 'static inline size_t f(void) { return 0; }' >llmc/leans.h
    echo 'static inline int* f(void* p) { return p; }' >llmc/c_only.h
    (compiles llmc/leans.h) && fail "a header without its includes passed"
    command -v g++ >/dev/null || skip "needs g++ to tell C from C++"
    (compiles llmc/c_only.h) && fail "a header that is not C++ passed"
    return 0
}
tests+=(refuses_a_bad_header)
run_tests_once "$@"
