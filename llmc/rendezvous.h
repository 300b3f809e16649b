/*
The first contact between the ranks of a run, over TCP: rank 0 hands a small blob (NCCL's unique id) to all others, after
it has checked that they belong together. It is also a barrier: no rank returns before all have arrived.

    Rendezvous r = {&ranks, LLMC_VERSION, build, flags_hash, flags_text, 0, 0, &run_stop_signal, &link};
    if (!rendezvous(&r, id, sizeof(id), &err)) { die("%s", err.text); }   // rank 0 gives the id, the others get it

    rank r                                  rank 0
      | HELLO: who I am, what I run           |
      |-------------------------------------->|  refused by name, or
      |<------------------------------ACCEPTED|
      |                                       |  ... until all have arrived
      |<---------------------------START: blob|
      |READY--------------------------------->|  ... until all are ready
      |<------------------------------------GO|

Instead of each answer rank 0 may send REFUSED with a reason, which the rank returns as its error. A rank of this run that
has other flags, another binary, version or number of ranks ends the start of all, within seconds: it cannot succeed any
more. A stranger on the port (a port scanner, a rank of another run), a second rank of the same number, and a connection
that does not say hello in time are refused, and the others go on. The token guards against mistakes, not against an
attacker who can read the traffic.

A message is a header and a body; all numbers are little-endian, a text is its length (2 bytes) and its bytes:

    0       8          12     16      24       28        28 + length
    | magic | protocol | kind | token | length | body    |

C11, also compiles as C++17.
*/
#ifndef LLMC_RENDEZVOUS_H
#define LLMC_RENDEZVOUS_H

#include "rank_link.h"
#include "ranks.h"
#include "utils.h"
#include <netdb.h>
#include <netinet/tcp.h>

enum {
    RENDEZVOUS_PROTOCOL = 1, // to be increased when the messages change; the header stays as it is
    RENDEZVOUS_HEADER = 28,  // bytes
    RENDEZVOUS_MAX_BLOB = 4096,
    RENDEZVOUS_MAX_FLAGS = 8192, // bytes of the text of the flags; a longer one is cut
    RENDEZVOUS_MAX_TEXT = 1023,  // bytes of a reason
    RENDEZVOUS_MAX_NAME = 255,   // bytes of a version or a host name
    RENDEZVOUS_MAX_HELLO = 28 + 3 * 2 + 2 * RENDEZVOUS_MAX_NAME + RENDEZVOUS_MAX_FLAGS,
    RENDEZVOUS_MAX_MESSAGE = RENDEZVOUS_HEADER + RENDEZVOUS_MAX_HELLO,
    RENDEZVOUS_STRANGERS = 64,    // connections that are not the ranks'
    RENDEZVOUS_SLICE_MS = 20,     // how often the stop flag is looked at
    RENDEZVOUS_CONNECT_MS = 3000, // for one attempt to connect
    RENDEZVOUS_WARNINGS = 20      // lines about strangers
};

typedef struct {
    RankEnv* ranks;      // who this is, where rank 0 listens; the listening socket in it is closed
    const char* version; // of the program
    uint64_t build;      // hash of the binary; 0 if it is not known
    uint64_t flags_hash; // of all flags that must agree
    const char* flags;   // the same as text, a line for each: "batch=4\nlr=0.1\n"; to name the first that differs
    double limit_ms;     // for all ranks to arrive; 0: 60,000
    double answer_ms;    // for a connection to say hello, and for each answer after that; 0: 5,000
    const volatile sig_atomic_t* stop; // a signal's number in it ends the wait; may be NULL
    RankLink* link;                    // keeps the connections, see rank_link.h; NULL: they are closed
} Rendezvous;

// ---- messages ---------------------------------------------------------------------

typedef enum { RDZV_HELLO = 1, RDZV_ACCEPTED, RDZV_START, RDZV_READY, RDZV_GO, RDZV_REFUSED } RdzvKind;

static const uint8_t rdzv_magic[8] = {'L', 'L', 'M', 'C', 0xF7, 'R', 'D', 'V'};

typedef struct {
    const char* data; // in the buffer that was parsed: not masked, not terminated
    size_t length;
} RdzvText;

typedef struct {
    uint32_t protocol, kind;
    uint64_t token;
    uint32_t rank, num_ranks, pid; // of HELLO, like all up to flags
    uint64_t build, flags_hash;
    RdzvText version, host, flags;
    RdzvText body; // START: the blob. REFUSED: the reason
} RdzvMessage;

typedef enum { RDZV_BAD = -2, RDZV_OTHER_PROTOCOL = -1, RDZV_INCOMPLETE = 0 } RdzvResult;

static inline size_t rdzv_min(size_t a, size_t b) { return a < b ? a : b; }

// Reads a text at *at, which must end before n.
static inline bool rdzv_get_text(RdzvText* text, const uint8_t* data, size_t n, size_t* at, size_t max) {
    if (n - *at < 2) { return false; }
    text->length = (size_t)ranks_get(data + *at, 2);
    text->data = (const char*)data + *at + 2;
    if (text->length > max || text->length > n - *at - 2) { return false; }
    *at += 2 + text->length;
    return true;
}

