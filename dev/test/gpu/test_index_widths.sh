#!/usr/bin/env bash
# Products of ints that are widened too late, in every kernel and launcher of dev/cuda and of train_gpt2.cu: `row * C + c` as an index
# overflows at 2^31 elements, `(size_t)row * C + c` does not. clang-query finds them in the C++ that dev/cuda's emulation makes of the
# sources. Products whose names say that they are small are left out: 2 * k, h * HS. All others must stand in index_widths.txt, which
# says what bounds them. A variable that is initialised with such a product counts as one; one that is assigned later does not.
# Also, no variable of 32 bits may be set to a size_t, be increased by one, or be counted up to one.
# OP=matmul_forward test_index_widths.sh sources: only the sources of this op
. "$(dirname "$0")/../test.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL
list=dev/test/gpu/index_widths.txt
tree=build/dev_cuda/cpu/tree

# A product of 32 bits, alone or within a sum of 32 bits, that indexes an array, is added to a pointer, or is cast to 64 bits.
matcher='set output diag
set bind-root false
let narrow expr(hasType(qualType(hasCanonicalType(anyOf(asString("int"), asString("unsigned int"))))))
let wide expr(hasType(qualType(hasCanonicalType(anyOf(asString("long"), asString("unsigned long"), asString("unsigned long long"))))))
let product binaryOperator(hasOperatorName("*"), narrow, unless(hasParent(binaryOperator(hasOperatorName("*"), narrow)))).bind("product")
let first binaryOperator(hasOperatorName("*"), narrow, unless(hasParent(binaryOperator(hasOperatorName("*"), narrow)))).bind("held")
let start expr(narrow, anyOf(first, forEachDescendant(first)))
let held declRefExpr(narrow, to(varDecl(hasInitializer(ignoringParenImpCasts(start)))))
let sum expr(narrow, eachOf(anyOf(product, forEachDescendant(product)), anyOf(held, forEachDescendant(held))))
let index arraySubscriptExpr(hasIndex(ignoringParenImpCasts(sum)))
let offset binaryOperator(hasAnyOperatorName("+", "-", "+=", "-="), hasType(pointerType()), hasRHS(ignoringParenImpCasts(sum)))
let cast castExpr(hasCastKind("CK_IntegralCast"), wide, hasSourceExpression(ignoringParens(sum)))
match expr(anyOf(index, offset, cast), isExpansionInFileMatching("/tree/|planted"), unless(isExpansionInFileMatching("ptx.cuh")))
let cuttype qualType(hasCanonicalType(anyOf(asString("int"), asString("unsigned int"), asString("const int"), asString("const unsigned int"))))
let size expr(wide, anyOf(declRefExpr(), binaryOperator(hasAnyOperatorName("+", "-", "*"))), unless(hasDescendant(unaryExprOrTypeTraitExpr())))
let heldcut implicitCastExpr(hasType(cuttype), hasSourceExpression(ignoringParenImpCasts(size)), anyOf(hasParent(varDecl(unless(isConstexpr()))), hasParent(binaryOperator(hasOperatorName("=")))))
let added binaryOperator(hasAnyOperatorName("+=", "-="), hasLHS(narrow), hasRHS(ignoringParenImpCasts(size)))
let counted binaryOperator(hasAnyOperatorName("<", "<="), hasLHS(ignoringParenImpCasts(declRefExpr(narrow))), hasRHS(ignoringParenImpCasts(size)))
match expr(anyOf(heldcut, added, counted), isExpansionInFileMatching("/tree/dev/cuda/|/tree/train_gpt2|cuh$|planted"), unless(isExpansionInFileMatching("ptx.cuh"))).bind("cut")'

# products FILE ...: prints FILE:LINE:COLUMN: PRODUCT for each product in these rewritten sources, once for each place. Sources with
# the same headers find the same places.
products() {
    rm -f "$tmp"/*.found
    echo "$matcher" >"$tmp/matcher"
    printf '%s\n' "$@" | xargs -P "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)" -I FILE sh -c 'clang-query -f "$1/matcher" FILE \
        -- -x c++ -std=c++17 -w -DENABLE_BF16 -DGPU_PROGRAM -Idev/cuda/emulation >"$1/$(basename FILE).found" 2>&1' sh "$tmp"
    ! grep -h -i 'error' "$tmp"/*.found || fail "clang-query cannot read the sources"
    cat "$tmp"/*.found | awk '
        /: note: "(product|held|cut)" binds here/ {
            split($1, place, ":")
            sub(/.*\//, "", place[1])
            held = $0 ~ /"held"/ ? "held " : $0 ~ /"cut"/ ? "cut " : ""
            wanted = 3
        }
        wanted > 0 { wanted-- }
        wanted == 1 { line = $0 }
        wanted == 0 && line != "" {
            if (match($0, /\^~*/)) { print place[1] ":" place[2] ":" place[3] ": " held substr(line, RSTART, RLENGTH) }
            line = ""
        }' | sort -u
}

