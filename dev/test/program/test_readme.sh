#!/usr/bin/env bash
# Types every command of README.md, the manual and CONTRIBUTING.md: each line of their ```sh blocks, as it is written there, in a
# copy of the repository. Also checks the outputs that README.md shows, its length, the length and the links of all documents outside
# of the course, and the version.
#
# What would take long is cut short by variables that the commands read (DEMO_FLAGS) or by flags after the command's own,
# of which the last one counts. Downloads come from a folder here. Programs for the GPU are compiled. Without a GPU,
# quick_nvcc.sh compiles them, and they must accept the flags and then report that no GPU is usable.
. "$(dirname "$0")/../test.sh"
. dev/test/gpu/builds.sh
unset MAKEFLAGS MFLAGS MAKELEVEL PRECISION SPILLS DEVICE_ONLY BIN_DIR
export PATH=$PATH:/usr/local/cuda/bin
have_gpu() { nvidia-smi -L >/dev/null 2>&1; }
have_gpu || export GPU_COMPUTE_CAPABILITY=$cheap_arch NVCC=$cheap_nvcc
small_model='--layers 1 --heads 1 --channels 64 --positions 64'
short='-x 2 -b 1 -t 64 -d 64'
export DEMO_FLAGS='-x 20 -v 10 -s 20 -u 5'

