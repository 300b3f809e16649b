#!/usr/bin/env bash
# Every header of llmc/ is self-contained: alone in a file it compiles without a warning, as C11 and as C++17. Each header
# is a test with one compiler for each language. The other compilers compile one translation unit with all headers, in a twentieth
# of the time. gcc and clang read the same system headers, so both find the same declarations. CUDA headers are compiled by g++,
# as for the emulation of dev/cuda, which needs no nvcc. And no header names a type of the programs.
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

# Rewrites the headers of FOLDER/llmc and FOLDER/dev/cuda as C++, in FOLDER/tree: ptx.cuh becomes that of the emulation, as in
# dev/cuda/Makefile.
rewrite() { # FOLDER
    local header
    command -v g++ >/dev/null || skip "needs g++"
    [ -e dev/cuda/emulation/filter.cpp ] || skip "needs dev/cuda/emulation"
    [ -x "$tmp/filter" ] || g++ -O0 -std=c++17 -o "$tmp/filter" dev/cuda/emulation/filter.cpp
    [ ! -e "$1/tree" ] || return 0
    mkdir -p "$1/tree.new/llmc" "$1/tree.new/dev/cuda"
    for header in "$1"/llmc/*.h "$1"/llmc/*.cuh "$1"/dev/cuda/*.h "$1"/dev/cuda/*.cuh; do
        [ ! -e "$header" ] || "$tmp/filter" "$header" "$1/tree.new/${header#"$1/"}" "$header"
    done
    "$tmp/filter" dev/cuda/emulation/ptx.cuh "$1/tree.new/llmc/ptx.cuh" dev/cuda/emulation/ptx.cuh
    mv "$1/tree.new" "$1/tree"
}
# compiles_cuda FOLDER PRECISION HEADER ...: the rewritten headers as one file
compiles_cuda() {
    local folder=$1 precision=$2 ignored=(-Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-variable -Wno-sign-compare
        -Wno-missing-field-initializers -Wno-format-truncation -Wno-unused-but-set-variable) # as in dev/cuda/Makefile
    shift 2
    rewrite "$folder"
    printf '#include "%s"\n' "${@/#/$folder/tree/}" >"$tmp/alone.cc"
    g++ -std=gnu++17 -fsyntax-only "-DENABLE_$precision" -Wall -Wextra -Werror "${ignored[@]}" -Idev/cuda/emulation "$tmp/alone.cc" ||
        fail "g++ refuses $*"
}

tests=()
for header in llmc/*.h; do
    name=$(basename "$header" .h)
    eval "test_$name() { compiles '$header'; }"
    tests+=("$name")
done

cuda_headers=()
for header in llmc/*.cuh dev/cuda/*.cuh; do
    cuda_headers+=("$header")
    name=cuda_$(basename "$header" .cuh)
    [[ $header == llmc/* ]] || name=op_$(basename "$header" .cuh)
    # make test compiles those of dev/cuda together, see below
    eval "test_$name() { $([[ $header == llmc/* ]] || echo 'wants_more; ')compiles_cuda \"\$here\" BF16 $header $header; }"
    tests+=("$name")
done
here=$tmp/here # its folders are those of the repository
mkdir -p "$here/dev" && ln -s "$PWD/llmc" "$here/llmc" && ln -s "$PWD/dev/cuda" "$here/dev/cuda"

test_cuda_together() {
    compiles_cuda "$here" FP32 "${cuda_headers[@]}"
    compiles_cuda "$here" FP16 "${cuda_headers[@]}"
}

test_all_together() {
    local compiler
    [ ${#together[@]} -gt 0 ] || skip "needs gcc and clang"
    for compiler in "${together[@]}"; do compile "$compiler" llmc/*.h; done
}
tests+=(all_together cuda_together)

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
test_refuses_a_bad_cuda_header() {
    local bad=$tmp/bad
    mkdir -p "$bad/llmc"
    cp llmc/*.h llmc/*.cuh "$bad/llmc"
    printf '#pragma once\ninline floatX leans(floatX x) { return x; }\n' >"$bad/llmc/leans.cuh"
    echo 'inline int guardless() { return 1; }' >"$bad/llmc/guardless.cuh"
    sed -i '/#include "cuda_common.cuh"/d; /#include "ptx.cuh"/d' "$bad/llmc/weight_matrix.cuh"
    compiles_cuda "$bad" BF16 llmc/gelu.cuh llmc/leans.cuh llmc/guardless.cuh
    (compiles_cuda "$bad" BF16 llmc/leans.cuh llmc/leans.cuh) && fail "a header without its includes passed"
    (compiles_cuda "$bad" BF16 llmc/guardless.cuh llmc/guardless.cuh) && fail "a header without a guard passed"
    (compiles_cuda "$bad" BF16 llmc/weight_matrix.cuh llmc/weight_matrix.cuh) && fail "weight_matrix.cuh passed without its includes"
    return 0
}
tests+=(refuses_a_bad_header refuses_a_bad_cuda_header)
# names_the_program HEADER ...: prints each line of code that names a type of the programs: llmc/ holds what stands without them
names_the_program() {
    awk '
        FNR == 1 { comment = 0 }
        {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
            while (1) {
                if (comment) {
                    if (!match(line, /\*\//)) { line = ""; break }
                    line = substr(line, RSTART + 2)
                    comment = 0
                }
                if (!match(line, /\/\/|\/\*/)) { code = code line; break }
                code = code substr(line, 1, RSTART - 1)
                if (substr(line, RSTART, 2) == "//") { break }
                line = substr(line, RSTART + 2)
                comment = 1
            }
            if ((" " code " ") ~ /[^A-Za-z_0-9](GPT2|Activations|Trainer)[^A-Za-z_0-9]/) { print FILENAME ":" FNR ": " $0 }
            code = ""
        }' "$@"
}
test_no_header_names_the_program() {
    names_the_program llmc/*.h llmc/*.cuh >"$tmp/names"
    [ ! -s "$tmp/names" ] || { cat "$tmp/names" && fail "llmc/ reads what is train_gpt2.cu's: pass what is needed, or move the text there"; }
}
test_sees_a_name_of_the_program() {
    printf '%s\n' '/* GPT2, Trainer' '   Activations */ int a; // GPT2' 'const char* b = "GPT2 \"Trainer\"";' 'GPT2Config c;' \
        'int gpt2_GPT2, Trainers;' >"$tmp/good.h"
    names_the_program "$tmp/good.h" >"$tmp/names"
    [ ! -s "$tmp/names" ] || { cat "$tmp/names" && fail "none of these is a name of the program"; }
    printf '%s\n' 'void f(GPT2* m);' '/* a */ Trainer t; /*' '*/ Activations a;' 'int x = sizeof(Activations);' >"$tmp/bad.h"
    names_the_program "$tmp/bad.h" >"$tmp/names"
    want "the number of lines found" "$(wc -l <"$tmp/names")" 4
}
tests+=(no_header_names_the_program sees_a_name_of_the_program)
run_tests_once "$@"
