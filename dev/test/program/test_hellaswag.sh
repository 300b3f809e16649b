#!/usr/bin/env bash
# dev/data/hellaswag: the contents of its output file, that both input formats give the same file, and every error.
. "$(dirname "$0")/../test.sh"
data=${LLMC_DATA:-../shared/data}
hellaswag() { "$BIN_DIR/dev/data/hellaswag" "$@"; }

# words FILE: prints the questions as 16-bit words, on one line
words() { tail -c +1025 "$1" | od -An -v -t u2 | tr -s ' \n' '  ' | sed 's/^ //; s/ $//'; }

# header FILE: prints magic, version, number of questions, bytes of the longest
header() { od -An -t d4 -N 16 "$1" | tr -s ' ' | sed 's/^ //; s/ $//'; }

# refused TEXT ARGS...: the program must exit with 1, print one line on stderr with TEXT in it, and leave $tmp/no empty
refused() {
    local text=$1 rc=0
    shift
    hellaswag "$@" -o "$tmp/no/x.bin" >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
    want "status of $*" $rc 1
    want "lines of stderr" "$(wc -l <"$tmp/err")" 1
    contains "$text" "$tmp/err"
    [ -z "$(ls -A "$tmp/no" 2>/dev/null)" ] || fail "$* left $(ls "$tmp/no")"
}

# A small vocabulary: ab 256, abc 257, bc 258, _ab 259, <|endoftext|> 260
small() {
    mkdir -p "$tmp/small"
    printf '#version: 0.2\na b\nab c\nb c\n\xc4\xa0 ab\n' >"$tmp/small/merges.txt"
}

# Two questions in both formats, and the words that they become
two() {
    small
    printf 'ab c\n2\nab\nabc\nx\nbc d\n' >"$tmp/two.txt"
    printf 'd: "ab\xc3\xa9"\n0\na\nb\nc\nd\n' >>"$tmp/two.txt"
    {
        printf '{"ind": 24, "ctx_a": "ab", "ctx_b": "c", "ctx": "ab c", "label": 2, "endings": ["ab", "abc", "x", "bc d"]}\n'
        printf '{"endings": ["a", "b", "c", "d"], "label": 0, "ctx": "d: \\"a\\u0062\\u00e9\\"", "split": "val"}\n'
    } >"$tmp/two.jsonl"
    two_words="65535 44 0 2 4 3 256 220 66 1 259 2 220 257 2 220 87 4 220 258 220 67"
    two_words+=" 65535 52 1 0 4 8 67 25 220 1 256 127 102 1 2 220 64 2 220 65 2 220 66 2 220 67"
}

test_words() {
    two
    hellaswag -i "$tmp/two.txt" -t "$tmp/small" -o "$tmp/new/dir/two.bin" 2>"$tmp/err"
    want files "$(cd "$tmp/new/dir" && echo *)" two.bin
    want header "$(header "$tmp/new/dir/two.bin")" "20240522 1 2 52"
    want "the rest of the header" "$(tail -c +17 "$tmp/new/dir/two.bin" | head -c 1008 | tr -d '\0' | wc -c)" 0
    want words "$(words "$tmp/new/dir/two.bin")" "$two_words"
    contains "two.bin: 2 questions, the longest with its ending 10 tokens, 1120 bytes" "$tmp/err"
    # without a vocabulary, every byte is a token
    hellaswag -i "$tmp/two.txt" -o "$tmp/bytes.bin" 2>/dev/null
    want bytes "$(words "$tmp/bytes.bin" | cut -d ' ' -f 1-17)" "65535 56 0 2 4 4 64 65 220 66 3 220 64 65 4 220 64"
}