// Reads one message from the first n bytes that were received. Returns its size, RDZV_INCOMPLETE if the rest is still to
// come, RDZV_OTHER_PROTOCOL (protocol, kind and token are set) or RDZV_BAD with the reason in err. The texts of the message
// point into data. A wrong byte is found as soon as it arrives.
static inline int rdzv_parse(RdzvMessage* m, const uint8_t* data, size_t n, Error* err) {
    memset(m, 0, sizeof(*m));
    if (memcmp(data, rdzv_magic, n < sizeof(rdzv_magic) ? n : sizeof(rdzv_magic)) != 0) {
        error_set(err, "it is not one of our ranks: its first bytes are '%.*s'", n < 16 ? (int)n : 16,
                  (const char*)data);
        return RDZV_BAD;
    }
    if (n < RENDEZVOUS_HEADER) { return RDZV_INCOMPLETE; }
    m->protocol = (uint32_t)ranks_get(data + 8, 4);
    m->kind = (uint32_t)ranks_get(data + 12, 4);
    m->token = ranks_get(data + 16, 8);
    size_t length = (size_t)ranks_get(data + 24, 4);
    if (m->protocol != RENDEZVOUS_PROTOCOL) { return RDZV_OTHER_PROTOCOL; }
    size_t max = m->kind == RDZV_HELLO     ? RENDEZVOUS_MAX_HELLO
                 : m->kind == RDZV_START   ? RENDEZVOUS_MAX_BLOB
                 : m->kind == RDZV_REFUSED ? RENDEZVOUS_MAX_TEXT
                                           : 0;
    if (m->kind < RDZV_HELLO || m->kind > RDZV_REFUSED || length > max) {
        error_set(err, "it sent a message of kind %u and %zu bytes, which does not exist", m->kind, length);
        return RDZV_BAD;
    }
    if (n < RENDEZVOUS_HEADER + length) { return RDZV_INCOMPLETE; }
    m->body.data = (const char*)data + RENDEZVOUS_HEADER;
    m->body.length = length;
    if (m->kind == RDZV_HELLO) {
        const uint8_t* p = data + RENDEZVOUS_HEADER;
        size_t at = 28;
        bool ok = length >= at;
        if (ok) {
            m->rank = (uint32_t)ranks_get(p, 4);
            m->num_ranks = (uint32_t)ranks_get(p + 4, 4);
            m->pid = (uint32_t)ranks_get(p + 8, 4);
            m->build = ranks_get(p + 12, 8);
            m->flags_hash = ranks_get(p + 20, 8);
        }
        ok = ok && rdzv_get_text(&m->version, p, length, &at, RENDEZVOUS_MAX_NAME) &&
             rdzv_get_text(&m->host, p, length, &at, RENDEZVOUS_MAX_NAME) &&
             rdzv_get_text(&m->flags, p, length, &at, RENDEZVOUS_MAX_FLAGS) && at == length;
        if (!ok) {
            error_set(err, "it sent a hello of %zu bytes whose fields do not fit", length);
            return RDZV_BAD;
        }
    }
    return (int)(RENDEZVOUS_HEADER + length);
}

// Writes a message with a body of `bytes` bytes to out (RENDEZVOUS_MAX_MESSAGE). Returns its size. body may be at its place
// in out already.
static inline size_t rdzv_write(uint8_t* out, RdzvKind kind, uint64_t token, const void* body, size_t bytes) {
    memcpy(out, rdzv_magic, sizeof(rdzv_magic));
    uint8_t* p = ranks_put(out + sizeof(rdzv_magic), RENDEZVOUS_PROTOCOL, 4);
    p = ranks_put(p, (uint64_t)kind, 4);
    p = ranks_put(p, token, 8);
    p = ranks_put(p, bytes, 4);
    if (bytes > 0) { memmove(p, body, bytes); }
    return RENDEZVOUS_HEADER + bytes;
}

static inline uint8_t* rdzv_put_text(uint8_t* p, const char* text, size_t max) {
    size_t n = text ? rdzv_min(strlen(text), max) : 0;
    p = ranks_put(p, n, 2);
    if (n > 0) { memcpy(p, text, n); }
    return p + n;
}

// Writes this rank's hello to out (RENDEZVOUS_MAX_MESSAGE). Returns its size.
static inline size_t rdzv_write_hello(uint8_t* out, const Rendezvous* r) {
    char host[RENDEZVOUS_MAX_NAME + 1] = "";
    if (gethostname(host, sizeof(host) - 1) != 0) { strcpy(host, "unknown host"); }
    uint8_t *body = out + RENDEZVOUS_HEADER, *p = body;
    p = ranks_put(p, (uint64_t)r->ranks->rank, 4);
    p = ranks_put(p, (uint64_t)r->ranks->num_ranks, 4);
    p = ranks_put(p, (uint64_t)getpid(), 4);
    p = ranks_put(p, r->build, 8);
    p = ranks_put(p, r->flags_hash, 8);
    p = rdzv_put_text(p, r->version, RENDEZVOUS_MAX_NAME);
    p = rdzv_put_text(p, host, RENDEZVOUS_MAX_NAME);
    p = rdzv_put_text(p, r->flags, RENDEZVOUS_MAX_FLAGS);
    return rdzv_write(out, RDZV_HELLO, r->ranks->token, body, (size_t)(p - body));
}

// Writes the first line in which two texts of flags differ: "batch=8, rank 0 has batch=4".
static inline void rdzv_first_difference(char* out, size_t size, RdzvText theirs, RdzvText ours) {
    snprintf(out, size, "of which the text does not show the difference");
    for (size_t i = 0, k = 0; i < theirs.length || k < ours.length;) {
        const char *a = theirs.data + i, *b = ours.data + k;
        size_t na = 0, nb = 0;
        while (i + na < theirs.length && a[na] != '\n') { na++; }
        while (k + nb < ours.length && b[nb] != '\n') { nb++; }
        if (na != nb || (na > 0 && memcmp(a, b, na) != 0)) {
            int shown_a = (int)rdzv_min(na, 160), shown_b = (int)rdzv_min(nb, 160);
            snprintf(out, size, "%.*s, rank 0 has %.*s", na ? shown_a : 7, na ? a : "nothing", nb ? shown_b : 7,
                     nb ? b : "nothing");
            return;
        }
        i += na + (i + na < theirs.length);
        k += nb + (k + nb < ours.length);
    }
}

// ---- sockets ----------------------------------------------------------------------

static inline double rdzv_limit_ms(const Rendezvous* r) { return r->limit_ms > 0 ? r->limit_ms : 60000; }
static inline double rdzv_answer_ms(const Rendezvous* r) { return r->answer_ms > 0 ? r->answer_ms : 5000; }

