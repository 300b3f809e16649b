#!/usr/bin/env bash
# dev/cuda/benchmark_on_modal.py with a mock of Modal's client and, if it is installed (PYTHON=venv/bin/python selects
# one), with the client itself. Nothing here connects to Modal.
. "$(dirname "$0")/../test.sh"
PYTHON=${PYTHON:-python3}
export PYTHONDONTWRITEBYTECODE=1
unset GPU_NAME GPU_MEM N_GPUS

needs_python() { command -v "$PYTHON" >/dev/null || skip "needs python3"; }

# A module `modal` that records its arguments and runs functions locally; LLMC_IN_CONTAINER=1: as in the container.
mkdir "$tmp/stand_in"
cat >"$tmp/stand_in/modal.py" <<'PYTHON'
import os

def is_local():
    return not os.environ.get("LLMC_IN_CONTAINER")

class Image:
    @staticmethod
    def from_registry(tag, add_python):
        print("image", tag, "python", add_python)
        return Image()

    def add_local_dir(self, local, remote, *, copy=False, ignore=()):
        print("add", local, "as", remote)
        return self

class App:
    def __init__(self, name):
        self.name = name

    def function(self, *, image, gpu, timeout):
        print("gpu", gpu, "timeout", timeout)
        def wrap(fn):
            fn.remote = fn
            return fn
        return wrap

    def local_entrypoint(self):
        return lambda fn: fn
PYTHON
# the needed part of `modal run -w FILE`; arguments: TREE FILE COMPILE_COMMAND RUN_COMMAND
cat >"$tmp/run.py" <<'PYTHON'
import sys
import benchmark_on_modal as b
b.TREE = sys.argv[1]
result = b.main(sys.argv[3], sys.argv[4])
if result is not None:
    open(sys.argv[2], "w").write(result)
PYTHON

# with RC ARGUMENT ...: runs python with the mock; the exit code must be RC; output goes to $tmp/out and $tmp/err
with() {
    local rc=0 wanted=$1
    shift
    PYTHONPATH=$tmp/stand_in:${SCRIPT_DIR:-dev/cuda} "$PYTHON" "$@" >"$tmp/out" 2>"$tmp/err" || rc=$?
    [ $rc -eq "$wanted" ] || { cat "$tmp/out" "$tmp/err" && fail "exit code $rc, want $wanted: $*"; }
}

# each line: environment variables, and the GPU string that Modal must get
gpus='
A100-40GB   X=
A100-80GB   GPU_MEM=80
A100-80GB   GPU_NAME=A100-80GB
A100-40GB:2 N_GPUS=2
H100!       GPU_NAME=H100
H100!       GPU_NAME=H100! GPU_MEM=80
H100!:8     GPU_NAME=h100 N_GPUS=8
H200        GPU_NAME=H200
H200:4      GPU_NAME=H200 N_GPUS=4 GPU_MEM=141
L4:2        GPU_NAME=L4 N_GPUS=2
B200        GPU_NAME=B200
'

test_gpu_strings() {
    needs_python
    local want environment
    while read -r want environment; do
        [ -n "$want" ] || continue
        # shellcheck disable=SC2086,SC2163
        (export $environment && with 0 -c 'import benchmark_on_modal')
        contains "gpu $want timeout 3600" "$tmp/out"
        contains "add $PWD as /llmc" "$tmp/out"
        contains "image nvidia/cuda:" "$tmp/out"
    done <<<"$gpus"
}

test_unknown_gpus() {
    needs_python
    local environment
    for environment in GPU_NAME=K80 GPU_NAME=H100:2 GPU_MEM=20 "GPU_NAME=H200 GPU_MEM=80" "GPU_NAME=A100-40GB GPU_MEM=80" \
        N_GPUS=0 N_GPUS=9 N_GPUS=two "GPU_NAME=A10 N_GPUS=8"; do
        # shellcheck disable=SC2086,SC2163
        (export $environment && with 2 -c 'import benchmark_on_modal')
        want "the lines on stderr for $environment" "$(wc -l <"$tmp/err")" 1
    done
    GPU_NAME=K80 with 2 -c 'import benchmark_on_modal'
    contains "GPU_NAME=K80 is not known; known are T4, L4, A10, L40S, A100, RTX-PRO-6000, H100, H200, B200" "$tmp/err"
}

small_tree() {
    rm -rf "$tmp/tree" "$tmp/result"
    mkdir -p "$tmp/tree/dev/cuda" "$tmp/tree/llmc"
    echo '{"op": 1}' >"$tmp/tree/dev/cuda/source"
}

test_commands_run_in_dev_cuda() {
    needs_python
    small_tree
    with 0 "$tmp/run.py" "$tmp/tree" "$tmp/result" "A='x y' cp source built" \
        "sh -c 'cat built >out.json; ls ../..; echo ran; test \"\$1 \$2\" = \"--json out.json\"' op --json out.json"
    contains "ran" "$tmp/out"
    contains "llmc" "$tmp/out"
    want "the result" "$(cat "$tmp/result")" '{"op": 1}'
    want "the tree" "$(ls "$tmp/tree/dev/cuda")" source
    rm "$tmp/result"
    with 0 "$tmp/run.py" "$tmp/tree" "$tmp/result" "cp source built" "sh -c true op --json=built"
    want "the result of --json=FILE" "$(cat "$tmp/result")" '{"op": 1}'
    rm "$tmp/result"
    with 0 "$tmp/run.py" "$tmp/tree" "$tmp/result" "cp source built" "N=5 sh -c 'test \$N = 5'"
    [ ! -e "$tmp/result" ] || fail "a result without --json"
}

