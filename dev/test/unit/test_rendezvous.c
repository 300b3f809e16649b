/*
The rendezvous of 2 to 16 processes on this machine: all get the blob, none before all have arrived; every way to not belong
to the run is refused by name on both sides; a stranger disturbs nobody; whoever dies at whatever moment, the others end with
a reason; no process and no descriptor is left.
*/
#include "../test.h"
#include "../../../llmc/rendezvous.h"
#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { MAX_RANKS = 20, BLOB = 128 };

// What a rank reports, in memory that all processes share.
typedef struct {
    volatile bool began; // signals are handled
    bool returned, ok;
    char error[1024];
    uint8_t blob[RENDEZVOUS_MAX_BLOB];
    double begin_ms, end_ms;
    int new_fds; // descriptors after, less those before
} Report;

typedef struct {
    // what the ranks are started with; changed before start()
    RankEnv env;
    Rendezvous how;
    size_t blob_bytes;
    // what has become of them
    int reserved_fd; // holds the port
    int num_started;
    pid_t pids[MAX_RANKS];
    Report* reports;  // (MAX_RANKS), in the order of start()
    FILE* warnings;   // their stderr
    char text[32768]; // of warnings
} Group;

static volatile sig_atomic_t stop_signal;
static void on_stop(int number) { stop_signal = number; }

static const uint64_t run_token = 0x1122334455667788u;

static int count_fds(void) {
    int n = 0;
    DIR* dir = opendir("/proc/self/fd");
    if (!dir) { return 0; }
    while (readdir(dir)) { n++; }
    closedir(dir);
    return n;
}

// A group with a port on which nobody listens yet. It is reserved: no other program gets it, but rank 0 can listen there.
static void group_open_unbound(Group* g, int num_ranks) {
    struct sockaddr_in a;
    socklen_t bytes = sizeof(a);
    int on = 1;
    memset(g, 0, sizeof(*g));
    memset(&a, 0, sizeof(a));
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    g->env.num_ranks = num_ranks;
    g->env.listen_fd = g->env.progress_fd = -1;
    g->reserved_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(g->reserved_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(g->reserved_fd, (struct sockaddr*)&a, bytes) != 0 ||
        getsockname(g->reserved_fd, (struct sockaddr*)&a, &bytes) != 0) {
        die("cannot reserve a port: %s", strerror(errno));
    }
    g->env.port = ntohs(a.sin_port);
    snprintf(g->env.address, sizeof(g->env.address), "127.0.0.1");
    g->env.token = run_token;
    g->how.version = "1.0";
    g->how.build = 77;
    g->how.flags = "batch=4\nlr=0.1\n";
    g->how.flags_hash = ranks_hash(g->how.flags, strlen(g->how.flags));
    g->how.limit_ms = 30000;
    g->how.answer_ms = 20000;
    g->how.stop = &stop_signal;
    g->blob_bytes = BLOB;
    g->warnings = tmpfile();
    void* shared = mmap(NULL, MAX_RANKS * sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!g->warnings || shared == MAP_FAILED) { die("cannot prepare a group: %s", strerror(errno)); }
    g->reports = (Report*)shared;
}

// The same, but rank 0 inherits a socket that listens already, as from ranks_launch().
static void group_open(Group* g, int num_ranks) {
    char address[16];
    Error err;
    group_open_unbound(g, num_ranks);
    g->env.listen_fd = ranks_listen(address, &g->env.port, &err);
    if (g->env.listen_fd < 0) { die("%s", err.text); }
}

static uint8_t blob_byte(size_t i) { return (uint8_t)(i * 7 + 3); }

// Starts a process as a rank of the group after delay_ms. Returns its index.
static int start(Group* g, int rank, int delay_ms) {
    int index = g->num_started++;
    fflush(stdout);
    pid_t pid = fork();
    if (pid < 0) { die("fork: %s", strerror(errno)); }
    g->pids[index] = pid;
    if (pid > 0) {
        if (rank == 0 && g->env.listen_fd >= 0) {
            close(g->env.listen_fd);
            g->env.listen_fd = -1;
        }
        return index;
    }
    Report* report = &g->reports[index];
    Error err = {""};
    dup2(fileno(g->warnings), STDERR_FILENO);
    signal(SIGTERM, on_stop);
    usleep((useconds_t)delay_ms * 1000);
    g->env.rank = rank;
    if (rank > 0 && g->env.listen_fd >= 0) {
        close(g->env.listen_fd);
        g->env.listen_fd = -1;
    }
    g->how.ranks = &g->env;
    for (size_t i = 0; i < g->blob_bytes && rank == 0; i++) { report->blob[i] = blob_byte(i); }
    int fds = count_fds() - (g->env.listen_fd >= 0); // which rendezvous() closes
    report->began = true;
    report->begin_ms = time_ms();
    report->ok = rendezvous(&g->how, report->blob, g->blob_bytes, &err);
    report->end_ms = time_ms();
    report->new_fds = count_fds() - fds;
    snprintf(report->error, sizeof(report->error), "%s", err.text);
    report->returned = true;
    exit(0);
}

// Waits for process i of the group.
static void finish(Group* g, int i) {
    int status = 0;
    if (g->pids[i] == 0) { return; }
    waitpid(g->pids[i], &status, 0);
    g->pids[i] = 0;
    if (!g->reports[i].returned) { return; } // it was killed
    check_msg(status == 0, "process %d of the group ended with status %x", i, (unsigned)status);
    check_msg(g->reports[i].new_fds == 0, "process %d of the group has %d descriptors more", i, g->reports[i].new_fds);
}

