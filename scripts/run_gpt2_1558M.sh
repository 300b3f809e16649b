#!/bin/sh
# GPT-2 1558M from nothing: scripts/run_gpt2.sh 1558M. See --help; --plan says what it would do.
exec "$(dirname "$0")/run_gpt2.sh" 1558M "$@"