// True, with a reason, if a signal asked for the end.
static inline bool rdzv_stopped(const Rendezvous* r, Error* err) {
    int number = r->stop ? (int)*r->stop : 0;
    if (number) { error_set(err, "rank %d was stopped by %s", r->ranks->rank, ranks_signal_name(number)); }
    return number != 0;
}

// "node03:29500" or "[::1]:29500".
static inline void rdzv_format_place(char* out, size_t size, const char* address, int port) {
    bool v6 = strchr(address, ':') != NULL;
    snprintf(out, size, "%s%s%s:%d", v6 ? "[" : "", address, v6 ? "]" : "", port);
}

static inline void rdzv_prepare_socket(int fd) {
    int on = 1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)); // fails on a socket that listens: not needed there
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
}

// Sends without waiting. A message is smaller than the buffer of any socket, and at most two are in flight.
static inline bool rdzv_send(int fd, const uint8_t* data, size_t bytes) {
    return ranks_send(fd, data, bytes) == (ssize_t)bytes;
}

// Resolves a host name and a port. The caller frees *list with freeaddrinfo().
static inline bool rdzv_resolve(struct addrinfo** list, const char* address, int port, int flags, Error* err) {
    struct addrinfo hints;
    char text[16];
    memset(&hints, 0, sizeof(hints));
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | flags;
    snprintf(text, sizeof(text), "%d", port);
    int code = getaddrinfo(address, text, &hints, list);
    return code == 0 ||
           error_set(err, "%s: cannot resolve this host name: %s", address ? address : "*", gai_strerror(code));
}

// ---- rank 0 -----------------------------------------------------------------------

// nothing valid yet; accepted; has the blob; refused and about to close its end
typedef enum { RDZV_NEW, RDZV_WAITS, RDZV_IS_READY, RDZV_LEAVES } RdzvStage;

typedef struct {
    int fd; // -1: free
    RdzvStage stage;
    int rank;           // from RDZV_WAITS on
    double deadline_ms; // of RDZV_NEW and RDZV_LEAVES
    size_t received;    // bytes in data
    uint8_t* data;      // (RENDEZVOUS_MAX_MESSAGE)
    char address[80];
} RdzvPeer;

typedef struct {
    char host[RENDEZVOUS_MAX_NAME + 1]; // "": has not arrived
    long pid;
} RdzvArrival;

enum { RDZV_LISTENERS = 8 };

typedef struct {
    const Rendezvous* how;
    const void* blob;
    size_t blob_bytes;
    int listeners[RDZV_LISTENERS], num_listeners;
    RdzvPeer* peers; // (max_peers)
    int max_peers;
    RdzvArrival* arrivals; // (num_ranks)
    int num_arrived, num_ready;
    bool started;       // START was sent
    double deadline_ms; // for all to arrive; then for all to be ready
    bool failed;        // the reason is in error; ranks that come later are told
    Error error;
    char last_refusal[400];
    int num_warnings;
} RdzvServer;

// Fails the start of all ranks; the first reason counts.
PRINTF_LIKE(2, 3) static inline void rdzv_fail(RdzvServer* s, const char* fmt, ...) {
    if (s->failed) { return; }
    va_list args;
    va_start(args, fmt);
    format_line(s->error.text, sizeof(s->error.text), fmt, args);
    va_end(args);
    s->failed = true;
}

PRINTF_LIKE(2, 3) static inline void rdzv_warn(RdzvServer* s, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    format_line(s->last_refusal, sizeof(s->last_refusal), fmt, args);
    va_end(args);
    if (s->num_warnings++ < RENDEZVOUS_WARNINGS) { print_line(stderr, "warning: rank 0 refused %s", s->last_refusal); }
}

static inline void rdzv_close_peer(RdzvPeer* p) {
    if (p->fd >= 0) { close(p->fd); }
    free(p->data);
    p->data = NULL;
    p->fd = -1;
}

static inline bool rdzv_send_kind(const RdzvServer* s, RdzvPeer* p, RdzvKind kind, const void* body, size_t bytes) {
    uint8_t message[RENDEZVOUS_MAX_MESSAGE];
    return rdzv_send(p->fd, message, rdzv_write(message, kind, s->how->ranks->token, body, bytes));
}

// Sends the reason. The connection stays open until the other side closes it, because what arrives at a closed socket makes
// the system drop the answer.
static inline void rdzv_refuse(RdzvServer* s, RdzvPeer* p, const char* reason) {
    size_t n = strlen(reason);
    rdzv_send_kind(s, p, RDZV_REFUSED, reason, rdzv_min(n, RENDEZVOUS_MAX_TEXT));
    shutdown(p->fd, SHUT_WR);
    p->stage = RDZV_LEAVES;
    p->deadline_ms = time_ms() + rdzv_answer_ms(s->how);
}

// Listens on an address. Returns 0, or the reason as an errno.
static inline int rdzv_listen_on(RdzvServer* s, const struct addrinfo* a, bool both) {
    int on = 1, off = 0;
    int fd = socket(a->ai_family, SOCK_STREAM, 0);
    if (fd < 0) { return errno; }
    rdzv_prepare_socket(fd);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)); // connections of an earlier run may still be closing
    if (a->ai_family == AF_INET6) { setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, both ? &off : &on, sizeof(on)); }
    if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
        int reason = errno;
        close(fd);
        return reason;
    }
    s->listeners[s->num_listeners++] = fd;
    return 0;
}

