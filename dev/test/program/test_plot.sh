#!/usr/bin/env bash
# dev/cuda/plot.cpp on made-up CSV files: what it draws where, and which files it rejects.
. "$(dirname "$0")/../test.sh"
CXX=${CXX:-g++}
header=op,kernel,config,config_name,config_label,dtype,B,T,C,NH,V,kind,case,median_ms,p10_ms,p90_ms,launches,l2,bytes,gb_s,copy_gb_s
header+=,flops,tflop_s,matrix_tflop_s,best,best_kernel,promoted,kernel_launches,bytes_moved,gpu,what

build() {
    command -v "$CXX" >/dev/null || skip "needs a C++ compiler"
    [ -x "$tmp/plot" ] || "$CXX" -O1 -std=c++17 -Wall -Wextra -Werror dev/cuda/plot.cpp -o "$tmp/plot" ||
        fail "plot.cpp does not compile"
    rm -rf "$tmp/t4"
    mkdir "$tmp/t4"
}

# row OP KERNEL CONFIG MS BYTES FLOPS PROMOTED WHAT: prints a row; copy rate 1000 GB/s, library 100 TFLOP/s
row() {
    local rate=0
    [ "$6" = 0 ] || rate=100.000
    echo "$1,$2,$3,block size,,bf16,4,64,768,12,50257,0,0,$4,$4,$4,100,cold,$5,0.00,1000.00,$6,0.000,$rate,1,$7,$7,2,3000000,Tesla T4,\"$8\""
}

# run RC FOLDER ...: fails unless the exit code is RC
run() {
    local rc=0 wanted=$1
    shift
    "$tmp/plot" "$@" >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted"; }
}

well_formed() { # FILE ...
    if command -v xmllint >/dev/null; then
        xmllint --noout "$@" || fail "not XML"
        return
    fi
    local file
    for file in "$@"; do # every text element is closed; < and > occur only in tags, & only in entities
        want "texts of $file" "$(grep -c '<text' "$file")" "$(grep -c '</text>$' "$file")"
        want "tail of $file" "$(tail -n 1 "$file")" "</svg>"
        sed -e 's/<[^<>]*>//g' -e 's/&\(amp\|lt\|gt\);//g' "$file" | grep -n '[<>&]' && fail "$file is not XML"
    done
    return 0
}

# attribute NAME ID FILE: prints the attribute of the element with this id
attribute() { sed -n "/ id=\"$2\"/s/.* $1=\"\([^\"]*\)\".*/\1/p" "$3"; }

# near WHAT EXPRESSION: fails unless the expression is 0, within the rounding of coordinates
near() { awk "BEGIN { d = $2; exit !(d < 0.03 && d > -0.03) }" || fail "$1: $2 is not 0"; }

test_bars() {
    build
    {
        echo "$header"
        row op 10 0 0.40000 1000000 0 0 'last, though "10" < "2"' | sed 's/"10" < "2"/""10"" < ""2""/'
        row op 0 0 2.00000 1000000 0 0 'cuBLAS & co'
        row op 2 64 1.50000 1000000 0 1 vectors
        row op 2 128 1.00000 1000000 0 1 vectors
        row op 2 256 1.20000 1000000 0 1 vectors
        row op 1 64 4.00000 1000000 0 0 naive
    } >"$tmp/t4/op.csv"
    run 0 "$tmp/t4/"
    want "what it says" "$(cat "$tmp/out")" "$tmp/t4: 1 bar chart, no roofline; without FLOPs: op"
    [ ! -e "$tmp/t4/roofline.svg" ] || fail "a roofline without a dot"
    svg=$tmp/t4/op.svg
    well_formed "$svg"
    want "the order" "$(sed -n 's/.* id="kernel\([0-9]*\)".*/\1/p' "$svg" | tr '\n' ' ')" "0 1 2 10 "
    # a bar is at most 8 times as long as the fastest, 3.2 ms: kernel 1 is cut there
    local longest
    longest=$(attribute width kernel1 "$svg")
    near "kernel 10" "$(attribute width kernel10 "$svg") - $longest * 0.4 / 3.2"
    near "kernel 2, block size 128" "$(attribute width kernel2 "$svg") - $longest * 1.0 / 3.2"
    near "kernel 0" "$(attribute width kernel0 "$svg") - $longest * 2.0 / 3.2"
    want "cut bars" "$(grep -c '<path' "$svg")" 1
    contains "bars over 3.2000 ms are cut" "$svg"
    contains "1.0000 ms, block 128, 0.00 TB/s, 0.1% of copy, 2 launches moving 3.0 MB" "$svg"
    contains "4.0000 ms, block 64, " "$svg"
    contains "vectors (promoted)" "$svg"
    contains "cuBLAS &amp; co (library)" "$svg"
    contains 'last, though "10" &lt; "2"' "$svg"
    want "the colour of what is neither" "$(attribute fill kernel1 "$svg")" "$(attribute fill kernel10 "$svg")"
    want "the number of colours" "$(for k in 0 1 2; do attribute fill kernel$k "$svg"; done | sort -u | wc -l)" 3
}

