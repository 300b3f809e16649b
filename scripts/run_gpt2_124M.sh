#!/bin/sh
# Trains GPT-2 124M from scratch: scripts/run_gpt2.sh 124M. See --help; --plan shows the plan and starts nothing.
exec "$(dirname "$0")/run_gpt2.sh" 124M "$@"
