#!/bin/sh
# The demo of train_gpt2 and train_gpt2cu: tokenizes this repository's own sources, trains a small model on them for
# about a minute, saves it, loads it again and samples from it. It downloads nothing and writes only below demo/.
# How many steps a minute has, it finds out by taking some.
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
set -- --recipe llmc -e d6 --layers 4 --heads 2 --channels 128 --positions 128 -i 'demo/data/code_train_*.bin' -b 8 -t 128 -l 3e-3 -c 0.1 -s 0
if [ -t 1 ]; then
    "$program" "$@" -x 10 | tee demo/data/timing |
        awk '/^step/ { printf "\rmeasuring: step %s", $2; fflush() } END { printf "\r\033[K" }'
    grep -q '^step' demo/data/timing # otherwise the program has said why
else
    "$program" "$@" -x 10 >demo/data/timing
fi
# without the first steps, which load and choose kernels; the other flags are parts of the run
steps=$(awk '{ for (i = 2; i <= NF; i++) if ($i == "ms" && ++n > 4) { sum += $(i - 1); k++ } }
    END { n = sum ? int(50000 * k / sum) : 0; n = n < 60 ? 60 : n > 40000 ? 40000 : n; print n - n % 20 }' demo/data/timing)
# shellcheck disable=SC2086 # DEMO_FLAGS has several words
run "$program" "$@" -j 'demo/data/code_val_*.bin' -o demo/log -x "$steps" -u $((steps / 15)) -q 0.05 -v $((steps / 4)) -m 8 \
    --log-every $((steps / 20)) ${DEMO_FLAGS-}
rm -rf demo/log.before
[ -n "${DEMO_FLAGS-}" ] ||
    printf '\n50 s are enough for %s steps here. More steps make the text below more like C: DEMO_FLAGS="-x 2000" %s\n' "$steps" "$0"
run "$program" -e demo/log --prompt 'for (int i' --temperature 0.8 --num-tokens 100
cat <<END

What to do next:
  a text of your own    dev/data/tokenize -i my.txt -o data/my --val-tokens 20000
                        $program -e d6 -i 'data/my_train_*.bin' -j 'data/my_val_*.bin' -o log -x 200
  GPT-2's weights       scripts/download.sh gpt2, then $program -e data/gpt2 --prompt 'The answer is'
  this run as a picture make scripts/plot_runs, then scripts/plot_runs demo/log -o demo/run.svg
  all flags             $program --help; dev/manual has a page for each task
END
