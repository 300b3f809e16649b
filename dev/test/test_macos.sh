#!/usr/bin/env bash
# The C programs compile and link for macOS without a warning. zig brings what that takes, Apple's headers and a linker for
# Mach-O, as a package of a system or of Python (pip install ziglang). Nothing runs: there is no Mac here.
. "$(dirname "$0")/test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL CFLAGS
export ZIG_GLOBAL_CACHE_DIR=$tmp/zig ZIG_LOCAL_CACHE_DIR=$tmp/zig

find_zig() {
    if command -v zig >/dev/null; then
        zig=zig
    elif python3 -m ziglang version >/dev/null 2>&1; then
        zig="python3 -m ziglang"
    else
        skip "needs zig: pip install ziglang"
    fi
}

# by the Makefile, for its flags and its libraries must be right there too
builds_for() { # TARGET
    find_zig
    make BIN_DIR="$tmp/$1" CC="$zig cc -target $1" WERROR=-Werror programs >"$tmp/log" 2>&1 ||
        { grep -aE 'error|warning|\*\*\*' "$tmp/log" | grep -av -- ' -o ' | head -n 20 && fail "does not build for $1"; }
    for source in train_gpt2.c dev/data/*.c; do
        # Mach-O for 64 bits begins with these bytes
        want "the first bytes of ${source%.c}" "$(od -An -tx1 -N4 "$tmp/$1/${source%.c}" | tr -d ' ')" cffaedfe
    done
}
test_arm64() { builds_for aarch64-macos; }
test_x86_64() { builds_for x86_64-macos; }

# the check itself: what only Linux has is refused
test_refuses_linux() {
    find_zig
    # shellcheck disable=SC2086
    for line in 'return madvise(0, 0, MADV_HUGEPAGE);' 'return !memrchr("a", 1, 1);' 'return renameat2(0, "", 0, "", 1);'; do
        printf '#define _GNU_SOURCE\n#include <%s>\n' stdio.h string.h sys/mman.h >"$tmp/linux.c"
        echo "int main(void) { $line }" >>"$tmp/linux.c"
        $zig cc -target aarch64-macos -std=gnu11 -fsyntax-only "$tmp/linux.c" 2>/dev/null && fail "passes: $line"
    done
    return 0
}

tests=(arm64 x86_64 refuses_linux)
run_tests_once "$@"
