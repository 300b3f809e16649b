#!/usr/bin/env bash
# The tools of dev/cuda beside plot: compare.cpp on made-up CSV files; profile.sh with a stand-in for ncu; sass.sh with
# a stand-in for cuobjdump and, where the real one is, on one op.
. "$(dirname "$0")/../test.sh"
CXX=${CXX:-g++}
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION GPU_COMPUTE_CAPABILITY NCU OP KERNEL CONFIG FLAGS FUNCTION OLD NEW ALL THRESHOLD

# run RC COMMAND ...: fails unless the exit code is RC; stdout and stderr go to $tmp/out and $tmp/err
run() {
    local rc=0 wanted=$1
    shift
    "$@" >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted: $*"; }
}

# one_line RC TEXT COMMAND ...: fails unless the command ends with RC after one line on stderr, which contains TEXT
one_line() {
    run "$1" "${@:3}"
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
    contains "$2" "$tmp/err"
}

# ---- compare ----------------------------------------------------------------------------------------

header=op,kernel,block_size,dtype,B,T,C,NH,V,median_ms,p10_ms,p90_ms,launches,l2,gpu,what

# row KERNEL BLOCK_SIZE MEDIAN P10 P90: prints a row of such a file
row() { echo "op,$1,$2,bf16,4,64,768,12,50257,$3,$4,$5,100,cold,Tesla T4,\"kernel $1, \"\"quoted\"\"\""; }

new_folders() {
    command -v "$CXX" >/dev/null || skip "needs a C++ compiler"
    [ -x "$tmp/compare" ] || "$CXX" -O1 -std=c++17 -Wall -Wextra -Werror dev/cuda/compare.cpp -o "$tmp/compare" ||
        fail "compare.cpp does not compile"
    rm -rf "$tmp/old" "$tmp/new"
    mkdir "$tmp/old" "$tmp/new"
    echo "$header" | tee "$tmp/old/op.csv" >"$tmp/new/op.csv"
}
old() { row "$@" >>"$tmp/old/op.csv"; }
new() { row "$@" >>"$tmp/new/op.csv"; }

# verdict KERNEL [CONFIG]: the words after the ratio
verdict() {
    awk -v kernel="$1" -v config="${2-}" '
        $1 == "op" && $2 == kernel && (config == "" || $3 == config) { $1 = $2 = $3 = $4 = $5 = $6 = ""; sub(/^ */, ""); print }' "$tmp/out"
}

test_compare_verdicts() {
    new_folders
    old 1 64 1.000 0.990 1.010; new 1 64 0.970 0.960 0.980 # beyond the threshold and the spread
    old 2 64 1.000 0.990 1.010; new 2 64 1.030 1.020 1.040
    old 3 64 1.000 0.999 1.001; new 3 64 1.015 1.014 1.016 # below the threshold
    old 4 64 1.000 0.999 1.001; new 4 64 1.100 0.990 1.200 # the new spread has the old median
    old 5 64 1.000 0.800 1.200; new 5 64 0.900 0.890 0.910 # the old spread has the new one
    old 6 64 1.000 1.000 1.000; new 6 64 1.000 1.000 1.000
    run 1 "$tmp/compare" "$tmp/old" "$tmp/new"
    want "kernels 1, 2, 3, 6" "$(verdict 1), $(verdict 2), $(verdict 3), $(verdict 6)" "FAST, SLOW, SAME, SAME"
    want "kernel 4" "$(verdict 4)" "SAME within p10 .. p90: measure again"
    want "kernel 5" "$(verdict 5)" "$(verdict 4)"
    contains "op      2  64             1.00000   1.03000  1.030  SLOW" "$tmp/out"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 faster, 4 same, 1 slower, 0 not comparable"
    run 0 "$tmp/compare" --threshold 3.5 "$tmp/old" "$tmp/new"
    want "the last line" "$(tail -n 1 "$tmp/out")" "0 faster, 6 same, 0 slower, 0 not comparable"
    run 1 "$tmp/compare" --threshold 0 "$tmp/old" "$tmp/new"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 faster, 3 same, 2 slower, 0 not comparable"
    # the threshold is that of the slower over the faster, so the verdict is the mirror image
    run 1 "$tmp/compare" "$tmp/new" "$tmp/old"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 faster, 4 same, 1 slower, 0 not comparable"
    # two files, whatever their names
    mv "$tmp/new/op.csv" "$tmp/new/mine"
    run 1 "$tmp/compare" "$tmp/old/op.csv" "$tmp/new/mine"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 faster, 4 same, 1 slower, 0 not comparable"
}

test_compare_configurations() {
    new_folders
    old 1 64 1.000 0.990 1.010; old 1 128 0.900 0.890 0.910; old 1 256 2.000 1.990 2.010
    new 1 64 0.800 0.790 0.810; new 1 128 0.900 0.890 0.910; new 1 512 3.000 2.990 3.010
    old 2 0 1.000 0.990 1.010
    new 10 0 1.000 0.990 1.010
    { echo "$header"; row 1 0 1 1 1 | sed s/^op/gone/; } >"$tmp/old/gone.csv"
    { echo "$header"; row 1 0 1 1 1 | sed s/^op/new/; } >"$tmp/new/new.csv"
    run 0 "$tmp/compare" "$tmp/old" "$tmp/new"
    contains "op        1  128 -> 64      0.90000   0.80000  0.889  FAST" "$tmp/out"
    want "kernels 2 and 10" "$(verdict 2) $(verdict 10)" "GONE NEW"
    want "the ops of one side" "$(awk '$1 == "gone" || $1 == "new" { print $1, $NF }' "$tmp/out" | paste -s -d , -)" "gone GONE,new NEW"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 faster, 0 same, 0 slower, 0 not comparable"
    run 0 "$tmp/compare" --all "$tmp/old" "$tmp/new"
    want "the configurations" "$(for c in 64 128 256 512; do verdict 1 $c; done | paste -s -d ' ' -)" "FAST SAME GONE NEW"
    want "the last line" "$(tail -n 1 "$tmp/out")" "1 faster, 1 same, 0 slower, 0 not comparable"
}

