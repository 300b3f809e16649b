#!/bin/sh
# GPT-2 124M on 10 billion tokens of FineWeb, the run of llm.c's discussion 481: one pass, 0.5 million tokens a step.
# It takes about 5 hours on one H200. Arguments are passed on to the program: scripts/run_gpt2_124M.sh -b 32
#
# The shards must exist: set TRAIN_DATA and VAL_DATA (llm.c's FineWeb shards work), or make them with dev/data/tokenize.
set -eu
cd "$(dirname "$0")/.."
make train_gpt2cu
out=${OUT_DIR:-log124M}
exec ./train_gpt2cu -e d12 -i "${TRAIN_DATA:-data/fineweb/*_train_*.bin}" -j "${VAL_DATA:-data/fineweb/*_val_*.bin}" \
    -o "$out" -b 64 -t 1024 -d 524288 -x 18865 -l 0.0006 -k cosine -q 0.0 -u 700 -c 0.1 \
    -v 250 -m 20 -s 5000 -n 5000 -nk 3 -y 1 "$@"
