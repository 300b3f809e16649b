/*
The link between the hosts of a run's ranks: the TCP connections of the rendezvous, kept open until the end. Over it the
ranks agree on small things (stop flags, checksums, counts) and notice at once that one of them has died. Data of the GPU
goes through NCCL, never through here.

    RankLink link;
    Rendezvous r = {..., &run_stop_signal, &link};
    if (!rendezvous(&r, id, sizeof(id), &err)) { die("%s", err.text); }  // the link is open, also with one rank
    ...
    uint8_t mine = stop_signal != 0, all[RANKS_MAX];                     // each rank, in the same order of exchanges:
    if (!rank_link_exchange(&link, STOP_FLAGS | step, &mine, all, 1, limit_ms, &err)) { die("%s", err.text); }
    ...
    if (!save(&err)) { rank_link_fail(&link, err.text); }                // all ranks end with this text as their reason
    ...
    if (rank_link_lost(&link, &err)) { die("%s", err.text); }            // a watchdog thread, now and then
    ...
    rank_link_close(&link, limit_ms, &err);                              // the last one leaves no earlier than all are here

An exchange is one message up to rank 0 and one down:

    rank r                                      rank 0
      | RECORD: what, its bytes                   |
      |------------------------------------------>|  ... until all have come, or one has failed or is late
      |<------------------RECORD: what, all records|

WAIT says that rank 0 waits as well, so that the others leave it to rank 0 to say who is late. FAIL carries the reason for
which the sender has failed, in both directions. After the first failure the link is of no more use: each further exchange
returns the same reason. Rank 0 tells the reason to all others.

Threads: rank_link_exchange() and rank_link_close() belong to one thread, the owner. rank_link_lost(), rank_link_late() and
rank_link_fail() may be called by any thread at any time from rendezvous() to rank_link_close(), also during an exchange. The
mutex is never held during a wait. The token of the rendezvous guards the connections; nothing guards against an attacker.

A message is a header and a body; all numbers are little-endian:

    0       4      8      12       16       16 + length
    | magic | kind | what | length | body   |

C11, also compiles as C++17.
*/
#ifndef LLMC_RANK_LINK_H
#define LLMC_RANK_LINK_H

#include "ranks.h"
#include "utils.h"
#include <netinet/tcp.h>
#include <pthread.h>

#define RANK_LINK_NAMES 0xFFFFFFFFu // the two values of `what` that are not for callers: the first exchange of a link
#define RANK_LINK_END 0xFFFFFFFEu   // and its last one

enum {
    RANK_LINK_HEADER = 16,       // bytes
    RANK_LINK_MAX_BYTES = 4096,  // of a record
    RANK_LINK_MAX_TEXT = 1023,   // bytes of a reason
    RANK_LINK_NAME = 128,        // bytes of "rank 3 (host b, pid 9)", with the end
    RANK_LINK_SLICE_MS = 50,     // how soon a wait notices that another thread has called rank_link_fail()
    RANK_LINK_WAIT_MS = 500,     // after this time rank 0 sends WAIT to those that have answered
    RANK_LINK_GRACE_MS = 2000,   // the other ranks wait this much longer than rank 0
    RANK_LINK_SETTLE_MS = 1000,  // ranks are out of step: how long the rest has to say where they are
    RANK_LINK_STOPPED_MS = 2000, // a wait that is so much too long: this process was stopped, as by Ctrl-Z
    RANK_LINK_LINGER_MS = 500,   // after a failure: how long the others have to read the reason
    RANK_LINK_SILENCE_S = 30     // a host that answers nothing for so long has lost its power or its network
};

#ifdef POLLRDHUP
enum { LINK_RDHUP = POLLRDHUP };
#else
enum { LINK_RDHUP = 0 }; // the end of a connection is seen when all that came before has been read
#endif