documents=(README.md .github/CONTRIBUTING.md dev/manual/*.md)

# The lines of the ```sh blocks.
commands() { awk '/^```/ { inside = $0 == "```sh"; next } inside' "${documents[@]}"; }

# Copies, once for all tests, the files that git tracks or would track, and what make has built from them. All keep their modification
# times, so make compiles a program again only if it would do so here: if a source or the flags have changed, or a header is missing.
copy() {
    [ ! -e "$tmp/top/README.md" ] || return 0
    mkdir -p "$tmp/top"
    git ls-files -z --cached --others --exclude-standard >"$tmp/files" 2>/dev/null || skip "needs git"
    xargs -0 cp -p --parents -t "$tmp/top" <"$tmp/files"
    local program list
    for program in train_gpt2 dev/data/*.c; do
        program=${program%.c} list=build/${program%.c}.d
        [ ! -x "$program" ] || [ ! -e "$list" ] || cp -p --parents -t "$tmp/top" "$program" "$list" build/flags
    done
    share_emulated "$tmp/top"
}

# documented COMMAND: notes that a test types this command, which must be in one of the documents
documented() {
    commands | grep -qxF -- "$1" || fail "not a command of README.md, CONTRIBUTING.md or the manual: $1"
    echo "$1" >>"$tmp/typed"
}

# run RC COMMAND: types it in the copy; the exit code must be RC; stdout and stderr to $tmp/out and $tmp/err
run() {
    local rc=0
    (cd "$tmp/top" && sh -c "$2") >"$tmp/out" 2>"$tmp/err" </dev/null || rc=$?
    [ $rc -eq "$1" ] || { tail -n 20 "$tmp/out" "$tmp/err" && fail "exit code $rc, want $1: $2"; }
}

# shown COMMAND: fails unless the last run has printed the output that README.md shows below this command. Numbers may differ, and
# "..." stands for the rest of a line or for other lines.
shown() {
    local line mask='s/[0-9]+([.,][0-9]+)*/N/g; s/ +/ /g' lines=0
    sed -E "$mask" "$tmp/out" "$tmp/err" >"$tmp/masked"
    while read -r line; do
        line=$(sed -E "s/ ?[.]{3}$//; $mask" <<<"$line")
        lines=$((lines + 1))
        grep -aqF -- "$line" "$tmp/masked" || { tail -n 20 "$tmp/out" "$tmp/err" && fail "README.md shows another output of $1: $line"; }
    done < <(awk -v command="$1" '
        /^```sh$/ { sh = 1; next }
        /^```$/ { if (sh) { sh = 0; next_is = typed; typed = 0 } else { inside = next_is; next_is = 0 } next }
        sh { typed = typed || $0 == command; next }
        inside { print; next }
        /./ { next_is = 0 }' README.md)
    [ $lines -gt 0 ] || fail "README.md shows no output of $1"
}

# run_gpu COMMAND [FLAGS]: with a GPU the command and the flags that cut it short; else the command must end at the GPU.
run_gpu() {
    if have_gpu; then
        run 0 "$1 ${2-}"
    else
        run 1 "$1"
        contains "no usable GPU" "$tmp/err"
    fi
}

# for_gpu COMMAND ...: commands of the documents; skips what follows where nothing can be compiled
for_gpu() {
    local command
    for command in "$@"; do documented "$command"; done
    command -v nvcc >/dev/null || skip "needs nvcc"
    copy
}

test_demo() {
    documented 'make demo'
    copy
    run 0 'make demo'
    contains " 20/20 | loss" "$tmp/out"
    contains "saved demo/log/step_00000020" "$tmp/out"
    contains "--prompt 'for (int i'" "$tmp/out"
    contains "tok/s]" "$tmp/err"
    shown 'make demo'
    run 1 'scripts/demo.sh /bin/false' # a program that does not begin, as train_gpt2cu without a GPU
    [ -d "$tmp/top/demo/log/step_00000020" ] && [ ! -e "$tmp/top/demo/log.before" ] || fail "the demo before it is lost"
}

test_plot_runs() {
    local build='make scripts/plot_runs' draw='scripts/plot_runs demo/log -o demo/run.svg'
    documented "$build"
    documented "$draw"
    command -v g++ >/dev/null || skip "needs g++"
    copy
    [ -e "$tmp/top/demo/log" ] || run 0 'make demo'
    run 0 "$build"
    run 0 "$draw"
    contains "demo/log/log.jsonl: 20 steps, 3 validations" "$tmp/out"
}

# README.md's commands for the demo's model, and for a text without a vocabulary
test_demo_model() {
    local command
    set -- './train_gpt2 -e demo/log --prompt "static void" --num-tokens 60' "./train_gpt2 -e demo/log --eval 'demo/data/code_val_*.bin'" \
        './train_gpt2 -e demo/log --export demo/model.gguf --type q8_0' 'dev/data/tokenize -i LICENSE -o demo/text --val-tokens 200'
    for command in "$@"; do documented "$command"; done
    copy
    [ -e "$tmp/top/demo/log" ] || run 0 'make demo'
    for command in "$@"; do
        run 0 "$command"
        shown "$command"
    done
}

test_demo_gpu() {
    local command='make train_gpt2cu && ./train_gpt2cu'
    for_gpu "$command"
    run_gpu "$command"
}

test_kernel() {
    local command='(cd dev/cuda && make layernorm_forward && ./layernorm_forward 7)'
    for_gpu "$command"
    if have_gpu; then
        run 0 "$command"
        contains "All results match" "$tmp/out"
    else
        run 1 "$command"
        contains "no GPU here" "$tmp/err"
    fi
}

test_kernel_on_a_cpu() {
    local command='(cd dev/cuda && make cpu OP=layernorm_forward && ./layernorm_forward_cpu 7)'
    documented "$command"
    command -v g++ >/dev/null || skip "needs g++"
    copy
    run 0 "$command"
    grep -qE '^[0-9]+ passed, 0 failed, 0 skipped$' "$tmp/out" || fail "$(tail -n 1 "$tmp/out")"
    shown "$command"
}

# test_modal.sh tries the script; here the command must name it, and files and targets that are there
test_modal() {
    local command
    command=$(commands | grep 'modal run')
    documented "$command"
    copy
    mkdir -p "$tmp/bin"
    printf '#!/bin/sh\n[ "$1" = run ] && [ -f "$2" ] && [ "$3" = --compile-command ] && make -n ${4#make } && echo "on $GPU_NAME"\n' \
        >"$tmp/bin/modal"
    chmod +x "$tmp/bin/modal"
    PATH=$tmp/bin:$PATH run 0 "$command"
    contains "layernorm_forward.cu" "$tmp/out"
    contains "on H100" "$tmp/out"
}

tokenize="dev/data/tokenize -i data/tinyshakespeare.txt -t data/gpt2 -o data/ts --val-tokens 32768"
finetune="./train_gpt2cu -e data/gpt2 -i 'data/ts_train_*.bin' -j 'data/ts_val_*.bin' -o log -x 100"
continue='./train_gpt2cu -e log --prompt "ROMEO:" --temperature 0.8'
pretrained='./train_gpt2cu -e data/gpt2 --prompt "The answer is" --num-tokens 40'
tokenize_own="dev/data/tokenize -i my.txt -t data/gpt2 -o data/my --val-tokens 32768"
new="./train_gpt2cu -e d12 -i 'data/my_train_*.bin' -j 'data/my_val_*.bin' -o log124M -d 524288 -x 1000 -y 1"
repeat='./train_gpt2cu --config log124M/config -o again'

evaluate="./train_gpt2cu -e log --eval 'data/ts_val_*.bin'"
bench='./train_gpt2cu -e log --bench'
export_it='./train_gpt2cu -e log --export shakespeare'
export_gguf='./train_gpt2cu -e log --export shakespeare.gguf --type q8_0'

# The download: a model of 2 layers with 64 positions in place of 124M, and this repository's sources for Shakespeare's.
prepare_data() {
    local from=$tmp/served/hub
    mkdir -p "$from"
    cp dev/test/fixtures/tiny_gpt2/config.json dev/test/fixtures/tiny_gpt2/model.safetensors "$from/"
    cat llmc/*.h >"$from/input.txt"
    run 0 'make dev/data/tokenize'
    mkdir -p "$tmp/vocabulary"
    printf '#version: 0.2\ni n\nt h\nth e\n\xc4\xa0 the\n' >"$tmp/vocabulary/merges.txt"
    printf '%s\n' {a..z}' '{a..e} >>"$tmp/vocabulary/merges.txt" # nearly as many tokens as the model has
    # beside its shards, tokenize writes the vocabulary that belongs to the merges
    run 0 "echo x | dev/data/tokenize -i - -t $tmp/vocabulary -o $tmp/vocabulary/made/x"
    cp "$tmp/vocabulary/made/vocab.json" "$tmp/vocabulary/made/merges.txt" "$from/"
    local name
    for name in config.json vocab.json merges.txt model.safetensors; do
        echo "gpt2 | gpt2/$name | https://hub/$name | - | -"
    done >"$tmp/table"
    echo "tinyshakespeare | tinyshakespeare.txt | https://hub/input.txt | - | -" >>"$tmp/table"
    export LLMC_DOWNLOAD_TABLE=$tmp/table LLMC_DOWNLOAD_BASE=file://$tmp/served
}

# On the CPU: "the flags are the same".
test_text_to_text() {
    documented 'scripts/download.sh gpt2 tinyshakespeare'
    documented 'make dev/data/tokenize'
    documented "$tokenize"
    documented "$tokenize_own"
    command -v curl >/dev/null || skip "needs curl"
    copy
    prepare_data
    run 0 'scripts/download.sh gpt2 tinyshakespeare'
    run 0 "$tokenize"
    cp "$tmp/top/data/tinyshakespeare.txt" "$tmp/top/my.txt"
    run 0 "$tokenize_own"
    run 0 'make train_gpt2'
    run 0 "${pretrained/train_gpt2cu/train_gpt2}"
    contains "The answer is" "$tmp/out"
    run 0 "${finetune/train_gpt2cu/train_gpt2} $short"
    contains " 2/2 | loss" "$tmp/out"
    contains "saved log/step_00000002" "$tmp/out"
    run 0 "${continue/train_gpt2cu/train_gpt2}"
    contains "ROMEO:" "$tmp/out"
    run 0 "${evaluate/train_gpt2cu/train_gpt2}"
    contains "perplexity" "$tmp/out"
    run 0 "${bench/train_gpt2cu/train_gpt2}"
    contains "generated after it" "$tmp/out"
    run 0 "${export_it/train_gpt2cu/train_gpt2} && ./train_gpt2 -e shakespeare --prompt A --num-tokens 1"
    run 0 "${export_gguf/train_gpt2cu/train_gpt2}"
    contains "in q8_0" "$tmp/out"
    run 0 "${new/train_gpt2cu/train_gpt2} $small_model $short"
    contains " 2/2 | loss" "$tmp/out"
    run 0 "${repeat/train_gpt2cu/train_gpt2}"
    contains "saved again/step_00000002" "$tmp/out"
}

test_text_to_text_gpu() {
    for_gpu 'make train_gpt2cu dev/data/tokenize' "$pretrained" "$finetune" "$continue" "$new" "$evaluate" "$bench" \
        "$export_it" "$export_gguf" "$repeat"
    run 0 'make train_gpt2cu dev/data/tokenize'
    if have_gpu; then
        prepare_data
        run 0 "scripts/download.sh gpt2 tinyshakespeare && $tokenize && ${tokenize_own/my.txt/data\/tinyshakespeare.txt}"
    fi
    run_gpu "$pretrained"
    run_gpu "$finetune" "$short"
    run_gpu "$continue"
    run_gpu "$evaluate"
    run_gpu "$bench"
    if have_gpu; then run 0 "$export_it" && run 0 "$export_gguf"; fi
    run_gpu "$new" "$short"
    if have_gpu; then run 0 "$repeat"; fi
}

eval_make='make dev/data/lambada dev/data/arc'
eval_fetch='scripts/download.sh gpt2 lambada'
lambada="dev/data/lambada -i data/lambada_test.jsonl -t data/gpt2 -o data/lambada_test.bin"
arc="dev/data/arc -i ARC-Easy-Test.jsonl -t data/gpt2 -o data/arc_easy.bin"
eval_files="./train_gpt2cu -e data/gpt2 --eval 'data/lambada_test.bin,data/arc_*.bin'"
eval_window="./train_gpt2cu -e data/gpt2 --eval my.txt --stride 512 --json"

# To the table of prepare_data
prepare_lambada() {
    echo '{"text": "The cat sat on the mat"}' >"$tmp/served/hub/lambada"
    echo "lambada | lambada_test.jsonl | https://hub/lambada | - | -" >>"$tmp/table"
}

# On the CPU, with the downloaded model of 64 positions; a text and a question in place of the published ones
test_evaluation() {
    local command
    for command in "$eval_make" "$eval_fetch" "$lambada" "$arc"; do documented "$command"; done
    command -v curl >/dev/null || skip "needs curl"
    copy
    prepare_data
    prepare_lambada
    run 0 "$eval_fetch && make train_gpt2"
    echo '{"question": {"stem": "Who sat?", "choices": [{"text": "a cat", "label": "A"}, {"text": "a mat", "label": "B"}]},
        "answerKey": "A"}' | tr '\n' ' ' >"$tmp/top/ARC-Easy-Test.jsonl"
    cp llmc/gpt2.h "$tmp/top/my.txt"
    run 0 "$eval_make"
    run 0 "$lambada"
    run 0 "$arc"
    run 0 "${eval_files/train_gpt2cu/train_gpt2}"
    contains "data/lambada_test.bin: 1 last words, acc " "$tmp/out"
    contains "data/arc_easy.bin: 1 questions, acc " "$tmp/out"
    local window=${eval_window/train_gpt2cu/train_gpt2}
    run 0 "${window/512/32}"
    contains '"seq_len":64,"stride":32,' "$tmp/out"
}

test_evaluation_gpu() {
    for_gpu "$eval_files" "$eval_window"
    run 0 'make train_gpt2cu'
    if have_gpu; then
        prepare_data
        prepare_lambada
        run 0 "$eval_fetch && $eval_make"
        echo '{"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}' >"$tmp/top/ARC-Easy-Test.jsonl"
        cp llmc/gpt2.h "$tmp/top/my.txt"
        run 0 "$lambada && $arc"
    fi
    run_gpu "$eval_files"
    run_gpu "$eval_window" '--stride 32'
}

# In place of FineWeb, this repository's sources; one question. run_gpt2.sh itself is tested in test_run_gpt2.sh.
test_from_scratch() {
    local plan='scripts/run_gpt2_124M.sh --plan' fetch='scripts/download.sh fineweb10B hellaswag vocab' from=$tmp/served/hub name
    documented "$plan"
    documented "$fetch"
    copy
    run 0 "$plan"
    contains "nothing is started" "$tmp/out"
    command -v curl >/dev/null || skip "needs curl"
    prepare_data
    run 0 "dev/data/tokenize -i $from/input.txt -t $tmp/vocabulary -o $from/fineweb --val-tokens 2000"
    echo '{"ind": 1, "activity_label": "Sitting", "ctx": "The cat sat", "label": 1, "endings": ["a", "b", "c", "d"]}' >"$from/questions"
    for name in "$from"/fineweb_*.bin; do echo "fineweb10B | fineweb10B/${name##*/} | https://hub/${name##*/} | - | -"; done >>"$tmp/table"
    echo "hellaswag | hellaswag_val.jsonl | https://hub/questions | - | -" >>"$tmp/table"
    for name in vocab.json merges.txt; do echo "vocab | gpt2_tokenizer/$name | https://hub/$name | - | -"; done >>"$tmp/table"
    run 0 "$fetch"
    for_gpu scripts/run_gpt2_124M.sh
    run_gpu scripts/run_gpt2_124M.sh '-x 2 -b 4 -t 64 -d 256 -m 1 --gpus 1'
    if have_gpu; then contains "HellaSwag" "$tmp/out"; fi
}