// Waits for all, and reads what they printed.
static void finish_all(Group* g) {
    for (int i = 0; i < g->num_started; i++) { finish(g, i); }
    rewind(g->warnings);
    g->text[fread(g->text, 1, sizeof(g->text) - 1, g->warnings)] = '\0';
    check_msg(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "a process is left");
}

static void group_close(Group* g) {
    finish_all(g);
    if (g->env.listen_fd >= 0) { close(g->env.listen_fd); }
    close(g->reserved_fd);
    fclose(g->warnings);
    munmap(g->reports, MAX_RANKS * sizeof(Report));
}

// Process i must have returned true with the blob.
static void expect_ok(int line, const Group* g, int i) {
    const Report* r = &g->reports[i];
    bool same = true;
    for (size_t k = 0; k < g->blob_bytes; k++) { same = same && r->blob[k] == blob_byte(k); }
    if (!r->ok || !same) {
        test_fail(__FILE__, line, "process %d: %s, blob %s, '%s'", i, r->ok ? "true" : "false",
                  same ? "right" : "wrong", r->error);
    }
}
// Process i must have returned false, with each of two texts in its error.
static void expect_error(int line, const Group* g, int i, const char* want, const char* also) {
    const Report* r = &g->reports[i];
    if (!r->returned || r->ok || !strstr(r->error, want) || !strstr(r->error, also)) {
        test_fail(__FILE__, line, "process %d: %s, '%s', wanted '%s' and '%s'", i, r->ok ? "true" : "false", r->error,
                  want, also);
    }
}
#define ok(g, i) expect_ok(__LINE__, g, i)
#define bad(g, i, want, also) expect_error(__LINE__, g, i, want, also)

// ---- a raw connection, to do what no rank would ------------------------------------------

static int raw_connect(int port) {
    struct sockaddr_in a;
    memset(&a, 0, sizeof(a));
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr*)&a, sizeof(a)) != 0) { die("connect: %s", strerror(errno)); }
    return fd;
}

static void raw_send(int fd, const void* data, size_t bytes) {
    if (send(fd, data, bytes, MSG_NOSIGNAL) != (ssize_t)bytes) {
        test_fail(__FILE__, __LINE__, "send: %s", strerror(errno));
    }
}

// Reads one message. Returns its kind, 0 at the end of the connection; its body goes to text.
static int raw_read(int fd, char* text, size_t size) {
    static uint8_t data[RENDEZVOUS_MAX_MESSAGE];
    RdzvMessage m;
    size_t received = 0;
    text[0] = '\0';
    for (;;) {
        int used = rdzv_parse(&m, data, received, NULL);
        if (used > 0) {
            snprintf(text, size, "%.*s", (int)m.body.length, m.body.data);
            return (int)m.kind;
        }
        size_t want = received < RENDEZVOUS_HEADER ? RENDEZVOUS_HEADER - received : (size_t)ranks_get(data + 24, 4);
        ssize_t n = used < 0 ? 0 : recv(fd, data + received, want, 0);
        if (n <= 0) { return 0; }
        received += (size_t)n;
    }
}

// The hello of a rank of the group.
static size_t hello_of(uint8_t* out, const Group* g, int rank) {
    RankEnv env = g->env;
    Rendezvous how = g->how;
    env.rank = rank;
    how.ranks = &env;
    return rdzv_write_hello(out, &how);
}

// Accepts a connection on the group's socket, as a false rank 0, and reads the hello.
static int raw_accept(const Group* g) {
    char text[64];
    int fd = accept(g->env.listen_fd, NULL, NULL);
    check(fd >= 0 && raw_read(fd, text, sizeof(text)) == RDZV_HELLO);
    return fd;
}

// ---- when all goes well --------------------------------------------------------------------

static void test_all_arrive(void) {
    static const int sizes[] = {2, 3, 8, 16};
    static const size_t blobs[] = {0, 1, BLOB, RENDEZVOUS_MAX_BLOB};
    for (int k = 0; k < 4; k++) {
        Group g;
        group_open(&g, sizes[k]);
        g.blob_bytes = blobs[k];
        for (int rank = 0; rank < sizes[k]; rank++) { start(&g, rank, 0); }
        finish_all(&g);
        for (int rank = 0; rank < sizes[k]; rank++) { ok(&g, rank); }
        check_str(g.text, "");
        group_close(&g);
    }
}

static void test_barrier(void) {
    for (int last = 0; last < 4; last++) { // each rank in turn comes last
        Group g;
        group_open(&g, 4);
        for (int rank = 0; rank < 4; rank++) { start(&g, rank, rank == last ? 80 : 0); }
        finish_all(&g);
        for (int rank = 0; rank < 4; rank++) {
            ok(&g, rank);
            check_msg(g.reports[rank].end_ms >= g.reports[last].begin_ms, "rank %d did not wait for rank %d", rank,
                      last);
        }
        group_close(&g);
    }
}

static void test_rank0_starts_late(void) {
    Group g;
    group_open_unbound(&g, 3);
    start(&g, 1, 0);
    start(&g, 2, 0);
    start(&g, 0, 150);
    finish_all(&g);
    for (int i = 0; i < 3; i++) { ok(&g, i); }
    group_close(&g);
}

