#!/usr/bin/env bash
# The course, dev/learn, and what it needs in dev/cuda: practice files, answers, the pages' commands, the lists of kernels.
# LLMC_TEST_FULL=1 cuts every kernel that can be practised, builds every op to compare its list, and types the commands of
# every page; else those of each page are typed every third day, and on the other days if it was changed.
. "$(dirname "$0")/test.sh"
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
    xargs -0 cp --parents -t "$tmp/top" <"$tmp/files"
    share_engine "$tmp/top"
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
    run 0 ./practice.sh "$1" "$2" solution
    awk '
        FNR == NR && /^\/\/ [a-z0-9_]+[.]cu:[0-9]+$/ { n++; inside = 0; next }
        FNR == NR && inside { line[n, ++lines[n]] = $0; next }
        FNR == NR { inside = /\{$/; next }
        /^    \/\/ Practice: write the body of / { at++; cut = 1; for (i = 1; i < lines[at]; i++) { print line[at, i] } }
        cut && /^}/ { cut = 0 }
        !cut { print }' "$tmp/out" "$tmp/top/dev/cuda/practice_$1.cu" >"$tmp/pasted"
    cp "$tmp/pasted" "$tmp/top/dev/cuda/practice_$1.cu"
}
# same_code OP: fails unless practice_OP.cu is OP.cu again, from the first #include on and except for the marks of promote.sh
same_code() {
    sed -n '/^#include/,$p' "$tmp/top/dev/cuda/$1.cu" | grep -v '^// ==== \(end \)\?promoted: ' >"$tmp/original"
    sed -n '/^#include/,$p' "$tmp/top/dev/cuda/practice_$1.cu" | cmp - "$tmp/original" || fail "$1 $2: with its body, it is not the original"
}

# ---- practice ----

# The op's check finds that the body is missing, and accepts the original. Two ops a day, in turn.
test_practice() {
    needs_compiler
    copy
    no_gpu
    local pair op rung ops=()
    [ -n "${LLMC_TEST_FULL-}" ] || cut_rungs=("${cut_rungs[@]:day % 3 * 2:2}")
    for pair in "${cut_rungs[@]}"; do
        read -r op rung <<<"$pair"
        rm -f "$tmp/top/dev/cuda/practice_$op.cu"
        run 0 ./practice.sh "$op" "$rung"
        contains "make cpu OP=practice_$op && ./practice_${op}_cpu $rung" "$tmp/out"
        contains "Practice: write the body of ${op}_kernel$rung()." "$tmp/top/dev/cuda/practice_$op.cu"
        ops+=("practice_$op")
    done
    run 0 make -j"$jobs" CXX="$CXX" CPU_CXXFLAGS=-O0 cpu OPS="${ops[*]}"
    for pair in "${cut_rungs[@]}"; do
        read -r op rung <<<"$pair"
        run 1 "./practice_${op}_cpu" "$rung" --check --case 0 -B 1 -T 4 -C 64 -NH 8 -V 64
        contains "FAIL kernel $rung " "$tmp/out"
        ! grep -q '^ok ' "$tmp/out" || fail "a kernel without a body passes: $pair"
        paste_back "$op" "$rung"
        same_code "$op" "$rung"
    done
    run 0 make -j"$jobs" CXX="$CXX" CPU_CXXFLAGS=-O0 cpu OPS="${ops[*]}"
    echo "note: ${cut_rungs[*]}"
    for pair in "${cut_rungs[@]}"; do
        read -r op rung <<<"$pair"
        run 0 "./practice_${op}_cpu" "$rung" --check --case 0 -B 1 -T 4 -C 64 -NH 8 -V 64
        grep -qE '^[1-9][0-9]* passed, 0 failed, 0 skipped$' "$tmp/out" || fail "$pair: $(tail -n 1 "$tmp/out")"
    done
}

# rungs OP: those that can be practised
rungs() { (cd "$tmp/top/dev/cuda" && ./practice.sh "$1") | sed -n '/^not to be/q; s/^ *\([0-9][0-9]*\)  .*/\1/p'; }