// Opens the sockets of rank 0. If its address is one of the loopback interface, they listen there. Else they listen on every
// interface: a machine may know its own name by a loopback address (127.0.1.1 on Debian), where no other one reaches it.
static inline bool rdzv_listen(RdzvServer* s, Error* err) {
    RankEnv* ranks = s->how->ranks;
    char place[RANKS_ADDRESS + 16];
    struct addrinfo* list = NULL;
    if (ranks->listen_fd >= 0) {
        rdzv_prepare_socket(ranks->listen_fd);
        s->listeners[s->num_listeners++] = ranks->listen_fd;
        ranks->listen_fd = -1;
        return true;
    }
    const char* address = ranks->address;
    bool local = strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0 || strcmp(address, "localhost") == 0;
    rdzv_format_place(place, sizeof(place), address, ranks->port);
    if (!rdzv_resolve(&list, local ? address : NULL, ranks->port, local ? 0 : AI_PASSIVE, err)) { return false; }
    int reason = EADDRNOTAVAIL;
    for (int family = 0; family < 2; family++) { // IPv6 first: on every interface it serves IPv4 as well
        for (struct addrinfo* a = list; a && s->num_listeners < RDZV_LISTENERS; a = a->ai_next) {
            if (a->ai_family != (family == 0 ? AF_INET6 : AF_INET)) { continue; }
            if (!local && s->num_listeners > 0) { continue; }
            bool again = false; // /etc/hosts may name localhost twice
            for (struct addrinfo* b = list; b != a; b = b->ai_next) {
                again = again || (a->ai_addrlen == b->ai_addrlen && memcmp(a->ai_addr, b->ai_addr, a->ai_addrlen) == 0);
            }
            if (again) { continue; }
            int code = rdzv_listen_on(s, a, !local);
            if (code != 0 && reason != EADDRINUSE) { reason = code; }
        }
    }
    freeaddrinfo(list);
    if (reason == EADDRINUSE) {
        return error_set(err,
                         "%s: another program uses this port: set %s to another one, or end that program (ss -ltnp)",
                         place, ranks->source == RANKS_LAUNCHER ? "LLMC_PORT" : "MASTER_PORT");
    }
    return s->num_listeners > 0 || error_set(err, "%s: cannot listen: %s", place, strerror(reason));
}

// Accepts one connection. If all places are taken, the stranger who is here for longest goes.
static inline void rdzv_accept(RdzvServer* s, int listener) {
    struct sockaddr_storage from;
    socklen_t bytes = sizeof(from);
    int fd = accept(listener, (struct sockaddr*)&from, &bytes);
    int reason = fd < 0 ? errno : 0;
    RdzvPeer *place = NULL, *oldest = NULL;
    for (int i = 0; i < s->max_peers; i++) {
        RdzvPeer* p = &s->peers[i];
        bool stranger = p->fd >= 0 && (p->stage == RDZV_NEW || p->stage == RDZV_LEAVES);
        if (p->fd < 0 && !place) { place = p; }
        if (stranger && (!oldest || p->deadline_ms < oldest->deadline_ms)) { oldest = p; }
    }
    if (fd < 0) {
        if (reason != EMFILE && reason != ENFILE) { return; } // the other side has gone already
        if (!oldest) {
            rdzv_fail(s, "rank 0 cannot accept a connection: %s; raise ulimit -n", strerror(reason));
        } else {
            rdzv_close_peer(oldest);
        }
        return;
    }
    if (!place && oldest) {
        rdzv_close_peer(oldest);
        place = oldest;
    }
    if (!place) {
        close(fd);
        return;
    }
    char host[64] = "?", port[16] = "?";
    getnameinfo((struct sockaddr*)&from, bytes, host, sizeof(host), port, sizeof(port),
                NI_NUMERICHOST | NI_NUMERICSERV);
    rdzv_prepare_socket(fd);
    memset(place, 0, sizeof(*place));
    place->fd = fd;
    place->rank = -1;
    place->deadline_ms = time_ms() + rdzv_answer_ms(s->how);
    place->data = (uint8_t*)malloc_check(RENDEZVOUS_MAX_MESSAGE);
    rdzv_format_place(place->address, sizeof(place->address), host, atoi(port));
}

// "rank 3 (host b, process 77)"
static inline void rdzv_format_rank(char* out, size_t size, const RdzvServer* s, int rank) {
    snprintf(out, size, "rank %d (host %.64s, process %ld)", rank, s->arrivals[rank].host, s->arrivals[rank].pid);
}

// Writes to `reason` why this hello is refused; "" if it is not. Returns true if the reason ends the start of all ranks.
static inline bool rdzv_judge(const RdzvServer* s, const RdzvMessage* m, const RdzvPeer* p, bool protocol, char* reason,
                              size_t size) {
    const RankEnv* ranks = s->how->ranks;
    const char *version = s->how->version ? s->how->version : "", *flags = s->how->flags ? s->how->flags : "";
    char who[200], other[200], difference[400];
    snprintf(who, sizeof(who), "rank %u (host %.*s, process %u, %s)", m->rank, (int)rdzv_min(m->host.length, 64),
             m->host.data ? m->host.data : "", m->pid, p->address);
    if (!protocol) { snprintf(who, sizeof(who), "a rank (%s)", p->address); }
    reason[0] = '\0';
    if (m->token != ranks->token) {
        snprintf(reason, size, "%s: it belongs to another run (its token is %016llx, rank 0 has %016llx)", who,
                 (unsigned long long)m->token, (unsigned long long)ranks->token);
        return false;
    }
    if (!protocol) {
        snprintf(reason, size, "%s: it is of another version of the program (protocol %u, rank 0 has %d)", who,
                 m->protocol, RENDEZVOUS_PROTOCOL);
    } else if (m->num_ranks != (uint32_t)ranks->num_ranks) {
        snprintf(reason, size, "%s: it was started as one of %u ranks, rank 0 as one of %d", who, m->num_ranks,
                 ranks->num_ranks);
    } else if (m->rank == 0 || m->rank >= (uint32_t)ranks->num_ranks) {
        snprintf(reason, size, "%s: its rank is not in 1 to %d", who, ranks->num_ranks - 1);
    } else if (m->version.length != strlen(version) || memcmp(m->version.data, version, m->version.length) != 0) {
        snprintf(reason, size, "%s: it is version %.*s of the program, rank 0 is %s", who, (int)m->version.length,
                 m->version.data, version);
    } else if (m->build != s->how->build) {
        snprintf(reason, size, "%s: it is another binary (build %016llx, rank 0 is %016llx)", who,
                 (unsigned long long)m->build, (unsigned long long)s->how->build);
    } else if (m->flags_hash != s->how->flags_hash) {
        size_t n = strlen(flags);
        RdzvText ours = {flags, rdzv_min(n, RENDEZVOUS_MAX_FLAGS)};
        rdzv_first_difference(difference, sizeof(difference), m->flags, ours);
        snprintf(reason, size, "%s: it has other flags: %s", who, difference);
    } else if (s->arrivals[m->rank].host[0]) {
        rdzv_format_rank(other, sizeof(other), s, (int)m->rank);
        snprintf(reason, size, "%s: %s is here already", who, other);
        return false;
    }
    return reason[0] != '\0';
}

