# shellcheck shell=bash
# shellcheck disable=SC2154 # the script that sources this file sets tmp, unit and cards
# Tests of train_gpt2cu with several ranks that compute: their losses, norms and bits. test_ranks_on_a_gpu.sh runs them on real GPUs,
# test_emulated_ranks.sh with the kernels in the emulation of dev/cuda/emulation. A script sources this after ranks.sh, and has
#
#     with LIBRARY [PRECISION [RANKS]]   a function that sets up runs with NCCL or a stand-in for it; sets train and before
#     cards=...                          how many GPUs there are
#     bits_in=BF16                       the precision in which many_ranks compares bits (default: BF16)
# Each test takes the LIBRARY.

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
apart() { # OUT1 OUT2: the largest relative differences of losses, and of norms
    local what
    for what in losses norms; do
        paste -d ' ' <($what "$1") <($what "$2") |
            awk '{ n = NF / 2; d = $n / $NF - 1; if (d < 0) { d = -d } if (d > most) { most = d } } END { printf "%.1e ", most }'
    done
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

# Muon: two ranks have the losses of one, and a resumed run has the bits of one that was not interrupted.
muon() { # LIBRARY
    with "$1" FP32
    local out=$tmp/muon
    train 1 "$out.1" 10 -n 5 -l 3e-4 -b 4 --optimizer muon
    train 2 "$out.2" 10 -n 5 -l 3e-4 --optimizer muon
    agree "$out.1" "$out.2" 1e-5
    cp -r "$out.2" "$out.3" && rm -r "$out.3/step_00000010"
    train 2 "$out.3" 10 -n 5 -l 3e-4 --optimizer muon -y 1
    same "$out.2" "$out.3" 10
}

# --fp8: the ranks have the same scales, so two of them train as one; the same bits in every run, and after a resumption.
fp8() { # LIBRARY
    with "$1"
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

# A checkpoint of one rank goes on with two, and that of two with one.
other_numbers() { # LIBRARY
    with "$1" FP32
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
many_ranks() { # LIBRARY
    local many=$((cards < 8 ? 4 : 8)) out=$tmp/many i
    local calm=(-d $((2 * many * unit)) -n 5 -l 3e-4)
    with "$1" FP32 $many
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
    with "$1" "${bits_in:-BF16}" $((many / 2))
    for i in 4 5; do train $((many / 2)) "$out.$i" 10 "${calm[@]}"; done
    same "$out.4" "$out.5" 10
}