static void test_one_rank(void) {
    Group g;
    group_open_unbound(&g, 1);
    start(&g, 0, 0);
    finish_all(&g);
    ok(&g, 0);
    group_close(&g);
}

static void test_names(void) {
    char host[256] = "";
    struct addrinfo* list = NULL;
    check(gethostname(host, sizeof(host) - 1) == 0);
    const char* const names[] = {"127.0.0.1", "localhost", "::1", "127.0.0.2", host};
    for (int k = 0; k < 5; k++) {
        Group g;
        int v6 = socket(AF_INET6, SOCK_STREAM, 0);
        struct sockaddr_in6 a;
        memset(&a, 0, sizeof(a));
        a.sin6_family = AF_INET6;
        a.sin6_addr = in6addr_loopback;
        bool has_v6 = v6 >= 0 && bind(v6, (struct sockaddr*)&a, sizeof(a)) == 0;
        if (v6 >= 0) { close(v6); }
        if (k == 2 && !has_v6) { continue; }
        if (!rdzv_resolve(&list, names[k], 1, 0, NULL)) { continue; } // a container may not know its own name
        freeaddrinfo(list);
        group_open_unbound(&g, 2);
        snprintf(g.env.address, sizeof(g.env.address), "%s", names[k]);
        start(&g, 0, 0);
        start(&g, 1, 0);
        finish_all(&g);
        ok(&g, 0);
        ok(&g, 1);
        group_close(&g);
    }
}

// ---- who is refused ------------------------------------------------------------------------

// Starts a good rank 0 and 1, and a rank 2 that has been changed. Its reason must be that of all three.
typedef struct {
    const char* what;
    const char *want, *also;
} Refusal;

static void test_refused_by_name(void) {
    static const Refusal refusals[] = {
        {"version", "it is version 0.9 of the program, rank 0 is 1.0", "rank 2 (host "},
        {"longer version", "it is version 1.0.1 of the program", "rank 2 (host "},
        {"build", "it is another binary (build 000000000000004e, rank 0 is 000000000000004d)", "rank 2 (host "},
        {"flags", "it has other flags: batch=8, rank 0 has batch=4", "rank 2 (host "},
        {"flags' hash", "it has other flags: of which the text does not show the difference", "rank 2 (host "},
        {"number of ranks", "it was started as one of 4 ranks, rank 0 as one of 3", "rank 2 (host "},
        {"rank", "its rank is not in 1 to 2", "rank 3 (host "},
    };
    for (size_t k = 0; k < sizeof(refusals) / sizeof(refusals[0]); k++) {
        Group g, changed;
        group_open(&g, 3);
        start(&g, 0, 0);
        start(&g, 1, 0);
        changed = g;
        if (k == 0) { changed.how.version = "0.9"; }
        if (k == 1) { changed.how.version = "1.0.1"; }
        if (k == 2) { changed.how.build = 78; }
        if (k == 3) { changed.how.flags = "batch=8\nlr=0.1\n"; }
        if (k == 3 || k == 4) { changed.how.flags_hash++; }
        if (k == 5) { changed.env.num_ranks = 4; }
        if (k == 6) { // no rank would say this: a raw hello
            uint8_t data[RENDEZVOUS_MAX_MESSAGE];
            char text[1024];
            size_t n = hello_of(data, &g, 3);
            int fd = raw_connect(g.env.port);
            raw_send(fd, data, n);
            check(raw_read(fd, text, sizeof(text)) == RDZV_REFUSED);
            check_msg(strstr(text, refusals[k].want) && strstr(text, refusals[k].also), "%s", text);
            close(fd);
            start(&g, 2, 0); // a good one: rank 0 waits for it, to tell it
        } else {
            start(&changed, 2, 0);
            g.num_started = changed.num_started;
            g.pids[2] = changed.pids[2];
        }
        finish_all(&g);
        for (int i = 0; i < 3; i++) { bad(&g, i, refusals[k].want, refusals[k].also); }
        double took = g.reports[1].end_ms - g.reports[1].begin_ms;
        check_msg(took < 10000, "%s: took %.0f ms", refusals[k].what, took);
        group_close(&g);
    }
}

static void test_other_protocol(void) {
    for (int end = 0; end < 2; end++) { // of the same run, of another run
        Group g;
        uint8_t data[RENDEZVOUS_MAX_MESSAGE];
        char text[1024];
        group_open(&g, 2);
        start(&g, 0, 0);
        hello_of(data, &g, 1);
        ranks_put(data + 8, 9, 4);
        if (end == 1) { ranks_put(data + 16, 5, 8); }
        int fd = raw_connect(g.env.port);
        raw_send(fd, data, RENDEZVOUS_HEADER); // a header is all that is known of it
        check(raw_read(fd, text, sizeof(text)) == RDZV_REFUSED);
        check_msg(strstr(text, end == 0 ? "protocol 9, rank 0 has 1" : "another run"), "%s", text);
        close(fd);
        start(&g, 1, 0);
        finish_all(&g);
        if (end == 0) { bad(&g, 0, "another version of the program (protocol 9", "a rank (127.0.0.1:"); }
        if (end == 0) { bad(&g, 1, "another version of the program (protocol 9", ""); }
        if (end == 1) { ok(&g, 0), ok(&g, 1); }
        group_close(&g);
    }
}

