#!/usr/bin/env bash
# train_gpt2.cu is read from top to bottom: sections 1 to 5 are the program, section 6 has the kernels. These tests are
# rules that keep it readable: how long a function may be, what may read and write the flags, and that the notes beside the
# includes are true. How long the program is does not matter: a limit on that would move its text to headers. The last one
# checks the entries of dev/cuda/notes and their contents.
. "$(dirname "$0")/../test.sh"

# functions FILE: prints "LINES FIRST_LINE NAME KIND" for each function outside of classes, found by its braces; KIND: device, host
functions() {
    awk '
        /^\/\*/ { comment = 1 }
        comment { if (/\*\//) { comment = 0 } next }
        depth == 0 && /^[A-Za-z_]/ && !/;$/ && !first {
            first = FNR
            head = ""
        }
        depth == 0 && first { head = head " " $0 }
        {
            line = $0
            gsub(/\047([^\047\\]|\\.)\047/, "", line) # characters
            gsub(/"([^"\\]|\\.)*"/, "", line)
            sub(/\/\/.*/, "", line)
            before = depth
            depth += gsub(/\{/, "", line) - gsub(/\}/, "", line)
            closes = $0 ~ /\}/
        }
        first && depth == 0 && (before > 0 || closes) {
            kind = head ~ /__(global|device)__/ ? "device" : "host"
            gsub(/__launch_bounds__ *\(([^()]|\([^()]*\))*\)|__attribute__ *\(\([^()]*(\([^()]*\))?\)\)/, "", head)
            if (head !~ /^ *(template <[^{]*> )?(typedef )?(struct|class|enum|union) / && match(head, /[A-Za-z_0-9]+\(/)) {
                print FNR - first + 1, first, substr(head, RSTART, RLENGTH - 1), kind
            }
            first = 0
        }
        first && depth == 0 && /;$/ { first = 0 }' "$1"
}

# limit_of NAME KIND: sets limit, the most lines that the function may have
limit_of() {
    case $1:$2 in
    gpt2_forward:*) limit=50 ;;
    *:device) limit=150 ;;
    *) limit=60 ;; # gpt2_backward, too
    esac
}

# longer FILE: prints a line for each function that is longer than its limit
longer() {
    local lines first name kind limit
    functions "$1" >"$tmp/functions"
    while read -r lines first name kind; do
        limit_of "$name" "$kind"
        [ "$lines" -le "$limit" ] || echo "$name at line $first of $1 has $lines lines, at most $limit are wanted"
    done <"$tmp/functions"
}

# too_long FILE: what is wrong with train_gpt2.cu
too_long() {
    local name
    grep -q '^// 1\. operations' "$1" && grep -q '^// 6\. kernels' "$1" || { echo "no sections 1 and 6"; return; }
    longer "$1"
    [ "$(wc -l <"$tmp/functions")" -ge 500 ] || echo "only $(wc -l <"$tmp/functions") functions found"
    for name in gpt2_forward gpt2_backward gpt2_update generate train sample main gemm_sm90_kernel9 attention_backward; do
        grep -q " $name " "$tmp/functions" || echo "no $name"
    done
}

test_limits() {
    too_long train_gpt2.cu >"$tmp/out"
    [ ! -s "$tmp/out" ] || { cat "$tmp/out" && fail "train_gpt2.cu is harder to read than it was"; }
}

