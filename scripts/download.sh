#!/usr/bin/env bash
# Downloads model weights, the vocabulary and datasets from their public addresses. See --help.
set -u

# item | file, relative to the target directory | URL | bytes (>N: at least N, <N: at most N, -: unknown) | sha256 (-: unknown)
# The URLs name revisions, so what they give does not change; only the starter pack's name a branch. One vocabulary serves
# every size of GPT-2.
hf=${HF_ENDPOINT:-https://huggingface.co}
hf=${hf%/}
gpt2=$hf/openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e
vocab_row="vocab.json | $gpt2/vocab.json | 1042301 | 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
merges_row="merges.txt | $gpt2/merges.txt | 456318 | 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
pack=$hf/datasets/karpathy/llmc-starter-pack/resolve/main
github=https://raw.githubusercontent.com
gpt2_rows() { # ITEM URL, BYTES SHA256 of config.json, BYTES SHA256 of the weights: a Hugging Face directory
    echo "$1 | $1/config.json | $2/config.json | $3 | $4"
    echo "$1 | $1/$vocab_row"
    echo "$1 | $1/$merges_row"
    echo "$1 | $1/model.safetensors | $2/model.safetensors | $5 | $6"
}

# Sets of token shards in llm.c's format: 1024 bytes of header, then 2 bytes per token. `all` leaves them out.
# fineweb10B: the shards of modded-nanogpt's data/cached_fineweb10B.py, made as llm.c's dev/data/fineweb.py makes them. Names,
#   sizes and sums are those of a public list for this revision, baseline/gpt2_small/speedrun30/data_manifest.json of
#   CalculatedContent/rg_optimizers (commit bb3114a). Other projects name the same sums for the validation shard and the first
#   one; one of them says that they are the Git LFS ids of the dataset. The sizes add up to 10,255,324,043 tokens to train on.
# edu_fineweb100B: the shards of llm.c's dev/data/edu_fineweb.sh. No list of their sums was found, nor the size of the last one:
#   headers and sizes are checked.
shard_sets=" fineweb10B edu_fineweb100B "
fineweb=$hf/datasets/kjj0/fineweb10B-gpt2/resolve/889765ea1f903759787add96995d81171b632d0c
edu=$hf/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/a33f75d78c7f74236fb03754ec1eb3cc77507d64
shard_bytes=200001024 # of a shard of 100 million tokens
fineweb_rows() {
    local sum name bytes
    while read -r sum name; do
        bytes=$shard_bytes
        [ "$name" != fineweb_train_000103.bin ] || bytes=110649110
        echo "fineweb10B | fineweb10B/$name | $fineweb/$name | $bytes | $sum"
    done <"$here/fineweb10B.sha256"
}
edu_rows() {
    awk -v url="$edu" -v bytes=$shard_bytes 'BEGIN {
        for (i = 0; i <= 1001; i++) {
            name = sprintf("edu_fineweb_%s_%06d.bin", i == 0 ? "val" : "train", i)
            printf "edu_fineweb100B | edu_fineweb100B/%s | %s/%s | %s%d | -\n", name, url, name, i == 1001 ? "<" : "", bytes
        }
    }'
}

