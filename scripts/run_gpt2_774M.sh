#!/bin/sh
# Trains GPT-2 774M from scratch: scripts/run_gpt2.sh 774M. See --help; --plan shows the plan and starts nothing.
exec "$(dirname "$0")/run_gpt2.sh" 774M "$@"