test_bars_uncut() {
    build
    { echo "$header"; row op 1 64 2.00000 1500000 0 0 a; row op 2 64 0.50000 1500000 0 0 b; } >"$tmp/t4/op_fp32.csv"
    run 0 "$tmp/t4"
    svg=$tmp/t4/op_fp32.svg # the SVG is named after the CSV file
    near "kernel 2" "$(attribute width kernel1 "$svg") / 4 - $(attribute width kernel2 "$svg")"
    ! grep -q -e '<path' -e 'are cut' "$svg" || fail "a bar is cut"
    ! grep -q promoted "$svg" || fail "none is promoted"
}

# a named configuration; a best kernel without a copy in the trainer; the columns of earlier versions
test_columns() {
    build
    {
        echo "$header"
        row op 1 64 2.00000 1500000 0 0 a
        row op 2 22 0.50000 1500000 0 1 b | sed -e 's/block size,/form,two consumers/' -e 's/,1,1,1,2,3000000/,1,1,0,2,3000000/'
    } >"$tmp/t4/op.csv"
    run 0 "$tmp/t4"
    contains "0.5000 ms, form 22, " "$tmp/t4/op.svg"
    contains ">2  b (best)<" "$tmp/t4/op.svg"
    ! grep -q promoted "$tmp/t4/op.svg" || fail "best is shown as promoted"
    [ "$(attribute fill kernel1 "$tmp/t4/op.svg")" != "$(attribute fill kernel2 "$tmp/t4/op.svg")" ] || fail "best has no colour"
    { echo "$header"; row op 2 64 0.50000 1500000 0 1 b; } >"$tmp/t4/op.csv"
    run 0 "$tmp/t4"
    mv "$tmp/t4/op.svg" "$tmp/new.svg"
    cut -d , -f 1-3,6-11,14-25,27- "$tmp/t4/op.csv" | sed 's/^op,kernel,config/op,kernel,block_size/' >"$tmp/t4/old"
    mv "$tmp/t4/old" "$tmp/t4/op.csv"
    run 0 "$tmp/t4"
    cmp "$tmp/t4/op.svg" "$tmp/new.svg" || fail "a file of an earlier version is drawn otherwise"
}

# copy rate 1 TB/s, library 100 TFLOP/s: the two roofs meet at 100 FLOPs per byte
test_roofline() {
    build
    { echo "$header"; row low 1 64 1.00000 1e9 10e9 0 'on the slope: 10 FLOPs a byte, 10 TFLOP/s'
      row low 0 64 0.50000 1e9 10e9 0 'faster, but the library'; } >"$tmp/t4/low.csv"
    { echo "$header"; row high 1 64 10.00000 5e9 1e12 0 'twice as slow'
      row high 3 64 5.00000 5e9 1e12 1 '200 FLOPs a byte, 200 TFLOP/s'; } >"$tmp/t4/high.csv"
    { echo "$header"; row none 1 64 1.00000 1e9 0 1 'no FLOPs'; } >"$tmp/t4/none.csv"
    { echo "$header"; row low 1 64 1.00000 1e9 10e9 0 'another type' | sed s/bf16/fp16/; } >"$tmp/t4/low_fp16.csv"
    run 0 "$tmp/t4"
    want "what it says" "$(cat "$tmp/out")" "$tmp/t4: 4 bar charts, a roofline of 2 of them; without FLOPs: none"
    svg=$tmp/t4/roofline.svg
    well_formed "$tmp"/t4/*.svg
    want "dots" "$(grep -c '<circle' "$svg")" 2
    contains ">low 1<" "$svg"
    contains ">high 3<" "$svg"
    contains "left out, without FLOPs: none<" "$svg"
    contains "left out, of another type: low_fp16<" "$svg"
    contains ">copy 1.00 TB/s<" "$svg"
    contains ">matrix rate 100.0 TFLOP/s<" "$svg"
    local high_x high_y low_x low_y
    read -r high_x high_y low_x low_y <<<"$(sed -n 's/.*<circle cx="\([0-9.]*\)" cy="\([0-9.]*\)".*/\1 \2/p' "$svg" | tr '\n' ' ')"
    local x1 y1 x2 y2 flat
    x1=$(attribute x1 copy "$svg") y1=$(attribute y1 copy "$svg") x2=$(attribute x2 copy "$svg") y2=$(attribute y2 copy "$svg")
    flat=$(attribute y1 matrix "$svg")
    near "low lies on the slope" "($low_y - $y1) * ($x2 - $x1) / ($y2 - $y1) - ($low_x - $x1)"
    near "the roofs meet" "$x2 - $(attribute x1 matrix "$svg") + $y2 - $flat"
    near "the matrix rate is flat" "$flat - $(attribute y2 matrix "$svg")"
    # logarithmic axes: 100 to 200 is log10(2) times as long as 10 to 100; twice the rate is as far above the flat roof
    near "high's intensity" "($high_x - $x2) - ($x2 - $low_x) * log(2) / log(10)"
    near "high's rate" "($flat - $high_y) - ($low_y - $flat) * log(2) / log(10)"
}