test_failures() {
    needs_python
    small_tree
    with 1 "$tmp/run.py" "$tmp/tree" "$tmp/result" "sh -c 'exit 3'" "echo ran"
    contains "ended with status 3" "$tmp/err"
    grep -qx ran "$tmp/out" && fail "runs what did not compile"
    with 1 "$tmp/run.py" "$tmp/tree" "$tmp/result" true "sh -c 'echo {} >out.json; exit 1' --json out.json"
    contains "ended with status 1" "$tmp/err"
    [ ! -e "$tmp/result" ] || fail "a result of what failed"
    with 1 "$tmp/run.py" "$tmp/tree" "$tmp/result" true "no_such_program_here"
    contains "ended with status 127" "$tmp/err"
    with 1 "$tmp/run.py" "$tmp/tree" "$tmp/result" true "sh -c 'kill -9 \$\$'"
    contains "ended with" "$tmp/err"
    with 1 "$tmp/run.py" "$tmp/tree" "$tmp/result" true "true --json missing.json"
    contains "--json missing.json cannot be read" "$tmp/err"
}

test_no_shell() {
    needs_python
    small_tree
    local command
    for command in "make x && ./x" "make x&&./x" "a; b" "a | b" "a > b" "a >b" "a \$(b)" "a &" "" " " "a 'b"; do
        with 2 "$tmp/run.py" "$tmp/tree" "$tmp/result" "$command" true
        want "the lines on stderr for '$command'" "$(wc -l <"$tmp/err")" 1
        grep -q '^\$ ' "$tmp/out" && fail "'$command' runs"
    done
    with 0 "$tmp/run.py" "$tmp/tree" "$tmp/result" "bash -c 'echo a && echo b | cat'" "echo '*' a\\ b"
    contains "* a b" "$tmp/out"
}

# in the container the script is alone in a folder, and GPU_NAME is not set
test_in_the_container() {
    needs_python
    cp dev/cuda/benchmark_on_modal.py "$tmp/stand_in/"
    (export LLMC_IN_CONTAINER=1 GPU_NAME=K80 && SCRIPT_DIR=$tmp/stand_in with 0 -c 'import benchmark_on_modal')
    grep -q '^add ' "$tmp/out" && fail "adds folders that are not there"
    rm "$tmp/stand_in/benchmark_on_modal.py"
}

real() { PYTHONPATH=dev/cuda MODAL_CONFIG_PATH=$tmp/none.toml "$PYTHON" -c "$1" >"$tmp/out" 2>&1 || { cat "$tmp/out" && fail "fails"; }; }
needs_client() {
    needs_python
    "$PYTHON" -c 'import modal; modal.App, modal.Image.add_local_dir' 2>/dev/null || skip "needs the client: pip install modal"
}

# Modal's client accepts our arguments, and stores them in _spec_
test_client_objects() {
    needs_client
    local want environment
    while read -r want environment; do
        [ -n "$want" ] || continue
        # shellcheck disable=SC2086,SC2163
        (export $environment && real "
import modal, benchmark_on_modal as b
assert isinstance(b.app, modal.App) and isinstance(b.image, modal.Image) and isinstance(b.run_on_gpu, modal.Function)
assert b.main.info.function_name == 'main', b.main
print('gpu', b.gpu)
print('spec', getattr(getattr(b.run_on_gpu, '_spec_', None), 'gpus', b.gpu))
from modal._utils.function_utils import parse_gpu_config
config = parse_gpu_config(b.gpu)
print('config', config.gpu_type, config.count)")
        contains "gpu $want" "$tmp/out"
        contains "spec $want" "$tmp/out"
        local count=1
        [[ $want != *:* ]] || count=${want#*:}
        contains "config ${want%:*} $count" "$tmp/out"
    done <<<"$gpus"
}

# the files sent to Modal: sources, but no binaries and no data
test_client_files() {
    needs_client
    real '
import benchmark_on_modal as b
from modal import FilePatternMatcher
from pathlib import Path
ignored = FilePatternMatcher(*b.IGNORED)
for path in ("llmc/cuda_common.cuh", "dev/cuda/gelu_forward.cu", "dev/cuda/bench.h", "dev/cuda/Makefile", "dev/cuda/nvcc.mk",
             "dev/data/tokenize.c", "Makefile", "train_gpt2.cu", "dev/cuda/promote.sh"):
    assert not ignored(Path(path)), path
for path in (".git/config", "build/flags", "data/x.bin", "dev/cuda/gelu_forward", "train_gpt2cu", "dev/data/tokenize",
             "dev/test/run.sh"):
    assert ignored(Path(path)), path'
}

test_client_command_line() {
    needs_client
    real '
import sys
sys.argv = ["modal", "run", "dev/cuda/benchmark_on_modal.py", "--help"]
from modal.__main__ import main
main()'
    contains "--compile-command" "$tmp/out"
    contains "--run-command" "$tmp/out"
}

tests=(gpu_strings unknown_gpus commands_run_in_dev_cuda failures no_shell in_the_container client_objects client_files
    client_command_line)
run_tests_once "$@"
