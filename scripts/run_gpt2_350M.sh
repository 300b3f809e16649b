#!/bin/sh
# Trains GPT-2 350M from scratch: scripts/run_gpt2.sh 350M. See --help; --plan shows the plan and starts nothing.
exec "$(dirname "$0")/run_gpt2.sh" 350M "$@"
