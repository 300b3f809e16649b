#!/usr/bin/env bash
# scripts/download.sh against a local file server that imitates the faults of real servers (http_server.c).
. "$(dirname "$0")/../test.sh"

server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$tmp"' EXIT

start_server() {
    command -v curl >/dev/null || return 1
    mkdir -p "$tmp/served/host.example/a"
    $CC -O1 -std=gnu11 -Wall -Wextra dev/test/stand-ins/http_server.c -o "$tmp/http_server" || exit 1
    "$tmp/http_server" "$tmp/served" >"$tmp/requests" &
    server=$!
    for ((i = 0; i < 100; i++)); do [ -s "$tmp/requests" ] || sleep 0.05; done
    LLMC_DOWNLOAD_BASE=http://127.0.0.1:$(head -n 1 "$tmp/requests")
    export LLMC_DOWNLOAD_BASE
    unset HF_ENDPOINT http_proxy HTTP_PROXY ALL_PROXY all_proxy
}

# serve NAME BYTES: puts a file with unique content at https://host.example/a/NAME
serve() {
    mkdir -p "$tmp/served/host.example/a"
    yes "$1 " | head -c "$2" >"$tmp/served/host.example/a/$1"
}
sum_of() { sha256sum "$tmp/served/host.example/a/$1" | cut -d ' ' -f 1; }
row() { echo "$1 | $2 | https://host.example/a/$2 | $3 | $4" >>"$tmp/table"; } # ITEM NAME BYTES SHA256

# download ITEM ...: sets `status`; output goes to $tmp/out and $tmp/err
download() {
    status=0
    LLMC_DOWNLOAD_TABLE=$tmp/table scripts/download.sh --dir "$tmp/data" "$@" >"$tmp/out" 2>"$tmp/err" || status=$?
}
same() { cmp "$tmp/served/host.example/a/$1" "$tmp/data/$1" || fail "$1 is not what was served"; }
fresh() {
    [ -n "$server" ] || skip "needs curl"
    rm -rf "$tmp/table" "$tmp/data"
}

test_good() {
    fresh
    serve one 1000
    serve two 3000000
    serve other 10
    row set one 1000 "$(sum_of one)"
    row set two '>2000000' -
    row elsewhere other - -
    download set
    want status "$status" 0
    same one
    same two
    [ ! -e "$tmp/data/other" ] || fail "fetched an item that was not asked for"
    contains "sha256 $(sum_of two) of $tmp/data/two (no known sum" "$tmp/out"
    [ -z "$(find "$tmp/data" -name '*.part')" ] || fail "a .part is left"
    # a second download sends no request, unless a file is damaged
    lines=$(wc -l <"$tmp/requests")
    download set
    want "status of the second run" "$status" 0
    want "requests of the second run" "$(($(wc -l <"$tmp/requests") - lines))" 0
    echo x >>"$tmp/data/one"
    download set
    want "status after damage" "$status" 0
    same one
    download all
    same other
}

test_wrong_size_sum_and_404() {
    fresh
    serve short 999
    serve junk 1000
    serve small 500
    serve fine 100
    row set short 1000 -
    row set junk 1000 "$(printf '%064d' 0)"
    row set small '>501' -
    row set absent - -
    row set fine 100 -
    download set
    want status "$status" 1
    contains "failed: $LLMC_DOWNLOAD_BASE/host.example/a/short: is 999 bytes, 1000 are wanted; the server has another file: try another mirror" "$tmp/err"
    contains "a/junk: has sha256 $(sum_of junk), $(printf '%064d' 0) is wanted" "$tmp/err"
    contains "a/small: is 500 bytes, at least 501 are wanted" "$tmp/err"
    contains "a/absent: the server answers HTTP 404: it has no such file; try another mirror, or none (HF_ENDPOINT, LLMC_DOWNLOAD_BASE)" "$tmp/err"
    want "lines about failures" "$(grep -c '^failed: ' "$tmp/err")" 4
    want "what is there" "$(ls "$tmp/data")" fine # the other files were downloaded; no wrong file was kept
}

