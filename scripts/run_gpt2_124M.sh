#!/bin/sh
# GPT-2 124M from nothing: scripts/run_gpt2.sh 124M. See --help; --plan says what it would do.
exec "$(dirname "$0")/run_gpt2.sh" 124M "$@"
