#!/usr/bin/env bash
# The kernels of dev/cuda on a CPU (dev/cuda/emulation): the emulation itself, the functions of bench.h, --check of every
# kernel that it can run, and mutants, that is kernels with one wrong line each, which --check must find.
#
# `make test` checks the ops with a kernel in train_gpt2.cu, in bf16, with one schedule and the smallest shapes. .ci/run checks all ops
# and plants the mutants that are marked with a +. `make test-full` checks all precisions and larger shapes and plants all mutants.
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION
CXX=${CXX:-g++}
full=${LLMC_TEST_FULL:-}
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
mutants=dev/test/gpu/emulation_mutants.txt

needs_compiler() { command -v "$CXX" >/dev/null || skip "needs $CXX"; }

# Copies the sources and what is built from them, so that a mutant never reaches the tree.
copy_tree() {
    [ ! -d "$tmp/tree" ] || return 0
    mkdir -p "$tmp/tree/dev"
    cp -rp llmc "$tmp/tree/"
    cp -rp dev/cuda "$tmp/tree/dev/"
    rm -f "$tmp"/tree/dev/cuda/*_cpu*
    share_emulated "$tmp/tree"
}

# make_cpu VARIABLE=VALUE ...: builds in the copy, with a PATH on which there is no nvcc
make_cpu() {
    make -C "$tmp/tree/dev/cuda" --no-print-directory CXX="$CXX" NVCC=/nonexistent "$@" >"$tmp/log" 2>&1 ||
        { tail -n 30 "$tmp/log" && fail "make $* failed"; }
}

test_programs() {
    needs_compiler
    copy_tree
    make_cpu cpu OP=simple_kernel
    "$tmp/tree/dev/cuda/simple_kernel_cpu" --list >"$tmp/out"
    contains '1  one thread per element' "$tmp/out"
    "$tmp/tree/dev/cuda/simple_kernel_cpu" --help >"$tmp/out"
    contains '--schedule' "$tmp/out"
    contains 'with more than 2^32 elements' "$tmp/out"
    # without --check it says that it does not measure
    "$tmp/tree/dev/cuda/simple_kernel_cpu" 1 --schedule 3 -B 1 -T 1 -C 8 >"$tmp/out"
    contains 'times would mean nothing' "$tmp/out"
    contains '10 passed, 0 failed, 0 skipped' "$tmp/out"
}

# The choices of a program: configurations, kinds of operation, kinds of input.
test_choices() {
    needs_compiler
    copy_tree
    cat >"$tmp/tree/dev/cuda/choices.cu" <<'CU'
#include "bench.h"
__global__ void add_kernel(float* out, const float* inp, float x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) { out[i] = inp[i] + x; }
}
static void declare(Bench& b) {
    int n = b.C, kind = b.kinds({"plus one", "plus two"});
    float x = kind + 1.0f;
    Buffer<float> inp = b.input<float>("inp", n, b.cases({"normal", "zeros"}) == 1 ? 0.0f : 1.0f);
    Buffer<float> out = b.output<float>("out", n, {0, 0});
    b.reference([=] { for (int i = 0; i < n; i++) { out.host[i] = inp.host[i] + x; } });
    b.kernel(1, "any block size", [=](int bs) { add_kernel<<<1, bs>>>(out, inp, x, n); }, {32, 64});
    b.kernel(2, "wrong if it adds 22", [=](int form) { add_kernel<<<1, 32>>>(out, inp, form ? form : x, n); }, {0, 22});
    b.config("summand", {{0, "that of the kind"}, {22, "large"}});
    b.kernel(3, "one configuration", [=](int) { add_kernel<<<1, 32>>>(out, inp, x, n); }, {0});
    if (kind == 1) { b.kernel(4, "two only", [=](int rows) { add_kernel<<<1, rows>>>(out, inp, x, n); }, {32, 96}), b.config("rows"); }
    b.best(kind == 1 ? 4 : 1);
}
int main(int argc, char** argv) {
    return bench_main(argc, argv, "choices", declare, {1, 1, 100},
                      {{1, 1, 5}, with_kind(1, {1, 1, 6})});
}
CU
    make_cpu cpu OP=choices
    rm "$tmp/tree/dev/cuda/choices.cu"
    local program=$tmp/tree/dev/cuda/choices_cpu
    want "--list" "$("$program" --list)" "1  any block size (best)
2  wrong if it adds 22
     summand    0 (that of the kind)
     summand   22 (large)
3  one configuration
4  two only (best)
     rows 32 96
kind 0  plus one
kind 1  plus two
case 0  normal
case 1  zeros"
    # checked WANT FLAG ...: the C of the shapes that are checked with these flags
    checked() {
        "$program" "${@:2}" --check >"$tmp/out" 2>&1
        want "the shapes of ${*:2}" "$(sed -n '/^note/d; s/.* C \([0-9]*\)[, ].*/\1/p' "$tmp/out" | sort -un | tr '\n' ' ')" "$1"
    }
    checked "5 6 " 3
    checked "6 " 4
    checked "5 " 3 --kind 0
    checked "6 " 3 --kind 1 --case 1
    contains ', plus two, zeros: ' "$tmp/out"
    ! grep -q ', plus two: ' "$tmp/out" || fail "--case 1 tries case 0, too"
    checked "4 8 9 16 " 3 -C 4:16:*2,9 --kind 1
    EMULATION_GPUS=2 checked "9 " 3 -C 9 --device 1
    checked "9 " 3 -C 9 --kind 1
    contains 'ok kernel 3 default, C 9, plus two: ' "$tmp/out"
    "$program" 2 --check >"$tmp/out" && fail "a wrong configuration passes"
    contains 'FAIL kernel 2 summand   22 (large), C 5, plus one: out: 5 of 5 wrong, ' "$tmp/out"
    want "its failures" "$(grep -c '^FAIL' "$tmp/out")" 1
    contains 'the same in 3 more: FAIL kernel 2: out: 5 of 5 wrong' "$tmp/out"
    contains '4 passed, 4 failed, 0 skipped' "$tmp/out"
    local flags
    for flags in "2 --config 0" "3 --config 0" "1 --config 96" "1 --block-size 64" "1 --config -1" "4 --config 96"; do
        # shellcheck disable=SC2086
        "$program" $flags --check >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "$flags"; }
    done
    contains 'ok kernel 4 rows   96, ' "$tmp/out"
    ! grep -q 'rows   32' "$tmp/out" || fail "--config 96 tries 32, too"
    for flags in "2 --config 1 :kernel 2 has no configuration 1, there are 0 22" "1 --config 2000 :no configuration 2000" \
        "1 --config 100 :kernel 1 has no configuration 100, there are 32 64, and other multiples of 32 up to 1024" \
        "--config 100 :no kernel has configuration 100" "5- :no kernel 5-, there are 1 2 3 4" "3-2 :3-2" "1,,2 :does not name kernels" "1 2 :stray argument" \
        "-C 0 :-C wants whole numbers from 1" "-C 4,x :-C wants" "--stress 2 -C 5,6 :--stress takes one shape, not 2" "--device 1 :no GPU 1, there is 0" \
        "3 --config 64 :kernel 3 has no configuration 64, there are 0" "--kind 2 :no kind 2, there are 0 to 1" \
        "--config 2000 :no kernel has configuration 2000, see" "--list --csv x :--csv cannot be combined with --list, which" \
        "--case 2 :no case 2, there are 0 to 1" "4 --kind 0 :no kernel 4, there are 1 2 3"; do
        local rc=0
        # shellcheck disable=SC2086
        "$program" ${flags%%:*} --check >"$tmp/out" 2>"$tmp/err" || rc=$?
        want "the exit code of ${flags%%:*}" $rc 2
        contains "${flags#*:}" "$tmp/err"
    done
}

