#!/usr/bin/env bash
# llmc/nccl.h with several ranks and no GPU: nccl_program.c on fake_nccl.c and fake_cuda.c. Needs the headers of CUDA.
. "$(dirname "$0")/../test.sh"
unset "${!FAKE_CUDA_@}" "${!FAKE_NCCL_@}" "${!NCCL_@}" CUDA_VISIBLE_DEVICES
cuda=${CUDA_HOME:-/usr/local/cuda}
log=$tmp/log

# Builds the program and both stand-ins in DIR.
build() { # DIR [FLAGS]
    [ -e "$1" ] && return
    [ -e "$cuda/include/cublasLt.h" ] || skip "needs the headers of CUDA in $cuda"
    local flags=(-O1 -g -Wall -Wextra -Werror -I"$cuda/include" "${@:2}") new=$1.new
    mkdir -p "$new"
    "$CC" "${flags[@]}" -shared -fPIC dev/test/stand-ins/fake_cuda.c -o "$new/fake_cuda.so" -lm
    "$CC" "${flags[@]}" -shared -fPIC dev/test/stand-ins/fake_nccl.c -o "$new/fake_nccl.so"
    "$CC" "${flags[@]}" dev/test/stand-ins/nccl_program.c -o "$new/program" "$new/fake_cuda.so" -Wl,-rpath,"$1" -lm -lpthread -ldl
    mv "$new" "$1"
    ln -s "$1" "$new" # the program knows its fake_cuda.so by this name
}

# ranks NUM SCENARIO: runs the program and sets `status`; its output goes to $log
ranks() {
    build "$tmp/bin"
    status=0
    LLMC_NCCL=$tmp/bin/fake_nccl.so timeout 60 "$tmp/bin/program" "$@" >"$log" 2>&1 </dev/null || status=$?
}
output() { want "the output" "$(cat "$log")" "$1"; } # TEXT: the whole of it

ended() { # NUM: this many ranks have exited with 0, and the others said why they did not
    want "the number of ranks that succeeded" "$(grep -c '^rank [0-9]*: exit 0$' "$log")" "$1"
}

test_collectives() {
    local num eager
    for num in 1 2 3 5; do
        for eager in 0 1; do
            FAKE_CUDA_EAGER=$eager ranks $num collectives
            want "the exit code of $num ranks" "$status: $(grep -v ': exit 0$' "$log")" "0: "
        done
    done
}

# what ran on the streams is counted: three launches of one graph as well
test_counts() {
    FAKE_NCCL_COUNT=$tmp/count ranks 2 collectives
    want "exit code" $status 0
    want "what ran in rank 1" "$(grep '^ran' "$tmp/count.1")" "$(grep '^ran' "$tmp/count.0")"
    local calls runs
    calls=$(sed -n 's/^calls ncclAllReduce //p' "$tmp/count.0")
    runs=$(sed -n 's/^ran all_reduce \([0-9]*\) .*/\1/p' "$tmp/count.0")
    want "runs" "$runs" $((calls + 2))
    want "the configuration" "$(grep '^config' "$tmp/count.0")" 'config 0 2 8'
    want "calls of ncclCommDestroy" "$(grep 'Destroy' "$tmp/count.0")" 'calls ncclCommDestroy 1'
}

test_group() {
    ranks 2 group
    local invalid='invalid argument (run with NCCL_DEBUG=WARN for details): invalid root 99'
    output "sum 3, maximum 2, broadcast 1, rest 1
NCCL: broadcast of 32 bytes, rank 0 of 2: $invalid
NCCL: ncclGroupEnd of 1 calls, rank 0 of 2: $invalid
rank 0: exit 0
sum 3, maximum 2, broadcast 1, rest 2
NCCL: broadcast of 32 bytes, rank 1 of 2: $invalid
NCCL: ncclGroupEnd of 1 calls, rank 1 of 2: $invalid
rank 1: exit 0"
}

