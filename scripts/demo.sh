#!/bin/sh
# The demo of train_gpt2 and train_gpt2cu: tokenizes this repository's own sources, trains a small model on them for
# about a minute, saves it, loads it again and samples from it. It downloads nothing and writes only below demo/.
#
#     scripts/demo.sh [PROGRAM]      ./train_gpt2 by default; the programs run this when they have no arguments
#     DEMO_FLAGS='-x 100' scripts/demo.sh      further flags for the training run
set -eu
cd "$(dirname "$0")/.."
program=${1:-./train_gpt2}
case $program in
*/*) ;;
*) program=./$program ;;
esac
[ -x "$program" ] || make "${program#./}"
[ -x dev/data/tokenize ] || make dev/data/tokenize

run() { # COMMAND...: prints the command as one would type it, then runs it
    printf '\n$'
    for word in "$@"; do
        case $word in
        *[!A-Za-z0-9_./,=-]* | '') printf " '%s'" "$word" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    printf '\n'
    "$@"
}

# the log of a demo before this one comes back if this one does not begin, as without a GPU
give_back() { [ -e demo/log ] || [ ! -e demo/log.before ] || mv demo/log.before demo/log; }
give_back
rm -rf demo/data demo/log.before
[ ! -e demo/log ] || mv demo/log demo/log.before
trap give_back EXIT
mkdir -p demo/data
sources=
for pattern in '*.c' '*.cu' 'llmc/*.h' 'llmc/*.cuh' 'dev/*/*.c' 'dev/*/*.h' 'dev/*/*.cu' 'dev/*/*.cuh'; do
    for file in $pattern; do # unquoted, so that the shell expands the pattern
        [ -e "$file" ] && sources=$sources,$pattern
        break
    done
done
run dev/data/tokenize -i "${sources#,}" -o demo/data/code --val-tokens 20000
# shellcheck disable=SC2086 # DEMO_FLAGS has several words
run "$program" --recipe llmc -e d6 --layers 4 --heads 2 --channels 128 --positions 128 -i 'demo/data/code_train_*.bin' \
    -j 'demo/data/code_val_*.bin' -o demo/log -b 8 -t 128 -x 1500 -l 3e-3 -u 100 -q 0.05 -c 0.1 -v 250 -m 8 -s 500 -g 110 \
    ${DEMO_FLAGS-}
rm -rf demo/log.before
printf '\n'
ls -l demo/log demo/log/step_*
run "$program" -e demo/log --prompt 'for (int i' --temperature 0.8