# a CSV of a run at several shapes: each is compared with its own
test_compare_several_shapes() {
    new_folders
    old 1 64 1.000 0.990 1.010; new 1 64 1.000 0.990 1.010
    row 1 64 2.000 1.990 2.010 | sed 's/,4,64,768/,4,128,768/' >>"$tmp/old/op.csv"
    row 1 64 2.500 2.490 2.510 | sed 's/,4,64,768/,4,128,768/' >>"$tmp/new/op.csv"
    run 1 "$tmp/compare" "$tmp/old/op.csv" "$tmp/new/op.csv"
    want "the verdicts" "$(awk '/^op B/ { print $5, $NF }' "$tmp/out" | paste -s -d ' ')" "128 SLOW 64 SAME"
}

test_compare_conditions() {
    new_folders
    local change
    old 1 64 1.000 0.990 1.010
    for change in 's/,4,64,768/,8,64,768/:B 4 -> 8' 's/bf16/fp16/:dtype bf16 -> fp16' 's/cold/hot/:l2 cold -> hot' \
        's/Tesla T4/NVIDIA H200/:gpu Tesla T4 -> NVIDIA H200' 's/,12,50257/,16,50304/:NH 12 -> 16, V 50257 -> 50304'; do
        { echo "$header"; row 1 64 2.000 1.990 2.010 | sed "${change%%:*}"; } >"$tmp/new/op.csv"
        run 0 "$tmp/compare" "$tmp/old" "$tmp/new" # it is slower, but that says nothing
        want "the verdict" "$(verdict 1)" "N/C not comparable: ${change#*:}"
        want "the last line" "$(tail -n 1 "$tmp/out")" "0 faster, 0 same, 0 slower, 1 not comparable"
    done
}

# columns go by their names: others may come, and block_size may be called config
test_compare_columns() {
    new_folders
    old 1 64 1.000 0.990 1.010
    cat >"$tmp/new/op.csv" <<'CSV'
gpu,sm_mhz,config,kernel,op,later,V,NH,C,T,B,dtype,p90_ms,p10_ms,median_ms,what
Tesla T4,1500,64,1,op,x,50257,12,768,64,4,bf16,1.01,0.99,1.00,"commas, and ""quotes"""
CSV
    run 0 "$tmp/compare" --all "$tmp/old" "$tmp/new" # the old side has no clock, the new one no l2
    want "the verdict" "$(verdict 1)" "SAME"
    local change
    for change in 's/,1500,/,1400,/:SAME SM clock 1500 -> 1400 MHz' 's/,1500,/,1430,/:SAME' 's/,1500,/,,/:SAME' 's/,1500,/,0,/:SAME'; do
        cp "$tmp/new/op.csv" "$tmp/old/op.csv"
        sed "${change%%:*}" "$tmp/old/op.csv" >"$tmp/new/op.csv"
        run 0 "$tmp/compare" "$tmp/old" "$tmp/new"
        want "the verdict after $change" "$(verdict 1)" "${change#*:}"
        cp "$tmp/old/op.csv" "$tmp/new/op.csv"
    done
}

test_compare_broken_csv() {
    new_folders
    old 1 64 1.000 0.990 1.010
    local change good=$tmp/good.csv
    { cat "$tmp/old/op.csv"; row 2 64 1.000 0.990 1.010; } >"$good"
    for change in '3s/,cold.*//@op.csv:3: 13 fields, the header has 16' "1s/median_ms/median/@no column 'median_ms'" \
        "1s/block_size/size/@no column 'block_size'" "3s/1\\.000/fast/@op.csv:3: median_ms is 'fast'" "3s/1\\.000/nan/@median_ms is 'nan'" \
        "3s/1\\.000//@median_ms is ''" "3s/op,2/op,2.5/@op.csv:3: kernel is '2.5'" '3s/1\.000/0.900/@are not times in ascending order' \
        '3s/"$//@op.csv:3: a quote is not closed' "3s/op,2/op,1/@op.csv:3: kernel 1, configuration '64' occurs twice" \
        '2,3d@no line of a kernel' "1s/gpu/card/@no column 'gpu'"; do
        sed "${change%%@*}" "$good" >"$tmp/new/op.csv"
        one_line 2 "${change#*@}" "$tmp/compare" "$tmp/old" "$tmp/new"
        want "stdout" "$(cat "$tmp/out")" ""
    done
    head -c -20 "$good" >"$tmp/new/op.csv"
    one_line 2 "op.csv:3: the file ends within a line" "$tmp/compare" "$tmp/old" "$tmp/new"
    : >"$tmp/new/op.csv"
    one_line 2 "op.csv: no line of a kernel" "$tmp/compare" "$tmp/old" "$tmp/new"
}

test_compare_arguments() {
    new_folders
    old 1 64 1.000 0.990 1.010
    local args
    for args in "" "$tmp/old" "$tmp/old $tmp/old $tmp/old" "--al $tmp/old $tmp/old" "--threshold x $tmp/old $tmp/old" \
        "--threshold -1 $tmp/old $tmp/old" "$tmp/old $tmp/old --threshold" "--threshold nan $tmp/old $tmp/old"; do
        # shellcheck disable=SC2086
        one_line 2 "see $tmp/compare --help" "$tmp/compare" $args
    done
    one_line 2 "$tmp/none: No such file" "$tmp/compare" "$tmp/old" "$tmp/none"
    rm "$tmp/new/op.csv"
    one_line 2 "$tmp/new: no *.csv; make bench" "$tmp/compare" "$tmp/old" "$tmp/new"
    cp "$tmp/old/op.csv" "$tmp/new/other.csv"
    one_line 2 "have no op in common" "$tmp/compare" "$tmp/old" "$tmp/new"
    run 0 "$tmp/compare" --help
    contains "--threshold PERCENT" "$tmp/out"
}

