#!/usr/bin/env bash
# dev/data/tokenize: the contents of shards, which must not depend on chunks and threads, and every error.
. "$(dirname "$0")/../test.sh"
top=$PWD
data=${LLMC_DATA:-../shared/data}
tokenize() { "$BIN_DIR/dev/data/tokenize" "$@"; }

# ids FILE: prints the tokens of a shard on one line
ids() { tail -c +1025 "$1" | od -An -v -t u2 | tr -s ' \n' '  ' | sed 's/^ //; s/ $//'; }

# header FILE: prints magic, version, number of tokens
header() { od -An -t d4 -N 12 "$1" | tr -s ' ' | sed 's/^ //; s/ $//'; }

# refused TEXT ARGS...: the program must exit with 1, print one line on stderr with TEXT in it, and leave $tmp/no empty
refused() {
    local text=$1 rc=0
    shift
    tokenize "$@" --out "$tmp/no/x" >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
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

# mixed BYTES: prints mixed text: words, runs of spaces, UTF-8, invalid bytes, lines of blanks and CR LF
mixed() {
    local i
    for i in 1 2 3 4 5 6 7 8; do
        printf 'a  b\n\n\n\nc\xe3\x80\x80 \xff\xfe \xe2\x80 \n\n \t\n x\xc2\xa0\n\n\n'
        head -c 20000 "$top/dev/test/fixtures/tiny_gpt2/model.safetensors" | tr '\0' '\377'
        printf 'a\n \n b\r\n\r\nc\r\n\t\r\n\r\n\n \n\nd\n'
        printf '%5000s' '' && head -c 5000 /dev/zero | tr '\0' 'a'
        cat "$top/dev/test/fixtures/tokenizer_golden.jsonl" "$top"/llmc/*.h
    done | head -c "$1"
}

test_bytes() {
    printf 'ab c' >"$tmp/t.txt"
    tokenize -i "$tmp/t.txt" -o "$tmp/bytes/x" 2>"$tmp/err"
    want files "$(cd "$tmp/bytes" && echo *)" "merges.txt vocab.json x_train_000000.bin"
    want ids "$(ids "$tmp/bytes/x_train_000000.bin")" "256 64 65 220 66"
    want header "$(header "$tmp/bytes/x_train_000000.bin")" "20240520 1 5"
    contains "1 documents, 4 bytes, 5 tokens" "$tmp/err"
}

test_vocabulary() {
    small
    printf 'abc ab<|endoftext|>' | tokenize -i - -t "$tmp/small" -o "$tmp/voc/" 2>/dev/null
    want ids "$(ids "$tmp/voc/data_train_000000.bin")" "260 257 259 27 91 68 77 67 78 69 83 68 87 83 91 29"
    want merges "$(cat "$tmp/voc/merges.txt")" "$(cat "$tmp/small/merges.txt")"
    # the vocabulary files written next to the shards give the same shards again
    printf 'abc ab<|endoftext|>' | tokenize -i - -t "$tmp/voc" -o "$tmp/voc2/data" 2>/dev/null
    cmp "$tmp/voc/data_train_000000.bin" "$tmp/voc2/data_train_000000.bin"
    cmp "$tmp/voc/vocab.json" "$tmp/voc2/vocab.json"
}

test_documents() {
    small
    printf 'ab\n\nab\n\n\nb\n\n' >"$tmp/d.txt"
    one() { tokenize -i "$1" -t "$tmp/small" -d "$2" -o "$tmp/d/x" 2>/dev/null; ids "$tmp/d/x_train_000000.bin"; }
    want file "$(one "$tmp/d.txt" file)" "260 256 198 198 256 198 198 198 65 198 198"
    want blank-line "$(one "$tmp/d.txt" blank-line)" "260 256 198 198 260 256 198 198 260 198 65 198 198"
    printf '\n\nab\n\n \n\n\t\n\nb\n\n\n' >"$tmp/blank.txt"
    want "blank lines alone" "$(one "$tmp/blank.txt" blank-line)" "260 256 198 198 260 65 198 198"
    for _ in 1 2 3 4 5 6; do cat "$tmp/blank.txt"; done >"$tmp/blanks.txt" # 96 bytes: six chunks or more
    want "in chunks" "$(tokens -i "$tmp/blanks.txt" -d blank-line --chunk-bytes 16)" "$(one "$tmp/blanks.txt" blank-line)"
    want line "$(one "$tmp/d.txt" line)" "260 256 260 256 260 65"
    printf '{"id": 1, "text": "ab\\u0000"}\r\n\n{"text": ""}\n{"text": "\\u0062c"}' >"$tmp/d.jsonl"
    want jsonl "$(one "$tmp/d.jsonl" auto)" "260 256 188 260 258"
    want "jsonl as text" "$(one "$tmp/d.jsonl" file | cut -c 1-6)" "260 90"
    printf '{"body": "ab"}\n' >"$tmp/d.jsonl"
    tokenize -i - -d jsonl --field body -o "$tmp/d/y" -t "$tmp/small" <"$tmp/d.jsonl" 2>/dev/null
    want field "$(ids "$tmp/d/y_train_000000.bin")" "260 256"
}

test_inputs() {
    mkdir -p "$tmp/in dir"
    printf a >"$tmp/in dir/a 1.txt"
    printf b >"$tmp/b.txt"
    printf c >"$tmp/c.txt"
    one() { tokenize -i "$1" -o "$tmp/in/x" 2>/dev/null; ids "$tmp/in/x_train_000000.bin"; }
    want "name with a space" "$(one "$tmp/in dir/a 1.txt")" "256 64"
    want pattern "$(one "$tmp/[bc].txt")" "256 65 256 66"
    want list "$(one "$tmp/c.txt,$tmp/b.txt")" "256 66 256 65"
    want spaces "$(one "$tmp/c.txt $tmp/b.txt")" "256 66 256 65"
    printf d >"$tmp/in dir/d,2.txt"
    want "a pattern with a space" "$(one "$tmp/in\\ dir/*.txt")" "256 64 256 67"
    want "a list with a space and a comma" "$(one "$tmp/in\\ dir/d\\,2.txt, $tmp/b.txt,")" "256 67 256 65"
    # a pattern that matches a file again is noted, and one that matches a directory has a way out
    want twice "$(tokenize -i "$tmp/c.txt,$tmp/[bc].txt" -o "$tmp/in/x" 2>"$tmp/err" && ids "$tmp/in/x_train_000000.bin")" "256 66 256 65 256 66"
    contains "note: $tmp/c.txt is given more than once, and its text will be there as many times" "$tmp/err"
    tokenize -i "$tmp/c.txt,$tmp/b.txt" -o "$tmp/in/x" 2>"$tmp/err"
    [ "$(grep -c '^note: ' "$tmp/err")" = 0 ] || fail "$(cat "$tmp/err")"
    refused "error: --input -,$tmp/c.txt,-: names standard input, -, more than once" -i "-,$tmp/c.txt,-"
    refused "error: $tmp/in: is a directory: name the files in it by a pattern in quotes, such as '$tmp/in/*.txt'" -i "$tmp/in"
    refused "no such file, and no file matches this pattern; write \\ before a space in a name" -i "$tmp/in dir/*.txt"
    contains "a \\ before it, 'my\\ books/*.txt'" <(tokenize --help | tr -s ' \n' ' ')
}

# shards PREFIX: prints a checksum over all shards, and their number
shards() { cat "$1"_val_*.bin "$1"_train_*.bin | sha256sum | cut -c 1-16; ls "$1"_*.bin | wc -l; }

test_chunks_and_threads() {
    local kind chunk threads want_sum
    small
    mixed 80000 >"$tmp/m.txt"
    for kind in file blank-line line; do
        tokenize -i "$tmp/m.txt" -t "$tmp/small" -d $kind -n 1 --chunk-bytes 100000000 -o "$tmp/one/x" -v 3000 -s 60000 2>/dev/null
        want_sum=$(shards "$tmp/one/x")
        for chunk in 16 17 4096; do
            for threads in 1 3; do
                tokenize -i - -t "$tmp/small" -d $kind -n $threads --chunk-bytes $chunk -o "$tmp/many/x" -v 3000 -s 60000 \
                    <"$tmp/m.txt" 2>/dev/null
                want "$kind in chunks of $chunk, $threads threads" "$(shards "$tmp/many/x")" "$want_sum"
            done
        done
    done
    # through a pipe that delivers a few bytes at a time
    (head -c 1000 "$tmp/m.txt"; sleep 0.1; tail -c +1001 "$tmp/m.txt") |
        tokenize -i - -t "$tmp/small" -d line -o "$tmp/many/x" -v 3000 -s 60000 2>/dev/null
    want "a slow pipe" "$(shards "$tmp/many/x")" "$want_sum"
}

test_jsonl_threads() {
    local i threads sum=
    for i in $(seq 1 3000); do printf '{"text": "document %d\\n%*s"}\n' "$i" $((i % 97)) x; done >"$tmp/many.jsonl"
    for threads in 1 2 5; do
        tokenize -i "$tmp/many.jsonl" -n $threads --chunk-bytes 1000 -o "$tmp/j/x" -v 100 2>"$tmp/err"
        contains "3000 documents" "$tmp/err"
        want "$threads threads" "$(shards "$tmp/j/x")" "${sum:=$(shards "$tmp/j/x")}"
    done
}

test_shards() {
    printf '0123456789' | tokenize -i - -o "$tmp/s/x" -v 4 -s 3 2>"$tmp/err" # 11 tokens
    want files "$(cd "$tmp/s" && echo *.bin)" \
        "x_train_000000.bin x_train_000001.bin x_train_000002.bin x_val_000000.bin x_val_000001.bin"
    want val "$(ids "$tmp/s/x_val_000000.bin") $(ids "$tmp/s/x_val_000001.bin")" "256 15 16 17"
    want train "$(for i in 0 1 2; do ids "$tmp/s/x_train_00000$i.bin"; echo; done | xargs)" "18 19 20 21 22 23 24"
    contains "x_train_000000.bin .. 000002.bin: 7 tokens" "$tmp/err"
    # a second run replaces the whole set: a shard left over would be trained on
    cp "$tmp/s/x_val_000000.bin" "$tmp/s/y_val_000000.bin"
    mv "$tmp/s/x_train_000002.bin" "$tmp/s/x_train_000007.bin" # behind a gap
    : >"$tmp/s/x_train_7.bin"                                  # not one of its names
    printf '01' | tokenize -i - -o "$tmp/s/x" 2>/dev/null
    want files "$(cd "$tmp/s" && echo *)" "merges.txt vocab.json x_train_000000.bin x_train_7.bin y_val_000000.bin"
}

test_errors() {
    small
    printf x >"$tmp/x.txt"
    : >"$tmp/empty.txt"
    refused "contains no text" -i "$tmp/empty.txt"
    refused "contains no text" -i -
    refused "--input $tmp/nothing*.txt: no such file" -i "$tmp/nothing*.txt"
    refused "is a directory" -i "$tmp"
    refused "nothing to train on" -i "$tmp/x.txt" -v 1000
    refused "No such file" -i "$tmp/x.txt" -t "$tmp/absent"
    mkdir -p "$tmp/bare"
    refused "no vocabulary here" -i "$tmp/x.txt" -t "$tmp/bare"
    printf '{"text": "a"}\n{"text": 1}\n' >"$tmp/bad.jsonl"
    refused "bad.jsonl:2: \"text\" is a number" -i "$tmp/bad.jsonl"
    printf '{"text": "a"}\n\n{"txt": "a"}\n' >"$tmp/bad.jsonl"
    refused "bad.jsonl:3: \"text\" is missing, the members are: txt: --field NAME takes another; --skip-bad-lines skips" \
        -i "$tmp/bad.jsonl" -n 3
    printf '{"text": "a"}\n{"text": "a"\n[]\n' >"$tmp/bad.jsonl"
    refused "bad.jsonl:2: not valid JSON" -i "$tmp/bad.jsonl" --chunk-bytes 16 -n 3
    tokenize -i "$tmp/bad.jsonl" --skip-bad-lines -o "$tmp/skip/x" 2>"$tmp/err"
    contains "2 bad lines skipped" "$tmp/err"
    want ids "$(ids "$tmp/skip/x_train_000000.bin")" "256 64"
    # earlier shards survive a run that fails, even late
    (cat "$tmp/x.txt"; mixed 50000) >"$tmp/late.txt"
    cp "$tmp/skip/x_train_000000.bin" "$tmp/kept"
    tokenize -i "$tmp/late.txt,$tmp/bad.jsonl" -s 1000 -o "$tmp/skip/x" 2>/dev/null && fail "a bad line was read"
    cmp "$tmp/kept" "$tmp/skip/x_train_000000.bin"
    want files "$(cd "$tmp/skip" && echo *)" "merges.txt vocab.json x_train_000000.bin"
    # shards of two vocabularies do not mix in one directory
    tokenize -i "$tmp/x.txt" -t "$tmp/small" -o "$tmp/skip/y" 2>"$tmp/err" && fail "two vocabularies in one directory"
    contains "vocab.json: is another vocabulary than $tmp/small (257 tokens instead of 261): -t $tmp/skip takes this vocabulary, another folder in -o keeps both" "$tmp/err"
    tokenize -i "$tmp/x.txt" -t "$tmp/skip" -o "$tmp/skip/y" 2>"$tmp/err" || fail "the cure does not work: $(cat "$tmp/err")"
    ! grep -q 'is new$' "$tmp/err" || fail "$(cat "$tmp/err")"
    tokenize -i "$tmp/x.txt" -o "$tmp/mistyped/name/y" 2>"$tmp/err"
    contains "vocabulary of 257 tokens: $tmp/mistyped/name/vocab.json, merges.txt; the directory is new" "$tmp/err"
}

# What earlier steps and other programs have written is refused by its first bytes, not encoded as if it were text.
test_not_text() {
    local each name want_error
    small
    printf 'ab abc' >"$tmp/x.txt"
    tokenize -i "$tmp/x.txt" -t "$tmp/small" -o "$tmp/kinds/x" 2>/dev/null
    cp "$tmp/kinds/x_train_000000.bin" "$tmp/shard.bin"
    cp dev/test/fixtures/tiny_gpt2/model.safetensors "$tmp"
    printf '\306\327\064\001\003\000\000\000' >"$tmp/model.bin"  # 20240326, version 3
    printf '\241\331\064\001\007\000\000\000' >"$tmp/llama3.bin" # 20240801
    printf '\310\327\064\001' >"$tmp/tokenizer.bin" # 20240328
    printf '\212\330\064\001' >"$tmp/questions.bin" # 20240522
    printf 'GGUF\003\000\000\000\001' >"$tmp/model.gguf"
    for each in "shard.bin:a token shard" "model.bin:a model file of llm.c" "llama3.bin:a Llama-3 shard" \
        "tokenizer.bin:a tokenizer of llm.c" "questions.bin:a multiple-choice evaluation file of llm.c" \
        "model.gguf:a GGUF file" "model.safetensors:a safetensors file"; do
        name=${each%%:*} want_error="error: $tmp/${each%%:*}: is ${each#*:}, not text: want text in UTF-8 or JSON lines"
        refused "$want_error" -i "$tmp/$name"
        refused "$want_error" -i "$tmp/x.txt,$tmp/$name" --chunk-bytes 16 -s 2 -n 3 # after shards have been begun
        refused "$want_error" -i "$tmp/$name" -d jsonl --skip-bad-lines
    done
    tokenize -i - -o "$tmp/no/x" <"$tmp/shard.bin" 2>"$tmp/err" && fail "a shard on standard input is encoded"
    contains "error: -: is a token shard, not text" "$tmp/err"
    # a text may begin with the same letters, and what comes later in a text is not looked at
    for each in 'GGUF' 'GGUF is' 'GGUF\n\n\n\n1' '{"GGUF": 3}' 'x\210\330\064\001' '\210\330\064'; do
        # shellcheck disable=SC2059
        printf "$each" >"$tmp/x.txt"
        tokenize -i "$tmp/x.txt" -o "$tmp/text/x" 2>"$tmp/err" || fail "'$each' is refused: $(cat "$tmp/err")"
        want "tokens of '$each'" "$(header "$tmp/text/x_train_000000.bin")" "20240520 1 $(($(wc -c <"$tmp/x.txt") + 1))"
    done
    # compressed text, by a pipe too
    head -n 30 "$top/llmc/utils.h" | gzip >"$tmp/x.gz"
    refused "x.gz: is compressed with gzip, not text: use zcat FILE | tokenize -i -" -i "$tmp/x.gz"
    printf '\377\376a\0' | tokenize -i - -o "$tmp/no/x" 2>"$tmp/err" && fail "UTF-16 is encoded"
    contains "error: -: is UTF-16, not text: use iconv -f UTF-16 -t UTF-8 FILE | tokenize -i -" "$tmp/err"
    # NUL bytes: refused at the beginning, counted behind it, whatever the chunks
    yes 'some text' | head -c 65535 >"$tmp/nul.txt" && printf '\0' >>"$tmp/nul.txt"
    refused "nul.txt: is not text: has a NUL byte at offset 65535; want text" -i "$tmp/nul.txt" --chunk-bytes 16
    (cat "$tmp/nul.txt" | tr '\0' x && cat "$tmp/shard.bin" && printf '\0ab\0') >"$tmp/later.txt"
    tokenize -i "$tmp/later.txt" --chunk-bytes 100 -o "$tmp/text/x" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    contains "note: $tmp/later.txt: $(tr -cd '\0' <"$tmp/later.txt" | wc -c) NUL bytes in the text" "$tmp/err"
}

# tokens OPTIONS ...: prints the tokens of an input
tokens() { tokenize "$@" -t "$tmp/small" -o "$tmp/tokens/x" 2>"$tmp/err" && ids "$tmp/tokens/x_train_000000.bin"; }

# The format of a file is what its first bytes say, not its name alone.
test_formats() {
    local each
    small
    printf '\357\273\277ab' >"$tmp/mark.txt"
    want "text with a mark" "$(tokens -i "$tmp/mark.txt")" "260 256"
    for each in '' '\357\273\277' '\r\n \n'; do # what precedes it
        # shellcheck disable=SC2059
        printf "$each"'{"id": 1, "text": "ab"}\r\n \t\r\n\n{"text": "b"}' >"$tmp/l.json"
        for name in l.ndjson l.JSONL l; do cp "$tmp/l.json" "$tmp/$name"; done
        for name in l.json l.ndjson l.JSONL l; do want "$name" "$(tokens -i "$tmp/$name")" "260 256 260 65"; done
        want pipe "$(tokens -i - <"$tmp/l")" "260 256 260 65"
    done
    printf '{"prompt": "ab", "completion": "b"}\n{"prompt": "c"}\n' >"$tmp/l"
    refused "l:1: \"text\" is missing, the members are: prompt, completion: --field NAME" -i "$tmp/l"
    want field "$(tokens -i "$tmp/l" --field prompt)" "260 256 260 66"
    want overridden "$(tokens -i "$tmp/l" -d file | cut -c 1-6)" "260 90"
    # an array, also as json.dump(indent=2) writes it
    printf '[{"text": "ab"},{"text": "]\\"}"} ,{"text": ""},{"text": "b"}]' >"$tmp/a"
    printf '\357\273\277[\r\n  {\r\n    "text": "ab"\r\n  },\r\n  {\n"text": "]\\"}" },\n\n{"text": "b"}\r\n]\r\n' >"$tmp/a.json"
    for each in 16 17 19 23 1000; do
        want "array in chunks of $each" "$(tokens -i "$tmp/a" --chunk-bytes "$each")" "260 256 260 60 1 92 260 65"
        want "lines of an array in chunks of $each" "$(tokens -i - --chunk-bytes "$each" <"$tmp/a.json")" "260 256 260 60 1 92 260 65"
    done
    head -c 30 "$tmp/a" >"$tmp/cut"
    refused "cut: not valid JSON: the text ends after element 1 of the array" -i "$tmp/cut"
    printf '[{"text": "ab"}, {"body": 1}, {"text": "b"}]' >"$tmp/a"
    refused "a: element 2: \"text\" is missing, the members are: body" -i "$tmp/a"
    want "array without a bad element" "$(tokens -i "$tmp/a" --skip-bad-lines)" "260 256 260 65"
    # the first line is longer than what is read to find the format
    printf '{"text": "%100000s"}\n{"text": "ab"}\n' x >"$tmp/long"
    want "a long line" "$(tokens -i "$tmp/long" | wc -w) $(tail -c 4 "$tmp/tokens/x_train_000000.bin" | od -An -t u2 | xargs)" "100003 260 256"
    # objects without the member are text, with a note
    printf '[{"instruction": "ab", "output": "b"}]' >"$tmp/o.json"
    want "an array of other objects" "$(tokens -i "$tmp/o.json" | cut -c 1-9)" "260 58 90"
    contains "note: JSON objects without \"text\" are encoded as they are, in 1 files ($tmp/o.json has instruction, output): --field NAME" "$tmp/err"
    want "member of an array" "$(tokens -i "$tmp/o.json" --field output)" "260 65"
    # so is what has more than the text in it, unless it is read as JSON lines; files that are not UTF-8
    printf 'id,text\n1,ab\n' >"$tmp/t.csv"
    printf '<html>ab</html>' >"$tmp/t.html"
    want "a table" "$(tokens -i "$tmp/t.csv,$tmp/mark.txt,$tmp/t.html" -d line | cut -c 1-9)" "260 72 67"
    contains "note: $tmp/t.csv is a table and is encoded as it is, the first of 2 such files: duckdb" "$tmp/err"
    printf '["ab", "b"]' >"$tmp/s.json"
    want "an array of strings" "$(tokens -i "$tmp/s.json" | cut -c 1-8)" "260 58 1"
    contains "note: $tmp/s.json is an array of strings and is encoded as it is: jq -c '.[] | {text: .}' FILE takes out the text" "$tmp/err"
    printf '{"text": "ab"}\n' >"$tmp/l.csv"
    want "JSON lines" "$(tokens -i "$tmp/l.csv")" "260 256"
    [ "$(grep -c '^note: ' "$tmp/err")" = 0 ] || fail "$(cat "$tmp/err")"
    printf 'caf\351 caf\303\251 \360\237\221\251' >"$tmp/latin"
    for each in 16 1000; do
        tokens -i "$tmp/latin" --chunk-bytes "$each" >"$tmp/out"
        contains "note: $tmp/latin: 1 bytes that are not UTF-8 (iconv -f LATIN1 -t UTF-8 FILE converts Latin-1)" "$tmp/err"
    done
    # prose and programs may begin like JSON
    for each in '{ int x; }\n' '[ab](c)\n' '{\n"text": "a"\n}\n' '[\n1,\n2]\n' '{}\n{}\n' '{"ab": 1} b\n' '["a"]\n' '{'; do
        # shellcheck disable=SC2059
        printf "$each" >"$tmp/x.json"
        tokenize -i "$tmp/x.json" -o "$tmp/text/x" 2>"$tmp/err" || fail "'$each' is refused: $(cat "$tmp/err")"
        want "tokens of '$each'" "$(header "$tmp/text/x_train_000000.bin")" "20240520 1 $(($(wc -c <"$tmp/x.json") + 1))"
    done
}

# What other programs accept in JSON is accepted and counted.
test_odd_json() {
    small
    printf '{"text": "ab", "score": NaN, "x": [Infinity, -Infinity]}\n{"text": "c", "id": 1, "text": "b"}\n{"text": "a\\ud83d"}\n' >"$tmp/odd.jsonl"
    want tokens "$(tokens -i "$tmp/odd.jsonl")" "260 256 260 65 260 64 171 123 121"
    contains "note: $tmp/odd.jsonl: 1 lone surrogates in JSON, replaced by U+FFFD; 3 numbers in JSON that are NaN, infinite or too long, not read; 1 repeated keys" "$tmp/err"
    want notes "$(grep -c '^note: ' "$tmp/err")" 1
    want "tokens in chunks" "$(tokens -i "$tmp/odd.jsonl" --chunk-bytes 16)" "260 256 260 65 260 64 171 123 121"
    contains "1 lone surrogates" "$tmp/err"
    printf '{"text": "ab"}\n{"text": NaN}\n' >"$tmp/odd.jsonl"
    refused "odd.jsonl:2: \"text\" is a number, want a string; --skip-bad-lines" -i "$tmp/odd.jsonl"
    printf '{"text": "ab"}\n{"text": "b" "c"}\n' >"$tmp/odd.jsonl"
    refused "--skip-bad-lines skips such lines" -i "$tmp/odd.jsonl"
}

# CR LF and lines of blanks, wherever lines mean something
test_windows() {
    small
    printf 'ab\r\n \t\r\n\r\nb\n  \n\nab\r\n' >"$tmp/w.txt"
    want line "$(tokens -i "$tmp/w.txt" -d line)" "260 256 260 65 260 256"
    want blank-line "$(tokens -i "$tmp/w.txt" -d blank-line)" \
        "260 256 201 198 220 197 201 198 260 201 198 65 198 220 220 198 260 198 256 201 198"
    printf '{"text": "ab"}\r\n\r\n \r\n{"text": "b"}\r\n' >"$tmp/w.jsonl"
    want jsonl "$(tokens -i "$tmp/w.jsonl")" "260 256 260 65"
}

test_usage() {
    local rc
    for args in "-i x" "-o x" "-i x -o y --threads x" "-i x -o y -s 0" "-i x -o y z" "-i x -o y -d words"; do
        rc=0
        # shellcheck disable=SC2086
        tokenize $args >"$tmp/out" 2>"$tmp/err" || rc=$?
        want "status of '$args'" $rc 2
        want "lines of stderr" "$(wc -l <"$tmp/err")" 1
    done
}

test_vocabulary_limits() {
    # 256 bytes, 65,280 merges and an end-of-text: one token more than fit 16 bits
    mkdir -p "$tmp/large"
    awk -v limit=65280 'BEGIN { printf "#version: 0.2\n"; n = 0
        for (i = 33; i < 127; i++) for (j = 33; j < 127; j++) if (n < limit) { printf "%c %c\n", i, j; n++ }
        for (i = 33; i < 127; i++) for (j = 33; j < 127; j++) for (k = 33; k < 127; k++)
            if (n < limit) { printf "%c%c %c\n", i, j, k; n++ } }' >"$tmp/large/merges.txt"
    printf x >"$tmp/x.txt"
    refused "65536 at most" -i "$tmp/x.txt" -t "$tmp/large"
    sed -i '$d' "$tmp/large/merges.txt"
    tokenize -i "$tmp/x.txt" -t "$tmp/large" -o "$tmp/large-out/x" 2>/dev/null
    want ids "$(ids "$tmp/large-out/x_train_000000.bin")" "65535 87"
    # a vocabulary without an end-of-text token to put before documents
    mkdir -p "$tmp/endless"
    sed 's/, "<|endoftext|>": [0-9]*//' "$tmp/large-out/vocab.json" >"$tmp/endless/vocab.json"
    cp "$tmp/large-out/merges.txt" "$tmp/endless"
    refused "no token <|endoftext|>" -i "$tmp/x.txt" -t "$tmp/endless"
}

# named VOCABULARY: prints a vocabulary like RoBERTa's: special tokens </s> and <unk>, but no <|endoftext|>
named() {
    small
    mkdir -p "$tmp/named"
    printf x | tokenize -i - -t "$tmp/small" -o "$tmp/whole/x" 2>/dev/null
    sed 's/"<|endoftext|>": 260/"<\/s>": 260, "<unk>": 261/' "$tmp/whole/vocab.json" >"$tmp/named/vocab.json"
    cp "$tmp/whole/merges.txt" "$tmp/named"
}

test_eot() {
    named
    printf 'ab\nabc\n' >"$tmp/x.txt"
    refused "no token <|endoftext|>, which must precede documents; --eot NAME chooses another: </s>, <unk>" \
        -i "$tmp/x.txt" -t "$tmp/named"
    refused "no token </S>, which must precede documents; --eot NAME chooses another: </s>, <unk>" \
        -i "$tmp/x.txt" -t "$tmp/named" --eot '</S>'
    refused "the vocabulary of bytes: has no token </s>" -i "$tmp/x.txt" --eot '</s>'
    tokenize -i "$tmp/x.txt" -t "$tmp/named" --eot '</s>' -d line -o "$tmp/eot/x" 2>/dev/null
    want ids "$(ids "$tmp/eot/x_train_000000.bin")" "260 256 260 257"
    # it is remembered beside the shards
    tokenize -i "$tmp/x.txt" -t "$tmp/eot" -o "$tmp/again/x" 2>/dev/null
    want "ids without --eot" "$(ids "$tmp/again/x_train_000000.bin")" "260 256 198 257 198"
    cmp "$tmp/eot/tokenizer_config.json" "$tmp/again/tokenizer_config.json"
    # --eot goes before what the vocabulary names
    tokenize -i "$tmp/x.txt" -t "$tmp/eot" --eot '<unk>' -o "$tmp/unk/x" 2>/dev/null
    want "ids of <unk>" "$(ids "$tmp/unk/x_train_000000.bin")" "261 256 198 257 198"
    # the shards of one directory have one end-of-text
    cp -r "$tmp/eot" "$tmp/before"
    for args in "-t $tmp/eot --eot <unk> -o $tmp/eot/x" "-t $tmp/named --eot </s> -o $tmp/named/x"; do
        # shellcheck disable=SC2086
        tokenize -i "$tmp/x.txt" $args 2>"$tmp/err" && fail "two kinds of end-of-text in one directory"
        contains "another end-of-text" "$tmp/err"
    done
    diff -r "$tmp/before" "$tmp/eot"
    want "files of the vocabulary" "$(cd "$tmp/named" && echo *)" "merges.txt vocab.json"
    # shards of the same end-of-text may follow, also of one that the text spells
    for i in 1 2; do
        tokenize -i "$tmp/x.txt" -t "$tmp/named" --eot ab -o "$tmp/other/$i" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
        contains "note: $tmp/x.txt: spells special tokens, 2 in all, the first ab" "$tmp/err"
    done
    # a tokenizer_config.json without its vocabulary is not replaced, and does not describe another one
    mkdir "$tmp/config"
    printf '{"eos_token": "<unk>", "model_max_length": 8}' >"$tmp/config/tokenizer_config.json"
    cp -r "$tmp/config" "$tmp/before.config"
    tokenize -i "$tmp/x.txt" -t "$tmp/named" --eot '<unk>' -o "$tmp/config/x" 2>"$tmp/err" && fail "the vocabulary is not there"
    contains "config/tokenizer_config.json: describes a vocabulary that is not there; choose another --out" "$tmp/err"
    diff -r "$tmp/before.config" "$tmp/config"
}

# The vocabulary of bytes with two added tokens, 257 <|user|> and 258 zebra, that transformers would read so
added() {
    rm -rf "$tmp/added"
    printf 'a b\n' | tokenize -i - -o "$tmp/added/x" 2>/dev/null
    printf '{"<|user|>": 257, "zebra": 258}' >"$tmp/added/added_tokens.json"
}

# Plain added tokens are tokens in every text, special ones with --special.
test_added_tokens() {
    added
    printf '<|user|>zebra\n' >"$tmp/u.txt"
    tokenize -i "$tmp/u.txt" -t "$tmp/added" -o "$tmp/plain/x" 2>"$tmp/err"
    want ids "$(ids "$tmp/plain/x_train_000000.bin")" "256 257 258 198"
    want notes "$(grep -c note "$tmp/err" || true)" 0
    printf '{"additional_special_tokens": ["<|user|>"]}' >"$tmp/added/special_tokens_map.json"
    tokenize -i "$tmp/u.txt" -t "$tmp/added" -o "$tmp/noted/x" 2>"$tmp/err"
    want "ids without --special" "$(ids "$tmp/noted/x_train_000000.bin")" "256 27 91 84 82 68 81 91 29 258 198"
    contains "note: $tmp/u.txt: spells special tokens, 1 in all, the first <|user|>, as ordinary text: --special makes them tokens" "$tmp/err"
    tokenize -i "$tmp/u.txt" -t "$tmp/added" --special -o "$tmp/asked/x" 2>"$tmp/err"
    want "ids with --special" "$(ids "$tmp/asked/x_train_000000.bin")" "256 257 258 198"
    want notes "$(grep -c note "$tmp/err" || true)" 0
    # the vocabulary beside the shards knows which of them is special
    for args in "noted" "asked --special"; do
        # shellcheck disable=SC2086
        tokenize -i "$tmp/u.txt" -t "$tmp/asked" -o "$tmp/again_"$args 2>"$tmp/err"
        cmp "$tmp/again_${args%% *}_train_000000.bin" "$tmp/${args%% *}/x_train_000000.bin"
    done
    want files "$(cd "$tmp/asked" && echo *)" "merges.txt tokenizer_config.json vocab.json x_train_000000.bin"
    # one directory does not get shards of the same tokens where others are special
    tokenize -i "$tmp/u.txt" -t "$tmp/plain" -o "$tmp/asked/y" 2>"$tmp/err" && fail "<|user|> is special there"
    contains "$tmp/asked: the vocabulary there has the same tokens, but others are added or special: " "$tmp/err"
}

# <|endoftext|> between the documents of one file, however it is cut into chunks
test_spelled_end_of_text() {
    local i ids
    for i in $(seq 40); do printf 'zebra %d\n<|endoftext|>\n' "$i"; done >"$tmp/stories.txt"
    added
    for i in 1048576 16 17 31 64; do
        tokenize -i "$tmp/stories.txt,$tmp/stories.txt" -t "$tmp/added" --special -n 3 --chunk-bytes "$i" -o "$tmp/stories/$i" 2>"$tmp/err"
        contains "80 documents, " "$tmp/err"
        cmp "$tmp/stories/1048576_train_000000.bin" "$tmp/stories/${i}_train_000000.bin"
    done
    ids=$(ids "$tmp/stories/16_train_000000.bin")
    want "first ids" "${ids:0:41}" "256 258 220 16 198 256 198 258 220 17 198"
    want "last ids" "${ids: -21}" "198 258 220 19 15 198"
    want "ends of text" "$(tr ' ' '\n' <<<"$ids" | grep -c '^256$')" 80
    # a text of <|endoftext|> alone has no document
    printf '<|endoftext|>\n<|endoftext|>\n' >"$tmp/none.txt"
    refused "contains no text" -i "$tmp/none.txt" --special
}

test_signal() {
    local round pid feeder rc
    mkdir -p "$tmp/sig"
    mkfifo "$tmp/fifo"
    mixed 100000 >"$tmp/m.txt"
    for round in 1 2 3 4 5; do
        "$BIN_DIR/dev/data/tokenize" -i - -n 3 -s 1000 --chunk-bytes 1000 -o "$tmp/sig/x" <"$tmp/fifo" 2>"$tmp/err" &
        pid=$! rc=0
        { cat "$tmp/m.txt" && exec sleep 20; } >"$tmp/fifo" 2>/dev/null &
        feeder=$!
        for _ in $(seq 400); do [ ! -e "$tmp/sig/x_train_000005.bin.part" ] || break; sleep 0.02; done
        [ -e "$tmp/sig/x_train_000005.bin.part" ] || fail "no shard was begun"
        kill -TERM $pid
        wait $pid || rc=$?
        kill $feeder 2>/dev/null || true
        want "status in round $round" $rc 1
        contains "interrupted" "$tmp/err"
        [ -z "$(ls -A "$tmp/sig")" ] || fail "left: $(ls "$tmp/sig")"
    done
}

test_error_while_waiting() {
    # a bad line is reported although the pipe stays open, as soon as the first 64 KB have shown that this is text
    mkfifo "$tmp/slow"
    { printf 'x\n' && yes '{"text": "a"}' | head -n 6000 && exec sleep 20; } >"$tmp/slow" &
    local feeder=$!
    tokenize -i - -d jsonl -n 3 --chunk-bytes 16 -o "$tmp/wait/x" <"$tmp/slow" 2>"$tmp/err" &
    for _ in $(seq 100); do ! grep -q "not valid JSON" "$tmp/err" || break; sleep 0.05; done
    kill $feeder 2>/dev/null || true # it has ended if tokenize ended first
    contains "not valid JSON" "$tmp/err"
    [ ! -e "$tmp/wait" ] || fail "left: $(ls "$tmp/wait")"
}

test_full_disk() {
    [ -w /dev/full ] || skip "needs /dev/full"
    mkdir -p "$tmp/full"
    ln -s /dev/full "$tmp/full/x_train_000000.bin.part.tmp"
    printf x | tokenize -i - -o "$tmp/full/x" 2>"$tmp/err" && fail "wrote to a full disk"
    contains "No space left" "$tmp/err"
    [ ! -e "$tmp/full/x_train_000000.bin" ] || fail "a shard is there"
}

test_tinyshakespeare() {
    [ -e "$data/tinyshakespeare.txt" ] || skip "needs $data/tinyshakespeare.txt (or LLMC_DATA)"
    tokenize -i "$data/tinyshakespeare.txt" -t "$data/gpt2_tokenizer" -o "$tmp/ts/ts" -v 32768 -d blank-line 2>/dev/null
    want val "$(header "$tmp/ts/ts_val_000000.bin")" "20240520 1 32768"
    want train "$(header "$tmp/ts/ts_train_000000.bin")" "20240520 1 305260"
    want "first tokens" "$(ids "$tmp/ts/ts_val_000000.bin" | cut -d ' ' -f 1-8)" "50256 5962 22307 25 198 8421 356 5120"
    # sha256 of all 338,028 tokens, made with llm.c's rule and the library tokenizers
    want tokens "$(for f in val train; do tail -c +1025 "$tmp/ts/ts_${f}_000000.bin"; done | sha256sum | cut -c 1-16)" a83aac7c65f0c35b
    tokenize -i "$data/tinyshakespeare.txt" -t "$data/gpt2_tokenizer" -o "$tmp/ts/whole" 2>"$tmp/err"
    want whole "$(header "$tmp/ts/whole_train_000000.bin")" "20240520 1 338026"
}

# a limit on the size of files is an error like a full disk, and nothing is left of the shard
test_file_size_limit() {
    local rc=0
    head -c 60000 /dev/zero | tr '\0' 'a' >"$tmp/large.txt"
    (ulimit -f 20 && tokenize -i "$tmp/large.txt" -o "$tmp/limit/x") >"$tmp/out" 2>"$tmp/err" || rc=$?
    want status $rc 1
    contains "File too large" "$tmp/err"
    want files "$(ls -A "$tmp/limit" 2>/dev/null | grep -v '^vocab.json$\|^merges.txt$')" ""
}

# with stderr closed, no shard gets its descriptor and with it the progress
test_closed_stderr() {
    printf 'ab c' >"$tmp/t.txt"
    tokenize -i "$tmp/t.txt" -o "$tmp/open/x" 2>/dev/null
    (sleep 0.1 && cat "$tmp/t.txt") | tokenize -i - -o "$tmp/closed/x" 2>&-
    cmp "$tmp/open/x_train_000000.bin" "$tmp/closed/x_train_000000.bin"
}

tests=(bytes vocabulary documents inputs chunks_and_threads jsonl_threads shards errors not_text formats odd_json windows usage vocabulary_limits eot
    added_tokens spelled_end_of_text signal error_while_waiting full_disk file_size_limit closed_stderr tinyshakespeare)
run_tests "$@"