# two streams of each rank, with events between them, also in a graph; a card for each rank
test_streams() {
    FAKE_CUDA_DEVICES=2 ranks 2 streams
    output "device 0, streams: 02020202
device 0, graph: 02020202
capturing stream has unjoined work
rank 0: exit 0
device 1, streams: 02020202
device 1, graph: 02020202
capturing stream has unjoined work
rank 1: exit 0"
}

# the stand-in shows what a program must wait for
test_impatient() {
    ranks 1 impatient
    output "result 7, number 1
NCCL: all_reduce of 32 bytes, rank 0 of 1: invalid argument (run with NCCL_DEBUG=WARN for details): Attempt to use communicator before the previous operation returned ncclSuccess
rank 0: exit 0"
}

test_mismatch() {
    local line='fake_nccl: rank 0 calls all_reduce (sum) of 16 float32, rank 2 calls all_gather of 8 bfloat16: all ranks must make the same calls in the same order'
    ranks 3 mismatch
    output "$line
rank 0: signal 6
$line
rank 1: signal 6
$line
rank 2: signal 6"
}

test_peer_dies() {
    ranks 3 dies
    output "a collective hangs
NCCL: all_reduce of 64 bytes, rank 0 of 3: the communicator was aborted
rank 0: exit 0
a collective hangs
NCCL: all_reduce of 64 bytes, rank 1 of 3: the communicator was aborted
rank 1: exit 0
rank 2: signal 9"
}

test_peer_is_absent() {
    ranks 3 absent
    output "error: NCCL: connecting rank 0 with 2 others: not done after 0.3 s: is another rank gone?
rank 0: exit 1
error: NCCL: connecting rank 1 with 2 others: not done after 0.3 s: is another rank gone?
rank 1: exit 1
rank 2: exit 0"
}

# a collective that hangs on the stream of one rank hangs in all of them; each has its own watchdog
test_collective_hangs() {
    FAKE_NCCL_HANG=ncclAllReduce:4 FAKE_NCCL_RANK=1 ranks 2 watched
    output "a collective hangs
NCCL: all_reduce of 64 bytes, rank 0 of 2: the communicator was aborted
rank 0: exit 0
a collective hangs
NCCL: all_reduce of 64 bytes, rank 1 of 2: the communicator was aborted
rank 1: exit 0"
}

# NCCL is busy for ever with putting a collective on its stream; the abort comes from another thread
test_never_on_the_stream() {
    FAKE_NCCL_HANG=ncclGroupEnd:4 ranks 1 watched_group
    output "a collective hangs
NCCL: ncclGroupEnd of 1 calls, rank 0 of 1: aborted
rank 0: exit 0"
}

test_asynchronous_error() {
    FAKE_NCCL_ASYNC=5 FAKE_NCCL_RANK=0 ranks 1 watched
    local reason='remote process exited or there was a network error: connection closed by a peer that FAKE_NCCL_ASYNC invented'
    contains "NCCL: rank 0 of 1: $reason" "$log" # the watchdog's line
    contains "NCCL: all_reduce of 64 bytes, rank 0 of 1: " "$log"
    ended 1
}

