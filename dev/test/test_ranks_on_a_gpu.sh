#!/usr/bin/env bash
# train_gpt2cu with several ranks on ONE real GPU: the kernels, streams, events and graphs are real, and fake_nccl.c stands in
# for NCCL, which refuses two ranks on a GPU. Needs nvcc and a GPU. What the hosts do is tested by test_several_gpus.sh.
. "$(dirname "$0")/test.sh"
export PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 # the models are tiny
unset "${!FAKE_NCCL_@}" "${!LLMC_@}" CUDA_VISIBLE_DEVICES
export LLMC_NCCL=$tmp/bin/fake_nccl.so
mkdir "$tmp/bin"
runs=0

setup() {
    [ -e "$tmp/data" ] && return
    nvidia-smi -L >/dev/null 2>&1 || skip "needs a GPU"
    command -v nvcc >/dev/null || skip "needs nvcc"
    [ -x "$BIN_DIR/dev/data/tokenize" ] || fail "dev/data/tokenize is not there: make all"
    local arch pids=() pid precision
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    [ "$arch" != 90 ] || arch=90a
    local flags=(-O1 -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch")
    for precision in FP32 BF16; do
        nvcc "${flags[@]}" -Xcompiler -fopenmp -DENABLE_$precision train_gpt2.cu -o "$tmp/bin/$precision" -lcublasLt -ldl \
            >"$tmp/log$precision" 2>&1 & pids+=($!)
    done
    nvcc -O1 -shared -Xcompiler -fPIC dev/test/fake_nccl.c -o "$LLMC_NCCL" >"$tmp/log" 2>&1 & pids+=($!)
    for pid in "${pids[@]}"; do wait "$pid" || { cat "$tmp"/log* && fail "does not compile"; }; done
    mkdir "$tmp/data.new"
    head -c 30000 llmc/training.h >"$tmp/text"
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/data.new/a" -v 3000 -s 30000 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    mv "$tmp/data.new" "$tmp/data"
}

# train PRECISION RANKS OUT STEPS [FLAGS]: fails unless all ranks succeed. -b is the batch of a rank, 256 tokens are a step.
train() {
    setup
    local precision=$1 num=$2 out=$3 r pids=() pid failed=
    local flags=(-e d6 --layers 3 --channels 128 --heads 2 --positions 32 -b 2 -t 32 -d 256 -i "$tmp/data/*_train_*.bin"
        -j "$tmp/data/*_val_*.bin" -o "$out" -x "$4" -l 0.003 -u 2 -q 0.1 -c 0.1 -v 5 -m 2 -s 0 -n 5 -nk 0 --no-tune "${@:5}")
    runs=$((runs + 1))
    for ((r = num - 1; r >= 0; r--)); do
        local env=(LLMC_RANK=$r LLMC_NUM_RANKS=$num LLMC_LOCAL_RANK=$r LLMC_ADDRESS=127.0.0.1
            LLMC_PORT=$((22000 + ($$ * 13 + runs) % 8000)))
        [ "$num" -gt 1 ] || env=()
        env "${env[@]}" timeout 200 "$tmp/bin/$precision" "${flags[@]}" >"$out.$r.out" 2>"$out.$r.err" </dev/null & pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=yes; done
    [ -z "$failed" ] || fail "$num ranks: $(cat "$out".*.err)"
}
losses() { sed -nE 's/.*(step +[0-9]+)\/[0-9]+ \| loss ([0-9.]+).*norm ([0-9.]+).*/\1 \2 \3/p' "$1.0.out"; } # OUT

# near OUT1 OUT2 LIMIT: losses and norms agree but for LIMIT, relatively
near() {
    [ "$(losses "$1" | wc -l)" -ge 10 ] || fail "no losses: $(tail -n 3 "$1.0.out")"
    paste -d ' ' <(losses "$1") <(losses "$2") | awk -v limit="$3" '
        function apart(x, y) { d = x > y ? x - y : y - x; return !(d <= limit * x) }
        { if ($2 != $6 || apart($3, $7) || apart($4, $8)) { print; bad = 1 } } END { exit bad }' || fail "losses of $1 and $2 differ"
}
same() { # OUT1 OUT2 STEP
    local file name
    name=$(printf 'step_%08d' "$3")
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/$name/$file" "$2/$name/$file" || fail "$name/$file of $1 and $2 differ"
    done
}

# In fp32, ranks with B sequences each train as one rank with all of them.
test_fp32() {
    train FP32 1 "$tmp/f1" 20 -b 4
    train FP32 2 "$tmp/f2" 20
    near "$tmp/f1" "$tmp/f2" 1e-5
    train FP32 2 "$tmp/f2all" 20 -z 0
    near "$tmp/f1" "$tmp/f2all" 1e-5
    train FP32 3 "$tmp/f3" 20 -d 192
    train FP32 1 "$tmp/f3one" 20 -d 192 -b 6
    near "$tmp/f3one" "$tmp/f3" 1e-5
    train FP32 2 "$tmp/accumulated" 20 -b 1
    near "$tmp/f1" "$tmp/accumulated" 1e-5
}

# The same bits with and without graphs, in every run, and after a resumption.
test_bits() {
    local precision
    for precision in BF16 FP32; do
        train $precision 2 "$tmp/b1" 10 -b 1 # 4 micro-batches: both graphs
        train $precision 2 "$tmp/b2" 10 -b 1 --no-graph
        same "$tmp/b1" "$tmp/b2" 10
        cp -r "$tmp/b1" "$tmp/b3" && rm -r "$tmp/b3/step_00000010"
        train $precision 2 "$tmp/b3" 10 -b 1 -y 1
        same "$tmp/b1" "$tmp/b3" 10
        rm -r "$tmp"/b[123]
    done
    train BF16 2 "$tmp/s1" 10 --stochastic-rounding
    cp -r "$tmp/s1" "$tmp/s2" && rm -r "$tmp/s2/step_00000010"
    train BF16 2 "$tmp/s2" 10 --stochastic-rounding -y 1
    same "$tmp/s1" "$tmp/s2" 10
}

# A checkpoint of two ranks goes on with one, and the other way round.
test_other_numbers() {
    train FP32 1 "$tmp/n1" 15 -b 4
    cp -r "$tmp/n1" "$tmp/n2" && rm -r "$tmp"/n2/step_000000{10,15}
    train FP32 2 "$tmp/n2" 15 -y 1
    cp -r "$tmp/n2" "$tmp/n3" && rm -r "$tmp/n3/step_00000015"
    train FP32 1 "$tmp/n3" 15 -y 1 -b 4
    paste -d ' ' <(losses "$tmp/n1" | tail -n 5) <(losses "$tmp/n3") |
        awk '{ d = $3 - $7; if (!(d * d <= (1e-5 * $3) ^ 2)) { print; bad = 1 } } END { exit bad || NR != 5 }' || fail "other losses"
}

tests=(fp32 bits other_numbers)
run_tests_once "$@"
