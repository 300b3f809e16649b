#!/usr/bin/env bash
# The harness of dev/cuda: what works without a GPU and, if there is a GPU, that --check finds planted bugs.
. "$(dirname "$0")/test.sh"
top=$PWD
ops=(gelu_forward residual_forward)
export PATH=$PATH:/usr/local/cuda/bin
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION GPU_COMPUTE_CAPABILITY

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

# Builds these programs once, into $tmp; dev/cuda and its files stay untouched.
build() { # NAME ...
    command -v nvcc >/dev/null || skip "needs nvcc"
    local name source
    for name in "$@"; do
        [ ! -x "$tmp/$name" ] || continue
        source=$top/dev/cuda/$name.cu
        [ -e "$source" ] || source=$top/dev/test/$name.cu
        local arch=()
        has_gpu && arch=(-arch=native)
        nvcc -O1 -std=c++17 ${arch[@]+"${arch[@]}"} "$source" -o "$tmp/$name" >"$tmp/log" 2>&1 ||
            { cat "$tmp/log" && fail "$name does not compile"; }
    done
}

# run RC COMMAND ...: fails unless the exit code is RC; stdout and stderr go to $tmp/out and $tmp/err
run() {
    local rc=0 wanted=$1
    shift
    "$@" >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted: $*"; }
}

test_list_and_help_need_no_gpu() {
    build "${ops[@]}"
    local op
    for op in "${ops[@]}"; do
        CUDA_VISIBLE_DEVICES='' run 0 "$tmp/$op" --list
        grep -q '^1  ' "$tmp/out" || fail "$op --list does not name kernel 1"
        CUDA_VISIBLE_DEVICES='' run 0 "$tmp/$op" --help
        contains "$op: checks kernels" "$tmp/out"
        contains "-NH, --heads" "$tmp/out"
    done
}

test_without_a_gpu_one_line() {
    build gelu_forward
    local args
    for args in "" "1" "--check"; do
        # shellcheck disable=SC2086
        CUDA_VISIBLE_DEVICES='' run 1 "$tmp/gelu_forward" $args
        want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
        contains "no GPU here" "$tmp/err"
        contains "modal run benchmark_on_modal.py" "$tmp/err"
        want "stdout" "$(cat "$tmp/out")" ""
    done
}

test_bad_arguments() {
    build gelu_forward
    local args
    for args in 99 x 1x 1.5 "1 2" --chekc "--repeats 0" "-B 0" "-B x" -NH "--flush both" --huge "--stress 3" "--no-verify" "--seed 9999999999" -Z; do
        # shellcheck disable=SC2086
        run 2 "$tmp/gelu_forward" $args
        want "the lines on stderr for $args" "$(wc -l <"$tmp/err")" 1
    done
    run 2 "$tmp/gelu_forward" ""
    run 2 "$tmp/gelu_forward" 99
    contains "no kernel 99, there are 1 " "$tmp/err"
}

# only_vendor_races must not excuse a race in our own code
test_vendor_races() {
    eval "$(sed -n '/^only_vendor_races()/,/^}/p' dev/test/sanitize_gpu.sh)"
    local theirs='========= Error: Race reported between Read access at nvjet_sm90_a+0xa60
=========     and Write access at nvjet_sm90_a+0x3360 [64 hazards]'
    local ours='========= Error: Race reported between Write access at layernorm_kernel+0x10
=========     and Read access at layernorm_kernel+0x20 [1 hazards]'
    races() { # PASSED FAILED DISPLAYED REPORT ...: true if all races of such a log are the library's
        printf '%s passed, %s failed, 0 skipped\n' "$1" "$2" >"$tmp/races"
        printf '%s\n' "${@:4}" "========= RACECHECK SUMMARY: $3 hazards displayed ($3 errors, 0 warnings)" >>"$tmp/races"
        only_vendor_races "$tmp/races"
    }
    races 3 0 2 "$theirs" "$theirs" || fail "two reports of the library's fail"
    ! races 3 0 2 "$theirs" "$ours" || fail "a report of ours passes beside one of the library's"
    ! races 3 0 1 "$ours" || fail "a report of ours passes"
    ! races 3 0 1 "${theirs/Write access at nvjet_sm90_a/Write access at layernorm_kernel}" || fail "a shared race passes"
    ! races 3 0 2 "$theirs" || fail "a report that is not shown passes"
    ! races 2 1 1 "$theirs" || fail "a failed check passes"
    ! races 3 0 0 || fail "a log without reports passes"
}

