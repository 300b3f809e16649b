#!/usr/bin/env bash
# Starts a run on several machines by ssh, one process for each GPU. See --help.
#
#     this script --- ssh --- bash: agent() --- rank 0 ... rank 7        on the first host
#                 --- ssh --- bash: agent() --- rank 8 ... rank 15       on the second
#
# ssh itself passes on no signals. So this script keeps the standard input of each ssh open and writes names of signals to it,
# one per line; agent() reads them and sends the signals to its ranks. When this script or the connection dies, agent()
# reads the end of its input and ends its ranks. That is why no process is left behind, even after kill -9.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

usage() {
    cat <<'HELP'
usage: scripts/multi_node/ssh.sh --hosts HOST:GPUS,HOST:GPUS,... [options] ./train_gpt2cu -i ...

Starts the program on every host, once for each GPU. Rank 0 is on the first host. Each host needs a login without a password,
and this directory with the program and the data in it: a shared file system.

  --hosts LIST      the hosts and the number of GPUs of each: node01:8,node02:8 or me@node01:8
  --hostfile FILE   the same, one host per line: node01:8, node01 8 or node01 slots=8
  --dir DIR         directory on the hosts (default: the current one)
  --address NAME    the first host as the others reach it (default: its name in the list)
  --port N          port of rank 0 (default: another one for each run, 20000 to 31999)
  -x NAME[=VALUE]   environment variable for the program; LLMC_NCCL and NCCL_* are passed on in any case
  --grace SECONDS   when a rank has failed: how long the others have to end by themselves before SIGTERM, and then before
                    SIGKILL (default: 10)
  --dry-run         print for each rank the command that starts it by hand, and start nothing
  --help, -h        this text

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 go to all ranks, which save a checkpoint and end if the run has an -o; a second Ctrl-C or
SIGTERM ends them at once. Ports, keys and users of the hosts belong in ~/.ssh/config.

Exit status: 0 all ranks have succeeded; else that of a rank that failed, 128 + signal if a signal ended it, 255 if ssh
has failed; 2 usage.
HELP
}

