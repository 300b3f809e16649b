#!/usr/bin/env bash
# The course, dev/learn, and what it needs in dev/cuda: practice files, answers, the pages' commands, the lists of
# kernels, the ladders.
# LLMC_TEST_FULL=1 cuts every kernel that can be practised; otherwise the test cuts the kernels of three ops.
# shellcheck disable=SC2028,SC2094 # echo writes a script verbatim; the loop that reads a page only prints its name
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION SPILLS DEVICE_ONLY OP OPS RUNG FORCE SOLUTION SHOW ANSWERS_DIR ANSWER_TIMEOUT
unset PAGES_TREE PAGES_TIMEOUT
CXX=${CXX:-g++}
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
cut_rungs=("simple_kernel 1" "softmax_forward 4" "layernorm_forward 3" "matmul_forward 2" "crossentropy_forward 3" "permute 6")

needs_compiler() { command -v "$CXX" >/dev/null || skip "needs $CXX"; }

# The files that git knows or would know, once for all tests. There is no nvcc and no GPU for the scripts in it.
copy() {
    [ ! -d "$tmp/top" ] || return 0
    git ls-files -z --cached --others --exclude-standard >"$tmp/all" 2>/dev/null || skip "needs git"
    while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done <"$tmp/all" >"$tmp/files"
    mkdir -p "$tmp/top" "$tmp/bin"
    xargs -0 cp -p --parents -t "$tmp/top" <"$tmp/files"
    share_emulated "$tmp/top"
    printf '#!/bin/sh\nexit 9\n' >"$tmp/bin/nvidia-smi"
    chmod +x "$tmp/bin/nvidia-smi"
}
no_gpu() { PATH=$tmp/bin:$PATH; }

# run RC COMMAND ...: in dev/cuda of the copy; stdout and stderr to $tmp/out and $tmp/err
run() {
    local rc=0 wanted=$1
    shift
    (cd "$tmp/top/dev/cuda" && "$@") >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
    [ $rc -eq "$wanted" ] || { tail -n 20 "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted: $*"; }
}
one_line() { # RC TEXT COMMAND ...: fails with this exit code and one line that contains the text
    run "$1" "${@:3}"
    want "the lines of stderr of ${*:3}" "$(wc -l <"$tmp/err")" 1
    contains "$2" "$tmp/err"
}

# paste_back OP RUNG: puts the original's bodies where practice.sh has cut them out
paste_back() {
    run 0 ../learn/practice.sh "$1" "$2" solution
    awk '
        FNR == NR && /^\/\/ [a-z0-9_]+[.]cuh?:[0-9]+$/ { n++; inside = 0; next }
        FNR == NR && inside { line[n, ++lines[n]] = $0; next }
        FNR == NR { inside = /\{$/; next }
        /^    \/\/ Practice: write the body of / { at++; cut = 1; for (i = 1; i < lines[at]; i++) { print line[at, i] } }
        cut && /^}/ { cut = 0 }
        !cut { print }' "$tmp/out" "$tmp/top/dev/cuda/practice_$1.cu" >"$tmp/pasted"
    cp "$tmp/pasted" "$tmp/top/dev/cuda/practice_$1.cu"
}
# same_code OP: fails unless practice_OP.cu is the op's text again, from the first #include on and except for the marks of promote.sh
same_code() {
    "$tmp/top/dev/cuda/op_text.sh" "$1" | sed -n '/^#include/,$p' | grep -v '^// ==== \(end \)\?promoted: ' >"$tmp/original"
    sed -n '/^#include/,$p' "$tmp/top/dev/cuda/practice_$1.cu" | cmp - "$tmp/original" || fail "$1 $2: with its body, it is not the original"
}

# ---- learn, practice ----

# Each kernel has a line with its checks, its shape and its counts. A program whose text has no shape is an error.
test_learn() {
    needs_compiler
    copy
    run 0 make CXX="$CXX" learn LEARN_OPS=simple_kernel
    contains "30 checks passed; B 1 T 64 C 768: 196608 bytes asked, 196608 moved in sectors, efficiency 100%" "$tmp/out"
    want "the lines of kernels" "$(grep -cE '^    [0-9]+ checks passed; B [0-9 A-Z]+: [0-9]+ bytes asked, ' "$tmp/out")" 3
    ! grep 'every op' "$tmp/out" || fail "simple_kernel is not every op"
    local program=$tmp/top/dev/cuda/simple_kernel_cpu
    mv "$program" "$program.real"
    printf '#!/bin/sh\n"$0.real" "$@" | sed "/^simple_kernel, /d"\n' >"$program"
    chmod +x "$program"
    run 1 env LEARN_OPS=simple_kernel ../learn/learn.sh . _cpu
    want "stderr" "$(cat "$tmp/err")" "error: no shape or no counts in what ./simple_kernel_cpu 1 --transactions prints"
    rm "$program" "$program.real"
}

# The op's check rejects a missing body and accepts the original. Tests two ops, or all in `make test-full`.
test_practice() {
    needs_compiler
    copy
    no_gpu
    local pair op rung ops=()
    [ -n "${LLMC_TEST_FULL-}" ] || cut_rungs=("${cut_rungs[@]:0:2}")
    for pair in "${cut_rungs[@]}"; do
        read -r op rung <<<"$pair"
        rm -f "$tmp/top/dev/cuda/practice_$op.cu"
        run 0 ../learn/practice.sh "$op" "$rung"
        contains "make cpu OP=practice_$op && ./practice_${op}_cpu $rung" "$tmp/out"
        contains "Practice: write the body of ${op}_kernel$rung()." "$tmp/top/dev/cuda/practice_$op.cu"
        ops+=("practice_$op")
    done
    run 0 make -j"$jobs" CXX="$CXX" cpu OPS="${ops[*]}"
    for pair in "${cut_rungs[@]}"; do
        read -r op rung <<<"$pair"
        run 1 "./practice_${op}_cpu" "$rung" --check --case 0 -B 1 -T 4 -C 64 -NH 8 -V 64
        contains "FAIL kernel $rung " "$tmp/out"
        ! grep -q '^ok ' "$tmp/out" || fail "a kernel without a body passes: $pair"
        paste_back "$op" "$rung"
        same_code "$op" "$rung"
    done
    run 0 make -j"$jobs" CXX="$CXX" cpu OPS="${ops[*]}"
    echo "note: ${cut_rungs[*]}"
    for pair in "${cut_rungs[@]}"; do
        read -r op rung <<<"$pair"
        run 0 "./practice_${op}_cpu" "$rung" --check --case 0 -B 1 -T 4 -C 64 -NH 8 -V 64
        grep -qE '^[1-9][0-9]* passed, 0 failed, 0 skipped$' "$tmp/out" || fail "$pair: $(tail -n 1 "$tmp/out")"
    done
}

