#!/usr/bin/env bash
# Says whether a change leaves the machine code (SASS) of every kernel as it was. Needs nvcc, no GPU.
#
#     make same-sass BASE=main                              train_gpt2.cu and every op, in three precisions, for 80 and 90a
#     make same-sass BASE=main SOURCES=train_gpt2.cu PRECISIONS=BF16 ARCHS=90a
#     dev/cuda/same_sass.sh BASE                            with SOURCES, PRECISIONS, ARCHS and SASS_JOBS in the environment
#
# BASE is a commit; it is compared with the files here. A kernel is compared by its mangled name. First the PTX, of which ptxas makes
# the SASS: from the same PTX it makes the same instructions. Only addresses in shared memory can still differ, because ptxas places
# the arrays of all kernels of a file in their order there. Only if the PTX of some kernel differs, the SASS of the file's kernels is
# compared, without addresses of instructions. SASS=yes does so for every file. Numbers of labels, and names of shared-memory
# variables, which depend on what else is in the file, are replaced by their order in the function, and a kernel's own name by a word.
# So a kernel under another name, or in another file, is found by its PTX. Exit code 0: each kernel of BASE is the same here; new
# kernels are named.
set -u -o pipefail
export LC_ALL=C PATH=$PATH:/usr/local/cuda/bin
fail() { echo "error: $*" >&2; exit 1; }
case ${1-} in
--help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" && exit 0 ;;
'' | -*) echo "error: BASE is wanted, a commit: make same-sass BASE=main" >&2 && exit 2 ;;
esac
cd "$(dirname "$0")/../.." || exit 1
commit=$(git rev-parse --verify --quiet "$1^{commit}") || fail "BASE=$1 is no commit"
command -v nvcc >/dev/null || fail "no nvcc: install the CUDA toolkit"
folder=build/same_sass
base=$PWD/$folder/$commit
if [ ! -e "$base/Makefile" ]; then
    mkdir -p "$base"
    git archive "$commit" | tar -x -C "$base" || fail "git cannot read $1"
fi
sources=${SOURCES:-train_gpt2.cu $(cd dev/cuda && printf 'dev/cuda/%s ' *.cu)}

# functions FILE DIR: writes each function of a PTX file or of cuobjdump -sass, normalised, to a file of its name in DIR
functions() {
    rm -rf "$2"
    mkdir -p "$2"
    awk -v dir="$2" '
        # the last word of a line such as ".visible .entry NAME(" or ".func  (.param .b32 result) NAME"
        function name_of(text) { sub(/\(\)?[ \t]*$/, "", text); sub(/[ \t]+$/, "", text); sub(/.*[ \t)]/, "", text); return text }
        # names that depend on the rest of the file, by their order in this function
        function normalised(text,    out, word, at) {
            out = ""
            while ((at = index(text, own))) { text = substr(text, 1, at - 1) "OWN" substr(text, at + length(own)) }
            while (match(text, /(\$L__BB|__func_begin|\$L__tmp|\$str|_ZZ|_ZN[0-9]+_INTERNAL|_ZN[0-9]+_GLOBAL)[A-Za-z_$0-9]*/)) {
                word = substr(text, RSTART, RLENGTH)
                if (!(word in seen)) { seen[word] = ++num_seen }
                out = out substr(text, 1, RSTART - 1) "NAME" seen[word]
                text = substr(text, RSTART + RLENGTH)
            }
            return out text
        }
        function begin(name) { file = dir "/" name; own = name; split("", seen); num_seen = 0; printf "" >file }
        /^[ \t]*Function : / { if (file) close(file); begin($3); sass = 1; next }
        sass && /^ *\/\*[0-9a-f]+\*\/ / { sub(/^ *\/\*[0-9a-f]+\*\/ */, ""); gsub(/[ \t]+/, " "); print >file; next }
        sass { next }
        /^(\.visible |\.weak )?\.entry / || /^(\.visible |\.weak |\.extern )?\.func / {
            if (file) close(file)
            begin(name_of($0))
        }
        file == "" || /^[ \t]*\/\// || /^[ \t]*\.loc/ || /^[ \t]*$/ { next }
        { print normalised($0) >file }
        /^}/ { close(file); file = "" }' "$1"
}

