#!/bin/sh
# GPT-2 350M from nothing: scripts/run_gpt2.sh 350M. See --help; --plan says what it would do.
exec "$(dirname "$0")/run_gpt2.sh" 350M "$@"
