# shellcheck shell=bash
# shellcheck disable=SC2154 # a script that sources this file has sourced test.sh, which sets tmp
# What tests of train_gpt2cu without a GPU build. `cheap_nvcc` is an nvcc that compiles a source once for all tests and without
# optimisation, because no kernel is run: see quick_nvcc.sh.
cheap_nvcc=$PWD/dev/test/gpu/quick_nvcc.sh
cheap_arch=75 # the same for all tests, so that they share what is compiled

# changed_since FILE ...: true if one of these files or folders differs from the merge base of HEAD and LLMC_TEST_SINCE, such as
# origin/main. Without LLMC_TEST_SINCE nothing counts as changed. No such commit is an error, not a test that compiles nothing.
since=
if [ -n "${LLMC_TEST_SINCE-}" ]; then
    since=$(git merge-base HEAD "$LLMC_TEST_SINCE" 2>/dev/null) || { echo "error: LLMC_TEST_SINCE=$LLMC_TEST_SINCE is no commit here" >&2; exit 2; }
fi
changed_since() {
    [ -n "$since" ] || return 1
    ! git diff --quiet "$since" -- "$@" || [ -n "$(git ls-files --others --exclude-standard -- "$@")" ]
}

# Builds train_gpt2cu and fake_cuda.so, which it takes for the CUDA runtime and cuBLASLt, in DIR.
build_on_stand_in() { # DIR [PRECISION]
    nvcc -O1 -Xcompiler -Wall,-Wextra,-Werror,-fPIC -shared -cudart none "-DENABLE_${2-BF16}" dev/test/stand-ins/fake_cuda.c -o "$1/fake_cuda.so" \
        >"$tmp/log" 2>&1 || { cat "$tmp/log" && fail "dev/test/stand-ins/fake_cuda.c does not compile"; }
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u SPILLS -u DEVICE_ONLY make -s BIN_DIR="$1" PRECISION="${2-BF16}" GPU_COMPUTE_CAPABILITY=$cheap_arch \
        NVCC="$cheap_nvcc --stand-in=$1/fake_cuda.so" "$1/train_gpt2cu" >"$tmp/log" 2>&1 ||
        { cat "$tmp/log" && fail "train_gpt2.cu does not compile"; }
}