table() {
    if [ -n "${LLMC_DOWNLOAD_TABLE-}" ]; then
        cat "$LLMC_DOWNLOAD_TABLE"
        return
    fi
    gpt2_rows gpt2 "$gpt2" 665 0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4 \
        548105171 248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707
    gpt2_rows gpt2-medium "$hf/openai-community/gpt2-medium/resolve/6dcaa7a952f72f9298047fd5137cd6e4f05f41da" \
        718 ef1a44d889ad1a0acc7731c78134f1b87d2d222f110e97dd10fd4117331caf22 \
        1519984962 fc5a354a19255ad494f3d71549390baca1ccf61d1d822b9408971705c687c9cd
    gpt2_rows gpt2-large "$hf/openai-community/gpt2-large/resolve/32b71b12589c2f8d625668d2335a01cac3249519" \
        666 7fccdcfd6622055342a734c663ee0b61ff4fd697f42467595df0bf4448c8c170 \
        '>3096120320' 5f47f3e12f91cd33b662ce7e433b6150ad5512b5884a2cee961b50e9c3bbebce # bytes: of the parameters alone
    gpt2_rows gpt2-xl "$hf/openai-community/gpt2-xl/resolve/15ea56dee5df4983c59b2538573817e1667135e2" \
        689 be48115d52314bc27327e160bf10197760db02ea689d10adb24db4102edf7a8a \
        '>6230444800' 0f8b28eb05a8075f48b61b6f35332978c74fc7763fa9fb4051a1c30511736a6a
    echo "vocab | gpt2_tokenizer/$vocab_row"
    echo "vocab | gpt2_tokenizer/$merges_row"
    cat <<ROWS
tinyshakespeare | tinyshakespeare.txt | $github/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt | 1115394 | 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
hellaswag | hellaswag_val.jsonl | $github/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl | 12246618 | 0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588
lambada | lambada_test.jsonl | $hf/datasets/EleutherAI/lambada_openai/resolve/900124bf3b8235c6daf21033af9948b3f07346c4/data/lambada_test.jsonl | 1819752 | 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226
llmc-pack | llmc/gpt2_tokenizer.bin | $pack/gpt2_tokenizer.bin | 372108 | 6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13
llmc-pack | llmc/tiny_shakespeare_val.bin | $pack/tiny_shakespeare_val.bin | 66560 | fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62
llmc-pack | llmc/tiny_shakespeare_train.bin | $pack/tiny_shakespeare_train.bin | 611544 | 8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8
llmc-pack | llmc/hellaswag_val.bin | $pack/hellaswag_val.bin | 3762386 | 59509ba401e820f2cd8b579141354e8ebc14a20f8e2cc181f1836f1d0e59eb99
llmc-pack | llmc/gpt2_124M_bf16.bin | $pack/gpt2_124M_bf16.bin | 248952832 | 6661f45628102b4c6e86835d9057b5ba2c024dbf9b81445175e258b7878a1a6f
llmc-pack | llmc/gpt2_124M.bin | $pack/gpt2_124M.bin | 497904640 | 3da8b207584030bcdcd207cf7a99952e3421dce92da218b351071857511bf162
ROWS
    fineweb_rows
    edu_rows
}

usage() {
    cat <<'HELP'
usage: scripts/download.sh [--dir DIR] [--jobs N] ITEM ...

  item              size      licence               what, and where below DIR
  gpt2              550 MB    modified MIT, OpenAI  124M weights, config, vocabulary     gpt2/
  gpt2-medium       1.5 GB    modified MIT, OpenAI  355M                                 gpt2-medium/
  gpt2-large        3.2 GB    modified MIT, OpenAI  774M                                 gpt2-large/
  gpt2-xl           6.4 GB    modified MIT, OpenAI  1558M                                gpt2-xl/
  vocab             1.5 MB    modified MIT, OpenAI  vocab.json and merges.txt alone      gpt2_tokenizer/
  tinyshakespeare   1.1 MB    public domain         one text file                        tinyshakespeare.txt
  hellaswag         12 MB     MIT                   validation set                       hellaswag_val.jsonl
  lambada           1.8 MB    MIT                   test set, as OpenAI prepared it      lambada_test.jsonl
  llmc-pack         760 MB    as the above          llm.c's .bin model, shards, eval     llmc/
  all               12.5 GB                         all of these

  shards of GPT-2's tokens, 100 million in each of 200 MB, and a shard to validate on:
  fineweb10B        20.7 GB   ODC-By 1.0            103 shards of FineWeb                fineweb10B/
  edu_fineweb100B   200 GB    ODC-By 1.0            1,001 shards of FineWeb-Edu          edu_fineweb100B/
  fineweb10B:20     4.2 GB                          the first 20 shards to train on; so with the other set

  --dir DIR         where to put them (default: data)
  --jobs N          download N files at once, 1 to 32 (default: 4)
  --list            print the table: item | file | URL | bytes | sha256
  --help, -h        this text

Nothing is downloaded if the disk has too little free space for all of it. Run the same command again to resume an interrupted
download; files that are complete are not fetched again. A file gets its name only when its size and sha256 are those of the
table, and, for a shard of tokens, its header is right. The sums of FineWeb-Edu's shards are not known: headers and sizes are
checked, and the sums are printed. Needs curl.

Exit status: 0 all is there, 1 something failed (one line for each at the end; the rest was fetched), 2 usage.

Environment:
  HF_ENDPOINT=URL           a mirror of https://huggingface.co
  LLMC_DOWNLOAD_BASE=URL    fetch https://HOST/PATH from URL/HOST/PATH: a local copy or file server for all hosts
  LLMC_DOWNLOAD_TABLE=FILE  a table as --list prints it, in place of the built-in one
HELP
}

