#!/usr/bin/env bash
# Prints the machine code (SASS) of one kernel of an op, with what each function uses. Needs cuobjdump, no GPU.
#
#     make sass OP=layernorm_forward KERNEL=6         builds the device code, then calls this
#     make sass OP=ffn FUNCTION=gemm_sm90_kernel9     other functions: those whose name matches the regular expression
#     ./sass.sh BINARY KERNEL [FUNCTION]              a program, or what nvcc -fatbin or -cubin writes; KERNEL may be ''
#     ./sass.sh --ready | --help
#
# The functions of kernel 6 are those named OP..._kernel6 or OP..._kernel6_..., with all their template arguments; if
# there is none, those so named that OP.cu or OP.cuh defines. A kernel that is made of other ops' promoted kernels has none:
# then the names in the binary are listed, for FUNCTION=.
#
# Before each function: registers per thread; static shared memory per block, without what the system reserves (1,024
# bytes on 9.0); local memory: bytes per thread, which are spilled registers or local arrays, and the instructions that
# load and store them; the number of instructions, NOPs left out; and the counts of those that often matter:
#
#     LDG STG         global memory                       LDS STS LDSM STSM   shared memory; matrices of ldmatrix, stmatrix
#     LDGSTS          cp.async                            UBLKCP UTMALDG UTMASTG UTMAREDG    bulk copies and TMA
#     HGMMA QGMMA     wgmma in 16 and in 8 bits           HMMA IMMA QMMA      mma.sync
#     FFMA FADD FMUL  fp32                                HFMA2 HADD2 HMUL2   16 bits, two at once
#     MUFU            exp2, rsqrt, reciprocal, tanh       F2F F2FP I2F F2I    conversions
#     BAR SYNCS       barriers: of the block; mbarrier    SHFL REDUX VOTE     between the lanes of a warp
#     ATOM ATOMG ATOMS RED REDG                           atomics             MEMBAR WARPSYNC BRA
set -u -o pipefail
export LC_ALL=C PATH=$PATH:/usr/local/cuda/bin
fail() { echo "error: $*" >&2; exit 1; }
usage() { echo "error: $*; see $0 --help" >&2; exit 2; }
if [ "${1-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
for tool in cuobjdump nvdisasm; do # cuobjdump calls nvdisasm
    command -v $tool >/dev/null ||
        fail "no $tool: it is part of the CUDA toolkit (apt-get install cuda-$tool-13-0; or pip download nvidia-cuda-$tool)"
done
[ "${1-}" != --ready ] || exit 0

[[ $# =~ ^[23]$ ]] || usage "a binary and a kernel's number are wanted"
binary=$1 kernel=$2 function=${3-}
op=$(basename "$binary")
[[ $kernel =~ ^[0-9]*$ ]] || usage "KERNEL is a number, not '$kernel'"
[ -n "$kernel$function" ] || usage "KERNEL=number or FUNCTION=regex is wanted"
[ -f "$binary" ] || fail "$binary is not there"

tmp=$(mktemp -d /tmp/llmc_sass_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
# A mangled name ends in the types of the parameters: _Z22trimat_forward_kernel16Trimat is kernel 1 of a Trimat. The
# number after _Z is the name's length.
read -r -d '' base_function <<'AWK'
function base(mangled,    rest, n) {
    rest = mangled
    if (sub(/^_ZN?[LK]?/, "", rest) && match(rest, /^[0-9]+/)) {
        n = substr(rest, 1, RLENGTH) + 0
        return substr(rest, RLENGTH + 1, n)
    }
    return mangled
}
AWK
cuobjdump -res-usage "$binary" >"$tmp/usage" 2>"$tmp/err" ||
    fail "cuobjdump cannot read $binary: $(head -n 1 "$tmp/err")"
awk "$base_function"'
    /^ *Function .*:$/ { sub(/:$/, "", $2); print base($2), $2 }' "$tmp/usage" | sort -u >"$tmp/functions"
[ -s "$tmp/functions" ] || fail "$binary has no device code"

if [ -n "$function" ]; then
    [ -z "$kernel" ] || usage "KERNEL and FUNCTION exclude each other"
    awk -v re="$function" '$1 ~ re { print $2 }' "$tmp/functions" >"$tmp/wanted" 2>"$tmp/err" ||
        usage "FUNCTION is '$function', not a regular expression"
else
    grep -E "^[A-Za-z0-9_]*kernel$kernel(_[A-Za-z0-9_]*)? " "$tmp/functions" >"$tmp/numbered"
    sed -n "s/^${op}_[^ ]* //p" "$tmp/numbered" >"$tmp/wanted"
    if [ ! -s "$tmp/wanted" ] && [ -f "$(dirname "$0")/$op.cu" ]; then
        "$(dirname "$0")/op_text.sh" "$op" >"$tmp/source" || exit 1
        while read -r name mangled; do
            if grep -q "\b$name(" "$tmp/source"; then echo "$mangled" >>"$tmp/wanted"; fi
        done <"$tmp/numbered"
    fi
fi
if [ ! -s "$tmp/wanted" ]; then
    echo "error: no function of $op is called ${kernel:+${op}_kernel$kernel}$function; choose with FUNCTION=regex from:" >&2
    cut -d ' ' -f 1 "$tmp/functions" | sort | uniq -c | awk '
        $2 !~ /^(bench_|ptx_)/ { print "    " $2 ($1 > 1 ? " (" $1 " instances)" : "") }' >&2
    exit 1
fi

demangle() { if command -v c++filt >/dev/null; then c++filt; elif command -v cu++filt >/dev/null; then cu++filt; else cat; fi; }
cuobjdump -sass "$binary" >"$tmp/sass" 2>"$tmp/err" || fail "cuobjdump: $(head -n 1 "$tmp/err")"
demangle <"$tmp/wanted" >"$tmp/demangled"
paste "$tmp/wanted" "$tmp/demangled" >"$tmp/names"

# one pass over the resource usage, one over the code; a binary may have a function for several architectures
awk -v usage="$tmp/usage" -v names="$tmp/names" '
    BEGIN {
        num_classes = split("LDG STG LDS STS LDSM STSM LDGSTS UBLKCP UTMALDG UTMASTG UTMAREDG HGMMA QGMMA HMMA IMMA QMMA " \
            "FFMA FADD FMUL HFMA2 HADD2 HMUL2 MUFU F2F F2FP I2F F2I BAR SYNCS SHFL REDUX VOTE ATOM ATOMG ATOMS RED REDG " \
            "MEMBAR WARPSYNC BRA", class, " ")
        while ((getline line <names) > 0) { split(line, part, "\t"); title[part[1]] = part[2] }
        while ((getline line <usage) > 0) {
            if (line ~ /^arch = /) { arch = substr(line, 8) }
            if (line ~ /^ *Function /) { sub(/^ *Function /, "", line); sub(/:$/, "", line); at = line }
            if (line ~ /^ *REG:/) {
                n = split(line, part, " ")
                for (i = 1; i <= n; i++) {
                    split(part[i], field, ":")
                    used[arch, at, field[1]] = field[2]
                    if (field[1] == "SHARED" && (!(arch in least) || field[2] + 0 < least[arch])) { least[arch] = field[2] + 0 }
                }
            }
        }
    }
    function finish(    i, text, reserved) {
        if (current == "") { return }
        # the 1,024 bytes are in every function, and the kernels of the harness have no others; unlinked code lacks them
        reserved = least[arch] >= 1024 ? 1024 : 0
        printf "==== %s, %s ====\n", title[current], arch
        printf "registers %d, shared memory %d B, local memory %d B (LDL %d, STL %d), instructions %d\n",
            used[arch, current, "REG"], used[arch, current, "SHARED"] - reserved,
            used[arch, current, "STACK"] + used[arch, current, "LOCAL"], count["LDL"], count["STL"], num
        text = ""
        for (i = 1; i <= num_classes; i++) {
            if (count[class[i]]) { text = text (text == "" ? "" : ", ") class[i] " " count[class[i]] }
        }
        print (text == "" ? "none of the instructions that are counted" : text)
        printf "%s\n", code
        found++
    }
    /^arch = / { finish(); current = ""; arch = $3 }
    /^[ \t]*Function : / {
        finish()
        current = $3 in title ? $3 : ""
        split("", count)
        num = 0
        code = ""
    }
    current != "" && /^ *\/\*[0-9a-f]+\*\/ .*;/ {
        line = $0
        sub(/;.*/, "", line) # the encoding
        sub(/^ *\/\*/, "", line)
        address = line
        sub(/\*\/.*/, "", address)
        sub(/^[0-9a-f]*\*\/ */, "", line)
        sub(/ +$/, "", line)
        opcode = line
        sub(/^@!?U?P[0-9T]+ +/, "", opcode)
        sub(/[. ].*/, "", opcode)
        if (opcode != "NOP") { num++; count[opcode]++ }
        code = code sprintf("    %s  %s\n", address, line)
    }
    END { finish(); exit found == 0 }' "$tmp/sass" ||
    fail "cuobjdump -sass has no code of $(head -n 1 "$tmp/wanted"), which cuobjdump -res-usage names"