# the results in the repository can be read, and are the same as themselves
test_compare_results() {
    new_folders
    run 0 "$tmp/compare" --all dev/cuda/results/h200 dev/cuda/results/h200
    local rows
    rows=$(cat dev/cuda/results/h200/*.csv | grep -vc '^op,')
    want "the last line" "$(tail -n 1 "$tmp/out")" "0 faster, $rows same, 0 slower, 0 not comparable"
}

# ---- profile ----------------------------------------------------------------------------------------

# Creates a stand-in for an op, $tmp/bin/op, and for ncu. $tmp/launches has a line per launch of the op, NAME|GRID|VALUES,
# where VALUES are METRIC=UNIT:NUMBER. ncu rejects the metrics named in $tmp/lacking, as one that the GPU does not have.
new_op() {
    export REPORT=$tmp/op.ncu-rep
    rm -rf "${tmp:?}/bin"
    mkdir "$tmp/bin"
    : >"$tmp/lacking"
    : >"$tmp/calls"
    printf '#!/bin/sh\necho "GPU 0: Tesla T4"\n' >"$tmp/bin/nvidia-smi"
    cat >"$tmp/bin/op" <<'SH'
#!/bin/sh
case " $* " in
*" --help "*) echo "  --block-size"; exit 0 ;;
" 7 "*) echo "op: no kernel 7, there are 1 6" >&2; exit 2 ;;
*" --list "*) echo "6  one warp per row (promoted)"; exit 0 ;;
esac
echo "op, bf16, B 4 T 64 C 768 NH 12 V 50257"
echo "Tesla T4, 40 SMs, clocks up to 1590 MHz"
[ ! -e "${0%/bin/op}/says" ] || cat "${0%/bin/op}/says"
SH
    cat >"$tmp/bin/ncu" <<'SH'
#!/bin/bash
dir=$(dirname "$(dirname "$0")")
echo "$*" >>"$dir/calls"
skip=0 report=
[ "$1" != --import ] || { cat "$2" && exit; }
while [[ $1 == --* ]]; do
    case $1 in
    --csv | --force-overwrite) shift; continue ;;
    --export) report=$2 ;;
    --log-file) log=$2 ;;
    --metrics) metrics=$2 ;;
    --launch-skip) skip=$2 ;;
    --launch-count) count=$2 ;;
    --page | --print-units | --clock-control | --cache-control) ;;
    *) echo "ncu: what is $1?"; exit 9 ;;
    esac
    shift 2
done
"$@"
echo "==PROF== Connected to process 4711 ($1)" >"$log"
while read -r lacking; do
    [[ ,$metrics, != *,$lacking[.,]* ]] || { echo "==ERROR== Failed to access the following 1 metrics: $lacking.sum" >>"$log"; exit 1; }
done <"$dir/lacking"
awk -F '|' -v metrics="$metrics" -v skip="$skip" -v count="$count" '
    BEGIN { n = split(metrics, metric, ",") }
    NR <= skip || NR > skip + count { next }
    {
        num = split($3, pair, " ")
        for (i = 1; i <= n; i++) {
            cells[i] = "n/a"
            units[i] = ""
            for (k = 1; k <= num; k++) {
                if (index(pair[k], metric[i] "=") == 1) {
                    split(substr(pair[k], length(metric[i]) + 2), part, ":")
                    units[i] = part[1]
                    cells[i] = part[2]
                }
            }
        }
        if (!any++) {
            printf "\"ID\",\"Process ID\",\"Process Name\",\"Host Name\",\"Kernel Name\",\"Context\",\"Stream\",\"Block Size\",\"Grid Size\",\"Device\",\"CC\""
            for (i = 1; i <= n; i++) { printf ",\"%s\"", metric[i] }
            printf "\n\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\""
            for (i = 1; i <= n; i++) { printf ",\"%s\"", units[i] }
            print ""
        }
        name = ($1 ~ /^op_/ ? "void " $1 "<(int)3>" : $1) "(float *, const float *, unsigned long)"
        printf "\"%d\",\"4711\",\"op\",\"127.0.0.1\",\"%s\",\"1\",\"7\",\"(64, 1, 1)\",\"(%s, 1, 1)\",\"0\",\"7.5\"", NR - skip - 1, name, $2
        for (i = 1; i <= n; i++) { printf ",\"%s\"", cells[i] }
        print ""
    }
    END { if (!any) { print "==WARNING== No kernels were profiled." } }' "$dir/launches" >>"${report:-$log}" # with a report, nothing else is said
echo "==PROF== Disconnected from process 4711" >>"$log"
SH
    chmod +x "$tmp"/bin/*
    PATH=$tmp/bin:$PATH
}

# values NS SM DRAM L2 TENSOR: prints the values of a launch
values() {
    local peak=avg.pct_of_peak_sustained_elapsed stall=smsp__average_warps_issue_stalled
    echo "gpu__time_duration.sum=nsecond:$1 sm__throughput.$peak=%:$2 dram__throughput.$peak=%:$3 lts__throughput.$peak=%:$4" \
        "sm__pipe_tensor_cycles_active.$peak=%:$5 dram__bytes.sum=byte:201,326,592 lts__t_sector_hit_rate.pct=%:33.25" \
        "sm__warps_active.avg.pct_of_peak_sustained_active=%:71.53 launch__registers_per_thread=register/thread:42" \
        "launch__shared_mem_per_block=Kbyte/block:1.15 l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum=:1,234" \
        "device__attribute_multiprocessor_count=:40 ${stall}_long_scoreboard_per_issue_active.ratio=inst:12.34" \
        "${stall}_wait_per_issue_active.ratio=inst:1.5 ${stall}_barrier_per_issue_active.ratio=inst:3.25"
}

# the launches of a program: the harness's, those of declare, the check's (given), the harness's, and those that are timed
launches() {
    local check=("$@")
    {
        echo "bench_probe_kernel|1|"
        echo "set_state_kernel|1|$(values 900 99 99 99 99)"
        printf '%s\n' "bench_checksum_kernel|64|" "bench_checksum_kernel|64|"
        printf '%s\n' "${check[@]}"
        printf '%s\n' "bench_checksum_kernel|64|" "bench_delay_kernel|1|" "bench_read_kernel|1024|" \
            "vendor_matmul|64|$(values 800 99 99 99 99)" "op_kernel1|64|$(values 700 99 99 99 99)"
    } >"$tmp/launches"
}

test_profile_table() {
    new_op
    launches "op_rows_kernel6|16384|$(values 49,210 38.1 91.26 55 0)" "op_sum_kernel6|8|$(values 2345.6 3 9 8 0)"
    run 0 env REPORT="$tmp/kept.ncu-rep" dev/cuda/profile.sh "$tmp/bin/op" 6 64 -B 8
    contains '"op_rows_kernel6' <(sed 's/void //' "$tmp/kept.ncu-rep") # ncu's report stays
    contains ", by ncu; its report: $tmp/kept.ncu-rep" "$tmp/out"
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 0
    contains "op 6, config 64, -B 8, L2 cold, by ncu" "$tmp/out"
    contains "6  one warp per row (promoted)" "$tmp/out"
    contains "Tesla T4, 40 SMs" "$tmp/out"
    contains "launch 1: op_rows_kernel6<(int)3>, grid (16384, 1, 1), block (64, 1, 1)" "$tmp/out"
    want "launch 1" "$(grep '^ *1 ' "$tmp/out" | tr -s ' ')" \
        " 1 49.21 38.1 91.3 55.0 0.0 201.33 33.2 71.5 42 1150 1234 long_scoreboard 12.34, barrier 3.25 memory (DRAM)"
    want "launch 2" "$(grep '^ *2 ' "$tmp/out" | sed 's/.*3.25 *//')" "launch (8 of 40 SMs have a block)"
    contains "   sum     51.56  2 launches, one after the other" "$tmp/out"
    want "calls of ncu" "$(wc -l <"$tmp/calls")" 3 # a list, the counters, what the report says
    contains "--launch-skip 4 --launch-count 2 $tmp/bin/op 6 --repeats 1 -B 8 --block-size 64" "$tmp/calls"
    contains "--clock-control none --cache-control all " "$tmp/calls"
    # the launches are in one run what they were in the other, and --hot leaves the cache alone
    launches "op_kernel6|16384|$(values 49,210 38.1 91.26 55 0)"
    sed -i s/--block-size/--config/ "$tmp/bin/op"
    run 0 dev/cuda/profile.sh "$tmp/bin/op" 6 2 --hot
    contains "--cache-control none " "$tmp/calls"
    contains "--launch-skip 4 --launch-count 1 $tmp/bin/op 6 --repeats 1 --hot --config 2" "$tmp/calls"
    ! grep -q '^ *sum ' "$tmp/out" || fail "a sum of one launch"
}

test_profile_bounds() {
    new_op
    local case
    # us, SM, DRAM, L2, tensor, blocks: the verdict
    for case in '50000 40 60 50 0 99:memory (DRAM)' '50000 40 59.9 50 0 99:latency (too few warps in flight)' \
        '50000 40 72 90 0 99:memory (DRAM)' '50000 40 71 90 0 99:L2' '50000 90 70 80 80 99:compute (tensor)' '50000 90 70 80 20 99:compute (fp32/alu)' \
        '50000 55 20 20 61 99:compute (tensor)' '4999 20 20 20 0 99:launch (shorter than 5 us)' '50000 20 20 20 0 40:latency (too few warps in flight)' \
        '50000 20 20 20 0 39:launch (39 of 40 SMs have a block)' '4000 20 80 20 0 39:memory (DRAM)' '50000 20 n/a 20 0 99:unknown: ncu lacks a counter'; do
        read -r -a v <<<"${case%%:*}"
        launches "op_kernel6|${v[5]}|$(values "${v[@]:0:5}")"
        run 0 dev/cuda/profile.sh "$tmp/bin/op" 6
        want "the verdict of $case" "$(tail -n 1 "$tmp/out" | sed 's/.*barrier 3.25 *//')" "${case#*:}"
    done
}

# a GPU that lacks some metrics: they are left out
test_profile_missing_metrics() {
    new_op
    launches "op_kernel6|16384|$(values 49,210 38.1 91.26 55 0)"
    printf '%s\n' smsp__average_warps_issue_stalled_gmma_per_issue_active sm__pipe_tensor_cycles_active >"$tmp/lacking"
    run 0 dev/cuda/profile.sh "$tmp/bin/op" 6
    want "calls of ncu" "$(wc -l <"$tmp/calls")" 5
    want "launch 1" "$(grep '^ *1 ' "$tmp/out" | tr -s ' ')" \
        " 1 49.21 38.1 91.3 55.0 - 201.33 33.2 71.5 42 1150 1234 long_scoreboard 12.34, barrier 3.25 memory (DRAM)"
    echo launch__grid_size >"$tmp/lacking" # then nothing can be listed, and it does not try for ever
    one_line 1 "Failed to access the following 1 metrics" dev/cuda/profile.sh "$tmp/bin/op" 6
}

test_profile_errors() {
    new_op
    launches "op_kernel6|16384|$(values 49,210 38.1 91.26 55 0)"
    local args
    for args in "" "$tmp/bin/op" "$tmp/bin/op six" "$tmp/bin/op 6 64 --check" "$tmp/bin/op 6 64 --no-verify"; do
        # shellcheck disable=SC2086
        one_line 2 "see dev/cuda/profile.sh --help" dev/cuda/profile.sh $args
    done
    one_line 2 "no kernel 7, there are 1 6" dev/cuda/profile.sh "$tmp/bin/op" 7
    one_line 1 "make none" dev/cuda/profile.sh "$tmp/none" 6
    one_line 1 "no /no/ncu: install Nsight Compute" env NCU=/no/ncu dev/cuda/profile.sh --ready
    run 0 dev/cuda/profile.sh --ready
    launches
    sed -i '/^$/d' "$tmp/launches"
    one_line 1 "kernel 6 launches nothing" dev/cuda/profile.sh "$tmp/bin/op" 6
    echo "skip kernel 6 (one warp): needs code for sm_90a, but the GPU is sm_75 and the program is compiled for sm_75" >"$tmp/says"
    one_line 1 "nothing to profile: skip kernel 6 (one warp): needs code for sm_90a" dev/cuda/profile.sh "$tmp/bin/op" 6
    echo "error: out of memory" >"$tmp/says"
    : >"$tmp/launches"
    one_line 1 "ncu profiled no kernel (status 0): error: out of memory" dev/cuda/profile.sh "$tmp/bin/op" 6
    rm "$tmp/says"
    one_line 1 "==WARNING== No kernels were profiled." dev/cuda/profile.sh "$tmp/bin/op" 6
    printf '#!/bin/sh\necho "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"\nexit 1\n' \
        >"$tmp/bin/ncu"
    one_line 1 "NVreg_RestrictProfilingToAdminUsers=0" dev/cuda/profile.sh "$tmp/bin/op" 6
    printf '#!/bin/sh\nexit 9\n' >"$tmp/bin/nvidia-smi"
    one_line 1 "no GPU here" dev/cuda/profile.sh --ready
}

# ---- sass -------------------------------------------------------------------------------------------

# Creates a stand-in for cuobjdump: two architectures, functions whose mangled names are easily mistaken
new_cuobjdump() {
    rm -rf "${tmp:?}/bin" "$tmp/cuda"
    mkdir -p "$tmp/bin" "$tmp/cuda"
    cp dev/cuda/sass.sh dev/cuda/op_text.sh "$tmp/cuda/"
    echo '__global__ void helper_kernel9(int* out) {}' >"$tmp/cuda/op.cu"
    echo program >"$tmp/cuda/op"
    printf '#!/bin/sh\n' >"$tmp/bin/nvdisasm"
    cat >"$tmp/bin/cuobjdump" <<'SH'
#!/bin/bash
[ "$(cat "$2")" = program ] || { echo "cuobjdump fatal   : no device code"; echo "cuobjdump fatal   : no device code" >&2; exit 1; }
names=(_Z10op_kernel16Tiling _Z11op_kernel10Pf _Z10op_kernel6ILi3EEvPf _Z16op_sum_kernel6_bPf _Z13other_kernel6Pf _Z14helper_kernel9Pi _Z18bench_probe_kernelPi)
for arch in 80 90a; do
    printf '\nFatbin elf code:\n================\narch = sm_%s\ncode version = [1,8]\n\n' $arch
    if [ "$1" = -res-usage ]; then
        printf 'Resource usage:\n Common:\n  GLOBAL:0\n'
        for name in "${names[@]}"; do
            shared=$([ $arch = 80 ] || echo 1)$([ $arch = 80 ] && echo 0 || echo 024) stack=0
            [[ $name != *sum* ]] || shared=$((shared + 128)) stack=48
            printf ' Function %s:\n  REG:4%s STACK:%s SHARED:%s LOCAL:0 CONSTANT[0]:412 TEXTURE:0 SURFACE:0 SAMPLER:0\n' "$name" ${#arch} $stack $shared
        done
        continue
    fi
    for name in "${names[@]}"; do
        printf '\tcode for sm_%s\n\t\tFunction : %s\n\t.headerflags\t@"EF_CUDA_SM80"\n' $arch "$name"
        cat <<'ASM'
        /*0000*/                   MOV R1, c[0x0][0x28] ;                      /* 0x00000a0000017a02 */
                                                                               /* 0x000fe40000000f00 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64+0x10] ;       /* 0x0000660000057a02 */
                                                                               /* 0x000fe20000000f00 */
        /*0020*/             @UP1  UTMALDG.2D [UR8], [UR4] ;                   /* 0x0000660000057a02 */
        /*0030*/                   HFMA2.MMA R2, -RZ, RZ, 0, 0 ;               /* 0x0000660000057a02 */
        /*0040*/                   STL [R1+0x8], R4 ;                          /* 0x0000660000057a02 */
        /*0050*/                   LDL R4, [R1+0x8] ;                          /* 0x0000660000057a02 */
        /*0060*/                   LDL R5, [R1+0xc] ;                          /* 0x0000660000057a02 */
        /*0070*/               @P2 EXIT ;                                      /* 0x0000660000057a02 */
        /*0080*/                   BRA 0x80;                                   /* 0x0000660000057a02 */
        /*0090*/                   NOP;                                        /* 0x0000660000057a02 */
ASM
        printf '\t\t..........\n\n'
    done
done
SH
    chmod +x "$tmp"/bin/*
    PATH=$tmp/bin:$PATH
}
functions() { sed -n 's/^==== \(void \)\{0,1\}\([a-z_0-9]*\).*, \(sm_[0-9a]*\) ====$/\2:\3/p' "$tmp/out" | paste -s -d ' ' -; }

test_sass_functions() {
    new_cuobjdump
    command -v c++filt >/dev/null || command -v cu++filt >/dev/null || skip "needs c++filt"
    run 0 "$tmp/cuda/sass.sh" "$tmp/cuda/op" 6
    want "the functions" "$(functions)" "op_kernel6:sm_80 op_sum_kernel6_b:sm_80 op_kernel6:sm_90a op_sum_kernel6_b:sm_90a"
    want "what they use" "$(grep -c 'registers 42, shared memory 0 B, local memory 0 B (LDL 2, STL 1), instructions 9$' "$tmp/out")" 1
    want "what they use on 9.0" "$(grep -c 'registers 43, shared memory 128 B, local memory 48 B (LDL 2, STL 1), instructions 9$' "$tmp/out")" 1
    want "the counts" "$(grep -c '^LDG 1, UTMALDG 1, HFMA2 1, BRA 1$' "$tmp/out")" 4
    contains '    0010  @!P0 LDG.E.128.CONSTANT R4, [R2.64+0x10]' "$tmp/out"
    ! grep -q 0x0000660000057a02 "$tmp/out" || fail "the encoding is printed"
    # kernel 1 takes a Tiling, whose mangled name begins with a 6
    run 0 "$tmp/cuda/sass.sh" "$tmp/cuda/op" 1
    want "the functions" "$(functions)" "op_kernel1:sm_80 op_kernel1:sm_90a"
    run 0 "$tmp/cuda/sass.sh" "$tmp/cuda/op" 9 # defined in op.cu, under another name
    want "the functions" "$(functions)" "helper_kernel9:sm_80 helper_kernel9:sm_90a"
    { echo '#pragma once' && cat "$tmp/cuda/op.cu"; } >"$tmp/cuda/op.cuh" # or in op.cuh
    echo '#include "op.cuh"' >"$tmp/cuda/op.cu"
    run 0 "$tmp/cuda/sass.sh" "$tmp/cuda/op" 9
    want "the functions of the header" "$(functions)" "helper_kernel9:sm_80 helper_kernel9:sm_90a"
    run 0 "$tmp/cuda/sass.sh" "$tmp/cuda/op" '' '^other_'
    want "the functions" "$(functions)" "other_kernel6:sm_80 other_kernel6:sm_90a"
}

test_sass_errors() {
    new_cuobjdump
    run 1 "$tmp/cuda/sass.sh" "$tmp/cuda/op" 5
    contains "error: no function of op is called op_kernel5; choose with FUNCTION=regex from:" "$tmp/err"
    want "the list" "$(tail -n +2 "$tmp/err" | tr -d ' ' | paste -s -d ' ' -)" "helper_kernel9 op_kernel1 op_kernel10 op_kernel6 op_sum_kernel6_b other_kernel6"
    one_line 2 "KERNEL is a number, not '6x'" "$tmp/cuda/sass.sh" "$tmp/cuda/op" 6x
    one_line 2 "not a regular expression" "$tmp/cuda/sass.sh" "$tmp/cuda/op" '' '('
    one_line 2 "exclude each other" "$tmp/cuda/sass.sh" "$tmp/cuda/op" 6 op
    one_line 2 "KERNEL=number or FUNCTION=regex" "$tmp/cuda/sass.sh" "$tmp/cuda/op" ''
    one_line 2 "see $tmp/cuda/sass.sh --help" "$tmp/cuda/sass.sh"
    one_line 1 "is not there" "$tmp/cuda/sass.sh" "$tmp/cuda/none" 6
    one_line 1 "cuobjdump cannot read $tmp/cuda/op.cu: cuobjdump fatal" "$tmp/cuda/sass.sh" "$tmp/cuda/op.cu" 6
    [ ! -e /usr/local/cuda/bin/cuobjdump ] || return 0
    rm "$tmp/bin/cuobjdump"
    if ! command -v cuobjdump >/dev/null; then one_line 1 "no cuobjdump: it is part of the CUDA toolkit" "$tmp/cuda/sass.sh" --ready; fi
}

# the real thing, from make to the machine code
test_sass_of_an_op() {
    export PATH=$PATH:/usr/local/cuda/bin
    command -v nvcc >/dev/null || skip "needs nvcc"
    dev/cuda/sass.sh --ready || skip "needs cuobjdump and nvdisasm"
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cp -r llmc "$tmp/tree"
    cp dev/cuda/*.* dev/cuda/Makefile "$tmp/tree/dev/cuda"
    run 0 make -C "$tmp/tree/dev/cuda" --no-print-directory sass OP=layernorm_forward KERNEL=7 GPU_COMPUTE_CAPABILITY=80
    # one for each number of vectors: LAYERNORM_FORWARD_MAX_VECS in 16 bits
    want "the functions" "$(functions | tr ' ' '\n' | sort | uniq -c | tr -s ' ')" " 8 layernorm_forward_kernel7:sm_80"
    want "shared memory" "$(grep -c 'shared memory 128 B, local memory 0 B (LDL 0, STL 0)' "$tmp/out")" 8
    want "the barriers and shuffles" "$(grep -c ' BAR 2, SHFL 10' "$tmp/out")" 8
    [ "$(grep -c '  EXIT$' "$tmp/out")" -ge 8 ] || fail "a function without an end"
}

# ---- make -------------------------------------------------------------------------------------------

test_make_targets() {
    command -v make >/dev/null || skip "needs make"
    new_folders
    new_op
    run 0 make -s -C dev/cuda help
    local target
    for target in compare profile sass; do contains "make $target " "$tmp/out"; done
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cp dev/cuda/{Makefile,nvcc.mk,compare.cpp,csv.h,profile.sh,op_text.sh,new.sh} "$tmp/tree/dev/cuda"
    cd "$tmp/tree/dev/cuda"
    old 1 64 1.000 0.990 1.010; new 1 64 1.030 1.020 1.040; new 1 128 1.100 1.090 1.110
    run 2 make compare OLD="$tmp/old" NEW="$tmp/new"
    contains "0 faster, 0 same, 1 slower, 0 not comparable" "$tmp/out"
    run 0 make compare OLD="$tmp/old" NEW="$tmp/new" ALL=yes THRESHOLD=5
    want "the configurations" "$(verdict 1 64) $(verdict 1 128)" "SAME NEW"
    run 2 make compare OLD="$tmp/old"
    contains "OLD and NEW are wanted" "$tmp/err"
    for target in profile sass; do
        run 2 make $target KERNEL=6
        contains "error: no OP: make $target OP=layernorm_forward KERNEL=6" "$tmp/err"
        echo >op.cu
        run 2 make $target OP=op
        contains "error: no KERNEL=number: make $target OP=op KERNEL=1" "$tmp/err"
    done
    for target in cpu check-cpu; do # before anything is compiled
        run 2 make -j2 $target OP='op nosuch'
        contains "error: OP='nosuch' is no .cu file here: make $target OP=layernorm_forward" "$tmp/err"
        [ ! -e ../../build/dev_cuda/cpu ] || fail "$target builds something"
    done
    echo >op_more.cu
    run 2 make op_m BIN_DIR="$tmp/nothing"
    contains "error: no op and no target 'op_m', did you mean op_more?" "$tmp/err"
    rm op_more.cu
    run 0 make -n cpu
    contains "every op, 1 programs: this takes many minutes; one of them: make cpu OP=layernorm_forward" "$tmp/out"
    # an op that is built already
    launches "op_kernel6|16384|$(values 49,210 38.1 91.26 55 0)"
    cat >"$tmp/bin/nvcc" <<'SH'
#!/bin/sh
while [ "$1" != -o ]; do shift; done
cp "$(dirname "$0")/op" "$2"
SH
    chmod +x "$tmp/bin/nvcc"
    run 0 make profile OP=op KERNEL=6 CONFIG=64 FLAGS='-B 8' NVCC="$tmp/bin/nvcc"
    contains "./op 6 --repeats 1 -B 8 --block-size 64" "$tmp/calls"
    contains "memory (DRAM)" "$tmp/out"
    run 0 make clean
    [ ! -e op ] || fail "make clean leaves the op"
    [ ! -e "$tmp/tree/build/dev_cuda" ] || fail "make clean leaves compare"
}

# make same-sass on two small kernels: a new name, a new comment and a new kernel are no difference; another number is one
test_same_sass() {
    [ -x "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)" ] || skip "needs nvcc"
    command -v git >/dev/null || skip "needs git"
    mkdir -p "$tmp/same/dev/cuda"
    cp dev/cuda/same_sass.sh "$tmp/same/dev/cuda/"
    cd "$tmp/same"
    touch Makefile
    echo '__global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }' >train_gpt2.cu
    printf '__global__ void %s(float* x) { __shared__ float s[32]; s[threadIdx.x] = *x; __syncthreads(); *x = s[%s]; }\n' \
        fill 3 other 4 >dev/cuda/op.cu
    git -c init.defaultBranch=main init -q . && git add . && git -c user.name=t -c user.email=t@t commit -qm base
    compare() { PRECISIONS=BF16 ARCHS=80 dev/cuda/same_sass.sh main >"$tmp/out" 2>&1; }
    printf '__global__ void before(float* x) { __shared__ float s[32]; s[5] = *x; __syncthreads(); *x = s[threadIdx.x]; }\n' |
        cat - dev/cuda/op.cu >longer.cu && sed "s/fill/filled/" longer.cu >dev/cuda/op.cu # all numbers of labels are others
    sed -i 's|$| // as before|' train_gpt2.cu
    compare || { cat "$tmp/out" && fail "renamed and moved kernels are seen as others"; }
    contains "moved dev/cuda/op.cu/BF16/80: _Z4fillPf, now op.BF16.80 _Z6filledPf" "$tmp/out"
    contains "2 of 2 compiled and compared, 0 differences" "$tmp/out"
    sed -i 's/2.0f/3.0f/' train_gpt2.cu
    compare && fail "another number is not seen"
    contains "FAIL train_gpt2.cu BF16 80: " "$tmp/out"
    git checkout -q train_gpt2.cu
    sed -i '/other/d' dev/cuda/op.cu
    compare && fail "a kernel that is gone is not seen"
    contains "FAIL gone: dev/cuda/op.cu/BF16/80: _Z5otherPf" "$tmp/out"
}

# make new, make diff, and names that are misspelt
test_make_new_and_diff() {
    command -v make >/dev/null || skip "needs make"
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/cuda"
    cp dev/cuda/{Makefile,nvcc.mk,op_text.sh,new.sh} "$tmp/tree/dev/cuda"
    cd "$tmp/tree/dev/cuda"
    run 0 make new OP=rope_forward
    [ -s rope_forward.cu ] && ! grep -q '@OP@' rope_forward.cu || fail "make new writes no op"
    contains 'bench_main(argc, argv, "rope_forward", declare' rope_forward.cu
    contains "make cpu OP=rope_forward && ./rope_forward_cpu --check" "$tmp/out"
    cp rope_forward.cu before
    run 2 make new OP=rope_forward
    contains "error: rope_forward.cu is there already" "$tmp/err"
    cmp before rope_forward.cu
    run 2 make new OP=Rope
    contains "error: OP='Rope' is no name of an op" "$tmp/err"
    local name
    for name in 'help:a target of the Makefile here' 'plot:a target of' 'test_gpt2:a target of' 'int:a word of C++, or of' 'while:a word of' 'out:a word of'; do
        run 2 make new OP="${name%%:*}"
        contains "error: OP='${name%%:*}' is ${name#*:}" "$tmp/err"
        [ ! -e "${name%%:*}.cu" ] || fail "${name%%:*}.cu is written"
    done
    mkdir notes
    run 2 make new OP=notes
    contains "error: notes is there already" "$tmp/err"
    run 2 make new
    contains "error: no OP: make new OP=rope_forward" "$tmp/err"
    # of two kernels, the second of them in a header of its own, with other numbers in names
    printf '%s\n' '#include "bench.h"' '// ---- kernel 1: one ----' 'void twice_kernel1(int x1) {}' 'void same();' '// ---- kernel 12: other ----' 'void o();' \
        '#include "twice.cuh"' 'static void declare(Bench& b) {}' >twice.cu
    printf '%s\n' '#pragma once' '// ---- kernel 2: two ----' 'void twice_kernel2(int x1) {}' 'void two();' 'void same();' >twice.cuh
    run 0 make diff OP=twice FROM=1 TO=2
    want "what changes" "$(grep '^[-+ ][^-+]' "$tmp/out")" '-// ---- kernel 1: one ----
+// ---- kernel 2: two ----
 void twice_kernel2(int x1) {}
+void two();
 void same();'
    run 2 make diff OP=twice FROM=1 TO=3
    contains "error: twice.cu has no section of kernel 3; those it has: 1 2 12" "$tmp/err"
    run 2 make diff OP=twice FROM=1 TO=x
    contains "not 'x'" "$tmp/err"
    run 2 make diff OP=twice
    contains "error: no FROM and TO: make diff OP=twice FROM=1 TO=2" "$tmp/err"
    run 2 make diff
    contains "error: no OP: make diff OP=layernorm_forward FROM=1 TO=2" "$tmp/err"
    # names
    touch rope_backward.cu my_rope.cu softmax.cu
    for name in rope_forwrad:rope_forward rope_fwd:rope_forward 'rope:rope_forward or rope_backward or my_rope' softmx:softmax; do
        run 2 make cpu OP="${name%%:*}"
        contains "error: OP='${name%%:*}' is no .cu file here, did you mean ${name#*:}" "$tmp/err"
        run 2 make "${name%%:*}"
        contains "error: no op and no target '${name%%:*}', did you mean ${name#*:}" "$tmp/err"
    done
    run 0 make -n cpu OPS=softmax
    ! grep "every op" "$tmp/out" || fail "OPS=softmax is not every op"
    run 2 make attention
    contains "error: no op and no target 'attention' (make help lists the targets)" "$tmp/err"
}

# bench_pairs.sh: which run is whose, medians of steps, ratios of pairs, and a program that fails
test_bench_pairs() {
    local dir=$tmp/pairs
    mkdir -p "$dir"
    cat >"$dir/program" <<'END'
#!/usr/bin/env bash
echo "$0 $*" >>"${0%/*}/calls"
case " $* " in
*" --help all "*) echo --log-every ;;
*" fail "*) echo "error: no such thing" >&2 && exit 1 ;;
*" silent "*) ;;
*" --prompt "*) echo "[loaded; generated: 12 tokens, $ms.0 us a step, 5 tok/s]" >&2 ;;
*) for each in 900 900 $((ms + 5)) "$ms" 1 $((ms + 6)) $((ms - 1)); do echo "step 1/7 | loss 1.0 | lr 1 | $each.50 ms | 3% | x"; done ;;
esac
END
    sed '2i ms=100' "$dir/program" >"$dir/old"
    sed '2i ms=102' "$dir/program" >"$dir/new"
    chmod +x "$dir/old" "$dir/new"
    pairs() { dev/test/bench/bench_pairs.sh "$@" >"$tmp/out" 2>"$tmp/err" || echo $?; }
    want "exit code" "$(pairs --pairs 3 "$dir/old" "$dir/new" -x 7)" ""
    want "a pair" "$(head -n 1 "$tmp/out")" "old 100.5 new 102.5 ratio 1.0199"
    want "the end" "$(tail -n 1 "$tmp/out")" "new/old: median 1.0199, mean 1.0199 +- 0.0000 (95%), 3 pairs"
    want "the order" "$(sed -n 's|.*/\([a-z]*\) -x 7 --log-every 1$|\1|p' "$dir/calls" | tr '\n' ' ')" "old new new old old new "
    want "exit code" "$(pairs --pairs 2 "$dir/old" "$dir/new" --prompt '')" ""
    want "texts" "$(head -n 1 "$tmp/out")" "old 100.0 new 102.0 ratio 1.0200"
    want "a run fails" "$(pairs "$dir/old" "$dir/new" fail)" 1
    contains "error: $dir/old: exit code 1" "$tmp/err"
    want "no times" "$(pairs "$dir/old" "$dir/new" silent)" 1
    contains "error: $dir/old printed no times" "$tmp/err"
    want "usage" "$(pairs --pairs 1 "$dir/old" "$dir/new" x)$(pairs "$dir/old")$(pairs "$dir/none" "$dir/new" x)" 221
}

tests=(make_new_and_diff same_sass compare_verdicts compare_several_shapes compare_configurations compare_conditions compare_columns compare_broken_csv compare_arguments
    compare_results profile_table profile_bounds profile_missing_metrics profile_errors sass_functions sass_errors
    sass_of_an_op make_targets bench_pairs)
run_tests_once "$@"