eight="./train_gpt2cu --gpus 8 -e d12 -i 'data/my_train_*.bin' -j 'data/my_val_*.bin' -o log8 -d 524288 -x 1000"
sixteen="./train_gpt2cu -e d12 -i 'data/my_train_*.bin' -o log16 -d 524288 -x 1000"

# With fewer than 8 GPUs the commands must say so. On several machines: the commands that the scripts would run; what sbatch
# does with a script, and that the scripts start their ranks, is tried in test_multi_node.sh.
test_several_gpus() {
    local ssh="scripts/multi_node/ssh.sh --hosts node01:8,node02:8" slurm="sbatch --time=4:00:00 scripts/multi_node/slurm.sh"
    for_gpu "$eight" "$ssh $sixteen" "$slurm $sixteen"
    run 0 'make train_gpt2cu'
    if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -lt 8 ]; then
        run 1 "$eight"
        contains "--gpus 8: there are only " "$tmp/err"
    else
        prepare_data
        run 0 "scripts/download.sh gpt2 tinyshakespeare && ${tokenize_own/my.txt/data\/tinyshakespeare.txt}"
        run 0 "$eight ${short/-d 64/-d 512}"
    fi
    run 0 "${ssh/ssh.sh/ssh.sh --dry-run} $sixteen"
    want "ranks of ssh.sh" "$(grep -c ' LLMC_NUM_RANKS=16 .* ./train_gpt2cu -e d12 ' "$tmp/out")" 16
    run 0 "${slurm/*scripts/scripts} --dry-run $sixteen"
    contains "srun --nodes=2 --ntasks=16 " "$tmp/out"
    contains " -o log16 -d 524288 -x 1000 -y 1" "$tmp/out"
}

