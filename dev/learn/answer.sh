#!/usr/bin/env bash
# Says whether an exercise of dev/learn is solved.
#
#     make answer                                all exercises
#     make answer EXERCISE=02.1 ANSWER=190       a number: right, or too small or too large
#     make answer EXERCISE=02.2                  a kernel: checks your practice_OP.cu, on a GPU or without one
#     make answer EXERCISE=02.1 SHOW=yes         the answer
#     ../learn/answer.sh [EXERCISE [ANSWER]]
#
# An exercise is named by the number or the name of its page, a point, and its own number: 02.1, occupancy.3.
# Exit code 0: right; 1: wrong, or it cannot be checked; 2: no such exercise, or no number.
#
# The answers are in answers/PAGE.txt, a line per exercise:
#     1 number VALUE TOLERANCE_PERCENT explanation
#     2 practice OP RUNG hint
set -u -o pipefail
export LC_ALL=C
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
cd "$(dirname "$0")/../cuda" || exit 1
[ $# -le 2 ] || usage "too many arguments; see $0 --help"
exercise=${1-} answer=${2-} show=${SHOW-}
[[ $show =~ ^(yes|no)?$ ]] || usage "SHOW is yes, not '$show'"
[[ ${PRECISION:=BF16} =~ ^(BF16|FP16|FP32)$ ]] || usage "PRECISION is BF16, FP16 or FP32, not '$PRECISION'"
answers=${ANSWERS_DIR:-../learn/answers}
number='[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?'

# well_formed FILE: ends the program with a line if an answers file is not of the form above
well_formed() {
    local bad
    bad=$(awk -v number="^$number\$" '
        function bad(text) { print FILENAME ":" FNR ": " text; found = 1; exit }
        $1 != FNR || NF < 5 || ($2 != "number" && $2 != "practice") { bad("want \"" FNR " number VALUE TOLERANCE text\" or \"" FNR " practice OP RUNG text\"") }
        $2 == "number" && ($3 !~ number || $4 !~ number || $4 + 0 < 0) { bad("VALUE and TOLERANCE are numbers") }
        $2 == "practice" && $4 !~ /^[0-9]+$/ { bad("RUNG is the number of a kernel") }
        END { if (!found && NR == 0) { print FILENAME ": is empty" } }' "$1") || fail "$1 cannot be read"
    [ -z "$bad" ] || fail "$bad"
}

if [ -z "$exercise" ]; then
    [ -z "$answer" ] || usage "no EXERCISE: make answer EXERCISE=02.1 ANSWER=$answer"
    files=("$answers"/*.txt)
    [ -e "${files[0]}" ] || fail "no exercises in $answers"
    for file in "${files[@]}"; do
        well_formed "$file"
        page=$(basename "$file" .txt)
        name=$page
        [[ ! $page =~ ^([0-9]+)_ ]] || name=${BASH_REMATCH[1]}
        echo "$page.md"
        awk -v name="$name" '
            $2 == "number" { what = "a number" }
            $2 == "practice" {
                what = "write kernel " $4 " of " $3
                file = "practice_" $3 ".cu"
                if ((getline line <file) > 0 && (line " ") ~ (" kernels ([0-9 ]* )?" $4 "[ ,]")) { what = what " (begun: " file ")" }
                close(file)
            }
            { printf "    %-16s %s\n", name "." $1, what }' "$file"
    done
    exit 0
fi

# ---- which exercise ----

[[ $exercise =~ ^([A-Za-z0-9_]+)\.([0-9]+)$ ]] || usage "EXERCISE is a page, a point and a number, as in 02.1, not '$exercise'"
page=${BASH_REMATCH[1]} at=$((10#${BASH_REMATCH[2]}))
if [[ $page =~ ^[0-9]+$ ]]; then
    printf -v page '%02d' "$((10#$page))"
    files=("$answers/$page"_*.txt)
else
    files=("$answers/$page.txt")
fi
[ ${#files[@]} -eq 1 ] || fail "several pages begin with ${page}_: ${files[*]}"
file=${files[0]}
[ -e "$file" ] || usage "no exercises of page '$page': make answer lists those that there are"
well_formed "$file"
read -r _ kind first second text <<<"$(awk -v at="$at" '$1 == at' "$file")"
[ -n "${kind-}" ] || usage "page '$page' has exercises 1 to $(wc -l <"$file"), not $at"

# ---- a number ----

if [ "$kind" = number ]; then
    if [ "$show" = yes ]; then
        echo "$first: $text"
        exit 0
    fi
    [ -n "$answer" ] || usage "this exercise asks for a number: make answer EXERCISE=$exercise ANSWER=..."
    plain=$answer
    [[ ! $answer =~ ^[-+]?[0-9]{1,3}(,[0-9]{3})+([.][0-9]*)?$ ]] || plain=${answer//,/}
    [[ $plain =~ ^$number$ ]] || usage "ANSWER is a number without a unit, not '$answer'"
    verdict=$(awk -v got="$plain" -v want="$first" -v percent="$second" 'BEGIN {
        got += 0; want += 0
        allowed = (want < 0 ? -want : want) * (percent / 100 + 1e-9)
        if (got >= want - allowed && got <= want + allowed) { print "right" }
        else { print got < want ? "too small" : "too large" }
    }')
    if [ "$verdict" = right ]; then
        echo "right: $text"
        exit 0
    fi
    echo "$answer is $verdict"
    exit 1
fi

# ---- a kernel ----

op=$first rung=$second practice=practice_$first
if [ "$show" = yes ]; then
    echo "$text"
    exec ../learn/practice.sh "$op" "$rung" solution
fi
[ -z "$answer" ] || usage "this exercise is a kernel, not a number: make answer EXERCISE=$exercise"
[ -e "$practice.cu" ] || fail "no $practice.cu: make practice OP=$op RUNG=$rung"
head -n 1 "$practice.cu" | grep -qE "^// practice: $op kernels ([0-9 ]* )?${rung}[ ,]" ||
    fail "$practice.cu is not about kernel $rung: make practice OP=$op RUNG=$rung"

tmp=$(mktemp -d /tmp/llmc_answer_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
export PATH=$PATH:/usr/local/cuda/bin
if nvidia-smi -L >/dev/null 2>&1 && command -v "${NVCC:-nvcc}" >/dev/null; then
    target=$practice program=$practice
else
    target="cpu OP=$practice" program=${practice}_cpu
    [ "$PRECISION" = BF16 ] || program+=_${PRECISION,,}
fi
# shellcheck disable=SC2086
make --no-print-directory PRECISION="$PRECISION" $target >"$tmp/build" 2>&1 || {
    grep -aE 'error|warning' "$tmp/build" | head -n 8
    echo "$practice.cu does not compile: make $target"
    exit 1
}
rc=0
timeout "${ANSWER_TIMEOUT:-300}" "./$program" "$rung" --check >"$tmp/out" 2>&1 || rc=$?
closing=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$tmp/out" | tail -n 1)
if [ $rc -eq 0 ] && [ -n "$closing" ] && [[ $closing != "0 passed"* ]]; then
    echo "right: kernel $rung of $op, ${closing%, * skipped}"
    exit 0
fi
if [ $rc -eq 0 ]; then
    grep -a '^skip' "$tmp/out" | head -n 3
    fail "./$program $rung checks nothing here: this kernel needs a GPU that can run it"
fi
# the first failure, a line per finding of the emulation, and what else there is, such as the message of a crash
grep -avE '^ok |^[0-9]+ passed' "$tmp/out" | awk '
    !/^FAIL/ { print; next }
    !n++ { gsub(/; /, "\n     "); print }
    END { if (n > 1) { printf "... and the same or something else at %d other shapes and configurations\n", n - 1 } }' | head -n 16
[ $rc -ne 124 ] || echo "not done after ${ANSWER_TIMEOUT:-300} s"
echo "not yet: ${closing:-./$program $rung ended with status $rc}"
echo "hint: $text"
exit 1
