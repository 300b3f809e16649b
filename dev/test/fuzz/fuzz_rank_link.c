/* Fuzz target: the reader of the messages between the ranks. The input is what the other of two ranks sends before it ends. An
   exchange succeeds only if that begins with its record; else it fails, with one printable line. It makes no difference
   whether the bytes come at once or one by one. A watchdog sees the end before the exchange.

   The first byte says which rank this is (bit 0), and how the bytes come (bits 1 and 2).

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_rank_link.c -lm -lpthread -o fuzz_rank_link && ./fuzz_rank_link */
#include "../../../llmc/rank_link.h"

enum { WHAT = 5, BYTES = 4 };

static void check_line(const char* text) {
    require(text[0] != '\0');
    for (const uint8_t* p = (const uint8_t*)text; *p; p++) { require(*p >= 0x20 && *p != 0x7F); }
}

// True if data (size) begins with the record of the exchange. Rank 0 may send WAIT before it.
static bool begins_with_record(const uint8_t* data, size_t size, size_t bytes, bool waits) {
    uint8_t record[RANK_LINK_HEADER], wait[RANK_LINK_HEADER];
    link_put_header(record, LINK_RECORD, WHAT, bytes);
    link_put_header(wait, LINK_WAIT, 0, 0);
    while (waits && size >= RANK_LINK_HEADER && memcmp(data, wait, 8) == 0 && ranks_get(data + 12, 4) == 0) {
        data += RANK_LINK_HEADER;
        size -= RANK_LINK_HEADER;
    }
    return size >= RANK_LINK_HEADER + bytes && memcmp(data, record, RANK_LINK_HEADER) == 0;
}

// The peer sends data byte by byte, and the link takes what is there after each.
static bool receive_slowly(RankLink* link, int peer, int far, const uint8_t* data, size_t size, uint8_t* out,
                           size_t bytes) {
    const LinkPeer* p = &link->peers[peer];
    link->what = WHAT;
    link->deadline_ms = 1e300;
    link_await_all(link, 0);
    for (size_t k = 0; k < size && p->awaited && !link->failed; k++) {
        require(ranks_send(far, data + k, 1) == 1);
        link_take(link, peer, out, bytes);
    }
    shutdown(far, SHUT_WR);
    if (p->awaited && !link->failed) { link_take(link, peer, out, bytes); }
    return link_check(link, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    RankLink link;
    int pair[2];
    uint8_t all[2 * BYTES];
    Error err, lost;
    if (size == 0 || size > 4096) { return 0; } // less than the buffer of a socket
    int rank = data[0] & 1, peer = !rank;
    bool slow = data[0] & 2, look = data[0] & 4 && !slow;
    size_t bytes = rank == 0 ? BYTES : 2 * BYTES; // of what is received
    data++;
    size--;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0 || fcntl(pair[0], F_SETFL, O_NONBLOCK) != 0) {
        die("socketpair: %s", strerror(errno));
    }
    link_open(&link, rank, 2);
    link_set_name(&link, peer, "far", 7);
    link_add(&link, peer, pair[0]);
    bool expected = !look && begins_with_record(data, size, bytes, rank == 1), ok;
    if (slow) {
        ok = receive_slowly(&link, peer, pair[1], data, size, all, bytes);
        err = link.error;
    } else {
        require(size == 0 || ranks_send(pair[1], data, size) == (ssize_t)size);
        shutdown(pair[1], SHUT_WR);
        require(!look || rank_link_lost(&link, &lost));
        ok = rank_link_exchange(&link, WHAT, "mine", all, BYTES, 0, &err);
        require(!look || strcmp(err.text, lost.text) == 0);
    }
    require(ok == expected);
    if (!ok) { check_line(err.text); }
    close(pair[1]);
    rank_link_close(&link, 1, NULL);
    return 0;
}
