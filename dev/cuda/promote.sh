#!/usr/bin/env bash
# Copies the promoted kernels of dev/cuda into train_gpt2.cu, or checks that the copies are still identical.
#
#     dev/cuda/promote.sh            copies; prints the names of the blocks that changed
#     dev/cuda/promote.sh --check    changes nothing; names the blocks that differ and exits 1
#
# In both places a block is enclosed by two lines:
#     // ==== promoted: layernorm_forward ====
#     // ==== end promoted: layernorm_forward ====
# Block NAME is the text between these lines of dev/cuda/NAME.cuh. The marks in train_gpt2.cu select the blocks; whatever is between
# them is replaced. There, each block must stand behind the blocks of the files that NAME.cuh includes.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C # bytes, not characters
target=train_gpt2.cu

usage() { echo "$0: $1; usage: $0 [--check]" >&2; exit 2; }
[ $# -le 1 ] || usage "too many arguments"
case ${1-} in
'' | --check) mode=${1-} ;;
*) usage "unknown argument '$1'" ;;
esac
die() { echo "error: $*" >&2; exit 1; }
[ -f $target ] || die "no $target here"

tmp=$(mktemp -d /tmp/llmc_promote_XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/want" "$tmp/have"

# blocks DIRECTORY FILE ...: writes each block to DIRECTORY/NAME, and "NAME FILE:LINE" of its mark to DIRECTORY.where. Checks the
# marks: well formed, in pairs, not nested, no name twice.
blocks() {
    awk -v dir="$1" '
        function bad(text) { print "error: " FILENAME ":" FNR ": " text >"/dev/stderr"; failed = 1; exit 1 }
        FNR == 1 && open != "" { print "error: promoted: " open " has no end" >"/dev/stderr"; failed = 1; exit 1 }
        /==== *(end )?promoted:/ {
            if ($0 !~ /^\/\/ ==== (end )?promoted: [A-Za-z0-9_]+ ====$/) { bad("not a mark: " $0) }
            end = $3 == "end"
            name = end ? $5 : $4
            if (!end && open != "") { bad("promoted: " name " begins inside " open) }
            if (end && open != name) { bad("end promoted: " name " without its begin") }
            if (!end && name in seen) { bad("promoted: " name " occurs twice, first at " seen[name]) }
            if (!end) {
                open = name
                seen[name] = FILENAME ":" FNR
                printf "" >(dir "/" name)
                print name " " seen[name] >(dir ".where")
            } else {
                close(dir "/" name)
                open = ""
            }
            next
        }
        open != "" { print >(dir "/" open) }
        END {
            if (!failed && open != "") { print "error: promoted: " open " has no end" >"/dev/stderr"; failed = 1 }
            exit failed
        }' "${@:2}"
}
where() { sed -n "s/^$1 //p" "$tmp/$2.where"; } # NAME want|have

: >"$tmp/want.where"
: >"$tmp/have.where"
blocks "$tmp/have" $target || exit 1
blocks "$tmp/want" dev/cuda/*.cu dev/cuda/*.cuh || exit 1
[ -s "$tmp/want.where" ] || die "no promoted blocks in dev/cuda"
[ -s "$tmp/have.where" ] || die "$target has no marks '// ==== promoted: NAME ===='"

different=()
before=' '
while read -r name place; do
    [ -e "$tmp/want/$name" ] || die "$place: promoted: $name is in no file of dev/cuda"
    file=$(where "$name" want)
    file=${file%:*}
    [ "$file" = "dev/cuda/$name.cuh" ] || die "promoted: $name is in $file, not in dev/cuda/$name.cuh"
    while read -r needed; do
        if [ -e "$tmp/want/$needed" ] && [[ $before != *" $needed "* ]]; then
            die "$place: $name stands before $needed, which dev/cuda/$name.cuh includes"
        fi
    done < <(sed -n 's/^#include "\([a-z0-9_]*\)\.cuh".*/\1/p' "$file")
    before+="$name "
    cmp -s "$tmp/have/$name" "$tmp/want/$name" || different+=("$name")
done <"$tmp/have.where"
total=$(wc -l <"$tmp/have.where")

if [ "$mode" = --check ]; then
    for name in ${different[@]+"${different[@]}"}; do
        echo "FAIL $name: $(where "$name" have) is not a copy of $(where "$name" want); first difference:"
        diff "$tmp/have/$name" "$tmp/want/$name" | sed -n '2,$p' | head -n 6
    done
    [ ${#different[@]} -eq 0 ] || die "${#different[@]} of $total promoted blocks differ: dev/cuda/promote.sh copies them"
    echo "$total promoted blocks, all equal"
    exit 0
fi

[ ${#different[@]} -gt 0 ] || { echo "$total promoted blocks, all equal already"; exit 0; }
awk -v dir="$tmp/want" '
    /^\/\/ ==== end promoted: / { inside = 0 }
    !inside { print }
    /^\/\/ ==== promoted: / {
        inside = 1
        while ((getline line <(dir "/" $4)) > 0) { print line }
        close(dir "/" $4)
    }' $target >"$tmp/new" || die "$target could not be rewritten"
cat "$tmp/new" >$target || die "$target could not be written" # cat, not mv: keeps the file's mode and links
printf 'copied %s\n' "${different[@]}"
