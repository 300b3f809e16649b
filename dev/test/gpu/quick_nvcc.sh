#!/usr/bin/env bash
# Replaces nvcc in tests that run no kernel: takes the command line of nvcc and builds the program in a quarter of the CPU time.
#
#     dev/test/gpu/quick_nvcc.sh [--stand-in=fake_cuda.so] NVCC_ARGUMENT ...
#
# It optimises nothing and compiles the kernels to PTX only, which a driver could still compile. ptxas does not run, so register
# spills and errors in inline assembly go unnoticed. train_gpt2.cu takes 19 s of CPU time instead of 75 s.
#
# It compiles a source once per set of options and keeps the object in build/test_cuda, under a hash of the options, the compiler,
# the source and its headers. A second caller waits for the first to compile, then only links. Objects that no caller has used
# for a day are removed. --stand-in links the given library in place of the CUDA runtime and cuBLASLt.
#
# With -fatbin or a similar option it runs nvcc unchanged.
set -eu -o pipefail
folder=$(cd "$(dirname "$0")/../../.." && pwd)/build/test_cuda
command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin

stand_in=
if [[ ${1-} == --stand-in=* ]]; then stand_in=${1#*=} && shift; fi
all=("$@") source='' object_only='' output=a.out compile=(-Xcicc -O0 -O0) objects=() link=() target='' dependencies='' arch='' whole=
while [ $# -gt 0 ]; do
    case $1 in
    -o) output=$2 && shift ;;
    -MT) target=$2 && shift ;;
    -MF) dependencies=$2 && shift ;;
    -MMD | -MP | -lineinfo | -O[0-9]) ;;
    -Xptxas | -Xcicc) shift ;;
    -gencode) arch=yes compile+=("$1" "$(sed -E 's/^(arch=compute_([0-9a-z]*)),code=.*/\1,code=compute_\2/' <<<"$2")") && shift ;;
    -cudart) link+=("$1" "$2") && shift ;;
    -Xcompiler)
        compile+=("$1" "$2")
        [ "$2" != -fopenmp ] || link+=("$1" "$2")
        shift
        ;;
    *.o) objects+=("$1") ;;
    -l* | -L* | *.so) link+=("$1") ;;
    -c) object_only=yes ;;
    --use_fast_math) compile+=("$1") ;;
    -fatbin | -cubin | -ptx | -shared | -E | -M | -MM | -arch=* | -arch | --*) whole=yes ;;
    *.cu) source=$1 ;;
    *) compile+=("$1") ;;
    esac
    shift
done
[ -n "$source$stand_in" ] && [ -z "$whole" ] || exec nvcc ${all[@]+"${all[@]}"}
[ -n "$arch" ] || compile+=(-gencode "arch=compute_75,code=compute_75")
[ -z "$stand_in" ] || link=("${objects[@]}" -cudart none "$stand_in" -Xcompiler -fopenmp -ldl)
[ -n "$source" ] || exec nvcc "${link[@]}" -o "$output"

mkdir -p "$folder"
find "$folder" -type f -mmin +1440 -delete 2>/dev/null || true # another caller may remove the same files
headers=$(nvcc -MM "${compile[@]}" "$source" | sed 's/^[^:]*://; s/\\$//')
# shellcheck disable=SC2086
key=$({ nvcc --version && printf '%s\n' "$source" "${compile[@]}" && cat $headers; } | sha256sum | cut -c 1-20)
object=$folder/$key
(
    flock 9
    if [ -e "$object.o" ]; then touch "$object".*; exit; fi
    nvcc "${compile[@]}" -MMD -MP -MF "$object.d" -MT TARGET -c "$source" -o "$object.new.o" >"$object.log" 2>&1 || { cat "$object.log" >&2 && exit 1; }
    mv "$object.new.o" "$object.o"
) 9>"$object.lock"
cat "$object.log" >&2
[ -z "$dependencies" ] || sed "1s|^TARGET|${target:-$output}|" "$object.d" >"$dependencies"
[ -z "$object_only" ] || exec cp "$object.o" "$output"
exec nvcc "$object.o" ${link[@]+"${link[@]}"} -o "$output"