typedef struct {
    char name[RANK_LINK_NAME];
    int fd;                           // -1: none. Rank 0 has one to each other rank, the others have one to rank 0
    uint8_t header[RANK_LINK_HEADER]; // of the message that is being received
    char text[RANK_LINK_MAX_TEXT];    // its body, if it is FAIL
    size_t received;                  // bytes of it, with the header
    size_t unsent;                    // bytes of the link's message that are still to be sent
    bool awaited;                     // the exchange waits for it
    bool excused;                     // it has been told that rank 0 waits itself
    bool elsewhere;                   // it is in another exchange than rank 0:
    uint32_t what;                    // in this one
    size_t bytes;                     // of a record there
} LinkPeer;

// To be left where it is while it is open. rendezvous() opens it; the members are for the functions below.
typedef struct RankLink {
    int rank, num_ranks;
    LinkPeer* peers;    // (num_ranks)
    struct pollfd* fds; // (num_ranks), of the owner's poll()
    uint8_t* message;   // the RECORD that is sent
    size_t size;        // bytes of it
    uint32_t what;      // of the exchange, like the next three
    double begin_ms;    // its start
    double limit_ms;    // 0: none
    double deadline_ms; // from both
    bool busy;          // during an exchange
    bool excused;       // rank 0 has said that it waits itself
    bool failed;        // for the reason in error
    Error error;
    pthread_mutex_t mutex; // of all members but fds
} RankLink;

// ---- messages ---------------------------------------------------------------------

typedef enum { LINK_RECORD = 1, LINK_WAIT, LINK_FAIL } LinkKind;

static const uint8_t link_magic[4] = {'L', 'N', 'K', 0xF7};

typedef struct {
    uint32_t kind, what;
    size_t length; // of the body
} LinkFrame;

// Reads a header from the first n bytes that were received. Returns 1, 0 if the rest of it is still to come, or -1 with the
// reason in err. A wrong byte of the magic is found as soon as it arrives.
static inline int link_parse(LinkFrame* f, const uint8_t* data, size_t n, int num_ranks, Error* err) {
    memset(f, 0, sizeof(*f));
    if (memcmp(data, link_magic, n < sizeof(link_magic) ? n : sizeof(link_magic)) != 0) {
        error_set(err, "something that is no message of a rank: its first bytes are '%.*s'", n < 16 ? (int)n : 16,
                  (const char*)data);
        return -1;
    }
    if (n < RANK_LINK_HEADER) { return 0; }
    f->kind = (uint32_t)ranks_get(data + 4, 4);
    f->what = (uint32_t)ranks_get(data + 8, 4);
    f->length = (size_t)ranks_get(data + 12, 4);
    size_t max_record = (size_t)num_ranks * RANK_LINK_MAX_BYTES;
    size_t max = f->kind == LINK_RECORD ? max_record : f->kind == LINK_FAIL ? RANK_LINK_MAX_TEXT : 0;
    if (f->kind < LINK_RECORD || f->kind > LINK_FAIL || f->length > max) {
        error_set(err, "a message of kind %u and %zu bytes, which does not exist", f->kind, f->length);
        return -1;
    }
    return 1;
}

static inline void link_put_header(uint8_t* out, LinkKind kind, uint32_t what, size_t length) {
    memcpy(out, link_magic, sizeof(link_magic));
    uint8_t* p = ranks_put(out + sizeof(link_magic), (uint64_t)kind, 4);
    ranks_put(ranks_put(p, what, 4), length, 4);
}

// Sends a short message to a peer. What the system's buffer has no room for, or comes amid another message, is dropped.
static inline void link_tell(RankLink* link, int i, LinkKind kind, const char* text) {
    uint8_t data[RANK_LINK_HEADER + RANK_LINK_MAX_TEXT];
    LinkPeer* p = &link->peers[i];
    size_t n = strlen(text);
    if (n > RANK_LINK_MAX_TEXT) { n = RANK_LINK_MAX_TEXT; }
    if (p->fd < 0 || (p->unsent > 0 && p->unsent < link->size)) { return; }
    link_put_header(data, kind, link->what, n);
    memcpy(data + RANK_LINK_HEADER, text, n);
    ranks_send(p->fd, data, RANK_LINK_HEADER + n);
}

