#!/usr/bin/env bash
# Every header of llmc/ is self-contained: alone in a file it compiles without a warning, as C11 and as C++17. Each header
# is a test with one compiler for each language. The other compilers compile one translation unit with all headers, in a twentieth
# of the time. gcc and clang read the same system headers, so both find the same declarations.
. "$(dirname "$0")/../test.sh"

flags=(-O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -fsyntax-only)
alone=() together=() # "COMPILER -std=STANDARD"
choose() { # COMPILER -std=STANDARD ...: the first installed compiler gets each header alone, the others all together
    local each first=yes
    for each in "$@"; do
        command -v "${each%% *}" >/dev/null || continue
        if [ -n "$first" ]; then alone+=("$each"); else together+=("$each"); fi
        first=
    done
}
choose "gcc -std=gnu11" "clang -std=gnu11"
choose "clang++ -std=gnu++17" "g++ -std=gnu++17"

compile() { # "COMPILER -std=STANDARD" HEADER ...
    local compiler=$1 file=$tmp/alone.c
    shift
    [[ $compiler != *++17 ]] || file=$tmp/alone.cc
    printf '#include "%s"\n' "${@/#/$PWD/}" >"$file"
    $compiler "${flags[@]}" "$file" || fail "$compiler refuses $*"
}
# Includes the header twice, to test its include guard.
compiles() { # HEADER
    local compiler
    [ ${#alone[@]} -gt 0 ] || skip "needs gcc or clang"
    for compiler in "${alone[@]}"; do compile "$compiler" "$1" "$1"; done
}

tests=()
for header in llmc/*.h; do
    name=$(basename "$header" .h)
    eval "test_$name() { compiles '$header'; }"
    tests+=("$name")
done

test_all_together() {
    local compiler
    [ ${#together[@]} -gt 0 ] || skip "needs gcc and clang"
    for compiler in "${together[@]}"; do compile "$compiler" llmc/*.h; done
}
tests+=(all_together)

# the check itself must reject a header that relies on another's includes, and a header that compiles only as C
test_refuses_a_bad_header() {
    mkdir -p "$tmp/llmc"
    cd "$tmp"
    echo 'static inline size_t f(void) { return 0; }' >llmc/leans.h
    echo 'static inline int* f(void* p) { return p; }' >llmc/c_only.h
    (compiles llmc/leans.h) && fail "a header without its includes passed"
    [[ ${alone[*]} == *++* ]] || skip "needs a C++ compiler to tell C from C++"
    (compiles llmc/c_only.h) && fail "a header that is not C++ passed"
    return 0
}
tests+=(refuses_a_bad_header)
run_tests_once "$@"