size_of() { wc -c <"$1" | tr -d ' '; } # FILE: its bytes

# Prints why FILE is not a shard of GPT-2's tokens: magic, version, number of tokens; then 2 bytes a token.
what_is_wrong_with_header() { # FILE BYTES
    local magic version tokens
    read -r magic version tokens < <(od -An -tu4 -N12 "$1" | tr '\n' ' ')
    if [ "${magic-}" != 20240520 ] || [ "${version-}" != 1 ]; then
        echo "is not a shard of tokens: its header begins with '${magic-} ${version-}', '20240520 1' is wanted"
    elif [ "$2" -ne $((1024 + 2 * tokens)) ]; then
        echo "is $2 bytes, its header says $tokens tokens: $((1024 + 2 * tokens)) bytes"
    fi
}

# Prints why FILE, which is or will be named PATH, does not match BYTES and SHA256, or nothing if it matches.
what_is_wrong() { # FILE PATH BYTES SHA256
    local size sum
    size=$(size_of "$1")
    case $3 in
    -) ;;
    '>'*) [ "$size" -ge "${3#>}" ] || { echo "is $size bytes, at least ${3#>} are wanted"; return; } ;;
    '<'*) [ "$size" -le "${3#<}" ] || { echo "is $size bytes, at most ${3#<} are wanted"; return; } ;;
    *) [ "$size" -eq "$3" ] || { echo "is $size bytes, $3 are wanted"; return; } ;;
    esac
    if head -c 64 "$1" | tr -d '\0' | grep -qiE '^[[:space:]]*<(!doctype|html)'; then
        echo "is an HTML page: the server sent a login or error page"
        return
    elif head -c 64 "$1" | tr -d '\0' | grep -q '^version https://git-lfs'; then
        echo "is a git-lfs pointer, not the file"
        return
    fi
    case $2 in
    *_train_[0-9][0-9][0-9][0-9][0-9][0-9].bin | *_val_[0-9][0-9][0-9][0-9][0-9][0-9].bin)
        sum=$(what_is_wrong_with_header "$1" "$size")
        [ -z "$sum" ] || { echo "$sum"; return; }
        ;;
    esac
    [ "$4" = - ] && return
    sum=$(sha256 "$1")
    [ "$sum" = "$4" ] || echo "has sha256 $sum, $4 is wanted"
}

sha256() { # FILE
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

curl_reason() { # STATUS HTTP_CODE
    case $1 in
    6 | 7) echo "no connection: is there a network, and does it need a proxy (https_proxy)?" ;;
    18 | 28 | 52 | 55 | 56 | 92) echo "the connection was lost; run this again to go on" ;;
    22)
        case $2 in
        404) echo "the server answers HTTP 404: it has no such file; try another mirror, or none (HF_ENDPOINT, LLMC_DOWNLOAD_BASE)" ;;
        *) echo "the server answers HTTP $2; run this again later" ;;
        esac
        ;;
    23) echo "cannot write: is the disk full? Free some space and run this again to go on" ;;
    1) echo "the server redirects to another protocol than https" ;;
    63) echo "the file is larger than expected" ;;
    35 | 60) echo "no secure connection: is the package ca-certificates installed?" ;;
    *) echo "curl ends with status $1, see 'man curl'" ;;
    esac
}