# What an op's author sees first: which kernels an argument names, one finding once, short lines, declined shapes, slips in declare().
test_messages() {
    needs_compiler
    copy_tree
    local source=$tmp/tree/dev/cuda/messages.cu program=$tmp/tree/dev/cuda/messages_cpu flags
    cat >"$source" <<'CU'
#include "bench.h"
__global__ void copy_kernel(float* out, const float* inp, int n, float add) {
    __shared__ float x[32];
    x[threadIdx.x % 32] = add;
    for (int i = threadIdx.x; i < n; i += blockDim.x) { out[i] = inp[i] + (add ? x[(threadIdx.x + 1) % 32] : 0); }
}
static void copy_even(float* out, const float* inp, int n, int bs) {
    require(n % 2 == 0);
    copy_kernel<<<1, bs>>>(out, inp, n, 0);
    cudaCheck(cudaGetLastError());
}
static void declare(Bench& b) {
    int n = b.C, heads = b.NH;
    Buffer<float> inp = b.input<float>("inp", n), out = b.output<float>("out", n, {0, 0});
    b.reference([=] { for (int i = 0; i < n; i++) { out.host[i] = inp.host[i]; } });
    b.cost(8.0 * n * b.T, 0);
    b.kernel(1, "even sizes", [=](int bs) { copy_even(out, inp, n, bs); }, {32});
    b.kernel(2, "a launch that fails", [=](int) { copy_even(out, inp, n - n % 2, 2048); }, {0});
    b.kernel(3, "races", [=](int bs) { copy_kernel<<<1, bs>>>(out, inp, n, 1); }, {64, 64});
    b.kernel(4, "right", [=](int bs) { cudaMemcpy(out, inp, 4 * n, cudaMemcpyDeviceToDevice); }, {0}, 80);
    b.kernel(5, "divides", [=](int bs) { copy_kernel<<<1, 32 / bs>>>(out, inp, n, (float)heads); }, {0});
    if (b.dry || n == 5) { b.kernel(6, "some devices", [=](int bs) { copy_kernel<<<1, bs>>>(out, inp, n, 0); }, {32}); }
    b.best(4);
}
int main(int argc, char** argv) {
    return bench_main(argc, argv, "messages", declare, {1, 1000000000, 32, 2}, {{1, 1, 5}, {1, 1, 6}, {1, 100000000, 7}});
}
CU
    make_cpu cpu OP=messages
    shows() { # RC TEXT FLAG ...: the program ends with RC and prints a line with TEXT, and none of 200 characters
        local rc=0
        "$program" "${@:3}" >"$tmp/out" 2>&1 || rc=$?
        contains "$2" "$tmp/out"
        want "the exit code of ${*:3}" $rc "$1"
        want "long lines of ${*:3}" "$(awk 'length > 199' "$tmp/out" | wc -l)" 0
    }
    # a launcher that declines one of the op's own shapes fails; at a shape of the user's it is skipped
    shows 1 "FAIL kernel 1 block size   32, T 1 C 5 NH 2: the launcher declines: messages.cu:8: copy_even needs n % 2 == 0; declare " --check 1
    contains 'ok kernel 1 block size   32, T 1 C 6 NH 2: ' "$tmp/out"
    shows 0 "skip kernel 1 (even sizes), T 1 C 7 NH 2: declines: messages.cu:8: copy_even needs n % 2 == 0" 1 --check -T 1 -C 7
    contains '0 passed, 0 failed, 1 skipped' "$tmp/out"
    shows 1 "FAIL kernel 2 default, T 1 C 6 NH 2: the launcher declines: messages.cu:10: cudaGetLastError(): invalid " --check -T 1 -C 6 2
    shows 1 "error: messages, kernel 5 default, T 1 C 5 NH 2: a division by zero; configuration 0 stands for " --check 5
    EMULATION_ARCH=75 shows 1 "skip kernel 4 (right): needs code for sm_80, but the GPU is sm_75 and " 4 -T 1 --transactions
    # a kernel that declare() leaves out on the device: at all shapes, at one shape
    local left_out='skip kernel 6 (some devices): needs another GPU or another shape: declare() leaves it out on sm_80'
    EMULATION_ARCH=80 shows 1 "$left_out" 6 -T 1 -C 6 --transactions
    EMULATION_ARCH=80 shows 0 "$left_out" 6 -T 1 -C 6 --check --stress 1
    EMULATION_ARCH=80 shows 0 "$left_out" 6 -T 1 -C 6
    contains '0 passed, 0 failed, 1 skipped' "$tmp/out"
    shows 0 "1 passed, 0 failed, 1 skipped" 6 --check # C 7 takes too long
    # a shape that the emulation cannot afford, and the one that is timed
    shows 0 "skip T 100000000 C 7 NH 2: takes the emulation too long; EMULATION_LIMIT=10 " 4 --check
    contains '2 passed, 0 failed, 1 skipped' "$tmp/out"
    contains 'note: the shape that is timed, T 1000000000 C 32 NH 2, was not checked; --check --full does that' "$tmp/out"
    ! "$program" 4 --check -T 1 | grep '^note' || fail "a note although the shape was given"
    # one finding once
    shows 1 "the same in 3 more: FAIL kernel 3: copy_kernel: " 3-4 --check --schedule 0
    want "the failures" "$(grep -c '^FAIL ' "$tmp/out")" 1
    grep -q '^    out: [0-9]* of 5 wrong' "$tmp/out" || fail "a part of a failure does not begin a line"
    shows 1 "0 passed, 1 failed, 0 skipped" --check 3,4 --first-failure
    shows 2 "--csv cannot be combined with --list" --list --csv "$tmp/times"
    # ranges
    "$program" 2-3,5- --list >"$tmp/out"
    want "the kernels of 2-3,5-" "$(grep -o '^[0-9]*' "$tmp/out" | tr '\n' ' ')" "2 3 5 6 "
    # slips in declare()
    sed -i 's/int n = b.C,/require(b.C != 6); &/' "$source"
    make_cpu cpu OP=messages
    shows 1 "FAIL B 1 T 1 C 6 NH 2 V 0: declare() declines: messages.cu:13: declare needs b.C != 6; change the shapes in main" 4 --check
    contains '1 passed, 1 failed, 1 skipped' "$tmp/out"
    shows 0 "skip B 1 T 1 C 6 NH 2 V 0: declare() declines: messages.cu:13: declare needs b.C != 6" 4 --check -T 1 -C 5:6:1
    contains '1 passed, 0 failed, 1 skipped' "$tmp/out"
    shows 2 "messages_cpu: C 6: messages.cu:13: declare needs b.C != 6" 4 --check -C 6
    sed -i.old 's/b.best(4)/b.best(7)/' "$source"
    make_cpu cpu OP=messages
    shows 1 "error: messages.cu:$(grep -n 'b.best' "$source" | cut -d: -f1): b.best(7), but there is no such kernel" --list
    sed 's/b.kernel(4/b.kernel(3/' "$source.old" >"$source"
    make_cpu cpu OP=messages
    shows 1 "error: messages.cu:$(grep -n '"right"' "$source" | cut -d: -f1): b.kernel(3, \"right\"): \"races\" has this number, too" --list
    rm "$source" "$source.old" "$program"
}

