#!/usr/bin/env bash
# dev/test/fuzz/whole_program: a short run on the programs below BIN_DIR, and, with programs that misbehave, whether it sees
# what it should. LLMC_TEST_FULL=1 makes the run longer.
. "$(dirname "$0")/../test.sh"
fuzzer=$PWD/$BIN_DIR/dev/test/fuzz/whole_program
[[ $BIN_DIR == /* ]] && fuzzer=$BIN_DIR/dev/test/fuzz/whole_program
jobs=0
[ "${TEST_JOBS:-1}" -eq 1 ] || jobs=1 # other tests use the other cores

# fuzz FLAG ...: runs the fuzzer and sets `status`; output goes to $tmp/out and $tmp/err
fuzz() {
    [ -x "$fuzzer" ] || fail "$fuzzer is not there: make tests"
    status=0
    "$fuzzer" --programs "$BIN_DIR" --out "$tmp/fuzz" --jobs 1 "$@" >"$tmp/out" 2>"$tmp/err" </dev/null || status=$?
}

# row NAME COLUMN: prints a number of the table; columns are runs, accepted, refused, findings, messages
row() { sed -n "s/^$1  *//p" "$tmp/out" | tr -s ' ' | cut -d ' ' -f "$2"; }

# stand_in BODY: creates programs in $tmp/stand_in that run the shell commands BODY. `n` counts the calls, from 0.
stand_in() {
    mkdir -p "$tmp/stand_in/dev/data"
    echo 0 >"$tmp/count"
    {
        printf '#!/bin/sh\nn=$(cat "%s")\necho $((n + 1)) >"%s"\n' "$tmp/count" "$tmp/count"
        printf '%s\n' "$1"
    } >"$tmp/stand_in/train_gpt2"
    chmod +x "$tmp/stand_in/train_gpt2"
    cp "$tmp/stand_in/train_gpt2" "$tmp/stand_in/dev/data/tokenize"
    local name
    for name in hellaswag lambada arc; do cp "$tmp/stand_in/train_gpt2" "$tmp/stand_in/dev/data/$name"; done
}

test_programs_survive() {
    local runs=300 seed=2 name
    ! grep -aq __asan_init "$fuzzer" || runs=100 seed=1 # slower
    [ "${LLMC_TEST_FULL:-0}" = 0 ] || runs=$((10 * runs))
    fuzz --runs $runs --seed $seed --jobs "$jobs"
    [ $status -eq 0 ] || { cat "$tmp/out" "$tmp/err" && fail "status $status"; }
    want runs "$(row all 1)" $runs
    want findings "$(row all 4)" 0
    for name in train 'train, resume' resume sample tokenize questions evaluate export; do
        [ "$(row "$name" 1)" -gt 0 ] || fail "'$name' did not run"
    done
    # neither should be rare: most changes must get past the first check of a file, and many must be noticed
    [ $((5 * $(row all 2))) -gt $runs ] || fail "only $(row all 2) of $runs runs were accepted"
    [ $((5 * $(row all 3))) -gt $runs ] || fail "only $(row all 3) of $runs runs were refused"
    [ "$(row all 5)" -ge 30 ] || fail "only $(row all 5) distinct messages"
    contains "$runs runs in" "$tmp/out"
}

# one call after the other misbehaves in another way; the last three behave
test_sees_what_is_wrong() {
    stand_in 'case $n in
        0) kill -SEGV $$ ;;
        1) exit 3 ;;
        2) exit 1 ;;
        3) printf "error: one\nerror: two\n" >&2; exit 1 ;;
        4) printf "error: one\nand more\n" >&2; exit 1 ;;
        5) printf "error: \033[2J\n" >&2; exit 1 ;;
        6) printf "error: \302\233\n" >&2; exit 1 ;;
        7) printf "error: \377\n" >&2; exit 1 ;;
        8) exec sleep 60 ;;
        9) echo >stray; exit 0 ;;
        10) rm -r text; exit 0 ;;
        11) echo "==1==ERROR: AddressSanitizer: heap-use-after-free" >&2; exit 1 ;;
        12) echo "x.c:1:2: runtime error: signed integer overflow" >&2; exit 1 ;;
        13) echo "error: but well" >&2; exit 0 ;;
        14) exit 2 ;;
        15) printf "error: no newline" >&2; exit 1 ;;
        16) printf "error: a\0b\n" >&2; exit 1 ;;
        17) echo "error: refused" >&2; exit 1 ;;
        18) echo "$0: refused" >&2; exit 2 ;;
        *) exit 0 ;;
    esac'
    local n=0 why
    fuzz --programs "$tmp/stand_in" --seed-programs "$BIN_DIR" --command sample --runs 20 --timeout 1 --keep 2
    want status $status 1
    want findings "$(row all 4)" 17
    want refused "$(row all 3)" 2
    want accepted "$(row all 2)" 1
    for why in 'ended by a signal: Segmentation fault' 'exit status: 3' 'status 1 without exactly one line' \
        'status 1 without exactly one line' 'status 1 without exactly one line' 'a control character on stderr' \
        'a control character on stderr' 'invalid UTF-8 on stderr' 'no end within: 1 s' \
        'a file outside of -o was changed, added or removed: stray' \
        'a file outside of -o was changed, added or removed: text' "a sanitizer's report: ==1==ERROR" \
        "a sanitizer's report: x.c:1:2: runtime error" 'status 0 with an error' 'status 2 without a line' \
        'stderr ends within a line' 'a control character on stderr'; do
        grep -q "^FINDING in run $n (sample): \($why\)" "$tmp/out" || { cat "$tmp/out" && fail "run $n: no '$why'"; }
        n=$((n + 1))
    done
    want "kept findings" "$(cd "$tmp/fuzz/findings/whole_program-1" && echo *)" "0 1"
    contains "exit status: 3" "$tmp/fuzz/findings/whole_program-1/1/report"
    contains "again: whole_program --seed 1 --first 1 --runs 1" "$tmp/out"
    [ -e "$tmp/fuzz/findings/whole_program-1/1/tree/run" ] || fail "the tree is not kept"
}

