#!/usr/bin/env bash
# dev/data/lambada and dev/data/arc: the contents of their output files and every error. What they share with dev/data/hellaswag
# is also tested in test_hellaswag.sh.
. "$(dirname "$0")/../test.sh"
data=${LLMC_DATA:-../shared/data}
fixtures=dev/test/fixtures/eval

# words FILE: prints the examples as 16-bit words, on one line
words() { tail -c +1025 "$1" | od -An -v -t u2 | tr -s ' \n' '  ' | sed 's/^ //; s/ $//'; }

# header FILE: prints magic, version, number of examples, bytes of the longest, kind
header() { od -An -t d4 -N 20 "$1" | tr -s ' \n' '  ' | sed 's/^ //; s/ $//'; }

# A small vocabulary: ab 256, abc 257, bc 258, _ab 259, <|endoftext|> 260
small() {
    mkdir -p "$tmp/small"
    printf '#version: 0.2\na b\nab c\nb c\n\xc4\xa0 ab\n' >"$tmp/small/merges.txt"
}

# convert PROGRAM LINE...: makes $tmp/x.bin of these lines with the small vocabulary
convert() {
    small
    printf '%s\n' "${@:2}" >"$tmp/x.jsonl"
    "$BIN_DIR/dev/data/$1" -i "$tmp/x.jsonl" -t "$tmp/small" -o "$tmp/x.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
}

# bad PROGRAM TEXT LINE: LINE, the second of the file, must be refused in one line with TEXT in it; no file is left
bad() {
    local rc=0
    printf '\n%s\n' "$3" >"$tmp/bad.jsonl"
    "$BIN_DIR/dev/data/$1" -i "$tmp/bad.jsonl" -o "$tmp/no/x.bin" >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
    want "status of $1 on $3" $rc 1
    want "lines of stderr" "$(wc -l <"$tmp/err")" 1
    contains "$2" "$tmp/err"
    [ -z "$(ls -A "$tmp/no" 2>/dev/null)" ] || fail "$1 left $(ls "$tmp/no")"
}

# Ids of bytes: a 64, b 65, c 66, d 67, x 87, . 13, " 1, blank 220, line break 198. An ending has its number of tokens, its number
# of characters without the blank, and its tokens with the blank before it.
test_last_words() {
    convert lambada '{"text": "x ab c ab", "id": 7}' '' '{"text": "\"ab.\"\nd \u00e9."}'
    want header "$(header "$tmp/x.bin")" "20240522 2 2 36 2"
    want words "$(words "$tmp/x.bin")" \
        "65535 26 0 0 1 4 87 259 220 66 1 2 259 65535 36 1 0 1 6 1 256 13 1 198 67 4 2 220 127 102 13"
    contains "x.bin: 2 questions, the longest with its ending 10 tokens, 1086 bytes" "$tmp/err"
}

# An added token of the vocabulary is one token; a special one is ordinary text.
test_added_tokens() {
    small
    printf '{"zebra": 261}' >"$tmp/small/added_tokens.json"
    convert lambada '{"text": "zebra ab<|endoftext|>"}'
    want words "$(words "$tmp/x.bin")" "65535 46 0 0 1 1 261 14 15 259 27 91 68 77 67 78 69 83 68 87 83 91 29"
    rm "$tmp/small/added_tokens.json"
}

# White space at the end of the context goes to the ending: here a blank, and a line break between blanks
test_white_space() {
    convert lambada '{"text": "ab  ab"}' '{"text": "ab \n ab"}' '{"text": "ab\u00a0 ab"}'
    want words "$(words "$tmp/x.bin")" \
        "65535 22 0 0 1 1 256 2 2 220 259 65535 24 1 0 1 1 256 3 2 220 198 259 65535 24 2 0 1 1 256 3 2 126 254 259"
}

# The same words for both forms. The context is "Question: ab\nAnswer:".
test_choices() {
    local context="20 48 84 68 82 83 72 78 77 25 259 198 32 77 82 86 68 81 25" i
    convert arc '{"id": "q", "question": {"stem": "ab", "choices": [{"text": "ab", "label": "A"}, {"text": "c\u00e9", "label": "B"}]}, "answerKey": "B"}'
    want header "$(header "$tmp/x.bin")" "20240522 2 1 66 1"
    want words "$(words "$tmp/x.bin")" "65535 66 0 1 2 18 ${context#* } 1 2 259 4 2 220 66 127 102"
    cp "$tmp/x.bin" "$tmp/ai2.bin"
    convert arc '{"question": "ab", "choices": {"text": ["ab", "c\u00e9"], "label": ["A", "B"]}, "answerKey": "B"}'
    cmp "$tmp/ai2.bin" "$tmp/x.bin"
    for i in ai2 hf; do
        "$BIN_DIR/dev/data/arc" -i "$fixtures/questions_$i.jsonl" -o "$tmp/$i.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    done
    cmp "$tmp/ai2.bin" "$tmp/hf.bin"
    [ "$(grep -c '^note: ' "$tmp/err")" = 0 ] || fail "$(cat "$tmp/err")"
    convert arc '{"question": "ab", "choices": {"text": [" ab", "c"], "label": ["A", "B"]}, "answerKey": "B"}'
    contains "note: $tmp/x.jsonl: 1 endings begin with a blank of their own, behind the one that each is given" "$tmp/err"
    want "labels of another kind" "$(header "$tmp/hf.bin" | cut -d ' ' -f 3)" 4
}

