#!/usr/bin/env bash
# scripts/multi_node without a GPU, ssh, Slurm or MPI. Stand-ins for ssh, srun, scontrol and mpirun run the command here, with
# the environment that the real ones would give it, and one for train_gpt2cu prints what it got.
. "$(dirname "$0")/../test.sh"
unset "${!LLMC_@}" "${!NCCL_@}" "${!SLURM_@}" "${!OMPI_@}" "${!PMI_@}" MASTER_ADDR MASTER_PORT
scripts=$PWD/scripts/multi_node
mkdir "$tmp/bin" "$tmp/top"
export PATH=$tmp/bin:$PATH WORK=$tmp/top
cd "$tmp/top" || exit 1

stand_in() { # PATH: makes a script of what is on stdin
    { echo '#!/usr/bin/env bash' && cat; } >"$1"
    chmod +x "$1"
}

# A host has the environment of a fresh login. The host "down" refuses; "lost" ends its connection after half a second.
stand_in "$tmp/bin/ssh" <<'END'
while [[ $1 == -* ]]; do [ "$1" = -o ] && shift; shift; done
host=$1
shift
[ "$host" != down ] || { echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255; }
if [ "$host" = lost ]; then
    timeout -s KILL 0.5 cat | env -i PATH="$PATH" WORK="$WORK" HOST="$host" bash -c "$*" &
    sleep 0.7
    exit 255
fi
exec env -i PATH="$PATH" WORK="$WORK" HOST="$host" bash -c "$*"
END

# srun and mpirun: what comes before the program is theirs
stand_in "$tmp/bin/ranks_here" <<'END'
# ranks_here NUM_RANKS KIND COMMAND ...: starts the ranks, passes on SIGUSR1, and gives the code of the last one that failed
n=$1 kind=$2 pids=() code=0
shift 2
trap 'kill -USR1 "${pids[@]}"' USR1
trap 'kill -KILL "${pids[@]}"; exit 143' TERM
for ((i = 0; i < n; i++)); do
    case $kind in
    slurm) export SLURM_PROCID=$i SLURM_NTASKS=$n SLURM_LOCALID=$((i % 2)) SLURM_STEP_ID=0 ;;
    openmpi) export OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_SIZE=$n OMPI_COMM_WORLD_LOCAL_RANK=$((i % 2)) ;;
    mpich) export PMI_RANK=$i PMI_SIZE=$n MPI_LOCALRANKID=$((i % 2)) ;;
    esac
    "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
    wait "$pid" || code=$?
done
exit $code
END
stand_in "$tmp/bin/srun" <<'END'
echo "srun $*" >"$WORK/srun"
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && n=${1#*=}; shift; done
exec env --default-signal=INT ranks_here "$n" slurm "$@" # as programs that have a handler of their own
END
stand_in "$tmp/bin/scontrol" <<'END'
echo "scontrol $*" >>"$WORK/scontrol"
exit "${SCONTROL_FAILS:-0}"
END
stand_in "$tmp/bin/mpirun" <<'END'
[ "$1" != --version ] || { echo "mpirun (Open MPI) 5.0.3"; exit; }
for ((n = 0; $# > 0; )); do
    case $1 in
    -np) n=$2 && shift 2 ;;
    -x) export "${2?}" && shift 2 ;;
    --host | --map-by | --bind-to) shift 2 ;;
    *) break ;;
    esac
done
exec env --default-signal=INT ranks_here "$n" openmpi "$@"
END
stand_in "$tmp/bin/mpirun.mpich" <<'END'
[ "$1" != --version ] || { printf 'HYDRA build details:\n    Version:  4.0.2\n'; exit; }
for ((n = 0; $# > 0; )); do
    case $1 in
    -n) n=$2 && shift 2 ;;
    -genv) export "$2=$3" && shift 3 ;;
    -hosts | -bind-to) shift 2 ;;
    *) break ;;
    esac
