#!/usr/bin/env bash
# Data races between the training, the thread that reads data ahead and the thread that writes checkpoints: a run under
# ThreadSanitizer, without OpenMP, whose runtime it does not understand.
. "$(dirname "$0")/../test.sh"

test_training_and_saving() {
    wants_more
    command -v clang >/dev/null || skip "needs clang"
    local build=$tmp/build train=$tmp/build/train_gpt2
    if ! make -s CC=clang BIN_DIR="$build" CFLAGS='-O1 -g -fsanitize=thread' OPENMP= "$train" >"$tmp/make.out" 2>&1; then
        ! grep -q 'tsan\|fsanitize' "$tmp/make.out" || skip "this clang has no ThreadSanitizer"
        fail "$(tail -n 5 "$tmp/make.out")"
    fi
    "$BIN_DIR/dev/data/tokenize" -i llmc/gpt2.h -o "$tmp/data/a" -v 1000 -s 5000 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    # the sanitizer needs fixed addresses on some kernels
    local fixed=()
    ! setarch -R true 2>/dev/null || fixed=(setarch -R)
    "${fixed[@]}" "$train" --recipe llmc -e d6 --layers 2 --channels 32 --heads 2 --positions 32 -b 2 -t 32 -i "$tmp/data/a_train_*.bin" \
        -j "$tmp/data/a_val_*.bin" -o "$tmp/run" -x 400 -v 100 -n 80 -nk 2 --keep-best -s 200 >"$tmp/out" 2>"$tmp/err" ||
        fail "status $?: $(tail -n 3 "$tmp/err")"
    want "reports" "$(grep -c 'WARNING: ThreadSanitizer' "$tmp/err")" 0
    grep -q 'the run waited for' "$tmp/out" || fail "no asynchronous save"
}

tests=(training_and_saving)
run_tests_once "$@"