# What `make new` writes passes its check at once, and fails it when one of its kernels is another op.
test_new_op() {
    needs_compiler
    copy_tree
    make_cpu new OP=new_op
    make_cpu cpu OP=new_op
    local program=$tmp/tree/dev/cuda/new_op_cpu
    "$program" --check >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "a new op fails its check"; }
    contains '38 passed, 0 failed, 0 skipped' "$tmp/out"
    contains 'T 1024 C 64: error 0.00 of tolerance' "$tmp/out"
    ! grep -i warning "$tmp/log" || fail "a new op has warnings"
    sed -i 's|x\[k\] = (floatX)(float)x\[k\];|x[k] = (floatX)(2 * (float)x[k]);|' "$tmp/tree/dev/cuda/new_op.cu"
    make_cpu cpu OP=new_op
    "$program" 2 --check >"$tmp/out" 2>&1 && fail "another op passes the check"
    contains 'FAIL kernel 2 default, B 1 T 1 C 8: out: ' "$tmp/out"
    rm "$program" "$tmp/tree/dev/cuda/new_op.cu"
}

# --stress draws the same shapes again for the same seed; --sample leaves most rows out; --huge needs a GPU
test_check_flags() {
    needs_compiler
    copy_tree
    make_cpu cpu OP=matmul_forward
    local program=$tmp/tree/dev/cuda/matmul_forward_cpu twice
    for twice in 1 2; do
        EMULATION_LIMIT=0.03 timeout 300 "$program" 3 --check --stress 5 --seed 20000 >"$tmp/stress$twice" 2>&1 ||
            { cat "$tmp/stress$twice" && fail "--stress 5 --seed 20000 fails"; }
    done
    cmp "$tmp/stress1" "$tmp/stress2" || fail "--stress draws other shapes for the same seed"
    contains '5 random shapes: 5 passed, 0 failed, 0 skipped' "$tmp/stress1"
    EMULATION_LIMIT=0.03 "$program" 3 --check --sample 2 >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "--sample 2 fails"; }
    # a row that is not in the sample is not compared, but it must be finite
    sed -i 's/^    if (row >= f.N/    if (row == f.N \/ 2 \&\& f.N > 100) { f.out[(size_t)row * f.OC + col] = NAN; return; }\n&/' \
        "$tmp/tree/dev/cuda/matmul_forward.cu"
    ! cmp -s dev/cuda/matmul_forward.cu "$tmp/tree/dev/cuda/matmul_forward.cu" || fail "the edit changes nothing"
    make_cpu cpu OP=matmul_forward
    cp dev/cuda/matmul_forward.cu "$tmp/tree/dev/cuda/"
    "$program" 3 --check --sample 2 -B 3 -T 43 -C 64 -V 64 -NH 1 >"$tmp/out" 2>&1 && fail "NaN passes outside of the sample"
    contains 'FAIL kernel 3' "$tmp/out"
    "$program" 3 --check --huge >"$tmp/out" || fail "--huge is not skipped"
    contains 'skip matmul_forward --huge' "$tmp/out"
    # a file of times is refused where no times are taken
    local each rc
    for each in "--check --csv:--csv cannot be" "--check --json:--json cannot be" "--csv:--csv needs a GPU" "--json:--json needs a GPU" \
        "--transactions --csv:--csv needs a GPU"; do
        rc=0
        # shellcheck disable=SC2086
        timeout 60 "$program" 3 ${each%%:*} "$tmp/times" >"$tmp/out" 2>"$tmp/err" || rc=$?
        want "the exit code of ${each%%:*}" $rc 2
        want "the lines on stderr for ${each%%:*}" "$(wc -l <"$tmp/err")" 1
        contains "${each#*:}" "$tmp/err"
        [ ! -e "$tmp/times" ] || fail "${each%%:*} writes a file"
    done
    rm "$program" # of the changed source
}

