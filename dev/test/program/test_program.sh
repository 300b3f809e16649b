#!/usr/bin/env bash
# train_gpt2 from the command line: its messages on wrong input, which must leave all files untouched, and correct runs,
# samples and fine-tuning. Stopping and resuming are tested by test_resume.sh.
# shellcheck disable=SC2059,SC1010 # formats of printf hold bytes as escapes; `done` is the name of a directory
. "$(dirname "$0")/../test.sh"

export OMP_NUM_THREADS=1 # the models are tiny
train=${TRAIN:-$BIN_DIR/train_gpt2} # TRAIN=$PWD/train_gpt2cu runs the same tests on the GPU program
[[ $train == /* ]] || train=$PWD/$train
tiny=$PWD/dev/test/fixtures/tiny_gpt2
world=$tmp/world                                            # where the program runs: all files that it may read or damage
data='data/a_train_*.bin'                                   # always quoted, because the program expands it
small=(-e d6 --layers 1 --heads 1 --channels 32 --positions 32) # flags of a new model
batch=(--recipe llmc -b 2 -t 16 -x 3 -s 0)

# little N ...: prints each number as four bytes, little-endian
little() {
    local n
    for n in "$@"; do printf "$(printf '\\x%02x' $((n & 255)) $((n >> 8 & 255)) $((n >> 16 & 255)) $((n >> 24)))"; done
}

# decode_only FILE N: writes a tokenizer file of llm.c with N tokens of one byte, the last of which is the end of a text
decode_only() {
    local i
    {
        little 20240328 2 "$2" $(($2 - 1))
        head -c 1008 /dev/zero
        for ((i = 0; i < $2; i++)); do printf "\\x01\\x$(printf %02x $((i & 127)))"; done
    } >"$1"
}

# patch FILE AT TEXT: overwrites the bytes at offset AT by TEXT, a printf format
patch() { printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null; }

# Creates shards of this source tree's text with a byte vocabulary, damaged copies of a shard, and `run`: three steps
# with their checkpoints.
setup() {
    [ -x "$train" ] && [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "$train or dev/data/tokenize is not there: make all"
    [ -e "$world" ] && return
    local new=$tmp/new
    rm -rf "$new"
    mkdir -p "$new/bad"
    head -c 10000 llmc/gpt2.h >"$new/text"
    "$BIN_DIR/dev/data/tokenize" -i "$new/text" -o "$new/data/a" -v 1000 -s 5000 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    : >"$new/bad/empty.bin"
    head -c 3000 "$new/data/a_train_000000.bin" >"$new/bad/cut.bin"
    cp "$new/data/a_train_000000.bin" "$new/bad/id.bin"
    patch "$new/bad/id.bin" $((1024 + 2 * 20)) '\x01\x01' # token 20 becomes 257; the last id of the vocabulary is 256
    decode_only "$new/385.bin" 385
    decode_only "$new/513.bin" 513
    (cd "$new" && "$train" "${small[@]}" "${batch[@]}" -l 0.01 -i "$data" -o run -n 1 -nk 0) >"$tmp/setup.out" 2>"$tmp/err" ||
        fail "a plain run fails: $(cat "$tmp/err")"
    want "checkpoints of a plain run" "$(ls "$new/run" | grep -c step_)" 3
    mv "$new" "$world"
}

# run ARGS...: runs the program and sets `status`; output goes to $tmp/out and $tmp/err
run() {
    status=0
    (cd "$world" && exec "$train" "$@") >"$tmp/out" 2>"$tmp/err" </dev/null || status=$?
}

# good ARGS...: as run, but fails unless the program succeeds
good() {
    run "$@"
    [ $status -eq 0 ] || fail "$*: status $status: $(tail -n 1 "$tmp/err")"
}

# Prints all entries below $world with their change times, so a file that is rewritten with the same bytes also differs.
snapshot() { (cd "$world" && find . \( -type d -printf '%p %m\n' \) -o -printf '%p %y %s %m %i %C@\n' | sort); }

# refused STATUS PATTERN ... -- ARGS...: the program must exit with STATUS after one line on stderr that matches every
# extended regular expression; it prints nothing else, unless after_the_start is set, takes no step and leaves its directory unchanged
refused() {
    local code=$1 patterns=() pattern
    shift
    while [ "$1" != -- ]; do patterns+=("$1") && shift; done
    shift
    setup
    rm -rf "$world/new" # left over by a test that failed
    snapshot >"$tmp/before"
    run "$@"
    [ "$status" -eq "$code" ] || fail "status $status, want $code: $(cat "$tmp/err")"
    want "lines of stderr" "$(wc -l <"$tmp/err")" 1
    for pattern in "${patterns[@]}"; do grep -qE -- "$pattern" "$tmp/err" || fail "no '$pattern' in: $(cat "$tmp/err")"; done
    [ "$(wc -c <"$tmp/err")" -lt 400 ] || fail "a long line: $(cat "$tmp/err")"
    grep -q '^step ' "$tmp/out" && fail "takes a step before it fails"
    [ -n "${after_the_start-}" ] || [ ! -s "$tmp/out" ] || fail "an error does not stand alone: $(head -n 1 "$tmp/out")"
    snapshot >"$tmp/after"
    cmp -s "$tmp/before" "$tmp/after" || fail "files have changed: $(diff "$tmp/before" "$tmp/after" | head -n 3 | tr '\n' ' ')"
}
usage() { # PATTERN ... -- ARGS...: adding ARGS to a correct command must be a usage error
    local patterns=()
    while [ "$1" != -- ]; do patterns+=("$1") && shift; done
    shift
    refused 2 "${patterns[@]}" -- "${small[@]}" "${batch[@]}" -i "$data" -o new "$@"
}
failure() { # PATTERN ... -- ARGS...: the same with exit code 1; -e and -i in ARGS override the correct ones
    local patterns=() correct=("${small[@]}" "${batch[@]}" -o new)
    while [ "$1" != -- ]; do patterns+=("$1") && shift; done
    shift
    [[ " $* " == *" -i "* ]] || correct+=(-i "$data")
    refused 1 '^error: ' "${patterns[@]}" -- "${correct[@]}" "$@"
}

# ---- mistakes in the flags --------------------------------------------------------------

test_unknown_flag() {
    usage "unknown flag '--nonsense'" '--help' -- --nonsense 3
    usage "unknown flag '--learnin-rate'" "did you mean '--learning-rate'" -- --learnin-rate 3
    usage "unknown flag '-Q'" -- -Q
    usage "unknown flag '-lx'" -- -lx 3
}
test_junk_number() {
    usage '--batch-size' 'whole number' "'4x'" -- -b 4x
    usage '--learning-rate' 'a number' "'fast'" -- -l fast
    usage '--learning-rate' "'nan'" -- -l nan
    usage '--steps' "'1.5'" -- -x 1.5
    usage '--shuffle' '0 or 1' "'maybe'" -- --shuffle=maybe
}
test_missing_value() {
    usage "'-x' wants a value" '--help' -- -x
    usage "'--output' wants a value" -- --output
}
test_negative_size() {
    usage '--channels wants 0 to 65536' "'-32'" -- --channels -32
    usage '--mlp-channels wants 0 to' "'-128'" -- --mlp-channels -128
    usage '--norm-epsilon wants 0 to 1' "'-1e-5'" -- --norm-epsilon -1e-5
    usage '--batch-size wants 1 to' "'-1'" -- -b -1
    usage '--batch-size wants 1 to' "'0'" -- -b 0
}
test_stray_argument() { usage "stray argument 'data/x.bin'" '--help' -- data/x.bin; }
test_out_of_range() {
    usage '--final-fraction wants 0 to 1' "'2'" -- -q 2
    usage '--seq-len wants 0 to' "'99999999999999999999'" -- -t 99999999999999999999
    usage '--temperature wants 0 to' "'-1'" -- --temperature -1
}
test_bad_schedule() { usage '--schedule wants one of cosine\|linear\|constant\|wsd' "'cosin'" -- -k cosin; }

# ---- mistakes in the data ---------------------------------------------------------------

test_missing_shards() {
    failure "'data/none.bin'" 'dev/data/tokenize' -- -i data/none.bin
    failure "'data/none_\*.bin'" 'dev/data/tokenize' -- -i 'data/none_*.bin'
    failure "'none/\*.bin'" 'dev/data/tokenize' -- -j 'none/*.bin'
    failure 'data: is a directory' -- -i data
}
test_no_data() { refused 1 'no training data' '-i' 'dev/data/tokenize' -- "${small[@]}" "${batch[@]}" -o new; }
test_text_as_shard() {
    failure '--train-data: text: looks like text' 'dev/data/tokenize' -- -i text
    failure "--train-data: no file matches 'none\*'" 'dev/data/tokenize' -- -i 'none*'
    failure "--val-data: no file matches 'none'" 'dev/data/tokenize' -- -j none
}
test_empty_shard() { failure 'bad/empty.bin: is empty' -- -i bad/empty.bin; }
test_truncated_shard() { failure 'bad/cut.bin' '5000 tokens' '11024 bytes' 'has 3000' 'cut short' -- -i bad/cut.bin; }
test_model_as_shard() { failure '385.bin: is a tokenizer of llm.c' -- -i 385.bin; }
test_id_past_the_vocabulary() {
    local after_the_start=yes # the first batch has it
    refused 1 'bad/id.bin' 'token 20 ' 'id 257' 'ends at 256' 'tokenizer' -- "${small[@]}" "${batch[@]}" --tokenizer data -i bad/id.bin --no-shuffle
}
test_shard_too_short() { failure 'data/a_train_000000.bin' '5000 tokens' '6401' 'smaller -b or -t' -- -b 400 -t 16; }

# ---- mistakes in the shape --------------------------------------------------------------

test_seq_len_past_positions() {
    failure '-t 64' '32 positions' '--positions' -- -t 64
    refused 1 '-t 64' '32 positions' -- -e run/step_00000003 "${batch[@]}" -i "$data" -t 64
}
test_total_batch_no_multiple() { failure '-d 33' 'not a multiple' '-b 2 times -t 16 = 32' -- -d 33; }
test_heads_do_not_divide() { failure '--heads' '--channels' '32 channels' '5 heads' -- --heads 5; }
test_unknown_descriptor() {
    failure "'d7'" 'd6 d12' -- -e d7
    failure "'gpt3:c5140'|'gpt3:c5140':" 'do not divide' -- -e gpt3:c5140
}

# ---- mistakes in the model --------------------------------------------------------------

test_missing_model() {
    refused 1 '-e nowhere' '[Nn]o such file' 'descriptor' -- -e nowhere "${batch[@]}" -i "$data" -o new
    refused 1 '-e nowhere/model.safetensors' '[Nn]o such file' -- -e nowhere/model.safetensors --prompt ''
}
test_missing_tokenizer() {
    failure '--tokenizer' 'nowhere' '[Nn]o such file' -- --tokenizer nowhere
    failure '--tokenizer' 'text' -- --tokenizer text
}
test_shape_of_a_loaded_model() {
    refused 1 '--layers' 'new model' "$tiny" -- -e "$tiny" --layers 1 "${batch[@]}" -i "$data" -o new
    refused 1 "^error: --mlp-channels 256 is for a new model, but $tiny has 512: leave the flag out\$" -- -e "$tiny" --mlp-channels 256 --prompt ''
    refused 1 "^error: --norm-epsilon 1e-06 is for a new model, but $tiny has 1e-05: leave the flag out\$" -- -e "$tiny" --norm-epsilon 1e-6 --prompt ''
    refused 1 "^error: --activation gelu is for a new model, but $tiny has gelu_new: leave the flag out\$" -- -e "$tiny" --activation gelu --prompt ''
    refused 1 "^error: --untied-head 1 is for a new model, but $tiny has 0: leave the flag out\$" -- -e "$tiny" --untied-head --prompt ''
    refused 1 "^error: --unscaled-attention 1 is for a new model, but $tiny has 0: leave the flag out\$" -- -e "$tiny" --unscaled-attention --prompt ''
    refused 1 "^error: --scale-by-layer 1 is for a new model, but $tiny has 0: leave the flag out\$" -- -e "$tiny" --scale-by-layer --prompt ''
    refused 1 "^error: --activation gelu_10 is not known, one of gelu_new, .*, gelu, .* tanh\$" -- -e d6 --activation gelu_10 --prompt-ids 1
    good -e "$tiny" --layers 2 --mlp-channels 512 --norm-epsilon 1e-5 --activation gelu_fast --prompt-ids 1 --num-tokens 2 # what it has
}
test_vocabulary_larger_than_the_model() {
    refused 1 '513 tokens' 'has 512' 'do not belong together; --tokenizer names another' -- -e "$tiny" --tokenizer 513.bin "${batch[@]}" -i "$data" -o new
    refused 1 '513 tokens' 'has 512' 'do not belong together; --tokenizer names another' -- -e "$tiny" --tokenizer 513.bin --prompt ''
}
test_vocabulary_far_smaller_than_the_model() {
    setup
    decode_only "$world/384.bin" 384
    refused 1 '384 tokens' 'has 512' 'do not belong together' '--tokenizer' -- -e "$tiny" --tokenizer 384.bin --prompt ''
    good -e "$tiny" --tokenizer 385.bin --prompt '' --num-tokens 2 # it may be a model whose vocabulary is padded
}
test_damaged_config() {
    setup
    cp -r "$world/run/step_00000003" "$world/damaged"
    rm "$world/damaged/state.json" # or its checksums would be checked first
    head -c 100 "$world/run/step_00000003/config.json" >"$world/damaged/config.json"
    refused 1 'damaged/config.json: not valid JSON' -- -e damaged --prompt ''
    refused 1 'damaged/config.json: not valid JSON' -- -e damaged "${batch[@]}" -i "$data" -o new
    printf '{"model_type": "llama"}' >"$world/damaged/config.json"
    refused 1 'damaged/config.json' 'llama' -- -e damaged --prompt ''
}
test_truncated_model() {
    setup
    cp -r "$world/run/step_00000003" "$world/truncated"
    rm "$world/truncated/state.json"
    truncate -s -100 "$world/truncated/model.safetensors"
    refused 1 'truncated/model.safetensors' '100 bytes are missing' -- -e truncated --prompt ''
    refused 1 'truncated/model.safetensors' '100 bytes are missing' -- -e truncated/model.safetensors "${batch[@]}" -i "$data" -o new
}
# two flipped bits in a checkpoint of a run that is named directly
test_damaged_step() {
    setup
    cp -r "$world/run/step_00000003" "$world/flipped"
    patch "$world/flipped/model.safetensors" 5000 '\x01\x80'
    refused 1 '-e flipped/model.safetensors: is damaged: its crc32c' -- -e flipped --prompt ''
    refused 1 '-e flipped/model.safetensors: is damaged: its crc32c' -- -e flipped "${batch[@]}" -i "$data" -o new
}
# shards whose ids stand for other tokens than the model's, although each of them is small enough
test_another_vocabulary() {
    setup
    printf '#version: 0.2\na b\n' >"$tmp/merges.txt"
    "$BIN_DIR/dev/data/tokenize" -i "$world/text" -t "$tmp/merges.txt" -o "$world/other/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    refused 1 "-i other/a_train_\\*.bin: these shards were made with another vocabulary than the model's \\(258 tokens instead of 257\\): make" -- \
        -e run/step_00000003 "${batch[@]}" -i 'other/a_train_*.bin' -o new
    refused 1 '-j other/a_train_000000.bin: these shards were made with another vocabulary' -- \
        -e run/step_00000003 "${batch[@]}" -i "$data" -j other/a_train_000000.bin -o new
    # with --tokenizer, too: as many tokens, and two ids are exchanged
    local door other="(token 0 is '\"' instead of '!')"
    mkdir -p "$world/exchanged"
    cp "$world/run/step_00000003/merges.txt" "$world/exchanged"
    sed 's/": 0, \(.*\)": 1, /": 1, \1": 0, /' "$world/run/step_00000003/vocab.json" >"$world/exchanged/vocab.json"
    "$BIN_DIR/dev/data/tokenize" -i "$world/text" -t "$world/exchanged" -o "$world/exchanged/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    run -e run/step_00000003 "${batch[@]}" -i 'exchanged/a_train_*.bin' -o new
    contains "these shards were made with another vocabulary than the model's $other: make" "$tmp/err"
    for door in '--prompt hi' '--eval text' '--eval exchanged/a_train_000000.bin'; do
        # shellcheck disable=SC2086
        run -e run/step_00000003 --tokenizer exchanged $door
        want "status of $door" $status 1
        contains "error: --tokenizer exchanged: is another vocabulary than the model's in run/step_00000003 $other: leave --tokenizer out" "$tmp/err"
    done
    good -e run/step_00000003 --tokenizer data --prompt hi --num-tokens 2 # the same one
    # a pattern that matches the shards of both, for training and for a new model; a shard that is evaluated
    refused 1 '^error: data and other: want shards of one vocabulary' -- "${small[@]}" "${batch[@]}" -i '[do][at]*/*_train_*.bin'
    refused 1 '^error: -i .*: data and other: want shards of one' -- -e run/step_00000003 "${batch[@]}" -i '[do][at]*/*_train_*.bin'
    refused 1 "--eval other/a_train_000000.bin: was made with another vocabulary than the model's \\(258 tokens instead of 257\\): make" -- \
        -e run/step_00000003 --eval other/a_train_000000.bin
    echo '#version' >"$world/other/merges.txt" # what cannot be read is not trusted either
    refused 1 '-i other/a_train_\*.bin: the vocabulary beside these shards: other/merges.txt' -- \
        -e run/step_00000003 "${batch[@]}" -i 'other/a_train_*.bin' -o new
}
# every door says the same about a weight that is not finite, before it writes anything
test_infinite_weights() {
    setup
    local kind bytes at line
    for kind in inf nan; do
        cp -r "$world/run/step_00000003" "$world/$kind"
        rm "$world/$kind/state.json"
        bytes='\x00\x00\x80\x7f'
        [ $kind = inf ] || bytes='\x00\x00\xc0\x7f'
        at=$(wc -c <"$world/$kind/model.safetensors") # the last but one value of the last tensor
        patch "$world/$kind/model.safetensors" $((at - 8)) "$bytes"
    done
    printf 'the cat sat\n2\nsits mat\nand the\non the mat.\nqqq zz\n' >"$tmp/questions"
    "$BIN_DIR/dev/data/hellaswag" -i "$tmp/questions" -o "$world/question.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    line="^error: nan/model.safetensors: tensor '[a-z0-9_.]*' is not finite: nan at \\[[0-9, ]*\\]: take other weights or an earlier checkpoint$"
    refused 1 "${line//nan/inf}" -- -e inf --prompt '' --temperature 0
    refused 1 "$line" -- -e nan --prompt ''
    refused 1 "$line" -- -e nan --eval "$data"
    refused 1 "$line" -- -e nan --hellaswag question.bin
    refused 1 "$line" -- -e nan --bench
    refused 1 "$line" -- -e nan "${batch[@]}" -i "$data" -o new
    for kind in new new.bin new.gguf; do refused 1 "$line" -- -e nan --export $kind; done
    cp -r "$world/nan" "$world/large" # a finite value that rounding to bf16 makes infinite
    patch "$world/large/model.safetensors" $((at - 8)) '\xff\xff\x7f\x7f'
    for kind in new new.bin; do
        refused 1 "^error: --export $kind: tensor '[a-z0-9_.]*' is too large: 3.40282e\\+38 at .*: no value of bf16: give --type f32$" -- \
            -e large --export $kind --type bf16
    done
    rm -r "$world/large"
}
# nothing waits for a writer to a FIFO
test_fifo() {
    setup
    mkfifo "$world/fifo"
    local train_now=$train
    train=$tmp/in_time
    printf '#!/bin/sh\nexec timeout 20 %s "$@"\n' "$train_now" >"$train"
    chmod +x "$train"
    run -e fifo --prompt x
    want "status of -e" $status 1
    contains 'fifo: not a file' "$tmp/err"
    run "${small[@]}" "${batch[@]}" -i fifo
    want "status of -i" $status 1
    contains 'fifo: not a file' "$tmp/err"
    run -e run --tokenizer fifo --prompt x
    want "status of --tokenizer" $status 1
    rm "$world/fifo"
}
test_no_whole_checkpoint() {
    setup
    mkdir "$world/hopeless"
    cp -r "$world/run/step_00000003" "$world/hopeless"
    truncate -s -100 "$world/hopeless/step_00000003/model.safetensors"
    run -e hopeless --prompt ''
    want status $status 1
    want "first line" "$(head -n 1 "$tmp/err" | cut -d : -f 1)" "passed over checkpoint step_00000003"
    want "last line" "$(tail -n 1 "$tmp/err")" "error: -e hopeless: none of its 1 checkpoints is intact"
}

# ---- mistakes in the output -------------------------------------------------------------

test_output_is_a_file() {
    failure '-o' 'text: exists and is not a directory' -- -o text
    failure '-o' 'text/new: Not a directory' -- -o text/new
}
test_output_not_writable() {
    setup
    mkdir "$world/locked"
    chmod 500 "$world/locked"
    [ -w "$world/locked" ] && skip "this user can write everywhere"
    failure '-o' 'locked' 'Permission denied' -- -o locked
    failure '-o' 'locked/new' 'Permission denied' -- -o locked/new
}
test_output_holds_checkpoints() { failure 'run holds checkpoints' '-y 1' 'another -o' -- -o run; } # refused() compares every byte
test_output_holds_a_model() {
    setup
    cp -r "$tiny" "$world/model"
    failure '-o model holds a model' 'another -o' -- -o model
}
# logs that another program or an earlier run left are kept under another name
test_output_holds_logs() {
    setup
    mkdir "$world/noted"
    echo "my own notes" >"$world/noted/main.log"
    good "${small[@]}" "${batch[@]}" -i "$data" -o noted
    want "the notes" "$(cat "$world/noted/main.log.1")" "my own notes"
    grep -q '^s:3 trl:' "$world/noted/main.log" || fail "no log of this run"
    contains "renamed to noted/main.log.1" "$tmp/err"
}
# files do not get the numbers of closed standard streams
test_closed_streams() {
    setup
    local closed
    for closed in '0<&-' '1>&-' '2>&-' '0<&- 1>&- 2>&-'; do
        rm -rf "$world/closed"
        (cd "$world" && eval "\"\$train\" \"\${small[@]}\" \"\${batch[@]}\" -l 0.01 -i \"\$data\" -o closed -n 1 -nk 0 $closed") \
            >"$tmp/out" 2>"$tmp/err" || fail "$closed: status $?"
        for step in 1 2 3; do
            cmp "$world/closed/step_0000000$step/model.safetensors" "$world/run/step_0000000$step/model.safetensors" ||
                fail "$closed: another checkpoint of step $step"
        done
        cmp <(cut -d : -f 1-3 "$world/closed/main.log") <(cut -d : -f 1-3 "$world/run/main.log") || fail "$closed: another log"
    done
}
# what is left over for the last shard may be too short for a batch
test_short_last_shard() {
    setup
    head -c 9000 "$world/text" >"$tmp/9000" # and one token that begins the document
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/9000" -o "$world/odd/a" -s 3000 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good "${small[@]}" -i 'odd/a_train_*.bin' -b 40 -t 32 -x 3 -s 0
    contains "note: 1 of 4 shards are too short for a batch and are passed over: odd/a_train_000003.bin: has 1 tokens" "$tmp/err"
    contains "data: 9001 tokens in 4 shards" "$tmp/out"
    # a run is resumed with batches for which another shard is too short, too
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/9000" -o "$world/uneven/a" -s 6000 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good "${small[@]}" -i 'uneven/a_train_*.bin' -b 8 -t 32 -x 3 -s 0 -o uneven_run
    good "${small[@]}" -i 'uneven/a_train_*.bin' -b 120 -t 32 -x 4 -s 0 -o uneven_run -y 1
    contains "note: 1 of 2 shards are too short" "$tmp/err"
}
test_short_validation_data() {
    setup
    good "${small[@]}" -i "$data" -j 'data/a_val_*.bin' -b 80 -t 32 -x 1 -s 0 # 1000 tokens, a batch has 2560
    contains "note: little validation data: -b 20 instead of 80 there" "$tmp/out"
    grep -q '^val loss [0-9]' "$tmp/out" || fail "no validation loss"
    local loss
    loss=$(grep -m 1 '^val loss' "$tmp/out")
    good "${small[@]}" -i "$data" -j 'data/a_val_*.bin' -b 20 -t 32 -x 1 -s 0
    want "the loss with -b 20" "$(grep -m 1 '^val loss' "$tmp/out")" "$loss"
}
test_file_named_like_a_pattern() {
    setup
    mkdir -p "$world/[x]"
    cp "$world/data/a_train_000000.bin" "$world/[x]/s[1].bin"
    good "${small[@]}" "${batch[@]}" --tokenizer data -i '[x]/s[1].bin'
    rm -r "$world/[x]"
}
test_unquoted_pattern() {
    setup
    refused 2 "stray argument 'data/a_train_000001.bin': put patterns such as 'data/" '--help' -- -e d6 -i data/a_train_000000.bin data/a_train_000001.bin
}
test_keep_best_of_nothing() {
    failure '--keep-best needs an output directory .-o. and a validation loss' -- --keep-best
    refused 1 '--keep-best needs' -- "${small[@]}" "${batch[@]}" -i "$data" -j 'data/a_val_*.bin' --keep-best
}
test_save_every_without_output() {
    refused 1 '-n saves checkpoints' 'not given' -- "${small[@]}" "${batch[@]}" -i "$data" -n 1
}
test_resume_of_a_run_that_is_done() {
    setup
    cp -r "$world/run" "$world/done"
    good "${small[@]}" "${batch[@]}" -i "$data" -o done -y 1 -x 2
    contains 'nothing to train: step 3 of 2 is done; -x with more steps goes on' "$tmp/out"
}
test_no_task() {
    refused 1 'no training data: give shards with -i' 'a --prompt to continue' -- -e run
}
# without arguments: the demo of the program's own directory, never that of the current one
test_demo_of_another_directory() {
    setup
    mkdir -p "$tmp/alone/bin" "$tmp/alone/here/scripts"
    cp "$train" "$tmp/alone/bin/"
    echo 'echo a foreign script' >"$tmp/alone/here/scripts/demo.sh"
    local name=${train##*/} status=0
    (cd "$tmp/alone/here" && ../bin/"$name") >"$tmp/out" 2>"$tmp/err" || status=$?
    want status $status 1
    contains "bin/scripts/demo.sh, is not there" "$tmp/err"
    want "stdout" "$(cat "$tmp/out")" ""
    mkdir "$tmp/alone/bin/scripts"
    echo 'echo "demo $1"' >"$tmp/alone/bin/scripts/demo.sh"
    (cd "$tmp/alone/here" && ../bin/"$name") >"$tmp/out" 2>"$tmp/err"
    want "its output" "$(cat "$tmp/out")" "demo ./$name"
}
test_step_of_more_than_the_data() {
    setup
    good "${small[@]}" "${batch[@]}" -i "$data" -x 1 -d 16000
    contains 'note: a step of 16000 tokens (-d) is more than all training data, ' "$tmp/out"
}
test_resume_without_output() { refused 1 '-y 1' '-o' 'not given' -- "${small[@]}" "${batch[@]}" -i "$data" -y 1; }
test_resume_another_optimizer() {
    failure 'run/step_00000003 was saved with --optimizer adamw: resume with it' '-e run/step_00000003' -- \
        -o run -y 1 --optimizer muon
}
test_muon_flags() {
    usage '--optimizer' 'adamw|muon' -- --optimizer sgd
    failure '--muon-learning-rate needs --optimizer muon' -- --muon-learning-rate 0.01
    usage '-l 60: recipe pretrain sets 2 times that: ' "--muon-learning-rate wants 0 to 100, got '120'" -- --recipe pretrain -l 60
}
test_resume_another_shape() {
    failure '--channels' 'run/step_00000003' -- -o run -y 1 --channels 64
    failure '--mlp-channels 96 .* run/step_00000003 has 128: leave the flag out$' -- -o run -y 1 --mlp-channels 96
    failure '--norm-epsilon 0.001 .* run/step_00000003 has 1e-05: leave the flag out$' -- -o run -y 1 --norm-epsilon 0.001
}

# ---- mistakes in the prompt -------------------------------------------------------------

test_prompt_without_merges() {
    refused 1 'no merges' 'vocab.json and merges.txt' '--tokenizer' -- -e "$tiny" --tokenizer 385.bin --prompt hello
    good -e "$tiny" --tokenizer 385.bin --prompt '' --num-tokens 5 # but it can still generate text
}
test_prompt_without_vocabulary() { refused 1 'no vocabulary' "$tiny" '--tokenizer' -- -e "$tiny" --prompt hello; }
test_prompt_too_long() {
    refused 1 'prompt has 33 tokens' '32 positions' -- -e run/step_00000003 --prompt "$(printf '%33s' '')"
    good -e run/step_00000003 --prompt "$(printf '%32s' '')" --num-tokens 5 # the last position can still predict one token
}
test_sampling_flags() {
    refused 2 '--temperature wants 0 to' "'-1'" -- -e run/step_00000003 --prompt hi --temperature -1
    refused 2 '--top-k wants 0 to' "'-3'" -- -e run/step_00000003 --prompt hi --top-k -3
    refused 2 '--num-tokens wants 1 to' "'0'" -- -e run/step_00000003 --prompt hi --num-tokens 0
    refused 2 '--min-p wants 0 to 1' "'1.1'" -- -e run/step_00000003 --prompt hi --min-p 1.1
    refused 2 '--repetition-penalty wants 0.01 to 100' "'0'" -- -e run/step_00000003 --prompt hi --repetition-penalty 0
    refused 2 '--stop wants a text' -- -e run/step_00000003 --prompt hi --stop ''
    refused 1 '--stop: no vocabulary' "$tiny" '--tokenizer' -- -e "$tiny" --prompt-ids 1 --stop x
}

test_prompts_from_nowhere() {
    setup
    refused 1 '--prompt-file none: No such file' -- -e run/step_00000003 --prompt-file none
    refused 1 '--prompt-file data: not a file' -- -e run/step_00000003 --prompt-file data
    printf 'a\0b' >"$world/nul"
    refused 1 '--prompt-file nul: is not text: has a NUL byte at offset 1' -- -e run/step_00000003 --prompt-file nul
    printf '\377\376a\0' >"$world/utf16"
    refused 1 '--prompts utf16: is UTF-16, not text: use iconv -f UTF-16 -t UTF-8 FILE > TEXT' -- -e run/step_00000003 --prompts utf16
    : >"$world/no_lines"
    refused 1 '--prompts no_lines: has 0 lines, want 1 to 65536' -- -e run/step_00000003 --prompts no_lines
    yes | head -n 65537 >"$world/many_lines"
    refused 1 '--prompts many_lines: has 65537 lines, want 1 to 65536' -- -e run/step_00000003 --prompts many_lines
    refused 1 "--prompt-ids: '257' is not a token id, want 0 to 256" -- -e run/step_00000003 --prompt-ids '1 257'
    refused 1 "--prompt-ids: '-1' is not a token id" -- -e run/step_00000003 --prompt-ids=-1
    refused 1 "--prompt-ids: '4x' is not a token id" -- -e run/step_00000003 --prompt-ids '4x'
    refused 1 '--prompt-ids: no token ids in it' -- -e run/step_00000003 --prompt-ids ' , '
    refused 1 '--num-samples is for one prompt' -- -e run/step_00000003 --prompts no_lines --num-samples 2
    refused 1 'give only one of --prompt, --prompt-file, --prompts and --prompt-ids' -- -e run/step_00000003 --prompt a --prompt-ids 1
    refused 2 'give only one of --prompt, --eval, --bench, --export and --plan' -- -e run/step_00000003 --prompt a --eval text
}
test_evaluation_of_nothing() {
    setup
    refused 1 "--eval: no file matches 'none\*'" -- -e run/step_00000003 --eval 'none*'
    refused 1 '--eval bad/empty.bin: is empty' -- -e run/step_00000003 --eval bad/empty.bin
    refused 1 '--eval bad/cut.bin: the header says' -- -e run/step_00000003 --eval bad/cut.bin
    refused 1 '--eval bad/id.bin: token 20 is id 257' -- -e run/step_00000003 --eval bad/id.bin
    refused 1 '--eval run/step_00000003/model.safetensors: is a safetensors file, not text' -- -e run/step_00000003 --eval run/step_00000003/model.safetensors
    refused 1 '--eval text: is text, and there is no vocabulary' '--tokenizer' -- -e "$tiny" --eval text
    refused 1 '--hellaswag text: not an evaluation file' -- -e run/step_00000003 --hellaswag text
    refused 1 '-t 33 is more than the 32 positions of the model: take a smaller -t$' -- -e run/step_00000003 --eval text -t 33
    refused 1 '--stride 17 is more than -t 16' -- -e run/step_00000003 --eval text -t 16 --stride 17
    refused 1 '--stride 33 is more than -t 32' -- -e run/step_00000003 --eval text --stride 33
    refused 2 "--stride wants 0 to 1048576, got '-1'" -- -e run/step_00000003 --eval text --stride -1
    refused 1 "--eval: no file matches 'none'" -- -e run/step_00000003 --eval text,none
    refused 1 "--eval: no file matches ''" -- -e run/step_00000003 --eval text,
    echo "{\"text\": \"a b\"}" >"$tmp/words"
    "$BIN_DIR/dev/data/lambada" -i "$tmp/words" -o "$world/bad/words.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    refused 1 '--hellaswag bad/words.bin: is not a file of dev/data/hellaswag' '--eval' -- -e run/step_00000003 --hellaswag bad/words.bin
    refused 1 '--eval bad/words.bin: example 0 has an ending of 2 tokens: too long for -t 1' -- -e run/step_00000003 --eval bad/words.bin -t 1
    patch "$world/bad/words.bin" 1024 'x'
    local after_the_start=yes # the text is done
    refused 1 '--eval bad/words.bin: example 0 is damaged' -- -e run/step_00000003 --eval text,bad/words.bin
    rm "$world/bad/words.bin"
}
test_export_over_something() {
    setup
    refused 1 '--export text: exists already, give another name' -- -e run/step_00000003 --export text
    refused 1 '^error: --export text: exists and is not a directory' -- -e run/step_00000003 --export text/x.bin
    refused 2 '--export-type wants one of fp32.bf16' -- -e run/step_00000003 --export new --export-type int4
}
# data that was changed in place, with the same number of tokens
test_data_changed_in_place() {
    setup
    cp -r "$world/data" "$world/changing"
    good "${small[@]}" "${batch[@]}" -i 'changing/a_train_*.bin' -o in_place
    patch "$world/changing/a_train_000001.bin" 1024 '\x05\x00'
    refused 1 'cannot resume the data: there are as many tokens as when it was saved, but other ones: resume with .* -e in_place/step_00000003 -o NEW$' -- \
        -e d6 "${batch[@]}" -i 'changing/a_train_*.bin' -o in_place -y 1 -x 5
}
# a run that goes on with another -t, order or data: the message names a command, which works
test_resume_other_data() {
    setup
    local flags step=run/step_00000003
    cp -r "$world/data" "$world/less"
    rm "$world/less/a_train_000001.bin"
    for flags in '-t 32' '--no-shuffle' '--seed 7' '-i less/a_train_*.bin'; do
        read -ra flags <<<"$flags"
        [ "${flags[0]}" = -i ] || flags+=(-i "$data")
        refused 1 "^error: cannot resume the data: .*: resume with the flags of before, or start a new run from its weights with -e $step -o NEW$" -- \
            -e d6 "${batch[@]}" -x 5 -o run -y 1 "${flags[@]}"
        good -e $step "${batch[@]}" -x 1 -o from_weights "${flags[@]}"
        rm -r "$world/from_weights"
    done
    rm -r "$world/less"
}
# what users have tried: the message says what to do instead
test_ways_out() {
    setup
    local suffix
    failure "data: is a directory: name the shards in it by a pattern in quotes, such as 'data/\\*_train_\\*.bin'$" -- -i data
    failure 'data/merges.txt: looks like text: .*; the pattern matches [0-9]+ files, and must match shards only' -- -i 'data/*'
    failure "no file matches 'a.bin,b.bin': .*; several are named by one pattern, not by a list$" -- -i a.bin,b.bin
    failure '-d 100 is not a multiple of -b 2 times -t 16 = 32 tokens: take 96$' -- -d 100
    failure '-d 20 is not a multiple of -b 2 times -t 16 = 32 tokens: take 32$' -- -d 20
    failure '-o text: exists and is not a directory: give another -o$' -- -o text
    for suffix in gpt2 gpt2-medium gpt2-xl; do
        refused 1 "^error: -e $suffix: No such file or directory; OpenAI's is fetched by scripts/download.sh $suffix, then it is -e data/$suffix$" -- \
            -e $suffix --prompt a
    done
    refused 1 "the optimizer's state of a checkpoint, whose directory is the model" -- -e run/step_00000003/optimizer.safetensors --prompt a
    for suffix in pt ckpt onnx H5 model q4_0; do
        refused 1 "^error: --export new.$suffix: .$suffix is not written: name a .safetensors, .bin or .gguf file, or a directory, with a slash: new.$suffix/$" -- \
            -e run --export new.$suffix
    done
    for suffix in new.model/ new-1.5 new.d/x; do
        good -e run/step_00000003 --export $suffix
        [ -e "$world/$suffix/config.json" ] || fail "$suffix is no directory"
        rm -r "${world:?}/${suffix%%/*}"
    done
    good -e run --tokenizer data --export new.GGUF
    want "the first bytes" "$(head -c 4 "$world/new.GGUF")" GGUF
    rm "$world/new.GGUF"
    good "${small[@]}" "${batch[@]}" -i "$data" -j "$data" -u 6
    contains "note: -j names the training data: the validation loss says nothing about other text" "$tmp/out"
    contains "note: the warm-up has 6 steps (-u) and the run 3: the learning rate ends at 1.50e-04 instead of 3.00e-04" "$tmp/out"
    good "${small[@]}" "${batch[@]}" -i 'data/a_*.bin' -j 'data/*_val_*.bin'
    contains "note: 1 of the 1 shards of -j are training data, too (data/a_val_000000.bin): the validation loss says little" "$tmp/out"
    good "${small[@]}" "${batch[@]}" -i "$data" -j 'data/*_val_*.bin'
    [ "$(grep -c '^note: .*-j' "$tmp/out")" = 0 ] || fail "$(cat "$tmp/out")"
}

# what cannot be done is said before anything is read, and what is not used is said once
test_flags_that_do_not_belong() {
    setup
    local flags
    for flags in '--prompt a' '--prompt-ids 1' '--prompts text' '--eval text' '--export new'; do
        # shellcheck disable=SC2086
        refused 2 'needs a model: -e DIR, such as the -o directory of a run, or data/gpt2 after scripts/download.sh gpt2$' -- $flags
    done
    # without a vocabulary: before weights of 3 GB are made, for which there is no room here
    if [[ $train != *cu && $BIN_DIR != *sanitize* ]]; then
        for flags in '--prompt a' '--eval text' '--eval text,data/a_val_000000.bin'; do
            # shellcheck disable=SC2086
            (cd "$world" && ulimit -v 1000000 && "$train" -e d36 $flags) >"$tmp/out" 2>"$tmp/err" && fail "it succeeds"
            grep -qE '^error: (no vocabulary found beside d36|--eval text: is text, and there is no vocabulary)' "$tmp/err" || fail "$flags: $(cat "$tmp/err")"
        done
    fi
    good -e run/step_00000003 --prompt a --num-tokens 2 -l 0.1 -x 3 --stride 2 --seed 3
    want "notes" "$(grep '^note: ' "$tmp/err")" "note: --prompt does not use --steps, --learning-rate, --stride"
    good -e run/step_00000003 --eval text --num-tokens 2 -b 2 -n 3
    want "notes" "$(grep '^note: ' "$tmp/err")" "note: --eval does not use --save-every, --num-tokens"
    good -e run/step_00000003 --bench --num-tokens 3 --bench-prompt 4 --val-every 2
    want "notes" "$(grep '^note: ' "$tmp/err")" "note: --bench does not use --val-every"
    good -e run/step_00000003 --export new -o x
    want "notes" "$(grep '^note: ' "$tmp/err")" "note: --export does not use --output"
    rm -r "$world/new"
    good "${small[@]}" "${batch[@]}" -i "$data" --temperature 0.5 --type f16
    want "notes" "$(grep '^note: ' "$tmp/err")" "note: training does not use --temperature, --type"
}

# text that is encoded as it is given, although it may have more than the text in it, or be in another encoding
test_given_text() {
    setup
    printf '<html>caf\351</html>' >"$world/page"
    printf '{"prompt": "ab"}\n{"prompt": "b"}\n' >"$world/prompts.jsonl"
    good -e run --eval page
    contains "note: page is HTML and is encoded as it is: pandoc -f html -t plain FILE takes out the text" "$tmp/err"
    contains "note: page: 1 bytes that are not UTF-8 (iconv -f LATIN1" "$tmp/err"
    good -e run --prompts prompts.jsonl --num-tokens 1
    contains "note: --prompts prompts.jsonl: is JSON, whose lines are continued as they are: jq -r .prompt prompts.jsonl" "$tmp/err"
    good -e run --prompt $'caf\351' --num-tokens 1
    contains "note: --prompt: 1 bytes that are not UTF-8" "$tmp/err"
    # a blank at the end, where a vocabulary has words and where it has only bytes
    good -e run --prompt 'a ' --num-tokens 1
    [ "$(grep -c '^note: ' "$tmp/err")" = 0 ] || fail "$(cat "$tmp/err")"
    printf '#version: 0.2\na b\n' >"$tmp/merges.txt"
    "$BIN_DIR/dev/data/tokenize" -i "$world/text" -t "$tmp/merges.txt" -o "$world/words/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good "${small[@]}" --tokenizer words --prompt 'a ' --num-samples 2 --num-tokens 1
    contains "note: 2 of 2 prompts end in a blank, but the tokens of words begin with theirs: leave it out" "$tmp/err"
    good "${small[@]}" --tokenizer words --prompt 'a' --num-tokens 1
    [ "$(grep -c '^note: .*blank' "$tmp/err")" = 0 ] || fail "$(cat "$tmp/err")"
    rm -r "$world/page" "$world/prompts.jsonl" "$world/words"
}

# ---- correct runs -----------------------------------------------------------------------

# --help all lists every flag of the tables in the source, with its letter and its llm.c name; --help is one screen
test_help() {
    setup
    good --help all
    [ ! -s "$tmp/err" ] || fail "stderr: $(cat "$tmp/err")"
    local letter alias name other=gpu topic
    case $train in *cu) other=cpu ;; esac
    sed -nE "/^static const Option ${other}_options/,/^};/d; s/^    \{OPT_(INT|LONG|FLOAT|STR|BOOL), (0|'(.)'), (NULL|\"([^\"]*)\"), \"([^\"]*)\".*/-\3 -\5 --\6/p" \
        llmc/flags.h >"$tmp/flags"
    [ "$(wc -l <"$tmp/flags")" -ge 40 ] || fail "only $(wc -l <"$tmp/flags") flags found in the table"
    while read -r letter alias name; do
        [ "$letter" = - ] || grep -qE -- "^  $letter, .*$name( |$)" "$tmp/out" || fail "no $letter for $name"
        [ "$alias" = - ] || grep -qE -- "^ .* $alias, .*$name( |$)" "$tmp/out" || fail "no $alias for $name"
        grep -qE -- "^  .*$name( |$)" "$tmp/out" || fail "no $name"
    done <"$tmp/flags"
    widest() { awk '{if (length($0) > n) n = length($0)} END {print n}' "$tmp/out"; }
    [ "$(widest)" -le 100 ] || fail "lines of more than 100 columns"
    grep -E 'default (-?0 NH|none\)|1 texts)' "$tmp/out" && fail "a default that says nothing"
    (cd "$world" && PATH=$(dirname "$train"):$PATH exec "$(basename "$train")" --help) >"$tmp/out" # as short a name as is typed
    [ "$(wc -l <"$tmp/out")" -le 24 ] && [ "$(widest)" -le 100 ] || fail "more than one screen: $(wc -l <"$tmp/out") lines, $(widest) columns"
    want "flags" "$(grep -c '^  .*--' "$tmp/out")" 12
    want "examples" "$(grep -c "^$(basename "$train") .*  # " "$tmp/out")" 4
    for topic in $(tr '\n' ' ' <"$tmp/out" | sed -E 's/.*more of: (.*), or of a flag.*/\1/; s/,//g'); do
        good --help "$topic"
        grep -q -- '--' "$tmp/out" || fail "--help $topic shows no flag"
    done
    good --help sampling
    head -n 1 "$tmp/out" | grep -qx 'Sampling:' || fail "$(head -n 1 "$tmp/out")"
    ! grep -q -e '--val-every' "$tmp/out" || fail "flags of another topic"
    good --help temperature
    want "lines about --temperature" "$(grep -c -- '--' "$tmp/out")" 1
}
# flags of the other program, and of other programs
test_flags_of_others() {
    if [[ $train == *cu ]]; then
        usage "unknown flag '--naive': train_gpt2 has it, this program does not" -- --naive
    else
        usage "unknown flag '--fp8': train_gpt2cu has it, this program does not" -- --fp8 forward
        usage "unknown flag '--no-graph': train_gpt2cu has it" -- --no-graph
        usage "unknown flag '-ge': train_gpt2cu has it" -- -ge 1
        usage "unknown flag '-z': train_gpt2cu has it" -- -z 1
    fi
    usage "unknown flag '--lr', did you mean '--learning-rate'\\? see .* --help learning-rate" -- --lr 3e-4
    usage "unknown flag '--max_iters', did you mean '--steps'" -- --max_iters=100
    usage "unknown flag '--batch_size', did you mean '--batch-size'" -- --batch_size 8
    usage "unknown flag '-p', did you mean '--prompt'" -- -p x
    usage "unknown flag '--dtype': make train_gpt2cu PRECISION=" -- --dtype bf16
    # what the table of other programs' names suggests is a flag of one of our programs, or a sentence
    local ours
    sed -nE '/^static const char\* const flags_elsewhere/,/^};/s/^    \{"[^"]*", "([^" ]*)"\},/\1/p' llmc/flags.h | sort -u >"$tmp/ours"
    [ "$(wc -l <"$tmp/ours")" -ge 20 ] || fail "only $(wc -l <"$tmp/ours") suggestions"
    while read -r ours; do grep -q ", \"$ours\", &settings" llmc/flags.h || fail "--$ours is no flag"; done <"$tmp/ours"
}

# the step lines have llm.c's format, which scripts parse, with a z-score after 128 steps or for a non-finite number
number='[0-9]+\.[0-9]'
z="(\\([+-](inf|$number{2})z\\))?"
[[ $train == *cu ]] && rate="$number% [bf][pf][0-9]+ MFU" || rate="$number GFLOP/s" # a CPU has no peak to count against
step_line="^step +[0-9]+/[0-9]+ \\| loss $number{6} $z\\| norm $number{4} $z\\| lr [0-9]\\.[0-9]{2}e[-+][0-9]{2} \\| $number{2} ms \\| $rate \\| [0-9]+ tok/s"
losses() { sed -nE 's/^step .* loss ([^ ]+) .*/\1/p' "$tmp/out"; }

test_step_lines() {
    setup
    good "${small[@]}" "${batch[@]}" -i "$data" -j 'data/a_val_*.bin' -v 3 -o lines
    [ ! -s "$tmp/err" ] || fail "stderr: $(cat "$tmp/err")"
    want "step lines" "$(grep -cE "$step_line" "$tmp/out")" 3
    want "their steps" "$(sed -nE 's/^(step +[0-9]+\/3) .*/\1/p' "$tmp/out" | tr '\n' ';')" "step    1/3;step    2/3;step    3/3;"
    want "validations" "$(grep -cE "^val loss $number{6}$" "$tmp/out")" 2
    grep -vE "^s:[0-9]+ (trl:$number{4} lr:$number{6} norm:$number{2}|tel:$number{4})$" "$world/lines/main.log" && fail "other lines in main.log"
    want "steps in main.log" "$(sed -nE 's/^s:([0-9]+) (.{3}):.*/\1\2/p' "$world/lines/main.log" | tr '\n' ' ')" "0tel 1trl 2trl 3trl 3tel "
    want "main.log's losses" "$(sed -nE 's/.*trl:([^ ]+) .*/\1/p' "$world/lines/main.log")" "$(losses | xargs printf '%.4f\n')"
    grep -q $'\x1b' "$tmp/out" && fail "escape codes, though stdout is no terminal"
    want "what is saved" "$(cd "$world/lines/step_00000003" && echo *)" \
        "config.json generation_config.json merges.txt model.safetensors optimizer.safetensors state.json vocab.json"
}

# the windows of losses and norms cover 128 steps: before, no step is an outlier; z-scores of more than 2 are printed
test_z_scores() {
    setup
    # without -sl and -sg, train_gpt2cu computes z-scores after the update; during the warm-up, the loss falls faster and faster
    good "${small[@]}" "${batch[@]}" -i "$data" -x 300 -u 300
    grep -q '[0-9]z)' "$tmp/out" || fail "no z-scores without -sl and -sg"
    [[ $train != *cu ]] || return 0 # the fake GPU has no outliers
    good "${small[@]}" "${batch[@]}" -i "$data" -x 300 -sl 1e-6 -sg 1e-6
    want "step lines" "$(grep -cE "$step_line" "$tmp/out")" 300
    sed -nE 's/^step ([0-9]+): .* z-score ([0-9.]+) is over .*/\1 \2/p' "$tmp/out" >"$tmp/scores"
    awk '$1 <= 128 {early = 1} END {exit early || NR < 20}' "$tmp/scores" || fail "$(wc -l <"$tmp/scores") outliers: $(head -n 1 "$tmp/scores")"
    grep -oE '[+-]([0-9.]+|inf)z\)' "$tmp/out" | sed 's/^.//; s/z)//' | awk '$1 < 2 {small = 1} END {exit small || NR < 2}' || fail "z-scores: $(grep -o '(.*z)' "$tmp/out")"
}

# what was typed stands in the header, as it can be typed again; --verbose has all flags
test_run_header() {
    setup
    good "${small[@]}" "${batch[@]}" -i "$data" -l 0.01 -q 0.1 -u 1 --no-shuffle --stop "it's"
    want "the first line" "$(head -n 1 "$tmp/out" | sed 's/ --recipe llmc//')" "flags: --model d6 --layers 1 --heads 1 --channels 32 --positions 32 \
--train-data 'data/a_train_*.bin' --batch-size 2 --seq-len 16 --no-shuffle --steps 3 --learning-rate 0.01 --warmup 1 \
--final-fraction 0.1 --sample-every 0 --stop 'it'\\''s'"
    contains "learning rate 0.01 after 1 steps of warm-up, cosine to 0.001 at step 3; adamw" "$tmp/out"
    contains "memory: weights 0.1 MB, " "$tmp/out"
    ! grep -q '^defaults: ' "$tmp/out" || fail "the defaults, too"
    cp "$tmp/out" "$tmp/first"
    (cd "$world" && eval "$train $(sed -n '1s/^flags: //p' "$tmp/first")") >"$tmp/out" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    want "the losses of what the header says" "$(losses)" "$(sed -nE 's/^step .* loss ([^ ]+) .*/\1/p' "$tmp/first")"
    good "${small[@]}" "${batch[@]}" -i "$data" --verbose
    contains "steps            3 steps (default -1)" "$tmp/out"
    run "${small[@]}" "${batch[@]}" -i none --verbose
    contains "steps            3 steps (default -1)" "$tmp/out"
    good "${small[@]}" "${batch[@]}" -i "$data" --verbose
    grep -q '^defaults: ' "$tmp/out" && grep -q ' learning-rate=0.0003' "$tmp/out" || fail "no defaults"
}

test_nothing_written_without_output() {
    setup
    snapshot >"$tmp/before"
    good "${small[@]}" "${batch[@]}" -i "$data"
    snapshot >"$tmp/after"
    cmp "$tmp/before" "$tmp/after"
}

test_overfits_one_batch() {
    setup
    good "${small[@]}" "${batch[@]}" -i "$data" -a 1 -x 30 -l 0.03
    losses | awk 'NR == 1 {first = $1} {last = $1} END {exit !(NR == 30 && first > 4 && last < 2)}' || fail "losses: $(losses | tr '\n' ' ')"
}

test_prompt_without_vocabulary_prints_ids() {
    setup
    good -e "$tiny" --prompt '' --num-tokens 8
    grep -qxE '([0-9]+ ){8}' "$tmp/out" || fail "not 8 token ids: $(cat "$tmp/out")"
    for id in $(cat "$tmp/out"); do [ "$id" -lt 512 ] || fail "id $id"; done
}

sample() { # ARGS...: prints the generated text
    good -e run/step_00000003 --prompt 'int ' --num-tokens 20 --no-stop-at-eot "$@"
    cat "$tmp/out"
}
test_seed() {
    setup
    sample --seed 1 >"$tmp/one"
    sample --seed 1 >"$tmp/two"
    sample --seed 2 >"$tmp/three"
    cmp "$tmp/one" "$tmp/two"
    cmp -s "$tmp/one" "$tmp/three" && fail "two seeds give the same text"
    head -c 4 "$tmp/one" | cmp - <(printf 'int ') || fail "does not begin with the prompt"
}
test_temperature_0_is_greedy() {
    setup
    sample --seed 1 --temperature 0 >"$tmp/one"
    sample --seed 2 --temperature 0 >"$tmp/two"
    sample --seed 3 --top-k 1 >"$tmp/three"
    sample --seed 3 >"$tmp/four"
    cmp "$tmp/one" "$tmp/two"
    cmp "$tmp/one" "$tmp/three" || fail "not the likeliest token"
    cmp -s "$tmp/one" "$tmp/four" && fail "temperature 1 is greedy too"
    [ -s "$tmp/one" ]
}

# the same prompt from the command line, a file and standard input; its last newline does not count
test_prompt_from_a_file() {
    setup
    sample --seed 1 >"$tmp/typed"
    printf 'int \n' >"$world/prompt.txt"
    good -e run/step_00000003 --prompt-file prompt.txt --num-tokens 20 --no-stop-at-eot --seed 1
    cmp "$tmp/out" "$tmp/typed"
    local form
    for form in "--prompt -" "--prompt-file -"; do
        # shellcheck disable=SC2086
        (cd "$world" && printf 'int ' | "$train" -e run/step_00000003 $form --num-tokens 20 --no-stop-at-eot --seed 1) >"$tmp/out" 2>"$tmp/err"
        cmp "$tmp/out" "$tmp/typed"
    done
    printf 'a\001b\n\n' >"$world/prompt.txt" # any byte but NUL is text, and only one newline is dropped
    good -e run/step_00000003 --prompt-file prompt.txt --num-tokens 1 --temperature 0
    head -c 4 "$tmp/out" | cmp - <(printf 'a\001b\n')
    contains "prompt: 4 tokens" "$tmp/err"
    # a byte order mark is not part of a prompt, and Windows' line break is one
    printf '\357\273\277int \r\n' >"$world/prompt.txt"
    for form in prompt.txt=--prompt-file $'\357\273\277int =--prompt'; do
        good -e run/step_00000003 "${form#*=}" "${form%=*}" --num-tokens 20 --no-stop-at-eot --seed 1
        cmp "$tmp/out" "$tmp/typed"
    done
}
# several texts: each line of a file, or one prompt several times; the first is the one that is sampled alone
test_several_texts() {
    setup
    sample --seed 1 >"$tmp/single"
    printf 'int \n\nchar\n' >"$world/lines.txt"
    good -e run/step_00000003 --prompts lines.txt --num-tokens 20 --no-stop-at-eot --seed 1
    want "headers" "$(grep -ac '^---- [123] of 3 ----$' "$tmp/out")" 3
    head -n 1 "$tmp/out" | cmp - <(echo '---- 1 of 3 ----')
    tail -n +2 "$tmp/out" | head -c "$(wc -c <"$tmp/single")" | cmp - "$tmp/single"
    grep -aq '^char' "$tmp/out" || fail "the third line is not continued"
    cp "$tmp/out" "$tmp/lines"
    { printf '\357\273\277' && sed 's/^$/ \t/; s/$/\r/' "$world/lines.txt"; } >"$world/windows.txt"
    good -e run/step_00000003 --prompts windows.txt --num-tokens 20 --no-stop-at-eot --seed 1
    cmp "$tmp/out" "$tmp/lines"
    sample --seed 1 --num-samples 3 >"$tmp/three"
    want "headers" "$(grep -ac '^---- [123] of 3 ----$' "$tmp/three")" 3
    tail -n +2 "$tmp/three" | head -c "$(wc -c <"$tmp/single")" | cmp - "$tmp/single"
    csplit -s -f "$tmp/part" "$tmp/three" '/^---- /' '{*}'
    ! cmp -s <(tail -n +2 "$tmp/part02") <(tail -n +2 "$tmp/part03") || fail "two samples are the same"
}
# --stop: the text ends before the first of these strings, whatever the tokens are, and nothing of it is printed
test_stop_strings() {
    setup
    local whole stop before
    sample --temperature 0 --num-tokens 25 >"$tmp/whole"
    whole=$(tail -c +5 "$tmp/whole") # after the prompt; a byte is a token here
    stop=${whole:7:3}
    before=${whole%%"$stop"*}
    [ ${#stop} -eq 3 ] || fail "the text is too short: '$whole'"
    sample --temperature 0 --num-tokens 25 --stop "$stop" >"$tmp/stopped"
    want "the text before '$stop'" "$(cat "$tmp/stopped")" "int $before"
    contains "generated: $((${#before} + 3)) tokens" "$tmp/err"
    sample --temperature 0 --num-tokens 25 --stop "${whole:20:1}@" --stop "not in it" --stop "$stop" >"$tmp/several"
    cmp "$tmp/several" "$tmp/stopped"
    sample --temperature 0 --num-tokens 25 --stop "${whole:20}@" >"$tmp/never" # its beginning ends the text
    cmp "$tmp/never" "$tmp/whole"
    good -e run/step_00000003 --prompt "int $stop" --num-tokens 1 --temperature 0 --stop "$stop" # the prompt is not looked at
    head -c 7 "$tmp/out" | cmp - <(printf 'int %s' "$stop")
}

ids() { # FLAGS: prints the ids after the prompt 3 500
    good -e "$tiny" --prompt-ids '3 500' --num-tokens 40 "$@"
    cut -d ' ' -f 3-42 "$tmp/out"
}
# --repetition-penalty counts the prompt and the continuation; a large one leaves no token twice
test_repetition_penalty() {
    local plain penalized
    plain=$(ids --temperature 0)
    penalized=$(ids --temperature 0 --repetition-penalty 100)
    [ "$(tr ' ' '\n' <<<"$plain" | sort | uniq -d)" ] || fail "nothing is repeated without it: $plain"
    want "repeated tokens" "$(tr ' ' '\n' <<<"3 500 $penalized" | sort | uniq -d)" ""
    want "the text with a penalty of 1" "$(ids --temperature 0 --repetition-penalty 1)" "$plain"
}
# --min-p 1 is greedy, 0 is off
test_min_p() {
    want "the text of --min-p 1" "$(ids --min-p 1)" "$(ids --temperature 0)"
    want "the text of --min-p 0" "$(ids --min-p 0)" "$(ids)"
    [ "$(ids --min-p 0.9 --seed 5)" != "$(ids --seed 5)" ] || fail "--min-p 0.9 changes nothing"
}

# a file of hundreds of prompts: each is continued as if it were alone, in the file's order, and the progress is told
test_many_prompts() {
    setup
    local i n=300
    for ((i = 0; i < n; i++)); do echo "${i}a"; done >"$world/many.txt"
    LLMC_PROGRESS_SECONDS=0 good -e run/step_00000003 --prompts many.txt --num-tokens 6 --temperature 0 --no-stop-at-eot
    want "the headers" "$(grep -a '^---- ' "$tmp/out")" "$(seq -f "---- %.0f of $n ----" $n)"
    cp "$tmp/out" "$tmp/many"
    contains "[1 of $n texts, 6 tokens, " "$tmp/err"
    want "lines of progress" "$(grep -cE '^\[[0-9]+ of 300 texts, [0-9]+ tokens, [0-9]+ tok/s, ETA [0-9dhms]+\]$' "$tmp/err")" $((n - 1))
    csplit -s -n 3 -f "$tmp/many." "$tmp/many" '/^---- /' '{*}'
    for i in 0 7 64 299; do
        good -e run/step_00000003 --prompt "${i}a" --num-tokens 6 --temperature 0 --no-stop-at-eot
        cmp <(tail -n +2 "$tmp/many.$(printf %03d $((i + 1)))") "$tmp/out"
    done
}

# --special: the name of a token in a prompt is that token; without it, it is text
test_special_tokens() {
    setup
    good -e run/step_00000003 --prompt 'a<|endoftext|>b' --num-tokens 1
    contains "prompt: 15 tokens" "$tmp/err"
    contains "note: the prompt: spells special tokens, 1 in all" "$tmp/err"
    good -e run/step_00000003 --prompt 'a<|endoftext|>b' --num-tokens 8 --special --temperature 0
    contains "prompt: 3 tokens" "$tmp/err"
    cp "$tmp/out" "$tmp/special"
    # 'a' and 'b' are tokens 64 and 65 of the byte vocabulary, the end of text is 256
    good -e run/step_00000003 --prompt-ids '64,256 65' --num-tokens 8 --temperature 0
    cmp "$tmp/out" "$tmp/special"
}
test_prompt_ids_without_vocabulary() {
    setup
    good -e "$tiny" --prompt-ids '3 500' --num-tokens 6
    grep -qxE '3 500 ([0-9]+ ){6}' "$tmp/out" || fail "not 2 + 6 token ids: $(cat "$tmp/out")"
}
# config.json says where a text begins and ends, if the vocabulary does not
test_eos_of_the_config() {
    setup
    local first
    cp -r "$tiny" "$world/eos"
    good -e eos --prompt-ids 7 --num-tokens 8 --temperature 0
    first=$(cut -d ' ' -f 4 "$tmp/out")
    sed -i "s/\"eos_token_id\": [^,]*,/\"eos_token_id\": $first,/; s/\"bos_token_id\": [^,]*,/\"bos_token_id\": 7,/" "$world/eos/config.json"
    grep -q "\"eos_token_id\": $first," "$world/eos/config.json" || fail "no eos_token_id in $(cat "$world/eos/config.json")"
    cp "$tmp/out" "$tmp/whole"
    good -e eos --prompt-ids 7 --num-tokens 8 --temperature 0
    want "tokens before the end" "$(cat "$tmp/out")" "$(cut -d ' ' -f 1-"$(($(tr ' ' '\n' <"$tmp/whole" | grep -nx "$first" | head -n 1 | cut -d : -f 1) - 1))" "$tmp/whole") "
    good -e eos --prompt-ids 7 --num-tokens 8 --temperature 0 --no-stop-at-eot
    cmp "$tmp/out" "$tmp/whole"
    good -e eos --prompt '' --num-tokens 8 --temperature 0 --no-stop-at-eot # begins with token 7, which is not printed
    want "after the first token" "$(cat "$tmp/out")" "$(cut -d ' ' -f 2- "$tmp/whole")"
}
# --seed -1 draws a seed and says which
test_random_seed() {
    setup
    local seed
    sample --seed -1 >"$tmp/one"
    seed=$(sed -nE 's/^\[--seed ([0-9]+) gives this text again\]$/\1/p' "$tmp/err")
    sample --seed "$seed" >"$tmp/again"
    cmp "$tmp/one" "$tmp/again"
    sample --seed -1 >"$tmp/two"
    ! cmp -s "$tmp/one" "$tmp/two" || fail "the same text twice"
    good "${small[@]}" "${batch[@]}" -i "$data" --seed -1 -o drawn
    seed=$(sed -nE 's/^seed ([0-9]+)$/\1/p' "$tmp/out")
    [ -n "$seed" ] || fail "the seed is not printed"
    good "${small[@]}" "${batch[@]}" -i "$data" --seed -1 -o drawn -y 1 -x 5
    contains "seed $seed" "$tmp/out"
    good "${small[@]}" "${batch[@]}" -i "$data" --seed "$seed" -o drawn_again -x 5
    grep -q '^changed' "$tmp/out" && fail "$(grep '^changed' "$tmp/out")"
    loss_of() { sed -nE 's/.*"step":5,"type":"train","loss":([0-9.]+).*/\1/p' "$world/$1/log.jsonl"; } # OUT
    want "loss of step 5" "$(loss_of drawn_again)" "$(loss_of drawn)"
}

# --eval: the same loss for a text and for its shard, and the one that a validation of the same tokens gives
test_eval() {
    setup
    number() { sed -nE "s/.*$1 ([0-9.]+).*/\1/p" "$tmp/out"; } # WHAT
    "$BIN_DIR/dev/data/tokenize" -i "$world/text" -o "$world/whole/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good -e run --eval text -b 3
    want "tokens" "$(sed -nE 's/^text: ([0-9]+) tokens.*/\1/p' "$tmp/out")" "$(wc -c <"$world/text")"
    local loss
    loss=$(number loss)
    awk -v loss="$loss" -v got="$(number perplexity)" 'BEGIN {exit !(got > exp(loss) * 0.999 && got < exp(loss) * 1.001)}' ||
        fail "$(cat "$tmp/out")"
    # a byte is a token, so a loss of L nats is L / ln 2 bits per byte
    awk -v loss="$loss" -v got="$(sed -nE 's/.*, ([0-9.]+) bits per byte.*/\1/p' "$tmp/out")" \
        'BEGIN {d = got - loss / log(2); exit !(d < 1e-4 && d > -1e-4)}' || fail "$(cat "$tmp/out")"
    good -e run --eval whole/a_train_000000.bin -b 7
    awk -v a="$loss" -v b="$(number loss)" 'BEGIN {exit !(a - b < 2e-3 && b - a < 2e-3)}' || fail "$loss as text: $(cat "$tmp/out")"
    # a validation of 961 = 30 x 32 + 1 tokens has no rest; two files have a line for each and one for all
    printf 'x' >"$world/960"
    head -c 959 "$world/text" >>"$world/960"
    "$BIN_DIR/dev/data/tokenize" -i "$world/960" -o "$world/rows/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good -e run/step_00000003 -i "$data" -j 'rows/a_train_*.bin' -b 10 -t 32 -x 0
    loss=$(sed -n 's/^val loss //p' "$tmp/out")
    good -e run/step_00000003 --eval 'rows/a_train_*.bin' -b 4 -t 32
    awk -v a="$loss" -v b="$(number loss)" 'BEGIN {exit !(a - b < 2e-3 && b - a < 2e-3)}' || fail "$loss in validation: $(cat "$tmp/out")"
    good -e run --eval 'data/a_*.bin'
    want "lines" "$(sed -E 's/: .*//' "$tmp/out" | tr '\n' ' ')" "data/a_train_000000.bin data/a_train_000001.bin data/a_val_000000.bin all "
}
# --eval FILE --special: the same tokens as in the shard that tokenize --special makes of the text
test_eval_special() {
    setup
    number() { sed -nE "s/.*$1 ([0-9.]+).*/\1/p" "$tmp/out"; } # WHAT
    printf 'int a;\n<|endoftext|>\nint b;<|endoftext|>\n' >"$world/two"
    "$BIN_DIR/dev/data/tokenize" -i "$world/two" -o "$world/two_shards/a" --special 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good -e run --eval two_shards/a_train_000000.bin --json
    local shard
    shard=$(sed -E 's/"(file|time_ms)":[^,}]*//g' "$tmp/out")
    good -e run --eval two --special --json
    want "result of the text" "$(sed -E 's/"(file|time_ms)":[^,}]*//g' "$tmp/out")" "$shard"
    contains '"tokens":15,' "$tmp/out" # 7 and 7 bytes, the end of text between them
    good -e run --eval two --json
    contains '"tokens":41,' "$tmp/out"
    contains "note: two: spells special tokens, 2 in all, the first <|endoftext|>, as ordinary text: --special makes them tokens" "$tmp/err"
}
# value NAME LINE: prints a number of a line of --json in $tmp/out
value() { sed -n "$2p" "$tmp/out" | sed -nE "s/.*\"$1\":(-?[0-9.e+-]+|null)[,}].*/\1/p"; }

# near WHAT GOT WANTED: fails unless the numbers agree to 1e-5, relatively
near() {
    local tolerance=1e-5
    [ -z "${TRAIN-}" ] || tolerance=1e-2 # it may compute in bf16
    awk -v got="$2" -v want="$3" -v tolerance=$tolerance 'BEGIN {d = (got - want) / want; exit !(got != "" && d < tolerance && -d < tolerance)}' ||
        fail "$1 is '$2', want $3"
}

# --eval on a small model with trained weights: the values that PyTorch gives in fp64 (dev/test/fixtures/README.md)
test_eval_values() {
    setup
    local from=$PWD/dev/test/fixtures/eval i
    "$BIN_DIR/dev/data/tokenize" -i "$from/text.txt" -o "$world/values/t" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    "$BIN_DIR/dev/data/lambada" -i "$from/last_words.jsonl" -o "$world/values/words.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    "$BIN_DIR/dev/data/arc" -i "$from/questions_hf.jsonl" -o "$world/values/questions.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    # two last words, of three tokens each: the greedy continuation of the prompt, and the same with another third token
    {
        little 20240522 2 2 40 2
        head -c 1004 /dev/zero
        for i in 0 1; do
            for word in 65535 40 $i 0 1 8 175 196 25 502 67 211 407 103 3 1 181 181 $((374 + i)); do little "$word" | head -c 2; done
        done
    } >"$world/values/greedy.bin"
    patch "$world/values/greedy.bin" 12 '\x26' # 19 words
    patch "$world/values/greedy.bin" 1026 '\x26'
    patch "$world/values/greedy.bin" 1064 '\x26'
    good -e "$tiny" --eval 'values/t_*.bin,values/words.bin,values/questions.bin,values/greedy.bin' --json -b 2
    want "the types" "$(sed -E 's/^\{"type":"([a-z_]+)".*/\1/' "$tmp/out" | tr '\n' ' ')" "loss last_words choices last_words "
    near "the loss of the text" "$(value loss 1)" 6.483511454923531
    want "its tokens" "$(value tokens 1)" 293
    near "the log of the last words' perplexity" "$(awk -v p="$(value perplexity 2)" 'BEGIN {print log(p)}')" 35.113869
    want "their accuracy" "$(value acc 2)" 0
    want "acc" "$(value acc 3)" 0.25
    want "acc_norm" "$(value acc_norm 3)" 0.5
    want "the accuracy of the greedy words" "$(value acc 4)" 0.5
    near "the log of their perplexity" "$(awk -v p="$(value perplexity 4)" 'BEGIN {print log(p)}')" 14.167665
    while read -r T stride loss; do
        # under a sanitizer, 230 windows take 20 s and check the same accesses as 16
        [[ $stride != 1 || $BIN_DIR != *sanitize* || -n "${LLMC_TEST_FULL-}" ]] || continue
        good -e "$tiny" --eval 'values/t_*.bin' --json -b 3 -t "$T" --stride "$stride"
        near "the loss with -t $T --stride $stride" "$(value loss 1)" "$loss"
        want "the tokens with -t $T --stride $stride" "$(value tokens 1)" 293
    done <<<'63 16 6.478095018787735
63 1 6.5392047666164475
63 63 6.465518091896149
40 13 6.471117427463324'
}
# a model that has learnt a text answers questions on it
test_hellaswag() {
    setup
    local label i
    yes 'the cat sat on the mat. ' | tr -d '\n' | head -c 4000 >"$world/cats"
    "$BIN_DIR/dev/data/tokenize" -i "$world/cats" -o "$world/cats_data/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    for label in 2 1; do
        for i in 1 2 3 4 5 6 7; do printf 'the cat sat\n%d\nsits mat\nand the\non the mat.\nqqq zz\n' $label; done >"$tmp/questions"
        "$BIN_DIR/dev/data/hellaswag" -i "$tmp/questions" -o "$world/label_$label.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    done
    good "${small[@]}" --recipe llmc -b 8 -t 32 -i 'cats_data/*.bin' -x 60 -l 0.02 -v 60 -s 0 --hellaswag label_2.bin -o cats_run
    want "evaluations" "$(grep -c '^HellaSwag: [0-9] of 7 correct' "$tmp/out")" 2
    contains '"step":60,"type":"eval","accuracy":1' "$world/cats_run/log.jsonl"
    good -e cats_run --hellaswag label_2.bin
    contains "HellaSwag: 7 of 7 correct = 1.0000" "$tmp/out"
    good -e cats_run --hellaswag label_1.bin -b 1
    contains "HellaSwag: 0 of 7 correct = 0.0000" "$tmp/out"
    # the same file by --eval, and last words: two that follow from the text, and one that does not. They begin like a row of the
    # training data: the model does not know other positions
    printf '{"text": "%s"}\n' 'the mat. the cat sat' 'the mat. the cat sat on the mat.' \
        'the mat. the cat sat on the dog.' >"$tmp/words"
    "$BIN_DIR/dev/data/lambada" -i "$tmp/words" -o "$world/words.bin" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    good -e cats_run --eval label_2.bin,words.bin -b 1
    ! grep -q 'note:' "$tmp/err" || fail "$(cat "$tmp/err")"
    # contexts that are longer than -t lose their beginning, and how many they are is said
    good -e cats_run --eval words.bin -t 25 --json
    contains "note: words.bin: 2 of 3 examples are longer than the 25 tokens of -t: their contexts lose the beginning" "$tmp/err"
    contains '"examples":3,"cut":2,' "$tmp/out"
    good -e cats_run --hellaswag label_2.bin -t 12
    contains "note: label_2.bin: 7 of 7 examples are longer than the 12 tokens of -t" "$tmp/err"
    good -e cats_run --eval label_2.bin,words.bin -b 1
    contains "label_2.bin: 7 of 7 correct = 1.0000" "$tmp/out"
    contains "words.bin: 3 last words, acc 0.6667 +- 0.3333, perplexity " "$tmp/out"
}
test_bench() {
    setup
    good -e run --bench --num-tokens 10 --bench-prompt 8 --num-samples 2
    grep -qE '^prompt of 8 +16 tokens +[0-9.]+ ms +[0-9.]+ tok/s \+- [0-9.]+%$' "$tmp/out" || fail "$(cat "$tmp/out")"
    grep -qE '^10 generated after it +20 tokens +[0-9.]+ ms +[0-9.]+ tok/s \+- [0-9.]+%$' "$tmp/out" || fail "$(cat "$tmp/out")"
    good -e d6 --channels 64 --layers 1 --heads 1 --positions 20 --bench # more than the positions allow: as much as fits
    contains "prompt of 19 " "$tmp/out"
    want "what is said of it" "$(cat "$tmp/err")" "note: the prompt has 19 tokens instead of 512, because the model has 20 positions"
    refused 1 '--bench-prompt 20 is too long: the model has 20 positions, one of them for a generated token$' -- \
        -e d6 --channels 64 --layers 1 --heads 1 --positions 20 --bench --bench-prompt 20
}
# every format that --export writes is read back: the same text greedily, and fp32 to the same bits
test_export() {
    setup
    local form
    sample --temperature 0 >"$tmp/greedy"
    for form in there there.bin; do
        good -e run --export "$form"
        contains "$form: " "$tmp/out"
    done
    want "what is in it" "$(cd "$world/there" && echo *)" "config.json generation_config.json merges.txt model.safetensors vocab.json"
    cmp "$world/there/model.safetensors" "$world/run/step_00000003/model.safetensors"
    refused 1 '--export there.safetensors: a reader of this file alone would take heads of 64 channels, but the model has 32' 'a directory' -- \
        -e run/step_00000003 --export there.safetensors
    good -e d6 --layers 1 --heads 1 --channels 64 --positions 32 --tokenizer data --export heads_of_64.safetensors
    good -e heads_of_64.safetensors --export from_a_file
    cmp "$world/heads_of_64.safetensors" "$world/from_a_file/model.safetensors"
    good -e there --prompt 'int ' --num-tokens 20 --no-stop-at-eot --temperature 0
    cmp "$tmp/out" "$tmp/greedy"
    good -e there.bin --tokenizer there --prompt 'int ' --num-tokens 20 --no-stop-at-eot --temperature 0
    cmp "$tmp/out" "$tmp/greedy"
    good -e there.bin --export back/ # from llm.c's format to Hugging Face's
    cmp "$world/back/model.safetensors" "$world/run/step_00000003/model.safetensors"
    good -e run --export half --export-type bf16
    contains '"torch_dtype": "bfloat16"' "$world/half/config.json"
    [ "$(wc -c <"$world/half/model.safetensors")" -lt $(($(wc -c <"$world/there/model.safetensors") * 6 / 10)) ] || fail "not half the size"
    good -e half --prompt 'int ' --num-tokens 5
    want "temporary files" "$(cd "$world" && ls -d ./*.tmp-* 2>/dev/null)" ""
}
# a model with other settings than GPT-2's: trained, resumed with and without the flags, exported
test_other_settings() {
    setup
    local other=(--mlp-channels 96 --norm-epsilon 0.001 --activation silu --unscaled-attention --scale-by-layer --untied-head)
    local model=("${small[@]}" --layers 2) muon=(--optimizer muon) form flag
    good "${model[@]}" "${batch[@]}" -i "$data" -o other "${other[@]}" "${muon[@]}" -x 6 -n 3
    losses >"$tmp/whole"
    cp -r "$world/other" "$world/again"
    rm -r "$world"/{other,again}/step_00000006
    good "${model[@]}" "${batch[@]}" -i "$data" -o other "${other[@]}" "${muon[@]}" -x 6 -y 1
    losses | cmp - <(tail -n 3 "$tmp/whole")
    good "${model[@]}" "${batch[@]}" -i "$data" -o again "${muon[@]}" -x 6 -y 1
    losses | cmp - <(tail -n 3 "$tmp/whole")
    for form in '"n_inner": 96' '"layer_norm_epsilon": 0.001' '"activation_function": "silu"' '"scale_attn_weights": false' \
        '"scale_attn_by_inverse_layer_idx": true' '"tie_word_embeddings": false'; do
        contains "$form," "$world/other/step_00000006/config.json"
    done
    good "${model[@]}" "${batch[@]}" -i "$data"
    losses >"$tmp/standard"
    for flag in '--mlp-channels 96' '--norm-epsilon 0.001' '--activation silu' --unscaled-attention --scale-by-layer --untied-head; do
        # shellcheck disable=SC2086 # a flag and its value
        good "${model[@]}" "${batch[@]}" -i "$data" $flag
        losses | cmp -s - "$tmp/standard" && fail "$flag changes nothing"
    done
    good -e other --export exported
    for form in other exported; do
        good -e $form --prompt 'int ' --num-tokens 20 --no-stop-at-eot --temperature 0
        cp "$tmp/out" "$tmp/$form"
    done
    cmp "$tmp/other" "$tmp/exported"
    refused 1 "^error: --export new.bin: llm.c's .bin cannot hold 96 MLP channels, an epsilon of 0.001, activation silu, unscaled attention, " \
        'attention scaled by the layer, an untied head: write a Hugging Face directory' -- -e other/step_00000006 --export new.bin
    refused 1 "^error: --export new.gguf: llama.cpp's GPT-2 has the activation gelu_new, not silu: write a Hugging Face directory" -- \
        -e other/step_00000006 --export new.gguf
    for flag in '--norm-epsilon 0.001/an epsilon of 0.001' '--activation relu/activation relu' \
        '--unscaled-attention/unscaled attention' '--scale-by-layer/attention scaled by the layer'; do
        # shellcheck disable=SC2086 # a flag and its value
        refused 1 "^error: --export new.safetensors: a reader of this file alone would not know that the model has ${flag#*/}: .* a directory" -- \
            -e d6 --layers 1 --heads 1 --channels 64 ${flag%/*} --tokenizer data --export new.safetensors
    done
    good -e d6 --layers 1 --heads 1 --channels 64 --mlp-channels 96 --untied-head --positions 32 --tokenizer data --export narrow.safetensors
    good -e narrow.safetensors --mlp-channels 96 --untied-head --tokenizer data --prompt 'int ' --num-tokens 5
    rm -r "$world"/{other,again,exported,narrow.safetensors}
}
# rates of dropout in config.json are not used, which is said when training starts from such a model, and only there
test_dropout() {
    setup
    good -e run/step_00000003 --export rates
    good -e rates "${batch[@]}" -i "$data"
    ! grep -q dropout "$tmp/out" || fail "a note on our own file"
    losses >"$tmp/without"
    sed -i 's/"attn_pdrop": 0.0/"attn_pdrop": 0.1/' "$world/rates/config.json"
    good -e rates "${batch[@]}" -i "$data"
    losses | cmp - "$tmp/without"
    want "notes" "$(grep -c '^note: rates: .* with a dropout of up to 0.1, this program trains without$' "$tmp/out")" 1
    good -e rates --prompt 'int ' --num-tokens 2
    ! grep -q note "$tmp/out" "$tmp/err" || fail "a note for sampling"
    rm -r "$world/rates"
}
# what a model file has beyond the model is said in one line
test_model_notes() {
    setup
    mkdir -p "$world/indexed"
    cp "$tiny/config.json" "$world/indexed/"
    cp "$tiny/model.safetensors" "$world/indexed/m.safetensors"
    echo '{"weight_map": {"lm_head.weight": "m.safetensors"}}' >"$world/indexed/model.safetensors.index.json"
    good -e indexed --prompt-ids 1 --num-tokens 2
    want "notes" "$(grep '^note' "$tmp/err")" "note: indexed: lm_head.weight: in the index, but in no file, and not needed"
    rm -r "$world/indexed"
}
# the same .gguf from every format that -e reads, in fp32 and bf16; test_gguf looks into the file
test_export_gguf() {
    setup
    local from type sizes=()
    mkdir -p "$world/forms"
    for type in f32 bf16; do
        for from in dir_$type llmc_$type.bin; do good -e run --export "forms/$from" --type $type; done
    done
    for from in run forms/dir_f32 forms/llmc_f32.bin; do
        for type in f32 f16 bf16 q8_0; do
            rm -f "$world/one.gguf"
            good -e "$from" --tokenizer data --export one.gguf --type $type
            want "the line" "$(sed 's/[0-9.]* M/N M/' "$tmp/out")" "one.gguf: N M parameters in $type"
            [ "$from" != run ] || cp "$world/one.gguf" "$tmp/$type.gguf"
            cmp "$world/one.gguf" "$tmp/$type.gguf" || fail "$type from $from"
        done
    done
    for from in dir_bf16 llmc_bf16.bin; do # also of these, the biases are f32 in a .gguf
        rm -f "$world/one.gguf"
        good -e "forms/$from" --tokenizer data --export one.gguf --export-type fp32
        [ "$from" != dir_bf16 ] || cp "$world/one.gguf" "$tmp/from_bf16.gguf"
        cmp "$world/one.gguf" "$tmp/from_bf16.gguf" || fail "from $from"
    done
    ! cmp -s "$tmp/from_bf16.gguf" "$tmp/f32.gguf" || fail "rounding changes nothing"
    for type in q8_0 f16 bf16 f32; do
        want "the first bytes" "$(head -c 4 "$tmp/$type.gguf")" GGUF
        sizes+=("$(wc -c <"$tmp/$type.gguf")")
    done
    [ "${sizes[0]}" -lt "${sizes[1]}" ] && [ "${sizes[1]}" -eq "${sizes[2]}" ] && [ "${sizes[2]}" -lt "${sizes[3]}" ] || fail "sizes ${sizes[*]}"
    from=(-e d6 --layers 1 --heads 1 --channels 64 --positions 32 --tokenizer data)
    good "${from[@]}" --export forms/single.safetensors
    good -e forms/single.safetensors --tokenizer data --export forms/one.gguf
    rm "$world/one.gguf"
    good "${from[@]}" --export one.gguf
    cmp "$world/forms/one.gguf" "$world/one.gguf"
    refused 1 '^error: --export one.gguf: exists already, give another name$' -- -e run --export one.gguf
    rm -r "$world/forms" "$world/one.gguf"
}
test_export_gguf_refused() {
    setup
    local step=run/step_00000003
    refused 2 "--type wants one of f32.f16.bf16.q8_0, got 'q4_0'$" -- -e $step --export new.gguf --type q4_0
    refused 2 '--type f16 is for .gguf files; give f32 or bf16 for new.bin$' -- -e $step --export new.bin --type f16
    refused 2 '--type q8_0 is for .gguf files; give f32 or bf16 for new$' -- -e $step --export new/ --type q8_0
    refused 1 '^error: --export new.gguf: a .gguf file contains the vocabulary with its merges, and there is none' '--tokenizer$' -- \
        -e "$tiny" --export new.gguf
    refused 1 "^error: --export new.gguf: .* and the model's can only decode: give one with --tokenizer$" -- \
        -e "$tiny" --tokenizer 385.bin --export new.gguf
    refused 1 '^error: --export new.gguf: q8_0 has blocks of 32 weights, which do not divide 24 channels: give --type f16$' -- \
        -e d6 --layers 1 --heads 1 --channels 24 --tokenizer data --export new.gguf --type q8_0
}
# whatever fails while an export is written, as on a full disk, or whenever a signal ends it: one line, which has the name that was
# asked for, and nothing is left
test_export_to_new_directories() {
    setup
    good -e run/step_00000003 --export new/er/x.bin
    [ -s "$world/new/er/x.bin" ] || fail "$(ls -R "$world/new")"
    rm -r "$world/new"
}
test_export_fails() {
    setup
    local mode name at shim=$tmp/failing_write.so
    "$CC" -shared -fPIC -o "$shim" dev/test/stand-ins/failing_write.c -ldl
    export ASAN_OPTIONS=${ASAN_OPTIONS-}:verify_asan_link_order=0 # the library is loaded before the sanitizer's runtime
    good -e d6 --layers 1 --heads 1 --channels 64 --positions 32 --tokenizer data --export plain
    for mode in from term; do
        for name in x.gguf x.bin x.safetensors x; do
            mkdir "$world/full"
            for ((at = 1; at < 100; at++)); do
                FAIL_DIR=$world/full FAIL_AT=$at FAIL_MODE=$mode LD_PRELOAD=$shim run -e plain --export full/$name
                [ $status -ne 0 ] || break
                want "lines of $name at $at" "$(wc -l <"$tmp/err")" 1
                if [ $mode = from ]; then
                    want "status of $name at $at" $status 1
                    grep -qE "^error: --export full/$name(/[a-z_.]*)?(: .*)?: No space left on device$" "$tmp/err" || fail "$at: $(cat "$tmp/err")"
                else
                    want "status of $name at $at" $status 143
                    want "message of $name at $at" "$(cat "$tmp/err")" "error: --export full/$name: Terminated: nothing was written"
                fi
                want "files at $at" "$(ls -A "$world/full")" ""
            done
            # create, write, fsync, close, rename; a signal in the last write comes too late
            [ $at -ge 3 ] || [ $mode$at = term2 ] || fail "only $at operations"
            want "files" "$(ls -A "$world/full")" "$name"
            rm -r "$world/full"
        done
    done
    rm -r "$world/plain"
}
# the checkpoint of the lowest validation loss stays, under the name best
test_keep_best() {
    setup
    good "${small[@]}" "${batch[@]}" -i "$data" -j 'data/a_val_*.bin' -l 0.01 -k constant -x 20 -v 4 -n 0 -nk 1 --keep-best -o best_run
    good "${small[@]}" "${batch[@]}" -i "$data" -j 'data/a_val_*.bin' -l 1 -k constant -x 40 -v 4 -n 0 -nk 1 --keep-best -o best_run -y 1 # unlearns
    local want_step
    want_step=$(sed -nE 's/^\{"step":([0-9]+),"type":"val","loss":([0-9.]+)\}$/\2 \1/p' "$world/best_run/log.jsonl" | grep -v ' 0$' | sort -g | head -n 1 | cut -d ' ' -f 2)
    want "the link" "$(readlink "$world/best_run/best")" "$(printf 'step_%08d' "$want_step")"
    [ "$want_step" -lt 40 ] || fail "the last step is the best: nothing was tested"
    want "what is kept" "$(ls "$world/best_run" | grep -c '^step_')" 2
    good -e best_run/best --prompt 'int ' --num-tokens 3
    # a resumed run remembers the loss to beat: with nothing learnt there is no better one
    good "${small[@]}" "${batch[@]}" -i "$data" -j 'data/a_val_*.bin' -l 0 -k constant -x 48 -v 4 -n 0 -nk 1 --keep-best -o best_run -y 1
    want "the link after resuming" "$(readlink "$world/best_run/best")" "$(printf 'step_%08d' "$want_step")"
}
# sampling from a run that saves all the time and keeps one checkpoint: the one that was found is there until it is read, even
# if the reader is slow
test_sampling_while_saving() {
    setup
    local pid i shim=$tmp/failing_write.so
    "$CC" -shared -fPIC -o "$shim" dev/test/stand-ins/failing_write.c -ldl
    (cd "$world" && exec "$train" "${small[@]}" "${batch[@]}" -i "$data" -x 100000000 -n 1 -nk 1 -o busy) >"$tmp/busy.out" 2>&1 </dev/null &
    pid=$!
    until [ -e "$world/busy" ] && ls "$world/busy" | grep -q step_; do sleep 0.01; done
    export ASAN_OPTIONS=${ASAN_OPTIONS-}:verify_asan_link_order=0 # the library is loaded before the sanitizer's runtime
    for ((i = 0; i < 5; i++)); do
        FAIL_DIR=$world/busy FAIL_SLOW_OPEN_MS=10 LD_PRELOAD=$shim run -e busy --prompt 'int ' --num-tokens 2
        [ $status -eq 0 ] || break
    done
    kill -TERM $pid
    wait $pid || fail "the run: $(tail -n 1 "$tmp/busy.out")"
    [ "$status" -eq 0 ] || fail "sample $i: $(cat "$tmp/err")"
}

# documents "ab" between tokens </s>: samples begin with this token and end before it, also after fine-tuning a model whose
# vocabulary does not name it
test_end_of_text_of_another_name() {
    local named=$world/named
    setup
    mkdir "$named"
    sed 's/<|endoftext|>/<\/s>/; s/}$/, "ab": 257}/' "$world/data/vocab.json" >"$named/vocab.json"
    printf '#version: 0.2\na b\n' >"$named/merges.txt"
    yes ab | head -n 400 >"$named/text"
    "$BIN_DIR/dev/data/tokenize" -i "$named/text" -t "$named" --eot '</s>' -d line -o "$named/data/x" 2>"$tmp/err"
    good "${small[@]}" -b 4 -t 16 -x 60 -s 60 -l 0.01 -i named/data/x_train_000000.bin -o named/run
    contains 'ab</s>ab</s>ab' "$tmp/out"
    good -e named/run --prompt '' --temperature 0 --num-tokens 6
    want "text" "$(cat "$tmp/out")" ab
    cp -r "$named/run/step_00000060" "$named/model"
    rm "$named/model/tokenizer_config.json" "$named/model/state.json"
    good -e named/model --prompt '' --temperature 0 --num-tokens 6
    want "text where only config.json knows the end-of-text" "$(cat "$tmp/out")" ab
    sed -i 's/_token_id": 256/_token_id": null/' "$named/model/config.json"
    good -e named/model --prompt '' --temperature 0 --num-tokens 6
    # it begins with another token and does not end before </s>
    [ "$(cat "$tmp/out")" != ab ] && [ "$(wc -c <"$tmp/out")" -ge 10 ] || fail "where nothing names an end-of-text: $(cat "$tmp/out")"
    good -e named/model -b 4 -t 16 -x 1 -s 1 -i named/data/x_train_000000.bin -o named/tuned
    contains 'ab</s>ab</s>ab' "$tmp/out"
    good -e named/tuned --prompt '' --temperature 0 --num-tokens 6
    want "text after fine-tuning" "$(cat "$tmp/out")" ab
    "$BIN_DIR/dev/data/tokenize" -i "$named/text" -t "$named" --eot ab -d line -o "$named/other/x" 2>"$tmp/err"
    refused 1 '^error: -j .*: end-of-text is token 257, but 256 in the training data' -- \
        -e named/model -b 4 -t 16 -x 1 -i named/data/x_train_000000.bin -j named/other/x_train_000000.bin
}

# -e with a run's output directory loads its newest intact checkpoint
test_newest_good_checkpoint() {
    setup
    good -e run --prompt 'int ' --num-tokens 20 --seed 1
    contains "run/step_00000003" "$tmp/err"
    cp "$tmp/out" "$tmp/newest"
    good -e run/step_00000003 --prompt 'int ' --num-tokens 20 --seed 1
    cmp "$tmp/out" "$tmp/newest"
    cp -r "$world/run" "$world/partly"
    truncate -s -4 "$world/partly/step_00000003/model.safetensors"
    good -e partly --prompt 'int ' --num-tokens 20 --seed 1
    contains "passed over checkpoint step_00000003: " "$tmp/err"
    contains "partly/step_00000002" "$tmp/err"
    cp "$tmp/out" "$tmp/older"
    good -e run/step_00000002 --prompt 'int ' --num-tokens 20 --seed 1
    cmp "$tmp/out" "$tmp/older"
    cmp -s "$tmp/older" "$tmp/newest" && fail "both checkpoints give the same text: nothing was tested"
    true
}

# fine-tuning starts from given weights, at step 1 of a new run
test_fine_tuning() {
    setup
    local from first
    good "${small[@]}" "${batch[@]}" -i "$data" -a 1 -x 30 -l 0.03 -o base
    first=$(losses | head -n 1)
    for from in base/step_00000030 base/step_00000030/model.safetensors base; do
        good -e $from "${batch[@]}" -i "$data" -a 1 -o "tuned_${from//\//_}"
        losses | awk -v first="$first" 'NR == 1 {exit !($1 < 2 && first > 4)}' || fail "$from: first loss $(losses | head -n 1), was $first"
        want "$from: steps" "$(grep -cE '^step +[123]/3 ' "$tmp/out")" 3
        [ -e "$world/tuned_${from//\//_}/step_00000003/vocab.json" ] || fail "$from: the vocabulary is not saved"
    done
}

# dialogs with added tokens, from text to sampling: the model stops at the end token of its vocabulary, and what is written
# keeps all of them
test_chat() {
    setup
    local chat=$world/chat name model
    mkdir "$chat"
    cp "$world/data/vocab.json" "$world/data/merges.txt" "$chat"
    for name in 256:'<|end|>' 257:'<|user|>' 258:'<|assistant|>' 260:'<|pad|>'; do
        printf '"%s": {"content": "%s", "special": true}, ' "${name%%:*}" "${name#*:}"
    done >"$tmp/listed"
    sed -i 's/<|endoftext|>/<|end|>/' "$chat/vocab.json"
    printf '{"added_tokens_decoder": {%s"259": {"content": "zebra", "special": false, "single_word": true}}, "eos_token": "<|end|>", "pad_token": "<|pad|>"}' \
        "$(cat "$tmp/listed")" >"$chat/tokenizer_config.json"
    yes $'<|user|>one<|assistant|>ab\n<|user|>two<|assistant|>a zebra' | head -n 200 >"$chat/text"
    "$BIN_DIR/dev/data/tokenize" -i "$chat/text" -t "$chat" -d line --special -o "$chat/data/x" 2>"$tmp/err"
    good "${small[@]}" -b 4 -t 32 -x 60 -s 0 -l 0.01 -i chat/data/x_train_000000.bin -o chat/run
    good -e chat/run --export chat/hf
    good -e chat/hf --export chat/again
    diff -r "$chat/hf" "$chat/again"
    good -e chat/hf --export chat/chat.gguf
    contains "note: --export chat/chat.gguf: 1 added tokens include white space or are whole words only" "$tmp/err"
    for name in vocab.json tokenizer_config.json; do
        cmp "$chat/data/$name" "$chat/run/step_00000060/$name"
        cmp "$chat/data/$name" "$chat/hf/$name"
    done
    for model in run hf; do
        good -e "chat/$model" --special --prompt '<|user|>two<|assistant|>' --temperature 0 --num-tokens 12
        contains "prompt: 5 tokens" "$tmp/err"
        want "answer of $model" "$(cat "$tmp/out")" "<|user|>two<|assistant|>a zebra"
    done
    good -e chat/hf --prompt 'zebra<|pad|>' --num-tokens 1
    contains "prompt: 8 tokens" "$tmp/err" # zebra is one token in every text, and <|pad|> is text
    grep -q '"pad_token_id": 260' "$chat/hf/config.json" && grep -q '"pad_token_id": 260' "$chat/hf/generation_config.json"
    # shards of the same tokens, of which others are special
    mkdir "$chat/plain"
    cp "$chat/data/"* "$chat/plain"
    sed -i 's/"zebra", "special": false/"zebra", "special": true/' "$chat/plain/tokenizer_config.json"
    good -e chat/hf -b 4 -t 32 -x 1 -s 0 -i chat/plain/x_train_000000.bin
    contains "note: -i chat/plain/x_train_000000.bin: the vocabulary of these shards has other added or special tokens than" "$tmp/err"
}

# -y 1 with the same flags, as the program itself recommends
test_resume_same_flags() {
    setup
    cp -r "$world/run" "$world/same"
    good "${small[@]}" "${batch[@]}" -l 0.01 -i "$data" -o same -n 1 -nk 0 -y 1 -x 5
    contains "resumed at step 3 from same/step_00000003" "$tmp/out"
    want "steps" "$(grep -cE '^step +[45]/5 ' "$tmp/out")" 2
}
test_resume_says_what_changed() {
    setup
    cp -r "$world/run" "$world/changed"
    good -e d6 -b 2 -t 16 -s 0 -i "$data" -o changed -y 1 -x 4 -l 0.02 -k linear -d 64
    want "what changed" "$(sed -nE 's/^changed since the checkpoint: ([^ ]+) .*/\1/p' "$tmp/out" | sort | tr '\n' ' ')" \
        "learning_rate num_steps schedule total_batch_tokens "
    contains "num_steps 4, was 3" "$tmp/out"
    contains 'schedule "linear", was "cosine"' "$tmp/out"
    contains "total_batch_tokens 64, was 32" "$tmp/out"
    contains "learning_rate 0.02, was 0.01" "$tmp/out" # printed as typed, not as a float with seventeen digits
    # no flag changed: no message
    good -e d6 -b 2 -t 16 -s 0 -i "$data" -o changed -y 1 -x 4 -l 0.02 -k linear -d 64
    grep -q '^changed' "$tmp/out" && fail "a change that is none: $(grep -m 1 '^changed' "$tmp/out")"
    true
}

# The recipe that a run takes, what it prints and saves; a resumed run keeps its own, and a typed flag wins.
test_recipes() {
    setup
    local short=(-b 2 -t 16 -x 30 -s 0) # no recipe among them
    good "${small[@]}" "${short[@]}" -i "$data" -o recipe_run -v 3
    contains "recipe pretrain: --learning-rate 0.0018 --schedule wsd --warmup 2 --final-fraction 0" "$tmp/out"
    grep -qE '^step +1/30 .* lr 9.00e-04 ' "$tmp/out" || fail "the rate after one of two steps of warm-up is another one"
    contains "--muon-learning-rate 0.0036" "$world/recipe_run/recipe.txt"
    want "a typed flag in the recipe's file" "$(grep -c -e --val-every "$world/recipe_run/recipe.txt")" 0
    good -e d6 "${short[@]}" -i "$data" -o recipe_run -y 1 -x 33 -l 0.001
    contains "recipe pretrain, resumed: --schedule wsd --warmup 2" "$tmp/out"
    contains "resumed at step 30 " "$tmp/out"
    good -e d6 "${short[@]}" -i "$data" -o recipe_run -y 1 -x 34
    contains "learning_rate 0.0018, was 0.001" "$tmp/out"
    # what it was told to keep stays
    good -e d6 "${short[@]}" -i "$data" -o recipe_run -y 1 -x 38 -n 1 -nk 0
    good -e d6 "${short[@]}" -i "$data" -o recipe_run -y 1 -x 40
    contains "checkpoints: so that at most 10 minutes of work are lost, all are kept" "$tmp/out"
    want "checkpoints" "$(cd "$world/recipe_run" && echo step_*)" "$(printf 'step_000000%d ' {33..40} | sed 's/ $//')"
    refused 1 'recipe_run/step_00000040 was saved with --optimizer muon: resume with it' -- \
        -e d6 "${short[@]}" -i "$data" -o recipe_run -y 1 --optimizer adamw
    good -e recipe_run "${short[@]}" -i "$data" -x 1
    contains "recipe finetune: --learning-rate 0.0001 --schedule cosine --warmup 0 --final-fraction 0" "$tmp/out"
    good "${small[@]}" "${short[@]}" -i "$data" -x 1 -a 1
    contains "recipe overfit: --learning-rate 0.001 --schedule constant --val-every 0" "$tmp/out"
    # runs that did not save a recipe had the defaults
    cp -r "$world/run" "$world/old_run"
    rm "$world/old_run/recipe.txt"
    good -e d6 -b 2 -t 16 -s 0 -i "$data" -o old_run -y 1 -x 4 -l 0.01
    contains "recipe llmc: sets nothing beyond what is typed" "$tmp/out"
    want "what changed" "$(sed -nE 's/^changed since the checkpoint: ([^ ]+) .*/\1/p' "$tmp/out")" num_steps
    usage "--recipe wants one of pretrain\|finetune\|overfit\|llmc, got 'best'" -- --recipe best
}
# --plan: which micro-batches fit a memory, and what the recipe sets.
test_plan() {
    setup
    good --plan --memory 3GB
    contains "plan for 3.0 GB; nothing is started" "$tmp/out"
    grep -qE '^d12, .* -b 1 at most needs 2\.[0-9]+ GB, -b 1 needs' "$tmp/out" || fail "d12 in 3 GB: $(grep d12 "$tmp/out")"
    contains "d48, 1557.69 M parameters, -t 1024: does not fit, -b 1 needs" "$tmp/out"
    want "recipes" "$(grep -c '^recipe pretrain: ' "$tmp/out")" 2
    good --plan -e d12 -t 64 -x 100 --memory 4GB --recipe finetune
    contains "--warmup 7" "$tmp/out"
    usage '--memory wants a size such as 24GB' -- --plan --memory many
    usage '--memory is for --plan' -- --memory 4GB
    good --plan --memory 4GB -e run
    grep -qE "^run, [0-9.]+ M parameters, -t [0-9]+: -b [0-9]+ at most needs" "$tmp/out" || fail "$(cat "$tmp/out")"
    contains "recipe finetune: " "$tmp/out"
    refused 1 '-e none: No such file or directory' -- --plan --memory 4GB -e none
}
# A run writes its flags to a file, which repeats it bit for bit, also with a seed that was drawn.
test_config() {
    setup
    good "${small[@]}" -i "$data" -j 'data/a_val_*.bin' -x 6 -v 3 -g 8 --seed -1 -o first
    good --config first/config -o second
    same_checkpoint "$world/first/step_00000006" "$world/second/step_00000006"
    own() { grep -v -e --output -e '--seed -1' "$world/$1/config" | sort; }
    want "the flags" "$(own second)" "$(own first)"
    failure 'first holds checkpoints of an earlier run; resume it with -y 1, or give another -o' -- --config first/config -o first
    printf -- '-l 0.1\n-x two\n' >"$world/flags"
    usage ': flags:2: --steps wants a whole number' -- --config flags
    failure 'none: cannot read the flags: No such file' -- --config none
}

# a run with Muon is resumed with Muon only
test_resume_muon() {
    setup
    good "${small[@]}" "${batch[@]}" -i "$data" -o muon -x 2 -l 0.01 --optimizer muon --muon-momentum 0.75
    good "${small[@]}" "${batch[@]}" -i "$data" -o muon -x 2 -y 1 -l 0.01 --optimizer muon --muon-learning-rate 0.02 --muon-momentum 0.5
    contains "changed since the checkpoint: muon_learning_rate 0.02, was 0.01" "$tmp/out"
    contains "changed since the checkpoint: muon_momentum 0.5, was 0.75" "$tmp/out"
    run "${small[@]}" "${batch[@]}" -i "$data" -o muon -x 3 -y 1
    want "status" "$status" 1
    contains "was saved with --optimizer muon" "$tmp/err"
}

# the run goes on with its own model, whatever -e says, and the program says so
test_resume_another_model() {
    setup
    cp -r "$world/run" "$world/other_model"
    good -e nosuchmodel "${batch[@]}" -i "$data" -o other_model -y 1 -x 4
    contains "-e nosuchmodel is not used: the run resumes from other_model/step_00000003" "$tmp/out"
}
# the message names what helps: neither -b nor -t does when the weights alone are too large
test_out_of_memory() {
    setup
    refused 1 '[0-9.]+ GB .*: take a smaller model' -- \
        -e d6 --channels 6144 --heads 96 --layers 400 -i "$data"
    case $train in *cu) skip "the GPU program needs the address space" ;; esac
    [[ $BIN_DIR != *sanitize* ]] || skip "the sanitizer needs the address space"
    local code=0
    (cd "$world" && ulimit -v 200000 && "$train" -e d12 --prompt '') >"$tmp/out" 2>"$tmp/err" || code=$?
    want status $code 1
    grep -qE '^error: out of memory: cannot allocate 0.[0-9]+ GB$' "$tmp/err" || fail "$(cat "$tmp/err")"
}

# weights so large that the loss is not finite: no update, and the run ends with an error
test_nonfinite() {
    setup
    cp -r "$world/run/step_00000003" "$world/large"
    local header
    header=$(od -An -t u8 -N 8 "$world/large/model.safetensors" | tr -d ' ')
    for at in 0 1 68 83; do # the first channel of !, ", e and t, which any text has
        patch "$world/large/model.safetensors" $((8 + header + 128 * at)) '\x00\x00\x7f\x7f'
    done
    run -e large/model.safetensors "${batch[@]}" -i "$data" -a 1 -o large_run # three steps, fewer than --max-nonfinite
    want "status of a run that has learned nothing" "$status" 1
    local skipped
    skipped=$(grep -c 'not finite, weights left as they are' "$tmp/out" || true)
    want "skipped steps" "$skipped" 3
    want "stderr" "$(cat "$tmp/err")" "error: 3 of 3 steps were skipped, 3 of them with a loss or gradient that was not finite: nothing was learned: take a lower -l, a longer -u or other weights"
    cmp "$world/large/model.safetensors" "$world/large_run/step_00000003/model.safetensors" || fail "the weights have changed"
    run -e large/model.safetensors "${batch[@]}" -i "$data" -a 1 -x 100 --max-nonfinite 4 -o large_stopped
    want status "$status" 1
    want "lines of stderr" "$(wc -l <"$tmp/err")" 1
    contains "not finite 4 steps in a row" "$tmp/err"
    [[ $train == *cu ]] || contains "stopped, the weights of the last good step are saved" "$tmp/err" # infinite in fp16
    local steps
    steps=$(grep -c '^step .* tok/s' "$tmp/out")
    # on a GPU the fifth step is in flight when the fourth is checked; fp16 waits for each step
    [[ $train == *cu && $steps = 5 ]] || want "steps" "$steps" 4
}

# weights that an update makes infinite: they are not saved, no checkpoint is removed for them, and a run that gives up names them
test_weights_overflow() {
    setup
    cp -r "$world/run/step_00000003" "$world/edge"
    local header at explode=(-l 0.1 -c 100 -k constant -u 0)
    header=$(od -An -t u8 -N 8 "$world/edge/model.safetensors" | tr -d ' ')
    at=$((8 + header + 257 * 128 + 31 * 128)) # the position 31, which rows of 16 tokens do not use; weight decay multiplies it by -9
    patch "$world/edge/model.safetensors" $at '\x00\x00\x7f\x7f'
    run -e edge/model.safetensors "${batch[@]}" -i "$data" "${explode[@]}" -l 100 -x 100 --max-nonfinite 4 -o edge_stopped
    want status "$status" 1
    contains "not finite 4 steps in a row, and the weights themselves are not finite: the weights after step " "$tmp/err"
    [[ $train != *cu ]] || return 0 # the fake GPU has other updates
    run -e edge/model.safetensors "${batch[@]}" -i "$data" "${explode[@]}" -x 1 -o edge_run
    want status "$status" 1
    want "stderr" "$(cat "$tmp/err")" "error: tensor 'wpe.weight' is not finite: -inf at [31, 0]: the weights after step 1 were not saved: take a lower -l or a longer -u"
    want "what is saved" "$(ls "$world/edge_run" | grep step_ || true)" ""
    good -e edge/model.safetensors "${batch[@]}" -i "$data" -l 0 -x 2 -n 1 -nk 1 -o edge_run
    run -e edge/model.safetensors "${batch[@]}" -i "$data" "${explode[@]}" -x 4 -n 1 -nk 1 -y 1 -o edge_run
    want status "$status" 1
    contains "warning: the checkpoint of step 3 was not saved, earlier ones are untouched: tensor 'wpe.weight' is not finite: -inf at [31, 0]" "$tmp/err"
    want "the last line" "$(tail -n 1 "$tmp/err" | sed 's/-nan/nan/' | cut -d : -f 3-)" " nan at [31, 0]: the weights after step 4 were not saved: resume from the newest checkpoint with -y 1 and a lower -l"
    want "what is saved" "$(ls "$world/edge_run" | grep step_)" step_00000002
    good -e edge/model.safetensors "${batch[@]}" -i "$data" -l 0 -x 4 -y 1 -o edge_run
}

test_interrupt_without_output() {
    setup
    local pid code=0
    snapshot >"$tmp/before"
    : >"$tmp/out" # clears the steps that an earlier test has printed
    (cd "$world" && exec "$train" "${small[@]}" "${batch[@]}" -i "$data" -x 100000000) >"$tmp/out" 2>"$tmp/err" </dev/null &
    pid=$!
    until grep -qs '^step ' "$tmp/out"; do
        kill -0 $pid || fail "ended by itself: $(cat "$tmp/err")"
        sleep 0.01
    done
    kill -INT $pid
    wait $pid || code=$?
    want "exit code" $code 130
    grep -qE '^Interrupt: stopped after step [0-9]+; nothing saved' "$tmp/out" || fail "$(tail -n 1 "$tmp/out")"
    grep -q 'and saved' "$tmp/err" && fail "promises what it does not do: $(tail -n 1 "$tmp/err")"
    snapshot >"$tmp/after"
    cmp "$tmp/before" "$tmp/after"
}

# each line is written at once, even to a file or a pipe
test_progress_reaches_a_file() {
    setup
    local pid i
    (cd "$world" && exec "$train" "${small[@]}" "${batch[@]}" -i "$data" -x 1000 -d 32000000) >"$tmp/out" 2>"$tmp/err" </dev/null & # steps that take long
    pid=$!
    for ((i = 0; i < 200; i++)); do
        grep -q '1000 steps of 32000000 tokens' "$tmp/out" && break
        sleep 0.05
    done
    kill -KILL $pid
    wait $pid 2>/dev/null || true
    contains '1000 steps of 32000000 tokens' "$tmp/out"
}

# if the output cannot be written, the program fails
test_output_that_cannot_be_written() {
    setup
    [ -e /dev/full ] || skip "no /dev/full"
    local code task
    for task in "-e run/step_00000003 --prompt int --num-tokens 20" --help "--help all" --version; do
        code=0
        # shellcheck disable=SC2086
        (cd "$world" && "$train" $task) >/dev/full 2>"$tmp/err" || code=$?
        want "exit code ($task)" $code 1
        want "message ($task)" "$(cat "$tmp/err")" "error: cannot write the text to stdout: No space left on device"
    done
}

# an untrained model generates every byte; control characters such as ESC must reach a file, but not a terminal
test_terminal_is_not_commanded() {
    setup
    command -v script >/dev/null || skip "needs script (bsdutils)"
    local words="${small[*]} --tokenizer data --prompt abc --num-tokens 25 --seed 3"
    cd "$world"
    script -qec "$train $words" /dev/null </dev/null >"$tmp/terminal" 2>&1
    # shellcheck disable=SC2086
    "$train" $words >"$tmp/file" 2>"$tmp/err"
    LC_ALL=C grep -qaP '[\x00-\x08\x0B\x0C\x0E-\x1F\x7F]' "$tmp/file" || fail "this seed has no control character: take another"
    ! LC_ALL=C grep -qaP '[\x00-\x08\x0B\x0C\x0E-\x1F\x7F]' "$tmp/terminal" || fail "control characters reach the terminal"
    contains "abc" "$tmp/terminal"
}
# C1 controls and bidirectional ones, which are several bytes of UTF-8: as tokens, in the prompt and in a path
test_terminal_is_not_commanded_in_utf8() {
    setup
    command -v script >/dev/null || skip "needs script (bsdutils)"
    # tokens CSI (C2 9B), OSC (C2 9D) and RLO (E2 80 AE), in GPT-2's spelling of bytes
    printf '#version: 0.2\n\xc3\x82 \xc4\xbd\n\xc3\x82 \xc4\xbf\n\xc3\xa2 \xc4\xa2\n\xc3\xa2\xc4\xa2 \xc2\xae\n' >"$tmp/merges.txt"
    "$BIN_DIR/dev/data/tokenize" -i "$world/text" -t "$tmp/merges.txt" -o "$world/control/a" 2>"$tmp/err" || fail "$(cat "$tmp/err")"
    local bad='\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]|[\x00-\x08\x0B\x0C\x0E-\x1F\x7F]'
    local name flags seeds="7 14 17 36 48 54" # each samples one of these tokens
    [ -z "${TRAIN-}${LLMC_TEST_FULL-}" ] || seeds=$(echo {1..60})
    name=$(printf 'r\033[2J\xc2\x9b31m\xe2\x80\xaeun')
    mkdir "$world/$name"
    cp -r "$world"/run/step_* "$world/$name/"
    printf '%s\n' "$train" "${small[@]}" --tokenizer control --prompt "$(printf 'a\xc2\x9dtitle\xc2\x9c\033[31mb')" --num-tokens 28 \
        --temperature 100 --top-k 0 --seed 5 >"$tmp/words"
    cat >"$tmp/typed" <<SH
mapfile -t words <"$tmp/words"
for seed in $seeds; do "\${words[@]}" --seed \$seed; done
"$train" -e "\$1" --prompt '' --num-tokens 3
"$train" -e "\$1/none" --prompt ''
"$train" -e "\$1" -i "\$1" -o "\$1"
SH
    cd "$world"
    script -qec "bash $tmp/typed '$name'" /dev/null </dev/null >"$tmp/terminal" 2>&1 || true # the last ones are refused
    bash "$tmp/typed" "$name" >"$tmp/file" 2>/dev/null || true
    sed -i 's/\x1b\[K//g' "$tmp/terminal" # our own: the run removes its last line
    LC_ALL=C grep -qaP '\xc2\x9b' "$tmp/file" || fail "CSI is not sampled: take more seeds"
    LC_ALL=C grep -qaP '\xe2\x80\xae' "$tmp/file" || fail "RLO is not sampled: take more seeds"
    ! LC_ALL=C grep -aP "$bad" "$tmp/terminal" || fail "control characters reach the terminal"
    contains "a?title??[31mb" "$tmp/terminal"
    contains "newest checkpoint: " "$tmp/terminal"
    rm -r "${world:?}/$name"
}

tests=(unknown_flag junk_number missing_value negative_size stray_argument out_of_range bad_schedule
    missing_shards no_data text_as_shard empty_shard truncated_shard model_as_shard id_past_the_vocabulary shard_too_short
    seq_len_past_positions total_batch_no_multiple heads_do_not_divide unknown_descriptor
    missing_model shape_of_a_loaded_model vocabulary_larger_than_the_model vocabulary_far_smaller_than_the_model missing_tokenizer damaged_config truncated_model no_whole_checkpoint
    damaged_step another_vocabulary infinite_weights fifo output_holds_a_model output_holds_logs closed_streams
    step_of_more_than_the_data short_last_shard short_validation_data file_named_like_a_pattern unquoted_pattern keep_best_of_nothing save_every_without_output
    resume_of_a_run_that_is_done no_task
    demo_of_another_directory
    output_is_a_file output_not_writable output_holds_checkpoints resume_without_output resume_another_shape resume_another_optimizer
    muon_flags
    prompt_without_merges prompt_without_vocabulary prompt_too_long sampling_flags
    prompts_from_nowhere evaluation_of_nothing export_over_something export_to_new_directories data_changed_in_place resume_other_data ways_out flags_that_do_not_belong given_text
    prompt_from_a_file several_texts many_prompts stop_strings repetition_penalty min_p special_tokens prompt_ids_without_vocabulary eos_of_the_config random_seed
    eval eval_special eval_values hellaswag bench export other_settings dropout model_notes export_gguf export_gguf_refused export_fails keep_best sampling_while_saving
    help flags_of_others step_lines z_scores run_header nothing_written_without_output overfits_one_batch prompt_without_vocabulary_prints_ids seed temperature_0_is_greedy
    newest_good_checkpoint fine_tuning chat resume_same_flags resume_says_what_changed recipes config plan resume_muon resume_another_model out_of_memory nonfinite weights_overflow interrupt_without_output end_of_text_of_another_name
    progress_reaches_a_file output_that_cannot_be_written terminal_is_not_commanded
    terminal_is_not_commanded_in_utf8)
run_tests "$@"
