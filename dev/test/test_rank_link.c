/*
The link between 2 to 16 processes on this machine, as rendezvous() opens it: every rank gets every record; ranks that are out
of step, that die, that stop, that fail or that send garbage are named by all others, at once; nobody takes the end of a run
for a death; no process and no descriptor is left.
*/
#include "test.h"
#include "../../llmc/rendezvous.h"
#include <dirent.h>

enum { MAX_RANKS = 16, LONG_MS = 60000 }; // a limit that is not reached, even on a busy machine

typedef struct Group Group;

// What a rank does with its link. It returns what the rank reports.
typedef bool (*RankBody)(Group* g, RankLink* link, Error* err);

// What a rank reports, in memory that all processes share.
typedef struct {
    volatile bool open, ready; // the link is open; the rank has come to the place that the test waits for
    volatile double failed_ms; // when it learned of the failure
    bool returned, ok;
    char error[1024], more[1024]; // of the body; of whatever else the test looks at
    int new_fds;                  // descriptors after, less those before
    double value;
} Report;

struct Group {
    int num_ranks, rank;
    RankBody body;
    int variant; // for the body
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

static void run_rank(Group* g, int rank) {
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
    if (!rendezvous(&how, NULL, 0, &err)) { die("rendezvous: %s", err.text); }
    report->open = true;
    report->ok = g->body(g, &link, &err);
    if (!report->ok && report->failed_ms == 0) { report->failed_ms = time_ms(); }
    snprintf(report->error, sizeof(report->error), "%s", err.text);
    rank_link_close(&link, LONG_MS, NULL);
    report->new_fds = count_fds() - fds;
    report->returned = true;
    exit(0);
}

static void start(Group* g, int num_ranks, RankBody body, int variant) {
    char address[16], host[256] = "";
    Error err;
    memset(g, 0, sizeof(*g));
    g->num_ranks = g->env.num_ranks = num_ranks;
    g->body = body;
    g->variant = variant;
    g->env.progress_fd = g->env.listen_fd = -1;
    g->env.token = 5;
    snprintf(g->env.address, sizeof(g->env.address), "127.0.0.1");
    g->env.listen_fd = ranks_listen(address, &g->env.port, &err);
    void* shared = mmap(NULL, MAX_RANKS * sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (g->env.listen_fd < 0 || shared == MAP_FAILED || gethostname(host, sizeof(host) - 1)) { die("cannot prepare"); }
    g->reports = (Report*)shared;
    fflush(stdout);
    for (int rank = 0; rank < num_ranks; rank++) {
        g->pids[rank] = fork();
        if (g->pids[rank] < 0) { die("fork: %s", strerror(errno)); }
        if (g->pids[rank] == 0) { run_rank(g, rank); }
        snprintf(g->names[rank], sizeof(g->names[rank]), "rank %d (host %.64s, pid %ld)", rank, host,
                 (long)g->pids[rank]);
    }
    close(g->env.listen_fd);
}

// Waits for all ranks.
static void finish(Group* g) {
    for (int rank = 0; rank < g->num_ranks; rank++) {
        int status = 0;
        waitpid(g->pids[rank], &status, 0);
        const Report* r = &g->reports[rank];
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && !r->returned) { continue; } // by the test
        check_msg(status == 0 && r->returned, "rank %d ended with status %x", rank, (unsigned)status);
        check_msg(r->new_fds == 0, "rank %d has %d descriptors more", rank, r->new_fds);
    }
    check_msg(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "a process is left");
}

static void release(Group* g) { munmap(g->reports, MAX_RANKS * sizeof(Report)); }

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
        start(&g, num_ranks, body_sizes, 0);
        finish(&g);
        for (int rank = 0; rank < num_ranks; rank++) {
            check_msg(g.reports[rank].ok, "rank %d of %d: %s", rank, num_ranks, g.reports[rank].error);
        }
        release(&g);
    }
}

static const Test tests[] = {
    {"sizes", "1 to 16 ranks, records of 0 to 4096 bytes", test_sizes},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
