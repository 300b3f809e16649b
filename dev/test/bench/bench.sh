# shellcheck shell=bash
# Common to bench_generation.sh and bench_weights8.sh, which include it.

fail() { # STATUS MESSAGE
    echo "error: $2" >&2
    exit "$1"
}

# Sees that the vocabulary and the text are in DATA, and makes the directory of the logs and `tmp`, which goes at the end.
bench_open() { # DATA LOGS
    [ -e "$1/gpt2_tokenizer" ] && [ -s "$1/tinyshakespeare.txt" ] ||
        fail 1 "$1 has no gpt2_tokenizer/ and tinyshakespeare.txt: LLMC_DATA names a directory that has"
    tmp=$(mktemp -d /tmp/llmc_bench_XXXXXX) || exit 1
    trap 'rm -rf "$tmp"' EXIT
    logs=${2:-$tmp/logs}
    mkdir -p "$logs" || exit 1
}