# a server that sends more than the file can have is cut off before it has sent it
test_too_large() {
    fresh
    serve huge 30000000
    row set huge 1000 -
    download set
    want status "$status" 1
    contains "failed: https://host.example/a/huge: the file is larger than expected" \
        <(sed "s#http://127[^/]*/host#https://host#" "$tmp/err")
    [ ! -e "$tmp/data/huge" ] || fail "a file that is too large is kept"
    [ "$(cat "$tmp"/data/huge.part 2>/dev/null | wc -c)" -lt 1000000 ] || fail "it was downloaded"
}

# the same if the server does not say how much it sends
test_too_large_without_a_size() {
    fresh
    serve huge-unsized 30000000
    serve small-unsized 5000
    row set huge-unsized 1000000 -
    row set small-unsized 5000 "$(sum_of small-unsized)"
    download set
    want status "$status" 1
    want failures "$(grep '^failed' "$tmp/err" | sed 's/^.*huge/huge/')" "huge-unsized: the file is larger than expected"
    want "what is there" "$(ls "$tmp/data")" small-unsized
    same small-unsized
    want requests "$(grep -c huge-unsized "$tmp/requests")" 1
}

# A server with https that redirects to one without: the file must not come over a connection that can be tampered with.
test_https_only() {
    fresh
    command -v openssl >/dev/null || skip "needs openssl"
    local tls=$tmp/tls/host.example/a port='' pid
    mkdir -p "$tls"
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
        -keyout "$tmp/key" -out "$tmp/cert" 2>"$tmp/err" || skip "openssl makes no certificate: $(tail -n 1 "$tmp/err")"
    serve target 1000
    printf 'HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nabcd' >"$tls/direct"
    printf 'HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' \
        "$LLMC_DOWNLOAD_BASE/host.example/a/target" >"$tls/redirect"
    : >"$tmp/tls.out"
    (cd "$tmp/tls" && exec openssl s_server -accept localhost:0 -cert "$tmp/cert" -key "$tmp/key" -HTTP) >"$tmp/tls.out" 2>&1 &
    pid=$!
    for ((i = 0; i < 100; i++)); do
        port=$(sed -n 's/^ACCEPT.*:\([0-9]*\)$/\1/p' "$tmp/tls.out")
        [ -z "$port" ] || break
        sleep 0.05
    done
    row set direct 4 "$(printf abcd | sha256sum | cut -d ' ' -f 1)"
    row set redirect 1000 "$(sum_of target)"
    lines=$(wc -l <"$tmp/requests")
    CURL_CA_BUNDLE=$tmp/cert LLMC_DOWNLOAD_BASE=https://localhost:$port download set
    kill $pid
    want status "$status" 1
    want "what is there" "$(ls "$tmp/data")" direct # the certificate is accepted
    contains "a/redirect: the server redirects to another protocol than https" "$tmp/err"
    want "requests without https" "$(($(wc -l <"$tmp/requests") - lines))" 0
}

test_not_the_file() {
    fresh
    serve page 10
    serve pointer 10
    printf '<!DOCTYPE html>\n<html>please log in</html>' >"$tmp/served/host.example/a/page"
    printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\n' >"$tmp/served/host.example/a/pointer"
    row set page - -
    row set pointer - -
    download set
    want status "$status" 1
    contains "a/page: is an HTML page" "$tmp/err"
    contains "a/pointer: is a git-lfs pointer" "$tmp/err"
}

test_connection_lost() {
    fresh
    serve flaky 200000
    row set flaky 200000 "$(sum_of flaky)"
    download set
    want status "$status" 0
    same flaky
    want "requests" "$(grep flaky "$tmp/requests" | tr '\n' ' ')" \
        "GET host.example/a/flaky 0 GET host.example/a/flaky 100000 "
}