# one SOURCE PRECISION ARCH: compares, prints a line per difference. The PTX of BASE is kept for the next call.
one() {
    local source=$1 precision=$2 arch=$3 out old new side name
    [ -e "$base/$source" ] || { echo "ok $source $precision $arch: new"; return 0; }
    out=$(basename "$source" .cu).$precision.$arch
    old=$base.ptx/$out new=$PWD/$folder/here/$out
    mkdir -p "$base.ptx" "$folder/here"
    local flags=(-O3 --use_fast_math -std=c++17 "-DENABLE_$precision" "-arch=compute_$arch" -w -ptx)
    if [ ! -d "$old" ]; then
        (cd "$base" && nvcc "${flags[@]}" -o "$old.ptx" "$source") >"$new.log" 2>&1 ||
            { echo "FAIL $source $precision $arch: BASE does not compile: $(grep -m 1 error "$new.log")"; return 1; }
        functions "$old.ptx" "$old.new" && mv "$old.new" "$old"
    fi
    nvcc "${flags[@]}" -o "$new.ptx" "$source" >"$new.log" 2>&1 ||
        { echo "FAIL $source $precision $arch: does not compile: $(grep -m 1 error "$new.log")"; return 1; }
    functions "$new.ptx" "$new"
    local different=() gone=() added=() rc=0
    (cd "$new" && sha256sum -- *) | sed "s|  | $out |" >"$new.sums"
    while read -r name; do
        if [ ! -e "$new/$name" ]; then gone+=("$name")
        elif ! cmp -s "$old/$name" "$new/$name"; then different+=("$name"); fi
    done < <(ls "$old")
    while read -r name; do [ -e "$old/$name" ] || added+=("$name"); done < <(ls "$new")
    if [ ${#different[@]} -gt 0 ] || [ "${SASS-}" = yes ]; then
        local in_ptx=${#different[@]}
        command -v cuobjdump >/dev/null ||
            { echo "FAIL $source $precision $arch: $in_ptx functions differ in PTX, and without cuobjdump their SASS cannot be compared: ${different[*]}"; return 1; }
        for side in "$old" "$new"; do
            nvcc -O3 "-arch=sm_$arch" -cubin -o "$side.cubin" "$side.ptx" >"$new.log" 2>&1 ||
                { echo "FAIL $source $precision $arch: $(head -n 1 "$new.log")"; return 1; }
            cuobjdump -sass "$side.cubin" >"$side.sass"
            functions "$side.sass" "$side.code"
        done
        different=()
        while read -r name; do
            [ ! -e "$new.code/$name" ] || cmp -s "$old.code/$name" "$new.code/$name" || different+=("$name")
        done < <(ls "$old.code")
        echo "$source $precision $arch: $in_ptx functions differ in PTX, ${#different[@]} in SASS"
    fi
    for name in ${different[@]+"${different[@]}"}; do echo "FAIL $source $precision $arch: differs: $name"; rc=1; done
    for name in ${gone[@]+"${gone[@]}"}; do
        echo "gone $source $precision $arch: $name, PTX $(sha256sum <"$old/$name" | cut -d ' ' -f 1)"
    done
    for name in ${added[@]+"${added[@]}"}; do echo "$source $precision $arch: new: $name"; done
    echo "ok $source $precision $arch: $(find "$old" -type f | wc -l) functions, ${#different[@]} differ, ${#gone[@]} gone, ${#added[@]} new"
    [ $rc -ne 0 ] || rm -rf "$new" "$new.ptx" "$new.log" "$new.cubin" "$new.sass" "$new.code"
    return $rc
}
export -f one functions
export folder base
list=()
for source in $sources; do
    [ -e "$source" ] || fail "no $source"
    case $source in *practice_* | *nccl_all_reduce.cu) continue ;; esac
    for precision in ${PRECISIONS:-BF16 FP16 FP32}; do
        for arch in ${ARCHS:-80 90a}; do list+=("$source $precision $arch"); done
    done
done
rm -rf "$folder/here"
printf '%s\n' "${list[@]}" | xargs -P "${SASS_JOBS:-$(nproc)}" -L 1 bash -c 'one "$@"' one | tee "$folder/report"
# what is gone from a file is here in another one, or under another name
while read -r where name sum; do
    found=$(grep -h "^$sum " "$folder"/here/*.sums | head -n 1 | cut -d ' ' -f 2-)
    echo "${found:+moved} $where ${name%,}${found:+, now $found}" | sed 's/^ /FAIL gone: /' | tee -a "$folder/report"
done < <(sed -n 's/^gone \([^ ]* [^ ]* [^ ]*\): \([^ ]*\) PTX \(.*\)/\1:\t\2\t\3/p' "$folder/report" | awk -F '\t' '{ gsub(/ /, "/", $1); print $1, $2, $3 }')
failed=$(grep -c '^FAIL' "$folder/report")
same=$(grep -c '^ok' "$folder/report")
echo "$same of ${#list[@]} compiled and compared, $failed differences"
[ "$failed" -eq 0 ] && [ "$same" -eq ${#list[@]} ]