# a command that succeeds must have written what our readers accept; one that refuses must leave nothing
test_reads_output() {
    stand_in 'case $n in
        0) exit 0 ;;
        1) mkdir out; echo >out/x_train_000000.bin; exit 0 ;;
        2) mkdir out; echo >out/x; echo "error: refused" >&2; exit 1 ;;
        *) mkdir out; echo "error: refused" >&2; exit 1 ;;
    esac'
    fuzz --programs "$tmp/stand_in" --seed-programs "$BIN_DIR" --command tokenize --runs 4
    want status $status 1
    want findings "$(row all 4)" 3
    contains "run 0 (tokenize): what the command wrote cannot be read" "$tmp/out"
    contains "run 1 (tokenize): what the command wrote cannot be read" "$tmp/out"
    contains "run 2 (tokenize): files were refused, but this was left: out/x" "$tmp/out"
}

# the same seed and number give the same tree and the same outcome, in any order
test_repeats_a_run() {
    fuzz --verbose --seed 5 --runs 12 --jobs 2
    sort "$tmp/out" | grep ' | ' >"$tmp/first" || true
    fuzz --verbose --seed 5 --runs 12
    sort "$tmp/out" | grep ' | ' >"$tmp/second" || true
    want "runs with a line" "$(wc -l <"$tmp/first")" 12
    cmp "$tmp/first" "$tmp/second"
    fuzz --verbose --seed 5 --first 7 --runs 1
    want "run 7 alone" "$(grep ' | ' "$tmp/out")" "$(grep '^7 ' "$tmp/first")"
    fuzz --verbose --seed 6 --runs 12
    sort "$tmp/out" | grep ' | ' >"$tmp/second" || true
    ! cmp -s "$tmp/first" "$tmp/second" || fail "another seed makes no difference"
    # the tree that is kept is the one that the command read
    stand_in 'tar -c --mtime=@0 . >"'"$tmp"'/read.tar"; exit 3'
    fuzz --programs "$tmp/stand_in" --seed-programs "$BIN_DIR" --command resume --seed 8 --first 3 --runs 1
    mkdir "$tmp/read" && tar -x -f "$tmp/read.tar" -C "$tmp/read"
    diff -r --no-dereference "$tmp/read" "$tmp/fuzz/findings/whole_program-8/3/tree" || fail "the kept tree differs"
}

test_interrupt() {
    "$fuzzer" --programs "$BIN_DIR" --out "$tmp/fuzz" --work "$tmp/work" --jobs 2 --runs 1000000 --seed 9 >"$tmp/out" 2>"$tmp/err" </dev/null &
    local pid=$! i rc=0
    for ((i = 0; i < 600; i++)); do
        [ ! -s "$tmp/fuzz/whole_program-9.messages" ] || break
        sleep 0.05
    done
    kill -TERM $pid
    wait $pid || rc=$?
    want status $rc 143
    contains "distinct messages, 0 findings" "$tmp/out"
    [ -z "$(ls "$tmp/work")" ] || fail "the trees of the runs are left"
}

test_flags() {
    fuzz --list
    want status $status 0
    contains "resume" "$tmp/out"
    fuzz --help
    contains "--runs" "$tmp/out"
    fuzz --command no-such-command
    want status $status 2
    fuzz --programs "$tmp/nowhere"
    want status $status 1
    contains "error: $tmp/nowhere: No such file or directory" "$tmp/err"
    stand_in 'echo "error: not today" >&2; exit 1'
    fuzz --programs "$tmp/stand_in" --work "$tmp/work"
    want status $status 1
    contains "cannot make the seed tree: error: not today" "$tmp/err"
    [ -z "$(ls "$tmp/work")" ] || fail "the seed tree is left"
}

test_driver() {
    local rc=0
    dev/test/fuzz/fuzz_program.sh --help >"$tmp/out"
    contains "FUZZ_RUNS=2000" "$tmp/out"
    FUZZ_RUNS=many dev/test/fuzz/fuzz_program.sh 2>"$tmp/err" || rc=$?
    want status $rc 2
    contains "error: FUZZ_RUNS is a whole number above 0" "$tmp/err"
    CC=false dev/test/fuzz/fuzz_program.sh >"$tmp/out"
    contains "skipped: false has no sanitizers" "$tmp/out"
    [ "${LLMC_TEST_FULL:-0}" != 0 ] || return 0 # building with sanitizers takes half a minute
    make fuzz-program FUZZ_RUNS=20 >"$tmp/out"
    contains "20 runs in" "$tmp/out"
}

tests=(programs_survive sees_what_is_wrong reads_output repeats_a_run interrupt flags driver)
run_tests "$@"
