#!/usr/bin/env bash
# Downloads model weights, the vocabulary and datasets from their public addresses. See --help.
set -u

# item | file, relative to the target directory | URL | bytes (>N: at least N, -: unknown) | sha256 (-: unknown)
# The URLs name revisions, so what they give does not change; only the starter pack's name a branch. One vocabulary serves
# every size of GPT-2.
hf=https://huggingface.co
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
table() {
    if [ -n "${LLMC_DOWNLOAD_TABLE-}" ]; then
        cat "$LLMC_DOWNLOAD_TABLE"
        return
    fi
    gpt2_rows gpt2 "$gpt2" 665 0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4 \
        548105171 248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707
    gpt2_rows gpt2-medium $hf/openai-community/gpt2-medium/resolve/6dcaa7a952f72f9298047fd5137cd6e4f05f41da \
        718 ef1a44d889ad1a0acc7731c78134f1b87d2d222f110e97dd10fd4117331caf22 \
        1519984962 fc5a354a19255ad494f3d71549390baca1ccf61d1d822b9408971705c687c9cd
    gpt2_rows gpt2-large $hf/openai-community/gpt2-large/resolve/32b71b12589c2f8d625668d2335a01cac3249519 \
        666 7fccdcfd6622055342a734c663ee0b61ff4fd697f42467595df0bf4448c8c170 \
        '>3096120320' 5f47f3e12f91cd33b662ce7e433b6150ad5512b5884a2cee961b50e9c3bbebce # bytes: of the parameters alone
    gpt2_rows gpt2-xl $hf/openai-community/gpt2-xl/resolve/15ea56dee5df4983c59b2538573817e1667135e2 \
        689 be48115d52314bc27327e160bf10197760db02ea689d10adb24db4102edf7a8a \
        '>6230444800' 0f8b28eb05a8075f48b61b6f35332978c74fc7763fa9fb4051a1c30511736a6a
    echo "vocab | gpt2_tokenizer/$vocab_row"
    echo "vocab | gpt2_tokenizer/$merges_row"
    cat <<ROWS
tinyshakespeare | tinyshakespeare.txt | $github/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt | 1115394 | 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
hellaswag | hellaswag_val.jsonl | $github/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl | 12246618 | 0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588
llmc-pack | llmc/gpt2_tokenizer.bin | $pack/gpt2_tokenizer.bin | 372108 | 6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13
llmc-pack | llmc/tiny_shakespeare_val.bin | $pack/tiny_shakespeare_val.bin | 66560 | fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62
llmc-pack | llmc/tiny_shakespeare_train.bin | $pack/tiny_shakespeare_train.bin | 611544 | 8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8
llmc-pack | llmc/hellaswag_val.bin | $pack/hellaswag_val.bin | 3762386 | 59509ba401e820f2cd8b579141354e8ebc14a20f8e2cc181f1836f1d0e59eb99
llmc-pack | llmc/gpt2_124M_bf16.bin | $pack/gpt2_124M_bf16.bin | 248952832 | 6661f45628102b4c6e86835d9057b5ba2c024dbf9b81445175e258b7878a1a6f
llmc-pack | llmc/gpt2_124M.bin | $pack/gpt2_124M.bin | 497904640 | 3da8b207584030bcdcd207cf7a99952e3421dce92da218b351071857511bf162
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

A download that was interrupted goes on where it stopped: run the same command again. Every file is kept only if it has the
sha256 sum of the table; what is there and has it is not fetched again. Needs curl.

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
    local rc code try limit=$3 meter=(--silent --show-error) safety=()
    case $3 in # the most bytes that the file may have
    -) limit=200000000 ;;
    '>'*) limit=$((${3#>} + ${3#>} / 2)) ;;
    esac
    safety+=(--max-filesize "$limit")
    if [[ $1 == https:* ]]; then safety+=(--proto '=https' --proto-redir '=https'); fi # no redirect away from https
    [ -t 2 ] && meter=(--progress-bar)
    for try in 1 2 3 4 5; do
        # curl does not apply --max-filesize if the server does not say the size; ulimit's unit is 1024 bytes
        code=$(
            trap '' XFSZ
            ulimit -f $((limit / 1024 + 1)) 2>/dev/null
            curl --fail --location "${safety[@]}" --retry 3 --connect-timeout 30 --speed-limit 1 --speed-time 60 "${meter[@]}" \
                --continue-at - --output "$2" --write-out '%{http_code}' "$1"
        )
        rc=$?
        if [ $rc -eq 23 ] && [ -e "$2" ] && [ "$(wc -c <"$2")" -gt "$limit" ]; then
            rc=63
            rm -f "$2"
        fi
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