# the same limits for what the program is made of; the ladders' declare() lists kernels, cases and costs, and has none
test_limits_elsewhere() {
    local file
    for file in train_gpt2.c llmc/*.h llmc/*.cuh dev/cuda/*.cuh; do longer "$file"; done >"$tmp/out"
    [ ! -s "$tmp/out" ] || { cat "$tmp/out" && fail "functions that are too long to read"; }
}

# the code of the model does not read flags
test_model_reads_no_flags() {
    sed -n '/^\/\/ 1\. operations/,/^\/\/ 4\. training/p' train_gpt2.cu | grep -nE '\b(args|settings)\b' >"$tmp/out" || return 0
    cat "$tmp/out" && fail "sections 1 to 3 read flags"
}

# closure FILE ...: prints these files and all files of this repository that they include
closure() {
    local seen=' ' file path
    while [ $# -gt 0 ]; do
        file=$1
        shift
        case $seen in *" $file "*) continue ;; esac
        seen="$seen$file "
        echo "$file"
        for path in $(grep -oE '^#include "[^"]+"' "$file" | cut -d '"' -f 2); do
            path=$(realpath -m --relative-to=. "$(dirname "$file")/$path")
            [ ! -e "$path" ] || set -- "$@" "$path"
        done
    done
}

# A program's own text stands in the program: what is in llmc serves several of the programs and ladders, or is a library.
test_headers_are_shared() {
    sort >"$tmp/want" <<'END'
llmc/choices.cuh
llmc/distributed.cuh
llmc/matmul.h
llmc/matmul_tile.h
llmc/memory_plan.cuh
llmc/nccl.h
llmc/rank_link.h
llmc/rendezvous.h
END
    # choices.cuh, memory_plan.cuh       know nothing of a model
    # distributed.cuh                    the collectives of several GPUs, over nccl.h, rank_link.h and rendezvous.h, which are C
    # matmul.h, matmul_tile.h            the matmuls of a CPU
    local users
    for users in train_gpt2.c train_gpt2.cu 'dev/cuda/*.cu' 'dev/data/*.c'; do
        # shellcheck disable=SC2086
        closure $users | grep ^llmc/
    done | sort | uniq -u >"$tmp/out"
    diff "$tmp/want" "$tmp/out" || fail "headers of llmc that one program alone uses: move its own text into it"
}

# only the parser writes to the flags
test_flags_are_not_written() {
    grep -nE '\bsettings\.[a-z_A-Z]+ *(=|\+=|\+\+)[^=]' train_gpt2.cu train_gpt2.c llmc/*.h >"$tmp/out" || return 0
    cat "$tmp/out" && fail "a flag is written after it was parsed"
}

# mutable_statics FILE ...: prints "FILE NAME" for each variable that outlives a call and can change: static ones in functions, and those
# outside of functions. Functions, constants, types and declarations are none.
mutable_statics() {
    awk '
        function name(text) { sub(/ *(=|\[|\{|;).*/, "", text); sub(/.*[ *&]/, "", text); return text }
        FNR == 1 { comment = 0 }
        /^ *\/\*/ { comment = 1 }
        comment { if (/\*\//) { comment = 0 } next }
        {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
            sub(/\/\/.*/, "", line)
            declared = line
            sub(/[=;{].*/, "", declared) # up to the value
        }
        line !~ /[=;{]/ || declared ~ /\(|(^|[ ])(const|constexpr|static_assert|struct|class|enum|union|namespace)( |$)/ { next }
        line ~ /^ *(inline +)?(static|thread_local) / { print FILENAME, name(line); next }
        declared ~ /^(inline +)?[A-Za-z_][A-Za-z_0-9:<>]* +[*&]*[A-Za-z_]/ && declared !~ /^(typedef|using|return|extern|template|case|else|public|private|goto|do) / {
            print FILENAME, name(line)
        }' "$@"
}

# What an operation does is decided by its arguments. A variable that outlives a call may count or remember, and each has its reason.
test_mutable_statics() {
    sort >"$tmp/want" <<'END'
llmc/cublas_common.cuh state
llmc/cuda_common.cuh supposed
llmc/distributed.cuh count
llmc/distributed.cuh r
llmc/distributed.cuh w
llmc/profile.cuh domain
llmc/profile.cuh state
train_gpt2.cu trainer
END
    # cublas_common.cuh state   cublaslt(): the library of operations that get only a stream, in ladders; a handle, memory, what was chosen
    # cuda_common.cuh supposed   device_is_supposed(): --plan where there is no GPU; set once, and nothing is launched
    # distributed.cuh count     numbers the messages of this process
    # distributed.cuh r         ranks(): which rank this process is, and its connections; set once, before the first launch
    # distributed.cuh w         watchdog(): ends a process that can only wait in vain
    # profile.cuh domain        nvtx_domain(): NVTX's handle
    # profile.cuh state         profile(): what the operations have cost; it records, and changes nothing
    # train_gpt2.cu trainer     trainer_open(): the one training run of the program, large, and used by all of section 4
    mutable_statics llmc/*.cuh train_gpt2.cu | sort >"$tmp/out"
    diff "$tmp/want" "$tmp/out" || fail "other mutable variables outlive a call: pass them, or say here why not"
}
test_sees_a_mutable_static() {
    printf '%s\n' 'static int a = 1;' 'inline int& b() {' '    static int c;' '    static std::vector<float> d = {};' '}' 'int e;' \
        'inline bool f = false;' '    thread_local char g[3];' '__device__ float h;' >"$tmp/bad.cuh"
    [ "$(mutable_statics "$tmp/bad.cuh" | sed 's/.* //' | tr '\n' ' ')" = 'a c d e f g h ' ] || fail "seen: $(mutable_statics "$tmp/bad.cuh")"
    printf '%s\n' 'static const int a = 1;' 'static void b(int c = 1) {' '    int d = 2;' 'constexpr int e = 1;' 'struct F;' 'typedef int g;' \
        '    return h;' 'enum { I = 1 };' 'static int j(int k) { return k; }' '// static int l;' >"$tmp/good.cuh"
    [ -z "$(mutable_statics "$tmp/good.cuh")" ] || fail "seen: $(mutable_statics "$tmp/good.cuh")"
}

# Dynamic shared memory begins where a kernel's static shared memory ends, rounded up to the largest alignment of such arrays in the
# object file. An array without an alignment moves when other kernels of the file change, and its vectors can then cause bank conflicts.
unaligned_shared() { grep -nE 'extern __shared__' "$@" | grep -vE '__align__\((128|256|1024)\)'; } # FILE ...
test_shared_memory_is_aligned() {
    unaligned_shared train_gpt2.cu llmc/*.cuh dev/cuda/*.cu dev/cuda/*.cuh >"$tmp/out" || :
    [ ! -s "$tmp/out" ] || { cat "$tmp/out" && fail "dynamic shared memory without __align__(128)"; }
    printf '%s\n' 'extern __shared__ int4 a[];' 'extern __shared__ __align__(16) float b[];' 'extern __shared__ __align__(128) float c[];' >"$tmp/bad.cuh"
    [ "$(unaligned_shared "$tmp/bad.cuh" | wc -l)" -eq 2 ] || fail "seen: $(unaligned_shared "$tmp/bad.cuh")"
}

# lengthen NAME LINES: writes train_gpt2.cu, with so many lines in that function, to $tmp/changed.cu
lengthen() {
    local lines first
    read -r lines first < <(functions train_gpt2.cu | sed -n "s/ $1 [a-z]*\$//p")
    [ "$2" -ge "$lines" ] || fail "$1 already has $lines lines"
    awk -v last=$((first + lines - 1)) -v more=$(($2 - lines)) \
        'FNR == last { for (; more > 0; more--) { print "" } } { print }' train_gpt2.cu >"$tmp/changed.cu"
}

test_limits_can_fail() {
    local name change
    for name in gpt2_forward:50 gpt2_backward:60 generate:60 sample:60 main:60 gemm_sm90_kernel9:150; do
        lengthen "${name%:*}" "${name#*:}"
        too_long "$tmp/changed.cu" >"$tmp/out"
        [ ! -s "$tmp/out" ] || { cat "$tmp/out" && fail "${name%:*} is not too long"; }
        lengthen "${name%:*}" $((${name#*:} + 1))
        too_long "$tmp/changed.cu" >"$tmp/out"
        [ "$(wc -l <"$tmp/out")" -eq 1 ] && grep -q "^${name%:*} at line" "$tmp/out" || fail "not seen: ${name%:*} has a line too many"
    done
    for change in 's/^static void gpt2_forward/static void forward/' '/^\/\/ 6\. kernels/d' 's/^static bool generate(/static bool generated(/'; do
        sed "$change" train_gpt2.cu >"$tmp/changed.cu"
        cmp -s train_gpt2.cu "$tmp/changed.cu" && fail "$change changes nothing"
        too_long "$tmp/changed.cu" >"$tmp/out"
        [ -s "$tmp/out" ] || fail "not seen: $change"
    done
}

# planted_words TEXT: writes the text to a comment, a block comment and a document; prints what words.sh prints, and its exit code
planted_words() {
    mkdir -p "$tmp/words/dev/test"
    cp dev/test/words.sh dev/test/words.tsv "$tmp/words/dev/test/"
    printf 'int a; // %s\n' "$1" >"$tmp/words/a.c"
    printf '/* A block comment.\n   %s */\n' "$1" >"$tmp/words/b.cuh"
    printf '%s\n' "$1" >"$tmp/words/c.md"
    local status=0
    "$tmp/words/dev/test/words.sh" || status=$?
    echo "exit code $status"
}
test_words() {
    local planted
    echo a1 | grep -qP 'a\d' 2>/dev/null || skip "needs grep -P, of GNU grep"
    # one text for each rule that fails
    local -a texts=('As gemm_store, but it waits.' 'Waits until the data are there.' 'Attention of the block, to the cluster.'
        'Two blocks fit an SM.' 'It moves 4 bytes a token.' 'It takes some 4 us.' 'Takes the first proposal.' 'It is seldom so.')
    want "the rules that fail" "$(cut -f 2 dev/test/words.tsv | grep -cx 10/10)" ${#texts[@]}
    for planted in "${texts[@]}"; do
        planted_words "$planted" >"$tmp/out"
        want "the places of '$planted'" "$(grep -oE '^[abc]\.[a-z]+:[0-9]+: ' "$tmp/out" | tr -d '\n')" 'a.c:1: b.cuh:2: c.md:1: '
        want "the exit code" "$(tail -n 1 "$tmp/out")" "exit code 1"
    done
    # not text: code, a string, a block of code
    printf 'int there, some; char* s = "// some 4";\n' >"$tmp/words/code.c"
    printf '```\nsome 4\n```\n' >"$tmp/words/code.md"
    planted_words 'It, too, takes about 4 us.' >"$tmp/out"
    want "the last line" "$(tail -n 1 "$tmp/out")" "exit code 0"
    grep -q ' 0 hits of .*, 3 of the others; make check-words WARN=yes prints them$' "$tmp/out" || { cat "$tmp/out" && fail "no count"; }
    WARN=yes planted_words 'It, too, takes about 4 us.' >"$tmp/out"
    contains 'c.md:1: It, too, takes' "$tmp/out"
    "$tmp/words/dev/test/words.sh" no-such-argument 2>/dev/null && fail "an argument is accepted"
    rm -r "$tmp/words"
}

# wrong_notes PROGRAM: prints each name behind "// defines: " that the header does not have or the program does not use. `name*`
# stands for all names that begin so; what follows a semicolon is not looked at.
wrong_notes() {
    awk '
        function has(where, name,    word) {
            if (name !~ /\*$/) { return (where, name) in words }
            sub(/\*$/, "", name)
            for (word in words) { if (index(word, where SUBSEP name) == 1) { return 1 } }
            return 0
        }
        function read(where, line,    n, i, part) {
            n = split(line, part, /[^A-Za-z_0-9]+/)
            for (i = 1; i <= n; i++) { words[where, part[i]] }
        }
        match($0, /\/\/ defines: /) {
            split($0, part, "\"")
            notes[part[2]] = substr($0, RSTART + RLENGTH)
            next
        }
        { read("program", $0) }
        END {
            for (header in notes) {
                while ((getline line < header) > 0) { read(header, line) }
                sub(/;.*/, "", notes[header])
                gsub(/\.\.\./, "", notes[header])
                n = split(notes[header], names, /[ ,]+/)
                for (i = 1; i <= n; i++) {
                    if (names[i] == "") { continue }
                    count++
                    if (!has(header, names[i])) { print header " does not have " names[i] }
                    if (!has("program", names[i])) { print FILENAME " does not use " names[i] " of " header }
                }
            }
            if (count < 40) { print "only " count + 0 " names found" }
        }' "$1"
}
test_notes_beside_includes() {
    local program
    for program in train_gpt2.c train_gpt2.cu; do
        wrong_notes "$program" >"$tmp/out"
        [ ! -s "$tmp/out" ] || { cat "$tmp/out" && fail "the notes beside the includes of $program are not true"; }
        sed 's|// defines: |&gpt2_nowhere, |' "$program" >"$tmp/changed"
        wrong_notes "$tmp/changed" >"$tmp/out"
        [ -s "$tmp/out" ] || fail "not seen: a name that is nowhere"
    done
}

# contents RC [--check]: runs contents.sh of the copy of dev/cuda/notes
contents() {
    local rc=0 wanted=$1
    "$tmp/notes/contents.sh" "${@:2}" >"$tmp/out" 2>&1 || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" && fail "exit code $rc, want $wanted: contents.sh ${*:2}"; }
}
test_contents_of_notes() {
    rm -rf "$tmp/notes"
    cp -r dev/cuda/notes "$tmp/notes"
    contents 0 --check
    local change
    # a heading without a verdict, an entry above a newer one, no title, another title
    for change in 's/: rung, .*/, 2 us/' '/^## 2026-11-23/s/11-23/11-20/' '/^# /d' 's/^# adamw/# adam/'; do
        sed "$change" dev/cuda/notes/adamw.md >"$tmp/notes/adamw.md"
        cmp -s dev/cuda/notes/adamw.md "$tmp/notes/adamw.md" && fail "$change changes nothing"
        contents 1 --check
        grep -qE '^error: dev/cuda/notes/(adamw|README)\.md:' "$tmp/out" || { cat "$tmp/out" && fail "no error for $change"; }
    done
    cmp dev/cuda/notes/README.md "$tmp/notes/README.md" || fail "--check writes"
    contents 0
    contents 0 --check
    contents 2 --chek
}

tests=(limits limits_elsewhere limits_can_fail model_reads_no_flags headers_are_shared flags_are_not_written mutable_statics sees_a_mutable_static shared_memory_is_aligned
    notes_beside_includes words contents_of_notes)
run_tests_once "$@"