test_lambada_errors() {
    bad lambada 'bad.jsonl:2: "text" is missing' '{"txt": "a b"}'
    bad lambada '"text" is a number, want a string' '{"text": 1}'
    bad lambada 'the text has no blank' '{"text": "word"}'
    bad lambada 'the text ends in a blank' '{"text": "a word "}'
    bad lambada 'the context is empty' '{"text": " word"}'
    bad lambada 'the context is empty' '{"text": "\n\u2003 word"}'
    bad lambada 'the text ends in a blank, want a word' '{"text": "a word. \n"}'
    bad lambada 'bad.jsonl: is not JSON: want one {"text": "..."} per line, or in an array' 'a text'
    bad lambada 'bad.jsonl: is not JSON: want one {"text": "..."} per line' 'text
"a,b"'
    bad lambada 'contains no questions' ''
}

test_arc_errors() {
    hf() { bad arc "bad.jsonl:2: $1" "{\"question\": \"q\", $2}"; } # TEXT REST
    ai2() { bad arc "bad.jsonl:2: $1" "{\"question\": $2, \"answerKey\": \"A\"}"; } # TEXT QUESTION
    local two='"choices": {"text": ["x", "y"], "label": ["A", "B"]}'
    hf '"answerKey" is missing, the members are: question, choices; test sets without answers' "$two"
    hf '"answerKey" is a number' "$two, \"answerKey\": 1"
    hf "0 choices have the label 'C' of \"answerKey\", want one" "$two, \"answerKey\": \"C\""
    hf '"answerKey" is empty, the members are: question, choices, answerKey; test sets without answers cannot be scored' "$two, \"answerKey\": \"\""
    hf "2 choices have the label 'A' of" '"choices": {"text": ["x", "y"], "label": ["A", "A"]}, "answerKey": "A"'
    hf '"choices" is missing' '"answerKey": "A"'
    hf '"choices" is an array, want an object' '"choices": [], "answerKey": "A"'
    hf '"label" is missing' '"choices": {"text": ["x", "y"]}, "answerKey": "A"'
    hf '1 choices, want 2 to 5' '"choices": {"text": ["x"], "label": ["A"]}, "answerKey": "A"'
    hf '6 choices, want 2 to 5' '"choices": {"text": ["", "", "", "", "", ""], "label": []}, "answerKey": "A"'
    hf '2 texts of choices, but 1 labels' '"choices": {"text": ["x", "y"], "label": ["A"]}, "answerKey": "A"'
    hf 'choice 1 is null, want a string' '"choices": {"text": ["x", null], "label": ["A", "B"]}, "answerKey": "A"'
    hf 'label 0 is a number, want a string' '"choices": {"text": ["x", "y"], "label": [1, "B"]}, "answerKey": "A"'
    hf 'ending 0 is empty' '"choices": {"text": ["", "y"], "label": ["A", "B"]}, "answerKey": "A"'
    ai2 '"question" is a number, want an object' 1
    ai2 '"stem" is missing' '{"choices": []}'
    ai2 '"choices" is missing' '{"stem": "q"}'
    ai2 '0 choices, want 2 to 5' '{"stem": "q", "choices": []}'
    ai2 '"text" is missing' '{"stem": "q", "choices": [{"text": "x", "label": "A"}, {"label": "B"}]}'
    ai2 '"label" is a boolean' '{"stem": "q", "choices": [{"text": "x", "label": "A"}, {"text": "y", "label": true}]}'
    ai2 '"text" is missing' '{"stem": "q", "choices": ["x", "y"]}'
    bad arc '"question" is missing' '{"answerKey": "A"}'
    bad arc 'is an array, want an object with "answerKey"' '[]'
}

# Usage errors, and that --help names the rules
test_usage() {
    local program rc args
    for program in lambada arc; do
        for args in "-i x" "-o x" "-i x -o y z" "-i x -o y --threads 2"; do
            rc=0
            # shellcheck disable=SC2086
            "$BIN_DIR/dev/data/$program" $args >"$tmp/out" 2>"$tmp/err" || rc=$?
            want "status of '$program $args'" $rc 2
            want "lines of stderr" "$(wc -l <"$tmp/err")" 1
        done
        "$BIN_DIR/dev/data/$program" --help >"$tmp/out"
        contains "LM Evaluation Harness" <(tr '\n' ' ' <"$tmp/out" | tr -s ' ')
    done
}

# Sums of the files whose words another program has computed, from the harness's rules and GPT-2's vocabulary (fixtures/README.md)
test_gpt2_words() {
    [ -e "$data/gpt2_tokenizer" ] || skip "needs $data/gpt2_tokenizer (or LLMC_DATA)"
    "$BIN_DIR/dev/data/lambada" -i "$fixtures/last_words.jsonl" -t "$data/gpt2_tokenizer" -o "$tmp/words.bin" 2>"$tmp/err"
    "$BIN_DIR/dev/data/arc" -i "$fixtures/questions_hf.jsonl" -t "$data/gpt2_tokenizer" -o "$tmp/questions.bin" 2>"$tmp/err"
    want "last words" "$(sha256sum "$tmp/words.bin" | cut -c 1-16)" 31b43508fd60debe
    want questions "$(sha256sum "$tmp/questions.bin" | cut -c 1-16)" 5f518fb4fe7c62b5
}

tests=(last_words added_tokens white_space choices lambada_errors arc_errors usage gpt2_words)
run_tests "$@"