# columns of newer files: an op that only reads has the speed of a read as its roof; a kernel in e4m3 has a rate of its own
test_other_roofs() {
    build
    local newer=read_gb_s,reads_only,matrix_type
    { echo "$newer,$header"; echo "1250.00,1,bf16,$(row reads 1 64 1.00000 1e9 0 1 a)"; } >"$tmp/t4/reads.csv"
    { echo "$newer,$header"; echo "1250.00,0,bf16,$(row copies 1 64 1.00000 5e8 0 1 a)"; } >"$tmp/t4/copies.csv"
    { echo "$newer,$header"
      echo "1250.00,0,bf16,$(row block 1 64 20.00000 1e9 1e12 0 a)"
      echo "1250.00,0,e4m3,$(row block 2 64 8.00000 1e9 1e12 1 b | sed 's/,100.000,/,250.000,/')"; } >"$tmp/t4/block.csv"
    run 0 "$tmp/t4"
    contains "1.0000 ms, block 64, 1.00 TB/s, 80.0% of read" "$tmp/t4/reads.svg"
    contains "| at 100% of read: 0.8000 ms" "$tmp/t4/reads.svg"
    contains "1.0000 ms, block 64, 0.50 TB/s, 50.0% of copy" "$tmp/t4/copies.svg"
    contains "20.0000 ms, block 64, 50.0 TFLOP/s, 50.0% of matrix rate" "$tmp/t4/block.svg"
    contains "8.0000 ms, block 64, 125.0 TFLOP/s, 50.0% of e4m3 matrix rate" "$tmp/t4/block.svg"
    contains ">block 2 (e4m3)<" "$tmp/t4/roofline.svg"
    contains ">matrix rate 100.0 TFLOP/s<" "$tmp/t4/roofline.svg"
}