// Handles a hello. protocol: it is of our protocol, so that all its fields are known.
static inline void rdzv_handle_hello(RdzvServer* s, RdzvPeer* p, const RdzvMessage* m, bool protocol) {
    char reason[1024];
    bool ends_all = rdzv_judge(s, m, p, protocol, reason, sizeof(reason));
    reason[mask_controls(reason, strlen(reason), false)] = '\0';
    bool ours = m->token == s->how->ranks->token && m->rank > 0 && m->rank < (uint32_t)s->how->ranks->num_ranks;
    if (ours && !s->arrivals[m->rank].host[0]) {
        RdzvArrival* a = &s->arrivals[m->rank];
        size_t n = rdzv_min(m->host.length, sizeof(a->host) - 1);
        memcpy(a->host, m->host.data, n);
        a->host[mask_controls(a->host, n, false)] = '\0';
        if (!a->host[0]) { strcpy(a->host, "?"); }
        a->pid = (long)m->pid;
        s->num_arrived++;
    }
    if (reason[0]) {
        if (ends_all) { rdzv_fail(s, "rank 0 refused %s", reason); }
        if (!ends_all) { rdzv_warn(s, "%s", reason); }
        char text[1100];
        snprintf(text, sizeof(text), "rank 0 refused %s", reason);
        rdzv_refuse(s, p, text);
    } else if (s->failed) {
        rdzv_refuse(s, p, s->error.text);
    } else {
        p->rank = (int)m->rank;
        p->stage = RDZV_WAITS;
        if (!rdzv_send_kind(s, p, RDZV_ACCEPTED, NULL, 0)) {
            rdzv_fail(s, "rank %d (host %s, process %ld) went away", p->rank, s->arrivals[p->rank].host,
                      s->arrivals[p->rank].pid);
        }
    }
}

// Handles what a connection has sent.
static inline void rdzv_handle_data(RdzvServer* s, RdzvPeer* p) {
    RdzvMessage m;
    Error why;
    int size = rdzv_parse(&m, p->data, p->received, &why);
    if (size == RDZV_INCOMPLETE) { return; }
    if (p->stage == RDZV_NEW && size == RDZV_BAD) {
        rdzv_warn(s, "a connection from %s: %s", p->address, why.text);
        rdzv_close_peer(p);
        return;
    }
    if (p->stage == RDZV_NEW && (size == RDZV_OTHER_PROTOCOL || m.kind == RDZV_HELLO)) {
        p->received = 0; // nothing else may follow before the answer
        rdzv_handle_hello(s, p, &m, size > 0);
    } else if (p->stage == RDZV_WAITS && s->started && m.kind == RDZV_READY && size > 0) {
        p->received = 0;
        p->stage = RDZV_IS_READY;
        s->num_ready++;
    } else if (p->stage == RDZV_NEW) {
        rdzv_warn(s, "a connection from %s: it did not begin with a hello", p->address);
        rdzv_close_peer(p);
    } else {
        char who[200];
        rdzv_format_rank(who, sizeof(who), s, p->rank);
        rdzv_fail(s, "%s sent a message out of turn", who);
    }
}

static inline void rdzv_receive(RdzvServer* s, RdzvPeer* p) {
    ssize_t n = recv(p->fd, p->data + p->received, RENDEZVOUS_MAX_MESSAGE - p->received, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) { return; }
    if (n <= 0) {
        char who[200];
        if (p->stage == RDZV_NEW) {
            rdzv_warn(s, "a connection from %s: it was closed after %zu bytes of a hello", p->address, p->received);
        } else if (p->stage != RDZV_LEAVES) {
            rdzv_format_rank(who, sizeof(who), s, p->rank);
            rdzv_fail(s, "%s went away before all were ready", who);
        }
        rdzv_close_peer(p);
        return;
    }
    if (p->stage == RDZV_LEAVES) { return; } // whatever a refused one still sends
    p->received += (size_t)n;
    rdzv_handle_data(s, p);
}

// Writes "2, 5-7": the ranks that have not arrived, or that have not said that they are ready.
static inline void rdzv_format_missing(char* out, size_t size, const RdzvServer* s) {
    size_t used = 0;
    int n = s->how->ranks->num_ranks;
    bool* missing = (bool*)calloc_check((size_t)n + 1, sizeof(bool));
    for (int i = 1; i < n; i++) { missing[i] = s->started || !s->arrivals[i].host[0]; }
    for (int i = 0; s->started && i < s->max_peers; i++) {
        if (s->peers[i].fd >= 0 && s->peers[i].stage == RDZV_IS_READY) { missing[s->peers[i].rank] = false; }
    }
    out[0] = '\0';
    for (int i = 1; i < n; i++) {
        if (!missing[i] || missing[i - 1]) { continue; }
        int last = i;
        while (missing[last + 1]) { last++; }
        char text[40];
        snprintf(text, sizeof(text), last > i ? "%s%d-%d" : "%s%d", used ? ", " : "", i, last);
        if (used + strlen(text) + 5 > size) {
            snprintf(out + used, size - used, " ...");
            break;
        }
        used += (size_t)snprintf(out + used, size - used, "%s", text);
    }
    free(missing);
}