// ---- failure ------------------------------------------------------------------------

// Always returns false. The first failure counts; it is told to all peers but the one that it came from (-1: none).
PRINTF_LIKE(3, 4) static inline bool link_fail(RankLink* link, int from, const char* fmt, ...) {
    if (link->failed) { return false; }
    va_list args;
    va_start(args, fmt);
    format_line(link->error.text, sizeof(link->error.text), fmt, args);
    va_end(args);
    link->failed = true;
    for (int i = 0; i < link->num_ranks; i++) {
        if (i != from) { link_tell(link, i, LINK_FAIL, link->error.text); }
    }
    return false;
}

// Fails because rank i has sent FAIL. Rank 0 adds from whom it is.
static inline bool link_fail_told(RankLink* link, int i, const char* text, size_t length) {
    static const char no_text[] = "a failure without a reason";
    bool add = link->rank == 0;
    if (length == 0 || !text[0]) { text = no_text, length = sizeof(no_text) - 1; }
    return link_fail(link, i, "%s%s%.*s", add ? link->peers[i].name : "", add ? ": " : "", (int)length, text);
}

// Fails because rank i has closed its end (reason 0), or the system has (an errno).
static inline bool link_fail_ended(RankLink* link, int i, int reason) {
    bool ended = reason == 0 || reason == ECONNRESET || reason == EPIPE;
    return link_fail(link, i, "%s %s%s", link->peers[i].name,
                     ended ? "has ended" : "cannot be reached: ", ended ? "" : strerror(reason));
}

// Fails if rank i has sent FAIL or has ended. Looks at what has come, without taking it.
static inline void link_look(RankLink* link, int i) {
    uint8_t data[2 * RANK_LINK_HEADER + RANK_LINK_MAX_BYTES + RANK_LINK_MAX_TEXT]; // a record that waits, and FAIL
    struct pollfd one = {link->peers[i].fd, POLLIN | LINK_RDHUP, 0};
    LinkFrame f;
    if (one.fd < 0 || poll(&one, 1, 0) <= 0) { return; }
    ssize_t n = recv(one.fd, data, sizeof(data), MSG_PEEK | MSG_DONTWAIT);
    int reason = n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR ? errno : 0;
    size_t size = n > 0 && link->peers[i].received == 0 ? (size_t)n : 0;
    for (size_t at = 0; at < size && link_parse(&f, data + at, size - at, link->num_ranks, NULL) > 0;) {
        at += RANK_LINK_HEADER + f.length;
        if (f.kind == LINK_FAIL && at <= size) { link_fail_told(link, i, (char*)data + at - f.length, f.length); }
    }
    if (n == 0 || reason || (one.revents & (POLLERR | POLLHUP | LINK_RDHUP))) { link_fail_ended(link, i, reason); }
}

// Writes "rank 3 (host b, pid 9), rank 5 (host c, pid 7)": the ranks that are awaited, or those that are elsewhere than
// rank 0, with the place. Returns how many they are.
static inline int link_list(char* out, size_t size, const RankLink* link, bool elsewhere) {
    size_t used = 0;
    int count = 0, left_out = 0;
    out[0] = '\0';
    for (int i = 0; i < link->num_ranks; i++) {
        const LinkPeer* p = &link->peers[i];
        char place[64] = "", item[256];
        if (!(elsewhere ? p->elsewhere : p->awaited)) { continue; }
        if (elsewhere) { snprintf(place, sizeof(place), " is at 0x%x with %zu bytes", p->what, p->bytes); }
        snprintf(item, sizeof(item), "%s%s%s", count++ ? ", " : "", p->name, place);
        if (used + strlen(item) + 24 > size) { left_out++; }
        if (left_out == 0) { used += (size_t)snprintf(out + used, size - used, "%s", item); }
    }
    if (left_out > 0) { snprintf(out + used, size - used, " and %d more", left_out); }
    return count;
}