test_errors() {
    local cuda='unhandled cuda error (run with NCCL_DEBUG=INFO for details)'
    FAKE_NCCL_FAIL=ncclGetUniqueId:1:2 ranks 1 close
    output "error: NCCL: ncclGetUniqueId: unhandled system error (run with NCCL_DEBUG=INFO for details): ncclGetUniqueId was told to fail
rank 0: exit 1"
    FAKE_NCCL_FAIL=ncclCommInitRankConfig:1:1 ranks 1 close
    output "error: NCCL: connecting rank 0 with 0 others: $cuda: ncclCommInitRankConfig was told to fail
rank 0: exit 1"
    FAKE_NCCL_FAIL=ncclCommFinalize:1:1 ranks 1 close
    output "error: NCCL: ncclCommFinalize: $cuda: ncclCommFinalize was told to fail
rank 0: exit 1"
    FAKE_NCCL_FAIL=ncclCommDestroy:1:1 ranks 1 close
    output "error: NCCL: ncclCommDestroy: $cuda: ncclCommDestroy was told to fail
rank 0: exit 1"
    FAKE_NCCL_FAIL=ncclGroupStart:1:3 ranks 1 group
    contains "NCCL: ncclGroupStart: internal error - please report this issue to the NCCL developers" "$log"
    FAKE_NCCL_FAIL=ncclReduceScatter:5:6 ranks 1 collectives
    output "error: NCCL: reduce_scatter of 4000 bytes, rank 0 of 1: remote process exited or there was a network error: ncclReduceScatter was told to fail
rank 0: exit 1"
    FAKE_CUDA_FAIL=cudaMallocHost:1:cudaErrorMemoryAllocation ranks 1 close
    output "error: NCCL: connecting rank 0 with 0 others: $cuda: Cuda failure 'out of memory'
rank 0: exit 1"
    FAKE_NCCL_HANG=ncclCommFinalize:1 ranks 1 close
    output "error: NCCL: ncclCommFinalize: not done after 2 s: is another rank gone?
rank 0: exit 1"
    FAKE_NCCL_VERSION=21703 ranks 1 close
    contains "NCCL 2.17.3 is too old" "$log"
}

test_slow() {
    local begin=${EPOCHREALTIME/./}
    FAKE_NCCL_SLOW_MS=150 ranks 2 group
    [ $((${EPOCHREALTIME/./} - begin)) -ge 450000 ] || fail "three collectives took less than 450 ms"
    ended 2
}

# no process and no shared memory is left when all ranks are killed at some moment
test_nothing_is_left() {
    build "$tmp/bin"
    local before pid
    before=$(ls -A /dev/shm 2>/dev/null || true)
    for _ in 1 2 3 4 5 6; do
        LLMC_NCCL=$tmp/bin/fake_nccl.so setsid "$tmp/bin/program" 3 collectives >"$log" 2>&1 </dev/null &
        pid=$!
        sleep "0.0$((RANDOM % 90 + 10))"
        kill -9 -- -$pid 2>/dev/null || true
        wait $pid 2>/dev/null || true
    done
    want "/dev/shm" "$(ls -A /dev/shm 2>/dev/null || true)" "$before"
}

test_sanitized() {
    wants_more
    build "$tmp/sane" -fsanitize=address,undefined -fno-sanitize-recover=all
    local scenario
    for scenario in collectives group dies; do
        ASAN_OPTIONS=${ASAN_OPTIONS-}:detect_leaks=0 LLMC_NCCL=$tmp/sane/fake_nccl.so timeout 60 "$tmp/sane/program" 3 $scenario >"$log" 2>&1 ||
            [ $scenario = dies ] || { cat "$log" && fail "$scenario"; }
        ! grep -E 'ERROR: |runtime error' "$log" || fail "$scenario"
    done
}

# the watchdog's thread and the training's
test_races() {
    command -v clang >/dev/null || skip "needs clang"
    echo 'int main(void) { return 0; }' >"$tmp/empty.c"
    clang -fsanitize=thread "$tmp/empty.c" -o "$tmp/empty" 2>/dev/null || skip "this clang has no ThreadSanitizer"
    local CC=clang fixed=() scenario
    build "$tmp/threads" -fsanitize=thread
    ! setarch -R true 2>/dev/null || fixed=(setarch -R) # the sanitizer needs fixed addresses on some kernels
    for scenario in collectives dies watched; do
        LLMC_NCCL=$tmp/threads/fake_nccl.so timeout 60 "${fixed[@]}" "$tmp/threads/program" 2 $scenario >"$log" 2>&1 || true
        ! grep -A 20 'WARNING: ThreadSanitizer' "$log" || fail "$scenario"
        contains "rank 0: exit 0" "$log"
    done
}

tests=(collectives counts group streams impatient mismatch peer_dies peer_is_absent collective_hangs never_on_the_stream
    asynchronous_error errors slow nothing_is_left sanitized races)
run_tests_once "$@"