# What the ops use rarely: 20 schedules each, with one and with four workers, and with the orders of streams.
test_features() {
    needs_compiler
    copy_tree
    cp dev/test/gpu/emulation_features.cu "$tmp/tree/dev/cuda/"
    make_cpu cpu OP=emulation_features
    rm "$tmp/tree/dev/cuda/emulation_features.cu"
    local schedule orders=("" EMULATION_STREAMS=early EMULATION_STREAMS=late)
    for schedule in {0..19}; do
        # shellcheck disable=SC2086
        env ${orders[schedule % 3]} EMULATION_THREADS=$((1 + schedule % 2 * 3)) timeout 60 "$tmp/tree/dev/cuda/emulation_features_cpu" --check \
            --schedule "$schedule" >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "schedule $schedule fails"; }
        contains '9 passed, 0 failed, 0 skipped' "$tmp/out"
    done
    local each rc
    for each in THREADS=0 THREADS=1.5 LIMIT=x LIMIT=-1 ARCH=sm_80 ARCH=85 SMS=0 GPUS=two STREAMS=soon; do
        rc=0
        env "EMULATION_$each" "$tmp/tree/dev/cuda/emulation_features_cpu" --check >"$tmp/out" 2>&1 || rc=$?
        want "the exit code of $each" $rc 2
        contains "error: EMULATION_${each%%=*} must be " "$tmp/out"
    done
}

