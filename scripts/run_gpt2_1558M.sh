#!/bin/sh
# Trains GPT-2 1558M from scratch: scripts/run_gpt2.sh 1558M. See --help; --plan shows the plan and starts nothing.
exec "$(dirname "$0")/run_gpt2.sh" 1558M "$@"