done
exec ranks_here "$n" mpich "$@"
END
stand_in "$tmp/bin/mpirun.other" <<'END'
echo "Intel(R) MPI Library for Linux* OS, Version 2021.13"
END

# The program: notes its environment and its arguments, then does what its first argument says.
stand_in train_gpt2cu <<'END'
[ "${1-}" != child ] || { sleep 60; exit; }
rank=${LLMC_RANK-}${SLURM_PROCID-}${OMPI_COMM_WORLD_RANK-}${PMI_RANK-}
{
    env | grep -E '^(LLMC_|NCCL_|SLURM_(PROCID|NTASKS|LOCALID)|SRUN_|OMPI_|PMI_|MPI_|MASTER_|HOST=|MINE)' | sort
    printf '[%s]' "$@"
    echo " in $PWD with group $(cut -d ' ' -f 5 /proc/$$/stat)"
} >"rank$rank.new"
mv "rank$rank.new" "rank$rank"
for signal in INT TERM HUP USR1; do trap "echo $signal >>signals$rank; exit 0" $signal; done
case ${1-} in
quick) [ "$rank" = "$2" ] && exit 7 || exit 0 ;;
fail)
    if [ "$rank" = "$2" ]; then
        "$0" child "$3" & # to be ended with its rank
        exit 7
    fi
    ;;
killed) [ "$rank" != "$2" ] || kill -9 $$ ;;
early) trap - USR1 ;;
twice) trap "echo INT >>signals$rank; trap 'exit 130' INT TERM" INT ;;
slow) trap "echo USR1 >>signals$rank" USR1 ;;
stubborn)
    [ "$rank" != 0 ] || exit 3
    trap 'echo TERM >>signals$rank' TERM
    ;;
*) exit 0 ;;
esac
touch "ready$rank"
for ((i = 0; i < 100; i++)); do sleep 0.1 & wait $!; done
END

# run RC COMMAND ...: the exit code must be RC; output to out and err
run() {
    local rc=0
    rm -f rank* ready* signals* srun scontrol
    timeout 20 "${@:2}" >out 2>err </dev/null || rc=$?
    [ $rc -eq "$1" ] || { cat out err && fail "exit code $rc, want $1: ${*:2}"; }
}

# refused MESSAGE COMMAND ...: a usage error in one line
refused() {
    run 2 "${@:2}"
    want "${*:2}: the message" "$(cat err)" "error: $1"
}

# start COMMAND ...: in the background; its process, the first of a process group, goes to $pid
start() {
    rm -f rank* ready* signals* srun scontrol
    setsid env --default-signal=INT "$@" >out 2>err </dev/null & # a shell makes what it starts in the background ignore SIGINT
    pid=$!
}
await() { # FILE ...
    local i file
    for file in "$@"; do
        for ((i = 0; i < 100; i++)); do [ ! -e "$file" ] || break; sleep 0.05; done
        [ -e "$file" ] || { cat out err && fail "no $file"; }
    done
}
ended() { # RC: $pid has ended with this code
    local rc=0
    wait "$pid" || rc=$?
    [ $rc -eq "$1" ] || { cat out err && fail "exit code $rc, want $1"; }
}
# Prints the command lines of the ranks that run. Each has the argument $tmp.
running() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        tr '\0' ' ' <"$file" 2>/dev/null | grep -a "^bash ./train_gpt2cu .*$tmp" || true
    done
}
nothing_left() {
    local i
    for ((i = 0; i < 40; i++)); do [ -n "$(running)" ] || return 0; sleep 0.1; done
    running && fail "these processes are left"
}
value() { sed -n "s/^$2=//p" "rank$1"; } # RANK NAME
signals() { cat signals* 2>/dev/null | tr '\n' ' '; }

