#!/bin/sh
# GPT-2 774M from nothing: scripts/run_gpt2.sh 774M. See --help; --plan says what it would do.
exec "$(dirname "$0")/run_gpt2.sh" 774M "$@"
