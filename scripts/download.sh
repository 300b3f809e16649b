#!/usr/bin/env bash
# Downloads model weights, the vocabulary and datasets from their public addresses. See --help.
set -u

# item | file, relative to the target directory | URL | bytes (>N: at least N, -: unknown) | sha256 (-: unknown)
# One vocabulary serves every size of GPT-2.
hf=https://huggingface.co
vocab_row="vocab.json | $hf/openai-community/gpt2/resolve/main/vocab.json | 1042301 | 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
merges_row="merges.txt | $hf/openai-community/gpt2/resolve/main/merges.txt | 456318 | 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
pack=$hf/datasets/karpathy/llmc-starter-pack/resolve/main
gpt2_rows() { # ITEM BYTES SHA256: a Hugging Face directory; BYTES is the size of the fp32 weights, a lower bound of the file's
    echo "$1 | $1/config.json | $hf/openai-community/$1/resolve/main/config.json | - | -"
    echo "$1 | $1/$vocab_row"
    echo "$1 | $1/$merges_row"
    echo "$1 | $1/model.safetensors | $hf/openai-community/$1/resolve/main/model.safetensors | $2 | $3"
}
table() {
    if [ -n "${LLMC_DOWNLOAD_TABLE-}" ]; then
        cat "$LLMC_DOWNLOAD_TABLE"
        return
    fi
    gpt2_rows gpt2 548105171 248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707
    gpt2_rows gpt2-medium '>1419292672' -
    gpt2_rows gpt2-large '>3096120320' -
    gpt2_rows gpt2-xl '>6230444800' -
    echo "vocab | gpt2_tokenizer/$vocab_row"
    echo "vocab | gpt2_tokenizer/$merges_row"
    cat <<ROWS
tinyshakespeare | tinyshakespeare.txt | https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt | 1115394 | 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
hellaswag | hellaswag_val.jsonl | https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl | - | -
llmc-pack | llmc/gpt2_tokenizer.bin | $pack/gpt2_tokenizer.bin | - | -
llmc-pack | llmc/tiny_shakespeare_val.bin | $pack/tiny_shakespeare_val.bin | 66560 | -
llmc-pack | llmc/tiny_shakespeare_train.bin | $pack/tiny_shakespeare_train.bin | 611544 | -
llmc-pack | llmc/hellaswag_val.bin | $pack/hellaswag_val.bin | - | -
llmc-pack | llmc/gpt2_124M_bf16.bin | $pack/gpt2_124M_bf16.bin | 248952832 | -
llmc-pack | llmc/gpt2_124M.bin | $pack/gpt2_124M.bin | 497904640 | -
ROWS
}

usage() {
    cat <<'HELP'
usage: scripts/download.sh [--dir DIR] ITEM ...

  item              size      licence               what, and where below DIR
  gpt2              550 MB    modified MIT, OpenAI  124M weights, config, vocabulary     gpt2/
  gpt2-medium       1.5 GB    modified MIT, OpenAI  355M                                 gpt2-medium/
  gpt2-large        3.2 GB    modified MIT, OpenAI  774M                                 gpt2-large/
  gpt2-xl           6.4 GB    modified MIT, OpenAI  1558M                                gpt2-xl/
  vocab             1.5 MB    modified MIT, OpenAI  vocab.json and merges.txt alone      gpt2_tokenizer/
  tinyshakespeare   1.1 MB    public domain         one text file                        tinyshakespeare.txt
  hellaswag         12 MB     MIT                   validation set                       hellaswag_val.jsonl
  llmc-pack         760 MB    as the above          llm.c's .bin model, shards, eval     llmc/
  all               12.5 GB                         all of these

  --dir DIR         where to put them (default: data)
  --list            print the table: item | file | URL | bytes | sha256
  --help, -h        this text

A download that was interrupted goes on where it stopped: run the same command again. What is there and has the right size
and sum is not fetched again; where no sum is known, the one that was found is printed. Needs curl.

Exit status: 0 all is there, 1 something failed (one line for each at the end; the rest was fetched), 2 usage.

Environment:
  LLMC_DOWNLOAD_BASE=URL    fetch https://HOST/PATH from URL/HOST/PATH: a mirror, or a local file server
  LLMC_DOWNLOAD_TABLE=FILE  a table as --list prints it, in place of the built-in one
HELP
}