test_ssh() {
    local rank
    export NCCL_DEBUG='a warning' LLMC_NCCL=/opt/nccl.so MINE=my
    run 0 "$scripts/ssh.sh" --hosts n1:2,me@n2:1 -x MINE -x 'MINE_TOO=x "y" $z' ./train_gpt2cu go "it's *" ''
    want "ranks" "$(echo rank?)" "rank0 rank1 rank2"
    for rank in 0 1 2; do
        want "number of ranks" "$(value $rank LLMC_NUM_RANKS)" 3
        want "address" "$(value $rank LLMC_ADDRESS)" n1
        want "port" "$(value $rank LLMC_PORT)" "$(value 0 LLMC_PORT)"
        want "token" "$(value $rank LLMC_TOKEN)" "$(value 0 LLMC_TOKEN)"
        want "variables" "$(value $rank NCCL_DEBUG)|$(value $rank LLMC_NCCL)|$(value $rank MINE)|$(value $rank MINE_TOO)" \
            'a warning|/opt/nccl.so|my|x "y" $z'
        contains "[go][it's *][] in $tmp/top" "rank$rank"
    done
    want "local ranks" "$(value 0 LLMC_LOCAL_RANK)$(value 1 LLMC_LOCAL_RANK)$(value 2 LLMC_LOCAL_RANK)" 010
    want "hosts" "$(value 0 HOST) $(value 1 HOST) $(value 2 HOST)" "n1 n1 me@n2"
    [[ $(value 0 LLMC_TOKEN) =~ ^[0-9a-f]{16}$ ]] || fail "the token is $(value 0 LLMC_TOKEN)"
    [ "$(value 0 LLMC_PORT)" -ge 20000 ] && [ "$(value 0 LLMC_PORT)" -lt 32000 ] || fail "the port is $(value 0 LLMC_PORT)"
    [ "$(sed -n 's/.*group //p' rank0)" != "$(sed -n 's/.*group //p' rank1)" ] || fail "two ranks share a process group"
    want "output" "$(cat out err)" ""
}

test_ssh_options() {
    mkdir -p other
    cp train_gpt2cu other/
    printf '# our machines\nn1:1\n\nn2 slots=1\nn3 1 # the old one' >hostfile
    run 0 "$scripts/ssh.sh" --hostfile=hostfile --address 10.0.0.1 --port 1234 --dir "$tmp/top/other" -- ./train_gpt2cu
    mv other/rank* .
    want "rank 2" "$(value 2 HOST) $(value 2 LLMC_ADDRESS) $(value 2 LLMC_PORT) $(value 2 LLMC_NUM_RANKS)" "n3 10.0.0.1 1234 3"
}

test_ssh_signals() {
    local signal
    for signal in INT USR1; do
        start "$scripts/ssh.sh" --hosts n1:2,n2:1 ./train_gpt2cu killed none "$tmp"
        await ready0 ready1 ready2
        kill -s $signal -- "-$pid" # Ctrl-C goes to the whole group
        ended 0
        want "signals of the ranks" "$(signals)" "$signal $signal $signal "
    done
    start "$scripts/ssh.sh" --hosts n1:1,n2:1 ./train_gpt2cu twice "$tmp"
    await ready0 ready1
    kill -s INT "$pid"
    await signals0 signals1
    kill -s INT "$pid"
    ended 130
    want "the error" "$(grep -c error err)" 1
    nothing_left
}

test_ssh_is_killed() {
    start "$scripts/ssh.sh" --hosts n1:2,n2:1 --grace 0.5 ./train_gpt2cu killed none "$tmp"
    await ready0 ready1 ready2
    want "ranks that run" "$(running | wc -l)" 3
    kill -KILL "$pid"
    wait "$pid" 2>/dev/null || true
    await signals0 signals1 signals2
    nothing_left
    want "signals of the ranks" "$(signals)" "TERM TERM TERM "
}

