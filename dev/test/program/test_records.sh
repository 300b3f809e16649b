#!/usr/bin/env bash
# dev/measured/records.sh: the tables of dev/measured/README.md are what it writes from records.csv and dev/cuda/results.
. "$(dirname "$0")/../test.sh"
columns=date,run,commit,card,group,model,quantity,B,T,program,values,unit,command,idea

# run RC [ARGUMENT]: runs the script in a tree with made-up records; fails unless the exit code is RC
run() {
    local rc=0 wanted=$1
    shift
    "$tmp/tree/dev/measured/records.sh" "$@" >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted"; }
}

# tree MARK: makes a README.md with this mark and a stale table, above and below a line of text
tree() {
    rm -rf "$tmp/tree"
    mkdir -p "$tmp/tree/dev/measured" "$tmp/tree/dev/cuda/results/t4"
    cp dev/measured/records.sh "$tmp/tree/dev/measured/"
    printf '%s\n' above '' "<!-- $1 -->" '|stale|' '|---|' '' below >"$tmp/tree/dev/measured/README.md"
    readme=$tmp/tree/dev/measured/README.md
    csv=$tmp/tree/dev/measured/records.csv
    echo $columns >"$csv"
}

row() { want "row $1" "$(sed -n "$((3 + $1))p" "$readme")" "$2"; } # NUMBER TEXT: of the table; row 1 is its head

test_up_to_date() {
    dev/measured/records.sh --check || fail "run dev/measured/records.sh"
    local group
    # a group without a table is a misspelt one, except for details that the page leaves to the file
    for group in $(cut -d , -f 5 dev/measured/records.csv | sed -e 1d -e 's/ /_/g' | sort -u); do
        case $group in exchanges | fusing | operations | Muon_rate) continue ;; esac
        grep -qE "^<!-- records: ${group//_/ }(, plain)? -->" dev/measured/README.md || fail "no table of the group ${group//_/ }"
    done
    [ "$(grep -c '^|20' dev/measured/README.md)" -ge 10 ] || fail "the board has fewer than ten rows"
    tree 'records: training'
    cp dev/measured/{README.md,records.csv} "$tmp/tree/dev/measured/"
    cp -r dev/cuda/results/h200 "$tmp/tree/dev/cuda/results/"
    run 0 --check
    sed -i '0,/93.94 94.16/s//93.94 94.36/' "$csv"
    run 1 --check
    contains '> |124M|64|94.15|696k|113.60 (1.21)|127.02 (1.35)|H200|2026-11-28|' "$tmp/err"
    contains "is stale" "$tmp/err"
}

# the newest run of each key, ratios within it, medians of times, means of losses
test_newest() {
    tree 'records: speed'
    cat >>"$csv" <<'CSV'
2026-01-01,a,,T4,speed,124M,,4,1024,ours,9,ms,,
2026-01-01,a,,T4,speed,124M,,4,1024,theirs,1,ms,,
2026-01-01,a,,T4,speed,124M,loss,,,ours,2.5 2.6 3.0,,,
2026-01-02,b,,T4,speed,124M,,4,1024,ours,8.0 2.0 4.0,ms,,
2026-01-02,b,,T4,other,124M,,4,1024,theirs,1,ms,,
2026-01-02,b,,T4,speed,124M,,4,1024,theirs,5.0 6.00,ms,,
2026-01-02,b,,T4,speed,124M,long; slow,4,2048,ours,16,ms,,
2026-01-02,c,,L4,speed,124M,,4,1024,ours,3.0,ms,,
2026-01-02,c,,L4,speed,124M,rate,,,ours,10,TFLOP/s,,
2026-01-02,c,,L4,speed,124M,rate,,,theirs,4,TFLOP/s,,
CSV
    run 0
    row 1 '|what|B|T|ours|tokens/s|theirs|machine|date|'
    row 2 '|---|---|---|---|---|---|---|---|'
    row 3 '|124M|4|1024|3.0 ms|1365k||L4|2026-01-02|'
    row 4 '|124M, rate|||10 TFLOP/s||4 TFLOP/s (2.50)|L4|2026-01-02|'
    row 5 '|124M|4|1024|4.0 ms|1024k|5.50 ms (1.38)|T4|2026-01-02|'
    row 6 '|124M, long, slow|4|2048|16 ms|512k||T4|2026-01-02|'
    row 7 '|124M, loss|||2.7|||T4|2026-01-01|'
    row 8 ''
    row 9 below
    run 0 --check
    sed -i 's/speed -->/speed, plain -->/' "$readme"
    sed -i -e '/L4/d' -e '/rate\|loss\|long/d' "$csv"
    run 0
    row 1 '|T4, 2026-01-02|B|ours, ms|theirs, ms|'
    row 3 '|124M|4|4.0|5.50|'
    row 4 ''
}

