#!/usr/bin/env bash
# train_gpt2.cu is read from top to bottom: sections 1 to 5 are the program, section 6 has the kernels. These tests
# limit the numbers that keep it readable: the line where the model begins, and the lengths of sections and functions.
. "$(dirname "$0")/../test.sh"

# functions FILE: prints "LINES FIRST_LINE NAME" for each function before section 6, found by its braces
functions() {
    awk '
        /^\/\/ 6\. kernels/ { exit }
        depth == 0 && /^(static|template|int|void|bool|size_t|__attribute__)/ && !/;$/ {
            first = FNR
            head = ""
        }
        depth == 0 && first { head = head " " $0 }
        {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "", line)
            sub(/\/\/.*/, "", line)
            before = depth
            depth += gsub(/\{/, "", line) - gsub(/\}/, "", line)
            closes = $0 ~ /\}/
        }
        first && depth == 0 && (before > 0 || closes) {
            if (match(head, /[A-Za-z_0-9]+\(/)) { print FNR - first + 1, first, substr(head, RSTART, RLENGTH - 1) }
            first = 0
        }
        first && depth == 0 && /;$/ { first = 0 }' "$1"
}

# too_long FILE: prints a line for each limit that is exceeded
too_long() {
    local one=0 six=0 lines first name
    one=$(grep -n '^// 1\. operations' "$1" | cut -d : -f 1)
    six=$(grep -n '^// 6\. kernels' "$1" | cut -d : -f 1)
    [ -n "$one" ] && [ -n "$six" ] || { echo "no sections 1 and 6"; return; }
    [ $((six - one)) -le 1600 ] || echo "sections 1 to 5 have $((six - one)) lines, at most 1600 are wanted"
    functions "$1" >"$tmp/functions"
    [ "$(wc -l <"$tmp/functions")" -ge 60 ] || echo "only $(wc -l <"$tmp/functions") functions found"
    while read -r lines first name; do
        case $name in
        gpt2_forward)
            [ "$lines" -le 40 ] || echo "$name has $lines lines, at most 40 are wanted"
            [ "$first" -lt 450 ] || echo "$name begins at line $first, wanted before 450" ;;
        gpt2_backward) [ "$lines" -le 50 ] || echo "$name has $lines lines, at most 50 are wanted" ;;
        *) [ "$lines" -le 80 ] || echo "$name at line $first has $lines lines, at most 80 are wanted" ;;
        esac
    done <"$tmp/functions"
    for name in gpt2_forward gpt2_backward gpt2_update generate train sample main; do
        grep -q " $name\$" "$tmp/functions" || echo "no $name"
    done
}

test_limits() {
    too_long train_gpt2.cu >"$tmp/out"
    [ ! -s "$tmp/out" ] || { cat "$tmp/out" && fail "train_gpt2.cu is harder to read than it was"; }
}

# the code of the model does not read flags
test_model_reads_no_flags() {
    sed -n '/^\/\/ 1\. operations/,/^\/\/ 4\. training/p' train_gpt2.cu | grep -nE '\b(args|settings)\b' >"$tmp/out" || return 0
    cat "$tmp/out" && fail "sections 1 to 3 read flags"
}

# only the parser writes to the flags
test_flags_are_not_written() {
    grep -nE '\bsettings\.[a-z_A-Z]+ *(=|\+=|\+\+)[^=]' train_gpt2.cu train_gpt2.c llmc/*.h >"$tmp/out" || return 0
    cat "$tmp/out" && fail "a flag is written after it was parsed"
}

test_limits_can_fail() {
    local change
    for change in '/^static void gpt2_backward/,/^}/s/^    int L = .*/&\n\n\n\n\n\n\n\n\n/' \
        '/^static void gpt2_forward/,/^}/s/^    int L = .*/&\n\n\n\n\n\n\n\n\n\n\n\n/' \
        '/^static int sample()/,/^}/s/^    LoadedModel m;/&\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n/' \
        's/^static void gpt2_forward/static void forward/' '/^\/\/ 6\. kernels/d'; do
        sed "$change" train_gpt2.cu >"$tmp/changed.cu"
        cmp -s train_gpt2.cu "$tmp/changed.cu" && fail "$change changes nothing"
        too_long "$tmp/changed.cu" >"$tmp/out"
        [ -s "$tmp/out" ] || fail "not seen: $change"
    done
}

tests=(limits limits_can_fail model_reads_no_flags flags_are_not_written)
run_tests_once "$@"