// ---- sending and receiving ------------------------------------------------------------

static inline void link_await_all(RankLink* link, size_t unsent) {
    for (int i = 0; i < link->num_ranks; i++) {
        LinkPeer* p = &link->peers[i];
        p->awaited = p->fd >= 0;
        p->elsewhere = p->excused = false;
        p->unsent = p->awaited ? unsent : 0;
    }
}

// Waits, without the mutex, for events of the peers that are awaited or, with all, of any; RANK_LINK_SLICE_MS at most. Returns
// false if there is nothing to wait for: no peer is awaited, or the time is over.
static inline bool link_wait(RankLink* link, short events, bool all) {
    double wait_ms = link->deadline_ms - time_ms();
    int awaited = 0;
    for (int i = 0; i < link->num_ranks; i++) {
        awaited += link->peers[i].awaited;
        link->fds[i].fd = all || link->peers[i].awaited ? link->peers[i].fd : -1; // poll() passes over -1
        link->fds[i].events = events;
    }
    if (awaited == 0 || wait_ms <= 0) { return false; }
    pthread_mutex_unlock(&link->mutex);
    double start_ms = time_ms();
    int ready =
        poll(link->fds, (nfds_t)link->num_ranks, wait_ms < RANK_LINK_SLICE_MS ? (int)wait_ms + 1 : RANK_LINK_SLICE_MS);
    for (int i = 0; i < link->num_ranks && ready <= 0; i++) { link->fds[i].revents = 0; }
    double waited_ms = time_ms() - start_ms;
    pthread_mutex_lock(&link->mutex);
    // this process was stopped: others have waited for it, it has not waited for them
    if (waited_ms > RANK_LINK_SLICE_MS + RANK_LINK_STOPPED_MS) {
        link->begin_ms += waited_ms;
        link->deadline_ms += waited_ms;
    }
    return true;
}

// At the end of a phase of an exchange: fails if ranks are out of step or still awaited.
static inline bool link_check(RankLink* link, size_t bytes) {
    char awaited[400], elsewhere[500];
    int num_awaited = link_list(awaited, sizeof(awaited), link, false);
    if (link_list(elsewhere, sizeof(elsewhere), link, true) > 0) {
        link_fail(link, -1, "the ranks are out of step: %s is at 0x%x with %zu bytes, %s%s%s", link->peers[0].name,
                  link->what, bytes, elsewhere, num_awaited ? "; no answer from " : "", awaited);
    } else if (num_awaited > 0) {
        link_fail(link, -1, "exchange 0x%x: no answer for %.1f s from %s", link->what,
                  (time_ms() - link->begin_ms) / 1000, awaited);
    }
    return !link->failed;
}

// Sends link->message to all peers. Returns false if the link has failed.
static inline bool link_send_all(RankLink* link, size_t bytes) {
    link_await_all(link, link->size);
    do {
        for (int i = 0; i < link->num_ranks && !link->failed; i++) {
            LinkPeer* p = &link->peers[i];
            if (!p->awaited) { continue; }
            ssize_t n = ranks_send(p->fd, link->message + link->size - p->unsent, p->unsent);
            if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
                int reason = errno;
                link_look(link, i); // it may have said why before it ended
                link_fail_ended(link, i, reason);
            }
            p->unsent -= n > 0 ? (size_t)n : 0;
            p->awaited = p->unsent > 0;
        }
    } while (!link->failed && link_wait(link, POLLOUT, false));
    return link_check(link, bytes);
}

