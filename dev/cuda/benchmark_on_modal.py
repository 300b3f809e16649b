"""Compiles and runs a program of dev/cuda on a GPU of Modal (modal.com), for users who have no such GPU.

    pip install modal && modal setup                once
    GPU_NAME=H200 modal run benchmark_on_modal.py \\
        --compile-command "make layernorm_forward" --run-command "./layernorm_forward 4"
    GPU_MEM=80 modal run benchmark_on_modal.py \\
        --compile-command "nvcc -O3 --use_fast_math attention_forward.cu -o attention_forward -lcublas" \\
        --run-command "./attention_forward 1"
    GPU_NAME=H100 modal run -w h100.json benchmark_on_modal.py \\
        --compile-command "make gelu_forward" --run-command "./gelu_forward --json out.json"

Environment: GPU_NAME (default A100), GPU_MEM in GB if a GPU comes in several sizes, N_GPUS (default 1). A100 without
GPU_MEM has 40 GB. H100 is never replaced by a better GPU, because the results would not be those of an H100.

The repository is copied to Modal in its current state, committed or not, and both commands run in dev/cuda. There is no
shell: commands are split into words as a shell does it, and NAME=value before a command works. For anything else use
bash -c '...'. The output of the commands is streamed. If a command fails, the run ends with exit code 1; a usage error
is one line and exit code 2. If the run command has --json FILE, the run returns the text of that file, so that
`modal run -w` saves it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import modal

# the GPUs that Modal offers and their memory in GB; the first size is the default if GPU_MEM is not set
GPUS = {
    "T4": [16],
    "L4": [24],
    "A10": [24],
    "L40S": [48],
    "A100": [40, 80],
    "RTX-PRO-6000": [96],
    "H100": [80],
    "H200": [141],
    "B200": [192],
}
CUDA_IMAGE = "nvidia/cuda:12.9.1-devel-ubuntu22.04"  # with nvcc, cuBLAS, NCCL, make and g++
TREE = "/llmc"  # path of the repository in the container
TIMEOUT_S = 60 * 60  # for compilation and run together
# as in .dockerignore: files that are built, downloaded or not needed to build a program of dev/cuda
IGNORED = [
    ".git",
    "build",
    "data",
    "demo",
    "dev/test",
    "train_gpt2",
    "train_gpt2cu",
    "test_gpt2cu",
    "dev/data/*",
    "!dev/data/*.*",
    "dev/cuda/*",
    "!dev/cuda/*.*",
    "!dev/cuda/Makefile",
    "**/__pycache__",
]


def usage_error(text):
    print(f"benchmark_on_modal.py: {text}", file=sys.stderr)
    sys.exit(2)


def gpu_string(environment):
    """The GPU string for Modal: GPU_NAME=a100 GPU_MEM=80 N_GPUS=2 gives "A100-80GB:2". Raises ValueError."""
    wanted = environment.get("GPU_NAME") or "A100"
    match = re.fullmatch(r"(.+?)!?(?:-(\d+)GB)?", wanted.upper())
    name = match.group(1) if match else ""
    if name not in GPUS:
        raise ValueError(f"GPU_NAME={wanted} is not known; known are {', '.join(GPUS)}")
    sizes = [str(size) for size in GPUS[name]]
    memory = environment.get("GPU_MEM") or match.group(2) or sizes[0]
    if memory not in sizes or match.group(2) not in (None, memory):
        raise ValueError(f"GPU_NAME={wanted} does not come with GPU_MEM={memory}; {name} has {' or '.join(sizes)} GB")
    count = environment.get("N_GPUS") or "1"
    most = 4 if name == "A10" else 8
    if not re.fullmatch("[0-9]+", count) or not 1 <= int(count) <= most:
        raise ValueError(f"N_GPUS={count} is not a number from 1 to {most}")
    gpu = f"{name}-{memory}GB" if len(sizes) > 1 else name
    if name == "H100":
        gpu += "!"  # without it, Modal may provide a newer GPU instead
    return gpu if int(count) == 1 else f"{gpu}:{int(count)}"


def split_command(text):
    """Splits a command into words. Raises ValueError if the command needs a shell."""
    words = shlex.shlex(text, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    words.commenters = ""
    try:
        words = list(words)
    except ValueError as error:  # an unclosed quote
        raise ValueError(f"'{text}': {error}") from None
    if not words:
        raise ValueError("a command is empty")
    for word in words:
        if word and set(word) <= set("();<>|&"):
            raise ValueError(f"'{text}': there is no shell that knows '{word}'; use bash -c '...'")
    return words


def json_path(words):
    """Returns the FILE of --json FILE or --json=FILE, or None."""
    for word, following in zip(words, words[1:] + [None]):
        if word == "--json":
            return following
        if word.startswith("--json="):
            return word.partition("=")[2]
    return None


def compile_and_run(tree, compile_words, run_words):
    """Runs both commands in a copy of `tree`, which may be read-only. Returns (error text or None, text of --json)."""
    with tempfile.TemporaryDirectory() as directory:
        folder = shutil.copytree(tree, Path(directory) / "llmc") / "dev" / "cuda"
        for words in (compile_words, run_words):
            print("$", shlex.join(words), flush=True)
            status = subprocess.run(["env", "--", *words], cwd=folder).returncode  # env handles NAME=value
            if status != 0:
                reason = f"status {status}" if status > 0 else f"signal {-status}"
                return f"'{shlex.join(words)}' ended with {reason}", None
        path = json_path(run_words)
        if path is None:
            return None, None
        try:
            return None, (folder / path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            return f"--json {path} cannot be read: {error}", None


app = modal.App("llmc-benchmark")
image = modal.Image.from_registry(CUDA_IMAGE, add_python="3.12")
gpu = None
if modal.is_local():  # the container imports this file again, but needs none of this there
    try:
        gpu = gpu_string(os.environ)
    except ValueError as error:
        usage_error(error)
    image = image.add_local_dir(Path(__file__).resolve().parents[2], TREE, ignore=IGNORED)


@app.function(image=image, gpu=gpu, timeout=TIMEOUT_S)
def run_on_gpu(compile_words, run_words):
    return compile_and_run(TREE, compile_words, run_words)


@app.local_entrypoint()
def main(compile_command: str, run_command: str):
    try:
        commands = split_command(compile_command), split_command(run_command)
    except ValueError as error:
        usage_error(error)
    print(f"on {gpu}:", flush=True)
    failure, result = run_on_gpu.remote(*commands)
    if failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(1)
    return result