# Cut at the same place again and again: it is given up, and what has come is kept for another try. A sleep is a twentieth second.
test_connection_lost_for_good() {
    fresh
    serve cut 200000
    row set cut 200000 "$(sum_of cut)"
    mkdir -p "$tmp/impatient"
    printf '#!/bin/sh\nexec %s 0.05\n' "$(command -v sleep)" >"$tmp/impatient/sleep"
    chmod +x "$tmp/impatient/sleep"
    PATH=$tmp/impatient:$PATH download set
    want status "$status" 1
    contains "/cut: the connection was lost; run this again to go on" "$tmp/err"
    want "what is there" "$(ls "$tmp/data") of $(wc -c <"$tmp/data/cut.part") bytes" "cut.part of 100000 bytes"
}

test_goes_on_after_an_interrupt() {
    fresh
    serve big 200000
    row set big 200000 "$(sum_of big)"
    mkdir -p "$tmp/data"
    head -c 150000 "$tmp/served/host.example/a/big" >"$tmp/data/big.part"
    download set
    want status "$status" 0
    same big
    want "requests" "$(grep /big "$tmp/requests")" "GET host.example/a/big 150000"
    # the file was complete; only the final rename was missing
    mv "$tmp/data/big" "$tmp/data/big.part"
    download set
    want "status with a whole .part" "$status" 0
    same big
}

# curl before 7.88 fails if the server answers that there are no more bytes
test_old_curl_and_a_whole_part() {
    fresh
    serve whole 1000
    row set whole 1000 "$(sum_of whole)"
    mkdir -p "$tmp/data" "$tmp/old"
    cp "$tmp/served/host.example/a/whole" "$tmp/data/whole.part"
    printf '#!/bin/sh\nprintf 416\nexit 22\n' >"$tmp/old/curl"
    chmod +x "$tmp/old/curl"
    PATH=$tmp/old:$PATH download set
    want status "$status" 0
    same whole
}

test_a_bad_beginning_is_dropped() {
    fresh
    serve mended 200000
    row set mended 200000 "$(sum_of mended)"
    mkdir -p "$tmp/data"
    head -c 150000 /dev/zero >"$tmp/data/mended.part"
    download set
    want status "$status" 0
    same mended
    head -c 250000 /dev/zero >"$tmp/data/mended.part" # longer than the file
    rm "$tmp/data/mended"
    download set
    want "status with a .part that is too long" "$status" 0
    same mended
}

test_server_without_ranges() {
    fresh
    serve norange 200000
    row set norange 200000 "$(sum_of norange)"
    mkdir -p "$tmp/data"
    head -c 150000 "$tmp/served/host.example/a/norange" >"$tmp/data/norange.part"
    download set
    want status "$status" 0
    same norange
}

test_busy_server() {
    fresh
    serve busy 1000
    row set busy 1000 "$(sum_of busy)"
    download set
    want status "$status" 0
    same busy
    want "requests" "$(grep -c busy "$tmp/requests")" 2
}

# an error that is told by a page larger than the file
test_error_pages() {
    fresh
    serve busy_page 1000
    row set busy_page 1000 "$(sum_of busy_page)"
    row set absent_page 1000 -
    download set
    want status "$status" 1
    same busy_page
    contains "a/absent_page: the server answers HTTP 404: it has no such file" "$tmp/err"
    want "lines about failures" "$(grep -c '^failed: ' "$tmp/err")" 1
}

test_no_server() {
    fresh
    row set one - -
    LLMC_DOWNLOAD_BASE=http://127.0.0.1:1 download set
    want status "$status" 1
    contains "no connection: is there a network" "$tmp/err"
}

test_no_curl() {
    rm -rf "$tmp/table" "$tmp/data"
    row set one - -
    mkdir -p "$tmp/bin"
    for tool in bash awk cat cut df flock head grep ls mkdir mktemp rm sleep sort tr wc xargs dirname; do
        ln -sf "$(command -v $tool)" "$tmp/bin/$tool"
    done
    status=0
    PATH=$tmp/bin LLMC_DOWNLOAD_TABLE=$tmp/table "$tmp/bin/bash" scripts/download.sh --dir "$tmp/data" set \
        >"$tmp/out" 2>"$tmp/err" || status=$?
    want status "$status" 1
    contains "needs curl: apt-get install curl" "$tmp/err"
    want "lines on stderr" "$(wc -l <"$tmp/err")" 1
}