// Writes "a (8), b (3)": the hosts of the ranks that have arrived, and how many of them.
static inline void rdzv_format_hosts(char* out, size_t size, const RdzvServer* s) {
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < s->how->ranks->num_ranks; i++) {
        const char* host = s->arrivals[i].host;
        int count = 0;
        bool first = host[0] != '\0';
        for (int k = 0; k < s->how->ranks->num_ranks && first; k++) {
            if (strcmp(s->arrivals[k].host, host) != 0) { continue; }
            first = k >= i;
            count++;
        }
        if (!first) { continue; }
        char text[RENDEZVOUS_MAX_NAME + 40];
        snprintf(text, sizeof(text), "%s%s (%d)", used ? ", " : "", host, count);
        if (used + strlen(text) + 5 > size) {
            snprintf(out + used, size - used, " ...");
            return;
        }
        used += (size_t)snprintf(out + used, size - used, "%s", text);
    }
}

// Closes what has waited too long, and fails the start if the time for all is over.
static inline void rdzv_check_times(RdzvServer* s) {
    double now = time_ms();
    for (int i = 0; i < s->max_peers; i++) {
        RdzvPeer* p = &s->peers[i];
        if (p->fd < 0 || p->stage == RDZV_WAITS || p->stage == RDZV_IS_READY || now < p->deadline_ms) { continue; }
        if (p->stage == RDZV_LEAVES) {
            rdzv_close_peer(p);
            continue;
        }
        char text[300];
        snprintf(text, sizeof(text), "a connection from %s: it sent %zu bytes of a hello in %.1f s, then nothing",
                 p->address, p->received, rdzv_answer_ms(s->how) / 1000);
        rdzv_warn(s, "%s", text);
        char reason[340];
        snprintf(reason, sizeof(reason), "rank 0 refused %s", text);
        rdzv_refuse(s, p, reason);
    }
    if (now < s->deadline_ms || s->failed) { return; }
    char missing[200], hosts[300];
    rdzv_format_missing(missing, sizeof(missing), s);
    rdzv_format_hosts(hosts, sizeof(hosts), s);
    if (s->started) {
        rdzv_fail(s, "of %d ranks these did not answer within %.1f s after all had arrived: %s",
                  s->how->ranks->num_ranks, rdzv_answer_ms(s->how) / 1000, missing);
    } else {
        rdzv_fail(s, "of %d ranks these did not arrive within %.1f s: %s. Arrived, by host: %s.%s%s",
                  s->how->ranks->num_ranks, rdzv_limit_ms(s->how) / 1000, missing, hosts,
                  s->last_refusal[0] ? " Last refused: " : "", s->last_refusal);
    }
}

// Waits for data or connections until something is to be done, RENDEZVOUS_SLICE_MS at most, and handles them.
static inline void rdzv_poll(RdzvServer* s, struct pollfd* fds) {
    int n = 0;
    for (int i = 0; i < s->num_listeners; i++, n++) {
        fds[n].fd = s->listeners[i];
        fds[n].events = POLLIN;
    }
    for (int i = 0; i < s->max_peers; i++, n++) {
        fds[n].fd = s->peers[i].fd; // poll() passes over -1
        fds[n].events = POLLIN;
    }
    for (int i = 0; i < n; i++) { fds[i].revents = 0; }
    if (poll(fds, (nfds_t)n, RENDEZVOUS_SLICE_MS) <= 0) { return; }
    for (int i = 0; i < s->max_peers; i++) { // before the listeners, which may fill a place again
        if (s->peers[i].fd >= 0 && fds[s->num_listeners + i].revents) { rdzv_receive(s, &s->peers[i]); }
    }
    for (int i = 0; i < s->num_listeners; i++) {
        if (fds[i].revents) { rdzv_accept(s, s->listeners[i]); }
    }
}

// Sends a message to all ranks that were accepted.
static inline void rdzv_send_all(RdzvServer* s, RdzvKind kind, const void* body, size_t bytes) {
    for (int i = 0; i < s->max_peers; i++) {
        RdzvPeer* p = &s->peers[i];
        if (p->fd < 0 || (p->stage != RDZV_WAITS && p->stage != RDZV_IS_READY)) { continue; }
        if (kind == RDZV_REFUSED) {
            rdzv_refuse(s, p, s->error.text);
        } else if (!rdzv_send_kind(s, p, kind, body, bytes)) {
            char who[200];
            rdzv_format_rank(who, sizeof(who), s, p->rank);
            rdzv_fail(s, "%s went away before all were ready", who);
        }
    }
}

// From the first connection to the last GO. After a failure it stays for answer_ms at most, to tell the ranks that are late.
static inline void rdzv_serve(RdzvServer* s, struct pollfd* fds) {
    int others = s->how->ranks->num_ranks - 1;
    bool told = false;
    Error err;
    for (;;) {
        bool stopped = rdzv_stopped(s->how, &err), late = time_ms() >= s->deadline_ms;
        if (stopped) { rdzv_fail(s, "%s", err.text); }
        if (!s->failed && !s->started && s->num_arrived == others) {
            s->started = true;
            s->deadline_ms = time_ms() + rdzv_answer_ms(s->how);
            rdzv_send_all(s, RDZV_START, s->blob, s->blob_bytes);
        }
        if (!s->failed && s->num_ready == others) {
            rdzv_send_all(s, RDZV_GO, NULL, 0);
            return;
        }
        if (s->failed && !told) {
            rdzv_send_all(s, RDZV_REFUSED, NULL, 0);
            told = true;
            if (!late) { s->deadline_ms = time_ms() + rdzv_answer_ms(s->how); }
        }
        if (s->failed && (late || stopped || s->num_arrived == others)) { return; }
        rdzv_poll(s, fds);
        rdzv_check_times(s);
    }
}

