#!/usr/bin/env bash
# scripts/download.sh against a local file server that imitates the faults of real servers (http_server.c).
. "$(dirname "$0")/test.sh"

server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$tmp"' EXIT

start_server() {
    command -v curl >/dev/null || return 1
    mkdir -p "$tmp/served/host.example/a"
    $CC -O1 -std=gnu11 -Wall -Wextra dev/test/http_server.c -o "$tmp/http_server" || exit 1
    "$tmp/http_server" "$tmp/served" >"$tmp/requests" &
    server=$!
    for ((i = 0; i < 100; i++)); do [ -s "$tmp/requests" ] || sleep 0.05; done
    LLMC_DOWNLOAD_BASE=http://127.0.0.1:$(head -n 1 "$tmp/requests")
    export LLMC_DOWNLOAD_BASE
    unset http_proxy HTTP_PROXY ALL_PROXY all_proxy
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
    contains "sha256 $(sum_of two) (no known sum" "$tmp/out"
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
    contains "failed: $LLMC_DOWNLOAD_BASE/host.example/a/short: is 999 bytes, 1000 are wanted" "$tmp/err"
    contains "a/junk: has sha256 $(sum_of junk), $(printf '%064d' 0) is wanted" "$tmp/err"
    contains "a/small: is 500 bytes, at least 501 are wanted" "$tmp/err"
    contains "a/absent: the server answers HTTP 404" "$tmp/err"
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
    local tls=$tmp/tls/host.example/a port= pid
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
    for tool in bash cat cut sort tr head grep wc mkdir dirname; do
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
    for arguments in "" "--nonsense" "--dir" "no-such-item" "gpt2 no-such-item"; do
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
    bad=$(grep -vE '^[a-z0-9-]+ \| [A-Za-z0-9_./-]+ \| https://[^ ]+ \| (-|>?[0-9]+) \| (-|[0-9a-f]{64})$' "$tmp/list" || true)
    want "rows of another form" "$bad" ""
    want "files that occur twice" "$(cut -d '|' -f 2 "$tmp/list" | sort | uniq -d)" ""
    want "rows without a sum" "$(grep -c -- '| -$' "$tmp/list")" 0
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

start_server
tests=(good wrong_size_sum_and_404 too_large too_large_without_a_size https_only not_the_file connection_lost goes_on_after_an_interrupt old_curl_and_a_whole_part a_bad_beginning_is_dropped
    server_without_ranges busy_server no_server no_curl usage table table_agrees_with_files)
run_tests_once "$@"