test_ssh_failures() {
    run 7 "$scripts/ssh.sh" --hosts n1:2,n2:1 --grace 0.5 ./train_gpt2cu fail 2 "$tmp"
    grep -qE '^error: rank 2 of 3 \(host n2, process [0-9]+\) ended with exit code 7$' err || { cat err; fail "no rank"; }
    want "the last line" "$(tail -n 1 err)" "error: failed on n2 (exit code 7)"
    want "signals of the ranks" "$(signals)" "TERM TERM "
    run 137 "$scripts/ssh.sh" --hosts n1:2,n2:1 --grace 0.5 ./train_gpt2cu killed 1 "$tmp"
    grep -qE '^error: rank 1 of 3 \(host n1, process [0-9]+\) was ended by signal 9, SIGKILL$' err || { cat err; fail "no rank"; }
    want "the last line" "$(tail -n 1 err)" "error: failed on n1 (exit code 137)"
    run 255 "$scripts/ssh.sh" --hosts n1:1,down:1 --grace 0.5 ./train_gpt2cu killed none "$tmp"
    contains "error: down: no connection, or it was lost; this must work without a password: ssh down true" err
    run 1 "$scripts/ssh.sh" --hosts n1:1 ./train_gpt3cu
    want "the errors" "$(cat err)" "error: n1: ./train_gpt3cu is not there or not executable, in $tmp/top
error: failed on n1 (exit code 1)"
    run 1 "$scripts/ssh.sh" --hosts n1:1 --dir /nowhere ./train_gpt2cu
    contains "error: n1 has no directory /nowhere: share it, or give --dir" err
    nothing_left
}

# ranks that heed no SIGTERM, on the host of the one that failed and on another; and a connection that breaks
test_ssh_force() {
    run 3 "$scripts/ssh.sh" --hosts n1:2,n2:1 --grace 0.5 ./train_gpt2cu stubborn "$tmp"
    grep -qE '^rank 1 of 3 \(host n1, process [0-9]+\) still runs: SIGTERM$' err || { cat err; fail "no SIGTERM"; }
    grep -qE '^rank 1 of 3 \(host n1, process [0-9]+\) still runs: SIGKILL$' err || { cat err; fail "no SIGKILL"; }
    want "signals of the ranks" "$(signals)" "TERM TERM "
    nothing_left
    run 255 "$scripts/ssh.sh" --hosts n1:1,lost:1 --grace 0.5 ./train_gpt2cu killed none "$tmp"
    contains "error: failed on lost (exit code 255)" err
    nothing_left
}