static void test_late_rank_is_told(void) {
    Group g, changed;
    group_open(&g, 3);
    start(&g, 0, 0);
    changed = g;
    changed.how.flags = "";
    changed.how.flags_hash++;
    start(&changed, 1, 0);
    g.num_started = changed.num_started;
    g.pids[1] = changed.pids[1];
    start(&g, 2, 100); // long after the failure
    finish_all(&g);
    for (int i = 0; i < 3; i++) { bad(&g, i, "rank 1 (host ", "it has other flags: nothing, rank 0 has batch=4"); }
    group_close(&g);
}

static void test_doubled_rank(void) {
    Group g;
    char text[64];
    group_open(&g, 3);
    start(&g, 0, 0);
    start(&g, 1, 0);
    usleep(50000);
    int second = start(&g, 1, 0);
    long pid = (long)g.pids[second];
    finish(&g, second); // the other two go on waiting
    start(&g, 2, 0);
    finish_all(&g);
    // of the two, the one that came second is refused
    int refused = g.reports[1].ok ? 2 : 1;
    if (refused == 2) {
        snprintf(text, sizeof(text), "process %ld, 127.0.0.1:", pid);
        bad(&g, 2, text, "is here already");
    }
    ok(&g, 0);
    ok(&g, 3 - refused);
    ok(&g, 3);
    check(strstr(g.text, "rank 1 (host ") && strstr(g.text, ") is here already"));
    group_close(&g);
}

static void test_other_run(void) {
    Group g, other;
    group_open(&g, 2);
    start(&g, 0, 0);
    other = g;
    other.env.token = 5;
    start(&other, 1, 0);
    g.num_started = other.num_started;
    g.pids[1] = other.pids[1];
    finish(&g, 1);
    start(&g, 1, 0);
    finish_all(&g);
    bad(&g, 1, "it belongs to another run (its token is 0000000000000005, rank 0 has 1122334455667788)",
        "rank 1 (host ");
    ok(&g, 0);
    ok(&g, 2);
    group_close(&g);
}

static void test_refused_gets_the_answer(void) { // although it sent more than was read, and commands for the terminal
    Group g;
    static uint8_t data[60000];
    char text[1024];
    group_open(&g, 2);
    start(&g, 0, 0);
    const char* version = g.how.version;
    for (int k = 0; k < 10; k++) {
        g.env.token = 5;
        size_t n = hello_of(data, &g, 1);
        g.env.token = run_token;
        int fd = raw_connect(g.env.port);
        raw_send(fd, data, n + 30000);
        usleep(5000);
        check_msg(raw_read(fd, text, sizeof(text)) == RDZV_REFUSED && strstr(text, "another run"), "'%s'", text);
        close(fd);
    }
    g.how.version = "\x1b[2J\xc2\x9b"
                    "31m";
    size_t n = hello_of(data, &g, 1);
    g.how.version = version;
    int fd = raw_connect(g.env.port);
    raw_send(fd, data, n);
    check(raw_read(fd, text, sizeof(text)) == RDZV_REFUSED);
    check_msg(strstr(text, "it is version ?[2J?31m of the program, rank 0 is 1.0") &&
                  strlen(strstr(text, "rank 0 is")) == 13,
              "%s", text);
    finish_all(&g);
    close(fd);
    bad(&g, 0, "it is version ?[2J?31m of the program, rank 0 is 1.0", "");
    group_close(&g);
}

