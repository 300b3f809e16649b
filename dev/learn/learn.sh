#!/usr/bin/env bash
# learn.sh DIR SUFFIX: what `make learn` runs once it has built the programs DIR/OP_SUFFIX. For each kernel of steps 1 to 3 of
# the README here: what it shows, its checks, and what memory it asks for; at the end a table. Exit 1 if a
# check failed. LEARN_OPS="simple_kernel permute" takes only these; `learn.sh --ops` prints all of them.
set -u

# step | op | kernel | what to look at
lessons='1|simple_kernel|1|a warp reads 64 contiguous bytes: 2 sectors per request, all of them used
1|simple_kernel|4|64 contiguous elements per thread: 32 sectors per request, a sixteenth of them used
1|simple_kernel|5|16 bytes per lane: the same bytes in an eighth of the requests
1|permute|1|one element per thread: coalesced on both sides, 2 bytes per lane
1|permute|6|tiles through shared memory: the same bytes, 16 bytes per lane on both sides
2|softmax_forward|1|one thread per row: lanes are a row apart, so every request touches a sector per lane
2|softmax_forward|2|one warp per row: coalesced, but the row is read three times
2|softmax_forward|4|online softmax: two passes instead of three
2|layernorm_forward|1|one thread per row: not coalesced
2|layernorm_forward|5|one warp per row, 128-bit loads, statistics in one pass
2|matmul_forward|1|no reuse: each thread reads a whole row and a whole column
2|matmul_forward|3|32x32 tiles: each value is read once per tile and reused from shared memory
2|matmul_forward|7|128x128 tiles: fewer reads again, sums in registers
2|attention_forward|1|one thread per query: scores computed twice, not coalesced
2|attention_forward|4|keys and values in shared memory: read once per tile of queries
2|attention_forward|6|tiles in registers too, and 128-bit accesses
3|gelu_scale|1|unfused: two launches, the intermediate result is written and read back
3|gelu_scale|4|fused: one launch, half of the bytes
3|fused_residual_layernorm|1|unfused: the sum is written by one kernel and read by the next
3|fused_residual_layernorm|4|fused: the row stays in registers'
steps=('' 'a kernel' 'working together' 'fusing')

if [ "${1-}" = --ops ]; then
    echo "$lessons" | cut -d'|' -f2 | uniq | tr '\n' ' '
    exit 0
fi
[ $# -eq 2 ] || { echo "usage: learn.sh DIR SUFFIX, or learn.sh --ops" >&2; exit 2; }
dir=$1 suffix=$2
tmp=$(mktemp -d /tmp/learn_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
failures=0 step_now=
: >"$tmp/table"

while IFS='|' read -r step op kernel shows; do
    [[ " ${LEARN_OPS:-$op} " == *" $op "* ]] || continue
    program=$dir/$op$suffix
    [ -x "$program" ] || { echo "error: no $program: make cpu OP=$op" >&2; exit 1; }
    if [ "$step" != "$step_now" ]; then
        step_now=$step
        printf '\nstep %s: %s\n' "$step" "${steps[$step]}"
    fi
    printf '  %s %s: %s\n' "$op" "$kernel" "$shows"
    # the smallest shapes of the check
    if EMULATION_LIMIT=0.02 "$program" "$kernel" --check >"$tmp/check" 2>&1 &&
        "$program" "$kernel" --transactions >"$tmp/counts" 2>&1; then
        # all: 2 launches, 1572864 bytes asked, 1572864 in sectors, efficiency 100%, 1572864 unique; 0 shared wavefronts, 0 conflicts
        sed -n 's/^all: \([0-9]*\) launch[es]*, \([0-9]*\) bytes asked, \([0-9]*\) in sectors, efficiency \([0-9.]*%\), \([0-9]*\) unique; [0-9]* shared wavefronts*, \([0-9]*\) conflicts*$/\1 \2 \3 \4 \5 \6/p' \
            "$tmp/counts" >"$tmp/all"
        read -r launches asked moved efficiency unique conflicts <"$tmp/all"
        # softmax_forward, bf16, B 1 T 16 V 50257 (a small shape; ...
        shape=$(sed -n '1s/^[a-z0-9_]*, [a-z0-9]*, \([A-Z]* [A-Z0-9 ]*[0-9]\).*/\1/p' "$tmp/counts")
        [ -n "$shape" ] && [ -n "$conflicts" ] ||
            { echo "error: no shape or no counts in what $program $kernel --transactions prints" >&2 && exit 1; }
        printf '    %s; %s\n' "$(tail -n 1 "$tmp/check" | sed 's/ passed.*/ checks passed/')" \
            "$shape: $asked bytes asked, $moved moved in sectors, efficiency $efficiency"
        printf '%s %s|%s|%s|%s|%s|%s|%s\n' "$op" "$kernel" "$asked" "$moved" "$efficiency" "$unique" "$conflicts" "$launches" \
            >>"$tmp/table"
    else
        failures=$((failures + 1))
        grep -h '^FAIL\|^error\|^skip' "$tmp/check" "$tmp/counts" 2>/dev/null | head -n 5
        printf '    FAIL: %s --check, or --transactions\n' "$program $kernel"
    fi
done <<<"$lessons"

printf '\n%-28s %12s %14s %11s %14s %10s %9s\n' kernel 'bytes asked' 'sectors moved' efficiency 'unique sectors' conflicts launches
awk -F'|' '{ printf "%-28s %12s %14s %11s %14s %10s %9s\n", $1, $2, $3, $4, $5, $6, $7 }' "$tmp/table"
cat <<'TEXT'

Sectors moved: bytes, 32 per sector, if nothing is cached. Unique sectors: bytes, each sector once per launch, the least
that DRAM moves. Conflicts: wavefronts of shared memory beyond the least. Counts of different shapes cannot be compared.
What one line of a kernel does:   ./simple_kernel_cpu 4 --picture
What to read:                     ../learn/README.md
Step 4, without a GPU, too:       make cpu OP=transformer_block
TEXT
[ "$failures" -eq 0 ] || { echo "error: $failures kernels failed" >&2; exit 1; }
