#!/usr/bin/env bash
# Makes a new op: OP.cu with two kernels, a reference and check shapes. It builds and passes its check as it is; its op, a copy,
# stands in three places, which say `the op:`.
#
#     make new OP=rope_forward
set -u -o pipefail
export LC_ALL=C
usage() { echo "error: $*: make new OP=rope_forward" >&2; exit 2; }
cd "$(dirname "$0")" || exit 1
op=${1-}
[ -n "$op" ] || usage "no OP"
[[ $op =~ ^[a-z][a-z0-9_]*$ && $op != practice_* && $op != *_cpu ]] ||
    usage "OP='$op' is no name of an op, which has small letters, digits and _, and neither begins with practice_ nor ends with _cpu"
for file in "$op.cu" "$op.cuh" "$op"; do [ ! -e "$file" ] || usage "$file is there already; a new op needs another name"; done
# an op's binaries are OP and OP_cpu; without OP= and OPS= this one would be a target, too
! grep -qE "^$op(_cpu)?:" < <(MAKEFLAGS='' make -qp OP= OPS= 2>/dev/null) || usage "OP='$op' is a target of the Makefile here"
# the keywords that are not in the text below
keywords='alignas alignof and and_eq asm auto bitand bitor bool break case catch class compl const_cast constexpr continue decltype
default delete do dynamic_cast else enum explicit export extern false friend goto inline long mutable namespace new noexcept not
not_eq nullptr operator or or_eq private protected public register reinterpret_cast short signed static_assert static_cast struct
switch template this thread_local throw true try typedef typeid typename union using virtual volatile wchar_t while xor xor_eq'
text=$(sed -e '1,/^#include/d; /^CU$/,$d' -e 's|//.*||; s/"[^"]*"//g' "${0##*/}")
! grep -qw -- "$op" <<<"$keywords $text" || usage "OP='$op' is a word of C++, or of the new file itself"
sed "s/@OP@/$op/g" >"$op.cu" <<'CU'
/* @OP@: out = inp; say here what it computes

   out (B,T,C) floatX out | inp (B,T,C) floatX in
   Bound: memory, 2*B*T*C*sizeof(floatX) bytes. Constraint: C % x128::size == 0 for kernel 2, pointers aligned to 16 bytes.
   Error: one ulp of floatX.
   Source: the paper or the formula.

   Kernels (this list is written by versions.sh):
     1  one thread per element
     2  one 128-bit vector per thread (best)

   nvcc -O3 --use_fast_math @OP@.cu -o @OP@      (or: make @OP@)
   ./@OP@ 2      check kernel 2 against the CPU and sweep its block sizes
   ./@OP@        every kernel, side by side                                         */
#include "bench.h"

// ---- the reference: simple enough to be believed, in double -----------------------------------------
// It may move to reference.h once another op needs it.

static void @OP@_cpu(float* out, const float* inp, int B, int T, int C) {
    parallel_for((size_t)B * T, [=](size_t row) { // position row % T of sequence row / T
        for (int c = 0; c < C; c++) {
            double x = inp[row * C + c];
            out[row * C + c] = (float)x; // the op: 1 of 3
        }
    });
}

// ---- kernel 1: one thread per element ----------------------------------------------------------------

__global__ void @OP@_kernel1(floatX* out, const floatX* inp, int B, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * T * C) { return; }
    out[i] = (floatX)(float)inp[i]; // the op: 2 of 3; channel i % C, position i / C % T
}

void @OP@1(floatX* out, const floatX* inp, int B, int T, int C, cudaStream_t stream, int block_size) {
    size_t n = (size_t)B * T * C;
    @OP@_kernel1<<<(unsigned)ceil_div(n, (size_t)block_size), block_size, 0, stream>>>(out, inp, B, T, C);
    cudaCheck(cudaGetLastError());
}

// ---- kernel 2: one 128-bit vector per thread -----------------------------------------------------------

__global__ void @OP@_kernel2(floatX* out, const floatX* inp, int B, int T, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= (size_t)B * T * C) { return; }
    x128 x = load128(inp + i);
    for (int k = 0; k < x128::size; k++) {
        x[k] = (floatX)(float)x[k]; // the op: 3 of 3; channel (i + k) % C
    }
    store128(out + i, x);
}

// The launcher of the best kernel has no number. block_size 0: its own choice
void @OP@(floatX* out, const floatX* inp, int B, int T, int C, cudaStream_t stream, int block_size = 0) {
    require(C % x128::size == 0);
    if (block_size == 0) { block_size = 256; }
    size_t num_blocks = ceil_div((size_t)B * T * C, (size_t)x128::size * block_size);
    @OP@_kernel2<<<(unsigned)num_blocks, block_size, 0, stream>>>(out, inp, B, T, C);
    cudaCheck(cudaGetLastError());
}

// The comment at the top of bench.h explains what stands here, and what else may.
static void declare(Bench& b) {
    int B = b.B, T = b.T, C = b.C; // an op with heads also reads b.NH: require(C % b.NH == 0);
    size_t n = (size_t)B * T * C;
    cudaStream_t stream = b.stream;
    Buffer<floatX> inp = b.input<floatX>("inp", n); // random normal
    // the allowed error; ulps<floatX>(1, 1.0f) if a result is a sum of terms near 1, which may cancel
    Buffer<floatX> out = b.output<floatX>("out", n, ulps<floatX>(1));
    b.reference([=] { @OP@_cpu(out.host, inp.host, B, T, C); });
    b.cost(2.0 * n * sizeof(floatX), 0); // the least bytes, FLOPs
    b.kernel(1, "one thread per element", [=](int bs) { @OP@1(out, inp, B, T, C, stream, bs); });
    if (C % x128::size == 0) {
        b.kernel(2, "one 128-bit vector per thread", [=](int bs) { @OP@(out, inp, B, T, C, stream, bs); },
                 {0, 64, 128, 256, 512, 1024});
    }
    b.best(2);
}

// The shape that is timed: B, T, C, heads, vocabulary. Then the shapes of --check, where 0 stands for the timed value: T = 1, odd
// sizes (if the op takes them), and the timed T with few channels, because an error may grow with the position.
int main(int argc, char** argv) {
    return bench_main(argc, argv, "@OP@", declare, {64, 1024, 768, 12, 50257},
                      {{1, 1, 8, 1}, {3, 17, 776, 2}, {2, 5, 9, 1}, {1, 0, 64, 2}});
}
CU
echo "wrote $op.cu. Change the op in the three places that say 'the op:', then

    make cpu OP=$op && ./${op}_cpu --check     without a GPU
    make $op && ./$op 2                        with one: its check and its times
    ./versions.sh $op                          after a change of declare(): the list at the top of the file
    notes/$op.md                               each attempt, also a failed one, as notes/README.md says"