static void test_strangers(void) {
    static const char* const texts[] = {
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x02", "SSH-2.0-x\r\n", "L", "LLMX", "\x1b[2J\x1b]0;x\x07"};
    Group g;
    int fds[6];
    char text[64];
    group_open(&g, 3);
    start(&g, 0, 0);
    start(&g, 1, 0);
    for (int k = 0; k < 6; k++) {
        fds[k] = raw_connect(g.env.port);
        raw_send(fds[k], texts[k], strlen(texts[k]));
    }
    // all but "L", which may become a hello, are sent away at once
    for (int k = 0; k < 6; k++) { check(k == 3 || raw_read(fds[k], text, sizeof(text)) == 0); }
    start(&g, 2, 0);
    finish_all(&g);
    for (int k = 0; k < 6; k++) { close(fds[k]); }
    for (int i = 0; i < 3; i++) { ok(&g, i); }
    check_msg(strstr(g.text, "its first bytes are 'GET / HTTP/1.1"), "%s", g.text);
    check_msg(!strchr(g.text, 0x1b) && strstr(g.text, "'?[2J?"), "%s", g.text);
    group_close(&g);
}

static void test_many_strangers(void) { // more silent connections than there are places
    Group g;
    int fds[3 * RENDEZVOUS_STRANGERS];
    group_open(&g, 3);
    start(&g, 0, 0);
    start(&g, 1, 0);
    for (int k = 0; k < 3 * RENDEZVOUS_STRANGERS; k++) { fds[k] = raw_connect(g.env.port); }
    start(&g, 2, 0);
    finish_all(&g);
    for (int k = 0; k < 3 * RENDEZVOUS_STRANGERS; k++) { close(fds[k]); }
    for (int i = 0; i < 3; i++) { ok(&g, i); }
    group_close(&g);
}

static void test_unexpected_messages(void) { // well-formed, but not in their turn
    for (int kind = RDZV_HELLO; kind <= RDZV_REFUSED + 1; kind++) {
        Group g;
        uint8_t data[RENDEZVOUS_MAX_MESSAGE];
        char text[1024];
        // instead of the hello
        group_open(&g, 2);
        start(&g, 0, 0);
        if (kind != RDZV_HELLO) {
            int fd = raw_connect(g.env.port);
            raw_send(fd, data, rdzv_write(data, (RdzvKind)kind, run_token, NULL, 0));
            check(raw_read(fd, text, sizeof(text)) == 0);
            close(fd);
        }
        start(&g, 1, 0);
        finish_all(&g);
        ok(&g, 0);
        ok(&g, 1);
        group_close(&g);
        // after the hello
        group_open(&g, 3);
        start(&g, 0, 0);
        int fd = raw_connect(g.env.port);
        raw_send(fd, data, hello_of(data, &g, 1));
        check(raw_read(fd, text, sizeof(text)) == RDZV_ACCEPTED);
        raw_send(fd, data,
                 kind == RDZV_HELLO ? hello_of(data, &g, 1) : rdzv_write(data, (RdzvKind)kind, run_token, NULL, 0));
        check(raw_read(fd, text, sizeof(text)) == RDZV_REFUSED);
        start(&g, 2, 0);
        finish_all(&g);
        close(fd);
        bad(&g, 0, "rank 1 (host ", "sent a message out of turn");
        bad(&g, 1, "rank 1 (host ", "sent a message out of turn");
        group_close(&g);
    }
}

// ---- silence, half messages, death -------------------------------------------------------------

static void test_closed_after_each_byte(void) {
    Group g;
    uint8_t data[RENDEZVOUS_MAX_MESSAGE];
    group_open(&g, 3);
    start(&g, 0, 0);
    start(&g, 1, 0);
    size_t n = hello_of(data, &g, 2);
    for (size_t k = 0; k < n; k++) {
        int fd = raw_connect(g.env.port);
        raw_send(fd, data, k);
        close(fd);
    }
    start(&g, 2, 0);
    finish_all(&g);
    for (int i = 0; i < 3; i++) { ok(&g, i); }
    check_msg(strstr(g.text, "it was closed after 0 bytes of a hello"), "%s", g.text);
    group_close(&g);
}

static void test_byte_by_byte(void) { // a hello in as many segments as it has bytes
    Group g;
    uint8_t data[RENDEZVOUS_MAX_MESSAGE];
    char text[RENDEZVOUS_MAX_BLOB];
    group_open(&g, 2);
    start(&g, 0, 0);
    size_t n = hello_of(data, &g, 1);
    int fd = raw_connect(g.env.port), on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    for (size_t k = 0; k < n; k++) { raw_send(fd, data + k, 1); }
    check(raw_read(fd, text, sizeof(text)) == RDZV_ACCEPTED);
    check(raw_read(fd, text, sizeof(text)) == RDZV_START && (uint8_t)text[1] == blob_byte(1));
    raw_send(fd, data, rdzv_write(data, RDZV_READY, run_token, NULL, 0));
    check(raw_read(fd, text, sizeof(text)) == RDZV_GO);
    finish_all(&g);
    close(fd);
    ok(&g, 0);
    group_close(&g);
}

static void test_silence(void) {
    Group g;
    uint8_t data[RENDEZVOUS_MAX_MESSAGE];
    char text[1024];
    group_open(&g, 3);
    g.how.answer_ms = 200;
    start(&g, 0, 0);
    size_t n = hello_of(data, &g, 2);
    int silent = raw_connect(g.env.port), half = raw_connect(g.env.port);
    raw_send(half, data, n / 2);
    check(raw_read(half, text, sizeof(text)) == RDZV_REFUSED);
    check_msg(strstr(text, "bytes of a hello in 0.2 s, then nothing"), "%s", text);
    check(raw_read(silent, text, sizeof(text)) == RDZV_REFUSED);
    check_msg(strstr(text, "it sent 0 bytes of a hello in 0.2 s"), "%s", text);
    g.how.answer_ms = 20000;
    close(silent);
    close(half);
    kill(g.pids[0], SIGTERM);
    finish_all(&g);
    check(strstr(g.text, "it sent 0 bytes of a hello in 0.2 s, then nothing") != NULL);
    group_close(&g);
    // the others go on meanwhile
    group_open(&g, 3);
    start(&g, 0, 0);
    silent = raw_connect(g.env.port);
    start(&g, 1, 0);
    half = raw_connect(g.env.port);
    raw_send(half, data, n / 2);
    start(&g, 2, 0);
    finish_all(&g);
    close(silent);
    close(half);
    for (int i = 0; i < 3; i++) {
        ok(&g, i);
        check(g.reports[i].end_ms - g.reports[i].begin_ms < g.how.answer_ms / 2);
    }
    group_close(&g);
}

static void test_client_dies(void) {
    for (int stage = 0; stage < 3; stage++) { // after its hello, after ACCEPTED, after START
        Group g;
        uint8_t data[RENDEZVOUS_MAX_MESSAGE];
        char text[RENDEZVOUS_MAX_BLOB];
        group_open(&g, 3);
        start(&g, 0, 0);
        int fd = raw_connect(g.env.port);
        raw_send(fd, data, hello_of(data, &g, 1));
        if (stage > 0) { check(raw_read(fd, text, sizeof(text)) == RDZV_ACCEPTED); }
        if (stage > 1) { start(&g, 2, 0); }
        if (stage > 1) { check(raw_read(fd, text, sizeof(text)) == RDZV_START); }
        shutdown(fd, SHUT_RDWR); // rank 2 may have inherited fd
        close(fd);
        if (stage <= 1) { start(&g, 2, 0); }
        finish_all(&g);
        bad(&g, 0, "rank 1 (host ", "went away before all were ready");
        bad(&g, 1, "rank 1 (host ", "went away before all were ready");
        group_close(&g);
    }
}

static void test_client_hangs(void) { // it has the blob and says nothing
    Group g;
    uint8_t data[RENDEZVOUS_MAX_MESSAGE];
    char text[RENDEZVOUS_MAX_BLOB];
    group_open(&g, 3);
    g.how.answer_ms = 300;
    start(&g, 0, 0);
    int fd = raw_connect(g.env.port);
    raw_send(fd, data, hello_of(data, &g, 1));
    start(&g, 2, 0);
    check(raw_read(fd, text, sizeof(text)) == RDZV_ACCEPTED);
    check(raw_read(fd, text, sizeof(text)) == RDZV_START);
    check(raw_read(fd, text, sizeof(text)) == RDZV_REFUSED);
    close(fd);
    finish_all(&g);
    bad(&g, 0, "of 3 ranks these did not answer within 0.3 s after all had arrived: 1", "");
    bad(&g, 1, "of 3 ranks these did not answer within 0.3 s after all had arrived: 1", "");
    group_close(&g);
}

static void test_rank0_dies(void) {
    Group g;
    group_open(&g, 4);
    g.how.limit_ms = 3000;
    int rank0 = start(&g, 0, 0);
    for (int rank = 1; rank < 3; rank++) { start(&g, rank, 0); }
    usleep(100000); // they are probably accepted by now; if not, they try again until their limit
    kill(g.pids[rank0], SIGKILL);
    finish_all(&g);
    for (int i = 1; i < 3; i++) {
        check_msg(strstr(g.reports[i].error, "went away") || strstr(g.reports[i].error, "cannot reach"), "%s",
                  g.reports[i].error);
    }
    group_close(&g);
}

// A false rank 0 closes the connection after each number of bytes of its answers.
static void test_answers_cut(void) {
    uint8_t answers[4 * RENDEZVOUS_HEADER + BLOB];
    uint8_t blob[BLOB];
    for (int i = 0; i < BLOB; i++) { blob[i] = blob_byte((size_t)i); }
    size_t n = rdzv_write(answers, RDZV_ACCEPTED, run_token, NULL, 0);
    n += rdzv_write(answers + n, RDZV_START, run_token, blob, BLOB);
    n += rdzv_write(answers + n, RDZV_GO, run_token, NULL, 0);
    for (size_t k = 0; k <= n; k += k < 70 || k > n - 40 ? 1 : 20) {
        Group g;
        char text[64];
        group_open(&g, 2);
        g.how.limit_ms = 200;
        if (k > 0) { g.how.limit_ms = 20000; }
        start(&g, 1, 0);
        int fd = raw_accept(&g);
        raw_send(fd, answers, k);
        shutdown(fd, SHUT_WR);
        if (k > 2 * RENDEZVOUS_HEADER + BLOB) { check(raw_read(fd, text, sizeof(text)) == RDZV_READY); }
        close(fd);
        close(g.env.listen_fd); // an attempt to connect again is refused
        g.env.listen_fd = -1;
        finish_all(&g);
        if (k == n) { ok(&g, 0); }
        if (k == 0) { bad(&g, 0, "cannot reach rank 0 at 127.0.0.1:", ""); }
        if (k > 0 && k < n) { bad(&g, 0, "went away before all were ready", "rank 0 at 127.0.0.1:"); }
        group_close(&g);
    }
}

static void test_false_rank0(void) {
    static const char* const want[] = {"not rank 0 of this run, but another program that uses the port",
                                       "kind 99",
                                       "out of turn",
                                       "out of turn",
                                       "another version of the program (protocol 3",
                                       "does not answer rank 1"};
    for (int k = 0; k < 6; k++) {
        Group g;
        uint8_t data[RENDEZVOUS_MAX_MESSAGE];
        group_open(&g, 2);
        if (k == 5) { g.how.limit_ms = 200; } // silent
        start(&g, 1, 0);
        int fd = raw_accept(&g);
        size_t n = rdzv_write(data, RDZV_ACCEPTED, run_token, NULL, 0);
        if (k == 0) { n = (size_t)snprintf((char*)data, sizeof(data), "HTTP/1.1 400 Bad Request\r\n\r\n"); }
        if (k == 1) { n = rdzv_write(data, (RdzvKind)99, run_token, NULL, 0); }
        if (k == 2) { n = rdzv_write(data, RDZV_GO, run_token, NULL, 0); }
        if (k == 3) { n += rdzv_write(data + n, RDZV_START, run_token, NULL, 0); } // a blob of another size
        if (k == 4) { ranks_put(data + 8, 3, 4); }
        raw_send(fd, data, k == 5 ? 0 : n);
        finish_all(&g);
        close(fd);
        bad(&g, 0, want[k], "");
        group_close(&g);
    }
}

static void test_rank0_never_starts(void) {
    Group g;
    group_open_unbound(&g, 3);
    g.how.limit_ms = 200;
    start(&g, 1, 0);
    start(&g, 2, 0);
    finish_all(&g);
    bad(&g, 0, "rank 1 cannot reach rank 0 at 127.0.0.1:", "within 0.2 s: Connection refused. Has rank 0 started");
    bad(&g, 1, "rank 2 cannot reach rank 0 at 127.0.0.1:", "within 0.2 s: Connection refused");
    group_close(&g);
    group_open_unbound(&g, 2);
    g.how.limit_ms = 200;
    snprintf(g.env.address, sizeof(g.env.address), "%s", "-no-such-host-"); // the resolver asks nobody for this
    start(&g, 1, 0);
    finish_all(&g);
    bad(&g, 0, "-no-such-host-: cannot resolve this host name", "within 0.2 s");
    group_close(&g);
}

static void test_missing_ranks(void) {
    Group g;
    char host[256] = "", hosts[300];
    check(gethostname(host, sizeof(host) - 1) == 0);
    snprintf(hosts, sizeof(hosts), "Arrived, by host: %s (4).", host);
    group_open(&g, 10);
    g.how.limit_ms = 300;
    int fd = raw_connect(g.env.port); // its refusal is part of the message
    raw_send(fd, "GET", 3);
    start(&g, 0, 0);
    start(&g, 1, 0);
    start(&g, 3, 0);
    start(&g, 8, 0);
    finish_all(&g);
    close(fd);
    bad(&g, 0, "of 10 ranks these did not arrive within 0.3 s: ", "Last refused: a connection from 127.0.0.1:");
    // on a busy machine some of them may have come too late themselves
    bool found = strstr(g.reports[0].error, hosts) != NULL;
    for (int i = 0; i < 4 && found; i++) { bad(&g, i, "did not arrive within 0.3 s: 2, 4-7, 9. Arrived", hosts); }
    for (int n = 1; n < 4 && !found; n++) {
        snprintf(hosts, sizeof(hosts), "Arrived, by host: %s (%d).", host, n);
        found = strstr(g.reports[0].error, hosts) != NULL;
    }
    check_msg(found, "%s", g.reports[0].error);
    for (int i = 1; i < 4; i++) { check(!g.reports[i].ok && g.reports[i].error[0]); }
    group_close(&g);
}

static void test_port_taken(void) {
    static const char* const names[] = {"127.0.0.1", "localhost", "0.0.0.0"};
    for (int k = 0; k < 3; k++) { // the last one: every interface
        Group g;
        char text[64];
        group_open(&g, 2); // its socket is the other program
        int taken = g.env.listen_fd;
        g.env.listen_fd = -1;
        g.env.source = RANKS_TORCHRUN;
        snprintf(g.env.address, sizeof(g.env.address), "%s", names[k]);
        snprintf(text, sizeof(text), "%s:%d: another program uses this port", names[k], g.env.port);
        start(&g, 0, 0);
        finish_all(&g);
        close(taken);
        bad(&g, 0, text, "set MASTER_PORT to another one");
        group_close(&g);
    }
}

static void test_signal_ends_the_wait(void) {
    for (int who = 0; who < 3; who++) { // rank 0; a rank that was accepted; one that looks for rank 0
        Group g;
        if (who == 2) { group_open_unbound(&g, 3); }
        if (who < 2) { group_open(&g, 3); }
        if (who == 0) { g.how.limit_ms = 3000; } // of rank 1, if it is not accepted before rank 0 is gone
        if (who < 2) { start(&g, 0, 0); }
        int rank1 = start(&g, 1, 0);
        double end = time_ms() + 10000;
        while (!(g.reports[0].began && g.reports[rank1].began) && time_ms() < end) {
            usleep(1000);
        } // then it minds signals
        usleep(60000);
        kill(g.pids[who == 1 ? 1 : 0], SIGTERM);
        if (who == 1) { finish(&g, 1); }
        if (who == 1) { start(&g, 2, 0); }
        double begin = time_ms();
        finish_all(&g);
        check(time_ms() - begin < 10000);
        if (who == 0) { bad(&g, 0, "rank 0 was stopped by SIGTERM", ""); }
        if (who == 1) { bad(&g, 1, "rank 1 was stopped by SIGTERM", ""); }
        if (who == 1) { bad(&g, 0, "rank 1 (host ", "went away"); }
        if (who == 2) { bad(&g, 0, "rank 1 was stopped by SIGTERM", ""); }
        group_close(&g);
    }
}

// ---- the reader ------------------------------------------------------------------------------

static void test_parse(void) {
    Group g;
    uint8_t data[RENDEZVOUS_MAX_MESSAGE], copy[RENDEZVOUS_MAX_MESSAGE];
    RdzvMessage m;
    Error err;
    group_open_unbound(&g, 5);
    size_t n = hello_of(data, &g, 3);
    check(rdzv_parse(&m, data, n, &err) == (int)n);
    check(m.protocol == 1 && m.kind == RDZV_HELLO && m.token == run_token && m.rank == 3 && m.num_ranks == 5);
    check(m.pid == (uint32_t)getpid() && m.build == 77 && m.flags_hash == g.how.flags_hash);
    check(m.version.length == 3 && memcmp(m.version.data, "1.0", 3) == 0);
    check(m.flags.length == 15 && memcmp(m.flags.data, "batch=4\nlr=0.1\n", 15) == 0);
    // bytes at fixed places, whatever the machine
    check(data[8] == 1 && data[9] == 0 && data[12] == 1 && data[16] == 0x88 && data[23] == 0x11 && data[28] == 3);
    for (size_t k = 0; k < n; k++) { // from memory of exactly that size, so that the sanitizer sees a read behind it
        uint8_t* exact = (uint8_t*)malloc_check(k);
        memcpy(exact, data, k);
        check(rdzv_parse(&m, exact, k, &err) == RDZV_INCOMPLETE);
        free(exact);
    }
    memcpy(data + n, "next", 4);
    check(rdzv_parse(&m, data, n + 4, &err) == (int)n);
    for (size_t k = 0; k < n; k++) { // each byte changed: nothing is read outside, an error has a reason
        for (int bit = 0; bit < 8; bit++) {
            memcpy(copy, data, n);
            copy[k] ^= (uint8_t)(1 << bit);
            err.text[0] = '\0';
            int size = rdzv_parse(&m, copy, n, &err);
            check(size != RDZV_BAD || err.text[0]);
            check(k >= 8 || size == RDZV_BAD);
            check(k < 8 || k >= 12 || size == RDZV_OTHER_PROTOCOL);
        }
    }
    // lengths that lie
    static const struct {
        size_t at;
        int value, bytes;
    } lies[] = {{24, 27, 4},     {24, 0, 4}, {24, 1 << 20, 4}, {24, -1, 4},
                {56, 0xFFFF, 2}, {56, 4, 2}, {56, 2, 2},       {12, 0, 4}};
    for (size_t k = 0; k < sizeof(lies) / sizeof(lies[0]); k++) {
        memcpy(copy, data, n);
        ranks_put(copy + lies[k].at, (uint64_t)(int64_t)lies[k].value, lies[k].bytes);
        check_msg(rdzv_parse(&m, copy, n, &err) == RDZV_BAD, "lie %zu passes", k);
    }
    memcpy(copy, data, n); // a byte more than its fields have
    copy[n] = 0;
    ranks_put(copy + 24, n - RENDEZVOUS_HEADER + 1, 4);
    check(rdzv_parse(&m, copy, n + 1, &err) == RDZV_BAD);
    // the longest that can be
    char* flags = (char*)malloc_check(20000);
    memset(flags, 'x', 19999);
    flags[19999] = '\0';
    g.how.flags = flags;
    g.how.version = flags;
    n = hello_of(data, &g, 3);
    check(n <= RENDEZVOUS_MAX_MESSAGE && rdzv_parse(&m, data, n, &err) == (int)n &&
          m.flags.length == RENDEZVOUS_MAX_FLAGS);
    free(flags);
    group_close(&g);
}

static void test_first_difference(void) {
    static const char* const table[][3] = {
        {"a=1\nb=2\n", "a=1\nb=3\n", "b=2, rank 0 has b=3"},
        {"a=1", "a=1\nb=3", "nothing, rank 0 has b=3"},
        {"a=1\nb=3\n", "a=1\n", "b=3, rank 0 has nothing"},
        {"", "x", "nothing, rank 0 has x"},
        {"a=12", "a=1", "a=12, rank 0 has a=1"},
        {"a=1\n", "a=1", "of which the text does not show the difference"},
        {"", "", "of which the text does not show the difference"},
    };
    for (size_t k = 0; k < sizeof(table) / sizeof(table[0]); k++) {
        char out[400];
        RdzvText a = {table[k][0], strlen(table[k][0])}, b = {table[k][1], strlen(table[k][1])};
        rdzv_first_difference(out, sizeof(out), a, b);
        check_str(out, table[k][2]);
    }
}

static const Test tests[] = {
    {"all_arrive", "2, 3, 8 and 16 ranks, blobs of several sizes", test_all_arrive},
    {"barrier", "nobody returns before the last one has come", test_barrier},
    {"rank0_starts_late", "the others try until it listens", test_rank0_starts_late},
    {"one_rank", "needs nobody", test_one_rank},
    {"names", "IPv4, IPv6, names, every interface", test_names},
    {"refused_by_name", "version, binary, flags, number of ranks, rank: the same reason on all ranks",
     test_refused_by_name},
    {"other_protocol", "of a later version only the header is known", test_other_protocol},
    {"late_rank_is_told", "a rank that comes after the failure gets the reason", test_late_rank_is_told},
    {"doubled_rank", "the second one is refused, both are named, the others go on", test_doubled_rank},
    {"other_run", "a wrong token", test_other_run},
    {"refused_gets_the_answer", "although it sent more; masked", test_refused_gets_the_answer},
    {"strangers", "HTTP, TLS, SSH, a command for the terminal", test_strangers},
    {"many_strangers", "more silent connections than places", test_many_strangers},
    {"unexpected_messages", "each kind out of its turn", test_unexpected_messages},
    {"closed_after_each_byte", "of a hello", test_closed_after_each_byte},
    {"byte_by_byte", "a slow hello is a hello", test_byte_by_byte},
    {"silence", "and half a message: refused in time, the others go on", test_silence},
    {"client_dies", "after its hello, after ACCEPTED, after START", test_client_dies},
    {"client_hangs", "after START", test_client_hangs},
    {"rank0_dies", "kill -9 while ranks wait", test_rank0_dies},
    {"answers_cut", "rank 0 dies after each byte of its answers", test_answers_cut},
    {"false_rank0", "another program listens on the port", test_false_rank0},
    {"rank0_never_starts", "or has no address", test_rank0_never_starts},
    {"missing_ranks", "which ones, and which hosts did arrive", test_missing_ranks},
    {"port_taken", "address, port and remedy", test_port_taken},
    {"signal_ends_the_wait", "at once, and with a reason for all", test_signal_ends_the_wait},
    {"parse", "every prefix, every flipped bit, lengths that lie", test_parse},
    {"first_difference", "which flag differs", test_first_difference},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