static inline bool rdzv_rank0(const Rendezvous* r, const void* blob, size_t bytes, Error* err) {
    RdzvServer s;
    int n = r->ranks->num_ranks;
    memset(&s, 0, sizeof(s));
    s.how = r;
    s.blob = blob;
    s.blob_bytes = bytes;
    s.max_peers = n - 1 + RENDEZVOUS_STRANGERS;
    s.deadline_ms = time_ms() + rdzv_limit_ms(r);
    if (!rdzv_listen(&s, err)) {
        for (int i = 0; i < s.num_listeners; i++) { close(s.listeners[i]); }
        return false;
    }
    s.peers = (RdzvPeer*)calloc_check((size_t)s.max_peers, sizeof(RdzvPeer));
    s.arrivals = (RdzvArrival*)calloc_check((size_t)n, sizeof(RdzvArrival));
    struct pollfd* fds = (struct pollfd*)calloc_check((size_t)s.max_peers + RDZV_LISTENERS, sizeof(struct pollfd));
    for (int i = 0; i < s.max_peers; i++) { s.peers[i].fd = -1; }
    if (gethostname(s.arrivals[0].host, RENDEZVOUS_MAX_NAME) != 0) { strcpy(s.arrivals[0].host, "unknown host"); }
    s.arrivals[0].pid = (long)getpid();
    rdzv_serve(&s, fds);
    if (r->link && !s.failed) { link_open(r->link, 0, n); }
    for (int i = 0; i < s.max_peers; i++) {
        RdzvPeer* p = &s.peers[i];
        if (r->link && !s.failed && p->fd >= 0 && p->stage == RDZV_IS_READY) {
            link_add(r->link, p->rank, p->fd);
            link_set_name(r->link, p->rank, s.arrivals[p->rank].host, s.arrivals[p->rank].pid);
            p->fd = -1;
        }
        rdzv_close_peer(p);
    }
    for (int i = 0; i < s.num_listeners; i++) { close(s.listeners[i]); }
    free(fds);
    free(s.peers);
    free(s.arrivals);
    return s.failed ? error_set(err, "%s", s.error.text) : true;
}

// ---- the other ranks ----------------------------------------------------------------

typedef enum { RDZV_DONE, RDZV_ERROR, RDZV_RETRY } RdzvOutcome;

// Waits for events on fd. Returns false if the time is over or a signal asked for the end.
static inline bool rdzv_wait(const Rendezvous* r, int fd, short events, double deadline_ms) {
    Error ignored;
    for (;;) {
        struct pollfd p = {fd, events, 0};
        if (rdzv_stopped(r, &ignored)) { return false; }
        if (poll(&p, 1, RENDEZVOUS_SLICE_MS) > 0) { return true; }
        if (time_ms() >= deadline_ms) { return false; }
    }
}

// Connects to one address. Returns the socket, or -1.
static inline int rdzv_connect(const Rendezvous* r, const struct addrinfo* a, double deadline_ms, Error* err) {
    struct sockaddr_storage mine, theirs;
    socklen_t n = sizeof(mine), m = sizeof(theirs);
    double end = time_ms() + RENDEZVOUS_CONNECT_MS;
    int fd = socket(a->ai_family, SOCK_STREAM, 0), reason = 0;
    if (fd < 0) { return error_set(err, "%s", strerror(errno)), -1; }
    rdzv_prepare_socket(fd);
    if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
        socklen_t bytes = sizeof(reason);
        reason = errno;
        if (reason == EINPROGRESS || reason == EINTR) {
            reason = ETIMEDOUT;
            if (rdzv_wait(r, fd, POLLOUT, end < deadline_ms ? end : deadline_ms)) {
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &reason, &bytes);
            }
        }
    }
    // without a listener, a connection to a port of this machine may get that very port as its own, and reach itself
    memset(&mine, 0, sizeof(mine));
    memset(&theirs, 0, sizeof(theirs));
    bool named = reason == 0 && getsockname(fd, (struct sockaddr*)&mine, &n) == 0 &&
                 getpeername(fd, (struct sockaddr*)&theirs, &m) == 0;
    if (reason == 0 && (!named || (n == m && memcmp(&mine, &theirs, n) == 0))) { reason = ECONNREFUSED; }
    if (reason == 0) { return fd; }
    close(fd);
    return error_set(err, "%s", strerror(reason)), -1;
}

// Handles one message of rank 0. *wanted: the kind that must come next. Returns RDZV_RETRY while there is more to come.
static inline RdzvOutcome rdzv_answer(const Rendezvous* r, int fd, const RdzvMessage* m, int size, RdzvKind* wanted,
                                      void* blob, size_t bytes, const char* place, Error* err) {
    uint8_t ready[RENDEZVOUS_HEADER];
    if (size == RDZV_OTHER_PROTOCOL) {
        error_set(err, "rank 0 at %s is of another version of the program (protocol %u, rank %d has %d)", place,
                  m->protocol, r->ranks->rank, RENDEZVOUS_PROTOCOL);
        return RDZV_ERROR;
    }
    if (m->kind == RDZV_REFUSED) {
        error_set(err, "%.*s", (int)m->body.length, m->body.data);
        return RDZV_ERROR;
    }
    if (m->kind != (uint32_t)*wanted || (m->kind == RDZV_START && m->body.length != bytes)) {
        error_set(err, "rank 0 at %s sent a message out of turn (kind %u, %zu bytes)", place, m->kind, m->body.length);
        return RDZV_ERROR;
    }
    if (m->kind == RDZV_GO) { return RDZV_DONE; }
    if (m->kind == RDZV_START) {
        if (bytes > 0) { memcpy(blob, m->body.data, bytes); }
        if (!rdzv_send(fd, ready, rdzv_write(ready, RDZV_READY, r->ranks->token, NULL, 0))) {
            error_set(err, "rank 0 at %s went away before all were ready", place);
            return RDZV_ERROR;
        }
    }
    *wanted = m->kind == RDZV_ACCEPTED ? RDZV_START : RDZV_GO;
    return RDZV_RETRY;
}