# Each of them, one after the other out of the same file, and all bodies back: the original. Three ops, in turn.
test_every_rung() {
    copy
    local op rung at=0 num=0 ops=()
    mapfile -t ops < <(cd dev/cuda && grep -l '^// ---- kernel 1' ./*.cu | sed 's|^\./||; s/\.cu$//' | grep -v '^practice_')
    for op in "${ops[@]}"; do
        at=$((at + 1))
        [ -n "${LLMC_TEST_FULL-}" ] || [ $(((at + day) % (${#ops[@]} / 3))) -eq 0 ] || continue
        rm -f "$tmp/top/dev/cuda/practice_$op.cu"
        for rung in $(rungs "$op"); do
            run 0 ./practice.sh "$op" "$rung"
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
    one_line 2 "no OP" ./practice.sh
    one_line 2 "OP='nothing' is no .cu file here" ./practice.sh nothing 1
    one_line 2 "not 'x'" ./practice.sh simple_kernel x
    one_line 1 "has no banner" ./practice.sh nccl_all_reduce
    run 2 ./practice.sh simple_kernel 3
    contains "it launches simple_kernel_kernel2" "$tmp/err"
    contains "   5  one 16-byte load per thread" "$tmp/err"
    run 2 ./practice.sh simple_kernel 99
    contains "there is none of that number" "$tmp/err"
    run 0 ./practice.sh simple_kernel
    contains "   3  no function of its own: it launches simple_kernel_kernel2" "$tmp/out"
    [ ! -e "$tmp/top/dev/cuda/practice_simple_kernel.cu" ] || fail "a list has written a file"
    run 0 env PRECISION=FP32 ./practice.sh simple_kernel 1
    contains "make cpu OP=practice_simple_kernel PRECISION=FP32 && ./practice_simple_kernel_cpu_fp32 1" "$tmp/out"
    # what the reader has written stays, also when another kernel is cut out
    local file=$tmp/top/dev/cuda/practice_simple_kernel.cu
    sed -i 's|^    // Practice: .*|    int mine = 1;|' "$file"
    one_line 1 "has kernel 1 already" ./practice.sh simple_kernel 1
    run 0 ./practice.sh simple_kernel 5
    contains "    int mine = 1;" "$file"
    contains "// practice: simple_kernel kernels 1 5, made by" "$file"
    sed -i 's|^    int mine = 1;|    int mine = 1; {|' "$file"
    one_line 1 "practice_simple_kernel.cu:" ./practice.sh simple_kernel 6
    run 0 env FORCE=yes ./practice.sh simple_kernel 6
    ! grep -q mine "$file" || fail "FORCE=yes does not begin anew"
    sed -i 1d "$file"
    one_line 1 "is there already" ./practice.sh simple_kernel 5
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
    run 0 ./practice.sh braces
    want "what can be practised" "$(sed -n '/^not/q; s/^ *\([0-9]\)  .*/\1/p' "$tmp/out" | paste -s -d ' ')" "1 2"
    contains "   4  braces_kernel4() only calls braces_helper()" "$tmp/out"
    run 0 ./practice.sh braces 1
    run 0 ./practice.sh braces 2
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
    run 0 ./practice.sh braces 1 solution
    want "the original" "$(tail -n +2 "$tmp/out")" "$(sed -n '9,17p' "$tmp/braces.cu")"
    local change
    for change in 's/^#endif$//' 's/^}$//' "s/= '}'/= '}/" 's|^    /\* } \*/|    /* }|' 's/^}$/ }/'; do
        sed "$change" "$tmp/braces.cu" >"$tmp/top/dev/cuda/braces.cu"
        one_line 1 "mend it" ./practice.sh braces 1
    done
    rm "$tmp"/top/dev/cuda/*braces.cu
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
    want "git's status" "$(cd "$tmp/top" && git -C "$OLDPWD" check-ignore dev/cuda/practice_simple_kernel.cu dev/cuda/practice.sh)" \
        dev/cuda/practice_simple_kernel.cu
    run 0 make clean
    [ -e "$tmp/top/dev/cuda/practice_simple_kernel.cu" ] || fail "make clean removes it"
    rm "$tmp/top/dev/cuda/practice_simple_kernel.cu"
}

# both programs are run, and of each the fastest configuration is compared; the programs here only write figures
test_practice_time() {
    copy
    mkdir -p "$tmp/programs"
    run 0 env FORCE=yes ./practice.sh softmax_forward 4
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
    run 0 env BIN_DIR="$tmp/programs" ./practice.sh softmax_forward 4 time
    want "the times" "$(cat "$tmp/out")" "softmax_forward 4                    0.5000 ms (0.4900 to 0.5100), block size 256
practice_softmax_forward 4           0.6000 ms (0.5900 to 0.6100), default: 1.20 x the time of the original"
    printf '#!/bin/sh\necho "FAIL kernel 4"; exit 1\n' >"$tmp/programs/practice_softmax_forward"
    run 1 env BIN_DIR="$tmp/programs" ./practice.sh softmax_forward 4 time
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
    run 0 ./answer.sh
    for page in "$tmp"/top/dev/learn/answers/*.txt; do
        while read -r _ kind op rung _; do
            [ "$kind" = practice ] || continue
            rm -f "$tmp/top/dev/cuda/practice_$op.cu"
            run 0 ./practice.sh "$op" "$rung"
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
    right() { run 0 ./answer.sh "$@" && contains "right: " "$tmp/out"; }
    wrong() { run 1 ./answer.sh "$1" "$2" && want "what it says" "$(cat "$tmp/out")" "$2 is $3"; }
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
    run 0 env SHOW=yes ./answer.sh 02.1
    want "the answer" "$(cat "$tmp/out")" "190: half of 380"
    local bad
    for bad in x 1x 190us 4,09 nan '' '1 2'; do one_line 2 "number" ./answer.sh 02.1 "$bad"; done
    one_line 2 "has exercises 1 to 3, not 4" ./answer.sh 02.4 1
    one_line 2 "no exercises of page '07'" ./answer.sh 7.1 1
    one_line 2 "no exercises of page 'nothing'" ./answer.sh nothing.1 1
    for bad in 02 02. .1 02.x ../02.1; do one_line 2 "EXERCISE is a page" ./answer.sh "$bad" 1; done
    one_line 2 "this exercise is a kernel" ./answer.sh 02.2 1
    run 0 ./answer.sh
    contains "    02.2             write kernel 1 of simple_kernel" "$tmp/out"
    contains "    occupancy.3      a number" "$tmp/out"
    for bad in '1 number x 5 a' '1 number 5 x a' '2 number 5 5 a' '1 guess 5 5 a' '1 number 5 5' '1 practice simple_kernel x a' ''; do
        printf '%s' "${bad:+$bad$'\n'}" >"$tmp/answers/08_bad.txt"
        one_line 1 "08_bad.txt" ./answer.sh 08.1 1
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
    one_line 1 "no practice_simple_kernel.cu: make practice OP=simple_kernel RUNG=1" ./answer.sh 01.1
    run 0 ./practice.sh simple_kernel 1
    one_line 1 "is not about kernel 2" ./answer.sh 01.2
    run 1 ./answer.sh 01.1
    contains "FAIL kernel 1 " "$tmp/out"
    contains "hint: the index is " "$tmp/out"
    sed -i 's|^    // Practice: .*|    this does not compile|' "$file"
    run 1 ./answer.sh 01.1
    contains "practice_simple_kernel.cu does not compile" "$tmp/out"
    contains "error: " "$tmp/out"
    run 0 env FORCE=yes ./practice.sh simple_kernel 1
    paste_back simple_kernel 1
    run 0 ./answer.sh 01.1
    grep -qE '^right: kernel 1 of simple_kernel, [1-9][0-9]* passed, 0 failed$' "$tmp/out" || { cat "$tmp/out" && fail "the original is not right"; }
    rm "$file"
}

# ---- pages ----

test_structure() {
    dev/learn/pages.sh --structure >"$tmp/out" || { grep '^FAIL' "$tmp/out"; fail "$(tail -n 1 "$tmp/out")"; }
}

# sources_of PAGE: the page and the ops that it builds
sources_of() {
    echo "$1"
    grep -oE 'cpu OP=[a-z0-9_]+' "$1" | sed 's|.*=\(.*\)|dev/cuda/\1.cu|'
}

# The commands of the pages that need no H200. The copy is kept below build/, where only what has changed is built again.
test_pages() {
    needs_compiler
    git ls-files >/dev/null 2>&1 || skip "needs git"
    local page name at=0 changed pages=() later=()
    changed=$(changed_lately dev)
    for page in dev/learn/*.md; do
        name=$(basename "$page" .md)
        grep -qE '^ *<!-- *run: *(cpu|nvcc)' "$page" || continue
        at=$((at + 1))
        if [ -n "${LLMC_TEST_FULL-}" ] || [ $(((at + day) % 3)) -eq 0 ] || grep -qxF -f <(sources_of "$page") <<<"$changed"; then
            pages+=("$name")
        else
            later+=("$name")
        fi
    done
    PAGES_TREE=build/learn_pages PAGES_TIMEOUT=300 dev/learn/pages.sh --commands "${pages[@]}" >"$tmp/out" ||
        { grep -v '^ok ' "$tmp/out"; fail "$(tail -n 1 "$tmp/out")"; }
    echo "note: ${pages[*]}"
    [ ${#later[@]} -eq 0 ] || echo "note: another day, or in make test-full: ${later[*]}"
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

# what the programs list; two ops, in turn, of those that are quick to build
test_lists_are_those_of_the_programs() {
    needs_compiler
    copy
    local ops=(gelu_forward residual_forward encoder_forward permute global_norm gelu_backward decode_sample softmax_forward) chosen=()
    [ -n "${LLMC_TEST_FULL-}" ] || chosen=("${ops[day % 8]}" simple_kernel)
    sed -i 's/^     4  64 contiguous/     4  65 contiguous/' "$tmp/top/dev/cuda/simple_kernel.cu"
    run 1 env CXX="$CXX" ./versions.sh --check simple_kernel
    contains "simple_kernel.cu: its list is stale" "$tmp/out"
    run 0 env CXX="$CXX" ./versions.sh simple_kernel
    cmp dev/cuda/simple_kernel.cu "$tmp/top/dev/cuda/simple_kernel.cu" || fail "the list is not written as it was"
    run 0 env CXX="$CXX" ./versions.sh --check ${chosen[@]+"${chosen[@]}"}
}

tests=(practice every_rung practice_time practice_refuses braces practice_is_no_op exercises_can_be_practised answers answers_that_are_kernels
       structure pages false_output_is_seen false_structure_is_seen lists_of_kernels lists_are_those_of_the_programs)
run_tests_once "$@"
