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
    nvcc -O1 -shared -Xcompiler -fPIC -cudart shared dev/test/fake_nccl.c -o "$tmp/bin/fake_nccl.so" >"$tmp/log1" 2>&1 & pids+=($!)
    nvcc -O1 -shared -Xcompiler -fPIC -cudart shared dev/test/shared_card.c -o "$tmp/bin/shared_card.so" -ldl >"$tmp/log2" 2>&1 & pids+=($!)
    nvcc -O1 -shared -Xcompiler -fPIC -cudart shared -gencode "arch=compute_$arch,code=sm_$arch" dev/test/failing_card.cu \
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
# train RANKS OUT STEPS [FLAGS]: a run that succeeds
train() {
    gpus "$@"
    good "$1 ranks" "$2"
}
norms() { sed -nE 's/.*(step +[0-9]+)\/.* norm ([0-9.]+).*/\1 \2/p' "$1.out"; } # OUT

# agree OUT1 OUT2 LIMIT: losses and norms agree but for LIMIT, relatively, and for the rounding of a norm to 4 decimals
agree() {
    near "$2" "$1" "$2" "$3"
    paste -d ' ' <(norms "$1") <(norms "$2") | awk -v limit="$3" '
        { d = $3 - $6; if (d < 0) { d = -d } if (!(d <= limit * $3 + 1.01e-4)) { print; bad = 1 } } END { exit bad || NR < 4 }' ||
        fail "the norms of $1 and $2 differ"
}

# In fp32, ranks with B sequences each train as one rank with all of them.
fp32() { # LIBRARY
    with "$1" FP32
    local out=$tmp/fp32_$1 calm=(-n 0 -l 3e-4) # at a high rate losses of any two ways to compute them part soon
    train 1 "$out.1" 20 -b 4 "${calm[@]}"
    train 2 "$out.2" 20 "${calm[@]}"
    agree "$out.1" "$out.2" 1e-5
    train 2 "$out.all" 20 "${calm[@]}" -z 0
    agree "$out.1" "$out.all" 1e-5
    train 2 "$out.accumulated" 20 "${calm[@]}" -b 1 -m 4
    agree "$out.1" "$out.accumulated" 1e-5
    with "$1" FP32 3
    train 1 "$out.3one" 20 "${calm[@]}" -d $((6 * unit)) -b 6
    train 3 "$out.3" 20 "${calm[@]}" -d $((6 * unit))
    agree "$out.3one" "$out.3" 1e-5
}
test_fp32_with_fake_nccl() { fp32 fake_nccl; }
test_fp32() { fp32 nccl; }

# The same bits with and without graphs, in every run, and after a resumption.
bits() { # LIBRARY
    local precision flags out=$tmp/bits_$1
    for precision in BF16 FP32; do
        with "$1" $precision
        train 2 "$out.1" 10 -b 1 -n 5 # 4 micro-batches: both graphs
        for flags in --no-graph ""; do
            # shellcheck disable=SC2086
            train 2 "$out.2" 10 -b 1 -n 5 $flags
            same "$out.1" "$out.2" 10
            rm -r "$out.2"
        done
        cp -r "$out.1" "$out.2" && rm -r "$out.2/step_00000010"
        train 2 "$out.2" 10 -b 1 -n 5 -y 1
        contains "resumed at step 5 " "$out.2.out"
        same "$out.1" "$out.2" 10
        rm -r "$out".[12]
    done
    with "$1"
    train 2 "$out.3" 10 -n 5 --stochastic-rounding
    cp -r "$out.3" "$out.4" && rm -r "$out.4/step_00000010"
    train 2 "$out.4" 10 -n 5 --stochastic-rounding -y 1
    same "$out.3" "$out.4" 10
}
test_bits_with_fake_nccl() { bits fake_nccl; }
test_bits() { bits nccl; }

