#!/usr/bin/env bash
# Starts a run on several machines by the mpirun of Open MPI or MPICH. The program itself does not use MPI. See --help.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

usage() {
    cat <<'HELP'
usage: scripts/multi_node/mpirun.sh --hosts HOST:GPUS,HOST:GPUS,... [options] ./train_gpt2cu -i ...

Starts the program by mpirun on every host, once for each GPU, and tells it where rank 0 is: mpirun does not. All hosts need
this directory with the program and the data in it: a shared file system.

  --hosts LIST      the hosts and the number of GPUs of each: node01:8,node02:8
  --hostfile FILE   the same, one host per line: node01:8, node01 8 or node01 slots=8
  --address NAME    the first host as the others reach it (default: its name in the list)
  --port N          port of rank 0 (default: another one for each run, 20000 to 31999)
  -x NAME[=VALUE]   environment variable for the program; LLMC_NCCL and NCCL_* are passed on in any case
  --mpirun PROGRAM  the mpirun to use (default: mpirun)
  --dry-run         print the command, and start nothing
  --help, -h        this text

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 let the run save a checkpoint and end, if it has an -o; a second Ctrl-C or SIGTERM ends it
at once. (mpirun alone would kill the program a second after Ctrl-C.)

Exit status: mpirun's; 2 usage.
HELP
}

mpirun=mpirun
own_option() { # NAME [VALUE]
    [ "$1" = --mpirun ] || return 1
    [ $# -eq 1 ] || mpirun=$2
}

# Prints how this mpirun has its options: openmpi or mpich.
kind_of_mpirun() {
    local text
    text=$("$mpirun" --version 2>&1 </dev/null)
    case $text in
    *'Open MPI'* | *OpenRTE* | *PRRTE* | *open-mpi.org*) echo openmpi ;;
    *HYDRA*) echo mpich ;;
    esac
}

# The command that starts all ranks: rank 0 on the first host, and no rank bound to a core, because each has several threads.
make_command() { # KIND
    local i places='' variable
    for i in "${!hosts[@]}"; do places=$places,${hosts[i]}:${gpus[i]}; done
    variables+=("MASTER_ADDR=$address" "MASTER_PORT=$port")
    if [ "$1" = openmpi ]; then
        words=("$mpirun" -np "$num_ranks" --host "${places#,}" --map-by slot --bind-to none)
        for variable in "${variables[@]}"; do words+=(-x "$variable"); done
    else
        words=("$mpirun" -n "$num_ranks" -hosts "${places#,}" -bind-to none)
        for variable in "${variables[@]}"; do words+=(-genv "${variable%%=*}" "${variable#*=}"); done
    fi
    words+=("${command[@]}")
}

# The first signal asks the run to end: mpirun passes on SIGUSR1. After another Ctrl-C or SIGTERM mpirun kills all ranks.
stop() { # SIGNAL
    local signal=USR1
    [[ $stopped && $1 != USR1 && $1 != HUP ]] && signal=TERM
    stopped=yes
    kill -s "$signal" "$pid"
}

# What is not here ends the start; a dry run, perhaps for another machine, only notes it.
missing() { # MESSAGE
    [ "$dry_run" = yes ] || fail 1 "$1"
    echo "note: $1" >&2
}

words=() pid='' stopped=''
main() {
    local kind signal
    read_options "$@"
    if command -v -- "$mpirun" >/dev/null; then
        kind=$(kind_of_mpirun)
        [ -n "$kind" ] || fail 1 "$mpirun is neither Open MPI's nor MPICH's: scripts/multi_node/ssh.sh needs no MPI"
    else
        missing "no $mpirun: apt-get install openmpi-bin, or start by ssh alone: scripts/multi_node/ssh.sh"
        kind=openmpi # its form is shown
    fi
    command -v -- "${command[0]}" >/dev/null || missing "${command[0]} is not there or not executable: make train_gpt2cu"
    make_command "$kind"
    if [ "$dry_run" = yes ]; then
        print_command "${words[@]}"
        return 0
    fi
    set -m # a process group of its own: the terminal's Ctrl-C shall not reach mpirun
    "${words[@]}" </dev/null &
    pid=$!
    set +m
    # shellcheck disable=SC2064
    for signal in INT TERM HUP USR1; do trap "stop $signal" $signal; done
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done # in bash's `wait`, one of two signals that come together is lost
    wait "$pid"
}

main "$@"