# rungs OP: those that can be practised
rungs() { (cd "$tmp/top/dev/cuda" && ../learn/practice.sh "$1") | sed -n '/^not to be/q; s/^ *\([0-9][0-9]*\)  .*/\1/p'; }

# Cuts each kernel from the same file and pastes its body back, which restores the original. Tests three ops, or all in `make test-full`.
test_every_rung() {
    copy
    local op rung at=0 num=0 ops=()
    mapfile -t ops < <(cd dev/cuda && for op in *.cu; do
        if [[ $op != practice_* ]] && ./op_text.sh "${op%.cu}" | grep -q '^// ---- kernel 1'; then echo "${op%.cu}"; fi
    done)
    for op in "${ops[@]}"; do
        at=$((at + 1))
        [ -n "${LLMC_TEST_FULL-}" ] || [ $((at % (${#ops[@]} / 3))) -eq 0 ] || continue
        rm -f "$tmp/top/dev/cuda/practice_$op.cu"
        for rung in $(rungs "$op"); do
            run 0 ../learn/practice.sh "$op" "$rung"
            paste_back "$op" "$rung"
            same_code "$op" "$rung"
            num=$((num + 1))
        done
    done
    [ $num -gt 0 ] || [ -z "${LLMC_TEST_FULL-}" ] || fail "nothing to practise"
    echo "note: $num kernels"
}

test_practice_refuses() {
    copy
    rm -f "$tmp"/top/dev/cuda/practice_*.cu
    one_line 2 "no OP" ../learn/practice.sh
    one_line 2 "OP='nothing' is no .cu file here: make practice" ../learn/practice.sh nothing 1
    one_line 2 "OP='simple_kernle' is no .cu file here, did you mean simple_kernel?" ../learn/practice.sh simple_kernle 1
    one_line 2 "not 'x'" ../learn/practice.sh simple_kernel x
    one_line 1 "has no banner" ../learn/practice.sh nccl_all_reduce
    run 2 ../learn/practice.sh simple_kernel 3
    contains "it launches simple_kernel_kernel2" "$tmp/err"
    contains "   5  one 16-byte load per thread" "$tmp/err"
    run 2 ../learn/practice.sh simple_kernel 99
    contains "there is none of that number" "$tmp/err"
    run 0 ../learn/practice.sh simple_kernel
    contains "   3  no function of its own: it launches simple_kernel_kernel2" "$tmp/out"
    [ ! -e "$tmp/top/dev/cuda/practice_simple_kernel.cu" ] || fail "a list has written a file"
    run 0 env PRECISION=FP32 ../learn/practice.sh simple_kernel 1
    contains "make cpu OP=practice_simple_kernel PRECISION=FP32 && ./practice_simple_kernel_cpu_fp32 1" "$tmp/out"
    # what the reader has written stays, also when another kernel is cut out
    local file=$tmp/top/dev/cuda/practice_simple_kernel.cu
    sed -i 's|^    // Practice: .*|    int mine = 1;|' "$file"
    one_line 1 "has kernel 1 already" ../learn/practice.sh simple_kernel 1
    run 0 ../learn/practice.sh simple_kernel 5
    contains "    int mine = 1;" "$file"
    contains "// practice: simple_kernel kernels 1 5, made by" "$file"
    sed -i 's|^    int mine = 1;|    int mine = 1; {|' "$file"
    one_line 1 "practice_simple_kernel.cu:" ../learn/practice.sh simple_kernel 6
    run 0 env FORCE=yes ../learn/practice.sh simple_kernel 6
    ! grep -q mine "$file" || fail "FORCE=yes does not begin anew"
    sed -i 1d "$file"
    one_line 1 "is there already" ../learn/practice.sh simple_kernel 5
    rm "$file"
}

# a brace in a comment, a string or a character does not count; what it does not understand it refuses
test_braces() {
    copy
    cat >"$tmp/braces.cu" <<'CU'
/* braces: a { that is not closed

   out (n) float out | inp (n) float in
   Bound: nothing.

   nvcc -O3 braces.cu -o braces */
// ---- kernel 1: a } too many ----
__global__ void braces_kernel1(float* out, int n);
__global__ void __launch_bounds__(ceil_div(128, 2), 1)
    braces_kernel1(float* out, /* { */ int n) { // }
    const char* text = "}}\"}"; // {
    char c = '}';
#if defined(A)
    if (n > 1'000'000) { out[0] = c; }
#endif
    /* } */ out[1] = text[0];
}
// ---- kernels 2 and 3: one line ----
template <int a> __global__ void braces_kernel2(float* out) { out[0] = a; out[1] = 1; }
void braces3(float* out) { braces_kernel2<3><<<1, 1>>>(out); }
// ---- kernel 4: only a call ----
__global__ void braces_kernel4(float* out) { braces_helper(out); }
CU
    cp "$tmp/braces.cu" "$tmp/top/dev/cuda/"
    run 0 ../learn/practice.sh braces
    want "what can be practised" "$(sed -n '/^not/q; s/^ *\([0-9]\)  .*/\1/p' "$tmp/out" | paste -s -d ' ')" "1 2"
    contains "   4  braces_kernel4() only calls braces_helper()" "$tmp/out"
    run 0 ../learn/practice.sh braces 1
    run 0 ../learn/practice.sh braces 2
    sed -n '/^__global__ void __launch/,$p' "$tmp/top/dev/cuda/practice_braces.cu" | grep -v '^    //' >"$tmp/rest"
    want "what is left" "$(cat "$tmp/rest")" '__global__ void __launch_bounds__(ceil_div(128, 2), 1)
    braces_kernel1(float* out, /* { */ int n) {
}
// ---- kernels 2 and 3: one line ----
template <int a> __global__ void braces_kernel2(float* out) {
}
void braces3(float* out) { braces_kernel2<3><<<1, 1>>>(out); }
// ---- kernel 4: only a call ----
__global__ void braces_kernel4(float* out) { braces_helper(out); }'
    run 0 ../learn/practice.sh braces 1 solution
    want "the original" "$(tail -n +2 "$tmp/out")" "$(sed -n '9,17p' "$tmp/braces.cu")"
    local change
    for change in 's/^#endif$//' 's/^}$//' "s/= '}'/= '}/" 's|^    /\* } \*/|    /* }|' 's/^}$/ }/'; do
        sed "$change" "$tmp/braces.cu" >"$tmp/top/dev/cuda/braces.cu"
        one_line 1 "mend it" ../learn/practice.sh braces 1
    done
    rm "$tmp"/top/dev/cuda/*braces.cu
}

# The op as one text: a header OP.cuh in it is practised like the rest, and lines are named where they stand.
test_text_of_an_op() {
    copy
    local cuda=$tmp/top/dev/cuda
    printf '%s\n' '/* halves: x / 2' '' '   nvcc -O3 halves.cu -o halves */' '#include "bench.h"' '// ---- kernel 1: one element ----' \
        '__global__ void halves_kernel1(float* out) {' '    out[0] = halved(1);' '    out[1] = 0;' '}' '#include "halves.cuh" // its helper' \
        '#include "other.cuh"' '// ---- kernel 3: two ----' '__global__ void halves_kernel3(float* out) {' '    out[0] = 1;' '    out[1] = 2;' '}' \
        >"$cuda/halves.cu"
    printf '%s\n' '/* halves: the promoted kernel' '' '   out (n) float out | inp (n) float in' '*/' '#pragma once' '' '#include "bench.h"' \
        '// ==== promoted: halves ====' '// ---- kernel 2: by a helper ----' '__device__ inline float halved(float x) { return x / 2; }' \
        '__global__ void halves_kernel2(float* out) {' '    out[0] = halved(3);' '    out[1] = 0;' '}' '// ==== end promoted: halves ====' \
        >"$cuda/halves.cuh"
    run 0 ./op_text.sh halves
    { sed -n 1,9p "$cuda/halves.cu" && sed -n '6,$p' "$cuda/halves.cuh" && sed -n '11,$p' "$cuda/halves.cu"; } >"$tmp/text"
    cmp "$tmp/text" "$tmp/out" || { diff "$tmp/text" "$tmp/out" || fail "the text is another one"; }
    local line
    for line in 9:halves.cu:9 10:halves.cuh:6 19:halves.cuh:15 20:halves.cu:11 25:halves.cu:16; do
        run 0 ./op_text.sh halves "${line%%:*}"
        want "the place of line ${line%%:*}" "$(cat "$tmp/out")" "${line#*:}"
    done
    one_line 1 "halves has no line 26" ./op_text.sh halves 26
    one_line 2 "not '0'" ./op_text.sh halves 0
    one_line 2 "OP='nothing' is no .cu file here" ./op_text.sh nothing
    run 0 make practice OP=halves
    want "what can be practised" "$(sed -n 's/^ *\([0-9]\)  .*/\1/p' "$tmp/out" | paste -s -d ' ')" "1 2 3"
    run 0 make practice OP=halves RUNG=2 SOLUTION=yes
    contains "// halves.cuh:11" "$tmp/out"
    run 0 make practice OP=halves RUNG=3 SOLUTION=yes
    contains "// halves.cu:13" "$tmp/out"
    run 0 make practice OP=halves RUNG=2
    contains "// out (n) float out | inp (n) float in" "$cuda/practice_halves.cu"
    contains "The original calls halved (defined in this file)." "$cuda/practice_halves.cu"
    paste_back halves 2
    same_code halves
    ! grep -q 'halves\.cuh' "$cuda/practice_halves.cu" || fail "the copy includes the original"
    sed -i 's/    out\[0\] = halved(3);/}&/' "$cuda/halves.cuh"
    one_line 1 "halves.cuh:14: a } without its {" ../learn/practice.sh halves 1
    sed -i '/^#pragma/d' "$cuda/halves.cuh"
    one_line 1 "halves.cuh has no #pragma once" ./op_text.sh halves
    rm "$cuda"/halves.cu* "$cuda/practice_halves.cu"
}

# stands_once OP: true unless a header that the op in dev/cuda of the copy includes itself includes OP.cuh, which a practice file
# has as text: then that text would come twice
stands_once() {
    local cuda=$tmp/top/dev/cuda headers header i
    includes() { sed -n 's/^#include "\([a-z0-9_]*\.cuh\)".*/\1/p'; }
    mapfile -t headers < <("$cuda/op_text.sh" "$1" | includes)
    for ((i = 0; i < ${#headers[@]}; i++)); do
        [ "${headers[i]}" != "$1.cuh" ] || return 1
        while read -r header; do
            [[ " ${headers[*]} " == *" $header "* ]] || headers+=("$header")
        done < <(includes <"$cuda/${headers[i]}")
    done
}
test_headers_stand_once() {
    copy
    local header op
    for header in dev/cuda/*.cuh; do
        op=$(basename "$header" .cuh)
        [ ! -e "dev/cuda/$op.cu" ] || stands_once "$op" || fail "a header that $op.cu includes includes $op.cuh"
    done
    printf '#include "%s.cuh"\n' thirds other >"$tmp/top/dev/cuda/thirds.cu"
    printf '#pragma once\n#include "other.cuh"\n' >"$tmp/top/dev/cuda/thirds.cuh"
    echo '#include "another.cuh"' >"$tmp/top/dev/cuda/other.cuh"
    echo 'int another;' >"$tmp/top/dev/cuda/another.cuh"
    stands_once thirds || fail "an op is refused whose headers do not include its own"
    echo '#include "thirds.cuh"' >>"$tmp/top/dev/cuda/another.cuh"
    ! stands_once thirds || fail "not seen: the header of an op comes again by way of two others"
    rm "$tmp"/top/dev/cuda/{thirds,other,another}.cu*
}

# a practice file, even one that does not compile, is no op of make, and make clean does not remove it
test_practice_is_no_op() {
    copy
    echo 'this is "no C++' >"$tmp/top/dev/cuda/practice_simple_kernel.cu"
    # shellcheck disable=SC2016
    run 0 make --eval 'ops: ; @echo $(OPS) $(BINARIES) $(CPU_OPS) $(CPU_SOURCES)' ops
    contains "simple_kernel" "$tmp/out"
    ! grep -q practice "$tmp/out" || fail "make all, test, bench or check-cpu build it"
    run 0 make -n all NVCC=true
    ! grep -q practice "$tmp/out" || fail "make all builds it"
    want "git's status" "$(cd "$tmp/top" && git -C "$OLDPWD" check-ignore dev/cuda/practice_simple_kernel.cu dev/learn/practice.sh)" \
        dev/cuda/practice_simple_kernel.cu
    run 0 make clean
    [ -e "$tmp/top/dev/cuda/practice_simple_kernel.cu" ] || fail "make clean removes it"
    share_emulated "$tmp/top" # which make clean has removed
    rm "$tmp/top/dev/cuda/practice_simple_kernel.cu"
}

# both programs are run, and of each the fastest configuration is compared; the programs here only write figures
test_practice_time() {
    copy
    mkdir -p "$tmp/programs"
    run 0 env FORCE=yes ../learn/practice.sh softmax_forward 4
    local name
    for name in softmax_forward practice_softmax_forward; do
        {
            echo "#!/usr/bin/env bash"
            echo '[ "$1 $2" = "4 --csv" ] || exit 3'
            echo 'echo op,kernel,config,config_name,median_ms,p10_ms,p90_ms,what >"$3"'
            if [ $name = softmax_forward ]; then
                echo 'printf "%s\n" "op,4,128,block size,0.7,0.6,0.8,\"a, b\"" "op,4,256,block size,0.5000,0.4900,0.5100,\"a, b\"" >>"$3"'
            else
                echo 'echo "op,4,0,block size,0.6000,0.5900,0.6100,a" >>"$3"'
            fi
        } >"$tmp/programs/$name"
        chmod +x "$tmp/programs/$name"
    done
    run 0 env BIN_DIR="$tmp/programs" ../learn/practice.sh softmax_forward 4 time
    want "the times" "$(cat "$tmp/out")" "softmax_forward 4                    0.5000 ms (0.4900 to 0.5100), block size 256
practice_softmax_forward 4           0.6000 ms (0.5900 to 0.6100), default: 1.20 x the time of the original"
    printf '#!/bin/sh\necho "FAIL kernel 4"; exit 1\n' >"$tmp/programs/practice_softmax_forward"
    run 1 env BIN_DIR="$tmp/programs" ../learn/practice.sh softmax_forward 4 time
    contains "FAIL kernel 4" "$tmp/err"
    contains "practice_softmax_forward 4 fails" "$tmp/err"
    rm "$tmp/top/dev/cuda/practice_softmax_forward.cu"
}

# ---- answers ----

# every exercise of the course that asks for a kernel can be practised, without a GPU
test_exercises_can_be_practised() {
    copy
    local page kind op rung num=0
    rm -f "$tmp"/top/dev/cuda/practice_*.cu
    [ -e "$tmp/top/dev/learn/answers" ] || skip "no dev/learn/answers here"
    run 0 ../learn/answer.sh
    for page in "$tmp"/top/dev/learn/answers/*.txt; do
        while read -r _ kind op rung _; do
            [ "$kind" = practice ] || continue
            rm -f "$tmp/top/dev/cuda/practice_$op.cu"
            run 0 ../learn/practice.sh "$op" "$rung"
            grep -q '^    make cpu OP=' "$tmp/out" || fail "$(basename "$page"): kernel $rung of $op needs a GPU"
            num=$((num + 1))
        done <"$page"
    done
    echo "note: $num exercises"
}

test_answers() {
    copy
    mkdir -p "$tmp/answers"
    printf '1 number 190 5 half of 380\n2 practice simple_kernel 1 one thread per element\n3 number -2.5e-3 0 a small one\n' >"$tmp/answers/02_memory.txt"
    printf '1 number 0 1 none\n2 number 4096 0 2 to the 12\n3 number 1 1 one\n' >"$tmp/answers/occupancy.txt"
    export ANSWERS_DIR=$tmp/answers
    right() { run 0 ../learn/answer.sh "$@" && contains "right: " "$tmp/out"; }
    wrong() { run 1 ../learn/answer.sh "$1" "$2" && want "what it says" "$(cat "$tmp/out")" "$2 is $3"; }
    right 02.1 190
    right 2.1 180.5
    right 02_memory.1 1.995e2
    wrong 02.1 180.4 "too small"
    wrong 02.1 199.6 "too large"
    right 02.3 -0.0025
    wrong 02.3 -0.003 "too small"
    wrong 02.3 0.0025 "too large"
    right occupancy.1 0
    wrong occupancy.1 0.1 "too large"
    right occupancy.2 4,096
    wrong occupancy.2 4097 "too large"
    run 0 env SHOW=yes ../learn/answer.sh 02.1
    want "the answer" "$(cat "$tmp/out")" "190: half of 380"
    local bad
    for bad in x 1x 190us 4,09 nan '' '1 2'; do one_line 2 "number" ../learn/answer.sh 02.1 "$bad"; done
    one_line 2 "has exercises 1 to 3, not 4" ../learn/answer.sh 02.4 1
    one_line 2 "no exercises of page '07'" ../learn/answer.sh 7.1 1
    one_line 2 "no exercises of page 'nothing'" ../learn/answer.sh nothing.1 1
    for bad in 02 02. .1 02.x ../02.1; do one_line 2 "EXERCISE is a page" ../learn/answer.sh "$bad" 1; done
    one_line 2 "this exercise is a kernel" ../learn/answer.sh 02.2 1
    run 0 ../learn/answer.sh
    contains "    02.2             write kernel 1 of simple_kernel" "$tmp/out"
    contains "    occupancy.3      a number" "$tmp/out"
    for bad in '1 number x 5 a' '1 number 5 x a' '2 number 5 5 a' '1 guess 5 5 a' '1 number 5 5' '1 practice simple_kernel x a' ''; do
        printf '%s' "${bad:+$bad$'\n'}" >"$tmp/answers/08_bad.txt"
        one_line 1 "08_bad.txt" ../learn/answer.sh 08.1 1
    done
    rm "$tmp/answers/08_bad.txt"
}

test_answers_that_are_kernels() {
    needs_compiler
    copy
    no_gpu
    mkdir -p "$tmp/answers"
    printf '1 practice simple_kernel 1 the index is blockIdx.x * blockDim.x + threadIdx.x\n2 practice simple_kernel 2 a stride\n' >"$tmp/answers/01_kernels.txt"
    export ANSWERS_DIR=$tmp/answers CXX
    local file=$tmp/top/dev/cuda/practice_simple_kernel.cu
    rm -f "$file"
    one_line 1 "no practice_simple_kernel.cu: make practice OP=simple_kernel RUNG=1" ../learn/answer.sh 01.1
    run 0 ../learn/practice.sh simple_kernel 1
    one_line 1 "is not about kernel 2" ../learn/answer.sh 01.2
    run 1 ../learn/answer.sh 01.1
    contains "FAIL kernel 1 " "$tmp/out"
    contains "hint: the index is " "$tmp/out"
    sed -i 's|^    // Practice: .*|    this does not compile|' "$file"
    run 1 ../learn/answer.sh 01.1
    contains "practice_simple_kernel.cu does not compile" "$tmp/out"
    contains "error: " "$tmp/out"
    run 0 env FORCE=yes ../learn/practice.sh simple_kernel 1
    paste_back simple_kernel 1
    run 0 ../learn/answer.sh 01.1
    grep -qE '^right: kernel 1 of simple_kernel, [1-9][0-9]* passed, 0 failed$' "$tmp/out" || { cat "$tmp/out" && fail "the original is not right"; }
    rm "$file"
}

# ---- pages ----

test_structure() {
    dev/learn/pages.sh --structure >"$tmp/out" || { grep '^FAIL' "$tmp/out"; fail "$(tail -n 1 "$tmp/out")"; }
}

# The commands of the pages that need no H200. The copy is kept below build/, where only what has changed is built again.
test_pages() {
    wants_more
    needs_compiler
    git ls-files >/dev/null 2>&1 || skip "needs git"
    local pages=()
    [ -n "${LLMC_TEST_FULL-}" ] || pages=(01 02 03) # the pages that a reader types first
    PAGES_TREE=build/learn_pages PAGES_TIMEOUT=300 dev/learn/pages.sh --commands ${pages[@]+"${pages[@]}"} >"$tmp/out" ||
        { grep -v '^ok ' "$tmp/out"; fail "$(tail -n 1 "$tmp/out")"; }
    sed -n '/on an H200/s/^/note: /p; $s/^/note: /p' "$tmp/out"
}

# A repository of one page. Its commands need no op.
page() { # WORDS: writes the page from stdin
    rm -rf "$tmp/repository"
    mkdir -p "$tmp/repository/dev/cuda" "$tmp/repository/dev/learn/figures" "$tmp/repository/dev/learn/answers"
    cp dev/learn/pages.sh "$tmp/repository/dev/learn/"
    echo 'text' >"$tmp/repository/dev/cuda/file"
    git -C "$tmp/repository" init -q
    cat >"$tmp/repository/dev/learn/01_page.md"
}
pages() { # RC FLAG ...
    local rc=0 wanted=$1
    (cd "$tmp/repository" && dev/learn/pages.sh "${@:2}") >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted: pages.sh ${*:2}"; }
}
head_of_page() { printf '# 1. A page\n\nTime: 5 minutes. Needs: nothing.\n\n## Further reading\n\n'; }

test_false_output_is_seen() {
    git --version >/dev/null 2>&1 || skip "needs git"
    {
        head_of_page
        # shellcheck disable=SC2016
        printf '%s\n' '<!-- run: cpu -->' '```sh' 'echo one; echo two >&2' 'seq 5' '```' '' '```' one two 1 ... 5 '```' '' \
            '<!-- run: cpu, in: . -->' '```sh' 'ls dev; echo changed >dev/cuda/file' 'x=3' 'false || echo $x' '```' '' '```' cuda learn 3 '```' '' \
            '<!-- run: h200 -->' '```sh' 'exit 5' '```' '' \
            '<!-- run: cpu, status: 3 -->' '```sh' 'cat file' 'exit 3' '```' '' '```' changed '```' '' \
            '<!-- run: cpu -->' '```sh' 'diff file /dev/null' 'echo line 7' '```' '' '```' 1d0 '< changed' 'line 7' '```' '' \
            '<!-- run: cpu -->' '```sh' 'echo wrong; exit 1' '```' '' '```' wrong '```' '' \
            '<!-- run: cpu -->' '```sh' 'true' '```' '' 'Text.' '' '```' 'not its output' '```'
    } | page
    pages 0
    contains "1 blocks were measured on an H200" "$tmp/out"
    contains "7 passed, 0 failed, 0 skipped" "$tmp/out"
    want "the checkout" "$(cat "$tmp/repository/dev/cuda/file")" text
    cp "$tmp/repository/dev/learn/01_page.md" "$tmp/page.md"
    pages 0 --update
    cmp "$tmp/page.md" "$tmp/repository/dev/learn/01_page.md" || fail "--update changes what is right"
    local change
    for change in 's/^two$/too/' 's/^5$/6/' 's/^cuda$/&\n&/' '/^3$/d' 's/^exit 3/exit 4/' 's/^true$/false/' 's/^true$/false; true/' 's/^changed$//' \
        's/^x=3$/exit 7/' 's/in: \./in: nowhere/' 's/run: h200/run: h100/' 's/status: 3 -->/status: 3 --> x/' 's/^one$/one /'; do
        sed "$change" "$tmp/page.md" >"$tmp/repository/dev/learn/01_page.md"
        cmp -s "$tmp/page.md" "$tmp/repository/dev/learn/01_page.md" && fail "$change changes nothing"
        pages 1
        contains "FAIL dev/learn/01_page.md:" "$tmp/out"
    done
    # --update writes it again, an empty block too, but not what a failing command has printed
    sed -e 's/^two$/too/' -e '/^cuda$/d; /^learn$/d; /^3$/d' "$tmp/page.md" >"$tmp/repository/dev/learn/01_page.md"
    pages 0 --update
    sed 's/^\.\.\.$/2\n3\n4/' "$tmp/page.md" | cmp - "$tmp/repository/dev/learn/01_page.md" || fail "--update writes something else"
    sed 's/^wrong$/right/' "$tmp/page.md" >"$tmp/repository/dev/learn/01_page.md"
    pages 1 --update
    contains "end the mark with ', status: 1 -->'" "$tmp/out"
    # where only numbers differ, it keeps the ...
    sed 's/^5$/66/; s/^line 7$/line  12/' "$tmp/page.md" >"$tmp/repository/dev/learn/01_page.md"
    pages 0 --update
    cmp "$tmp/page.md" "$tmp/repository/dev/learn/01_page.md" || fail "--update does not keep the ..."
    # a make that fails is a failure, whatever comes after it
    { head_of_page; printf '%s\n' '<!-- run: cpu -->' '```sh' 'make nothing' 'echo done' '```' '' '```' something '```'; } | page
    pages 1 --update
    contains "make failed" "$tmp/out"
    # a command that does not end
    { head_of_page; printf '%s\n' '<!-- run: cpu -->' '```sh' 'sleep 60' '```'; } | page
    PAGES_TIMEOUT=1 pages 1
    contains "not done after 1 s" "$tmp/out"
    pages 2 --what
    pages 2 07
}

test_false_structure_is_seen() {
    git --version >/dev/null 2>&1 || skip "needs git"
    {
        printf '%s\n' '# 1. A page: `code`, and (more)' '' 'Time: 5 minutes. Needs: nothing.' '' '![what is seen](figures/grid.svg)' \
            'A [link](02_other.md#a-section-of-gpt-2), a [section](#exercises), [this](#1-a-page-code-and-more), [that](https://example.com/x).' \
            '```' "$(printf '%0150d' 0)" '[no link](nothing.md)' '```' '' '## Exercises' '' '1. One: `make answer EXERCISE=01.1 ANSWER=...`' \
            '2. Two.' '3. Three.' '' '## Further reading'
    } | page
    printf '# 2. Other\n\nTime: 1 minute.\n\n## A *section* of GPT-2\n\n## Further reading\n' >"$tmp/repository/dev/learn/02_other.md"
    printf '1 number 1 1 a\n2 number 1 1 a\n3 number 1 1 a\n' >"$tmp/repository/dev/learn/answers/01_page.txt"
    touch "$tmp/repository/dev/learn/figures/grid.svg"
    pages 0 --structure
    cp "$tmp/repository/dev/learn/01_page.md" "$tmp/page.md"
    local change
    for change in 's/^Time: /About: /' 's/^## Further/## More/' 's/^3\. Three/Three/' 's/^2\. Two/4. Two/' 's/02_other.md#a/02_other.md#b/' \
        's/(02_other/(03_other/' 's/(#exercises)/(#exercise)/' 's|figures/grid|figures/other|' '/grid.svg/d' '/^!/s/$/ the text of a line that is too long by far, longer than a line of this project may be, as it does not fit on a screen, let alone two/' \
        's/^1\. One.*/&\n\n```/'; do
        sed "$change" "$tmp/page.md" >"$tmp/repository/dev/learn/01_page.md"
        cmp -s "$tmp/page.md" "$tmp/repository/dev/learn/01_page.md" && fail "$change changes nothing"
        pages 1 --structure
        contains "FAIL dev/learn/" "$tmp/out"
    done
    cp "$tmp/page.md" "$tmp/repository/dev/learn/01_page.md"
    sed -i 3d "$tmp/repository/dev/learn/answers/01_page.txt"
    pages 1 --structure
    contains "answers '1 2', want 1 2 3" "$tmp/out"
    echo '3 number 1 1 a' >>"$tmp/repository/dev/learn/answers/01_page.txt"
    printf '# The pages\n\n| [One](01_page.md) | 5 min |\n' >"$tmp/repository/dev/learn/README.md"
    pages 0 --structure
    sed -i 's/5 min/15 min/' "$tmp/repository/dev/learn/README.md"
    pages 1 --structure
    contains "01_page.md takes 15 min" "$tmp/out"
}

# ---- the lists of kernels on top of the ops ----

test_lists_of_kernels() {
    copy
    run 0 ./versions.sh --check-text
    local all emulated
    all=$(sed -n '/this list is written by versions.sh/,/nvcc/p' dev/cuda/*.cu | grep -cE '^ +[0-9]+  ')
    emulated=$((all - $(sed -nE "s/.* skips ([0-9]+) of $all kernels .*/\1/p" dev/cuda/README.md | grep . || echo 0)))
    [ $emulated -lt "$all" ] || fail "dev/cuda/README.md does not say how many of the $all kernels are not emulated"
    contains "$emulated of the $all kernels" README.md
    contains "$emulated of $all kernels" dev/learn/README.md
    contains "$emulated of $all kernels" dev/learn/environment.md
    local change
    for change in 's/^     1  one thread per element$/     1  one thread/' '/^     2  grid-stride/d' 's/^     6  four/     7  four/' 's/ (best)$//' \
        's/b\.kernel(6, /b.kernel(8, /'; do
        sed "$change" dev/cuda/simple_kernel.cu >"$tmp/top/dev/cuda/simple_kernel.cu"
        cmp -s dev/cuda/simple_kernel.cu "$tmp/top/dev/cuda/simple_kernel.cu" && fail "$change changes nothing"
        run 1 ./versions.sh --check-text simple_kernel
        contains "simple_kernel.cu: " "$tmp/out"
    done
    cp dev/cuda/simple_kernel.cu "$tmp/top/dev/cuda/"
}

# the lists in the sources are what the programs print
test_lists_are_those_of_the_programs() {
    wants_more
    needs_compiler
    copy
    grep -q '^     2  .* (slower than 1)$' dev/cuda/simple_kernel.cu || fail "kernel 2 is not marked as slower"
    sed -i -e 's/^     4  64 contiguous/     4  65 contiguous/' -e 's/ (slower than 1)$//' "$tmp/top/dev/cuda/simple_kernel.cu"
    run 1 env CXX="$CXX" ./versions.sh --check simple_kernel
    contains "simple_kernel.cu: its list is stale" "$tmp/out"
    run 0 env CXX="$CXX" ./versions.sh simple_kernel
    cmp dev/cuda/simple_kernel.cu "$tmp/top/dev/cuda/simple_kernel.cu" || fail "the list is not written as it was"
    # a list is known until the op changes, so that nothing is built for it
    sed -i 's/^   Kernels (this/   A comment.\n\n&/' "$tmp/top/dev/cuda/simple_kernel.cu"
    run 0 env CXX=/nonexistent ./versions.sh --check simple_kernel
    sed -i 's/"128-bit vectors"/"vectors of 128 bits"/' "$tmp/top/dev/cuda/simple_kernel.cu"
    one_line 1 "no /nonexistent" env CXX=/nonexistent ./versions.sh --check simple_kernel
    cp dev/cuda/simple_kernel.cu "$tmp/top/dev/cuda/"
    run 0 env CXX="$CXX" ./versions.sh --check
}

# ---- the ladders of the pages ----

# An op in a tree of its own: a library, a loser, a kernel that names another one, an instantiation of a later kernel, shared code
ladder_tree() {
    mkdir -p "$tmp/ladder/dev/cuda/results/h200/ladders" "$tmp/ladder/dev/learn"
    cp dev/learn/ladder.sh "$tmp/ladder/dev/learn/"
    cp dev/cuda/versions.sh dev/cuda/op_text.sh "$tmp/ladder/dev/cuda/"
    cat >"$tmp/ladder/dev/cuda/op.cu" <<'SOURCE'
/* op: what it does

   Kernels (this list is written by versions.sh):
     0  cuBLAS
     1  naive
     2  tiles (loses to 1)
     3  vectors: a text that needs
          two lines
     4  2 with vectors
     5  more per thread
     6  steps of 8 (promoted) (slower than 1)
     7  for another kind (kind 2)
     8  the last (promoted)
     kind 2: another

   nvcc op.cu */
// ---- shared by the kernels ----
int shared_by_all;
// ---- kernel 0: library ----
void op0();
// ---- kernel 1: naive ----
__global__ void op_kernel1() {
    a(); // a comment
    // another one

    b();
}
// ---- kernel 2: tiles ----
#if !defined(ENABLE_FP32)
__global__ void op_kernel2() {
    a(); // as before
    tile2();
}
#endif
// ---- kernel 3: vectors ----
__global__ void op_kernel3() {
    if (x) {
        a();
        b();
    }
}
// ---- kernel 4: tiles, vectors ----
__global__ void op_kernel4() {
    a();
    tile4();
    x16();
}
// ---- shared by kernels 5 to 8: tiles ----
int one, // two lines
    two;
// ---- kernel 5: more per thread
// It is kernel 6 with 1.
void op5() {
    op_launch<4, 1>(out);
}
// ---- kernel 6: steps ----
template <int n, int m> __global__ void op_kernel6() {
    x16();
}
template <int n, int m>
void op_launch(float* out) { c(); }
// ---- kernel 8: last ----
template <int n, int m> __global__ void op_kernel8() {
    x16();
    d();
}
static void declare(Bench& b) {
    b.kernel();
}
SOURCE
    cat >"$tmp/ladder/dev/cuda/results/h200/op.csv" <<'CSV'
op,kernel,config,dtype,B,T,C,NH,V,kind,case,median_ms,p10_ms,p90_ms,tflop_s,matrix_type,gpu,what
op,0,0,bf16,8,64,32,1,0,0,0,0.00100,0.001,0.001,99.00,bf16,NVIDIA H200,"cuBLAS"
op,1,0,bf16,8,64,32,1,0,0,0,20.00000,19.9,20.1,0.44,bf16,NVIDIA H200,"naive, slow"
op,2,64,bf16,8,64,32,1,0,0,0,22.00000,21.9,22.1,0.41,bf16,NVIDIA H200,"tiles"
op,2,128,bf16,8,64,32,1,0,0,0,21.00000,20.9,21.1,0.42,bf16,NVIDIA H200,"tiles"
op,2,128,bf16,4,64,32,1,0,2,0,1.00000,0.9,1.1,0.42,bf16,NVIDIA H200,"tiles"
op,4,0,bf16,8,64,32,1,0,0,0,0.50000,0.499,0.501,40.00,bf16,NVIDIA H200,"vectors"
op,5,0,bf16,8,64,32,1,0,0,0,0.50900,0.508,0.511,39.00,bf16,NVIDIA H200,"more"
op,8,0,bf16,8,64,32,1,0,0,0,0.10000,0.099,0.102,200.00,bf16,NVIDIA H200,"last"
CSV
    printf '%s\n' above '<!-- ladder: op -->' '| kernel | new idea |' '|---|---|' '| 1 | the *first* (best) (loses to 7) | x' '| 9 | gone |' \
        '<!-- end ladder: op -->' below >"$tmp/ladder/dev/learn/01_page.md"
}
ladder() { # RC ARGUMENT ...
    local rc=0 wanted=$1
    (cd "$tmp/ladder" && dev/learn/ladder.sh "${@:2}") >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted: ladder.sh ${*:2}"; }
}
# judged TEXT FILE SED: with this change of the file, the table written anew, --check prints one line, and it has the text
judged() {
    sed -i "$3" "$2"
    ladder 0
    ladder 1 --check op
    want "the lines of --check after $3" "$(wc -l <"$tmp/out")" 1
    contains "$1" "$tmp/out"
}

# marked TEXT FILE SED: with this change of the file, the table written anew has the text, and --check finds nothing
marked() {
    sed -i "$3" "$2"
    ladder 0
    contains "$1" "$tmp/ladder/dev/learn/01_page.md"
    ladder 0 --check op
}

test_ladders() {
    rm -rf "$tmp/ladder"
    ladder_tree
    local page=$tmp/ladder/dev/learn/01_page.md cuda=$tmp/ladder/dev/cuda csv change
    csv=$cuda/results/h200/op.csv
    ladder 1 --check
    contains "01_page.md: its ladder of op is stale" "$tmp/out"
    ladder 0
    contains "wrote the ladder of op into dev/learn/01_page.md" "$tmp/out"
    grep '^|' "$page" >"$tmp/rows"
    diff - "$tmp/rows" <<'TABLE' || fail "the table is another one"
| kernel | new idea | lines changed | ms | TFLOP/s |
|---|---|---|---|---|
| 0 | cuBLAS | | 0.0010 | 99.0 |
| 1 | the *first* | 4 | 20.00 | 0.44 |
| 2 | tiles (loses to 1) | 1 | 21.00 | 0.42 |
| 3 | vectors: a text that needs two lines | 2 (from 1) | not measured yet | |
| 4 | 2 with vectors | 1 (from 2) | 0.5000 | 40.0 |
| 5 | more per thread | 2 + 7 shared | 0.5090 | 39.0 |
| 6 | steps of 8 (promoted) | 0, other template arguments | not measured yet | |
| 8 | the last (promoted) | 1 | 0.1000 | 200.0 |
TABLE
    contains "Measured on an NVIDIA H200 at B 8, T 64, C 32, in bf16" "$page"
    want "what is around the table" "$(sed -n '1p;$p' "$page" | tr '\n' ' ')" "above below "
    ladder 0 --check
    cp "$page" "$tmp/page.md"
    ladder 0
    cmp "$tmp/page.md" "$page" || fail "written twice, the page is another one"
    # a table that is stale, whichever part of it
    for change in 's/0\.5000/0.5001/' '/^| 3 /d' 's/ | 4 | / | 5 | /' 's/ (loses to 1)//' 's/^and does not/and does/' 's/99\.0/98.0/'; do
        sed "$change" "$tmp/page.md" >"$page"
        cmp -s "$tmp/page.md" "$page" && fail "$change changes nothing"
        ladder 1 --check
        contains "01_page.md: its ladder of op is stale" "$tmp/out"
        cmp -s "$tmp/page.md" "$page" && fail "--check writes"
    done
    cp "$tmp/page.md" "$page"
    # and one whose source has changed
    sed -i 's/^    d();/&\n    e();/' "$cuda/op.cu"
    ladder 1 --check
    ladder 0
    contains "| 8 | the last (promoted) | 2 | 0.1000 | 200.0 |" "$page"
    # other shapes; a file of another op is not one of them
    sed '/^op,[058],/d; s/,8,64,32,/,2,64,32,/; s/,40\.00/,50.55/' "$csv" >"$cuda/results/h200/ladders/op_small.csv"
    cp "$csv" "$cuda/results/h200/ladders/other_op.csv"
    ladder 1 --check
    ladder 0
    contains "| kernel | new idea | lines changed | ms | TFLOP/s | TFLOP/s at B 2, T 64 |" "$page"
    contains "| 4 | 2 with vectors | 1 (from 2) | 0.5000 | 40.0 | 50.5 |" "$page"
    contains "| 8 | the last (promoted) | 2 | 0.1000 | 200.0 | not measured yet |" "$page"
    ladder 0 --check op.cu
    # a rung that is slower than an earlier one says so, if it has not said that it loses; neither is compared with the library
    marked "| 5 | more per thread (slower than 4) | 2 + 7 shared | 0.5300 |" "$csv" 's/0\.50900,0\.508/0.53000,0.529/'
    contains '"Slower than N": kernel N comes before it' "$page"
    marked "| 8 | the last (promoted) (slower than 4) | 2 | 0.6000 |" "$csv" 's/0\.10000,0\.099/0.60000,0.599/'
    marked "| 8 | the last (promoted) | 2 | 0.6000 |" "$csv" '/^op,8,/s/,bf16,NVIDIA/,e4m3,NVIDIA/'
    marked "| 2 | tiles (slower than 1) | 1 | 21.00 |" "$cuda/op.cu" 's/ (loses to 1)//'
    marked "| 2 | tiles (loses to 1) | 1 | 21.00 |" "$cuda/op.cu" 's/  tiles$/  tiles (loses to 1)/'
    # false: slower within the spread, and a loser that wins
    judged "kernel 5 takes 0.53000 ms, kernel 4 before it 0.50000, and the spread is too large" "$csv" 's/0\.53000,0\.529/0.53000,0.500/'
    judged "kernel 2 takes 18.00000 ms and is said to lose to 1, which takes 20.00000" "$csv" 's/0\.53000,0\.500/0.50400,0.503/; s/,21\.00000/,18.00000/'
    sed -i 's/,18\.00000/,21.00000/' "$csv"
    # the library is not judged, and no rung is slower than the library
    sed -i 's/  vectors:/  cuBLASLt:/' "$cuda/op.cu"
    sed -i '2a op,3,0,bf16,8,64,32,1,0,0,0,90.00000,89,91,0.10,bf16,NVIDIA H200,"cuBLASLt"' "$csv"
    marked "| 3 | vectors: a text that needs two lines | | 90.00 | 0.10 | not measured yet |" "$csv" ""
    marked "| 4 | 2 with vectors | 1 (from 2) | 0.5000 | 40.0 | 50.5 |" "$csv" 's/90\.00000,89,91/0.01000,0.01,0.01/'
}

# the results of another GPU, whose directory the page names: its times, its marks and its other shapes alone
test_ladders_of_a_gpu() {
    rm -rf "$tmp/ladder"
    ladder_tree
    local page=$tmp/ladder/dev/learn/01_page.md results=$tmp/ladder/dev/cuda/results csv
    csv=$results/h100_80gb_hbm3/op.csv
    mkdir -p "$results/h100_80gb_hbm3/ladders"
    sed 's/H200/H100 80GB HBM3/; s/0\.50900,0\.508/0.60000,0.599/' "$results/h200/op.csv" >"$csv"
    cp "$results/h200/op.csv" "$results/h200/ladders/op_wrong.csv"
    sed 's/,8,64,32,/,2,64,32,/' "$csv" >"$results/h100_80gb_hbm3/ladders/op_small.csv"
    ladder 0
    contains "Measured on an NVIDIA H200 at B 8" "$page"
    sed -i 's/^<!-- ladder: op -->$/<!-- ladder: op h100_80gb_hbm3 -->/' "$page"
    ladder 1 --check op
    ladder 0 op
    contains "Measured on an NVIDIA H100 80GB HBM3 at B 8" "$page"
    contains "[results/h100_80gb_hbm3/op.csv](../cuda/results/h100_80gb_hbm3/op.csv); for the other shapes, [ladders](../cuda/results/h100_80gb_hbm3/ladders)." "$page"
    contains "| kernel | new idea | lines changed | ms | TFLOP/s | TFLOP/s at B 2, T 64 |" "$page"
    contains "| 5 | more per thread (slower than 4) | 2 + 7 shared | 0.6000 | 39.0 | 39.0 |" "$page"
    ! grep -q h200 "$page" || fail "a table of an H100 names results/h200"
    ladder 0 --check
    # the same op on two pages, from two GPUs
    sed 's/ladder: op h100_80gb_hbm3/ladder: op/' "$page" >"$tmp/ladder/dev/learn/02_page.md"
    ladder 0
    contains "| 5 | more per thread | 2 + 7 shared | 0.5090 |" "$tmp/ladder/dev/learn/02_page.md"
    ladder 0 --check
    judged "kernel 2 takes 18.00000 ms and is said to lose to 1" "$csv" 's/,21\.00000/,18.00000/'
}

test_false_ladders_are_refused() {
    rm -rf "$tmp/ladder"
    ladder_tree
    local page=$tmp/ladder/dev/learn/01_page.md cuda=$tmp/ladder/dev/cuda csv=$tmp/ladder/dev/cuda/results/h200/op.csv file text change
    # shellcheck disable=SC2034 # by ${!file}, as page and csv
    local source=$cuda/op.cu
    cp "$page" "$tmp/page.md"
    cp "$csv" "$tmp/op.csv"
    cp "$cuda/op.cu" "$tmp/op.cu"
    while IFS='@' read -r file change text; do
        cp "$tmp/page.md" "$page" && cp "$tmp/op.csv" "$csv" && cp "$tmp/op.cu" "$cuda/op.cu"
        sed -i "$change" "${!file}"
        ladder 1
        want "the lines of stderr after $change" "$(wc -l <"$tmp/err")" 1
        contains "$text" "$tmp/err"
    done <<'PLANTED'
page@s/ladder: op -->/ladder: no_op -->/@01_page.md shows the ladder of no_op: no such op
page@s/ladder: op/ladders: op/@no page of dev/learn has a line
page@s/-- ladder: op/-- ladder: op h100/@no results/h100/op.csv: make bench writes it
page@s/-- ladder: op/-- ladder: op a b/@no page of dev/learn has a line
page@/end ladder/d@01_page.md has no line '<!-- end ladder: op -->'
csv@s/,median_ms,/,ms,/@op.csv has no column median_ms
csv@s/,20.00000,/,nan,/@op.csv line 3 has no time
csv@s/,p90_ms,/,p99_ms,/@op.csv has no column p90_ms
csv@s/^op,8/other,8/@op.csv line 9 is not about op
csv@s/^\(op,8,0,bf16,\)8/\19/@op.csv line 9 has another shape, type or card
csv@2,$d@op.csv has no row of kind 0
source@s/kernel 3:/kernel three:/@op.cu has no section '// ---- kernel 3: ...'
source@/this list is written/d@op.cu has no list of kernels
PLANTED
    rm "$csv"
    ladder 1
    contains "no results/h200/op.csv" "$tmp/err"
    ladder 2 nothing
    ladder 2 --what
    contains "unknown flag --what" "$tmp/err"
    ladder 0 --help
    contains "dev/learn/ladder.sh --check [OP ...]" "$tmp/out"
}

# those of the course
test_ladders_of_the_pages() {
    dev/learn/ladder.sh --check >"$tmp/out" 2>"$tmp/err" || { cat "$tmp/out" "$tmp/err" && fail "a ladder is stale or has a slower rung"; }
    local page
    for page in 04_matmul:matmul_forward 07_attention:attention_forward; do
        grep -qE "^<!-- ladder: ${page#*:}( [a-z0-9_]+)? -->\$" "dev/learn/${page%:*}.md" || fail "${page%:*}.md shows no ladder of ${page#*:}"
    done
}

tests=(learn practice every_rung practice_time practice_refuses braces text_of_an_op headers_stand_once practice_is_no_op exercises_can_be_practised answers answers_that_are_kernels
       structure pages false_output_is_seen false_structure_is_seen lists_of_kernels lists_are_those_of_the_programs
       ladders ladders_of_a_gpu false_ladders_are_refused ladders_of_the_pages)
run_tests_once "$@"