# Pointers of the host in a kernel, and of the device on the host: the mistakes that the course's first program invites.
test_pointers() {
    needs_compiler
    copy_tree
    local folder=$tmp/tree/dev/learn name rc
    mkdir "$folder"
    cp dev/learn/hello.mk dev/learn/hello_findings.cpp "$folder"
    sed 's/n = 10000000/n = 1000/' dev/learn/hello.cu >"$folder/hello.cu"
    sed 's/(d_out, d_inp, n);/(out, inp, n);/; /copy from the device/d' "$folder/hello.cu" >"$folder/on_device.cu"
    sed 's/num_wrong += out/num_wrong += d_out/' "$folder/hello.cu" >"$folder/on_host.cu"
    for name in hello on_device on_host; do
        make -C "$folder" -f hello.mk --no-print-directory CXX="$CXX" NVCC=/nonexistent ${name}_cpu >"$tmp/log" 2>&1 || { cat "$tmp/log" && fail "$name"; }
        rc=0
        "$folder/${name}_cpu" >"$tmp/$name" 2>&1 || rc=$?
        want "the exit code of $name" $rc "$([ $name = hello ] && echo 0 || echo 1)"
    done
    contains ' 0 of 1000 elements wrong' "$tmp/hello"
    contains "twice: a read of the host's memory through parameter 2, which does not come from cudaMalloc, at on_device.cu:$(grep -n 'out\[i\] = ' dev/learn/hello.cu | cut -d: -f1), " "$tmp/on_device"
    contains "twice: a write to the host's memory through parameter 1, " "$tmp/on_device"
    contains "error: the host reads device memory, byte 0 of an allocation of 4000, at on_host.cu:$(grep -n 'num_wrong +=' dev/learn/hello.cu | cut -d: -f1): it needs cudaMemcpy" "$tmp/on_host"
}

# site PROGRAM KERNEL SITE ACCESS WANT: fails unless --transactions prints WANT for this access ("read 4 B") in the line with
# the comment "// site SITE" of $source, or in line SITE if it has no such comment
site() {
    local line got
    line=$(grep -n "// site $3\$" "$source" | cut -d: -f1)
    # shellcheck disable=SC2086
    "$1" "$2" --transactions $flags >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "kernel $2 fails"; }
    got=$(awk -v at="$(basename "$source"):${line:-$3}" -v access="  $4 " '
        /^[^ ]/ { inside = $1 == at }
        inside && index($0, access) == 1 { print substr($0, length(access)) }' "$tmp/out" | tr -s ' ' | sed 's/^ //')
    [ "$got" = "$5" ] || { cat "$tmp/out" && fail "kernel $2, $4 in line ${line:-$3}: '$got', want '$5'"; }
}

# What --transactions counts where the right numbers follow by arithmetic.
test_transactions() {
    needs_compiler
    command -v addr2line >/dev/null || command -v llvm-symbolizer >/dev/null || skip "needs addr2line"
    copy_tree
    local source=dev/cuda/simple_kernel.cu program=$tmp/tree/dev/cuda/simple_kernel_cpu flags line
    make_cpu cpu OP=simple_kernel
    # 6144 elements: 192 warps, each asks for 32 * 2 bytes = 2 sectors
    flags="-B 1 -T 8 -C 768 --config 256"
    line=$(grep -n 'if (i < n) { out\[i\]' $source | cut -d: -f1)
    site "$program" 1 "$line" "read 2 B" "192 12288 384 2.00 384 100%"
    site "$program" 1 "$line" "write 2 B" "192 12288 384 2.00 384 100%"
    contains 'all: 1 launch, 24576 bytes asked, 24576 in sectors, efficiency 100%, 24576 unique;' "$tmp/out"
    contains 'simple_kernel_kernel1: 1 launch, 24 blocks of 256 threads' "$tmp/out"
    # 49152 elements, 64 per thread: each of 32 lanes in a sector of its own, of which it wants 2 bytes
    flags="-B 1 -T 64 -C 768 --config 256"
    line=$(grep -n 'for (size_t i = begin; i < end; i++) { out' $source | cut -d: -f1)
    site "$program" 4 "$line" "read 2 B" "1536 98304 49152 32.00 3072 6.25%"
    site "$program" 4 "$line" "write 2 B" "1536 98304 49152 32.00 3072 6.25%"
    contains 'efficiency 6.25%, 196608 unique;' "$tmp/out"
    # 16 bytes per lane: one request of 512 bytes
    line=$(grep -n 'x128 x = load128(inp + i)' $source | cut -d: -f1)
    site "$program" 5 "$line" "read 16 B" "192 98304 3072 16.00 3072 100%"
    # the same text in each run, the same counts by another schedule
    "$program" 5 --picture >"$tmp/first"
    "$program" 5 --picture >"$tmp/second"
    cmp "$tmp/first" "$tmp/second" || fail "two runs print different texts"
    "$program" 5 --picture --schedule 7 >"$tmp/second"
    cmp "$tmp/first" "$tmp/second" || fail "another schedule gives other counts"
    contains '+0 |################|################|################|################| lanes 0-7' "$tmp/first"
    "$program" 4 --picture >"$tmp/out"
    contains '+128 |#...............|                |                |                | lane 1' "$tmp/out"
    local rc=0
    "$program" 1 --transactions --check --stress 2 >"$tmp/out" 2>&1 || rc=$?
    want "the exit code with --stress" $rc 2

    source=dev/test/gpu/emulation_transactions.cu program=$tmp/tree/dev/cuda/emulation_transactions_cpu flags=
    cp $source "$tmp/tree/dev/cuda/"
    make_cpu cpu OP=emulation_transactions
    rm "$tmp/tree/dev/cuda/emulation_transactions.cu"
    # shared memory: requests, wavefronts, per request, least, conflicts
    site "$program" 1 1 "write 4 B" "1 2 2.00 1 1"
    site "$program" 2 2 "read 4 B" "1 32 32.00 1 31"
    site "$program" 3 3 "read 4 B" "1 1 1.00 1 0"
    site "$program" 4 4 "read 4 B" "1 1 1.00 1 0"
    site "$program" 5 5 "read 16 B" "1 4 4.00 4 0"
    site "$program" 11 11 "atomic 4 B" "1 32 32.00 1 31"
    # device memory: requests, bytes asked, sectors, per request, needed, efficiency
    site "$program" 6 6 "read 16 B" "1 512 16 16.00 16 100%"
    site "$program" 7 7 "read 4 B #1" "1 128 8 8.00 4 50%"
    site "$program" 7 7 "read 4 B #2" "1 128 8 8.00 4 50%"
    contains 'all: 1 launch, 384 bytes asked, 640 in sectors, efficiency 60%, 384 unique;' "$tmp/out"
    site "$program" 8 8 "read 4 B" "32 2112 32 1.00 32 100%"
    site "$program" 9 9 "read 4 B" "1 128 5 5.00 4 80%"
    site "$program" 10 10 "read 4 B" "4 384 4 1.00 4 100%"
    site "$program" 12 12 "cp.async 16 B" "1 512 16 16.00 16 100%
1 4 4.00 4 0"
    site "$program" 13 13 "ldmatrix 16 B" "1 32 32.00 4 28"
    contains 'shared wavefronts ' "$tmp/out"
    "$program" 2 --picture >"$tmp/out"
    contains 'word  .  .  . 32  .  .  .' "$tmp/out"
}