test_board_and_chart() {
    tree board
    cat >>"$csv" <<'CSV'
2026-01-01,a,abc,T4,training,124M,,4,1024,train_gpt2cu,16,ms,,first; naive
2026-01-02,b,def,T4,training,124M,,4,1024,train_gpt2cu,8.0 9.0,ms,,faster
2026-01-02,b,def,T4,training,124M,,4,1024,llm.c with cuDNN,17.0,ms,,
2026-01-02,b,def,T4,training,124M,,4,1024,PyTorch 2.11,20.0,ms,,
2026-01-03,c,,T4,training,355M,,4,1024,train_gpt2cu,32,ms,,
CSV
    run 0
    row 3 '|2026-01-02|def|8.5|482k|2.00|faster|'
    row 4 '|2026-01-01|abc|16|256k||first, naive|'
    row 5 ''
    run 0 --chart
    want "lines of the chart" "$(wc -l <"$tmp/out")" 4
    contains '"GPT-2 124M, 4,096 tokens per step",train_gpt2cu,1,8.5,4096,"one NVIDIA T4, 2026-01-02,' "$tmp/out"
    contains '"GPT-2 124M, 4,096 tokens per step",PyTorch 2.11,0,20.0,4096,' "$tmp/out"
}

test_kernels() {
    tree 'kernels: t4'
    local results=$tmp/tree/dev/cuda/results/t4
    cat >"$results/op.csv" <<'CSV'
op,kernel,config,config_name,config_label,dtype,B,T,C,NH,V,kind,case,median_ms,p10_ms,p90_ms,launches,l2,bytes,gb_s,copy_gb_s,flops,tflop_s,matrix_tflop_s,best,best_kernel,promoted,kernel_launches,bytes_moved,gpu,what
op,0,0,,,bf16,64,1024,768,12,50257,0,0,0.50000,0.49000,0.51000,100,cold,1000,200.00,250.00,0,0.000,0.000,1,0,0,0,0,Tesla T4,"vendor"
op,1,64,block size,,bf16,64,1024,768,12,50257,0,0,2.00000,1.90000,2.10000,100,cold,1000,50.00,250.00,0,0.000,0.000,1,0,0,0,0,Tesla T4,"naive"
op,2,128,tile rows,,bf16,64,1024,768,12,50257,0,0,1.00000,0.90000,1.10000,100,cold,1000,100.00,250.00,0,0.000,0.000,1,1,1,0,0,Tesla T4,"vectors, ""wide"""
CSV
    # as earlier versions wrote it
    cut -d , -f 1-3,6-11,14-25,27- "$results/op.csv" | sed -e '1s/config/block_size/' -e 's/^op,\([0-9]\)/past,\1/' >"$results/past.csv"
    printf '%s\n' 'other 9 9' 'op 1.5000 nan' >"$results/pytorch.txt"
    echo 'op,gpu,dtype,B,T,C,NH,V,config,median_ms,default_ms' >"$results/tuned.csv" # no result of make bench
    run 0
    run 0 --check
    row 3 '|op|64x1024x768|2|1.0000|40%|||0.50|2.00|1.50||'
    row 4 '|past|64x1024x768|2|1.0000|40%|||0.50|2.00|||'
    # a newer CSV: an op that only reads, a kernel in e4m3; its columns are in another order
    cat >"$results/op.csv" <<'CSV'
sm_mhz,graph_ms,sustained_ms,sustained_mhz,empty_ms,read_gb_s,reads_only,matrix_type,op,kernel,block_size,dtype,B,T,C,NH,V,median_ms,p10_ms,p90_ms,launches,l2,bytes,gb_s,copy_gb_s,flops,tflop_s,matrix_tflop_s,best,promoted,kernel_launches,bytes_moved,gpu,what
1590,0.00000,0.00000,0,0.00200,400.00,1,bf16,op,1,64,bf16,64,1024,768,12,50257,0.02000,0.01900,0.02100,100,cold,1000,50.00,250.00,0,1.000,10.000,1,0,0,0,Tesla T4,"naive"
1585,0.00310,0.01230,1200,0.00200,400.00,1,e4m3,op,2,128,bf16,64,1024,768,12,50257,0.01000,0.00900,0.01100,100,cold,1000,100.00,250.00,0,20.000,200.000,1,1,0,0,Tesla T4,"vectors"
CSV
    run 0
    row 3 '|op|64x1024x768|2|0.0100|25%|20|10%||2.00|150.00||'
    want "the text around" "$(grep -c -e above -e below -e stale "$readme")" 2
    want "the lines" "$(wc -l <"$readme")" 9
    sed -i '2,3s/,op,[12],/,op,0,/' "$results/op.csv"
    run 1
    contains "op.csv has no row of a kernel" "$tmp/err"
    rm "$results"/*.csv
    run 1
    contains "make bench writes them" "$tmp/err"
}

# wrong records change no file
test_refuses() {
    tree 'records: speed'
    echo '2026-01-02,b,,T4,speed,124M,,4,1024,ours,8.0,ms,,' >>"$csv"
    cp "$csv" "$tmp/good.csv"
    cp "$readme" "$tmp/before"
    local broken
    for broken in 's/,8.0,/,8,0,/ 15.fields' 's/8.0// value' 's/8.0/fast/ value' 's/2026-01/26-01/ date' \
        '$s/.*/&\n2026-01-01,b,,T4,speed,124M,,4,1024,ours,8.0,ms,,/ after.2026-01-02' 's/speed/sped/ no.group.speed'; do
        sed "${broken% *}" "$tmp/good.csv" >"$csv"
        run 1
        grep -q "${broken##* }" "$tmp/err" || { cat "$tmp/err" && fail "not said: ${broken##* }"; }
        cmp "$tmp/before" "$readme" || fail "README.md changed"
    done
    run 2 --draw
    contains "usage: " "$tmp/err"
    run 2 --check --chart
}

tests=(up_to_date newest board_and_chart kernels refuses)
run_tests_once "$@"
