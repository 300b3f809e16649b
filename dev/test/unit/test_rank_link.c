/*
The link between 2 to 16 processes on this machine, as rendezvous() opens it: every rank gets every record; ranks that are out
of step, that die, that stop, that fail or that send garbage are named by all others, at once; nobody takes the end of a run
for a death; no process and no descriptor is left.
*/
#include "../test.h"
#include "../../../llmc/rendezvous.h"
#include <dirent.h>

enum { MAX_RANKS = 16, LONG_MS = 60000 }; // a limit that is not reached, even on a busy machine

typedef struct Group Group;

// What a rank does with its link. It returns what the rank reports.
typedef bool (*RankBody)(Group* g, RankLink* link, Error* err);

// What a rank reports, in memory that all processes share.
typedef struct {
    volatile bool ready; // the rank has come to the place that the test waits for
    volatile bool go;    // the test lets it go on
    bool returned, ok;
    char error[1024], more[1024]; // of the body; whatever else the test looks at
    double end_ms, value;         // when the body returned
    int new_fds;                  // descriptors after, less those before
} Report;

struct Group {
    int num_ranks, rank;
    RankBody body;
    int victim, variant; // for the body
    RankEnv env;
    pid_t pids[MAX_RANKS];
    char names[MAX_RANKS][200]; // "rank 3 (host b, pid 9)"
    Report* reports;            // (MAX_RANKS)
};

static int count_fds(void) {
    int n = 0;
    DIR* dir = opendir("/proc/self/fd");
    if (!dir) { return 0; }
    while (readdir(dir)) { n++; }
    closedir(dir);
    return n;
}

static void be_rank(Group* g, int rank) {
    Report* report = &g->reports[rank];
    Error err = {""};
    Rendezvous how;
    RankLink link;
    memset(&how, 0, sizeof(how));
    memset(&link, 0, sizeof(link));
    g->rank = g->env.rank = rank;
    if (rank > 0 || g->num_ranks == 1) {
        close(g->env.listen_fd);
        g->env.listen_fd = -1;
    }
    how.ranks = &g->env;
    how.version = "1.0";
    how.limit_ms = how.answer_ms = LONG_MS;
    how.link = &link;
    int fds = count_fds() - (g->env.listen_fd >= 0); // which rendezvous() closes
    report->ok = rendezvous(&how, NULL, 0, &err) && g->body(g, &link, &err);
    report->end_ms = time_ms();
    snprintf(report->error, sizeof(report->error), "%s", err.text);
    rank_link_close(&link, LONG_MS, NULL);
    report->new_fds = count_fds() - fds;
    report->returned = true;
    exit(0);
}

static void prepare(Group* g, int num_ranks, RankBody body, int victim, int variant) {
    char address[16];
    Error err;
    memset(g, 0, sizeof(*g));
    g->num_ranks = g->env.num_ranks = num_ranks;
    g->body = body;
    g->victim = victim;
    g->variant = variant;
    g->env.progress_fd = -1;
    g->env.token = 5;
    snprintf(g->env.address, sizeof(g->env.address), "127.0.0.1");
    g->env.listen_fd = ranks_listen(address, &g->env.port, &err);
    void* shared = mmap(NULL, MAX_RANKS * sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (g->env.listen_fd < 0 || shared == MAP_FAILED) { die("cannot prepare a group: %s", strerror(errno)); }
    g->reports = (Report*)shared;
}

static void start_rank(Group* g, int rank) {
    char host[256] = "";
    fflush(stdout);
    g->pids[rank] = fork();
    if (g->pids[rank] < 0 || gethostname(host, sizeof(host) - 1)) { die("fork: %s", strerror(errno)); }
    if (g->pids[rank] == 0) { be_rank(g, rank); }
    snprintf(g->names[rank], sizeof(g->names[rank]), "rank %d (host %.64s, pid %ld)", rank, host, (long)g->pids[rank]);
}

static void start(Group* g, int num_ranks, RankBody body, int victim, int variant) {
    prepare(g, num_ranks, body, victim, variant);
    for (int rank = 0; rank < num_ranks; rank++) { start_rank(g, rank); }
    close(g->env.listen_fd);
}

// Waits for all ranks.
static void finish(Group* g) {
    for (int rank = 0; rank < g->num_ranks; rank++) {
        int status = 0;
        if (g->pids[rank] == 0) { continue; }
        waitpid(g->pids[rank], &status, 0);
        const Report* r = &g->reports[rank];
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && !r->returned) { continue; } // by the test
        check_msg(status == 0 && r->returned, "rank %d ended with status %x", rank, (unsigned)status);
        check_msg(r->new_fds == 0, "rank %d has %d descriptors more", rank, r->new_fds);
    }
    check_msg(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "a process is left");
}

static void release(Group* g) { munmap(g->reports, MAX_RANKS * sizeof(Report)); }

// Waits until a rank, or all (-1), is ready.
static void wait_ready(const Group* g, int rank) {
    double end = time_ms() + LONG_MS;
    for (int i = 0; i < g->num_ranks; i++) {
        while ((rank < 0 || rank == i) && !g->reports[i].ready && time_ms() < end) { usleep(500); }
    }
}

