#!/usr/bin/env bash
# train_gpt2cu with several ranks on real GPUs: kernels, streams, events and graphs are real. The tests are run with NCCL
# itself, and some with fake_nccl.c, whose collectives are host functions on the stream. Needs nvcc, a GPU, and NCCL where the
# dynamic linker finds it, or in LLMC_NCCL, or in a Python package. Where there are several GPUs (CUDA_VISIBLE_DEVICES counts),
# ranks have one each and exchange data as NCCL likes best, and the tests of faults take them all. More ranks than GPUs share
# them (shared_card.c), which says nothing about speed. RANKS_BIN=DIR keeps the programs in DIR, and runs those that are already there.
nccl=${LLMC_NCCL-} data=${LLMC_DATA:-../shared/data} programs=${RANKS_BIN-}
LLMC_KILLS=${LLMC_KILLS:-5}
visible=${CUDA_VISIBLE_DEVICES-} cards=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -s -d ,)}
cards=$(tr , '\n' <<<"$cards" | grep -c .)
ranks=$((cards > 1 ? cards : 3)) # of the tests of faults
. "$(dirname "$0")/ranks.sh"
. "$(dirname "$0")/ranks_compute.sh"
[ -z "$visible" ] || export CUDA_VISIBLE_DEVICES=$visible
model=(--layers 3 --channels 128 --heads 2 --positions 32 -b 2 -t 32 --no-tune)
unit=64 limit=200
broken_card=(FAILING_CARD=launch:150)
program_of() { echo "$tmp/bin/$1/train_gpt2cu"; } # PRECISION

build() {
    nvidia-smi -L >/dev/null 2>&1 || skip "needs a GPU"
    if [ -n "$programs" ] && [ -d "$programs" ]; then
        cp -r "$programs/." "$tmp/bin/"
        return
    fi
    local arch pids=() pid precision
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    [ "$arch" != 90 ] || arch=90a
    for precision in FP32 BF16; do
        mkdir "$tmp/bin/$precision"
        nvcc -O1 -std=c++17 -gencode "arch=compute_$arch,code=sm_$arch" -Xcompiler -fopenmp -cudart shared -DENABLE_$precision \
            train_gpt2.cu -o "$(program_of $precision)" -lcublasLt -ldl >"$tmp/log$precision" 2>&1 & pids+=($!)
    done
    nvcc -O1 -shared -Xcompiler -fPIC -cudart shared dev/test/stand-ins/fake_nccl.c -o "$tmp/bin/fake_nccl.so" >"$tmp/log1" 2>&1 & pids+=($!)
    nvcc -O1 -shared -Xcompiler -fPIC -cudart shared dev/test/stand-ins/shared_card.c -o "$tmp/bin/shared_card.so" -ldl >"$tmp/log2" 2>&1 & pids+=($!)
    nvcc -O1 -shared -Xcompiler -fPIC -cudart shared -gencode "arch=compute_$arch,code=sm_$arch" dev/test/stand-ins/failing_card.cu \
        -o "$tmp/bin/failing_card.so" -ldl >"$tmp/log3" 2>&1 & pids+=($!)
    for pid in "${pids[@]}"; do wait "$pid" || { cat "$tmp"/log* && fail "does not compile"; }; done
    [ -z "$programs" ] || cp -r "$tmp/bin" "$programs"
}

# Sets what the runs load. Unless each rank has a GPU, NCCL must take the ranks for hosts of their own, with nothing but
# loopback between them.
with() { # LIBRARY [PRECISION [RANKS]]
    setup
    local library=$tmp/bin/fake_nccl.so
    if [ "$1" = nccl ]; then
        library=$nccl
        [ -n "$library" ] || library=$(ldconfig -p | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1)
        [ -n "$library" ] || library=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null) ||
            skip "needs NCCL: LLMC_NCCL=.../libnccl.so.2"
    fi
    preload=$tmp/bin/shared_card.so:$tmp/bin/failing_card.so
    before=(env SHARED_CARD=16 "LLMC_NCCL=$library")
    if [ "${3-$ranks}" -gt "$cards" ]; then hosts_apart; else before+=(SHARED_CARD_HOSTS=0); fi
    train=$(program_of "${2-BF16}")
}
hosts_apart() { before+=(NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1); }
# 20 steps of 124M on real text. In fp32, 2 ranks with 2 sequences have the losses of one rank with 4. In bf16 they differ as
# little as those of one rank with 4 and with 2 x 2.
test_d12_tinyshakespeare() {
    local precision out n flags
    [ -e "$data/tinyshakespeare.txt" ] || skip "needs tinyshakespeare.txt and gpt2_tokenizer in LLMC_DATA=$data"
    setup
    "$BIN_DIR/dev/data/tokenize" -i "$data/tinyshakespeare.txt" -t "$data/gpt2_tokenizer" -o "$tmp/ts" 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    for precision in FP32 BF16; do
        with nccl $precision
        for n in one:1:4 split:1:2 two:2:2; do
            out=$tmp/d12_$precision
            IFS=: read -r -a flags <<<"$n"
            timeout "$limit" env "LD_PRELOAD=$preload" "${before[@]}" "$train" --gpus "${flags[1]}" -b "${flags[2]}" --recipe llmc -e d12 -t 1024 -d 4096 -i "$tmp/ts_train_*.bin" \
                -x 20 -l 3e-4 -u 0 -q 1 -v 0 -s 0 >"$out.${flags[0]}.out" 2>"$out.${flags[0]}.err" </dev/null || fail "$(cat "$out.${flags[0]}.err")"
        done
        echo "note: $precision, largest relative differences of 20 losses and norms:" \
            "one rank that accumulates $(apart "$out.one" "$out.split"), two ranks $(apart "$out.one" "$out.two")"
        echo "note: a step of two ranks$([ "$cards" -gt 1 ] || echo " over sockets"):$(tail -n 1 "$out.two.out" | cut -d '|' -f 5)"
    done
    agree "$tmp/d12_FP32.one" "$tmp/d12_FP32.two" 1e-5
    near "bf16" "$tmp/d12_BF16.one" "$tmp/d12_BF16.two" \
        "$(apart "$tmp/d12_BF16.one" "$tmp/d12_BF16.split" | awk '{ print 1.5 * $1 }')"
}