test_dry_run() {
    run 0 "$scripts/ssh.sh" --dry-run --hosts n1:1,me@n2:1 --port 1 -x MINE='a b' --dir '/a b' ./train_gpt2cu -i 'd/*.bin'
    sed -i -E 's/LLMC_TOKEN=[0-9a-f]{16}/LLMC_TOKEN=T/' out
    want "ssh.sh prints" "$(head -n 1 out)" "ssh n1 'cd '\\''/a b'\\'' && exec env LLMC_RANK=0 LLMC_NUM_RANKS=2 LLMC_LOCAL_RANK=0 \
LLMC_ADDRESS=n1 LLMC_PORT=1 LLMC_TOKEN=T '\\''MINE=a b'\\'' ./train_gpt2cu -i '\\''d/*.bin'\\'''"
    want "lines" "$(wc -l <out)" 2
    # what it prints starts the ranks
    run 0 "$scripts/ssh.sh" --dry-run --hosts n1:1,me@n2:1 -x MINE='a b' ./train_gpt2cu go 'd/*.bin' "it's"
    bash -e out
    want "ranks" "$(value 0 HOST) $(value 1 HOST) $(value 1 LLMC_RANK) $(value 1 MINE)" "n1 me@n2 1 a b"
    contains "[go][d/*.bin][it's] in $tmp/top" rank1
    run 0 "$scripts/mpirun.sh" --dry-run --hosts n1:2,n2:2 --port 1 -x MINE='a b' ./train_gpt2cu -i 'd/*.bin'
    want "mpirun.sh prints" "$(cat out)" "mpirun -np 4 --host n1:2,n2:2 --map-by slot --bind-to none -x 'MINE=a b' \
-x MASTER_ADDR=n1 -x MASTER_PORT=1 ./train_gpt2cu -i 'd/*.bin'"
    run 0 "$scripts/mpirun.sh" --dry-run --mpirun mpirun.mpich --hosts n1:2,n2:2 --port 1 -x MINE='a b' ./train_gpt2cu
    want "mpirun.sh prints" "$(cat out)" "mpirun.mpich -n 4 -hosts n1:2,n2:2 -bind-to none -genv MINE 'a b' \
-genv MASTER_ADDR n1 -genv MASTER_PORT 1 ./train_gpt2cu"
    run 0 "$scripts/slurm.sh" --dry-run ./train_gpt2cu -i 'd/*.bin' -o log
    want "slurm.sh prints" "$(cat out)" "srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --gpu-bind=none --kill-on-bad-exit=0 \
--wait=60 ./train_gpt2cu -i d/\\*.bin -o log -y 1"
    # a machine without mpirun or without the program may show the command, too
    run 0 "$scripts/mpirun.sh" --dry-run --mpirun nowhere/mpirun --hosts n1:2 --port 1 ./train_gpt3cu
    want "mpirun.sh prints" "$(cat out)" "nowhere/mpirun -np 2 --host n1:2 --map-by slot --bind-to none -x MASTER_ADDR=n1 -x MASTER_PORT=1 ./train_gpt3cu"
    contains "note: no nowhere/mpirun: apt-get install openmpi-bin" err
    contains "note: ./train_gpt3cu is not there or not executable: make train_gpt2cu" err
    run 0 "$scripts/slurm.sh" --dry-run ./train_gpt3cu -o log
    contains "--wait=60 ./train_gpt3cu -o log -y 1" out
    contains "note: ./train_gpt3cu is not there or not executable, in $tmp/top: make train_gpt2cu" err
}

test_mpirun() {
    local kind mpi
    for kind in mpirun mpirun.mpich; do
        LLMC_NCCL=/opt/nccl.so run 0 "$scripts/mpirun.sh" --mpirun $kind --hosts n1:2,n2:2 -x MINE='a b' ./train_gpt2cu go ''
        want "ranks of $kind" "$(echo rank?)" "rank0 rank1 rank2 rank3"
        want "$kind: rank 3" "$(value 3 MASTER_ADDR) $(value 3 MINE) $(value 3 LLMC_NCCL)" "n1 a b /opt/nccl.so"
        [[ $(value 3 MASTER_PORT) =~ ^[23][0-9]{4}$ ]] || fail "$kind: the port is $(value 3 MASTER_PORT)"
        mpi=$(value 3 OMPI_COMM_WORLD_SIZE)$(value 3 PMI_SIZE)
        want "$kind: number of ranks" "$mpi" 4
        contains "[go][] in $tmp/top" rank3
        run 7 "$scripts/mpirun.sh" --mpirun $kind --hosts n1:1 ./train_gpt2cu quick 0
    done
    # Ctrl-C becomes SIGUSR1, which mpirun passes on; the second one ends mpirun
    start "$scripts/mpirun.sh" --hosts n1:2 ./train_gpt2cu killed none "$tmp"
    await ready0 ready1
    kill -INT -- "-$pid"
    ended 0
    want "signals of the ranks" "$(signals)" "USR1 USR1 "
    start "$scripts/mpirun.sh" --hosts n1:1 ./train_gpt2cu slow "$tmp"
    await ready0
    kill -INT -- "-$pid"
    await signals0
    kill -TERM "$pid"
    ended 143
}