test_usage() {
    for arguments in "" "--nonsense" "--dir" "no-such-item" "gpt2 no-such-item" "../gpt2" "--jobs" "--jobs 0 gpt2" "--jobs=33 gpt2" \
        "--jobs 4x gpt2" "fineweb10B:0" "fineweb10B:x" "fineweb10B:" "fineweb10B:1:2" "gpt2:1" "all:1"; do
        rc=0
        # shellcheck disable=SC2086
        scripts/download.sh $arguments >"$tmp/out" 2>"$tmp/err" || rc=$?
        want "status of '$arguments'" $rc 2
        [ -s "$tmp/err" ] && [ ! -s "$tmp/out" ] || fail "'$arguments' is not explained on stderr"
    done
    scripts/download.sh --help >"$tmp/out"
    for item in $(scripts/download.sh --list | cut -d ' ' -f 1 | sort -u); do contains "  $item " "$tmp/out"; done
}

# the built-in table: five fields per row, https, sums of 64 hex digits, no file twice
test_table() {
    scripts/download.sh --list >"$tmp/list"
    [ "$(wc -l <"$tmp/list")" -ge 20 ] || fail "$(wc -l <"$tmp/list") rows"
    bad=$(grep -vE '^[A-Za-z0-9_-]+ \| [A-Za-z0-9_./-]+ \| https://[^ ]+ \| (-|[<>]?[0-9]+) \| (-|[0-9a-f]{64})$' "$tmp/list" || true)
    want "rows of another form" "$bad" ""
    want "files that occur twice" "$(cut -d '|' -f 2 "$tmp/list" | sort | uniq -d)" ""
    want "items without sums" "$(grep -- '| -$' "$tmp/list" | cut -d ' ' -f 1 | sort -u | tr '\n' ' ')" "edu_fineweb100B "
    want "hosts" "$(sed 's#^.* https://##; s#/.*##' "$tmp/list" | sort -u | tr '\n' ' ')" "huggingface.co raw.githubusercontent.com "
    HF_ENDPOINT=http://mirror.example scripts/download.sh --list >"$tmp/mirror"
    want "table with a mirror" "$(sed 's#https://huggingface.co/#http://mirror.example/#' "$tmp/list")" "$(cat "$tmp/mirror")"
    want "items whose URLs name a branch" "$(grep -vE '/[0-9a-f]{40}/' "$tmp/list" | cut -d ' ' -f 1 | sort -u)" llmc-pack
}