# LLMC_TEST_FULL=1 compiles both. Otherwise test_gpu.sh compiles train_gpt2.cu in FP32, as a part of test_gpt2.cu.
test_precisions() {
    local precision
    for_gpu 'make train_gpt2cu PRECISION=FP16' 'make train_gpt2cu PRECISION=FP32'
    for precision in FP16 FP32; do
        run 0 "make -n train_gpt2cu PRECISION=$precision"
        contains " -DENABLE_$precision " "$tmp/out"
        [ -z "${LLMC_TEST_FULL-}" ] || run 0 "make train_gpt2cu PRECISION=$precision"
    done
}

# flags_in_help FILE ...: the flags that blocks of these documents list are in $tmp/out, with the same letters
flags_in_help() {
    local flag flags
    flags=$(awk '/^```/ { inside = !inside; next } inside && /^-/' "$@" | grep -oE '(^|[ ,])--?[a-z][a-z0-9-]*' | tr -d ' ,' | sort -u)
    [ "$(wc -w <<<"$flags")" -ge 8 ] || fail "only these flags found: $flags"
    for flag in $flags; do
        grep -qE -- "(^|[ ,])$flag([ ,=]|$)" "$tmp/out" || fail "$flag is in $* and not in --help"
    done
}

test_help() {
    documented 'dev/data/tokenize --help'
    copy
    run 0 'make dev/data/tokenize && dev/data/tokenize --help'
    flags_in_help dev/manual/data.md
    for_gpu './train_gpt2cu --help' './train_gpt2cu --help all' './train_gpt2cu --plan --memory 24GB'
    run 0 'make train_gpt2cu >/dev/null && ./train_gpt2cu --help all'
    flags_in_help README.md dev/manual/[!d]*.md # all pages but data.md
    run 0 './train_gpt2cu --plan --memory 24GB'
    contains "plan for 24.0 GB; nothing is started" "$tmp/out"
}

