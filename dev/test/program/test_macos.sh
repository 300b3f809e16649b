#!/usr/bin/env bash
# Compiles and links the C programs for macOS, without a warning. zig provides Apple's headers and a linker for Mach-O; it
# is a package of many systems and of PyPI (pip install ziglang). Nothing is run.
. "$(dirname "$0")/../test.sh"
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

# Uses the Makefile, because its flags and libraries must be right for macOS too.
builds_for() { # TARGET
    find_zig
    # with -target, `zig cc --version` would write a file a.o to the current directory
    printf '#!/bin/sh\n[ "$1" != --version ] || exec %s cc --version\nexec %s cc -target %s "$@"\n' "$zig" "$zig" "$1" >"$tmp/cc"
    chmod +x "$tmp/cc"
    make BIN_DIR="$tmp/$1" CC="$tmp/cc" WERROR=-Werror programs >"$tmp/log" 2>&1 ||
        { grep -aE 'error|warning|\*\*\*' "$tmp/log" | grep -av -- ' -o ' | head -n 20 && fail "does not build for $1"; }
    for source in train_gpt2.c dev/data/*.c; do
        # the magic number of a 64-bit Mach-O file
        want "the first bytes of ${source%.c}" "$(od -An -tx1 -N4 "$tmp/$1/${source%.c}" | tr -d ' ')" cffaedfe
    done
}
test_arm64() { builds_for aarch64-macos; }
test_x86_64() { builds_for x86_64-macos; }

# the check can fail: it refuses calls that only Linux has, and nothing else in these lines
test_refuses_linux() {
    find_zig
    local line
    compiles() { # LINE of main
        printf '#define _GNU_SOURCE\n#include <%s>\n' stdio.h string.h sys/mman.h >"$tmp/one.c"
        echo "int main(void) { $1 }" >>"$tmp/one.c"
        # shellcheck disable=SC2086
        $zig cc -target aarch64-macos -std=gnu11 -c -o "$tmp/one.o" "$tmp/one.c" 2>/dev/null
    }
    compiles 'return madvise(0, 0, MADV_NORMAL) || memchr("a", 1, 1) || rename("", "");' || fail "refuses what macOS has"
    for line in 'return madvise(0, 0, MADV_HUGEPAGE);' 'return !memrchr("a", 1, 1);' 'return renameat2(0, "", 0, "", 1);'; do
        ! compiles "$line" || fail "passes: $line"
    done
}

tests=(arm64 x86_64 refuses_linux)
run_tests_once "$@"