// In a rank: it is ready, and waits for the test to let it go on.
static void pause_rank(Group* g) {
    double end = time_ms() + LONG_MS;
    g->reports[g->rank].ready = true;
    while (!g->reports[g->rank].go && time_ms() < end) { usleep(500); }
}

static void let_go(Group* g) {
    for (int i = 0; i < g->num_ranks; i++) { g->reports[i].go = true; }
}

// Every rank but one (-1: every rank) must have failed with two texts in its error.
static void expect_errors(int line, const Group* g, int but, const char* want, const char* also) {
    for (int i = 0; i < g->num_ranks; i++) {
        const Report* r = &g->reports[i];
        if (i == but || (!r->ok && strstr(r->error, want) && strstr(r->error, also))) { continue; }
        test_fail(__FILE__, line, "rank %d: %s, '%s', wanted '%s' and '%s'", i, r->ok ? "true" : "false", r->error,
                  want, also);
    }
}
#define bad(g, but, want, also) expect_errors(__LINE__, g, but, want, also)

// All but one must have returned within a time that is shorter than any limit or grace.
static void expect_soon(int line, const Group* g, int but, double begin_ms) {
    for (int i = 0; i < g->num_ranks; i++) {
        double took_ms = g->reports[i].end_ms - begin_ms;
        if (i != but && took_ms > 1900) { test_fail(__FILE__, line, "rank %d took %.0f ms", i, took_ms); }
    }
}
#define soon(g, but, begin_ms) expect_soon(__LINE__, g, but, begin_ms)

static void all_ok(int line, const Group* g) {
    for (int i = 0; i < g->num_ranks; i++) {
        const Report* r = &g->reports[i];
        if (!r->ok) { test_fail(__FILE__, line, "rank %d of %d: %s", i, g->num_ranks, r->error); }
    }
}

// The record of a rank in an exchange: byte i.
static uint8_t record_byte(int rank, uint32_t what, size_t i) { return (uint8_t)(i * 7 + (size_t)rank * 31 + what); }

static bool exchange(Group* g, RankLink* link, uint32_t what, size_t bytes, Error* err) {
    static uint8_t mine[RANK_LINK_MAX_BYTES], all[MAX_RANKS * RANK_LINK_MAX_BYTES + 1];
    bool same = true;
    for (size_t i = 0; i < bytes; i++) { mine[i] = record_byte(g->rank, what, i); }
    memset(all, 0xEE, sizeof(all));
    if (!rank_link_exchange(link, what, mine, all, bytes, LONG_MS, err)) { return false; }
    for (int rank = 0; rank < g->num_ranks; rank++) {
        for (size_t i = 0; i < bytes; i++) {
            same = same && all[(size_t)rank * bytes + i] == record_byte(rank, what, i);
        }
    }
    same = same && all[(size_t)g->num_ranks * bytes] == 0xEE;
    return same || error_set(err, "exchange %u of %zu bytes: wrong records", what, bytes);
}

// ---- when all goes well --------------------------------------------------------------------

static bool body_sizes(Group* g, RankLink* link, Error* err) {
    static const size_t sizes[] = {0, 1, 8, 100, 1000, RANK_LINK_MAX_BYTES};
    for (uint32_t k = 0; k < 6; k++) {
        if (!exchange(g, link, k, sizes[k], err)) { return false; }
    }
    return rank_link_close(link, LONG_MS, err);
}

static void test_sizes(void) {
    for (int num_ranks = 1; num_ranks <= 16; num_ranks += num_ranks < 4 ? 1 : 6) {
        Group g;
        start(&g, num_ranks, body_sizes, 0, 0);
        finish(&g);
        all_ok(__LINE__, &g);
        release(&g);
    }
}

static bool body_many(Group* g, RankLink* link, Error* err) {
    enum { COUNT = 1000 };
    double begin = time_ms();
    for (uint32_t k = 0; k < COUNT; k++) {
        if (!exchange(g, link, k, g->variant ? 1 + k * 37 % RANK_LINK_MAX_BYTES : 8, err)) { return false; }
    }
    g->reports[g->rank].value = 1e3 * (time_ms() - begin) / COUNT;
    return rank_link_close(link, LONG_MS, err);
}

static void test_many(void) {
    for (int variant = 0; variant < 2; variant++) {
        Group g;
        start(&g, variant ? 3 : 8, body_many, 0, variant);
        finish(&g);
        all_ok(__LINE__, &g);
        if (!variant) { printf("note: 8 ranks, an exchange of 8 bytes takes %.0f us\n", g.reports[0].value); }
        release(&g);
    }
}

// Buffers that are too small for rank 0's message: it goes in pieces.
static bool body_small_buffers(Group* g, RankLink* link, Error* err) {
    for (int i = 0; i < g->num_ranks; i++) {
        if (link->peers[i].fd >= 0) { link_set_option(link->peers[i].fd, SOL_SOCKET, SO_SNDBUF, 1); }
    }
    for (uint32_t k = 0; k < 20; k++) {
        if (g->rank == (int)k % g->num_ranks) { usleep(20000); } // the others wait, and do not read
        if (!exchange(g, link, k, RANK_LINK_MAX_BYTES, err)) { return false; }
    }
    return rank_link_close(link, LONG_MS, err);
}