# the nvcc lines of README.md and of benchmark_on_modal.py compile, link and run as written there
test_typed_nvcc_lines() {
    command -v nvcc >/dev/null || skip "needs nvcc"
    local file line lines=()
    for file in README.md benchmark_on_modal.py; do
        line=$(sed -n 's/.*--compile-command "\(nvcc [^"]*\)".*/\1/p' "dev/cuda/$file")
        [ -n "$line" ] || fail "$file has no nvcc line"
        lines+=("$line")
    done
    want "the nvcc line of benchmark_on_modal.py" "${lines[1]}" "${lines[0]}"
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cp -r llmc "$tmp/tree"
    cp dev/cuda/*.* "$tmp/tree/dev/cuda"
    cd "$tmp/tree/dev/cuda"
    while read -r line; do
        eval "$line" >"$tmp/log" 2>&1 || { cat "$tmp/log" && fail "does not compile and link: $line"; }
        CUDA_VISIBLE_DEVICES='' run 0 "./$(sed -n 's/.* -o \([^ ]*\).*/\1/p' <<<"$line")" --list
    done <<<"${lines[0]}"
}

# the nvcc line at the top of each op: all of them in `make test-full`, otherwise two, which change from day to day
test_typed_nvcc_lines_of_the_ops() {
    command -v nvcc >/dev/null || skip "needs nvcc"
    local op line at=0 ops=(dev/cuda/*.cu) day
    day=$(($(date +%s) / 86400))
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cp -r llmc "$tmp/tree"
    cp dev/cuda/*.* "$tmp/tree/dev/cuda"
    cd "$tmp/tree/dev/cuda"
    for op in *.cu; do
        line=$(grep -m 1 '^   nvcc ' "$op" | sed 's/ *(or: .*//; s/ *\*\/.*//; s/^ *//; s/ *$//')
        [[ $line == "nvcc -O3 --use_fast_math $op"* ]] || fail "$op has no nvcc line: '$line'"
        [ -n "${LLMC_TEST_FULL-}" ] || [ $(((at + day) % (${#ops[@]} / 2))) -eq 0 ] || { at=$((at + 1)) && continue; }
        at=$((at + 1))
        [[ $line != *-lnccl* ]] || [ -e /usr/include/nccl.h ] || continue
        eval "$line" >"$tmp/log" 2>&1 || { cat "$tmp/log" && fail "does not compile and link: $line"; }
        CUDA_VISIBLE_DEVICES='' run 0 "./$(sed -nE 's/.* -o ([^ ]*).*/\1/p' <<<"$line")" --list
        rm "./$(sed -nE 's/.* -o ([^ ]*).*/\1/p' <<<"$line")"
    done
}

test_planted_bugs() {
    has_gpu || skip "needs a GPU"
    build planted_bugs
    run 1 "$tmp/planted_bugs" --check
    want "kernel 1" "$(grep -c '^ok kernel 1 ' "$tmp/out")" 4 # two shapes, two block sizes
    local kernel
    for kernel in 0 2 3 4 5 6 7; do
        grep -q "^ok kernel $kernel " "$tmp/out" && fail "kernel $kernel passes"
        want "kernel $kernel" "$(grep -c "^FAIL kernel $kernel " "$tmp/out")" 4
    done
    grep -q "^FAIL kernel 0 .*: kernel 0 is not the vendor's library" "$tmp/out" || fail "kernel 0 may be ours"
    grep -q '^FAIL kernel 5 .*: out: written past its end$' "$tmp/out" || fail "kernel 5's buffer is not named"
    grep -q '^FAIL kernel 6 .*: inp: an input, changed$' "$tmp/out" || fail "kernel 6's input is not named"
    want "the last line" "$(tail -n 1 "$tmp/out")" "8 passed, 28 failed, 0 skipped" # kernel 8 is idle only later
    run 0 "$tmp/planted_bugs" 1 --check
    for kernel in 0 2 3 4 5 6 7; do
        run 1 "$tmp/planted_bugs" $kernel --check
        run 1 "$tmp/planted_bugs" $kernel --repeats 3
        grep -q 'All results match' "$tmp/out" && fail "kernel $kernel matches"
    done
    # a launcher that does nothing while it is timed
    run 0 "$tmp/planted_bugs" 8 --check
    run 1 "$tmp/planted_bugs" 8 --repeats 10
    grep -qE '^FAIL kernel 8 block_size +64: after the timed launches: out: [0-9]+ of [0-9]+ wrong' "$tmp/out" || fail "an idle launcher is timed"
    return 0
}

test_timing() {
    has_gpu || skip "needs a GPU"
    build planted_bugs
    run 0 "$tmp/planted_bugs" 1 --repeats 5 --csv "$tmp/a.csv" --json "$tmp/a.json"
    contains "Using kernel 1" "$tmp/out"
    contains "All results match. Starting benchmarks." "$tmp/out"
    grep -qE '^block_size   64 \| time [0-9.]+ ms \| bandwidth [0-9.]+ GB/s \| p10 ' "$tmp/out" || fail "no line of a time"
    want "the rows of the CSV" "$(wc -l <"$tmp/a.csv")" 3
    want "the columns" "$(head -n 1 "$tmp/a.csv" | tr -dc , | wc -c)" "$(sed -n 2p "$tmp/a.csv" | tr -dc , | wc -c)"
    contains '"name": "planted_bugs/kernel:1/block_size:64"' "$tmp/a.json"
    if command -v python3 >/dev/null; then python3 -m json.tool "$tmp/a.json" >/dev/null || fail "not JSON"; fi
    run 1 "$tmp/planted_bugs" 1 --csv "$tmp/no/such/folder/a.csv"
}

# scripts/update_results.sh on a made-up set of results
test_update_results() {
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/scripts" "$tmp/tree/dev/cuda/results/t4"
    cd "$tmp/tree"
    cp "$top/scripts/update_results.sh" scripts/
    printf '%s\n' 'above' '<!-- results: t4 -->' 'old' '<!-- end results: t4 -->' 'below' >dev/cuda/README.md
    cat >dev/cuda/results/t4/op.csv <<'CSV'
op,kernel,block_size,dtype,B,T,C,NH,V,median_ms,p10_ms,p90_ms,launches,l2,bytes,gb_s,copy_gb_s,flops,tflop_s,matrix_tflop_s,best,promoted,kernel_launches,bytes_moved,gpu,what
op,0,0,bf16,64,1024,768,12,50257,0.50000,0.49000,0.51000,100,cold,1000,200.00,250.00,0,0.000,0.000,1,0,0,0,Tesla T4,"vendor"
op,1,64,bf16,64,1024,768,12,50257,2.00000,1.90000,2.10000,100,cold,1000,50.00,250.00,0,0.000,0.000,1,0,0,0,Tesla T4,"naive"
op,2,128,bf16,64,1024,768,12,50257,1.00000,0.90000,1.10000,100,cold,1000,100.00,250.00,0,0.000,0.000,1,1,0,0,Tesla T4,"vectors, ""wide"""
CSV
    printf '%s\n' 'other 9 9' 'op 1.5000 nan' >dev/cuda/results/t4/pytorch.txt
    local twice
    for twice in 1 2; do scripts/update_results.sh || fail "run $twice"; done
    want "the row" "$(grep '^| op |.*bf16' dev/cuda/README.md)" \
        '| op | B 64 T 1024 C 768, bf16 | 2: vectors, "wide" | 128 | 1.0000 (0.9000 to 1.1000) | 100 | 40.0% |  |  | 0.50 | 2.00 | 1.50 |  |'
    want "the text around" "$(grep -c -e above -e below -e old dev/cuda/README.md)" 2
    want "the lines" "$(wc -l <dev/cuda/README.md)" 7
    rm dev/cuda/results/t4/op.csv
    scripts/update_results.sh 2>"$tmp/err" && fail "no CSV, no error"
    contains "make bench writes them" "$tmp/err"
}

tests=(vendor_races list_and_help_need_no_gpu without_a_gpu_one_line bad_arguments typed_nvcc_lines
    typed_nvcc_lines_of_the_ops planted_bugs timing update_results)
run_tests_once "$@"