# Two ranks that NCCL takes for two machines, joined by sockets, have the losses of two ranks on one machine.
test_two_machines() {
    [ "$cards" -gt 1 ] || skip "on one GPU every test has a machine for each rank"
    with nccl
    train 2 "$tmp/one_machine" 20 -n 0
    hosts_apart
    before+=(SHARED_CARD_HOSTS=1)
    train 2 "$tmp/two_machines" 20 -n 0
    near "two machines" "$tmp/one_machine" "$tmp/two_machines" 1e-6
    echo "note: a step on one machine:$(grep '^step' "$tmp/one_machine.out" | tail -n 1 | cut -d '|' -f 5), on two:" \
        "$(grep '^step' "$tmp/two_machines.out" | tail -n 1 | cut -d '|' -f 5)"
}

# Training waits no longer for a checkpoint of 124M with two ranks than with one. Medians of 3, and a fifth for chance.
test_save_pause() {
    with nccl BF16 2
    local n pauses=()
    cat llmc/*.h llmc/*.h llmc/*.h >"$tmp/text" # more tokens than a step of two ranks
    "$BIN_DIR/dev/data/tokenize" -i "$tmp/text" -o "$tmp/sources/a" --val-tokens 0 2>"$tmp/log" || fail "$(cat "$tmp/log")"
    find "$tmp/sources" -type f ! -name '*.bin' -delete # so that the model has GPT-2's vocabulary
    for n in 1 2; do
        timeout "$limit" env "LD_PRELOAD=$preload" "${before[@]}" "$train" --gpus $n -b 64 --recipe llmc -e d12 -t 1024 -d $((65536 * n)) \
            -i "$tmp/sources/*.bin" -x 181 -l 3e-4 -v 0 -s 0 -o "$tmp/pause$n" -n 60 -nk 1 >"$tmp/pause$n.out" 2>"$tmp/pause$n.err" \
            </dev/null || fail "$(cat "$tmp/pause$n.err")"
        pauses+=("$(sed -nE 's/^saved .*the run waited for ([0-9]+) ms.*/\1/p' "$tmp/pause$n.out" | sort -n | sed -n 2p)")
        echo "note: --gpus $n: $(grep '^saved ' "$tmp/pause$n.out" | sed -E 's/^saved [^ ]* //' | paste -s -d ' ')"
    done
    [ -n "${pauses[0]}" ] && [ -n "${pauses[1]}" ] || fail "no pauses: $(cat "$tmp"/pause?.out)"
    [ "$cards" -gt 1 ] || skip "needs two GPUs; on one, ${pauses[0]} ms and ${pauses[1]} ms"
    [ $((10 * pauses[1])) -le $((12 * pauses[0] + 20)) ] || fail "two ranks wait for ${pauses[1]} ms, one for ${pauses[0]} ms"
}

# Errors that NCCL gets from the driver while it looks for what the machine can do are its own affair.
test_memcheck() {
    with nccl
    command -v compute-sanitizer >/dev/null || skip "needs compute-sanitizer"
    before+=(compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 --print-limit 5)
    gpus 2 "$tmp/memcheck" 3 -n 2 -v 2 --timeout 600
    [ "$status" -eq 0 ] || cat "$tmp/memcheck.out" "$tmp/memcheck.err"
    want "the errors" "$status: $(grep -ah 'ERROR SUMMARY' "$tmp/memcheck.out" "$tmp/memcheck.err" | sort -u)" \
        "0: ========= ERROR SUMMARY: 0 errors"
}

# the tests of ranks_compute.sh
for name in fp32 bits zero; do eval "test_${name}_with_fake_nccl() { $name fake_nccl; }"; done
for name in fp32 bits zero muon fp8 other_numbers many_ranks; do eval "test_$name() { $name nccl; }"; done
# the tests of ranks.sh with NCCL
on_nccl() { with nccl && "test_$1"; }
shared=(hellaswag strangers signals faults one_rank_fails one_disk_is_full killed_at_the_start random_kills data_goes
    data_of_one_rank_goes output_goes rank0_dies)
for name in "${shared[@]}"; do eval "test_${name}_with_nccl() { on_nccl $name; }"; done

tests=(fp32_with_fake_nccl bits_with_fake_nccl zero_with_fake_nccl fp32 bits zero muon fp8 d12_tinyshakespeare other_numbers
    many_ranks two_machines save_pause "${shared[@]/%/_with_nccl}" memcheck)
run_tests_once "$@"