# These run this very test: make must know them.
test_tests() {
    local command
    copy
    git -C "$tmp/top" init -q -b main
    git -C "$tmp/top" -c user.name=a -c user.email=a@b commit -q --allow-empty -m first # what SINCE=main names
    for command in 'make quick' 'make quick SINCE=main' 'make quick FILES="llmc/json.h"' 'make test' 'make test-full'; do
        documented "$command"
        run 0 "${command/make/make -n}"
    done
    documented .ci/run
    run 0 'bash -n .ci/run && test -x .ci/run'
}

# The files and folders that the map names are there, and the tests that CONTRIBUTING.md names.
test_map() {
    local name names
    names=$(awk '/^## /{ map = $2 == "Map" } map && /^[a-z_0-9.]+\/? / { print $1 } map && /^[a-z_0-9.\/]+\/ / { print $1 }' README.md | sort -u)
    [ "$(wc -w <<<"$names")" -ge 10 ] || fail "only these found: $names"
    for name in $names; do [ -e "$name" ] || fail "$name is not there"; done
    names=$(grep -oE "test_[a-z0-9_]+\\.(c|sh)" .github/CONTRIBUTING.md | sort -u)
    [ "$(wc -w <<<"$names")" -ge 25 ] || fail "CONTRIBUTING.md names only these tests: $names"
    for name in $names; do compgen -G "dev/test/*/$name" >/dev/null || fail "CONTRIBUTING.md names $name, which is not there"; done
}