# Kernels, most of them for sm_90a, at shapes that go around their rings of stages more than once and that reach all branches of their schedulers
# (pairs of tiles, tiles that are cut, tiles at the edge: make coverage OP= FLAGS=), by two schedules; and a device that cannot
# run them.
test_sm90() {
    wants_more
    needs_compiler
    copy_tree
    local op flags program sms
    while read -r op flags; do
        sms=4
        if [[ $op == EMULATION_SMS=* ]]; then sms=${op#*=} && read -r op flags <<<"$flags"; fi
        program=$tmp/tree/dev/cuda/${op}_cpu
        [ -x "$program" ] || make_cpu cpu OP="$op" PRECISION=BF16
        for schedule in 0 331; do
            # shellcheck disable=SC2086
            EMULATION_SMS=$sms EMULATION_THREADS=1 timeout 300 "$program" $flags --check --no-guards --schedule $schedule >"$tmp/out" 2>&1 ||
                { tail -n 5 "$tmp/out" && fail "$op $flags fails by schedule $schedule"; }
            grep -q '^[1-9][0-9]* passed, 0 failed, 0 skipped$' "$tmp/out" ||
                { tail -n 5 "$tmp/out" && fail "$op $flags: nothing is checked"; }
        done
    done <<'END'
attention_forward 25 -B 1 -T 257 -C 768 -NH 12 --case 1
attention_backward 11 -B 1 -T 700 -C 128 -NH 2 --case 0
attention_backward 13 --kind 1 -B 2 -T 300 -C 128 -NH 2 --case 0
attention_forward 25 -B 1 -T 257 -C 256 -NH 2 --case 1
attention_backward 11 -B 1 -T 200 -C 256 -NH 2 --case 0
attention_backward 13 --kind 1 -B 2 -T 200 -C 128 -NH 1 --case 0
matmul_forward 18 -B 1 -T 600 -C 776 -V 392 --kind 1 --case 0
matmul_forward 20 -B 1 -T 600 -C 776 -V 392 --kind 1 --case 0
matmul_forward 21 -B 1 -T 600 -C 776 -V 392 --kind 1 --case 0
matmul_forward 22 -B 1 -T 600 -C 776 -V 392 --kind 1 --case 0
matmul_forward 24 -B 1 -T 600 -C 776 -V 392 --kind 2 --case 0
matmul_forward 27 -B 1 -T 300 -C 768 -V 200 --kind 1 --case 0
matmul_forward 27 -B 1 -T 300 -C 1600 -V 392 --kind 0 --case 0
matmul_backward 8 --kind 1 -B 1 -T 300 -C 776 -V 392 --case 0
matmul_backward 12 --kind 3 -B 1 -T 300 -C 776 -V 392 --case 0
matmul_forward 28 --kind 4 -B 1 -T 300 -C 776 -V 392 --case 0
matmul_backward 13 --kind 4 -B 1 -T 300 -C 776 -V 392 --case 0
matmul_backward 9 --kind 0 -B 1 -T 600 -C 384 -V 776 --case 0
matmul_backward 10 --kind 0 -B 1 -T 1000 -C 64 -V 520 --case 0
EMULATION_SMS=12 matmul_backward 10 --kind 0 -B 1 -T 1000 -C 64 -V 1544 --case 0
newton_schulz 5 -B 2 -T 328 -C 264 --case 0
fused_classifier 8 -B 2 -T 130 -V 24 --case 0
encoder_backward 6 -B 66 -T 1000 -C 8 -V 200 --case 0 --config 256
fused_attention_residual_layernorm 7 -B 1 -T 64 -C 192 -NH 3 --case 0
END
    EMULATION_ARCH=80 "$tmp/tree/dev/cuda/attention_forward_cpu" 25 --check -B 1 -T 64 -C 64 -NH 1 >"$tmp/out" 2>&1
    contains 'needs code for sm_90a, but the GPU is sm_80 and the program is compiled for sm_80' "$tmp/out"
    contains '0 passed, 0 failed, 3 skipped' "$tmp/out"
    sed -i 's/__CUDA_ARCH__ 900/__CUDA_ARCH__ 750/' "$tmp/tree/dev/cuda/emulation/cuda_runtime.h" # no cp.async
    make_cpu cpu OP=layernorm_backward PRECISION=BF16
    EMULATION_ARCH=75 "$tmp/tree/dev/cuda/layernorm_backward_cpu" 11,13 --check >"$tmp/out" 2>&1 ||
        { tail -n 5 "$tmp/out" && fail "kernel 11 of layernorm_backward fails on an older device"; }
}

# bench.h's own functions: clocks, notes, columns, hot launches
test_bench_functions() {
    needs_compiler
    copy_tree
    cp dev/test/gpu/bench_functions.cu "$tmp/tree/dev/cuda/"
    make_cpu cpu OP=bench_functions
    rm "$tmp/tree/dev/cuda/bench_functions.cu"
    timeout 120 "$tmp/tree/dev/cuda/bench_functions_cpu" >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "bench.h is wrong"; }
    contains '0 failures' "$tmp/out"
}