static void test_small_buffers(void) {
    Group g;
    start(&g, 16, body_small_buffers, 0, 0);
    finish(&g);
    all_ok(__LINE__, &g);
    release(&g);
}

static bool body_in_place(Group* g, RankLink* link, Error* err) { // mine lies in all, where it belongs
    uint32_t all[MAX_RANKS] = {0};
    all[g->rank] = (uint32_t)g->rank + 7;
    if (!rank_link_exchange(link, 3, &all[g->rank], all, 4, 0, err)) { return false; } // without a limit
    for (int i = 0; i < g->num_ranks; i++) {
        if (all[i] != (uint32_t)i + 7) { return error_set(err, "rank %d's is %u", i, all[i]); }
    }
    return true;
}

static void test_in_place(void) {
    Group g;
    start(&g, 5, body_in_place, 0, 0);
    finish(&g);
    all_ok(__LINE__, &g);
    release(&g);
}

static bool body_close(Group* g, RankLink* link, Error* err) {
    if (!exchange(g, link, 1, 8, err)) { return false; }
    if (g->rank == g->victim) { usleep(100000); }
    g->reports[g->rank].value = time_ms();
    bool ok = rank_link_close(link, LONG_MS, err);
    return rank_link_close(link, LONG_MS, err) && ok; // a second time: nothing
}

static void test_close(void) {
    for (int last = 0; last < 4; last++) { // each rank in turn comes last
        Group g;
        start(&g, 4, body_close, last, 0);
        finish(&g);
        all_ok(__LINE__, &g);
        for (int rank = 0; rank < 4; rank++) {
            check_msg(g.reports[rank].end_ms >= g.reports[last].value, "rank %d did not wait for rank %d", rank, last);
        }
        release(&g);
    }
}

static bool body_one_rank(Group* g, RankLink* link, Error* err) {
    char names[100];
    double waited_ms;
    if (rank_link_lost(link, err) || rank_link_late(link, names, sizeof(names), &waited_ms) != 0) { return false; }
    rank_link_fail(link, "disk full");
    if (!rank_link_lost(link, err)) { return true; }
    return exchange(g, link, 1, 8, NULL) || rank_link_close(link, 0, err);
}

static void test_one_rank(void) {
    Group g;
    start(&g, 1, body_one_rank, 0, 0);
    finish(&g);
    bad(&g, -1, g.names[0], "): disk full");
    release(&g);
}

// ---- out of step -----------------------------------------------------------------------------

static bool body_out_of_step(Group* g, RankLink* link, Error* err) {
    if (!exchange(g, link, 1, 8, err)) { return false; }
    bool odd = g->rank == g->victim;
    if (g->variant == 2 && odd) { return rank_link_close(link, LONG_MS, err); }
    if (g->variant == 3 && odd) { pause_rank(g); } // and one that does not answer
    if (g->variant == 3 && g->rank == 2) { odd = true; }
    return exchange(g, link, g->variant != 1 && odd ? 8 : 7, g->variant == 1 && odd ? 100 : 8, err) &&
           exchange(g, link, 9, 8, err);
}

static void test_out_of_step(void) {
    for (int victim = 0; victim < 4; victim++) {
        for (int variant = 0; variant < 3; variant++) {
            Group g;
            char zero[300], other[300];
            static const char* const odd[] = {"is at 0x8 with 8 bytes", "is at 0x7 with 100 bytes",
                                              "is at 0xfffffffe with 0 bytes"};
            start(&g, 4, body_out_of_step, victim, variant);
            finish(&g);
            for (int rank = 0; rank < 4; rank++) {
                if (rank == 0 || (victim != 0 && rank != victim)) { continue; } // where rank 0 is
                snprintf(zero, sizeof(zero), "out of step: %s %s", g.names[0],
                         victim == 0 ? odd[variant] : "is at 0x7 with 8 bytes");
                snprintf(other, sizeof(other), "%s %s", g.names[rank],
                         victim == 0 ? "is at 0x7 with 8 bytes" : odd[variant]);
                bad(&g, -1, zero, other);
            }
            release(&g);
        }
    }
    Group g;
    char want[300];
    start(&g, 4, body_out_of_step, 3, 3);
    wait_ready(&g, 3);
    usleep(100000);
    snprintf(want, sizeof(want), "%s is at 0x8 with 8 bytes; no answer from %s", g.names[2], g.names[3]);
    double end = time_ms() + LONG_MS; // the others do not wait for it for ever
    while (g.reports[1].end_ms == 0 && time_ms() < end) { usleep(500); }
    let_go(&g);
    finish(&g);
    bad(&g, -1, want, "");
    release(&g);
}

// ---- death and silence -----------------------------------------------------------------------

