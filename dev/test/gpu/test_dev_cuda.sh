#!/usr/bin/env bash
# The harness of dev/cuda: what works without a GPU and, if there is a GPU, that --check finds planted bugs.
. "$(dirname "$0")/../test.sh"
. dev/test/gpu/builds.sh
top=$PWD
ops=(layernorm_forward) # test_ops.sh and test_readme.sh compile the same object
[ -z "${LLMC_TEST_FULL-}" ] || ops+=(gelu_forward residual_forward)
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
        [ -e "$source" ] || source=$top/dev/test/gpu/$name.cu
        if has_gpu; then
            nvcc -O1 -std=c++17 -Idev/cuda -arch=native "$source" -o "$tmp/$name" >"$tmp/log" 2>&1
        else
            make -C "$top/dev/cuda" BIN_DIR="$tmp" OPS="$name" PRECISION=BF16 GPU_COMPUTE_CAPABILITY=$cheap_arch NVCC="$cheap_nvcc" all >"$tmp/log" 2>&1
        fi || { cat "$tmp/log" && fail "$name does not compile"; }
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
    build layernorm_forward
    local args
    for args in "" "1" "--check"; do
        # shellcheck disable=SC2086
        CUDA_VISIBLE_DEVICES='' run 1 "$tmp/layernorm_forward" $args
        want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
        contains "no GPU here" "$tmp/err"
        contains "modal run benchmark_on_modal.py" "$tmp/err"
        want "stdout" "$(cat "$tmp/out")" ""
    done
}

test_bad_arguments() {
    build layernorm_forward
    local args
    for args in 99 x 1x 1.5 "1 2" --chekc "--repeats 0" "-B 0" "-B x" -NH "--flush both" --huge "--stress 3" "--no-verify" "--seed 9999999999" -Z \
        "--check --csv $tmp/times" "1 --check --json $tmp/times" "--list --csv $tmp/times" "7-5" "1,x" "--config 100"; do
        # shellcheck disable=SC2086
        run 2 "$tmp/layernorm_forward" $args
        want "the lines on stderr for $args" "$(wc -l <"$tmp/err")" 1
    done
    run 2 "$tmp/layernorm_forward" ""
    run 2 "$tmp/layernorm_forward" 99
    contains "no kernel 99, there are 1 " "$tmp/err"
}

# excuses_the_library FUNCTION SUMMARY THEIRS OURS ...: FUNCTION of sanitize_gpu.sh accepts a log with reports THEIRS, of the library,
# and none with a report OURS. SUMMARY is the log's last line, with %d for the number of reports.
excuses_the_library() {
    eval "$(sed -n "/^only_vendor()/,/^}/p; /^$1()/,/^}/p" dev/test/gpu/sanitize_gpu.sh)"
    local function=$1 summary=$2 theirs=$3 ours
    excused() { # PASSED FAILED DISPLAYED REPORT ...: true if FUNCTION accepts such a log
        printf '%s passed, %s failed, 0 skipped\n' "$1" "$2" >"$tmp/log"
        printf '%s\n' "${@:4}" "${summary//%d/$3}" >>"$tmp/log"
        "$function" "$tmp/log"
    }
    excused 3 0 2 "$theirs" "$theirs" || fail "two reports of the library's fail"
    for ours in "${@:4}"; do
        ! excused 3 0 2 "$theirs" "$ours" || fail "a report of ours passes beside one of the library's: $ours"
        ! excused 3 0 1 "$ours" || fail "a report of ours passes: $ours"
    done
    ! excused 3 0 2 "$theirs" || fail "a report that is not shown passes"
    ! excused 2 1 1 "$theirs" || fail "a failed check passes"
    ! excused 3 0 0 || fail "a log without reports passes"
}
test_vendor_races() {
    local theirs='========= Error: Race reported between Read access at nvjet_sm90_a+0xa60
=========     and Write access at nvjet_sm90_a+0x3360 [64 hazards]'
    local shared=${theirs/Write access at nvjet_sm90_a/Write access at layernorm_kernel} # with the library
    excuses_the_library only_vendor_races '========= RACECHECK SUMMARY: %d hazards displayed (%d errors, 0 warnings)' "$theirs" \
        '========= Error: Race reported between Write access at layernorm_kernel+0x10
=========     and Read access at layernorm_kernel+0x20 [1 hazards]' "$shared"
}
test_vendor_reads() {
    local theirs='========= Uninitialized __global__ memory read of size 4 bytes
=========     at void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<T6>)+0xe00
=========     by thread (0,0,0) in block (0,1,0)'
    excuses_the_library only_vendor_reads '========= ERROR SUMMARY: %d errors' "$theirs" \
        "${theirs/cublasLt::splitKreduce_kernel/cublasLt_like_kernel}"
}