# find_planted_bugs NAME: builds dev/test/gpu/NAME.cu and fails unless the emulation finds and names the bug of each of its kernels
find_planted_bugs() {
    cp "dev/test/gpu/$1.cu" "$tmp/tree/dev/cuda/"
    make_cpu cpu OP="$1"
    rm "$tmp/tree/dev/cuda/$1.cu" # it is not one of the ops that test_kernels checks
    local program=$tmp/tree/dev/cuda/$1_cpu number what line
    "$program" --list >"$tmp/list"
    while read -r number what; do
        if [[ $what = right:* ]]; then
            "$program" "$number" --check --no-guards --schedule 0 >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "$what"; }
            continue
        fi
        EMULATION_LIMIT=0.05 "$program" "$number" --check --no-guards --schedule 0 >"$tmp/lines" 2>&1 && fail "kernel $number passes: $what"
        sed -z 's/\n    / /g' "$tmp/lines" >"$tmp/out" # long findings are wrapped
        contains "$what" "$tmp/out"
        for line in $(grep -n "// bug $number\$" "dev/test/gpu/$1.cu" | cut -d: -f1); do contains "$1.cu:$line" "$tmp/out"; done
    done <"$tmp/list"
}

# The rules of wgmma: registers and shared memory of products in flight.
test_wgmma() {
    needs_compiler
    copy_tree
    find_planted_bugs emulation_wgmma
}

# What the emulation must find is found, and named: the kernel, the line, both threads.
test_reports() {
    needs_compiler
    copy_tree
    find_planted_bugs emulation_bugs
    # a failure under --stress comes with the flags that reproduce it
    local flags program=$tmp/tree/dev/cuda/emulation_bugs_cpu
    "$program" 1 --check --stress 2 >"$tmp/out" 2>&1 && fail "kernel 1 passes --stress"
    flags=$(sed -n 's/^reproduce: [^ ]* //p' "$tmp/out" | head -n 1)
    contains '--check --seed' <(echo "$flags")
    # shellcheck disable=SC2086
    "$program" 1 $flags >"$tmp/out" 2>&1 && fail "the flags do not reproduce the failure: $flags"
    contains 'FAIL kernel 1' "$tmp/out"
}

# check_kernels PRECISION LEAST SCHEDULE [PROMOTED=yes]: runs --check of every op, or of the promoted ops, on at least LEAST kernels
check_kernels() {
    emulated -j"$jobs" CXX="$CXX" PRECISION="$1" "${@:4}" cpu
    # needs no lock, because emulated() has built everything
    CPU_JOBS=$jobs CPU_LOGS=$tmp/logs_$1 CPU_FLAGS_CHECK=$3 EMULATION_LIMIT=$([ -n "$full" ] && echo 1 || echo 0.01) \
        make -C dev/cuda --no-print-directory BIN_DIR=../../build/emulated NVCC=/nonexistent CXX="$CXX" PRECISION="$1" "${@:4}" check-cpu \
        >"$tmp/out" 2>&1 || { tail -n 40 "$tmp/out" && fail "$1 ${3:-with changing schedules}: a check failed"; }
    local emulated
    emulated=$(sed -n 's/^\([0-9]*\) kernels emulated.*/\1/p' "$tmp/out")
    [ "${emulated:-0}" -ge "$2" ] || { cat "$tmp/out" && fail "$1: only $emulated kernels are emulated"; }
}
# Random shapes for the promoted kernels of each op, which check_kernels() has built.
stress_kernels() {
    local file op program number
    for file in $(grep -l '^// ==== promoted: ' dev/cuda/*.cuh); do
        op=$(basename "$file" .cuh) program=build/emulated/$(basename "$file" .cuh)_cpu
        [ -x "$program" ] || continue
        for number in $("$program" --list | sed -n 's/^\([0-9]*\) .*(promoted).*/\1/p' | sort -u); do
            EMULATION_THREADS=1 EMULATION_LIMIT=0.3 timeout 300 "$program" "$number" --check --stress 4 >"$tmp/out" 2>&1 ||
                { tail -n 20 "$tmp/out" && fail "$op $number fails at a random shape"; }
            grep -q ' random shapes: [1-9][0-9]* passed, 0 failed' "$tmp/out" || { cat "$tmp/out" && fail "$op $number: no random shapes"; }
        done
    done
}
# Sizes that no vector divides: each kernel works there or declines.
odd_kernels() {
    local program
    for program in build/emulated/*_cpu; do
        [ "$program" != build/emulated/test_gpt2_cpu ] || continue
        EMULATION_THREADS=1 EMULATION_LIMIT=0.05 timeout 300 "$program" --check --no-guards --schedule 0 -B 1 -T 9 -C 20 -NH 2 -V 30 >"$tmp/out" 2>&1 ||
            { tail -n 5 "$tmp/out" && fail "${program##*/} at odd sizes"; }
    done
}
test_kernels() {
    needs_compiler
    if [ -z "$more" ]; then check_kernels BF16 80 "--schedule 3" PROMOTED=yes && return; fi
    if [ -z "$full" ]; then
        check_kernels BF16 120 "--schedule 3"
        stress_kernels
        odd_kernels
        return
    fi
    local precision schedule
    for precision in BF16 FP16 FP32; do
        for schedule in "" "--schedule 0" "--schedule 1"; do
            check_kernels $precision "$([ $precision = FP32 ] && echo 100 || echo 120)" "$schedule" # fp32 has fewer kernels
        done
    done
}