# Leaves out products of constants and of at most one C, or of names that count within a row, a head or a warp. Of those that a
# variable holds, only the ones with the length of a row remain: most others are places within a block, or tokens.
large() {
    awk '
        function constant(x) { return x ~ /^([0-9]+|HS|head_size|NH|[A-Z][A-Z0-9_][A-Z0-9_]+(<HS>)?|[A-Za-z0-9_]+::[A-Za-z_]+|sizeof.*|.* % [0-9]+)$/ }
        function counts_few(x) {
            sub(/ \/ [0-9]+$/, "", x)
            return x ~ /^([cdehjkm]|lane|warp|warpgroup|warp_row|half|group|rank|stage|slot|box|chunk|head|emulation_thread_index\(\)\.x)$/ ||
                x ~ /^(at\.h|[a-z]+\.head|\(C \/ (f\.)?NH\))$/
        }
        {
            product = $0
            sub(/^[^ ]*: /, "", product)
            held = sub(/^held /, "", product)
            if (sub(/: cut /, ": ")) { print; next }
            if (held && product !~ /(^|[ .>])(C|OC|K|V|Vp)( \*|$)/ && product !~ /block_index.*x128::size/) { next }
            sub(/: held /, ": ")
            unknown = few = rows = 0
            n = split(product, factors, / \* /)
            for (i = 1; i <= n; i++) {
                if (factors[i] == "C") { rows++ } else if (counts_few(factors[i])) { few++ } else { unknown += !constant(factors[i]) }
            }
            if (unknown || rows > 1 || (rows && few)) { print }
        }'
}

# Leaves out test_gpt2.cu, which is small, and the blocks of train_gpt2.cu that are copies of dev/cuda's.
without_copies() {
    awk '
        FNR == NR && /^\/\/ ==== promoted: / { copied = 1 }
        FNR == NR { if (copied) { copies["train_gpt2.cu:" FNR] = 1 } if (/^\/\/ ==== end promoted: /) { copied = 0 } next }
        { split($1, place, ":") }
        place[1] != "test_gpt2.cu" && !((place[1] ":" place[2]) in copies)' train_gpt2.cu -
}

# counted: N FILE: PRODUCT, where N places of the file have the product
counted() { sed 's/:[0-9]*:[0-9]*: /: /' | LC_ALL=C sort | uniq -c | sed 's/^ *//'; }

needs_query() { command -v clang-query >/dev/null || skip "needs clang-query: apt-get install clang-tools"; }

test_sources() {
    [ -n "${OP-}" ] || wants_more
    needs_query
    emulated ../../build/dev_cuda/cpu/program
    local file sources=("$tree/test_gpt2.cu") # includes train_gpt2.cu
    for file in dev/cuda/*.cu; do # the emulation has no NCCL
        case $file in */practice_* | */nccl_all_reduce.cu) ;; *) sources+=("$tree/$file") ;; esac
    done
    [ -z "${OP-}" ] || sources=("$tree/dev/cuda/$OP.cu")
    products "${sources[@]}" >"$tmp/all"
    large <"$tmp/all" | without_copies >"$tmp/places"
    counted <"$tmp/places" >"$tmp/found"
    echo "note: $(wc -l <"$tmp/all") products of ints are widened, $(wc -l <"$tmp/found") in index_widths.txt"
    # of one op, the others' products are not there
    diff <(grep -v -e '^#' -e '^$' $list | sort) <(sort "$tmp/found") | grep "^[$([ -n "${OP-}" ] || echo '<')>]" >"$tmp/diff" || return 0
    cat "$tmp/diff"
    sed -n 's/^> [0-9]* //p' "$tmp/diff" >"$tmp/new"
    awk 'FNR == NR { new[$0] = 1; next } { product = $0; sub(/:[0-9]*:[0-9]*: /, ": ", product) } product in new' "$tmp/new" "$tmp/places"
    fail "'>': write one factor as (size_t)x, or add the line to $list if the product is bounded; '<': no longer there"
}

# What the check is for: each cast that is left out is found.
test_planted() {
    needs_query
    cat >"$tmp/planted.cu" <<'CU'
#include <stddef.h>
void planted(float* out, const float* inp, unsigned block, unsigned threads, int row, int B, int T, int C, int c, int n, size_t wide) {
    out[row * C + c] = inp[(size_t)row * C + c];
    out += B * T * wide;
    size_t elements = (size_t)(B * T * C), i = block * threads + 3;
    for (int j = 0; j < n; j++) { out[2 * j] = inp[3 * C + i + elements]; }
    out[n * 8] = *(inp + c + (row + 1) * 2 * C) * inp[wide * C];
    int first = row * C + 1, last = n * C, unused = B * C, tokens = B * T;
    out[first + c] = inp[tokens] + (float)(unused + (last < n));
    int end = wide * n + 1, rest = (int)wide;
    const unsigned copy = wide, size = sizeof(int) * wide;
    for (int i = 0; i < wide; i += wide) { rest = wide % 7, end -= copy + size; }
}
CU
    products "$tmp/planted.cu" | large | counted >"$tmp/found"
    want "what is found" "$(cat "$tmp/found")" "1 planted.cu: (row + 1) * 2 * C
1 planted.cu: B * T
1 planted.cu: B * T * C
1 planted.cu: block * threads
1 planted.cu: i += wide
1 planted.cu: i < wide
1 planted.cu: n * 8
2 planted.cu: row * C
1 planted.cu: wide
1 planted.cu: wide * n + 1"
}

tests=(sources planted)
run_tests_once "$@"