// The victim waits for its end. The others wait for it in an exchange, or compute and then begin one.
static bool body_victim(Group* g, RankLink* link, Error* err) {
    if (!exchange(g, link, 1, 8, err)) { return false; }
    if (g->rank == g->victim || g->variant == 1) {
        pause_rank(g);
    } else {
        g->reports[g->rank].ready = true;
    }
    if (g->variant == 2) { return rank_link_close(link, LONG_MS, err); }
    return exchange(g, link, 2, 8, err);
}

static void test_killed(void) {
    static const int victims[] = {0, 1, 7};
    for (int k = 0; k < 9; k++) {
        Group g;
        char want[300];
        int victim = victims[k % 3], variant = k / 3; // the others wait; compute; wait for the end
        start(&g, 8, body_victim, victim, variant);
        wait_ready(&g, -1);
        usleep(50000);
        double begin = time_ms();
        kill(g.pids[victim], SIGKILL);
        if (variant == 1) { usleep(50000); }
        if (variant == 1) { let_go(&g); }
        finish(&g);
        snprintf(want, sizeof(want), "%s has ended", g.names[victim]);
        bad(&g, victim, want, "");
        soon(&g, victim, begin);
        release(&g);
    }
}

static bool body_stopped(Group* g, RankLink* link, Error* err) {
    uint8_t mine = 0, all[MAX_RANKS];
    if (!exchange(g, link, 1, 8, err)) { return false; }
    if (g->rank == g->victim) { pause_rank(g); }
    // rank 0 comes so late that the others would have given up on it, if it did not say that it waits itself
    if (g->rank == 0 && g->variant == 1) { usleep(2200000); }
    g->reports[g->rank].value = time_ms();
    return rank_link_exchange(link, 0x20000005, &mine, all, 1, g->variant == 1 ? 1000 : 300, err);
}

static void test_stopped(void) {
    for (int victim = 0; victim < 4; victim += 3) {
        for (int variant = 0; variant <= (victim > 0); variant++) {
            Group g;
            start(&g, 4, body_stopped, victim, variant);
            wait_ready(&g, victim);
            kill(g.pids[victim], SIGSTOP);
            double end = time_ms() + LONG_MS;
            for (int rank = 0; rank < 4; rank++) {
                while (rank != victim && g.reports[rank].end_ms == 0 && time_ms() < end) { usleep(1000); }
            }
            kill(g.pids[victim], SIGKILL);
            finish(&g);
            bad(&g, victim, "exchange 0x20000005: no answer for ", g.names[victim]);
            for (int rank = 0; rank < 4; rank++) {
                double took_ms = g.reports[rank].end_ms - g.reports[rank].value;
                check_msg(rank == victim || took_ms >= 290, "rank %d waited for %.0f ms only", rank, took_ms);
            }
            release(&g);
        }
    }
}

static bool body_waits_without_limit(Group* g, RankLink* link, Error* err) {
    uint8_t mine = 0, all[MAX_RANKS];
    if (g->rank == g->victim) { usleep(3000000); } // beyond WAIT and grace
    return rank_link_exchange(link, 1, &mine, all, 1, 0, err) && rank_link_exchange(link, 2, &mine, all, 1, 0, err);
}

static void test_no_limit(void) {
    for (int victim = 0; victim < 2; victim++) {
        Group g;
        start(&g, 3, body_waits_without_limit, victim, 0);
        finish(&g);
        all_ok(__LINE__, &g);
        release(&g);
    }
}

// ---- a rank that fails -------------------------------------------------------------------------

static bool body_fails(Group* g, RankLink* link, Error* err) {
    if (!exchange(g, link, 1, 8, err)) { return false; }
    if (g->rank == g->victim || g->variant == 1) { pause_rank(g); }
    if (g->rank == g->victim) {
        rank_link_fail(link, "step 7: cannot write \x1b[2J checkpoint");
        rank_link_fail(link, "a consequence of it");
        return rank_link_close(link, LONG_MS, err);
    }
    if (g->variant == 1) { usleep(100000); } // the text has arrived before they begin
    g->reports[g->rank].ready = true;
    bool ok = exchange(g, link, 2, 8, err);
    Error again = {""};
    ok = ok || exchange(g, link, 3, 8, &again);
    check_str(again.text, err->text);
    return ok || test_failures > 0;
}

static void test_failure(void) {
    static const int victims[] = {0, 1, 5};
    for (int k = 0; k < 6; k++) {
        Group g;
        char want[300];
        int victim = victims[k % 3];
        start(&g, 6, body_fails, victim, k / 3); // the others wait; compute
        wait_ready(&g, -1);
        if (k < 3) { usleep(50000); }
        double begin = time_ms();
        let_go(&g);
        finish(&g);
        snprintf(want, sizeof(want), "%s: step 7: cannot write ?[2J checkpoint", g.names[victim]);
        bad(&g, -1, want, "");
        soon(&g, -1, begin);
        for (int rank = 0; rank < 6; rank++) {
            check(g.reports[rank].error[0] == 'r'); // one name before the text
            // rank 0 has closed its end after the others have read its reason
            check(victim > 0 || g.reports[0].end_ms >= g.reports[rank].end_ms);
        }
        release(&g);
    }
}