test_forms() {
    two
    hellaswag -i "$tmp/two.txt" -t "$tmp/small" -o "$tmp/a.bin" 2>/dev/null
    same() { # NAME FILE
        hellaswag -i "$2" -t "$tmp/small" -o "$tmp/b.bin" 2>/dev/null
        cmp "$tmp/a.bin" "$tmp/b.bin" || fail "$1 gives another file"
    }
    same jsonl "$tmp/two.jsonl"
    sed -E 's/("label": )([0-3])/\1"\2"/' "$tmp/two.jsonl" >"$tmp/strings.jsonl"
    ! cmp -s "$tmp/two.jsonl" "$tmp/strings.jsonl" || fail "no label found"
    same "jsonl with labels as strings, as the datasets library writes them," "$tmp/strings.jsonl"
    sed 's/$/\r/' "$tmp/two.txt" >"$tmp/crlf.txt"
    same "text with CR LF" "$tmp/crlf.txt"
    sed 's/$/\r/' "$tmp/two.jsonl" >"$tmp/crlf.jsonl"
    same "jsonl with CR LF" "$tmp/crlf.jsonl"
    printf '\n%s\n\n \n%s' "$(head -n 6 "$tmp/two.txt")" "$(tail -n 6 "$tmp/two.txt")" >"$tmp/blank.txt"
    same "text with empty lines between, none at the end" "$tmp/blank.txt"
    sed '1s/^/\xef\xbb\xbf/' "$tmp/two.jsonl" >"$tmp/mark"
    same "jsonl with a byte order mark" "$tmp/mark"
    sed '1s/^/\xef\xbb\xbf/' "$tmp/two.txt" >"$tmp/mark"
    same "text with a byte order mark" "$tmp/mark"
    sed '1s/^/[/; $!s/$/,/; $s/$/]/' "$tmp/two.jsonl" >"$tmp/array"
    same array "$tmp/array"
    sed 's/"label"/"odd": NaN, "label": 9, "label"/' "$tmp/two.jsonl" >"$tmp/odd.jsonl"
    same "jsonl with NaN and repeated keys" "$tmp/odd.jsonl"
    printf '%s\n\n%s' "$(head -n 1 "$tmp/two.jsonl")" "$(tail -n 1 "$tmp/two.jsonl")" >"$tmp/blank.jsonl"
    same "jsonl with an empty line, none at the end" "$tmp/blank.jsonl"
}

test_text_errors() {
    bad() { # TEXT LINES: LINES is the question, as a printf format
        # shellcheck disable=SC2059
        printf "$2" >"$tmp/bad.txt"
        refused "$1" -i "$tmp/bad.txt"
    }
    bad "contains no questions" ''
    bad "contains no questions" '\n \n'
    bad "bad.txt:2: the file ends, want line 2 of the question that begins in line 1" 'ab\n'
    bad "bad.txt:12: the file ends, want line 6 of the question that begins in line 7" 'c\n0\n1\n2\n3\n4\nc\n0\n1\n2\n3\n'
    bad "bad.txt:5: an empty line, want line 5" 'c\n0\n1\n2\n\n4\n'
    bad "bad.txt:2: the label is '4', want 0 to 3" 'c\n4\n1\n2\n3\n4\n'
    bad "bad.txt:8: the label is '10', want 0 to 3" 'c\n0\n1\n2\n3\n4\nc\n10\n1\n2\n3\n4\n'
    bad "bad.txt:2: the label is '\\x1b[1m\\xff', want" 'c\n\033[1m\377\n1\n2\n3\n4\n'
    bad "bad.txt:2: the label is 'git-lfs" 'version\ngit-lfs\n1\n2\n3\n4\n'
}

test_jsonl_errors() {
    local good='{"ctx": "c", "label": 0, "endings": ["1", "2", "3", "4"]}'
    bad() { # TEXT LINE: LINE becomes line 3 of the file
        printf '%s\n\n%s\n%s\n' "$good" "$2" "$good" >"$tmp/bad.jsonl"
        refused "bad.jsonl:3: $1" -i "$tmp/bad.jsonl"
    }
    bad '"ctx" is missing, the members are: label, endings' '{"label": 0, "endings": ["1", "2", "3", "4"]}'
    bad '"ctx" is a number, want a string' '{"ctx": 1, "label": 0, "endings": ["1", "2", "3", "4"]}'
    bad 'the context is empty' '{"ctx": "", "label": 0, "endings": ["1", "2", "3", "4"]}'
    bad '"label" is empty, the members are: ctx, label, endings; test sets' '{"ctx": "c", "label": "", "endings": ["1", "2", "3", "4"]}' # of the datasets library
    bad '"label" is missing, the members are: ctx, endings; test sets without answers cannot be scored' '{"ctx": "c", "endings": ["1", "2", "3", "4"]}' # like HellaSwag's test set
    bad '"label" is a string, want a number' '{"ctx": "c", "label": "4", "endings": ["1", "2", "3", "4"]}'
    bad '"label" is 4, want 0 to 3' '{"ctx": "c", "label": 4, "endings": ["1", "2", "3", "4"]}'
    bad '"label" is -1, want 0 to 3' '{"ctx": "c", "label": -1, "endings": ["1", "2", "3", "4"]}'
    bad '"endings" has 3 elements, want 4' '{"ctx": "c", "label": 0, "endings": ["1", "2", "3"]}'
    bad '"endings" has 5 elements, want 4' '{"ctx": "c", "label": 0, "endings": ["1", "2", "3", "4", "5"]}'
    bad '"endings" is a string, want an array' '{"ctx": "c", "label": 0, "endings": "1"}'
    bad 'ending 2 is null, want a string' '{"ctx": "c", "label": 0, "endings": ["1", "2", null, "4"]}'
    bad 'not valid JSON' '{"ctx": "c", '
    bad 'is an array, want an object with "ctx"' '[]'
}