test_same_bytes() {
    build
    { echo "$header"; row op 1 64 1.00000 1e9 10e9 0 a; row op 2 64 1.50000 1e9 10e9 0 b; } >"$tmp/t4/op.csv"
    run 0 "$tmp/t4"
    mkdir "$tmp/t4/first"
    mv "$tmp"/t4/*.svg "$tmp/t4/first/"
    run 0 "$tmp/t4"
    cmp "$tmp/t4/op.svg" "$tmp/t4/first/op.svg" || fail "another chart"
    cmp "$tmp/t4/roofline.svg" "$tmp/t4/first/roofline.svg" || fail "another roofline"
    # columns are found by name: in another order, and with an extra column that nobody reads
    awk -F , -v OFS=, '{ print (NR == 1 ? "more" : "x"), $0 }' "$tmp/t4/op.csv" | sed 's/\r*$/\r/' >"$tmp/t4/new"
    mv "$tmp/t4/new" "$tmp/t4/op.csv"
    run 0 "$tmp/t4"
    cmp "$tmp/t4/op.svg" "$tmp/t4/first/op.svg" || fail "another chart for the same columns"
    # old files, without the columns kernel_launches and bytes_moved
    cut -d , -f 2-28,31- "$tmp/t4/op.csv" >"$tmp/t4/new"
    mv "$tmp/t4/new" "$tmp/t4/op.csv"
    run 0 "$tmp/t4"
    contains "1.0000 ms, block 64, " "$tmp/t4/op.svg"
    ! grep -q launch "$tmp/t4/op.svg" || fail "launches that nobody counted"
}

# refused WHAT: the CSV on stdin must end the program with one line that contains WHAT, and nothing is drawn
refused() {
    cat >"$tmp/t4/broken.csv"
    run 1 "$tmp/t4"
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
    contains "error: $tmp/t4/broken.csv: $1" <(sed "s/broken.csv:\([0-9]*\): /broken.csv: \1: /" "$tmp/err")
    [ ! -e "$tmp/t4/fine.svg" ] || fail "a chart beside an error"
}

test_broken_csv() {
    build
    { echo "$header"; row fine 1 64 1.00000 1e9 10e9 0 a; } >"$tmp/t4/fine.csv"
    local line
    line=$(row op 1 64 1.00000 1e9 10e9 0 a)
    printf '' | refused "no line of a kernel"
    echo "$header" | refused "no line of a kernel"
    printf '%s\n' "${header/median_ms/median}" "$line" | refused "no column 'median_ms'"
    printf '%s\n' "$header" "$line" "${line%,*}" | refused "3: 30 fields, the header has 31"
    printf '%s\n' "$header" "$line,1" | refused "2: 32 fields"
    printf '%s\n' "$header" "${line/1.00000/1.0x}" | refused "2: median_ms is '1.0x', not a number"
    printf '%s\n' "$header" "${line/1.00000/nan}" | refused "2: median_ms is 'nan'"
    printf '%s\n' "$header" "${line/1.00000/-1}" | refused "2: median_ms is '-1'"
    printf '%s\n' "$header" "${line/1.00000/}" | refused "2: median_ms is ''"
    printf '%s\n' "$header" "${line/1.00000/0.00000}" | refused "2: median_ms is 0"
    printf '%s\n' "$header" "${line/op,1/op,1.5}" | refused "2: kernel is '1.5', not a whole number"
    printf '%s\n' "$header" "${line%\"}" | refused "2: a quote is not closed"
    printf '%s\n' "$header" "$line" | head -c -4 | refused "2: the file ends within a line"
    printf '%s\n' "$header" "$line" "${line/op/other}" | refused "3: op is 'other' after 'op'"
}

test_arguments() {
    build
    run 1 "$tmp/t4"
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
    contains "$tmp/t4: no CSV here: make bench writes them" "$tmp/err"
    run 1 "$tmp/no/such/folder"
    want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
    run 2
    run 2 --help
    { echo "$header"; row op 1 64 1.00000 1e9 0 0 a; } >"$tmp/t4/op.csv"
    mkdir "$tmp/t4/op.svg"
    run 1 "$tmp/t4"
    contains "$tmp/t4/op.svg: " "$tmp/err"
}

test_speed() {
    build
    local csv=$tmp/t4/speed.csv svg=$tmp/t4/speed.svg
    printf '%s\n' group,program,ours,median_ms,tokens,about \
        'small,other & co,0,4.0,8000,one card' 'small,this,1,2.0,8000,' 'large,this,1,10.0,3000,' 'large,fast,0,5.0,3000,' >"$csv"
    run 0 --speed "$csv"
    well_formed "$svg"
    # small: 2 and 4 million tokens a second; large: 0.3 and 0.6. The fastest of each group has the longest bar.
    near "half" "2 * $(attribute width bar0 "$svg") - $(attribute width bar1 "$svg")"
    near "half" "2 * $(attribute width bar2 "$svg") - $(attribute width bar3 "$svg")"
    near "the longest" "$(attribute width bar1 "$svg") - $(attribute width bar3 "$svg")"
    contains ">other &amp; co<" "$svg"
    contains ">4,000,000<" "$svg"
    contains ">2,000,000  (ours is 2.00 times as fast)<" "$svg"
    contains ">600,000  (ours is 0.50 times as fast)<" "$svg" # a figure that is worse is drawn like any other
    contains ">300,000<" "$svg"
    contains ">one card<" "$svg"
    want "colours" "$(attribute fill bar1 "$svg") $(attribute fill bar0 "$svg")" \
        "$(attribute fill bar2 "$svg") $(attribute fill bar3 "$svg")"
    [ "$(attribute fill bar0 "$svg")" != "$(attribute fill bar1 "$svg")" ] || fail "ours looks like the others"
    local broken
    for broken in 's/4\.0/0/ 2: median_ms or tokens is 0' 's/8000/many/ 2: tokens is .many., not a number' \
        's/,ours,/,our,/ no column .ours.' 's/one.card/one,card/ 2: 7 fields' '2,$d no line of a program'; do
        sed "${broken%% *}" "$csv" >"$tmp/t4/broken.csv"
        run 1 --speed "$tmp/t4/broken.csv"
        want "the lines on stderr" "$(wc -l <"$tmp/err")" 1
        grep -q -- "${broken#* }" "$tmp/err" || { cat "$tmp/err" && fail "not said: ${broken#* }"; }
        [ ! -e "$tmp/t4/broken.svg" ] || fail "a chart beside an error"
    done
    run 1 --speed "$svg" # not a CSV: it would be overwritten
    run 1 --speed "$tmp/t4/none.csv"
    run 2 --speed
    run 2 --speed "$csv" "$csv"
}

# the picture in the README is the one that its figures give
test_readme_picture() {
    build
    dev/measured/records.sh --chart >"$tmp/t4/training.csv"
    run 0 --speed "$tmp/t4/training.csv"
    cmp "$tmp/t4/training.svg" dev/measured/training.svg || fail "draw it again: make plots in dev/cuda"
}

tests=(bars bars_uncut columns roofline other_roofs same_bytes broken_csv arguments speed readme_picture)
run_tests_once "$@"