# Without clipping, ZeRO-1 of two ranks changes no bit. Beside exchanges, cuBLASLt may choose other algorithms, and -z 0 exchanges
# nothing during a forward pass.
zero() { # LIBRARY
    local precision optimizer z out
    for precision in BF16 FP32; do
        with "$1" $precision
        for optimizer in adamw muon; do
            for z in 0 1; do
                out=$tmp/zero_$1_$precision$optimizer.$z
                train 2 "$out" 10 -z $z --clip 0 --optimizer $optimizer --overlap off
            done
            same "${out%.1}.0" "$out" 10
        done
    done
}
test_zero_with_fake_nccl() { zero fake_nccl; }
test_zero() { zero nccl; }

# Muon: two ranks have the losses of one, and a resumed run has the bits of one that was not interrupted.
test_muon() {
    with nccl FP32
    local out=$tmp/muon
    train 1 "$out.1" 10 -n 5 -l 3e-4 -b 4 --optimizer muon
    train 2 "$out.2" 10 -n 5 -l 3e-4 --optimizer muon
    agree "$out.1" "$out.2" 1e-5
    cp -r "$out.2" "$out.3" && rm -r "$out.3/step_00000010"
    train 2 "$out.3" 10 -n 5 -l 3e-4 --optimizer muon -y 1
    same "$out.2" "$out.3" 10
}

# --fp8: the ranks have the same scales, so two of them train as one; the same bits in every run, and after a resumption.
test_fp8() {
    with nccl
    local out=$tmp/fp8 calm=(-n 5 -l 3e-4 --fp8)
    train 1 "$out.1" 10 "${calm[@]}" -b 4
    train 2 "$out.2" 10 "${calm[@]}"
    near 2 "$out.1" "$out.2" 5e-3 # a difference of rounding in bf16 grows where a value is rounded to 8 bits
    cp -r "$out.2" "$out.3" && rm -r "$out.3/step_00000010"
    train 2 "$out.3" 10 "${calm[@]}" -y 1
    contains "resumed at step 5 " "$out.3.out"
    same "$out.2" "$out.3" 10
    rm -r "$out.2"
    train 2 "$out.2" 10 "${calm[@]}"
    same "$out.2" "$out.3" 10
}

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
            timeout "$limit" env "LD_PRELOAD=$preload" "${before[@]}" "$train" --gpus "${flags[1]}" -b "${flags[2]}" -e d12 -t 1024 -d 4096 -i "$tmp/ts_train_*.bin" \
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
        timeout "$limit" env "LD_PRELOAD=$preload" "${before[@]}" "$train" --gpus $n -b 64 -e d12 -t 1024 -d $((65536 * n)) \
            -i "$tmp/sources/*.bin" -x 181 -l 3e-4 -v 0 -s 0 -o "$tmp/pause$n" -n 60 -nk 1 >"$tmp/pause$n.out" 2>"$tmp/pause$n.err" \
            </dev/null || fail "$(cat "$tmp/pause$n.err")"
        pauses+=("$(sed -nE 's/^saved .*the run waited for ([0-9]+) ms.*/\1/p' "$tmp/pause$n.out" | sort -n | sed -n 2p)")
        echo "note: --gpus $n: $(grep '^saved ' "$tmp/pause$n.out" | sed -E 's/^saved [^ ]* //' | paste -s -d ' ')"
    done
    [ -n "${pauses[0]}" ] && [ -n "${pauses[1]}" ] || fail "no pauses: $(cat "$tmp"/pause?.out)"
    [ "$cards" -gt 1 ] || skip "needs two GPUs; on one, ${pauses[0]} ms and ${pauses[1]} ms"
    [ $((10 * pauses[1])) -le $((12 * pauses[0] + 20)) ] || fail "two ranks wait for ${pauses[1]} ms, one for ${pauses[0]} ms"
}

apart() { # OUT1 OUT2: the largest relative differences of losses, and of norms
    local what
    for what in losses norms; do
        paste -d ' ' <($what "$1") <($what "$2") |
            awk '{ n = NF / 2; d = $n / $NF - 1; if (d < 0) { d = -d } if (d > most) { most = d } } END { printf "%.1e ", most }'
    done
}