# the nvcc lines of README.md and of benchmark_on_modal.py are the same, and in .ci/run they compile, link and run as written
test_typed_nvcc_lines() {
    command -v nvcc >/dev/null || skip "needs nvcc"
    local file line lines=()
    for file in README.md benchmark_on_modal.py; do
        line=$(sed -n 's/.*--compile-command "\(nvcc [^"]*\)".*/\1/p' "dev/cuda/$file")
        [ -n "$line" ] || fail "$file has no nvcc line"
        lines+=("$line")
    done
    want "the nvcc line of benchmark_on_modal.py" "${lines[1]}" "${lines[0]}"
    [ -n "$more" ] || return 0
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

# the nvcc line at the top of each op has the right text, and in `make test-full` it compiles, links and runs
test_typed_nvcc_lines_of_the_ops() {
    command -v nvcc >/dev/null || skip "needs nvcc"
    local op line
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cp -r llmc "$tmp/tree"
    cp dev/cuda/*.* "$tmp/tree/dev/cuda"
    cd "$tmp/tree/dev/cuda"
    rm -f practice_*.cu # of `make practice`
    for op in *.cu; do
        line=$(grep -m 1 '^   nvcc ' "$op" | sed 's/ *(or: .*//; s/ *\*\/.*//; s/^ *//; s/ *$//')
        [[ $line == "nvcc -O3 --use_fast_math $op"* ]] || fail "$op has no nvcc line: '$line'"
        [[ $line == *" -o "* ]] || fail "the nvcc line of $op names no program: '$line'"
        [ -n "${LLMC_TEST_FULL-}" ] || continue
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
        want "kernel $kernel" "$(grep -c "^FAIL kernel $kernel " "$tmp/out")" 1
        contains "the same in 3 more: FAIL kernel $kernel: " "$tmp/out"
    done
    grep -q "^FAIL kernel 0 .*: kernel 0 is not the vendor's library" "$tmp/out" || fail "kernel 0 may be ours"
    grep -q '^FAIL kernel 5 .*: out: written past its end$' "$tmp/out" || fail "kernel 5's buffer is not named"
    grep -q '^FAIL kernel 6 .*: inp: an input, changed$' "$tmp/out" || fail "kernel 6's input is not named"
    want "the last line" "$(tail -n 1 "$tmp/out")" "16 passed, 28 failed, 0 skipped" # kernels 8 and 9 are idle only later
    run 0 "$tmp/planted_bugs" 1 --check
    for kernel in 0 2 3 4 5 6 7; do
        run 1 "$tmp/planted_bugs" $kernel --check
        run 1 "$tmp/planted_bugs" $kernel --repeats 3
        grep -q 'All results match' "$tmp/out" && fail "kernel $kernel matches"
    done
    # a launcher that does nothing while it is timed
    run 0 "$tmp/planted_bugs" 8 --check
    run 1 "$tmp/planted_bugs" 8 --repeats 10
    grep -qE '^FAIL kernel 8 block size +64: after the timed launches: out: [0-9]+ of [0-9]+ wrong' "$tmp/out" || fail "an idle launcher is timed"
    # one that does nothing from its 201st call on, which only --sustained reaches
    run 0 "$tmp/planted_bugs" 9 --repeats 10 --config 64
    run 1 "$tmp/planted_bugs" 9 --repeats 10 --config 64 --sustained
    grep -qE '^FAIL kernel 9 block size +64: after the launches in a graph or back to back: out: ' "$tmp/out" || fail "an idle launcher is timed back to back"
    return 0
}

# columns FILE NAME ...: prints these columns of the first row of a CSV
columns() {
    awk -F , -v names="${*:2}" 'NR == 1 { for (i = 1; i <= NF; i++) { at[$i] = i } next }
        { n = split(names, name, " "); for (i = 1; i <= n; i++) { printf "%s ", $at[name[i]] } print ""; exit }' "$1"
}
holds() { awk "BEGIN { exit !($2) }" || fail "$1: not $2"; } # WHAT CONDITION

test_timing() {
    has_gpu || skip "needs a GPU"
    build planted_bugs
    run 0 "$tmp/planted_bugs" 1 --repeats 5 --csv "$tmp/a.csv" --json "$tmp/a.json"
    contains "Using kernel 1" "$tmp/out"
    contains "All results match. Starting benchmarks." "$tmp/out"
    grep -qE '^block size   64 \| time [0-9.]+ ms \| bandwidth [0-9.]+ GB/s \| p10 ' "$tmp/out" || fail "no line of a time"
    want "the rows of the CSV" "$(wc -l <"$tmp/a.csv")" 3
    want "the columns" "$(head -n 1 "$tmp/a.csv" | tr -dc , | wc -c)" "$(sed -n 2p "$tmp/a.csv" | tr -dc , | wc -c)"
    contains '"name": "planted_bugs/kernel:1/block_size:64"' "$tmp/a.json"
    grep -qE '^read on the device: [0-9.]+ GB/s ' "$tmp/out" || fail "no speed of a read"
    grep -qE '^empty launch: [0-9.]+ us' "$tmp/out" || fail "no time of an empty launch"
    # the clock is that of a GPU, and the launches are short enough for a graph
    grep -qE '^block size   64 .* \| [1-9][0-9]{2,3} MHz \| in a graph 0\.[0-9]+ ms \| ' "$tmp/out" || fail "no clock, or no graph"
    grep -q sustained "$tmp/out" && fail "sustained without --sustained"
    local mhz copy read empty graph time
    read -r mhz copy read empty graph time <<<"$(columns "$tmp/a.csv" sm_mhz copy_gb_s read_gb_s empty_ms graph_ms median_ms)"
    holds "a clock from 200 to 4000 MHz" "$mhz > 200 && $mhz < 4000"
    holds "a read is about as fast as a copy" "$read > 0.8 * $copy && $read < 1.5 * $copy"
    holds "an empty launch takes no longer than a kernel" "$empty > 0 && $empty <= 1.2 * $time"
    holds "in a graph, hot, no longer than alone" "$graph > 0 && $graph <= $time"
    run 0 "$tmp/planted_bugs" 1 --repeats 5 --config 64 --sustained --csv "$tmp/b.csv"
    grep -qE ' \| sustained 0\.[0-9]+ ms at [1-9][0-9]{2,3} MHz' "$tmp/out" || fail "no sustained time"
    read -r time mhz <<<"$(columns "$tmp/b.csv" sustained_ms sustained_mhz)"
    holds "the sustained time" "$time > 0 && $time < 1 && $mhz > 200"
    # a launcher that waits for the GPU cannot be recorded: the run goes on, and times it alone
    run 0 "$tmp/planted_bugs" 10 --repeats 5
    grep -qF '| in a graph' "$tmp/out" && { cat "$tmp/out" && fail "a launcher that waits was recorded"; }
    want "the lines of times" "$(grep -c '^block size ' "$tmp/out")" 2
    if command -v python3 >/dev/null; then python3 -m json.tool "$tmp/a.json" >/dev/null || fail "not JSON"; fi
    run 1 "$tmp/planted_bugs" 1 --csv "$tmp/no/such/folder/a.csv"
}

# Builds tuned_op.cu on a stand-in for CUDA, once, into $tmp/tune.
build_tuned_op() {
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ ! -x "$tmp/tune/op" ] || return 0
    mkdir -p "$tmp/tune"
    nvcc -O1 -Xcompiler -fPIC -shared -cudart none dev/test/stand-ins/fake_cuda.c -o "$tmp/tune/fake_cuda.so"
    "$cheap_nvcc" --stand-in="$tmp/tune/fake_cuda.so" -std=c++17 -Idev/cuda dev/test/gpu/tuned_op.cu -o "$tmp/tune/op"
}