dir=$PWD tenths=100 # of a second: --grace
own_option() { # NAME [VALUE]
    case $1 in
    --dir) [ $# -eq 1 ] || dir=$2 ;;
    --grace)
        [ $# -eq 1 ] && return
        [[ $2 =~ ^([0-9]{1,5})(\.([0-9]))?$ ]] || fail 2 "--grace $2: not a number of seconds"
        tenths=$((10#${BASH_REMATCH[1]} * 10 + ${BASH_REMATCH[3]:-0}))
        ;;
    *) return 1 ;;
    esac
}

# ---- on each host -----------------------------------------------------------------

signal_ranks() { # SIGNAL
    local i
    sent="$sent$1 "
    for i in "${!pids[@]}"; do kill -s "$1" -- "-${pids[i]}"; done
}

# Starts the ranks of one host and waits for them. Returns the exit code of the first that failed, or 0.
agent() { # HOST FIRST_RANK GPUS NUM_RANKS ADDRESS PORT TOKEN TENTHS DIR COMMAND ...
    local host=$1 first=$2 count=$3 num_ranks=$4 address=$5 port=$6 token=$7 tenths=$8 dir=$9
    local pids=() i who how status signal code=0 connected=yes sent=' ' next=(TERM KILL) left='' # left: tenths of a second until the next one
    shift 9
    trap : PIPE # the connection may be gone when this prints
    exec 3>&2 2>/dev/null # bash has messages about its jobs, which are of no use here
    cd "$dir" || { echo "error: $host has no directory $dir: share it, or give --dir" >&3; return 1; }
    command -v -- "$1" >/dev/null || { echo "error: $host: $1 is not there or not executable, in $dir" >&3; return 1; }
    set -m # each rank gets a process group, with which ends what it has started
    for ((i = 0; i < count; i++)); do
        LLMC_RANK=$((first + i)) LLMC_NUM_RANKS=$num_ranks LLMC_LOCAL_RANK=$i LLMC_ADDRESS=$address LLMC_PORT=$port \
            LLMC_TOKEN=$token "$@" </dev/null 2>&3 3>&- &
        pids[i]=$!
    done
    set +m
    while [ ${#pids[@]} -gt 0 ]; do
        if [ $connected = no ] || ! read -r -t 0; then # there is nothing to read; a `read` with a timeout can lose a character
            sleep 0.1
        elif read -r signal; then
            signal_ranks "$signal"
        else # the end of the input
            connected=no left=0
        fi
        for i in "${!pids[@]}"; do
            kill -0 "${pids[i]}" && continue
            wait "${pids[i]}"
            status=$?
            kill -s KILL -- "-${pids[i]}"
            who="rank $((first + i)) of $num_ranks (host $host, process ${pids[i]})"
            unset "pids[i]"
            [ $status -ne 0 ] || continue
            how="ended with exit code $status" signal=
            if [ $status -gt 128 ]; then
                signal=$(kill -l $((status - 128)))
                how="was ended by signal $((status - 128)), SIG$signal"
            fi
            # the first one that failed, and those that a signal ended which we did not send
            if [[ ($code -eq 0 || $signal) && " $sent" != *" ${signal:-none} "* ]]; then echo "error: $who $how" >&3; fi
            [ $code -ne 0 ] || code=$status
        done
        if [ $code -ne 0 ] && [ -z "$left" ]; then left=$tenths; fi
        if [ -n "$left" ] && [ $((left--)) -eq 0 ] && [ ${#next[@]} -gt 0 ]; then
            for i in "${!pids[@]}"; do
                echo "rank $((first + i)) of $num_ranks (host $host, process ${pids[i]}) still runs: SIG${next[0]}" >&3
            done
            signal_ranks "${next[0]}"
            next=("${next[@]:1}") left=$tenths
        fi
    done
    return $code
}

# ---- here -------------------------------------------------------------------------

ssh_command=(ssh -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4
    -o LogLevel=ERROR)
pids=() fds=() # of each host that still runs: ssh's process, and a descriptor that writes to its standard input

# Starts ssh for one host. Its input is a pipe: first agent() and its arguments, later the signals.
start_host() { # I FIRST_RANK TOKEN
    local folder fd input other pid script
    script=$(
        declare -f agent signal_ranks
        [ ${#variables[@]} -eq 0 ] || printf 'export %q\n' "${variables[@]}"
        printf 'agent'
        printf ' %q' "${hosts[$1]}" "$2" "${gpus[$1]}" "$num_ranks" "$address" "$port" "$3" "$tenths" "$dir" "${command[@]}"
        printf '; exit' # on the same line: what follows it is for agent() to read
    )
    folder=$(mktemp -d) || fail 1 "cannot make a temporary directory: is ${TMPDIR:-/tmp} full?"
    mkfifo "$folder/input" || fail 1 "cannot make a pipe in $folder"
    exec {fd}<>"$folder/input"
    exec {input}<"$folder/input"
    rm -r "$folder"
    fds[$1]=$fd
    set -m # a process group of its own: the terminal's Ctrl-C shall not end ssh
    (
        for other in "${fds[@]}"; do exec {other}>&-; done # else ssh would not see the end of its input
        exec "${ssh_command[@]}" "${hosts[$1]}" exec bash -s
    ) <&"$input" {input}<&- &
    pid=$!
    set +m
    exec {input}<&-
    echo "$script" >&"$fd"
    pids[$1]=$pid # from now on tell_hosts() writes to it
}

tell_hosts() { # SIGNAL
    local i
    for i in "${!pids[@]}"; do echo "$1" >&"${fds[i]}"; done
}

print_ranks() { # TOKEN
    local i local_rank rank=0 words
    for i in "${!hosts[@]}"; do
        for ((local_rank = 0; local_rank < gpus[i]; local_rank++, rank++)); do
            words=("LLMC_RANK=$rank" "LLMC_NUM_RANKS=$num_ranks" "LLMC_LOCAL_RANK=$local_rank" "LLMC_ADDRESS=$address"
                "LLMC_PORT=$port" "LLMC_TOKEN=$1")
            print_command ssh "${hosts[i]}" \
                "cd $(print_command "$dir") && exec env $(print_command "${words[@]}" ${variables[@]+"${variables[@]}"} "${command[@]}")"
        done
    done
}

main() {
    local i fd rank=0 token status code=0 next=(TERM KILL give_up) left='' failed='' stop=''
    read_options "$@"
    token=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
    if [ "$dry_run" = yes ]; then
        print_ranks "$token"
        return 0
    fi
    command -v ssh >/dev/null || fail 1 "no ssh: apt-get install openssh-client"
    for i in INT TERM HUP USR1; do
        # shellcheck disable=SC2064
        trap "stop=$i; tell_hosts $i" $i
    done
    for i in "${!hosts[@]}"; do
        [ -z "$stop" ] || break
        start_host "$i" $rank "$token"
        rank=$((rank + gpus[i]))
    done
    [ -z "$stop" ] || tell_hosts "$stop" # it may have come while one was being started
    while [ ${#pids[@]} -gt 0 ]; do
        sleep 0.1
        for i in "${!pids[@]}"; do
            kill -0 "${pids[i]}" 2>/dev/null && continue
            wait "${pids[i]}" 2>/dev/null
            status=$?
            fd=${fds[i]}
            exec {fd}>&-
            unset "pids[i]" "fds[i]"
            [ $status -ne 0 ] || continue
            failed="$failed, ${hosts[i]} (exit code $status)"
            if [ $status -eq 255 ]; then
                echo "error: ${hosts[i]}: no connection, or it was lost; this must work without a password: ssh ${hosts[i]} true" >&2
            fi
            # a signal is more likely a cause than an exit code, unless we sent it
            if [ $code -eq 0 ] || [[ $code -le 128 && $status -gt 128 && ${next[0]} == TERM ]]; then code=$status; fi
        done
        # agent() sees to its own host; this is for the other ones
        if [ $code -ne 0 ] && [ -z "$left" ]; then left=$tenths; fi
        if [ -z "$left" ] || [ $((left--)) -gt 0 ]; then continue; fi
        left=$tenths
        if [ "${next[0]}" != give_up ]; then
            tell_hosts "${next[0]}"
            next=("${next[@]:1}")
            continue
        fi
        for i in "${!pids[@]}"; do
            echo "error: ${hosts[i]} does not answer; look there for what is left of the run: ssh ${hosts[i]} pgrep -a train_gpt2cu" >&2
            kill -s KILL "${pids[i]}"
        done
    done
    [ -z "$failed" ] || echo "error: failed on ${failed#, }" >&2
    return $code
}

main "$@"