# sizes and sums of the table match the files that are on this machine
test_table_agrees_with_files() {
    data=${LLMC_DATA:-../shared/data}
    [ -e "$data/tinyshakespeare.txt" ] || skip "needs LLMC_DATA with tinyshakespeare.txt and gpt2_tokenizer/"
    [ -n "$server" ] || skip "needs curl"
    rm -rf "$tmp/data"
    for name in gpt2_tokenizer/vocab.json gpt2_tokenizer/merges.txt tinyshakespeare.txt; do
        url=$(scripts/download.sh --list | awk -F ' [|] ' -v name="$name" '$2 == name {print $3}')
        mkdir -p "$(dirname "$tmp/served/${url#https://}")"
        cp "$data/$name" "$tmp/served/${url#https://}"
    done
    scripts/download.sh --dir "$tmp/data" vocab tinyshakespeare
    cmp "$data/gpt2_tokenizer/merges.txt" "$tmp/data/gpt2_tokenizer/merges.txt"
    cmp "$data/tinyshakespeare.txt" "$tmp/data/tinyshakespeare.txt"
}

magic="\\210\\330\\064\\001" version="\\001\\000\\000\\000"

# serve_shard NAME TOKENS [MAGIC [VERSION [TOKENS_OF_HEADER]]]: a shard of tokens; the three are octal for printf
serve_shard() {
    local file=$tmp/served/host.example/a/$1
    local count low high
    low=$(printf '%03o' $(($2 % 256))) high=$(printf '%03o' $(($2 / 256)))
    count="\\$low\\$high\\000\\000"
    # shellcheck disable=SC2059
    printf "${3-$magic}${4-$version}${5-$count}" >"$file"
    head -c 1012 /dev/zero >>"$file"
    yes "$1" | head -c $((2 * $2)) >>"$file"
}

# A shard gets its name only if its header and its size agree; ITEM:N; a second run downloads nothing.
test_shards() {
    fresh
    mkdir -p "$tmp/served/host.example/a/"
    local i name
    for name in s_val_000000 s_train_000001 s_train_000002 s_train_000003; do
        serve_shard $name.bin 1000
        row set $name.bin 3024 -
    done
    download set:2
    want "status" "$status" 0
    want "what is there" "$(ls "$tmp/data" | tr '\n' ' ')" "s_train_000001.bin s_train_000002.bin s_val_000000.bin "
    same s_train_000002.bin
    lines=$(wc -l <"$tmp/requests")
    download set:3
    want "status" "$status" 0
    want "requests for one shard more" "$(tail -n +$((lines + 1)) "$tmp/requests")" "GET host.example/a/s_train_000003.bin 0"
    download set
    want "requests of a further run" "$(($(wc -l <"$tmp/requests") - lines))" 1
    # each fault of a shard
    rm -rf "$tmp/data" "$tmp/table"
    serve_shard s_train_000001.bin 1000 '\210\330\064\002'
    serve_shard s_train_000002.bin 1000 '\210\330\064\001' '\002\000\000\000'
    serve_shard s_train_000003.bin 1000 '\210\330\064\001' '\001\000\000\000' '\351\003\000\000'
    serve s_train_000004.bin 1000
    : >"$tmp/served/host.example/a/s_train_000005.bin"
    serve_shard s_train_000006.bin 1001
    for i in 1 2 3 4 5; do row set s_train_00000$i.bin '<3026' -; done
    row set s_train_000006.bin '<3025' -
    download set
    want "status with bad shards" "$status" 1
    want "what is there" "$(find "$tmp/data" -name 's_*')" ""
    want "failures" "$(sed -n 's/; the server has another file: try another mirror, or none (HF_ENDPOINT, LLMC_DOWNLOAD_BASE)$//; s/^failed: .*s_train_//p' "$tmp/err")" "\
000001.bin: is not a shard of tokens: its header begins with '$((20240520 + 16777216)) 1', '20240520 1' is wanted
000002.bin: is not a shard of tokens: its header begins with '20240520 2', '20240520 1' is wanted
000003.bin: is 3024 bytes, its header says 1001 tokens: 3026 bytes
000004.bin: is not a shard of tokens: its header begins with '1920229235 1601071457', '20240520 1' is wanted
000005.bin: is not a shard of tokens: its header begins with ' ', '20240520 1' is wanted
000006.bin: the file is larger than expected"
}

# The built-in sets: their names, sizes and sums; `all` has none of them, and :N counts the shards to train on.
test_shard_sets() {
    scripts/download.sh --list >"$tmp/list"
    shards() { grep "^$1 " "$tmp/list"; }
    want "shards of fineweb10B" "$(shards fineweb10B | cut -d '|' -f 2 | tr -d ' ')" \
        "$(echo fineweb10B/fineweb_val_000000.bin; seq -f 'fineweb10B/fineweb_train_%06g.bin' 1 103)"
    want "sizes of fineweb10B" "$(shards fineweb10B | cut -d '|' -f 4 | sort -n | uniq -c | tr -s ' \n' ' ')" \
        " 1 110649110 103 200001024 "
    # what the trainers say of this set: 10,255,324,043 tokens
    want "its tokens" "$(shards fineweb10B | awk -F '|' '/_train_/ { n += ($4 - 1024) / 2 } END { printf "%.0f", n }')" 10255324043
    want "sums that occur twice" "$(shards fineweb10B | cut -d '|' -f 5 | sort | uniq -d)" ""
    want "shards of FineWeb-Edu" "$(shards edu_fineweb100B | wc -l)" 1002
    want "the last of them" "$(tail -n 1 "$tmp/list" | cut -d '|' -f 2,4)" " edu_fineweb100B/edu_fineweb_train_001001.bin | <200001024 "
    [ -n "$server" ] || skip "needs curl"
    rm -rf "$tmp/data"
    LLMC_DOWNLOAD_BASE=http://127.0.0.1:1 scripts/download.sh --dir "$tmp/data" --jobs 3 fineweb10B:2 2>"$tmp/err" >"$tmp/out" || true
    want "what fineweb10B:2 asks for" "$(grep -c '^failed: ' "$tmp/err") $(grep -c _val_000000 "$tmp/out")" "3 1"
    LLMC_DOWNLOAD_BASE=http://127.0.0.1:1 scripts/download.sh --dir "$tmp/data" all 2>"$tmp/err" >"$tmp/out" || true
    want "shards of 'all'" "$(grep -c fineweb "$tmp/out" || true)" 0
}

test_in_parallel() {
    fresh
    serve meet1 1000
    serve meet2 1000
    row set meet1 1000 "$(sum_of meet1)"
    row set meet2 1000 "$(sum_of meet2)"
    download --jobs 2 set
    want status "$status" 0
    same meet1
    same meet2
    want requests "$(grep -c meet "$tmp/requests")" 2
}

test_a_name_that_leaves_the_folder() {
    fresh
    serve evil 10
    local path
    for path in ../evil a/../../evil /evil "$tmp/evil" .. -evil ./evil; do
        echo "set | $path | https://host.example/a/evil | 10 | -" >"$tmp/table"
        lines=$(wc -l <"$tmp/requests")
        download set
        want "status of '$path'" "$status" 2
        contains "'$path' in the table is not a name below $tmp/data" "$tmp/err"
        want "requests of '$path'" "$(($(wc -l <"$tmp/requests") - lines))" 0
    done
    [ ! -e "$tmp/evil" ] || fail "a file was written beside the folder"
}

test_free_space_is_compared_first() {
    fresh
    serve one 3000000
    row set one 3000000 "$(sum_of one)"
    mkdir -p "$tmp/small" "$tmp/data"
    head -c 1000000 "$tmp/served/host.example/a/one" >"$tmp/data/one.part"
    # the columns of df -P, with a name of two words
    printf '#!/bin/sh\necho head\necho "a b 9999 9 $FREE_KB 9%% /c d"\n' >"$tmp/small/df"
    chmod +x "$tmp/small/df"
    lines=$(wc -l <"$tmp/requests")
    FREE_KB=1953 PATH=$tmp/small:$PATH download set
    want status "$status" 1
    contains "needs 2.0 MB in $tmp/data, and 2.0 MB are free: free some, name a disk with --dir" "$tmp/err"
    want "lines and requests" "$(wc -l <"$tmp/err") $(($(wc -l <"$tmp/requests") - lines))" "1 0"
    FREE_KB=1954 PATH=$tmp/small:$PATH download set
    want "status with enough" "$status" 0
    same one
}

# A disk that is full in the middle. curl writes to a file system of 1 MB, or, where none can be mounted, into ulimit.
test_a_full_disk() {
    fresh
    serve one 3000000
    serve two 1000
    row set two 1000 "$(sum_of two)"
    row set one "<4000000" "$(sum_of one)"
    mkdir -p "$tmp/data"
    status=0
    export LLMC_DOWNLOAD_TABLE=$tmp/table
    if unshare -rm mount -t tmpfs -o size=1m none "$tmp/data" 2>/dev/null; then
        mkdir "$tmp/full" && printf '#!/bin/sh\necho\necho a 9 9 9999 9%% b\n' >"$tmp/full/df" && chmod +x "$tmp/full/df" # as if it was empty
        PATH=$tmp/full:$PATH unshare -rm sh -c 'mount -t tmpfs -o size=1m none "$1" && scripts/download.sh --jobs 1 --dir "$1" set; rc=$?; ls "$1"; exit $rc' \
            sh "$tmp/data" >"$tmp/out" 2>"$tmp/err" || status=$?
        echo "note: on a file system of 1 MB"
    else
        (ulimit -f 1000 && scripts/download.sh --jobs 1 --dir "$tmp/data" set; rc=$?; ls "$tmp/data"; exit $rc) >"$tmp/out" 2>"$tmp/err" || status=$?
        echo "note: with ulimit -f, no file system can be mounted here"
    fi
    want status "$status" 1
    contains "a/one: cannot write: is the disk full? Free some space and run this again to go on" "$tmp/err"
    want "what is there" "$(grep -E '^(one|two)' "$tmp/out" | tr '\n' ' ')" "one.part two "
}

# SIGTERM ends curl as well; the next run goes on where it was
test_a_killed_run_goes_on() {
    fresh
    serve stalled 200000
    row set stalled 200000 "$(sum_of stalled)"
    LLMC_DOWNLOAD_TABLE=$tmp/table scripts/download.sh --dir "$tmp/data" set >"$tmp/out" 2>"$tmp/err" &
    local pid=$! i
    for ((i = 0; i < 200; i++)); do
        [ "$(cat "$tmp/data/stalled.part" 2>/dev/null | wc -c)" -lt 90000 ] || break
        sleep 0.05
    done
    kill -TERM $pid
    status=0
    wait $pid || status=$?
    want "status of SIGTERM" "$status" 130
    contains "interrupted: run this again to go on" "$tmp/err"
    want "what is there" "$(ls "$tmp/data")" stalled.part
    size=$(wc -c <"$tmp/data/stalled.part")
    download set
    want status "$status" 0 # also: nothing that was started holds the lock
    same stalled
    want requests "$(grep stalled "$tmp/requests" | tr '\n' ' ')" "GET host.example/a/stalled 0 GET host.example/a/stalled $size "
}

test_one_at_a_time() {
    fresh
    command -v flock >/dev/null || skip "needs flock"
    serve one 1000
    row set one 1000 -
    mkdir -p "$tmp/data"
    exec 8>"$tmp/data/.download.lock"
    flock 8
    download set
    want status "$status" 1
    want "standard error" "$(cat "$tmp/err")" "another download writes to $tmp/data: wait for its end, or name another --dir"
    exec 8>&-
    download set
    want "status afterwards" "$status" 0
}

test_progress() {
    fresh
    serve stall_too 200000
    row set stall_too 200000 "$(sum_of stall_too)"
    LLMC_PROGRESS_SECONDS=0.1 LLMC_DOWNLOAD_TABLE=$tmp/table scripts/download.sh --dir "$tmp/data" set >"$tmp/out" 2>"$tmp/err" &
    local pid=$! i
    for ((i = 0; i < 200; i++)); do
        ! grep -q '^0.00 of 0.00 GB | .* MB/s | ETA ' "$tmp/err" || break
        sleep 0.05
    done
    kill -TERM $pid
    wait $pid || true
    contains " of 0.00 GB | " "$tmp/err"
    contains " MB/s | ETA " "$tmp/err"
}

start_server
tests=(good wrong_size_sum_and_404 too_large too_large_without_a_size https_only not_the_file connection_lost
    connection_lost_for_good goes_on_after_an_interrupt old_curl_and_a_whole_part a_bad_beginning_is_dropped server_without_ranges busy_server error_pages no_server
    no_curl usage table table_agrees_with_files shards shard_sets in_parallel a_name_that_leaves_the_folder
    free_space_is_compared_first a_full_disk a_killed_run_goes_on one_at_a_time progress)
run_tests_once "$@"