# --tune writes the fastest configuration, on a stand-in for CUDA whose times do not vary
test_tune() {
    command -v nvcc >/dev/null || skip "needs nvcc"
    local row='gelu_forward,Fake GPU,bf16,2,16,32,2,100' other='adamw,Fake GPU,bf16,2,16,32,2,100,64,1.00000,2.00000'
    local header=op,gpu,dtype,B,T,C,NH,V,config,median_ms,default_ms
    local tuned=results/fake_gpu/tuned.csv
    build_tuned_op
    cd "$tmp/tune"
    TUNED_OP_FASTEST=128 run 0 ./op --tune
    want "the file" "$(sed -E 's/(,[0-9]+\.[0-9]{5}){2}$//' $tuned)" "$header
$row,128"
    awk -F , 'NR == 2 { exit !($10 > 0 && $10 < $11) }' $tuned || fail "the times: $(cat $tuned)"
    want "what else is there" "$(ls results/fake_gpu)" tuned.csv
    contains "tuned gelu_forward: config 128 takes " "$tmp/out"
    # the row is replaced, others stay; the first argument may be the promoted kernel
    printf '%s\n' "$other" >>$tuned
    TUNED_OP_FASTEST=512 run 0 ./op 2 --tune
    want "the file" "$(cut -d , -f 1-9 $tuned | tail -n 2)" "$row,512
$(cut -d , -f 1-9 <<<"$other")"
    TUNED_OP_FASTEST=64 run 0 ./op --tune -T 32
    want "the file with another shape" "$(tail -n 1 $tuned | cut -d , -f 5,9)" 32,64
    # the default is written if it is the fastest, if all are equal, and if the gain does not last
    local each
    for each in FASTEST=0 FASTEST=-1 NOISE=64; do
        env "TUNED_OP_$each" ./op --tune --tune-file file.csv >"$tmp/out" || fail "$each: $(cat "$tmp/out")"
        want "the file for $each" "$(tail -n 1 file.csv | cut -d , -f 9)" 0
        contains "tuned gelu_forward: nothing is faster than the default" "$tmp/out"
    done
    # nothing is written if a result is wrong or the file is not one of ours
    cp file.csv before.csv
    TUNED_OP_WRONG=256 run 1 ./op --tune --tune-file file.csv
    cmp file.csv before.csv
    echo text >text.csv
    run 1 ./op --tune --tune-file text.csv
    contains "text.csv:1: is not '$header'; make tune in dev/cuda writes such a file" "$tmp/err"
    want "the text" "$(cat text.csv)" text
    for each in "1 --tune" "--tune --check" "--tune --config 64"; do
        # shellcheck disable=SC2086
        run 2 ./op $each
        want "the lines on stderr for $each" "$(wc -l <"$tmp/err")" 1
    done
}