// Receives what there is of rank i's next message, and handles it if it is complete. The RECORD that is awaited goes to body
// (bytes). Of one that does not fit, the header is enough: the link has then failed.
static inline void link_take(RankLink* link, int i, void* body, size_t bytes) {
    LinkPeer* p = &link->peers[i];
    LinkFrame f;
    Error why;
    bool fits;
    for (;;) {
        int parsed = link_parse(&f, p->header, p->received, link->num_ranks, &why);
        size_t size = RANK_LINK_HEADER + f.length;
        fits = p->awaited && f.what == link->what && f.length == bytes;
        if (parsed < 0) {
            link_fail(link, -1, "%s sent %s", p->name, why.text);
            return;
        }
        if (parsed > 0 && ((f.kind == LINK_RECORD && !fits) || p->received == size)) { break; }
        uint8_t* to = parsed == 0 ? p->header : f.kind == LINK_FAIL ? (uint8_t*)p->text : (uint8_t*)body;
        to += p->received - (parsed == 0 ? 0 : RANK_LINK_HEADER);
        ssize_t n = recv(p->fd, to, size - p->received, 0);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) { return; }
        if (n <= 0) {
            link_fail_ended(link, i, n < 0 ? errno : 0);
            return;
        }
        p->received += (size_t)n;
    }
    p->received = 0;
    if (f.kind == LINK_FAIL) {
        link_fail_told(link, i, p->text, f.length);
    } else if (f.kind == LINK_WAIT && link->rank != 0) { // rank 0 decides when the time is over
        link->excused = true;
        if (link->limit_ms > 0) { link->deadline_ms = time_ms() + link->limit_ms + RANK_LINK_GRACE_MS; }
    } else if (f.kind == LINK_RECORD && p->awaited && (fits || link->rank == 0)) {
        double settled_ms = time_ms() + RANK_LINK_SETTLE_MS;
        if (!fits && link->deadline_ms > settled_ms) { link->deadline_ms = settled_ms; }
        p->awaited = false;
        p->elsewhere = !fits;
        p->what = f.what;
        p->bytes = f.length;
    } else {
        link_fail(link, -1, "%s sent a message out of turn: kind %u, 0x%x, %zu bytes", p->name, f.kind, f.what,
                  f.length);
    }
}

// Receives a RECORD of each peer: rank i's goes to out + i * bytes. Returns false if the link has failed.
static inline bool link_receive_all(RankLink* link, uint8_t* out, size_t bytes) {
    bool elsewhere = false;
    link_await_all(link, 0);
    while (!link->failed && link_wait(link, POLLIN, !elsewhere)) { // ranks that have answered may still fail or end
        for (int i = 0; i < link->num_ranks && !link->failed; i++) {
            if (link->fds[i].fd < 0 || !link->fds[i].revents) { continue; }
            link_take(link, i, out + (size_t)i * bytes, bytes);
            elsewhere = elsewhere || link->peers[i].elsewhere;
        }
        if (link->rank != 0 || time_ms() < link->begin_ms + RANK_LINK_WAIT_MS) { continue; }
        for (int i = 0; i < link->num_ranks; i++) {
            LinkPeer* p = &link->peers[i];
            if (p->awaited || p->excused) { continue; }
            link_tell(link, i, LINK_WAIT, "");
            p->excused = true;
        }
    }
    return link_check(link, bytes);
}

// ---- for the program --------------------------------------------------------------------

