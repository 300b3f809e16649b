#!/usr/bin/env bash
# Fuzzes whole programs: builds train_gpt2, those of dev/data and dev/test/fuzz/whole_program.c with
# AddressSanitizer and UndefinedBehaviorSanitizer below build/sanitize, then runs the programs on changed files. Prints a
# table. On a finding the exit status is 1, and the files are kept in build/fuzz/findings/whole_program-SEED/NUMBER.
#
#     dev/test/fuzz/fuzz_program.sh [FLAG ...]     further flags of whole_program: --first 123, --command resume, --list ...
#
#     FUZZ_RUNS=2000    number of runs
#     FUZZ_SEED=1       all choices of a run depend on this and on its number
#     FUZZ_JOBS=0       runs side by side; 0: one per core
#     CC=gcc            a compiler that has -fsanitize=address,undefined
set -u
cd "$(dirname "$0")/../../.." || exit 1
if [ "${1-}" = --help ] || [ "${1-}" = -h ]; then
    sed -n '2,/^set -u/s/^# \{0,1\}//p' dev/test/fuzz/fuzz_program.sh
    exit 0
fi
runs=${FUZZ_RUNS:-2000} seed=${FUZZ_SEED:-1} jobs=${FUZZ_JOBS:-0}
export CC=${CC:-gcc}
[[ $runs =~ ^[1-9][0-9]*$ ]] || { echo "error: FUZZ_RUNS is a whole number above 0, not '$runs'" >&2; exit 2; }
for number in "$seed" "$jobs"; do
    [[ $number =~ ^[0-9]+$ ]] || { echo "error: FUZZ_SEED and FUZZ_JOBS are whole numbers, not '$number'" >&2; exit 2; }
done

mkdir -p build/fuzz
if ! $CC -fsanitize=address,undefined -x c - -o build/fuzz/probe <<<'int main(void) { return 0; }' 2>build/fuzz/probe.log; then
    echo "skipped: $CC has no sanitizers (build/fuzz/probe.log): apt-get install gcc, or set CC="
    exit 0
fi
make --no-print-directory sanitize-programs >build/fuzz/build.log 2>&1 || {
    tail -n 20 build/fuzz/build.log
    echo "error: the programs do not build with sanitizers (build/fuzz/build.log)" >&2
    exit 1
}
exec build/sanitize/dev/test/fuzz/whole_program --programs build/sanitize --out build/fuzz --runs "$runs" --seed "$seed" \
    --jobs "$jobs" "$@"
