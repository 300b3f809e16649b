#!/usr/bin/env bash
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# A Slurm job that trains on all GPUs of its nodes, one task for each GPU. See --help. The lines above are defaults; options of
# sbatch override them.
#
# Five minutes before the time limit, Slurm sends SIGUSR1 to this script, and srun passes it on: the run saves a checkpoint and
# ends. Then the job goes back into the queue and resumes with -y 1, as it does when Slurm itself requeues it.
set -u

usage() {
    cat <<'HELP'
usage: sbatch [options of sbatch] scripts/multi_node/slurm.sh [--dry-run] ./train_gpt2cu -i ... -o DIR

Trains on all GPUs of a Slurm job, and puts the job back into the queue when its time is up, until the run is done. -y 1 is
added, so that the run resumes. Submit it in the directory that has the program; -o must be on a shared file system.

  sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8    two machines with 8 GPUs each: the default
  sbatch --time=4:00:00       the limit; without it the partition's
  sbatch --signal=B:USR1@600  save ten minutes before the limit (default: 5). Longer than a step, a validation and a save
  --dry-run                   print the command for this job, or, outside of one, for the default; start nothing
  --help, -h                  this text

scancel --batch --signal=USR1 JOB saves and requeues at once; scancel JOB saves and ends, if Slurm's KillWait is long enough.

Exit status: srun's, 128 + signal if a signal ended a task; 2 usage.
HELP
}

fail() { # CODE MESSAGE
    echo "error: $2" >&2
    exit "$1"
}

default() { sed -n "s/^#SBATCH --$1=//p" "$0"; } # NAME

# has_flag LETTER NAME WORD ...: whether one of the words is the flag -LETTER or --NAME
has_flag() {
    local word
    for word in "${@:3}"; do
        if [[ $word == "-$1"* || $word == "--$2" || $word == "--$2="* ]]; then return 0; fi
    done
    return 1
}

# Sets `words` to the command that starts all tasks.
make_command() { # COMMAND ...
    local nodes gpus tasks
    if [ -n "${SLURM_JOB_ID-}" ]; then
        nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES-}}
        gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE-}}
        gpus=${gpus##*:} # h100:8
        tasks=${SLURM_NTASKS_PER_NODE:-$gpus}
    else
        nodes=$(default nodes) gpus=$(default gpus-per-node) tasks=$(default ntasks-per-node)
    fi
    [[ $gpus =~ ^[1-9][0-9]*$ ]] || fail 1 "this job has no GPUs: sbatch --gpus-per-node=8 --ntasks-per-node=8"
    [[ $nodes =~ ^[1-9][0-9]*$ ]] || fail 1 "SLURM_JOB_NUM_NODES='$nodes' is not a number of nodes: is this a Slurm job?"
    [ "$tasks" = "$gpus" ] ||
        fail 1 "$tasks tasks for $gpus GPUs on each node: sbatch --ntasks-per-node=$gpus --gpus-per-node=$gpus"
    # every task sees all GPUs of its node: NCCL needs that for direct copies between them. When a task has failed, the others
    # get a minute to say why they end
    words=(srun --nodes="$nodes" --ntasks=$((nodes * gpus)) --ntasks-per-node="$gpus" --gpu-bind=none --kill-on-bad-exit=0
        --wait=60 "$@")
    if ! has_flag y resume "$@"; then words+=(-y 1); fi
}

# Slurm itself signals the tasks when it ends the job, so SIGTERM is not passed on here: a second one would end them at once.
# Ctrl-C reaches this script alone, in the shell of salloc.
stop() { # SIGNAL
    [[ $1 == INT && $stopped ]] && kill -s TERM "$pid"
    if [[ $1 != TERM && -z $stopped ]]; then
        stopped=$1
        kill -s USR1 "$pid"
    fi
}

words=() pid='' stopped=''
main() {
    local dry_run=no signal code
    while [[ ${1-} == -* ]]; do
        case $1 in
        -h | --help) usage; return 0 ;;
        --dry-run) dry_run=yes ;;
        *) fail 2 "unknown option $1; see --help. Options of sbatch precede this script, the program's flags follow the program" ;;
        esac
        shift
    done
    [ $# -gt 0 ] || fail 2 "no command: the program and its flags come last, ./train_gpt2cu -i ... -o DIR"
    has_flag o output "$@" || fail 2 "without -o nothing is saved when the time is up: add -o DIR, on a shared file system"
    [[ ${SLURM_JOB_ID-} || $dry_run == yes ]] || fail 2 "this is not a Slurm job: sbatch scripts/multi_node/slurm.sh $*"
    if ! command -v -- "$1" >/dev/null; then
        [ $dry_run = yes ] || fail 1 "$1 is not there or not executable, in $PWD: make train_gpt2cu"
        echo "note: $1 is not there or not executable, in $PWD: make train_gpt2cu" >&2
    fi
    make_command "$@"
    if [ $dry_run = yes ]; then
        printf '%s' "${words[0]}"
        printf ' %q' "${words[@]:1}"
        printf '\n'
        return 0
    fi
    command -v srun >/dev/null || fail 1 "no srun on the PATH of this job"
    # srun of Slurm 22.05 and later does not take this from the job
    [ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    set -m # a process group of its own: the terminal's Ctrl-C shall not reach srun
    "${words[@]}" </dev/null &
    pid=$!
    set +m
    # shellcheck disable=SC2064
    for signal in INT TERM USR1; do trap "stop $signal" $signal; done
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done # in bash's `wait`, one of two signals that come together is lost
    wait "$pid" 2>/dev/null
    code=$?
    # 138: SIGUSR1 ended the tasks, because it came before the first step
    if [[ ($code != 0 && $code != 138) || $stopped != USR1 ]]; then return $code; fi
    echo "back into the queue; the run resumes from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || fail 1 "Slurm does not requeue this job: submit it again, with the same flags"
}

main "$@"