// Rank 0 has failed and ended; the system has noticed that, because something was sent to it.
static bool body_fails_and_ends(Group* g, RankLink* link, Error* err) {
    if (g->rank == 0) { rank_link_fail(link, "its reason"); }
    if (g->rank == 0) { return rank_link_close(link, LONG_MS, err); }
    pause_rank(g);
    ranks_send(link->peers[0].fd, (const uint8_t*)"x", 1);
    usleep(50000);
    return exchange(g, link, 1, 8, err);
}

static void test_reason_of_an_ended_rank(void) {
    Group g;
    char want[300];
    start(&g, 3, body_fails_and_ends, 0, 0);
    double end = time_ms() + LONG_MS;
    while (!g.reports[0].returned && time_ms() < end) { usleep(500); }
    usleep(20000);
    let_go(&g);
    finish(&g);
    snprintf(want, sizeof(want), "%s: its reason", g.names[0]);
    for (int rank = 0; rank < 3; rank++) { check_str(g.reports[rank].error, want); }
    release(&g);
}

// FAIL does not break into a record that is half sent.
static void test_fail_amid_a_record(void) {
    for (int half = 0; half < 2; half++) {
        RankLink link;
        int pair[2];
        uint8_t data[100];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) { die("socketpair: %s", strerror(errno)); }
        link_open(&link, 0, 2);
        link_add(&link, 1, pair[0]);
        link.size = 100;
        link.peers[1].unsent = half ? 50 : 100;
        rank_link_fail(&link, "disk full");
        check((recv(pair[1], data, sizeof(data), MSG_DONTWAIT) > 0) == !half);
        close(pair[1]);
        check(!rank_link_close(&link, 0, NULL));
    }
}

// What its watchdog finds, in another thread.
typedef struct {
    RankLink* link;
    Report* report;
    double late_ms; // it reports a wait that is longer
    bool stop, lost;
    Error error;
} Watchdog;

static void* run_watchdog(void* data) {
    Watchdog* w = (Watchdog*)data;
    char names[1024];
    double waited_ms;
    for (bool lost = false; !lost && !__atomic_load_n(&w->stop, __ATOMIC_ACQUIRE);) {
        lost = rank_link_lost(w->link, &w->error);
        __atomic_store_n(&w->lost, lost, __ATOMIC_RELEASE);
        int count = rank_link_late(w->link, names, sizeof(names), &waited_ms);
        if (count > 0 && waited_ms > w->late_ms && !w->report->more[0]) {
            snprintf(w->report->more, sizeof(w->report->more), "%d: %.1000s", count, names);
        }
        usleep(2000);
    }
    return NULL;
}