# Resumes the download of URL: appends to PART the bytes that it lacks. Sets `reason` on failure.
fetch() { # URL PART BYTES
    local rc code size tries=0 before=0 limit=$3 safety=()
    case $3 in # the most bytes that the file may have
    -) limit=200000000 ;;
    '>'*) limit=$((${3#>} + ${3#>} / 2)) ;;
    '<'*) limit=${3#<} ;;
    esac
    safety+=(--max-filesize "$limit")
    if [[ $1 == https:* ]]; then safety+=(--proto '=https' --proto-redir '=https'); fi # no redirect away from https
    while [ $tries -lt 5 ]; do
        # curl does not apply --max-filesize if the server does not say the size; ulimit's unit is 1024 bytes
        code=$(
            trap '' XFSZ
            ulimit -f $((limit / 1024 + 1)) 2>/dev/null
            curl --fail --location "${safety[@]}" --retry 3 --connect-timeout 30 --speed-limit 1 --speed-time 60 \
                --silent --show-error --continue-at - --output "$2" --write-out '%{http_code}' "$1"
        )
        rc=$?
        size=0
        [ ! -e "$2" ] || size=$(size_of "$2")
        if [ $rc -eq 23 ] && [ "$size" -gt "$limit" ]; then
            rc=63
            rm -f "$2"
        fi
        if [ $rc -eq 63 ] && [ "${code:-0}" -ge 400 ]; then # the page that tells the error was larger than the file
            rc=22
            if [ "$code" -ge 500 ] && [ $((tries += 1)) -lt 4 ]; then
                sleep $tries
                continue
            fi
        fi
        case $rc in
        0) return 0 ;;
        18 | 28 | 52 | 55 | 56 | 92) # connection cut: resume where it stopped; five times without a byte are enough
            tries=$((tries + 1))
            [ "$size" -le "$before" ] || tries=1
            before=$size
            [ $tries -eq 5 ] || sleep $tries
            ;;
        33) # the server has no ranges: start over
            tries=$((tries + 1))
            rm -f "$2"
            ;;
        22) # 416: the server has nothing beyond our bytes; the size and the sum decide if the file is complete
            [ "$code" = 416 ] && [ -s "$2" ] && return 0
            break
            ;;
        *) break ;;
        esac
    done
    reason=$(curl_reason $rc "$code")
    return 1
}

# Downloads one row of the table. Sets `reason` on failure.
get() { # PATH URL BYTES SHA256
    local path=$1 url=$2 bytes=$3 sum=$4 part=$1.part from_start=no
    if [ -e "$path" ]; then
        reason=$(what_is_wrong "$path" "$path" "$bytes" "$sum")
        if [ -z "$reason" ]; then
            echo "have $path"
            return 0
        fi
        echo "$path $reason: fetching it again" >&2
    fi
    mkdir -p "$(dirname "$path")" || { reason="cannot create the directory of $path"; return 1; }
    command -v curl >/dev/null || { reason="needs curl: apt-get install curl"; return 1; }
    while true; do
        [ -s "$part" ] || from_start=yes
        echo "fetching $path from $url"
        fetch "$url" "$part" "$bytes" || return 1
        reason=$(what_is_wrong "$part" "$path" "$bytes" "$sum")
        [ -n "$reason" ] || break
        rm -f "$part"
        if [ "$from_start" = yes ]; then # else the partial file may have been wrong: download the whole file once more
            reason="$reason; the server has another file: try another mirror, or none (HF_ENDPOINT, LLMC_DOWNLOAD_BASE)"
            return 1
        fi
    done
    mv -f "$part" "$path" || { reason="cannot rename $part"; return 1; }
    if [ "$sum" = - ]; then echo "  sha256 $(sha256 "$path") of $path (no known sum to compare with)"; fi
}