// Gathers a record (bytes, at most RANK_LINK_MAX_BYTES, may be 0) of each rank: all (num_ranks * bytes) has them in the order
// of the ranks. `what` says which exchange this is; all ranks must agree in it and in bytes. limit_ms: for the others to
// answer; 0: for ever. mine may be in its place in all. Returns false with the reason; all is then undefined.
static inline bool rank_link_exchange(RankLink* link, uint32_t what, const void* mine, void* all, size_t bytes,
                                      double limit_ms, Error* err) {
    require(link->num_ranks > 0 && bytes <= RANK_LINK_MAX_BYTES);
    size_t total = (size_t)link->num_ranks * bytes;
    uint8_t* body = link->message + RANK_LINK_HEADER;
    pthread_mutex_lock(&link->mutex);
    bool is_first = link->rank == 0;
    link->what = what;
    link->begin_ms = time_ms();
    link->limit_ms = limit_ms;
    link->deadline_ms = limit_ms > 0 ? link->begin_ms + limit_ms + (is_first ? 0 : RANK_LINK_GRACE_MS) : 1e300;
    link->busy = true;
    link->excused = false;
    link->size = RANK_LINK_HEADER + (is_first ? total : bytes);
    link_put_header(link->message, LINK_RECORD, what, link->size - RANK_LINK_HEADER);
    if (bytes > 0) { memcpy(body, mine, bytes); }
    if (is_first && !link->failed) {
        bool ok = link_receive_all(link, body, bytes) && link_send_all(link, bytes);
        if (ok && bytes > 0) { memcpy(all, body, total); }
    } else if (!link->failed && link_send_all(link, bytes)) {
        link_receive_all(link, bytes > 0 ? (uint8_t*)all : body, total);
    }
    link->busy = false;
    bool ok = !link->failed;
    if (!ok) { error_set(err, "%s", link->error.text); }
    pthread_mutex_unlock(&link->mutex);
    return ok;
}

// Any thread: this rank has failed, for the reason in text. The current or next exchange of every rank returns it. It is
// sent at once; rank_link_close() then makes sure that it arrives.
static inline void rank_link_fail(RankLink* link, const char* text) {
    pthread_mutex_lock(&link->mutex);
    if (!link->failed && link->rank != 0) { link_tell(link, 0, LINK_FAIL, text); } // rank 0 adds the name
    link_fail(link, link->rank == 0 ? -1 : 0, "%s: %s", link->peers[link->rank].name, text);
    pthread_mutex_unlock(&link->mutex);
}

// Any thread: true, with the reason, if the link has failed or a peer has ended. Rank 0 sees the end of every other rank and
// passes it on; the others see the end of rank 0 and what it passes on. During an exchange the owner sees it itself. Returns
// at once and takes nothing that belongs to an exchange. Where poll() has no POLLRDHUP (macOS), the end of a rank whose
// record waits to be read is seen by the exchange only.
static inline bool rank_link_lost(RankLink* link, Error* err) {
    pthread_mutex_lock(&link->mutex);
    for (int i = 0; i < link->num_ranks && !link->failed && !link->busy; i++) { link_look(link, i); }
    bool lost = link->failed;
    if (lost) { error_set(err, "%s", link->error.text); }
    pthread_mutex_unlock(&link->mutex);
    return lost;
}

// Any thread: how many ranks the exchange of the owner waits for, and for how long it has done so; 0 if there is no exchange.
// out gets their names, cut to size (at least 64). Rank 0 waits for each other rank; another one waits for rank 0, until it
// learns that rank 0 waits itself.
static inline int rank_link_late(RankLink* link, char* out, size_t size, double* waited_ms) {
    pthread_mutex_lock(&link->mutex);
    bool waits = link->busy && !link->excused;
    int count = waits ? link_list(out, size, link, false) : 0;
    *waited_ms = waits ? time_ms() - link->begin_ms : 0;
    if (!waits) { out[0] = '\0'; }
    pthread_mutex_unlock(&link->mutex);
    return count;
}

// After a failure: waits until the others have closed their ends too. What arrives at a closed socket would make the system
// drop the reason that was sent.
static inline void link_linger(RankLink* link) {
    char trash[4096];
    link->deadline_ms = time_ms() + RANK_LINK_LINGER_MS;
    link_await_all(link, 0);
    for (int i = 0; i < link->num_ranks; i++) { shutdown(link->peers[i].fd, SHUT_WR); }
    while (link_wait(link, POLLIN, false)) {
        for (int i = 0; i < link->num_ranks; i++) {
            if (link->fds[i].fd < 0 || !link->fds[i].revents) { continue; }
            ssize_t n = recv(link->fds[i].fd, trash, sizeof(trash), 0);
            link->peers[i].awaited = n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
        }
    }
}