# A checkpoint of one rank goes on with two, and that of two with one.
test_other_numbers() {
    with nccl FP32
    local out=$tmp/numbers i
    train 1 "$out.1" 15 -b 4 -n 5 -l 3e-4
    cp -r "$out.1" "$out.2" && rm -r "$out".2/step_000000{10,15}
    train 2 "$out.2" 15 -n 5 -y 1 -l 3e-4
    cp -r "$out.2" "$out.3" && rm -r "$out.3/step_00000015"
    train 1 "$out.3" 15 -n 5 -y 1 -b 4 -l 3e-4
    contains "resumed at step 10 " "$out.3.out"
    for i in 1 3; do grep -E '^step *1[1-5]/' "$out.$i.out" >"$out.end$i.out"; done
    agree "$out.end1" "$out.end3" 1e-5
}

# Eight ranks, or four if there are fewer GPUs. Steps 1 to 5 by all of them, 6 to 10 by half as many, 11 to 15 by all and, from the
# same checkpoint, by a quarter: the losses of a run by all. -b keeps the number of sequences in a micro-batch of all ranks. Half as many
# ranks have the same bits in every run.
test_many_ranks() {
    local many=$((cards < 8 ? 4 : 8)) out=$tmp/many i
    local calm=(-d $((2 * many * unit)) -n 5 -l 3e-4)
    with nccl FP32 $many
    train $many "$out.1" 15 "${calm[@]}"
    cp -r "$out.1" "$out.2" && rm -r "$out".2/step_000000{10,15}
    train $((many / 2)) "$out.2" 15 "${calm[@]}" -y 1 -b 4
    rm -r "$out.2/step_00000015"
    cp -r "$out.2" "$out.3"
    train $many "$out.2" 15 "${calm[@]}" -y 1
    train $((many / 4)) "$out.3" 15 "${calm[@]}" -y 1 -b 8
    for i in 2 3; do contains "resumed at step 10 " "$out.$i.out"; done
    for i in 1 2 3; do grep -E '^step *1[1-5]/' "$out.$i.out" >"$out.end$i.out"; done
    for i in 2 3; do agree "$out.end1" "$out.end$i" 1e-5; done
    echo "note: $many, $((many / 2)), $many ranks against $many: losses and norms apart by $(apart "$out.end1" "$out.end2");" \
        "$many, $((many / 2)), $((many / 4)): $(apart "$out.end1" "$out.end3")"
    with nccl BF16 $((many / 2))
    for i in 4 5; do train $((many / 2)) "$out.$i" 10 "${calm[@]}"; done
    same "$out.4" "$out.5" 10
}

# Errors that NCCL gets from the driver while it looks for what the machine can do are its own affair.
test_memcheck() {
    with nccl
    command -v compute-sanitizer >/dev/null || skip "needs compute-sanitizer"
    before+=(compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 --print-limit 5)
    gpus 2 "$tmp/memcheck" 3 -n 2 -v 2 --timeout 600
    [ $status -eq 0 ] || cat "$tmp/memcheck.out" "$tmp/memcheck.err"
    want "the errors" "$status: $(grep -ah 'ERROR SUMMARY' "$tmp/memcheck.out" "$tmp/memcheck.err" | sort -u)" \
        "0: ========= ERROR SUMMARY: 0 errors"
}

# the tests of ranks.sh with NCCL
on_nccl() { with nccl && "test_$1"; }
shared=(hellaswag strangers signals faults one_rank_fails one_disk_is_full killed_at_the_start random_kills data_goes
    data_of_one_rank_goes output_goes rank0_dies)
for name in "${shared[@]}"; do eval "test_${name}_with_nccl() { on_nccl $name; }"; done

tests=(fp32_with_fake_nccl bits_with_fake_nccl zero_with_fake_nccl fp32 bits zero muon fp8 d12_tinyshakespeare other_numbers
    many_ranks two_machines save_pause "${shared[@]/%/_with_nccl}" memcheck)
run_tests_once "$@"