# an op that cannot be tuned says why: one named decode_sample, which has no configurations, and one without a promoted kernel
test_tune_refuses() {
    build_tuned_op
    TUNED_OP_NAME=decode_sample run 2 "$tmp/tune/op" --tune
    contains "--tune: the promoted kernel of decode_sample takes no configuration" "$tmp/err"
    TUNED_OP_NAME=permute TUNED_OP_PROMOTED=0 run 2 "$tmp/tune/op" --tune
    contains "--tune: permute has no promoted kernel" "$tmp/err"
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
    [ -n "${LLMC_TEST_FULL-}" ] || return 0
    build decode_sample permute
    run 2 "$tmp/decode_sample" --tune
    contains "--tune: the promoted kernel of decode_sample takes no configuration" "$tmp/err"
    run 2 "$tmp/permute" --tune
    contains "--tune: permute has no promoted kernel" "$tmp/err"
}

# every op of llmc/tuned.h has a ladder, whose list of configurations is that of the header, and is promoted
test_tunable_ops() {
    local op ops
    read -r -a ops <<<"$(make -s -C dev/cuda tune-ops)"
    want "the number of ops" ${#ops[@]} "$(grep -c '^    {"[a-z_]*", TUNED_' llmc/tuned.h)"
    [ ${#ops[@]} -ge 11 ] || fail "only ${ops[*]}"
    for op in "${ops[@]}"; do
        grep -qF "bench_tunable(\"$op\")" "dev/cuda/$op.cu" || fail "$op.cu has a list of its own"
        grep -qE "tuned_(config\(exec.tuned|block_size\(exec), \"$op\"," train_gpt2.cu || fail "train_gpt2.cu does not ask for the configuration of $op"
    done
    want "launchers that ask" "$(grep -oE 'tuned_(config\(exec.tuned|block_size\(exec), "[a-z_]*"' train_gpt2.cu | sort -u | wc -l)" ${#ops[@]}
}

tests=(vendor_races vendor_reads list_and_help_need_no_gpu without_a_gpu_one_line bad_arguments typed_nvcc_lines
    typed_nvcc_lines_of_the_ops planted_bugs timing tune tune_refuses tunable_ops)
run_tests_once "$@"