// Says hello on a new connection and goes on to GO. RDZV_RETRY: the connection was closed before rank 0 answered; it may have
// been a rank 0 that was just ending.
static inline RdzvOutcome rdzv_talk(const Rendezvous* r, int fd, void* blob, size_t bytes, const char* place,
                                    double deadline_ms, Error* err) {
    uint8_t data[RENDEZVOUS_MAX_MESSAGE];
    RdzvKind wanted = RDZV_ACCEPTED;
    size_t received = 0;
    double limit_ms = rdzv_limit_ms(r), answer_ms = rdzv_answer_ms(r);
    if (!rdzv_send(fd, data, rdzv_write_hello(data, r))) {
        error_set(err, "the connection was closed");
        return RDZV_RETRY;
    }
    for (;;) {
        RdzvMessage m;
        int size = rdzv_parse(&m, data, received, err);
        if (size == RDZV_BAD) {
            Error why = *err;
            error_set(err, "%s is not rank 0 of this run, but another program that uses the port (%s)", place,
                      why.text);
            return RDZV_ERROR;
        }
        if (size != RDZV_INCOMPLETE) {
            RdzvOutcome outcome = rdzv_answer(r, fd, &m, size, &wanted, blob, bytes, place, err);
            if (outcome != RDZV_RETRY) { return outcome; }
            received = 0;
            // rank 0's own limit began before this; it says why it fails
            deadline_ms = time_ms() + (wanted == RDZV_START ? limit_ms + answer_ms : 2 * answer_ms);
            continue;
        }
        if (!rdzv_wait(r, fd, POLLIN, deadline_ms)) {
            if (!rdzv_stopped(r, err)) {
                error_set(err, "rank 0 at %s does not answer rank %d", place, r->ranks->rank);
            }
            return RDZV_ERROR;
        }
        // no byte more than this message: what follows GO belongs to the link
        size_t end = RENDEZVOUS_HEADER + (received < RENDEZVOUS_HEADER ? 0 : (size_t)ranks_get(data + 24, 4));
        ssize_t n = recv(fd, data + received, end - received, 0);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) { continue; }
        if (n <= 0) {
            if (wanted == RDZV_ACCEPTED && received == 0) {
                error_set(err, "the connection was closed without an answer");
                return RDZV_RETRY;
            }
            error_set(err, "rank 0 at %s went away before all were ready", place);
            return RDZV_ERROR;
        }
        received += (size_t)n;
    }
}

static inline bool rdzv_other_rank(const Rendezvous* r, void* blob, size_t bytes, Error* err) {
    char place[RANKS_ADDRESS + 16];
    double limit_ms = rdzv_limit_ms(r), deadline_ms = time_ms() + limit_ms, pause_ms = 10;
    Error reason = {""};
    rdzv_format_place(place, sizeof(place), r->ranks->address, r->ranks->port);
    for (;;) {
        struct addrinfo* list = NULL; // resolved each time: the name server may come up later, too
        RdzvOutcome outcome = RDZV_RETRY;
        if (rdzv_resolve(&list, r->ranks->address, r->ranks->port, 0, &reason)) {
            for (struct addrinfo* a = list; a && outcome == RDZV_RETRY; a = a->ai_next) {
                int fd = rdzv_connect(r, a, deadline_ms, &reason);
                if (fd < 0) { continue; }
                outcome = rdzv_talk(r, fd, blob, bytes, place, deadline_ms, &reason);
                if (r->link && outcome == RDZV_DONE) {
                    link_open(r->link, r->ranks->rank, r->ranks->num_ranks);
                    link_add(r->link, 0, fd);
                } else {
                    close(fd);
                }
            }
            freeaddrinfo(list);
        }
        if (outcome == RDZV_DONE) { return true; }
        if (outcome == RDZV_ERROR) { return error_set(err, "%s", reason.text); }
        double end = time_ms() + pause_ms;
        while (time_ms() < end && !rdzv_stopped(r, err)) { usleep(5000); }
        if (rdzv_stopped(r, err)) { return false; }
        if (time_ms() >= deadline_ms) {
            return error_set(err,
                             "rank %d cannot reach rank 0 at %s within %.1f s: %s. Has rank 0 started, on that host?",
                             r->ranks->rank, place, limit_ms / 1000, reason.text);
        }
        pause_ms = pause_ms < 200 ? 2 * pause_ms : 200;
    }
}

// ---- all --------------------------------------------------------------------------

// Called by every rank. Returns true when all have arrived: blob (bytes, at most RENDEZVOUS_MAX_BLOB) then holds what rank 0
// passed in. Returns false within limit_ms + 2 answer_ms with the reason in err, as do all ranks that could be reached. (Name
// lookup is the system's and has its own time limits.) With one rank it returns at once. r->link, if any, is open after
// success, and to be closed by rank_link_close(); after a failure it is not open.
static inline bool rendezvous(const Rendezvous* r, void* blob, size_t bytes, Error* err) {
    require(bytes <= RENDEZVOUS_MAX_BLOB && r->ranks->rank >= 0 && r->ranks->rank < r->ranks->num_ranks);
    int rank = r->ranks->rank, num_ranks = r->ranks->num_ranks;
    if (num_ranks == 1 && r->link) { link_open(r->link, 0, 1); }
    if (num_ranks == 1) { return true; }
    if (!(rank == 0 ? rdzv_rank0(r, blob, bytes, err) : rdzv_other_rank(r, blob, bytes, err))) { return false; }
    if (!r->link || link_exchange_names(r->link, rdzv_answer_ms(r), err)) { return true; }
    rank_link_close(r->link, 0, NULL);
    return false;
}

#endif