test_mpirun_errors() {
    run 1 "$scripts/mpirun.sh" --mpirun mpirun.other --hosts n1:2 ./train_gpt2cu
    want "the error" "$(cat err)" "error: mpirun.other is neither Open MPI's nor MPICH's: scripts/multi_node/ssh.sh needs no MPI"
    run 1 "$scripts/mpirun.sh" --mpirun nowhere/mpirun --hosts n1:2 ./train_gpt2cu
    want "the error" "$(cat err)" \
        "error: no nowhere/mpirun: apt-get install openmpi-bin, or start by ssh alone: scripts/multi_node/ssh.sh"
    run 1 "$scripts/mpirun.sh" --hosts n1:2 ./train_gpt3cu
    want "the error" "$(cat err)" "error: ./train_gpt3cu is not there or not executable: make train_gpt2cu"
}

# what sbatch sets for the script
in_job() {
    export SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=2 SLURM_GPUS_PER_NODE=h100:2 SLURM_NTASKS_PER_NODE=2 SLURM_CPUS_PER_TASK=8
}

test_slurm() {
    in_job
    run 0 "$scripts/slurm.sh" ./train_gpt2cu go -o log
    want "srun" "$(cat srun)" "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --gpu-bind=none --kill-on-bad-exit=0 --wait=60 \
./train_gpt2cu go -o log -y 1"
    want "rank 3" "$(value 3 SLURM_PROCID) $(value 3 SLURM_NTASKS) $(value 3 SRUN_CPUS_PER_TASK)" "3 4 8"
    [ ! -e scontrol ] || fail "a run that was done is requeued"
    SLURM_GPUS_ON_NODE=2 run 7 "$scripts/slurm.sh" ./train_gpt2cu quick 3 --output=log --resume 0
    want "srun" "$(sed 's/.* --wait=60 //' srun)" "./train_gpt2cu quick 3 --output=log --resume 0"
    [ ! -e scontrol ] || fail "a run that failed is requeued"
}

test_slurm_time_is_up() {
    in_job
    SLURM_JOB_NUM_NODES=1
    start "$scripts/slurm.sh" ./train_gpt2cu killed none "$tmp" -o log
    await ready0 ready1
    kill -TERM "$pid" # Slurm sends it to the tasks as well
    sleep 0.3
    kill -USR1 "$pid"
    ended 0
    want "signals of the tasks" "$(signals)" "USR1 USR1 "
    want "scontrol" "$(cat scontrol)" "scontrol requeue 42"
    # before the program has a handler
    start "$scripts/slurm.sh" ./train_gpt2cu early "$tmp" -o log
    await ready0 ready1
    kill -USR1 "$pid"
    ended 0
    want "scontrol" "$(cat scontrol)" "scontrol requeue 42"
    # Ctrl-C in the shell of salloc
    start "$scripts/slurm.sh" ./train_gpt2cu killed none "$tmp" -o log
    await ready0 ready1
    kill -INT -- "-$pid"
    ended 0
    want "signals of the tasks" "$(signals)" "USR1 USR1 "
    [ ! -e scontrol ] || fail "Ctrl-C requeues the job"
    SCONTROL_FAILS=1 start "$scripts/slurm.sh" ./train_gpt2cu killed none "$tmp" -o log
    await ready0 ready1
    kill -USR1 "$pid"
    ended 1
    want "the error" "$(tail -n 1 err)" "error: Slurm does not requeue this job: submit it again, with the same flags"
    nothing_left
}