test_file_errors() {
    two
    refused "absent.txt: No such file" -i "$tmp/absent.txt"
    refused "is a directory" -i "$tmp"
    gzip -c "$tmp/two.txt" >"$tmp/two.gz"
    refused "two.gz: is compressed with gzip, not text: use zcat FILE > TEXT" -i "$tmp/two.gz"
    refused "No such file" -i "$tmp/two.txt" -t "$tmp/absent"
    mkdir -p "$tmp/bare"
    refused "no vocabulary here" -i "$tmp/two.txt" -t "$tmp/bare"
    hellaswag -i "$tmp/two.txt" -o "$tmp/bare" 2>"$tmp/err" && fail "wrote to a directory"
    contains "is a directory, expected a file name" "$tmp/err"
    # an earlier output file survives a run that fails
    hellaswag -i "$tmp/two.txt" -o "$tmp/kept/x.bin" 2>/dev/null
    cp "$tmp/kept/x.bin" "$tmp/copy"
    head -n 7 "$tmp/two.txt" >"$tmp/cut.txt"
    hellaswag -i "$tmp/cut.txt" -o "$tmp/kept/x.bin" 2>/dev/null && fail "half a question was read"
    cmp "$tmp/kept/x.bin" "$tmp/copy"
    [ ! -w /dev/full ] || {
        ln -s /dev/full "$tmp/kept/x.bin.tmp"
        hellaswag -i "$tmp/two.txt" -o "$tmp/kept/x.bin" 2>"$tmp/err" && fail "wrote to a full disk"
        contains "No space left" "$tmp/err"
        cmp "$tmp/kept/x.bin" "$tmp/copy"
    }
    want files "$(cd "$tmp/kept" && echo *)" x.bin
}

test_limits() {
    # a question has at most 65,535 bytes, that is 32,767 words, 18 of which are not tokens of the context
    question() { printf '%*s\n0\na\nb\nc\nd\n' "$1" '' | tr ' ' x; }
    question 32749 >"$tmp/long.txt"
    hellaswag -i "$tmp/long.txt" -o "$tmp/long.bin" 2>/dev/null
    want "the longest" "$(words "$tmp/long.bin" | cut -d ' ' -f 1-7) $(header "$tmp/long.bin")" \
        "65535 65534 0 0 4 32749 87 20240522 1 1 65534"
    question 32750 >"$tmp/long.txt"
    refused "long.txt:6: the question takes 65536 bytes of tokens, but the format allows at most 65535" -i "$tmp/long.txt"
    awk 'BEGIN { for (i = 0; i < 65535; i++) print "c\n3\n0\n1\n2\n3" }' >"$tmp/many.txt"
    hellaswag -i "$tmp/many.txt" -o "$tmp/many.bin" 2>/dev/null
    want header "$(header "$tmp/many.bin")" "20240522 1 65535 38"
    want "the last" "$(tail -c 38 "$tmp/many.bin" | od -An -v -t u2 -N 12 | tr -s ' ')" " 65535 38 65534 3 4 1"
    printf 'c\n3\n0\n1\n2\n3\n' >>"$tmp/many.txt"
    refused "many.txt:393216: more than 65535 questions" -i "$tmp/many.txt"
}

test_usage() {
    local rc
    for args in "-i x" "-o x" "-i x -o y z" "-i x -o y --threads 2"; do
        rc=0
        # shellcheck disable=SC2086
        hellaswag $args >"$tmp/out" 2>"$tmp/err" || rc=$?
        want "status of '$args'" $rc 2
        want "lines of stderr" "$(wc -l <"$tmp/err")" 1
    done
}

test_all_of_it() {
    [ -e "$data/hellaswag_val.txt" ] || skip "needs $data/hellaswag_val.txt (or LLMC_DATA)"
    hellaswag -i "$data/hellaswag_val.txt" -t "$data/gpt2_tokenizer" -o "$tmp/hellaswag_val.bin" 2>"$tmp/err"
    want header "$(header "$tmp/hellaswag_val.bin")" "20240522 1 10042 642"
    want "first context" "$(words "$tmp/hellaswag_val.bin" | cut -d ' ' -f 1-21)" \
        "65535 118 0 3 4 15 15450 1659 427 17697 9934 25 317 582 318 5586 319 257 9753 13 339"
    # sha256 of the file that another program's plain implementation of GPT-2's rules gives
    want sum "$(sha256sum "$tmp/hellaswag_val.bin" | cut -c 1-16)" f528d727c4b076e2
    contains "10042 questions, the longest with its ending 151 tokens, 3553408 bytes, in " "$tmp/err"
}

tests=(words forms text_errors jsonl_errors file_errors limits usage all_of_it)
run_tests "$@"
