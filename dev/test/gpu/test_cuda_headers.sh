#!/usr/bin/env bash
# Checks that the CUDA code needs nothing newer than CUDA 12.4. One test per program and op: clang 19 parses its host code
# and the syntax of its kernels with the headers of CUDA 12.4. One test for PTX: the assembler of 12.4 accepts nvcc's PTX of
# train_gpt2.cu.
#
#     CUDA_HEADERS=/usr/local/cuda-12.4 dev/test/gpu/test_cuda_headers.sh [--list | NAME ...]
#
# Without CUDA_HEADERS, `make test-full` downloads NVIDIA's packages from PyPI (400 MB) once and keeps 50 MB of them in
# build/cuda-12.4. `make test` skips these tests.
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL
export PATH=$PATH:/usr/local/cuda/bin
cuda=${CUDA_HEADERS:-build/cuda-12.4}
compiler=
for name in clang++-19 clang++; do
    if $name --version 2>/dev/null | grep -q 'version 19\.'; then compiler=$name; break; fi
done

packages=(nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-cccl-cu12==12.4.127
    nvidia-cublas-cu12==12.4.5.8 nvidia-nvtx-cu12==12.4.127)
fetch() {
    python3 -m pip --version >/dev/null 2>&1 || { reason="needs CUDA_HEADERS=DIR, or pip to fetch them"; return; }
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --platform manylinux2014_x86_64 \
        -d "$tmp/wheels" "${packages[@]}" >"$tmp/pip" 2>&1 || { reason="pip cannot fetch the headers: $(tail -n 1 "$tmp/pip")"; return; }
    rm -rf build/cuda-12.4 build/cuda-12.4.new
    mkdir -p build/cuda-12.4.new/bin
    python3 - "$tmp/wheels" build/cuda-12.4.new <<'PYTHON' || { reason="the packages of PyPI are not as expected"; return; }
import glob, os, re, sys, zipfile
for path in glob.glob(sys.argv[1] + "/*.whl"):
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            kept = re.match(r"nvidia/[^/]+/(include/.+[^/]|bin/ptxas)$", name)
            if kept:
                target = os.path.join(sys.argv[2], kept.group(1))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as out:
                    out.write(wheel.read(name))
PYTHON
    rm -r "$tmp/wheels"
    chmod +x build/cuda-12.4.new/bin/ptxas
    mv build/cuda-12.4.new build/cuda-12.4
}

reason=
if [ "${1-}" = --list ] || [ "$called_for" != . ]; then
    reason="nothing runs"
elif [ -z "${CUDA_HEADERS-}" ] && [ -z "${LLMC_TEST_FULL-}" ]; then
    reason="needs CUDA_HEADERS=DIR of CUDA 12.4, or make test-full to fetch them"
elif [ -z "$compiler" ]; then
    reason="needs clang 19: apt-get install clang-19"
elif [ -z "${CUDA_HEADERS-}" ] && [ ! -d build/cuda-12.4 ]; then
    fetch
fi
[ -n "$reason" ] || [ -e "$cuda/include/cuda_runtime.h" ] || { echo "error: no $cuda/include/cuda_runtime.h" >&2; exit 2; }

# Declarations that nvcc has built in and clang 19 lacks, and an empty curand header that clang's own headers include.
mkdir "$tmp/clang"
: >"$tmp/clang/curand_mtgp32_kernel.h"
cat >"$tmp/clang/nvcc.h" <<'CUDA'
#include <cuda_runtime.h>
static_assert(CUDART_VERSION == 12040, "these are not the headers of CUDA 12.4");
template <class T> __device__ T __ldcs(const T*);
template <class T> __device__ T __ldcg(const T*);
template <class T> __device__ void __stcs(T*, T);
template <class T> __device__ void __stcg(T*, T);
template <class T> __device__ void __stwb(T*, T);
__host__ int min(int, int);
__host__ int max(int, int);
// nvcc accepts `__shared__ alignas(16) float a[4]`; the standard wants alignas first, and so does clang. The macro below
// would break headers that apply alignas to a type, so these are included before it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>
#define alignas(bytes) __attribute__((aligned(bytes)))
CUDA

# --cuda-host-only: asm is not checked, and device code is only parsed as C++
parse() { # FILE [FLAG ...]
    $compiler -x cuda --cuda-host-only -fsyntax-only -std=c++17 -w -nocudalib -I "$tmp/clang" -isystem "$cuda/include" \
        --cuda-path="$cuda" --cuda-gpu-arch=sm_90a -include "$tmp/clang/nvcc.h" "${@:2}" "$1"
}

parses() { # FILE PRECISION ...
    [ -z "$reason" ] || skip "$reason"
    local precision
    if grep -q '<nccl.h>' "$1" && [ ! -e "$cuda/include/nccl.h" ]; then skip "needs nccl.h"; fi
    for precision in "${@:2}"; do
        parse "$1" "-DENABLE_$precision" || fail "$1 in $precision needs more than CUDA 12.4"
    done
}

tests=()
for file in *.cu dev/cuda/*.cu; do
    name=$(basename "$file" .cu)
    [[ $name != practice_* ]] || continue # of `make practice`
    precisions=BF16
    [[ $file == */* ]] || precisions="BF16 FP16 FP32"
    eval "test_$name() { parses $file $precisions; }"
    tests+=("$name")
done

# a newer nvcc writes a newer PTX version in the first line; the code itself must be valid PTX 8.4, that of CUDA 12.4
test_ptx() {
    [ -z "$reason" ] || skip "$reason"
    [ -x "$cuda/bin/ptxas" ] || skip "needs $cuda/bin/ptxas"
    command -v nvcc >/dev/null || skip "needs nvcc"
    local arch
    for arch in 80 90a; do
        nvcc -O3 --use_fast_math -std=c++17 -arch=compute_$arch -DENABLE_BF16 -ptx -o "$tmp/train_gpt2.ptx" train_gpt2.cu
        sed -i 's/^\.version .*/.version 8.4/' "$tmp/train_gpt2.ptx"
        "$cuda/bin/ptxas" -arch=sm_$arch -O1 -o "$tmp/train_gpt2.cubin" "$tmp/train_gpt2.ptx" ||
            fail "the assembler of CUDA 12.4 refuses what nvcc makes for $arch"
    done
}

# the check can fail: it refuses a function of CUDA 12.5, an unknown intrinsic, and a constant of cuBLAS 12.8
test_refuses_newer() {
    [ -z "$reason" ] || skip "$reason"
    local line
    for line in 'int f(void** p) { return cudaGetDriverEntryPoint("", p, 0, NULL); }' \
        'cudaError_t f(void** p) { return cudaGetDriverEntryPointByVersion("", p, 12000, 0, NULL); }' \
        '#include <cublasLt.h>
        int f() { return CUBLASLT_MATMUL_DESC_A_SCALE_POINTER; }' \
        '#include <cublasLt.h>
        int f() { return CUBLASLT_MATMUL_DESC_A_SCALE_MODE; }' \
        '__global__ void f(int* p) { *p = __shfl_xor_sync(~0u, *p, 1); }' \
        '__global__ void f(int* p) { *p = no_such_intrinsic(*p); }'; do
        echo "$line" >"$tmp/newer.cu"
        case $line in
        *ByVersion* | *SCALE_MODE* | *no_such*) ! parse "$tmp/newer.cu" 2>/dev/null || fail "passes: $line" ;;
        *) parse "$tmp/newer.cu" || fail "refuses: $line" ;;
        esac
    done
}

tests+=(ptx refuses_newer)
run_tests_once "$@"
