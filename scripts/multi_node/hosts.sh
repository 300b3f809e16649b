# shellcheck shell=bash disable=SC2034
# Shared code of ssh.sh and mpirun.sh: errors, the list of hosts, the port, and what is passed on from the environment.

fail() { # CODE MESSAGE: 2 is for usage, 1 for everything else
    echo "error: $2" >&2
    exit "$1"
}

# The options that both scripts have, and what read_options makes of them.
hosts=() gpus=()  # name and number of GPUs of each host
num_ranks=0       # GPUs of all hosts
address=          # of rank 0; default: the first host
port=             # of rank 0; default: another one for each run
variables=()      # NAME=VALUE, for the ranks
dry_run=no
command=()        # the program and its flags

# Reads NAME:GPUS,NAME:GPUS... into hosts, gpus and num_ranks.
read_hosts() { # LIST
    local list entry name count
    IFS=, read -r -a list <<<"$1"
    for entry in "${list[@]}"; do
        name=${entry%:*} count=${entry##*:}
        [[ $entry == *:* ]] || fail 2 "--hosts $entry: how many GPUs? Write $entry:8"
        [[ $name =~ ^([A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail 2 "--hosts $entry: '$name' is not the name of a host"
        [[ $count =~ ^[1-9][0-9]?$ && $count -le 64 ]] || fail 2 "--hosts $entry: the number of GPUs is from 1 to 64"
        [[ " ${hosts[*]-} " != *" $name "* ]] || fail 2 "--hosts: $name is there twice"
        hosts+=("$name") gpus+=("$count")
        num_ranks=$((num_ranks + count))
    done
}

# Reads a file with a host in each line: node01:8, node01 8, or node01 slots=8, as Open MPI has it.
read_hostfile() { # FILE
    local name count all=
    [ -r "$1" ] || fail 2 "--hostfile $1: cannot be read"
    while read -r name count _ || [ -n "$name" ]; do
        [[ $name && $name != '#'* ]] || continue
        [[ $count && $count != '#'* ]] && name=$name:${count#*=}
        all=$all,$name
    done <"$1"
    [ -n "$all" ] || fail 2 "--hostfile $1: it names no host"
    read_hosts "${all#,}"
}

is_variable() { [[ $1 =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]]; }

# Reads the options up to the command. own_option NAME VALUE, of the script, takes those that are not in here.
read_options() {
    local name
    for name in LLMC_NCCL "${!NCCL_@}"; do
        if [ -n "${!name-}" ]; then variables+=("$name=${!name}"); fi
    done
    while [[ ${1-} == -* ]]; do
        case $1 in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --) shift; break ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        esac
        case $1 in
        --hosts | --hostfile | --address | --port | -x) ;;
        *) own_option "$1" || fail 2 "unknown option $1; see --help. The flags of the program follow its name: ... ./train_gpt2cu $1" ;;
        esac
        [ -n "${2-}" ] || fail 2 "$1 wants a value; see --help"
        case $1 in
        --hosts) read_hosts "$2" ;;
        --hostfile) read_hostfile "$2" ;;
        --address) address=$2 ;;
        --port) port=$2 ;;
        -x)
            name=${2%%=*}
            is_variable "$name" || fail 2 "-x $2: '$name' is not the name of a variable"
            if [[ $2 == *=* ]]; then
                variables+=("$2")
            else
                [ -n "${!name-}" ] || fail 2 "-x $name: this variable is not set; -x $name=VALUE sets it"
                variables+=("$name=${!name}")
            fi
            ;;
        *) own_option "$1" "$2" ;;
        esac
        shift 2
    done
    command=("$@")
    check_options
}

check_options() {
    [ "$num_ranks" -gt 0 ] || fail 2 "on which hosts, and how many GPUs has each? --hosts node01:8,node02:8"
    [ "$num_ranks" -le 4096 ] || fail 2 "$num_ranks GPUs are more than 4096"
    [ ${#command[@]} -gt 0 ] || fail 2 "no command: the program and its flags come last, ./train_gpt2cu -i ..."
    [ -n "$address" ] || address=${hosts[0]#*@}
    # a port that no other program of this kind uses; llmc/ranks.h has the same range
    [ -n "$port" ] || port=$((20000 + $(od -An -N4 -tu4 /dev/urandom) % 12000))
    [[ $port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535 ]] || fail 2 "--port $port: not a number from 1 to 65535"
    if [ ${#hosts[@]} -gt 1 ] && [[ $address == localhost || $address == 127.* ]]; then
        fail 2 "the other hosts cannot reach rank 0 at $address: name the first host as they know it, or give --address"
    fi
}

# Prints a command as one would type it.
print_command() { # WORD ...
    local word line='' quote="'\\''"
    for word in "$@"; do
        case $word in
        *[!A-Za-z0-9_./,:=@%+-]* | '') word="'${word//\'/$quote}'" ;;
        esac
        line="$line $word"
    done
    echo "${line# }"
}