# Prints the rows of the table that ITEMs ask for; ITEM:N stands for the first N shards to train on and the others of its set.
wanted_rows() { # ITEM ...
    table | awk -F '|' -v items="$*" -v sets="$shard_sets" '
        BEGIN {
            for (i = split(items, word, " "); i > 0; i--) {
                n = split(word[i], part, ":") == 1 ? 1e9 : part[2]
                if (!(part[1] in most) || n > most[part[1]]) { most[part[1]] = n }
            }
        }
        {
            gsub(/ /, "")
            if (!($1 in most) && (!("all" in most) || index(sets, " " $1 " "))) { next }
            if ($1 in most && $2 ~ /_train_[0-9]+\.bin$/ && ++shards[$1] > most[$1]) { next }
            print $1 "|" $2 "|" $3 "|" $4 "|" $5
        }'
}

# Checks the names of items: `known` has those of the table between spaces. Prints why one of them is wrong.
check_items() { # ITEM ...
    local word item n
    for word in "$@"; do
        item=${word%%:*} n=${word#*:}
        [[ $known == *" $item "* ]] || { echo "no item '$word'; there are:${known}(see --help)"; return 1; }
        if [[ $word != *:* ]]; then continue; fi
        table | awk -v item="$item" '$1 == item && /_train_[0-9]+\.bin/ { found = 1 } END { exit !found }' ||
            { echo "'$word': $item is not a set of shards, leave out ':$n'"; return 1; }
        [[ $n =~ ^[1-9][0-9]{0,3}$ ]] || { echo "'$word': the number of shards is 1 to 9999, not '$n'"; return 1; }
    done
}

bytes_there() { # FILE ...: adds up the bytes of those that are there, and of their partial files
    { printf '%s\0' "$@"; printf '%s.part\0' "$@"; } | xargs -0 ls -lnd -- 2>/dev/null | awk '{ n += $5 } END { printf "%.0f\n", n }'
}
free_bytes() { # DIR: nothing if it is not known
    df -Pk -- "$1" 2>/dev/null | awk 'NR == 2 { for (i = 2; i <= NF; i++) { if ($i ~ /%$/) { printf "%.0f\n", $(i - 1) * 1024 } } }'
}
gigabytes() { awk -v n="$1" 'BEGIN { printf n < 1e9 ? "%.1f MB" : "%.1f GB", n < 1e9 ? n / 1e6 : n / 1e9 }'; }

# Prints what has come and what is left, once a second on a terminal, else every half minute.
show_progress() { # TOTAL FILE ...
    local total=$1 first now start=$SECONDS every=30 end='\n'
    shift
    if [ -t 2 ]; then every=1 end='   \r'; fi
    every=${LLMC_PROGRESS_SECONDS-$every}
    first=$(bytes_there "$@")
    while sleep "$every" && kill -0 $$; do # $$: the script, which may have been killed -9
        now=$(bytes_there "$@")
        awk -v now="$now" -v first="$first" -v total="$total" -v s=$((SECONDS - start)) -v end="$end" 'BEGIN {
            rate = s > 0 ? (now - first) / s : 0
            left = rate > 0 ? (total - now) / rate : -1
            eta = left < 0 ? "?" : sprintf(left < 3600 ? "%dm%02ds" : "%dh%02dm", left < 3600 ? left / 60 : left / 3600,
                left < 3600 ? left % 60 : left / 60 % 60)
            printf "%.2f of %.2f GB | %.1f MB/s | ETA %s" end, now * 1e-9, total * 1e-9, rate * 1e-6, eta
        }' >&2
    done
}