// Ends the link, with all ranks: returns when all have called it, so that none takes the end of another for a death. After a
// failure, this rank's or another's, it waits for nobody but the readers of the reason, and returns false with it. The link
// is closed in any case; no other thread may use it any more. Does nothing if the link is not open.
static inline bool rank_link_close(RankLink* link, double limit_ms, Error* err) {
    if (link->num_ranks == 0) { return true; }
    bool ok = rank_link_exchange(link, RANK_LINK_END, NULL, NULL, 0, limit_ms, err);
    pthread_mutex_lock(&link->mutex);
    if (!ok) { link_linger(link); }
    pthread_mutex_unlock(&link->mutex);
    for (int i = 0; i < link->num_ranks; i++) {
        if (link->peers[i].fd >= 0) { close(link->peers[i].fd); }
    }
    pthread_mutex_destroy(&link->mutex);
    free(link->peers);
    free(link->fds);
    free(link->message);
    memset(link, 0, sizeof(*link));
    return ok;
}

// ---- for the rendezvous -------------------------------------------------------------------

static inline void link_set_name(RankLink* link, int rank, const char* host, long pid) {
    snprintf(link->peers[rank].name, RANK_LINK_NAME, "rank %d (host %.64s, pid %ld)", rank, host, pid);
}

static inline void link_open(RankLink* link, int rank, int num_ranks) {
    char host[256] = "";
    memset(link, 0, sizeof(*link));
    link->rank = rank;
    link->num_ranks = num_ranks;
    size_t n = (size_t)num_ranks;
    link->peers = (LinkPeer*)calloc_check(n, sizeof(LinkPeer));
    link->fds = (struct pollfd*)calloc_check(n, sizeof(struct pollfd));
    link->message = (uint8_t*)malloc_check(RANK_LINK_HEADER + (rank == 0 ? n : 1) * RANK_LINK_MAX_BYTES);
    for (int i = 0; i < num_ranks; i++) { link->peers[i].fd = -1; }
    if (gethostname(host, sizeof(host) - 1) != 0) { strcpy(host, "unknown"); }
    link_set_name(link, 0, "unknown", 0); // until the first exchange
    link_set_name(link, rank, host, (long)getpid());
    pthread_mutex_init(&link->mutex, NULL);
}

static inline void link_set_option(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value)); // without it, a lost host is noticed later
}

// Takes over the socket of a rank, which does not block and has TCP_NODELAY.
static inline void link_add(RankLink* link, int rank, int fd) {
    link->peers[rank].fd = fd;
    link_set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_KEEPIDLE
    link_set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, RANK_LINK_SILENCE_S / 3); // quiet for so long: asks ...
#elif defined(TCP_KEEPALIVE)
    link_set_option(fd, IPPROTO_TCP, TCP_KEEPALIVE, RANK_LINK_SILENCE_S / 3);
#endif
#if defined(TCP_KEEPINTVL) && defined(TCP_KEEPCNT)
    link_set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, RANK_LINK_SILENCE_S / 6); // ... four times
    link_set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
#endif
#ifdef TCP_USER_TIMEOUT // for what was sent and is not confirmed
    link_set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, RANK_LINK_SILENCE_S * 1000);
#endif
}

// The first exchange of an open link: the ranks tell each other their names.
static inline bool link_exchange_names(RankLink* link, double limit_ms, Error* err) {
    char* all = (char*)calloc_check((size_t)link->num_ranks, RANK_LINK_NAME);
    bool ok =
        rank_link_exchange(link, RANK_LINK_NAMES, link->peers[link->rank].name, all, RANK_LINK_NAME, limit_ms, err);
    for (int i = 0; i < link->num_ranks && ok; i++) { // no other thread knows the link yet
        char* name = link->peers[i].name;
        memcpy(name, all + (size_t)i * RANK_LINK_NAME, RANK_LINK_NAME - 1);
        name[mask_controls(name, strlen(name), false)] = '\0';
    }
    free(all);
    return ok;
}

#endif