# Prints why FILE does not match BYTES and SHA256, or nothing if it matches.
what_is_wrong() { # FILE BYTES SHA256
    local size sum
    size=$(wc -c <"$1" | tr -d ' ')
    case $2 in
    -) ;;
    '>'*) [ "$size" -ge "${2#>}" ] || { echo "is $size bytes, at least ${2#>} are wanted"; return; } ;;
    *) [ "$size" -eq "$2" ] || { echo "is $size bytes, $2 are wanted"; return; } ;;
    esac
    if head -c 64 "$1" | tr -d '\0' | grep -qiE '^[[:space:]]*<(!doctype|html)'; then
        echo "is an HTML page: the server sent a login or error page"
        return
    elif head -c 64 "$1" | tr -d '\0' | grep -q '^version https://git-lfs'; then
        echo "is a git-lfs pointer, not the file"
        return
    fi
    [ "$3" = - ] && return
    sum=$(sha256 "$1")
    [ "$sum" = "$3" ] || echo "has sha256 $sum, $3 is wanted"
}

sha256() { # FILE
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

curl_reason() { # STATUS HTTP_CODE
    case $1 in
    6 | 7) echo "no connection: is there a network, and does it need a proxy (https_proxy)?" ;;
    18 | 28 | 52 | 55 | 56 | 92) echo "the connection was lost; run this again to go on" ;;
    22) echo "the server answers HTTP $2" ;;
    23) echo "cannot write: is the disk full?" ;;
    1) echo "the server redirects to another protocol than https" ;;
    63) echo "the file is larger than expected" ;;
    35 | 60) echo "no secure connection: is the package ca-certificates installed?" ;;
    *) echo "curl ends with status $1, see 'man curl'" ;;
    esac
}

# Resumes the download of URL: appends to PART the bytes that it lacks. Sets `reason` on failure.
fetch() { # URL PART BYTES
    local rc code try meter=(--silent --show-error) safety=()
    # no redirect away from https; not more bytes than the file may have (3)
    if [[ $1 == https:* ]]; then safety+=(--proto '=https' --proto-redir '=https'); fi
    case $3 in
    -) safety+=(--max-filesize 200000000) ;;
    '>'*) safety+=(--max-filesize $((${3#>} + ${3#>} / 2))) ;;
    *) safety+=(--max-filesize "$3") ;;
    esac
    [ -t 2 ] && meter=(--progress-bar)
    for try in 1 2 3 4 5; do
        code=$(curl --fail --location "${safety[@]}" --retry 3 --connect-timeout 30 --speed-limit 1 --speed-time 60 "${meter[@]}" \
            --continue-at - --output "$2" --write-out '%{http_code}' "$1")
        rc=$?
        case $rc in
        0) return 0 ;;
        18 | 28 | 52 | 55 | 56 | 92) [ "$try" -eq 5 ] || sleep "$try" ;; # connection cut: resume where it stopped
        33) rm -f "$2" ;; # the server has no ranges: start over
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
        reason=$(what_is_wrong "$path" "$bytes" "$sum")
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
        reason=$(what_is_wrong "$part" "$bytes" "$sum")
        [ -n "$reason" ] || break
        rm -f "$part"
        [ "$from_start" = no ] || return 1 # the partial file may have been wrong: download the whole file once more
    done
    mv -f "$part" "$path" || { reason="cannot rename $part"; return 1; }
    if [ "$sum" = - ]; then echo "  sha256 $(sha256 "$path") (no known sum to compare with)"; fi
}

main() {
    local dir=data items=() failures=() rows row item path url bytes sum known reason=
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help) usage; return 0 ;;
        --list) table; return 0 ;;
        --dir)
            [ $# -gt 1 ] && [ -n "$2" ] || { echo "--dir wants a directory" >&2; return 2; }
            dir=$2
            shift
            ;;
        --dir=?*) dir=${1#--dir=} ;;
        -*) echo "unknown option $1; see --help" >&2; return 2 ;;
        *) items+=("$1") ;;
        esac
        shift
    done
    if [ ${#items[@]} -eq 0 ]; then
        usage >&2
        return 2
    fi
    rows=$(table)
    known=" all $(cut -d ' ' -f 1 <<<"$rows" | sort -u | tr '\n' ' ')"
    for item in "${items[@]}"; do
        [[ $known == *" $item "* ]] || { echo "no item '$item'; there are:${known}(see --help)" >&2; return 2; }
    done
    while read -r row; do
        IFS='|' read -r item path url bytes sum <<<"${row// /}"
        [ -n "$item" ] && [[ " ${items[*]} " == *" $item "* || " ${items[*]} " == *" all "* ]] || continue
        [ -z "${LLMC_DOWNLOAD_BASE-}" ] || url=${LLMC_DOWNLOAD_BASE%/}/${url#*://}
        get "$dir/$path" "$url" "$bytes" "$sum" || failures+=("failed: $url: $reason")
    done <<<"$rows"
    [ ${#failures[@]} -eq 0 ] && return 0
    printf '%s\n' "${failures[@]}" >&2
    return 1
}

main "$@"