// All ranks exchange while their watchdogs look on; then a rank fails in the watchdog's thread, amid an exchange.
static bool body_watched(Group* g, RankLink* link, Error* err) {
    Watchdog w = {link, &g->reports[g->rank], 200, false, false, {""}};
    pthread_t thread;
    bool ok = true;
    if (pthread_create(&thread, NULL, run_watchdog, &w) != 0) { return error_set(err, "no thread"); }
    for (uint32_t k = 0; k < 500 && ok; k++) { ok = exchange(g, link, k, 100, err); }
    if (ok && g->variant == 0) { usleep(20000 * (useconds_t)(g->num_ranks - g->rank)); } // one after the other
    __atomic_store_n(&w.stop, true, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    if (ok && w.lost) { return error_set(err, "%s, says the watchdog", w.error.text); }
    return ok && rank_link_close(link, LONG_MS, err);
}

static void test_watched(void) {
    Group g;
    start(&g, 5, body_watched, 0, 0);
    finish(&g);
    all_ok(__LINE__, &g);
    release(&g);
}

// The owner computes; the watchdog notices. The victim has sent its record, in variant 1, or fails, in variant 2.
static bool body_lost(Group* g, RankLink* link, Error* err) {
    Watchdog w = {link, &g->reports[g->rank], 200, false, false, {""}};
    double end = time_ms() + LONG_MS;
    pthread_t thread;
    if (!exchange(g, link, 1, 8, err)) { return false; }
    if (g->rank == g->victim) {
        g->reports[g->rank].ready = true;
        if (g->variant == 1) { return exchange(g, link, 2, RANK_LINK_MAX_BYTES, err); }
        pause_rank(g);
        rank_link_fail(link, "no more memory");
        return rank_link_close(link, LONG_MS, err);
    }
    if (pthread_create(&thread, NULL, run_watchdog, &w) != 0) { return error_set(err, "no thread"); }
    g->reports[g->rank].ready = true;
    while (!__atomic_load_n(&w.lost, __ATOMIC_ACQUIRE) && time_ms() < end) { usleep(500); }
    __atomic_store_n(&w.stop, true, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    bool ok = exchange(g, link, 2, 8, err); // gives the same reason
    check_str(err->text, w.error.text);
    return ok || test_failures > 0;
}

static void test_lost(void) {
    static const int victims[] = {0, 1, 3};
    for (int k = 0; k < 9; k++) {
        Group g;
        char want[300];
        int victim = victims[k % 3], variant = k / 3;
        if (victim == 0 && variant == 1) { continue; } // it sends its record last
        start(&g, 4, body_lost, victim, variant);
        wait_ready(&g, -1);
        usleep(50000);
        double begin = time_ms();
        if (variant < 2) { kill(g.pids[victim], SIGKILL); }
        if (variant == 2) { let_go(&g); }
        finish(&g);
        snprintf(want, sizeof(want), "%s%s", g.names[victim], variant < 2 ? " has ended" : ": no more memory");
        bad(&g, variant < 2 ? victim : -1, want, "");
        soon(&g, variant < 2 ? victim : -1, begin);
        release(&g);
    }
}

// In variant 1 rank 1 comes when rank 0 has long been waiting for others.
static bool body_late(Group* g, RankLink* link, Error* err) {
    Watchdog w = {link, &g->reports[g->rank], g->variant ? 1000 : 200, false, false, {""}};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_watchdog, &w) != 0) { return error_set(err, "no thread"); }
    if (g->rank == 0) { usleep(300000); }
    if (g->rank == 1 && g->variant) { usleep(1200000); }
    if (g->rank == 2 || g->rank == 3) { usleep(g->variant ? 3000000 : 1500000); }
    bool ok = exchange(g, link, 1, 8, err);
    __atomic_store_n(&w.stop, true, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    return ok;
}

static void test_late(void) {
    for (int variant = 0; variant < 2; variant++) {
        Group g;
        char want[700];
        start(&g, 5, body_late, 0, variant);
        finish(&g);
        all_ok(__LINE__, &g);
        snprintf(want, sizeof(want), "2: %s, %s", g.names[2], g.names[3]);
        // in variant 1, rank 1 may be in this list as well
        check_msg(strstr(g.reports[0].more, want + (variant ? 3 : 0)) != NULL, "rank 0: %s", g.reports[0].more);
        snprintf(want, sizeof(want), "1: %s", g.names[0]); // before rank 0 has said that it waits
        check_str(g.reports[1].more, variant ? "" : want);
        release(&g);
    }
}

// A second thread fails while the owner waits in an exchange.
static void* run_fail(void* data) {
    usleep(50000);
    rank_link_fail((RankLink*)data, "the watchdog's reason");
    return NULL;
}

static bool body_fails_in_thread(Group* g, RankLink* link, Error* err) {
    pthread_t thread;
    if (g->rank == 3) { pause_rank(g); } // the others wait for it
    if (g->rank != g->victim) { return exchange(g, link, 1, 8, err); }
    if (pthread_create(&thread, NULL, run_fail, link) != 0) { return error_set(err, "no thread"); }
    bool ok = exchange(g, link, 1, 8, err);
    g->reports[3].go = true;
    pthread_join(thread, NULL);
    return ok;
}

static void test_fail_in_thread(void) {
    for (int victim = 0; victim < 2; victim++) {
        Group g;
        char want[300];
        start(&g, 4, body_fails_in_thread, victim, 0);
        wait_ready(&g, 3);
        double begin = time_ms();
        finish(&g);
        snprintf(want, sizeof(want), "%s: the watchdog's reason", g.names[victim]);
        bad(&g, -1, want, "");
        soon(&g, -1, begin);
        release(&g);
    }
}

// ---- what no rank would send ---------------------------------------------------------------------

static const struct {
    int victim;       // sends
    size_t size;      // bytes of:
    const char* data; // (size)
    const char* want; // what the others say of it; NULL: it is a record
} garbage[] = {
    {2, 14, "GET / HTTP/1.1", "sent something that is no message of a rank: its first bytes are 'GET / HTTP/1.1'"},
    {2, 1, "G", "its first bytes are 'G'"},
    {2, 16, "LNK\xF6\1\0\0\0\5\0\0\0\4\0\0\0", "its first bytes are 'LNK"},
    {2, 16, "LNK\xF7\0\0\0\0\5\0\0\0\0\0\0\0", "sent a message of kind 0 and 0 bytes, which does not exist"},
    {2, 16, "LNK\xF7\4\0\0\0\5\0\0\0\0\0\0\0", "sent a message of kind 4 and 0 bytes, which does not exist"},
    {2, 16, "LNK\xF7\1\0\0\1\5\0\0\0\4\0\0\0", "sent a message of kind 16777217 and 4 bytes"},
    {2, 16, "LNK\xF7\1\0\0\0\5\0\0\0\1\x30\0\0", "sent a message of kind 1 and 12289 bytes"},
    {2, 16, "LNK\xF7\1\0\0\0\5\0\0\0\xFF\xFF\xFF\xFF", "sent a message of kind 1 and 4294967295 bytes"},
    {2, 16, "LNK\xF7\2\0\0\0\5\0\0\0\1\0\0\0", "sent a message of kind 2 and 1 bytes"},
    {2, 16, "LNK\xF7\3\0\0\0\5\0\0\0\0\4\0\0", "sent a message of kind 3 and 1024 bytes"},
    {2, 16, "LNK\xF7\2\0\0\0\5\0\0\0\0\0\0\0", "sent a message out of turn: kind 2, 0x5, 0 bytes"},
    {2, 36, "LNK\xF7\1\0\0\0\5\0\0\0\4\0\0\0abcdLNK\xF7\1\0\0\0\5\0\0\0\4\0\0\0", "out of turn: kind 1, 0x5, 4 bytes"},
    {2, 20, "LNK\xF7\1\0\0\0\5\0\0\0\4\0\0\0abcd", NULL},
    {2, 19, "LNK\xF7\3\0\0\0\5\0\0\0\3\0\0\0a\nb", ": a?b"},
    {2, 16, "LNK\xF7\3\0\0\0\0\0\0\0\0\0\0\0", "): a failure without a reason"},
    {0, 14, "GET / HTTP/1.1", "sent something that is no message of a rank: its first bytes are 'GET / HTTP/1.1'"},
    {0, 16, "LNK\xF7\1\0\0\0\6\0\0\0\x0C\0\0\0", "sent a message out of turn: kind 1, 0x6, 12 bytes"},
    {0, 16, "LNK\xF7\1\0\0\0\5\0\0\0\4\0\0\0", "sent a message out of turn: kind 1, 0x5, 4 bytes"},
    {0, 44, "LNK\xF7\2\0\0\0\5\0\0\0\0\0\0\0LNK\xF7\1\0\0\0\5\0\0\0\x0C\0\0\0abcdabcdabcd", NULL},
    {0, 19, "LNK\xF7\3\0\0\0\5\0\0\0\3\0\0\0a\nb", "a?b"},
};
enum { NUM_GARBAGE = sizeof(garbage) / sizeof(garbage[0]) };

// The victim sends it whole or, as the second NUM_GARBAGE variants, byte by byte.
static bool body_garbage(Group* g, RankLink* link, Error* err) {
    const uint8_t* data = (const uint8_t*)garbage[g->variant % NUM_GARBAGE].data;
    size_t size = garbage[g->variant % NUM_GARBAGE].size, step = g->variant < NUM_GARBAGE ? size : 1;
    bool is_record = !garbage[g->variant % NUM_GARBAGE].want;
    char all[MAX_RANKS * 4] = "", trash[100];
    if (g->rank == 1 && g->victim == 2) { pause_rank(g); } // so that rank 0 waits until it has seen all of the garbage
    if (g->rank != g->victim) {
        bool ok = rank_link_exchange(link, 5, "abcd", all, 4, LONG_MS, err);
        return ok && (memcmp(all, "abcdabcdabcd", 12) == 0 || error_set(err, "other records: %.12s", all));
    }
    for (size_t k = 0; k < size; k += step) {
        for (int i = 0; i < g->num_ranks; i++) {
            if (link->peers[i].fd >= 0) { ranks_send(link->peers[i].fd, data + k, step); }
        }
    }
    usleep(20000);
    g->reports[1].go = true;
    for (int i = 0; i < g->num_ranks && is_record; i++) { // reads the others' records, or the one message of rank 0
        double end = time_ms() + LONG_MS;
        size_t want = RANK_LINK_HEADER + (g->rank == 0 ? 4 : 12), got = 0;
        while (link->peers[i].fd >= 0 && got < want && time_ms() < end) {
            ssize_t n = recv(link->peers[i].fd, trash, want - got, 0);
            got += n > 0 ? (size_t)n : 0;
        }
    }
    return rank_link_close(link, LONG_MS, err);
}

static void test_garbage(void) {
    for (int k = 0; k < 2 * NUM_GARBAGE; k++) {
        Group g;
        int victim = garbage[k % NUM_GARBAGE].victim, before = test_failures;
        const char* want = garbage[k % NUM_GARBAGE].want;
        start(&g, 3, body_garbage, victim, k);
        finish(&g);
        if (!want) { all_ok(__LINE__, &g); }
        // the first wrong byte is enough
        if (want && k >= NUM_GARBAGE && strstr(want, "GET /")) { want = "its first bytes are 'G"; }
        if (want && k >= NUM_GARBAGE && strstr(want, "'LNK")) { want = "its first bytes are 'LNK?"; }
        if (want) { bad(&g, victim, want, victim > 0 || want[0] != 'a' ? g.names[victim] : ""); }
        check_msg(test_failures == before, "of message %d", k);
        release(&g);
    }
}

// The victim ends after each number of bytes of its record.
static bool body_cut(Group* g, RankLink* link, Error* err) {
    static const char record[] = "LNK\xF7\1\0\0\0\5\0\0\0\4\0\0\0abc"; // less a byte
    static const char answer[] = "LNK\xF7\1\0\0\0\5\0\0\0\x0C\0\0\0abc";
    char all[MAX_RANKS * 4];
    if (g->rank != g->victim) { return rank_link_exchange(link, 5, "abcd", all, 4, LONG_MS, err); }
    for (int i = 0; i < g->num_ranks; i++) {
        if (link->peers[i].fd < 0) { continue; }
        ranks_send(link->peers[i].fd, (const uint8_t*)(g->rank == 0 ? answer : record), (size_t)g->variant);
        shutdown(link->peers[i].fd, SHUT_WR);
    }
    return true;
}

static void test_cut(void) {
    for (int k = 0; k < 40; k++) {
        Group g;
        char want[300];
        int victim = k % 2 * 2;
        start(&g, 3, body_cut, victim, k / 2);
        finish(&g);
        snprintf(want, sizeof(want), "%s has ended", g.names[victim]);
        bad(&g, victim, want, "");
        release(&g);
    }
}

// A rank 0 whose first failure follows GO in the same segment, or that is gone.
static void test_after_go(void) {
    for (int k = 0; k < 2; k++) {
        Group g;
        uint8_t data[RENDEZVOUS_MAX_MESSAGE];
        prepare(&g, 2, body_one_rank, 0, 0);
        start_rank(&g, 1);
        int fd = accept(g.env.listen_fd, NULL, NULL);
        size_t n = rdzv_write(data, RDZV_ACCEPTED, g.env.token, NULL, 0);
        n += rdzv_write(data + n, RDZV_START, g.env.token, NULL, 0);
        n += rdzv_write(data + n, RDZV_GO, g.env.token, NULL, 0);
        if (k == 0) {
            memcpy(data + n, "LNK\xF7\3\0\0\0\0\0\0\0\4\0\0\0gone", 20);
            n += 20;
        }
        check(fd >= 0 && ranks_send(fd, data, n) == (ssize_t)n);
        if (k == 1) { usleep(50000); }
        if (k == 1) { shutdown(fd, SHUT_WR); }
        finish(&g);
        close(fd);
        close(g.env.listen_fd);
        if (k == 0) { check_str(g.reports[1].error, "gone"); }
        if (k == 1) { check_str(g.reports[1].error, "rank 0 (host unknown, pid 0) has ended"); }
        release(&g);
    }
}

static void test_parse(void) {
    uint8_t data[RANK_LINK_HEADER + 8], copy[RANK_LINK_HEADER];
    LinkFrame f;
    Error err;
    link_put_header(data, LINK_RECORD, 0x11223344, 0x4001);
    // bytes at fixed places, whatever the machine
    check(memcmp(data, "LNK\xF7\1\0\0\0\x44\x33\x22\x11\1\x40\0\0", RANK_LINK_HEADER) == 0);
    check(link_parse(&f, data, sizeof(data), 5, &err) == 1);
    check(f.kind == LINK_RECORD && f.what == 0x11223344 && f.length == 0x4001);
    check(link_parse(&f, data, sizeof(data), 4, &err) == -1); // more than four ranks have
    for (size_t k = 0; k < RANK_LINK_HEADER; k++) {           // from memory of exactly that size
        uint8_t* exact = (uint8_t*)malloc_check(k);
        memcpy(exact, data, k);
        check(link_parse(&f, exact, k, 5, &err) == 0);
        free(exact);
        for (int bit = 0; bit < 8; bit++) {
            memcpy(copy, data, RANK_LINK_HEADER);
            copy[k] ^= (uint8_t)(1 << bit);
            err.text[0] = '\0';
            int parsed = link_parse(&f, copy, RANK_LINK_HEADER, 5, &err);
            check((parsed == -1) == (err.text[0] != '\0'));
            check(parsed == (k >= 8 && k < 12) || parsed == -1 || k == 12 || k == 13);
            check(k >= 4 || link_parse(&f, copy, k + 1, 5, &err) == -1);
        }
    }
}

static const Test tests[] = {
    {"sizes", "1 to 16 ranks, records of 0 to 4096 bytes", test_sizes},
    {"many", "1,000 exchanges in a row; prints what one takes", test_many},
    {"small_buffers", "messages go in pieces", test_small_buffers},
    {"in_place", "a rank's record may lie in the result", test_in_place},
    {"close", "nobody leaves before the last one has come", test_close},
    {"one_rank", "exchanges with itself", test_one_rank},
    {"out_of_step", "in what, in bytes, at the end: each rank says who is where", test_out_of_step},
    {"killed", "kill -9 while the others wait, compute, wait for the end", test_killed},
    {"stopped", "kill -STOP: the limit names it", test_stopped},
    {"no_limit", "a long wait", test_no_limit},
    {"failure", "of rank 0 and of others: all give its reason", test_failure},
    {"reason_of_an_ended_rank", "is found behind the end", test_reason_of_an_ended_rank},
    {"fail_amid_a_record", "is dropped", test_fail_amid_a_record},
    {"watched", "a second thread finds nothing where there is nothing", test_watched},
    {"lost", "a second thread notices death and failure, and leaves the records alone", test_lost},
    {"fail_in_thread", "of a rank whose owner waits", test_fail_in_thread},
    {"late", "who is waited for", test_late},
    {"garbage", "wrong magic, kind, length or turn, whole and byte by byte", test_garbage},
    {"cut", "the end after each byte of a record", test_cut},
    {"after_go", "what follows the rendezvous in the same segment is the link's", test_after_go},
    {"parse", "every prefix, every flipped bit", test_parse},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