# One of several that work on `rows` side by side: takes each row that no other has taken, and leaves the reason of a failure.
work() {
    local i item path url bytes sum
    for i in "${!rows[@]}"; do
        kill -0 $$ || return
        mkdir "$state/$i" 2>/dev/null || continue
        IFS='|' read -r item path url bytes sum <<<"${rows[i]}"
        [ -z "${LLMC_DOWNLOAD_BASE-}" ] || url=${LLMC_DOWNLOAD_BASE%/}/${url#*://}
        reason=
        get "$dir/$path" "$url" "$bytes" "$sum" || echo "failed: $url: $reason" >"$state/$i/failed"
    done
}

# Ends what was started: set -m gives each of them, with its curl, a process group. Partial files stay.
clean_up() {
    local pid
    set +m # or the shell would report their end
    for pid in ${pids[@]+"${pids[@]}"}; do kill -- -"$pid" 2>/dev/null; done
    rm -rf "$state"
}

# Downloads all `rows` to `dir`, `jobs` at a time.
download() {
    local row item path url bytes sum total=0 there free files=() i failed=0
    for row in "${rows[@]}"; do
        IFS='|' read -r item path url bytes sum <<<"$row"
        if [[ ! $path =~ ^[A-Za-z0-9_][A-Za-z0-9_./-]*$ || /$path/ == */../* ]]; then
            echo "'$path' in the table is not a name below $dir: without '..', of letters, digits and _ . / -" >&2
            return 2
        fi
        files+=("$dir/$path")
        bytes=${bytes#[<>]}
        [ "$bytes" = - ] || total=$((total + bytes))
    done
    mkdir -p "$dir" || return 1
    there=$(bytes_there "${files[@]}") free=$(free_bytes "$dir")
    if [ -n "$free" ] && [ $((total - there)) -gt "$free" ]; then
        echo "needs $(gigabytes $((total - there))) in $dir, and $(gigabytes "$free") are free: free some, name a disk with --dir," \
            "or take fewer shards, as in fineweb10B:20" >&2
        return 1
    fi
    if command -v flock >/dev/null; then # curl inherits the lock: also one that has outlived its script
        exec 9>"$dir/.download.lock" || return 1
        flock -n 9 || { echo "another download writes to $dir: wait for its end, or name another --dir" >&2; return 1; }
    fi
    state=$(mktemp -d "${TMPDIR:-/tmp}/llmc_download_XXXXXX") || return 1
    pids=()
    trap clean_up EXIT
    trap 'echo "interrupted: run this again to go on" >&2; exit 130' INT TERM HUP
    set -m
    show_progress "$total" "${files[@]}" </dev/null 9>&- &
    pids+=($!)
    for ((i = 0; i < jobs; i++)); do
        work </dev/null &
        pids+=($!)
    done
    wait "${pids[@]:1}"
    for i in "${!rows[@]}"; do
        [ ! -e "$state/$i/failed" ] || { cat "$state/$i/failed" >&2; failed=1; }
    done
    return $failed
}

main() {
    local items=() message
    here=$(dirname "$0") dir=data jobs=4 rows=() known=
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help) usage; return 0 ;;
        --list) table; return 0 ;;
        --dir)
            [ -n "${2-}" ] || { echo "--dir wants a directory" >&2; return 2; }
            dir=$2
            shift
            ;;
        --dir=?*) dir=${1#--dir=} ;;
        --jobs)
            jobs=${2-}
            [ $# -eq 1 ] || shift
            ;;
        --jobs=*) jobs=${1#--jobs=} ;;
        -*) echo "unknown option $1; see --help" >&2; return 2 ;;
        *) items+=("$1") ;;
        esac
        shift
    done
    if [ ${#items[@]} -eq 0 ]; then
        usage >&2
        return 2
    fi
    [[ $jobs =~ ^([1-9]|[12][0-9]|3[0-2])$ ]] || { echo "--jobs wants a number from 1 to 32, not '$jobs'" >&2; return 2; }
    known=" all $(table | cut -d ' ' -f 1 | sort -u | tr '\n' ' ')"
    message=$(check_items "${items[@]}") || { echo "$message" >&2; return 2; }
    while read -r message; do rows+=("$message"); done < <(wanted_rows "${items[@]}")
    download
}

main "$@"
