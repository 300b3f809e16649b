#!/bin/sh
# Draws demo_loss.svg beside this script: the demo of train_gpt2 at its learning rate and at a tenth of it. Writes the runs
# to demo/rate_3e-3 and demo/rate_3e-4; some minutes on two CPU cores.
#
#     dev/measured/demo_loss.sh
set -eu
cd "$(dirname "$0")/../.."
make train_gpt2 dev/data/tokenize scripts/plot_runs
for rate in 3e-3 3e-4; do
    DEMO_FLAGS="-x 1500 -u 100 -v 250 -l $rate ${DEMO_FLAGS-}" scripts/demo.sh
    rm -rf "demo/rate_$rate"
    mv demo/log "demo/rate_$rate"
done
scripts/plot_runs 'rate 3e-3=demo/rate_3e-3' 'rate 3e-4=demo/rate_3e-4' --panels loss,norm,rate --title 'make demo, two learning rates' \
    -o "${1:-dev/measured/demo_loss.svg}"
