# shellcheck shell=bash
# shellcheck disable=SC2154 # a script that sources this file has sourced test.sh, which sets tmp
# Builds for tests of train_gpt2cu without a GPU. `cheap_nvcc` compiles a source once for all tests, without optimisation because
# no kernel runs: see quick_nvcc.sh.
cheap_nvcc=$PWD/dev/test/gpu/quick_nvcc.sh
cheap_arch=75 # the same for all tests, so that they share objects

# changed_since FILE ...: true if one of these files or folders differs from the merge base of HEAD and LLMC_TEST_SINCE, such as
# origin/main. Without LLMC_TEST_SINCE nothing counts as changed. An unknown commit is an error, so that the tests do not silently skip.
since=
if [ -n "${LLMC_TEST_SINCE-}" ]; then
    since=$(git merge-base HEAD "$LLMC_TEST_SINCE" 2>/dev/null) || { echo "error: LLMC_TEST_SINCE=$LLMC_TEST_SINCE is not a commit" >&2; exit 2; }
fi
changed_since() {
    [ -n "$since" ] || return 1
    ! git diff --quiet "$since" -- "$@" || [ -n "$(git ls-files --others --exclude-standard -- "$@")" ]
}

# Builds train_gpt2cu in DIR and links it with fake_cuda.so in place of the CUDA runtime and cuBLASLt.
build_on_stand_in() { # DIR [PRECISION]
    nvcc -O1 -Xcompiler -Wall,-Wextra,-Werror,-fPIC -shared -cudart none "-DENABLE_${2-BF16}" dev/test/stand-ins/fake_cuda.c -o "$1/fake_cuda.so" \
        >"$tmp/log" 2>&1 || { cat "$tmp/log" && fail "dev/test/stand-ins/fake_cuda.c does not compile"; }
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u SPILLS -u DEVICE_ONLY make -s BIN_DIR="$1" PRECISION="${2-BF16}" GPU_COMPUTE_CAPABILITY=$cheap_arch \
        NVCC="$cheap_nvcc --stand-in=$1/fake_cuda.so" "$1/train_gpt2cu" >"$tmp/log" 2>&1 ||
        { cat "$tmp/log" && fail "train_gpt2.cu does not compile"; }
}