# leads FILE: true if the first failure in $tmp/out names a line of FILE within five of one that differs between $tmp/original and the mutant
leads() {
    diff --unchanged-line-format= --old-line-format= --new-line-format='%dn ' "$tmp/original" "$tmp/tree/dev/cuda/$file" >"$tmp/changed" || :
    diff --unchanged-line-format= --old-line-format='%dn ' --new-line-format= "$tmp/original" "$tmp/tree/dev/cuda/$file" >>"$tmp/changed" || :
    sed -z 's/\n    / /g' "$tmp/out" | grep '^FAIL' | grep -o "$1:[0-9]*" | sed 's/.*://' | awk -v changed="$(<"$tmp/changed")" '
        BEGIN { n = split(changed, line, " ") }
        { for (i = 1; i <= n; i++) { if ($1 - line[i] <= 5 && line[i] - $1 <= 5) { found = 1 } } }
        END { exit !found }'
}

# try_mutant LINE: prints the first failure that --check of the mutant found; false unless it found one. It ends there.
try_mutant() {
    local file op kernel edit what
    read -r file op kernel edit <<<"$1"
    what=${edit##* ;; }
    edit=${edit% ;; *}
    cp "dev/cuda/$file" "$tmp/original"
    sed -e "$edit" "$tmp/original" >"$tmp/tree/dev/cuda/$file"
    ! cmp -s "$tmp/original" "$tmp/tree/dev/cuda/$file" || fail "$op $kernel, $what: the edit changes nothing: $edit"
    make_cpu cpu OP="$op" PRECISION=BF16
    # shellcheck disable=SC2086
    {
        EMULATION_THREADS=1 EMULATION_LIMIT=0.3 timeout 300 "$tmp/tree/dev/cuda/${op}_cpu" ${kernel//,/ } --check --no-guards \
            --first-failure 2>&1 || echo "status $?"
    } >"$tmp/out"
    local leads=''
    if leads "$(basename "$file")"; then leads=', leads'; fi
    cp "$tmp/original" "$tmp/tree/dev/cuda/$file"
    if grep -q '^FAIL' "$tmp/out"; then
        echo "caught$leads $op $kernel, $what: $(grep '^FAIL' "$tmp/out"), after $(grep -c '^ok' "$tmp/out") ok"
    else
        echo "SURVIVES: $op $kernel, $what: $(tail -n 1 "$tmp/out")"
        return 1
    fi
}

# try_mutants WORKER: tries the worker's share of the mutants in a separate copy and prints the verdicts
try_mutants() {
    local line n=0
    tmp=$tmp/worker$1 && mkdir "$tmp"
    copy_tree
    while IFS= read -r line; do
        n=$((n + 1))
        [ $((n % jobs)) -ne "$1" ] || try_mutant "${line#+ }" || :
    done
}
test_mutants() {
    wants_more
    needs_compiler
    local worker
    if [ -n "$full" ]; then grep -v '^#' "$mutants"; else grep '^+' "$mutants"; fi >"$tmp/chosen"
    for ((worker = 0; worker < jobs; worker++)); do
        (try_mutants $worker) <"$tmp/chosen" >"$tmp/verdicts$worker" 2>&1 &
    done
    wait
    cat "$tmp"/verdicts* | tee -a "${LLMC_MUTANTS_LOG:-/dev/null}" # the log also gets the verdicts
    echo "note: $(wc -l <"$tmp/chosen") of $(grep -vc '^#' "$mutants") mutants; $(cat "$tmp"/verdicts* | grep -c '^caught, leads') of them with" \
        "a line within five of the wrong one"
    want "the mutants that are caught" "$(cat "$tmp"/verdicts* | grep -c '^caught')" "$(wc -l <"$tmp/chosen")"
}

tests=(programs choices messages new_op check_flags features pointers transactions bench_functions reports wgmma sm90 kernels mutants)
run_tests_once "$@"