test_slurm_errors() {
    refused "this is not a Slurm job: sbatch scripts/multi_node/slurm.sh ./train_gpt2cu -o log" \
        "$scripts/slurm.sh" ./train_gpt2cu -o log
    refused "no command: the program and its flags come last, ./train_gpt2cu -i ... -o DIR" "$scripts/slurm.sh"
    refused "without -o nothing is saved when the time is up: add -o DIR, on a shared file system" \
        "$scripts/slurm.sh" ./train_gpt2cu -i x
    refused "unknown option --nodes=3; see --help. Options of sbatch precede this script, the program's flags follow the program" \
        "$scripts/slurm.sh" --nodes=3 ./train_gpt2cu
    in_job
    run 1 "$scripts/slurm.sh" ./train_gpt3cu -o log
    want "the error" "$(cat err)" "error: ./train_gpt3cu is not there or not executable, in $tmp/top: make train_gpt2cu"
    SLURM_GPUS_ON_NODE=4 run 1 "$scripts/slurm.sh" ./train_gpt2cu -o log
    want "the error" "$(cat err)" "error: 2 tasks for 4 GPUs on each node: sbatch --ntasks-per-node=4 --gpus-per-node=4"
    SLURM_JOB_NUM_NODES='' run 1 "$scripts/slurm.sh" ./train_gpt2cu -o log
    want "the error" "$(cat err)" "error: SLURM_JOB_NUM_NODES='' is not a number of nodes: is this a Slurm job?"
    SLURM_GPUS_PER_NODE='' run 1 "$scripts/slurm.sh" ./train_gpt2cu -o log
    want "the error" "$(cat err)" "error: this job has no GPUs: sbatch --gpus-per-node=8 --ntasks-per-node=8"
}

test_usage_errors() {
    local script
    for script in ssh.sh mpirun.sh; do
        script=$scripts/$script
        refused "on which hosts, and how many GPUs has each? --hosts node01:8,node02:8" "$script" ./train_gpt2cu
        refused "--hosts wants a value; see --help" "$script" --hosts
        refused "--hosts n1: how many GPUs? Write n1:8" "$script" --hosts n1 ./train_gpt2cu
        refused "--hosts n1:x: the number of GPUs is from 1 to 64" "$script" --hosts n1:x ./train_gpt2cu
        refused "--hosts n1:65: the number of GPUs is from 1 to 64" "$script" --hosts n1:65 ./train_gpt2cu
        refused "--hosts -oProxyCommand=x:1: '-oProxyCommand=x' is not the name of a host" "$script" --hosts -oProxyCommand=x:1 x
        refused "--hosts: n1 is there twice" "$script" --hosts n1:1,n2:1,n1:1 ./train_gpt2cu
        refused "--hostfile nowhere: cannot be read" "$script" --hostfile nowhere ./train_gpt2cu
        refused "--hostfile /dev/null: it names no host" "$script" --hostfile /dev/null ./train_gpt2cu
        refused "the other hosts cannot reach rank 0 at localhost: name the first host as they know it, or give --address" \
            "$script" --hosts localhost:1,n2:1 ./train_gpt2cu
        refused "no command: the program and its flags come last, ./train_gpt2cu -i ..." "$script" --hosts n1:1
        refused "unknown option -i; see --help. The flags of the program follow its name: ... ./train_gpt2cu -i" \
            "$script" --hosts n1:1 -i data
        refused "--port 65536: not a number from 1 to 65535" "$script" --hosts n1:1 --port 65536 ./train_gpt2cu
        refused "-x 1=2: '1' is not the name of a variable" "$script" --hosts n1:1 -x 1=2 ./train_gpt2cu
        refused "-x MINE: this variable is not set; -x MINE=VALUE sets it" "$script" --hosts n1:1 -x MINE ./train_gpt2cu
    done
    refused "--grace x: not a number of seconds" "$scripts/ssh.sh" --grace x --hosts n1:1 ./train_gpt2cu
}

test_help() {
    local script option common='--hosts --hostfile --address --port -x'
    for script in 'ssh.sh --dir --grace' 'mpirun.sh --mpirun' slurm.sh; do
        run 0 "$scripts/${script%% *}" --help
        contains "usage: " out
        for option in --help --dry-run $([[ $script == slurm* ]] || echo "$common") ${script#* }; do
            [[ $option == *.sh ]] || grep -qE -- "^  ${option}[ ,]" out || fail "$script --help does not explain $option"
        done
        want "the longest lines of ${script%% *} --help" "$(awk 'length > 128' out)" ""
    done
}

tests=(ssh ssh_options ssh_signals ssh_is_killed ssh_failures ssh_force dry_run mpirun mpirun_errors slurm
    slurm_time_is_up slurm_errors usage_errors help)
run_tests_once "$@"