# The names of a document's headings in links.
anchors() { grep -E '^#+ ' "$1" | sed -E 's/^#+ //; s/.*/\L&/; s/[^a-z0-9 _-]//g; s/ /-/g'; }

# dead_links DOCUMENT ...: prints the links to files or headings that are not there
dead_links() {
    local document link file
    for document in "$@"; do
        for link in $(awk '/^```/ { inside = !inside; next } !inside' "$document" | grep -oE '\]\([^) ]*\)' | sed 's/^](//; s/)$//'); do
            file=$(dirname "$document")/${link%%#*}
            case $link in
            http*) continue ;;
            '#'*) file=$document ;;
            esac
            [ -e "$file" ] || { echo "$document: $link"; continue; }
            [ "${link#*#}" = "$link" ] || anchors "$file" | grep -qxF -- "${link#*#}" || echo "$document: $link"
        done
    done
}

# Every document except the course's, which dev/learn/pages.sh checks.
all_documents() { git ls-files --cached --others --exclude-standard -- '*.md' 2>/dev/null | grep -v '^dev/learn/'; }

test_links() {
    local all dead
    all=$(all_documents) || skip "needs git"
    # shellcheck disable=SC2086 # one word for each document
    dead=$(dead_links $all)
    [ -z "$dead" ] || fail "links to nothing: $dead"
    printf '%s\n' '# A, b: c' '[a](#a-b-c) [b](#b) [c](missing.md) [d](page.md#a) [e](page.md)' >"$tmp/page.md"
    want "dead links" "$(dead_links "$tmp/page.md" | sed 's/.*: //' | tr '\n' ' ')" '#b missing.md page.md#a '
}

# A front page that is read to its end, and documents that do not grow: a new fact replaces an old one.
test_words() {
    local all words
    [ "$(wc -w <README.md)" -le 1500 ] || fail "README.md has $(wc -w <README.md) words, at most 1500 are wanted"
    all=$(all_documents) || skip "needs git"
    # shellcheck disable=SC2086 # one word for each document
    words=$(cat $all | wc -w)
    [ "$words" -le 25000 ] || fail "the Markdown outside dev/learn has $words words, at most 25000 are wanted"
}

# The version is said once, in llmc/utils.h; the changelog and the form for bugs follow.
test_version() {
    local version
    version=$(sed -n 's/^#define LLMC_VERSION "\(.*\)".*/\1/p' llmc/utils.h)
    want "the newest version in the changelog" "$(sed -n 's/^## \([0-9.]*\).*/\1/p' dev/CHANGELOG.md | head -n 1)" "${version:-none}"
    contains "version $version." README.md
    contains "train_gpt2cu $version (" .github/ISSUE_TEMPLATE/bug.yml
    copy
    run 0 'make train_gpt2 >/dev/null && ./train_gpt2 --version'
    contains "train_gpt2 $version (" "$tmp/out"
}

# last: all of them were typed
test_every_command() {
    [ "$some" -eq 0 ] || skip "needs all the other tests"
    [ "$(commands | wc -l)" -ge 45 ] || fail "README.md and the manual have only $(commands | wc -l) commands"
    local missing
    missing=$(commands | grep -vxF -f "$tmp/typed") || true
    [ -z "$missing" ] || fail "no test types: $missing"
}

tests=(demo plot_runs demo_model demo_gpu kernel kernel_on_a_cpu modal text_to_text text_to_text_gpu evaluation evaluation_gpu from_scratch
    several_gpus help precisions tests map links words version every_command)
some=$# # of the tests, by name
run_tests_once "$@"
